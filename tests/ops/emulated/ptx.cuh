// ptx.cuh of src/kvbits/ops/cuda/shared on a CPU: every thread of a block is a fiber, and what a warp or a block does
// together waits for all its fibers. It checks what a kernel computes (layouts, indices, order of barriers), not memory
// ordering: a fiber runs until it waits.
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <utility>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif
#define __global__
#define __align__(n) alignas(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define DEVICE inline

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) double2 { double x, y; };
struct alignas(16) float4 { float x, y, z, w; };
using std::max;
using std::min;
inline u32 min(u32 a, int b) { return std::min(a, u32(b)); }

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr u32 ALL_LANES = 0xffffffffu;

[[noreturn]] inline void fail(const char* what, long n) {
  fprintf(stderr, "%s (%ld)\n", what, n);
  abort();
}

// ---- threads

/// A stack of its own, x86-64: where it stands while another fiber runs. No system call, which swapcontext makes:
/// emulation is mostly switches.
struct Fiber {
  void* stands;
  bool done;
};
struct Warp {
  u32 in[32][6], out[32][4];
  int arrived, operation;
  u64 generation;
};
struct Barrier {
  int arrived;
  u64 generation;
};
struct TransactionBarrier { int count, pending, bytes; u32 phase; };

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<TransactionBarrier> transactions;
  Barrier barriers[3];
  void* scheduler;
  int current;
};
extern Block block;
extern unsigned char shared[];
struct { struct { operator unsigned() const { return block.current; } } x; } threadIdx;
struct { int x, y; } blockIdx, blockDim;

/// Keeps the registers that a function must, notes where this stack stands and goes on with another one.
extern "C" void switch_stacks(void** from, void* to) __attribute__((visibility("hidden")));
inline void yield() { switch_stacks(&block.fibers[block.current].stands, block.scheduler); }
inline Warp& my_warp() { return block.warps[block.current / 32]; }
inline int my_lane() { return block.current % 32; }

/// All lanes call it with the same operation, their inputs in `in`; the last to arrive combines.
template <class F>
inline void together(int operation, F combine) {
  Warp& w = my_warp();
  if (w.arrived && w.operation != operation) fail("lanes of a warp do different things together", operation);
  w.operation = operation;
  const u64 mine = w.generation;
  if (++w.arrived == 32) {
    combine(w);
    w.arrived = 0;
    ++w.generation;
  }
  while (w.generation == mine) yield();
}
inline void wait_at(Barrier& b, unsigned threads) {
  const u64 mine = b.generation;
  if (++b.arrived == int(threads)) b.arrived = 0, ++b.generation;
  while (b.generation == mine) yield();
}
template <int BARRIER = 1>
inline void sync_threads(u32 threads) { wait_at(block.barriers[BARRIER], threads); }
inline void __syncthreads() { wait_at(block.barriers[0], block.fibers.size()); }
inline void __syncwarp() { together(0, [](Warp&) {}); }
inline void __threadfence() {}
inline int thread_again() { return block.current; }
inline u32 atomicMax(u32* p, u32 v) { return std::exchange(*p, std::max(*p, v)); }
inline u32 atomicOr(u32* p, u32 v) { return std::exchange(*p, *p | v); }
inline int atomicAdd(int* p, int v) { return std::exchange(*p, *p + v); }
inline int add_acquire_release(int* p, int v) { return atomicAdd(p, v); }
inline void __threadfence_block() {}

// ---- numbers

