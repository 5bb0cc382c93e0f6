// Activations f and f' of 16 numbers in a register. If the result is rounded to bfloat16 (`brief`), the
// polynomials are short: an error below 2^-18 changes one rounding in thousands. Otherwise results are within 3 ulp.
#pragma once

#include "acts.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

using V = __m512;

// Zero-masked intrinsics stand in for the plain ones: see registers.h.
constexpr __mmask16 kAll = 0xFFFF;

TIGHTROPE_INLINE V all(float x) { return _mm512_set1_ps(x); }
TIGHTROPE_INLINE V times(V a, V b) { return _mm512_mul_ps(a, b); }
TIGHTROPE_INLINE V plus(V a, V b) { return _mm512_add_ps(a, b); }
TIGHTROPE_INLINE V fused(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
TIGHTROPE_INLINE V fused(V a, V b, float c) { return fused(a, b, all(c)); }
TIGHTROPE_INLINE V less_product(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
TIGHTROPE_INLINE V magnitude(V x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF)));
}
TIGHTROPE_INLINE V negative(V x) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0x80000000u))));
}

// e^(sign·x).
template <bool brief, int sign>
TIGHTROPE_INLINE V exponential(V x) {
  if (brief) {
    const V t = times(x, all(sign * 1.44269502f));
    // The fraction above the floor, which is how scalef splits t too.
    const V r = _mm512_maskz_reduce_ps(kAll, t, 0x09);
    V p = fused(r, all(1.3534168e-2f), 5.2011464e-2f);
    p = fused(r, p, 2.4144275e-1f);
    p = fused(r, p, 6.9300383e-1f);
    p = fused(r, p, 1.0000026f);
    return _mm512_maskz_scalef_ps(kAll, p, t);
  }
  // An infinite x would give NaN, so clamp it.
  V y = _mm512_maskz_min_ps(kAll, all(110.0f), sign < 0 ? negative(x) : x);
  y = _mm512_maskz_max_ps(kAll, all(-110.0f), y);
  const V m = _mm512_maskz_roundscale_ps(kAll, times(y, all(1.44269502f)), 0x08);
  V r = fused(m, all(-6.93145752e-1f), y);
  r = fused(m, all(-1.42860677e-6f), r);
  V p = fused(r, all(1.38145988e-3f), 8.36871658e-3f);
  p = fused(r, p, 4.16683890e-2f);
  p = fused(r, p, 1.66665211e-1f);
  p = fused(r, p, 4.99999940e-1f);
  p = plus(fused(times(r, r), p, r), all(1.0f));
  return _mm512_maskz_scalef_ps(kAll, p, m);
}

// a / d for d >= 1, by Newton's method; 0 for d above 2^126.
template <bool brief>
TIGHTROPE_INLINE V quotient(V a, V d) {
  const auto fits = _mm512_cmp_ps_mask(d, all(8.5070592e37f), _CMP_NGT_UQ);
  V r = _mm512_maskz_rcp14_ps(kAll, d);
  r = fused(r, less_product(d, r, all(1.0f)), r);
  if (brief) return _mm512_maskz_mul_ps(fits, a, r);
  const V q = times(a, r);
  return _mm512_maskz_fmadd_ps(fits, less_product(d, q, a), r, q);
}

