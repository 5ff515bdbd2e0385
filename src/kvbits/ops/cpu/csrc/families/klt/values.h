// Values of trellis codes (docs/reference/formats.md): levels of four runs of channels, joined from the words of a
// block's tokens before the integer dot products. Their basis is that of the outputs.
//
// A word is one byte of four tokens' rows, and a ring has the words of four neighbouring bytes: in vectors of words the
// channel before is the lane before, and in front of a ring's first lane its last one in the run before.
#pragma once
#include "engine/attend/part.h"
#include "families/value_words.h"
#include "hadamard.h"

namespace {

// What levels are around: those of 2 bits are odd integers, of more bits indices.
constexpr float middle_index(int bits) { return bits == 2 ? 0.0f : (float)((1 << bits) - 0.5f); }
constexpr float level_weight(int bits) { return bits == 2 ? 0.25f : 0.5f; }
constexpr int largest_level(int bits) { return bits == 2 ? 9 : (2 << bits) - 1; }

static Tensor describe_trellis_values(const kvbits_tensor& t, int head_dim, int64_t pages) {
  kvbits_tensor as_integers = t;
  as_integers.format = integers_of_bits(t.bands[0]);
  Tensor d = describe(as_integers, head_dim, pages);
  d.t = &t;
  d.zero = d.dot_zero = middle_index(t.bands[0]) * level_weight(t.bands[0]);
  d.trellis = true;
  return d;
}

// Outputs to the basis of the part's values, and out of it again: the matrix is its own inverse.
static void turn_outputs(Part& p) {
  for (int i = 0; i < p.num_chunks; i++)
    for (int h = 0; h < p.chunks[i].rows; h++) hadamard(p.chunks[i].acc[h], p.call.value_head_dim);
}

// Bytes turned by `by` bits to the left.
INLINE vi bytes_turned(vi x, int by) { return bits_of((0xff << by) & 0xff, x << by, shifted_down(x, 8 - by)); }

// Levels of a vector of rings, four tokens of each channel, by run. Where all runs are fields of the same bytes, or of
// two:
template <int BITS, bool WHOLE>
struct FieldLevels;

template <bool WHOLE>
struct FieldLevels<2, WHOLE> {
  RingWords words;
  int64_t ahead;
  bool fitted;

  static bool serves(int head_dim) { return head_dim % RING == 0; }
  void find(const ValueArgs& a, int first, int count) { find_words(a, 0, 2, 0, first, count, words); }
  bool whole() const { return words.whole; }
  MEMBER void load(int quad, vi (&level)[4]) const {
    const vi w = load_rings<WHOLE>(words, quad, ahead), low = masked(w, 0x55), last = bytes_turned(low, 2);
    const vi one = lanes_behind<1>(last, low), f = w ^ lanes_behind<2>(last, low);
    const vi even = bits_of(0x66, f << 1, one), odd = bits_of(0x66, shifted_down(f, 1), shifted_down(one, 2));
    level[0] = odd_levels(even, fitted);
    level[1] = odd_levels(odd, fitted);
    level[2] = odd_levels(shifted_down(even, 4), fitted);
    level[3] = odd_levels(shifted_down(odd, 4), fitted);
  }
};

// The lower plane has two runs' fields side by side.
template <bool WHOLE>
struct FieldLevels<3, WHOLE> {
  RingWords words, low_words;
  int64_t ahead;
  bool fitted;

  static bool serves(int head_dim) { return head_dim % (2 * RING) == 0; }
  void find(const ValueArgs& a, int first, int count) {
    find_words(a, 0, 2, 0, first, count, words);
    find_words(a, 1, 1, 0, first, count, low_words);
  }
  bool whole() const { return words.whole && low_words.whole; }
  MEMBER void load(int quad, vi (&level)[4]) const {
    const vi w = load_rings<WHOLE>(words, quad, ahead),
             low = masked(fields_at_bottom(low_words, load_rings<WHOLE>(low_words, quad, ahead)), 0x55);
    const vi last = bytes_turned(low, 2), one = lanes_behind<1>(last, low), f = low ^ lanes_behind<2>(last, low);
    const vi both = (f << 1) | one;
    const vi even = bits_of(0xcc, w << 2, both), odd = bits_of(0xcc, w, shifted_down(both, 2));
    level[0] = masked(even, 0x0f);
    level[1] = masked(odd, 0x0f);
    level[2] = masked(shifted_down(even, 4), 0x0f);
    level[3] = masked(shifted_down(odd, 4), 0x0f);
  }
};

// Runs 0 and 2 are the fields of some bytes, 1 and 3 those of others.
template <bool WHOLE>
struct FieldLevels<4, WHOLE> {
  RingWords words, more_words;
  int64_t ahead;
  bool fitted;

