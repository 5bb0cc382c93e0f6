// What only compiled code needs: cosines and sines by the arithmetic of another library, and the definitions of the
// operators for a process without tightrope's Python.
#include <array>
#include <cstdlib>
#include <exception>
#include <optional>
#include <tuple>

#include "bind_problem.h"

namespace tightrope::binding {
namespace {

template <class... Arguments>
Tensor by_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// All steps are torch's own, as in `cos_sin` of stacks/_stack.py, so that a process without Python gets the same bits.
std::tuple<Tensor, Tensor> cos_sin(Tensor at, Tensor inv_freq, std::optional<Tensor> divisor,
                                   std::optional<Tensor> multiplier, std::optional<Tensor> factor,
                                   bool polar) {
  STD_TORCH_CHECK(at.is_contiguous(), "tightrope::cos_sin: positions must be contiguous");
  for (const Tensor* read : {&at, &inv_freq}) View{*read};  // refuses freed storage
  if (divisor.has_value()) at = by_torch("aten::div", "Tensor", at, *divisor);
  if (multiplier.has_value()) at = by_torch("aten::mul", "Tensor", at, *multiplier);
  const Tensor angle = by_torch("aten::mul", "Tensor", at, inv_freq);
  const auto result = [&](const Tensor& x) {
    return factor.has_value() ? by_torch("aten::mul", "Tensor", x, *factor) : x;
  };
  if (!polar) return {result(by_torch("aten::cos", "", angle)), result(by_torch("aten::sin", "", angle))};
  Tensor one = torch::stable::empty_like(angle);
  torch::stable::fill_(one, 1.0);
  const Tensor both = by_torch("aten::view_as_real", "", by_torch("aten::polar", "", one, angle));
  const auto part = [&](int64_t i) {
    return result(torch::stable::clone(by_torch("aten::select", "int", both, int64_t(-1), i)));
  };
  return {part(0), part(1)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tightrope, m) {
  // backends/cpu.py sets it while it loads this library, because Python has defined the operators.
  if (std::getenv("TIGHTROPE_DEFINED") != nullptr) return;
  try {
    // setup.py passes the schemas of ops/schema.py.
    for (const char* schema : {TIGHTROPE_SCHEMAS}) m.def(schema);
  } catch (const std::exception&) {
    // They are defined already: by Python, which did not load this library, or by a copy of it.
  }
}

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  if (tightrope::can_run()) m.impl("cos_sin", TORCH_BOX(&cos_sin));
}

}  // namespace tightrope::binding
