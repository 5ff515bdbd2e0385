// Values whose codes number levels: weights times level pairs, added to running outputs. See codebook_walk.cuh.
#pragma once
#include "codebook_listed.cuh"

constexpr int OUT_PAIRS = HALF / 32;                           // runs of 32 channel pairs
constexpr int OUT_HALVES = FOLD ? 1 : 2;
constexpr int V_ROW = V_BITS == 4 ? HALF : D / 4;
// a look-up of values serves both runs: rows g and g + 8 of a matrix instruction
constexpr bool BOTH_RUNS = QUADS && OUT_PAIRS == 2;
constexpr int WEIGHT_ROW = CHUNK + 8;                          // weights of a column in shared memory, float16

struct CodebookValues {
    static constexpr int ROUNDS = OUT_HALVES * OUT_PAIRS, FIRST_PLANE_ROUNDS = ROUNDS;
    unsigned char* scratch;          // of the warp: weights of the page's tokens
    // [lower, upper half][run][rows g and g + 8 of channels 4g + 0, 1 and 4g + 2, 3][mma]; see `out`
    float o[OUT_HALVES][OUT_PAIRS][2][4];
    float bias_sum[NT][4];           // weights times the values' biases
    u32 lane_byte;

    DEVICE explicit CodebookValues(unsigned char* scratch) : scratch(scratch) {}

