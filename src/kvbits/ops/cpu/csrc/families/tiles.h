// One work item in tiles: the rows of one kv head over a range of pages. A block's keys and values become bfloat16
// numbers once, whatever their format, and all tiles of rows are multiplied with them.
#pragma once
#include "engine/tiles/rows.h"
#include "engine/tiles/softmax.h"
// behind the width of vectors
#include "engine/attend/rows.h"
#include "families/klt/tiles.h"
#include "families/plain/tiles.h"

namespace {

struct ItemScratch {
  TileScratch tiles;
  KltTiles klt;
};

// Part of an item: how its pages store keys and values, and what of them is there.
struct TilePart {
  const kvbits_attend_call& call;
  const kvbits_part& pages;
  TileScratch& w;
  KltTiles& klt;
  int kv_head, tiles;
  Tensor key, value;
  int key_terms, value_terms, query_terms;
  bool one_term;
  int key_groups;  // of scales that are left to scores
  bool key_biases, value_biases;
  int64_t frame;  // whose queries are in `in_basis`; -1 for none
};

// Whether means of keys are added to scores.
static bool has_means(const TilePart& p) { return p.key_groups && p.key.t->mean_offset >= 0; }

// A block's numbers as the next slices of the panel.
static void decode_block(const TilePart& p, const PageView& at, int64_t start, int token, int n) {
  TileScratch& w = p.w;
  Block& b = w.block;
  const int page_size = p.pages.store->page_size;
  if (p.key.token_scales) token_params(p.key, at.page, page_size, token, n, at.ahead, b.k_scale, b.k_bias);
  if (p.value.token_scales) token_params(p.value, at.page, page_size, token, n, at.ahead, b.v_scale, b.v_bias);
  uint16_t* keys = w.keys + w.slices * slice_numbers(p.key.head_dim);
  uint16_t* values = w.values + w.slices * slice_numbers(p.value.head_dim);
  if (p.key.t->bands) klt_keys_to_tiles(*p.key.t, p.klt.pieces, b, p.key.head_dim, at, token, n, keys);
  else plain_keys_to_tiles(p.key, b, at, token, n, p.key_biases, p.key_groups, p.key_terms, keys);
  if (p.value.trellis) any_klt_values_to_tiles(p.value, b, at, page_size, token, n, values);
  else plain_values_to_tiles(p.value, b, at, page_size, token, n, p.value_biases, p.value_terms, values);
  for (int i = 0; i < n; i += TILE_DEPTH) {
    for (int g = 0; g < p.key_groups; g++)
      __builtin_memcpy(w.k_scales[g] + w.slices * TILE_DEPTH, b.k_scale[g] + i, TILE_DEPTH * sizeof(float));
    if (has_means(p))
      for (int c = 0; c < p.key.head_dim; c++) w.means[c * PAIR * TILE_COLUMNS + w.slices] = b.k_channel_bias[c];
    Slice& slice = w.slice[w.slices++];
    slice.position = start + token + i;
    slice.tokens = n - i < TILE_DEPTH ? n - i : TILE_DEPTH;
    for (int k = 0; k < 2; k++) slice.offset_row[k] = offset_row(start, token + i + k * TILE + (start == 0));
  }
}

// Terms of probabilities.
static int weight_terms(const TilePart& p) { return !p.one_term && (p.value.raw || p.value_terms > 1) ? 2 : 1; }

// What rows see of a block. False when no row sees any.
static bool see_block(const TilePart& p, const QueryTile& tile, int first_slice, int steps, ScoreRules& rules) {
  if (!tile.rows) return false;
  const int64_t window = p.call.sliding_window;
  rules.masked = steps < BLOCK_STEPS;
  for (int i = 0; i < steps; i++) {
    const Slice& slice = p.w.slice[first_slice + i];
    rules.masked |= slice.tokens < TILE_DEPTH || slice.position + slice.tokens > tile.oldest + 1 ||
                    (window && slice.position <= tile.newest - window);
  }
  if (!rules.masked) return true;
  bool any_seen = false;
  for (int i = 0; i < BLOCK_STEPS; i++)
    for (int h = 0; h < TILE_ROWS; h++) {
      const Slice& slice = p.w.slice[first_slice + (i < steps ? i : 0)];
      const int n = i < steps ? slice.tokens : 0;
      const int64_t q = tile.position[h], lo = window ? q - window + 1 - slice.position : 0,
                    hi = q + 1 - slice.position;
      rules.first[i][h] = lo < 0 ? 0 : lo > n ? n : (int)lo;
      rules.end[i][h] = hi < 0 ? 0 : hi > n ? n : (int)hi;
      any_seen |= rules.first[i][h] < rules.end[i][h];
    }
  return any_seen;
}

// A block that a pair of tiles of rows is multiplied with.
struct PairBlock {
  bool seen;  // by any row
  int number, first_slice, steps;
  float* s;  // of the first tile
  uint16_t* p;
  ScoreRules rules[PAIR];
};

// Scores of a pair against a block, to be done.
static void add_scores(const TilePart& p, PairBlock& b) {
  TileScratch& w = p.w;
  b.seen = false;
  for (int i = 0; i < PAIR; i++) b.seen |= see_block(p, w.tile[b.number + i], b.first_slice, b.steps, b.rules[i]);
  if (!b.seen) return;
  const int d = p.call.head_dim;
  const int64_t rows = (int64_t)TILE_ROWS * d;
  const bool in_basis = p.key.t->bands;
  const Factor q = {in_basis ? w.in_basis + b.number * rows : w.q_terms + b.number * TERMS * rows, rows, TILE_NUMBERS,
                    in_basis ? 1 : p.query_terms};
  const int groups = p.key_groups ? p.key_groups : 1, steps = d / groups / TILE_DEPTH;
  for (int i = 0; i < b.steps; i++)
    for (int g = 0; g < groups; g++) {
      Factor rows_of = q;
      rows_of.tiles += g * steps * TILE_NUMBERS;
      const uint16_t* keys = w.keys + (b.first_slice + i) * slice_numbers(d) + g * steps * 2 * TILE_NUMBERS;
      w.squares.add(rows_of, in_basis ? rows : TERMS * rows, {keys, panel_numbers(d), 2 * TILE_NUMBERS, p.key_terms},
                    steps, 2, b.s + g * SCORE_SUMS + i * 2 * TILE_SUMS, groups * SCORE_SUMS, false);
    }
}

// What the outputs of a pair gain, to be done.
static void add_outputs(const TilePart& p, const PairBlock& b) {
  TileScratch& w = p.w;
  if (!b.seen) return;
  const int dv = p.call.value_head_dim;
  const uint16_t* values = w.values + b.first_slice * slice_numbers(dv);
  w.squares.add({b.p, BLOCK_STEPS * TILE_NUMBERS, TILE_NUMBERS, weight_terms(p)}, WEIGHT_NUMBERS,
                {values, panel_numbers(dv), slice_numbers(dv), p.value_terms}, b.steps, dv / TILE_COLUMNS,
                w.acc + (int64_t)b.number * TILE_ROWS * dv, (int64_t)TILE_ROWS * dv, true);
}

// Probabilities of a tile's scores.
static void weigh_block(const TilePart& p, PairBlock& b, int i, Pace& pace) {
  TileScratch& w = p.w;
  QueryTile& tile = w.tile[b.number + i];
  ScoreRules& rules = b.rules[i];
  const kvbits_attend_call& call = p.call;
  rules.cap = call.softcap > 0 ? call.softcap : 0;
  rules.factor = rules.cap > 0 ? call.scaling : call.scaling * 1.44269504089f;
  const int groups = p.key_groups ? p.key_groups : 1;
  float* s = b.s + i * groups * SCORE_SUMS;
  uint16_t* to = b.p + i * WEIGHT_NUMBERS;
  rules.groups = p.key_groups;
  for (int g = 0; g < p.key_groups; g++) rules.scales[g] = w.k_scales[g] + b.first_slice * TILE_DEPTH;
  if (has_means(p))
    for (int k = 0; k < BLOCK_TILES; k++) {
      const int slice = k / 2 < b.steps ? b.first_slice + k / 2 : b.first_slice;
      rules.offsets[k] = tile.of_offsets + slice / TILE_COLUMNS * TILE_SUMS + slice % TILE_COLUMNS;
    }
  if (p.key.t->offsets) {
    auto of_row = [&](int row) { return tile.of_offsets + row / TILE_COLUMNS * TILE_SUMS + row % TILE_COLUMNS; };
    for (int k = 0; k < BLOCK_TILES; k++)
      rules.offsets[k] = of_row(w.slice[b.first_slice + (k / 2 < b.steps ? k / 2 : 0)].offset_row[k % 2]);
    if (w.slice[b.first_slice].position == 0) {  // whose row is its own
      const float* own = of_row(offset_row(0, 0));
      for (int h = 0; h < TILE_ROWS; h++)
        *scores_of(s, h, 0) += own[h * TILE_COLUMNS] - rules.offsets[0][h * TILE_COLUMNS];
    }
  }
  const float factor = finish_scores(tile, s, rules);
  if (weight_terms(p) > 1) weigh<5, 2>(tile, s, factor, to, pace);
  else weigh<3, 1>(tile, s, factor, to, pace);
}

// All rows over the panel, which is empty then. While a block is weighed, the block before is multiplied to outputs and
// the one behind to scores.
static void attend_panel(const TilePart& p) {
  TileScratch& w = p.w;
  const int dv = p.call.value_head_dim;
  const int d = p.call.head_dim;
  if (has_means(p) && w.slices)
    matrix_to_tiles([&](int k, int j) { return load(w.means + (k * PAIR + j) * TILE_COLUMNS); }, d, PAIR, w.mean_tiles);
  for (int number = 0; number < p.tiles; number += PAIR) {
    if (has_means(p) && w.slices)
      w.squares.add(
          {w.q_terms + number * TERMS * (int64_t)TILE_ROWS * d, (int64_t)TILE_ROWS * d, TILE_NUMBERS, p.query_terms},
          (int64_t)TERMS * TILE_ROWS * d, {w.mean_tiles, (int64_t)d * PAIR * TILE_COLUMNS, PAIR * TILE_NUMBERS, 2},
          d / TILE_DEPTH, PAIR, w.tile[number].of_offsets, w.tile[1].of_offsets - w.tile[0].of_offsets, false);
    PairBlock blocks[2] = {};
    auto of_slice = [&](int at) -> PairBlock& { return blocks[at / BLOCK_STEPS % 2]; };
    auto begin = [&](int at) {
      PairBlock& b = of_slice(at);
      b.number = number, b.first_slice = at;
      b.steps = w.slices - at < BLOCK_STEPS ? w.slices - at : BLOCK_STEPS;
      b.s = w.s[at / BLOCK_STEPS % 2], b.p = w.p[at / BLOCK_STEPS % 2];
      add_scores(p, b);
    };
    if (w.slices) begin(0);
    w.squares.finish();
    for (int at = 0; at < w.slices; at += BLOCK_STEPS) {
      const int after = at + BLOCK_STEPS;
      if (at) add_outputs(p, of_slice(after));  // of the block before, whose place the next one takes
      if (after < w.slices) begin(after);
      PairBlock& b = of_slice(at);
      Pace pace(w.squares, w.tile[number].rows + w.tile[number + 1].rows);
      if (b.seen)
        for (int i = 0; i < PAIR; i++) weigh_block(p, b, i, pace);
      w.squares.finish();
      for (int i = 0; i < PAIR; i++)
        shrink_outputs(w.tile[number + i], w.acc + (int64_t)(number + i) * TILE_ROWS * dv, dv);
    }
    if (w.slices) add_outputs(p, of_slice(w.slices - 1));
    w.squares.finish();
  }
  w.slices = 0;
}

// Goes to the frame of a page's keys, if it is another one.
static void enter_frame_of(TilePart& p, int64_t start) {
  const kvbits_tensor& key = *p.key.t;
  const int64_t of_page = key.inv_freq ? start / FRAME * FRAME : 0;
  if (!key.bands || of_page == p.frame) return;
  attend_panel(p);
  if (key.inv_freq) move_to(p.klt.angles, key.inv_freq, of_page, FRAME, p.call.head_dim / 2);
  for (int i = 0; i < p.tiles; i += PAIR) enter_pair_frame(p.w, p.klt, key, i, of_page, p.call.head_dim);
  p.frame = of_page;
}

// Scales and biases of a page's channels.
static void begin_tile_page(TilePart& p, const PageView& at) {
  Block& b = p.w.block;
  if (!p.key.raw && !p.key.t->bands)
    p.key_biases = channel_params(p.key, at.page, p.kv_head, p.call.head_dim, b.k_channel, b.k_channel_bias);
  if (!p.value.raw && !p.value.trellis)
    p.value_biases = channel_params(p.value, at.page, p.kv_head, p.call.value_head_dim, b.v_channel, b.v_channel_bias);
}

static void attend_tile_part(TilePart& p, const Entries& entries) {
  const kvbits_store& store = *p.pages.store;
  const kvbits_table& table = *p.pages.table;
  TileScratch& w = p.w;
  if (p.value.t->hadamard) turn_tile_outputs(w, p.tiles, p.call.value_head_dim);
  if (p.key.t->bands) {
    list_pieces(p.klt.pieces, *p.key.t, p.call.head_dim);
    p.klt.angles.start = -1;
    klt_matrices_to_tiles(p.klt, *p.key.t, p.kv_head, p.call.head_dim);
  }
  int64_t newest = -1, oldest = INT64_MAX;
  for (int i = 0; i < p.tiles; i++)
    for (int h = 0; h < TILE_ROWS; h++) {
      const int64_t q = w.tile[i].position[h];
      if (q > newest) newest = q;
      if (q >= 0 && q < oldest) oldest = q;
    }
  const int64_t window = p.call.sliding_window;
  auto page_of = [&](int64_t e) { return page_address(&store, table.page_ids[e]) + p.kv_head * store.head_bytes; };
  w.slices = w.squares.count = w.squares.done = 0;
  for (int64_t e = entries.first; e < entries.end; e++) {
    const int64_t start = table.starts[e];
    const int length = table.lengths[e];
    if (start > newest || (window && start + length <= oldest - window + 1)) continue;
    const uint8_t* page = page_of(e);
    const uint8_t* coming = e + 1 < entries.end ? page_of(e + 1) : entries.after ? entries.after : page;
    const PageView at = {page, coming - page};
    enter_frame_of(p, start);
    begin_tile_page(p, at);
    for (int token = 0; token < length; token += BLOCK) {
      const int n = length - token < BLOCK ? length - token : BLOCK;
      if (w.slices + BLOCK / TILE_DEPTH > PANEL_SLICES) attend_panel(p);
      decode_block(p, at, start, token, n);
    }
  }
  attend_panel(p);
  if (p.value.t->hadamard) turn_tile_outputs(w, p.tiles, p.call.value_head_dim);
}

static void attend_item_in_tiles(const AttendPlan* plan, const AttendItem* item, const AttendItem* next,
                                 void* scratch) {
  const kvbits_attend_call& call = *plan->call;
  TileScratch& w = ((ItemScratch*)scratch)->tiles;
  const int tiles = (item->num_rows + PAIR * TILE_ROWS - 1) / (PAIR * TILE_ROWS) * PAIR;
  for (int i = 0; i < tiles; i++) load_tile_rows(w, call, *item, i);
  begin_tiles();
  const uint8_t* after = next ? first_page(call, *next) : nullptr;
  int64_t flat = 0;
  for (int i = 0; i < call.num_parts; i++) {
    const kvbits_part& pages = call.parts[i];
    const kvbits_table& table = *pages.table;
    const int64_t begin = table.indptr[item->sequence], n = table.indptr[item->sequence + 1] - begin;
    const int64_t lo = item->first_entry > flat ? item->first_entry - flat : 0;
    const int64_t hi = item->end_entry - flat < n ? item->end_entry - flat : n;
    flat += n;
    if (lo >= hi) continue;
    const kvbits_store& store = *pages.store;
    const Tensor key = describe(store.key, call.head_dim, 0);
    const Tensor value = store.value.bands ? describe_trellis_values(store.value, call.value_head_dim, 0)
                                           : describe(store.value, call.value_head_dim, 0);
    const int key_groups = scaled_groups(key);
    const bool one_term = call.one_term;
    const int key_terms = terms_of(key, key_groups, one_term);
    const bool few_bits = key_terms == 1 && !key_groups && !key.raw;
    TilePart part = {call,
                     pages,
                     w,
                     ((ItemScratch*)scratch)->klt,
                     item->kv_head,
                     tiles,
                     key,
                     value,
                     key_terms,
                     terms_of(value, 0, one_term),
                     call.q_dtype == BFLOAT16 || few_bits ? 1 : 2,
                     one_term,
                     key_groups,
                     false,
                     false,
                     -1};
    attend_tile_part(part, {begin + lo, begin + hi, after});
  }
  end_tiles();
  for (int i = 0; i < tiles; i++) store_tile_rows(w, *plan, *item, i);
}

// Why pages of these formats are not read in tiles, or null.
static const char* refuse_tensor(const kvbits_tensor& t, int d) {
  if (t.format == FORMAT_RAW)
    return t.raw_dtype == FLOAT32 ? "raw rows of float32 have more digits than two bfloat16 terms" : nullptr;
  if (t.format == FORMAT_TRELLIS) return nullptr;
  if (!t.per_channel && !t.static_scale && t.group_size % TILE_COLUMNS)
    return "groups are not whole tiles of 16 channels";
  for (int i = 0; i < num_planes(t.format); i++)
    if (row_bytes_of(d, plane_bits(t.format, i)) % TILE_COLUMNS) return "rows of codes are not whole tiles of 16 bytes";
  return nullptr;
}

static const char* refuse_tiles(const kvbits_attend_call* call, int rows) {
  const int least = call->min_tile_rows ? call->min_tile_rows : MIN_TILE_ROWS;
  if (rows < least) return "fewer than 32 query rows share a kv head, unless sequences share pages";
  if (call->head_dim % TILE_DEPTH || call->value_head_dim % TILE_DEPTH) return "head_dim is not a multiple of 32";
  for (int i = 0; i < call->num_parts; i++) {
    const kvbits_store& s = *call->parts[i].store;
    if (const char* why = refuse_tensor(s.key, call->head_dim)) return why;
    if (const char* why = refuse_tensor(s.value, call->value_head_dim)) return why;
    if (s.value.format == FORMAT_TRELLIS && call->value_head_dim % (4 * RING))
      return "values of trellis codes have whole vectors of rings at multiples of 64 channels";
  }
  return nullptr;
}

}  // namespace
