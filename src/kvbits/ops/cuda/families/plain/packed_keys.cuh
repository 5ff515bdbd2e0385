// Keys of packed pages: a warp's queries as matrix operands, and scores of a step's tokens.
#pragma once
#include "finish.cuh"
#include "packed_codes.cuh"

/// What decides how keys are multiplied.
struct KeyTraits {
    using First = Plane<K_BITS0, K_OFFSET0, K_BITS1, K_JOINED_OFFSET, K_FLOAT>;
    using Second = Plane<K_BITS1, K_OFFSET1, 0>;
    static constexpr bool SCALES_QUERY = K_SCALE == SCALE_CHANNEL;          // a page's scales multiply the queries
    static constexpr bool BIAS_BY_TOKEN = K_HAS_BIAS && K_SCALE == SCALE_GROUP;
};

/// Queries as operands of a key plane.
template <class KeyPlane>
struct Query {
    static constexpr int COUNT = KeyPlane::FIELDS * KeyPlane::STEPS;
    static constexpr bool HELD = Q_FRAGMENTS == 0;
    static constexpr int EACH = COUNT ? COUNT : 1, STEPS = COUNT ? KeyPlane::STEPS : 1;
    static_assert(HELD || Q_FRAGMENTS == COUNT || COUNT == 0, "family.py counts other steps");
    u32 q[HELD ? NT : 1][HELD ? EACH : 1][2];
    const uint2* fragments;      // of this lane, unless held: [NT][COUNT] times 32 lanes
    u32 scales[HELD ? 1 : EACH][2];  // factors of a page's channels, if `scaled`
    bool scaled;

    /// Operand of column tile n for step `at`.
    DEVICE uint2 operand(int n, int at) const {
        if (HELD) return {q[HELD ? n : 0][HELD ? at : 0][0], q[HELD ? n : 0][HELD ? at : 0][1]};
        const uint2 x = fragments[(n * COUNT + at) * 32];
        if (!scaled) return x;
        return {mul_f16x2(x.x, scales[HELD ? 0 : at][0]), mul_f16x2(x.y, scales[HELD ? 0 : at][1])};
    }

    static constexpr bool used(int field, int step) { return field * KeyPlane::ROW + 16 * step < D; }
    static constexpr int group_of(int field, int step) { return (field * KeyPlane::ROW + 16 * step) / K_GROUP; }

