// Keys of banded codes (docs/reference/formats.md).
//
// A code is the sum of its planes' fields, each times 2^shift. A band's fields are joined to codes before one integer
// dot product; a band or two neighbours of the same width have one scale of the query's 8-bit integers:
//
//   score(h, t) = k_scale[t] * (sum over scales of q_scale[h] * dot(q_int, codes) + q_zero[h]) + q' . mean
//
// with q' the query in the page's basis (basis.h) and q_zero what the middles of the codes' ranges take off.
#pragma once
#include <stdint.h>

#include "engine/attend/dots.h"
#include "engine/attend/softmax.h"

namespace {

// Four channels of a tile's tokens in one plane.
struct BandWord {
  int32_t offset;  // of the tile's word, bytes from the head struct to that of the page's first tile
  int32_t shift;   // of the field in each byte, or by how much the word turns to have it in its place (BANDS_TURN)
  bool first;      // the lowest field of its byte
};

// A band's fields in one plane. Where the last band is narrower, integer queries are 0 behind it and its words meet
// them again.
struct BandFields {
  BandWord word[BAND / 4];
  int32_t mask;        // of a field in each byte; with BANDS_TURN in its place in the code
  int32_t tile_bytes;  // from tile to tile
};

// A band's codes, of one plane's fields or of two planes'. Codes of 8 bits are two of 4, the higher ones first: their
// products fit 16 bits.
struct BandCodes {
  BandFields high, low;
  int32_t low_bits;  // of `low`, 0 without it
  int32_t band;
  float weight;      // of a code
  bool ends;         // the dot products are complete, and take their scale
};

// All of a head.
struct BandPieces {
  int32_t count;
  BandCodes piece[2 * MAX_GROUPS];
};
static_assert(MAX_GROUPS * BAND >= MAX_HEAD_DIM, "bands are counted as groups");

// One block of tokens.
struct BandArgs {
  const uint8_t* page;  // the head struct
  int first_tile, tokens;
  const Chunk* chunk;
  const BandPieces* pieces;
  const float* scale;   // [BLOCK]
  float* s;             // [ROWS][BLOCK]
  int64_t ahead;        // distance to the page that is fetched into L2 while this one is read
};

#ifdef HAVE_BAND_TURNS
constexpr bool BANDS_TURN = true;
#else
constexpr bool BANDS_TURN = false;
#endif

// Words of VL tokens with their field at the bottom (BANDS_TURN: in its place in the code) of every byte, and the codes
// of two planes' words.
#ifndef HAVE_BAND_TURNS
INLINE vi turned_words(const uint8_t* p, int shift) { return (vi)((vu)load_int(p) >> shift); }
INLINE vi joined_fields(vi high, vi low, vi high_mask, vi low_mask, int low_bits) {
  return ((high & high_mask) << low_bits) | (low & low_mask);
}
#endif

// The fields of a band of `channels` channels, the first of them `at` in its plane, which begins at `offset`; they come
// `up` bits above the codes' lowest.
static BandFields band_fields(int offset, int at, int channels, int row_bytes, int bits, int up) {
  BandFields f;
  f.mask = ((1 << bits) - 1) * 0x01010101;
  f.tile_bytes = row_bytes * TILE;
  if (BANDS_TURN) f.mask <<= up;
  for (int c = 0; c < BAND; c += 4) {
    const int channel = at + (c < channels ? c : 0), shift = channel / row_bytes * bits;
    f.word[c / 4] = {offset + channel % row_bytes * TILE, BANDS_TURN ? (shift - up) & 31 : shift, shift == 0};
  }
  return f;
}

// Two bands take one scale where that is faster: AVX-512, klt4 4 %; AVX2 keeps its sums in memory then and loses 3 %.
constexpr bool BANDS_SHARE = VL == 16;

// Whether band i has one scale with the band before it: every other one of neighbours of the same width.
static bool shares_scale(const uint8_t* bands, int i) {
  if (!BANDS_SHARE) return false;
  int same = 0;
  while (same < i && bands[i - same - 1] == bands[i]) same++;
  return bands[i] < 8 && same % 2 == 1;
}

static void list_pieces(BandPieces& list, const kvbits_tensor& t, int head_dim) {
  const int bands = (head_dim + BAND - 1) / BAND;
  auto channels_of = [&](int band) { return head_dim - band * BAND < BAND ? head_dim - band * BAND : BAND; };
  int offset[9], row_bytes[9], at[9] = {};  // by bits of a plane; channels of it that bands before have
  for (int bits = 8, stored = 0; bits; bits /= 2) {
    int channels = 0;
    for (int i = 0; i < bands; i++) channels += t.bands[i] & bits ? channels_of(i) : 0;
    if (channels) offset[bits] = t.plane_offset[stored++], row_bytes[bits] = row_bytes_of(channels, bits);
  }
  list.count = 0;
  for (int i = 0; i < bands; i++) {
    BandCodes codes = {};
    codes.band = i;
    codes.ends = true;
    codes.weight = 1.0f;
    auto fields = [&](int bits, int up) {
      const BandFields f = band_fields(offset[bits], at[bits], channels_of(i), row_bytes[bits], bits, up);
      at[bits] += channels_of(i);
      return f;
    };
    if (t.bands[i] == 8) {
      codes.high = fields(8, 0);
      codes.high.mask = 0x0f0f0f0f;
      BandCodes upper = codes;
      upper.weight = 16.0f;
      for (int n = 0; n < BAND / 4; n++) upper.high.word[n].shift = 4, upper.high.word[n].first = false;
      list.piece[list.count++] = upper;
      list.piece[list.count++] = codes;
      continue;
    }
    const int high = t.bands[i] & 4 ? 4 : t.bands[i] & 2 ? 2 : t.bands[i], low = t.bands[i] - high;
    if (!high) continue;
    if (shares_scale(t.bands, i)) list.piece[list.count - 1].ends = false;
    codes.low_bits = low;
    codes.high = fields(high, low);
    if (low) codes.low = fields(low, 0);
    list.piece[list.count++] = codes;
  }
}

// Codes of V vectors of tokens, four channels in each of their words: those of `band` that its words n are of, and
// lines of the page to come.
template <int V, bool JOINED>
INLINE void load_codes(const BandCodes& band, const uint8_t* at, int64_t tile, int n, int64_t ahead, bool new_lines,
                       vi (&codes)[V]) {
  const uint8_t* high = at + tile * band.high.tile_bytes + band.high.word[n].offset;
  const int64_t high_next = VL < TILE ? VL * 4 : band.high.tile_bytes;
  const vi high_mask = splat_int(band.high.mask);
  if (band.high.word[n].first) {  // a line is fetched once, whatever else it holds
    if (new_lines) fetch(high + ahead);
    if (V * VL > TILE) fetch(high + high_next + ahead);
  }
  if constexpr (JOINED) {
    const uint8_t* low = at + tile * band.low.tile_bytes + band.low.word[n].offset;
    const int64_t low_next = VL < TILE ? VL * 4 : band.low.tile_bytes;
    const vi low_mask = splat_int(band.low.mask);
    if (band.low.word[n].first) {
      if (new_lines) fetch(low + ahead);
      if (V * VL > TILE) fetch(low + low_next + ahead);
    }
    for (int v = 0; v < V; v++)
      codes[v] =
          joined_fields(turned_words(high + v * high_next, band.high.word[n].shift),
                        turned_words(low + v * low_next, band.low.word[n].shift), high_mask, low_mask, band.low_bits);
  } else {
    for (int v = 0; v < V; v++) codes[v] = turned_words(high + v * high_next, band.high.word[n].shift) & high_mask;
  }
}

// Dot products of one band.
template <int V, int NH, bool JOINED>
INLINE void add_band(const BandArgs& a, const BandCodes& band, const uint8_t* at, int64_t tile, bool new_lines,
                     vi (&sums)[V][NH]) {
  const uint8_t* q = a.chunk->qw[0] + band.band * (BAND * NARROW_Q_BYTES);
#pragma GCC unroll 2
  for (int n = 0; n < BAND / 4; n += 2) {
    vi x[V], y[V];
    load_codes<V, JOINED>(band, at, tile, n, a.ahead, new_lines, x);
    load_codes<V, JOINED>(band, at, tile, n + 1, a.ahead, new_lines, y);
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const BandQuery first = band_query(q + h * Q_STRIDE + 4 * n * NARROW_Q_BYTES),
                      second = band_query(q + h * Q_STRIDE + 4 * (n + 1) * NARROW_Q_BYTES);
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) add_band_words(sums[v][h], x[v], y[v], first, second);
    }
  }
}

