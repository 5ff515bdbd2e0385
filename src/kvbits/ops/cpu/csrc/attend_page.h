// One work item: the rows of one kv head over a range of pages, block of tokens by block of tokens.

struct Scratch {
  Block block;
  Decoded decoded;
  KeyPairs pairs;
  Chunk chunks[ITEM_ROWS / ROWS];
};

typedef void (*KeyKernel)(const KeyArgs&);
typedef void (*ValueKernel)(const ValueArgs&);

#define PER_ROWS(f, x) {f<x, 1>, f<x, 2>, f<x, 3>, f<x, 4>, f<x, 5>, f<x, 6>, f<x, 7>, f<x, 8>}
static const KeyKernel key_kernels[KVBITS_NUM_FORMATS + 1][ROWS] = {
    {}, PER_ROWS(key_int, KVBITS_INT8), PER_ROWS(key_int, KVBITS_INT4), PER_ROWS(key_int, KVBITS_INT3),
    PER_ROWS(key_int, KVBITS_INT2), PER_ROWS(key_fp8, KVBITS_E4M3), PER_ROWS(key_fp8, KVBITS_E5M2), {}, {}, {}, PER_ROWS(key_int, NESTED)};
static const ValueKernel value_kernels[KVBITS_NUM_FORMATS + 1][ROWS] = {
    {}, PER_ROWS(value_int, KVBITS_INT8), PER_ROWS(value_int, KVBITS_INT4), PER_ROWS(value_int, KVBITS_INT3),
    PER_ROWS(value_int, KVBITS_INT2), PER_ROWS(value_fp8, KVBITS_E4M3), PER_ROWS(value_fp8, KVBITS_E5M2), {}, {}, {}, PER_ROWS(value_int, NESTED)};
static const KeyKernel raw_key_kernels[4][ROWS] = {PER_ROWS(key_raw, KVBITS_FP32), PER_ROWS(key_raw, KVBITS_FP16), PER_ROWS(key_raw, KVBITS_BF16),
                                                   PER_ROWS(key_raw, BF16_SPLIT)};
static const ValueKernel raw_value_kernels[4][ROWS] = {PER_ROWS(value_raw, KVBITS_FP32), PER_ROWS(value_raw, KVBITS_FP16),
                                                       PER_ROWS(value_raw, KVBITS_BF16), PER_ROWS(value_raw, BF16_SPLIT)};
typedef void (*TileKernel)(const Decoded&, const Nibbles&, const float* turns, int head_dim, const float* q, float* s);
#define PER_ROWS_2(f, x, y) {f<x, y, 1>, f<x, y, 2>, f<x, y, 3>, f<x, y, 4>, f<x, y, 5>, f<x, y, 6>, f<x, y, 7>, f<x, y, 8>}
static const TileKernel tile_kernels[3][2][ROWS] = {{PER_ROWS_2(key_tile, DECODED, false), PER_ROWS_2(key_tile, DECODED, true)},
                                                    {PER_ROWS_2(key_tile, UNPACKED, false), PER_ROWS_2(key_tile, UNPACKED, true)},
                                                    {PER_ROWS_2(key_tile, NIBBLES, false), PER_ROWS_2(key_tile, NIBBLES, true)}};
#define FOR_ROWS(f) {f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>}
typedef void (*DecodedValueKernel)(const ValueArgs&, Decoded&, int format);
static const DecodedValueKernel decoded_value_kernels[ROWS] = FOR_ROWS(value_decoded);
#undef PER_ROWS_2
#undef FOR_ROWS
#undef PER_ROWS

// How the current part stores one tensor, for one kv head.
struct Tensor {
  const kvbits_tensor* t;
  int format;              // t->format, or NESTED with a low plane
  bool raw, split;  // split: raw bf16 read in split order (dots_float.h)
  bool decoded;     // by codebooks.h
  bool integer, channel_scales, page_channels;  // page_channels: per-channel scales that each page brings
  bool token_scales, token_bias;
  int groups, group_channels, row_bytes[2];
  float zero;      // middle of the code range
  float dot_zero;  // what of it the dot products leave to be settled
  float unit;      // of the code in scales: 1, a 15th for NESTED, that of the level bytes for codebooks
  int64_t low_offset;  // NESTED: of the plane in the low page's struct
};

// Reordering q and the outputs pays from a few pages on.
constexpr int64_t MIN_SPLIT_PAGES = 4;

