// Raw keys and values to pages of banded codes in one launch: one block per (page, kv head, keys or values). docs/formats.md says what is stored,
// kvbits/quant/{basis,banded}.py define it.
//
// Four neighbouring threads have a token: of every band each of them four channels, so that a band's width is known when this is compiled. Values are
// turned by butterflies in the reference's order, bit for bit. Keys are turned back by their frame and multiplied with the basis on the matrix units,
// both as two float16 numbers, high and low (rows and columns over powers of two first): y is off by less than 2**-18 of sum |k_f| |A|, so a code
// differs from the reference's only where it is a tie to that, and a token's scale only where two cost the same squared error to about as much.
#include "banded.cuh"
#include "octets.cuh"
#include "quad.cuh"
#include "step.cuh"

constexpr int BANDS = D / BAND, LANES = 4, WARPS = THREADS / 32, HALF = D / 2;
constexpr int ROW = D + 16, OPERAND_ROW = D + 8;  // of a token in shared memory: keep threads of a warp off each other's banks
static_assert(THREADS == PAGE * LANES && D % BAND == 0 && PAGE % 16 == 0, "a token has four threads");

struct Args {
    const void* x[2];             // keys, values [n, H, PAGE, D], strides in elements, last dense, rows at multiples of 16 bytes
    i64 stride[2][3];
    const i64* page_address;      // [n]
    const uint4* basis;           // [H][D / 8][D / 16][lane]: operands of the matrix units, high then low halves, columns over `column`
    const float* column;          // [H][D]
    const float2* turns;          // [D / 2] turns per position, see turn.cuh
    const int* starts;            // [n]: position of each page's first token; in a decode step of the one behind its last
    Status* status;
    int num_pages, num_heads, head_bytes;
#if APPENDS
    Step step;                    // `page` counts sequences
#endif
};

struct Shared {
    union {
        float x[PAGE * ROW];
        struct { u16 high[PAGE * OPERAND_ROW], low[PAGE * OPERAND_ROW]; } key;
        unsigned char codes[PAGE][CODE_STRIDE];
    };
    float mean[D], cosine[HALF], sine[HALF], row[PAGE];
};

using Token = float[BANDS][4];

/// Channels 16 i + 4 j + k of a token, j-th of its threads: x[i][k] times the Hadamard matrix of the largest power of two that divides D.
DEVICE void hadamard(Token& x, int j) {
    constexpr int SIZE = D & -D;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
#pragma unroll
        for (int stride = 1; stride < 4; stride *= 2)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (k & stride) continue;
                const float a = x[i][k], b = x[i][k + stride];
                x[i][k] = __fadd_rn(a, b), x[i][k + stride] = __fsub_rn(a, b);
            }
#pragma unroll
        for (int stride = 1; stride < LANES; stride *= 2)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float other = __shfl_xor_sync(ALL_LANES, x[i][k], stride);
                x[i][k] = fmaf(x[i][k], j & stride ? -1.f : 1.f, other);  // a sum or a difference, rounded once
            }
    }
#pragma unroll
    for (int stride = 1; stride < SIZE / BAND; stride *= 2)
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (i & stride) continue;
                const float a = x[i][k], b = x[i + stride < BANDS ? i + stride : i][k];
                x[i][k] = __fadd_rn(a, b), x[i + stride < BANDS ? i + stride : i][k] = __fsub_rn(a, b);
            }
    constexpr float FACTOR = float(HADAMARD_FACTOR);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) x[i][k] = __fmul_rn(x[i][k], FACTOR);
}

DEVICE float4* row_of(Shared& shared, int token, int band, int j) { return reinterpret_cast<float4*>(&shared.x[token * ROW + band * BAND + j * 4]); }

/// Takes the channels' means off the rows in shared memory, as the reference does: sums in float64.
template <class S>
DEVICE void subtract_mean(Token& x, int token, int j, unsigned char* out, Shared& shared, bool& overflow) {
#pragma unroll
    for (int i = 0; i < BANDS; ++i) *row_of(shared, token, i, j) = {x[i][0], x[i][1], x[i][2], x[i][3]};
    __syncthreads();
    for (int ch = threadIdx.x; ch < D; ch += THREADS) {
        double sum = 0;
        for (int t = 0; t < PAGE; ++t) sum += shared.x[t * ROW + ch];
        const float mean = rounded<FLOAT16>(float(sum / PAGE));
        overflow |= !finite(mean);
        store<FLOAT16>(out + S::MEAN_OFFSET, ch, mean);
        shared.mean[ch] = mean;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) x[i][k] -= shared.mean[i * BAND + j * 4 + k];
}

