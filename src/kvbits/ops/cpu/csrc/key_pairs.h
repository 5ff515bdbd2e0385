// Keys before the rotary embedding in 16-bit integers: both channels of a pair in one 32-bit lane, looked up at once, turned by two products and multiplied
// with a row's pair of queries by one. Included inside a tier's anonymous namespace, after codebooks.h.
//
//   score = sum over pairs (a cos - b sin) q1 + (b cos + a sin) q2
//
// a and b are in units of the pair's largest number, cosines in units of 2^-15; the products' high words, half the turned numbers, are what meets q. Each
// row's q are in units of which their sum has 32,700, so no sum of products leaves 32 bits: 256 is the mean for head_dim 128, where the integer kernels give
// their largest q 127.

constexpr int PAIR_TILES = 8;  // of a page at most
constexpr float Q_SUM = 32700.0f;  // of a row's magnitudes; rounding adds up to head_dim / 2, and 23,170 * 33,000 < 2^31

struct KeyPairs {
  alignas(64) int16_t table[MAX_HEAD_DIM / 2][2 * LEVELS];      // of each pair: what codes of a, then of b stand for
  alignas(64) int32_t turns[PAIR_TILES][MAX_HEAD_DIM / 2][TILE];  // low half cosine, high half sine, of every token
  alignas(64) float unit[MAX_HEAD_DIM / 2 + VL];                // of a pair's numbers, 32767 of them at most
  alignas(64) float scale[2][MAX_HEAD_DIM / 2 + VL], bias[2][MAX_HEAD_DIM / 2 + VL];
};

#ifdef HAVE_PAIR_DOTS
INLINE bool pairs_usable(const kvbits_tensor& t, const int* row_bytes, int page_size, int head_dim) {
  const int bits = code_bits(t.format);
  const bool channels = t.per_channel || t.static_scale;
  return t.inv_freq && bits < 8 && channels && page_size <= PAIR_TILES * TILE && has_nibbles(bits, row_bytes, head_dim);
}

static void fill_turns(KeyPairs& p, const float* turns, int page_size, int half) {
  for (int tile = 0; tile < page_size / TILE; tile++)
    for (int d = 0; d < half; d++, turns += 2 * TILE) {
      const vi cos = round_to_int(load(turns) * 32767.0f), sin = round_to_int(load(turns + TILE) * 32767.0f);
      *(vi_mem*)p.turns[tile][d] = (cos & 0xffff) | sin << 16;
    }
}

static void fill_pairs(KeyPairs& p, const float* levels, const float* scale, const float* bias, int head_dim) {
  const int half = head_dim / 2;
  float low = levels[0], high = levels[0];
  for (int i = 1; i < LEVELS; i++) {
    low = levels[i] < low ? levels[i] : low;
    high = levels[i] > high ? levels[i] : high;
  }
  for (int d = 0; d < half; d += VL) {
    vf most = splat(1e-30f);
    for (int i = 0; i < 2; i++) {
      const vf s = load(scale + i * half + d), b = load(bias + i * half + d), x = s * low + b, y = s * high + b;
      most = vmax(most, vmax(vmax(x, -x), vmax(y, -y)));
    }
    const vf inverse = 32767.0f / most;
    store(p.unit + d, most);
    for (int i = 0; i < 2; i++) {
      store(p.scale[i] + d, load(scale + i * half + d) * inverse);
      store(p.bias[i] + d, load(bias + i * half + d) * inverse);
    }
  }
  const vf x = load(levels);
  for (int d = 0; d < half; d++) store_shorts(p.table[d], x * p.scale[0][d] + p.bias[0][d], x * p.scale[1][d] + p.bias[1][d]);
}

// q turned to the page's start, as pairs of integers.
static void quantize_pairs(Chunk& c, const KeyPairs& p, int head_dim) {
  const int half = head_dim / 2;
  for (int h = 0; h < c.rows; h++) {
    const float* q = c.folded[h];
    vf total = splat(1e-30f);
    for (int d = 0; d < half; d += VL) {
      const vf unit = load(p.unit + d), a = load(q + d) * unit, b = load(q + half + d) * unit;
      const vf x = vmax(a, -a) + vmax(b, -b);
      total += half - d >= VL ? x : select(iota() < splat_int(half - d), x, vf{});
    }
    const float k = Q_SUM / sum(total);
    for (int d = 0; d < half; d += VL) {
      const vf unit = load(p.unit + d) * k;
      const vi a = round_to_int(load(q + d) * unit), b = round_to_int(load(q + half + d) * unit);
      *(vi_mem*)(c.qw[h] + d * 4) = (a & 0xffff) | b << 16;
    }
    c.pair_scale[h] = 65536.0f / (32767.0f * 32767.0f) / k;
  }
}

// For a byte shuffle: either half of a lane from the other one.
INLINE __m512i other_half() { return _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); }

