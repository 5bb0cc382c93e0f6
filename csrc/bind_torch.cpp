// The operator's CPU kernels: tensors in, a Problem out. The only file with torch headers, and of
// those only the stable ABI, so one binary serves every Python and every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "rotate.h"

#define TIGHTROPE_ISA binding
#include "formats.h"

namespace tightrope {
namespace binding {
namespace {

double value_at(Dtype dtype, const void* data, int64_t at) {
  switch (dtype) {
    case Dtype::kFloat: return static_cast<const float*>(data)[at];
    case Dtype::kDouble: return static_cast<const double*>(data)[at];
    case Dtype::kBFloat16: return BFloat16::load(static_cast<const uint16_t*>(data)[at]);
    case Dtype::kHalf: break;
  }
  return Half::load(static_cast<const uint16_t*>(data)[at]);
}

}  // namespace
}  // namespace binding
}  // namespace tightrope

namespace {

using tightrope::Act;
using tightrope::Dtype;
using tightrope::Gate;
using tightrope::Operand;
using tightrope::Outer;
using tightrope::Part;
using tightrope::PositionDtype;
using tightrope::Problem;
using tightrope::Strides;
using tightrope::Table;
using torch::stable::Tensor;

// In the order of LAYOUTS in ops/schema.py: which dimension is which, -1 where there is none.
struct Layout {
  int dims, row, head, token;
};
constexpr Layout kLayouts[] = {
    {4, 0, 1, 2}, {4, 0, 2, 1}, {4, 1, 2, 0}, {3, -1, 1, 0}, {3, 0, -1, 1}, {2, -1, -1, 0}};

constexpr int64_t kForward = 0, kInverse = 2;

// Fewer elements than this are rotated sooner than a second thread wakes.
constexpr int64_t kElementsPerThread = 1 << 16;

// Sizes and strides of one tensor, fetched once: every question through the stable ABI is a call.
struct View {
  explicit View(const Tensor& x) : dims(x.dim()), size(x.sizes().data()), stride(x.strides().data()) {}

  int64_t size_at(int d) const { return d < 0 ? 1 : size[d]; }
  int64_t stride_at(int d) const { return d < 0 ? 0 : stride[d]; }
  Strides strides(const Layout& layout) const {
    return {stride_at(layout.row), stride_at(layout.head), stride_at(layout.token),
            stride[dims - 1]};
  }

  int64_t dims;
  const int64_t* size;
  const int64_t* stride;
};

int32_t code_of(const Tensor& x) {
  int32_t code = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &code));
  return code;
}

Dtype dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_float32()) return Dtype::kFloat;
  if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBFloat16;
  if (code == aoti_torch_dtype_float16()) return Dtype::kHalf;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float64(), "tightrope: dtype of x");
  return Dtype::kDouble;
}

PositionDtype position_dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_int64()) return PositionDtype::kInt64;
  if (code == aoti_torch_dtype_int32()) return PositionDtype::kInt32;
  if (code == aoti_torch_dtype_float32()) return PositionDtype::kFloat;
  STD_TORCH_CHECK(code == aoti_torch_dtype_float64(), "tightrope: dtype of positions");
  return PositionDtype::kDouble;
}

bool is_words(const Tensor& x) {
  return x.is_cpu() && code_of(x) == aoti_torch_dtype_int64() && x.is_contiguous();
}

// The same two questions as in ops/checks.py, where they are worded for users.
struct Extent {
  int64_t size, stride;
};
using Extents = std::array<Extent, 4>;

Extents extents_of(const Problem& p, const Operand& o, const Strides& s) {
  return {{{p.rows, s.row}, {o.heads, s.head}, {p.tokens, s.token}, {p.head_dim, s.channel}}};
}

