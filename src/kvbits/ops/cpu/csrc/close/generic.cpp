// Page closing and checksums of the generic tier. Compiled without fused multiply-add: codes must match the reference bit for bit.
#include "../blob/checksum.h"
#include "close_page.h"
#include "plan.h"
#include "store_tokens.h"

const PageKernels* pages_generic() {
  static const PageKernels kernels = {close_scratch_bytes, close_item, store_item, checksums};
  return &kernels;
}
