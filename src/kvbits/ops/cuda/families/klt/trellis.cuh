// Which trellis codes a ring of numbers is stored as (quant/trellis.py): the path of least cost, the first of equals.
//
// A path is a ring's lowest bits b(0) .. b(15). Viterbi's algorithm runs from all four first states, 2 b(14) + b(15),
// at once: 16 words, for each first state and state the least cost and, in the low 14 bits, b(0) .. b(13) of the path
// that has it. So a minimum of two words is that of their costs and paths together, and nothing is kept to be traced
// back. The two paths that meet in a state at place t differ in b(t-2), the highest bit that they have in a word: the
// lower word is also the one that the reference takes of equal costs.
//
// Numbers are counted in 16ths of a unit, a unit being 1/64 of a scale. A cost is the square of a distance. Costs of a
// number's cosets then differ by multiples of 2**14, since levels are 32 units apart or odd multiples of 16. What is
// left in the low bits is the same for all cosets, and is taken off at the end. Where a number lies past the levels,
// the square of how far is taken off, too: sums stay below 2**32.
#pragma once
#include "numbers.h"
#include "ptx.cuh"

constexpr int STATES = 4, RUNS = 4;     // a ring is four runs of four neighbouring channels
constexpr int HISTORY = RING - 2;       // bits of a path that its first state does not have
constexpr u32 HISTORY_MASK = (1u << HISTORY) - 1;
constexpr int PARTS = 16;               // of a unit

/// x in units, plus FARTHEST. inverse: UNIT over the scale.
DEVICE u32 units_of(float x, float inverse) {
    return u32(add_clamped(round_to_int(__fmul_rn(x, inverse)), FARTHEST, 2 * FARTHEST));
}
/// A code of 8 bits, which is in no ring: the nearest of levels a scale apart, the lower one of two.
DEVICE u32 code_of_8_bits(u32 units) { return u32(add_clamped(int(units), -1, 256 * UNIT - 1)) / UNIT; }

/// Levels half a scale apart: of WIDTH bits, or with 0 of as many as a ring says.
template <int WIDTH>
struct UniformLevels {
    static constexpr int STEP = PARTS * UNIT / 2, COSET_STEP = STATES * STEP, COSET_SHIFT = 9;
    // What a number is nearest to ends half of a coset's step above a level, and is taken of the lower one of two. As
    // many parts are taken off all numbers as `code` would have to add for the last coset.
    static constexpr int UP_TO = COSET_STEP / 2 - PARTS, LESS = 3 * STEP - UP_TO;
    int end;                            // of the last level's step, from the first level on

    DEVICE explicit UniformLevels(int width) : end((2 << (WIDTH ? WIDTH : width)) * STEP) {}
    /// Parts from the first level on, less LESS.
    DEVICE int place(u32 units) const { return int(units) * PARTS + ((end - STEP) / 2 - PARTS * FARTHEST - LESS); }
    /// The distance from each coset's nearest level, and from the range of levels.
    DEVICE int distances(int at, int (&away)[STATES]) const {
#pragma unroll
        for (int q = 0; q < STATES; ++q)
            away[q] = WIDTH == 0 || WIDTH > 4 ? from_lower(at, q) : from_middle(at, q);
        return at + LESS - add_clamped(at, LESS, end - STEP);
    }
    /// The code of the coset's nearest level with the lowest bit of `low`. complement: 3 - coset, up by COSET_SHIFT.
    DEVICE u32 code(int at, u32 complement, u32 low) const {
        return select_bits(1, low, u32(add_clamped(at, int(complement), end - 1)) / (COSET_STEP / 2));
    }

  private:
    DEVICE int from_lower(int at, int q) const {
        return at + (LESS - q * STEP) - (add_clamped(at, LESS + UP_TO - q * STEP, end - 1) & ~(COSET_STEP - 1));
    }
    /// Levels lie to both sides of their middle, and half of them to both sides of theirs.
    DEVICE int from_middle(int at, int q) const {
        constexpr int ALL = COSET_STEP << WIDTH >> 1;
        if (WIDTH == 1) return at + (LESS - q * STEP);
        int away = distance(at, q * STEP - LESS + (ALL - COSET_STEP) / 2, -ALL / 4);
#pragma unroll
        for (int half = ALL / 8; half >= COSET_STEP / 2; half /= 2) away = distance(away, 0, -half);
        return away;
    }
};

/// 1, 3, 5 and 9 quarters of a scale to both sides: two levels of each coset.
struct FittedLevels {
    static constexpr int QUARTER = PARTS * UNIT / 4, COSET_SHIFT = 4;

