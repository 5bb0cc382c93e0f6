#include "huge_pages.h"

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <stdio.h>
#include <sys/mman.h>
#endif

namespace tightrope {

#if defined(__linux__) && defined(MADV_HUGEPAGE)

namespace {

constexpr uintptr_t kPage = uintptr_t(2) << 20;
// glibc's allocator recycles smaller blocks, whose pages are already there.
constexpr int64_t kLeast = int64_t(32) << 20;

// Whether the system grants huge pages where a program asks for them, and only there.
bool on_request() {
  const char* chosen = getenv("TIGHTROPE_HUGE_PAGES");
  if (chosen != nullptr && strcmp(chosen, "0") == 0) return false;
  FILE* file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
  if (file == nullptr) return false;
  char line[64] = {};
  const bool read = fgets(line, sizeof(line), file) != nullptr;
  fclose(file);
  return read && strstr(line, "[madvise]") != nullptr;
}

}  // namespace

void ask_for_huge_pages(void* data, int64_t bytes) {
  if (bytes < kLeast) return;
  static const bool asks = on_request();
  if (!asks) return;
  const uintptr_t from = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (from + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (from + uintptr_t(bytes)) & ~(kPage - 1);
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

#else

void ask_for_huge_pages(void*, int64_t) {}

#endif

}  // namespace tightrope
