// Page closing of the avx2 tier. Compiled without fused multiply-add: codes must match the reference bit for bit.
#include <immintrin.h>

#include "attend_plan.h"
#include "close_plan.h"

namespace {
#include "vec_avx2.h"
#include "formats.h"
#include "close_pages.h"
}  // namespace

const PageKernels* pages_avx2() {
  static const PageKernels kernels = {close_scratch_bytes, close_item};
  return &kernels;
}
