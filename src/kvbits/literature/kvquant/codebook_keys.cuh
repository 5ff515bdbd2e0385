// Keys whose codes number levels: tables and queries of a head, scores of a page's tokens. See codebook_walk.cuh.
#pragma once
#include "codebook_listed.cuh"

constexpr int K_ROW = K_BITS == 4 ? HALF : D / 4;
// sums of listed keys' elements of a column in shared memory, int32
constexpr int SUMS_ROW = CHUNK + 8;
// int32 ends at a score of 2**17 (exponents of 2), or at 2**11 softcaps
constexpr float SCORE_UNITS = SOFTCAP ? 1048576.f : 16384.f;
constexpr bool HELD = FOLD && K_BITS == 4;                     // registers have room for the lane's part of the queries

struct CodebookKeys {
    Tables& shared;
    unsigned char* scratch;          // of the warp: PageTables, then sums of listed keys
    // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh), but for the keys' exponent
    float factor;
    float page_factor;               // with it
    float largest_level;
    u32 multiplier;                  // of the keys' scales and biases: a power of two, twice
    int limit;                       // what scaled keys may reach, as float16 bits; -1 before the first page
    u32 lane_byte;
    uint4 query[HELD ? 4 : 1][HELD ? STEPS : 1];  // shared.queries of this lane

    DEVICE CodebookKeys(Tables& shared, unsigned char* scratch) : shared(shared), scratch(scratch) {}