  static bool serves(int head_dim) { return head_dim % RING == 0; }
  void find(const ValueArgs& a, int first, int count) {
    find_words(a, 0, 4, 0, first, count, words);
    find_words(a, 0, 4, a.head_dim / 4, first, count, more_words);
  }
  bool whole() const { return words.whole && more_words.whole; }
  MEMBER void load(int quad, vi (&level)[4]) const {
    const vi w = load_rings<WHOLE>(words, quad, ahead), x = load_rings<WHOLE>(more_words, quad, ahead);
    const vi low = masked(w, 0x11), more = masked(x, 0x11), last = bytes_turned(more, 4);
    const vi one = lanes_behind<1>(last, low), other = lanes_behind<1>(low, more);
    const vi f = w ^ lanes_behind<2>(last, low), g = x ^ lanes_behind<2>(low, more);
    level[0] = bits_of(0x1e, f << 1, one);
    level[1] = bits_of(0x1e, g << 1, other);
    level[2] = bits_of(0x1e, shifted_down(f, 3), shifted_down(one, 4));
    level[3] = bits_of(0x1e, shifted_down(g, 3), shifted_down(other, 4));
  }
};

// The same at any head_dim: every run has words of its own. Rings may lack their last runs.
template <int BITS>
struct RunLevels {
  static constexpr int LOW = BITS & -BITS, LOW_PLANE = BITS == 3;
  RingWords words[4], low_words[4], last_words;
  int64_t ahead;
  bool fitted;

  // Runs that a ring lacks have its first one's words.
  void find(const ValueArgs& a, int first, int count) {
    const int stride = round_up(a.head_dim, RING) / 4;
    for (int i = 0; i < RINGS; i++) {
      const int channel = 4 * (i < count ? first + i : first);
      for (int run = 0; run < 4; run++) {
        const bool there = channel + run * stride < a.head_dim;
        const int at = there ? channel + run * stride : channel;
        find_one(a, LOW_PLANE, LOW, at, i, low_words[run]);
        if (BITS == 3) find_one(a, 0, 2, at, i, words[run]);
        if (there) find_one(a, LOW_PLANE, LOW, at, i, last_words);
      }
    }
  }
  static void find_one(const ValueArgs& a, int plane, int bits, int channel, int ring, RingWords& w) {
    find_run(a, plane, bits, channel, ring, w);
    set_shift(w, ring);
    w.fetches = w.field[ring] == 0;
  }
  MEMBER vi fields(const RingWords& w, int quad, int bits) const {
    return masked(fields_at_bottom(w, load_rings<false>(w, quad, ahead)), (1 << bits) - 1);
  }
  MEMBER void load(int quad, vi (&level)[4]) const {
    vi before = fields(last_words, quad, LOW);
#pragma GCC unroll 4
    for (int run = 0; run < 4; run++) {
      const vi low = fields(low_words[run], quad, LOW);
      vi code = low;
      if (BITS == 3) code |= fields(words[run], quad, 2) << 1;
      const vi index = (flipped(code, lanes_behind<2>(before, low), 1) << 1) | masked(lanes_behind<1>(before, low), 1);
      level[run] = BITS == 2 ? odd_levels(index, fitted) : index;
      before = low;
    }
  }
};

// Calls `use(levels, first ring, rings)` for each vector of rings.
template <int BITS, class Use>
INLINE void with_levels(const ValueArgs& a, const Use& use) {
  const int rings = round_up(a.head_dim, RING) / RING;
  for (int first = 0; first < rings; first += RINGS) {
    const int count = rings - first < RINGS ? rings - first : RINGS;
    if (FieldLevels<BITS, true>::serves(a.head_dim)) {
      FieldLevels<BITS, true> levels;
      levels.ahead = a.ahead;
      levels.fitted = a.fitted;
      levels.find(a, first, count);
      if (levels.whole()) use(levels, first, count);
      else use(*(FieldLevels<BITS, false>*)&levels, first, count);
    } else {
      RunLevels<BITS> levels;
      levels.ahead = a.ahead;
      levels.fitted = a.fitted;
      levels.find(a, first, count);
      use(levels, first, count);
    }
  }
}

// Levels of a vector of rings that are decoded already.
struct DecodedLevels {
  const vi* at;

