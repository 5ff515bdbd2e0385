// What unpack.cpp hands to a tier.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kvbits_cpu.h"

struct UnpackKernels {
  size_t scratch_bytes;
  // Entries `first` to `end` of a call, of one kv head.
  void (*unpack)(const kvbits_unpack_call& call, int kv_head, int64_t first, int64_t end, void* scratch);
};

const UnpackKernels* unpack_generic();
const UnpackKernels* unpack_avx2();
const UnpackKernels* unpack_avx512();
const UnpackKernels* unpack_neon();
