// Rotation with f and P of heads with contiguous channels, entirely in registers: a block of pairs is
// widened, goes through f, is rotated by angles that stay in registers from head to head, multiplied by
// P and rounded once.
//
// double, and activations that with_registers() lacks, use the loops of stages.h.
#pragma once

#include "norms_avx512.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

// Calls use(A()) for an activation A that works on registers; returns false for the others.
template <class Use>
inline bool with_registers(Act act, const Use& use) {
  switch (act) {
    case Act::kNone: return use(NoneV()), true;
    case Act::kRelu: return use(ReluV()), true;
    case Act::kSigmoid: return use(SigmoidV()), true;
    case Act::kSilu: return use(SiluV()), true;
    case Act::kGelu: return use(GeluV()), true;
    case Act::kRelu2: return use(Relu2V()), true;
    case Act::kExp: return use(ExpV()), true;
    case Act::kLeakyRelu: return use(LeakyReluV()), true;
    default: return false;
  }
}

// A norm: its weight goes into the angles (WeighedTurn), and each head has a scale.
struct NormV {};

template <class A>
constexpr bool kIsNone = false;
template <>
constexpr bool kIsNone<NoneV> = true;
template <class A>
constexpr bool kIsNorm = false;
template <>
constexpr bool kIsNorm<NormV> = true;

// Rotates `blocks` blocks of pairs of all heads, from pair `pair` of the slice on.
template <class F, bool interleaved, class A, bool back, bool gated, int blocks, bool whole>
TIGHTROPE_LOOP void turn_line(const Problem& p, const Line<typename F::Stored>& line, const float* scale,
                      int64_t pair, int64_t row, int64_t bytes, const float* c, const float* s) {
  using T = Turn<F, interleaved>;
  constexpr bool kBrief = Span<F>::kBrief;
  constexpr int64_t kRow = T::kRegisters * 16, kStep = T::kPairs * (interleaved ? 2 : 1);
  // Copy to locals: the compiler must assume that stores change the members of references.
  const int64_t pairs = p.pairs, left = pairs - pair, count = line.count, ahead = line.ahead;
  const int64_t in_step = line.in_step, out_step = line.out_step, x_step = line.x_step;
  const int64_t gate_step = line.gate_step, weight_step = line.weight_step;
  const int64_t channel = p.start + pair * (interleaved ? 2 : 1);
  const auto *in = line.in + channel, *x = back && !kIsNone<A> ? line.x + channel : line.in;
  auto* out = line.out + channel;
  const float* gate = gated ? line.gate + row : nullptr;
  const float* weight = kIsNorm<A> ? line.weight + row : nullptr;
  // Angles come in chunks of kAngles pairs.
  const int64_t chunk = pair / kAngles * kAngles;
  const int64_t n = pairs - chunk < kAngles ? pairs - chunk : kAngles;
  T turns[blocks];
#pragma GCC unroll 8
  for (int b = 0; b < blocks; ++b)
    turns[b].template take<whole>(c + chunk, s + chunk, pair - chunk + b * T::kPairs, n);
  WeighedTurn<F, interleaved> weighed[blocks];
  if (kIsNorm<A>) {
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) weighed[b].take(turns[b], weight + b * kRow);
  }
  for (int64_t head = 0; head < count; ++head) {
    prefetch(in, out, ahead, bytes);
    if (back && !kIsNone<A>) prefetch(x, x, ahead, bytes);
#pragma GCC unroll 8
    for (int b = 0; b < blocks; ++b) {
      V y[T::kRegisters];
      T::template read<whole>(in + b * kStep, pairs, left, y);
      if constexpr (!back && !kIsNorm<A>) {
        Several<A, kBrief, T::kRegisters>::f(y);
        turns[b].turn(y);
      }
      if constexpr (kIsNorm<A>) {
        // Scale first: rotating the unscaled values might overflow.
#pragma GCC unroll 4
        for (int i = 0; i < T::kRegisters; ++i) y[i] = times(y[i], all(scale[head]));
        weighed[b].turn(y);
      }
      if (gated) {
#pragma GCC unroll 4
        for (int i = 0; i < T::kRegisters; ++i) y[i] = times(y[i], _mm512_loadu_ps(gate + b * kRow + 16 * i));
      }
      if constexpr (back) {
        turns[b].turn(y);
        if constexpr (!kIsNone<A>) {
          V at[T::kRegisters];
          T::template read<whole>(x + b * kStep, pairs, left, at);
#pragma GCC unroll 4
          for (int i = 0; i < T::kRegisters; ++i) y[i] = A::template back<kBrief>(at[i], y[i]);
        }
      }
      T::template write<whole>(out + b * kStep, pairs, left, y);
    }
    in += in_step, out += out_step;
    if (back && !kIsNone<A>) x += x_step;
    if (gated) gate += gate_step;
    if (kIsNorm<A> && weight_step != 0 && head + 1 < count) {
      weight += weight_step;
#pragma GCC unroll 8
      for (int b = 0; b < blocks; ++b) {
        T turn;
        turn.template take<whole>(c + chunk, s + chunk, pair - chunk + b * T::kPairs, n);
        weighed[b].take(turn, weight + b * kRow);
      }
    }
  }
}

