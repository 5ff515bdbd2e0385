// Keys of banded codes: scores of a step's tokens, from operands that banded_queries.cuh makes for each frame. Codes are bytes, and so are the two halves of a
// query's numbers: with at most four query columns (FOLD) the other four of a matrix instruction are the lower halves.
#pragma once
#include "banded_queries.cuh"
#include "packed_codes.cuh"

constexpr bool FOLD = FOLDED;
constexpr int HALVES = FOLD ? 1 : 2;     // sums of the upper bytes; with FOLD of those in lanes c < 2, of the lower ones in the others

/// A step's codes of a lane's four tokens, waiting for another step's: a matrix instruction takes two.
struct Codes { u32 of[4]; };

struct BandedKeys {
    static constexpr int MAKING = MAKERS;  // warps that attend to no page
    using Shared = FrameRing;
    using Sums = int[HALVES][UNITS][2][4];
    FrameRing* ring;
    u32 number;                  // of the tile that the warp reads
    const FrameTile* tile;
    int first, last;             // of its frames

    /// What the scores of a page's tokens are made of.
    struct Of {
        const u32* steps;        // of this lane, of the first of the key planes' steps
        float factor[2];         // sum of the upper half or, with FOLD, of this lane's -> exponent of 2 (or, with a softcap, argument of tanh)
        float start[2];          // added to such sums (with FOLD by two lanes, half each) before a token's scale is multiplied
        float constant[2];       // added to every score

        DEVICE u32 step(int i, int half) const { return steps[i * (FrameTile::ROWS * 4 * 2) + half]; }
    };

    static DEVICE void make(const Args& a, FrameRing& ring, int maker, int lane) { make_queries(a, ring, maker, lane); }
    /// A segment's first tile.
    DEVICE void enter(FrameRing& of_block, const Segment& s, int warp) {
        ring = &of_block;
        number = ring->next[warp];
        if (s.num_chunks > 0) open_tile();
    }
    DEVICE void open_tile() {
        tile = &ring->filled(number);
        first = tile->first, last = tile->last;
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
        ++number;
        open_tile();
    }

