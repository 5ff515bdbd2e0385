// Page closing and checksums of the avx512 tier. Compiled without fused multiply-add: codes must match the reference bit for bit.
#define KVBITS_AVX512
#include "engine/blob/checksum.h"
#include "families/close.h"
#include "plan.h"

const PageKernels* pages_avx512() {
  static const PageKernels kernels = {close_scratch_bytes, store_tokens, checksums};
  return &kernels;
}
