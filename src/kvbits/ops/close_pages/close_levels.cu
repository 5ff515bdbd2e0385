// Raw keys and values to pages of KVQuant's formats in one launch: one block per (page, kv head, keys or values). docs/formats.md says what is stored,
// kvbits/quant/qparams.py and outliers.py in which order numbers are rounded; every sum, product and quotient below is rounded like theirs.
//
// The page lies in shared memory as float32. A thread has 32 neighbouring elements of the page; one that stands for a range (channel or group of a token)
// finds its ends. Which elements ranges leave out and which errors are listed are the largest of many numbers: a histogram of eight bits at a time finds the
// smallest that still belongs, ties go to the lowest index.
#include "stored.cuh"

constexpr int PER = 32, COUNT = PAGE * D, ROW = D + 1;  // an odd number of words keeps columns of tokens off one bank
constexpr int PADDED = (D / 2 + 15) / 16 * 16;
constexpr int STEPS = 4;              // most elements that a range leaves out
static_assert(COUNT == THREADS * PER, "32 elements a thread");

struct Status { int saturated[2], overflow[2], nonfinite[2]; };

struct Args {
    const void* x[2];                 // keys, values [n, H, PAGE, D], strides in elements, last dense
    i64 stride[2][3];
    const i64* page_address;          // [n]
    const float *scale[2], *bias[2];  // calibrated [H][groups or channels], null if none
    const float* codebook[2];         // [H][entries]
    const double *first, *step;       // cosines and sines of the pages' first angles [n][2][PADDED], and of token distances [PAGE][2][PADDED]
    Status* status;
    int num_heads, head_bytes;
};

struct Shared {
    float x[PAGE][ROW];
    unsigned char codes[PAGE][CODE_STRIDE];
    float scale[RANGES], bias[RANGES];  // [group][token] or [channel]
    float threshold[16], level[16];
    u32 stretch[PAGE];                // float bits
    int bins[256];
    int totals[33];
    int digit, left;
};

/// Sum over the threads before this one, and over all (in `totals[32]`). All threads call it.
DEVICE int sum_before(int mine, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = mine;
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_sync(ALL_LANES, sum, lane - by);
        if (lane >= by) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared.totals[warp] = sum;
    __syncthreads();
    int before = 0;
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w == warp) sum += before;
        before += shared.totals[w];
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.totals[32] = before;
    __syncthreads();
    return sum - mine;
}

/// The `wanted` largest of all threads' `N` keys, as bits of `mine`; ties go to the lowest thread and key. `before`: how many of them lower threads have.
template <int N>
DEVICE u32 largest(const u32 (&key)[N], int count, int wanted, Shared& shared, int& before) {
    u32 known = 0;
    int left = wanted;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS) shared.bins[i] = 0;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (j < count && (shift == 24 || key[j] >> (shift + 8 & 31) == known >> (shift + 8 & 31))) add_to_shared(shared_address(&shared.bins[key[j] >> shift & 255]), 1);
        __syncthreads();
        if (threadIdx.x < 32) {  // from the top: eight bins a lane
            const int lane = threadIdx.x;
            int bins[8], sum = 0;
            for (int b = 0; b < 8; ++b) sum += bins[b] = shared.bins[255 - 8 * lane - b];
            int above = sum;
            for (int by = 1; by < 32; by *= 2) {
                const int other = __shfl_sync(ALL_LANES, above, lane - by);
                if (lane >= by) above += other;
            }
            above -= sum;
            if (above < left && left <= above + sum)
                for (int b = 0; b < 8; above += bins[b], ++b)
                    if (above < left && left <= above + bins[b]) shared.digit = 255 - 8 * lane - b, shared.left = left - above;
        }
        __syncthreads();
        known |= u32(shared.digit) << shift;
        left = shared.left;
        __syncthreads();
    }
    int above = 0, equal = 0;
#pragma unroll
    for (int j = 0; j < N; ++j)
        if (j < count) above += key[j] > known, equal += key[j] == known;
    int ties = sum_before(equal, shared);
    before = sum_before(above, shared) + min(ties, left);
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < N; ++j)
        if (j < count && (key[j] > known || (key[j] == known && ties++ < left))) mine |= 1u << j;
    return mine;
}

/// Number of the range of an element.
template <class S>
DEVICE int range_of(int token, int channel) { return S::SCALE == SCALE_GROUP ? channel / S::GROUP * PAGE + token : S::SCALE == SCALE_CHANNEL ? channel : channel / S::GROUP; }

