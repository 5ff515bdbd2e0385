// Plans an attention call: checks every index, cuts it into items of about equal bytes, runs them, merges splits.
//
// The cut depends on the call and on the number of threads, never on who runs what: the same call gives the same bits.
// The last item of a group to finish merges the group, in fixed order.
#include <math.h>

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "engine/dispatch.h"
#include "engine/pool.h"
#include "engine/store.h"
#include "plan.h"

namespace {

constexpr int64_t MIN_ITEM_BYTES = 128 << 10;  // under it an item's own cost (its state, one merge) shows
constexpr int64_t ITEMS_PER_THREAD = 8;        // the last one to finish then leaves the others idle for a few percent
constexpr int64_t MAX_SPLITS = 256;

struct Group {  // the items that make up the same output rows
  int64_t first_item, num_items;
};

struct Work {
  AttendPlan plan;
  const TierKernels* tier;
  std::vector<AttendItem> items;
  std::vector<Group> groups;
  std::vector<int32_t> group_of;  // item -> group, -1 for items that are the whole answer
  std::unique_ptr<std::atomic<int32_t>[]> left;
};

int32_t check(const kvbits_attend_call& call) {
  if (call.num_heads < 1 || call.num_kv_heads < 1 || call.num_heads % call.num_kv_heads ||
      call.num_heads / call.num_kv_heads > MAX_QUERY_GROUP)
    return KVBITS_BAD_HEADS;
  if (call.batch < 0 || call.num_tokens < 0) return KVBITS_BAD_TABLE;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_store& store = *call.parts[p].store;
    const kvbits_table& table = *call.parts[p].table;
    if (const int32_t bad = check_store(store, call.head_dim, call.value_head_dim)) return bad;
    const int64_t pages = num_pages(store);
    int64_t end = 0;
    for (int b = 0; b <= call.batch; b++) {
      if (table.indptr[b] < end || table.indptr[b] > table.num_entries) return KVBITS_BAD_TABLE;
      end = table.indptr[b];
    }
    for (int64_t e = table.indptr[0]; e < end; e++) {
      if (table.page_ids[e] < 0 || table.page_ids[e] >= pages) return KVBITS_BAD_PAGE_ID;
      if (table.lengths[e] < 1 || table.lengths[e] > store.page_size) return KVBITS_BAD_LENGTH;
      if (table.starts[e] < 0) return KVBITS_BAD_TABLE;
    }
  }
  return 0;
}

int64_t entry_bytes(const kvbits_part& part, int64_t e) {
  return part.store->head_bytes * part.table->lengths[e] / part.store->page_size + 64;
}

int64_t sequence_bytes(const kvbits_attend_call& call, int b) {
  int64_t total = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& t = *call.parts[p].table;
    for (int64_t e = t.indptr[b]; e < t.indptr[b + 1]; e++) total += entry_bytes(call.parts[p], e);
  }
  return total;
}

// Entry numbers at which a sequence is cut into `splits` ranges of about equal bytes.
std::vector<int64_t> cut(const kvbits_attend_call& call, int b, int64_t total, int64_t splits) {
  std::vector<int64_t> at{0};
  int64_t bytes = 0, flat = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& t = *call.parts[p].table;
    for (int64_t e = t.indptr[b]; e < t.indptr[b + 1]; e++, flat++) {
      if (static_cast<int64_t>(at.size()) < splits && flat > at.back() &&
          bytes * splits >= total * static_cast<int64_t>(at.size()))
        at.push_back(flat);
      bytes += entry_bytes(call.parts[p], e);
    }
  }
  at.push_back(flat);
  return at;
}

