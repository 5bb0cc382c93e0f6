// Rotates one head of one token, in plain loops that the compiler vectorises.
#pragma once

#include "angles.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Rotates pairs (u[k], v[k]) that are contiguous in k. In place and out of place need different
// `restrict` qualifiers, hence two functions.
template <class F>
inline void turn_halves_(typename F::Stored* __restrict u, typename F::Stored* __restrict v,
                         const typename F::Value* __restrict c,
                         const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(u[k]), b = F::load(v[k]);
    u[k] = F::store(turned_u(a, b, c[k], s[k]));
    v[k] = F::store(turned_v(a, b, c[k], s[k]));
  }
}
template <class F>
inline void turn_halves(const typename F::Stored* __restrict u,
                        const typename F::Stored* __restrict v, typename F::Stored* __restrict y,
                        typename F::Stored* __restrict z, const typename F::Value* __restrict c,
                        const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(u[k]), b = F::load(v[k]);
    y[k] = F::store(turned_u(a, b, c[k], s[k]));
    z[k] = F::store(turned_v(a, b, c[k], s[k]));
  }
}

inline void turn_twins_(Twin* __restrict u, Twin* __restrict v, const float* __restrict c,
                        const float* __restrict s, const float* __restrict d,
                        const float* __restrict t, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t a = u[k], b = v[k];
    u[k] = twin(turned_u(even(a), even(b), c[k], s[k]), turned_u(odd(a), odd(b), d[k], t[k]));
    v[k] = twin(turned_v(even(a), even(b), c[k], s[k]), turned_v(odd(a), odd(b), d[k], t[k]));
  }
}
inline void turn_twins(const Twin* __restrict u, const Twin* __restrict v, Twin* __restrict y,
                       Twin* __restrict z, const float* __restrict c, const float* __restrict s,
                       const float* __restrict d, const float* __restrict t, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const uint32_t a = u[k], b = v[k];
    y[k] = twin(turned_u(even(a), even(b), c[k], s[k]), turned_u(odd(a), odd(b), d[k], t[k]));
    z[k] = twin(turned_v(even(a), even(b), c[k], s[k]), turned_v(odd(a), odd(b), d[k], t[k]));
  }
}

template <>
inline void turn_halves_<BFloat16>(uint16_t* __restrict u, uint16_t* __restrict v,
                                   const float* __restrict c, const float* __restrict s,
                                   int64_t n) {
  const int64_t first = (n + 1) / 2;
  turn_twins_((Twin*)u, (Twin*)v, c, s, c + first, s + first, n / 2);
  if (n % 2) {
    const float a = BFloat16::load(u[n - 1]), b = BFloat16::load(v[n - 1]);
    u[n - 1] = BFloat16::store(turned_u(a, b, c[first - 1], s[first - 1]));
    v[n - 1] = BFloat16::store(turned_v(a, b, c[first - 1], s[first - 1]));
  }
}
template <>
inline void turn_halves<BFloat16>(const uint16_t* __restrict u, const uint16_t* __restrict v,
                                  uint16_t* __restrict y, uint16_t* __restrict z,
                                  const float* __restrict c, const float* __restrict s,
                                  int64_t n) {
  const int64_t first = (n + 1) / 2;
  turn_twins((const Twin*)u, (const Twin*)v, (Twin*)y, (Twin*)z, c, s, c + first, s + first, n / 2);
  if (n % 2) {
    const float a = BFloat16::load(u[n - 1]), b = BFloat16::load(v[n - 1]);
    y[n - 1] = BFloat16::store(turned_u(a, b, c[first - 1], s[first - 1]));
    z[n - 1] = BFloat16::store(turned_v(a, b, c[first - 1], s[first - 1]));
  }
}