static Tensor describe(const kvbits_tensor& t, const kvbits_tensor* low, int head_dim, int64_t pages) {
  Tensor d = {};
  d.t = &t;
  d.raw = t.format == KVBITS_RAW;
  d.split = d.raw && t.raw_dtype == KVBITS_BF16 && head_dim % (2 * VL) == 0 && pages >= MIN_SPLIT_PAGES;
  const bool nested = low && low->format != KVBITS_RAW;
  d.format = nested ? NESTED : t.format;
  d.unit = nested ? 1.0f / LOW_LEVELS : 1.0f;
  d.low_offset = nested ? low->plane_offset[0] : 0;
  d.decoded = t.codebook || t.inv_freq;
  d.integer = is_int(t.format) && !d.decoded;
  const bool is_static = t.static_scale != nullptr;
  d.channel_scales = !d.raw && (t.per_channel || is_static);
  d.page_channels = d.channel_scales && !is_static;
  d.token_scales = !d.raw && !d.channel_scales;
  d.token_bias = d.token_scales && t.bias_offset >= 0;
  d.group_channels = d.token_scales ? t.group_size : head_dim;
  d.groups = head_dim / d.group_channels;
  d.zero = is_int(t.format) ? int_zero(t.format) * (nested ? LOW_LEVELS : 1.0f) : 0.0f;
  const float middle = nested ? 128.0f : d.zero;  // 15 * 8 + 8: the low plane brings its own
  d.dot_zero = is_wide(d.format) && DOTS_CENTER_INT8 ? 0.0f : middle;
  for (int i = 0; i < 2; i++) d.row_bytes[i] = d.raw ? 0 : row_bytes_of(head_dim, plane_bits(t.format, i));
  return d;
}

// Per-channel scale and bias (the bias around the middle of the code range; the mean is part of it).
// Returns whether there is any bias.
static bool channel_params(const Tensor& d, const uint8_t* page, int kv_head, int head_dim, float* scale, float* bias) {
  const kvbits_tensor& t = *d.t;
  bool any = false;
  if (d.channel_scales) {
    if (d.page_channels) widen(scale, page + t.scale_offset, head_dim, t.scale_dtype);
    else widen_as<KVBITS_FP32>(scale, t.static_scale + (int64_t)kv_head * head_dim, head_dim);
    if (d.unit != 1.0f)
      for (int i = 0; i < head_dim; i += VL) store(scale + i, load(scale + i) * d.unit);
    const bool page_bias = t.bias_offset >= 0;
    if (page_bias || t.static_bias) {
      if (page_bias) widen(bias, page + t.bias_offset, head_dim, t.scale_dtype);
      else widen_as<KVBITS_FP32>(bias, t.static_bias + (int64_t)kv_head * head_dim, head_dim);
      for (int i = 0; i < head_dim; i += VL) store(bias + i, load(bias + i) + load(scale + i) * d.zero);
      any = true;
    }
  }
  if (t.mean_offset >= 0) {
    alignas(64) float mean[ROW_STRIDE];
    widen(mean, page + t.mean_offset, head_dim, t.scale_dtype);
    for (int i = 0; i < head_dim; i += VL) store(bias + i, any ? load(bias + i) + load(mean + i) : load(mean + i));
    any = true;
  }
  return any;
}

// Parameters of `n` tokens, fp32. Lanes past n are 0: a page may hold anything there. The lines that follow in the page
// `ahead` bytes on are fetched: a missing line of scales stalls a page as long as a missing line of codes.
static void widen_params(float* to, const uint8_t* from, int n, int dtype, int64_t ahead) {
  const int bytes = n * dtype_bytes(dtype);
  for (int i = 0; i < bytes; i += 64) fetch(from + i + ahead);
  if (dtype == KVBITS_FP16 && n == BLOCK) {
    for (int i = 0; i < BLOCK; i += VL) store(to + i, from_fp16((const uint16_t*)from + i));
    return;
  }
  widen(to, from, n, dtype);
  for (int i = round_up(n, VL); i < BLOCK; i += VL) store(to + i, vf{});
}

static void token_params(const Tensor& d, const uint8_t* page, int page_size, int token, int n, int64_t ahead, float (*scale)[BLOCK], float (*bias)[BLOCK]) {
  const kvbits_tensor& t = *d.t;
  const int size = dtype_bytes(t.scale_dtype);
  for (int g = 0; g < d.groups; g++) {
    const int64_t at = ((int64_t)g * page_size + token) * size;
    widen_params(scale[g], page + t.scale_offset + at, n, t.scale_dtype, ahead);
    if (d.unit != 1.0f)
      for (int i = 0; i < BLOCK; i += VL) store(scale[g] + i, load(scale[g] + i) * d.unit);
    if (!d.token_bias) continue;
    widen_params(bias[g], page + t.bias_offset + at, n, t.scale_dtype, ahead);
    for (int i = 0; i < BLOCK; i += VL) store(bias[g] + i, load(bias[g] + i) + load(scale[g] + i) * d.zero);
  }
}

