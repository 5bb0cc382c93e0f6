// Rotation R with prologue f, epilogue P and amplitude a, y = P·a·R·f(x), and its backward pass.
//
// Each head goes through this thread's scratch buffers. Forward: widen, apply f, then rotate, apply P and
// store in one loop. Backward: widen, apply P, rotate, apply f', store. The result is rounded once. The
// operations on an element do not depend on strides, and sums over a head use 32 lanes in a fixed order.
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
inline void widen_row(const typename F::Stored* in, int64_t step, typename F::Value* __restrict out,
                      int64_t n) {
  if (step == 1) {
    for (int64_t k = 0; k < n; ++k) out[k] = F::load(in[k]);
  } else {
    for (int64_t k = 0; k < n; ++k) out[k] = F::load(in[k * step]);
  }
}
template <class F>
inline void narrow_row(const typename F::Value* __restrict in, typename F::Stored* out, int64_t step,
                       int64_t n) {
  if (step == 1) {
    for (int64_t k = 0; k < n; ++k) out[k] = F::store(in[k]);
  } else {
    for (int64_t k = 0; k < n; ++k) out[k * step] = F::store(in[k]);
  }
}
#if defined(TIGHTROPE_REGISTERS)
template <>
inline void widen_row<Half>(const uint16_t* in, int64_t step, float* __restrict out, int64_t n) {
  int64_t k = 0;
  if (step == 1)
    for (; k + kWidest <= n; k += kWidest) Wide::write<false>(out + k, Wide::read(in + k));
  for (; k < n; ++k) out[k] = Half::load(in[k * step]);
}
template <>
inline void narrow_row<Half>(const float* __restrict in, uint16_t* out, int64_t step, int64_t n) {
  int64_t k = 0;
  if (step == 1)
    for (; k + kWidest <= n; k += kWidest) Wide::write<false>(out + k, Wide::read(in + k));
  for (; k < n; ++k) out[k * step] = Half::store(in[k]);
}
#endif

// ---- sums and norms -------------------------------------------------------------------------------

constexpr int kSumLanes = 32;

