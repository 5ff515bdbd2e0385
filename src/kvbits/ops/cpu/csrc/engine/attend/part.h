// What attention to parts of all families shares: the walk over pages and blocks of tokens, and the steps from scores
// to outputs. The part.h of each family says what a page and a block bring.
#pragma once
#include <stdint.h>

#include "engine/store.h"
#include "kvbits_cpu.h"
#include "plan.h"
#include "softmax.h"
#include "state.h"
#include "tensor.h"

namespace {

// Pages of one format, for one kv head, and the rows that attend to them.
struct Part {
  const kvbits_attend_call& call;
  const kvbits_part& pages;
  int kv_head, num_chunks;
  Tensor key, value;
  Chunk* chunks;
  Block& block;
  bool value_bias;  // of the current page, per channel
  bool in_basis;    // keys' means are in a basis, as the queries in `folded` are
  LevelBlock* levels;  // of the current block, where all chunks share them, or null
};

// Entries of the page table that an item reads of the part.
struct Entries {
  int64_t first, end;
  const uint8_t* after;  // the page that the thread reads afterwards, or null
};

// From scores to what the value kernel multiplies with.
static void weigh_chunk(Chunk& c, Block& b, const Tensor& value, bool value_bias) {
  if (!value.integer) softmax_rows<5>(c, b);
  else if (is_wide(value.format)) softmax_rows<4>(c, b);
  else softmax_rows<3>(c, b);
  if (value_bias) sum_probabilities(c, b);
  if (!value.integer) {
    if (value.token_bias) add_token_biases(c, b, value.groups);
    scale_probabilities(c, b, value.groups, value.token_scales);
  } else if (is_wide(value.format)) {
    if (value.token_scales) quantize_probabilities<true, true>(c, b, value.groups, value.token_bias, value.dot_zero);
    else quantize_probabilities<true, false>(c, b, 1, false, value.dot_zero);
  } else {
    if (value.token_scales) quantize_probabilities<false, true>(c, b, value.groups, value.token_bias, value.dot_zero);
    else quantize_probabilities<false, false>(c, b, 1, false, value.dot_zero);
  }
}

static void fetch_range(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) fetch(p + i);
}

// Where the scales and biases of a head struct begin.
static int64_t first_param(const kvbits_store& store) {
  int64_t first = store.head_bytes;
  for (int side = 0; side < 2; side++) {
    const kvbits_tensor& t = side ? store.value : store.key;
    if (t.scale_offset >= 0 && t.scale_offset < first) first = t.scale_offset;
    if (t.mean_offset >= 0 && t.mean_offset < first) first = t.mean_offset;
  }
  return first;
}

// Which of the block's n tokens, from `position` on, each row sees. False when no row sees any.
static bool visible_tokens(const Chunk& c, int64_t window, int64_t position, int n, int* first, int* end) {
  bool any = false;
  for (int h = 0; h < c.rows; h++) {
    const int64_t q = c.position[h];
    const int64_t lo = window ? q - window + 1 - position : 0, hi = q + 1 - position;
    first[h] = lo < 0 ? 0 : lo > n ? n : (int)lo;
    end[h] = hi < 0 ? 0 : hi > n ? n : (int)hi;
    any |= first[h] < end[h];
  }
  return any;
}

// What channels' zero points and biases add to the outputs.
static void settle_channels(const Part& p, Chunk& c) {
  const Block& b = p.block;
  const int head_dim = p.call.value_head_dim;
  if (p.value.channel_scales && p.value.integer)
    for (int h = 0; h < c.rows; h++)
      for (int i = 0; i < head_dim; i += VL)
        store(c.acc[h] + i, load(c.acc[h] + i) + load(b.v_channel + i) * b.p_zero[h]);
  if (p.value_bias)
    for (int h = 0; h < c.rows; h++)
      for (int i = 0; i < head_dim; i += VL)
        store(c.acc[h] + i, load(c.acc[h] + i) + load(b.v_channel_bias + i) * b.p_sum[h]);
}

// One block of tokens for one chunk of rows.
template <class Path>
static void attend_block(Path& path, Chunk& c, const PageView& at, int token, int n, int64_t position) {
  const Part& p = path.part;
  Block& b = p.block;
  int first[ROWS], end[ROWS];
  if (!visible_tokens(c, p.call.sliding_window, position, n, first, end)) return;
  path.scores(c, at, token, n);
  mask_scores(c, b, first, end, p.call.softcap, p.call.value_head_dim, p.value.token_scales ? p.value.groups : 0);
  weigh_chunk(c, b, p.value, p.value_bias);
  path.outputs(c, at, token, n);
  settle_channels(p, c);
}

// Settles what the groups' channels share, at the end of a part.
static void fold_corrections(Chunk& c, const Tensor& value) {
  for (int g = 0; g < value.groups; g++)
    for (int h = 0; h < c.rows; h++) {
      const float add = sum(load(c.corr[g][h]));
      for (int i = 0; i < value.group_channels; i++) c.acc[h][g * value.group_channels + i] += add;
    }
}

// Pages small enough to be over before the next one has come from memory are fetched several ahead.
constexpr int64_t FETCH_AHEAD_BYTES = 8192;

// Oldest and newest position of the rows that are no padding.
static void row_positions(const Part& p, int64_t& oldest, int64_t& newest) {
  newest = -1, oldest = INT64_MAX;
  for (int i = 0; i < p.num_chunks; i++)
    for (int h = 0; h < p.chunks[i].rows; h++) {
      const int64_t q = p.chunks[i].position[h];
      if (q < 0) continue;
      if (q > newest) newest = q;
      if (q < oldest) oldest = q;
    }
}

// All visible pages of a part. `path` brings its `part`, begin_page, begin_block, scores and outputs. Inlined: a call a
// part costs kivi4 and klt4 5 %.
template <class Path>
INLINE void attend_pages(Path& path, const Entries& entries) {
  const Part& p = path.part;
  const kvbits_store& store = *p.pages.store;
  const kvbits_table& table = *p.pages.table;
  auto page_of = [&](int64_t e) { return page_address(&store, table.page_ids[e]) + p.kv_head * store.head_bytes; };
  const int64_t lookahead =
      store.head_bytes >= FETCH_AHEAD_BYTES ? 1 : (FETCH_AHEAD_BYTES + store.head_bytes - 1) / store.head_bytes;
  const int64_t window = p.call.sliding_window;
  int64_t oldest, newest;
  row_positions(p, oldest, newest);
  for (int64_t e = entries.first; e < entries.end; e++) {
    const int64_t start = table.starts[e];
    const int length = table.lengths[e];
    if (start > newest || (window && start + length <= oldest - window + 1)) continue;
    const uint8_t* page = page_of(e);
    const uint8_t* coming = e + lookahead < entries.end ? page_of(e + lookahead) : entries.after ? entries.after : page;
    const PageView at = {page, coming - page};
    path.begin_page(at, start);
    for (int token = 0; token < length; token += BLOCK) {
      const int n = length - token < BLOCK ? length - token : BLOCK;
      path.begin_block(at, token, n);
      PageView of_chunk = at;
      for (int i = 0; i < p.num_chunks; i++) {
        attend_block(path, p.chunks[i], of_chunk, token, n, start + token);
        of_chunk.ahead = 0;  // only the first chunk fetches ahead: the others read the same bytes again
      }
    }
  }
  if (p.value.token_scales && (p.value.integer || p.value.token_bias))
    for (int i = 0; i < p.num_chunks; i++) fold_corrections(p.chunks[i], p.value);
}

}  // namespace
