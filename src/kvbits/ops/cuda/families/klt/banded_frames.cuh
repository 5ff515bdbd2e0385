// Queries transformed into the keys' calibrated basis (docs/reference/formats.md, "Trellis codes"):
//
//   q' = (q turned back by the frame's position) A^-T        one for every column and frame of FRAME positions, with
//   A^-1 of part.k_inverse
//
// MAKERS warps of a block make them, 16 rows (columns of one frame or of several) at a time, a few tiles ahead of the
// warps that attend; nothing of it leaves shared memory. A^-1 is float16 numbers; turned queries are two of them, the
// second what the first leaves, so that queries which are large in a direction that the basis takes out lose nothing.
// Results are stored as operands of the key planes: an index is the sum of its planes' fields, each times 2**shift, so a
// key is several narrow tensors whose scores add, and plane by plane the walk knows no bands. For up to four query
// columns (BYTES) operands are whole numbers of 16 bits, at most FULL for the largest number of a row, in two bytes:
// the upper one rounded to the nearest, so that the lower has a sign, too. For more they are float16 numbers: bytes
// would take as many matrix instructions (docs/results/log/gpu-kernels.md).
#pragma once
#include "columns.cuh"
#include "turn.cuh"

constexpr bool BYTES = FOLDED;
/// Where what makers unroll would spill: a block of more than 7 consumer warps has 128 registers a thread, wide heads
/// take more, and before Hopper a thread has other values to keep.
constexpr bool FEW_REGISTERS = WARPS > 7 || D > 128 || __CUDA_ARCH__ < 900;

/// The middle of the range of a band's indices; of 8 bits that of codes, in halves of a scale.
DEVICE float middle_of(int width) { return width == 8 ? 255.f : width ? float(1 << width) - 0.5f : 0.f; }

DEVICE int frame_of(int position) { return position / FRAME; }
/// The row of offsets of 16 tokens from `place` in a page on, whose first token is at `start`; past the frame its last.
DEVICE int offsets_row_of(int start, int place) { return int(u32(start) % FRAME + u32(place)) / MEAN_STEP; }

/// A^-1 of a head as operands.py's basis_operands lays it out: 16 x 16 tiles as operands, what belongs to all, and what
/// keys are stored less.
struct InverseBasis {
    uint4 tiles[D / 16][D / 16][32];
    float unit, norm;            // what numbers are to be multiplied by; largest sum of a row's squares before that
    float padding[2];
    u16 offsets[OFFSETS][D];     // float16
};

/// Rows of queries in the basis: column `row` % columns of frame `first` + `row` / columns.
struct alignas(16) FrameTile {
    // FRAMES: at most; a.query_columns is 8 without FOLDED. STRIDE: rows of four lanes with 16 bytes each meet no bank
    // twice
    static constexpr int ROWS = 16, FRAMES = FOLDED ? 16 : 2, STRIDE = D / 2 + 16;
    static constexpr float FULL = 32600.f;
    float start[ROWS];           // of each row minus the middle of the codes' ranges times q', with BYTES times `unit`
    // BYTES: of sums of codes times `steps` -> exponents of 2 (or, with a softcap, arguments of tanh)
    float factor[ROWS];
    float unit;                  // of products of q with halves of scales -> such exponents
    int first, last;             // frames
    int ends;                    // whether the segment's next frames are none
    float offsets[OFFSETS][ROWS];  // q' times what keys are stored less, times `unit`
    // of a lane's four channels upper bytes, lower bytes; or float16 numbers, first and third, second and fourth
    uint2 steps[MOST_KEY_STEPS][ROWS][4];  // those of the keys' format are the first

