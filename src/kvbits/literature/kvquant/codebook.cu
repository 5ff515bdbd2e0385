// Attention of a few query columns over pages whose codes number levels (the formats of KVQuant): one persistent block
// per multiprocessor, balanced by bytes.
//
// As packed.cu; but keys and values of a page come and go apart, and a block shares tables of its head's levels. Raw
// pages are read where they lie.
#include "codebook_ring.cuh"
#include "codebook_walk.cuh"
#include "raw_walk.cuh"

/// Returns the block's next segment.
DEVICE int walk_codebook(const Args& a, const Part& part, Unit u, Ring& ring, unsigned char* slots, Merge& merge,
                         Tables& tables, int warp, int lane) {
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    stage_queries(staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    CodebookWalk walk(tables, reinterpret_cast<unsigned char*>(merge.rounds[warp]));
    static_assert(sizeof(merge.rounds[0]) >= COLS * WEIGHT_ROW * 2 && sizeof(merge.rounds[0]) >= SUMS_ROW * 16 &&
                      sizeof(merge.rounds[0]) >= sizeof(PageTables),
                  "a warp's scratch");
    walk.start(a, staged, u, part, warp, lane);
    const int num_columns = columns_of(a, u);
#pragma unroll 1
    for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
        const u32 chunk = s.chunks_before + k, index = chunk % SLOTS, filling = chunk / SLOTS & 1;
        unsigned char* slot = slots + index * SLOT_BYTES;
        barrier_wait(shared_address(&ring.full[index][0]), filling);
        const int2 tokens = ring.tokens[index];
        float scores[TOKENS][NT][2];
        walk.keys.page_scores(scores, num_columns, slot, tokens.x, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&ring.empty[index][0]));
        const bool all = tokens.y == CHUNK && tokens.x >= see.all_from && tokens.x + CHUNK - 1 <= see.all_to;
        barrier_wait(shared_address(&ring.full[index][1]), filling);
        walk.add(scores, !all, num_columns, a, see, softmax, slot, tokens.x, tokens.y, lane);
        if (V_OUTLIERS) shared_writes_before_copies();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&ring.empty[index][1]));
    }
    walk.values.sum_biases();
    const int thread = thread_again();
    return finish_segment<FOLD>(a, walk.values, softmax, V_HAS_BIAS ? walk.values.bias_sum : nullptr, D, merge,
                                thread / 32, thread % 32);
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1) attend(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // at the start of shared memory: look-ups need no address added
    constexpr int FIRST = (sizeof(Tables) + 127) / 128 * 128;
    Tables& tables = *reinterpret_cast<Tables*>(shared);
    if (threadIdx.x == 0) tables.head = -1;
    if (shared_address(shared) != SHARED_START) __trap();
    static_assert(FIRST + SLOTS * SLOT_BYTES + ring_bytes<Ring>() + sizeof(Merge) <= SHARED_BYTES,
                  "shape.py counts too little shared memory");
    unsigned char* slots = shared + FIRST;
    Ring& ring = *reinterpret_cast<Ring*>(slots + SLOTS * SLOT_BYTES);
    Merge& merge = *reinterpret_cast<Merge*>(slots + SLOTS * SLOT_BYTES + ring_bytes<Ring>());
    start_block(ring, merge);
    if (warp == WARPS) {
        produce(a, ring, slots, lane);
        return;
    }
    wait_for_previous_kernel();
    for (int i = blockIdx.x; i >= 0;) {
        const Segment s = a.segments[i];
        if (s.unit < 0) return;
        const Part& part = a.parts[s.part];
        const Unit u = enter_segment(a, s, merge, warp, lane);
        i = part.raw ? walk_raw_in_memory(a, u, merge, warp, lane)
                     : walk_codebook(a, part, u, ring, slots, merge, tables, warp, lane);
    }
}
