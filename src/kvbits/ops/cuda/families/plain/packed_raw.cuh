// Raw tokens that come through the ring beside packed ones: warps that wait for keys, then for values, read a third
// less than memory gives, and a walk of its own costs each unit microseconds. Where outputs are of one plane and not
// scaled by page (ValueTraits::RAW_JOINS) they are added to those of packed tokens.
#ifndef PACKED_RAW_CUH
#define PACKED_RAW_CUH
#include "packed_ring.cuh"
#include "packed_walk.cuh"
#include "raw_walk.cuh"

struct RowsInRing {
    static constexpr int E = RAW_TOKENS / 8;
    const unsigned char *keys, *values;
    int visible;

    DEVICE static uint4 row(const unsigned char* p, bool wanted) {
        return wanted ? *reinterpret_cast<const uint4*>(p) : uint4{0, 0, 0, 0};
    }
    DEVICE uint4 key(int j, int i, int g, int c) const {
        return row(keys + ((E * g + j) * D + 32 * i + 8 * c) * 2, E * g + j < visible && 32 * i + 8 * c < D);
    }
    DEVICE uint4 value(int token, int h, int g, int c) const {
        return row(values + ((2 * E * c + token) * DV + 64 * h + 8 * g) * 2,
                   2 * E * c + token < visible && 64 * h + 8 * g < DV);
    }
    /// Four channels from `channel` on.
    DEVICE uint2 four(int token, int channel, bool wanted, int c) const {
        return wanted && 2 * E * c + token < visible
                   ? *reinterpret_cast<const uint2*>(values + ((2 * E * c + token) * DV + channel) * 2)
                   : uint2{0, 0};
    }
};

/// f(rows, position of the first) for each of a warp's chunks of raw tokens in the ring.
template <class F>
DEVICE void each_raw_chunk(const Segment& s, Ring& ring, const unsigned char* slots, int warp, int lane, F f) {
#pragma unroll 1
    for (int k = first_chunk_of(s, warp); k < s.num_chunks; k += WARPS) {
        const RingSlot slot(u32(s.chunks_before + k));
        slot.wait(ring);
        const int2 tokens = ring.tokens[slot.index];
        const unsigned char* keys = slots + slot.index * SLOT_BYTES;
        RowsInRing rows = {keys, keys + RAW_TOKENS * D * 2, tokens.y};
        f(rows, tokens.x);
        __syncwarp();
        if (lane == 0) slot.give_back(ring);
        __syncwarp();
    }
}
/// The raw parts of a unit that follow one another, with a result of their own. Returns the block's next segment.
DEVICE int walk_raw(const Args& a, Unit u, Ring& ring, const unsigned char* slots, Merge& merge, int warp, int lane) {
    if (!RAW_IN_RING) return walk_raw_in_memory(a, u, merge, warp, lane);
    return walk_raw_parts(a, u, merge, warp, lane, [&](const Segment& s, const auto& step) {
        for (;; join_next(a, merge, warp, lane)) {
            each_raw_chunk(s, ring, slots, warp, lane, step);
            if (!s.joins) break;
        }
    });
}

/// Adds raw tokens to outputs of packed ones: weights `p`, as RawWalk::weights gives them, times four channels of a row
/// at a time.
template <class ValuePlane, class Rows>
DEVICE void add_raw(Values<ValuePlane>& values, const u32 (&p)[NT][Rows::E], const Rows& rows, int g, int c) {
    constexpr int E = Rows::E;
#pragma unroll
    for (int field = 0; field < ValuePlane::FIELDS; ++field)
#pragma unroll
        for (int pair = 0; pair < ValuePlane::PAIRS; ++pair) {
            if (!Values<ValuePlane>::used(field, pair)) continue;
            const int byte = 32 * pair + 4 * g, channel = field * ValuePlane::ROW + byte;
            const bool inside = byte < ValuePlane::ROW && channel < DV;
#pragma unroll
            for (int j = 0; j < E; j += 2) {
                const uint2 v0 = rows.four(j, channel, inside, c), v1 = rows.four(j + E, channel, inside, c);
                const uint2 v2 = rows.four(j + 1, channel, inside && E > 1, c),
                            v3 = rows.four(j + 1 + E, channel, inside && E > 1, c);
                const u32 a0 = permute_bytes(v0.x, v1.x, 0x5410), a1 = permute_bytes(v0.x, v1.x, 0x7632);
                const u32 a2 = permute_bytes(v2.x, v3.x, 0x5410), a3 = permute_bytes(v2.x, v3.x, 0x7632);
                const u32 c0 = permute_bytes(v0.y, v1.y, 0x5410), c1 = permute_bytes(v0.y, v1.y, 0x7632);
                const u32 c2 = permute_bytes(v2.y, v3.y, 0x5410), c3 = permute_bytes(v2.y, v3.y, 0x7632);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    mma_raw(values.o[n][field][pair][0], a0, a1, a2, a3, p[n][j], j + 1 < E ? p[n][(j + 1) % E] : 0);
                    mma_raw(values.o[n][field][pair][1], c0, c1, c2, c3, p[n][j], j + 1 < E ? p[n][(j + 1) % E] : 0);
                }
            }
        }
}
/// Outputs from units of packed values to those of raw ones (1), or back: powers of two.
template <class ValuePlane>
DEVICE void change_units(Values<ValuePlane>& values, bool to_raw) {
    values.each([&](float& x, int, int, int field, int, int) {
        const int exponent = ValueTraits::EXPONENT - ValuePlane::exponent(field);
        x *= to_raw ? power_of_two(exponent) : power_of_two(-exponent);
    });
}

