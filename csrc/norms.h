// RMS norms of the heads of a token, and the backward pass of a norm.
//
// A sum over a head has 16 partial sums, which are added up in a fixed order, whatever the width of a register.
#pragma once

#include "lines.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Heads whose norms are computed together.
constexpr int64_t kNorms = 64;

// The partial sums of a head.
struct Sums {
  static constexpr int kRegisters = 16 / kWidest;
  V at[kRegisters] = {};
};

// The sum of squares of a head.
template <class F>
TIGHTROPE_INLINE Sums squares(const typename F::Stored* in, int64_t n) {
  using S = Span<F>;
  constexpr int kSpans = 4 * Sums::kRegisters;
  Sums sums[2];
  const auto add = [&](int64_t k, int64_t count, int span, int of) {
    V x[2];
    S::read(in + k, count, x);
    for (int i = 0; i < S::kRegisters; ++i) {
      V& sum = sums[(of + i) % 2].at[span % Sums::kRegisters];
      sum = fma_(x[i], x[i], sum);
    }
  };
  int64_t k = 0;
  for (; k + kSpans * S::kChannels <= n; k += kSpans * S::kChannels) {
#pragma GCC unroll 8
    for (int i = 0; i < kSpans; ++i) add(k + i * S::kChannels, kWhole, i, i / Sums::kRegisters);
  }
  for (int span = 0; k < n; k += S::kChannels, ++span) add(k, n - k, span, 0);
  for (int i = 0; i < Sums::kRegisters; ++i) sums[0].at[i] += sums[1].at[i];
  return sums[0];
}

// Adds up the partial sums of kWidest heads from `first` on; a register of their sums, in order.
template <class F>
TIGHTROPE_INLINE V squares_of(const Line<F>& line, int64_t channels, int64_t first) {
  const auto of = [&](int64_t head) {
    return head < line.count ? squares<F>(line.in + head * line.in_step, channels) : Sums();
  };
#if defined(__aarch64__)
  V lower[4], upper[4];
  for (int i = 0; i < 4; ++i) {
    const Sums sums = of(first + i);
    lower[i] = sums.at[0] + sums.at[2], upper[i] = sums.at[1] + sums.at[3];
  }
  const auto fours = [](const V* x) { return fold_ones(fold_twos(x[0], x[1]), fold_twos(x[2], x[3])); };
  return fours(lower) + fours(upper);
#else
  // First the partial sums l and l + 8. With 16 lanes those of another head fill the upper half.
  const auto eights = [&](int64_t head) {
    const Sums sums = of(head);
#if defined(__AVX512F__)
    return fold_halves(sums.at[0], of(head + 4).at[0]);
#else
    return sums.at[0] + sums.at[1];
#endif
  };
  // Separate statements fix the order of memory accesses; the compiler may evaluate arguments in any order.
  const auto fours = [&](int64_t head) {
    V a = eights(head), b = eights(head + 1);
    const V first_two = fold_twos(a, b);
    a = eights(head + 2), b = eights(head + 3);
    return fold_ones(first_two, fold_twos(a, b));
  };
  const V lower = fours(first);
  return fold_fours(lower, fours(first + kWidest / 2));
#endif
}

// The sum of the partial sums of one head, in the same order.
inline float total(const Sums& sums) {
#if defined(__aarch64__)
  const auto four = [](V x) { return (x[0] + x[2]) + (x[1] + x[3]); };
  return four(sums.at[0] + sums.at[2]) + four(sums.at[1] + sums.at[3]);
#else
#if defined(__AVX512F__)
  __m256 x = _mm512_maskz_extractf32x8_ps(0xFF, sums.at[0], 0) + _mm512_maskz_extractf32x8_ps(0xFF, sums.at[0], 1);
#else
  __m256 x = sums.at[0] + sums.at[1];
#endif
  x += _mm256_permute_ps(x, 0x4E);
  x += _mm256_permute_ps(x, 0xB1);
  return _mm_cvtss_f32(_mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1));
#endif
}

// 1 / sqrt(mean of the squares + eps) of each head, at most kNorms heads.
template <class F>
TIGHTROPE_LOOP void norms(const Problem& p, double eps, const Line<F>& line, float* scale) {
  const V share = all<V>(1.0f / float(p.head_dim)), least = all<V>(eps);
  for (int64_t head = 0; head < line.count; head += kWidest) {
    const V sums = squares_of<F>(line, p.head_dim, head);
    Wide::write<false>(scale + head, all<V>(1) / root(fma_(sums, share, least)));
  }
}

// Backward pass of a norm, the first head of a line: sums over the head, then the gradient. `g` and `x` are scratch rows.
template <class F, bool interleaved>
TIGHTROPE_LOOP void norm_back_of(const Problem& p, double eps, const Line<F>& line,
                      const float* c, const float* s, float* g, float* x, float* by_weight) {
  using T = Turn<F, interleaved>;
  using S = Span<F>;
  const int64_t end = p.start + 2 * p.pairs;
  int64_t row = 0;
  Sums square, shared;
  // `span`: the number of a span, or of a block, of its kind.
  const auto keep = [&](const V* y, const V* at, int registers, int64_t span) __attribute__((always_inline)) {
    for (int i = 0; i < registers; ++i, row += kWidest) {
      const int part = int(kMixed<F, interleaved> && registers == 2 ? 2 * span + i : span) % Sums::kRegisters;
      Wide::write<false>(g + row, y[i]);
      Wide::write<false>(x + row, at[i]);
      square.at[part] = fma_(at[i], at[i], square.at[part]);
      shared.at[part] = fma_(y[i] * Wide::read(line.weight + row), at[i], shared.at[part]);
    }
  };
  const auto gated = [&](V* y, int registers) __attribute__((always_inline)) {
    if (line.gate == nullptr) return;
    for (int i = 0; i < registers; ++i) y[i] = y[i] * Wide::read(line.gate + row + kWidest * i);
  };
  const auto pass = [&](int64_t from, int64_t to) {
    for (int64_t span = 0; from < to; from += S::kChannels, ++span) {
      V y[2], at[2];
      S::read(line.in + from, to - from, y);
      S::read(line.x + from, to - from, at);
      gated(y, S::kRegisters);
      keep(y, at, S::kRegisters, span);
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
    keep(y, at, T::kRegisters, pair / T::kPairs);
  }
  pass(end, p.head_dim);
  const float n = float(p.head_dim);
  const float scale = 1.0f / root(total(square) / n + float(eps));
  const V scaled = all<V>(scale), share = all<V>(total(shared) * scale / n);
  for (int64_t k = 0; k < row; k += kWidest) {
    const V unit = Wide::read(x + k) * scaled, y = Wide::read(g + k);
    if (by_weight != nullptr) Wide::write<false>(by_weight + k, fma_(y, unit, Wide::read(by_weight + k)));
    Wide::write<false>(g + k, scaled * fma_(-unit, share, y * Wide::read(line.weight + k)));
  }
  each_span<F>(p, [&](int64_t channel, int64_t count, int64_t at) {
    V y[2] = {Wide::read(g + at), Wide::read(g + at + kWidest)};
    S::write(line.out + channel, count, y);
  });
}
template <class F>
inline void norm_back(const Problem& p, double eps, const Line<F>& line, const float* c, const float* s, float* g,
                      float* x, float* by_weight) {
  (p.interleaved ? norm_back_of<F, true> : norm_back_of<F, false>)(p, eps, line, c, s, g, x, by_weight);
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
