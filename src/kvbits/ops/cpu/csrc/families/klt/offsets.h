#pragma once
#include <stdint.h>

#include "engine/formats.h"
#include "engine/vec/vec.h"
#include "kvbits_cpu.h"

namespace {

// What is taken off the key at a place of a page (quant/basis.py): a row of `offsets`.
INLINE const float* offsets_of(const kvbits_tensor& t, int kv_head, int head_dim, int64_t start, int place) {
  const int64_t row = start + place == 0 ? OFFSETS - 1 : start % FRAME / MEAN_STEP;
  return t.offsets + (kv_head * OFFSETS + row) * round_up(head_dim, 16);
}

}  // namespace
