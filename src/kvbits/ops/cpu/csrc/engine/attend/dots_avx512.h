// Integer dot products with AVX-512 VNNI. vpdpbusd multiplies unsigned by signed bytes and adds four products into each
// 32-bit lane: a 64-byte load of a key tile is the same four channels of 16 tokens, of a value block 16 channels of
// four tokens, and the other operand is one broadcast 32-bit word of q or p.
//
// 8-bit codes: q and p are 16 bits in two signed pieces, x = 256 * high + low, so that kernel noise (5e-5) stays
// below the format's own. Fewer bits: one 8-bit piece (noise 1e-2 under a quantization error of 0.15).
#pragma once
#include "state.h"

namespace {

constexpr bool DOTS_CENTER_INT8 = false;  // codes enter the dot products as they are stored, but
// 4-bit values as 16 (code - 8), which takes no more instructions and leaves no zero point to settle
constexpr bool DOTS_CENTER_INT4_VALUES = true;

template <bool SHIFT>
INLINE __m512i code_field(__m512i v, __m512i shift, __m512i mask, int bits) {
  if (bits == 8) return v;
  return _mm512_and_si512(SHIFT ? _mm512_srlv_epi32(v, shift) : v, mask);
}

// 16 (code - 8) of the low (SHIFT: high) four bits of every byte.
template <bool SHIFT>
INLINE __m512i centered_nibble(__m512i v) {
  const __m512i mask = _mm512_set1_epi8((char)0xf0), sign = _mm512_set1_epi8((char)0x80);
  return _mm512_ternarylogic_epi32(SHIFT ? v : _mm512_slli_epi32(v, 4), mask, sign, 0x6a);  // (v & mask) ^ sign
}

// As inline assembly, because GCC 12 copies accumulators between registers around the intrinsic (20 % of the key loop).
INLINE void add_dot(__m512i& acc, __m512i u8, __m512i s8) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8)); }

// The same with one 32-bit word for all lanes: an instruction less where a broadcast would serve one product only (1 to
// 2 % of int8 with 7 query heads).
INLINE void add_dot_word(__m512i& acc, __m512i u8, const uint8_t* s8) {
  typedef int32_t __attribute__((may_alias, aligned(1))) word;
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u8), "m"(*(const word*)s8));
}

INLINE __m512i broadcast_word(const void* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return _mm512_set1_epi32(w);
}

// Products of indices up to MOST (families/klt/keys.h), 4 channels of 16 tokens in a word each.
constexpr int BAND_ROWS_OF_TWO = 8;  // up to how many rows two vectors of tokens go side by side
constexpr int NARROW_Q_BYTES = 1;
typedef __m512i BandQuery;
INLINE BandQuery band_query(const uint8_t* q) { return broadcast_word(q); }
INLINE void add_band_word(vi& to, vi codes, BandQuery q) {
  __m512i x = (__m512i)to;
  add_dot(x, (__m512i)codes, q);
  to = (vi)x;
}
template <int MOST>
INLINE void add_band_words(vi& to, const vi (&x)[4], const BandQuery (&q)[4]) {
  for (int i = 0; i < 4; i++) add_band_word(to, x[i], q[i]);
}

// Integer q, 16 channels from `channel` on: [piece][channel] bytes.
template <bool WIDE>
INLINE void store_q(uint8_t* row, int channel, vi q) {
  if (WIDE) {
    __m512i x = (__m512i)q;
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
    _mm_storeu_si128((__m128i*)(row + channel), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(row + MAX_HEAD_DIM + channel), _mm512_cvtepi32_epi8(low));
  } else {
    _mm_storeu_si128((__m128i*)(row + channel), _mm512_cvtepi32_epi8((__m512i)q));
  }
}

// Puts packed bytes in order (two packs leave a 4 x 4 transpose of 32-bit words to undo), then in slot order:
// tokens 0 1 4 5 2 3 6 7 of each eight.
INLINE __m512i slot_order(__m512i packed) {
  const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m128i slots = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, packed), _mm512_broadcast_i32x4(slots));
}

