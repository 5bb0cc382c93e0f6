#include "large_results.h"

#include <stdlib.h>
#include <string.h>

#include <stdio.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace tightrope {

namespace {

// Reads the first line of a file; returns false if there is none.
template <int size>
bool read_line(const char* name, char (&line)[size]) {
  FILE* file = fopen(name, "r");
  if (file == nullptr) return false;
  const bool read = fgets(line, size, file) != nullptr;
  fclose(file);
  return read;
}

#if defined(__linux__)
// Whether the system has given any page to [begin, end), which begins with a page; true if it does not tell.
bool has_any_page(uintptr_t begin, uintptr_t end) {
  static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  constexpr uintptr_t kAtOnce = 2048;
  unsigned char resident[kAtOnce];
  for (; begin < end; begin += kAtOnce * page) {
    const uintptr_t left = (end - begin + page - 1) / page, count = left < kAtOnce ? left : kAtOnce;
    if (mincore(reinterpret_cast<void*>(begin), count * page, resident) != 0) return true;
    for (uintptr_t i = 0; i < count; ++i)
      if (resident[i] & 1) return true;
  }
  return false;
}
#endif

}  // namespace

#if defined(__linux__) && defined(MADV_HUGEPAGE)

namespace {

constexpr uintptr_t kPage = uintptr_t(2) << 20;
// glibc's allocator recycles smaller blocks, whose pages are already there.
constexpr int64_t kLeast = int64_t(32) << 20;

// Whether the system grants huge pages where a program asks for them, and only there.
bool on_request() {
  const char* chosen = getenv("TIGHTROPE_HUGE_PAGES");
  if (chosen != nullptr && strcmp(chosen, "0") == 0) return false;
  char line[64] = {};
  return read_line("/sys/kernel/mm/transparent_hugepage/enabled", line) &&
         strstr(line, "[madvise]") != nullptr;
}

}  // namespace

void ask_for_huge_pages(void* data, int64_t bytes) {
  if (bytes < kLeast) return;
  static const bool asks = on_request();
  if (!asks) return;
  const uintptr_t from = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (from + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (from + uintptr_t(bytes)) & ~(kPage - 1);
  // Memory that has pages already belongs to the heap of an allocator, where the advice would outlive the
  // tensor.
  if (end <= begin || has_any_page(begin, end)) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

#else

void ask_for_huge_pages(void*, int64_t) {}

#endif

namespace {

// From how many bytes on results are streamed; 0 if never.
int64_t stream_from() {
#if defined(__SSE2__)
  const char* chosen = getenv("TIGHTROPE_STREAM_BYTES");
  if (chosen != nullptr && *chosen != 0) return strtoll(chosen, nullptr, 10);
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    char name[64], line[32] = {};
    snprintf(name, sizeof(name), "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    if (!read_line(name, line)) break;
    char* unit = nullptr;
    int64_t bytes = strtoll(line, &unit, 10);
    bytes <<= *unit == 'M' ? 20 : *unit == 'K' ? 10 : 0;
    if (bytes > largest) largest = bytes;
  }
  return largest / 2;
#else
  return 0;  // registers.h has no instruction there that stores past the caches
#endif
}

}  // namespace

bool exceed_caches(int64_t bytes) {
  static const int64_t from = stream_from();
  return from > 0 && bytes >= from;
}

bool has_pages(const void* data, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t middle = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes) / 2) / page * page;
  return has_any_page(middle, middle + 1);
#else
  (void)data, (void)bytes;
  return true;
#endif
}

}  // namespace tightrope
