// Queries as keys in a calibrated basis meet them (docs/formats.md, "Banded codes"): made by each block for the frames of its own pages before its walk, while
// the ring fills.
//
//   q' = (q turned back by the frame's position) A^-T        one for every column and frame of FRAME positions, with A^-1 of part.k_inverse
//
// The product is three of the matrix units: both operands are two float16 numbers, the second of them 2**11 times what the first leaves, so that queries which
// are large in a direction that the basis takes out lose nothing. Results are stored as operands of the key planes: a code is the sum of its planes' fields,
// each times 2**shift, so a key is several narrow tensors whose scores add, and plane by plane the walk knows no bands.
#pragma once
#include "columns.cuh"
#include "finish.cuh"
#include "turn.cuh"

/// Which bands of a head's keys have which planes.
struct Bands {
    static constexpr u64 WIDTHS = u64(K_WIDTHS_LOW) | u64(K_WIDTHS_HIGH) << 32;  // four bits each
    static constexpr int COUNT = D / BAND;

    static constexpr int width(int band) { return int(WIDTHS >> 4 * band & 15); }
    static constexpr int with(int bits) {
        int n = 0;
        for (int i = 0; i < COUNT; ++i) n += (width(i) & bits) != 0;
        return n;
    }
    /// Four bits each: the bands that have a plane.
    static constexpr u64 list(int bits) {
        u64 all = 0;
        for (int i = 0, n = 0; i < COUNT; ++i)
            if (width(i) & bits) all |= u64(i) << 4 * n++;
        return all;
    }
};

/// A plane of keys. A matrix instruction multiplies 16 channels: of each lane c those of one field of a word's four bytes. Words of a row are taken four at a time,
/// one by each lane; of two that are left two lanes take the same word, and of one all four: each of them other fields.
template <int BITS_>
struct BandPlane {
    static constexpr int BITS = BITS_, CHANNELS = BAND * Bands::with(BITS), FIELDS = 8 / BITS;
    static constexpr int OFFSET = BITS == 8 ? K_PLANE8_OFFSET : BITS == 4 ? K_PLANE4_OFFSET : BITS == 2 ? K_PLANE2_OFFSET : K_PLANE1_OFFSET;
    static constexpr int ROW = (CHANNELS * BITS + 31) / 32 * 4, WORDS = ROW / 4;  // of one token
    static constexpr int LOADS = WORDS / 4 + WORDS % 4 / 2 + WORDS % 2;
    static_assert(D % BAND == 0 && FIELDS * (WORDS % 2) % 4 == 0, "whole bands fill whole words");

    static constexpr int words(int load) { return load < WORDS / 4 ? 4 : load == WORDS / 4 && WORDS % 4 >= 2 ? 2 : 1; }
    static constexpr int first_word(int load) { return load <= WORDS / 4 ? 4 * load : WORDS / 4 * 4 + 2; }
    /// Matrix instructions of a load, and of those before it.
    static constexpr int steps(int load) { return FIELDS * words(load) / 4; }
    static constexpr int steps_before(int load) { return load <= WORDS / 4 ? FIELDS * load : FIELDS * (WORDS / 4) + FIELDS / 2; }
    static constexpr int STEPS = CHANNELS ? steps_before(LOADS - 1) + steps(LOADS - 1) : 0;
    /// Where a lane's word of a load is, and the first of its fields.
    static DEVICE int word(int load, int c) { return first_word(load) + c % words(load); }
    static DEVICE int first_field(int load, int c) { return c / words(load) * steps(load); }
};
constexpr int KEY_STEPS = BandPlane<8>::STEPS + BandPlane<4>::STEPS + BandPlane<2>::STEPS + BandPlane<1>::STEPS;
constexpr int MEAN_STEPS = K_HAS_MEAN ? D / 16 : 0;

/// Operands of one unit and frame: those of the planes' steps and of the mean (all channels in order), 16 bytes of a step's for each of `columns` columns.
struct Record {
    float start[COLS];           // of each column minus the middle of the codes' ranges times q'
    float unit;                  // of the operands: what they have to be multiplied by
    float padding[32 - COLS - 1];
    // then [KEY_STEPS + MEAN_STEPS][columns][4] uint2

