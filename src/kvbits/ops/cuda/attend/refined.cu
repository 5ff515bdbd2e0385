// Attention over banded pages with low planes, read as they are stored: a block attends to pages of one sequence, kv head, frame and block of query columns, some
// warps to each; `merge_refined` then adds up what the blocks of a sequence have found, and what other kernels have of its other pages.
//
// A page and its planes come to shared memory at once, while the block makes its queries as keys in the basis meet them (banded_queries.cuh has the
// formula). A code and its part are one number, code << bits | part, which becomes one that float16 holds (`units`), so keys are operands that meet these
// queries, and values such that meet the weights; scales, and means of keys, come after. Rows of key operands are tokens in an order in which their weights are the operands that values want, once
// they are transposed: lane (g, c) has tokens first_token(g) and the next of every 16 as rows, and weights of those four that lie in one quad of values.
#include "bands.cuh"

constexpr int COLS = 8, HALF = D / 2, UNITS = D / 32, WARPS = THREADS / 32, EACH = D / 32;  // EACH: channels of a lane, where a warp has a row
constexpr int SPLIT = WARPS / PAGES_EACH < PAGE / 16 ? WARPS / PAGES_EACH : PAGE / 16;  // warps of a page
constexpr int TILES = PAGE / 16 / SPLIT, SHARES = PAGES_EACH * SPLIT;                   // tiles of a warp; warps that attend
constexpr int STRIDE = D + 4;   // of rows in shared memory
static_assert(D % 32 == 0 && SPLIT > 0 && PAGE % (16 * SPLIT) == 0, "warps have whole tiles of a page");

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
    const float *power, *most_power;  // [H][D]: what a row's operands are over; [H]: the largest of them
    const float2* turns;         // [D / 2] turns per position, see turn.cuh
    float* partial;              // [slots][COLS][D]
    float2* partial_ml;          // [slots][COLS]: reference exponent (log2), sum
    float* page_lse;             // [entries][T][Hq], null if not wanted
    i64 q_stride_b, q_stride_t, q_stride_h, layer_offset, low_layer_offset[2];
    int first_slot;              // of this launch: slot (run * heads + head) * column_blocks + block
    int num_queries, group, num_kv_heads, column_blocks, head_bytes, low_head_bytes[2], window;  // window: 2**30 if none
    float scaling, softcap, over_group;  // softcap: 0 if none; over_group: 1 / group
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
static_assert((KeyLow::BITS == 0 || Keys::most_bits() + KeyLow::BITS <= 10) && ValueCodes::most_bits() + ValueLow::BITS <= 8, "levels in float16");

struct Shared {
    union {
        unsigned char pages[PAGES_EACH][PAGE_BYTES + LOW_BYTES0 + LOW_BYTES1];
        float out[SHARES][COLS][STRIDE];
    };
    uint4 turned[BANDS][32];     // operands of queries in the frame
    uint2 q[COLS][D / 4 + 2];    // queries in the basis, float16: four channels of a column, to be multiplied by `factor`
    float factor[COLS];
    float2 ml[SHARES][COLS];
    float cosine[HALF], sine[HALF];
};

DEVICE float4 four_at(const float* x, int band, int c) { return *reinterpret_cast<const float4*>(&x[band * BAND + c * 4]); }
/// Of 16 tokens the one of row g of key operands; row g + 8 is the next one. Even, and of quad g / 2 of values.
DEVICE int first_token(int g) { return g / 4 * 8 + g / 2 % 2 * 2 + g % 2 * 4; }

/// A warp's share of a page's copies.
DEVICE void copy_page(const Args& a, const Run& run, int head, int index, unsigned char* to, int thread) {
    const int entry = run.first + index;
    const auto* const page = reinterpret_cast<const unsigned char*>(a.page_address[entry] + a.layer_offset + i64(head) * a.head_bytes);
#pragma unroll 4
    for (int at = thread * 16; at < PAGE_BYTES; at += 512 * SPLIT) copy_16_later(to + at, page + at);
    constexpr int BYTES[2] = {LOW_BYTES0, LOW_BYTES1};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        if (!BYTES[p]) continue;
        const auto* const low = reinterpret_cast<const unsigned char*>(a.low_address[p][entry] + a.low_layer_offset[p] + i64(head) * a.low_head_bytes[p]);
#pragma unroll 4
        for (int at = thread * 16; at < BYTES[p]; at += 512 * SPLIT) copy_16_later(to + PAGE_BYTES + p * LOW_BYTES0 + at, low + at);
    }
}

