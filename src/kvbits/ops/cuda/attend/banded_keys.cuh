// Keys of banded codes: scores of a step's tokens, from operands that banded_queries.cuh made for each frame.
#pragma once
#include "banded_queries.cuh"
#include "packed_codes.cuh"

struct BandedKeys {
    const Record* records;       // of the walk's unit
    float scaling;

    /// What the scores of a page's tokens are made of.
    struct Of {
        const uint2* steps;      // this lane's
        float start[2];
        float factor;            // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh)
        float constant[2];       // added to every score
    };

    DEVICE void start(const Args& a, Staged&, Unit u, const Part&, int, int) {
        records = Record::of(a, u, 0);
        scaling = a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E);
    }
    static DEVICE void prefetch(const Args& a) { prefetch_basis(a); }
    static DEVICE void prepare(const Args& a, Merge& merge, int warp, int lane) { queries_in_basis(a, merge, warp, lane); }

    /// f(what scores of the page in `slot`, which starts at `position`, are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const unsigned char* slot, int position, int lane, F f) const { f(page(a, slot, position, lane)); }
    DEVICE Of page(const Args& a, const unsigned char* slot, int position, int lane) const {
        const Record* record = records + u32(frame_of(position)) % u32(a.frames);
        const int next = frame_of(position + WARPS * CHUNK);  // of the warp's next chunk, most likely
        if (next != frame_of(position)) {
            const char* line = reinterpret_cast<const char*>(records + u32(next) % u32(a.frames)) + lane * 128;
            prefetch_l1(line);
            if (RECORD_LINES > 32 && lane + 32 < RECORD_LINES) prefetch_l1(line + 32 * 128);
        }
        const int c = lane % 4;
        Of page;
        page.steps = &record->steps[0][lane];
        const float unit = record->unit * scaling;
        page.factor = unit * power_of_two(24);
        float acc[4] = {};
#pragma unroll
        for (int i = 0; i < MEAN_STEPS; ++i) {
            const uint2 w = *reinterpret_cast<const uint2*>(slot + K_MEAN_OFFSET + (16 * i + 4 * c) * 2), b = page.steps[(KEY_STEPS + i) * 32];
            const u32 even = permute_bytes(w.x, w.y, 0x5410), odd = permute_bytes(w.x, w.y, 0x7632);
            mma_f16(acc, even, even, odd, odd, b.x, b.y);
        }
        for (int e = 0; e < 2; ++e) page.start[e] = record->start[2 * c + e], page.constant[e] = acc[e] * unit;
        return page;
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    template <bool LOW>
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, const unsigned char*, int t, const Of& page, int g, int c) const {
        float acc[UNITS][2][4];
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            for (int tile = 0; tile < 2; ++tile)
                for (int r = 0; r < 4; ++r) acc[u][tile][r] = page.start[r % 2];
        multiply<8>(acc, slot, page.steps, t, g, c);
        multiply<4>(acc, slot, page.steps + BandPlane<8>::STEPS * 32, t, g, c);
        multiply<2>(acc, slot, page.steps + (BandPlane<8>::STEPS + BandPlane<4>::STEPS) * 32, t, g, c);
        multiply<1>(acc, slot, page.steps + (KEY_STEPS - BandPlane<1>::STEPS) * 32, t, g, c);
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
    static DEVICE void multiply(float (&acc)[UNITS][2][4], const unsigned char* slot, const uint2* steps, int t, int g, int c) {
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
                    const uint2 b = steps[(P::steps_before(load) + j) * 32];
                    mma_f16(acc[u][0], operand<INTEGER, BITS>(w.x, odd[0], 0, j), operand<INTEGER, BITS>(w.y, odd[1], 0, j), operand<INTEGER, BITS>(w.x, odd[0], 1, j),
                            operand<INTEGER, BITS>(w.y, odd[1], 1, j), b.x, b.y);
                    mma_f16(acc[u][1], operand<INTEGER, BITS>(w.z, odd[2], 0, j), operand<INTEGER, BITS>(w.w, odd[3], 0, j), operand<INTEGER, BITS>(w.z, odd[2], 1, j),
                            operand<INTEGER, BITS>(w.w, odd[3], 1, j), b.x, b.y);
                }
            }
        }
    }
};
