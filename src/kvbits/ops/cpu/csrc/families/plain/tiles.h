// Blocks of raw rows, FP8 and integer codes as tiles of B: their scales, biases and means are part of the numbers.
#pragma once
#include "engine/tiles/state.h"
// behind the width of vectors
#include "numbers.h"

namespace {

// Groups of channels of keys whose tokens' scales are left to scores, 0 where numbers have their scales: codes of 8
// bits are one term without them, and two with them. Scales of values would be as many multiplications of
// probabilities, which vectors do and which take longer than products of tiles with a second term.
static int scaled_groups(const Tensor& t) {
  const bool alone = is_wide(t.format) && t.token_scales && !t.token_bias;
  return alone && t.group_channels % TILE_DEPTH == 0 && t.groups <= SCALED_GROUPS ? t.groups : 0;
}

// How many terms keep a format's precision: one where its own error is far above 2^-9, or where `one_term` is enough.
static int terms_of(const Tensor& t, int groups, bool one_term) {
  if (t.raw) return t.t->raw_dtype == BFLOAT16 ? 1 : 2;
  const bool few_bits = t.trellis || is_trellis(t.format) || (t.integer && !is_wide(t.format));
  return groups || few_bits || one_term ? 1 : 2;
}

// Terms of codes with their scales.
constexpr int most_terms(int format) { return is_wide(format) || !is_int(format) ? 2 : 1; }

// Where the slices have a channel's step of token tile i.
INLINE int64_t key_tile(int channel, int i, int d) {
  return i / 2 * slice_numbers(d) + (channel / TILE_DEPTH * 2 + i % 2) * TILE_NUMBERS;
}

// Keys of a block, to its slices. LEVELS: without their scales and means.
template <int FMT, int N_TERMS, bool LEVELS = false>
static void key_codes_to_tiles(const Tensor& t, const Block& b, const PageView& at, int token, int n, bool biases,
                               uint16_t* to) {
  const int64_t apart = panel_numbers(t.head_dim);
  const int tiles = (n + TILE - 1) / TILE;
  for (int c = 0; c < t.head_dim; c += 4) {
    if (c / VL % 2) continue;  // pairs of channels c and c + 16
    const CodeWords first = key_words<FMT>(t, at, c), second = key_words<FMT>(t, at, c + VL);
    const int g = c / t.group_channels, h = (c + VL) / t.group_channels;
    for (int i = 0; i < tiles; i++) {
      const int64_t tile = token / TILE + i, a0 = tile * t.row_bytes[0] * TILE, a1 = tile * t.row_bytes[1] * TILE;
      const vi x = code_words<FMT>(first, a0, a1), y = code_words<FMT>(second, a0, a1);
      uint16_t* rows = to + key_tile(c, i, t.head_dim) + c % TILE_DEPTH * TILE_DEPTH;
      const int place = i * TILE;
      vf x_scale, y_scale, x_add, y_add;
      if (t.token_scales) {
        x_scale = load(b.k_scale[g] + place), y_scale = load(b.k_scale[h] + place);
        x_add = x_scale * -code_zero<FMT>(), y_add = y_scale * -code_zero<FMT>();
        if (t.token_bias) x_add += load(b.k_bias[g] + place), y_add += load(b.k_bias[h] + place);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        if constexpr (LEVELS) {
          store_pairs<N_TERMS>(rows + k * TILE_DEPTH, apart, code_number<FMT>(x, k) - code_zero<FMT>(),
                               code_number<FMT>(y, k) - code_zero<FMT>());
          continue;
        }
        if (t.channel_scales) {
          x_scale = splat(b.k_channel[c + k]), y_scale = splat(b.k_channel[c + VL + k]);
          x_add = x_scale * -code_zero<FMT>(), y_add = y_scale * -code_zero<FMT>();
        }
        vf p = code_number<FMT>(x, k) * x_scale + x_add, q = code_number<FMT>(y, k) * y_scale + y_add;
        if (biases) p += b.k_channel_bias[c + k], q += b.k_channel_bias[c + VL + k];
        store_pairs<N_TERMS>(rows + k * TILE_DEPTH, apart, p, q);
      }
    }
  }
}

// Where a page has the words of 16 channels of values from `channel` on, of its first four tokens; a plane whose rows
// are short has fewer words in a quad.
template <int FMT>
INLINE CodeWords value_words(const Tensor& t, const PageView& at, int page_size, int channel, int (&quad)[2]) {
  CodeWords w = {};
  for (int i = 0; i < num_planes(FMT); i++) {
    const int bits = plane_bits(FMT, i), rb = t.row_bytes[i], field = channel / rb, r = channel % rb;
    const int width = rb - r < VL ? rb - r : VL;
    w.plane[i] = at.page + t.t->plane_offset[i] + (int64_t)r * page_size;
    w.shift[i] = field * bits;
    w.ahead[i] = field ? 0 : at.ahead;
    quad[i] = 4 * width;
  }
  return w;
}

// Where column tile j has the row of pairs of a token that is in the first half of its slice.
INLINE int64_t value_row(int token, int j, int column_tiles) {
  return token / TILE_DEPTH * slice_numbers(column_tiles * TILE_COLUMNS) + j * TILE_NUMBERS +
         token % TILE_DEPTH * TILE_DEPTH;
}

// Values of a block, to its slices.
template <int FMT, int N_TERMS>
static void value_codes_to_tiles(const Tensor& t, const Block& b, const PageView& at, int page_size, int token, int n,
                                 bool biases, uint16_t* to) {
  const int64_t apart = panel_numbers(t.head_dim);
  const int column_tiles = t.head_dim / TILE_COLUMNS, quads = n > TILE_DEPTH ? 16 : 8;
  for (int j = 0; j < column_tiles; j++) {
    int quad_bytes[2] = {};
    const CodeWords words = value_words<FMT>(t, at, page_size, j * VL, quad_bytes);
    const int g = j * VL / t.group_channels;
    const vf bias = biases ? load(b.v_channel_bias + j * VL) : vf{};
    const vf of_channel = t.channel_scales ? load(b.v_channel + j * VL) : vf{};
    for (int quad = 0; quad < quads; quad++) {
      if (quad / 4 % 2) continue;  // pairs of tokens t and t + 16
      const int64_t a = token / 4 + quad;
      const vi x = code_words<FMT>(words, a * quad_bytes[0], a * quad_bytes[1]),
               y = code_words<FMT>(words, (a + 4) * quad_bytes[0], (a + 4) * quad_bytes[1]);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        const int place = token_of(quad, k);
        vf x_scale = of_channel, y_scale = of_channel, x_add, y_add;
        if (t.token_scales) x_scale = splat(b.v_scale[g][place]), y_scale = splat(b.v_scale[g][place + VL]);
        x_add = x_scale * -code_zero<FMT>(), y_add = y_scale * -code_zero<FMT>();
        if (t.token_bias) x_add += b.v_bias[g][place], y_add += b.v_bias[g][place + VL];
        vf p = code_number<FMT>(x, k) * x_scale + x_add, q = code_number<FMT>(y, k) * y_scale + y_add;
        if (biases) p += bias, q += bias;
        store_pairs<N_TERMS>(to + value_row(place, j, column_tiles), apart, p, q);
      }
    }
  }
}

