// What the planner (attend.cpp) hands to a tier: a list of independent work items over one call.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kvbits_cpu.h"

// Rows of one item are the query heads of one kv head for a run of tokens: row = token * group + head in group. An item
// of several sequences, whose pages all of them read, has the rows of one after those of the other.
struct AttendItem {
  int32_t sequence, kv_head;
  int32_t first_row, num_rows;
  int64_t first_entry, end_entry;  // into the sequence's entries of all parts, one after the other
  int64_t partial;                 // row index into the partial results; -1: this item is the whole answer
  const int32_t* sequences;        // [num_sequences], of which `sequence` is the first
  int32_t num_sequences;
};

struct AttendPlan {
  const kvbits_attend_call* call;
  float* partial;  // [rows][partial_stride(value_head_dim)]: unnormalised output, then maximum (log2), then sum
};

constexpr int MAX_QUERY_GROUP = 64;
// Query rows that share one pass over the pages: their state (1 to 3 KB each) stays in the L2 cache.
constexpr int ITEM_ROWS = 64;

// Query rows of a kv head and a sequence.
static inline int rows_of_sequence(const kvbits_attend_call& call) {
  return call.num_tokens * (call.num_heads / call.num_kv_heads);
}

static inline int64_t partial_stride(int head_dim) { return (head_dim + 2 + 15) / 16 * 16; }

struct PageKernels;

// One tier: the entry points that its file fills in.
struct TierKernels {
  const char* name;
  size_t scratch_bytes;
  // `next` is the item this thread will run afterwards (its first page is fetched early), or null.
  void (*attend_item)(const AttendPlan* plan, const AttendItem* item, const AttendItem* next, void* scratch);
  const PageKernels* pages;
  int item_rows = ITEM_ROWS;  // most query rows of an item
  // Why items of so many query rows are left to the tier `otherwise`, or null; a tier without it takes every call. A
  // tier with it attends in tiles, whose items may have the rows of several sequences.
  const char* (*refuses)(const kvbits_attend_call* call, int rows) = nullptr;
  const TierKernels* otherwise = nullptr;
};

const TierKernels* tier_generic();
const TierKernels* tier_avx2();
const TierKernels* tier_avx512();
const TierKernels* tier_neon();
const TierKernels* tier_amx();
const TierKernels* tier_amx_emulated();
