// Rotates the heads of one token, in plain loops that the compiler vectorises.
#pragma once

#include "angles.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// The loops below write results over inputs in a rotation in place, but no iteration reads what another
// one writes.
#if defined(__clang__)
#define TIGHTROPE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TIGHTROPE_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Rotates one pair.
template <class A, class Stored, class T>
inline void turn_pair(const Stored* u, const Stored* v, Stored* y, Stored* z, Row<T> r, int64_t k) {
  using F = typename A::Format;
  const T a = F::load(*u), b = F::load(*v);
  *y = F::store(A::u(a, b, r.c[k], r.s[k]));
  *z = F::store(A::apart ? A::v(a, b, r.c2[k], r.s2[k]) : A::v(a, b, r.c[k], r.s[k]));
}

// Rotates pairs (u[k], v[k]) that are contiguous in k.
template <class A, class Stored, class T>
inline void turn_halves(const Stored* u, const Stored* v, Stored* y, Stored* z, Row<T> r, int64_t n) {
  TIGHTROPE_INDEPENDENT
  for (int64_t k = 0; k < n; ++k) turn_pair<A>(u + k, v + k, y + k, z + k, r, k);
}

// Rotates pairs (x[2k], x[2k + 1]).
template <class A, class Stored, class T>
inline void turn_neighbours(const Stored* x, Stored* y, Row<T> r, int64_t n) {
  TIGHTROPE_INDEPENDENT
  for (int64_t k = 0; k < n; ++k) turn_pair<A>(x + 2 * k, x + 2 * k + 1, y + 2 * k, y + 2 * k + 1, r, k);
}

// Rotates pairs at any channel stride: correct, not fast.
template <class A, class Stored, class T>
inline void turn_strided(const Stored* x, int64_t x_channel, Stored* y, int64_t y_channel, int64_t pair,
                         int64_t other, Row<T> r, int64_t n, bool twos) {
  for (int64_t k = 0; k < n; ++k) {
    const int64_t u = k * pair, v = u + other;
    turn_pair<A>(x + u * x_channel, x + v * x_channel, y + u * y_channel, y + v * y_channel, r,
                 slot(twos, k, n));
  }
}

// ---- heads ---------------------------------------------------------------------------------------

// Heads processed together when they are far apart in memory: an L1 cache holds only 8 to 12 lines whose addresses
// differ by multiples of a large power of two, those of the results among them.
template <class Stored>
inline int64_t streams_of(const Problem& p) {
  const int64_t fit = p.head_dim == 0 ? 8 : 1536 / (p.head_dim * int64_t(sizeof(Stored)));
  return fit < 4 ? 4 : fit > 8 ? 8 : fit;
}

// Heads accumulated in the type of the values before widening to double.
constexpr int64_t kHeadsTogether = 8;

// Heads of some tokens; those of one token share their angles.
template <class Stored>
struct Heads {
  const Stored* in;  // channel 0 of the first head of the first token
  Stored* out;       // equals `in` for a rotation in place
  int64_t in_step, out_step;        // from head to head, in elements
  int64_t in_channel, out_channel;  // from channel to channel
  int64_t count;  // of one token
  int64_t ahead;  // prefetch distance in bytes; 0 for none
  bool streams;   // whether results go past the caches (large_results.h)
  int64_t tokens = 1, in_token = 0, out_token = 0;  // their number, and from token to token, in elements

  void next_token() { in += in_token, out += out_token; }

  // Bytes of a head to prefetch.
  int64_t fetched(const Problem& p) const {
    return p.fetches && ahead != 0 ? p.head_dim * int64_t(sizeof(Stored)) : 0;
  }
};

// Heads of one token with contiguous channels, with f and P; steps are from head to head.
template <class F>
struct Line {
  const typename F::Stored* in;
  typename F::Stored* out;
  const typename F::Stored* x;  // the input of the forward call, for the backward pass
  int64_t in_step, out_step, x_step;
  const typename F::Value *gate, *weight;  // or null; with registers in their order (lines.h)
  int64_t gate_step, weight_step;
  int64_t count, ahead;

  // Moves on by some heads.
  void skip(int64_t heads) {
    in += heads * in_step, out += heads * out_step;
    if (x != nullptr) x += heads * x_step;
    if (gate != nullptr) gate += heads * gate_step;
    if (weight != nullptr) weight += heads * weight_step;
  }
};

// Slopes of the heads of an operand, as exponents of 2, in the order of registers (powers.h).
struct Slopes {
  float *high, *low;  // `step` values from head to head
  int64_t step;
  int64_t count;  // values of a head; 0 if a slope is too large for powers_of
  int64_t own;    // computed values of a head: a register of them if every head has one slope for all channels
};

// Prefetches the input of a head `ahead` bytes away, and its output unless that is the input.
template <class Stored>
inline void prefetch(const Stored* in, const Stored* out, int64_t ahead, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(in) + ahead + byte);
    if (in != out) __builtin_prefetch(reinterpret_cast<const char*>(out) + ahead + byte, 1);
  }
}

// Copies the channels that do not rotate.
template <class Stored>
inline void copy_rest(const Problem& p, const Heads<Stored>& heads) {
  for (int64_t head = 0; head < heads.count; ++head) {
    const Stored* in = heads.in + head * heads.in_step;
    Stored* out = heads.out + head * heads.out_step;
    for (int64_t d = 0; d < p.start; ++d) out[d * heads.out_channel] = in[d * heads.in_channel];
    for (int64_t d = p.start + 2 * p.pairs; d < p.head_dim; ++d)
      out[d * heads.out_channel] = in[d * heads.in_channel];
  }
}

// Rotates pairs [first, first + n) of each head.
template <class A>
inline void rotate_in_loops(const Problem& p, const Heads<typename A::Stored>& heads, int64_t first,
                            int64_t n, const Row<typename A::Value>& r) {
  using Stored = typename A::Stored;
  const int64_t pair = p.interleaved ? 2 : 1;
  const int64_t other = p.interleaved ? 1 : p.pairs;
  const int64_t at = p.start + first * pair;
  const int64_t i = heads.in_channel, j = heads.out_channel;
  const int64_t bytes = heads.fetched(p);
  for (int64_t head = 0; head < heads.count; ++head) {
    const Stored* in = heads.in + head * heads.in_step;
    Stored* out = heads.out + head * heads.out_step;
    prefetch(in, out, heads.ahead, bytes);
    if (kHasRegisters<typename A::Value> || i != 1 || j != 1) {
      turn_strided<A>(in + at * i, i, out + at * j, j, pair, other, r, n, in_twos(p));
    } else if (p.interleaved) {
      turn_neighbours<A>(in + at, out + at, r, n);
    } else {
      turn_halves<A>(in + at, in + at + other, out + at, out + at + other, r, n);
    }
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
