// Plans an attention call: checks every index, cuts it into items of about equal bytes, runs them, merges splits.
//
// Where a tier attends in tiles, sequences that begin with the same pages read them together once their rows are enough
// for tiles: an item then has the rows of all of them, and the group of each has it among its pieces.
//
// The cut depends on the call and on the number of threads, never on who runs what: the same call gives the same bits.
// The last item of a group to finish merges the group, in fixed order.
#include <math.h>

#include <algorithm>
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
  int32_t sequence, kv_head, first_row, num_rows;
  int64_t first_piece, num_pieces;
};

struct Work {
  AttendPlan plan;
  const TierKernels* tiers[2];  // of items that a sequence reads alone, and of others
  std::vector<AttendItem> items;
  std::vector<int32_t> sequences;  // of the items, cluster by cluster
  std::vector<int64_t> group_of;   // item -> group of its first sequence, -1 for items that are the whole answer
  std::vector<Group> groups;       // those of an item's sequences lie side by side
  std::vector<int64_t> pieces;     // of the groups: rows of partial results
  std::unique_ptr<std::atomic<int64_t>[]> left;
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

// Entries of a sequence's parts, one after the other, that some items read.
struct Range {
  int64_t first, end, bytes;
};

// Calls `use(part, entry, flat)` for the entries of a sequence's parts.
template <class Use>
void for_each_entry(const kvbits_attend_call& call, int b, const Use& use) {
  int64_t flat = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& t = *call.parts[p].table;
    for (int64_t e = t.indptr[b]; e < t.indptr[b + 1]; e++) use(p, e, flat++);
  }
}

// Sequences whose first pages of some parts are the same.
struct Cluster {
  std::vector<int32_t> members;
  std::vector<int64_t> shared;  // pages of each part
};

int64_t part_bytes(const kvbits_attend_call& call, int p) {
  const kvbits_table& t = *call.parts[p].table;
  int64_t total = 0;
  for (int64_t e = t.indptr[0]; e < t.indptr[call.batch]; e++) total += entry_bytes(call.parts[p], e);
  return total;
}

bool same_page(const kvbits_table& t, int64_t a, int64_t b) {
  return t.page_ids[a] == t.page_ids[b] && t.starts[a] == t.starts[b] && t.lengths[a] == t.lengths[b];
}

// Pages that a sequence's part begins with as that of `lead` does, of `most`.
int64_t shared_pages(const kvbits_table& t, int lead, int b, int64_t most) {
  const int64_t room = t.indptr[b + 1] - t.indptr[b];
  int64_t n = 0;
  while (n < most && n < room && same_page(t, t.indptr[lead] + n, t.indptr[b] + n)) n++;
  return n;
}

// All sequences, of which `least` to `most` at a time are read together where they share pages of the longest part.
std::vector<Cluster> clusters(const kvbits_attend_call& call, int least, int most) {
  int longest = 0;
  for (int p = 1; p < call.num_parts && most > 1; p++)
    if (part_bytes(call, p) > part_bytes(call, longest)) longest = p;
  std::vector<Cluster> found;
  std::vector<bool> taken(call.batch);
  for (int lead = 0; lead < call.batch; lead++) {
    if (taken[lead]) continue;
    Cluster c{{lead}, std::vector<int64_t>(call.num_parts, 0)};
    for (int b = lead + 1; b < call.batch && static_cast<int>(c.members.size()) < most; b++) {
      if (taken[b] || !shared_pages(*call.parts[longest].table, lead, b, 1)) continue;
      c.members.push_back(b);
    }
    if (static_cast<int>(c.members.size()) < least) c.members.resize(1);
    for (const int32_t b : c.members) taken[b] = true;
    for (int p = 0; p < call.num_parts && c.members.size() > 1; p++) {
      const kvbits_table& t = *call.parts[p].table;
      c.shared[p] = t.indptr[lead + 1] - t.indptr[lead];
      for (size_t i = 1; i < c.members.size(); i++) c.shared[p] = shared_pages(t, lead, c.members[i], c.shared[p]);
    }
    found.push_back(std::move(c));
  }
  return found;
}

