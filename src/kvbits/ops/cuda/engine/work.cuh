// What attention kernels do: a list of segments for every block, which work_list.cu writes.
#pragma once

struct alignas(16) Segment {
    int unit, part, first_entry, first_chunk, num_chunks;
    int slot;                    // where its partial result goes; -1 if it is the unit's only one
    int unit_slots, num_slots;   // the unit's first slot and how many it has
    // the block's next segment, -1 if none; its first is segment blockIdx.x (unit -1 if it has none)
    int next;
    // chunks of the block's earlier segments that come through the ring: chunk t of a block belongs to warp t % WARPS
    int chunks_before;
    int joins;                   // the next segment is of the same unit and walk: one result for both
    // of the sequence in this part: the kernel just ahead may have written it, or the one before it
    int last_entry;
    // of the first token of `first_entry` and from there on; with spans `position` is where the row begins among them
    int position, tokens;
    int padding[2];
};
