// What KVQuant's formats (arXiv:2401.18079) do to a page before its codes: keys turned back by their positions, ranges that leave out the page's worst elements.
// The definition is src/kvbits/quant/{rotary,outliers}.py, which this matches bit for bit.
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"

namespace {

typedef double vd __attribute__((vector_size(VL * 8)));
typedef double vd_mem __attribute__((vector_size(VL * 8), aligned(8), may_alias));

// Turns the page's rows back. `start`: cosines, then sines of the first token's angles, head_dim / 2 of each padded to 16; `steps`: the same of token j's
// angle from there, row by row.
static void turn_rows_back(PageBuffers& b, const double* start, const double* steps, int page_size, int head_dim) {
  const int width = padded_width(head_dim), half = head_dim / 2, padded = round_up(half, 16);
  for (int t = 0; t < page_size; t++, steps += 2 * padded)
    for (int i = 0; i < half; i += VL) {
      const vd c0 = *(const vd_mem*)(start + i), s0 = *(const vd_mem*)(start + padded + i);
      const vd c1 = *(const vd_mem*)(steps + i), s1 = *(const vd_mem*)(steps + padded + i);
      const vf cos = __builtin_convertvector(c0 * c1 - s0 * s1, vf), sin = __builtin_convertvector(s0 * c1 + c0 * s1, vf);
      float* low = b.x + (int64_t)t * width + i;
      const vf x = load(low), y = load(low + half);
      const vf one = x * cos + y * sin + 0.0f, other = y * cos - x * sin + 0.0f;  // no -0: which zero is the smallest?
      if (half - i >= VL) {
        store(low, one);
        store(low + half, other);
      } else {
        store_first(low, one, half - i);
        store_first(low + half, other, half - i);
      }
    }
}

static int count_above(const int32_t* keys, int m, int32_t limit) {
  vi above = vi{};
  for (int i = 0; i < m; i += VL) above -= load_int(keys + i) > splat_int(limit);
  int32_t t[VL], total = 0;
  *(vi_mem*)t = above;
  for (int i = 0; i < VL; i++) total += t[i];
  return total;
}

// A number that at least n of the keys (m, whole vectors) reach, the largest such number unless exactly n reach a smaller one. Negative keys do not count.
static int32_t nth_largest(const int32_t* keys, int m, int n) {
  int32_t found = 0;
  for (int bit = 30; bit >= 0; bit--) {
    const int32_t candidate = found | 1 << bit;
    const int total = count_above(keys, m, candidate - 1);
    if (total < n) continue;
    found = candidate;
    if (total == n) break;
  }
  return found;
}

constexpr int LEFT_OUT = 4, KEPT = LEFT_OUT + 1;  // most elements that one range leaves out

// The KEPT smallest and largest of n vectors, lane by lane, the outermost first; of magnitudes the largest only.
template <bool BOTH>
INLINE void sorted_ends(const float* x, int n, int64_t stride, vf* small, vf* large) {
  for (int i = 0; i < KEPT; i++) {
    small[i] = splat(__builtin_inff());
    large[i] = splat(BOTH ? -__builtin_inff() : -1.0f);
  }
  for (int t = 0; t < n; t++) {
    const vf loaded = load(x + t * stride);
    vf v = BOTH ? loaded : (vf)((vi)loaded & 0x7fffffff), w = v;
#pragma GCC unroll 5
    for (int i = 0; i < KEPT; i++) {
      const vf top = large[i];
      large[i] = vmax(top, v);
      v = vmin(top, v);
      if (!BOTH) continue;
      const vf bottom = small[i];
      small[i] = vmin(bottom, w);
      w = vmax(bottom, w);
    }
  }
}

// What a range becomes as elements leave it, and what each leaving wins, of VL groups from `g` on; `stride` groups in a row of the tables.
template <bool BOTH>
INLINE void leave_out(PageBuffers& b, vf* small, vf* large, int steps, int g, int stride) {
  store(b.lows + g, small[0]);
  store(b.highs + g, large[0]);
  vf width = BOTH ? large[0] - small[0] : large[0], last = splat(__builtin_inff());
  for (int k = 0; k < steps; k++) {
    const vi drop_low = BOTH ? (small[1] - small[0]) > (large[0] - large[1]) : vi{};
#pragma GCC unroll 4
    for (int i = 0; i < KEPT - 1; i++) {
      if (BOTH) small[i] = select(drop_low, small[i + 1], small[i]);
      large[i] = BOTH ? select(drop_low, large[i], large[i + 1]) : large[i + 1];
    }
    const vf narrower = BOTH ? large[0] - small[0] : large[0];
    last = vmin(width * width - narrower * narrower, last);
    width = narrower;
    *(vi_mem*)(b.wins + k * stride + g) = (vi)last;
    store(b.lows + (k + 1) * stride + g, small[0]);
    store(b.highs + (k + 1) * stride + g, large[0]);
  }
}

// Ranges of groups of `size` elements into b.low and b.high, the page's n worst elements left out. `by_token`: the groups are [head_dim / size][page_size],
// else the channels.
template <bool BOTH>
static void trimmed_ranges(PageBuffers& b, int page_size, int head_dim, int size, bool by_token, int n) {
  const int width = padded_width(head_dim), groups = by_token ? head_dim / size * page_size : head_dim, stride = round_up(groups, 16);
  const int elements = by_token ? size : page_size, steps = elements - 1 < LEFT_OUT ? elements - 1 : LEFT_OUT;
  vf small[KEPT], large[KEPT];
  if (by_token) {
    float* turned = (float*)b.keys;  // [size][page_size]
    for (int first = 0; first < head_dim; first += size) {
      transpose(b.x + first, width, page_size, size, turned);
      for (int t = 0; t < page_size; t += VL) {
        sorted_ends<BOTH>(turned + t, size, page_size, small, large);
        leave_out<BOTH>(b, small, large, steps, first / size * page_size + t, stride);
      }
    }
  } else {
    for (int c = 0; c < head_dim; c += VL) {
      sorted_ends<BOTH>(b.x + c, page_size, width, small, large);
      leave_out<BOTH>(b, small, large, steps, c, stride);
    }
  }
  for (int k = 0; k < steps; k++)
    for (int g = groups; g < stride; g++) b.wins[k * stride + g] = -1;
  const int32_t least = nth_largest(b.wins, steps * stride, n);
  int ties = n - count_above(b.wins, steps * stride, least);  // of equal wins those of the first groups count
  for (int g = 0; g < groups; g++) {
    int k = 0;
    for (; k < steps; k++) {
      const int32_t win = b.wins[k * stride + g];
      if (win < least || (win == least && ties-- <= 0)) break;
    }
    b.high[g] = b.highs[k * stride + g] + 0.0f;
    b.low[g] = BOTH ? b.lows[k * stride + g] + 0.0f : -b.high[g];
  }
}

}  // namespace
