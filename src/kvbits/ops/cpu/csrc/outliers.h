// Listed outliers (KVQuant, arXiv:2401.18079, section 3.5) in attention. Included inside a tier's anonymous namespace, after attend_state.h.
//
// Outliers are listed by ascending token, so each block owns a run of the list, which is added to its scores and outputs. What a page
// holds is not trusted: an index outside its run counts nothing.
//
// Queries, scores, probabilities and outputs are kept by fours of rows beside each other for this: an outlier then meets four rows in one vector. Scores are added
// to the others block by block, outputs at the end of a part.

struct Outliers {
  const uint8_t *index, *value;
  bool wide;
  int dtype, count;
};

INLINE Outliers outliers_of(const kvbits_tensor& t, const uint8_t* page, int page_size, int head_dim) {
  const bool wide = (int64_t)page_size * head_dim > 65536;
  return {page + t.outlier_index_offset, page + t.outlier_value_offset, wide, t.scale_dtype, t.num_outliers};
}

INLINE uint32_t outlier_index(const Outliers& o, int i) {
  if (!o.wide) return ((const uint16_t*)o.index)[i];
  return ((const uint32_t*)o.index)[i];
}

// First entry from `from` on that lies at or past element `limit`.
INLINE int outlier_end(const Outliers& o, int from, uint32_t limit) {
  while (from < o.count && outlier_index(o, from) < limit) from++;
  return from;
}

// Where the four of number i is, in an order that costs least to make.
#ifdef HAVE_FOURS
INLINE vi place_of_four(vi i) { return (i & ~15) | ((i & 3) << 2) | ((i >> 2) & 3); }
#else
INLINE vi place_of_four(vi i) { return i; }
#endif

#ifndef HAVE_FOURS
// Numbers `first` .. first + 15 of four rows, to places.
INLINE void gather_fours(const float* rows, int64_t stride, int first, Fours* to) {
  for (int i = first; i < first + 16; i++)
    for (int r = 0; r < 4; r++) to[i][r] = rows[r * stride + i];
}
// rows += fours.
INLINE void add_fours(float* rows, int64_t stride, int first, const Fours* from) {
  for (int r = 0; r < 4; r++)
    for (int i = first; i < first + 16; i++) rows[r * stride + i] += from[i][r];
}
#endif

// Queries as the chunk's outliers meet them.
static void query_fours(Chunk& c, bool turned, int head_dim) {
  for (int h = 0; h < c.rows; h += 4)
    for (int i = 0; i < head_dim; i += 16) gather_fours(turned ? c.folded[h] : c.q[h], ROW_STRIDE, i, c.q_fours[h / 4]);
}

// Takes up to SIZE entries from `begin` apart, tokens counted from `first`. Entries that do not lie in `tokens` tokens from there come out as
// zeros on the first element.
static void split_outliers(const Outliers& o, OutlierBatch& b, int begin, int end, int first, int tokens, int head_dim) {
  const int n = end - begin < OutlierBatch::SIZE ? end - begin : OutlierBatch::SIZE, size = dtype_bytes(o.dtype);
  const int base = first * head_dim;
  const vf inverse = splat(1.0f / (float)head_dim);
  if (n % VL) *(vi_mem*)(b.token + n / VL * VL) = *(vi_mem*)(b.channel + n / VL * VL) = vi{};  // lanes behind the list are computed with, though not used
  for (int i = 0; i < n; i += VL) {
    // The last vector overlaps the one before it: behind the list lies what must not be read.
    const int from = n - i >= VL || n < VL ? i : n - VL;
    vf value;
    vi at;
    if (n - from >= VL) {
      value = o.dtype == KVBITS_FP16 ? load_as<KVBITS_FP16>(o.value, begin + from)
              : o.dtype == KVBITS_BF16 ? load_as<KVBITS_BF16>(o.value, begin + from) : load_as<KVBITS_FP32>(o.value, begin + from);
      if (o.wide) at = load_int(o.index + (int64_t)(begin + from) * 4);
      else at = __builtin_convertvector(*(const vh_mem*)((const uint16_t*)o.index + begin + from), vi);
    } else {
      alignas(64) int32_t some[VL] = {};
      for (int k = 0; k < n; k++) some[k] = (int32_t)outlier_index(o, begin + k);
      alignas(64) float values[VL];
      widen(values, o.value + (int64_t)begin * size, n, o.dtype);
      at = load_int(some);
      value = load(values);
    }
    at -= base;
    const vi inside = (at >= splat_int(0)) & (at < splat_int(tokens * head_dim));
    at &= inside;
    // Numbers up to 64 * 512: half an element is far more than the rounding of the quotient.
    const vi token = __builtin_convertvector((to_float(at) + 0.5f) * inverse, vi);
    *(vi_mem*)(b.token + from) = token;
    *(vi_mem*)(b.channel + from) = at - token * head_dim;
    store(b.value + from, select(inside, value, vf{}));
  }
}

// Runs of the block that begins at `token`.
static void find_runs(Decoded& w, const kvbits_tensor& key, const kvbits_tensor& value, const uint8_t* page, int page_size, int head_dim, int token) {
  if (key.num_outliers) {
    const Outliers o = outliers_of(key, page, page_size, head_dim);
    w.key_run[0] = token ? w.key_run[1] : 0;
    w.key_run[1] = token + BLOCK < page_size ? outlier_end(o, w.key_run[0], (uint32_t)((token + BLOCK) * head_dim)) : o.count;
  }
  if (value.num_outliers) {
    const Outliers o = outliers_of(value, page, page_size, head_dim);
    w.value_run[0] = token ? w.value_run[1] : 0;
    w.value_run[1] = token + BLOCK < page_size ? outlier_end(o, w.value_run[0], (uint32_t)((token + BLOCK) * head_dim)) : o.count;
  }
}

