// NEON tier: 4 float lanes, signed dot product (Armv8.2).
#include <arm_neon.h>

#include "attend_plan.h"
#include "close_plan.h"

namespace {
#include "vec_neon.h"
#include "formats.h"
#include "attend_state.h"
#include "dots_neon.h"
#include "dots_float.h"
#include "codebooks.h"
#include "columns.h"
#include "key_pairs.h"
#include "outliers.h"
#include "attend_softmax.h"
#include "attend_page.h"
}  // namespace

const TierKernels* tier_neon() {
  static const TierKernels kernels = {"neon", sizeof(Scratch), attend_item, pages_neon()};
  return &kernels;
}