// True unless every dimension steps over all that the faster ones cover.
bool may_overlap_itself(Extents extents) {
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

// Elements from the first to one past the last, of those dimensions that `period` does not divide.
int64_t run_of(const Extents& extents, int64_t period) {
  int64_t run = 1;
  for (const Extent& e : extents)
    if (period == 0 || e.stride % period != 0) run += (e.size - 1) * e.stride;
  return run;
}

// False where two tensors certainly share no element.
bool may_overlap(const void* a, const Extents& ae, const void* b, const Extents& be,
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

// Whose memory is written: that of new tensors, of the tensors that are read, or of others.
enum class Outs { kNew, kInPlace, kGiven };

// Whether what is written may overlap itself, or what is read elsewhere.
bool memory_overlaps(const Problem& p, Outs outs) {
  const int64_t element = p.dtype == Dtype::kDouble ? 8 : p.dtype == Dtype::kFloat ? 4 : 2;
  for (int32_t i = 0; i < p.operands; ++i) {
    const Operand& a = p.operand[i];
    const Extents out = extents_of(p, a, a.out_stride);
    if (may_overlap_itself(out)) return true;
    for (int32_t j = 0; j < p.operands; ++j) {
      const Operand& b = p.operand[j];
      if (j < i && may_overlap(a.out, out, b.out, extents_of(p, b, b.out_stride), element))
        return true;
      // In place each reads what it writes itself.
      if (outs == Outs::kGiven && may_overlap(a.out, out, b.in, extents_of(p, b, b.in_stride), element))
        return true;
    }
  }
  return false;
}

// The code that ops/schema.py packs, from its lowest bits up.
class Form {
 public:
  explicit Form(int64_t packed) : rest_(uint64_t(packed)) {
    reserved = take(8);
    gate = take(4);
    act = take(8);
    learned = take(1) != 0;
    source = take(2);
    ramp = take(1) != 0;
    direction = take(2);
    interleaved = take(1) != 0;
    start = take(20);
    layout = take(3);
    reserved |= int64_t(rest_);
  }

  bool is_plain() const { return act == 0 && gate == 0; }

  int64_t reserved;  // numerics, and what no field has
  int64_t gate, act;
  bool learned;      // frequencies are carried, for whoever wants gradients
  int64_t source;    // index into SOURCES
  bool ramp;
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
  Form form;
  double amplitude;
  const Tensor* carried;  // past the learned frequencies
  double eps;
};

constexpr int64_t kWords = 0, kRepeat = 2, kHalf = 3;  // codes of SOURCES

Table table_of(const Tensor& x, const View& view) {
  auto at = [&](int d) { return view.size[d] == 1 ? int64_t(0) : view.stride[d]; };
  return {x.const_data_ptr(), {at(0), at(1), view.stride[2], view.stride[3]}};
}

void read_tables(const Arguments& a, Problem& p) {
  STD_TORCH_CHECK(a.secondary.has_value(), "tightrope: cosines without sines");
  const Tensor &c = a.primary, &s = *a.secondary;
  const View cos(c), sin(s);
  STD_TORCH_CHECK(cos.dims == 4 && sin.dims == 4 && c.is_cpu() && s.is_cpu() &&
                      code_of(c) == code_of(s),
                  "tightrope: tables must be [rows|1, heads|1, length, width] of one dtype");
  for (int d = 0; d < 4; ++d)
    STD_TORCH_CHECK(cos.size[d] == sin.size[d], "tightrope: tables must share a shape");
  p.table_dtype = dtype_of(code_of(c));
  p.cosine = table_of(c, cos);
  p.sine = table_of(s, sin);
  // An empty table has no data, but must not be taken for none.
  if (p.cosine.data == nullptr) p.cosine.data = &p;
  p.axes = 1, p.word_rows = cos.size[0], p.word_heads = cos.size[1];
  p.table_length = cos.size[2];
  p.table_step = a.form.source == kRepeat ? 2 : 1;
  p.pairs = a.form.source == kHalf ? cos.size[3] : cos.size[3] / 2;
}

void read_words(const Arguments& a, Problem& p) {
  const View w(a.primary);
  STD_TORCH_CHECK(w.dims == 4 && w.size[0] >= 1 && is_words(a.primary),
                  "tightrope: words must be contiguous int64 [axes, rows|1, heads|1, pairs]");
  p.words = static_cast<const int64_t*>(a.primary.const_data_ptr());
  p.axes = w.size[0], p.word_rows = w.size[1], p.word_heads = w.size[2], p.pairs = w.size[3];
  if (!a.secondary.has_value()) return;
  STD_TORCH_CHECK(is_words(*a.secondary) && a.secondary->numel() == a.primary.numel(),
                  "tightrope: turns must be shaped as words");
  p.turns = static_cast<const int64_t*>(a.secondary->const_data_ptr());
}

void read_positions(const std::optional<Tensor>& positions, int64_t offset, bool ramp, Problem& p) {
  p.offset = offset;
  p.ramp = ramp;
  p.position_dtype = PositionDtype::kNone;
  if (!positions.has_value()) return;
  const View at(*positions);
  STD_TORCH_CHECK(at.dims == 3 && positions->is_cpu() && at.size[0] == p.axes,
                  "tightrope: positions must be [axes, rows|1, tokens|1]");
  STD_TORCH_CHECK(at.size[1] == 1 || at.size[1] == p.rows, "tightrope: rows of positions");
  STD_TORCH_CHECK(at.size[2] == (ramp ? 1 : p.tokens), "tightrope: tokens of positions");
  p.positions = positions->const_data_ptr();
  p.position_dtype = position_dtype_of(code_of(*positions));
  STD_TORCH_CHECK(p.cosine.data == nullptr || p.position_dtype == PositionDtype::kInt64 ||
                      p.position_dtype == PositionDtype::kInt32,
                  "tightrope: positions in a table must be integers");
  p.position_axis = at.stride[0];
  p.position_row = at.size[1] == 1 ? 0 : at.stride[1];
  p.position_token = ramp ? 0 : at.stride[2];
}

// What is rotated: one or two tensors, in memory of their own.
struct Operands {
  Operands(const Tensor& q, const std::optional<Tensor>& k) : count(k.has_value() ? 2 : 1) {
    tensor[0] = &q;
    tensor[1] = k.has_value() ? &*k : nullptr;
  }

  int32_t count;
  const Tensor* tensor[tightrope::kMaxOperands];
};

// Sentences for users are worded in Python. What is checked below, before anything is written, keeps
// a direct call of the raw operator from reading or writing outside its tensors; and the shortest
// way through Python asks nothing else.
Problem operands_of(const Operands& xs, const Operands& outs, const Form& form) {
  STD_TORCH_CHECK(form.layout < 6, "tightrope: layout");
  STD_TORCH_CHECK(form.direction <= 2, "tightrope: direction");
  STD_TORCH_CHECK(form.reserved == 0, "tightrope: numerics is reserved");
  const Layout& layout = kLayouts[form.layout];

  Problem p{};
  p.operands = xs.count;
  const int32_t code = code_of(*xs.tensor[0]);
  p.dtype = dtype_of(code);
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
    for (int d = 0; d < layout.dims; ++d)
      STD_TORCH_CHECK(out.dims == x.dims && out.size[d] == x.size[d],
                      "tightrope: outs must have the shapes of q and k");
    p.operand[i] = Operand{tensor.const_data_ptr(), outs.tensor[i]->mutable_data_ptr(),
                           x.size_at(layout.head), x.strides(layout), out.strides(layout)};
  }
  return p;
}

Problem problem_of(const Operands& xs, const Operands& outs, const Arguments& a) {
  const Form& form = a.form;
  Problem p = operands_of(xs, outs, form);
  if (form.source == kWords) {
    read_words(a, p);
  } else {
    read_tables(a, p);
  }
  p.start = form.start;
  STD_TORCH_CHECK(p.word_rows == 1 || p.word_rows == p.rows, "tightrope: rows of angles");
  for (int32_t i = 0; i < p.operands; ++i)
    STD_TORCH_CHECK(p.word_heads == 1 || p.word_heads == p.operand[i].heads,
                    "tightrope: heads of angles");
  STD_TORCH_CHECK(p.start + 2 * p.pairs <= p.head_dim,
                  "tightrope: rotated channels lie outside the head");
  p.angles_per_head = p.word_heads != 1;
  read_positions(a.positions, a.offset, form.ramp, p);
  p.interleaved = form.interleaved;
  p.conjugate = form.direction != kForward;
  p.amplitude = form.direction == kInverse ? 1.0 / a.amplitude : a.amplitude;

  return p;
}

int64_t heads_of(const Problem& p) {
  int64_t heads = 0;
  for (int32_t i = 0; i < p.operands; ++i) heads += p.operand[i].heads;
  return heads;
}

bool is_empty(const Problem& p) {
  return p.rows == 0 || p.tokens == 0 || heads_of(p) == 0 || p.head_dim == 0;
}

// Tiles of at most `tile` tokens of one row are the work items; returns how many there are.
int64_t divide(Problem& p, int64_t tile) {
  p.tile = tile > p.tokens ? p.tokens : tile;
  p.tiles_per_row = (p.tokens + p.tile - 1) / p.tile;
  return p.rows * p.tiles_per_row;
}

const tightrope::Loops& loops() {
  const tightrope::Loops* found = tightrope::loops();
  STD_TORCH_CHECK(found != nullptr, "tightrope: TIGHTROPE_CPU_ISA names an unknown instruction set");
  return *found;
}

// Calls work(begin, end) for all items, on several threads where there is enough to do.
template <class Work>
void share(const Problem& p, int64_t items, int64_t tokens_per_item, const Work& work) {
  const int64_t per_item = heads_of(p) * tokens_per_item * p.head_dim;
  if (items * per_item <= kElementsPerThread) return work(0, items);
  const int64_t grain = per_item >= kElementsPerThread ? 1 : kElementsPerThread / per_item;
  torch::stable::parallel_for(0, items, grain, work);
}

// Tokens of one row that are handled together: as many as their angles fit, up to 16.
int64_t tile_of(const Problem& p) {
  const int64_t fits = p.pairs == 0 ? 16 : tightrope::kAngles / p.pairs;
  return fits < 1 ? 1 : fits > 16 ? 16 : fits;
}

// The values that something is computed with: what is float or double already, or copies.
class Values {
 public:
  explicit Values(bool is_double) : double_(is_double) {}

  // A tensor seen as sizes and strides, contiguous, as values times `sign`.
  const void* copy(const Tensor& x, std::array<int64_t, 3> sizes, std::array<int64_t, 3> strides,
                   double sign, bool as_double, void** made = nullptr) {
    const Dtype dtype = dtype_of(code_of(x));
    const char* from = static_cast<const char*>(x.const_data_ptr());
    const int64_t count = sizes[0] * sizes[1] * sizes[2];
    owned_.emplace_back(new double[as_double ? count : (count + 1) / 2]);
    void* to = owned_.back().get();
    int64_t n = 0;
    for (int64_t i = 0; i < sizes[0]; ++i)
      for (int64_t j = 0; j < sizes[1]; ++j)
        for (int64_t k = 0; k < sizes[2]; ++k, ++n) {
          double value = tightrope::binding::value_at(
              dtype, from, i * strides[0] + j * strides[1] + k * strides[2]);
          // One NaN for all: see BFloat16 in formats.h.
          value = value != value ? __builtin_nan("") : sign * value;
          if (as_double) {
            static_cast<double*>(to)[n] = value;
          } else {
            static_cast<float*>(to)[n] = float(value);
          }
        }
    if (made != nullptr) *made = to;
    return to;
  }

  bool is_double() const { return double_; }

 private:
  bool double_;
  std::vector<std::unique_ptr<double[]>> owned_;
};

int64_t step(const View& view, int d) { return view.size[d] == 1 ? 0 : view.stride[d]; }

void read_weight(const Tensor& x, int64_t heads, const Problem& p, Values& values, Part& part) {
  const View w(x);
  STD_TORCH_CHECK(w.dims == 2 && x.is_cpu() && (w.size[0] == 1 || w.size[0] == heads) &&
                      w.size[1] == p.head_dim,
                  "tightrope: weights of a norm must be [heads|1, channels]");
  part.weight_head = w.size[0] == 1 ? 0 : p.head_dim;
  part.weight = values.copy(x, {1, w.size[0], p.head_dim}, {0, w.stride[0], w.stride[1]}, 1.0,
                            values.is_double());
}

void read_slope(const Tensor& x, int64_t heads, const Problem& p, bool invert, Values& values,
                Part& part) {
  const View s(x);
  STD_TORCH_CHECK(s.dims == 2 && x.is_cpu() && (s.size[0] == 1 || s.size[0] == heads) &&
                      (s.size[1] == 1 || s.size[1] == p.head_dim) &&
                      (p.position_dtype == PositionDtype::kNone || p.axes == 1),
                  "tightrope: slopes must be [heads|1, channels|1], of positions of 1 axis");
  part.per_head = s.size[0] != 1;
  part.slope_head = part.per_head ? p.head_dim : 0;
  part.slope = static_cast<const double*>(values.copy(x, {1, s.size[0], p.head_dim},
                                                      {0, s.stride[0], step(s, 1)},
                                                      invert ? -1.0 : 1.0, true));
}

void read_log(const Tensor& x, int64_t heads, const Problem& p, bool invert, Values& values,
              Part& part) {
  const View g(x);
  const int64_t fits[] = {p.rows, heads, p.tokens, p.head_dim};
  for (int d = 0; d < 4; ++d)
    STD_TORCH_CHECK(g.dims == 4 && x.is_cpu() && (g.size[d] == 1 || g.size[d] == fits[d]),
                    "tightrope: logarithms of a gate must be [rows|1, heads|1, tokens|1, channels|1]");
  part.per_head = g.size[1] != 1;
  if (g.size[2] == 1) {
    void* made = nullptr;
    const int64_t rows = g.size[0], own = g.size[1];
    part.factor = values.copy(x, {rows, own, p.head_dim}, {g.stride[0], g.stride[1], step(g, 3)},
                              invert ? -1.0 : 1.0, values.is_double(), &made);
    part.factor_row = rows == 1 ? 0 : own * p.head_dim;
    part.factor_head = own == 1 ? 0 : p.head_dim;
    loops().exponentials(p.dtype, made, rows * own * p.head_dim);
    return;
  }
  part.log = x.const_data_ptr();
  part.log_stride = {step(g, 0), step(g, 1), step(g, 2), step(g, 3)};
  part.log_dtype = dtype_of(code_of(x));
}

// Checks f and P, and brings their tensors into the form of the loops.
Outer outer_of(const Problem& p, const Operands& xs, const Arguments& a, Values& values) {
  const Form& form = a.form;
  Outer o{};
  STD_TORCH_CHECK(form.act <= int64_t(Act::kRmsNorm) && form.gate <= int64_t(Gate::kSlope),
                  "tightrope: act and gate must be known");
  STD_TORCH_CHECK(form.act == 0 || form.direction != kInverse, "tightrope: an act has no inverse");
  o.act = Act(form.act), o.gate = Gate(form.gate), o.eps = a.eps;
  o.forward = form.direction == kForward;
  o.invert = form.direction == kInverse;
  o.tiles = 1;
  const Tensor* next = a.carried;
  for (int32_t i = 0; o.act == Act::kRmsNorm && i < p.operands; ++i)
    read_weight(*next++, p.operand[i].heads, p, values, o.part[i]);
  for (int32_t i = 0; o.gate != Gate::kNone && i < p.operands; ++i)
    (o.gate == Gate::kLog ? read_log : read_slope)(*next++, p.operand[i].heads, p, o.invert, values,
                                                   o.part[i]);
  for (int32_t i = 0; o.act != Act::kNone && !o.forward && i < p.operands; ++i) {
    const Tensor& x = *next++;
    const View in(x), as(*xs.tensor[i]);
    STD_TORCH_CHECK(in.dims == as.dims && x.is_cpu() && code_of(x) == code_of(*xs.tensor[i]),
                    "tightrope: x must be as its gradient");
    for (int d = 0; d < int(in.dims); ++d)
      STD_TORCH_CHECK(in.size[d] == as.size[d], "tightrope: x must be as its gradient");
    o.part[i].x = x.const_data_ptr();
    o.part[i].x_stride = in.strides(kLayouts[form.layout]);
  }
  return o;
}

int64_t value_bytes(const Problem& p) { return p.dtype == Dtype::kDouble ? 8 : 4; }

// Memory of one thread, from a multiple of 64 bytes.
class Memory {
 public:
  explicit Memory(int64_t bytes) : owned_(new char[bytes + 64]) {}
  void* at() {
    const auto address = reinterpret_cast<uintptr_t>(owned_.get());
    return owned_.get() + (64 - address % 64) % 64;
  }

 private:
  std::unique_ptr<char[]> owned_;
};

Tensor zeros(const Tensor& like, std::vector<int64_t> sizes,
             torch::headeronly::ScalarType type = torch::headeronly::ScalarType::Double) {
  return torch::stable::new_zeros(like, {sizes.data(), sizes.size()}, type);
}

// Tokens that share an entry of a sum are summed in so many runs at most, of so many at least.
constexpr int64_t kRuns = 128, kTokensPerRun = 32;

int64_t run_of_tokens(int64_t sequence) {
  return std::max((sequence + kRuns - 1) / kRuns, kTokensPerRun);
}

// Adds `count` parts of n entries each, in order.
template <class T>
void add_up(const double* parts, int64_t count, int64_t n, T* to) {
  std::vector<double> sums(n, 0.0);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t k = 0; k < n; ++k) sums[k] += parts[i * n + k];
  for (int64_t k = 0; k < n; ++k) to[k] = T(sums[k]);
}
void add_up(const double* parts, int64_t count, int64_t n, const Tensor& to, int64_t at, bool is_double) {
  if (is_double) return add_up(parts, count, n, static_cast<double*>(to.mutable_data_ptr()) + at);
  add_up(parts, count, n, static_cast<float*>(to.mutable_data_ptr()) + at);
}

