// Numbers times a Hadamard matrix, by the butterflies of src/kvbits/quant/basis.py and in their order: the same bits.
#pragma once
#include <stdint.h>

#include "engine/vec/vec.h"

namespace {

// Butterflies of the numbers of a vector `STRIDE` lanes apart: a + b in the lower one's place, a - b in the other's,
// which is b's sign turned and a added.
template <int STRIDE>
INLINE vf butterflies(vf x) {
  if constexpr (STRIDE < VL) {
    vi signs;
    for (int i = 0; i < VL; i++) signs[i] = i & STRIDE ? INT32_MIN : 0;
    return exchanged<STRIDE>(x) + (vf)((vi)x ^ signs);
  }
  return x;
}

// In place: n numbers times the matrix of the largest power of two that divides n, block by block, over the square root
// of its size.
static void hadamard(float* x, int n) {
  const int size = n & -n;
  const float factor = (float)(1.0 / __builtin_sqrt((double)size));
  int i = 0, stride = VL;
  for (; i + VL <= n; i += VL) {
    vf y = load(x + i);
    if (size > 1) y = butterflies<1>(y);
    if (size > 2) y = butterflies<2>(y);
    if (size > 4) y = butterflies<4>(y);
    if (size > 8) y = butterflies<8>(y);
    store(x + i, size <= VL ? y * factor : y);
  }
  for (; stride < size; stride *= 2) {
    const float scaled = 2 * stride == size ? factor : 1.0f;
    for (int first = 0; first < n; first += 2 * stride)
      for (int k = first; k < first + stride; k += VL) {
        const vf a = load(x + k), b = load(x + k + stride);
        store(x + k, (a + b) * scaled);
        store(x + k + stride, (a - b) * scaled);
      }
  }
  // blocks of fewer numbers than a vector has
  for (stride = 1; i < n && stride < size; stride *= 2)
    for (int first = i; first < n; first += 2 * stride)
      for (int k = first; k < first + stride; k++) {
        const float a = x[k], b = x[k + stride];
        x[k] = a + b;
        x[k + stride] = a - b;
      }
  for (; i < n; i++) x[i] *= factor;
}

}  // namespace
