// Keys of trellis codes: scores of a step's tokens, from operands that banded_frames.cuh makes for each frame.
#ifndef BANDED_KEYS_CUH
#define BANDED_KEYS_CUH
#include "banded_rings.cuh"
#include "packed_codes.cuh"

// at most four query columns: the other four of a matrix instruction are of the lower bytes, or of other channels
constexpr bool FOLD = FOLDED;

/// Where a warp is among the tiles, and what both kinds of operands have in common.
struct BandedFrames {
    static constexpr int MAKING = MAKERS;  // warps that attend to no page
    using Shared = FrameRing;
    FrameRing* ring;
    u32 number;                  // of the tile that the warp reads
    const FrameTile* tile;
    int first, last;             // of its frames

    static DEVICE void make(const Args& a, FrameRing& ring, int maker, int lane) {
        make_queries<KeyFormat>(a, ring, maker, lane);
    }
    DEVICE void start(const Args&, Staged&, Unit, const Part&, int, int) {}
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

    /// Rows of the tile that columns of the page which starts at `position` have: from here on.
    DEVICE int rows_of(const Args& a, int position, int lane) {
        const int frame = frame_of(position);
        while (frame > last) next_tile(lane);
        return (frame - first) * a.query_columns;
    }
    /// What offsets add to scores, of the lane's columns 2c, 2c + 1: the first of a column's row.
    DEVICE void of_page(const float* (&offsets)[2], int rows, int columns, int c) const {
        for (int e = 0; e < 2; ++e) offsets[e] = &tile->offsets[0][rows + (2 * c + e & (columns - 1))];
    }
    /// Which of its rows is that of the chunk's first 16 tokens, and what those `tile` further on are given.
    static DEVICE int first_run(const Chunk& chunk) {
        return offsets_row_of(chunk.page_position, chunk.position - chunk.page_position);
    }
    static DEVICE float of_tile(const float* offsets, int first_run, int tile) {
        return offsets[min(first_run + tile, OFFSETS - 2) * FrameTile::ROWS];
    }
    /// Of a chunk that begins at position 0 the tile's row of column 0 and the number of columns, less 1, in one
    /// number; else -1.
    static DEVICE int first_of(const Chunk& chunk, int rows, int columns) {
        return chunk.position ? -1 : rows * 8 + columns - 1;
    }
    /// What is added to the score of position 0 besides, for the column that is `column` of the lane's instruction.
    DEVICE float of_first(int first, int column) const {
        const int row = first / 8 + (column & first & 7);
        return tile->offsets[OFFSETS - 1][row] - tile->offsets[0][row];
    }
};

/// Float16 operands: codes as packed_codes.cuh has them.
struct BandedKeys : BandedFrames {
    /// What the scores of a page's tokens are made of.
    struct Of {
        const uint2* steps;      // of this lane, of the first of the key planes' steps
        float start[2];
        float factor;            // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh)
        const float* offsets[2]; // added to scores, see of_tile
        int first_run;
        int first;               // see first_of

        DEVICE uint2 step(int i) const { return steps[i * FrameTile::ROWS * 4]; }
    };