// Scores of NH rows against the block's tokens.
template <int NH>
static void key_banded(const BandArgs& a) {
  const Chunk& c = *a.chunk;
  const BandPieces& list = *a.pieces;
  // neighbouring vectors of tokens that share what is loaded of queries and lists
  constexpr int V = NH <= BAND_ROWS_OF_TWO ? 2 : 1;
  for (int t = 0; t < a.tokens; t += V * VL) {
    const int tile = a.first_tile + t / TILE;
    const uint8_t* at = a.page + t % TILE * 4;
    const bool new_lines = t % TILE == 0;
    vf s[V][NH];
    for (int v = 0; v < V; v++)
      for (int h = 0; h < NH; h++) s[v][h] = splat(c.q_zero[0][h]);
    vi sums[V][NH] = {};
    for (int i = 0; i < list.count; i++) {
      const BandCodes& band = list.piece[i];
      if (!BANDS_SHARE)
        for (int v = 0; v < V; v++)
          for (int h = 0; h < NH; h++) sums[v][h] = vi{};
      if (band.low_bits) add_band<V, NH, true>(a, band, at, tile, new_lines, sums);
      else add_band<V, NH, false>(a, band, at, tile, new_lines, sums);
      if (BANDS_SHARE && !band.ends) continue;
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
          s[v][h] += to_float(sums[v][h]) * c.piece_scale[i][h];
          if (BANDS_SHARE) sums[v][h] = vi{};
        }
    }
    for (int v = 0; v < V; v++)
      for (int h = 0; h < NH; h++) store(a.s + h * BLOCK + t + v * VL, s[v][h] * load(a.scale + t + v * VL));
  }
}

