// Tokens of banded codes (docs/reference/formats.md): rows to the basis that they are stored in, less offsets, fitted
// scales, codes of a width for each band. The definition is src/kvbits/quant/{basis,banded}.py. Rows times a Hadamard
// matrix match it bit for bit; products with a calibrated basis are sums in float64 as there, in another order.
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"
#include "engine/close/plan.h"
#include "engine/close/planes.h"
#include "engine/close/stored_bits.h"
#include "families/plain/params.h"
#include "hadamard.h"
#include "offsets.h"

namespace {

constexpr int SMALLEST_SCALE_CODE = 1, LARGEST_SCALE_CODE = 247;
// Which 8-bit floats are tried around that of a Gaussian token, then in pairs around the best; of turned rows fewer.
constexpr int SCALE_OFFSETS[7] = {1, -4, 4, -2, 2, -1, 1}, TURNED_OFFSETS[5] = {0, -2, 2, -1, 1};

// Half as many numbers as a vector of floats has, as many doubles as its bytes hold: GCC keeps wider ones in memory.
typedef double vd_native __attribute__((vector_size(VL * 4)));
typedef float vf_half __attribute__((vector_size(VL * 2), aligned(4), may_alias));

// Rows from `first` on, R at a time, turned back by the frame (its cosines, then sines, head_dim / 2 of each padded to
// 16), times the basis [head_dim][head_dim]. Rows taken together share what is loaded of the basis. Returns how far it
// came.
template <int R>
static int rows_to_basis(PageBuffers& b, const double* frame, const float* basis, int first, int count, int head_dim) {
  const int width = padded_width(head_dim), half = head_dim / 2, padded = round_up(half, 16);
  double turned[MAX_HEAD_DIM][R];
  int t = first;
  for (; t + R <= count; t += R) {
    for (int r = 0; r < R; r++) {
      const float* x = b.x + (int64_t)(t + r) * width;
      for (int i = 0; i < half; i++) {
        turned[i][r] = (double)x[i] * frame[i] + (double)x[i + half] * frame[padded + i];
        turned[i + half][r] = (double)x[i + half] * frame[i] - (double)x[i] * frame[padded + i];
      }
    }
    for (int c = 0; c < head_dim; c += VL / 2) {
      vd_native sums[R] = {};
      for (int i = 0; i < head_dim; i++) {
        const vd_native a = __builtin_convertvector(*(const vf_half*)(basis + (int64_t)i * head_dim + c), vd_native);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] += a * turned[i][r];
      }
      for (int r = 0; r < R; r++)
        *(vf_half*)(b.x + (int64_t)(t + r) * width + c) = __builtin_convertvector(sums[r], vf_half);
    }
  }
  return t;
}

static void subtract_offsets(PageBuffers& b, const TokensPart& part) {
  const int width = padded_width(part.head_dim);
  for (int i = 0; i < part.count; i++) {
    const float* mean = offsets_of(*part.tensor, part.kv_head, part.head_dim, part.start, part.slot + i);
    for (int c = 0; c < width; c += VL)
      store(b.x + (int64_t)i * width + c, load(b.x + (int64_t)i * width + c) - load(mean + c));
  }
}

INLINE float scale_of_code(int code) { return from_e5m3(splat_int(code))[0]; }

// Code of the nearest 8-bit float, ties up; x is at most the largest one.
static int scale_code(float x) {
  const int code = (to_bits<FLOAT16>(splat(x))[0] + 64) >> 7;
  return code < SMALLEST_SCALE_CODE ? SMALLEST_SCALE_CODE : code > LARGEST_SCALE_CODE ? LARGEST_SCALE_CODE : code;
}

// By channel: the highest code, and the step of a Gaussian's best quantizer, 0 where a channel has no bits.
struct BandSteps {
  alignas(64) float top[MAX_HEAD_DIM + 16], step[MAX_HEAD_DIM + 16];
  float channels;  // that have bits
};

static void fill_steps(BandSteps& s, const kvbits_tensor& t, int head_dim) {
  s.channels = 0.0f;
  for (int c = 0; c < padded_width(head_dim); c++) {
    const int bits = c < head_dim ? t.bands[c / BAND] : 0;
    s.top[c] = (float)((1 << bits) - 1);
    s.step[c] = band_step(bits);
    s.channels += bits ? 1.0f : 0.0f;
  }
}

INLINE vf band_level(vf x, vf inverse, vf top) { return vmin(vmax(round_even(x * inverse + top * 0.5f), vf{}), top); }

