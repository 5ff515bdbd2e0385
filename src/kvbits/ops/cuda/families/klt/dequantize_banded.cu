// Pages of trellis codes to 16-bit rows, for attention of many queries: one block per (page, kv head, keys or values),
// the pages of a head side by side.
//
// Threads have tokens as those of store_banded.cu. Levels of a calibrated basis are multiplied with its inverse on the
// matrix units: quarters of odd numbers are exact in float16, the inverse is two float16 numbers, high and low (columns
// over powers of two first); scale and offsets come after. What is written is off by less than 2**-18 of sum |y| |A^-1|
// before it is rounded.
#include "bands.cuh"

constexpr int HALF = D / 2;

struct Args {
    const i64* page_address;     // [n], layer 0, kv head 0
    const int2* rows;            // [n]: first output row, tokens
    u16* out[2];                 // keys, values [rows, H, D] in OUT_TYPE
    const uint4* operands;       // of the inverse of the basis, as struct Args of store_banded.cu has them
    const float* column;         // [H][D]
    const float* offsets;        // [H][OFFSETS][D], times the inverse: what keys were stored less, in the frame
    const float2* turns;         // [D / 2] of side.py's turns_of
    const int* starts;           // [n]: position of each page's first token
    i64 layer_offset;            // bytes
    int num_pages, num_heads, head_bytes;
};

struct Shared {
    float cosine[HALF], sine[HALF];
};

/// A thread's tokens as products with the inverse of the basis, in units of scales.
template <class S>
DEVICE void out_of_basis(const Args& a, u32 (&codes)[TOKENS][BANDS], Token (&x)[TOKENS], int head) {
    const int lane = threadIdx.x % 32;
    const uint4* from = a.operands + i64(head) * BANDS * BANDS * 64 + lane;
    float y[BANDS][2][4] = {};
#pragma unroll 1
    // not unrolled: loads of all steps at once would take every register
    for (int step = 0; step < BANDS; ++step, from += 64) {
        u32 rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = levels(above_1024(codes[i % 2][0], i / 2), S::width(step));
#pragma unroll
        for (int i = 1; i < TOKENS * BANDS; ++i) {
            if (i % BANDS == 0) continue;
            codes[i / BANDS][i % BANDS - 1] = codes[i / BANDS][i % BANDS];
        }
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const uint4 b = from[(i * BANDS * 2 + t) * 32];
                mma_f16(y[i][t], rows[0], rows[1], rows[2], rows[3], b.z, b.w);
                mma_f16(y[i][t], rows[0], rows[1], rows[2], rows[3], b.x, b.y);
            }
    }
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 column = four_at(a.column + head * D, i, lane % LANES);
        const float columns[4] = {column.x, column.y, column.z, column.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            x[0][i][k] = y[i][k / 2][k % 2] * columns[k], x[1][i][k] = y[i][k / 2][2 + k % 2] * columns[k];
    }
}

/// Keys of a frame turned to where they stand.
DEVICE void turn_rows(Token& x, int j, const Shared& shared) {
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) {
        const float4 c = four_at(shared.cosine, i, j), s = four_at(shared.sine, i, j);
        const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float low = x[i][k], high = x[i + BANDS / 2][k];
            x[i][k] = low * cosine[k] - high * sine[k], x[i + BANDS / 2][k] = high * cosine[k] + low * sine[k];
        }
    }
}

template <class S>
DEVICE void unpack_side(const Args& a, int side, int page, int head, Shared& shared) {
    const int j = threadIdx.x % LANES;
    const auto* const from =
        reinterpret_cast<const unsigned char*>(a.page_address[page] + a.layer_offset + i64(head) * a.head_bytes);
    u32 codes[TOKENS][BANDS] = {};
    float scale[TOKENS];
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const int token = thread_token(r);
        scale[r] = scale_value(from[S::SCALE_OFFSET + token]);
        read_indices<S>(from, codes[r], token, j);
    }
    if constexpr (S::BASIS == CALIBRATED) {
        const int frame = a.starts[page] / FRAME * FRAME;
        for (int i = threadIdx.x; i < HALF; i += THREADS) {
            const float2 turn = turn_of(frame, a.turns[i]);
            shared.cosine[i] = turn.x, shared.sine[i] = turn.y;
        }
    }
    __syncthreads();
    Token x[TOKENS];
    if constexpr (S::BASIS == CALIBRATED) {
        out_of_basis<S>(a, codes, x, head);
    } else {
#pragma unroll
        for (int r = 0; r < TOKENS; ++r)
#pragma unroll
            for (int i = 0; i < BANDS; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) x[r][i][k] = level<S>(codes[r][i] >> 8 * k & 255, S::width(i));
    }
    const int2 rows = a.rows[page];
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const float* const offsets =
            S::HAS_OFFSETS ? a.offsets + (head * OFFSETS + offsets_row(a.starts[page], thread_token(r))) * D : nullptr;
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            const float4 m = S::HAS_OFFSETS ? four_at(offsets, i, j) : float4{};
            const float of[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) x[r][i][k] = fmaf(x[r][i][k], scale[r], of[k]);
        }
        if constexpr (S::BASIS == CALIBRATED) turn_rows(x[r], j, shared);
        if constexpr (S::BASIS == HADAMARD) hadamard(x[r], j);
        const int token = thread_token(r);
        if (token >= rows.y) continue;
        uint2* const out = reinterpret_cast<uint2*>(a.out[side] + ((i64(rows.x) + token) * a.num_heads + head) * D) + j;
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
            out[i * LANES] = OUT_TYPE == BFLOAT16
                                 ? uint2{pack_bf16(x[r][i][0], x[r][i][1]), pack_bf16(x[r][i][2], x[r][i][3])}
                                 : uint2{pack_f16(x[r][i][0], x[r][i][1]), pack_f16(x[r][i][2], x[r][i][3])};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) dequantize_banded(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "unpack.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int count = a.num_pages * a.num_heads, side = int(blockIdx.x) >= count, item = int(blockIdx.x) - side * count;
    const int head = item / a.num_pages, page = item % a.num_pages;
    if (side == 0) unpack_side<Banded<K_BANDED, false>>(a, 0, page, head, shared);
    else unpack_side<Banded<V_BANDED, true>>(a, 1, page, head, shared);
}