// Integer p of 64 tokens: [piece][slot] bytes. Returns their sum, in 16 parts.
template <bool WIDE>
INLINE vf store_p(uint8_t* row, const vi* p) {
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i a = _mm512_packs_epi32((__m512i)p[0], (__m512i)p[1]),
                b = _mm512_packs_epi32((__m512i)p[2], (__m512i)p[3]);
  if (!WIDE) {
    const __m512i bytes = slot_order(_mm512_packus_epi16(a, b));
    _mm512_store_si512(row, bytes);
    return (vf)_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, ones));
  }
  const __m512i half = _mm512_set1_epi16(128);
  const __m512i high_a = _mm512_srli_epi16(_mm512_add_epi16(a, half), 8),
                high_b = _mm512_srli_epi16(_mm512_add_epi16(b, half), 8);
  const __m512i low_a = _mm512_sub_epi16(a, _mm512_slli_epi16(high_a, 8)),
                low_b = _mm512_sub_epi16(b, _mm512_slli_epi16(high_b, 8));
  const __m512i high = slot_order(_mm512_packus_epi16(high_a, high_b)),
                low = slot_order(_mm512_packs_epi16(low_a, low_b));
  _mm512_store_si512(row, high);
  _mm512_store_si512(row + BLOCK, low);
  const __m512i sums[2] = {_mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, high),
                           _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, low)};
  return (vf)_mm512_cvtepi32_ps(sums[0]) * 256.0f + (vf)_mm512_cvtepi32_ps(sums[1]);
}

template <int PIECES>
INLINE vf to_dot(const __m512i* acc) {
  vf d = (vf)_mm512_cvtepi32_ps(acc[0]);
  if (PIECES == 2) d = d * 256.0f + (vf)_mm512_cvtepi32_ps(acc[1]);
  return d;
}

// One bit field of `words` words: T tiles of keys against NH rows. SHIFT: the field is not the lowest one (a shift of
// zero would still cost one of the two pipes that multiply).
template <int FMT, int P, int T, int NH, bool SHIFT>
INLINE void key_words(const KeyArgs& a, __m512i (&acc)[T][NH][P], const uint8_t* src, int tile_bytes, const uint8_t* q,
                      int words, int shift, int bits) {
  const __m512i count = _mm512_set1_epi32(shift);
  const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
  for (; words > 0; words--, src += 64, q += 4) {
    __m512i v[T];
    for (int i = 0; i < T; i++) {
      const uint8_t* at = src + i * tile_bytes;
      fetch(at + a.ahead);
      v[i] = code_field<SHIFT>(_mm512_loadu_si512(at), count, mask, bits);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const uint8_t* word = q + h * Q_STRIDE + p * MAX_HEAD_DIM;
        if (T == 1) {
          add_dot_word(acc[0][h][p], v[0], word);
          continue;
        }
        const __m512i w = broadcast_word(word);
        for (int i = 0; i < T; i++) add_dot(acc[i][h][p], v[i], w);
      }
  }
}

// What T tiles of one group's sums add to the scores.
template <int P, int T, int NH, bool SCALES, bool BIAS>
INLINE void add_scores(const KeyArgs& a, const __m512i (&acc)[T][NH][P], int tile, int g, vf (&s)[T][NH]) {
  const Chunk& c = *a.chunk;
#pragma GCC unroll 2
  for (int i = 0; i < T; i++) {
    const int token = g * BLOCK + (tile + i) * TILE;
    const vf scale = SCALES ? load(a.scale + token) : vf{}, bias = BIAS ? load(a.bias + token) : vf{};
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const vf x = to_dot<P>(acc[i][h]) * c.q_scale[g][h] + c.q_zero[g][h];
      s[i][h] = SCALES ? s[i][h] + x * scale : x;
      if (BIAS) s[i][h] += bias * c.q_sum[g][h];
    }
  }
}

