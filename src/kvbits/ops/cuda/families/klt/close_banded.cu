// Raw keys and values to pages of banded codes in one launch: a block closes keys or values of one page or several of a kv head. docs/reference/formats.md says what is
// stored, kvbits/quant/{basis,banded}.py define it.
//
// Four neighbouring threads have two tokens, eight apart: of every band each of them four channels, as the matrix units want them and give them back, and so that
// a band's width is known when this is compiled. From the raw rows to the planes' words all stays in registers, but for the operands of a product.
// Values are turned by butterflies in the reference's order, bit for bit, or with WARPGROUPS, 16-bit rows at head_dim 128, by a product with +-1 on the matrix
// units. Keys are turned back by their frame and multiplied with the basis on the matrix units, both as two float16 numbers, high and low (a page and columns over
// powers of two first): y is off by less than 2**-18 of sum |k_f| |A| of any token that is not 2**14 times smaller than the page's largest number, so a code
// differs from the reference's only where it is a tie to that, and a token's scale only where two cost the same squared error to about as much.
#include "banded.cuh"
#include "octets.cuh"
#include "quad.cuh"
#include "step.cuh"

constexpr int WARPS = THREADS / 32, HALF = D / 2;
constexpr int ROW = D + 16;  // of a token in shared memory: keeps threads of a warp off each other's banks

struct Args {
    const void* x[2];             // keys, values [n, H, PAGE, D], strides in elements, last dense, rows at multiples of 16 bytes
    i64 stride[2][3];
    const i64* page_address;      // [n]
    const uint4* basis;           // operands of the matrix units, see side.py: of a warp or, with WARPGROUPS, of four; columns over `column`
    const float* column;          // [H][D]
    const float2* turns;          // [D / 2] turns per position, see turn.cuh
    const int* starts;            // [n]: position of each page's first token; in a decode step of the one behind its last
    Status* status;
    int num_pages, num_heads, head_bytes, pages_each;  // of a block
#if APPENDS
    Step step;                    // `page` counts sequences
#endif
};

struct Shared {
#if WARPGROUPS
    union {
        unsigned char basis[D * D * 4];
        float x[PAGE * ROW];
    };
    union {
        float sums[WARPS][D];
        unsigned char codes[PAGE][CODE_STRIDE];
    };
#else
    union {
        uint4 operands[BANDS][2][THREADS];  // of a thread's tokens, high and low
        float x[PAGE * ROW];
        unsigned char codes[PAGE][CODE_STRIDE];
    };
    float sums[WARPS][D];
#endif
    float mean[D], column[D], cosine[HALF], sine[HALF];
    u32 most[WARPS];  // of a warp's keys, the bits of a float
};

/// What cosines, sines and columns in shared memory are now: of which frame, turns over and columns times 2**exponent.
struct Scaled {
    int frame = -1, exponent = -9;  // good for keys up to 4 .. 64
};

DEVICE float4 four_at(const float* x, int band, int j) { return *reinterpret_cast<const float4*>(&x[band * BAND + j * 4]); }

/// Stores the channels' means, mean_of(channel) each, and takes them off; COLUMNS: off the numbers times their channel's `shared.column`.
template <class S, bool COLUMNS, class MeanOf>
DEVICE void take_means(Token (&x)[TOKENS], int j, unsigned char* out, Shared& shared, bool& overflow, MeanOf mean_of) {
#pragma unroll 1
    for (int ch = threadIdx.x; ch < D; ch += THREADS) {
        const float mean = rounded<FLOAT16>(mean_of(ch));
        overflow |= !finite(mean);
        store<FLOAT16>(out + S::MEAN_OFFSET, ch, mean);
        shared.mean[ch] = mean;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 m = four_at(shared.mean, i, j), c = COLUMNS ? four_at(shared.column, i, j) : float4{1.f, 1.f, 1.f, 1.f};
        const float mean[4] = {m.x, m.y, m.z, m.w}, column[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int r = 0; r < TOKENS; ++r)
#pragma unroll
            for (int k = 0; k < 4; ++k) x[r][i][k] = fmaf(x[r][i][k], column[k], -mean[k]);  // a column is a power of two: one rounding
    }
}

