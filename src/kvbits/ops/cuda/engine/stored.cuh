// What kernels that write pages store: numbers in their storage type and planes of codes.
#pragma once
#include "side.cuh"

// bytes of a token's codes in shared memory; an odd number of words keeps columns of tokens off one bank
constexpr int CODE_STRIDE = D + 4;

DEVICE u16 to_f16(float x) { return u16(pack_f16(x, 0.f)); }
DEVICE u16 to_bf16(float x) { return u16(pack_bf16(x, 0.f)); }
template <int TYPE>
DEVICE float rounded(float x) {
    return TYPE == FLOAT32 ? x : TYPE == FLOAT16 ? f16_to_float(to_f16(x)) : bf16_to_float(to_bf16(x));
}
template <int TYPE>
DEVICE void store(unsigned char* section, int i, float x) {
    if (TYPE == FLOAT32) reinterpret_cast<float*>(section)[i] = x;
    else reinterpret_cast<u16*>(section)[i] = TYPE == FLOAT16 ? to_f16(x) : to_bf16(x);
}
DEVICE bool finite(float x) { return fabsf(x) <= 3.4028234e38f; }

/// A scale as it will be stored: rounded, up where it is a subnormal float16; none is smaller than the smallest with a
/// reciprocal, 0 included.
template <int TYPE>
DEVICE float stored_scale(float scale) {
    constexpr float SMALLEST = TYPE == FLOAT16 ? 5.9604644775390625e-08f : 1.17549435e-38f;
    float r = rounded<TYPE>(scale);
    if (TYPE == FLOAT16 && scale < 6.103515625e-05f) r = ceilf(scale * 16777216.f) * 5.9604644775390625e-08f;
    return r < SMALLEST ? SMALLEST : r;  // not fmaxf, which would hide a NaN
}
/// Largest value of the storage type that is not above x; never -0: which zero of a range is the smallest?
template <int TYPE>
DEVICE float stored_bias(float x) {
    x = __fadd_rn(x, 0.f);
    float y = rounded<TYPE>(x);
    if (TYPE == FLOAT32 || y <= x) return y;
    u16 bits = TYPE == FLOAT16 ? to_f16(y) : to_bf16(y);
    bits = y == 0.f ? u16(0x8001) : y > 0.f ? u16(bits - 1) : u16(bits + 1);
    return TYPE == FLOAT16 ? f16_to_float(bits) : bf16_to_float(bits);
}

/// Four bytes of a plane's row: field f of byte r is channel r + f * ROW.
template <int CHANNELS, int BITS, int SHIFT, class Shared>
DEVICE u32 row_word(const Shared& shared, int token, int r) {
    constexpr int ROW = (CHANNELS * BITS + 31) / 32 * 4;
    u32 w = 0;
#pragma unroll
    for (int f = 0; f < 8 / BITS; ++f) {
        if (r + f * ROW >= CHANNELS) continue;
        u32 codes = *reinterpret_cast<const u32*>(&shared.codes[token][r + f * ROW]);
        w |= (codes >> SHIFT & ((1u << BITS) - 1) * 0x01010101u) << BITS * f;
    }
    return w;
}

/// Rows of `ROW` bytes of a plane as docs/reference/formats.md orders them; word(token, r): four bytes of a token's row
/// from byte r on.
template <bool VALUES, int ROW, class Word>
DEVICE void write_rows(unsigned char* plane, const Word& word) {
    constexpr int WORDS = ROW / 4;
    if (VALUES) {
        for (int i = threadIdx.x; i < PAGE / 4 * WORDS; i += THREADS) {
            // Blocks of 16 bytes: four words of every quad of tokens; the last block may be narrower.
            int block = i / (PAGE / 4 * 4), width = min(4, WORDS - block * 4), rest = i - block * PAGE;
            int quad = rest / width, r = block * 16 + rest % width * 4;
            int token = quad / 2 * 8 + quad % 2 * 2;  // slots of a group of eight hold tokens 0 1 4 5 2 3 6 7
            u32 a = word(token, r), b = word(token + 1, r), c = word(token + 4, r), d = word(token + 5, r);
            u32 ab = permute_bytes(a, b, 0x5140), AB = permute_bytes(a, b, 0x7362), cd = permute_bytes(c, d, 0x5140),
                CD = permute_bytes(c, d, 0x7362);
            uint4 w = {permute_bytes(ab, cd, 0x5410), permute_bytes(ab, cd, 0x7632), permute_bytes(AB, CD, 0x5410),
                       permute_bytes(AB, CD, 0x7632)};
            *reinterpret_cast<uint4*>(plane + block * 16 * PAGE + quad * 16 * width + rest % width * 16) = w;
        }
        return;
    }
    for (int i = threadIdx.x; i < PAGE * WORDS / 4; i += THREADS) {
        // Tiles of 16 tokens: a word of every token before the next word; four tokens a thread.
        int tile = i / (WORDS * 4), r = i / 4 % WORDS * 4, token = tile * 16 + i % 4 * 4;
        reinterpret_cast<uint4*>(plane)[i] = {word(token, r), word(token + 1, r), word(token + 2, r),
                                              word(token + 3, r)};
    }
}

/// A plane of codes of one width. shared.codes: a byte each, [token][channel].
template <class S, int BITS, int SHIFT, class Shared>
DEVICE void write_plane(unsigned char* plane, const Shared& shared) {
    write_rows<S::VALUES, (S::D * BITS + 31) / 32 * 4>(
        plane, [&](int token, int r) { return row_word<S::D, BITS, SHIFT>(shared, token, r); });
}