// The form in which the key kernel wants q: integers for integer codes, channel scales folded in where there are any.
static void prepare_query(Chunk& c, const Tensor& key, const float* channel_scale, int head_dim) {
  const float* from = c.q[0];
  if (key.decoded) return;
  if (key.channel_scales) {
    fold_channels(c, channel_scale, head_dim);
    from = c.folded[0];
  }
  if (key.split)
    for (int h = 0; h < c.rows; h++) {
      __builtin_memcpy(c.folded[h], c.q[h], head_dim * sizeof(float));
      split_order(c.folded[h], head_dim, false);
    }
  if (!key.integer) return;
  if (is_wide(key.format)) quantize_query<true>(c, from, key.groups, key.group_channels, key.dot_zero);
  else quantize_query<false>(c, from, key.groups, key.group_channels, key.dot_zero);
}

struct PartView {
  const kvbits_attend_call* call;
  const kvbits_store* store;
  Tensor key, value;
  bool value_bias;  // of the current page, per channel
  const KeyPairs* pairs;  // of keys that are read so, or null
  bool float_outliers;    // of the current page: its key outliers meet fp32 queries although `pairs` is there
  int64_t params;   // where the scales, biases and outliers of a head struct begin
  int params_per_tile;  // their bytes, in whole lines, that a tile fetches of the page to come
};

// From scores to what the value kernel multiplies with.
static void weigh_chunk(Chunk& c, Block& b, const Tensor& value, bool value_bias) {
  if (!value.integer) softmax_rows<5>(c, b);
  else if (is_wide(value.format)) softmax_rows<4>(c, b);
  else softmax_rows<3>(c, b);
  if (value_bias) sum_probabilities(c, b);
  if (!value.integer) {
    if (value.token_bias) add_token_biases(c, b, value.groups);
    scale_probabilities(c, b, value.groups, value.token_scales || value.t->stretch_offset >= 0);
  } else if (is_wide(value.format)) {
    if (value.token_scales) quantize_probabilities<true, true>(c, b, value.groups, value.token_bias, value.dot_zero);
    else quantize_probabilities<true, false>(c, b, 1, false, value.dot_zero);
  } else {
    if (value.token_scales || value.t->stretch_offset >= 0) quantize_probabilities<false, true>(c, b, value.groups, value.token_bias, value.dot_zero);
    else quantize_probabilities<false, false>(c, b, 1, false, value.dot_zero);
  }
}

static void fetch_range(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) fetch(p + i);
}

// Where a block of a page lies.
struct PageView {
  const uint8_t *page, *low;    // the head structs; low is null without low planes
  int64_t ahead, low_ahead;     // to the structs that are fetched into L2 meanwhile
  float* page_lse;              // of this page, or null
};

// Scores of keys that are decoded first.
static void attend_decoded_keys(const PartView& part, Chunk& c, Block& b, Decoded& w, const PageView& view, int token, int n) {
  const Tensor& key = part.key;
  const uint8_t* page = view.page;
  const int64_t ahead = view.ahead;
  const int head_dim = part.call->head_dim;
  KeyTiles k = {};
  k.t = key.t;
  k.page = page;
  for (int i = 0; i < 2; i++) k.row_bytes[i] = key.row_bytes[i];
  k.head_dim = head_dim;
  k.page_size = part.store->page_size;
  k.token = token;
  k.group_channels = key.group_channels;
  k.scale = key.token_scales ? b.k_scale[0] : nullptr;
  k.bias = key.token_bias ? b.k_bias[0] : nullptr;
  k.channel_scale = b.k_channel;
  k.channel_bias = b.k_channel_bias;
  k.stretch = key.t->stretch_offset >= 0;
  k.ahead = ahead;
  k.format = key.format;
  if (key.format == NESTED) k.low = view.low + key.low_offset, k.low_ahead = view.low_ahead;
  const bool turned = key.t->inv_freq;
  const int bits = code_bits(key.t->format);
  const bool in_nibbles = has_nibbles(bits, key.row_bytes, head_dim);
  for (int tile = 0, tiles = 1; tile * TILE < n; tile += tiles) {
    const bool looks = looked_up(k, w, tile);
    tiles = part.pairs && looks && (tile + 1) * TILE < n && looked_up(k, w, tile + 1) ? 2 : 1;
    if (ahead) {  // what lies behind the coming page's codes, a part with every tile: a burst of fetches would wait for itself
      const uint8_t* from = page + ahead + part.params + (token / TILE + tile) * part.params_per_tile;
      const uint8_t* end = page + ahead + part.store->head_bytes;
      for (int i = 0; i < tiles * part.params_per_tile && from + i < end; i += 64) fetch(from + i);
    }
    Nibbles codes = {{}, {key.row_bytes[0], key.row_bytes[1]}, bits, ahead};
    for (int i = 0; i < 2; i++) codes.src[i] = page + key.t->plane_offset[i] + (int64_t)(token + tile * TILE) * key.row_bytes[i];
    if (part.pairs && looks) {
      attend_pairs(c, *part.pairs, codes, token / TILE + tile, tiles, head_dim, b.s[0] + tile * TILE);
      continue;
    }
    const KeySource from = !looks ? DECODED : in_nibbles ? NIBBLES : UNPACKED;
    if (from != NIBBLES) unpack_keys(k, w, tile);
    if (from == DECODED) decode_keys(k, w, tile);
    const float* turns = turned ? key.t->turns + (int64_t)(token / TILE + tile) * head_dim * TILE : nullptr;
    tile_kernels[from][turned][c.rows - 1](w, codes, turns, head_dim, turned ? c.folded[0] : c.q[0], b.s[0] + tile * TILE);
  }
}

