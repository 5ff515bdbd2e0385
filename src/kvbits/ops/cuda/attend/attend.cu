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
    u32 next[WARPS];             // each warp's next chunk of the block, one of two slots counting as two
#endif
};
#endif

/// First chunk of a segment that belongs to a warp.
DEVICE int first_chunk_of(const Segment& s, int warp) { return (warp + WARPS - s.chunks_before % WARPS) % WARPS; }

/// One lane's place in its warp's chunks: lane w of the producer serves consumer warp w.
struct Cursor {
    int segment, k, chunk;       // k: chunk inside the segment, -1 before it is entered; chunk: of the block, a chunk of two slots counting as two
    bool second;                 // the chunk's second slot comes next: its low plane, or the values of raw tokens

    DEVICE Cursor next(const Args& a) const {
        if (HAS_LOW && !second && has_second(a.parts[a.segments[segment].part])) return {segment, k, chunk + WARPS, true};
        return {segment, k + WARPS, chunk + WARPS, false};
    }
    static DEVICE bool has_second(const Part& part) { return part.low_head_bytes || part.raw; }

    /// Moves to the next packed chunk; false at the end.
    DEVICE bool settle(const Args& a, int warp) {
        while (segment >= 0) {
            const Segment& s = a.segments[segment];
            if (s.unit >= 0 && (RAW_ZONES || !a.parts[s.part].raw)) {
                if (k < 0) {
                    if (segment != int(blockIdx.x)) {  // of the first one the consumers ask themselves
                        wait_for_previous_kernel();    // which may write them
                        prefetch_queries(a, unit_of(a, s.unit), warp);
                    }
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

/// Where chunk k of a segment lies, or the part of it that one slot takes.
struct Source {
    i64 address = 0;             // of its page's struct; of the first row of raw tokens
    int2 tokens = {0, 0};        // position of the first, visible ones
    int chunk = 0;               // inside the page
    bool low = false;            // of low planes
    bool fresh = false;          // the kernel just ahead may have written it
    int raw_bytes = -1;          // of rows of raw tokens, -1 if packed
    int to_values = 0;           // from a raw token's key to its value

    DEVICE Source() {}
    DEVICE Source(const Args& a, const Segment& s, int k, bool second) {
        const Part& part = a.parts[s.part];
        const bool raw = RAW_ZONES && part.raw;
        const int chunks_per_page = raw ? part.chunks_per_page : CHUNKS_PER_PAGE, size = raw ? RAW_TOKENS : CHUNK;
        const int at = s.first_chunk + k, entry = s.first_entry + at / chunks_per_page;
        chunk = at % chunks_per_page;
        low = HAS_LOW && second && !raw;
        const Page page(a, s, entry, low);
        address = page.address;
        const int2 all = page.tokens;
        fresh = entry >= s.last_entry - 1;
        tokens = {all.x + chunk * size, min(all.y - chunk * size, size)};
        if (raw) {
            address += (second ? part.v_raw : part.k_raw) + i64(chunk) * (RAW_TOKENS * D * 2);
            raw_bytes = max(tokens.y, 0) * (D * 2);
            to_values = part.v_raw - part.k_raw;
        }
        const int later = min(entry + 8 * WARPS / chunks_per_page, s.first_entry + (s.first_chunk + s.num_chunks - 1) / chunks_per_page);
        Page::prefetch_tables(a, part, later, low);
    }
    DEVICE int bytes() const { return RAW_ZONES && raw_bytes >= 0 ? raw_bytes * (2 / RAW_SLOTS) : HAS_LOW && low ? LOW_BYTES : CHUNK_BYTES; }

    /// f(where in the slot, address, bytes) for every contiguous run.
    template <class F>
    DEVICE void each_piece(const Args& a, F f) const {
        if (RAW_ZONES && raw_bytes >= 0) {
            if (raw_bytes) f(0, address, raw_bytes);
            if (raw_bytes && RAW_SLOTS == 1) f(RAW_TOKENS * D * 2, address + to_values, raw_bytes);
            return;
        }
        auto piece = [&](const Piece& p) { f(p.to, address + p.from + chunk * p.step, p.bytes); };
        const int first = HAS_LOW && low ? a.num_pieces : 0, count = HAS_LOW && low ? a.num_low_pieces : a.num_pieces;
        piece(a.pieces[first]);  // most chunks are one
#pragma unroll 1
        for (int i = first + 1; i < first + count; ++i) piece(a.pieces[i]);
    }
#if __CUDA_ARCH__ >= 900
    DEVICE void prefetch(const Args& a) const {
        each_piece(a, [](int, i64 from, int bytes) { prefetch_l2(from, bytes); });
    }
#endif
};

#if __CUDA_ARCH__ >= 900
/// As far as L2: every chunk of a segment from `k` on, `step` apart, up to `end`.
DEVICE void prefetch_chunks(const Args& a, const Segment& s, int k, int end, int step) {
    for (; k < min(s.num_chunks, end); k += step)
        for (int second = 0; second <= int(HAS_LOW && Cursor::has_second(a.parts[s.part])); ++second) Source(a, s, k, second).prefetch(a);
}
#endif

/// While the kernel ahead ends: pages that the ring has no room for, as far as L2. All lanes take part, each with chunks of its own.
DEVICE void prefetch_after_ring(const Args& a, int lane) {
#if __CUDA_ARCH__ >= 900
    const Segment& s = a.segments[blockIdx.x];
    constexpr int IN_RING = SLOTS / (HAS_LOW ? 2 : 1);
    if (s.unit >= 0 && (RAW_ZONES || !a.parts[s.part].raw)) prefetch_chunks(a, s, IN_RING + lane, IN_RING + PREFETCH_CHUNKS, 32);
#endif
}

// The producer fills the ring before the kernel just ahead has ended. That kernel may have written tokens: they are in the last two pages of a sequence and
// part (`fresh`; eight tokens and a page that closed at most), which are read after the wait, as queries are. Everything else it reads must have been
// there before: page tables, work lists and older pages come from kernels further ahead, which have ended because only attention lets its
// successor start early. The first launch after a work list was written starts in order (`Kernel.launch`).
#if HAS_LEVELS
#include "levels_ring.cuh"
#else
/// Lane w of the producer warp fills the slots of consumer warp w, all lanes once they all can: look-ups and copies of a round go together.
DEVICE void produce(const Args& a, Ring& ring, unsigned char* slots, int lane) {
    Cursor at = {int(blockIdx.x), -1, lane, false};
    bool more = lane < WARPS && at.settle(a, lane);
#if __CUDA_ARCH__ >= 900
    const u64 policy = read_once_policy();
#endif
    Source from;
    if (more) from = Source(a, a.segments[at.segment], at.k, false);
    Cursor next = at;
    Source ahead;
    bool another = false, looked = false;
    for (int round = 0; __any_sync(ALL_LANES, more); ++round) {
        if (round == SLOTS / WARPS) prefetch_after_ring(a, lane);
        const u32 place = u32(at.chunk) % SLOTS, parity = (u32(at.chunk) / SLOTS & 1) ^ 1;
        if (!looked) {  // ahead of this round's waiting
            next = more ? at.next(a) : at;
            another = more && next.settle(a, lane);
            if (another) ahead = Source(a, a.segments[next.segment], next.k, next.second);
        }
        // Chunks of one slot and of two: a lane comes to be rounds ahead of another, whose warp its own may wait for. So none waits for a slot here.
        const bool ready = more && (!HAS_LOW || barrier_test(shared_address(&ring.empty[place]), parity));
        looked = HAS_LOW && !ready;
        if (HAS_LOW && !__any_sync(ALL_LANES, ready)) pause();
#if __CUDA_ARCH__ >= 900
        if (ready) {
            if (from.fresh) wait_for_previous_kernel();
            if (!HAS_LOW) barrier_wait(shared_address(&ring.empty[place]), parity);
            const u32 full = shared_address(&ring.full[place]), slot = shared_address(slots + place * SLOT_BYTES);
            ring.tokens[place] = from.tokens;
            barrier_arrive_expect(full, from.bytes());
            from.each_piece(a, [&](int to, i64 address, int bytes) { copy_bulk(slot + to, address, bytes, full, policy); });
        }
#else
        for (int w = 0; w < WARPS; ++w) {
            if (!__shfl_sync(ALL_LANES, ready, w)) continue;
            const int at_w = __shfl_sync(ALL_LANES, int(place), w);
            const u32 slot = shared_address(slots + at_w * SLOT_BYTES), full = shared_address(&ring.full[at_w]);
            barrier_wait(shared_address(&ring.empty[at_w]), __shfl_sync(ALL_LANES, int(parity), w));
            if (lane == w) {
                ring.tokens[at_w] = from.tokens;
                barrier_arrive(full);
            }
            Source theirs;
            theirs.address = __shfl_sync(ALL_LANES, from.address, w);
            theirs.chunk = __shfl_sync(ALL_LANES, from.chunk, w);
            theirs.low = __shfl_sync(ALL_LANES, from.low, w);
            theirs.raw_bytes = __shfl_sync(ALL_LANES, from.raw_bytes, w);
            theirs.to_values = __shfl_sync(ALL_LANES, from.to_values, w);
            theirs.each_piece(a, [&](int to, i64 address, int bytes) {
                for (int at16 = lane * 16; at16 < bytes; at16 += 512) copy_async_16(slot + to + at16, address + at16);
            });
            copy_async_arrive(full);
        }
#endif
        if (looked) continue;
        at = next;
        more = another;
        from = ahead;
    }
}
#endif
#endif

#if HAS_PACKED && !HAS_LEVELS
/// Where in the ring a chunk of a warp's is.
struct Place {
    u32 slot, turn;              // of the ring; which filling of that slot

    DEVICE explicit Place(u32 chunk) : slot(chunk % SLOTS), turn(chunk / SLOTS & 1) {}
    DEVICE void wait(Ring& ring) const { barrier_wait(shared_address(&ring.full[slot]), turn); }
    DEVICE void give_back(Ring& ring) const { barrier_arrive(shared_address(&ring.empty[slot])); }
};
#endif

#if HAS_PACKED && !HAS_LEVELS
/// Which chunk of the block chunk k of a segment is, its warp's next one; one of two slots counts as two.
DEVICE u32 next_chunk(const Segment& s, const Ring& ring, int k, int warp) {
#if HAS_LOW
    return ring.next[warp];
#else
    return s.chunks_before + k;
#endif
}
#endif

/// After a segment that joins the next: that one, once no one looks at this one any more.
DEVICE void join_next(const Args& a, Merge& merge, int warp, int lane) {
    if (OWN_START) __syncwarp();
    else sync_threads(CONSUMERS);
    Segment& s = merge.segments[Merge::own(warp)];
    if (lane == 0 && (OWN_START || warp == 0)) s = a.segments[s.next];
    if (OWN_START) __syncwarp();
    else sync_threads(CONSUMERS);
}

#if HAS_PACKED && HAS_RAW
/// f(rows, position of the first, where log-sum-exps go) for each of a warp's chunks of raw tokens in the ring.
template <class F>
DEVICE void each_raw_chunk(const Args& a, Unit u, const Segment& s, Ring& ring, const unsigned char* slots, int warp, int lane, F f) {
    const int chunks_per_page = a.parts[s.part].chunks_per_page;
#pragma unroll 1
    for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
        const int at = s.first_chunk + k;
        const u32 chunk = next_chunk(s, ring, k, warp);
        const Place keys(chunk), values(chunk + (RAW_SLOTS - 1) * WARPS);
        keys.wait(ring);
        const int2 tokens = ring.tokens[keys.slot];
        const unsigned char* first_value = slots + values.slot * SLOT_BYTES + (RAW_SLOTS > 1 ? 0 : RAW_TOKENS * D * 2);
        RowsInRing rows = {slots + keys.slot * SLOT_BYTES, first_value, tokens.y, shared_address(&ring.empty[keys.slot]), shared_address(&ring.full[values.slot]), values.turn};
        f(rows, tokens.x, LseRow::of(a, u, s.first_entry + at / chunks_per_page, at % chunks_per_page));
        __syncwarp();
        if (lane == 0) {
            values.give_back(ring);
#if HAS_LOW
            ring.next[warp] = chunk + RAW_SLOTS * WARPS;
#endif
        }
        __syncwarp();
    }
}
#endif

/// Both walks read the parts of a unit that follow one another and return the block's next segment.
#if HAS_PACKED
DEVICE int walk_raw(const Args& a, Unit u, Ring& ring, const unsigned char* slots, Merge& merge, int warp, int lane) {
#else
DEVICE int walk_raw(const Args& a, Unit u, Merge& merge, int warp, int lane) {
#endif
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    int g = lane / 4, c = lane % 4;
    stage_queries(staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    RawWalk walk;
    const QueryRows queries(a, staged, u, g);
    walk.start(a, queries, c);
#if HAS_PACKED && HAS_RAW
    for (;; join_next(a, merge, warp, lane)) {
        each_raw_chunk(a, u, s, ring, slots, warp, lane, [&](RowsInRing& rows, int position, const LseRow& lse) { walk.step(a, queries, see, softmax, rows, position, lse, g, c); });
        if (!s.joins) break;
    }
#else
    const Part& part = a.parts[s.part];
    for (int k = warp; k < s.num_chunks; k += WARPS) {
        int chunk = s.first_chunk + k, entry = s.first_entry + chunk / part.chunks_per_page, token = chunk % part.chunks_per_page * 32;
        const Page found(a, s, entry, false);
        const i64 page = found.address + i64(token) * D * 2;
        const int2 tokens = found.tokens;
        if (tokens.y <= token) continue;
        const LseRow lse = LseRow::of(a, u, entry, token / 32);
        walk.step(a, queries, see, softmax, RowsInMemory(page + part.k_raw, page + part.v_raw, tokens.y - token, g, c), tokens.x + token, lse, g, c);
    }
#endif
    return finish_segment(a, walk, softmax, nullptr, D, merge, warp, lane);
}

#if HAS_LEVELS
DEVICE int walk_levels(const Args& a, const Part& part, Unit u, Ring& ring, unsigned char* slots, Merge& merge, Levels& levels, int warp, int lane) {
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    stage_queries(staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    LevelsWalk walk(levels, reinterpret_cast<unsigned char*>(merge.rounds[warp]));
    static_assert(sizeof(merge.rounds[0]) >= COLS * WEIGHT_ROW * 2 && sizeof(merge.rounds[0]) >= SUMS_ROW * 16 && sizeof(merge.rounds[0]) >= sizeof(PageLevels), "a warp's scratch");
    walk.start(a, staged, u, part, warp, lane);
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

#if HAS_RAW
/// The raw parts that end a unit, added to the outputs of its packed ones. Here the walk's own queries are needed no more: raw ones get their registers.
DEVICE void join_raw(const Args& a, Unit u, const Segment& s, PackedWalk& walk, const Staged& staged, const Visible& see, Softmax& softmax, Ring& ring,
                     const unsigned char* slots, Merge& merge, int warp, int lane) {
    for (;; join_next(a, merge, warp, lane)) {
        if (first_chunk_of(s, warp) < s.num_chunks) {  // few tokens are a chunk of some of the warps
            const QueryRows queries(a, staged, u, lane / 4);
            RawWalk raw;
            raw.start(a, queries, lane % 4);
            walk.change_units(true);
            each_raw_chunk(a, u, s, ring, slots, warp, lane, [&](RowsInRing& rows, int position, const LseRow& lse) {
                u32 p[NT][4];
                raw.weights(p, a, queries, see, softmax, rows, position, lse, lane / 4, lane % 4, [&](const float (&scale)[NT][2]) { walk.rescale(scale); });
                walk.add_raw(p, rows, lane / 4, lane % 4);
            });
            walk.change_units(false);
        }
        if (!s.joins) break;
    }
}
#endif

DEVICE int walk_packed(const Args& a, const Part& part, Unit u, Ring& ring, unsigned char* slots, Merge& merge, int warp, int lane) {
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    stage_queries(staged, a, u, part.k_scale ? part.k_scale + i64(u.head) * D : nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    PackedWalk walk;
    walk.start(a, staged, u, part, lane / 4, lane % 4);
    for (; !RAW_JOINS || !a.parts[s.part].raw; join_next(a, merge, warp, lane)) {  // raw parts of a unit are its last
#pragma unroll 1
        for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
            const int of_page = s.first_entry * CHUNKS_PER_PAGE + s.first_chunk + k;
#if HAS_LOW
            const u32 chunk = next_chunk(s, ring, k, warp);
            const bool low = a.parts[s.part].low_head_bytes != 0;
            if (low) walk_chunk<true>(a, u, walk, see, softmax, ring, slots, of_page, chunk, lane);
            else walk_chunk<false>(a, u, walk, see, softmax, ring, slots, of_page, chunk, lane);
            if (lane == 0) ring.next[warp] = chunk + (low ? 2 * WARPS : WARPS);
            __syncwarp();
#else
            walk_chunk<false>(a, u, walk, see, softmax, ring, slots, of_page, next_chunk(s, ring, k, warp), lane);
#endif
        }
        if (!RAW_ZONES || !s.joins) break;
    }
#if HAS_RAW
    if (RAW_JOINS && a.parts[s.part].raw) join_raw(a, u, s, walk, staged, see, softmax, ring, slots, merge, warp, lane);
#endif
    constexpr bool has_bias_sum = V_HAS_BIAS && V_SCALE == SCALE_GROUP;
    constexpr bool may_leave = OWN_START && ROUNDS_AT_ONCE >= PackedWalk::ROUNDS && PackedWalk::ROUNDS == PackedWalk::FIRST_PLANE_ROUNDS;
    const int thread = thread_again();
    if (may_leave && s.slot < 0 && s.next >= 0) return leave_segment(a, walk, softmax, has_bias_sum ? walk.bias_sum : nullptr, V_GROUP, merge, thread / 32, thread % 32);
    return finish_segment(a, walk, softmax, has_bias_sum ? walk.bias_sum : nullptr, V_GROUP, merge, thread / 32, thread % 32);
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
    if (threadIdx.x < WARPS) merge.segments_left[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        merge.left = 0;
        barrier_init(merge.merged_barrier(), 1);
    }
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
        if (OWN_START ? lane == 0 : threadIdx.x == 0) merge.segments[Merge::own(warp)] = s, merge.units[Merge::own(warp)] = u;  // staging the queries makes it visible
#if HAS_LEVELS
        i = part.raw ? walk_raw(a, u, ring, slots, merge, warp, lane) : walk_levels(a, part, u, ring, slots, merge, levels, warp, lane);
#elif HAS_PACKED
        i = part.raw && !RAW_JOINS ? walk_raw(a, u, ring, slots, merge, warp, lane) : walk_packed(a, part, u, ring, slots, merge, warp, lane);
#else
        i = walk_raw(a, u, merge, warp, lane);
#endif
    }
}
