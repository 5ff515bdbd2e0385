// Attention of a few query columns over pages of packed or 16-bit tokens: one persistent block per multiprocessor, balanced by bytes.
//
// A block walks its segments (runs of chunks of one sequence, kv head and part). Chunk t of the block belongs to consumer warp t % WARPS, which reads
// it from slot t % SLOTS of a ring; one producer warp fills the ring with bulk copies, so memory stays busy across segment ends. Warps share
// nothing else until a segment ends, then merge through shared memory. Units split over several segments are summed by the block that arrives last.
#include "finish.cuh"
#include "raw.cuh"
#if HAS_LEVELS
#include "levels_walk.cuh"
#elif HAS_PACKED
#include "walk.cuh"
#endif

#if HAS_PACKED
// A warp must be the only reader of its slots: to wait for a slot's next filling, it has to have seen the one before (a barrier knows only odd and even).
static_assert(SLOTS % WARPS == 0, "a slot for each warp, or several");
static_assert(!HAS_LOW || SLOTS >= 2 * WARPS, "a chunk and its low plane are in the ring together");

#if !HAS_LEVELS
struct Ring {
    u64 full[SLOTS], empty[SLOTS];
    int2 tokens[SLOTS];          // position of the first, visible ones
#if HAS_LOW
    u32 next[WARPS];             // each warp's next chunk of the block, each low plane counting as one more
#endif
};
#endif

/// First chunk of a segment that belongs to a warp.
DEVICE int first_chunk_of(const Segment& s, int warp) { return (warp + WARPS - s.chunks_before % WARPS) % WARPS; }

/// One lane's place in its warp's chunks: lane w of the producer serves consumer warp w.
struct Cursor {
    int segment, k, chunk;       // k: chunk inside the segment, -1 before it is entered; chunk: of the block, each low plane counting as one more
    bool low;                    // the chunk's low plane comes next

    DEVICE Cursor next(const Args& a) const {
        if (HAS_LOW && !low && a.parts[a.segments[segment].part].low_head_bytes) return {segment, k, chunk + WARPS, true};
        return {segment, k + WARPS, chunk + WARPS, false};
    }

    /// Moves to the next packed chunk; false at the end.
    DEVICE bool settle(const Args& a, int warp) {
        while (segment >= 0) {
            const Segment& s = a.segments[segment];
            if (s.unit >= 0 && !a.parts[s.part].raw) {
                if (k < 0) {
                    prefetch_queries(a, unit_of(a, s.unit), warp);
#if HAS_LEVELS
                    prefetch_levels(a.parts[s.part], unit_of(a, s.unit).head, warp, WARPS);
#endif
                    k = first_chunk_of(s, warp);
                }
                if (k < s.num_chunks) return true;
            }
            k = -1;
            segment = s.next;
        }
        return false;
    }
    /// A load waits behind all that the ring has in flight, microseconds; so the queries of a segment are asked for while the one before it is read.
    static DEVICE void prefetch_queries(const Args& a, Unit u, int warp) {
        for (int col = warp; col < COLS; col += WARPS) {
            int index = u.block * COLS + col;
            if (index >= a.num_queries * a.group) break;
            const u16* q = static_cast<const u16*>(a.q) + q_offset(a, u, index);
            for (int ch = 0; ch < D; ch += 64) prefetch_l1(q + ch);
            if (col == 0) prefetch_l1(a.q_positions + u.batch * a.num_queries + index / a.group);
        }
    }
};

/// Where chunk k of a segment lies: address of its page's struct, chunk inside the page, its tokens.
struct Source {
    i64 address = 0, offset = 0;
    int2 all = {0, 0};           // the page's first position and visible tokens
    int chunk = 0;
    bool low = false;            // of low planes

