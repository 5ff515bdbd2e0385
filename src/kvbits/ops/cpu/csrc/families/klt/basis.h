// Queries in the basis of trellis keys (docs/reference/formats.md): turned back by the angles of a frame's start, then
// times the head's matrix, in fp32.
//
// Frames are made many at once: the matrix is larger than L1. Frames at the same distance d before and after a middle
// share their products,
//
//   q'(middle +- d) = sum over pairs i of channels: cos(d f_i) X_i +- sin(d f_i) Y_i     X_i = a_i A_i + b_i A_(i +
//   half), Y_i = b_i A_i - a_i A_(i + half)
//
// with (a, b) the query turned back by the middle and A_i the matrix's rows: X and Y made once, two frames take the
// products of one.
#pragma once
#include <stdint.h>

#include "engine/attend/angles.h"
#include "engine/attend/state.h"
#include "hadamard.h"

namespace {

// Rows that meet a number of the matrix when it is loaded.
constexpr int PRODUCT_ROWS = VL == 16 ? 8 : 4;
constexpr int PRODUCT_SUMS = VL == 8 ? 8 : 16;  // vectors of sums that do not wait for each other and stay in registers

// `panels` times 16 columns of a product of NR rows, as many at once as the registers hold sums of.
template <int NR, int AT_ONCE>
static void multiply_panels(const float (*from)[ROW_STRIDE], const float* matrix, int n, int panels, float* to,
                            int width) {
  constexpr int J = 16 / VL;
  int done = 0;
  for (; done + AT_ONCE <= panels; done += AT_ONCE) {
    const float* panel = matrix + (int64_t)done * n * 16;
    vf sums[AT_ONCE][NR][J] = {};
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
      for (int k = 0; k < AT_ONCE; k++)
#pragma GCC unroll 4
        for (int v = 0; v < J; v++) {
          const vf m = kept(load(panel + ((int64_t)k * n + i) * 16 + v * VL));
#pragma GCC unroll 8
          for (int h = 0; h < NR; h++) sums[k][h][v] += m * from[h][i];
        }
#pragma GCC unroll 4
    for (int k = 0; k < AT_ONCE; k++)
#pragma GCC unroll 8
      for (int h = 0; h < NR; h++)
#pragma GCC unroll 4
        for (int v = 0; v < J; v++) store(to + h * width + (done + k) * 16 + v * VL, sums[k][h][v]);
  }
  if constexpr (AT_ONCE > 1)
    if (done < panels)
      multiply_panels<NR, AT_ONCE / 2>(from, matrix + (int64_t)done * n * 16, n, panels - done, to + done * 16, width);
}

template <int NR>
static void multiply_some(int rows, const float (*from)[ROW_STRIDE], const float* matrix, int n, int panels, float* to,
                          int width) {
  constexpr int AT_ONCE = PRODUCT_SUMS * VL / 16 / NR;
  if (rows == NR) multiply_panels<NR, (AT_ONCE >= 4 ? 4 : AT_ONCE >= 2 ? 2 : 1)>(from, matrix, n, panels, to, width);
  else if constexpr (NR > 1) multiply_some<NR - 1>(rows, from, matrix, n, panels, to, width);
}

// Rows times a matrix [columns / 16][n][16], to [rows][width], its columns rounded up to 16. What several groups of
// rows read of it stays in L1 between them.
static void multiply_rows(int rows, const float (*from)[ROW_STRIDE], const float* matrix, int n, float* to, int width) {
  const int all = width / 16, step = rows <= PRODUCT_ROWS ? all : 2;
  for (int j = 0; j < all; j += step) {
    const int panels = all - j < step ? all - j : step;
    for (int h = 0; h < rows; h += PRODUCT_ROWS)
      multiply_some<PRODUCT_ROWS>(rows - h < PRODUCT_ROWS ? rows - h : PRODUCT_ROWS, from + h,
                                  matrix + (int64_t)j * 16 * n, n, panels, to + h * width + j * 16, width);
  }
}

// rows and pairs of frames whose sums are made together
constexpr int FRAMES_ROWS = VL == 16 ? 2 : 1, FRAMES_PAIRS = VL == 16 ? 4 : 2;

// 16 columns of NR rows, from `panel`, for `pairs` frames before and after the one that `turned` is of: to
// [frame][rows][width].
template <int NR>
static void multiply_frames(const float (*turned)[ROW_STRIDE], const float* panel, const FrameTurns& turns, int half,
                            int pairs, float* to, int64_t frame_floats, int width) {
  constexpr int J = 16 / VL;
  alignas(64) float x[NR][MAX_HEAD_DIM / 2][2][16];
  for (int i = 0; i < half; i++)
    for (int v = 0; v < 16; v += VL) {
      const vf low = kept(load(panel + i * 16 + v)), high = kept(load(panel + (half + i) * 16 + v));
#pragma GCC unroll 2
      for (int h = 0; h < NR; h++) {
        const float a = turned[h][i], b = turned[h][half + i];
        store(x[h][i][0] + v, low * a + high * b);
        store(x[h][i][1] + v, low * b - high * a);
      }
    }
  for (int pair = 0; pair < pairs; pair += FRAMES_PAIRS) {
    vf even[FRAMES_PAIRS][NR][J] = {}, odd[FRAMES_PAIRS][NR][J] = {};
    for (int i = 0; i < half; i++) {
      const float *cos = turns.cos[i] + pair, *sin = turns.sin[i] + pair;
#pragma GCC unroll 2
      for (int h = 0; h < NR; h++)
#pragma GCC unroll 4
        for (int v = 0; v < J; v++) {
          const vf p = kept(load(x[h][i][0] + v * VL)), q = kept(load(x[h][i][1] + v * VL));
#pragma GCC unroll 4
          for (int k = 0; k < FRAMES_PAIRS; k++) {
            even[k][h][v] += p * cos[k];
            odd[k][h][v] += q * sin[k];
          }
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < FRAMES_PAIRS; k++)
#pragma GCC unroll 2
      for (int h = 0; h < NR; h++)
#pragma GCC unroll 4
        for (int v = 0; v < J; v++) {
          store(to + (pairs + pair + k) * frame_floats + h * width + v * VL, even[k][h][v] + odd[k][h][v]);
          store(to + (pairs - 1 - pair - k) * frame_floats + h * width + v * VL, even[k][h][v] - odd[k][h][v]);
        }
  }
}

// How many of the `left` frames to come a chunk's queries are made for at once.
static int frames_at_once(int rows, int head_dim, int64_t left) {
  const int room = FRAME_FLOATS / (rows * round_up(head_dim, 16)),
            most = room < 2 * MOST_FRAME_PAIRS ? room : 2 * MOST_FRAME_PAIRS;
  const int around = (int)(left < most ? left : most) / (2 * FRAMES_PAIRS) * (2 * FRAMES_PAIRS);
  if (around) return around;
  return left < ROWS / rows ? (int)left : ROWS / rows;
}

// A chunk's queries as keys of `frames` frames from `start` on meet them, in `in_basis` frame by frame, zeros behind
// them.
static void queries_in_basis(Chunk& c, const kvbits_tensor& t, Angles& angles, int kv_head, int head_dim, int64_t start,
                             int frames) {
  const int width = round_up(head_dim, 16), half = head_dim / 2;
  if (!t.from_basis) {
    for (int h = 0; h < c.rows; h++) {
      float* to = c.in_basis + h * width;
      __builtin_memcpy(to, c.q[h], head_dim * sizeof(float));
      __builtin_memset(to + head_dim, 0, (width - head_dim) * sizeof(float));
      if (t.hadamard) hadamard(to, head_dim);
    }
    return;
  }
  alignas(64) float turned[ROWS][ROW_STRIDE];
  const float* matrix = t.from_basis + (int64_t)kv_head * head_dim * width;
  if (frames % (2 * FRAMES_PAIRS)) {
    for (int k = 0; k < frames; k++) {
      move_to(angles, t.inv_freq, start + k * FRAME, FRAME, half);
      turn_back(c, angles, head_dim, turned + k * c.rows);
    }
    multiply_rows(frames * c.rows, turned, matrix, head_dim, c.in_basis, width);
    return;
  }
  const int pairs = frames / 2;
  move_to(angles, t.inv_freq, start + pairs * FRAME - FRAME / 2, FRAME, half);
  turns_around(angles.frames, t.inv_freq, FRAME, half, pairs);
  turn_back(c, angles, head_dim, turned);
  for (int j = 0; j < width; j += 16)
    for (int h = 0; h < c.rows; h += FRAMES_ROWS) {
      float* to = c.in_basis + h * width + j;
      if (c.rows - h >= FRAMES_ROWS)
        multiply_frames<FRAMES_ROWS>(turned + h, matrix + (int64_t)j * head_dim, angles.frames, half, pairs, to,
                                     c.rows * width, width);
      else
        multiply_frames<1>(turned + h, matrix + (int64_t)j * head_dim, angles.frames, half, pairs, to, c.rows * width,
                           width);
    }
}

}  // namespace
