// One warp's walk over pages whose codes number levels of a table (KVQuant): keys with a scale per channel, values per token.
//
// Score:  stretch_t * sum_d level * scale * q  +  bias . q  +  listed elements, everything turned to the token's position P + t.
//   - A byte holds the codes of channels d and d + D/2 (docs/formats.md), a rotary pair. One look-up gives both levels as a float16 pair; every lane has
//     its own copy of the table in its own bank, so look-ups never meet. One PRMT makes the address.
//   - Position P + t = P + (4g + 32u) + m, m < 4. The query comes turned back by each m. A lane's rows are tokens 4g + m and 4g + m + 32: what is left of
//     the turn is the same for all m, so a page's scales and biases go into it, once for four tokens. Two fused multiply-adds of pairs make an operand.
// Output: level pairs (d, d + D/2) of a token are two of the inner indices of a matrix instruction, one of which meets the weight and the other zero.
//
// With at most four query columns (FOLD) the other four of the matrix instruction do as much again. Scores: they hold the query turned by m + 4, so a lane's
// two rows are tokens 8g + m and 8g + m + 4 with one constant between them, and each lane keeps the row that its columns are for. Output: columns 0 .. 3 are
// the lower half of the channels, 4 .. 7 the upper half.
//
// Listed elements are added as integers by atomics in shared memory, whose order does not matter: scores in units of 1 / SCORE_UNITS, outputs in units of
// what the page's largest weight and element allow.
#pragma once
#include "levels.cuh"

constexpr int TOKENS = FOLD ? 4 : 8;                           // of a lane
constexpr int OUT_PAIRS = HALF / 32;                           // runs of 32 channel pairs
constexpr int OUT_HALVES = FOLD ? 1 : 2;
constexpr int K_ROW = K_BITS == 4 ? HALF : D / 4, V_ROW = V_BITS == 4 ? HALF : D / 4;
constexpr bool BOTH_RUNS = QUADS && OUT_PAIRS == 2;             // a look-up of values serves both runs: rows g and g + 8 of a matrix instruction
constexpr int WEIGHT_ROW = CHUNK + 8;                          // weights of a column in shared memory, float16
constexpr int SUMS_ROW = CHUNK + 8;                            // sums of listed keys' elements of a column in shared memory, int32
constexpr float SCORE_UNITS = SOFTCAP ? 1048576.f : 16384.f;   // int32 ends at a score of 2**17 (exponents of 2), or at 2**11 softcaps

constexpr bool HELD = FOLD && K_BITS == 4;                     // registers have room for the lane's part of the queries

struct LevelsWalk {
    static constexpr int ROUNDS = OUT_HALVES * OUT_PAIRS, FIRST_PLANE_ROUNDS = ROUNDS;
    Levels& shared;
    unsigned char* scratch;          // of the warp: PageLevels, then sums of listed keys, then weights
    float o[OUT_HALVES][OUT_PAIRS][2][4];  // [lower, upper half][run][rows g and g + 8 of channels 4g + 0, 1 and 4g + 2, 3][mma]; see `out`
    float factor;                    // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh), but for the keys' exponent
    float page_factor;               // with it
    float largest_level;
    u32 multiplier;                  // of the keys' scales and biases: a power of two, twice
    int limit;                       // what scaled keys may reach, as float16 bits; -1 before the first page
    float bias_sum[NT][4];           // weights times the values' biases
    u32 lane_byte;
    uint4 query[HELD ? 4 : 1][HELD ? STEPS : 1];  // shared.queries of this lane

    DEVICE LevelsWalk(Levels& shared, unsigned char* scratch) : shared(shared), scratch(scratch) {}

    static DEVICE int token_of(int i, int g, int c) { return FOLD ? 8 * g + 4 * (c / 2) + i : i / 4 * 32 + 4 * g + i % 4; }
    static DEVICE int column_of(int e, int c) { return FOLD ? 2 * (c % 2) + e : 2 * c + e; }

