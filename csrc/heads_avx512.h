// The hot loops: rotate the heads of one token, with the token's angles in registers. Pairs go through
// registers of 16, 8 and 4 lanes, the widest first, and each set of registers goes through all heads
// before the next. The remainder, at most three pairs, goes one pair at a time. (Masked registers could
// process it too, but the loads of the next head would wait for masked stores.)
//
// For tensors with contiguous channels. Other tensors, and other processors, use the loops of heads.h,
// which compute the same bits.
#pragma once

#include "heads.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

template <int lanes>
struct Register;

#define TIGHTROPE_REGISTER(lanes, f, i, p, si)                                                   \
  template <>                                                                                    \
  struct Register<lanes> {                                                                       \
    using Floats = f;                                                                            \
    using Words = i;                                                                             \
    typedef uint32_t Shifted __attribute__((vector_size(4 * lanes)));                            \
    static Floats read(const float* at) { return p##_loadu_ps(at); }                             \
    static void write(float* at, Floats x) { p##_storeu_ps(at, x); }                             \
    static Words read(const Twin* at) { return p##_loadu_epi32(at); }                            \
    static void write(Twin* at, Words x) { p##_storeu_epi32(at, x); }                            \
    /* Zero-masked intrinsics stand in for the plain ones, here and below: GCC 12 warns about    \
       uninitialised values in the plain ones, and in the intrinsics of shifts. */               \
    static Floats swapped(Floats x) { return p##_maskz_permute_ps((1u << lanes) - 1, x, 0xB1); } \
    static Words left(Words x) { return (Words)((Shifted)x << 16); }                             \
    static Words right(Words x) { return (Words)((Shifted)x >> 16); }                            \
    static Words upper() { return p##_set1_epi32(int(0xFFFF0000u)); }                            \
    static Floats even(Words x) { return p##_cast##si##_ps(left(x)); }                           \
    static Floats odd(Words x) { return p##_cast##si##_ps(p##_and_##si(x, upper())); }           \
    /* Cut both to their upper halves, and add one if the lower half exceeds 0x8000, or equals it \
       and the result is odd. No NaN can become an infinity: see BFloat16. */                    \
    static Words twin(Floats a, Floats b) {                                                      \
      const Words e = p##_castps_##si(a), o = p##_castps_##si(b);                                \
      const Words ones = p##_set1_epi16(1);                                                      \
      const Words cut = p##_ternarylogic_epi32(right(e), o, upper(), 0xF8);                     \
      const Words rest =                                                                         \
          p##_ternarylogic_epi32(left(o), e, p##_set1_epi32(0xFFFF), 0xF8);                       \
      const Words sticky = p##_ternarylogic_epi32(rest, cut, ones, 0xF8);                        \
      const auto up = p##_cmpgt_epu16_mask(sticky, p##_set1_epi16(-0x8000));                     \
      return p##_mask_add_epi16(cut, up, cut, ones);                                             \
    }
#define TIGHTROPE_REGISTER_END };
TIGHTROPE_REGISTER(16, __m512, __m512i, _mm512, si512)
  static Floats read(const uint16_t* at) {
    return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256((const __m256i*)at));
  }
  static void write(uint16_t* at, Floats x) {
    _mm256_storeu_si256((__m256i*)at, _mm512_maskz_cvtps_ph(0xFFFF, x, 0));
  }
TIGHTROPE_REGISTER_END
TIGHTROPE_REGISTER(8, __m256, __m256i, _mm256, si256)
  static Floats read(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
  }
  static void write(uint16_t* at, Floats x) {
    _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph(x, 0));
  }
TIGHTROPE_REGISTER_END
TIGHTROPE_REGISTER(4, __m128, __m128i, _mm, si128)
  static Floats read(const uint16_t* at) {
    return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)at));
  }
  static void write(uint16_t* at, Floats x) { _mm_storel_epi64((__m128i*)at, _mm_cvtps_ph(x, 0)); }
TIGHTROPE_REGISTER_END
#undef TIGHTROPE_REGISTER
#undef TIGHTROPE_REGISTER_END

#if defined(__AVX512BF16__)
// The order of 16-bit lanes that turns a conversion of two registers, one half after the other, into
// twins; and the same for registers whose lanes an earlier conversion left in halves (see `round`).
template <int lanes>
struct Order {
  constexpr Order() : direct(), rounded() {
    for (int k = 0; k < lanes; ++k) {
      direct[2 * k] = uint16_t(k), direct[2 * k + 1] = uint16_t(lanes + k);
      const int from = k % 2 * lanes + k / 2;
      rounded[2 * k] = uint16_t(from), rounded[2 * k + 1] = uint16_t(from + lanes / 2);
    }
  }
  alignas(64) uint16_t direct[2 * lanes];
  alignas(64) uint16_t rounded[2 * lanes];
};
template <int lanes>
inline constexpr Order<lanes> kOrder;

// The processor's conversion to bfloat16. It takes subnormal numbers for zeros, so it serves only
// numbers that cannot lead to one: if no x but 0 is below 2^-55 and no cosine or sine but 0 below 2^-40,
// products are multiples of 2^-125, and so are their sums.
template <int lanes>
struct Convert;

#define TIGHTROPE_CONVERT(lanes, f, i, p, si)                                                   \
  template <>                                                                                   \
  struct Convert<lanes> {                                                                       \
    using R = Register<lanes>;                                                                  \
    static bool has_tiny(i a, i b) { /* twice the magnitude, minus 2: zeros become the largest */ \
      const i two = p##_set1_epi16(2);                                                          \
      const i x = p##_sub_epi16(p##_add_epi16(a, a), two);                                      \
      const i y = p##_sub_epi16(p##_add_epi16(b, b), two);                                      \
      return p##_cmplt_epu16_mask(p##_min_epu16(x, y), p##_set1_epi16(0x4800 - 2)) != 0;        \
    }                                                                                           \
    static bool has_tiny(f x) {                                                                 \
      const i a = p##_cast##ps_##si(x);                                                         \
      const i twice = p##_sub_epi32(p##_add_epi32(a, a), p##_set1_epi32(2));                    \
      return p##_cmplt_epu32_mask(twice, p##_set1_epi32(0x57000000 - 2)) != 0;                  \
    }                                                                                           \
    static i twin(f even, f odd) {                                                              \
      const i halves = (i)p##_cvtne2ps_pbh(odd, even);                                          \
      return p##_permutexvar_epi16(R::read((const Twin*)kOrder<lanes>.direct), halves);         \
    }                                                                                           \
    /* Rounds both; leaves their lanes in another order, the same for all registers. */         \
    static void round(f& x, f& y) {                                                             \
      const i halves = (i)p##_cvtne2ps_pbh(y, x);                                               \
      x = R::even(halves), y = R::odd(halves);                                                  \
    }                                                                                           \
    static i twin_of_rounded(f x, f y) {                                                        \
      const i halves = (i)p##_cvtne2ps_pbh(y, x);                                               \
      return p##_permutexvar_epi16(R::read((const Twin*)kOrder<lanes>.rounded), halves);        \
    }                                                                                           \
    /* a·c - b·s and a·c + b·s of two registers each. */                                        \
    template <class A>                                                                          \
    static i u(f a0, f b0, f c0, f s0, f a1, f b1, f c1, f s1) {                                \
      if constexpr (!A::each) return twin(A::u(a0, b0, c0, s0), A::u(a1, b1, c1, s1));          \
      f p0 = a0 * c0, p1 = a1 * c1, q0 = b0 * s0, q1 = b1 * s1;                                 \
      round(p0, p1), round(q0, q1);                                                             \
      return twin_of_rounded(p0 - q0, p1 - q1);                                                 \
    }                                                                                           \
    template <class A>                                                                          \
    static i v(f a0, f b0, f c0, f s0, f a1, f b1, f c1, f s1) {                                \
      if constexpr (!A::each) return twin(A::v(a0, b0, c0, s0), A::v(a1, b1, c1, s1));          \
      f p0 = b0 * c0, p1 = b1 * c1, q0 = a0 * s0, q1 = a1 * s1;                                 \
      round(p0, p1), round(q0, q1);                                                             \
      return twin_of_rounded(p0 + q0, p1 + q1);                                                 \
    }                                                                                           \
  };
TIGHTROPE_CONVERT(16, __m512, __m512i, _mm512, si512)
TIGHTROPE_CONVERT(8, __m256, __m256i, _mm256, si256)
TIGHTROPE_CONVERT(4, __m128, __m128i, _mm, si128)
#undef TIGHTROPE_CONVERT
#endif

// Pairs that go through registers together, with their cosines and sines: those of the first channels
// (c, s) and of the second (c2, s2). The format is Float or Half in the general case.
template <class A, class F, bool interleaved, int lanes>
struct Block {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = lanes;

  void take(const Row<float>& r, int64_t at, int64_t) {
    c = R::read(r.c + at), s = R::read(r.s + at);
    c2 = A::apart ? R::read(r.c2 + at) : c, s2 = A::apart ? R::read(r.s2 + at) : s;
  }
  template <class T>
  void turn(const T* u, const T* v, T* y, T* z) const {
    const auto a = R::read(u), b = R::read(v);
    R::write(y, A::u(a, b, c, s));
    R::write(z, A::v(a, b, c2, s2));
  }
#if defined(__AVX512BF16__)
  bool has_tiny() const {
    using C = Convert<lanes>;
    return C::has_tiny(c) || C::has_tiny(s) || (A::apart && (C::has_tiny(c2) || C::has_tiny(s2)));
  }
#endif

  typename R::Floats c, s, c2, s2;
};

// Neighbours (u, v) rotate at once, as x·c + swapped(x)·s: c holds the cosines in the order of the
// channels, s the sines of the first channels negated.
template <class A, class F, int lanes>
struct Block<A, F, true, lanes> {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = lanes;

  void take(const Row<float>& r, int64_t at, int64_t) {
    alignas(64) float cosines[2 * lanes], sines[2 * lanes];
    for (int k = 0; k < lanes; ++k) {
      cosines[2 * k] = r.c[at + k], cosines[2 * k + 1] = (A::apart ? r.c2 : r.c)[at + k];
      sines[2 * k] = -r.s[at + k], sines[2 * k + 1] = (A::apart ? r.s2 : r.s)[at + k];
    }
    c0 = R::read(cosines), c1 = R::read(cosines + lanes);
    s0 = R::read(sines), s1 = R::read(sines + lanes);
  }
  template <class T>
  void turn(const T* x, const T*, T* y, T*) const {
    const auto a = R::read(x), b = R::read(x + lanes);
    R::write(y, A::v(R::swapped(a), a, c0, s0));
    R::write(y + lanes, A::v(R::swapped(b), b, c1, s1));
  }

  typename R::Floats c0, s0, c1, s1;
};

// Two bfloat16 per lane; cosines and sines of even pairs are stored apart from those of odd pairs.
template <class A, int lanes>
struct Block<A, BFloat16, false, lanes> {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = 2 * lanes;

  void take(const Row<float>& r, int64_t at, int64_t n) {
    even.take(r, at / 2, n), odd.take(r, (n + 1) / 2 + at / 2, n);
#if defined(__AVX512BF16__)
    converts = !even.has_tiny() && !odd.has_tiny();
#endif
  }
  void turn(const uint16_t* u, const uint16_t* v, uint16_t* y, uint16_t* z) const {
    const auto a = R::read((const Twin*)u), b = R::read((const Twin*)v);
    const auto a0 = R::even(a), b0 = R::even(b), a1 = R::odd(a), b1 = R::odd(b);
#if defined(__AVX512BF16__)
    using C = Convert<lanes>;
    if (__builtin_expect(converts && !C::has_tiny(a, b), 1)) {
      R::write((Twin*)y, C::template u<A>(a0, b0, even.c, even.s, a1, b1, odd.c, odd.s));
      R::write((Twin*)z, C::template v<A>(a0, b0, even.c2, even.s2, a1, b1, odd.c2, odd.s2));
      return;
    }
#endif
    R::write((Twin*)y, R::twin(A::u(a0, b0, even.c, even.s), A::u(a1, b1, odd.c, odd.s)));
    R::write((Twin*)z, R::twin(A::v(a0, b0, even.c2, even.s2), A::v(a1, b1, odd.c2, odd.s2)));
  }

  Block<A, Float, false, lanes> even, odd;
  bool converts = false;
};

template <class A, int lanes>
struct Block<A, BFloat16, true, lanes> {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = lanes;

  void take(const Row<float>& r, int64_t at, int64_t n) {
    all.take(r, at, n);
#if defined(__AVX512BF16__)
    converts = !all.has_tiny();
#endif
  }
  void turn(const uint16_t* x, const uint16_t*, uint16_t* y, uint16_t*) const {
    const auto pairs = R::read((const Twin*)x);
    const auto a = R::even(pairs), b = R::odd(pairs);
#if defined(__AVX512BF16__)
    using C = Convert<lanes>;
    if (__builtin_expect(converts && !C::has_tiny(pairs, pairs), 1)) {
      if constexpr (A::each) {
        auto first = a * all.c, second = b * all.c2, third = -b * all.s, fourth = a * all.s2;
        C::round(first, second), C::round(third, fourth);
        R::write((Twin*)y, C::twin_of_rounded(first + third, second + fourth));
      } else {
        R::write((Twin*)y, C::twin(A::u(a, b, all.c, all.s), A::v(a, b, all.c2, all.s2)));
      }
      return;
    }
#endif
    R::write((Twin*)y, R::twin(A::u(a, b, all.c, all.s), A::v(a, b, all.c2, all.s2)));
  }

  Block<A, Float, false, lanes> all;
  bool converts = false;
};

// An integer as a type, to select a template.
template <int n>
struct Is {
  static constexpr int value = n;
};

// Rotates `blocks` blocks of pairs of all heads; their angles start at pair `at`.
template <class A, bool interleaved, int lanes, int blocks, class Stored>
inline void turn_blocks(const Heads<Stored>& heads, int64_t channel, int64_t other, int64_t at,
                        int64_t n, int64_t bytes, const Row<float>& r) {
  using B = Block<A, typename A::Format, interleaved, lanes>;
  constexpr int64_t kPair = interleaved ? 2 : 1;
  B block[blocks];
#pragma GCC unroll 8
  for (int b = 0; b < blocks; ++b) block[b].take(r, at + b * B::kPairs, n);
  const Stored* in = heads.in + channel + at * kPair;
  Stored* out = heads.out + channel + at * kPair;
  for (int64_t head = 0; head < heads.count; ++head) {
    prefetch(in, out, heads.ahead, bytes);
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) {
      constexpr int64_t kStep = kPair * B::kPairs;
      block[b].turn(in + b * kStep, in + b * kStep + other, out + b * kStep,
                    out + b * kStep + other);
    }
    in += heads.in_step;
    out += heads.out_step;
  }
}

// Rotates pairs [first, first + n) of each head.
template <class A, bool interleaved, class Stored>
inline void turn_in_registers(const Problem& p, const Heads<Stored>& heads, int64_t first,
                              int64_t n, const Row<float>& r) {
  constexpr int64_t kPair = interleaved ? 2 : 1;
  constexpr int64_t kPairs = Block<A, typename A::Format, interleaved, 16>::kPairs;
  const int64_t channel = p.start + first * kPair;
  const int64_t other = interleaved ? 1 : p.pairs;
  // Only the first pass through the heads prefetches.
  const int64_t bytes = p.head_dim * int64_t(sizeof(Stored));
  int64_t at = 0;
  const auto turn = [&](auto lanes, auto blocks) {
    constexpr int64_t kTaken = blocks.value * kPairs * lanes.value / 16;
    if (n - at < kTaken) return false;
    turn_blocks<A, interleaved, lanes.value, blocks.value>(heads, channel, other, at, n,
                                                           at == 0 ? bytes : 0, r);
    at += kTaken;
    return true;
  };
  // At most four blocks, so that enough registers remain for the arithmetic; two if the angles of one
  // block take eight registers.
  constexpr int kMost = A::apart && !interleaved && kPairs > 16 ? 2 : 4;
  while (turn(Is<16>(), Is<kMost>())) {
  }
  (kMost > 3 && turn(Is<16>(), Is<3>())) || (kMost > 2 && turn(Is<16>(), Is<2>())) || turn(Is<16>(), Is<1>());
  turn(Is<8>(), Is<1>());
  turn(Is<4>(), Is<1>());
  for (; at < n; ++at) {
    const int64_t k = slot(in_twos(p), at, n);
    const Stored* in = heads.in + channel + at * kPair;
    Stored* out = heads.out + channel + at * kPair;
    for (int64_t head = 0; head < heads.count; ++head) {
      turn_pair<A>(in, in + other, out, out + other, r, k);
      in += heads.in_step;
      out += heads.out_step;
    }
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