/// Takes the channels' means off, as the reference does: sums in float64, of rows in shared memory.
template <class S>
DEVICE void subtract_mean(Token (&x)[TOKENS], int j, unsigned char* out, Shared& shared, bool& overflow) {
#pragma unroll
    for (int r = 0; r < TOKENS; ++r)
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
            *reinterpret_cast<float4*>(&shared.x[thread_token(r) * ROW + i * BAND + j * 4]) = {x[r][i][0], x[r][i][1], x[r][i][2], x[r][i][3]};
    __syncthreads();
    take_means<S, false>(x, j, out, shared, overflow, [&](int ch) {
        double sum = 0;
        for (int t = 0; t < PAGE; ++t) sum += shared.x[t * ROW + ch];
        return float(sum / PAGE);
    });
}

/// A thread's part of its tokens, turned back by the frame, as operands of the matrix units: take(band, high, low).
template <class Take>
DEVICE void turn_and_split(const Token (&x)[TOKENS], int j, const Shared& shared, const Take& take) {
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
                    const float a = x[r][i][k], b = x[r][i + BANDS / 2][k];
                    y[k] = half ? b * cosine[k] - a * sine[k] : a * cosine[k] + b * sine[k];
                }
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    high[r][k] = pack_f16(y[2 * k], y[2 * k + 1]);
                    low[r][k] = pack_f16(y[2 * k] - low_f16(high[r][k]), y[2 * k + 1] - high_f16(high[r][k]));
                }
            }
            take(i + half * (BANDS / 2), uint4{high[0][0], high[1][0], high[0][1], high[1][1]}, uint4{low[0][0], low[1][0], low[0][1], low[1][1]});
        }
    }
}

DEVICE void write_turns(const Args& a, Shared& shared, const Scaled& scaled) {
    const float over = power_of_two(-scaled.exponent);
#pragma unroll 1
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const float2 turn = turn_of(scaled.frame * FRAME, a.turns[i]);
        shared.cosine[i] = turn.x * over, shared.sine[i] = turn.y * over;
    }
}
DEVICE void write_columns(const Args& a, int head, Shared& shared, const Scaled& scaled) {
    const float back = power_of_two(scaled.exponent);
#pragma unroll 1
    for (int i = threadIdx.x; i < D; i += THREADS) shared.column[i] = a.column[head * D + i] * back;
}

/// What a head's pages share: once for all pages of a block.
DEVICE void load_head(const Args& a, int head, Shared& shared, const Scaled& scaled) {
    write_columns(a, head, shared, scaled);
#if WARPGROUPS
    constexpr int COUNT = sizeof(shared.basis) / 16;  // where matrix units read it
    const uint4* const from = a.basis + i64(head) * COUNT;
#pragma unroll 8
    for (int i = threadIdx.x; i < COUNT; i += THREADS) reinterpret_cast<uint4*>(shared.basis)[i] = from[i];
    shared_writes_before_copies();
#endif
}

/// Whether a side's rows are multiplied with the Hadamard matrix on the matrix units, as they came: every product is exact.
template <class S>
constexpr bool by_signs() { return WARPGROUPS && S::BASIS == HADAMARD && !S::HAS_MEAN && X_TYPE != FLOAT32 && D == 128; }
/// What a token's numbers are still to be multiplied with.
template <class S>
constexpr float factor_of() { return by_signs<S>() ? float(HADAMARD_FACTOR) : 1.f; }

