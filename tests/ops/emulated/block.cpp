// A kernel (kernel.h) on a CPU, one block after the other: see ptx.cuh beside this. defines.h holds the instantiation's
// macros, KERNEL and NUM_THREADS.
#include "defines.h"
#include "ptx.cuh"

#include <sys/mman.h>

Block block;
alignas(1024) unsigned char shared[SHARED_BYTES];
#include "kernel.h"

static const Args* arguments;
/// The last thread goes first: what a missing barrier leaves to chance then comes out differently.
static const bool reversed = getenv("KVBITS_EMULATE_REVERSED") != nullptr;

asm(R"(
.text
.hidden switch_stacks
.globl switch_stacks
.type switch_stacks, @function
switch_stacks:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

constexpr size_t STACK = 256 << 10;
/// Blocks along y.
extern "C" int blocks_y;
int blocks_y = 1;

static void thread() {
  KERNEL(*arguments);
  block.fibers[block.current].done = true;
  yield();
}

extern "C" void launch(const Args* args, int blocks) {
  arguments = args;
  const int threads = NUM_THREADS;
  static unsigned char* const stacks = (unsigned char*)mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("no memory for stacks", threads);
  for (int n = 0; n < blocks * blocks_y; ++n) {
    blockIdx.x = n % blocks, blockIdx.y = n / blocks;
    memset(shared, 0xff, sizeof shared);
    block.warps.assign(NUM_THREADS / 32, {});
    block.transactions.assign(SHARED_BYTES / 8, {});
    for (Barrier& b : block.barriers) b = {};
    block.fibers.assign(threads, {});
    for (int i = 0; i < threads; ++i) {  // as if `thread` had been called and had not begun
      void** top = (void**)(stacks + (i + 1) * STACK);
      top[-1] = nullptr;
      top[-2] = (void*)thread;
      block.fibers[i].stands = top - 8;
    }
    for (int left = threads; left;) {
      left = 0;
      for (int i = 0; i < threads; ++i) {
        block.current = reversed ? threads - 1 - i : i;
        Fiber& f = block.fibers[block.current];
        if (!f.done) switch_stacks(&block.scheduler, f.stands);
        left += !f.done;
      }
    }
  }
}