    static DEVICE char* of(const Args& a, Unit u, int frame) {
        const i64 unit = (i64(u.batch) * a.num_kv_heads + u.head) * a.column_blocks + u.block;
        return static_cast<char*>(a.records) + (unit * a.frames + u32(frame) % u32(a.frames)) * a.record_bytes;
    }
    static DEVICE uint2* steps(char* record) { return reinterpret_cast<uint2*>(record + sizeof(Record)); }
    static DEVICE const uint2* steps(const char* record) { return reinterpret_cast<const uint2*>(record + sizeof(Record)); }
};
static_assert(KEY_STEPS + MEAN_STEPS == RECORD_STEPS && COLS == 8 && sizeof(Record) == 128, "kernel_choice.py counts other steps");

DEVICE int frame_of(int position) { return position / FRAME; }

/// A^-1 of a head as side.py's basis_operands lays it out: 16 x 16 tiles as operands, first numbers and second ones, and what belongs to all.
struct InverseBasis {
    uint4 tiles[D / 16][D / 16][2][32];
    float unit, norm;            // what numbers are to be multiplied by; largest sum of a row's squares before that
    float padding[2];
};

/// One unit's queries.
struct FrameQueries {
    static constexpr int KS = D / 16;
    u32 q[KS][2];                // of this lane's column: channels 16-bit, (8 i + 2 c, + 1) and D / 2 further on
    float down, unit, multiplier;

    /// `columns`: of a record; a lane's is g % columns.
    DEVICE FrameQueries(const Args& a, Unit u, const InverseBasis& inverse, int columns, int lane) {
        const int g = lane / 4, c = lane % 4, index = u.block * COLS + g % columns;
        const bool real = index < a.num_queries * a.group && position_of(a, u, g % columns) >= 0;
        const u16* row = static_cast<const u16*>(a.q) + q_offset(a, u, real ? index : 0);
        float largest = 0.f;
        bool finite = true;
#pragma unroll
        for (int i = 0; i < KS; ++i)
            for (int half = 0; half < 2; ++half) {
                q[i][half] = real ? *reinterpret_cast<const u32*>(row + half * (D / 2) + 8 * i + 2 * c) : 0;
                const float2 x = two(q[i][half]);
                finite &= fabsf(x.x) <= 3.4e38f && fabsf(x.y) <= 3.4e38f;
                largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
            }
        finite = (__ballot_sync(ALL_LANES, finite) >> lane / 4 * 4 & 15) == 15;  // a column that is not spoils no other
        largest = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(finite ? largest : 0.f)));
        const int e = largest > 1e-30f ? min(exponent_of(largest), 126) : 0;
        down = power_of_two(-e);
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < KS; ++i)
            for (int half = 0; half < 2; ++half) {
                const float2 x = two(q[i][half]);
                sum += x.x * down * (x.x * down) + x.y * down * (x.y * down);
            }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        sum = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(finite ? sum : 0.f)));
        // No number's square passes sum * norm: they come to 2**12 at most, and fit float16 with the shift of a plane.
        const float bound = sum * inverse.norm;
        const int shift = bound > 1e-30f ? 12 - ((exponent_of(bound) + 2) >> 1) : 0;
        multiplier = power_of_two(shift);
        unit = power_of_two(-shift) * inverse.unit * power_of_two(e);
    }
    static DEVICE float2 two(u32 w) {
        if (Q_TYPE == BFLOAT16) return {bf16_to_float(u16(w)), bf16_to_float(u16(w >> 16))};
        return {low_f16(w), high_f16(w)};
    }
    static DEVICE void split(u32& first, u32& second, float x, float y) {
        first = pack_f16(x, y);
        second = pack_f16((x - low_f16(first)) * 2048.f, (y - high_f16(first)) * 2048.f);
    }

    /// The lane's column in the frame of `position`, as operands: first numbers and second ones of each step.
    DEVICE void turn_back(uint4* operands, const float2* turns_of_pairs, int position, int lane) const {
        const int c = lane % 4;
#pragma unroll
        for (int i = 0; i < KS; ++i) {
            const float4 turns = *reinterpret_cast<const float4*>(turns_of_pairs + 8 * i + 2 * c);
            const float2 r0 = turn_of(-position, {turns.x, turns.y}), r1 = turn_of(-position, {turns.z, turns.w});
            float2 x = two(q[i][0]), y = two(q[i][1]);
            x = {x.x * down, x.y * down}, y = {y.x * down, y.y * down};
            uint4 w;
            split(w.x, w.z, x.x * r0.x - y.x * r0.y, x.y * r1.x - y.y * r1.y);
            split(w.y, w.w, y.x * r0.x + x.x * r0.y, y.y * r1.x + x.y * r1.y);
            operands[i * 32 + lane] = w;
        }
    }
    /// From a column in shared memory to its lanes' places in a record.
    DEVICE void write(char* record, const u16* column, bool wanted, int columns, int lane) const {
        const int c = lane % 4, of_step = 4 * columns, place = lane % of_step;
        uint2* steps = Record::steps(record) + place;
        float sum = 0.f;
        plane<8>(sum, steps, of_step, column, wanted, c);
        plane<4>(sum, steps + BandPlane<8>::STEPS * of_step, of_step, column, wanted, c);
        plane<2>(sum, steps + (BandPlane<8>::STEPS + BandPlane<4>::STEPS) * of_step, of_step, column, wanted, c);
        plane<1>(sum, steps + (KEY_STEPS - BandPlane<1>::STEPS) * of_step, of_step, column, wanted, c);
#pragma unroll
        for (int i = 0; i < MEAN_STEPS; ++i) {
            const uint2 x = four(column, 16 * i + 4 * c);
            if (wanted) steps[(KEY_STEPS + i) * of_step] = x;
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (!wanted || c) return;
        reinterpret_cast<Record*>(record)->start[place / 4] = -sum * power_of_two(-24);
        if (place == 0) reinterpret_cast<Record*>(record)->unit = unit;
    }
    /// Channels 0, 2 and 1, 3 of four neighbours.
    static DEVICE uint2 four(const u16* column, int channel) {
        const uint2 x = *reinterpret_cast<const uint2*>(column + channel);
        return {permute_bytes(x.x, x.y, 0x5410), permute_bytes(x.x, x.y, 0x7632)};
    }
    template <int BITS>
    static DEVICE void plane(float& sum, uint2* steps, int of_step, const u16* column, bool wanted, int c) {
        using P = BandPlane<BITS>;
        constexpr u64 LIST = Bands::list(BITS);
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load)
#pragma unroll
            for (int j = 0; j < P::steps(load); ++j) {
                const int place = (P::first_field(load, c) + j) * P::ROW + 4 * P::word(load, c);  // of the lane's four channels among the plane's
                const int band = int(LIST >> (place / BAND * 4 & 63)) & 15, shift = int(Bands::WIDTHS >> 4 * band & (BITS - 1));
                const float times = power_of_two(shift - BITS * j);
                const u32 factor = pack_f16(times, times);
                uint2 x = four(column, band * BAND + place % BAND);
                x = {mul_f16x2(x.x, factor), mul_f16x2(x.y, factor)};
                if (place >= P::CHANNELS) x = {0, 0};
                if (wanted) steps[(P::steps_before(load) + j) * of_step] = x;
                sum += (low_f16(x.x) + high_f16(x.x) + low_f16(x.y) + high_f16(x.y)) * (0.5f * ((1 << BITS) - 1) * power_of_two(BITS * j));
            }
    }
};

/// Calls f(segment, part, unit, first frame, last frame) for every segment of this block that reads packed pages.
template <class F>
DEVICE void each_packed_segment(const Args& a, F f) {
    for (int i = blockIdx.x; i >= 0; i = a.segments[i].next) {
        const Segment& s = a.segments[i];
        if (s.unit < 0) return;
        const Part& part = a.parts[s.part];
        if (part.raw || s.num_chunks <= 0) continue;
        const int from = s.first_entry + s.first_chunk / CHUNKS_PER_PAGE, to = s.first_entry + (s.first_chunk + s.num_chunks - 1) / CHUNKS_PER_PAGE;
        f(part, unit_of(a, s.unit), frame_of(Page(a, s, from, false).tokens.x), frame_of(Page(a, s, to, false).tokens.x));
    }
}

/// Has the matrix of the block's first walk fetched while the kernel ahead ends.
DEVICE void prefetch_basis(const Args& a) {
    const Segment& s = a.segments[blockIdx.x];
    if (s.unit < 0 || a.parts[s.part].raw) return;
    const char* of_head = reinterpret_cast<const char*>(static_cast<const InverseBasis*>(a.parts[s.part].k_inverse) + unit_of(a, s.unit).head);
    for (int line = threadIdx.x; line < int(sizeof(InverseBasis)) / 128; line += CONSUMERS) prefetch_l1(of_head + line * 128);
}
/// The records that this block's walks read. All consumer warps call it: each turns the queries of a tile of 8 columns and frames back, multiplies all of their
/// tiles with 16 rows of the matrix that it holds in registers (loads wait behind all that the ring has in flight), and writes a tile's records.
DEVICE void queries_in_basis(const Args& a, Merge& merge, int warp, int lane) {
    constexpr int KS = D / 16, OWNED = (KS + WARPS - 1) / WARPS, STRIDE = D + 8;  // STRIDE: of a column in shared memory, float16
    static_assert(sizeof(merge.rounds[0]) >= KS * 32 * sizeof(uint4) && sizeof(merge.rounds[0]) >= 8 * STRIDE * 2, "kernel_choice.py leaves too little to merge in");
    const int g = lane / 4, c = lane % 4;
    each_packed_segment(a, [&](const Part& part, Unit u, int first, int last) {
        const InverseBasis& inverse = static_cast<const InverseBasis*>(part.k_inverse)[u.head];
        const int columns = a.record_columns, of_tile = 8 / columns, tiles = ((last - first + 1) * columns + 7) / 8;
        uint4 large[KS], small[KS];
        auto own = [&](int m) {
#pragma unroll
            for (int i = 0; i < KS; ++i) large[i] = inverse.tiles[min(m, KS - 1)][i][0][lane], small[i] = inverse.tiles[min(m, KS - 1)][i][1][lane];
        };
        own(warp);
#pragma unroll 1
        for (int batch = 0; batch < tiles; batch += WARPS) {
            const int frame = first + (batch + warp) * of_tile + g / columns;
            const FrameQueries queries(a, u, inverse, columns, lane);
            if (batch + warp < tiles) queries.turn_back(reinterpret_cast<uint4*>(&merge.rounds[warp]), part.turns, FRAME * min(frame, last), lane);
            sync_threads(CONSUMERS);
            u32 found[OWNED][WARPS][2];
#pragma unroll
            for (int o = 0; o < OWNED; ++o) {
                if (OWNED > 1) own(warp + o * WARPS);
                if (warp + o * WARPS >= KS) continue;
#pragma unroll
                for (int t = 0; t < WARPS; ++t) {
                    if (batch + t >= tiles) continue;
                    const uint4* operands = reinterpret_cast<const uint4*>(&merge.rounds[t]) + lane;
                    float sums[3][4] = {};
#pragma unroll
                    for (int i = 0; i < KS; ++i) {
                        const uint4 b = operands[i * 32];
                        mma_f16(sums[0], large[i].x, large[i].y, large[i].z, large[i].w, b.x, b.y);
                        mma_f16(sums[1], large[i].x, large[i].y, large[i].z, large[i].w, b.z, b.w);
                        mma_f16(sums[2], small[i].x, small[i].y, small[i].z, small[i].w, b.x, b.y);
                    }
                    float r[4];
                    for (int k = 0; k < 4; ++k) r[k] = (sums[0][k] + (sums[1][k] + sums[2][k]) * (1.f / 2048.f)) * queries.multiplier;
                    found[o][t][0] = transpose_8x8(pack_f16(r[0], r[1]));  // of this lane's column
                    found[o][t][1] = transpose_8x8(pack_f16(r[2], r[3]));
                }
            }
            sync_threads(CONSUMERS);
#pragma unroll
            for (int o = 0; o < OWNED; ++o)
#pragma unroll
                for (int t = 0; t < WARPS; ++t) {
                    if (warp + o * WARPS >= KS || batch + t >= tiles) continue;
                    u16* to = reinterpret_cast<u16*>(&merge.rounds[t]) + g * STRIDE + 16 * (warp + o * WARPS) + 2 * c;
                    *reinterpret_cast<u32*>(to) = found[o][t][0];
                    *reinterpret_cast<u32*>(to + 8) = found[o][t][1];
                }
            sync_threads(CONSUMERS);
            if (batch + warp < tiles) queries.write(Record::of(a, u, frame), reinterpret_cast<const u16*>(&merge.rounds[warp]) + g * STRIDE, frame <= last, columns, lane);
            __syncwarp();
        }
    });
    sync_threads(CONSUMERS);
}
