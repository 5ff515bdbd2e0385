// Pages of blobs: checksums, and reading them from files to where they belong, in threads of their own: the pool serves one call at a time, and attention needs it.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/close/plan.h"
#include "engine/dispatch.h"
#include "sums.h"

namespace {

// Bytes that are read before they are checked, or one layer of a page: they are still in the core's cache then, and enough for some layers side by side.
constexpr int64_t AT_ONCE = 5 << 16;

struct Constants {
  uint64_t within[CHECKSUM_WORDS];  // C
  Constants() {
    for (int64_t i = 0; i < CHECKSUM_WORDS; i++) within[i] = odd_number((uint64_t)i);
  }
};

const uint64_t* within() {
  static const Constants constants;
  return constants.within;
}

bool as_stated(const TierKernels* tier, const uint8_t* bytes, int64_t layers, int64_t layer_bytes, const uint64_t* stated) {
  uint64_t sums[64];
  for (int64_t at = 0; at < layers; at += 64) {
    const int64_t n = layers - at < 64 ? layers - at : 64;
    tier->pages->checksums(bytes + at * layer_bytes, n, layer_bytes, within(), sums);
    if (memcmp(sums, stated + at, (size_t)n * sizeof *sums)) return false;
  }
  return true;
}

// Bytes read: fewer than wanted at the end of the file; -errno.
int64_t read_all(int fd, uint8_t* to, int64_t nbytes, int64_t offset) {
  int64_t done = 0;
  while (done < nbytes) {
    const ssize_t n = pread(fd, to + done, (size_t)(nbytes - done), (off_t)(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -(int64_t)errno;
    if (n == 0) break;
    done += n;
  }
  return done;
}

// What a thread reads at once: some layers of a piece.
struct Run {
  int64_t piece, layer, layers;
};

// 0, -errno, or 1 where the file does not have it as stated.
int64_t read_run(const TierKernels* tier, const kvbits_read_piece& p, const Run& run) {
  const int64_t skip = run.layer * p.layer_bytes, nbytes = run.layers * p.layer_bytes;
  const int64_t got = read_all((int)p.fd, p.to + skip, nbytes, p.offset + skip);
  if (got != nbytes) return got < 0 ? got : 1;
  return p.sums && !as_stated(tier, p.to + skip, run.layers, p.layer_bytes, p.sums + run.layer);
}

}  // namespace

extern "C" {

int32_t kvbits_checksums(const uint8_t* bytes, int64_t count, int64_t nbytes, uint64_t* sums) {
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  tier->pages->checksums(bytes, count, nbytes, within(), sums);
  return 0;
}

int32_t kvbits_read_pages(kvbits_read_call* call) {
  const TierKernels* tier = active_tier();
  if (!tier) return KVBITS_NO_TIER;
  std::vector<Run> runs;
  for (int64_t i = 0; i < call->num_pieces; i++) {
    const kvbits_read_piece& p = call->pieces[i];
    const int64_t at_once = p.layer_bytes < AT_ONCE ? AT_ONCE / p.layer_bytes : 1;
    for (int64_t layer = 0; layer < p.layers; layer += at_once) runs.push_back({i, layer, p.layers - layer < at_once ? p.layers - layer : at_once});
  }
  const int64_t count = (int64_t)runs.size();
  std::vector<int64_t> said(runs.size(), 0);
  std::atomic<int64_t> next{0}, bad{count};
  const auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < bad.load();) {  // those before the first bad one are all read
      if (!(said[(size_t)i] = read_run(tier, call->pieces[runs[(size_t)i].piece], runs[(size_t)i]))) continue;
      for (int64_t first = bad.load(); i < first && !bad.compare_exchange_weak(first, i);) {
      }
    }
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < call->num_threads && i < count; i++) others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: those that there are do it
  }
  work();
  for (std::thread& t : others) t.join();
  const int64_t first = bad.load();
  call->bad = first == count ? -1 : runs[(size_t)first].piece;
  call->system_error = first == count || said[(size_t)first] > 0 ? 0 : (int32_t)-said[(size_t)first];
  return 0;
}
}
