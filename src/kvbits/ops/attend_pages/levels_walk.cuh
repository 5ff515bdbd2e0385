// One warp's walk over pages whose codes number levels of a table (KVQuant): keys with a scale per channel, values per token.
//
// Score:  stretch_t * sum_d level * scale * q  +  bias . q  +  listed elements, everything turned to the token's position P + t.
//   - A byte holds the codes of channels d and d + D/2 (docs/formats.md), a rotary pair. One look-up gives both levels as a float16 pair; every lane has
//     its own copy of the table in its own bank, so look-ups never meet. One PRMT makes the address.
//   - Position P + t = P + m + (4g + 32u), m < 4. A lane's rows are tokens 4g + m and 4g + m + 32: what is left of the turn after the query has been turned
//     back by P + m is the same for all pages and all m: two constants. Three fused multiply-adds of pairs (scale and bias, turn, turn) make an operand.
// Output: level pairs (d, d + D/2) of a token are two of the inner indices of a matrix instruction, one of which meets the weight and the other zero.
// Listed elements are added through shared memory: to the scores before softmax, to the outputs at a page's end, where the page's codes were. Lanes that
// hit the same place take turns in a fixed order: no atomics, the same bits every run.
#pragma once
#include "levels.cuh"

constexpr int TOKENS = 8;                                      // of a lane: 4g + j and 32 + 4g + j
constexpr int OUT_PAIRS = HALF / 32;                           // runs of 32 channel pairs
constexpr int K_ROW = K_BITS == 4 ? HALF : D / 4, V_ROW = V_BITS == 4 ? HALF : D / 4;
constexpr int MOST_ENTRIES = 0x10000;

struct LevelsWalk {
    static constexpr int ROUNDS = 2 * OUT_PAIRS, FIRST_PLANE_ROUNDS = ROUNDS;
    Levels& shared;
    float o[2][OUT_PAIRS][2][4];     // [lower, upper half][run][rows g and g + 8 of channels 4g + 0, 1 and 4g + 2, 3][mma]
    float factor;                    // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh), but for the keys' exponent
    float largest_level;
    int exponent;                    // of the calibrated scales
    float bias_sum[NT][4];           // weights times the values' biases
    u32 lane_byte;

    DEVICE LevelsWalk(Levels& shared) : shared(shared) {}

