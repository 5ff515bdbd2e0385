// Query preparation, softmax and quantization of probabilities for one chunk of rows.
//
//   score(h, t) = sum_g k_scale[g][t] * (q_scale[g][h] * dot(q_int, code) + q_zero[g][h]) + k_bias[g][t] * q_sum[g][h] + q_bias[h]
//
// Integer codes are read around the middle of their range also where they are asymmetric (bias + zero * scale takes
// the place of bias): rounding q and p then costs half as much.

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
      const float inverse = amax > 0 ? limit / amax : 0.0f;
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

static void fold_channels(Chunk& c, const float* scale, int head_dim) {
  for (int h = 0; h < c.rows; h++)
    for (int i = 0; i < head_dim; i += VL) store(c.folded[h] + i, load(c.q[h] + i) * load(scale + i));
}

static void add_query_bias(Chunk& c, const float* bias, int head_dim) {
  for (int h = 0; h < c.rows; h++) {
    vf t = vf{};
    for (int i = 0; i < head_dim; i += VL) t += load(c.q[h] + i) * load(bias + i);
    c.q_bias[h] += sum(t);
  }
}

// A new maximum: everything summed so far shrinks by `factor`.
static void rescale(Chunk& c, int h, float factor, int head_dim, int groups) {
  for (int i = 0; i < head_dim; i += VL) store(c.acc[h] + i, load(c.acc[h] + i) * factor);
  for (int g = 0; g < groups; g++) store(c.corr[g][h], load(c.corr[g][h]) * factor);
  store(c.l[h], load(c.l[h]) * factor);
}

// The steps below walk over all rows before the next step begins: each ends in horizontal maxima, whose latency then
// overlaps (row by row, softmax took 40 % of an int4 page).

// Scores (with page bias, cap and visibility) in place, and their maximum over the block, per row.
static void mask_scores(const Chunk& c, Block& b, int tokens, const int* first, const int* end, float cap) {
  const int n = round_up(tokens, 2 * TILE);
  const vf lowest = splat(-__builtin_inff());
  for (int h = 0; h < c.rows; h++) {
    float* s = b.s[h];
    const vf bias = splat(c.q_bias[h]);
    vf top = lowest;
    if (first[h] > 0 || end[h] < n || cap > 0) {
      for (int t = 0; t < n; t += VL) {
        vf x = load(s + t) + bias;
        if (cap > 0) x = tanh_cap(x, cap) * 1.4426950409f;
        const vi at = iota() + t;
        x = select((at >= splat_int(first[h])) & (at < splat_int(end[h])), x, lowest);
        top = vmax(top, x);
        store(s + t, x);
      }
    } else if (c.q_bias[h] != 0) {
      for (int t = 0; t < n; t += VL) {
        const vf x = load(s + t) + bias;
        top = vmax(top, x);
        store(s + t, x);
      }
    } else {
      for (int t = 0; t < n; t += VL) top = vmax(top, load(s + t));
    }
    b.top[h] = max_of(top);
  }
}

// Probabilities relative to the block's own maximum, and the block's weight 2^(top - m), 0 where nothing is visible.
static void softmax_rows(Chunk& c, Block& b, int tokens, int head_dim, int groups) {
  const int n = round_up(tokens, 2 * TILE);
  for (int h = 0; h < c.rows; h++) {
    float* s = b.s[h];
    const float top = b.top[h];
    if (!(top > -__builtin_inff())) {
      for (int t = 0; t < n; t += VL) store(s + t, vf{});
      b.weight[h] = 0.0f;
      continue;
    }
    const float fall = c.m[h] - top;
    vf weight = splat(1.0f);
    if (fall < 0) {
      if (c.m[h] > -__builtin_inff()) rescale(c, h, exp2_neg(splat(fall))[0], head_dim, groups);
      c.m[h] = top;
    } else {
      weight = exp2_neg(splat(-fall));
    }
    b.weight[h] = weight[0];
    vf total = vf{};
    for (int t = 0; t < n; t += VL) {
      const vf p = exp2_neg(load(s + t) - top);
      total += p;
      store(s + t, p);
    }
    store(c.l[h], load(c.l[h]) + total * weight);
  }
}

// Integer p * v_scale per group. What the integers leave out (zero point, bias) goes to `corr`, lane by lane.
template <bool WIDE, bool TOKEN_SCALES>
static void quantize_probabilities(Chunk& c, Block& b, int tokens, int groups, bool token_bias, float zero) {
  const float limit = WIDE ? WIDE_LIMIT : NARROW_P_LIMIT;
  const int n = round_up(tokens, 2 * TILE);
  for (int g = 0; g < groups; g++) {
    float inverse[ROWS];
    for (int h = 0; h < c.rows; h++) {
      float most = 1.0f;  // the block's largest p, when nothing is folded in
      if (TOKEN_SCALES) {
        vf top = splat(1e-30f);
        for (int t = 0; t < n; t += VL) top = vmax(top, load(b.s[h] + t) * load(b.v_scale[g] + t));
        most = max_of(top);
      }
      inverse[h] = limit / most;
      b.p_scale[g][h] = b.weight[h] * most * (1.0f / limit);
    }
    for (int h = 0; h < c.rows; h++) {
      const float* p = b.s[h];
      const vf k = splat(inverse[h]);
      vi x[BLOCK / VL];
      for (int t = 0; t < n; t += VL) {
        const vf y = TOKEN_SCALES ? load(p + t) * load(b.v_scale[g] + t) : load(p + t);
        x[t / VL] = (vi)(y * k + ROUND_MAGIC) - (vi)splat(ROUND_MAGIC);
      }
      for (int t = n; t < BLOCK; t += VL) x[t / VL] = vi{};
      const vf total = store_p<WIDE>(b.pw[g][h], x);
      if (TOKEN_SCALES) {
        vf add = total * (-zero * b.p_scale[g][h]);
        if (token_bias)
          for (int t = 0; t < n; t += VL) add += load(p + t) * load(b.v_bias[g] + t) * b.weight[h];
        store(c.corr[g][h], load(c.corr[g][h]) + add);
      } else {
        b.p_zero[h] = -zero * b.p_scale[g][h] * sum(total);
      }
    }
  }
}

static void scale_probabilities(const Chunk& c, Block& b, int tokens, int groups, bool token_scales) {
  const int n = round_up(tokens, 2 * TILE);
  for (int g = 0; g < groups; g++)
    for (int h = 0; h < c.rows; h++)
      for (int t = 0; t < n; t += VL) {
        const vf y = load(b.s[h] + t) * b.weight[h];
        store(b.pf[g][h] + t, token_scales ? y * load(b.v_scale[g] + t) : y);
      }
}

static void sum_probabilities(const Chunk& c, Block& b, int tokens) {
  for (int h = 0; h < c.rows; h++) {
    vf t = vf{};
    for (int i = 0; i < round_up(tokens, 2 * TILE); i += VL) t += load(b.s[h] + i);
    b.p_sum[h] = b.weight[h] * sum(t);
  }
}
