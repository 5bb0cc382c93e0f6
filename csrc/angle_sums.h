// Gradients of positions and of frequencies, as sums of gradients of angles.
//
// For a rotated pair (y, z) with gradient (dy, dz), the gradient of its angle is g = y·dz − z·dy. The
// gradient of a position is Σ ω·g over heads and pairs; that of a frequency is Σ position·g over tokens,
// and over heads that share it. The order of every sum does not depend on the number of threads: pairs
// and heads are added in the order of the tensor, tokens within runs that only the shapes
// determine. Only a few products are accumulated in float before widening to double, so the error does
// not grow with the number of heads.
#pragma once

#include "stage_rows.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Adds the gradients of the angles of n pairs to `sum`. Channels y and z lie at offsets y and z from `out`,
// their gradients dy and dz at offsets c and d from `grad`.
template <class F>
inline void add_pairs(const typename F::Stored* __restrict out,
                      const typename F::Stored* __restrict grad, int64_t y, int64_t z, int64_t c,
                      int64_t d, int64_t step, int64_t grad_step, int64_t n,
                      typename F::Value* __restrict sum) {
  for (int64_t k = 0; k < n; ++k) {
    const int64_t i = k * step, j = k * grad_step;
    sum[k] = fma_(F::load(out[i + y]), F::load(grad[j + d]), sum[k]);
    sum[k] = fma_(-F::load(out[i + z]), F::load(grad[j + c]), sum[k]);
  }
}

template <class F>
inline void add_halves(const typename F::Stored* out, const typename F::Stored* grad, int64_t other,
                       int64_t n, typename F::Value* sum) {
  add_pairs<F>(out, grad, 0, other, 0, other, 1, 1, n, sum);
}
template <class F>
inline void add_neighbours(const typename F::Stored* out, const typename F::Stored* grad, int64_t n,
                           typename F::Value* sum) {
  add_pairs<F>(out, grad, 0, 1, 0, 1, 2, 2, n, sum);
}

// Adds the gradients of the angles of pairs [first, first + n) of one head.
template <class F>
inline void add_head(const Problem& p, const Operand& o, int64_t row, int64_t head, int64_t token,
                     int64_t first, int64_t n, typename F::Value* sum) {
  using Stored = typename F::Stored;
  const Strides& i = o.in_stride;
  const Strides& j = o.out_stride;
  const int64_t pair = p.interleaved ? 2 : 1, other = p.interleaved ? 1 : p.pairs;
  const int64_t at = p.start + first * pair;
  const Stored* out = static_cast<const Stored*>(o.in) + row * i.row + head * i.head +
                      token * i.token + at * i.channel;
  const Stored* grad = static_cast<const Stored*>(o.out) + row * j.row + head * j.head +
                       token * j.token + at * j.channel;
  if constexpr (kIs<F, Half>) {
    if (i.channel == 1 && j.channel == 1) {
      alignas(64) float y[2 * kAngles], dy[2 * kAngles];
      const int64_t own = p.interleaved ? 2 * n : n, rest = 2 * n - own;
      widen_row<Half>(out, 1, y, own), widen_row<Half>(out + other, 1, y + own, rest);
      widen_row<Half>(grad, 1, dy, own), widen_row<Half>(grad + other, 1, dy + own, rest);
      return p.interleaved ? add_neighbours<Float>(y, dy, n, sum) : add_halves<Float>(y, dy, n, n, sum);
    }
  }
  if (i.channel != 1 || j.channel != 1) {
    add_pairs<F>(out, grad, 0, other * i.channel, 0, other * j.channel, pair * i.channel,
                 pair * j.channel, n, sum);
  } else if (p.interleaved) {
    add_neighbours<F>(out, grad, n, sum);
  } else {
    add_halves<F>(out, grad, other, n, sum);
  }
}

// Adds `sum` to `total` and clears it.
template <class T>
inline void flush(T* __restrict sum, double* __restrict total, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    total[k] += double(sum[k]);
    sum[k] = 0;
  }
}

// Returns Σ ω·total, ω in phase words, accumulated in eight lanes that are then added in pairs.
inline double by_position(const int64_t* __restrict word, const int64_t* __restrict turn,
                          const double* __restrict total, int64_t n) {
  double lane[8] = {};
  for (int64_t k = 0; k + 8 <= n; k += 8)
    for (int64_t l = 0; l < 8; ++l) lane[l] += double(word[k + l]) * total[k + l];
  for (int64_t k = n / 8 * 8; k < n; ++k) lane[k % 8] += double(word[k]) * total[k];
  double sum = ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
               ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  if (turn != nullptr)
    for (int64_t k = 0; k < n; ++k) sum += double(turn[k]) * kTurn * total[k];
  return sum;
}

