// Short vectors of the instruction set that a file is compiled for. It names the set (KVBITS_AVX512, KVBITS_AVX2,
// KVBITS_NEON, none: the platform's baseline) before anything else, so that every header can include this one.
#pragma once
#if defined(KVBITS_AVX512) || defined(KVBITS_AMX)
#include "avx512.h"
#elif defined(KVBITS_AVX2)
#include "avx2.h"
#elif defined(KVBITS_NEON)
#include "neon.h"
#elif defined(KVBITS_EMULATED_TILES)
#include "wide.h"
#else
#define VL 4
#include "portable.h"
#endif
