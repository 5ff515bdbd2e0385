// The planes of trellis keys of a format, as warps read them and as those that make queries (banded_frames.cuh) write
// their operands.
#ifndef BANDED_QUERIES_CUH
#define BANDED_QUERIES_CUH
#include "banded_frames.cuh"

/// Which bands of a head's keys have which planes.
struct Bands {
    static constexpr u64 WIDTHS = u64(K_WIDTHS_LOW) | u64(K_WIDTHS_HIGH) << 32;  // four bits each
    static constexpr int COUNT = D / BAND;

    static constexpr int width(int band) { return int(WIDTHS >> 4 * band & 15); }
    static constexpr int with(int bits) {
        int n = 0;
        for (int i = 0; i < COUNT; ++i) n += (width(i) & bits) != 0;
        return n;
    }
    /// What a band's numbers are times at most, in halves of a scale; 0 if it has no planes.
    static constexpr int highest(int band) {
        const int w = width(band), top = w & 8 ? 8 : w & 4 ? 4 : w & 2 ? 2 : w;
        return w == 0 ? 0 : w == 8 || w > top ? 2 << (w - top) : 1;
    }
    static constexpr u64 highest_list() {
        u64 all = 0;
        for (int i = 0; i < COUNT; ++i) all |= u64(highest(i)) << 4 * i;
        return all;
    }
    /// Four bits each: the bands that have a plane.
    static constexpr u64 list(int bits) {
        u64 all = 0;
        for (int i = 0, n = 0; i < COUNT; ++i)
            if (width(i) & bits) all |= u64(i) << 4 * n++;
        return all;
    }
};

/// A plane of keys. A step is 16 channels: of each lane c those of one field of a word's four bytes. Words of a row are
/// taken four at a time, one by each lane; of two that are left two lanes take the same word, and of one all four: each
/// of them other fields.
///
/// Where a word of a load has lowest bits of codes, words are joined (banded_rings.cuh): their fields are indices, of which
/// the field is all but the lowest bit.
template <int BITS_>
struct BandPlane {
    static constexpr int BITS = BITS_, CHANNELS = BAND * Bands::with(BITS), FIELDS = 8 / BITS;
    static constexpr int OFFSET = BITS == 8   ? K_PLANE8_OFFSET
                                  : BITS == 4 ? K_PLANE4_OFFSET
                                  : BITS == 2 ? K_PLANE2_OFFSET
                                              : K_PLANE1_OFFSET;
    static constexpr int ROW = (CHANNELS * BITS + 31) / 32 * 4, WORDS = ROW / 4;  // of one token
    static constexpr int LOADS = WORDS / 4 + WORDS % 4 / 2 + WORDS % 2;
    static_assert(D % BAND == 0 && FIELDS * (WORDS % 2) % 4 == 0, "whole bands fill whole words");

    static constexpr int words(int load) { return load < WORDS / 4 ? 4 : load == WORDS / 4 && WORDS % 4 >= 2 ? 2 : 1; }
    static constexpr int first_word(int load) { return load <= WORDS / 4 ? 4 * load : WORDS / 4 * 4 + 2; }
    /// Steps of a load, and of those before it.
    static constexpr int steps(int load) { return FIELDS * words(load) / 4; }
    static constexpr int steps_before(int load) {
        return load <= WORDS / 4 ? FIELDS * load : FIELDS * (WORDS / 4) + FIELDS / 2;
    }
    static constexpr int STEPS = CHANNELS ? steps_before(LOADS - 1) + steps(LOADS - 1) : 0;
    /// Where a lane's word of a load is, and the first of its fields.
    static DEVICE int word(int load, int c) { return first_word(load) + c % words(load); }
    static DEVICE int first_field(int load, int c) { return c / words(load) * steps(load); }
    /// The first channel of a word's field among the plane's.
    static DEVICE int channel(int word, int field) { return word * (32 / BITS) + 4 * field; }