// Cosines and sines from the block's first tile on, those of KeyPairs where there are any: they lie in the fastest cache already. None: keys are as the model made them.
struct OutlierTurns {
  const float* floats;
  const int32_t* shorts;
};

// What an outlier of a turned key pair adds: x (cos q[pair] + sin q[pair + half]) in the lower half, x (cos q[pair + half] - sin q[pair]) in the
// upper one. No branches: which half it is cannot be foreseen.
static void turn_outliers(OutlierBatch& b, int n, const OutlierTurns& turns, int half) {
  for (int i = 0; i < n; i += VL) {
    const vi channel = load_int(b.channel + i), token = load_int(b.token + i);
    const vi pair = channel - (splat_int(half) & (channel >= splat_int(half)));
    *(vi_mem*)(b.turn + i) = turns.shorts ? ((token >> 4) * (MAX_HEAD_DIM / 2) + pair) * TILE + (token & 15)
                                          : ((token >> 4) * half + pair) * (2 * TILE) + (token & 15);
  }
  if (turns.shorts) {
    for (int i = 0; i < n; i++) b.turn[i] = turns.shorts[b.turn[i]];
    for (int i = 0; i < n; i += VL) {
      const vi both = load_int(b.turn + i);
      store(b.low + i, to_float(both << 16 >> 16) * (1.0f / 32767.0f));
      store(b.high + i, to_float(both >> 16) * (1.0f / 32767.0f));
    }
  } else {
    for (int i = 0; i < n; i++) {
      b.low[i] = turns.floats[b.turn[i]];
      b.high[i] = turns.floats[b.turn[i] + TILE];
    }
  }
  for (int i = 0; i < n; i += VL) {
    const vi channel = load_int(b.channel + i), upper = channel >= splat_int(half);
    const vf x = load(b.value + i), cos = load(b.low + i), sin = load(b.high + i);
    store(b.low + i, x * select(upper, -sin, cos));
    store(b.high + i, x * select(upper, cos, sin));
    const vi pair = channel - (splat_int(half) & upper);
    *(vi_mem*)(b.channel + i) = place_of_four(pair);
    *(vi_mem*)(b.upper + i) = place_of_four(pair + half);
  }
}

static void find_places(int32_t* at, int n) {
  for (int i = 0; i < n; i += VL) *(vi_mem*)(at + i) = place_of_four(load_int(at + i));
}

// Scores of the block's key outliers.
static void add_key_outliers(Chunk& c, Block& block, Decoded& w, const Outliers& o, const OutlierTurns& turns, int head_dim, int token) {
  OutlierBatch& b = w.batch;
  const bool whole = w.key_run[1] - w.key_run[0] <= OutlierBatch::SIZE;  // one batch serves all rows
  for (int h = 0; h < c.rows; h += 4) {
    Fours* s = w.block_fours;
    const Fours* q = c.q_fours[h / 4];
    for (int i = 0; i < 4 * BLOCK; i += VL) store((float*)s + i, vf{});
    for (int begin = w.key_run[0]; begin < w.key_run[1]; begin += OutlierBatch::SIZE) {
      const int left = w.key_run[1] - begin, n = left < OutlierBatch::SIZE ? left : OutlierBatch::SIZE;
      if (!whole || !h) {
        split_outliers(o, b, begin, w.key_run[1], token, BLOCK, head_dim);
        if (turns.floats) turn_outliers(b, n, turns, head_dim / 2);
        else find_places(b.channel, n);
        find_places(b.token, n);
      }
      if (turns.floats)
        for (int i = 0; i < n; i++) s[b.token[i]] += q[b.channel[i]] * b.low[i] + q[b.upper[i]] * b.high[i];
      else
        for (int i = 0; i < n; i++) s[b.token[i]] += q[b.channel[i]] * b.value[i];
    }
    for (int i = 0; i < BLOCK; i += 16) add_fours(block.s[h], BLOCK, i, s);
  }
}

// Outputs of the block's value outliers.
static void add_value_outliers(Chunk& c, const Block& block, Decoded& w, const Outliers& o, int head_dim, int token) {
  OutlierBatch& b = w.batch;
  const bool whole = w.value_run[1] - w.value_run[0] <= OutlierBatch::SIZE;
  for (int h = 0; h < c.rows; h += 4) {
    Fours *p = w.block_fours, *to = c.acc_fours[h / 4];
    for (int i = 0; i < BLOCK; i += 16) gather_fours(block.s[h], BLOCK, i, p);
    for (int begin = w.value_run[0]; begin < w.value_run[1]; begin += OutlierBatch::SIZE) {
      const int left = w.value_run[1] - begin, n = left < OutlierBatch::SIZE ? left : OutlierBatch::SIZE;
      if (!whole || !h) {
        split_outliers(o, b, begin, w.value_run[1], token, BLOCK, head_dim);
        find_places(b.channel, n);
        find_places(b.token, n);
      }
      for (int i = 0; i < n; i++) to[b.channel[i]] += p[b.token[i]] * b.value[i];
    }
  }
}

// The part's value outliers into the outputs.
static void fold_value_outliers(Chunk& c, int head_dim) {
  for (int h = 0; h < c.rows; h += 4)
    for (int i = 0; i < head_dim; i += 16) add_fours(c.acc[h], ROW_STRIDE, i, c.acc_fours[h / 4]);
}
