// The INT8 paper's matrix study: its four quantize and dequantize variants as printed, scales on the GPU, and the
// production kernels.
//
// The paper's variants divide by the scale (x / s, rounded half to even); the production kernel multiplies by 1 / s
// like the rest of kvbits, which differs by one code in about 3 of a million elements. All offsets are 64-bit: the
// largest case has 2**30 elements. x: [rows, columns] of X_TYPE.
#include "numbers.h"
#include "ptx.cuh"

constexpr int TILE_X = 32, TILE_Y = 8;                       // blocks of the printed kernels
constexpr int VEC = VECTOR, UNROLL = VEC == 1 ? 8 : 4;        // neighbouring columns of a thread, rows in flight
constexpr int CODE_UNROLL = 8;                               // codes are a quarter of the bytes: more rows in flight

struct Args {
    const void* x;
    signed char* q;
    void* y;                     // dequantized
    float* scales;
    u32* largest;                // float bits of every column's max |x|
    i64 rows, columns;
    int size, bits;              // quantize_groups
};

DEVICE float load_one(const void* x, i64 i) {
    if (X_TYPE == FLOAT32) return static_cast<const float*>(x)[i];
    u16 h = static_cast<const u16*>(x)[i];
    return X_TYPE == FLOAT16 ? f16_to_float(h) : bf16_to_float(h);
}
DEVICE void store_one(void* y, i64 i, float value) {
    if (X_TYPE == FLOAT32) static_cast<float*>(y)[i] = value;
    else static_cast<u16*>(y)[i] = u16(X_TYPE == FLOAT16 ? pack_f16(value, 0.f) : pack_bf16(value, 0.f));
}
DEVICE signed char code_of(float x, float scale) {
  return (signed char)max(-127, min(127, __float2int_rn(__fdiv_rn(x, scale))));
}

// the paper's listings 5 to 8

#define ELEMENT i64 t = i64(blockIdx.y) * TILE_Y + threadIdx.y, d = i64(blockIdx.x) * TILE_X + threadIdx.x

extern "C" __global__ void quantize_naive(const __grid_constant__ Args a) {
    ELEMENT;
    if (t < a.rows && d < a.columns) a.q[t * a.columns + d] = code_of(load_one(a.x, t * a.columns + d), a.scales[d]);
}
extern "C" __global__ void dequantize_naive(const __grid_constant__ Args a) {
    ELEMENT;
    if (t < a.rows && d < a.columns) store_one(a.y, t * a.columns + d, a.q[t * a.columns + d] * a.scales[d]);
}

extern "C" __global__ void quantize_tiled(const __grid_constant__ Args a) {
    __shared__ float scales[TILE_X];
    ELEMENT;
    if (threadIdx.y == 0 && d < a.columns) scales[threadIdx.x] = a.scales[d];
    __syncthreads();
    if (t < a.rows && d < a.columns)
      a.q[t * a.columns + d] = code_of(load_one(a.x, t * a.columns + d), scales[threadIdx.x]);
}
extern "C" __global__ void dequantize_tiled(const __grid_constant__ Args a) {
    __shared__ float scales[TILE_X];
    ELEMENT;
    if (threadIdx.y == 0 && d < a.columns) scales[threadIdx.x] = a.scales[d];
    __syncthreads();
    if (t < a.rows && d < a.columns) store_one(a.y, t * a.columns + d, a.q[t * a.columns + d] * scales[threadIdx.x]);
}

/// One thread per column and row block: its scale is loaded once. (The listing steps by blockDim.y, which repeats rows;
/// the step meant is gridDim.y.)
extern "C" __global__ void quantize_coarsened(const __grid_constant__ Args a) {
    i64 d = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (d >= a.columns) return;
    float s = a.scales[d];
    for (i64 t = blockIdx.y; t < a.rows; t += gridDim.y)
      a.q[t * a.columns + d] = code_of(load_one(a.x, t * a.columns + d), s);
}
extern "C" __global__ void dequantize_coarsened(const __grid_constant__ Args a) {
    i64 d = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (d >= a.columns) return;
    float s = a.scales[d];
    for (i64 t = blockIdx.y; t < a.rows; t += gridDim.y) store_one(a.y, t * a.columns + d, a.q[t * a.columns + d] * s);
}

