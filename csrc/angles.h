// Cosines and sines of a token: from phase words, with the arithmetic of the definition (angles.py), or
// from the caller's tables.
#pragma once

#include "formats.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

constexpr double kHalfRange = 9223372036854775808.0;  // 2^63
constexpr double kTurn = 18446744073709551616.0;      // one turn, in units of a phase
constexpr double kRadians = 3.40612158008655459e-19;  // 2π / 2^64

// Marks the turns of a frequency that is NaN, infinite or too large (angles.py).
constexpr int64_t kNoTurns = INT64_MIN;

// A position: an integer plus a fraction in [-1/2, 1/2], in units of 2^-63.
struct Split {
  int64_t whole;
  int64_t fraction;
  bool lost;  // NaN, infinite, or too large for an integer
};

template <class T>
inline Split split(T position) {
  if (!(position < T(4611686018427387904.0) && position > T(-4611686018427387904.0))) {
    return {0, 0, true};
  }
  const T nearest = rounded_even(position);
  return {int64_t(nearest), int64_t((position - nearest) * T(kHalfRange)), false};
}

inline Split position_at(const Problem& p, int64_t axis, int64_t row, int64_t token, int64_t head = 0) {
  const int64_t at =
      axis * p.position_axis + row * p.position_row + token * p.position_token + head * p.position_head;
  Split s = {0, 0, false};
  switch (p.position_dtype) {
    case PositionDtype::kNone:
      break;
    case PositionDtype::kInt32:
      s.whole = static_cast<const int32_t*>(p.positions)[at];
      break;
    case PositionDtype::kInt64:
      s.whole = static_cast<const int64_t*>(p.positions)[at];
      break;
    case PositionDtype::kFloat:
      s = split(static_cast<const float*>(p.positions)[at]);
      break;
    case PositionDtype::kDouble:
      s = split(static_cast<const double*>(p.positions)[at]);
      break;
  }
  s.whole = int64_t(uint64_t(s.whole) + uint64_t(p.offset) + uint64_t(p.add_index ? token : 0));
  return s;
}

// The position of a token as a double, for sums and slopes.
inline double distance_of(const Problem& p, int64_t row, int64_t token, int64_t axis = 0, int64_t head = 0) {
  const Split at = position_at(p, axis, row, token, head);
  return at.lost ? __builtin_nan("") : double(at.whole) + double(at.fraction) / kHalfRange;
}

// floor(a * b / 2^64), at most 2 too small, as in the definition (angles.py).
inline uint64_t high_product(int64_t a, int64_t b) {
  const int64_t a_high = a >> 32, a_low = a & 0xFFFFFFFF;
  const int64_t b_high = b >> 32, b_low = b & 0xFFFFFFFF;
  return uint64_t(a_high * b_high) + uint64_t((a_high * b_low) >> 32) +
         uint64_t((a_low * b_high) >> 32);
}

// Index of the phase word of pair `first` of one head.
inline int64_t word_at(const Problem& p, int64_t axis, int64_t row, int64_t head, int64_t first) {
  return ((axis * p.word_rows + (p.word_rows == 1 ? 0 : row)) * p.word_heads +
          (p.word_heads == 1 ? 0 : head)) *
             p.pairs +
         first;
}

// Row of the phase words of a token.
inline int64_t word_row(const Problem& p, int64_t row, int64_t token) { return p.words_by_token ? token : row; }