template <class T>
inline T sum_lanes(T* lane) {
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  return lane[0];
}
// Σ a·b
template <class T>
TIGHTROPE_LOOP T dot(const T* __restrict a, const T* __restrict b, int64_t n) {
  alignas(64) T lane[kSumLanes] = {};
  int64_t k = 0;
  for (; k + kSumLanes <= n; k += kSumLanes)
    for (int l = 0; l < kSumLanes; ++l) lane[l] = fma_(a[k + l], b[k + l], lane[l]);
  for (int l = 0; k + l < n; ++l) lane[l] = fma_(a[k + l], b[k + l], lane[l]);
  return sum_lanes(lane);
}
template <class T>
TIGHTROPE_LOOP T sum(const T* __restrict a, int64_t n) {
  alignas(64) T lane[kSumLanes] = {};
  int64_t k = 0;
  for (; k + kSumLanes <= n; k += kSumLanes)
    for (int l = 0; l < kSumLanes; ++l) lane[l] += a[k + l];
  for (int l = 0; k + l < n; ++l) lane[l] += a[k + l];
  return sum_lanes(lane);
}
// The larger of a value and the largest so far; NaN if either is NaN.
template <class T>
TIGHTROPE_INLINE T larger(T a, T top) {
  return a > top || a != a ? a : top;
}
// Returns the maximum, or NaN if any value is NaN.
template <class T>
TIGHTROPE_LOOP T largest(const T* __restrict a, int64_t n) {
  alignas(64) T lane[kSumLanes];
  for (int l = 0; l < kSumLanes; ++l) lane[l] = a[0];
  int64_t k = 0;
  for (; k + kSumLanes <= n; k += kSumLanes)
    for (int l = 0; l < kSumLanes; ++l) lane[l] = larger(a[k + l], lane[l]);
  for (int l = 0; k + l < n; ++l) lane[l] = larger(a[k + l], lane[l]);
  for (int width = kSumLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lane[l] = larger(lane[l + width], lane[l]);
  return lane[0];
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

template <class A, class F>
TIGHTROPE_LOOP void act_from(const typename F::Stored* __restrict in,
                             typename F::Value* __restrict x, int64_t n) {
  for (int64_t k = 0; k < n; ++k) x[k] = A::template f<false>(F::load(in[k]));
}
// Whether some angles of a wave need the C library.
template <class A>
inline bool has_large(const float* __restrict x, int64_t n) {
  int32_t found = 0;
  if (kIsWave<A>)
    for (int64_t k = 0; k < n; ++k) found |= magnitude(x[k]) > kLargeAngle;
  return found != 0;
}
template <class A>
inline bool has_large(const double*, int64_t) { return false; }

template <class A, class T>
TIGHTROPE_LOOP void act_on_row(T* __restrict x, int64_t n) {
  const auto near = [&](int64_t k) { return A::template f<false>(x[k]); };
  if (has_large<A>(x, n)) {
    for (int64_t k = 0; k < n; ++k)
      x[k] = magnitude(x[k]) > T(kLargeAngle) ? T(A::template f<false>(double(x[k]))) : near(k);
    return;
  }
  for (int64_t k = 0; k < n; ++k) x[k] = near(k);
}
template <class A, class T>
TIGHTROPE_LOOP void slope_on_row(const T* __restrict x, T* __restrict g, int64_t n) {
  const auto near = [&](int64_t k) { return A::template slope<false>(x[k]); };
  if (has_large<A>(x, n)) {
    for (int64_t k = 0; k < n; ++k)
      g[k] *= magnitude(x[k]) > T(kLargeAngle) ? T(A::template slope<false>(double(x[k]))) : near(k);
    return;
  }
  for (int64_t k = 0; k < n; ++k) g[k] *= near(k);
}

// Whether stage_tiles.h processes everything of this type but softmax.
template <class T>
constexpr bool kHasRegisters = false;
#if defined(TIGHTROPE_REGISTERS)
template <>
inline constexpr bool kHasRegisters<float> = true;
#endif

// Applies f in place.
template <class T>
inline void apply(const Stages& o, const T* weight, T* __restrict x, int64_t n) {
  if (o.act == Act::kSoftmax) {
    soften(x, n);
  } else if constexpr (!kHasRegisters<T>) {
    if (o.act == Act::kRmsNorm) {
      const T scale = inverse_rms(x, n, o.eps);
      for (int64_t k = 0; k < n; ++k) x[k] = x[k] * scale * weight[k];
    } else {
      with_act(o.act, [&](auto act) { act_on_row<decltype(act)>(x, n); });
    }
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
  } else if constexpr (!kHasRegisters<T>) {
    if (o.act == Act::kRmsNorm) {
      const T scale = inverse_rms(x, n, o.eps);
      for (int64_t k = 0; k < n; ++k) x[k] *= scale;
      if (by_weight != nullptr)
        for (int64_t k = 0; k < n; ++k) by_weight[k] = fma_(g[k], x[k], by_weight[k]);
      for (int64_t k = 0; k < n; ++k) g[k] *= weight[k];
      const T share = dot(g, x, n) / T(n);
      for (int64_t k = 0; k < n; ++k) g[k] = scale * fma_(-x[k], share, g[k]);
    } else {
      with_act(o.act, [&](auto act) { slope_on_row<decltype(act)>(x, g, n); });
    }
  }
}

// ---- P --------------------------------------------------------------------------------------------

template <class T>
TIGHTROPE_LOOP void exponentials_of(T* __restrict x, int64_t n) {
  // Replace every NaN by one without low bits: see BFloat16.
  for (int64_t k = 0; k < n; ++k) x[k] = x[k] != x[k] ? T(__builtin_nan("")) : exponential(x[k]);
}

// e^(slope · position). The product needs more digits than float has, so it is split into two floats.
TIGHTROPE_LOOP void by_slope(const double* __restrict slope, double position, float* __restrict out,
                     int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const double log = slope[k] * position;
    const float high = float(log), low = float(log - double(high));
    const float e = exponential(high);
    // Where e is 0 or infinite, no correction is needed, and `low` may be infinite or NaN.
    const bool corrected = magnitude(high) < 200.0f && e <= 3.40282347e38f;
    out[k] = log != log ? __builtin_nanf("") : choose(corrected, fma_(e, low, e), e);
  }
}
TIGHTROPE_LOOP void by_slope(const double* __restrict slope, double position, double* __restrict out,
                     int64_t n) {
  for (int64_t k = 0; k < n; ++k) out[k] = exponential(slope[k] * position);
}

template <class T, class F>
inline void read_logs(const Part& part, int64_t at, T* __restrict out, int64_t n) {
  const auto* from = static_cast<const typename F::Stored*>(part.log) + at;
  const int64_t step = part.log_stride.channel;
  for (int64_t k = 0; k < n; ++k) out[k] = T(F::load(from[k * step]));
}

// Returns the position of a token as a double, by which slopes are multiplied.
inline double distance_of(const Problem& p, int64_t row, int64_t token) {
  const Split at = position_at(p, 0, row, token);
  return at.lost ? __builtin_nan("") : double(at.whole) + double(at.fraction) / kHalfRange;
}

// Computes P of one token and head.
template <class T>
inline void factors_of(const Problem& p, const Stages& o, const Part& part, int64_t row, int64_t head,
                       int64_t token, T* out) {
  if (part.slope != nullptr) {
    by_slope(part.slope + head * part.slope_head, distance_of(p, row, token), out, p.head_dim);
    return;
  }
  const Strides& s = part.log_stride;
  const int64_t at = row * s.row + head * s.head + token * s.token;
  // One value for all channels needs only one exponential.
  const int64_t n = s.channel == 0 ? 1 : p.head_dim;
  switch (part.log_dtype) {
    case Dtype::kFloat: read_logs<T, Float>(part, at, out, n); break;
    case Dtype::kDouble: read_logs<T, Double>(part, at, out, n); break;
    case Dtype::kBFloat16: read_logs<T, BFloat16>(part, at, out, n); break;
    case Dtype::kHalf: read_logs<T, Half>(part, at, out, n); break;
  }
  if (o.invert)
    for (int64_t k = 0; k < n; ++k) out[k] = -out[k];
  exponentials_of(out, n);
  for (int64_t k = n; k < p.head_dim; ++k) out[k] = out[0];
}

// ---- the rotation ---------------------------------------------------------------------------------

// Rotates a head from a buffer to `out`, multiplied by `gate` if there is one.
template <class F, bool gated>
TIGHTROPE_LOOP void turn_halves_to(const typename F::Value* __restrict x, const typename F::Value* __restrict c,
                           const typename F::Value* __restrict s,
                           const typename F::Value* __restrict gate, typename F::Stored* __restrict out,
                           int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value u = x[k], v = x[n + k];
    typename F::Value y = turned_u(u, v, c[k], s[k]), z = turned_v(u, v, c[k], s[k]);
    if (gated) y *= gate[k], z *= gate[n + k];
    out[k] = F::store(y);
    out[n + k] = F::store(z);
  }
}
template <class F, bool gated>
TIGHTROPE_LOOP void turn_neighbours_to(const typename F::Value* __restrict x,
                               const typename F::Value* __restrict c,
                               const typename F::Value* __restrict s,
                               const typename F::Value* __restrict gate,
                               typename F::Stored* __restrict out, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value u = x[2 * k], v = x[2 * k + 1];
    typename F::Value y = turned_u(u, v, c[k], s[k]), z = turned_v(u, v, c[k], s[k]);
    if (gated) y *= gate[2 * k], z *= gate[2 * k + 1];
    out[2 * k] = F::store(y);
    out[2 * k + 1] = F::store(z);
  }
}
template <class F, bool gated>
inline void turn_head_to(const Problem& p, const typename F::Value* __restrict x,
                         const typename F::Value* c, const typename F::Value* s,
                         const typename F::Value* __restrict gate, typename F::Stored* __restrict out) {
  const auto pass = [&](int64_t from, int64_t to) {
    for (int64_t k = from; k < to; ++k) out[k] = F::store(gated ? x[k] * gate[k] : x[k]);
  };
  const int64_t end = p.start + 2 * p.pairs;
  pass(0, p.start);
  const auto* g = gated ? gate + p.start : gate;
  if (p.interleaved) {
    turn_neighbours_to<F, gated>(x + p.start, c, s, g, out + p.start, p.pairs);
  } else {
    turn_halves_to<F, gated>(x + p.start, c, s, g, out + p.start, p.pairs);
  }
  pass(end, p.head_dim);
}
template <class F>
inline void turn_head(const Problem& p, const typename F::Value* x, const typename F::Value* c,
                      const typename F::Value* s, const typename F::Value* gate,
                      typename F::Stored* out) {
  if (gate != nullptr) {
    turn_head_to<F, true>(p, x, c, s, gate, out);
  } else {
    turn_head_to<F, false>(p, x, c, s, gate, out);
  }
}

