// What close.cpp and store_tokens.cpp hand to a tier's page kernels.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "kvbits_cpu.h"

// Tokens of one tensor (keys or values) of one kv head that go to neighbouring slots of a page.
struct TokensPart {
  const kvbits_tensor* tensor;
  bool is_key, closes;   // closes: they are all tokens of the page, whose scales and mean are taken from them
  int kv_head, page_size, head_dim, dtype, slot, count;
  const void* source;    // [count, head_dim], rows token_stride elements apart
  int64_t token_stride;
  const double* turn_start;  // how keys in a basis are turned back (kvbits_close_call), or null
  int64_t start;         // position of the page's first token, of such keys
  uint8_t* head;         // the head struct; its mean, if it has one and does not close, is there already
};

struct CloseResult {
  int64_t saturated;
  bool nonfinite, overflow;
};

struct UnpackKernels;

struct PageKernels {
  size_t (*close_scratch_bytes)(int page_size, int head_dim);
  void (*store)(const TokensPart& part, void* scratch, CloseResult& result);
  const UnpackKernels* unpack;
  // Rows `first` to `end` of a call: heads of tokens of sequences.
  void (*merge)(const kvbits_merge_call& call, int64_t first, int64_t end);
};

const PageKernels* pages_generic();
const PageKernels* pages_avx2();
const PageKernels* pages_avx512();
const PageKernels* pages_neon();
