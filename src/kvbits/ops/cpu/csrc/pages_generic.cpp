// Page closing and matrix quantization of the generic tier. Compiled without fused multiply-add: codes must match the reference bit for bit.
#include "attend_plan.h"
#include "close_plan.h"

namespace {
#define VL 4
#include "vec.h"
#include "formats.h"
#include "close_pages.h"
#include "matrix_rows.h"
}  // namespace

const PageKernels* pages_generic() {
  static const PageKernels kernels = {close_scratch_bytes, close_item, store_item, column_largest, quantize_columns, dequantize_columns, quantize_groups};
  return &kernels;
}
