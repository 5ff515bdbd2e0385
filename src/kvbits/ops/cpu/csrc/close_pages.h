// close_pages of one tier: one kv head's raw page to scales, codes and stored bytes, in one pass over the raw page.
// The definition is src/kvbits/quant/qparams.py and packing.py; scales and integer codes match it bit for bit, so this
// file is compiled without fused multiply-add (x * (1 / scale) must be rounded before it is rounded to a code).

// Buffers of one (page, head, tensor), carved from the thread's scratch. `width` is head_dim padded to whole vectors.
struct PageBuffers {
  float* x;        // [page_size][width]
  uint8_t* codes;  // [page_size + 16][width]; the rest stays room for vector stores
  uint8_t* rows;   // [page_size][row_bytes + 16]
  float *low, *high, *inverse, *scale, *bias;  // [groups][page_size] or [width]
  float* mean;     // [width]
  // For outliers only.
  float* raw;      // x before its mean was taken: [page_size][width]
  int32_t *keys, *most;              // ranks: [page_size][width], and the largest of some tokens
  int32_t *candidates, *ranks, *listed;  // elements, up to [page_size][width]
  int32_t* wins;                     // [4][groups]
  float *lows, *highs;               // [5][groups]
  float* stretch;                    // [page_size]
  uint8_t* outside;                  // [page_size]: whether a token has elements past the ends of its ranges
};

INLINE int padded_width(int head_dim) { return round_up(head_dim, 16); }

// Lays the buffers out from `scratch` on; returns the bytes they take.
static size_t carve(PageBuffers& b, char* scratch, int page_size, int head_dim) {
  const size_t w = padded_width(head_dim), params = (size_t)page_size * MAX_GROUPS + w + 64, page = (size_t)(page_size + 16) * w;
  size_t end = 0;
  auto take = [&](size_t bytes) {
    char* p = scratch ? scratch + end : nullptr;
    end += (bytes + 63) / 64 * 64;
    return p;
  };
  b.x = (float*)take(page * 4);
  b.codes = (uint8_t*)take(page);
  b.rows = (uint8_t*)take((size_t)page_size * (w + 16));
  b.low = (float*)take(params * 4);
  b.high = (float*)take(params * 4);
  b.inverse = (float*)take(params * 4);
  b.scale = (float*)take(params * 4);
  b.bias = (float*)take(params * 4);
  b.mean = (float*)take(w * 4);
  b.raw = (float*)take(page * 4);
  b.keys = (int32_t*)take(page * 4);
  b.most = (int32_t*)take(page / 8 * 4);
  b.candidates = (int32_t*)take(page * 4);
  b.ranks = (int32_t*)take(page * 4);
  b.listed = (int32_t*)take(page * 4);
  b.wins = (int32_t*)take(4 * params * 4);
  b.lows = (float*)take(5 * params * 4);
  b.highs = (float*)take(5 * params * 4);
  b.stretch = (float*)take((size_t)page_size * 4);
  b.outside = (uint8_t*)take((size_t)page_size);
  return end;
}

static size_t close_scratch_bytes(int page_size, int head_dim) {
  PageBuffers b;
  return carve(b, nullptr, page_size, head_dim);
}

// ---- storage dtypes ----

// The 16 (or 32) bits that store x, rounded to nearest even.
template <int DTYPE>
INLINE vi to_bits(vf x) {
  const vi bits = (vi)x, sign = (bits >> 31) & 1, mag = bits & 0x7fffffff;
  const vu wraps = (vu)mag;  // lanes behind the last number may hold anything, NaNs that overflow when rounded too
  if (DTYPE == KVBITS_FP32) return bits;
  if (DTYPE == KVBITS_BF16) return (vi)((wraps + 0x7fff + ((wraps >> 16) & 1)) >> 16) | (sign << 15);
  const vi normal = (vi)((wraps + 0xc8000fff + ((wraps >> 13) & 1)) >> 13);  // rebias by -112, round
  const vi tiny = (vi)((vf)mag + 0.5f) - 0x3f000000;                    // units of 2^-24
  const vi small = mag < splat_int(0x38800000), large = mag >= splat_int(0x477ff000);
  const vi half = (tiny & small) | (normal & ~small & ~large) | (0x7c00 & large);
  return half | (sign << 15);
}

