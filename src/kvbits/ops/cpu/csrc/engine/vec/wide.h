// 16 lanes in plain C, which every machine runs: the vectors of kernels that emulate tiles (engine/tiles/registers.h).
#pragma once
#define VL 16
#define HAVE_LANES
#include "portable.h"

namespace {

INLINE vi load_quads(const uint8_t* const (&at)[VL / 4]) {
  vi x;
  for (int i = 0; i < VL / 4; i++) __builtin_memcpy((char*)&x + 16 * i, at[i], 16);
  return x;
}
// Levels of values of 2 bits from the lowest three bits of every byte, as portable.h has them.
INLINE vi odd_levels(vi x, bool fitted) {
  int8_t t[VL * 4];
  __builtin_memcpy(t, &x, sizeof t);
  for (int i = 0; i < VL * 4; i++) {
    const int n = t[i] & 7, level = 2 * n - 7;
    t[i] = (int8_t)(fitted && n == 7 ? 9 : fitted && n == 0 ? -9 : level);
  }
  __builtin_memcpy(&x, t, sizeof t);
  return x;
}
template <int N>
INLINE vi lanes_behind(vi before, vi x) {
  vi y;
  for (int i = 0; i < VL; i++) y[i] = i % 4 < N ? before[i + 4 - N] : x[i - N];
  return y;
}

}  // namespace