#if defined(__F16C__)
// Half precision through the conversion instructions, with the same bits as Half::load and Half::store,
// which process the remaining elements.
constexpr int64_t kLanes = 8;
using Lanes = __m256;
using HalfLanes = __m128i;
inline HalfLanes read(const uint16_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline void write(uint16_t* p, HalfLanes x) { _mm_storeu_si128((__m128i*)p, x); }
inline Lanes widen(HalfLanes x) { return _mm256_cvtph_ps(x); }
inline HalfLanes narrow(Lanes x) { return _mm256_cvtps_ph(x, 0); }
inline Lanes read(const float* p) { return _mm256_loadu_ps(p); }
inline Lanes turned_u(Lanes u, Lanes v, Lanes c, Lanes s) {
  return _mm256_fmsub_ps(u, c, _mm256_mul_ps(v, s));
}
inline Lanes turned_v(Lanes u, Lanes v, Lanes c, Lanes s) {
  return _mm256_fmadd_ps(v, c, _mm256_mul_ps(u, s));
}
inline void read_pairs(const uint16_t* p, HalfLanes* u, HalfLanes* v) {
  const __m256i words = _mm256_loadu_si256((const __m256i*)p);
  // Gather the lower halves of the words, 4 in each 128-bit lane, then join the lanes.
  const __m256i lower = _mm256_set_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 9, 8, 5, 4, 1, 0,
                                        -1, -1, -1, -1, -1, -1, -1, -1, 13, 12, 9, 8, 5, 4, 1, 0);
  const __m256i a = _mm256_shuffle_epi8(words, lower);
  const __m256i b = _mm256_shuffle_epi8(_mm256_srli_epi32(words, 16), lower);
  *u = _mm256_castsi256_si128(_mm256_permute4x64_epi64(a, 0x08));
  *v = _mm256_castsi256_si128(_mm256_permute4x64_epi64(b, 0x08));
}
inline void write_pairs(uint16_t* p, HalfLanes u, HalfLanes v) {
  write(p, _mm_unpacklo_epi16(u, v));
  write(p + 8, _mm_unpackhi_epi16(u, v));
}

// Reads each block before writing it, so outputs may be the inputs: no `restrict`.
inline void turn_half_lanes(const uint16_t* u, const uint16_t* v, uint16_t* y, uint16_t* z,
                            const float* c, const float* s, int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    const Lanes a = widen(read(u + k)), b = widen(read(v + k));
    write(y + k, narrow(turned_u(a, b, read(c + k), read(s + k))));
    write(z + k, narrow(turned_v(a, b, read(c + k), read(s + k))));
  }
  for (; k < n; ++k) {
    const float a = Half::load(u[k]), b = Half::load(v[k]);
    y[k] = Half::store(turned_u(a, b, c[k], s[k]));
    z[k] = Half::store(turned_v(a, b, c[k], s[k]));
  }
}
template <>
inline void turn_halves<Half>(const uint16_t* __restrict u, const uint16_t* __restrict v,
                              uint16_t* __restrict y, uint16_t* __restrict z,
                              const float* __restrict c, const float* __restrict s, int64_t n) {
  turn_half_lanes(u, v, y, z, c, s, n);
}
template <>
inline void turn_halves_<Half>(uint16_t* __restrict u, uint16_t* __restrict v,
                               const float* __restrict c, const float* __restrict s, int64_t n) {
  turn_half_lanes(u, v, u, v, c, s, n);
}
#endif

// Rotates pairs (x[2k], x[2k + 1]).
template <class F>
inline void turn_neighbours_(typename F::Stored* __restrict x,
                             const typename F::Value* __restrict c,
                             const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(x[2 * k]), b = F::load(x[2 * k + 1]);
    x[2 * k] = F::store(turned_u(a, b, c[k], s[k]));
    x[2 * k + 1] = F::store(turned_v(a, b, c[k], s[k]));
  }
}
template <class F>
inline void turn_neighbours(const typename F::Stored* __restrict x,
                            typename F::Stored* __restrict y,
                            const typename F::Value* __restrict c,
                            const typename F::Value* __restrict s, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    const typename F::Value a = F::load(x[2 * k]), b = F::load(x[2 * k + 1]);
    y[2 * k] = F::store(turned_u(a, b, c[k], s[k]));
    y[2 * k + 1] = F::store(turned_v(a, b, c[k], s[k]));
  }
}

template <>
inline void turn_neighbours_<BFloat16>(uint16_t* __restrict x, const float* __restrict c,
                                       const float* __restrict s, int64_t n) {
  Twin* __restrict p = (Twin*)x;
  for (int64_t k = 0; k < n; ++k) {
    const float a = even(p[k]), b = odd(p[k]);
    p[k] = twin(turned_u(a, b, c[k], s[k]), turned_v(a, b, c[k], s[k]));
  }
}
template <>
inline void turn_neighbours<BFloat16>(const uint16_t* __restrict x, uint16_t* __restrict y,
                                      const float* __restrict c, const float* __restrict s,
                                      int64_t n) {
  const Twin* __restrict p = (const Twin*)x;
  Twin* __restrict q = (Twin*)y;
  for (int64_t k = 0; k < n; ++k) {
    const float a = even(p[k]), b = odd(p[k]);
    q[k] = twin(turned_u(a, b, c[k], s[k]), turned_v(a, b, c[k], s[k]));
  }
}

