// Loops over the tokens and heads of a tile, around the functions of stage_lines.h: the counterpart of
// stages_tile in stages.h.
#pragma once

#include "stage_lines.h"
#include "powers.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Scratch rows of one thread, in register order; see scratch_values().
struct Rows {
  Rows(const Problem& p, const Stages& o, float* memory) : width(row_values(p)) {
    const auto take = [&](int64_t rows) {
      float* from = memory;
      memory += rows * width;
      return from;
    };
    for (int32_t i = 0; i < p.operands; ++i) {
      const int64_t heads = p.operand[i].heads;
      gate[i] = take(heads), weight[i] = take(heads);
      slope[i] = o.gate == Gate::kSlope ? take(2 * heads) : nullptr;
    }
    g = take(1), x = take(1), by_weight = take(1);
  }

  int64_t width;
  float *gate[kMaxOperands], *weight[kMaxOperands];  // one row per head
  float* slope[kMaxOperands];                        // two rows per head, if there are slopes
  Slopes slopes[kMaxOperands] = {};                  // their values lie in the rows of `slope`
  float *g, *x, *by_weight;
  int64_t row = -1;  // the row of the batch that `gate` holds
};

// Arranges the weights, factors and slopes that all tokens of a row share.
template <class F>
inline void arrange_constants(const Problem& p, const Stages& o, const Scratch<float>& w, int64_t row, Rows& rows) {
  for (int32_t i = 0; i < p.operands; ++i) {
    const Part& part = o.part[i];
    const auto all_heads = [&](const void* from, int64_t step, float* to) {
      for (int64_t head = 0; head < (step == 0 ? 1 : p.operand[i].heads); ++head)
        arrange<F>(p, static_cast<const float*>(from) + head * step, to + head * rows.width);
    };
    if (part.weight != nullptr && rows.row < 0) all_heads(part.weight, part.weight_head, rows.weight[i]);
    if (part.factor != nullptr && (rows.row < 0 || part.factor_row != 0))
      all_heads(static_cast<const float*>(part.factor) + row * part.factor_row, part.factor_head, rows.gate[i]);
    if (part.slope != nullptr && part.per_head && rows.row < 0)
      rows.slopes[i] =
          arrange_slopes<F>(p, part, p.operand[i].heads, rows.slope[i], rows.width, w.a, w.b);
  }
  rows.row = row;
}

// Adds the sums in `rows.by_weight` to `to` and clears them.
template <class F>
inline void add_weights(const Problem& p, const Scratch<float>& w, const Rows& rows, double* __restrict to) {
  float* __restrict from = w.weight;
  restore<F>(p, rows.by_weight, from);
  for (int64_t k = 0; k < p.head_dim; ++k) to[k] += double(from[k]);
  for (int64_t k = 0; k < rows.width; ++k) rows.by_weight[k] = 0.0f;
}

// Processes the heads of a line; in the backward pass of a norm, adds the gradient of its weight to `to`
// unless that is null.
template <class F>
inline void turn_any(const Problem& p, const Stages& o, Line<typename F::Stored> line, const float* c,
                     const float* s, const Scratch<float>& w, const Rows& rows, double* to,
                     int64_t to_step, int64_t* together) {
  if (o.forward || o.act != Act::kRmsNorm) {
    turn_stages<F>(p, o, line, c, s);
    return;
  }
  const int64_t bytes = p.head_dim * int64_t(sizeof(typename F::Stored));
  for (int64_t head = 0; head < line.count; ++head) {
    prefetch(line.in, line.out, line.ahead, bytes);
    prefetch(line.x, line.x, line.ahead, bytes);
    float* by_weight = to == nullptr ? nullptr : rows.by_weight;
    if (p.interleaved) {
      norm_back<F, true>(p, o.eps, line, c, s, rows.g, rows.x, by_weight);
    } else {
      norm_back<F, false>(p, o.eps, line, c, s, rows.g, rows.x, by_weight);
    }
    line.in += line.in_step, line.out += line.out_step, line.x += line.x_step;
    if (line.gate != nullptr) line.gate += line.gate_step;
    line.weight += line.weight_step;
    if (to == nullptr) continue;
    if (to_step != 0 || ++*together == kHeadsTogether) {
      add_weights<F>(p, w, rows, to);
      *together = 0;
    }
    to += to_step;
  }
}

