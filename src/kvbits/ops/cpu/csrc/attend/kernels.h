// The kernels of plain pages (codes with scales, FP8, raw rows), by number format and number of query rows.
#pragma once
#include "dots.h"
#include "dots_float.h"
#include "state.h"

namespace {

typedef void (*KeyKernel)(const KeyArgs&);
typedef void (*ValueKernel)(const ValueArgs&);

// Of 1 .. ROWS rows. `there`: a compiler that checks for undefined behaviour does not compare addresses of functions at compile time.
template <class Kernel>
struct ByRows {
  Kernel of[ROWS];
  bool there;
};
static_assert(ROWS == 8, "kernels are listed for 1 to 8 rows");
#define BY_ROWS_OF(f, x) {{f<x, 1>, f<x, 2>, f<x, 3>, f<x, 4>, f<x, 5>, f<x, 6>, f<x, 7>, f<x, 8>}, true}

struct PlainKernels {
  ByRows<KeyKernel> key[NESTED + 1], raw_key[BF16_SPLIT + 1];
  ByRows<ValueKernel> value[NESTED + 1], raw_value[BF16_SPLIT + 1];
  constexpr bool serve(int format) const { return key[format].there && value[format].there; }
  constexpr bool serve_raw(int dtype) const { return raw_key[dtype].there && raw_value[dtype].there; }
};

constexpr PlainKernels plain_kernels_by_format() {
  PlainKernels k = {};
#define INTEGER(format) k.key[format] = BY_ROWS_OF(key_int, format), k.value[format] = BY_ROWS_OF(value_int, format)
#define FLOAT8(format) k.key[format] = BY_ROWS_OF(key_fp8, format), k.value[format] = BY_ROWS_OF(value_fp8, format)
#define ROWS_OF(dtype) k.raw_key[dtype] = BY_ROWS_OF(key_raw, dtype), k.raw_value[dtype] = BY_ROWS_OF(value_raw, dtype)
  INTEGER(KVBITS_INT8);
  INTEGER(KVBITS_INT4);
  INTEGER(KVBITS_INT3);
  INTEGER(KVBITS_INT2);
  INTEGER(NESTED);
  FLOAT8(KVBITS_E4M3);
  FLOAT8(KVBITS_E5M2);
  ROWS_OF(KVBITS_FP32);
  ROWS_OF(KVBITS_FP16);
  ROWS_OF(KVBITS_BF16);
  ROWS_OF(BF16_SPLIT);
#undef INTEGER
#undef FLOAT8
#undef ROWS_OF
  return k;
}

#undef BY_ROWS_OF

constexpr PlainKernels plain_kernels = plain_kernels_by_format();
static_assert(plain_kernels.serve(KVBITS_INT8), "int8 has no kernel");
static_assert(plain_kernels.serve(KVBITS_INT4), "int4 has no kernel");
static_assert(plain_kernels.serve(KVBITS_INT3), "int3 has no kernel");
static_assert(plain_kernels.serve(KVBITS_INT2), "int2 has no kernel");
static_assert(plain_kernels.serve(NESTED), "int4 with a low plane has no kernel");
static_assert(plain_kernels.serve(KVBITS_E4M3), "fp8_e4m3 has no kernel");
static_assert(plain_kernels.serve(KVBITS_E5M2), "fp8_e5m2 has no kernel");
static_assert(plain_kernels.serve_raw(KVBITS_FP32), "raw float32 has no kernel");
static_assert(plain_kernels.serve_raw(KVBITS_FP16), "raw float16 has no kernel");
static_assert(plain_kernels.serve_raw(KVBITS_BF16), "raw bfloat16 has no kernel");
static_assert(plain_kernels.serve_raw(BF16_SPLIT), "raw bfloat16 in split order has no kernel");

// A format added to kvbits_format is raw, looked up in a codebook (codebook_part.h), or has a kernel here.
constexpr bool every_format_is_served() {
  for (int format = 0; format < KVBITS_NUM_FORMATS; format++)
    if ((format == KVBITS_RAW) + is_codebook(format) + plain_kernels.serve(format) != 1) return false;
  return true;
}
static_assert(every_format_is_served(), "a number format has no kernel, or two");

}  // namespace
