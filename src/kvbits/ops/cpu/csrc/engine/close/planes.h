// Codes to the bytes of a page: bit planes, tiles of keys and quads of values (docs/reference/formats.md,
// src/kvbits/quant/packing.py); raw rows as they are.
#pragma once
#include <stdint.h>

#include "page_buffers.h"
#include "plan.h"
#include "stored_bits.h"

namespace {

// One bit plane: fields of `bits` bits at `shift` of each code, packed into rows.
static void pack_rows(PageBuffers& b, int page_size, int head_dim, int row_bytes, int bits, int shift) {
  const int width = padded_width(head_dim), mask = (1 << bits) - 1;
  for (int t = 0; t < page_size; t++) {
    const uint8_t* codes = b.codes + (int64_t)t * width;
    uint8_t* row = b.rows + (int64_t)t * row_bytes;
    for (int i = 0; i * row_bytes < head_dim; i++) {
      const int n = head_dim - i * row_bytes < row_bytes ? head_dim - i * row_bytes : row_bytes, up = i * bits;
      const uint8_t* from = codes + i * row_bytes;
      if (i)
        for (int r = 0; r < n; r++) row[r] |= (uint8_t)((from[r] >> shift & mask) << up);
      else
        for (int r = 0; r < n; r++) row[r] = (uint8_t)(from[r] >> shift & mask);
    }
  }
}

static void interleave_keys(const PageBuffers& b, uint8_t* to, int page_size, int row_bytes) {
  for (int t = 0; t < page_size; t += TILE)
    for (int r = 0; r < row_bytes; r += 4)
      for (int i = 0; i < TILE; i++, to += 4) __builtin_memcpy(to, b.rows + (int64_t)(t + i) * row_bytes + r, 4);
}

// Four tokens' bytes side by side: a vector of 32-bit words is the or of four shifted rows.
static void interleave_values(const PageBuffers& b, uint8_t* to, int page_size, int row_bytes) {
  static const int order[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  for (int block = 0; block < row_bytes; block += 16) {
    const int width = row_bytes - block < 16 ? row_bytes - block : 16;
    for (int quad = 0; quad < page_size / 4; quad++, to += 4 * width) {
      const uint8_t* row[4];
      for (int u = 0; u < 4; u++)
        row[u] = b.rows + (int64_t)(quad / 2 * 8 + order[quad % 2 * 4 + u]) * row_bytes + block;
      int r = 0;
      for (; r + VL <= width; r += VL) {
        vi word = vi{};
        for (int u = 0; u < 4; u++) word |= load_bytes(row[u] + r) << (8 * u);
        *(vi_mem*)(to + 4 * r) = word;
      }
      for (; r < width; r++)
        for (int u = 0; u < 4; u++) to[4 * r + u] = row[u][r];
    }
  }
}

// Neighbouring places of a page, all of them when it closes.
struct Slots {
  bool is_key;
  int page_size, first, count;
};

static void scatter_rows(const PageBuffers& b, const Slots& s, uint8_t* to, int row_bytes) {
  for (int t = 0; t < s.count; t++) {
    const uint8_t* row = b.rows + (int64_t)t * row_bytes;
    const int place = s.first + t;
    if (s.is_key) {
      uint8_t* at = to + place / TILE * TILE * row_bytes + place % TILE * 4;
      for (int r = 0; r < row_bytes; r += 4) __builtin_memcpy(at + r * TILE, row + r, 4);
      continue;
    }
    // slots of a group of eight hold tokens 0 1 4 5 2 3 6 7
    const int in = place % 8, quad = place / 8 * 2 + in / 2 % 2, u = in % 2 + in / 4 * 2;
    for (int block = 0; block < row_bytes; block += 16) {
      const int width = row_bytes - block < 16 ? row_bytes - block : 16;
      uint8_t* at = to + (int64_t)block * s.page_size + quad * 4 * width + u;
      for (int r = 0; r < width; r++) at[r * 4] = row[block + r];
    }
  }
}

// One plane of keys or values: `channels` fields of each token's codes.
static void store_plane(PageBuffers& b, const Slots& s, int channels, uint8_t* to, int bits, int shift) {
  const int row_bytes = row_bytes_of(channels, bits);
  if (row_bytes * 8 / bits > channels) __builtin_memset(b.rows, 0, (size_t)s.count * row_bytes);
  pack_rows(b, s.count, channels, row_bytes, bits, shift);
  if (s.count < s.page_size) scatter_rows(b, s, to, row_bytes);
  else if (s.is_key) interleave_keys(b, to, s.page_size, row_bytes);
  else interleave_values(b, to, s.page_size, row_bytes);
}

template <int DTYPE>
static void store_raw(const PageBuffers& b, uint8_t* to, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  for (int t = 0; t < page_size; t++)
    for (int c = 0; c < head_dim; c += VL)
      store_bits<DTYPE>(to, (int64_t)t * head_dim + c, to_bits<DTYPE>(load(b.x + (int64_t)t * width + c)),
                        head_dim - c < VL ? head_dim - c : VL);
}

static void store_raw_rows(const PageBuffers& b, uint8_t* to, int dtype, int count, int head_dim) {
  if (dtype == FLOAT32) store_raw<FLOAT32>(b, to, count, head_dim);
  else if (dtype == FLOAT16) store_raw<FLOAT16>(b, to, count, head_dim);
  else store_raw<BFLOAT16>(b, to, count, head_dim);
}

}  // namespace