template <class To, class From>
inline To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(u32 x) { return bits_as<float>(x); }
inline u32 __float_as_uint(float x) { return bits_as<u32>(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // -std=c++17: nothing is contracted
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rd(float a, float b, float c) {
  const float nearest = fmaf(a, b, c);
  return double(nearest) - c > double(a) * b ? nextafterf(nearest, -INFINITY) : nearest;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline float negative_infinity() { return -INFINITY; }
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float cos_approx(float x) { return cosf(x); }
inline float sin_approx(float x) { return sinf(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float tanh_approx(float x) { return tanhf(x); }
inline float power_of_two(int e) {
  if (e < -126 || e > 127) fail("power_of_two", e);
  return __uint_as_float(u32(e + 127) << 23);
}
inline int exponent_of(float x) { return int(__float_as_uint(x) >> 23 & 255) - 127; }
// By builtins, as <immintrin.h> takes the compiler longer than most kernels.
inline float f16_to_float(u16 x) {
  typedef short Halves __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps(Halves{short(x)})[0];
}
inline float bf16_to_float(u16 x) { return __uint_as_float(u32(x) << 16); }
inline u16 float_to_bf16(float x) { return (__float_as_uint(x) + 0x7fff + (__float_as_uint(x) >> 16 & 1)) >> 16; }
inline float low_f16(u32 w) { return f16_to_float(u16(w)); }
inline float high_f16(u32 w) { return f16_to_float(u16(w >> 16)); }
inline u32 pack_f16(float low, float high) {
  typedef float Floats __attribute__((vector_size(16)));
  const auto halves = __builtin_ia32_vcvtps2ph(Floats{low, high}, 0);  // to the nearest, ties to even
  return u32(u16(halves[0])) | u32(u16(halves[1])) << 16;
}
inline u32 pack_bf16(float low, float high) { return float_to_bf16(low) | u32(float_to_bf16(high)) << 16; }
inline u32 mul_f16x2(u32 a, u32 b) { return pack_f16(low_f16(a) * low_f16(b), high_f16(a) * high_f16(b)); }
inline u32 max_f16x2(u32 a, u32 b) { return pack_f16(fmaxf(low_f16(a), low_f16(b)), fmaxf(high_f16(a), high_f16(b))); }
template <bool MOST, bool BF16>
inline u32 extreme_nan(u32 a, u32 b) {
  auto one = [](u16 x, u16 y) -> u16 {
    const float f = BF16 ? bf16_to_float(x) : f16_to_float(x), g = BF16 ? bf16_to_float(y) : f16_to_float(y);
    return f != f || g != g ? 0x7fff : (MOST ? f > g : f < g) ? x : y;
  };
  return one(u16(a), u16(b)) | u32(one(u16(a >> 16), u16(b >> 16))) << 16;
}
inline u32 max_nan_f16x2(u32 a, u32 b) { return extreme_nan<true, false>(a, b); }
inline u32 min_nan_f16x2(u32 a, u32 b) { return extreme_nan<false, false>(a, b); }
inline u32 max_nan_bf16x2(u32 a, u32 b) { return extreme_nan<true, true>(a, b); }
inline u32 min_nan_bf16x2(u32 a, u32 b) { return extreme_nan<false, true>(a, b); }
inline u32 max_size_nan_f16x2(u32 a, u32 b) {
  return max_nan_f16x2(a & 0x7fff7fffu, b & 0x7fff7fffu) ^ ((a ^ b) & 0x80008000u);
}
inline u32 max_size_nan_bf16x2(u32 a, u32 b) {
  return max_nan_bf16x2(a & 0x7fff7fffu, b & 0x7fff7fffu) ^ ((a ^ b) & 0x80008000u);
}
/// Rounds to a float of MANTISSA bits whose smallest normal number is 2**MIN, half to even, and packs sign, exponent
/// and mantissa.
template <int MANTISSA, int MIN>
inline u16 to_small_float(float x, float largest) {
  const float mag = fminf(fabsf(x), largest);
  const int e = mag ? std::max(ilogbf(mag), MIN) : MIN;
  const float units = nearbyintf(ldexpf(mag, MANTISSA - e));  // of the last place
  return u16(units + ldexpf(float(e - MIN), MANTISSA)) | (signbit(x) ? 0x80 : 0);
}
inline u16 to_e4m3(float x) { return to_small_float<3, -6>(x, 448.f); }
inline u16 to_e5m2(float x) { return to_small_float<2, -14>(x, 57344.f); }
inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
  return pack_f16(fmaf(low_f16(a), low_f16(b), low_f16(c)), fmaf(high_f16(a), high_f16(b), high_f16(c)));
}
inline u32 low_twice(u32 a) { return (a & 0xffff) * 0x10001u; }
inline u32 high_twice(u32 a) { return (a >> 16) * 0x10001u; }
inline u32 low_mul(u32 a, u32 b) { return mul_f16x2(low_twice(a), b); }
inline u32 high_mul(u32 a, u32 b) { return mul_f16x2(high_twice(a), b); }
inline u32 high_fnma(u32 a, u32 b, u32 c) { return fma_f16x2(high_twice(a), b ^ 0x80008000u, c); }
inline u32 low_fma(u32 a, u32 b, u32 c) { return fma_f16x2(low_twice(a), b, c); }
inline u32 high_fma(u32 a, u32 b, u32 c) { return fma_f16x2(high_twice(a), b, c); }
template <u32 TABLE>
inline u32 bitwise(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int i = 0; i < 8; ++i)
        if (TABLE >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return d;
}
inline u32 select_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
inline u32 rotate_left(u32 w, u32 bits) { return bits & 31 ? w << (bits & 31) | w >> (32 - (bits & 31)) : w; }
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= u32((a | u64(b) << 32) >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}

// ---- a warp together

template <class T>
inline T __shfl_sync(u32, T v, int from) {
  my_warp().in[my_lane()][0] = bits_as<u32>(v);
  my_warp().in[my_lane()][1] = from & 31;
  together(1, [](Warp& w) { for (int i = 0; i < 32; ++i) w.out[i][0] = w.in[w.in[i][1]][0]; });
  return bits_as<T>(my_warp().out[my_lane()][0]);
}
inline bool __shfl_sync(u32 lanes, bool v, int from) { return __shfl_sync(lanes, int(v), from); }
inline i64 __shfl_sync(u32 lanes, i64 v, int from) {
  const u64 low = __shfl_sync(lanes, u32(v), from), high = __shfl_sync(lanes, u32(u64(v) >> 32), from);
  return i64(high << 32 | low);
}
template <class T>
inline T __shfl_xor_sync(u32 lanes, T v, int mask) { return __shfl_sync(lanes, v, my_lane() ^ mask); }

/// The same result for all lanes: `fold` over their values in order.
template <class T, class F>
inline T folded(int operation, T v, F fold) {
  my_warp().in[my_lane()][0] = bits_as<u32>(v);
  together(operation, [&](Warp& w) {
    T all = bits_as<T>(w.in[0][0]);
    for (int i = 1; i < 32; ++i) all = fold(all, bits_as<T>(w.in[i][0]));
    for (int i = 0; i < 32; ++i) w.out[i][0] = bits_as<u32>(all);
  });
  return bits_as<T>(my_warp().out[my_lane()][0]);
}
template <class T>
inline T __reduce_max_sync(u32, T v) { return folded(2, v, [](T a, T b) { return max(a, b); }); }
template <class T>
inline T __reduce_add_sync(u32, T v) { return folded(17, v, [](T a, T b) { return a + b; }); }
template <class T>
inline T __reduce_min_sync(u32, T v) { return folded(3, v, [](T a, T b) { return min(a, b); }); }
inline bool __any_sync(u32, bool p) { return folded(4, int(p), [](int a, int b) { return a | b; }); }
inline bool __all_sync(u32, bool p) { return folded(5, int(p), [](int a, int b) { return a & b; }); }
inline u32 __ballot_sync(u32, bool p) { return folded(18, u32(p) << my_lane(), [](u32 a, u32 b) { return a | b; }); }
inline u32 __match_any_sync(u32, int v) {
  my_warp().in[my_lane()][0] = v;
  together(6, [](Warp& w) {
    for (int i = 0; i < 32; ++i) {
      w.out[i][0] = 0;
      for (int j = 0; j < 32; ++j) w.out[i][0] |= u32(w.in[i][0] == w.in[j][0]) << j;
    }
  });
  return my_warp().out[my_lane()][0];
}
inline u32 transpose_8x8(u32 a) {
  my_warp().in[my_lane()][0] = a;
  together(7, [](Warp& w) {
    auto at = [&](int row, int column) { return w.in[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xffff; };
    for (int l = 0; l < 32; ++l) w.out[l][0] = at(l % 4 * 2, l / 4) | at(l % 4 * 2 + 1, l / 4) << 16;
  });
  return my_warp().out[my_lane()][0];
}
template <bool BF16>
inline void mma(float (&d)[4], const u32 (&operands)[6], const float (&c)[4]) {
  memcpy(my_warp().in[my_lane()], operands, sizeof operands);
  together(8 + BF16, [](Warp& w) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; ++l)
      for (int e = 0; e < 2; ++e) {
        auto value = [&](int r) { u16 x = w.in[l][r] >> 16 * e; return BF16 ? bf16_to_float(x) : f16_to_float(x); };
        const int g = l / 4, k = l % 4 * 2 + e;
        a[g][k] = value(0), a[g + 8][k] = value(1), a[g][k + 8] = value(2), a[g + 8][k + 8] = value(3),
        b[k][g] = value(4), b[k + 8][g] = value(5);
      }
    for (int l = 0; l < 32; ++l)
      for (int r = 0; r < 4; ++r) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) sum += double(a[l / 4 + r / 2 * 8][k]) * b[k][l % 4 * 2 + r % 2];
        w.out[l][r] = __float_as_uint(float(sum));
      }
  });
  for (int r = 0; r < 4; ++r) d[r] = c[r] + __uint_as_float(my_warp().out[my_lane()][r]);
}
inline void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2,
                    float c3) {
  mma<false>(d, {a0, a1, a2, a3, b0, b1}, {c0, c1, c2, c3});
}
inline void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma<false>(d, {a0, a1, a2, a3, b0, b1}, {d[0], d[1], d[2], d[3]});
}
template <bool SIGNED>
inline void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int c0, int c1, int c2, int c3) {
  const u32 operands[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(my_warp().in[my_lane()], operands, sizeof operands);
  together(21 + SIGNED, [](Warp& w) {
    int a[16][32], b[32][8];
    for (int l = 0; l < 32; ++l)
      for (int e = 0; e < 4; ++e) {
        auto value = [&](int r) { return int(w.in[l][r] >> 8 * e & 255); };
        auto factor = [&](int r) { return SIGNED ? int(static_cast<signed char>(value(r))) : value(r); };
        const int g = l / 4, k = l % 4 * 4 + e;
        a[g][k] = value(0), a[g + 8][k] = value(1), a[g][k + 16] = value(2), a[g + 8][k + 16] = value(3),
        b[k][g] = factor(4), b[k + 16][g] = factor(5);
      }
    for (int l = 0; l < 32; ++l)
      for (int r = 0; r < 4; ++r) {
        int sum = 0;
        for (int k = 0; k < 32; ++k) sum += a[l / 4 + r / 2 * 8][k] * b[k][l % 4 * 2 + r % 2];
        w.out[l][r] = u32(sum);
      }
  });
  const int c[4] = {c0, c1, c2, c3};
  for (int r = 0; r < 4; ++r) d[r] = int(u32(c[r]) + my_warp().out[my_lane()][r]);
}
template <bool SIGNED>
inline void mma_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_bytes<SIGNED>(d, a0, a1, a2, a3, b0, b1, d[0], d[1], d[2], d[3]);
}
inline void warpgroup_begins(float (&)[8][2][4]) {}
inline void warpgroup_ends(float (&)[8][2][4]) {}
/// Of the four warps each multiplies its rows; b: [k / 8][128 columns][k % 8].
inline u32 shared_address(const void* p);
inline u64 warpgroup_operand(const void* b) { return shared_address(b) / 16; }
template <bool BF16>
inline void warpgroup_mma(float (&y)[8][2][4], const u32 (&a)[4], u64 b, bool adds) {
  // of each warp; written when all its lanes have come, so when all have read what was there
  static float rows[32][16][16];
  const int warp = block.current / 32, lane = my_lane();
  memcpy(my_warp().in[lane], a, sizeof a);
  together(20, [&](Warp& w) {
    for (int l = 0; l < 32; ++l)
      for (int e = 0; e < 8; ++e)
        rows[warp][l / 4 + e / 2 % 2 * 8][l % 4 * 2 + e % 2 + e / 4 * 8] =
            (BF16 ? bf16_to_float : f16_to_float)(w.in[l][e / 2] >> 16 * (e % 2));
  });
  for (int i = 0; i < 64; ++i) {
    float& sum = y[i / 8][i / 4 % 2][i % 4];
    double found = adds ? sum : 0;
    for (int k = 0; k < 16; ++k) {
      const u16* column = reinterpret_cast<const u16*>(shared + (b * 16 - 1024) +
                                                       (k / 8 * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2) * 16);
      found += double(rows[warp][lane / 4 + i / 2 % 2 * 8][k]) * (BF16 ? bf16_to_float : f16_to_float)(column[k % 8]);
    }
    sum = float(found);
  }
}
inline void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma<true>(d, {a0, a1, a2, a3, b0, b1}, {d[0], d[1], d[2], d[3]});
}

