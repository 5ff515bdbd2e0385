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

/// Rows of KEYS or VALUES channels, 16 bytes at once, `unit`-th thread. Where the row goes and what it replaces are
/// asked for first: kernels further ahead wrote them, so both may be done before the kernel just ahead has ended;
/// `store` reads what that one wrote.
template <int KEYS, int VALUES>
struct FreshRow {
    const uint4* from;
    uint4 *to, *before;
    uint4 replaced;
    bool works;

    DEVICE FreshRow(const Step& a, int num_heads, int side, int page, int head, int thread) {
        const Run r = a.runs[page];
        constexpr int SIZE = X_TYPE == FLOAT32 ? 4 : 2;
        const int row_bytes = KEYS == VALUES ? KEYS * SIZE : (side ? VALUES : KEYS) * SIZE;
        works = r.count && thread < row_bytes / 16;
        if (!works) return;
        from = reinterpret_cast<const uint4*>(a.fresh[side] + r.row * a.fresh_stride[side][0] +
                                              head * a.fresh_stride[side][1]) +
               thread;
        to = reinterpret_cast<uint4*>(a.tail + r.page + head * a.tail_head_bytes + a.tail_offset[side] +
                                      r.slot * row_bytes) +
             thread;
        before = a.before[side]
                     ? reinterpret_cast<uint4*>(a.before[side] + (i64(page) * num_heads + head) * row_bytes) + thread
                     : nullptr;
        if (before) replaced = *to;
    }
    DEVICE void store() const {
        if (!works) return;
        if (before) *before = replaced;
        *to = *from;
    }
};

/// What a block does if nothing closes: true if that was all. The launch may start early (`driver.Kernel`): `closings`
/// and `runs` come from kernels further ahead than the one before, and attention, which starts early after this one,
/// reads pages that it wrote only once it has ended (attend/ring.cuh).
template <int KEYS, int VALUES>
DEVICE bool append_alone(const Step& a, int num_heads, int side, int page, int head, int thread) {
    let_next_kernel_start();
    const i64 to = a.closings[page].to;
    const FreshRow<KEYS, VALUES> row(a, num_heads, side, page, head, thread);
    wait_for_previous_kernel();
    if (to != NOWHERE) return false;
    row.store();
    return true;
}
#endif
