// The operator's CPU kernels: tensors in, a Problem out. The only file with torch headers, and of
// those only the stable ABI, so one binary serves every Python and every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "rotate.h"

namespace {

using tightrope::Dtype;
using tightrope::Operand;
using tightrope::PositionDtype;
using tightrope::Problem;
using tightrope::Strides;
using torch::stable::Tensor;

// In the order of LAYOUTS in ops/schema.py: which dimension is which, -1 where there is none.
struct Layout {
  int dims, row, head, token;
};
constexpr Layout kLayouts[] = {
    {4, 0, 1, 2}, {4, 0, 2, 1}, {4, 1, 2, 0}, {3, -1, 1, 0}, {3, 0, -1, 1}, {2, -1, -1, 0}};

constexpr int64_t kForward = 0, kInverse = 2;

// Fewer elements than this are rotated sooner than a second thread wakes.
constexpr int64_t kElementsPerThread = 1 << 16;

// Sizes and strides of one tensor, fetched once: every question through the stable ABI is a call.
struct View {
  explicit View(const Tensor& x) : dims(x.dim()), size(x.sizes().data()), stride(x.strides().data()) {}

  int64_t size_at(int d) const { return d < 0 ? 1 : size[d]; }
  int64_t stride_at(int d) const { return d < 0 ? 0 : stride[d]; }
  Strides strides(const Layout& layout) const {
    return {stride_at(layout.row), stride_at(layout.head), stride_at(layout.token),
            stride[dims - 1]};
  }

  int64_t dims;
  const int64_t* size;
  const int64_t* stride;
};

int32_t code_of(const Tensor& x) {
  int32_t code = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &code));
  return code;
}

Dtype dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_float32()) return Dtype::kFloat;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBFloat16;
  if (code == aoti_torch_dtype_float16()) return Dtype::kHalf;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float64(), "tightrope: dtype of x");
  return Dtype::kDouble;
}

PositionDtype position_dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_int64()) return PositionDtype::kInt64;
  if (code == aoti_torch_dtype_int32()) return PositionDtype::kInt32;
  if (code == aoti_torch_dtype_float32()) return PositionDtype::kFloat;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float64(), "tightrope: dtype of positions");
  return PositionDtype::kDouble;
}

bool is_words(const Tensor& x) {
  return x.is_cpu() && code_of(x) == aoti_torch_dtype_int64() && x.is_contiguous();
}

// The same two questions as in ops/checks.py, where they are worded for users.
struct Extent {
  int64_t size, stride;
};
using Extents = std::array<Extent, 4>;

Extents extents_of(const Problem& p, const Operand& o) {
  const Strides& s = o.out_stride;
  return {{{p.rows, s.row}, {o.heads, s.head}, {p.tokens, s.token}, {p.head_dim, s.channel}}};
}

// True unless every dimension steps over all that the faster ones cover.
bool may_overlap_itself(Extents extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t covered = 1;
  for (const Extent& e : extents) {
    if (e.size <= 1) continue;
    if (e.stride < covered) return true;
    covered += (e.size - 1) * e.stride;
  }
  return false;
}

// Elements from the first to one past the last, of those dimensions that `period` does not divide.
int64_t run_of(const Extents& extents, int64_t period) {
  int64_t run = 1;
  for (const Extent& e : extents)
    if (period == 0 || e.stride % period != 0) run += (e.size - 1) * e.stride;
  return run;
}

// False where two tensors certainly share no element.
bool may_overlap(const Operand& a, const Extents& ae, const Operand& b, const Extents& be,
                 int64_t element) {
  const int64_t gap = (static_cast<char*>(b.out) - static_cast<char*>(a.out)) / element;
  if (gap >= run_of(ae, 0) || -gap >= run_of(be, 0)) return false;
  for (const Extent& e : ae) {
    if (e.stride <= 1) continue;
    const int64_t at = (gap % e.stride + e.stride) % e.stride;
    if (run_of(ae, e.stride) <= at && at + run_of(be, e.stride) <= e.stride) return false;
  }
  return true;
}

