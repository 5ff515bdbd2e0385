// Attention over disjoint sets of keys becomes attention over their union, row by row: src/kvbits/ops/reference/merge.py.
// Numbers of a row are weighed in fp32 and rounded once.
#pragma once
#include <math.h>
#include <stdint.h>

#include "engine/close/stored_bits.h"
#include "engine/merge/plan.h"
#include "engine/store.h"
#include "engine/vec/vec.h"

namespace {

// Where a row lies: a head of a token of a sequence.
struct MergePlace {
  int64_t sequence, token, head;

  int64_t in(const int64_t (&stride)[3]) const { return sequence * stride[0] + token * stride[1] + head * stride[2]; }
};

// The share of each part in a row, 0 of a part without keys. Returns the row's log-sum-exp.
INLINE float weights_of(const kvbits_merge_call& call, const MergePlace& at, float* weights) {
  float top = -INFINITY, total = 0.0f;
  for (int p = 0; p < call.num_parts; p++) {
    weights[p] = call.parts[p].lse[at.in(call.parts[p].lse_stride)];
    top = weights[p] > top ? weights[p] : top;
  }
  for (int p = 0; p < call.num_parts; p++) {
    weights[p] = weights[p] == -INFINITY ? 0.0f : expf(weights[p] - top);
    total += weights[p];
  }
  if (total == 0.0f) return -INFINITY;
  for (int p = 0; p < call.num_parts; p++) weights[p] /= total;
  return top + logf(total);
}

static void merge_rows(const kvbits_merge_call& call, int64_t first, int64_t end) {
  alignas(64) float row[MAX_HEAD_DIM + 16], part[MAX_HEAD_DIM + 16];
  float weights[MAX_MERGED];
  const int n = call.head_dim, size = dtype_bytes(call.dtype);
  for (int64_t i = first; i < end; i++) {
    const int64_t token = i / call.num_heads;
    const MergePlace at = {token / call.num_tokens, token % call.num_tokens, i % call.num_heads};
    call.lse[i] = weights_of(call, at, weights);
    for (int c = 0; c < n; c += VL) store(row + c, vf{});
    for (int p = 0; p < call.num_parts; p++) {
      if (weights[p] == 0.0f) continue;
      const kvbits_partial& from = call.parts[p];
      const int dtype = (int)from.dtype;
      widen(part, (const char*)from.out + at.in(from.out_stride) * dtype_bytes(dtype), n, dtype);
      for (int c = 0; c < n; c += VL) store(row + c, load(row + c) + load(part + c) * weights[p]);
    }
    uint8_t* to = (uint8_t*)call.out + at.in(call.out_stride) * size;
    if (call.dtype == FLOAT32) write_row<FLOAT32>(to, row, n);
    else if (call.dtype == FLOAT16) write_row<FLOAT16>(to, row, n);
    else write_row<BFLOAT16>(to, row, n);
  }
}

}  // namespace