    DEVICE void start(const Args& a, const Staged& staged, Unit u, const Part& part, int warp, int lane) {
        share_tables(shared, part, u.head, warp * 32 + lane);
        lane_byte = QUADS ? lane % 16 * 8 : lane * 4;
        u32 bits = 0;
        for (int w = 0; w < WARPS; ++w) bits = max(bits, staged.largest[w]);
        float largest = __uint_as_float(bits);
        // under 2**14; a turn makes it at most sqrt(2) times as much
        int shift = largest > 1e-30f ? 13 - exponent_of(largest) : 0;
        const float real_factor = a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E), power = power_of_two(shift);
        factor = real_factor * power_of_two(-shift);
        scales_of_head(part, u.head, lane);
        if (K_OUTLIERS)
#pragma unroll 1
            for (int i = warp * 32 + lane; i < HALF * (FOLD ? 4 : 8); i += CONSUMERS) {
                const int d = i % HALF, column = i / HALF;
                reinterpret_cast<u32*>(shared.q[d])[column] =
                    pack_f16(staged.q[column][d] * power, staged.q[column][d + HALF] * power);
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
        sync_threads(CONSUMERS);
        if (HELD)
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int i = 0; i < STEPS; ++i) query[HELD ? m : 0][HELD ? i : 0] = shared.queries[m][i][lane];
        if (warp + lane == 0) shared.head = u.head;
    }
    DEVICE void scales_of_head(const Part& part, int head, int lane) {
        largest_level = __uint_as_float(__reduce_max_sync(
            ALL_LANES, __float_as_uint(fabsf(part.k_level[(head << K_BITS) + lane % (1 << K_BITS)]))));
        multiplier = pack_f16(1.f, 1.f);
        limit = -1;
        page_factor = factor;
        if (K_SCALE == SCALE_CHANNEL) return;
        const i64 at = i64(head) * D;  // all warps write the same
        page_factor *= power_of_two(pair_scales(shared.scale, part.k_scale + at,
                                                part.k_bias ? part.k_bias + at : nullptr, largest_level, lane));
    }

    /// Scores, as exponents before the softmax's reference (or arguments of tanh), of a page in `slot` whose first
    /// token is at `position`.
    DEVICE void page_scores(float (&s)[TOKENS][NT][2], int num_columns, const unsigned char* slot, int position,
                            int lane) {
        const int g = lane / 4, c = lane % 4;
        float acc[4][4];
        bool stretched = false;
        if (K_STRETCH)
            stretched =
                __any_sync(ALL_LANES, reinterpret_cast<const u32*>(slot + K_STRETCH_OFFSET)[lane] != 0x3c003c00u);
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
        if (K_OUTLIERS) add_outliers(s, num_columns, slot, position, lane);
    }
    /// What belongs to a page as a whole.
    DEVICE void prepare_page(const unsigned char* slot, int position, int lane) {
        PageTables& page = *reinterpret_cast<PageTables*>(scratch);
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
                const float largest =
                    __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(given.largest_float(largest_level))));
                const int exponent = key_exponent(largest);
                multiplier = pack_f16(power_of_two(-exponent), power_of_two(-exponent));
                page_factor = factor * power_of_two(exponent);
                limit = KEY_LIMIT;
                scales = given;
                scales.multiply(multiplier);
            }
            *reinterpret_cast<uint4*>(&page.scale[order_of(2 * i) % (K_SCALE == SCALE_CHANNEL ? HALF : 1)]) =
                scales.pairs();
        }
        __syncwarp();
    }

    template <bool STRETCHED>
    DEVICE void scores(float (&acc)[4][4], const unsigned char* slot, int g, int c) const {
        u32 stretch[2][4];
        if (STRETCHED)
            for (int u = 0; u < 2; ++u) {
                uint2 w =
                    *reinterpret_cast<const uint2*>(slot + K_STRETCH_OFFSET + (FOLD ? 16 * g + 8 * u : 64 * u + 8 * g));
                stretch[u][0] = low_twice(w.x);
                stretch[u][1] = high_twice(w.x);
                stretch[u][2] = low_twice(w.y);
                stretch[u][3] = high_twice(w.y);
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
                if (K_BITS == 3)
                    low[u] = *reinterpret_cast<const uint4*>(slot + K_OFFSET1 +
                                                             (tile * LOW_WORDS + (4 * w + c) % LOW_WORDS) * 64 + from);
            }
            word_scores<STRETCHED, 0>(acc, word, low, by, SPLIT * w, stretch, lane);
            if (SPLIT > AT_ONCE) word_scores<STRETCHED, 1>(acc, word, low, by, SPLIT * w + 1, stretch, lane);
        }
    }
    /// Words i .. i + AT_ONCE - 1 of a lane. Two of them take too many registers where rows have turns of their own.
    static constexpr int AT_ONCE = QUADS && FOLD ? 2 : 1;
    template <bool STRETCHED, int H>
    DEVICE void word_scores(float (&acc)[4][4], const uint4 (&word)[2], const uint4 (&low)[2], int by, int i,
                            const u32 (&stretch)[2][4], int lane) const {
        const PageTables& of_page = *reinterpret_cast<const PageTables*>(scratch);
        Turned turned[AT_ONCE][TURNS][4];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int first = (4 * (i + n) + lane % 4) * 4;
            const uint4 page = *reinterpret_cast<const uint4*>(&of_page.turn[first]);
            const uint4* scales =
                reinterpret_cast<const uint4*>((K_SCALE == SCALE_CHANNEL ? of_page.scale : shared.scale) + first);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint4 scale = scales[k / 2];
#pragma unroll
                for (int u = 0; u < TURNS; ++u) {
                    const uint4 left = shared.turn[u][i + n][k / 2][lane];
                    turned[n][u][k].start(element(page, k), k % 2 ? uint2{left.z, left.w} : uint2{left.x, left.y},
                                          k % 2 ? uint2{scale.z, scale.w} : uint2{scale.x, scale.y});
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a[AT_ONCE][2][4];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const u32 codes =
                    QUADS ? element(word[u], j) : codes_of<K_BITS>(element(word[u], j), element(low[u], j), by, H);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u32 level[2];
                    if (AT_ONCE == 2) {
                        const uint2 both = level_quad<0>(codes, k, lane_byte);
                        level[0] = both.x, level[1] = both.y;
                    } else if (QUADS) level[0] = half_quad<0, H>(codes, k, lane_byte);
                    else level[0] = level_pair<0>(codes, k, lane_byte);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n)
                        a[n][u][k] =
                            turned[n][FOLD ? 0 : u][k].key(STRETCHED ? mul_f16x2(level[n], stretch[u][j]) : level[n]);
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

    DEVICE void add_outliers(float (&s)[TOKENS][NT][2], int num_columns, const unsigned char* slot, int position,
                             int lane) const {
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
                    const float x = batch.value[n] * unit * (upper ? -t.y : t.x),
                                y = batch.value[n] * unit * (upper ? t.x : t.y);
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        sum[n][k] = round_to_int(x * low_f16(element(q, k)) + y * high_f16(element(q, k)));
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
                        const uint4 more = *reinterpret_cast<const uint4*>(
                            scratch + ((2 * (c % 2) + e) * SUMS_ROW + token_of(i, g, c)) * 4);
#pragma unroll
                        for (int k = 0; k < 4; ++k)
                            s[i + k][0][e] += float(int(element(more, k))) * (1.f / SCORE_UNITS);
                    }
        }
    }
};