#if WARPGROUPS
/// The Hadamard matrix, +-1 of the type of rows, where and how matrix units read it: the order of channels within 16 is the same for rows and columns.
DEVICE void load_signs(Shared& shared) {
    constexpr u32 ONE = (X_TYPE == BFLOAT16 ? 0x3f80u : 0x3c00u) * 0x10001u;
    const u32 column = threadIdx.x % D, second = (column & 1) << 31, third = (column & 2) * 0x40004000u, fifth = (column & 4) * 0x20002000u;
#pragma unroll 4
    for (u32 i = threadIdx.x / D; i < D / 8; i += THREADS / D) {  // 8 rows of a column
        const u32 w = ONE ^ second ^ (__popc(i * 8 & column) & 1) * 0x80008000u;
        reinterpret_cast<uint4*>(shared.basis)[i * D + column] = {w, w ^ third, w ^ fifth, w ^ third ^ fifth};
    }
    shared_writes_before_copies();
}

/// x: rows times the signs of the Hadamard matrix; `factor_of` is left out.
DEVICE void times_signs(const Quad (&raw)[TOKENS][BANDS], Token (&x)[TOKENS], const Shared& shared) {
    float y[BANDS][2][4];
    u32 rows[BANDS][4];
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) rows[i][k] = raw[k % 2][i].w[k / 2];
    const u64 signs = warpgroup_operand(shared.basis);
    warpgroup_begins(y);
#pragma unroll
    for (int step = 0; step < BANDS; ++step) warpgroup_mma<X_TYPE == BFLOAT16>(y, rows[step], signs + step * 2 * D, step > 0);
    warpgroup_ends(y);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) x[0][i][k] = y[i][k / 2][k % 2], x[1][i][k] = y[i][k / 2][2 + k % 2];
}

/// y: tokens in the frame of the page times the basis, four warps at once: operands of tokens from registers, of the basis from shared memory.
DEVICE void times_basis(const Args&, const Token (&x)[TOKENS], int j, int, Shared& shared, float (&y)[BANDS][2][4]) {
    u32 rows[2][BANDS][4];
    turn_and_split(x, j, shared, [&](int i, uint4 high, uint4 low) {
        rows[0][i][0] = high.x, rows[0][i][1] = high.y, rows[0][i][2] = high.z, rows[0][i][3] = high.w;
        rows[1][i][0] = low.x, rows[1][i][1] = low.y, rows[1][i][2] = low.z, rows[1][i][3] = low.w;
    });
    const u64 basis = warpgroup_operand(shared.basis);
    warpgroup_begins(y);
#pragma unroll
    for (int step = 0; step < BANDS; ++step)
#pragma unroll
        for (int product = 0; product < 3; ++product)  // high times low, low times high, high times high
            warpgroup_mma<false>(y, rows[product == 1][step], basis + ((product == 0) * BANDS + step) * 2 * D, step + product > 0);
    warpgroup_ends(y);
}
#else
/// y: tokens in the frame of the page times the basis.
DEVICE void times_basis(const Args& a, const Token (&x)[TOKENS], int j, int head, Shared& shared, float (&y)[BANDS][2][4]) {
    turn_and_split(x, j, shared, [&](int i, uint4 high, uint4 low) { shared.operands[i][0][threadIdx.x] = high, shared.operands[i][1][threadIdx.x] = low; });
    const uint4* const from = a.basis + i64(head) * BANDS * BANDS * 64 + threadIdx.x % 32;
    // Half a step's operands of the basis are on their way while the other half is multiplied.
    constexpr int EACH = BANDS / 2;
    uint4 b[2][EACH][2];
    const auto load = [&](int half, int step) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int t = 0; t < 2; ++t) b[half][i][t] = from[(((half * EACH + i) * BANDS + step) * 2 + t) * 32];
    };
    load(0, 0);
#pragma unroll 1
    for (int step = 0; step < BANDS; ++step) {
        const uint4 high = shared.operands[step][0][threadIdx.x], low = shared.operands[step][1][threadIdx.x];  // written by this thread
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 0) load(1, step);
            else load(0, min(step + 1, BANDS - 1));
