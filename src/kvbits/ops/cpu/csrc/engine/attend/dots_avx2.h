// Integer dot products with AVX2, 8 tokens (keys) or 8 channels (values) at a time.
//
// 8-bit codes: the even and the odd bytes widen to 16 bits and meet 16-bit q or p in vpmaddwd: exact, no saturation.
// Fewer bits: vpmaddubsw gives 16-bit sums that stay below 2^15 for RUN steps, then widen.
#pragma once
#include "state.h"

namespace {

constexpr bool DOTS_CENTER_INT8 = false;  // codes enter the dot products as they are stored
constexpr bool DOTS_CENTER_INT4_VALUES = false;

// Integer q, 8 channels from `channel` on. Wide: int16 in order 0 2 1 3 of every four; narrow: bytes.
template <bool WIDE>
INLINE void store_q(uint8_t* row, int channel, vi q) {
  __m256i x = (__m256i)q;
  if (WIDE) {
    x = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7));
    const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128((__m128i*)(row + 2 * channel), y);
  } else {
    const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i*)(row + channel), _mm_packs_epi16(y, y));
  }
}

// Integer p of 64 tokens. Narrow: bytes of slots (tokens 0 1 4 5 2 3 6 7 of eight); wide: int16, slots 0 2 1 3 of each
// quad. Returns their sum, in 8 parts.
template <bool WIDE>
INLINE vf store_p(uint8_t* row, const vi* p) {
  const __m256i order = WIDE ? _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7) : _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
  vi total = vi{};
  for (int i = 0; i < BLOCK / 8; i++) {
    total += p[i];
    const __m256i x = _mm256_permutevar8x32_epi32((__m256i)p[i], order);
    const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    if (WIDE) _mm_store_si128((__m128i*)(row + 16 * i), y);
    else _mm_storel_epi64((__m128i*)(row + 8 * i), _mm_packus_epi16(y, y));
  }
  return to_float(total);
}

INLINE __m256i broadcast_word(const void* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return _mm256_set1_epi32(w);
}

// Products of indices up to MOST (families/klt/keys.h), 4 channels of 8 tokens in a word each.
constexpr int BAND_ROWS_OF_TWO = 4;  // up to how many rows two vectors of tokens go side by side
constexpr int NARROW_Q_BYTES = 1;
typedef __m256i BandQuery;
INLINE BandQuery band_query(const uint8_t* q) { return broadcast_word(q); }
template <int MOST>
INLINE void add_band_words(vi& to, const vi (&x)[4], const BandQuery (&q)[4]) {
  constexpr int AT_ONCE = 32767 / (2 * 127 * MOST) < 4 ? 32767 / (2 * 127 * MOST) : 4;  // 1, 2 or 4 sums fit 16 bits
  __m256i sums[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256i y = _mm256_maddubs_epi16((__m256i)x[i], q[i]);
    sums[i] = i % AT_ONCE ? _mm256_add_epi16(sums[i - 1], y) : y;
    if ((i + 1) % AT_ONCE == 0) to += (vi)_mm256_madd_epi16(sums[i], _mm256_set1_epi16(1));
  }
}

INLINE __m256i even_bytes(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi16(0xff)); }
INLINE __m256i odd_bytes(__m256i v) { return _mm256_srli_epi16(v, 8); }
INLINE __m256i widen_sums(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }

INLINE __m256i code_field(__m256i v, __m128i shift, __m256i mask) {
  return _mm256_and_si256(_mm256_srl_epi32(v, shift), mask);
}

// 8-bit keys: 256 channels of 255 * 32639 are the most that 32 bits hold.
template <int FMT, int NH>
INLINE void key_sums_wide(const KeyArgs& a, int t, int half, int c0, int c1, vf* x) {
  const int rb = a.row_bytes[0];
  while (c0 < c1) {
    const int end = c1 < c0 + 256 ? c1 : c0 + 256;
    __m256i acc[NH] = {};
    const uint8_t* src = a.plane[0] + (int64_t)t * rb * TILE + c0 * TILE + half * 32;
    const uint8_t* q = a.chunk->qw[0] + 2 * c0;
    for (int n = (end - c0) / 4; n > 0; n--, src += 64, q += 8) {
      fetch(src + a.ahead);
      const __m256i v = _mm256_loadu_si256((const __m256i*)src);
      const __m256i even = even_bytes(v), odd = odd_bytes(v);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(even, broadcast_word(q + h * Q_STRIDE)));
        acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(odd, broadcast_word(q + h * Q_STRIDE + 4)));
      }
    }
    for (int h = 0; h < NH; h++) x[h] += to_float((vi)acc[h]);
    c0 = end;
  }
}