    static DEVICE int place(int pair) { return pair / 4 * 4 + pair % 2 * 2 + pair / 2 % 2; }
};
/// What makers have in shared memory. Tile t of the block lies at t % FRAME_TILES.
struct FrameRing {
    // HELD: registers hold the matrix, and it is not loaded again for every tile
    static constexpr int KS = D / 16, HELD = KS <= 8;
    FrameTile tiles[FRAME_TILES];
    uint4 turned[KS][2][32];     // queries of a tile as operands: first numbers and second ones of each step
    // the rows of the tile that is made: pairs of channels; of four the second and third change places, as offsets are
    // multiplied
    u32 q[FrameTile::ROWS][FrameTile::STRIDE];
    // of each frame of a tile and the channel pairs of the maker's steps
    float2 turns[MAKERS][FrameTile::FRAMES][D / 2 / MAKERS];
    float2 rows[MAKERS][8];      // largest magnitude and sum of squares of a query's channels of a maker's steps
    // sums and largest numbers of a maker's channels
    float start[MAKERS][FrameTile::ROWS], largest[MAKERS][FrameTile::ROWS];
    u64 full[FRAME_TILES], empty[FRAME_TILES];
    u32 next[WARPS];             // tile of a warp's next segment

    /// Before the block's first barrier.
    DEVICE void set_up() {
        if (threadIdx.x < FRAME_TILES) {
            barrier_init(shared_address(&full[threadIdx.x]), MAKERS);
            barrier_init(shared_address(&empty[threadIdx.x]), WARPS);
        }
        if (threadIdx.x < WARPS) next[threadIdx.x] = 0;
    }
    DEVICE FrameTile& filled(u32 tile) {
        barrier_wait(shared_address(&full[tile % FRAME_TILES]), tile / FRAME_TILES & 1);
        return tiles[tile % FRAME_TILES];
    }
    DEVICE void give_back(u32 tile) { barrier_arrive(shared_address(&empty[tile % FRAME_TILES])); }
};

/// One unit's queries: those of a lane's row, which are of column g % columns in every frame.
struct UnitQueries {
    static constexpr int KS = D / 16, OWNED = KS / MAKERS;
    // of the maker's steps: channels (8 i + 2 c, + 1) and D / 2 further on, times a power of two
    float2 q[OWNED][2];
    float unit, multiplier;

    DEVICE UnitQueries(const Args& a, Unit u, const InverseBasis& inverse, FrameRing& ring, int columns, int maker,
                       int lane) {
        const int g = lane / 4, c = lane % 4, index = u.block * COLS + g % columns;
        const bool inside = index < a.num_queries * a.group;
        const u16* row =
            static_cast<const u16*>(a.q) + q_offset(a, u, inside ? index : 0) + 2 * c + maker * OWNED * 8;
        u32 words[OWNED][2];
#pragma unroll
        for (int i = 0; i < 2 * OWNED; ++i)
            words[i / 2][i % 2] = *reinterpret_cast<const u32*>(row + i % 2 * (D / 2) + i / 2 * 8);
        const bool real = inside && position_of(a, u, g % columns) >= 0;
        float2 mine = {};
        bool finite = true;
#pragma unroll
        for (int i = 0; i < 2 * OWNED; ++i) {
            const float2 x = two(real ? words[i / 2][i % 2] : 0);
            q[i / 2][i % 2] = x;
            finite &= fabsf(x.x) <= 3.4e38f && fabsf(x.y) <= 3.4e38f;
            mine.x = fmaxf(mine.x, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
        mine.x = finite ? mine.x : -negative_infinity();
        for (int mask = 1; mask < 4; mask *= 2) mine.x = fmaxf(mine.x, __shfl_xor_sync(ALL_LANES, mine.x, mask));
        const float own_down = power_of_two(-exponent(mine.x));
#pragma unroll
        for (int i = 0; i < 2 * OWNED; ++i) {
            const float2 x = q[i / 2][i % 2], y = {x.x * own_down, x.y * own_down};
            mine.y += y.x * y.x + y.y * y.y;
        }
        for (int mask = 1; mask < 4; mask *= 2) mine.y += __shfl_xor_sync(ALL_LANES, mine.y, mask);
        if (c == 0) ring.rows[maker][g] = mine;
        sync_threads<2>(MAKERS * 32);
        float2 parts[MAKERS];
        float largest = 0.f, sum = 0.f;
        for (int m = 0; m < MAKERS; ++m) {
            parts[m] = ring.rows[m][g];
            largest = fmaxf(largest, parts[m].x);
        }
        finite = largest <= 3.4e38f;  // a column that is not spoils no other
        largest = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(finite ? largest : 0.f)));
        const int e = exponent(largest);
        for (int m = 0; m < MAKERS; ++m)
            sum += parts[m].y * power_of_two(min(max(2 * (exponent(parts[m].x) - e), -126), 126));
        sum = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(finite ? sum : 0.f)));
        const float down = power_of_two(-e);
