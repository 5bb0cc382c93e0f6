// Rotation R with prologue f, epilogue P and amplitude a, y = P·a·R·f(x), and its backward pass. The result is rounded
// once. The operations on an element do not depend on strides, and sums over a head have a fixed order.
//
// The heads of a token go through registers (stage_lines.h), or one after the other through rows (stage_rows.h).
#pragma once

#include "stage_lines.h"
#include "stage_rows.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// ---- P --------------------------------------------------------------------------------------------

TIGHTROPE_LOOP void exponentials(float* __restrict x, int64_t n) {
  // Replace every NaN by one without low bits: see BFloat16.
  for (int64_t k = 0; k < n; ++k) x[k] = x[k] != x[k] ? __builtin_nanf("") : exponential(x[k]);
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

// Computes P of one token and head.
inline void factors_of(const Problem& p, const Stages& o, const Part& part, int64_t row, int64_t head, int64_t token,
                       float* out) {
  if (part.slope != nullptr) {
    by_slope(part.slope + head * part.slope_head, distance_of(p, row, token), out, p.head_dim);
    return;
  }
  const Strides& s = part.log_stride;
  const int64_t at = row * s.row + head * s.head + token * s.token;
  // One value for all channels needs only one exponential.
  const int64_t n = s.channel == 0 ? 1 : p.head_dim;
  with_format(part.log_dtype, [&](auto f) {
    using F = decltype(f);
    const auto* from = static_cast<const typename F::Stored*>(part.log) + at;
    for (int64_t k = 0; k < n; ++k) out[k] = float(F::load(from[k * s.channel]));
  });
  if (o.gate == Gate::kFactor) {
    for (int64_t k = 0; k < n; ++k) {
      const float value = o.invert ? 1.0f / out[k] : out[k];
      // Replace every NaN by one without low bits: see BFloat16.
      out[k] = value != value ? __builtin_nanf("") : value;
    }
  } else {
    if (o.invert)
      for (int64_t k = 0; k < n; ++k) out[k] = -out[k];
    exponentials(out, n);
  }
  for (int64_t k = n; k < p.head_dim; ++k) out[k] = out[0];
}

// ---- heads ----------------------------------------------------------------------------------------

// Scratch memory of one thread; scratch_values() in rotate.h computes its size.
struct Scratch {
  Scratch(const Problem& p, const Stages& o, void* memory) : pairs(padded(p.pairs)), width(row_values(p)) {
    float* next = static_cast<float*>(memory);
    const auto take = [&](int64_t n) {
      float* from = next;
      next += n;
      return from;
    };
    cosine = take(p.tile * pairs), sine = take(p.tile * pairs);
    for (float*& f : shared) f = take(p.tile * padded(p.head_dim));
    own = take(padded(p.head_dim)), sum = take(padded(p.head_dim));
    in = take(padded(p.head_dim)), x = take(padded(p.head_dim));
    for (int32_t i = 0; i < p.operands; ++i) {
      const int64_t heads = p.operand[i].heads;
      gate[i] = take(heads * width), weight[i] = take(heads * width);
      slope[i] = take(o.gate == Gate::kSlope ? 2 * heads * width : 0);
    }
    row_g = take(width), row_x = take(width), by_weight = take(width);
  }

  int64_t pairs;            // stride of the angles from token to token
  float *cosine, *sine;         // of the tokens of a tile
  float* shared[kMaxOperands];  // P of the tokens of a tile, if all heads share it
  float *own, *sum, *in, *x;    // values of one head: of P, of the gradient of its weight, of strided tensors

  // Rows; the values of each have the order of registers if these are used (lines.h).
  int64_t width;
  float *gate[kMaxOperands], *weight[kMaxOperands];  // one row per head
  float* slope[kMaxOperands];                        // two rows per head, if there are slopes
  Slopes slopes[kMaxOperands] = {};              // their values lie in the rows of `slope`
  float *row_g, *row_x, *by_weight;
  int64_t row = -1;  // the row of the batch that `gate` holds
};

// Whether heads go through registers.
inline bool in_registers(const Stages& o) { return o.act != Act::kSoftmax; }

// Puts the values of a head into a row.
template <class F>
inline void put(const Problem& p, const Stages& o, const float* from, float* to) {
  if (in_registers(o)) return arrange<F>(p, from, to);
  memcpy(to, from, size_t(p.head_dim) * sizeof(float));
}

// Puts the weights, factors and slopes that all tokens of a row of the batch share into rows.
template <class F>
inline void put_constants(const Problem& p, const Stages& o, int64_t row, Scratch& w) {
  for (int32_t i = 0; i < p.operands; ++i) {
    const Part& part = o.part[i];
    const int64_t heads = p.operand[i].heads;
    const auto all_heads = [&](const float* from, int64_t step, float* to) {
      for (int64_t head = 0; head < (step == 0 ? 1 : heads); ++head)
        put<F>(p, o, from + head * step, to + head * w.width);
    };
    if (part.weight != nullptr && w.row < 0) all_heads(part.weight, part.weight_head, w.weight[i]);
    if (part.factor != nullptr && (w.row < 0 || part.factor_row != 0))
      all_heads(part.factor + row * part.factor_row, part.factor_head, w.gate[i]);
    if (in_registers(o) && part.slope != nullptr && part.per_head && w.row < 0)
      w.slopes[i] = arrange_slopes<F>(p, part, heads, w.slope[i], w.width, w.own, w.sum);
  }
  w.row = row;
}

// Adds P of the heads of a line, from `first` on: those of a token, whose P is `shared` if its heads share it.
template <class F>
inline void add_gate(const Problem& p, const Stages& o, int32_t index, int64_t row, int64_t first, int64_t token,
                     const float* shared, Scratch& w, Line<F>& line) {
  const Part& part = o.part[index];
  float* const gate = w.gate[index];
  if (part.factor != nullptr) {
    line.gate_step = part.factor_head == 0 ? 0 : w.width;
    line.gate = gate + first * line.gate_step;
    return;
  }
  if (part.slope == nullptr && part.log == nullptr) return;
  line.gate = gate;
  if (!part.per_head) return put<F>(p, o, shared, gate);
  line.gate_step = w.width;
  if (w.slopes[index].count != 0)
    return powers_of<F>(w.slopes[index], first, line.count, distance_of(p, row, token), gate, w.width);
  for (int64_t head = 0; head < line.count; ++head) {
    factors_of(p, o, part, row, first + head, token, w.own);
    put<F>(p, o, w.own, gate + head * w.width);
  }
}

// Gradient of the weights of an operand in one run: sums over some heads in float, and then in double.
struct WeightSums {
  double* to;     // or null
  int64_t step;   // from head to head; 0 if all share a weight
  int64_t most;   // heads to add up first
  int64_t heads;  // that `by_weight` holds
};

// Adds the sums of heads that share a weight, the one of `head`, and clears them.
template <class F>
inline void add_weights(const Problem& p, int64_t head, Scratch& w, WeightSums& sums) {
  if (sums.heads == 0) return;
  const float* from = w.sum;
  restore<F>(p, w.by_weight, w.sum);
  double* __restrict to = sums.to + head * sums.step;
  for (int64_t k = 0; k < p.head_dim; ++k) to[k] += double(from[k]);
  for (int64_t k = 0; k < w.width; ++k) w.by_weight[k] = 0;
  sums.heads = 0;
}

// Processes the heads of a line, the first of which is `head`, with the angles of their token.
template <class F>
inline void stage_heads(const Problem& p, const Stages& o, Line<F> line, const float* c, const float* s, int64_t head,
                        Scratch& w, WeightSums& sums) {
  const bool registers = in_registers(o);
  if (registers && (o.forward || o.act != Act::kRmsNorm)) return stage_in_lines<F>(p, o, line, c, s);
  const int64_t bytes = p.head_dim * int64_t(sizeof(typename F::Stored));
  float* const by_weight = sums.to == nullptr ? nullptr : w.by_weight;
  for (; line.count > 0; --line.count, ++head, line.skip(1)) {
    prefetch(line.in, line.out, line.ahead, bytes);
    if (line.x != nullptr) prefetch(line.x, line.x, line.ahead, bytes);
    if (registers) {
      norm_back<F>(p, o.eps, line, c, s, w.row_g, w.row_x, by_weight);
    } else {
      stage_in_rows<F>(p, o, line, c, s, w.row_g, w.row_x);
    }
    if (by_weight != nullptr && ++sums.heads == sums.most) add_weights<F>(p, head, w, sums);
  }
}

// ---- tokens ---------------------------------------------------------------------------------------

inline void angles_of_tile(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens,
                           const Scratch& w) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t first = 0; first < p.pairs; first += kAngles) {
      const int64_t n = p.pairs - first < kAngles ? p.pairs - first : kAngles;
      float* c = w.cosine + t * w.pairs + first;
      float* s = w.sine + t * w.pairs + first;
      if (!angles_of(p, row, head, token + t, first, n, c, s))
        for (int64_t k = 0; k < n; ++k) c[k] = s[k] = __builtin_nanf("");
    }
  }
}

