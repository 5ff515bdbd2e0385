// One warp's walk over pages of trellis codes for up to four query columns. Weights are multiplied with codes as bytes:
// those of a step's tokens, times their value scales, are whole numbers of 16 bits over the largest of each column, in
// two bytes. Columns from 4 on are the lower ones; they are added when the packed parts of a unit end, as sums of
// weights are, of which lanes c and c + 2 have different tokens.
#ifndef BANDED_WALK_CUH
#define BANDED_WALK_CUH
#include "banded_keys.cuh"
#include "packed_walk.cuh"

/// Weights of a step's tokens as operands.
struct ByteWeights {
    static constexpr float FULL = 65534.9f;
    u32 b[UNITS][2];             // upper bytes; lower ones of columns from 4 on
    float unit[2];               // of this lane's columns: what sums of codes times these bytes are to be multiplied by

    /// p: weights times value scales; start: of the page's scores, so that a column that is no number stays none.
    DEVICE ByteWeights(const float (&p)[BYTE_TOKENS][NT][2], const float (&start)[2], int g, int c) {
        float multiplier[2];
        for (int e = 0; e < 2; ++e) {
            float largest = 1e-30f;
            for (int i = 0; i < BYTE_TOKENS; ++i) largest = fmaxf(largest, p[i][0][e]);
            for (int mask = 2; mask < 32; mask *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, mask));
            multiplier[e] = FULL * reciprocal_approx(largest);
            unit[e] =
                (largest * (power_of_two(-operand_exponent(INTEGER)) / FULL) + start[e] * 0.f) * (c >= 2 ? 1.f : 256.f);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            // of column g tokens (8c, 8c + 4), (8c + 1, 8c + 5); from 4 on of column g - 4 (8c + 2, 8c + 6), (8c + 3,
            // 8c + 7)
            u32 n[2];
            for (int i = 0; i < 2; ++i) {
                const float x = fmaf(p[2 * u + i][0][0], multiplier[0], WHOLE),
                            y = fmaf(p[2 * u + i][0][1], multiplier[1], WHOLE);
                n[i] = transpose_8x8(permute_bytes(__float_as_uint(x), __float_as_uint(y), 0x5410));
            }
            constexpr u32 UPPER = 0x7351, LOWER = 0x6240;
            const u32 own = permute_bytes(n[0], n[1], g < 4 ? UPPER : LOWER),
                      other = __shfl_xor_sync(ALL_LANES, permute_bytes(n[0], n[1], g < 4 ? LOWER : UPPER), 16);
            const bool first = (g < 4) != (c % 2);
            b[u][0] = first ? own : other, b[u][1] = first ? other : own;
        }
    }
};

struct ByteValues : ValueSide {
    static_assert(V_RINGS != NO_RINGS && V_BITS1 == 0 && V_SCALE == SCALE_GROUP && V_GROUPS == 1 && V_FLOAT == INTEGER && !V_HAS_BIAS &&
                      !V_HAS_MEAN,
                  "family.py refuses others");

