// What KVQuant's formats add to attention (arXiv:2401.18079): codes that number the entries of a codebook, keys stored before the
// rotary embedding, a stretch per token, listed outliers. Included inside a tier's anonymous namespace, after attend_state.h.
//
// Keys are decoded tile by tile (16 tokens) to fp32, turned and multiplied with all rows; values are unpacked
// to a byte per code, then looked up. A score needs q turned back once per page: q . R(start + j) k = (R(-start) q) . R(j) k.
// Formats whose scale and bias belong to channels need no arithmetic to decode: a table per channel holds the 16 numbers.
//
// Listed outliers: outliers.h.

constexpr int LEVELS = 16;  // entries of a table, repeated where a format has fewer

// Some entries of a list, taken apart.
struct OutlierBatch {
  static constexpr int SIZE = 128;
  alignas(64) uint32_t place[SIZE];  // of the columns of token (low half) and channel (high half), in bytes
  alignas(64) int32_t upper[SIZE];   // that of the upper channel of a pair
  alignas(64) int32_t turn[SIZE];    // of its cosine and sine, in bytes
  alignas(64) float value[SIZE], low[SIZE], high[SIZE];
};

// Scratch of one item.
struct Decoded {
  alignas(64) float levels[LEVELS];                 // of the keys' codes
  alignas(64) float value_levels[LEVELS];
  alignas(64) float table[MAX_HEAD_DIM][LEVELS];    // of each key channel: level * scale + bias
  alignas(64) uint32_t codes[MAX_HEAD_DIM / 4][TILE];  // of a key tile: four neighbouring channels in a word
  alignas(64) float key[MAX_HEAD_DIM][TILE];
  alignas(64) uint32_t value_codes[BLOCK / 4 * (MAX_HEAD_DIM + 32)];  // [quad][channels]: four tokens (a quad) in a word
  alignas(64) int8_t level_bytes[LEVELS];           // of the values' codes, in units that the scales hold
  alignas(64) int8_t nibble_bytes[2][LEVELS];       // of nibbles whose lower half (then upper half) is the field (nibble_code)
  alignas(64) float factor[BLOCK];                  // what the scale of a token is multiplied with
  alignas(64) float ones[BLOCK];
  alignas(64) double cos[MAX_HEAD_DIM / 2 + VL], sin[MAX_HEAD_DIM / 2 + VL];  // of start * inv_freq
  alignas(64) double step_cos[MAX_HEAD_DIM / 2 + VL], step_sin[MAX_HEAD_DIM / 2 + VL];  // of page_size * inv_freq
  int64_t angles_of;                                // the start
  OutlierBatch batch;
  alignas(64) float block_columns[BLOCK * ROWS];    // scores that outliers add, or probabilities
  bool stretched[BLOCK / TILE];                     // whether any factor of the tile is not 1
  int key_run[2], value_run[2];                     // the block's part of the lists of outliers
};

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

static void angles_at(double* cos, double* sin, const float* inv_freq, int64_t position, int half) {
  for (int i = 0; i < half; i += VL) {
    const vf f = half - i >= VL ? load(inv_freq + i) : load_first<KVBITS_FP32>(inv_freq, i, half - i);
    vd c, s;
    cos_sin(__builtin_convertvector(f, vd) * (double)position, c, s);
    *(vd_mem*)(cos + i) = c;
    *(vd_mem*)(sin + i) = s;
  }
}