/// Smallest and largest element of every range without what it leaves out (the largest magnitude alone, with symmetric codes); this thread's range.
template <class S, class E>
DEVICE void ends(Shared& shared, bool works, float& low_end, float& high_end) {
    constexpr bool BY_CHANNEL = S::SCALE == SCALE_CHANNEL;
    constexpr int N = BY_CHANNEL ? PAGE : S::GROUP, KEPT = E::OUTLIERS ? STEPS + 1 : 1;
    const int range = threadIdx.x;
    float low[KEPT], high[KEPT];  // the smallest ascending, the largest descending
#pragma unroll
    for (int k = 0; k < KEPT; ++k) low[k] = __uint_as_float(0x7f800000u), high[k] = __uint_as_float(0xff800000u);
    for (int i = 0; i < N && works; ++i) {
        const float x = BY_CHANNEL ? shared.x[i][range] : shared.x[range % PAGE][range / PAGE * S::GROUP + i];
        float a = x, b = S::HAS_BIAS ? x : fabsf(x);
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            // As a stable sort has it: of equal ones (zeros of both signs) the first is the smallest, the last the largest.
            const bool lower = a < low[k], higher = b >= high[k];
            const float l = lower ? a : low[k], h = higher ? b : high[k];
            a = lower ? low[k] : a;
            b = higher ? high[k] : b;
            low[k] = l;
            high[k] = h;
        }
    }
    low_end = low[0], high_end = high[0];
    if (!E::OUTLIERS) return;
    float lows[STEPS + 1], highs[STEPS + 1];
    lows[0] = low[0], highs[0] = high[0];
    u32 wins[STEPS];
    float width = S::HAS_BIAS ? __fsub_rn(high[0], low[0]) : high[0], least = __uint_as_float(0x7f800000u);
    int l = 0, h = 0;
    auto at = [](const float (&ends)[KEPT], int i) {
        float x = ends[0];
#pragma unroll
        for (int k = 1; k < KEPT; ++k) x = i == k ? ends[k] : x;
        return x;
    };
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const bool drops_low = S::HAS_BIAS && __fsub_rn(at(low, l + 1), at(low, l)) > __fsub_rn(at(high, h), at(high, h + 1));
        l += drops_low, h += !drops_low;
        lows[i + 1] = at(low, l), highs[i + 1] = at(high, h);
        const float narrower = S::HAS_BIAS ? __fsub_rn(highs[i + 1], lows[i + 1]) : highs[i + 1];
        least = fminf(least, __fsub_rn(__fmul_rn(width, width), __fmul_rn(narrower, narrower)));
        wins[i] = __float_as_uint(least);
        width = narrower;
    }
    int before;
    const u32 taken = E::OUTLIERS >= STEPS * S::SCALES ? 15 : largest(wins, works ? STEPS : 0, E::OUTLIERS, shared, before);
    const int count = __popc(taken);
#pragma unroll
    for (int i = 1; i <= STEPS; ++i)
        if (count == i) low_end = lows[i], high_end = highs[i];
}

template <class S, class E>
DEVICE void choose_scales(const Args& a, int side, int head, unsigned char* out, Shared& shared) {
    const int range = threadIdx.x;
    if (S::SCALE == SCALE_STATIC) {
        for (int i = range; i < S::GROUPS; i += THREADS) {
            shared.scale[i] = a.scale[side][head * S::GROUPS + i];
            shared.bias[i] = a.bias[side] ? a.bias[side][head * S::GROUPS + i] : 0.f;
        }
        return;
    }
    const bool works = range < S::SCALES;
    float low, high;
    ends<S, E>(shared, works, low, high);
    if (!works) return;
    float bias = 0.f, scale;
    if (!S::HAS_BIAS) scale = E::CODEBOOK ? high : __fdiv_rn(high, S::Q_MAX);
    else if (E::CODEBOOK) {
        bias = rounded<S::TYPE>(__fadd_rn(low, __fmul_rn(__fsub_rn(high, low), 0.5f)));
        scale = fmaxf(__fsub_rn(high, bias), __fsub_rn(bias, low));
    } else {
        bias = stored_bias<S::TYPE>(low);
        scale = __fdiv_rn(__fsub_rn(high, bias), S::Q_MAX);
    }
    scale = stored_scale<S::TYPE>(scale);
    if (!finite(scale) || !finite(bias)) a.status->overflow[side] = 1;
    store<S::TYPE>(out + S::SCALE_OFFSET, range, scale);
    if (S::HAS_BIAS) store<S::TYPE>(out + S::BIAS_OFFSET, range, bias);
    shared.scale[range] = scale;
    shared.bias[range] = bias;
}

