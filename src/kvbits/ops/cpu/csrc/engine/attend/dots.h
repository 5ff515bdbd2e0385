// Dot products of integer codes with the instructions of the tier.
#pragma once
#if defined(KVBITS_AVX512) || defined(KVBITS_AMX)
#include "dots_avx512.h"
#elif defined(KVBITS_AVX2)
#include "dots_avx2.h"
#elif defined(KVBITS_NEON)
#include "dots_neon.h"
#else
#include "dots_generic.h"
#endif
