// Attention over banded pages with low planes, read as they are stored: a block attends to pages of one sequence, kv head, frame and block of query columns, a warp
// to each; `merge_refined` then adds up what the blocks of a sequence have found, and what other kernels have of its other pages.
//
// A page and its planes come to shared memory at once, while the block makes its queries as keys in the basis meet them (banded_queries.cuh has the
// formula). A code and its parts are a number that float16 holds (`levels`), so keys are operands that meet these queries, and values such that meet the weights;
// scales, and means of keys, come after. Rows of key operands are tokens in an order in which their weights are the operands that values want, once
// they are transposed: lane (g, c) has tokens first_token(g) and the next of every 16 as rows, and weights of those four that lie in one quad of values.
#include "bands.cuh"

constexpr int COLS = 8, HALF = D / 2, TILES = PAGE / 16, UNITS = D / 32, WARPS = THREADS / 32;
constexpr int STRIDE = D + 4;   // of rows in shared memory
static_assert(D % 32 == 0 && PAGES_EACH <= WARPS, "a warp has a page");

/// Pages `first` .. `first` + `count` - 1 of the tables, of one sequence and frame.
struct Run { int first, count, sequence, frame; };

struct Args {
    const void* q;               // [B, T, Hq, D] in Q_TYPE, strides in numbers, last dense
    const int* q_positions;      // [B, T]; negative: padding, sees nothing
    const Run* runs;             // as many as the launch has blocks, over kv heads and blocks of columns
    const i64* page_address;     // [entries], layer 0, kv head 0
    const i64* low_address[2];   // [entries] each: of low planes, the coarsest first
    const int2* page_tokens;     // [entries]: position of the first token, visible tokens
    const uint2* basis;          // of the inverse's rows, high_operands of side.py
    const float* power;          // [H][D]: what a row's operands are over
    const float2* turns;         // [D / 2] turns per position, see turn.cuh
    float* partial;              // [slots][COLS][D]
    float2* partial_ml;          // [slots][COLS]: reference exponent (log2), sum
    float* page_lse;             // [entries][T][Hq], null if not wanted
    i64 q_stride_b, q_stride_t, q_stride_h, layer_offset, low_layer_offset[2];
    int first_slot;              // of this launch: slot (run * heads + head) * column_blocks + block
    int num_queries, group, num_kv_heads, column_blocks, head_bytes, low_head_bytes[2], window;  // window: 2**30 if none
    float scaling, softcap;      // softcap: 0 if none
    // of merge_refined
    const int *listed, *first;   // first slots (of head 0 and block 0) of each sequence's runs, first[b] .. first[b + 1] - 1
    const u16* rest_out;         // [B, T, Hq, D] dense and [B, T, Hq] of other pages, null if there are none
    const float* rest_lse;
    u16* out;                    // the same of all
    float* lse;
    int num_rows;                // B * T * Hq
};

using Keys = Banded<K_BANDED, false>;
using ValueCodes = Banded<V_BANDED, true>;
using KeyLow = LowPlanes<K_LOW, false>;
using ValueLow = LowPlanes<V_LOW, true>;
static_assert(Keys::BASIS == CALIBRATED, "refined.py refuses others");
static_assert((KeyLow::BITS == 0 || Keys::most_bits() + KeyLow::BITS <= 10) && (ValueLow::BITS == 0 || ValueCodes::most_bits() + ValueLow::BITS <= 10), "levels in float16");

struct Shared {
    union {
        unsigned char pages[PAGES_EACH][PAGE_BYTES + LOW_BYTES0 + LOW_BYTES1];
        float out[PAGES_EACH][COLS][STRIDE];
    };
    float q[COLS][STRIDE];
    float2 ml[PAGES_EACH][COLS];
    float cosine[HALF], sine[HALF];
};

DEVICE float4 four_at(const float* x, int band, int c) { return *reinterpret_cast<const float4*>(&x[band * BAND + c * 4]); }
/// Of 16 tokens the one of row g of key operands; row g + 8 is the next one. Even, and of quad g / 2 of values.
DEVICE int first_token(int g) { return g / 4 * 8 + g / 2 % 2 * 2 + g % 2 * 4; }