// The runs of a sequence's entries that it shares with its cluster, or those that it does not.
std::vector<Range> runs(const kvbits_attend_call& call, const Cluster& c, int b, bool shared) {
  std::vector<Range> found;
  for_each_entry(call, b, [&](int p, int64_t e, int64_t flat) {
    if ((e - call.parts[p].table->indptr[b] < c.shared[p]) != shared) return;
    if (found.empty() || found.back().end != flat) found.push_back({flat, flat, 0});
    found.back().end++;
    found.back().bytes += entry_bytes(call.parts[p], e);
  });
  if (found.empty() && !shared && c.members.size() == 1) found.push_back({0, 0, 0});  // whose answer is 0
  return found;
}

// Entry numbers at which a run is cut into `splits` ranges of about equal bytes.
std::vector<int64_t> cut(const kvbits_attend_call& call, int b, const Range& run, int64_t splits) {
  std::vector<int64_t> at{run.first};
  int64_t bytes = 0;
  for_each_entry(call, b, [&](int p, int64_t e, int64_t flat) {
    if (flat < run.first || flat >= run.end) return;
    if (static_cast<int64_t>(at.size()) < splits && flat > at.back() &&
        bytes * splits >= run.bytes * static_cast<int64_t>(at.size()))
      at.push_back(flat);
    bytes += entry_bytes(call.parts[p], e);
  });
  at.push_back(run.end);
  return at;
}

// What some sequences read together, or one alone.
struct Share {
  std::vector<int32_t> sequences;
  std::vector<int64_t> at;  // where it is cut

  int64_t splits() const { return static_cast<int64_t>(at.size()) - 1; }
};

// Items of one block of rows of a kv head of a cluster.
void add_items(Work& w, const std::vector<Share>& shares, const Cluster& c, const int32_t* sequences, int kv_head,
               int first_row, int rows, int64_t& partial_rows) {
  const int64_t first_group = static_cast<int64_t>(w.groups.size());
  if (c.members.size() == 1 && shares.size() == 1 && shares[0].splits() == 1) {
    w.items.push_back({c.members[0], kv_head, first_row, rows, shares[0].at[0], shares[0].at[1], -1, sequences, 1});
    w.group_of.push_back(-1);
    return;
  }
  std::vector<std::vector<int64_t>> pieces(c.members.size());
  for (const Share& share : shares) {
    const int n = static_cast<int>(share.sequences.size());
    const int64_t place = std::find(c.members.begin(), c.members.end(), share.sequences[0]) - c.members.begin();
    for (int64_t s = 0; s < share.splits(); s++) {
      w.items.push_back({share.sequences[0], kv_head, first_row, n * rows, share.at[s], share.at[s + 1], partial_rows,
                         sequences + place, n});
      w.group_of.push_back(first_group + place);
      for (int i = 0; i < n; i++, partial_rows += rows) pieces[place + i].push_back(partial_rows);
    }
  }
  for (size_t i = 0; i < c.members.size(); i++) {
    w.groups.push_back({c.members[i], kv_head, first_row, rows, static_cast<int64_t>(w.pieces.size()),
                        static_cast<int64_t>(pieces[i].size())});
    w.pieces.insert(w.pieces.end(), pieces[i].begin(), pieces[i].end());
  }
}