static void add_page_lse(const Chunk& c, const Block& b, float* to, const int* first, const int* end);

static void attend_block(const PartView& part, Chunk& c, Block& b, Decoded& w, const PageView& at, int token, int n, int64_t position) {
  const uint8_t* page = at.page;
  const int head_dim = part.call->head_dim;
  const int64_t window = part.call->sliding_window;
  int first[ROWS], end[ROWS];
  bool any = false;
  for (int h = 0; h < c.rows; h++) {
    const int64_t q = c.position[h];
    const int64_t lo = window ? q - window + 1 - position : 0, hi = q + 1 - position;
    first[h] = lo < 0 ? 0 : lo > n ? n : (int)lo;
    end[h] = hi < 0 ? 0 : hi > n ? n : (int)hi;
    any |= first[h] < end[h];
  }
  if (!any) return;

  KeyArgs k = {};
  const Tensor& key = part.key;
  const int raw_row = head_dim * dtype_bytes(key.t->raw_dtype);
  for (int i = 0; i < 2; i++) {
    k.row_bytes[i] = key.row_bytes[i];
    k.plane[i] = page + key.t->plane_offset[i] + (int64_t)token * (key.raw ? raw_row : key.row_bytes[i]);
  }
  k.head_dim = head_dim;
  k.tokens = n;
  k.groups = key.groups;
  k.group_channels = key.group_channels;
  k.scale = key.token_scales ? b.k_scale[0] : nullptr;
  k.bias = key.token_bias ? b.k_bias[0] : nullptr;
  k.q = key.channel_scales || key.split ? c.folded[0] : c.q[0];
  k.chunk = &c;
  k.s = b.s[0];
  k.ahead = at.ahead;
  if (key.format == NESTED) k.low = at.low + key.low_offset - (page + key.t->plane_offset[0]), k.low_ahead = at.low_ahead;
  if (key.decoded) attend_decoded_keys(part, c, b, w, at, token, n);
  else (key.raw ? raw_key_kernels[key.split ? BF16_SPLIT : key.t->raw_dtype] : key_kernels[key.format])[c.rows - 1](k);
  if (key.t->num_outliers) {
    const OutlierTurns turns = {key.t->turns ? key.t->turns + (int64_t)(token / TILE) * head_dim * TILE : nullptr,
                                part.pairs && !part.float_outliers ? part.pairs->turns[token / TILE * (head_dim / 2)][1] : nullptr};
    BY_ROWS(c, add_key_outliers, c, b, w, outliers_of(*key.t, page, part.store->page_size, head_dim), turns, head_dim, token);
  }

  const Tensor& value = part.value;
  mask_scores(c, b, first, end, part.call->softcap, head_dim, value.token_scales ? value.groups : 0);
  weigh_chunk(c, b, value, part.value_bias);
  if (at.page_lse) add_page_lse(c, b, at.page_lse, first, end);

  ValueArgs v = {};
  const int raw_value_row = head_dim * dtype_bytes(value.t->raw_dtype);
  for (int i = 0; i < 2; i++) {
    v.row_bytes[i] = value.row_bytes[i];
    v.plane[i] = page + value.t->plane_offset[i] + (value.raw ? (int64_t)token * raw_value_row : 0);
  }
  v.head_dim = head_dim;
  v.tokens = n;
  v.page_size = part.store->page_size;
  v.first_token = token;
  v.groups = value.groups;
  v.group_channels = value.group_channels;
  v.channel_scale = value.channel_scales ? b.v_channel : nullptr;
  v.block = &b;
  v.chunk = &c;
  v.ahead = at.ahead;
  if (value.format == NESTED) v.low = at.low + value.low_offset - (page + value.t->plane_offset[0]), v.low_ahead = at.low_ahead;
  if (value.decoded) {
    decoded_value_kernels[c.rows - 1](v, w, value.format);
  } else {
    (value.raw ? raw_value_kernels[value.split ? BF16_SPLIT : value.t->raw_dtype] : value_kernels[value.format])[c.rows - 1](v);
  }
  if (value.t->num_outliers) BY_ROWS(c, add_value_outliers, c, b, w, outliers_of(*value.t, page, part.store->page_size, head_dim), head_dim, token);

  if (value.channel_scales && value.integer && !value.decoded)
    for (int h = 0; h < c.rows; h++)
      for (int i = 0; i < head_dim; i += VL) store(c.acc[h] + i, load(c.acc[h] + i) + load(b.v_channel + i) * b.p_zero[h]);
  if (part.value_bias)
    for (int h = 0; h < c.rows; h++)
      for (int i = 0; i < head_dim; i += VL) store(c.acc[h] + i, load(c.acc[h] + i) + load(b.v_channel_bias + i) * b.p_sum[h]);
}