DEVICE void copy_page(const Args& a, const Run& run, int head, int index, unsigned char* to, int lane) {
    const int entry = run.first + index;
    const auto* const page = reinterpret_cast<const unsigned char*>(a.page_address[entry] + a.layer_offset + i64(head) * a.head_bytes);
#pragma unroll 4
    for (int at = lane * 16; at < PAGE_BYTES; at += 512) copy_16_later(to + at, page + at);
    constexpr int BYTES[2] = {LOW_BYTES0, LOW_BYTES1};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        if (!BYTES[p]) continue;
        const auto* const low = reinterpret_cast<const unsigned char*>(a.low_address[p][entry] + a.low_layer_offset[p] + i64(head) * a.low_head_bytes[p]);
#pragma unroll 4
        for (int at = lane * 16; at < BYTES[p]; at += 512) copy_16_later(to + PAGE_BYTES + p * LOW_BYTES0 + at, low + at);
    }
}

DEVICE float2 two(u32 w) {
    if (Q_TYPE == BFLOAT16) return {bf16_to_float(u16(w)), bf16_to_float(u16(w >> 16))};
    return {low_f16(w), high_f16(w)};
}

/// Queries of the unit, turned back by the frame, times the rows of the inverse basis: shared.q. A query is two float16 numbers, rows g and g + 8 of operands.
DEVICE void make_queries(const Args& a, const Run& run, int head, int block, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, index = block * COLS + g;
    const bool inside = index < a.num_queries * a.group;
    const u16* const from = static_cast<const u16*>(a.q) + run.sequence * a.q_stride_b + (inside ? index / a.group * a.q_stride_t + (head * a.group + index % a.group) * a.q_stride_h : 0);
    Token x;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        uint2 w = *reinterpret_cast<const uint2*>(from + i * BAND + c * 4);
        if (!inside) w = uint2{0, 0};
        const float2 first = two(w.x), last = two(w.y);
        x[i][0] = first.x, x[i][1] = first.y, x[i][2] = last.x, x[i][3] = last.y;
#pragma unroll
        for (int k = 0; k < 4; ++k) most = fmaxf(most, fabsf(x[i][k]));
    }
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    const int exponent = max(exponent_of(most), -112) - 14;  // below 2**15, which float16 holds after a turn
    const float down = power_of_two(-exponent), back = power_of_two(exponent);
    u32 operands[BANDS][4];
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) {
        const float4 cosines = four_at(shared.cosine, i, c), sines = four_at(shared.sine, i, c);
        const float cosine[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, sine[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float p = x[i][k] * down, r = x[i + BANDS / 2][k] * down;
                y[k] = half ? r * cosine[k] - p * sine[k] : p * cosine[k] + r * sine[k];
            }
            u32(&to)[4] = operands[i + half * (BANDS / 2)];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                to[2 * k] = pack_f16(y[2 * k], y[2 * k + 1]);
                to[2 * k + 1] = pack_f16(y[2 * k] - low_f16(to[2 * k]), y[2 * k + 1] - high_f16(to[2 * k]));
            }
        }
    }
#pragma unroll 1
    for (int i = warp; i < BANDS; i += WARPS) {
        const uint2* const rows = a.basis + (i64(head) * BANDS + i) * (BANDS * 64) + lane;
        float acc[2][4] = {};
#pragma unroll
        for (int step = 0; step < BANDS; ++step)
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const uint2 b = rows[(step * 2 + t) * 32];
                mma_f16(acc[t], operands[step][0], operands[step][1], operands[step][2], operands[step][3], b.x, b.y);
            }
        const float4 power = four_at(a.power + head * D, i, c);
        float4& to = *reinterpret_cast<float4*>(&shared.q[g][i * BAND + c * 4]);
        to = {(acc[0][0] + acc[0][2]) * (power.x * back), (acc[0][1] + acc[0][3]) * (power.y * back), (acc[1][0] + acc[1][2]) * (power.z * back),
              (acc[1][1] + acc[1][3]) * (power.w * back)};
    }
}

