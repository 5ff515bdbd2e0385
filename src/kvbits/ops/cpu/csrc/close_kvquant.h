// What KVQuant's formats add to closing a page (arXiv:2401.18079): keys turned back by their positions, ranges that leave out a page's worst elements,
// codes of the nearest codebook entries, listed outliers, a stretch per token. The definition is src/kvbits/quant/{rotary,outliers,qparams}.py and
// reference/close.py, which this matches bit for bit. Included inside a tier's namespace by close_pages.h.

typedef double vd __attribute__((vector_size(VL * 8)));
typedef double vd_mem __attribute__((vector_size(VL * 8), aligned(8), may_alias));

// ---- keys before the rotary embedding ----

// Turns the page's rows back. `start`: cosines, then sines of the first token's angles, head_dim / 2 of each padded to 16; `steps`: the same of token j's
// angle from there, row by row.
static void turn_rows_back(PageBuffers& b, const double* start, const double* steps, int page_size, int head_dim) {
  const int width = padded_width(head_dim), half = head_dim / 2, padded = round_up(half, 16);
  for (int t = 0; t < page_size; t++, steps += 2 * padded)
    for (int i = 0; i < half; i += VL) {
      const vd c0 = *(const vd_mem*)(start + i), s0 = *(const vd_mem*)(start + padded + i);
      const vd c1 = *(const vd_mem*)(steps + i), s1 = *(const vd_mem*)(steps + padded + i);
      const vf cos = __builtin_convertvector(c0 * c1 - s0 * s1, vf), sin = __builtin_convertvector(s0 * c1 + c0 * s1, vf);
      float* low = b.x + (int64_t)t * width + i;
      const vf x = load(low), y = load(low + half);
      const vf one = x * cos + y * sin + 0.0f, other = y * cos - x * sin + 0.0f;  // no -0: which zero is the smallest?
      if (half - i >= VL) {
        store(low, one);
        store(low + half, other);
      } else {
        store_first(low, one, half - i);
        store_first(low + half, other, half - i);
      }
    }
}

// ---- choosing the n largest ----

static int count_above(const int32_t* keys, int m, int32_t limit) {
  vi above = vi{};
  for (int i = 0; i < m; i += VL) above -= load_int(keys + i) > splat_int(limit);
  int32_t t[VL], total = 0;
  *(vi_mem*)t = above;
  for (int i = 0; i < VL; i++) total += t[i];
  return total;
}

// A number that at least n of the keys (m, whole vectors) reach, the largest such number unless exactly n reach a smaller one. Negative keys do not count.
static int32_t nth_largest(const int32_t* keys, int m, int n) {
  int32_t found = 0;
  for (int bit = 30; bit >= 0; bit--) {
    const int32_t candidate = found | 1 << bit;
    const int total = count_above(keys, m, candidate - 1);
    if (total < n) continue;
    found = candidate;
    if (total == n) break;
  }
  return found;
}

// ---- ranges without their worst elements ----

constexpr int LEFT_OUT = 4, KEPT = LEFT_OUT + 1;  // most elements that one range leaves out

// The KEPT smallest and largest of n vectors, lane by lane, the outermost first; of magnitudes the largest only.
template <bool BOTH>
INLINE void sorted_ends(const float* x, int n, int64_t stride, vf* small, vf* large) {
  for (int i = 0; i < KEPT; i++) {
    small[i] = splat(__builtin_inff());
    large[i] = splat(BOTH ? -__builtin_inff() : -1.0f);
  }
  for (int t = 0; t < n; t++) {
    const vf loaded = load(x + t * stride);
    vf v = BOTH ? loaded : (vf)((vi)loaded & 0x7fffffff), w = v;
#pragma GCC unroll 5
    for (int i = 0; i < KEPT; i++) {
      const vf top = large[i];
      large[i] = vmax(top, v);
      v = vmin(top, v);
      if (!BOTH) continue;
      const vf bottom = small[i];
      small[i] = vmin(bottom, w);
      w = vmax(bottom, w);
    }
  }
}