// Phases of pairs [first, first + n) of one token; returns false if the position is lost, see Split.
inline bool phases(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t first,
                   int64_t n, uint64_t* __restrict phase) {
  bool found = true;
  if (p.axes == 0)
    for (int64_t k = 0; k < n; ++k) phase[k] = 0;
  for (int64_t axis = 0; axis < p.axes; ++axis) {
    const Split s = position_at(p, axis, row, token, head);
    found = found && !s.lost;
    const int64_t at = word_at(p, axis, word_row(p, row, token), head, first);
    const int64_t* __restrict word = p.words + at;
    const uint64_t whole = uint64_t(s.whole);
    if (axis == 0) {
      for (int64_t k = 0; k < n; ++k) phase[k] = whole * uint64_t(word[k]);
    } else {
      for (int64_t k = 0; k < n; ++k) phase[k] += whole * uint64_t(word[k]);
    }
    if (s.fraction != 0) {
      for (int64_t k = 0; k < n; ++k) phase[k] += 2 * high_product(s.fraction, word[k]);
      if (p.turns != nullptr) {
        const int64_t* __restrict turn = p.turns + at;
        for (int64_t k = 0; k < n; ++k) phase[k] += 2 * (uint64_t(s.fraction) * uint64_t(turn[k]));
      }
    }
  }
  return found;
}

// Phases of one token and head, from the caller.
struct PhaseRow {
  const void* data;
  int64_t step;  // from pair to pair
};
inline PhaseRow phase_row(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t first) {
  const Strides& s = p.phase_stride;
  const int64_t at = row * s.row + head * s.head + token * s.token + first * s.channel;
  return {static_cast<const char*>(p.phases) + at * (p.phases_are_int32 ? 4 : 8), s.channel};
}

// Adds the caller's phases to those of n pairs; returns whether one of them is NaN.
template <class P, class Bits>
inline bool add_phases(const PhaseRow& from, int64_t n, uint64_t* __restrict phase) {
  const P* __restrict given = static_cast<const P*>(from.data);
  P least = 0;
  with_step(from.step, [&](auto step) {
    for (int64_t k = 0; k < n; ++k) {
      const P one = given[k * step];
      phase[k] += uint64_t(Bits(one)) << (64 - 8 * sizeof(P));
      least = one < least ? one : least;
    }
  });
  return least == P(Bits(1) << (8 * sizeof(P) - 1));
}

// Converts the remainder of a phase after its nearest quarter turn to radians in [-π/4, π/4]. In float,
// the 48 leading bits enter as two exact numbers, so only the constant and the sum round.
TIGHTROPE_INLINE void radians(uint64_t remainder, float* angle) {
  const int32_t high = int32_t(uint32_t(remainder >> 32)) >> 8;
  const int32_t low = int32_t(uint32_t(remainder >> 16) & 0xFFFFFFu);
  const float lower = fma_(float(high), -1.04216075e-14f, float(low) * 2.23223584e-14f);
  *angle = fma_(float(high), 3.74507039e-07f, lower);
}
TIGHTROPE_INLINE void radians(uint64_t remainder, double* angle) {
  *angle = double(int64_t(remainder)) * kRadians;
}

// Minimax polynomials on [-π/4, π/4]. Their errors for sine and cosine, before rounding, are 9.2e-9 and
// 7e-10 in float, 9e-18 and 4e-19 in double.
template <class T>
TIGHTROPE_INLINE void polynomials(T x, T* cosine, T* sine) {
  const T z = x * x, one = fma_(z, all<T>(-0.5), all<T>(1));
  if constexpr (kIs<T, double>) {
    *sine = fma_(x * z, polynomial(z, 1.59181152632659752e-10, -2.50511316502351815e-8, 2.75573161016178744e-6,
                                   -1.98412698367567725e-4, 8.33333333333094729e-3, -1.66666666666666646e-1), x);
    *cosine = fma_(z * z, polynomial(z, -1.13826236474746046e-11, 2.08761461465586116e-9, -2.7557317271145146e-7,
                                     2.48015872987645608e-5, -1.38888888888873965e-3, 4.16666666666666654e-2), one);
  } else {
    *sine = fma_(x * z, polynomial(z, -1.95878657e-4, 8.33274815e-3, -1.66666647e-1), x);
    *cosine = fma_(z * z, polynomial(z, 2.45479169e-5, -1.38883029e-3, 4.16666647e-2), one);
  }
}

