// Keys of banded codes, and the bases that keys and values are stored in (docs/formats.md).
//
// A code is the sum of its planes' fields, each times 2^shift, and so is the middle of its range. A band's fields in one plane are a piece: one integer dot
// product of up to 16 channels, with a scale of its own.
//
//   score(h, t) = k_scale[t] * (sum over pieces of piece_scale[piece][h] * dot(q_int, fields) + q_zero[h]) + q' . mean
//
// with q' the query in the page's basis, made once per frame in fp32, and 8-bit integers of it with one scale per band.
#pragma once
#include <stdint.h>

#include "../hadamard.h"
#include "angles.h"
#include "dots.h"
#include "softmax.h"

namespace {

// Four channels of a tile's tokens.
struct BandWord {
  int32_t offset;  // of the tile's word, bytes from the head struct to that of the page's first tile
  int16_t shift;   // of the field in each byte
  int16_t q;       // of the channels' integers in a row of integer queries, bytes
};

// Where the last band is narrower, integer queries are 0 behind it and its words meet them again.
struct BandPiece {
  BandWord word[BAND / 4];
  int32_t mask;        // of a field in each byte
  int32_t tile_bytes;  // from tile to tile
  int32_t band;
  float weight;        // 2^shift of the fields in their codes
};

// A band of a low plane, and which pieces its codes are made of (banded_low.h).
struct LowBand {
  BandWord word[BAND / 4];  // offsets from the plane's own start
  int16_t top, pieces;      // the highest code, 0 without bits
  int16_t piece[2], shift[2];
};

// All of a head. Fields of 8 bits are two of 4, whose products fit 16 bits.
struct BandPieces {
  int32_t count;
  BandPiece piece[2 * MAX_GROUPS];
  int32_t low_bits, bands, low_tile_bytes;  // of a low plane; 0 without one
  LowBand low[MAX_GROUPS];
};
static_assert(MAX_GROUPS * BAND >= MAX_HEAD_DIM, "bands are counted as groups");

// The four channels from `channel` on of a row whose plane begins at `offset`, and q of a band's channels from c on.
static BandWord band_word(int offset, int channel, int row_bytes, int bits, int band, int c) {
  return {offset + channel % row_bytes * TILE, (int16_t)(channel / row_bytes * bits), (int16_t)((band * BAND + c) * NARROW_Q_BYTES)};
}

static void list_low_bands(BandPieces& list, const kvbits_tensor& t, int head_dim, int bits) {
  const int row_bytes = row_bytes_of(head_dim, bits);
  list.low_tile_bytes = row_bytes * TILE;
  for (int i = 0; i < list.bands; i++) {
    LowBand& band = list.low[i];
    band.top = (int16_t)((1 << t.bands[i]) - 1);
    band.pieces = 0;
    for (int c = 0; c < BAND; c += 4) band.word[c / 4] = band_word(0, i * BAND + (i * BAND + c < head_dim ? c : 0), row_bytes, bits, i, c);
  }
  for (int k = 0; k < list.count; k++) {
    LowBand& band = list.low[list.piece[k].band];
    band.piece[band.pieces] = (int16_t)k;
    band.shift[band.pieces++] = (int16_t)__builtin_ctz((unsigned)list.piece[k].weight);
  }
}

static void list_pieces(BandPieces& list, const kvbits_tensor& t, int head_dim, int low_bits) {
  const int bands = (head_dim + BAND - 1) / BAND;
  auto channels_of = [&](int band) { return head_dim - band * BAND < BAND ? head_dim - band * BAND : BAND; };
  int stored = 0;
  list.count = 0;
  list.bands = bands;
  list.low_bits = low_bits;
  for (int bits = 8; bits; bits /= 2) {
    int channels = 0;
    for (int i = 0; i < bands; i++) channels += t.bands[i] & bits ? channels_of(i) : 0;
    if (!channels) continue;
    const int row_bytes = row_bytes_of(channels, bits), offset = t.plane_offset[stored++], field_bits = bits < 4 ? bits : 4;
    for (int i = 0, at = 0; i < bands; i++) {
      if (!(t.bands[i] & bits)) continue;
      for (int low = 0; low < bits; low += field_bits) {
        BandPiece& piece = list.piece[list.count++];
        piece.mask = ((1 << field_bits) - 1) * 0x01010101;
        piece.tile_bytes = row_bytes * TILE;
        piece.band = i;
        piece.weight = (float)(1 << ((t.bands[i] & (bits - 1)) + low));
        for (int c = 0; c < BAND; c += 4) {
          piece.word[c / 4] = band_word(offset, at + (c < channels_of(i) ? c : 0), row_bytes, bits, i, c);
          piece.word[c / 4].shift += (int16_t)low;
        }
      }
      at += channels_of(i);
    }
  }
  if (low_bits) list_low_bands(list, t, head_dim, low_bits);
}

// Scores of NH rows against the block's tokens.
template <int FMT, int NH>
static void key_banded(const KeyArgs& a) {
  static_assert(is_banded(FMT), "one format");
  const Chunk& c = *a.chunk;
  const BandPieces& list = *a.pieces;
  constexpr int V = NH <= BAND_ROWS_OF_TWO ? 2 : 1;  // neighbouring vectors of tokens that share what is loaded of queries and lists
  for (int t = 0; t < a.tokens; t += V * VL) {
    const int tile = a.first_tile + t / TILE;
    const uint8_t* at = a.page + t % TILE * 4;
    vf s[V][NH];
    for (int v = 0; v < V; v++)
      for (int h = 0; h < NH; h++) s[v][h] = splat(c.q_zero[0][h]);
    for (int i = 0; i < list.count; i++) {
      const BandPiece& piece = list.piece[i];
      const uint8_t* src = at + (int64_t)tile * piece.tile_bytes;
      const int64_t next = VL < TILE ? VL * 4 : piece.tile_bytes;
      const vi mask = splat_int(piece.mask);
      BandSums sums[V][NH] = {};
#pragma GCC unroll 4
      for (int n = 0; n < BAND / 4; n++) {
        const BandWord word = piece.word[n];
        if (!word.shift) {  // a line is fetched once, whatever else it holds
          if (t % TILE == 0) fetch(src + word.offset + a.ahead);
          if (V * VL > TILE) fetch(src + next + word.offset + a.ahead);
        }
        vi fields[V];
        for (int v = 0; v < V; v++) fields[v] = (vi)((vu)load_int(src + v * next + word.offset) >> word.shift) & mask;
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
          for (int v = 0; v < V; v++) add_band_word(sums[v][h], fields[v], c.qw[h] + word.q);
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) s[v][h] += band_sums(sums[v][h]) * c.piece_scale[i][h];
    }
    for (int v = 0; v < V; v++)
      for (int h = 0; h < NH; h++) store(a.s + h * BLOCK + t + v * VL, s[v][h] * load(a.scale + t + v * VL));
  }
}

// NH rows times a matrix [columns / 16][n][16], its columns rounded up to 16.
template <int NH>
static void multiply_rows(const float (*from)[ROW_STRIDE], const float* matrix, int n, float (*to)[ROW_STRIDE]) {
  constexpr int J = 16 / VL, CHAINS = NH == 1 ? 4 : NH == 2 ? 2 : 1;  // sums that do not wait for each other
  const int width = round_up(n, 16);
  for (int j = 0; j < width; j += 16) {
    vf sums[CHAINS][NH][J] = {};
    for (int i = 0; i < n; i += CHAINS)
#pragma GCC unroll 4
      for (int k = 0; k < CHAINS; k++)
#pragma GCC unroll 4
        for (int v = 0; v < J; v++) {
          const vf m = load(matrix + (int64_t)j * n + (i + k) * 16 + v * VL);
#pragma GCC unroll 4
          for (int h = 0; h < NH; h++) sums[k][h][v] += m * from[h][i + k];
        }
    for (int h = 0; h < NH; h++)
      for (int v = 0; v < J; v++) {
        vf x = sums[0][h][v];
        for (int k = 1; k < CHAINS; k++) x += sums[k][h][v];
        store(to[h] + j + v * VL, x);
      }
  }
}

// A chunk's queries as keys of the page's frame meet them, in `folded`, zeros behind them.
static void queries_in_basis(Chunk& c, const kvbits_tensor& t, const Angles& angles, int kv_head, int head_dim) {
  const int width = round_up(head_dim, 16);
  if (t.from_basis) {
    alignas(64) float turned[ROWS][ROW_STRIDE];
    turn_back(c, angles, head_dim, turned);
    const float* matrix = t.from_basis + (int64_t)kv_head * head_dim * width;
    for (int h = 0; h < c.rows; h += 4) {
      if (c.rows - h == 1) multiply_rows<1>(turned + h, matrix, head_dim, c.folded + h);
      else if (c.rows - h == 2) multiply_rows<2>(turned + h, matrix, head_dim, c.folded + h);
      else if (c.rows - h == 3) multiply_rows<3>(turned + h, matrix, head_dim, c.folded + h);
      else multiply_rows<4>(turned + h, matrix, head_dim, c.folded + h);
    }
    return;
  }
  for (int h = 0; h < c.rows; h++) {
    __builtin_memcpy(c.folded[h], c.q[h], head_dim * sizeof(float));
    __builtin_memset(c.folded[h] + head_dim, 0, (width - head_dim) * sizeof(float));
    if (t.hadamard) hadamard(c.folded[h], head_dim);
  }
}

// By how much the steps of a low plane's parts (banded_low.h) are above those that they stand for.
constexpr int low_middle(int bits) { return 3 * (1 << bits) - 2; }

// Integers of `folded`, and what the middles of the codes' ranges take off the scores.
static void quantize_by_band(Chunk& c, const kvbits_tensor& t, const BandPieces& list, int head_dim) {
  const int bands = (head_dim + BAND - 1) / BAND;
  quantize_query<false>(c, c.folded[0], bands, BAND, 0.0f);
  for (int h = 0; h < c.rows; h++) {
    float zero = 0.0f;
    for (int i = 0; i < bands; i++) zero += 0.5f * (float)((1 << t.bands[i]) - 1) * c.q_sum[i][h];
    if (list.low_bits) {
      const float part = 0.5f / (float)(1 << list.low_bits);
      for (int i = 0; i < bands; i++) {
        const int step = t.bands[i] ? 1 : 2 * ONLY_CELL, middle = t.bands[i] ? low_middle(list.low_bits) : ONLY_CELL * ((1 << list.low_bits) - 1);
        c.low_scale[i][h] = c.q_scale[i][h] * part * (float)step;
        zero += part * (float)middle * c.q_sum[i][h];
      }
    }
    c.q_zero[0][h] = -zero;
    for (int i = 0; i < list.count; i++) c.piece_scale[i][h] = c.q_scale[list.piece[i].band][h] * list.piece[i].weight;
  }
}

}  // namespace