template <int FMT, int NH, int T>
INLINE void key_tiles(const KeyArgs& a, int tile) {
  constexpr int P = is_wide(FMT) ? 2 : 1;
  vf s[T][NH] = {};
  for (int g = 0; g < a.groups; g++) {
    const int c0 = g * a.group_channels, c1 = c0 + a.group_channels;
    __m512i acc[T][NH][P] = {};
    for (int plane = 0; plane < num_planes(FMT); plane++) {
      const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane];
      if (plane)
        for (int i = 0; i < T; i++)
          for (int h = 0; h < NH; h++)
            for (int p = 0; p < P; p++) acc[i][h][p] = _mm512_slli_epi32(acc[i][h][p], bits);
      for (int field = 0; field * rb < c1; field++) {
        if ((field + 1) * rb <= c0) continue;
        const int first = c0 > field * rb ? c0 : field * rb;
        const int end = c1 < (field + 1) * rb ? c1 : (field + 1) * rb;
        const uint8_t* src = a.plane[plane] + (int64_t)tile * rb * TILE + (first - field * rb) * TILE;
        const uint8_t* q = a.chunk->qw[0] + first;
        const int words = (end - first) / 4;
        if (field) key_words<FMT, P, T, NH, true>(a, acc, src, rb * TILE, q, words, field * bits, bits);
        else key_words<FMT, P, T, NH, false>(a, acc, src, rb * TILE, q, words, 0, bits);
      }
    }
    if (a.bias) add_scores<P, T, NH, true, true>(a, acc, tile, g, s);
    else if (a.scale) add_scores<P, T, NH, true, false>(a, acc, tile, g, s);
    else add_scores<P, T, NH, false, false>(a, acc, tile, g, s);
  }
#pragma GCC unroll 2
  for (int i = 0; i < T; i++)
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) store(a.s + h * BLOCK + (tile + i) * TILE, s[i][h]);
}

// Scores of NH rows against the block's tokens, two tiles at once where the registers hold them: a broadcast of q then
// serves two loads of codes.
template <int FMT, int NH>
static void key_int(const KeyArgs& a) {
  constexpr int T = NH * (is_wide(FMT) ? 2 : 1) <= 8 ? 2 : 1;
  const int tiles = round_up(a.tokens, 2 * TILE) / TILE;
  for (int t = 0; t < tiles; t += T) key_tiles<FMT, NH, T>(a, t);
}

// acc[rows][channels of NB neighbouring 16-byte value blocks] += p . codes, for one bit field and one group. Without
// SHIFT fields stay in their places.
template <int FMT, int NH, int NB, bool SHIFT>
INLINE void value_blocks(const ValueArgs& a, const uint8_t* src, int width, int block_stride, int channel, int g,
                         __mmask16 lanes, int shift_bits, int bits, float weight) {
  constexpr int P = is_wide(FMT) ? 2 : 1;
  const __m512i shift = _mm512_set1_epi32(shift_bits);
  const __m512i mask = _mm512_set1_epi8((char)(((1 << bits) - 1) << (SHIFT ? 0 : shift_bits)));
  const __mmask16 whole = (__mmask16)((1u << width) - 1);
  const uint8_t* p = a.block->pw[g][0];
  __m512i acc[NB][NH][P] = {};
  const int quads = round_up(a.tokens, 8) / 4;
  for (int n = 0; n < quads; n++, src += 4 * width, p += 4) {
    __m512i v[NB];
    for (int i = 0; i < NB; i++) {
      const uint8_t* at = src + i * block_stride;
      fetch(at + a.ahead);
      v[i] = NB > 1 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi32(whole, at);
      v[i] = FMT == FORMAT_INT4 ? centered_nibble<SHIFT>(v[i]) : code_field<SHIFT>(v[i], shift, mask, bits);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
      for (int k = 0; k < P; k++) {
        const uint8_t* word = p + h * 2 * BLOCK + k * BLOCK;
        if (P == 2 && NB == 1) {
          add_dot_word(acc[0][h][k], v[0], word);
          continue;
        }
        const __m512i w = broadcast_word(word);
        for (int i = 0; i < NB; i++) add_dot(acc[i][h][k], P == 2 ? v[i] : w, P == 2 ? w : v[i]);
      }
  }
#pragma GCC unroll 2
  for (int i = 0; i < NB; i++) {
    const int at = channel + i * 16;
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      vf x = to_dot<P>(acc[i][h]) * (a.block->p_scale[g][h] * weight);
      float* to = a.chunk->acc[h] + at;
      if (a.channel_scale) x *= load(a.channel_scale + at);
      _mm512_mask_storeu_ps(to, lanes, (__m512)(load(to) + x));
    }
  }
}

