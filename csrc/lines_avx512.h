// Heads of one token with contiguous channels: loading channels into registers, rotating registers, and
// arranging rows of weights and factors in register order.
//
// A remainder that does not fill a register goes through the same instructions with a mask, so every
// element gets the same arithmetic.
#pragma once

#include "acts_avx512.h"
#include "registers.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Mask of the first n of 16 or 32 lanes.
inline uint32_t lanes(int64_t n) { return n <= 0 ? 0 : n >= 32 ? 0xFFFFFFFFu : (1u << n) - 1; }

// Channels that are loaded together, and how they become registers.
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
// bfloat16: one register of the even channels, one of the odd channels.
template <>
struct Span<BFloat16> {
  using R = Register<16>;
  static constexpr int kRegisters = 2, kChannels = 32;
  static constexpr bool kBrief = true;
  static TIGHTROPE_INLINE void read(const uint16_t* at, uint32_t mask, V* x) {
    const auto twins = (R::Words)_mm512_maskz_loadu_epi16(mask, at);
    x[0] = R::even(twins), x[1] = R::odd(twins);
  }
  static TIGHTROPE_INLINE void write(uint16_t* at, uint32_t mask, const V* x) {
    _mm512_mask_storeu_epi16(at, mask, (__m512i)R::twin(x[0], x[1]));
  }
};

// Whether one register holds both channels of a pair.
template <class F, bool interleaved>
constexpr bool kMixed = interleaved && Span<F>::kRegisters == 1;

// Pairs that are rotated together: those of two spans, or of one span of interleaved bfloat16.
template <class F, bool interleaved>
struct Turn {
  using S = Span<F>;
  static constexpr int kSpans = interleaved && !kMixed<F, interleaved> ? 1 : 2;
  static constexpr int kRegisters = kSpans * S::kRegisters;
  static constexpr int64_t kPairs = kSpans * S::kChannels / 2;
  static constexpr int kAngles_ = kMixed<F, interleaved> ? 2 : kRegisters / 2;

  // Loads angles from pair `at` on, of n pairs whose angles begin at `cosine` and `sine`.
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
      // Even pairs are stored apart from odd pairs: see in_twos.
      for (int i = 0; i < 2; ++i) {
        const int64_t from = at / 2 + i * ((n + 1) / 2);
        const __mmask16 half = __mmask16(whole ? ~0u : lanes((left + 1 - i) / 2));
        c[i] = _mm512_maskz_loadu_ps(half, cosine + from);
        s[i] = _mm512_maskz_loadu_ps(half, sine + from);
      }
    }
  }
  // Rotates registers in place.
  TIGHTROPE_INLINE void turn(V* x) const {
    if (kMixed<F, interleaved>) {
      for (int i = 0; i < 2; ++i) x[i] = turned_v(Register<16>::swapped(x[i]), x[i], c[i], s[i]);
      return;
    }
    constexpr int half = kRegisters / 2;
#pragma GCC unroll 2
    for (int i = 0; i < half; ++i) {
      const V u = x[i], v = x[half + i];
      x[i] = turned_u(u, v, c[i], s[i]);
      x[half + i] = turned_v(u, v, c[i], s[i]);
    }
  }
  // `other`: distance between the channels of a pair; `left`: pairs that remain from this block on.
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

// Rotates x times a weight: the weight is multiplied into the angles once for all heads that share it.
// The channels of a pair have different weights, so this needs twice as many cosines and sines.
template <class F, bool interleaved>
struct WeighedTurn {
  using T = Turn<F, interleaved>;
  static constexpr int kHalf = T::kRegisters / 2;

  // `weight`: the weights of this block, in register order.
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
      for (int i = 0; i < 2; ++i) x[i] = turned_v(Register<16>::swapped(x[i]), x[i], c[i], s[i]);
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

// Calls use(channel, n, at) for each span of a head: n channels from `channel` on, whose values begin at
// `at` in register order.
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

// Rearranges channels into register order. Replaces every NaN by one without low bits: see BFloat16.
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
// The inverse of arrange: moves values in register order back to their channels.
template <class F>
inline void restore(const Problem& p, const float* from, float* to) {
  each_span<F>(p, [&](int64_t channel, int64_t n, int64_t at) {
    for (int64_t k = 0; k < n; ++k)
      to[channel + k] = from[at + (Span<F>::kRegisters == 2 ? k / 2 + k % 2 * 16 : k)];
  });
}

// Heads of one token with contiguous channels; steps are from head to head.
template <class Stored>
struct Line {
  const Stored* in;
  Stored* out;
  const Stored* x;  // the input of the forward call, for the backward pass
  int64_t in_step, out_step, x_step;
  const float *gate, *weight;  // in register order, or null
  int64_t gate_step, weight_step;
  int64_t count, ahead;
};

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
