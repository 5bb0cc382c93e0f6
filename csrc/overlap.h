// Checks whether the outputs of a call overlap each other, themselves or the inputs.
#pragma once

#include <algorithm>
#include <array>

#include "rotate.h"

namespace tightrope::binding {
namespace {

// The same two checks are in ops/memory.py, where Python raises the errors that users see.
struct Extent {
  int64_t size, stride;
};
using Extents = std::array<Extent, 4>;

inline Extents extents_of(const Problem& p, const Operand& o, const Strides& s) {
  return {{{p.rows, s.row}, {o.heads, s.head}, {p.tokens, s.token}, {p.head_dim, s.channel}}};
}

// True unless the stride of every dimension is at least the extent of all faster dimensions.
inline bool may_overlap_itself(Extents extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t covered = 1;
  for (const Extent& e : extents) {
    if (e.size <= 1) continue;
    if (e.stride < covered) return true;
    covered += (e.size - 1) * e.stride;
  }
  return false;
}

// Elements from the first to the last, both included, along the dimensions whose stride is no multiple of
// `period`; along all dimensions if it is 0.
inline int64_t run_of(const Extents& extents, int64_t period) {
  int64_t run = 1;
  for (const Extent& e : extents)
    if (period == 0 || e.stride % period != 0) run += (e.size - 1) * e.stride;
  return run;
}

// False only if two tensors provably share no element.
inline bool may_overlap(const void* a, const Extents& ae, const void* b, const Extents& be,
                        int64_t element) {
  const int64_t bytes = static_cast<const char*>(b) - static_cast<const char*>(a);
  if (bytes >= run_of(ae, 0) * element || -bytes >= run_of(be, 0) * element) return false;
  if (bytes % element != 0) return true;
  const int64_t gap = bytes / element;
  for (const Extents& extents : {ae, be})
    for (const Extent& e : extents) {
      if (e.stride <= 1) continue;
      const int64_t at = (gap % e.stride + e.stride) % e.stride;
      if (run_of(ae, e.stride) <= at && at + run_of(be, e.stride) <= e.stride) return false;
    }
  return true;
}

// The outputs: new tensors, the inputs, or other tensors given by the caller.
enum class Outs { kNew, kInPlace, kGiven };

inline int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2;
}

inline bool equal(const Strides& a, const Strides& b) {
  return a.row == b.row && a.head == b.head && a.token == b.token && a.channel == b.channel;
}

// Whether an output may overlap itself, another output, or an input that is not exactly this output.
inline bool memory_overlaps(const Problem& p, Outs outs) {
  const int64_t element = bytes_of(p.dtype);
  for (int32_t i = 0; i < p.operands; ++i) {
    const Operand& a = p.operand[i];
    if (a.heads == 0) continue;
    const Extents out = extents_of(p, a, a.out_stride);
    if (may_overlap_itself(out)) return true;
    for (int32_t j = 0; j < p.operands; ++j) {
      const Operand& b = p.operand[j];
      if (b.heads == 0) continue;
      if (j < i && may_overlap(a.out, out, b.out, extents_of(p, b, b.out_stride), element))
        return true;
      if (i == j && a.out == a.in && equal(a.out_stride, a.in_stride)) continue;
      if (outs == Outs::kGiven && may_overlap(a.out, out, b.in, extents_of(p, b, b.in_stride), element))
        return true;
    }
  }
  return false;
}

}  // namespace
}  // namespace tightrope::binding
