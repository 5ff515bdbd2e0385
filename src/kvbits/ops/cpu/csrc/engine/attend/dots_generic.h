// Integer dot products in plain C. Integer q and p are int16, q by channel, p by slot (tokens 0 1 4 5 2 3 6 7 of
// eight).
#pragma once
#include "state.h"

namespace {

constexpr bool DOTS_CENTER_INT8 = false;  // codes enter the dot products as they are stored
constexpr bool DOTS_CENTER_INT4_VALUES = false;

template <bool WIDE>
INLINE void store_q(uint8_t* row, int channel, vi q) {
  int16_t* to = (int16_t*)row + channel;
  for (int i = 0; i < VL; i++) to[i] = (int16_t)q[i];
}

// Integer p of 64 tokens; returns their sum, in VL parts.
template <bool WIDE>
INLINE vf store_p(uint8_t* row, const vi* p) {
  static const int slot[8] = {0, 1, 4, 5, 2, 3, 6, 7};  // its own inverse
  int16_t* to = (int16_t*)row;
  vi total = vi{};
  for (int t = 0; t < BLOCK; t++) to[t / 8 * 8 + slot[t % 8]] = (int16_t)p[t / VL][t % VL];
  for (int i = 0; i < BLOCK / VL; i++) total += p[i];
  return to_float(total);
}

// Products of indices up to MOST (families/klt/keys.h), 4 channels of VL tokens in a word each.
constexpr int BAND_ROWS_OF_TWO = 1;  // up to how many rows two vectors of tokens go side by side
constexpr int NARROW_Q_BYTES = 2;
typedef const int16_t* BandQuery;
INLINE BandQuery band_query(const uint8_t* q) { return (const int16_t*)q; }
INLINE void add_band_word(vi& to, vi codes, BandQuery q) {
  for (int k = 0; k < 4; k++) to += (codes >> (8 * k) & 255) * q[k];
}
template <int MOST>
INLINE void add_band_words(vi& to, const vi (&x)[4], const BandQuery (&q)[4]) {
  for (int i = 0; i < 4; i++) add_band_word(to, x[i], q[i]);
}

// 512 channels of 16-bit q against 8-bit codes overflow 32 bits.
template <bool WIDE> struct KeySum { typedef int32_t type; };
template <> struct KeySum<true> { typedef int64_t type; };

template <int FMT, int NH>
static void key_int(const KeyArgs& a) {
  typedef typename KeySum<is_wide(FMT)>::type Sum;
  const Chunk& c = *a.chunk;
  for (int t = 0; t < round_up(a.tokens, 2 * TILE); t += TILE)
    for (int g = 0; g < a.groups; g++) {
      const int c0 = g * a.group_channels, c1 = c0 + a.group_channels;
      Sum acc[NH][TILE] = {};
      for (int plane = 0; plane < num_planes(FMT); plane++) {
        const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane], mask = (1 << bits) - 1;
        for (int h = 0; h < NH; h++)
          for (int i = 0; i < TILE; i++) acc[h][i] *= 1 << (plane ? bits : 0);
        for (int channel = c0; channel < c1; channel += 4) {
          const int shift = channel / rb * bits;
          const uint8_t* src = a.plane[plane] + (int64_t)t * rb + channel % rb * TILE;
          for (int h = 0; h < NH; h++) {
            const int16_t* q = (const int16_t*)c.qw[h] + channel;
            for (int i = 0; i < TILE; i++) {
              int32_t x = 0;
              for (int k = 0; k < 4; k++) x += (src[i * 4 + k] >> shift & mask) * q[k];
              acc[h][i] += x;
            }
          }
        }
      }
      for (int h = 0; h < NH; h++)
        for (int i = 0; i < TILE; i++) {
          float x = (float)acc[h][i] * c.q_scale[g][h] + c.q_zero[g][h];
          if (a.scale) x *= a.scale[g * BLOCK + t + i];
          if (a.bias) x += a.bias[g * BLOCK + t + i] * c.q_sum[g][h];
          float* s = a.s + h * BLOCK + t + i;
          *s = g ? *s + x : x;
        }
    }
}

template <int FMT, int NH>
static void value_int(const ValueArgs& a) {
  float weight = 1.0f;
  for (int plane = num_planes(FMT) - 1; plane >= 0; plane--) {
    const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane], mask = (1 << bits) - 1;
    for (int channel = 0; channel < a.head_dim; channel++) {
      const int r = channel % rb, g = channel / a.group_channels, shift = channel / rb * bits;
      const int width = rb - r / 16 * 16 < 16 ? rb - r / 16 * 16 : 16;
      const uint8_t* src = a.plane[plane] + (int64_t)(r / 16 * 16) * a.page_size + a.first_token * width + r % 16 * 4;
      for (int h = 0; h < NH; h++) {
        const int16_t* p = (const int16_t*)a.block->pw[g][h];
        int32_t acc = 0;
        for (int t = 0; t < round_up(a.tokens, 8); t += 4)
          for (int u = 0; u < 4; u++) acc += (src[t * width + u] >> shift & mask) * p[t + u];
        const float x = (float)acc * (a.block->p_scale[g][h] * weight);
        a.chunk->acc[h][channel] += a.channel_scale ? x * a.channel_scale[channel] : x;
      }
    }
    weight *= (float)(1 << bits);
  }
}

constexpr int LEVEL_ROWS_OF_FOUR = 8, LEVEL_ROWS_OF_TWO = 8;  // up to how many rows runs go side by side
// Dot products of levels (families/klt/values.h) of magnitude up to MOST, 4 channels of four tokens at a time: runs FIRST,
// FIRST + STEP .. of each quad of tokens.
template <int MOST, int NH, int FIRST, int STEP, class Levels>
INLINE void dot_levels(const ValueArgs& a, const Levels& levels, vf (&sums)[4 / STEP][NH]) {
  const int16_t* p = (const int16_t*)a.block->pw[0][0];
  const int quads = round_up(a.tokens, 8) / 4;
  vi acc[4 / STEP][NH] = {};
  for (int quad = 0; quad < quads; quad++, p += 4) {
    vi level[4];
    levels.load(quad, level);
    for (int i = 0; i < 4 / STEP; i++)
      for (int k = 0; k < 4; k++) {
        const vi x = (level[FIRST + i * STEP] << (24 - 8 * k)) >> 24;
        for (int h = 0; h < NH; h++) acc[i][h] += x * p[h * BLOCK + k];
      }
  }
  for (int i = 0; i < 4 / STEP; i++)
    for (int h = 0; h < NH; h++) sums[i][h] = to_float(acc[i][h]);
}

}  // namespace
