// The rotation between f and P for heads whose channels lie side by side, in registers throughout: a
// block of pairs is widened, f is applied, it is turned by angles that stay in registers from head to
// head, multiplied by P and rounded once. What does not fill a register goes through the same
// instructions under a mask, so every element of one act has one arithmetic.
//
// Weights and factors stand in rows that are arranged in the order of the registers. Acts that are not
// here, and double, take the loops of outer.h.
#pragma once

#include "acts_avx512.h"
#include "heads_avx512.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Calls use(A()) for the act A of registers, if it is one.
template <class Use>
inline bool with_registers(Act act, const Use& use) {
  switch (act) {
    case Act::kNone: return use(NoneV()), true;
    case Act::kRelu: return use(ReluV()), true;
    case Act::kSigmoid: return use(SigmoidV()), true;
    case Act::kSilu: return use(SiluV()), true;
    case Act::kGelu: return use(GeluV()), true;
    case Act::kRelu2: return use(Relu2V()), true;
    case Act::kExp: return use(ExpV()), true;
    case Act::kLeakyRelu: return use(LeakyReluV()), true;
    default: return false;
  }
}

// The first n of 16 or 32 lanes.
inline uint32_t lanes(int64_t n) { return n <= 0 ? 0 : n >= 32 ? 0xFFFFFFFFu : (1u << n) - 1; }

// Channels that are read together: how they become registers.
template <class F>
struct Span;
template <>
struct Span<Float> {
  static constexpr int kRegisters = 1, kChannels = 16;
  static constexpr bool kBrief = false;
  static TIGHTROPE_INLINE void read(const float* at, uint32_t mask, V* x) {
    x[0] = _mm512_maskz_loadu_ps(__mmask16(mask), at);
  }
  static TIGHTROPE_INLINE void write(float* at, uint32_t mask, const V* x) {
    _mm512_mask_storeu_ps(at, __mmask16(mask), x[0]);
  }
};
template <>
struct Span<Half> {
  static constexpr int kRegisters = 1, kChannels = 16;
  static constexpr bool kBrief = false;
  static TIGHTROPE_INLINE void read(const uint16_t* at, uint32_t mask, V* x) {
    x[0] = _mm512_maskz_cvtph_ps(kAll, _mm256_maskz_loadu_epi16(__mmask16(mask), at));
  }
  static TIGHTROPE_INLINE void write(uint16_t* at, uint32_t mask, const V* x) {
    _mm256_mask_storeu_epi16(at, __mmask16(mask), _mm512_maskz_cvtps_ph(kAll, x[0], 0));
  }
};
// The even channels and the odd ones.
template <>
struct Span<BFloat16> {
  using R = Register<16>;
  static constexpr int kRegisters = 2, kChannels = 32;
  static constexpr bool kBrief = true;
  static TIGHTROPE_INLINE void read(const uint16_t* at, uint32_t mask, V* x) {
    const __m512i twins = _mm512_maskz_loadu_epi16(mask, at);
    x[0] = R::even(twins), x[1] = R::odd(twins);
  }
  static TIGHTROPE_INLINE void write(uint16_t* at, uint32_t mask, const V* x) {
    _mm512_mask_storeu_epi16(at, mask, R::twin(x[0], x[1]));
  }
};

// Neighbours in one register.
template <class F, bool interleaved>
constexpr bool kMixed = interleaved && Span<F>::kRegisters == 1;

// Pairs that go through registers together: two spans, or the one that has both of its pairs.
template <class F, bool interleaved>
struct Turn {
  using S = Span<F>;
  static constexpr int kSpans = interleaved && !kMixed<F, interleaved> ? 1 : 2;
  static constexpr int kRegisters = kSpans * S::kRegisters;
  static constexpr int64_t kPairs = kSpans * S::kChannels / 2;
  static constexpr int kAngles_ = kMixed<F, interleaved> ? 2 : kRegisters / 2;