#pragma unroll
        for (int i = 0; i < 2 * OWNED; ++i) {
            float2& x = q[i / 2][i % 2];
            x = {x.x * down, x.y * down};
        }
        // No number's square passes sum * norm: they come to 2**12 at most, and fit float16 with the shift of a plane.
        const float bound = sum * inverse.norm;
        const int shift = bound > 1e-30f ? 12 - ((exponent_of(bound) + 2) >> 1) : 0;
        multiplier = power_of_two(shift);
        unit = power_of_two(-shift) * inverse.unit * power_of_two(e);
    }
    /// Exponent of the power of two that numbers up to `largest` are divided by.
    static DEVICE int exponent(float largest) { return max(-126, min(exponent_of(largest), 126)); }
    static DEVICE float2 two(u32 w) {
        if (Q_TYPE == BFLOAT16) return {bf16_to_float(u16(w)), bf16_to_float(u16(w >> 16))};
        return {low_f16(w), high_f16(w)};
    }
    static DEVICE void split(u32& first, u32& second, float x, float y) {
        first = pack_f16(x, y);
        second = pack_f16(x - low_f16(first), y - high_f16(first));
    }
    /// Operands of the maker's i-th step: rows g and g + 8, with (cos, sin) of two channel pairs in the frame of each.
    DEVICE void turn_back(uint4& first, uint4& second, const float4 (&turns)[2], int i) const {
        const float2 x = q[i][0], y = q[i][1];
        u32 one[2][2], rest[2][2];
        for (int half = 0; half < 2; ++half) {
            const float2 r0 = {turns[half].x, turns[half].y}, r1 = {turns[half].z, turns[half].w};
            split(one[0][half], rest[0][half], x.x * r0.x - y.x * r0.y, x.y * r1.x - y.y * r1.y);
            split(one[1][half], rest[1][half], y.x * r0.x + x.x * r0.y, y.y * r1.x + x.y * r1.y);
        }
        first = {one[0][0], one[0][1], one[1][0], one[1][1]};
        second = {rest[0][0], rest[0][1], rest[1][0], rest[1][1]};
    }
};

/// Every MAKERS-th of the key planes' operands: where a lane's four channels of each are in a row of a tile, and their
/// factor.
struct Steps {
    static constexpr int COUNT = (MOST_KEY_STEPS + MAKERS - 1) / MAKERS;
    int place[COUNT];
    float factor[COUNT];

