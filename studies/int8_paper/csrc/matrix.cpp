// The INT8 paper's matrix operations: blocks of rows on the tier's kernels, and the scalar baseline that the paper
// prints.
#include <math.h>
#include <string.h>

#include <new>
#include <vector>

#include "engine/dispatch.h"
#include "kernels.h"
#include "matrix.h"
#include "engine/pool.h"

namespace {

// Rows per item: large enough that handing items out costs nothing, small enough that threads finish together.
constexpr int64_t BLOCK_BYTES = int64_t(4) << 20;
// Outputs of this size leave the caches anyway. Written past them, their lines need not be read first.
constexpr int64_t STREAM_BYTES = int64_t(16) << 20;

struct Matrix {
  const MatrixKernels* kernels;
  int64_t rows, columns, block;  // rows per item
  const float* x;
  const float* by_column;  // scales or their inverses
  const int8_t* q;
  void* to;
  float* partial;  // [items][columns]
  float* scales;
  int32_t size, bits;

  bool stream(int64_t row_bytes) const {
    return rows * row_bytes >= STREAM_BYTES && row_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0;
  }
  int64_t items() const { return (rows + block - 1) / block; }
  int64_t first(int64_t i) const { return i * block; }
  int64_t count(int64_t i) const { return rows - first(i) < block ? rows - first(i) : block; }
};

const MatrixKernels* active = nullptr;

Matrix matrix(int64_t rows, int64_t columns) {
  Matrix m = {};
  m.kernels = active;
  m.rows = rows;
  m.columns = columns;
  m.block = BLOCK_BYTES / (4 * columns) < 4 ? 4 : BLOCK_BYTES / (4 * columns) / 4 * 4;
  return m;
}

int32_t run(Matrix& m, PoolTask task, int32_t threads) {
  return pool_run(threads > 0 ? threads : pool_available_threads(), m.items(), 0, task, &m) ? 0 : KVBITS_NO_MEMORY;
}

void largest_item(void* context, int64_t i, int64_t, void*) {
  Matrix& m = *static_cast<Matrix*>(context);
  m.kernels->column_largest(m.x + m.first(i) * m.columns, m.count(i), m.columns, m.partial + i * m.columns);
}

void quantize_item(void* context, int64_t i, int64_t, void*) {
  Matrix& m = *static_cast<Matrix*>(context);
  const int64_t at = m.first(i) * m.columns;
  m.kernels->quantize_columns(m.x + at, m.count(i), m.columns, m.by_column, static_cast<int8_t*>(m.to) + at,
                              m.stream(m.columns));
}

void dequantize_item(void* context, int64_t i, int64_t, void*) {
  Matrix& m = *static_cast<Matrix*>(context);
  const int64_t at = m.first(i) * m.columns;
  m.kernels->dequantize_columns(m.q + at, m.count(i), m.columns, m.by_column, static_cast<float*>(m.to) + at,
                                m.stream(m.columns * 4));
}

void groups_item(void* context, int64_t i, int64_t, void*) {
  Matrix& m = *static_cast<Matrix*>(context);
  const int64_t first = m.first(i);
  m.kernels->quantize_groups(
      m.x + first * m.columns, m.count(i), m.columns, m.size, m.bits, m.scales + first * (m.columns / m.size),
      static_cast<uint8_t*>(m.to) + first * m.columns * m.bits / 8, m.stream(m.columns * m.bits / 8));
}

// ---- the paper's listings 2 to 4, a column of zeros apart (the paper divides by zero there) ----

float scale_of(float largest) { return largest > 0.0f ? largest / 127.0f : 1.0f; }

void paper_scales(const float* x, int64_t rows, int64_t columns, float* scales) {
  for (int64_t d = 0; d < columns; d++) {
    float largest = 0.0f;
    for (int64_t t = 0; t < rows; t++) {
      const float value = fabsf(x[t * columns + d]);
      if (value > largest) largest = value;
    }
    scales[d] = scale_of(largest);
  }
}

void row_order_scales(const float* x, int64_t rows, int64_t columns, float* scales) {
  for (int64_t d = 0; d < columns; d++) scales[d] = 0.0f;
  for (int64_t t = 0; t < rows; t++)
    for (int64_t d = 0; d < columns; d++) {
      const float value = fabsf(x[t * columns + d]);
      if (value > scales[d]) scales[d] = value;
    }
  for (int64_t d = 0; d < columns; d++) scales[d] = scale_of(scales[d]);
}

void paper_quantize(const float* x, int64_t rows, int64_t columns, const float* scales, int8_t* to) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t d = 0; d < columns; d++) {
      int q = static_cast<int>(roundf(x[t * columns + d] / scales[d]));
      if (q > 127) q = 127;
      if (q < -127) q = -127;
      to[t * columns + d] = static_cast<int8_t>(q);
    }
}