/// Which query token and head of the group a column is: what is divided is far below 2**20, so a product does.
struct Column {
    int token, head;

    DEVICE Column(const Args& a, int index) : token(int((float(index) + 0.5f) * a.over_group)), head(index - token * a.group) {}
};

DEVICE float2 two(u32 w) {
    if (Q_TYPE == BFLOAT16) return {bf16_to_float(u16(w)), bf16_to_float(u16(w >> 16))};
    return {low_f16(w), high_f16(w)};
}

/// Queries of the unit, turned back by the frame, as operands: two float16 numbers each, rows g and g + 8. A warp turns some pairs of bands.
DEVICE void turn_queries(const Args& a, const Run& run, int head, int block, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, index = block * COLS + g;
    const bool inside = index < a.num_queries * a.group;
    const Column column(a, inside ? index : 0);
    const u16* const from = static_cast<const u16*>(a.q) + run.sequence * a.q_stride_b + column.token * a.q_stride_t + (head * a.group + column.head) * a.q_stride_h;
    uint2 words[BANDS];
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        words[i] = *reinterpret_cast<const uint2*>(from + i * BAND + c * 4);
        if (!inside) words[i] = uint2{0, 0};
        const float2 first = two(words[i].x), last = two(words[i].y);
        most = fmaxf(fmaxf(most, fmaxf(fabsf(first.x), fabsf(first.y))), fmaxf(fabsf(last.x), fabsf(last.y)));
    }
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    const int exponent = min(max(exponent_of(most), -112), 113) - 14;  // below 2**15, which float16 holds after a turn
    const float down = power_of_two(-exponent);
    if (warp == 0 && c == 0) shared.factor[g] = power_of_two(exponent) * a.most_power[head];
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) {
        if (i % WARPS != warp) continue;
        const float4 cosines = four_at(shared.cosine, i, c), sines = four_at(shared.sine, i, c);
        const float cosine[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, sine[4] = {sines.x, sines.y, sines.z, sines.w};
        const float2 p0 = two(words[i].x), p1 = two(words[i].y), r0 = two(words[i + BANDS / 2].x), r1 = two(words[i + BANDS / 2].y);
        const float p[4] = {p0.x, p0.y, p1.x, p1.y}, r[4] = {r0.x, r0.y, r1.x, r1.y};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float y[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float x = p[k] * down, z = r[k] * down;
                y[k] = half ? z * cosine[k] - x * sine[k] : x * cosine[k] + z * sine[k];
            }
            u32 to[4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                to[2 * k] = pack_f16(y[2 * k], y[2 * k + 1]);
                to[2 * k + 1] = pack_f16(y[2 * k] - low_f16(to[2 * k]), y[2 * k + 1] - high_f16(to[2 * k]));
            }
            shared.turned[i + half * (BANDS / 2)][lane] = {to[0], to[1], to[2], to[3]};
        }
    }
}
/// Times the rows of the inverse basis: below 2**23, and 2**-8 of that is stored.
DEVICE void make_queries(const Args& a, int head, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const float over = 1.f / (256.f * a.most_power[head]);  // a power of two
#pragma unroll 1
    for (int i = warp; i < BANDS; i += WARPS) {
        const uint2* const rows = a.basis + (i64(head) * BANDS + i) * (BANDS * 64) + lane;
        float acc[2][4] = {};
#pragma unroll
        for (int step = 0; step < BANDS; ++step) {
            const uint4 x = shared.turned[step][lane];
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                const uint2 b = rows[(step * 2 + t) * 32];
                mma_f16(acc[t], x.x, x.y, x.z, x.w, b.x, b.y);
            }
        }
        const float4 power = four_at(a.power + head * D, i, c);
        shared.q[g][i * 4 + c] = {pack_f16((acc[0][0] + acc[0][2]) * (power.x * over), (acc[0][1] + acc[0][3]) * (power.y * over)),
                                  pack_f16((acc[1][0] + acc[1][2]) * (power.z * over), (acc[1][1] + acc[1][3]) * (power.w * over))};
    }
}

