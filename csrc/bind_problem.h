// Converts tensors to a Problem. The checks keep even a direct call of a raw operator inside its tensors.
// Only the bind_* files include torch headers, and only those of the stable ABI: one binary serves every
// Python and every torch from 2.10 on. All functions here are local to each translation unit, and the
// compiler inlines those that are called once. This matters because decoding one token takes little
// longer than these checks.
#pragma once

#include <torch/headeronly/util/Half.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "rotate.h"

namespace tightrope::binding {
namespace {

using torch::stable::Tensor;

// The dimensions of each layout, in the order of LAYOUTS in ops/schema.py; -1 for a missing one.
struct Layout {
  int dims, row, head, token;
};
constexpr Layout kLayouts[] = {
    {4, 0, 1, 2}, {4, 0, 2, 1}, {4, 1, 2, 0}, {3, -1, 1, 0}, {3, 0, -1, 1}, {2, -1, -1, 0}};

// The layout of a cache for keys in a layout: the same, or that of blocks with one dimension more.
inline const Layout& layout_of_cache(int64_t keys, int64_t dims) {
  const Layout& own = kLayouts[keys];
  return own.row >= 0 || dims == own.dims ? own : kLayouts[own.head < 0 ? 4 : 1];
}

constexpr int64_t kForward = 0, kTranspose = 1, kInverse = 2;

// With fewer elements than this per thread, one thread finishes before a second one wakes. The search for
// races (ci/hardening) sets it to 1, to divide every call.
#if !defined(TIGHTROPE_ELEMENTS_PER_THREAD)
#define TIGHTROPE_ELEMENTS_PER_THREAD (1 << 16)
#endif
constexpr int64_t kElementsPerThread = TIGHTROPE_ELEMENTS_PER_THREAD;

// Upper limit for strides, in elements: more than any memory holds. torch accepts any stride for a
// dimension of size 1 and for an empty tensor, so without a limit address arithmetic could overflow.
constexpr int64_t kFar = int64_t(1) << 52;

// Sizes and strides of one tensor, fetched once: every access through the stable ABI is a call.
struct View {
  explicit View(const Tensor& x) : dims(x.dim()), size(x.sizes().data()), stride(x.strides().data()) {
    // Storage may have been freed, for example that of parameter shards between layers.
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
    STD_TORCH_CHECK(bytes != 0 || x.numel() == 0, "tightrope: tensors must have their memory, but the storage "
                                                  "of one is empty (freed by a wrapper of the model?)");
  }

  int64_t size_at(int d) const { return d < 0 ? 1 : size[d]; }
  int64_t stride_at(int d) const { return d < 0 ? 0 : std::min(stride[d], kFar); }
  Strides strides(const Layout& layout) const {
    return {stride_at(layout.row), stride_at(layout.head), stride_at(layout.token),
            stride_at(int(dims) - 1)};
  }

  int64_t dims;
  const int64_t* size;
  const int64_t* stride;
};

inline int32_t code_of(const Tensor& x) {
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &code));
  return code;
}

inline Dtype dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_float32()) return Dtype::kFloat;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBFloat16;
  if (code == aoti_torch_dtype_float16()) return Dtype::kHalf;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float64(), "tightrope: x must be float16, bfloat16, float32 or float64");
  return Dtype::kDouble;
}

inline PositionDtype position_dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_int64()) return PositionDtype::kInt64;
  if (code == aoti_torch_dtype_int32()) return PositionDtype::kInt32;
  if (code == aoti_torch_dtype_float32()) return PositionDtype::kFloat;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float64(), "tightrope: positions must be int32, int64, float32 or float64");
  return PositionDtype::kDouble;
}

inline bool is_words(const Tensor& x) {
  return x.is_cpu() && code_of(x) == aoti_torch_dtype_int64() && x.is_contiguous();
}