  // Of n pairs whose angles begin at `cosine`, those from `at` on.
  template <bool whole>
  TIGHTROPE_INLINE void take(const float* cosine, const float* sine, int64_t at, int64_t n) {
    const int64_t left = n - at;
    const __mmask16 mask = __mmask16(whole ? ~0u : lanes(left));
    if (kMixed<F, interleaved>) {
      const V a = _mm512_maskz_loadu_ps(mask, cosine + at);
      const V b = _mm512_maskz_loadu_ps(mask, sine + at);
      const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
      const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
      const __m512i sign = _mm512_set1_epi64(0x80000000);
      c[0] = _mm512_maskz_permutexvar_ps(kAll, low, a), c[1] = _mm512_maskz_permutexvar_ps(kAll, high, a);
      s[0] = _mm512_xor_ps(_mm512_maskz_permutexvar_ps(kAll, low, b), _mm512_castsi512_ps(sign));
      s[1] = _mm512_xor_ps(_mm512_maskz_permutexvar_ps(kAll, high, b), _mm512_castsi512_ps(sign));
    } else if (kAngles_ == 1) {
      c[0] = _mm512_maskz_loadu_ps(mask, cosine + at);
      s[0] = _mm512_maskz_loadu_ps(mask, sine + at);
    } else {
      // Even pairs and odd ones are kept apart: see in_twos.
      for (int i = 0; i < 2; ++i) {
        const int64_t from = at / 2 + i * ((n + 1) / 2);
        const __mmask16 half = __mmask16(whole ? ~0u : lanes((left + 1 - i) / 2));
        c[i] = _mm512_maskz_loadu_ps(half, cosine + from);
        s[i] = _mm512_maskz_loadu_ps(half, sine + from);
      }
    }
  }
  // In place.
  TIGHTROPE_INLINE void turn(V* x) const {
    if (kMixed<F, interleaved>) {
      for (int i = 0; i < 2; ++i) x[i] = Register<16>::turned(x[i], c[i], s[i]);
      return;
    }
    constexpr int half = kRegisters / 2;
#pragma GCC unroll 2
    for (int i = 0; i < half; ++i) {
      const V u = x[i], v = x[half + i];
      x[i] = Register<16>::turned_u(u, v, c[i], s[i]);
      x[half + i] = Register<16>::turned_v(u, v, c[i], s[i]);
    }
  }
  // `other`: from a member of a pair to the other; `left` pairs of the block are there.
  template <bool whole>
  static TIGHTROPE_INLINE void read(const typename F::Stored* at, int64_t other, int64_t left, V* x) {
    if (!interleaved) {
      const uint32_t mask = whole ? ~0u : lanes(left);
      S::read(at, mask, x);
      S::read(at + other, mask, x + S::kRegisters);
    } else {
#pragma GCC unroll 2
      for (int i = 0; i < kSpans; ++i)
        S::read(at + i * S::kChannels, whole ? ~0u : lanes(2 * left - i * S::kChannels), x + i * S::kRegisters);
    }
  }
  template <bool whole>
  static TIGHTROPE_INLINE void write(typename F::Stored* at, int64_t other, int64_t left, const V* x) {
    if (!interleaved) {
      const uint32_t mask = whole ? ~0u : lanes(left);
      S::write(at, mask, x);
      S::write(at + other, mask, x + S::kRegisters);
    } else {
#pragma GCC unroll 2
      for (int i = 0; i < kSpans; ++i)
        S::write(at + i * S::kChannels, whole ? ~0u : lanes(2 * left - i * S::kChannels), x + i * S::kRegisters);
    }
  }

  V c[2], s[2];
};

// A turn of x times a weight: the weight is taken into the angles once for all heads that share it.
// Each member of a pair has its own, so cosines and sines double.
template <class F, bool interleaved>
struct WeighedTurn {
  using T = Turn<F, interleaved>;
  static constexpr int kHalf = T::kRegisters / 2;

  // `weight` is arranged, of this block.
  TIGHTROPE_INLINE void take(const T& turn, const float* weight) {
#pragma GCC unroll 4
    for (int i = 0; i < T::kRegisters; ++i) {
      const V w = _mm512_loadu_ps(weight + 16 * i);
      if (kMixed<F, interleaved>) {
        c[i] = times(turn.c[i], w), s[i] = times(turn.s[i], Register<16>::swapped(w));
      } else {
        c[i] = times(turn.c[i % kHalf], w), s[i] = times(turn.s[i % kHalf], w);
      }
    }
  }
  TIGHTROPE_INLINE void turn(V* x) const {
    if (kMixed<F, interleaved>) {
      for (int i = 0; i < 2; ++i) x[i] = Register<16>::turned(x[i], c[i], s[i]);
      return;
    }
#pragma GCC unroll 2
    for (int i = 0; i < kHalf; ++i) {
      const V u = x[i], v = x[kHalf + i];
      x[i] = _mm512_fmsub_ps(u, c[i], times(v, s[kHalf + i]));
      x[kHalf + i] = fused(v, c[kHalf + i], times(u, s[i]));
    }
  }