template <int FMT, int NH>
INLINE void key_sums_narrow(const KeyArgs& a, int t, int half, int c0, int c1, vf* x) {
  __m256i acc[NH] = {};
  for (int plane = 0; plane < num_planes(FMT); plane++) {
    const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane];
    const int run = 32767 / (2 * 127 * ((1 << bits) - 1));
    if (plane)
      for (int h = 0; h < NH; h++) acc[h] = _mm256_slli_epi32(acc[h], bits);
    const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
    for (int field = c0 / rb; field * rb < c1; field++) {
      const int first = c0 > field * rb ? c0 : field * rb, end = c1 < (field + 1) * rb ? c1 : (field + 1) * rb;
      const uint8_t* src = a.plane[plane] + (int64_t)t * rb * TILE + (first - field * rb) * TILE + half * 32;
      const uint8_t* q = a.chunk->qw[0] + first;
      const __m128i shift = _mm_cvtsi32_si128(field * bits);
      for (int left = (end - first) / 4; left > 0; left -= run) {
        __m256i part[NH] = {};
        for (int n = left < run ? left : run; n > 0; n--, src += 64, q += 4) {
          fetch(src + a.ahead);
          const __m256i v = code_field(_mm256_loadu_si256((const __m256i*)src), shift, mask);
#pragma GCC unroll 8
          for (int h = 0; h < NH; h++)
            part[h] = _mm256_add_epi16(part[h], _mm256_maddubs_epi16(v, broadcast_word(q + h * Q_STRIDE)));
        }
        for (int h = 0; h < NH; h++) acc[h] = _mm256_add_epi32(acc[h], widen_sums(part[h]));
      }
    }
  }
  for (int h = 0; h < NH; h++) x[h] = to_float((vi)acc[h]);
}

template <int FMT, int NH>
static void key_int(const KeyArgs& a) {
  const Chunk& c = *a.chunk;
  const int tiles = round_up(a.tokens, 2 * TILE) / TILE;
  for (int t = 0; t < tiles; t++)
    for (int half = 0; half < 2; half++)
      for (int g = 0; g < a.groups; g++) {
        const int c0 = g * a.group_channels, c1 = c0 + a.group_channels, token = t * TILE + half * 8;
        vf x[NH] = {};
        if (is_wide(FMT)) key_sums_wide<FMT, NH>(a, t, half, c0, c1, x);
        else key_sums_narrow<FMT, NH>(a, t, half, c0, c1, x);
        for (int h = 0; h < NH; h++) {
          float* s = a.s + h * BLOCK + token;
          vf y = x[h] * c.q_scale[g][h] + c.q_zero[g][h];
          if (a.scale) y *= load(a.scale + g * BLOCK + token);
          if (a.bias) y += load(a.bias + g * BLOCK + token) * c.q_sum[g][h];
          store(s, g ? load(s) + y : y);
        }
      }
}

// 8 (or the last 4) channels of a value block over the block's tokens.
INLINE __m256i load_codes(const uint8_t* p, int channels) {
  return channels >= 8 ? _mm256_loadu_si256((const __m256i*)p)
                       : _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p));
}

template <int FMT, int NH>
INLINE void value_sums(const ValueArgs& a, const uint8_t* src, int width, int channels, int g, int shift_bits, int bits,
                       __m256i* acc) {
  const __m128i shift = _mm_cvtsi32_si128(shift_bits);
  const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
  const uint8_t* p = a.block->pw[g][0];
  const int quads = round_up(a.tokens, 8) / 4;
  if (is_wide(FMT)) {
    for (int n = 0; n < quads; n++, src += 4 * width, p += 8) {
      fetch(src + a.ahead);
      const __m256i v = load_codes(src, channels);
      const __m256i even = even_bytes(v), odd = odd_bytes(v);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(even, broadcast_word(p + h * 2 * BLOCK)));
        acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(odd, broadcast_word(p + h * 2 * BLOCK + 4)));
      }
    }
    return;
  }
  const int run = 32767 / (2 * 255 * ((1 << bits) - 1));
  for (int left = quads; left > 0; left -= run) {
    __m256i part[NH] = {};
    for (int n = left < run ? left : run; n > 0; n--, src += 4 * width, p += 4) {
      fetch(src + a.ahead);
      const __m256i v = code_field(load_codes(src, channels), shift, mask);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++)
        part[h] = _mm256_add_epi16(part[h], _mm256_maddubs_epi16(broadcast_word(p + h * 2 * BLOCK), v));
    }
    for (int h = 0; h < NH; h++) acc[h] = _mm256_add_epi32(acc[h], widen_sums(part[h]));
  }
}

