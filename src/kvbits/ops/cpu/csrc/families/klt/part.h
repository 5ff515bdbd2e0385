// Attention to a part whose keys have codes by band: queries in the basis of a page's frame (basis.h) and the dot
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
    }
    frame = of_page;
  }

  // What the row of offsets of a token's key adds to the scores of a chunk (quant/basis.py).
  void add_offsets(Chunk& c, int64_t start, int place) {
    const int head_dim = part.call.head_dim;
    for (int h = 0; h < c.rows; h++) c.q_bias[h] = 0;
    add_query_bias(c, c.folded[0], offsets_of(*part.key.t, part.kv_head, head_dim, start, place), head_dim);
  }

  void begin_page(const PageView& at, int64_t start) {
    enter_frame(start);
    base.begin_page(at, start);
    page_start = start;
    for (int i = 0; i < part.num_chunks && part.key.t->offsets; i++) add_offsets(part.chunks[i], start, 1);
  }

  void begin_block(const PageView& at, int token, int n) { base.begin_block(at, token, n); }

  void scores(Chunk& c, const PageView& at, int token, int n) {
    band_kernels.of[c.rows - 1](
        {at.page, token / TILE, n, &c, &pieces, part.block.k_scale[0], part.block.s[0], at.ahead});
    // position 0 has a row of its own, and the page's is added to all
    if (part.key.t->offsets && page_start + token == 0) {
      float of_page[ROWS];
      __builtin_memcpy(of_page, c.q_bias, sizeof of_page);
      add_offsets(c, 0, 0);
      for (int h = 0; h < c.rows; h++) part.block.s[h][0] += c.q_bias[h] - of_page[h];
      __builtin_memcpy(c.q_bias, of_page, sizeof of_page);
    }
  }

  void outputs(Chunk& c, const PageView& at, int token, int n) { base.outputs(c, at, token, n); }
};

}  // namespace
