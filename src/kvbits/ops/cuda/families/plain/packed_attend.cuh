// Attention of a few query columns over pages of packed tokens, 16-bit tokens among them: one persistent block per
// multiprocessor, balanced by bytes. The kernel that includes this chooses the walk.
//
// A block walks its segments (runs of chunks of one sequence, kv head and part). Chunk t of the block belongs to
// consumer warp t % WARPS, which reads it from slot t % SLOTS of a ring; one producer warp fills the ring with bulk
// copies, so memory stays busy across segment ends. Warps share nothing else until a segment ends, then merge through
// shared memory. Units split over several segments are summed by the block that arrives last.
#ifndef PACKED_ATTEND_CUH
#define PACKED_ATTEND_CUH
#include "packed_raw.cuh"
#include "packed_ring.cuh"

template <class Walk>
DEVICE void read_chunk(const Args& a, Unit u, Walk& walk, const Visible& see, Softmax& softmax, Ring& ring,
                       const unsigned char* slots, int k, u32 number, int lane) {
    const RingSlot slot(number);
    slot.wait(ring);
    const int2 tokens = ring.tokens[slot.index];
    const Chunk chunk = {slots + slot.index * SLOT_BYTES, tokens.x, tokens.y, tokens.x - k % CHUNKS_PER_PAGE * CHUNK};
    const bool all = tokens.y == CHUNK && tokens.x >= see.all_from && tokens.x + CHUNK - 1 <= see.all_to;
    if (all) walk.template add<false>(a, see, softmax, chunk, lane);
    else if (tokens.y > 0) walk.template add<true>(a, see, softmax, chunk, lane);
    __syncwarp();
    if (lane == 0) slot.give_back(ring);
}

constexpr int ALL_FORMATS = -1;
/// Reads the packed parts of a unit that follow one another: of one format, or all of a kernel that has but one.
template <int FORMAT_READ, class Walk>
DEVICE void read_parts(const Args& a, Unit u, const Segment& s, Walk& walk, const Visible& see, Softmax& softmax,
                       Ring& ring, const unsigned char* slots, Merge& merge, typename Walk::Keys::Shared& made,
                       int warp, int lane) {
    constexpr bool ALL = FORMAT_READ == ALL_FORMATS;
    const auto reads = [](const Part& part) {
        return ALL ? !ValueTraits::RAW_JOINS || !part.raw : !part.raw && part.format == FORMAT_READ;
    };
    for (; reads(a.parts[s.part]); join_next(a, merge, warp, lane)) {  // raw parts of a unit are its last
        walk.keys.enter(made, s, warp);
#pragma unroll 1
        for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
            const int of_page = s.first_entry * CHUNKS_PER_PAGE + s.first_chunk + k;
            read_chunk(a, u, walk, see, softmax, ring, slots, of_page, u32(s.chunks_before + k), lane);
        }
        walk.keys.leave(s, warp, lane);
        if ((ALL && !RAW_IN_RING) || !s.joins) break;
    }
}

/// After a unit's packed parts, of which `part` was the first: its raw ones, and the result. Returns the block's next
/// segment.
template <class Walk>
DEVICE int end_parts(const Args& a, const Part& part, Unit u, const Segment& s, Walk& walk, const Staged& staged,
                     const Visible& see, Softmax& softmax, Ring& ring, const unsigned char* slots, Merge& merge,
                     int warp, int lane) {
    constexpr bool RAW_JOINS = ValueTraits::RAW_JOINS;
    if (V_TURNED && !part.raw) turn_back<Walk::FOLDS>(walk.values.first);
    if (!V_TURNED && Walk::FOLDS) fold(walk.values.first);
    for (int e = 0; e < 2 && Walk::FOLDS; ++e) softmax.sum[0][e] += __shfl_xor_sync(ALL_LANES, softmax.sum[0][e], 2);
    if (RAW_JOINS && a.parts[s.part].raw) join_raw(a, u, s, walk, staged, see, softmax, ring, slots, merge, warp, lane);
    constexpr bool may_leave = OWN_START && LEAVES_ALL<ValueSide>;
    const auto* bias_sum = ValueTraits::BIAS_SUMS ? walk.values.bias_sum : nullptr;
    const int thread = thread_again();
    if (may_leave && s.slot < 0 && s.next >= 0)
        return leave_segment(a, walk.values, softmax, bias_sum, V_GROUP, merge, thread / 32, thread % 32);
    return finish_segment(a, walk.values, softmax, bias_sum, V_GROUP, merge, thread / 32, thread % 32);
}

/// Reads the parts of a unit that follow one another. Returns the block's next segment.
template <class Walk>
DEVICE int walk_packed(const Args& a, const Part& part, Unit u, Ring& ring, unsigned char* slots, Merge& merge,
                       typename Walk::Keys::Shared& made, int warp, int lane) {
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    stage_queries(staged, a, u, part.k_scale ? part.k_scale + i64(u.head) * D : nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    Walk walk;
    walk.start(a, staged, u, part, lane / 4, lane % 4);
    read_parts<ALL_FORMATS>(a, u, s, walk, see, softmax, ring, slots, merge, made, warp, lane);
    return end_parts(a, part, u, s, walk, staged, see, softmax, ring, slots, merge, warp, lane);
}

/// What a block does: all of its threads call it. make(made, maker, lane): what MAKING warps do beside the consumers and
/// the producer; walk(part, unit, ring, merge, made, warp, lane): see walk_packed.
template <class Made, int MAKING, class Make, class WalkParts>
DEVICE void attend_parts(const Args& a, unsigned char* shared, Make make, WalkParts walk) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    static_assert(
        SLOTS * SLOT_BYTES + ring_bytes<Ring>() + sizeof(Merge) + (MAKING ? sizeof(Made) : 0) <= SHARED_BYTES,
        "shape.py counts too little shared memory");
    Ring& ring = *reinterpret_cast<Ring*>(shared + SLOTS * SLOT_BYTES);
    Merge& merge = *reinterpret_cast<Merge*>(shared + SLOTS * SLOT_BYTES + ring_bytes<Ring>());
    Made& made = *reinterpret_cast<Made*>(&merge + 1);
    made.set_up();
    start_block(ring, merge);
    if (warp == WARPS) {
        produce(a, ring, shared, lane);
        return;
    }
    if (warp > WARPS) {
        make(made, warp - WARPS - 1, lane);
        return;
    }
    wait_for_previous_kernel();
    for (int i = blockIdx.x; i >= 0;) {
        const Segment s = a.segments[i];
        if (s.unit < 0) return;
        const Part& part = a.parts[s.part];
        const Unit u = enter_segment(a, s, merge, warp, lane);
        i = part.raw && !ValueTraits::RAW_JOINS ? walk_raw(a, u, ring, shared, merge, warp, lane)
                                                : walk(part, u, ring, merge, made, warp, lane);
    }
}

/// The same where all packed parts have one format.
template <class Walk>
DEVICE void attend_packed(const Args& a, unsigned char* shared) {
    using KeySide = typename Walk::Keys;
    using Made = typename KeySide::Shared;
    attend_parts<Made, KeySide::MAKING>(
        a, shared, [&](Made& made, int maker, int lane) { KeySide::make(a, made, maker, lane); },
        [&](const Part& part, Unit u, Ring& ring, Merge& merge, Made& made, int warp, int lane) {
            return walk_packed<Walk>(a, part, u, ring, shared, merge, made, warp, lane);
        });
}
#endif