template <class F>
inline void stages_tile(const Problem& p, const Stages& o, Scratch& w, int64_t run, int64_t row, int64_t token,
                        int64_t tokens) {
  using Stored = typename F::Stored;
  const int64_t width = padded(p.head_dim), bytes = int64_t(sizeof(Stored));
  const bool shared = !p.angles_per_head;
  if (w.row != row) put_constants<F>(p, o, row, w);
  if (shared) angles_of_tile(p, row, 0, token, tokens, w);
  for (int32_t index = 0; index < p.operands; ++index) {
    const Operand& operand = p.operand[index];
    const Part& part = o.part[index];
    const Strides &i = operand.in_stride, &j = operand.out_stride, &k = part.x_stride;
    const bool has_x = part.x != nullptr;
    float* const factors = w.shared[index];
    if ((part.slope != nullptr || part.log != nullptr) && !part.per_head)
      for (int64_t t = 0; t < tokens; ++t) factors_of(p, o, part, row, 0, token + t, factors + t * width);
    const int64_t step = part.weight_head == 0 ? 0 : p.head_dim;
    WeightSums sums{part.by_weight, step, step != 0 ? 1 : kHeadsTogether, 0};
    if (sums.to != nullptr) {
      sums.to += run * (step == 0 ? 1 : operand.heads) * p.head_dim;
      for (int64_t d = 0; d < w.width; ++d) w.by_weight[d] = 0;
    }
    // Computing norms reads all heads of a token before the first one rotates, so prefetch the next token.
    const bool norms = o.act == Act::kRmsNorm && o.forward;
    // Groups of heads as in run_tile, but not where weight gradients are summed: the order of a sum must not
    // depend on strides.
    const bool adjacent = i.head < i.token, even = i.channel == 1 && j.channel == 1 && (!has_x || k.channel == 1);
    const int64_t group = !shared                           ? 1
                          : adjacent || sums.to != nullptr ? operand.heads
                                                           : streams_of<Stored>(p);
    for (int64_t first = 0; first < operand.heads; first += group) {
      if (!shared) angles_of_tile(p, row, first, token, tokens, w);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = token + t, place = place_of(p, operand, row, at);
        if (place < 0) continue;
        Line<F> line{};
        line.in = static_cast<const Stored*>(operand.in) + first * i.head + operand.source_of(row, at, place);
        line.out = static_cast<Stored*>(operand.out) + first * j.head + place;
        if (has_x) line.x = static_cast<const Stored*>(part.x) + row * k.row + first * k.head + at * k.token;
        line.in_step = i.head, line.out_step = j.head, line.x_step = k.head;
        line.count = operand.heads - first < group ? operand.heads - first : group;
        line.ahead = adjacent && shared && !norms ? kAhead
                     : adjacent || t + 1 < tokens ? i.token * bytes
                                                  : (group * i.head - t * i.token) * bytes;
        if (part.weight != nullptr) {
          line.weight_step = part.weight_head == 0 ? 0 : w.width;
          line.weight = w.weight[index] + first * line.weight_step;
        }
        add_gate<F>(p, o, index, row, first, at, factors + t * width, w, line);
        const float *c = w.cosine + t * w.pairs, *s = w.sine + t * w.pairs;
        if (even) {
          stage_heads<F>(p, o, line, c, s, first, w, sums);
          continue;
        }
        // Copy strided channels to contiguous scratch memory first.
        Stored *in = reinterpret_cast<Stored*>(w.in), *x = reinterpret_cast<Stored*>(w.x);
        for (int64_t head = first, last = first + line.count; head < last; ++head, line.skip(1)) {
          for (int64_t d = 0; d < p.head_dim; ++d) in[d] = line.in[d * i.channel];
          for (int64_t d = 0; has_x && d < p.head_dim; ++d) x[d] = line.x[d * k.channel];
          Line<F> one = line;
          one.in = one.out = in, one.x = has_x ? x : nullptr, one.count = 1, one.ahead = 0;
          stage_heads<F>(p, o, one, c, s, head, w, sums);
          for (int64_t d = 0; d < p.head_dim; ++d) line.out[d * j.channel] = in[d];
        }
      }
      if (step != 0) add_weights<F>(p, first, w, sums);
    }
    add_weights<F>(p, 0, w, sums);
  }
}

