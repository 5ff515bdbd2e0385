// Few tokens to their pages: all warps of a block have the same 16, since one warp alone would wait for its basis again
// and again (64 KB a head of 128, out of HBM where a model's weights have been read in between). What comes out is what
// 16 tokens of store_banded.cu would be, byte for byte.
//
// Each warp turns some channels of the tokens' keys and then multiplies all of them with columns of its own, which it
// has asked for before anything else was there. Then four threads have a token, and every such group of threads has it
// once: groups try scales at the same time.
#pragma once
#include "fit.cuh"
#include "tokens.cuh"

// of the tokens: a lane of the matrix units has one of each
constexpr int HALVES = IN_BLOCK / 8;
// bands of a warp, and pairs of bands that it turns for eight tokens
constexpr int OWN = (BANDS + WARPS - 1) / WARPS;
// bands whose part of the basis it asks for at once: 8 * BANDS registers each
constexpr int AHEAD = OWN * BANDS <= 16 ? OWN : 1;
constexpr int GROUP = IN_BLOCK * LANES, GROUPS = THREADS / GROUP;
static_assert(THREADS % GROUP == 0, "four threads a token");

struct Shared {
    uint2 operands[BANDS][2][HALVES][32];                    // of a lane's four channels, high and low
    float rows[IN_BLOCK][D + BAND];                          // as they are stored; neighbours lie in other banks
    float error[7][IN_BLOCK];                                // with each scale that is tried
    unsigned char codes[IN_BLOCK][CODE_STRIDE];
    unsigned char* page[IN_BLOCK];                           // of each token
    int place[IN_BLOCK], start[IN_BLOCK];                    // in it, -1: not stored; position of its first token
    u32 most[WARPS];                                         // of a warp's keys, the bits of a float
};

DEVICE int group() { return int(threadIdx.x) / GROUP; }
DEVICE int group_token() { return int(threadIdx.x) % GROUP / LANES; }
DEVICE int lane() { return threadIdx.x % 32; }
DEVICE int channel(int band) { return band * BAND + int(threadIdx.x) % LANES * 4; }  // the first of a thread's four

/// A thread's channels from `channel` on, `stride` apart, of the token of number `entry`; past the last one those of
/// the first, which no one stores.
template <int QUADS>
DEVICE void load_quads(const Args& a, int side, int entry, int head, int channel, int stride, Quad (&raw)[QUADS]) {
    if (entry >= a.num_tokens) entry = 0;
    const char* const from = row_of(a, side, entry < a.row_tokens ? 0 : entry / a.row_tokens, entry, head, channel);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) raw[i].load(from + i * stride * BYTES);
}
/// Zeros in place of what is not stored; the largest magnitude, 0 if that is no number: tokens beside such a one keep
/// their bits.
template <int QUADS>
DEVICE float keep_stored(const Args& a, int side, bool stored, Quad (&raw)[QUADS]) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
#pragma unroll
        for (int k = 0; k < Quad::WORDS; ++k) raw[i].w[k] = stored ? raw[i].w[k] : 0;
    const float largest = largest_of(raw);
    if (finite(largest)) return largest;
    if (a.status) a.status->nonfinite[side] = 1;
    return 0.f;
}

/// A block's keys or values: `ask` for all that waits for nothing; `put` to shared.rows once places are known.
template <class S, bool MULTIPLIED = S::BASIS == CALIBRATED>
struct Rows {
    Quad raw[BANDS];

    DEVICE void ask(const Args& a, int side, int first, int head) {
        if (group() == 0) load_quads(a, side, first + group_token(), head, channel(0), BAND, raw);
    }
    DEVICE void put(const Args& a, int side, int, Shared& shared) {
        if (group()) return;
        keep_stored(a, side, shared.place[group_token()] >= 0, raw);
        Token x;
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) x[i][k] = raw[i][k];
        if (S::BASIS == HADAMARD) hadamard(x, threadIdx.x % LANES);
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
            *reinterpret_cast<float4*>(&shared.rows[group_token()][channel(i)]) = {x[i][0], x[i][1], x[i][2], x[i][3]};
    }
};
template <class S>
struct Rows<S, true> {
    Quad raw[OWN][2];                                        // of two bands that turn together
    float2 turns[OWN][4];
    uint4 basis[AHEAD][BANDS][2];                            // columns of a band, over `column`
    float4 column[AHEAD], offsets[AHEAD][HALVES];

