// The kernels of plain pages (codes with scales, FP8, raw rows), by number format and number of query rows.
#pragma once
#include "engine/attend/dots.h"
#include "engine/attend/dots_float.h"
#include "engine/attend/state.h"

namespace {

typedef void (*KeyKernel)(const KeyArgs&);
typedef void (*ValueKernel)(const ValueArgs&);

#define BY_ROWS_OF(f, x) {{f<x, 1>, f<x, 2>, f<x, 3>, f<x, 4>, f<x, 5>, f<x, 6>, f<x, 7>, f<x, 8>}, true}

struct PlainKernels {
  ByRows<KeyKernel> key[NUM_FORMATS], raw_key[BF16_SPLIT + 1];
  ByRows<ValueKernel> value[NUM_FORMATS], raw_value[BF16_SPLIT + 1];
  constexpr bool serve(int format) const { return key[format].there && value[format].there; }
};

// Formats from FORMAT on: what a format's codes are multiplied with follows from the table of numbers.h.
template <int FORMAT>
constexpr void add_formats(PlainKernels& k) {
  if constexpr (is_int(FORMAT))
    k.key[FORMAT] = BY_ROWS_OF(key_int, FORMAT), k.value[FORMAT] = BY_ROWS_OF(value_int, FORMAT);
  else if constexpr (is_float(FORMAT))
    k.key[FORMAT] = BY_ROWS_OF(key_fp8, FORMAT), k.value[FORMAT] = BY_ROWS_OF(value_fp8, FORMAT);
  if constexpr (FORMAT + 1 < NUM_FORMATS) add_formats<FORMAT + 1>(k);
}

template <int DTYPE>
constexpr void add_raw(PlainKernels& k) {
  k.raw_key[DTYPE] = BY_ROWS_OF(key_raw, DTYPE), k.raw_value[DTYPE] = BY_ROWS_OF(value_raw, DTYPE);
  if constexpr (DTYPE < BF16_SPLIT) add_raw<DTYPE + 1>(k);
}

constexpr PlainKernels plain_kernels_by_format() {
  PlainKernels k = {};
  add_formats<0>(k);
  add_raw<0>(k);
  return k;
}

#undef BY_ROWS_OF

constexpr PlainKernels plain_kernels = plain_kernels_by_format();

constexpr bool every_dtype_is_served() {
  for (int dtype = 0; dtype <= BF16_SPLIT; dtype++)
    if (!plain_kernels.raw_key[dtype].there || !plain_kernels.raw_value[dtype].there) return false;
  return true;
}
static_assert(every_dtype_is_served(), "raw rows of a dtype have no kernel");

}  // namespace