    DEVICE Source() {}
    DEVICE Source(const Args& a, const Segment& s, int k, bool low) : low(HAS_LOW && low) {
        int at = s.first_chunk + k, entry = s.first_entry + at / CHUNKS_PER_PAGE;
        chunk = at % CHUNKS_PER_PAGE;
        const Part& part = a.parts[s.part];
        const i64* addresses = this->low ? a.low_address : a.page_address;
        const i64 head = s.unit / a.column_blocks % a.num_kv_heads;
        offset = this->low ? a.layer * part.low_layer_stride + head * part.low_head_bytes : a.layer * part.layer_stride + head * part.head_bytes;
        address = addresses[entry];
        all = a.page_tokens[entry];
        // Under load a miss waits behind all the ring's bytes, microseconds: the tables are fetched rounds ahead.
        int later = min(entry + 8 * WARPS / CHUNKS_PER_PAGE, s.first_entry + (s.first_chunk + s.num_chunks - 1) / CHUNKS_PER_PAGE);
        prefetch_l1(addresses + later);
        prefetch_l1(a.page_tokens + later);
    }
    DEVICE i64 page() const { return address + offset; }
    DEVICE int2 tokens() const { return {all.x + chunk * CHUNK, min(all.y - chunk * CHUNK, CHUNK)}; }
    DEVICE int bytes() const { return HAS_LOW && low ? LOW_BYTES : CHUNK_BYTES; }
    DEVICE int first_piece(const Args& a) const { return HAS_LOW && low ? a.num_pieces : 0; }
    DEVICE int last_piece(const Args& a) const { return HAS_LOW && low ? a.num_pieces + a.num_low_pieces : a.num_pieces; }
};

/// While the kernel ahead ends: page tables, which no kernel writes, and the first pages as far as L2, where a late write would still be seen.
/// All lanes take part, each with chunks of its own: one after the other, the table look-ups alone took 3 us.
DEVICE void prefetch_first_chunks(const Args& a, int lane) {
#if __CUDA_ARCH__ >= 900
    const Segment& s = a.segments[blockIdx.x];
    if (s.unit < 0 || a.parts[s.part].raw) return;
    for (int k = lane; k < min(s.num_chunks, PREFETCH_CHUNKS); k += 32) {
        for (int low = 0; low <= (HAS_LOW && a.parts[s.part].low_head_bytes != 0); ++low) {
            Source from(a, s, k, low);
            for (int p = from.first_piece(a); p < from.last_piece(a); ++p)
                prefetch_l2(from.page() + a.pieces[p].from + from.chunk * a.pieces[p].step, a.pieces[p].bytes);
        }
    }
#endif
}

#if HAS_LEVELS
#include "levels_ring.cuh"
#else
DEVICE void produce(const Args& a, Ring& ring, unsigned char* slots, int lane) {
    Cursor at = {int(blockIdx.x), -1, lane, false};
    bool more = lane < WARPS && at.settle(a, lane);
#if __CUDA_ARCH__ >= 900
    u64 policy = read_once_policy();
#endif
    Source from;
    if (more) from = Source(a, a.segments[at.segment], at.k, false);
    while (__any_sync(ALL_LANES, more)) {
        Cursor next = HAS_LOW && !more ? at : at.next(a);
        Source ahead;  // looked up now, needed after this round's waiting
        const bool another = more && next.settle(a, lane);
        if (another) ahead = Source(a, a.segments[next.segment], next.k, next.low);
        int place = at.chunk % SLOTS;
        u32 parity = (at.chunk / SLOTS & 1) ^ 1;
#if __CUDA_ARCH__ >= 900
        if (more) {
            u32 full = shared_address(&ring.full[place]), slot = shared_address(slots + place * SLOT_BYTES);
            barrier_wait(shared_address(&ring.empty[place]), parity);
            ring.tokens[place] = from.tokens();
            barrier_arrive_expect(full, from.bytes());
            for (int i = from.first_piece(a); i < from.last_piece(a); ++i) {
                Piece piece = a.pieces[i];
                copy_bulk(slot + piece.to, from.page() + piece.from + from.chunk * piece.step, piece.bytes, full, policy);
            }
        }
#else
        for (int w = 0; w < WARPS; ++w) {
            if (!__shfl_sync(ALL_LANES, more, w)) continue;
            int at_w = __shfl_sync(ALL_LANES, place, w), ch = __shfl_sync(ALL_LANES, from.chunk, w);
            i64 page = __shfl_sync(ALL_LANES, from.page(), w);
            const int first = __shfl_sync(ALL_LANES, from.first_piece(a), w), last = __shfl_sync(ALL_LANES, from.last_piece(a), w);
            barrier_wait(shared_address(&ring.empty[at_w]), __shfl_sync(ALL_LANES, parity, w));
            u32 slot = shared_address(slots + at_w * SLOT_BYTES), full = shared_address(&ring.full[at_w]);
            if (lane == w) {
                ring.tokens[at_w] = from.tokens();
                barrier_arrive(full);
            }
            for (int i = first; i < last; ++i) {
                Piece piece = a.pieces[i];
                for (int at16 = lane * 16; at16 < piece.bytes; at16 += 512) copy_async_16(slot + piece.to + at16, page + piece.from + ch * piece.step + at16);
            }
            copy_async_arrive(full);
        }
#endif
        at = next;
        more = another;
        from = ahead;
    }
}
#endif
#endif

