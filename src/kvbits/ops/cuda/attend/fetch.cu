// Pages of a coming launch of attention, as far as L2: launched while the memory has nothing else to do, ended as soon as all is asked for. It reads the work
// list that attention will read (or that of the step before, whose pages are the same but for the newest) and writes nothing.
#include "packed_ring.cuh"

extern "C" __global__ void __launch_bounds__(32) fetch(const __grid_constant__ Args a) {
#if __CUDA_ARCH__ >= 900
    int left = FETCHED;          // chunks of a block
    for (int i = blockIdx.x; i >= 0 && left > 0;) {
        const Segment& s = a.segments[i];
        if (s.unit < 0) return;
        if (comes_through_ring(a.parts[s.part])) {
            prefetch_chunks(a, s, threadIdx.x, left, 32);
            left -= s.num_chunks;
        }
        i = s.next;
    }
#endif
}
