// The ring of pages whose codes number levels: keys and values of a page arrive and are given back apart, so that a
// warp with one slot waits for neither.
//
// Lane w of the producer warp fills the slots of consumer warp w with keys, lane 16 + w with values. Lanes look whether
// their slot is free and go on if it is not: a lane that waits would hold up all others, and with them every warp of
// the block.
#pragma once
#include "codebook_tables.cuh"
#include "ring.cuh"

static_assert(WARPS <= 16, "two producer lanes for each warp");

struct Ring {
    u64 full[SLOTS][2], empty[SLOTS][2];  // of keys, of values
    int2 tokens[SLOTS];                   // position of the first, visible ones; comes with the keys
};

/// Fills the ring, with all lanes of a warp.
DEVICE void produce(const Args& a, Ring& ring, unsigned char* slots, int lane) {
    prefetch_after_ring(a, lane);
    const int warp = lane % 16, half = lane / 16;
    const auto enter = [&](const Part& part, Unit u) { prefetch_codebook(part, u.head, warp, WARPS); };
    Cursor at = {int(blockIdx.x), -1, warp};
    bool more = warp < WARPS && at.settle(a, warp, enter);
    Source from;
    if (more) from = Source(a, a.segments[at.segment], at.k);
#if __CUDA_ARCH__ >= 900
    u64 policy = read_once_policy();
#endif
    while (__any_sync(ALL_LANES, more)) {
        const int index = at.chunk % SLOTS;
        const bool ready = more && barrier_test(shared_address(&ring.empty[index][half]), (at.chunk / SLOTS & 1) ^ 1);
        if (!__any_sync(ALL_LANES, ready)) {
            pause();
            continue;
        }
        const int first = half ? K_PIECES : 0, last = half ? a.num_pieces : K_PIECES;
        if (ready && !half) ring.tokens[index] = from.tokens;
#if __CUDA_ARCH__ >= 900
        if (ready) {
            if (from.fresh) wait_for_previous_kernel();
            const u32 full = shared_address(&ring.full[index][half]), slot = shared_address(slots + index * SLOT_BYTES);
            barrier_arrive_expect(full, half ? CHUNK_BYTES - K_BYTES : K_BYTES);
            for (int i = first; i < last; ++i)
                copy_bulk(slot + a.pieces[i].to, from.address + a.pieces[i].from, a.pieces[i].bytes, full, policy);
        }
#else
        for (int w = 0; w < 32; ++w) {
            if (!__shfl_sync(ALL_LANES, ready, w)) continue;
            const int to = __shfl_sync(ALL_LANES, index, w), from_piece = __shfl_sync(ALL_LANES, first, w),
                      to_piece = __shfl_sync(ALL_LANES, last, w);
            const i64 page = __shfl_sync(ALL_LANES, from.address, w);
            const u32 slot = shared_address(slots + to * SLOT_BYTES), full = shared_address(&ring.full[to][w / 16]);
            if (lane == w) barrier_arrive(full);
            for (int i = from_piece; i < to_piece; ++i)
                for (int at16 = lane * 16; at16 < a.pieces[i].bytes; at16 += 512)
                    copy_async_16(slot + a.pieces[i].to + at16, page + a.pieces[i].from + at16);
            copy_async_arrive(full);
        }
#endif
        if (ready) {
            at.k += WARPS;
            at.chunk += WARPS;
            more = at.settle(a, warp, enter);
            if (more) from = Source(a, a.segments[at.segment], at.k);
        }
    }
}