// vectors of VEC neighbouring columns: 16 bytes of x

struct Vector { float x[VEC]; };

DEVICE Vector load_vector(const void* x, i64 i) {
    Vector v;
    if (VEC == 1) {
        v.x[0] = load_one(x, i);
    } else if (X_TYPE == FLOAT32) {
        float4 w = *reinterpret_cast<const float4*>(static_cast<const float*>(x) + i);
        v.x[0] = w.x; v.x[1 % VEC] = w.y; v.x[2 % VEC] = w.z; v.x[3 % VEC] = w.w;
    } else {
        uint4 w = *reinterpret_cast<const uint4*>(static_cast<const u16*>(x) + i);
        u32 words[4] = {w.x, w.y, w.z, w.w};
        for (int k = 0; k < VEC; ++k)
          v.x[k] = X_TYPE == FLOAT16 ? f16_to_float(u16(words[k / 2] >> k % 2 * 16))
                                     : bf16_to_float(u16(words[k / 2] >> k % 2 * 16));
    }
    return v;
}
DEVICE void store_vector(void* y, i64 i, const Vector& v) {
    if (VEC == 1) store_one(y, i, v.x[0]);
    else if (X_TYPE == FLOAT32)
      *reinterpret_cast<float4*>(static_cast<float*>(y) + i) = {v.x[0], v.x[1 % VEC], v.x[2 % VEC], v.x[3 % VEC]};
    else {
        u32 w[4];
        for (int k = 0; k < 4; ++k)
          w[k] = X_TYPE == FLOAT16 ? pack_f16(v.x[2 * k % VEC], v.x[(2 * k + 1) % VEC])
                                   : pack_bf16(v.x[2 * k % VEC], v.x[(2 * k + 1) % VEC]);
        *reinterpret_cast<uint4*>(static_cast<u16*>(y) + i) = {w[0], w[1], w[2], w[3]};
    }
}
DEVICE void store_codes(signed char* q, i64 i, const int (&codes)[VEC]) {
    if (VEC == 1) {
        q[i] = (signed char)codes[0];
        return;
    }
    u32 w[2] = {0, 0};
    for (int k = 0; k < VEC; ++k) w[k / 4] |= (codes[k] & 0xffu) << k % 4 * 8;
    if (VEC == 4) *reinterpret_cast<u32*>(q + i) = w[0];
    else *reinterpret_cast<uint2*>(q + i) = {w[0], w[1]};
}
DEVICE Vector load_codes(const signed char* q, i64 i) {
    Vector v;
    if (VEC == 1) {
        v.x[0] = q[i];
        return v;
    }
    u32 w[2] = {*reinterpret_cast<const u32*>(q + i), VEC == 8 ? *reinterpret_cast<const u32*>(q + i + 4) : 0u};
    for (int k = 0; k < VEC; ++k) v.x[k] = float((signed char)(w[k / 4] >> k % 4 * 8));
    return v;
}

/// Listing 8; a matrix whose rows are no multiple of 16 bytes is compiled with VEC = 1.
extern "C" __global__ void quantize_vectorized(const __grid_constant__ Args a) {
    i64 t = i64(blockIdx.y) * TILE_Y + threadIdx.y, d = (i64(blockIdx.x) * TILE_X + threadIdx.x) * VEC;
    if (t >= a.rows || d >= a.columns) return;
    Vector v = load_vector(a.x, t * a.columns + d);
    int codes[VEC];
    for (int k = 0; k < VEC; ++k) codes[k] = code_of(v.x[k], a.scales[d + k]);
    store_codes(a.q, t * a.columns + d, codes);
}
extern "C" __global__ void dequantize_vectorized(const __grid_constant__ Args a) {
    i64 t = i64(blockIdx.y) * TILE_Y + threadIdx.y, d = (i64(blockIdx.x) * TILE_X + threadIdx.x) * VEC;
    if (t >= a.rows || d >= a.columns) return;
    Vector v = load_codes(a.q, t * a.columns + d);
    for (int k = 0; k < VEC; ++k) v.x[k] *= a.scales[d + k];
    store_vector(a.y, t * a.columns + d, v);
}

// scales on the GPU (the paper computed them on the CPU)