// What a range becomes as elements leave it, and what each leaving wins, of VL groups from `g` on; `stride` groups in a row of the tables.
template <bool BOTH>
INLINE void leave_out(PageBuffers& b, vf* small, vf* large, int steps, int g, int stride) {
  store(b.lows + g, small[0]);
  store(b.highs + g, large[0]);
  vf width = BOTH ? large[0] - small[0] : large[0], last = splat(__builtin_inff());
  for (int k = 0; k < steps; k++) {
    const vi drop_low = BOTH ? (small[1] - small[0]) > (large[0] - large[1]) : vi{};
#pragma GCC unroll 4
    for (int i = 0; i < KEPT - 1; i++) {
      if (BOTH) small[i] = select(drop_low, small[i + 1], small[i]);
      large[i] = BOTH ? select(drop_low, large[i], large[i + 1]) : large[i + 1];
    }
    const vf narrower = BOTH ? large[0] - small[0] : large[0];
    last = vmin(width * width - narrower * narrower, last);
    width = narrower;
    *(vi_mem*)(b.wins + k * stride + g) = (vi)last;
    store(b.lows + (k + 1) * stride + g, small[0]);
    store(b.highs + (k + 1) * stride + g, large[0]);
  }
}

// Ranges of groups of `size` elements into b.low and b.high, the page's n worst elements left out. `by_token`: the groups are [head_dim / size][page_size],
// else the channels.
template <bool BOTH>
static void trimmed_ranges(PageBuffers& b, int page_size, int head_dim, int size, bool by_token, int n) {
  const int width = padded_width(head_dim), groups = by_token ? head_dim / size * page_size : head_dim, stride = round_up(groups, 16);
  const int elements = by_token ? size : page_size, steps = elements - 1 < LEFT_OUT ? elements - 1 : LEFT_OUT;
  vf small[KEPT], large[KEPT];
  if (by_token) {
    float* turned = (float*)b.keys;  // [size][page_size]
    for (int first = 0; first < head_dim; first += size) {
      transpose(b.x + first, width, page_size, size, turned);
      for (int t = 0; t < page_size; t += VL) {
        sorted_ends<BOTH>(turned + t, size, page_size, small, large);
        leave_out<BOTH>(b, small, large, steps, first / size * page_size + t, stride);
      }
    }
  } else {
    for (int c = 0; c < head_dim; c += VL) {
      sorted_ends<BOTH>(b.x + c, page_size, width, small, large);
      leave_out<BOTH>(b, small, large, steps, c, stride);
    }
  }
  for (int k = 0; k < steps; k++)
    for (int g = groups; g < stride; g++) b.wins[k * stride + g] = -1;
  const int32_t least = nth_largest(b.wins, steps * stride, n);
  int ties = n - count_above(b.wins, steps * stride, least);  // of equal wins those of the first groups count
  for (int g = 0; g < groups; g++) {
    int k = 0;
    for (; k < steps; k++) {
      const int32_t win = b.wins[k * stride + g];
      if (win < least || (win == least && ties-- <= 0)) break;
    }
    b.high[g] = b.highs[k * stride + g] + 0.0f;
    b.low[g] = BOTH ? b.lows[k * stride + g] + 0.0f : -b.high[g];
  }
}

// ---- codes ----

// How normalized numbers of one head become codes, and what the codes stand for.
struct Coding {
  alignas(64) float middles[16];  // between neighbouring entries of the codebook, infinite behind the last
  alignas(64) float levels[16];
  float limit;                    // codebooks: numbers past it lie outside
  CodeRange range;                // integers
};

static void prepare_coding(Coding& k, const kvbits_tensor& t, int kv_head, const CodeRange& range) {
  k.range = range;
  k.limit = 1.0f + (t.scale_dtype == KVBITS_FP16 ? 0x1p-10f : t.scale_dtype == KVBITS_BF16 ? 0x1p-7f : 0x1p-23f);
  if (!t.codebook) return;
  const int entries = 1 << code_bits(t.format);
  const float* book = t.codebook + (int64_t)kv_head * entries;
  for (int i = 0; i < 16; i++) {
    k.levels[i] = book[i % entries];
    k.middles[i] = i + 1 < entries ? (book[i] + book[i + 1]) * 0.5f : __builtin_inff();
  }
}