    DEVICE void start(const Args& a, const Staged& staged, Unit u, const Part& part, int warp, int lane) {
        share_levels(shared, part, u.head, warp * 32 + lane);
        u32 bits = 0;
        for (int w = 0; w < WARPS; ++w) bits = max(bits, staged.largest[w]);
        float largest = __uint_as_float(bits);
        int shift = largest > 1e-30f ? 13 - exponent_of(largest) : 0;  // under 2**14; a turn makes it at most sqrt(2) times as much
        const float real_factor = a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E), power = power_of_two(shift);
        factor = real_factor * power_of_two(-shift);
        scales_of_head(part, u.head, lane);
        if (K_OUTLIERS)
#pragma unroll 1
            for (int i = warp * 32 + lane; i < HALF * (FOLD ? 4 : 8); i += CONSUMERS) {
                const int d = i % HALF, column = i / HALF;
                reinterpret_cast<u32*>(shared.q[d])[column] = pack_f16(staged.q[column][d] * power, staged.q[column][d + HALF] * power);
            }
#pragma unroll 1
        for (int i = warp * 32 + lane; i < 4 * STEPS * 32; i += CONSUMERS) {
            const int to = i % 32, word = i / 32 % STEPS, m = i / (32 * STEPS), column = FOLD ? to / 4 % 4 : to / 4;
            u32 pairs[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int d = pair_of(word, to % 4, k);
                const float2 t = turn_of(FOLD ? m + to / 16 * 4 : m, part.turns[d]);
                const float x = staged.q[column][d] * power, y = staged.q[column][d + HALF] * power;
                pairs[k] = pack_f16(x * t.x + y * t.y, y * t.x - x * t.y);
            }
            shared.queries[m][word][to] = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
        each([](float& x, int) { x = 0.f; });
        for (int r = 0; r < 4; ++r) bias_sum[0][r] = 0.f;
        lane_byte = QUADS ? lane % 16 * 8 : lane * 4;
        sync_threads(CONSUMERS);
        if (HELD)
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int i = 0; i < STEPS; ++i) query[HELD ? m : 0][HELD ? i : 0] = shared.queries[m][i][lane];
        if (warp + lane == 0) shared.head = u.head;
    }
    DEVICE void scales_of_head(const Part& part, int head, int lane) {
        largest_level = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(fabsf(part.k_level[(head << K_BITS) + lane % (1 << K_BITS)]))));
        multiplier = pack_f16(1.f, 1.f);
        limit = -1;
        page_factor = factor;
        if (K_SCALE == SCALE_CHANNEL) return;
        const i64 at = i64(head) * D;  // all warps write the same
        page_factor *= power_of_two(pair_scales(shared.scale, part.k_scale + at, part.k_bias ? part.k_bias + at : nullptr, largest_level, lane));
    }
    template <class F>
    DEVICE void each(F f) {
#pragma unroll
        for (int part = 0; part < OUT_HALVES; ++part)
#pragma unroll
            for (int pair = 0; pair < OUT_PAIRS; ++pair)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 4; ++r) f(o[part][pair][half][r], r % 2);
    }

    /// Output of channel 4g + k of a run and column e.
    DEVICE float& out(int part, int run, int k, int e) { return BOTH_RUNS ? o[part][k / 2 % OUT_PAIRS][k % 2][2 * run + e] : o[part][run][k / 2][k % 2 * 2 + e]; }

    /// Scores, as exponents before the softmax's reference (or arguments of tanh), of a page in `slot` whose first token is at `position`.
    DEVICE void keys(float (&s)[TOKENS][NT][2], int num_columns, const unsigned char* slot, int position, int lane) {
        const int g = lane / 4, c = lane % 4;
        float acc[4][4];
        bool stretched = false;
        if (K_STRETCH) stretched = __any_sync(ALL_LANES, reinterpret_cast<const u32*>(slot + K_STRETCH_OFFSET)[lane] != 0x3c003c00u);
        prepare_page(slot, position, lane);
        if (stretched) scores<true>(acc, slot, g, c);
        else scores<false>(acc, slot, g, c);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (FOLD) s[j][0][e] = (c < 2 ? acc[j][e] : acc[j][2 + e]) * page_factor;
                else s[j][0][e] = acc[j][e] * page_factor, s[TOKENS - 4 + j][0][e] = acc[j][2 + e] * page_factor;
            }
        if (K_OUTLIERS) add_key_outliers(s, num_columns, slot, position, lane);
    }
    /// Weighs and adds the page's values. masked: some of its tokens may be hidden from some column; the first `visible` count. Its codes are overwritten.
    DEVICE void values(float (&s)[TOKENS][NT][2], bool masked, int num_columns, const Args& a, const Visible& see, Softmax& softmax, unsigned char* slot,
                       int position, int visible, int lane) {
        const int g = lane / 4, c = lane % 4;
        finish_scores(masked, s, a, see, softmax, position, visible, g, c);
        u32 largest = reinterpret_cast<const u32*>(slot + V_SCALE_OFFSET)[lane];
        largest = max(largest & 0xffffu, largest >> 16);
        float p[TOKENS][NT][2];
        u32 packed[TOKENS / 2][2];
        u32 largest_weight = weights(p, packed, s);
        if (__any_sync(ALL_LANES, softmax.must_move(largest_weight, largest))) {
            float best[NT][2], down[NT][2], multiplier[NT][2];
            highest<TOKENS>(best, s);
            softmax.move<FOLD ? 2 : 4>(best, largest, down, multiplier);
            for (int i = 0; i < TOKENS; ++i)
                for (int e = 0; e < 2; ++e) s[i][0][e] -= down[0][e];
            each([&](float& x, int e) { x *= multiplier[0][e]; });
            for (int e = 0; e < 2; ++e) bias_sum[0][e] *= multiplier[0][e];
            largest_weight = weights(p, packed, s);
        }
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int i = 0; i < TOKENS; i += 4)
                *reinterpret_cast<uint2*>(scratch + (column_of(e, c) * WEIGHT_ROW + token_of(i, g, c)) * 2) = {packed[i / 2][e], packed[i / 2 + 1][e]};
        add_biases(p, softmax, slot, g, c);
        __syncwarp();
        add_values(slot, g, c);
        if (V_OUTLIERS) add_value_outliers(largest_weight, num_columns, slot, lane);
    }

    /// What belongs to a page as a whole.
    DEVICE void prepare_page(const unsigned char* slot, int position, int lane) {
        PageLevels& page = *reinterpret_cast<PageLevels*>(scratch);
        const int i = lane % (HALF / 2);
        const PageScales given(slot, i);  // all loads before the first store, which they might have to wait for
        float2 turns[HALF / 32];
#pragma unroll
        for (int k = 0; k < HALF / 32; ++k) turns[k] = shared.ordered_turns[lane + 32 * k];
#pragma unroll
        for (int k = 0; k < HALF / 32; ++k) turns[k] = turn_of(position, turns[k]);
#pragma unroll
        for (int k = 0; k < HALF / 32; ++k) page.turn[lane + 32 * k] = pack_f16(turns[k].x, turns[k].y);
        if (K_SCALE == SCALE_CHANNEL) {
            PageScales scales = given;
            scales.multiply(multiplier);
            if (__any_sync(ALL_LANES, int(scales.largest(pack_f16(largest_level, largest_level))) > limit)) {
                const float largest = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(given.largest_float(largest_level))));
                const int exponent = key_exponent(largest);
                multiplier = pack_f16(power_of_two(-exponent), power_of_two(-exponent));
                page_factor = factor * power_of_two(exponent);
                limit = KEY_LIMIT;
                scales = given;
                scales.multiply(multiplier);
            }
            *reinterpret_cast<uint4*>(&page.scale[order_of(2 * i) % (K_SCALE == SCALE_CHANNEL ? HALF : 1)]) = scales.pairs();
        }
        __syncwarp();
    }

    template <bool STRETCHED>
    DEVICE void scores(float (&acc)[4][4], const unsigned char* slot, int g, int c) const {
        u32 stretch[2][4];
        if (STRETCHED)
            for (int u = 0; u < 2; ++u) {
                uint2 w = *reinterpret_cast<const uint2*>(slot + K_STRETCH_OFFSET + (FOLD ? 16 * g + 8 * u : 64 * u + 8 * g));
                stretch[u][0] = low_twice(w.x); stretch[u][1] = high_twice(w.x); stretch[u][2] = low_twice(w.y); stretch[u][3] = high_twice(w.y);
            }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            for (int r = 0; r < 4; ++r) acc[j][r] = 0.f;
        constexpr int SPLIT = K_BITS == 4 ? 1 : 2, WORDS = K_ROW / 4, LOW_WORDS = D / 32;
        const int lane = 4 * g + c;
#pragma unroll(HELD ? STEPS / SPLIT : 1)
        for (int w = 0; w < STEPS / SPLIT; ++w) {
            uint4 word[2], low[2];
            const int by = K_BITS == 3 ? (4 * w + c) / LOW_WORDS : 0;
#pragma unroll
            for (int u = 0; u < 2; ++u) {  // tokens of row u: 4g + 32u .. + 3, folded 8g + 4u .. + 3
                const int tile = FOLD ? g / 2 : 2 * u + g / 4, from = FOLD ? g % 2 * 32 + u * 16 : g % 4 * 16;
                word[u] = *reinterpret_cast<const uint4*>(slot + K_OFFSET0 + (tile * WORDS + 4 * w + c) * 64 + from);
                if (K_BITS == 3) low[u] = *reinterpret_cast<const uint4*>(slot + K_OFFSET1 + (tile * LOW_WORDS + (4 * w + c) % LOW_WORDS) * 64 + from);
            }
            word_scores<STRETCHED, 0>(acc, word, low, by, SPLIT * w, stretch, lane);
            if (SPLIT > AT_ONCE) word_scores<STRETCHED, 1>(acc, word, low, by, SPLIT * w + 1, stretch, lane);
        }
    }
    /// Words i .. i + AT_ONCE - 1 of a lane. Two of them take too many registers where rows have turns of their own.
    static constexpr int AT_ONCE = QUADS && FOLD ? 2 : 1;
    template <bool STRETCHED, int H>
    DEVICE void word_scores(float (&acc)[4][4], const uint4 (&word)[2], const uint4 (&low)[2], int by, int i, const u32 (&stretch)[2][4], int lane) const {
        const PageLevels& of_page = *reinterpret_cast<const PageLevels*>(scratch);
        Turned turned[AT_ONCE][TURNS][4];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int first = (4 * (i + n) + lane % 4) * 4;
            const uint4 page = *reinterpret_cast<const uint4*>(&of_page.turn[first]);
            const uint4* scales = reinterpret_cast<const uint4*>((K_SCALE == SCALE_CHANNEL ? of_page.scale : shared.scale) + first);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint4 scale = scales[k / 2];
#pragma unroll
                for (int u = 0; u < TURNS; ++u) {
                    const uint4 left = shared.turn[u][i + n][k / 2][lane];
                    turned[n][u][k].start(element(page, k), k % 2 ? uint2{left.z, left.w} : uint2{left.x, left.y}, k % 2 ? uint2{scale.z, scale.w} : uint2{scale.x, scale.y});
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a[AT_ONCE][2][4];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const u32 codes = QUADS ? element(word[u], j) : codes_of<K_BITS>(element(word[u], j), element(low[u], j), by, H);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 level[2];
                    if (AT_ONCE == 2) {
                        const uint2 both = level_quad<0>(codes, k, lane_byte);
                        level[0] = both.x, level[1] = both.y;
                    } else if (QUADS) level[0] = half_quad<0, H>(codes, k, lane_byte);
                    else level[0] = level_pair<0>(codes, k, lane_byte);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n) a[n][u][k] = turned[n][FOLD ? 0 : u][k].key(STRETCHED ? mul_f16x2(level[n], stretch[u][j]) : level[n]);
                }
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const uint4 q = HELD ? query[HELD ? j : 0][HELD ? i + n : 0] : shared.queries[j][i + n][lane];
                mma_f16(acc[j], a[n][0][0], a[n][1][0], a[n][0][1], a[n][1][1], q.x, q.y);
                mma_f16(acc[j], a[n][0][2], a[n][1][2], a[n][0][3], a[n][1][3], q.z, q.w);
            }
        }
    }
    static DEVICE u32 element(const uint4& w, int j) { return j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w; }

    /// Softcap, reference and mask.
    static DEVICE void finish_scores(bool masked, float (&s)[TOKENS][NT][2], const Args& a, const Visible& see, const Softmax& softmax, int position, int visible, int g, int c) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            for (int e = 0; e < 2; ++e) s[i][0][e] = (SOFTCAP ? tanh_approx(s[i][0][e]) * (a.softcap * LOG2E) : s[i][0][e]) - softmax.reference[0][e];
        if (masked)
