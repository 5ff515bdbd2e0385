// Packed pages in shared memory: 32 or 64 tokens per step, codes used as matrix operands with one AND.
//
// A code masked out of a 32-bit word, (w >> 8 * odd) & (mask << bits * field), is a pair of SUBNORMAL float16 numbers code * 2**(bits * field - 24),
// which the matrix units multiply exactly. So unpacking is one instruction per pair; the factors go elsewhere: for keys the field's 2**-(bits * field)
// into q, for values into the end result; 2**24 into the score's factor; and the codes' zero point becomes a starting value of the scores
// (zero * sum(q), exact) and one correction per step for the outputs (zero * sum of the weights, which another matrix instruction gives).
// The correction is applied at every step, before the values are added: the running output then stays as small as the result, while a correction
// at the end would subtract two large sums whose roundings (toward zero, in the matrix units) do not cancel.
//
// A 3-bit code lies in a 2-bit and a 1-bit plane. Where a token's bytes in the second are half of those in the first (head_dim a multiple of 32), field f of
// byte r there is field 2 f of the second plane's byte r, or field 2 f + 1 of byte r - LOW_ROW. Two bitwise selections join words of both planes to one of
// fields 0 and 2 and one of fields 1 and 3, at bits 1 and 5 of every byte, and there is one walk, over 3-bit fields. Elsewhere each plane has its own.
#pragma once
#include "columns.cuh"

constexpr u32 WORD_ONES = 0x3c003c00u;  // (1, 1) in float16

template <int BITS_, int PLANE_OFFSET, int LOW_BITS_, int LOW_OFFSET_ = 0>
struct Plane {
    static constexpr int BITS = BITS_, OFFSET = PLANE_OFFSET, LOW_BITS = LOW_BITS_;  // LOW_BITS: bits of the code in later planes
    static constexpr int LOW_OFFSET = LOW_OFFSET_;             // of the plane joined to this one
    static constexpr bool JOINED = LOW_OFFSET > 0;
    static constexpr int FIELDS = 8 / BITS;
    static constexpr int ROW = (D * BITS + 31) / 32 * 4;       // bytes of one token
    static constexpr int WORDS = ROW / 4;
    static constexpr int STEPS = (WORDS + 3) / 4;              // 16-byte column steps of a key row
    static constexpr int BLOCKS = (ROW + 15) / 16;             // value blocks
    static constexpr int PAIRS = (BLOCKS + 1) / 2;             // of value blocks: 32 byte positions
    static constexpr int ROUNDS = FIELDS * PAIRS;
    static constexpr int LOW_ROW = ROW / 2;                    // bytes of one token in the joined plane

    /// A field's operands are codes times 2**exponent.
    static constexpr int exponent(int field) { return JOINED ? 1 + field / 2 * 4 : BITS * field - LOW_BITS; }
    /// The operand of a code alike in all channels.
    static DEVICE u32 constant(u32 code, int field) {
        if (JOINED) return code * 0x00010001u << exponent(field);
        return ((code >> LOW_BITS) & ((1u << BITS) - 1)) * 0x00010001u << BITS * field;
    }
};

template <int FLOAT, int BITS>
DEVICE u32 operand(u32 even, u32 odd, int is_odd, int field) {
    if (FLOAT == E5M2) return (is_odd ? odd : even << 8) & 0xff00ff00u;
    if (FLOAT == E4M3) {
        u32 x = is_odd ? odd : even << 8;
        return ((x >> 1) & 0x3f803f80u) | (x & 0x80008000u);  // value * 2**-8
    }
    if (BITS == 8) return is_odd ? permute_bytes(odd, 0, 0x4341) : even & 0x00ff00ffu;
    return (is_odd ? odd : even) & (((1u << BITS) - 1) * 0x00010001u << BITS * field);
}
/// The byte-shifted word that `operand` wants for odd bytes.
template <int FLOAT, int BITS>
DEVICE u32 odd_bytes(u32 w) { return FLOAT == INTEGER && BITS < 8 ? w >> 8 : w; }

/// A word of codes and what to mask its operands out of: with joined planes two words, of even and of odd fields.
template <class CodePlane, int FLOAT>
struct Fields {
    static constexpr bool JOINED = CodePlane::JOINED;
    static constexpr int WORDS = JOINED ? 2 : 1;
    u32 even[WORDS], odd[WORDS];

