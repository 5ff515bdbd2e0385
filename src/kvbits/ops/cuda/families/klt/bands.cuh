// Trellis codes (quant/trellis.py): what a side is, as a type, and how the threads of a warp have a page's tokens.
// THREADS and HADAMARD_FACTOR are macros.
#pragma once
#include "side.cuh"

enum Basis { NO_BASIS, HADAMARD, CALIBRATED };

/// WIDTHS: bits of each band, four bits a band. FITTED: levels are 1, 3, 5 and 9 quarters of a scale. PLANE8 .. PLANE1:
/// bytes to the planes of 8, 4, 2 and 1 bits, if the page has them.
template <u64 WIDTHS, Basis BASIS_, bool OFFSETS_, bool FITTED_, int SCALE_OFFSET_, int PLANE8, int PLANE4, int PLANE2,
          int PLANE1, bool VALUES_>
struct Banded {
    static constexpr Basis BASIS = BASIS_;
    static constexpr bool HAS_OFFSETS = OFFSETS_, FITTED = FITTED_, VALUES = VALUES_;
    static constexpr int SCALE_OFFSET = SCALE_OFFSET_;

    static DEVICE constexpr int width(int band) { return int(WIDTHS >> 4 * band & 15); }
    static DEVICE constexpr int offset(int plane) {
        return plane == 8 ? PLANE8 : plane == 4 ? PLANE4 : plane == 2 ? PLANE2 : PLANE1;
    }
    /// Channels of the bands that have a plane (all bits: of those that have any).
    static DEVICE constexpr int channels(int plane) {
        int found = 0;
        for (int i = 0; i < D / BAND; ++i) found += width(i) & plane ? BAND : 0;
        return found;
    }
    /// The bands of a plane in its order, four bits each: their numbers, or (`shifts`) how far the plane's field lies
    /// up in their codes.
    static DEVICE constexpr u64 bands(int plane, bool shifts) {
        u64 found = 0;
        for (int i = 0, at = 0; i < D / BAND; ++i)
            if (width(i) & plane) found |= u64(shifts ? width(i) & (plane - 1) : i) << 4 * at++;
        return found;
    }
};

/// The 8-bit float of a code.
DEVICE float scale_value(int code) { return f16_to_float(u16(code << 7)); }

/// Bytes of a token in a plane.
template <class S>
constexpr int plane_row(int bits) { return (S::channels(bits) * bits + 31) / 32 * 4; }

/// Which row of offsets a token's key is stored less: `start` is the position of the page's first token
/// (quant/basis.py).
DEVICE int offsets_row(int start, int place) {
    const int run = (start % FRAME + place / MEAN_STEP * MEAN_STEP) / MEAN_STEP;
    return start + place ? min(run, OFFSETS - 2) : OFFSETS - 1;
}

constexpr u32 ONE_F16X2 = 0x3c003c00u;
DEVICE u32 twice_f16(float x) { return pack_f16(x, x); }
constexpr u32 ABOVE_1024 = 0x64646464u;  // upper bytes of float16 numbers from 1024 to 1279
/// Two of a word's bytes as float16, the first or the last two, plus 1024. `upper`: ABOVE_1024, in a register where
/// there are many.
DEVICE u32 above_1024(u32 bytes, bool last, u32 upper = ABOVE_1024) {
    return permute_bytes(bytes, upper, last ? 0x4342 : 0x4140);
}

/// Two indices of a band, each plus 1024, as numbers in scales from the band's middle; of 8 bits codes.
DEVICE u32 levels(u32 indices, int width) {
    const float middle = width == 8 ? 127.5f : width ? float((2 << width) - 1) / 4 : 0.f;
    return fma_f16x2(fma_f16x2(indices, ONE_F16X2, 0xe400e400u), twice_f16(width == 8 ? 1.f : 0.5f), twice_f16(-middle));
}
/// The same of one index.
template <class S>
DEVICE float level(u32 index, int width) {
    if (width == 8) return float(index) - 127.5f;
    if (width == 0) return 0.f;
    const float x = float(index) * 0.5f - float((2 << width) - 1) / 4;
    return S::FITTED && (index == 0 || index == 7) ? x + (index ? 0.5f : -0.5f) : x;
}