// The integer of options that ops/schema.py packs, read from its lowest bits up.
class Options {
 public:
  explicit Options(int64_t packed) : rest_(uint64_t(packed)) {
    dense_back = take(1) != 0;
    dense = take(1) != 0;
    narrow = take(1) != 0;
    back = take(2);
    rounding = take(2);
    gate = take(4);
    act = take(8);
    learned = take(1) != 0;
    source = take(3);
    add_index = take(1) != 0;
    direction = take(2);
    interleaved = take(1) != 0;
    start = take(20);
    layout = take(3);
    reserved = int64_t(rest_);
  }

  bool is_plain() const { return act == 0 && gate == 0; }

  int64_t reserved;        // bits of no field
  int64_t rounding, back;  // of this call, and of its transpose
  bool narrow;             // round cosines and sines from phase words to the type of x
  bool dense, dense_back;  // whether new results are contiguous
  int64_t gate, act;
  bool learned;      // `extras` begins with learned frequencies, which only autograd uses
  int64_t source;    // index into SOURCES
  bool add_index;
  int64_t direction;
  bool interleaved;
  int64_t start, layout;

 private:
  int64_t take(int bits) {
    const uint64_t field = rest_ & ((uint64_t(1) << bits) - 1);
    rest_ >>= bits;
    return int64_t(field);
  }

  uint64_t rest_;
};

// The arguments that follow q and k in the schema (ops/schema.py).
struct Arguments {
  const Tensor& primary;
  const std::optional<Tensor>& secondary;
  const std::optional<Tensor>& positions;
  int64_t offset;
  Options options;
  double amplitude;
  const Tensor* extras;  // past the learned frequencies
  double eps;
};

constexpr int64_t kWords = 0, kRepeat = 2, kHalf = 3, kFull = 4, kGivenPhases = 5;  // codes of SOURCES

// The rows and heads of a table are -1 if it has no such dimension.
struct Sides {
  explicit Sides(const View& table) : row(table.dims == 2 ? -1 : 0), head(table.dims == 4 ? 1 : -1) {}
  int row, head;
};

inline Table table_of(const Tensor& x, const View& view) {
  const Sides side(view);
  auto at = [&](int d) { return view.size_at(d) == 1 ? int64_t(0) : view.stride[d]; };
  return {x.const_data_ptr(), {at(side.row), at(side.head), view.stride[view.dims - 2], view.stride[view.dims - 1]}};
}

inline void read_tables(const Arguments& a, Problem& p) {
  STD_TORCH_CHECK(a.secondary.has_value(), "tightrope: cosines must come with sines");
  const Tensor &c = a.primary, &s = *a.secondary;
  const View cos(c), sin(s);
  STD_TORCH_CHECK(2 <= cos.dims && cos.dims <= 4 && sin.dims == cos.dims && c.is_cpu() && s.is_cpu() &&
                      code_of(c) == code_of(s),
                  "tightrope: tables must be [rows|1, heads|1, length, width] of one dtype, or without the "
                  "heads, or without both");
  for (int d = 0; d < cos.dims; ++d)
    STD_TORCH_CHECK(cos.size[d] == sin.size[d], "tightrope: tables must share a shape");
  p.table_dtype = dtype_of(code_of(c));
  p.cosine = table_of(c, cos);
  p.sine = table_of(s, sin);
  // An empty table has a null pointer, which elsewhere means that there is no table.
  if (p.cosine.data == nullptr) p.cosine.data = &p;
  const Sides side(cos);
  const int64_t width = cos.size[cos.dims - 1];
  p.axes = 1, p.word_rows = cos.size_at(side.row), p.word_heads = cos.size_at(side.head);
  p.table_length = cos.size[cos.dims - 2];
  const int64_t source = a.options.source;
  STD_TORCH_CHECK(source <= kFull, "tightrope: the source must be known");
  STD_TORCH_CHECK(source == kHalf || width % 2 == 0, "tightrope: tables for channels must have an even width");
  p.pairs = source == kHalf ? width : width / 2;
  const bool full = source == kFull, neighbours = full && a.options.interleaved;
  p.table_step = source == kRepeat || neighbours ? 2 : 1;
  p.table_other = !full ? 0 : neighbours ? 1 : p.pairs;
  STD_TORCH_CHECK(!full || a.options.direction != kInverse, "tightrope: full tables have no inverse");
}

