// One warp's walk over packed chunks: 32 or 64 tokens per step, scores, softmax, outputs. KeySide: of packed_keys.cuh,
// or a family's own.
#ifndef PACKED_WALK_CUH
#define PACKED_WALK_CUH
#include "columns.cuh"
#include "packed_values.cuh"

template <class KeySide>
struct PackedWalk {
    using Keys = KeySide;
    static constexpr bool FOLDS = false;  // lanes c and c + 2 have parts of the same columns
    KeySide keys;
    ValueSide values;

    DEVICE void start(const Args& a, Staged& staged, Unit u, const Part& part, int g, int c) {
        keys.start(a, staged, u, part, g, c);
        values.clear();
    }

    /// MASKED: some tokens may be hidden from some column.
    template <bool MASKED>
    DEVICE void add(const Args& a, const Visible& see, Softmax& softmax, const Chunk& chunk, int lane) {
        values.start_chunk();
        keys.with_page(a, chunk, lane, [&](const auto& page) { steps<MASKED>(a, see, softmax, chunk, page, lane); });
        values.finish_chunk(chunk.slot, lane / 4);
    }

    template <bool MASKED, class PageKeys>
    DEVICE void steps(const Args& a, const Visible& see, Softmax& softmax, const Chunk& chunk, const PageKeys& page,
                      int lane) {
#pragma unroll 1
        for (int t = 0; t < CHUNK / (32 * UNITS); ++t)
            step<MASKED>(a, see, softmax, chunk, t, page, lane / 4, lane % 4);
    }
    template <bool MASKED, class PageKeys>
    DEVICE void step(const Args& a, const Visible& see, Softmax& softmax, const Chunk& chunk, int t,
                     const PageKeys& page, int g, int c) {
        float s[TOKENS][NT][2];  // token 4u + j is the lane's j-th of unit u
        keys.scores(s, softmax, chunk.slot, t, page, g, c);
        if (SOFTCAP)
            for (int u = 0; u < UNITS; ++u)
                for (int j = 0; j < 4; ++j)
                    for (int n = 0; n < NT; ++n)
                        for (int e = 0; e < 2; ++e)
                            s[4 * u + j][n][e] =
                                tanh_approx(s[4 * u + j][n][e]) * (a.softcap * LOG2E) - softmax.reference[n][e];
        if (MASKED)
            for (int u = 0; u < UNITS; ++u)
                for (int j = 0; j < 4; ++j) {
                    int token = (t * UNITS + u) * 32 + 4 * g + j;
                    for (int n = 0; n < NT; ++n)
                        for (int e = 0; e < 2; ++e)
                            if (token >= chunk.visible ||
                                see.hides(a.window, n * 8 + 2 * c + e, chunk.position + token))
                                s[4 * u + j][n][e] = negative_infinity();
                }
        u32 pairs[ValueTraits::WEIGHTS][UNITS][4];
        u32 largest = values.scales<MASKED>(pairs, chunk.slot, t, chunk.visible, c);
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
            values.rescale(multiplier);
            weigh<TOKENS>(p, packed, s, pack_f16);
        }
        for (int n = 0; n < NT; ++n)
            for (int e = 0; e < 2; ++e)
                for (int i = 0; i < TOKENS; ++i) softmax.sum[n][e] += p[i][n][e];
        values.add<MASKED>(packed, pairs, chunk.slot, t, chunk.visible, g, c);
    }
};
#endif