    /// Channels field * ROW + 16 step + 4c .. + 3 of a lane's column; 0 past the row, where a lane's words belong to
    /// others.
    DEVICE void start(Staged& staged, const QueryRows& rows, float multiplier, int c) {
        scaled = false;
        if (COUNT == 0) return;
        if (!HELD) {  // the block's warps have the same columns: each makes some operands for all
            const int thread = thread_again();
            fragments = staged.fragments + thread % 32;
            for (int at = thread / 32; at < NT * COUNT; at += WARPS) {
                u32 x[2];
                pack(x, rows, multiplier, at / EACH, at % EACH / STEPS, at % STEPS, c);
                staged.fragments[at * 32 + thread % 32] = {x[0], x[1]};
            }
            sync_threads(CONSUMERS);
            return;
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
                for (int i = 0; i < KeyPlane::STEPS; ++i)
                    if (used(f, i))
                        pack(q[HELD ? n : 0][HELD ? f * KeyPlane::STEPS + i : 0], rows, multiplier, n, f, i, c);
    }
    static DEVICE void pack(u32 (&to)[2], const QueryRows& rows, float multiplier, int n, int f, int i, int c) {
        int r = 16 * i + 4 * c, ch = f * KeyPlane::ROW + r;
        const float4 x = rows.four(n, ch, r < KeyPlane::ROW && ch < D);
        float m = multiplier * power_of_two(-KeyPlane::exponent(f));
        to[0] = pack_f16(x.x * m, x.z * m);
        to[1] = pack_f16(x.y * m, x.w * m);
    }
    /// Adds q times the code's field over a group's channels, for a code alike in all channels and tokens: an operand's
    /// [rows and columns] of every group.
    DEVICE void times_constant(float (&sum)[K_GROUPS][NT][4], u32 code) const {
#pragma unroll
        for (int gr = 0; gr < K_GROUPS; ++gr)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float (&acc)[4] = sum[gr][n];
#pragma unroll
                for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
                    for (int i = 0; i < KeyPlane::STEPS; ++i)
                        if (used(f, i) && group_of(f, i) == gr) {
                            u32 w = KeyPlane::constant(code, f);
                            const uint2 b = operand(n, f * KeyPlane::STEPS + i);
                            mma_f16(acc, w, w, w, w, b.x, b.y);
                        }
            }
    }
    /// `query` times a page's channel scales times `multiplier`.
    DEVICE void scale(const Query& query, const unsigned char* section, float multiplier, int c) {
        fragments = query.fragments;
        scaled = true;
#pragma unroll
        for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) {
                if (!used(f, i)) continue;
                int r = 16 * i + 4 * c, ch = f * KeyPlane::ROW + r;
                float x[4];
                load_scales4<K_SCALE_TYPE>(x, section, r < KeyPlane::ROW && ch < D ? ch : 0);
                u32 even = pack_f16(x[0] * multiplier, x[2] * multiplier),
                    odd = pack_f16(x[1] * multiplier, x[3] * multiplier);
                const int at = f * KeyPlane::STEPS + i;
                if constexpr (HELD) {
                    for (int n = 0; n < NT; ++n) {
                        q[n][at][0] = mul_f16x2(query.q[n][at][0], even);
                        q[n][at][1] = mul_f16x2(query.q[n][at][1], odd);
                    }
                } else {
                    scales[at][0] = even;
                    scales[at][1] = odd;
                }
            }
    }
};

/// Codes of a key plane as accumulated scores. Words with several fields are held in registers if they are few, the
/// others loaded where they are used.
template <class KeyPlane>
struct Keys {
    static constexpr bool HELD = KeyPlane::FIELDS > 1 && KeyPlane::STEPS <= 4;
    static constexpr int LOW_WORDS = KeyPlane::LOW_ROW / 4;
    uint4 words[HELD ? UNITS : 1][HELD ? KeyPlane::STEPS : 1];  // tokens 4g .. 4g + 3
    const unsigned char *base, *low_base;
    int c;

    DEVICE Keys(const unsigned char* slot, int offset, int tile, int g, int c)
        : base(slot + offset + (2 * tile * UNITS + g / 4) * KeyPlane::WORDS * 64 + g % 4 * 16),
          low_base(slot + KeyPlane::LOW_OFFSET + (2 * tile * UNITS + g / 4) * LOW_WORDS * 64 + g % 4 * 16), c(c) {
#pragma unroll
        for (int u = 0; u < UNITS && HELD; ++u)
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) words[u][i] = load(u, i);
    }
    DEVICE int word_of(int i) const {
        return 4 * i + 3 < KeyPlane::WORDS ? 4 * i + c : min(4 * i + c, KeyPlane::WORDS - 1);
    }
    DEVICE uint4 load(int u, int i) const {
        return *reinterpret_cast<const uint4*>(base + (2 * u * KeyPlane::WORDS + word_of(i)) * 64);
    }
    /// Whether step i's bytes are in the row's second half.
    DEVICE int second(int i) const { return LOW_WORDS % 4 ? word_of(i) >= LOW_WORDS : 4 * i >= LOW_WORDS; }
    DEVICE uint4 load_low(int u, int i) const {
        if (!KeyPlane::JOINED) return {0, 0, 0, 0};
        return *reinterpret_cast<const uint4*>(low_base +
                                               (2 * u * LOW_WORDS + word_of(i) - second(i) * LOW_WORDS) * 64);
    }
    /// acc = start (first plane) or acc, plus the group's products.
    template <bool FIRST>
    DEVICE void multiply(float (&acc)[UNITS][2][NT][4], const float (&start)[NT][4], const Query<KeyPlane>& query,
                         int group) const {
        bool first = FIRST;
#pragma unroll
        for (int f = 0; f < KeyPlane::FIELDS; ++f)
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) {
                if (!Query<KeyPlane>::used(f, i) || Query<KeyPlane>::group_of(f, i) != group) continue;
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    const uint4 w = HELD ? words[HELD ? u : 0][HELD ? i : 0] : load(u, i);
                    two_rows(acc[u][0], start, first, {w.x}, {w.y}, query, f, i);
                    two_rows(acc[u][1], start, first, {w.z}, {w.w}, query, f, i);
                }
                first = false;
            }
    }
    /// The same for all groups, of joined planes: a word is joined once for all fields, which are of several groups.
    DEVICE void multiply_joined(float (&acc)[K_GROUPS][UNITS][2][NT][4], const float (&start)[K_GROUPS][NT][4],
                                const Query<KeyPlane>& query) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            bool first[K_GROUPS];
            for (int gr = 0; gr < K_GROUPS; ++gr) first[gr] = true;
