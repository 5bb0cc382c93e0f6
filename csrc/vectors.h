// V, a register of floats of the widest kind, and the operations on it that activations, norms and gates need.
// They compute the same bits at every width.
#pragma once

#include "registers.h"

namespace tightrope {
namespace TIGHTROPE_ISA {
namespace {

using Words = Wide::Words;
// Integers with a sign. A comparison gives those with all bits set where it holds.
typedef int32_t Integers __attribute__((vector_size(sizeof(V))));

#if defined(__AVX512F__)
template <>
TIGHTROPE_INLINE V all<V>(double x) { return _mm512_set1_ps(float(x)); }
TIGHTROPE_INLINE V root(V x) { return _mm512_maskz_sqrt_ps(0xFFFF, x); }
TIGHTROPE_INLINE V rounded_down(V x) { return _mm512_maskz_roundscale_ps(0xFFFF, x, 0x09); }
TIGHTROPE_INLINE V rounded_even(V x) { return _mm512_maskz_roundscale_ps(0xFFFF, x, 0x08); }
// If x or the limit is NaN, these instructions return the second operand.
TIGHTROPE_INLINE V at_most(V limit, V x) { return _mm512_maskz_min_ps(0xFFFF, limit, x); }
TIGHTROPE_INLINE V at_least(V limit, V x) { return _mm512_maskz_max_ps(0xFFFF, limit, x); }
TIGHTROPE_INLINE V scaled(V p, V whole) { return _mm512_maskz_scalef_ps(0xFFFF, p, whole); }

// The first n of a register's lanes, and zeros.
TIGHTROPE_INLINE uint32_t first_lanes(int64_t n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }
TIGHTROPE_INLINE V read_first(const float* at, int64_t n) {
  return _mm512_maskz_loadu_ps(__mmask16(first_lanes(n)), at);
}
TIGHTROPE_INLINE void write_first(float* at, V x, int64_t n) {
  _mm512_mask_storeu_ps(at, __mmask16(first_lanes(n)), x);
}
// The same for half precision, and for n numbers of bfloat16.
TIGHTROPE_INLINE V read_first(const uint16_t* at, int64_t n) {
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_maskz_loadu_epi16(__mmask16(first_lanes(n)), at));
}
TIGHTROPE_INLINE void write_first(uint16_t* at, V x, int64_t n) {
  _mm256_mask_storeu_epi16(at, __mmask16(first_lanes(n)), _mm512_maskz_cvtps_ph(0xFFFF, x, 0));
}
TIGHTROPE_INLINE Words read_first(const Twin* at, int64_t n) {
  return (Words)_mm512_maskz_loadu_epi16(first_lanes(n), at);
}
TIGHTROPE_INLINE void write_first(Twin* at, Words x, int64_t n) {
  _mm512_mask_storeu_epi16(at, first_lanes(n), (__m512i)x);
}

TIGHTROPE_INLINE bool any(Integers which) { return _mm512_movepi32_mask((__m512i)which) != 0; }
// Entry k mod 16, or k mod 32, of a table, for each k.
TIGHTROPE_INLINE Words entry_of_16(const int32_t* table, Words k) {
  return (Words)_mm512_maskz_permutexvar_epi32(0xFFFF, (__m512i)k, _mm512_load_si512(table));
}
TIGHTROPE_INLINE Words entry_of_32(const int32_t* table, Words k) {
  return (Words)_mm512_permutex2var_epi32(_mm512_load_si512(table), (__m512i)k, _mm512_load_si512(table + 16));
}

// The sums of the lanes l and l + 8 of each.
TIGHTROPE_INLINE V fold_halves(V a, V b) {
  return _mm512_maskz_shuffle_f32x4(0xFFFF, a, b, 0x44) + _mm512_maskz_shuffle_f32x4(0xFFFF, a, b, 0xEE);
}
// Within each four lanes, the sums of l and l + 2; then of neighbours; then of neighbouring fours.
TIGHTROPE_INLINE V fold_twos(V a, V b) {
  return _mm512_maskz_unpacklo_ps(0xFFFF, a, b) + _mm512_maskz_unpackhi_ps(0xFFFF, a, b);
}
TIGHTROPE_INLINE V fold_ones(V a, V b) {
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  return _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(0xFF, c, d)) +
         _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(0xFF, c, d));
}
TIGHTROPE_INLINE V fold_fours(V a, V b) {
  return _mm512_maskz_shuffle_f32x4(0xFFFF, a, b, 0x88) + _mm512_maskz_shuffle_f32x4(0xFFFF, a, b, 0xDD);
}
#elif defined(__AVX2__)
template <>
TIGHTROPE_INLINE V all<V>(double x) { return _mm256_set1_ps(float(x)); }
TIGHTROPE_INLINE V root(V x) { return _mm256_sqrt_ps(x); }
TIGHTROPE_INLINE V rounded_down(V x) { return _mm256_floor_ps(x); }
TIGHTROPE_INLINE V rounded_even(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TIGHTROPE_INLINE V at_most(V limit, V x) { return _mm256_min_ps(limit, x); }
TIGHTROPE_INLINE V at_least(V limit, V x) { return _mm256_max_ps(limit, x); }

TIGHTROPE_INLINE Integers first_lanes(int64_t n) {
  return (Integers)_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7) < (Integers)_mm256_set1_epi32(int32_t(n));
}
TIGHTROPE_INLINE V read_first(const float* at, int64_t n) {
  return n >= 8 ? Wide::read(at) : _mm256_maskload_ps(at, (__m256i)first_lanes(n < 0 ? 0 : n));
}
TIGHTROPE_INLINE void write_first(float* at, V x, int64_t n) {
  if (n >= 8) return Wide::write<false>(at, x);
  _mm256_maskstore_ps(at, (__m256i)first_lanes(n < 0 ? 0 : n), x);
}
// Half a register is the usual remainder of bfloat16.
TIGHTROPE_INLINE Words read_half(const Twin* at) {
  return (Words)_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)at));
}
TIGHTROPE_INLINE void write_half(Twin* at, Words x) {
  _mm_storeu_si128((__m128i*)at, _mm256_castsi256_si128((__m256i)x));
}