    /// f(what scores of the chunk's page are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const Chunk& chunk, int lane, F f) {
        const int g = lane / 4, c = lane % 4, columns = a.query_columns, rows = rows_of(a, chunk.page_position, lane),
                  row = rows + (g & (columns - 1));
        Of page = {&tile->steps[0][row][c], {}, tile->unit * power_of_two(24), {}, first_run(chunk), 0};
        of_page(page.offsets, rows, columns, c);
        page.first = first_of(chunk, rows, columns);
        for (int e = 0; e < 2; ++e) page.start[e] = tile->start[rows + (2 * c + e & (columns - 1))] * power_of_two(-24);
        f(page);
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, int t,
                       const Of& page, int g, int c) const {
        float acc[UNITS][2][4];
        multiply<8>(acc, slot, page, 0, t, g, c);
        multiply<4>(acc, slot, page, BandPlane<8>::STEPS, t, g, c);
        multiply<2>(acc, slot, page, BandPlane<8>::STEPS + BandPlane<4>::STEPS, t, g, c);
        multiply<1>(acc, slot, page, KEY_STEPS - BandPlane<1>::STEPS, t, g, c);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float scale[4];
            load_scales4<K_SCALE_TYPE>(scale, slot + K_SCALE_OFFSET, (t * UNITS + u) * 32 + 4 * g);
            float added[2];
            for (int e = 0; e < 2; ++e)
                added[e] = of_tile(page.offsets[e], page.first_run, (t * UNITS + u) * 2 + g / 4) -
                           (SOFTCAP ? 0.f : softmax.reference[0][e]);
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e)
                    s[4 * u + j][0][e] = acc[u][j / 2][j % 2 * 2 + e] * (scale[j] * page.factor) + added[e];
        }
        if (page.first >= 0 && t == 0 && g == 0)
            for (int e = 0; e < 2; ++e) s[0][0][e] += of_first(page.first, 2 * c + e);
    }
    /// Codes of a field of bytes 0 and 2, of bytes 1 and 3; `whole`: no other bits are set.
    static DEVICE u32 even(u32 w, u32 field) { return w & field; }
    static DEVICE u32 odd(u32 w, u32 field, bool whole) { return whole ? permute_bytes(w, 0, 0x4341) : w >> 8 & field; }
    /// Adds the products of a plane's fields to the first step's, which begin at `start`.
    template <int BITS>
    static DEVICE void multiply(float (&acc)[UNITS][2][4], const unsigned char* slot, const Of& page, int first_step,
                                int t, int g, int c) {
        using P = BandPlane<BITS>;
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load) {
            const KeyRing<P> ring(load, c);
            const u32 mask = P::mask(load) * 0x00010001u << P::lane_bit(load, c);  // of the lane's first field
            const unsigned char* at =
                slot + P::OFFSET + ((2 * t * UNITS + g / 4) * P::WORDS + P::word(load, c)) * 64 + g % 4 * 16;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                u32 words[4][2];
                ring.read(words, at + 2 * u * P::WORDS * 64);
#pragma unroll
                for (int j = 0; j < P::steps(load); ++j) {
                    const int step = first_step + P::steps_before(load) + j;
                    const uint2 b = page.step(step);
                    const u32 field = mask << P::bit(load, j);
                    for (int half = 0; half < 2; ++half) {
                        float(&sum)[4] = acc[u][half];
                        const u32 x = words[2 * half][j % 2], y = words[2 * half + 1][j % 2];
                        const bool whole = BITS == 8 || (BITS == 4 && P::joined(load));
                        const u32 a0 = even(x, field), a1 = even(y, field), a2 = odd(x, field, whole),
                                  a3 = odd(y, field, whole);
                        if (step == 0)
                            mma_f16(sum, a0, a1, a2, a3, b.x, b.y, page.start[0], page.start[1], page.start[0],
                                    page.start[1]);
                        else mma_f16(sum, a0, a1, a2, a3, b.x, b.y);
                    }
                }
            }
        }
    }
};

/// A step's codes of a lane's four tokens, waiting for another step's: a matrix instruction takes two.
struct Codes { u32 of[4]; };

constexpr int BYTE_TOKENS = 2 * UNITS;   // of a lane in a step
/// Token i of a lane among the 32 of its unit, and what lanes c < 2 or the others have of a pair.
DEVICE int byte_token(int i, int g, int c) { return 4 * g + c / 2 * 2 + i; }
template <class T>
DEVICE T of_half(T first, T second, int c) { return c < 2 ? first : second; }

/// Bytes: those of codes and the two of a query's numbers. Lanes c < 2 have sums of the upper ones, lanes c + 2 of the
/// lower ones of the same columns (FOLD); of each four tokens the first ones come to have the scores of two, the others
/// of the other two.
struct ByteKeys : BandedFrames {
    using Sums = int[UNITS][2][4];
    static constexpr int MOST = BandPlane<8>::MOST + BandPlane<4>::MOST + BandPlane<2>::MOST + BandPlane<1>::MOST;
    static_assert(!BYTES || 128 * MOST < 1 << 22, "family.py has others multiplied as float16");

    /// What the scores of a page's tokens are made of.
    struct Of {
        const u32* steps;        // of this lane, of the first of the key planes' steps
        // of this lane's sums and of those of lane c + 2 or c - 2 -> exponent of 2 (or, with a softcap, argument of
        // tanh)
        float factor[2], other[2];
        float start[2];          // added to such sums before a token's scale is multiplied
        const float* offsets[2]; // added to scores, see of_tile
        int first_run;
        int first;               // see first_of

        DEVICE u32 step(int i) const { return steps[i * (FrameTile::ROWS * 4 * 2)]; }
    };

