// Keys of banded codes: scores of a step's tokens, from operands that banded_queries.cuh made for each frame.
#pragma once
#include "banded_queries.cuh"
#include "packed_codes.cuh"

/// A lane's part of a record. Where it fits registers and is needed once for a page it is loaded at once, and before the page has come: the latency of what lies
/// no nearer than L2 is then that of the page. Elsewhere operands are loaded where they are used.
struct RecordLane {
    static constexpr bool HELD = RECORD_STEPS <= 24 && CHUNK == 32 * UNITS;
    const uint2* steps;
    int of_step;                 // from a step to the next
    uint2 held[HELD ? RECORD_STEPS : 1];
    float start[2], unit;

    DEVICE void load(const Args& a, const char* records, int frame, int lane) {
        const char* record = records + u32(frame) % u32(a.frames) * a.record_bytes;
        const Record& head = *reinterpret_cast<const Record*>(record);
        of_step = 4 * a.record_columns;
        steps = Record::steps(record) + lane % of_step;
#pragma unroll
        for (int i = 0; i < RECORD_STEPS && HELD; ++i) held[HELD ? i : 0] = steps[i * of_step];
        unit = head.unit;
        for (int e = 0; e < 2; ++e) start[e] = head.start[(2 * (lane % 4) + e) % a.record_columns];
    }
    DEVICE uint2 step(int i) const { return HELD ? held[HELD ? i : 0] : steps[i * of_step]; }
};

struct BandedKeys {
    const char* records;         // of the walk's unit
    float scaling;
    int expected;                // frame of the warp's next page, most likely
    RecordLane lane_of;

    /// What the scores of a page's tokens are made of.
    struct Of {
        const RecordLane& operands;
        float factor;            // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh)
        float constant[2];       // added to every score
    };

    static DEVICE void prefetch(const Args& a) { prefetch_basis(a); }
    static DEVICE void prepare(const Args& a, Merge& merge, int warp, int lane) { queries_in_basis(a, merge, warp, lane); }
    DEVICE void start(const Args& a, Staged&, Unit u, const Part&, int, int) {
        records = Record::of(a, u, 0);
        scaling = a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E);
        expected = 0;
    }
    /// Before the next page has come.
    DEVICE void expect(const Args& a, int lane) {
        if (RecordLane::HELD) lane_of.load(a, records, expected, lane);
    }
    /// f(what scores of the page in `slot`, which starts at `position`, are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const unsigned char* slot, int position, int lane, F f) {
        const int frame = frame_of(position), c = lane % 4;
        if (!RecordLane::HELD || frame != expected) lane_of.load(a, records, frame, lane);
        expected = frame_of(position + WARPS * CHUNK);
        const char* line = records + u32(expected) % u32(a.frames) * a.record_bytes;
        for (int at = lane * 128; at < a.record_bytes; at += 32 * 128) prefetch_l1(line + at);
        const float unit = lane_of.unit * scaling;
        float acc[2][4] = {};        // two: the sums of one would wait for each other
#pragma unroll
        for (int i = 0; i < MEAN_STEPS; ++i) {
            const uint2 w = *reinterpret_cast<const uint2*>(slot + K_MEAN_OFFSET + (16 * i + 4 * c) * 2), b = lane_of.step(KEY_STEPS + i);
            const u32 even = permute_bytes(w.x, w.y, 0x5410), odd = permute_bytes(w.x, w.y, 0x7632);
            mma_f16(acc[i % 2], even, even, odd, odd, b.x, b.y);
        }
        f(Of{lane_of, unit * power_of_two(24), {(acc[0][0] + acc[1][0]) * unit, (acc[0][1] + acc[1][1]) * unit}});
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    template <bool LOW>
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, const unsigned char*, int t, const Of& page, int g, int c) const {
        float acc[UNITS][2][4];
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            for (int tile = 0; tile < 2; ++tile)
                for (int r = 0; r < 4; ++r) acc[u][tile][r] = page.operands.start[r % 2];
        multiply<8>(acc, slot, page.operands, 0, t, g, c);
        multiply<4>(acc, slot, page.operands, BandPlane<8>::STEPS, t, g, c);
        multiply<2>(acc, slot, page.operands, BandPlane<8>::STEPS + BandPlane<4>::STEPS, t, g, c);
        multiply<1>(acc, slot, page.operands, KEY_STEPS - BandPlane<1>::STEPS, t, g, c);
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
    static DEVICE void multiply(float (&acc)[UNITS][2][4], const unsigned char* slot, const RecordLane& operands, int first_step, int t, int g, int c) {
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
                    const uint2 b = operands.step(first_step + P::steps_before(load) + j);
                    mma_f16(acc[u][0], operand<INTEGER, BITS>(w.x, odd[0], 0, j), operand<INTEGER, BITS>(w.y, odd[1], 0, j), operand<INTEGER, BITS>(w.x, odd[0], 1, j),
                            operand<INTEGER, BITS>(w.y, odd[1], 1, j), b.x, b.y);
                    mma_f16(acc[u][1], operand<INTEGER, BITS>(w.z, odd[2], 0, j), operand<INTEGER, BITS>(w.w, odd[3], 0, j), operand<INTEGER, BITS>(w.z, odd[2], 1, j),
                            operand<INTEGER, BITS>(w.w, odd[3], 1, j), b.x, b.y);
                }
            }
        }
    }
};