template <int DTYPE>
INLINE vf from_bits(vi bits) {
  if (DTYPE == KVBITS_FP32) return (vf)bits;
  if (DTYPE == KVBITS_BF16) return (vf)(bits << 16);
  const vi mag = bits & 0x7fff;
  vf x = (vf)(mag << 13) * 0x1p112f;
  x = select(mag >= splat_int(0x7c00), (vf)((mag << 13) | 0x7f800000), x);
  return (vf)((vi)x | ((bits & 0x8000) << 16));
}

template <int DTYPE>
INLINE void store_bits(void* base, int64_t i, vi bits, int n) {
  for (int k = 0; k < n; k++) {
    if (DTYPE == KVBITS_FP32) ((int32_t*)base)[i + k] = bits[k];
    else ((uint16_t*)base)[i + k] = (uint16_t)bits[k];
  }
}

INLINE bool all_finite(vf x) {
  const vi bad = ((vi)x & 0x7f800000) == splat_int(0x7f800000);
  int any = 0;
  for (int i = 0; i < VL; i++) any |= bad[i];
  return !any;
}

// A subnormal fp16 scale is rounded up: rounding down could push the group's largest element past the last code. None is 0 (a group
// without spread), and none of fp32 or bf16 subnormal: its reciprocal would be infinite.
template <int DTYPE>
INLINE vi scale_bits(vf scale) {
  if (DTYPE != KVBITS_FP16) return to_bits<DTYPE>(vmax(scale, splat(0x1p-126f)));
  const vf units = scale * 0x1p24f;
  vf up = (units + 8388608.0f) - 8388608.0f;
  up = vmax(select(up < units, up + 1.0f, up), splat(1.0f));
  return (vi)select(scale < splat(0x1p-14f), (vf)__builtin_convertvector(up, vi), (vf)to_bits<DTYPE>(scale));
}

template <int DTYPE>
INLINE vi bits_below(vf x) {
  const vi bits = to_bits<DTYPE>(x);
  if (DTYPE == KVBITS_FP32) return bits;
  const vf y = from_bits<DTYPE>(bits);
  const vi positive = y > vf{}, zero = y == vf{};
  const vi lower = ((bits - 1) & positive) | (0x8001 & zero) | ((bits + 1) & ~positive & ~zero);
  const vi above = y > x;
  return (lower & above) | (bits & ~above);
}

// ---- stages ----

// Raw rows to fp32, zero behind head_dim. False when an element is NaN or infinite.
template <int DTYPE>
static bool load_page(PageBuffers& b, const void* source, int64_t stride, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  vi top = vi{};
  for (int t = 0; t < page_size; t++) {
    float* to = b.x + (int64_t)t * width;
    int i = 0;
    for (; i + VL <= head_dim; i += VL) {
      const vf x = load_as<DTYPE>(source, t * stride + i);
      store(to + i, x);
      const vi mag = (vi)x & 0x7fffffff;
      top = (mag > top ? mag : top);
    }
    if (i < head_dim) {
      const vf x = load_first<DTYPE>(source, t * stride + i, head_dim - i);
      store(to + i, x);
      const vi mag = (vi)x & 0x7fffffff;
      top = (mag > top ? mag : top);
    }
  }
  return all_finite((vf)top);
}

template <int DTYPE>
static bool subtract_mean(PageBuffers& b, uint8_t* stored, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  typedef double vd __attribute__((vector_size(VL * 8)));
  bool ok = true;
  for (int c = 0; c < head_dim; c += VL) {
    vd total = vd{};
    for (int t = 0; t < page_size; t++) total += __builtin_convertvector(load(b.x + (int64_t)t * width + c), vd);
    const vi bits = to_bits<DTYPE>(__builtin_convertvector(total / (double)page_size, vf));
    const vf mean = from_bits<DTYPE>(bits);
    ok &= all_finite(mean);
    const int n = head_dim - c < VL ? head_dim - c : VL;
    store_bits<DTYPE>(stored, c, bits, n);
    store(b.mean + c, mean);
    for (int t = 0; t < page_size; t++) {
      float* x = b.x + (int64_t)t * width + c;
      store(x, load(x) - mean);
    }
  }
  return ok;
}

