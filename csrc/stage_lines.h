// Rotation with f and P of heads with contiguous channels, entirely in registers: a block of pairs is
// widened, goes through f, is rotated by angles that stay in registers from head to head, multiplied by
// P and rounded once.
//
// softmax uses the rows of stage_rows.h.
#pragma once

#include "norms.h"
#include "powers.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// A norm: its weight goes into the angles (WeighedTurn), and each head has a scale.
struct Norm {};
template <class A>
constexpr bool kIsAct = !kIs<A, None> && !kIs<A, Norm>;

// Rotates `blocks` blocks of pairs of all heads, from pair `pair` of the slice on.
template <class F, bool interleaved, bool back, int blocks, bool whole, class A>
TIGHTROPE_LOOP void stage_line(const Problem& p, const Line<F>& line, [[maybe_unused]] A act,
                               [[maybe_unused]] const float* scale, int64_t pair, int64_t row, int64_t bytes,
                               const float* c, const float* s) {
  using T = Turn<F, interleaved>;
  constexpr int kRegisters = T::kRegisters;
  constexpr bool kBrief = Span<F>::kBrief;
  constexpr int64_t kRow = kRegisters * kWidest, kStep = T::kPairs * (interleaved ? 2 : 1);
  // Copy to locals: the compiler must assume that stores change the members of references.
  const int64_t pairs = p.pairs, left = pairs - pair, count = line.count, ahead = line.ahead;
  const int64_t in_step = line.in_step, out_step = line.out_step, x_step = line.x_step;
  const int64_t gate_step = line.gate_step;
  const int64_t channel = p.start + pair * (interleaved ? 2 : 1);
  constexpr bool has_x = kIsAct<A> && back;
  const bool gated = line.gate != nullptr;
  const auto *in = line.in + channel, *x = has_x ? line.x + channel : line.in;
  auto* out = line.out + channel;
  const float* gate = gated ? line.gate + row : nullptr;
  const float* weight = kIs<A, Norm> ? line.weight + row : nullptr;
  // Angles come in chunks of kAngles pairs.
  const int64_t chunk = pair / kAngles * kAngles;
  const int64_t n = pairs - chunk < kAngles ? pairs - chunk : kAngles;
  T turns[blocks];
#pragma GCC unroll 8
  for (int b = 0; b < blocks; ++b)
    turns[b].template take<whole>(c + chunk, s + chunk, pair - chunk + b * T::kPairs, n);
  WeighedTurn<F, interleaved> weighed[blocks];
  if constexpr (kIs<A, Norm>) {
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) weighed[b].take(turns[b], weight + b * kRow);
  }
  for (int64_t head = 0; head < count; ++head) {
    prefetch(in, out, ahead, bytes);
    if (has_x) prefetch(x, x, ahead, bytes);
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) {
      V y[kRegisters];
      T::template read<whole>(in + b * kStep, pairs, left, y);
      const auto multiply = [&] {
#pragma GCC unroll 4
        for (int i = 0; i < kRegisters; ++i) y[i] *= Wide::read(gate + b * kRow + kWidest * i);
      };
      if constexpr (kIs<A, Norm>) {
        // Scale first: rotating the unscaled values might overflow.
#pragma GCC unroll 4
        for (int i = 0; i < kRegisters; ++i) y[i] *= all<V>(scale[head]);
        weighed[b].turn(y);
      } else {
        if constexpr (kIsAct<A> && !back) act_on<kBrief, kRegisters>(act, y);
        if (back && gated) multiply();
        turns[b].turn(y);
      }
      if ((kIs<A, Norm> || !back) && gated) multiply();
      if constexpr (has_x) {
        V at[kRegisters];
        T::template read<whole>(x + b * kStep, pairs, left, at);
        slope_on<kBrief, kRegisters>(act, at, y);
      }
      T::template write<whole>(out + b * kStep, pairs, left, y);
    }
    in += in_step, out += out_step;
    if (has_x) x += x_step;
    if (gated) gate += gate_step;
  }
}

