// Query preparation, softmax and quantization of probabilities for one chunk of rows.
//
//   score(h, t) = sum_g k_scale[g][t] * (q_scale[g][h] * dot(q_int, code) + q_zero[g][h]) + k_bias[g][t] * q_sum[g][h]
//   + q_bias[h]
//
// Integer codes are read around the middle of their range also where they are asymmetric (bias + zero * scale takes
// the place of bias): rounding q and p then costs half as much.
#pragma once
#include <stdint.h>

#include "dots.h"

namespace {

// Integer q per group of channels, from `from` ([ROWS][ROW_STRIDE]).
template <bool WIDE>
static void quantize_query(Chunk& c, const float* from, int groups, int group_channels, float zero) {
  const float limit = WIDE ? WIDE_LIMIT : NARROW_Q_LIMIT;
  for (int h = 0; h < c.rows; h++) {
    const float* q = from + h * ROW_STRIDE;
    for (int g = 0; g < groups; g++) {
      const int c0 = g * group_channels, c1 = c0 + group_channels;
      vf top = vf{};
      int i = c0;
      for (; i + VL <= c1; i += VL) {
        vf x = load(q + i);
        top = vmax(top, vmax(x, -x));
      }
      float amax = max_of(top);
      for (; i < c1; i++) amax = __builtin_fmaxf(amax, __builtin_fabsf(q[i]));
      const float inverse = amax > 1e-30f ? limit / amax : 0.0f;  // what is smaller still adds nothing to a score
      vi total = vi{};
      for (i = c0; i < c1; i += VL) {
        vi x = round_to_int(load(q + i) * inverse);
        if (i + VL > c1) x &= iota() < splat_int(c1 - i);  // the next group overwrites the lanes behind
        total += x;
        store_q<WIDE>(c.qw[h], i, x);
      }
      int32_t t = 0;
      for (int k = 0; k < VL; k++) t += total[k];
      const float scale = amax / limit;
      c.q_scale[g][h] = scale;
      c.q_sum[g][h] = scale * (float)t;
      c.q_zero[g][h] = -zero * c.q_sum[g][h];
    }
  }
}

static void add_query_bias(Chunk& c, const float* q, const float* bias, int head_dim) {
  for (int h = 0; h < c.rows; h += 4) {
    auto row = [&](int k) { return q + (h + k < c.rows ? h + k : c.rows - 1) * ROW_STRIDE; };
    const float *r0 = row(0), *r1 = row(1), *r2 = row(2), *r3 = row(3);
    vf t0 = {}, t1 = {}, t2 = {}, t3 = {};  // four rows at once: sums that do not wait for each other
    for (int i = 0; i < head_dim; i += VL) {
      const vf b = load(bias + i);
      t0 += load(r0 + i) * b;
      t1 += load(r1 + i) * b;
      t2 += load(r2 + i) * b;
      t3 += load(r3 + i) * b;
    }
    c.q_bias[h] += sum(t0);
    if (h + 1 < c.rows) c.q_bias[h + 1] += sum(t1);
    if (h + 2 < c.rows) c.q_bias[h + 2] += sum(t2);
    if (h + 3 < c.rows) c.q_bias[h + 3] += sum(t3);
  }
}

// New maxima of some rows: everything summed so far shrinks.
static void raise_maxima(Chunk& c, const vf* tops, int head_dim, int groups) {
  alignas(64) float top[ROW_LANES], shrink[ROW_LANES];
  for (int i = 0; i < ROW_LANES; i += VL) store(top + i, splat(LOWEST));
  max_each(tops, c.rows, top);
  for (int i = 0; i < ROW_LANES; i += VL) {
    const vf before = load(c.m + i), m = vmax(before, load(top + i));
    store(shrink + i, select(before < m, exp2_neg<5>(before - m), splat(1.0f)));
    store(c.m + i, m);
  }
  for (int h = 0; h < c.rows; h++) {
    const float factor = shrink[h];
    if (factor == 1.0f) continue;
    for (int i = 0; i < head_dim; i += VL) store(c.acc[h] + i, load(c.acc[h] + i) * factor);
    for (int g = 0; g < groups; g++) store(c.corr[g][h], load(c.corr[g][h]) * factor);
    store(c.l[h], load(c.l[h]) * factor);
  }
}

// The steps below walk over all rows before the next step begins, and over whole blocks. Probabilities are relative to
// the largest score so far, which few blocks raise: nothing then waits for a horizontal maximum of scores. Lanes past
// the tokens hold anything before mask_scores and nothing visible after it.

// Scores (with page bias, cap and visibility) in place; the maximum is raised where they exceed it.
static void mask_scores(Chunk& c, Block& b, const int* first, const int* end, float cap, int head_dim, int groups) {
  const vf lowest = splat(LOWEST);
  vf tops[ROWS];
  vi higher = vi{};
  for (int h = 0; h < c.rows; h++) {
    float* s = b.s[h];
    const vf bias = splat(c.q_bias[h]);
    vf top = lowest;
    if (first[h] > 0 || end[h] < BLOCK || cap > 0) {
      for (int t = 0; t < BLOCK; t += VL) {
        vf x = load(s + t) + bias;
        if (cap > 0) x = tanh_cap(x, cap) * 1.4426950409f;
        const vi at = iota() + t;
        x = select((at >= splat_int(first[h])) & (at < splat_int(end[h])), x, splat(-__builtin_inff()));
        top = vmax(top, x);
        store(s + t, x);
      }
    } else if (c.q_bias[h] != 0) {
      for (int t = 0; t < BLOCK; t += VL) {
        const vf x = load(s + t) + bias;
        top = vmax(top, x);
        store(s + t, x);
      }
    } else {
#pragma GCC unroll 4
      for (int t = 0; t < BLOCK; t += VL) top = vmax(top, load(s + t));
    }
    tops[h] = top;
    higher |= top > splat(c.m[h]);
  }
  if (!any(higher)) return;
  for (int h = c.rows; h < ROWS; h++) tops[h] = lowest;
  raise_maxima(c, tops, head_dim, groups);
}

// Probabilities relative to the maximum so far.
template <int DEGREE>
static void softmax_rows(Chunk& c, Block& b) {
  for (int h = 0; h < c.rows; h++) {
    float* s = b.s[h];
    const vf m = splat(c.m[h]);
    vf total = load(c.l[h]);
#pragma GCC unroll 4
    for (int t = 0; t < BLOCK; t += VL) {
      const vf p = exp2_neg<DEGREE>(load(s + t) - m);
      total += p;
      store(s + t, p);
    }
    store(c.l[h], total);
  }
}

// Integer p * v_scale per group. What the integers leave out (zero point, bias) goes to `corr`, lane by lane.
template <bool WIDE, bool TOKEN_SCALES>
static void quantize_probabilities(Chunk& c, Block& b, int groups, bool token_bias, float zero) {
  const float limit = WIDE ? WIDE_LIMIT : NARROW_P_LIMIT;
  for (int g = 0; g < groups; g++) {
    alignas(64) float inverse[ROW_LANES];
    vf tops[ROWS];
    for (int h = c.rows; h < ROWS; h++) tops[h] = splat(1e-30f);
    for (int h = 0; h < c.rows; h++) {
      vf top = splat(1e-30f);
#pragma GCC unroll 4
      for (int t = 0; t < BLOCK; t += VL)
        top = vmax(top, TOKEN_SCALES ? load(b.s[h] + t) * load(b.v_scale[g] + t) : load(b.s[h] + t));
      tops[h] = top;
    }
    for (int i = 0; i < ROW_LANES; i += VL) store(inverse + i, splat(1.0f));
    max_each(tops, c.rows, inverse);
    for (int i = 0; i < ROW_LANES; i += VL) {
      const vf most = load(inverse + i);
      store(inverse + i, limit / most);
      store(b.p_scale[g] + i, most * (1.0f / limit));
    }
    for (int h = 0; h < c.rows; h++) {
      const float* p = b.s[h];
      const vf k = splat(inverse[h]);
      vi x[BLOCK / VL];
#pragma GCC unroll 4
      for (int t = 0; t < BLOCK; t += VL) {
        const vf y = TOKEN_SCALES ? load(p + t) * load(b.v_scale[g] + t) : load(p + t);
        x[t / VL] = (vi)(y * k + ROUND_MAGIC) - (vi)splat(ROUND_MAGIC);
      }
      const vf total = store_p<WIDE>(b.pw[g][h], x);
      if (zero == 0.0f && !token_bias) {
        b.p_zero[h] = 0.0f;
      } else if (TOKEN_SCALES) {
        vf add = total * (-zero * b.p_scale[g][h]);
        if (token_bias)
          for (int t = 0; t < BLOCK; t += VL) add += load(p + t) * load(b.v_bias[g] + t);
        store(c.corr[g][h], load(c.corr[g][h]) + add);
      } else {
        b.p_zero[h] = -zero * b.p_scale[g][h] * sum(total);
      }
    }
  }
}

// The biases' share of the outputs of fp32 p, to `corr`.
static void add_token_biases(Chunk& c, const Block& b, int groups) {
  for (int g = 0; g < groups; g++)
    for (int h = 0; h < c.rows; h++) {
      vf add = load(c.corr[g][h]);
      for (int t = 0; t < BLOCK; t += VL) add += load(b.s[h] + t) * load(b.v_bias[g] + t);
      store(c.corr[g][h], add);
    }
}

static void scale_probabilities(const Chunk& c, Block& b, int groups, bool token_scales) {
  for (int g = 0; g < groups; g++)
    for (int h = 0; h < c.rows; h++)
      for (int t = 0; t < BLOCK; t += VL)
        store(b.pf[g][h] + t, token_scales ? load(b.s[h] + t) * load(b.v_scale[g] + t) : load(b.s[h] + t));
}

static void sum_probabilities(const Chunk& c, Block& b) {
  for (int h = 0; h < c.rows; h++) {
    vf t = vf{};
    for (int i = 0; i < BLOCK; i += VL) t += load(b.s[h] + i);
    b.p_sum[h] = sum(t);
  }
}

}  // namespace
