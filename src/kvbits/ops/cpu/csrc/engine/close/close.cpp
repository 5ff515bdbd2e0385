// Closes pages: one item per page and kv head.
#include <algorithm>
#include <atomic>
#include <new>

#include "engine/dispatch.h"
#include "engine/pool.h"
#include "engine/store.h"
#include "plan.h"

namespace {

struct Work {
  kvbits_close_call* call;
  const PageKernels* kernels;
  std::atomic<int64_t> saturated[2];
  std::atomic<int64_t> nonfinite[2];
  std::atomic<int32_t> overflow[2];
};

void lower(std::atomic<int64_t>& a, int64_t i) {
  int64_t seen = a.load();
  while ((seen < 0 || i < seen) && !a.compare_exchange_weak(seen, i)) {
  }
}

void run_item(void* context, int64_t i, int64_t, void* scratch) {
  Work& w = *static_cast<Work*>(context);
  const kvbits_close_call& call = *w.call;
  const kvbits_store& store = *call.store;
  const int64_t page = i / call.num_kv_heads, head = i % call.num_kv_heads;
  uint8_t* to = const_cast<uint8_t*>(page_address(&store, call.page_ids[page])) + head * store.head_bytes;
  // Padding is part of a page's bytes: equal content must be equal bytes.
  __builtin_memset(to, 0, static_cast<size_t>(store.head_bytes));
  uint8_t* low = nullptr;
  if (call.low) {
    low = const_cast<uint8_t*>(page_address(call.low, call.low_ids[page])) + head * call.low->head_bytes;
    __builtin_memset(low, 0, static_cast<size_t>(call.low->head_bytes));
  }
  const int64_t size = call.dtype == FLOAT32 ? 4 : 2, turn_row = (call.head_dim / 2 + 15) / 16 * 32;
  for (int side = 0; side < 2; side++) {
    const int64_t* stride = call.stride[side];
    ClosePart part = {};
    part.tensor = side ? &store.value : &store.key;
    part.is_key = side == 0;
    part.kv_head = static_cast<int>(head);
    part.page_size = store.page_size;
    part.head_dim = side ? call.value_head_dim : call.head_dim;
    part.dtype = call.dtype;
    part.source = static_cast<const char*>(call.source[side]) + (page * stride[0] + head * stride[1]) * size;
    part.token_stride = stride[2];
    if (part.tensor->inv_freq) {
      part.turn_start = call.turn_starts + page * turn_row;
      part.start = call.starts[page];
    }
    part.head = to;
    part.low_head = low;
    if (low) {
      const kvbits_tensor& t = side ? call.low->value : call.low->key;
      part.low = t.format == FORMAT_RAW ? nullptr : &t;
    }
    CloseResult result = {};
    w.kernels->close(part, scratch, result);
    if (result.saturated) w.saturated[side].fetch_add(result.saturated);
    if (result.nonfinite) lower(w.nonfinite[side], i);
    if (result.overflow) w.overflow[side].store(1);
  }
}

}  // namespace

extern "C" int32_t kvbits_close(kvbits_close_call* call) {
  const kvbits_store& store = *call->store;
  if (const int32_t bad = check_store(store, call->head_dim, call->value_head_dim)) return bad;
  for (const kvbits_tensor* t : {&store.key, &store.value}) {
    if (t->codebook || t->num_outliers || (t->inv_freq && !(t->to_basis && call->turn_starts && call->starts))) return KVBITS_BAD_FORMAT;
  }
  const int64_t pages = num_pages(store);
  for (int64_t i = 0; i < call->num_pages; i++)
    if (call->page_ids[i] < 0 || call->page_ids[i] >= pages) return KVBITS_BAD_PAGE_ID;
  if (call->low) {
    const kvbits_tensor* fine[2] = {&call->low->key, &call->low->value};
    const kvbits_tensor* coarse[2] = {&store.key, &store.value};
    for (int i = 0; i < 2; i++) {
      if (fine[i]->format == FORMAT_RAW) continue;
      const int levels = number_format(coarse[i]->format).levels;
      if ((levels != INTEGER && levels != BANDED) || (fine[i]->format != FORMAT_INT4 && fine[i]->format != FORMAT_INT2)) return KVBITS_BAD_LOW;
    }
    const int64_t low_pages = num_pages(*call->low);
    for (int64_t i = 0; i < call->num_pages; i++)
      if (call->low_ids[i] < 0 || call->low_ids[i] >= low_pages) return KVBITS_BAD_PAGE_ID;
  }
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  Work w = {call, tier->pages, {}, {}, {}};
  for (int side = 0; side < 2; side++) w.nonfinite[side].store(-1);
  const int threads = call->num_threads > 0 ? call->num_threads : pool_available_threads();
  try {
    if (!pool_run(threads, call->num_pages * call->num_kv_heads, w.kernels->close_scratch_bytes(store.page_size, std::max(call->head_dim, call->value_head_dim)), run_item, &w))
      return KVBITS_NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return KVBITS_NO_MEMORY;
  }
  for (int side = 0; side < 2; side++) {
    call->saturated[side] = w.saturated[side].load();
    call->nonfinite[side] = w.nonfinite[side].load();
    call->overflow[side] = w.overflow[side].load();
  }
  return 0;
}
