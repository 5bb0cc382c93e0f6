// Heads with f and P in rows of scratch memory: for double, for softmax, and without registers. A head is widened, goes
// through f, is rotated in its row, multiplied by P and rounded once. Sums over a head use 32 lanes in a fixed order.
#pragma once

#include "acts.h"
#include "heads.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Whether stage_lines.h processes everything of this type but softmax.
template <class T>
#if defined(TIGHTROPE_REGISTERS)
constexpr bool kHasRegisters = kIs<T, float>;
#else
constexpr bool kHasRegisters = false;
#endif

template <class T>
struct Plain;
template <>
struct Plain<float> : Float {};
template <>
struct Plain<double> : Double {};

// ---- rows of memory -----------------------------------------------------------------------------

template <class F>
inline void widen_row(const typename F::Stored* in, int64_t step, typename F::Value* __restrict out, int64_t n) {
  if (step == 1) {
    for (int64_t k = 0; k < n; ++k) out[k] = F::load(in[k]);
  } else {
    for (int64_t k = 0; k < n; ++k) out[k] = F::load(in[k * step]);
  }
}
template <class F>
inline void narrow_row(const typename F::Value* __restrict in, typename F::Stored* out, int64_t n) {
  for (int64_t k = 0; k < n; ++k) out[k] = F::store(in[k]);
}
#if defined(TIGHTROPE_REGISTERS)
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
#endif

template <class T>
inline void multiply_row(T* __restrict x, const T* __restrict by, int64_t n) {
  for (int64_t k = 0; k < n; ++k) x[k] *= by[k];
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
// Returns the maximum, or NaN if any value is NaN.
template <class T>
TIGHTROPE_LOOP T largest(const T* __restrict a, int64_t n) {
  const auto larger = [](T top, T x) { return x > top || x != x ? x : top; };
  return over_lanes(a[0], n, [&](T top, int64_t k) { return larger(top, a[k]); }, larger);
}

template <class T>
inline T inverse_rms(const T* x, int64_t n, double eps) {
  return T(1) / root(dot(x, x, n) / T(n) + T(eps));
}

template <class T>
inline void soften(T* x, int64_t n) {
  const T top = largest(x, n);
  for (int64_t k = 0; k < n; ++k) x[k] = exponential(x[k] - top);
  const T scale = T(1) / sum(x, n);
  for (int64_t k = 0; k < n; ++k) x[k] *= scale;
}

// ---- f and f' -------------------------------------------------------------------------------------

// Replaces to[k] by near(k), or by far(k) where an angle of a wave needs the C library.
template <class A, class T, class Near, class Far>
TIGHTROPE_INLINE void by_angle(const T* x, T* to, int64_t n, const Near& near, const Far& far) {
  int32_t large = 0;
  if (kIsWave<A> && !kIs<T, double>)
    for (int64_t k = 0; k < n; ++k) large |= magnitude(x[k]) > T(kLargeAngle);
  if (large != 0) {
    for (int64_t k = 0; k < n; ++k) to[k] = magnitude(x[k]) > T(kLargeAngle) ? far(k) : near(k);
    return;
  }
  for (int64_t k = 0; k < n; ++k) to[k] = near(k);
}
template <class A, class T>
TIGHTROPE_LOOP void act_on_row(T* __restrict x, int64_t n) {
  by_angle<A>(x, x, n, [&](int64_t k) { return A::template f<false>(x[k]); },
              [&](int64_t k) { return T(A::template f<false>(double(x[k]))); });
}
template <class A, class T>
TIGHTROPE_LOOP void slope_on_row(const T* __restrict x, T* __restrict g, int64_t n) {
  by_angle<A>(x, g, n, [&](int64_t k) { return g[k] * A::template slope<false>(x[k]); },
              [&](int64_t k) { return g[k] * T(A::template slope<false>(double(x[k]))); });
}

// Applies f in place.
template <class T>
inline void apply(const Stages& o, const T* __restrict weight, T* __restrict x, int64_t n) {
  if (o.act == Act::kSoftmax) return soften(x, n);
  if constexpr (!kHasRegisters<T>) {
    if (with_act(o.act, [&](auto act) { act_on_row<decltype(act)>(x, n); })) return;
    const T scale = inverse_rms(x, n, o.eps);
    for (int64_t k = 0; k < n; ++k) x[k] = x[k] * scale * weight[k];
  }
}

// Replaces g by f'ᵀ·g and overwrites x; adds the gradient of a norm's weight to by_weight unless that is null.
template <class T>
inline void apply_back(const Stages& o, const T* __restrict weight, T* __restrict x, T* __restrict g,
                       T* __restrict by_weight, int64_t n) {
  if (o.act == Act::kSoftmax) {
    soften(x, n);
    const T share = dot(g, x, n);
    for (int64_t k = 0; k < n; ++k) g[k] = x[k] * (g[k] - share);
    return;
  }
  if constexpr (!kHasRegisters<T>) {
    if (with_act(o.act, [&](auto act) { slope_on_row<decltype(act)>(x, g, n); })) return;
    const T scale = inverse_rms(x, n, o.eps);
    for (int64_t k = 0; k < n; ++k) x[k] *= scale;
    if (by_weight != nullptr)
      for (int64_t k = 0; k < n; ++k) by_weight[k] = fma_(g[k], x[k], by_weight[k]);
    multiply_row(g, weight, n);
    const T share = dot(g, x, n) / T(n);
    for (int64_t k = 0; k < n; ++k) g[k] = scale * fma_(-x[k], share, g[k]);
  }
}

// ---- heads ----------------------------------------------------------------------------------------

// Rotates a head in its row, by angles in the order of the pairs.
template <class T>
TIGHTROPE_LOOP void turn_row(const Problem& p, T* row, const T* c, const T* s) {
  using A = Arithmetic<Plain<T>, Rounding::kOnce, false>;
  T* x = row + p.start;
  const Row<T> angles = {c, s, c, s};
  if (p.interleaved) {
    turn_neighbours<A>(x, x, angles, p.pairs);
  } else {
    turn_halves<A>(x, x + p.pairs, x, x + p.pairs, angles, p.pairs);
  }
}

// Rotates the first head of a line; `g` and `x` are rows. In the backward pass of a norm, adds the gradient of its
// weight to `by_weight` unless that is null.
template <class F>
inline void turn_in_rows(const Problem& p, const Stages& o, const Line<F>& line, const typename F::Value* c,
                         const typename F::Value* s, typename F::Value* g, typename F::Value* x,
                         typename F::Value* by_weight) {
  const int64_t n = p.head_dim;
  widen_row<F>(line.in, 1, g, n);
  if (o.forward) {
    apply(o, line.weight, g, n);
  } else if (line.gate != nullptr) {
    multiply_row(g, line.gate, n);
  }
  turn_row(p, g, c, s);
  if (!o.forward && o.act != Act::kNone) {
    widen_row<F>(line.x, 1, x, n);
    apply_back(o, line.weight, x, g, by_weight, n);
  } else if (o.forward && line.gate != nullptr) {
    multiply_row(g, line.gate, n);
  }
  narrow_row<F>(g, line.out, n);
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
