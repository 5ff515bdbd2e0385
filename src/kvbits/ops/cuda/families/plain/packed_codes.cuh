// Codes of packed pages in shared memory as matrix operands, with one AND.
//
// A code masked out of a 32-bit word, (w >> 8 * odd) & (mask << bits * field), is a pair of SUBNORMAL float16 numbers
// code * 2**(bits * field - 24), which the matrix units multiply exactly. So unpacking is one instruction per pair; the
// factors go elsewhere: for keys the field's 2**-(bits * field) into q, for values into the end result; 2**24 into the
// score's factor; and the codes' zero point becomes a starting value of the scores (zero * sum(q), exact) and one
// correction per step for the outputs (zero * sum of the weights, which another matrix instruction gives). The
// correction is applied at every step, before the values are added: the running output then stays as small as the
// result, while a correction at the end would subtract two large sums whose roundings (toward zero, in the matrix
// units) do not cancel.
//
// A 3-bit code lies in a 2-bit and a 1-bit plane. Where a token's bytes in the second are half of those in the first
// (head_dim a multiple of 32), field f of byte r there is field 2 f of the second plane's byte r, or field 2 f + 1 of
// byte r - LOW_ROW. Two bitwise selections join words of both planes to one of fields 0 and 2 and one of fields 1 and
// 3, at bits 1 and 5 of every byte, and there is one walk, over 3-bit fields. Elsewhere each plane has its own.
//
// Words of trellis codes become words of joined fields, too (value_rings.cuh): those of even fields and those of odd ones.
#ifndef PACKED_CODES_CUH
#define PACKED_CODES_CUH
#include "value_rings.cuh"

/// CHUNK tokens in `slot`; `visible` of them are, the first at `position`, the page's first at `page_position`.
struct Chunk {
    const unsigned char* slot;
    int position, visible, page_position;
};

constexpr int TOKENS = 4 * UNITS;        // of a lane in a step
constexpr u32 WORD_ONES = 0x3c003c00u;  // (1, 1) in float16

/// One plane of codes. BITS = 0 means the format has no such plane; the loops compile to nothing.
template <int BITS_, int PLANE_OFFSET, int LOW_BITS_, int LOW_OFFSET_ = 0, int FLOAT = INTEGER, int CHANNELS = D,
          Rings RINGS_ = NO_RINGS>
struct Plane {
    // LOW_BITS: bits of the code in later planes
    static constexpr int BITS = BITS_, OFFSET = PLANE_OFFSET, LOW_BITS = LOW_BITS_;
    static constexpr Rings RINGS = RINGS_;
    static constexpr int LOW_OFFSET = LOW_OFFSET_;             // of the plane joined to this one
    static constexpr bool JOINED = LOW_OFFSET > 0;
    static constexpr int FIELDS = BITS ? 8 / BITS : 0;
    static constexpr int ROW = (CHANNELS * BITS + 31) / 32 * 4;  // bytes of one token
    static constexpr int WORDS = ROW / 4;
    static constexpr int STEPS = (WORDS + 3) / 4;              // 16-byte column steps of a key row
    static constexpr int BLOCKS = (ROW + 15) / 16;             // value blocks
    static constexpr int PAIRS = (BLOCKS + 1) / 2;             // of value blocks: 32 byte positions
    static constexpr int ROUNDS = FIELDS * PAIRS;
    static constexpr int LOW_ROW = ROW / 2;                    // bytes of one token in the joined plane

    using Ring = ValueRing<RINGS, BITS + JOINED>;

    /// A field's operands are codes times 2**exponent; of trellis codes what stands for their levels.
    static constexpr int exponent(int field) {
        return RINGS ? Ring::exponent(field) : JOINED ? 1 + field / 2 * 4 : BITS * field - LOW_BITS;
    }
    /// The operand of a code alike in all channels.
    static DEVICE u32 constant(u32 code, int field) {
        if (JOINED) return code * 0x00010001u << exponent(field);
        return ((code >> LOW_BITS) & ((1u << BITS) - 1)) * 0x00010001u << BITS * field;
    }
};

