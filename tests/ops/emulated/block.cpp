// A kernel (kernel.h) on a CPU, one block after the other: see ptx.cuh beside this. defines.h holds the instantiation's macros, KERNEL and NUM_THREADS.
#include "defines.h"
#include "ptx.cuh"

Block block;
alignas(1024) unsigned char shared[SHARED_BYTES];
#include "kernel.h"

static const Args* arguments;
/// The last thread goes first: what a missing barrier leaves to chance then comes out differently.
static const bool reversed = getenv("KVBITS_EMULATE_REVERSED") != nullptr;

static void thread() {
  KERNEL(*arguments);
  block.fibers[block.current].done = true;
  yield();
}

extern "C" void launch(const Args* args, int blocks) {
  arguments = args;
  const int threads = NUM_THREADS;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    memset(shared, 0xff, sizeof shared);
    block.warps.assign(NUM_THREADS / 32, {});
    block.transactions.assign(SHARED_BYTES / 8, {});
    for (Barrier& b : block.barriers) b = {};
    block.fibers = std::vector<Fiber>(threads);
    for (Fiber& f : block.fibers) {
      f.stack.resize(256 << 10);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      makecontext(&f.context, thread, 0);
    }
    for (int left = threads; left;) {
      left = 0;
      for (int i = 0; i < threads; ++i) {
        block.current = reversed ? threads - 1 - i : i;
        Fiber& f = block.fibers[block.current];
        if (!f.done) swapcontext(&block.scheduler, &f.context);
        left += !f.done;
      }
    }
  }
}
