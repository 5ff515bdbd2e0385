// Attention over pages of two formats of trellis codes: a sequence's older tokens, and copies of newer ones in finer
// codes. Both have the block's ring, its makers of queries and its softmax. What reads a page is compiled for each
// format, in a namespace of its own; OLDER_FORMAT and NEWER_FORMAT define the format's constants there.
//
// A unit's newer pages come after its older ones. Outputs of older pages then become those of the newer format, which
// are other powers of two, and the walk goes on: nothing is merged in between, and nobody waits.
#include "banded_frames.cuh"
#include "packed_ring.cuh"
#include "raw_walk.cuh"

namespace older {
OLDER_FORMAT
#include "banded_walk.cuh"
#include "packed_attend.cuh"
}
#include "banded_again.cuh"
namespace newer {
NEWER_FORMAT
#include "banded_walk.cuh"
#include "packed_attend.cuh"
}

/// Outputs of older pages as those of newer ones. Channels of a row in 32s are in the same places; narrower rows have
/// channels of several fields side by side.
template <class From, class To>
DEVICE void take_outputs(newer::Values<To>& to, const older::Values<From>& from) {
    constexpr bool ALIKE = From::ROW == To::ROW || (From::ROW % 32 == 0 && To::ROW % 32 == 0);
    constexpr int WIDTH = From::ROW < 32 ? From::ROW : 32;  // channels that lie side by side
    const auto old = [&](int channel, int n, int half, int r) {
        const int field = channel / From::ROW;
        return from.o[n][field][channel % From::ROW / 32][half][r] *
               power_of_two(older::ValueTraits::EXPONENT - From::exponent(field));
    };
    const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int field = 0; field < To::FIELDS; ++field)
#pragma unroll
            for (int pair = 0; pair < To::PAIRS; ++pair)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int first = field * To::ROW + 32 * pair;
                        const float unit = power_of_two(To::exponent(field) - newer::ValueTraits::EXPONENT);
                        float x;
                        if (ALIKE) {
                            x = old(first, n, half, r);
                        } else {
                            const int channel = first + 4 * g, end = min(To::ROW, 32);
                            x = 0.f;
#pragma unroll
                            for (int at = first / WIDTH * WIDTH; at < first + end; at += WIDTH) {
                                const float y = __shfl_sync(ALL_LANES, old(at, n, half, r),
                                                            ((channel - at) / 4 & 7) * 4 + lane % 4);
                                if (channel >= at && channel < at + WIDTH) x = y;
                            }
                        }
                        to.o[n][field][pair][half][r] = x * unit;
                    }
}

using OlderWalk = older::BandedWalk<BYTES>::Walk;
using NewerWalk = newer::BandedWalk<BYTES>::Walk;
static_assert(newer::ValueTraits::RAW_JOINS == older::ValueTraits::RAW_JOINS && OlderWalk::FOLDS == NewerWalk::FOLDS,
              "family.py has others read by kernels of their own");

DEVICE int walk_two(const Args& a, const Part& part, Unit u, Ring& ring, const unsigned char* slots, Merge& merge,
                    FrameRing& made, int warp, int lane) {
    const Segment& s = merge.segments[Merge::own(warp)];
    Staged& staged = merge.staged[Merge::own(warp)];
    stage_queries(staged, a, u, nullptr, warp * 32 + lane);
    const Visible see(staged, a.window, lane);
    Softmax softmax;
    softmax.clear();
    NewerWalk walk;
    walk.start(a, staged, u, part, lane / 4, lane % 4);
    if (!part.raw && part.format == older::KeyFormat::NUMBER) {
        OlderWalk old;
        old.start(a, staged, u, part, lane / 4, lane % 4);
        older::read_parts<older::KeyFormat::NUMBER>(a, u, s, old, see, softmax, ring, slots, merge, made, warp, lane);
        take_outputs(walk.values.first, old.values.first);
    }
    newer::read_parts<newer::KeyFormat::NUMBER>(a, u, s, walk, see, softmax, ring, slots, merge, made, warp, lane);
    return newer::end_parts(a, part, u, s, walk, staged, see, softmax, ring, slots, merge, warp, lane);
}

extern "C" __global__ void __launch_bounds__((WARPS + 1 + MAKERS) * 32, 1) attend(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    newer::attend_parts<FrameRing, MAKERS>(
        a, shared,
        [&](FrameRing& made, int maker, int lane) {
            make_queries<older::KeyFormat, newer::KeyFormat>(a, made, maker, lane);
        },
        [&](const Part& part, Unit u, Ring& ring, Merge& merge, FrameRing& made, int warp, int lane) {
            return walk_two(a, part, u, ring, shared, merge, made, warp, lane);
        });
}
