// The CPU rotation operators: out of place, in place, and into the caller's tensors.
#include <string.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "bind_stages.h"
#include "bind_problem.h"
#include "large_results.h"
#include "overlap.h"

namespace tightrope::binding {
namespace {

using Tensors = std::vector<Tensor>;

// Bytes that are likely still in the first-level cache if the caller has just made or read them.
constexpr int64_t kFetched = 1 << 16;

// Decides which results to stream past the caches: those whose rotated halves are whole, aligned lines. Only registers
// are streamed, and double has none.
void choose_streams(Problem& p) {
  const int64_t element = bytes_of(p.dtype), head = p.head_dim * element;
  const int64_t tokens = p.rows * p.tokens;
  if (!exceed_caches(tokens * int64_t(count_heads(p)) * head)) return;
  if (p.dtype == Dtype::kDouble || row_width(p, p.pairs) > kAngles) return;
  for (int32_t i = 0; i < p.operands; ++i) {
    Operand& o = p.operand[i];
    const Strides& s = o.out_stride;
    const int64_t places = o.places == nullptr ? tokens : std::min(tokens, o.blocks * o.entries);
    const int64_t steps = s.row | s.head | s.token | p.start | (p.interleaved ? 2 * p.pairs : p.pairs);
    o.streams = s.channel == 1 && steps * element % kLine == 0 &&
                reinterpret_cast<uintptr_t>(o.out) % kLine == 0 && has_pages(o.out, places * o.heads * head);
  }
}

// Makes tokens of rows that have one token each and angles of their own, so that a tile holds many of them.
void make_tokens(Problem& p) {
  if (p.tokens != 1 || p.phases != nullptr) return;
  if (p.word_rows != 1 && p.cosine.data != nullptr) {
    if (p.table_length != 1 || p.position_dtype != PositionDtype::kNone || p.offset != 0) return;
    p.cosine.stride.token = p.cosine.stride.row, p.sine.stride.token = p.sine.stride.row;
    p.table_length = p.rows, p.word_rows = 1, p.add_index = true;
  } else {
    p.words_by_token = p.word_rows != 1;
    if (!p.words_by_token && p.position_row == 0) return;
    p.position_token = p.position_row, p.position_row = 0, p.add_index = false;
  }
  for (int32_t i = 0; i < p.operands; ++i)
    for (Strides* s : {&p.operand[i].in_stride, &p.operand[i].out_stride}) s->token = s->row, s->row = 0;
  p.tokens = p.rows, p.rows = 1;
}

// Lets the rows of a problem share their angles, if they can: as heads, where their strides allow it.
void join_rows(Problem& p) {
  p.together = p.angles_per_head || p.word_rows != 1 || p.phase_rows > 1 || p.position_row != 0 ? 1 : p.rows;
  if (p.together == 1) return;
  for (int32_t i = 0; i < p.operands; ++i) {
    const Operand& o = p.operand[i];
    if (o.places != nullptr) return;
    for (const Strides& s : {o.in_stride, o.out_stride})
      if (o.heads != 1 && s.row != o.heads * s.head) return;
  }
  for (int32_t i = 0; i < p.operands; ++i) {
    Operand& o = p.operand[i];
    if (o.heads == 1) o.in_stride.head = o.in_stride.row, o.out_stride.head = o.out_stride.row;
    o.heads *= p.rows;
  }
  p.rows = p.together = 1;
}

// Divides a rotation into work items, by tokens and, where that leaves large items, by heads; returns their number.
int64_t divide_rotation(Problem& p) {
  make_tokens(p);
  join_rows(p);
  const double elements = count_heads(p) * double(p.rows) * double(p.tokens) * double(p.head_dim);
  p.fetches = elements * double(bytes_of(p.dtype)) > double(kFetched);
  // More of those that are next to each other in memory, whole cache lines of 16 bits, and of small heads.
  const int64_t small = std::clamp(512 / std::max(p.pairs, int64_t(1)), int64_t(16), kTile);
  const int64_t most = p.operand[0].in_stride.token == 1 ? kTile : small;
  const int64_t tiles = divide(p, tile_of(p, most)) / p.together;
  int64_t heads = 1;
  for (int32_t i = 0; i < p.operands; ++i) heads = std::max(heads, p.together * p.operand[i].heads);
  const double parts = elements / double(kElementsPerThread) / double(tiles);
  p.parts = parts < 2 ? 1 : parts < double(heads) ? int64_t(parts) : heads;
  return tiles * p.parts;
}

// Runs a problem whose memory does not overlap.
Tensors run(Problem& p, const Operands& xs, Outs whose, const Arguments& a) {
  const bool plain = a.options.is_plain();
  STD_TORCH_CHECK(plain || (p.rounding == Rounding::kOnce && !has_full_tables(p)),
                  "tightrope: an act or a gate needs rounding once, and tables that are not full");
  if (!plain) return run_stages(p, xs, a);
  leave_empty_caches(p);
  if (is_empty(p)) return {};
  const int64_t items = divide_rotation(p);
  if (whose != Outs::kInPlace) choose_streams(p);
  const Loop loop = loops().rotate;
  const double per_item = count_heads(p) * double(p.together * p.tile * p.head_dim) / double(p.parts);
  share(per_item, items, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
  return {};
}

using Places = std::vector<int64_t>;

// Returns the slots of all tokens, [rows, tokens]; refuses those that are neither -1 nor an entry of the cache.
Places read_slots(const Tensor& slots, const Options& options, const Problem& p, const Operand& cache) {
  STD_TORCH_CHECK(options.direction != kTranspose, "tightrope: slots have no gradient");
  const View s(slots);
  const int32_t code = code_of(slots);
  const bool is_int32 = code == aoti_torch_dtype_int32();
  const int token = int(s.dims) - 1, row = token - 1;  // a missing one is negative
  STD_TORCH_CHECK(1 <= s.dims && s.dims <= 2 && slots.is_cpu() && (is_int32 || code == aoti_torch_dtype_int64()) &&
                      s.size_at(row) == p.rows && s.size[token] == p.tokens,
                  "tightrope: slots must be int32 or int64 [rows, tokens], or [tokens] for one row");
  const void* data = slots.const_data_ptr();
  const int64_t count = cache.blocks * cache.entries;
  // Expanded slots may be more than any memory holds.
  Places found;
  try {
    found.resize(double(p.rows) * double(p.tokens) < double(kFar) ? size_t(p.rows * p.tokens) : found.max_size() + 1);
  } catch (const std::exception&) {
    STD_TORCH_CHECK(false, "tightrope: slots must fit into memory");
  }
  if (found.empty()) return found;  // there may be more rows without tokens than a loop can visit
  auto next = found.begin();
  for (int64_t i = 0; i < p.rows; ++i)
    for (int64_t j = 0; j < p.tokens; ++j) {
      const int64_t at = i * s.stride_at(row) + j * s.stride[token];
      const int64_t slot = is_int32 ? static_cast<const int32_t*>(data)[at] : static_cast<const int64_t*>(data)[at];
      STD_TORCH_CHECK(-1 <= slot && slot < count, "tightrope: slots must be -1 or entries of the cache");
      *next++ = slot;
    }
  return found;
}

// Whether no two tokens have one slot.
bool are_distinct(Places slots) {
  std::sort(slots.begin(), slots.end());
  const auto first = std::lower_bound(slots.begin(), slots.end(), 0);
  return std::adjacent_find(first, slots.end()) == slots.end();
}

// Sends the tokens of an operand to entries of its cache.
void place(Operand& o, Places& slots) {
  for (int64_t& slot : slots) {
    if (slot < 0) continue;
    const int64_t block = o.blocks == 1 ? 0 : slot / o.entries;
    slot = block * o.out_stride.row + (slot - block * o.entries) * o.out_stride.token;
  }
  o.places = slots.data();
}

// The values that a call copies to a cache.
Problem values_of(const Slots& slots, const Problem& p, const Options& options) {
  const Problem v = operands_of({*slots.values, {}}, {*slots.values_cache, {}}, options, true);
  const Operand &keys = p.operand[p.operands - 1], &own = v.operand[0];
  STD_TORCH_CHECK(v.dtype == p.dtype && v.rows == p.rows && v.tokens == p.tokens && own.blocks == keys.blocks &&
                      own.entries == keys.entries && slots.values->is_cpu() && slots.values_cache->is_cpu() &&
                      code_of(*slots.values_cache) == code_of(*slots.values),
                  "tightrope: values must have the dtype, rows and tokens of the keys, and their cache its blocks");
  return v;
}

void copy_values(const Problem& v) {
  const Operand& o = v.operand[0];
  const Strides &i = o.in_stride, &j = o.out_stride;
  const int64_t size = bytes_of(v.dtype), width = v.head_dim;
  const bool even = width == 1 || (i.channel == 1 && j.channel == 1);
  const bool adjacent = even && (o.heads == 1 || (i.head == width && j.head == width));
  const int64_t heads = adjacent ? 1 : o.heads, run = size * (adjacent ? o.heads * width : even ? width : 1);
  share(count_heads(v) * double(width), v.rows * v.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t place = place_of(v, o, at / v.tokens, at % v.tokens);
      if (place < 0) continue;
      const auto* in = static_cast<const char*>(o.in) + (at / v.tokens * i.row + at % v.tokens * i.token) * size;
      auto* out = static_cast<char*>(o.out) + place * size;
      for (int64_t head = 0; head < heads; ++head, in += i.head * size, out += j.head * size)
        for (int64_t d = 0; d < (even ? 1 : width); ++d)
          memcpy(out + d * j.channel * size, in + d * i.channel * size, size_t(run));
    }
  });
}

// Whether results may be written to the memory of a tensor that the loops read.
bool overwrites(const Problem& p, const std::optional<Tensor>& read) {
  if (!read.has_value()) return false;
  const View at(*read);
  int64_t entries = 1;
  for (int d = 0; d < at.dims; ++d) entries += (at.size[d] - 1) * at.stride_at(d);
  const auto* begin = static_cast<const char*>(read->const_data_ptr());
  const char* end = begin + entries * int64_t(sizeof(double));  // the widest entry
  for (int32_t i = 0; i < p.operands; ++i) {
    const Region out = written_by(p, p.operand[i]);
    const auto* from = static_cast<const char*>(out.data);
    if (begin < from + run_of(out.extents, 0) * bytes_of(p.dtype) && from < end) return true;
  }
  return false;
}

// Positions, tables or phases that one thread may overwrite before another reads them. Phase words are the library's own.
struct Angles {
  std::optional<Tensor> primary, secondary, positions;
};

// Copies of all of them, if results overwrite one.
std::optional<Angles> kept(const Problem& p, const Arguments& a) {
  if (is_empty(p)) return std::nullopt;
  const bool given = a.options.source != kWords && (overwrites(p, a.primary) || overwrites(p, a.secondary));
  if (!given && !overwrites(p, a.positions)) return std::nullopt;
  const auto copy = [](const std::optional<Tensor>& x) {
    return x.has_value() ? std::optional<Tensor>(torch::stable::clone(*x)) : x;
  };
  return Angles{copy(a.primary), copy(a.secondary), copy(a.positions)};
}

Arguments with(const Angles& own, const Arguments& a) {
  return {*own.primary, own.secondary, own.positions, a.offset, a.options, a.amplitude, a.extras, a.eps};
}

// Runs a problem that writes to memory of the caller's; of angles that it overwrites, the loops read copies.
Tensors run_over(Problem& p, const Operands& xs, Outs whose, const Arguments& a) {
  const auto own = kept(p, a);
  if (!own.has_value()) return run(p, xs, whose, a);
  const Arguments after = with(*own, a);
  read_angles(after, p);
  return run(p, xs, whose, after);
}

Tensors run(const Operands& xs, const Operands& outs, Outs whose, const Arguments& a) {
  Problem p = problem_of(xs, outs, a);
  if (is_empty(p) && a.options.is_plain()) return {};
  if (whose == Outs::kNew) return run(p, xs, whose, a);
  STD_TORCH_CHECK(is_empty(p) || !memory_overlaps(p, whose), "tightrope: memory overlaps");
  return run_over(p, xs, whose, a);
}

// Rotates into the caller's tensors, and into entries of a cache.
void run_slots(const Operands& xs, const Operands& outs, const Arguments& a, const Slots& slots) {
  Problem p = problem_of(xs, outs, a, true);
  Operand& keys = p.operand[p.operands - 1];
  Places places = read_slots(slots.index, a.options, p, keys), places_of_values;
  std::optional<Problem> values;
  if (slots.values != nullptr) {
    values = values_of(slots, p, a.options);
    places_of_values = places;
    place(values->operand[0], places_of_values);
  }
  place(keys, places);
  STD_TORCH_CHECK(!memory_overlaps(p, Outs::kGiven, values.has_value() ? &*values : nullptr),
                  "tightrope: memory overlaps");
  run_over(p, xs, Outs::kGiven, a);
  if (values.has_value() && !is_empty(*values)) copy_values(*values);
}

// TORCH_BOX needs functions with explicit parameters. Calls with extra tensors (`extras`: weights,
// gates, learned frequencies) are separate overloads: even an empty list takes half a microsecond.
#define TIGHTROPE_PARAMETERS                                                         \
  Tensor primary, std::optional<Tensor> secondary, std::optional<Tensor> positions, \
      int64_t offset, int64_t options, double amplitude
#define TIGHTROPE_EXTRAS Tensors extras, double eps

#define TIGHTROPE_ARGUMENTS(extras, eps) \
  arguments_of(primary, secondary, positions, offset, options, amplitude, extras, eps, xs.count)

Arguments arguments_of(const Tensor& primary, const std::optional<Tensor>& secondary,
                       const std::optional<Tensor>& positions, int64_t offset, int64_t options,
                       double amplitude, const Tensors& extras, double eps, int32_t operands) {
  const Options what(options);
  const bool norm = what.act == int64_t(Act::kRmsNorm);
  const bool back = what.act != 0 && what.direction != kForward;
  const int64_t each = norm + (what.gate != 0) + back;
  const int64_t count = int64_t(extras.size());
  STD_TORCH_CHECK(count == int64_t(what.learned) + operands * each && (norm || eps == 0),
                  "tightrope: extras and eps must match the options");
  const Tensor* first = count == 0 ? nullptr : extras.data() + what.learned;
  return {primary, secondary, positions, offset, what, amplitude, first, eps};
}

Tensors rotate_xs(const Operands& xs, const Arguments& a) {
  Tensors outs;
  outs.reserve(xs.count);
  for (int32_t i = 0; i < xs.count; ++i) {
    const Tensor& x = *xs.tensor[i];
    outs.push_back(a.options.dense ? torch::stable::new_empty(x, x.sizes()) : torch::stable::empty_like(x));
    ask_for_huge_pages(outs[i].mutable_data_ptr(), outs[i].numel() * outs[i].element_size());
  }
  Operands to = xs;
  for (int32_t i = 0; i < xs.count; ++i) to.tensor[i] = &outs[i];
  for (Tensor& weight : run(xs, to, Outs::kNew, a)) outs.push_back(std::move(weight));
  return outs;
}

void rotate_xs_into(const Operands& xs, const Operands& outs, const Arguments& a, const Slots* slots = nullptr) {
  STD_TORCH_CHECK(xs.count == outs.count, "tightrope: one out for each of q and k");
  for (int32_t i = 0; i < outs.count; ++i)
    STD_TORCH_CHECK(outs.tensor[i]->is_cpu() && code_of(*outs.tensor[i]) == code_of(*xs.tensor[0]),
                    "tightrope: outs must have the dtype and device of q and k");
  if (slots != nullptr) return run_slots(xs, outs, a, *slots);
  run(xs, outs, Outs::kGiven, a);
}

Tensors rotate(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k);
  return rotate_xs(xs, TIGHTROPE_ARGUMENTS({}, 0));
}