void build(Work& w, int threads) {
  const kvbits_attend_call& call = *w.plan.call;
  const int group = call.num_heads / call.num_kv_heads;
  const int item_rows = w.tier->item_rows, tokens = group >= item_rows ? 1 : item_rows / group;
  const int row_blocks = (call.num_tokens + tokens - 1) / tokens;
  const int rows_each = (call.num_tokens < tokens ? call.num_tokens : tokens) * group;
  const int passes = (rows_each + 7) / 8;
  std::vector<int64_t> bytes(call.batch);
  int64_t total = 0;
  for (int b = 0; b < call.batch; b++) total += bytes[b] = sequence_bytes(call, b);
  const int64_t work = total * passes * row_blocks * call.num_kv_heads;
  const int64_t wanted = threads > 1 ? threads * ITEMS_PER_THREAD : 1;
  const int64_t per_item = work / wanted > MIN_ITEM_BYTES ? work / wanted : MIN_ITEM_BYTES;
  int64_t partial_rows = 0;
  for (int b = 0; b < call.batch; b++) {
    int64_t splits = (bytes[b] * passes + per_item - 1) / per_item;
    splits = splits < 1 ? 1 : splits > MAX_SPLITS ? MAX_SPLITS : splits;
    const std::vector<int64_t> at = cut(call, b, bytes[b], splits);
    splits = static_cast<int64_t>(at.size()) - 1;
    for (int h = 0; h < call.num_kv_heads; h++)
      for (int r = 0; r < row_blocks; r++) {
        const int first = r * tokens * group, left = call.num_tokens * group - first;
        const int rows = left < tokens * group ? left : tokens * group;
        const bool split = splits > 1;
        if (split) w.groups.push_back({static_cast<int64_t>(w.items.size()), splits});
        for (int64_t s = 0; s < splits; s++) {
          w.items.push_back({b, h, first, rows, at[s], at[s + 1], split ? partial_rows : -1});
          w.group_of.push_back(split ? static_cast<int32_t>(w.groups.size()) - 1 : -1);
          if (split) partial_rows += rows;
        }
      }
  }
  w.left.reset(new std::atomic<int32_t>[w.groups.size() + 1]);
  for (size_t i = 0; i < w.groups.size(); i++)
    w.left[i].store(static_cast<int32_t>(w.groups[i].num_items), std::memory_order_relaxed);
  // Kept between calls: the pages of a fresh allocation would have to be faulted in again every time.
  thread_local std::vector<float> partial;
  const size_t floats = static_cast<size_t>(partial_rows * partial_stride(call.value_head_dim));
  if (partial.size() < floats) partial.resize(floats);
  w.plan.partial = partial.data();
}

void merge(const Work& w, const Group& g) {
  const kvbits_attend_call& call = *w.plan.call;
  const int group = call.num_heads / call.num_kv_heads, d = call.value_head_dim;
  const int64_t stride = partial_stride(d);
  const AttendItem& first = w.items[g.first_item];
  for (int r = 0; r < first.num_rows; r++) {
    const int row = first.first_row + r, token = row / group, head = first.kv_head * group + row % group;
    const int64_t at = (static_cast<int64_t>(first.sequence) * call.num_tokens + token) * call.num_heads + head;
    float* out = call.out + at * d;
    float most = -INFINITY, total = 0;
    for (int64_t i = 0; i < g.num_items; i++)
      most = fmaxf(most, w.plan.partial[(first.partial + i * first.num_rows + r) * stride + d]);
    for (int c = 0; c < d; c++) out[c] = 0;
    for (int64_t i = 0; i < g.num_items; i++) {
      const float* part = w.plan.partial + (first.partial + i * first.num_rows + r) * stride;
      if (!(part[d] > -INFINITY)) continue;
      const float weight = exp2f(part[d] - most);
      total += weight * part[d + 1];
      for (int c = 0; c < d; c++) out[c] += weight * part[c];
    }
    const float inverse = total != 0 ? 1.0f / total : 0.0f;  // NaN stays NaN
    for (int c = 0; c < d; c++) out[c] *= inverse;
    call.lse[at] = total != 0 ? (most + log2f(total)) * 0.69314718056f : -INFINITY;
  }
}

void run_item(void* context, int64_t i, int64_t next, void* scratch) {
  Work& w = *static_cast<Work*>(context);
  w.tier->attend_item(&w.plan, &w.items[i], next < 0 ? nullptr : &w.items[next], scratch);
  const int32_t g = w.group_of[i];
  if (g >= 0 && w.left[g].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(w, w.groups[g]);
}

}  // namespace

extern "C" int32_t kvbits_attend(const kvbits_attend_call* call) {
  if (const int32_t bad = check(*call)) return bad;
  try {
    Work w{{call, nullptr}, active_tier(), {}, {}, {}, nullptr};
    if (!w.tier) return KVBITS_NO_TIER;
    if (w.tier->refuses && w.tier->refuses(call)) w.tier = w.tier->otherwise;
    const int threads = call->num_threads > 0 ? call->num_threads : pool_available_threads();
    build(w, threads);
    if (!pool_run(threads, static_cast<int64_t>(w.items.size()), w.tier->scratch_bytes, run_item, &w))
      return KVBITS_NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return KVBITS_NO_MEMORY;
  }
  return 0;
}