    /// f(what scores of the chunk's page are made of).
    template <class F>
    DEVICE void with_page(const Args& a, const Chunk& chunk, int lane, F f) {
        const int g = lane / 4, c = lane % 4, columns = a.query_columns, rows = rows_of(a, chunk.page_position, lane),
                  row = rows + (g & (columns - 1));
        Of page = {reinterpret_cast<const u32*>(&tile->steps[0][row][c]) + g / 4};
        of_page(page.offsets, rows, columns, c);
        page.first_run = first_run(chunk);
        page.first = first_of(chunk, rows, columns);
        for (int e = 0; e < 2; ++e) {
            const int column = rows + (2 * c + e & (columns - 1));
            page.factor[e] = tile->factor[column] * of_half(256.f, 1.f, c);
            page.other[e] = tile->factor[column] * of_half(1.f, 256.f, c);
            page.start[e] = tile->start[column];
        }
        f(page);
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    DEVICE void scores(float (&s)[BYTE_TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, int t,
                       const Of& page, int g, int c) const {
        Sums sums;
        Codes waiting[UNITS];
        multiply<8>(sums, waiting, slot, page, 0, t, g, c);
        multiply<4>(sums, waiting, slot, page, BandPlane<8>::STEPS, t, g, c);
        multiply<2>(sums, waiting, slot, page, BandPlane<8>::STEPS + BandPlane<4>::STEPS, t, g, c);
        multiply<1>(sums, waiting, slot, page, KEY_STEPS - BandPlane<1>::STEPS, t, g, c);
        if (KEY_STEPS % 2)
            for (int u = 0; u < UNITS; ++u) add(sums[u], waiting[u], {0, 0, 0, 0}, page, KEY_STEPS - 1);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            float scale[4];
            load_scales4<K_SCALE_TYPE>(scale, slot + K_SCALE_OFFSET, (t * UNITS + u) * 32 + 4 * g);
            float added[2];
            for (int e = 0; e < 2; ++e)
                added[e] = of_tile(page.offsets[e], page.first_run, (t * UNITS + u) * 2 + g / 4) -
                           (SOFTCAP ? 0.f : softmax.reference[0][e]);
            for (int i = 0; i < 2; ++i)
                for (int e = 0; e < 2; ++e) {
                    const int first = sums[u][0][2 * i + e], second = sums[u][1][2 * i + e];
                    const float own = of_whole(of_half(first, second, c)),
                                other = of_whole(__shfl_xor_sync(ALL_LANES, of_half(second, first, c), 2));
                    s[2 * u + i][0][e] = (own * page.factor[e] + (other * page.other[e] + page.start[e])) *
                                             of_half(scale[i], scale[2 + i], c) +
                                         added[e];
                }
        }
        if (page.first >= 0 && t == 0 && g == 0 && c < 2)
            for (int e = 0; e < 2; ++e) s[0][0][e] += of_first(page.first, 2 * c + e);
    }
    /// Adds the products of a plane's steps.
    template <int BITS>
    static DEVICE void multiply(Sums& sums, Codes (&waiting)[UNITS], const unsigned char* slot, const Of& page,
                                int first_step, int t, int g, int c) {
        using P = BandPlane<BITS>;
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load) {
            const KeyRing<P> ring(load, c);
            const unsigned char* at =
                slot + P::OFFSET + ((2 * t * UNITS + g / 4) * P::WORDS + P::word(load, c)) * 64 + g % 4 * 16;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                u32 words[4][2];
                ring.read(words, at + 2 * u * P::WORDS * 64);
#pragma unroll
                for (int j = 0; j < P::steps(load); ++j) {
                    const int step = first_step + P::steps_before(load) + j,
                              down = P::moves(load) ? P::lane_bit(load, c) + P::bit(load, j) / 4 * 4 : 0;
                    const u32 field = P::mask(load) * 0x01010101u << P::exponent(load, j, c);
                    Codes codes;
                    // joined words of 4 bits have no other bits
                    for (int i = 0; i < 4; ++i)
                        codes.of[i] = BITS == 4 && P::joined(load) ? words[i][j % 2] : words[i][j % 2] >> down & field;
                    if (step % 2) add(sums[u], waiting[u], codes, page, step - 1);
                    else waiting[u] = codes;
                }
            }
        }
    }
    static DEVICE void add(int (&sums)[2][4], const Codes& x, const Codes& y, const Of& page, int step) {
        const u32 b0 = page.step(step), b1 = step + 1 < KEY_STEPS ? page.step(step + 1) : 0;
#pragma unroll
        for (int rows = 0; rows < 2; ++rows) {
            const u32 x0 = x.of[2 * rows], x1 = x.of[2 * rows + 1], y0 = y.of[2 * rows], y1 = y.of[2 * rows + 1];
            if (step == 0)
                mma_bytes<true>(sums[rows], x0, x1, y0, y1, b0, b1, WHOLE_BITS, WHOLE_BITS, WHOLE_BITS, WHOLE_BITS);
            else mma_bytes<true>(sums[rows], x0, x1, y0, y1, b0, b1);
        }
    }
};
#endif
