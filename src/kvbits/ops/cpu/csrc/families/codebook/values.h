// Values whose codes number the entries of a codebook: unpacked to a byte per code, then looked up and multiplied in fp32.
#pragma once
#include <stdint.h>

#include "decoded.h"
#include "engine/attend/dots.h"
#include "keys.h"

namespace {

// Words of a quad's row, not a multiple of 64 bytes times a power of two: rows fall into different L1 sets.
INLINE int code_stride(int head_dim) { return round_up(head_dim, 16) + 16; }

// A block's codes, a byte each, [quad][channel].
static void unpack_values(const ValueArgs& a, Decoded& w, int format) {
  int up = code_bits(format);
  const int quads = round_up(a.tokens, 8) / 4, stride = code_stride(a.head_dim);
  for (int plane = 0; plane < num_planes(format); plane++) {
    const int bits = plane_bits(format, plane), rb = a.row_bytes[plane];
    up -= bits;
    const int mask = ((1 << bits) - 1) * 0x01010101;
    for (int field = 0; field * rb < a.head_dim; field++)
      for (int r = 0; r < rb && field * rb + r < a.head_dim; r += 16) {
        const int width = rb - r < 16 ? rb - r : 16, channel = field * rb + r;
        const uint8_t* src = a.plane[plane] + (int64_t)r * a.page_size + a.first_token * width;
        // Whole vectors are stored: what lies behind a run is a later run's, or nobody's.
        for (int quad = 0; quad < quads; quad++, src += 4 * width) {
          if (!field) fetch(src + a.ahead);
          for (int i = 0; i < width; i += VL) {
            uint32_t* to = w.value_codes + quad * stride + channel + i;
            const vi x = (load_words(src + i * 4, width - i) >> (field * bits) & mask) << up;
            *(vi_mem*)to = plane ? *(vi_mem*)to | x : x;
          }
        }
      }
  }
}

// acc[rows][channels] += p . levels, p in fp32.
template <int NH>
static void value_levels(const ValueArgs& a, Decoded& w, int format) {
  unpack_values(a, w, format);
  const int tokens = round_up(a.tokens, 8), stride = code_stride(a.head_dim);
  for (int c = 0; c < a.head_dim; c += VL)
    for (int g = c / a.group_channels; g < a.groups && g * a.group_channels < c + VL; g++) {
      vf acc[NH] = {};
      const float* p = a.block->pf[g][0];
      for (int t = 0; t < tokens; t += 4) {
        const vi word = load_int(w.value_codes + t / 4 * stride + c);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          // Slots 0 1 4 5 of eight tokens in the first quad, 2 3 6 7 in the second.
          const int token = (t & ~7) + (t & 4) / 2 + (u & 1) + (u & 2) * 2;
          const vf x = look_up(w.value_levels, word >> (8 * u));
#pragma GCC unroll 8
          for (int h = 0; h < NH; h++) acc[h] += x * p[h * BLOCK + token];
        }
      }
      const vi at = iota() + splat_int(c);
      const vi inside = (at >= splat_int(g * a.group_channels)) & (at < splat_int((g + 1) * a.group_channels));
      for (int h = 0; h < NH; h++) add_output(a, h, c, acc[h], inside);
    }
}

}  // namespace
