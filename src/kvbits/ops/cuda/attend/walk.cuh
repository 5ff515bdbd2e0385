// One warp's walk over packed chunks: scores, softmax, outputs. Which terms exist is decided at compile time by the macros of the format.
#pragma once
#include "packed.cuh"
#include "raw.cuh"

using Key0 = Plane<K_BITS0, K_OFFSET0, K_BITS1, K_JOINED_OFFSET>;
using Value0 = Plane<V_BITS0, V_OFFSET0, V_BITS1, V_JOINED_OFFSET>;
#if K_BITS1
using Key1 = Plane<K_BITS1, K_OFFSET1, 0>;
#endif
#if V_BITS1
using Value1 = Plane<V_BITS1, V_OFFSET1, 0>;
#endif
constexpr bool V_PER_CHUNK = V_SCALE == SCALE_CHANNEL;            // outputs are scaled once per chunk
constexpr bool V_WEIGHT_SUMS = V_HAS_MEAN || (V_PER_CHUNK && V_HAS_BIAS);  // a chunk's sum of weights multiplies a channel vector
#if HAS_LOW
// A low plane counts in fifteenths of the code's step (docs/formats.md): its products meet the same queries, and are divided where they are few.
static_assert(K_LOW_BITS == 0 || (K_LOW_BITS == 4 && K_BITS0 == 4 && K_BITS1 == 0 && K_FLOAT == INTEGER), "low planes of keys refine 4-bit codes by 4 bits");
static_assert(V_LOW_BITS == 0 || (V_LOW_BITS == 4 && V_BITS0 == 4 && V_BITS1 == 0 && V_FLOAT == INTEGER), "low planes of values refine 4-bit codes by 4 bits");
constexpr bool K_LOW = K_LOW_BITS > 0, V_LOW = V_LOW_BITS > 0;
#else
constexpr bool K_LOW = false, V_LOW = false;
constexpr int K_LOW_OFFSET = 0, V_LOW_OFFSET = 0;
#endif
constexpr bool RAW_JOINS = RAW_ZONES && !V_PER_CHUNK && V_BITS1 == 0;  // raw tokens are added to the same running outputs as packed ones
constexpr u32 LOW_ZERO = 8;
constexpr float LOW_STEP = 1.f / 15.f;
constexpr int TOKENS = 4 * UNITS;                                  // of a lane in a step

/// sum over channels of q times `vector`, for the lane's columns 2c, 2c + 1 (+ 8).
DEVICE void dot_columns(float (&result)[NT][2], const Staged& staged, const float* vector, const float* scale, int g, int c) {
    for (int n = 0; n < NT; ++n) {
        float sum = 0.f;
#pragma unroll 1
        for (int ch = c; ch < D; ch += 4) sum += staged.q[OWN_START ? 0 : n * 8 + g][ch] / scale[ch] * vector[ch];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        for (int e = 0; e < 2; ++e) result[n][e] = __shfl_sync(ALL_LANES, sum, (2 * c + e) * 4);
    }
}

struct PackedWalk {
    static constexpr int ROUNDS0 = Value0::ROUNDS, FIRST_PLANE_ROUNDS = ROUNDS0;
#if V_BITS1
    static constexpr int ROUNDS = ROUNDS0 + Value1::ROUNDS;
    Values<Value1> values1, total1;
#else
    static constexpr int ROUNDS = ROUNDS0;
#endif
    Query<Key0> query0;
#if K_BITS1
    Query<Key1> query1;
#endif
    Values<Value0> values0;
    Values<Value0> total;              // only with V_PER_CHUNK
    float factor;                      // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh)
    float real_factor;                 // the same for q times real numbers
    float constant[NT][2];             // added to every score: q times a static bias
    float start_sum[K_GROUPS][NT][4];  // what scores start from: minus the zero point times the sum of q
    float one_sum[K_GROUPS][NT][4];    // sum of q, for biases
    float low_start[K_GROUPS][NT][4];  // as start_sum, of a low plane
    float bias_sum[NT][4];             // row g: weights times the bias of value group g
    float weight_sum[NT][2];           // this chunk's

