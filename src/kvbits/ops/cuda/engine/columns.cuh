// The query columns of a warp: which query token and head each is, what it may see, and its running softmax.
#pragma once
#include "args.cuh"

struct Unit { int batch, head, block; };

DEVICE Unit unit_of(const Args& a, int unit) {
    int row = unit / a.column_blocks;
    return {row / a.num_kv_heads, row % a.num_kv_heads, unit % a.column_blocks};
}

/// Columns of the unit that are queries: the last block of columns may be part empty.
DEVICE int columns_of(const Args& a, Unit u) { return min(COLS, a.num_queries * a.group - u.block * COLS); }

/// Element offset of column `index` (query token, then head of the group) in q; its first channel.
DEVICE i64 q_offset(const Args& a, Unit u, int index) {
    return u.batch * a.q_stride_b + (index / a.group) * a.q_stride_t +
           (u.head * a.group + index % a.group) * a.q_stride_h;
}

/// The unit's queries, staged once per segment by all consumer warps; with OWN_START each warp has positions of its own
/// and no more.
struct Staged {
    // times the calibrated key scale, if there is one; 0 past the last column
    float q[OWN_START ? 1 : COLS][OWN_START ? 4 : D];
    // newest visible position: -1 for padding, 2**31 - 1 past the last column (it costs no mask and is never written)
    int position[COLS];
    u32 largest[OWN_START ? 1 : WARPS];  // float bits of max |q|
    uint2 fragments[Q_FRAGMENTS ? NT * Q_FRAGMENTS * 32 : 1];  // operands of Query, where registers do not hold them
};

DEVICE float4 four_queries(const u16* q) {
    const uint2 w = *reinterpret_cast<const uint2*>(q);
    if (Q_TYPE == BFLOAT16)
        return {bf16_to_float(u16(w.x)), bf16_to_float(u16(w.x >> 16)), bf16_to_float(u16(w.y)),
                bf16_to_float(u16(w.y >> 16))};
    return {low_f16(w.x), high_f16(w.x), low_f16(w.y), high_f16(w.y)};
}
DEVICE float largest_of(float4 x) { return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))); }
DEVICE int position_of(const Args& a, Unit u, int col) {
    const int index = u.block * COLS + col;
    return index < a.num_queries * a.group ? a.q_positions[u.batch * a.num_queries + index / a.group] : 0x7fffffff;
}

/// A lane's columns 8n + g: in global memory (OWN_START) or staged.
struct QueryRows {
    const Staged& staged;
    const u16* rows[NT];         // null past the last column
    int g;

    DEVICE QueryRows(const Args& a, const Staged& staged, Unit u, int g) : staged(staged), g(g) {
        for (int n = 0; n < NT && OWN_START; ++n) {
            const int index = u.block * COLS + n * 8 + g;
            rows[n] = index < a.num_queries * a.group ? static_cast<const u16*>(a.q) + q_offset(a, u, index) : nullptr;
        }
    }
    /// Four neighbouring channels; zeros past the last column and where not `wanted`.
    DEVICE float4 four(int n, int channel, bool wanted) const {
        if (!OWN_START)
            return wanted ? *reinterpret_cast<const float4*>(&staged.q[OWN_START ? 0 : n * 8 + g][channel])
                          : float4{0.f, 0.f, 0.f, 0.f};
        return wanted && rows[n] ? four_queries(rows[n] + channel) : float4{0.f, 0.f, 0.f, 0.f};
    }
    /// Float bits of the largest magnitude of all columns.
    DEVICE u32 largest(int c) const {
        u32 bits = 0;
        if (OWN_START) {
            float m = 0.f;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int ch = 0; ch < D; ch += 16) m = fmaxf(m, largest_of(four(n, ch + 4 * c, ch + 4 * c < D)));
            return __reduce_max_sync(ALL_LANES, __float_as_uint(m));
        }
        for (int w = 0; w < WARPS; ++w) bits = max(bits, staged.largest[OWN_START ? 0 : w]);
        return bits;
    }
};

DEVICE void stage_queries(Staged& staged, const Args& a, Unit u, const float* scale, int thread) {
    if (OWN_START) {
        if (thread % 32 < COLS) staged.position[thread % 32] = position_of(a, u, thread % 32);
        __syncwarp();
        return;
    }
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < (COLS * D / 4 + CONSUMERS - 1) / CONSUMERS; ++i) {
        int at = thread + i * CONSUMERS, col = at / (D / 4), ch = at % (D / 4) * 4, index = u.block * COLS + col;
        if (at >= COLS * D / 4) break;
        float4 x = {0.f, 0.f, 0.f, 0.f};
        if (index < a.num_queries * a.group)
            x = four_queries(static_cast<const u16*>(a.q) + q_offset(a, u, index) + ch);
        if (scale) {
            float4 s = *reinterpret_cast<const float4*>(scale + ch);
            x = {x.x * s.x, x.y * s.y, x.z * s.z, x.w * s.w};
        }
        *reinterpret_cast<float4*>(&staged.q[OWN_START ? 0 : col][ch]) = x;
        largest = max(largest, __float_as_uint(largest_of(x)));
    }
    if (thread < COLS) staged.position[thread] = position_of(a, u, thread);
    largest = __reduce_max_sync(ALL_LANES, largest);
    if (thread % 32 == 0) staged.largest[OWN_START ? 0 : thread / 32] = largest;
    sync_threads(CONSUMERS);
}