/// This thread's part of a key, turned back by the frame, as two operands in shared memory over a power of two of the token. most: of its magnitudes.
DEVICE void write_operands(const Token& x, float most, int token, int j, Shared& shared) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, mask));
    const int exponent = min(max(exponent_of(most), -126), 126);
    const float over = power_of_two(-exponent);
    if (j == 0) shared.row[token] = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) {
        const float4 c = *reinterpret_cast<const float4*>(&shared.cosine[i * BAND + j * 4]), s = *reinterpret_cast<const float4*>(&shared.sine[i * BAND + j * 4]);
        const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float a = x[i][k], b = x[i + BANDS / 2][k];
                y[k] = over * (half ? b * cosine[k] - a * sine[k] : a * cosine[k] + b * sine[k]);
            }
            const uint2 high = {pack_f16(y[0], y[1]), pack_f16(y[2], y[3])};
            const uint2 low = {pack_f16(y[0] - low_f16(high.x), y[1] - high_f16(high.x)), pack_f16(y[2] - low_f16(high.y), y[3] - high_f16(high.y))};
            const int at = token * OPERAND_ROW + half * HALF + i * BAND + j * 4;
            *reinterpret_cast<uint2*>(&shared.key.high[at]) = high;
            *reinterpret_cast<uint2*>(&shared.key.low[at]) = low;
        }
    }
}

/// Rows in the frame of the page times the basis, less the channels' means (of a side with means), to `shared.x`.
template <class S>
DEVICE void rows_to_basis(const Args& a, const Token& x, float most, int token, int j, int head, int frame, unsigned char* out, Shared& shared, bool& overflow) {
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const float2 turn = turn_of(frame, a.turns[i]);
        shared.cosine[i] = turn.x, shared.sine[i] = turn.y;
    }
    __syncthreads();
    write_operands(x, most, token, j, shared);
    __syncthreads();
    constexpr int TILES = D / 8, EACH = (TILES + WARPS - 1) / WARPS, ROWS = PAGE / 16, STEPS = D / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    float y[EACH][ROWS][4] = {};
    const uint4* from = a.basis + (i64(head) * TILES + warp * EACH) * STEPS * 32 + lane;
    const int place = lane % 16 * OPERAND_ROW + lane / 16 * 8;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        uint4 b[EACH];
#pragma unroll
        for (int n = 0; n < EACH; ++n) b[n] = warp * EACH + n < TILES ? from[(n * STEPS + step) * 32] : uint4{};
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int at = place + row * 16 * OPERAND_ROW + step * 16;
            const uint4 high = load_matrices(shared_address(&shared.key.high[at])), low = load_matrices(shared_address(&shared.key.low[at]));
#pragma unroll
            for (int n = 0; n < EACH; ++n) {
                mma_f16(y[n][row], high.x, high.y, high.z, high.w, b[n].z, b[n].w);
                mma_f16(y[n][row], low.x, low.y, low.z, low.w, b[n].x, b[n].y);
                mma_f16(y[n][row], high.x, high.y, high.z, high.w, b[n].x, b[n].y);
            }
        }
    }
    float mean[EACH][2] = {};
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int channel = (warp * EACH + n) * 8 + 2 * c;
        const float2 column = channel < D ? *reinterpret_cast<const float2*>(a.column + head * D + channel) : float2{};
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float low = shared.row[row * 16 + g], high = shared.row[row * 16 + 8 + g];
            y[n][row][0] *= low * column.x, y[n][row][1] *= low * column.y, y[n][row][2] *= high * column.x, y[n][row][3] *= high * column.y;
            mean[n][0] += y[n][row][0] + y[n][row][2], mean[n][1] += y[n][row][1] + y[n][row][3];
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) mean[n][k] += __shfl_xor_sync(ALL_LANES, mean[n][k], mask);
            mean[n][k] = S::HAS_MEAN ? rounded<FLOAT16>(mean[n][k] / PAGE) : 0.f;
            overflow |= !finite(mean[n][k]);
            if (S::HAS_MEAN && g == 0 && channel < D) store<FLOAT16>(out + S::MEAN_OFFSET, channel + k, mean[n][k]);
        }
    }
    __syncthreads();  // rows take the operands' memory
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const int channel = (warp * EACH + n) * 8 + 2 * c;
        if (channel >= D) continue;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2*>(&shared.x[(row * 16 + r * 8 + g) * ROW + channel]) = {y[n][row][2 * r] - mean[n][0], y[n][row][2 * r + 1] - mean[n][1]};
    }
    __syncthreads();
}

