// Runs an AOTInductor package that rotates, in a process without Python; see docs/deploy.md.
//
//   run_package LIBRARY PACKAGE TOKENS FIRST RESULTS
//
// LIBRARY is tightrope's native library. The model of PACKAGE takes q, k and the position of the
// first token of each row. RESULTS receives the bytes of its results.
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <stdexcept>

namespace {

// Returns numbers for a tensor [rows, tokens, heads, channels].
at::Tensor numbers(int64_t tokens, int64_t heads) {
  const at::Tensor count = at::arange(2 * tokens * heads * 16, at::kLong);
  return count.remainder(17).sub(8).to(at::kFloat).view({2, tokens, heads, 16});
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 6) throw std::runtime_error("run_package LIBRARY PACKAGE TOKENS FIRST RESULTS");
  // The library defines the operators and registers their kernels while it is loaded.
  if (dlopen(argv[1], RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader model(argv[2]);

  const int64_t tokens = std::atoll(argv[3]), first = std::atoll(argv[4]);
  const at::Tensor firsts = at::tensor({first, first + 5}, at::kLong);
  std::ofstream file(argv[5], std::ios::binary);
  for (const at::Tensor& result : model.run({numbers(tokens, 4), numbers(tokens, 2), firsts})) {
    const at::Tensor y = result.contiguous();
    file.write(static_cast<const char*>(y.const_data_ptr()), std::streamsize(y.nbytes()));
    std::cout << y.sizes() << '\n';
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