// Codes of four pairs of neighbouring channels as indices into their tables: those of the lower channel in the low halves, 16 more than those of the upper in the
// high ones.
INLINE void pair_codes(vi words, __m512i* codes) {
  const __m512i nibble = _mm512_set1_epi8(15), second = _mm512_set1_epi8(16);
  const __m512i low = _mm512_and_si512((__m512i)words, nibble);
  const __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi32((__m512i)words, 4), nibble, second, 0xea);
  codes[0] = _mm512_mask_shuffle_epi8(low, 0xcccccccccccccccc, high, other_half());
  codes[2] = _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, other_half());
  codes[1] = _mm512_srli_epi16(codes[0], 8);  // an index is the lowest 5 bits of 16
  codes[3] = _mm512_srli_epi16(codes[2], 8);
}

// Scores of T neighbouring tiles against NH rows: what is loaded of tables and queries serves them all.
template <int NH, int T, bool THREE_BITS>
static void pair_tiles(const Chunk& c, const KeyPairs& p, const Nibbles& n, int tile, int head_dim, float* s) {
  const int half = head_dim / 2, next = n.row_bytes[0] * TILE, next1 = n.row_bytes[1] * TILE;
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  __m512i acc[T][NH];
#pragma GCC unroll 2
  for (int i = 0; i < T; i++)
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) acc[i][h] = _mm512_setzero_si512();
  const uint8_t *src = n.src[0], *src1 = n.src[1], *q = c.qw[0];
  int shift = 0, shift1 = 0;
  for (int d = 0; d < half; d += 4, q += 16) {
    __m512i codes[T][4];
#pragma GCC unroll 2
    for (int i = 0; i < T; i++) {
      if (!shift) fetch(src + i * next + n.ahead);
      vi words = load_int(src + i * next);
      if (THREE_BITS) {
        if (!shift1) fetch(src1 + i * next1 + n.ahead);
        words = join_nibbles(words, shift, load_int(src1 + i * next1) >> shift1);
      } else {
        words >>= shift;
      }
      pair_codes(words, codes[i]);
    }
    if ((src += 64) == n.src[0] + next) src = n.src[0], shift += 2;
    if (THREE_BITS && (src1 += 64) == n.src[1] + next1) src1 = n.src[1], shift1++;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const __m512i table = _mm512_load_si512(p.table[d + k]);
      __m512i turned[T];
#pragma GCC unroll 2
      for (int i = 0; i < T; i++) {
        const __m512i keys = _mm512_permutexvar_epi16(codes[i][k], table), turn = _mm512_load_si512(p.turns[tile + i][d + k]);
        const __m512i x = _mm512_madd_epi16(keys, _mm512_xor_si512(turn, upper)), y = _mm512_madd_epi16(keys, _mm512_rol_epi32(turn, 16));
        turned[i] = _mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, other_half());
      }
#pragma GCC unroll 8
      for (int h = 0; h < NH; h++) {
        const __m512i row = broadcast_word(q + h * Q_STRIDE + k * 4);
#pragma GCC unroll 2
        for (int i = 0; i < T; i++) add_pair_dot(acc[i][h], turned[i], row);
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < T; i++)
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) store(s + h * BLOCK + i * TILE, to_float((vi)acc[i][h]) * c.pair_scale[h]);
}

typedef void (*PairKernel)(const Chunk&, const KeyPairs&, const Nibbles&, int tile, int head_dim, float* s);
#define PAIR_ROWS(t, three) \
  {pair_tiles<1, t, three>, pair_tiles<2, t, three>, pair_tiles<3, t, three>, pair_tiles<4, t, three>, \
   pair_tiles<5, t, three>, pair_tiles<6, t, three>, pair_tiles<7, t, three>, pair_tiles<8, t, three>}
static const PairKernel pair_kernels[2][2][ROWS] = {{PAIR_ROWS(1, false), PAIR_ROWS(1, true)}, {PAIR_ROWS(2, false), PAIR_ROWS(2, true)}};
#undef PAIR_ROWS

// Of one tile or two.
INLINE void attend_pairs(const Chunk& c, const KeyPairs& p, const Nibbles& n, int tile, int tiles, int head_dim, float* s) {
  pair_kernels[tiles - 1][n.bits == 3][c.rows - 1](c, p, n, tile, head_dim, s);
}
#else
INLINE bool pairs_usable(const kvbits_tensor&, const int*, int, int) { return false; }
INLINE void fill_turns(KeyPairs&, const float*, int, int) {}
INLINE void fill_pairs(KeyPairs&, const float*, const float*, const float*, int) {}
INLINE void quantize_pairs(Chunk&, const KeyPairs&, int) {}
INLINE void attend_pairs(const Chunk&, const KeyPairs&, const Nibbles&, int, int, int, float*) {}
#endif