// A plane's words of 8 channels from `channel` on.
struct ValueWords {
  const uint8_t* at;
  int quad_bytes, field;
};
INLINE ValueWords value_words(const ValueArgs& a, int plane, int channel) {
  const int rb = a.row_bytes[plane], r = channel % rb, block = r / 16 * 16, width = rb - block < 16 ? rb - block : 16;
  return {a.plane[plane] + (int64_t)block * a.page_size + a.first_token * width + (r - block) * 4, 4 * width,
          channel / rb};
}

// The outputs gain 3-bit values, whose planes are joined to codes before one dot product; every 8 neighbouring channels
// are of one group.
template <int NH>
static void value_three_bits(const ValueArgs& a) {
  constexpr int RUN = 32767 / (2 * 255 * 7);
  const int quads = round_up(a.tokens, 8) / 4;
  const __m256i two_mask = _mm256_set1_epi8(6), one_mask = _mm256_set1_epi8(1);
  for (int channel = 0; channel < a.head_dim; channel += 8) {
    const int g = channel / a.group_channels;
    const ValueWords two = value_words(a, 0, channel), one = value_words(a, 1, channel);
    const __m128i left = _mm_cvtsi32_si128(two.field ? 0 : 1),
                  right = _mm_cvtsi32_si128(two.field ? 2 * two.field - 1 : 0), down = _mm_cvtsi32_si128(one.field);
    const int64_t two_ahead = two.field ? 0 : a.ahead, one_ahead = one.field ? 0 : a.ahead;
    const uint8_t *p = a.block->pw[g][0], *src = two.at, *src1 = one.at;
    __m256i acc[NH] = {};
    for (int done = 0; done < quads; done += RUN) {
      __m256i part[NH] = {};
      for (int n = quads - done < RUN ? quads - done : RUN; n > 0;
           n--, src += two.quad_bytes, src1 += one.quad_bytes, p += 4) {
        fetch(src + two_ahead);
        fetch(src1 + one_ahead);
        const __m256i x = _mm256_sll_epi32(_mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)src), right), left);
        const __m256i y = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)src1), down);
        const __m256i v = _mm256_or_si256(_mm256_and_si256(x, two_mask), _mm256_and_si256(y, one_mask));
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++)
          part[h] = _mm256_add_epi16(part[h], _mm256_maddubs_epi16(broadcast_word(p + h * 2 * BLOCK), v));
      }
      for (int h = 0; h < NH; h++) acc[h] = _mm256_add_epi32(acc[h], widen_sums(part[h]));
    }
    for (int h = 0; h < NH; h++) add_output(a, h, channel, to_float((vi)acc[h]) * a.block->p_scale[g][h]);
  }
}

// The outputs gain two neighbouring fields of a plane's bytes: what is loaded of codes and of p serves both. All
// channels are of one group.
template <int FMT, int NH>
INLINE void value_two_fields(const ValueArgs& a, int plane, int field, float weight) {
  const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane], quads = round_up(a.tokens, 8) / 4,
            run = 32767 / (2 * 255 * ((1 << bits) - 1));
  const __m128i first = _mm_cvtsi32_si128(field * bits), second = _mm_cvtsi32_si128((field + 1) * bits);
  const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
  const int64_t ahead = field ? 0 : a.ahead;  // every line is fetched once
  for (int r = 0; r < rb; r += 8) {
    const ValueWords words = value_words(a, plane, field * rb + r);
    const uint8_t *src = words.at, *p = a.block->pw[0][0];
    __m256i acc[2][NH] = {};
    for (int left = quads; left > 0; left -= run) {
      __m256i part[2][NH] = {};
      for (int n = left < run ? left : run; n > 0; n--, src += words.quad_bytes, p += 4) {
        fetch(src + ahead);
        const __m256i v = _mm256_loadu_si256((const __m256i*)src);
        const __m256i x = code_field(v, first, mask), y = code_field(v, second, mask);
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          const __m256i w = broadcast_word(p + h * 2 * BLOCK);
          part[0][h] = _mm256_add_epi16(part[0][h], _mm256_maddubs_epi16(w, x));
          part[1][h] = _mm256_add_epi16(part[1][h], _mm256_maddubs_epi16(w, y));
        }
      }
      for (int i = 0; i < 2; i++)
        for (int h = 0; h < NH; h++) acc[i][h] = _mm256_add_epi32(acc[i][h], widen_sums(part[i][h]));
    }
    for (int i = 0; i < 2; i++)
      for (int h = 0; h < NH; h++)
        add_output(a, h, (field + i) * rb + r, to_float((vi)acc[i][h]) * (a.block->p_scale[0][h] * weight));
  }
}