/// This warp's next step over raw pages, as far as L2: loads of the step itself wait for the scores of the one before.
DEVICE void prefetch_raw(const Args& a, const Part& part, Unit u, const Segment& s, int k, int lane) {
#if __CUDA_ARCH__ >= 900
    if (k >= s.num_chunks) return;
    const int chunk = s.first_chunk + k, entry = s.first_entry + chunk / part.chunks_per_page, token = chunk % part.chunks_per_page * 32;
    const i64 page = a.page_address[entry] + a.layer * part.layer_stride + i64(u.head) * part.head_bytes + i64(token) * D * 2;
    const int tokens = min(a.page_tokens[entry].y - token, 32);
    if (lane < 2 && tokens > 0) prefetch_l2(page + (lane ? part.v_raw : part.k_raw), tokens * D * 2);
#endif
}

/// After a segment that joins the next: that one, once no warp looks at this one any more.
DEVICE void join_next(const Args& a, Merge& merge) {
    sync_threads(CONSUMERS);
    if (thread_again() == 0) merge.segment = a.segments[merge.segment.next];
    sync_threads(CONSUMERS);
}

/// Both walks read the parts of a unit that follow one another and return the block's next segment.
DEVICE int walk_raw(const Args& a, Unit u, Merge& merge, int warp, int lane) {
    const Segment& s = merge.segment;
    int g = lane / 4, c = lane % 4;
    stage_queries(merge.staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(merge.staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    RawWalk walk;
    walk.start(a, merge.staged, g, c);
    for (;; join_next(a, merge)) {
        const Part& part = a.parts[s.part];
        for (int k = warp; k < s.num_chunks; k += WARPS) {
            int chunk = s.first_chunk + k, entry = s.first_entry + chunk / part.chunks_per_page, token = chunk % part.chunks_per_page * 32;
            i64 page = a.page_address[entry] + a.layer * part.layer_stride + i64(u.head) * part.head_bytes;
            int2 tokens = a.page_tokens[entry];
            if (tokens.y <= token) continue;
            i64 offset = i64(token) * D * 2;
            if (RAW_ZONES) prefetch_raw(a, part, u, s, k + WARPS, lane);
            const LseRow lse = LseRow::of(a, u, entry, token / 32);
            walk.step(a, see, softmax, page + part.k_raw + offset, page + part.v_raw + offset, tokens.x + token, tokens.y - token, lse, g, c);
        }
        if (!RAW_ZONES || !s.joins) break;
    }
    return finish_segment(a, walk, softmax, nullptr, D, merge, warp, lane);
}

#if HAS_LEVELS
DEVICE int walk_levels(const Args& a, const Part& part, Unit u, Ring& ring, unsigned char* slots, Merge& merge, Levels& levels, int warp, int lane) {
    const Segment& s = merge.segment;
    stage_queries(merge.staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(merge.staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    LevelsWalk walk(levels, reinterpret_cast<unsigned char*>(merge.rounds[warp]));
    static_assert(sizeof(merge.rounds[0]) >= COLS * WEIGHT_ROW * 2 && sizeof(merge.rounds[0]) >= SUMS_ROW * 16 && sizeof(merge.rounds[0]) >= sizeof(PageLevels), "a warp's scratch");
    walk.start(a, merge.staged, u, part, warp, lane);
    const int num_columns = columns_of(a, u);
#pragma unroll 1
    for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
        const u32 chunk = s.chunks_before + k, place = chunk % SLOTS, parity = chunk / SLOTS & 1;
        unsigned char* slot = slots + place * SLOT_BYTES;
        barrier_wait(shared_address(&ring.full[place][0]), parity);
        const int2 tokens = ring.tokens[place];
        float scores[TOKENS][NT][2];
        walk.keys(scores, num_columns, slot, tokens.x, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&ring.empty[place][0]));
        const bool all = tokens.y == CHUNK && tokens.x >= see.all_from && tokens.x + CHUNK - 1 <= see.all_to;
        barrier_wait(shared_address(&ring.full[place][1]), parity);
        walk.values(scores, !all, num_columns, a, see, softmax, slot, tokens.x, tokens.y, lane);
        if (V_OUTLIERS) shared_writes_before_copies();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&ring.empty[place][1]));
    }
    walk.sum_biases();
    const int thread = thread_again();
    return finish_segment<FOLD>(a, walk, softmax, V_HAS_BIAS ? walk.bias_sum : nullptr, D, merge, thread / 32, thread % 32);
}
#elif HAS_PACKED
/// One chunk of a warp's from the ring, and its low plane from the slot after that.
struct Place {
    u32 slot, turn;              // of the ring; which filling of that slot