// A row of pairs of VL raw numbers at `first` and `second`, either of which may be null: then they are 0.
template <int DTYPE, int N_TERMS>
INLINE void pair_raw(const uint8_t* first, const uint8_t* second, vi (&x)[N_TERMS]) {
  if constexpr (DTYPE == BFLOAT16) {
    auto bits = [](const uint8_t* p) { return p ? __builtin_convertvector(*(const vh_mem*)p, vi) : vi{}; };
    x[0] = bits(first) | bits(second) << 16;
  } else {
    const vf a = first ? load_as<DTYPE>(first, 0) : vf{}, b = second ? load_as<DTYPE>(second, 0) : vf{};
    pair_terms(a, b, x);
  }
}

// Raw rows of keys: a row of 16 tokens' pairs is a column of their rows.
template <int DTYPE>
static void key_rows_to_tiles(const uint8_t* rows, int d, int n, int64_t ahead, uint16_t* to) {
  constexpr int N_TERMS = DTYPE == BFLOAT16 ? 1 : 2, SIZE = DTYPE == FLOAT32 ? 4 : 2;
  const int64_t apart = panel_numbers(d);
  for (int i = 0; i * TILE < n; i++)
    for (int c = 0; c < d; c += TILE_DEPTH) {
      vi x[N_TERMS][16] = {};
      for (int t = 0; t < TILE && i * TILE + t < n; t++) {
        const uint8_t* row = rows + (int64_t)(i * TILE + t) * d * SIZE;
        fetch(row + c * SIZE + ahead);
        vi pairs[N_TERMS];
        pair_raw<DTYPE>(row + c * SIZE, row + (c + VL) * SIZE, pairs);
        for (int term = 0; term < N_TERMS; term++) x[term][t] = pairs[term];
      }
      for (int term = 0; term < N_TERMS; term++) {
        transpose(x[term]);
        for (int k = 0; k < 16; k++)
          store_int((int32_t*)(to + term * apart + key_tile(c, i, d) + k * TILE_DEPTH), x[term][k]);
      }
    }
}

