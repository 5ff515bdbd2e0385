// 8 float lanes (include <immintrin.h> first, then this inside the tier's namespace).
#define VL 8
#define HAVE_FROM_FP16
#include "vec.h"
INLINE vf from_fp16(const uint16_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