inline void read_words(const Tensor& words, Problem& p) {
  const View w(words);
  STD_TORCH_CHECK(w.dims == 4 && w.size[0] >= 1 && is_words(words),
                  "tightrope: phase words must be contiguous int64 [axes, rows|1, heads|1, pairs]");
  p.words = static_cast<const int64_t*>(words.const_data_ptr());
  p.axes = w.size[0], p.word_rows = w.size[1], p.word_heads = w.size[2], p.pairs = w.size[3];
}

inline void read_words(const Arguments& a, Problem& p) {
  read_words(a.primary, p);
  if (!a.secondary.has_value()) return;
  const View turns(*a.secondary);
  STD_TORCH_CHECK(is_words(*a.secondary) && a.secondary->numel() == a.primary.numel(),
                  "tightrope: turns must have the shape of words");
  p.turns = static_cast<const int64_t*>(a.secondary->const_data_ptr());
}

// Checks that something has one row and one head for all, or those of q and k.
inline void check_shares(const Problem& p, const char* what, int64_t rows, int64_t heads) {
  STD_TORCH_CHECK(rows == 1 || rows == p.rows, "tightrope: ", what, " must have 1 row or those of q");
  for (int32_t i = 0; i < p.operands; ++i)
    STD_TORCH_CHECK(heads == 1 || heads == p.operand[i].heads, "tightrope: ", what,
                    " must have 1 head or those of q and k");
}

inline void read_phases(const Arguments& a, Problem& p) {
  const View given(a.primary);
  const int32_t code = code_of(a.primary);
  p.phases_are_int32 = code == aoti_torch_dtype_int32();
  STD_TORCH_CHECK(given.dims == 4 && a.primary.is_cpu() && (p.phases_are_int32 || code == aoti_torch_dtype_int64()) &&
                      given.size[2] == p.tokens,
                  "tightrope: phases must be int32 or int64 [rows|1, heads|1, tokens, pairs]");
  p.word_rows = p.word_heads = 1;
  if (a.secondary.has_value()) {
    read_words(*a.secondary, p);
    STD_TORCH_CHECK(p.pairs == given.size[3], "tightrope: phases must have the pairs of the phase words");
  }
  p.phases = a.primary.const_data_ptr();
  // Empty phases have a null pointer, which elsewhere means that there are none.
  if (p.phases == nullptr) p.phases = &p;
  p.pairs = given.size[3];
  p.phase_rows = given.size[0], p.phase_heads = given.size[1];
  auto at = [&](int d) { return given.size[d] == 1 ? int64_t(0) : given.stride[d]; };
  p.phase_stride = {at(0), at(1), given.stride[2], given.stride[3]};
  check_shares(p, "phases", p.phase_rows, p.phase_heads);
}

inline void read_positions(const std::optional<Tensor>& positions, int64_t offset, bool add_index,
                           Problem& p) {
  p.offset = offset;
  p.add_index = add_index;
  p.position_dtype = PositionDtype::kNone;
  p.position_heads = 1;
  if (!positions.has_value()) return;
  const View at(*positions);
  const int head = at.dims == 4 ? 3 : -1;
  const int token = int(at.dims) - (at.dims == 4 ? 2 : 1), row = token - 1, axis = token - 2;  // missing ones are negative
  STD_TORCH_CHECK(1 <= at.dims && at.dims <= (add_index ? 3 : 4) && positions->is_cpu() && at.size_at(axis) == p.axes,
                  "tightrope: positions must be [axes, rows|1, tokens|1], or without leading dimensions of size 1, "
                  "or [axes, rows|1, tokens, heads|1]");
  check_shares(p, "positions", at.size_at(row), at.size_at(head));
  STD_TORCH_CHECK(at.size[token] == (add_index ? 1 : p.tokens),
                  "tightrope: positions must have the tokens of q, or 1 with add_index");
  p.positions = positions->const_data_ptr();
  p.position_dtype = position_dtype_of(code_of(*positions));
  STD_TORCH_CHECK(p.cosine.data == nullptr || p.position_dtype == PositionDtype::kInt64 ||
                      p.position_dtype == PositionDtype::kInt32,
                  "tightrope: positions in a table must be integers");
  STD_TORCH_CHECK(p.cosine.data == nullptr || at.dims < 4, "tightrope: positions in a table must have no heads");
  p.position_axis = at.stride_at(axis);
  p.position_row = at.size_at(row) == 1 ? 0 : at.stride_at(row);
  p.position_token = add_index ? 0 : at.stride_at(token);
  p.position_heads = at.size_at(head);
  if (p.position_heads == 1) return;
  p.position_head = at.stride_at(head);
  p.angles_per_head = true;
}

