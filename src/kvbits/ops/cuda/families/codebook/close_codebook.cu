// Raw keys and values to pages of KVQuant's formats in one launch: one block per (page, kv head, keys or values). docs/reference/formats.md says what is stored,
// kvbits/quant/qparams.py and outliers.py in which order numbers are rounded; every sum, product and quotient below is rounded like theirs.
//
// A thread loads, turns back and codes eight channels of four tokens: four neighbouring channels and their rotary partners. In between the page lies
// in shared memory as float32, where one to four threads read a range (channel, or group of a token) and find its ends, or with outliers its five
// smallest and largest: eight numbers sorted by a network at a time, joined to the sorted ones so far. A code is the way through a binary search, whose
// tables each lane has in a bank of its own.
//
// The listed errors are the n largest of a page. A warp sorts the largest of each thread: the (n / warps)-th of every warp's are a bound that few other errors
// reach, so the exact choice is made among about twice n.
#include "ends.cuh"
#include "extras.cuh"
#include "listed.cuh"

/// Whether the codes of a word of a plane's row are one thread's, or those of some lanes of a warp.
template <class S>
constexpr bool IN_LANES = S::BITS == 4 || (D <= 256 && (D & (D - 1)) == 0 && D >= 64);

/// A plane from this thread's codes: the words of four tokens, 16 bytes. Lanes whose codes share bytes put them together.
template <class S, int BITS, int SHIFT>
DEVICE void write_lanes(unsigned char* plane, const u32 (&codes)[8]) {
    constexpr u32 MASK = ((1u << BITS) - 1) * 0x01010101u;
    constexpr int ROW_BYTES = D * BITS / 8, WORDS = ROW_BYTES / 4;
    const int quad = int(threadIdx.x) % QUADS, team = int(threadIdx.x) / QUADS, word = quad % WORDS;
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        w[i] = ((codes[i] >> SHIFT & MASK) | (codes[4 + i] >> SHIFT & MASK) << 4) << quad / WORDS * BITS;
#pragma unroll
        for (int mask = WORDS; mask < QUADS; mask *= 2) w[i] |= __shfl_xor_sync(ALL_LANES, w[i], mask);
    }
    if (quad >= WORDS) return;
    if (S::VALUES) {
        const u32 ab = permute_bytes(w[0], w[1], 0x5140), AB = permute_bytes(w[0], w[1], 0x7362);
        const u32 cd = permute_bytes(w[2], w[3], 0x5140), CD = permute_bytes(w[2], w[3], 0x7362);
        const int block = word / 4, width = min(4, WORDS - block * 4);
        *reinterpret_cast<uint4*>(plane + block * 16 * PAGE + (team * width + word % 4) * 16) =
            {permute_bytes(ab, cd, 0x5410), permute_bytes(ab, cd, 0x7632), permute_bytes(AB, CD, 0x5410), permute_bytes(AB, CD, 0x7632)};
    } else *reinterpret_cast<uint4*>(plane + (team / 4 * WORDS + word) * 64 + team % 4 * 16) = {w[0], w[1], w[2], w[3]};
}

template <class S, class E>
DEVICE void close_side(const Args& a, int side, int page, int head, Shared& shared) {
    const int thread = threadIdx.x;
    unsigned char* out = reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes;
    float all[8][4];
    if (load_page<S, E>(a, side, page, head, shared, all)) a.status->nonfinite[side] = 1;
    for (int i = thread; i < PAGE && E::OUTLIERS; i += THREADS) shared.stretch[i] = 0x3f800000u;
    if (thread == 0) shared.saturated = 0;
    for (int i = thread; i < (S::HIGH + 1) * 32 && E::CODEBOOK; i += THREADS) {
        const float *book = a.codebook[side] + head * (S::HIGH + 1), level = book[i / 32];
        if (E::OUTLIERS) shared.level[i / 32][i % 32] = level;
        if (i / 32 < S::HIGH) shared.threshold[i / 32][i % 32] = __fmul_rn(__fadd_rn(level, book[i / 32 + 1]), 0.5f);
    }
    __syncthreads();
    choose_scales<S, E>(a, side, head, out, shared);
    __syncthreads();
    const Coder<S, E> coder(shared);
    u32 codes[8];
    if constexpr (E::OUTLIERS > 0) list_errors<S, E>(a, side, out, coder, shared, all, codes);
    if (!E::OUTLIERS || E::STRETCH) {
        constexpr bool COUNTS = !E::OUTLIERS && SATURATES<S, E>;
        u32 found[4];
        int saturated = 0;
        each_element<S, !E::OUTLIERS>(shared, all, [&](int word, int k, float x, float scale, float inverse, float bias) {
            const float stretch = E::STRETCH ? __uint_as_float(shared.stretch[token_of<S>(word % 4)]) : 1.f;
            const Coded<S, E> coded(coder, x, scale, inverse, bias, stretch, E::STRETCH ? __fdiv_rn(1.f, stretch) : 1.f);
            if (COUNTS) saturated += coded.outside;
            found[k] = coded.found;
            if (k == 3) codes[word] = coder.bytes(found);
        });
        if (COUNTS) {
            saturated = __reduce_add_sync(ALL_LANES, saturated);
            if (saturated && thread % 32 == 0) atomicAdd(&shared.saturated, saturated);
        }
    }
    if constexpr (IN_LANES<S>) {
        write_lanes<S, S::BITS0, S::BITS1>(out + S::OFFSET0, codes);
        if constexpr (S::BITS1 > 0) write_lanes<S, S::BITS1, 0>(out + S::OFFSET1, codes);
    } else {
        __syncthreads();  // codes take the elements' memory
#pragma unroll
        for (int word = 0; word < 8; ++word) *reinterpret_cast<u32*>(&shared.codes[token_of<S>(word % 4)][channel_of(word / 4, 0)]) = codes[word];
        __syncthreads();
        write_plane<S, S::BITS0, S::BITS1>(out + S::OFFSET0, shared);
        if constexpr (S::BITS1 > 0) write_plane<S, S::BITS1, 0>(out + S::OFFSET1, shared);
    }
    if (SATURATES<S, E>) {
        __syncthreads();
        if (thread == 0 && shared.saturated) atomicAdd(&a.status->saturated[side], shared.saturated);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) close_codebook(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "close.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // Values last: a multiprocessor runs the code of one side at a time, which its instruction caches hold.
    const int count = a.num_pages * a.num_heads, side = int(blockIdx.x) >= count, item = int(blockIdx.x) - side * count;
    const int head = item % a.num_heads, page = item / a.num_heads;
    if (side == 0)  // nothing of the pool's earlier content stays in a page
        for (int i = USED_BYTES / 4 + threadIdx.x; i < a.head_bytes / 4; i += THREADS)
            reinterpret_cast<u32*>(a.page_address[page] + i64(head) * a.head_bytes)[i] = 0;
    if (side == 0) close_side<Side<K_SIDE, false>, Extras<K_EXTRAS>>(a, 0, page, head, shared);
    else close_side<Side<V_SIDE, true>, Extras<V_EXTRAS>>(a, 1, page, head, shared);
}
