// Defines the operators in a process without tightrope's Python, which defines them otherwise.
#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <exception>

STABLE_TORCH_LIBRARY_FRAGMENT(tightrope, m) {
  // backends/cpu.py sets it while it loads this library.
  if (std::getenv("TIGHTROPE_DEFINED") != nullptr) return;
  try {
    // setup.py passes the schemas of ops/schema.py.
    for (const char* schema : {TIGHTROPE_SCHEMAS}) m.def(schema);
  } catch (const std::exception&) {
    // They are defined already: by Python, which did not load this library, or by a copy of it.
  }
}