// One field of a plane, SHIFT as in value_blocks.
template <int FMT, int NH, bool SHIFT>
INLINE void value_field(const ValueArgs& a, int plane, int field, float weight) {
  constexpr int NB = NH * (is_wide(FMT) ? 2 : 1) <= 8 ? 2 : 1;
  const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane], block_stride = 16 * a.page_size;
  for (int r = 0, channel = field * rb; r < rb && channel < a.head_dim;) {
    const int width = rb - r < 16 ? rb - r : 16;
    const int end = channel + width < a.head_dim ? channel + width : a.head_dim;
    const uint8_t* src = a.plane[plane] + (int64_t)r * a.page_size + a.first_token * width;
    int g = channel / a.group_channels;
    const int same = (g + 1) * a.group_channels < a.head_dim ? (g + 1) * a.group_channels : a.head_dim;
    if (NB > 1 && rb - r >= NB * 16 && channel + NB * 16 <= same) {
      value_blocks<FMT, NH, NB, SHIFT>(a, src, 16, block_stride, channel, g, 0xffff, field * bits, bits, weight);
      r += NB * 16;
      channel += NB * 16;
      continue;
    }
    for (; g * a.group_channels < end; g++) {
      const int first = g * a.group_channels > channel ? g * a.group_channels : channel;
      const int last = (g + 1) * a.group_channels < end ? (g + 1) * a.group_channels : end;
      const __mmask16 lanes = (__mmask16)(((1u << (last - first)) - 1) << (first - channel));
      value_blocks<FMT, NH, 1, SHIFT>(a, src, width, block_stride, channel, g, lanes, field * bits, bits, weight);
    }
    r += width;
    channel += width;
  }
}

// 16 channels of 3-bit values: where their two planes lie, and how far the planes' words turn to have their fields in
// place.
struct ThreeBits {
  const uint8_t *two, *one;
  __m512i two_turn, one_turn;
  int64_t two_ahead, one_ahead;
  bool halves;  // the lower plane has rows of 8 channels, all in 32 bytes a quad: two of its fields
};

INLINE ThreeBits three_bits(const ValueArgs& a, int channel) {
  const int rb = a.row_bytes[0], rb1 = a.row_bytes[1], field = channel / rb, field1 = channel / rb1;
  ThreeBits b;
  b.halves = rb1 == 8;
  b.two = a.plane[0] + (int64_t)(channel % rb) * a.page_size + a.first_token * 16;
  b.one = a.plane[1] + (b.halves ? a.first_token * 8 : (int64_t)(channel % rb1) * a.page_size + a.first_token * 16);
  b.two_turn = _mm512_set1_epi32((2 * field - 1) & 31);
  b.one_turn = _mm512_add_epi32(
      _mm512_set1_epi32(field1),
      b.halves ? _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1) : _mm512_setzero_si512());
  b.two_ahead = field ? 0 : a.ahead;
  b.one_ahead = field1 ? 0 : a.ahead;
  return b;
}

INLINE __m512i three_bit_codes(const ThreeBits& b, int quad) {
  fetch(b.two + quad * 64 + b.two_ahead);
  const __m512i two =
      _mm512_and_si512(_mm512_rorv_epi32(_mm512_loadu_si512(b.two + quad * 64), b.two_turn), _mm512_set1_epi8(6));
  const uint8_t* at = b.one + quad * (b.halves ? 32 : 64);
  fetch(at + b.one_ahead);
  const __m512i one =
      b.halves ? _mm512_broadcast_i32x8(_mm256_loadu_si256((const __m256i*)at)) : _mm512_loadu_si512(at);
  // x | (one & 1)
  return _mm512_ternarylogic_epi32(two, _mm512_rorv_epi32(one, b.one_turn), _mm512_set1_epi8(1), 0xf8);
}

