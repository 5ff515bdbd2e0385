// Page closing and matrix quantization of the neon tier. Compiled without fused multiply-add: codes must match the reference bit for bit.
#include <arm_neon.h>

#include "attend_plan.h"
#include "close_plan.h"

namespace {
#include "vec_neon.h"
#include "formats.h"
#include "close_pages.h"
#include "matrix_rows.h"
}  // namespace

const PageKernels* pages_neon() {
  static const PageKernels kernels = {close_scratch_bytes, close_item, store_item, column_largest, quantize_columns, dequantize_columns, quantize_groups};
  return &kernels;
}
