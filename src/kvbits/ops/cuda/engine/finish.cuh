// The end of a segment: warps of a block are merged through shared memory, segments of a unit by the block that arrives
// last.
//   leave_segment    kernels with OWN_START, where a segment is its unit's only one and the block has others: a warp
//                    leaves its results and goes on; the last ones merge
//   finish_segment   everywhere else: all warps wait for each other, and merge
#pragma once
#include "columns.cuh"

// Plain stores and sums: float atomics in shared memory are compare-and-swap loops and cost 40 us a launch in an early
// trial.
constexpr int ROUND_STRIDE = 36;  // 32 channels, padded so that eight lanes' 16-byte stores meet no bank twice
struct Merge {
    float2 warp_ml[WARPS][COLS];
    float2 ml[COLS];
    float bias[WARPS][BIAS_GROUPS][COLS];
    float rounds[WARPS][ROUNDS_AT_ONCE][MERGE_COLS][ROUND_STRIDE];
    float out[COLS][DV];
    Staged staged[STARTS];
    Segment segments[STARTS];
    Unit units[STARTS];
    int last;
    int left;                    // how often a warp has left a segment's results
    u32 segments_left[WARPS];    // how many segments a warp has left so
    // barriers: phase k ends when all warps have left the results of the k-th segment left; when these have been merged
    u64 all_left, merged;

    DEVICE static int own(int warp) { return OWN_START ? warp : 0; }
    DEVICE u32 all_left_barrier() const { return shared_address(&all_left); }
    DEVICE u32 merged_barrier() const { return shared_address(&merged); }
    /// Until no warp reads the results of segments left before.
    DEVICE void wait_until_free(int warp) const {
        if (OWN_START) barrier_wait(merged_barrier(), (segments_left[warp] & 1) ^ 1);
    }
};

DEVICE void write_column(const Args& a, Unit u, int col, int channel, float4 x, float2 ml) {
    int index = u.block * COLS + col;
    i64 row = (i64(u.batch) * a.num_queries + index / a.group) * (a.num_kv_heads * a.group) + u.head * a.group +
              index % a.group;
    float inverse = ml.y > 0.f ? 1.f / ml.y : 0.f;
    uint2 w;
    if (Q_TYPE == BFLOAT16) w = {pack_bf16(x.x * inverse, x.y * inverse), pack_bf16(x.z * inverse, x.w * inverse)};
    else w = {pack_f16(x.x * inverse, x.y * inverse), pack_f16(x.z * inverse, x.w * inverse)};
    *reinterpret_cast<uint2*>(static_cast<u16*>(a.out) + row * DV + channel) = w;
    if (channel == 0 && a.lse) a.lse[row] = ml.y > 0.f ? (ml.x + log2_approx(ml.y)) * LN2 : negative_infinity();
}

/// Four channels of a column summed over partial results, relative to the highest reference exponent so far.
struct Sum {
    float best = NOT_SEEN, total = 0.f;
    float4 x = {0.f, 0.f, 0.f, 0.f};

    /// The first `count` of N; what follows them may be any of them again.
    template <int N>
    DEVICE void add(const float2 (&ml)[N], const float4 (&more)[N], int count) {
        const float before = best;
#pragma unroll
        for (int k = 0; k < N; ++k) best = fmaxf(best, ml[k].x);
        const float f = exp2_approx(before - best);
        total *= f;
        x = {x.x * f, x.y * f, x.z * f, x.w * f};
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float w = k < count ? exp2_approx(ml[k].x - best) : 0.f;
            total += ml[k].y * w;
            x = {x.x + more[k].x * w, x.y + more[k].y * w, x.z + more[k].z * w, x.w + more[k].w * w};
        }
    }
};

/// Sums the unit's partial results and writes its outputs. Latency is all this costs, so a thread asks for all it needs
/// before it looks at any of it.
DEVICE void merge_slots(const Args& a, const Segment& s, Unit u, int thread) {
    constexpr int AT_ONCE = DV > 128 ? 8 : 17;  // 17: 132 blocks on 8 units
    const int quads = columns_of(a, u) * (DV / 4);
    const float2* all_ml = a.partial_ml + i64(s.unit_slots) * COLS;
    const float4* all = reinterpret_cast<const float4*>(a.partial + i64(s.unit_slots) * COLS * DV);
#pragma unroll 1
    for (int at = thread; at < quads; at += CONSUMERS) {
        const int col = at / (DV / 4);
        Sum sum;
#pragma unroll 1
        for (int first = 0; first < s.num_slots; first += AT_ONCE) {
            float2 ml[AT_ONCE];
            float4 x[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const i64 slot = min(first + k, s.num_slots - 1);
                ml[k] = load_global_l2(all_ml + slot * COLS + col);
                x[k] = load_global_l2(all + slot * (COLS * DV / 4) + at);
            }
            sum.add(ml, x, s.num_slots - first);
        }
        write_column(a, u, col, at % (DV / 4) * 4, sum.x, {sum.best, sum.total});
    }
}

