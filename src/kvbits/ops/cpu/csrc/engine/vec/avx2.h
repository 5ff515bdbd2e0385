// 8 float lanes.
#pragma once
#include <immintrin.h>

#define VL 8
#define HAVE_FROM_FP16
#define HAVE_BYTES
#define HAVE_FOURS
#define HAVE_EXCHANGED
#define HAVE_WORDS
#define HAVE_LANES
#define HAVE_LOOKUP
#define HAVE_SUM_EACH
#define HAVE_SUM_IN_ALL
#include "portable.h"

namespace {

INLINE vi turned(vi x, int left) {
  if (left == 8)
    return (vi)_mm256_shuffle_epi8(
        (__m256i)x, _mm256_broadcastsi128_si256(_mm_setr_epi8(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14)));
  return (vi)((vu)x << left | (vu)x >> (32 - left));
}
INLINE vi bits_of(int mask, vi a, vi b) {
  const vi m = splat_int(mask * 0x01010101);
  return (a & m) | (vi)_mm256_andnot_si256((__m256i)m, (__m256i)b);
}
INLINE vi flipped(vi a, vi b, int mask) { return a ^ (b & mask * 0x01010101); }
INLINE vi masked_or(vi a, vi b, int mask) { return a | (b & mask * 0x01010101); }
INLINE vi shifted_by(vi x, const int32_t& by) { return (vi)_mm256_srl_epi32((__m256i)x, _mm_cvtsi32_si128(by)); }
INLINE vi looked_up(const uint8_t (&table)[16], vi x) {
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)x);
}
// The sums of n <= 16 vectors, eight at once.
INLINE void sum_each(const vf* x, int n, float* to) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 y[4];
    for (int k = 0; k < 4; k++) y[k] = _mm256_hadd_ps((__m256)x[i + 2 * k], (__m256)x[i + 2 * k + 1]);
    const __m256 a = _mm256_hadd_ps(y[0], y[1]), b = _mm256_hadd_ps(y[2], y[3]);
    _mm256_storeu_ps(to + i,
                     _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
  }
  for (; i < n; i++) to[i] = sum(x[i]);
}
INLINE vi load_quads(const uint8_t* const (&at)[2]) {
  return (vi)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at[0])),
                                     _mm_loadu_si128((const __m128i*)at[1]), 1);
}
INLINE vi odd_levels(vi x, bool fitted) {
  const __m128i table = fitted ? _mm_setr_epi8(-9, -5, -3, -1, 1, 3, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0)
                               : _mm_setr_epi8(-7, -5, -3, -1, 1, 3, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0);
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)x);
}
template <int N>
INLINE vi lanes_behind(vi before, vi x) {
  return (vi)_mm256_alignr_epi8((__m256i)x, (__m256i)before, 16 - 4 * N);
}
INLINE vf from_fp16(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE vi load_bytes(const uint8_t* p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE void store_bytes(uint8_t* p, vi x) {
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xff));
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(half, half));
}
template <int N>
INLINE vf exchanged(vf x) {
  if (N < 4) return (vf)_mm256_permute_ps((__m256)x, N == 1 ? 0xb1 : 0x4e);
  return (vf)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
}
INLINE vf sum_in_all(vf x) {
  x += exchanged<1>(x);
  x += exchanged<2>(x);
  return x + exchanged<4>(x);
}
INLINE void load_fours(const float* const* at, int64_t offset, vf (&x)[4]) {
  __m256 y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    y[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at[i] + offset)), _mm_loadu_ps(at[4 + i] + offset),
                                1);
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(y[0], y[1])),
                b = _mm256_castps_pd(_mm256_unpacklo_ps(y[2], y[3])),
                c = _mm256_castps_pd(_mm256_unpackhi_ps(y[0], y[1])),
                d = _mm256_castps_pd(_mm256_unpackhi_ps(y[2], y[3]));
  x[0] = (vf)_mm256_unpacklo_pd(a, b);
  x[1] = (vf)_mm256_unpackhi_pd(a, b);
  x[2] = (vf)_mm256_unpacklo_pd(c, d);
  x[3] = (vf)_mm256_unpackhi_pd(c, d);
}
INLINE void store_fours(uint8_t* to, int64_t apart, vi words) {
  const __m256i order = _mm256_broadcastsi128_si256(
                    _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)),
                x = _mm256_shuffle_epi8((__m256i)words, order);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(x));
  _mm_storeu_si128((__m128i*)(to + apart), _mm256_extracti128_si256(x, 1));
}

}  // namespace
