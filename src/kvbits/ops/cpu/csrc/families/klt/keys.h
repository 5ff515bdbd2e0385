// Keys of trellis codes (docs/reference/formats.md).
//
// An index is 2 (code ^ b(t - 2)) + b(t - 1), with b the lowest bits of a ring's codes, and a ring is a band: the bits
// before lie in other fields or bytes of the words that the code itself lies in. So words are turned and joined to
// indices before the integer dot products. A band or two neighbours of the same width have one scale of the query's
// 8-bit integers:
//
//   score(h, t) = k_scale[t] * (sum over scales of q_scale[h] * dot(q_int, indices) / 2 + q_zero[h]) + q' . offsets
//
// with q' the query in the page's basis (basis.h) and q_zero what the middles of the indices' ranges take off.
#pragma once
#include <stdint.h>

#include "engine/attend/dots.h"
#include "engine/attend/softmax.h"

namespace {

constexpr int RUNS = BAND / 4;  // of a band's channels: each the four bytes of one field

// A band's first word in one plane.
struct BandPlane {
  int32_t offset;      // of the tile's word, bytes from the head struct to that of the page's first tile
  int32_t tile_bytes;  // from tile to tile
};

// A band, or a half of each code of 8 bits: of 4 bits each, the higher ones first, since their products fit 16 bits.
struct BandPiece {
  BandPlane high, low;  // `low`: the plane of the lowest bits; `high`: of those above, if there are any
  int32_t width, band;
  int32_t runs;         // 4, or 2 of a last band of 8 channels
  int32_t shift;        // of 1 bit: of the band's fields in each byte; of 8: of the half
  float weight;         // of an index
  bool ends;            // the dot products are complete, and take their scale
};

// All of a head.
struct BandPieces {
  int32_t count;
  BandPiece piece[2 * MAX_GROUPS];
};
static_assert(MAX_GROUPS * BAND >= MAX_HEAD_DIM, "bands are counted as groups");

// One block of tokens.
struct BandArgs {
  const uint8_t* page;  // the head struct
  int first_tile, tokens;
  const Chunk* chunk;
  const BandPieces* pieces;
  const float* scale;  // [BLOCK]
  const float (*offsets)[BLOCK / TILE];  // [ROWS], what is added to the scores of each tile's tokens
  float* s;            // [ROWS][BLOCK]
  int64_t ahead;       // distance to the page that is fetched into L2 while this one is read
};

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
    const int width = t.bands[i], low = width & -width, high = width - low;
    if (!width) continue;
    BandPiece piece = {};
    piece.width = width;
    piece.band = i;
    piece.runs = channels_of(i) / 4;
    piece.weight = width == 8 ? 1.0f : 0.5f;
    piece.ends = true;
    auto plane = [&](int bits) {
      const int word = at[bits] * bits / 32;
      at[bits] += channels_of(i);
      return BandPlane{offset[bits] + word * 4 * TILE, row_bytes[bits] * TILE};
    };
    piece.shift = low == 1 ? at[1] % 32 / 4 : 0;
    piece.low = plane(low);
    if (high) piece.high = plane(high);
    if (shares_scale(t.bands, i)) list.piece[list.count - 1].ends = false;
    if (width == 8) {
      BandPiece upper = piece;
      upper.weight = 16.0f;
      upper.shift = 4;
      list.piece[list.count++] = upper;
    }
    list.piece[list.count++] = piece;
  }
}

// How words lie in a page, and of the page to come.
struct BandAt {
  const uint8_t* page;  // the head struct, at the vector's tokens in a tile
  int64_t tile, ahead;
  bool new_lines;  // of the page to come, which are fetched once
};

// Word n of a plane, of V vectors of tokens. `fetches`: its line is not fetched by another band.
template <int V>
INLINE void load_words(const BandAt& at, const BandPlane& plane, int n, bool fetches, vi (&words)[V]) {
  const uint8_t* p = at.page + at.tile * plane.tile_bytes + plane.offset + n * (4 * TILE);
  const int64_t next = VL < TILE ? VL * 4 : plane.tile_bytes;
  if (fetches) {
    if (at.new_lines) fetch(p + at.ahead);
    if (V * VL > TILE) fetch(p + next + at.ahead);
  }
  for (int v = 0; v < V; v++) words[v] = load_int(p + v * next);
}

// Indices of VL tokens' four runs from the words of the lowest plane, in bits 0 to LOW of every byte; of 1 and 2 bits
// the bits above may be anything. Of a band of two runs the others are copies of them, so that a run before the first is
// the last one, and meet queries of 0.
template <int LOW>
struct LowIndices;

