// AVX2 tier: 8 float lanes, vpmaddwd and vpmaddubsw.
#define KVBITS_AVX2
#include "engine/close/plan.h"
#include "families/attend.h"
#include "plan.h"

const TierKernels* tier_avx2() {
  static const TierKernels kernels = {"avx2", sizeof(Scratch), attend_item, pages_avx2()};
  return &kernels;
}
