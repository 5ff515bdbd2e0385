// Dynamic items on torch's OpenMP threads: they keep spinning for milliseconds after every torch op, and other threads
// would have to share their cores. Where torch has none, and in a forked child, all items run on the calling thread.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Runs item `i`; `next` is the item this thread will run afterwards, or -1. `scratch` belongs to the thread.
typedef void (*PoolTask)(void* context, int64_t i, int64_t next, void* scratch);

// Runs items 0 .. count-1 on up to `threads` threads, the caller included. Which thread runs which item is open, so
// results may not depend on it. False when memory runs out (nothing was run).
bool pool_run(int threads, int64_t count, size_t scratch_bytes, PoolTask task, void* context);

// Address of GOMP_parallel in the OpenMP runtime to run on; null: one thread, as in a forked child.
void pool_use_openmp(void* parallel);

// Threads that the process may run on (its affinity mask).
int pool_available_threads();
