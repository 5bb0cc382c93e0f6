// The operator's CPU kernels: tensors in, a Problem out. The only file with torch headers, and of
// those only the stable ABI, so one binary serves every Python and every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

#include "rotate.h"

namespace {

using tightrope::Dtype;
using tightrope::Operand;
using tightrope::PositionDtype;
using tightrope::Problem;
using tightrope::Strides;
using torch::headeronly::ScalarType;
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

Strides strides_of(const Tensor& x, const Layout& layout) {
  auto at = [&](int d) { return d < 0 ? int64_t(0) : x.stride(d); };
  return {at(layout.row), at(layout.head), at(layout.token), x.stride(layout.dims - 1)};
}

int64_t size_of(const Tensor& x, int d) { return d < 0 ? 1 : x.size(d); }

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat;
    case ScalarType::Double:
      return Dtype::kDouble;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kHalf;
    default:
      STD_TORCH_CHECK(false, "tightrope: dtype of x");
  }
}

PositionDtype position_dtype_of(const Tensor& positions) {
  switch (positions.scalar_type()) {
    case ScalarType::Int:
      return PositionDtype::kInt32;
    case ScalarType::Long:
      return PositionDtype::kInt64;
    case ScalarType::Float:
      return PositionDtype::kFloat;
    case ScalarType::Double:
      return PositionDtype::kDouble;
    default:
      STD_TORCH_CHECK(false, "tightrope: dtype of positions");
  }
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
  p.dtype = dtype_of(xs[0]);
  for (size_t i = 0; i < xs.size(); ++i) {
    const Tensor& x = xs[i];
    STD_TORCH_CHECK(x.dim() == layout.dims && x.is_cpu() && dtype_of(x) == p.dtype,
                    "tightrope: xs must share a dtype and fit the layout");
    const int64_t rows = size_of(x, layout.row), tokens = x.size(layout.token);
    const int64_t head_dim = x.size(layout.dims - 1);
    if (i == 0) {
      p.rows = rows, p.tokens = tokens, p.head_dim = head_dim;
    }
    STD_TORCH_CHECK(rows == p.rows && tokens == p.tokens && head_dim == p.head_dim,
                    "tightrope: xs must share rows, tokens and channels");
    p.operand[i] = Operand{x.const_data_ptr(), outs[i].mutable_data_ptr(), size_of(x, layout.head),
                           strides_of(x, layout), strides_of(outs[i], layout)};
  }

  STD_TORCH_CHECK(words.dim() == 4 && words.is_contiguous() && words.is_cpu() &&
                      words.scalar_type() == ScalarType::Long,
                  "tightrope: words must be contiguous int64 [axes, rows|1, heads|1, pairs]");
  p.words = static_cast<const int64_t*>(words.const_data_ptr());
  p.axes = words.size(0), p.word_rows = words.size(1), p.word_heads = words.size(2);
  p.pairs = words.size(3);
  p.start = start;
  STD_TORCH_CHECK(p.word_rows == 1 || p.word_rows == p.rows, "tightrope: rows of words");
  for (int32_t i = 0; i < p.operands; ++i)
    STD_TORCH_CHECK(p.word_heads == 1 || p.word_heads == p.operand[i].heads,
                    "tightrope: heads of words");
  STD_TORCH_CHECK(start >= 0 && p.pairs >= 0 && start + 2 * p.pairs <= p.head_dim,
                  "tightrope: rotated channels lie outside the head");
  if (turns.has_value()) {
    STD_TORCH_CHECK(turns->is_contiguous() && turns->is_cpu() && turns->numel() == words.numel() &&
                        turns->scalar_type() == ScalarType::Long,
                    "tightrope: turns must be shaped as words");
    p.turns = static_cast<const int64_t*>(turns->const_data_ptr());
  }

  p.offset = offset;
  p.ramp = ramp;
  p.position_dtype = PositionDtype::kNone;
  if (positions.has_value()) {
    STD_TORCH_CHECK(positions->dim() == 3 && positions->is_cpu() && positions->size(0) == p.axes,
                    "tightrope: positions must be [axes, rows|1, tokens|1]");
    const int64_t rows = positions->size(1), tokens = positions->size(2);
    STD_TORCH_CHECK(rows == 1 || rows == p.rows, "tightrope: rows of positions");
    STD_TORCH_CHECK(tokens == (ramp ? 1 : p.tokens), "tightrope: tokens of positions");
    p.positions = positions->const_data_ptr();
    p.position_dtype = position_dtype_of(*positions);
    p.position_axis = positions->stride(0);
    p.position_row = rows == 1 ? 0 : positions->stride(1);
    p.position_token = ramp ? 0 : positions->stride(2);
  }

  p.interleaved = interleaved;
  p.conjugate = direction != kForward;
  p.amplitude = direction == kInverse ? 1.0 / amplitude : amplitude;

  int64_t heads = 0;
  for (int32_t i = 0; i < p.operands; ++i) heads += p.operand[i].heads;
  if (p.rows == 0 || p.tokens == 0 || heads == 0 || p.head_dim == 0) return;
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
