// From scores of a tile of rows to probabilities, in the order that outputs are multiplied in.
#pragma once
#include "state.h"

namespace {

// By how much (log2) scores may pass the maximum that probabilities are relative to before it is raised: bfloat16 and
// float32 hold 2^SLACK as precisely as 1, and few blocks raise a maximum then.
constexpr float SLACK = 8.0f;

INLINE float* scores_of(float* s, int h, int i) { return s + i * TILE_SUMS + h * TILE_COLUMNS; }

INLINE bool any_above(vf x, float limit) {
#ifdef KVBITS_AMX
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return any(x > splat(limit));
#endif
}

// What a block's scores still lack.
struct ScoreRules {
  float factor;  // of raw scores, to log2
  float cap;     // 0 for none; `factor` is to natural units then
  bool masked;
  int first[BLOCK_STEPS][TILE_ROWS], end[BLOCK_STEPS][TILE_ROWS];  // of each slice's tokens that a row sees
  const float* offsets[BLOCK_TILES];  // [row][16] sums, at the row of offsets of each token tile; null for none
  int groups;  // of scores that lie SCORE_SUMS apart and lack their tokens' scales; 0: one, with them
  const float* scales[SCALED_GROUPS];
};

// A new maximum of row h: everything summed so far shrinks, outputs once they have what was weighed by the old one.
static void raise_maximum(QueryTile& tile, int h, float top) {
  const float shrink = tile.m[h] > LOWEST ? exp2_neg<5>(splat(tile.m[h] - top))[0] : 1.0f;
  tile.m[h] = top;
  if (shrink == 1.0f) return;
  store(tile.l[h], load(tile.l[h]) * shrink);
  tile.shrink[h] = shrink;
  tile.raised = true;
}

static void shrink_outputs(QueryTile& tile, float* acc, int d) {
  if (!tile.raised) return;
  for (int h = 0; h < TILE_ROWS; h++) {
    const float shrink = tile.shrink[h];
    tile.shrink[h] = 1.0f;
    if (shrink == 1.0f) continue;
    for (int i = 0; i < d; i += VL) {
      float* to = acc + i * TILE_ROWS + h * TILE_COLUMNS;
      store(to, load(to) * shrink);
    }
  }
  tile.raised = false;
}

// Scores of a row that lack scales of GROUPS groups and offsets at most, in place, and the largest of each lane.
template <int GROUPS, bool OFFSETS>
INLINE vf scale_scores(float* s, int h, const ScoreRules& rules) {
  vf top = splat(-__builtin_inff());
#pragma GCC unroll 8
  for (int i = 0; i < BLOCK_TILES; i++) {
    float* at = scores_of(s, h, i);
    vf x = load(at);
    if (GROUPS) x *= load(rules.scales[0] + i * TILE_COLUMNS);
    if (GROUPS > 1) x += load(at + SCORE_SUMS) * load(rules.scales[1] + i * TILE_COLUMNS);
    if (OFFSETS) x += rules.offsets[i][h * TILE_COLUMNS];
    if (GROUPS || OFFSETS) store(at, x);
    top = vmax(top, x);
  }
  return top;
}

// Scores of a block in place, with offsets, cap and visibility, and the maxima raised. Returns the factor that is left.
static float finish_scores(QueryTile& tile, float* s, const ScoreRules& rules) {
  const bool plain = !rules.masked && !rules.cap && rules.factor > 0, offsets = rules.offsets[0];
  const float left = !rules.cap && rules.factor > 0 ? rules.factor : 1.0f;
  for (int h = 0; h < tile.rows; h++) {
    vf top = splat(-__builtin_inff());
    if (plain && rules.groups == 0)
      top = offsets ? scale_scores<0, true>(s, h, rules) : scale_scores<0, false>(s, h, rules);
    else if (plain && rules.groups == 1)
      top = offsets ? scale_scores<1, true>(s, h, rules) : scale_scores<1, false>(s, h, rules);
    else if (plain && rules.groups == 2)
      top = offsets ? scale_scores<2, true>(s, h, rules) : scale_scores<2, false>(s, h, rules);
    else {
      for (int i = 0; i < BLOCK_TILES; i++) {
        float* at = scores_of(s, h, i);
        vf x = load(at);
        if (rules.groups) x *= load(rules.scales[0] + i * TILE_COLUMNS);
        for (int g = 1; g < rules.groups; g++)
          x += load(at + g * SCORE_SUMS) * load(rules.scales[g] + i * TILE_COLUMNS);
        if (rules.offsets[i]) x += rules.offsets[i][h * TILE_COLUMNS];
        if (rules.cap > 0) x = tanh_cap(x * rules.factor, rules.cap) * 1.4426950409f;
        else if (left == 1.0f) x *= rules.factor;
        if (rules.masked) {
          const vi token = iota() + i % 2 * TILE_COLUMNS;
          x = select((token >= splat_int(rules.first[i / 2][h])) & (token < splat_int(rules.end[i / 2][h])), x,
                     splat(-__builtin_inff()));
        }
        store(at, x);
        top = vmax(top, x);
      }
    }
    if (any_above(top * left, tile.m[h] + SLACK)) raise_maximum(tile, h, max_of(top) * left);
  }
  return left;
}

// Probabilities as N_TERMS tiles of A each step, and their sums. Between rows the tiles get more to do.
template <int DEGREE, int N_TERMS>
static void weigh(QueryTile& tile, float* s, float factor, uint16_t* p, Pace& pace) {
  for (int h = 0; h < tile.rows; h++) {
    const vf m = splat(tile.m[h]);
    vf total = load(tile.l[h]);
#pragma GCC unroll 4
    for (int step = 0; step < BLOCK_STEPS; step++) {
      const vf a = exp2_neg<DEGREE>(load(scores_of(s, h, 2 * step)) * factor - m),
               b = exp2_neg<DEGREE>(load(scores_of(s, h, 2 * step + 1)) * factor - m);
      total += a + b;
      store_pairs<N_TERMS>(p + step * TILE_NUMBERS + h * TILE_DEPTH, BLOCK_STEPS * TILE_NUMBERS, a, b);
    }
    store(tile.l[h], total);
    pace.tick();
  }
}

}  // namespace
