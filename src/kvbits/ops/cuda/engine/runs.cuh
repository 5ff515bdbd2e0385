// Where the fresh tokens of a decode step go: advance.cu writes it, step.cuh reads it.
#pragma once

struct Run { i64 page, row, token, slot, count; };  // page: bytes from the pool's start to its first struct

/// No place: bytes from a pool's start to a page are multiples of 16, below 0 where a slab lies before the first.
constexpr i64 NOWHERE = 1;

/// What a sequence of a decode step does beside that: the raw page that is quantized and where to, bytes from their
/// pools' starts; NOWHERE if none is.
struct Closing { i64 from, to; };