#pragma unroll
            for (int product = 0; product < 3; ++product) {
                const uint4 rows = product == 1 ? low : high;
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        const uint4 of = b[half][i][t];
                        mma_f16(y[half * EACH + i][t], rows.x, rows.y, rows.z, rows.w, product ? of.x : of.z, product ? of.y : of.w);
                    }
            }
        }
    }
}
#endif

/// Lanes that differ in the bit MASK share out the numbers of both: each has the sums of half of them, `first` of which number on.
template <int MASK, int COUNT>
DEVICE void share_sums(float (&sum)[4 * BANDS], int lane, int& first) {
    const bool upper = lane & MASK;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const float other = __shfl_xor_sync(ALL_LANES, upper ? sum[i] : sum[COUNT / 2 + i], MASK);
        sum[i] = (upper ? sum[COUNT / 2 + i] : sum[i]) + other;
    }
    first += upper ? COUNT / 2 : 0;
}

/// The channels' sums over a warp's 16 tokens.
DEVICE void sum_tokens(const Token (&x)[TOKENS], int lane, float* sums) {
    float sum[4 * BANDS];
#pragma unroll
    for (int i = 0; i < 4 * BANDS; ++i) sum[i] = x[0][i / 4][i % 4] + x[1][i / 4][i % 4];
    int first = 0;
    share_sums<4, 4 * BANDS>(sum, lane, first);
    share_sums<8, 2 * BANDS>(sum, lane, first);
    share_sums<16, BANDS>(sum, lane, first);
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) sums[(first + i) / 4 * BAND + lane % LANES * 4 + (first + i) % 4] = sum[i];
}

/// Tokens in the frame of the page times the basis, less the channels' means (of a side with means).
template <class S>
DEVICE void rows_to_basis(const Args& a, Token (&x)[TOKENS], const float (&most)[TOKENS], int j, int head, unsigned char* out, Shared& shared, Scaled& scaled, bool& overflow) {
    // The page's largest number comes to lie from 2**11 to 2**15, which float16 holds after a turn; a token 2**14 times smaller still has 22 bits.
    const int lane = threadIdx.x % 32;
    const u32 here = __reduce_max_sync(ALL_LANES, max(__float_as_uint(most[0]), __float_as_uint(most[1])));
    if (lane == 0) shared.most[threadIdx.x / 32] = here;
    __syncthreads();
    u32 largest = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = max(largest, shared.most[warp]);
    const int exponent = max(exponent_of(__uint_as_float(largest)), -112) - 14;
    if (exponent > scaled.exponent || exponent < scaled.exponent - 3) {  // of the whole block
        scaled.exponent = exponent;
        write_turns(a, shared, scaled);
        write_columns(a, head, shared, scaled);
        __syncthreads();
    }
#if WARPGROUPS
    float y[BANDS][2][4];
#else
    float y[BANDS][2][4] = {};
#endif
    times_basis(a, x, j, head, shared, y);
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 c = S::HAS_MEAN ? float4{1.f, 1.f, 1.f, 1.f} : four_at(shared.column, i, j);
        const float column[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) x[0][i][k] = y[i][k / 2][k % 2] * column[k], x[1][i][k] = y[i][k / 2][2 + k % 2] * column[k];
    }
    if (!S::HAS_MEAN) return;
    sum_tokens(x, lane, shared.sums[threadIdx.x / 32]);
    __syncthreads();
    take_means<S, true>(x, j, out, shared, overflow, [&](int ch) {
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += shared.sums[warp][ch];
        return sum * shared.column[ch] / PAGE;
    });
}

/// What a scale misses x by, past the ends too. Levels are halves of odd numbers of scales, symmetric: with b bits the distance from the nearest is
/// | .. ||x| - 2**(b - 2)| .. - 1| - 1/2 scales. Wider ones count half scales, levels are odd: from 2**24 on a float holds even numbers only.
template <int BITS>
DEVICE float missed(float x, float scale, float inverse_half) {
    if (BITS <= 4) {
        float y = x;
#pragma unroll
        for (int b = BITS; b > 0; --b) y = fabsf(y) - float(1 << b) / 4 * scale;
        return y;
    }
    constexpr float EVEN = 16777216.f;
    const float below = fminf(__fmaf_rd(fabsf(x), inverse_half, EVEN), EVEN + float((1 << BITS) - 2));
    return fmaf(fabsf(x), inverse_half, (EVEN - 1.f) - below);
}