    /// low: the joined plane's word of these bytes; second: they are in the row's second half.
    DEVICE Fields(u32 w, u32 low = 0, int second = 0) {
        even[0] = JOINED ? select_bits(0xccccccccu, w << 2, low * (2 - second)) : w;  // a product goes to another pipe than shifts
        if (JOINED) even[WORDS - 1] = select_bits(0xccccccccu, w, low >> (1 + second));
        for (int k = 0; k < WORDS; ++k) odd[k] = odd_bytes<FLOAT, CodePlane::BITS>(even[k]);
    }
    DEVICE u32 operand(int is_odd, int field) const {
        if (JOINED) return (is_odd ? odd : even)[field % WORDS] & (0x00070007u << CodePlane::exponent(field));
        return ::operand<FLOAT, CodePlane::BITS>(even[0], odd[0], is_odd, field);
    }
};

constexpr int operand_exponent(int is_float) { return is_float == INTEGER ? 24 : is_float == E4M3 ? 8 : 0; }

template <int TYPE>
DEVICE void load_scales4(float (&s)[4], const unsigned char* section, int index) {
    if (TYPE == FLOAT32) {
        float4 w = *reinterpret_cast<const float4*>(section + index * 4);
        s[0] = w.x; s[1] = w.y; s[2] = w.z; s[3] = w.w;
        return;
    }
    uint2 w = *reinterpret_cast<const uint2*>(section + index * 2);
    if (TYPE == FLOAT16) { s[0] = low_f16(w.x); s[1] = high_f16(w.x); s[2] = low_f16(w.y); s[3] = high_f16(w.y); }
    else { s[0] = bf16_to_float(u16(w.x)); s[1] = bf16_to_float(u16(w.x >> 16)); s[2] = bf16_to_float(u16(w.y)); s[3] = bf16_to_float(u16(w.y >> 16)); }
}

/// float16 pairs (0, 4), (1, 5), (2, 6), (3, 7) of eight neighbours: the token pairs of a lane's value operands.
template <int TYPE>
DEVICE void load_pairs8(u32 (&p)[4], const unsigned char* section, int index) {
    if (TYPE == FLOAT16) {
        uint4 w = *reinterpret_cast<const uint4*>(section + index * 2);
        p[0] = permute_bytes(w.x, w.z, 0x5410); p[1] = permute_bytes(w.x, w.z, 0x7632);
        p[2] = permute_bytes(w.y, w.w, 0x5410); p[3] = permute_bytes(w.y, w.w, 0x7632);
        return;
    }
    float a[4], b[4];
    load_scales4<TYPE>(a, section, index);
    load_scales4<TYPE>(b, section, index + 4);
    for (int j = 0; j < 4; ++j) p[j] = pack_f16(a[j], b[j]);
}

template <class KeyPlane>
struct Query {
    static constexpr int COUNT = KeyPlane::FIELDS * KeyPlane::STEPS;
    static constexpr bool HELD = Q_FRAGMENTS == 0;
    static_assert(HELD || Q_FRAGMENTS == COUNT, "kernel_choice.py counts other steps");
    u32 q[HELD ? NT : 1][HELD ? COUNT : 1][2];
    const uint2* fragments;      // of this lane, unless held: [NT][COUNT] times 32 lanes
    u32 scales[HELD ? 1 : COUNT][2];  // factors of a page's channels, if `scaled`
    bool scaled;

    /// Operand of column tile n for step `at`.
    DEVICE uint2 operand(int n, int at) const {
        if (HELD) return {q[HELD ? n : 0][HELD ? at : 0][0], q[HELD ? n : 0][HELD ? at : 0][1]};
        const uint2 x = fragments[(n * COUNT + at) * 32];
        if (!scaled) return x;
        return {mul_f16x2(x.x, scales[HELD ? 0 : at][0]), mul_f16x2(x.y, scales[HELD ? 0 : at][1])};
    }

    static constexpr bool used(int field, int step) { return field * KeyPlane::ROW + 16 * step < D; }
    static constexpr int group_of(int field, int step) { return (field * KeyPlane::ROW + 16 * step) / K_GROUP; }