// Log-sum-exp of one page alone, for the rows that see any of it; a page may come in several blocks.
static void add_page_lse(const Chunk& c, const Block& b, float* to, const int* first, const int* end) {
  for (int h = 0; h < c.rows; h++) {
    if (first[h] >= end[h]) continue;
    vf total = vf{};
    for (int t = 0; t < BLOCK; t += VL) total += load(b.s[h] + t);
    const float x = (c.m[h] + __builtin_log2f(sum(total))) * 0.69314718056f, y = to[c.out_row[h]], top = x > y ? x : y;
    to[c.out_row[h]] = y > -__builtin_inff() ? top + __builtin_logf(__builtin_expf(x - top) + __builtin_expf(y - top)) : x;
  }
}

// Settles what the groups' channels share, at the end of a part.
static void fold_corrections(Chunk& c, const Tensor& value) {
  for (int g = 0; g < value.groups; g++)
    for (int h = 0; h < c.rows; h++) {
      const float add = sum(load(c.corr[g][h]));
      for (int i = 0; i < value.group_channels; i++) c.acc[h][g * value.group_channels + i] += add;
    }
}

// Where the scales, biases, outliers of a head struct begin.
static int64_t first_param(const kvbits_store& store) {
  int64_t first = store.head_bytes;
  for (int side = 0; side < 2; side++) {
    const kvbits_tensor& t = side ? store.value : store.key;
    const int32_t offsets[4] = {t.scale_offset, t.mean_offset, t.stretch_offset, t.num_outliers ? t.outlier_index_offset : -1};
    for (int i = 0; i < 4; i++)
      if (offsets[i] >= 0 && offsets[i] < first) first = offsets[i];
  }
  return first;
}

// Pages small enough to be over before the next one has come from memory are fetched several ahead.
constexpr int64_t FETCH_AHEAD_BYTES = 8192;

// What the whole part shares. Channel scales and biases are 1 and 0 where the format has none.
static void begin_decoding(const PartView& part, Decoded& w, Block& b, int kv_head) {
  const kvbits_tensor &key = *part.key.t, &value = *part.value.t;
  if (part.key.decoded) {
    if (code_bits(key.format) < 8) fill_levels(w.levels, key, kv_head);
    for (int i = 0; i < part.call->head_dim; i += VL) {
      store(b.k_channel + i, splat(1.0f));
      store(b.k_channel_bias + i, vf{});
    }
    for (int i = 0; i < BLOCK; i += VL) store(w.ones + i, splat(1.0f));
  }
  if (part.value.decoded && !part.value.integer) fill_levels(w.value_levels, value, kv_head);
}

// Stretches of `n` tokens from `token` on, 0 behind them.
static void token_factors(const kvbits_tensor& t, const uint8_t* page, int token, int n, float* to) {
  widen_params(to, page + t.stretch_offset + (int64_t)token * dtype_bytes(t.scale_dtype), n, t.scale_dtype, 0);
}

static void load_stretch(Decoded& w, const kvbits_tensor& t, const uint8_t* page, int token, int n) {
  token_factors(t, page, token, n, w.factor);
  for (int i = 0; i < BLOCK / TILE; i++) {
    vi other = vi{};
    for (int k = i * TILE; k < (i + 1) * TILE; k += VL) other |= load(w.factor + k) != splat(1.0f);
    w.stretched[i] = any(other);
  }
}

