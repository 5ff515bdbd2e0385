// Values whose codes number the entries of a codebook: unpacked to a byte per code, then looked up, in fp32 or, where tokens bring their scales
// and the tier has such products (HAVE_LEVEL_DOTS), as bytes against 8-bit p.
#pragma once
#include <stdint.h>

#include "decoded.h"
#include "engine/attend/dots.h"
#include "keys.h"

namespace {

// Levels as bytes: level ~ unit * (byte - zero). They cost outputs up to 1.4 % where tokens bring their scales; 4.3 % were measured where tokens share
// them, so that levels stay fp32 there. Outputs are means over many tokens, in which the mean error of the levels does not average out:
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

// acc[rows][channels] += p . levels, p in fp32.
template <int NH>
static void value_float_levels(const ValueArgs& a, Decoded& w, int format) {
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

#ifdef HAVE_LEVEL_DOTS
// acc[rows][channels] += p . levels, both integers of 8 bits, for VL channels from `channel` on that share scales with others of group g.
template <int NH>
INLINE void add_level_sums(const ValueArgs& a, const vi (&acc)[NH], int channel, int g) {
  const vi at = iota() + splat_int(channel);
  const vi inside = (at >= splat_int(g * a.group_channels)) & (at < splat_int((g + 1) * a.group_channels));
#pragma GCC unroll 8
  for (int h = 0; h < NH; h++) {
    const vf x = to_float(acc[h]) * a.block->p_scale[g][h];
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
static void value_byte_levels(const ValueArgs& a, Decoded& w, int format) {
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
template <int NH>
constexpr auto value_byte_levels = value_float_levels<NH>;
#endif

}  // namespace
