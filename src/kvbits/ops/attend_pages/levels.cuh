// What a block shares to read codes as levels: tables of pairs, turned scales, and the turns of a page's start. See levels_walk.cuh for their use.
#pragma once
#include "columns.cuh"
#include "turn.cuh"

constexpr int HALF = D / 2;                                    // channel pairs (d, d + HALF)
constexpr int K_BITS = K_BITS0 + K_BITS1, V_BITS = V_BITS0 + V_BITS1;
constexpr int STEPS = D / 32;                                  // words of eight codes of a key token that a lane reads
constexpr int TABLE_ROWS = (K_BITS > V_BITS ? K_BITS : V_BITS) == 4 ? 256 : K_BITS == 3 || V_BITS == 3 ? 0x78 : 0x34;
static_assert(COLS == 8 && CHUNK == 64, "one column tile, pages of 64 tokens");

/// Channel pair of code k of a lane's word i (lane % 4 = c): codes of four bits lie side by side; narrower rows hold each byte's codes a quarter row apart.
DEVICE int pair_of(int i, int c, int k) { return K_BITS == 4 ? 16 * i + 4 * c + k : i % 2 * (D / 4) + 16 * (i / 2) + 4 * c + k; }

/// Shared by all warps of a block; one head's.
struct Levels {
    u32 table[TABLE_ROWS][2][32];   // [byte of two codes][keys, values][lane]: their levels as float16 pairs. A lane reads its own bank: no conflicts.
    uint4 turn[2][STEPS][2][32];    // [token >= 32][word][two codes][lane]: (cos, sin), (-sin, cos) of each pair's angle at token 4g (+ 32)
    uint2 scale[K_SCALE == SCALE_CHANNEL ? WARPS : 1][HALF];  // scales and biases of pairs in the order of a lane's words: of the warp's page, or of the head
    uint2 step[HALF];               // in the order of a lane's words: (cos, -sin), (sin, cos) of one token's angle
    uint2 page[WARPS][HALF];        // the same of the page's first position
    float2 turns[HALF];             // of channel d
    uint4 queries[STEPS][32];       // [word][lane]: four pairs of column lane / 4, times a power of two
    float2 q[HALF][COLS];           // (q_d, q_d + HALF), times the factor of the scores
    int head;
};

/// Level of a code as the words of `codes_of` hold it: three-bit codes with their lowest bit above the others.
template <int BITS>
DEVICE int code_of(int nibble) { return BITS == 3 ? (nibble & 3) * 2 + (nibble >> 2 & 1) : nibble & ((1 << BITS) - 1); }

/// A word of four bytes, each the codes of a channel pair in its two halves: of the first (h = 0) or second quarter of the row's channels.
template <int BITS>
DEVICE u32 codes_of(u32 word, u32 low, int h) {
    if (BITS == 4) return word;
    u32 high = (h ? word >> 2 : word) & 0x33333333u;
    if (BITS == 2) return high;
    return high | (h ? low & 0x44444444u : (low & 0x11111111u) << 2);
}

DEVICE u32 level_pair(const Levels& shared, u32 codes, int byte, u32 lane_byte, int side) {
    u32 at = permute_bytes(codes, lane_byte, 0x5504 | byte << 4);  // code byte * 256 + lane * 4
    return *reinterpret_cast<const u32*>(reinterpret_cast<const unsigned char*>(shared.table) + at + side * 128);
}

/// (cos, -sin), (sin, cos): what a query is turned back with.
DEVICE uint2 turning_back(float2 t) { return {pack_f16(t.x, -t.y), pack_f16(t.y, t.x)}; }
DEVICE u32 turn_back(u32 q, uint2 t) { return high_fma(q, t.y, low_mul(q, t.x)); }

/// Exponent of the power of two that keys up to `largest` are divided by: they come under 2**9, so float16 holds them stretched up to 90 times.
DEVICE int key_exponent(float largest) { return largest > 1e-30f ? exponent_of(largest) + 1 - 9 : 0; }