static void attend_part(const PartView& part, const kvbits_part& pages, int64_t lo, int64_t hi, int kv_head, Scratch& w, int chunks,
                        const uint8_t* after, float* page_lse) {
  const kvbits_store& store = *part.store;
  const kvbits_table& table = *pages.table;
  const int head_dim = part.call->head_dim;
  const int64_t head_offset = kv_head * store.head_bytes;
  auto low_page = [&](int64_t e) { return page_address(pages.low, pages.low_ids[e]) + kv_head * pages.low->head_bytes; };
  const int64_t lookahead = store.head_bytes >= FETCH_AHEAD_BYTES ? 1 : (FETCH_AHEAD_BYTES + store.head_bytes - 1) / store.head_bytes;
  Block& b = w.block;
  Decoded& decoded = w.decoded;
  const kvbits_tensor& key = *part.key.t;
  begin_decoding(part, decoded, b, kv_head);
  const bool static_key = part.key.channel_scales && !part.key.page_channels;
  const bool static_bias = static_key && channel_params(part.key, nullptr, kv_head, head_dim, b.k_channel, b.k_channel_bias) && !part.key.decoded;
  KeyPairs* pairs = part.key.format != NESTED && pairs_usable(key, part.key.row_bytes, store.page_size, head_dim) ? &w.pairs : nullptr;
  auto fill = [&] {
    if (pairs) fill_pairs(*pairs, b.k_channel, b.k_channel_bias, head_dim);
    else if (part.key.decoded && code_bits(key.format) < 8) fill_tables(decoded, b.k_channel, b.k_channel_bias, head_dim);
  };
  if (pairs) fill_turns(*pairs, key.turns, store.page_size, head_dim / 2);
  if (pairs) fill_pair_levels(*pairs, decoded.levels, code_bits(key.format), head_dim);
  fill();
  float longest_pair = 0.0f;
  for (int i = 0; i < chunks; i++) {
    Chunk& c = w.chunks[i];
    if (part.value.token_scales) __builtin_memset(c.corr, 0, sizeof(c.corr[0]) * part.value.groups);
    if (!part.key.page_channels) prepare_query(c, part.key, b.k_channel, head_dim);
    for (int h = 0; h < c.rows; h++) c.q_bias[h] = 0;
    if (static_bias) add_query_bias(c, b.k_channel_bias, head_dim);
    if (key.num_outliers && !key.inv_freq) BY_ROWS(c, query_columns, c, false, head_dim);
    if (pairs) longest_pair = __builtin_fmaxf(longest_pair, measure_pairs(c, head_dim));
    c.value_outliers = part.value.t->num_outliers;
    if (c.value_outliers) __builtin_memset(c.acc_columns, 0, sizeof(float) * (c.rows <= 4 ? 4 : 8) * round_up(head_dim, 16));
  }
  decoded.angles_of = -1;
  const int64_t rows = (int64_t)part.call->num_tokens * part.call->num_heads;
  PartView view = part;
  view.pairs = pairs;
  const int64_t params = view.params = first_param(store);
  view.params_per_tile = store.page_size >= TILE ? round_up((int)((store.head_bytes - params) / (store.page_size / TILE)), 64) : 64;
  const bool fetch_params = part.key.page_channels || part.value.page_channels || key.mean_offset >= 0 || key.num_outliers || part.value.t->num_outliers;
  const int64_t window = part.call->sliding_window;
  int64_t newest = -1, oldest = INT64_MAX;
  for (int i = 0; i < chunks; i++)
    for (int h = 0; h < w.chunks[i].rows; h++) {
      const int64_t p = w.chunks[i].position[h];
      if (p < 0) continue;
      if (p > newest) newest = p;
      if (p < oldest) oldest = p;
    }
  for (int64_t e = lo; e < hi; e++) {
    const int64_t start = table.starts[e];
    const int length = table.lengths[e];
    if (start > newest || (window && start + length <= oldest - window + 1)) continue;
    const uint8_t* page = page_address(&store, table.page_ids[e]) + head_offset;
    const uint8_t* coming = e + lookahead < hi ? page_address(&store, table.page_ids[e + lookahead]) + head_offset : after ? after : page;
    const uint8_t* low = pages.low ? low_page(e) : nullptr;
    const int64_t low_ahead = low && e + lookahead < hi ? low_page(e + lookahead) - low : 0;
    if (fetch_params && !part.key.decoded) fetch_range(coming + params, store.head_bytes - params);
    if (key.inv_freq) {
      page_angles(decoded, key.inv_freq, start, store.page_size, head_dim / 2);
      // Integer queries lose to a row's largest pair what the others have: too much for large outliers.
      view.float_outliers = pairs && key.num_outliers && largest_outlier(outliers_of(key, page, store.page_size, head_dim)) * longest_pair > PAIR_OUTLIER_LIMIT;
      const bool floats = !pairs || view.float_outliers;
      for (int i = 0; i < chunks && (floats || key.stretch_offset >= 0); i++) {
        turn_back(w.chunks[i], decoded, head_dim);
        if (key.num_outliers && floats) BY_ROWS(w.chunks[i], query_columns, w.chunks[i], true, head_dim);
      }
    }
    if (part.key.page_channels || key.mean_offset >= 0) {
      const bool any = channel_params(part.key, page, kv_head, head_dim, b.k_channel, b.k_channel_bias) && !part.key.decoded;
      fill();
      for (int i = 0; i < chunks; i++) {
        Chunk& c = w.chunks[i];
        if (part.key.page_channels) prepare_query(c, part.key, b.k_channel, head_dim);
        for (int h = 0; h < c.rows; h++) c.q_bias[h] = 0;
        if (any) add_query_bias(c, b.k_channel_bias, head_dim);
      }
    }
    if (pairs)
      for (int i = 0; i < chunks; i++) {
        if (!key.num_outliers || view.float_outliers) quantize_pairs<0>(w.chunks[i], decoded, *pairs, head_dim);
        else BY_ROWS(w.chunks[i], quantize_pairs, w.chunks[i], decoded, *pairs, head_dim);
      }
    view.value_bias = channel_params(part.value, page, kv_head, head_dim, b.v_channel, b.v_channel_bias);
    for (int token = 0; token < length; token += BLOCK) {
      const int n = length - token < BLOCK ? length - token : BLOCK;
      if (part.key.token_scales) token_params(part.key, page, store.page_size, token, n, coming - page, b.k_scale, b.k_bias);
      if (part.value.token_scales) token_params(part.value, page, store.page_size, token, n, coming - page, b.v_scale, b.v_bias);
      if (key.stretch_offset >= 0) load_stretch(decoded, key, page, token, n);
      if (part.value.t->stretch_offset >= 0) token_factors(*part.value.t, page, token, n, b.v_scale[0]);
      find_runs(decoded, key, *part.value.t, page, store.page_size, head_dim, token);
      // Only the first chunk fetches ahead: the others read the same bytes again.
      for (int i = 0; i < chunks; i++) {
        const PageView at = {page, low, i ? 0 : coming - page, i ? 0 : low_ahead, page_lse ? page_lse + e * rows : nullptr};
        attend_block(view, w.chunks[i], b, decoded, at, token, n, start + token);
      }
    }
  }
  if (part.value.token_scales && (part.value.integer || part.value.token_bias))
    for (int i = 0; i < chunks; i++) fold_corrections(w.chunks[i], part.value);
  if (part.value.t->num_outliers)
    for (int i = 0; i < chunks; i++) {
      BY_ROWS(w.chunks[i], fold_value_outliers, w.chunks[i], head_dim);
      w.chunks[i].value_outliers = false;
    }
}

