// The ring that a block's pages come through: which chunks a producer's lane fetches, in which order, and where they
// lie. The ring's slots and barriers, and produce(), are of the family.
//
// The producer fills the ring before the kernel just ahead has ended. That kernel may have written tokens: they are in
// the last two pages of a sequence and part (`fresh`; eight tokens and a page that closed at most), which are read
// after the wait, as queries are. Everything else it reads must have been there before: page tables, work lists and
// older pages come from kernels further ahead, which have ended: only attention, which writes no pages, and a decode
// step's closing, which writes those two (step.cuh), let their successor start early. The first launch after a work
// list was written starts in order (`Kernel.launch`), so of kernels that may still run none has written this layer's
// pages but the one just ahead.
#pragma once
#include "segments.cuh"

// A warp must be the only reader of its slots: to wait for a slot's next filling, it has to have seen the one before (a
// barrier knows only odd and even).
static_assert(SLOTS % WARPS == 0, "a slot for each warp, or several");

constexpr bool RAW_IN_RING = HAS_RAW;    // raw tokens come through the ring, in chunks of RAW_TOKENS, and parts join

/// Whether a part's pages come through the ring; consumers read others where they lie.
DEVICE bool comes_through_ring(const Part& part) { return RAW_IN_RING || !part.raw; }

/// One lane's place in its warp's chunks: lane w of the producer serves consumer warp w.
struct Cursor {
    int segment, k, chunk;       // k: chunk inside the segment, -1 before it is entered; chunk: of the block

    DEVICE Cursor next() const { return {segment, k + WARPS, chunk + WARPS}; }

    /// Moves to the next chunk that comes through the ring; false at the end. `enter(part, unit)` is called where a
    /// segment begins.
    template <class Enter>
    DEVICE bool settle(const Args& a, int warp, Enter enter) {
        while (segment >= 0) {
            const Segment& s = a.segments[segment];
            if (s.unit >= 0 && comes_through_ring(a.parts[s.part])) {
                if (k < 0) {
                    if (segment != int(blockIdx.x)) {  // of the first one the consumers ask themselves
                        wait_for_previous_kernel();    // which may write them
                        prefetch_queries(a, unit_of(a, s.unit), warp);
                    }
                    enter(a.parts[s.part], unit_of(a, s.unit));
                    k = first_chunk_of(s, warp);
                }
                if (k < s.num_chunks) return true;
            }
            k = -1;
            segment = s.next;
        }
        return false;
    }
    /// A load waits behind all that the ring has in flight, microseconds; so the queries of a segment are asked for
    /// while the one before it is read.
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

/// Where chunk k of a segment lies.
struct Source {
    i64 address = 0;             // of its page's struct; of the first row of raw tokens
    int2 tokens = {0, 0};        // position of the first, visible ones
    int chunk = 0;               // inside the page
    bool fresh = false;          // the kernel just ahead may have written it
    int raw_bytes = -1;          // of rows of raw tokens, -1 if packed
    int to_values = 0;           // from a raw token's key to its value
    int packed_bytes = 0, first_piece = 0, num_pieces = 0;

    DEVICE Source() {}
    DEVICE Source(const Args& a, const Segment& s, int k) {
        const Part& part = a.parts[s.part];
        const bool raw = RAW_IN_RING && part.raw;
        const int chunks_per_page = part.chunks_per_page, size = raw ? RAW_TOKENS : part.chunk;
        const int at = s.first_chunk + k, entry = s.first_entry + at / chunks_per_page;
        chunk = at % chunks_per_page;
        packed_bytes = part.chunk_bytes, first_piece = part.first_piece, num_pieces = part.num_pieces;
        const Page page(a, s, entry);
        address = page.address;
        const int2 all = page.tokens;
        fresh = entry >= s.last_entry - 1;
        tokens = {all.x + chunk * size, min(all.y - chunk * size, size)};
        if (raw) {
            address += part.k_raw + i64(chunk) * (RAW_TOKENS * D * 2);
            raw_bytes = max(tokens.y, 0) * (D * 2);
            to_values = part.v_raw - part.k_raw + (D == DV ? 0 : chunk * (RAW_TOKENS * (DV - D) * 2));
        }
        const int later = min(entry + 8 * WARPS / chunks_per_page,
                              s.first_entry + (s.first_chunk + s.num_chunks - 1) / chunks_per_page);
        Page::prefetch_tables(part.pages, s, later);
    }
    /// Of the values that share a slot with their keys.
    DEVICE int value_bytes() const { return D == DV ? raw_bytes : raw_bytes / D * DV; }
    DEVICE int bytes() const {
        return RAW_IN_RING && raw_bytes >= 0 ? D == DV ? raw_bytes * 2 : raw_bytes + value_bytes() : packed_bytes;
    }

    /// f(where in the slot, address, bytes) for every contiguous run.
    template <class F>
    DEVICE void each_piece(const Args& a, F f) const {
        if (RAW_IN_RING && raw_bytes >= 0) {
            if (raw_bytes) f(0, address, raw_bytes);
            if (raw_bytes) f(RAW_TOKENS * D * 2, address + to_values, value_bytes());
            return;
        }
        auto piece = [&](const Piece& p) { f(p.to, address + p.from + chunk * p.step, p.bytes); };
        piece(a.pieces[first_piece]);  // most chunks are one
#pragma unroll 1
        for (int i = 1; i < num_pieces; ++i) piece(a.pieces[first_piece + i]);
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
    for (; k < min(s.num_chunks, end); k += step) Source(a, s, k).prefetch(a);
}
#endif

/// While the kernel ahead ends: pages that the ring has no room for, as far as L2. All lanes take part, each with
/// chunks of its own.
DEVICE void prefetch_after_ring(const Args& a, int lane) {
#if __CUDA_ARCH__ >= 900
    const Segment& s = a.segments[blockIdx.x];
    if (s.unit >= 0 && comes_through_ring(a.parts[s.part]))
        prefetch_chunks(a, s, SLOTS + lane, SLOTS + PREFETCH_CHUNKS, 32);
#endif
}

/// Bytes of a ring in shared memory, where it stands between its slots and what warps merge in.
template <class Ring>
constexpr int ring_bytes() { return (sizeof(Ring) + 15) / 16 * 16; }

/// What a block sets up before its warps part; all threads call it.
template <class Ring>
DEVICE void start_block(Ring& ring, Merge& merge) {
    if (threadIdx.x < WARPS) merge.segments_left[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        merge.left = 0;
        barrier_init(merge.all_left_barrier(), WARPS);
        barrier_init(merge.merged_barrier(), MERGERS);
    }
    if (threadIdx.x < sizeof(ring.full) / sizeof(u64)) {
        // A bulk copy arrives once, for its lane; asynchronous copies arrive once per lane, and the lane that wrote
        // `tokens` once more.
        barrier_init(shared_address(ring.full) + 8 * threadIdx.x, __CUDA_ARCH__ >= 900 ? 1 : 33);
        barrier_init(shared_address(ring.empty) + 8 * threadIdx.x, 1);
        barriers_before_copies();
    }
    __syncthreads();
    let_next_kernel_start();
}