    DEVICE explicit Place(u32 chunk) : slot(chunk % SLOTS), turn(chunk / SLOTS & 1) {}
    DEVICE void wait(Ring& ring) const { barrier_wait(shared_address(&ring.full[slot]), turn); }
    DEVICE void give_back(Ring& ring) const { barrier_arrive(shared_address(&ring.empty[slot])); }
};

template <bool LOW>
DEVICE void walk_chunk(const Args& a, Unit u, PackedWalk& walk, const Visible& see, Softmax& softmax, Ring& ring, const unsigned char* slots, int k, u32 chunk, int lane) {
    const Place place(chunk), fine(chunk + WARPS);
    place.wait(ring);
    if (LOW) fine.wait(ring);
    const int2 tokens = ring.tokens[place.slot];
    const unsigned char *slot = slots + place.slot * SLOT_BYTES, *low = slots + fine.slot * SLOT_BYTES;
    const LseRow lse = PAGE_LSE ? LseRow::of(a, u, k / CHUNKS_PER_PAGE, k % CHUNKS_PER_PAGE * (CHUNK / (32 * UNITS))) : LseRow();
    if (tokens.y == CHUNK && tokens.x >= see.all_from && tokens.x + CHUNK - 1 <= see.all_to) walk.chunk<false, LOW>(a, see, softmax, slot, low, tokens.x, tokens.y, lse, lane);
    else if (tokens.y > 0) walk.chunk<true, LOW>(a, see, softmax, slot, low, tokens.x, tokens.y, lse, lane);
    __syncwarp();
    if (lane == 0) place.give_back(ring);
    if (LOW && lane == 0) fine.give_back(ring);
}

