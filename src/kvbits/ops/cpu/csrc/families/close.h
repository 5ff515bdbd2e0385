// close_pages of one tier: one kv head's raw page to scales, codes and stored bytes, in one pass over the raw page.
// The definition is src/kvbits/quant/qparams.py and packing.py; scales and integer codes match it bit for bit, so this
// is compiled without fused multiply-add (x * (1 / scale) must be rounded before it is rounded to a code).
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"
#include "engine/close/plan.h"
#include "engine/close/planes.h"
#include "families/klt/codes.h"
#include "families/plain/codes.h"
#include "families/plain/params.h"
#include "families/plain/store_tokens.h"
#include "kvbits_cpu.h"

namespace {

template <int DTYPE>
static bool make_params(PageBuffers& b, const kvbits_tensor& t, uint8_t* head, int page_size, int head_dim, int groups, bool by_token) {
  bool ok = true;
  uint8_t* bias = t.bias_offset >= 0 ? head + t.bias_offset : nullptr;
  if (t.mean_offset >= 0) ok = subtract_mean<DTYPE>(b, head + t.mean_offset, page_size, head_dim);
  if (by_token) range_by_token(b, page_size, head_dim, groups);
  else range_by_channel(b, page_size, head_dim);
  return choose_params<DTYPE>(b, by_token ? groups * page_size : head_dim, q_max_of(t), head + t.scale_offset, bias) && ok;
}

// Scales, biases and means, chosen and stored or given. False when one overflows.
static bool params_of_page(PageBuffers& b, const ClosePart& part, int groups, bool by_token) {
  const kvbits_tensor& t = *part.tensor;
  if (t.static_scale) {
    load_static_params(b, t, part.kv_head, part.head_dim);
    return true;
  }
  if (t.scale_dtype == FLOAT32) return make_params<FLOAT32>(b, t, part.head, part.page_size, part.head_dim, groups, by_token);
  if (t.scale_dtype == FLOAT16) return make_params<FLOAT16>(b, t, part.head, part.page_size, part.head_dim, groups, by_token);
  return make_params<BFLOAT16>(b, t, part.head, part.page_size, part.head_dim, groups, by_token);
}

static Slots slots_of(const ClosePart& part) { return {part.is_key, part.page_size, 0, part.page_size}; }

// The planes of the codes, the highest bits first.
static void store_codes_of_page(PageBuffers& b, const ClosePart& part) {
  const kvbits_tensor& t = *part.tensor;
  int shift = code_bits(t.format);
  for (int plane = 0; plane < num_planes(t.format); plane++) {
    const int bits = plane_bits(t.format, plane);
    shift -= bits;
    store_plane(b, slots_of(part), part.head_dim, part.head + t.plane_offset[plane], bits, shift);
  }
}

static void close_item(const ClosePart& part, void* scratch, CloseResult& result) {
  const kvbits_tensor& t = *part.tensor;
  const int page_size = part.page_size, head_dim = part.head_dim;
  PageBuffers b;
  carve(b, (char*)scratch, page_size, head_dim);
  if (!load_rows(b, part.source, part.dtype, part.token_stride, page_size, head_dim)) {
    result.nonfinite = true;
    return;
  }
  if (t.format == FORMAT_RAW) return store_raw_rows(b, part.head + t.plane_offset[0], t.raw_dtype, page_size, head_dim);
  if (t.bands) {
    result.overflow = !store_banded(b, {part.tensor, part.is_key, part.kv_head, page_size, head_dim, part.dtype, 0, page_size, part.source, part.token_stride,
                                        part.turn_start, part.start, part.head});
    return;
  }
  const bool by_token = !t.per_channel && !t.static_scale, has_bias = t.bias_offset >= 0 || t.static_bias;
  const int groups = by_token ? head_dim / t.group_size : 1;
  if (!params_of_page(b, part, groups, by_token)) {
    result.overflow = true;
    return;
  }
  result.saturated = codes_of_format(b, t, page_size, head_dim, groups, by_token, has_bias);
  store_codes_of_page(b, part);
  if (!part.low) return;
  const int bits = code_bits(part.low->format);
  low_codes_of_format(b, t, page_size, head_dim, groups, by_token, has_bias, bits);
  store_plane(b, slots_of(part), head_dim, part.low_head + part.low->plane_offset[0], bits, 0);
}

static void store_item(const TokensPart& part, void* scratch, CloseResult& result) {
  PageBuffers b;
  carve(b, (char*)scratch, part.page_size, part.head_dim);
  if (!load_rows(b, part.source, part.dtype, part.token_stride, part.count, part.head_dim)) result.nonfinite = true;
  else if (part.tensor->bands) result.overflow = !store_banded(b, part);
  else store_plain(b, part, result);
}

}  // namespace