// Smallest and largest element of every group, [groups][page_size].
static void range_by_token(PageBuffers& b, int page_size, int head_dim, int groups) {
  const int width = padded_width(head_dim), size = head_dim / groups;
  for (int t = 0; t < page_size; t++)
    for (int g = 0; g < groups; g++) {
      const float* x = b.x + (int64_t)t * width + g * size;
      float low = x[0], high = x[0];
      int i = 0;
      if (size >= VL) {
        vf lo = load(x), hi = lo;
        for (i = VL; i + VL <= size; i += VL) {
          lo = vmin(lo, load(x + i));
          hi = vmax(hi, load(x + i));
        }
        low = -max_of(-lo);
        high = max_of(hi);
      }
      for (; i < size; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
      }
      b.low[g * page_size + t] = low;
      b.high[g * page_size + t] = high;
    }
}

static void range_by_channel(PageBuffers& b, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  for (int c = 0; c < head_dim; c += VL) {
    vf lo = load(b.x + c), hi = lo;
    for (int t = 1; t < page_size; t++) {
      const vf x = load(b.x + (int64_t)t * width + c);
      lo = vmin(lo, x);
      hi = vmax(hi, x);
    }
    store(b.low + c, lo);
    store(b.high + c, hi);
  }
}

// n scales (and biases) from the ranges, stored, and kept as scale, 1 / scale and bias. `middle`: the bias lies in the middle of the range, not below
// it. False on overflow.
template <int DTYPE>
static bool choose_params(PageBuffers& b, int n, float q_max, bool middle, uint8_t* scale_to, uint8_t* bias_to) {
  bool ok = true;
  for (int i = 0; i < n; i += VL) {
    const int m = n - i < VL ? n - i : VL;
    const vf low = load(b.low + i), high = load(b.high + i);
    vf spread = vmax(-low, high);
    if (bias_to) {
      const vi bits = middle ? to_bits<DTYPE>(low + (high - low) * 0.5f) : bits_below<DTYPE>(low);
      const vf bias = from_bits<DTYPE>(bits);
      store_bits<DTYPE>(bias_to, i, bits, m);
      store(b.bias + i, bias);
      spread = middle ? vmax(high - bias, bias - low) : high - bias;
    }
    spread = (vf)((vi)spread & 0x7fffffff);  // a channel of -0.0 has spread -0.0
    const vi bits = scale_bits<DTYPE>(spread / q_max);
    const vf scale = from_bits<DTYPE>(bits);
    store_bits<DTYPE>(scale_to, i, bits, m);
    store(b.inverse + i, 1.0f / scale);
    store(b.scale + i, scale);
    for (int k = 0; k < m; k++) ok &= __builtin_isfinite(scale[k]) && (!bias_to || __builtin_isfinite(b.bias[i + k]));
  }
  return ok;
}

struct CodeRange {
  float low, high, zero;  // integer codes; FP8: -/+ the largest finite value, and where rounding would pass it
};

template <int FMT>
INLINE vi code_of(vf scaled, const CodeRange& r, vi& saturated) {
  if (is_int(FMT)) {
    // The clamp keeps the rounding trick in its range and changes no code.
    const vf code = round_even(vmin(vmax(scaled, splat(-1048576.0f)), splat(1048576.0f))) + r.zero;
    saturated += (code < splat(r.low)) | (code > splat(r.high));
    return __builtin_convertvector(vmin(vmax(code, splat(r.low)), splat(r.high)), vi);
  }
  const vi sign = ((vi)scaled >> 24) & 0x80;
  const vf mag = (vf)((vi)scaled & 0x7fffffff);
  saturated += mag >= splat(r.zero);
  const vi bits = (vi)vmin(mag, splat(r.high));
  const int up = FMT == KVBITS_E4M3 ? 20 : 21;
  const int rebias = (int)((FMT == KVBITS_E4M3 ? 7u - 127u : 15u - 127u) << 23);
  const vi normal = (bits + rebias + ((1 << (up - 1)) - 1) + ((bits >> up) & 1)) >> up;
  const float unit = FMT == KVBITS_E4M3 ? 16384.0f : 128.0f;  // its last bit is the smallest subnormal
  const vi tiny = (vi)((vf)bits + unit) - (vi)splat(unit);
  const vi small = bits < splat_int(FMT == KVBITS_E4M3 ? 121 << 23 : 113 << 23);
  return (((tiny & small) | (normal & ~small)) & 0x7f) | sign;
}