DEVICE int walk_packed(const Args& a, const Part& part, Unit u, Ring& ring, unsigned char* slots, Merge& merge, int warp, int lane) {
    const Segment& s = merge.segment;
    stage_queries(merge.staged, a, u, part.k_scale ? part.k_scale + i64(u.head) * D : nullptr, warp * 32 + lane);
    const Visible see(merge.staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    PackedWalk walk;
    walk.start(a, merge.staged, u, part, lane / 4, lane % 4);
    for (;; join_next(a, merge)) {
#pragma unroll 1
        for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
            const int of_page = s.first_entry * CHUNKS_PER_PAGE + s.first_chunk + k;
#if HAS_LOW
            const u32 chunk = ring.next[warp];
            const bool low = a.parts[s.part].low_head_bytes != 0;
            if (low) walk_chunk<true>(a, u, walk, see, softmax, ring, slots, of_page, chunk, lane);
            else walk_chunk<false>(a, u, walk, see, softmax, ring, slots, of_page, chunk, lane);
            if (lane == 0) ring.next[warp] = chunk + (low ? 2 * WARPS : WARPS);
            __syncwarp();
#else
            walk_chunk<false>(a, u, walk, see, softmax, ring, slots, of_page, s.chunks_before + k, lane);
#endif
        }
        if (!RAW_ZONES || !s.joins) break;
    }
    constexpr bool has_bias_sum = V_HAS_BIAS && V_SCALE == SCALE_GROUP;
    return finish_segment(a, walk, softmax, has_bias_sum ? walk.bias_sum : nullptr, V_GROUP, merge, warp, lane);
}
#endif

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1) attend(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if HAS_PACKED
#if HAS_LEVELS
    constexpr int FIRST = (sizeof(Levels) + 127) / 128 * 128;  // at the start of shared memory: look-ups need no address added
    Levels& levels = *reinterpret_cast<Levels*>(shared);
    if (threadIdx.x == 0) levels.head = -1;
    if (shared_address(shared) != SHARED_START) __trap();
#else
    constexpr int FIRST = 0;
#endif
    static_assert(FIRST + SLOTS * SLOT_BYTES + (sizeof(Ring) + 15) / 16 * 16 + sizeof(Merge) <= SHARED_BYTES, "cuda.py counts too little shared memory");
    unsigned char* slots = shared + FIRST;
    Ring& ring = *reinterpret_cast<Ring*>(slots + SLOTS * SLOT_BYTES);
    Merge& merge = *reinterpret_cast<Merge*>(slots + SLOTS * SLOT_BYTES + (sizeof(Ring) + 15) / 16 * 16);
#if HAS_LOW
    if (threadIdx.x < WARPS) ring.next[threadIdx.x] = threadIdx.x;
#endif
    if (threadIdx.x < sizeof(ring.full) / sizeof(u64)) {
        // A bulk copy arrives once, for its lane; asynchronous copies arrive once per lane, and the lane that wrote `tokens` once more.
        barrier_init(shared_address(ring.full) + 8 * threadIdx.x, __CUDA_ARCH__ >= 900 ? 1 : 33);
        barrier_init(shared_address(ring.empty) + 8 * threadIdx.x, 1);
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async;" ::: "memory");
#endif
    }
    __syncthreads();
    let_next_kernel_start();
    if (warp == WARPS) {
        prefetch_first_chunks(a, lane);
        wait_for_previous_kernel();
        produce(a, ring, slots, lane);
        return;
    }
#else
    static_assert(sizeof(Merge) <= SHARED_BYTES, "cuda.py counts too little shared memory");
    Merge& merge = *reinterpret_cast<Merge*>(shared);
    if (warp == WARPS) return;
#endif
    wait_for_previous_kernel();
    for (int i = blockIdx.x; i >= 0;) {
        const Segment s = a.segments[i];
        if (s.unit < 0) return;
        if (s.next >= 0) prefetch_l1(a.segments + s.next);
        const Part& part = a.parts[s.part];
        Unit u = unit_of(a, s.unit);
        if (threadIdx.x == 0) merge.segment = s, merge.unit = u;  // staging the queries makes it visible
#if HAS_LEVELS
        i = part.raw ? walk_raw(a, u, merge, warp, lane) : walk_levels(a, part, u, ring, slots, merge, levels, warp, lane);
#elif HAS_PACKED
        i = part.raw ? walk_raw(a, u, merge, warp, lane) : walk_packed(a, part, u, ring, slots, merge, warp, lane);
#else
        i = walk_raw(a, u, merge, warp, lane);
#endif
    }
}
