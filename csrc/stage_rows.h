// Heads with a softmax and P in rows of scratch memory. A head is widened, goes through f, is rotated in its row,
// multiplied by P and rounded once. Sums over a head use 32 lanes in a fixed order.
#pragma once

#include "acts.h"
#include "heads.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// ---- rows of memory -----------------------------------------------------------------------------

template <class F>
inline void widen_row(const typename F::Stored* in, int64_t any, typename F::Value* __restrict out, int64_t n) {
  with_step(any, [&](auto step) {
    for (int64_t k = 0; k < n; ++k) out[k] = F::load(in[k * step]);
  });
}
template <class F>
inline void narrow_row(const typename F::Value* __restrict in, typename F::Stored* out, int64_t n) {
  for (int64_t k = 0; k < n; ++k) out[k] = F::store(in[k]);
}
// The compiler does not vectorise conversions of half precision.
template <>
inline void widen_row<Half>(const uint16_t* in, int64_t step, float* __restrict out, int64_t n) {
  int64_t k = 0;
  for (; step == 1 && k + kWidest <= n; k += kWidest) Wide::write<false>(out + k, Wide::read(in + k));
  for (; k < n; ++k) out[k] = Half::load(in[k * step]);
}
template <>
inline void narrow_row<Half>(const float* __restrict in, uint16_t* out, int64_t n) {
  int64_t k = 0;
  for (; k + kWidest <= n; k += kWidest) Wide::write<false>(out + k, Wide::read(in + k));
  for (; k < n; ++k) out[k] = Half::store(in[k]);
}


inline void multiply_row(const float* x, const float* by, float* to, int64_t n) {
  TIGHTROPE_INDEPENDENT
  for (int64_t k = 0; k < n; ++k) to[k] = x[k] * by[k];
}

// ---- sums and norms -------------------------------------------------------------------------------

constexpr int kSumLanes = 32;

// Goes through n values in lanes, use(lane, k), and joins the upper half of the lanes to the lower half until one is
// left: join(lane, other).
template <class T, class Use, class Join>
TIGHTROPE_INLINE T over_lanes(T start, int64_t n, const Use& use, const Join& join) {
  alignas(64) T lane[kSumLanes];
  for (T& l : lane) l = start;
  int64_t k = 0;
  for (; k + kSumLanes <= n; k += kSumLanes)
    for (int l = 0; l < kSumLanes; ++l) lane[l] = use(lane[l], k + l);
  for (int l = 0; k + l < n; ++l) lane[l] = use(lane[l], k + l);
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lane[l] = join(lane[l], lane[l + width]);
  return lane[0];
}
// Σ a·b
template <class T>
TIGHTROPE_LOOP T dot(const T* __restrict a, const T* __restrict b, int64_t n) {
  return over_lanes(T(0), n, [&](T sum, int64_t k) { return fma_(a[k], b[k], sum); }, [](T x, T y) { return x + y; });
}
template <class T>
TIGHTROPE_LOOP T sum(const T* __restrict a, int64_t n) {
  return over_lanes(T(0), n, [&](T sum, int64_t k) { return sum + a[k]; }, [](T x, T y) { return x + y; });
}
// Returns the maximum, or any number if a value is NaN.
template <class T>
TIGHTROPE_LOOP T largest(const T* __restrict a, int64_t n) {
  const auto larger = [](T top, T x) { return x > top ? x : top; };
  return over_lanes(a[0], n, [&](T top, int64_t k) { return larger(top, a[k]); }, larger);
}

// From here on `from` may be `to`, but overlaps it in no other way.
inline void soften(const float* from, float* to, int64_t n) {
  const float top = largest(from, n);
  for (int64_t k = 0; k < n; k += kWidest)
    write_first(to + k, exponential(read_first(from + k, n - k) - all<V>(top)), n - k);
  const float scale = 1.0f / sum(to, n);
  for (int64_t k = 0; k < n; ++k) to[k] *= scale;
}
// Replaces g by the gradient of x, which is overwritten.
inline void soften_back(float* __restrict x, float* __restrict g, int64_t n) {
  soften(x, x, n);
  const float share = dot(g, x, n);
  for (int64_t k = 0; k < n; ++k) g[k] = x[k] * (g[k] - share);
}

// ---- heads ----------------------------------------------------------------------------------------

// Rotates a head by angles in the order of the pairs.
TIGHTROPE_LOOP void turn_row(const Problem& p, const float* from, float* to, const float* c, const float* s) {
  using A = Arithmetic<Float, Rounding::kOnce, false>;
  const int64_t end = p.start + 2 * p.pairs;
  if (from != to) {
    for (int64_t k = 0; k < p.start; ++k) to[k] = from[k];
    for (int64_t k = end; k < p.head_dim; ++k) to[k] = from[k];
  }
  from += p.start, to += p.start;
  if (p.interleaved) {
    turn_neighbours<A>(from, to, Row<float>{c, s, c, s}, p.pairs);
  } else {
    turn_halves<A>(from, from + p.pairs, to, to + p.pairs, Row<float>{c, s, c, s}, p.pairs);
  }
}

// Rotates the first head of a line; `g` and `x` are rows.
template <class F>
inline void stage_in_rows(const Problem& p, const Stages& o, const Line<F>& line, const float* c, const float* s,
                          float* g, float* x) {
  using T = float;
  const int64_t n = p.head_dim;
  // Values that need no conversion come from the input, and go to the output, without a copy.
  const T* from = g;
  T* to = g;
  if constexpr (kIs<typename F::Stored, T>) {
    from = line.in, to = line.out;
  } else {
    widen_row<F>(line.in, 1, g, n);
  }
  if (line.x != nullptr) widen_row<F>(line.x, 1, x, n);
  const T* const gate = line.gate;
  if (o.forward) {
    soften(from, g, n), from = g;
  } else if (gate != nullptr) {
    multiply_row(from, gate, g, n), from = g;
  }
  turn_row(p, from, to, c, s);
  if (o.forward && gate != nullptr) multiply_row(to, gate, to, n);
  if (line.x != nullptr) soften_back(x, to, n);
  if constexpr (!kIs<typename F::Stored, T>) narrow_row<F>(to, line.out, n);
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