/// Adds a plane's fields to the codes of two tokens, `token` (even) and the next of a tile, four of every band in a word.
template <class S, int BITS>
DEVICE void key_plane(const unsigned char* page, u32 (&codes)[2][BANDS], int tile, int token, int c) {
    constexpr int ROW_BYTES = plane_row<S>(BITS), WORDS = ROW_BYTES / 4, EACH = ROW_BYTES % 16 ? 0 : WORDS / 4;
    if constexpr (WORDS > 0) {
        const u32* const plane = reinterpret_cast<const u32*>(page + S::offset(BITS)) + tile * (WORDS * 16) + token;
        uint2 words[EACH ? EACH : 1];
#pragma unroll
        for (int e = 0; e < EACH; ++e) words[e] = *reinterpret_cast<const uint2*>(plane + (e * LANES + c) * 16);
        int at = 0;  // of the plane's bands
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            if (!(S::width(i) & BITS)) continue;
            const int channel = at * BAND + c * 4, field = EACH ? at / (EACH ? EACH : 1) : channel / ROW_BYTES;
            const uint2 w = EACH ? words[EACH ? at % EACH : 0] : *reinterpret_cast<const uint2*>(plane + channel % ROW_BYTES / 4 * 16);
            constexpr u32 MASK = ((1u << BITS) - 1) * 0x01010101u;
            codes[0][i] |= (w.x >> BITS * field & MASK) << (S::width(i) & (BITS - 1));
            codes[1][i] |= (w.y >> BITS * field & MASK) << (S::width(i) & (BITS - 1));
            ++at;
        }
    }
}
/// The same of values: of four channels from `channel` on, each the codes of the four tokens of quad c of a tile. All bands have the plane, whose bits lie `up`.
template <class S, int BITS>
DEVICE void value_plane(const unsigned char* page, u32 (&codes)[4], int tile, int channel, int c, int up) {
    constexpr int ROW_BYTES = plane_row<S>(BITS), WORDS = ROW_BYTES / 4;
    if constexpr (WORDS > 0) {
        const int field = channel / ROW_BYTES, word = channel % ROW_BYTES / 4, block = word / 4, width = min(4, WORDS - block * 4);
        const u32* const from = reinterpret_cast<const u32*>(page + S::offset(BITS)) + block * 4 * PAGE + ((tile * 4 + c) * width + word % 4) * 4;
        const uint4 w = *reinterpret_cast<const uint4*>(from);
        constexpr u32 MASK = ((1u << BITS) - 1) * 0x01010101u;
        codes[0] |= (w.x >> BITS * field & MASK) << up, codes[1] |= (w.y >> BITS * field & MASK) << up;
        codes[2] |= (w.z >> BITS * field & MASK) << up, codes[3] |= (w.w >> BITS * field & MASK) << up;
    }
}

/// What a warp finds over its page: outputs of columns 2 c and 2 c + 1, references and sums, alike in all lanes of a column.
struct Found {
    float out[UNITS][2][4];      // channels 32 unit + 4 g + 2 half, then the next, of both columns each
    float best[2], sum[2];
};