    DEVICE void start(const Args& a, Staged& staged, Unit u, const Part& part, int g, int c) {
        const QueryRows rows(a, staged, u, g);
        float m = __uint_as_float(rows.largest(c));
        int shift = m > 1e-30f ? 13 - exponent_of(m) : 0;  // the largest |q| comes just under 2**14
        query0.start(staged, rows, power_of_two(shift), c);
#if K_BITS1
        query1.start(staged, rows, power_of_two(shift), c);
#endif
        real_factor = power_of_two(-shift) * a.scaling * (SOFTCAP ? 1.f / a.softcap : LOG2E);
        factor = real_factor * power_of_two(operand_exponent(K_FLOAT));
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) constant[n][e] = 0.f;
        if (!OWN_START && part.k_bias) {
            i64 row = i64(u.head) * D;
            dot_columns(constant, staged, part.k_bias + row, part.k_scale + row, g, c);
            for (int n = 0; n < NT; ++n)
                for (int e = 0; e < 2; ++e) constant[n][e] *= real_factor * power_of_two(shift);
        }
        start_sums(K_SCALE != SCALE_CHANNEL);
        times_constant(one_sum, K_HAS_BIAS && K_SCALE == SCALE_GROUP ? 1 : 0);
        values0.clear();
        if (V_PER_CHUNK) total.clear();
#if V_BITS1
        values1.clear();
        if (V_PER_CHUNK) total1.clear();
#endif
        for (int n = 0; n < NT; ++n)
            for (int r = 0; r < 4; ++r) bias_sum[n][r] = 0.f;
    }
    DEVICE void start_sums(bool known) {
        times_constant(start_sum, known ? K_ZERO : 0);
        negate(start_sum);
        if (!K_LOW || K_ZERO == LOW_ZERO) return;
        times_constant(low_start, known ? LOW_ZERO : 0);
        negate(low_start);
    }
    static DEVICE void negate(float (&sum)[K_GROUPS][NT][4]) {
        for (int gr = 0; gr < K_GROUPS; ++gr)
            for (int n = 0; n < NT; ++n)
                for (int r = 0; r < 4; ++r) sum[gr][n][r] = -sum[gr][n][r];
    }
    DEVICE void times_constant(float (&sum)[K_GROUPS][NT][4], u32 code) const {
        for (int gr = 0; gr < K_GROUPS; ++gr)
            for (int n = 0; n < NT; ++n)
                for (int r = 0; r < 4; ++r) sum[gr][n][r] = 0.f;
        if (code == 0) return;
        query0.times_constant(sum, code);
#if K_BITS1
        query1.times_constant(sum, code);
#endif
    }

    /// sum over channels of q times a stored channel vector (a bias or a mean), added to `page_constant`.
    DEVICE void add_channel_vector(float (&page_constant)[NT][2], const unsigned char* section, int c) const {
        constexpr int TOP_FIELD = Key0::exponent(Key0::FIELDS - 1);
        float acc[NT][4];
        for (int n = 0; n < NT; ++n)
            for (int r = 0; r < 4; ++r) acc[n][r] = 0.f;
#pragma unroll
        for (int f = 0; f < Key0::FIELDS; ++f)
#pragma unroll
            for (int i = 0; i < Key0::STEPS; ++i) {
                if (!Query<Key0>::used(f, i)) continue;
                // q carries 2**-exponent; undo it here, scaled down by the top field's factor so that nothing overflows float16.
                const float undo = power_of_two(Key0::exponent(f) - TOP_FIELD);
                u32 a0, a2;
                load_channels(a0, a2, section, f, i, undo, c);
                for (int n = 0; n < NT; ++n) {
                    const uint2 b = query0.operand(n, f * Key0::STEPS + i);
                    mma_f16(acc[n], a0, a0, a2, a2, b.x, b.y);
                }
            }
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) page_constant[n][e] += acc[n][e] * (real_factor * power_of_two(TOP_FIELD));
    }
    /// Channels 0, 2 and 1, 3 of a lane's four, times a power of two; 0 past the row.
    static DEVICE void load_channels(u32& even, u32& odd, const unsigned char* section, int f, int i, float times, int c) {
        const int r = 16 * i + 4 * c, ch = f * Key0::ROW + r;
        const bool inside = r < Key0::ROW && ch < D;
        if (K_SCALE_TYPE == FLOAT16) {  // as it is stored
            const uint2 w = *reinterpret_cast<const uint2*>(section + (inside ? ch : 0) * 2);
            even = inside ? permute_bytes(w.x, w.y, 0x5410) : 0, odd = inside ? permute_bytes(w.x, w.y, 0x7632) : 0;
            if (times == 1.f) return;
            const u32 factor = pack_f16(times, times);
            even = mul_f16x2(even, factor), odd = mul_f16x2(odd, factor);
            return;
        }
        float x[4];
        load_scales4<K_SCALE_TYPE>(x, section, inside ? ch : 0);
        for (int k = 0; k < 4; ++k) x[k] = inside ? x[k] * times : 0.f;
        even = pack_f16(x[0], x[2]), odd = pack_f16(x[1], x[3]);
    }

    /// q times this page's channel scales, brought to at most 1 by a power of two; returns the factor that undoes it.
    template <class KeyPlane>
    static DEVICE void scale_query(Query<KeyPlane>& scaled, const Query<KeyPlane>& query, const unsigned char* section, float multiplier, int c) {
        scaled.fragments = query.fragments;
        scaled.scaled = true;
#pragma unroll
        for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) {
                if (!Query<KeyPlane>::used(f, i)) continue;
                int r = 16 * i + 4 * c, ch = f * KeyPlane::ROW + r;
                float x[4];
                load_scales4<K_SCALE_TYPE>(x, section, r < KeyPlane::ROW && ch < D ? ch : 0);
                u32 even = pack_f16(x[0] * multiplier, x[2] * multiplier), odd = pack_f16(x[1] * multiplier, x[3] * multiplier);
                const int at = f * KeyPlane::STEPS + i;
                if constexpr (Query<KeyPlane>::HELD) {
                    for (int n = 0; n < NT; ++n) {
                        scaled.q[n][at][0] = mul_f16x2(query.q[n][at][0], even);
                        scaled.q[n][at][1] = mul_f16x2(query.q[n][at][1], odd);
                    }
                } else {
                    scaled.scales[at][0] = even;
                    scaled.scales[at][1] = odd;
                }
            }
    }
    static DEVICE int channel_exponent(const unsigned char* section, int lane) {
        float m = 0.f;
        for (int ch = 4 * lane; ch < D; ch += 128) {
            float x[4];
            load_scales4<K_SCALE_TYPE>(x, section, ch);
            m = fmaxf(m, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
        }
        for (int mask = 1; mask < 32; mask *= 2) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, mask));
        return m > 1e-30f ? exponent_of(m) + 1 : 0;
    }

    /// One chunk: CHUNK tokens in `slot`, of which `visible` are, the first at `position`. MASKED: some may be hidden from some column.
    /// LOW: `low` holds their low planes.
    template <bool MASKED, bool LOW>
    DEVICE void chunk(const Args& a, const Visible& see, Softmax& softmax, const unsigned char* slot, const unsigned char* low, int position, int visible,
                      const LseRow& lse, int lane) {
        int g = lane / 4, c = lane % 4;
        float page_constant[NT][2];
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) page_constant[n][e] = constant[n][e], weight_sum[n][e] = 0.f;
        if (K_HAS_MEAN) add_channel_vector(page_constant, slot + K_MEAN_OFFSET, c);
        if (K_SCALE == SCALE_CHANNEL) {
            if (K_HAS_BIAS) add_channel_vector(page_constant, slot + K_BIAS_OFFSET, c);
            int e = channel_exponent(slot + K_SCALE_OFFSET, lane);
            PackedWalk scaled;
            scale_query(scaled.query0, query0, slot + K_SCALE_OFFSET, power_of_two(-e), c);
#if K_BITS1
            scale_query(scaled.query1, query1, slot + K_SCALE_OFFSET, power_of_two(-e), c);
#endif
            scaled.start_sums(true);
#pragma unroll 1
            for (int t = 0; t < CHUNK / (32 * UNITS); ++t)
                tile<MASKED, LOW>(a, see, softmax, slot, low, t, scaled, factor * power_of_two(e), page_constant, position, visible, lse, g, c);
        } else {
#pragma unroll 1
            for (int t = 0; t < CHUNK / (32 * UNITS); ++t)
                tile<MASKED, LOW>(a, see, softmax, slot, low, t, *this, factor, page_constant, position, visible, lse, g, c);
        }
        if (V_PER_CHUNK || V_WEIGHT_SUMS) finish_chunk(values0, total, true, slot, g);
