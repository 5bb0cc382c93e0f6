// Heads with f and P in rows of scratch memory: for double, for softmax, and without registers. A head is widened, goes
// through f, is rotated in its row, multiplied by P and rounded once. Sums over a head use 32 lanes in a fixed order.
#pragma once

#include "acts.h"
#include "heads.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

template <class T>
struct Plain;
template <>
struct Plain<float> : Float {};
template <>
struct Plain<double> : Double {};

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


template <class T>
inline void multiply_row(const T* x, const T* by, T* to, int64_t n) {
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

template <class T>
inline T inverse_rms(const T* x, int64_t n, double eps) {
  return T(1) / root(dot(x, x, n) / T(n) + T(eps));
}

// From here on `from` may be `to`, but overlaps it in no other way.
template <class T>
inline void soften(const T* from, T* to, int64_t n) {
  const T top = largest(from, n);
  if constexpr (kHasRegisters<T>) {
    for (int64_t k = 0; k < n; k += kWidest)
      write_first(to + k, exponential(read_first(from + k, n - k) - all<V>(top)), n - k);
  } else {
    TIGHTROPE_INDEPENDENT
    for (int64_t k = 0; k < n; ++k) to[k] = exponential(from[k] - top);
  }
  const T scale = T(1) / sum(to, n);
  for (int64_t k = 0; k < n; ++k) to[k] *= scale;
}

// ---- f and f' -------------------------------------------------------------------------------------

// Replaces `to` by f of `from`, or multiplies it by f' of `from`.
template <class A, bool slope, class T>
TIGHTROPE_LOOP void act_on_row(const T* from, T* to, int64_t n) {
  const auto each = [&](const auto& act) {
    TIGHTROPE_INDEPENDENT
    for (int64_t k = 0; k < n; ++k) to[k] = slope ? to[k] * act(from[k]) : act(from[k]);
  };
  const auto act = [](T x) { return slope ? A::template slope<true>(x) : A::template f<true>(x); };
  if constexpr (!kIsPlain<A>) {
    int64_t far = 0;  // as wide as the values, so that the loop vectorises
    for (int64_t k = 0; k < n; ++k) far |= magnitude(from[k]) > (kIsWave<A> ? kLargeAngle : kNear);
    if (far != 0) {
      return each([&](T x) {
        if constexpr (kIsWave<A>) return magnitude(x) > kLargeAngle ? T(A::far(x, slope)) : act(x);
        else return slope ? A::template slope<false>(x) : A::template f<false>(x);
      });
    }
  }
  each(act);
}

template <class T>
inline void apply(const Stages& o, const T* weight, const T* from, T* to, int64_t n) {
  if (o.act == Act::kSoftmax) return soften(from, to, n);
  if constexpr (!kHasRegisters<T>) {
    if (with_act(o.act, [&](auto act) { act_on_row<decltype(act), false>(from, to, n); })) return;
    const T scale = inverse_rms(from, n, o.eps);
    TIGHTROPE_INDEPENDENT
    for (int64_t k = 0; k < n; ++k) to[k] = from[k] * scale * weight[k];
  }
}

// Replaces g by f'ᵀ·g and overwrites x; adds the gradient of a norm's weight to by_weight unless that is null.
template <class T>
inline void apply_back(const Stages& o, const T* __restrict weight, T* __restrict x, T* __restrict g,
                       T* __restrict by_weight, int64_t n) {
  if (o.act == Act::kSoftmax) {
    soften(x, x, n);
    const T share = dot(g, x, n);
    for (int64_t k = 0; k < n; ++k) g[k] = x[k] * (g[k] - share);
    return;
  }
  if constexpr (!kHasRegisters<T>) {
    if (with_act(o.act, [&](auto act) { act_on_row<decltype(act), true>(x, g, n); })) return;
    const T scale = inverse_rms(x, n, o.eps);
    for (int64_t k = 0; k < n; ++k) x[k] *= scale;
    if (by_weight != nullptr)
      for (int64_t k = 0; k < n; ++k) by_weight[k] = fma_(g[k], x[k], by_weight[k]);
    multiply_row(g, weight, g, n);
    const T share = dot(g, x, n) / T(n);
    for (int64_t k = 0; k < n; ++k) g[k] = scale * fma_(-x[k], share, g[k]);
  }
}

// ---- heads ----------------------------------------------------------------------------------------

// Rotates a head by angles in the order of the pairs.
template <class T>
TIGHTROPE_LOOP void turn_row(const Problem& p, const T* from, T* to, const T* c, const T* s) {
  using A = Arithmetic<Plain<T>, Rounding::kOnce, false>;
  const int64_t end = p.start + 2 * p.pairs;
  if (from != to) {
    for (int64_t k = 0; k < p.start; ++k) to[k] = from[k];
    for (int64_t k = end; k < p.head_dim; ++k) to[k] = from[k];
  }
  from += p.start, to += p.start;
  if (p.interleaved) {
    turn_neighbours<A>(from, to, Row<T>{c, s, c, s}, p.pairs);
  } else {
    turn_halves<A>(from, from + p.pairs, to, to + p.pairs, Row<T>{c, s, c, s}, p.pairs);
  }
}

// Rotates the first head of a line; `g` and `x` are rows. In the backward pass of a norm, adds the gradient of its
// weight to `by_weight` unless that is null.
template <class F>
inline void stage_in_rows(const Problem& p, const Stages& o, const Line<F>& line, const typename F::Value* c,
                          const typename F::Value* s, typename F::Value* g, typename F::Value* x,
                          typename F::Value* by_weight) {
  using T = typename F::Value;
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
  if (o.forward && o.act != Act::kNone) {
    apply(o, line.weight, from, g, n), from = g;
  } else if (!o.forward && gate != nullptr) {
    multiply_row(from, gate, g, n), from = g;
  }
  turn_row(p, from, to, c, s);
  if (o.forward && gate != nullptr) multiply_row(to, gate, to, n);
  if (line.x != nullptr) apply_back(o, line.weight, x, to, by_weight, n);
  if constexpr (!kIs<typename F::Stored, T>) narrow_row<F>(to, line.out, n);
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