    DEVICE explicit FittedLevels(int) {}
    DEVICE int place(u32 units) const { return int(units) * PARTS - PARTS * FARTHEST; }
    DEVICE int distances(int at, int (&away)[STATES]) const {
        constexpr int MIDDLE[] = {-4, -1, 1, 4}, HALF[] = {5, 4, 4, 5};  // quarters
#pragma unroll
        for (int q = 0; q < STATES; ++q) away[q] = distance(at, MIDDLE[q] * QUARTER, -HALF[q] * QUARTER);
        return max(distance(at, 0, -9 * QUARTER), 0);
    }
    DEVICE u32 code(int at, u32 complement, u32 low) const {
        static_assert(QUARTER == 256, "middles, plus 4, are the second byte");
        const u32 middle = permute_bytes(0x00030508, 0, complement | 0x4404);
        return select_bits(1, low, u32(int(middle) - 4 * QUARTER - at) >> 30);
    }
};

/// Every second bit of a word, from 16.
DEVICE u32 spread_bits(u32 x) {
    x = (x | x << 8) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    x = (x | x << 2) & 0x33333333u;
    return (x | x << 1) & 0x55555555u;
}

/// Costs of a number in each coset, and the same plus `bit`.
template <class Levels>
DEVICE void costs_of(const Levels& levels, int at, u32 bit, u32 (&cost)[STATES], u32 (&with_bit)[STATES]) {
    int away[STATES];
    const int past = levels.distances(at, away);
    const u32 less = multiply_add(-past, past, 0), less_and_bit = less + bit;
#pragma unroll
    for (int q = 0; q < STATES; ++q) {
        cost[q] = multiply_add(away[q], away[q], less);
        // once more a product, since the pipe that compares has more to do than that of products
        with_bit[q] = multiply_add(away[q], away[q], less_and_bit);
    }
}

/// The codes of a ring, four bytes for each run. numbers: `units_of`, two for each word, run by run.
/// BY_BYTES: the ring goes through its runs byte by byte, as that of keys; else run by run, as that of values.
template <bool BY_BYTES, class Levels>
DEVICE void ring_codes(const u32 (&numbers)[RING / 2], const Levels& levels, u32 (&codes)[RUNS]) {
    int at[RING];
#pragma unroll
    for (int t = 0; t < RING; ++t) {
        const int run = BY_BYTES ? t % RUNS : t / 4, n = BY_BYTES ? t / RUNS : t % 4;
        const u32 pair = numbers[run * 2 + n / 2];
        at[t] = levels.place(n % 2 ? pair >> 16 : pair & 0xffff);
    }
    // of paths with b(t-2)
    u32 least[STATES][STATES], begin[STATES], cost[STATES], with_bit[STATES];
    costs_of(levels, at[0], 0, begin, with_bit);
    costs_of(levels, at[1], 0, cost, with_bit);
    u32 rest = begin[0] + cost[0];      // what costs leave in the low bits
#pragma unroll
    for (int f = 0; f < STATES; ++f)
#pragma unroll
        for (int s = 0; s < STATES; ++s)
            least[f][s] = begin[(s >> 1 ^ f >> 1) * 2 + (f & 1)] + cost[((s ^ f) & 1) * 2 + (s >> 1)];
#pragma unroll
    for (int t = 2; t < RING; ++t) {
        costs_of(levels, at[t], 1u << (t - 2), cost, with_bit);
        rest += cost[0];
#pragma unroll
        for (int f = 0; f < STATES; ++f) {
            u32 next[STATES];
#pragma unroll
            for (int s = 0; s < STATES; ++s) {
                // the ring ends in its first state
                if ((t == RING - 2 && (s & 1) != f >> 1) || (t == RING - 1 && s != f)) continue;
                const int before = s >> 1, q = (s & 1) * 2 + before;
                next[s] = min(least[f][before] + cost[q], least[f][before + 2] + with_bit[q ^ 2]);
            }
#pragma unroll
            for (int s = 0; s < STATES; ++s)
                if (!((t == RING - 2 && (s & 1) != f >> 1) || (t == RING - 1 && s != f))) least[f][s] = next[s];
        }
    }
    rest &= HISTORY_MASK;
    u32 best = least[0][0] - rest, state = 0;
#pragma unroll
    for (u32 f = 1; f < STATES; ++f) {
        const u32 other = least[f][f] - rest;
        const bool less = other >> HISTORY < best >> HISTORY;
        best = less ? other : best, state = less ? f : state;
    }
    const u32 low = (best & HISTORY_MASK) | (state >> 1 | (state & 1) << 1) << HISTORY;
    const u32 one = low << 1 | low >> (RING - 1), two = low << 2 | low >> (RING - 2);
    // 3 - the coset of each place
    const u32 complements = spread_bits(~one & 0xffff) | spread_bits(~(low ^ two) & 0xffff) << 1;
#pragma unroll
    for (int i = 0; i < RUNS; ++i) codes[i] = 0;
#pragma unroll
    for (int t = 0; t < RING; ++t) {
        const int run = BY_BYTES ? t % RUNS : t / 4, n = BY_BYTES ? t / RUNS : t % 4, up = Levels::COSET_SHIFT - 2 * t;
        const u32 complement = (up < 0 ? complements >> -up : complements << up) & 3u << Levels::COSET_SHIFT;
        codes[run] |= levels.code(at[t], complement, low >> t) << 8 * n;
    }
}
