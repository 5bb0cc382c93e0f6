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

// Memory that a call reads or writes: a tensor of the type of q.
struct Region {
  const void* data;
  Extents extents;
  bool is_cache = false;  // whether tokens go to other places than their own

  bool is_empty() const {
    for (const Extent& e : extents)
      if (e.size == 0) return true;
    return false;
  }
};

inline Region read_by(const Problem& p, const Operand& o) {
  const Strides& s = o.in_stride;
  return {o.in, {{{p.rows, s.row}, {o.heads, s.head}, {p.tokens, s.token}, {p.head_dim, s.channel}}}};
}

// `blocks` and `entries` are those of a cache, or the rows and tokens of the problem.
inline Region written_by(const Problem& p, const Operand& o) {
  const Strides& s = o.out_stride;
  return {o.out, {{{o.blocks, s.row}, {o.heads, s.head}, {o.entries, s.token}, {p.head_dim, s.channel}}}, o.places != nullptr};
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
inline bool may_overlap(const Region& a, const Region& b, int64_t element) {
  const int64_t bytes = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
  const Extents &ae = a.extents, &be = b.extents;
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

inline bool is_its_own(const Region& in, const Region& out) {
  for (size_t d = 0; d < in.extents.size(); ++d)
    if (in.extents[d].stride != out.extents[d].stride) return false;
  return in.data == out.data && !out.is_cache;
}

// Whether an output may overlap itself, another output, or an input that is not exactly this output.
// `values`: those that the call copies, or null; their problem has one operand.
inline bool memory_overlaps(const Problem& p, Outs outs, const Problem* values = nullptr) {
  const int64_t element = bytes_of(p.dtype);
  Region in[kMaxOperands + 1], out[kMaxOperands + 1];
  int32_t count = 0;
  const auto add = [&](const Problem& of, const Operand& o) {
    if (o.heads != 0) in[count] = read_by(of, o), out[count++] = written_by(of, o);
  };
  for (int32_t i = 0; i < p.operands; ++i) add(p, p.operand[i]);
  if (values != nullptr) add(*values, values->operand[0]);
  for (int32_t i = 0; i < count; ++i) {
    if (out[i].is_empty()) continue;
    if (may_overlap_itself(out[i].extents)) return true;
    for (int32_t j = 0; j < count; ++j) {
      if (j < i && !out[j].is_empty() && may_overlap(out[i], out[j], element)) return true;
      if (in[j].is_empty() || (i == j && is_its_own(in[i], out[i]))) continue;
      if (outs == Outs::kGiven && may_overlap(out[i], in[j], element)) return true;
    }
  }
  return false;
}

}  // namespace
}  // namespace tightrope::binding
