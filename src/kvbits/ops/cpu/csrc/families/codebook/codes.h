// Codes of KVQuant's formats (arXiv:2401.18079): the nearest entries of a codebook, listed outliers, a stretch per token. The definition is
// src/kvbits/quant/{outliers,qparams}.py and reference/close.py, which this matches bit for bit.
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"
#include "engine/close/stored_bits.h"
#include "families/plain/codes.h"
#include "ranges.h"

namespace {

// How normalized numbers of one head become codes, and what the codes stand for.
struct Coding {
  alignas(64) float middles[16];  // between neighbouring entries of the codebook, infinite behind the last
  alignas(64) float levels[16];
  float limit;                    // codebooks: numbers past it lie outside
  CodeRange range;                // integers
};

static void prepare_coding(Coding& k, const kvbits_tensor& t, int kv_head, const CodeRange& range) {
  k.range = range;
  k.limit = 1.0f + (t.scale_dtype == FLOAT16 ? 0x1p-10f : t.scale_dtype == BFLOAT16 ? 0x1p-7f : 0x1p-23f);
  if (!t.codebook) return;
  const int entries = 1 << code_bits(t.format);
  const float* book = t.codebook + (int64_t)kv_head * entries;
  for (int i = 0; i < 16; i++) {
    k.levels[i] = book[i % entries];
    k.middles[i] = i + 1 < entries ? (book[i] + book[i + 1]) * 0.5f : __builtin_inff();
  }
}

// How many middles lie below x: the number of the nearest entry, at ties the lower one.
template <int FMT>
INLINE vi nearest(const Coding& k, vf x) {
  constexpr int half = 1 << (code_bits(FMT) - 1);
  vi code = (x > splat(k.middles[half - 1])) & half;
  for (int step = half / 2; step; step /= 2) code += (x > look_up(k.middles, code + (step - 1))) & step;
  return code;
}

template <int FMT>
INLINE vi code_and_level(const Coding& k, vf scaled, vi& outside, vf& level) {
  if (is_codebook(FMT)) {
    outside = (vf)((vi)scaled & 0x7fffffff) > splat(k.limit);
    const vi code = nearest<FMT>(k, scaled);
    level = look_up(k.levels, code);
    return code;
  }
  outside = vi{};
  const vi code = code_of<FMT>(scaled, k.range, outside);
  level = to_float(code) - k.range.zero;
  return code;
}

// Scales of one token by channel: those of the page's channels, or its groups' spread over them.
struct RowScales {
  const float *inverse, *scale, *bias;
  alignas(64) float spread[3][MAX_HEAD_DIM + 16];
};

INLINE void spread_groups(float* to, const float* from, int page_size, int head_dim, int size) {
  for (int c = 0; c < head_dim; c += size, from += page_size) {
    int i = 0;
    for (; i + VL <= size; i += VL) store(to + c + i, splat(*from));
    for (; i < size; i++) to[c + i] = *from;
  }
}

// How the page is coded: `size` channels share a scale where it is the tokens' own.
struct PageCoding {
  int page_size, head_dim, size;
  bool by_token, has_bias, has_mean;
  int num_outliers;
};

INLINE void row_scales(const PageBuffers& b, const PageCoding& p, RowScales& r, int t) {
  if (!p.by_token) {
    r.inverse = b.inverse, r.scale = b.scale, r.bias = b.bias;
    return;
  }
  spread_groups(r.spread[0], b.inverse + t, p.page_size, p.head_dim, p.size);
  spread_groups(r.spread[1], b.scale + t, p.page_size, p.head_dim, p.size);
  if (p.has_bias) spread_groups(r.spread[2], b.bias + t, p.page_size, p.head_dim, p.size);
  r.inverse = r.spread[0], r.scale = r.spread[1], r.bias = r.spread[2];
}

constexpr int FOLD = 8;  // tokens of which b.most keeps the largest key of each channel

// Codes of the page, and how many elements lie outside. LIST: also each element's rank as an outlier in b.keys (its error, times 2^64 if it lies outside, as
// the bits of a float; -1 behind head_dim) and b.outside.
template <int FMT, bool LIST>
static int64_t code_page(PageBuffers& b, const PageCoding& p, const Coding& k) {
  const int width = padded_width(p.head_dim);
  RowScales r;
  int64_t total = 0;
  for (int t = 0; t < p.page_size; t++) {
    row_scales(b, p, r, t);
    const float *x = b.x + (int64_t)t * width, *raw = b.raw + (int64_t)t * width;
    int32_t *keys = b.keys + (int64_t)t * width, *most = b.most + (int64_t)(t / FOLD) * width;
    int row = 0;
    for (int c = 0; c < p.head_dim; c += VL) {
      const vi inside = iota() < splat_int(p.head_dim - c);
      const vf bias = p.has_bias ? load(r.bias + c) : vf{};
      vi outside;
      vf level;
      const vi code = code_and_level<FMT>(k, (load(x + c) - bias) * load(r.inverse + c), outside, level);
      outside &= inside;
      row += count(outside);
      store_bytes(b.codes + (int64_t)t * width + c, code & inside);
      if (!LIST) continue;
      vf dense = level * load(r.scale + c) + bias;
      if (p.has_mean) dense += load(b.mean + c);
      const vf error = (vf)((vi)(load(raw + c) - dense) & 0x7fffffff);
      const vi key = (vi)select(outside, error * 0x1p64f, error) | ~inside;
      *(vi_mem*)(keys + c) = key;
      const vi before = t % FOLD ? load_int(most + c) : key;
      *(vi_mem*)(most + c) = key > before ? key : before;
    }
    if (LIST)  // `list_worst` reads whole rows of them
      for (int c = round_up(p.head_dim, VL); c < width; c += VL) *(vi_mem*)(most + c) = vi{} - 1;
    if (LIST) b.outside[t] = row != 0;
    total += row;
  }
  return total;
}

// The elements of largest rank into b.listed, ascending; at equal ranks the first.
static void list_worst(PageBuffers& b, const PageCoding& p) {
  const int width = padded_width(p.head_dim), n = p.num_outliers;
  // As many folded keys reach this, so as many elements do.
  const int32_t floor = nth_largest(b.most, p.page_size / FOLD * width, n);
  int m = 0;
  for (int t = 0; t < p.page_size; t++)
    for (int c = 0; c < p.head_dim; c += VL) {
      const int32_t* keys = b.keys + (int64_t)t * width + c;
      if (!any(load_int(keys) >= splat_int(floor))) continue;
      for (int i = 0; i < VL; i++) {
        b.candidates[m] = t * p.head_dim + c + i;
        b.ranks[m] = keys[i];
        m += keys[i] >= floor;
      }
    }
  const int padded = round_up(m, VL);
  for (int i = m; i < padded; i++) b.ranks[i] = -1;
  const int32_t least = nth_largest(b.ranks, padded, n);
  int ties = n - count_above(b.ranks, padded, least), found = 0;
  for (int i = 0; i < m && found < n; i++)
    if (b.ranks[i] > least || (b.ranks[i] == least && ties-- > 0)) b.listed[found++] = b.candidates[i];
}

struct Place {
  int token, channel, scale;  // `scale`: where its scale and bias are
};

INLINE Place place_of(const PageCoding& p, int element) {
  const int t = element / p.head_dim, c = element % p.head_dim;
  return {t, c, p.by_token ? c / p.size * p.page_size + t : c};
}

template <int FMT>
static int64_t listed_outside(const PageBuffers& b, const PageCoding& p, const Coding& k) {
  const int width = padded_width(p.head_dim);
  int64_t total = 0;
  for (int i = 0; i < p.num_outliers; i++) {
    const Place at = place_of(p, b.listed[i]);
    if (!b.outside[at.token]) continue;
    const float x = b.x[(int64_t)at.token * width + at.channel];
    vi outside;
    vf level;
    code_and_level<FMT>(k, splat((p.has_bias ? x - b.bias[at.scale] : x) * b.inverse[at.scale]), outside, level);
    total -= outside[0];
  }
  return total;
}

// Factors that bring tokens' furthest unlisted elements just inside, stored, and those tokens' codes anew.
template <int FMT, int DTYPE>
static bool stretch_tokens(PageBuffers& b, const PageCoding& p, const Coding& k, uint8_t* to) {
  const int width = padded_width(p.head_dim);
  bool ok = true;
  for (int i = 0; i < p.num_outliers; i++) {
    const Place at = place_of(p, b.listed[i]);
    b.keys[(int64_t)at.token * width + at.channel] = -1;
  }
  for (int t = 0; t < p.page_size; t++) {
    const float* x = b.x + (int64_t)t * width;
    vf most = splat(1.0f);
    if (b.outside[t])
      for (int c = 0; c < p.head_dim; c += VL) {
        const vf bias = p.has_bias ? load(b.bias + c) : vf{};
        const vf level = (vf)((vi)((load(x + c) - bias) * load(b.inverse + c)) & 0x7fffffff);
        const vi stretches = (level > splat(k.limit)) & (load_int(b.keys + (int64_t)t * width + c) >= vi{});
        most = select(stretches, vmax(most, level), most);
      }
    const vi bits = scale_bits<DTYPE>(splat(max_of(most)));
    const float stretch = from_bits<DTYPE>(bits)[0];
    ok &= (bool)__builtin_isfinite(stretch);
    store_bits<DTYPE>(to, t, bits, 1);
    b.stretch[t] = stretch;
    if (stretch == 1.0f) continue;
    const float inverse = 1.0f / stretch;
    for (int c = 0; c < p.head_dim; c += VL) {
      const vf bias = p.has_bias ? load(b.bias + c) : vf{};
      vi outside;
      vf level;
      const vi code = code_and_level<FMT>(k, (load(x + c) - bias) * load(b.inverse + c) * inverse, outside, level);
      store_bytes(b.codes + (int64_t)t * width + c, code & (iota() < splat_int(p.head_dim - c)));
    }
  }
  return ok;
}

// What the listed elements' dense numbers lack, and where they are.
template <int DTYPE>
static bool store_listed(PageBuffers& b, const PageCoding& p, const Coding& k, bool codebook, bool stretched, uint8_t* index, uint8_t* value) {
  const int width = padded_width(p.head_dim), n = p.num_outliers;
  const bool wide = (int64_t)p.page_size * p.head_dim > 65536;
  float* errors = (float*)b.ranks;
  for (int i = 0; i < n; i++) {
    const Place at = place_of(p, b.listed[i]);
    const int64_t element = (int64_t)at.token * width + at.channel;
    const int code = b.codes[element];
    float dense = (codebook ? k.levels[code] : (float)code - k.range.zero) * b.scale[at.scale];
    if (stretched) dense *= b.stretch[at.token];
    if (p.has_bias) dense += b.bias[at.scale];
    if (p.has_mean) dense += b.mean[at.channel];
    errors[i] = b.raw[element] - dense;
    if (wide) ((int32_t*)index)[i] = b.listed[i];
    else ((uint16_t*)index)[i] = (uint16_t)b.listed[i];
  }
  bool ok = true;
  for (int i = 0; i < n; i += VL) {
    const int m = n - i < VL ? n - i : VL;
    const vi bits = to_bits<DTYPE>(load(errors + i));
    const vf stored = from_bits<DTYPE>(bits);
    store_bits<DTYPE>(value, i, bits, m);
    for (int j = 0; j < m; j++) ok &= (bool)__builtin_isfinite(stored[j]);
  }
  return ok;
}

template <int FMT, int DTYPE>
static bool dense_and_sparse(PageBuffers& b, const kvbits_tensor& t, const PageCoding& p, const Coding& k, uint8_t* head, int64_t& saturated) {
  if (!p.num_outliers) {
    saturated = code_page<FMT, false>(b, p, k);
    return true;
  }
  bool ok = true;
  const bool stretched = t.stretch_offset >= 0;
  saturated = code_page<FMT, true>(b, p, k);
  list_worst(b, p);
  if (saturated) saturated -= listed_outside<FMT>(b, p, k);
  if (stretched) {
    ok = stretch_tokens<FMT, DTYPE>(b, p, k, head + t.stretch_offset);
    saturated = 0;
  }
  return store_listed<DTYPE>(b, p, k, is_codebook(FMT), stretched, head + t.outlier_index_offset, head + t.outlier_value_offset) && ok;
}

// Codes of a page with a codebook or outliers, its parameters chosen before. False when something stored overflows.
static bool code_kvquant(PageBuffers& b, const kvbits_tensor& t, const PageCoding& p, int kv_head, const CodeRange& range, uint8_t* head, int64_t& saturated) {
  Coding k;
  prepare_coding(k, t, kv_head, range);
#define CASE(F)                                                                                                    \
  case F:                                                                                                          \
    if (t.scale_dtype == FLOAT32) return dense_and_sparse<F, FLOAT32>(b, t, p, k, head, saturated);        \
    if (t.scale_dtype == FLOAT16) return dense_and_sparse<F, FLOAT16>(b, t, p, k, head, saturated);        \
    return dense_and_sparse<F, BFLOAT16>(b, t, p, k, head, saturated)
  switch (t.format) {
    CASE(FORMAT_NUQ4);
    CASE(FORMAT_NUQ3);
    CASE(FORMAT_NUQ2);
    CASE(FORMAT_INT8);
    CASE(FORMAT_INT4);
    CASE(FORMAT_INT3);
    default: CASE(FORMAT_INT2);
  }
#undef CASE
}

}  // namespace
