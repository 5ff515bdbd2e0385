// Packed pages to 16-bit rows, for attention of many queries: one block per (page, kv head), keys then values.
//
// A code is looked up where docs/reference/formats.md puts it: four neighbouring channels of a key are one word, those
// of four value tokens are 16 bytes. Values are (code - zero) * scale + bias + mean in float32, rounded once.
//
// Listed elements and keys from before the rotary embedding need a page's other numbers: such sides are decoded to a
// float32 tile in shared memory, get their listed elements added (an index is listed once, so without atomics), and are
// turned as they are written.
#include "extras.cuh"

struct Args {
    const i64* page_address;     // [n], layer 0, kv head 0
    const int2* rows;            // [n]: first output row, tokens
    void* out[2];                // keys, values [rows, H, D] in OUT_TYPE
    const float* scale[2];       // calibrated [H][D], null if none
    const float* bias[2];
    const float* codebook[2];    // [H][entries], null if none
    // [n]: position of each page's first token; read for keys from before the rotary embedding
    const int* starts;
    const float2* turns;         // [D / 2] of side.py's turns_of
    i64 layer_offset;            // bytes
    int num_heads, head_bytes;
};

DEVICE void store4(void* out, i64 at, const float (&x)[4]) {
    uint2 w;
    if (OUT_TYPE == BFLOAT16) w = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
    else w = {pack_f16(x[0], x[1]), pack_f16(x[2], x[3])};
    *reinterpret_cast<uint2*>(static_cast<u16*>(out) + at) = w;
}

constexpr int row_bytes(int channels, int bits) { return (channels * bits + 31) / 32 * 4; }

/// Codes of channels ch .. ch + 3 (a multiple of 4) in one plane, one a byte: of one key token, or of the four value
/// tokens of a quad.
template <int CHANNELS, int BITS>
DEVICE u32 fields(u32 word, int ch) {
    return BITS == 8 ? word : (word >> ch / row_bytes(CHANNELS, BITS) * BITS) & ((1u << BITS) - 1) * 0x01010101u;
}
template <int CHANNELS, int BITS>
DEVICE u32 key_codes(const unsigned char* plane, int token, int ch) {
    int r = ch % row_bytes(CHANNELS, BITS);
    return fields<CHANNELS, BITS>(
        *reinterpret_cast<const u32*>(plane + ((token / 16) * (row_bytes(CHANNELS, BITS) / 4) + r / 4) * 64 +
                                      token % 16 * 4),
        ch);
}
/// word[k]: channel ch + k of the quad's four tokens.
template <int CHANNELS, int BITS>
DEVICE void value_codes(u32 (&word)[4], const unsigned char* plane, int quad, int ch) {
    int r = ch % row_bytes(CHANNELS, BITS), width = min(16, row_bytes(CHANNELS, BITS) - r / 16 * 16);
    uint4 w = *reinterpret_cast<const uint4*>(plane + r / 16 * 16 * PAGE + quad * 4 * width + r % 16 * 4);
    word[0] = fields<CHANNELS, BITS>(w.x, ch);
    word[1] = fields<CHANNELS, BITS>(w.y, ch);
    word[2] = fields<CHANNELS, BITS>(w.z, ch);
    word[3] = fields<CHANNELS, BITS>(w.w, ch);
}

template <class S, class E>
DEVICE float number(u32 code, const float* codebook) {
    if (E::CODEBOOK) return codebook[code];
    if (S::IS_FLOAT) return float_of<S::FLOAT>(code);
    return float(int(code) - S::ZERO);
}

template <class E>
constexpr bool STAGED = E::OUTLIERS || E::TURNED;

template <class S, class E>
struct Reader {
    const unsigned char* page;
    const float *scale, *bias, *codebook;  // of this head
    float* tile;                 // [PAGE][D], only if STAGED

    /// Adds scale, bias and mean to four neighbouring numbers and stores them.
    DEVICE void finish(void* out, i64 at, float (&x)[4], int token, int ch) const {
        const float stretch = E::STRETCH ? load_value<S::TYPE>(page + E::STRETCH_OFFSET, token) : 1.f;
        for (int k = 0; k < 4; ++k) {
            int place = S::SCALE == SCALE_CHANNEL ? ch + k : ch / S::GROUP * PAGE + token;
            x[k] *= S::SCALE == SCALE_STATIC ? scale[ch + k] : load_value<S::TYPE>(page + S::SCALE_OFFSET, place);
            if (E::STRETCH) x[k] *= stretch;
            if (S::HAS_BIAS)
                x[k] += S::SCALE == SCALE_STATIC ? bias[ch + k] : load_value<S::TYPE>(page + S::BIAS_OFFSET, place);
            if (S::HAS_MEAN) x[k] += load_value<S::TYPE>(page + S::MEAN_OFFSET, ch + k);
        }
        if (STAGED<E>) *reinterpret_cast<float4*>(tile + token * S::D + ch) = {x[0], x[1], x[2], x[3]};
        else store4(out, at, x);
    }
};