/// One element's code, whether it lies past the ends, and what the code misses.
template <class S, class E>
struct Coded {
    u32 code;
    bool outside;
    float missed;

    DEVICE Coded(const Shared& shared, int token, int channel, float stretch) {
        const float x = shared.x[token][channel], scale = shared.scale[range_of<S>(token, channel)], bias = shared.bias[range_of<S>(token, channel)];
        float y = __fmul_rn(HAS_OFFSET ? __fsub_rn(x, bias) : x, __fdiv_rn(1.f, scale));
        if (E::STRETCH) y = __fmul_rn(y, __fdiv_rn(1.f, stretch));
        float level;
        if (E::CODEBOOK) {
            code = 0;
#pragma unroll
            for (int i = 0; i < S::HIGH; ++i) code += y > shared.threshold[i];
            constexpr float UNIT = S::TYPE == FLOAT16 ? 0.00048828125f : S::TYPE == BFLOAT16 ? 0.00390625f : 5.9604644775390625e-08f;
            outside = fabsf(y) > 1.f + 2.f * UNIT;
            level = shared.level[code];
        } else {
            const float c = rintf(y) + float(S::ZERO), inside = fminf(fmaxf(c, float(S::LOW)), float(S::HIGH));
            outside = c != inside;
            code = u32(inside);
            level = inside - float(S::ZERO);
        }
        level = __fmul_rn(level, scale);
        if (E::STRETCH) level = __fmul_rn(level, stretch);
        missed = __fsub_rn(x, HAS_OFFSET ? __fadd_rn(level, bias) : level);
    }
    static constexpr bool HAS_OFFSET = S::HAS_BIAS;
};

/// Zeros from byte `from` of a struct to the next multiple of 16.
DEVICE void zero_rest(unsigned char* out, int from) {
    if (threadIdx.x < 8 && from + 2 * int(threadIdx.x) < (from + 15) / 16 * 16) *reinterpret_cast<u16*>(out + from + 2 * threadIdx.x) = 0;
}

template <class S, class E>
DEVICE void list_errors(const Args& a, int side, unsigned char* out, Shared& shared, int& saturated) {
    const int thread = threadIdx.x;
    u32 key[PER], outside = 0;
#pragma unroll
    for (int j = 0; j < PER; ++j) {
        const int i = thread * PER + j;
        const Coded<S, E> x(shared, i / D, i % D, 1.f);
        const float error = fabsf(x.missed);
        key[j] = __float_as_uint(x.outside ? __fmul_rn(error, 18446744073709551616.f) : error);
        outside |= u32(x.outside) << j;
    }
    int place;
    const u32 listed = largest(key, PER, E::OUTLIERS, shared, place);
    outside &= ~listed;
    if (E::STRETCH) {
#pragma unroll 1
        for (int j = 0; j < PER; ++j) {
            if (!(outside >> j & 1)) continue;
            const int token = (thread * PER + j) / D, channel = (thread * PER + j) % D, range = range_of<S>(token, channel);
            const float away = fabsf(S::HAS_BIAS ? __fsub_rn(shared.x[token][channel], shared.bias[range]) : shared.x[token][channel]);
            const float levels = __fmul_rn(away, __fdiv_rn(1.f, shared.scale[range]));
            atomicMax(&shared.stretch[token], __float_as_uint(E::CODEBOOK ? levels : __fdiv_rn(levels, S::Q_MAX)));
        }
        __syncthreads();
        for (int t = thread; t < PAGE; t += THREADS) {
            const float stretch = stored_scale<S::TYPE>(__uint_as_float(shared.stretch[t]));
            if (!finite(stretch)) a.status->overflow[side] = 1;
            store<S::TYPE>(out + E::STRETCH_OFFSET, t, stretch);
            shared.stretch[t] = __float_as_uint(stretch);
        }
        __syncthreads();
    } else saturated = __popc(outside);
#pragma unroll 1
    for (int j = 0; j < PER; ++j) {
        if (!(listed >> j & 1)) continue;
        const int i = thread * PER + j;
        const Coded<S, E> x(shared, i / D, i % D, __uint_as_float(shared.stretch[i / D]));
        if (!finite(rounded<S::TYPE>(x.missed))) a.status->overflow[side] = 1;
        if (E::INDEX_BYTES == 2) reinterpret_cast<u16*>(out + E::INDEX_OFFSET)[place] = u16(i);
        else reinterpret_cast<u32*>(out + E::INDEX_OFFSET)[place] = i;
        store<S::TYPE>(out + E::VALUE_OFFSET, place, x.missed);
        ++place;
    }
    zero_rest(out, E::INDEX_OFFSET + E::OUTLIERS * E::INDEX_BYTES);
    zero_rest(out, E::VALUE_OFFSET + E::OUTLIERS * (S::TYPE == FLOAT32 ? 4 : 2));
}

