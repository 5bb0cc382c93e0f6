// The contract between the binding and the loops: plain pointers, strides, sizes and flags.
//
// Nothing here knows torch, and the loops that include it use no standard-library template: a
// template instantiated in a file compiled for AVX-512 could be the copy that the linker keeps for
// the whole program.
#pragma once

#include <stdint.h>

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

// Cosines and sines of one tile live on the stack of the loop: this many of each.
constexpr int64_t kAngles = 2048;

struct Loops {
  Loop rotate;
  AngleLoop add_angles;
};

// The loops for this processor, or for the instruction set that TIGHTROPE_CPU_ISA names; null if it
// names none.
const Loops* loops();

}  // namespace tightrope
