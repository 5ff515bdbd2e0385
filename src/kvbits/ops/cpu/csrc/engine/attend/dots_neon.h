// Integer dot products with the NEON dot product: signed bytes, four products into each 32-bit lane, 4 tokens (keys) or
// 4 channels (values) at a time.
//
// 8-bit codes are made signed by flipping their top bit: code - 128, so that no zero point is left to settle. q of
// 8-bit codes and p (whose 8 unsigned bits do not fit a signed byte) are two signed pieces, x = 256 * high + low.
#pragma once
#include "state.h"

namespace {

constexpr bool DOTS_CENTER_INT8 = true;
constexpr bool DOTS_CENTER_INT4_VALUES = false;
constexpr int P_PIECES = 2;

INLINE int8x16_t broadcast_word(const uint8_t* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(w));
}

// Products of indices up to MOST (families/klt/keys.h), 4 channels of 4 tokens in a word each.
constexpr int BAND_ROWS_OF_TWO = 2;  // up to how many rows two vectors of tokens go side by side
constexpr int NARROW_Q_BYTES = 1;
typedef int8x16_t BandQuery;
INLINE BandQuery band_query(const uint8_t* q) { return broadcast_word(q); }
INLINE void add_band_word(vi& to, vi codes, BandQuery q) { to = (vi)vdotq_s32((int32x4_t)to, (int8x16_t)codes, q); }
template <int MOST>
INLINE void add_band_words(vi& to, const vi (&x)[4], const BandQuery (&q)[4]) {
  for (int i = 0; i < 4; i++) add_band_word(to, x[i], q[i]);
}

// 16 bytes of codes as signed bytes: the field, or code - 128 for whole bytes.
template <int BITS>
INLINE int8x16_t signed_codes(uint8x16_t v, int shift) {
  if (BITS == 8) return vreinterpretq_s8_u8(veorq_u8(v, vdupq_n_u8(0x80)));
  return vreinterpretq_s8_u8(vandq_u8(vshlq_u8(v, vdupq_n_s8((int8_t)-shift)), vdupq_n_u8((1 << BITS) - 1)));
}

INLINE void store_piece(uint8_t* to, vi x) {
  const int16x4_t half = vmovn_s32((int32x4_t)x);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
  vst1_lane_u32((uint32_t*)to, vreinterpret_u32_s8(bytes), 0);
}

// Integer q, 4 channels from `channel` on: [piece][channel] bytes.
template <bool WIDE>
INLINE void store_q(uint8_t* row, int channel, vi q) {
  const vi high = (q + 128) >> 8;
  store_piece(row + channel, WIDE ? high : q);
  if (WIDE) store_piece(row + MAX_HEAD_DIM + channel, q - (high << 8));
}

// Integer p of 64 tokens as two signed pieces by slot (tokens 0 1 4 5 2 3 6 7 of eight); returns their sum, in 4 parts.
template <bool WIDE>
INLINE vf store_p(uint8_t* row, const vi* p) {
  vi total = vi{};
  for (int i = 0; i < BLOCK / 4; i += 2) {
    total += p[i] + p[i + 1];
    const vi quads[2] = {{p[i][0], p[i][1], p[i + 1][0], p[i + 1][1]}, {p[i][2], p[i][3], p[i + 1][2], p[i + 1][3]}};
    for (int k = 0; k < 2; k++) {
      const vi high = (quads[k] + 128) >> 8;
      store_piece(row + 4 * (i + k), high);
      store_piece(row + BLOCK + 4 * (i + k), quads[k] - (high << 8));
    }
  }
  return to_float(total);
}

template <int PIECES>
INLINE vf to_dot(const int32x4_t* acc) {
  const vf d = (vf)vcvtq_f32_s32(acc[0]);
  return PIECES == 2 ? d * 256.0f + (vf)vcvtq_f32_s32(acc[1]) : d;
}

// Sums of one bit plane over channels [c0, c1) for 4 tokens of a tile.
template <int FMT, int BITS, int P, int NH>
INLINE void key_plane(const KeyArgs& a, const uint8_t* plane, int rb, int tile, int lane, int c0, int c1,
                      int32x4_t (&acc)[NH][P]) {
  for (int field = 0; field * rb < c1; field++) {
    if ((field + 1) * rb <= c0) continue;
    const int first = c0 > field * rb ? c0 : field * rb, end = c1 < (field + 1) * rb ? c1 : (field + 1) * rb;
    const uint8_t* src = plane + (int64_t)tile * rb * TILE + (first - field * rb) * TILE + lane * 4;
    const uint8_t* q = a.chunk->qw[0] + first;
    for (int n = (end - first) / 4; n > 0; n--, src += 64, q += 4) {
      fetch(src + a.ahead);
      const int8x16_t v = signed_codes<BITS>(vld1q_u8(src), field * BITS);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
          acc[h][p] = vdotq_s32(acc[h][p], v, broadcast_word(q + h * Q_STRIDE + p * MAX_HEAD_DIM));
    }
  }
}

