// The contract between the binding and the loops: plain pointers, strides, sizes and flags.
//
// Nothing here depends on torch. The loops that include this file use no standard-library template:
// otherwise the linker could use a copy that was compiled for AVX-512 in the whole program.
#pragma once

#include <stdint.h>

// Marks functions that Python calls directly, without torch.
#if defined(_WIN32)
#define TIGHTROPE_EXPORT extern "C" __declspec(dllexport)
#else
#define TIGHTROPE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace tightrope {

enum class Dtype : int32_t { kFloat, kDouble, kBFloat16, kHalf };
// Where a rotation rounds, in the order of ROUNDINGS in ops/schema.py: once, at the store, with fused
// multiply-adds; products and their sum each to the type of the arithmetic; or to the type of x.
enum class Rounding : int32_t { kOnce, kWide, kEach };

enum class PositionDtype : int32_t { kNone, kInt32, kInt64, kFloat, kDouble };

constexpr int kMaxOperands = 2;  // q and k

// Strides of a tensor as [rows, heads, tokens, channels], in elements.
struct Strides {
  int64_t row, head, token, channel;
};

struct Operand {
  const void* in;
  void* out;  // equals `in` for a rotation in place
  int64_t heads;
  Strides in_stride;
  Strides out_stride;
  int64_t blocks, entries;  // sizes of `out` along its rows and tokens, which are those of the problem or of a cache
  bool streams = false;  // whether a rotation streams this result past the caches (large_results.h)
  // For a cache: where in `out` each token of [rows, tokens] goes, in elements; -1 for nowhere. In place the token
  // also comes from there.
  const int64_t* places = nullptr;

  // Elements from the first of `in` to those of a token whose results go to `place`.
  int64_t source_of(int64_t row, int64_t token, int64_t place) const {
    return places != nullptr && in == out ? place : row * in_stride.row + token * in_stride.token;
  }
};

// The caller's cosines or sines, [rows|1, heads|1, length, width]; the stride is 0 for a size of 1.
struct Table {
  const void* data;
  Strides stride;
};

struct Problem {
  Operand operand[kMaxOperands];
  int32_t operands;
  Dtype dtype;
  int64_t rows, tokens, head_dim;
  int64_t start, pairs;
  bool interleaved;
  bool conjugate;    // rotate backwards
  double amplitude;  // factor on the rotated channels
  Rounding rounding;
  bool narrow;  // cosines and sines from phase words round to the type of x

  // Phase words, and whole turns or null; contiguous [axes, word_rows, word_heads, pairs].
  const int64_t* words;
  const int64_t* turns;
  int64_t axes, word_rows, word_heads;
  bool words_by_token = false;  // whether rows of phase words belong to tokens, not to rows

  // Phases of each token, if not null; those of phase words, if there are any, are added to them. In units
  // of 2^-64 turn, or in int32 in units of 2^-32; the smallest number stands for NaN. [phase_rows|1,
  // phase_heads|1, tokens, pairs]; the stride is 0 for a size of 1.
  const void* phases;
  bool phases_are_int32;
  int64_t phase_rows, phase_heads;
  Strides phase_stride;

  // Tables instead, if their data is not null: a position is then an index along `length`.
  Table cosine, sine;
  Dtype table_dtype;
  int64_t table_length;
  int64_t table_step;   // entries from one pair to the next
  int64_t table_other;  // entries from the first to the second channel of a pair; 0 if they share one

  bool angles_per_head;  // whether phase words, tables, phases or positions differ between heads

  // Position of (axis, row, token, head): offset + positions[axis, row, token, head] + (add_index ? token : 0).
  const void* positions;
  PositionDtype position_dtype;
  int64_t position_axis, position_row, position_token, position_head;
  int64_t position_heads;  // 1, or the number of heads
  int64_t offset;
  bool add_index;

  int64_t tile;           // tokens of one row that are processed together
  int64_t tiles_per_row;
  // A rotation computes the angles of a tile once for `together` rows, which is 1 or all. It divides their
  // heads into `parts`: it has rows / together * tiles_per_row * parts work items.
  int64_t together, parts;
  bool fetches;  // whether a rotation prefetches, because its tensors may not be in the caches
};

// Elements from the first of the results to those of a token; -1 if the token goes nowhere.
inline int64_t place_of(const Problem& p, const Operand& o, int64_t row, int64_t token) {
  if (o.places != nullptr) return o.places[row * p.tokens + token];
  return row * o.out_stride.row + token * o.out_stride.token;
}

// Processes work items [begin, end).
using Loop = void (*)(const Problem&, int64_t begin, int64_t end);

// Outputs of the gradients of angles, or null: sums over pairs and the heads that share a position,
// [axes, rows, tokens, position_heads], and
// sums over the tokens of each run, [runs of all sequences, axes, word_heads, pairs]. The caller sets
// both to zero. A sequence is the tokens that share phase words: those of one row, or of all rows.
// Gradients of the phases of each token have their shape and the type of the arithmetic; then a sequence is
// the tokens of one row of phases.
struct AngleSums {
  double* by_position;
  double* by_frequency;
  void* by_phase;
  int64_t sequence;  // tokens of a sequence
  int64_t run;       // tokens of a run
  int64_t runs;      // runs of a sequence
};

// Like Loop; work items are runs. The operands hold results (in) and their gradients (out, only read).
using AngleLoop = void (*)(const Problem&, const AngleSums&, int64_t begin, int64_t end);

