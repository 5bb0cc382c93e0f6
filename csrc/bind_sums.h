// Sums over tokens: memory for partial sums, and their addition in an order that does not depend on the
// number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "bind_problem.h"

namespace tightrope::binding {
namespace {

inline int64_t value_bytes(const Problem& p) { return p.dtype == Dtype::kDouble ? 8 : 4; }

// Scratch memory of one thread, 64-byte aligned.
class Memory {
 public:
  explicit Memory(int64_t bytes) : owned_(new (std::nothrow) char[bytes + 64]) {
    STD_TORCH_CHECK(owned_ != nullptr, "tightrope: a head must fit into memory");
  }
  void* at() {
    const auto address = reinterpret_cast<uintptr_t>(owned_.get());
    return owned_.get() + (64 - address % 64) % 64;
  }

 private:
  std::unique_ptr<char[]> owned_;
};

inline Tensor zeros(const Tensor& like, std::vector<int64_t> sizes,
                    torch::headeronly::ScalarType type = torch::headeronly::ScalarType::Double) {
  return torch::stable::new_zeros(like, {sizes.data(), sizes.size()}, type);
}

// The tokens that share an entry of a sum are divided into at most kRuns runs of at least kTokensPerRun tokens;
// the last run may be shorter.
constexpr int64_t kRuns = 128, kTokensPerRun = 32;

inline int64_t run_of_tokens(int64_t sequence) {
  return std::max((sequence - 1) / kRuns + 1, kTokensPerRun);
}
inline int64_t runs_of(int64_t sequence, int64_t run) {
  return sequence / run + (sequence % run != 0);
}

// Adds up `count` partial sums of n entries each, in order.
template <class T>
void add_up(const double* parts, int64_t count, int64_t n, T* to) {
  std::vector<double> sums(n, 0.0);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < n; ++k) sums[k] += parts[i * n + k];
  for (int64_t k = 0; k < n; ++k) to[k] = T(sums[k]);
}
inline void add_up(const double* parts, int64_t count, int64_t n, const Tensor& to, int64_t at,
                   bool is_double) {
  if (is_double) return add_up(parts, count, n, static_cast<double*>(to.mutable_data_ptr()) + at);
  add_up(parts, count, n, static_cast<float*>(to.mutable_data_ptr()) + at);
}

inline torch::headeronly::ScalarType value_type(const Problem& p) {
  return p.dtype == Dtype::kDouble ? torch::headeronly::ScalarType::Double
                                   : torch::headeronly::ScalarType::Float;
}

}  // namespace
}  // namespace tightrope::binding
