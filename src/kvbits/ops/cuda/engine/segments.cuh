// A block's walk from segment to segment: what every attention kernel begins and goes on with.
#pragma once
#include "finish.cuh"

/// First chunk of a segment that belongs to a warp.
DEVICE int first_chunk_of(const Segment& s, int warp) { return (warp + WARPS - s.chunks_before % WARPS) % WARPS; }

/// After a segment that joins the next: that one, once no one looks at this one any more.
DEVICE void join_next(const Args& a, Merge& merge, int warp, int lane) {
    if (OWN_START) __syncwarp();
    else sync_threads(CONSUMERS);
    Segment& s = merge.segments[Merge::own(warp)];
    if (lane == 0 && (OWN_START || warp == 0)) s = a.segments[s.next];
    if (OWN_START) __syncwarp();
    else sync_threads(CONSUMERS);
}

/// Where all consumer warps begin a segment: its unit. `stage_queries`, which comes next, makes what is written here
/// visible.
DEVICE Unit enter_segment(const Args& a, const Segment& s, Merge& merge, int warp, int lane) {
    if (s.next >= 0) prefetch_l1(a.segments + s.next);
    const Unit u = unit_of(a, s.unit);
    if (OWN_START ? lane == 0 : threadIdx.x == 0)
        merge.segments[Merge::own(warp)] = s, merge.units[Merge::own(warp)] = u;
    return u;
}