// One token's reciprocal scales and biases of [groups][page_size], channel by channel.
INLINE void spread_over_channels(const PageBuffers& b, int t, int page_size, int head_dim, int size, bool has_bias, float* inverse, float* bias) {
  for (int c = 0; c < head_dim; c++) {
    inverse[c] = b.inverse[c / size * page_size + t];
    if (has_bias) bias[c] = b.bias[c / size * page_size + t];
  }
}

// Codes of the whole page. `by_token`: inverse and bias are [groups][page_size], else [width].
template <int FMT>
static int64_t make_codes(PageBuffers& b, int page_size, int head_dim, int groups, bool by_token, bool has_bias, const CodeRange& range) {
  const int width = padded_width(head_dim), size = head_dim / groups;
  const bool splats = by_token && size % VL == 0;
  int64_t count = 0;
  alignas(64) float inverse[MAX_HEAD_DIM + 16] = {}, bias[MAX_HEAD_DIM + 16] = {};
  vi saturated = vi{};
  for (int t = 0; t < page_size; t++) {
    const float* x = b.x + (int64_t)t * width;
    uint8_t* to = b.codes + (int64_t)t * width;
    if (splats) {
      for (int g = 0; g < groups; g++) {
        const vf k = splat(b.inverse[g * page_size + t]), low = has_bias ? splat(b.bias[g * page_size + t]) : vf{};
        for (int c = g * size; c < (g + 1) * size; c += VL) store_bytes(to + c, code_of<FMT>((load(x + c) - low) * k, range, saturated));
      }
    } else {
      if (by_token) spread_over_channels(b, t, page_size, head_dim, size, has_bias, inverse, bias);
      const float* k = by_token ? inverse : b.inverse;
      const float* low = by_token ? bias : b.bias;
      for (int c = 0; c < head_dim; c += VL) {
        vi clamped = vi{};
        const vf y = has_bias ? load(x + c) - load(low + c) : load(x + c);
        vi codes = code_of<FMT>(y * load(k + c), range, clamped);
        const vi inside = iota() < splat_int(head_dim - c);
        saturated += clamped & inside;
        store_bytes(to + c, codes & inside);
      }
    }
  }
  for (int i = 0; i < VL; i++) count -= saturated[i];
  return count;
}

// The low plane (src/kvbits/quant/nested.py): what the codes miss, `levels` steps to a code. It takes the place of the codes.
template <int FMT>
static void make_low_codes(PageBuffers& b, int page_size, int head_dim, int groups, bool by_token, bool has_bias, const CodeRange& range, int bits) {
  const int width = padded_width(head_dim), size = head_dim / groups;
  const float levels = (float)((1 << bits) - 1), limit = (float)(((1 << bits) - 1) / 2), zero = (float)(1 << (bits - 1));
  alignas(64) float inverse[MAX_HEAD_DIM + 16] = {}, bias[MAX_HEAD_DIM + 16] = {};
  for (int t = 0; t < page_size; t++) {
    const float* x = b.x + (int64_t)t * width;
    uint8_t* to = b.codes + (int64_t)t * width;
    if (by_token) spread_over_channels(b, t, page_size, head_dim, size, has_bias, inverse, bias);
    const float* k = by_token ? inverse : b.inverse;
    const float* low = by_token ? bias : b.bias;
    for (int c = 0; c < head_dim; c += VL) {
      const vf y = has_bias ? load(x + c) - load(low + c) : load(x + c);
      const vf scaled = y * load(k + c);
      vi clamped = vi{};
      const vf code = __builtin_convertvector(code_of<FMT>(scaled, range, clamped), vf);
      const vf missed = (scaled - (code - range.zero)) * levels;
      const vf r = vmin(vmax(round_even(vmin(vmax(missed, splat(-1048576.0f)), splat(1048576.0f))), splat(-limit)), splat(limit));
      store_bytes(to + c, __builtin_convertvector(r + zero, vi) & (iota() < splat_int(head_dim - c)));
    }
  }
}