// How many middles lie below x: the number of the nearest entry, at ties the lower one.
template <int FMT>
INLINE vi nearest(const Coding& k, vf x) {
  constexpr int half = 1 << (code_bits(FMT) - 1);
  vi code = (x > splat(k.middles[half - 1])) & half;
  for (int step = half / 2; step; step /= 2) code += (x > look_up(k.middles, code + (step - 1))) & step;
  return code;
}

template <int FMT>
INLINE vi code_and_level(const Coding& k, vf scaled, vi& outside, vf& level) {
  if (is_codebook(FMT)) {
    outside = (vf)((vi)scaled & 0x7fffffff) > splat(k.limit);
    const vi code = nearest<FMT>(k, scaled);
    level = look_up(k.levels, code);
    return code;
  }
  outside = vi{};
  const vi code = code_of<FMT>(scaled, k.range, outside);
  level = to_float(code) - k.range.zero;
  return code;
}

// Scales of one token by channel: those of the page's channels, or its groups' spread over them.
struct RowScales {
  const float *inverse, *scale, *bias;
  alignas(64) float spread[3][MAX_HEAD_DIM + 16];
};

INLINE void spread_groups(float* to, const float* from, int page_size, int head_dim, int size) {
  for (int c = 0; c < head_dim; c += size, from += page_size) {
    int i = 0;
    for (; i + VL <= size; i += VL) store(to + c + i, splat(*from));
    for (; i < size; i++) to[c + i] = *from;
  }
}

// How the page is coded: `size` channels share a scale where it is the tokens' own.
struct PageCoding {
  int page_size, head_dim, size;
  bool by_token, has_bias, has_mean;
  int num_outliers;
};

INLINE void row_scales(const PageBuffers& b, const PageCoding& p, RowScales& r, int t) {
  if (!p.by_token) {
    r.inverse = b.inverse, r.scale = b.scale, r.bias = b.bias;
    return;
  }
  spread_groups(r.spread[0], b.inverse + t, p.page_size, p.head_dim, p.size);
  spread_groups(r.spread[1], b.scale + t, p.page_size, p.head_dim, p.size);
  if (p.has_bias) spread_groups(r.spread[2], b.bias + t, p.page_size, p.head_dim, p.size);
  r.inverse = r.spread[0], r.scale = r.spread[1], r.bias = r.spread[2];
}

constexpr int FOLD = 8;  // tokens of which b.most keeps the largest key of each channel

// Codes of the page, and how many elements lie outside. LIST: also each element's rank as an outlier in b.keys (its error, times 2^64 if it lies outside, as
// the bits of a float; -1 behind head_dim) and b.outside.
template <int FMT, bool LIST>
static int64_t code_page(PageBuffers& b, const PageCoding& p, const Coding& k) {
  const int width = padded_width(p.head_dim);
  RowScales r;
  int64_t total = 0;
  for (int t = 0; t < p.page_size; t++) {
    row_scales(b, p, r, t);
    const float *x = b.x + (int64_t)t * width, *raw = b.raw + (int64_t)t * width;
    int32_t *keys = b.keys + (int64_t)t * width, *most = b.most + (int64_t)(t / FOLD) * width;
    int row = 0;
    for (int c = 0; c < p.head_dim; c += VL) {
      const vi inside = iota() < splat_int(p.head_dim - c);
      const vf bias = p.has_bias ? load(r.bias + c) : vf{};
      vi outside;
      vf level;
      const vi code = code_and_level<FMT>(k, (load(x + c) - bias) * load(r.inverse + c), outside, level);
      outside &= inside;
      row += count(outside);
      store_bytes(b.codes + (int64_t)t * width + c, code & inside);
      if (!LIST) continue;
      vf dense = level * load(r.scale + c) + bias;
      if (p.has_mean) dense += load(b.mean + c);
      const vf error = (vf)((vi)(load(raw + c) - dense) & 0x7fffffff);
      const vi key = (vi)select(outside, error * 0x1p64f, error) | ~inside;
      *(vi_mem*)(keys + c) = key;
      const vi before = t % FOLD ? load_int(most + c) : key;
      *(vi_mem*)(most + c) = key > before ? key : before;
    }
    if (LIST) b.outside[t] = row != 0;
    total += row;
  }
  return total;
}

