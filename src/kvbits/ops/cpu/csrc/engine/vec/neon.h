// 4 float lanes.
#pragma once
#include <arm_neon.h>

#define VL 4
#define HAVE_FROM_FP16
#define HAVE_REDUCE
#define HAVE_MIN_MAX
#define HAVE_SUM_IN_ALL
#define HAVE_LOOKUP
#include "portable.h"

namespace {

INLINE vf from_fp16(const uint16_t* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vi looked_up(const uint8_t (&table)[16], vi x) { return (vi)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)x); }
INLINE float sum(vf x) { return vaddvq_f32((float32x4_t)x); }
INLINE float max_of(vf x) { return vmaxvq_f32((float32x4_t)x); }
INLINE vf vmax(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf vmin(vf a, vf b) { return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE void sum_each(const vf* x, int n, float* to) {
  for (int i = 0; i < n; i++) to[i] = sum(x[i]);
}
INLINE vf sum_in_all(vf x) {
  x += exchanged<1>(x);
  return x + exchanged<2>(x);
}

}  // namespace