bool memory_overlaps(const Problem& p) {
  const int64_t element = p.dtype == Dtype::kDouble ? 8 : p.dtype == Dtype::kFloat ? 4 : 2;
  for (int32_t i = 0; i < p.operands; ++i) {
    const Extents extents = extents_of(p, p.operand[i]);
    if (may_overlap_itself(extents)) return true;
    for (int32_t j = 0; j < i; ++j)
      if (may_overlap(p.operand[j], extents_of(p, p.operand[j]), p.operand[i], extents, element))
        return true;
  }
  return false;
}

// Sentences for users are worded in Python, before a call comes here. What is checked below keeps a
// direct call of the raw operator from reading or writing outside its tensors.
void rotate_into(const std::vector<Tensor>& xs, const std::vector<Tensor>& outs, const Tensor& words,
                 const std::optional<Tensor>& turns, const std::optional<Tensor>& positions,
                 int64_t offset, bool ramp, int64_t layout_code, int64_t start, bool interleaved,
                 int64_t direction, double amplitude, bool reserved) {
  STD_TORCH_CHECK(!reserved, "tightrope: act, gate and numerics are reserved");
  STD_TORCH_CHECK(layout_code >= 0 && layout_code < 6, "tightrope: layout");
  STD_TORCH_CHECK(!xs.empty() && xs.size() <= size_t(tightrope::kMaxOperands), "tightrope: xs");
  const Layout& layout = kLayouts[layout_code];

  Problem p{};
  p.operands = int32_t(xs.size());
  const int32_t code = code_of(xs[0]);
  p.dtype = dtype_of(code);
  for (size_t i = 0; i < xs.size(); ++i) {
    const View x(xs[i]), out(outs[i]);
    STD_TORCH_CHECK(x.dims == layout.dims && (i == 0 || (code_of(xs[i]) == code && xs[i].is_cpu())),
                    "tightrope: xs must share a dtype and fit the layout");
    const int64_t rows = x.size_at(layout.row), tokens = x.size[layout.token];
    const int64_t head_dim = x.size[layout.dims - 1];
    if (i == 0) {
      p.rows = rows, p.tokens = tokens, p.head_dim = head_dim;
    }
    STD_TORCH_CHECK(rows == p.rows && tokens == p.tokens && head_dim == p.head_dim,
                    "tightrope: xs must share rows, tokens and channels");
    p.operand[i] = Operand{xs[i].const_data_ptr(), outs[i].mutable_data_ptr(),
                           x.size_at(layout.head), x.strides(layout), out.strides(layout)};
  }

  const View w(words);
  STD_TORCH_CHECK(w.dims == 4 && is_words(words),
                  "tightrope: words must be contiguous int64 [axes, rows|1, heads|1, pairs]");
  p.words = static_cast<const int64_t*>(words.const_data_ptr());
  p.axes = w.size[0], p.word_rows = w.size[1], p.word_heads = w.size[2], p.pairs = w.size[3];
  p.start = start;
  STD_TORCH_CHECK(p.word_rows == 1 || p.word_rows == p.rows, "tightrope: rows of words");
  for (int32_t i = 0; i < p.operands; ++i)
    STD_TORCH_CHECK(p.word_heads == 1 || p.word_heads == p.operand[i].heads,
                    "tightrope: heads of words");
  STD_TORCH_CHECK(start >= 0 && p.pairs >= 0 && start + 2 * p.pairs <= p.head_dim,
                  "tightrope: rotated channels lie outside the head");
  if (turns.has_value()) {
    STD_TORCH_CHECK(is_words(*turns) && turns->numel() == words.numel(),
                    "tightrope: turns must be shaped as words");
    p.turns = static_cast<const int64_t*>(turns->const_data_ptr());
  }

  p.offset = offset;
  p.ramp = ramp;
  p.position_dtype = PositionDtype::kNone;
  if (positions.has_value()) {
    const View at(*positions);
    STD_TORCH_CHECK(at.dims == 3 && positions->is_cpu() && at.size[0] == p.axes,
                    "tightrope: positions must be [axes, rows|1, tokens|1]");
    STD_TORCH_CHECK(at.size[1] == 1 || at.size[1] == p.rows, "tightrope: rows of positions");
    STD_TORCH_CHECK(at.size[2] == (ramp ? 1 : p.tokens), "tightrope: tokens of positions");
    p.positions = positions->const_data_ptr();
    p.position_dtype = position_dtype_of(code_of(*positions));
    p.position_axis = at.stride[0];
    p.position_row = at.size[1] == 1 ? 0 : at.stride[1];
    p.position_token = ramp ? 0 : at.stride[2];
  }

  p.interleaved = interleaved;
  p.conjugate = direction != kForward;
  p.amplitude = direction == kInverse ? 1.0 / amplitude : amplitude;

  int64_t heads = 0;
  for (int32_t i = 0; i < p.operands; ++i) heads += p.operand[i].heads;
  if (p.rows == 0 || p.tokens == 0 || heads == 0 || p.head_dim == 0) return;
  STD_TORCH_CHECK(p.operand[0].in != p.operand[0].out || !memory_overlaps(p),
                  "tightrope: memory overlaps");
  const int64_t fits = p.pairs == 0 ? 16 : tightrope::kAngles / p.pairs;
  p.tile = fits < 1 ? 1 : fits > 16 ? 16 : fits;
  if (p.tile > p.tokens) p.tile = p.tokens;
  p.tiles_per_row = (p.tokens + p.tile - 1) / p.tile;

  const tightrope::Loop loop = tightrope::loop();
  STD_TORCH_CHECK(loop != nullptr, "tightrope: TIGHTROPE_CPU_ISA names an unknown instruction set");
  const int64_t items = p.rows * p.tiles_per_row;
  const int64_t per_item = heads * p.tile * p.head_dim;
  if (items * per_item <= kElementsPerThread) {
    loop(p, 0, items);
    return;
  }
  const int64_t grain = per_item >= kElementsPerThread ? 1 : kElementsPerThread / per_item;
  torch::stable::parallel_for(0, items, grain,
                              [&](int64_t begin, int64_t end) { loop(p, begin, end); });
}

