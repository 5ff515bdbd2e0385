// Raw keys and values to packed pages in one launch: one block per (page, kv head, keys or values), each value read
// once.
//
// A thread holds eight neighbouring channels of ROWS tokens in registers, as they came. Extremes (and means) meet in
// shared memory, the chosen scales are rounded to their storage type and written, codes are taken against the ROUNDED
// scales in float32 exactly as kvbits/quant/qparams.py does, and go to shared memory as bytes [token][channel], from
// which whole stored words are put together (docs/reference/formats.md has the order).
#include "octets.cuh"
#include "step.cuh"

constexpr int OCTETS = D / 8, TEAMS = THREADS / OCTETS, ROWS = (PAGE + TEAMS - 1) / TEAMS;

struct Args {
    const void* x[2];             // keys, values [n, H, PAGE, D], strides in elements, last dense
    i64 stride[2][3];
    const i64* page_address;      // [n]
    const float* scale[2];        // calibrated [H][groups or channels], null if none
    const float* bias[2];
    Status* status;
    int num_heads, head_bytes;
#if APPENDS
    Step step;                    // `page` counts sequences
#endif
};

struct Shared {
    union {
        // lowest and highest (or largest magnitude) of every octet or team
        float extremes[2][PAGE * OCTETS > TEAMS * D ? PAGE * OCTETS : TEAMS * D];
        double sums[TEAMS * D];
        unsigned char codes[PAGE][CODE_STRIDE];
    };
    // [group][token] or [channel]
    float inverse[GROUP_SCALES > D ? GROUP_SCALES : D], bias[GROUP_SCALES > D ? GROUP_SCALES : D];
    float mean[D];
};

/// Scales (and biases) of every group or channel, stored and, as reciprocals, in shared memory. x: this thread's
/// values, less `mean`.
template <class S>
DEVICE void choose_scales(const Octet (&x)[ROWS], const float (&mean)[8], int team, int octet, bool works,
                          unsigned char* out, Shared& shared, bool& overflow) {
    constexpr bool BY_CHANNEL = S::SCALE == SCALE_CHANNEL;
    float *low = shared.extremes[0], *high = shared.extremes[1];
    if (works && BY_CHANNEL) {
        for (int k = 0; k < 8; ++k) {
            float lo = x[0][k] - mean[k], hi = S::HAS_BIAS ? lo : fabsf(lo);
#pragma unroll
            for (int i = 1; i < ROWS; ++i) {
                if (team + i * TEAMS >= PAGE) break;
                float y = x[i][k] - mean[k];
                lo = fminf(lo, y);
                hi = fmaxf(hi, S::HAS_BIAS ? y : fabsf(y));
            }
            if (S::HAS_BIAS) low[team * D + octet * 8 + k] = lo;
            high[team * D + octet * 8 + k] = hi;
        }
    } else if (works) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            int token = team + i * TEAMS;
            if (token >= PAGE) break;
            float lo, hi;
            ends_of<S>(x[i], mean, lo, hi);
            if (S::HAS_BIAS) low[token * OCTETS + octet] = lo;
            high[token * OCTETS + octet] = hi;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < S::SCALES; at += THREADS) {
        // [channel] over teams, or [group][token] over the group's octets
        constexpr int COUNT = BY_CHANNEL ? (TEAMS < PAGE ? TEAMS : PAGE) : S::GROUP / 8, STEP = BY_CHANNEL ? D : 1;
        int first = BY_CHANNEL ? at : at % PAGE * OCTETS + at / PAGE * COUNT;
        float lo = S::HAS_BIAS ? low[first] : 0.f, hi = high[first];
        for (int i = 1; i < COUNT; ++i) {
            if (S::HAS_BIAS) lo = fminf(lo, low[first + i * STEP]);
            hi = fmaxf(hi, high[first + i * STEP]);
        }
        float scale, bias;
        parameters_of<S>(lo, hi, scale, bias, overflow);
        store<S::TYPE>(out + S::SCALE_OFFSET, at, scale);
        if (S::HAS_BIAS) store<S::TYPE>(out + S::BIAS_OFFSET, at, bias);
        shared.inverse[at] = __fdiv_rn(1.f, scale);
        shared.bias[at] = bias;
    }
    __syncthreads();  // codes overwrite the extremes
}

/// Codes of this thread's values to shared memory, one a byte.
template <class S>
DEVICE void write_codes(const Octet (&x)[ROWS], const float (&mean)[8], int team, int octet, bool works, Shared& shared,
                        int& saturated) {
    constexpr bool BY_TOKEN = S::SCALE == SCALE_GROUP;  // then a thread's eight values of a token share a scale
    float inverse[8] = {}, bias[8] = {};
    for (int k = 0; k < 8 && !BY_TOKEN; ++k)
        inverse[k] = shared.inverse[octet * 8 + k], bias[k] = shared.bias[octet * 8 + k];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        int token = team + i * TEAMS;
        if (!works || token >= PAGE) continue;
        int at = octet * 8 / S::GROUP * PAGE + token;
        if (BY_TOKEN) inverse[0] = shared.inverse[at], bias[0] = shared.bias[at];
        u32 codes[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            float y = x[i][k];
            if (S::HAS_MEAN) y -= mean[k];
            if (S::HAS_BIAS) y -= bias[BY_TOKEN ? 0 : k];
            // Never one fused multiply-add with what follows: the reference rounds the product first.
            y = __fmul_rn(y, inverse[BY_TOKEN ? 0 : k]);
            codes[k] = code_of<S>(y, saturated);
        }
        put_codes(codes, &shared.codes[token][octet * 8]);
    }
}