// One bit plane: fields of `bits` bits at `shift` of each code, packed into rows.
static void pack_rows(PageBuffers& b, int page_size, int head_dim, int row_bytes, int bits, int shift) {
  const int width = padded_width(head_dim), mask = (1 << bits) - 1;
  for (int t = 0; t < page_size; t++) {
    const uint8_t* codes = b.codes + (int64_t)t * width;
    uint8_t* row = b.rows + (int64_t)t * row_bytes;
    for (int i = 0; i * row_bytes < head_dim; i++) {
      const int n = head_dim - i * row_bytes < row_bytes ? head_dim - i * row_bytes : row_bytes, up = i * bits;
      const uint8_t* from = codes + i * row_bytes;
      if (i)
        for (int r = 0; r < n; r++) row[r] |= (uint8_t)((from[r] >> shift & mask) << up);
      else
        for (int r = 0; r < n; r++) row[r] = (uint8_t)(from[r] >> shift & mask);
    }
  }
}

static void interleave_keys(const PageBuffers& b, uint8_t* to, int page_size, int row_bytes) {
  for (int t = 0; t < page_size; t += TILE)
    for (int r = 0; r < row_bytes; r += 4)
      for (int i = 0; i < TILE; i++, to += 4) __builtin_memcpy(to, b.rows + (int64_t)(t + i) * row_bytes + r, 4);
}

// Four tokens' bytes side by side: a vector of 32-bit words is the or of four shifted rows.
static void interleave_values(const PageBuffers& b, uint8_t* to, int page_size, int row_bytes) {
  static const int order[8] = {0, 1, 4, 5, 2, 3, 6, 7};
  for (int block = 0; block < row_bytes; block += 16) {
    const int width = row_bytes - block < 16 ? row_bytes - block : 16;
    for (int quad = 0; quad < page_size / 4; quad++, to += 4 * width) {
      const uint8_t* row[4];
      for (int u = 0; u < 4; u++) row[u] = b.rows + (int64_t)(quad / 2 * 8 + order[quad % 2 * 4 + u]) * row_bytes + block;
      int r = 0;
      for (; r + VL <= width; r += VL) {
        vi word = vi{};
        for (int u = 0; u < 4; u++) word |= load_bytes(row[u] + r) << (8 * u);
        *(vi_mem*)(to + 4 * r) = word;
      }
      for (; r < width; r++)
        for (int u = 0; u < 4; u++) to[4 * r + u] = row[u][r];
    }
  }
}

// ---- one tensor of one head ----

template <int DTYPE>
static void store_raw(const PageBuffers& b, uint8_t* to, int page_size, int head_dim) {
  const int width = padded_width(head_dim);
  for (int t = 0; t < page_size; t++)
    for (int c = 0; c < head_dim; c += VL)
      store_bits<DTYPE>(to, (int64_t)t * head_dim + c, to_bits<DTYPE>(load(b.x + (int64_t)t * width + c)), head_dim - c < VL ? head_dim - c : VL);
}

template <int FMT>
static CodeRange code_range(bool symmetric) {
  if (FMT == KVBITS_E4M3) return {-448.0f, 448.0f, 464.0f};
  if (FMT == KVBITS_E5M2) return {-57344.0f, 57344.0f, 61440.0f};
  const float top = (float)((1 << code_bits(FMT)) - 1);
  return {symmetric ? 1.0f : 0.0f, top, symmetric ? int_zero(FMT) : 0.0f};
}

static CodeRange range_of(const kvbits_tensor& t) {
  const float top = (float)((1 << code_bits(t.format)) - 1);
  return {t.symmetric ? 1.0f : 0.0f, top, t.symmetric ? int_zero(t.format) : 0.0f};
}