// ---- copies and their barriers

constexpr u32 SHARED_START = 1024;
inline u32 shared_address(const void* p) { return u32(static_cast<const unsigned char*>(p) - shared) + SHARED_START; }
template <class T = unsigned char>
inline T& shared_at(u32 address) { return reinterpret_cast<T&>(shared[address - SHARED_START]); }
template <int OFFSET>
inline u32 load_shared_at(u32 address) { return shared_at<u32>(address + OFFSET); }
template <int OFFSET>
inline uint2 load_shared2_at(u32 address) {
  return {shared_at<u32>(address + OFFSET), shared_at<u32>(address + OFFSET + 4)};
}
inline void add_to_shared(u32 address, int x) { shared_at<int>(address) += x; }
inline int add_clamped(int a, int b, int top) { return max(min(a + b, top), 0); }
inline u32 multiply_add(int a, int b, u32 c) { return u32(a) * u32(b) + c; }
inline int distance(int a, int b, int c) { return abs(a - b) + c; }
inline int round_to_int(float x) {
  return x >= 2147483648.f ? 0x7fffffff : x < -2147483648.f ? -0x7fffffff - 1 : int(rintf(x));
}
inline void pause() { yield(); }
inline int lowest_bit(u32 x) { return __builtin_ctz(x); }
inline int leading_zeros(u32 x) { return x ? __builtin_clz(x) : 32; }
inline void __trap() { fail("trap", 0); }
inline TransactionBarrier& transaction(u32 at) { return block.transactions.at((at - SHARED_START) / 8); }
inline void complete(TransactionBarrier& b) {
  if (b.pending < 0) fail("more arrivals than a barrier expects", b.pending);
  if (!b.pending && !b.bytes) b.phase ^= 1, b.pending = b.count;
}
inline void barrier_init(u32 at, u32 count) { transaction(at) = {int(count), int(count), 0, 0}; }
inline void barrier_arrive_expect(u32 at, u32 bytes) {
  transaction(at).bytes += bytes;
  --transaction(at).pending;
  complete(transaction(at));
}
inline void barrier_arrive(u32 at) { barrier_arrive_expect(at, 0); }
inline void barrier_wait(u32 at, u32 parity) { while (transaction(at).phase == parity) yield(); }
inline bool barrier_test(u32 at, u32 parity) { return transaction(at).phase != parity; }
inline void copy_bulk(u32 to, i64 from, u32 bytes, u32 at, u64) {
  if (to % 16 || from % 16 || bytes % 16) fail("a bulk copy is not of whole 16-byte pieces", bytes);
  memcpy(&shared_at(to), reinterpret_cast<const void*>(from), bytes);
  transaction(at).bytes -= bytes;
  complete(transaction(at));
}
/// Copies land at once, so all that a lane's arrival says is that it is there.
inline void copy_async_16(u32 to, i64 from) {
  if (to % 16 || from % 16) fail("an asynchronous copy is not of 16-byte pieces", to);
  memcpy(&shared_at(to), reinterpret_cast<const void*>(from), 16);
}
inline void copy_async_arrive(u32 at) { barrier_arrive(at); }
inline uint4 load_global_once(i64 from, bool wanted) {
  return wanted ? *reinterpret_cast<const uint4*>(from) : uint4{};
}
template <class T>
inline T load_global_l2(const T* p) { return *p; }
inline uint2 load_once_8(const void* p) { return *static_cast<const uint2*>(p); }
inline uint4 load_once_16(const void* p) { return *static_cast<const uint4*>(p); }
inline void prefetch_l1(const void*) {}
inline void prefetch_l2(i64, u32) {}
inline u64 read_once_policy() { return 0; }
inline void shared_writes_before_copies() {}
inline void barriers_before_copies() {}
inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}
