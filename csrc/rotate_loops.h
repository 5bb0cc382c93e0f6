// The rotation loops, compiled once per instruction set: the including file defines TIGHTROPE_ISA.
//
// Every element goes through the same sequence of IEEE operations in every loop, with explicit fused
// multiply-adds and contraction switched off. So a result does not depend on where the vector body
// ends, on strides, on the number of threads, or on whether the rotation is in place.
#if defined(__AVX512BF16__)
#include "heads.h"  // only the rotation of bfloat16 differs from AVX-512 without it
#else
#include "angle_sums.h"
#include "gate_sums.h"
#include "phase_sums.h"
#endif
#if defined(__AVX512F__)
#include "heads_avx512.h"
#endif

namespace tightrope {
#if defined(__AVX512BF16__)
namespace avx512 {
void loop(const Problem&, int64_t, int64_t);
}
#endif
namespace TIGHTROPE_ISA {
namespace {

template <class A>
inline void turn_heads(const Problem& p, const Heads<typename A::Stored>& heads, int64_t first,
                       int64_t n, const Row<typename A::Value>& r) {
  if (heads.in != heads.out && first == 0) copy_rest(p, heads);
#if defined(__AVX512F__)
  // Not for double: a register holds too few of them for this to pay.
  if constexpr (sizeof(typename A::Value) == sizeof(float)) {
    if (heads.in_channel == 1 && heads.out_channel == 1) {
      if (p.interleaved) {
        turn_in_registers<A, true>(p, heads, first, n, r);
      } else {
        turn_in_registers<A, false>(p, heads, first, n, r);
      }
      return;
    }
  }
#endif
  turn_in_loops<A>(p, heads, first, n, r);
}

// Heads [head, head + count) of a token.
template <class Stored>
inline Heads<Stored> heads_of(const Operand& o, int64_t row, int64_t head, int64_t count,
                              int64_t token, int64_t ahead) {
  const Strides& i = o.in_stride;
  const Strides& j = o.out_stride;
  return {static_cast<const Stored*>(o.in) + row * i.row + head * i.head + token * i.token,
          static_cast<Stored*>(o.out) + row * j.row + head * j.head + token * j.token,
          i.head, j.head, i.channel, j.channel, count, ahead, o.streams};
}

// Computes the cosines and sines of a tile for one head, or for all heads if they share them.
template <class A>
inline void take_angles(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens, int64_t first,
                        int64_t n, Angles<typename A::Value>& angles) {
  fill(p, row, head, token, tokens, first, n, angles);
  // Tables have the dtype that the caller chose.
  if (!p.narrow || p.cosine.data != nullptr) return;
  for (int64_t i = 0; i < tokens * row_width(p, n); ++i) {
    angles.cosine[i] = rounded(typename A::Format{}, angles.cosine[i]);
    angles.sine[i] = rounded(typename A::Format{}, angles.sine[i]);
  }
}

// A tile whose heads have angles of their own. All operands have the same heads, and share their angles.
template <class A>
inline void turn_apart(const Problem& p, int64_t row, int64_t token, int64_t tokens, int64_t first, int64_t n) {
  using Stored = typename A::Stored;
  using T = typename A::Value;
  Angles<T> angles;
  const int64_t width = row_width(p, n), other = width - n;
  for (int64_t head = 0; head < p.operand[0].heads; ++head) {
    take_angles<A>(p, row, head, token, tokens, first, n, angles);
    for (int32_t index = 0; index < p.operands; ++index) {
      const Operand& o = p.operand[index];
      const int64_t token_bytes = o.in_stride.token * int64_t(sizeof(Stored));
      const int64_t head_bytes = o.in_stride.head * int64_t(sizeof(Stored));
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t ahead = t + 1 < tokens ? token_bytes : head_bytes - t * token_bytes;
        const T *c = angles.cosine + t * width, *s = angles.sine + t * width;
        turn_heads<A>(p, heads_of<Stored>(o, row, head, 1, token + t, ahead), first, n, {c, s, c + other, s + other});
      }
    }
  }
}

// A tile whose heads share their angles.
template <class A>
inline void turn_tile(const Problem& p, int64_t row, int64_t token, int64_t tokens, int64_t first,
                      int64_t n) {
  using Stored = typename A::Stored;
  using T = typename A::Value;
  Angles<T> angles;
  const int64_t width = row_width(p, n), other = width - n;
  take_angles<A>(p, row, 0, token, tokens, first, n, angles);
  for (int32_t index = 0; index < p.operands; ++index) {
    const Operand& o = p.operand[index];
    // Adjacent heads are one run of memory. Other heads are separate streams: take as many as the cache
    // can hold, with the tokens of the tile as the inner loop.
    const bool adjacent = o.in_stride.head < o.in_stride.token;
    const int64_t group = adjacent ? o.heads : kStreams;
    const int64_t token_bytes = o.in_stride.token * int64_t(sizeof(Stored));
    const int64_t group_bytes = group * o.in_stride.head * int64_t(sizeof(Stored));
    for (int64_t head = 0; head < o.heads; head += group) {
      const int64_t count = o.heads - head < group ? o.heads - head : group;
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t ahead = adjacent         ? kAhead
                              : t + 1 < tokens ? token_bytes
                                               : group_bytes - t * token_bytes;
        const T *c = angles.cosine + t * width, *s = angles.sine + t * width;
        turn_heads<A>(p, heads_of<Stored>(o, row, head, count, token + t, ahead), first, n,
                      {c, s, c + other, s + other});
      }
    }
  }
}

template <class A>
void turn(const Problem& p, int64_t begin, int64_t end) {
  const int64_t most = kAngles / row_width(p, 1);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / p.tiles_per_row;
    const int64_t token = (item - row * p.tiles_per_row) * p.tile;
    const int64_t tokens = p.tokens - token < p.tile ? p.tokens - token : p.tile;
    // `first` stays 0 unless the angles of one token exceed kAngles. Without pairs the loop still runs
    // once, to copy the channels.
    int64_t first = 0;
    do {
      const int64_t n = p.pairs - first < most ? p.pairs - first : most;
      if (p.angles_per_head) {
        turn_apart<A>(p, row, token, tokens, first, n);
      } else {
        turn_tile<A>(p, row, token, tokens, first, n);
      }
      first += n;
    } while (first < p.pairs);
  }
  end_streams();
}

