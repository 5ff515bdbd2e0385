// Generic tier: baseline instructions of the platform, scalar integer dot products that the compiler vectorises.
#include "engine/close/plan.h"
#include "families/attend.h"
#include "plan.h"

const TierKernels* tier_generic() {
  static const TierKernels kernels = {"generic", sizeof(Scratch), attend_item, pages_generic()};
  return &kernels;
}