/// Four neighbouring threads have two tokens, eight apart: of every band each of them four channels, as the matrix
/// units want them and give them back.
constexpr int BANDS = D / BAND, LANES = 4, TOKENS = 2;
static_assert(THREADS % 32 == 0 && D % BAND == 0 && PAGE % 16 == 0, "four threads have two tokens, a warp has 16");
using Token = float[BANDS][4];
/// The four channels of a band that are the j-th thread's.
DEVICE float4 four_at(const float* x, int band, int j) {
    return *reinterpret_cast<const float4*>(&x[band * BAND + j * 4]);
}
DEVICE int thread_token(int r) { return int(threadIdx.x) / 32 * 16 + r * 8 + int(threadIdx.x) % 32 / LANES; }

/// Where a word of a token's row is among a plane's words, as docs/reference/formats.md orders them; of values one that
/// is `transposed`.
template <bool VALUES, int WORDS>
DEVICE int word_place(int token, int word) {
    if (!VALUES) return (token / 16 * WORDS + word) * 16 + token % 16;
    const int quad = token / 8 * 2 + token % 4 / 2, block = word / 4, width = min(4, WORDS - block * 4);
    return block * 4 * PAGE + (quad * width + word % 4) * 4 + (token & 1) + (token & 4) / 2;
}

/// Bytes of four tokens, 0 1 4 5 or 2 3 6 7 of eight, for a token's four bytes, or back: first with the neighbour, then
/// with the one four further.
DEVICE u32 transposed(u32 w, int token) {
    w = permute_bytes(w, __shfl_xor_sync(ALL_LANES, w, 4), token & 1 ? 0x3715 : 0x6240);
    return permute_bytes(w, __shfl_xor_sync(ALL_LANES, w, 16), token & 4 ? 0x3276 : 0x5410);
}

template <class S, int WORDS>
DEVICE u32 read_word(const unsigned char* plane, int token, int word) {
    const u32 w = reinterpret_cast<const u32*>(plane)[word_place<S::VALUES, WORDS>(token, word)];
    return S::VALUES ? transposed(w, token) : w;
}

/// Adds a plane's fields to the codes of a thread's channels of a token, four of every band in a word. Of keys every word
/// is a row of its own.
template <class S, int BITS>
DEVICE void read_plane(const unsigned char* page, u32 (&codes)[BANDS], int token, int j) {
    // words of a thread, where no other has fields in them
    constexpr int ROW_BYTES = plane_row<S>(BITS), WORDS = ROW_BYTES / 4, OF_WORD = 32 / BITS,
                  EACH = !S::VALUES || ROW_BYTES % 16 ? 0 : WORDS / 4;
    if constexpr (WORDS > 0) {
        const unsigned char* const plane = page + S::offset(BITS);
        u32 words[EACH ? EACH : 1];
#pragma unroll
        for (int e = 0; e < EACH; ++e) words[e] = read_word<S, WORDS>(plane, token, e * LANES + j);
        int at = 0;  // of the plane's bands
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            if (!(S::width(i) & BITS)) continue;
            const int channel = at * BAND + j * 4,
                      word = S::VALUES ? channel % ROW_BYTES / 4 : channel / OF_WORD;
            const u32 w = EACH ? words[EACH ? at % EACH : 0] : read_word<S, WORDS>(plane, token, word);
            const int field = !S::VALUES ? channel % OF_WORD / 4
                              : EACH     ? at / (EACH ? EACH : 1)
                                         : channel / ROW_BYTES;
            codes[i] |= (w >> BITS * field & ((1u << BITS) - 1) * 0x01010101u) << (S::width(i) & (BITS - 1));
            ++at;
        }
    }
}

/// The lowest bits of four neighbouring channels of a token's values, the `group`-th four.
template <class S>
DEVICE u32 lowest_of_values(const unsigned char* page, int token, int group) {
    constexpr int WIDTH = S::width(0), BITS = WIDTH & 1 ? 1 : WIDTH & 2 ? 2 : 4, ROW_BYTES = plane_row<S>(BITS);
    const u32 w = read_word<S, ROW_BYTES / 4>(page + S::offset(BITS), token, group * 4 % ROW_BYTES / 4);
    return w >> group * 4 / ROW_BYTES * BITS & 0x01010101u;
}
/// The bytes of a word, each replaced by the one so many places before; `before`: the word before it.
DEVICE u32 moved(u32 before, u32 w, int places) { return w << 8 * places | before >> 32 - 8 * places; }
constexpr bool has_ring(int width) { return width > 0 && width < 8; }
DEVICE u32 index_of(u32 code, u32 one, u32 two) { return (code ^ two) << 1 | one; }

