// A store's pages: what the kernels take, and where a page lies.
#pragma once
#include <stdint.h>

#include "kvbits_cpu.h"

constexpr int MAX_HEAD_DIM = 512;
constexpr int MAX_GROUPS = 32;

// Address of page `id`, or null when no slab holds it.
static inline const uint8_t* page_address(const kvbits_store* store, int64_t id) {
  for (int i = 0; i < store->num_slabs; i++) {
    if (id < store->slab_pages[i]) return (const uint8_t*)(intptr_t)(store->slab_address[i] + id * store->page_stride);
    id -= store->slab_pages[i];
  }
  return nullptr;
}
