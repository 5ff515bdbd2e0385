#include "dispatch.h"

#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <atomic>

#include "pool.h"
#include "store.h"

namespace {

#if defined(__x86_64__)
struct Machine {
  bool avx2 = false, avx512 = false, amx_bf16 = false, amx = false;

  /// Asks the processor itself: to `__builtin_cpu_supports` Zig's runtime answers no on every machine, and its wheels
  /// took generic code.
  Machine() {
    unsigned a, b, c, d, saved, upper;
    const unsigned base = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C,
                   wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & base) != base || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    asm volatile("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));  // which registers the system saves
    avx2 = (b & bit_AVX2) && (saved & 0x06) == 0x06;
    avx512 = avx2 && (b & wide) == wide && (c & bit_AVX512VNNI) && (saved & 0xe6) == 0xe6;
    const unsigned tiles = 1u << 24 | 1u << 22;  // AMX-TILE, AMX-BF16
    amx_bf16 = (d & tiles) == tiles;
    amx = avx512 && amx_bf16 && (saved & 0x60000) == 0x60000;
  }
};
#elif defined(__aarch64__) && defined(__linux__)
bool has_dot_product() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
#elif defined(__aarch64__)
bool has_dot_product() { return true; }  // every Apple and Windows ARM machine has it
#endif

// Whether the system lets the process use tiles. It is asked once; a process that holds no permission is killed at its
// first tile.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool granted = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18L /* tile data */);
  return granted;
#else
  return false;
#endif
}

// Why tiles of AMX are not used here, or null.
const char* refuse_amx() {
#if defined(__x86_64__)
  const Machine machine;
  if (!machine.amx_bf16) return "the processor has no AMX with bfloat16";
  if (!machine.amx) return "the system does not save the registers of AMX";
  return may_use_tiles() ? nullptr : "the system refuses permission for tile data (arch_prctl, ARCH_REQ_XCOMP_PERM)";
#else
  return "the processor has no AMX with bfloat16";
#endif
}

const TierKernels* find(const char* name) {
  auto wanted = [name](const char* tier) { return !name || !*name || !strcmp(name, tier); };
  if (name && !strcmp(name, "amx_emulated")) return tier_amx_emulated();  // for tests: nobody's best tier
#if defined(__x86_64__)
  if (wanted("amx") && !refuse_amx()) return tier_amx();
  if (wanted("avx512") && Machine().avx512) return tier_avx512();
  if (wanted("avx2") && Machine().avx2) return tier_avx2();
#elif defined(__aarch64__)
  if (wanted("neon") && has_dot_product()) return tier_neon();
#endif
  return wanted("generic") ? tier_generic() : nullptr;
}

std::atomic<const TierKernels*> active{nullptr};

bool is_width(int bits) { return bits >= 0 && bits <= 8 && bits != 7; }

int32_t check_bands(const kvbits_tensor& t, bool is_key, int head_dim) {
  if (t.format != FORMAT_TRELLIS)
    return t.bands || t.from_basis || t.inv_freq || t.hadamard || t.fitted ? KVBITS_BAD_FORMAT : 0;
  if (!t.bands || (t.from_basis != nullptr) != (t.inv_freq != nullptr) || t.scale_dtype != FLOAT8_E5M3 ||
      t.static_scale || t.per_channel)
    return KVBITS_BAD_FORMAT;
  if (t.group_size != head_dim || (!is_key && t.from_basis)) return KVBITS_BAD_FORMAT;
  for (int i = 0; i < (head_dim + BAND - 1) / BAND; i++)
    if (!is_width(t.bands[i]) || (!is_key && (t.bands[i] != t.bands[0] || t.bands[i] < 2 || t.bands[i] > 4)))
      return KVBITS_BAD_BANDS;
  return t.fitted && (is_key || t.bands[0] != 2) ? KVBITS_BAD_BANDS : 0;
}

