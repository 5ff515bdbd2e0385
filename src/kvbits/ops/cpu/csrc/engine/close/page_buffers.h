// Buffers of one tensor of one head of a page that closes.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "engine/formats.h"
#include "engine/store.h"
#include "engine/vec/vec.h"

namespace {

// Buffers of one (page, head, tensor), carved from the thread's scratch. `width` is head_dim padded to whole vectors.
struct PageBuffers {
  float* x;        // [page_size][width]
  uint8_t* codes;  // [page_size + 16][width]; the rest stays room for vector stores
  uint8_t* rows;   // [page_size][row_bytes + 16]
  float *low, *high, *inverse, *scale, *bias;  // [groups][page_size] or [width]
  float* mean;     // [width]
  uint8_t* more_params[2];  // as stored parameters, for what is stored by slots
};

INLINE int padded_width(int head_dim) { return round_up(head_dim, 16); }

// Lays the buffers out from `scratch` on; returns the bytes they take.
static size_t carve(PageBuffers& b, char* scratch, int page_size, int head_dim) {
  const size_t w = padded_width(head_dim), params = (size_t)page_size * MAX_GROUPS + w + 64,
               page = (size_t)(page_size + 16) * w;
  size_t end = 0;
  auto take = [&](size_t bytes) {
    char* p = scratch ? scratch + end : nullptr;
    end += (bytes + 63) / 64 * 64;
    return p;
  };
  b.x = (float*)take(page * 4);
  b.codes = (uint8_t*)take(page);
  b.rows = (uint8_t*)take((size_t)page_size * (w + 16));
  b.low = (float*)take(params * 4);
  b.high = (float*)take(params * 4);
  b.inverse = (float*)take(params * 4);
  b.scale = (float*)take(params * 4);
  b.bias = (float*)take(params * 4);
  b.mean = (float*)take(w * 4);
  for (uint8_t*& to : b.more_params) to = (uint8_t*)take(params * 4);
  return end;
}

static size_t close_scratch_bytes(int page_size, int head_dim) {
  PageBuffers b;
  return carve(b, nullptr, page_size, head_dim);
}

}  // namespace
