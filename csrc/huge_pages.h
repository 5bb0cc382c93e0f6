// Huge pages for large new results.
//
// glibc maps blocks of 32 MB and more anew at every allocation, so that writing a result faults once for
// each 4 KB of it, which takes longer than the rotation. Where the system grants huge pages on request,
// this asks for them before the first write.
#pragma once

#include <stdint.h>

namespace tightrope {

// Asks for huge pages for the part of this memory that they can hold. It has no effect on small blocks,
// on systems that do not grant huge pages on request, or if TIGHTROPE_HUGE_PAGES is 0; a refusal has
// none either.
void ask_for_huge_pages(void* data, int64_t bytes);

}  // namespace tightrope
