// The prologue f and epilogue P: converts their tensors to the format of the loops and runs the loops.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "bind_problem.h"
#include "bind_sums.h"
#include "overlap.h"

#define TIGHTROPE_ISA binding
#include "formats.h"

namespace tightrope::binding {
namespace {

// Converts n numbers, `any` apart, times `sign`, which is 1 or -1.
template <class To>
inline void convert(Dtype dtype, const void* from, int64_t at, int64_t any, double sign, To* __restrict to, int64_t n) {
  with_format(dtype, [&](auto f) {
    using F = decltype(f);
    const auto* start = static_cast<const typename F::Stored*>(from) + at;
    with_step(any, [&](auto step) {
      for (int64_t k = 0; k < n; ++k) {
        const auto value = typename F::Value(sign) * F::load(start[k * step]);
        // Replace every NaN by one without low bits: see BFloat16 in formats.h.
        to[k] = value != value ? To(__builtin_nan("")) : To(value);
      }
    });
  });
}

// Owns the converted copies of weights and gates that the loops read during one call.
class Values {
 public:
  // Copies a tensor with these sizes and strides to contiguous values, times `sign`.
  template <class To>
  To* copy(const Tensor& x, std::array<int64_t, 3> sizes, std::array<int64_t, 3> strides, double sign) {
    const int64_t row = sizes[2], count = sizes[0] * sizes[1] * row;
    owned_.emplace_back(new char[count * int64_t(sizeof(To))]);
    To *const made = reinterpret_cast<To*>(owned_.back().get()), *to = made;
    for (int64_t i = 0; i < sizes[0]; ++i)
      for (int64_t j = 0; j < sizes[1]; ++j, to += row)
        convert(dtype_of(code_of(x)), x.const_data_ptr(), i * strides[0] + j * strides[1], strides[2], sign, to, row);
    return made;
  }

  // Returns the tensor, or a copy if the call is going to write into its memory.
  const Tensor& kept(const Tensor& x, const Extents& extents, int64_t element, const Problem& p) {
    const auto* from = static_cast<const char*>(x.const_data_ptr());
    const char* to = from + run_of(extents, 0) * element;
    for (int32_t i = 0; i < p.operands; ++i) {
      const Operand& o = p.operand[i];
      if (o.heads == 0) continue;
      const auto* out = static_cast<const char*>(o.out);
      const int64_t count = run_of(written_by(p, o).extents, 0);
      if (from < out + count * bytes_of(p.dtype) && out < to) {
        kept_.push_back(torch::stable::clone(x));
        return kept_.back();
      }
    }
    return x;
  }