void build(Work& w, const TierKernels* best, int threads) {
  const kvbits_attend_call& call = *w.plan.call;
  auto refuses = [&](int rows) { return best->refuses && best->refuses(&call, rows); };
  w.tiers[0] = refuses(rows_of_sequence(call)) ? best->otherwise : best, w.tiers[1] = best;
  const int group = call.num_heads / call.num_kv_heads;
  const int item_rows = w.tiers[0]->item_rows, tokens = group >= item_rows ? 1 : item_rows / group;
  const int row_blocks = (call.num_tokens + tokens - 1) / tokens;
  const int rows_each = (call.num_tokens < tokens ? call.num_tokens : tokens) * group;
  int least = 1, most = 1;
  if (best->refuses && row_blocks == 1 && rows_each) most = std::min(best->item_rows / rows_each, call.batch);
  if (most > 1 && refuses(most * rows_each)) most = 1;
  while (least < most && refuses(least * rows_each)) least++;
  const std::vector<Cluster> found = clusters(call, least, most);
  auto passes = [&](size_t members) { return (static_cast<int64_t>(members) * rows_each + 7) / 8; };
  std::vector<std::vector<Range>> shared, own;  // of each cluster; of each of its members
  int64_t work = 0;
  for (const Cluster& c : found) {
    shared.push_back(c.members.size() > 1 ? runs(call, c, c.members[0], true) : std::vector<Range>());
    for (const Range& run : shared.back()) work += run.bytes * passes(c.members.size());
    for (const int32_t b : c.members) {
      own.push_back(runs(call, c, b, false));
      for (const Range& run : own.back()) work += run.bytes * passes(1);
    }
    w.sequences.insert(w.sequences.end(), c.members.begin(), c.members.end());
  }
  work *= static_cast<int64_t>(row_blocks) * call.num_kv_heads;
  const int64_t wanted = threads > 1 ? threads * ITEMS_PER_THREAD : 1;
  const int64_t per_item = work / wanted > MIN_ITEM_BYTES ? work / wanted : MIN_ITEM_BYTES;
  int64_t partial_rows = 0, first_own = 0;
  const int32_t* sequences = w.sequences.data();
  for (size_t i = 0; i < found.size(); i++) {
    const Cluster& c = found[i];
    std::vector<Share> shares;
    auto share = [&](const std::vector<int32_t>& members, const Range& run) {
      const int64_t splits = (run.bytes * passes(members.size()) + per_item - 1) / per_item;
      shares.push_back({members, cut(call, members[0], run, std::clamp<int64_t>(splits, 1, MAX_SPLITS))});
    };
    for (const Range& run : shared[i]) share(c.members, run);
    for (size_t k = 0; k < c.members.size(); k++)
      for (const Range& run : own[first_own + k]) share({c.members[k]}, run);
    first_own += static_cast<int64_t>(c.members.size());
    for (int h = 0; h < call.num_kv_heads; h++)
      for (int r = 0; r < row_blocks; r++) {
        const int first = r * tokens * group, left = call.num_tokens * group - first;
        add_items(w, shares, c, sequences, h, first, left < tokens * group ? left : tokens * group, partial_rows);
      }
    sequences += c.members.size();
  }
  w.left.reset(new std::atomic<int64_t>[w.groups.size() + 1]);
  for (size_t i = 0; i < w.groups.size(); i++) w.left[i].store(w.groups[i].num_pieces, std::memory_order_relaxed);
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
  const int64_t* pieces = w.pieces.data() + g.first_piece;
  for (int r = 0; r < g.num_rows; r++) {
    const int row = g.first_row + r, token = row / group, head = g.kv_head * group + row % group;
    const int64_t at = (static_cast<int64_t>(g.sequence) * call.num_tokens + token) * call.num_heads + head;
    float* out = call.out + at * d;
    float most = -INFINITY, total = 0;
    for (int64_t i = 0; i < g.num_pieces; i++) most = fmaxf(most, w.plan.partial[(pieces[i] + r) * stride + d]);
    for (int c = 0; c < d; c++) out[c] = 0;
    for (int64_t i = 0; i < g.num_pieces; i++) {
      const float* part = w.plan.partial + (pieces[i] + r) * stride;
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
  const AttendItem& item = w.items[i];
  w.tiers[item.num_sequences > 1]->attend_item(&w.plan, &item, next < 0 ? nullptr : &w.items[next], scratch);
  for (int64_t g = w.group_of[i], k = 0; g >= 0 && k < item.num_sequences; g++, k++)
    if (w.left[g].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(w, w.groups[g]);
}

}  // namespace

extern "C" int32_t kvbits_attend(const kvbits_attend_call* call) {
  if (const int32_t bad = check(*call)) return bad;
  try {
    const TierKernels* best = active_tier();
    if (!best) return KVBITS_NO_TIER;
    Work w{{call, nullptr}, {}, {}, {}, {}, {}, {}, nullptr};
    const int threads = call->num_threads > 0 ? call->num_threads : pool_available_threads();
    build(w, best, threads);
    size_t scratch = 0;
    for (const AttendItem& item : w.items) scratch = std::max(scratch, w.tiers[item.num_sequences > 1]->scratch_bytes);
    if (!pool_run(threads, static_cast<int64_t>(w.items.size()), scratch, run_item, &w))
      return KVBITS_NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return KVBITS_NO_MEMORY;
  }
  return 0;
}