/// A warp per column, its lanes down the rows, merged by shuffles: warp-level reduction, but every load touches 32
/// rows.
extern "C" __global__ void scales_warp(const __grid_constant__ Args a) {
    i64 d = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (d >= a.columns) return;
    float m = 0.f;
    for (i64 t = threadIdx.x % 32; t < a.rows; t += 32) m = fmaxf(m, fabsf(load_one(a.x, t * a.columns + d)));
    for (int mask = 1; mask < 32; mask *= 2) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, mask));
    if (threadIdx.x % 32 == 0) a.scales[d] = m > 0.f ? __fdiv_rn(m, 127.f) : 1.f;
}

/// Where a thread of the production kernels stands: its columns, its first row, and the step between its rows.
struct Place {
    i64 d, t, step;
    DEVICE Place(const Args& a) {
        i64 lanes = (a.columns + VEC - 1) / VEC, across = lanes < 256 ? lanes : 256, down = 256 / across;
        i64 lane = blockIdx.x * across + threadIdx.x % across;
        d = lane < lanes && threadIdx.x < across * down ? lane * VEC : a.columns;
        t = blockIdx.y * down + threadIdx.x / across;
        step = down * gridDim.y;
    }
};

/// Production: max |x| of every column into `largest` (zero before). Positive floats order like their bits, so one
/// integer maximum merges blocks.
extern "C" __global__ void __launch_bounds__(256) column_maxima(const __grid_constant__ Args a) {
    __shared__ u32 shared[256 * VEC];
    for (int i = threadIdx.x; i < 256 * VEC; i += 256) shared[i] = 0;
    __syncthreads();
    Place at(a);
    const bool inside = at.d < a.columns;
    float m[VEC] = {};
    i64 t = inside ? at.t : a.rows;
    for (; t + (UNROLL - 1) * at.step < a.rows; t += UNROLL * at.step) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) v[u] = load_vector(a.x, (t + u * at.step) * a.columns + at.d);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            for (int k = 0; k < VEC; ++k) m[k] = fmaxf(m[k], fabsf(v[u].x[k]));
    }
    for (; t < a.rows; t += at.step) {
        Vector v = load_vector(a.x, t * a.columns + at.d);
        for (int k = 0; k < VEC; ++k) m[k] = fmaxf(m[k], fabsf(v.x[k]));
    }
    // Few columns mean many threads of a block per column: they meet in shared memory, or the atomics would take longer
    // than the reading.
    const int across = a.columns / VEC < 256 ? int((a.columns + VEC - 1) / VEC) : 256;
    for (int k = 0; k < VEC; ++k) atomicMax(&shared[threadIdx.x % across * VEC + k], __float_as_uint(m[k]));
    __syncthreads();
    if (threadIdx.x < across && inside)
        for (int k = 0; k < VEC; ++k) atomicMax(a.largest + at.d + k, shared[threadIdx.x * VEC + k]);
}

extern "C" __global__ void scales_of_maxima(const __grid_constant__ Args a) {
    i64 d = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (d >= a.columns) return;
    float m = __uint_as_float(a.largest[d]);
    a.scales[d] = m > 0.f ? __fdiv_rn(m, 127.f) : 1.f;
}

/// Production: quantize with `scales`, or, if `largest` is given, with the scales that follow from it (and store them).
/// Rows are walked from the last to the first: the maxima were taken in the other direction, so L2 still holds the end
/// of x.
extern "C" __global__ void __launch_bounds__(256) quantize(const __grid_constant__ Args a) {
    Place at(a);
    if (at.d >= a.columns) return;
    float inverse[VEC];
    for (int k = 0; k < VEC; ++k) {
        float s;
        if (a.largest) {
            float m = __uint_as_float(a.largest[at.d + k]);
            s = m > 0.f ? __fdiv_rn(m, 127.f) : 1.f;
            if (at.t == 0) a.scales[at.d + k] = s;
        } else s = a.scales[at.d + k];
        inverse[k] = __fdiv_rn(1.f, s);
    }
    i64 t = at.t;
    for (; t + (UNROLL - 1) * at.step < a.rows; t += UNROLL * at.step) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) v[u] = load_vector(a.x, (a.rows - 1 - (t + u * at.step)) * a.columns + at.d);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            int codes[VEC];
            for (int k = 0; k < VEC; ++k) codes[k] = max(-127, min(127, __float2int_rn(v[u].x[k] * inverse[k])));
            store_codes(a.q, (a.rows - 1 - (t + u * at.step)) * a.columns + at.d, codes);
        }
    }
    for (; t < a.rows; t += at.step) {
        Vector v = load_vector(a.x, (a.rows - 1 - t) * a.columns + at.d);
        int codes[VEC];
        for (int k = 0; k < VEC; ++k) codes[k] = max(-127, min(127, __float2int_rn(v.x[k] * inverse[k])));
        store_codes(a.q, (a.rows - 1 - t) * a.columns + at.d, codes);
    }
}