#ifdef HAVE_LOOKUP
// What four bits add to the indices of their own runs, and to those of the runs that follow: 2-bit indices of four runs,
// or 3-bit indices of two runs in the halves of a byte.
struct IndexTables {
  alignas(16) uint8_t own_one[16], next_one[16], own_two[16], next_two[16];
};
constexpr IndexTables index_tables() {
  IndexTables t = {};
  for (int n = 0; n < 16; n++) {
    for (int i = 0; i < 4; i++) {
      const int own = n >> i & 1, one = i > 0 ? n >> (i - 1) & 1 : 0, two = i > 1 ? n >> (i - 2) & 1 : 0;
      t.own_one[n] |= ((own ^ two) << 1 | one) << 2 * i;
    }
    t.next_one[n] = (n >> 2 & 1) << 1 | (n >> 3 & 1) | (n >> 3 & 1) << 3;
    const int first = n & 3, second = n >> 2;
    t.own_two[n] = first << 1 | (second << 1 | (first & 1)) << 4;
    t.next_two[n] = (first & 1) << 1 | (second & 1) | (second & 1) << 5;
  }
  return t;
}
constexpr IndexTables INDEX = index_tables();

template <>
struct LowIndices<1> {
  vi all;  // side by side

  MEMBER void join(vi w) {  // whose runs are the lowest four bits of each byte
    const vi n = masked(w, 0x0f);
    all = looked_up(INDEX.own_one, n) ^ looked_up(INDEX.next_one, turned(n, 8));
  }
  MEMBER vi run(int i) const { return i ? shifted_down(all, 2 * i) : all; }
};

template <>
struct LowIndices<2> {
  vi lower, upper;  // of two runs each

  MEMBER void join(vi w) {
    const vi low = masked(w, 0x0f), high = masked(shifted_down(w, 4), 0x0f);
    lower = looked_up(INDEX.own_two, low) ^ looked_up(INDEX.next_two, turned(high, 8));
    upper = looked_up(INDEX.own_two, high) ^ looked_up(INDEX.next_two, low);
  }
  MEMBER vi run(int i) const {
    const vi x = i < 2 ? lower : upper;
    return i % 2 ? shifted_down(x, 4) : x;
  }
};
#else
template <>
struct LowIndices<1> {
  vi even, odd;  // two neighbouring fields to four

  MEMBER void join(vi w) {  // whose runs are the lowest four bits of each byte
    const vi u = bits_of(0x3c, turned(w, 2), turned(w, 6));  // the last two runs of the byte before, then these
    const vi one = shifted_down(u, 1), own = shifted_down(u, 2), x = u ^ own;
    even = bits_of(0x0a, x << 1, one);
    odd = bits_of(0x0a, x, own);
  }
  MEMBER vi run(int i) const {
    const vi x = i % 2 ? odd : even;
    return i < 2 ? x : shifted_down(x, 2);
  }
};

template <>
struct LowIndices<2> {
  vi even, odd;

  MEMBER void join(vi w) {
    const vi f = flipped(w, turned(w, 4), 0x55);
    even = bits_of(0x66, f << 1, turned(w, 2));
    odd = bits_of(0x66, shifted_down(f, 1), w);
  }
  MEMBER vi run(int i) const {
    const vi x = i % 2 ? odd : even;
    return i < 2 ? x : shifted_down(x, 4);
  }
};
#endif

template <>
struct LowIndices<4> {
  vi first, second, one, other;  // codes and lowest bits of runs 0, 1 and 2, 3

  MEMBER void join(vi w, vi x) {
    one = masked(w, 0x11), other = masked(x, 0x11);
    first = w ^ turned(other, 8);
    second = x ^ one;
  }
  MEMBER vi run(int i) const {
    if (i == 0) return bits_of(0x1e, first << 1, turned(other, 4));
    if (i == 1) return bits_of(0x1e, shifted_down(first, 3), one);
    if (i == 2) return bits_of(0x1e, second << 1, shifted_down(one, 4));
    return bits_of(0x1e, shifted_down(second, 3), other);
  }
};

