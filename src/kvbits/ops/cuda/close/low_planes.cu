// Low planes of banded pages that close_banded.cu has closed, from the raw rows and the pages' own codes, scales and means: one block per (page, kv head, keys or
// values). Keys are turned back by their frame and multiplied with the basis as there: tokens and columns over powers of two as two float16 numbers, high and
// low. So a plane differs from the reference's only where a number lies on the edge of a part.
#include "banded.cuh"
#include "quad.cuh"

constexpr int HALF = D / 2, BYTES = X_TYPE == FLOAT32 ? 4 : 2;

struct Args {
    const void* x[2];            // keys, values [n, H, PAGE, D], strides in elements, last dense, rows at multiples of 16 bytes
    i64 stride[2][3];
    const i64* page_address;     // [n]
    const i64* low_address[2];   // [n] each, the coarsest first
    const uint4* basis;          // columns_as_operands of side.py
    const float* column;         // [H][D]
    const float2* turns;         // [D / 2] turns per position, see turn.cuh
    const int* starts;           // [n]: position of each page's first token
    int num_pages, num_heads, head_bytes, low_head_bytes[2];
};

struct Shared {
    union {
        uint4 operands[BANDS][2][THREADS];  // of a thread's tokens, high and low
        unsigned char codes[PAGE][CODE_STRIDE];
    };
    float cosine[HALF], sine[HALF];
};

DEVICE float4 four_at(const float* x, int band, int j) { return *reinterpret_cast<const float4*>(&x[band * BAND + j * 4]); }

/// A thread's tokens, turned back by the frame, as operands of the matrix units; `down`: a power of two for each.
DEVICE void turn_and_split(const Token (&x)[TOKENS], const float (&down)[TOKENS], int j, Shared& shared) {
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) {
        const float4 c = four_at(shared.cosine, i, j), s = four_at(shared.sine, i, j);
        const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 high[TOKENS][2], low[TOKENS][2];
#pragma unroll
            for (int r = 0; r < TOKENS; ++r) {
                float y[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float a = x[r][i][k] * down[r], b = x[r][i + BANDS / 2][k] * down[r];
                    y[k] = half ? b * cosine[k] - a * sine[k] : a * cosine[k] + b * sine[k];
                }
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    high[r][k] = pack_f16(y[2 * k], y[2 * k + 1]);
                    low[r][k] = pack_f16(y[2 * k] - low_f16(high[r][k]), y[2 * k + 1] - high_f16(high[r][k]));
                }
            }
            shared.operands[i + half * (BANDS / 2)][0][threadIdx.x] = {high[0][0], high[1][0], high[0][1], high[1][1]};
            shared.operands[i + half * (BANDS / 2)][1][threadIdx.x] = {low[0][0], low[1][0], low[0][1], low[1][1]};
        }
    }
}

/// Tokens in the frame of the page times the basis.
DEVICE void rows_to_basis(const Args& a, Token (&x)[TOKENS], int j, int head, Shared& shared) {
    float down[TOKENS], back[TOKENS];
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {  // a token's largest number comes to lie below 2**15, which float16 holds after a turn
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) most = fmaxf(most, fabsf(x[r][i][k]));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        const int exponent = max(exponent_of(most), -112) - 14;
        down[r] = power_of_two(-exponent), back[r] = power_of_two(exponent);
    }
    turn_and_split(x, down, j, shared);
    const uint4* from = a.basis + i64(head) * BANDS * BANDS * 64 + threadIdx.x % 32;
    float y[BANDS][2][4] = {};
#pragma unroll 1
    for (int step = 0; step < BANDS; ++step, from += 64) {  // not unrolled: loads of all steps at once would take every register
        const uint4 high = shared.operands[step][0][threadIdx.x], low = shared.operands[step][1][threadIdx.x];  // written by this thread
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const uint4 b = from[(i * BANDS * 2 + t) * 32];
                mma_f16(y[i][t], high.x, high.y, high.z, high.w, b.z, b.w);
                mma_f16(y[i][t], low.x, low.y, low.z, low.w, b.x, b.y);
                mma_f16(y[i][t], high.x, high.y, high.z, high.w, b.x, b.y);
            }
    }
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 column = four_at(a.column + head * D, i, j);
        const float columns[4] = {column.x, column.y, column.z, column.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) x[0][i][k] = y[i][k / 2][k % 2] * (columns[k] * back[0]), x[1][i][k] = y[i][k / 2][2 + k % 2] * (columns[k] * back[1]);
    }
}

