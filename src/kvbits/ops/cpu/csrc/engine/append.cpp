// Writes fresh tokens to their slots in raw and in token-local pages: one item per run and kv head.
#include <algorithm>

#include "dispatch.h"
#include "engine/close/call.h"
#include "pool.h"
#include "store.h"

namespace {

// One token of a decoding step is over before another thread has woken.
constexpr int64_t BYTES_PER_THREAD = 256 << 10;

struct Run {
  int64_t row, token, page, slot, count;
};

void run_item(void* context, int64_t i, int64_t, void*) {
  const kvbits_append_call& call = *static_cast<const kvbits_append_call*>(context);
  const kvbits_store& store = *call.store;
  const Run& r = reinterpret_cast<const Run*>(call.runs)[i / call.num_kv_heads];
  const int64_t head = i % call.num_kv_heads, size = call.dtype == FLOAT32 ? 4 : 2;
  uint8_t* page = const_cast<uint8_t*>(page_address(&store, r.page)) + head * store.head_bytes;
  for (int side = 0; side < 2; side++) {
    const int64_t *stride = call.stride[side], row_bytes = (side ? call.value_head_dim : call.head_dim) * size;
    const char* from = static_cast<const char*>(call.source[side]) +
                       (r.row * stride[0] + r.token * stride[1] + head * stride[2]) * size;
    uint8_t* to = page + (side ? store.value : store.key).plane_offset[0] + r.slot * row_bytes;
    for (int64_t t = 0; t < r.count; t++)
      __builtin_memcpy(to + t * row_bytes, from + t * stride[1] * size, static_cast<size_t>(row_bytes));
  }
}

struct Work {
  const kvbits_append_call* call;
  const PageKernels* kernels;
  Findings found;
};

void packed_item(void* context, int64_t i, int64_t, void* scratch) {
  Work& w = *static_cast<Work*>(context);
  const kvbits_append_call& call = *w.call;
  const kvbits_store& store = *call.store;
  const int64_t run = i / call.num_kv_heads, head = i % call.num_kv_heads;
  const Run& r = reinterpret_cast<const Run*>(call.runs)[run];
  uint8_t* to = const_cast<uint8_t*>(page_address(&store, r.page)) + head * store.head_bytes;
  // Padding is part of a page's bytes: equal content must be equal bytes.
  if (!r.slot) __builtin_memset(to + call.used_bytes, 0, static_cast<size_t>(store.head_bytes - call.used_bytes));
  for (int side = 0; side < 2; side++) {
    const int64_t* stride = call.stride[side];
    TokensPart part =
        part_of(call, side, run, head, r.row * stride[0] + r.token * stride[1] + head * stride[2], stride[1], to);
    part.slot = static_cast<int>(r.slot);
    part.count = static_cast<int>(r.count);
    CloseResult result = {};
    w.kernels->store(part, scratch, result);
    w.found.add(side, result);
  }
}

bool token_local(const kvbits_tensor& t) {
  return t.format == FORMAT_RAW || t.static_scale || !t.per_channel;
}

bool raw_of(const kvbits_tensor& t, int dtype) { return t.format == FORMAT_RAW && t.raw_dtype == dtype; }

}  // namespace

extern "C" int32_t kvbits_append(kvbits_append_call* call) {
  const kvbits_store& store = *call->store;
  if (const int32_t bad = check_store(store, call->head_dim, call->value_head_dim)) return bad;
  const bool raw = store.key.format == FORMAT_RAW && store.value.format == FORMAT_RAW;
  if (raw ? !raw_of(store.key, call->dtype) || !raw_of(store.value, call->dtype)
          : !token_local(store.key) || !token_local(store.value) || call->used_bytes < 0 ||
                call->used_bytes > store.head_bytes)
    return KVBITS_BAD_RUN;
  if (!raw && store.key.inv_freq && !(store.key.to_basis && call->turn_starts && call->starts))
    return KVBITS_BAD_FORMAT;
  const int64_t pages = num_pages(store);
  int64_t tokens = 0;
  for (int64_t i = 0; i < call->num_runs; i++) {
    const Run& r = reinterpret_cast<const Run*>(call->runs)[i];
    if (r.page < 0 || r.page >= pages) return KVBITS_BAD_PAGE_ID;
    if (r.row < 0 || r.row >= call->batch || r.token < 0 || r.slot < 0 || r.count < 1 || r.count > store.page_size ||
        r.slot > store.page_size - r.count || r.token > call->num_tokens - r.count)
      return KVBITS_BAD_RUN;
    tokens += r.count;
  }
  const int64_t items = call->num_runs * call->num_kv_heads, bytes = tokens * call->num_kv_heads *
                                                                     (call->head_dim + call->value_head_dim) *
                                                                     (call->dtype == FLOAT32 ? 4 : 2);
  int64_t threads = call->num_threads > 0 ? call->num_threads : pool_available_threads();
  if (threads > bytes / BYTES_PER_THREAD) threads = bytes / BYTES_PER_THREAD;
  if (!raw) {
    const TierKernels* tier = active_tier();
    if (!tier) return KVBITS_NO_TIER;
    Work w = {call, tier->pages, {}};
    const size_t scratch =
        w.kernels->close_scratch_bytes(store.page_size, std::max(call->head_dim, call->value_head_dim));
    if (!pool_run(threads < 1 ? 1 : static_cast<int>(threads), items, scratch, packed_item, &w))
      return KVBITS_NO_MEMORY;
    w.found.report(call->status);
    return 0;
  }
  if (threads >= 2) return pool_run(static_cast<int>(threads), items, 0, run_item, call) ? 0 : KVBITS_NO_MEMORY;
  for (int64_t i = 0; i < items; i++) run_item(call, i, -1, nullptr);
  return 0;
}
