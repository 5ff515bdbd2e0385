// Multilinear checksums of pages: a sum of c[i] * w[i] modulo 2^64 over 64-bit words (cache/blob.py).
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "sums.h"

namespace {

// The i-th word of bytes that no word may begin at.
inline uint64_t word(const uint8_t* bytes, int64_t i) {
  uint64_t x;
  memcpy(&x, bytes + 8 * i, 8);
  return x;
}

#if defined(KVBITS_AVX512)
inline uint64_t run_sum(const uint8_t* bytes, const uint64_t* within, int64_t count) {
  __m512i sum[4] = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32)
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++)
      sum[u] = _mm512_add_epi64(sum[u], _mm512_mullo_epi64(_mm512_loadu_si512(bytes + 8 * (i + 8 * u)), _mm512_loadu_si512(within + i + 8 * u)));
  uint64_t total = (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3])));
  for (; i < count; i++) total += word(bytes, i) * within[i];
  return total;
}
#elif defined(KVBITS_AVX2)
// Of a product modulo 2^64 the low halves give 64 bits; what crosses counts in the upper 32 only, so its sums need 32 bits and are shifted once, at the end.
inline uint64_t run_sum(const uint8_t* bytes, const uint64_t* within, int64_t count) {
  __m256i low[2] = {}, cross[2] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
#pragma GCC unroll 2
    for (int u = 0; u < 2; u++) {
      const __m256i w = _mm256_loadu_si256((const __m256i*)(bytes + 8 * (i + 4 * u))), c = _mm256_loadu_si256((const __m256i*)(within + i + 4 * u));
      low[u] = _mm256_add_epi64(low[u], _mm256_mul_epu32(w, c));
      cross[u] = _mm256_add_epi32(cross[u], _mm256_mullo_epi32(w, _mm256_shuffle_epi32(c, 0xb1)));
    }
  __m256i high = _mm256_add_epi32(cross[0], cross[1]);
  high = _mm256_slli_epi64(_mm256_add_epi32(high, _mm256_shuffle_epi32(high, 0xb1)), 32);
  uint64_t lane[4];
  _mm256_storeu_si256((__m256i*)lane, _mm256_add_epi64(_mm256_add_epi64(low[0], low[1]), high));
  uint64_t total = (lane[0] + lane[1]) + (lane[2] + lane[3]);
  for (; i < count; i++) total += word(bytes, i) * within[i];
  return total;
}
#else
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-tree-vectorize")))  // vectors without 64-bit products are slower than scalars
#endif
uint64_t run_sum(const uint8_t* bytes, const uint64_t* within, int64_t count) {
  uint64_t sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int u = 0; u < 4; u++) sum[u] += word(bytes, i + u) * within[i + u];
  for (; i < count; i++) sum[0] += word(bytes, i) * within[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
#endif

uint64_t checksum(const uint8_t* bytes, int64_t count, const uint64_t* within) {
  uint64_t total = 0;
  for (int64_t run = 0; run * CHECKSUM_WORDS < count; run++) {
    const int64_t first = run * CHECKSUM_WORDS;
    total += across(run) * run_sum(bytes + 8 * first, within, count - first < CHECKSUM_WORDS ? count - first : CHECKSUM_WORDS);
  }
  return total;
}

}  // namespace
