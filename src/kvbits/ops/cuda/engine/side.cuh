// What keys or values of a page are stored as, as a type: the template arguments are `side_arguments` of side.py, from
// a PageLayout. HEAD_DIM and PAGE are macros of the instantiation.
#pragma once
#include "numbers.h"
#include "turn.cuh"

// the more of keys' and values', which memory and threads are shared out for; Side::D is a side's own
constexpr int D = HEAD_DIM;

/// The number format of floats of one kind; of other levels one without exponent bits.
constexpr NumberFormat float_format(int levels) {
    for (int i = 0; i < NUM_FORMATS; ++i)
        if (number_format(i).levels == levels && number_format(i).exponent_bits) return number_format(i);
    return number_format(FORMAT_RAW);
}
/// What the bits of a float of at most 8 stand for: put where float16 has them, times a power of two.
template <int FLOAT>
DEVICE float float_of(u32 code) {
    constexpr NumberFormat F = float_format(FLOAT);
    constexpr int SIGN = F.exponent_bits + F.mantissa_bits;
    return f16_to_float(u16((code & ((1u << SIGN) - 1)) << (10 - F.mantissa_bits) | (code >> SIGN & 1) << 15)) *
           float(1 << (16 - (1 << F.exponent_bits) / 2));
}

/// What one of keys and values is stored as.
template <int FLOAT_, int BITS0_, int BITS1_, int SCALE_, int GROUP_, int ZERO_, int BIAS_, int MEAN_, int TYPE_,
          int OFFSET0_, int OFFSET1_, int SCALE_OFFSET_, int BIAS_OFFSET_, int MEAN_OFFSET_, int D_, bool VALUES_>
struct Side {
    static constexpr int FLOAT = FLOAT_, BITS0 = BITS0_, BITS1 = BITS1_, SCALE = SCALE_, GROUP = GROUP_, ZERO = ZERO_,
                         TYPE = TYPE_;
    static constexpr int D = D_, OCTETS = D_ / 8;
    static constexpr bool HAS_BIAS = BIAS_, HAS_MEAN = MEAN_, VALUES = VALUES_;
    static constexpr int OFFSET0 = OFFSET0_, OFFSET1 = OFFSET1_, SCALE_OFFSET = SCALE_OFFSET_,
                         BIAS_OFFSET = BIAS_OFFSET_, MEAN_OFFSET = MEAN_OFFSET_;
    static constexpr int BITS = BITS0_ + BITS1_, GROUPS = D_ / GROUP_;
    static constexpr int LOW = ZERO ? 1 : 0, HIGH = (1 << (BITS > 8 ? 8 : BITS)) - 1;
    static constexpr bool IS_FLOAT = float_format(FLOAT).exponent_bits > 0;
    static constexpr float Q_MAX = IS_FLOAT ? float_format(FLOAT).max_value : ZERO ? float(ZERO - 1) : float(HIGH);
    static constexpr float SATURATES = float_format(FLOAT).saturates_at;
    // A scale taken from the page and rounded by at most 2**-11 cannot push a code half a step past its range.
    static constexpr bool NEVER_SATURATES = FLOAT == INTEGER && SCALE != SCALE_STATIC && TYPE != BFLOAT16;
    static constexpr int SCALES = SCALE == SCALE_CHANNEL ? D_ : GROUPS * PAGE;  // of a page
};

template <int TYPE>
DEVICE float load_value(const void* p, i64 i) {
    if (TYPE == FLOAT32) return static_cast<const float*>(p)[i];
    u16 h = static_cast<const u16*>(p)[i];
    return TYPE == FLOAT16 ? f16_to_float(h) : bf16_to_float(h);
}
