// Values of packed pages: weights of a step's tokens times codes, added to running outputs.
#ifndef PACKED_VALUES_CUH
#define PACKED_VALUES_CUH
#include "columns.cuh"
#include "packed_codes.cuh"

/// Running outputs of a value plane: o[field][pair of blocks][row pair] of channels field * ROW + 32 pair + 4g + 0
/// .. 3.
template <class ValuePlane>
struct Values {
    float o[NT][ValuePlane::FIELDS ? ValuePlane::FIELDS : 1][ValuePlane::PAIRS ? ValuePlane::PAIRS : 1][2][4];

    static constexpr bool used(int field, int pair) { return field * ValuePlane::ROW + 32 * pair < DV; }
    static constexpr int group_of(int field, int pair) {
        return ValueTraits::WEIGHTS == 1 ? 0 : (field * ValuePlane::ROW + 32 * pair) / V_GROUP;
    }

    template <class F>
    DEVICE void each(F f) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int field = 0; field < ValuePlane::FIELDS; ++field)
#pragma unroll
                for (int pair = 0; pair < ValuePlane::PAIRS; ++pair)
                    if (used(field, pair))
#pragma unroll
                        for (int half = 0; half < 2; ++half)
#pragma unroll
                            for (int r = 0; r < 4; ++r)
                                f(o[n][field][pair][half][r], n, r % 2, field, pair, 2 * half + r / 2);
    }
    DEVICE void clear() { each([](float& x, int, int, int, int, int) { x = 0.f; }); }
    DEVICE void scale(const float (&factor)[NT][2]) {
        each([&](float& x, int n, int e, int, int, int) { x *= factor[n][e]; });
    }

    /// Adds codes times weights: weights[group][column tile][unit][first quad, second quad][2 registers].
    template <class Weights>
    DEVICE void accumulate(const unsigned char* slot, int offset, int tile, const Weights& weights, int g, int c) {
#pragma unroll
        for (int pair = 0; pair < ValuePlane::PAIRS; ++pair) {
            int block = 2 * pair + g / 4, quarter = g % 4, width = 16;
            // the last block may be narrow and the one after it is not there: read any bytes of the row
            if (32 * pair + 32 > ValuePlane::ROW) {
                block = min(block, ValuePlane::BLOCKS - 1);
                width = min(16, ValuePlane::ROW - 16 * block);
                quarter = min(quarter, width / 4 - 1);
            }
            const unsigned char* p = slot + offset + block * 16 * CHUNK + quarter * 16;
            const LowBlock low(slot, 16 * block + 4 * quarter);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const int quad = (tile * UNITS + u) * 8 + 2 * c;
                const uint4 first = *reinterpret_cast<const uint4*>(p + quad * 4 * width),
                            second = *reinterpret_cast<const uint4*>(p + (quad + 1) * 4 * width);
                const uint2 before = words_before(p, quad, block), before_second = words_before(p, quad + 1, block);
                quad_of(first, low.load(quad), in_second_half(low, block), before, weights, u, 0, pair);
                quad_of(second, low.load(quad + 1), in_second_half(low, block), before_second, weights, u, 1, pair);
            }
        }
    }
    /// Of trellis codes of 4 bits the words of a ring's other four bytes, half a row away: the last two.
    static constexpr bool IN_HALVES = ValuePlane::RINGS && ValuePlane::BITS == 4;
    static DEVICE uint2 words_before(const unsigned char* p, int quad, int block) {
        if (!IN_HALVES) return {0, 0};
        static_assert(!IN_HALVES || ValuePlane::BLOCKS == 2 * ValuePlane::PAIRS, "halves of a row are whole blocks");
        const int other = (block ^ ValuePlane::PAIRS) - block;
        return *reinterpret_cast<const uint2*>(p + other * 16 * CHUNK + quad * 64 + 8);
    }
    /// Where the joined plane has the codes of four bytes of the row, `byte` and those after it.
    struct LowBlock {
        const unsigned char* p;
        int second, width;       // whether they are in the row's second half

        DEVICE LowBlock(const unsigned char* slot, int byte) {
            constexpr int ROW = ValuePlane::LOW_ROW;
            second = byte >= ROW;
            byte -= second * ROW;
            width = ROW % 16 ? min(16, ROW - byte / 16 * 16) : 16;
            p = slot + ValuePlane::LOW_OFFSET + byte / 16 * 16 * CHUNK + byte % 16 * 4;
        }
        DEVICE uint4 load(int quad) const {
            if (!ValuePlane::JOINED) return {0, 0, 0, 0};
            return *reinterpret_cast<const uint4*>(p + quad * 4 * width);
        }
    };
    static DEVICE int in_second_half(const LowBlock& low, int block) {
        return IN_HALVES ? block >= ValuePlane::PAIRS : low.second;
    }
    template <class Weights>
    DEVICE void quad_of(const uint4& w, const uint4& low, int second, const uint2& before, const Weights& weights, int u,
                        int which, int pair) {
        Fields<ValuePlane, V_FLOAT> of[4];
        fields_of_four(of, w, low, second, before);
#pragma unroll
        for (int f = 0; f < ValuePlane::FIELDS; ++f) {
            if (!used(f, pair)) continue;
            const u32 a0 = of[0].operand(0, f), a1 = of[1].operand(0, f), a2 = of[0].operand(1, f),
                      a3 = of[1].operand(1, f);
            const u32 c0 = of[2].operand(0, f), c1 = of[3].operand(0, f), c2 = of[2].operand(1, f),
                      c3 = of[3].operand(1, f);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const u32 (&b)[2] = weights[group_of(f, pair)][n][u][which];
                mma_f16(o[n][f][pair][0], a0, a1, a2, a3, b[0], b[1]);
                mma_f16(o[n][f][pair][1], c0, c1, c2, c3, b[0], b[1]);
            }
        }
    }
};

