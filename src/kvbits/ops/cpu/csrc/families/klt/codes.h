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

// Rows that share what is loaded of a basis, and vectors of columns whose sums are made at once.
constexpr int BASIS_ROWS = 8, BASIS_COLUMNS = VL == 16 ? 2 : 1, BASIS_COLUMNS_OF_ONE = 8;

// Columns from c on of R rows, `turned`, times the basis, C vectors at a time: rows `width` numbers apart. Returns how
// far it came.
template <int R, int C>
INLINE int basis_columns(const double (*turned)[R], const float* basis, int head_dim, int c, float* to, int width) {
  for (; c + C * VL / 2 <= head_dim; c += C * VL / 2) {
    vd_native sums[R][C] = {};
    for (int i = 0; i < head_dim; i++)
#pragma GCC unroll 8
      for (int k = 0; k < C; k++) {
        const vf_half a = *(const vf_half*)(basis + (int64_t)i * head_dim + c + k * VL / 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r][k] += __builtin_convertvector(a, vd_native) * turned[i][r];
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int k = 0; k < C; k++)
        *(vf_half*)(to + r * width + c + k * VL / 2) = __builtin_convertvector(sums[r][k], vf_half);
  }
  return c;
}

// Rows from `first` on, R at a time, turned back by the frame (its cosines, then sines, head_dim / 2 of each padded to
// 16), times the basis [head_dim][head_dim]. Returns how far it came.
template <int R, int C>
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
    float* to = b.x + (int64_t)t * width;
    basis_columns<R, 1>(turned, basis, head_dim, basis_columns<R, C>(turned, basis, head_dim, 0, to, width), to, width);
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

// By channel: half of the highest code, and the step of a Gaussian's best quantizer, 0 where a channel has no bits.
struct BandSteps {
  alignas(64) float half[MAX_HEAD_DIM + 16], step[MAX_HEAD_DIM + 16];
  float channels;  // that have bits
};

static void fill_steps(BandSteps& s, const kvbits_tensor& t, int head_dim) {
  int channels = 0;
  for (int first = 0; first < head_dim; first += BAND) {
    const int bits = t.bands[first / BAND];
    const vf half = splat(0.5f * (float)((1 << bits) - 1)), step = splat(band_step(bits));
    for (int c = first; c < first + BAND; c += VL) store(s.half + c, half), store(s.step + c, step);
    channels += !bits ? 0 : head_dim - first < BAND ? head_dim - first : BAND;
  }
  // the last band may end before its vectors do: what rows have there is 0, and costs nothing with this
  for (int c = head_dim; c < padded_width(head_dim); c++) s.half[c] = s.step[c] = 0.0f;
  s.channels = (float)channels;
}

// Squared error of a token with a scale, over the channels that have bits: others are 0 here and have the level 0.
INLINE vf squared_error(const float* x, const BandSteps& s, int width, vf scale, vf inverse) {
  vf error = vf{};
  for (int c = 0; c < width; c += VL) {
    const vf y = load(x + c), half = load(s.half + c);
    const vf level = vmin(vmax(round_even(y * inverse + half), vf{}), half + half);
    const vf missed = y - (level - half) * scale;
    error += missed * missed;
  }
  return error;
}

// Codes of the 8-bit floats nearest to x, ties up; x is at most the largest one.
INLINE vi scale_codes(vf x) { return (to_bits<FLOAT16>(x) + 64) >> 7; }
INLINE vi within_codes(vi x) {
  return least(greatest(x, splat_int(SMALLEST_SCALE_CODE)), splat_int(LARGEST_SCALE_CODE));
}

// The scale of a Gaussian token, from its sum of squares.
INLINE float gaussian_scale(float squares, const BandSteps& s) { return __builtin_sqrtf(squares / s.channels); }

INLINE vf weighted_squares(const float* x, const BandSteps& s, int width) {
  vf squares = vf{};
  for (int c = 0; c < width; c += VL) {
    const vf y = load(x + c) * load(s.step + c);
    squares += y * y;
  }
  return squares;
}

// A token, in all lanes: what scales are asked of. A sum has the bits that it has among those of many tokens.
struct OneToken {
  static constexpr int VECTORS = 1;
  const float* x;
  const BandSteps& steps;
  int width;

  MEMBER void gaussian_scales(vf (&to)[1]) const {
    to[0] = splat(gaussian_scale(sum_in_all(weighted_squares(x, steps, width))[0], steps));
  }
  MEMBER void errors(const vf (&scale)[1], vf (&to)[1]) const {
    to[0] = sum_in_all(squared_error(x, steps, width, scale[0], 1.0f / scale[0]));
  }
};

// Up to SCALED tokens, one in each lane. Lanes behind the last are 0.
constexpr int SCALED = 16;
struct SomeTokens {
  static constexpr int VECTORS = SCALED / VL;
  const float* x;
  const BandSteps& steps;
  int width, count;