    DEVICE void start(int lane) {
        each([](float& x, int) { x = 0.f; });
        for (int r = 0; r < 4; ++r) bias_sum[0][r] = 0.f;
        lane_byte = QUADS ? lane % 16 * 8 : lane * 4;
    }
    template <class F>
    DEVICE void each(F f) {
#pragma unroll
        for (int part = 0; part < OUT_HALVES; ++part)
#pragma unroll
            for (int pair = 0; pair < OUT_PAIRS; ++pair)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 4; ++r) f(o[part][pair][half][r], r % 2);
    }

    DEVICE void rescale(const float (&multiplier)[NT][2]) {
        each([&](float& x, int e) { x *= multiplier[0][e]; });
        for (int e = 0; e < 2; ++e) bias_sum[0][e] *= multiplier[0][e];
    }

    /// Output of channel 4g + k of a run and column e.
    DEVICE float& out(int part, int run, int k, int e) {
        return BOTH_RUNS ? o[part][k / 2 % OUT_PAIRS][k % 2][2 * run + e] : o[part][run][k / 2][k % 2 * 2 + e];
    }

    /// Adds weights to the softmax's sums, times the tokens' biases to the values'.
    DEVICE void add_biases(const float (&p)[TOKENS][NT][2], Softmax& softmax, const unsigned char* slot, int g, int c) {
#pragma unroll
        for (int i = 0; i < TOKENS; i += 4) {
            float bias[4] = {};
            if (V_HAS_BIAS) {
                uint2 w = *reinterpret_cast<const uint2*>(slot + V_BIAS_OFFSET + token_of(i, g, c) * 2);
                bias[0] = low_f16(w.x); bias[1] = high_f16(w.x); bias[2] = low_f16(w.y); bias[3] = high_f16(w.y);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e) {
                    softmax.sum[0][e] += p[i + j][0][e];
                    if (V_HAS_BIAS) bias_sum[0][e] += p[i + j][0][e] * bias[j];
                }
        }
    }

    /// Where `add` and `add_outliers` find the weights of a page's tokens, packed for two tokens each.
    DEVICE void share_weights(const u32 (&packed)[TOKENS / 2][2], int g, int c) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int i = 0; i < TOKENS; i += 4)
                *reinterpret_cast<uint2*>(scratch + (column_of(e, c) * WEIGHT_ROW + token_of(i, g, c)) * 2) = {
                    packed[i / 2][e], packed[i / 2 + 1][e]};
    }
    /// Adds levels times shared weights.
    DEVICE void add(const unsigned char* slot, int g, int c) {
        const u32* weights = reinterpret_cast<const u32*>(scratch + (FOLD ? g % 4 : g) * WEIGHT_ROW * 2);
        const u32* scales = reinterpret_cast<const u32*>(slot + V_SCALE_OFFSET);
        // odd lanes take their quads the other way round: two lanes a bank instead of four
        const int word = 4 * c + c % 2, quad = 2 * c + c % 2;
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                u32 w[2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    w[i] = mul_f16x2(weights[(word ^ step) + 16 * u + 2 * i], scales[(word ^ step) + 16 * u + 2 * i]);
                quads(w, slot + V_OFFSET0 + (quad ^ step) * 64 + 512 * u, (quad ^ step) + 8 * u, slot, g);
            }
    }
    /// Four tokens of all channels, whose codes' first bits start at `codes`; w: weights of the first and of the last
    /// two.
    DEVICE void quads(const u32 (&w)[2], const unsigned char* codes, int quad, const unsigned char* slot, int g) {
        constexpr int BLOCKS = V_ROW / 16, LOW_ROW = D / 8, LOW_WIDTH = LOW_ROW < 16 ? LOW_ROW : 16;
        // one block: lanes of the upper rows take the second quarter of the channels
        constexpr bool NARROW = V_ROW < 32;
        const int quarter = g % 4;
        u32 b[OUT_HALVES][2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (FOLD)
                b[0][j][0] = permute_bytes(w[j], 0, g < 4 ? 0x4410 : 0x1044),
                b[0][j][1] = permute_bytes(w[j], 0, g < 4 ? 0x4432 : 0x3244);
            else {
                b[0][j][0] = w[j] & 0xffffu, b[0][j][1] = w[j] >> 16;
                b[OUT_HALVES - 1][j][0] = w[j] << 16, b[OUT_HALVES - 1][j][1] = w[j] & 0xffff0000u;
            }
        }
#pragma unroll
        for (int load = 0; load < (BLOCKS + 1) / 2; ++load) {
            const int block = NARROW ? 0 : 2 * load + g / 4;
            const uint4 x = *reinterpret_cast<const uint4*>(codes + block * 16 * CHUNK + quarter * 16);
            // the low bit: byte r % LOW_ROW, shifted by r / LOW_ROW
            const int r = 16 * block + 4 * quarter, by = r / LOW_ROW;
            uint4 y = {};
            if (V_BITS == 3)
                y = *reinterpret_cast<const uint4*>(slot + V_OFFSET1 + quad * 4 * LOW_WIDTH + r % LOW_ROW * 4);
            if (V_BITS == 4) rows(x, load, b);
            else if (NARROW) rows(QUADS ? x : codes4(x, y, by, g >= 4), 0, b, g >= 4);
            else if (BOTH_RUNS) rows_of_quads(x, b);
            else {
                rows(codes4(x, y, by, 0), 0, b);
                rows(codes4(x, y, by, 1), OUT_PAIRS - 1, b);
            }
        }
    }
    static DEVICE uint4 codes4(const uint4& x, const uint4& y, int by, int h) {
        return {codes_of<V_BITS>(x.x, y.x, by, h), codes_of<V_BITS>(x.y, y.y, by, h), codes_of<V_BITS>(x.z, y.z, by, h),
                codes_of<V_BITS>(x.w, y.w, by, h)};
    }
    /// Both quarters of the row's channels at once, with what a look-up gives side by side where the matrix instruction
    /// wants it side by side.
    DEVICE void rows_of_quads(const uint4& codes, const u32 (&b)[OUT_HALVES][2][2]) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint2 first = level_quad<1>(element(codes, k), 2 * j, lane_byte),
                            second = level_quad<1>(element(codes, k), 2 * j + 1, lane_byte);