/// Exponents of 2 of a page's tokens: of `first_token` and the next of every tile, columns 2 c and 2 c + 1 each.
DEVICE void score(const Args& a, const Run& run, int entry, int block, const unsigned char* page, const Shared& shared, int lane, float (&s)[TILES][4]) {
    const int g = lane / 4, c = lane % 4;
    // The lane's column as operands, each column over a power of two of its own.
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 x = four_at(shared.q[g], i, c);
        most = fmaxf(most, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
    }
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    const int exponent = min(max(exponent_of(most), -112), 120) - 8;
    const float down = power_of_two(-exponent);
    uint2 q[BANDS];
    float mean[4] = {};
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 x = four_at(shared.q[g], i, c);
        q[i] = {pack_f16(x.x * down, x.y * down), pack_f16(x.z * down, x.w * down)};
        if (!Keys::HAS_MEAN) continue;
        const uint2 m = *reinterpret_cast<const uint2*>(page + Keys::MEAN_OFFSET + (i * BAND + c * 4) * 2);
        mma_f16(mean, m.x, m.x, m.y, m.y, q[i].x, q[i].y);
    }
    float factor[2], added[2];
    int newest[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        factor[e] = __shfl_sync(ALL_LANES, power_of_two(exponent), (2 * c + e) * 4) * (a.softcap > 0.f ? a.scaling / a.softcap : a.scaling * LOG2E);
        added[e] = mean[e] * factor[e];
        const int index = block * COLS + 2 * c + e;
        newest[e] = index < a.num_queries * a.group ? a.q_positions[run.sequence * a.num_queries + index / a.group] : -1;
    }
    const int2 tokens = a.page_tokens[entry];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        u32 codes[2][BANDS] = {}, parts[2][BANDS] = {};
        const int token = first_token(g);
        key_plane<Keys, 8>(page, codes, t, token, c);
        key_plane<Keys, 4>(page, codes, t, token, c);
        key_plane<Keys, 2>(page, codes, t, token, c);
        key_plane<Keys, 1>(page, codes, t, token, c);
        if constexpr (KeyLow::FIRST > 0) key_plane<typename KeyLow::First, KeyLow::FIRST>(page + PAGE_BYTES, parts, t, token, c);
        if constexpr (KeyLow::SECOND > 0) {
#pragma unroll
            for (int i = 0; i < BANDS; ++i) parts[0][i] <<= KeyLow::SECOND, parts[1][i] <<= KeyLow::SECOND;  // bytes have room for both
            key_plane<typename KeyLow::Second, KeyLow::SECOND>(page + PAGE_BYTES + LOW_BYTES0, parts, t, token, c);
        }
        float acc[4] = {};
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            u32 rows[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) rows[r] = levels<KeyLow>(above_1024(codes[r % 2][i], r / 2), above_1024(parts[r % 2][i], r / 2), Keys::width(i));
            mma_f16(acc, rows[0], rows[1], rows[2], rows[3], q[i].x, q[i].y);
        }
        const u32 scales = *reinterpret_cast<const u16*>(page + Keys::SCALE_OFFSET + t * 16 + token);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int e = r % 2, at = t * 16 + token + r / 2, position = tokens.x + at;
            float x = fmaf(acc[r], scale_value(scales >> r / 2 * 8 & 255) * factor[e], added[e]);
            if (a.softcap > 0.f) x = tanh_approx(x) * (a.softcap * LOG2E);
            s[t][r] = at < tokens.y && position <= newest[e] && position > newest[e] - a.window ? x : negative_infinity();
        }
    }
}

DEVICE void attend_page(const Args& a, const Run& run, int entry, int head, int block, const unsigned char* page, const Shared& shared, int lane, Found& found) {
    const int g = lane / 4, c = lane % 4;
    float s[TILES][4];
    score(a, run, entry, block, page, shared, lane, s);
    int largest = 0;             // of the values' scales
#pragma unroll
    for (int at = 0; at < PAGE; at += 32) largest = max(largest, at + lane < PAGE ? int(page[ValueCodes::SCALE_OFFSET + at + lane]) : 0);
    const int exponent = exponent_of(scale_value(__reduce_max_sync(ALL_LANES, u32(largest))));
    const float down = power_of_two(-exponent);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        float best = negative_infinity();
#pragma unroll
        for (int t = 0; t < TILES; ++t) best = fmaxf(best, fmaxf(s[t][e], s[t][2 + e]));
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, mask));
        found.best[e] = best, found.sum[e] = 0.f;
    }
    u32 weights[TILES][2];       // of value operands: tokens (0, 4), then (1, 5) of the lane's quad, of column g
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const u32 scales = *reinterpret_cast<const u16*>(page + ValueCodes::SCALE_OFFSET + t * 16 + first_token(g));
        float w[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float p = s[t][r] == negative_infinity() ? 0.f : exp2_approx(s[t][r] - found.best[r % 2]);
            found.sum[r % 2] += p;
            w[r] = p * (scale_value(scales >> r / 2 * 8 & 255) * down);
        }
        weights[t][0] = transpose_8x8(pack_f16(w[0], w[1]));
        weights[t][1] = transpose_8x8(pack_f16(w[2], w[3]));
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) found.sum[e] += __shfl_xor_sync(ALL_LANES, found.sum[e], mask);
        const int index = block * COLS + 2 * c + e;
        if (a.page_lse && g == 0 && index < a.num_queries * a.group)
            a.page_lse[(i64(entry) * a.num_queries + index / a.group) * (a.num_kv_heads * a.group) + head * a.group + index % a.group] =
                found.sum[e] > 0.f ? (found.best[e] + log2_approx(found.sum[e])) * LN2 : negative_infinity();
    }
    constexpr int WIDTH = ValueCodes::width(0);
    const float back = power_of_two(exponent);