struct ValueSide {
    using First = ValueTraits::First;
    using Second = ValueTraits::Second;
    static constexpr int FIRST_PLANE_ROUNDS = First::ROUNDS, ROUNDS = First::ROUNDS + Second::ROUNDS;
    Values<First> first, first_total;     // totals: only with PER_CHUNK, where the others are of a chunk
    Values<Second> second, second_total;
    float bias_sum[NT][4];             // row g: weights times the bias of value group g
    float weight_sum[NT][2];           // this chunk's

    DEVICE void clear() {
        first.clear();
        if (ValueTraits::PER_CHUNK) first_total.clear();
        second.clear();
        if (ValueTraits::PER_CHUNK) second_total.clear();
        for (int n = 0; n < NT; ++n)
            for (int r = 0; r < 4; ++r) bias_sum[n][r] = 0.f;
    }
    DEVICE void start_chunk() {
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) weight_sum[n][e] = 0.f;
    }
    DEVICE void finish_chunk(const unsigned char* slot, int g) {
        if (ValueTraits::PER_CHUNK || ValueTraits::WEIGHT_SUMS) finish_plane(first, first_total, true, slot, g);
        if (ValueTraits::PER_CHUNK) finish_plane(second, second_total, false, slot, g);
    }
    DEVICE void rescale(const float (&multiplier)[NT][2]) {
        for (int n = 0; n < NT; ++n) {
            for (int r = 0; r < 4; ++r) bias_sum[n][r] *= multiplier[n][r % 2];
            for (int e = 0; e < 2; ++e) weight_sum[n][e] *= multiplier[n][e];
        }
        first.scale(multiplier);
        if (ValueTraits::PER_CHUNK) first_total.scale(multiplier);
        second.scale(multiplier);
        if (ValueTraits::PER_CHUNK) second_total.scale(multiplier);
    }

    /// Scale pairs of the lane's value tokens, 0 for hidden ones; returns the largest, as float16 bits.
    template <bool MASKED>
    DEVICE u32 scales(u32 (&pairs)[ValueTraits::WEIGHTS][UNITS][4], const unsigned char* slot, int t, int visible,
                      int c) const {
        if (V_SCALE != SCALE_GROUP) return 0;
        u32 largest = 0;
#pragma unroll
        for (int gr = 0; gr < ValueTraits::WEIGHTS; ++gr)
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                int token = (t * UNITS + u) * 32 + 8 * c;
                load_pairs8<V_SCALE_TYPE>(pairs[gr][u], slot + V_SCALE_OFFSET, gr * CHUNK + token);
                if (MASKED) mask_pairs(pairs[gr][u], token, visible);
                for (int j = 0; j < 4; ++j) largest = max_f16x2(largest, pairs[gr][u][j]);
            }
        return max(largest & 0xffffu, largest >> 16);
    }
    static DEVICE void mask_pairs(u32 (&pairs)[4], int token, int visible) {
        for (int j = 0; j < 4; ++j)
            pairs[j] &= (token + j < visible ? 0xffffu : 0u) | (token + j + 4 < visible ? 0xffff0000u : 0u);
    }

    /// Adds a step's tokens, whose weights are `packed` and whose scales `pairs`.
    template <bool MASKED>
    DEVICE void add(const u32 (&packed)[TOKENS][NT], const u32 (&pairs)[ValueTraits::WEIGHTS][UNITS][4],
                    const unsigned char* slot, int t, int visible, int g, int c) {
        u32 weights[ValueTraits::WEIGHTS][NT][UNITS][2][2];
        weights_of<MASKED>(weights, packed, slot, t, pairs, visible, g, c);
        if (V_MIDDLE) subtract_middle(weights);
        first.accumulate(slot, First::OFFSET, t, weights, g, c);
        second.accumulate(slot, Second::OFFSET, t, weights, g, c);
    }

    template <bool MASKED>
    DEVICE void weights_of(u32 (&weights)[ValueTraits::WEIGHTS][NT][UNITS][2][2], const u32 (&packed)[TOKENS][NT],
                           const unsigned char* slot, int t, const u32 (&pairs)[ValueTraits::WEIGHTS][UNITS][4],
                           int visible, int g, int c) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            u32 bias[4] = {};
            int token = (t * UNITS + u) * 32 + 8 * c;
            if (ValueTraits::BIAS_SUMS && g < V_GROUPS) {
                load_pairs8<V_SCALE_TYPE>(bias, slot + V_BIAS_OFFSET, g * CHUNK + token);
                if (MASKED) mask_pairs(bias, token, visible);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                u32 p[4];  // tokens (8c, 8c + 4), (8c + 1, 8c + 5), .. of column g
                for (int j = 0; j < 4; ++j) p[j] = transpose_8x8(packed[4 * u + j][n]);
                if (ValueTraits::BIAS_SUMS) {
                    mma_f16(bias_sum[n], bias[0], 0, bias[1], 0, p[0], p[1]);
                    mma_f16(bias_sum[n], bias[2], 0, bias[3], 0, p[2], p[3]);
                }
                if (ValueTraits::WEIGHT_SUMS) {
                    float acc[4] = {0.f, 0.f, 0.f, 0.f};
                    mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, p[0], p[1]);
                    mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, p[2], p[3]);
                    for (int e = 0; e < 2; ++e) weight_sum[n][e] += acc[e];
                }
