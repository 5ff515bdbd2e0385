// Rows of a matrix [rows, columns] fp32, row-major: the INT8 paper's column scales, quantization and dequantization, and
// quantization with a scale per row and group of columns. Rounding as in quant/qparams.py: x * (1 / scale), half to even.

// largest[c] = max(largest[c], |x[r][c]|), in memory order: several rows at once saved loads but lost a third of the bandwidth.
static void column_largest(const float* x, int64_t rows, int64_t columns, float* largest) {
  for (int64_t r = 0; r < rows; r++, x += columns) {
    int64_t c = 0;
    for (; c + VL <= columns; c += VL) {
      const vi top = *(const vi_mem*)(largest + c), mag = (vi)load(x + c) & 0x7fffffff;  // magnitudes order like integers
      *(vi_mem*)(largest + c) = mag > top ? mag : top;
    }
    for (; c < columns; c++) largest[c] = __builtin_fmaxf(largest[c], __builtin_fabsf(x[c]));
  }
}

INLINE vi signed_code(vf x, vf inverse, float top) {
  const vf scaled = vmin(vmax(x * inverse, splat(-top)), splat(top));
  return round_to_int(scaled);
}

static void quantize_columns(const float* x, int64_t rows, int64_t columns, const float* inverse, int8_t* to) {
  for (int64_t r = 0; r < rows; r++, x += columns, to += columns) {
    int64_t c = 0;
    for (; c + VL <= columns; c += VL)
      store_bytes((uint8_t*)to + c, signed_code(load(x + c), load(inverse + c), 127.0f));
    for (; c < columns; c++) to[c] = (int8_t)signed_code(splat(x[c]), splat(inverse[c]), 127.0f)[0];
  }
}

static void dequantize_columns(const int8_t* q, int64_t rows, int64_t columns, const float* scales, float* to) {
  for (int64_t r = 0; r < rows; r++, q += columns, to += columns) {
    int64_t c = 0;
    for (; c + VL <= columns; c += VL) store(to + c, to_float(load_bytes((const uint8_t*)q + c) << 24 >> 24) * load(scales + c));
    for (; c < columns; c++) to[c] = (float)q[c] * scales[c];
  }
}

// The two halves of a row that 4-bit groups walk side by side confuse the hardware's prefetcher.
constexpr int FETCH_FLOATS = 2048;

// One group of `size` columns (a multiple of VL): its scale, and 1 / scale.
INLINE float group_scale(const float* x, int size, float top) {
  vi most = vi{};
  for (int c = 0; c < size; c += VL) {
    fetch(x + c + FETCH_FLOATS);
    const vi mag = (vi)load(x + c) & 0x7fffffff;
    most = mag > most ? mag : most;
  }
  const float largest = max_of((vf)most);
  return largest > 0 ? largest / top : 1.0f;
}

// bits 8: to [rows, columns] int8. bits 4: to [rows, columns / 2], byte r = column r | column (r + columns / 2) << 4, codes + 8.
static void quantize_groups(const float* x, int64_t rows, int64_t columns, int size, int bits, float* scales, uint8_t* to) {
  const int64_t groups = columns / size, half = columns / 2;
  for (int64_t r = 0; r < rows; r++, x += columns, scales += groups, to += bits == 8 ? columns : half) {
    if (bits == 8) {
      for (int64_t g = 0; g < groups; g++) {
        const float* from = x + g * size;
        scales[g] = group_scale(from, size, 127.0f);
        const vf inverse = splat(1.0f / scales[g]);
        for (int c = 0; c < size; c += VL)
          store_bytes(to + g * size + c, signed_code(load(from + c), inverse, 127.0f));
      }
    } else {
      for (int64_t g = 0; g < groups / 2; g++) {
        const float *low = x + g * size, *high = low + half;
        scales[g] = group_scale(low, size, 7.0f);
        scales[g + groups / 2] = group_scale(high, size, 7.0f);
        const vf a = splat(1.0f / scales[g]), b = splat(1.0f / scales[g + groups / 2]);
        for (int c = 0; c < size; c += VL) {
          const vi codes = (signed_code(load(low + c), a, 7.0f) + 8) | (signed_code(load(high + c), b, 7.0f) + 8) << 4;
          store_bytes(to + g * size + c, codes);
        }
      }
    }
  }
}
