// Blocks of raw rows, FP8 and integer codes as rows of numbers.
#pragma once
#include "engine/attend/state.h"
#include "families/value_words.h"
#include "numbers.h"

namespace {

// A block of tokens: parameters, and numbers by channel, then by token.
struct RowsScratch {
  alignas(64) float scale[MAX_GROUPS][BLOCK], bias[MAX_GROUPS][BLOCK];
  alignas(64) float channel[ROW_STRIDE], channel_bias[ROW_STRIDE];
  alignas(64) float columns[MAX_HEAD_DIM + VL][BLOCK];
  alignas(64) float rows[BLOCK][ROW_STRIDE];
};

static void columns_to_rows(RowsScratch& r, int head_dim, int n) {
  for (int c = 0; c < head_dim; c += VL) {
    const float* at[VL];
    for (int i = 0; i < VL; i++) at[i] = r.columns[c + i];
    for (int t = 0; t < n; t += 4) {
      vf x[4];
      load_fours(at, t, x);
      for (int i = 0; i < 4; i++) store(r.rows[t + i] + c, x[i]);
    }
  }
}

// Every row gains what `of` has for its token.
template <class Of>
static void add_to_rows(RowsScratch& r, int head_dim, int n, const Of& of) {
  for (int t = 0; t < n; t++) {
    const float* x = of(t);
    for (int c = 0; c < head_dim; c += VL) store(r.rows[t] + c, load(r.rows[t] + c) + load(x + c));
  }
}

static void raw_rows(const Tensor& t, const uint8_t* page, int token, int n, RowsScratch& r) {
  const int64_t row = (int64_t)t.head_dim * dtype_bytes(t.t->raw_dtype);
  for (int i = 0; i < n; i++)
    widen(r.rows[i], page + t.t->plane_offset[0] + (token + i) * row, t.head_dim, t.t->raw_dtype);
}

template <int FMT>
static void key_code_columns(const Tensor& t, const uint8_t* page, int token, int n, RowsScratch& r) {
  for (int c = 0; c < t.head_dim; c += 4) {
    const CodeWords words = key_words<FMT>(t, {page, 0}, c);
    const int g = c / t.group_channels;
    for (int i = 0; i < n; i += VL) {
      const int64_t tile = (token + i) / TILE * TILE, place = i % TILE * 4;
      const vi x = code_words<FMT>(words, tile * t.row_bytes[0] + place, tile * t.row_bytes[1] + place);
      vf scale = {}, add = {};
      if (t.token_scales) scale = load(r.scale[g] + i);
      if (t.token_bias) add = load(r.bias[g] + i);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        if (t.channel_scales) scale = splat(r.channel[c + k]);
        store(r.columns[c + k] + i, (code_number<FMT>(x, k) - code_zero<FMT>()) * scale + add);
      }
    }
  }
}

// What VL channels from c on take of a token's parameters by group.
INLINE vf of_groups(const Tensor& t, const float (*by_group)[BLOCK], int c, int place) {
  if (t.group_channels % VL == 0) return splat(by_group[c / t.group_channels][place]);
  vf x = {};
  for (int i = 0; i < VL && c + i < t.head_dim; i++) x[i] = by_group[(c + i) / t.group_channels][place];
  return x;
}

template <int FMT>
static void value_code_rows(const Tensor& t, const ValueArgs& a, RowsScratch& r) {
  for (int c = 0; c < t.head_dim; c += VL) {
    const int left = (t.head_dim - c) / 4, count = left < RINGS ? left : RINGS;
    RingWords words[2];
    for (int i = 0; i < num_planes(FMT); i++) find_words(a, i, plane_bits(FMT, i), 0, c / 4, count, words[i]);
    auto fields = [&](int plane, int quad) {
      return fields_at_bottom(words[plane], load_rings<false>(words[plane], quad, 0));
    };
    for (int quad = 0; quad < round_up(a.tokens, 8) / 4; quad++) {
      vi x = fields(0, quad);
      if (num_planes(FMT) > 1) x = joined_codes<FMT>(x, fields(1, quad));
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        const int place = token_of(quad, k);
        const vf scale = t.token_scales ? of_groups(t, r.scale, c, place) : load(r.channel + c);
        vf y = (code_number<FMT>(x, k) - code_zero<FMT>()) * scale;
        if (t.token_bias) y += of_groups(t, r.bias, c, place);
        store(r.rows[place] + c, y);
      }
    }
  }
}

static ValueArgs value_args_of(const Tensor& t, const uint8_t* page, int page_size, int token, int n) {
  ValueArgs a = {};
  for (int i = 0; i < 2; i++) {
    a.row_bytes[i] = t.row_bytes[i];
    a.plane[i] = page + t.t->plane_offset[i];
  }
  a.head_dim = t.head_dim;
  a.tokens = n;
  a.page_size = page_size;
  a.first_token = token;
  a.fitted = t.t->fitted;
  return a;
}

// Whose codes are integers or floats with scales.
constexpr bool is_plain(int format) { return is_int(format) || is_float(format); }

template <int FMT = 0>
static void plain_key_columns(const Tensor& t, const uint8_t* page, int token, int n, RowsScratch& r) {
  if constexpr (is_plain(FMT))
    if (t.format == FMT) return key_code_columns<FMT>(t, page, token, n, r);
  if constexpr (FMT + 1 < NUM_FORMATS) plain_key_columns<FMT + 1>(t, page, token, n, r);
}

template <int FMT = 0>
static void plain_value_rows(const Tensor& t, const ValueArgs& a, RowsScratch& r) {
  if constexpr (is_plain(FMT))
    if (t.format == FMT) return value_code_rows<FMT>(t, a, r);
  if constexpr (FMT + 1 < NUM_FORMATS) plain_value_rows<FMT + 1>(t, a, r);
}

}  // namespace
