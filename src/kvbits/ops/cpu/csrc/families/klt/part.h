// Attention to a part whose keys have trellis codes: queries in the basis of a page's frame (basis.h) and the dot
// products of keys.h. Everything else is `base`, the plain path, which reads the part's values.
#pragma once
#include <stdint.h>

#include "basis.h"
#include "engine/attend/part.h"
#include "families/plain/part.h"
#include "hadamard.h"
#include "keys.h"
#include "offsets.h"

namespace {

typedef void (*BandKernel)(const BandArgs&);
constexpr ByRows<BandKernel> band_kernels = {{key_banded<1>, key_banded<2>, key_banded<3>, key_banded<4>, key_banded<5>,
                                              key_banded<6>, key_banded<7>, key_banded<8>},
                                             true};

struct KltPart {
  static constexpr int SUMS = 16;
  Part& part;
  PlainPart& base;
  Angles& angles;
  BandPieces& pieces;
  int64_t last_start;  // of the last page
  int64_t page_start = 0;
  int64_t frame = -1;  // whose queries are in `folded`; -1 for none
  int64_t first_frame = 0;  // of those whose queries are in `in_basis`
  int frames = 0;           // how many

  void begin() {
    list_pieces(pieces, *part.key.t, part.call.head_dim);
    angles.start = -1;
    angles.frames.pairs = 0;
    part.in_basis = true;
    if (!part.key.t->offsets) __builtin_memset(part.block.k_offsets, 0, sizeof part.block.k_offsets);
  }

  // Queries in the basis where the page's frame is another one than that of the page before.
  void enter_frame(int64_t start) {
    const Part& p = part;
    const kvbits_tensor& key = *p.key.t;
    const int64_t of_page = key.inv_freq ? start / FRAME * FRAME : 0;
    if (of_page == frame) return;
    const int head_dim = p.call.head_dim;
    if (frames == 0 || of_page < first_frame || of_page >= first_frame + frames * FRAME) {
      first_frame = of_page;
      frames = frames_at_once(p.chunks[0].rows, head_dim,
                              key.from_basis && last_start > of_page ? (last_start - of_page) / FRAME + 1 : 1);
      for (int i = 0; i < p.num_chunks; i++)
        queries_in_basis(p.chunks[i], key, angles, p.kv_head, head_dim, of_page, frames);
    }
    for (int i = 0; i < p.num_chunks; i++) {
      Chunk& c = p.chunks[i];
      const int width = round_up(head_dim, 16);
      const float* rows = c.in_basis + (of_page - first_frame) / FRAME * c.rows * width;
      for (int h = 0; h < c.rows; h++) __builtin_memcpy(c.folded[h], rows + h * width, width * sizeof(float));
      quantize_by_band(c, key, pieces, head_dim);
      if (key.offsets) multiply_offsets(c);
    }
    frame = of_page;
  }

  // What each row of offsets adds to the scores of a chunk (quant/basis.py): four rows times two queries at once, whose
  // sums do not wait for each other.
  void multiply_offsets(Chunk& c) {
    const int width = round_up(part.call.head_dim, 16);
    const float* offsets = part.key.t->offsets + (int64_t)part.kv_head * OFFSETS * width;
    for (int h = 0; h < c.rows; h += 2) {
      const float *q = c.folded[h], *r = c.folded[h + 1 < c.rows ? h + 1 : h];
      for (int j = 0; j < OFFSETS; j += SUMS) {
        const int n = OFFSETS - j < SUMS ? OFFSETS - j : SUMS;
        vf sums[2][SUMS] = {};
        for (int k = 0; k < n; k += 4) {
          auto row = [&](int i) { return offsets + (int64_t)(k + i < n ? j + k + i : j + n - 1) * width; };
          const float *rows[4] = {row(0), row(1), row(2), row(3)};
          vf x[4] = {}, y[4] = {};
          for (int i = 0; i < width; i += VL) {
            const vf a = kept(load(q + i)), b = kept(load(r + i));
#pragma GCC unroll 4
            for (int l = 0; l < 4; l++) {
              const vf m = load(rows[l] + i);
              x[l] += a * m;
              y[l] += b * m;
            }
          }
          for (int l = 0; l < 4; l++) sums[0][k + l] = x[l], sums[1][k + l] = y[l];
        }
        sum_each(sums[0], n, c.of_offsets[h] + j);
        if (h + 1 < c.rows) sum_each(sums[1], n, c.of_offsets[h + 1] + j);
      }
    }
  }

  void begin_page(const PageView& at, int64_t start) {
    enter_frame(start);
    base.begin_page(at, start);
    page_start = start;
  }

  void begin_block(const PageView& at, int token, int n) { base.begin_block(at, token, n); }

  void scores(Chunk& c, const PageView& at, int token, int n) {
    const bool offsets = part.key.t->offsets;
    float(*of_tiles)[BLOCK / TILE] = part.block.k_offsets;
    if (offsets)
      for (int i = 0; i < BLOCK / TILE; i++) {
        const int row = offset_row(page_start, token + i * TILE + (page_start == 0));
        for (int h = 0; h < c.rows; h++) of_tiles[h][i] = c.of_offsets[h][row];
      }
    band_kernels.of[c.rows - 1](
        {at.page, token / TILE, n, &c, &pieces, part.block.k_scale[0], of_tiles, part.block.s[0], at.ahead});
    if (offsets && page_start + token == 0)  // whose row is its own
      for (int h = 0; h < c.rows; h++)
        part.block.s[h][0] += c.of_offsets[h][offset_row(0, 0)] - c.of_offsets[h][offset_row(0, 1)];
  }

  void outputs(Chunk& c, const PageView& at, int token, int n) { base.outputs(c, at, token, n); }
};

}  // namespace
