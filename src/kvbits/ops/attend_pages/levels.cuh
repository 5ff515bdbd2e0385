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
    uint4 turned[2][STEPS][4][32];  // [token >= 32][word][code][lane]: scale of d times (cos, sin), of its partner times (-sin, cos), the bias turned, at token 4g
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

/// Exponent that brings this head's keys under 2**9: float16 then holds them stretched up to 90 times.
DEVICE int key_exponent(const float* scale, const float* bias, float largest_level, int lane) {
    float m = 0.f;
#pragma unroll 1
    for (int ch = lane; ch < D; ch += 32) m = fmaxf(m, fabsf(scale[ch]) * largest_level + (bias ? fabsf(bias[ch]) : 0.f));
    for (int mask = 1; mask < 32; mask *= 2) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, mask));
    return m > 1e-30f ? exponent_of(m) + 1 - 9 : 0;
}

/// Asks for what `share_levels` will read; lane `lane` of `lanes`.
DEVICE void prefetch_levels(const Part& part, int head, int lane, int lanes) {
    for (int ch = lane * 32; ch < D; ch += lanes * 32) {
        prefetch_l1(part.k_scale + i64(head) * D + ch);
        if (part.k_bias) prefetch_l1(part.k_bias + i64(head) * D + ch);
        prefetch_l1(part.turns + ch / 2);
    }
    if (lane == 0) prefetch_l1(part.k_level + (head << K_BITS));
    if (lane == lanes - 1) prefetch_l1(part.v_level + (head << V_BITS));
}

/// Fills what belongs to a head; returns the exponent that its keys are divided by. All consumer threads call it.
DEVICE int share_levels(Levels& shared, const Part& part, int head, int thread) {
    const float *scale = part.k_scale + i64(head) * D, *bias = part.k_bias ? part.k_bias + i64(head) * D : nullptr;
    const float *k_level = part.k_level + (head << K_BITS), *v_level = part.v_level + (head << V_BITS);
    float largest = 0.f;
#pragma unroll 1
    for (int i = 0; i < 1 << K_BITS; ++i) largest = fmaxf(largest, fabsf(k_level[i]));
    const int exponent = key_exponent(scale, bias, largest, thread % 32);
    if (shared.head == head) return exponent;  // written before the last barrier of the segment before
#pragma unroll 1
    for (int i = thread; i < TABLE_ROWS * 16; i += CONSUMERS) {
        int byte = i / 16, side = i / 8 % 2;
        int low = side ? code_of<V_BITS>(byte & 15) : code_of<K_BITS>(byte & 15), high = side ? code_of<V_BITS>(byte >> 4) : code_of<K_BITS>(byte >> 4);
        const float* level = side ? v_level : k_level;
        u32 pair = pack_f16(level[low], level[high]);
        *reinterpret_cast<uint4*>(&shared.table[byte][side][i % 8 * 4]) = {pair, pair, pair, pair};
    }
    const float m = power_of_two(-exponent);
#pragma unroll 1
    for (int i = thread; i < 2 * STEPS * 4 * 32; i += CONSUMERS) {
        int lane = i % 32, k = i / 32 % 4, word = i / 128 % STEPS, late = i / (128 * STEPS), d = pair_of(word, lane % 4, k);
        float2 t = turn_of(4 * (lane / 4) + 32 * late, part.turns[d]);
        float s = scale[d] * m, s2 = scale[d + HALF] * m, b = bias ? bias[d] * m : 0.f, b2 = bias ? bias[d + HALF] * m : 0.f;
        shared.turned[late][word][k][lane] = {pack_f16(s * t.x, s * t.y), pack_f16(-s2 * t.y, s2 * t.x), pack_f16(b * t.x - b2 * t.y, b2 * t.x + b * t.y), 0};
    }
    for (int i = thread; i < HALF; i += CONSUMERS) {
        shared.turns[i] = part.turns[i];
        shared.step[i] = turning_back(turn_of(1, part.turns[pair_of(i / 16, i / 4 % 4, i % 4)]));
    }
    return exponent;
}
