// Replaces torch's parallel_for in a kernel built with ThreadSanitizer, which does not understand the
// synchronisation of torch's OpenMP library. The same division of the work, on threads of the C++ library.
// With TIGHTROPE_RACE the shares overlap by one item, which ThreadSanitizer must report.
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

extern "C" AOTITorchError torch_parallel_for(
    int64_t begin, int64_t end, int64_t grain, ParallelFunc work, void* context) {
  if (begin >= end) return AOTI_TORCH_SUCCESS;
  uint32_t most = 1;
  if (torch_get_num_threads(&most) != AOTI_TORCH_SUCCESS) return AOTI_TORCH_FAILURE;
  const int64_t items = end - begin, wanted = (items - 1) / std::max(grain, int64_t(1)) + 1;
  const int64_t count = std::min(int64_t(most), wanted), share = (items - 1) / count + 1;
  const int64_t overlap = std::getenv("TIGHTROPE_RACE") != nullptr;
  std::atomic<bool> failed{false};
  std::vector<std::thread> threads;
  for (int64_t at = begin; at < end; at += share)
    threads.emplace_back([=, &failed] {
      try {
        work(at, std::min(at + share + overlap, end), context);
      } catch (...) {
        failed = true;
      }
    });
  for (std::thread& thread : threads) thread.join();
  return failed ? AOTI_TORCH_FAILURE : AOTI_TORCH_SUCCESS;
}
