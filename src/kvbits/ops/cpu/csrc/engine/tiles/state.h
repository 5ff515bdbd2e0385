// Query rows of a work item and the block of keys and values that they share, as tiles.
#pragma once
#include <stdint.h>

#include "numbers.h"
#include "squares.h"
// behind the width of vectors
#include "engine/attend/part.h"
#include "engine/attend/plan.h"

namespace {

constexpr int ITEM_TILES = 32;  // tiles of query rows that share a block of numbers: decoding them costs a tenth then
constexpr int MIN_TILE_ROWS = 2 * TILE_ROWS;  // for fewer, decoding a block takes longer than their dot products
constexpr int TERMS = 2;                      // most terms of a number
constexpr int BLOCK_TOKENS = 128;  // that share a step of softmax: outputs are loaded and stored once for them
constexpr int BLOCK_TILES = BLOCK_TOKENS / TILE_COLUMNS;                                 // token tiles of a block
constexpr int OFFSET_TILES = (OFFSETS + 2 * TILE_COLUMNS - 1) / (2 * TILE_COLUMNS) * 2;  // products take them in twos
constexpr int SCALED_GROUPS = 4;  // most groups of channels of keys whose scales are left to scores
constexpr int PAIR = 2;           // tiles of rows that are multiplied together
constexpr int BLOCK_STEPS = BLOCK_TOKENS / TILE_DEPTH;  // depth of a block's values in tiles

// 16 query rows.
struct QueryTile {
  float m[TILE_ROWS];       // the maximum that probabilities are relative to (log2)
  float shrink[TILE_ROWS];  // what the outputs are still to be multiplied by, where it was raised
  bool raised;
  alignas(64) float l[TILE_ROWS][VL];  // sum of 2^(s - m), one partial sum per lane
  // what each row of offsets adds to a score, or the mean of each slice, [column tile] sums, where keys have some
  alignas(64) float of_offsets[OFFSET_TILES * TILE_SUMS];
  int64_t position[TILE_ROWS];
  int64_t oldest, newest;  // of the rows, padding included
  int rows;
};

// TILE_DEPTH tokens of a panel, as many as values have at a step.
struct Slice {
  int64_t position;
  int tokens;
  int offset_row[2];  // of each token tile, where keys have offsets
};

// Tokens that are decoded before rows are multiplied with them: keys and values come from the L2 cache then, while
// queries and outputs of two tiles of rows stay in L1.
constexpr int PANEL_SLICES = 16;
constexpr int PANEL_NUMBERS = PANEL_SLICES * TILE_DEPTH * MAX_HEAD_DIM;

constexpr int SCORE_SUMS = BLOCK_TILES * TILE_SUMS, WEIGHT_NUMBERS = TERMS * BLOCK_STEPS * TILE_NUMBERS;

// Numbers of a slice, and of a term of the panel.
INLINE int64_t slice_numbers(int d) { return (int64_t)TILE_DEPTH * d; }
INLINE int64_t panel_numbers(int d) { return PANEL_SLICES * slice_numbers(d); }

// All of an item. Numbers of a tile of rows lie side by side, and tile after tile.
struct TileScratch {
  Block block;
  QueryTile tile[ITEM_TILES];
  alignas(64) float q[ITEM_TILES * TILE_ROWS * MAX_HEAD_DIM];                   // [tile][row][head_dim]
  alignas(64) uint16_t q_terms[ITEM_TILES * TERMS * TILE_ROWS * MAX_HEAD_DIM];  // [tile][term][step] tiles of A
  alignas(64) uint16_t in_basis[ITEM_TILES * TILE_ROWS * MAX_HEAD_DIM];  // likewise, of one term, in a basis of keys
  alignas(64) float acc[ITEM_TILES * TILE_ROWS * MAX_HEAD_DIM];          // [tile][column tile] sums
  int slices;                                                            // of the panel, that are there
  Slice slice[PANEL_SLICES];
  alignas(64) uint16_t keys[TERMS * PANEL_NUMBERS];    // [term][slice][step][2 token tiles] tiles of B
  alignas(64) uint16_t values[TERMS * PANEL_NUMBERS];  // [term][slice][column tile] tiles of B
  // [block % 2][tile of a pair] of scores, [group][token tile] sums, and of probabilities, [term][step] tiles of A
  alignas(64) float s[2][PAIR * SCALED_GROUPS * SCORE_SUMS];
  alignas(64) uint16_t p[2][PAIR * WEIGHT_NUMBERS];
  // scales of the panel's keys that are left to scores, by group, and means of its slices' keys, [head_dim][2 tiles]
  alignas(64) float k_scales[SCALED_GROUPS][PANEL_SLICES * TILE_DEPTH];
  alignas(64) float means[MAX_HEAD_DIM * PAIR * TILE_COLUMNS];
  alignas(64) uint16_t mean_tiles[TERMS * MAX_HEAD_DIM * PAIR * TILE_COLUMNS];  // [term][step][column tile] tiles of B
  Squares squares;
};

// Rows [16][stride] of n numbers as tiles of A, `apart` numbers from term to term.
template <int N_TERMS>
static void rows_to_tiles(const float* from, int64_t stride, int n, uint16_t* to, int64_t apart) {
  for (int h = 0; h < TILE_ROWS; h++)
    for (int c = 0; c < n; c += TILE_DEPTH)
      store_pairs<N_TERMS>(to + c / TILE_DEPTH * TILE_NUMBERS + h * TILE_DEPTH, apart, load(from + h * stride + c),
                           load(from + h * stride + c + VL));
}

// A matrix [n][columns], row k and column tile j from `at(k, j)`, as tiles of B.
template <class At>
static void matrix_to_tiles(const At& at, int n, int column_tiles, uint16_t* to) {
  const int64_t apart = (int64_t)n * column_tiles * TILE_COLUMNS;
  for (int step = 0; step < n / TILE_DEPTH; step++)
    for (int j = 0; j < column_tiles; j++)
      for (int k = 0; k < VL; k++)
        store_pairs<2>(to + ((int64_t)step * column_tiles + j) * TILE_NUMBERS + k * TILE_DEPTH, apart,
                       at(step * TILE_DEPTH + k, j), at(step * TILE_DEPTH + VL + k, j));
}

}  // namespace
