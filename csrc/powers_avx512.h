// P that grows or shrinks along the positions: e^(slope · position), 16 at a time.
#pragma once

#include "lines_avx512.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// A number of more digits than float has, as a sum.
struct Sum {
  explicit Sum(double x) : high(float(x)), low(float(x - double(high))) {}
  float high, low;
};

// Slopes of the heads of an operand, of powers of two, arranged.
struct Slopes {
  float *high, *low;  // `step` values from head to head
  int64_t step;
  int64_t count;  // of a head; 0 where one is too large for powers_of
  int64_t own;    // of a head before they repeat: of one and the same slope only the first 16 are its own
};

// Slopes of a head as sums, each of powers of two. What is asked of all of them goes to `fit` and `same`.
TIGHTROPE_LOOP void split_slopes(const double* __restrict slope, float* __restrict high, float* __restrict low,
                                 int64_t n, bool* fit, bool* same) {
  int64_t large = 0, other = 0;
  for (int64_t k = 0; k < n; ++k) {
    const double x = slope[k] * 1.4426950408889634;
    const Sum sum(x);
    high[k] = sum.high, low[k] = sum.low;
    large |= magnitude(x) > 1e15;
    other |= slope[k] != slope[0];
  }
  *fit = *fit && large == 0;
  *same = *same && other == 0;
}

// `high` and `low` are rows to work in.
template <class F>
inline Slopes arrange_slopes(const Problem& p, const Part& part, int64_t heads, float* to, int64_t width, float* high,
                             float* low) {
  Slopes slopes{to, to + width, 2 * width, 0, 16};
  bool fit = true, same = true;
  for (int64_t head = 0; head < heads; ++head) {
    split_slopes(part.slope + head * part.slope_head, high, low, p.head_dim, &fit, &same);
    arrange<F>(p, high, slopes.high + head * slopes.step);
    arrange<F>(p, low, slopes.low + head * slopes.step);
  }
  for (int64_t head = 0; same && head < heads; ++head) {
    // Channels that only fill a register are none of the head's.
    const Sum sum(part.slope[head * part.slope_head] * 1.4426950408889634);
    for (int64_t k = 0; k < 16; ++k)
      slopes.high[head * slopes.step + k] = sum.high, slopes.low[head * slopes.step + k] = sum.low;
  }
  if (fit) each_span<F>(p, [&](int64_t, int64_t, int64_t at) { slopes.count = at + Span<F>::kChannels; });
  if (!same) slopes.own = slopes.count;
  return slopes;
}

// e^(slope · position) of `heads` heads from the first on, arranged. The product has more digits than
// float, and all count: it splits into an integer and what is left of it before anything is rounded.
template <bool brief>
TIGHTROPE_LOOP void powers_of(const Slopes& slopes, int64_t first, int64_t heads, double position, float* out,
                              int64_t out_step) {
  const Sum at(position);
  const V far = all(at.high), near = all(at.low);
  const int64_t own = slopes.own, count = slopes.count, step = slopes.step;
  const float *upper = slopes.high + first * step, *lower = slopes.low + first * step;
  for (int64_t head = 0; head < heads; ++head, upper += step, lower += step, out += out_step) {
    V y = all(1.0f);
    for (int64_t k = 0; k < own; k += 16) {
      const V high = _mm512_loadu_ps(upper + k), low = _mm512_loadu_ps(lower + k);
      const V whole = _mm512_maskz_roundscale_ps(kAll, times(high, far), 0x08);
      V x = fused(high, near, fused(low, far, _mm512_fmsub_ps(high, far, whole)));
      // Where not even the integer fits, nothing is left to count. A NaN stays: see ReluV.
      x = _mm512_maskz_min_ps(kAll, all(1.0f), x);
      x = _mm512_maskz_max_ps(kAll, all(-1.0f), x);
      // 2^x is 1 + x times a minimax polynomial: 9.1e-8 off, and 2.0e-9 where there are more digits.
      V p = brief ? fused(x, all(1.32647273e-3f), 9.67151299e-3f)
                  : fused(x, fused(x, all(1.5353362e-4f), 1.3398875e-3f), 9.61843692e-3f);
      p = fused(x, p, brief ? 5.55073358e-2f : 5.55033237e-2f);
      p = fused(x, p, brief ? 2.40222424e-1f : 2.40226477e-1f);
      p = fused(x, p, brief ? 6.93147004e-1f : 6.93147182e-1f);
      y = _mm512_maskz_scalef_ps(kAll, fused(x, p, 1.0f), whole);
      _mm512_storeu_ps(out + k, y);
    }
    for (int64_t k = own; k < count; k += 16) _mm512_storeu_ps(out + k, y);
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