    /// Channels field * ROW + 16 step + 4c .. + 3 of a lane's column; 0 past the row, where a lane's words belong to others.
    DEVICE void start(Staged& staged, const QueryRows& rows, float multiplier, int c) {
        scaled = false;
        if (!HELD) {  // the block's warps have the same columns: each makes some operands for all
            const int thread = thread_again();
            fragments = staged.fragments + thread % 32;
            for (int at = thread / 32; at < NT * COUNT; at += WARPS) {
                u32 x[2];
                pack(x, rows, multiplier, at / COUNT, at % COUNT / KeyPlane::STEPS, at % KeyPlane::STEPS, c);
                staged.fragments[at * 32 + thread % 32] = {x[0], x[1]};
            }
            sync_threads(CONSUMERS);
            return;
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
                for (int i = 0; i < KeyPlane::STEPS; ++i)
                    if (used(f, i)) pack(q[HELD ? n : 0][HELD ? f * KeyPlane::STEPS + i : 0], rows, multiplier, n, f, i, c);
    }
    static DEVICE void pack(u32 (&to)[2], const QueryRows& rows, float multiplier, int n, int f, int i, int c) {
        int r = 16 * i + 4 * c, ch = f * KeyPlane::ROW + r;
        const float4 x = rows.four(n, ch, r < KeyPlane::ROW && ch < D);
        float m = multiplier * power_of_two(-KeyPlane::exponent(f));
        to[0] = pack_f16(x.x * m, x.z * m);
        to[1] = pack_f16(x.y * m, x.w * m);
    }
    /// Adds q times the code's field over a group's channels, for a code alike in all channels and tokens: an operand's [rows and columns] of every group.
    DEVICE void times_constant(float (&sum)[K_GROUPS][NT][4], u32 code) const {
#pragma unroll
        for (int gr = 0; gr < K_GROUPS; ++gr)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float (&acc)[4] = sum[gr][n];
#pragma unroll
                for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
                    for (int i = 0; i < KeyPlane::STEPS; ++i)
                        if (used(f, i) && group_of(f, i) == gr) {
                            u32 w = KeyPlane::constant(code, f);
                            const uint2 b = operand(n, f * KeyPlane::STEPS + i);
                            mma_f16(acc, w, w, w, w, b.x, b.y);
                        }
            }
    }
};

/// Codes of a key plane as accumulated scores. Words with several fields are held in registers if they are few, the others loaded where they are used.
template <class KeyPlane>
struct Keys {
    static constexpr bool HELD = KeyPlane::FIELDS > 1 && KeyPlane::STEPS <= 4;
    static constexpr int LOW_WORDS = KeyPlane::LOW_ROW / 4;
    uint4 words[HELD ? UNITS : 1][HELD ? KeyPlane::STEPS : 1];  // tokens 4g .. 4g + 3
    const unsigned char *base, *low_base;
    int c;

    DEVICE Keys(const unsigned char* slot, int offset, int tile, int g, int c)
        : base(slot + offset + (2 * tile * UNITS + g / 4) * KeyPlane::WORDS * 64 + g % 4 * 16),
          low_base(slot + KeyPlane::LOW_OFFSET + (2 * tile * UNITS + g / 4) * LOW_WORDS * 64 + g % 4 * 16), c(c) {
#pragma unroll
        for (int u = 0; u < UNITS && HELD; ++u)
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) words[u][i] = load(u, i);
    }
    DEVICE int word_of(int i) const { return 4 * i + 3 < KeyPlane::WORDS ? 4 * i + c : min(4 * i + c, KeyPlane::WORDS - 1); }
    DEVICE uint4 load(int u, int i) const { return *reinterpret_cast<const uint4*>(base + (2 * u * KeyPlane::WORDS + word_of(i)) * 64); }
    /// Whether step i's bytes are in the row's second half.
    DEVICE int second(int i) const { return LOW_WORDS % 4 ? word_of(i) >= LOW_WORDS : 4 * i >= LOW_WORDS; }
    DEVICE uint4 load_low(int u, int i) const {
        if (!KeyPlane::JOINED) return {0, 0, 0, 0};
        return *reinterpret_cast<const uint4*>(low_base + (2 * u * LOW_WORDS + word_of(i) - second(i) * LOW_WORDS) * 64);
    }
    /// acc = start (first plane) or acc, plus the group's products.
    template <bool FIRST>
    DEVICE void multiply(float (&acc)[UNITS][2][NT][4], const float (&start)[NT][4], const Query<KeyPlane>& query, int group) const {
        bool first = FIRST;
#pragma unroll
        for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) {
                if (!Query<KeyPlane>::used(f, i) || Query<KeyPlane>::group_of(f, i) != group) continue;
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    const uint4 w = HELD ? words[HELD ? u : 0][HELD ? i : 0] : load(u, i);
                    two_rows(acc[u][0], start, first, {w.x}, {w.y}, query, f, i);
                    two_rows(acc[u][1], start, first, {w.z}, {w.w}, query, f, i);
                }
                first = false;
            }
    }
    /// The same for all groups, of joined planes: a word is joined once for all fields, which are of several groups.
    DEVICE void multiply_joined(float (&acc)[K_GROUPS][UNITS][2][NT][4], const float (&start)[K_GROUPS][NT][4], const Query<KeyPlane>& query) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            bool first[K_GROUPS];
            for (int gr = 0; gr < K_GROUPS; ++gr) first[gr] = true;
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) {
                const uint4 w = HELD ? words[HELD ? u : 0][HELD ? i : 0] : load(u, i), low = load_low(u, i);
                const int of = second(i);
                const Row x(w.x, low.x, of), y(w.y, low.y, of), z(w.z, low.z, of), w3(w.w, low.w, of);
#pragma unroll
                for (int f = 0; f < KeyPlane::FIELDS; ++f) {
                    if (!Query<KeyPlane>::used(f, i)) continue;
                    const int gr = Query<KeyPlane>::group_of(f, i);
                    two_rows(acc[gr][u][0], start[gr], first[gr], x, y, query, f, i);
                    two_rows(acc[gr][u][1], start[gr], first[gr], z, w3, query, f, i);
                    first[gr] = false;
                }
            }
        }
    }
    using Row = Fields<KeyPlane, K_FLOAT>;
    static DEVICE void two_rows(float (&acc)[NT][4], const float (&start)[NT][4], bool first, const Row& row, const Row& row8, const Query<KeyPlane>& query, int f, int i) {
        u32 a0 = row.operand(0, f), a1 = row8.operand(0, f), a2 = row.operand(1, f), a3 = row8.operand(1, f);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint2 b = query.operand(n, f * KeyPlane::STEPS + i);
            if (first) mma_f16(acc[n], a0, a1, a2, a3, b.x, b.y, start[n][0], start[n][1], start[n][2], start[n][3]);
            else mma_f16(acc[n], a0, a1, a2, a3, b.x, b.y);
        }
    }
};

