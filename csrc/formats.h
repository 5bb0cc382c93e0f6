// Storage formats (float, double, bfloat16, half) and the rotation of one pair.
//
// Compiled once per instruction set, like everything that rotate_loops.h includes.
#pragma once

#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "rotate.h"

// For functions without which the compiler does not vectorise, or does not keep values in registers.
#define TIGHTROPE_INLINE inline __attribute__((always_inline))
// For loops with many callers: not inlined, they vectorise better, and compile once.
#define TIGHTROPE_LOOP __attribute__((noinline))

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
#if defined(__AVX2__)
inline __m128 fma_(__m128 a, __m128 b, __m128 c) { return _mm_fmadd_ps(a, b, c); }
inline __m256 fma_(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
inline float32x4_t fma_(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
#endif
#if defined(__AVX512F__)
inline __m512 fma_(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
#endif

// a·b - c, rounded once. The compiler does not fold a negation into the intrinsics.
template <class T>
inline T fms_(T a, T b, T c) { return fma_(a, b, -c); }
#if defined(__AVX2__)
inline __m128 fms_(__m128 a, __m128 b, __m128 c) { return _mm_fmsub_ps(a, b, c); }
inline __m256 fms_(__m256 a, __m256 b, __m256 c) { return _mm256_fmsub_ps(a, b, c); }
#endif
#if defined(__AVX512F__)
inline __m512 fms_(__m512 a, __m512 b, __m512 c) { return _mm512_fmsub_ps(a, b, c); }
#endif

// A number in all lanes of a vector; of a scalar type, the number itself.
template <class T>
TIGHTROPE_INLINE T all(double x) { return T(x); }
template <class T, class Other>
constexpr bool kIs = false;
template <class T>
inline constexpr bool kIs<T, T> = true;
// A polynomial, from its highest coefficient on.
template <class T, class... Numbers>
TIGHTROPE_INLINE T polynomial(T x, double highest, Numbers... next) {
  T sum = all<T>(highest);
  ((sum = fma_(x, sum, all<T>(next))), ...);
  return sum;
}

inline float rounded_even(float x) { return __builtin_rintf(x); }
inline double rounded_even(double x) { return __builtin_rint(x); }

// Adding this constant rounds a number to an integer and leaves it in the lowest bits.
template <class T>
constexpr double kRounder = kIs<T, double> ? 0x1.8p52 : 0x1.8p23;
// The integer next to x · factor.
template <class T>
TIGHTROPE_INLINE T nearest(T x, double factor) {
  return fma_(x, all<T>(factor), all<T>(kRounder<T>)) - all<T>(kRounder<T>);
}

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- storage formats: Stored is the type in memory, Value the type of the arithmetic -------------

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
    // NaNs need no special case: in those of bfloat16 inputs, and in those that look_up writes, the
    // lower half is zero, so the addition cannot carry them into an infinity.
    return Stored((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
  }
};

struct Half {
  using Stored = uint16_t;
  using Value = float;
  // None of these takes or makes a subnormal float, so all keep the subnormal numbers of half precision
  // where the processor flushes those of float.
#if defined(__aarch64__)
  static inline Value load(Stored x) { return bits<__fp16>(x); }
  static inline Stored store(Value x) { return bits<Stored>(__fp16(x)); }
#elif defined(__AVX2__)
  static inline Value load(Stored x) { return _cvtsh_ss(x); }
  static inline Stored store(Value x) { return _cvtss_sh(x, 0); }
#else
  static inline Value load(Stored x) { return c10::Half(x, c10::Half::from_bits()); }
#endif
};

// Calls use(F()) for a storage format F.
template <class Use>
inline void with_format(Dtype dtype, const Use& use) {
  switch (dtype) {
    case Dtype::kFloat: return use(Float());
    case Dtype::kDouble: return use(Double());
    case Dtype::kBFloat16: return use(BFloat16());
    case Dtype::kHalf: return use(Half());
  }
}

// Whether registers.h processes everything of this type with contiguous channels.
template <class T>
constexpr bool kHasRegisters = kIs<T, float>;

// An integer as a type, to select a template.
template <int n>
struct Is {
  static constexpr int value = n;
  constexpr operator int64_t() const { return n; }
};
// Calls use(step); a step of 1 is a constant, because loops over adjacent numbers vectorise.
template <class Use>
TIGHTROPE_INLINE void with_step(int64_t step, const Use& use) {
  if (step == 1) return use(Is<1>());
  use(step);
}

// ---- pairs ---------------------------------------------------------------------------------------

template <class T>
inline T turned_u(T u, T v, T c, T s) { return fms_(u, c, v * s); }
template <class T>
inline T turned_v(T u, T v, T c, T s) { return fma_(v, c, u * s); }

// Rounds a value to a storage format; the result has the type of the arithmetic again.
template <class F>
inline typename F::Value rounded(F, typename F::Value x) { return F::load(F::store(x)); }
#if defined(__AVX2__)
inline __m128 rounded(Half, __m128 x) { return _mm_cvtph_ps(_mm_cvtps_ph(x, 0)); }
inline __m256 rounded(Half, __m256 x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, 0)); }
#elif defined(__aarch64__)
inline float32x4_t rounded(Half, float32x4_t x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }
#endif
#if defined(__AVX512F__)
inline __m512 rounded(Half, __m512 x) {
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm512_maskz_cvtps_ph(0xFFFF, x, 0));
}
#endif
#if defined(__AVX2__) || defined(__aarch64__)
#define TIGHTROPE_ROUNDED(Floats)                                            \
  inline Floats rounded(Float, Floats x) { return x; }                       \
  inline Floats rounded(BFloat16, Floats x) {                                \
    typedef uint32_t Words __attribute__((vector_size(sizeof(Floats))));     \
    const Words u = (Words)x;                                                \
    return (Floats)((u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u);         \
  }
#if defined(__aarch64__)
TIGHTROPE_ROUNDED(float32x4_t)
#else
TIGHTROPE_ROUNDED(__m128)
TIGHTROPE_ROUNDED(__m256)
#endif
#if defined(__AVX512F__)
TIGHTROPE_ROUNDED(__m512)
#endif
#undef TIGHTROPE_ROUNDED
#endif

// Since version 12 GCC vectorises neighbouring sums and differences of products into fused operations
// even with contraction off; it does not look past this barrier. Vector types need none.
template <class T>
inline T unfused(T x) { return x; }
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
template <>
inline float unfused(float x) { return __builtin_assoc_barrier(x); }
template <>
inline double unfused(double x) { return __builtin_assoc_barrier(x); }
#endif
#endif

// The arithmetic of a rotation: its storage format, where it rounds, and whether the two channels of a
// pair may have different cosines and sines (`apart`). The sum rounds to the format at the store.
template <class F, Rounding rounding, bool apart_>
struct Arithmetic {
  using Format = F;
  using Stored = typename F::Stored;
  using Value = typename F::Value;
  static constexpr bool apart = apart_;
  static constexpr bool once = rounding == Rounding::kOnce;
  static constexpr bool each = rounding == Rounding::kEach;

  template <class T>
  static inline T product(T x, T y) {
    const T found = unfused(x * y);
    if constexpr (rounding == Rounding::kEach) return rounded(F{}, found);
    return found;
  }
  template <class T>
  static inline T u(T a, T b, T c, T s) {
    if constexpr (once) return turned_u(a, b, c, s);
    return product(a, c) - product(b, s);
  }
  template <class T>
  static inline T v(T a, T b, T c, T s) {
    if constexpr (once) return turned_v(a, b, c, s);
    return product(b, c) + product(a, s);
  }
};

// Cosines and sines of the pairs of one token: those of the first channels and, if the channels of a
// pair have different ones, those of the second (c2, s2); otherwise both are the same.
//
// Those of bfloat16 in half pairs may stand in the order of the pairs, where a table has them; see Twin for the
// usual order. As kTwins they are themselves bfloat16, behind pointers to T.
enum class In : int32_t { kUsual, kPairs, kTwins };
template <class T>
struct Row {
  const T *c, *s, *c2, *s2;
  In order = In::kUsual;
};

// Whether the halves of a head rotate two pairs at a time: see Twin.
template <class F>
constexpr bool kTwins = kIs<F, BFloat16>;

// Two bfloat16 in one 32-bit word widen with a shift and a mask, without moving lanes. So registers
// process two pairs at a time, with cosines and sines in the order (0, 2, 4, …, 1, 3, 5, …).
typedef uint32_t __attribute__((aligned(2), may_alias)) Twin;

inline float even(uint32_t twin) { return bits<float>(twin << 16); }
inline float odd(uint32_t twin) { return bits<float>(twin & 0xFFFF0000u); }

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