void paper_dequantize(const int8_t* q, int64_t rows, int64_t columns, const float* scales, float* to) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t d = 0; d < columns; d++) to[t * columns + d] = static_cast<float>(q[t * columns + d]) * scales[d];
}

}  // namespace

extern "C" {

int32_t kvbits_matrix_use(const char* tier, void* parallel) {
  pool_use_openmp(parallel);
  active = !strcmp(tier, "generic") || !strcmp(tier, "amx_emulated") ? matrix_generic() : nullptr;
#if defined(__x86_64__)
  if (!strcmp(tier, "avx2")) active = matrix_avx2();
  if (!strcmp(tier, "avx512") || !strcmp(tier, "amx")) active = matrix_avx512();  // tiles serve only attention
#elif defined(__aarch64__)
  if (!strcmp(tier, "neon")) active = matrix_neon();
#endif
  return active ? 0 : -1;
}

int32_t kvbits_matrix_scales(const float* x, int64_t rows, int64_t columns, float* scales, int32_t kernel,
                             int32_t threads) {
  if (kernel == KVBITS_MATRIX_COLUMN_OUTER) return paper_scales(x, rows, columns, scales), 0;
  if (kernel == KVBITS_MATRIX_ROW_ORDER) return row_order_scales(x, rows, columns, scales), 0;
  if (!active) return KVBITS_NO_TIER;
  if (!columns) return 0;
  try {
    Matrix m = matrix(rows, columns);
    std::vector<float> partial(static_cast<size_t>(m.items() * columns), 0.0f);
    m.x = x;
    m.partial = partial.data();
    if (const int32_t bad = run(m, largest_item, threads)) return bad;
    for (int64_t d = 0; d < columns; d++) {
      float largest = 0.0f;
      for (int64_t i = 0; i < m.items(); i++) largest = fmaxf(largest, partial[i * columns + d]);
      scales[d] = scale_of(largest);
    }
  } catch (const std::bad_alloc&) {
    return KVBITS_NO_MEMORY;
  }
  return 0;
}

int32_t kvbits_matrix_quantize(const float* x, int64_t rows, int64_t columns, const float* scales, int8_t* to,
                               int32_t kernel, int32_t threads) {
  if (kernel != KVBITS_MATRIX_FAST) return paper_quantize(x, rows, columns, scales, to), 0;
  if (!active) return KVBITS_NO_TIER;
  if (!columns) return 0;
  try {
    std::vector<float> inverse(static_cast<size_t>(columns));
    for (int64_t d = 0; d < columns; d++) inverse[d] = 1.0f / scales[d];
    Matrix m = matrix(rows, columns);
    m.x = x;
    m.by_column = inverse.data();
    m.to = to;
    return run(m, quantize_item, threads);
  } catch (const std::bad_alloc&) {
    return KVBITS_NO_MEMORY;
  }
}

int32_t kvbits_matrix_dequantize(const int8_t* q, int64_t rows, int64_t columns, const float* scales, float* to,
                                 int32_t kernel, int32_t threads) {
  if (kernel != KVBITS_MATRIX_FAST) return paper_dequantize(q, rows, columns, scales, to), 0;
  if (!active) return KVBITS_NO_TIER;
  if (!columns) return 0;
  Matrix m = matrix(rows, columns);
  m.q = q;
  m.by_column = scales;
  m.to = to;
  return run(m, dequantize_item, threads);
}

int32_t kvbits_matrix_quantize_groups(const float* x, int64_t rows, int64_t columns, int32_t size, int32_t bits,
                                      float* scales, uint8_t* to, int32_t threads) {
  if (size < 16 || size % 16 || columns % size || (bits != 8 && bits != 4) || (bits == 4 && columns / size % 2))
    return KVBITS_BAD_GROUP;
  if (!active) return KVBITS_NO_TIER;
  if (!columns) return 0;
  Matrix m = matrix(rows, columns);
  m.x = x;
  m.size = size;
  m.bits = bits;
  m.scales = scales;
  m.to = to;
  return run(m, groups_item, threads);
}
}