// 1 + e^-x; infinite where float overflows.
//
// e^-x is a product of 2^(j/N), read from a table, of 2^i, added to the entry's exponent bits as an
// integer, and of a polynomial of degree 2. A longer polynomial in place of the table would take two more fused
// multiply-adds. If brief, the polynomial is a completed square, centred at a whole number of steps: one
// fused multiply-add evaluates it.
alignas(64) constexpr int32_t kSixteenths[16] = {
    // 9.41845871e-4 · 2^(j/16), minus j in the bits to which j is added. Two entries are off by a few units
    // on purpose: with them, silu is rounded wrongly for only one bfloat16 x, 2^-7, and sigmoid for two.
    // All three results are near ties.
    0x3A76E635, 0x3A78EA4B, 0x3A769F6E, 0x3A749541, 0x3A72CEA3, 0x3A714E90, 0x3A701825, 0x3A6F2EAE,
    0x3A6E958A, 0x3A6E504A, 0x3A6E62A6, 0x3A6ED083, 0x3A6F9DDF, 0x3A70CF05, 0x3A726859, 0x3A746E78,
};
alignas(64) constexpr int32_t kThirtySeconds[32] = {
    // 2.34597918e-4 · 2^(j/32), minus j in the same way.
    0x3975FE66, 0x3977615C, 0x39787142, 0x39774143, 0x39762109, 0x397510EB, 0x39741144, 0x39732270,
    0x397244CD, 0x397178BC, 0x3970BEA0, 0x397016DC, 0x396F81D9, 0x396EFFFE, 0x396E91B7, 0x396E3772,
    0x396DF1A0, 0x396DC0B2, 0x396DA51F, 0x396D9F5D, 0x396DAFE6, 0x396DD739, 0x396E15D5, 0x396E6C3B,
    0x396EDAF2, 0x396F6282, 0x39700376, 0x3970BE5D, 0x397193C7, 0x3972844A, 0x3973907E, 0x3974B8FD,
};
// Does each step on n registers before the next step: the dependent steps of one register alone would
// fill the processor's out-of-order window.
template <bool brief, int n>
TIGHTROPE_INLINE void one_and_exponential(V* x) {
  constexpr float kShift = 12582912.0f;  // 1.5 · 2^23: sums have their integer in the lowest bits
  constexpr float kSteps = brief ? -23.0831203f : -46.1662407f;
  V steps[n];
  const auto each = [&](const auto& step) {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) step(i);
  };
  // Clamp, because exponent bits hold only 2^-127 to 2^127. 1 + e^-60 is already 1, and e^94 makes the
  // product overflow. NaN stays NaN: if its operands do not compare, the instruction returns the second.
  each([&](int i) { x[i] = _mm512_maskz_min_ps(kAll, all(60.0f), x[i]); });
  each([&](int i) { x[i] = _mm512_maskz_max_ps(kAll, all(-94.0f), x[i]); });
  each([&](int i) { steps[i] = fused(x[i], all(kSteps), kShift); });
  if (brief) {
    each([&](int i) { x[i] = fused(x[i], all(kSteps), _mm512_sub_ps(all(kShift + 23.0f), steps[i])); });
    each([&](int i) {
      const __m512i k = _mm512_castps_si512(steps[i]);
      const __m512i row = _mm512_maskz_permutexvar_epi32(kAll, k, _mm512_load_si512(kSixteenths));
      steps[i] = _mm512_castsi512_ps(_mm512_add_epi32(row, _mm512_maskz_slli_epi32(kAll, k, 19)));
    });
    each([&](int i) { x[i] = fused(x[i], x[i], 532.744568f); });
    each([&](int i) { x[i] = fused(steps[i], x[i], 1.0f); });
    return;
  }
  each([&](int i) {
    const V whole = _mm512_sub_ps(steps[i], all(kShift));
    x[i] = fused(x[i], all(-6.16308170e-7f), _mm512_maskz_fmsub_ps(kAll, x[i], all(kSteps), whole));
  });
  each([&](int i) {
    const __m512i k = _mm512_castps_si512(steps[i]);
    const __m512i row = _mm512_permutex2var_epi32(_mm512_load_si512(kThirtySeconds), k,
                                                  _mm512_load_si512(kThirtySeconds + 16));
    steps[i] = _mm512_castsi512_ps(_mm512_add_epi32(row, _mm512_maskz_slli_epi32(kAll, k, 18)));
  });
  each([&](int i) { x[i] = fused(x[i], plus(x[i], all(92.3331604f)), 4262.61230f); });
  each([&](int i) { x[i] = fused(steps[i], x[i], 1.0f); });
}

// a / (1 + e^-x). Division has its own execution unit: overlapped with the rest, it is
// cheaper than Newton's method.
template <bool brief, int n>
TIGHTROPE_INLINE void by_sigmoid(const V* a, V* x) {
  V d[n];
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) d[i] = x[i];
  one_and_exponential<brief, n>(d);
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) x[i] = _mm512_div_ps(a[i], d[i]);
}