  V c[4], s[4];
};

// ---- rows in the order of the registers -----------------------------------------------------------

// Calls use(channel, n, at) for each span of a head: n channels, whose registers begin at value `at`.
template <class F, class Use>
inline void each_span(const Problem& p, const Use& use) {
  constexpr int64_t kChannels = Span<F>::kChannels;
  int64_t at = 0;
  const auto span = [&](int64_t from, int64_t to) {
    use(from, to - from < 0 ? 0 : to - from < kChannels ? to - from : kChannels, at);
    at += kChannels;
  };
  const int64_t end = p.start + 2 * p.pairs;
  for (int64_t k = 0; k < p.start; k += kChannels) span(k, p.start);
  if (p.interleaved) {
    constexpr int64_t kBlock = 2 * Turn<F, true>::kPairs;
    for (int64_t k = p.start; k < end; k += kBlock)
      for (int64_t i = 0; i < kBlock; i += kChannels) span(k + i, end);
  } else {
    for (int64_t k = 0; k < p.pairs; k += kChannels) {
      span(p.start + k, p.start + p.pairs);
      span(p.start + p.pairs + k, end);
    }
  }
  for (int64_t k = end; k < p.head_dim; k += kChannels) span(k, p.head_dim);
}

// From channels to registers. One NaN for all: see BFloat16.
template <class F>
inline void arrange(const Problem& p, const float* from, float* to) {
  const auto read = [&](int64_t at, int64_t n) {
    const V x = _mm512_maskz_loadu_ps(__mmask16(lanes(n)), from + at);
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), all(__builtin_nanf("")));
  };
  each_span<F>(p, [&](int64_t channel, int64_t n, int64_t at) {
    V x = read(channel, n);
    if (Span<F>::kRegisters == 2) {
      const V y = read(channel + 16, n - 16);
      const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      _mm512_storeu_ps(to + at + 16, _mm512_permutex2var_ps(x, odd, y));
      x = _mm512_permutex2var_ps(x, even, y);
    }
    _mm512_storeu_ps(to + at, x);
  });
}
// And back.
template <class F>
inline void restore(const Problem& p, const float* from, float* to) {
  each_span<F>(p, [&](int64_t channel, int64_t n, int64_t at) {
    for (int64_t k = 0; k < n; ++k)
      to[channel + k] = from[at + (Span<F>::kRegisters == 2 ? k / 2 + k % 2 * 16 : k)];
  });
}

// ---- heads of one token -----------------------------------------------------------------------------

// Channels side by side; steps are from head to head.
template <class Stored>
struct Line {
  const Stored* in;
  Stored* out;
  const Stored* x;  // of the forward call, on the way back
  int64_t in_step, out_step, x_step;
  const float *gate, *weight;  // arranged, or null
  int64_t gate_step, weight_step;
  int64_t count, ahead;
};

// So many heads have their norms taken together.
constexpr int64_t kNorms = 64;

// A norm's weight turns with the heads; of each head there is a scale besides.
struct NormV {};

template <class A>
constexpr bool kIsNone = false;
template <>
constexpr bool kIsNone<NoneV> = true;
template <class A>
constexpr bool kIsNorm = false;
template <>
constexpr bool kIsNorm<NormV> = true;

