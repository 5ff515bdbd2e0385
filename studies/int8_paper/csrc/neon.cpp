// Matrix quantization of the neon tier. Compiled without fused multiply-add: codes must match the reference bit for
// bit.
#define KVBITS_NEON
#include "kernels.h"
#include "matrix_rows.h"

const MatrixKernels* matrix_neon() {
  static const MatrixKernels kernels = {column_largest, quantize_columns, dequantize_columns, quantize_groups};
  return &kernels;
}
