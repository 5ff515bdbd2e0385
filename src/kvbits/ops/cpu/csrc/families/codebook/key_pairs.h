// Keys before the rotary embedding in 16-bit integers: both channels of a pair in one 32-bit lane, looked up at once, turned by two products and multiplied
// with a row's pair of queries by one.
//
//   score = sum over pairs (a cos - b sin) q1 + (b cos + a sin) q2
//
// a and b are in units of the pair's largest number, cosines in units of 2^-15; the products' high words, half the turned numbers, are what meets q. Each
// row's pairs of q are in units of which their lengths' sum has 32,700, so no number leaves 16 bits and no sum of products 32: turned halves are 23,170 long at most.
#pragma once
#include <stdint.h>

#include "engine/attend/angles.h"
#include "engine/attend/dots.h"
#include "keys.h"

namespace {

constexpr int PAIR_TILES = 8;  // of a page at most
constexpr float PAIR_OUTLIER_LIMIT = 256.0f;  // of an outlier times the longest pair of q: by half a unit of 1/32767 of it in both terms, a score is wrong by 0.006 (log2) at most
constexpr float Q_SUM = 32700.0f;  // of a row's lengths; rounding adds up to head_dim, and 23,170 * 33,300 < 2^31

struct KeyPairs {
  alignas(64) int16_t table[MAX_HEAD_DIM / 2][2 * LEVELS];      // of each pair: what codes of a (even entries) and b (odd ones) stand for
  // [tile][pair][2][token], tiles of head_dim / 2 pairs: (cosine, -sine) and (sine, cosine), low half first. What could be made of one is read from the nearest cache instead.
  alignas(64) int32_t turns[PAIR_TILES * MAX_HEAD_DIM / 2][2][TILE];
  alignas(64) float unit[MAX_HEAD_DIM / 2 + VL];                // of a pair's numbers, 32767 of them at most
  alignas(64) int32_t scale[MAX_HEAD_DIM / 2 + VL], bias[MAX_HEAD_DIM / 2 + VL];  // of a in the low half, of b in the high one
  alignas(64) int32_t levels[2][LEVELS];                        // of nibbles (nibble_code), in [-1, 1] in units of 2^-15, in both halves: level * reach + middle
  int second_from;                                              // pairs from there on have their fields in upper halves of nibbles
  float middle, reach;
};

#ifdef HAVE_PAIR_DOTS
INLINE bool pairs_usable(const kvbits_tensor& t, const int* row_bytes, int page_size, int head_dim) {
  const int bits = code_bits(t.format);
  const bool channels = t.per_channel || t.static_scale;
  return t.turns && bits < 8 && channels && page_size <= PAIR_TILES * TILE && has_nibbles(bits, row_bytes, head_dim);
}

static void fill_turns(KeyPairs& p, const float* turns, int page_size, int half) {
  for (int tile = 0; tile < page_size / TILE; tile++)
    for (int d = 0; d < half; d++, turns += 2 * TILE) {
      const vi cos = round_to_int(load(turns) * 32767.0f), sin = round_to_int(load(turns + TILE) * 32767.0f);
      *(vi_mem*)p.turns[tile * half + d][0] = (cos & 0xffff) | -sin << 16;
      *(vi_mem*)p.turns[tile * half + d][1] = (sin & 0xffff) | cos << 16;
    }
}

static void fill_pair_levels(KeyPairs& p, const float* levels, int bits, int head_dim) {
  float low = levels[0], high = levels[0];
  for (int i = 1; i < LEVELS; i++) {
    low = levels[i] < low ? levels[i] : low;
    high = levels[i] > high ? levels[i] : high;
  }
  p.middle = 0.5f * (low + high);
  p.reach = high > low ? 0.5f * (high - low) : 1.0f;
  p.second_from = bits == 4 ? head_dim / 2 : head_dim / 4;
  const vi x = round_to_int((load(levels) - p.middle) * (32767.0f / p.reach)), both = (x & 0xffff) | x << 16;
  for (int i = 0; i < 2; i++)
    for (int nibble = 0; nibble < LEVELS; nibble++) p.levels[i][nibble] = both[nibble_code(bits, i, nibble)];
}

static void fill_pairs(KeyPairs& p, const float* scale, const float* bias, int head_dim) {
  const int half = head_dim / 2;
  for (int d = 0; d < half; d += VL) {
    vf s[2], b[2], most = splat(1e-30f);
    for (int i = 0; i < 2; i++) {
      s[i] = load(scale + i * half + d) * p.reach;
      b[i] = load(bias + i * half + d) + load(scale + i * half + d) * p.middle;
      most = vmax(most, vmax(s[i], -s[i]) + vmax(b[i], -b[i]));
    }
    const vf inverse = 32767.0f / most;
    store(p.unit + d, most);
    *(vi_mem*)(p.scale + d) = (round_to_int(s[0] * inverse) & 0xffff) | round_to_int(s[1] * inverse) << 16;
    *(vi_mem*)(p.bias + d) = (round_to_int(b[0] * inverse) & 0xffff) | round_to_int(b[1] * inverse) << 16;
  }
  for (int d = 0, i = 0; i < 2; i++) {
    const __m512i levels = _mm512_load_si512(p.levels[i]);
    for (const int end = i ? half : p.second_from; d < end; d++)
      _mm512_store_si512(p.table[d], _mm512_adds_epi16(_mm512_mulhrs_epi16(levels, broadcast_word(p.scale + d)), broadcast_word(p.bias + d)));
  }
}

// What of a part's queries no page changes. Returns the longest pair of all rows.
static float measure_pairs(Chunk& c, int head_dim) {
  const int half = head_dim / 2;
  float longest = 0.0f;
  for (int h = 0; h < c.rows; h++) {
    vf most = splat(1e-30f);
    for (int d = 0; d < half; d += VL) {
      const vf a = load(c.q[h] + d), b = load(c.q[h] + half + d), square = a * a + b * b;
      const vf norm = select(iota() < splat_int(half - d), (vf)_mm512_sqrt_ps((__m512)square), vf{});
      store(c.pair_norm[h] + d, norm);
      most = vmax(most, norm);
    }
    const float top = max_of(most);
    c.column_unit[h] = 32767.0f / top;
    c.column_scale[h] = top / (32767.0f * 32767.0f);
    longest = __builtin_fmaxf(longest, top);
  }
  return longest;
}

INLINE __m512i join_halves(vf low, vf high) {
  const __m512i x = _mm512_cvtps_epi32((__m512)low), y = _mm512_cvtps_epi32((__m512)high);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16));
}