template <class F>
void run_stages(const Problem& given, const Stages& o, void* memory, int64_t begin, int64_t end) {
  Problem p = given;
  // Not bfloat16, so that rows get the angles in the order of the pairs: see in_twos.
  if (!in_registers(o) && p.dtype == Dtype::kBFloat16) p.dtype = Dtype::kFloat;
  Scratch w(p, o, memory);
  const int64_t tiles = p.rows * p.tiles_per_row;
  for (int64_t run = begin; run < end; ++run) {
    const int64_t last = tiles < (run + 1) * o.tiles ? tiles : (run + 1) * o.tiles;
    for (int64_t tile = run * o.tiles; tile < last; ++tile) {
      const int64_t row = tile / p.tiles_per_row, token = tile % p.tiles_per_row * p.tile;
      stages_tile<F>(p, o, w, run, row, token, p.tokens - token < p.tile ? p.tokens - token : p.tile);
    }
  }
}

void stages_loop(const Problem& p, const Stages& stages, void* scratch, int64_t begin, int64_t end) {
  with_format(p.dtype, [&](auto f) {
    // A call in double with f or P is refused before: the definition computes it.
    if constexpr (!kIs<decltype(f), Double>) run_stages<decltype(f)>(p, stages, scratch, begin, end);
  });
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