// Angles of the page at `start`, from those of the page before it where it follows one: a product loses 2^-53, over a million tokens 2^-38.
static void page_angles(Decoded& w, const float* inv_freq, int64_t start, int page_size, int half) {
  if (w.angles_of < 0 || start != w.angles_of + page_size) {
    if (w.angles_of < 0) angles_at(w.step_cos, w.step_sin, inv_freq, page_size, half);
    angles_at(w.cos, w.sin, inv_freq, start, half);
  } else {
    for (int i = 0; i < half; i += VL) {
      const vd c0 = *(const vd_mem*)(w.cos + i), s0 = *(const vd_mem*)(w.sin + i);
      const vd c1 = *(const vd_mem*)(w.step_cos + i), s1 = *(const vd_mem*)(w.step_sin + i);
      *(vd_mem*)(w.cos + i) = c0 * c1 - s0 * s1;
      *(vd_mem*)(w.sin + i) = s0 * c1 + c0 * s1;
    }
  }
  w.angles_of = start;
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

// Levels as bytes: level ~ unit * (byte - zero). Outputs are means over many tokens, in which the mean error of the levels does not average out:
// of some units the one is taken that makes it smallest beside the error itself, codes being as frequent as normal numbers make them, and what
// mean is left becomes `zero`.
static void level_bytes(const kvbits_tensor& t, int kv_head, float limit, int8_t* bytes, float& unit, float& zero) {
  float levels[LEVELS], weight[LEVELS], most = 1e-30f, total = 0, best = __builtin_inff();
  fill_levels(levels, t, kv_head);
  const int entries = 1 << code_bits(t.format);
  for (int i = 0; i < entries; i++) {
    const float below = levels[i ? i - 1 : 0], above = levels[i + 1 < entries ? i + 1 : i], x = __builtin_fabsf(levels[i]);
    most = x > most ? x : most;
    total += weight[i] = (above - below) * __builtin_expf(-3.5f * x * x);
  }
  unit = most / limit;
  zero = 0;
  for (int step = 0; step < 24; step++) {
    const float candidate = most / (limit - step);
    float mean = 0, square = 0;
    for (int i = 0; i < entries; i++) {
      const float error = levels[i] - candidate * __builtin_rintf(levels[i] / candidate);
      mean += weight[i] * error;
      square += weight[i] * error * error;
    }
    const float cost = 100.0f * mean * mean + square * total;
    if (!(total > 0) || cost >= best) continue;
    best = cost;
    unit = candidate;
    zero = -mean / total / candidate;
  }
  for (int i = 0; i < LEVELS; i++) bytes[i] = (int8_t)__builtin_rintf(levels[i] / unit);
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
  int format;                  // t->format, or NESTED
  const uint8_t* low;          // NESTED: the low plane of the page
  int64_t low_ahead;
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
  if (k.format != NESTED) return;
  const uint8_t* src = k.low + (int64_t)(k.token + tile * TILE) * k.row_bytes[0];
  for (int field = 0; field * k.row_bytes[0] < k.head_dim; field++)
    for (int r = 0; r < k.row_bytes[0] && field * k.row_bytes[0] + r < k.head_dim; r += 4) {
      uint32_t* to = w.codes[(field * k.row_bytes[0] + r) / 4];
      if (!field) fetch(src + r * TILE + k.low_ahead);
      for (int lane = 0; lane < TILE; lane += VL) {  // 15 * high + low in every byte
        const vu high = (vu)load_int(to + lane);
        *(vi_mem*)(to + lane) = (vi)((high << 4) - high + (vu)(load_int(src + r * TILE + lane * 4) >> (field * 4) & 0x0f0f0f0f));
      }
    }
}

INLINE vf level_of(const Decoded& w, int format, vi word, int k) {
  if (format == KVBITS_INT8 || format == NESTED) return to_float((word >> (8 * k)) & 0xff) - 128.0f;
  if (format == KVBITS_E4M3) return fp8_lane<KVBITS_E4M3>(word, k);
  if (format == KVBITS_E5M2) return fp8_lane<KVBITS_E5M2>(word, k);
  return look_up(w.levels, word >> (8 * k));
}

// Whether a look-up gives the tile's numbers whole: no factor and offset per token.
INLINE bool looked_up(const KeyTiles& k, const Decoded& w, int tile) {
  return code_bits(k.format) < 8 && k.format != NESTED && !k.scale && !(k.stretch && w.stretched[tile]);
}

// A tile's keys in fp32, before they are turned, without outliers.
static void decode_keys(const KeyTiles& k, Decoded& w, int tile) {
  const int format = k.format;
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

// How key_tile comes by a tile's numbers: decoded before, looked up by unpacked codes, or by codes as they lie in the page.
enum KeySource { DECODED, UNPACKED, NIBBLES };

// Codes as they lie in a page, where the fields of a byte are those of channels d and d + head_dim / 2 four bits apart: in nibbles (4 bits), in
// fields 2 apart (2 bits), or in both planes (3 bits). One word then gives both in its nibbles, with other channels' bits above those of 2 bits,
// which the repeated table does not mind.
struct Nibbles {
  const uint8_t* src[2];
  int row_bytes[2];
  int bits;
  int64_t ahead;
};

INLINE bool has_nibbles(int bits, const int* row_bytes, int head_dim) {
  return bits == 4 || (bits == 2 && row_bytes[0] * 4 == head_dim) || (bits == 3 && row_bytes[1] * 8 == head_dim);
}

// Of 2-bit fields at bit `shift` of their nibbles, 0 or 2, and 1-bit fields at bit 0: codes of 3 bits. Bit 3 is anything.
INLINE vi join_nibbles(vi two, int shift, vi one) { return ((shift ? two >> 1 : two << 1) & 0x66666666) | (one & ~0x66666666); }

#ifdef HAVE_JOIN_PLANES
// The code of a nibble as it lies there: 2-bit fields in its lower half or (second) in its upper one, beside them the third bit that join_planes puts there.
INLINE int nibble_code(int bits, bool second, int nibble) {
  if (bits == 2) return second ? nibble >> 2 : nibble & 3;
  if (bits == 3) return second ? (nibble >> 2) << 1 | (nibble >> 1 & 1) : (nibble & 3) << 1 | (nibble >> 2 & 1);
  return nibble;
}

// How the third bits of field 0 .. 3 come to the 2-bit fields: turned left by so many bits, where the mask says.
INLINE vi third_bit_turn(int field) { return splat_int(field < 2 ? 2 - field : 33 - field); }
INLINE vi third_bit_mask(int field) { return splat_int(field < 2 ? 0x44444444 : 0x22222222); }
#endif

// Scores of a tile against NH rows; `turns` is the tile's part of kvbits_tensor.turns.
template <KeySource FROM, bool TURN, int NH>
static void key_tile(const Decoded& w, const Nibbles& n, const float* turns, int head_dim, const float* q, float* s) {
  const int half = head_dim / 2;
  for (int lane = 0; lane < TILE; lane += VL) {
    vf low[NH], high[NH];
    for (int h = 0; h < NH; h++) low[h] = high[h] = vf{};
    int r = 0, r1 = 0, shift = 0, shift1 = 0;
    for (int d = 0; d < half; d += 4) {
      vi words[2];
      if (FROM == NIBBLES) {
        const uint8_t* src = n.src[0] + r * TILE + lane * 4;
        if (!shift) fetch(src + n.ahead);
        words[0] = load_int(src);
        if (n.bits != 3) words[0] >>= shift;
        else {
          const uint8_t* src1 = n.src[1] + r1 * TILE + lane * 4;
          if (!shift1) fetch(src1 + n.ahead);
          words[0] = join_nibbles(words[0], shift, load_int(src1) >> shift1);
          if ((r1 += 4) == n.row_bytes[1]) r1 = 0, shift1++;
        }
        if ((r += 4) == n.row_bytes[0]) r = 0, shift += 2;
        words[1] = words[0] >> 4;
      } else if (FROM == UNPACKED) {
        words[0] = load_int(w.codes[d / 4] + lane);
        words[1] = load_int(w.codes[(half + d) / 4] + lane);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        vf a, b;
        if (FROM == DECODED) {
          a = load(w.key[d + k] + lane);
          b = load(w.key[half + d + k] + lane);
        } else {
          a = look_up(w.table[d + k], words[0] >> (8 * k));
          b = look_up(w.table[half + d + k], words[1] >> (8 * k));
        }
        if (TURN) {
          const vf cos = load(turns + (d + k) * 2 * TILE + lane), sin = load(turns + (d + k) * 2 * TILE + TILE + lane);
          const vf x = a * cos - b * sin;
          b = b * cos + a * sin;
          a = x;
        }
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          low[h] += a * q[h * ROW_STRIDE + d + k];
          if (VL == 16) high[h] += b * q[h * ROW_STRIDE + half + d + k];
          else low[h] += b * q[h * ROW_STRIDE + half + d + k];
        }
      }
    }
    for (int h = 0; h < NH; h++) store(s + h * BLOCK + lane, low[h] + high[h]);
  }
}

// ---- values ----

// Words of a quad's row, not a multiple of 64 bytes times a power of two: rows fall into different L1 sets.
INLINE int code_stride(int head_dim) { return round_up(head_dim, 16) + 16; }

// A block's codes, a byte each, [quad][channel].
static void unpack_values(const ValueArgs& a, Decoded& w, int format) {
  int up = code_bits(format);
  const int quads = round_up(a.tokens, 8) / 4, stride = code_stride(a.head_dim);
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
            uint32_t* to = w.value_codes + quad * stride + channel + i;
            const vi x = (load_words(src + i * 4, width - i) >> (field * bits) & mask) << up;
            *(vi_mem*)to = plane ? *(vi_mem*)to | x : x;
          }
        }
      }
  }
}