#if V_BITS1
        if (V_PER_CHUNK) finish_chunk(values1, total1, false, slot, g);
#endif
    }

    template <bool MASKED, bool LOW>
    DEVICE void tile(const Args& a, const Visible& see, Softmax& softmax, const unsigned char* slot, const unsigned char* low, int t, const PackedWalk& keys,
                     float score_factor, const float (&page_constant)[NT][2], int position, int visible, const LseRow& lse, int g, int c) {
        float s[TOKENS][NT][2];  // token 4u + j is the lane's j-th of unit u
        scores<LOW>(s, softmax, slot, low, t, keys, score_factor, page_constant, g, c);
        if (SOFTCAP)
            for (int u = 0; u < UNITS; ++u)
                for (int j = 0; j < 4; ++j)
                    for (int n = 0; n < NT; ++n)
                        for (int e = 0; e < 2; ++e) s[4 * u + j][n][e] = tanh_approx(s[4 * u + j][n][e]) * (a.softcap * LOG2E) - softmax.reference[n][e];
        if (MASKED)
            for (int u = 0; u < UNITS; ++u)
                for (int j = 0; j < 4; ++j) {
                    int token = (t * UNITS + u) * 32 + 4 * g + j;
                    for (int n = 0; n < NT; ++n)
                        for (int e = 0; e < 2; ++e)
                            if (token >= visible || see.hides(a.window, n * 8 + 2 * c + e, position + token)) s[4 * u + j][n][e] = negative_infinity();
                }
        u32 pairs[V_GROUPS][UNITS][4];
        u32 largest = value_scales<MASKED>(pairs, slot, t, visible, c);
        float p[TOKENS][NT][2];
        u32 packed[TOKENS][NT];
        u32 largest_weight = weigh<TOKENS>(p, packed, s, pack_f16);
        if (__any_sync(ALL_LANES, softmax.must_move(largest_weight, largest))) {
            float best[NT][2], down[NT][2], multiplier[NT][2];
            highest<TOKENS>(best, s);
            softmax.move(best, largest, down, multiplier);
            for (int i = 0; i < TOKENS; ++i)
                for (int n = 0; n < NT; ++n)
                    for (int e = 0; e < 2; ++e) s[i][n][e] -= down[n][e];
            rescale(multiplier);
            weigh<TOKENS>(p, packed, s, pack_f16);
        }
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e)
                for (int i = 0; i < TOKENS; ++i) softmax.sum[n][e] += p[i][n][e];
        if (PAGE_LSE) {
            float own[NT][2] = {};
            for (int i = 0; i < TOKENS; ++i)
                for (int n = 0; n < NT; ++n)
                    for (int e = 0; e < 2; ++e) own[n][e] += p[i][n][e];
            lse.later(a, t).write(a, own, softmax.reference, g, c);
        }
        u32 weights[V_GROUPS][NT][UNITS][2][2];
        value_weights<MASKED>(weights, packed, slot, t, pairs, visible, g, c);
        if (V_ZERO) subtract_zero<V_ZERO>(weights);
        values0.accumulate(slot, Value0::OFFSET, t, weights, g, c);
