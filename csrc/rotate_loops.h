// The loops, compiled once per instruction set: the including file defines TIGHTROPE_ISA.
//
// Every element takes the same sequence of IEEE operations whatever the loop around it, with fused
// multiply-adds written out and contraction switched off, so a result does not depend on where the
// vector body ends, on strides, on threads or on being in place.
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "rotate.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

#if defined(__FMA__) || defined(__aarch64__)
inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
// Without the instruction a fused multiply-add is a library call; two roundings stay in tolerance.
inline float fma_(float a, float b, float c) { return a * b + c; }
inline double fma_(double a, double b, double c) { return a * b + c; }
#endif

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- storage formats: how a value in memory becomes the value that is computed with -------------

struct Float {
  using Stored = float;
  using Value = float;
  static inline Value load(Stored x) { return x; }
  static inline Stored store(Value x) { return x; }
};

struct Double {
  using Stored = double;
  using Value = double;
  static inline Value load(Stored x) { return x; }
  static inline Stored store(Value x) { return x; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static inline Value load(Stored x) { return bits<float>(uint32_t(x) << 16); }
  static inline Stored store(Value x) {
    const uint32_t u = bits<uint32_t>(x);
    // A NaN needs no care: none that arises from bfloat16 inputs has a bit in its lower half, so
    // the addition cannot carry it into an infinity.
    return Stored((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
};

struct Half {
  using Stored = uint16_t;
  using Value = float;
  static inline Value load(Stored x) {
    const uint32_t sign = uint32_t(x & 0x8000u) << 16;
    const uint32_t magnitude = x & 0x7FFFu;
    // Multiplying by 2^112 moves the exponent and normalises subnormals, exactly.
    const float scaled = bits<float>(magnitude << 13) * 5.192296858534828e33f;
    const uint32_t special = (magnitude << 13) | 0x7F800000u;
    return bits<float>((magnitude >= 0x7C00u ? special : bits<uint32_t>(scaled)) | sign);
  }
  static inline Stored store(Value x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14, adding 1/2 lets the adder round to multiples of 2^-24.
    const uint32_t small = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
    uint32_t r = magnitude < 0x38800000u ? small : normal;
    r = magnitude >= 0x477FF000u ? 0x7C00u : r;
    r = magnitude > 0x7F800000u ? nan : r;
    return Stored(r | sign);
  }
};

// ---- angles ------------------------------------------------------------------------------------

// A position as an integer and a fraction in [-1/2, 1/2] in units of 2^-63.
struct Split {
  int64_t whole;
  int64_t fraction;
  bool lost;  // NaN, infinite, or too large for an integer
};

template <class T>
inline Split split(T position) {
  if (!(position < T(4611686018427387904.0) && position > T(-4611686018427387904.0))) {
    return {0, 0, true};
  }
  // To nearest even, without a call that SSE2 has no instruction for.
  int64_t whole = int64_t(position);
  T rest = position - T(whole);
  if (rest > T(0.5) || (rest == T(0.5) && (whole & 1))) {
    whole += 1;
    rest -= T(1);
  } else if (rest < T(-0.5) || (rest == T(-0.5) && (whole & 1))) {
    whole -= 1;
    rest += T(1);
  }
  return {whole, int64_t(rest * T(9223372036854775808.0)), false};
}

inline Split position_at(const Problem& p, int64_t axis, int64_t row, int64_t token) {
  const int64_t at = axis * p.position_axis + row * p.position_row + token * p.position_token;
  Split s = {0, 0, false};
  switch (p.position_dtype) {
    case PositionDtype::kNone:
      break;
    case PositionDtype::kInt32:
      s.whole = static_cast<const int32_t*>(p.positions)[at];
      break;
    case PositionDtype::kInt64:
      s.whole = static_cast<const int64_t*>(p.positions)[at];
      break;
    case PositionDtype::kFloat:
      s = split(static_cast<const float*>(p.positions)[at]);
      break;
    case PositionDtype::kDouble:
      s = split(static_cast<const double*>(p.positions)[at]);
      break;
  }
  s.whole = int64_t(uint64_t(s.whole) + uint64_t(p.offset) + uint64_t(p.ramp ? token : 0));
  return s;
}

// floor(a * b / 2^64), at most 2 too small: the definition's own arithmetic (angles.py).
inline uint64_t high_product(int64_t a, int64_t b) {
  const int64_t a_high = a >> 32, a_low = a & 0xFFFFFFFF;
  const int64_t b_high = b >> 32, b_low = b & 0xFFFFFFFF;
  return uint64_t(a_high * b_high) + uint64_t((a_high * b_low) >> 32) +
         uint64_t((a_low * b_high) >> 32);
}

// Phases of pairs [first, first + n) of one token; false if the position is no number.
inline bool phases(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t first,
                   int64_t n, uint64_t* __restrict phase) {
  bool found = true;
  for (int64_t axis = 0; axis < p.axes; ++axis) {
    const Split s = position_at(p, axis, row, token);
    found = found && !s.lost;
    const int64_t at = ((axis * p.word_rows + (p.word_rows == 1 ? 0 : row)) * p.word_heads +
                        (p.word_heads == 1 ? 0 : head)) *
                           p.pairs +
                       first;
    const int64_t* __restrict word = p.words + at;
    const uint64_t whole = uint64_t(s.whole);
    if (axis == 0) {
      for (int64_t k = 0; k < n; ++k) phase[k] = whole * uint64_t(word[k]);
    } else {
      for (int64_t k = 0; k < n; ++k) phase[k] += whole * uint64_t(word[k]);
    }
    if (s.fraction != 0) {
      for (int64_t k = 0; k < n; ++k) phase[k] += 2 * high_product(s.fraction, word[k]);
      if (p.turns != nullptr) {
        const int64_t* __restrict turn = p.turns + at;
        for (int64_t k = 0; k < n; ++k) phase[k] += 2 * (uint64_t(s.fraction) * uint64_t(turn[k]));
      }
    }
  }
  return found;
}

// The remainder of a phase after its nearest quarter turn, in radians, in [-π/4, π/4]. In float the
// 48 leading bits enter as two exact numbers, so only the constant and the sum round.
inline void radians(uint64_t remainder, float* angle) {
  const int32_t high = int32_t(uint32_t(remainder >> 32)) >> 8;
  const int32_t low = int32_t(uint32_t(remainder >> 16) & 0xFFFFFFu);
  const float lower = fma_(float(high), -1.04216075e-14f, float(low) * 2.23223584e-14f);
  *angle = fma_(float(high), 3.74507039e-07f, lower);
}
inline void radians(uint64_t remainder, double* angle) {
  *angle = double(int64_t(remainder)) * 3.40612158008655459e-19;
}

// Minimax polynomials on [-π/4, π/4]: 9.2e-9 and 7e-10 from sine and cosine in float, 9e-18 and
// 4e-19 in double, before rounding.
inline void polynomials(float x, float* cosine, float* sine) {
  const float z = x * x;
  float s = fma_(z, -1.95878657e-4f, 8.33274815e-3f);
  s = fma_(z, s, -1.66666647e-1f);
  *sine = fma_(x * z, s, x);
  float c = fma_(z, 2.45479169e-5f, -1.38883029e-3f);
  c = fma_(z, c, 4.16666647e-2f);
  *cosine = fma_(z * z, c, fma_(z, -0.5f, 1.0f));
}
inline void polynomials(double x, double* cosine, double* sine) {
  const double z = x * x;
  double s = fma_(z, 1.59181152632659752e-10, -2.50511316502351815e-8);
  s = fma_(z, s, 2.75573161016178744e-6);
  s = fma_(z, s, -1.98412698367567725e-4);
  s = fma_(z, s, 8.33333333333094729e-3);
  s = fma_(z, s, -1.66666666666666646e-1);
  *sine = fma_(x * z, s, x);
  double c = fma_(z, -1.13826236474746046e-11, 2.08761461465586116e-9);
  c = fma_(z, c, -2.7557317271145146e-7);
  c = fma_(z, c, 2.48015872987645608e-5);
  c = fma_(z, c, -1.38888888888873965e-3);
  c = fma_(z, c, 4.16666666666666654e-2);
  *cosine = fma_(z * z, c, fma_(z, -0.5, 1.0));
}

template <class T>
inline void cos_sin(const uint64_t* __restrict phase, int64_t n, bool conjugate, T amplitude,
                    T* __restrict cosine, T* __restrict sine) {
  const T sine_amplitude = conjugate ? -amplitude : amplitude;
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t shifted = phase[k] + (uint64_t(1) << 61);
    const uint32_t quarter = uint32_t(shifted >> 62);
    T x, c, s;
    radians(phase[k] - (shifted & (uint64_t(3) << 62)), &x);
    polynomials(x, &c, &s);
    const T swapped_c = quarter & 1 ? s : c;
    const T swapped_s = quarter & 1 ? c : s;
    cosine[k] = ((quarter + 1) & 2 ? -swapped_c : swapped_c) * amplitude;
    sine[k] = (quarter & 2 ? -swapped_s : swapped_s) * sine_amplitude;
  }
}

// ---- one head of one token -----------------------------------------------------------------------

template <class T>
inline T turned_u(T u, T v, T c, T s) { return fma_(u, c, -(v * s)); }
template <class T>
inline T turned_v(T u, T v, T c, T s) { return fma_(v, c, u * s); }

// Pairs (u[k], v[k]) that are contiguous in k. `restrict` differs in place and out of place, which
// is why there are two loops of one line each.
template <class F>
inline void turn_halves_(typename F::Stored* __restrict u, typename F::Stored* __restrict v,
                         const typename F::Value* __restrict c,
                         const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(u[k]), b = F::load(v[k]);
    u[k] = F::store(turned_u(a, b, c[k], s[k]));
    v[k] = F::store(turned_v(a, b, c[k], s[k]));
  }
}
template <class F>
inline void turn_halves(const typename F::Stored* __restrict u,
                        const typename F::Stored* __restrict v, typename F::Stored* __restrict y,
                        typename F::Stored* __restrict z, const typename F::Value* __restrict c,
                        const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(u[k]), b = F::load(v[k]);
    y[k] = F::store(turned_u(a, b, c[k], s[k]));
    z[k] = F::store(turned_v(a, b, c[k], s[k]));
  }
}

// Two bfloat16 in one 32-bit word widen with a shift and a mask, without moving lanes; so pairs are
// handled in twos, and their cosines and sines are kept in the order (0, 2, 4, …, 1, 3, 5, …).
typedef uint32_t __attribute__((aligned(2), may_alias)) Twin;

inline float even(uint32_t twin) { return bits<float>(twin << 16); }
inline float odd(uint32_t twin) { return bits<float>(twin & 0xFFFF0000u); }
inline uint32_t twin(float even, float odd) {
  const uint32_t e = bits<uint32_t>(even), o = bits<uint32_t>(odd);
  const uint32_t low = (e + 0x7FFFu + ((e >> 16) & 1u)) >> 16;
  const uint32_t high = (o + 0x7FFFu + ((o >> 16) & 1u)) & 0xFFFF0000u;
  return low | high;
}

#if defined(__AVX512F__)
// The same operations by hand. Heads are short, so what is left after whole registers matters: it
// goes through narrower ones. (Masked stores would do, but the next head's loads wait for them.)
template <int lanes>
struct Register;
#define TIGHTROPE_REGISTER(lanes, f, i, p, si)                                                 \
  template <>                                                                                  \
  struct Register<lanes> {                                                                     \
    using Floats = f;                                                                          \
    using Words = i;                                                                           \
    static Words words(const Twin* at) { return p##_loadu_epi32(at); }                         \
    static Floats floats(const float* at) { return p##_loadu_ps(at); }                         \
    static void put(Twin* at, Words x) { p##_storeu_epi32(at, x); }                            \
    static Words upper() { return p##_set1_epi32(int(0xFFFF0000u)); }                          \
    static Floats even(Words x) { return p##_cast##si##_ps(p##_slli_epi32(x, 16)); }           \
    static Floats odd(Words x) { return p##_cast##si##_ps(p##_and_##si(x, upper())); }         \
    static Words rounded(Floats x) {                                                           \
      const Words u = p##_castps_##si(x);                                                      \
      const Words last = p##_and_##si(p##_srli_epi32(u, 16), p##_set1_epi32(1));               \
      return p##_add_epi32(p##_add_epi32(u, p##_set1_epi32(0x7FFF)), last);                    \
    }                                                                                          \
    /* (lower half of the first) | (second & upper half) */                                    \
    static Words twin(Floats a, Floats b) {                                                    \
      return p##_ternarylogic_epi32(p##_srli_epi32(rounded(a), 16), rounded(b), upper(), 0xF8); \
    }                                                                                          \
    static Floats turned_u(Floats u, Floats v, Floats c, Floats s) {                           \
      return p##_fmsub_ps(u, c, p##_mul_ps(v, s));                                             \
    }                                                                                          \
    static Floats turned_v(Floats u, Floats v, Floats c, Floats s) {                           \
      return p##_fmadd_ps(v, c, p##_mul_ps(u, s));                                             \
    }                                                                                          \
  };
TIGHTROPE_REGISTER(16, __m512, __m512i, _mm512, si512)
TIGHTROPE_REGISTER(8, __m256, __m256i, _mm256, si256)
TIGHTROPE_REGISTER(4, __m128, __m128i, _mm, si128)
#undef TIGHTROPE_REGISTER

template <int lanes>
inline void turn_twins_at(const Twin* u, const Twin* v, Twin* y, Twin* z, const float* c,
                          const float* s, const float* d, const float* t, int64_t k) {
  using R = Register<lanes>;
  const auto a = R::words(u + k), b = R::words(v + k);
  const auto c0 = R::floats(c + k), s0 = R::floats(s + k);
  const auto c1 = R::floats(d + k), s1 = R::floats(t + k);
  const auto first = R::twin(R::turned_u(R::even(a), R::even(b), c0, s0),
                             R::turned_u(R::odd(a), R::odd(b), c1, s1));
  const auto second = R::twin(R::turned_v(R::even(a), R::even(b), c0, s0),
                              R::turned_v(R::odd(a), R::odd(b), c1, s1));
  R::put(y + k, first);
  R::put(z + k, second);
}
// What is left after whole registers, out of line: most heads have nothing left.
__attribute__((noinline)) void turn_last_twins(const Twin* u, const Twin* v, Twin* y, Twin* z,
                                               const float* c, const float* s, const float* d,
                                               const float* t, int64_t k, int64_t n) {
  if (n & 8) turn_twins_at<8>(u, v, y, z, c, s, d, t, k), k += 8;
  if (n & 4) turn_twins_at<4>(u, v, y, z, c, s, d, t, k), k += 4;
  const auto one = [&](int64_t j) {
    const uint32_t a = u[j], b = v[j];
    y[j] = twin(turned_u(even(a), even(b), c[j], s[j]), turned_u(odd(a), odd(b), d[j], t[j]));
    z[j] = twin(turned_v(even(a), even(b), c[j], s[j]), turned_v(odd(a), odd(b), d[j], t[j]));
  };
  // Not a loop: the compiler would prepare for a long one.
  if (n & 2) one(k), one(k + 1), k += 2;
  if (n & 1) one(k);
}
__attribute__((always_inline)) inline void turn_twins(const Twin* u, const Twin* v, Twin* y,
                                                      Twin* z, const float* c, const float* s,
                                                      const float* d, const float* t, int64_t n) {
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) turn_twins_at<16>(u, v, y, z, c, s, d, t, k);
  if (k != n) turn_last_twins(u, v, y, z, c, s, d, t, k, n);
}
inline void turn_twins_(Twin* u, Twin* v, const float* c, const float* s, const float* d,
                        const float* t, int64_t n) {
  turn_twins(u, v, u, v, c, s, d, t, n);
}
#else
inline void turn_twins_(Twin* __restrict u, Twin* __restrict v, const float* __restrict c,
                        const float* __restrict s, const float* __restrict d,
                        const float* __restrict t, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t a = u[k], b = v[k];
    u[k] = twin(turned_u(even(a), even(b), c[k], s[k]), turned_u(odd(a), odd(b), d[k], t[k]));
    v[k] = twin(turned_v(even(a), even(b), c[k], s[k]), turned_v(odd(a), odd(b), d[k], t[k]));
  }
}
inline void turn_twins(const Twin* __restrict u, const Twin* __restrict v, Twin* __restrict y,
                       Twin* __restrict z, const float* __restrict c, const float* __restrict s,
                       const float* __restrict d, const float* __restrict t, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t a = u[k], b = v[k];
    y[k] = twin(turned_u(even(a), even(b), c[k], s[k]), turned_u(odd(a), odd(b), d[k], t[k]));
    z[k] = twin(turned_v(even(a), even(b), c[k], s[k]), turned_v(odd(a), odd(b), d[k], t[k]));
  }
}
#endif

template <>
inline void turn_halves_<BFloat16>(uint16_t* __restrict u, uint16_t* __restrict v,
                                   const float* __restrict c, const float* __restrict s,
                                   int64_t n) {
  const int64_t first = (n + 1) / 2;
  turn_twins_((Twin*)u, (Twin*)v, c, s, c + first, s + first, n / 2);
  if (n % 2) {
    const float a = BFloat16::load(u[n - 1]), b = BFloat16::load(v[n - 1]);
    u[n - 1] = BFloat16::store(turned_u(a, b, c[first - 1], s[first - 1]));
    v[n - 1] = BFloat16::store(turned_v(a, b, c[first - 1], s[first - 1]));
  }
}
template <>
inline void turn_halves<BFloat16>(const uint16_t* __restrict u, const uint16_t* __restrict v,
                                  uint16_t* __restrict y, uint16_t* __restrict z,
                                  const float* __restrict c, const float* __restrict s,
                                  int64_t n) {
  const int64_t first = (n + 1) / 2;
  turn_twins((const Twin*)u, (const Twin*)v, (Twin*)y, (Twin*)z, c, s, c + first, s + first, n / 2);
  if (n % 2) {
    const float a = BFloat16::load(u[n - 1]), b = BFloat16::load(v[n - 1]);
    y[n - 1] = BFloat16::store(turned_u(a, b, c[first - 1], s[first - 1]));
    z[n - 1] = BFloat16::store(turned_v(a, b, c[first - 1], s[first - 1]));
  }
}

#if defined(__F16C__)
// Halves through the conversion instructions: the same bits as Half::load and Half::store, which
// take what is left at the end. The zero-masked forms are plain conversions without the compiler's
// false warning.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
using Lanes = __m512;
using HalfLanes = __m256i;
inline HalfLanes read(const uint16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void write(uint16_t* p, HalfLanes x) { _mm256_storeu_si256((__m256i*)p, x); }
inline Lanes widen(HalfLanes x) { return _mm512_maskz_cvtph_ps(0xFFFF, x); }
inline HalfLanes narrow(Lanes x) { return _mm512_maskz_cvtps_ph(0xFFFF, x, 0); }
inline Lanes read(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes turned_u(Lanes u, Lanes v, Lanes c, Lanes s) {
  return _mm512_fmsub_ps(u, c, _mm512_mul_ps(v, s));
}
inline Lanes turned_v(Lanes u, Lanes v, Lanes c, Lanes s) {
  return _mm512_fmadd_ps(v, c, _mm512_mul_ps(u, s));
}
inline void read_pairs(const uint16_t* p, HalfLanes* u, HalfLanes* v) {
  const __m512i words = _mm512_loadu_si512(p);
  *u = _mm512_maskz_cvtepi32_epi16(0xFFFF, words);
  *v = _mm512_maskz_cvtepi32_epi16(0xFFFF, _mm512_maskz_srli_epi32(0xFFFF, words, 16));
}
inline void write_pairs(uint16_t* p, HalfLanes u, HalfLanes v) {
  const __m512i low = _mm512_maskz_cvtepu16_epi32(0xFFFF, u);
  const __m512i high =
      _mm512_maskz_slli_epi32(0xFFFF, _mm512_maskz_cvtepu16_epi32(0xFFFF, v), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(low, high));
}
#else
constexpr int64_t kLanes = 8;
using Lanes = __m256;
using HalfLanes = __m128i;
inline HalfLanes read(const uint16_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline void write(uint16_t* p, HalfLanes x) { _mm_storeu_si128((__m128i*)p, x); }
inline Lanes widen(HalfLanes x) { return _mm256_cvtph_ps(x); }
inline HalfLanes narrow(Lanes x) { return _mm256_cvtps_ph(x, 0); }
inline Lanes read(const float* p) { return _mm256_loadu_ps(p); }
inline Lanes turned_u(Lanes u, Lanes v, Lanes c, Lanes s) {
  return _mm256_fmsub_ps(u, c, _mm256_mul_ps(v, s));
}
inline Lanes turned_v(Lanes u, Lanes v, Lanes c, Lanes s) {
  return _mm256_fmadd_ps(v, c, _mm256_mul_ps(u, s));
}
inline void read_pairs(const uint16_t* p, HalfLanes* u, HalfLanes* v) {
  const __m256i words = _mm256_loadu_si256((const __m256i*)p);
  // Words to their lower halves: 4 in each 128-bit lane, then the lanes side by side.
  const __m256i lower = _mm256_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 9, 8, 5, 4, 1, 0,
                                        -1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 9, 8, 5, 4, 1, 0);
  const __m256i a = _mm256_shuffle_epi8(words, lower);
  const __m256i b = _mm256_shuffle_epi8(_mm256_srli_epi32(words, 16), lower);
  *u = _mm256_castsi256_si128(_mm256_permute4x64_epi64(a, 0x08));
  *v = _mm256_castsi256_si128(_mm256_permute4x64_epi64(b, 0x08));
}
inline void write_pairs(uint16_t* p, HalfLanes u, HalfLanes v) {
  write(p, _mm_unpacklo_epi16(u, v));
  write(p + 8, _mm_unpackhi_epi16(u, v));
}
#endif

// Each block is read before it is written, so outputs may be the inputs: nothing is `restrict`.
inline void turn_half_lanes(const uint16_t* u, const uint16_t* v, uint16_t* y, uint16_t* z,
                            const float* c, const float* s, int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    const Lanes a = widen(read(u + k)), b = widen(read(v + k));
    write(y + k, narrow(turned_u(a, b, read(c + k), read(s + k))));
    write(z + k, narrow(turned_v(a, b, read(c + k), read(s + k))));
  }
  for (; k < n; ++k) {
    const float a = Half::load(u[k]), b = Half::load(v[k]);
    y[k] = Half::store(turned_u(a, b, c[k], s[k]));
    z[k] = Half::store(turned_v(a, b, c[k], s[k]));
  }
}
template <>
inline void turn_halves<Half>(const uint16_t* __restrict u, const uint16_t* __restrict v,
                              uint16_t* __restrict y, uint16_t* __restrict z,
                              const float* __restrict c, const float* __restrict s, int64_t n) {
  turn_half_lanes(u, v, y, z, c, s, n);
}
template <>
inline void turn_halves_<Half>(uint16_t* __restrict u, uint16_t* __restrict v,
                               const float* __restrict c, const float* __restrict s, int64_t n) {
  turn_half_lanes(u, v, u, v, c, s, n);
}
#endif

// Pairs (x[2k], x[2k + 1]).
template <class F>
inline void turn_neighbours_(typename F::Stored* __restrict x,
                             const typename F::Value* __restrict c,
                             const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(x[2 * k]), b = F::load(x[2 * k + 1]);
    x[2 * k] = F::store(turned_u(a, b, c[k], s[k]));
    x[2 * k + 1] = F::store(turned_v(a, b, c[k], s[k]));
  }
}
template <class F>
inline void turn_neighbours(const typename F::Stored* __restrict x,
                            typename F::Stored* __restrict y,
                            const typename F::Value* __restrict c,
                            const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(x[2 * k]), b = F::load(x[2 * k + 1]);
    y[2 * k] = F::store(turned_u(a, b, c[k], s[k]));
    y[2 * k + 1] = F::store(turned_v(a, b, c[k], s[k]));
  }
}

template <>
inline void turn_neighbours_<BFloat16>(uint16_t* __restrict x, const float* __restrict c,
                                       const float* __restrict s, int64_t n) {
  Twin* __restrict p = (Twin*)x;
  for (int64_t k = 0; k < n; ++k) {
    const float a = even(p[k]), b = odd(p[k]);
    p[k] = twin(turned_u(a, b, c[k], s[k]), turned_v(a, b, c[k], s[k]));
  }
}
template <>
inline void turn_neighbours<BFloat16>(const uint16_t* __restrict x, uint16_t* __restrict y,
                                      const float* __restrict c, const float* __restrict s,
                                      int64_t n) {
  const Twin* __restrict p = (const Twin*)x;
  Twin* __restrict q = (Twin*)y;
  for (int64_t k = 0; k < n; ++k) {
    const float a = even(p[k]), b = odd(p[k]);
    q[k] = twin(turned_u(a, b, c[k], s[k]), turned_v(a, b, c[k], s[k]));
  }
}

#if defined(__F16C__)
inline void turn_neighbour_lanes(const uint16_t* x, uint16_t* y, const float* c, const float* s,
                                 int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    HalfLanes u, v;
    read_pairs(x + 2 * k, &u, &v);
    const Lanes a = widen(u), b = widen(v);
    write_pairs(y + 2 * k, narrow(turned_u(a, b, read(c + k), read(s + k))),
                narrow(turned_v(a, b, read(c + k), read(s + k))));
  }
  for (; k < n; ++k) {
    const float a = Half::load(x[2 * k]), b = Half::load(x[2 * k + 1]);
    y[2 * k] = Half::store(turned_u(a, b, c[k], s[k]));
    y[2 * k + 1] = Half::store(turned_v(a, b, c[k], s[k]));
  }
}
template <>
inline void turn_neighbours<Half>(const uint16_t* __restrict x, uint16_t* __restrict y,
                                  const float* __restrict c, const float* __restrict s,
                                  int64_t n) {
  turn_neighbour_lanes(x, y, c, s, n);
}
template <>
inline void turn_neighbours_<Half>(uint16_t* __restrict x, const float* __restrict c,
                                   const float* __restrict s, int64_t n) {
  turn_neighbour_lanes(x, x, c, s, n);
}
#endif

// Whether cosines and sines are kept in the order that turn_twins takes.
inline bool in_twos(const Problem& p) { return p.dtype == Dtype::kBFloat16 && !p.interleaved; }

// Where pair k of n is kept.
inline int64_t slot(bool twos, int64_t k, int64_t n) {
  return twos ? k / 2 + (k % 2) * ((n + 1) / 2) : k;
}

// Any distance between the channels: correct, not fast.
template <class F>
inline void turn_strided(const typename F::Stored* x, int64_t x_channel, typename F::Stored* y,
                         int64_t y_channel, int64_t pair, int64_t other,
                         const typename F::Value* c, const typename F::Value* s, int64_t n,
                         bool twos) {
  for (int64_t k = 0; k < n; ++k) {
    const int64_t at = slot(twos, k, n);
    const typename F::Value a = F::load(x[k * pair * x_channel]);
    const typename F::Value b = F::load(x[(k * pair + other) * x_channel]);
    y[k * pair * y_channel] = F::store(turned_u(a, b, c[at], s[at]));
    y[(k * pair + other) * y_channel] = F::store(turned_v(a, b, c[at], s[at]));
  }
}

// How far ahead memory is asked for, in bytes. The arithmetic of a head fills the window in which a
// processor looks ahead by itself, so without this it waits for each line (1.2 to 1.8 times longer
// from cold caches). Asking past the end of a tensor is harmless.
constexpr int64_t kAhead = 2048;

template <class F>
inline void turn_head(const Problem& p, const Operand& o, int64_t row, int64_t head, int64_t token,
                      int64_t first, int64_t n, const typename F::Value* c,
                      const typename F::Value* s) {
  using Stored = typename F::Stored;
  const Strides& i = o.in_stride;
  const Strides& j = o.out_stride;
  const Stored* in = static_cast<const Stored*>(o.in) + row * i.row + head * i.head + token * i.token;
  Stored* out = static_cast<Stored*>(o.out) + row * j.row + head * j.head + token * j.token;
  const bool in_place = o.in == o.out;

  if (!in_place && first == 0) {
    for (int64_t d = 0; d < p.start; ++d) out[d * j.channel] = in[d * i.channel];
    for (int64_t d = p.start + 2 * p.pairs; d < p.head_dim; ++d)
      out[d * j.channel] = in[d * i.channel];
  }

  for (int64_t byte = 0; byte < p.head_dim * int64_t(sizeof(Stored)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(in) + kAhead + byte);

  const int64_t pair = p.interleaved ? 2 : 1;
  const int64_t other = p.interleaved ? 1 : p.pairs;
  const int64_t at = p.start + first * pair;
  if (i.channel != 1 || j.channel != 1) {
    turn_strided<F>(in + at * i.channel, i.channel, out + at * j.channel, j.channel, pair, other, c,
                    s, n, in_twos(p));
  } else if (p.interleaved) {
    if (in_place) {
      turn_neighbours_<F>(out + at, c, s, n);
    } else {
      turn_neighbours<F>(in + at, out + at, c, s, n);
    }
  } else if (in_place) {
    turn_halves_<F>(out + at, out + at + other, c, s, n);
  } else {
    turn_halves<F>(in + at, in + at + other, out + at, out + at + other, c, s, n);
  }
}

// ---- tiles ---------------------------------------------------------------------------------------

template <class T>
struct Angles {
  alignas(64) T cosine[kAngles];
  alignas(64) T sine[kAngles];
};

// Rows of a caller's tables.
template <class Stored, class T>
inline void look_up(const Problem& p, const Table& table, int64_t row, int64_t head, int64_t at,
                    int64_t first, int64_t n, T scale, T* __restrict out) {
  const typename Stored::Stored* from = static_cast<const typename Stored::Stored*>(table.data) +
                                        row * table.stride.row + head * table.stride.head +
                                        at * table.stride.token;
  const int64_t step = p.table_step * table.stride.channel;
  const bool twos = in_twos(p);
  for (int64_t k = 0; k < n; ++k)
    out[slot(twos, k, n)] = T(Stored::load(from[(first + k) * step])) * scale;
}
template <class T>
inline void look_up(const Problem& p, const Table& table, int64_t row, int64_t head, int64_t at,
                    int64_t first, int64_t n, T scale, T* out) {
  switch (p.table_dtype) {
    case Dtype::kFloat:
      return look_up<Float>(p, table, row, head, at, first, n, scale, out);
    case Dtype::kDouble:
      return look_up<Double>(p, table, row, head, at, first, n, scale, out);
    case Dtype::kBFloat16:
      return look_up<BFloat16>(p, table, row, head, at, first, n, scale, out);
    case Dtype::kHalf:
      return look_up<Half>(p, table, row, head, at, first, n, scale, out);
  }
}

// Cosines and sines of one token; false where its position is no number, or lies outside a table.
template <class T>
inline bool angles_of(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t first,
                      int64_t n, T* c, T* s) {
  const T amplitude = T(p.amplitude);
  if (p.cosine.data != nullptr) {
    const int64_t at = position_at(p, 0, row, token).whole;
    if (at < 0 || at >= p.table_length) return false;
    look_up(p, p.cosine, row, head, at, first, n, amplitude, c);
    look_up(p, p.sine, row, head, at, first, n, p.conjugate ? -amplitude : amplitude, s);
    return true;
  }
  alignas(64) uint64_t phase[kAngles];
  if (!phases(p, row, head, token, first, n, phase)) return false;
  if (!in_twos(p)) {
    cos_sin(phase, n, p.conjugate, amplitude, c, s);
    return true;
  }
  alignas(64) uint64_t sorted[kAngles];
  for (int64_t k = 0; k < n / 2; ++k) {
    sorted[k] = phase[2 * k];
    sorted[(n + 1) / 2 + k] = phase[2 * k + 1];
  }
  if (n % 2) sorted[n / 2] = phase[n - 1];
  cos_sin(sorted, n, p.conjugate, amplitude, c, s);
  return true;
}

template <class T>
inline void fill(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens,
                 int64_t first, int64_t n, Angles<T>& angles) {
  for (int64_t t = 0; t < tokens; ++t) {
    T* c = angles.cosine + t * n;
    T* s = angles.sine + t * n;
    if (!angles_of(p, row, head, token + t, first, n, c, s)) {
      for (int64_t k = 0; k < n; ++k) c[k] = s[k] = T(__builtin_nan(""));
    }
  }
}

template <class F>
inline void turn_tile(const Problem& p, int64_t row, int64_t token, int64_t tokens, int64_t first,
                      int64_t n) {
  using T = typename F::Value;
  Angles<T> angles;
  const bool shared = !p.angles_per_head;
  if (shared) fill(p, row, 0, token, tokens, first, n, angles);
  for (int32_t index = 0; index < p.operands; ++index) {
    const Operand& o = p.operand[index];
    // The inner loop runs over the dimension whose neighbours are closer in memory.
    if (shared && o.in_stride.head < o.in_stride.token) {
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t head = 0; head < o.heads; ++head)
          turn_head<F>(p, o, row, head, token + t, first, n, angles.cosine + t * n,
                       angles.sine + t * n);
      continue;
    }
    for (int64_t head = 0; head < o.heads; ++head) {
      if (!shared) fill(p, row, head, token, tokens, first, n, angles);
      for (int64_t t = 0; t < tokens; ++t)
        turn_head<F>(p, o, row, head, token + t, first, n, angles.cosine + t * n,
                     angles.sine + t * n);
    }
  }
}

template <class F>
void turn(const Problem& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / p.tiles_per_row;
    const int64_t token = (item - row * p.tiles_per_row) * p.tile;
    const int64_t tokens = p.tokens - token < p.tile ? p.tokens - token : p.tile;
    // `first` stays 0 unless one token alone has more pairs than the stack holds; without a pair
    // the channels still have to be copied.
    int64_t first = 0;
    do {
      const int64_t n = p.pairs - first < kAngles ? p.pairs - first : kAngles;
      turn_tile<F>(p, row, token, tokens, first, n);
      first += n;
    } while (first < p.pairs);
  }
}

}  // namespace

void loop(const Problem& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::kFloat:
      return turn<Float>(p, begin, end);
    case Dtype::kDouble:
      return turn<Double>(p, begin, end);
    case Dtype::kBFloat16:
      return turn<BFloat16>(p, begin, end);
    case Dtype::kHalf:
      return turn<Half>(p, begin, end);
  }
}

}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
