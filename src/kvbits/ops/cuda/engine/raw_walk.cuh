// 16-bit pages (sinks, newest tokens, raw layers): up to 32 tokens per step, straight from memory into operand
// registers, or from the ring (packed_raw.cuh).
//
// Lane (g, c) holds, for 8 E tokens, the scores of tokens E g .. E g + E - 1, so that keys need 16-byte loads of E rows
// and values 2 E. E = 4 is the packed pages' own order (docs/reference/formats.md); where a chunk is of fewer tokens,
// because a slot of the ring has room for no more, a step takes as much less. Loads past the visible length give 0:
// such memory may hold anything, NaN included.
#pragma once
#include "segments.cuh"

constexpr int RAW_STEPS = (D + 31) / 32;   // 16-byte loads of a key row by four lanes
// key loads in flight per row: registers allow no more
constexpr int RAW_LOADS = RAW_STEPS % 4 == 0 && D * COLS <= 1024 && WARPS <= 7 ? 4
                          : D * COLS <= 1024 && WARPS <= 7                     ? 2
                                                                               : 1;
constexpr int RAW_HALVES = (DV + 63) / 64;  // 16-byte loads of a value row by eight lanes

/// Eight channels of a row that is visible, else zeros: rows past the visible length may hold anything, NaN included.
struct RowsInMemory {
    static constexpr int E = 4;
    i64 keys, values;            // a lane's first rows and channels
    int visible;

    DEVICE RowsInMemory(i64 keys, i64 values, int visible, int g, int c)
        : keys(keys + (4 * g * D + 8 * c) * 2), values(values + (8 * c * DV + 8 * g) * 2), visible(visible) {}
    DEVICE uint4 key(int j, int i, int g, int c) const {
        return load_global_once(keys + (j * D + 32 * i) * 2, 4 * g + j < visible && 32 * i + 8 * c < D);
    }
    DEVICE uint4 value(int token, int h, int g, int c) const {
        return load_global_once(values + (token * DV + 64 * h) * 2, 8 * c + token < visible && 64 * h + 8 * g < DV);
    }
};

DEVICE void mma_raw(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (RAW_TYPE == BFLOAT16) mma_bf16(d, a0, a1, a2, a3, b0, b1);
    else mma_f16(d, a0, a1, a2, a3, b0, b1);
}
DEVICE u32 pack_raw(float low, float high) { return RAW_TYPE == BFLOAT16 ? pack_bf16(low, high) : pack_f16(low, high); }

struct RawWalk {
    static constexpr int ROUNDS = 2 * RAW_HALVES, FIRST_PLANE_ROUNDS = ROUNDS;
    static constexpr bool HELD = NT * D <= 256;  // larger queries stay in shared memory: registers are full
    u32 q[HELD ? NT : 1][HELD ? RAW_STEPS : 1][4];
    float o[NT][RAW_HALVES][4][4];  // [half of 64 channels][pair of channels]
    float factor;

    DEVICE void start(const Args& a, const QueryRows& rows, int c) {
        for (int n = 0; n < NT && HELD; ++n)
            for (int i = 0; i < RAW_STEPS; ++i) load_q(q[n][i], rows, n, 32 * i + 8 * c);
        for (int n = 0; n < NT; ++n)
            for (int h = 0; h < RAW_HALVES; ++h)
                for (int k = 0; k < 4; ++k)
                    for (int r = 0; r < 4; ++r) o[n][h][k][r] = 0.f;
        factor = SOFTCAP ? a.scaling / a.softcap : a.scaling * LOG2E;
    }

    static DEVICE void load_q(u32 (&to)[4], const QueryRows& rows, int n, int channel) {
        for (int half = 0; half < 2; ++half) {
            const float4 x = rows.four(n, channel + 4 * half, channel < D);
            to[2 * half] = pack_raw(x.x, x.y);
            to[2 * half + 1] = pack_raw(x.z, x.w);
        }
    }

    /// Weights of tokens 0 .. 8 E - 1 of `rows`, of which rows.visible are, the first at `position`: p[n][j] of tokens
    /// 2 E c + j and 2 E c + E + j of column 8n + g. `rescale` multiplies running outputs.
    template <class Rows, class Rescale>
    DEVICE void weights(u32 (&p)[NT][Rows::E], const Args& a, const QueryRows& queries, const Visible& see,
                        Softmax& softmax, Rows& rows, int position, int g, int c, Rescale rescale) const {
        constexpr int E = Rows::E;
        const int visible = rows.visible;
        float s[E][NT][2];
#pragma unroll
        for (int tile = 0; tile < (E + 1) / 2; ++tile) {
            float acc[NT][4];
            for (int n = 0; n < NT; ++n)
                for (int r = 0; r < 4; ++r) acc[n][r] = 0.f;
#pragma unroll
            for (int first = 0; first < RAW_STEPS; first += RAW_LOADS) {
                uint4 even[RAW_LOADS], odd[RAW_LOADS];
#pragma unroll
                for (int i = 0; i < RAW_LOADS; ++i) {
                    even[i] = rows.key(2 * tile, first + i, g, c);
                    odd[i] = E > 1 ? rows.key(2 * tile + 1, first + i, g, c) : uint4{0, 0, 0, 0};
                }
#pragma unroll
                for (int i = 0; i < RAW_LOADS; ++i)
                    for (int n = 0; n < NT && first + i < RAW_STEPS; ++n) {
                        u32 b[4];
                        if (HELD) for (int k = 0; k < 4; ++k) b[k] = q[HELD ? n : 0][HELD ? first + i : 0][k];
                        else load_q(b, queries, n, 32 * (first + i) + 8 * c);
                        mma_raw(acc[n], even[i].x, odd[i].x, even[i].y, odd[i].y, b[0], b[1]);
                        mma_raw(acc[n], even[i].z, odd[i].z, even[i].w, odd[i].w, b[2], b[3]);
                    }
            }
            for (int n = 0; n < NT; ++n)
                for (int r = 0; r < (E > 1 ? 4 : 2); ++r) s[2 * tile + r / 2][n][r % 2] = acc[n][r];
        }
#pragma unroll
        for (int j = 0; j < E; ++j)
            for (int n = 0; n < NT; ++n)
                for (int e = 0; e < 2; ++e) {
                    int token = E * g + j;
                    float x = s[j][n][e] * factor;
                    if (SOFTCAP) x = tanh_approx(x) * (a.softcap * LOG2E);
                    bool hidden = token >= visible || see.hides(a.window, n * 8 + 2 * c + e, position + token);
                    s[j][n][e] = hidden ? negative_infinity() : x - softmax.reference[n][e];
                }
        float best[NT][2];
        highest<E>(best, s);
        bool above = false;
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) above |= best[n][e] > softmax.top;
        if (__any_sync(ALL_LANES, above || !softmax.all_seen)) {
            float down[NT][2], scale[NT][2];
            softmax.move(best, 0, down, scale);
            for (int n = 0; n < NT; ++n)
                for (int j = 0; j < E; ++j)
                    for (int e = 0; e < 2; ++e) s[j][n][e] -= down[n][e];
            rescale(scale);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
            for (int j = 0; j < E; ++j) {
                float p0 = exp2_approx(s[j][n][0]), p1 = exp2_approx(s[j][n][1]);
                softmax.sum[n][0] += p0;
                softmax.sum[n][1] += p1;
                p[n][j] = transpose_8x8(pack_raw(p0, p1));
            }
    }

