// Angles of keys that are stored turned back, and queries turned by them: a score needs q turned back once per frame of
// a basis, q . R(start + j) k = (R(-start) q) . R(j) k.
#pragma once
#include <stdint.h>

#include "state.h"

namespace {

typedef double vd __attribute__((vector_size(VL * 8)));
typedef int64_t vl __attribute__((vector_size(VL * 8)));
typedef double vd_mem __attribute__((vector_size(VL * 8), aligned(8), may_alias));

// cos and sin of (pair + 1/2) * step * inv_freq: from the middle of an even number of frames to each pair of them.
constexpr int MOST_FRAME_PAIRS = 16;
struct FrameTurns {
  alignas(64) float cos[MAX_HEAD_DIM / 2][MOST_FRAME_PAIRS], sin[MAX_HEAD_DIM / 2][MOST_FRAME_PAIRS];
  int pairs;  // that are there, 0 before the first ones
};

// Angles of the current frame.
struct Angles {
  alignas(64) double cos[MAX_HEAD_DIM / 2 + VL], sin[MAX_HEAD_DIM / 2 + VL];            // of start * inv_freq
  alignas(64) double step_cos[MAX_HEAD_DIM / 2 + VL], step_sin[MAX_HEAD_DIM / 2 + VL];  // of step * inv_freq
  int64_t start;  // -1 before the first one
  FrameTurns frames;
};

INLINE vd choose(vl mask, vd a, vd b) { return (vd)(((vl)a & mask) | ((vl)b & ~mask)); }

// cos and sin of x radians, |x| < 2^20: x less a multiple of pi/2 (in two parts, the first so short that the product is
// exact), then the series up to x^15 and x^16: absolute error below 1e-15.
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
    const vf f = half - i >= VL ? load(inv_freq + i) : load_first<FLOAT32>(inv_freq, i, half - i);
    vd c, s;
    cos_sin(__builtin_convertvector(f, vd) * (double)position, c, s);
    *(vd_mem*)(cos + i) = c;
    *(vd_mem*)(sin + i) = s;
  }
}

// Angles of `start`, from those before them where they follow by a step: a product loses 2^-53, over a million tokens
// 2^-38.
static void move_to(Angles& w, const float* inv_freq, int64_t start, int step, int half) {
  if (w.start < 0 || start != w.start + step) {
    if (w.start < 0) angles_at(w.step_cos, w.step_sin, inv_freq, step, half);
    angles_at(w.cos, w.sin, inv_freq, start, half);
  } else {
    for (int i = 0; i < half; i += VL) {
      const vd c0 = *(const vd_mem*)(w.cos + i), s0 = *(const vd_mem*)(w.sin + i);
      const vd c1 = *(const vd_mem*)(w.step_cos + i), s1 = *(const vd_mem*)(w.step_sin + i);
      *(vd_mem*)(w.cos + i) = c0 * c1 - s0 * s1;
      *(vd_mem*)(w.sin + i) = s0 * c1 + c0 * s1;
    }
  }
  w.start = start;
}

static void turns_around(FrameTurns& w, const float* inv_freq, int step, int half, int pairs) {
  alignas(64) double cos[MAX_HEAD_DIM / 2 + VL], sin[MAX_HEAD_DIM / 2 + VL];
  for (; w.pairs < pairs; w.pairs++) {
    angles_at(cos, sin, inv_freq, w.pairs * step + step / 2, half);
    for (int i = 0; i < half; i++) {
      w.cos[i][w.pairs] = (float)cos[i];
      w.sin[i][w.pairs] = (float)sin[i];
    }
  }
}

// The chunk's queries turned back by the start.
static void turn_back(const Chunk& c, const Angles& w, int head_dim, float (*to)[ROW_STRIDE]) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += VL) {
    const vf cos = __builtin_convertvector(*(const vd_mem*)(w.cos + i), vf),
             sin = __builtin_convertvector(*(const vd_mem*)(w.sin + i), vf);
    for (int h = 0; h < c.rows; h++) {
      const vf a = load(c.q[h] + i), b = load(c.q[h] + half + i);
      const vf x = a * cos + b * sin, y = b * cos - a * sin;
      if (half - i >= VL) {
        store(to[h] + i, x);
        store(to[h] + half + i, y);
      } else {
        store_first(to[h] + i, x, half - i);
        store_first(to[h] + half + i, y, half - i);
      }
    }
  }
}

}  // namespace
