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
  }
  void turn(const uint16_t* u, const uint16_t* v, uint16_t* y, uint16_t* z) const {
    const auto a = R::read((const Twin*)u), b = R::read((const Twin*)v);
    const auto a0 = R::even(a), b0 = R::even(b), a1 = R::odd(a), b1 = R::odd(b);
    R::write((Twin*)y, R::twin(A::u(a0, b0, even.c, even.s), A::u(a1, b1, odd.c, odd.s)));
    R::write((Twin*)z, R::twin(A::v(a0, b0, even.c2, even.s2), A::v(a1, b1, odd.c2, odd.s2)));
  }

  Block<A, Float, false, lanes> even, odd;
};

template <class A, int lanes>
struct Block<A, BFloat16, true, lanes> {
  using R = Register<lanes>;
  static constexpr int64_t kPairs = lanes;

  void take(const Row<float>& r, int64_t at, int64_t n) { all.take(r, at, n); }
  void turn(const uint16_t* x, const uint16_t*, uint16_t* y, uint16_t*) const {
    const auto pairs = R::read((const Twin*)x);
    const auto a = R::even(pairs), b = R::odd(pairs);
    R::write((Twin*)y, R::twin(A::u(a, b, all.c, all.s), A::v(a, b, all.c2, all.s2)));
  }

  Block<A, Float, false, lanes> all;
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