using Weights = std::optional<std::vector<Tensor>>;

bool asks_for_reserved(int64_t act, const Weights& weights, int64_t gate, const Weights& gates,
                       int64_t numerics) {
  return act != 0 || gate != 0 || numerics != 0 || weights.has_value() || gates.has_value();
}

std::vector<Tensor> rotate(std::vector<Tensor> xs, Tensor words, std::optional<Tensor> turns,
                           std::optional<Tensor> positions, int64_t offset, bool ramp,
                           int64_t layout, int64_t start, bool interleaved, int64_t direction,
                           double amplitude, int64_t act, Weights weights, double, int64_t gate,
                           Weights gates, int64_t numerics) {
  std::vector<Tensor> outs;
  outs.reserve(xs.size());
  for (const Tensor& x : xs) outs.push_back(torch::stable::empty_like(x));
  rotate_into(xs, outs, words, turns, positions, offset, ramp, layout, start, interleaved,
              direction, amplitude, asks_for_reserved(act, weights, gate, gates, numerics));
  return outs;
}

void rotate_(std::vector<Tensor> xs, Tensor words, std::optional<Tensor> turns,
             std::optional<Tensor> positions, int64_t offset, bool ramp, int64_t layout,
             int64_t start, bool interleaved, int64_t direction, double amplitude, int64_t act,
             Weights weights, double, int64_t gate, Weights gates, int64_t numerics) {
  rotate_into(xs, xs, words, turns, positions, offset, ramp, layout, start, interleaved, direction,
              amplitude, asks_for_reserved(act, weights, gate, gates, numerics));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("rotate_", TORCH_BOX(&rotate_));
}