/// One channel's calibrated scale and bias.
struct CalibratedScales {
    const float *scale, *bias;
    DEVICE float scale_of(int ch) const { return scale[ch]; }
    DEVICE float bias_of(int ch) const { return bias ? bias[ch] : 0.f; }
};
/// Those of a page.
struct PageScales {
    const unsigned char* page;
    DEVICE float scale_of(int ch) const { return f16_to_float(reinterpret_cast<const u16*>(page + K_SCALE_OFFSET)[ch]); }
    DEVICE float bias_of(int ch) const { return K_HAS_BIAS ? f16_to_float(reinterpret_cast<const u16*>(page + K_BIAS_OFFSET)[ch]) : 0.f; }
};
/// Writes pairs of scales and biases divided by a power of two; returns its exponent. One warp.
template <class Scales>
DEVICE int pair_scales(uint2* to, const Scales& from, float largest_level, int lane) {
    float m = 0.f;
#pragma unroll
    for (int ch = lane; ch < D; ch += 32) m = fmaxf(m, fabsf(from.scale_of(ch)) * largest_level + fabsf(from.bias_of(ch)));
    const int exponent = key_exponent(__uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(m))));
    m = power_of_two(-exponent);
#pragma unroll
    for (int i = lane; i < HALF; i += 32) {
        const int d = pair_of(i / 16, i / 4 % 4, i % 4);
        to[i] = {pack_f16(from.scale_of(d) * m, from.scale_of(d + HALF) * m), pack_f16(from.bias_of(d) * m, from.bias_of(d + HALF) * m)};
    }
    return exponent;
}

/// Asks for what `share_levels` will read; lane `lane` of `lanes`.
DEVICE void prefetch_levels(const Part& part, int head, int lane, int lanes) {
    for (int ch = lane * 32; ch < D; ch += lanes * 32) {
        if (part.k_scale) prefetch_l1(part.k_scale + i64(head) * D + ch);
        if (part.k_bias) prefetch_l1(part.k_bias + i64(head) * D + ch);
        prefetch_l1(part.turns + ch / 2);
    }
    if (lane == 0) prefetch_l1(part.k_level + (head << K_BITS));
    if (lane == lanes - 1) prefetch_l1(part.v_level + (head << V_BITS));
}

/// Fills what belongs to a head. All consumer threads call it.
DEVICE void share_levels(Levels& shared, const Part& part, int head, int thread) {
    if (shared.head == head) return;  // written before the last barrier of the segment before
    const float *k_level = part.k_level + (head << K_BITS), *v_level = part.v_level + (head << V_BITS);
#pragma unroll 1
    for (int i = thread; i < TABLE_ROWS * 16; i += CONSUMERS) {
        int byte = i / 16, side = i / 8 % 2;
        int low = side ? code_of<V_BITS>(byte & 15) : code_of<K_BITS>(byte & 15), high = side ? code_of<V_BITS>(byte >> 4) : code_of<K_BITS>(byte >> 4);
        const float* level = side ? v_level : k_level;
        u32 pair = pack_f16(level[low], level[high]);
        *reinterpret_cast<uint4*>(&shared.table[byte][side][i % 8 * 4]) = {pair, pair, pair, pair};
    }
#pragma unroll 1
    for (int i = thread; i < 2 * STEPS * 4 * 32; i += CONSUMERS) {
        int lane = i % 32, k = i / 32 % 4, word = i / 128 % STEPS, late = i / (128 * STEPS);
        float2 t = turn_of(4 * (lane / 4) + 32 * late, part.turns[pair_of(word, lane % 4, k)]);
        reinterpret_cast<uint2*>(&shared.turn[late][word][k / 2][lane])[k % 2] = {pack_f16(t.x, t.y), pack_f16(-t.y, t.x)};
    }
#pragma unroll 1
    for (int i = thread; i < HALF; i += CONSUMERS) {
        shared.turns[i] = part.turns[i];
        shared.step[i] = turning_back(turn_of(1, part.turns[pair_of(i / 16, i / 4 % 4, i % 4)]));
    }
}