/// Squares of what a scale misses, of narrow bands and, in half scales, of wide ones.
template <class S, int I = 0>
DEVICE void add_squares(const Token& x, float scale, float inverse_half, float (&narrow)[2], float (&wide)[2]) {
    if constexpr (I < BANDS) {
        if constexpr (S::width(I) > 0)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float y = missed<S::width(I)>(x[I][k], scale, inverse_half);
                float& sum = S::width(I) > 4 ? wide[k % 2] : narrow[k % 2];
                sum = fmaf(y, y, sum);
            }
        add_squares<S, I + 1>(x, scale, inverse_half, narrow, wide);
    }
}

/// Over the four threads of a token.
DEVICE float of_token(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/// The codes of the tokens' scales: of the least squared error, the first of equals (quant/banded.py says which are tried).
template <class S>
DEVICE void fit_scales(const Token (&x)[TOKENS], int lane, int (&best)[TOKENS], bool& overflow) {
    float squares[TOKENS] = {};
#pragma unroll
    for (int r = 0; r < TOKENS; ++r)
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            const float step = band_step(S::width(i)) * factor_of<S>();
            float sum = 0.f;
#pragma unroll
            for (int k = 0; k < 4; ++k) sum = fmaf(x[r][i][k], x[r][i][k], sum);
            squares[r] = fmaf(sum, step * step, squares[r]);
        }
    // Over the four threads of a token, by even ones for the first token and odd ones for the second.
    const bool odd = lane & 1;
    float all = (odd ? squares[1] : squares[0]) + __shfl_xor_sync(ALL_LANES, odd ? squares[0] : squares[1], 1);
    all += __shfl_xor_sync(ALL_LANES, all, 2);
    const float start = sqrtf(__fdiv_rn(all, float(S::channels(15))));
    const int mine = scale_code(start) | (start <= scale_value(LARGEST_SCALE) ? 0 : 256), other = __shfl_xor_sync(ALL_LANES, mine, 1);
    overflow |= (mine | other) & 256;
    best[0] = (odd ? other : mine) & 255, best[1] = (odd ? mine : other) & 255;
    int around[TOKENS];
    float least[TOKENS] = {__uint_as_float(0x7f800000u), __uint_as_float(0x7f800000u)};
#pragma unroll 1
    for (int i = 0; i < (S::BASIS == HADAMARD ? 5 : 7); ++i) {
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
            if (i == 0 || i % 2) around[r] = best[r];
            const int code = min(max(around[r] + int((S::BASIS == HADAMARD ? TURNED_OFFSETS : SCALE_OFFSETS) >> 4 * i & 15) - 8, SMALLEST_SCALE), LARGEST_SCALE);
            const float scale = scale_value(code) * (1.f / factor_of<S>()), half = 0.5f * scale;
            float narrow[2] = {}, wide[2] = {};
            add_squares<S>(x[r], scale, reciprocal_approx(half), narrow, wide);
            const float error = of_token(fmaf((wide[0] + wide[1]) * half, half, narrow[0] + narrow[1]));
            if (error < least[r]) least[r] = error, best[r] = code;
        }
    }
}