// `blocks` blocks of pairs of all heads, the first `pair` pairs into the slice.
template <class F, bool interleaved, class A, bool back, int blocks, bool whole>
TIGHTROPE_LOOP void turn_line(const Problem& p, const Line<typename F::Stored>& line, const float* scale,
                      int64_t pair, int64_t row, int64_t bytes, const float* c, const float* s) {
  using T = Turn<F, interleaved>;
  constexpr bool kBrief = Span<F>::kBrief;
  constexpr int64_t kRow = T::kRegisters * 16, kStep = T::kPairs * (interleaved ? 2 : 1);
  // Stores of numbers might change what is behind a reference, for all that a compiler knows.
  const int64_t pairs = p.pairs, left = pairs - pair, count = line.count, ahead = line.ahead;
  const int64_t in_step = line.in_step, out_step = line.out_step, x_step = line.x_step;
  const int64_t gate_step = line.gate_step, weight_step = line.weight_step;
  const int64_t channel = p.start + pair * (interleaved ? 2 : 1);
  const auto *in = line.in + channel, *x = back && !kIsNone<A> ? line.x + channel : line.in;
  auto* out = line.out + channel;
  const float* gate = line.gate == nullptr ? nullptr : line.gate + row;
  const float* weight = line.weight == nullptr ? nullptr : line.weight + row;
  // Angles come in chunks of kAngles pairs.
  const int64_t chunk = pair / kAngles * kAngles;
  const int64_t n = pairs - chunk < kAngles ? pairs - chunk : kAngles;
  T turns[blocks];
#pragma GCC unroll 8
  for (int b = 0; b < blocks; ++b)
    turns[b].template take<whole>(c + chunk, s + chunk, pair - chunk + b * T::kPairs, n);
  WeighedTurn<F, interleaved> weighed[blocks];
  if (kIsNorm<A>) {
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) weighed[b].take(turns[b], weight + b * kRow);
  }
  for (int64_t head = 0; head < count; ++head) {
    ask(in, out, ahead, bytes);
    if (back && !kIsNone<A>) ask(x, x, ahead, bytes);
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) {
      V y[T::kRegisters];
      T::template read<whole>(in + b * kStep, pairs, left, y);
      if constexpr (!back && !kIsNorm<A>) {
        Several<A, kBrief, T::kRegisters>::f(y);
        turns[b].turn(y);
      }
      if constexpr (kIsNorm<A>) {
        // Scaled first: what is behind a norm fits, where a turn of what is before it might overflow.
#pragma GCC unroll 4
        for (int i = 0; i < T::kRegisters; ++i) y[i] = times(y[i], all(scale[head]));
        weighed[b].turn(y);
      }
      if (gate != nullptr) {
#pragma GCC unroll 4
        for (int i = 0; i < T::kRegisters; ++i) y[i] = times(y[i], _mm512_loadu_ps(gate + b * kRow + 16 * i));
      }
      if constexpr (back) {
        turns[b].turn(y);
        if constexpr (!kIsNone<A>) {
          V at[T::kRegisters];
          T::template read<whole>(x + b * kStep, pairs, left, at);
#pragma GCC unroll 4
          for (int i = 0; i < T::kRegisters; ++i) y[i] = A::template back<kBrief>(at[i], y[i]);
        }
      }
      T::template write<whole>(out + b * kStep, pairs, left, y);
    }
    in += in_step, out += out_step;
    if (back && !kIsNone<A>) x += x_step;
    if (gate != nullptr) gate += gate_step;
    if (kIsNorm<A> && weight_step != 0 && head + 1 < count) {
      weight += weight_step;
#pragma GCC unroll 8
      for (int b = 0; b < blocks; ++b) {
        T turn;
        turn.template take<whole>(c + chunk, s + chunk, pair - chunk + b * T::kPairs, n);
        weighed[b].take(turn, weight + b * kRow);
      }
    }
  }
}

// n channels that do not turn.
template <class F, class A, bool back>
TIGHTROPE_LOOP void pass_line(const Line<typename F::Stored>& line, const float* scale, int64_t channel,
                      int64_t n, int64_t row) {
  using S = Span<F>;
  const uint32_t mask = lanes(n);
  for (int64_t head = 0; head < line.count; ++head) {
    V y[S::kRegisters], at[S::kRegisters];
    S::read(line.in + head * line.in_step + channel, mask, y);
    if (back && !kIsNone<A>) S::read(line.x + head * line.x_step + channel, mask, at);
    if constexpr (!back && !kIsNorm<A>) Several<A, S::kBrief, S::kRegisters>::f(y);
    for (int i = 0; i < S::kRegisters; ++i) {
      if constexpr (kIsNorm<A>) {
        y[i] = times(times(y[i], all(scale[head])),
                     _mm512_loadu_ps(line.weight + head * line.weight_step + row + 16 * i));
      }
      if (line.gate != nullptr)
        y[i] = times(y[i], _mm512_loadu_ps(line.gate + head * line.gate_step + row + 16 * i));
      if constexpr (back && !kIsNone<A>) y[i] = A::template back<S::kBrief>(at[i], y[i]);
    }
    S::write(line.out + head * line.out_step + channel, mask, y);
  }
}

