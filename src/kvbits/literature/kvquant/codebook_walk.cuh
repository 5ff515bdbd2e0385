// One warp's walk over pages whose codes number levels of a table (KVQuant): keys with a scale per channel, values per
// token.
//
// Score:  stretch_t * sum_d level * scale * q  +  bias . q  +  listed elements, everything turned to the token's
// position P + t.
//   - A byte holds the codes of channels d and d + D/2 (docs/reference/formats.md), a rotary pair. One look-up gives
//   both levels as a float16 pair; every lane has
//     its own copy of the table in its own bank, so look-ups never meet. One PRMT makes the address.
//   - Position P + t = P + (4g + 32u) + m, m < 4. The query comes turned back by each m. A lane's rows are tokens 4g +
//   m and 4g + m + 32: what is left of
//     the turn is the same for all m, so a page's scales and biases go into it, once for four tokens. Two fused
//     multiply-adds of pairs make an operand.
// Output: level pairs (d, d + D/2) of a token are two of the inner indices of a matrix instruction, one of which meets
// the weight and the other zero.
//
// With at most four query columns (FOLD) the other four of the matrix instruction do as much again. Scores: they hold
// the query turned by m + 4, so a lane's two rows are tokens 8g + m and 8g + m + 4 with one constant between them, and
// each lane keeps the row that its columns are for. Output: columns 0 .. 3 are the lower half of the channels, 4 .. 7
// the upper half.
#pragma once
#include "codebook_keys.cuh"
#include "codebook_values.cuh"

struct CodebookWalk {
    CodebookKeys keys;
    CodebookValues values;

    DEVICE CodebookWalk(Tables& shared, unsigned char* scratch) : keys(shared, scratch), values(scratch) {}

    DEVICE void start(const Args& a, const Staged& staged, Unit u, const Part& part, int warp, int lane) {
        keys.start(a, staged, u, part, warp, lane);
        values.start(lane);
    }

    /// Weighs and adds the page's values. masked: some of its tokens may be hidden from some column; the first
    /// `visible` count. Its codes are overwritten.
    DEVICE void add(float (&s)[TOKENS][NT][2], bool masked, int num_columns, const Args& a, const Visible& see,
                    Softmax& softmax, unsigned char* slot, int position, int visible, int lane) {
        const int g = lane / 4, c = lane % 4;
        finish_scores(masked, s, a, see, softmax, position, visible, g, c);
        u32 largest = reinterpret_cast<const u32*>(slot + V_SCALE_OFFSET)[lane];
        largest = max(largest & 0xffffu, largest >> 16);
        float p[TOKENS][NT][2];
        u32 packed[TOKENS / 2][2];
        u32 largest_weight = weights(p, packed, s);
        if (__any_sync(ALL_LANES, softmax.must_move(largest_weight, largest))) {
            float best[NT][2], down[NT][2], multiplier[NT][2];
            highest<TOKENS>(best, s);
            softmax.move<FOLD ? 2 : 4>(best, largest, down, multiplier);
            for (int i = 0; i < TOKENS; ++i)
                for (int e = 0; e < 2; ++e) s[i][0][e] -= down[0][e];
            values.rescale(multiplier);
            largest_weight = weights(p, packed, s);
        }
        __syncwarp();
        values.share_weights(packed, g, c);
        values.add_biases(p, softmax, slot, g, c);
        __syncwarp();
        values.add(slot, g, c);
        if (V_OUTLIERS) values.add_outliers(largest_weight, num_columns, slot, lane);
    }

    /// Softcap, reference and mask.
    static DEVICE void finish_scores(bool masked, float (&s)[TOKENS][NT][2], const Args& a, const Visible& see,
                                     const Softmax& softmax, int position, int visible, int g, int c) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            for (int e = 0; e < 2; ++e)
                s[i][0][e] =
                    (SOFTCAP ? tanh_approx(s[i][0][e]) * (a.softcap * LOG2E) : s[i][0][e]) - softmax.reference[0][e];
        if (masked)
#pragma unroll
            for (int i = 0; i < TOKENS; ++i)
                for (int e = 0; e < 2; ++e) {
                    const int token = token_of(i, g, c);
                    if (token >= visible || see.hides(a.window, column_of(e, c), position + token))
                        s[i][0][e] = negative_infinity();
                }
    }

    /// p and, packed for two tokens each, float16; returns the largest, as float16 bits.
    static DEVICE u32 weights(float (&p)[TOKENS][NT][2], u32 (&packed)[TOKENS / 2][2],
                              const float (&s)[TOKENS][NT][2]) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < TOKENS; i += 2)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                for (int j = i; j < i + 2; ++j) p[j][0][e] = exp2_approx(s[j][0][e]);
                packed[i / 2][e] = pack_f16(p[i][0][e], p[i + 1][0][e]);
                largest = max_f16x2(largest, packed[i / 2][e]);
            }
        return max(largest & 0xffffu, largest >> 16);
    }
};
