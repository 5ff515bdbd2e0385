// NEON tier: 4 float lanes, signed dot product (Armv8.2).
#define KVBITS_NEON
#include "engine/close/plan.h"
#include "families/attend.h"
#include "plan.h"

const TierKernels* tier_neon() {
  static const TierKernels kernels = {"neon", sizeof(Scratch), attend_item, pages_neon()};
  return &kernels;
}
