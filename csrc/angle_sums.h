// Gradients by angles, summed to positions and to frequencies.
//
// With (y, z) a rotated pair and (dy, dz) the gradient of it, the angle of the pair has the gradient
// y·dz − z·dy. A position sums it over heads and pairs, times ω; a frequency sums it over tokens,
// times the position. Sums have one order, whatever the number of threads: pairs and heads in that of
// the tensor, tokens within the chunks that the shapes alone decide.
#pragma once

#include "angles.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Adds the gradients by the angles of pairs [first, first + n) of one head.
template <class F>
inline void add_by_angle(const Problem& p, const Operand& o, int64_t row, int64_t head,
                         int64_t token, int64_t first, int64_t n,
                         typename F::Value* __restrict sum) {
  using Stored = typename F::Stored;
  const Strides& i = o.in_stride;
  const Strides& j = o.out_stride;
  const int64_t pair = p.interleaved ? 2 : 1, other = p.interleaved ? 1 : p.pairs;
  const int64_t at = p.start + first * pair;
  const Stored* y = static_cast<const Stored*>(o.in) + row * i.row + head * i.head +
                    token * i.token + at * i.channel;
  const Stored* dy = static_cast<const Stored*>(o.out) + row * j.row + head * j.head +
                     token * j.token + at * j.channel;
  const auto add = [&](int64_t k, int64_t a, int64_t b, int64_t c, int64_t d) {
    sum[k] = fma_(F::load(y[a]), F::load(dy[d]), sum[k]);
    sum[k] = fma_(-F::load(y[b]), F::load(dy[c]), sum[k]);
  };
  if (i.channel != 1 || j.channel != 1) {
    for (int64_t k = 0; k < n; ++k)
      add(k, k * pair * i.channel, (k * pair + other) * i.channel, k * pair * j.channel,
          (k * pair + other) * j.channel);
  } else if (p.interleaved) {
    for (int64_t k = 0; k < n; ++k) add(k, 2 * k, 2 * k + 1, 2 * k, 2 * k + 1);
  } else {
    for (int64_t k = 0; k < n; ++k) add(k, k, k + other, k, k + other);
  }
}

// Σ ω·sum in units of one phase word, in eight lanes that add up in pairs.
template <class T>
inline double by_position(const int64_t* __restrict word, const int64_t* __restrict turn,
                          const T* __restrict sum, int64_t n) {
  double lane[8] = {};
  for (int64_t k = 0; k + 8 <= n; k += 8)
    for (int64_t l = 0; l < 8; ++l) lane[l] += double(word[k + l]) * double(sum[k + l]);
  for (int64_t k = n / 8 * 8; k < n; ++k) lane[k % 8] += double(word[k]) * double(sum[k]);
  double total = ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
                 ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  if (turn != nullptr)
    for (int64_t k = 0; k < n; ++k) total += double(turn[k]) * kTurn * double(sum[k]);
  return total;
}

// What the angles of one token and head (or of all heads, where they share them) add to both sums.
template <class T>
inline void spread(const Problem& p, const AngleSums& sums, int64_t item, int64_t row, int64_t head,
                   int64_t token, int64_t first, int64_t n, const T* __restrict sum) {
  const double sign = p.conjugate ? -1.0 : 1.0;
  for (int64_t axis = 0; axis < p.axes; ++axis) {
    const Split at = position_at(p, axis, row, token);
    const int64_t from =
        ((axis * p.word_rows + (p.word_rows == 1 ? 0 : row)) * p.word_heads + head) * p.pairs +
        first;
    if (sums.by_position != nullptr) {
      const int64_t* turn = p.turns == nullptr ? nullptr : p.turns + from;
      const double found = by_position(p.words + from, turn, sum, n) * (sign * kRadians);
      sums.by_position[(axis * p.rows + row) * p.tokens + token] += found;
    }
    if (sums.by_frequency != nullptr) {
      const double position =
          sign * (at.lost ? __builtin_nan("") : double(at.whole) + double(at.fraction) / kHalfRange);
      double* __restrict total =
          sums.by_frequency + ((item * p.axes + axis) * p.word_heads + head) * p.pairs + first;
      for (int64_t k = 0; k < n; ++k) total[k] += position * double(sum[k]);
    }
  }
}

template <class F>
void add_angles(const Problem& p, const AngleSums& sums, int64_t begin, int64_t end) {
  using T = typename F::Value;
  alignas(64) T sum[kAngles];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / p.tiles_per_row;
    const int64_t from = (item - row * p.tiles_per_row) * p.tile;
    const int64_t to = p.tokens - from < p.tile ? p.tokens : from + p.tile;
    for (int64_t token = from; token < to; ++token) {
      for (int64_t first = 0; first < p.pairs; first += kAngles) {
        const int64_t n = p.pairs - first < kAngles ? p.pairs - first : kAngles;
        for (int64_t k = 0; k < n; ++k) sum[k] = 0;
        for (int32_t index = 0; index < p.operands; ++index) {
          for (int64_t head = 0; head < p.operand[index].heads; ++head) {
            add_by_angle<F>(p, p.operand[index], row, head, token, first, n, sum);
            if (!p.angles_per_head) continue;
            spread(p, sums, item, row, head, token, first, n, sum);
            for (int64_t k = 0; k < n; ++k) sum[k] = 0;
          }
        }
        if (!p.angles_per_head) spread(p, sums, item, row, 0, token, first, n, sum);
      }
    }
  }
}

}  // namespace

void angle_loop(const Problem& p, const AngleSums& sums, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::kFloat:
      return add_angles<Float>(p, sums, begin, end);
    case Dtype::kDouble:
      return add_angles<Double>(p, sums, begin, end);
    case Dtype::kBFloat16:
      return add_angles<BFloat16>(p, sums, begin, end);
    case Dtype::kHalf:
      return add_angles<Half>(p, sums, begin, end);
  }
}

}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
