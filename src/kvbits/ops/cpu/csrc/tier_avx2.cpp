// AVX2 tier: 8 float lanes, vpmaddwd and vpmaddubsw.
#include <immintrin.h>

#include "attend_plan.h"

namespace {
#define VL 8
#define HAVE_FROM_FP16
#include "vec.h"
INLINE vf from_fp16(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#include "attend_state.h"
#include "dots_avx2.h"
#include "dots_float.h"
#include "attend_softmax.h"
#include "attend_page.h"
}  // namespace

const TierKernels* tier_avx2() {
  static const TierKernels kernels = {"avx2", sizeof(Scratch), attend_item};
  return &kernels;
}
