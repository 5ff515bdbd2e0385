// What a block shares to read codes as levels: tables of pairs, turned scales, turned queries. See codebook_walk.cuh
// for their use.
#pragma once
#include "columns.cuh"
#include "turn.cuh"

constexpr int HALF = D / 2;                                    // channel pairs (d, d + HALF)
constexpr int K_BITS = K_BITS0 + K_BITS1, V_BITS = V_BITS0 + V_BITS1;
constexpr int STEPS = D / 32;                                  // words of eight codes of a key token that a lane reads
constexpr int TABLE_ROWS = WIDE_TABLE || K_BITS == 4 || V_BITS == 4 ? 256 : K_BITS == 3 || V_BITS == 3 ? 0x78 : 0x34;
constexpr bool QUADS = WIDE_TABLE && K_BITS == 2 && V_BITS == 2;  // a look-up gives the four codes of a byte
// at most four query columns: the other four of a matrix instruction take a second kind of work
constexpr bool FOLD = FOLDED;
// turns of a lane's key rows that are left when the query has been turned
constexpr int TURNS = FOLD ? 1 : 2;
constexpr int TOKENS = FOLD ? 4 : 8;                           // of a lane
static_assert(COLS == 8 && CHUNK == 64, "one column tile, pages of 64 tokens");

/// Token and column of a lane's i-th score of column e (lane = 4g + c).
DEVICE int token_of(int i, int g, int c) { return FOLD ? 8 * g + 4 * (c / 2) + i : i / 4 * 32 + 4 * g + i % 4; }
DEVICE int column_of(int e, int c) { return FOLD ? 2 * (c % 2) + e : 2 * c + e; }
DEVICE u32 element(const uint4& w, int j) { return j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w; }

/// Channel pair of code k of a lane's word i (lane % 4 = c): codes of four bits lie side by side; narrower rows hold
/// each byte's codes a quarter row apart.
DEVICE int pair_of(int i, int c, int k) {
    return K_BITS == 4 ? 16 * i + 4 * c + k : i % 2 * (D / 4) + 16 * (i / 2) + 4 * c + k;
}
/// Where that pair stands in the order of all lanes' words; neighbours in pairs stay neighbours.
DEVICE int order_of(int pair) {
    if (K_BITS == 4) return pair;
    const int r = pair % (D / 4);
    return (r / 16 * 2 + pair / (D / 4)) * 16 + r % 16;
}

/// Shared by all warps of a block; one head's.
struct Tables {
    // [byte of two codes][keys, values][lane]: their levels as float16 pairs. A lane reads its own bank: no conflicts.
    u32 table[TABLE_ROWS][2][32];
    // With QUADS [byte of four codes][keys, values][lane % 16][channels of the first, second quarter].
    // [row of the lane][word][two codes][lane]: (cos, sin), (-sin, cos) of each pair's angle at the row's first token
    uint4 turn[TURNS][STEPS][2][32];
    // [m][word][lane]: four pairs of column lane / 4 turned back by m tokens (see CodebookWalk), times a power of two
    uint4 queries[4][STEPS][32];
    // calibrated scales and biases of pairs in the order of a lane's words
    uint2 scale[K_SCALE == SCALE_CHANNEL ? 1 : HALF];
    float2 ordered_turns[HALF];     // turns in that order
    float2 turns[HALF];             // of channel d
    // [d][four columns]: (q_d, q_d + HALF) of each column, times a power of two
    uint4 q[K_OUTLIERS ? HALF : 1][FOLD ? 1 : 2];
    int head;
};

/// A warp's, of the page whose scores it takes; in memory that it needs for other things before and after.
struct PageTables {
    // (cos, sin) of the angles at the page's first position, in the order of a lane's words
    u32 turn[HALF];
    // scales and biases of pairs in that order, where they are the page's own
    uint2 scale[K_SCALE == SCALE_CHANNEL ? HALF : 1];
};

/// Level of a code as the words of `codes_of` hold it: three-bit codes with their lowest bit above the others.
template <int BITS>
DEVICE int code_of(int nibble) { return BITS == 3 ? (nibble & 3) * 2 + (nibble >> 2 & 1) : nibble & ((1 << BITS) - 1); }