/// Codes of a thread's channels of a token, a word of four for each band that has bits.
template <class S>
DEVICE void codes_of(const Token& x, float scale, u32 (&codes)[BANDS]) {
    const float inverse = __fdiv_rn(1.f, scale) * factor_of<S>();
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        if (!S::width(i)) continue;
        constexpr u32 ONE_EACH = 0x10001u;
        const u32 top = (1u << S::width(i)) - 1;
        u32 found[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            // Rounded as the reference rounds: product and sum at once, then half to even by a number that leaves no room for a fraction. What is left of
            // the levels fits 16 bits: a scale of the search is above 1/1000 of a token's largest number.
            found[k] = __float_as_uint(__fadd_rn(fmaf(x[i][k], inverse, float(top) / 2), 12582912.f));
        const u32 low = clamp_i16x2(permute_bytes(found[0], found[1], 0x5410), top * ONE_EACH), high = clamp_i16x2(permute_bytes(found[2], found[3], 0x5410), top * ONE_EACH);
        codes[i] = permute_bytes(low, high, 0x6420);
    }
}

constexpr int BYTES = X_TYPE == FLOAT32 ? 4 : 2;  // of an element

/// A thread's part of a page's rows.
DEVICE void load_rows(const Args& a, int side, int page, int head, Quad (&raw)[TOKENS][BANDS]) {
    const int j = threadIdx.x % LANES;
#if APPENDS
    const char* from = a.step.tail + a.step.closings[page].from + head * a.step.tail_head_bytes + a.step.tail_offset[side] + j * 4 * BYTES;
    constexpr i64 stride = D * BYTES;
#else
    const char* from = static_cast<const char*>(a.x[side]) + (page * a.stride[side][0] + head * a.stride[side][1] + j * 4) * BYTES;
    const i64 stride = a.stride[side][2] * BYTES;
#endif
#pragma unroll
    for (int r = 0; r < TOKENS; ++r)
#pragma unroll
        for (int i = 0; i < BANDS; ++i) raw[r][i].load(from + thread_token(r) * stride + i * BAND * BYTES);
}

/// The larger magnitude, of any sign; NaN if any number is NaN.
DEVICE u32 larger_size(u32 a, u32 b) {
    if (X_TYPE == FLOAT32) return Octet::larger(a & Octet::ABS, b & Octet::ABS);
    return X_TYPE == FLOAT16 ? max_size_nan_f16x2(a, b) : max_size_nan_bf16x2(a, b);
}

/// Largest magnitude; NaN if any number is NaN.
DEVICE float largest_of(const Quad (&raw)[BANDS]) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < Quad::WORDS; ++k) largest = larger_size(largest, raw[i].w[k]);
    return Octet::unpack(largest & Octet::ABS, true);
}

/// Whether a thread's part of a page's rows has NaN or infinity, where no one has looked yet.
DEVICE bool has_nonfinite(const Args& a, int side, int page, int head) {
    Quad raw[TOKENS][BANDS];
    load_rows(a, side, page, head, raw);
    return !finite(largest_of(raw[0])) || !finite(largest_of(raw[1]));
}

