// Numbers by which kernels know what a page stores, and what its number formats are. Written by `python -m kvbits.ops.descriptor`; a test compares.
#pragma once

// Dtypes of raw rows, scales, biases, means.
enum Dtype { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2, FLOAT8_E5M3 = 3, NUM_RAW_DTYPES = 3 };
// What a code stands for.
enum LevelKind { INTEGER = 0, E4M3 = 1, E5M2 = 2, RAW = 3, CODEBOOK = 4, TRELLIS = 5 };
// Who shares a scale.
enum ScaleKind { SCALE_STATIC = 0, SCALE_GROUP = 1, SCALE_CHANNEL = 2 };
enum Format { FORMAT_RAW = 0, FORMAT_INT8 = 1, FORMAT_INT4 = 2, FORMAT_INT3 = 3, FORMAT_INT2 = 4, FORMAT_FP8_E4M3 = 5, FORMAT_FP8_E5M2 = 6, FORMAT_NUQ4 = 7, FORMAT_NUQ3 = 8, FORMAT_NUQ2 = 9, FORMAT_TRELLIS = 10, NUM_FORMATS = 11 };
// Trellis codes: channels of a band, positions of a frame and of a mean in it, rows of offsets (quant/basis.py); channels of a ring, parts of a scale, the largest of them (quant/trellis.py).
enum Trellis { BAND = 16, FRAME = 512, MEAN_STEP = 16, OFFSETS = 33, RING = 16, UNIT = 64, FARTHEST = 8192 };

/// Codes lie in one or two bit planes, high bits first (trellis ones in those of their widths). For floats: the bits behind the sign, the largest value, and where rounding passes it.
struct NumberFormat {
    int levels, bits0, bits1, exponent_bits, mantissa_bits;
    float max_value, saturates_at;
};
constexpr NumberFormat number_format(int format) {
    constexpr NumberFormat all[NUM_FORMATS] = {
        {RAW, 0, 0, 0, 0, 0.0f, 0.0f},  // raw
        {INTEGER, 8, 0, 0, 0, 0.0f, 0.0f},  // int8
        {INTEGER, 4, 0, 0, 0, 0.0f, 0.0f},  // int4
        {INTEGER, 2, 1, 0, 0, 0.0f, 0.0f},  // int3
        {INTEGER, 2, 0, 0, 0, 0.0f, 0.0f},  // int2
        {E4M3, 8, 0, 4, 3, 448.0f, 464.0f},  // fp8_e4m3
        {E5M2, 8, 0, 5, 2, 57344.0f, 61440.0f},  // fp8_e5m2
        {CODEBOOK, 4, 0, 0, 0, 0.0f, 0.0f},  // nuq4
        {CODEBOOK, 2, 1, 0, 0, 0.0f, 0.0f},  // nuq3
        {CODEBOOK, 2, 0, 0, 0, 0.0f, 0.0f},  // nuq2
        {TRELLIS, 0, 0, 0, 0, 0.0f, 0.0f},  // trellis
    };
    return all[format];
}

/// Step of the best uniform quantizer of a Gaussian of variance 1 at a band's bits (quant/scales.py), 0 where it has none.
constexpr float band_step(int bits) {
    constexpr float all[9] = {0.0f, 1.596f, 0.9957f, 0.586f, 0.3352f, 0.1881f, 0.1041f, 0.0f, 0.0308f};
    return all[bits];
}