static int64_t codes_of_format(PageBuffers& b, const kvbits_tensor& t, int page_size, int head_dim, int groups, bool by_token, bool has_bias) {
  const bool s = t.symmetric;
#define CASE(F) \
  case F: return make_codes<F>(b, page_size, head_dim, groups, by_token, has_bias, code_range<F>(s))
  switch (t.format) {
    CASE(KVBITS_INT8);
    CASE(KVBITS_INT4);
    CASE(KVBITS_INT3);
    CASE(KVBITS_INT2);
    CASE(KVBITS_E4M3);
    default: return make_codes<KVBITS_E5M2>(b, page_size, head_dim, groups, by_token, has_bias, code_range<KVBITS_E5M2>(s));
  }
#undef CASE
}

static void low_codes_of_format(PageBuffers& b, const kvbits_tensor& t, int page_size, int head_dim, int groups, bool by_token, bool has_bias, int bits) {
  const bool s = t.symmetric;
#define CASE(F) \
  case F: return make_low_codes<F>(b, page_size, head_dim, groups, by_token, has_bias, code_range<F>(s), bits)
  switch (t.format) {
    CASE(KVBITS_INT8);
    CASE(KVBITS_INT4);
    CASE(KVBITS_INT3);
    default: return make_low_codes<KVBITS_INT2>(b, page_size, head_dim, groups, by_token, has_bias, code_range<KVBITS_INT2>(s), bits);
  }
#undef CASE
}

#include "close_kvquant.h"

static float q_max_of(const kvbits_tensor& t) {
  if (is_codebook(t.format)) return 1.0f;
  if (t.format == KVBITS_E4M3) return 448.0f;
  if (t.format == KVBITS_E5M2) return 57344.0f;
  return (float)(t.symmetric ? (1 << (code_bits(t.format) - 1)) - 1 : (1 << code_bits(t.format)) - 1);
}

template <int DTYPE>
static bool make_params(PageBuffers& b, const kvbits_tensor& t, uint8_t* head, int page_size, int head_dim, int groups, bool by_token) {
  bool ok = true;
  uint8_t* bias = t.bias_offset >= 0 ? head + t.bias_offset : nullptr;
  if (t.mean_offset >= 0) {
    if (t.num_outliers) __builtin_memcpy(b.raw, b.x, (size_t)page_size * padded_width(head_dim) * 4);
    ok = subtract_mean<DTYPE>(b, head + t.mean_offset, page_size, head_dim);
  }
  if (t.num_outliers) (bias ? trimmed_ranges<true> : trimmed_ranges<false>)(b, page_size, head_dim, head_dim / groups, by_token, t.num_outliers);
  else if (by_token) range_by_token(b, page_size, head_dim, groups);
  else range_by_channel(b, page_size, head_dim);
  return choose_params<DTYPE>(b, by_token ? groups * page_size : head_dim, q_max_of(t), is_codebook(t.format), head + t.scale_offset, bias) && ok;
}

static void store_plane(PageBuffers& b, const ClosePart& part, uint8_t* to, int bits, int shift) {
  const int row_bytes = row_bytes_of(part.head_dim, bits);
  if (row_bytes * 8 / bits > part.head_dim) __builtin_memset(b.rows, 0, (size_t)part.page_size * row_bytes);
  pack_rows(b, part.page_size, part.head_dim, row_bytes, bits, shift);
  if (part.is_key) interleave_keys(b, to, part.page_size, row_bytes);
  else interleave_values(b, to, part.page_size, row_bytes);
}

