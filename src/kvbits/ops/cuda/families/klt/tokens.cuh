// Tokens on their way to pages of trellis codes: what a launch is told, rows as they come, and where tokens go by their
// slots. APPENDS, STORES and TOGETHER are macros.
#pragma once
#include "banded.cuh"
#include "octets.cuh"
#include "quad.cuh"
#include "step.cuh"

constexpr int WARPS = THREADS / 32, IN_BLOCK = TOGETHER ? 16 : THREADS / 2;  // tokens at a time

struct Args {
    // keys, values, last dim dense, rows at multiples of 16 bytes, strides in elements: [n, H, PAGE, D], STORES: [n /
    // row_tokens, row_tokens, H, D]
    const void* x[2];
    i64 stride[2][3];
    const i64* page_address;      // [n]
    // operands of the matrix units, see side.py: of a warp or, with WARPGROUPS, of four; columns over `column`
    const uint4* basis;
    const float* column;          // [H][D]
    const float* offsets;         // [H][OFFSETS][D]: what is taken off keys in the basis
    const float2* turns;          // [D / 2] turns per position, see turn.cuh
    // [n]: position of the first token of each page (STORES: of each token's); in a decode step of the one behind its
    // last
    const int* starts;
    Status* status;               // STORES: may be null, and skipped entries are counted behind it
    // pages, or with STORES IN_BLOCK tokens, and how many of them a block has
    int num_pages, num_heads, head_bytes, pages_each;
#if STORES
    const i64* slots;             // [num_tokens]: page * PAGE + place; below 0: not stored
    const i64* page_offset;       // bytes from `pages` of each page; null: page_stride apart
    unsigned char* pages;
    i64 page_stride, pages_there;
    int num_tokens, row_tokens;
#endif
#if APPENDS
    Step step;                    // `page` counts sequences
#endif
};

constexpr int BYTES = X_TYPE == FLOAT32 ? 4 : 2;  // of an element

/// The larger magnitude, of any sign; NaN if any number is NaN.
DEVICE u32 larger_size(u32 a, u32 b) {
    // bits of NaN are the largest; fmaxf would drop it
    if (X_TYPE == FLOAT32) return max(a & Octet::ABS, b & Octet::ABS);
    return X_TYPE == FLOAT16 ? max_size_nan_f16x2(a, b) : max_size_nan_bf16x2(a, b);
}

/// Largest magnitude; NaN if any number is NaN.
template <int QUADS>
DEVICE float largest_of(const Quad (&raw)[QUADS]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
#pragma unroll
        for (int k = 0; k < Quad::WORDS; ++k) largest = larger_size(largest, raw[i].w[k]);
    return Octet::unpack(largest & Octet::ABS, true);
}

/// Two numbers as float16 numbers, and what those miss them by.
DEVICE void split_f16(float x, float y, u32& high, u32& low) {
    high = pack_f16(x, y);
    low = pack_f16(x - low_f16(high), y - high_f16(high));
}
/// The exponent of the power of two that keys come over, whose largest has these bits: that number then lies from 2**14
/// to 2**15, or with an exponent that is up to NEAR larger from 2**11. USUAL is good for keys up to 4 .. 64.
DEVICE int exponent_over(u32 largest) { return max(exponent_of(__uint_as_float(largest)), -112) - 14; }
constexpr int NEAR = 3, USUAL = -9;

#if STORES
/// Channel `channel` of the token of number `entry`, which is in row `row`.
DEVICE const char* row_of(const Args& a, int side, int row, int entry, int head, int channel) {
    return static_cast<const char*>(a.x[side]) +
           (row * a.stride[side][0] + (entry - row * a.row_tokens) * a.stride[side][1] + head * a.stride[side][2] +
            channel) *
               BYTES;
}

/// Notes where a token of a block goes: nowhere without a slot, or with one past the pages. slot_of(), start_of(): its
/// slot, and the position of its page's first token.
template <class Shared, class Slot, class Start>
DEVICE void note_place(const Args& a, int token, int side, int head, Shared& shared, const Slot& slot_of,
                       const Start& start_of) {
    i64 slot = slot_of();
    if (slot >= a.pages_there * PAGE) {
        if (side == 0 && head == 0 && a.status) atomicAdd(reinterpret_cast<int*>(a.status + 1), 1);
        slot = -1;
    }
    const i64 page = slot < 0 ? -1 : i64(u64(slot) / PAGE);
    shared.place[token] = slot < 0 ? -1 : int(slot - page * PAGE);
    shared.page[token] =
        slot < 0 ? nullptr
                 : a.pages + (a.page_offset ? a.page_offset[page] : page * a.page_stride) + i64(head) * a.head_bytes;
    shared.start[token] = side == 0 && a.starts && slot >= 0 ? start_of() : 0;
}

/// A plane of tokens wherever they go, from shared.codes.
template <class S, int BITS, class Shared>
DEVICE void scatter_plane(const Shared& shared) {
    constexpr int CHANNELS = S::channels(BITS), ROW_BYTES = plane_row<S>(BITS), WORDS = ROW_BYTES / 4;
    if constexpr (CHANNELS > 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < IN_BLOCK * WORDS; i += THREADS) {
            const int token = i % IN_BLOCK, word = i / IN_BLOCK, place = shared.place[token];
            if (place < 0) continue;
            const u32 w = plane_word<S, BITS>(shared, token, word * 4);
            unsigned char* const plane = shared.page[token] + S::offset(BITS);
            if (!S::VALUES) {
                reinterpret_cast<u32*>(plane)[word_place<false, WORDS>(place, word)] = w;
                continue;
            }
            // Four tokens' bytes make a word: this token's lie in four words side by side.
            const int quad = place / 8 * 2 + place % 4 / 2, block = word / 4, width = min(4, WORDS - block * 4);
            unsigned char* const to =
                plane + block * 16 * PAGE + (quad * width + word % 4) * 16 + (place & 1) + (place & 4) / 2;
#pragma unroll
            for (int b = 0; b < 4; ++b) to[b * 4] = (unsigned char)(w >> 8 * b);
        }
    }
}
/// All planes.
template <class S, class Shared>
DEVICE void scatter(const Shared& shared) {
    scatter_plane<S, 8>(shared);
    scatter_plane<S, 4>(shared);
    scatter_plane<S, 2>(shared);
    scatter_plane<S, 1>(shared);
}
#endif

/// Nothing of the pool's earlier content stays in pages that begin here: in `out`, or by slots if that is null.
template <class Shared>
DEVICE void clear_padding(const Args& a, unsigned char* out, const Shared& shared) {
    const int padding = a.head_bytes / 4 - USED_BYTES / 4;
#if STORES
    if (!out) {
#pragma unroll 1
        for (int i = threadIdx.x; i < IN_BLOCK * padding; i += THREADS)
            if (shared.place[i / padding] == 0)
                reinterpret_cast<u32*>(shared.page[i / padding])[USED_BYTES / 4 + i % padding] = 0;
        return;
    }
#endif
#pragma unroll 1
    for (int i = threadIdx.x; i < padding; i += THREADS) reinterpret_cast<u32*>(out)[USED_BYTES / 4 + i] = 0;
}
