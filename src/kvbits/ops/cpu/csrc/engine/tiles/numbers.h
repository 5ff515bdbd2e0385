// Numbers as one or two bfloat16 terms, whose sum is off by 2^-9 or 2^-17 of the number, in the pairs that tiles hold.
//
// Of 32 neighbours along the depth of a product, pair i holds numbers i and 16 + i. Two vectors then make a row of
// pairs without a shuffle.
#pragma once
#include "registers.h"

namespace {

// A number whose upper half is its nearest bfloat16.
INLINE vi raised(vf x) { return (vi)x + 0x8000; }
INLINE vi rounded(vf x) { return raised(x) & (int)0xffff0000; }
// Upper halves of both.
INLINE vi paired(vi first, vi second) {
#ifdef KVBITS_AMX
  alignas(64) static constexpr uint16_t UPPER[32] = {1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
                                                     17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
  return (vi)_mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(UPPER), (__m512i)second);
#else
  return (vi)((vu)first >> 16) | (second & (int)0xffff0000);
#endif
}

// A row of pairs of each of TERMS terms.
template <int TERMS>
INLINE void pair_terms(vf first, vf second, vi (&pairs)[TERMS]) {
  pairs[0] = paired(raised(first), raised(second));
  if constexpr (TERMS > 1)
    pairs[1] = paired(raised(first - (vf)rounded(first)), raised(second - (vf)rounded(second)));
}

// The same in memory, `apart` numbers from each other.
template <int TERMS>
INLINE void store_pairs(uint16_t* to, int64_t apart, vf first, vf second) {
  vi pairs[TERMS];
  pair_terms(first, second, pairs);
  for (int i = 0; i < TERMS; i++) store_int((int32_t*)(to + i * apart), pairs[i]);
}

// One of two rows whose bit STEP differs, after their words have changed places with the lanes whose bit STEP differs.
template <int STEP, bool UPPER>
INLINE vi exchanged_rows(vi a, vi b) {
  constexpr auto from = [](int lane) {
    return UPPER ? (lane & STEP ? 16 + lane : lane + STEP) : (lane & STEP ? 16 + lane - STEP : lane);
  };
  return __builtin_shufflevector(a, b, from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7), from(8),
                                 from(9), from(10), from(11), from(12), from(13), from(14), from(15));
}
template <int STEP>
INLINE void transpose_by(vi (&x)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    if (i & STEP) continue;
    const vi a = x[i], b = x[i + STEP];
    x[i] = exchanged_rows<STEP, false>(a, b);
    x[i + STEP] = exchanged_rows<STEP, true>(a, b);
  }
}
// Transposes 16 x 16 words.
INLINE void transpose(vi (&x)[16]) {
  transpose_by<1>(x);
  transpose_by<2>(x);
  transpose_by<4>(x);
  transpose_by<8>(x);
}

}  // namespace