#ifdef HAVE_LEVEL_DOTS
// acc[rows][channels] += p . levels, both integers of 8 bits, for VL channels from `channel` on that share scales with others of group g.
template <int NH>
INLINE void add_level_sums(const ValueArgs& a, const vi (&acc)[NH], int channel, int g) {
  const vi at = iota() + splat_int(channel);
  const vi inside = (at >= splat_int(g * a.group_channels)) & (at < splat_int((g + 1) * a.group_channels));
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    vf x = to_float(acc[h]) * a.block->p_scale[g][h];
    if (a.channel_scale) x *= load(a.channel_scale + channel);
    float* to = a.chunk->acc[h] + channel;
    store(to, load(to) + select(inside, x, vf{}));
  }
}

static void fill_nibble_bytes(Decoded& w, int bits) {
  for (int i = 0; i < 2; i++)
    for (int nibble = 0; nibble < LEVELS; nibble++) w.nibble_bytes[i][nibble] = w.level_bytes[nibble_code(bits, i, nibble)];
}

// Codes in nibbles (see there) that lie in whole blocks of 16 channels.
template <int NH, bool ONE_GROUP>
static void value_nibbles(const ValueArgs& a, const Decoded& w, int bits) {
  const int quads = round_up(a.tokens, 8) / 4, half = a.head_dim / 2;
  for (int c = 0; c < half; c += 16) {
    const int r = c % a.row_bytes[0], second = c / a.row_bytes[0];
    const uint8_t* src = a.plane[0] + (int64_t)r * a.page_size + a.first_token * 16;
    const int r1 = bits == 3 ? c % a.row_bytes[1] : 0, field1 = bits == 3 ? c / a.row_bytes[1] : 0;
    const vi turn = third_bit_turn(field1), mask = third_bit_mask(field1);
    const uint8_t* src1 = bits == 3 ? a.plane[1] + (int64_t)r1 * a.page_size + a.first_token * 16 : src;
    const int g = c / a.group_channels, g2 = (c + half) / a.group_channels;
    const uint8_t *p = a.block->pw[g][0], *p2 = a.block->pw[g2][0];
    const int64_t ahead = second ? 0 : a.ahead, ahead1 = field1 ? 0 : a.ahead;
    vi low[NH], high[NH];
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) low[h] = high[h] = vi{};
    vi x, y;
    auto look_up_quad = [&](int quad) __attribute__((always_inline)) {
      fetch(src + quad * 64 + ahead);
      vi words = load_int(src + quad * 64);
      if (bits == 3) {
        fetch(src1 + quad * 64 + ahead1);
        words = join_planes(words, load_int(src1 + quad * 64), turn, mask);
      }
      x = look_up_bytes(w.nibble_bytes[second], words & 0x0f0f0f0f);
      y = look_up_bytes(w.nibble_bytes[second], (words >> 4) & 0x0f0f0f0f);
    };
    look_up_quad(0);
    for (int quad = 0; quad < quads; p += 4, p2 += 4) {  // a step ahead, as in pair_tiles
      const vi lower = x, upper = y;
      quad++;
      look_up_quad(quad < quads ? quad : 0);
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        const vi row = (vi)broadcast_word(p + h * 2 * BLOCK);
        add_level_dots(low[h], row, lower);
        add_level_dots(high[h], ONE_GROUP ? row : (vi)broadcast_word(p2 + h * 2 * BLOCK), upper);
      }
    }
    add_level_sums<NH>(a, low, c, g);
    add_level_sums<NH>(a, high, c + half, g2);
  }
}