// kWell: whether the compiler vectorises the conversion of this format well.
template <class F>
struct Converts {
  static constexpr bool kWell = true;
};
#if defined(TIGHTROPE_REGISTERS)
template <>
struct Converts<Half> {
  static constexpr bool kWell = false;
};
#endif

// ---- heads ----------------------------------------------------------------------------------------

// Scratch memory of one thread; scratch_values() in rotate.h computes its size.
template <class T>
struct Scratch {
  Scratch(const Problem& p, void* memory) {
    const int64_t width = padded(p.head_dim);
    pairs = padded(p.pairs);
    T* at = static_cast<T*>(memory);
    const auto take = [&](int64_t n) {
      T* from = at;
      at += n;
      return from;
    };
    cosine = take(p.tile * pairs), sine = take(p.tile * pairs);
    for (T*& f : shared) f = take(p.tile * width);
    own = take(width), a = take(width), b = take(width), c = take(width), weight = take(width);
  }

  int64_t pairs;          // stride of the angles from token to token
  T *cosine, *sine;       // of the tokens of a tile
  T* shared[kMaxOperands];  // P of the tokens of a tile, if all heads share it
  T* own;                 // P of one head
  T *a, *b, *c, *weight;
};

// One head of one token, with its angles, gate and weight.
template <class F>
struct Head {
  const typename F::Stored* in;
  typename F::Stored* out;
  int64_t in_channel, out_channel;
  const typename F::Stored* x;
  int64_t x_channel;
  const typename F::Value *cosine, *sine, *gate, *weight;
  typename F::Value* by_weight;
};