#pragma unroll 1
    for (int unit = 0; unit < UNITS; ++unit) {
        float out[2][4] = {};
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            u32 codes[4] = {}, parts[4] = {};
            const int channel = unit * 32 + g * 4;
            if constexpr ((WIDTH & 4) != 0) value_plane<ValueCodes, 4>(page, codes, t, channel, c, 0);
            if constexpr ((WIDTH & 2) != 0) value_plane<ValueCodes, 2>(page, codes, t, channel, c, WIDTH & 1);
            if constexpr ((WIDTH & 1) != 0) value_plane<ValueCodes, 1>(page, codes, t, channel, c, 0);
            if constexpr (ValueLow::FIRST > 0) value_plane<typename ValueLow::First, ValueLow::FIRST>(page + PAGE_BYTES, parts, t, channel, c, ValueLow::SECOND);
            if constexpr (ValueLow::SECOND > 0) value_plane<typename ValueLow::Second, ValueLow::SECOND>(page + PAGE_BYTES + LOW_BYTES0, parts, t, channel, c, 0);
            u32 rows[4][2];      // of each channel: tokens 0 and 4, then 1 and 5 of the quad
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const u32 selector = odd ? 0x4341 : 0x4240;
                    rows[k][odd] = levels<ValueLow>(permute_bytes(codes[k], 0x64646464u, selector), permute_bytes(parts[k], 0x64646464u, selector), WIDTH);
                }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                mma_f16(out[half], rows[2 * half][0], rows[2 * half + 1][0], rows[2 * half][1], rows[2 * half + 1][1], weights[t][0], weights[t][1]);
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u)  // a number known when this is compiled: registers
            if (u == unit)
