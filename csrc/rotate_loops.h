// The rotation loops, compiled once per instruction set: the including file defines TIGHTROPE_ISA.
//
// Every element goes through the same sequence of IEEE operations in every loop, with explicit fused
// multiply-adds and contraction switched off. So a result does not depend on where the vector body
// ends, on strides, on the number of threads, or on whether the rotation is in place.
#if defined(__AVX512BF16__)
#include "registers.h"  // only the rotation of bfloat16 differs from AVX-512 without it
#else
#include "angle_sums.h"
#include "gate_sums.h"
#include "phase_sums.h"
#include "stages.h"
#endif

namespace tightrope {
#if defined(__AVX512BF16__)
namespace avx512 {
extern const Loops kLoops;
}
#endif
namespace TIGHTROPE_ISA {
namespace {

// Rotates pairs [first, first + n) of some heads, with one arithmetic of a format; each token has a row of angles.
template <class F>
using RotateHeads = void (*)(const Problem& p, Heads<typename F::Stored> heads, int64_t first, int64_t n,
                             const Row<typename F::Value>* rows);

template <class A>
void rotate_heads(const Problem& p, Heads<typename A::Stored> heads, int64_t first, int64_t n,
                  const Row<typename A::Value>* rows) {
  const bool copies = first == 0 && heads.in != heads.out && 2 * p.pairs != p.head_dim;
  // Not for double: a register holds too few of them for this to pay.
  const bool registers = kHasRegisters<typename A::Value> && heads.in_channel == 1 && heads.out_channel == 1;
  const int64_t tokens = heads.tokens;
  if (copies || !registers) heads.tokens = 1;
  for (int64_t token = 0; token < tokens; token += heads.tokens, heads.next_token()) {
    if (copies) copy_rest(p, heads);
    if (!registers) {
      rotate_in_loops<A>(p, heads, first, n, rows[token]);
    } else if constexpr (kHasRegisters<typename A::Value>) {
      const int64_t channel = p.start + (p.interleaved ? 2 : 1) * first, bytes = heads.fetched(p);
      if (p.interleaved) {
        rotate_in_registers<A, true>(heads, channel, 1, n, bytes, rows + token);
      } else {
        rotate_in_registers<A, false>(heads, channel, p.pairs, n, bytes, rows + token);
      }
    }
  }
}

// Heads [head, head + count) of a token, whose results begin at `place`.
template <class Stored>
inline Heads<Stored> heads_of(const Operand& o, int64_t row, int64_t head, int64_t count,
                              int64_t token, int64_t place, int64_t ahead) {
  const Strides& i = o.in_stride;
  const Strides& j = o.out_stride;
  return {static_cast<const Stored*>(o.in) + head * i.head + o.source_of(row, token, place),
          static_cast<Stored*>(o.out) + head * j.head + place,
          i.head, j.head, i.channel, j.channel, count, ahead, o.streams};
}

// Finds the cosines and sines of a tile for one head, or for all heads if they share them.
template <class F>
TIGHTROPE_LOOP void take_angles(const Problem& p, int64_t row, int64_t head, int64_t token, int64_t tokens,
                                int64_t first, int64_t n, Angles<typename F::Value>& angles) {
  if (point<F>(p, row, head, token, tokens, first, n, angles)) return;
  fill(p, row, head, token, tokens, first, n, angles);
  // Tables have the dtype that the caller chose.
  if (!p.narrow || p.cosine.data != nullptr) return;
  for (int64_t i = 0; i < tokens * row_width(p, n); ++i) {
    angles.cosine[i] = rounded(F{}, angles.cosine[i]);
    angles.sine[i] = rounded(F{}, angles.sine[i]);
  }
}

// Whether the tokens of an operand are next to each other, but its channels are not.
inline bool lies_across(const Operand& o) {
  const Strides &i = o.in_stride, &j = o.out_stride;
  return i.token == 1 && j.token == 1 && i.channel == j.channel && i.channel != 1 && o.places == nullptr;
}

// Sorts the angles of a tile by pairs, then tokens: for those of bfloat16 in twos.
template <class F, class T>
inline void sort_by_pair(const Problem& p, const Angles<T>& angles, int64_t tokens, int64_t n, T* c, T* s) {
  const int64_t other = has_full_tables(p) ? n * tokens : 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const Row<T>& r = angles.row[t];
    const int64_t to = slot(kTwins<F>, t, tokens);
    for (int64_t k = 0; k < n; ++k) {
      const int64_t from = slot(in_twos(p), k, n), at = k * tokens + to;
      c[at] = r.c[from], s[at] = r.s[from];
      if (other != 0) c[other + at] = r.c2[from], s[other + at] = r.s2[from];
    }
  }
}

// Rotates a head that lies across. Its tokens are the pairs of a head, and its pairs the tokens.
template <class F, class T>
inline void run_across(const Problem& p, const Heads<typename F::Stored>& head, int64_t tokens, int64_t first,
                       int64_t n, const T* c, const T* s, RotateHeads<F> rotate) {
  const int64_t step = head.in_channel, pair = (p.interleaved ? 2 : 1) * step;
  const int64_t other = (p.interleaved ? 1 : p.pairs) * step, second = has_full_tables(p) ? n * tokens : 0;
  if (head.in != head.out && first == 0) {
    for (int64_t d = 0; d < p.head_dim; ++d)
      if (d < p.start || d >= p.start + 2 * p.pairs)
        memcpy(head.out + d * step, head.in + d * step, size_t(tokens) * sizeof(*head.in));
  }
  Problem across = p;
  across.start = 0, across.interleaved = false, across.pairs = other, across.head_dim = 2 * other;
  Row<T> rows[kTile];
  for (int64_t k = 0; k < n; k += kTile) {
    const int64_t at = p.start * step + (first + k) * pair, some = n - k < kTile ? n - k : kTile;
    for (int64_t i = 0; i < some; ++i) {
      const int64_t from = (k + i) * tokens;
      rows[i] = {c + from, s + from, c + second + from, s + second + from};
    }
    rotate(across, {head.in + at, head.out + at, 0, 0, 1, 1, 1, 0, false, some, pair, pair}, 0, tokens, rows);
  }
}

// Heads [head, head + count) of one row, in the tokens of a tile; those of a token share their angles.
template <class F>
inline void run_group(const Problem& p, const Operand& o, int64_t row, int64_t head, int64_t count, int64_t token,
                      int64_t tokens, int64_t first, int64_t n, const Angles<typename F::Value>& angles,
                      RotateHeads<F> rotate) {
  using Stored = typename F::Stored;
  // Adjacent heads are one run of memory, which may end before the next token begins. The processor fetches such a
  // run by itself, in time for float32: there fetching ahead only costs.
  const bool adjacent = o.in_stride.head < o.in_stride.token;
  const bool endless = adjacent && count * o.in_stride.head == o.in_stride.token;
  const int64_t token_bytes = o.in_stride.token * int64_t(sizeof(Stored));
  const int64_t group_bytes = count * o.in_stride.head * int64_t(sizeof(Stored));
  // Few heads whose tokens are adjacent are as many endless runs.
  const bool runs = count == o.heads && o.in_stride.token == p.head_dim;
  const int64_t ahead = runs ? kAhead : !endless ? token_bytes : sizeof(Stored) < sizeof(float) ? kAhead : 0;
  Heads<Stored> heads = heads_of<Stored>(o, row, head, count, token, 0, ahead);
  heads.in_token = o.in_stride.token, heads.out_token = o.out_stride.token;
  const Stored* const in = static_cast<const Stored*>(o.in) + head * o.in_stride.head;
  Stored* const out = heads.out;
  // The tokens are one run, unless they go to places of their own. The last one may fetch other memory.
  for (int64_t t = 0; t < tokens; t += heads.tokens) {
    const bool last = t + 1 == tokens;
    heads.tokens = last || o.places != nullptr ? 1 : adjacent ? tokens - t : tokens - t - 1;
    if (last && !adjacent && !runs) heads.ahead = group_bytes - t * token_bytes;
    const int64_t place = place_of(p, o, row, token + t);
    if (place < 0) continue;
    heads.in = in + o.source_of(row, token + t, place), heads.out = out + place;
    rotate(p, heads, first, n, angles.row + t);
  }
}

// A tile whose heads have angles of their own. All operands have the same heads, and share their angles.
template <class F>
inline void run_apart(const Problem& p, int64_t row, int64_t begin, int64_t end, int64_t token, int64_t tokens,
                      int64_t first, int64_t n, RotateHeads<F> rotate) {
  Angles<typename F::Value> angles;
  for (int64_t head = begin; head < end; ++head) {
    take_angles<F>(p, row, head, token, tokens, first, n, angles);
    for (int32_t index = 0; index < p.operands; ++index)
      run_group<F>(p, p.operand[index], row, head, 1, token, tokens, first, n, angles, rotate);
  }
}

// Part `part` of a tile whose heads share their angles. The heads of all rows of the item count as one list.
template <class F>
inline void run_tile(const Problem& p, int64_t row, int64_t part, int64_t token, int64_t tokens, int64_t first,
                     int64_t n, RotateHeads<F> rotate) {
  using Stored = typename F::Stored;
  using T = typename F::Value;
  Angles<T> angles;
  take_angles<F>(p, row, 0, token, tokens, first, n, angles);
  alignas(64) T cosine[kAngles], sine[kAngles];
  bool sorted = false;
  for (int32_t index = 0; index < p.operands; ++index) {
    const Operand& o = p.operand[index];
    const bool across = lies_across(o);
    if (across && !sorted) sort_by_pair<F>(p, angles, tokens, n, cosine, sine), sorted = true;
    // Heads that are not adjacent are separate streams: take as many as the cache can hold, with the tokens of
    // the tile as the inner loop.
    const int64_t most = across ? 1 : o.in_stride.head < o.in_stride.token ? o.heads : streams_of<Stored>(p);
    const int64_t end = p.together * o.heads * (part + 1) / p.parts;
    int64_t at = p.together * o.heads * part / p.parts, count = 0;
    for (; at < end; at += count) {
      const int64_t own = row + at / o.heads, head = at % o.heads;
      count = o.heads - head < most ? o.heads - head : most;
      count = end - at < count ? end - at : count;
      if (across) {
        const int64_t place = place_of(p, o, own, token);
        run_across<F>(p, heads_of<Stored>(o, own, head, 1, token, place, 0), tokens, first, n, cosine, sine, rotate);
      } else {
        run_group<F>(p, o, own, head, count, token, tokens, first, n, angles, rotate);
      }
    }
  }
}

template <class F>
void run(const Problem& p, int64_t begin, int64_t end, RotateHeads<F> rotate) {
  const int64_t most = kAngles / row_width(p, 1);
  // All tiles of a part come before those of the next: threads then work on different pages.
  const int64_t tiles = p.rows / p.together * p.tiles_per_row;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t part = item / tiles, tile = item % tiles;
    const int64_t row = tile / p.tiles_per_row * p.together;
    const int64_t token = tile % p.tiles_per_row * p.tile;
    const int64_t tokens = p.tokens - token < p.tile ? p.tokens - token : p.tile;
    // `first` stays 0 unless the angles of one token exceed kAngles. Without pairs the loop still runs
    // once, to copy the channels.
    int64_t first = 0;
    do {
      const int64_t n = p.pairs - first < most ? p.pairs - first : most;
      if (p.angles_per_head) {
        const int64_t heads = p.operand[0].heads;
        run_apart<F>(p, row, heads * part / p.parts, heads * (part + 1) / p.parts, token, tokens, first, n, rotate);
      } else {
        run_tile<F>(p, row, part, token, tokens, first, n, rotate);
      }
      first += n;
    } while (first < p.pairs);
  }
#if defined(__AVX2__)
  _mm_sfence();  // lets other threads see streamed results before anything that this thread stores later
#endif
}

// Only the last case, the usual one, relies on the two channels of a pair having the same angle.
template <class F>
void run_format(const Problem& p, int64_t begin, int64_t end) {
  RotateHeads<F> rotate = has_full_tables(p) ? rotate_heads<Arithmetic<F, Rounding::kOnce, true>>
                                             : rotate_heads<Arithmetic<F, Rounding::kOnce, false>>;
  if (p.rounding != Rounding::kOnce) rotate = rotate_heads<Arithmetic<F, Rounding::kWide, true>>;
  if constexpr (sizeof(typename F::Stored) < sizeof(typename F::Value))
    if (p.rounding == Rounding::kEach) rotate = rotate_heads<Arithmetic<F, Rounding::kEach, true>>;
  run<F>(p, begin, end, rotate);
}

}  // namespace

#if defined(__AVX512BF16__)
void loop(const Problem& p, int64_t begin, int64_t end) {
  if (p.dtype == Dtype::kBFloat16) return run_format<BFloat16>(p, begin, end);
  avx512::kLoops.rotate(p, begin, end);
}
#else
extern const Loops kLoops = {
    [](const Problem& p, int64_t begin, int64_t end) {
      with_format(p.dtype, [&](auto f) { run_format<decltype(f)>(p, begin, end); });
    },
    angle_loop, stages_loop, exponentials, gate_loop, phase_words_loop, phase_sums_loop};
#endif

}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
