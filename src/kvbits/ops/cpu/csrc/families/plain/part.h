// Attention to a part whose pages are raw rows, FP8 or integer codes with scales: every kernel reads them as they lie.
#pragma once
#include <stdint.h>

#include "engine/attend/part.h"
#include "kernels.h"

namespace {

// The form in which the key kernel wants q: integers for integer codes, channel scales folded in where there are any.
static void prepare_query(Chunk& c, const Tensor& key, const float* channel_scale, int head_dim) {
  const float* from = c.q[0];
  if (key.channel_scales) {
    for (int h = 0; h < c.rows; h++)
      for (int i = 0; i < head_dim; i += VL) store(c.folded[h] + i, load(c.q[h] + i) * load(channel_scale + i));
    from = c.folded[0];
  }
  if (key.split)
    for (int h = 0; h < c.rows; h++) {
      __builtin_memcpy(c.folded[h], c.q[h], head_dim * sizeof(float));
      split_order(c.folded[h], head_dim, false);
    }
  if (!key.integer) return;
  if (is_wide(key.format)) quantize_query<true>(c, from, key.groups, key.group_channels, key.dot_zero);
  else quantize_query<false>(c, from, key.groups, key.group_channels, key.dot_zero);
}

// Queries with the channel scales folded in, and what the channel biases add to their scores.
static void fold_key_channels(Part& p, Chunk& c, bool scales, bool biases) {
  const int head_dim = p.call.head_dim;
  if (scales) prepare_query(c, p.key, p.block.k_channel, head_dim);
  for (int h = 0; h < c.rows; h++) c.q_bias[h] = 0;
  if (biases) add_query_bias(c, p.in_basis ? c.folded[0] : c.q[0], p.block.k_channel_bias, head_dim);
}

// Scores of n tokens from `token` on, as the page stores their keys.
static void plain_scores(const Part& p, Chunk& c, const PageView& at, int token, int n) {
  const Tensor& key = p.key;
  const Block& b = p.block;
  const int raw_row = key.head_dim * dtype_bytes(key.t->raw_dtype);
  KeyArgs k = {};
  for (int i = 0; i < 2; i++) {
    k.row_bytes[i] = key.row_bytes[i];
    k.plane[i] = at.page + key.t->plane_offset[i] + (int64_t)token * (key.raw ? raw_row : key.row_bytes[i]);
  }
  k.head_dim = key.head_dim;
  k.tokens = n;
  k.groups = key.groups;
  k.group_channels = key.group_channels;
  k.scale = key.token_scales ? b.k_scale[0] : nullptr;
  k.bias = key.token_bias ? b.k_bias[0] : nullptr;
  k.q = key.channel_scales || key.split ? c.folded[0] : c.q[0];
  k.chunk = &c;
  k.s = p.block.s[0];
  k.ahead = at.ahead;
  (key.raw ? plain_kernels.raw_key[key.split ? BF16_SPLIT : key.t->raw_dtype] : plain_kernels.key[key.format])
      .of[c.rows - 1](k);
}

static ValueArgs value_args(const Part& p, Chunk& c, const PageView& at, int token, int n) {
  const Tensor& value = p.value;
  const int raw_row = value.head_dim * dtype_bytes(value.t->raw_dtype);
  ValueArgs v = {};
  for (int i = 0; i < 2; i++) {
    v.row_bytes[i] = value.row_bytes[i];
    v.plane[i] = at.page + value.t->plane_offset[i] + (value.raw ? (int64_t)token * raw_row : 0);
  }
  v.head_dim = value.head_dim;
  v.tokens = n;
  v.page_size = p.pages.store->page_size;
  v.first_token = token;
  v.groups = value.groups;
  v.group_channels = value.group_channels;
  v.channel_scale = value.channel_scales ? p.block.v_channel : nullptr;
  v.fitted = value.t->fitted;
  v.levels = p.levels;
  v.block = &p.block;
  v.chunk = &c;
  v.ahead = at.ahead;
  return v;
}

static const ByRows<ValueKernel>& plain_value_kernels(const Tensor& value) {
  if (value.raw) return plain_kernels.raw_value[value.split ? BF16_SPLIT : value.t->raw_dtype];
  return plain_kernels.value[value.format];
}

struct PlainPart {
  Part& part;
  const ByRows<ValueKernel>& value_kernels;
  void (*decode)(const ValueArgs& a, LevelBlock& to);  // a block of values, where all chunks share their levels
  int64_t params = 0, params_bytes = 0;  // what of a page's scales is fetched early

  void begin() {
    Part& p = part;
    const kvbits_store& store = *p.pages.store;
    const bool fetches = p.key.page_channels || p.value.page_channels || p.key.t->mean_offset >= 0;
    params = first_param(store);
    params_bytes = fetches ? store.head_bytes - params : 0;
    const bool static_key = p.key.channel_scales && !p.key.page_channels;
    const bool biases = static_key && channel_params(p.key, nullptr, p.kv_head, p.call.head_dim, p.block.k_channel,
                                                     p.block.k_channel_bias);
    for (int i = 0; i < p.num_chunks; i++) {
      Chunk& c = p.chunks[i];
      if (p.value.token_scales) __builtin_memset(c.corr, 0, sizeof(c.corr[0]) * p.value.groups);
      fold_key_channels(p, c, !p.key.page_channels, biases);
    }
  }

  void begin_page(const PageView& at, int64_t) {
    Part& p = part;
    Block& b = p.block;
    const int head_dim = p.call.head_dim;
    fetch_range(at.page + at.ahead + params, params_bytes);
    if (p.key.page_channels || p.key.t->mean_offset >= 0) {
      const bool biases = channel_params(p.key, at.page, p.kv_head, head_dim, b.k_channel, b.k_channel_bias);
      for (int i = 0; i < p.num_chunks; i++) fold_key_channels(p, p.chunks[i], p.key.page_channels, biases);
    }
    p.value_bias = channel_params(p.value, at.page, p.kv_head, p.call.value_head_dim, b.v_channel, b.v_channel_bias);
  }

  void begin_block(const PageView& at, int token, int n) {
    Block& b = part.block;
    const int page_size = part.pages.store->page_size;
    if (part.key.token_scales) token_params(part.key, at.page, page_size, token, n, at.ahead, b.k_scale, b.k_bias);
    if (part.value.token_scales) token_params(part.value, at.page, page_size, token, n, at.ahead, b.v_scale, b.v_bias);
    if (part.levels) decode(value_args(part, part.chunks[0], at, token, n), *part.levels);
  }

  void scores(Chunk& c, const PageView& at, int token, int n) { plain_scores(part, c, at, token, n); }
  void outputs(Chunk& c, const PageView& at, int token, int n) {
    value_kernels.of[c.rows - 1](value_args(part, c, at, token, n));
  }
};

}  // namespace
