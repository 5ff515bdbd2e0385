// 16 float lanes.
#pragma once
#include <immintrin.h>

#define VL 16
#define HAVE_FROM_FP16
#define HAVE_REDUCE
#define HAVE_MIN_MAX
#define HAVE_BYTES
#define HAVE_FOURS
#define HAVE_EXCHANGED
#define HAVE_SUM_IN_ALL
#define HAVE_STREAM
#define HAVE_EXP2
#define HAVE_MAX_EACH
#define HAVE_WORDS
#define HAVE_LANES
#define HAVE_LOOKUP
#include "portable.h"

namespace {

INLINE vi turned(vi x, int left) { return (vi)_mm512_rolv_epi32((__m512i)x, _mm512_set1_epi32(left)); }
INLINE vi bits_of(int mask, vi a, vi b) {
  return (vi)_mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), (__m512i)a, (__m512i)b, 0xca);
}
INLINE vi flipped(vi a, vi b, int mask) {
  return (vi)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi8((char)mask), 0x78);
}
INLINE vi masked_or(vi a, vi b, int mask) {
  return (vi)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, _mm512_set1_epi8((char)mask), 0xf8);
}
// The count in every lane: one that is the same for all takes two steps on Intel's.
INLINE vi shifted_by(vi x, const int32_t& by) { return (vi)_mm512_srlv_epi32((__m512i)x, _mm512_set1_epi32(by)); }
INLINE vi load_quads(const uint8_t* const (&at)[4]) {
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at[0])),
                                              _mm_loadu_si128((const __m128i*)at[1]), 1),
                high = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at[2])),
                                               _mm_loadu_si128((const __m128i*)at[3]), 1);
  return (vi)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
INLINE vi looked_up(const uint8_t (&table)[16], vi x) {
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)x);
}
INLINE vi odd_levels(vi x, bool fitted) {
  const __m128i table = fitted ? _mm_setr_epi8(-9, -5, -3, -1, 1, 3, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0)
                               : _mm_setr_epi8(-7, -5, -3, -1, 1, 3, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0);
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)x);
}
template <int N>
INLINE vi lanes_behind(vi before, vi x) {
  return (vi)_mm512_alignr_epi8((__m512i)x, (__m512i)before, 16 - 4 * N);
}
INLINE vf from_fp16(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vi load_bytes(const uint8_t* p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store_bytes(uint8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
template <int N>
INLINE vf exchanged(vf x) {
  if (N < 4) return (vf)_mm512_permute_ps((__m512)x, N == 1 ? 0xb1 : 0x4e);
  return (vf)_mm512_shuffle_f32x4((__m512)x, (__m512)x, N == 4 ? 0xb1 : 0x4e);
}
INLINE void load_fours(const float* const* at, int64_t offset, vf (&x)[4]) {
  const auto row = [&](int i) __attribute__((always_inline)) { return _mm_loadu_ps(at[i] + offset); };
  __m512 y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    y[i] = _mm512_castps128_ps512(row(i));
    y[i] = _mm512_insertf32x4(y[i], row(4 + i), 1);
    y[i] = _mm512_insertf32x4(y[i], row(8 + i), 2);
    y[i] = _mm512_insertf32x4(y[i], row(12 + i), 3);
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(y[0], y[1])),
                b = _mm512_castps_pd(_mm512_unpacklo_ps(y[2], y[3])),
                c = _mm512_castps_pd(_mm512_unpackhi_ps(y[0], y[1])),
                d = _mm512_castps_pd(_mm512_unpackhi_ps(y[2], y[3]));
  x[0] = (vf)_mm512_unpacklo_pd(a, b);
  x[1] = (vf)_mm512_unpackhi_pd(a, b);
  x[2] = (vf)_mm512_unpacklo_pd(c, d);
  x[3] = (vf)_mm512_unpackhi_pd(c, d);
}
INLINE void store_fours(uint8_t* to, int64_t apart, vi words) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)),
                x = _mm512_shuffle_epi8((__m512i)words, order);
  _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(x));
  _mm_storeu_si128((__m128i*)(to + apart), _mm512_extracti32x4_epi32(x, 1));
  _mm_storeu_si128((__m128i*)(to + 2 * apart), _mm512_extracti32x4_epi32(x, 2));
  _mm_storeu_si128((__m128i*)(to + 3 * apart), _mm512_extracti32x4_epi32(x, 3));
}
INLINE void store_line(uint8_t* p, const vi* x, bool stream) {
  const __m512i low = _mm512_set1_epi32(0xff),
                words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i a = _mm512_packus_epi32(_mm512_and_si512((__m512i)x[0], low), _mm512_and_si512((__m512i)x[1], low));
  const __m512i b = _mm512_packus_epi32(_mm512_and_si512((__m512i)x[2], low), _mm512_and_si512((__m512i)x[3], low));
  const __m512i bytes = _mm512_permutexvar_epi32(words, _mm512_packus_epi16(a, b));
  if (stream) _mm512_stream_si512((__m512i*)p, bytes);
  else _mm512_storeu_si512(p, bytes);
}
INLINE void stream(float* p, vf x) { _mm512_stream_ps(p, (__m512)x); }
INLINE void stream_end() { _mm_sfence(); }
INLINE float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }

// Sixteen horizontal sums at once: 45 instructions instead of 128, by halving pairs of vectors. All 16 must be there.
INLINE void sum_each(const vf* x, int, float* to) {
  __m512 y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) y[i] = (__m512)x[i];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    y[i] = _mm512_add_ps(_mm512_unpacklo_ps(y[2 * i], y[2 * i + 1]), _mm512_unpackhi_ps(y[2 * i], y[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    y[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // Every 128 bits of y[i] are a part of the sums 4 i .. 4 i + 3.
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    y[i] = _mm512_add_ps(_mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(y[2 * i], y[2 * i + 1], 0xee));
  const __m512 z = _mm512_add_ps(_mm512_shuffle_f32x4(y[0], y[1], 0x88), _mm512_shuffle_f32x4(y[0], y[1], 0xdd));
  _mm512_storeu_ps(to, z);
}

INLINE vf sum_in_all(vf x) {
  x += exchanged<2>(x);
  x += exchanged<1>(x);
  x += exchanged<8>(x);
  return x + exchanged<4>(x);
}

template <int DEGREE>
INLINE vf exp2_neg(vf x) {
  return (vf)_mm512_scalef_ps((__m512)exp2_fraction<DEGREE>((vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF)),
                              (__m512)x);
}

// Eight vectors, n of which count, each to its largest number, twice over in the 16 lanes: what is loaded as a whole
// vector afterwards must have been stored as one.
INLINE void max_each(const vf* x, int n, float* to) {
  const auto two = [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); };
  __m512 y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) y[i] = (__m512)x[i];
  const int pairs = n > 4 ? 4 : 2;
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    if (i == 2 && pairs == 2) break;
    y[i] = two(_mm512_unpacklo_ps(y[2 * i], y[2 * i + 1]), _mm512_unpackhi_ps(y[2 * i], y[2 * i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    if (i == 1 && pairs == 2) break;
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    y[i] = two(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 other = pairs == 4 ? y[1] : y[0];
  const __m512 z = two(_mm512_shuffle_f32x4(y[0], other, 0x44), _mm512_shuffle_f32x4(y[0], other, 0xee));
  _mm512_storeu_ps(to, two(_mm512_shuffle_f32x4(z, z, 0x88), _mm512_shuffle_f32x4(z, z, 0xdd)));
}

}  // namespace
