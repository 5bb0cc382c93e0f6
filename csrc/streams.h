// Stores that go to memory past the caches, for large results (large_results.h).
//
// The loops of AVX-512 store registers that way. The others cannot tell the compiler to, so they rotate a
// head into memory of their own and copy whole lines from there.
#pragma once

#include <string.h>

#include "rotate.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// The results of one head on their way.
struct alignas(kLine) Streamed {
  char bytes[kStreamed];
};

// Copies whole lines between aligned memory.
inline void stream_lines(void* to, const void* from, int64_t lines) {
#if defined(__AVX__)
  for (int64_t i = 0; i < lines * kLine / 32; ++i)
    _mm256_stream_si256((__m256i*)to + i, _mm256_load_si256((const __m256i*)from + i));
#elif defined(__SSE2__)
  for (int64_t i = 0; i < lines * kLine / 16; ++i)
    _mm_stream_si128((__m128i*)to + i, _mm_load_si128((const __m128i*)from + i));
#else
  memcpy(to, from, size_t(lines * kLine));
#endif
}

// Lets other threads see streamed results before anything that this thread stores later.
inline void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