// Each activation: f, and `back`, which multiplies a gradient g by f'(x). For f of sigmoid and silu, see
// Several.
struct NoneV {
  template <bool brief> static TIGHTROPE_INLINE V f(V x) { return x; }
  template <bool brief> static TIGHTROPE_INLINE V back(V, V g) { return g; }
};
struct ReluV {
  // NaN stays NaN: if its operands do not compare, the instruction returns the second.
  template <bool brief> static TIGHTROPE_INLINE V f(V x) { return _mm512_maskz_max_ps(kAll, all(0.0f), x); }
  // Multiplies by 0 or 1, so NaN and infinite gradients give what the plain loop gives.
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) {
    return times(g, _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(0.0f), _CMP_GT_OQ), all(1.0f)));
  }
};
struct Relu2V {
  template <bool brief> static TIGHTROPE_INLINE V f(V x) {
    const V y = ReluV::f<brief>(x);
    return times(y, y);
  }
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) {
    const V y = ReluV::f<brief>(x);
    return times(g, plus(y, y));
  }
};
struct LeakyReluV {
  template <bool brief> static TIGHTROPE_INLINE V f(V x) {
    return _mm512_mask_mul_ps(x, _mm512_cmp_ps_mask(x, all(0.0f), _CMP_NGT_UQ), x, all(0.01f));
  }
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) {
    return _mm512_mask_mul_ps(g, _mm512_cmp_ps_mask(x, all(0.0f), _CMP_NGT_UQ), g, all(0.01f));
  }
};
struct SigmoidV {
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) {
    // σ' is an even function; at -|x| nothing overflows or cancels.
    const V e = exponential<brief, -1>(magnitude(x)), d = plus(all(1.0f), e);
    const V r = quotient<brief>(all(1.0f), d);
    return times(g, times(times(e, r), r));
  }
};
struct SiluV {
  // σ(x) (1 + x σ(-x)), both σ without cancellation.
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) {
    const V e = exponential<brief, -1>(magnitude(x));
    const V r = quotient<brief>(all(1.0f), plus(all(1.0f), e)), other = times(e, r);
    const auto below = _mm512_cmp_ps_mask(x, all(0.0f), _CMP_LT_OQ);
    const V here = _mm512_mask_mov_ps(r, below, other), there = _mm512_mask_mov_ps(other, below, r);
    return times(g, times(here, fused(x, there, 1.0f)));
  }
};
struct ExpV {
  template <bool brief> static TIGHTROPE_INLINE V f(V x) { return exponential<brief, 1>(x); }
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) { return times(g, f<brief>(x)); }
};
struct GeluV {
  // See below() in acts.h.
  template <bool brief> static TIGHTROPE_INLINE V share(V x, V* density) {
    const V t = magnitude(x), u = quotient<brief>(all(1.0f), fused(all(0.33f), t, 1.0f));
    V p = fused(u, all(-2.58295406e-2f), 1.48384750e-1f);
    p = fused(u, p, -3.21950585e-1f);
    p = fused(u, p, 2.91249514e-1f);
    p = fused(u, p, -1.06579654e-1f);
    p = fused(u, p, 1.45839244e-1f);
    p = fused(u, p, 1.03721328e-1f);
    p = fused(u, p, 1.33680001e-1f);
    p = fused(u, p, 1.31478593e-1f);
    p = fused(u, p, 6.33963373e-6f);
    const V square = times(t, t);
    V e = exponential<brief, 1>(times(square, all(-0.5f)));
    if (!brief) {
      const V rest = _mm512_fmsub_ps(t, t, square);
      const auto near = _mm512_cmp_ps_mask(square, all(1e30f), _CMP_LT_OQ);
      e = _mm512_mask_mov_ps(e, near, fused(times(e, rest), all(-0.5f), e));
    }
    *density = e;
    const V tail = times(e, p);
    return _mm512_mask_sub_ps(tail, _mm512_cmp_ps_mask(x, all(0.0f), _CMP_GT_OQ), all(1.0f), tail);
  }
  template <bool brief> static TIGHTROPE_INLINE V f(V x) {
    V density;
    return times(x, share<brief>(x, &density));
  }
  template <bool brief> static TIGHTROPE_INLINE V back(V x, V g) {
    V density;
    const V below = share<brief>(x, &density);
    return times(g, fused(times(x, all(0.398942280f)), density, below));
  }
};

// Applies f to n registers, at most 4, in place.
template <class A, bool brief, int n>
struct Several {
  static TIGHTROPE_INLINE void f(V* x) {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) x[i] = A::template f<brief>(x[i]);
  }
};
template <bool brief, int n>
struct Several<SigmoidV, brief, n> {
  static TIGHTROPE_INLINE void f(V* x) {
    const V ones[4] = {all(1.0f), all(1.0f), all(1.0f), all(1.0f)};
    by_sigmoid<brief, n>(ones, x);
  }
};
template <bool brief, int n>
struct Several<SiluV, brief, n> {
  static TIGHTROPE_INLINE void f(V* x) { by_sigmoid<brief, n>(x, x); }
};

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