/// Scales and offsets that belong to channels, then out or, if the unit has other segments, to its slot.
DEVICE void write_result(const Args& a, const Segment& s, const Unit& u, int col, int ch, float4 x, float2 ml) {
    const Part& part = a.parts[s.part];
    const i64 row = i64(u.head) * DV + ch;
    if (part.v_scale) {
        float4 m = *reinterpret_cast<const float4*>(part.v_scale + row);
        x = {x.x * m.x, x.y * m.y, x.z * m.z, x.w * m.w};
    }
    if (part.v_bias) {
        float4 b = *reinterpret_cast<const float4*>(part.v_bias + row);
        x = {x.x + ml.y * b.x, x.y + ml.y * b.y, x.z + ml.y * b.z, x.w + ml.y * b.w};
    }
    if (s.slot < 0) {
        write_column(a, u, col, ch, x, ml);
        return;
    }
    reinterpret_cast<float4*>(a.partial)[(i64(s.slot) * COLS + col) * (DV / 4) + ch / 4] = x;
    if (ch == 0) a.partial_ml[i64(s.slot) * COLS + col] = ml;
}

/// A warp's sums of weights, with its reference exponents (NOT_SEEN where it saw nothing).
template <bool FOLD>
DEVICE void leave_sums(Merge& shared, const Softmax& softmax, int first_column, int warp, int g) {
    for (int n = 0; n < NT; ++n)
        for (int e = 0; e < 2; ++e) {
            float sum = softmax.sum[n][e];
            for (int mask = FOLD ? 2 : 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
            if (g == 0)
                shared.warp_ml[warp][n * 8 + first_column + e] = {
                    softmax.seen[n][e] ? softmax.reference[n][e] : NOT_SEEN, sum};
        }
}

/// Whether all results of a walk are its first plane's, so that no column is merged twice.
template <class Walk>
constexpr bool ONE_PLANE = Walk::ROUNDS == Walk::FIRST_PLANE_ROUNDS;
/// Whether shared memory has room for all of them at once.
template <class Walk>
constexpr bool LEAVES_ALL = ONE_PLANE<Walk> && ROUNDS_AT_ONCE >= Walk::ROUNDS;

/// A warp's results of rounds from `first` on, as many as there is room for.
template <class Walk>
DEVICE void leave_rounds(const Walk& walk, const Softmax& softmax, Merge& shared, int first, int warp, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int k = 0; k < ROUNDS_AT_ONCE; ++k)
        for (int n = 0; n < NT && first + k < Walk::ROUNDS; ++n)
            for (int e = 0; e < 2; ++e) {
                float4 x = walk.result(first + k, n, e);
                if (!softmax.seen[n][e]) x = {0.f, 0.f, 0.f, 0.f};
                if (MERGE_COLS < 8 && c >= MERGE_COLS / 2) continue;
                *reinterpret_cast<float4*>(&shared.rounds[warp][k][n * 8 + 2 * c + e][4 * g]) = x;
            }
}
/// What belongs to all rounds.
DEVICE void leave_all_sums(const Softmax& softmax, const float (*bias_sum)[4], Merge& shared, int warp, int lane) {
    const int g = lane / 4, c = lane % 4;
    shared.wait_until_free(warp);
    leave_sums<false>(shared, softmax, 2 * c, warp, g);
    if (MERGE_BIAS && bias_sum && (BIAS_GROUPS > 1 || g == 0))
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e)
                shared.bias[warp][BIAS_GROUPS > 1 ? g : 0][n * 8 + 2 * c + e] =
                    softmax.seen[n][e] ? bias_sum[n][e] : 0.f;
}

/// A warp turns all warps' reference exponents of columns `first`, `first` + `step` .. into factors, in place, and
/// leaves each column's exponent and sum; four lanes a column.
DEVICE void weigh_warps(Merge& shared, int first, int step, int lane) {
    constexpr int EACH = (WARPS + 3) / 4;
#pragma unroll 1
    for (int from = first; from < MERGE_COLS; from += 8 * step) {
        const int wanted = from + lane / 4 * step, col = wanted < MERGE_COLS ? wanted : from;
        float2 ml[EACH];
        float best = NOT_SEEN, total = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int w = lane % 4 + 4 * i;
            ml[i] = w < WARPS ? shared.warp_ml[w][col] : float2{NOT_SEEN, 0.f};
            best = fmaxf(best, ml[i].x);
        }
        for (int mask = 1; mask < 4; mask *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, mask));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int w = lane % 4 + 4 * i;
            const float f = ml[i].x == NOT_SEEN ? 0.f : exp2_approx(ml[i].x - best);
            total += ml[i].y * f;
            if (w < WARPS) shared.warp_ml[w][col].x = f;
        }
        for (int mask = 1; mask < 4; mask *= 2) total += __shfl_xor_sync(ALL_LANES, total, mask);
        if (lane % 4 == 0) shared.ml[col] = {best, total};
    }
    __syncwarp();
}