#pragma unroll
                for (int i = 0; i < 8; ++i) found.out[u][i / 4][i % 4] = out[i / 4][i % 4] * back;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend_refined(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "refined.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int block = blockIdx.x % a.column_blocks, head = blockIdx.x / a.column_blocks % a.num_kv_heads;
    const Run run = a.runs[blockIdx.x / (a.column_blocks * a.num_kv_heads)];
    const bool works = warp < run.count;
    unsigned char* const page = shared.pages[works ? warp : 0];
    if (works) copy_page(a, run, head, warp, page, lane);
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const float2 turn = turn_of(run.frame * FRAME, a.turns[i]);
        shared.cosine[i] = turn.x, shared.sine[i] = turn.y;
    }
    __syncthreads();
    make_queries(a, run, head, block, shared);
    wait_for_copies();
    __syncthreads();
    Found found;
    if (works) attend_page(a, run, run.first + warp, head, block, page, shared, lane, found);
    __syncthreads();  // outputs take the pages' memory
    if (works) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    *reinterpret_cast<float2*>(&shared.out[warp][2 * c + e][u * 32 + g * 4 + half * 2]) = {found.out[u][half][e], found.out[u][half][2 + e]};
        for (int e = 0; e < 2; ++e)
            if (g == 0) shared.ml[warp][2 * c + e] = {found.best[e], found.sum[e]};
    }
    __syncthreads();
    if (warp > 0) return;
    // Column g of all pages: channels 16 i + 4 c + k of it are the lane's, as `hadamard` wants them.
    float best = negative_infinity(), sum = 0.f;
    for (int w = 0; w < run.count; ++w) best = fmaxf(best, shared.ml[w][g].x);
    Token x = {};
    for (int w = 0; w < run.count; ++w) {
        const float2 ml = shared.ml[w][g];
        const float factor = ml.x == negative_infinity() ? 0.f : exp2_approx(ml.x - best);
        sum = fmaf(ml.y, factor, sum);
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            const float4 y = four_at(shared.out[w][g], i, c);
            x[i][0] = fmaf(y.x, factor, x[i][0]), x[i][1] = fmaf(y.y, factor, x[i][1]), x[i][2] = fmaf(y.z, factor, x[i][2]), x[i][3] = fmaf(y.w, factor, x[i][3]);
        }
    }
    if constexpr (ValueCodes::BASIS == HADAMARD) hadamard(x, c);
    const i64 slot = i64(a.first_slot) + blockIdx.x;
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
        *reinterpret_cast<float4*>(a.partial + (slot * COLS + g) * D + i * BAND + c * 4) = {x[i][0], x[i][1], x[i][2], x[i][3]};
    if (c == 0) a.partial_ml[slot * COLS + g] = {best, sum};
}

/// A warp for each row of the result.
extern "C" __global__ void merge_refined(const __grid_constant__ Args a) {
    constexpr int EACH = D / 32;  // channels of a lane
    const int row = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= a.num_rows) return;
    const int heads = a.num_kv_heads * a.group, query_head = row % heads, token = row / heads % a.num_queries, sequence = row / heads / a.num_queries;
    const int index = token * a.group + query_head % a.group, from = a.first[sequence], to = a.first[sequence + 1];
    const int offset = query_head / a.group * a.column_blocks + index / COLS;  // of a slot
    const float rest = a.rest_lse ? a.rest_lse[row] * LOG2E : negative_infinity();
    float best = rest;
    for (int i = from + lane; i < to; i += 32) best = fmaxf(best, a.partial_ml[i64(a.listed[i] + offset) * COLS + index % COLS].x);
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, mask));
    const bool any = best != negative_infinity();
    float out[EACH] = {}, sum = 0.f;
    if (rest != negative_infinity()) {
        sum = exp2_approx(rest - best);
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const u16 x = a.rest_out[i64(row) * D + lane * EACH + k];
            out[k] = sum * (Q_TYPE == BFLOAT16 ? bf16_to_float(x) : f16_to_float(x));
        }
    }
#pragma unroll 4
    for (int i = from; i < to; ++i) {
        const i64 at = i64(a.listed[i] + offset) * COLS + index % COLS;
        const float2 ml = a.partial_ml[at];
        const float factor = ml.x == negative_infinity() ? 0.f : exp2_approx(ml.x - best);
        sum = fmaf(ml.y, factor, sum);
#pragma unroll
        for (int k = 0; k < EACH; k += 2) {
            const float2 x = *reinterpret_cast<const float2*>(a.partial + at * D + lane * EACH + k);
            out[k] = fmaf(x.x, factor, out[k]), out[k + 1] = fmaf(x.y, factor, out[k + 1]);
        }
    }
    const float over = any ? 1.f / sum : 0.f;
#pragma unroll
    for (int k = 0; k < EACH; k += 2) {
        const u32 w = Q_TYPE == BFLOAT16 ? pack_bf16(out[k] * over, out[k + 1] * over) : pack_f16(out[k] * over, out[k + 1] * over);
        reinterpret_cast<u32*>(a.out + i64(row) * D + lane * EACH)[k / 2] = w;
    }
    if (lane == 0) a.lse[row] = any ? (best + log2_approx(sum)) * LN2 : negative_infinity();
}