extern "C" __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ Args a) {
    Place at(a);
    if (at.d >= a.columns) return;
    float s[VEC];
    for (int k = 0; k < VEC; ++k) s[k] = a.scales[at.d + k];
    i64 t = at.t;
    for (; t + (CODE_UNROLL - 1) * at.step < a.rows; t += CODE_UNROLL * at.step) {
        Vector v[CODE_UNROLL];
#pragma unroll
        for (int u = 0; u < CODE_UNROLL; ++u) v[u] = load_codes(a.q, (t + u * at.step) * a.columns + at.d);
#pragma unroll
        for (int u = 0; u < CODE_UNROLL; ++u) {
            for (int k = 0; k < VEC; ++k) v[u].x[k] *= s[k];
            store_vector(a.y, (t + u * at.step) * a.columns + at.d, v[u]);
        }
    }
    for (; t < a.rows; t += at.step) {
        Vector v = load_codes(a.q, t * a.columns + at.d);
        for (int k = 0; k < VEC; ++k) v.x[k] *= s[k];
        store_vector(a.y, t * a.columns + at.d, v);
    }
}

// one scale per row and group of columns

/// Largest magnitude of a group, in all its 16 lanes; lane k reads quads k, k + 16, ..
DEVICE float group_largest(const void* x, i64 first, int size, int lane) {
    float m = 0.f;
    for (int c = 4 * lane; c < size; c += 64)
        for (int k = 0; k < 4; ++k) m = fmaxf(m, fabsf(load_one(x, first + c + k)));
    for (int mask = 1; mask < 16; mask *= 2) m = fmaxf(m, __shfl_xor_sync(ALL_LANES, m, mask));
    return m;
}
DEVICE int group_code(float x, float inverse, int top) { return max(-top, min(top, __float2int_rn(x * inverse))); }

/// Sixteen lanes per row and group; at 4 bits per pair of groups, whose codes share bytes: column c below column c +
/// columns / 2, offset by 8.
extern "C" __global__ void __launch_bounds__(256) quantize_groups(const __grid_constant__ Args a) {
  const int halves = a.bits == 4 ? 2 : 1, groups = int(a.columns / a.size), items = groups / halves,
            lane = threadIdx.x % 16, top = a.bits == 4 ? 7 : 127;
  const i64 wanted = (i64(blockIdx.x) * 256 + threadIdx.x) / 16, last = a.rows * items - 1,
            item = wanted < last ? wanted : last;
  const i64 row = item / items;
  const int group = int(item % items);
  float inverse[2];
  for (int h = 0; h < halves; ++h) {
    float m = group_largest(a.x, row * a.columns + (group + h * items) * i64(a.size), a.size, lane),
          scale = m > 0.f ? __fdiv_rn(m, float(top)) : 1.f;
    inverse[h] = __fdiv_rn(1.f, scale);
    if (lane == 0) a.scales[row * groups + group + h * items] = scale;
  }
    for (int c = 4 * lane; c < a.size; c += 64) {
        const i64 at = row * a.columns + group * i64(a.size) + c;
        u32 word = 0;
        for (int k = 0; k < 4; ++k) {
            int code = group_code(load_one(a.x, at + k), inverse[0], top);
            if (a.bits == 4)
              code = code + 8 | group_code(load_one(a.x, at + a.columns / 2 + k), inverse[1], top) + 8 << 4;
            word |= (code & 0xffu) << 8 * k;
        }
        *reinterpret_cast<u32*>(a.q + (a.bits == 4 ? row * (a.columns / 2) + group * a.size + c : at)) = word;
    }
}
