// Activations f and their derivatives f': of one number, in operations that vectorise (no branch, no table, no
// call), or of a register.
//
// In float: in double, a call with f or P runs the definition. The error is within 2 ulp of the value, or of its largest
// term if terms cancel; more if the value is subnormal. sigmoid and silu are 0 where 1 + e^-x overflows, as in torch. If
// the result is rounded to bfloat16 (`brief`), polynomials are short: an error below 2^-18 changes one rounding in
// thousands.
#pragma once

#include <math.h>

#include "angles.h"
#include "vectors.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

TIGHTROPE_INLINE float root(float x) { return __builtin_sqrtf(x); }

template <class T>
TIGHTROPE_INLINE T choose(bool which, T yes, T no) { return which ? yes : no; }
TIGHTROPE_INLINE float magnitude(float x) { return bits<float>(bits<uint32_t>(x) & 0x7FFFFFFFu); }
TIGHTROPE_INLINE double magnitude(double x) { return __builtin_fabs(x); }
// The smaller and the larger of a limit and x; NaN if x is NaN.
template <class T>
TIGHTROPE_INLINE T at_most(T limit, T x) { return choose(x > limit, limit, x); }
template <class T>
TIGHTROPE_INLINE T at_least(T limit, T x) { return choose(x < limit, limit, x); }

// An integer as an int: the difference in bits from kRounder, which these numbers are.
TIGHTROPE_INLINE int32_t whole_of(float x) { return int32_t(bits<uint32_t>(x + 0x1.8p23f) - 0x4B400000u); }
TIGHTROPE_INLINE float power_of_two(int32_t n) { return bits<float>(uint32_t(n + 127) << 23); }
// p · 2^whole, in two steps: one exponent has no room for the product's whole range. The first is exact.
template <class T>
TIGHTROPE_INLINE T scaled(T p, T whole) {
  const auto n = whole_of(whole), half = n >> 1;
  return p * power_of_two(half) * power_of_two(n - half);
}

template <bool brief = false, class T>
TIGHTROPE_INLINE T exponential(T x) {
  // Beyond these limits e^x is 0 or infinite.
  x = at_least(all<T>(-104), at_most(all<T>(89), x));
  if constexpr (brief) {
    const T t = x * all<T>(1.44269502), n = rounded_down(t);
    return scaled(polynomial(t - n, 1.3534168e-2, 5.2011464e-2, 2.4144275e-1, 6.9300383e-1, 1.0000026), n);
  } else {
    // e^x = 2^n · (1 + y)
    const T n = nearest(x, 1.44269504088896341);
    const T r = fma_(n, all<T>(-1.42860677e-6), fma_(n, all<T>(-6.93145752e-1), x));
    const T p = polynomial(r, 1.38145988e-3, 8.36871658e-3, 4.16683890e-2, 1.66665211e-1, 4.99999940e-1);
    const T y = fma_(r * r, p, r);
    return scaled(y + all<T>(1), n);
  }
}

// e^x − 1 for x <= 0.
template <bool brief, class T>
TIGHTROPE_INLINE T less_one(T x) {
  const T p = polynomial(x, 1.59956908e-4, 1.36370712e-3, 8.32504407e-3, 4.16652709e-2, 1.66666552e-1, 0.5);
  return choose(x > all<T>(-0.5), fma_(x * x, p, x), exponential<brief>(x) - all<T>(1));
}

// log(1 + x) for x in [0, 1], as 2 artanh(x / (2 + x)).
template <class T>
TIGHTROPE_INLINE T log_one(T x) {
  const T s = x / (all<T>(2) + x), z = s * s, twice = s + s;
  const T p =
      polynomial(z, 1.08962111e-1, 8.57392177e-2, 1.11507505e-1, 1.42841980e-1, 2.00000271e-1, 3.33333343e-1);
  return fma_(twice * z, p, twice);
}

template <bool brief, class T>
TIGHTROPE_INLINE T tangent(T x) {
  const T a = magnitude(x), z = x * x;
  const T p =
      polynomial(z, 2.23106612e-3, -8.26709345e-3, 2.17344407e-2, -5.39524741e-2, 1.33332476e-1, -3.33333313e-1);
  const T large = all<T>(1) - all<T>(2) / (exponential<brief>(a + a) + all<T>(1));
  return choose(a < all<T>(0.6), fma_(x * z, p, x), with_sign(large, x));
}

// Returns Φ(x), the standard normal distribution function. Writes e^(-x²/2): the density without its
// constant factor. The smaller of Φ(x) and Φ(-x) is that number times a polynomial of u.
template <bool brief, class T>
TIGHTROPE_INLINE T below(T x, T* density) {
  const T t = magnitude(x), u = all<T>(1) / fma_(all<T>(0.33), t, all<T>(1)), square = t * t;
  const T p = polynomial(u, -2.58295406e-2, 1.48384750e-1, -3.21950585e-1, 2.91249514e-1, -1.06579654e-1,
                         1.45839244e-1, 1.03721328e-1, 1.33680001e-1, 1.31478593e-1, 6.33963373e-6);
  T e = exponential<brief>(all<T>(-0.5) * square);
  if (!brief) e = choose(square < all<T>(1e30), fma_(e * fms_(t, t, square), all<T>(-0.5), e), e);
  *density = e;
  const T tail = e * p;
  return choose(x > all<T>(0), all<T>(1) - tail, tail);
}

// σ(x) and σ(-x), without cancellation.
template <bool brief, class T>
TIGHTROPE_INLINE void sigmoids(T x, T* here, T* there) {
  const T e = exponential<brief>(-magnitude(x)), r = all<T>(1) / (all<T>(1) + e), other = e * r;
  *here = choose(x < all<T>(0), other, r);
  *there = choose(x < all<T>(0), r, other);
}