template <int FMT, int NH>
static void key_int(const KeyArgs& a) {
  constexpr int P = is_wide(FMT) ? 2 : 1;
  const Chunk& c = *a.chunk;
  const int tiles = round_up(a.tokens, 2 * TILE) / TILE;
  for (int t = 0; t < tiles; t++)
    for (int lane = 0; lane < TILE; lane += 4)
      for (int g = 0; g < a.groups; g++) {
        const int c0 = g * a.group_channels, c1 = c0 + a.group_channels, token = t * TILE + lane;
        int32x4_t acc[NH][P] = {};
        key_plane<FMT, plane_bits(FMT, 0), P, NH>(a, a.plane[0], a.row_bytes[0], t, lane, c0, c1, acc);
        if (num_planes(FMT) == 2) {
          for (int h = 0; h < NH; h++)
            for (int p = 0; p < P; p++) acc[h][p] = vshlq_n_s32(acc[h][p], 1);
          key_plane<FMT, 1, P, NH>(a, a.plane[1], a.row_bytes[1], t, lane, c0, c1, acc);
        }
        for (int h = 0; h < NH; h++) {
          float* s = a.s + h * BLOCK + token;
          vf x = to_dot<P>(acc[h]) * c.q_scale[g][h] + c.q_zero[g][h];
          if (a.scale) x *= load(a.scale + g * BLOCK + token);
          if (a.bias) x += load(a.bias + g * BLOCK + token) * c.q_sum[g][h];
          store(s, g ? load(s) + x : x);
        }
      }
}

// Sums of 4 channels of a value block over the block's tokens, both pieces of p.
template <int FMT, int BITS, int NH>
INLINE void value_sums(const ValueArgs& a, const uint8_t* src, int width, int g, int shift,
                       int32x4_t (&acc)[NH][P_PIECES]) {
  const uint8_t* p = a.block->pw[g][0];
  for (int n = round_up(a.tokens, 8) / 4; n > 0; n--, src += 4 * width, p += 4) {
    fetch(src + a.ahead);
    const int8x16_t v = signed_codes<BITS>(vld1q_u8(src), shift);
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
      for (int k = 0; k < P_PIECES; k++)
        acc[h][k] = vdotq_s32(acc[h][k], v, broadcast_word(p + h * 2 * BLOCK + k * BLOCK));
  }
}

template <int FMT, int NH, int PLANE>
INLINE void value_plane(const ValueArgs& a, float weight) {
  constexpr int BITS = plane_bits(FMT, PLANE);
  const int rb = a.row_bytes[PLANE];
  for (int field = 0; field * rb < a.head_dim; field++)
    for (int r = 0; r < rb && field * rb + r < a.head_dim; r += 4) {
      const int block = r / 16 * 16, width = rb - block < 16 ? rb - block : 16, channel = field * rb + r,
                g = channel / a.group_channels;
      int32x4_t acc[NH][P_PIECES] = {};
      value_sums<FMT, BITS, NH>(a,
                                a.plane[PLANE] + (int64_t)block * a.page_size + a.first_token * width + (r - block) * 4,
                                width, g, field * BITS, acc);
      for (int h = 0; h < NH; h++)
        add_output(a, h, channel, to_dot<P_PIECES>(acc[h]) * (a.block->p_scale[g][h] * weight));
    }
}

template <int FMT, int NH>
static void value_int(const ValueArgs& a) {
  if (num_planes(FMT) == 2) value_plane<FMT, NH, num_planes(FMT) - 1>(a, 1.0f);
  value_plane<FMT, NH, 0>(a, num_planes(FMT) == 2 ? 2.0f : 1.0f);
}

constexpr int LEVEL_ROWS_OF_FOUR = 2, LEVEL_ROWS_OF_TWO = 6;  // up to how many rows runs go side by side
// Dot products of levels (families/klt/values.h) of magnitude up to MOST, 4 channels of four tokens at a time: runs FIRST,
// FIRST + STEP .. of each quad of tokens.
template <int MOST, int NH, int FIRST, int STEP, class Levels>
INLINE void dot_levels(const ValueArgs& a, const Levels& levels, vf (&sums)[4 / STEP][NH]) {
  const uint8_t* p = a.block->pw[0][0];
  const int quads = round_up(a.tokens, 8) / 4;
  int32x4_t acc[4 / STEP][NH][P_PIECES] = {};
  for (int quad = 0; quad < quads; quad++, p += 4) {
    vi level[4];
    levels.load(quad, level);
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
      for (int k = 0; k < P_PIECES; k++) {
        const int8x16_t w = broadcast_word(p + h * 2 * BLOCK + k * BLOCK);
        for (int i = 0; i < 4 / STEP; i++)
          acc[i][h][k] = vdotq_s32(acc[i][h][k], (int8x16_t)level[FIRST + i * STEP], w);
      }
  }
  for (int i = 0; i < 4 / STEP; i++)
    for (int h = 0; h < NH; h++) sums[i][h] = to_dot<P_PIECES>(acc[i][h]);
}

}  // namespace