  MEMBER void load(int quad, vi (&level)[4]) const {
#pragma GCC unroll 4
    for (int run = 0; run < 4; run++) level[run] = at[4 * quad + run];
  }
};

// Levels of a block, for all chunks of rows.
template <int BITS>
static void decode_levels(const ValueArgs& a, LevelBlock& to) {
  with_levels<BITS>(a, [&](const auto& levels, int first, int) {
    vi* at = to.of + first / RINGS * BLOCK;
    for (int quad = 0; quad < round_up(a.tokens, 8) / 4; quad++) {
      vi x[4];
      levels.load(quad, x);
      for (int run = 0; run < 4; run++) at[4 * quad + run] = x[run];
    }
  });
}
typedef void (*DecodeLevels)(const ValueArgs& a, LevelBlock& to);
constexpr DecodeLevels level_decoders[3] = {decode_levels<2>, decode_levels<3>, decode_levels<4>};

// The outputs gain runs FIRST, FIRST + STEP .. of a vector of rings.
template <int BITS, int NH, int FIRST, int STEP, class Levels>
INLINE void add_runs(const ValueArgs& a, const Levels& levels, int channel, int stride, int lanes) {
  vf sums[4 / STEP][NH];
  dot_levels<largest_level(BITS), NH, FIRST, STEP>(a, levels, sums);
#pragma GCC unroll 4
  for (int i = 0; i < 4 / STEP; i++) {
    const int at = channel + (FIRST + i * STEP) * stride, left = a.head_dim - at < lanes ? a.head_dim - at : lanes;
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      const vf x = sums[i][h] * (a.block->p_scale[0][h] * level_weight(BITS));
      if (left >= VL) add_output(a, h, at, x);
      else add_output(a, h, at, x, iota() < splat_int(left));
    }
  }
}

// The outputs gain the runs of a vector of rings, as many at once as the registers hold sums of.
template <int BITS, int NH, int FIRST, class Levels>
INLINE void add_rings(const ValueArgs& a, const Levels& levels, int first, int count) {
  constexpr int STEP = NH <= LEVEL_ROWS_OF_FOUR ? 1 : NH <= LEVEL_ROWS_OF_TWO ? 2 : 4;
  add_runs<BITS, NH, FIRST, STEP>(a, levels, 4 * first, round_up(a.head_dim, RING) / 4, 4 * count);
  if constexpr (FIRST + 1 < STEP) add_rings<BITS, NH, FIRST + 1>(a, levels, first, count);
}

// The chunk's outputs gain the block's values. Middles of indices are settled by the caller.
template <int BITS, int NH>
static void value_trellis(const ValueArgs& a) {
  with_levels<BITS>(a, [&](const auto& levels, int first, int count) __attribute__((always_inline)) {
    add_rings<BITS, NH, 0>(a, levels, first, count);
  });
}

// The same where the block's levels are decoded already.
template <int BITS, int NH>
static void value_levels(const ValueArgs& a) {
  const int rings = round_up(a.head_dim, RING) / RING;
  for (int first = 0; first < rings; first += RINGS)
    add_rings<BITS, NH, 0>(a, DecodedLevels{a.levels->of + first / RINGS * BLOCK}, first,
                           rings - first < RINGS ? rings - first : RINGS);
}

#define BY_ROWS_OF(f, bits) \
  {{f<bits, 1>, f<bits, 2>, f<bits, 3>, f<bits, 4>, f<bits, 5>, f<bits, 6>, f<bits, 7>, f<bits, 8>}, true}
typedef ByRows<void (*)(const ValueArgs&)> LevelKernels;
constexpr LevelKernels trellis_values[3] = {BY_ROWS_OF(value_trellis, 2), BY_ROWS_OF(value_trellis, 3),
                                            BY_ROWS_OF(value_trellis, 4)};
constexpr LevelKernels level_values[3] = {BY_ROWS_OF(value_levels, 2), BY_ROWS_OF(value_levels, 3),
                                          BY_ROWS_OF(value_levels, 4)};
#undef BY_ROWS_OF

}  // namespace
