#pragma once
#include <stdint.h>

#include "engine/formats.h"
#include "engine/vec/vec.h"
#include "kvbits_cpu.h"

namespace {

// Which row of `offsets` is taken off the key at a place of a page (quant/basis.py): tokens of a tile share one, and
// position 0 has its own.
INLINE int offset_row(int64_t start, int place) {
  if (start + place == 0) return OFFSETS - 1;
  const int row = ((int)(start % FRAME) + place / MEAN_STEP * MEAN_STEP) / MEAN_STEP;
  return row < OFFSETS - 2 ? row : OFFSETS - 2;
}

INLINE const float* offsets_of(const kvbits_tensor& t, int kv_head, int head_dim, int64_t start, int place) {
  return t.offsets + ((int64_t)kv_head * OFFSETS + offset_row(start, place)) * round_up(head_dim, 16);
}
static_assert(TILE == MEAN_STEP, "kernels add one row's share to the scores of a tile");

}  // namespace
