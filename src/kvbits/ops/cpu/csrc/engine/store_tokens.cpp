// Writes fresh tokens to their slots in raw and in token-local pages: one item per run and kv head. A run is the tokens
// of a sequence, one after the other, that go to slots one after the other in one page.
#include <algorithm>
#include <new>
#include <vector>

#include "dispatch.h"
#include "engine/close/call.h"
#include "pool.h"
#include "store.h"

namespace {

// One token of a decoding step is over before another thread has woken.
constexpr int64_t BYTES_PER_THREAD = 256 << 10;

struct Run {
  int64_t row, token, page, place, count;
  const double* turn_start;  // of keys that are turned back
  int64_t start;
};

struct Work {
  const kvbits_store_call* call;
  const PageKernels* kernels;
  std::vector<Run> runs;
  int64_t num_tokens;  // stored ones
  Findings found;
};

uint8_t* head_of(const kvbits_store_call& call, const Run& r, int64_t head) {
  const kvbits_store& store = *call.store;
  uint8_t* to = const_cast<uint8_t*>(page_address(&store, r.page)) + head * store.head_bytes;
  // Padding is part of a page's bytes: equal content must be equal bytes.
  if (!r.place && store.head_bytes > call.used_bytes)
    __builtin_memset(to + call.used_bytes, 0, static_cast<size_t>(store.head_bytes - call.used_bytes));
  return to;
}

void raw_item(void* context, int64_t i, int64_t, void*) {
  const Work& w = *static_cast<Work*>(context);
  const kvbits_store_call& call = *w.call;
  const Run& r = w.runs[static_cast<size_t>(i / call.num_kv_heads)];
  const int64_t head = i % call.num_kv_heads, size = call.dtype == FLOAT32 ? 4 : 2;
  uint8_t* page = head_of(call, r, head);
  for (int side = 0; side < 2; side++) {
    const int64_t *stride = call.stride[side], row_bytes = (side ? call.value_head_dim : call.head_dim) * size;
    const char* from = static_cast<const char*>(call.source[side]) +
                       (r.row * stride[0] + r.token * stride[1] + head * stride[2]) * size;
    uint8_t* to = page + (side ? call.store->value : call.store->key).plane_offset[0] + r.place * row_bytes;
    for (int64_t t = 0; t < r.count; t++)
      __builtin_memcpy(to + t * row_bytes, from + t * stride[1] * size, static_cast<size_t>(row_bytes));
  }
}

void packed_item(void* context, int64_t i, int64_t, void* scratch) {
  Work& w = *static_cast<Work*>(context);
  const kvbits_store_call& call = *w.call;
  const Run& r = w.runs[static_cast<size_t>(i / call.num_kv_heads)];
  const int64_t head = i % call.num_kv_heads;
  uint8_t* to = head_of(call, r, head);
  for (int side = 0; side < 2; side++) {
    const int64_t* stride = call.stride[side];
    TokensPart part =
        part_of(call, side, head, r.row * stride[0] + r.token * stride[1] + head * stride[2], stride[1], to);
    if (part.tensor->inv_freq) part.turn_start = r.turn_start, part.start = r.start;
    part.closes = r.count == call.store->page_size;
    part.slot = static_cast<int>(r.place);
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

// Cuts the slots into runs. Returns how many lead out of the pages.
int32_t cut(Work& w) {
  const kvbits_store_call& call = *w.call;
  const int64_t size = call.store->page_size, end = num_pages(*call.store) * size;
  w.runs.reserve(static_cast<size_t>(call.batch + int64_t{call.batch} * call.num_tokens / size));
  int32_t outside = 0;
  for (int64_t row = 0; row < call.batch; row++) {
    int64_t next = -1;  // the slot that goes on with the last run
    for (int64_t token = 0; token < call.num_tokens; token++) {
      const int64_t slot = call.slots[row * call.num_tokens + token];
      if (slot < 0 || slot >= end) {
        outside += slot >= end;
        next = -1;
        continue;
      }
      if (slot == next) w.runs.back().count++;
      else w.runs.push_back({row, token, slot / size, slot % size, 1, nullptr, 0});
      const Run& run = w.runs.back();
      next = run.place + run.count < size ? slot + 1 : -1;
      w.num_tokens++;
    }
  }
  return outside;
}

// Finds how the keys of each run are turned back. False where a page has no position, or one that no frame holds.
bool turn(Work& w) {
  const kvbits_store_call& call = *w.call;
  const int64_t row = (call.head_dim / 2 + 15) / 16 * 32;
  for (Run& r : w.runs) {
    r.start = call.starts[r.row * call.num_tokens + r.token];
    const int64_t *last = call.frames + call.num_frames, frame = r.start / FRAME * FRAME,
                  *found = std::lower_bound(call.frames, last, frame);
    if (r.start < 0 || found == last || *found != frame) return false;
    r.turn_start = call.turn_starts + (found - call.frames) * row;
  }
  return true;
}

int32_t store_tokens(kvbits_store_call& call) {
  const kvbits_store& store = *call.store;
  if (const int32_t bad = check_store(store, call.head_dim, call.value_head_dim)) return bad;
  const bool raw = store.key.format == FORMAT_RAW && store.value.format == FORMAT_RAW;
  if (raw ? !raw_of(store.key, call.dtype) || !raw_of(store.value, call.dtype)
          : !token_local(store.key) || !token_local(store.value))
    return KVBITS_NOT_TOKEN_LOCAL;
  if (call.used_bytes < 0) return KVBITS_BAD_FORMAT;
  const bool turned = !raw && store.key.inv_freq;
  if (turned && !(store.key.to_basis && call.turn_starts && call.frames && call.starts)) return KVBITS_BAD_FORMAT;
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  Work w = {&call, tier->pages, {}, 0, {}};
  const int32_t outside = cut(w);
  if (turned && !turn(w)) return KVBITS_BAD_START;
  const int64_t items = static_cast<int64_t>(w.runs.size()) * call.num_kv_heads,
                bytes = w.num_tokens * call.num_kv_heads * (call.head_dim + call.value_head_dim) *
                        (call.dtype == FLOAT32 ? 4 : 2);
  const int64_t wanted = call.num_threads > 0 ? call.num_threads : pool_available_threads();
  const int threads = static_cast<int>(std::max<int64_t>(1, std::min(wanted, bytes / BYTES_PER_THREAD)));
  if (raw && threads == 1) {
    for (int64_t i = 0; i < items; i++) raw_item(&w, i, -1, nullptr);
  } else {
    const size_t scratch =
        raw ? 0
            : w.kernels->close_scratch_bytes(store.page_size, std::max(call.head_dim, call.value_head_dim));
    if (!pool_run(threads, items, scratch, raw ? raw_item : packed_item, &w)) return KVBITS_NO_MEMORY;
  }
  if (call.status) {
    w.found.add_to(call.status);
    call.status[6] += outside;
  }
  return 0;
}

}  // namespace

extern "C" int32_t kvbits_store_tokens(kvbits_store_call* call) {
  try {
    return store_tokens(*call);
  } catch (const std::bad_alloc&) {
    return KVBITS_NO_MEMORY;
  }
}