#if V_BITS1
        values1.accumulate(slot, Value1::OFFSET, t, weights, g, c);
#endif
        if (LOW && V_LOW) {
            const u32 step = pack_f16(LOW_STEP, LOW_STEP);
#pragma unroll
            for (int gr = 0; gr < V_GROUPS; ++gr)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int u = 0; u < UNITS; ++u)
                        for (int k = 0; k < 4; ++k) weights[gr][n][u][k / 2][k % 2] = mul_f16x2(weights[gr][n][u][k / 2][k % 2], step);
            subtract_zero<LOW_ZERO>(weights);
            values0.accumulate(low, V_LOW_OFFSET, t, weights, g, c);
        }
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    template <bool LOW>
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, const unsigned char* low, int t, const PackedWalk& keys,
                       float score_factor, const float (&page_constant)[NT][2], int g, int c) const {
        const Keys<Key0> words0(slot, Key0::OFFSET, t, g, c);
#if K_BITS1
        const Keys<Key1> words1(slot, Key1::OFFSET, t, g, c);
#endif
        float sums[K_GROUPS][UNITS][2][NT][4];
        if (Key0::JOINED) words0.multiply_joined(sums, keys.start_sum, keys.query0);
#pragma unroll
        for (int gr = 0; gr < K_GROUPS; ++gr) {
            float (&acc)[UNITS][2][NT][4] = sums[gr];
            if (LOW && K_LOW) {
                const Keys<Key0> words(low, K_LOW_OFFSET, t, g, c);
                words.template multiply<true>(acc, K_ZERO == LOW_ZERO ? keys.start_sum[gr] : keys.low_start[gr], keys.query0, gr);
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
                    for (int tile = 0; tile < 2; ++tile)
                        for (int n = 0; n < NT; ++n)
                            for (int r = 0; r < 4; ++r) acc[u][tile][n][r] = acc[u][tile][n][r] * LOW_STEP + keys.start_sum[gr][n][r];
                words0.template multiply<false>(acc, keys.start_sum[gr], keys.query0, gr);
            } else if (!Key0::JOINED) {
                words0.template multiply<true>(acc, keys.start_sum[gr], keys.query0, gr);
            }
#if K_BITS1
            words1.template multiply<false>(acc, keys.start_sum[gr], keys.query1, gr);
#endif
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                float scale[4] = {score_factor, score_factor, score_factor, score_factor}, bias[4] = {};
                int index = gr * CHUNK + (t * UNITS + u) * 32 + 4 * g;
                if (K_SCALE == SCALE_GROUP) {
                    load_scales4<K_SCALE_TYPE>(scale, slot + K_SCALE_OFFSET, index);
                    for (int j = 0; j < 4; ++j) scale[j] *= score_factor;
                    if (K_HAS_BIAS) load_scales4<K_SCALE_TYPE>(bias, slot + K_BIAS_OFFSET, index);
                }
                for (int j = 0; j < 4; ++j)
                    for (int n = 0; n < NT; ++n)
                        for (int e = 0; e < 2; ++e) {
                            float base = gr ? s[4 * u + j][n][e] : SOFTCAP ? page_constant[n][e] : page_constant[n][e] - softmax.reference[n][e];
                            if (K_HAS_BIAS && K_SCALE == SCALE_GROUP) base += bias[j] * score_factor * one_sum[gr][n][e];
                            s[4 * u + j][n][e] = acc[u][j / 2][n][j % 2 * 2 + e] * scale[j] + base;
                        }
            }
        }
    }

