// Activations f and their derivatives f' of one number, in operations that vectorise: no branch, no
// table, no call.
//
// In float the error is within 2 ulp of the value, or of its largest term if terms cancel; double uses
// the functions of the C library.
#pragma once

#include <math.h>

#include "angles.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// For loops with many callers: not inlined, they vectorise better.
#define TIGHTROPE_LOOP __attribute__((noinline))

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <class T>
TIGHTROPE_INLINE T choose(bool which, T yes, T no) { return which ? yes : no; }
TIGHTROPE_INLINE float magnitude(float x) { return bits<float>(bits<uint32_t>(x) & 0x7FFFFFFFu); }
TIGHTROPE_INLINE double magnitude(double x) { return __builtin_fabs(x); }
TIGHTROPE_INLINE float with_sign(float x, float of) {
  return bits<float>((bits<uint32_t>(x) & 0x7FFFFFFFu) | (bits<uint32_t>(of) & 0x80000000u));
}

// Adding this constant rounds to an integer and leaves it in the lowest bits.
constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23
TIGHTROPE_INLINE int32_t rounded(float shifted) { return int32_t(bits<uint32_t>(shifted) - bits<uint32_t>(kRounder)); }

TIGHTROPE_INLINE float exponential(float x) {
  // Beyond these limits e^x is 0 or infinite; NaN is not clamped.
  x = choose(x > 89.0f, 89.0f, x);
  x = choose(x < -104.0f, -104.0f, x);
  const float shifted = fma_(x, 1.44269502f, kRounder);
  const float n = shifted - kRounder;
  float r = fma_(n, -6.93145752e-1f, x);
  r = fma_(n, -1.42860677e-6f, r);
  float p = fma_(r, 1.38145988e-3f, 8.36871658e-3f);
  p = fma_(r, p, 4.16683890e-2f);
  p = fma_(r, p, 1.66665211e-1f);
  p = fma_(r, p, 4.99999940e-1f);
  p = fma_(r * r, p, r) + 1.0f;
  // 2^n as a product of two powers: n may lie outside the range of one exponent.
  const int32_t whole = rounded(shifted), half = whole >> 1;
  return p * bits<float>(uint32_t(half + 127) << 23) * bits<float>(uint32_t(whole - half + 127) << 23);
}
TIGHTROPE_INLINE double exponential(double x) { return __builtin_exp(x); }

// e^x − 1 for x <= 0.
TIGHTROPE_INLINE float less_one(float x) {
  float p = fma_(x, 1.59956908e-4f, 1.36370712e-3f);
  p = fma_(x, p, 8.32504407e-3f);
  p = fma_(x, p, 4.16652709e-2f);
  p = fma_(x, p, 1.66666552e-1f);
  p = fma_(x, p, 0.5f);
  return choose(x > -0.5f, fma_(x * x, p, x), exponential(x) - 1.0f);
}
TIGHTROPE_INLINE double less_one(double x) { return __builtin_expm1(x); }

// log(1 + x) for x in [0, 1], as 2 artanh(x / (2 + x)).
TIGHTROPE_INLINE float log_one(float x) {
  const float s = x / (2.0f + x), z = s * s;
  float p = fma_(z, 1.08962111e-1f, 8.57392177e-2f);
  p = fma_(z, p, 1.11507505e-1f);
  p = fma_(z, p, 1.42841980e-1f);
  p = fma_(z, p, 2.00000271e-1f);
  p = fma_(z, p, 3.33333343e-1f);
  const float twice = s + s;
  return fma_(twice * z, p, twice);
}
TIGHTROPE_INLINE double log_one(double x) { return __builtin_log1p(x); }

TIGHTROPE_INLINE float tangent(float x) {
  const float a = magnitude(x), z = x * x;
  float p = fma_(z, 2.23106612e-3f, -8.26709345e-3f);
  p = fma_(z, p, 2.17344407e-2f);
  p = fma_(z, p, -5.39524741e-2f);
  p = fma_(z, p, 1.33332476e-1f);
  p = fma_(z, p, -3.33333313e-1f);
  const float small = fma_(x * z, p, x);
  const float large = 1.0f - 2.0f / (exponential(a + a) + 1.0f);
  return choose(a < 0.6f, small, with_sign(large, x));
}
TIGHTROPE_INLINE double tangent(double x) { return __builtin_tanh(x); }

// e^(-t²/2), corrected for the rounding error of t².
TIGHTROPE_INLINE float bell(float t) {
  const float square = t * t;
#if defined(__FMA__) || defined(__aarch64__)
  const float rest = fma_(t, t, -square);
#else
  // Without FMA instructions: split into halves of 12 bits whose products are exact.
  const float high = bits<float>(bits<uint32_t>(t) & 0xFFFFF000u), low = t - high;
  const float rest = ((high * high - square) + 2.0f * high * low) + low * low;
#endif
  const float e = exponential(-0.5f * square);
  return choose(square < 1e30f, fma_(e * rest, -0.5f, e), e);
}

