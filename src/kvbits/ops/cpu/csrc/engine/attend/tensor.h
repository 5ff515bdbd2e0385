// How pages store keys or values, as their kernels see it, and the scales of a page or of some of its tokens.
#pragma once
#include <stdint.h>

#include "dots.h"
#include "dots_float.h"
#include "kvbits_cpu.h"
#include "state.h"

namespace {

// How the current part stores one tensor, for one kv head.
struct Tensor {
  const kvbits_tensor* t;
  int head_dim;
  int format;              // t->format
  bool raw, split;         // split: raw bf16 read in split order (dots_float.h)
  bool integer, channel_scales, page_channels;  // page_channels: per-channel scales that each page brings
  bool token_scales, token_bias;
  bool trellis;            // values of trellis codes, read by families/klt/values.h
  int groups, group_channels, row_bytes[2];
  float zero;      // middle of the code range
  float dot_zero;  // what of it the dot products leave to be settled
};

// A page that is read, and one that is fetched into L2 meanwhile.
struct PageView {
  const uint8_t* page;  // the head struct
  int64_t ahead;        // to that of the page to come
};

// Reordering q and the outputs pays from a few pages on.
constexpr int64_t MIN_SPLIT_PAGES = 4;

static Tensor describe(const kvbits_tensor& t, int head_dim, int64_t pages) {
  Tensor d = {};
  d.t = &t;
  d.head_dim = head_dim;
  d.raw = t.format == FORMAT_RAW;
  d.split = d.raw && t.raw_dtype == BFLOAT16 && head_dim % (2 * VL) == 0 && pages >= MIN_SPLIT_PAGES;
  d.format = t.format;
  d.integer = is_int(t.format);
  const bool is_static = t.static_scale != nullptr;
  d.channel_scales = !d.raw && (t.per_channel || is_static);
  d.page_channels = d.channel_scales && !is_static;
  d.token_scales = !d.raw && !d.channel_scales;
  d.token_bias = d.token_scales && t.bias_offset >= 0;
  d.group_channels = d.token_scales ? t.group_size : head_dim;
  d.groups = head_dim / d.group_channels;
  d.zero = is_int(t.format) ? int_zero(t.format) : 0.0f;
  d.dot_zero = is_wide(d.format) && DOTS_CENTER_INT8 ? 0.0f : d.zero;
  for (int i = 0; i < 2; i++) d.row_bytes[i] = d.raw ? 0 : row_bytes_of(head_dim, plane_bits(t.format, i));
  return d;
}

// What values' kernels take off `dot_zero` by themselves.
static Tensor as_values(Tensor d) {
  if (DOTS_CENTER_INT4_VALUES && !d.trellis && d.format == FORMAT_INT4) d.dot_zero -= int_zero(FORMAT_INT4);
  return d;
}

// Per-channel scale and bias (the bias around the middle of the code range; the mean is part of it).
// Returns whether there is any bias.
static bool channel_params(const Tensor& d, const uint8_t* page, int kv_head, int head_dim, float* scale, float* bias) {
  const kvbits_tensor& t = *d.t;
  bool any = false;
  if (d.channel_scales) {
    if (d.page_channels) widen(scale, page + t.scale_offset, head_dim, t.scale_dtype);
    else widen_as<FLOAT32>(scale, t.static_scale + (int64_t)kv_head * head_dim, head_dim);
    const bool page_bias = t.bias_offset >= 0;
    if (page_bias || t.static_bias) {
      if (page_bias) widen(bias, page + t.bias_offset, head_dim, t.scale_dtype);
      else widen_as<FLOAT32>(bias, t.static_bias + (int64_t)kv_head * head_dim, head_dim);
      for (int i = 0; i < head_dim; i += VL) store(bias + i, load(bias + i) + load(scale + i) * d.zero);
      any = true;
    }
  }
  if (t.mean_offset >= 0) {
    alignas(64) float mean[ROW_STRIDE];
    // beside 8-bit scales float16
    widen(any ? mean : bias, page + t.mean_offset, head_dim,
          t.scale_dtype == FLOAT8_E5M3 ? (int)FLOAT16 : t.scale_dtype);
    if (any)
      for (int i = 0; i < head_dim; i += VL) store(bias + i, load(bias + i) + load(mean + i));
    any = true;
  }
  return any;
}

// Parameters of `n` tokens, fp32. Lanes past n are 0: a page may hold anything there. The lines that follow in the page
// `ahead` bytes on are fetched: a missing line of scales stalls a page as long as a missing line of codes.
static void widen_params(float* to, const uint8_t* from, int n, int dtype, int64_t ahead) {
  const int bytes = n * dtype_bytes(dtype);
  for (int i = 0; i < bytes; i += 64) fetch(from + i + ahead);
  if (dtype == FLOAT16 && n == BLOCK) {
    for (int i = 0; i < BLOCK; i += VL) store(to + i, from_fp16((const uint16_t*)from + i));
    return;
  }
  widen(to, from, n, dtype);
  for (int i = round_up(n, VL); i < BLOCK; i += VL) store(to + i, vf{});
}

static void token_params(const Tensor& d, const uint8_t* page, int page_size, int token, int n, int64_t ahead,
                         float (*scale)[BLOCK], float (*bias)[BLOCK]) {
  const kvbits_tensor& t = *d.t;
  const int size = dtype_bytes(t.scale_dtype);
  for (int g = 0; g < d.groups; g++) {
    const int64_t at = ((int64_t)g * page_size + token) * size;
    widen_params(scale[g], page + t.scale_offset + at, n, t.scale_dtype, ahead);
    if (!d.token_bias) continue;
    widen_params(bias[g], page + t.bias_offset + at, n, t.scale_dtype, ahead);
    for (int i = 0; i < BLOCK; i += VL) store(bias[g] + i, load(bias[g] + i) + load(scale[g] + i) * d.zero);
  }
}

}  // namespace
