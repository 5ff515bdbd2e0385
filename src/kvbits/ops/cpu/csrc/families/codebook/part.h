// Attention to a part with what KVQuant adds (arXiv:2401.18079) to its keys or values: codes that number the entries of a codebook, keys stored before the
// rotary embedding, a stretch per token, listed outliers. What of it is as in plain pages is read by their kernels.
#pragma once
#include <stdint.h>

#include "engine/attend/angles.h"
#include "engine/attend/part.h"
#include "families/plain/part.h"
#include "keys.h"
#include "outliers.h"
#include "values.h"

namespace {

INLINE bool adds_to_plain(const Tensor& d) { return d.decoded || d.stretched || d.t->num_outliers; }

typedef void (*TileKernel)(const Decoded&, const Nibbles&, const float* turns, int head_dim, const float* q, float* s);
typedef void (*CodebookValueKernel)(const ValueArgs&, Decoded&, int format);

struct CodebookKernels {
  ByRows<TileKernel> tile[NIBBLES + 1][2];  // [source][turned]
  ByRows<CodebookValueKernel> value;
};

constexpr CodebookKernels codebook_kernels_by_source() {
  CodebookKernels k = {};
#define TILES(source, turned) \
  k.tile[source][turned] = {{key_tile<source, turned, 1>, key_tile<source, turned, 2>, key_tile<source, turned, 3>, key_tile<source, turned, 4>, \
                             key_tile<source, turned, 5>, key_tile<source, turned, 6>, key_tile<source, turned, 7>, key_tile<source, turned, 8>}, true}
  TILES(DECODED, false);
  TILES(DECODED, true);
  TILES(UNPACKED, false);
  TILES(UNPACKED, true);
  TILES(NIBBLES, false);
  TILES(NIBBLES, true);
#undef TILES
  k.value = {{value_levels<1>, value_levels<2>, value_levels<3>, value_levels<4>, value_levels<5>, value_levels<6>, value_levels<7>, value_levels<8>}, true};
  return k;
}

constexpr CodebookKernels codebook_kernels = codebook_kernels_by_source();
static_assert(codebook_kernels.tile[DECODED][0].there && codebook_kernels.tile[DECODED][1].there, "decoded keys have no kernel");
static_assert(codebook_kernels.tile[UNPACKED][0].there && codebook_kernels.tile[UNPACKED][1].there, "unpacked codes of keys have no kernel");
static_assert(codebook_kernels.tile[NIBBLES][0].there && codebook_kernels.tile[NIBBLES][1].there, "keys in nibbles have no kernel");

static void load_stretch(Decoded& w, const kvbits_tensor& t, const uint8_t* page, int token, int n) {
  token_factors(t, page, token, n, w.factor);
  for (int i = 0; i < BLOCK / TILE; i++) {
    vi other = vi{};
    for (int k = i * TILE; k < (i + 1) * TILE; k += VL) other |= load(w.factor + k) != splat(1.0f);
    w.stretched[i] = any(other);
  }
}

struct CodebookPart {
  Part& part;
  PlainPart base;               // what is as in plain pages
  Decoded& w;
  Angles& angles;
  int params_per_tile = 0;      // bytes behind the codes, in whole lines, that a tile of decoded keys fetches of the page to come

  // What the whole part shares. Channel scales and biases are 1 and 0 where the format has none.
  void begin_decoding() {
    Part& p = part;
    Block& b = p.block;
    const kvbits_tensor &key = *p.key.t, &value = *p.value.t;
    if (p.key.decoded) {
      if (code_bits(key.format) < 8) fill_levels(w.levels, key, p.kv_head);
      for (int i = 0; i < p.call.head_dim; i += VL) {
        store(b.k_channel + i, splat(1.0f));
        store(b.k_channel_bias + i, vf{});
      }
      for (int i = 0; i < BLOCK; i += VL) store(w.ones + i, splat(1.0f));
    }
    if (p.value.decoded) fill_levels(w.value_levels, value, p.kv_head);
  }

  void fill_channels() {
    const Block& b = part.block;
    if (!part.key.decoded || code_bits(part.key.t->format) == 8) return;
    for (int c = 0; c < part.call.head_dim; c++)
      for (int i = 0; i < LEVELS; i += VL) store(w.table[c] + i, load(w.levels + i) * b.k_channel[c] + b.k_channel_bias[c]);
  }

  void begin() {
    angles.start = -1;
    Part& p = part;
    const kvbits_store& store = *p.pages.store;
    const kvbits_tensor &key = *p.key.t, &value = *p.value.t;
    const int head_dim = p.call.head_dim;
    begin_decoding();
    base.begin();
    fill_channels();
    params_per_tile = store.page_size >= TILE ? round_up((int)((store.head_bytes - base.params) / (store.page_size / TILE)), 64) : 64;
    if (p.key.decoded) base.params_bytes = 0;
    else if (key.num_outliers || value.num_outliers) base.params_bytes = store.head_bytes - base.params;
    for (int i = 0; i < p.num_chunks; i++) {
      Chunk& c = p.chunks[i];
      if (key.num_outliers && !key.turns) BY_ROWS(c, query_columns, c, false, head_dim);
      c.value_outliers = value.num_outliers;
      if (c.value_outliers) __builtin_memset(c.acc_columns, 0, sizeof(float) * (c.rows <= 4 ? 4 : 8) * round_up(head_dim, 16));
    }
  }