static void close_item(const ClosePart& part, void* scratch, CloseResult& result) {
  const kvbits_tensor& t = *part.tensor;
  const int page_size = part.page_size, head_dim = part.head_dim;
  PageBuffers b;
  carve(b, (char*)scratch, page_size, head_dim);
  bool finite;
  if (part.dtype == KVBITS_FP32) finite = load_page<KVBITS_FP32>(b, part.source, part.token_stride, page_size, head_dim);
  else if (part.dtype == KVBITS_FP16) finite = load_page<KVBITS_FP16>(b, part.source, part.token_stride, page_size, head_dim);
  else finite = load_page<KVBITS_BF16>(b, part.source, part.token_stride, page_size, head_dim);
  if (!finite) {
    result.nonfinite = true;
    return;
  }
  uint8_t* head = part.head;
  if (t.format == KVBITS_RAW) {
    uint8_t* to = head + t.plane_offset[0];
    if (t.raw_dtype == KVBITS_FP32) store_raw<KVBITS_FP32>(b, to, page_size, head_dim);
    else if (t.raw_dtype == KVBITS_FP16) store_raw<KVBITS_FP16>(b, to, page_size, head_dim);
    else store_raw<KVBITS_BF16>(b, to, page_size, head_dim);
    return;
  }
  if (part.turn_start) turn_rows_back(b, part.turn_start, part.turn_steps, page_size, head_dim);
  if (t.mean_offset < 0) b.raw = b.x;
  const bool by_token = !t.per_channel && !t.static_scale;
  const int groups = by_token ? head_dim / t.group_size : 1;
  const bool has_bias = t.bias_offset >= 0 || t.static_bias;
  if (t.static_scale) {
    const int64_t at = (int64_t)part.kv_head * head_dim;
    widen_as<KVBITS_FP32>(b.scale, t.static_scale + at, head_dim);
    for (int c = 0; c < head_dim; c += VL) store(b.inverse + c, 1.0f / load(b.scale + c));
    if (has_bias) widen_as<KVBITS_FP32>(b.bias, t.static_bias + at, head_dim);
  } else {
    bool ok;
    if (t.scale_dtype == KVBITS_FP32) ok = make_params<KVBITS_FP32>(b, t, head, page_size, head_dim, groups, by_token);
    else if (t.scale_dtype == KVBITS_FP16) ok = make_params<KVBITS_FP16>(b, t, head, page_size, head_dim, groups, by_token);
    else ok = make_params<KVBITS_BF16>(b, t, head, page_size, head_dim, groups, by_token);
    if (!ok) {
      result.overflow = true;
      return;
    }
  }
  if (t.codebook || t.num_outliers) {
    const PageCoding coding = {page_size, head_dim, head_dim / groups, by_token, has_bias, t.mean_offset >= 0, t.num_outliers};
    if (!code_kvquant(b, t, coding, part.kv_head, range_of(t), head, result.saturated)) {
      result.overflow = true;
      return;
    }
  } else {
    result.saturated = codes_of_format(b, t, page_size, head_dim, by_token ? groups : 1, by_token, has_bias);
  }
  int shift = code_bits(t.format);
  const int planes = num_planes(t.format);
  for (int plane = 0; plane < planes; plane++) {
    const int bits = plane_bits(t.format, plane);
    shift -= bits;
    store_plane(b, part, head + t.plane_offset[plane], bits, shift);
  }
  if (!part.low) return;
  const int bits = code_bits(part.low->format);
  low_codes_of_format(b, t, page_size, head_dim, by_token ? groups : 1, by_token, has_bias, bits);
  store_plane(b, part, part.low_head + part.low->plane_offset[0], bits, 0);
}

// ---- single tokens ----

// A token's bytes are its own: what closing does with the tokens of a page is done with some of them, then put where they belong.

static void scatter_rows(const PageBuffers& b, const TokensPart& part, uint8_t* to, int row_bytes) {
  for (int t = 0; t < part.count; t++) {
    const uint8_t* row = b.rows + (int64_t)t * row_bytes;
    const int place = part.slot + t;
    if (part.is_key) {
      uint8_t* at = to + place / TILE * TILE * row_bytes + place % TILE * 4;
      for (int r = 0; r < row_bytes; r += 4) __builtin_memcpy(at + r * TILE, row + r, 4);
      continue;
    }
    const int in = place % 8, quad = place / 8 * 2 + in / 2 % 2, u = in % 2 + in / 4 * 2;  // slots of a group of eight hold tokens 0 1 4 5 2 3 6 7
    for (int block = 0; block < row_bytes; block += 16) {
      const int width = row_bytes - block < 16 ? row_bytes - block : 16;
      uint8_t* at = to + (int64_t)block * part.page_size + quad * 4 * width + u;
      for (int r = 0; r < width; r++) at[r * 4] = row[block + r];
    }
  }
}

