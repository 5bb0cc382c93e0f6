// The CPU operators for gradients of angles and of gates.
#include <algorithm>
#include <tuple>
#include <vector>

#include "bind_problem.h"
#include "bind_sums.h"

namespace tightrope::binding {
namespace {

std::tuple<Tensor, Tensor> angle_gradients(Tensor y, std::optional<Tensor> z, Tensor grad_y,
                                           std::optional<Tensor> grad_z, Tensor words,
                                           std::optional<Tensor> turns,
                                           std::optional<Tensor> positions, int64_t offset,
                                           int64_t options, bool by_positions, bool by_frequencies) {
  const Operands ys(y, z), grads(grad_y, grad_z);
  STD_TORCH_CHECK(ys.count == grads.count, "tightrope: one gradient for each result");
  for (int32_t i = 0; i < grads.count; ++i)
    STD_TORCH_CHECK(grads.tensor[i]->is_cpu() && code_of(*grads.tensor[i]) == code_of(y),
                    "tightrope: gradients must have the dtype and device of results");
  const Arguments a{words, turns, positions, offset, Options(options), 1.0, nullptr, 0.0};
  const bool phases = a.options.source == kGivenPhases;
  STD_TORCH_CHECK(a.options.source == kWords || phases, "tightrope: angle_gradients takes phase words or phases, not tables");
  STD_TORCH_CHECK(!phases || !by_positions, "tightrope: phases have no gradient by positions");
  STD_TORCH_CHECK(a.options.is_plain(), "tightrope: angle_gradients takes no act and no gate");
  Problem p = problem_of(ys, grads, a);
  const bool empty = is_empty(p) || p.pairs == 0;
  if (phases) {
    Tensor of_phases = zeros(words, {by_frequencies ? p.phase_rows : 0, p.phase_heads, p.tokens, p.pairs}, value_type(p));
    if (!empty && by_frequencies) {
      const AngleSums sums{nullptr, nullptr, of_phases.mutable_data_ptr(), p.tokens, 1, p.tokens};
      const AngleLoop loop = loops().add_angles;
      share(p, p.phase_rows * p.tokens, p.rows / p.phase_rows,
            [&](int64_t begin, int64_t end) { loop(p, sums, begin, end); });
    }
    return {zeros(words, {0, p.rows, p.tokens}), of_phases};
  }
  const int64_t sequences = p.word_rows;
  const int64_t sequence = empty ? 0 : sequences == 1 ? p.rows * p.tokens : p.tokens;
  const int64_t run = run_of_tokens(sequence);
  const int64_t runs = runs_of(sequence, run);

  std::vector<int64_t> places = {by_positions ? p.axes : 0, p.rows, p.tokens};
  if (positions.has_value() && positions->dim() == 4) places.push_back(p.position_heads);
  Tensor of_positions = zeros(words, places);
  Tensor of_runs = zeros(words, {by_frequencies ? sequences * runs : 0, p.axes, p.word_heads, p.pairs});
  Tensor of_frequencies =
      zeros(words, {by_frequencies ? p.axes : 0, p.word_rows, p.word_heads, p.pairs});
  if (empty) return {of_positions, of_frequencies};
  const AngleSums sums{
      by_positions ? static_cast<double*>(of_positions.mutable_data_ptr()) : nullptr,
      by_frequencies ? static_cast<double*>(of_runs.mutable_data_ptr()) : nullptr,
      nullptr, sequence, run, runs};
  const AngleLoop loop = loops().add_angles;
  share(p, sequences * runs, run < sequence ? run : sequence,
        [&](int64_t begin, int64_t end) { loop(p, sums, begin, end); });
  if (!by_frequencies) return {of_positions, of_frequencies};

  auto* total = static_cast<double*>(of_frequencies.mutable_data_ptr());
  const int64_t size = p.word_heads * p.pairs;
  for (int64_t i = 0; i < sequences * runs; ++i) {
    for (int64_t axis = 0; axis < p.axes; ++axis) {
      const double* part = sums.by_frequency + (i * p.axes + axis) * size;
      double* to = total + (axis * p.word_rows + i / runs) * size;
      for (int64_t k = 0; k < size; ++k) to[k] += part[k];
    }
  }
  return {of_positions, of_frequencies};
}

std::vector<Tensor> gate_gradients(Tensor y, std::optional<Tensor> z, Tensor grad_y,
                                   std::optional<Tensor> grad_z, Tensor gate_q,
                                   std::optional<Tensor> gate_k, std::optional<Tensor> positions,
                                   int64_t offset, int64_t options) {
  const Operands ys(y, z), grads(grad_y, grad_z), gates(gate_q, gate_k);
  STD_TORCH_CHECK(ys.count == grads.count && ys.count == gates.count,
                  "tightrope: one gradient and one gate for each result");
  for (int32_t i = 0; i < grads.count; ++i)
    STD_TORCH_CHECK(grads.tensor[i]->is_cpu() && code_of(*grads.tensor[i]) == code_of(y) &&
                        gates.tensor[i]->is_cpu(),
                    "tightrope: gradients must have the dtype and device of results, gates the device");
  const Options what(options);
  const bool slopes = what.gate == int64_t(Gate::kSlope);
  STD_TORCH_CHECK(slopes || what.gate == int64_t(Gate::kLog),
                  "tightrope: gate_gradients takes gates of logarithms or slopes");
  Problem all = operands_of(ys, grads, what);
  all.axes = 1;
  // Only slopes need positions; with other gates, positions may have several axes.
  if (slopes) read_positions(positions, offset, what.add_index, all);
  STD_TORCH_CHECK(!all.angles_per_head, "tightrope: positions of slopes must have no heads");

  std::vector<Tensor> found;
  for (int32_t i = 0; i < ys.count; ++i) {
    // One result at a time: the gates may be shared over different dimensions.
    Problem p = all;
    p.operands = 1, p.operand[0] = all.operand[i];
    const View g(*gates.tensor[i]);
    STD_TORCH_CHECK(g.dims == (slopes ? 2 : 4), "tightrope: gates must have 4 dimensions, slopes 2");
    const int64_t rows = slopes ? 1 : g.size[0], tokens = slopes ? 1 : g.size[2];
    const int64_t heads = g.size[slopes ? 0 : 1], channels = g.size[slopes ? 1 : 3];
    const int64_t own = p.operand[0].heads;
    STD_TORCH_CHECK((rows == 1 || rows == p.rows) && (tokens == 1 || tokens == p.tokens) &&
                        (heads == 1 || heads == own) && (channels == 1 || channels == p.head_dim),
                    "tightrope: each dimension of a gate must be 1 or that of its result");
    Tensor total = zeros(y, std::vector<int64_t>(g.size, g.size + g.dims), value_type(p));
    found.push_back(total);
    if (is_empty(p)) continue;
    STD_TORCH_CHECK(p.head_dim <= kFar, "tightrope: a head must fit into memory");

    GateSums sums{};
    sums.times_position = slopes;
    sums.by_token = tokens != 1;
    sums.rows_share = rows == 1, sums.heads_share = heads == 1, sums.channels_share = channels == 1;
    sums.sequence = rows == 1 ? p.rows * p.tokens : p.tokens;
    sums.run = sums.by_token ? 1 : run_of_tokens(sums.sequence);
    sums.runs = sums.by_token ? 1 : runs_of(sums.sequence, sums.run);
    const int64_t sequences = sums.by_token ? rows * tokens : rows;
    const int64_t items = sequences * sums.runs, entries = heads * channels;
    Tensor parts = zeros(y, {items, entries});
    sums.to = static_cast<double*>(parts.mutable_data_ptr());
    const GateLoop loop = loops().add_gates;
    const int64_t bytes = 3 * padded(p.head_dim) * value_bytes(p);
    share(p, items, std::max(p.rows * p.tokens / items, int64_t(1)), [&](int64_t begin, int64_t end) {
      Memory memory(bytes);
      loop(p, sums, memory.at(), begin, end);
    });
    if (sums.by_token) {
      // Transpose from items [rows|1, tokens] to the gate's [rows|1, heads|1, tokens, channels|1].
      const auto* from = static_cast<const double*>(parts.const_data_ptr());
      void* to = total.mutable_data_ptr();
      for (int64_t item = 0; item < items; ++item)
        for (int64_t head = 0; head < heads; ++head)
          for (int64_t k = 0; k < channels; ++k) {
            const int64_t at = ((item / tokens * heads + head) * tokens + item % tokens) * channels + k;
            const double value = from[item * entries + head * channels + k];
            if (p.dtype == Dtype::kDouble) {
              static_cast<double*>(to)[at] = value;
            } else {
              static_cast<float*>(to)[at] = float(value);
            }
          }
    } else {
      for (int64_t row = 0; row < rows; ++row)
        add_up(static_cast<const double*>(parts.const_data_ptr()) + row * sums.runs * entries, sums.runs,
               entries, total, row * entries, p.dtype == Dtype::kDouble);
    }
  }
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  if (!can_run()) return;
  m.impl("angle_gradients", TORCH_BOX(&angle_gradients));
  m.impl("gate_gradients", TORCH_BOX(&gate_gradients));
}

}  // namespace tightrope::binding