#if HAS_RAW
    /// Raw tokens: weights `p` as RawWalk::weights gives them times four channels of a row at a time, where the packed values' outputs lie.
    template <class Rows>
    DEVICE void add_raw(const u32 (&p)[NT][4], const Rows& rows, int g, int c) {
#pragma unroll
        for (int field = 0; field < Value0::FIELDS; ++field)
#pragma unroll
            for (int pair = 0; pair < Value0::PAIRS; ++pair) {
                if (!Values<Value0>::used(field, pair)) continue;
                const int byte = 32 * pair + 4 * g, channel = field * Value0::ROW + byte;
                const bool inside = byte < Value0::ROW && channel < D;
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const uint2 v0 = rows.four(j, channel, inside, c), v1 = rows.four(j + 4, channel, inside, c);
                    const uint2 v2 = rows.four(j + 1, channel, inside, c), v3 = rows.four(j + 5, channel, inside, c);
                    const u32 a0 = permute_bytes(v0.x, v1.x, 0x5410), a1 = permute_bytes(v0.x, v1.x, 0x7632);
                    const u32 a2 = permute_bytes(v2.x, v3.x, 0x5410), a3 = permute_bytes(v2.x, v3.x, 0x7632);
                    const u32 c0 = permute_bytes(v0.y, v1.y, 0x5410), c1 = permute_bytes(v0.y, v1.y, 0x7632);
                    const u32 c2 = permute_bytes(v2.y, v3.y, 0x5410), c3 = permute_bytes(v2.y, v3.y, 0x7632);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        mma_raw(values0.o[n][field][pair][0], a0, a1, a2, a3, p[n][j], p[n][j + 1]);
                        mma_raw(values0.o[n][field][pair][1], c0, c1, c2, c3, p[n][j], p[n][j + 1]);
                    }
                }
            }
    }
    /// Running outputs from units of packed values to those of raw ones (1), or back: powers of two.
    DEVICE void change_units(bool to_raw) {
        values0.each([&](float& x, int, int, int field, int, int) {
            const int exponent = operand_exponent(V_FLOAT) - Value0::exponent(field);
            x *= to_raw ? power_of_two(exponent) : power_of_two(-exponent);
        });
    }