/// Running outputs of a value plane: o[field][pair of blocks][row pair] of channels field * ROW + 32 pair + 4g + 0 .. 3.
template <class ValuePlane>
struct Values {
    float o[NT][ValuePlane::FIELDS][ValuePlane::PAIRS][2][4];

    static constexpr bool used(int field, int pair) { return field * ValuePlane::ROW + 32 * pair < D; }
    static constexpr int group_of(int field, int pair) { return (field * ValuePlane::ROW + 32 * pair) / V_GROUP; }

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
                            for (int r = 0; r < 4; ++r) f(o[n][field][pair][half][r], n, r % 2, field, pair, 2 * half + r / 2);
    }
    DEVICE void clear() { each([](float& x, int, int, int, int, int) { x = 0.f; }); }
    DEVICE void scale(const float (&factor)[NT][2]) { each([&](float& x, int n, int e, int, int, int) { x *= factor[n][e]; }); }

    /// Adds codes times weights: weights[group][column tile][unit][first quad, second quad][2 registers].
    template <class Weights>
    DEVICE void accumulate(const unsigned char* slot, int offset, int tile, const Weights& weights, int g, int c) {
#pragma unroll
        for (int pair = 0; pair < ValuePlane::PAIRS; ++pair) {
            int block = 2 * pair + g / 4, quarter = g % 4, width = 16;
            if (32 * pair + 32 > ValuePlane::ROW) {  // the last block may be narrow and the one after it is not there: read any bytes of the row
                block = min(block, ValuePlane::BLOCKS - 1);
                width = min(16, ValuePlane::ROW - 16 * block);
                quarter = min(quarter, width / 4 - 1);
            }
            const unsigned char* p = slot + offset + block * 16 * CHUNK + quarter * 16;
            const LowBlock low(slot, 16 * block + 4 * quarter);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                int quad = (tile * UNITS + u) * 8 + 2 * c;
                // Four lanes meet in the same banks here. It costs nothing: shared memory gives 128 bytes a clock and full memory speed needs 17.
                uint4 first = *reinterpret_cast<const uint4*>(p + quad * 4 * width);
                uint4 second = *reinterpret_cast<const uint4*>(p + (quad + 1) * 4 * width);
                quad_of(first, low.load(quad), low.second, weights, u, 0, pair);
                quad_of(second, low.load(quad + 1), low.second, weights, u, 1, pair);
            }
        }
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
    template <class Weights>
    DEVICE void quad_of(const uint4& w, const uint4& low, int second, const Weights& weights, int u, int which, int pair) {
        const Fields<ValuePlane, V_FLOAT> x(w.x, low.x, second), y(w.y, low.y, second), z(w.z, low.z, second), w3(w.w, low.w, second);
#pragma unroll
        for (int f = 0; f < ValuePlane::FIELDS; ++f) {
            if (!used(f, pair)) continue;
            u32 a0 = x.operand(0, f), a1 = y.operand(0, f), a2 = x.operand(1, f), a3 = y.operand(1, f);
            u32 c0 = z.operand(0, f), c1 = w3.operand(0, f), c2 = z.operand(1, f), c3 = w3.operand(1, f);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const u32 (&b)[2] = weights[group_of(f, pair)][n][u][which];
                mma_f16(o[n][f][pair][0], a0, a1, a2, a3, b[0], b[1]);
                mma_f16(o[n][f][pair][1], c0, c1, c2, c3, b[0], b[1]);
            }
        }
    }
};