#pragma unroll
            for (int i = 0; i < KeyPlane::STEPS; ++i) {
                const uint4 w = HELD ? words[HELD ? u : 0][HELD ? i : 0] : load(u, i), low = load_low(u, i);
                const int of = second(i);
                const Row x(w.x, low.x, of), y(w.y, low.y, of), z(w.z, low.z, of), w3(w.w, low.w, of);
#pragma unroll
                for (int f = 0; f < KeyPlane::FIELDS; ++f) {
                    if (!Query<KeyPlane>::used(f, i)) continue;
                    const int gr = Query<KeyPlane>::group_of(f, i);
                    two_rows(acc[gr][u][0], start[gr], first[gr], x, y, query, f, i);
                    two_rows(acc[gr][u][1], start[gr], first[gr], z, w3, query, f, i);
                    first[gr] = false;
                }
            }
        }
    }
    using Row = Fields<KeyPlane, K_FLOAT>;
    static DEVICE void two_rows(float (&acc)[NT][4], const float (&start)[NT][4], bool first, const Row& row,
                                const Row& row8, const Query<KeyPlane>& query, int f, int i) {
        u32 a0 = row.operand(0, f), a1 = row8.operand(0, f), a2 = row.operand(1, f), a3 = row8.operand(1, f);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint2 b = query.operand(n, f * KeyPlane::STEPS + i);
            if (first) mma_f16(acc[n], a0, a1, a2, a3, b.x, b.y, start[n][0], start[n][1], start[n][2], start[n][3]);
            else mma_f16(acc[n], a0, a1, a2, a3, b.x, b.y);
        }
    }
};

/// sum over channels of q times `vector`, for the lane's columns 2c, 2c + 1 (+ 8).
DEVICE void dot_columns(float (&result)[NT][2], const Staged& staged, const float* vector, const float* scale, int g,
                        int c) {
    for (int n = 0; n < NT; ++n) {
        float sum = 0.f;
#pragma unroll 1
        for (int ch = c; ch < D; ch += 4) sum += staged.q[OWN_START ? 0 : n * 8 + g][ch] / scale[ch] * vector[ch];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        for (int e = 0; e < 2; ++e) result[n][e] = __shfl_sync(ALL_LANES, sum, (2 * c + e) * 4);
    }
}

/// What keys are multiplied with: queries by plane, and what scores start from for them.
struct KeyOperands {
    Query<KeyTraits::First> first;
    Query<KeyTraits::Second> second;
    float start_sum[K_GROUPS][NT][4];  // what scores start from: minus the zero point times the sum of q