DEVICE void butterfly(float& x, float& y) {
    const float sum = x + y;
    y = x - y;
    x = sum;
}

/// Outputs of values that are stored times a Hadamard matrix, times it once more: what the values themselves would have
/// given, in units of raw ones. FOLDS: those of lanes c and c + 2 are to be added, too. A rolled loop: this runs once a
/// unit, and instructions have to be fetched.
template <bool FOLDS, class ValuePlane>
DEVICE void turn_back(Values<ValuePlane>& values) {
    constexpr int ROWS = ValuePlane::FIELDS * ValuePlane::PAIRS;  // of operands: 32 channels each, or those of a row
    constexpr int LANES = ValuePlane::ROW < 32 ? ValuePlane::ROW / 4 : 8;
    static_assert(!V_TURNED || ROWS * LANES * 4 == DV, "family.py refuses other sizes");
    constexpr float NORM = DV == 64 ? 0.125f : DV == 128 ? 0.08838834764831845f : 0.0625f;
    values.each([](float& x, int, int, int field, int, int) {
        x *= power_of_two(ValueTraits::EXPONENT - ValuePlane::exponent(field)) * NORM;
    });
    for (int n = 0; n < NT; ++n) {
        auto row = [&](int i) -> float (&)[2][4] { return values.o[n][i / ValuePlane::PAIRS][i % ValuePlane::PAIRS]; };
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float (&o)[2][4] = row(i);
            for (int half = 0; half < 2; ++half)
                for (int e = 0; e < 2; ++e) butterfly(o[half][e], o[half][2 + e]);
            for (int r = 0; r < 4; ++r) butterfly(o[0][r], o[1][r]);
        }
#pragma unroll 1
        for (int mask = FOLDS ? 2 : 4; mask < 4 * LANES; mask *= 2) {
            const float sign = mask > 2 && threadIdx.x & mask ? -1.f : 1.f;
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                for (int half = 0; half < 2; ++half)
                    for (int r = 0; r < 4; ++r) {
                        float& x = row(i)[half][r];
                        x = fmaf(x, sign, __shfl_xor_sync(ALL_LANES, x, mask));
                    }
        }
#pragma unroll
        for (int stride = 1; stride < ROWS; stride *= 2)
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                for (int half = 0; half < 2 && !(i & stride); ++half)
                    for (int r = 0; r < 4; ++r) butterfly(row(i)[half][r], row((i + stride) % ROWS)[half][r]);
    }
}
/// Outputs of lanes c and c + 2 are added.
template <class ValuePlane>
DEVICE void fold(Values<ValuePlane>& values) {
    values.each([](float& x, int, int, int, int, int) { x += __shfl_xor_sync(ALL_LANES, x, 2); });
}
/// The raw parts that end a unit, added to the outputs of its packed ones. Here the walk's own queries are needed no
/// more: raw ones get their registers.
template <class Walk>
DEVICE void join_raw(const Args& a, Unit u, const Segment& s, Walk& walk, const Staged& staged, const Visible& see,
                     Softmax& softmax, Ring& ring, const unsigned char* slots, Merge& merge, int warp, int lane) {
    for (;; join_next(a, merge, warp, lane)) {
        if (first_chunk_of(s, warp) < s.num_chunks) {  // few tokens are a chunk of some of the warps
            const QueryRows queries(a, staged, u, lane / 4);
            RawWalk raw;
            raw.start(a, queries, lane % 4);
            if (!V_TURNED) change_units(walk.values.first, true);
            each_raw_chunk(s, ring, slots, warp, lane, [&](RowsInRing& rows, int position) {
                u32 p[NT][RowsInRing::E];
                raw.weights(p, a, queries, see, softmax, rows, position, lane / 4, lane % 4,
                            [&](const float (&scale)[NT][2]) { walk.values.rescale(scale); });
                add_raw(walk.values.first, p, rows, lane / 4, lane % 4);
            });
            if (!V_TURNED) change_units(walk.values.first, false);
        }
        if (!s.joins) break;
    }
}
#endif