    DEVICE void start(const Args& a, const Staged& staged, Unit u, const Part& part, int warp, int lane) {
        const int g = lane / 4, c = lane % 4;
        share_levels(shared, part, u.head, warp * 32 + lane);
        scales_of_head(part, u.head, lane);
        u32 bits = 0;
        for (int w = 0; w < WARPS; ++w) bits = max(bits, staged.largest[w]);
        float largest = __uint_as_float(bits);
        int shift = largest > 1e-30f ? 13 - exponent_of(largest) : 0;  // under 2**14; a turn makes it at most sqrt(2) times as much
        const float real_factor = a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E);
        factor = real_factor * power_of_two(-shift);
#pragma unroll 1
        for (int i = warp * 32 + lane; i < HALF * COLS; i += CONSUMERS)
            shared.q[i / COLS][i % COLS] = {staged.q[i % COLS][i / COLS] * real_factor, staged.q[i % COLS][i / COLS + HALF] * real_factor};
#pragma unroll 1
        for (int i = warp; i < STEPS; i += WARPS) {
            u32 pairs[4];
            for (int k = 0; k < 4; ++k) {
                int d = pair_of(i, c, k);
                pairs[k] = pack_f16(staged.q[g][d] * power_of_two(shift), staged.q[g][d + HALF] * power_of_two(shift));
            }
            shared.queries[i][lane] = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
        each([](float& x, int) { x = 0.f; });
        for (int r = 0; r < 4; ++r) bias_sum[0][r] = 0.f;
        lane_byte = lane * 4;
        sync_threads(CONSUMERS);
        if (warp + lane == 0) shared.head = u.head;
    }
    DEVICE void scales_of_head(const Part& part, int head, int lane) {
        largest_level = 0.f;
#pragma unroll 1
        for (int i = 0; i < 1 << K_BITS; ++i) largest_level = fmaxf(largest_level, fabsf(part.k_level[(head << K_BITS) + i]));
        if (K_SCALE == SCALE_CHANNEL) return;
        const CalibratedScales scales = {part.k_scale + i64(head) * D, part.k_bias ? part.k_bias + i64(head) * D : nullptr};
        exponent = pair_scales(shared.scale[0], scales, largest_level, lane);  // all warps write the same
    }
    template <class F>
    DEVICE void each(F f) {
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int pair = 0; pair < OUT_PAIRS; ++pair)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 4; ++r) f(o[part][pair][half][r], r % 2);
    }

    /// One page in `slot`, of which `visible` tokens count, the first at `position`. masked: some may be hidden from some column. Its codes are overwritten.
    DEVICE void chunk(bool masked, const Args& a, const Visible& see, Softmax& softmax, unsigned char* slot, int position, int visible, const Unit& unit, int warp, int lane) {
        const int g = lane / 4, c = lane % 4;
        float s[TOKENS][NT][2];
        {
            float acc[4][4];
            bool stretched = false;
            if (K_STRETCH) stretched = __any_sync(ALL_LANES, reinterpret_cast<const u32*>(slot + K_STRETCH_OFFSET)[lane] != 0x3c003c00u);
            const float page_factor = factor * power_of_two(prepare_page(slot, position, warp, lane));
            if (stretched) scores<true>(acc, slot, warp, g, c);
            else scores<false>(acc, slot, warp, g, c);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e) s[j][0][e] = acc[j][e] * page_factor, s[4 + j][0][e] = acc[j][2 + e] * page_factor;
        }
        if (K_OUTLIERS) add_key_outliers(s, columns_of(a, unit), slot, position, lane);
        finish_scores(masked, s, a, see, softmax, position, visible, g, c);
        u32 pairs[2][4];
        u32 largest = 0;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            load_value_pairs(pairs[u], slot + V_SCALE_OFFSET, 32 * u + 8 * c);
            for (int j = 0; j < 4; ++j) {
                if (masked) pairs[u][j] &= (32 * u + 8 * c + j < visible ? 0xffffu : 0u) | (32 * u + 8 * c + j + 4 < visible ? 0xffff0000u : 0u);
                largest = max_f16x2(largest, pairs[u][j]);
            }
        }
        largest = max(largest & 0xffffu, largest >> 16);
        float p[TOKENS][NT][2];
        u32 packed[TOKENS][NT];
        u32 largest_weight = weigh<TOKENS>(p, packed, s, pack_f16);
        if (__any_sync(ALL_LANES, softmax.must_move(largest_weight, largest))) {
            float best[NT][2], down[NT][2], multiplier[NT][2];
            highest<TOKENS>(best, s);
            softmax.move(best, largest, down, multiplier);
            for (int i = 0; i < TOKENS; ++i)
                for (int e = 0; e < 2; ++e) s[i][0][e] -= down[0][e];
            each([&](float& x, int e) { x *= multiplier[0][e]; });
            for (int e = 0; e < 2; ++e) bias_sum[0][e] *= multiplier[0][e];
            weigh<TOKENS>(p, packed, s, pack_f16);
        }
        add_biases(p, softmax, slot, g);
        values(packed, pairs, slot, g, c);
        if (V_OUTLIERS) add_value_outliers(p, columns_of(a, unit), slot, lane);
    }
    /// What belongs to a page as a whole; returns the exponent that its keys are divided by.
    DEVICE int prepare_page(const unsigned char* slot, int position, int warp, int lane) {
        __syncwarp();
#pragma unroll
        for (int i = lane; i < HALF; i += 32) shared.page[warp][i] = turning_back(turn_of(position, shared.turns[pair_of(i / 16, i / 4 % 4, i % 4)]));
        if (K_SCALE == SCALE_CHANNEL) exponent = pair_scales(shared.scale[warp], PageScales{slot}, largest_level, lane);
        __syncwarp();
        return exponent;
    }

    template <bool STRETCHED>
    DEVICE void scores(float (&acc)[4][4], const unsigned char* slot, int warp, int g, int c) const {
        u32 stretch[2][4];
        if (STRETCHED)
            for (int u = 0; u < 2; ++u) {
                uint2 w = *reinterpret_cast<const uint2*>(slot + K_STRETCH_OFFSET + 64 * u + 8 * g);
                stretch[u][0] = low_twice(w.x); stretch[u][1] = high_twice(w.x); stretch[u][2] = low_twice(w.y); stretch[u][3] = high_twice(w.y);
            }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            for (int r = 0; r < 4; ++r) acc[j][r] = 0.f;
        constexpr int SPLIT = K_BITS == 4 ? 1 : 2, WORDS = K_ROW / 4, LOW_WORDS = D / 32;
        const int lane = 4 * g + c;
#pragma unroll 1
        for (int w = 0; w < STEPS / SPLIT; ++w) {
            uint4 word[2], low[2];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const unsigned char* tile = slot + g % 4 * 16;
                word[u] = *reinterpret_cast<const uint4*>(tile + K_OFFSET0 + ((2 * u + g / 4) * WORDS + 4 * w + c) * 64);
                if (K_BITS == 3) {
                    low[u] = *reinterpret_cast<const uint4*>(tile + K_OFFSET1 + ((2 * u + g / 4) * LOW_WORDS + (4 * w + c) % LOW_WORDS) * 64);
                    const int by = (4 * w + c) / LOW_WORDS;
                    low[u] = {low[u].x >> by, low[u].y >> by, low[u].z >> by, low[u].w >> by};
                }
            }
#pragma unroll
            for (int h = 0; h < SPLIT; ++h) word_scores<STRETCHED>(acc, word, low, h, SPLIT * w + h, stretch, warp, lane);
        }
    }
    template <bool STRETCHED>
    DEVICE void word_scores(float (&acc)[4][4], const uint4 (&word)[2], const uint4 (&low)[2], int h, int i, const u32 (&stretch)[2][4], int warp, int lane) const {
        uint2 turn[2][4], step[4], scale[4];
        u32 b[4];
        const uint4 q = shared.queries[i][lane];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int at = (4 * i + lane % 4) * 4 + k;
            for (int u = 0; u < 2; ++u) turn[u][k] = reinterpret_cast<const uint2*>(&shared.turn[u][i][k / 2][lane])[k % 2];
            step[k] = shared.step[at];
            scale[k] = shared.scale[K_SCALE == SCALE_CHANNEL ? warp : 0][at];
            b[k] = turn_back(element(q, k), shared.page[warp][at]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a[2][4];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                u32 codes = codes_of<K_BITS>(element(word[u], j), element(low[u], j), h);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 level = level_pair(shared, codes, k, lane_byte, 0);
                    if (STRETCHED) level = mul_f16x2(level, stretch[u][j]);
                    level = fma_f16x2(level, scale[k].x, scale[k].y);
                    a[u][k] = high_fma(level, turn[u][k].y, low_mul(level, turn[u][k].x));
                }
            }
            mma_f16(acc[j], a[0][0], a[1][0], a[0][1], a[1][1], b[0], b[1]);
            mma_f16(acc[j], a[0][2], a[1][2], a[0][3], a[1][3], b[2], b[3]);
            if (j < 3)
