// What large results need: huge pages, and stores past the caches.
//
// glibc maps blocks of 32 MB and more anew at every allocation, so that writing a result faults once for
// each 4 KB of it, which takes longer than the rotation. Where the system grants huge pages on request,
// this asks for them before the first write.
//
// An ordinary store first reads the line that it overwrites. Streaming stores do not, but
// they also leave nothing in the caches for the next reader. So they serve results that the caches could
// not keep, in memory that has its pages: the system has just cleared new ones, through the caches.
#pragma once

#include <stdint.h>

namespace tightrope {

// Asks for huge pages for the part of this memory that they can hold. It has no effect on small blocks, on
// memory that has pages already, on systems that do not grant huge pages on request, or if
// TIGHTROPE_HUGE_PAGES is 0; a refusal has none either.
void ask_for_huge_pages(void* data, int64_t bytes);

// Whether results of this size are too large for the caches: half of the largest one, because the inputs
// pass through it too, or TIGHTROPE_STREAM_BYTES. False if the variable is 0, or if the system does not
// tell its caches.
bool exceed_caches(int64_t bytes);

// Whether memory has its pages already, judged by one page in its middle; true if the system does not tell.
bool has_pages(const void* data, int64_t bytes);

}  // namespace tightrope
