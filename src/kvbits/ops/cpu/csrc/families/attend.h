// One work item: the rows of one kv head over a range of pages, part by part, each by its family.
#pragma once
#include <stdint.h>

#include "engine/attend/part.h"
#include "engine/attend/plan.h"
#include "engine/attend/rows.h"
#include "families/klt/part.h"
#include "families/klt/values.h"
#include "families/plain/part.h"
#include "kvbits_cpu.h"

namespace {

struct Scratch {
  Block block;
  Angles angles;
  BandPieces pieces;
  Chunk chunks[ITEM_ROWS / ROWS];
  LevelBlock levels;
};

// The formats that each family's kernels read: one family a format. Codebooks have none.
constexpr bool every_format_is_served() {
  for (int f = 0; f < NUM_FORMATS; f++)
    if ((f == FORMAT_RAW) + is_trellis(f) + plain_kernels.serve(f) != !is_codebook(f)) return false;
  return true;
}
static_assert(every_format_is_served(), "a number format has no kernel, or two");

static void attend_part(Part& part, const Entries& entries, Scratch& w) {
  if (part.value.split) reorder_outputs(part, false);
  if (part.value.t->hadamard) turn_outputs(part);
  const Tensor& value = part.value;
  const int bits = value.trellis ? value.t->bands[0] : 0;
  PlainPart plain = {part,
                     part.levels ? level_values[bits - 2]
                     : bits      ? trellis_values[bits - 2]
                                 : plain_value_kernels(value),
                     part.levels ? level_decoders[bits - 2] : nullptr};
  plain.begin();
  if (part.key.t->bands) {
    KltPart path = {part, plain, w.angles, w.pieces, part.pages.table->starts[entries.end - 1]};
    path.begin();
    attend_pages(path, entries);
  } else {
    attend_pages(plain, entries);
  }
  if (part.value.t->hadamard) turn_outputs(part);
  if (part.value.split) reorder_outputs(part, true);
}

static void attend_item(const AttendPlan* plan, const AttendItem* item, const AttendItem* next, void* scratch) {
  const kvbits_attend_call& call = *plan->call;
  Scratch& w = *(Scratch*)scratch;
  const int chunks = (item->num_rows + ROWS - 1) / ROWS, per_chunk = (item->num_rows + chunks - 1) / chunks;
  for (int i = 0; i < chunks; i++) {
    const int first = i * per_chunk, left = item->num_rows - first;
    load_rows(w.chunks[i], call, *item, first, left < per_chunk ? left : per_chunk);
  }
  const uint8_t* after = next ? first_page(call, *next) : nullptr;
  int64_t flat = 0;
  for (int i = 0; i < call.num_parts; i++) {
    const kvbits_part& pages = call.parts[i];
    const kvbits_table& table = *pages.table;
    const int64_t begin = table.indptr[item->sequence], n = table.indptr[item->sequence + 1] - begin;
    const int64_t lo = item->first_entry > flat ? item->first_entry - flat : 0;
    const int64_t hi = item->end_entry - flat < n ? item->end_entry - flat : n;
    flat += n;
    if (lo < hi) {
      const kvbits_store& store = *pages.store;
      const int value_head_dim = call.value_head_dim;
      const Tensor key = describe(store.key, call.head_dim, hi - lo);
      const Tensor value = store.value.bands ? describe_trellis_values(store.value, value_head_dim, hi - lo)
                                             : describe(store.value, value_head_dim, hi - lo);
      LevelBlock* levels = value.trellis && chunks > 1 ? &w.levels : nullptr;
      Part part = {call, pages, item->kv_head, chunks, key, as_values(value), w.chunks, w.block, false, false, levels};
      attend_part(part, {begin + lo, begin + hi, after}, w);
    }
  }
  for (int i = 0; i < chunks; i++) store_rows(w.chunks[i], *plan, *item, i * per_chunk);
}

}  // namespace
