// Numbers of several rows by columns: the W (4 or 8) rows' numbers of one channel or token side by side (families/codebook/outliers.h).
#pragma once
#include "dots.h"

namespace {

// Columns `first` .. first + 15 of W rows.
template <int W>
INLINE void gather_columns(const float* rows, int64_t stride, int first, float* to) {
  for (int i = first; i < first + 16; i++)
    for (int r = 0; r < W; r++) to[i * W + r] = rows[r * stride + i];
}

// rows += columns.
template <int W>
INLINE void add_columns(float* rows, int64_t stride, int first, const float* from) {
  for (int r = 0; r < W; r++)
    for (int i = first; i < first + 16; i++) rows[r * stride + i] += from[i * W + r];
}

// Every row times its factor.
template <int W>
static void scale_columns(float* columns, int n, const float* factor) {
  typedef float column __attribute__((vector_size(W * 4)));
  column f;
  __builtin_memcpy(&f, factor, sizeof f);
  for (int i = 0; i < n; i++) ((column*)columns)[i] *= f;
}

}  // namespace