/// Stores one side of a page from its rows.
template <class S>
DEVICE void close_side(const Args& a, int side, int page, int head, const Quad (&raw)[TOKENS][BANDS], unsigned char* out, Shared& shared, Scaled& scaled) {
    const int j = threadIdx.x % LANES;
    if constexpr (S::BASIS == CALIBRATED) {  // while the rows are on their way
        const int frame = (a.starts[page] - (APPENDS ? PAGE : 0)) / FRAME;
        if (frame != scaled.frame) {
            scaled.frame = frame;
            write_turns(a, shared, scaled);
        }
    }
    Token x[TOKENS];
    float most[TOKENS];
    if constexpr (!by_signs<S>())
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
#pragma unroll
            for (int i = 0; i < BANDS; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) x[r][i][k] = raw[r][i][k];
            most[r] = largest_of(raw[r]);
            if (!finite(most[r])) a.status->nonfinite[side] = 1;
        }
    bool overflow = false;
    if constexpr (S::BASIS == CALIBRATED) {
        rows_to_basis<S>(a, x, most, j, head, out, shared, scaled, overflow);
    } else {
#if WARPGROUPS
        if constexpr (by_signs<S>()) times_signs(raw, x, shared);
#endif
        if constexpr (!by_signs<S>() && S::BASIS == HADAMARD)
#pragma unroll
            for (int r = 0; r < TOKENS; ++r) hadamard(x[r], j);
        if (S::HAS_MEAN) subtract_mean<S>(x, j, out, shared, overflow);
    }
    int scale[TOKENS];
    fit_scales<S>(x, threadIdx.x % 32, scale, overflow);
    if (overflow) {
        a.status->overflow[side] = 1;
        if (by_signs<S>() && has_nonfinite(a, side, page, head)) a.status->nonfinite[side] = 1;
    }
    u32 codes[TOKENS][BANDS] = {};
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        if (j == 0) out[S::SCALE_OFFSET + thread_token(r)] = (unsigned char)scale[r];
        codes_of<S>(x[r], scale_value(scale[r]), codes[r]);
        write_lanes<S>(out, codes[r], thread_token(r), j);
    }
    if constexpr (!in_lanes<S>()) {
        __syncthreads();  // codes take memory of the operands or sums
#pragma unroll
        for (int r = 0; r < TOKENS; ++r)
#pragma unroll
            for (int i = 0; i < BANDS; ++i)
                if (S::width(i)) *reinterpret_cast<u32*>(&shared.codes[thread_token(r)][i * BAND + j * 4]) = codes[r][i];
        __syncthreads();
        write_shared<S>(out, shared);
    }
}

/// Pages `first` .. `last` - 1 of a head.
template <class S>
DEVICE void close_pages(const Args& a, int side, int head, int first, int last, Shared& shared) {
    Scaled scaled;
    bool loaded = false;
    const auto load = [&] {
        loaded = true;
        if (S::BASIS == CALIBRATED) load_head(a, head, shared, scaled);
#if WARPGROUPS
        if (by_signs<S>()) load_signs(shared);
#endif
        if (S::BASIS == CALIBRATED || by_signs<S>()) __syncthreads();
    };
    if (!APPENDS) load();
#pragma unroll 1
    for (int page = first; page < last; ++page) {
#if APPENDS
        if (append_alone(a.step, a.num_heads, side, page, head, threadIdx.x)) continue;
        if (!loaded) load();
        unsigned char* const out = reinterpret_cast<unsigned char*>(a.step.closed) + a.step.closings[page].to + i64(head) * a.head_bytes;
#else
        unsigned char* const out = reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0 && page + 1 < last && a.stride[side][2] == D)  // the next page's rows, where they lie side by side
            prefetch_l2(i64(a.x[side]) + ((page + 1) * a.stride[side][0] + head * a.stride[side][1]) * BYTES, PAGE * D * BYTES);
#endif
#endif
        Quad raw[TOKENS][BANDS];
        load_rows(a, side, page, head, raw);
        close_side<S>(a, side, page, head, raw, out, shared, scaled);
        if (side == 0)  // nothing of the pool's earlier content stays in a page
#pragma unroll 1
            for (int i = USED_BYTES / 4 + threadIdx.x; i < a.head_bytes / 4; i += THREADS) reinterpret_cast<u32*>(out)[i] = 0;
        __syncthreads();  // the page has been read: its place may be the fresh token's; and what is shared may be the next page's
#if APPENDS
        FreshRow(a.step, a.num_heads, side, page, head, threadIdx.x).store();
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) close_banded(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "close.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // Values last, and the pages of a head side by side: a multiprocessor runs one side's code at a time, and finds the head's basis in its L1.
    const int each = (a.num_pages + a.pages_each - 1) / a.pages_each, count = each * a.num_heads, side = int(blockIdx.x) >= count, item = int(blockIdx.x) - side * count;
    const int head = item / each, first = item % each * a.pages_each, last = min(first + a.pages_each, a.num_pages);
    if (side == 0) close_pages<Banded<K_BANDED, false>>(a, 0, head, first, last, shared);
    else close_pages<Banded<V_BANDED, true>>(a, 1, head, first, last, shared);
}
