// Number formats and stored order, as docs/reference/formats.md has them.
#pragma once
#include "engine/vec/vec.h"
#include "kvbits_cpu.h"

namespace {

constexpr int TILE = 16;  // tokens interleaved in a key tile

// Codes lie in bit planes, high bits first.
constexpr bool is_int(int format) { return number_format(format).levels == INTEGER; }
constexpr bool is_codebook(int format) { return number_format(format).levels == CODEBOOK; }
constexpr bool is_trellis(int format) { return number_format(format).levels == TRELLIS; }
constexpr bool is_float(int format) { return number_format(format).exponent_bits > 0; }
constexpr int code_bits(int format) { return number_format(format).bits0 + number_format(format).bits1; }
constexpr int num_planes(int format) { return number_format(format).bits1 ? 2 : 1; }
constexpr int plane_bits(int format, int plane) {
  return plane ? number_format(format).bits1 : number_format(format).bits0;
}
constexpr int exponent_bias(int format) { return (1 << number_format(format).exponent_bits) / 2 - 1; }

// Plain integers of a width that trellis values have, -1 where there are none of 2 to 4 bits.
constexpr int integers_of_bits(int bits) {
  return bits == 2 ? FORMAT_INT2 : bits == 3 ? FORMAT_INT3 : bits == 4 ? FORMAT_INT4 : -1;
}

INLINE float float_bits(int bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
INLINE int round_up(int n, int m) { return (n + m - 1) / m * m; }
INLINE int row_bytes_of(int head_dim, int bits) { return (head_dim * bits + 31) / 32 * 4; }
INLINE float int_zero(int format) { return (float)(1 << (code_bits(format) - 1)); }  // the middle of the code range

}  // namespace
