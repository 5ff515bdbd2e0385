// Values with codes by band have one width: integers around the middle between two codes, which plain's kernels read.
// Their basis is that of the outputs.
#pragma once
#include "engine/attend/part.h"
#include "hadamard.h"

namespace {

static Tensor describe_banded_values(const kvbits_tensor& t, int head_dim, int64_t pages) {
  kvbits_tensor as_integers = t;
  as_integers.format = integers_of_bits(t.bands[0]);
  Tensor d = describe(as_integers, head_dim, pages);
  d.t = &t;
  d.zero = d.dot_zero = 0.5f * (float)((1 << t.bands[0]) - 1);
  return d;
}

// Outputs to the basis of the part's values, and out of it again: the matrix is its own inverse.
static void turn_outputs(Part& p) {
  for (int i = 0; i < p.num_chunks; i++)
    for (int h = 0; h < p.chunks[i].rows; h++) hadamard(p.chunks[i].acc[h], p.call.value_head_dim);
}

}  // namespace
