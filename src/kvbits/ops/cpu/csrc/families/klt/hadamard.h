// Numbers times a Hadamard matrix, by the butterflies of src/kvbits/quant/basis.py and in their order: the same bits.
#pragma once

namespace {

// In place: n numbers times the matrix of the largest power of two that divides n, block by block, over the square root
// of its size.
static void hadamard(float* x, int n) {
  const int size = n & -n;
  for (int stride = 1; stride < size; stride *= 2)
    for (int i = 0; i < n; i += 2 * stride)
      for (int k = i; k < i + stride; k++) {
        const float a = x[k], b = x[k + stride];
        x[k] = a + b;
        x[k + stride] = a - b;
      }
  const float factor = (float)(1.0 / __builtin_sqrt((double)size));
  for (int i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace
