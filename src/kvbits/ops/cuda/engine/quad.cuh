// Four neighbouring elements of a page on their way to codes. X_TYPE is a macro.
#pragma once
#include "stored.cuh"

/// As they came.
struct Quad {
    static constexpr int WORDS = X_TYPE == FLOAT32 ? 4 : 2;
    u32 w[WORDS];

    DEVICE void load(const char* at) {
        if (X_TYPE == FLOAT32) {
            const uint4 v = load_once_16(at);
            w[0] = v.x, w[1] = v.y, w[WORDS - 2] = v.z, w[WORDS - 1] = v.w;
        } else {
            const uint2 v = load_once_8(at);
            w[0] = v.x, w[1] = v.y;
        }
    }
    DEVICE float operator[](int k) const {
        if (X_TYPE == FLOAT32) return __uint_as_float(w[k % WORDS]);
        const u32 word = w[k / 2];
        return X_TYPE == FLOAT16 ? (k % 2 ? high_f16(word) : low_f16(word))
                                 : __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
    }
};
