// Listed outliers (KVQuant, arXiv:2401.18079, section 3.5) in attention.
//
// Outliers are listed by ascending token, so each block owns a run of the list, which is added to its scores and outputs. What a page
// holds is not trusted: an index outside its run counts nothing.
//
// Queries, scores, probabilities and outputs are kept by columns for this: the W (4 or 8) rows of one channel or token side by side, so that an outlier meets all
// rows in one vector. Scores are added to the others block by block, outputs at the end of a part.
#pragma once
#include <stdint.h>

#include "decoded.h"
#include "engine/attend/columns.h"
#include "engine/attend/dots.h"

namespace {

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

// Queries as the chunk's outliers meet them.
template <int W>
static void query_columns(Chunk& c, bool turned, int head_dim) {
  for (int i = 0; i < head_dim; i += 16) gather_columns<W>(turned ? c.folded[0] : c.q[0], ROW_STRIDE, i, c.q_columns);
}

// Takes entries `begin` .. begin + n - 1 (at most OutlierBatch::SIZE) apart, a vector at a time: take(where in the batch, token counted from `first`, channel, value). Entries
// that do not lie in `tokens` tokens from there come out as zeros on the first element.
template <class Take>
INLINE void split_outliers(const Outliers& o, OutlierBatch& b, int begin, int n, int first, int tokens, int head_dim, Take take) {
  const int base = first * head_dim, size = dtype_bytes(o.dtype);
  const vf inverse = splat(1.0f / (float)head_dim);
  const int shift = head_dim & (head_dim - 1) ? -1 : __builtin_ctz(head_dim);
  for (int i = 0; i < n; i += VL) {
    // The last vector overlaps the one before it: behind the list lies what must not be read.
    const int from = n - i >= VL || n < VL ? i : n - VL;
    vf value;
    vi at;
    if (n - from >= VL) {
      value = o.dtype == FLOAT16 ? load_as<FLOAT16>(o.value, begin + from)
              : o.dtype == BFLOAT16 ? load_as<BFLOAT16>(o.value, begin + from) : load_as<FLOAT32>(o.value, begin + from);
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
    const vi inside = (vi)((vu)at < (vu)splat_int(tokens * head_dim));
    at &= inside;
    store(b.value + from, select(inside, value, vf{}));
    if (shift >= 0) {
      take(from, at >> shift, at & splat_int(head_dim - 1));
    } else {
      // Numbers up to 64 * 512: half an element is far more than the rounding of the quotient.
      const vi token = __builtin_convertvector((to_float(at) + 0.5f) * inverse, vi);
      take(from, token, at - token * head_dim);
    }
  }
}

INLINE int batch_size(int begin, int end) { return end - begin < OutlierBatch::SIZE ? end - begin : OutlierBatch::SIZE; }

// Runs of the block that begins at `token`.
static void find_runs(Decoded& w, const kvbits_tensor& key, const kvbits_tensor& value, const uint8_t* page, int page_size, int head_dim, int token) {
  const auto find = [&](const kvbits_tensor& t, int (&run)[2]) {
    if (!t.num_outliers) return;
    const Outliers o = outliers_of(t, page, page_size, head_dim);
    run[0] = token ? run[1] : 0;
    run[1] = token + BLOCK < page_size ? outlier_end(o, run[0], (uint32_t)((token + BLOCK) * head_dim)) : o.count;
  };
  find(key, w.key_run);
  find(value, w.value_run);
}

template <int W>
INLINE void set_places(OutlierBatch& b, int i, vi token, vi channel) { *(vi_mem*)(b.place + i) = token * (W * 4) | channel * (W * 4 << 16); }

// The first n entries of a batch, neighbours of the list far apart: they often are of one token, and a sum in memory waits for the one before it.
template <class Do>
INLINE void each_apart(OutlierBatch& b, int n, Do one) {
  constexpr int PARTS = 4;
  const int part = (n + PARTS - 1) / PARTS;
  for (int i = n; i < part * PARTS; i++) {
    b.place[i] = b.upper[i] = b.turn[i] = 0;
    b.value[i] = b.low[i] = b.high[i] = 0.0f;
  }
  for (int i = 0; i < part; i++)
#pragma GCC unroll 8
    for (int k = 0; k < PARTS; k++) {
      const uint32_t place = b.place[i + k * part];
      one(i + k * part, place & 0xffff, place >> 16);
    }
}

// Scores of the block's key outliers; `turns` (kvbits_tensor.turns): cosines and sines from the block's first tile on, null where keys are as the model made them. An outlier of a turned pair adds x (cos q[pair] + sin q[pair + half]) in the lower half, x (cos q[pair + half] - sin q[pair]) in
// the upper one. No branches: which half it is cannot be foreseen.
template <int W>
static void add_key_outliers(const Chunk& c, Block& block, Decoded& w, const Outliers& o, const float* turns, int head_dim, int token) {
  typedef float column __attribute__((vector_size(W * 4)));
  OutlierBatch& b = w.batch;
  const int half = head_dim / 2;
  const char* q = (const char*)c.q_columns;
  char* s = (char*)w.block_columns;
  __builtin_memset(s, 0, W * BLOCK * sizeof(float));
  for (int begin = w.key_run[0]; begin < w.key_run[1]; begin += OutlierBatch::SIZE) {
    const int n = batch_size(begin, w.key_run[1]);
    split_outliers(o, b, begin, n, token, BLOCK, head_dim, [&](int i, vi t, vi channel) {
      const vi upper = turns ? channel >= splat_int(half) : vi{}, pair = channel - (splat_int(half) & upper);
      set_places<W>(b, i, t, pair);
      if (!turns) return;
      *(vi_mem*)(b.upper + i) = (pair + half) * (W * 4);
      *(vi_mem*)(b.turn + i) = (((t >> 4) * half + pair) * (2 * TILE) + (t & 15)) << 1 | (upper & 1);
    });
    for (int i = 0; turns && i < n; i++) {
      b.low[i] = turns[b.turn[i] >> 1];
      b.high[i] = turns[(b.turn[i] >> 1) + TILE];
    }
    for (int i = 0; turns && i < n; i += VL) {
      const vi upper = -(load_int(b.turn + i) & 1);
      const vf x = load(b.value + i), cos = load(b.low + i), sin = load(b.high + i);
      store(b.low + i, x * select(upper, -sin, cos));
      store(b.high + i, x * select(upper, cos, sin));
    }
    if (turns)
      each_apart(b, n, [&](int i, uint32_t t, uint32_t channel) { *(column*)(s + t) += *(const column*)(q + channel) * b.low[i] + *(const column*)(q + b.upper[i]) * b.high[i]; });
    else
      each_apart(b, n, [&](int i, uint32_t t, uint32_t channel) { *(column*)(s + t) += *(const column*)(q + channel) * b.value[i]; });
  }
  for (int i = 0; i < BLOCK; i += 16) add_columns<W>(block.s[0], BLOCK, i, w.block_columns);
}

// Outputs of the block's value outliers.
template <int W>
static void add_value_outliers(Chunk& c, const Block& block, Decoded& w, const Outliers& o, int head_dim, int token) {
  typedef float column __attribute__((vector_size(W * 4)));
  OutlierBatch& b = w.batch;
  const char* p = (const char*)w.block_columns;
  char* to = (char*)c.acc_columns;
  for (int i = 0; i < BLOCK; i += 16) gather_columns<W>(block.s[0], BLOCK, i, w.block_columns);
  for (int begin = w.value_run[0]; begin < w.value_run[1]; begin += OutlierBatch::SIZE) {
    const int n = batch_size(begin, w.value_run[1]);
    split_outliers(o, b, begin, n, token, BLOCK, head_dim, [&](int i, vi t, vi channel) {
      set_places<W>(b, i, t, channel);
    });
    for (int i = 0; i < n; i++) *(column*)(to + (b.place[i] >> 16)) += *(const column*)(p + (b.place[i] & 0xffff)) * b.value[i];
  }
}

// The part's value outliers into the outputs.
template <int W>
static void fold_value_outliers(Chunk& c, int head_dim) {
  for (int i = 0; i < head_dim; i += 16) add_columns<W>(c.acc[0], ROW_STRIDE, i, c.acc_columns);
}

// A call with W for the chunk's rows.
#define BY_ROWS(c, f, ...) ((c).rows <= 4 ? f<4>(__VA_ARGS__) : f<8>(__VA_ARGS__))

}  // namespace