int32_t check_tensor(const kvbits_tensor& t, bool is_key, const kvbits_store& s, int head_dim) {
  if (t.format < 0 || t.format >= NUM_FORMATS) return KVBITS_BAD_FORMAT;
  if (t.format == FORMAT_RAW) return 0;
  if (s.page_size % 32) return KVBITS_BAD_PAGE_SIZE;
  if (number_format(t.format).levels == CODEBOOK) return KVBITS_BAD_FORMAT;
  if (const int32_t bad = check_bands(t, is_key, head_dim)) return bad;
  if (!t.static_scale && t.scale_offset < 0) return KVBITS_BAD_FORMAT;
  if (t.per_channel || t.static_scale) return 0;
  if (t.group_size < 4 || t.group_size % 4 || head_dim % t.group_size || head_dim / t.group_size > MAX_GROUPS)
    return KVBITS_BAD_GROUP;
  return 0;
}

}  // namespace

const TierKernels* active_tier() {
  if (!active.load(std::memory_order_relaxed)) active.store(find(getenv("KVBITS_CPU_TIER")));
  return active.load(std::memory_order_relaxed);
}

bool is_head_dim(int head_dim) { return head_dim >= 8 && head_dim % 8 == 0 && head_dim <= MAX_HEAD_DIM; }

int32_t check_store(const kvbits_store& store, int head_dim, int value_head_dim) {
  if (!is_head_dim(head_dim) || !is_head_dim(value_head_dim)) return KVBITS_BAD_HEAD_DIM;
  if (store.page_size < 1) return KVBITS_BAD_PAGE_SIZE;
  const int32_t bad = check_tensor(store.key, true, store, head_dim);
  return bad ? bad : check_tensor(store.value, false, store, value_head_dim);
}

int64_t num_pages(const kvbits_store& store) {
  int64_t pages = 0;
  for (int i = 0; i < store.num_slabs; i++) pages += store.slab_pages[i];
  return pages;
}

extern "C" {

int32_t kvbits_abi_version(void) { return KVBITS_ABI_VERSION; }

const char* kvbits_tier(void) {
  const TierKernels* tier = active_tier();
  return tier ? tier->name : "";
}

int32_t kvbits_set_tier(const char* name) {
  const TierKernels* tier = find(name);
  if (!tier) return -1;
  active.store(tier);
  return 0;
}

const char* kvbits_amx_refusal(void) { return refuse_amx(); }

const char* kvbits_attend_refusal(const kvbits_attend_call* call, const char** name) {
  const TierKernels* tier = active_tier();
  const char* why = tier && tier->refuses ? tier->refuses(call, rows_of_sequence(*call)) : nullptr;
  *name = !tier ? "" : why ? tier->otherwise->name : tier->name;
  return why;
}

void kvbits_use_openmp(void* parallel) { pool_use_openmp(parallel); }

const char* kvbits_error(int32_t code) {
  switch (code) {
    case KVBITS_BAD_FORMAT:
      return "a store names no number format that has kernels, or has neither stored nor static scales, or lacks its rotary frequencies";
    case KVBITS_BAD_BANDS: return "bands of keys have 0 to 6 or 8 bits, those of values the same 2, 3 or 4; fitted levels are those of values of 2 bits";
    case KVBITS_BAD_PAGE_SIZE: return "page_size must be a multiple of 32 where anything is quantized";
    case KVBITS_BAD_GROUP: return "group_size must be a multiple of 4 that divides head_dim into at most 32 groups";
    case KVBITS_BAD_HEAD_DIM: return "head_dim must be a multiple of 8 and at most 512";
    case KVBITS_BAD_HEADS: return "the number of query heads must be a multiple (at most 64) of the number of kv heads";
    case KVBITS_BAD_TABLE:
      return "a page table's indptr must rise from 0 to its number of entries, and starts must not be negative";
    case KVBITS_BAD_PAGE_ID: return "a page table names a page that its store does not have";
    case KVBITS_BAD_LENGTH: return "a page table's lengths must lie between 1 and page_size";
    case KVBITS_NOT_TOKEN_LOCAL:
      return "fresh tokens go to raw pages of the same type, or to token-local ones";
    case KVBITS_BAD_START:
      return "a page of keys that are turned back has no position, or one whose frame was not given";
    case KVBITS_BAD_ROWS: return "rows of unpacked pages must lie inside of what they are written to";
    case KVBITS_BAD_PARTS: return "merging takes 1 to 64 parts in fp32, fp16 or bf16";
    case KVBITS_NO_TIER: return "KVBITS_CPU_TIER names an instruction set that this machine or build does not have";
    case KVBITS_NO_MEMORY: return "out of memory for the kernels' scratch buffers";
    default: return "unknown error";
  }
}
}