static void load_rows(Chunk& c, const kvbits_attend_call& call, const AttendItem& item, int first, int rows) {
  const int group = call.num_heads / call.num_kv_heads;
  const int64_t b = item.sequence;
  c.rows = rows;
  for (int i = 0; i < ROW_LANES; i += VL) store(c.m + i, splat(LOWEST));
  // A cap needs the score in natural units; otherwise log2(e) is folded in and softmax is a plain 2^x.
  const float factor = call.softcap > 0 ? call.scaling : call.scaling * 1.44269504089f;
  for (int h = 0; h < rows; h++) {
    const int row = item.first_row + first + h, token = row / group, head = item.kv_head * group + row % group;
    const int64_t at = b * call.q_stride[0] + token * call.q_stride[1] + head * call.q_stride[2];
    widen(c.q[h], (const char*)call.q + at * dtype_bytes(call.q_dtype), call.head_dim, call.q_dtype);
    const int padded = round_up(call.head_dim, VL);
    for (int i = 0; i < padded; i += VL) {
      store(c.q[h] + i, load(c.q[h] + i) * factor);
      store(c.acc[h] + i, vf{});
    }
    store(c.l[h], vf{});
    c.position[h] = call.q_positions[b * call.num_tokens + token];
    c.out_row[h] = (int64_t)token * call.num_heads + head;
  }
}