template <int NH>
static void value_decoded(const ValueArgs& a, Decoded& w, int format) {
  const int bits = code_bits(format);
  const bool blocks = a.head_dim % 32 == 0 && a.group_channels % 16 == 0 && a.row_bytes[0] % 16 == 0 && (bits != 3 || a.row_bytes[1] % 16 == 0);
  if (blocks && has_nibbles(bits, a.row_bytes, a.head_dim)) return a.groups == 1 ? value_nibbles<NH, true>(a, w, bits) : value_nibbles<NH, false>(a, w, bits);
  unpack_values(a, w, format);
  const int quads = round_up(a.tokens, 8) / 4, stride = code_stride(a.head_dim);
  for (int c = 0; c < a.head_dim; c += VL)
    for (int g = c / a.group_channels; g < a.groups && g * a.group_channels < c + VL; g++) {
      vi acc[NH];
      for (int h = 0; h < NH; h++) acc[h] = vi{};
      const uint8_t* p = a.block->pw[g][0];
      const uint32_t* codes = w.value_codes + c;
      for (int quad = 0; quad < quads; quad++, codes += stride, p += 4) {
        const vi levels = look_up_bytes(w.level_bytes, load_int(codes));
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) add_level_dots(acc[h], (vi)broadcast_word(p + h * 2 * BLOCK), levels);
      }
      add_level_sums<NH>(a, acc, c, g);
    }
}
#else
constexpr float LEVEL_LIMIT = 0.0f;  // levels stay fp32
INLINE void fill_nibble_bytes(Decoded&, int) {}

// acc[rows][channels] += p . levels, p in fp32.
template <int NH>
static void value_decoded(const ValueArgs& a, Decoded& w, int format) {
  unpack_values(a, w, format);
  const int tokens = round_up(a.tokens, 8), stride = code_stride(a.head_dim);
  for (int c = 0; c < a.head_dim; c += VL)
    for (int g = c / a.group_channels; g < a.groups && g * a.group_channels < c + VL; g++) {
      vf acc[NH];
      for (int h = 0; h < NH; h++) acc[h] = vf{};
      const float* p = a.block->pf[g][0];
      for (int t = 0; t < tokens; t += 4) {
        const vi word = load_int(w.value_codes + t / 4 * stride + c);
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
#endif
