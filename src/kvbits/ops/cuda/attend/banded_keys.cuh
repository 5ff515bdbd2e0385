// Keys of banded codes: scores of a step's tokens, from operands that banded_queries.cuh makes for each frame.
#pragma once
#include "banded_queries.cuh"
#include "packed_codes.cuh"

struct BandedKeys {
    static constexpr int MAKING = MAKERS;  // warps that attend to no page
    using Shared = FrameRing;
    FrameRing* ring;
    u32 number;                  // of the tile that the warp reads
    const FrameTile* tile;
    float scaling;

    /// What the scores of a page's tokens are made of.
    struct Of {
        const uint2* steps;      // of this lane, of the first of the key planes' steps
        float start[2];
        float factor;            // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh)
        float constant[2];       // added to every score

        DEVICE uint2 step(int i) const { return steps[i * FrameTile::ROWS * 4]; }
    };

    static DEVICE void make(const Args& a, FrameRing& ring, int maker, int lane) { make_queries(a, ring, maker, lane); }
    DEVICE void start(const Args& a, Staged&, Unit, const Part&, int, int) { scaling = a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E); }
    /// A segment's first tile.
    DEVICE void enter(FrameRing& of_block, const Segment& s, int warp) {
        ring = &of_block;
        number = ring->next[warp];
        if (s.num_chunks > 0) tile = &ring->filled(number);
    }
    /// After a segment's last page: all warps give all tiles back.
    DEVICE void leave(const Segment& s, int warp, int lane) {
        if (s.num_chunks <= 0) return;
        while (!tile->ends) next_tile(lane);
        __syncwarp();
        if (lane == 0) ring->give_back(number), ring->next[warp] = number + 1;
        __syncwarp();
    }
    DEVICE void next_tile(int lane) {
        __syncwarp();
        if (lane == 0) ring->give_back(number);
        tile = &ring->filled(++number);
    }

    /// f(what scores of the page in `slot`, which starts at `position`, are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const unsigned char* slot, int position, int lane, F f) {
        const int frame = frame_of(position), g = lane / 4, c = lane % 4, columns = a.query_columns;
        while (frame > tile->last) next_tile(lane);
        const FrameTile& from = *tile;
        const int first = (frame - from.first) * columns, row = first + (g & (columns - 1));
        const u32* q = &from.q[row][4 * c];
        const float unit = from.unit * scaling;
        float acc[2][4] = {};    // of rows 0 to 7 the first counts, of rows 8 to 15 the second: so 16 bytes of a mean are an operand as they lie
#pragma unroll
        for (int i = 0; i < D / 32 && K_HAS_MEAN; ++i) {
            const uint4 w = *reinterpret_cast<const uint4*>(slot + K_MEAN_OFFSET + (32 * i + 8 * c) * 2), b = *reinterpret_cast<const uint4*>(q + 16 * i);
            mma_f16(acc[0], w.x, w.y, w.z, w.w, b.x, b.y);
            mma_f16(acc[1], w.x, w.y, w.z, w.w, b.z, b.w);
        }
        Of page = {&from.steps[0][row][c], {}, unit * power_of_two(24), {}};
        for (int e = 0; e < 2; ++e) {
            page.start[e] = from.start[first + (2 * c + e & (columns - 1))];
            page.constant[e] = (acc[0][e] + acc[1][2 + e]) * unit;
        }
        f(page);
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    template <bool LOW>
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, const unsigned char*, int t, const Of& page, int g, int c) const {
        float acc[UNITS][2][4];
        multiply<8>(acc, slot, page, 0, t, g, c);
        multiply<4>(acc, slot, page, BandPlane<8>::STEPS, t, g, c);
        multiply<2>(acc, slot, page, BandPlane<8>::STEPS + BandPlane<4>::STEPS, t, g, c);
        multiply<1>(acc, slot, page, KEY_STEPS - BandPlane<1>::STEPS, t, g, c);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float scale[4];
            load_scales4<K_SCALE_TYPE>(scale, slot + K_SCALE_OFFSET, (t * UNITS + u) * 32 + 4 * g);
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e)
                    s[4 * u + j][0][e] = acc[u][j / 2][j % 2 * 2 + e] * (scale[j] * page.factor) + (SOFTCAP ? page.constant[e] : page.constant[e] - softmax.reference[0][e]);
        }
    }
    /// Codes of a field of bytes 0 and 2, of bytes 1 and 3.
    static DEVICE u32 even(u32 w, u32 field) { return w & field; }
    template <int BITS>
    static DEVICE u32 odd(u32 w, u32 field) { return BITS == 8 ? permute_bytes(w, 0, 0x4341) : w >> 8 & field; }
    /// Adds the products of a plane's fields to the first step's, which begin at `start`.
    template <int BITS>
    static DEVICE void multiply(float (&acc)[UNITS][2][4], const unsigned char* slot, const Of& page, int first_step, int t, int g, int c) {
        using P = BandPlane<BITS>;
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load) {
            const u32 mask = ((1u << BITS) - 1) * 0x00010001u << P::first_field(load, c) * BITS;  // of the lane's first field
            const unsigned char* at = slot + P::OFFSET + ((2 * t * UNITS + g / 4) * P::WORDS + P::word(load, c)) * 64 + g % 4 * 16;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const uint4 w = *reinterpret_cast<const uint4*>(at + 2 * u * P::WORDS * 64);
#pragma unroll
                for (int j = 0; j < P::steps(load); ++j) {
                    const int step = first_step + P::steps_before(load) + j;
                    const uint2 b = page.step(step);
                    const u32 field = mask << j * BITS;
                    const u32 x[2] = {w.x, w.z}, y[2] = {w.y, w.w};
                    for (int half = 0; half < 2; ++half) {
                        float(&sum)[4] = acc[u][half];
                        const u32 a0 = even(x[half], field), a1 = even(y[half], field), a2 = odd<BITS>(x[half], field), a3 = odd<BITS>(y[half], field);
                        if (step == 0) mma_f16(sum, a0, a1, a2, a3, b.x, b.y, page.start[0], page.start[1], page.start[0], page.start[1]);
                        else mma_f16(sum, a0, a1, a2, a3, b.x, b.y);
                    }
                }
            }
        }
    }
};