/// Two codes with their parts, code << LOW::BITS | part, plus 1024: numbers in parts of an inner cell from the band's middle, less a half. Where that lies past the
/// inner cells, cells are twice as wide: what is past them counts once more.
template <class LOW>
DEVICE u32 units(u32 above, int width) {
    constexpr int P = LOW::PARTS;
    if (!width && P == 1) return twice_f16(-0.5f);
    if (!width) return fma_f16x2(fma_f16x2(above, ONE_F16X2, twice_f16(-1024.f)), twice_f16(ONLY_CELL), twice_f16(ONLY_CELL / 2 - 0.5f - ONLY_CELL / 2 * P));
    const u32 x = fma_f16x2(above, ONE_F16X2, twice_f16(-1024.f - float(1 << width) / 2 * P));
    if (P == 1) return x;
    const float edge = (float(1 << width) / 2 - 1) * P;
    const u32 past_last = fma_relu_f16x2(x, ONE_F16X2, twice_f16(0.5f - edge)), past_first = fma_relu_f16x2(x, twice_f16(-1.f), twice_f16(-0.5f - edge));
    return fma_f16x2(past_first, twice_f16(-1.f), fma_f16x2(x, ONE_F16X2, past_last));
}
/// The same of codes and parts that no byte holds together.
template <class LOW>
DEVICE u32 units(u32 codes, u32 parts, int width) { return fma_f16x2(levels<LOW>(codes, parts, width), twice_f16(LOW::PARTS), twice_f16(-0.5f)); }
constexpr u32 HALF_F16X2 = 0x38003800u;  // what is missing: it meets sums of the other operands

/// Adds a plane's fields to the codes of two tokens, `token` (even) and the next of a tile, four of every band in a word: UP bits further up.
template <class S, int BITS, int UP>
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
            codes[0][i] |= (w.x >> BITS * field & MASK) << (S::width(i) & (BITS - 1)) + UP;
            codes[1][i] |= (w.y >> BITS * field & MASK) << (S::width(i) & (BITS - 1)) + UP;
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

/// What a warp finds over its tiles: outputs of columns 2 c and 2 c + 1, references and sums, alike in all lanes of a column.
struct Found {
    float out[UNITS][2][4];      // channels 32 unit + 4 g + 2 half, then the next, of both columns each
    float best[2], sum[2];
};

/// Exponents of 2 of tokens: of `first_token` and the next of every tile, `first` and those behind it, columns 2 c and 2 c + 1 each.
DEVICE void score(const Args& a, const Run& run, int entry, int block, const unsigned char* page, int first, const Shared& shared, int lane, float (&s)[TILES][4]) {
    const int g = lane / 4, c = lane % 4;
    uint2 q[BANDS];
    float mean[4] = {}, halves[4] = {};
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        q[i] = shared.q[g][i * 4 + c];
        mma_f16(halves, HALF_F16X2, HALF_F16X2, HALF_F16X2, HALF_F16X2, q[i].x, q[i].y);
        if (!Keys::HAS_MEAN) continue;
        const uint2 m = *reinterpret_cast<const uint2*>(page + Keys::MEAN_OFFSET + (i * BAND + c * 4) * 2);
        mma_f16(mean, m.x, m.x, m.y, m.y, q[i].x, q[i].y);
    }
    float factor[2], added[2];
    int newest[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float unit = shared.factor[2 * c + e] * 256.f * (a.softcap > 0.f ? a.scaling / a.softcap : a.scaling * LOG2E);
        factor[e] = unit / KeyLow::PARTS;
        added[e] = mean[e] * unit;
        const int index = block * COLS + 2 * c + e;
        newest[e] = index < a.num_queries * a.group ? a.q_positions[run.sequence * a.num_queries + Column(a, index).token] : -1;
    }
    const int2 tokens = a.page_tokens[entry];
    const u32 upper = in_register(ABOVE_1024);  // as a constant it takes the selector's place in the instruction, which then is a move more for each
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int token = first_token(g);
        constexpr bool BYTES = Keys::most_bits() + KeyLow::BITS <= 8;  // hold a code and its parts
        constexpr int UP = BYTES ? KeyLow::BITS : 0;
        u32 codes[2][BANDS] = {}, apart[2][BANDS] = {};
        u32(&parts)[2][BANDS] = BYTES ? codes : apart;
        key_plane<Keys, 8, UP>(page, codes, first + t, token, c);
        key_plane<Keys, 4, UP>(page, codes, first + t, token, c);
        key_plane<Keys, 2, UP>(page, codes, first + t, token, c);
        key_plane<Keys, 1, UP>(page, codes, first + t, token, c);
        if constexpr (KeyLow::FIRST > 0) key_plane<typename KeyLow::First, KeyLow::FIRST, KeyLow::SECOND>(page + PAGE_BYTES, parts, first + t, token, c);
        if constexpr (KeyLow::SECOND > 0) key_plane<typename KeyLow::Second, KeyLow::SECOND, 0>(page + PAGE_BYTES + LOW_BYTES0, parts, first + t, token, c);
        float acc[4] = {halves[0], halves[1], halves[0], halves[1]};
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            u32 rows[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u32 code = above_1024(codes[r % 2][i], r / 2, upper);
                rows[r] = BYTES ? units<KeyLow>(code, Keys::width(i)) : units<KeyLow>(code, above_1024(parts[r % 2][i], r / 2, upper), Keys::width(i));
            }
            mma_f16(acc, rows[0], rows[1], rows[2], rows[3], q[i].x, q[i].y);
        }
        const u32 scales = *reinterpret_cast<const u16*>(page + Keys::SCALE_OFFSET + (first + t) * 16 + token);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            s[t][r] = fmaf(acc[r], scale_value(scales >> r / 2 * 8 & 255) * factor[r % 2], added[r % 2]);
            if (a.softcap > 0.f) s[t][r] = tanh_approx(s[t][r]) * (a.softcap * LOG2E);
        }
    }
    bool all = tokens.y == PAGE;
