// The operator's CPU kernels: tensors in, a Problem out. The only file with torch headers, and of
// those only the stable ABI, so one binary serves every Python and every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "rotate.h"

namespace {

using tightrope::Dtype;
using tightrope::Operand;
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
    reserved = take(20);
    learned = take(1) != 0;
    source = take(2);
    ramp = take(1) != 0;
    direction = take(2);
    interleaved = take(1) != 0;
    start = take(20);
    layout = take(3);
    reserved |= int64_t(rest_);
  }

  int64_t reserved;  // numerics, gate, act, and what no field has
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

// The arguments that follow q and k in the schema (ops/schema.py), up to the reserved ones.
struct Arguments {
  const Tensor& primary;
  const std::optional<Tensor>& secondary;
  const std::optional<Tensor>& positions;
  int64_t offset;
  Form form;
  double amplitude;
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

void read_positions(const Arguments& a, Problem& p) {
  p.offset = a.offset;
  p.ramp = a.form.ramp;
  p.position_dtype = PositionDtype::kNone;
  if (!a.positions.has_value()) return;
  const View at(*a.positions);
  STD_TORCH_CHECK(at.dims == 3 && a.positions->is_cpu() && at.size[0] == p.axes,
                  "tightrope: positions must be [axes, rows|1, tokens|1]");
  STD_TORCH_CHECK(at.size[1] == 1 || at.size[1] == p.rows, "tightrope: rows of positions");
  STD_TORCH_CHECK(at.size[2] == (a.form.ramp ? 1 : p.tokens), "tightrope: tokens of positions");
  p.positions = a.positions->const_data_ptr();
  p.position_dtype = position_dtype_of(code_of(*a.positions));
  STD_TORCH_CHECK(p.cosine.data == nullptr || p.position_dtype == PositionDtype::kInt64 ||
                      p.position_dtype == PositionDtype::kInt32,
                  "tightrope: positions in a table must be integers");
  p.position_axis = at.stride[0];
  p.position_row = at.size[1] == 1 ? 0 : at.stride[1];
  p.position_token = a.form.ramp ? 0 : at.stride[2];
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
Problem problem_of(const Operands& xs, const Operands& outs, const Arguments& a) {
  const Form& form = a.form;
  STD_TORCH_CHECK(form.layout < 6, "tightrope: layout");
  STD_TORCH_CHECK(form.direction <= 2, "tightrope: direction");
  STD_TORCH_CHECK(form.reserved == 0, "tightrope: act, gate, numerics and carried are reserved");
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
  read_positions(a, p);
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

void run(const Operands& xs, const Operands& outs, Outs whose, const Arguments& a) {
  Problem p = problem_of(xs, outs, a);
  if (is_empty(p)) return;
  STD_TORCH_CHECK(whose == Outs::kNew || !memory_overlaps(p, whose), "tightrope: memory overlaps");
  const int64_t fits = p.pairs == 0 ? 16 : tightrope::kAngles / p.pairs;
  const int64_t items = divide(p, fits < 1 ? 1 : fits > 16 ? 16 : fits);
  const tightrope::Loop loop = loops().rotate;
  share(p, items, p.tile, [&](int64_t begin, int64_t end) { loop(p, begin, end); });
}

using Tensors = std::optional<std::vector<Tensor>>;

// The boxing of a function into the dispatcher wants its parameters spelled out.
#define TIGHTROPE_PARAMETERS                                                                  \
  Tensor primary, std::optional<Tensor> secondary, std::optional<Tensor> positions,          \
      int64_t offset, int64_t form, double amplitude, Tensors carried, double eps

#define TIGHTROPE_ARGUMENTS arguments_of(primary, secondary, positions, offset, form, amplitude, carried, eps)

Arguments arguments_of(const Tensor& primary, const std::optional<Tensor>& secondary,
                       const std::optional<Tensor>& positions, int64_t offset, int64_t form,
                       double amplitude, const Tensors& carried, double eps) {
  const Form what(form);
  STD_TORCH_CHECK((carried.has_value() ? carried->size() : 0) == size_t(what.learned) && eps == 0,
                  "tightrope: act, gate, numerics and carried are reserved");
  return {primary, secondary, positions, offset, what, amplitude};
}

std::vector<Tensor> rotate(Tensor q, std::optional<Tensor> k, TIGHTROPE_PARAMETERS) {
  const Operands xs(q, k);
  std::vector<Tensor> outs;
  outs.reserve(xs.count);
  for (int32_t i = 0; i < xs.count; ++i) outs.push_back(torch::stable::empty_like(*xs.tensor[i]));
  Operands to = xs;
  for (int32_t i = 0; i < xs.count; ++i) to.tensor[i] = &outs[i];
  run(xs, to, Outs::kNew, TIGHTROPE_ARGUMENTS);
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

// Tokens that share their words are summed in so many runs at most, of so many tokens at least.
constexpr int64_t kRuns = 128, kTokensPerRun = 32;

Tensor zeros(const Tensor& like, std::vector<int64_t> sizes) {
  return torch::stable::new_zeros(like, {sizes.data(), sizes.size()},
                                  torch::headeronly::ScalarType::Double);
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
  const Arguments a{words, turns, positions, offset, Form(form), 1.0};
  STD_TORCH_CHECK(a.form.source == kWords, "tightrope: tables have gradients of their own");
  Problem p = problem_of(ys, grads, a);
  const bool empty = is_empty(p);
  const int64_t sequences = p.word_rows;
  const int64_t sequence = p.word_rows == 1 ? p.rows * p.tokens : p.tokens;
  const int64_t run = std::max((sequence + kRuns - 1) / kRuns, kTokensPerRun);
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tightrope, CPU, m) {
  m.impl("rotate", TORCH_BOX(&rotate));
  m.impl("rotate_", TORCH_BOX(&rotate_));
  m.impl("rotate_into", TORCH_BOX(&rotate_into));
  m.impl("angle_gradients", TORCH_BOX(&angle_gradients));
}