    /// One bit for each word: those with lowest bits of codes.
    static constexpr u32 lowest_list() {
        u32 all = 0;
        for (int w = 0; w < WORDS && BITS < 8; ++w)
            if ((Bands::width(int(Bands::list(BITS) >> w * (32 / BITS) / BAND * 4 & 15)) & (BITS - 1)) == 0)
                all |= 1u << w;
        return all;
    }
    static constexpr u32 of_load(int load) { return (1u << words(load)) - 1 << first_word(load); }
    /// Whether any word of a load has lowest bits, whether all have, and whether each lane takes but one field.
    static constexpr bool joined(int load) { return lowest_list() & of_load(load); }
    static constexpr bool all_lowest(int load) { return (lowest_list() & of_load(load)) == of_load(load); }
    static constexpr bool alone(int load) { return joined(load) && steps(load) == 1; }

    /// A step's operands: what lies in a word from bit `lane_bit` + `bit` on, times a power of two.
    static DEVICE int lane_bit(int load, int c) {
        const int first = first_field(load, c);
        return !joined(load) ? BITS * first : BITS == 4 || alone(load) ? 0 : BITS == 2 ? first / 2 * 4 : first;
    }
    static constexpr int bit(int load, int j) {
        return !joined(load) ? BITS * j : BITS == 4 ? 0 : BITS == 2 ? j / 2 * 4 : j / 2 * 2;
    }
    static constexpr u32 mask(int load) { return (1u << BITS + joined(load)) - 1; }
    /// As bytes, fields that are not joined move down to the lane's first one, and further by whole fours of bits: they
    /// are times 2**(bit % 4), and the queries' numbers lose few of their bits. Joined fields stay where they are:
    /// to move them would take an instruction a word. Numbers lose 4 bits at most to 2-bit planes, 6 to 1-bit ones.
    static constexpr bool moves(int load) { return BYTES && !joined(load); }
    static DEVICE int exponent(int load, int j, int c) {
        return moves(load) ? bit(load, j) % 4 : lane_bit(load, c) + bit(load, j);
    }
    // that its bytes sum up to
    static constexpr int MOST = CHANNELS * (BITS == 8 ? 255 : BITS == 4 ? 31 : 64);
};
static_assert(KEY_STEPS == BandPlane<8>::STEPS + BandPlane<4>::STEPS + BandPlane<2>::STEPS + BandPlane<1>::STEPS,
              "family.py counts other steps");

/// What makers of queries ask of a format.
struct KeyFormat {
    static constexpr int NUMBER = FORMAT, STEPS = KEY_STEPS;
    static constexpr u64 WIDTHS = Bands::WIDTHS, HIGHEST = Bands::highest_list();

    static DEVICE void place(Steps& steps, int maker, int c) {
        plane<8>(steps, 0, maker, c);
        plane<4>(steps, BandPlane<8>::STEPS, maker, c);
        plane<2>(steps, BandPlane<8>::STEPS + BandPlane<4>::STEPS, maker, c);
        plane<1>(steps, KEY_STEPS - BandPlane<1>::STEPS, maker, c);
    }
    template <int BITS>
    static DEVICE void plane(Steps& steps, int first_step, int maker, int c) {
        using P = BandPlane<BITS>;
        constexpr u64 LIST = Bands::list(BITS);
#pragma unroll
        for (int load = 0; load < P::LOADS; ++load)
#pragma unroll
            for (int j = 0; j < P::steps(load); ++j) {
                const int step = first_step + P::steps_before(load) + j;
                if (step % MAKERS != maker) continue;
                const int field = P::first_field(load, c) + j, channel = P::channel(P::word(load, c), field);
                const int band = int(LIST >> (channel / BAND * 4 & 63)) & 15,
                          shift = int(Bands::WIDTHS >> 4 * band & (BITS - 1));
                steps.place[step / MAKERS] = FrameTile::place((band * BAND + channel % BAND) / 2);
                // joined fields have a bit more
                steps.factor[step / MAKERS] = channel < P::CHANNELS
                                            ? power_of_two(shift - P::exponent(load, j, c) + !P::joined(load))
                                            : 0.f;
            }
    }
};
#endif