template <class F>
inline void turn_and_store(const Problem& p, const Head<F>& h, const typename F::Value* x,
                           const typename F::Value* gate, typename F::Value* spare) {
  if (h.out_channel == 1 && Converts<F>::kWell) {
    turn_head<F>(p, x, h.cosine, h.sine, gate, h.out);
  } else {
    turn_head<Plain<typename F::Value>>(p, x, h.cosine, h.sine, gate, spare);
    narrow_row<F>(spare, h.out, h.out_channel, p.head_dim);
  }
}

template <class F>
inline void go_ahead(const Problem& p, const Stages& o, const Head<F>& h,
                     const Scratch<typename F::Value>& w) {
  const int64_t n = p.head_dim;
  bool together = false;
  if constexpr (!kHasRegisters<typename F::Value>)
    together = h.in_channel == 1 && Converts<F>::kWell && o.act != Act::kSin && o.act != Act::kCos &&
               with_act(o.act, [&](auto act) { act_from<decltype(act), F>(h.in, w.a, n); });
  if (!together) {
    widen_row<F>(h.in, h.in_channel, w.a, n);
    apply(o, h.weight, w.a, n);
  }
  turn_and_store(p, h, w.a, h.gate, w.b);
}

template <class F>
inline void go_back(const Problem& p, const Stages& o, const Head<F>& h,
                    const Scratch<typename F::Value>& w) {
  using T = typename F::Value;
  const int64_t n = p.head_dim;
  widen_row<F>(h.in, h.in_channel, w.a, n);
  if (h.gate != nullptr) {
    const T* __restrict gate = h.gate;
    T* __restrict to = w.a;
    for (int64_t k = 0; k < n; ++k) to[k] *= gate[k];
  }
  if (o.act == Act::kNone) {
    turn_and_store(p, h, w.a, static_cast<const T*>(nullptr), w.b);
    return;
  }
  turn_head<Plain<T>>(p, w.a, h.cosine, h.sine, nullptr, w.b);
  widen_row<F>(h.x, h.x_channel, w.c, n);
  apply_back(o, h.weight, w.c, w.b, h.by_weight, n);
  narrow_row<F>(w.b, h.out, h.out_channel, n);
}