Tensors rotate_extras(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS, TIGHTROPE_EXTRAS) {
  const Operands xs(q, k);
  return rotate_xs(xs, TIGHTROPE_ARGUMENTS(extras, eps));
}

void rotate_(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k);
  run(xs, xs, Outs::kInPlace, TIGHTROPE_ARGUMENTS({}, 0));
}

void rotate_extras_(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS, TIGHTROPE_EXTRAS) {
  const Operands xs(q, k);
  run(xs, xs, Outs::kInPlace, TIGHTROPE_ARGUMENTS(extras, eps));
}

void rotate_into(Tensor q, std::optional<Tensor> k, Tensor out_q, std::optional<Tensor> out_k,
                 TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k), outs(out_q, out_k);
  rotate_xs_into(xs, outs, TIGHTROPE_ARGUMENTS({}, 0));
}

void rotate_extras_into(Tensor q, std::optional<Tensor> k, Tensor out_q, std::optional<Tensor> out_k,
                         TIGHTROPE_PARAMETERS, TIGHTROPE_EXTRAS) {
  const Operands xs(q, k), outs(out_q, out_k);
  rotate_xs_into(xs, outs, TIGHTROPE_ARGUMENTS(extras, eps));
}

void rotate_slots(Tensor q, std::optional<Tensor> k, Tensor out_q, std::optional<Tensor> out_k, Tensor slots,
                  TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k), outs(out_q, out_k);
  const Slots to{slots, nullptr, nullptr};
  rotate_xs_into(xs, outs, TIGHTROPE_ARGUMENTS({}, 0), &to);
}

