// Tokens of one kv head to scales, codes and stored bytes, in one pass over their raw rows: all tokens of a page that
// closes, or some of a token-local page, whose bytes are their own. The definition is src/kvbits/quant/qparams.py and
// packing.py; scales and integer codes match it bit for bit, so this is compiled without fused multiply-add (x * (1 /
// scale) must be rounded before it is rounded to a code).
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"
#include "engine/close/plan.h"
#include "engine/close/planes.h"
#include "families/klt/codes.h"
#include "families/plain/codes.h"
#include "families/plain/params.h"
#include "kvbits_cpu.h"

namespace {

// Scales, biases and means, chosen and stored or given. False when one overflows.
static __attribute__((noinline)) bool params_of(PageBuffers& b, const TokensPart& part, int groups, bool by_token) {
  const kvbits_tensor& t = *part.tensor;
  if (t.static_scale) {
    load_static_params(b, t, part.kv_head, part.head_dim);
    return true;
  }
  if (t.scale_dtype == FLOAT32) return make_params<FLOAT32>(b, part, groups, by_token);
  if (t.scale_dtype == FLOAT16) return make_params<FLOAT16>(b, part, groups, by_token);
  return make_params<BFLOAT16>(b, part, groups, by_token);
}

static void store_tokens(const TokensPart& part, void* scratch, CloseResult& result) {
  const kvbits_tensor& t = *part.tensor;
  const int n = part.count, head_dim = part.head_dim;
  PageBuffers b;
  carve(b, (char*)scratch, part.page_size, head_dim);
  if (!load_rows(b, part.source, part.dtype, part.token_stride, n, head_dim)) {
    result.nonfinite = true;
    return;
  }
  if (t.format == FORMAT_RAW) {
    uint8_t* to = part.head + t.plane_offset[0] + (int64_t)part.slot * head_dim * (t.raw_dtype == FLOAT32 ? 4 : 2);
    return store_raw_rows(b, to, t.raw_dtype, n, head_dim);
  }
  if (t.bands) {
    result.overflow = !store_trellis(b, part);
    return;
  }
  const bool by_token = !t.per_channel && !t.static_scale, has_bias = t.bias_offset >= 0 || t.static_bias;
  const int groups = by_token ? head_dim / t.group_size : 1;
  if (!params_of(b, part, groups, by_token)) {
    result.overflow = true;
    return;
  }
  result.saturated = codes_of_format(b, t, n, head_dim, groups, by_token, has_bias);
  const Slots slots = {part.is_key, part.page_size, part.slot, n};
  int shift = code_bits(t.format);
  for (int plane = 0; plane < num_planes(t.format); plane++) {  // the highest bits first
    const int bits = plane_bits(t.format, plane);
    shift -= bits;
    store_plane(b, slots, head_dim, part.head + t.plane_offset[plane], bits, shift);
  }
}

}  // namespace
