// Which tier runs, and the errors of the C ABI.
#pragma once
#include <stdint.h>

#include "engine/attend/plan.h"
#include "kvbits_cpu.h"

enum Error {
  KVBITS_BAD_FORMAT = 1,
  KVBITS_BAD_PAGE_SIZE,
  KVBITS_BAD_GROUP,
  KVBITS_BAD_HEAD_DIM,
  KVBITS_BAD_HEADS,
  KVBITS_BAD_TABLE,
  KVBITS_BAD_PAGE_ID,
  KVBITS_BAD_LENGTH,
  KVBITS_NO_TIER,
  KVBITS_NO_MEMORY,
  KVBITS_NOT_TOKEN_LOCAL,
  KVBITS_BAD_BANDS,
  KVBITS_BAD_START,
  KVBITS_BAD_ROWS,
  KVBITS_BAD_PARTS,
};

const TierKernels* active_tier();

// 0, or what is wrong with the formats of a store.
int32_t check_store(const kvbits_store& store, int head_dim, int value_head_dim);
int64_t num_pages(const kvbits_store& store);