#pragma unroll
                for (int k = 0; k < 4; ++k) b[k] = turn_back(b[k], step[k]);
        }
    }
    static DEVICE u32 element(const uint4& w, int j) { return j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w; }

    /// Softcap, reference and mask.
    static DEVICE void finish_scores(bool masked, float (&s)[TOKENS][NT][2], const Args& a, const Visible& see, const Softmax& softmax, int position, int visible, int g, int c) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i)
            for (int e = 0; e < 2; ++e) {
                s[i][0][e] = (SOFTCAP ? tanh_approx(s[i][0][e]) * (a.softcap * LOG2E) : s[i][0][e]) - softmax.reference[0][e];
                int token = i / 4 * 32 + 4 * g + i % 4;
                if (masked && (token >= visible || see.hides(a.window, 2 * c + e, position + token))) s[i][0][e] = negative_infinity();
            }
    }

    /// float16 pairs of tokens (0, 4), (1, 5), (2, 6), (3, 7) of eight.
    static DEVICE void load_value_pairs(u32 (&pairs)[4], const unsigned char* section, int token) {
        uint4 w = *reinterpret_cast<const uint4*>(section + token * 2);
        pairs[0] = permute_bytes(w.x, w.z, 0x5410); pairs[1] = permute_bytes(w.x, w.z, 0x7632);
        pairs[2] = permute_bytes(w.y, w.w, 0x5410); pairs[3] = permute_bytes(w.y, w.w, 0x7632);
    }

    DEVICE void add_biases(const float (&p)[TOKENS][NT][2], Softmax& softmax, const unsigned char* slot, int g) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            float bias[4] = {};
            if (V_HAS_BIAS) {
                uint2 w = *reinterpret_cast<const uint2*>(slot + V_BIAS_OFFSET + (32 * u + 4 * g) * 2);
                bias[0] = low_f16(w.x); bias[1] = high_f16(w.x); bias[2] = low_f16(w.y); bias[3] = high_f16(w.y);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 2; ++e) {
                    softmax.sum[0][e] += p[4 * u + j][0][e];
                    if (V_HAS_BIAS) bias_sum[0][e] += p[4 * u + j][0][e] * bias[j];
                }
        }
    }

    DEVICE void values(const u32 (&packed)[TOKENS][NT], const u32 (&pairs)[2][4], const unsigned char* slot, int g, int c) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            u32 w[4];  // weights of tokens (8c, 8c + 4), (8c + 1, 8c + 5), .. of column g
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = mul_f16x2(transpose_8x8(packed[4 * u + j][0]), pairs[u][j]);
            // Odd lanes read their quads the other way round: two lanes a bank instead of four.
            const bool odd = c % 2;
            u32 first[2] = {odd ? w[2] : w[0], odd ? w[3] : w[1]}, second[2] = {odd ? w[0] : w[2], odd ? w[1] : w[3]};
            quads(first, slot, 8 * u + 2 * c + odd, g);
            quads(second, slot, 8 * u + 2 * c + (odd ^ 1), g);
        }
    }
    /// Four tokens of all channels.
    DEVICE void quads(const u32 (&w)[2], const unsigned char* slot, int quad, int g) {
        constexpr int BLOCKS = V_ROW / 16, LOW_ROW = D / 8, LOW_WIDTH = LOW_ROW < 16 ? LOW_ROW : 16;
        constexpr bool NARROW = V_ROW < 32;  // one block: lanes of the upper rows take the second quarter of the channels
        const int quarter = g % 4;
#pragma unroll
        for (int load = 0; load < (BLOCKS + 1) / 2; ++load) {
            const int block = NARROW ? 0 : 2 * load + g / 4;
            uint4 x = *reinterpret_cast<const uint4*>(slot + V_OFFSET0 + block * 16 * CHUNK + quad * 64 + quarter * 16), y = {};
            if (V_BITS == 3) {  // byte r % LOW_ROW, shifted by r / LOW_ROW
                const int r = 16 * block + 4 * quarter, by = r / LOW_ROW;
                y = *reinterpret_cast<const uint4*>(slot + V_OFFSET1 + quad * 4 * LOW_WIDTH + r % LOW_ROW * 4);
                y = {y.x >> by, y.y >> by, y.z >> by, y.w >> by};
            }
            if (V_BITS == 4) rows(x, load, w);
            else if (NARROW) {
                const bool upper = g >= 4;
                rows(codes4(x, y, upper), 0, w);
            } else {
                rows(codes4(x, y, 0), 0, w);
                rows(codes4(x, y, 1), OUT_PAIRS - 1, w);
            }
        }
    }
    static DEVICE uint4 codes4(const uint4& x, const uint4& y, int h) {
        return {codes_of<V_BITS>(x.x, y.x, h), codes_of<V_BITS>(x.y, y.y, h), codes_of<V_BITS>(x.z, y.z, h), codes_of<V_BITS>(x.w, y.w, h)};
    }
    /// Codes of channel pairs 32 pair + 4g + 0 .. 3 of four tokens: bytes 0 and 2 meet the weights w[0], bytes 1 and 3 w[1].
    DEVICE void rows(const uint4& codes, int pair, const u32 (&w)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 x = half ? codes.z : codes.x, y = half ? codes.w : codes.y;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 a0 = level_pair(shared, x, j, lane_byte, 1), a1 = level_pair(shared, y, j, lane_byte, 1);
                u32 a2 = level_pair(shared, x, j + 2, lane_byte, 1), a3 = level_pair(shared, y, j + 2, lane_byte, 1);
                mma_f16(o[0][pair][half], a0, a1, a2, a3, w[j] & 0xffffu, w[j] >> 16);
                mma_f16(o[1][pair][half], a0, a1, a2, a3, w[j] << 16, w[j] & 0xffff0000u);
            }
        }
    }

    /// Entries of a list that a lane takes at once: neighbours, which often share a token, so that lanes seldom meet; their loads are under way together.
    static constexpr int at_once(int count) { return count > 64 ? 3 : count > 32 ? 2 : 1; }

    /// An entry of a list; none past the end.
    struct Entry {
        int token, channel;
        float value;
        bool valid;

        DEVICE Entry(const unsigned char* slot, int index_offset, int value_offset, int i, int count) : valid(i < count) {
            u32 at = valid ? reinterpret_cast<const u16*>(slot + index_offset)[i] : MOST_ENTRIES - 1;
            value = valid ? f16_to_float(reinterpret_cast<const u16*>(slot + value_offset)[i]) : 0.f;
            token = at / D;
            channel = at % D;
        }
    };
    /// Adds x to four floats at `place` (-1: nothing); lanes of one place one after the other, in the order of their lanes.
    static DEVICE void add_in_turn(float4* to, int place, float4 x, int lane) {
        u32 same = __match_any_sync(ALL_LANES, place);
        int rank = place < 0 ? -1 : __popc(same & ((1u << lane) - 1)), last = __reduce_max_sync(ALL_LANES, rank);
#pragma unroll 1
        for (int r = 0; r <= last; ++r) {
            if (rank == r) {
                float4 y = to[place];
                to[place] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
            }
            __syncwarp();
        }
    }

    DEVICE void add_key_outliers(float (&s)[TOKENS][NT][2], int num_columns, unsigned char* slot, int position, int lane) const {
        float4* sums = reinterpret_cast<float4*>(slot);  // [tokens], four columns at a time, over the key codes
        const int g = lane / 4, c = lane % 4;
#pragma unroll 1
        for (int col = 0; col < num_columns; col += 4) {
            __syncwarp();
            sums[lane] = sums[lane + 32] = {0.f, 0.f, 0.f, 0.f};
            __syncwarp();
            constexpr int MINE = at_once(K_OUTLIERS);
#pragma unroll 1
            for (int first = 0; first < K_OUTLIERS; first += 32 * MINE) {
                float4 x[MINE];
                int place[MINE];
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    const Entry entry(slot, K_OUTLIER_INDEX, K_OUTLIER_VALUE, first + lane * MINE + i, K_OUTLIERS);
                    const int d = entry.channel % HALF;
                    const float2 t = turn_of(position + entry.token, shared.turns[d]);
                    const float lo = entry.value * (entry.channel < HALF ? t.x : -t.y), hi = entry.value * (entry.channel < HALF ? t.y : t.x);
                    const float4 q01 = *reinterpret_cast<const float4*>(&shared.q[d][col]), q23 = *reinterpret_cast<const float4*>(&shared.q[d][col + 2]);
                    place[i] = entry.valid ? entry.token : -1;
                    x[i] = {lo * q01.x + hi * q01.y, lo * q01.z + hi * q01.w, lo * q23.x + hi * q23.y, lo * q23.z + hi * q23.w};
                }
#pragma unroll
                for (int i = 0; i < MINE; ++i) add_in_turn(sums, place[i], x[i], lane);
            }
            if (c / 2 * 4 == col)
#pragma unroll
                for (int j = 0; j < TOKENS; ++j) {
                    float2 more = reinterpret_cast<const float2*>(sums + j / 4 * 32 + 4 * g + j % 4)[c % 2];
                    s[j][0][0] += more.x;
                    s[j][0][1] += more.y;
                }
        }
        __syncwarp();
    }

    DEVICE void add_value_outliers(const float (&p)[TOKENS][NT][2], int num_columns, unsigned char* slot, int lane) {
        float4 *weights = reinterpret_cast<float4*>(slot), *sums = weights + CHUNK;  // [tokens], [channels], over the codes
        static_assert(CHUNK * 16 + D * 16 <= V_OFFSET0 + CHUNK * V_ROW, "the codes' memory");
        const int g = lane / 4, c = lane % 4;
#pragma unroll 1
        for (int col = 0; col < num_columns; col += 4) {
            __syncwarp();
            for (int i = lane; i < D; i += 32) sums[i] = {0.f, 0.f, 0.f, 0.f};
            if (c / 2 * 4 == col)
#pragma unroll
                for (int j = 0; j < TOKENS; ++j) reinterpret_cast<float2*>(weights + j / 4 * 32 + 4 * g + j % 4)[c % 2] = {p[j][0][0], p[j][0][1]};
            __syncwarp();
            constexpr int MINE = at_once(V_OUTLIERS);
#pragma unroll 1
            for (int first = 0; first < V_OUTLIERS; first += 32 * MINE) {
                float4 x[MINE];
                int place[MINE];
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    const Entry entry(slot, V_OUTLIER_INDEX, V_OUTLIER_VALUE, first + lane * MINE + i, V_OUTLIERS);
                    const float4 w = weights[entry.valid ? entry.token : 0];
                    place[i] = entry.valid ? entry.channel : -1;
                    x[i] = {w.x * entry.value, w.y * entry.value, w.z * entry.value, w.w * entry.value};
                }
#pragma unroll
                for (int i = 0; i < MINE; ++i) add_in_turn(sums, place[i], x[i], lane);
            }
            if (c / 2 * 4 == col)
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                    for (int pair = 0; pair < OUT_PAIRS; ++pair)
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            float2 more = reinterpret_cast<const float2*>(sums + part * HALF + 32 * pair + 4 * g + k)[c % 2];
                            o[part][pair][k / 2][k % 2 * 2] += more.x;
                            o[part][pair][k / 2][k % 2 * 2 + 1] += more.y;
                        }
        }
        __syncwarp();
    }

    /// Sums over the lanes of a column, left where the merge of a segment's warps looks for value group 0.
    DEVICE void sum_biases() {
        for (int e = 0; e < 2; ++e)
            for (int mask = 4; mask < 32; mask *= 2) bias_sum[0][e] += __shfl_xor_sync(ALL_LANES, bias_sum[0][e], mask);
    }

    /// Four neighbouring channels of round `r` and column e: channels channel(r, 4g) .. + 3.
    DEVICE float4 result(int r, int, int e) const {
        const auto& x = o[r / OUT_PAIRS][r % OUT_PAIRS];
        return {x[0][e], x[0][2 + e], x[1][e], x[1][2 + e]};
    }
    static DEVICE int channel(int r, int x) { return r / OUT_PAIRS * HALF + r % OUT_PAIRS * 32 + x; }
};