 private:
  std::vector<std::unique_ptr<char[]>> owned_;
  std::deque<Tensor> kept_;
};

inline int64_t step(const View& view, int d) { return view.size[d] == 1 ? 0 : view.stride[d]; }

// True if no element of an operand is read: then its weight and gate are checked but not copied.
inline bool is_unread(const Problem& p, int64_t heads) { return heads == 0 || is_empty(p); }

inline void read_weight(const Tensor& x, int64_t heads, const Problem& p, Values& values, Part& part) {
  const View w(x);
  STD_TORCH_CHECK(w.dims == 2 && x.is_cpu() && (w.size[0] == 1 || w.size[0] == heads) &&
                      w.size[1] == p.head_dim,
                  "tightrope: weights of a norm must be [heads|1, channels]");
  part.weight_head = w.size[0] == 1 ? 0 : p.head_dim;
  if (is_unread(p, heads)) return;
  part.weight = values.copy<float>(x, {1, w.size[0], p.head_dim}, {0, w.stride[0], w.stride[1]}, 1.0);
}

inline void read_slope(const Tensor& x, int64_t heads, const Problem& p, const Stages& o, Values& values, Part& part) {
  const View s(x);
  STD_TORCH_CHECK(s.dims == 2 && x.is_cpu() && (s.size[0] == 1 || s.size[0] == heads) &&
                      (s.size[1] == 1 || s.size[1] == p.head_dim) &&
                      (p.position_dtype == PositionDtype::kNone || p.axes == 1) && p.position_heads == 1,
                  "tightrope: slopes must be [heads|1, channels|1], with positions of 1 axis that all heads share");
  if (is_unread(p, heads)) return;
  part.per_head = s.size[0] != 1;
  part.slope_head = part.per_head ? p.head_dim : 0;
  part.slope = values.copy<double>(x, {1, s.size[0], p.head_dim}, {0, s.stride[0], step(s, 1)},
                                   o.invert ? -1.0 : 1.0);
}

// Reads logarithms, or with kFactor the factors themselves.
inline void read_log(const Tensor& x, int64_t heads, const Problem& p, const Stages& o, Values& values, Part& part) {
  const bool logs = o.gate == Gate::kLog;
  const View g(x);
  const int64_t fits[] = {p.rows, heads, p.tokens, p.head_dim};
  for (int d = 0; d < 4; ++d)
    STD_TORCH_CHECK(g.dims == 4 && x.is_cpu() && (g.size[d] == 1 || g.size[d] == fits[d]),
                    "tightrope: logarithms of a gate must be [rows|1, heads|1, tokens|1, channels|1]");
  if (is_unread(p, heads)) return;
  part.per_head = g.size[1] != 1;
  if (g.size[2] == 1) {
    const int64_t rows = g.size[0], own = g.size[1];
    float* made = values.copy<float>(x, {rows, own, p.head_dim}, {g.stride[0], g.stride[1], step(g, 3)},
                                     o.invert && logs ? -1.0 : 1.0);
    part.factor = made;
    part.factor_row = rows == 1 ? 0 : own * p.head_dim;
    part.factor_head = own == 1 ? 0 : p.head_dim;
    if (logs) loops().exponentials(made, rows * own * p.head_dim);
    for (int64_t k = 0; o.invert && !logs && k < rows * own * p.head_dim; ++k) made[k] = 1.0f / made[k];
    return;
  }
  part.log_dtype = dtype_of(code_of(x));
  const Extents extents{{{g.size[0], g.stride[0]}, {g.size[1], g.stride[1]},
                         {g.size[2], g.stride[2]}, {g.size[3], g.stride[3]}}};
  const Tensor& log = values.kept(x, extents, bytes_of(part.log_dtype), p);
  const View l(log);
  part.log = log.const_data_ptr();
  part.log_stride = {step(l, 0), step(l, 1), step(l, 2), step(l, 3)};
}

// Checks f and P and converts their tensors to the format of the loops.
inline Stages stages_of(const Problem& p, const Operands& xs, const Arguments& a, Values& values) {
  const Options& options = a.options;
  Stages o{};
  STD_TORCH_CHECK(p.dtype != Dtype::kDouble, "tightrope: float64 with an act or a gate needs the definition");
  STD_TORCH_CHECK(options.act <= int64_t(Act::kRmsNorm) && options.gate <= int64_t(Gate::kFactor),
                  "tightrope: act and gate must be known");
  STD_TORCH_CHECK(options.act == 0 || options.direction != kInverse, "tightrope: an inverse call must have no act");
  o.act = Act(options.act), o.gate = Gate(options.gate), o.eps = a.eps;
  o.forward = options.direction == kForward;
  o.invert = options.direction == kInverse;
  o.tiles = 1;
  const Tensor* next = a.extras;
  for (int32_t i = 0; o.act == Act::kRmsNorm && i < p.operands; ++i)
    read_weight(*next++, p.operand[i].heads, p, values, o.part[i]);
  for (int32_t i = 0; o.gate != Gate::kNone && i < p.operands; ++i)
    (o.gate == Gate::kSlope ? read_slope : read_log)(*next++, p.operand[i].heads, p, o, values, o.part[i]);
  for (int32_t i = 0; o.act != Act::kNone && !o.forward && i < p.operands; ++i) {
    const Tensor& x = *next++;
    const View in(x), as(*xs.tensor[i]);
    STD_TORCH_CHECK(in.dims == as.dims && x.is_cpu() && code_of(x) == code_of(*xs.tensor[i]),
                    "tightrope: x must have the shape and dtype of its gradient");
    for (int d = 0; d < int(in.dims); ++d)
      STD_TORCH_CHECK(in.size[d] == as.size[d],
                      "tightrope: x must have the shape and dtype of its gradient");
    o.part[i].x = x.const_data_ptr();
    o.part[i].x_stride = in.strides(kLayouts[options.layout]);
  }
  return o;
}

// Runs a rotation with f and P; in the backward pass of a norm, returns the gradients of its weights.
inline std::vector<Tensor> run_stages(Problem& p, const Operands& xs, const Arguments& a) {
  Values values;
  Stages o = stages_of(p, xs, a, values);
  leave_empty_caches(p);
  const bool sums = o.act == Act::kRmsNorm && !o.forward, empty = is_empty(p);
  int64_t items = empty ? 0 : divide(p, tile_of(p));
  if (sums && !empty) {
    o.tiles = (run_of_tokens(p.rows * p.tokens) + p.tile - 1) / p.tile;
    items = (items + o.tiles - 1) / o.tiles;
  }
  std::vector<Tensor> partial, by_weight;
  std::vector<int64_t> entries;
  for (int32_t i = 0; sums && i < p.operands; ++i) {
    const int64_t own = a.extras[i].size(0);
    entries.push_back(own * p.head_dim);
    partial.push_back(zeros(*xs.tensor[0], {items, own, p.head_dim}));
    by_weight.push_back(zeros(*xs.tensor[0], {own, p.head_dim}, torch::headeronly::ScalarType::Float));
    o.part[i].by_weight = static_cast<double*>(partial[i].mutable_data_ptr());
  }
  if (empty) return by_weight;
  const StagesLoop loop = loops().stages;
  const int64_t bytes = scratch_values(p, o) * int64_t(sizeof(float));
  share(p, items, p.tile * o.tiles, [&](int64_t begin, int64_t end) {
    Memory memory(bytes);
    loop(p, o, memory.at(), begin, end);
  });
  for (size_t i = 0; i < by_weight.size(); ++i)
    add_up(o.part[i].by_weight, items, entries[i], by_weight[i], 0, false);
  return by_weight;
}

}  // namespace
}  // namespace tightrope::binding
