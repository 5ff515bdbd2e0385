// 16 float lanes (include <immintrin.h> first, then this inside the tier's namespace).
#define VL 16
#define HAVE_FROM_FP16
#define HAVE_REDUCE
#include "vec.h"
INLINE vf from_fp16(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