template <class T>
inline void cos_sin(const uint64_t* __restrict phase, int64_t n, bool conjugate, T amplitude,
                    T* __restrict cosine, T* __restrict sine) {
  const T sine_amplitude = conjugate ? -amplitude : amplitude;
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t shifted = phase[k] + (uint64_t(1) << 61);
    const uint32_t quarter = uint32_t(shifted >> 62);
    T x, c, s;
    radians(phase[k] - (shifted & (uint64_t(3) << 62)), &x);
    polynomials(x, &c, &s);
    const T swapped_c = quarter & 1 ? s : c;
    const T swapped_s = quarter & 1 ? c : s;
    cosine[k] = ((quarter + 1) & 2 ? -swapped_c : swapped_c) * amplitude;
    sine[k] = (quarter & 2 ? -swapped_s : swapped_s) * sine_amplitude;
  }
}

// ---- cosines and sines of one tile ---------------------------------------------------------------

// Whether cosines and sines are stored in the order of pairs (0, 2, 4, …, 1, 3, 5, …): see Twin.
inline bool in_twos(const Problem& p) { return p.dtype == Dtype::kBFloat16 && !p.interleaved; }

// Index at which pair k of n is stored.
inline int64_t slot(bool twos, int64_t k, int64_t n) {
  return twos ? k / 2 + (k % 2) * ((n + 1) / 2) : k;
}

// A row for each token, which points into the arrays or into the caller's tables.
template <class T>
struct Angles {
  Row<T> row[kTile];
  alignas(64) T cosine[kAngles];
  alignas(64) T sine[kAngles];
};

// Copies n entries of a row of the caller's table, `step` apart, as values times `scale`.
template <class F, class T>
TIGHTROPE_LOOP void copy_entries(const typename F::Stored* __restrict from, int64_t step, int64_t n, T scale,
                                 T* __restrict out) {
  const auto copy = [&](auto step) {
    for (int64_t k = 0; k < n; ++k) {
      const T value = T(F::load(from[k * step])) * scale;
      // Replace every NaN by one without low bits: rounding others to 16 bits could give an infinity.
      out[k] = value == value ? value : T(__builtin_nan(""));
    }
  };
  step == 2 ? copy(Is<2>()) : with_step(step, copy);
}

// The same from bfloat16, next to each other, into the order of pairs in twos. Its NaNs have no low bits.
template <class T>
inline void copy_twins(const uint16_t* from, int64_t n, T scale, T* __restrict first, T* __restrict second) {
  const Twin* twins = (const Twin*)from;
  for (int64_t k = 0; k < n / 2; ++k)
    first[k] = T(even(twins[k])) * scale, second[k] = T(odd(twins[k])) * scale;
  if (n % 2) copy_entries<BFloat16>(from + n - 1, 1, 1, scale, first + n / 2);
}

// Index in a table's data of entry `first` of position `at`.
inline int64_t entry_at(const Table& table, int64_t row, int64_t head, int64_t at, int64_t first) {
  const Strides& s = table.stride;
  return row * s.row + head * s.head + at * s.token + first * s.channel;
}

// Reads the entries of n pairs from a row of the caller's table, beginning with entry `first`.
template <class T>
inline void look_up(const Problem& p, const Table& table, int64_t row, int64_t head, int64_t at,
                    int64_t first, int64_t n, T scale, T* out) {
  const int64_t step = p.table_step * table.stride.channel;
  with_format(p.table_dtype, [&](auto f) {
    using F = decltype(f);
    const auto* from = static_cast<const typename F::Stored*>(table.data) + entry_at(table, row, head, at, first);
    if (!in_twos(p)) return copy_entries<F>(from, step, n, scale, out);
    if constexpr (kTwins<F>)
      if (step == 1) return copy_twins(from, n, scale, out, out + (n + 1) / 2);
    copy_entries<F>(from, 2 * step, (n + 1) / 2, scale, out);
    copy_entries<F>(from + step, 2 * step, n / 2, scale, out + (n + 1) / 2);
  });
}