static void store_rows(Chunk& c, const AttendPlan& plan, const AttendItem& item, int first) {
  const kvbits_attend_call& call = *plan.call;
  const int group = call.num_heads / call.num_kv_heads, head_dim = call.head_dim;
  for (int h = 0; h < c.rows; h++) {
    const float total = sum(load(c.l[h]));
    if (item.partial >= 0) {
      float* to = plan.partial + (item.partial + first + h) * partial_stride(head_dim);
      __builtin_memcpy(to, c.acc[h], head_dim * 4);
      to[head_dim] = c.m[h] > LOWEST ? c.m[h] : -__builtin_inff();
      to[head_dim + 1] = total;
      continue;
    }
    const int row = item.first_row + first + h, token = row / group, head = item.kv_head * group + row % group;
    const int64_t at = ((int64_t)item.sequence * call.num_tokens + token) * call.num_heads + head;
    const bool seen = c.m[h] > LOWEST;
    const float inverse = seen ? 1.0f / total : 0.0f;
    for (int i = 0; i < head_dim; i++) call.out[at * head_dim + i] = c.acc[h][i] * inverse;
    call.lse[at] = seen ? (c.m[h] + __builtin_log2f(total)) * 0.69314718056f : -__builtin_inff();
  }
}

static void reorder_outputs(Scratch& w, int chunks, int head_dim, bool back) {
  for (int i = 0; i < chunks; i++)
    for (int h = 0; h < w.chunks[i].rows; h++) split_order(w.chunks[i].acc[h], head_dim, back);
}

static const uint8_t* first_page(const kvbits_attend_call& call, const AttendItem& item) {
  int64_t flat = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& table = *call.parts[p].table;
    const int64_t begin = table.indptr[item.sequence], n = table.indptr[item.sequence + 1] - begin;
    if (item.first_entry < flat + n)
      return page_address(call.parts[p].store, table.page_ids[begin + item.first_entry - flat]) + item.kv_head * call.parts[p].store->head_bytes;
    flat += n;
  }
  return nullptr;
}

static void attend_item(const AttendPlan* plan, const AttendItem* item, const AttendItem* next, void* scratch) {
  const kvbits_attend_call& call = *plan->call;
  Scratch& w = *(Scratch*)scratch;
  const int chunks = (item->num_rows + ROWS - 1) / ROWS, per_chunk = (item->num_rows + chunks - 1) / chunks;
  for (int i = 0; i < chunks; i++) {
    const int first = i * per_chunk, left = item->num_rows - first;
    load_rows(w.chunks[i], call, *item, first, left < per_chunk ? left : per_chunk);
  }
  const uint8_t* after = next ? first_page(call, *next) : nullptr;
  int64_t flat = 0;
  for (int p = 0; p < call.num_parts; p++) {
    const kvbits_table& table = *call.parts[p].table;
    const int64_t begin = table.indptr[item->sequence], n = table.indptr[item->sequence + 1] - begin;
    const int64_t lo = item->first_entry > flat ? item->first_entry - flat : 0;
    const int64_t hi = item->end_entry - flat < n ? item->end_entry - flat : n;
    flat += n;
    if (lo >= hi) continue;
    PartView part = {};
    part.call = &call;
    part.store = call.parts[p].store;
    const kvbits_store* low = call.parts[p].low;
    part.key = describe(part.store->key, low ? &low->key : nullptr, call.head_dim, hi - lo);
    part.value = describe(part.store->value, low ? &low->value : nullptr, call.head_dim, hi - lo);
    if (DOTS_CENTER_INT4_VALUES && part.value.integer && part.value.format == KVBITS_INT4) part.value.dot_zero = 0.0f;
    if (part.value.decoded && LEVEL_LIMIT > 0) {
      part.value.integer = true;
      float zero;
      level_bytes(part.store->value, item->kv_head, LEVEL_LIMIT, w.decoded.level_bytes, part.value.unit, zero);
      fill_nibble_bytes(w.decoded, code_bits(part.store->value.format));
      if (part.value.token_scales) part.value.dot_zero = zero;
    }
    if (part.value.split) reorder_outputs(w, chunks, call.head_dim, false);
    int64_t before = 0;  // entries of earlier parts
    for (int i = 0; i < p; i++) before += call.parts[i].table->num_entries;
    float* page_lse = call.page_lse ? call.page_lse + before * call.num_tokens * call.num_heads : nullptr;
    attend_part(part, call.parts[p], begin + lo, begin + hi, item->kv_head, w, chunks, after, page_lse);
    if (part.value.split) reorder_outputs(w, chunks, call.head_dim, true);
  }
  for (int i = 0; i < chunks; i++) store_rows(w.chunks[i], *plan, *item, i * per_chunk);
}
