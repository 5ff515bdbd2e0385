// Keys of banded codes: scores of a step's tokens, from operands that banded_queries.cuh makes for each frame.
#pragma once
#include "banded_queries.cuh"
#include "packed_codes.cuh"

struct BandedKeys {
    static constexpr int MAKING = MAKERS;  // warps that attend to no page
    using Shared = FrameRing;
    FrameRing* ring;
    u32 number;                  // of the tile that the warp reads
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
        if (s.num_chunks > 0) ring->filled(number);
    }
    /// After a segment's last page: all warps give all tiles back.
    DEVICE void leave(const Segment& s, int warp, int lane) {
        if (s.num_chunks <= 0) return;
        while (!tile().ends) next_tile(lane);
        __syncwarp();
        if (lane == 0) ring->give_back(number), ring->next[warp] = number + 1;
        __syncwarp();
    }
    DEVICE const FrameTile& tile() const { return ring->tiles[number % FRAME_TILES]; }
    DEVICE void next_tile(int lane) {
        __syncwarp();
        if (lane == 0) ring->give_back(number);
        ring->filled(++number);
    }

    /// f(what scores of the page in `slot`, which starts at `position`, are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const unsigned char* slot, int position, int lane, F f) {
        const int frame = frame_of(position), g = lane / 4, c = lane % 4, columns = a.query_columns;
        while (frame > tile().last) next_tile(lane);
        const FrameTile& from = tile();
        const int first = (frame - from.first) * columns, row = first + (g & (columns - 1));
        const u16* q = &from.q[row][4 * c];
        const float unit = from.unit * scaling;
        float acc[2][4] = {};    // two: the sums of one would wait for each other
#pragma unroll
        for (int i = 0; i < D / 16 && K_HAS_MEAN; ++i) {
            const uint2 w = *reinterpret_cast<const uint2*>(slot + K_MEAN_OFFSET + (16 * i + 4 * c) * 2), b = *reinterpret_cast<const uint2*>(q + 16 * i);
            mma_f16(acc[i % 2], w.x, w.x, w.y, w.y, b.x, b.y);
        }
        Of page = {&from.steps[0][row][c], {}, unit * power_of_two(24), {}};
        for (int e = 0; e < 2; ++e) {
            page.start[e] = from.start[first + (2 * c + e & (columns - 1))];
            page.constant[e] = (acc[0][e] + acc[1][e]) * unit;
        }
        f(page);
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    template <bool LOW>
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, const unsigned char*, int t, const Of& page, int g, int c) const {
        float acc[UNITS][2][4];
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            for (int half = 0; half < 2; ++half)
                for (int r = 0; r < 4; ++r) acc[u][half][r] = page.start[r % 2];
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
    /// Adds the products of a plane's fields.
    template <int BITS>
    static DEVICE void multiply(float (&acc)[UNITS][2][4], const unsigned char* slot, const Of& page, int first_step, int t, int g, int c) {
        using P = BandPlane<BITS>;
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load) {
            const int down = P::words(load) == 4 ? 0 : P::first_field(load, c) * BITS;
            const unsigned char* at = slot + P::OFFSET + ((2 * t * UNITS + g / 4) * P::WORDS + P::word(load, c)) * 64 + g % 4 * 16;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                uint4 w = *reinterpret_cast<const uint4*>(at + 2 * u * P::WORDS * 64);
                if (P::words(load) < 4) w = {w.x >> down, w.y >> down, w.z >> down, w.w >> down};
                const u32 odd[4] = {odd_bytes<INTEGER, BITS>(w.x), odd_bytes<INTEGER, BITS>(w.y), odd_bytes<INTEGER, BITS>(w.z), odd_bytes<INTEGER, BITS>(w.w)};
#pragma unroll
                for (int j = 0; j < P::steps(load); ++j) {
                    const uint2 b = page.step(first_step + P::steps_before(load) + j);
                    mma_f16(acc[u][0], operand<INTEGER, BITS>(w.x, odd[0], 0, j), operand<INTEGER, BITS>(w.y, odd[1], 0, j), operand<INTEGER, BITS>(w.x, odd[0], 1, j),
                            operand<INTEGER, BITS>(w.y, odd[1], 1, j), b.x, b.y);
                    mma_f16(acc[u][1], operand<INTEGER, BITS>(w.z, odd[2], 0, j), operand<INTEGER, BITS>(w.w, odd[3], 0, j), operand<INTEGER, BITS>(w.z, odd[2], 1, j),
                            operand<INTEGER, BITS>(w.w, odd[3], 1, j), b.x, b.y);
                }
            }
        }
    }
};
