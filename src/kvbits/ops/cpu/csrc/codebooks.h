// What KVQuant's formats add to attention (arXiv:2401.18079): codes that number the entries of a codebook, keys stored before the
// rotary embedding, a stretch per token, listed outliers. Included inside a tier's anonymous namespace, after attend_state.h.
//
// Keys are decoded tile by tile (16 tokens) to fp32 in L1, [channel][token], turned there and multiplied with all rows; values are unpacked
// to a byte per code, then looked up. A score needs q turned back once per page: q . R(start + j) k = (R(-start) q) . R(j) k.
//
// Outliers are listed by ascending token, so each tile and block owns a run of the list. What a page holds is not trusted: an index outside its
// run is passed over.

constexpr int LEVELS = 16;  // entries of a table, repeated where a format has fewer

// Scratch of one item.
struct Decoded {
  alignas(64) float levels[LEVELS];                 // of the keys' codes
  alignas(64) float value_levels[LEVELS];
  alignas(64) float table[MAX_HEAD_DIM][LEVELS];    // of each key channel: level * scale + bias
  alignas(64) uint32_t codes[MAX_HEAD_DIM / 4][TILE];  // of a key tile: four neighbouring channels in a word
  alignas(64) float key[MAX_HEAD_DIM][TILE];
  alignas(64) uint32_t value_codes[BLOCK / 4][MAX_HEAD_DIM + 32];  // four tokens (a quad) in a word
  alignas(64) float factor[BLOCK];                  // what the scale of a token is multiplied with
  alignas(64) float ones[BLOCK], zeros[BLOCK];
  alignas(64) double cos[MAX_HEAD_DIM / 2 + VL], sin[MAX_HEAD_DIM / 2 + VL];  // of start * inv_freq
  bool stretched[BLOCK / TILE];                     // whether any factor of the tile is not 1
  int key_run[BLOCK / TILE + 1], value_run[2];      // of the block's tiles, and of the block, in the lists of outliers
};

#ifndef HAVE_LOOK_UP
// Entries of a table of 16, numbered by the low 4 bits of every lane.
INLINE vf look_up(const float* table, vi index) {
  vf x;
  for (int i = 0; i < VL; i++) x[i] = table[index[i] & (LEVELS - 1)];
  return x;
}
#endif

#ifndef HAVE_LOAD_WORDS
// The first n words, zeros behind them.
INLINE vi load_words(const void* p, int n) {
  if (n >= VL) return *(const vi_mem*)p;
  vi x = vi{};
  __builtin_memcpy(&x, p, n * 4);
  return x;
}
#endif

// ---- angles ----

typedef double vd __attribute__((vector_size(VL * 8)));
typedef int64_t vl __attribute__((vector_size(VL * 8)));
typedef double vd_mem __attribute__((vector_size(VL * 8), aligned(8), may_alias));

INLINE vd choose(vl mask, vd a, vd b) { return (vd)(((vl)a & mask) | ((vl)b & ~mask)); }

// cos and sin of x radians, |x| < 2^20: x less a multiple of pi/2 (in two parts, the first so short that the product is exact), then the
// series up to x^15 and x^16: absolute error below 1e-15.
INLINE void cos_sin(vd x, vd& cos, vd& sin) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const vd shifted = x * 0.63661977236758134308 + magic, n = shifted - magic;
  const vl quadrant = (vl)shifted;
  const vd r = (x - n * 1.57079632673412561417) - n * 6.07710050650619224932e-11, z = r * r;
  vd s = z * (-7.6471637318198164759e-13) + 1.6059043836821614599e-10;
  s = s * z - 2.5052108385441718775e-8;
  s = s * z + 2.7557319223985890653e-6;
  s = s * z - 1.9841269841269841270e-4;
  s = s * z + 8.3333333333333333333e-3;
  s = s * z - 1.6666666666666666667e-1;
  s = s * z * r + r;
  vd c = z * 4.7794773323873852974e-14 - 1.1470745597729724714e-11;
  c = c * z + 2.0876756987868098979e-9;
  c = c * z - 2.7557319223985890653e-7;
  c = c * z + 2.4801587301587301587e-5;
  c = c * z - 1.3888888888888888889e-3;
  c = c * z + 4.1666666666666666667e-2;
  c = c * z * z - 0.5 * z + 1.0;
  const vl odd = -(quadrant & 1), flip_sin = (quadrant & 2) << 62, flip_cos = ((quadrant + 1) & 2) << 62;
  sin = (vd)((vl)choose(odd, c, s) ^ flip_sin);
  cos = (vd)((vl)choose(odd, s, c) ^ flip_cos);
}