// Applies f and P to n channels that do not rotate.
template <class F, bool back, class A>
TIGHTROPE_LOOP void pass_line(const Line<F>& line, [[maybe_unused]] A act, [[maybe_unused]] const float* scale,
                      int64_t channel, int64_t n, int64_t row) {
  using S = Span<F>;
  for (int64_t head = 0; head < line.count; ++head) {
    V y[S::kRegisters], at[S::kRegisters];
    S::read(line.in + head * line.in_step + channel, n, y);
    if constexpr (kIsAct<A> && !back) act_on<S::kBrief, S::kRegisters>(act, y);
    for (int i = 0; i < S::kRegisters; ++i) {
      const int64_t from = row + kWidest * i;
      if (kIs<A, Norm>)
        y[i] = y[i] * all<V>(scale[head]) * Wide::read(line.weight + from);
      if (line.gate != nullptr) y[i] *= Wide::read(line.gate + head * line.gate_step + from);
    }
    if constexpr (kIsAct<A> && back) {
      S::read(line.x + head * line.x_step + channel, n, at);
      slope_on<S::kBrief, S::kRegisters>(act, at, y);
    }
    S::write(line.out + head * line.out_step + channel, n, y);
  }
}

template <class F, bool interleaved, bool back, class A>
inline void whole_line(const Problem& p, const Line<F>& line, A act, const float* scale, const float* c,
                       const float* s) {
  using T = Turn<F, interleaved>;
  constexpr int64_t kChannels = Span<F>::kChannels;
  // As many as leave registers for the arithmetic.
  constexpr int kSet = kForAngles / (2 * T::kRegisters);
  int64_t bytes = p.head_dim * int64_t(sizeof(typename F::Stored)), row = 0;
  const auto pass = [&](int64_t from, int64_t to) {
    for (; from < to; from += kChannels, row += kChannels)
      pass_line<F, back>(line, act, scale, from, to - from, row);
  };
  pass(0, p.start);
  int64_t pair = 0;
  for (; pair + kSet * T::kPairs <= p.pairs; pair += kSet * T::kPairs, bytes = 0) {
    stage_line<F, interleaved, back, kSet, true>(p, line, act, scale, pair, row, bytes, c, s);
    row += kSet * T::kRegisters * kWidest;
  }
  for (; pair < p.pairs; pair += T::kPairs, bytes = 0) {
    stage_line<F, interleaved, back, 1, false>(p, line, act, scale, pair, row, bytes, c, s);
    row += T::kRegisters * kWidest;
  }
  pass(p.start + 2 * p.pairs, p.head_dim);
}

// Rotates the heads of a line with f and P, but not the backward pass of a norm.
template <class F>
inline void stage_in_lines(const Problem& p, const Stages& o, Line<F> line, const float* c, const float* s) {
  const auto run = [&](auto act, auto back, const float* scale) {
    if (p.interleaved) return whole_line<F, true, back.value != 0>(p, line, act, scale, c, s);
    whole_line<F, false, back.value != 0>(p, line, act, scale, c, s);
  };
  const auto either = [&](auto act) { o.forward ? run(act, Is<0>(), nullptr) : run(act, Is<1>(), nullptr); };
  Called called{nullptr};
  const bool is_norm = !with_act(o.act, [&](auto act) {
    using A = decltype(act);
    constexpr bool kBrief = Span<F>::kBrief;
    if constexpr (kIsCalled<A>) {
      called.on = o.forward ? call_act<A, kBrief, false> : call_act<A, kBrief, true>;
    } else {
      either(act);
    }
  });
  if (called.on != nullptr) either(called);
  if (!is_norm) return;
  // Compute the norms of all heads before the first head is overwritten.
  alignas(64) float scale[kNorms];
  for (int64_t left = line.count; left > 0; left -= kNorms) {
    const int64_t heads = left < kNorms ? left : kNorms;
    // Heads whose weights differ are lines of their own.
    const int64_t together = line.weight_step == 0 ? heads : 1;
    line.count = heads;
    norms<F>(p, o.eps, line, scale);
    line.count = together;
    for (int64_t head = 0; head < heads; head += together) {
      run(Norm(), Is<0>(), scale + head);
      line.skip(together);
    }
  }
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
