// Blocks of trellis codes as rows of numbers, out of the basis that they are stored in.
#pragma once
#include "basis.h"
#include "families/plain/unpack.h"
#include "hadamard.h"
#include "numbers.h"
#include "offsets.h"

namespace {

// Of a kv head's keys.
struct KltRows {
  BandPieces pieces;
  alignas(64) float inverse[MAX_HEAD_DIM * MAX_HEAD_DIM];  // of the basis, [head_dim / 16][head_dim][16]
  alignas(64) double cos[MAX_HEAD_DIM / 2 + VL], sin[MAX_HEAD_DIM / 2 + VL];  // of the angles at `frame`
  int64_t frame;  // -1 before the first one
  alignas(64) float products[BLOCK * MAX_HEAD_DIM + VL];
};

static void begin_keys(KltRows& w, RowsScratch& r, const kvbits_tensor& t, int kv_head, int d) {
  __builtin_memset(r.columns, 0, sizeof(r.columns[0]) * d);  // of channels without bits
  list_pieces(w.pieces, t, d);
  w.frame = -1;
  if (!t.from_basis) return;
  const int width = round_up(d, 16);
  const float* transposed = t.from_basis + (int64_t)kv_head * d * width;
  for (int i = 0; i < width; i++)
    for (int j = 0; j < d; j++)
      w.inverse[(i / 16 * d + j) * 16 + i % 16] = i < d ? transposed[((int64_t)(j / 16) * d + i) * 16 + j % 16] : 0.0f;
}

static void klt_key_columns(const BandPieces& list, const uint8_t* page, int token, int n, RowsScratch& r) {
  for (int p = 0; p < list.count; p++) {
    const BandPiece* piece = &list.piece[p];
    if (p && piece->band == piece[-1].band) continue;  // the lower half of codes of 8 bits
    const float weight = piece->width == 8 ? 1.0f : 0.5f, zero = 256.0f + middle_of(piece->width) / weight;
    for (int i = 0; i < n; i += VL) {
      const BandAt at = {page + i % TILE * 4, (token + i) / TILE, 0, false};
      vi words[RUNS];
      any_band_indices(at, piece, words);
      const vf scale = load(r.scale[0] + i) * weight;
      for (int run = 0; run < piece->runs; run++)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
          store(r.columns[piece->band * BAND + 4 * run + k] + i, (above_256(words[run], 8 * k, 8) - zero) * scale);
    }
  }
}

template <int BITS, class Levels>
static void level_rows(const Levels& levels, const ValueArgs& a, int first, int count, RowsScratch& r) {
  const int stride = round_up(a.head_dim, RING) / 4;
  for (int quad = 0; quad < round_up(a.tokens, 8) / 4; quad++) {
    vi x[4];
    levels.load(quad, x);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const int place = token_of(quad, k);
      const vf scale = splat(r.scale[0][place] * level_weight(BITS));
#pragma GCC unroll 4
      for (int run = 0; run < 4; run++) {
        const int c = 4 * first + run * stride, left = a.head_dim - c < 4 * count ? a.head_dim - c : 4 * count;
        const vf y = (level_number<BITS>(x[run], k) - (256.0f + middle_index(BITS))) * scale;
        if (left >= VL) store(r.rows[place] + c, y);
        else if (left > 0) store_first(r.rows[place] + c, y, left);
      }
    }
  }
}

template <int BITS>
static void klt_value_rows(const ValueArgs& a, RowsScratch& r) {
  with_levels<BITS>(
      a, [&](const auto& levels, int first, int count) { level_rows<BITS>(levels, a, first, count, r); });
}

static void klt_value_rows(const Tensor& t, const ValueArgs& a, RowsScratch& r) {
  switch (t.t->bands[0]) {
    case 2: return klt_value_rows<2>(a, r);
    case 3: return klt_value_rows<3>(a, r);
    default: return klt_value_rows<4>(a, r);
  }
}

// Rows turned from the frame to where they are, in place: `stride` numbers apart, with room for a vector behind them.
static void turn_rows(const KltRows& w, float* rows, int n, int stride, int half) {
  for (int i = 0; i < half; i += VL) {
    const vf cos = __builtin_convertvector(*(const vd_mem*)(w.cos + i), vf),
             sin = __builtin_convertvector(*(const vd_mem*)(w.sin + i), vf);
    for (int t = 0; t < n; t++) {
      float *low = rows + (int64_t)t * stride + i, *high = low + half;
      const vf a = load(low), b = load(high), x = a * cos - b * sin, y = b * cos + a * sin;
      if (half - i >= VL) {
        store(low, x);
        store(high, y);
      } else {
        store_first(low, x, half - i);
        store_first(high, y, half - i);
      }
    }
  }
}

// A block's rows out of the basis that `t` stores them in, from `token` on of a page that starts at `start`. Returns
// them, a row every `stride` numbers.
static const float* out_of_basis(KltRows& w, RowsScratch& r, const kvbits_tensor& t, int kv_head, int d, int64_t start,
                                 int token, int n, int& stride) {
  if (t.offsets) add_to_rows(r, d, n, [&](int i) { return offsets_of(t, kv_head, d, start, token + i); });
  if (t.hadamard)
    for (int i = 0; i < n; i++) hadamard(r.rows[i], d);
  if (!t.from_basis) return r.rows[0];
  stride = round_up(d, 16);
  multiply_rows(n, r.rows, w.inverse, d, w.products, stride);
  const int64_t frame = start / FRAME * FRAME;
  if (frame != w.frame) angles_at(w.cos, w.sin, t.inv_freq, frame, d / 2);
  w.frame = frame;
  if (frame) turn_rows(w, w.products, n, stride, d / 2);
  return w.products;
}

}  // namespace