// Scales (and biases) of tokens, chosen and put into the page.
template <int DTYPE>
static bool store_params(PageBuffers& b, const TokensPart& part, int groups) {
  const kvbits_tensor& t = *part.tensor;
  const int size = DTYPE == KVBITS_FP32 ? 4 : 2, n = part.count, width = padded_width(part.head_dim);
  if (t.mean_offset >= 0) {
    for (int c = 0; c < part.head_dim; c++) {
      const uint8_t* from = part.head + t.mean_offset + c * size;
      int32_t bits = 0;
      __builtin_memcpy(&bits, from, size);
      b.mean[c] = from_bits<DTYPE>(splat_int(bits))[0];
    }
    for (int i = 0; i < n; i++)
      for (int c = 0; c < part.head_dim; c++) b.x[(int64_t)i * width + c] -= b.mean[c];
  }
  range_by_token(b, n, part.head_dim, groups);
  uint8_t *scale = (uint8_t*)b.raw, *bias = t.bias_offset >= 0 ? (uint8_t*)b.keys : nullptr;
  const bool ok = choose_params<DTYPE>(b, groups * n, q_max_of(t), false, scale, bias);
  for (int g = 0; g < groups; g++) {
    const int64_t to = ((int64_t)g * part.page_size + part.slot) * size, from = (int64_t)g * n * size;
    __builtin_memcpy(part.head + t.scale_offset + to, scale + from, (size_t)n * size);
    if (bias) __builtin_memcpy(part.head + t.bias_offset + to, bias + from, (size_t)n * size);
  }
  return ok;
}

static void store_item(const TokensPart& part, void* scratch, CloseResult& result) {
  const kvbits_tensor& t = *part.tensor;
  const int n = part.count, head_dim = part.head_dim;
  PageBuffers b;
  carve(b, (char*)scratch, part.page_size, head_dim);
  bool finite;
  if (part.dtype == KVBITS_FP32) finite = load_page<KVBITS_FP32>(b, part.source, part.token_stride, n, head_dim);
  else if (part.dtype == KVBITS_FP16) finite = load_page<KVBITS_FP16>(b, part.source, part.token_stride, n, head_dim);
  else finite = load_page<KVBITS_BF16>(b, part.source, part.token_stride, n, head_dim);
  if (!finite) {
    result.nonfinite = true;
    return;
  }
  if (t.format == KVBITS_RAW) {
    uint8_t* to = part.head + t.plane_offset[0] + (int64_t)part.slot * head_dim * (t.raw_dtype == KVBITS_FP32 ? 4 : 2);
    if (t.raw_dtype == KVBITS_FP32) store_raw<KVBITS_FP32>(b, to, n, head_dim);
    else if (t.raw_dtype == KVBITS_FP16) store_raw<KVBITS_FP16>(b, to, n, head_dim);
    else store_raw<KVBITS_BF16>(b, to, n, head_dim);
    return;
  }
  const bool by_token = !t.static_scale, has_bias = t.bias_offset >= 0 || t.static_bias;
  const int groups = by_token ? head_dim / t.group_size : 1;
  if (by_token) {
    bool ok;
    if (t.scale_dtype == KVBITS_FP32) ok = store_params<KVBITS_FP32>(b, part, groups);
    else if (t.scale_dtype == KVBITS_FP16) ok = store_params<KVBITS_FP16>(b, part, groups);
    else ok = store_params<KVBITS_BF16>(b, part, groups);
    if (!ok) {
      result.overflow = true;
      return;
    }
  } else {
    const int64_t at = (int64_t)part.kv_head * head_dim;
    widen_as<KVBITS_FP32>(b.scale, t.static_scale + at, head_dim);
    for (int c = 0; c < head_dim; c += VL) store(b.inverse + c, 1.0f / load(b.scale + c));
    if (has_bias) widen_as<KVBITS_FP32>(b.bias, t.static_bias + at, head_dim);
  }
  result.saturated = codes_of_format(b, t, n, head_dim, groups, by_token, has_bias);
  int shift = code_bits(t.format);
  for (int plane = 0; plane < num_planes(t.format); plane++) {
    const int bits = plane_bits(t.format, plane), row_bytes = row_bytes_of(head_dim, bits);
    shift -= bits;
    if (row_bytes * 8 / bits > head_dim) __builtin_memset(b.rows, 0, (size_t)n * row_bytes);
    pack_rows(b, n, head_dim, row_bytes, bits, shift);
    scatter_rows(b, part, part.head + t.plane_offset[plane], row_bytes);
  }
}