template <class S>
DEVICE void close_side(const Args& a, int side, int page, int head, Shared& shared) {
    const int thread = threadIdx.x, octet = thread % OCTETS, team = thread / OCTETS;
    const bool works = team < TEAMS && (S::D == D || octet < S::OCTETS);
#if APPENDS
    const Closing closing = a.step.closings[page];
    unsigned char* out = reinterpret_cast<unsigned char*>(a.step.closed) + closing.to + i64(head) * a.head_bytes;
    const char* raw = a.step.tail + closing.from + head * a.step.tail_head_bytes + a.step.tail_offset[side];
    const i64 from = octet * 8;
#else
    unsigned char* out = reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
    const i64 from = page * a.stride[side][0] + head * a.stride[side][1] + octet * 8;
#endif
    Octet x[ROWS];
    float mean[8] = {};
    bool bad = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        int token = team + i * TEAMS;
        for (int k = 0; k < Octet::WORDS; ++k) x[i].w[k] = 0;
#if APPENDS
        if (works && token < PAGE) x[i].load(raw, from + token * S::D);
#else
        if (works && token < PAGE) x[i].load(a.x[side], from + token * a.stride[side][2]);
#endif
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) bad |= !finite(x[i].largest());
    if (bad) a.status->nonfinite[side] = 1;
    if (S::FLOAT == RAW) {
        for (int i = 0; i < ROWS; ++i) {
            int token = team + i * TEAMS;
            if (works && token < PAGE)
                for (int k = 0; k < 8; ++k) store<RAW_TYPE>(out + S::OFFSET0, token * S::D + octet * 8 + k, x[i][k]);
        }
        return;
    }
    bool overflow = false;
    if (S::HAS_MEAN) {
        for (int k = 0; k < 8 && works; ++k) {
            double sum = 0;
            for (int i = 0; i < ROWS; ++i) sum += x[i][k];
            shared.sums[team * D + octet * 8 + k] = sum;
        }
        __syncthreads();
        for (int ch = thread; ch < S::D; ch += THREADS) {
            double sum = 0;
            for (int t = 0; t < TEAMS; ++t) sum += shared.sums[t * D + ch];
            shared.mean[ch] = rounded<S::TYPE>(float(sum / PAGE));
            overflow |= !finite(shared.mean[ch]);
            store<S::TYPE>(out + S::MEAN_OFFSET, ch, shared.mean[ch]);
        }
        __syncthreads();
        for (int k = 0; k < 8; ++k) mean[k] = shared.mean[octet * 8 + k];
    }
    if (S::SCALE == SCALE_STATIC) {
        for (int i = thread; i < S::D; i += THREADS) {
            int at = head * S::GROUPS + i / S::GROUP;
            shared.inverse[i] = __fdiv_rn(1.f, a.scale[side][at]);
            shared.bias[i] = a.bias[side] ? a.bias[side][at] : 0.f;
        }
    } else {
        choose_scales<S>(x, mean, team, octet, works, out, shared, overflow);
    }
    if (overflow) a.status->overflow[side] = 1;
    __syncthreads();
    int saturated = 0;
    write_codes<S>(x, mean, team, octet, works, shared, saturated);
    if (!S::NEVER_SATURATES) {
        saturated = __reduce_add_sync(ALL_LANES, saturated);
        if (saturated && thread % 32 == 0) atomicAdd(&a.status->saturated[side], saturated);
    }
    __syncthreads();
    write_plane<S, S::BITS0, S::BITS1>(out + S::OFFSET0, shared);
    if (S::BITS1) write_plane<S, S::BITS1 ? S::BITS1 : 1, 0>(out + S::OFFSET1, shared);
}

using Keys = Side<K_SIDE, false>;
using Values = Side<V_SIDE, true>;

extern "C" __global__ void __launch_bounds__(THREADS) close_pages(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "close.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    i64 item = blockIdx.x;
    int side = item % 2, head = item / 2 % a.num_heads, page = item / 2 / a.num_heads;
#if APPENDS
    if (append_alone<Keys::D, Values::D>(a.step, a.num_heads, side, page, head, threadIdx.x)) return;
#endif
    if (side == 0)  // nothing of the pool's earlier content stays in a page
#if APPENDS
        for (int i = USED_BYTES / 4 + threadIdx.x; i < a.head_bytes / 4; i += THREADS)
            reinterpret_cast<u32*>(a.step.closed + a.step.closings[page].to + i64(head) * a.head_bytes)[i] = 0;
#else
        for (int i = USED_BYTES / 4 + threadIdx.x; i < a.head_bytes / 4; i += THREADS)
            reinterpret_cast<u32*>(a.page_address[page] + i64(head) * a.head_bytes)[i] = 0;
#endif
    if (side == 0) close_side<Keys>(a, 0, page, head, shared);
    else close_side<Values>(a, 1, page, head, shared);
#if APPENDS
    __syncthreads();  // the page has been read: its place may be the fresh token's
    FreshRow<Keys::D, Values::D>(a.step, a.num_heads, side, page, head, threadIdx.x).store();
#endif
}