torch::headeronly::ScalarType value_type(const Problem& p) {
  return p.dtype == Dtype::kDouble ? torch::headeronly::ScalarType::Double
                                   : torch::headeronly::ScalarType::Float;
}

// Runs a rotation between f and P; returns the gradients by the weights of a norm on the way back.
std::vector<Tensor> run_outer(Problem& p, const Operands& xs, const Arguments& a) {
  Values values(p.dtype == Dtype::kDouble);
  Outer o = outer_of(p, xs, a, values);
  const bool sums = o.act == Act::kRmsNorm && !o.forward, empty = is_empty(p);
  int64_t items = empty ? 0 : divide(p, tile_of(p));
  if (sums && !empty) {
    o.tiles = (run_of_tokens(p.rows * p.tokens) + p.tile - 1) / p.tile;
    items = (items + o.tiles - 1) / o.tiles;
  }
  std::vector<Tensor> partial, by_weight;
  std::vector<int64_t> entries;
  for (int32_t i = 0; sums && i < p.operands; ++i) {
    const int64_t own = o.part[i].weight_head == 0 ? 1 : p.operand[i].heads;
    entries.push_back(own * p.head_dim);
    partial.push_back(zeros(*xs.tensor[0], {items, own, p.head_dim}));
    by_weight.push_back(zeros(*xs.tensor[0], {own, p.head_dim}, value_type(p)));
    o.part[i].by_weight = static_cast<double*>(partial[i].mutable_data_ptr());
  }
  if (empty) return by_weight;
  const tightrope::OuterLoop loop = loops().outer;
  const int64_t bytes = tightrope::scratch_values(p) * value_bytes(p);
  share(p, items, p.tile * o.tiles, [&](int64_t begin, int64_t end) {
    Memory memory(bytes);
    loop(p, o, memory.at(), begin, end);
  });
  for (size_t i = 0; i < by_weight.size(); ++i)
    add_up(o.part[i].by_weight, items, entries[i], by_weight[i], 0, values.is_double());
  return by_weight;
}

