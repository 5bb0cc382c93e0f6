// The hot loops of AVX2, AVX-512 and NEON: rotate the heads of one token, with the token's angles in registers.
// Pairs go through registers of 16 (AVX-512), 8 (not NEON) and 4 lanes, the widest first, and each set of registers goes
// through all heads before the next. Four pairs of bfloat16 that remain fill half a register. The remainder, at most
// three pairs, goes one pair at a time. (Masked registers could process it too, but the loads of the next head would
// wait for masked stores.)
//
// For tensors with contiguous channels or tokens. Others use the loops of heads.h, which compute the same bits.
#pragma once

#include "heads.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Vectors of floats, and of words that hold two bfloat16 each.
template <int lanes>
struct Register;

// twin(even, odd) rounds both to bfloat16, in one word each: it cuts them to their upper halves, and adds one if the
// lower half exceeds 0x8000, or equals it and the result is odd. No NaN can become an infinity: see BFloat16.

#if defined(__aarch64__)
constexpr int kWidest = 4;
constexpr int kForAngles = 16;
template <>
struct Register<4> {
  using Floats = float32x4_t;
  typedef uint32_t Words __attribute__((vector_size(16)));
  static Floats read(const float* at) { return vld1q_f32(at); }
  static Words read(const Twin* at) { return (Words)vld1q_u16((const uint16_t*)at); }
  static Floats read(const uint16_t* at) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }
  // No stores past the caches.
  template <bool>
  static void write(float* at, Floats x) { vst1q_f32(at, x); }
  template <bool>
  static void write(Twin* at, Words x) { vst1q_u16((uint16_t*)at, (uint16x8_t)x); }
  template <bool>
  static void write(uint16_t* at, Floats x) { vst1_u16(at, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  static Floats even(Words x) { return (Floats)(x << 16); }
  static Floats odd(Words x) { return (Floats)(x & 0xFFFF0000u); }
  static Words twin(Floats even, Floats odd) {
    const uint32x4_t e = vreinterpretq_u32_f32(even), o = vreinterpretq_u32_f32(odd);
    const uint16x8_t cut = vreinterpretq_u16_u32(vsriq_n_u32(o, e, 16));
    const uint16x8_t rest = vreinterpretq_u16_u32(vsliq_n_u32(e, o, 16));
    return (Words)vsraq_n_u16(cut, vqsubq_u16(rest, vbicq_u16(vdupq_n_u16(1), cut)), 15);
  }
  static bool has_nan(Floats x) { return vminvq_u32(vceqq_f32(x, x)) == 0; }
  static Floats swapped(Floats x) { return vrev64q_f32(x); }
  static void doubled(Floats x, Floats* lower, Floats* upper) {
    *lower = vzip1q_f32(x, x), *upper = vzip2q_f32(x, x);
  }
  static void split(Floats first, Floats second, Floats* even, Floats* odd) {
    *even = vuzp1q_f32(first, second), *odd = vuzp2q_f32(first, second);
  }
};
#else
#if defined(__AVX512F__)
constexpr int kWidest = 16;      // lanes
constexpr int kForAngles = 16;   // registers that hold angles, so that enough remain for the arithmetic
#define TIGHTROPE_TWIN(i, p, si)                                                                   \
  const i e = (i)even, o = (i)odd, ones = p##_set1_epi16(1), upper = p##_set1_epi32(-0x10000);       \
  const i cut = p##_ternarylogic_epi32((i)((Words)e >> 16), o, upper, 0xF8);                         \
  const i rest = p##_ternarylogic_epi32((i)((Words)o << 16), e, p##_set1_epi32(0xFFFF), 0xF8);       \
  const i sticky = p##_ternarylogic_epi32(rest, cut, ones, 0xF8);                                    \
  const auto up = p##_cmpgt_epu16_mask(sticky, p##_set1_epi16(-0x8000));                             \
  return (Words)p##_mask_add_epi16(cut, up, cut, ones);
#elif defined(__AVX2__)
constexpr int kWidest = 8;
constexpr int kForAngles = 8;
#define TIGHTROPE_TWIN(i, p, si)                                                                   \
  const i e = (i)even, o = (i)odd;                                                                 \
  const i cut = p##_blend_epi16((i)((Words)e >> 16), o, 0xAA);                                     \
  const i rest = p##_blend_epi16(e, (i)((Words)o << 16), 0xAA);                                    \
  const i less = p##_subs_epu16(rest, p##_andnot_##si(cut, p##_set1_epi16(1)));                    \
  return (Words)p##_add_epi16(cut, p##_srli_epi16(less, 15));
#endif

#define TIGHTROPE_REGISTER(lanes, f, i, p, si)                                             \
  template <>                                                                              \
  struct Register<lanes> {                                                                 \
    using Floats = f;                                                                      \
    typedef uint32_t Words __attribute__((vector_size(4 * lanes)));                        \
    static Floats read(const float* at) { return p##_loadu_ps(at); }                       \
    static Words read(const Twin* at) { return (Words)p##_loadu_##si((const i*)at); }      \
    /* Streaming stores (large_results.h) need an aligned address. */                      \
    template <bool streams>                                                                \
    static void write(float* at, Floats x) {                                               \
      streams ? p##_stream_ps(at, x) : p##_storeu_ps(at, x);                               \
    }                                                                                      \
    template <bool streams>                                                                \
    static void write(Twin* at, Words x) {                                                 \
      streams ? p##_stream_##si((i*)at, (i)x) : p##_storeu_##si((i*)at, (i)x);             \
    }                                                                                      \
    static Floats even(Words x) { return (Floats)(x << 16); }                              \
    static Floats odd(Words x) { return (Floats)(x & 0xFFFF0000u); }                       \
    static Words twin(Floats even, Floats odd) { TIGHTROPE_TWIN(i, p, si) }                \
    /* Whether the magnitudes of all bfloat16 are from 2^-60 to 2^50: see Factor. */       \
    static bool are_moderate(Words x, Words y) {                                           \
      const i size = p##_set1_epi16(0x7FFF), least = p##_set1_epi16((127 - 60) << 7);      \
      const i above = p##_max_epu16(p##_sub_epi16((i)(x & (Words)size), least),            \
                                    p##_sub_epi16((i)(y & (Words)size), least));           \
      return are_zero((Words)p##_subs_epu16(above, p##_set1_epi16(110 << 7)));             \
    }
#define TIGHTROPE_REGISTER_END };

#if defined(__AVX512F__)
TIGHTROPE_REGISTER(16, __m512, __m512i, _mm512, si512)
  // Zero-masked intrinsics stand in for the plain ones, here and in vectors.h: GCC 12 warns about
  // uninitialised values in the plain ones, and in the intrinsics of shifts.
  static bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
  static bool are_zero(Words x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) == 0; }
  static Floats swapped(Floats x) { return _mm512_maskz_permute_ps(0xFFFF, x, 0xB1); }
  // Each lane twice: the lower half of x, and the upper half.
  static void doubled(Floats x, Floats* lower, Floats* upper) {
    const __m512i at = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    *lower = _mm512_maskz_permutexvar_ps(0xFFFF, at, x);
    *upper = _mm512_maskz_permutexvar_ps(0xFFFF, _mm512_add_epi32(at, _mm512_set1_epi32(8)), x);
  }
  // The lanes of even and of odd number, of two registers.
  static void split(Floats first, Floats second, Floats* even, Floats* odd) {
    const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *even = _mm512_maskz_permutex2var_ps(0xFFFF, first, at, second);
    *odd = _mm512_maskz_permutex2var_ps(0xFFFF, first, _mm512_add_epi32(at, _mm512_set1_epi32(1)), second);
  }
  static Floats read(const uint16_t* at) {
    return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256((const __m256i*)at));
  }
  template <bool streams>
  static void write(uint16_t* at, Floats x) {
    const __m256i halves = _mm512_maskz_cvtps_ph(0xFFFF, x, 0);
    streams ? _mm256_stream_si256((__m256i*)at, halves) : _mm256_storeu_si256((__m256i*)at, halves);
  }
TIGHTROPE_REGISTER_END
#endif
TIGHTROPE_REGISTER(8, __m256, __m256i, _mm256, si256)
  static bool has_nan(Floats x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
  static bool are_zero(Words x) { return _mm256_testz_si256((__m256i)x, (__m256i)x); }
  static Floats swapped(Floats x) { return _mm256_permute_ps(x, 0xB1); }
  static void doubled(Floats x, Floats* lower, Floats* upper) {
    const __m256 low = _mm256_unpacklo_ps(x, x), high = _mm256_unpackhi_ps(x, x);
    *lower = _mm256_permute2f128_ps(low, high, 0x20), *upper = _mm256_permute2f128_ps(low, high, 0x31);
  }
  static void split(Floats first, Floats second, Floats* even, Floats* odd) {
    const __m256 low = _mm256_permute2f128_ps(first, second, 0x20), high = _mm256_permute2f128_ps(first, second, 0x31);
    *even = _mm256_shuffle_ps(low, high, 0x88), *odd = _mm256_shuffle_ps(low, high, 0xDD);
  }
  static Floats read(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
  }
  template <bool streams>
  static void write(uint16_t* at, Floats x) {
    const __m128i halves = _mm256_cvtps_ph(x, 0);
    streams ? _mm_stream_si128((__m128i*)at, halves) : _mm_storeu_si128((__m128i*)at, halves);
  }
TIGHTROPE_REGISTER_END
TIGHTROPE_REGISTER(4, __m128, __m128i, _mm, si128)
  static bool has_nan(Floats x) { return _mm_movemask_ps(_mm_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
  static bool are_zero(Words x) { return _mm_testz_si128((__m128i)x, (__m128i)x); }
  static Floats swapped(Floats x) { return _mm_permute_ps(x, 0xB1); }
  static void doubled(Floats x, Floats* lower, Floats* upper) {
    *lower = _mm_unpacklo_ps(x, x), *upper = _mm_unpackhi_ps(x, x);
  }
  static void split(Floats first, Floats second, Floats* even, Floats* odd) {
    *even = _mm_shuffle_ps(first, second, 0x88), *odd = _mm_shuffle_ps(first, second, 0xDD);
  }
  static Floats read(const uint16_t* at) {
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)at));
  }
  template <bool>
  static void write(uint16_t* at, Floats x) { _mm_storel_epi64((__m128i*)at, _mm_cvtps_ph(x, 0)); }
TIGHTROPE_REGISTER_END
#undef TIGHTROPE_REGISTER
#undef TIGHTROPE_REGISTER_END
#undef TIGHTROPE_TWIN
#endif

// The lower half of a register; the upper half repeats it. Loads of doubles go to a register without a detour.
template <>
struct Register<2> : Register<4> {
  typedef double Halves __attribute__((vector_size(16)));

  static Halves half(const void* at) {
    double two;
    memcpy(&two, at, sizeof(two));
    return Halves{two, two};
  }
  static Floats read(const float* at) { return (Floats)half(at); }
  static Words read(const Twin* at) { return (Words)half(at); }
  template <bool>
  static void write(Twin* at, Words x) {
    const double two = ((Halves)x)[0];
    memcpy((void*)at, &two, sizeof(two));
  }
  static void split(Floats first, Floats second, Floats* even, Floats* odd) {
    Floats a, b, same;  // (x0, x0, x2, x2) and (x1, x1, x3, x3)
    Register<4>::split(first, second, &a, &b);
    Register<4>::split(a, a, even, &same), Register<4>::split(b, b, odd, &same);
  }
};

// The widest.
using Wide = Register<kWidest>;
using V = Wide::Floats;

#if defined(__AVX512BF16__)
// The order of 16-bit lanes that turns a conversion of two registers, one half after the other, into twins.
template <int lanes>
struct Order {
  constexpr Order() : from() {
    for (int k = 0; k < lanes; ++k) from[2 * k] = uint16_t(k), from[2 * k + 1] = uint16_t(lanes + k);
  }
  alignas(64) uint16_t from[2 * lanes];
};
template <int lanes>
inline constexpr Order<lanes> kOrder;

// R::twin by the processor's conversion to bfloat16. It takes subnormal numbers for zeros, so `exact` becomes false if
// a result is zero.
#define TIGHTROPE_CONVERTED(lanes, f, i, p)                                                       \
  TIGHTROPE_INLINE Register<lanes>::Words converted(f even, f odd, bool* exact) {                 \
    const i both = (i)p##_cvtne2ps_pbh(odd, even);                                                \
    *exact = p##_testn_epi16_mask(both, p##_set1_epi16(0x7FFF)) == 0;                            \
    const auto order = (i)Register<lanes>::read((const Twin*)kOrder<lanes>.from);                 \
    return (Register<lanes>::Words)p##_permutexvar_epi16(order, both);                            \
  }
TIGHTROPE_CONVERTED(16, __m512, __m512i, _mm512)
TIGHTROPE_CONVERTED(8, __m256, __m256i, _mm256)
TIGHTROPE_CONVERTED(4, __m128, __m128i, _mm)
#undef TIGHTROPE_CONVERTED
#endif

// Stores the twins of (even, odd).
template <class R, bool streams>
TIGHTROPE_INLINE void write_twins(uint16_t* at, typename R::Floats even, typename R::Floats odd) {
#if defined(__AVX512BF16__)
  bool exact;
  const auto to = converted(even, odd, &exact);
  if (__builtin_expect(exact, 1)) return R::template write<streams>((Twin*)at, to);
#endif
  R::template write<streams>((Twin*)at, R::twin(even, odd));
}

// Pairs that go through registers together, with their cosines and sines: those of the first channels
// (c, s) and of the second (c2, s2). The format is Float or Half in the general case.
template <class A, class F, bool interleaved, int lanes>
struct Block {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = lanes;
  static constexpr int kAngleRegisters = A::apart ? 4 : 2;

  TIGHTROPE_INLINE void take(const Row<float>& r, int64_t at, int64_t) {
    c = R::read(r.c + at), s = R::read(r.s + at);
    c2 = A::apart ? R::read(r.c2 + at) : c, s2 = A::apart ? R::read(r.s2 + at) : s;
  }
  template <bool streams, class T>
  TIGHTROPE_INLINE void turn(const T* u, const T* v, T* y, T* z) const {
    const auto a = R::read(u), b = R::read(v);
    R::template write<streams>(y, A::u(a, b, c, s));
    R::template write<streams>(z, A::v(a, b, c2, s2));
  }

  typename R::Floats c, s, c2, s2;
};

// Neighbours (u, v) rotate at once, as x·c + swapped(x)·s: c holds the cosines in the order of the
// channels, s the sines of the first channels negated.
template <class A, class F, int lanes>
struct Block<A, F, true, lanes> {
  using R = Register<lanes>;
  using Floats = typename R::Floats;
  using Words = typename R::Words;
  typedef uint64_t Doubles __attribute__((vector_size(4 * lanes)));
  static constexpr int64_t kPairs = lanes;
  static constexpr int kAngleRegisters = 4;

  TIGHTROPE_INLINE void take(const Row<float>& r, int64_t at, int64_t) {
    const Words evens = (Words)((Doubles){} + 0xFFFFFFFFu), minus = evens & 0x80000000u;
    R::doubled(R::read(r.c + at), &c0, &c1), R::doubled(R::read(r.s + at), &s0, &s1);
    s0 = (Floats)((Words)s0 ^ minus), s1 = (Floats)((Words)s1 ^ minus);
    if constexpr (A::apart) {
      Floats lower, upper;
      R::doubled(R::read(r.c2 + at), &lower, &upper);
      c0 = joined(evens, c0, lower), c1 = joined(evens, c1, upper);
      R::doubled(R::read(r.s2 + at), &lower, &upper);
      s0 = joined(evens, s0, lower), s1 = joined(evens, s1, upper);
    }
  }
  static TIGHTROPE_INLINE Floats joined(Words evens, Floats even, Floats odd) {
    return (Floats)(((Words)even & evens) | ((Words)odd & ~evens));
  }
  template <bool streams, class T>
  TIGHTROPE_INLINE void turn(const T* x, const T*, T* y, T*) const {
    const auto a = R::read(x), b = R::read(x + lanes);
    R::template write<streams>(y, A::v(R::swapped(a), a, c0, s0));
    R::template write<streams>(y + lanes, A::v(R::swapped(b), b, c1, s1));
  }

  Floats c0, s0, c1, s1;
};

// For the rounding "each": the product of two bfloat16, rounded to bfloat16, in two instructions in place of six.
// The product p has at most 16 significant bits. A float has 24, so 65537·p = 65536·p + p rounds p at the last bit of a
// bfloat16. Ties go to even, as 65536·p is an even multiple of that bit. Subtracting 65536·p is exact.
// Not for a p that is subnormal, nor where 65537·p overflows: are_moderate excludes both.
template <int lanes>
struct Factor {
  using Floats = typename Register<lanes>::Floats;
  TIGHTROPE_INLINE void take(Floats y) { more = y * 65537, less = y * -65536; }
  TIGHTROPE_INLINE Floats times(Floats x) const { return fma_(x, less, x * more); }

  Floats more, less;
};

// Rotates pairs (a, b) by such products.
template <class A, int lanes>
struct Factors {
#if defined(__aarch64__)
  static constexpr bool kUsed = false;
#else
  static constexpr bool kUsed = A::each;
#endif
  using R = Register<lanes>;
  using Floats = typename R::Floats;
  using Words = typename R::Words;

  // Returns whether all angles are bfloat16 of moderate size.
  TIGHTROPE_INLINE bool take(const Block<A, Float, false, lanes>& angles) {
    c.take(angles.c), s.take(angles.s), c2.take(angles.c2), s2.take(angles.s2);
    const Words any = (Words)angles.c | (Words)angles.s | (Words)angles.c2 | (Words)angles.s2;
    return R::are_zero(any & 0xFFFFu) &&
           R::are_moderate(R::twin(angles.c, angles.s), R::twin(angles.c2, angles.s2));
  }
  TIGHTROPE_INLINE Floats u(Floats a, Floats b) const { return c.times(a) - s.times(b); }
  TIGHTROPE_INLINE Floats v(Floats a, Floats b) const { return c2.times(b) + s2.times(a); }

  Factor<lanes> c, s, c2, s2;
};

// Two bfloat16 per lane; cosines and sines of even pairs are stored apart from those of odd pairs.
template <class A, int lanes>
struct Block<A, BFloat16, false, lanes> {
  using R = Register<lanes>;
  using Floats = typename R::Floats;
  static constexpr int64_t kPairs = 2 * lanes;
  static constexpr int kAngleRegisters = A::apart ? 8 : 4;
  static constexpr bool kFactors = Factors<A, lanes>::kUsed;

  TIGHTROPE_INLINE void take(const Row<float>& r, int64_t at, int64_t n) {
    load(r, at, n);
    if constexpr (kFactors) has_factors = even_factors.take(even) & odd_factors.take(odd);
  }
  TIGHTROPE_INLINE void load(const Row<float>& r, int64_t at, int64_t n) {
    if (r.order == In::kUsual) {
      even.take(r, at / 2, n), odd.take(r, (n + 1) / 2 + at / 2, n);
      return;
    }
    read(r.order, r.c, at, &even.c, &odd.c), read(r.order, r.s, at, &even.s, &odd.s);
    clean(&even.c, &odd.c, &even.s, &odd.s);
    even.c2 = even.c, odd.c2 = odd.c, even.s2 = even.s, odd.s2 = odd.s;
    if (!A::apart) return;
    read(r.order, r.c2, at, &even.c2, &odd.c2), read(r.order, r.s2, at, &even.s2, &odd.s2);
    clean(&even.c2, &odd.c2, &even.s2, &odd.s2);
  }
  // Reads 2·lanes entries of a table.
  static TIGHTROPE_INLINE void read(In order, const float* from, int64_t at, Floats* even, Floats* odd) {
    if (order == In::kTwins) {
      const auto twins = R::read((const Twin*)((const uint16_t*)from + at));
      *even = R::even(twins), *odd = R::odd(twins);
      return;
    }
    R::split(R::read(from + at), R::read(from + at + lanes), even, odd);
  }
  // Replaces each NaN by one that does not round to an infinity: see copy_entries.
  static TIGHTROPE_INLINE void clean(Floats* a, Floats* b, Floats* c, Floats* d) {
    if (__builtin_expect(!R::has_nan(*a + *b + *c + *d), 1)) return;
    const auto cleaned = [](Floats x) { return x == x ? x : Floats{} + __builtin_nanf(""); };
    *a = cleaned(*a), *b = cleaned(*b), *c = cleaned(*c), *d = cleaned(*d);
  }
  template <bool streams>
  TIGHTROPE_INLINE void turn(const uint16_t* u, const uint16_t* v, uint16_t* y, uint16_t* z) const {
    const auto a = R::read((const Twin*)u), b = R::read((const Twin*)v);
    const auto a0 = R::even(a), b0 = R::even(b), a1 = R::odd(a), b1 = R::odd(b);
    if constexpr (kFactors) {
      if (__builtin_expect(has_factors && R::are_moderate(a, b), 1)) {
        const auto &f = even_factors, &g = odd_factors;
        write_twins<R, streams>(y, f.u(a0, b0), g.u(a1, b1));
        return write_twins<R, streams>(z, f.v(a0, b0), g.v(a1, b1));
      }
    }
    write_twins<R, streams>(y, A::u(a0, b0, even.c, even.s), A::u(a1, b1, odd.c, odd.s));
    write_twins<R, streams>(z, A::v(a0, b0, even.c2, even.s2), A::v(a1, b1, odd.c2, odd.s2));
  }

  Block<A, Float, false, lanes> even, odd;
  Factors<A, lanes> even_factors, odd_factors;
  bool has_factors = false;
};

template <class A, int lanes>
struct Block<A, BFloat16, true, lanes> {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = lanes;
  static constexpr int kAngleRegisters = A::apart ? 4 : 2;

  static constexpr bool kFactors = Factors<A, lanes>::kUsed;

  TIGHTROPE_INLINE void take(const Row<float>& r, int64_t at, int64_t n) {
    all.take(r, at, n);
    if constexpr (kFactors) has_factors = factors.take(all);
  }
  template <bool streams>
  TIGHTROPE_INLINE void turn(const uint16_t* x, const uint16_t*, uint16_t* y, uint16_t*) const {
    const auto pairs = R::read((const Twin*)x);
    const auto a = R::even(pairs), b = R::odd(pairs);
    if constexpr (kFactors) {
      if (__builtin_expect(has_factors && R::are_moderate(pairs, pairs), 1)) {
        return write_twins<R, streams>(y, factors.u(a, b), factors.v(a, b));
      }
    }
    write_twins<R, streams>(y, A::u(a, b, all.c, all.s), A::v(a, b, all.c2, all.s2));
  }

  Block<A, Float, false, lanes> all;
  Factors<A, lanes> factors;
  bool has_factors = false;
};

template <class T>
struct Type {
  using Of = T;
};

// A block, and one of a narrower register after it.
template <class First, class Second>
struct Both {
  static constexpr int64_t kPairs = First::kPairs + Second::kPairs, kThen = First::kPairs;

  TIGHTROPE_INLINE void take(const Row<float>& r, int64_t at, int64_t n) {
    first.take(r, at, n), second.take(r, at + kThen, n);
  }
  template <bool streams, class T>
  TIGHTROPE_INLINE void turn(const T* u, const T* v, T* y, T* z) const {
    first.template turn<streams>(u, v, y, z);
    second.template turn<streams>(u + kThen, v + kThen, y + kThen, z + kThen);
  }

  First first;
  Second second;
};

// Rotates `blocks` blocks of pairs of all heads; their angles start at pair `at`.
template <class B, bool interleaved, bool streams, int blocks, class Stored>
inline void rotate_blocks(const Heads<Stored>& heads, int64_t channel, int64_t other, int64_t at,
                          int64_t n, int64_t bytes, const Row<float>& r) {
  constexpr int64_t kPair = interleaved ? 2 : 1;
  B block[blocks];
#pragma GCC unroll 8
  for (int b = 0; b < blocks; ++b) block[b].take(r, at + b * B::kPairs, n);
  const Stored* in = heads.in + channel + at * kPair;
  Stored* out = heads.out + channel + at * kPair;
  for (int64_t head = 0; head < heads.count; ++head) {
    prefetch(in, streams ? in : out, heads.ahead, bytes);
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) {
      constexpr int64_t kStep = kPair * B::kPairs;
      block[b].template turn<streams>(in + b * kStep, in + b * kStep + other, out + b * kStep,
                                      out + b * kStep + other);
    }
    in += heads.in_step;
    out += heads.out_step;
  }
}

// Rotates n pairs of each head of one token; see rotate_in_registers.
template <class A, bool interleaved, class Stored>
TIGHTROPE_INLINE void rotate_token(const Heads<Stored>& heads, int64_t channel, int64_t other, int64_t n, int64_t bytes,
                                   const Row<float>& r) {
  using F = typename A::Format;
  using Widest = Block<A, F, interleaved, kWidest>;
  constexpr int64_t kPair = interleaved ? 2 : 1;
  int64_t at = 0;
  const auto turn_blocks = [&](auto block, auto blocks) {
    using B = typename decltype(block)::Of;
    constexpr int64_t kTaken = blocks.value * B::kPairs;
    if (n - at < kTaken) return false;
    const int64_t fetched = at == 0 ? bytes : 0;
    // Streamed halves are whole cache lines, for which the widest registers suffice but for a few neighbours.
    constexpr bool kStreams = kIs<B, Widest>;
    if (kStreams && heads.streams) {
      rotate_blocks<B, interleaved, kStreams, blocks.value>(heads, channel, other, at, n, fetched, r);
    } else {
      rotate_blocks<B, interleaved, false, blocks.value>(heads, channel, other, at, n, fetched, r);
    }
    at += kTaken;
    return true;
  };
  const auto turn = [&](auto lanes, auto blocks) {
    return turn_blocks(Type<Block<A, F, interleaved, lanes.value>>(), blocks);
  };
  constexpr int kFit = kForAngles / Widest::kAngleRegisters;
  constexpr int kMost = kFit > 4 ? 4 : kFit;
  while (turn(Is<kWidest>(), Is<kMost>())) {
  }
  if constexpr (kMost > 3) turn(Is<kWidest>(), Is<3>());
  if constexpr (kMost > 2) turn(Is<kWidest>(), Is<2>());
  turn(Is<kWidest>(), Is<1>());
  if constexpr (kWidest > 8) turn(Is<8>(), Is<1>());
  if constexpr (kTwins<F> && !interleaved)
    turn_blocks(Type<Both<Block<A, F, false, 4>, Block<A, F, false, 2>>>(), Is<1>());
  turn(Is<4>(), Is<1>());
  if constexpr (kTwins<F> && !interleaved) turn(Is<2>(), Is<1>());
  for (; at < n; ++at) {
    const int64_t k = slot(kTwins<F> && !interleaved, at, n);
    const Stored* in = heads.in + channel + at * kPair;
    Stored* out = heads.out + channel + at * kPair;
    for (int64_t head = 0; head < heads.count; ++head) {
      turn_pair<A>(in, in + other, out, out + other, r, k);
      in += heads.in_step;
      out += heads.out_step;
    }
  }
}

// Rotates n pairs of each head: their first channels begin at `channel`, and the second ones are `other` channels
// away. The first pass through the heads of a token prefetches the next ones, of this size.
template <class A, bool interleaved, class Stored>
TIGHTROPE_LOOP void rotate_in_registers(Heads<Stored> heads, int64_t channel, int64_t other, int64_t n, int64_t bytes,
                                        const Row<float>* rows) {
  for (int64_t token = 0; token < heads.tokens; ++token, heads.next_token())
    rotate_token<A, interleaved>(heads, channel, other, n, bytes, rows[token]);
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
