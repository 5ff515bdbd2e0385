// AVX-512 VNNI tier: 16 float lanes, vpdpbusd.
#define KVBITS_AVX512
#include "engine/close/plan.h"
#include "families/attend.h"
#include "plan.h"

const TierKernels* tier_avx512() {
  static const TierKernels kernels = {"avx512", sizeof(Scratch), attend_item, pages_avx512()};
  return &kernels;
}