/// Codes of a thread's channels to indices of levels: with the lowest bits one place and two places before in a ring.
/// A ring of keys is a band, byte by byte: run n is the n-th thread's.
template <class S>
DEVICE void indices_of_keys(u32 (&codes)[BANDS], int j) {
    const int lane = threadIdx.x % 32, first = lane - lane % LANES;
#pragma unroll
    for (int from = 0; from < BANDS; from += 8) {
        u32 low = 0;             // of eight bands, a bit each in every byte
#pragma unroll
        for (int i = from; i < BANDS && i < from + 8; ++i) low |= (codes[i] & 0x01010101u) << i % 8;
        u32 one = __shfl_sync(ALL_LANES, low, first + (j + 3) % LANES),
            two = __shfl_sync(ALL_LANES, low, first + (j + 2) % LANES);
        if (j < 1) one = one << 8 | one >> 24;
        if (j < 2) two = two << 8 | two >> 24;
#pragma unroll
        for (int i = from; i < BANDS && i < from + 8; ++i)
            if (has_ring(S::width(i)))
                codes[i] = index_of(codes[i], one >> i % 8 & 0x01010101u, two >> i % 8 & 0x01010101u);
    }
}
/// A ring of values is four runs D / 4 channels apart, run by run.
template <class S>
DEVICE void indices_of_values(const unsigned char* page, u32 (&codes)[BANDS], int token, int j) {
    if constexpr (has_ring(S::width(0))) {
        u32 before[BANDS];       // lowest bits of the run before
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
            before[i] = BANDS % 4 == 0
                            ? codes[(i + BANDS - BANDS / 4) % BANDS] & 0x01010101u
                            : lowest_of_values<S>(page, token, (i * LANES + j + BANDS * LANES - BANDS) % (BANDS * LANES));
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            const u32 low = codes[i] & 0x01010101u;
            before[i] = index_of(codes[i], moved(before[i], low, 1), moved(before[i], low, 2));
        }
#pragma unroll
        for (int i = 0; i < BANDS; ++i) codes[i] = before[i];
    }
}

/// Indices of a thread's channels of a token: of all warps' threads together.
template <class S>
DEVICE void read_indices(const unsigned char* page, u32 (&codes)[BANDS], int token, int j) {
    read_plane<S, 8>(page, codes, token, j);
    read_plane<S, 4>(page, codes, token, j);
    read_plane<S, 2>(page, codes, token, j);
    read_plane<S, 1>(page, codes, token, j);
    if constexpr (S::VALUES) indices_of_values<S>(page, codes, token, j);
    else indices_of_keys<S>(codes, j);
}

/// Channels 16 i + 4 j + k of a token, j-th of its threads: x[i][k] times the Hadamard matrix of the largest power of
/// two that divides D.
DEVICE void hadamard(Token& x, int j) {
    constexpr int SIZE = D & -D;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
#pragma unroll
        for (int stride = 1; stride < 4; stride *= 2)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (k & stride) continue;
                const float a = x[i][k], b = x[i][k + stride];
                x[i][k] = __fadd_rn(a, b), x[i][k + stride] = __fsub_rn(a, b);
            }
#pragma unroll
        for (int stride = 1; stride < LANES; stride *= 2)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float other = __shfl_xor_sync(ALL_LANES, x[i][k], stride);
                x[i][k] = fmaf(x[i][k], j & stride ? -1.f : 1.f, other);  // a sum or a difference, rounded once
            }
    }
#pragma unroll
    for (int stride = 1; stride < SIZE / BAND; stride *= 2)
#pragma unroll
        for (int i = 0; i < BANDS; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (i & stride) continue;
                const float a = x[i][k], b = x[i + stride < BANDS ? i + stride : i][k];
                x[i][k] = __fadd_rn(a, b), x[i + stride < BANDS ? i + stride : i][k] = __fsub_rn(a, b);
            }
    constexpr float FACTOR = float(HADAMARD_FACTOR);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) x[i][k] = __fmul_rn(x[i][k], FACTOR);
}