/// In which parts of their codes' cells a thread's numbers lie: bytes, four of every band in a word.
template <class S, class LOW>
DEVICE void parts_of(const Token& x, const unsigned char* page, int token, int j, u32 (&parts)[BANDS]) {
    u32 codes[BANDS] = {};
    read_codes<S>(page, codes, token, j);
    const float inverse = __fdiv_rn(1.f, scale_value(page[S::SCALE_OFFSET + token]));
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        parts[i] = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 code = codes[i] >> 8 * k & 255;
            const float lowest = code == 0, highest = code == (1u << S::width(i)) - 1;
            const float first = float(code) + first_edge(S::width(i)) - lowest, cell = inner_cell(S::width(i)) + lowest + highest;
            // In the reference's order: a product, then a difference; cells are 1, 2 or 4 wide.
            const float inside = __fsub_rn(__fmul_rn(x[i][k], inverse), first) * (cell == 1.f ? LOW::PARTS : cell == 2.f ? LOW::PARTS / 2.f : LOW::PARTS / 4.f);
            parts[i] |= u32(fminf(fmaxf(floorf(inside), 0.f), LOW::PARTS - 1.f)) << 8 * k;
        }
    }
}

/// Writes the low plane `P` of BITS bits, whose fields lie UP bits up in `parts`.
template <class P, int BITS, int UP>
DEVICE void write_low(unsigned char* out, const u32 (&parts)[TOKENS][BANDS], int j, Shared& shared) {
    if constexpr (BITS > 0) {
        u32 fields[TOKENS][BANDS];
#pragma unroll
        for (int r = 0; r < TOKENS; ++r)
#pragma unroll
            for (int i = 0; i < BANDS; ++i) fields[r][i] = parts[r][i] >> UP & ((1u << BITS) - 1) * 0x01010101u;
        if constexpr (in_lanes<P>(BITS)) {
#pragma unroll
            for (int r = 0; r < TOKENS; ++r) write_lanes<P, BITS>(out, fields[r], thread_token(r), j);
        } else {
            __syncthreads();  // fields take memory of the operands, or of the plane before
#pragma unroll
            for (int r = 0; r < TOKENS; ++r)
#pragma unroll
                for (int i = 0; i < BANDS; ++i) *reinterpret_cast<u32*>(&shared.codes[thread_token(r)][i * BAND + j * 4]) = fields[r][i];
            __syncthreads();
            write_shared<P, BITS>(out, shared);
        }
    }
}

template <class S, class LOW>
DEVICE void refine_side(const Args& a, int side, int page, int head, Shared& shared) {
    if constexpr (LOW::BITS > 0) {
        const int j = threadIdx.x % LANES;
        const char* const from = static_cast<const char*>(a.x[side]) + (page * a.stride[side][0] + head * a.stride[side][1] + j * 4) * BYTES;
        const auto* const closed = reinterpret_cast<const unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
        Token x[TOKENS];
#pragma unroll
        for (int r = 0; r < TOKENS; ++r)
#pragma unroll
            for (int i = 0; i < BANDS; ++i) {
                Quad raw;
                raw.load(from + thread_token(r) * a.stride[side][2] * BYTES + i * BAND * BYTES);
#pragma unroll
                for (int k = 0; k < 4; ++k) x[r][i][k] = raw[k];
            }
        if constexpr (S::BASIS == CALIBRATED) {
            const int frame = a.starts[page] / FRAME * FRAME;
            for (int i = threadIdx.x; i < HALF; i += THREADS) {
                const float2 turn = turn_of(frame, a.turns[i]);
                shared.cosine[i] = turn.x, shared.sine[i] = turn.y;
            }
            __syncthreads();
            rows_to_basis(a, x, j, head, shared);
        }
        u32 parts[TOKENS][BANDS];
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
            if constexpr (S::BASIS == HADAMARD) hadamard(x[r], j);
#pragma unroll
            for (int i = 0; i < BANDS && S::HAS_MEAN; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) x[r][i][k] -= load_value<FLOAT16>(closed + S::MEAN_OFFSET, i * BAND + j * 4 + k);
            parts_of<S, LOW>(x[r], closed, thread_token(r), j, parts[r]);
        }
        write_low<typename LOW::First, LOW::FIRST, LOW::SECOND>(reinterpret_cast<unsigned char*>(a.low_address[0][page]) + i64(head) * a.low_head_bytes[0], parts, j, shared);
        if constexpr (LOW::SECOND > 0)
            write_low<typename LOW::Second, LOW::SECOND, 0>(reinterpret_cast<unsigned char*>(a.low_address[1][page]) + i64(head) * a.low_head_bytes[1], parts, j, shared);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) close_low(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "low_planes.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int count = a.num_pages * a.num_heads, side = int(blockIdx.x) >= count, item = int(blockIdx.x) - side * count;
    const int head = item / a.num_pages, page = item % a.num_pages;
    constexpr int USED[2] = {LOW_USED};
    for (int p = 0; p < LOW_COUNT && side == 0; ++p)  // nothing of the pool's earlier content stays in a plane
        for (int i = USED[p] / 4 + threadIdx.x; i < a.low_head_bytes[p] / 4; i += THREADS)
            reinterpret_cast<u32*>(a.low_address[p][page] + i64(head) * a.low_head_bytes[p])[i] = 0;
    if (side == 0) refine_side<Banded<K_BANDED, false>, LowPlanes<K_LOW, false>>(a, 0, page, head, shared);
    else refine_side<Banded<V_BANDED, true>, LowPlanes<V_LOW, true>>(a, 1, page, head, shared);
}