/// A word of four bytes, each the codes of a channel pair in its two halves: of the first (h = 0) or second quarter of
/// the row's channels. by: how far the bits of `low` are shifted. Bits past a code's do no harm in a table of all
/// bytes.
template <int BITS>
DEVICE u32 codes_of(u32 word, u32 low, int by, int h) {
    if (BITS == 4) return word;
    if (BITS == 3 && WIDE_TABLE)
        return ((h ? word >> 2 : word) & 0x33333333u) | ((h ? low >> by : low << (2 - by)) & 0xccccccccu);
    low >>= by;
    u32 high = (h ? word >> 2 : word) & 0x33333333u;
    if (BITS == 2) return high;
    return high | (h ? low & 0x44444444u : (low & 0x11111111u) << 2);
}

/// The table is where shared memory starts, at an address that the compiler knows: one byte permutation makes all of a
/// look-up's address.
template <int SIDE>
DEVICE u32 level_pair(u32 codes, int byte, u32 lane_byte) {
    // code byte * 256 + lane * 4
    return load_shared_at<SHARED_START + SIDE * 128>(permute_bytes(codes, lane_byte, 0x5504 | byte << 4));
}

/// With QUADS: of channels of the first (H = 0) or second quarter.
template <int SIDE, int H>
DEVICE u32 half_quad(u32 codes, int byte, u32 lane_byte) {
    return load_shared_at<SHARED_START + SIDE * 128 + 4 * H>(permute_bytes(codes, lane_byte, 0x5504 | byte << 4));
}
template <int SIDE>
DEVICE uint2 level_quad(u32 codes, int byte, u32 lane_byte) {
    return load_shared2_at<SHARED_START + SIDE * 128>(permute_bytes(codes, lane_byte, 0x5504 | byte << 4));
}

/// What a pair of levels is multiplied by, and what is added, to become the key turned to its token: first * (x, x) +
/// second * (y, y) + offset.
struct Turned {
    u32 first, second, offset;

    /// page: (cos, sin) of the page's angle; left: (cos, sin), (-sin, cos) of the row's; scale: scales and biases of
    /// the pair.
    DEVICE void start(u32 page, uint2 left, uint2 scale) {
        const u32 along = high_fma(page, left.y, low_mul(page, left.x)),
                  across = high_fnma(page, left.x, low_mul(page, left.y));
        first = low_mul(scale.x, along);
        second = high_mul(scale.x, across);
        offset = high_fma(scale.y, across, low_mul(scale.y, along));
    }
    DEVICE u32 key(u32 level) const { return high_fma(level, second, low_fma(level, first, offset)); }
};

/// Exponent of the power of two that keys up to `largest` are divided by: they come under 2**9, so float16 holds them
/// stretched up to 90 times.
constexpr u32 KEY_LIMIT = 0x6000;  // 2**9
DEVICE int key_exponent(float largest) { return largest > 1e-30f ? max(exponent_of(largest) + 1 - 9, -15) : 0; }

/// Writes a head's pairs of calibrated scales and biases divided by a power of two; returns its exponent. One warp.
DEVICE int pair_scales(uint2* to, const float* scale, const float* bias, float largest_level, int lane) {
    float m = 0.f;
#pragma unroll
    for (int ch = lane; ch < D; ch += 32)
        m = fmaxf(m, fabsf(scale[ch]) * largest_level + (bias ? fabsf(bias[ch]) : 0.f));
    const int exponent = key_exponent(__uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(m))));
    m = power_of_two(-exponent);
#pragma unroll
    for (int d = lane; d < HALF; d += 32)
        to[order_of(d)] = {pack_f16(scale[d] * m, scale[d + HALF] * m),
                           bias ? pack_f16(bias[d] * m, bias[d + HALF] * m) : 0};
    return exponent;
}

/// Scales and biases of two pairs of neighbouring channels of a page, as words of float16 pairs.
struct PageScales {
    u32 scale[2], bias[2];       // channels (d, d + 1), (d + HALF, d + HALF + 1)