std::vector<Tensor> run(const Operands& xs, const Operands& outs, Outs whose, const Arguments& a) {
  Problem p = problem_of(xs, outs, a);
  const bool plain = a.form.is_plain();
  if (plain && is_empty(p)) return {};
  STD_TORCH_CHECK(whose == Outs::kNew || is_empty(p) || !memory_overlaps(p, whose),
                  "tightrope: memory overlaps");
  if (!plain) return run_outer(p, xs, a);
  const int64_t items = divide(p, tile_of(p));
  const tightrope::Loop loop = loops().rotate;
  share(p, items, p.tile, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
  return {};
}

using Tensors = std::optional<std::vector<Tensor>>;

// The boxing of a function into the dispatcher wants its parameters spelled out.
#define TIGHTROPE_PARAMETERS                                                                  \
  Tensor primary, std::optional<Tensor> secondary, std::optional<Tensor> positions,          \
      int64_t offset, int64_t form, double amplitude, Tensors carried, double eps

#define TIGHTROPE_ARGUMENTS \
  arguments_of(primary, secondary, positions, offset, form, amplitude, carried, eps, xs.count)

Arguments arguments_of(const Tensor& primary, const std::optional<Tensor>& secondary,
                       const std::optional<Tensor>& positions, int64_t offset, int64_t form,
                       double amplitude, const Tensors& carried, double eps, int32_t operands) {
  const Form what(form);
  const bool norm = what.act == int64_t(Act::kRmsNorm);
  const bool back = what.act != 0 && what.direction != kForward;
  const int64_t each = norm + (what.gate != 0) + back;
  const int64_t count = carried.has_value() ? int64_t(carried->size()) : 0;
  STD_TORCH_CHECK(count == int64_t(what.learned) + operands * each && (norm || eps == 0),
                  "tightrope: carried and eps must be what the form says");
  const Tensor* first = count == 0 ? nullptr : carried->data() + what.learned;
  return {primary, secondary, positions, offset, what, amplitude, first, eps};
}

std::vector<Tensor> rotate(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k);
  std::vector<Tensor> outs;
  outs.reserve(xs.count);
  for (int32_t i = 0; i < xs.count; ++i) outs.push_back(torch::stable::empty_like(*xs.tensor[i]));
  Operands to = xs;
  for (int32_t i = 0; i < xs.count; ++i) to.tensor[i] = &outs[i];
  for (Tensor& weight : run(xs, to, Outs::kNew, TIGHTROPE_ARGUMENTS))
    outs.push_back(std::move(weight));
  return outs;
}