  template <class Of>
  MEMBER void add_up(const Of& of, float* to) const {
    vf sums[SCALED] = {};
    for (int i = 0; i < count; i++) sums[i] = of(i);
    sum_each(sums, SCALED, to);  // no fewer: the order of additions must not depend on it
  }
  MEMBER void gaussian_scales(vf (&to)[VECTORS]) const {
    alignas(64) float total[SCALED] = {};
    add_up([&](int i) { return weighted_squares(x + i * width, steps, width); }, total);
    for (float& t : total) t = gaussian_scale(t, steps);
    for (int j = 0; j < VECTORS; j++) to[j] = load(total + j * VL);
  }
  MEMBER void errors(const vf (&scale)[VECTORS], vf (&to)[VECTORS]) const {
    alignas(64) float total[SCALED] = {}, y[SCALED], inverse[SCALED];
    for (int j = 0; j < VECTORS; j++) store(y + j * VL, scale[j]), store(inverse + j * VL, 1.0f / scale[j]);
    add_up([&](int i) { return squared_error(x + i * width, steps, width, splat(y[i]), splat(inverse[i])); }, total);
    for (int j = 0; j < VECTORS; j++) to[j] = load(total + j * VL);
  }
};

// Codes of the scales of tokens: those of the least squared error, the first of equals. False when one overflows.
template <class Tokens>
static bool fitted_scales(const Tokens& tokens, const kvbits_tensor& t, vi (&best)[Tokens::VECTORS]) {
  constexpr int J = Tokens::VECTORS;
  vf scale[J], error[J], least_error[J];
  vi around[J], code[J];
  tokens.gaussian_scales(scale);
  const vf largest = from_e5m3(splat_int(LARGEST_SCALE_CODE));
  for (int j = 0; j < J; j++) {
    if (any(~(scale[j] <= largest))) return false;
    best[j] = around[j] = within_codes(scale_codes(scale[j]));
    least_error[j] = splat(__builtin_inff());
  }
  for (int k = 0; k < (t.hadamard ? 5 : 7); k++) {
    for (int j = 0; j < J; j++) {
      if (k % 2) around[j] = best[j];
      code[j] = within_codes(around[j] + (t.hadamard ? TURNED_OFFSETS[k] : SCALE_OFFSETS[k]));
      scale[j] = from_e5m3(code[j]);
    }
    tokens.errors(scale, error);
    for (int j = 0; j < J; j++) {
      const vi better = error[j] < least_error[j];
      best[j] = (code[j] & better) | (best[j] & ~better);
      least_error[j] = select(better, error[j], least_error[j]);
    }
  }
  for (int j = 0; j < J && t.fitted; j++) best[j] = greatest(best[j] + FITTED_OFFSET, splat_int(SMALLEST_SCALE_CODE));
  return true;
}

// Scales of all tokens, and in `inverse` the units of a number. False when a scale overflows.
static bool choose_scales(PageBuffers& b, const TokensPart& part, const BandSteps& steps) {
  const kvbits_tensor& t = *part.tensor;
  const int width = padded_width(part.head_dim);
  uint8_t* to = part.head + t.scale_offset + part.slot;
  int i = 0;
  for (int n; i < part.count && (n = part.count - i < SCALED ? part.count - i : SCALED) >= SCALED / 4; i += n) {
    vi code[SomeTokens::VECTORS];
    if (!fitted_scales(SomeTokens{b.x + (int64_t)i * width, steps, width, n}, t, code)) return false;
    for (int k = 0; k < n; k++) to[i + k] = (uint8_t)code[k / VL][k % VL];
    for (int j = 0; j < SomeTokens::VECTORS; j++) store(b.inverse + i + j * VL, (float)UNIT / from_e5m3(code[j]));
  }
  for (; i < part.count; i++) {
    vi code[1];
    if (!fitted_scales(OneToken{b.x + (int64_t)i * width, steps, width}, t, code)) return false;
    to[i] = (uint8_t)code[0][0];
    b.inverse[i] = ((float)UNIT / from_e5m3(code[0]))[0];
  }
  return true;
}

// Numbers of bands without bits become 0, so that no error is theirs; infinite ones become NaNs, which have no scale.
static void clear_empty_bands(PageBuffers& b, const TokensPart& part) {
  const int width = padded_width(part.head_dim);
  for (int first = 0; first < part.head_dim; first += BAND)
    for (int i = 0; i < part.count && !part.tensor->bands[first / BAND]; i++)
      for (float* x = b.x + (int64_t)i * width + first; x < b.x + (int64_t)i * width + first + BAND; x += VL)
        store(x, load(x) - load(x));
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
    const int done = rows_to_basis<BASIS_ROWS, BASIS_COLUMNS>(b, part.turn_start, basis, 0, n, part.head_dim);
    rows_to_basis<1, BASIS_COLUMNS_OF_ONE>(b, part.turn_start, basis, done, n, part.head_dim);
  }
  for (int i = 0; t.hadamard && i < n; i++) hadamard(b.x + (int64_t)i * width, part.head_dim);
  if (t.offsets) subtract_offsets(b, part);
  BandSteps steps;
  fill_steps(steps, t, part.head_dim);
  clear_empty_bands(b, part);
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