// Writes NaN for each pair whose frequency is NaN, infinite or too large (kNoTurns).
template <class T>
inline void lose(const Problem& p, int64_t row, int64_t head, int64_t first, int64_t n, bool twos,
                 T* __restrict c, T* __restrict s) {
  for (int64_t axis = 0; axis < p.axes; ++axis) {
    const int64_t* __restrict turn = p.turns + word_at(p, axis, row, head, first);
    int64_t lost = 0;
    for (int64_t k = 0; k < n; ++k) lost |= turn[k] == kNoTurns;
    for (int64_t k = 0; lost && k < n; ++k)
      if (turn[k] == kNoTurns) c[slot(twos, k, n)] = s[slot(twos, k, n)] = T(__builtin_nan(""));
  }
}

// Writes NaN for each pair whose phase is NaN.
template <class P, class T>
inline void lose(const PhaseRow& from, P nan, int64_t n, bool twos, T* __restrict c, T* __restrict s) {
  const P* given = static_cast<const P*>(from.data);
  for (int64_t k = 0; k < n; ++k)
    if (given[k * from.step] == nan) c[slot(twos, k, n)] = s[slot(twos, k, n)] = T(__builtin_nan(""));
}

// Cosines and sines of one token, and after them those of the second channels of the pairs if tables
// hold them; returns false if its position is lost or lies outside the table.
template <class T>
inline bool angles_of(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t first,
                      int64_t n, T* c, T* s) {
  const T amplitude = T(p.amplitude);
  if (p.cosine.data != nullptr) {
    const int64_t at = position_at(p, 0, row, token).whole;
    if (at < 0 || at >= p.table_length) return false;
    const T sign = p.conjugate ? -amplitude : amplitude;
    const int64_t from = first * p.table_step, other = from + p.table_other;
    look_up(p, p.cosine, row, head, at, from, n, amplitude, c);
    look_up(p, p.sine, row, head, at, p.conjugate ? other : from, n, sign, s);
    if (!has_full_tables(p)) return true;
    look_up(p, p.cosine, row, head, at, other, n, amplitude, c + n);
    // The transpose exchanges the sines of a pair.
    look_up(p, p.sine, row, head, at, p.conjugate ? from : other, n, sign, s + n);
    return true;
  }
  alignas(64) uint64_t phase[kAngles];
  if (!phases(p, row, head, token, first, n, phase)) return false;
  PhaseRow given = {nullptr, 0};
  bool gone = false;
  if (p.phases != nullptr) {
    given = phase_row(p, row, head, token, first);
    // The phases of the next head, while these are computed; past the end this is harmless.
    const int64_t ahead = p.phase_stride.head * (p.phases_are_int32 ? 4 : 8);
    for (int64_t byte = 0; byte < n * (p.phases_are_int32 ? 4 : 8); byte += kLine)
      __builtin_prefetch(static_cast<const char*>(given.data) + ahead + byte);
    gone = p.phases_are_int32 ? add_phases<int32_t, uint32_t>(given, n, phase)
                              : add_phases<int64_t, uint64_t>(given, n, phase);
  }
  const bool twos = in_twos(p);
  if (!twos) {
    cos_sin(phase, n, p.conjugate, amplitude, c, s);
  } else {
    alignas(64) uint64_t sorted[kAngles];
    for (int64_t k = 0; k < n / 2; ++k) {
      sorted[k] = phase[2 * k];
      sorted[(n + 1) / 2 + k] = phase[2 * k + 1];
    }
    if (n % 2) sorted[n / 2] = phase[n - 1];
    cos_sin(sorted, n, p.conjugate, amplitude, c, s);
  }
  if (p.turns != nullptr) lose(p, word_row(p, row, token), head, first, n, twos, c, s);
  if (!gone) return true;
  if (p.phases_are_int32) {
    lose<int32_t>(given, INT32_MIN, n, twos, c, s);
  } else {
    lose<int64_t>(given, INT64_MIN, n, twos, c, s);
  }
  return true;
}

