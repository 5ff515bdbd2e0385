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

// Sums of `count` words of each of U units, `stride` bytes apart: their factors are the same, so they are loaded once (all 4,096 fill a core's first cache).
#if defined(KVBITS_AVX512)
template <int U>
inline void run_sums(const uint8_t* bytes, int64_t stride, const uint64_t* within, int64_t count, uint64_t* sums) {
  __m512i sum[U][2] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m512i c = _mm512_loadu_si512(within + i + 8 * h);
#pragma GCC unroll 4
      for (int u = 0; u < U; u++)
        sum[u][h] = _mm512_add_epi64(sum[u][h], _mm512_mullo_epi64(_mm512_loadu_si512(bytes + u * stride + 8 * (i + 8 * h)), c));
    }
  for (int u = 0; u < U; u++) {
    sums[u] = (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(sum[u][0], sum[u][1]));
    for (int64_t j = i; j < count; j++) sums[u] += word(bytes + u * stride, j) * within[j];
  }
}
#elif defined(KVBITS_AVX2)
// A product modulo 2^64: the low halves give 64 bits; cross terms count in the upper 32 only, so their sums need 32 bits and are shifted once, at the end.
template <int U>
inline void run_sums(const uint8_t* bytes, int64_t stride, const uint64_t* within, int64_t count, uint64_t* sums) {
  __m256i low[U] = {}, cross[U] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const __m256i c = _mm256_loadu_si256((const __m256i*)(within + i)), turned = _mm256_shuffle_epi32(c, 0xb1);
#pragma GCC unroll 4
    for (int u = 0; u < U; u++) {
      const __m256i w = _mm256_loadu_si256((const __m256i*)(bytes + u * stride + 8 * i));
      low[u] = _mm256_add_epi64(low[u], _mm256_mul_epu32(w, c));
      cross[u] = _mm256_add_epi32(cross[u], _mm256_mullo_epi32(w, turned));
    }
  }
  for (int u = 0; u < U; u++) {
    const __m256i high = _mm256_slli_epi64(_mm256_add_epi32(cross[u], _mm256_shuffle_epi32(cross[u], 0xb1)), 32);
    uint64_t lane[4];
    _mm256_storeu_si256((__m256i*)lane, _mm256_add_epi64(low[u], high));
    sums[u] = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    for (int64_t j = i; j < count; j++) sums[u] += word(bytes + u * stride, j) * within[j];
  }
}
#else
template <int U>
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-tree-vectorize")))  // vectors without 64-bit products are slower than scalars
#endif
void run_sums(const uint8_t* bytes, int64_t stride, const uint64_t* within, int64_t count, uint64_t* sums) {
  for (int u = 0; u < U; u++) {
    const uint8_t* unit = bytes + u * stride;
    uint64_t sum[4] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      for (int k = 0; k < 4; k++) sum[k] += word(unit, i + k) * within[i + k];
    for (; i < count; i++) sum[0] += word(unit, i) * within[i];
    sums[u] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}
#endif

template <int U>
void unit_sums(const uint8_t* bytes, int64_t nbytes, const uint64_t* within, uint64_t* sums) {
  const int64_t count = nbytes / 8;
  for (int u = 0; u < U; u++) sums[u] = 0;
  for (int64_t run = 0; run * CHECKSUM_WORDS < count; run++) {
    const int64_t first = run * CHECKSUM_WORDS, n = count - first < CHECKSUM_WORDS ? count - first : CHECKSUM_WORDS;
    uint64_t of_run[U];
    run_sums<U>(bytes + 8 * first, nbytes, within, n, of_run);
    for (int u = 0; u < U; u++) sums[u] += across(run) * of_run[u];
  }
}

void checksums(const uint8_t* bytes, int64_t units, int64_t nbytes, const uint64_t* within, uint64_t* sums) {
  int64_t i = 0;
  for (; i + 4 <= units; i += 4) unit_sums<4>(bytes + i * nbytes, nbytes, within, sums + i);
  for (; i < units; i++) unit_sums<1>(bytes + i * nbytes, nbytes, within, sums + i);
}

}  // namespace