#pragma unroll
            for (int i = 0; i < TOKENS; ++i)
                for (int e = 0; e < 2; ++e) {
                    const int token = token_of(i, g, c);
                    if (token >= visible || see.hides(a.window, column_of(e, c), position + token)) s[i][0][e] = negative_infinity();
                }
    }

    /// p and, packed for two tokens each, float16; returns the largest, as float16 bits.
    static DEVICE u32 weights(float (&p)[TOKENS][NT][2], u32 (&packed)[TOKENS / 2][2], const float (&s)[TOKENS][NT][2]) {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < TOKENS; i += 2)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                for (int j = i; j < i + 2; ++j) p[j][0][e] = exp2_approx(s[j][0][e]);
                packed[i / 2][e] = pack_f16(p[i][0][e], p[i + 1][0][e]);
                largest = max_f16x2(largest, packed[i / 2][e]);
            }
        return max(largest & 0xffffu, largest >> 16);
    }

    DEVICE void add_biases(const float (&p)[TOKENS][NT][2], Softmax& softmax, const unsigned char* slot, int g, int c) {
#pragma unroll
        for (int i = 0; i < TOKENS; i += 4) {
            float bias[4] = {};
            if (V_HAS_BIAS) {
                uint2 w = *reinterpret_cast<const uint2*>(slot + V_BIAS_OFFSET + token_of(i, g, c) * 2);
                bias[0] = low_f16(w.x); bias[1] = high_f16(w.x); bias[2] = low_f16(w.y); bias[3] = high_f16(w.y);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e) {
                    softmax.sum[0][e] += p[i + j][0][e];
                    if (V_HAS_BIAS) bias_sum[0][e] += p[i + j][0][e] * bias[j];
                }
        }
    }

    DEVICE void add_values(const unsigned char* slot, int g, int c) {
        const u32* weights = reinterpret_cast<const u32*>(scratch + (FOLD ? g % 4 : g) * WEIGHT_ROW * 2);
        const u32* scales = reinterpret_cast<const u32*>(slot + V_SCALE_OFFSET);
        const int word = 4 * c + c % 2, quad = 2 * c + c % 2;  // odd lanes take their quads the other way round: two lanes a bank instead of four
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                u32 w[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) w[i] = mul_f16x2(weights[(word ^ step) + 16 * u + 2 * i], scales[(word ^ step) + 16 * u + 2 * i]);
                quads(w, slot + V_OFFSET0 + (quad ^ step) * 64 + 512 * u, (quad ^ step) + 8 * u, slot, g);
            }
    }
    /// Four tokens of all channels, whose codes' first bits start at `codes`; w: weights of the first and of the last two.
    DEVICE void quads(const u32 (&w)[2], const unsigned char* codes, int quad, const unsigned char* slot, int g) {
        constexpr int BLOCKS = V_ROW / 16, LOW_ROW = D / 8, LOW_WIDTH = LOW_ROW < 16 ? LOW_ROW : 16;
        constexpr bool NARROW = V_ROW < 32;  // one block: lanes of the upper rows take the second quarter of the channels
        const int quarter = g % 4;
        u32 b[OUT_HALVES][2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (FOLD) b[0][j][0] = permute_bytes(w[j], 0, g < 4 ? 0x4410 : 0x1044), b[0][j][1] = permute_bytes(w[j], 0, g < 4 ? 0x4432 : 0x3244);
            else {
                b[0][j][0] = w[j] & 0xffffu, b[0][j][1] = w[j] >> 16;
                b[OUT_HALVES - 1][j][0] = w[j] << 16, b[OUT_HALVES - 1][j][1] = w[j] & 0xffff0000u;
            }
        }
#pragma unroll
        for (int load = 0; load < (BLOCKS + 1) / 2; ++load) {
            const int block = NARROW ? 0 : 2 * load + g / 4;
            const uint4 x = *reinterpret_cast<const uint4*>(codes + block * 16 * CHUNK + quarter * 16);
            const int r = 16 * block + 4 * quarter, by = r / LOW_ROW;  // the low bit: byte r % LOW_ROW, shifted by r / LOW_ROW
            uint4 y = {};
            if (V_BITS == 3) y = *reinterpret_cast<const uint4*>(slot + V_OFFSET1 + quad * 4 * LOW_WIDTH + r % LOW_ROW * 4);
            if (V_BITS == 4) rows(x, load, b);
            else if (NARROW) rows(QUADS ? x : codes4(x, y, by, g >= 4), 0, b, g >= 4);
            else if (BOTH_RUNS) rows_of_quads(x, b);
            else {
                rows(codes4(x, y, by, 0), 0, b);
                rows(codes4(x, y, by, 1), OUT_PAIRS - 1, b);
            }
        }
    }
    static DEVICE uint4 codes4(const uint4& x, const uint4& y, int by, int h) {
        return {codes_of<V_BITS>(x.x, y.x, by, h), codes_of<V_BITS>(x.y, y.y, by, h), codes_of<V_BITS>(x.z, y.z, by, h), codes_of<V_BITS>(x.w, y.w, by, h)};
    }
    /// Both quarters of the row's channels at once, with what a look-up gives side by side where the matrix instruction wants it side by side.
    DEVICE void rows_of_quads(const uint4& codes, const u32 (&b)[OUT_HALVES][2][2]) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint2 first = level_quad<1>(element(codes, k), 2 * j, lane_byte), second = level_quad<1>(element(codes, k), 2 * j + 1, lane_byte);