template <class S, class E>
DEVICE void close_side(const Args& a, int side, int page, int head, Shared& shared) {
    const int thread = threadIdx.x;
    unsigned char* out = reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
    bool bad = false;
    for (int i = thread; i < COUNT; i += THREADS) {
        const float x = load_value<X_TYPE>(a.x[side], page * a.stride[side][0] + head * a.stride[side][1] + i / D * a.stride[side][2] + i % D);
        shared.x[i / D][i % D] = x;
        bad |= !finite(x);
    }
    if (bad) a.status->nonfinite[side] = 1;
    for (int i = thread; i < PAGE; i += THREADS) shared.stretch[i] = 0x3f800000u;
    if (E::CODEBOOK && thread <= S::HIGH) {
        const float* book = a.codebook[side] + head * (S::HIGH + 1);
        shared.level[thread] = book[thread];
        if (thread < S::HIGH) shared.threshold[thread] = __fmul_rn(__fadd_rn(book[thread], book[thread + 1]), 0.5f);
    }
    __syncthreads();
    if (E::TURNED) {
        const double* first = a.first + i64(page) * 2 * PADDED;
        for (int i = thread; i < COUNT / 2; i += THREADS) {
            const int token = i / (D / 2), d = i % (D / 2);
            const double *step = a.step + token * 2 * PADDED, c0 = first[d], s0 = first[PADDED + d], c1 = step[d], s1 = step[PADDED + d];
            const float c = float(__dsub_rn(__dmul_rn(c0, c1), __dmul_rn(s0, s1))), s = -float(__dadd_rn(__dmul_rn(s0, c1), __dmul_rn(c0, s1)));
            const float x = shared.x[token][d], y = shared.x[token][d + D / 2];
            shared.x[token][d] = __fadd_rn(__fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s)), 0.f);  // a turned zero is +0
            shared.x[token][d + D / 2] = __fadd_rn(__fadd_rn(__fmul_rn(y, c), __fmul_rn(x, s)), 0.f);
        }
        __syncthreads();
    }
    choose_scales<S, E>(a, side, head, out, shared);
    __syncthreads();
    int saturated = 0;
    if (E::OUTLIERS) list_errors<S, E>(a, side, out, shared, saturated);
    for (int i = thread; i < COUNT; i += THREADS) {
        const Coded<S, E> x(shared, i / D, i % D, __uint_as_float(shared.stretch[i / D]));
        shared.codes[i / D][i % D] = (unsigned char)x.code;
        if (!E::OUTLIERS) saturated += x.outside;
    }
    saturated = sum_before(saturated, shared);
    if (thread == 0 && shared.totals[32]) atomicAdd(&a.status->saturated[side], shared.totals[32]);
    __syncthreads();
    write_plane<S, S::BITS0, S::BITS1>(out + S::OFFSET0, shared);
    if (S::BITS1) write_plane<S, S::BITS1 ? S::BITS1 : 1, 0>(out + S::OFFSET1, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) close_levels(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "cuda_levels.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const i64 item = blockIdx.x;
    const int side = item % 2, head = item / 2 % a.num_heads, page = item / 2 / a.num_heads;
    if (side == 0)  // nothing of the pool's earlier content stays in a page
        for (int i = USED_BYTES / 4 + threadIdx.x; i < a.head_bytes / 4; i += THREADS) reinterpret_cast<u32*>(a.page_address[page] + i64(head) * a.head_bytes)[i] = 0;
    if (side == 0) close_side<Side<K_SIDE, false>, Extras<K_EXTRAS>>(a, 0, page, head, shared);
    else close_side<Side<V_SIDE, true>, Extras<V_EXTRAS>>(a, 1, page, head, shared);
}