// Up to this angle, π/2 as a sum of three numbers is exact enough.
constexpr float kLargeAngle = 8192.0f;

template <class T>
TIGHTROPE_INLINE void sine_cosine(T x, T* s, T* c) {
  const T n = nearest(x, 6.36619772367581343e-1);
  T r = fma_(n, all<T>(-1.57079637e0), x);
  r = fma_(n, all<T>(4.37113883e-8), r);
  r = fma_(n, all<T>(1.71512451e-15), r);
  const auto quarter = whole_of(n);
  T cosine, sine;
  polynomials(r, &cosine, &sine);
  const T a = choose((quarter & 1) != 0, cosine, sine), b = choose((quarter & 1) != 0, sine, cosine);
  *s = choose((quarter & 2) != 0, -a, a);
  *c = choose(((quarter + 1) & 2) != 0, -b, b);
}

// Each activation: f and its derivative, `slope`.
struct None {
  template <bool, class T> static TIGHTROPE_INLINE T f(T x) { return x; }
  template <bool, class T> static TIGHTROPE_INLINE T slope(T) { return all<T>(1); }
};
struct Relu {
  // NaN stays NaN, and its slope is 1, as in torch.
  template <bool, class T> static TIGHTROPE_INLINE T f(T x) { return at_least(all<T>(0), x); }
  template <bool, class T> static TIGHTROPE_INLINE T slope(T x) { return choose(x <= all<T>(0), all<T>(0), all<T>(1)); }
};
struct Sigmoid {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) {
    return all<T>(1) / (all<T>(1) + exponential<brief>(-x));
  }
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) {
    T here, there;
    sigmoids<brief>(x, &here, &there);
    return here * there;
  }
};
struct Silu {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) { return x / (all<T>(1) + exponential<brief>(-x)); }
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) {
    T here, there;
    sigmoids<brief>(x, &here, &there);
    return here * fma_(x, there, all<T>(1));
  }
};
struct Gelu {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) {
    T density;
    return x * below<brief>(x, &density);
  }
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) {
    T density;
    const T share = below<brief>(x, &density);
    return fma_(x * all<T>(0.398942280401432678), density, share);
  }
};
struct Elu {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) {
    return choose(x > all<T>(0), x, less_one<brief>(x));
  }
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) {
    return choose(x > all<T>(0), all<T>(1), exponential<brief>(x));
  }
};
struct Relu2 {
  template <bool, class T> static TIGHTROPE_INLINE T f(T x) {
    const T y = at_least(all<T>(0), x);
    return y * y;
  }
  template <bool, class T> static TIGHTROPE_INLINE T slope(T x) {
    const T y = at_least(all<T>(0), x);
    return y + y;
  }
};
struct Softplus {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) {
    return at_least(all<T>(0), x) + log_one(exponential<brief>(-magnitude(x)));
  }
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) { return Sigmoid::f<brief>(x); }
};
struct Exp {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) { return exponential<brief>(x); }
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) { return exponential<brief>(x); }
};
struct LeakyRelu {
  template <bool, class T> static TIGHTROPE_INLINE T f(T x) { return choose(x > all<T>(0), x, x * all<T>(0.01)); }
  template <bool, class T> static TIGHTROPE_INLINE T slope(T x) {
    return choose(x > all<T>(0), all<T>(1), all<T>(0.01));
  }
};
struct Tanh {
  template <bool brief, class T> static TIGHTROPE_INLINE T f(T x) { return tangent<brief>(x); }
  // 1 − tanh(|x|)², with tanh(|x|) = 1 − q.
  template <bool brief, class T> static TIGHTROPE_INLINE T slope(T x) {
    const T a = magnitude(x), q = all<T>(2) / (exponential<brief>(a + a) + all<T>(1));
    return q * (all<T>(2) - q);
  }
};
// sin or cos. Beyond kLargeAngle, callers use the C library: `far`.
template <bool cosine>
struct Wave {
  template <bool, class T> static TIGHTROPE_INLINE T f(T x) {
    T s, c;
    sine_cosine(x, &s, &c);
    return cosine ? c : s;
  }
  template <bool, class T> static TIGHTROPE_INLINE T slope(T x) {
    const T y = Wave<!cosine>::template f<false>(x);
    return cosine ? -y : y;
  }
  static double far(double x, bool slope) {
    const double y = cosine == slope ? __builtin_sin(x) : __builtin_cos(x);
    return cosine && slope ? -y : y;
  }
};

template <class A>
constexpr bool kIsWave = kIs<A, Wave<false>> || kIs<A, Wave<true>>;

// Calls use(A()) for an elementwise activation A; returns false for the others.
template <class Use>
inline bool with_act(Act act, const Use& use) {
  switch (act) {
    case Act::kNone: return use(None()), true;
    case Act::kRelu: return use(Relu()), true;
    case Act::kSigmoid: return use(Sigmoid()), true;
    case Act::kSilu: return use(Silu()), true;
    case Act::kGelu: return use(Gelu()), true;
    case Act::kElu: return use(Elu()), true;
    case Act::kRelu2: return use(Relu2()), true;
    case Act::kSoftplus: return use(Softplus()), true;
    case Act::kExp: return use(Exp()), true;
    case Act::kLeakyRelu: return use(LeakyRelu()), true;
    case Act::kTanh: return use(Tanh()), true;
    case Act::kSin: return use(Wave<false>()), true;
    case Act::kCos: return use(Wave<true>()), true;
    case Act::kSoftmax:
    case Act::kRmsNorm: break;
  }
  return false;
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
