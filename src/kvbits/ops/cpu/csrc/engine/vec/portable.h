// Short vectors of VL floats on GCC/Clang vector extensions: one source for everything that is not a dot product. The
// header of an instruction set defines VL (its native width) and what it brings itself (HAVE_...), then includes this.
//
// No standard library templates here or in anything a tier includes: an inline function compiled with AVX-512 could be
// the copy that the linker keeps for everybody.
#pragma once
#include <stdint.h>

#include "kvbits_cpu.h"

namespace {

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(VL * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))

INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat_int(int32_t x) { return x - vi{}; }
INLINE vf load(const float* p) { return *(const vf_mem*)p; }
INLINE void store(float* p, vf x) { *(vf_mem*)p = x; }
INLINE vi load_int(const void* p) { return *(const vi_mem*)p; }
INLINE void store_int(int32_t* p, vi x) { *(vi_mem*)p = x; }
// In a register from here on: GCC would load it again for every product.
INLINE vf kept(vf x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}
INLINE vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
// A tier with instructions for these says so (HAVE_...) and defines them itself.
INLINE vf vmax(vf a, vf b);
INLINE vf vmin(vf a, vf b);
INLINE vf from_fp16(const uint16_t* p);
template <int DEGREE>
INLINE vf exp2_neg(vf x);
template <int N>
INLINE vf exchanged(vf x);
INLINE float sum(vf x);
INLINE float max_of(vf x);
INLINE vi turned(vi x, int left);
INLINE vi bits_of(int mask, vi a, vi b);

#ifndef HAVE_WORDS
// 32-bit words turned to the left, 0 < left < 32.
INLINE vi turned(vi x, int left) { return (vi)((vu)x << left | (vu)x >> (32 - left)); }
// Of every byte the bits of `a` that are in the mask, of `b` the others.
INLINE vi bits_of(int mask, vi a, vi b) { return (a & mask * 0x01010101) | (b & ~(mask * 0x01010101)); }
// a ^ (b & mask), the mask that of every byte.
INLINE vi flipped(vi a, vi b, int mask) { return a ^ (b & mask * 0x01010101); }
// a | (b & mask)
INLINE vi masked_or(vi a, vi b, int mask) { return a | (b & mask * 0x01010101); }
// Words shifted down by a number that is not known beforehand.
INLINE vi shifted_by(vi x, const int32_t& by) { return (vi)((vu)x >> by); }
#endif
#ifdef HAVE_LOOKUP
// Every byte, which is below 16, to that of a table.
INLINE vi looked_up(const uint8_t (&table)[16], vi x);
#endif
INLINE vi shifted_down(vi x, int by) { return (vi)((vu)x >> by); }
INLINE vi masked(vi x, int mask) { return x & mask * 0x01010101; }

#ifndef HAVE_LANES
// As many times four words as a vector has.
INLINE vi load_quads(const uint8_t* const (&at)[VL / 4]) { return load_int(at[0]); }
// Bytes of numbers below 8 to the levels of values of 2 bits, in half steps: 2 x - 7, and if `fitted` 9 instead of 7.
// Bits 3 and 7 must be 0; what others hold above the number does not matter.
INLINE vi odd_levels(vi x, bool fitted) {
  typedef int8_t vb __attribute__((vector_size(VL * 4)));
  const vb n = (vb)(x & 0x07070707), most = (vb)((vi)(n == 7) & (fitted ? 0x02020202 : 0)),
           least = (vb)((vi)(n == 0) & (fitted ? 0x02020202 : 0));
  return (vi)(n * 2 - 7 + most - least);
}
// Of every four lanes: the last N of `before`, then the first of x.
template <int N>
INLINE vi lanes_behind(vi before, vi x) {
  static_assert(VL == 4, "wider vectors have instructions for it");
  return N == 1 ? __builtin_shufflevector(before, x, 3, 4, 5, 6) : __builtin_shufflevector(before, x, 2, 3, 4, 5);
}
#endif

#ifndef HAVE_MIN_MAX
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif
INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// Numbers of a byte of every word, at `bit`, as 256 plus what the bits say: a shift and a mask put them into the
// mantissa.
INLINE vf above_256(vi words, int bit, int bits) {
  const vi up = bit < 15 ? words << (15 - bit) : shifted_down(words, bit - 15);
  return (vf)((up & (((1 << bits) - 1) << 15)) | 0x43800000);
}

INLINE vi iota() {
  vi v;
  for (int i = 0; i < VL; i++) v[i] = i;
  return v;
}