    /// multiplier: of numbers of rows g and g + 8; count: of all makers.
    DEVICE void write(FrameTile& tile, const FrameRing& ring, const float (&multiplier)[2], int count, int maker, int g,
                      int c) const {
#pragma unroll FEW_REGISTERS ? 1 : 2
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (i * MAKERS + maker >= count) continue;
                const int row = g + 8 * half;
                const u32* q = &ring.q[row][place[i]];  // and the pair after it
                const u32 x = q[0], y = q[2];
                uint2& to = tile.steps[i * MAKERS + maker][row][c];
                if (!BYTES) {
                    const u32 times = pack_f16(factor[i], factor[i]);
                    to = {mul_f16x2(permute_bytes(x, y, 0x5410), times), mul_f16x2(permute_bytes(x, y, 0x7632), times)};
                    continue;
                }
                const float times = factor[i] * multiplier[half];
                const u32 n[4] = {whole(low_f16(x) * times), whole(high_f16(x) * times), whole(low_f16(y) * times),
                                  whole(high_f16(y) * times)};
                const u32 up[4] = {n[0] + 128, n[1] + 128, n[2] + 128, n[3] + 128};
                to = {permute_bytes(permute_bytes(up[0], up[1], 0x0051), permute_bytes(up[2], up[3], 0x0051), 0x5410),
                      permute_bytes(permute_bytes(n[0], n[1], 0x0040), permute_bytes(n[2], n[3], 0x0040), 0x5410)};
            }
    }
    /// The nearest whole number, in the low 22 bits.
    static DEVICE u32 whole(float x) { return __float_as_uint(x + WHOLE); }
};

/// tile.offsets of at most 16 rows from `first` on up to `end`, for queries from 8 `half` on: offsets are the rows of one
/// operand, queries the columns of the other, as 16 bytes of each lie.
DEVICE void times_offsets(FrameTile& tile, const FrameRing& ring, const InverseBasis& inverse, float unit, int first,
                          int end, int half, int g, int c) {
    constexpr int AT_ONCE = FEW_REGISTERS ? 1 : D / 32, CHAINS = FEW_REGISTERS ? 1 : 2;
    float acc[CHAINS][4] = {};
    const int rows[2] = {first + g, first + g + 8};
#pragma unroll AT_ONCE
    for (int i = 0; i < D / 32; ++i) {
        uint4 w[2];
        for (int k = 0; k < 2; ++k)
            w[k] = rows[k] < end ? *reinterpret_cast<const uint4*>(&inverse.offsets[rows[k]][32 * i + 8 * c]) : uint4{};
        const uint4 b = *reinterpret_cast<const uint4*>(&ring.q[8 * half + g][16 * i + 4 * c]);
        mma_f16(acc[0], w[0].x, w[1].x, w[0].z, w[1].z, b.x, b.y);
        mma_f16(acc[CHAINS - 1], w[0].y, w[1].y, w[0].w, w[1].w, b.z, b.w);
    }
    for (int k = 0; k < 2; ++k)
        for (int e = 0; e < 2 && rows[k] < end; ++e) {
            float sum = acc[0][2 * k + e];
            if (CHAINS == 2) sum += acc[CHAINS - 1][2 * k + e];
            tile.offsets[rows[k]][8 * half + 2 * c + e] = sum * unit;
        }
}
/// A maker's share of all of them; those of position 0 only where a tile has it.
DEVICE void times_offsets(FrameTile& tile, const FrameRing& ring, const InverseBasis& inverse, float unit,
                          bool has_first, int maker, int g, int c) {
    constexpr int RUNS = OFFSETS - 1;
#pragma unroll 1
    for (int i = maker; i < (RUNS + 15) / 16 * 2; i += MAKERS)
        times_offsets(tile, ring, inverse, unit, i / 2 * 16, RUNS, i % 2, g, c);
    if (has_first)
        for (int half = maker; half < 2; half += MAKERS)
            times_offsets(tile, ring, inverse, unit, RUNS, OFFSETS, half, g, c);
}

