// Low planes of banded codes (docs/formats.md, quant/banded.py): what they add to the scores and outputs of the pages that they refine.
//
// A code of which r says in which of P = 2^bits parts of its cell a number lies, less the code's own level, in halves of a part of an inner cell:
//
//   2 r + 1 - P inside,    4 r + 2 - P of the highest code,    4 r + 2 - 3 P of the lowest,    8 r + 4 - 4 P of a band without bits
//
// Keys meet 8-bit integers of the query (banded_keys.h), values 8-bit probabilities, as their codes do.
#pragma once
#include <stdint.h>

#include "banded_keys.h"
#include "dots.h"
#include "state.h"

namespace {

// Steps of every byte's code and part, low_middle above those of the table and so never negative; top: the highest code, above 0.
template <int BITS>
INLINE vi low_steps(vi codes, vi parts, int top) {
  constexpr int P = 1 << BITS;
  static_assert(OUTER_CELL == 2 && ONLY_CELL == 4, "steps of the table");
  typedef int8_t bytes __attribute__((vector_size(VL * 4)));
  const vi lowest = (vi)((bytes)codes == (bytes)vi{}), highest = (vi)((bytes)codes == (bytes)splat_int((int)(top * 0x01010101u))), outer = lowest | highest;
  const vi inside = (parts << 1) + splat_int((2 * P - 1) * 0x01010101), outside = (parts << 2) + (highest & splat_int(2 * P * 0x01010101));
  return (inside & ~outer) | (outside & outer);
}

// Adds what the low planes say to NH rows' scores of the block's tokens.
template <int BITS, int NH>
static void key_low(const KeyArgs& a) {
  const Chunk& c = *a.chunk;
  const BandPieces& list = *a.pieces;
  const vi mask = splat_int(((1 << BITS) - 1) * 0x01010101);
  constexpr int V = NH <= BAND_ROWS_OF_TWO ? 2 : 1;  // as in key_banded
  for (int t = 0; t < a.tokens; t += V * VL) {
    const int64_t tile = a.first_tile + t / TILE, low_next = VL < TILE ? VL * 4 : list.low_tile_bytes;
    const uint8_t *page = a.page + t % TILE * 4, *low = a.page + a.low + tile * list.low_tile_bytes + t % TILE * 4;
    vf s[V][NH] = {};
    for (int i = 0; i < list.bands; i++) {
      const LowBand& band = list.low[i];
      const uint8_t* q = c.qw[0] + i * (BAND * NARROW_Q_BYTES);
      vi sums[V][NH] = {};
#pragma GCC unroll 4
      for (int n = 0; n < BAND / 4; n++) {
        const BandWord word = band.word[n];
        if (word.first && (t % TILE == 0 || V * VL > TILE)) fetch(low + word.offset + a.low_ahead);
        vi steps[V], codes[V] = {};
        for (int v = 0; v < V; v++) steps[v] = (vi)((vu)load_int(low + v * low_next + word.offset) >> word.shift) & mask;
        for (int k = 0; k < band.pieces; k++) {
          const BandCodes& piece = list.piece[band.piece[k]];
          vi x[V];
          if (piece.low_bits) load_codes<V, true, false>(piece, page, tile, n, 0, false, x);
          else load_codes<V, false, false>(piece, page, tile, n, 0, false, x);
          for (int v = 0; v < V; v++) codes[v] |= x[v] << band.shift[k];
        }
        if (band.top)
          for (int v = 0; v < V; v++) steps[v] = low_steps<BITS>(codes[v], steps[v], band.top);
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          const BandQuery row = band_query(q + h * Q_STRIDE + 4 * n * NARROW_Q_BYTES);
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) add_band_word(sums[v][h], steps[v], row);
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) s[v][h] += to_float(sums[v][h]) * c.low_scale[i][h];
    }
    for (int v = 0; v < V; v++)
      for (int h = 0; h < NH; h++) {
        float* to = a.s + h * BLOCK + t + v * VL;
        store(to, load(to) + s[v][h] * load(a.scale + t + v * VL));
      }
  }
}