template <int FLOAT, int BITS>
DEVICE u32 masked_operand(u32 even, u32 odd, int is_odd, int field) {
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

/// A word of codes and what to mask its operands out of: of joined fields two words, of even and of odd ones.
template <class CodePlane, int FLOAT>
struct Fields {
    static constexpr bool JOINED = CodePlane::JOINED, RINGS = CodePlane::RINGS;
    static constexpr int WORDS = JOINED || RINGS ? 2 : 1;
    u32 even[WORDS], odd[WORDS];

    DEVICE Fields() {}
    /// low: the joined plane's word of these bytes; second: they are in the row's second half.
    DEVICE Fields(u32 w, u32 low = 0, int second = 0) {
        // a product goes to another pipe than shifts
        even[0] = JOINED ? select_bits(0xccccccccu, w << 2, low * (2 - second)) : w;
        if (JOINED) even[WORDS - 1] = select_bits(0xccccccccu, w, low >> (1 + second));
        for (int k = 0; k < WORDS; ++k) odd[k] = odd_bytes<FLOAT, CodePlane::BITS>(even[k]);
    }
    DEVICE u32 operand(int is_odd, int field) const {
        if (RINGS && CodePlane::BITS == 4)  // no other bits are set
            return is_odd ? permute_bytes(even[field], 0, 0x4341) : even[field] & 0x00ff00ffu;
        if (JOINED || RINGS)
            return (is_odd ? odd : even)[field % WORDS] &
                   ((RINGS ? CodePlane::Ring::MASK : 7u) * 0x00010001u << CodePlane::exponent(field));
        return masked_operand<FLOAT, CodePlane::BITS>(even[0], odd[0], is_odd, field);
    }
};

/// Those of four neighbouring bytes of a row, which are whole rings of trellis codes. `before`: see ValueRing.
template <class CodePlane, int FLOAT>
DEVICE void fields_of_four(Fields<CodePlane, FLOAT> (&found)[4], const uint4& w, const uint4& low, int second,
                           const uint2& before) {
    if constexpr (CodePlane::RINGS) {
        u32 joined[4][2];
        CodePlane::Ring::join(joined, {w.x, w.y, w.z, w.w}, {low.x, low.y, low.z, low.w}, second, before);
        for (int n = 0; n < 4; ++n)
            for (int k = 0; k < 2; ++k)
                found[n].even[k] = joined[n][k],
                found[n].odd[k] = odd_bytes<FLOAT, CodePlane::BITS>(joined[n][k]);
    } else {
        found[0] = {w.x, low.x, second}, found[1] = {w.y, low.y, second};
        found[2] = {w.z, low.z, second}, found[3] = {w.w, low.w, second};
    }
}

constexpr int operand_exponent(int is_float) { return is_float == INTEGER ? 24 : is_float == E4M3 ? 8 : 0; }

/// Scales in E5M3 are bits 7 to 14 of float16 numbers.
template <int TYPE>
DEVICE void load_scales4(float (&s)[4], const unsigned char* section, int index) {
    if (TYPE == FLOAT32) {
        float4 w = *reinterpret_cast<const float4*>(section + index * 4);
        s[0] = w.x; s[1] = w.y; s[2] = w.z; s[3] = w.w;
        return;
    }
    if (TYPE == FLOAT8_E5M3) {
        const u32 w = *reinterpret_cast<const u32*>(section + index), even = (w & 0x00ff00ffu) << 7,
                  odd = w >> 1 & 0x7f807f80u;
        s[0] = low_f16(even); s[1] = low_f16(odd); s[2] = high_f16(even); s[3] = high_f16(odd);
        return;
    }
    uint2 w = *reinterpret_cast<const uint2*>(section + index * 2);
    if (TYPE == FLOAT16) { s[0] = low_f16(w.x); s[1] = high_f16(w.x); s[2] = low_f16(w.y); s[3] = high_f16(w.y);
    } else {
        s[0] = bf16_to_float(u16(w.x));
        s[1] = bf16_to_float(u16(w.x >> 16));
        s[2] = bf16_to_float(u16(w.y));
        s[3] = bf16_to_float(u16(w.y >> 16));
    }
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
    if (TYPE == FLOAT8_E5M3) {
        const uint2 w = *reinterpret_cast<const uint2*>(section + index);
        for (int j = 0; j < 4; ++j) p[j] = permute_bytes(w.x, w.y, (4 + j) << 12 | j << 4) >> 1 & 0x7f807f80u;
        return;
    }
    float a[4], b[4];
    load_scales4<TYPE>(a, section, index);
    load_scales4<TYPE>(b, section, index + 4);
    for (int j = 0; j < 4; ++j) p[j] = pack_f16(a[j], b[j]);
}

/// What decides how values are added up.
struct ValueTraits {
    using First = Plane<V_BITS0, V_OFFSET0, V_BITS1, V_JOINED_OFFSET, V_FLOAT, DV, Rings(V_RINGS)>;
    using Second = Plane<V_BITS1, V_OFFSET1, 0, 0, INTEGER, DV>;
    static constexpr int WEIGHTS = V_GROUPS;                                // sets of weights
    // levels of trellis codes are half a scale apart
    static constexpr int EXPONENT = operand_exponent(V_FLOAT) - (V_RINGS != NO_RINGS);
    static constexpr bool PER_CHUNK = V_SCALE == SCALE_CHANNEL;             // outputs are scaled once per chunk
    // a chunk's sum of weights multiplies a channel vector
    static constexpr bool WEIGHT_SUMS = V_HAS_MEAN || (PER_CHUNK && V_HAS_BIAS);
    // weights times biases of groups, added at the end
    static constexpr bool BIAS_SUMS = V_HAS_BIAS && V_SCALE == SCALE_GROUP;
    // raw tokens are added to the same running outputs as packed ones
    static constexpr bool RAW_JOINS = HAS_RAW && !PER_CHUNK && V_BITS1 == 0;
};
#endif