#pragma unroll
                for (int part = 0; part < OUT_HALVES; ++part) mma_f16(o[part][k / 2 % OUT_PAIRS][k % 2], first.x, first.y, second.x, second.y, b[part][j][0], b[part][j][1]);
            }
    }
    /// Codes of channel pairs 32 pair + 4g + 0 .. 3 of four tokens, a byte each. second: with QUADS, of which quarter.
    DEVICE void rows(const uint4& codes, int pair, const u32 (&b)[OUT_HALVES][2][2], bool second = false) {
        const u32 lane_byte = this->lane_byte + (QUADS && second ? 4 : 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 x = half ? codes.z : codes.x, y = half ? codes.w : codes.y;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 a0 = level_pair<1>(x, 2 * j, lane_byte), a1 = level_pair<1>(y, 2 * j, lane_byte);
                u32 a2 = level_pair<1>(x, 2 * j + 1, lane_byte), a3 = level_pair<1>(y, 2 * j + 1, lane_byte);
#pragma unroll
                for (int part = 0; part < OUT_HALVES; ++part) mma_f16(o[part][pair][half], a0, a1, a2, a3, b[part][j][0], b[part][j][1]);
            }
        }
    }

    /// Some entries of a list: token * D + channel, value, whether there is one.
    template <int N>
    struct Batch {
        static constexpr int COUNT = N;
        u32 at[N] = {};
        float value[N] = {};
        bool given[N] = {};

        DEVICE void take(int n, u32 index, float x) { at[n] = index, value[n] = x, given[n] = true; }
        /// Neighbours 2i and 2i + 1.
        DEVICE void take_two(int n, const unsigned char* indices, const unsigned char* values, int i, int count) {
            if (2 * i >= count) return;
            const u32 index = reinterpret_cast<const u32*>(indices)[i], x = reinterpret_cast<const u32*>(values)[i];
            take(n, index & 0xffffu, low_f16(x));
            if (2 * i + 1 < count) take(n + 1, index >> 16, high_f16(x));
        }
    };
    /// f(batch) for the lane's entries of a list. A batch's chains of loads and arithmetic run side by side if all of its loads come before its atomics.
    template <int COUNT, class F>
    static DEVICE void each_batch(const unsigned char* indices, const unsigned char* values, int lane, F f) {
        constexpr int PAIRS = COUNT % 64 == 0 || COUNT % 64 > 32 ? (COUNT + 63) / 64 : COUNT / 64;  // rounds of two entries a lane; one entry of the rest
        constexpr bool REST = COUNT > 64 * PAIRS, ONE = PAIRS + REST <= 2;
#pragma unroll 1
        for (int i = 0; i < (ONE ? 0 : PAIRS); ++i) {
            Batch<2> batch;
            batch.take_two(0, indices, values, 32 * i + lane, COUNT);
            f(batch);
        }
        Batch<COUNT == 0 || (!ONE && !REST) ? 1 : (ONE ? 2 * PAIRS : 0) + REST> batch;
#pragma unroll
        for (int i = 0; i < (ONE ? PAIRS : 0); ++i) batch.take_two(2 * i, indices, values, 32 * i + lane, COUNT);
        const int last = 64 * PAIRS + lane;
        if (REST && last < COUNT) batch.take(batch.COUNT - 1, reinterpret_cast<const u16*>(indices)[last], f16_to_float(reinterpret_cast<const u16*>(values)[last]));
        if (ONE || REST) f(batch);
    }

    DEVICE void add_key_outliers(float (&s)[TOKENS][NT][2], int num_columns, const unsigned char* slot, int position, int lane) const {
        const int g = lane / 4, c = lane % 4;
        const u32 sums = shared_address(scratch);  // [column][token], four columns at a time
        const float unit = factor * SCORE_UNITS;
#pragma unroll 1
        for (int col = 0; col < num_columns; col += 4) {
            __syncwarp();
#pragma unroll
            for (int i = lane; i < SUMS_ROW; i += 32) reinterpret_cast<uint4*>(scratch)[i] = {0, 0, 0, 0};
            __syncwarp();
            each_batch<K_OUTLIERS>(slot + K_OUTLIER_INDEX, slot + K_OUTLIER_VALUE, lane, [&](const auto& batch) {
                constexpr int N = sizeof(batch.at) / sizeof(u32);
                int sum[N][4];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const u32 at = batch.at[n];
                    const uint4 q = shared.q[at % HALF][FOLD ? 0 : col / 4];
                    const float2 t = turn_of(position + int(at / D), shared.turns[at % HALF]);
                    const bool upper = at & HALF;
                    const float x = batch.value[n] * unit * (upper ? -t.y : t.x), y = batch.value[n] * unit * (upper ? t.x : t.y);
#pragma unroll
                    for (int k = 0; k < 4; ++k) sum[n][k] = round_to_int(x * low_f16(element(q, k)) + y * high_f16(element(q, k)));
                }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        if (batch.given[n]) add_to_shared(sums + (k * SUMS_ROW + batch.at[n] / D) * 4, sum[n][k]);
            });
            __syncwarp();
            if (FOLD || c / 2 * 4 == col)
#pragma unroll
                for (int i = 0; i < TOKENS; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const uint4 more = *reinterpret_cast<const uint4*>(scratch + ((2 * (c % 2) + e) * SUMS_ROW + token_of(i, g, c)) * 4);
#pragma unroll
                        for (int k = 0; k < 4; ++k) s[i + k][0][e] += float(int(element(more, k))) * (1.f / SCORE_UNITS);
                    }
        }
    }

    DEVICE void add_value_outliers(u32 largest_weight, int num_columns, unsigned char* slot, int lane) {
        static_assert(D * 16 <= CHUNK * V_ROW, "sums take the codes' memory");
        unsigned char* sums = slot + V_OFFSET0;  // [column][channel], four columns at a time
        const int g = lane / 4, c = lane % 4;
        u32 largest = 0;
        for (int i = lane; i < (V_OUTLIERS + 1) / 2; i += 32) largest = max_f16x2(largest, reinterpret_cast<const u32*>(slot + V_OUTLIER_VALUE)[i] & 0x7fff7fffu);
        largest = __reduce_max_sync(ALL_LANES, max(largest & 0xffffu, largest >> 16));
        const float most = f16_to_float(u16(largest)) * f16_to_float(u16(__reduce_max_sync(ALL_LANES, largest_weight)));
        const int exponent = most > 1e-30f ? 24 - exponent_of(most) : 0;  // a channel has at most 64 entries
        const float units = power_of_two(exponent), unit = power_of_two(-exponent);
#pragma unroll 1
        for (int col = 0; col < num_columns; col += 4) {
            __syncwarp();
#pragma unroll
            for (int i = lane; i < D; i += 32) reinterpret_cast<uint4*>(sums)[i] = {0, 0, 0, 0};
            __syncwarp();
            each_batch<V_OUTLIERS>(slot + V_OUTLIER_INDEX, slot + V_OUTLIER_VALUE, lane, [&](const auto& batch) {
                constexpr int N = sizeof(batch.at) / sizeof(u32);
                int sum[N][4];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const u16* w = reinterpret_cast<const u16*>(scratch) + col * WEIGHT_ROW + batch.at[n] / D;
                    const float value = batch.value[n] * units;
#pragma unroll
                    for (int k = 0; k < 4; ++k) sum[n][k] = round_to_int(f16_to_float(w[k * WEIGHT_ROW]) * value);
                }
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        if (batch.given[n]) add_to_shared(shared_address(sums) + (D * k + batch.at[n] % D) * 4, sum[n][k]);
            });
            __syncwarp();
            if (FOLD || c / 2 * 4 == col)
#pragma unroll
                for (int part = 0; part < OUT_HALVES; ++part)
#pragma unroll
                    for (int pair = 0; pair < OUT_PAIRS; ++pair)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int channel = (FOLD ? c / 2 : part) * HALF + 32 * pair + 4 * g;
                            const uint4 more = *reinterpret_cast<const uint4*>(sums + ((2 * (c % 2) + e) * D + channel) * 4);
#pragma unroll
                            for (int k = 0; k < 4; ++k) out(part, pair, k, e) += float(int(element(more, k))) * unit;
                        }
        }
    }

    /// Sums over the lanes of a column, left where the merge of a segment's warps looks for value group 0.
    DEVICE void sum_biases() {
        for (int e = 0; e < 2; ++e)
            for (int mask = FOLD ? 2 : 4; mask < 32; mask *= 2) bias_sum[0][e] += __shfl_xor_sync(ALL_LANES, bias_sum[0][e], mask);
    }

    /// Four neighbouring channels of round `r` and column e: channels channel(r, 4g) .. + 3; folded, lanes of the upper columns have those HALF further on.
    DEVICE float4 result(int r, int, int e) const {
        const auto& all = o[r / OUT_PAIRS];
        if (BOTH_RUNS) return {all[0][0][r % 2 * 2 + e], all[0][1][r % 2 * 2 + e], all[1 % OUT_PAIRS][0][r % 2 * 2 + e], all[1 % OUT_PAIRS][1][r % 2 * 2 + e]};
        const auto& x = all[r % OUT_PAIRS];
        return {x[0][e], x[0][2 + e], x[1][e], x[1][2 + e]};
    }
    static DEVICE int channel(int r, int x) { return r / OUT_PAIRS * HALF + r % OUT_PAIRS * 32 + x; }
};
