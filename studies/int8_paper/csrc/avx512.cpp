// Matrix quantization of the avx512 tier. Compiled without fused multiply-add: codes must match the reference bit for
// bit.
#define KVBITS_AVX512
#include "kernels.h"
#include "matrix_rows.h"

const MatrixKernels* matrix_avx512() {
  static const MatrixKernels kernels = {column_largest, quantize_columns, dequantize_columns, quantize_groups};
  return &kernels;
}
