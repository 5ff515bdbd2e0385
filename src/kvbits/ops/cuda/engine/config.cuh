// What all attention kernels have in common. Their macros come from shape.py and from the family of the pages' layout.
// A choice between two ways is a constant that an `if` asks for; `#if` is for architectures.
#pragma once
#include "numbers.h"
#include "ptx.cuh"

constexpr int D = HEAD_DIM, DV = VALUE_HEAD_DIM;  // channels of keys and queries, of values and results
constexpr int NT = COLS / 8;       // matrix-instruction column tiles
constexpr int CONSUMERS = WARPS * 32;
constexpr float NOT_SEEN = -3.0e38f;
/// A float of 2**23 and more is a whole number, whose low bits are those of its own: this one's are 0, and numbers
/// between -2**22 and 2**22 may be added to either.
constexpr float WHOLE = 12582912.f;
constexpr int WHOLE_BITS = 0x4b400000;
DEVICE float of_whole(int x) { return __uint_as_float(u32(x)) - WHOLE; }

// OWN_START: each warp starts a segment on its own and need not wait for others at its end.
constexpr int STARTS = OWN_START ? WARPS : 1;                   // copies of what a start needs