#pragma unroll
    for (int e = 0; e < 2; ++e) all &= tokens.x + PAGE - 1 <= newest[e] && tokens.x > newest[e] - a.window;
    if (all) return;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int at = (first + t) * 16 + first_token(g) + r / 2, position = tokens.x + at;
            if (at >= tokens.y || position > newest[r % 2] || position <= newest[r % 2] - a.window) s[t][r] = negative_infinity();
        }
}

DEVICE void attend_tiles(const Args& a, const Run& run, int entry, int block, const unsigned char* page, int first, const Shared& shared, int lane, Found& found) {
    const int g = lane / 4, c = lane % 4;
    float s[TILES][4];
    score(a, run, entry, block, page, first, shared, lane, s);
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
        const u32 scales = *reinterpret_cast<const u16*>(page + ValueCodes::SCALE_OFFSET + (first + t) * 16 + first_token(g));
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
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) found.sum[e] += __shfl_xor_sync(ALL_LANES, found.sum[e], mask);
    constexpr int WIDTH = ValueCodes::width(0), UP = ValueLow::BITS;
    const float back = power_of_two(exponent) / ValueLow::PARTS;
    const u32 upper = in_register(ABOVE_1024);
    float halves[4] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) mma_f16(halves, HALF_F16X2, HALF_F16X2, HALF_F16X2, HALF_F16X2, weights[t][0], weights[t][1]);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int channel = unit * 32 + g * 4;
        float out[2][4] = {{halves[0], halves[1], halves[0], halves[1]}, {halves[0], halves[1], halves[0], halves[1]}};
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            u32 codes[4] = {};   // with their parts, which a byte holds: values have 4 bits at most
            if constexpr ((WIDTH & 4) != 0) value_plane<ValueCodes, 4>(page, codes, first + t, channel, c, UP);
            if constexpr ((WIDTH & 2) != 0) value_plane<ValueCodes, 2>(page, codes, first + t, channel, c, (WIDTH & 1) + UP);
            if constexpr ((WIDTH & 1) != 0) value_plane<ValueCodes, 1>(page, codes, first + t, channel, c, UP);
            if constexpr (ValueLow::FIRST > 0) value_plane<typename ValueLow::First, ValueLow::FIRST>(page + PAGE_BYTES, codes, first + t, channel, c, ValueLow::SECOND);
            if constexpr (ValueLow::SECOND > 0) value_plane<typename ValueLow::Second, ValueLow::SECOND>(page + PAGE_BYTES + LOW_BYTES0, codes, first + t, channel, c, 0);
            u32 rows[4][2];      // of each channel: tokens 0 and 4, then 1 and 5 of the quad
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) rows[k][odd] = units<ValueLow>(permute_bytes(codes[k], upper, odd ? 0x4341 : 0x4240), WIDTH);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                mma_f16(out[half], rows[2 * half][0], rows[2 * half + 1][0], rows[2 * half][1], rows[2 * half + 1][1], weights[t][0], weights[t][1]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) found.out[unit][i / 4][i % 4] = out[i / 4][i % 4] * back;
    }
}