    template <class Rows>
    DEVICE void step(const Args& a, const QueryRows& queries, const Visible& see, Softmax& softmax, Rows rows,
                     int position, int g, int c) {
        constexpr int E = Rows::E;
        u32 p[NT][E];
        weights(p, a, queries, see, softmax, rows, position, g, c, [&](const float (&scale)[NT][2]) {
            for (int n = 0; n < NT; ++n)
                for (int h = 0; h < RAW_HALVES; ++h)
                    for (int k = 0; k < 4; ++k)
                        for (int r = 0; r < 4; ++r) o[n][h][k][r] *= scale[n][r % 2];
        });
#pragma unroll
        for (int h = 0; h < RAW_HALVES; ++h) {
#pragma unroll
            for (int j = 0; j < E; j += 2) {
                uint4 v[4];  // tokens j, j + E, j + 1, j + 1 + E
                for (int i = 0; i < 4; ++i) {
                    int token = j + i / 2 + i % 2 * E;
                    v[i] = i < 2 * E ? rows.value(token, h, g, c) : uint4{0, 0, 0, 0};
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 a0 = permute_bytes(word(v[0], k), word(v[1], k), 0x5410),
                        a1 = permute_bytes(word(v[0], k), word(v[1], k), 0x7632);
                    u32 a2 = permute_bytes(word(v[2], k), word(v[3], k), 0x5410),
                        a3 = permute_bytes(word(v[2], k), word(v[3], k), 0x7632);
                    for (int n = 0; n < NT; ++n)
                        mma_raw(o[n][h][k], a0, a1, a2, a3, p[n][j], j + 1 < E ? p[n][(j + 1) % E] : 0);
                }
            }
        }
    }
    static DEVICE u32 word(const uint4& v, int k) { return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w; }

    /// Four neighbouring channels of round `r` and column e: channels channel(r, 4g) .. + 3.
    DEVICE float4 result(int r, int n, int e) const {
        const auto& x = o[n][r / 2];
        int k = r % 2 * 2;
        return {x[k][e], x[k][2 + e], x[k + 1][e], x[k + 1][2 + e]};
    }
    static DEVICE int channel(int r, int x) { return r / 2 * 64 + x / 4 * 8 + r % 2 * 4 + x % 4; }
};

/// A result of raw parts of a unit alone: read(segment, step) calls step(rows, position of the first) for each of the
/// warp's chunks. Returns the block's next segment.
template <class Read>
DEVICE int walk_raw_parts(const Args& a, Unit u, Merge& merge, int warp, int lane, Read read) {
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    int g = lane / 4, c = lane % 4;
    stage_queries(staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    RawWalk walk;
    const QueryRows queries(a, staged, u, g);
    walk.start(a, queries, c);
    read(s, [&](const auto& rows, int position) { walk.step(a, queries, see, softmax, rows, position, g, c); });
    return finish_segment(a, walk, softmax, nullptr, DV, merge, warp, lane);
}

/// Reads a raw part of a unit whose pages stay where they lie. Returns the block's next segment.
DEVICE int walk_raw_in_memory(const Args& a, Unit u, Merge& merge, int warp, int lane) {
    return walk_raw_parts(a, u, merge, warp, lane, [&](const Segment& s, const auto& step) {
        const Part& part = a.parts[s.part];
        for (int k = warp; k < s.num_chunks; k += WARPS) {
            int chunk = s.first_chunk + k, entry = s.first_entry + chunk / part.chunks_per_page,
                token = chunk % part.chunks_per_page * 32;
            const Page found(a, s, entry);
            const i64 page = found.address + i64(token) * D * 2, to_values = D == DV ? 0 : i64(token) * (DV - D) * 2;
            const int2 tokens = found.tokens;
            if (tokens.y <= token) continue;
            step(RowsInMemory(page + part.k_raw, page + part.v_raw + to_values, tokens.y - token, lane / 4, lane % 4),
                 tokens.x + token);
        }
    });
}