static void page_angles(Decoded& w, const float* inv_freq, int64_t start, int half) {
  for (int i = 0; i < half; i += VL) {
    const vf f = half - i >= VL ? load(inv_freq + i) : load_first<KVBITS_FP32>(inv_freq, i, half - i);
    vd cos, sin;
    cos_sin(__builtin_convertvector(f, vd) * (double)start, cos, sin);
    *(vd_mem*)(w.cos + i) = cos;
    *(vd_mem*)(w.sin + i) = sin;
  }
}

// The chunk's queries turned back by the page's start, into `folded`.
static void turn_back(Chunk& c, const Decoded& w, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += VL) {
    const vf cos = __builtin_convertvector(*(const vd_mem*)(w.cos + i), vf), sin = __builtin_convertvector(*(const vd_mem*)(w.sin + i), vf);
    for (int h = 0; h < c.rows; h++) {
      const vf a = load(c.q[h] + i), b = load(c.q[h] + half + i);
      const vf x = a * cos + b * sin, y = b * cos - a * sin;
      if (half - i >= VL) {
        store(c.folded[h] + i, x);
        store(c.folded[h] + half + i, y);
      } else {
        store_first(c.folded[h] + i, x, half - i);
        store_first(c.folded[h] + half + i, y, half - i);
      }
    }
  }
}

// ---- tables ----

// What codes of a format stand for, integers around the middle of their range. Not for whole bytes.
static void fill_levels(float* to, const kvbits_tensor& t, int kv_head) {
  const int entries = 1 << code_bits(t.format);
  for (int i = 0; i < LEVELS; i++) {
    const int code = i % entries;
    to[i] = t.codebook ? t.codebook[(int64_t)kv_head * entries + code] : (float)code - int_zero(t.format);
  }
}

static void fill_tables(Decoded& w, const float* scale, const float* bias, int head_dim) {
  for (int c = 0; c < head_dim; c++)
    for (int i = 0; i < LEVELS; i += VL) store(w.table[c] + i, load(w.levels + i) * scale[c] + bias[c]);
}

// ---- outliers ----

// Element numbers to (token, channel): multiplication by the reciprocal, exact for numbers below 2^20 and head_dim up to 512.
struct Outliers {
  const uint8_t *index, *value;
  bool wide;
  int dtype, count;
  uint64_t reciprocal;  // 2^40 / head_dim, rounded up
};

INLINE Outliers outliers_of(const kvbits_tensor& t, const uint8_t* page, int page_size, int head_dim) {
  const bool wide = (int64_t)page_size * head_dim > 65536;
  return {page + t.outlier_index_offset, page + t.outlier_value_offset, wide, t.scale_dtype, t.num_outliers, ((1ull << 40) + head_dim - 1) / head_dim};
}

INLINE uint32_t outlier_index(const Outliers& o, int i) {
  if (!o.wide) return ((const uint16_t*)o.index)[i];
  return ((const uint32_t*)o.index)[i];
}

INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, mag = half & 0x7fff;
  if (mag < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * (float)mag;
  const uint32_t bits = sign | ((mag << 13) + (mag < 0x7c00 ? 112u << 23 : 224u << 23));
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

INLINE float outlier_value(const Outliers& o, int i) {
  if (o.dtype == KVBITS_FP32) return ((const float*)o.value)[i];
  if (o.dtype == KVBITS_BF16) {
    const uint32_t bits = (uint32_t)((const uint16_t*)o.value)[i] << 16;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  return half_to_float(((const uint16_t*)o.value)[i]);
}

// First entry from `from` on that lies at or past element `limit`.
INLINE int outlier_end(const Outliers& o, int from, uint32_t limit) {
  while (from < o.count && outlier_index(o, from) < limit) from++;
  return from;
}

// Calls f(token, channel, value) for the entries [begin, end) of the list, tokens counted from `first` and below `tokens`.
template <class F>
INLINE void each_outlier(const Outliers& o, int begin, int end, int first, int tokens, int head_dim, F f) {
  for (int i = begin; i < end; i++) {
    const uint32_t at = outlier_index(o, i) - (uint32_t)(first * head_dim);
    if (at >= (uint32_t)(tokens * head_dim)) continue;
    const int token = (int)(at * o.reciprocal >> 40);
    f(token, (int)at - token * head_dim, outlier_value(o, i));
  }
}

// Runs of the block that begins at `token`.
static void find_runs(Decoded& w, const kvbits_tensor& key, const kvbits_tensor& value, const uint8_t* page, int page_size, int head_dim, int token, int n) {
  if (key.num_outliers) {
    const Outliers o = outliers_of(key, page, page_size, head_dim);
    int at = token ? w.key_run[BLOCK / TILE] : 0;
    w.key_run[0] = at;
    for (int i = 0; i < BLOCK / TILE; i++) w.key_run[i + 1] = at = i * TILE < n ? outlier_end(o, at, (uint32_t)((token + (i + 1) * TILE) * head_dim)) : at;
  }
  if (value.num_outliers) {
    const Outliers o = outliers_of(value, page, page_size, head_dim);
    w.value_run[0] = token ? w.value_run[1] : 0;
    w.value_run[1] = outlier_end(o, w.value_run[0], (uint32_t)((token + BLOCK) * head_dim));
  }
}

// Scores and outputs of formats whose own kernels know nothing of outliers.
static void add_key_outliers(Chunk& c, Block& b, const Decoded& w, const kvbits_tensor& t, const uint8_t* page, int page_size, int head_dim, int token) {
  const Outliers o = outliers_of(t, page, page_size, head_dim);
  each_outlier(o, w.key_run[0], w.key_run[BLOCK / TILE], token, BLOCK, head_dim, [&](int at, int channel, float x) {
    for (int h = 0; h < c.rows; h++) b.s[h][at] += x * c.q[h][channel];
  });
}

static void add_value_outliers(Chunk& c, const Block& b, const Decoded& w, const kvbits_tensor& t, const uint8_t* page, int page_size, int head_dim, int token) {
  const Outliers o = outliers_of(t, page, page_size, head_dim);
  each_outlier(o, w.value_run[0], w.value_run[1], token, BLOCK, head_dim, [&](int at, int channel, float x) {
    for (int h = 0; h < c.rows; h++) c.acc[h][channel] += x * b.s[h][at];
  });
}

// ---- keys ----

// A block of keys of one head.
struct KeyTiles {
  const kvbits_tensor* t;
  const uint8_t* page;
  int row_bytes[2];
  int head_dim, page_size, token;  // the block's first
  int groups, group_channels;
  const float *scale, *bias;              // [groups][BLOCK], per token; null: channels have them
  const float *channel_scale, *channel_bias;  // [head_dim]
  bool stretch;
  int64_t ahead;
};

// A tile's codes, a byte each.
static void unpack_keys(const KeyTiles& k, Decoded& w, int tile) {
  int up = code_bits(k.t->format);
  for (int plane = 0; plane < num_planes(k.t->format); plane++) {
    const int bits = plane_bits(k.t->format, plane), rb = k.row_bytes[plane];
    up -= bits;
    const int mask = bits == 8 ? -1 : ((1 << bits) - 1) * 0x01010101;
    const uint8_t* src = k.page + k.t->plane_offset[plane] + (int64_t)(k.token + tile * TILE) * rb;
    for (int field = 0; field * rb < k.head_dim; field++)
      for (int r = 0; r < rb && field * rb + r < k.head_dim; r += 4) {
        uint32_t* to = w.codes[(field * rb + r) / 4];
        if (!field) fetch(src + r * TILE + k.ahead);
        for (int lane = 0; lane < TILE; lane += VL) {
          const vi x = (*(const vi_mem*)(src + r * TILE + lane * 4) >> (field * bits) & mask) << up;
          *(vi_mem*)(to + lane) = plane ? *(vi_mem*)(to + lane) | x : x;
        }
      }
  }
}

INLINE vf level_of(const Decoded& w, int format, vi word, int k) {
  if (format == KVBITS_INT8) return to_float((word >> (8 * k)) & 0xff) - 128.0f;
  if (format == KVBITS_E4M3) return fp8_lane<KVBITS_E4M3>(word, k);
  if (format == KVBITS_E5M2) return fp8_lane<KVBITS_E5M2>(word, k);
  return look_up(w.levels, word >> (8 * k));
}

// A tile's keys in fp32, before they are turned, outliers in.
static void decode_keys(const KeyTiles& k, Decoded& w, int tile) {
  unpack_keys(k, w, tile);
  const int format = k.t->format;
  if (code_bits(format) < 8 && !k.scale && !(k.stretch && w.stretched[tile])) {
    for (int c = 0; c < k.head_dim; c += 4)
      for (int lane = 0; lane < TILE; lane += VL) {
        const vi word = load_int(w.codes[c / 4] + lane);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) store(w.key[c + i] + lane, look_up(w.table[c + i], word >> (8 * i)));
      }
  } else {
    for (int c = 0; c < k.head_dim; c += 4) {
      const int g = c / k.group_channels;
      for (int lane = 0; lane < TILE; lane += VL) {
        const int token = tile * TILE + lane;
        const vi word = load_int(w.codes[c / 4] + lane);
        const vf scale = k.scale ? load(k.scale + g * BLOCK + token) : load((k.stretch ? w.factor : w.ones) + token);
        const vf bias = k.bias ? load(k.bias + g * BLOCK + token) : vf{};
        for (int i = 0; i < 4; i++)
          store(w.key[c + i] + lane, level_of(w, format, word, i) * (scale * k.channel_scale[c + i]) + (bias + k.channel_bias[c + i]));
      }
    }
  }
  if (!k.t->num_outliers) return;
  const Outliers o = outliers_of(*k.t, k.page, k.page_size, k.head_dim);
  each_outlier(o, w.key_run[tile], w.key_run[tile + 1], k.token + tile * TILE, TILE, k.head_dim,
               [&](int token, int channel, float x) { w.key[channel][token] += x; });
}

// Scores of a tile's decoded keys against NH rows; `turns` is the tile's part of kvbits_tensor.turns.
template <bool TURN, int NH>
static void key_decoded(const Decoded& w, const float* turns, int head_dim, const float* q, float* s) {
  const int half = head_dim / 2;
  for (int lane = 0; lane < TILE; lane += VL) {
    vf low[NH], high[NH];
    for (int h = 0; h < NH; h++) low[h] = high[h] = vf{};
    for (int d = 0; d < half; d++) {
      vf a = load(w.key[d] + lane), b = load(w.key[d + half] + lane);
      if (TURN) {
        const vf cos = load(turns + d * 2 * TILE + lane), sin = load(turns + d * 2 * TILE + TILE + lane);
        const vf x = a * cos - b * sin;
        b = b * cos + a * sin;
        a = x;
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        low[h] += a * q[h * ROW_STRIDE + d];
        if (VL == 16) high[h] += b * q[h * ROW_STRIDE + half + d];
        else low[h] += b * q[h * ROW_STRIDE + half + d];
      }
    }
    for (int h = 0; h < NH; h++) store(s + h * BLOCK + lane, low[h] + high[h]);
  }
}

// ---- values ----

// A block's codes, a byte each, [quad][channel].
static void unpack_values(const ValueArgs& a, Decoded& w, int format) {
  int up = code_bits(format);
  const int quads = round_up(a.tokens, 8) / 4;
  for (int plane = 0; plane < num_planes(format); plane++) {
    const int bits = plane_bits(format, plane), rb = a.row_bytes[plane];
    up -= bits;
    const int mask = ((1 << bits) - 1) * 0x01010101;
    for (int field = 0; field * rb < a.head_dim; field++)
      for (int r = 0; r < rb && field * rb + r < a.head_dim; r += 16) {
        const int width = rb - r < 16 ? rb - r : 16, channel = field * rb + r;
        const uint8_t* src = a.plane[plane] + (int64_t)r * a.page_size + a.first_token * width;
        // Whole vectors are stored: what lies behind a run is a later run's, or nobody's.
        for (int quad = 0; quad < quads; quad++, src += 4 * width) {
          if (!field) fetch(src + a.ahead);
          for (int i = 0; i < width; i += VL) {
            uint32_t* to = w.value_codes[quad] + channel + i;
            const vi x = (load_words(src + i * 4, width - i) >> (field * bits) & mask) << up;
            *(vi_mem*)to = plane ? *(vi_mem*)to | x : x;
          }
        }
      }
  }
}

// acc[rows][channels] += p . levels, p in fp32.
template <int NH>
static void value_decoded(const ValueArgs& a, const Decoded& w) {
  const int tokens = round_up(a.tokens, 8);
  for (int c = 0; c < a.head_dim; c += VL)
    for (int g = c / a.group_channels; g < a.groups && g * a.group_channels < c + VL; g++) {
      vf acc[NH];
      for (int h = 0; h < NH; h++) acc[h] = vf{};
      const float* p = a.block->pf[g][0];
      for (int t = 0; t < tokens; t += 4) {
        const vi word = load_int(w.value_codes[t / 4] + c);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          // Slots 0 1 4 5 of eight tokens in the first quad, 2 3 6 7 in the second.
          const int token = (t & ~7) + (t & 4) / 2 + (u & 1) + (u & 2) * 2;
          const vf x = look_up(w.value_levels, word >> (8 * u));
#pragma GCC unroll 8
          for (int h = 0; h < NH; h++) acc[h] += x * p[h * BLOCK + token];
        }
      }
      const vi at = iota() + splat_int(c);
      const vi inside = (at >= splat_int(g * a.group_channels)) & (at < splat_int((g + 1) * a.group_channels));
      for (int h = 0; h < NH; h++) {
        const vf x = a.channel_scale ? acc[h] * load(a.channel_scale + c) : acc[h];
        float* to = a.chunk->acc[h] + c;
        store(to, load(to) + select(inside, x, vf{}));
      }
    }
}