// q turned to the page's start, as pairs of integers, and as columns of them where W is not 0: (q[d + half], q[d]) for the lower channel of a pair, after all those
// (-q[d], q[d + half]) for the upper one, each to meet (sine, cosine).
template <int W>
static void quantize_pairs(Chunk& c, const Angles& w, const KeyPairs& p, int head_dim) {
  const int half = head_dim / 2;
  alignas(64) float k[VL];
  vf total[ROWS];
  for (int h = 0; h < ROWS; h++) total[h] = splat(1e-30f);
  for (int h = 0; h < c.rows; h++) {
    vf x = total[h];
    for (int d = 0; d < half; d += VL) x += select(iota() < splat_int(half - d), load(c.pair_norm[h] + d) * load(p.unit + d), vf{});
    total[h] = x;
  }
  sum_eight(total, c.rows, k);
  store(c.pair_scale, load(k) * (65536.0f / (32767.0f * 32767.0f) / Q_SUM));
  store(k, Q_SUM / load(k));
  float* upper = c.q_columns + round_up(half, 16) * W;
  for (int d = 0; d < half; d += VL) {
    const vf cos = __builtin_convertvector(*(const vd_mem*)(w.cos + d), vf), sin = __builtin_convertvector(*(const vd_mem*)(w.sin + d), vf), unit = load(p.unit + d);
    __m512 columns[W ? W : 1];
#pragma GCC unroll 8
    for (int h = 0; h < (W ? W : ROWS); h++) {
      if (h >= c.rows) {
        if (W) columns[h] = _mm512_setzero_ps();
        continue;
      }
      const vf a = load(c.q[h] + d), b = load(c.q[h] + half + d), x = a * cos + b * sin, y = b * cos - a * sin, scale = unit * k[h];
      _mm512_storeu_si512(c.qw[h] + d * 4, join_halves(x * scale, y * scale));
      if (W) columns[h] = (__m512)join_halves(y * c.column_unit[h], x * c.column_unit[h]);
    }
    if constexpr (W != 0)
      put_columns<W>(d, columns, [&](int at, __m512 pairs) {
        const __m512i turned = _mm512_rol_epi32((__m512i)pairs, 16);
        _mm512_store_ps(c.q_columns + at, pairs);
        _mm512_store_si512(upper + at, _mm512_mask_sub_epi16(turned, 0x55555555, _mm512_setzero_si512(), turned));
      });
  }
}

// For a byte shuffle: either half of a lane from the other one.
INLINE __m512i other_half() { return _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); }

// Codes of four pairs of neighbouring channels as indices into their tables, the lower channel's in the low halves: of pairs 0 and 1 (8 bits above) and of 2 and 3.
INLINE void pair_codes(vi words, __m512i& first, __m512i& second) {
  const __m512i nibble = _mm512_set1_epi8(30), odd = _mm512_set1_epi8(1);
  const __m512i low = _mm512_and_si512(_mm512_add_epi32((__m512i)words, (__m512i)words), nibble);
  const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi32((__m512i)words, 3), nibble, odd, 0xea);
  first = _mm512_mask_shuffle_epi8(low, 0xcccccccccccccccc, high, other_half());
  second = _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, other_half());
}

