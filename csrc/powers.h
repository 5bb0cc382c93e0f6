// The epilogue P of slopes, e^(slope · position), a register of channels at a time.
#pragma once

#include "lines.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// A double as the sum of two floats.
struct Sum {
  explicit Sum(double x) : high(float(x)), low(float(x - double(high))) {}
  float high, low;
};

// Converts the slopes of a head to exponents of 2. Clears `fit` if one is too large, and `same` if they
// differ.
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

// Splits and arranges the slopes of all heads; `high` and `low` are scratch rows.
template <class F>
TIGHTROPE_LOOP Slopes arrange_slopes(const Problem& p, const Part& part, int64_t heads, float* to, int64_t width,
                                     float* high, float* low) {
  Slopes slopes{to, to + width, 2 * width, 0, kWidest};
  bool fit = true, same = true;
  for (int64_t head = 0; head < heads; ++head) {
    split_slopes(part.slope + head * part.slope_head, high, low, p.head_dim, &fit, &same);
    arrange<F>(p, high, slopes.high + head * slopes.step);
    arrange<F>(p, low, slopes.low + head * slopes.step);
  }
  for (int64_t head = 0; same && head < heads; ++head) {
    // Fill the whole register: after arranging, lanes beyond the head's channels hold no slope.
    const Sum sum(part.slope[head * part.slope_head] * 1.4426950408889634);
    for (int64_t k = 0; k < kWidest; ++k)
      slopes.high[head * slopes.step + k] = sum.high, slopes.low[head * slopes.step + k] = sum.low;
  }
  if (fit) each_span<F>(p, [&](int64_t, int64_t, int64_t at) { slopes.count = at + Span<F>::kChannels; });
  if (!same) slopes.own = slopes.count;
  return slopes;
}

// Writes e^(slope · position) of `heads` heads from `first` on, in register order. The product needs more
// digits than float has: it is split into an integer and a remainder before anything is rounded.
template <class F>
TIGHTROPE_LOOP void powers_of(const Slopes& slopes, int64_t first, int64_t heads, double position, float* out,
                              int64_t out_step) {
  const Sum at(position);
  const V far = all<V>(at.high), near = all<V>(at.low);
  const int64_t own = slopes.own, count = slopes.count, step = slopes.step;
  const float *upper = slopes.high + first * step, *lower = slopes.low + first * step;
  for (int64_t head = 0; head < heads; ++head, upper += step, lower += step, out += out_step) {
    V y = all<V>(1);
    for (int64_t k = 0; k < own; k += kWidest) {
      const V high = Wide::read(upper + k), low = Wide::read(lower + k);
      const V whole = rounded_even(high * far);
      V x = fma_(high, near, fma_(low, far, fms_(high, far, whole)));
      // Clamp: for huge products the remainder means nothing. NaN stays NaN.
      x = at_least(all<V>(-1), at_most(all<V>(1), x));
      // 2^x as 1 + x times a polynomial; for |x| <= 1/2 the error is 1.1e-7 if brief, else 1.6e-8.
      const V p = Span<F>::kBrief
                      ? polynomial(x, 1.32647273e-3, 9.67151299e-3, 5.55073358e-2, 2.40222424e-1, 6.93147004e-1)
                      : polynomial(x, 1.5353362e-4, 1.3398875e-3, 9.61843692e-3, 5.55033237e-2, 2.40226477e-1,
                                   6.93147182e-1);
      y = scaled(fma_(x, p, all<V>(1)), at_least(all<V>(-252), at_most(all<V>(252), whole)));
      Wide::write<false>(out + k, y);
    }
    for (int64_t k = own; k < count; k += kWidest) Wide::write<false>(out + k, y);
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