/// The squared error of |x| over a scale, in steps: `inverse` is one over the scale. Levels are halves of odd numbers, symmetric: with b bits the distance
/// from the nearest is | .. ||x| - 2**(b - 2)| .. - 1| - 1/2, past the ends too. Wider ones cut the fraction off a float whose integers have fixed bits.
template <int BITS>
DEVICE float missed(float x, float inverse) {
    if (BITS <= 4) {
        float y = fmaf(x, inverse, -(BITS > 1 ? float(1 << BITS) / 4 : 0.5f));
#pragma unroll
        for (int b = BITS - 1; b > 1; --b) y = fabsf(y) - float(1 << b) / 4;
        return BITS > 1 ? fabsf(y) - 0.5f : y;
    }
    constexpr int SHIFT = BITS > 4 ? 24 - BITS : 0;  // of the lowest integer bit of a float from 2**(BITS - 1) on
    constexpr float FIRST = float(1 << (BITS > 4 ? BITS - 1 : 0));
    const float y = fmaf(x, inverse, FIRST);
    const float level = __uint_as_float((__float_as_uint(y) & ~((1u << SHIFT) - 1)) | 1u << SHIFT >> 1);
    return y - fminf(level, 2 * FIRST - 0.5f);
}

template <class S, int I = 0>
DEVICE void add_squares(const Token& x, float inverse, float (&sums)[4]) {
    if constexpr (I < BANDS) {
        if constexpr (S::width(I) > 0)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float y = missed<S::width(I)>(x[I][k], inverse);
                sums[k] = fmaf(y, y, sums[k]);
            }
        add_squares<S, I + 1>(x, inverse, sums);
    }
}

/// Over the four threads of a token.
DEVICE float of_token(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/// The code of a token's scale, from magnitudes: of the least squared error, the first of equals (quant/banded.py says which are tried).
template <class S>
DEVICE int fitted_scale(const Token& x, bool& overflow) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum = fmaf(x[i][k], x[i][k], sum);
        squares = fmaf(sum, band_step(S::width(i)) * band_step(S::width(i)), squares);
    }
    const float start = sqrtf(__fdiv_rn(of_token(squares), float(S::channels(15))));
    overflow |= !(start <= scale_value(LARGEST_SCALE));
    int best = scale_code(start), around = best;
    float least = __uint_as_float(0x7f800000u);
#pragma unroll 1
    for (int i = 0; i < 7; ++i) {
        if (i == 3 || i == 5) around = best;
        const int code = min(max(around + int(SCALE_OFFSETS >> 4 * i & 15) - 8, SMALLEST_SCALE), LARGEST_SCALE);
        const float scale = scale_value(code);
        float sums[4] = {};
        add_squares<S>(x, reciprocal_approx(scale), sums);
        const float error = of_token((sums[0] + sums[1]) + (sums[2] + sums[3])) * scale * scale;
        if (error < least) least = error, best = code;
    }
    return best;
}

/// Codes of this thread's channels, a word of four for each band that has bits.
template <class S>
DEVICE void codes_of(float scale, int token, int j, Shared& shared, u32 (&codes)[BANDS]) {
    const float inverse = __fdiv_rn(1.f, scale);
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        if (!S::width(i)) continue;
        const float top = float((1 << S::width(i)) - 1);
        const float4 row = *row_of(shared, token, i, j);
        const float x[4] = {row.x, row.y, row.z, row.w};
        u32 found[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            // Rounded as the reference rounds: product and sum at once, then half to even by a number that leaves no room for a fraction.
            const float level = fmaf(x[k], inverse, top / 2);
            found[k] = __float_as_uint(__fadd_rn(fminf(fmaxf(level, 0.f), top), 12582912.f));
        }
        codes[i] = permute_bytes(permute_bytes(found[0], found[1], 0x0040), permute_bytes(found[2], found[3], 0x0040), 0x5410);
    }
}