#pragma unroll
                for (int part = 0; part < OUT_HALVES; ++part)
                    mma_f16(o[part][k / 2 % OUT_PAIRS][k % 2], first.x, first.y, second.x, second.y, b[part][j][0],
                            b[part][j][1]);
            }
    }
    /// Codes of channel pairs 32 pair + 4g + 0 .. 3 of four tokens, a byte each. second: with QUADS, of which quarter.
    DEVICE void rows(const uint4& codes, int pair, const u32 (&b)[OUT_HALVES][2][2], bool second = false) {
        const u32 lane_byte = this->lane_byte + (QUADS && second ? 4 : 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 x = half ? codes.z : codes.x, y = half ? codes.w : codes.y;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 a0 = level_pair<1>(x, 2 * j, lane_byte), a1 = level_pair<1>(y, 2 * j, lane_byte);
                u32 a2 = level_pair<1>(x, 2 * j + 1, lane_byte), a3 = level_pair<1>(y, 2 * j + 1, lane_byte);
#pragma unroll
                for (int part = 0; part < OUT_HALVES; ++part)
                    mma_f16(o[part][pair][half], a0, a1, a2, a3, b[part][j][0], b[part][j][1]);
            }
        }
    }

    DEVICE void add_outliers(u32 largest_weight, int num_columns, unsigned char* slot, int lane) {
        static_assert(D * 16 <= CHUNK * V_ROW, "sums take the codes' memory");
        unsigned char* sums = slot + V_OFFSET0;  // [column][channel], four columns at a time
        const int g = lane / 4, c = lane % 4;
        u32 largest = 0;
        for (int i = lane; i < (V_OUTLIERS + 1) / 2; i += 32)
            largest = max_f16x2(largest, reinterpret_cast<const u32*>(slot + V_OUTLIER_VALUE)[i] & 0x7fff7fffu);
        largest = __reduce_max_sync(ALL_LANES, max(largest & 0xffffu, largest >> 16));
        const float most = f16_to_float(u16(largest)) * f16_to_float(u16(__reduce_max_sync(ALL_LANES, largest_weight)));
        const int exponent = most > 1e-30f ? 24 - exponent_of(most) : 0;  // a channel has at most 64 entries
        const float units = power_of_two(exponent), unit = power_of_two(-exponent);
#pragma unroll 1
        for (int col = 0; col < num_columns; col += 4) {
            __syncwarp();
#pragma unroll
            for (int i = lane; i < D; i += 32) reinterpret_cast<uint4*>(sums)[i] = {0, 0, 0, 0};
            __syncwarp();
            each_batch<V_OUTLIERS>(slot + V_OUTLIER_INDEX, slot + V_OUTLIER_VALUE, lane, [&](const auto& batch) {
                constexpr int N = sizeof(batch.at) / sizeof(u32);
                int sum[N][4];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const u16* w = reinterpret_cast<const u16*>(scratch) + col * WEIGHT_ROW + batch.at[n] / D;
                    const float value = batch.value[n] * units;
#pragma unroll
                    for (int k = 0; k < 4; ++k) sum[n][k] = round_to_int(f16_to_float(w[k * WEIGHT_ROW]) * value);
                }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        if (batch.given[n])
                            add_to_shared(shared_address(sums) + (D * k + batch.at[n] % D) * 4, sum[n][k]);
            });
            __syncwarp();
            if (FOLD || c / 2 * 4 == col)
#pragma unroll
                for (int part = 0; part < OUT_HALVES; ++part)
#pragma unroll
                    for (int pair = 0; pair < OUT_PAIRS; ++pair)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int channel = (FOLD ? c / 2 : part) * HALF + 32 * pair + 4 * g;
                            const uint4 more =
                                *reinterpret_cast<const uint4*>(sums + ((2 * (c % 2) + e) * D + channel) * 4);
#pragma unroll
                            for (int k = 0; k < 4; ++k) out(part, pair, k, e) += float(int(element(more, k))) * unit;
                        }
        }
    }

    /// Sums over the lanes of a column, left where the merge of a segment's warps looks for value group 0.
    DEVICE void sum_biases() {
        for (int e = 0; e < 2; ++e)
            for (int mask = FOLD ? 2 : 4; mask < 32; mask *= 2)
                bias_sum[0][e] += __shfl_xor_sync(ALL_LANES, bias_sum[0][e], mask);
    }

    /// Four neighbouring channels of round `r` and column e: channels channel(r, 4g) .. + 3; folded, lanes of the upper
    /// columns have those HALF further on.
    DEVICE float4 result(int r, int, int e) const {
        const auto& all = o[r / OUT_PAIRS];
        if (BOTH_RUNS)
            return {all[0][0][r % 2 * 2 + e], all[0][1][r % 2 * 2 + e], all[1 % OUT_PAIRS][0][r % 2 * 2 + e],
                    all[1 % OUT_PAIRS][1][r % 2 * 2 + e]};
        const auto& x = all[r % OUT_PAIRS];
        return {x[0][e], x[0][2 + e], x[1][e], x[1][2 + e]};
    }
    static DEVICE int channel(int r, int x) { return r / OUT_PAIRS * HALF + r % OUT_PAIRS * 32 + x; }
};
