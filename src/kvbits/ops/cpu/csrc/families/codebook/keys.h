// Keys whose codes number the entries of a codebook, or that are stored before the rotary embedding (arXiv:2401.18079), against fp32 queries.
//
// They are decoded tile by tile (16 tokens) to fp32, turned (angles.h) and multiplied with all rows. Formats whose scale and bias belong to channels
// need no arithmetic to decode: a table per channel holds the 16 numbers.
#pragma once
#include <stdint.h>

#include "decoded.h"
#include "engine/attend/dots.h"
#include "engine/attend/dots_float.h"
#include "engine/attend/tensor.h"

namespace {

// What codes of a format stand for, integers around the middle of their range. Not for whole bytes.
static void fill_levels(float* to, const kvbits_tensor& t, int kv_head) {
  const int entries = 1 << code_bits(t.format);
  for (int i = 0; i < LEVELS; i++) {
    const int code = i % entries;
    to[i] = t.codebook ? t.codebook[(int64_t)kv_head * entries + code] : (float)code - int_zero(t.format);
  }
}

// Codes of the tile that begins at token `first` of the page, a byte each.
static void unpack_keys(const Tensor& key, const PageView& at, Decoded& w, int first) {
  const int head_dim = key.head_dim;
  int up = code_bits(key.t->format);
  for (int plane = 0; plane < num_planes(key.t->format); plane++) {
    const int bits = plane_bits(key.t->format, plane), rb = key.row_bytes[plane];
    up -= bits;
    const int mask = bits == 8 ? -1 : ((1 << bits) - 1) * 0x01010101;
    const uint8_t* src = at.page + key.t->plane_offset[plane] + (int64_t)first * rb;
    for (int field = 0; field * rb < head_dim; field++)
      for (int r = 0; r < rb && field * rb + r < head_dim; r += 4) {
        uint32_t* to = w.codes[(field * rb + r) / 4];
        if (!field) fetch(src + r * TILE + at.ahead);
        for (int lane = 0; lane < TILE; lane += VL) {
          const vi x = (*(const vi_mem*)(src + r * TILE + lane * 4) >> (field * bits) & mask) << up;
          *(vi_mem*)(to + lane) = plane ? *(vi_mem*)(to + lane) | x : x;
        }
      }
  }
}

INLINE vf level_of(const Decoded& w, int format, vi word, int k) {
  if (format == FORMAT_INT8) return to_float((word >> (8 * k)) & 0xff) - 128.0f;
  if (format == FORMAT_FP8_E4M3) return fp8_lane<FORMAT_FP8_E4M3>(word, k);
  if (format == FORMAT_FP8_E5M2) return fp8_lane<FORMAT_FP8_E5M2>(word, k);
  return look_up(w.levels, word >> (8 * k));
}

// Whether a look-up gives the tile's numbers whole: no factor and offset per token.
INLINE bool looked_up(const Tensor& key, const Decoded& w, int tile) {
  return code_bits(key.format) < 8 && !key.token_scales && !(key.stretched && w.stretched[tile]);
}

// A tile's keys in fp32, before they are turned, without outliers.
static void decode_keys(const Tensor& key, const Block& b, Decoded& w, int tile) {
  const int format = key.format;
  const float* factor = key.stretched ? w.factor : w.ones;
  for (int c = 0; c < key.head_dim; c += 4) {
    const int g = c / key.group_channels;
    for (int lane = 0; lane < TILE; lane += VL) {
      const int token = tile * TILE + lane;
      const vi word = load_int(w.codes[c / 4] + lane);
      const vf scale = load((key.token_scales ? b.k_scale[g] : factor) + token);
      const vf bias = key.token_bias ? load(b.k_bias[g] + token) : vf{};
      for (int i = 0; i < 4; i++)
        store(w.key[c + i] + lane, level_of(w, format, word, i) * (scale * b.k_channel[c + i]) + (bias + b.k_channel_bias[c + i]));
    }
  }
}

// How key_tile comes by a tile's numbers: decoded before, looked up by unpacked codes, or by codes as they lie in the page.
enum KeySource { DECODED, UNPACKED, NIBBLES };

// Codes as they lie in a page, where the fields of a byte are those of channels d and d + head_dim / 2 four bits apart: in nibbles (4 bits), in
// fields 2 apart (2 bits), or in both planes (3 bits). One word then gives both in its nibbles, with other channels' bits above those of 2 bits,
// which the repeated table does not mind.
struct Nibbles {
  const uint8_t* src[2];
  int row_bytes[2];
  int bits;
  int64_t ahead;
};

INLINE bool has_nibbles(int bits, const int* row_bytes, int head_dim) {
  return bits == 4 || (bits == 2 && row_bytes[0] * 4 == head_dim) || (bits == 3 && row_bytes[1] * 8 == head_dim);
}

// Codes of 3 bits from 2-bit fields at bit `shift` of their nibbles (0 or 2) and 1-bit fields at bit 0. Bit 3 is anything.
INLINE vi join_nibbles(vi two, int shift, vi one) { return ((shift ? two >> 1 : two << 1) & 0x66666666) | (one & ~0x66666666); }

// Scores of a tile against NH rows; `turns` is the tile's part of kvbits_tensor.turns.
template <KeySource FROM, bool TURN, int NH>
static void key_tile(const Decoded& w, const Nibbles& n, const float* turns, int head_dim, const float* q, float* s) {
  const int half = head_dim / 2;
  for (int lane = 0; lane < TILE; lane += VL) {
    vf low[NH] = {}, high[NH] = {};
    int r = 0, r1 = 0, shift = 0, shift1 = 0;
    for (int d = 0; d < half; d += 4) {
      vi words[2];
      if (FROM == NIBBLES) {
        const uint8_t* src = n.src[0] + r * TILE + lane * 4;
        if (!shift) fetch(src + n.ahead);
        words[0] = load_int(src);
        if (n.bits != 3) words[0] >>= shift;
        else {
          const uint8_t* src1 = n.src[1] + r1 * TILE + lane * 4;
          if (!shift1) fetch(src1 + n.ahead);
          words[0] = join_nibbles(words[0], shift, load_int(src1) >> shift1);
          if ((r1 += 4) == n.row_bytes[1]) r1 = 0, shift1++;
        }
        if ((r += 4) == n.row_bytes[0]) r = 0, shift += 2;
        words[1] = words[0] >> 4;
      } else if (FROM == UNPACKED) {
        words[0] = load_int(w.codes[d / 4] + lane);
        words[1] = load_int(w.codes[(half + d) / 4] + lane);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        vf a, b;
        if (FROM == DECODED) {
          a = load(w.key[d + k] + lane);
          b = load(w.key[half + d + k] + lane);
        } else {
          a = look_up(w.table[d + k], words[0] >> (8 * k));
          b = look_up(w.table[half + d + k], words[1] >> (8 * k));
        }
        if (TURN) {
          const vf cos = load(turns + (d + k) * 2 * TILE + lane), sin = load(turns + (d + k) * 2 * TILE + TILE + lane);
          const vf x = a * cos - b * sin;
          b = b * cos + a * sin;
          a = x;
        }
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          low[h] += a * q[h * ROW_STRIDE + d + k];
          if (VL == 16) high[h] += b * q[h * ROW_STRIDE + half + d + k];
          else low[h] += b * q[h * ROW_STRIDE + half + d + k];
        }
      }
    }
    for (int h = 0; h < NH; h++) store(s + h * BLOCK + lane, low[h] + high[h]);
  }
}

}  // namespace
