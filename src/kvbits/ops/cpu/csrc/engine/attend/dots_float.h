// Dot products in fp32 for raw rows and for FP8 codes, on the short vectors of vec.h.
#pragma once
#include "state.h"

namespace {

// Byte `k` of every 32-bit lane as an FP8 number. The bits are put where fp32 has them; one exact multiply moves the
// exponent (subnormals come out right because the product is exact).
template <int FMT>
INLINE vf fp8_lane(vi w, int k) {
  vi x = (w >> (8 * k)) & 0xff;
  constexpr NumberFormat f = number_format(FMT);
  static_assert(f.exponent_bits + f.mantissa_bits == 7, "floats of a byte");
  const int up = 23 - f.mantissa_bits;
  const float rebias = float_bits((254 - exponent_bias(FMT)) << 23);
  vf mag = (vf)((x & 0x7f) << up) * rebias;
  return (vf)((vi)mag | ((x & 0x80) << 24));
}

template <int FMT, int NH>
static void key_fp8(const KeyArgs& a) {
  const int tiles = round_up(a.tokens, 2 * TILE) / TILE;
  for (int t = 0; t < tiles; t++)
    for (int lane = 0; lane < TILE; lane += VL)
      for (int g = 0; g < a.groups; g++) {
        vf acc[NH] = {};
        const int c0 = g * a.group_channels;
        const uint8_t* src = a.plane[0] + (int64_t)t * a.row_bytes[0] * TILE + c0 * TILE + lane * 4;
        const float* q = a.q + c0;
        for (int n = a.group_channels / 4; n > 0; n--, src += 64, q += 4) {
          fetch(src + a.ahead);
          vi w = load_int(src);
#pragma GCC unroll 4
          for (int k = 0; k < 4; k++) {
            vf x = fp8_lane<FMT>(w, k);
#pragma GCC unroll 8
            for (int h = 0; h < NH; h++) acc[h] += x * q[h * ROW_STRIDE + k];
          }
        }
        const int token = t * TILE + lane;
        for (int h = 0; h < NH; h++) {
          float* s = a.s + h * BLOCK + token;
          vf x = a.scale ? acc[h] * load(a.scale + g * BLOCK + token) : acc[h];
          store(s, g ? load(s) + x : x);
        }
      }
}

// One value block: VL channels from lane `lane` of the block on.
template <int FMT, int NH>
INLINE void value_fp8_lanes(const ValueArgs& a, const uint8_t* src, int width, int lane, int channel, int g, int first,
                            int last) {
  vf acc[NH] = {};
  const float* p = a.block->pf[g][0];
  const int whole = width - lane < VL ? width - lane : VL;
  const int tokens = round_up(a.tokens, 8);
  for (int t = 0; t < tokens; t += 4, src += 4 * width) {
    fetch(src + a.ahead);
    vi w;
    if (whole == VL) {
      w = load_int(src + lane * 4);
    } else {
      w = vi{};
      __builtin_memcpy(&w, src + lane * 4, whole * 4);
    }
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++) {
      // Slots 0 1 4 5 of eight tokens in the first quad, 2 3 6 7 in the second.
      const int token = (t & ~7) + (t & 4) / 2 + (u & 1) + (u & 2) * 2;
      vf x = fp8_lane<FMT>(w, u);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) acc[h] += x * p[h * BLOCK + token];
    }
  }
  const int at = channel + lane;
  vi inside = iota();
  inside = (inside >= splat_int(first - at)) & (inside < splat_int(last - at));
  for (int h = 0; h < NH; h++) add_output(a, h, at, acc[h], inside);
}

template <int FMT, int NH>
static void value_fp8(const ValueArgs& a) {
  for (int r = 0; r < a.head_dim; r += 16) {
    const int width = a.head_dim - r < 16 ? a.head_dim - r : 16;
    const uint8_t* src = a.plane[0] + (int64_t)r * a.page_size + a.first_token * width;
    for (int lane = 0; lane < width; lane += VL) {
      const int end = r + (lane + VL < width ? lane + VL : width);
      for (int g = (r + lane) / a.group_channels; g * a.group_channels < end; g++) {
        const int first = g * a.group_channels > r + lane ? g * a.group_channels : r + lane;
        const int last = (g + 1) * a.group_channels < end ? (g + 1) * a.group_channels : end;
        value_fp8_lanes<FMT, NH>(a, src, width, lane, r, g, first, last);
      }
    }
  }
}

// bf16 rows where q and the outputs are kept in split order: of every 2 * VL channels first the even, then the odd
// ones. One load then gives two vectors for a shift and a mask, a third of what widening takes. An internal "dtype"
// behind the others.
constexpr int BF16_SPLIT = NUM_RAW_DTYPES;

INLINE vf even_bf16(const uint8_t* p) { return (vf)(load_int(p) << 16); }
INLINE vf odd_bf16(const uint8_t* p) { return (vf)(load_int(p) & (int)0xffff0000); }

// [channels] into split order, or back.
static void split_order(float* x, int channels, bool back) {
  float t[MAX_HEAD_DIM];
  for (int c = 0; c < channels; c++) {
    const int block = c / (2 * VL) * (2 * VL), i = c % (2 * VL), to = block + i % 2 * VL + i / 2;
    t[back ? c : to] = x[back ? to : c];
  }
  __builtin_memcpy(x, t, channels * sizeof(float));
}

