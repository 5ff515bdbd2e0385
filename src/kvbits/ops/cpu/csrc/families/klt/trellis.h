// Trellis codes of rings, one ring in each lane (src/kvbits/quant/trellis.py has the definition).
//
// A sum of Viterbi's algorithm is the path's cost times 2^HISTORY plus the lowest bits that the path has chosen, later
// channels above earlier ones. So the lesser of two sums is the path of less cost and, of equal costs, the one whose
// state before is the lower. No choice is kept beside the sums, and nothing walks back.
//
// Costs are differences from coset 0 in 64ths of squared units: each difference of squares is a multiple of 64.
#pragma once
#include <stdint.h>

#include "engine/vec/vec.h"
#include "kvbits_cpu.h"

namespace {

constexpr int HISTORY = RING - 2;  // the last two bits are the state that a path begins and ends with
constexpr int COST_LIMIT = (1 << (31 - HISTORY)) - 1;  // that a sum in 32 bits holds
constexpr int COSETS = 4;

// Sums are vectors of 32 bits, or single numbers of 64 where costs could pass the limit.
template <class V>
INLINE V least(V a, V b) {
  return a < b ? a : b;
}
template <class V>
INLINE V greatest(V a, V b) {
  return a > b ? a : b;
}
template <class V>
INLINE V constant(int x) {
  if constexpr (sizeof(V) == sizeof(int64_t)) return x;
  else return splat_int(x);
}

// Levels half a scale apart, 32 units: `first` is the lowest one, `most` the highest m.
struct UniformLevels {
  // A cost is at most 3 * distance + 144.
  static constexpr int LIMIT = (COST_LIMIT - RING * 144) / 3;

  // Costs of cosets 1 to 3, times 2^HISTORY, and what of the limit they may take. Coset 0's level next to u is e below
  // it; the others' are 32 q above that one, or 128 lower if there is one.
  template <class V>
  INLINE V costs(V u, V first, V most, V (&cost)[COSETS - 1]) {
    const V away = u - first, m = least(greatest((away + 63) >> 7, V{}), most), e = away - (m << 7);
    const V below = (m == V{}) ? constant<V>(32767) : e;  // no level is lower: more than the other costs
    const V one = e << HISTORY, three = one + one + one, low = below << HISTORY, low_three = low + low + low;
    const V c16 = constant<V>(16 << HISTORY), c64 = constant<V>(64 << HISTORY), c144 = constant<V>(144 << HISTORY);
    cost[0] = least(c16 - one, c144 + low_three);
    cost[1] = least(c64 - (one + one), c64 + (low + low));
    cost[2] = least(c144 - three, c16 + low);
    return greatest(e, -e);
  }

  // The code's upper bits, by its coset's bits 1 and 0, which come at bits 6 and 5.
  INLINE vi upper(vi u, vi first, vi most, vi high, vi low) {
    return least(greatest((u - first + 63 - (high + low)) >> 7, vi{}), most);
  }
};

// Levels of 2 bits at 1, 3, 5 and 9 quarters of a scale: 16, 48, 80 and 144 units.
struct FittedLevels {
  // A cost is at most 4 * |u| + 96.
  static constexpr int LIMIT = (COST_LIMIT - RING * 96) / 4;

  template <class V>
  INLINE V costs(V u, V, V, V (&cost)[COSETS - 1]) {
    const V x = u << HISTORY, two = x + x, four = two + two;
    const V c32 = constant<V>(32 << HISTORY), c96 = constant<V>(96 << HISTORY), c320 = constant<V>(320 << HISTORY);
    const V zeroth = least(c320 + four + x, V{});
    cost[0] = least(c96 + two + x, c32 - x) - zeroth;
    cost[1] = least(c32 + two, c96 - two) - zeroth;
    cost[2] = least(x, c320 - four) - zeroth;
    return greatest(u, -u);
  }

