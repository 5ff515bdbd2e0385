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

// Scores of row h become probabilities relative to the block's own maximum. Returns the block's weight 2^(block max - m),
// 0 when no token is visible. Visible tokens are [first, end).
static float softmax_row(Chunk& c, Block& b, int h, int tokens, int first, int end, float cap, int head_dim, int groups) {
  float* s = b.s[h];
  const int n = round_up(tokens, 2 * TILE);
  const bool masked = first > 0 || end < n;
  const float bias = c.q_bias[h];
  const vf lowest = splat(-__builtin_inff());
  vf top = lowest;
  for (int t = 0; t < n; t += VL) {
    vf x = load(s + t) + bias;
    if (cap > 0) x = tanh_cap(x, cap) * 1.4426950409f;
    if (masked) {
      const vi at = iota() + t;
      x = select((at >= splat_int(first)) & (at < splat_int(end)), x, lowest);
    }
    top = vmax(top, x);
    store(s + t, x);
  }
  const float most = max_of(top);
  if (!(most > -__builtin_inff())) {
    for (int t = 0; t < n; t += VL) store(s + t, vf{});
    return 0.0f;
  }
  float weight = 1.0f;
  if (most > c.m[h]) {
    if (c.m[h] > -__builtin_inff()) rescale(c, h, exp2_neg_scalar(c.m[h] - most), head_dim, groups);
    c.m[h] = most;
  } else {
    weight = exp2_neg_scalar(most - c.m[h]);
  }
  vf total = vf{};
  for (int t = 0; t < n; t += VL) {
    vf p = exp2_neg(load(s + t) - most);
    total += p;
    store(s + t, p);
  }
  store(c.l[h], load(c.l[h]) + total * weight);
  return weight;
}

// Integer p * v_scale per group. What the integers leave out (zero point, bias) goes to `corr`, lane by lane.
template <bool WIDE>
static void quantize_probabilities(Chunk& c, Block& b, int h, float weight, int tokens, int groups, bool token_scales, bool token_bias, float zero) {
  const float limit = WIDE ? WIDE_LIMIT : NARROW_P_LIMIT;
  const int n = round_up(tokens, 2 * TILE);
  const float* p = b.s[h];
  for (int g = 0; g < groups; g++) {
    float x[BLOCK];
    float most = 1.0f;  // the block's largest p, when nothing is folded in
    if (token_scales) {
      vf top = vf{};
      for (int t = 0; t < n; t += VL) {
        vf y = load(p + t) * load(b.v_scale[g] + t);
        top = vmax(top, y);
        store(x + t, y);
      }
      most = max_of(top);
    }
    const float* y = token_scales ? x : p;
    const float inverse = most > 0 ? limit / most : 0.0f;
    vf total = vf{};
    for (int t = 0; t < n; t += VL) {
      const vf r = load(y + t) * inverse + ROUND_MAGIC;
      total += r - ROUND_MAGIC;
      store_p<WIDE>(b.pw[g][h], t, (vi)r - (vi)splat(ROUND_MAGIC));
    }
    const float scale = weight * most / limit;
    b.p_scale[g][h] = scale;
    if (token_scales) {
      vf add = total * (-zero * scale);
      if (token_bias)
        for (int t = 0; t < n; t += VL) add += load(p + t) * load(b.v_bias[g] + t) * weight;
      store(c.corr[g][h], load(c.corr[g][h]) + add);
    } else {
      b.p_zero[h] = -zero * scale * sum(total);
    }
  }
}

static void scale_probabilities(Block& b, int h, float weight, int tokens, int groups, bool token_scales) {
  const int n = round_up(tokens, 2 * TILE);
  for (int g = 0; g < groups; g++)
    for (int t = 0; t < n; t += VL) {
      vf y = load(b.s[h] + t) * weight;
      store(b.pf[g][h] + t, token_scales ? y * load(b.v_scale[g] + t) : y);
    }
}

static float probability_sum(const Block& b, int h, int tokens) {
  vf t = vf{};
  for (int i = 0; i < round_up(tokens, 2 * TILE); i += VL) t += load(b.s[h] + i);
  return sum(t);
}
