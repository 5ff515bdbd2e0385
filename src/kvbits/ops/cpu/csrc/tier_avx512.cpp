// AVX-512 VNNI tier: 16 float lanes, vpdpbusd.
#include <immintrin.h>

#include "attend_plan.h"
#include "close_plan.h"

namespace {
#include "vec_avx512.h"
#include "formats.h"
#include "attend_state.h"
#include "dots_avx512.h"
#include "dots_float.h"
#include "codebooks.h"
#include "columns.h"
#include "key_pairs.h"
#include "outliers.h"
#include "attend_softmax.h"
#include "attend_page.h"
}  // namespace

const TierKernels* tier_avx512() {
  static const TierKernels kernels = {"avx512", sizeof(Scratch), attend_item, pages_avx512()};
  return &kernels;
}