// Raw keys lie row by row: lanes are channels, NH x TOKENS <= 16 dot products share the loads.
template <int DTYPE, int NH, int TOKENS>
INLINE void key_raw_rows(const KeyArgs& a, const uint8_t* row, int token) {
  const int size = DTYPE == FLOAT32 ? 4 : 2;
  const int64_t row_bytes = (int64_t)a.head_dim * size;
  vf acc[16] = {};
  int c = 0;
  for (; DTYPE == BF16_SPLIT && c < a.head_dim; c += 2 * VL) {
    vf x[TOKENS][2];
    for (int i = 0; i < TOKENS; i++) {
      const uint8_t* at = row + i * row_bytes + c * 2;
      fetch(at + a.ahead);
      x[i][0] = even_bf16(at);
      x[i][1] = odd_bf16(at);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        const vf q = load(a.q + h * ROW_STRIDE + c + k * VL);
#pragma GCC unroll 8
        for (int i = 0; i < TOKENS; i++) acc[h * TOKENS + i] += x[i][k] * q;
      }
  }
  for (; c + VL <= a.head_dim; c += VL) {
    vf x[TOKENS];
    for (int i = 0; i < TOKENS; i++) {
      fetch(row + i * row_bytes + c * size + a.ahead);
      x[i] = load_as<DTYPE>(row + i * row_bytes, c);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const vf q = load(a.q + h * ROW_STRIDE + c);
#pragma GCC unroll 8
      for (int i = 0; i < TOKENS; i++) acc[h * TOKENS + i] += x[i] * q;
    }
  }
  if (c < a.head_dim)
    for (int i = 0; i < TOKENS; i++) {
      const vf x = load_first<DTYPE>(row + i * row_bytes, c, a.head_dim - c);
      for (int h = 0; h < NH; h++) acc[h * TOKENS + i] += x * load(a.q + h * ROW_STRIDE + c);
    }
  float sums[16];
  sum_each(acc, NH * TOKENS, sums);
  for (int h = 0; h < NH; h++)
    for (int i = 0; i < TOKENS; i++) a.s[h * BLOCK + token + i] = sums[h * TOKENS + i];
}

template <int DTYPE, int NH>
static void key_raw(const KeyArgs& a) {
  constexpr int TOKENS = NH <= 2 ? 8 : NH <= 4 ? 4 : 2;
  const int64_t row_bytes = (int64_t)a.head_dim * (DTYPE == FLOAT32 ? 4 : 2);
  int t = 0;
  for (; t + TOKENS <= a.tokens; t += TOKENS) key_raw_rows<DTYPE, NH, TOKENS>(a, a.plane[0] + t * row_bytes, t);
  for (; t < a.tokens; t++) key_raw_rows<DTYPE, NH, 1>(a, a.plane[0] + t * row_bytes, t);
}

template <int DTYPE, int NH, int NB>
INLINE void value_raw_channels(const ValueArgs& a, int channel, int last) {
  const int size = DTYPE == FLOAT32 ? 4 : 2;
  const int64_t row_bytes = (int64_t)a.head_dim * size;
  vf acc[NB][NH];
  for (int i = 0; i < NB; i++)
    for (int h = 0; h < NH; h++) acc[i][h] = load(a.chunk->acc[h] + channel + i * VL);
  const uint8_t* row = a.plane[0];
  const float* p = a.block->pf[0][0];
  for (int t = 0; t < a.tokens; t++, row += row_bytes) {
    vf x[NB];
    for (int i = 0; i < NB; i++) {
      const int c = channel + i * VL;
      if (i * VL * size % 64 == 0) fetch(row + c * size + a.ahead);
      if (DTYPE == BF16_SPLIT) x[i] = i % 2 ? odd_bf16(row + (c - VL) * 2) : even_bf16(row + c * 2);
      else x[i] = last >= (i + 1) * VL ? load_as<DTYPE>(row, c) : load_first<DTYPE>(row, c, last - i * VL);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
      for (int i = 0; i < NB; i++) acc[i][h] += x[i] * p[h * BLOCK + t];
  }
  for (int i = 0; i < NB; i++)
    for (int h = 0; h < NH; h++) store(a.chunk->acc[h] + channel + i * VL, acc[i][h]);
}

template <int DTYPE, int NH>
static void value_raw(const ValueArgs& a) {
  constexpr int NB = NH <= 5 ? 4 : 2;
  int c = 0;
  for (; c + NB * VL <= a.head_dim; c += NB * VL) value_raw_channels<DTYPE, NH, NB>(a, c, NB * VL);
  for (; DTYPE == BF16_SPLIT && c < a.head_dim; c += 2 * VL) value_raw_channels<DTYPE, NH, 2>(a, c, 2 * VL);
  for (; c + VL <= a.head_dim; c += VL) value_raw_channels<DTYPE, NH, 1>(a, c, VL);
  if (c < a.head_dim) value_raw_channels<DTYPE, NH, 1>(a, c, a.head_dim - c);
}

}  // namespace
