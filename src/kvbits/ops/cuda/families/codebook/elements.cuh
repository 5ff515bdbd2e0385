// A page's keys or values on their way through close_codebook.cu: which elements a thread has, from device memory to shared memory, turned back.
#pragma once
#include "quad.cuh"
#include "ranks.cuh"
#include "step.cuh"

constexpr int PER = 32, COUNT = PAGE * D;
constexpr int QUADS = D / 8, TEAMS = PAGE / 4;
constexpr int PADDED = (D / 2 + 15) / 16 * 16;
constexpr int STEPS = 4;              // most elements that a range leaves out
static_assert(COUNT == THREADS * PER && QUADS * TEAMS == THREADS, "32 elements a thread");

struct Args {
    const void* x[2];                 // keys, values [n, H, PAGE, D], strides in elements, last dense, rows at multiples of 16 bytes
    i64 stride[2][3];
    const i64* page_address;          // [n]
    const float *scale[2], *bias[2];  // calibrated [H][groups or channels], null if none
    const float* codebook[2];         // [H][entries]
    const double* first;              // cosines and sines of the pages' first angles [n][2][PADDED]
    const double2* step;              // of token distances, by twos: [PAGE][cosines, sines][first, second two][QUADS]
    Status* status;
    int num_pages, num_heads, head_bytes;
};

struct Shared {
    union {
        float x[PAGE * (D + 4)];
        unsigned char codes[PAGE][CODE_STRIDE];
    };
    float threshold[16][32], level[16][32];  // [code][lane], the same for each lane
    alignas(16) float scale[RANGES], inverse[RANGES], bias[RANGES];  // [group][token] or [channel]
    u32 stretch[PAGE];                // float bits
    u32 listed[THREADS], equal[THREADS];  // a bit for each element: it is listed; its error is the smallest listed one's
    u32 key[LIST];                    // candidates for the list, then the listed elements in order
    u32 bounds[WARPS];
    Ranks ranks;
    int candidates, saturated;
};

/// Words of a token in shared memory: what keeps the threads of a range off each other's banks.
template <class S>
constexpr int ROW = S::SCALE == SCALE_CHANNEL ? D + 4 : D;

/// Number of the range of an element.
template <class S>
DEVICE int range_of(int token, int channel) {
    return S::SCALE == SCALE_GROUP ? channel / S::GROUP * PAGE + token : S::SCALE == SCALE_CHANNEL ? channel : channel / S::GROUP;
}

/// Channel of element k of half `half` of this thread's, and its token i: four whose codes are stored side by side.
DEVICE int channel_of(int half, int k) { return half * (D / 2) + int(threadIdx.x) % QUADS * 4 + k; }
template <class S>
DEVICE int token_of(int team, int i) { return S::VALUES ? team / 2 * 8 + team % 2 * 2 + i % 2 + i / 2 * 4 : 4 * team + i; }
template <class S>
DEVICE int token_of(int i) { return token_of<S>(int(threadIdx.x) / QUADS, i); }

/// This thread's elements as float32, turned back, to `all` [word][k] and to shared memory. Returns whether one is not finite.
template <class S, class E>
DEVICE bool load_page(const Args& a, int side, int page, int head, Shared& shared, float (&all)[8][4]) {
    Quad raw[4][2];
    constexpr int BYTES = X_TYPE == FLOAT32 ? 4 : 2;
    const i64 step_bytes = a.stride[side][2] * BYTES;
    const i64 first_element = page * a.stride[side][0] + head * a.stride[side][1] + channel_of(0, 0);
    const char* from = static_cast<const char*>(a.x[side]) + first_element * BYTES + token_of<S>(0) * step_bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) raw[i][half].load(from + token_of<S>(0, i) * step_bytes + half * (D / 2) * BYTES);
    float zero = 0.f;  // NaN if any element is not finite
    const double2* first = reinterpret_cast<const double2*>(a.first + (E::TURNED ? i64(page) * 2 * PADDED + channel_of(0, 0) : 0));
    double c0[4], s0[4];
#pragma unroll
    for (int k = 0; k < 4 && E::TURNED; k += 2) {
        const double2 c = first[k / 2], s = first[(PADDED + k) / 2];
        c0[k] = c.x, c0[k + 1] = c.y, s0[k] = s.x, s0[k + 1] = s.y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float x[2][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) x[0][k] = raw[i][0][k], x[1][k] = raw[i][1][k];
#pragma unroll
        for (int k = 0; k < 4; ++k) zero = fmaf(x[0][k], 0.f, zero), zero = fmaf(x[1][k], 0.f, zero);
        if (E::TURNED) {
            const double2* step = a.step + token_of<S>(i) * 4 * QUADS + int(threadIdx.x) % QUADS;
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const double2 cs = load_kept(step + k / 2 * QUADS), ss = load_kept(step + (2 + k / 2) * QUADS);
                const double c1[2] = {cs.x, cs.y}, s1[2] = {ss.x, ss.y};
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float c = float(__dsub_rn(__dmul_rn(c0[k + n], c1[n]), __dmul_rn(s0[k + n], s1[n])));
                    const float s = -float(__dadd_rn(__dmul_rn(s0[k + n], c1[n]), __dmul_rn(c0[k + n], s1[n])));
                    const float low = x[0][k + n], high = x[1][k + n];
                    x[0][k + n] = __fadd_rn(__fsub_rn(__fmul_rn(low, c), __fmul_rn(high, s)), 0.f);  // a turned zero is +0
                    x[1][k + n] = __fadd_rn(__fadd_rn(__fmul_rn(high, c), __fmul_rn(low, s)), 0.f);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float4*>(&shared.x[token_of<S>(i) * ROW<S> + channel_of(half, 0)]) = {x[half][0], x[half][1], x[half][2], x[half][3]};
#pragma unroll
            for (int k = 0; k < 4; ++k) all[4 * half + i][k] = x[half][k];
        }
    }
    return zero != 0.f;
}
