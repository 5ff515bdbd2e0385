// Words of values: a byte of four tokens' rows each, in vectors of channels. Four neighbouring channels lie side by side
// in any page, and a ring of trellis codes has four channels of each run.
#pragma once
#include <stdint.h>

#include "engine/attend/state.h"

namespace {

constexpr int RING_LANES = RING / 4;
constexpr int RINGS = VL / RING_LANES;  // of a vector

// Where a plane has words of a vector's rings, at the block's first token.
struct RingWords {
  alignas(64) int32_t shift[VL];  // of their fields
  const uint8_t* at[RINGS];
  int quad_bytes[RINGS], field[RINGS];
  bool whole;    // the rings lie side by side
  bool fetches;  // lines that no other vector fetches
};

INLINE void set_shift(RingWords& w, int ring) {
  for (int k = 0; k < RING_LANES; k++) w.shift[ring * RING_LANES + k] = w.field[ring];
}

// A run of the ring at `channel`. The rings' quads of words are RING_LANES words each.
INLINE void find_run(const ValueArgs& a, int plane, int bits, int channel, int ring, RingWords& w) {
  const int rb = a.row_bytes[plane], field = channel / rb, r = channel - field * rb, block = r / 16 * 16,
            width = rb - block < 16 ? rb - block : 16;
  w.at[ring] = a.plane[plane] + (int64_t)block * a.page_size + a.first_token * width + (r - block) * 4;
  w.quad_bytes[ring] = 4 * width;
  w.field[ring] = field * bits;
}

// Words of the channels that lie `start` behind the first one of each of `count` rings from `first` on. Lanes behind the
// last ring have those of the first.
static void find_words(const ValueArgs& a, int plane, int bits, int start, int first, int count, RingWords& w) {
  const int rb = a.row_bytes[plane], channel = start + 4 * first, r = channel % rb;
  find_run(a, plane, bits, channel, 0, w);
  w.fetches = w.field[0] == 0;
  w.whole = count == RINGS && r / 16 == (r + VL - 1) / 16 && r + VL <= rb;
  store_int(w.shift, splat_int(w.field[0]));
  if (w.whole) {
    for (int i = 1; i < RINGS; i++) w.at[i] = w.at[0] + i * 16, w.quad_bytes[i] = w.quad_bytes[0];
    return;
  }
  for (int i = 0; i < RINGS; i++) {
    find_run(a, plane, bits, start + 4 * (i < count ? first + i : first), i, w);
    w.fetches |= w.field[i] == 0;
    set_shift(w, i);
  }
}

template <bool WHOLE>
INLINE vi load_rings(const RingWords& w, int quad, int64_t ahead) {
  if (WHOLE || RINGS == 1) {
    const uint8_t* at = w.at[0] + quad * w.quad_bytes[0];
    if (w.fetches) fetch(at + ahead);
    return load_int(at);
  }
  const uint8_t* at[RINGS];
  for (int i = 0; i < RINGS; i++) {
    at[i] = w.at[i] + quad * w.quad_bytes[i];
    if (w.fetches) fetch(at[i] + ahead);
  }
  return load_quads(at);
}

INLINE vi fields_at_bottom(const RingWords& w, vi x) { return (vi)((vu)x >> (vu)load_int(w.shift)); }

}  // namespace
