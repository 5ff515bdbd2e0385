// Attention over pages whose keys are trellis codes in a calibrated basis: the walk is packed_attend.cuh's.
#include "banded_walk.cuh"
#include "packed_attend.cuh"

extern "C" __global__ void __launch_bounds__((WARPS + 1 + MAKERS) * 32, 1) attend(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    attend_packed<BandedWalk<BYTES>::Walk>(a, shared);
}
