#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20;

// FP8 subnormals need gradual underflow, which torch.set_flush_denormal(True) switches off in the calling thread.
struct GradualUnderflow {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  GradualUnderflow() { _mm_setcsr(saved & ~0x8040u); }
  ~GradualUnderflow() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  GradualUnderflow() {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, %0" ::"r"(saved & ~(uint64_t(1) << 24)));
  }
  ~GradualUnderflow() { asm volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

struct Scratch {
  void* memory = nullptr;
  size_t bytes = 0;

  bool reserve(size_t n) {
    if (n <= bytes) return true;
    free(memory);
    bytes = (n + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (posix_memalign(&memory, HUGE_PAGE, bytes)) {
      memory = nullptr;
      bytes = 0;
      return false;
    }
#if defined(__linux__)
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return true;
  }
};

struct Job {
  PoolTask task;
  void* context;
  int64_t count;
};

// OpenMP's own calling convention for a parallel region; GNU's, LLVM's and Intel's runtime all export it.
typedef void (*OpenMPParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
std::atomic<OpenMPParallel> openmp_parallel{nullptr};

class Pool {
 public:
  bool run(int threads, int64_t count, size_t scratch_bytes, PoolTask task, void* context) {
    std::lock_guard<std::mutex> one_call(calls_);
    const OpenMPParallel openmp = openmp_parallel.load(std::memory_order_relaxed);
    if (!openmp) threads = 1;
    if (threads > count) threads = static_cast<int>(count);
    if (threads < 1) threads = 1;
    while (scratch_.size() < static_cast<size_t>(threads)) scratch_.emplace_back();
    for (int i = 0; i < threads; i++)
      if (!scratch_[i].reserve(scratch_bytes)) return false;
    next_.store(0, std::memory_order_relaxed);
    job_ = {task, context, count};
    taken_.store(0, std::memory_order_relaxed);
    if (threads > 1) openmp(&Pool::join_team, this, static_cast<unsigned>(threads), 0);
    else work(job_, 0);
    return true;
  }

 private:
  std::mutex calls_;  // one call at a time
  std::vector<Scratch> scratch_;
  Job job_ = {};
  std::atomic<int64_t> next_{0};
  std::atomic<int> taken_{0};  // members of an OpenMP team that have a seat

  // A team may be smaller than asked for (nested regions, limits), never larger.
  static void join_team(void* pool) {
    Pool& p = *static_cast<Pool*>(pool);
    p.work(p.job_, p.taken_.fetch_add(1, std::memory_order_relaxed));
  }

  void work(const Job& job, int seat) {
    GradualUnderflow mode;
    void* scratch = scratch_[seat].memory;
    int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
    while (i < job.count) {
      const int64_t next = next_.fetch_add(1, std::memory_order_relaxed);
      job.task(job.context, i, next < job.count ? next : -1, scratch);
      i = next;
    }
  }
};

std::mutex create;
std::atomic<Pool*> pool{nullptr};
std::atomic<bool> forked{false};

// Threads do not survive a fork, and GNU OpenMP would wait for its lost ones: the child leaves the old pool and its
// locks behind and works on one thread.
void forget() {
  forked.store(true);
  openmp_parallel.store(nullptr);
  pool.store(nullptr);
  new (&create) std::mutex;
}

Pool& instance() {
  Pool* p = pool.load(std::memory_order_acquire);
  if (p) return *p;
  std::lock_guard<std::mutex> lock(create);
  if (!pool.load()) pool.store(new Pool);  // never deleted: a call may outlive static destructors
  return *pool.load();
}

}  // namespace

bool pool_run(int threads, int64_t count, size_t scratch_bytes, PoolTask task, void* context) {
  try {
    return instance().run(threads, count, scratch_bytes, task, context);
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void pool_use_openmp(void* parallel) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget);
  (void)registered;
  openmp_parallel.store(forked.load() ? nullptr : reinterpret_cast<OpenMPParallel>(parallel));
}

int pool_available_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof(set), &set)) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}