void rotate_extras_slots(Tensor q, std::optional<Tensor> k, std::optional<Tensor> values, Tensor out_q,
                         std::optional<Tensor> out_k, std::optional<Tensor> out_values,
                         std::optional<Tensor> slots, std::optional<Tensor> scale,
                         std::optional<Tensor> values_scale, TIGHTROPE_PARAMETERS, TIGHTROPE_EXTRAS) {
  const Operands xs(q, k), outs(out_q, out_k);
  STD_TORCH_CHECK(values.has_value() == out_values.has_value(), "tightrope: values must come with their cache");
  STD_TORCH_CHECK(!scale.has_value() && !values_scale.has_value() && slots.has_value(),
                  "tightrope: the kernel for CPUs writes to slots, and takes no scales");
  const Slots to{*slots, values.has_value() ? &*values : nullptr, out_values.has_value() ? &*out_values : nullptr};
  rotate_xs_into(xs, outs, TIGHTROPE_ARGUMENTS(extras, eps), &to);
}

void rotate_slots_(Tensor cache, Tensor slots, TIGHTROPE_PARAMETERS, TIGHTROPE_EXTRAS) {
  const Operands xs(cache, {});
  const Arguments a = TIGHTROPE_ARGUMENTS(extras, eps);
  const View s(slots);
  const int token = int(s.dims) - 1;
  STD_TORCH_CHECK(1 <= s.dims && s.dims <= 2, "tightrope: slots must be [rows, tokens] or [tokens]");
  Problem p = entries_of(cache, a.options, s.size_at(token - 1), s.size[token]);
  read_angles(a, p);
  Places places = read_slots(slots, a.options, p, p.operand[0]);
  STD_TORCH_CHECK(are_distinct(places), "tightrope: slots must differ where entries rotate in place");
  place(p.operand[0], places);
  STD_TORCH_CHECK(!memory_overlaps(p, Outs::kInPlace), "tightrope: memory overlaps");
  run_over(p, xs, Outs::kInPlace, a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  if (!can_run()) return;
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("rotate.extras", TORCH_BOX(&rotate_extras));
  m.impl("rotate_", TORCH_BOX(&rotate_));
  m.impl("rotate_.extras", TORCH_BOX(&rotate_extras_));
  m.impl("rotate_into", TORCH_BOX(&rotate_into));
  m.impl("rotate_into.extras", TORCH_BOX(&rotate_extras_into));
  m.impl("rotate_slots", TORCH_BOX(&rotate_slots));
  m.impl("rotate_slots.extras", TORCH_BOX(&rotate_extras_slots));
  m.impl("rotate_slots_", TORCH_BOX(&rotate_slots_));
}

}  // namespace tightrope::binding