TIGHTROPE_INLINE bool any(Integers which) { return _mm256_movemask_ps((V)which) != 0; }
TIGHTROPE_INLINE V entry_of_8(const int32_t* table, Words k) {
  return _mm256_permutevar8x32_ps(_mm256_load_ps((const float*)table), (__m256i)k);
}
// The instruction chooses the second where the sign bit is set.
TIGHTROPE_INLINE Words entry_of_16(const int32_t* table, Words k) {
  return (Words)_mm256_blendv_ps(entry_of_8(table, k), entry_of_8(table + 8, k), (V)(k << 28));
}
TIGHTROPE_INLINE Words entry_of_32(const int32_t* table, Words k) {
  return (Words)_mm256_blendv_ps((V)entry_of_16(table, k), (V)entry_of_16(table + 16, k), (V)(k << 27));
}

TIGHTROPE_INLINE V fold_twos(V a, V b) { return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b); }
TIGHTROPE_INLINE V fold_ones(V a, V b) {
  const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
  return _mm256_castpd_ps(_mm256_unpacklo_pd(c, d)) + _mm256_castpd_ps(_mm256_unpackhi_pd(c, d));
}
TIGHTROPE_INLINE V fold_fours(V a, V b) {
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
#else
template <>
TIGHTROPE_INLINE V all<V>(double x) { return vdupq_n_f32(float(x)); }
TIGHTROPE_INLINE V root(V x) { return vsqrtq_f32(x); }
TIGHTROPE_INLINE V rounded_down(V x) { return vrndmq_f32(x); }
TIGHTROPE_INLINE V rounded_even(V x) { return vrndnq_f32(x); }

// Half a register is the usual remainder of bfloat16.
TIGHTROPE_INLINE Words read_half(const Twin* at) {
  return (Words)vcombine_u16(vld1_u16((const uint16_t*)at), vdup_n_u16(0));
}
TIGHTROPE_INLINE void write_half(Twin* at, Words x) { vst1_u16((uint16_t*)at, vget_low_u16((uint16x8_t)x)); }

TIGHTROPE_INLINE bool any(Integers which) { return vmaxvq_u32((uint32x4_t)which) != 0; }
TIGHTROPE_INLINE Words entry_of_16(const int32_t* table, Words k) {
  Words found;
  for (int l = 0; l < 4; ++l) found[l] = uint32_t(table[k[l] % 16]);
  return found;
}
TIGHTROPE_INLINE Words entry_of_32(const int32_t* table, Words k) {
  Words found;
  for (int l = 0; l < 4; ++l) found[l] = uint32_t(table[k[l] % 32]);
  return found;
}

TIGHTROPE_INLINE V fold_twos(V a, V b) { return vzip1q_f32(a, b) + vzip2q_f32(a, b); }
TIGHTROPE_INLINE V fold_ones(V a, V b) {
  const float64x2_t c = vreinterpretq_f64_f32(a), d = vreinterpretq_f64_f32(b);
  return vreinterpretq_f32_f64(vzip1q_f64(c, d)) + vreinterpretq_f32_f64(vzip2q_f64(c, d));
}
#endif

#if !defined(__AVX512F__)
// The first n numbers, in memory of the size of a register.
template <class Stored, int room>
struct First {
  First() = default;
  TIGHTROPE_INLINE First(const Stored* at, int64_t n) {
    for (int64_t k = 0; k < n; ++k) of[k] = at[k];
  }
  TIGHTROPE_INLINE void copy(Stored* at, int64_t n) const {
    for (int64_t k = 0; k < n; ++k) at[k] = of[k];
  }
  alignas(sizeof(V)) Stored of[room] = {};
};
template <class Stored>
TIGHTROPE_INLINE V read_first(const Stored* at, int64_t n) {
  return n >= kWidest ? Wide::read(at) : Wide::read(First<Stored, kWidest>(at, n).of);
}
template <class Stored>
TIGHTROPE_INLINE void write_first(Stored* at, V x, int64_t n) {
  if (n >= kWidest) return Wide::write<false>(at, x);
  First<Stored, kWidest> part;
  Wide::write<false>(part.of, x);
  part.copy(at, n);
}
TIGHTROPE_INLINE Words read_first(const Twin* at, int64_t n) {
  if (n >= 2 * kWidest) return Wide::read(at);
  if (n == kWidest) return read_half(at);
  return Wide::read((const Twin*)First<uint16_t, 2 * kWidest>((const uint16_t*)at, n).of);
}
TIGHTROPE_INLINE void write_first(Twin* at, Words x, int64_t n) {
  if (n >= 2 * kWidest) return Wide::write<false>(at, x);
  if (n == kWidest) return write_half(at, x);
  First<uint16_t, 2 * kWidest> part;
  Wide::write<false>((Twin*)part.of, x);
  part.copy((uint16_t*)at, n);
}
#endif

TIGHTROPE_INLINE V choose(Integers which, V yes, V no) { return which ? yes : no; }
TIGHTROPE_INLINE V magnitude(V x) { return (V)((Words)x & 0x7FFFFFFFu); }
TIGHTROPE_INLINE V with_sign(V x, V of) { return (V)(((Words)x & 0x7FFFFFFFu) | ((Words)of & 0x80000000u)); }
TIGHTROPE_INLINE Integers whole_of(V x) { return (Integers)((Words)(x + all<V>(kRounder<float>)) - 0x4B400000u); }
TIGHTROPE_INLINE V power_of_two(Integers n) { return (V)((n + 127) << 23); }

}  // namespace
}  // namespace TIGHTROPE_ISA
}  // namespace tightrope
