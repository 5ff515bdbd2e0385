// Integer dot products with AVX-512 VNNI. vpdpbusd multiplies unsigned by signed bytes and adds four products into each
// 32-bit lane: a 64-byte load of a key tile is the same four channels of 16 tokens, of a value block 16 channels of
// four tokens, and the other operand is one broadcast 32-bit word of q or p.
//
// 8-bit codes: q and p are 16 bits in two signed pieces, x = 256 * high + low, so that kernel noise (5e-5) stays
// below the format's own. Fewer bits: one 8-bit piece (noise 1e-2 under a quantization error of 0.15).

INLINE __m512i code_field(__m512i v, __m128i shift, __m512i mask, int bits) {
  return bits == 8 ? v : _mm512_and_si512(_mm512_srl_epi32(v, shift), mask);
}

INLINE __m512i broadcast_word(const void* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return _mm512_set1_epi32(w);
}

// Integer q, 16 channels from `channel` on: [piece][channel] bytes.
template <bool WIDE>
INLINE void store_q(uint8_t* row, int channel, vi q) {
  if (WIDE) {
    __m512i x = (__m512i)q;
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
    _mm_storeu_si128((__m128i*)(row + channel), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i*)(row + MAX_HEAD_DIM + channel), _mm512_cvtepi32_epi8(low));
  } else {
    _mm_storeu_si128((__m128i*)(row + channel), _mm512_cvtepi32_epi8((__m512i)q));
  }
}

// Integer p, 16 tokens from `token` on, tokens 0 1 4 5 2 3 6 7 of each eight: [piece][slot] bytes.
template <bool WIDE>
INLINE void store_p(uint8_t* row, int token, vi p) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  __m512i x = (__m512i)p;
  if (WIDE) {
    __m512i high = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 8));
    _mm_store_si128((__m128i*)(row + token), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order));
    _mm_store_si128((__m128i*)(row + BLOCK + token), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), order));
  } else {
    _mm_store_si128((__m128i*)(row + token), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(x), order));
  }
}

template <int PIECES>
INLINE vf to_dot(const __m512i* acc) {
  vf d = (vf)_mm512_cvtepi32_ps(acc[0]);
  if (PIECES == 2) d = d * 256.0f + (vf)_mm512_cvtepi32_ps(acc[1]);
  return d;
}

// Scores of NH rows against the block's tokens.
template <int FMT, int NH>
static void key_int(const KeyArgs& a) {
  constexpr int P = is_wide(FMT) ? 2 : 1;
  constexpr int T = NH * P <= 8 ? 2 : 1;  // tiles at once: each broadcast of q then serves two loads of codes
  const Chunk& c = *a.chunk;
  const int tiles = round_up(a.tokens, 2 * TILE) / TILE;
  for (int t = 0; t < tiles; t += T) {
    for (int g = 0; g < a.groups; g++) {
      const int c0 = g * a.group_channels, c1 = c0 + a.group_channels;
      __m512i acc[T][NH][P];
      for (int i = 0; i < T; i++)
        for (int h = 0; h < NH; h++)
          for (int p = 0; p < P; p++) acc[i][h][p] = _mm512_setzero_si512();
      for (int plane = 0; plane < num_planes(FMT); plane++) {
        const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane];
        if (plane)
          for (int i = 0; i < T; i++)
            for (int h = 0; h < NH; h++)
              for (int p = 0; p < P; p++) acc[i][h][p] = _mm512_slli_epi32(acc[i][h][p], bits);
        const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
        for (int field = c0 / rb; field * rb < c1; field++) {
          const int first = c0 > field * rb ? c0 : field * rb;
          const int end = c1 < (field + 1) * rb ? c1 : (field + 1) * rb;
          const uint8_t* src = a.plane[plane] + (int64_t)t * rb * TILE + (first - field * rb) * TILE;
          const uint8_t* q = c.qw[0] + first;
          const __m128i shift = _mm_cvtsi32_si128(field * bits);
          for (int n = (end - first) / 4; n > 0; n--, src += 64, q += 4) {
            __m512i v[T];
            for (int i = 0; i < T; i++) {
              const uint8_t* at = src + i * rb * TILE;
              fetch(at + a.ahead);
              v[i] = code_field(_mm512_loadu_si512(at), shift, mask, bits);
            }
#pragma GCC unroll 8
            for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
              for (int p = 0; p < P; p++) {
                const __m512i w = broadcast_word(q + h * Q_STRIDE + p * MAX_HEAD_DIM);
                for (int i = 0; i < T; i++) acc[i][h][p] = _mm512_dpbusd_epi32(acc[i][h][p], v[i], w);
              }
          }
        }
      }
#pragma GCC unroll 2
      for (int i = 0; i < T; i++) {
        const int token = (t + i) * TILE;
#pragma GCC unroll 8
        for (int h = 0; h < NH; h++) {
          float* s = a.s + h * BLOCK + token;
          vf x = to_dot<P>(acc[i][h]) * c.q_scale[g][h] + c.q_zero[g][h];
          if (a.scale) x *= load(a.scale + g * BLOCK + token);
          if (a.bias) x += load(a.bias + g * BLOCK + token) * c.q_sum[g][h];
          store(s, g ? load(s) + x : x);
        }
      }
    }
  }
}