    DEVICE void ask(const Args& a, int side, int first, int head) {
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            if (const int i = own(n); is_band(i)) {
                load_quads(a, side, first + own_token(i), head, channel(pair_of(i)), D / 2, raw[n]);
#pragma unroll
                for (int k = 0; k < 4; ++k) turns[n][k] = a.turns[channel(pair_of(i)) + k];
            }
        ask_columns(a, head, 0);
    }
    DEVICE void put(const Args& a, int side, int head, Shared& shared) {
        ask_offsets(a, head, 0, shared);
        const float back = power_of_two(turn(a, side, shared));
        __syncthreads();
#pragma unroll
        for (int first = 0; first < OWN; first += AHEAD) {
            if (first) ask_columns(a, head, first), ask_offsets(a, head, first, shared);
            multiply(first, back, shared);
        }
    }

  private:
    /// A warp's n-th band, or pair of bands of eight tokens; BANDS and above: there is none.
    static DEVICE int own(int n) { return int(threadIdx.x) / 32 + n * WARPS; }
    static DEVICE bool is_band(int i) { return BANDS % WARPS == 0 || i < BANDS; }
    static DEVICE int pair_of(int i) { return i % (BANDS / 2); }
    static DEVICE int half_of(int i) { return i / (BANDS / 2); }
    static DEVICE int own_token(int i) { return half_of(i) * 8 + lane() / LANES; }

    DEVICE void ask_columns(const Args& a, int head, int first) {
#pragma unroll
        for (int n = 0; n < AHEAD; ++n)
            if (const int i = own(first + n); is_band(i)) {
                column[n] = *reinterpret_cast<const float4*>(a.column + head * D + channel(i));
#pragma unroll
                for (int step = 0; step < BANDS; ++step)
#pragma unroll
                    for (int t = 0; t < 2; ++t)
                        basis[n][step][t] = a.basis[(((i64(head) * BANDS + i) * BANDS + step) * 2 + t) * 32 + lane()];
            }
    }
    DEVICE void ask_offsets(const Args& a, int head, int first, const Shared& shared) {
#pragma unroll
        for (int r = 0; r < HALVES; ++r) {
            const int token = r * 8 + lane() / LANES;
            const float* const from =
                S::HAS_OFFSETS
                    ? a.offsets + (head * OFFSETS + offsets_row(shared.start[token], shared.place[token])) * D
                    : nullptr;
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
                if (const int i = own(first + n); is_band(i))
                    offsets[n][r] = S::HAS_OFFSETS ? *reinterpret_cast<const float4*>(from + channel(i)) : float4{};
        }
    }

    /// Keys turned back by their frames, as operands of the matrix units over 2**(what it gives back).
    DEVICE int turn(const Args& a, int side, Shared& shared) {
        float y[OWN][2][4];
        u32 most = 0;
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            if (const int i = own(n), token = own_token(i); is_band(i)) {
                most = max(most, __float_as_uint(keep_stored(a, side, shared.place[token] >= 0, raw[n])));
                const int frame = shared.start[token] / FRAME * FRAME;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float2 turn = turn_of(frame, turns[n][k]);
                    const float low = raw[n][0][k], high = raw[n][1][k];
                    y[n][0][k] = low * turn.x + high * turn.y, y[n][1][k] = high * turn.x - low * turn.y;
                }
            }
        most = __reduce_max_sync(ALL_LANES, most);
        if (lane() == 0) shared.most[threadIdx.x / 32] = most;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) most = max(most, shared.most[warp]);
        const int least = exponent_over(most), exponent = least > USUAL || least < USUAL - NEAR ? least : USUAL;
        const float over = power_of_two(-exponent);
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            if (const int i = own(n); is_band(i))
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float(&x)[4] = y[n][half];
                    uint2 high, low;
                    split_f16(x[0] * over, x[1] * over, high.x, low.x);
                    split_f16(x[2] * over, x[3] * over, high.y, low.y);
                    auto& to = shared.operands[pair_of(i) + half * (BANDS / 2)];
                    to[0][half_of(i)][lane()] = high, to[1][half_of(i)][lane()] = low;
                }
        return exponent;
    }

    /// All tokens times columns of a warp's bands `first` and on, less offsets. Sums are made in the order of
    /// store_banded.cu.
    DEVICE void multiply(int first, float back, Shared& shared) const {
        float y[AHEAD][2][4] = {};
#pragma unroll
        for (int step = 0; step < BANDS; ++step)
#pragma unroll
            for (int product = 0; product < 3; ++product) {  // high times low, low times high, high times high
                const uint2 up = shared.operands[step][product == 1][0][lane()],
                            down = shared.operands[step][product == 1][1][lane()];
#pragma unroll
                for (int n = 0; n < AHEAD; ++n)
#pragma unroll
                    for (int t = 0; t < 2; ++t)
                        if (is_band(own(first + n))) {
                            const uint4 of = basis[n][step][t];
                            mma_f16(y[n][t], up.x, down.x, up.y, down.y, product ? of.x : of.z, product ? of.y : of.w);
                        }
            }
#pragma unroll
        for (int n = 0; n < AHEAD; ++n)
            if (const int i = own(first + n); is_band(i))
#pragma unroll
                for (int r = 0; r < HALVES; ++r) {
                    const float4 c = column[n], o = offsets[n][r];
                    const float(&left)[4] = y[n][0], (&right)[4] = y[n][1];
                    // a column is a power of two: one rounding
                    *reinterpret_cast<float4*>(&shared.rows[r * 8 + lane() / LANES][channel(i)]) = {
                        fmaf(left[2 * r], c.x * back, -o.x), fmaf(left[2 * r + 1], c.y * back, -o.y),
                        fmaf(right[2 * r], c.z * back, -o.z), fmaf(right[2 * r + 1], c.w * back, -o.w)};
                }
    }
};

