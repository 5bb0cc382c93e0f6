// Phase words of a geometric series of frequencies that depends on the sequence length (dynamic NTK).
//
// Fixed-point arithmetic: numbers below 1 are integers in units of 2^-128. A phase word is
// written only if the error bound proves its rounding; Python computes the others with 60 digits.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "rotate.h"

#if defined(__SIZEOF_INT128__)

namespace tightrope {
namespace {

__extension__ typedef unsigned __int128 Units;
__extension__ typedef __int128 Signed;

constexpr Units kOne96 = Units(1) << 96;

// Returns the product, too small by less than one unit.
inline Units times(Units a, Units b) {
  const uint64_t a1 = uint64_t(a >> 64), a0 = uint64_t(a), b1 = uint64_t(b >> 64), b0 = uint64_t(b);
  const Units first = Units(a1) * b0 + (Units(a0) * b0 >> 64);
  const Units second = Units(a0) * b1 + uint64_t(first);
  return Units(a1) * b1 + (first >> 64) + (second >> 64);
}

// scale^(-1/n), for a scale above 1 in multiples of 2^-96 and n * scale < 2^31. The relative error is
// below 2^-94 / n: `residue` is off by less than 2^-94, most of which is the rounding of the scale.
// Returns false if the first approximation is too far off.
bool root(Units scale, int64_t n, Units* found) {
  const double start = pow(ldexp(double(scale), -96), -1.0 / double(n));
  const Units y = start < 1 ? Units(ldexp(start, 128)) : ~Units(0);
  Units power = ~Units(0);
  Units square = y;
  for (int64_t i = n; i != 0; i >>= 1) {
    if (i & 1) power = times(power, square);
    square = times(square, square);
  }
  // With residue = 1 - scale * y^n, the root is y * (1 - residue)^(-1/n). Three terms of that series are
  // enough, since a start in double leaves a residue near n * 2^-52.
  const Signed residue = Signed(kOne96) - Signed(times(scale, power));
  const double e = ldexp(double(residue), -96);
  if (!(fabs(e) < 0x1p-33)) return false;
  const double third = e * e * double(n + 1) / (2.0 * double(n) * double(n));
  const Signed change = residue * (Signed(1) << 32) / n + Signed(ldexp(third, 128));
  *found = change < 0 ? y - times(y, Units(-change)) : y + times(y, Units(change));
  return true;
}

}  // namespace
}  // namespace tightrope

#endif

// Writes words[row][k] = round(2^64 / 2pi * ratio^k * scale^(-k / (pairs - 1))), with the scale
// 1 + growth * (lengths[row] - limit) above the limit, and 1 up to it.
//
// constants: 1 / 2pi, ratio and growth, each below 1, in units: 16 bytes each, in native byte order.
// limit, lengths: at least 0. If lengths < limit + 2^32, pairs * scale < 2^31 and growth >= 2^-60, the
//   error of a frequency is below 2^35 units.
// doubt: the error bound of a frequency, in units.
//
// Starts at `row`. Returns the first row whose rounding it cannot prove, or `rows` if all are done.
TIGHTROPE_EXPORT int64_t tightrope_stretched(const void* constants, int64_t limit,
                                             const int64_t* lengths, int64_t rows, int64_t pairs,
                                             uint64_t doubt, int64_t row, int64_t* words) {
#if defined(__SIZEOF_INT128__)
  using namespace tightrope;
  Units turn_and_ratio_and_growth[3];
  memcpy(turn_and_ratio_and_growth, constants, sizeof turn_and_ratio_and_growth);
  const auto [turn, ratio, growth] = turn_and_ratio_and_growth;
  for (; row < rows; ++row) {
    Units step = ratio;
    if (lengths[row] > limit && pairs > 1) {
      Units y;
      if (!root(kOne96 + times(Units(lengths[row] - limit) << 96, growth), pairs - 1, &y)) return row;
      step = times(step, y);
    }
    // The error of `step` is below 2^-94 / (pairs - 1) plus 4 units; that of the k-th frequency is below k
    // times that, plus k units.
    Units turns = turn;
    for (int64_t k = 0; k < pairs; ++k) {
      const Units rounded = turns + (Units(1) << 63);
      if (uint64_t(rounded) + doubt < 2 * doubt) return row;
      words[row * pairs + k] = int64_t(rounded >> 64);
      turns = times(turns, step);
    }
  }
#else
  (void)constants, (void)limit, (void)lengths, (void)rows, (void)pairs, (void)doubt, (void)words;
#endif
  return row;
}
