// The contract between the binding and the loops: plain pointers, strides, sizes and flags.
//
// Nothing here knows torch, and the loops that include it use no standard-library template: a
// template instantiated in a file compiled for AVX-512 could be the copy that the linker keeps for
// the whole program.
#pragma once

#include <stdint.h>

// What Python calls without torch.
#if defined(_WIN32)
#define TIGHTROPE_EXPORT extern "C" __declspec(dllexport)
#else
#define TIGHTROPE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace tightrope {

enum class Dtype : int32_t { kFloat, kDouble, kBFloat16, kHalf };
enum class PositionDtype : int32_t { kNone, kInt32, kInt64, kFloat, kDouble };

constexpr int kMaxOperands = 2;  // q and k

// One tensor seen as [rows, heads, tokens, channels]; strides count elements.
struct Strides {
  int64_t row, head, token, channel;
};

struct Operand {
  const void* in;
  void* out;  // == in for a rotation in place
  int64_t heads;
  Strides in_stride;
  Strides out_stride;
};

// A caller's cosines or sines, [rows|1, heads|1, length, width]; strides are 0 where a size is 1.
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
  bool conjugate;    // turn backwards
  double amplitude;  // on the rotated channels

  // Phase words, and whole turns or null: contiguous [axes, word_rows, word_heads, pairs].
  const int64_t* words;
  const int64_t* turns;
  int64_t axes, word_rows, word_heads;

  // Or tables, if their data is not null: a position is a row of them.
  Table cosine, sine;
  Dtype table_dtype;
  int64_t table_length;
  int64_t table_step;  // entries from one pair to the next

  bool angles_per_head;  // whether words or tables differ between heads

  // Position of (axis, row, token): offset + value at the strides below + (ramp ? token : 0).
  const void* positions;
  PositionDtype position_dtype;
  int64_t position_axis, position_row, position_token;
  int64_t offset;
  bool ramp;

  int64_t tile;           // tokens of one row that are handled together, of a rotation
  int64_t tiles_per_row;  // its work items are rows * tiles_per_row
};

// Handles work items [begin, end).
using Loop = void (*)(const Problem&, int64_t begin, int64_t end);

// Where gradients by angles go, or null: sums over heads and pairs, [axes, rows, tokens], and sums
// over the tokens of each run, [runs of all sequences, axes, word_heads, pairs]. Both start as zeros.
// A sequence is the tokens that share their words: those of one row, or of all.
struct AngleSums {
  double* by_position;
  double* by_frequency;
  int64_t sequence;  // tokens of a sequence
  int64_t run;       // tokens of a run
  int64_t runs;      // of a sequence
};

// As Loop over runs, of a problem whose operands are results (in) and their gradients (out, not
// written).
using AngleLoop = void (*)(const Problem&, const AngleSums&, int64_t begin, int64_t end);

// f, in the order of ACTS in activations.py.
enum class Act : int32_t {
  kNone, kRelu, kSigmoid, kSilu, kGelu, kElu, kRelu2, kSoftplus, kExp, kLeakyRelu, kTanh, kSin, kCos,
  kSoftmax, kRmsNorm
};

// What P is made of.
enum class Gate : int32_t { kNone, kLog, kSlope };

// What f and P have of one operand. "Values" are float, or double for double.
struct Part {
  const void* weight;     // of a norm: values [heads|1, head_dim], contiguous
  int64_t weight_head;    // entries from head to head, or 0
  // P, in one of three ways.
  const void* factor;     // the same for all tokens: values [rows|1, heads|1, head_dim], or null
  int64_t factor_row, factor_head;
  const double* slope;    // logarithms per position: [heads|1, head_dim], or null
  int64_t slope_head;
  const void* log;        // logarithms that differ between tokens: strides are 0 where a size is 1
  Strides log_stride;
  Dtype log_dtype;
  bool per_head;          // whether slopes or logarithms differ between heads
  const void* x;          // of the forward call: what f' is taken at
  Strides x_stride;
  double* by_weight;      // sums of each run, [runs, heads|1, head_dim], or null
};

// f and P of a problem.
struct Outer {
  Part part[kMaxOperands];
  Act act;
  Gate gate;
  bool forward;  // y = P·a·R·f(x); or dx = f'(x)ᵀ·a·R'·P·y, which is also an inverse, of P inverted
  bool invert;   // divide by P
  double eps;
  int64_t tiles;  // of a run: work items are runs of so many tiles, of which each row has its own
};

// As Loop, over runs; `scratch` are scratch_values() values of this thread's own, from a multiple of 64 bytes.
using OuterLoop = void (*)(const Problem& p, const Outer& outer, void* scratch, int64_t begin,
                           int64_t end);

// Replaces logarithms, n values, by what they are the logarithms of.
using Exponentials = void (*)(Dtype dtype, void* values, int64_t n);

// Where the gradients by one gate go, of a problem of one operand. Work items are the tokens that
// share an entry: runs of a sequence, as in AngleSums; or, by token, single tokens of one row each or
// of all rows. Each has sums of its own.
struct GateSums {
  double* to;  // [items, heads|1, channels|1], zeros at first
  int64_t sequence, run, runs;
  bool by_token;
  bool rows_share, heads_share, channels_share;
  bool times_position;
};

// Of a problem as an AngleLoop's; with scratch as an OuterLoop's.
using GateLoop = void (*)(const Problem& p, const GateSums& sums, void* scratch, int64_t begin,
                          int64_t end);

// Cosines and sines of one tile live on the stack of the loop: this many of each.
constexpr int64_t kAngles = 2048;

// Values of scratch memory that an OuterLoop needs; see Scratch in outer.h, and Rows beside it.
inline int64_t padded(int64_t n) { return (n + 31) / 32 * 32; }
// Of a head whose rotated halves and what is around them are padded each.
inline int64_t row_values(const Problem& p) { return padded(p.head_dim) + 160; }
inline int64_t scratch_values(const Problem& p, const Outer& o) {
  const int64_t width = padded(p.head_dim);
  int64_t rows = 3;
  for (int32_t i = 0; i < p.operands; ++i) rows += (o.gate == Gate::kSlope ? 4 : 2) * p.operand[i].heads;
  return 2 * p.tile * padded(p.pairs) + kMaxOperands * p.tile * width + 5 * width + rows * row_values(p);
}

struct Loops {
  Loop rotate;
  AngleLoop add_angles;
  OuterLoop outer;
  Exponentials exponentials;
  GateLoop add_gates;
};

// The loops for this processor, or for the instruction set that TIGHTROPE_CPU_ISA names; null if it
// names none.
const Loops* loops();

}  // namespace tightrope