// Adds the gradients of the angles of one token and head (all heads, if they share angles) to the sums by
// position and by frequency.
inline void spread(const Problem& p, const AngleSums& sums, int64_t run, int64_t row, int64_t head,
                   int64_t token, int64_t first, int64_t n, const double* __restrict total) {
  const double sign = p.conjugate ? -1.0 : 1.0;
  for (int64_t axis = 0; axis < p.axes; ++axis) {
    if (sums.by_position != nullptr) {
      const int64_t from = word_at(p, axis, row, head, first);
      const int64_t* turn = p.turns == nullptr ? nullptr : p.turns + from;
      const double found = by_position(p.words + from, turn, total, n) * (sign * kRadians);
      const int64_t at = ((axis * p.rows + row) * p.tokens + token) * p.position_heads;
      sums.by_position[at + (p.position_heads == 1 ? 0 : head)] += found;
    }
    if (sums.by_frequency != nullptr) {
      const double position = sign * distance_of(p, row, token, axis, head);
      const int64_t own = p.word_heads == 1 ? 0 : head;
      double* __restrict to = sums.by_frequency + ((run * p.axes + axis) * p.word_heads + own) * p.pairs + first;
      for (int64_t k = 0; k < n; ++k) to[k] += position * total[k];
    }
  }
}

template <class F>
inline void add_token(const Problem& p, const AngleSums& sums, int64_t run, int64_t row,
                      int64_t token) {
  using T = typename F::Value;
  alignas(64) T sum[kAngles];
  alignas(64) double total[kAngles];
  for (int64_t first = 0; first < p.pairs; first += kAngles) {
    const int64_t n = p.pairs - first < kAngles ? p.pairs - first : kAngles;
    for (int64_t k = 0; k < n; ++k) sum[k] = 0, total[k] = 0;
    int64_t together = 0;
    for (int32_t index = 0; index < p.operands; ++index) {
      const Operand& o = p.operand[index];
      for (int64_t head = 0; head < o.heads; ++head) {
        add_head<F>(p, o, row, head, token, first, n, sum);
        if (p.angles_per_head) {
          flush(sum, total, n);
          spread(p, sums, run, row, head, token, first, n, total);
          for (int64_t k = 0; k < n; ++k) total[k] = 0;
        } else if (++together == kHeadsTogether) {
          flush(sum, total, n);
          together = 0;
        }
      }
    }
    if (p.angles_per_head) continue;
    flush(sum, total, n);
    spread(p, sums, run, row, 0, token, first, n, total);
  }
}

// Writes the gradients of the phases of one token of one row of phases: sums over the rows and heads that
// share them.
template <class F>
inline void add_phases(const Problem& p, const AngleSums& sums, int64_t item) {
  using T = typename F::Value;
  const int64_t phase_row = item / p.tokens, token = item - phase_row * p.tokens;
  const int64_t row = p.phase_rows == 1 ? 0 : phase_row, last = p.phase_rows == 1 ? p.rows : row + 1;
  const bool shared = p.phase_heads == 1;
  const double sign = p.conjugate ? -1.0 : 1.0;
  alignas(64) T sum[kAngles];
  alignas(64) double total[kAngles];
  for (int64_t first = 0; first < p.pairs; first += kAngles) {
    const int64_t n = p.pairs - first < kAngles ? p.pairs - first : kAngles;
    for (int64_t head = 0; head < p.phase_heads; ++head) {
      for (int64_t k = 0; k < n; ++k) sum[k] = 0, total[k] = 0;
      int64_t together = 0;
      for (int64_t r = row; r < last; ++r) {
        for (int32_t index = 0; index < p.operands; ++index) {
          const int64_t end = shared ? p.operand[index].heads : head + 1;
          for (int64_t h = shared ? 0 : head; h < end; ++h) {
            add_head<F>(p, p.operand[index], r, h, token, first, n, sum);
            if (++together == kHeadsTogether) flush(sum, total, n), together = 0;
          }
        }
      }
      const int64_t place = (phase_row * p.phase_heads + head) * p.tokens + token;
      T* __restrict to = static_cast<T*>(sums.by_phase) + place * p.pairs + first;
      for (int64_t k = 0; k < n; ++k) to[k] = T(sign * (total[k] + double(sum[k])));
    }
  }
}

// Calls use(row, token) for each token of a run.
template <class Sums, class Use>
inline void each_token(const Problem& p, const Sums& sums, int64_t run, const Use& use) {
  const int64_t begin = run / sums.runs * sums.sequence, from = run % sums.runs * sums.run;
  const int64_t to = sums.sequence - from < sums.run ? sums.sequence : from + sums.run;
  for (int64_t i = begin + from; i < begin + to; ++i) use(i / p.tokens, i % p.tokens);
}

template <class F>
void add_angles(const Problem& p, const AngleSums& sums, int64_t begin, int64_t end) {
  if (sums.by_phase != nullptr) {
    for (int64_t item = begin; item < end; ++item) add_phases<F>(p, sums, item);
    return;
  }
  for (int64_t run = begin; run < end; ++run)
    each_token(p, sums, run, [&](int64_t row, int64_t token) { add_token<F>(p, sums, run, row, token); });
}

void angle_loop(const Problem& p, const AngleSums& sums, int64_t begin, int64_t end) {
  with_format(p.dtype, [&](auto f) { add_angles<decltype(f)>(p, sums, begin, end); });
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