    /// f(what scores of the page in `slot`, which starts at `position`, are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const unsigned char* slot, int position, int lane, F f) {
        const int frame = frame_of(position), g = lane / 4, c = lane % 4, columns = a.query_columns;
        while (frame > last) next_tile(lane);
        const FrameTile& from = *tile;
        const int at = (frame - first) * columns, row = at + (g & (columns - 1));
        constexpr int PARTS = FOLD ? 2 : 1;  // with FOLD rows and columns from 4 on are of the second half of the channels
        const int part = FOLD ? g / 4 : 0;
        const u32* q = &from.q[row][part * (D / 4) + 4 * c];
        float acc[2][4] = {};    // of rows 0 to 7 the first counts, of rows 8 to 15 the second: so 16 bytes of a mean are an operand as they lie
#pragma unroll
        for (int i = 0; i < D / 32 / PARTS && K_HAS_MEAN; ++i) {
            const unsigned char* mean = slot + K_MEAN_OFFSET + (part * (D / 2) + 32 * i + 8 * c) * 2;
            const uint4 w = *reinterpret_cast<const uint4*>(mean), b = *reinterpret_cast<const uint4*>(q + 16 * i);
            mma_f16(acc[0], w.x, w.y, w.z, w.w, b.x, b.y);
            mma_f16(acc[1], w.x, w.y, w.z, w.w, b.z, b.w);
        }
        Of page = {reinterpret_cast<const u32*>(&from.steps[0][row][c]) + (FOLD ? g / 4 : 0)};
        for (int e = 0; e < 2; ++e) {
            const int column = at + (2 * c + e & (columns - 1));
            page.factor[e] = from.factor[column] * (FOLD && c >= 2 ? 1.f : 256.f);
            page.start[e] = from.start[column] * (FOLD ? 0.5f : 1.f);
            float mean = acc[0][e] + acc[1][2 + e];
            if (FOLD && K_HAS_MEAN) {  // halves meet where rows and columns are of the same one
                mean += __shfl_xor_sync(ALL_LANES, mean, 18);
                mean = __shfl_sync(ALL_LANES, mean, g / 4 == c / 2 ? lane : lane ^ 2);
            }
            page.constant[e] = mean * from.unit;
        }
        f(page);
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, int t, const Of& page, int g, int c) const {
        Sums sums;
        Codes waiting[UNITS];
        multiply<8>(sums, waiting, slot, page, 0, t, g, c);
        multiply<4>(sums, waiting, slot, page, BandPlane<8>::STEPS, t, g, c);
        multiply<2>(sums, waiting, slot, page, BandPlane<8>::STEPS + BandPlane<4>::STEPS, t, g, c);
        multiply<1>(sums, waiting, slot, page, KEY_STEPS - BandPlane<1>::STEPS, t, g, c);
        if (KEY_STEPS % 2)
            for (int u = 0; u < UNITS; ++u) add(sums, u, waiting[u], {0, 0, 0, 0}, page, KEY_STEPS - 1);
        float base[2];
        for (int e = 0; e < 2; ++e) base[e] = (SOFTCAP ? page.constant[e] : page.constant[e] - softmax.reference[0][e]) * (FOLD ? 0.5f : 1.f);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float scale[4];
            load_scales4<K_SCALE_TYPE>(scale, slot + K_SCALE_OFFSET, (t * UNITS + u) * 32 + 4 * g);
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e) {
                    float x = page.start[e];
                    if (!FOLD) x += of_whole(sums[HALVES - 1][u][j / 2][j % 2 * 2 + e]) * (page.factor[e] * (1.f / 256.f));
                    x += of_whole(sums[0][u][j / 2][j % 2 * 2 + e]) * page.factor[e];
                    x = x * scale[j] + base[e];
                    s[4 * u + j][0][e] = FOLD ? x + __shfl_xor_sync(ALL_LANES, x, 2) : x;  // both lanes come to the same
                }
        }
    }
    /// Adds the products of a plane's steps.
    template <int BITS>
    static DEVICE void multiply(Sums& sums, Codes (&waiting)[UNITS], const unsigned char* slot, const Of& page, int first_step, int t, int g, int c) {
        using P = BandPlane<BITS>;
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load) {
            const unsigned char* at = slot + P::OFFSET + ((2 * t * UNITS + g / 4) * P::WORDS + P::word(load, c)) * 64 + g % 4 * 16;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                const uint4 w = *reinterpret_cast<const uint4*>(at + 2 * u * P::WORDS * 64);
#pragma unroll
                for (int j = 0; j < P::steps(load); ++j) {
                    const int step = first_step + P::steps_before(load) + j, down = BITS * P::first_field(load, c) + P::down(j);
                    const u32 field = ((1u << BITS) - 1) * 0x01010101u << P::exponent(j);
                    const Codes codes = {w.x >> down & field, w.y >> down & field, w.z >> down & field, w.w >> down & field};
                    if (step % 2) add(sums, u, waiting[u], codes, page, step - 1);
                    else waiting[u] = codes;
                }
            }
        }
    }
    static DEVICE void add(Sums& sums, int u, const Codes& x, const Codes& y, const Of& page, int step) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const u32 b0 = page.step(step, half), b1 = step + 1 < KEY_STEPS ? page.step(step + 1, half) : 0;
#pragma unroll
            for (int rows = 0; rows < 2; ++rows) {
                int(&sum)[4] = sums[half][u][rows];
                const u32 x0 = x.of[2 * rows], x1 = x.of[2 * rows + 1], y0 = y.of[2 * rows], y1 = y.of[2 * rows + 1];
                if (step == 0) mma_bytes<true>(sum, x0, x1, y0, y1, b0, b1, WHOLE_BITS, WHOLE_BITS, WHOLE_BITS, WHOLE_BITS);
                else mma_bytes<true>(sum, x0, x1, y0, y1, b0, b1);
            }
        }
    }
};