// Whether every 32 neighbouring channels are two blocks of both planes, and of one group.
static bool has_three_bit_blocks(const ValueArgs& a) {
  return a.head_dim % 32 == 0 && a.group_channels % 32 == 0 && a.row_bytes[0] % 16 == 0 &&
         (a.row_bytes[1] % 16 == 0 || a.row_bytes[1] == 8);
}

// The outputs gain 3-bit values, whose planes are joined to codes before one dot product.
template <int NH>
static void value_three_bits(const ValueArgs& a) {
  const int quads = round_up(a.tokens, 8) / 4;
  for (int channel = 0; channel < a.head_dim; channel += 32) {
    const int g = channel / a.group_channels;
    const ThreeBits left = three_bits(a, channel), right = three_bits(a, channel + 16);
    const uint8_t* p = a.block->pw[g][0];
    __m512i acc[2][NH] = {};
    for (int quad = 0; quad < quads; quad++, p += 4) {
      const __m512i x = three_bit_codes(left, quad), y = three_bit_codes(right, quad);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        const __m512i w = broadcast_word(p + h * 2 * BLOCK);
        add_dot(acc[0][h], w, x);
        add_dot(acc[1][h], w, y);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) add_output(a, h, channel + i * 16, to_dot<1>(&acc[i][h]) * a.block->p_scale[g][h]);
  }
}

// The chunk's outputs gain the block's values. Zero points are settled by the caller.
template <int FMT, int NH>
static void value_int(const ValueArgs& a) {
  if (FMT == FORMAT_INT3 && has_three_bit_blocks(a)) return value_three_bits<NH>(a);
  float weight = FMT == FORMAT_INT4 ? 0.0625f : 1.0f;
  for (int plane = num_planes(FMT) - 1; plane >= 0; plane--) {
    value_field<FMT, NH, false>(a, plane, 0, weight);
    const int bits = plane_bits(FMT, plane);
    for (int field = 1; field * a.row_bytes[plane] < a.head_dim; field++) {
      const bool in_place = is_int(FMT) && bits * (field + 1) < 8;  // in signed bytes
      if (in_place) value_field<FMT, NH, false>(a, plane, field, weight / (float)(1 << field * bits));
      else value_field<FMT, NH, true>(a, plane, field, weight);
    }
    weight *= (float)(1 << bits);
  }
}

constexpr int LEVEL_ROWS_OF_FOUR = 5, LEVEL_ROWS_OF_TWO = 8;  // up to how many rows runs go side by side
// Dot products of levels (families/klt/values.h) of magnitude up to MOST, 16 channels of four tokens at a time: runs FIRST,
// FIRST + STEP .. of each quad of tokens.
template <int MOST, int NH, int FIRST, int STEP, class Levels>
INLINE void dot_levels(const ValueArgs& a, const Levels& levels, vf (&sums)[4 / STEP][NH]) {
  const uint8_t* p = a.block->pw[0][0];
  const int quads = round_up(a.tokens, 8) / 4;
  __m512i acc[4 / STEP][NH] = {};
  for (int quad = 0; quad < quads; quad++, p += 4) {
    vi level[4];
    levels.load(quad, level);
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const __m512i w = broadcast_word(p + h * 2 * BLOCK);
#pragma GCC unroll 4
      for (int i = 0; i < 4 / STEP; i++) add_dot(acc[i][h], w, (__m512i)level[FIRST + i * STEP]);
    }
  }
  for (int i = 0; i < 4 / STEP; i++)
    for (int h = 0; h < NH; h++) sums[i][h] = to_dot<1>(&acc[i][h]);
}

}  // namespace
