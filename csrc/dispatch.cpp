// Selects the instruction set: the best one that the processor supports, or the one that the
// environment variable TIGHTROPE_CPU_ISA names.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "rotate.h"

namespace tightrope {

// The loops of each instruction set (rotate_loops.h).
#if defined(__aarch64__)
namespace neon {
extern const Loops kLoops;
}
#else
namespace avx2 {
extern const Loops kLoops;
}
namespace avx512 {
extern const Loops kLoops;
}
namespace avx512bf16 {
void loop(const Problem&, int64_t, int64_t);
}
#endif

namespace {

struct InstructionSet {
  const char* name;
  const Loops* loops;
  bool (*supported)();
};

#if defined(__x86_64__)
// Clang before version 17 does not know its name.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_avx2();
}

// Conversions to bfloat16; GCC 10 does not know their name.
bool has_avx512bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

#if defined(TIGHTROPE_AVX512BF16)
Loops with_rotation(Loops loops, Loop rotation) {
  loops.rotate = rotation;
  return loops;
}
const Loops kConverting = with_rotation(avx512::kLoops, avx512bf16::loop);
#endif
#endif

// Best first.
const InstructionSet kSets[] = {
#if defined(__aarch64__)
    {"neon", &neon::kLoops, [] { return true; }},
#else
#if defined(TIGHTROPE_AVX512BF16)
    {"avx512bf16", &kConverting, has_avx512bf16},
#endif
    {"avx512", &avx512::kLoops, has_avx512},
    {"avx2", &avx2::kLoops, has_avx2},
#endif
};

const InstructionSet* find(const char* name) {
  for (const InstructionSet& set : kSets)
    if ((name == nullptr || strcmp(name, set.name) == 0) && set.supported()) return &set;
  return nullptr;
}

const InstructionSet* start() {
  const char* wanted = getenv("TIGHTROPE_CPU_ISA");
  return find(wanted != nullptr && *wanted != 0 ? wanted : nullptr);
}

// Null if the environment names a set that this processor or this build lacks; Python then raises an
// error before anything is rotated.
std::atomic<const InstructionSet*> current{start()};

}  // namespace

const Loops* loops() {
  const InstructionSet* set = current.load(std::memory_order_relaxed);
  return set == nullptr ? nullptr : set->loops;
}

bool can_run() { return find(nullptr) != nullptr; }

}  // namespace tightrope

// Returns the name of the set in use, or null.
TIGHTROPE_EXPORT const char* tightrope_instruction_set() {
  const auto* set = tightrope::current.load();
  return set == nullptr ? nullptr : set->name;
}

// Returns the name of the i-th set that this processor supports, best first; null past the last.
TIGHTROPE_EXPORT const char* tightrope_supported_set(int i) {
  for (const auto& set : tightrope::kSets)
    if (set.supported() && i-- == 0) return set.name;
  return nullptr;
}

// Switches to a set by name; returns false if it cannot run here.
TIGHTROPE_EXPORT bool tightrope_use(const char* name) {
  const auto* set = tightrope::find(name);
  if (set != nullptr) tightrope::current.store(set);
  return set != nullptr;
}