// The elements of largest rank into b.listed, ascending; at equal ranks the first.
static void list_worst(PageBuffers& b, const PageCoding& p) {
  const int width = padded_width(p.head_dim), n = p.num_outliers;
  // As many folded keys reach this, so as many elements do.
  const int32_t floor = nth_largest(b.most, p.page_size / FOLD * width, n);
  int m = 0;
  for (int t = 0; t < p.page_size; t++)
    for (int c = 0; c < p.head_dim; c += VL) {
      const int32_t* keys = b.keys + (int64_t)t * width + c;
      if (!any(load_int(keys) >= splat_int(floor))) continue;
      for (int i = 0; i < VL; i++) {
        b.candidates[m] = t * p.head_dim + c + i;
        b.ranks[m] = keys[i];
        m += keys[i] >= floor;
      }
    }
  const int padded = round_up(m, VL);
  for (int i = m; i < padded; i++) b.ranks[i] = -1;
  const int32_t least = nth_largest(b.ranks, padded, n);
  int ties = n - count_above(b.ranks, padded, least), found = 0;
  for (int i = 0; i < m && found < n; i++)
    if (b.ranks[i] > least || (b.ranks[i] == least && ties-- > 0)) b.listed[found++] = b.candidates[i];
}

struct Place {
  int token, channel, scale;  // `scale`: where its scale and bias are
};

INLINE Place place_of(const PageCoding& p, int element) {
  const int t = element / p.head_dim, c = element % p.head_dim;
  return {t, c, p.by_token ? c / p.size * p.page_size + t : c};
}

template <int FMT>
static int64_t listed_outside(const PageBuffers& b, const PageCoding& p, const Coding& k) {
  const int width = padded_width(p.head_dim);
  int64_t total = 0;
  for (int i = 0; i < p.num_outliers; i++) {
    const Place at = place_of(p, b.listed[i]);
    if (!b.outside[at.token]) continue;
    const float x = b.x[(int64_t)at.token * width + at.channel];
    vi outside;
    vf level;
    code_and_level<FMT>(k, splat((p.has_bias ? x - b.bias[at.scale] : x) * b.inverse[at.scale]), outside, level);
    total -= outside[0];
  }
  return total;
}

// Factors that bring tokens' furthest unlisted elements just inside, stored, and those tokens' codes anew.
template <int FMT, int DTYPE>
static bool stretch_tokens(PageBuffers& b, const PageCoding& p, const Coding& k, uint8_t* to) {
  const int width = padded_width(p.head_dim);
  bool ok = true;
  for (int i = 0; i < p.num_outliers; i++) {
    const Place at = place_of(p, b.listed[i]);
    b.keys[(int64_t)at.token * width + at.channel] = -1;
  }
  for (int t = 0; t < p.page_size; t++) {
    const float* x = b.x + (int64_t)t * width;
    vf most = splat(1.0f);
    if (b.outside[t])
      for (int c = 0; c < p.head_dim; c += VL) {
        const vf bias = p.has_bias ? load(b.bias + c) : vf{};
        const vf level = (vf)((vi)((load(x + c) - bias) * load(b.inverse + c)) & 0x7fffffff);
        const vi stretches = (level > splat(k.limit)) & (load_int(b.keys + (int64_t)t * width + c) >= vi{});
        most = select(stretches, vmax(most, level), most);
      }
    const vi bits = scale_bits<DTYPE>(splat(max_of(most)));
    const float stretch = from_bits<DTYPE>(bits)[0];
    ok &= (bool)__builtin_isfinite(stretch);
    store_bits<DTYPE>(to, t, bits, 1);
    b.stretch[t] = stretch;
    if (stretch == 1.0f) continue;
    const float inverse = 1.0f / stretch;
    for (int c = 0; c < p.head_dim; c += VL) {
      const vf bias = p.has_bias ? load(b.bias + c) : vf{};
      vi outside;
      vf level;
      const vi code = code_and_level<FMT>(k, (load(x + c) - bias) * load(b.inverse + c) * inverse, outside, level);
      store_bytes(b.codes + (int64_t)t * width + c, code & (iota() < splat_int(p.head_dim - c)));
    }
  }
  return ok;
}

