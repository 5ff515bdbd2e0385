// What the three attention kernels (raw.cu, packed.cu, codebook.cu) have in common. Their macros come from kernel_choice.py, from a PageLayout and the launch.
// A choice between two ways is a constant that an `if` asks for; `#if` is for architectures.
#pragma once
#include "ptx.cuh"

constexpr int D = HEAD_DIM;
constexpr int NT = COLS / 8;       // matrix-instruction column tiles
constexpr int CONSUMERS = WARPS * 32;
constexpr float NOT_SEEN = -3.0e38f;

enum { SCALE_STATIC = 0, SCALE_GROUP = 1, SCALE_CHANNEL = 2 };  // *_SCALE
enum { INTEGER = 0, E4M3 = 1, E5M2 = 2 };                       // *_FLOAT
enum { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2 };                // *_SCALE_TYPE, Q_TYPE, RAW_TYPE

// OWN_START: each warp starts a segment on its own and need not wait for others at its end.
constexpr int STARTS = OWN_START ? WARPS : 1;                   // copies of what a start needs