  // Whether u is above the middle between the coset's levels: -64, -16, 16 and 64.
  INLINE vi upper(vi u, vi, vi, vi high, vi low) {
    const vi middle = high + (high >> 2) + low + (low >> 1) - 64;
    return (vi)((vu)(middle - u) >> 31);
  }
};

// Least sums of the paths that begin and end in N states from FIRST on, by costs [length] of cosets 1 to 3.
template <class V, int FIRST, int N>
INLINE void least_sums(const V (*cost)[COSETS - 1], int length, V* found) {
  auto of = [&](int t, int coset) __attribute__((always_inline)) { return coset ? cost[t][coset - 1] : V{}; };
  V sums[N][4];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++)
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
      const int before = (FIRST + i) >> 1, last = (FIRST + i) & 1;
      sums[i][s] = of(0, 2 * (s >> 1 ^ before) + last) + of(1, 2 * ((s & 1) ^ last) + (s >> 1));
    }
  int bit = 1;
  for (int t = 2; t < length - 2; t++, bit *= 2) {
    const V c1 = cost[t][0], c2 = cost[t][1], c3 = cost[t][2];
    const V d0 = constant<V>(bit), d1 = c1 + d0, d2 = c2 + d0, d3 = c3 + d0;
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      V(&s)[4] = sums[i];
      const V a = least(s[0], s[2] + d2), b = least(s[0] + c2, s[2] + d0), c = least(s[1] + c1, s[3] + d3),
              d = least(s[1] + c3, s[3] + d1);
      s[0] = a, s[1] = b, s[2] = c, s[3] = d;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    const int before = (FIRST + i) >> 1, last = (FIRST + i) & 1, t = length - 2;
    V two[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++)
      two[k] = least(sums[i][k] + of(t, 2 * before + k), sums[i][k + 2] + (of(t, 2 * (1 - before) + k) + bit));
    found[i] = least(two[0] + of(t + 1, 2 * last + before), two[1] + (of(t + 1, 2 * (1 - last) + before) + 2 * bit));
  }
}

// Lowest bits of the path of least cost, the first channel's lowest.
template <class V>
INLINE V lowest_bits(const V (*cost)[COSETS - 1], int length) {
  V ends[4];
#if VL == 16
  least_sums<V, 0, 4>(cost, length, ends);
#else
  least_sums<V, 0, 2>(cost, length, ends);
  least_sums<V, 2, 2>(cost, length, ends + 2);
#endif
  V best = ends[0], state = V{};  // with the bit of the last channel above that of the last but one
  constexpr int bits[4] = {0, 2, 1, 3};
#pragma GCC unroll 3
  for (int i = 1; i < 4; i++) {
    const auto better = (ends[i] >> HISTORY) < (best >> HISTORY);
    best = better ? ends[i] : best;
    state = better ? constant<V>(bits[i]) : state;
  }
  return (best & ((1 << HISTORY) - 1)) | state << (length - 2);
}

// The same where a ring's costs need more than 32 bits, which takes numbers far outside of the levels.
template <class Levels>
static __attribute__((noinline)) vi wide_lowest_bits(const vi* u, vi first, vi most, int length) {
  vi found = {};
  for (int i = 0; i < VL; i++) {
    int64_t cost[RING][COSETS - 1];
    for (int t = 0; t < length; t++) Levels::template costs<int64_t>(u[t][i], first[i], most[i], cost[t]);
    found[i] = (int32_t)lowest_bits<int64_t>(cost, length);
  }
  return found;
}

// Codes of rings from numbers in units, u [length] in the ring's order: where u was.
template <class Levels>
static void code_rings(vi* u, vi first, vi most, int length) {
  vi cost[RING][COSETS - 1], taken = {};
  for (int t = 0; t < length; t++) taken += Levels::template costs<vi>(u[t], first, most, cost[t]);
  const vi bits = any(taken > splat_int(Levels::LIMIT)) ? wide_lowest_bits<Levels>(u, first, most, length)
                                                        : lowest_bits<vi>(cost, length);
  // of place t, at bit t: the lowest bits of the places before, and of the coset
  const vi one = bits << 1 | bits >> (length - 1), two = bits << 2 | bits >> (length - 2);
  const vi low = one << 5, high = (bits ^ two) << 6;
  for (int t = 0; t < length; t++)
    u[t] = Levels::upper(u[t], first, most, high >> t & 64, low >> t & 32) << 1 | (bits >> t & 1);
}

}  // namespace