    DEVICE PageScales(const unsigned char* slot, int i) {
        const u32 *s = reinterpret_cast<const u32*>(slot + K_SCALE_OFFSET),
                  *b = reinterpret_cast<const u32*>(slot + K_BIAS_OFFSET);
#pragma unroll
        for (int side = 0; side < 2; ++side)
            scale[side] = s[i + side * (HALF / 2)], bias[side] = K_HAS_BIAS ? b[i + side * (HALF / 2)] : 0;
    }
    DEVICE void multiply(u32 m) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            scale[side] = mul_f16x2(scale[side], m);
            if (K_HAS_BIAS) bias[side] = mul_f16x2(bias[side], m);
        }
    }
    /// Largest |key|, as float16 bits; infinity where float16 ends.
    DEVICE u32 largest(u32 largest_level) const {
        u32 x = max_f16x2(fma_f16x2(scale[0], largest_level, bias[0] & 0x7fff7fffu),
                          fma_f16x2(scale[1], largest_level, bias[1] & 0x7fff7fffu));
        return max(x & 0xffffu, x >> 16);
    }
    DEVICE float largest_float(float largest_level) const {
        float m = 0.f;
#pragma unroll
        for (int side = 0; side < 2; ++side)
            m = fmaxf(m, fmaxf(low_f16(scale[side]) * largest_level + fabsf(low_f16(bias[side])),
                               high_f16(scale[side]) * largest_level + fabsf(high_f16(bias[side]))));
        return m;
    }
    /// The two pairs as `Tables::scale` has them.
    DEVICE uint4 pairs() const {
        return {permute_bytes(scale[0], scale[1], 0x5410), permute_bytes(bias[0], bias[1], 0x5410),
                permute_bytes(scale[0], scale[1], 0x7632), permute_bytes(bias[0], bias[1], 0x7632)};
    }
};

/// Asks for what `share_tables` will read; lane `lane` of `lanes`.
DEVICE void prefetch_codebook(const Part& part, int head, int lane, int lanes) {
    for (int ch = lane * 32; ch < D; ch += lanes * 32) {
        if (part.k_scale) prefetch_l1(part.k_scale + i64(head) * D + ch);
        if (part.k_bias) prefetch_l1(part.k_bias + i64(head) * D + ch);
        prefetch_l1(part.turns + ch / 2);
    }
    if (lane == 0) prefetch_l1(part.k_level + (head << K_BITS));
    if (lane == lanes - 1) prefetch_l1(part.v_level + (head << V_BITS));
}

/// Fills what belongs to a head. All consumer threads call it.
DEVICE void share_tables(Tables& shared, const Part& part, int head, int thread) {
    if (shared.head == head) return;  // written before the last barrier of the segment before
    const float *k_level = part.k_level + (head << K_BITS), *v_level = part.v_level + (head << V_BITS);
    const int lane = thread % 32;
#pragma unroll 1
    // a lane makes a row's pair, all lanes write it
    for (int first = thread - lane; first < TABLE_ROWS * 2; first += CONSUMERS) {
        const int byte = min(first + lane, TABLE_ROWS * 2 - 1) / 2, side = lane % 2;
        const float* level = side ? v_level : k_level;
        int low = side ? code_of<V_BITS>(byte & 15) : code_of<K_BITS>(byte & 15),
            high = side ? code_of<V_BITS>(byte >> 4) : code_of<K_BITS>(byte >> 4);
        if (QUADS) low = byte & 3, high = byte >> 4 & 3;
        const u32 pair = pack_f16(level[low], level[high]),
                  second = QUADS ? pack_f16(level[byte >> 2 & 3], level[byte >> 6]) : 0;
        u32* to = shared.table[0][0] + first * 32 + lane;
#pragma unroll
        for (int row = 0; row < 32; ++row) {
            u32 x = __shfl_sync(ALL_LANES, pair, row);
            if (QUADS) {
                const u32 y = __shfl_sync(ALL_LANES, second, row);
                x = lane % 2 ? y : x;
            }
            if (first + row < TABLE_ROWS * 2) to[row * 32] = x;
        }
    }
#pragma unroll 1
    for (int i = thread; i < TURNS * STEPS * 4 * 32; i += CONSUMERS) {
        int lane = i % 32, k = i / 32 % 4, word = i / 128 % STEPS, row = i / (128 * STEPS);
        float2 t = turn_of(FOLD ? 8 * (lane / 4) : 4 * (lane / 4) + 32 * row, part.turns[pair_of(word, lane % 4, k)]);
        reinterpret_cast<uint2*>(&shared.turn[row][word][k / 2][lane])[k % 2] = {pack_f16(t.x, t.y),
                                                                                 pack_f16(-t.y, t.x)};
    }
#pragma unroll 1
    for (int i = thread; i < HALF; i += CONSUMERS) {
        shared.turns[i] = part.turns[i];
        shared.ordered_turns[i] = part.turns[pair_of(i / 16, i / 4 % 4, i % 4)];
    }
}
