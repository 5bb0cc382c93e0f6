// RMS norms of the heads of a token, and the backward pass of a norm.
#pragma once

#include "lines_avx512.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Heads whose norms are computed together.
constexpr int64_t kNorms = 64;

inline float add_lanes(V x) {
  const __m256 a = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xFF, x, 0), _mm512_maskz_extractf32x8_ps(0xFF, x, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// The sum of squares of a head, as one partial sum per lane.
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

// Each register holds partial sums of n heads. Adds up pairs of lanes of the same head, and returns the
// sums of all 2n heads in one register.
template <int n>
TIGHTROPE_INLINE V folded(V a, V b) {
  if constexpr (n == 1) {
    return plus(_mm512_maskz_unpacklo_ps(kAll, a, b), _mm512_maskz_unpackhi_ps(kAll, a, b));
  } else if constexpr (n == 2) {
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return plus(_mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, c, d)),
                _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, c, d)));
  } else {
    return plus(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88), _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xDD));
  }
}

// Sums of squares of n heads from `first` on, 16 / n lanes per head; with n = 16, in the order of the heads.
template <class F, int n>
TIGHTROPE_INLINE V squares_of(const Line<typename F::Stored>& line, int64_t channels, int64_t first) {
  if constexpr (n == 1) {
    return first < line.count ? squares<F>(line.in + first * line.in_step, channels) : all(0.0f);
  } else {
    // A separate statement fixes the order of memory accesses; the compiler may evaluate arguments in any order.
    const V these = squares_of<F, n / 2>(line, channels, first);
    return folded<n / 2>(these, squares_of<F, n / 2>(line, channels, first + n / 2));
  }
}

// 1 / sqrt(mean of the squares + eps) of each head, at most kNorms heads.
template <class F>
TIGHTROPE_LOOP void norms(const Problem& p, double eps, const Line<typename F::Stored>& line, float* scale) {
  const V share = all(1.0f / float(p.head_dim)), least = all(float(eps));
  for (int64_t head = 0; head < line.count; head += 16) {
    const V sums = squares_of<F, 16>(line, p.head_dim, head);
    const V root = _mm512_maskz_sqrt_ps(kAll, fused(sums, share, least));
    _mm512_storeu_ps(scale + head, _mm512_div_ps(all(1.0f), root));
  }
}

// Backward pass of a norm, one head: sums over the head, then the gradient. `g` and `x` are scratch rows.
template <class F, bool interleaved>
TIGHTROPE_LOOP void norm_back(const Problem& p, double eps, const Line<typename F::Stored>& line,
                      const float* c, const float* s, float* g, float* x, float* by_weight) {
  using T = Turn<F, interleaved>;
  using S = Span<F>;
  const int64_t end = p.start + 2 * p.pairs;
  int64_t row = 0;
  V square = all(0.0f), shared = all(0.0f);
  const auto keep = [&](const V* y, const V* at, int registers) {
    for (int i = 0; i < registers; ++i, row += 16) {
      _mm512_storeu_ps(g + row, y[i]);
      _mm512_storeu_ps(x + row, at[i]);
      square = fused(at[i], at[i], square);
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
  const float scale = 1.0f / root(add_lanes(square) / n + float(eps));
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

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
