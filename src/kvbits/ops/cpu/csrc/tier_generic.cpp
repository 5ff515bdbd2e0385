// Generic tier: baseline instructions of the platform, scalar integer dot products that the compiler vectorises.
#include "attend_plan.h"
#include "close_plan.h"

namespace {
#define VL 4
#include "vec.h"
#include "formats.h"
#include "attend_state.h"
#include "dots_generic.h"
#include "dots_float.h"
#include "codebooks.h"
#include "columns.h"
#include "key_pairs.h"
#include "outliers.h"
#include "attend_softmax.h"
#include "attend_page.h"
}  // namespace

const TierKernels* tier_generic() {
  static const TierKernels kernels = {"generic", sizeof(Scratch), attend_item, pages_generic()};
  return &kernels;
}