void rotate_(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k);
  run(xs, xs, Outs::kInPlace, TIGHTROPE_ARGUMENTS);
}

void rotate_into(Tensor q, std::optional<Tensor> k, Tensor out_q, std::optional<Tensor> out_k,
                 TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k), outs(out_q, out_k);
  STD_TORCH_CHECK(xs.count == outs.count, "tightrope: one out for each of q and k");
  for (int32_t i = 0; i < outs.count; ++i)
    STD_TORCH_CHECK(outs.tensor[i]->is_cpu() && code_of(*outs.tensor[i]) == code_of(q),
                    "tightrope: outs must have the dtype and device of q and k");
  run(xs, outs, Outs::kGiven, TIGHTROPE_ARGUMENTS);
}

std::tuple<Tensor, Tensor> angle_gradients(Tensor y, std::optional<Tensor> z, Tensor grad_y,
                                           std::optional<Tensor> grad_z, Tensor words,
                                           std::optional<Tensor> turns,
                                           std::optional<Tensor> positions, int64_t offset,
                                           int64_t form, bool by_positions, bool by_frequencies) {
  const Operands ys(y, z), grads(grad_y, grad_z);
  STD_TORCH_CHECK(ys.count == grads.count, "tightrope: one gradient for each result");
  for (int32_t i = 0; i < grads.count; ++i)
    STD_TORCH_CHECK(grads.tensor[i]->is_cpu() && code_of(*grads.tensor[i]) == code_of(y),
                    "tightrope: gradients must have the dtype and device of results");
  const Arguments a{words, turns, positions, offset, Form(form), 1.0, nullptr, 0.0};
  STD_TORCH_CHECK(a.form.source == kWords, "tightrope: tables have gradients of their own");
  STD_TORCH_CHECK(a.form.is_plain(), "tightrope: gradients by angles are those of a rotation alone");
  Problem p = problem_of(ys, grads, a);
  const bool empty = is_empty(p);
  const int64_t sequences = p.word_rows;
  const int64_t sequence = p.word_rows == 1 ? p.rows * p.tokens : p.tokens;
  const int64_t run = run_of_tokens(sequence);
  const int64_t runs = empty ? 0 : (sequence + run - 1) / run;

  Tensor of_positions = zeros(words, {by_positions ? p.axes : 0, p.rows, p.tokens});
  Tensor of_runs = zeros(words, {by_frequencies ? sequences * runs : 0, p.axes, p.word_heads, p.pairs});
  Tensor of_frequencies =
      zeros(words, {by_frequencies ? p.axes : 0, p.word_rows, p.word_heads, p.pairs});
  if (empty) return {of_positions, of_frequencies};
  const tightrope::AngleSums sums{
      by_positions ? static_cast<double*>(of_positions.mutable_data_ptr()) : nullptr,
      by_frequencies ? static_cast<double*>(of_runs.mutable_data_ptr()) : nullptr,
      sequence, run, runs};
  const tightrope::AngleLoop loop = loops().add_angles;
  share(p, sequences * runs, run < sequence ? run : sequence,
        [&](int64_t begin, int64_t end) { loop(p, sums, begin, end); });
  if (!by_frequencies) return {of_positions, of_frequencies};

  auto* total = static_cast<double*>(of_frequencies.mutable_data_ptr());
  const int64_t size = p.word_heads * p.pairs;
  for (int64_t i = 0; i < sequences * runs; ++i) {
    for (int64_t axis = 0; axis < p.axes; ++axis) {
      const double* part = sums.by_frequency + (i * p.axes + axis) * size;
      double* to = total + (axis * p.word_rows + i / runs) * size;
      for (int64_t k = 0; k < size; ++k) to[k] += part[k];
    }
  }
  return {of_positions, of_frequencies};
}