    /// The sums, if the queries are not yet to be scaled by each page.
    DEVICE void start_sums(bool known) {
        times_constant(start_sum, known ? K_ZERO : 0);
        negate(start_sum);
    }
    static DEVICE void negate(float (&sum)[K_GROUPS][NT][4]) {
        for (int gr = 0; gr < K_GROUPS; ++gr)
            for (int n = 0; n < NT; ++n)
                for (int r = 0; r < 4; ++r) sum[gr][n][r] = -sum[gr][n][r];
    }
    /// sum over a group's channels of q times a code that all of them have.
    DEVICE void times_constant(float (&sum)[K_GROUPS][NT][4], u32 code) const {
        for (int gr = 0; gr < K_GROUPS; ++gr)
            for (int n = 0; n < NT; ++n)
                for (int r = 0; r < 4; ++r) sum[gr][n][r] = 0.f;
        if (code == 0) return;
        first.times_constant(sum, code);
        second.times_constant(sum, code);
    }
    /// `of` times a page's channel scales times `multiplier`.
    DEVICE void scale(const KeyOperands& of, const unsigned char* section, float multiplier, int c) {
        first.scale(of.first, section, multiplier, c);
        second.scale(of.second, section, multiplier, c);
        start_sums(true);
    }
};

/// What the scores of a page's tokens are made of.
struct PageKeys {
    const KeyOperands& operands;
    float factor;                      // accumulated score -> exponent of 2 (or, with a softcap, argument of tanh)
    const float (&constant)[NT][2];    // added to every score
};

struct KeySide {
    /// Operands of keys are made by each warp where its segment starts, by no other.
    struct Shared { DEVICE void set_up() {} };
    static constexpr int MAKING = 0;
    static DEVICE void make(const Args&, Shared&, int, int) {}
    using First = KeyTraits::First;
    using Second = KeyTraits::Second;
    KeyOperands operands;
    float factor;                      // as PageKeys::factor
    float real_factor;                 // the same for q times real numbers
    float constant[NT][2];             // added to every score: q times a static bias
    float one_sum[K_GROUPS][NT][4];    // sum of q, for biases

    DEVICE void start(const Args& a, Staged& staged, Unit u, const Part& part, int g, int c) {
        const QueryRows rows(a, staged, u, g);
        float m = __uint_as_float(rows.largest(c));
        int shift = m > 1e-30f ? 13 - exponent_of(m) : 0;  // the largest |q| comes just under 2**14
        operands.first.start(staged, rows, power_of_two(shift), c);
        operands.second.start(staged, rows, power_of_two(shift), c);
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
        operands.start_sums(!KeyTraits::SCALES_QUERY);
        operands.times_constant(one_sum, KeyTraits::BIAS_BY_TOKEN ? 1 : 0);
    }

    DEVICE void enter(Shared&, const Segment&, int) {}
    DEVICE void leave(const Segment&, int, int) {}