// The tensors to rotate: q, or q and k.
struct Operands {
  Operands(const Tensor& q, const std::optional<Tensor>& k) : count(k.has_value() ? 2 : 1) {
    tensor[0] = &q;
    tensor[1] = k.has_value() ? &*k : nullptr;
  }

  int32_t count;
  const Tensor* tensor[kMaxOperands];
};

// The entries of a cache that tokens go to.
struct Slots {
  const Tensor& index;         // int32 or int64 [tokens] or [rows, tokens]
  const Tensor* values;        // to copy, or null
  const Tensor* values_cache;
};

// Python raises the errors for users. The checks below run before anything is written. They keep a
// direct call of the raw operator from reading or writing outside its tensors, and they are the only
// checks on the fast path through Python.
inline Problem problem_with(const Options& options, int32_t code, int32_t operands) {
  STD_TORCH_CHECK(options.layout < 6, "tightrope: the layout must be known");
  STD_TORCH_CHECK(options.direction <= 2, "tightrope: the direction must be known");
  STD_TORCH_CHECK(options.reserved == 0, "tightrope: reserved bits of the options must be zero");
  STD_TORCH_CHECK(options.rounding <= int64_t(Rounding::kEach) && options.back <= int64_t(Rounding::kEach),
                  "tightrope: the rounding must be known");
  Problem p{};
  p.rounding = Rounding(options.rounding);
  p.narrow = options.narrow;
  p.operands = operands;
  p.dtype = dtype_of(code);
  return p;
}

inline Problem operands_of(const Operands& xs, const Operands& outs, const Options& options, bool last_is_cache = false) {
  const int32_t code = code_of(*xs.tensor[0]);
  Problem p = problem_with(options, code, xs.count);
  const Layout& layout = kLayouts[options.layout];
  for (int32_t i = 0; i < xs.count; ++i) {
    const Tensor& tensor = *xs.tensor[i];
    const View x(tensor), out(*outs.tensor[i]);
    STD_TORCH_CHECK(x.dims == layout.dims && (i == 0 || (code_of(tensor) == code && tensor.is_cpu())),
                    "tightrope: q and k must share a dtype and fit the layout");
    const int64_t rows = x.size_at(layout.row), tokens = x.size[layout.token];
    const int64_t head_dim = x.size[layout.dims - 1];
    if (i == 0) {
      p.rows = rows, p.tokens = tokens, p.head_dim = head_dim;
    }
    STD_TORCH_CHECK(rows == p.rows && tokens == p.tokens && head_dim == p.head_dim,
                    "tightrope: q and k must share rows, tokens and channels");
    const bool is_cache = last_is_cache && i + 1 == xs.count;
    const Layout& to = is_cache ? layout_of_cache(options.layout, out.dims) : layout;
    STD_TORCH_CHECK(out.dims == to.dims && out.size_at(to.head) == x.size_at(layout.head) &&
                        out.size[to.dims - 1] == head_dim &&
                        (is_cache || (out.size_at(to.row) == rows && out.size[to.token] == tokens)),
                    "tightrope: outs must have the shapes of q and k, and a cache their heads and channels");
    p.operand[i] = Operand{tensor.const_data_ptr(), outs.tensor[i]->mutable_data_ptr(), x.size_at(layout.head),
                           x.strides(layout), out.strides(to), out.size_at(to.row), out.size[to.token]};
  }
  return p;
}

