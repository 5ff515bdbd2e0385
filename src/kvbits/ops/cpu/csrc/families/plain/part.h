// Attention to a part whose pages are raw rows, FP8, integer or banded codes with scales: every kernel reads them as they lie.
#pragma once
#include <stdint.h>

#include "engine/attend/part.h"

namespace {

struct PlainPart {
  Part& part;
  int64_t params, params_bytes;  // what of a page's scales is fetched early

  void begin() {
    Part& p = part;
    const kvbits_store& store = *p.pages.store;
    const bool fetches = p.key.page_channels || p.value.page_channels || p.key.t->mean_offset >= 0;
    params = first_param(store);
    params_bytes = fetches ? store.head_bytes - params : 0;
    const bool static_key = p.key.channel_scales && !p.key.page_channels;
    const bool biases = static_key && channel_params(p.key, nullptr, p.kv_head, p.call.head_dim, p.block.k_channel, p.block.k_channel_bias);
    for (int i = 0; i < p.num_chunks; i++) {
      Chunk& c = p.chunks[i];
      if (p.value.token_scales) __builtin_memset(c.corr, 0, sizeof(c.corr[0]) * p.value.groups);
      fold_key_channels(p, c, !p.key.page_channels, biases);
    }
  }

  void begin_page(const PageView& at, int64_t start) {
    Part& p = part;
    Block& b = p.block;
    const int head_dim = p.call.head_dim;
    fetch_range(at.page + at.ahead + params, params_bytes);
    enter_basis(p, start);
    if (p.key.page_channels || p.key.t->mean_offset >= 0) {
      const bool biases = channel_params(p.key, at.page, p.kv_head, head_dim, b.k_channel, b.k_channel_bias);
      for (int i = 0; i < p.num_chunks; i++) fold_key_channels(p, p.chunks[i], p.key.page_channels, biases);
    }
    p.value_bias = channel_params(p.value, at.page, p.kv_head, head_dim, b.v_channel, b.v_channel_bias);
  }

  void begin_block(const PageView& at, int token, int n) {
    Block& b = part.block;
    const int page_size = part.pages.store->page_size;
    if (part.key.token_scales) token_params(part.key, at.page, page_size, token, n, at.ahead, b.k_scale, b.k_bias);
    if (part.value.token_scales) token_params(part.value, at.page, page_size, token, n, at.ahead, b.v_scale, b.v_bias);
  }

  void scores(Chunk& c, const PageView& at, int token, int n) { plain_scores(part, c, at, token, n); }
  void outputs(Chunk& c, const PageView& at, int token, int n) { plain_outputs(part.value, c, value_args(part, c, at, token, n)); }
};

static void attend_plain_part(Part& part, const Entries& entries) {
  PlainPart path = {part, 0, 0};
  path.begin();
  attend_pages(path, entries);
}

}  // namespace
