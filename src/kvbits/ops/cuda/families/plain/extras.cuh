// What pages may hold beside codes, scales, biases and means, as dequantize.cu and families that add it are told of it.
#pragma once
#include "side.cuh"

/// Levels from a codebook, a factor per token, listed elements, keys from before the rotary embedding.
template <bool CODEBOOK_, bool STRETCH_, int STRETCH_OFFSET_, int OUTLIERS_, int INDEX_BYTES_, int INDEX_OFFSET_,
          int VALUE_OFFSET_, bool TURNED_>
struct Extras {
    static constexpr bool CODEBOOK = CODEBOOK_, STRETCH = STRETCH_, TURNED = TURNED_;
    static constexpr int STRETCH_OFFSET = STRETCH_OFFSET_, OUTLIERS = OUTLIERS_, INDEX_BYTES = INDEX_BYTES_,
                         INDEX_OFFSET = INDEX_OFFSET_, VALUE_OFFSET = VALUE_OFFSET_;

    /// token * head_dim + channel of a listed element.
    static DEVICE u32 index(const unsigned char* page, int i) {
        if (INDEX_BYTES == 2) return reinterpret_cast<const u16*>(page + INDEX_OFFSET)[i];
        return reinterpret_cast<const u32*>(page + INDEX_OFFSET)[i];
    }
};