  // Queries turned back to the page's start.
  void turn_queries(int64_t start) {
    const kvbits_store& store = *part.pages.store;
    const kvbits_tensor& key = *part.key.t;
    const int head_dim = part.call.head_dim;
    move_to(angles, key.inv_freq, start, store.page_size, head_dim / 2);
    for (int i = 0; i < part.num_chunks; i++) {
      Chunk& c = part.chunks[i];
      turn_back(c, angles, head_dim, c.folded);
      if (key.num_outliers) BY_ROWS(c, query_columns, c, true, head_dim);
    }
  }

  void begin_page(const PageView& at, int64_t start) {
    const kvbits_tensor& key = *part.key.t;
    if (key.turns) turn_queries(start);
    base.begin_page(at, start);
    if (part.key.page_channels || key.mean_offset >= 0) fill_channels();
  }

  void begin_block(const PageView& at, int token, int n) {
    const int page_size = part.pages.store->page_size;
    const Tensor &key = part.key, &value = part.value;
    base.begin_block(at, token, n);
    if (key.stretched) load_stretch(w, *key.t, at.page, token, n);
    if (value.stretched) token_factors(*value.t, at.page, token, n, part.block.v_scale[0]);
    find_runs(w, *key.t, *value.t, at.page, page_size, part.call.head_dim, token);
  }

  // What lies behind the coming page's codes, a part with every tile: a burst of fetches would wait for itself.
  void fetch_params(const PageView& at, int tile) const {
    const uint8_t* from = at.page + at.ahead + base.params + tile * params_per_tile;
    const uint8_t* end = at.page + at.ahead + part.pages.store->head_bytes;
    for (int i = 0; i < params_per_tile && from + i < end; i += 64) fetch(from + i);
  }

  void decoded_scores(Chunk& c, const PageView& at, int token, int n) {
    const Tensor& key = part.key;
    float* scores = part.block.s[0];
    const int head_dim = part.call.head_dim, bits = code_bits(key.t->format), first = token / TILE;
    const bool turned = key.t->turns, in_nibbles = has_nibbles(bits, key.row_bytes, head_dim);
    for (int tile = 0; tile * TILE < n; tile++) {
      const bool looks = looked_up(key, w, tile);
      if (at.ahead) fetch_params(at, first + tile);
      Nibbles codes = {{}, {key.row_bytes[0], key.row_bytes[1]}, bits, at.ahead};
      for (int i = 0; i < 2; i++) codes.src[i] = at.page + key.t->plane_offset[i] + (int64_t)(token + tile * TILE) * key.row_bytes[i];
      const KeySource from = !looks ? DECODED : in_nibbles ? NIBBLES : UNPACKED;
      if (from != NIBBLES) unpack_keys(key, at, w, token + tile * TILE);
      if (from == DECODED) decode_keys(key, part.block, w, tile);
      const float* turns = turned ? key.t->turns + (int64_t)(first + tile) * head_dim * TILE : nullptr;
      codebook_kernels.tile[from][turned].of[c.rows - 1](w, codes, turns, head_dim, turned ? c.folded[0] : c.q[0], scores + tile * TILE);
    }
  }

  void scores(Chunk& c, const PageView& at, int token, int n) {
    const kvbits_tensor& key = *part.key.t;
    const int head_dim = part.call.head_dim;
    if (part.key.decoded) decoded_scores(c, at, token, n);
    else plain_scores(part, c, at, token, n);
    if (!key.num_outliers) return;
    const float* turns = key.turns ? key.turns + (int64_t)(token / TILE) * head_dim * TILE : nullptr;
    BY_ROWS(c, add_key_outliers, c, part.block, w, outliers_of(key, at.page, part.pages.store->page_size, head_dim), turns, head_dim, token);
  }

  void outputs(Chunk& c, const PageView& at, int token, int n) {
    const kvbits_tensor& value = *part.value.t;
    const int head_dim = part.call.head_dim;
    const ValueArgs v = value_args(part, c, at, token, n);
    if (part.value.decoded) codebook_kernels.value.of[c.rows - 1](v, w, part.value.format);
    else plain_outputs(part.value, c, v);
    if (value.num_outliers)
      BY_ROWS(c, add_value_outliers, c, part.block, w, outliers_of(value, at.page, part.pages.store->page_size, head_dim), head_dim, token);
  }

  void end() {
    for (int i = 0; part.value.t->num_outliers && i < part.num_chunks; i++) {
      Chunk& c = part.chunks[i];
      BY_ROWS(c, fold_value_outliers, c, part.call.head_dim);
      c.value_outliers = false;
    }
  }
};

// A function of its own: inlined, it costs nuq4 5 %.
static __attribute__((noinline)) void attend_codebook_pages(CodebookPart& path, const Entries& entries) { attend_pages(path, entries); }

}  // namespace