template <class T>
inline void fill(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens,
                 int64_t first, int64_t n, Angles<T>& angles) {
  const int64_t width = row_width(p, n), other = width - n;
  for (int64_t t = 0; t < tokens; ++t) {
    T* c = angles.cosine + t * width;
    T* s = angles.sine + t * width;
    angles.row[t] = {c, s, c + other, s + other};
    // Without pairs, tables and phase words may have any sizes and strides, so read nothing.
    if (n != 0 && !angles_of(p, row, head, token + t, first, n, c, s)) {
      for (int64_t k = 0; k < width; ++k) c[k] = s[k] = T(__builtin_nan(""));
    }
  }
}

// Prefetch distance in bytes. The arithmetic of a head fills the processor's out-of-order window, so
// without prefetching it waits for each cache line (1.2 to 1.8 times longer from cold caches).
// Prefetching past the end of a tensor is harmless; prefetching memory that another thread writes is
// not (2 times longer), so for rows that are far apart the caller computes the distance.
constexpr int64_t kAhead = 6144;

// The order in which a table can be read where it is, through `order`; returns false if it cannot.
template <class F>
inline bool readable(const Problem& p, int64_t n, In* order) {
  constexpr Dtype kValue = sizeof(typename F::Value) == sizeof(double) ? Dtype::kDouble : Dtype::kFloat;
  const int64_t step = p.table_step * p.cosine.stride.channel;
  if (p.cosine.data == nullptr || n == 0 || p.amplitude != 1 || p.conjugate) return false;
  if (step != 1 || p.sine.stride.channel != p.cosine.stride.channel) return false;
  if (p.dtype != Dtype::kBFloat16) return p.table_dtype == kValue;
  // Only the registers of half pairs know the other orders, and replace NaNs as copy_entries does.
  const bool twins = p.table_dtype == Dtype::kBFloat16;
  if (p.interleaved || n % 4 != 0 || !(twins || p.table_dtype == Dtype::kFloat)) return false;
  for (int32_t i = 0; i < p.operands; ++i)
    if (p.operand[i].in_stride.channel != 1 || p.operand[i].out_stride.channel != 1) return false;
  *order = twins ? In::kTwins : In::kPairs;
  return true;
}

// Points at the rows of the caller's tables, if they hold just what the arithmetic needs; returns whether it did.
template <class F>
inline bool point(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens, int64_t first,
                  int64_t n, Angles<typename F::Value>& angles) {
  using T = typename F::Value;
  In order = In::kUsual;
  if (!readable<F>(p, n, &order)) return false;
  const int64_t entry = order == In::kTwins ? int64_t(sizeof(uint16_t)) : int64_t(sizeof(T));
  const auto start = [&](const Table& table) {
    return static_cast<const char*>(table.data) + entry_at(table, row, head, 0, first) * entry;
  };
  const char *c = start(p.cosine), *s = start(p.sine);
  const int64_t c_step = p.cosine.stride.token * entry, s_step = p.sine.stride.token * entry;
  const int64_t other = p.table_other * entry;
  // The processor fetches rows by itself only where one begins at the end of another.
  const int64_t fetched = p.fetches && c_step > n * entry ? n * entry : 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t at = position_at(p, 0, row, token + t).whole;
    if (at < 0 || at >= p.table_length) return false;
    const char *c_row = c + at * c_step, *s_row = s + at * s_step;
    for (int64_t byte = 0; byte < fetched; byte += 64)
      __builtin_prefetch(c_row + kAhead + byte), __builtin_prefetch(s_row + kAhead + byte);
    angles.row[t] = {(const T*)c_row, (const T*)s_row, (const T*)(c_row + other), (const T*)(s_row + other), order};
  }
  return true;
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
