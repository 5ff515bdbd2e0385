// Matrix quantization of the generic tier. Compiled without fused multiply-add: codes must match the reference bit for
// bit.
#include "kernels.h"
#include "matrix_rows.h"

const MatrixKernels* matrix_generic() {
  static const MatrixKernels kernels = {column_largest, quantize_columns, dequantize_columns, quantize_groups};
  return &kernels;
}
