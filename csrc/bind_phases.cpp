// The CPU operators for phases from data: phase words and their running sums, and the sums of gradients.
#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "bind_problem.h"

namespace tightrope::binding {
namespace {

using torch::headeronly::ScalarType;

// New memory with the strides of torch.empty_like if x has these rows, otherwise contiguous.
Tensor empty_as(const Tensor& x, int64_t rows, ScalarType type) {
  if (x.size(0) != rows) {
    const int64_t sizes[] = {rows, x.size(1), x.size(2), x.size(3)};
    return torch::stable::new_empty(x, {sizes, 4}, type);
  }
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(x), from(std::optional(type)), from(std::nullopt),
                                    from(std::nullopt), from(std::nullopt), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Strides without those of dimensions of size 1: a shared row has stride 0, adjacent pairs have stride 1.
Strides strides_of(const View& x, int head, int token, int pair) {
  return {x.size[0] == 1 ? 0 : x.stride_at(0), x.stride_at(head), x.stride_at(token),
          x.size[pair] == 1 ? 1 : x.stride_at(pair)};
}

// Sizes, strides and checks of the tensors that both operators read.
PhaseSums sums_of(const Tensor& in, const std::optional<Tensor>& start, int32_t start_code,
                  const std::optional<Tensor>& reset) {
  PhaseSums p{};
  const View x(in);
  STD_TORCH_CHECK(x.dims == 4, "tightrope: increments must be [rows|1, heads, tokens, pairs]");
  p.in = in.const_data_ptr();
  p.dtype = dtype_of(code_of(in));
  p.rows = x.size[0], p.heads = x.size[1], p.tokens = x.size[2], p.pairs = x.size[3];
  p.in_stride = strides_of(x, 1, 2, 3);
  p.run = std::max(p.tokens, int64_t(1));
  const auto take_rows = [&](int64_t rows) {
    STD_TORCH_CHECK(rows == 1 || p.rows == 1 || rows == p.rows,
                    "tightrope: state and reset must have 1 row or those of the increments");
    if (rows != 1) p.rows = rows;
  };
  if (start.has_value()) {
    const View s(*start);
    STD_TORCH_CHECK(s.dims == 3 && start->is_cpu() && code_of(*start) == start_code &&
                        s.size[1] == p.heads && s.size[2] == p.pairs,
                    "tightrope: a state must be [rows|1, heads, pairs]");
    take_rows(s.size[0]);
    p.start = start->const_data_ptr();
    p.start_stride = strides_of(s, 1, -1, 2);
  }
  if (reset.has_value()) {
    const View r(*reset);
    STD_TORCH_CHECK(r.dims == 2 && reset->is_cpu() && code_of(*reset) == aoti_torch_dtype_bool() &&
                        r.size[1] == p.tokens,
                    "tightrope: reset must be bool [rows|1, tokens]");
    take_rows(r.size[0]);
    p.reset = static_cast<const uint8_t*>(reset->const_data_ptr());
    p.reset_row = r.size[0] == 1 ? 0 : r.stride_at(0);
    p.reset_token = r.stride_at(1);
  }
  return p;
}

void run(PhaseSums& p, PhaseLoop loop, Tensor& out, Tensor* last) {
  if (p.rows == 0 || p.heads == 0 || p.pairs == 0 || (p.tokens == 0 && last == nullptr)) return;
  p.out = out.mutable_data_ptr();
  p.out_stride = strides_of(View(out), 1, 2, 3);
  if (last != nullptr) p.last = last->mutable_data_ptr();
  const int64_t blocks = (p.pairs + kPhases - 1) / kPhases;
  const int64_t items = p.rows * p.heads * blocks * std::max((p.tokens + p.run - 1) / p.run, int64_t(1));
  share(double(p.run) * double(std::min(p.pairs, kPhases)), items,
        [&](int64_t begin, int64_t end) { loop(p, begin, end); });
}

std::tuple<Tensor, Tensor> phase_words(Tensor increments, std::optional<Tensor> state,
                                       std::optional<Tensor> reset, bool running, bool wide) {
  STD_TORCH_CHECK(running || (!state.has_value() && !reset.has_value()),
                  "tightrope: only running sums have a state and resets");
  PhaseSums p = sums_of(increments, state, aoti_torch_dtype_int64(), reset);
  p.running = running;
  p.wide = wide;
  if (!running) p.run = 256;  // without sums, the tokens of a head may be divided
  Tensor out = empty_as(increments, p.rows, wide ? ScalarType::Long : ScalarType::Int);
  const int64_t sizes[] = {running ? p.rows : 0, p.heads, p.pairs};
  Tensor last = torch::stable::new_empty(increments, {sizes, 3}, ScalarType::Long);
  run(p, loops().phase_words, out, running ? &last : nullptr);
  return {std::move(out), std::move(last)};
}

std::tuple<Tensor, Tensor> phase_sums(Tensor grad, std::optional<Tensor> grad_last,
                                      std::optional<Tensor> reset) {
  PhaseSums p = sums_of(grad, grad_last, code_of(grad), reset);
  STD_TORCH_CHECK(p.dtype == Dtype::kFloat || p.dtype == Dtype::kDouble,
                  "tightrope: gradients of phases must be float32 or float64");
  const ScalarType type = p.dtype == Dtype::kDouble ? ScalarType::Double : ScalarType::Float;
  Tensor by_increments = empty_as(grad, p.rows, type);
  const int64_t sizes[] = {p.rows, p.heads, p.pairs};
  Tensor by_state = torch::stable::new_empty(grad, {sizes, 3}, type);
  run(p, loops().phase_sums, by_increments, &by_state);
  return {std::move(by_increments), std::move(by_state)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  if (!can_run()) return;
  m.impl("phase_words", TORCH_BOX(&phase_words));
  m.impl("phase_sums", TORCH_BOX(&phase_sums));
}

}  // namespace tightrope::binding
