// Rows of a work item: queries in, outputs out.
#pragma once
#include "state.h"

namespace {

// Where a row of an item is in a call.
struct RowPlace {
  int64_t sequence;
  int token, head;
};

static RowPlace place_of(const kvbits_attend_call& call, const AttendItem& item, int row) {
  const int group = call.num_heads / call.num_kv_heads, each = item.num_rows / item.num_sequences;
  const int of_sequence = item.first_row + row % each;
  return {item.sequences[row / each], of_sequence / group, item.kv_head * group + of_sequence % group};
}

static void load_tile_rows(TileScratch& w, const kvbits_attend_call& call, const AttendItem& item, int number) {
  const int d = call.head_dim;
  const int left = item.num_rows - number * TILE_ROWS;
  QueryTile& tile = w.tile[number];
  tile.rows = left < 0 ? 0 : left < TILE_ROWS ? left : TILE_ROWS;
  tile.raised = false;
  tile.oldest = tile.rows ? INT64_MAX : -1, tile.newest = -1;
  float* q = w.q + (int64_t)number * TILE_ROWS * d;
  for (int h = 0; h < TILE_ROWS; h++) {
    tile.m[h] = LOWEST;
    tile.shrink[h] = 1.0f;
    if (h >= tile.rows) {  // sees what the first row sees, so that no mask is made for it
      __builtin_memset(q + h * d, 0, d * sizeof(float));
      tile.position[h] = tile.rows ? tile.position[0] : -1;
      store(tile.l[h], vf{});
      continue;
    }
    const RowPlace place = place_of(call, item, number * TILE_ROWS + h);
    const int64_t at =
        place.sequence * call.q_stride[0] + place.token * call.q_stride[1] + place.head * call.q_stride[2];
    widen(q + h * d, (const char*)call.q + at * dtype_bytes(call.q_dtype), d, call.q_dtype);
    vf none = {};  // 0, or NaN where a number of the query is not finite
    for (int i = 0; i < d; i += VL) none = none + load(q + h * d + i) * 0.0f;
    // Such a query answers NaN where it sees a token: its sum of weights starts as NaN, and it is read as zeros.
    const float start = sum(none);
    if (start != 0) __builtin_memset(q + h * d, 0, d * sizeof(float));
    store(tile.l[h], splat(start));
    tile.position[h] = call.q_positions[place.sequence * call.num_tokens + place.token];
    if (tile.position[h] < tile.oldest) tile.oldest = tile.position[h];
    if (tile.position[h] > tile.newest) tile.newest = tile.position[h];
  }
  rows_to_tiles<2>(q, d, d, w.q_terms + (int64_t)number * TERMS * TILE_ROWS * d, (int64_t)TILE_ROWS * d);
  __builtin_memset(w.acc + (int64_t)number * TILE_ROWS * call.value_head_dim, 0,
                   (size_t)TILE_ROWS * call.value_head_dim * sizeof(float));
}

static void copy_outputs(const float* acc, int h, int d, float* to) {
  for (int i = 0; i < d; i += VL) store(to + i, load(acc + i * TILE_ROWS + h * TILE_COLUMNS));
}

static void store_tile_rows(const TileScratch& w, const AttendPlan& plan, const AttendItem& item, int number) {
  const kvbits_attend_call& call = *plan.call;
  const int d = call.value_head_dim;
  const QueryTile& tile = w.tile[number];
  const float* acc = w.acc + (int64_t)number * TILE_ROWS * d;
  for (int h = 0; h < tile.rows; h++) {
    const float total = sum(load(tile.l[h])), m = tile.m[h];
    const bool seen = m > LOWEST;
    if (item.partial >= 0) {
      float* to = plan.partial + (item.partial + number * TILE_ROWS + h) * partial_stride(d);
      copy_outputs(acc, h, d, to);
      to[d] = seen ? m : -__builtin_inff();
      to[d + 1] = total;
      continue;
    }
    const RowPlace place = place_of(call, item, number * TILE_ROWS + h);
    const int64_t at = (place.sequence * call.num_tokens + place.token) * call.num_heads + place.head;
    float* to = call.out + at * d;
    copy_outputs(acc, h, d, to);
    const float inverse = seen ? 1.0f / total : 0.0f;
    for (int i = 0; i < d; i += VL) store(to + i, load(to + i) * inverse);
    call.lse[at] = seen ? (m + __builtin_log2f(total)) * 0.69314718056f : -__builtin_inff();
  }
}

}  // namespace
