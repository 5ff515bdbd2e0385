// Tokens that are quantized as they come, into slots of a token-local page. A token's bytes are its own: what closing does with the tokens of a page is done
// with some of them, then put where they belong.
#pragma once
#include <stdint.h>

#include "codes.h"
#include "engine/close/page_buffers.h"
#include "engine/close/plan.h"
#include "engine/close/planes.h"
#include "kvbits_cpu.h"
#include "params.h"

namespace {

// Scales (and biases) of tokens, chosen and put into the page.
template <int DTYPE>
static bool store_params(PageBuffers& b, const TokensPart& part, int groups) {
  const kvbits_tensor& t = *part.tensor;
  const int size = DTYPE == FLOAT32 ? 4 : 2, n = part.count, width = padded_width(part.head_dim);
  if (t.mean_offset >= 0) {
    for (int c = 0; c < part.head_dim; c++) {
      const uint8_t* from = part.head + t.mean_offset + c * size;
      int32_t bits = 0;
      __builtin_memcpy(&bits, from, size);
      b.mean[c] = from_bits<DTYPE>(splat_int(bits))[0];
    }
    for (int i = 0; i < n; i++)
      for (int c = 0; c < part.head_dim; c++) b.x[(int64_t)i * width + c] -= b.mean[c];
  }
  range_by_token(b, n, part.head_dim, groups);
  uint8_t *scale = b.more_params[0], *bias = t.bias_offset >= 0 ? b.more_params[1] : nullptr;
  const bool ok = choose_params<DTYPE>(b, groups * n, q_max_of(t), scale, bias);
  for (int g = 0; g < groups; g++) {
    const int64_t to = ((int64_t)g * part.page_size + part.slot) * size, from = (int64_t)g * n * size;
    __builtin_memcpy(part.head + t.scale_offset + to, scale + from, (size_t)n * size);
    if (bias) __builtin_memcpy(part.head + t.bias_offset + to, bias + from, (size_t)n * size);
  }
  return ok;
}

static bool params_of_tokens(PageBuffers& b, const TokensPart& part, int groups) {
  const kvbits_tensor& t = *part.tensor;
  if (t.static_scale) {
    load_static_params(b, t, part.kv_head, part.head_dim);
    return true;
  }
  if (t.scale_dtype == FLOAT32) return store_params<FLOAT32>(b, part, groups);
  if (t.scale_dtype == FLOAT16) return store_params<FLOAT16>(b, part, groups);
  return store_params<BFLOAT16>(b, part, groups);
}

// Tokens from their rows.
static void store_plain(PageBuffers& b, const TokensPart& part, CloseResult& result) {
  const kvbits_tensor& t = *part.tensor;
  const int n = part.count, head_dim = part.head_dim;
  if (t.format == FORMAT_RAW) {
    uint8_t* to = part.head + t.plane_offset[0] + (int64_t)part.slot * head_dim * (t.raw_dtype == FLOAT32 ? 4 : 2);
    return store_raw_rows(b, to, t.raw_dtype, n, head_dim);
  }
  const bool by_token = !t.static_scale, has_bias = t.bias_offset >= 0 || t.static_bias;
  const int groups = by_token ? head_dim / t.group_size : 1;
  if (!params_of_tokens(b, part, groups)) {
    result.overflow = true;
    return;
  }
  result.saturated = codes_of_format(b, t, n, head_dim, groups, by_token, has_bias);
  int shift = code_bits(t.format);
  for (int plane = 0; plane < num_planes(t.format); plane++) {
    const int bits = plane_bits(t.format, plane);
    shift -= bits;
    store_plane(b, {part.is_key, part.page_size, part.slot, n}, head_dim, part.head + t.plane_offset[plane], bits, shift);
  }
}

}  // namespace