/// What warp `maker` of MAKERS does. A maker holds OWNED row blocks of the matrix and turns the queries of as many
/// steps back, for all of them.
/// First, Second: formats of the keys (KeyFormat), twice the same where there is one.
template <class First, class Second = First>
DEVICE void make_queries(const Args& a, FrameRing& ring, int maker, int lane) {
    constexpr bool TWO = First::NUMBER != Second::NUMBER;
    constexpr int KS = D / 16, OWNED = KS / MAKERS, HELD = FrameRing::HELD, AT_ONCE = HELD ? OWNED : 1,
                  THREADS = MAKERS * 32;
    constexpr int PAIRS = D / 2 / MAKERS, EACH = PAIRS > 32 ? PAIRS / 32 : 1;  // PAIRS: of channels, in a maker's steps
    static_assert(KS % MAKERS == 0 && BAND == 16, "makers have equal shares, and a row block of the matrix is a band");
    const int g = lane / 4, c = lane % 4, columns = a.query_columns, of_tile = FrameTile::ROWS / columns;
    Steps steps;
    if (!TWO) First::place(steps, maker, c);
    uint4 held[OWNED][HELD ? KS : 1];
    u32 number = 0;
#pragma unroll 1
    for (int next = blockIdx.x; next >= 0;) {
        const Segment& s = a.segments[next];
        if (s.unit < 0) return;
        const Part& part = a.parts[s.part];
        next = s.next;
        if (next >= 0) prefetch_l1(a.segments + next);
        if (part.raw || s.num_chunks <= 0) continue;
        const bool second = TWO && part.format == Second::NUMBER;
        if (TWO && !second) First::place(steps, maker, c);
        if (second) Second::place(steps, maker, c);
        const u64 widths = second ? Second::WIDTHS : First::WIDTHS, highest_of = second ? Second::HIGHEST : First::HIGHEST;
        const Unit u = unit_of(a, s.unit);
        const InverseBasis& inverse = static_cast<const InverseBasis*>(part.k_inverse)[u.head];
        if (HELD) {
#pragma unroll
            for (int i = 0; i < OWNED * KS; ++i)
                held[i / KS][i % KS * HELD] = inverse.tiles[maker * OWNED + i / KS][i % KS][lane];
        }
        // the first tile would wait for each line
        for (int at = (maker * 32 + lane) * 64; at < OFFSETS * D; at += THREADS * 64)
            prefetch_l1(&inverse.offsets[0][at]);
        float2 turns[EACH];
        for (int k = 0; k < EACH; ++k) turns[k] = part.turns[maker * PAIRS + (lane + 32 * k) % PAIRS];
        const int from = s.first_entry + s.first_chunk / part.chunks_per_page,
                  to = s.first_entry + (s.first_chunk + s.num_chunks - 1) / part.chunks_per_page;
        const int start = frame_of(Page(a, s, from).tokens.x), last = frame_of(Page(a, s, to).tokens.x);
        wait_for_previous_kernel();
        const UnitQueries queries(a, u, inverse, ring, columns, maker, lane);
#pragma unroll 1
        for (int first = start; first <= last; first += of_tile, ++number) {
            float2* of_frames = &ring.turns[maker][0][0];
#pragma unroll 1
            for (int at = lane; at < of_tile * PAIRS; at += 32 * EACH)
                for (int k = 0; k < EACH; ++k)
                    of_frames[at + 32 * k] = turn_of(-FRAME * min(first + (at + 32 * k) / PAIRS, last), turns[k]);
            __syncwarp();
            for (int i = 0; i < OWNED; ++i) {
                const float2* of_row = of_frames + g / columns * PAIRS + 8 * i + 2 * c;
                const float4 found[2] = {*reinterpret_cast<const float4*>(of_row),
                                         *reinterpret_cast<const float4*>(of_row + 8 / columns * PAIRS)};
                uint4(&to)[2][32] = ring.turned[maker * OWNED + i];
                queries.turn_back(to[0][lane], to[1][lane], found, i);
            }
            __syncwarp();
            FrameTile& tile = ring.tiles[number % FRAME_TILES];
            barrier_wait(shared_address(&ring.empty[number % FRAME_TILES]), (number / FRAME_TILES & 1) ^ 1);
            sync_threads<2>(THREADS);
            float sums[2] = {}, largest[2] = {};
#pragma unroll 1
            for (int block = 0; block < OWNED; block += AT_ONCE) {
                float acc[AT_ONCE][2][4] = {};
#pragma unroll
                for (int i = 0; i < KS; ++i) {
                    const uint4 x = ring.turned[i][0][lane], rest = ring.turned[i][1][lane];
#pragma unroll
                    for (int o = 0; o < AT_ONCE; ++o) {
                        const int m = maker * OWNED + block + o;
                        const uint4 w = HELD ? held[o][i * HELD] : inverse.tiles[m][i][lane];
                        mma_f16(acc[o][0], x.x, x.y, x.z, x.w, w.x, w.y);
                        mma_f16(acc[o][1], x.x, x.y, x.z, x.w, w.z, w.w);
                        mma_f16(acc[o][0], rest.x, rest.y, rest.z, rest.w, w.x, w.y);
                        mma_f16(acc[o][1], rest.x, rest.y, rest.z, rest.w, w.z, w.w);
                    }
                }
#pragma unroll
                for (int o = 0; o < AT_ONCE; ++o) {
                    const int band = maker * OWNED + block + o;
                    const float middle = middle_of(int(widths >> 4 * band & 15)),
                                highest = float(int(highest_of >> 4 * band & 15));
                    for (int n = 0; n < 2; ++n)
                        for (int half = 0; half < 2; ++half) {
                            const u32 found = pack_f16(acc[o][n][2 * half] * queries.multiplier,
                                                       acc[o][n][2 * half + 1] * queries.multiplier);
                            ring.q[g + 8 * half][FrameTile::place(8 * band + 4 * n + c)] = found;
                            sums[half] += (low_f16(found) + high_f16(found)) * middle;
                            if (BYTES)
                                largest[half] = fmaxf(largest[half],
                                                      fmaxf(fabsf(low_f16(found)), fabsf(high_f16(found))) * highest);
                        }
                }
            }
            for (int half = 0; half < 2; ++half) {
                sums[half] += __shfl_xor_sync(ALL_LANES, sums[half], 1);
                sums[half] += __shfl_xor_sync(ALL_LANES, sums[half], 2);
                for (int mask = 1; mask < 4 && BYTES; mask *= 2)
                    largest[half] = fmaxf(largest[half], __shfl_xor_sync(ALL_LANES, largest[half], mask));
                if (c == 0)
                    ring.start[maker][g + 8 * half] = sums[half], ring.largest[maker][g + 8 * half] = largest[half];
            }
            sync_threads<2>(THREADS);
            float multiplier[2];
            for (int half = 0; half < 2 && BYTES; ++half) {
                for (int m = 0; m < MAKERS; ++m) largest[half] = fmaxf(largest[half], ring.largest[m][g + 8 * half]);
                largest[half] = fmaxf(largest[half], 1e-30f);
                multiplier[half] = FrameTile::FULL * reciprocal_approx(largest[half]);
            }
            const float whole = queries.unit * a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E), unit = 0.5f * whole;
            times_offsets(tile, ring, inverse, whole, first == 0, maker, g, c);
            steps.write(tile, ring, multiplier, second ? Second::STEPS : First::STEPS, maker, g, c);
            if (maker == MAKERS - 1) {  // which has the fewest steps
                for (int half = 0; half < 2; ++half) {
                    float sum = 0.f;
                    for (int m = 0; m < MAKERS; ++m) sum += ring.start[m][g + 8 * half];
                    if (c == 0)
                        tile.start[g + 8 * half] = BYTES ? -sum * unit : -sum,
                                           tile.factor[g + 8 * half] = largest[half] * (unit / FrameTile::FULL);
                }
                if (lane == 0)
                    tile.unit = unit, tile.first = first, tile.last = min(first + of_tile - 1, last),
                    tile.ends = first + of_tile > last;
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared_address(&ring.full[number % FRAME_TILES]));
        }
    }
}