inline float add_lanes(V x) {
  const __m256 a = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xFF, x, 0), _mm512_maskz_extractf32x8_ps(0xFF, x, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// The lanes of 16 registers added up, each register's in one lane: halves of pairs of registers are
// added four times over. Register i goes to the lane whose four bits are those of i in reverse.
inline V add_lanes_of(V* x) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    x[i] = plus(_mm512_maskz_unpacklo_ps(kAll, x[i], x[i + 8]),
                _mm512_maskz_unpackhi_ps(kAll, x[i], x[i + 8]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(x[i]), b = _mm512_castps_pd(x[i + 4]);
    x[i] = plus(_mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, a, b)),
                _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, a, b)));
  }
#pragma GCC unroll 2
  for (int n = 2; n > 0; n /= 2) {
#pragma GCC unroll 2
    for (int i = 0; i < n; ++i)
      x[i] = plus(_mm512_maskz_shuffle_f32x4(kAll, x[i], x[i + n], 0x88),
                  _mm512_maskz_shuffle_f32x4(kAll, x[i], x[i + n], 0xDD));
  }
  return x[0];
}
constexpr int kReversed[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

// The squares of a head, not yet added up.
template <class F>
TIGHTROPE_INLINE V squares(const typename F::Stored* in, int64_t n) {
  using S = Span<F>;
  V sum[2] = {all(0.0f), all(0.0f)};
  const auto add = [&](int64_t k, uint32_t mask, int of) {
    V x[2];
    S::read(in + k, mask, x);
    for (int i = 0; i < S::kRegisters; ++i) sum[(of + i) % 2] = fused(x[i], x[i], sum[(of + i) % 2]);
  };
  int64_t k = 0;
  for (; k + 4 * S::kChannels <= n; k += 4 * S::kChannels) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) add(k + i * S::kChannels, ~0u, i);
  }
  for (; k < n; k += S::kChannels) add(k, lanes(n - k), 0);
  return plus(sum[0], sum[1]);
}

// 1 / sqrt(mean + eps) of each head, of kNorms at most.
template <class F>
TIGHTROPE_LOOP void norms(const Problem& p, double eps, const Line<typename F::Stored>& line, float* scale) {
  const int64_t n = p.head_dim, step = line.in_step, count = line.count;
  const auto* in = line.in;
  const V share = all(1.0f / float(n)), least = all(float(eps));
  for (int64_t first = 0; first < count; first += 16) {
    V sums[16];
    for (int64_t head = 0; head < 16; ++head) sums[head] = all(0.0f);
    for (int64_t head = 0; head < 16 && first + head < count; ++head, in += step)
      sums[kReversed[head]] = squares<F>(in, n);
    const V root = _mm512_maskz_sqrt_ps(kAll, fused(add_lanes_of(sums), share, least));
    _mm512_storeu_ps(scale + first, _mm512_div_ps(all(1.0f), root));
  }
}

template <class F, bool interleaved, class A, bool back>
inline void whole_line(const Problem& p, const Line<typename F::Stored>& line, const float* scale,
                       const float* c, const float* s) {
  using T = Turn<F, interleaved>;
  constexpr int64_t kChannels = Span<F>::kChannels;
  constexpr int kSet = T::kRegisters == 4 ? 2 : 4;
  int64_t bytes = p.head_dim * int64_t(sizeof(typename F::Stored)), row = 0;
  const auto pass = [&](int64_t from, int64_t to) {
    for (; from < to; from += kChannels, row += kChannels)
      pass_line<F, A, back>(line, scale, from, to - from < kChannels ? to - from : kChannels, row);
  };
  pass(0, p.start);
  int64_t pair = 0;
  for (; pair + kSet * T::kPairs <= p.pairs; pair += kSet * T::kPairs, bytes = 0) {
    turn_line<F, interleaved, A, back, kSet, true>(p, line, scale, pair, row, bytes, c, s);
    row += kSet * T::kRegisters * 16;
  }
  for (; pair < p.pairs; pair += T::kPairs, bytes = 0) {
    turn_line<F, interleaved, A, back, 1, false>(p, line, scale, pair, row, bytes, c, s);
    row += T::kRegisters * 16;
  }
  pass(p.start + 2 * p.pairs, p.head_dim);
}

