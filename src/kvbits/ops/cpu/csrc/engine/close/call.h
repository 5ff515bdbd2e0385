// What close.cpp and store_tokens.cpp share: parts made of a call's tokens, and what their items found. Not for tiers:
// it has templates of the standard library.
#pragma once
#include <stdint.h>

#include <atomic>

#include "engine/formats.h"
#include "plan.h"

// The part of a page or run of a call: all slots, from element `first` of the call's keys (side 0) or values on.
template <class Call>
TokensPart part_of(const Call& call, int side, int64_t head, int64_t first, int64_t token_stride, uint8_t* to) {
  TokensPart part = {};
  part.tensor = side ? &call.store->value : &call.store->key;
  part.is_key = side == 0;
  part.kv_head = static_cast<int>(head);
  part.page_size = part.count = call.store->page_size;
  part.head_dim = side ? call.value_head_dim : call.head_dim;
  part.dtype = call.dtype;
  part.source = static_cast<const char*>(call.source[side]) + first * (call.dtype == FLOAT32 ? 4 : 2);
  part.token_stride = token_stride;
  part.head = to;
  return part;
}

// What the items of a call found, as its status says it.
struct Findings {
  std::atomic<int64_t> status[6] = {};

  void add(int side, const CloseResult& r) {
    if (r.saturated) status[side].fetch_add(r.saturated);
    if (r.overflow) status[2 + side].store(1);
    if (r.nonfinite) status[4 + side].store(1);
  }
  void add_to(int32_t* to) const {
    for (int i = 0; i < 2; i++) to[i] += static_cast<int32_t>(status[i].load());
    for (int i = 2; i < 6; i++) to[i] |= static_cast<int32_t>(status[i].load());
  }
};