/// A warp adds up what all warps left of columns `first`, `first` + `step` .., in rounds from `round` on.
template <class Walk>
DEVICE void merge_columns(const Args& a, const Walk& walk, const Segment& s, const Unit& u, bool has_bias,
                          int bias_group, Merge& shared, int round, int first, int step, int lane) {
    const int columns = columns_of(a, u), rounds = min(ROUNDS_AT_ONCE, Walk::ROUNDS - round);
#pragma unroll 1
    for (int col = first; col < columns; col += step) {
#pragma unroll 1
        for (int i = lane; i < rounds * 8; i += 32) {
            const int x = i % 8 * 4, k = i / 8, ch = walk.channel(round + k, x);
            if (ch < 0 || ch >= DV) continue;
            float bias = 0.f;
            float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float f = shared.warp_ml[w][col].x;
                const float4 y = *reinterpret_cast<const float4*>(&shared.rounds[w][k][col][x]);
                sum = {sum.x + y.x * f, sum.y + y.y * f, sum.z + y.z * f, sum.w + y.w * f};
                if (MERGE_BIAS && has_bias) bias += shared.bias[w][ch / bias_group][col] * f;
            }
            if (MERGE_BIAS && has_bias) sum = {sum.x + bias, sum.y + bias, sum.z + bias, sum.w + bias};
            write_result(a, s, u, col, ch, sum, shared.ml[col]);
        }
    }
}

/// The end of a segment that is its unit's only one, where the block has others: a warp leaves its results in shared
/// memory and goes on; the last MERGERS to come wait for each other and merge.
template <class Walk>
DEVICE int leave_segment(const Args& a, const Walk& walk, const Softmax& softmax, const float (*bias_sum)[4],
                         int bias_group, Merge& shared, int warp, int lane) {
    leave_all_sums(softmax, bias_sum, shared, warp, lane);
    leave_rounds(walk, softmax, shared, 0, warp, lane);
    __syncwarp();
    int order = 0;
    const u32 phase = shared.segments_left[warp] & 1;
    if (lane == 0) {
        order = atomicAdd(&shared.left, 1) % WARPS;
        barrier_arrive(shared.all_left_barrier());
    }
    const int merger = __shfl_sync(ALL_LANES, order, 0) - (WARPS - MERGERS);
    const Segment& s = shared.segments[Merge::own(warp)];
    if (merger >= 0) {
        barrier_wait(shared.all_left_barrier(), phase);
        weigh_warps(shared, merger, MERGERS, lane);
        const Unit& u = shared.units[Merge::own(warp)];
        merge_columns(a, walk, s, u, bias_sum, bias_group, shared, 0, merger, MERGERS, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.merged_barrier());
    }
    const int next = s.next;
    if (lane == 0) ++shared.segments_left[warp];
    __syncwarp();  // the next segment is written where this one is
    return next;
}