#endif

    /// Scale pairs of the lane's value tokens, 0 for hidden ones; returns the largest, as float16 bits.
    template <bool MASKED>
    DEVICE u32 value_scales(u32 (&pairs)[V_GROUPS][UNITS][4], const unsigned char* slot, int t, int visible, int c) const {
        if (V_SCALE != SCALE_GROUP) return 0;
        u32 largest = 0;
#pragma unroll
        for (int gr = 0; gr < V_GROUPS; ++gr)
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                int token = (t * UNITS + u) * 32 + 8 * c;
                load_pairs8<V_SCALE_TYPE>(pairs[gr][u], slot + V_SCALE_OFFSET, gr * CHUNK + token);
                if (MASKED) mask_pairs(pairs[gr][u], token, visible);
                for (int j = 0; j < 4; ++j) largest = max_f16x2(largest, pairs[gr][u][j]);
            }
        return max(largest & 0xffffu, largest >> 16);
    }
    static DEVICE void mask_pairs(u32 (&pairs)[4], int token, int visible) {
        for (int j = 0; j < 4; ++j) pairs[j] &= (token + j < visible ? 0xffffu : 0u) | (token + j + 4 < visible ? 0xffff0000u : 0u);
    }

    DEVICE void rescale(const float (&multiplier)[NT][2]) {
        for (int n = 0; n < NT; ++n) {
            for (int r = 0; r < 4; ++r) bias_sum[n][r] *= multiplier[n][r % 2];
            for (int e = 0; e < 2; ++e) weight_sum[n][e] *= multiplier[n][e];
        }
        values0.scale(multiplier);
        if (V_PER_CHUNK) total.scale(multiplier);
#if V_BITS1
        values1.scale(multiplier);
        if (V_PER_CHUNK) total1.scale(multiplier);
#endif
    }

    template <bool MASKED>
    DEVICE void value_weights(u32 (&weights)[V_GROUPS][NT][UNITS][2][2], const u32 (&packed)[TOKENS][NT], const unsigned char* slot, int t,
                              const u32 (&pairs)[V_GROUPS][UNITS][4], int visible, int g, int c) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            u32 bias[4] = {};
            int token = (t * UNITS + u) * 32 + 8 * c;
            if (V_HAS_BIAS && V_SCALE == SCALE_GROUP && g < V_GROUPS) {
                load_pairs8<V_SCALE_TYPE>(bias, slot + V_BIAS_OFFSET, g * CHUNK + token);
                if (MASKED) mask_pairs(bias, token, visible);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                u32 p[4];  // tokens (8c, 8c + 4), (8c + 1, 8c + 5), .. of column g
                for (int j = 0; j < 4; ++j) p[j] = transpose_8x8(packed[4 * u + j][n]);
                if (V_HAS_BIAS && V_SCALE == SCALE_GROUP) {
                    mma_f16(bias_sum[n], bias[0], 0, bias[1], 0, p[0], p[1]);
                    mma_f16(bias_sum[n], bias[2], 0, bias[3], 0, p[2], p[3]);
                }
                if (V_WEIGHT_SUMS) {
                    float acc[4] = {0.f, 0.f, 0.f, 0.f};
                    mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, p[0], p[1]);
                    mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, p[2], p[3]);
                    for (int e = 0; e < 2; ++e) weight_sum[n][e] += acc[e];
                }