template <class F>
inline void register_tile(const Problem& p, const Stages& o, const Scratch<float>& w, Rows& rows, int64_t run,
                          int64_t row, int64_t token, int64_t tokens) {
  using Stored = typename F::Stored;
  const int64_t width = padded(p.head_dim), bytes = int64_t(sizeof(Stored));
  const bool shared = !p.angles_per_head;
  if (rows.row != row) arrange_constants<F>(p, o, w, row, rows);
  if (shared) angles_of_tile(p, row, 0, token, tokens, w);
  for (int32_t index = 0; index < p.operands; ++index) {
    const Operand& operand = p.operand[index];
    const Part& part = o.part[index];
    const Strides &i = operand.in_stride, &j = operand.out_stride, &k = part.x_stride;
    const bool by_token = part.slope != nullptr || part.log != nullptr, has_x = part.x != nullptr;
    if (by_token && !part.per_head)
      for (int64_t t = 0; t < tokens; ++t)
        factors_of(p, o, part, row, 0, token + t, w.shared[index] + t * width);
    double* to = part.by_weight;
    const int64_t to_step = part.weight_head == 0 ? 0 : p.head_dim;
    int64_t together = 0;
    if (to != nullptr) {
      to += run * (to_step == 0 ? 1 : operand.heads) * p.head_dim;
      for (int64_t d = 0; d < rows.width; ++d) rows.by_weight[d] = 0.0f;
    }
    // Computing norms reads all heads of a token before the first one rotates, so prefetch the next token.
    const bool norms = o.act == Act::kRmsNorm && o.forward;
    // Groups of heads as in turn_tile, but not where weight gradients are summed: the order of a sum must not
    // depend on strides.
    const bool adjacent = i.head < i.token, even = i.channel == 1 && j.channel == 1 && (!has_x || k.channel == 1);
    const int64_t group = !shared ? 1 : adjacent || to != nullptr ? operand.heads : streams_of<Stored>(p);
    for (int64_t first = 0; first < operand.heads; first += group) {
      const int64_t count = operand.heads - first < group ? operand.heads - first : group;
      if (!shared) angles_of_tile(p, row, first, token, tokens, w);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t at = token + t, place = place_of(p, operand, row, at);
        if (place < 0) continue;
        Line<Stored> line{};
        line.in = static_cast<const Stored*>(operand.in) + first * i.head + operand.source_of(row, at, place);
        line.out = static_cast<Stored*>(operand.out) + first * j.head + place;
        if (has_x) line.x = static_cast<const Stored*>(part.x) + row * k.row + first * k.head + at * k.token;
        line.in_step = i.head, line.out_step = j.head, line.x_step = k.head, line.count = count;
        line.ahead = adjacent && shared && !norms ? kAhead
                     : adjacent || t + 1 < tokens ? i.token * bytes
                                                  : (group * i.head - t * i.token) * bytes;
        if (part.weight != nullptr) {
          line.weight_step = part.weight_head == 0 ? 0 : rows.width;
          line.weight = rows.weight[index] + first * line.weight_step;
        }
        if (part.factor != nullptr) {
          line.gate_step = part.factor_head == 0 ? 0 : rows.width;
          line.gate = rows.gate[index] + first * line.gate_step;
        } else if (by_token && !part.per_head) {
          arrange<F>(p, w.shared[index] + t * width, rows.gate[index]);
          line.gate = rows.gate[index];
        } else if (by_token && rows.slopes[index].count != 0) {
          powers_of<Span<F>::kBrief>(rows.slopes[index], first, count, distance_of(p, row, at), rows.gate[index],
                                     rows.width);
          line.gate = rows.gate[index], line.gate_step = rows.width;
        } else if (by_token) {
          for (int64_t head = 0; head < count; ++head) {
            factors_of(p, o, part, row, first + head, at, w.own);
            arrange<F>(p, w.own, rows.gate[index] + head * rows.width);
          }
          line.gate = rows.gate[index], line.gate_step = rows.width;
        }
        const float *c = w.cosine + t * w.pairs, *s = w.sine + t * w.pairs;
        if (even) {
          turn_any<F>(p, o, line, c, s, w, rows, to == nullptr ? to : to + first * to_step, to_step, &together);
          continue;
        }
        // Copy strided channels to contiguous scratch memory first.
        for (int64_t head = 0; head < count; ++head) {
          Line<Stored> one = line;
          Stored *in = reinterpret_cast<Stored*>(w.a), *x = reinterpret_cast<Stored*>(w.c);
          for (int64_t d = 0; d < p.head_dim; ++d) in[d] = line.in[head * i.head + d * i.channel];
          for (int64_t d = 0; has_x && d < p.head_dim; ++d) x[d] = line.x[head * k.head + d * k.channel];
          one.in = one.out = in, one.x = x, one.count = 1, one.ahead = 0;
          if (line.gate != nullptr) one.gate += head * line.gate_step;
          if (line.weight != nullptr) one.weight += head * line.weight_step;
          turn_any<F>(p, o, one, c, s, w, rows, to == nullptr ? to : to + (first + head) * to_step, to_step,
                      &together);
          for (int64_t d = 0; d < p.head_dim; ++d) line.out[head * j.head + d * j.channel] = in[d];
        }
      }
    }
    if (to != nullptr && together > 0) add_weights<F>(p, w, rows, to);
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
