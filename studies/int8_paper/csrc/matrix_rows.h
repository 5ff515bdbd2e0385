// Rows of a matrix [rows, columns] fp32, row-major: the INT8 paper's column scales, quantization and dequantization,
// and quantization with a scale per row and group of columns. Rounding as in quant/qparams.py: x * (1 / scale), half to
// even.
#pragma once
#include <stdint.h>

#include "engine/vec/vec.h"

namespace {

// largest[c] = max(largest[c], |x[r][c]|), in memory order: several rows at once saved loads but lost a third of the
// bandwidth.
static void column_largest(const float* x, int64_t rows, int64_t columns, float* largest) {
  for (int64_t r = 0; r < rows; r++, x += columns) {
    int64_t c = 0;
    for (; c + VL <= columns; c += VL) {
      // magnitudes order like integers
      const vi top = *(const vi_mem*)(largest + c), mag = (vi)load(x + c) & 0x7fffffff;
      *(vi_mem*)(largest + c) = mag > top ? mag : top;
    }
    for (; c < columns; c++) largest[c] = __builtin_fmaxf(largest[c], __builtin_fabsf(x[c]));
  }
}

INLINE vi signed_code(vf x, vf inverse, float top) {
  const vf scaled = vmin(vmax(x * inverse, splat(-top)), splat(top));
  return round_to_int(scaled);
}

static void quantize_columns(const float* x, int64_t rows, int64_t columns, const float* inverse, int8_t* to,
                             bool stream) {
  for (int64_t r = 0; r < rows; r++, x += columns, to += columns) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) {
      vi codes[64 / VL];
#pragma GCC unroll 4
      for (int i = 0; i < 64 / VL; i++)
        codes[i] = signed_code(load(x + c + i * VL), load(inverse + c + i * VL), 127.0f);
      store_line((uint8_t*)to + c, codes, stream);
    }
    for (; c < columns; c++) to[c] = (int8_t)signed_code(splat(x[c]), splat(inverse[c]), 127.0f)[0];
  }
  stream_end();
}

static void dequantize_columns(const int8_t* q, int64_t rows, int64_t columns, const float* scales, float* to,
                               bool past_caches) {
  for (int64_t r = 0; r < rows; r++, q += columns, to += columns) {
    int64_t c = 0;
    for (; c + VL <= columns; c += VL) {
      const vf x = to_float(load_bytes((const uint8_t*)q + c) << 24 >> 24) * load(scales + c);
      if (past_caches) stream(to + c, x);
      else store(to + c, x);
    }
    for (; c < columns; c++) to[c] = (float)q[c] * scales[c];
  }
  stream_end();
}

// One division and one tree of maxima serve them. No prefetching: it halved the rate, the hardware follows rows by
// itself.
constexpr int GROUPS_AT_ONCE = 8;
constexpr int GROUP_LANES = VL > GROUPS_AT_ONCE ? VL : GROUPS_AT_ONCE;

// Scales of up to GROUPS_AT_ONCE neighbouring groups of `size` columns (a multiple of VL), and 1 / scale.
INLINE void group_scales(const float* x, int size, int count, float top, float* scales, float* inverse) {
  vf most[GROUPS_AT_ONCE];
  for (int g = count; g < GROUPS_AT_ONCE; g++) most[g] = vf{};
  for (int g = 0; g < count; g++) {
    vf largest = vf{};
    for (int c = 0; c < size; c += VL) {
      largest = vmax(largest, (vf)((vi)load(x + g * size + c) & 0x7fffffff));
    }
    most[g] = largest;
  }
  alignas(64) float scale[GROUP_LANES] = {};
  max_each(most, count, scale);
  for (int i = 0; i < GROUP_LANES; i += VL) {
    const vf largest = load(scale + i);
    const vf s = select(largest > vf{}, largest / top, splat(1.0f));
    store(scale + i, s);
    store(inverse + i, 1.0f / s);
  }
  __builtin_memcpy(scales, scale, count * sizeof(float));
}

// `count` vectors of codes of a row, as bytes.
INLINE void store_codes(uint8_t* to, const vi* codes, int count, bool stream) {
  if (count == 64 / VL) return store_line(to, codes, stream);
  for (int i = 0; i < count; i++) store_bytes(to + i * VL, codes[i]);
}

// bits 8: to [rows, columns] int8. bits 4: to [rows, columns / 2], byte r = column r | column (r + columns / 2) << 4,
// codes + 8.
INLINE void quantize_group_rows(const float* x, int64_t rows, int64_t columns, int size, int bits, float* scales,
                                uint8_t* to, bool stream) {
  const int64_t groups = columns / size, half = columns / 2;
  for (int64_t r = 0; r < rows; r++, x += columns, scales += groups, to += bits == 8 ? columns : half) {
    const int64_t outer = bits == 8 ? groups : groups / 2;
    const float top = bits == 8 ? 127.0f : 7.0f;
    for (int64_t g0 = 0; g0 < outer; g0 += GROUPS_AT_ONCE) {
      const int together = outer - g0 < GROUPS_AT_ONCE ? (int)(outer - g0) : GROUPS_AT_ONCE;
      alignas(64) float low_inverse[GROUP_LANES], high_inverse[GROUP_LANES];
      group_scales(x + g0 * size, size, together, top, scales + g0, low_inverse);
      if (bits == 4) group_scales(x + g0 * size + half, size, together, top, scales + g0 + groups / 2, high_inverse);
      for (int g = 0; g < together; g++) {
        const float *low = x + (g0 + g) * size, *high = low + half;
        const vf a = splat(low_inverse[g]), b = splat(bits == 4 ? high_inverse[g] : 0.0f);
        for (int c = 0; c < size; c += 64) {
          const int count = (size - c < 64 ? size - c : 64) / VL;
          vi codes[64 / VL];
#pragma GCC unroll 4
          for (int i = 0; i < count; i++) {
            const int at = c + i * VL;
            codes[i] = signed_code(load(low + at), a, top);
            if (bits == 4) codes[i] = (codes[i] + 8) | (signed_code(load(high + at), b, top) + 8) << 4;
          }
          store_codes(to + (g0 + g) * size + c, codes, count, stream);
        }
      }
    }
  }
  stream_end();
}

static void quantize_groups(const float* x, int64_t rows, int64_t columns, int size, int bits, float* scales,
                            uint8_t* to, bool stream) {
  if (size == 64 && bits == 8) quantize_group_rows(x, rows, columns, 64, 8, scales, to, stream);
  else if (size == 64) quantize_group_rows(x, rows, columns, 64, 4, scales, to, stream);
  else quantize_group_rows(x, rows, columns, size, bits, scales, to, stream);
}

}  // namespace
