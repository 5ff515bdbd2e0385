// Attention of a few query columns over 16-bit pages: one persistent block per multiprocessor, balanced by bytes.
//
// A block walks its segments (runs of chunks of one sequence, kv head and part), warp w their chunks w, w + WARPS, ..:
// nothing is shared until a segment ends, then warps merge through shared memory. Units split over several segments are
// summed by the block that arrives last. The last warp has nothing to do here: it stands where kernels with a ring have
// their producer.
#include "raw_walk.cuh"

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1) attend(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    static_assert(sizeof(Merge) <= SHARED_BYTES, "shape.py counts too little shared memory");
    Merge& merge = *reinterpret_cast<Merge*>(shared);
    if (warp == WARPS) return;
    wait_for_previous_kernel();
    for (int i = blockIdx.x; i >= 0;) {
        const Segment s = a.segments[i];
        if (s.unit < 0) return;
        const Unit u = enter_segment(a, s, merge, warp, lane);
        i = walk_raw_in_memory(a, u, merge, warp, lane);
    }
}
