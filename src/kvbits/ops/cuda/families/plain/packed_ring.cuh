// The ring of packed pages and of raw tokens beside them.
#pragma once
#include "ring.cuh"

struct Ring {
    u64 full[SLOTS], empty[SLOTS];
    int2 tokens[SLOTS];          // position of the first, visible ones
};

/// The slot that holds a chunk of the block.
struct RingSlot {
    u32 index, filling;          // filling: its parity, as barriers count

    DEVICE explicit RingSlot(u32 chunk) : index(chunk % SLOTS), filling(chunk / SLOTS & 1) {}
    DEVICE void wait(Ring& ring) const { barrier_wait(shared_address(&ring.full[index]), filling); }
    DEVICE void give_back(Ring& ring) const { barrier_arrive(shared_address(&ring.empty[index])); }
};

/// Lane w of the producer warp fills the slots of consumer warp w, all lanes once they all can: look-ups and copies of
/// a round go together.
DEVICE void produce(const Args& a, Ring& ring, unsigned char* slots, int lane) {
    const auto enter = [](const Part&, Unit) {};
    Cursor at = {int(blockIdx.x), -1, lane};
    bool more = lane < WARPS && at.settle(a, lane, enter);
#if __CUDA_ARCH__ >= 900
    const u64 policy = read_once_policy();
#endif
    Source from;
    if (more) from = Source(a, a.segments[at.segment], at.k);
    Cursor next = at;
    Source ahead;
    bool another = false;
    for (int round = 0; __any_sync(ALL_LANES, more); ++round) {
        if (round == SLOTS / WARPS) prefetch_after_ring(a, lane);
        const RingSlot to(at.chunk);
        const u32 emptied = shared_address(&ring.empty[to.index]), parity = to.filling ^ 1;
        next = more ? at.next() : at;  // ahead of this round's waiting
        another = more && next.settle(a, lane, enter);
        if (another) ahead = Source(a, a.segments[next.segment], next.k);
#if __CUDA_ARCH__ >= 900
        if (more) {
            if (from.fresh) wait_for_previous_kernel();
            barrier_wait(emptied, parity);
            const u32 full = shared_address(&ring.full[to.index]), slot = shared_address(slots + to.index * SLOT_BYTES);
            ring.tokens[to.index] = from.tokens;
            barrier_arrive_expect(full, from.bytes());
            from.each_piece(
                a, [&](int offset, i64 address, int bytes) { copy_bulk(slot + offset, address, bytes, full, policy); });
        }
#else
        for (int w = 0; w < WARPS; ++w) {
            if (!__shfl_sync(ALL_LANES, more, w)) continue;
            const int at_w = __shfl_sync(ALL_LANES, int(to.index), w);
            const u32 slot = shared_address(slots + at_w * SLOT_BYTES), full = shared_address(&ring.full[at_w]);
            barrier_wait(shared_address(&ring.empty[at_w]), __shfl_sync(ALL_LANES, int(parity), w));
            if (lane == w) {
                ring.tokens[at_w] = from.tokens;
                barrier_arrive(full);
            }
            Source theirs;
            theirs.address = __shfl_sync(ALL_LANES, from.address, w);
            theirs.chunk = __shfl_sync(ALL_LANES, from.chunk, w);
            theirs.raw_bytes = __shfl_sync(ALL_LANES, from.raw_bytes, w);
            theirs.to_values = __shfl_sync(ALL_LANES, from.to_values, w);
            theirs.first_piece = __shfl_sync(ALL_LANES, from.first_piece, w);
            theirs.num_pieces = __shfl_sync(ALL_LANES, from.num_pieces, w);
            theirs.each_piece(a, [&](int offset, i64 address, int bytes) {
                for (int at16 = lane * 16; at16 < bytes; at16 += 512)
                    copy_async_16(slot + offset + at16, address + at16);
            });
            copy_async_arrive(full);
        }
#endif
        at = next;
        more = another;
        from = ahead;
    }
}
