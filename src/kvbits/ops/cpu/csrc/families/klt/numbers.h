// Trellis codes as numbers, a vector of tokens (keys) or channels (values) at a time: for tiles and for unpacking.
#pragma once
#include "keys.h"
#include "values.h"

namespace {

// Indices of a band's 16 channels, VL tokens in a word each; of 8 bits the whole code.
template <int WIDTH>
INLINE void band_indices(const BandAt& at, const BandPiece* piece, vi (&words)[RUNS]) {
  vi x[1][RUNS];
  load_indices<WIDTH, 1>(at, piece[0], x);
  for (int i = 0; i < RUNS; i++) words[i] = x[0][i];
  if constexpr (WIDTH == 8) {
    load_indices<WIDTH, 1>(at, piece[1], x);
    for (int i = 0; i < RUNS; i++) words[i] = words[i] << 4 | x[0][i];
  }
}

static void any_band_indices(const BandAt& at, const BandPiece* piece, vi (&words)[RUNS]) {
  switch (piece->width) {
    case 1: return band_indices<1>(at, piece, words);
    case 2: return band_indices<2>(at, piece, words);
    case 3: return band_indices<3>(at, piece, words);
    case 4: return band_indices<4>(at, piece, words);
    case 5: return band_indices<5>(at, piece, words);
    case 6: return band_indices<6>(at, piece, words);
    default: return band_indices<8>(at, piece, words);
  }
}

// Byte k of every word of levels as a number: 256 more than it.
template <int BITS>
INLINE vf level_number(vi words, int k) {
  if (BITS != 2) return above_256(words, 8 * k, 8);
  return above_256(words ^ (int)0x80808080, 8 * k, 8) - 128.0f;  // signed
}

}  // namespace