std::vector<Tensor> gate_gradients(Tensor y, std::optional<Tensor> z, Tensor grad_y,
                                   std::optional<Tensor> grad_z, Tensor gate_q,
                                   std::optional<Tensor> gate_k, std::optional<Tensor> positions,
                                   int64_t offset, int64_t form) {
  const Operands ys(y, z), grads(grad_y, grad_z), gates(gate_q, gate_k);
  STD_TORCH_CHECK(ys.count == grads.count && ys.count == gates.count,
                  "tightrope: one gradient and one gate for each result");
  for (int32_t i = 0; i < grads.count; ++i)
    STD_TORCH_CHECK(grads.tensor[i]->is_cpu() && code_of(*grads.tensor[i]) == code_of(y) &&
                        gates.tensor[i]->is_cpu(),
                    "tightrope: gradients must have the dtype and device of results");
  const Form what(form);
  const bool slopes = what.gate == int64_t(Gate::kSlope);
  STD_TORCH_CHECK(slopes || what.gate == int64_t(Gate::kLog), "tightrope: act and gate must be known");
  Problem all = operands_of(ys, grads, what);
  all.axes = 1;
  read_positions(positions, offset, what.ramp, all);

  std::vector<Tensor> found;
  for (int32_t i = 0; i < ys.count; ++i) {
    // One by one: they may differ in what they share.
    Problem p = all;
    p.operands = 1, p.operand[0] = all.operand[i];
    const View g(*gates.tensor[i]);
    STD_TORCH_CHECK(g.dims == (slopes ? 2 : 4), "tightrope: dimensions of a gate");
    const int64_t rows = slopes ? 1 : g.size[0], tokens = slopes ? 1 : g.size[2];
    const int64_t heads = g.size[slopes ? 0 : 1], channels = g.size[slopes ? 1 : 3];
    const int64_t own = p.operand[0].heads;
    STD_TORCH_CHECK((rows == 1 || rows == p.rows) && (tokens == 1 || tokens == p.tokens) &&
                        (heads == 1 || heads == own) && (channels == 1 || channels == p.head_dim),
                    "tightrope: a gate must fit its result");
    Tensor total = zeros(y, std::vector<int64_t>(g.size, g.size + g.dims), value_type(p));
    found.push_back(total);
    if (is_empty(p)) continue;

    tightrope::GateSums sums{};
    sums.times_position = slopes;
    sums.by_token = tokens != 1;
    sums.rows_share = rows == 1, sums.heads_share = heads == 1, sums.channels_share = channels == 1;
    sums.sequence = rows == 1 ? p.rows * p.tokens : p.tokens;
    sums.run = sums.by_token ? 1 : run_of_tokens(sums.sequence);
    sums.runs = sums.by_token ? 1 : (sums.sequence + sums.run - 1) / sums.run;
    const int64_t sequences = sums.by_token ? rows * tokens : rows;
    const int64_t items = sequences * sums.runs, entries = heads * channels;
    Tensor parts = zeros(y, {items, entries});
    sums.to = static_cast<double*>(parts.mutable_data_ptr());
    const tightrope::GateLoop loop = loops().add_gates;
    const int64_t bytes = 3 * tightrope::padded(p.head_dim) * value_bytes(p);
    share(p, items, std::max(p.rows * p.tokens / items, int64_t(1)), [&](int64_t begin, int64_t end) {
      Memory memory(bytes);
      loop(p, sums, memory.at(), begin, end);
    });
    if (sums.by_token) {
      // Items are [rows|1, tokens], and the gate is [rows|1, heads|1, tokens, channels|1].
      const auto* from = static_cast<const double*>(parts.const_data_ptr());
      void* to = total.mutable_data_ptr();
      for (int64_t item = 0; item < items; ++item)
        for (int64_t head = 0; head < heads; ++head)
          for (int64_t k = 0; k < channels; ++k) {
            const int64_t at = ((item / tokens * heads + head) * tokens + item % tokens) * channels + k;
            const double value = from[item * entries + head * channels + k];
            if (p.dtype == Dtype::kDouble) {
              static_cast<double*>(to)[at] = value;
            } else {
              static_cast<float*>(to)[at] = float(value);
            }
          }
    } else {
      for (int64_t row = 0; row < rows; ++row)
        add_up(static_cast<const double*>(parts.const_data_ptr()) + row * sums.runs * entries, sums.runs,
               entries, total, row * entries, p.dtype == Dtype::kDouble);
    }
  }
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("rotate_", TORCH_BOX(&rotate_));
  m.impl("rotate_into", TORCH_BOX(&rotate_into));
  m.impl("angle_gradients", TORCH_BOX(&angle_gradients));
  m.impl("gate_gradients", TORCH_BOX(&gate_gradients));
}
