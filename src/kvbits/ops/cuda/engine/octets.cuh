// Eight neighbouring channels of a token on their way to codes: what the kernels share that quantize by tokens
// (close.cu, store_tokens.cu). X_TYPE is a macro.
#pragma once
#include "stored.cuh"

/// Eight neighbouring values as they came: 16-bit ones stay packed, which halves the registers and lets one instruction
/// compare two.
struct Octet {
    static constexpr int WORDS = X_TYPE == FLOAT32 ? 8 : 4;
    u32 w[WORDS];

    DEVICE void load(const void* p, i64 i) {
        const char* at = static_cast<const char*>(p) + i * (X_TYPE == FLOAT32 ? 4 : 2);
        for (int k = 0; k < WORDS; k += 4) {
            uint4 v = *reinterpret_cast<const uint4*>(at + k * 4);
            w[k] = v.x; w[k + 1] = v.y; w[k + 2] = v.z; w[k + 3] = v.w;
        }
    }
    DEVICE float operator[](int k) const {
        if (X_TYPE == FLOAT32) return __uint_as_float(w[k]);
        u32 word = w[k / 2];
        return X_TYPE == FLOAT16 ? (k % 2 ? high_f16(word) : low_f16(word))
                                 : __uint_as_float(k % 2 ? word & 0xffff0000u : word << 16);
    }
    /// Largest magnitude; NaN if any value is NaN.
    DEVICE float largest() const {
        u32 m = w[0] & ABS;
        for (int k = 1; k < WORDS; ++k) m = X_TYPE == FLOAT32 ? max(m, w[k] & ABS) : larger(m, w[k] & ABS);
        return unpack(m, true);
    }
    DEVICE float highest() const {
        u32 m = w[0];
        for (int k = 1; k < WORDS; ++k) m = larger(m, w[k]);
        return unpack(m, true);
    }
    DEVICE float lowest() const {
        u32 m = w[0];
        for (int k = 1; k < WORDS; ++k) m = smaller(m, w[k]);
        return unpack(m, false);
    }
    static constexpr u32 ABS = X_TYPE == FLOAT32 ? 0x7fffffffu : 0x7fff7fffu;
    static DEVICE u32 larger(u32 a, u32 b) {
        if (X_TYPE == FLOAT32) return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
        return X_TYPE == FLOAT16 ? max_nan_f16x2(a, b) : max_nan_bf16x2(a, b);
    }
    static DEVICE u32 smaller(u32 a, u32 b) {
        if (X_TYPE == FLOAT32) return __float_as_uint(fminf(__uint_as_float(a), __uint_as_float(b)));
        return X_TYPE == FLOAT16 ? min_nan_f16x2(a, b) : min_nan_bf16x2(a, b);
    }
    static DEVICE float unpack(u32 m, bool most) {
        if (X_TYPE == FLOAT32) return __uint_as_float(m);
        u32 d = most ? larger(m, m >> 16 | m << 16) : smaller(m, m >> 16 | m << 16);
        return X_TYPE == FLOAT16 ? low_f16(d) : __uint_as_float(d << 16);
    }
};

template <int FLOAT>
DEVICE unsigned char to_float_code(float x) {
#if __CUDA_ARCH__ >= 890
    return (unsigned char)(FLOAT == E4M3 ? to_e4m3(x) : to_e5m2(x));
#else
    return 0;  // `refuses` lets no such format come here
#endif
}

/// Lowest and highest of an octet less `mean`; of a symmetric side only the largest magnitude, as `hi`.
template <class S>
DEVICE void ends_of(const Octet& x, const float (&mean)[8], float& lo, float& hi) {
    lo = 0.f;
    if (!S::HAS_MEAN) {
        if (S::HAS_BIAS) lo = x.lowest();
        hi = S::HAS_BIAS ? x.highest() : x.largest();
        return;
    }
    for (int k = 0; k < 8; ++k) {
        float y = x[k] - mean[k];
        lo = k ? fminf(lo, y) : y;
        hi = k ? fmaxf(hi, S::HAS_BIAS ? y : fabsf(y)) : S::HAS_BIAS ? y : fabsf(y);
    }
}

/// A group's stored bias and scale from its ends; `overflow` where the storage type cannot hold one.
template <class S>
DEVICE void parameters_of(float lo, float hi, float& scale, float& bias, bool& overflow) {
    bias = S::HAS_BIAS ? stored_bias<S::TYPE>(lo) : 0.f;
    scale = stored_scale<S::TYPE>(__fdiv_rn(hi - bias, S::Q_MAX));
    overflow |= !finite(scale) || !finite(bias);
}

/// The code of a value in units of its scale, in the low byte.
template <class S>
DEVICE u32 code_of(float y, int& saturated) {
    if (S::FLOAT != INTEGER) {
        saturated += fabsf(y) >= S::SATURATES;
        return to_float_code<S::FLOAT>(y);
    }
    // 1.5 * 2**23 leaves no room for a fraction: the addition rounds half to even (ZERO is even) and the low bits are
    // the integer.
    constexpr float MAGIC = 12582912.f;
    if (S::NEVER_SATURATES) return __float_as_uint(y + (MAGIC + float(S::ZERO)));
    float c = rintf(y) + float(S::ZERO), inside = fminf(fmaxf(c, float(S::LOW)), float(S::HIGH));
    saturated += c != inside;
    return u32(inside);
}

/// The low bytes of eight codes to shared memory.
DEVICE void put_codes(const u32 (&codes)[8], unsigned char* to) {
    for (int w = 0; w < 2; ++w) {
        u32 low = permute_bytes(codes[4 * w], codes[4 * w + 1], 0x0040),
            high = permute_bytes(codes[4 * w + 2], codes[4 * w + 3], 0x0040);
        *reinterpret_cast<u32*>(to + w * 4) = permute_bytes(low, high, 0x5410);
    }
}