// Indices of a band: V vectors of tokens, four channels in each word. Of 8 bits: half of each code.
template <int WIDTH, int V>
INLINE void load_indices(const BandAt& at, const BandPiece& band, vi (&index)[V][RUNS]) {
  constexpr int LOW = WIDTH & -WIDTH, HIGH = WIDTH - LOW, UP = LOW + 1, LOW_MASK = (2 << LOW) - 1,
                HIGH_MASK = ((1 << HIGH) - 1) << UP;
  const bool narrow = band.runs < RUNS;
  vi w[V], x[V];
  if constexpr (WIDTH == 8) {
    for (int i = 0; i < RUNS; i++) {
      load_words<V>(at, band.low, narrow ? i % 2 : i, band.shift > 0, w);
      for (int v = 0; v < V; v++) index[v][i] = masked(shifted_by(w[v], band.shift), 0x0f);
    }
    return;
  } else {
    load_words<V>(at, band.low, 0, LOW > 1 || band.shift == 0, w);
    LowIndices<LOW> low[V];
    if constexpr (LOW == 4) {
      load_words<V>(at, band.low, narrow ? 0 : 1, true, x);
      for (int v = 0; v < V; v++) low[v].join(w[v], x[v]);
    } else {
      for (int v = 0; v < V; v++) {
        if (LOW == 1) w[v] = shifted_by(w[v], band.shift);
        if (narrow) w[v] = LOW == 1 ? bits_of(0x0c, w[v] << 2, w[v]) : bits_of(0xf0, w[v] << 4, w[v]);
        low[v].join(w[v]);
      }
    }
    if constexpr (HIGH > 0) load_words<V>(at, band.high, 0, true, w);
    if constexpr (HIGH == 4) load_words<V>(at, band.high, narrow ? 0 : 1, true, x);
    for (int v = 0; v < V; v++) {
#ifdef HAVE_LOOKUP
      if constexpr (WIDTH == 3) {  // fields of both planes are as wide, and lie in the same places
        const vi even = bits_of(0xcc, w[v] << 2, low[v].all), odd = bits_of(0xcc, w[v], shifted_down(low[v].all, 2));
        index[v][0] = masked(even, 0x0f);
        index[v][1] = masked(odd, 0x0f);
        index[v][2] = masked(shifted_down(even, 4), 0x0f);
        index[v][3] = masked(shifted_down(odd, 4), 0x0f);
        continue;
      }
#endif
#pragma GCC unroll 4
      for (int i = 0; i < RUNS; i++) {
        if (HIGH == 0) {
          index[v][i] = LOW == 4 ? low[v].run(i) : masked(low[v].run(i), LOW_MASK);
          continue;
        }
        const int place = HIGH == 4 ? i % 2 * 4 : i * 2;  // of the field in its byte
        const vi word = HIGH == 4 && i >= 2 ? x[v] : w[v];
        const vi high = place < UP ? word << (UP - place) : place > UP ? shifted_down(word, place - UP) : word;
        index[v][i] = masked_or(masked(high, HIGH_MASK), low[v].run(i), LOW_MASK);
      }
    }
  }
}

// Dot products of one band.
template <int WIDTH, int V, int NH>
INLINE void add_band(const BandArgs& a, const BandPiece& band, const BandAt& at, vi (&sums)[V][NH]) {
  constexpr int MOST = WIDTH < 8 ? (2 << WIDTH) - 1 : 15;
  const uint8_t* q = a.chunk->qw[0] + band.band * (BAND * NARROW_Q_BYTES);
  vi index[V][RUNS];
  load_indices<WIDTH, V>(at, band, index);
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    BandQuery of[RUNS];
    for (int i = 0; i < RUNS; i++) of[i] = band_query(q + h * Q_STRIDE + 4 * i * NARROW_Q_BYTES);
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) add_band_words<MOST>(sums[v][h], index[v], of);
  }
}

template <int V, int NH>
INLINE void add_piece(const BandArgs& a, const BandPiece& band, const BandAt& at, vi (&sums)[V][NH]) {
  switch (band.width) {
    case 1: return add_band<1, V, NH>(a, band, at, sums);
    case 2: return add_band<2, V, NH>(a, band, at, sums);
    case 3: return add_band<3, V, NH>(a, band, at, sums);
    case 4: return add_band<4, V, NH>(a, band, at, sums);
    case 5: return add_band<5, V, NH>(a, band, at, sums);
    case 6: return add_band<6, V, NH>(a, band, at, sums);
    default: return add_band<8, V, NH>(a, band, at, sums);
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
    const BandAt at = {a.page + t % TILE * 4, a.first_tile + t / TILE, a.ahead, t % TILE == 0};
    vf s[V][NH];
    for (int v = 0; v < V; v++)
      for (int h = 0; h < NH; h++) s[v][h] = splat(c.q_zero[0][h]);
    vi sums[V][NH] = {};
    for (int i = 0; i < list.count; i++) {
      const BandPiece& band = list.piece[i];
      if (!BANDS_SHARE)
        for (int v = 0; v < V; v++)
          for (int h = 0; h < NH; h++) sums[v][h] = vi{};
      add_piece<V, NH>(a, band, at, sums);
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
      for (int h = 0; h < NH; h++) {
        const int at_token = t + v * VL;
        store(a.s + h * BLOCK + at_token, s[v][h] * load(a.scale + at_token) + splat(a.offsets[h][at_token / TILE]));
      }
  }
}

// The middle between the levels of a width, in scales.
INLINE float middle_of(int bits) {
  return bits == 8 ? 127.5f : bits ? 0.25f * (float)((2 << bits) - 1) : 0.0f;
}

// Integers of `folded`, and what the middles of the indices' ranges take off the scores.
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
      const float middle = -scale * middle_of(t.bands[i]);
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
