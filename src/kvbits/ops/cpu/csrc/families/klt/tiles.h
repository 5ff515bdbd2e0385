// Blocks of trellis codes as tiles of B, and queries in the basis of a page's frame as tiles of A.
#pragma once
#include "engine/tiles/state.h"
// behind the width of vectors
#include "basis.h"
#include "engine/tiles/rows.h"
#include "families/plain/tiles.h"
#include "hadamard.h"
#include "numbers.h"
#include "offsets.h"

namespace {

// Of the current part.
struct KltTiles {
  Angles angles;
  BandPieces pieces;
  // of the kv head: the keys' basis and the rows of offsets, [term][step][column tile] tiles of B
  alignas(64) uint16_t basis[TERMS * MAX_HEAD_DIM * MAX_HEAD_DIM];
  alignas(64) uint16_t offsets[TERMS * MAX_HEAD_DIM * OFFSET_TILES * TILE_COLUMNS];
  // of a pair of tiles of rows
  alignas(64) float turned[PAIR * TILE_ROWS * MAX_HEAD_DIM];                   // [row][head_dim]
  alignas(64) uint16_t turned_terms[TERMS * PAIR * TILE_ROWS * MAX_HEAD_DIM];  // [tile][term][step] tiles of A
  alignas(64) float product[OFFSET_TILES * TILE_COLUMNS * MAX_HEAD_DIM];
};

// Keys of a block in their basis, without their offsets, to its slices.
static void klt_keys_to_tiles(const kvbits_tensor& t, const BandPieces& list, const Block& b, int d, const PageView& at,
                              int token, int n, uint16_t* to) {
  const BandPiece* of_band[MAX_GROUPS] = {};
  for (int i = list.count - 1; i >= 0; i--) of_band[list.piece[i].band] = &list.piece[i];
  for (int i = 0; i * TILE < n; i++) {
    const BandAt place = {at.page, token / TILE + i, at.ahead, true};
    const vf scale = load(b.k_scale[0] + i * TILE);
    for (int band = 0; band < d / BAND; band += 2) {
      vi words[2][RUNS] = {};
      vf factor[2] = {}, add[2] = {};
      for (int k = 0; k < 2; k++) {
        const int width = t.bands[band + k];
        if (!width) continue;
        any_band_indices(place, of_band[band + k], words[k]);
        factor[k] = scale * (width == 8 ? 1.0f : 0.5f);
        add[k] = factor[k] * -256.0f - scale * middle_of(width);
      }
      uint16_t* rows = to + key_tile(band * BAND, i, d);
      for (int run = 0; run < RUNS; run++)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
          store_pairs<1>(rows + (4 * run + k) * TILE_DEPTH, 0, above_256(words[0][run], 8 * k, 8) * factor[0] + add[0],
                         above_256(words[1][run], 8 * k, 8) * factor[1] + add[1]);
    }
  }
}

template <int BITS, class Levels>
static void levels_to_tiles(const Levels& levels, const Block& b, int d, int n, int first, uint16_t* to) {
  constexpr float WEIGHT = level_weight(BITS);
  const int column_tiles = d / TILE_COLUMNS, quads = n > TILE_DEPTH ? 16 : 8, stride = d / 4;
  for (int quad = 0; quad < quads; quad++) {
    if (quad / 4 % 2) continue;  // pairs of tokens t and t + 16
    vi x[4], y[4];
    levels.load(quad, x);
    levels.load(quad + 4, y);
    for (int k = 0; k < 4; k++) {
      const int place = token_of(quad, k);
      const vf p = splat(b.v_scale[0][place] * WEIGHT), q = splat(b.v_scale[0][place + VL] * WEIGHT);
      const vf p_add = p * (-256.0f - middle_index(BITS)), q_add = q * (-256.0f - middle_index(BITS));
#pragma GCC unroll 4
      for (int run = 0; run < 4; run++)
        store_pairs<1>(to + value_row(place, (4 * first + run * stride) / TILE_COLUMNS, column_tiles), 0,
                       level_number<BITS>(x[run], k) * p + p_add, level_number<BITS>(y[run], k) * q + q_add);
    }
  }
}

template <int BITS>
static void klt_values_to_tiles(const ValueArgs& a, const Block& b, uint16_t* to) {
  for (int first = 0; first < a.head_dim / RING; first += RINGS) {
    FieldLevels<BITS, true> levels;
    levels.ahead = a.ahead;
    levels.fitted = a.fitted;
    levels.find(a, first, RINGS);
    if (levels.whole()) levels_to_tiles<BITS>(levels, b, a.head_dim, a.tokens, first, to);
    else levels_to_tiles<BITS>(*(FieldLevels<BITS, false>*)&levels, b, a.head_dim, a.tokens, first, to);
  }
}

static void any_klt_values_to_tiles(const Tensor& t, const Block& b, const PageView& at, int page_size, int token,
                                    int n, uint16_t* to) {
  ValueArgs a = {};
  for (int i = 0; i < 2; i++) {
    a.row_bytes[i] = t.row_bytes[i];
    a.plane[i] = at.page + t.t->plane_offset[i];
  }
  a.head_dim = t.head_dim;
  a.tokens = n;
  a.page_size = page_size;
  a.first_token = token;
  a.fitted = t.t->fitted;
  a.ahead = at.ahead;
  switch (t.t->bands[0]) {
    case 2: return klt_values_to_tiles<2>(a, b, to);
    case 3: return klt_values_to_tiles<3>(a, b, to);
    default: return klt_values_to_tiles<4>(a, b, to);
  }
}

static_assert(OFFSETS - 1 == PAIR * TILE_COLUMNS, "two column tiles are the rows of frames behind the first");

// Of a kv head: the matrix of the basis, and the rows of offsets times it: a query that is turned to a frame is
// multiplied by both.
static void klt_matrices_to_tiles(KltTiles& w, const kvbits_tensor& t, int kv_head, int d) {
  const float* matrix = t.from_basis ? t.from_basis + (int64_t)kv_head * d * d : nullptr;  // [d / 16][d][16]
  if (t.from_basis)
    matrix_to_tiles([=](int k, int j) { return load(matrix + ((int64_t)j * d + k) * 16); }, d, d / TILE_COLUMNS,
                    w.basis);
  if (!t.offsets) return;
  const float* offsets = t.offsets + (int64_t)kv_head * OFFSETS * d;
  float* turned = w.product;  // [d][OFFSET_TILES][16]
  __builtin_memset(turned, 0, sizeof(float) * d * OFFSET_TILES * TILE_COLUMNS);
  for (int r = 0; r < OFFSETS; r++)
    for (int k = 0; k < d; k++) {
      vf sums = {};
      if (t.from_basis)
        for (int c = 0; c < d; c += VL)
          sums += load(matrix + ((int64_t)(c / 16) * d + k) * 16) * load(offsets + r * d + c);
      turned[k * OFFSET_TILES * TILE_COLUMNS + r] = t.from_basis ? sum(sums) : offsets[r * d + k];
    }
  matrix_to_tiles([=](int k, int j) { return load(turned + (k * OFFSET_TILES + j) * TILE_COLUMNS); }, d, OFFSET_TILES,
                  w.offsets);
}

// The queries of a pair of tiles of rows as keys of the frame at `start`, which `angles` are of, are multiplied by
// them, and what its offsets add to their scores.
static void enter_pair_frame(TileScratch& item, KltTiles& w, const kvbits_tensor& t, int number, int64_t start, int d) {
  const float* q = item.q + (int64_t)number * TILE_ROWS * d;
  const int64_t rows = (int64_t)TILE_ROWS * d;  // numbers of a tile of rows
  const int half = d / 2, steps = d / TILE_DEPTH;
  if (t.from_basis) {
    for (int i = 0; i < half; i += VL) {
      const vf cos = __builtin_convertvector(*(const vd_mem*)(w.angles.cos + i), vf),
               sin = __builtin_convertvector(*(const vd_mem*)(w.angles.sin + i), vf);
      for (int h = 0; h < PAIR * TILE_ROWS; h++) {
        const vf a = load(q + h * d + i), b = load(q + h * d + half + i);
        store(w.turned + h * d + i, a * cos + b * sin);
        store(w.turned + h * d + half + i, b * cos - a * sin);
      }
    }
  } else {
    __builtin_memcpy(w.turned, q, PAIR * rows * sizeof(float));
    for (int h = 0; t.hadamard && h < PAIR * TILE_ROWS; h++) hadamard(w.turned + h * d, d);
  }
  for (int i = 0; i < PAIR; i++) rows_to_tiles<2>(w.turned + i * rows, d, d, w.turned_terms + i * TERMS * rows, rows);
  Factor turned = {w.turned_terms, rows, TILE_NUMBERS, 2};
  if (t.offsets)  // the last row is that of position 0
    item.squares.add(turned, TERMS * rows,
                     {w.offsets, (int64_t)d * OFFSET_TILES * TILE_COLUMNS, OFFSET_TILES * TILE_NUMBERS, 2}, steps,
                     start ? PAIR : OFFSET_TILES, item.tile[number].of_offsets,
                     item.tile[1].of_offsets - item.tile[0].of_offsets, false);
  turned.terms = 1;  // levels have few bits, and one term of queries serves them
  if (t.from_basis)
    item.squares.add(turned, TERMS * rows, {w.basis, 0, (int64_t)d * TILE_DEPTH, 1}, steps, d / TILE_COLUMNS, w.product,
                     rows, false);
  item.squares.finish();
  for (int i = 0; i < PAIR; i++) {
    uint16_t* to = item.in_basis + (number + i) * rows;
    if (!t.from_basis) __builtin_memcpy(to, w.turned_terms + i * TERMS * rows, rows * sizeof(uint16_t));
    for (int c = 0; t.from_basis && c < d; c += TILE_DEPTH)
      for (int h = 0; h < TILE_ROWS; h++) {
        const float* at = w.product + i * rows + c * TILE_ROWS + h * TILE_COLUMNS;
        store_pairs<1>(to + c / TILE_DEPTH * TILE_NUMBERS + h * TILE_DEPTH, 0, load(at), load(at + TILE_SUMS));
      }
  }
}

// Outputs of all rows to the basis of a part's values, and out of it again: the matrix is its own inverse.
static void turn_tile_outputs(TileScratch& w, int tiles, int d) {
  alignas(64) float row[MAX_HEAD_DIM];
  for (int i = 0; i < tiles; i++)
    for (int h = 0; h < TILE_ROWS; h++) {
      float* acc = w.acc + (int64_t)i * TILE_ROWS * d;
      copy_outputs(acc, h, d, row);
      hadamard(row, d);
      for (int c = 0; c < d; c += VL) store(acc + c * TILE_ROWS + h * TILE_COLUMNS, load(row + c));
    }
}

}  // namespace