template <int DTYPE>
static void value_rows_to_tiles(const uint8_t* rows, int d, int n, int64_t ahead, uint16_t* to) {
  constexpr int N_TERMS = DTYPE == BFLOAT16 ? 1 : 2, SIZE = DTYPE == FLOAT32 ? 4 : 2;
  const int64_t apart = panel_numbers(d);
  const int column_tiles = d / TILE_COLUMNS, tokens = n > TILE_DEPTH ? BLOCK : TILE_DEPTH;
  for (int t = 0; t < tokens; t++) {
    if (t / VL % 2) continue;
    const uint8_t *first = rows + (int64_t)t * d * SIZE, *second = first + (int64_t)VL * d * SIZE;
    for (int j = 0; j < column_tiles; j++) {
      if (j % 2 == 0) fetch(first + j * VL * SIZE + ahead), fetch(second + j * VL * SIZE + ahead);
      vi x[N_TERMS];
      pair_raw<DTYPE>(t < n ? first + j * VL * SIZE : nullptr, t + VL < n ? second + j * VL * SIZE : nullptr, x);
      for (int term = 0; term < N_TERMS; term++)
        store_int((int32_t*)(to + value_row(t, j, column_tiles) + term * apart), x[term]);
    }
  }
}

typedef void (*RowsToTiles)(const uint8_t* rows, int d, int n, int64_t ahead, uint16_t* to);
constexpr RowsToTiles raw_keys_to_tiles[] = {key_rows_to_tiles<0>, key_rows_to_tiles<1>, key_rows_to_tiles<2>};
constexpr RowsToTiles raw_values_to_tiles[] = {value_rows_to_tiles<0>, value_rows_to_tiles<1>, value_rows_to_tiles<2>};
static_assert(NUM_RAW_DTYPES == 3, "rows of every dtype have a function");

static void plain_keys_to_tiles(const Tensor& t, const Block& b, const PageView& at, int token, int n, bool biases,
                                bool levels, int terms, uint16_t* to) {
  if (t.raw) {
    const int64_t row = (int64_t)t.head_dim * dtype_bytes(t.t->raw_dtype);
    return raw_keys_to_tiles[t.t->raw_dtype](at.page + t.t->plane_offset[0] + token * row, t.head_dim, n, at.ahead, to);
  }
  if (levels) return key_codes_to_tiles<FORMAT_INT8, 1, true>(t, b, at, token, n, false, to);
  switch (t.format) {
#define OF_FORMAT(f)                                                             \
  case f:                                                                        \
    return terms == 1 ? key_codes_to_tiles<f, 1>(t, b, at, token, n, biases, to) \
                      : key_codes_to_tiles<f, most_terms(f)>(t, b, at, token, n, biases, to);
    OF_FORMAT(FORMAT_INT8)
    OF_FORMAT(FORMAT_INT4) OF_FORMAT(FORMAT_INT3) OF_FORMAT(FORMAT_INT2) OF_FORMAT(FORMAT_FP8_E4M3)
        OF_FORMAT(FORMAT_FP8_E5M2)
#undef OF_FORMAT
  }
}

static void plain_values_to_tiles(const Tensor& t, const Block& b, const PageView& at, int page_size, int token, int n,
                                  bool biases, int terms, uint16_t* to) {
  if (t.raw) {
    const int64_t row = (int64_t)t.head_dim * dtype_bytes(t.t->raw_dtype);
    return raw_values_to_tiles[t.t->raw_dtype](at.page + t.t->plane_offset[0] + token * row, t.head_dim, n, at.ahead,
                                               to);
  }
  switch (t.format) {
#define OF_FORMAT(f)                                                                          \
  case f:                                                                                     \
    return terms == 1 ? value_codes_to_tiles<f, 1>(t, b, at, page_size, token, n, biases, to) \
                      : value_codes_to_tiles<f, most_terms(f)>(t, b, at, page_size, token, n, biases, to);
    OF_FORMAT(FORMAT_INT8)
    OF_FORMAT(FORMAT_INT4) OF_FORMAT(FORMAT_INT3) OF_FORMAT(FORMAT_INT2) OF_FORMAT(FORMAT_FP8_E4M3)
        OF_FORMAT(FORMAT_FP8_E5M2)
#undef OF_FORMAT
  }
}

}  // namespace