// f, in the order of ACTS in activations.py.
enum class Act : int32_t {
  kNone, kRelu, kSigmoid, kSilu, kGelu, kElu, kRelu2, kSoftplus, kExp, kLeakyRelu, kTanh, kSin, kCos,
  kSoftmax, kRmsNorm
};

// The kind of P.
enum class Gate : int32_t { kNone, kLog, kSlope, kFactor };

// Tensors of f and P for one operand, of any type but double.
struct Part {
  const float* weight;    // of a norm: [heads|1, head_dim], contiguous
  int64_t weight_head;    // entries from head to head, or 0
  // P, in one of three forms.
  const float* factor;    // equal for all tokens: [rows|1, heads|1, head_dim], or null
  int64_t factor_row, factor_head;
  const double* slope;    // logarithms per position: [heads|1, head_dim], or null
  int64_t slope_head;
  const void* log;        // logarithms, or with kFactor factors, that differ between tokens; the stride is 0 for a size of 1
  Strides log_stride;
  Dtype log_dtype;
  bool per_head;          // whether slopes or logarithms differ between heads
  const void* x;          // the input of the forward call, at which f' is evaluated
  Strides x_stride;
  double* by_weight;      // gradient of the weight, a sum per run, [runs, heads|1, head_dim], or null
};

// The prologue f and epilogue P of a problem.
struct Stages {
  Part part[kMaxOperands];
  Act act;
  Gate gate;
  bool forward;  // true: y = P·a·R·f(x); false: dx = f'(x)ᵀ·a·R(-φ)·P·dy, or with `invert` the inverse
  bool invert;   // divide by P
  double eps;
  int64_t tiles;  // tiles of a run; work items are runs, and no tile spans two rows
};

// Like Loop; work items are runs. `scratch` holds scratch_values() values of this thread, 64-byte aligned.
using StagesLoop = void (*)(const Problem& p, const Stages& stages, void* scratch, int64_t begin,
                           int64_t end);

// Replaces n values by their exponentials.
using Exponentials = void (*)(float* values, int64_t n);

// Output of the gradient of one gate, of a problem with one operand. A work item is the tokens that
// share an entry: a run of a sequence, as in AngleSums; or, if `by_token`, one token of one row or of all
// rows. Each item has its own sums.
struct GateSums {
  double* to;  // [items, heads|1, channels|1]; the caller sets it to zero
  int64_t sequence, run, runs;
  bool by_token;
  bool rows_share, heads_share, channels_share;
  bool times_position;
};

// Takes a problem like that of an AngleLoop, and scratch memory like a StagesLoop.
using GateLoop = void (*)(const Problem& p, const GateSums& sums, void* scratch, int64_t begin,
                          int64_t end);

// Running sums of phase words, or of gradients (see phase_words and phase_sums in ops/schema.py). A work
// item is up to kPhases pairs of one row and head, and up to `run` tokens.
struct PhaseSums {
  const void* in;  // angles or increments, or gradients, which are float or double
  void* out;
  Dtype dtype;  // of `in`
  Strides in_stride, out_stride;
  int64_t rows, heads, tokens, pairs, run;
  const uint8_t* reset;  // whether a sum starts at a token, or null
  int64_t reset_row, reset_token;
  const void* start;  // the sums before the first token, or of gradients after the last; or null
  Strides start_stride;
  void* last;    // the sums at the other end, contiguous [rows, heads, pairs], or null
  bool running;  // sums, not the phase words alone
  bool wide;     // store 64-bit phase words, not their upper halves
};
constexpr int64_t kPhases = 32;

using PhaseLoop = void (*)(const PhaseSums&, int64_t begin, int64_t end);

// Bytes of a cache line.
constexpr int64_t kLine = 64;

// The loop keeps this many cosines, and as many sines, of a tile on its stack.
constexpr int64_t kAngles = 2048;
// Most tokens of a tile.
constexpr int64_t kTile = 64;

// Whether tables hold a cosine and a sine for every channel.
inline bool has_full_tables(const Problem& p) { return p.table_other != 0; }
// Number of cosines for n pairs.
inline int64_t row_width(const Problem& p, int64_t n) { return has_full_tables(p) ? 2 * n : n; }

inline int64_t padded(int64_t n) { return (n + 31) / 32 * 32; }
// Number of values of a head when its rotated halves and its other channels are each padded.
inline int64_t row_values(const Problem& p) { return padded(p.head_dim) + 160; }
// Number of values of scratch memory that a StagesLoop needs; see Scratch in stages.h.
inline int64_t scratch_values(const Problem& p, const Stages& o) {
  const int64_t width = padded(p.head_dim);
  int64_t rows = 3;
  for (int32_t i = 0; i < p.operands; ++i) rows += (o.gate == Gate::kSlope ? 4 : 2) * p.operand[i].heads;
  return 2 * p.tile * padded(p.pairs) + kMaxOperands * p.tile * width + 4 * width + rows * row_values(p);
}

struct Loops {
  Loop rotate;
  AngleLoop add_angles;
  StagesLoop stages;
  Exponentials exponentials;
  GateLoop add_gates;
  PhaseLoop phase_words, phase_sums;
};

// Returns the loops for the instruction set in use (see dispatch.cpp); null if TIGHTROPE_CPU_ISA names
// one that this processor or this build lacks.
const Loops* loops();
// Whether this processor has one of the instruction sets.
bool can_run();

}  // namespace tightrope