template <int FMT, int NH>
static void value_int(const ValueArgs& a) {
  if (FMT == FORMAT_INT3 && a.row_bytes[0] % 8 == 0 && a.row_bytes[1] % 8 == 0 && a.group_channels % 8 == 0)
    return value_three_bits<NH>(a);
  float weight = 1.0f;
  for (int plane = num_planes(FMT) - 1; plane >= 0; plane--) {
    const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane];
    // NH: as many sums as there are registers for
    const bool two = NH <= 4 && !is_wide(FMT) && a.groups == 1 && rb % 8 == 0 && a.head_dim % (2 * rb) == 0;
    for (int field = 0; field * rb < a.head_dim; field++) {
      if (two) {
        if constexpr (NH <= 4 && !is_wide(FMT)) value_two_fields<FMT, NH>(a, plane, field++, weight);
        continue;
      }
      for (int r = 0; r < rb && field * rb + r < a.head_dim; r += 8) {
        const int block = r / 16 * 16, width = rb - block < 16 ? rb - block : 16;
        const int channels = block + width - r < 8 ? block + width - r : 8, channel = field * rb + r;
        const int end = channel + channels < a.head_dim ? channel + channels : a.head_dim;
        const uint8_t* src = a.plane[plane] + (int64_t)block * a.page_size + a.first_token * width + (r - block) * 4;
        for (int g = channel / a.group_channels; g * a.group_channels < end; g++) {
          __m256i acc[NH] = {};
          value_sums<FMT, NH>(a, src, width, channels, g, field * bits, bits, acc);
          const int first = g * a.group_channels - channel,
                    last = (g + 1) * a.group_channels < end ? (g + 1) * a.group_channels - channel : end - channel;
          const vi inside = (iota() >= splat_int(first)) & (iota() < splat_int(last));
          for (int h = 0; h < NH; h++)
            add_output(a, h, channel, to_float((vi)acc[h]) * (a.block->p_scale[g][h] * weight), inside);
        }
      }
    }
    weight *= (float)(1 << bits);
  }
}

constexpr int LEVEL_ROWS_OF_FOUR = 1, LEVEL_ROWS_OF_TWO = 4;  // up to how many rows runs go side by side
// Dot products of levels (families/klt/values.h) of magnitude up to MOST, 8 channels of four tokens at a time: runs FIRST,
// FIRST + STEP .. of each quad of tokens.
template <int MOST, int NH, int FIRST, int STEP, class Levels>
INLINE void dot_levels(const ValueArgs& a, const Levels& levels, vf (&sums)[4 / STEP][NH]) {
  constexpr int RUN = 32767 / (2 * 255 * MOST);
  const uint8_t* p = a.block->pw[0][0];
  const int quads = round_up(a.tokens, 8) / 4;
  __m256i acc[4 / STEP][NH] = {};
  for (int done = 0; done < quads; done += RUN) {
    __m256i part[4 / STEP][NH] = {};
    const int end = quads - done < RUN ? quads : done + RUN;
    for (int quad = done; quad < end; quad++, p += 4) {
      vi level[4];
      levels.load(quad, level);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        const __m256i w = broadcast_word(p + h * 2 * BLOCK);
#pragma GCC unroll 4
        for (int i = 0; i < 4 / STEP; i++)
          part[i][h] = _mm256_add_epi16(part[i][h], _mm256_maddubs_epi16(w, (__m256i)level[FIRST + i * STEP]));
      }
    }
    for (int i = 0; i < 4 / STEP; i++)
      for (int h = 0; h < NH; h++) acc[i][h] = _mm256_add_epi32(acc[i][h], widen_sums(part[i][h]));
  }
  for (int i = 0; i < 4 / STEP; i++)
    for (int h = 0; h < NH; h++) sums[i][h] = to_float((vi)acc[i][h]);
}

}  // namespace
