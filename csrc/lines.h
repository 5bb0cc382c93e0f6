// Heads of one token with contiguous channels: loading channels into registers, rotating registers, and
// arranging rows of weights and factors in register order.
//
// A remainder that does not fill a register goes through the same instructions, so every element gets the same
// arithmetic.
#pragma once

#include "fast_acts.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// More lanes or channels than a register has.
constexpr int64_t kWhole = 1024;

// Channels that are loaded together, and how they become registers; only the first n of them, if there are more.
template <class F>
struct Span {
  using Stored = typename F::Stored;
  static constexpr int kRegisters = 1, kChannels = kWidest;
  static constexpr bool kBrief = false;
  static TIGHTROPE_INLINE void read(const Stored* at, int64_t n, V* x) { x[0] = read_first(at, n); }
  static TIGHTROPE_INLINE void write(Stored* at, int64_t n, const V* x) { write_first(at, x[0], n); }
};
// bfloat16: one register of the even channels, one of the odd channels.
template <>
struct Span<BFloat16> {
  static constexpr int kRegisters = 2, kChannels = 2 * kWidest;
  static constexpr bool kBrief = true;
  static TIGHTROPE_INLINE void read(const uint16_t* at, int64_t n, V* x) {
    const Words twins = read_first((const Twin*)at, n);
    x[0] = Wide::even(twins), x[1] = Wide::odd(twins);
  }
  static TIGHTROPE_INLINE void write(uint16_t* at, int64_t n, const V* x) {
    write_first((Twin*)at, Wide::twin(x[0], x[1]), n);
  }
};

typedef uint64_t Doubles __attribute__((vector_size(sizeof(V))));

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
    const int64_t left = whole ? kWhole : n - at;
    if (kMixed<F, interleaved>) {
      const V a = read_first(cosine + at, left), b = read_first(sine + at, left);
      Wide::doubled(a, &c[0], &c[1]), Wide::doubled(b, &s[0], &s[1]);
      for (V& sine : s) sine = (V)((Doubles)sine ^ 0x80000000u);
    } else if (kAngles_ == 1) {
      c[0] = read_first(cosine + at, left), s[0] = read_first(sine + at, left);
    } else {
      // Even pairs are stored apart from odd pairs: see in_twos.
      for (int i = 0; i < 2; ++i) {
        const int64_t from = at / 2 + i * ((n + 1) / 2), half = whole ? kWhole : (left + 1 - i) / 2;
        c[i] = read_first(cosine + from, half), s[i] = read_first(sine + from, half);
      }
    }
  }
  // Rotates registers in place.
  TIGHTROPE_INLINE void turn(V* x) const {
    if (kMixed<F, interleaved>) {
      for (int i = 0; i < 2; ++i) x[i] = turned_v(Wide::swapped(x[i]), x[i], c[i], s[i]);
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
#pragma GCC unroll 2
    for (int i = 0; i < kSpans; ++i)
      S::read(at + place(i, other), whole ? kWhole : channels(i, left), x + i * S::kRegisters);
  }
  template <bool whole>
  static TIGHTROPE_INLINE void write(typename F::Stored* at, int64_t other, int64_t left, const V* x) {
#pragma GCC unroll 2
    for (int i = 0; i < kSpans; ++i)
      S::write(at + place(i, other), whole ? kWhole : channels(i, left), x + i * S::kRegisters);
  }
  // Where a span begins, and how many channels remain from there on.
  static TIGHTROPE_INLINE int64_t place(int i, int64_t other) { return interleaved ? i * S::kChannels : i * other; }
  static TIGHTROPE_INLINE int64_t channels(int i, int64_t left) {
    return interleaved ? 2 * left - i * S::kChannels : left;
  }

  V c[kAngles_], s[kAngles_];
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
      const V w = Wide::read(weight + kWidest * i);
      if (kMixed<F, interleaved>) {
        c[i] = turn.c[i] * w, s[i] = turn.s[i] * Wide::swapped(w);
      } else {
        c[i] = turn.c[i % kHalf] * w, s[i] = turn.s[i % kHalf] * w;
      }
    }
  }
  TIGHTROPE_INLINE void turn(V* x) const {
    if (kMixed<F, interleaved>) {
      for (int i = 0; i < 2; ++i) x[i] = turned_v(Wide::swapped(x[i]), x[i], c[i], s[i]);
      return;
    }
#pragma GCC unroll 2
    for (int i = 0; i < kHalf; ++i) {
      const V u = x[i], v = x[kHalf + i];
      x[i] = fms_(u, c[i], v * s[kHalf + i]);
      x[kHalf + i] = fma_(v, c[kHalf + i], u * s[i]);
    }
  }

  V c[T::kRegisters], s[T::kRegisters];
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
TIGHTROPE_LOOP void arrange(const Problem& p, const float* from, float* to) {
  const auto read = [&](int64_t at, int64_t n) {
    const V x = read_first(from + at, n);
    return choose(x == x, x, all<V>(__builtin_nan("")));
  };
  each_span<F>(p, [&](int64_t channel, int64_t n, int64_t at) {
    V x = read(channel, n);
    if (Span<F>::kRegisters == 2) {
      V odd;
      Wide::split(x, read(channel + kWidest, n - kWidest), &x, &odd);
      Wide::write<false>(to + at + kWidest, odd);
    }
    Wide::write<false>(to + at, x);
  });
}
// The inverse of arrange: moves values in register order back to their channels.
template <class F>
TIGHTROPE_LOOP void restore(const Problem& p, const float* from, float* to) {
  each_span<F>(p, [&](int64_t channel, int64_t n, int64_t at) {
    for (int64_t k = 0; k < n; ++k)
      to[channel + k] = from[at + (Span<F>::kRegisters == 2 ? k / 2 + k % 2 * kWidest : k)];
  });
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
