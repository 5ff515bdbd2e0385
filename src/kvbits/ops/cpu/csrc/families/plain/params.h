// From raw rows to the scales, biases and means of their groups, as src/kvbits/quant/qparams.py chooses them.
#pragma once
#include <stdint.h>

#include "codes.h"
#include "engine/close/page_buffers.h"
#include "engine/close/plan.h"
#include "engine/close/stored_bits.h"

namespace {

// Raw rows to fp32, zero behind head_dim. False when an element is NaN or infinite.
template <int DTYPE>
static bool load_page(PageBuffers& b, const void* source, int64_t stride, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  vi top = vi{};
  for (int t = 0; t < page_size; t++) {
    float* to = b.x + (int64_t)t * width;
    for (int i = 0; i < head_dim; i += VL) {
      const vf x = i + VL <= head_dim ? load_as<DTYPE>(source, t * stride + i)
                                      : load_first<DTYPE>(source, t * stride + i, head_dim - i);
      store(to + i, x);
      const vi mag = (vi)x & 0x7fffffff;
      top = (mag > top ? mag : top);
    }
  }
  return all_finite((vf)top);
}

// Raw rows of any dtype.
static bool load_rows(PageBuffers& b, const void* source, int dtype, int64_t stride, int count, int head_dim) {
  if (dtype == FLOAT32) return load_page<FLOAT32>(b, source, stride, count, head_dim);
  if (dtype == FLOAT16) return load_page<FLOAT16>(b, source, stride, count, head_dim);
  return load_page<BFLOAT16>(b, source, stride, count, head_dim);
}

template <int DTYPE>
static bool subtract_mean(PageBuffers& b, uint8_t* stored, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  typedef double vd __attribute__((vector_size(VL * 8)));
  bool ok = true;
  for (int c = 0; c < head_dim; c += VL) {
    vd total = vd{};
    for (int t = 0; t < page_size; t++) total += __builtin_convertvector(load(b.x + (int64_t)t * width + c), vd);
    const vi bits = to_bits<DTYPE>(__builtin_convertvector(total / (double)page_size, vf));
    const vf mean = from_bits<DTYPE>(bits);
    ok &= all_finite(mean);
    const int n = head_dim - c < VL ? head_dim - c : VL;
    store_bits<DTYPE>(stored, c, bits, n);
    store(b.mean + c, mean);
    for (int t = 0; t < page_size; t++) {
      float* x = b.x + (int64_t)t * width + c;
      store(x, load(x) - mean);
    }
  }
  return ok;
}

// Smallest and largest element of every group, [groups][page_size].
static void range_by_token(PageBuffers& b, int page_size, int head_dim, int groups) {
  const int width = padded_width(head_dim), size = head_dim / groups;
  for (int t = 0; t < page_size; t++)
    for (int g = 0; g < groups; g++) {
      const float* x = b.x + (int64_t)t * width + g * size;
      float low = x[0], high = x[0];
      int i = 0;
      if (size >= VL) {
        vf lo = load(x), hi = lo;
        for (i = VL; i + VL <= size; i += VL) {
          lo = vmin(lo, load(x + i));
          hi = vmax(hi, load(x + i));
        }
        low = -max_of(-lo);
        high = max_of(hi);
      }
      for (; i < size; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
      }
      b.low[g * page_size + t] = low;
      b.high[g * page_size + t] = high;
    }
}

static void range_by_channel(PageBuffers& b, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  for (int c = 0; c < head_dim; c += VL) {
    vf lo = load(b.x + c), hi = lo;
    for (int t = 1; t < page_size; t++) {
      const vf x = load(b.x + (int64_t)t * width + c);
      lo = vmin(lo, x);
      hi = vmax(hi, x);
    }
    store(b.low + c, lo);
    store(b.high + c, hi);
  }
}

// n scales (and biases) from the ranges, stored, and kept as scale, 1 / scale and bias. False on overflow.
template <int DTYPE>
static bool choose_params(PageBuffers& b, int n, float q_max, uint8_t* scale_to, uint8_t* bias_to) {
  bool ok = true;
  for (int i = 0; i < n; i += VL) {
    const int m = n - i < VL ? n - i : VL;
    const vf low = load(b.low + i), high = load(b.high + i);
    vf spread = vmax(-low, high);
    if (bias_to) {
      const vi bits = bits_below<DTYPE>(low);
      const vf bias = from_bits<DTYPE>(bits);
      store_bits<DTYPE>(bias_to, i, bits, m);
      store(b.bias + i, bias);
      spread = high - bias;
    }
    spread = (vf)((vi)spread & 0x7fffffff);  // a channel of -0.0 has spread -0.0
    const vi bits = scale_bits<DTYPE>(spread / q_max);
    const vf scale = from_bits<DTYPE>(bits);
    store_bits<DTYPE>(scale_to, i, bits, m);
    store(b.inverse + i, 1.0f / scale);
    store(b.scale + i, scale);
    for (int k = 0; k < m; k++) ok &= __builtin_isfinite(scale[k]) && (!bias_to || __builtin_isfinite(b.bias[i + k]));
  }
  return ok;
}

static float q_max_of(const kvbits_tensor& t) {
  if (is_float(t.format)) return number_format(t.format).max_value;
  return (float)(t.symmetric ? (1 << (code_bits(t.format) - 1)) - 1 : (1 << code_bits(t.format)) - 1);
}

// Less the mean that is stored of the page.
template <int DTYPE>
static void subtract_stored_mean(PageBuffers& b, const TokensPart& part) {
  const int size = DTYPE == FLOAT32 ? 4 : 2, width = padded_width(part.head_dim);
  for (int c = 0; c < part.head_dim; c++) {
    int32_t bits = 0;
    __builtin_memcpy(&bits, part.head + part.tensor->mean_offset + c * size, size);
    b.mean[c] = from_bits<DTYPE>(splat_int(bits))[0];
  }
  for (int i = 0; i < part.count; i++)
    for (int c = 0; c < part.head_dim; c++) b.x[(int64_t)i * width + c] -= b.mean[c];
}

// Scales, biases and the mean of a page that closes, or scales and biases of tokens put where their slots are. False on
// overflow.
template <int DTYPE>
static bool make_params(PageBuffers& b, const TokensPart& part, int groups, bool by_token) {
  const kvbits_tensor& t = *part.tensor;
  const int size = DTYPE == FLOAT32 ? 4 : 2, n = part.count;
  bool ok = true;
  if (t.mean_offset >= 0) {
    if (part.closes) ok = subtract_mean<DTYPE>(b, part.head + t.mean_offset, n, part.head_dim);
    else subtract_stored_mean<DTYPE>(b, part);
  }
  if (by_token) range_by_token(b, n, part.head_dim, groups);
  else range_by_channel(b, n, part.head_dim);
  uint8_t *scale = part.head + t.scale_offset, *bias = t.bias_offset >= 0 ? part.head + t.bias_offset : nullptr;
  if (n == part.page_size)
    return choose_params<DTYPE>(b, by_token ? groups * n : part.head_dim, q_max_of(t), scale, bias) && ok;
  ok = choose_params<DTYPE>(b, groups * n, q_max_of(t), b.more_params[0], bias ? b.more_params[1] : nullptr);
  for (int g = 0; g < groups; g++) {
    const int64_t to = ((int64_t)g * part.page_size + part.slot) * size, from = (int64_t)g * n * size;
    __builtin_memcpy(scale + to, b.more_params[0] + from, (size_t)n * size);
    if (bias) __builtin_memcpy(bias + to, b.more_params[1] + from, (size_t)n * size);
  }
  return ok;
}

// Scales that are given: reciprocals, and biases.
static void load_static_params(PageBuffers& b, const kvbits_tensor& t, int kv_head, int head_dim) {
  const int64_t at = (int64_t)kv_head * head_dim;
  widen_as<FLOAT32>(b.scale, t.static_scale + at, head_dim);
  for (int c = 0; c < head_dim; c += VL) store(b.inverse + c, 1.0f / load(b.scale + c));
  if (t.static_bias) widen_as<FLOAT32>(b.bias, t.static_bias + at, head_dim);
}

}  // namespace