template <class S>
DEVICE void close_side(const Args& a, int side, int page, int head, Shared& shared) {
    const int token = threadIdx.x / LANES, j = threadIdx.x % LANES;
    constexpr int BYTES = X_TYPE == FLOAT32 ? 4 : 2;
#if APPENDS
    const Closing closing = a.step.closings[page];
    unsigned char* out = reinterpret_cast<unsigned char*>(a.step.closed) + closing.to + i64(head) * a.head_bytes;
    const char* from = a.step.tail + closing.from + head * a.step.tail_head_bytes + a.step.tail_offset[side] + (token * D + j * 4) * BYTES;
#else
    unsigned char* out = reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
    const char* from = static_cast<const char*>(a.x[side]) + (page * a.stride[side][0] + head * a.stride[side][1] + token * a.stride[side][2] + j * 4) * BYTES;
#endif
    Token x;
    u32 largest = 0;
    {
        Quad raw[BANDS];
#pragma unroll
        for (int i = 0; i < BANDS; ++i) raw[i].load(from + i * BAND * BYTES);
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) x[i][k] = raw[i][k];
#pragma unroll
            for (int k = 0; k < Quad::WORDS; ++k) largest = Octet::larger(largest, raw[i].w[k] & Octet::ABS);
        }
    }
    const float most = Octet::unpack(largest, true);
    if (!finite(most)) a.status->nonfinite[side] = 1;
    bool overflow = false;
    if constexpr (S::BASIS == CALIBRATED) {
        const int start = a.starts[page] - (APPENDS ? PAGE : 0);
        rows_to_basis<S>(a, x, most, token, j, head, start / FRAME * FRAME, out, shared, overflow);
    } else {
        if (S::BASIS == HADAMARD) hadamard(x, j);
        if (S::HAS_MEAN) subtract_mean<S>(x, token, j, out, shared, overflow);
#pragma unroll
        for (int i = 0; i < BANDS; ++i) *row_of(shared, token, i, j) = {x[i][0], x[i][1], x[i][2], x[i][3]};  // read by this thread alone
    }
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 row = S::BASIS == CALIBRATED ? *row_of(shared, token, i, j) : float4{x[i][0], x[i][1], x[i][2], x[i][3]};
        x[i][0] = fabsf(row.x), x[i][1] = fabsf(row.y), x[i][2] = fabsf(row.z), x[i][3] = fabsf(row.w);
    }
    const int scale = fitted_scale<S>(x, overflow);
    if (overflow) a.status->overflow[side] = 1;
    if (j == 0) out[S::SCALE_OFFSET + token] = (unsigned char)scale;
    u32 codes[BANDS] = {};
    codes_of<S>(scale_value(scale), token, j, shared, codes);
    write_planes<S>(out, codes, token, j, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) close_banded(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "banded.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // Values last, and the pages of a head side by side: a multiprocessor runs one side's code at a time, and finds the head's basis in its L1.
    const int count = a.num_pages * a.num_heads, side = int(blockIdx.x) >= count, item = int(blockIdx.x) - side * count;
    const int head = item / a.num_pages, page = item % a.num_pages;
#if APPENDS
    if (a.step.closings[page].to == NOWHERE) {
        append_row(a.step, a.num_heads, side, page, head, threadIdx.x);
        return;
    }
    unsigned char* const out = reinterpret_cast<unsigned char*>(a.step.closed) + a.step.closings[page].to + i64(head) * a.head_bytes;
#else
    unsigned char* const out = reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
#endif
    if (side == 0)  // nothing of the pool's earlier content stays in a page
        for (int i = USED_BYTES / 4 + threadIdx.x; i < a.head_bytes / 4; i += THREADS) reinterpret_cast<u32*>(out)[i] = 0;
    if (side == 0) close_side<Banded<K_BANDED, false>>(a, 0, page, head, shared);
    else close_side<Banded<V_BANDED, true>>(a, 1, page, head, shared);
#if APPENDS
    __syncthreads();  // the page has been read: its place may be the fresh token's
    append_row(a.step, a.num_heads, side, page, head, threadIdx.x);
#endif
}
