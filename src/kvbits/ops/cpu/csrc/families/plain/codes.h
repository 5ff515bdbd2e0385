// Numbers to codes, by scales that are chosen: src/kvbits/quant/qparams.py.
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"

namespace {

struct CodeRange {
  float low, high, zero;  // integer codes; floats: -/+ the largest finite value, and where rounding would pass it
};

template <int FMT>
INLINE vi code_of(vf scaled, const CodeRange& r, vi& saturated) {
  if (is_int(FMT)) {
    // The clamp keeps the rounding trick in its range and changes no code.
    const vf code = round_even(vmin(vmax(scaled, splat(-1048576.0f)), splat(1048576.0f))) + r.zero;
    saturated += (code < splat(r.low)) | (code > splat(r.high));
    return __builtin_convertvector(vmin(vmax(code, splat(r.low)), splat(r.high)), vi);
  }
  constexpr NumberFormat f = number_format(FMT);
  constexpr int sign_bit = 1 << (f.exponent_bits + f.mantissa_bits), bias = exponent_bias(FMT),
                up = 23 - f.mantissa_bits;
  const vi sign = ((vi)scaled >> (31 - f.exponent_bits - f.mantissa_bits)) & sign_bit;
  const vf mag = (vf)((vi)scaled & 0x7fffffff);
  saturated += mag >= splat(r.zero);
  const vi bits = (vi)vmin(mag, splat(r.high));
  const int rebias = (int)((unsigned)(bias - 127) << 23);
  const vi normal = (bits + rebias + ((1 << (up - 1)) - 1) + ((bits >> up) & 1)) >> up;
  const float unit = float_bits((127 + 24 - f.mantissa_bits - bias) << 23);  // its last bit is the smallest subnormal
  const vi tiny = (vi)((vf)bits + unit) - (vi)splat(unit);
  const vi small = bits < splat_int((128 - bias) << 23);
  return (((tiny & small) | (normal & ~small)) & (sign_bit - 1)) | sign;
}

// One token's reciprocal scales and biases of [groups][page_size], channel by channel.
INLINE void spread_over_channels(const PageBuffers& b, int t, int page_size, int head_dim, int size, bool has_bias,
                                 float* inverse, float* bias) {
  for (int c = 0; c < head_dim; c++) {
    inverse[c] = b.inverse[c / size * page_size + t];
    if (has_bias) bias[c] = b.bias[c / size * page_size + t];
  }
}

// Codes of the whole page. `by_token`: inverse and bias are [groups][page_size], else [width].
template <int FMT>
static int64_t make_codes(PageBuffers& b, int page_size, int head_dim, int groups, bool by_token, bool has_bias,
                          const CodeRange& range) {
  const int width = padded_width(head_dim), size = head_dim / groups;
  const bool splats = by_token && size % VL == 0;
  int64_t count = 0;
  alignas(64) float inverse[MAX_HEAD_DIM + 16] = {}, bias[MAX_HEAD_DIM + 16] = {};
  vi saturated = vi{};
  for (int t = 0; t < page_size; t++) {
    const float* x = b.x + (int64_t)t * width;
    uint8_t* to = b.codes + (int64_t)t * width;
    if (splats) {
      for (int g = 0; g < groups; g++) {
        const vf k = splat(b.inverse[g * page_size + t]), low = has_bias ? splat(b.bias[g * page_size + t]) : vf{};
        for (int c = g * size; c < (g + 1) * size; c += VL)
          store_bytes(to + c, code_of<FMT>((load(x + c) - low) * k, range, saturated));
      }
    } else {
      if (by_token) spread_over_channels(b, t, page_size, head_dim, size, has_bias, inverse, bias);
      const float* k = by_token ? inverse : b.inverse;
      const float* low = by_token ? bias : b.bias;
      for (int c = 0; c < head_dim; c += VL) {
        vi clamped = vi{};
        const vf y = has_bias ? load(x + c) - load(low + c) : load(x + c);
        vi codes = code_of<FMT>(y * load(k + c), range, clamped);
        const vi inside = iota() < splat_int(head_dim - c);
        saturated += clamped & inside;
        store_bytes(to + c, codes & inside);
      }
    }
  }
  for (int i = 0; i < VL; i++) count -= saturated[i];
  return count;
}

static CodeRange range_of(const kvbits_tensor& t) {
  const NumberFormat f = number_format(t.format);
  if (is_float(t.format)) return {-f.max_value, f.max_value, f.saturates_at};
  const float top = (float)((1 << code_bits(t.format)) - 1);
  return {t.symmetric ? 1.0f : 0.0f, top, t.symmetric ? int_zero(t.format) : 0.0f};
}

// Whose codes follow from a number and its scale alone.
constexpr bool has_plain_codes(int format) { return is_int(format) || is_float(format); }

template <int FMT = 0>
static int64_t codes_of_format(PageBuffers& b, const kvbits_tensor& t, int page_size, int head_dim, int groups,
                               bool by_token, bool has_bias) {
  if constexpr (has_plain_codes(FMT))
    if (t.format == FMT) return make_codes<FMT>(b, page_size, head_dim, groups, by_token, has_bias, range_of(t));
  if constexpr (FMT + 1 < NUM_FORMATS)
    return codes_of_format<FMT + 1>(b, t, page_size, head_dim, groups, by_token, has_bias);
  return 0;
}

}  // namespace