/// What the columns may see. Positions stay in shared memory: few steps look at single ones.
struct Visible {
    const Staged& staged;
    int all_from, all_to;        // positions every column sees: all_from <= p <= all_to

    DEVICE Visible(const Staged& staged, int window, int lane) : staged(staged) {
        int p = staged.position[lane % COLS];
        all_to = __reduce_min_sync(ALL_LANES, p);
        all_from = __reduce_max_sync(ALL_LANES, p == 0x7fffffff ? 0 : p - window + 1);
    }
    DEVICE bool hides(int window, int col, int position) const {
        return position > staged.position[col] || position <= staged.position[col] - window;
    }
};

/// Online softmax in powers of two. Scores arrive as exponents relative to `reference`, which moves only when a weight
/// passes 2**top: float16 holds the weights and their products with value scales up to `limit`, and most tiles pay a
/// comparison and a vote instead of maxima, shuffles and a rescale.
struct Softmax {
    static constexpr int TOP = 15, DROP = 6;
    float reference[NT][2];
    float sum[NT][2];            // this lane's tokens only
    bool seen[NT][2];            // alike in all lanes of a column
    bool all_seen;
    int top;                     // TOP less the exponent of `limit`
    u32 limit;                   // float16 bits of a power of two >= 1 that no value scale so far exceeds

    DEVICE void clear() {
        top = TOP;
        limit = 0x3c00;
        all_seen = false;
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) reference[n][e] = 0.f, sum[n][e] = 0.f, seen[n][e] = false;
    }
    /// Any lane's answer counts. `largest_weight` and `largest_scale`: float16 bits.
    DEVICE bool must_move(u32 largest_weight, u32 largest_scale) const {
        return !all_seen || largest_weight > u32(top + 15) << 10 || largest_scale > limit;
    }
    /// Moves the references so that the columns' best weights are 2**(top - DROP); `down` is what to subtract from
    /// scores, `factor` what to multiply sums by. Lanes whose numbers agree below FIRST share their columns.
    template <int FIRST = 4>
    DEVICE void move(const float (&best)[NT][2], u32 largest_scale, float (&down)[NT][2], float (&factor)[NT][2]) {
        largest_scale = __reduce_max_sync(ALL_LANES, largest_scale);
        if (largest_scale > limit) {
            int exponent = min(int(largest_scale + 0x3ff) >> 10, 30);  // rounded up; 30 is 2**15, the largest power
            limit = exponent << 10;
            top = TOP - (exponent - 15);
        }
        all_seen = true;
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) {
                float b = best[n][e];
                for (int mask = FIRST; mask < 32; mask *= 2) b = fmaxf(b, __shfl_xor_sync(ALL_LANES, b, mask));
                bool moves = b != negative_infinity() && (b > top - DROP || !seen[n][e]);
                down[n][e] = moves ? b - (top - DROP) : 0.f;
                // a first reference may lie far below 0; the sums are 0 then
                factor[n][e] = exp2_approx(fminf(-down[n][e], 126.f));
                reference[n][e] += down[n][e];
                sum[n][e] *= factor[n][e];
                seen[n][e] |= moves;
                all_seen &= seen[n][e];
            }
        all_seen = __all_sync(ALL_LANES, all_seen);
    }
};

/// Scores of a step as weights: p[i][n] packs columns 2c, 2c + 1. Returns the largest, as float16 bits.
template <int TOKENS, class Pack>
DEVICE u32 weigh(float (&w)[TOKENS][NT][2], u32 (&packed)[TOKENS][NT], const float (&s)[TOKENS][NT][2], Pack pack) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            for (int e = 0; e < 2; ++e) w[i][n][e] = exp2_approx(s[i][n][e]);
            packed[i][n] = pack(w[i][n][0], w[i][n][1]);
            largest = max_f16x2(largest, packed[i][n]);
        }
    return max(largest & 0xffffu, largest >> 16);
}

/// Highest score of each column among this lane's tokens.
template <int TOKENS>
DEVICE void highest(float (&best)[NT][2], const float (&s)[TOKENS][NT][2]) {
    for (int n = 0; n < NT; ++n)
        for (int e = 0; e < 2; ++e) {
            best[n][e] = negative_infinity();
            for (int i = 0; i < TOKENS; ++i) best[n][e] = fmaxf(best[n][e], s[i][n][e]);
        }
}
