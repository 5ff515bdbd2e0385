// A tier's kernels of rows of a matrix.
#pragma once
#include <stdint.h>

struct MatrixKernels {
  // Rows of a row-major fp32 matrix (matrix_rows.h). `stream`: write past the caches; rows of `to` begin at multiples
  // of 64 bytes.
  void (*column_largest)(const float* x, int64_t rows, int64_t columns, float* largest);
  void (*quantize_columns)(const float* x, int64_t rows, int64_t columns, const float* inverse, int8_t* to,
                           bool stream);
  void (*dequantize_columns)(const int8_t* q, int64_t rows, int64_t columns, const float* scales, float* to,
                             bool stream);
  void (*quantize_groups)(const float* x, int64_t rows, int64_t columns, int size, int bits, float* scales, uint8_t* to,
                          bool stream);
};

const MatrixKernels* matrix_generic();
const MatrixKernels* matrix_avx2();
const MatrixKernels* matrix_avx512();
const MatrixKernels* matrix_neon();
