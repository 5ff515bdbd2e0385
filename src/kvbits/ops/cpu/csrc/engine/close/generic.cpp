// Page closing and checksums of the generic tier. Compiled without fused multiply-add: codes must match the reference bit for bit.
#include "engine/blob/checksum.h"
#include "families/close.h"
#include "plan.h"

const PageKernels* pages_generic() {
  static const PageKernels kernels = {close_scratch_bytes, store_tokens, checksums};
  return &kernels;
}