#if defined(__F16C__)
inline void turn_neighbour_lanes(const uint16_t* x, uint16_t* y, const float* c, const float* s,
                                 int64_t n) {
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    HalfLanes u, v;
    read_pairs(x + 2 * k, &u, &v);
    const Lanes a = widen(u), b = widen(v);
    write_pairs(y + 2 * k, narrow(turned_u(a, b, read(c + k), read(s + k))),
                narrow(turned_v(a, b, read(c + k), read(s + k))));
  }
  for (; k < n; ++k) {
    const float a = Half::load(x[2 * k]), b = Half::load(x[2 * k + 1]);
    y[2 * k] = Half::store(turned_u(a, b, c[k], s[k]));
    y[2 * k + 1] = Half::store(turned_v(a, b, c[k], s[k]));
  }
}
template <>
inline void turn_neighbours<Half>(const uint16_t* __restrict x, uint16_t* __restrict y,
                                  const float* __restrict c, const float* __restrict s,
                                  int64_t n) {
  turn_neighbour_lanes(x, y, c, s, n);
}
template <>
inline void turn_neighbours_<Half>(uint16_t* __restrict x, const float* __restrict c,
                                   const float* __restrict s, int64_t n) {
  turn_neighbour_lanes(x, x, c, s, n);
}
#endif

// Rotates pairs at any channel stride; slow.
template <class F>
inline void turn_strided(const typename F::Stored* x, int64_t x_channel, typename F::Stored* y,
                         int64_t y_channel, int64_t pair, int64_t other,
                         const typename F::Value* c, const typename F::Value* s, int64_t n,
                         bool twos) {
  for (int64_t k = 0; k < n; ++k) {
    const int64_t at = slot(twos, k, n);
    const typename F::Value a = F::load(x[k * pair * x_channel]);
    const typename F::Value b = F::load(x[(k * pair + other) * x_channel]);
    y[k * pair * y_channel] = F::store(turned_u(a, b, c[at], s[at]));
    y[(k * pair + other) * y_channel] = F::store(turned_v(a, b, c[at], s[at]));
  }
}

// ---- heads ---------------------------------------------------------------------------------------

// Prefetch distance in bytes. The arithmetic of a head fills the processor's out-of-order window, so
// without prefetching it waits for each cache line (1.2 to 1.8 times longer from cold caches).
// Prefetching past the end of a tensor is harmless; prefetching memory that another thread writes is
// not (2 times longer), so for rows that are far apart the caller computes the distance.
constexpr int64_t kAhead = 2048;

// Heads processed together when they are far apart in memory: an L1 cache holds only 8 to 12 lines
// whose addresses differ by multiples of a large power of two.
constexpr int64_t kStreams = 8;

// Heads accumulated in the type of the values before widening to double.
constexpr int64_t kHeadsTogether = 8;

// Heads of one token that share their angles.
template <class Stored>
struct Heads {
  const Stored* in;  // channel 0 of the first head
  Stored* out;       // equals `in` for a rotation in place
  int64_t in_step, out_step;        // from head to head, in elements
  int64_t in_channel, out_channel;  // from channel to channel
  int64_t count;
  int64_t ahead;  // prefetch distance in bytes
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
template <class F>
inline void turn_in_loops(const Problem& p, const Heads<typename F::Stored>& heads, int64_t first,
                          int64_t n, const typename F::Value* c, const typename F::Value* s) {
  using Stored = typename F::Stored;
  const int64_t pair = p.interleaved ? 2 : 1;
  const int64_t other = p.interleaved ? 1 : p.pairs;
  const int64_t at = p.start + first * pair;
  const int64_t i = heads.in_channel, j = heads.out_channel;
  const bool in_place = heads.in == heads.out;
  const int64_t bytes = p.head_dim * int64_t(sizeof(Stored));
  for (int64_t head = 0; head < heads.count; ++head) {
    const Stored* in = heads.in + head * heads.in_step;
    Stored* out = heads.out + head * heads.out_step;
    prefetch(in, out, heads.ahead, bytes);
    if (i != 1 || j != 1) {
      turn_strided<F>(in + at * i, i, out + at * j, j, pair, other, c, s, n, in_twos(p));
    } else if (p.interleaved) {
      if (in_place) {
        turn_neighbours_<F>(out + at, c, s, n);
      } else {
        turn_neighbours<F>(in + at, out + at, c, s, n);
      }
    } else if (in_place) {
      turn_halves_<F>(out + at, out + at + other, c, s, n);
    } else {
      turn_halves<F>(in + at, in + at + other, out + at, out + at + other, c, s, n);
    }
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
