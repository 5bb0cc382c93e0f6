// Activations of registers. Those of sigmoid and silu have an exponential of their own.
#pragma once

#include "acts.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

template <class A>
constexpr bool kHasSigmoid = kIs<A, Sigmoid> || kIs<A, Silu>;

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
  constexpr float kSteps = brief ? -23.0831203f : -46.1662407f;
  V steps[n];
  const auto each = [&](const auto& step) {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) step(i);
  };
  // Clamp, because exponent bits hold only 2^-127 to 2^127. 1 + e^-60 is already 1, and e^94 makes the
  // product overflow.
  each([&](int i) { x[i] = at_least(all<V>(-94), at_most(all<V>(60), x[i])); });
  each([&](int i) { steps[i] = fma_(x[i], all<V>(kSteps), all<V>(kRounder<float>)); });
  if (brief) {
    each([&](int i) { x[i] = fma_(x[i], all<V>(kSteps), all<V>(kRounder<float> + 23) - steps[i]); });
    each([&](int i) { steps[i] = (V)(entry_of_16(kSixteenths, (Words)steps[i]) + ((Words)steps[i] << 19)); });
    each([&](int i) { x[i] = fma_(x[i], x[i], all<V>(532.744568)); });
    each([&](int i) { x[i] = fma_(steps[i], x[i], all<V>(1)); });
    return;
  }
  each([&](int i) {
    const V rest = fms_(x[i], all<V>(kSteps), steps[i] - all<V>(kRounder<float>));
    x[i] = fma_(x[i], all<V>(-6.16308170e-7), rest);
  });
  each([&](int i) { steps[i] = (V)(entry_of_32(kThirtySeconds, (Words)steps[i]) + ((Words)steps[i] << 18)); });
  each([&](int i) { x[i] = fma_(x[i], x[i] + all<V>(92.3331604), all<V>(4262.61230)); });
  each([&](int i) { x[i] = fma_(steps[i], x[i], all<V>(1)); });
}

// Sines and cosines of angles above kLargeAngle, by the C library.
template <class A>
TIGHTROPE_LOOP void correct_large(const V& x, V* to, bool slope) {
  for (int k = 0; k < kWidest; ++k)
    if (magnitude(x[k]) > kLargeAngle) (*to)[k] = float(A::far(double(x[k]), slope));
}

// Activations that are few in models and many in instructions: a call, so that the loops around it stand in the library
// once for all of them. It replaces n registers at `to` by f of those at `x`, or, backwards, multiplies them by f' of
// those.
struct Called {
  void (*on)(const V* x, V* to, int n);
};
template <class A>
constexpr bool kIsCalled = kIs<A, Called> || kIs<A, Elu> || kIs<A, Softplus> || kIs<A, Tanh> || kIsWave<A>;

template <class A, bool brief, bool back>
void call_act(const V* x, V* to, int n) {
  for (int i = 0; i < n; ++i) {
    const V from = x[i];
    V found = back ? A::template slope<brief>(from) : A::template f<brief>(from);
    if constexpr (kIsWave<A>)
      if (any(magnitude(from) > all<V>(kLargeAngle))) correct_large<A>(from, &found, back);
    to[i] = back ? to[i] * found : found;
  }
}

// Applies f to n registers in place.
template <bool brief, int n, class A>
TIGHTROPE_INLINE void act_on(A act, V* x) {
  if constexpr (kIsCalled<A>) {
    act.on(x, x, n);
  } else if constexpr (kHasSigmoid<A>) {
    V below[n];
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) below[i] = x[i];
    one_and_exponential<brief, n>(below);
    // Division has its own execution unit: overlapped with the rest, it is cheaper than Newton's method.
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) x[i] = (kIs<A, Silu> ? x[i] : all<V>(1)) / below[i];
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) x[i] = A::template f<brief>(x[i]);
  }
}
// Multiplies n gradients g by f'(x).
template <bool brief, int n, class A>
TIGHTROPE_INLINE void slope_on(A act, const V* x, V* g) {
  if constexpr (kIsCalled<A>) {
    act.on(x, g, n);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) g[i] *= A::template slope<brief>(x[i]);
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
