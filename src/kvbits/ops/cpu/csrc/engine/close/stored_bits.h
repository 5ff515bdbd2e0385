// fp32 to the dtype in which scales, biases, means and raw rows are stored, and back.
#pragma once
#include <stdint.h>

#include "engine/vec/vec.h"
#include "kvbits_cpu.h"

namespace {

// The 16 (or 32) bits that store x, rounded to nearest even.
template <int DTYPE>
INLINE vi to_bits(vf x) {
  const vi bits = (vi)x, sign = (bits >> 31) & 1, mag = bits & 0x7fffffff;
  const vu wraps = (vu)mag;  // lanes behind the last number may hold anything, NaNs that overflow when rounded too
  if (DTYPE == FLOAT32) return bits;
  if (DTYPE == BFLOAT16) return (vi)((wraps + 0x7fff + ((wraps >> 16) & 1)) >> 16) | (sign << 15);
  const vi normal = (vi)((wraps + 0xc8000fff + ((wraps >> 13) & 1)) >> 13);  // rebias by -112, round
  const vi tiny = (vi)((vf)mag + 0.5f) - 0x3f000000;                    // units of 2^-24
  const vi small = mag < splat_int(0x38800000), large = mag >= splat_int(0x477ff000);
  const vi half = (tiny & small) | (normal & ~small & ~large) | (0x7c00 & large);
  return half | (sign << 15);
}

template <int DTYPE>
INLINE vf from_bits(vi bits) {
  if (DTYPE == FLOAT32) return (vf)bits;
  if (DTYPE == BFLOAT16) return (vf)(bits << 16);
  const vi mag = bits & 0x7fff;
  vf x = (vf)(mag << 13) * 0x1p112f;
  x = select(mag >= splat_int(0x7c00), (vf)((mag << 13) | 0x7f800000), x);
  return (vf)((vi)x | ((bits & 0x8000) << 16));
}

template <int DTYPE>
INLINE void store_bits(void* base, int64_t i, vi bits, int n) {
  for (int k = 0; k < n; k++) {
    if (DTYPE == FLOAT32) ((int32_t*)base)[i + k] = bits[k];
    else ((uint16_t*)base)[i + k] = (uint16_t)bits[k];
  }
}

// n numbers of fp32 in another dtype.
template <int DTYPE>
static void write_row(uint8_t* to, const float* x, int n) {
  int i = 0;
  for (; i + VL <= n; i += VL) {
    const vi bits = to_bits<DTYPE>(load(x + i));
    if (DTYPE == FLOAT32) store_int((int32_t*)to + i, bits);
    else *(vh_mem*)(to + i * 2) = __builtin_convertvector(bits, vh_mem);
  }
  if (i < n) store_bits<DTYPE>(to, i, to_bits<DTYPE>(load(x + i)), n - i);
}

INLINE bool all_finite(vf x) {
  const vi bad = ((vi)x & 0x7f800000) == splat_int(0x7f800000);
  int any = 0;
  for (int i = 0; i < VL; i++) any |= bad[i];
  return !any;
}

// A subnormal fp16 scale is rounded up: rounding down could push the group's largest element past the last code. None
// is 0 (a group without spread), and none of fp32 or bf16 subnormal: its reciprocal would be infinite.
template <int DTYPE>
INLINE vi scale_bits(vf scale) {
  if (DTYPE != FLOAT16) return to_bits<DTYPE>(vmax(scale, splat(0x1p-126f)));
  const vf units = scale * 0x1p24f;
  vf up = (units + 8388608.0f) - 8388608.0f;
  up = vmax(select(up < units, up + 1.0f, up), splat(1.0f));
  return (vi)select(scale < splat(0x1p-14f), (vf)__builtin_convertvector(up, vi), (vf)to_bits<DTYPE>(scale));
}

template <int DTYPE>
INLINE vi bits_below(vf x) {
  x = x + 0.0f;  // no -0: which zero of a range is the smallest?
  const vi bits = to_bits<DTYPE>(x);
  if (DTYPE == FLOAT32) return bits;
  const vf y = from_bits<DTYPE>(bits);
  const vi positive = y > vf{}, zero = y == vf{};
  const vi lower = ((bits - 1) & positive) | (0x8001 & zero) | ((bits + 1) & ~positive & ~zero);
  const vi above = y > x;
  return (lower & above) | (bits & ~above);
}

}  // namespace
