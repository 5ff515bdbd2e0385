// Pages of a blob: checksums, and reading them from a file to where they belong. No threads here: a load calls this from a thread per file, without Python's lock.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "../close/plan.h"
#include "../dispatch.h"
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
  call->bad = -1;
  call->system_error = 0;
  for (int64_t i = 0; i < call->num_pieces; i++) {
    const kvbits_read_piece& p = call->pieces[i];
    const int64_t at_once = p.layer_bytes < AT_ONCE ? AT_ONCE / p.layer_bytes : 1;
    for (int64_t layer = 0; layer < p.layers; layer += at_once) {
      const int64_t layers = p.layers - layer < at_once ? p.layers - layer : at_once, nbytes = layers * p.layer_bytes;
      uint8_t* to = p.to + layer * p.layer_bytes;
      const int64_t got = read_all(call->fd, to, nbytes, p.offset + layer * p.layer_bytes);
      if (got != nbytes) {
        call->bad = i;
        if (got < 0) call->system_error = (int32_t)-got;
        return 0;
      }
      if (p.sums && !as_stated(tier, to, layers, p.layer_bytes, p.sums + layer)) {
        call->bad = i;
        return 0;
      }
    }
  }
  return 0;
}
}