// Applies f and P to n channels that do not rotate.
template <class F, class A, bool back>
TIGHTROPE_LOOP void pass_line(const Line<typename F::Stored>& line, const float* scale, int64_t channel,
                      int64_t n, int64_t row) {
  using S = Span<F>;
  const uint32_t mask = lanes(n);
  for (int64_t head = 0; head < line.count; ++head) {
    V y[S::kRegisters], at[S::kRegisters];
    S::read(line.in + head * line.in_step + channel, mask, y);
    if (back && !kIsNone<A>) S::read(line.x + head * line.x_step + channel, mask, at);
    if constexpr (!back && !kIsNorm<A>) Several<A, S::kBrief, S::kRegisters>::f(y);
    for (int i = 0; i < S::kRegisters; ++i) {
      if constexpr (kIsNorm<A>) {
        y[i] = times(times(y[i], all(scale[head])),
                     _mm512_loadu_ps(line.weight + head * line.weight_step + row + 16 * i));
      }
      if (line.gate != nullptr)
        y[i] = times(y[i], _mm512_loadu_ps(line.gate + head * line.gate_step + row + 16 * i));
      if constexpr (back && !kIsNone<A>) y[i] = A::template back<S::kBrief>(at[i], y[i]);
    }
    S::write(line.out + head * line.out_step + channel, mask, y);
  }
}

template <class F, bool interleaved, class A, bool back, bool gated>
inline void whole_line(const Problem& p, const Line<typename F::Stored>& line, const float* scale,
                       const float* c, const float* s) {
  using T = Turn<F, interleaved>;
  constexpr int64_t kChannels = Span<F>::kChannels;
  constexpr int kSet = T::kRegisters == 4 ? 2 : 4;
  int64_t bytes = p.head_dim * int64_t(sizeof(typename F::Stored)), row = 0;
  const auto pass = [&](int64_t from, int64_t to) {
    for (; from < to; from += kChannels, row += kChannels)
      pass_line<F, A, back>(line, scale, from, to - from < kChannels ? to - from : kChannels, row);
  };
  pass(0, p.start);
  int64_t pair = 0;
  for (; pair + kSet * T::kPairs <= p.pairs; pair += kSet * T::kPairs, bytes = 0) {
    turn_line<F, interleaved, A, back, gated, kSet, true>(p, line, scale, pair, row, bytes, c, s);
    row += kSet * T::kRegisters * 16;
  }
  for (; pair < p.pairs; pair += T::kPairs, bytes = 0) {
    turn_line<F, interleaved, A, back, gated, 1, false>(p, line, scale, pair, row, bytes, c, s);
    row += T::kRegisters * 16;
  }
  pass(p.start + 2 * p.pairs, p.head_dim);
}

// Rotates the heads of a line with f and P; returns false if the activation does not work on registers.
template <class F>
inline bool turn_stages(const Problem& p, const Stages& o, Line<typename F::Stored> line, const float* c,
                       const float* s) {
  const auto run = [&](auto act, auto back, const float* scale) {
    using A = decltype(act);
    const auto whole = [&](auto interleaved, auto gated) {
      whole_line<F, interleaved.value != 0, A, back.value != 0, gated.value != 0>(p, line, scale, c, s);
    };
    if (p.interleaved) {
      line.gate == nullptr ? whole(Is<1>(), Is<0>()) : whole(Is<1>(), Is<1>());
    } else {
      line.gate == nullptr ? whole(Is<0>(), Is<0>()) : whole(Is<0>(), Is<1>());
    }
  };
  if (o.act == Act::kRmsNorm) {
    // Compute the norms of all heads before the first head is overwritten.
    alignas(64) float scale[kNorms];
    for (int64_t left = line.count; left > 0; left -= kNorms) {
      line.count = left < kNorms ? left : kNorms;
      norms<F>(p, o.eps, line, scale);
      run(NormV(), Is<0>(), scale);
      line.in += kNorms * line.in_step, line.out += kNorms * line.out_step;
      if (line.gate != nullptr) line.gate += kNorms * line.gate_step;
      line.weight += kNorms * line.weight_step;
    }
    return true;
  }
  return with_registers(o.act, [&](auto act) {
    if (o.forward) {
      run(act, Is<0>(), nullptr);
    } else {
      run(act, Is<1>(), nullptr);
    }
  });
}

inline bool in_registers(const Stages& o) {
  return o.act == Act::kRmsNorm || with_registers(o.act, [](auto) {});
}

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
