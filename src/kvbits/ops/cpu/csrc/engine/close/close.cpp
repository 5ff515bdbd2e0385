// Closes pages: one item per page and kv head.
#include <algorithm>

#include "call.h"
#include "engine/dispatch.h"
#include "engine/pool.h"
#include "engine/store.h"

namespace {

struct Work {
  const kvbits_close_call* call;
  const PageKernels* kernels;
  Findings found;
};

void run_item(void* context, int64_t i, int64_t, void* scratch) {
  Work& w = *static_cast<Work*>(context);
  const kvbits_close_call& call = *w.call;
  const kvbits_store& store = *call.store;
  const int64_t page = i / call.num_kv_heads, head = i % call.num_kv_heads;
  uint8_t* to = const_cast<uint8_t*>(page_address(&store, call.page_ids[page])) + head * store.head_bytes;
  // Padding is part of a page's bytes: equal content must be equal bytes.
  __builtin_memset(to, 0, static_cast<size_t>(store.head_bytes));
  for (int side = 0; side < 2; side++) {
    const int64_t* stride = call.stride[side];
    TokensPart part = part_of(call, side, head, page * stride[0] + head * stride[1], stride[2], to);
    part.closes = true;
    if (part.tensor->inv_freq) {
      part.turn_start = call.turn_starts + page * ((call.head_dim / 2 + 15) / 16 * 32);
      part.start = call.starts[page];
    }
    CloseResult result = {};
    w.kernels->store(part, scratch, result);
    w.found.add(side, result);
  }
}

}  // namespace

extern "C" int32_t kvbits_close(kvbits_close_call* call) {
  const kvbits_store& store = *call->store;
  if (const int32_t bad = check_store(store, call->head_dim, call->value_head_dim)) return bad;
  for (const kvbits_tensor* t : {&store.key, &store.value}) {
    if (t->inv_freq && !(t->to_basis && call->turn_starts && call->starts)) return KVBITS_BAD_FORMAT;
  }
  const int64_t pages = num_pages(store);
  for (int64_t i = 0; i < call->num_pages; i++)
    if (call->page_ids[i] < 0 || call->page_ids[i] >= pages) return KVBITS_BAD_PAGE_ID;
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  Work w = {call, tier->pages, {}};
  const int threads = call->num_threads > 0 ? call->num_threads : pool_available_threads();
  const size_t scratch =
      w.kernels->close_scratch_bytes(store.page_size, std::max(call->head_dim, call->value_head_dim));
  if (!pool_run(threads, call->num_pages * call->num_kv_heads, scratch, run_item, &w)) return KVBITS_NO_MEMORY;
  w.found.add_to(call->status);
  return 0;
}