    /// f(what scores of the chunk's page are made of).
    template <class F>
    DEVICE void with_page(const Args&, const Chunk& chunk, int lane, F f) const {
        const unsigned char* const slot = chunk.slot;
        float sum[NT][2];
        page_constant(sum, slot, lane % 4);
        if (KeyTraits::SCALES_QUERY) {
            KeyOperands scaled;
            const float times = page_operands(scaled, slot, lane);
            f(PageKeys{scaled, times, sum});
        } else {
            f(PageKeys{operands, factor, sum});
        }
    }
    /// What every score of the page in `slot` has added.
    DEVICE void page_constant(float (&sum)[NT][2], const unsigned char* slot, int c) const {
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) sum[n][e] = constant[n][e];
        if (K_HAS_MEAN) add_channel_vector(sum, slot + K_MEAN_OFFSET, c);
        if (KeyTraits::SCALES_QUERY && K_HAS_BIAS) add_channel_vector(sum, slot + K_BIAS_OFFSET, c);
    }
    /// Queries times the page's channel scales, brought to at most 1 by a power of two; returns the factor of their
    /// scores.
    DEVICE float page_operands(KeyOperands& scaled, const unsigned char* slot, int lane) const {
        const int e = channel_exponent(slot + K_SCALE_OFFSET, lane);
        scaled.scale(operands, slot + K_SCALE_OFFSET, power_of_two(-e), lane % 4);
        return factor * power_of_two(e);
    }

    /// Exponents relative to the softmax reference, or with a softcap the arguments of tanh.
    DEVICE void scores(float (&s)[TOKENS][NT][2], const Softmax& softmax, const unsigned char* slot, int t,
                       const PageKeys& page, int g, int c) const {
        const KeyOperands& keys = page.operands;
        const Keys<First> words0(slot, First::OFFSET, t, g, c);
        const Keys<Second> words1(slot, Second::OFFSET, t, g, c);
        float sums[K_GROUPS][UNITS][2][NT][4];
        if (First::JOINED) words0.multiply_joined(sums, keys.start_sum, keys.first);
#pragma unroll
        for (int gr = 0; gr < K_GROUPS; ++gr) {
            float (&acc)[UNITS][2][NT][4] = sums[gr];
            if (!First::JOINED) words0.template multiply<true>(acc, keys.start_sum[gr], keys.first, gr);
            words1.template multiply<false>(acc, keys.start_sum[gr], keys.second, gr);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                float scale[4] = {page.factor, page.factor, page.factor, page.factor}, bias[4] = {};
                int index = gr * CHUNK + (t * UNITS + u) * 32 + 4 * g;
                if (K_SCALE == SCALE_GROUP) {
                    load_scales4<K_SCALE_TYPE>(scale, slot + K_SCALE_OFFSET, index);
                    for (int j = 0; j < 4; ++j) scale[j] *= page.factor;
                    if (K_HAS_BIAS) load_scales4<K_SCALE_TYPE>(bias, slot + K_BIAS_OFFSET, index);
                }
                for (int j = 0; j < 4; ++j)
                    for (int n = 0; n < NT; ++n)
                        for (int e = 0; e < 2; ++e) {
                            float base = gr        ? s[4 * u + j][n][e]
                                         : SOFTCAP ? page.constant[n][e]
                                                   : page.constant[n][e] - softmax.reference[n][e];
                            if (KeyTraits::BIAS_BY_TOKEN) base += bias[j] * page.factor * one_sum[gr][n][e];
                            s[4 * u + j][n][e] = acc[u][j / 2][n][j % 2 * 2 + e] * scale[j] + base;
                        }
            }
        }
    }

    /// sum over channels of q times a stored channel vector (a bias or a mean), added to `page_constant`.
    DEVICE void add_channel_vector(float (&page_constant)[NT][2], const unsigned char* section, int c) const {
        constexpr int TOP_FIELD = First::exponent(First::FIELDS - 1);
        float acc[NT][4] = {};
#pragma unroll
        for (int f = 0; f < First::FIELDS; ++f)
#pragma unroll
            for (int i = 0; i < First::STEPS; ++i) {
                if (!Query<First>::used(f, i)) continue;
                // q carries 2**-exponent; undo it here, scaled down by the top field's factor so that nothing overflows
                // float16.
                const float undo = power_of_two(First::exponent(f) - TOP_FIELD);
                u32 a0, a2;
                load_channels(a0, a2, section, f, i, undo, c);
                for (int n = 0; n < NT; ++n) {
                    const uint2 b = operands.first.operand(n, f * First::STEPS + i);
                    mma_f16(acc[n], a0, a0, a2, a2, b.x, b.y);
                }
            }
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e) page_constant[n][e] += acc[n][e] * (real_factor * power_of_two(TOP_FIELD));
    }
    /// Channels 0, 2 and 1, 3 of a lane's four, times a power of two; 0 past the row.
    static DEVICE void load_channels(u32& even, u32& odd, const unsigned char* section, int f, int i, float times,
                                     int c) {
        const int r = 16 * i + 4 * c, ch = f * First::ROW + r;
        const bool inside = r < First::ROW && ch < D;
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

    /// Exponent of a power of two that no scale of the page exceeds.
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
};