// Entries of a cache that rotate in place: [rows, tokens] of them.
inline Problem entries_of(const Tensor& cache, const Options& options, int64_t rows, int64_t tokens) {
  Problem p = problem_with(options, code_of(cache), 1);
  const View x(cache);
  const Layout& layout = layout_of_cache(options.layout, x.dims);
  STD_TORCH_CHECK(x.dims == layout.dims, "tightrope: the cache must fit the layout");
  p.rows = rows, p.tokens = tokens, p.head_dim = x.size[layout.dims - 1];
  const Strides strides = x.strides(layout);
  void* data = cache.mutable_data_ptr();
  p.operand[0] = {data, data, x.size_at(layout.head), strides, strides, x.size_at(layout.row), x.size[layout.token]};
  return p;
}

// Adds the angles and the positions.
inline void read_angles(const Arguments& a, Problem& p) {
  const Options& options = a.options;
  if (options.source == kWords) {
    read_words(a, p);
  } else if (options.source == kGivenPhases) {
    read_phases(a, p);
  } else {
    read_tables(a, p);
  }
  p.start = options.start;
  check_shares(p, "angles", p.word_rows, p.word_heads);
  STD_TORCH_CHECK(p.start <= p.head_dim && p.pairs <= (p.head_dim - p.start) / 2,
                  "tightrope: rotated channels lie outside the head");
  p.angles_per_head = p.word_heads != 1 || p.phase_heads > 1;
  read_positions(a.positions, a.offset, options.add_index, p);
  p.interleaved = options.interleaved;
  p.conjugate = options.direction != kForward;
  p.amplitude = options.direction == kInverse ? 1.0 / a.amplitude : a.amplitude;
}

inline Problem problem_of(const Operands& xs, const Operands& outs, const Arguments& a, bool last_is_cache = false) {
  Problem p = operands_of(xs, outs, a.options, last_is_cache);
  read_angles(a, p);
  return p;
}

// Returns a double: the heads of expanded or empty tensors may add up to more than int64 holds.
inline double count_heads(const Problem& p) {
  double heads = 0;
  for (int32_t i = 0; i < p.operands; ++i) heads += double(p.operand[i].heads);
  return heads;
}

inline bool is_empty(const Problem& p) {
  return p.rows == 0 || p.tokens == 0 || count_heads(p) == 0 || p.head_dim == 0;
}

// A cache without entries takes no token, and may have more heads than a loop can visit.
inline void leave_empty_caches(Problem& p) {
  for (int32_t i = 0; i < p.operands; ++i) {
    Operand& o = p.operand[i];
    if (o.places != nullptr && (o.blocks == 0 || o.entries == 0)) o.heads = 0;
  }
}

// Divides the work into tiles of at most `tile` tokens of one row; returns the number of tiles.
inline int64_t divide(Problem& p, int64_t tile) {
  p.tile = tile > p.tokens ? p.tokens : tile;
  p.tiles_per_row = (p.tokens + p.tile - 1) / p.tile;
  return p.rows * p.tiles_per_row;
}

inline const Loops& loops() {
  const Loops* found = tightrope::loops();
  STD_TORCH_CHECK(found != nullptr,
                  "tightrope: TIGHTROPE_CPU_ISA names an instruction set that this processor or build lacks");
  return *found;
}

// Calls work(begin, end) for all items, on several threads if there are enough elements.
template <class Work>
void share(double per_item, int64_t items, const Work& work) {
  if (double(items) * per_item <= kElementsPerThread) return work(0, items);
  const int64_t grain = per_item >= kElementsPerThread ? 1 : kElementsPerThread / int64_t(per_item);
  torch::stable::parallel_for(0, items, grain, work);
}
template <class Work>
void share(const Problem& p, int64_t items, int64_t tokens_per_item, const Work& work) {
  share(count_heads(p) * double(tokens_per_item) * double(p.head_dim), items, work);
}

// Tokens of one row to process together: as many as have room for their angles, up to `most`.
inline int64_t tile_of(const Problem& p, int64_t most = 16) {
  const int64_t fits = p.pairs == 0 ? most : kAngles / row_width(p, p.pairs);
  return fits < 1 ? 1 : fits > most ? most : fits;
}

}  // namespace
}  // namespace tightrope::binding