// Only the last case, the usual one, relies on the two channels of a pair having the same angle.
template <class F>
void turn_by(const Problem& p, int64_t begin, int64_t end) {
  if constexpr (sizeof(typename F::Stored) < sizeof(typename F::Value)) {
    if (p.rounding == Rounding::kEach) return turn<Arithmetic<F, Rounding::kEach, true>>(p, begin, end);
  }
  if (p.rounding != Rounding::kOnce) return turn<Arithmetic<F, Rounding::kWide, true>>(p, begin, end);
  if (has_full_tables(p)) return turn<Arithmetic<F, Rounding::kOnce, true>>(p, begin, end);
  turn<Arithmetic<F, Rounding::kOnce, false>>(p, begin, end);
}

}  // namespace

#if defined(__AVX512BF16__)
void loop(const Problem& p, int64_t begin, int64_t end) {
  if (p.dtype == Dtype::kBFloat16) return turn_by<BFloat16>(p, begin, end);
  avx512::loop(p, begin, end);
}
#else
void loop(const Problem& p, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case Dtype::kFloat: return turn_by<Float>(p, begin, end);
    case Dtype::kDouble: return turn_by<Double>(p, begin, end);
    case Dtype::kBFloat16: return turn_by<BFloat16>(p, begin, end);
    case Dtype::kHalf: return turn_by<Half>(p, begin, end);
  }
}
#endif

}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
