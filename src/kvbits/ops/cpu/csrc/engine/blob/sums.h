// What the words of a checksum are multiplied with: c[i] = C[i % 4096] * D[i / 4096], all odd (docs/reference/formats.md).
#pragma once
#include <stdint.h>

constexpr int64_t CHECKSUM_WORDS = 4096;

// splitmix64 (https://prng.di.unimi.it/splitmix64.c), made odd.
static inline uint64_t odd_number(uint64_t i) {
  uint64_t z = (i + 1) * UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return (z ^ (z >> 31)) | 1;
}

// D.
static inline uint64_t across(int64_t run) { return odd_number((UINT64_C(1) << 40) + (uint64_t)run); }
