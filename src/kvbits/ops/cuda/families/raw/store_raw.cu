// Fresh keys and values to their slots in raw pages: one block per (TOKENS entries, kv head, keys or values), one launch
// for any batch. Raw pages hold the tensors' own numbers, so bytes are moved, and one binary serves every dtype, width
// and page size.
#include "ptx.cuh"

constexpr int LANES = THREADS / TOKENS;  // of a token

struct Rows {
    const char* x;                // [rows, row_tokens, H, D], last dim dense
    i64 stride[3];                // bytes from a row, token and head to the next
    int offset, end;              // in a head's struct: of the numbers, and of what is not theirs any more
    int row_bytes;                // of a token's channels
    int unit;                     // bytes moved at once, 16, 4 or 2: x, strides and row_bytes are multiples
};

struct Args {
    Rows sides[2];                // keys, values
    const i64* slots;             // [num_tokens]: page * page_size + place; below 0: not stored
    const i64* page_offset;       // [num_pages] bytes from `pages`, or null: page * page_stride
    char* pages;                  // these and what follows are multiples of 16 bytes
    i64 page_stride, num_pages;
    int* skipped;                 // entries whose slots lead out are added to it; may be null
    int num_tokens, row_tokens, num_heads, head_bytes, page_size;
};

template <class Unit>
DEVICE void copy(const char* from, char* to, int nbytes, int lane) {
    for (int i = lane; i < nbytes / int(sizeof(Unit)); i += LANES)
        reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) store_raw(const __grid_constant__ Args a) {
    const int side = blockIdx.x % 2, head = blockIdx.x / 2 % a.num_heads, lane = threadIdx.x % LANES;
    const int entry = blockIdx.x / 2 / a.num_heads * TOKENS + threadIdx.x / LANES;
    if (entry >= a.num_tokens) return;
    const i64 slot = a.slots[entry];
    if (slot < 0) return;
    const i64 page = i64(u64(slot) / u32(a.page_size));
    if (page >= a.num_pages) {
        if (side == 0 && head == 0 && lane == 0 && a.skipped) atomicAdd(a.skipped, 1);
        return;
    }
    const Rows& r = a.sides[side];
    const int row = entry / a.row_tokens, place = int(slot - page * a.page_size);
    const char* from = r.x + row * r.stride[0] + (entry - row * a.row_tokens) * r.stride[1] + head * r.stride[2];
    char* numbers =
        a.pages + (a.page_offset ? a.page_offset[page] : page * a.page_stride) + i64(head) * a.head_bytes + r.offset;
    char* to = numbers + i64(place) * r.row_bytes;
    if (r.unit == 16) copy<uint4>(from, to, r.row_bytes, lane);
    else if (r.unit == 4) copy<u32>(from, to, r.row_bytes, lane);
    else copy<u16>(from, to, r.row_bytes, lane);
    if (place) return;
    // nothing of the pool's earlier content stays behind the numbers
    for (int at = a.page_size * r.row_bytes + 2 * lane; at < r.end - r.offset; at += 2 * LANES)
        *reinterpret_cast<u16*>(numbers + at) = 0;
}
