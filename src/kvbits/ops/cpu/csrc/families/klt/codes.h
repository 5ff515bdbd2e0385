// Tokens of trellis codes (docs/reference/formats.md): rows to the basis that they are stored in, less offsets, fitted
// scales, codes of a width for each band. The definition is src/kvbits/quant/{basis,scales,trellis,packing}.py. Rows
// times a Hadamard matrix match it bit for bit; products with a calibrated basis are sums in float64 as there, in
// another order.
#pragma once
#include <stdint.h>

#include "engine/close/page_buffers.h"
#include "engine/close/plan.h"
#include "engine/close/planes.h"
#include "engine/close/stored_bits.h"
#include "families/plain/params.h"
#include "hadamard.h"
#include "offsets.h"
#include "trellis.h"

namespace {

constexpr int SMALLEST_SCALE_CODE = 1, LARGEST_SCALE_CODE = 247;
// From the 8-bit float that is best for integers to that of fitted levels.
constexpr int FITTED_OFFSET = -2;
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

// Scales of all tokens, and in `inverse` the units of a number. False when a scale overflows.
static bool choose_scales(PageBuffers& b, const TokensPart& part, const BandSteps& steps) {
  const kvbits_tensor& t = *part.tensor;
  const int width = padded_width(part.head_dim);
  for (int i = 0; i < part.count; i++) {
    int code = fitted_scale(b.x + (int64_t)i * width, steps, width, t.hadamard);
    if (!code) return false;
    if (t.fitted) code = code + FITTED_OFFSET < SMALLEST_SCALE_CODE ? SMALLEST_SCALE_CODE : code + FITTED_OFFSET;
    part.head[t.scale_offset + part.slot + i] = (uint8_t)code;
    b.inverse[i] = UNIT / scale_of_code(code);
  }
  return true;
}

constexpr int RUN = 4;  // neighbouring channels that lie in one field of four bytes
constexpr int MAX_RUNS = MAX_HEAD_DIM / RUN;

// Runs of one ring, or of a band of 8 bits: of `runs` of them the first begins at channel `first`.
struct Ring {
  int first, runs, bits;
};

// Rings of a head, and which runs each plane has.
struct HeadPlan {
  struct Plane {
    int bits, runs, row_words;
    uint8_t run[MAX_RUNS], low[MAX_RUNS];  // run in the head, and the bits of its codes below the plane
    uint8_t* to;
  };
  bool is_key, fitted;
  int apart;  // channels from a ring's run to the next
  int rings, planes;
  Ring ring[MAX_HEAD_DIM / RING];
  Plane plane[4];
};

static void make_plan(HeadPlan& plan, const TokensPart& part) {
  const kvbits_tensor& t = *part.tensor;
  const int head_dim = part.head_dim, bands = (head_dim + BAND - 1) / BAND;
  plan.is_key = part.is_key;
  plan.fitted = t.fitted;
  plan.apart = part.is_key ? RUN : RUN * bands;
  plan.rings = plan.planes = 0;
  for (int i = 0; i < bands; i++) {
    const int first = part.is_key ? i * BAND : i * RUN;
    int runs = 0;
    while (runs < RING / RUN && first + runs * plan.apart < head_dim) runs++;
    if (t.bands[i]) plan.ring[plan.rings++] = {first, runs, t.bands[i]};
  }
  for (int bits = 8; bits; bits /= 2) {
    HeadPlan::Plane& plane = plan.plane[plan.planes];
    plane.runs = 0;
    for (int i = 0; i < bands; i++)
      for (int run = i * BAND / RUN; t.bands[i] & bits && run < (i + 1) * BAND / RUN && run * RUN < head_dim; run++) {
        plane.run[plane.runs] = (uint8_t)run;
        plane.low[plane.runs++] = t.bands[i] & (bits - 1);
      }
    if (!plane.runs) continue;
    plane.bits = bits;
    plane.row_words = row_bytes_of(plane.runs * RUN, bits) / 4;
    plane.to = part.head + t.plane_offset[plan.planes++];
  }
}

// Word w of a plane's row, from the codes of runs, four bytes each: vectors of them or one.
template <class V>
INLINE V plane_word(const V* codes, const HeadPlan& plan, const HeadPlan::Plane& plane, int w) {
  const int fields = 8 / plane.bits, mask = ((1 << plane.bits) - 1) * 0x01010101;
  V word = V{};
  for (int i = 0; i < fields; i++) {
    const int k = plan.is_key ? w * fields + i : w + i * plane.row_words;
    if (k < plane.runs) word |= (codes[plane.run[k]] >> plane.low[k] & mask) << i * plane.bits;
  }
  return word;
}

// VL rings of the same length: where each has its first channel, its units of a number, and what its width says.
struct RingLanes {
  const float* at[VL];
  alignas(64) float inverse[VL];
  alignas(64) int32_t first[VL], most[VL];
};

INLINE void put_lane(RingLanes& lanes, int i, const float* at, float inverse, int bits) {
  lanes.at[i] = at;
  lanes.inverse[i] = inverse;
  lanes.first[i] = UNIT / 4 * (1 - (2 << bits));
  lanes.most[i] = (1 << bits) / 2 - 1;
}

// The codes of each run, a channel in each byte: of rings, or of bands of 8 bits.
static void code_lanes(const RingLanes& lanes, const HeadPlan& plan, int runs, bool alone, vi (&codes)[RING / RUN]) {
  const vf inverse = load(lanes.inverse);
  vi u[RING];
  // places of a run's channels in a ring: neighbours of keys lie in other runs, those of values in theirs
  const int by_run = plan.is_key ? 1 : RUN, by_channel = plan.is_key ? runs : 1;
  for (int run = 0; run < runs; run++) {
    vf x[RUN];
    load_fours(lanes.at, run * plan.apart, x);
    for (int n = 0; n < RUN; n++)
      u[run * by_run + n * by_channel] =
          round_to_int(vmin(vmax(x[n] * inverse, splat(-(float)FARTHEST)), splat((float)FARTHEST)));
  }
  const vi first = load_int(lanes.first), most = load_int(lanes.most);
  if (alone)
    for (int t = 0; t < RUN * runs; t++)  // the nearest of levels a scale apart, the lower one of two
      u[t] = least(greatest((u[t] + (UNIT / 2 * 256 - 1)) >> 6, vi{}), splat_int(255));
  else if (plan.fitted) code_rings<FittedLevels>(u, first, most, RUN * runs);
  else code_rings<UniformLevels>(u, first, most, RUN * runs);
  for (int run = 0; run < runs; run++) {
    const vi* of = u + run * by_run;
    codes[run] = of[0] | of[by_channel] << 8 | of[2 * by_channel] << 16 | of[3 * by_channel] << 24;
  }
}
static_assert(UNIT == 64, "shifts divide by it");

// 16 tokens that fill a tile of keys, or two groups of eight values: codes and bytes by token in each lane.
static void store_tile(const PageBuffers& b, const TokensPart& part, const HeadPlan& plan, int token) {
  static const int order[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  const int width = padded_width(part.head_dim), slot = part.slot + token;
  for (int lane = 0; lane < TILE; lane += VL) {
    vi codes[MAX_RUNS];
    RingLanes lanes;
    const float* row[VL];
    for (int i = 0; i < VL; i++) {
      const int of = token + (part.is_key ? lane + i : (lane + i) / 8 * 8 + order[(lane + i) % 8]);
      row[i] = b.x + (int64_t)of * width;
      put_lane(lanes, i, row[i], b.inverse[of], 0);
    }
    for (int k = 0, bits = 0; k < plan.rings; k++) {
      const Ring& ring = plan.ring[k];
      for (int i = 0; i < VL; i++) lanes.at[i] = row[i] + ring.first;
      if (ring.bits != bits)
        for (int i = 0; i < VL; i++) put_lane(lanes, i, lanes.at[i], lanes.inverse[i], ring.bits);
      bits = ring.bits;
      vi found[RING / RUN];
      code_lanes(lanes, plan, ring.runs, bits == 8, found);
      for (int run = 0; run < ring.runs; run++) codes[(ring.first + run * plan.apart) / RUN] = found[run];
    }
    for (int i = 0; i < plan.planes; i++) {
      const HeadPlan::Plane& plane = plan.plane[i];
      const int row_bytes = 4 * plane.row_words;
      for (int w = 0; w < plane.row_words; w++) {
        const vi word = plane_word(codes, plan, plane, w);
        if (part.is_key) {
          *(vi_mem*)(plane.to + slot * row_bytes + (w * TILE + lane) * 4) = word;
          continue;
        }
        const int block = w / 4 * 16, across = row_bytes - block < 16 ? row_bytes - block : 16;
        store_fours(plane.to + block * part.page_size + (slot + lane) * across + w % 4 * 16, 4 * across, word);
      }
    }
  }
}

// Some tokens, fewer than a tile or not at its begin: rings of any tokens side by side in lanes.
static void store_some(PageBuffers& b, const TokensPart& part, const HeadPlan& plan, int token, int count) {
  const int width = padded_width(part.head_dim);
  RingLanes lanes;
  uint8_t* to[VL];
  int taken = 0, runs = 0;
  bool alone = false;
  auto code = [&] {
    for (int i = taken; i < VL; i++) put_lane(lanes, i, lanes.at[0], lanes.inverse[0], 1);
    vi codes[RING / RUN];
    if (taken) code_lanes(lanes, plan, runs, alone, codes);
    for (int run = 0; run < runs; run++)
      for (int i = 0; i < taken; i++) {
        const int32_t four = codes[run][i];
        __builtin_memcpy(to[i] + run * plan.apart, &four, RUN);
      }
    taken = 0;
  };
  for (int i = token; i < token + count; i++)
    for (int k = 0; k < plan.rings; k++) {
      const Ring& ring = plan.ring[k];
      if (taken == VL || ring.runs != runs || alone != (ring.bits == 8)) code();
      runs = ring.runs;
      alone = ring.bits == 8;
      put_lane(lanes, taken, b.x + (int64_t)i * width + ring.first, b.inverse[i], ring.bits);
      to[taken++] = b.codes + (int64_t)i * width + ring.first;
    }
  code();
  for (int k = 0; k < plan.planes; k++) {
    const HeadPlan::Plane& plane = plan.plane[k];
    for (int i = 0; i < count; i++)
      for (int w = 0; w < plane.row_words; w++)
        ((int32_t*)b.rows)[i * plane.row_words + w] =
            plane_word((const int32_t*)(b.codes + (int64_t)(token + i) * width), plan, plane, w);
    scatter_rows(b, {part.is_key, part.page_size, part.slot + token, count}, plane.to, 4 * plane.row_words);
  }
}

// Tokens of trellis codes from their rows. False when a scale overflows.
static bool store_trellis(PageBuffers& b, const TokensPart& part) {
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
  if (!choose_scales(b, part, steps)) return false;
  HeadPlan plan;
  make_plan(plan, part);
  for (int i = 0; i < n;) {
    const int left = n - i, to_tile = TILE - (part.slot + i) % TILE;
    if (to_tile == TILE && left >= TILE) {
      store_tile(b, part, plan, i);
      i += TILE;
    } else {
      const int some = left < to_tile ? left : to_tile;
      store_some(b, part, plan, i, some);
      i += some;
    }
  }
  return true;
}

}  // namespace
