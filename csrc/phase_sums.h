// Phase words of given angles and increments, their running sums over tokens, and the gradients of the sums.
//
// Phase words come from the same float64 operations as in the definition (words_from in angles.py), and
// integers add up to the same bits in any order. Gradients add up in double, from the last token to the
// first.
#pragma once

#include "angles.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

constexpr int64_t kEntries = 512;  // phase words that are computed at a time
constexpr uint64_t kGone = ~uint64_t(0);

// Computes the phase words of n numbers, and masks of those that are NaN, infinite or too large. A number
// that is a float has no lower part, and products with zero change nothing.
template <bool floats>
inline void words_of(const double* __restrict x, int64_t n, uint64_t* __restrict word,
                     uint64_t* __restrict gone) {
  // 1 / 2π, and its parts of 24, 24 and 53 bits.
  constexpr double kTurns = 0x1.45f306dc9c883p-3;
  constexpr double kFirst = 0x1.45f306p-3, kSecond = 0x1.b9391p-28, kThird = 0x1.529fc2757d1f5p-54;
  constexpr double kMost = 4611686018427387904.0;  // 2^62
  constexpr double kExact = 1125899906842624.0;    // 2^50
  alignas(64) double units[kEntries], fine[kEntries];
  for (int64_t i = 0; i < n; ++i) {
    const double scaled = x[i] * kTurns;
    const double fraction = (scaled - rounded_even(scaled)) * kMost;
    const double whole = rounded_even(fraction);
    const double upper = floats ? x[i] : double(float(x[i])), lower = floats ? 0.0 : x[i] - upper;
    const double second = unfused(upper * kSecond), third = unfused(x[i] * kThird);
    double error = unfused(upper * kFirst) - scaled;
    error = error + (floats ? second : second + unfused(lower * kFirst));
    error = error + (floats ? third : unfused(lower * kSecond) + third);
    const double rest = rounded_even(unfused(error * kTurn) + (fraction - whole) * 4.0);
    const double size = __builtin_fabs(scaled);
    units[i] = size < kMost ? whole : 0.0;
    fine[i] = size < kExact ? rest : 0.0;
    gone[i] = size < kMost ? 0 : kGone;
  }
  // Apart, because AVX2 has no vector conversion to int64, and would otherwise compute nothing in vectors.
  for (int64_t i = 0; i < n; ++i) word[i] = (uint64_t(int64_t(units[i])) << 2) + uint64_t(int64_t(fine[i]));
}

inline void load_angles(const PhaseSums& p, int64_t at, int64_t tokens, int64_t n, double* __restrict to) {
  const int64_t token = p.in_stride.token;
  if (p.in_stride.channel == 1 && token == n) n *= tokens, tokens = 1;
  with_format(p.dtype, [&](auto f) {
    using F = decltype(f);
    const auto* from = static_cast<const typename F::Stored*>(p.in) + at;
    with_step(p.in_stride.channel, [&](auto pair) {
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 0; k < n; ++k) to[t * n + k] = double(F::load(from[t * token + k * pair]));
    });
  });
}

// The smallest integer marks a phase that is NaN, so a phase of half a turn moves up by one unit.
inline void store_phase(uint64_t phase, uint64_t gone, int64_t* to) {
  constexpr uint64_t kMarker = uint64_t(1) << 63;
  *to = int64_t(gone ? kMarker : phase + (phase == kMarker));
}
// The upper half.
inline void store_phase(uint64_t phase, uint64_t gone, int32_t* to) {
  constexpr uint32_t kMarker = uint32_t(1) << 31;
  const uint32_t rounded = uint32_t((phase + (uint64_t(1) << 31)) >> 32);
  *to = int32_t(gone ? kMarker : rounded + (rounded == kMarker));
}

template <class Stored>
inline void store_phases(const PhaseSums& p, const uint64_t* __restrict phase, const uint64_t* __restrict gone,
                         int64_t at, int64_t n) {
  Stored* __restrict to = static_cast<Stored*>(p.out) + at;
  with_step(p.out_stride.channel, [&](auto pair) {
    for (int64_t k = 0; k < n; ++k) store_phase(phase[k], gone[k], to + k * pair);
  });
}

// Some pairs of one row and head, for a run of tokens.
struct PhaseItem {
  int64_t row, head, pair, pairs, token, tokens;

  int64_t at(const Strides& s) const {
    return row * s.row + head * s.head + token * s.token + pair * s.channel;
  }
};

inline PhaseItem phase_item(const PhaseSums& p, int64_t item) {
  const int64_t blocks = (p.pairs + kPhases - 1) / kPhases, runs = (p.tokens + p.run - 1) / p.run;
  const int64_t run = runs == 0 ? 0 : item % runs, rest = runs == 0 ? item : item / runs;
  const int64_t pair = rest % blocks * kPhases, token = run * p.run;
  return {rest / blocks / p.heads, rest / blocks % p.heads,
          pair, p.pairs - pair < kPhases ? p.pairs - pair : kPhases,
          token, p.tokens - token < p.run ? p.tokens - token : p.run};
}