    /// Weights times value scales, 0 for hidden tokens.
    template <bool MASKED>
    static DEVICE void scale(float (&p)[BYTE_TOKENS][NT][2], const unsigned char* slot, int t, int visible, int g,
                             int c) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float scales[4];
            const int unit = (t * UNITS + u) * 32;
            load_scales4<V_SCALE_TYPE>(scales, slot + V_SCALE_OFFSET, unit + 4 * g);
            for (int i = 0; i < 2; ++i)
                for (int e = 0; e < 2; ++e)
                    p[2 * u + i][0][e] *=
                        MASKED && unit + byte_token(i, g, c) >= visible ? 0.f : of_half(scales[i], scales[2 + i], c);
        }
    }
    DEVICE void add(const ByteWeights& weights, const unsigned char* slot, int t, int g, int c) {
        constexpr u32 ONES = 0x01010101u;
        float middle[2];         // of the bytes: what they would give if all codes were the one that means 0
        int sum[4];
        for (int u = 0; u < UNITS; ++u)
            if (u == 0)
                mma_bytes<false>(sum, ONES, ONES, ONES, ONES, weights.b[u][0], weights.b[u][1], WHOLE_BITS, WHOLE_BITS,
                                 WHOLE_BITS, WHOLE_BITS);
            else mma_bytes<false>(sum, ONES, ONES, ONES, ONES, weights.b[u][0], weights.b[u][1]);
        for (int e = 0; e < 2; ++e) middle[e] = of_whole(sum[e]) * (0.5f * V_MIDDLE);
#pragma unroll
        for (int pair = 0; pair < First::PAIRS; ++pair) {
            int block = 2 * pair + g / 4, quarter = g % 4, width = 16;
            // the last block may be narrow and the one after it is not there: read any bytes of the row
            if (32 * pair + 32 > First::ROW) {
                block = min(block, First::BLOCKS - 1);
                width = min(16, First::ROW - 16 * block);
                quarter = min(quarter, width / 4 - 1);
            }
            const unsigned char* p = slot + First::OFFSET + block * 16 * CHUNK + quarter * 16;
            const Values<First>::LowBlock low(slot, 16 * block + 4 * quarter);
            u32 words[UNITS][2][4][2];  // of even fields, of odd ones
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
                for (int k = 0; k < 2; ++k) {
                    // of four lanes that would meet in the same banks odd ones take the second first
                    const int quad = (t * UNITS + u) * 8 + 2 * c + (k ^ c % 2);
                    const uint4 w = *reinterpret_cast<const uint4*>(p + quad * 4 * width), l = low.load(quad);
                    First::Ring::join(words[u][k], {w.x, w.y, w.z, w.w}, {l.x, l.y, l.z, l.w},
                                      Values<First>::in_second_half(low, block),
                                      Values<First>::words_before(p, quad, block));
                }
            // Joined words have no other bits than their fields'. Of two fields the upper one is what the lower leaves
            // of the word.
            constexpr bool TWO = First::FIELDS == 4;
            static_assert(First::FIELDS * First::ROW == DV, "family.py refuses other sizes");
#pragma unroll
            for (int field = 0; field < 2; ++field) {
                const u32 lower = First::Ring::MASK * ONES << First::exponent(field);
#pragma unroll
                for (int rows = 0; rows < 2; ++rows) {
                    int all[4], low[4];
                    for (int u = 0; u < UNITS; ++u) {
                        u32 a[2][2];
                        for (int k = 0; k < 2; ++k)
                            for (int r = 0; r < 2; ++r) a[k][r] = words[u][k][2 * rows + r][field];
                        multiply(all, a, ~0u, weights.b[u], u == 0);
                        if (TWO) multiply(low, a, lower, weights.b[u], u == 0);
                    }
                    for (int r = 0; r < 4; ++r) {
                        first.o[0][field][pair][rows][r] +=
                            from_middle(TWO ? low[r] : all[r], middle[r % 2], First::exponent(field)) *
                            weights.unit[r % 2];
                        if (!TWO) continue;
                        const float rest = __uint_as_float(u32(all[r])) - __uint_as_float(u32(low[r]));
                        first.o[0][field + 2][pair][rows][r] +=
                            (rest - middle[r % 2] * power_of_two(First::exponent(field + 2))) * weights.unit[r % 2];
                    }
                }
            }
        }
    }
    /// Adds products of masked words, or begins with them.
    static DEVICE void multiply(int (&sum)[4], const u32 (&a)[2][2], u32 mask, const u32 (&b)[2], bool begins) {
        if (begins)
            mma_bytes<false>(sum, a[0][0] & mask, a[0][1] & mask, a[1][0] & mask, a[1][1] & mask, b[0], b[1],
                             WHOLE_BITS, WHOLE_BITS, WHOLE_BITS, WHOLE_BITS);
        else
            mma_bytes<false>(sum, a[0][0] & mask, a[0][1] & mask, a[1][0] & mask, a[1][1] & mask, b[0], b[1]);
    }
    /// Middles are halves: where they are not doubled they do not fit beside WHOLE.
    static DEVICE float from_middle(int sum, float middle, int exponent) {
        return exponent ? __uint_as_float(u32(sum)) - (WHOLE + middle * power_of_two(exponent))
                        : of_whole(sum) - middle;
    }
};