/// As `fit_scales`, for the token that each group has: the groups try scales around one at the same time.
template <class S>
DEVICE int fit_scale(const Token& x, Shared& shared, bool& overflow) {
    const int guess = first_guess<S>(of_token(squares_of<S>(x)));
    overflow = guess & 256;
    int best = guess & 255;
    float least = __uint_as_float(0x7f800000u);
#pragma unroll 1
    for (int i = 0; i < tried<S>();) {
        // the first one tried is better than none
        const int end = i + (i ? 2 : 3), first = scale_tried<S>(best, i), around = i ? best : first;
        for (int n = i + group(); n < end; n += GROUPS) {
            const float error = error_of<S>(x, n ? scale_tried<S>(around, n) : first);
            if (threadIdx.x % LANES == 0) shared.error[n][group_token()] = error;
        }
        __syncthreads();
        for (; i < end; ++i) {
            const float error = shared.error[i][group_token()];
            if (error < least) least = error, best = i ? scale_tried<S>(around, i) : first;
        }
    }
    return scale_of_levels<S>(best);
}

/// Codes of the token that each group has: a thread has a ring, from shared.rows.
template <class S>
DEVICE void write_codes(const Token& x, int scale, Shared& shared) {
    const float inverse = inverse_of<S>(scale);
    const int token = group_token();
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
        if (S::width(i) == 8 && i % GROUPS == group()) {
            u32 codes = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) codes |= code_of_8_bits(units_of(x[i][k], inverse)) << 8 * k;
            four_of(shared, token, channel(i)) = codes;
        }
    constexpr int RINGS = count_rings<S>();
    if constexpr (RINGS > 0) {
#pragma unroll 1
        for (int number = group() * LANES + int(threadIdx.x) % LANES; number < RINGS; number += GROUPS * LANES) {
            u32 numbers[RING / 2], codes[RUNS];
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
                const float4 four =
                    *reinterpret_cast<const float4*>(&shared.rows[token][run_channel<S>(number, run)]);
                numbers[run * 2] = units_of(four.x, inverse) | units_of(four.y, inverse) << 16;
                numbers[run * 2 + 1] = units_of(four.z, inverse) | units_of(four.w, inverse) << 16;
            }
            codes_of_ring<S>(numbers, number, codes);
#pragma unroll
            for (int run = 0; run < RUNS; ++run) four_of(shared, token, run_channel<S>(number, run)) = codes[run];
        }
    }
}

/// Stores one side of the block's tokens, of number `block` * IN_BLOCK and on.
template <class S>
DEVICE void store_pages(const Args& a, int side, int head, int block, int, Shared& shared) {
    const int token = threadIdx.x, entry = block * IN_BLOCK + token;
    const bool finds = token < IN_BLOCK && entry < a.num_tokens;
    const i64 slot = finds ? a.slots[entry] : -1;
    const int start = finds && S::BASIS == CALIBRATED ? a.starts[entry] : 0;
    Rows<S> rows;
    rows.ask(a, side, block * IN_BLOCK, head);
    if (token < IN_BLOCK) note_place(a, token, side, head, shared, [&] { return slot; }, [&] { return start; });
    __syncthreads();
    rows.put(a, side, head, shared);
    __syncthreads();
    Token x;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(&shared.rows[group_token()][channel(i)]);
        x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
    }
    bool overflow;
    const int scale = fit_scale<S>(x, shared, overflow), place = shared.place[group_token()];
    if (overflow && a.status) a.status->overflow[side] = 1;
    write_codes<S>(x, scale, shared);
    if (group() == 0 && threadIdx.x % LANES == 0 && place >= 0)
        shared.page[group_token()][S::SCALE_OFFSET + place] = (unsigned char)scale;
    __syncthreads();
    scatter<S>(shared);
    if (side == 0) clear_padding(a, nullptr, shared);
}
