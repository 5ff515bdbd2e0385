// What KVQuant's formats add to the scratch of an item: numbers that codes stand for, outliers taken apart.
#pragma once
#include <stdint.h>

#include "engine/attend/state.h"

namespace {

constexpr int LEVELS = 16;  // entries of a table, repeated where a format has fewer

// Some entries of a list, taken apart.
struct OutlierBatch {
  static constexpr int SIZE = 128;
  alignas(64) uint32_t place[SIZE];  // of the columns of token (low half) and channel (high half), in bytes
  alignas(64) int32_t upper[SIZE];   // that of the upper channel of a pair
  alignas(64) int32_t turn[SIZE];    // of its cosine and sine, in bytes
  alignas(64) float value[SIZE], low[SIZE], high[SIZE];
};

// Scratch of one item.
struct Decoded {
  alignas(64) float levels[LEVELS];                 // of the keys' codes
  alignas(64) float value_levels[LEVELS];
  alignas(64) float table[MAX_HEAD_DIM][LEVELS];    // of each key channel: level * scale + bias
  alignas(64) uint32_t codes[MAX_HEAD_DIM / 4][TILE];  // of a key tile: four neighbouring channels in a word
  alignas(64) float key[MAX_HEAD_DIM][TILE];
  alignas(64) uint32_t value_codes[BLOCK / 4 * (MAX_HEAD_DIM + 32)];  // [quad][channels]: four tokens (a quad) in a word
  alignas(64) float factor[BLOCK];                  // what the scale of a token is multiplied with
  alignas(64) float ones[BLOCK];
  OutlierBatch batch;
  alignas(64) float block_columns[BLOCK * ROWS];    // scores that outliers add, or probabilities
  bool stretched[BLOCK / TILE];                     // whether any factor of the tile is not 1
  int key_run[2], value_run[2];                     // the block's part of the lists of outliers
};

}  // namespace