// Scores of T neighbouring tiles against NH rows: what is loaded of tables and queries serves them all. Codes of two planes are taken apart
// one step ahead: the machine by itself looks no further than the products of one step.
template <int NH, int T, int BITS>
static void pair_tiles(const Chunk& c, const KeyPairs& p, const Nibbles& n, int tile, int head_dim, float* s) {
  constexpr bool AHEAD = BITS == 3;
  const int half = head_dim / 2, next = n.row_bytes[0] * TILE, next1 = n.row_bytes[1] * TILE;
  __m512i acc[T][NH];
#pragma GCC unroll 2
  for (int i = 0; i < T; i++)
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) acc[i][h] = _mm512_setzero_si512();
  const uint8_t *src = n.src[0], *src1 = n.src[1], *q = c.qw[0];
  int64_t ahead = n.ahead, ahead1 = n.ahead;  // each line is fetched once
  int field1 = 0;
  vi turn1 = third_bit_turn(0), mask1 = third_bit_mask(0);
  __m512i first[T], second[T];
  auto take_apart = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int i = 0; i < T; i++) {
      fetch(src + i * next + ahead);
      vi words = load_int(src + i * next);
      if (BITS == 3) {
        fetch(src1 + i * next1 + ahead1);
        words = join_planes(words, load_int(src1 + i * next1), turn1, mask1);
      }
      pair_codes(words, first[i], second[i]);
    }
    if ((src += 64) == n.src[0] + next) src = n.src[0], ahead = 0;
    if (BITS == 3 && (src1 += 64) == n.src[1] + next1) {
      src1 = n.src[1], ahead1 = 0, field1++;
      turn1 = third_bit_turn(field1), mask1 = third_bit_mask(field1);
    }
  };
  if (AHEAD) take_apart();
  for (int d = 0; d < half; d += 4, q += 16) {
    if (!AHEAD) take_apart();
    __m512i codes[T][4];
#pragma GCC unroll 2
    for (int i = 0; i < T; i++) {
      codes[i][0] = first[i];
      codes[i][1] = _mm512_srli_epi16(first[i], 8);  // an index is the lowest 5 bits of 16
      codes[i][2] = second[i];
      codes[i][3] = _mm512_srli_epi16(second[i], 8);
    }
    if (AHEAD) take_apart();  // after the last step those of the first one again
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const __m512i table = _mm512_load_si512(p.table[d + k]);
      __m512i turned[T];
#pragma GCC unroll 2
      for (int i = 0; i < T; i++) {
        const int32_t(*turn)[TILE] = p.turns[(tile + i) * half + d + k];
        const __m512i keys = _mm512_permutexvar_epi16(codes[i][k], table);
        const __m512i x = _mm512_madd_epi16(keys, _mm512_load_si512(turn[0])), y = _mm512_madd_epi16(keys, _mm512_load_si512(turn[1]));
        turned[i] = _mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, other_half());
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        const __m512i row = broadcast_word(q + h * Q_STRIDE + k * 4);
#pragma GCC unroll 2
        for (int i = 0; i < T; i++) add_pair_dot(acc[i][h], turned[i], row);
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < T; i++)
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) store(s + h * BLOCK + i * TILE, to_float((vi)acc[i][h]) * c.pair_scale[h]);
}

typedef void (*PairKernel)(const Chunk&, const KeyPairs&, const Nibbles&, int tile, int head_dim, float* s);
#define PAIR_ROWS(t, bits) \
  {pair_tiles<1, t, bits>, pair_tiles<2, t, bits>, pair_tiles<3, t, bits>, pair_tiles<4, t, bits>, \
   pair_tiles<5, t, bits>, pair_tiles<6, t, bits>, pair_tiles<7, t, bits>, pair_tiles<8, t, bits>}
static const PairKernel pair_kernels[2][3][ROWS] = {{PAIR_ROWS(1, 2), PAIR_ROWS(1, 3), PAIR_ROWS(1, 4)}, {PAIR_ROWS(2, 2), PAIR_ROWS(2, 3), PAIR_ROWS(2, 4)}};
#undef PAIR_ROWS

// One tile or two.
INLINE void attend_pairs(const Chunk& c, const KeyPairs& p, const Nibbles& n, int tile, int tiles, int head_dim, float* s) {
  pair_kernels[tiles - 1][n.bits - 2][c.rows - 1](c, p, n, tile, head_dim, s);
}
#else
INLINE bool pairs_usable(const kvbits_tensor&, const int*, int, int) { return false; }
INLINE void fill_turns(KeyPairs&, const float*, int, int) {}
INLINE void fill_pair_levels(KeyPairs&, const float*, int, int) {}
INLINE void fill_pairs(KeyPairs&, const float*, const float*, int) {}
INLINE float measure_pairs(Chunk&, int) { return 0.0f; }
template <int W>
INLINE void quantize_pairs(Chunk&, const Angles&, const KeyPairs&, int) {}
INLINE void attend_pairs(const Chunk&, const KeyPairs&, const Nibbles&, int, int, int, float*) {}
#endif

}  // namespace