struct ByteWalk {
    using Keys = ByteKeys;
    static constexpr bool FOLDS = FOLD;
    ByteKeys keys;
    ByteValues values;

    DEVICE void start(const Args& a, Staged& staged, Unit u, const Part& part, int g, int c) {
        keys.start(a, staged, u, part, g, c);
        values.clear();
    }

    /// MASKED: some tokens may be hidden from some column.
    template <bool MASKED>
    DEVICE void add(const Args& a, const Visible& see, Softmax& softmax, const Chunk& chunk, int lane) {
        keys.with_page(a, chunk, lane, [&](const ByteKeys::Of& page) {
#pragma unroll 1
            for (int t = 0; t < CHUNK / (32 * UNITS); ++t)
                step<MASKED>(a, see, softmax, chunk, t, page, lane / 4, lane % 4);
        });
    }
    template <bool MASKED>
    DEVICE void step(const Args& a, const Visible& see, Softmax& softmax, const Chunk& chunk, int t,
                     const ByteKeys::Of& page, int g, int c) {
        float s[BYTE_TOKENS][NT][2], own[NT][2];  // token 2u + i is the lane's i-th of unit u
        keys.scores(s, softmax, chunk.slot, t, page, g, c);
        for (int i = 0; i < BYTE_TOKENS; ++i)
            for (int e = 0; e < 2; ++e) {
                const int token = (t * UNITS + i / 2) * 32 + byte_token(i % 2, g, c);
                if (SOFTCAP) s[i][0][e] = tanh_approx(s[i][0][e]) * (a.softcap * LOG2E) - softmax.reference[0][e];
                if (MASKED && (token >= chunk.visible || see.hides(a.window, (2 * c + e) % 4, chunk.position + token)))
                    s[i][0][e] = negative_infinity();
            }
        float p[BYTE_TOKENS][NT][2];
        weigh(p, own, s);
        constexpr float MOST = 1e15f;  // of a lane's weights: far below what a float holds
        if (__any_sync(ALL_LANES, !softmax.all_seen || own[0][0] > MOST || own[0][1] > MOST)) {
            float best[NT][2], down[NT][2], multiplier[NT][2];
            highest<BYTE_TOKENS>(best, s);
            softmax.move<2>(best, 0, down, multiplier);
            for (int i = 0; i < BYTE_TOKENS; ++i)
                for (int e = 0; e < 2; ++e) s[i][0][e] -= down[0][e];
            values.rescale(multiplier);
            weigh(p, own, s);
        }
        for (int e = 0; e < 2; ++e) softmax.sum[0][e] += own[0][e];
        values.scale<MASKED>(p, chunk.slot, t, chunk.visible, g, c);
        values.add(ByteWeights(p, page.start, g, c), chunk.slot, t, g, c);
    }
    static DEVICE void weigh(float (&p)[BYTE_TOKENS][NT][2], float (&own)[NT][2],
                             const float (&s)[BYTE_TOKENS][NT][2]) {
        own[0][0] = own[0][1] = 0.f;
        for (int i = 0; i < BYTE_TOKENS; ++i)
            for (int e = 0; e < 2; ++e) own[0][e] += p[i][0][e] = exp2_approx(s[i][0][e]);
    }
};

template <bool>
struct BandedWalk { using Walk = PackedWalk<BandedKeys>; };
template <>
struct BandedWalk<true> { using Walk = ByteWalk; };
#endif