// Squared error of a token with the scale of a code, over the channels that have bits.
static float squared_error(const float* x, const BandSteps& s, int width, int code) {
  const vf scale = splat(scale_of_code(code)), inverse = 1.0f / scale;
  vf error = vf{};
  for (int c = 0; c < width; c += VL) {
    const vf y = load(x + c), top = load(s.top + c), missed = y - (band_level(y, inverse, top) - top * 0.5f) * scale;
    error += select(top > vf{}, missed * missed, vf{});
  }
  return sum(error);
}

// The code of a token's scale: that of the least squared error, the first of equals. 0: it overflows.
static int fitted_scale(const float* x, const BandSteps& s, int width, bool turned) {
  vf squares = vf{};
  for (int c = 0; c < width; c += VL) {
    const vf y = load(x + c) * load(s.step + c);
    squares += y * y;
  }
  const float start = __builtin_sqrtf(sum(squares) / s.channels);
  if (!(start <= scale_of_code(LARGEST_SCALE_CODE))) return 0;
  int best = scale_code(start), around = best;
  float least = __builtin_inff();
  for (int i = 0; i < (turned ? 5 : 7); i++) {
    if (i % 2) around = best;
    int code = around + (turned ? TURNED_OFFSETS[i] : SCALE_OFFSETS[i]);
    code = code < SMALLEST_SCALE_CODE ? SMALLEST_SCALE_CODE : code > LARGEST_SCALE_CODE ? LARGEST_SCALE_CODE : code;
    if (const float found = squared_error(x, s, width, code); found < least) least = found, best = code;
  }
  return best;
}

// Scales and codes of all tokens. False when a scale overflows.
static bool code_bands(PageBuffers& b, const TokensPart& part, const BandSteps& steps) {
  const kvbits_tensor& t = *part.tensor;
  const int width = padded_width(part.head_dim);
  for (int i = 0; i < part.count; i++) {
    const float* x = b.x + (int64_t)i * width;
    const int code = fitted_scale(x, steps, width, t.hadamard);
    if (!code) return false;
    part.head[t.scale_offset + part.slot + i] = (uint8_t)code;
    const vf inverse = 1.0f / splat(scale_of_code(code));
    for (int c = 0; c < width; c += VL)
      store_bytes(b.codes + (int64_t)i * width + c,
                  __builtin_convertvector(band_level(load(x + c), inverse, load(steps.top + c)), vi));
  }
  return true;
}

// Each plane as that of a format whose channels are those of the bands that have it.
static void store_bands(PageBuffers& b, const TokensPart& part) {
  const kvbits_tensor& t = *part.tensor;
  const int width = padded_width(part.head_dim);
  PageBuffers fields = b;
  fields.codes = b.more_codes;
  for (int bits = 8, stored = 0; bits; bits /= 2) {
    int channels = 0;
    for (int c = 0; c < part.head_dim; c++) channels += (t.bands[c / BAND] & bits) != 0;
    if (!channels) continue;
    for (int i = 0; i < part.count; i++) {
      const uint8_t* from = b.codes + (int64_t)i * width;
      uint8_t* to = fields.codes + (int64_t)i * padded_width(channels);
      for (int c = 0; c < part.head_dim; c++)
        if (t.bands[c / BAND] & bits) *to++ = (uint8_t)(from[c] >> (t.bands[c / BAND] & (bits - 1)));
    }
    store_plane(fields, {part.is_key, part.page_size, part.slot, part.count}, channels,
                part.head + t.plane_offset[stored++], bits, 0);
  }
}

// Tokens of banded codes from their rows. False when a scale overflows.
static bool store_banded(PageBuffers& b, const TokensPart& part) {
  const kvbits_tensor& t = *part.tensor;
  const int width = padded_width(part.head_dim), n = part.count;
  for (int i = 0; i < n; i++)
    for (int c = part.head_dim; c < width; c++) b.x[(int64_t)i * width + c] = 0.0f;
  if (t.to_basis) {
    const float* basis = t.to_basis + (int64_t)part.kv_head * part.head_dim * part.head_dim;
    rows_to_basis<1>(b, part.turn_start, basis, rows_to_basis<8>(b, part.turn_start, basis, 0, n, part.head_dim), n,
                     part.head_dim);
  }
  for (int i = 0; t.hadamard && i < n; i++) hadamard(b.x + (int64_t)i * width, part.head_dim);
  if (t.offsets) subtract_offsets(b, part);
  BandSteps steps;
  fill_steps(steps, t, part.head_dim);
  if (!code_bands(b, part, steps)) return false;
  store_bands(b, part);
  return true;
}

}  // namespace
