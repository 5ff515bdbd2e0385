// Unpacks pages to rows: one item per kv head and run of entries.
#include "engine/close/plan.h"
#include "engine/dispatch.h"
#include "engine/pool.h"
#include "engine/store.h"
#include "plan.h"

namespace {

// Tokens of an item at least, where there are as many: a head's basis is transposed once for them.
constexpr int ITEM_TOKENS = 512;

struct Work {
  const kvbits_unpack_call* call;
  const UnpackKernels* kernels;
  int64_t entries_of_item;
};

void run_item(void* context, int64_t i, int64_t, void* scratch) {
  const Work& w = *static_cast<Work*>(context);
  const kvbits_unpack_call& call = *w.call;
  const int64_t first = i / call.num_kv_heads * w.entries_of_item, end = first + w.entries_of_item;
  w.kernels->unpack(call, static_cast<int>(i % call.num_kv_heads), first,
                    end < call.num_entries ? end : call.num_entries, scratch);
}

int32_t check_entries(const kvbits_unpack_call& call) {
  const int64_t pages = num_pages(*call.store);
  for (int64_t i = 0; i < call.num_entries; i++) {
    const int64_t first = call.rows[2 * i], tokens = call.rows[2 * i + 1];
    if (call.page_ids[i] < 0 || call.page_ids[i] >= pages) return KVBITS_BAD_PAGE_ID;
    if (tokens < 0 || tokens > call.store->page_size) return KVBITS_BAD_LENGTH;
    if (first < 0 || first + tokens > call.num_rows) return KVBITS_BAD_ROWS;
    if (call.starts[i] < 0) return KVBITS_BAD_TABLE;
  }
  return 0;
}

}  // namespace

extern "C" int32_t kvbits_unpack(const kvbits_unpack_call* call) {
  if (const int32_t bad = check_store(*call->store, call->head_dim, call->value_head_dim)) return bad;
  if (call->dtype < 0 || call->dtype >= NUM_RAW_DTYPES) return KVBITS_BAD_FORMAT;
  if (const int32_t bad = check_entries(*call)) return bad;
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  const int64_t page_size = call->store->page_size;
  Work w = {call, tier->pages->unpack, (ITEM_TOKENS + page_size - 1) / page_size};
  const int64_t items = (call->num_entries + w.entries_of_item - 1) / w.entries_of_item * call->num_kv_heads;
  const int threads = call->num_threads > 0 ? call->num_threads : pool_available_threads();
  return pool_run(threads, items, w.kernels->scratch_bytes, run_item, &w) ? 0 : KVBITS_NO_MEMORY;
}
