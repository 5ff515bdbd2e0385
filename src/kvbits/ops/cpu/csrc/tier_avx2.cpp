// AVX2 tier: 8 float lanes, vpmaddwd and vpmaddubsw.
#include <immintrin.h>

#include "attend_plan.h"
#include "close_plan.h"

namespace {
#include "vec_avx2.h"
#include "formats.h"
#include "attend_state.h"
#include "dots_avx2.h"
#include "dots_float.h"
#include "codebooks.h"
#include "columns.h"
#include "key_pairs.h"
#include "outliers.h"
#include "attend_softmax.h"
#include "attend_page.h"
}  // namespace

const TierKernels* tier_avx2() {
  static const TierKernels kernels = {"avx2", sizeof(Scratch), attend_item, pages_avx2()};
  return &kernels;
}