// Returns Φ(x), the standard normal distribution function. Writes e^(-x²/2): the density without its
// constant factor.
TIGHTROPE_INLINE float below(float x, float* density) {
  const float t = magnitude(x), u = 1.0f / fma_(0.33f, t, 1.0f);
  float p = fma_(u, -2.58295406e-2f, 1.48384750e-1f);
  p = fma_(u, p, -3.21950585e-1f);
  p = fma_(u, p, 2.91249514e-1f);
  p = fma_(u, p, -1.06579654e-1f);
  p = fma_(u, p, 1.45839244e-1f);
  p = fma_(u, p, 1.03721328e-1f);
  p = fma_(u, p, 1.33680001e-1f);
  p = fma_(u, p, 1.31478593e-1f);
  p = fma_(u, p, 6.33963373e-6f);
  *density = bell(t);
  const float tail = *density * p;
  return choose(x > 0.0f, 1.0f - tail, tail);
}
TIGHTROPE_INLINE double below(double x, double* density) {
  *density = __builtin_exp(-0.5 * x * x);
  return 0.5 * __builtin_erfc(x * -0.70710678118654752440);
}

// σ(x) and σ(-x), without cancellation.
template <class T>
TIGHTROPE_INLINE void sigmoids(T x, T* here, T* there) {
  const T e = exponential(-magnitude(x)), r = T(1) / (T(1) + e), other = e * r;
  *here = choose(x < T(0), other, r);
  *there = choose(x < T(0), r, other);
}

// Up to this angle, π/2 as a sum of three floats, or of four without FMA, is exact enough.
constexpr float kLargeAngle = 8192.0f;

TIGHTROPE_INLINE void sine_cosine(float x, float* s, float* c) {
  const float shifted = fma_(x, 6.36619747e-1f, kRounder);
  const float n = shifted - kRounder;
#if defined(__FMA__) || defined(__aarch64__)
  float r = fma_(n, -1.57079637e0f, x);
  r = fma_(n, 4.37113883e-8f, r);
  r = fma_(n, 1.71512451e-15f, r);
#else
  // Parts of π/2, so short that their products with n are exact.
  float r = x - n * 1.5703125f;
  r = r - n * 4.83512878418e-4f;
  r = r - n * 3.13855707645e-7f;
  r = r - n * 6.07710051e-11f;
#endif
  const uint32_t quarter = uint32_t(rounded(shifted));
  float cosine, sine;
  polynomials(r, &cosine, &sine);
  const float a = choose((quarter & 1) != 0, cosine, sine), b = choose((quarter & 1) != 0, sine, cosine);
  *s = choose((quarter & 2) != 0, -a, a);
  *c = choose(((quarter + 1) & 2) != 0, -b, b);
}

// Each activation: f and its derivative, `slope`.
struct None {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return x; }
  template <class T> static TIGHTROPE_INLINE T slope(T) { return T(1); }
};
struct Relu {
  // NaN stays NaN.
  template <class T> static TIGHTROPE_INLINE T f(T x) { return choose(x < T(0), T(0), x); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) { return choose(x > T(0), T(1), T(0)); }
};
struct Sigmoid {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return T(1) / (T(1) + exponential(-x)); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) {
    T here, there;
    sigmoids(x, &here, &there);
    return here * there;
  }
};
struct Silu {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return x / (T(1) + exponential(-x)); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) {
    T here, there;
    sigmoids(x, &here, &there);
    return here * fma_(x, there, T(1));
  }
};
struct Gelu {
  template <class T> static TIGHTROPE_INLINE T f(T x) {
    T density;
    return x * below(x, &density);
  }
  template <class T> static TIGHTROPE_INLINE T slope(T x) {
    T density;
    const T share = below(x, &density);
    return fma_(x * T(0.398942280401432678), density, share);
  }
};
struct Elu {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return choose(x > T(0), x, less_one(x)); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) { return choose(x > T(0), T(1), exponential(x)); }
};
struct Relu2 {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return Relu::f(x) * Relu::f(x); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) { return Relu::f(x) + Relu::f(x); }
};
struct Softplus {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return Relu::f(x) + log_one(exponential(-magnitude(x))); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) { return Sigmoid::f(x); }
};
struct Exp {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return exponential(x); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) { return exponential(x); }
};
struct LeakyRelu {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return choose(x > T(0), x, x * T(0.01)); }
  template <class T> static TIGHTROPE_INLINE T slope(T x) { return choose(x > T(0), T(1), T(0.01)); }
};
struct Tanh {
  template <class T> static TIGHTROPE_INLINE T f(T x) { return tangent(x); }
  // 1 − tanh(|x|)², with tanh(|x|) = 1 − q.
  template <class T> static TIGHTROPE_INLINE T slope(T x) {
    const T a = magnitude(x), q = T(2) / (exponential(a + a) + T(1));
    return q * (T(2) - q);
  }
};
struct Sine {
  static TIGHTROPE_INLINE float f(float x) {
    float s, c;
    sine_cosine(x, &s, &c);
    return s;
  }
  static TIGHTROPE_INLINE float slope(float x) {
    float s, c;
    sine_cosine(x, &s, &c);
    return c;
  }
  static TIGHTROPE_INLINE double f(double x) { return __builtin_sin(x); }
  static TIGHTROPE_INLINE double slope(double x) { return __builtin_cos(x); }
};
struct Cosine {
  static TIGHTROPE_INLINE float f(float x) {
    float s, c;
    sine_cosine(x, &s, &c);
    return c;
  }
  static TIGHTROPE_INLINE float slope(float x) {
    float s, c;
    sine_cosine(x, &s, &c);
    return -s;
  }
  static TIGHTROPE_INLINE double f(double x) { return __builtin_cos(x); }
  static TIGHTROPE_INLINE double slope(double x) { return -__builtin_sin(x); }
};

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
