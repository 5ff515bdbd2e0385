// Number formats and stored order, as docs/formats.md has them.
#pragma once
#include "kvbits_cpu.h"
#include "vec/vec.h"

namespace {

constexpr int TILE = 16;  // tokens interleaved in a key tile

// Codes lie in bit planes, high bits first. Codes of 4 bits and a low plane of 4 bits in another page are one 8-bit code around 128,
// 15 * high + low; its scale is a 15th.
constexpr int NESTED = KVBITS_NUM_FORMATS;
constexpr float LOW_LEVELS = 15.0f;
constexpr bool is_int(int format) { return format >= KVBITS_INT8 && format <= KVBITS_INT2; }
constexpr bool is_codebook(int format) { return format >= KVBITS_NUQ4 && format <= KVBITS_NUQ2; }
constexpr int code_bits(int format) {
  if (is_codebook(format)) return KVBITS_NUQ4 + 4 - format;
  return format == KVBITS_INT4 || format == NESTED ? 4 : format == KVBITS_INT3 ? 3 : format == KVBITS_INT2 ? 2 : 8;
}
constexpr int num_planes(int format) { return code_bits(format) == 3 ? 2 : 1; }
constexpr int plane_bits(int format, int plane) { return code_bits(format) == 3 ? 2 - plane : code_bits(format); }
INLINE int round_up(int n, int m) { return (n + m - 1) / m * m; }
INLINE int row_bytes_of(int head_dim, int bits) { return (head_dim * bits + 31) / 32 * 4; }
INLINE float int_zero(int format) { return (float)(1 << (code_bits(format) - 1)); }  // the middle of the code range

}  // namespace