// acc[rows][channels of NB neighbouring 16-byte value blocks] += p . codes, for one bit field and one group.
template <int FMT, int NH, int NB>
INLINE void value_blocks(const ValueArgs& a, const uint8_t* src, int width, int block_stride, int channel, int g, __mmask16 lanes, int shift_bits, int bits,
                         float weight) {
  constexpr int P = is_wide(FMT) ? 2 : 1;
  const __m128i shift = _mm_cvtsi32_si128(shift_bits);
  const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
  const __mmask16 whole = (__mmask16)((1u << width) - 1);
  const uint8_t* p = a.block->pw[g][0];
  __m512i acc[NB][NH][P];
  for (int i = 0; i < NB; i++)
    for (int h = 0; h < NH; h++)
      for (int k = 0; k < P; k++) acc[i][h][k] = _mm512_setzero_si512();
  const int quads = round_up(a.tokens, 8) / 4;
  for (int n = 0; n < quads; n++, src += 4 * width, p += 4) {
    __m512i v[NB];
    for (int i = 0; i < NB; i++) {
      const uint8_t* at = src + i * block_stride;
      fetch(at + a.ahead);
      v[i] = NB == 2 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi32(whole, at);
      v[i] = code_field(v[i], shift, mask, bits);
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
#pragma GCC unroll 2
      for (int k = 0; k < P; k++) {
        const __m512i w = broadcast_word(p + h * 2 * BLOCK + k * BLOCK);
        for (int i = 0; i < NB; i++)
          acc[i][h][k] = P == 2 ? _mm512_dpbusd_epi32(acc[i][h][k], v[i], w) : _mm512_dpbusd_epi32(acc[i][h][k], w, v[i]);
      }
  }
#pragma GCC unroll 2
  for (int i = 0; i < NB; i++) {
    const int at = channel + i * 16;
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++) {
      vf x = to_dot<P>(acc[i][h]) * (a.block->p_scale[g][h] * weight);
      float* to = a.chunk->acc[h] + at;
      if (a.channel_scale) x *= load(a.channel_scale + at);
      _mm512_mask_storeu_ps(to, lanes, (__m512)(load(to) + x));
    }
  }
}

// The chunk's outputs gain the block's values. Zero points are settled by the caller.
template <int FMT, int NH>
static void value_int(const ValueArgs& a) {
  constexpr int NB = NH * (is_wide(FMT) ? 2 : 1) <= 8 ? 2 : 1;
  float weight = 1.0f;
  for (int plane = num_planes(FMT) - 1; plane >= 0; plane--) {
    const int bits = plane_bits(FMT, plane), rb = a.row_bytes[plane];
    const int block_stride = 16 * a.page_size;
    for (int field = 0; field * rb < a.head_dim; field++) {
      for (int r = 0; r < rb;) {
        const int width = rb - r < 16 ? rb - r : 16;
        const int channel = field * rb + r;
        if (channel >= a.head_dim) break;
        const int end = channel + width < a.head_dim ? channel + width : a.head_dim;
        const int g0 = channel / a.group_channels, g1 = (end - 1) / a.group_channels;
        const uint8_t* src = a.plane[plane] + (int64_t)r * a.page_size + a.first_token * width;
        if (NB == 2 && rb - r >= 32 && channel + 32 <= a.head_dim && g0 == (channel + 31) / a.group_channels) {
          value_blocks<FMT, NH, 2>(a, src, 16, block_stride, channel, g0, 0xffff, field * bits, bits, weight);
          r += 32;
          continue;
        }
        for (int g = g0; g <= g1; g++) {
          const int first = g * a.group_channels > channel ? g * a.group_channels : channel;
          const int last = (g + 1) * a.group_channels < end ? (g + 1) * a.group_channels : end;
          const __mmask16 lanes = (__mmask16)(((1u << (last - first)) - 1) << (first - channel));
          value_blocks<FMT, NH, 1>(a, src, width, block_stride, channel, g, lanes, field * bits, bits, weight);
        }
        r += width;
      }
    }
    weight *= (float)(1 << bits);
  }
}
