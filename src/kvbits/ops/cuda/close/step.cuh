// What closing finds, and what it does in a decode step besides. X_TYPE and APPENDS are macros.
#pragma once
#include "stored.cuh"

struct Status { int saturated[2], overflow[2], nonfinite[2]; };

#if APPENDS
#include "runs.cuh"

/// Pages that close are the oldest of the raw ones, and each sequence's fresh token is stored raw.
struct Step {
    const Closing* closings;      // [n]
    char *closed, *tail;          // the layer's first structs of both pools
    const Run* runs;              // [n]: of one token, or none
    const char* fresh[2];         // keys, values of the tokens
    i64 fresh_stride[2][2];       // bytes from a sequence and head to the next
    char* before[2];              // [n, H] rows that the fresh ones replace, to take the step back; null if nobody will
    i64 tail_head_bytes;
    int tail_offset[2];           // of the raw keys and values in a struct
};

/// Rows of 16 bytes at once, `unit`-th thread.
DEVICE void append_row(const Step& a, int num_heads, int side, int page, int head, int thread) {
    const Run r = a.runs[page];
    constexpr int ROW_BYTES = D * (X_TYPE == FLOAT32 ? 4 : 2);
    if (!r.count || thread >= ROW_BYTES / 16) return;
    const char* from = a.fresh[side] + r.row * a.fresh_stride[side][0] + head * a.fresh_stride[side][1];
    uint4* to = reinterpret_cast<uint4*>(a.tail + r.page + head * a.tail_head_bytes + a.tail_offset[side] + r.slot * ROW_BYTES);
    if (a.before[side]) reinterpret_cast<uint4*>(a.before[side] + (i64(page) * num_heads + head) * ROW_BYTES)[thread] = to[thread];
    to[thread] = reinterpret_cast<const uint4*>(from)[thread];
}
#endif