// Back through a norm, one head: sums over the head, then the gradient. `g` and `x` are rows.
template <class F, bool interleaved>
TIGHTROPE_LOOP void norm_back(const Problem& p, double eps, const Line<typename F::Stored>& line,
                      const float* c, const float* s, float* g, float* x, float* by_weight) {
  using T = Turn<F, interleaved>;
  using S = Span<F>;
  const int64_t end = p.start + 2 * p.pairs;
  int64_t row = 0;
  V squares = all(0.0f), shared = all(0.0f);
  const auto keep = [&](const V* y, const V* at, int registers) {
    for (int i = 0; i < registers; ++i, row += 16) {
      _mm512_storeu_ps(g + row, y[i]);
      _mm512_storeu_ps(x + row, at[i]);
      squares = fused(at[i], at[i], squares);
      shared = fused(times(y[i], _mm512_loadu_ps(line.weight + row)), at[i], shared);
    }
  };
  const auto gated = [&](V* y, int registers) {
    if (line.gate == nullptr) return;
    for (int i = 0; i < registers; ++i) y[i] = times(y[i], _mm512_loadu_ps(line.gate + row + 16 * i));
  };
  const auto pass = [&](int64_t from, int64_t to) {
    for (; from < to; from += S::kChannels) {
      V y[2], at[2];
      S::read(line.in + from, lanes(to - from), y);
      S::read(line.x + from, lanes(to - from), at);
      gated(y, S::kRegisters);
      keep(y, at, S::kRegisters);
    }
  };
  pass(0, p.start);
  for (int64_t pair = 0; pair < p.pairs; pair += T::kPairs) {
    const int64_t chunk = pair / kAngles * kAngles, channel = p.start + pair * (interleaved ? 2 : 1);
    const int64_t left = p.pairs - pair;
    T turn;
    const int64_t n = p.pairs - chunk < kAngles ? p.pairs - chunk : kAngles;
    turn.template take<false>(c + chunk, s + chunk, pair - chunk, n);
    V y[T::kRegisters], at[T::kRegisters];
    T::template read<false>(line.in + channel, p.pairs, left, y);
    T::template read<false>(line.x + channel, p.pairs, left, at);
    gated(y, T::kRegisters);
    turn.turn(y);
    keep(y, at, T::kRegisters);
  }
  pass(end, p.head_dim);
  const float n = float(p.head_dim);
  const float scale = 1.0f / root(add_lanes(squares) / n + float(eps));
  const V scaled = all(scale), share = all(add_lanes(shared) * scale / n);
  for (int64_t k = 0; k < row; k += 16) {
    const V unit = times(_mm512_loadu_ps(x + k), scaled), y = _mm512_loadu_ps(g + k);
    if (by_weight != nullptr) _mm512_storeu_ps(by_weight + k, fused(y, unit, _mm512_loadu_ps(by_weight + k)));
    const V weighted = times(y, _mm512_loadu_ps(line.weight + k));
    _mm512_storeu_ps(g + k, times(scaled, less_product(unit, share, weighted)));
  }
  each_span<F>(p, [&](int64_t channel, int64_t count, int64_t at) {
    V y[2] = {_mm512_loadu_ps(g + at), _mm512_loadu_ps(g + at + 16)};
    S::write(line.out + channel, lanes(count), y);
  });
}

// f and P of the heads of a line; false if the act is not one of registers.
template <class F>
inline bool turn_outer(const Problem& p, const Outer& o, Line<typename F::Stored> line, const float* c,
                       const float* s) {
  const auto run = [&](auto act, auto back, const float* scale) {
    using A = decltype(act);
    if (p.interleaved) {
      whole_line<F, true, A, decltype(back)::value != 0>(p, line, scale, c, s);
    } else {
      whole_line<F, false, A, decltype(back)::value != 0>(p, line, scale, c, s);
    }
  };
  if (o.act == Act::kRmsNorm) {
    // Norms are taken of all, before the first is overwritten.
    alignas(64) float scale[kNorms];
    for (int64_t left = line.count; left > 0; left -= kNorms) {
      line.count = left < kNorms ? left : kNorms;
      norms<F>(p, o.eps, line, scale);
      run(NormV(), Is<0>(), scale);
      line.in += kNorms * line.in_step, line.out += kNorms * line.out_step;
      if (line.gate != nullptr) line.gate += kNorms * line.gate_step;
      line.weight += kNorms * line.weight_step;
    }
    return true;
  }
  return with_registers(o.act, [&](auto act) {
    if (o.forward) {
      run(act, Is<0>(), nullptr);
    } else {
      run(act, Is<1>(), nullptr);
    }
  });
}

inline bool in_registers(const Outer& o) {
  return o.act == Act::kRmsNorm || with_registers(o.act, [](auto) {});
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
