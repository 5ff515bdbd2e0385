// Pages to rows of numbers, in the decoding of the kernels that attend to them: keys a vector of tokens at a time,
// values a vector of channels.
#pragma once
#include <stdint.h>

#include "engine/close/stored_bits.h"
#include "engine/store.h"
#include "engine/unpack/plan.h"
#include "families/klt/unpack.h"
#include "families/plain/unpack.h"

namespace {

struct UnpackScratch {
  RowsScratch rows;
  KltRows klt;
};

// Keys or values of one kv head that become rows.
struct UnpackSide {
  const kvbits_store& store;
  Tensor tensor;
  bool is_key;
  int kv_head, dtype;
  uint8_t* to;
  int64_t row_bytes;  // from token to token
};

// Rows of n tokens from `token` on of a page that starts at `start`. Returns them, a row every `stride` numbers.
static const float* rows_of_block(const UnpackSide& side, const uint8_t* page, int64_t start, int token, int n,
                                  bool biases, UnpackScratch& w, int& stride) {
  const Tensor& t = side.tensor;
  RowsScratch& r = w.rows;
  stride = ROW_STRIDE;
  if (t.raw) {
    raw_rows(t, page, token, n, r);
    return r.rows[0];
  }
  if (t.token_scales) token_params(t, page, side.store.page_size, token, n, 0, r.scale, r.bias);
  if (side.is_key) {
    if (t.t->bands) klt_key_columns(w.klt.pieces, page, token, n, r);
    else plain_key_columns(t, page, token, n, r);
    columns_to_rows(r, t.head_dim, n);
  } else {
    const ValueArgs a = value_args_of(t, page, side.store.page_size, token, n);
    if (t.trellis) klt_value_rows(t, a, r);
    else plain_value_rows(t, a, r);
  }
  if (biases) add_to_rows(r, t.head_dim, n, [&](int) { return r.channel_bias; });
  return t.t->bands ? out_of_basis(w.klt, r, *t.t, side.kv_head, t.head_dim, start, token, n, stride) : r.rows[0];
}

static void write_rows(const UnpackSide& side, int64_t first, const float* rows, int stride, int n) {
  uint8_t* to = side.to + first * side.row_bytes;
  for (int i = 0; i < n; i++, to += side.row_bytes, rows += stride) {
    if (side.dtype == FLOAT32) write_row<FLOAT32>(to, rows, side.tensor.head_dim);
    else if (side.dtype == FLOAT16) write_row<FLOAT16>(to, rows, side.tensor.head_dim);
    else write_row<BFLOAT16>(to, rows, side.tensor.head_dim);
  }
}

static void unpack_entries(const kvbits_unpack_call& call, int kv_head, int64_t first, int64_t end, void* scratch) {
  UnpackScratch& w = *(UnpackScratch*)scratch;
  const kvbits_store& store = *call.store;
  for (int i = 0; i < 2; i++) {
    const kvbits_tensor& t = i ? store.value : store.key;
    const int head_dim = i ? call.value_head_dim : call.head_dim, size = dtype_bytes(call.dtype);
    const Tensor tensor = i && t.bands ? describe_trellis_values(t, head_dim, 0) : describe(t, head_dim, 0);
    const UnpackSide side = {store,      tensor,
                             i == 0,     kv_head,
                             call.dtype, (uint8_t*)call.to[i] + kv_head * call.stride[i][1] * size,
                             call.stride[i][0] * size};
    if (t.bands && !i) begin_keys(w.klt, w.rows, t, kv_head, head_dim);
    for (int64_t e = first; e < end; e++) {
      const uint8_t* page = page_address(&store, call.page_ids[e]) + kv_head * store.head_bytes;
      const int tokens = call.rows[2 * e + 1];
      const bool biases =
          !tensor.raw && channel_params(tensor, page, kv_head, head_dim, w.rows.channel, w.rows.channel_bias);
      for (int token = 0; token < tokens; token += BLOCK) {
        const int n = tokens - token < BLOCK ? tokens - token : BLOCK;
        int stride;
        const float* rows = rows_of_block(side, page, call.starts[e], token, n, biases, w, stride);
        write_rows(side, call.rows[2 * e] + token, rows, stride, n);
      }
    }
  }
}

}  // namespace
