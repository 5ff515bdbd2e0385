// Fresh keys and values to their slots in raw pages, straight from where the projections left them: one block per (run,
// kv head, keys or values). Raw pages hold the tensors' own numbers, so bytes are moved and one binary serves every
// dtype, head_dim and page size, another one values of another width than keys.
#include "ptx.cuh"
#include "runs.cuh"

struct Args {
    const char* x[2];             // keys, values
    i64 stride[2][3];             // bytes from a sequence, token and head to the next
    const Run* runs;
    char* pages;
    i64 head_bytes;
    int offset[2];                // of the raw keys and values in a struct
    int num_heads, row_bytes;     // of a token's channels of one head, which are dense
    int unit;                     // bytes moved at once: everything above is a multiple
#if UNLIKE_WIDTHS
    int value_row_bytes;
#endif
};

/// Of a token's channels of one head.
DEVICE int row_bytes_of(const Args& a, int side) {
#if UNLIKE_WIDTHS
    if (side) return a.value_row_bytes;
#endif
    return a.row_bytes;
}

template <class Unit>
DEVICE void copy_rows(const char* from, i64 stride, char* to, i64 count, int row_bytes) {
    const int units = row_bytes / int(sizeof(Unit));
    for (i64 i = threadIdx.x; i < count * units; i += THREADS) {
        const i64 token = i / units;
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from + token * stride)[i - token * units];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) append_tokens(const __grid_constant__ Args a) {
    const int side = blockIdx.x % 2, head = blockIdx.x / 2 % a.num_heads;
    const Run r = a.runs[blockIdx.x / 2 / a.num_heads];
    const i64* stride = a.stride[side];
    const char* from = a.x[side] + r.row * stride[0] + r.token * stride[1] + head * stride[2];
    char* to = a.pages + r.page + head * a.head_bytes + a.offset[side] + r.slot * row_bytes_of(a, side);
    if (a.unit == 16) copy_rows<uint4>(from, stride[1], to, r.count, row_bytes_of(a, side));
    else if (a.unit == 4) copy_rows<u32>(from, stride[1], to, r.count, row_bytes_of(a, side));
    else copy_rows<u16>(from, stride[1], to, r.count, row_bytes_of(a, side));
}