// What the listed elements' dense numbers lack, and where they are.
template <int DTYPE>
static bool store_listed(PageBuffers& b, const PageCoding& p, const Coding& k, bool codebook, bool stretched, uint8_t* index, uint8_t* value) {
  const int width = padded_width(p.head_dim), n = p.num_outliers;
  const bool wide = (int64_t)p.page_size * p.head_dim > 65536;
  float* errors = (float*)b.ranks;
  for (int i = 0; i < n; i++) {
    const Place at = place_of(p, b.listed[i]);
    const int64_t element = (int64_t)at.token * width + at.channel;
    const int code = b.codes[element];
    float dense = (codebook ? k.levels[code] : (float)code - k.range.zero) * b.scale[at.scale];
    if (stretched) dense *= b.stretch[at.token];
    if (p.has_bias) dense += b.bias[at.scale];
    if (p.has_mean) dense += b.mean[at.channel];
    errors[i] = b.raw[element] - dense;
    if (wide) ((int32_t*)index)[i] = b.listed[i];
    else ((uint16_t*)index)[i] = (uint16_t)b.listed[i];
  }
  bool ok = true;
  for (int i = 0; i < n; i += VL) {
    const int m = n - i < VL ? n - i : VL;
    const vi bits = to_bits<DTYPE>(load(errors + i));
    const vf stored = from_bits<DTYPE>(bits);
    store_bits<DTYPE>(value, i, bits, m);
    for (int j = 0; j < m; j++) ok &= (bool)__builtin_isfinite(stored[j]);
  }
  return ok;
}

template <int FMT, int DTYPE>
static bool dense_and_sparse(PageBuffers& b, const kvbits_tensor& t, const PageCoding& p, const Coding& k, uint8_t* head, int64_t& saturated) {
  if (!p.num_outliers) {
    saturated = code_page<FMT, false>(b, p, k);
    return true;
  }
  bool ok = true;
  const bool stretched = t.stretch_offset >= 0;
  saturated = code_page<FMT, true>(b, p, k);
  list_worst(b, p);
  if (saturated) saturated -= listed_outside<FMT>(b, p, k);
  if (stretched) {
    ok = stretch_tokens<FMT, DTYPE>(b, p, k, head + t.stretch_offset);
    saturated = 0;
  }
  return store_listed<DTYPE>(b, p, k, is_codebook(FMT), stretched, head + t.outlier_index_offset, head + t.outlier_value_offset) && ok;
}

// Codes of a page with a codebook or outliers, its parameters chosen before. False when something stored overflows.
static bool code_kvquant(PageBuffers& b, const kvbits_tensor& t, const PageCoding& p, int kv_head, const CodeRange& range, uint8_t* head, int64_t& saturated) {
  Coding k;
  prepare_coding(k, t, kv_head, range);
#define CASE(F)                                                                                                    \
  case F:                                                                                                          \
    if (t.scale_dtype == KVBITS_FP32) return dense_and_sparse<F, KVBITS_FP32>(b, t, p, k, head, saturated);        \
    if (t.scale_dtype == KVBITS_FP16) return dense_and_sparse<F, KVBITS_FP16>(b, t, p, k, head, saturated);        \
    return dense_and_sparse<F, KVBITS_BF16>(b, t, p, k, head, saturated)
  switch (t.format) {
    CASE(KVBITS_NUQ4);
    CASE(KVBITS_NUQ3);
    CASE(KVBITS_NUQ2);
    CASE(KVBITS_INT8);
    CASE(KVBITS_INT4);
    CASE(KVBITS_INT3);
    default: CASE(KVBITS_INT2);
  }
#undef CASE
}
