// The query columns of a warp: which query token and head each is, what it may see, and its running softmax.
#pragma once
#include "config.cuh"

struct Unit { int batch, head, block; };

DEVICE Unit unit_of(const Args& a, int unit) {
    int row = unit / a.column_blocks;
    return {row / a.num_kv_heads, row % a.num_kv_heads, unit % a.column_blocks};
}

/// Query element of column `col` of the unit at channel `ch`; 0 past the last column or channel. `ch` is a multiple of 4.
DEVICE float4 load_q4(const Args& a, Unit u, int col, int ch) {
    int index = u.block * COLS + col;
    if (index >= a.num_queries * a.group || ch >= D) return {0.f, 0.f, 0.f, 0.f};
    i64 offset = u.batch * a.q_stride_b + (index / a.group) * a.q_stride_t + (u.head * a.group + index % a.group) * a.q_stride_h + ch;
    uint2 w = *reinterpret_cast<const uint2*>(static_cast<const u16*>(a.q) + offset);
    if (Q_TYPE == BFLOAT16) return {bf16_to_float(u16(w.x)), bf16_to_float(u16(w.x >> 16)), bf16_to_float(u16(w.y)), bf16_to_float(u16(w.y >> 16))};
    return {low_f16(w.x), high_f16(w.x), low_f16(w.y), high_f16(w.y)};
}

/// What the two columns 2c, 2c + 1 (+ 8) of a lane may see, and what every column of the warp sees for sure.
struct Visible {
    int last[NT][2];             // newest visible position, -1 for padding
    int all_from, all_to;        // positions every valid column sees: all_from <= p <= all_to

    DEVICE void load(const Args& a, Unit u, int c) {
        all_from = 0;
        all_to = 0x7fffffff;
        for (int col = 0; col < COLS; ++col) {
            int p = position(a, u, col);
            if (p == 0x7fffffff) continue;
            all_to = min(all_to, p);
            all_from = max(all_from, p - a.window + 1);
        }
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) last[n][e] = position(a, u, n * 8 + 2 * c + e);
    }
    /// Columns past the last see everything: they cost no mask and are never written.
    static DEVICE int position(const Args& a, Unit u, int col) {
        int index = u.block * COLS + col;
        return index < a.num_queries * a.group ? a.q_positions[u.batch * a.num_queries + index / a.group] : 0x7fffffff;
    }
    DEVICE bool hides(const Args& a, int n, int e, int position) const { return position > last[n][e] || position <= last[n][e] - a.window; }
};

/// Online softmax in powers of two. Scores arrive as exponents relative to `reference`, which moves only when a score passes it by TOP: weights then
/// stay in [0, 2**TOP], inside float16, and most tiles pay one vote instead of shuffles and a rescale.
struct Softmax {
    static constexpr float TOP = 14.f, AIM = 4.f;
    float reference[NT][2];
    float sum[NT][2];            // this lane's tokens only
    bool seen[NT][2];            // alike in all lanes of a column

    DEVICE void clear() {
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) reference[n][e] = 0.f, sum[n][e] = 0.f, seen[n][e] = false;
    }
    DEVICE bool must_move(const float (&best)[NT][2]) const {
        bool move = false;
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) move |= best[n][e] > TOP || (!seen[n][e] && best[n][e] != negative_infinity());
        return move;
    }
    /// Moves the references up to the columns' maxima; `down` is what to subtract from scores, `factor` what to multiply sums by.
    DEVICE void move(float (&best)[NT][2], float (&down)[NT][2], float (&factor)[NT][2]) {
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) {
                float b = best[n][e];
                for (int mask = 4; mask < 32; mask *= 2) b = fmaxf(b, __shfl_xor_sync(ALL_LANES, b, mask));
                bool moves = b != negative_infinity() && (b > AIM || !seen[n][e]);
                down[n][e] = moves ? b - AIM : 0.f;
                factor[n][e] = exp2_approx(fminf(-down[n][e], 126.f));  // a first reference may lie far below 0; the sums are 0 then
                reference[n][e] += down[n][e];
                sum[n][e] *= factor[n][e];
                seen[n][e] |= moves;
            }
    }
};
