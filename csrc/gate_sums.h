// Gradients of gates: Σ y·dy over the elements that share an entry of the gate, or Σ position·y·dy for
// slopes.
//
// The order of a sum does not depend on the number of threads, as in angle_sums.h.
#pragma once

#include "angle_sums.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

template <class F>
inline void add_gates_of(const Problem& p, const GateSums& sums, int64_t item, int64_t row,
                         int64_t token, typename F::Value* y, typename F::Value* g) {
  using Stored = typename F::Stored;
  using T = typename F::Value;
  const double position = sums.times_position ? distance_of(p, row, token) : 1.0;
  const int64_t n = p.head_dim;
  const Operand& o = p.operand[0];
  const Strides &i = o.in_stride, &j = o.out_stride;
  const int64_t width = sums.channels_share ? 1 : n, heads = sums.heads_share ? 1 : o.heads;
  const int64_t ends = sums.heads_share ? kHeadsTogether : 1;
  double* __restrict to = sums.to + item * heads * width;
  T* __restrict total = g + padded(n);
  int64_t together = 0;
  for (int64_t head = 0; head < o.heads; ++head) {
    widen_row<F>(static_cast<const Stored*>(o.in) + row * i.row + head * i.head + token * i.token,
                 i.channel, y, n);
    widen_row<F>(static_cast<const Stored*>(o.out) + row * j.row + head * j.head + token * j.token,
                 j.channel, g, n);
    if (sums.channels_share) {
      to[0] += position * double(dot(y, g, n));
    } else {
      const T *__restrict a = y, *__restrict b = g;
      for (int64_t k = 0; k < n; ++k) total[k] = together == 0 ? a[k] * b[k] : fma_(a[k], b[k], total[k]);
      if (++together == ends || head + 1 == o.heads) {
        for (int64_t k = 0; k < n; ++k) to[k] += position * double(total[k]);
        together = 0;
      }
    }
    if (!sums.heads_share) to += width;
  }
}

template <class F>
void add_gates(const Problem& p, const GateSums& sums, void* memory, int64_t begin, int64_t end) {
  using T = typename F::Value;
  T* y = static_cast<T*>(memory);
  T* g = y + padded(p.head_dim);
  for (int64_t item = begin; item < end; ++item) {
    if (sums.by_token) {
      const int64_t token = item % p.tokens, rows = sums.rows_share ? p.rows : 1;
      for (int64_t row = 0; row < rows; ++row)
        add_gates_of<F>(p, sums, item, sums.rows_share ? row : item / p.tokens, token, y, g);
      continue;
    }
    each_token(p, sums, item, [&](int64_t row, int64_t token) { add_gates_of<F>(p, sums, item, row, token, y, g); });
  }
}

void gate_loop(const Problem& p, const GateSums& sums, void* scratch, int64_t begin, int64_t end) {
  with_format(p.dtype, [&](auto f) { add_gates<decltype(f)>(p, sums, scratch, begin, end); });
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
