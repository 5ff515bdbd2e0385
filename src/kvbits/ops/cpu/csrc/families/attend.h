// One work item: the rows of one kv head over a range of pages, part by part.
#pragma once
#include <stdint.h>

#include "engine/attend/part.h"
#include "engine/attend/plan.h"
#include "engine/store.h"
#include "families/codebook/part.h"
#include "families/klt/hadamard.h"
#include "families/plain/part.h"
#include "kvbits_cpu.h"

namespace {

struct Scratch {
  Block block;
  Angles angles;
  BandPieces pieces;
  Decoded decoded;
  KeyPairs pairs;
  Chunk chunks[ITEM_ROWS / ROWS];
};

static void load_rows(Chunk& c, const kvbits_attend_call& call, const AttendItem& item, int first, int rows) {
  const int group = call.num_heads / call.num_kv_heads;
  const int64_t b = item.sequence;
  c.rows = rows;
  c.value_outliers = false;
  for (int i = 0; i < ROW_LANES; i += VL) store(c.m + i, splat(LOWEST));
  // A cap needs the score in natural units; otherwise log2(e) is folded in and softmax is a plain 2^x.
  const float factor = call.softcap > 0 ? call.scaling : call.scaling * 1.44269504089f;
  for (int h = 0; h < rows; h++) {
    const int row = item.first_row + first + h, token = row / group, head = item.kv_head * group + row % group;
    const int64_t at = b * call.q_stride[0] + token * call.q_stride[1] + head * call.q_stride[2];
    widen(c.q[h], (const char*)call.q + at * dtype_bytes(call.q_dtype), call.head_dim, call.q_dtype);
    const int padded = round_up(call.head_dim, VL);
    vf none = {};  // 0, or NaN where a number of the query is not finite
    for (int i = 0; i < padded; i += VL) {
      const vf x = load(c.q[h] + i);
      none = none + x * 0.0f;
      store(c.q[h] + i, x * factor);
      store(c.acc[h] + i, vf{});
    }
    // Such a query answers NaN where it sees a token: its sum of weights starts as NaN, and codes are made of zeros instead.
    const float start = sum(none);
    if (start != 0)
      for (int i = 0; i < padded; i += VL) store(c.q[h] + i, vf{});
    store(c.l[h], splat(start));
    c.position[h] = call.q_positions[b * call.num_tokens + token];
    c.out_row[h] = (int64_t)token * call.num_heads + head;
  }
}

static void store_rows(Chunk& c, const AttendPlan& plan, const AttendItem& item, int first) {
  const kvbits_attend_call& call = *plan.call;
  const int group = call.num_heads / call.num_kv_heads, head_dim = call.head_dim;
  for (int h = 0; h < c.rows; h++) {
    const float total = sum(load(c.l[h]));
    if (item.partial >= 0) {
      float* to = plan.partial + (item.partial + first + h) * partial_stride(head_dim);
      __builtin_memcpy(to, c.acc[h], head_dim * 4);
      to[head_dim] = c.m[h] > LOWEST ? c.m[h] : -__builtin_inff();
      to[head_dim + 1] = total;
      continue;
    }
    const int row = item.first_row + first + h, token = row / group, head = item.kv_head * group + row % group;
    const int64_t at = ((int64_t)item.sequence * call.num_tokens + token) * call.num_heads + head;
    const bool seen = c.m[h] > LOWEST;
    const float inverse = seen ? 1.0f / total : 0.0f;
    for (int i = 0; i < head_dim; i++) call.out[at * head_dim + i] = c.acc[h][i] * inverse;
    call.lse[at] = seen ? (c.m[h] + __builtin_log2f(total)) * 0.69314718056f : -__builtin_inff();
  }
}

static void reorder_outputs(Part& p, bool back) {
  for (int i = 0; i < p.num_chunks; i++)
    for (int h = 0; h < p.chunks[i].rows; h++) split_order(p.chunks[i].acc[h], p.call.head_dim, back);
}

// Outputs to the basis of the part's values, and out of it again: the matrix is its own inverse.
static void turn_outputs(Part& p) {
  for (int i = 0; i < p.num_chunks; i++)
    for (int h = 0; h < p.chunks[i].rows; h++) hadamard(p.chunks[i].acc[h], p.call.head_dim);
}

static const uint8_t* first_page(const kvbits_attend_call& call, const AttendItem& item) {
  int64_t flat = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& table = *call.parts[p].table;
    const int64_t begin = table.indptr[item.sequence], n = table.indptr[item.sequence + 1] - begin;
    if (item.first_entry < flat + n)
      return page_address(call.parts[p].store, table.page_ids[begin + item.first_entry - flat]) + item.kv_head * call.parts[p].store->head_bytes;
    flat += n;
  }
  return nullptr;
}

static void attend_part(Part& part, const Entries& entries, Scratch& w) {
  if (part.value.split) reorder_outputs(part, false);
  if (part.value.t->hadamard) turn_outputs(part);
  if (part.key.banded) list_pieces(part.pieces, *part.key.t, part.call.head_dim);
  part.angles.start = part.frame = -1;
  part.frames = part.angles.frames.pairs = 0;
  part.last_start = part.pages.table->starts[entries.end - 1];
  if (adds_to_plain(part.key) || adds_to_plain(part.value)) attend_codebook_part(part, entries, w.decoded, w.pairs);
  else attend_plain_part(part, entries);
  if (part.value.t->hadamard) turn_outputs(part);
  if (part.value.split) reorder_outputs(part, true);
}

static void attend_item(const AttendPlan* plan, const AttendItem* item, const AttendItem* next, void* scratch) {
  const kvbits_attend_call& call = *plan->call;
  Scratch& w = *(Scratch*)scratch;
  const int chunks = (item->num_rows + ROWS - 1) / ROWS, per_chunk = (item->num_rows + chunks - 1) / chunks;
  for (int i = 0; i < chunks; i++) {
    const int first = i * per_chunk, left = item->num_rows - first;
    load_rows(w.chunks[i], call, *item, first, left < per_chunk ? left : per_chunk);
  }
  const uint8_t* after = next ? first_page(call, *next) : nullptr;
  float* page_lse = call.page_lse;
  int64_t flat = 0;
  for (int i = 0; i < call.num_parts; i++) {
    const kvbits_part& pages = call.parts[i];
    const kvbits_table& table = *pages.table;
    const int64_t begin = table.indptr[item->sequence], n = table.indptr[item->sequence + 1] - begin;
    const int64_t lo = item->first_entry > flat ? item->first_entry - flat : 0;
    const int64_t hi = item->end_entry - flat < n ? item->end_entry - flat : n;
    flat += n;
    if (lo < hi) {
      const kvbits_store &store = *pages.store, *low = pages.low;
      Part part = {call, pages, item->kv_head, chunks, describe(store.key, low ? &low->key : nullptr, call.head_dim, hi - lo),
                   describe_values(store.value, low ? &low->value : nullptr, call.head_dim, hi - lo), w.chunks, w.block, w.angles, w.pieces, -1, 0, 0, 0, false};
      attend_part(part, {begin + lo, begin + hi, after, page_lse}, w);
    }
    if (page_lse) page_lse += table.num_entries * call.num_tokens * call.num_heads;
  }
  for (int i = 0; i < chunks; i++) store_rows(w.chunks[i], *plan, *item, i * per_chunk);
}

}  // namespace
