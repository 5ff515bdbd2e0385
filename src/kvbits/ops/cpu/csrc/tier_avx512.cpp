// AVX-512 VNNI tier: 16 float lanes, vpdpbusd.
#include <immintrin.h>

#include "attend_plan.h"

namespace {
#define VL 16
#define HAVE_FROM_FP16
#define HAVE_REDUCE
#include "vec.h"
INLINE vf from_fp16(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#include "attend_state.h"
#include "dots_avx512.h"
#include "dots_float.h"
#include "attend_softmax.h"
#include "attend_page.h"
}  // namespace

const TierKernels* tier_avx512() {
  static const TierKernels kernels = {"avx512", sizeof(Scratch), attend_item};
  return &kernels;
}
