// C ABI of the INT8 paper's matrix operations, libkvbits_studies.so (matrix.cpp).
#pragma once
#include <stdint.h>

#include "kvbits_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

// The INT8 paper's matrices: row-major fp32 [rows, columns], one scale per column. A column of zeros has scale 1.
// The instruction set of the kernels that follow, one that runs on this machine, and the address of GOMP_parallel or
// null (pool.h). -1: not in this build.
KVBITS_EXPORT int32_t kvbits_matrix_use(const char* tier, void* parallel);
enum kvbits_matrix_kernel {
  KVBITS_MATRIX_FAST = 0,        // vectorised, threads
  KVBITS_MATRIX_COLUMN_OUTER = 1,  // the paper's scalar baseline as printed: compute_scales walks column by column
  KVBITS_MATRIX_ROW_ORDER = 2      // the same scalar arithmetic in memory order
};
KVBITS_EXPORT int32_t kvbits_matrix_scales(const float* x, int64_t rows, int64_t columns, float* scales, int32_t kernel,
                                           int32_t threads);
KVBITS_EXPORT int32_t kvbits_matrix_quantize(const float* x, int64_t rows, int64_t columns, const float* scales,
                                             int8_t* to, int32_t kernel, int32_t threads);
KVBITS_EXPORT int32_t kvbits_matrix_dequantize(const int8_t* q, int64_t rows, int64_t columns, const float* scales,
                                               float* to, int32_t kernel, int32_t threads);
// A scale per row and group of `size` columns (a multiple of 16): bits 8 to int8 [rows, columns], bits 4 to [rows,
// columns / 2].
KVBITS_EXPORT int32_t kvbits_matrix_quantize_groups(const float* x, int64_t rows, int64_t columns, int32_t size,
                                                    int32_t bits, float* scales, uint8_t* to, int32_t threads);

#ifdef __cplusplus
}
#endif
