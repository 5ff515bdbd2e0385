// What keys or values of a page are stored as, as a type: the template arguments are `side_arguments` of side.py, from a PageLayout.
// HEAD_DIM and PAGE are macros of the instantiation.
#pragma once
#include "numbers.h"
#include "turn.cuh"

constexpr int D = HEAD_DIM;

/// What one of keys and values is stored as.
template <int FLOAT_, int BITS0_, int BITS1_, int SCALE_, int GROUP_, int ZERO_, int BIAS_, int MEAN_, int TYPE_, int OFFSET0_, int OFFSET1_, int SCALE_OFFSET_,
          int BIAS_OFFSET_, int MEAN_OFFSET_, bool VALUES_>
struct Side {
    static constexpr int FLOAT = FLOAT_, BITS0 = BITS0_, BITS1 = BITS1_, SCALE = SCALE_, GROUP = GROUP_, ZERO = ZERO_, TYPE = TYPE_;
    static constexpr bool HAS_BIAS = BIAS_, HAS_MEAN = MEAN_, VALUES = VALUES_;
    static constexpr int OFFSET0 = OFFSET0_, OFFSET1 = OFFSET1_, SCALE_OFFSET = SCALE_OFFSET_, BIAS_OFFSET = BIAS_OFFSET_, MEAN_OFFSET = MEAN_OFFSET_;
    static constexpr int BITS = BITS0_ + BITS1_, GROUPS = D / GROUP_;
    static constexpr int LOW = ZERO ? 1 : 0, HIGH = (1 << (BITS > 8 ? 8 : BITS)) - 1;
    static constexpr float Q_MAX = FLOAT == E4M3 ? 448.f : FLOAT == E5M2 ? 57344.f : ZERO ? float(ZERO - 1) : float(HIGH);
    static constexpr float SATURATES = FLOAT == E4M3 ? 464.f : 61440.f;
    // A scale taken from the page and rounded by at most 2**-11 cannot push a code half a step past its range.
    static constexpr bool NEVER_SATURATES = FLOAT == INTEGER && SCALE != SCALE_STATIC && TYPE != BFLOAT16;
    static constexpr int SCALES = SCALE == SCALE_CHANNEL ? D : GROUPS * PAGE;  // of a page
};

template <int TYPE>
DEVICE float load_value(const void* p, i64 i) {
    if (TYPE == FLOAT32) return static_cast<const float*>(p)[i];
    u16 h = static_cast<const u16*>(p)[i];
    return TYPE == FLOAT16 ? f16_to_float(h) : bf16_to_float(h);
}

/// What the formats of KVQuant have besides: levels from a codebook, a factor per token, listed elements, keys from before the rotary embedding.
template <bool CODEBOOK_, bool STRETCH_, int STRETCH_OFFSET_, int OUTLIERS_, int INDEX_BYTES_, int INDEX_OFFSET_, int VALUE_OFFSET_, bool TURNED_>
struct Extras {
    static constexpr bool CODEBOOK = CODEBOOK_, STRETCH = STRETCH_, TURNED = TURNED_;
    static constexpr int STRETCH_OFFSET = STRETCH_OFFSET_, OUTLIERS = OUTLIERS_, INDEX_BYTES = INDEX_BYTES_, INDEX_OFFSET = INDEX_OFFSET_, VALUE_OFFSET = VALUE_OFFSET_;

    /// token * head_dim + channel of a listed element.
    static DEVICE u32 index(const unsigned char* page, int i) {
        if (INDEX_BYTES == 2) return reinterpret_cast<const u16*>(page + INDEX_OFFSET)[i];
        return reinterpret_cast<const u32*>(page + INDEX_OFFSET)[i];
    }
};
