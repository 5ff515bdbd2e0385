// Rows of a work item: queries in, outputs out.
#pragma once
#include <stdint.h>

#include "engine/store.h"
#include "kvbits_cpu.h"
#include "part.h"
#include "plan.h"

namespace {

static void load_rows(Chunk& c, const kvbits_attend_call& call, const AttendItem& item, int first, int rows) {
  const int group = call.num_heads / call.num_kv_heads;
  const int64_t b = item.sequence;
  c.rows = rows;
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
    }
    for (int i = 0; i < round_up(call.value_head_dim, VL); i += VL) store(c.acc[h] + i, vf{});
    // Such a query answers NaN where it sees a token: its sum of weights starts as NaN, and codes are made of zeros
    // instead.
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
  const int group = call.num_heads / call.num_kv_heads, head_dim = call.value_head_dim;
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
    for (int h = 0; h < p.chunks[i].rows; h++) split_order(p.chunks[i].acc[h], p.call.value_head_dim, back);
}

static const uint8_t* first_page(const kvbits_attend_call& call, const AttendItem& item) {
  int64_t flat = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& table = *call.parts[p].table;
    const int64_t begin = table.indptr[item.sequence], n = table.indptr[item.sequence + 1] - begin;
    if (item.first_entry < flat + n)
      return page_address(call.parts[p].store, table.page_ids[begin + item.first_entry - flat]) +
             item.kv_head * call.parts[p].store->head_bytes;
    flat += n;
  }
  return nullptr;
}

}  // namespace