// Words of a plane of values for VL neighbouring channels: four by four where they do not lie side by side.
struct LowWords {
  const uint8_t* at[VL / 4];  // of the first quad
  int64_t quad[VL / 4];       // bytes from quad to quad
  vi shift;
  bool together;
};

static LowWords low_words(const ValueArgs& a, const uint8_t* plane, int bits, int channel) {
  const int row_bytes = row_bytes_of(a.head_dim, bits);
  LowWords w = {};
  w.together = true;
  for (int i = 0; i < VL / 4; i++) {
    const int at = channel + 4 * i < a.head_dim ? channel + 4 * i : channel, r = at % row_bytes, block = r / 16 * 16;
    const int width = row_bytes - block < 16 ? row_bytes - block : 16;
    w.at[i] = plane + (int64_t)block * a.page_size + (int64_t)a.first_token * width + (r - block) * 4;
    w.quad[i] = 4 * width;
    for (int k = 0; k < 4; k++) w.shift[4 * i + k] = at / row_bytes * bits;
    w.together = w.together && w.at[i] == w.at[0] + 16 * i;
  }
  return w;
}

template <bool TOGETHER>
INLINE vi low_fields(const LowWords& w, int64_t quad, int bits) {
  vi words;
  if (TOGETHER) {
    words = load_int(w.at[0] + quad * w.quad[0]);
  } else {
    for (int i = 0; i < VL / 4; i++) __builtin_memcpy((char*)&words + 16 * i, w.at[i] + quad * w.quad[i], 16);
  }
  return (vi)((vu)words >> (vu)w.shift) & splat_int(((1 << bits) - 1) * 0x01010101);
}

// The planes of VL channels of values: the code's high bits, its lowest one where it has 3, the low plane.
struct LowPlanes {
  LowWords high, last, low;
};

template <int BITS, int NH, bool TOGETHER>
INLINE void low_outputs(const ValueArgs& a, const LowPlanes& planes, LowSums* sums) {
  typedef int8_t bytes __attribute__((vector_size(VL * 4)));
  constexpr int RUN = BITS == 4 ? 1 : LOW_RUN;
  const int bits = a.band_bits, quads = round_up(a.tokens, 8) / 4;
  const bool three = bits == 3;
  for (int first = 0; first < quads; first += RUN) {
    const int end = quads - first < RUN ? quads : first + RUN;
    for (int quad = first; quad < end; quad++) {
      fetch(planes.low.at[0] + quad * planes.low.quad[0] + a.low_ahead);
      vi codes = low_fields<TOGETHER>(planes.high, quad, three ? 2 : bits);
      if (three) codes = (codes << 1) | low_fields<TOGETHER>(planes.last, quad, 1);
      const vi steps = low_steps<BITS>(codes, low_fields<TOGETHER>(planes.low, quad, BITS), (1 << bits) - 1);
      const vi centered = (vi)((bytes)steps - (bytes)splat_int(low_middle(BITS) * 0x01010101));
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) add_low_word(sums[h], centered, a.block->pw[0][h], 4 * quad);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) end_low_run(sums[h]);
  }
}

// Adds what the low planes say to the outputs of values whose codes have one width.
template <int BITS, int NH>
static void value_low(const ValueArgs& a) {
  constexpr float part = 0.5f / (float)(1 << BITS);
  const bool three = a.band_bits == 3;
  for (int channel = 0; channel < a.head_dim; channel += VL) {
    LowPlanes planes = {low_words(a, a.plane[0], three ? 2 : a.band_bits, channel), {}, low_words(a, a.plane[0] + a.low, BITS, channel)};
    planes.last = three ? low_words(a, a.plane[1], 1, channel) : planes.high;
    LowSums sums[NH] = {};
    if (planes.high.together && planes.last.together && planes.low.together) low_outputs<BITS, NH, true>(a, planes, sums);
    else low_outputs<BITS, NH, false>(a, planes, sums);
    const vi inside = iota() < splat_int(a.head_dim - channel);
    for (int h = 0; h < NH; h++) {
      float* to = a.chunk->acc[h] + channel;
      store(to, load(to) + select(inside, low_sums(sums[h]) * (a.block->p_scale[0][h] * part), vf{}));
    }
  }
}

}  // namespace
