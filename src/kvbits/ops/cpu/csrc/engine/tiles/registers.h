// Tile registers: 16 rows of 64 bytes each, and products of bfloat16 numbers that are summed in float32.
//
// A product adds to every C[m][n] the sum over k of A[m][2k] B[k][2n] + A[m][2k+1] B[k][2n+1]. So a row of B holds two
// neighbours k of 16 columns. AMX computes in these registers. KVBITS_EMULATED_TILES computes the same in plain C.
#pragma once
#include <stdint.h>

#if !defined(KVBITS_AMX) && !defined(KVBITS_EMULATED_TILES)
#define KVBITS_EMULATED_TILES
#endif
#include "engine/vec/vec.h"

namespace {

constexpr int TILE_ROWS = 16;                         // of queries or sums
constexpr int TILE_COLUMNS = 16;                      // of sums
constexpr int TILE_DEPTH = 32;                        // bfloat16 numbers of a row
constexpr int TILE_NUMBERS = TILE_ROWS * TILE_DEPTH;  // bfloat16 numbers of a tile
constexpr int TILE_SUMS = TILE_ROWS * TILE_COLUMNS;   // float32 numbers of a tile

#ifdef KVBITS_EMULATED_TILES
static thread_local uint8_t tile_registers[8][TILE_ROWS][64];

INLINE void begin_tiles() {}
INLINE void end_tiles() {}
template <int T>
INLINE void clear_tile() {
  __builtin_memset(tile_registers[T], 0, sizeof tile_registers[T]);
}
template <int T>
INLINE void load_tile(const void* p) {
  __builtin_memcpy(tile_registers[T], p, sizeof tile_registers[T]);
}
template <int T>
INLINE void store_tile(float* p) {
  __builtin_memcpy(p, tile_registers[T], sizeof tile_registers[T]);
}
static void multiply_emulated(uint8_t (&c)[TILE_ROWS][64], const uint8_t (&a)[TILE_ROWS][64],
                              const uint8_t (&b)[TILE_ROWS][64]) {
  auto number = [](const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    __builtin_memcpy(&x, &wide, 4);
    return bits & 0x7f80 ? x : 0.0f;  // AMX takes numbers below the smallest normal one for 0
  };
  float factors[TILE_ROWS][TILE_DEPTH];
  for (int k = 0; k < TILE_ROWS; k++)
    for (int n = 0; n < TILE_DEPTH; n++) factors[k][n] = number(&b[k][2 * n]);
  for (int m = 0; m < TILE_ROWS; m++) {
    float sums[TILE_COLUMNS];
    __builtin_memcpy(sums, c[m], 64);
    for (int k = 0; k < TILE_ROWS; k++) {
      const float x = number(&a[m][4 * k]), y = number(&a[m][4 * k + 2]);
      for (int n = 0; n < TILE_COLUMNS; n++) {
        sums[n] += x * factors[k][2 * n];
        sums[n] += y * factors[k][2 * n + 1];
      }
    }
    __builtin_memcpy(c[m], sums, 64);
  }
}
template <int C, int A, int B>
INLINE void add_product() {
  multiply_emulated(tile_registers[C], tile_registers[A], tile_registers[B]);
}
#else
// As inline assembly: the compilers' intrinsics take register numbers as tokens, not as template arguments.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the layout of ldtilecfg");

INLINE void begin_tiles() {
  alignas(64) static constexpr TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
INLINE void end_tiles() { asm volatile("tilerelease"); }
template <int T>
INLINE void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
INLINE void load_tile(const void* p) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"((int64_t)64), "i"(T) : "memory");
}
template <int T>
INLINE void store_tile(float* p) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"((int64_t)64), "i"(T) : "memory");
}
template <int C, int A, int B>
INLINE void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

}  // namespace