/// A warp's lanes, EACH neighbouring channels each: a row times the Hadamard matrix.
DEVICE void hadamard_row(float (&x)[EACH], int lane) {
#pragma unroll
    for (int stride = 1; stride < EACH; stride *= 2)
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            if (k & stride) continue;
            const float low = x[k], high = x[k + stride];
            x[k] = low + high, x[k + stride] = low - high;
        }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
#pragma unroll
        for (int k = 0; k < EACH; ++k) x[k] = fmaf(x[k], lane & mask ? -1.f : 1.f, __shfl_xor_sync(ALL_LANES, x[k], mask));
#pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] *= float(HADAMARD_FACTOR);
}

/// Adds up what the warps have found for a column; log-sum-exps of its pages.
DEVICE void finish_column(const Args& a, const Run& run, int head, int block, int col, int lane, const Shared& shared) {
    static_assert((D & -D) == D, "Hadamard matrices of whole rows");
    const int shares = run.count * SPLIT, index = block * COLS + col;
    static_assert(SHARES <= 32, "a lane for each");
    const float2 own = lane < shares ? shared.ml[lane][col] : float2{negative_infinity(), 0.f};
    float best = own.x;
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, mask));
    const float own_factor = own.x == negative_infinity() ? 0.f : exp2_approx(own.x - best);
    float sum = own.y * own_factor, x[EACH] = {};
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, mask);
#pragma unroll 4
    for (int w = 0; w < shares; ++w) {
        const float factor = __shfl_sync(ALL_LANES, own_factor, w);
#pragma unroll
        for (int k = 0; k < EACH; k += 2) {
            const float2 y = *reinterpret_cast<const float2*>(&shared.out[w][col][lane * EACH + k]);
            x[k] = fmaf(y.x, factor, x[k]), x[k + 1] = fmaf(y.y, factor, x[k + 1]);
        }
    }
    if (ValueCodes::BASIS == HADAMARD) hadamard_row(x, lane);
    const i64 slot = i64(a.first_slot) + blockIdx.x;
#pragma unroll
    for (int k = 0; k < EACH; k += 2) *reinterpret_cast<float2*>(a.partial + (slot * COLS + col) * D + lane * EACH + k) = {x[k], x[k + 1]};
    if (lane == 0) a.partial_ml[slot * COLS + col] = {best, sum};
    if (!a.page_lse || index >= a.num_queries * a.group) return;
    for (int page = lane; page < run.count; page += 32) {
        best = negative_infinity(), sum = 0.f;
        for (int w = page * SPLIT; w < (page + 1) * SPLIT; ++w) best = fmaxf(best, shared.ml[w][col].x);
        for (int w = page * SPLIT; w < (page + 1) * SPLIT && best != negative_infinity(); ++w) sum = fmaf(shared.ml[w][col].y, exp2_approx(shared.ml[w][col].x - best), sum);
        const Column column(a, index);
        a.page_lse[(i64(run.first + page) * a.num_queries + column.token) * (a.num_kv_heads * a.group) + head * a.group + column.head] =
            sum > 0.f ? (best + log2_approx(sum)) * LN2 : negative_infinity();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend_refined(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "refined.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    let_next_kernel_start();     // the one that merges
    wait_for_previous_kernel();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int block = blockIdx.x % a.column_blocks, head = blockIdx.x / a.column_blocks % a.num_kv_heads;
    const Run run = a.runs[blockIdx.x / (a.column_blocks * a.num_kv_heads)];
    const int index = warp / SPLIT;
    const bool works = index < run.count;
    unsigned char* const page = shared.pages[works ? index : 0];
    if (works) copy_page(a, run, head, index, page, threadIdx.x % (32 * SPLIT));
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const float2 turn = turn_of(run.frame * FRAME, a.turns[i]);
        shared.cosine[i] = turn.x, shared.sine[i] = turn.y;
    }
    __syncthreads();
    turn_queries(a, run, head, block, shared);
    __syncthreads();
    make_queries(a, head, shared);
    wait_for_copies();
    __syncthreads();
    Found found;
    if (works) attend_tiles(a, run, run.first + index, block, page, warp % SPLIT * TILES, shared, lane, found);
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
#pragma unroll 1
    for (int col = warp; col < COLS; col += WARPS) finish_column(a, run, head, block, col, lane, shared);
}

/// A warp for each row of the result.
extern "C" __global__ void merge_refined(const __grid_constant__ Args a) {
    wait_for_previous_kernel();
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
