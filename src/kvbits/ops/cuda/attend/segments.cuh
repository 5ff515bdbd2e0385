// A block's walk from segment to segment: what raw.cu, packed.cu and codebook.cu begin and go on with.
#pragma once
#include "finish.cuh"

// Chunk t of a block is of stream t % STREAMS. There is a stream for each consumer warp, or one more: a quarter of the multiprocessor has a warp less than the
// others (STREAMS % 4 == 0), and its warps take the chunks of that stream in turns. One warp reads all that come to a slot.
constexpr int ADDED = STREAMS > WARPS ? STREAMS / 4 - 1 : 1;  // warps of that quarter: 3, 7, ..
static_assert(STREAMS == WARPS || (STREAMS == WARPS + 1 && STREAMS % 4 == 0 && ADDED > 0), "one stream more, and warps that take it");

/// First chunk of a segment that belongs to a stream.
DEVICE int first_chunk_of_stream(const Segment& s, int stream) { return (stream + STREAMS - s.chunks_before % STREAMS) % STREAMS; }
/// Whether a warp takes the added stream's chunk of a round of STREAMS.
DEVICE bool takes_added(int round, int warp) { return STREAMS > WARPS && warp % 4 == 3 && round % ADDED == warp / 4; }
/// First chunk of a segment that belongs to a warp, and the one after chunk k.
DEVICE int first_chunk_of(const Segment& s, int warp) {
    const int before = s.chunks_before, round = before / STREAMS;
    return warp < before % STREAMS && takes_added(round, warp) ? (round + 1) * STREAMS - 1 - before : first_chunk_of_stream(s, warp);
}
DEVICE int chunk_after(const Segment& s, int k, int warp) {
    if (STREAMS == WARPS) return k + WARPS;
    const int number = s.chunks_before + k, round = number / STREAMS, stream = number % STREAMS;
    return k + (stream == WARPS ? 1 + warp : takes_added(round, warp) ? WARPS - warp : STREAMS);
}

/// After a segment that joins the next: that one, once no one looks at this one any more.
DEVICE void join_next(const Args& a, Merge& merge, int warp, int lane) {
    if (OWN_START) __syncwarp();
    else sync_threads(CONSUMERS);
    Segment& s = merge.segments[Merge::own(warp)];
    if (lane == 0 && (OWN_START || warp == 0)) s = a.segments[s.next];
    if (OWN_START) __syncwarp();
    else sync_threads(CONSUMERS);
}

/// Where all consumer warps begin a segment: its unit. `stage_queries`, which comes next, makes what is written here visible.
DEVICE Unit enter_segment(const Args& a, const Segment& s, Merge& merge, int warp, int lane) {
    if (s.next >= 0) prefetch_l1(a.segments + s.next);
    const Unit u = unit_of(a, s.unit);
    if (OWN_START ? lane == 0 : threadIdx.x == 0) merge.segments[Merge::own(warp)] = s, merge.units[Merge::own(warp)] = u;
    return u;
}