#pragma unroll
                for (int gr = 0; gr < ValueTraits::WEIGHTS; ++gr) {
                    u32(&w)[2][2] = weights[gr][n][u];
                    for (int j = 0; j < 4; ++j)
                        w[j / 2][j % 2] = V_SCALE == SCALE_GROUP ? mul_f16x2(p[j], pairs[gr][u][j]) : p[j];
                }
            }
        }
    }

    /// Takes off what the code that means 0 adds.
    DEVICE void subtract_middle(const u32 (&weights)[ValueTraits::WEIGHTS][NT][UNITS][2][2]) {
        float sums[ValueTraits::WEIGHTS][NT][2];
#pragma unroll
        for (int gr = 0; gr < ValueTraits::WEIGHTS; ++gr)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float acc[4] = {0.f, 0.f, 0.f, 0.f};
                for (int u = 0; u < UNITS; ++u)
                    for (int k = 0; k < 2; ++k)
                        mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, weights[gr][n][u][k][0],
                                weights[gr][n][u][k][1]);
                for (int e = 0; e < 2; ++e) sums[gr][n][e] = acc[e];
            }
        // A power of two: of two planes that are not joined, the second holds none of it.
        first.each([&](float& x, int n, int e, int field, int pair, int) {
            x -= sums[Values<First>::group_of(field, pair)][n][e] *
                 (V_MIDDLE * power_of_two(First::exponent(field) - 25));
        });
    }

    /// Per-channel scales and offsets of this chunk's outputs (offsets once: with the first plane).
    template <class ValuePlane>
    DEVICE void finish_plane(Values<ValuePlane>& values, Values<ValuePlane>& sum, bool offsets,
                             const unsigned char* slot, int g) {
        auto& into = ValueTraits::PER_CHUNK ? sum : values;
#pragma unroll
        for (int field = 0; field < ValuePlane::FIELDS; ++field)
#pragma unroll
            for (int pair = 0; pair < ValuePlane::PAIRS; ++pair) {
                int r = 32 * pair + 4 * g, ch = field * ValuePlane::ROW + r;
                if (!Values<ValuePlane>::used(field, pair)) continue;
                int at = r < ValuePlane::ROW && ch < DV ? ch : 0;
                float scale[4] = {1.f, 1.f, 1.f, 1.f}, bias[4] = {}, mean[4] = {};
                if (ValueTraits::PER_CHUNK) load_scales4<V_SCALE_TYPE>(scale, slot + V_SCALE_OFFSET, at);
                if (ValueTraits::PER_CHUNK && V_HAS_BIAS) load_scales4<V_SCALE_TYPE>(bias, slot + V_BIAS_OFFSET, at);
                if (V_HAS_MEAN) load_scales4<V_SCALE_TYPE>(mean, slot + V_MEAN_OFFSET, at);
                const float unit = power_of_two(ValuePlane::exponent(field) - ValueTraits::EXPONENT);
                for (int n = 0; n < NT; ++n)
                    for (int k = 0; k < 4; ++k)
                        for (int e = 0; e < 2; ++e) {
                            float& x = into.o[n][field][pair][k / 2][k % 2 * 2 + e];
                            if (ValueTraits::PER_CHUNK) x += values.o[n][field][pair][k / 2][k % 2 * 2 + e] * scale[k];
                            if (ValueTraits::WEIGHT_SUMS && offsets)
                                x += weight_sum[n][e] * ((bias[k] + mean[k]) * unit);
                        }
            }
        if (ValueTraits::PER_CHUNK) values.clear();
    }

    /// Four neighbouring channels of round `r` and column e: channels channel(r, 4g) .. + 3.
    DEVICE float4 result(int r, int n, int e) const {
        if (r >= FIRST_PLANE_ROUNDS)
            return ValueTraits::PER_CHUNK ? four(second_total, r - FIRST_PLANE_ROUNDS, n, e)
                                          : four(second, r - FIRST_PLANE_ROUNDS, n, e);
        return ValueTraits::PER_CHUNK ? four(first_total, r, n, e) : four(first, r, n, e);
    }
    template <class ValuePlane>
    DEVICE float4 four(const Values<ValuePlane>& v, int r, int n, int e) const {
        if constexpr (ValuePlane::PAIRS > 0) {
            int field = r / ValuePlane::PAIRS;
            const auto& x = v.o[n][field][r % ValuePlane::PAIRS];
            // turn_back has multiplied
            const float m = V_TURNED ? 1.f : power_of_two(ValueTraits::EXPONENT - ValuePlane::exponent(field));
            return {x[0][e] * m, x[0][2 + e] * m, x[1][e] * m, x[1][2 + e] * m};
        }
        return {};
    }
    /// The channel at place x of round r; -1 past the row or the head.
    static DEVICE int channel(int r, int x) {
        return r < FIRST_PLANE_ROUNDS ? channel_of<First>(r, x) : channel_of<Second>(r - FIRST_PLANE_ROUNDS, x);
    }
    template <class ValuePlane>
    static DEVICE int channel_of(int r, int x) {
        if constexpr (ValuePlane::PAIRS > 0) {
            int byte = r % ValuePlane::PAIRS * 32 + x, ch = r / ValuePlane::PAIRS * ValuePlane::ROW + byte;
            return byte < ValuePlane::ROW && ch < DV ? ch : -1;
        }
        return -1;
    }
};
#endif