// ---- tokens ---------------------------------------------------------------------------------------

template <class T>
inline void angles_of_tile(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens,
                           const Scratch<T>& w) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t first = 0; first < p.pairs; first += kAngles) {
      const int64_t n = p.pairs - first < kAngles ? p.pairs - first : kAngles;
      T* c = w.cosine + t * w.pairs + first;
      T* s = w.sine + t * w.pairs + first;
      if (!angles_of(p, row, head, token + t, first, n, c, s))
        for (int64_t k = 0; k < n; ++k) c[k] = s[k] = T(__builtin_nan(""));
    }
  }
}

// Gradient of the weights in one run: accumulates kHeadsTogether heads, then widens to double.
template <class T>
struct WeightSums {
  T* sum;
  double* to;
  int64_t n, together = 0;

  void added() {
    if (++together == kHeadsTogether) done();
  }
  void done() {
    if (to == nullptr || together == 0) return;
    for (int64_t k = 0; k < n; ++k) to[k] += double(sum[k]), sum[k] = 0;
    together = 0;
  }
};

template <class F>
inline void stages_tile(const Problem& p, const Problem& turns, const Stages& o,
                       const Scratch<typename F::Value>& w, int64_t run, int64_t row, int64_t token,
                       int64_t tokens) {
  using Stored = typename F::Stored;
  using T = typename F::Value;
  const int64_t width = padded(p.head_dim), bytes = p.head_dim * int64_t(sizeof(Stored));
  const bool shared = !p.angles_per_head;
  if (shared) angles_of_tile(turns, row, 0, token, tokens, w);
  for (int32_t index = 0; index < p.operands; ++index) {
    const Operand& operand = p.operand[index];
    const Part& part = o.part[index];
    const Strides &i = operand.in_stride, &j = operand.out_stride, &xs = part.x_stride;
    const bool by_token = part.slope != nullptr || part.log != nullptr;
    if (by_token && !part.per_head)
      for (int64_t t = 0; t < tokens; ++t)
        factors_of(p, o, part, row, 0, token + t, w.shared[index] + t * width);
    const auto* weight = static_cast<const T*>(part.weight);
    WeightSums<T> sums{w.weight, part.by_weight, p.head_dim};
    if (part.by_weight != nullptr) {
      sums.to += run * (part.weight_head == 0 ? 1 : operand.heads) * p.head_dim;
      for (int64_t k = 0; k < p.head_dim; ++k) w.weight[k] = 0;
    }
    // Groups of heads as in turn_tile, but not where weight gradients are summed: the order of a sum must not
    // depend on strides.
    const bool adjacent = i.head < i.token;
    const int64_t group = !shared || part.weight_head != 0                 ? 1
                          : adjacent || part.by_weight != nullptr ? operand.heads
                                                                  : streams_of<Stored>(p);
    for (int64_t first = 0; first < operand.heads; first += group) {
      const int64_t last = operand.heads - first < group ? operand.heads : first + group;
      if (!shared) angles_of_tile(turns, row, first, token, tokens, w);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = token + t, place = place_of(p, operand, row, at);
        if (place < 0) continue;
        for (int64_t head = first; head < last; ++head) {
          Head<F> h;
          h.in = static_cast<const Stored*>(operand.in) + head * i.head + operand.source_of(row, at, place);
          h.out = static_cast<Stored*>(operand.out) + head * j.head + place;
          h.in_channel = i.channel, h.out_channel = j.channel, h.x_channel = xs.channel;
          h.x = part.x == nullptr ? nullptr
                                  : static_cast<const Stored*>(part.x) + row * xs.row +
                                        head * xs.head + at * xs.token;
          const bool prefetches = adjacent && group > 1;
          prefetch(h.in, h.out, kAhead, prefetches ? bytes : 0);
          if (h.x != nullptr) prefetch(h.x, h.x, kAhead, prefetches ? bytes : 0);
          h.cosine = w.cosine + t * w.pairs, h.sine = w.sine + t * w.pairs;
          h.weight = weight == nullptr ? nullptr : weight + head * part.weight_head;
          h.by_weight = part.by_weight == nullptr ? nullptr : w.weight;
          h.gate = nullptr;
          if (part.factor != nullptr) {
            h.gate = static_cast<const T*>(part.factor) + row * part.factor_row + head * part.factor_head;
          } else if (by_token && !part.per_head) {
            h.gate = w.shared[index] + t * width;
          } else if (by_token) {
            factors_of(p, o, part, row, head, at, w.own);
            h.gate = w.own;
          }
          if (o.forward) {
            go_ahead(p, o, h, w);
          } else {
            go_back(p, o, h, w);
            if (part.by_weight != nullptr) sums.added();
          }
        }
      }
      if (part.by_weight != nullptr && part.weight_head != 0) {
        sums.done();
        sums.to += p.head_dim;
      }
    }
    if (part.by_weight != nullptr) sums.done();
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope

#if defined(TIGHTROPE_REGISTERS)
#include "stage_tiles.h"
#endif

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

template <class F>
void run_stages(const Problem& p, const Stages& o, void* memory, int64_t begin, int64_t end) {
  const Scratch<typename F::Value> w(p, memory);
  // Not bfloat16, so that the plain loops get the angles in the order of the pairs: see in_twos.
  Problem turns = p;
  if (p.dtype == Dtype::kBFloat16) turns.dtype = Dtype::kFloat;
#if defined(TIGHTROPE_REGISTERS)
  const bool registers = in_registers(o);
  Rows rows(p, o, reinterpret_cast<float*>(w.weight + padded(p.head_dim)));
#endif
  const int64_t tiles = p.rows * p.tiles_per_row;
  for (int64_t run = begin; run < end; ++run) {
    const int64_t last = tiles < (run + 1) * o.tiles ? tiles : (run + 1) * o.tiles;
    for (int64_t tile = run * o.tiles; tile < last; ++tile) {
      const int64_t row = tile / p.tiles_per_row;
      const int64_t token = (tile - row * p.tiles_per_row) * p.tile;
      const int64_t tokens = p.tokens - token < p.tile ? p.tokens - token : p.tile;
#if defined(TIGHTROPE_REGISTERS)
      if constexpr (sizeof(typename F::Value) == sizeof(float)) {
        if (registers) {
          register_tile<F>(p, o, w, rows, run, row, token, tokens);
          continue;
        }
      }
#endif
      stages_tile<F>(p, turns, o, w, run, row, token, tokens);
    }
  }
}

}  // namespace

void stages_loop(const Problem& p, const Stages& stages, void* scratch, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::kFloat: return run_stages<Float>(p, stages, scratch, begin, end);
    case Dtype::kDouble: return run_stages<Double>(p, stages, scratch, begin, end);
    case Dtype::kBFloat16: return run_stages<BFloat16>(p, stages, scratch, begin, end);
    case Dtype::kHalf: return run_stages<Half>(p, stages, scratch, begin, end);
  }
}

void exponentials(Dtype dtype, void* values, int64_t n) {
  if (dtype == Dtype::kDouble) return exponentials_of(static_cast<double*>(values), n);
  exponentials_of(static_cast<float*>(values), n);
}

}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
