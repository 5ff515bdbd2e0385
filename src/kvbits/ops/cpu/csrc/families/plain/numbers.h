// Codes of plain pages as numbers, a vector of tokens (keys) or channels (values) at a time: for tiles and for
// unpacking.
#pragma once
#include "engine/attend/dots_float.h"
#include "engine/attend/tensor.h"

namespace {

// Codes of four neighbours in every word, whatever planes they lie in: `bits` at the bottom of each byte.
struct CodeWords {
  const uint8_t* plane[2];
  int64_t ahead[2];
  int shift[2], bits[2];
};

// Words of both planes as words of codes.
template <int FMT>
INLINE vi joined_codes(vi high, vi low) {
  constexpr int high_bits = plane_bits(FMT, 0), low_bits = plane_bits(FMT, 1);
  return masked(high, (1 << high_bits) - 1) << low_bits | masked(low, (1 << low_bits) - 1);
}

template <int FMT>
INLINE vi code_words(const CodeWords& w, int64_t at0, int64_t at1) {
  fetch(w.plane[0] + at0 + w.ahead[0]);
  const vi x = shifted_down(load_int(w.plane[0] + at0), w.shift[0]);
  if (num_planes(FMT) == 1) return x;
  fetch(w.plane[1] + at1 + w.ahead[1]);
  return joined_codes<FMT>(x, shifted_down(load_int(w.plane[1] + at1), w.shift[1]));
}

// Byte k of every word as a number: 256 more than the code of integers.
template <int FMT>
INLINE vf code_number(vi words, int k) {
  if constexpr (is_int(FMT)) return above_256(words, 8 * k, code_bits(FMT));
  else return fp8_lane<FMT>(words, k);
}
template <int FMT>
constexpr float code_zero() {
  return is_int(FMT) ? 256.0f + (float)(1 << (code_bits(FMT) - 1)) : 0.0f;
}

// Where a page has the words of the keys' channels from `channel` on, of its first tile.
template <int FMT>
INLINE CodeWords key_words(const Tensor& t, const PageView& at, int channel) {
  CodeWords w = {};
  for (int i = 0; i < num_planes(FMT); i++) {
    const int bits = plane_bits(FMT, i), rb = t.row_bytes[i], field = channel / rb;
    w.plane[i] = at.page + t.t->plane_offset[i] + channel % rb * TILE;
    w.shift[i] = field * bits;
    w.ahead[i] = field ? 0 : at.ahead;
  }
  return w;
}

// Token of byte k of a quad's words, of a block.
INLINE int token_of(int quad, int k) { return quad / 2 * 8 + quad % 2 * 2 + (k & 1) + (k & 2) * 2; }

}  // namespace