#pragma unroll
                for (int gr = 0; gr < V_GROUPS; ++gr) {
                    for (int j = 0; j < 4; ++j) weights[gr][n][u][j / 2][j % 2] = V_SCALE == SCALE_GROUP ? mul_f16x2(p[j], pairs[gr][u][j]) : p[j];
                }
            }
        }
    }

    template <u32 ZERO>
    DEVICE void subtract_zero(const u32 (&weights)[V_GROUPS][NT][UNITS][2][2]) {
        float sums[V_GROUPS][NT][2];
#pragma unroll
        for (int gr = 0; gr < V_GROUPS; ++gr)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float acc[4];
                for (int u = 0; u < UNITS; ++u)
                    for (int k = 0; k < 2; ++k)
                        if (u + k == 0)
                            mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, weights[gr][n][u][k][0], weights[gr][n][u][k][1], 0.f, 0.f, 0.f, 0.f);
                        else mma_f16(acc, WORD_ONES, WORD_ONES, WORD_ONES, WORD_ONES, weights[gr][n][u][k][0], weights[gr][n][u][k][1]);
                sums[gr][n][0] = acc[0];
                sums[gr][n][1] = acc[1];
            }
        // A power of two: of two planes that are not joined, the second holds none of it.
        values0.each([&](float& x, int n, int e, int field, int pair, int) {
            x -= sums[Values<Value0>::group_of(field, pair)][n][e] * (int(ZERO) * power_of_two(Value0::exponent(field) - 24));
        });
    }

    /// Per-channel scales and offsets of this chunk's outputs (offsets once: with the first plane).
    template <class ValuePlane>
    DEVICE void finish_chunk(Values<ValuePlane>& values, Values<ValuePlane>& sum, bool offsets, const unsigned char* slot, int g) {
        auto& into = V_PER_CHUNK ? sum : values;
#pragma unroll
        for (int field = 0; field < ValuePlane::FIELDS; ++field)
#pragma unroll
            for (int pair = 0; pair < ValuePlane::PAIRS; ++pair) {
                int r = 32 * pair + 4 * g, ch = field * ValuePlane::ROW + r;
                if (!Values<ValuePlane>::used(field, pair)) continue;
                int at = r < ValuePlane::ROW && ch < D ? ch : 0;
                float scale[4] = {1.f, 1.f, 1.f, 1.f}, bias[4] = {}, mean[4] = {};
                if (V_PER_CHUNK) load_scales4<V_SCALE_TYPE>(scale, slot + V_SCALE_OFFSET, at);
                if (V_PER_CHUNK && V_HAS_BIAS) load_scales4<V_SCALE_TYPE>(bias, slot + V_BIAS_OFFSET, at);
                if (V_HAS_MEAN) load_scales4<V_SCALE_TYPE>(mean, slot + V_MEAN_OFFSET, at);
                const float unit = power_of_two(ValuePlane::exponent(field) - operand_exponent(V_FLOAT));
                for (int n = 0; n < NT; ++n)
                    for (int k = 0; k < 4; ++k)
                        for (int e = 0; e < 2; ++e) {
                            float& x = into.o[n][field][pair][k / 2][k % 2 * 2 + e];
                            if (V_PER_CHUNK) x += values.o[n][field][pair][k / 2][k % 2 * 2 + e] * scale[k];
                            if (V_WEIGHT_SUMS && offsets) x += weight_sum[n][e] * ((bias[k] + mean[k]) * unit);
                        }
            }
        if (V_PER_CHUNK) values.clear();
    }

    /// Four neighbouring channels of round `r` and column e: channels channel(r, 4g) .. + 3.
    DEVICE float4 result(int r, int n, int e) const {
#if V_BITS1
        if (r >= ROUNDS0) return V_PER_CHUNK ? four(total1, r - ROUNDS0, n, e) : four(values1, r - ROUNDS0, n, e);
#endif
        return V_PER_CHUNK ? four(total, r, n, e) : four(values0, r, n, e);
    }
    template <class ValuePlane>
    DEVICE float4 four(const Values<ValuePlane>& v, int r, int n, int e) const {
        int field = r / ValuePlane::PAIRS;
        const auto& x = v.o[n][field][r % ValuePlane::PAIRS];
        float m = power_of_two(operand_exponent(V_FLOAT) - ValuePlane::exponent(field));
        return {x[0][e] * m, x[0][2 + e] * m, x[1][e] * m, x[1][2 + e] * m};
    }
    /// The channel at place x of round r; -1 past the row or the head.
    static DEVICE int channel(int r, int x) {
#if V_BITS1
        if (r >= ROUNDS0) return channel_of<Value1>(r - ROUNDS0, x);
#endif
        return channel_of<Value0>(r, x);
    }
    template <class ValuePlane>
    static DEVICE int channel_of(int r, int x) {
        int byte = r % ValuePlane::PAIRS * 32 + x, ch = r / ValuePlane::PAIRS * ValuePlane::ROW + byte;
        return byte < ValuePlane::ROW && ch < D ? ch : -1;
    }
};