#ifndef HAVE_REDUCE
INLINE float sum(vf x) {
  float t[VL];
  *(vf_mem*)t = x;
  for (int n = VL / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
}

INLINE float max_of(vf x) {
  float t[VL];
  *(vf_mem*)t = x;
  for (int n = VL / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
  return t[0];
}

#ifndef HAVE_SUM_EACH
// The sums of n <= 16 vectors.
INLINE void sum_each(const vf* x, int n, float* to) {
  for (int i = 0; i < n; i++) to[i] = sum(x[i]);
}
#endif
#endif

INLINE bool any(vi mask) {
  int32_t t[VL], all = 0;
  *(vi_mem*)t = mask;
  for (int i = 0; i < VL; i++) all |= t[i];
  return all;
}

#ifndef HAVE_MAX_EACH
// The maxima of n <= 8 vectors. May write a whole vector or 8 numbers, those past n finite if all 8 vectors are.
INLINE void max_each(const vf* x, int n, float* to) {
  for (int i = 0; i < n; i++) to[i] = max_of(x[i]);
}
#endif

// Adding 1.5 * 2^23 leaves the nearest integer (half to even) in the low bits: exact for |x| < 2^22.
constexpr float ROUND_MAGIC = 12582912.0f;
INLINE vf round_even(vf x) { return (x + ROUND_MAGIC) - ROUND_MAGIC; }
INLINE vi round_to_int(vf x) { return (vi)(x + ROUND_MAGIC) - (vi)splat(ROUND_MAGIC); }

// 2^f for 0 <= f < 1, the polynomial of least relative error: 7.5e-5, 2.6e-6 and 7.5e-8 for degree 3, 4 and 5.
template <int DEGREE>
INLINE vf exp2_fraction(vf f) {
  if (DEGREE == 3) return ((f * 7.802452118e-02f + 2.260671575e-01f) * f + 6.958335398e-01f) * f + 9.999252186e-01f;
  if (DEGREE == 4)
    return (((f * 1.353416775e-02f + 5.201146094e-02f) * f + 2.414427567e-01f) * f + 6.930038345e-01f) * f +
           1.000002593e+00f;
  return ((((f * 1.877576658e-03f + 8.989340131e-03f) * f + 5.582631802e-02f) * f + 2.401536171e-01f) * f +
          6.931530732e-01f) *
             f +
         9.999999251e-01f;
}

#ifndef HAVE_EXP2
// 2^x for x <= 0, to the accuracy of the degree. Everything below -126, minus infinity too, gives 2^-126: 0 for all
// that softmax does with it.
template <int DEGREE>
INLINE vf exp2_neg(vf x) {
  x = vmax(x, splat(-126.0f));
  const vf n = (x - 0.5f) + ROUND_MAGIC;  // its low bits are the integer below x; those of the magic number fall off
  return (vf)((vi)exp2_fraction<DEGREE>(x - (n - ROUND_MAGIC)) + ((vi)n << 23));
}
#endif

// softcap * tanh(x / softcap) through 1 - 2 / (1 + e^2|y|): absolute error 1e-7 of softcap.
INLINE vf tanh_cap(vf x, float cap) {
  vf y = x * (1.0f / cap);
  vi negative = y < vf{};
  vf e = exp2_neg<5>(select(negative, y, -y) * 2.8853900818f);
  vf t = (1.0f - e) / (1.0f + e) * cap;
  return select(negative, -t, t);
}

INLINE vi load_bytes(const uint8_t* p);
#ifndef HAVE_BYTES
// VL bytes as unsigned integers, and back (the low byte of each). GCC turns a conversion of vectors of bytes into
// scalar code.
INLINE vi load_bytes(const uint8_t* p) {
  vi x;
  for (int i = 0; i < VL; i++) x[i] = p[i];
  return x;
}
INLINE void store_bytes(uint8_t* p, vi x) {
  for (int i = 0; i < VL; i++) p[i] = (uint8_t)x[i];
}
#endif

#ifndef HAVE_EXCHANGED
// Lanes change places with those N away: lane i of the result is lane i ^ N.
template <int N>
INLINE vf exchanged(vf x) {
  vf y;
  for (int i = 0; i < VL; i++) y[i] = x[i ^ N];
  return y;
}
#endif

#ifndef HAVE_SUM_IN_ALL
// In all lanes the sum that sum_each has of 16 vectors, to the last bit.
INLINE vf sum_in_all(vf x) {
  if constexpr (VL > 8) x += exchanged<8>(x);
  if constexpr (VL > 4) x += exchanged<4>(x);
  x += exchanged<2>(x);
  return x + exchanged<1>(x);
}
#endif

#ifndef HAVE_FOURS
// Four numbers from each of VL addresses: x[n] has the n-th ones.
INLINE void load_fours(const float* const* at, int64_t offset, vf (&x)[4]) {
  for (int i = 0; i < VL; i++)
    for (int n = 0; n < 4; n++) x[n][i] = at[i][offset + n];
}
// The bytes of each four words, byte by byte: the first ones of all four, then the second ones; a four every `apart`
// bytes.
INLINE void store_fours(uint8_t* to, int64_t apart, vi words) {
  for (int i = 0; i < VL; i++)
    for (int n = 0; n < 4; n++) to[i / 4 * apart + 4 * n + i % 4] = (uint8_t)(words[i] >> 8 * n);
}
#endif

#ifndef HAVE_STREAM
INLINE void store_bytes(uint8_t* p, vi x);
// 64 integers as bytes (the low one of each). `stream`: past the caches, `p` aligned to 64; stream_end() once
// afterwards.
INLINE void store_line(uint8_t* p, const vi* x, bool) {
  for (int i = 0; i < 64 / VL; i++) store_bytes(p + i * VL, x[i]);
}
INLINE void stream(float* p, vf x) { store(p, x); }
INLINE void stream_end() {}
#endif

INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into L2

INLINE vf from_bf16(const uint16_t* p) {
  vi w = __builtin_convertvector(*(const vh_mem*)p, vi);
  return (vf)(w << 16);
}

#ifndef HAVE_FROM_FP16
// Exact for every value, subnormals and infinities included: shift into place, then fix the exponent by a multiply.
INLINE vf from_fp16(const uint16_t* p) {
  vi w = __builtin_convertvector(*(const vh_mem*)p, vi);
  vi sign = (w & 0x8000) << 16;
  vi mag = w & 0x7fff;
  vf x = (vf)(mag << 13) * 0x1p112f;
  vi special = mag >= splat_int(0x7c00);
  x = select(special, (vf)((mag << 13) | 0x7f800000), x);
  return (vf)((vi)x | sign);
}
#endif

// Bits 7 to 14 of float16 numbers, in 32-bit lanes.
INLINE vf from_e5m3(vi bits) { return (vf)(bits << 20) * 0x1p112f; }

// VL elements of a float array in any of the dtypes.
template <int DTYPE>
INLINE vf load_as(const void* base, int64_t i) {
  if (DTYPE == FLOAT32) return load((const float*)base + i);
  if (DTYPE == FLOAT16) return from_fp16((const uint16_t*)base + i);
  if (DTYPE == FLOAT8_E5M3) return from_e5m3(load_bytes((const uint8_t*)base + i));
  return from_bf16((const uint16_t*)base + i);
}

INLINE int dtype_bytes(int dtype) { return dtype == FLOAT32 ? 4 : dtype == FLOAT8_E5M3 ? 1 : 2; }

// The first n < VL elements, zeros behind them: the last piece of an array that must not be read past its end.
template <int DTYPE>
INLINE vf load_first(const void* base, int64_t i, int n) {
  alignas(64) char t[VL * 4] = {};
  const int size = dtype_bytes(DTYPE);
  __builtin_memcpy(t, (const char*)base + i * size, n * size);
  return load_as<DTYPE>(t, 0);
}

INLINE void store_first(float* p, vf x, int n) {
  float t[VL];
  *(vf_mem*)t = x;
  __builtin_memcpy(p, t, n * 4);
}

// n floats from any dtype; `to` has room for n rounded up to VL, zeros are written there.
template <int DTYPE>
static void widen_as(float* to, const void* from, int n) {
  int i = 0;
  for (; i + VL <= n; i += VL) store(to + i, load_as<DTYPE>(from, i));
  if (i < n) store(to + i, load_first<DTYPE>(from, i, n - i));
}

INLINE void widen(float* to, const void* from, int n, int dtype) {
  if (dtype == FLOAT32) widen_as<FLOAT32>(to, from, n);
  else if (dtype == FLOAT16) widen_as<FLOAT16>(to, from, n);
  else if (dtype == FLOAT8_E5M3) widen_as<FLOAT8_E5M3>(to, from, n);
  else widen_as<BFLOAT16>(to, from, n);
}

}  // namespace