// Adds up the phase words of some tokens without a NaN or a reset, and stores the sums.
template <class Stored>
inline void add_clean(const PhaseSums& p, const uint64_t* __restrict word, uint64_t* __restrict sum, int64_t at,
                      int64_t tokens, int64_t n) {
  Stored* __restrict to = static_cast<Stored*>(p.out) + at;
  for (int64_t t = 0; t < tokens; ++t, word += n, to += p.out_stride.token) {
    for (int64_t k = 0; k < n; ++k) {
      sum[k] += word[k];
      store_phase(sum[k], 0, to + k);
    }
  }
}

inline bool restarts(const PhaseSums& p, int64_t row, int64_t token) {
  return p.reset != nullptr && p.reset[row * p.reset_row + token * p.reset_token];
}

template <class Stored>
inline void add_words(const PhaseSums& p, PhaseItem i) {
  alignas(64) double x[kEntries];
  alignas(64) uint64_t word[kEntries], gone[kEntries];
  alignas(64) uint64_t sum[kPhases] = {}, lost[kPhases] = {};
  const int64_t n = i.pairs, last = (i.row * p.heads + i.head) * p.pairs + i.pair;
  if (p.start != nullptr) {
    const int64_t* start = static_cast<const int64_t*>(p.start) + i.at(p.start_stride);
    for (int64_t k = 0; k < n; ++k) {
      sum[k] = uint64_t(start[k * p.start_stride.channel]);
      lost[k] = sum[k] == uint64_t(1) << 63 ? kGone : 0;
    }
  }
  const int64_t end = i.token + i.tokens;
  while (i.token < end) {
    const int64_t tokens = end - i.token < kEntries / n ? end - i.token : kEntries / n;
    load_angles(p, i.at(p.in_stride), tokens, n, x);
    if (p.dtype == Dtype::kDouble) {
      words_of<false>(x, tokens * n, word, gone);
    } else {
      words_of<true>(x, tokens * n, word, gone);
    }
    if (p.running && p.reset == nullptr && p.out_stride.channel == 1) {
      uint64_t any = 0;
      for (int64_t k = 0; k < n; ++k) any |= lost[k];
      for (int64_t k = 0; k < tokens * n; ++k) any |= gone[k];
      if (any == 0) {
        add_clean<Stored>(p, word, sum, i.at(p.out_stride), tokens, n);
        i.token += tokens;
        continue;
      }
    }
    for (int64_t t = 0; t < tokens; ++t, ++i.token) {
      uint64_t *__restrict w = word + t * n, *__restrict g = gone + t * n;
      if (p.running) {
        if (restarts(p, i.row, i.token)) memset(sum, 0, sizeof(sum)), memset(lost, 0, sizeof(lost));
        for (int64_t k = 0; k < n; ++k) {
          w[k] = sum[k] += w[k];
          g[k] = lost[k] |= g[k];
        }
      }
      store_phases<Stored>(p, w, g, i.at(p.out_stride), n);
    }
  }
  if (!p.running) return;
  for (int64_t k = 0; k < n; ++k) store_phase(sum[k], lost[k], static_cast<int64_t*>(p.last) + last + k);
}

template <class T>
inline void add_back(const PhaseSums& p, PhaseItem i) {
  alignas(64) double sum[kPhases] = {};
  const int64_t n = i.pairs, last = (i.row * p.heads + i.head) * p.pairs + i.pair;
  if (p.start != nullptr) {
    const T* start = static_cast<const T*>(p.start) + i.at(p.start_stride);
    for (int64_t k = 0; k < n; ++k) sum[k] = double(start[k * p.start_stride.channel]);
  }
  const int64_t step = p.in_stride.channel, to_step = p.out_stride.channel;
  for (i.token = p.tokens - 1; i.token >= 0; --i.token) {
    const T* __restrict grad = static_cast<const T*>(p.in) + i.at(p.in_stride);
    T* __restrict to = static_cast<T*>(p.out) + i.at(p.out_stride);
    const auto add = [&](auto step, auto to_step) {
      for (int64_t k = 0; k < n; ++k) to[k * to_step] = T(sum[k] += double(grad[k * step]));
    };
    step == 1 && to_step == 1 ? add(Is<1>(), Is<1>()) : add(step, to_step);
    if (restarts(p, i.row, i.token)) memset(sum, 0, sizeof(sum));
  }
  for (int64_t k = 0; k < n; ++k) static_cast<T*>(p.last)[last + k] = T(sum[k]);
}

void phase_words_loop(const PhaseSums& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item)
    (p.wide ? add_words<int64_t> : add_words<int32_t>)(p, phase_item(p, item));
}

void phase_sums_loop(const PhaseSums& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item)
    (p.dtype == Dtype::kDouble ? add_back<double> : add_back<float>)(p, phase_item(p, item));
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