/// The tile's rows with their listed elements, turned to their positions if they are not yet.
template <class S, class E>
DEVICE void write_tile(const Args& a, int side, const unsigned char* page, float* tile, i64 base, i64 stride,
                       int tokens) {
    __syncthreads();
    for (int i = threadIdx.x; i < E::OUTLIERS; i += THREADS) {
        u32 at = E::index(page, i);
        if (at < tokens * S::D) tile[at] += load_value<S::TYPE>(page + E::VALUE_OFFSET, i);
    }
    __syncthreads();
    constexpr int STEP = E::TURNED ? S::D / 8 : S::D / 4;  // lanes of a row
    for (int i = threadIdx.x; i < tokens * STEP; i += THREADS) {
        int token = i / STEP, ch = i % STEP * 4;
        float4 low = *reinterpret_cast<const float4*>(tile + token * S::D + ch);
        float x[4] = {low.x, low.y, low.z, low.w};
        if (E::TURNED) {
            float4 high = *reinterpret_cast<const float4*>(tile + token * S::D + S::D / 2 + ch);
            float y[4] = {high.x, high.y, high.z, high.w};
            for (int k = 0; k < 4; ++k) {
                float2 t = turn_of(a.starts[blockIdx.x] + token, a.turns[ch + k]);
                float turned = x[k] * t.x - y[k] * t.y;
                y[k] = y[k] * t.x + x[k] * t.y;
                x[k] = turned;
            }
            store4(a.out[side], base + token * stride + S::D / 2 + ch, y);
        }
        store4(a.out[side], base + token * stride + ch, x);
    }
    __syncthreads();  // the other side writes the same tile
}

template <class S, class E>
DEVICE void unpack(const Args& a, int side, const unsigned char* page, int head, int2 rows, float* tile) {
    const i64 stride = i64(a.num_heads) * S::D, base = i64(rows.x) * stride + head * S::D;
    Reader<S, E> reader = {page, a.scale[side] + head * S::D, a.bias[side] + head * S::D,
                           a.codebook[side] + (head << (S::BITS > 8 ? 0 : S::BITS)), tile};
    constexpr int CHUNKS = S::D / 4;
    if (S::FLOAT == RAW) {
        for (int i = threadIdx.x; i < rows.y * CHUNKS; i += THREADS) {
            uint2 w = *reinterpret_cast<const uint2*>(page + S::OFFSET0 + i64(i) * 8);
            *reinterpret_cast<uint2*>(static_cast<u16*>(a.out[side]) + base + i / CHUNKS * stride + i % CHUNKS * 4) = w;
        }
    } else if (S::VALUES) {
        for (int i = threadIdx.x; i < (rows.y + 7) / 8 * 2 * CHUNKS; i += THREADS) {
            int quad = i / CHUNKS, ch = i % CHUNKS * 4;
            u32 word[4];
            value_codes<S::D, S::BITS0>(word, page + S::OFFSET0, quad, ch);
            if (S::BITS1) {
                u32 second[4];
                value_codes<S::D, S::BITS1 ? S::BITS1 : 8>(second, page + S::OFFSET1, quad, ch);
                for (int k = 0; k < 4; ++k) word[k] = word[k] << S::BITS1 | second[k];
            }
            for (int u = 0; u < 4; ++u) {
                // slots hold tokens 0 1 4 5 2 3 6 7
                int token = quad / 2 * 8 + (0x76325410u >> (quad % 2 * 4 + u) * 4 & 7);
                if (token >= rows.y) continue;
                float x[4];
                for (int k = 0; k < 4; ++k) x[k] = number<S, E>(word[k] >> 8 * u & 255, reader.codebook);
                reader.finish(a.out[side], base + token * stride + ch, x, token, ch);
            }
        }
    } else {
        for (int i = threadIdx.x; i < rows.y * CHUNKS; i += THREADS) {
            int token = i / CHUNKS, ch = i % CHUNKS * 4;
            u32 word = key_codes<S::D, S::BITS0>(page + S::OFFSET0, token, ch);
            if (S::BITS1)
                word = word << S::BITS1 | key_codes<S::D, S::BITS1 ? S::BITS1 : 8>(page + S::OFFSET1, token, ch);
            float x[4];
            for (int k = 0; k < 4; ++k) x[k] = number<S, E>(word >> 8 * k & 255, reader.codebook);
            reader.finish(a.out[side], base + token * stride + ch, x, token, ch);
        }
    }
    if (STAGED<E>) write_tile<S, E>(a, side, page, tile, base, stride, rows.y);
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize_pages(const __grid_constant__ Args a) {
    const int head = blockIdx.y;
    const auto* page =
        reinterpret_cast<const unsigned char*>(a.page_address[blockIdx.x] + a.layer_offset + i64(head) * a.head_bytes);
    const int2 rows = a.rows[blockIdx.x];
    extern __shared__ __align__(16) float tile[];
    unpack<Side<K_SIDE, false>, Extras<K_EXTRAS>>(a, 0, page, head, rows, tile);
    unpack<Side<V_SIDE, true>, Extras<V_EXTRAS>>(a, 1, page, head, rows, tile);
}
