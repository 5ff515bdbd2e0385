// Merges attention over disjoint sets of keys: one item per run of rows.
#include <algorithm>

#include "engine/close/plan.h"
#include "engine/dispatch.h"
#include "engine/pool.h"
#include "engine/store.h"
#include "plan.h"

namespace {

constexpr int64_t ROWS_OF_ITEM = 256;
// Numbers of a part from which a thread is woken.
constexpr int64_t NUMBERS_PER_THREAD = 64 << 10;

struct Work {
  const kvbits_merge_call* call;
  const PageKernels* kernels;
  int64_t rows;
};

void run_item(void* context, int64_t i, int64_t, void*) {
  const Work& w = *static_cast<Work*>(context);
  w.kernels->merge(*w.call, i * ROWS_OF_ITEM, std::min((i + 1) * ROWS_OF_ITEM, w.rows));
}

bool is_dtype(int64_t dtype) { return dtype >= 0 && dtype < NUM_RAW_DTYPES; }

}  // namespace

extern "C" int32_t kvbits_merge(const kvbits_merge_call* call) {
  if (call->head_dim < 1 || call->head_dim > MAX_HEAD_DIM) return KVBITS_BAD_HEAD_DIM;
  if (call->num_parts < 1 || call->num_parts > MAX_MERGED || !is_dtype(call->dtype)) return KVBITS_BAD_PARTS;
  for (int i = 0; i < call->num_parts; i++)
    if (!is_dtype(call->parts[i].dtype)) return KVBITS_BAD_PARTS;
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  Work w = {call, tier->pages, int64_t{call->batch} * call->num_tokens * call->num_heads};
  const int64_t wanted = call->num_threads > 0 ? call->num_threads : pool_available_threads();
  const int64_t useful = std::max<int64_t>(1, w.rows * call->head_dim / NUMBERS_PER_THREAD);
  const int threads = static_cast<int>(std::min(wanted, useful));
  const int64_t items = (w.rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM;
  return pool_run(threads, items, 0, run_item, &w) ? 0 : KVBITS_NO_MEMORY;
}