/// Merges results of several planes of values, whose rounds are added to those of the first. All consumer warps call
/// it. FOLD: columns 4 .. 7 of the walk's results are columns 0 .. 3 of channels DV / 2 further on.
template <bool FOLD, class Walk>
DEVICE void merge_planes(const Args& a, const Walk& walk, const Segment& s, const Unit& u, const Softmax& softmax,
                         const float (*bias_sum)[4], int bias_group, Merge& shared, int warp, int lane) {
    const int g = lane / 4, c = lane % 4, thread = warp * 32 + lane;
    const int first_column = FOLD ? 2 * (c % 2) : 2 * c;
    shared.wait_until_free(warp);
    leave_sums<FOLD>(shared, softmax, first_column, warp, g);
    sync_threads(CONSUMERS);
    float factor[NT][2];
    for (int n = 0; n < NT; ++n)
        for (int e = 0; e < 2; ++e) {
            int col = n * 8 + first_column + e;
            float best = NOT_SEEN, total = 0.f;
            for (int w = 0; w < WARPS; ++w) best = fmaxf(best, shared.warp_ml[w][col].x);
            for (int w = 0; w < WARPS; ++w)
                total += shared.warp_ml[w][col].y * exp2_approx(shared.warp_ml[w][col].x - best);
            factor[n][e] = softmax.seen[n][e] ? exp2_approx(softmax.reference[n][e] - best) : 0.f;
            if (warp == 0 && g == 0) shared.ml[col] = {best, best == NOT_SEEN ? 0.f : total};
            if (MERGE_BIAS && bias_sum && (BIAS_GROUPS > 1 || g == 0))
                shared.bias[warp][BIAS_GROUPS > 1 ? g : 0][col] = bias_sum[n][e] * factor[n][e];
        }
#pragma unroll
    for (int first = 0; first < Walk::ROUNDS; first += ROUNDS_AT_ONCE) {
        if (first) sync_threads(CONSUMERS);
#pragma unroll
        for (int k = 0; k < ROUNDS_AT_ONCE; ++k)
            for (int n = 0; n < NT && first + k < Walk::ROUNDS; ++n)
                for (int e = 0; e < 2; ++e) {
                    float4 x = walk.result(first + k, n, e);
                    float f = factor[n][e];
                    float4 y = {x.x * f, x.y * f, x.z * f, x.w * f};
                    if (f == 0.f) y = {0.f, 0.f, 0.f, 0.f};
                    if (MERGE_COLS < 8 && c >= MERGE_COLS / 2) continue;
                    *reinterpret_cast<float4*>(&shared.rounds[warp][k][n * 8 + 2 * c + e][4 * g]) = y;
                }
        sync_threads(CONSUMERS);
        for (int i = thread; i < ROUNDS_AT_ONCE * MERGE_COLS * 8; i += CONSUMERS) {
            int x = i % 8 * 4, col = i / 8 % MERGE_COLS, k = i / (8 * MERGE_COLS);
            int ch = first + k < Walk::ROUNDS ? walk.channel(first + k, x) : -1;
            const int real = FOLD ? col % 4 : col;
            if (ch >= 0 && FOLD) ch += col / 4 * (DV / 2);
            if (ch < 0 || ch >= DV || real >= columns_of(a, u)) continue;
            float4 sum = {0.f, 0.f, 0.f, 0.f};
            for (int w = 0; w < WARPS; ++w) {
                float4 y = *reinterpret_cast<const float4*>(&shared.rounds[w][k][col][x]);
                sum = {sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w};
            }
            float4& out = *reinterpret_cast<float4*>(&shared.out[real][ch]);
            if (first + k >= Walk::FIRST_PLANE_ROUNDS)
                sum = {sum.x + out.x, sum.y + out.y, sum.z + out.z, sum.w + out.w};
            out = sum;
        }
    }
    sync_threads(CONSUMERS);
#pragma unroll 1
    for (int i = thread; i < columns_of(a, u) * (DV / 4); i += CONSUMERS) {
        const int col = i / (DV / 4), ch = i % (DV / 4) * 4;
        float4 x = *reinterpret_cast<const float4*>(&shared.out[col][ch]);
        if (MERGE_BIAS && bias_sum) {
            float b = 0.f;
            for (int w = 0; w < WARPS; ++w) b += shared.bias[w][ch / bias_group][col];
            x = {x.x + b, x.y + b, x.z + b, x.w + b};
        }
        write_result(a, s, u, col, ch, x, shared.ml[col]);
    }
}

/// Called by all consumer warps at the end of a segment; returns the block's next one. FOLD: see merge_planes.
template <bool FOLD = false, class Walk>
DEVICE int finish_segment(const Args& a, const Walk& walk, const Softmax& softmax, const float (*bias_sum)[4],
                           int bias_group, Merge& shared, int warp, int lane) {
    const Segment& s = shared.segments[Merge::own(warp)];
    const Unit& u = shared.units[Merge::own(warp)];
    const int thread = warp * 32 + lane;
    if (FOLD || !ONE_PLANE<Walk>) {
        merge_planes<FOLD>(a, walk, s, u, softmax, bias_sum, bias_group, shared, warp, lane);
    } else {
        leave_all_sums(softmax, bias_sum, shared, warp, lane);
#pragma unroll
        for (int round = 0; round < Walk::ROUNDS; round += ROUNDS_AT_ONCE) {
            if (round) sync_threads(CONSUMERS);
            leave_rounds(walk, softmax, shared, round, warp, lane);
            sync_threads(CONSUMERS);
            if (round == 0) weigh_warps(shared, warp, WARPS, lane);
            merge_columns(a, walk, s, u, bias_sum, bias_group, shared, round, warp, WARPS, lane);
        }
    }
    if (s.slot >= 0) {
        sync_threads(CONSUMERS);
        if (thread == 0) {  // releases what the barrier ordered before it: all threads' stores
            bool last = add_acquire_release(a.arrived + s.unit, 1) == s.num_slots - 1;
            if (last) a.arrived[s.unit] = 0;  // ready for the next launch
            shared.last = last;
        }
        sync_threads(CONSUMERS);
        if (shared.last) merge_slots(a, s, u, thread);
    }
    const int next = s.next;
    sync_threads(CONSUMERS);  // the next segment writes the same memory
    return next;
}
