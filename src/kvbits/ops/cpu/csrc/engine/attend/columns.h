// Numbers of several rows by columns: the W (4 or 8) rows' numbers of one channel or token side by side (families/codebook/outliers.h).
#pragma once
#include "dots.h"

namespace {

#ifndef HAVE_COLUMNS
// Where column i lies, in the order that costs a tier least to make.
INLINE vi place_of_column(vi i) { return i; }

INLINE void clear_columns(float* to, int n) { __builtin_memset(to, 0, n * sizeof(float)); }

// Columns `first` .. first + 15 of W rows.
template <int W>
INLINE void gather_columns(const float* rows, int64_t stride, int first, float* to) {
  for (int i = first; i < first + 16; i++)
    for (int r = 0; r < W; r++) to[i * W + r] = rows[r * stride + i];
}

// rows += columns, times a factor per row unless null.
template <int W>
INLINE void add_columns(float* rows, int64_t stride, int first, const float* from, const float* factor) {
  for (int r = 0; r < W; r++)
    for (int i = first; i < first + 16; i++) rows[r * stride + i] += from[i * W + r] * (factor ? factor[r] : 1.0f);
}
#endif

// Every row times its factor.
template <int W>
static void scale_columns(float* columns, int n, const float* factor) {
  typedef float column __attribute__((vector_size(W * 4)));
  column f;
  __builtin_memcpy(&f, factor, sizeof f);
  for (int i = 0; i < n; i++) ((column*)columns)[i] *= f;
}

}  // namespace