// Integers of `folded`, and what the middles of the codes' ranges take off the scores.
static void quantize_by_band(Chunk& c, const kvbits_tensor& t, const BandPieces& list, int head_dim) {
  constexpr int J = BAND / VL > 0 ? BAND / VL : 1;
  static_assert(BAND % VL == 0, "bands are whole vectors");
  const int bands = (head_dim + BAND - 1) / BAND;
  for (int h = 0; h < c.rows; h++) {
    const float* q = c.folded[h];
    alignas(64) float largest[MAX_GROUPS + 16];
    for (int first = 0; first < bands; first += 8) {
      vf tops[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) {
        const float* at = q + (first + i < bands ? first + i : first) * BAND;
        tops[i] = vmax(load(at), -load(at));
        for (int v = 1; v < J; v++) tops[i] = vmax(tops[i], vmax(load(at + v * VL), -load(at + v * VL)));
      }
      max_each(tops, bands - first < 8 ? bands - first : 8, largest + first);
    }
    for (int i = 1; i < bands; i++)
      if (shares_scale(t.bands, i))
        largest[i] = largest[i - 1] = largest[i] > largest[i - 1] ? largest[i] : largest[i - 1];
    vf zero = {};
    for (int i = 0; i < bands; i++) {
      const float amax = largest[i], scale = amax * (1.0f / NARROW_Q_LIMIT);
      // what is smaller still adds nothing to a score
      const float inverse = amax > 1e-30f ? NARROW_Q_LIMIT / amax : 0.0f;
      const float middle = -scale * (0.5f * (float)((1 << t.bands[i]) - 1));
      for (int v = 0; v < J; v++) {
        const vi x = round_to_int(load(q + i * BAND + v * VL) * inverse);
        zero += to_float(x) * middle;
        store_q<false>(c.qw[h], i * BAND + v * VL, x);
      }
      largest[i] = scale;
    }
    c.q_zero[0][h] = sum(zero);
    for (int i = 0; i < list.count; i++) c.piece_scale[i][h] = largest[list.piece[i].band] * list.piece[i].weight;
  }
}

}  // namespace
