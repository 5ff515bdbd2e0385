// Fresh keys and values to their slots in token-local pages, quantized on the way: one block per (TOKENS entries, kv
// head, keys or values), one launch for any batch.
//
// A thread holds eight neighbouring channels of ROWS tokens, as they came; SPAN lanes hold a token, so a group's ends
// meet by shuffles (SPAN is 64 above 256 channels: two warps, and a group of both meets in shared memory). Scales are
// rounded and codes taken as in close.cu (octets.cuh is both kernels'). Codes go to shared memory as bytes
// [token][channel], and from there to the page with lanes along the tokens: neighbours in a page are neighbours in
// memory, so runs of tokens make wide writes, and single ones cost no more than their own bytes. No byte of a page
// belongs to two tokens: nothing is read to be written back, and no two blocks write the same byte (a slot is named
// once).
//
// Centred sides: a page's mean is fixed when its slot 0 is stored (ops/store.py says which it is). Entries of a page
// follow each other in the order of their slots, skipped ones aside, and the entries of the page before come just ahead
// of them. So a block finds by a look back from its first entry whether that page opens in this launch; then it takes
// the mean itself, as every block does that has tokens of the page, and the one with slot 0 stores it.
#include "octets.cuh"

constexpr int OCTETS = D / 8, TEAMS = THREADS / SPAN, ROWS = TOKENS / TEAMS;
static_assert(SPAN >= OCTETS && TEAMS * ROWS == TOKENS && THREADS >= D, "store.py");

struct Status { int saturated[2], overflow[2], nonfinite[2], skipped; };

struct Args {
    // keys, values [rows, row_tokens, H, D], strides in elements, last dense, rows at multiples of 16 bytes
    const void* x[2];
    i64 stride[2][3];
    const i64* slots;             // [num_tokens]: page * PAGE + place; below 0: not stored
    const i64* previous;          // [num_tokens]: read at place 0 of centred sides: the page before, or below 0
    const i64* page_offset;       // [num_pages] bytes from `pages`, or null: page * page_stride
    unsigned char* pages;
    i64 page_stride, num_pages;
    const float* scale[2];        // calibrated [H][groups or channels], null if none
    const float* bias[2];
    // how a mean key is turned on by a page: [cosines, signed sines, partners][keys' D]; null: it is not
    const float* turn;
    Status* status;               // added to; may be null
    int num_tokens, row_tokens, num_heads, head_bytes;
};

using K = Side<K_SIDE, false>;
using V = Side<V_SIDE, true>;
constexpr bool CENTERED = K::HAS_MEAN || V::HAS_MEAN;
constexpr int scales_of(int scale, int groups) { return scale == SCALE_GROUP ? groups : 0; }
constexpr int K_SCALES = scales_of(K::SCALE, K::GROUPS), V_SCALES = scales_of(V::SCALE, V::GROUPS),
              SCALES = K_SCALES > V_SCALES ? K_SCALES : V_SCALES;

/// Field of a stored plane: BITS bits of channel `channel` of the token at `place`.
template <class S, int BITS>
DEVICE u32 stored_field(const unsigned char* plane, int place, int channel) {
    constexpr int ROW = (S::D * BITS + 31) / 32 * 4;
    const int field = channel / ROW, r = channel - field * ROW;
    int at;
    if (S::VALUES) {
        const int width = min(16, ROW - r / 16 * 16), in = place % 8;
        at = r / 16 * 16 * PAGE + (place / 8 * 2 + in / 2 % 2) * 4 * width + r % 16 * 4 + in % 2 + in / 4 * 2;
    } else {
        at = (place / 16 * (ROW / 4) + r / 4) * 64 + place % 16 * 4 + r % 4;
    }
    return plane[at] >> field * BITS & ((1u << BITS) - 1);
}

/// A side of a page in shared memory, to be decoded: planes, scales, biases and the mean one after the other.
template <class S>
struct Image {
    static constexpr int WIDTH = S::TYPE == FLOAT32 ? 4 : 2, ROW0 = (S::D * S::BITS0 + 31) / 32 * 4,
                         ROW1 = (S::D * S::BITS1 + 31) / 32 * 4;
    static constexpr int PLANE1 = PAGE * ROW0, SCALE = PLANE1 + PAGE * ROW1, BIAS = SCALE + S::GROUPS * PAGE * WIDTH;
    static constexpr int MEAN = BIAS + (S::HAS_BIAS ? S::GROUPS * PAGE * WIDTH : 0), BYTES = MEAN + S::D * WIDTH;

    /// The whole block together.
    static DEVICE void load(const unsigned char* page, unsigned char* to) {
        for (int at = threadIdx.x * 16; at < BYTES; at += THREADS * 16) {
            const int from = at < PLANE1  ? S::OFFSET0 + at
                             : at < SCALE ? S::OFFSET1 + at - PLANE1
                             : at < BIAS  ? S::SCALE_OFFSET + at - SCALE
                             : at < MEAN  ? S::BIAS_OFFSET + at - BIAS
                                          : S::MEAN_OFFSET + at - MEAN;
            *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(page + from);
        }
    }
    /// A number as the reference decodes it.
    static DEVICE float decoded(const unsigned char* image, int place, int channel) {
        u32 code = stored_field<S, S::BITS0>(image, place, channel);
        if (S::BITS1)
            code = code << S::BITS1 | stored_field<S, S::BITS1 ? S::BITS1 : 1>(image + PLANE1, place, channel);
        float level;
        if (S::IS_FLOAT) level = float_of<S::FLOAT>(code);
        else level = float(int(code) - S::ZERO);
        const int at = channel / S::GROUP * PAGE + place;
        float x = __fmul_rn(level, load_value<S::TYPE>(image + SCALE, at));
        if (S::HAS_BIAS) x = __fadd_rn(x, load_value<S::TYPE>(image + BIAS, at));
        return __fadd_rn(x, load_value<S::TYPE>(image + MEAN, channel));
    }
};

template <class S>
constexpr int image_bytes() { return S::HAS_MEAN ? Image<S>::BYTES : 16; }
constexpr int IMAGE_BYTES = image_bytes<K>() > image_bytes<V>() ? image_bytes<K>() : image_bytes<V>();

/// A page that opens in this launch: its first entry, and which entries and places its mean is taken over.
struct Opening { int opener, from, to, decoded, count; i64 page, before; };

struct Shared {
    union {
        double sums[CENTERED ? TEAMS * D : 1];
        unsigned char codes[TOKENS][CODE_STRIDE];
    };
    i64 slot[TOKENS];             // -1: not stored
    unsigned char* page[TOKENS];  // this head's struct
    float scale[SCALES ? SCALES * TOKENS : 1], bias[SCALES ? SCALES * TOKENS : 1];
    float mean[CENTERED ? D : 1];
    alignas(16) unsigned char image[IMAGE_BYTES];
    int openers[TOKENS + 1], num_openers;
    Opening opening;
    // lowest and highest of a row's channels in each warp
    float ends[SPAN > 32 ? ROWS : 1][SPAN > 32 ? THREADS / 32 : 1][2];
};

/// Slot of an entry, -1 where it is not stored.
DEVICE i64 slot_of(const Args& a, int entry) {
    const i64 slot = a.slots[entry];
    return slot < a.num_pages * PAGE ? slot : -1;
}
DEVICE i64 page_of(i64 slot) { return slot < 0 ? -1 : i64(u64(slot) / PAGE); }
DEVICE unsigned char* struct_of(const Args& a, i64 page, int head) {
    return a.pages + (a.page_offset ? a.page_offset[page] : page * a.page_stride) + i64(head) * a.head_bytes;
}
template <int SIDE>
DEVICE i64 element(const Args& a, int entry, int head, int octet) {
    const int row = entry / a.row_tokens;
    return row * a.stride[SIDE][0] + (entry - row * a.row_tokens) * a.stride[SIDE][1] + head * a.stride[SIDE][2] +
           octet * 8;
}

// ---- means of pages that open

/// From entry `at` on in steps of `step`: the last entry of `page` before one of another page, and how many it has
/// there (`count`). A warp together.
DEVICE int last_of_page(const Args& a, int at, int step, i64 page, int& count) {
    int last = at - step;
    count = 0;
    for (;; at += 32 * step) {
        const int entry = at + int(threadIdx.x % 32) * step;
        const bool inside = entry >= 0 && entry < a.num_tokens;
        const i64 slot = inside ? slot_of(a, entry) : -1;
        const u32 others = __ballot_sync(ALL_LANES, !inside || (slot >= 0 && page_of(slot) != page));
        u32 own = __ballot_sync(ALL_LANES, slot >= 0 && page_of(slot) == page);
        if (others) own &= (1u << lowest_bit(others)) - 1;
        count += __popc(own);
        if (own) last = at + (31 - leading_zeros(own)) * step;
        if (others) return last;
    }
}

/// Lists the pages of this block's tokens that open in this launch, by the entry that opens them. The first warp
/// together.
DEVICE void list_openings(const Args& a, int first, Shared& shared) {
    const int lane = threadIdx.x;
    int lead = TOKENS, n = 0;
    for (int t = TOKENS > 32 ? TOKENS - 32 : 0; t >= 0; t -= 32) {
        const u32 named = __ballot_sync(ALL_LANES, t + lane < TOKENS && shared.slot[t + lane] >= 0);
        if (named) lead = t + lowest_bit(named);
    }
    if (lead < TOKENS && shared.slot[lead] % PAGE) {
        int count;
        const i64 page = page_of(shared.slot[lead]);
        const int opener = last_of_page(a, first + lead - 1, -1, page, count);
        if (count && slot_of(a, opener) == page * PAGE) {
            if (lane == 0) shared.openers[0] = opener;
            n = 1;
        }
    }
    for (int t = 0; t < TOKENS; t += 32) {
        const bool opens = t + lane < TOKENS && shared.slot[t + lane] >= 0 && shared.slot[t + lane] % PAGE == 0;
        const u32 all = __ballot_sync(ALL_LANES, opens);
        if (opens) shared.openers[n + __popc(all & ((1u << lane) - 1))] = first + t + lane;
        n += __popc(all);
    }
    if (lane == 0) shared.num_openers = n;
}

/// What the mean of the page that `opener` opens is taken over. The first warp together.
DEVICE void plan_opening(const Args& a, int opener, Shared& shared) {
    Opening o;
    o.opener = opener;
    o.page = page_of(slot_of(a, opener));
    o.before = a.previous[opener];
    o.from = opener;
    o.decoded = 0;
    int fresh;
    o.to = last_of_page(a, opener, 1, o.page, o.count) + 1;
    if (o.count == PAGE || o.before >= a.num_pages) o.before = -1;
    if (o.before >= 0) {
        o.from = last_of_page(a, opener - 1, -1, o.before, fresh);
        o.to = opener;
        o.decoded = fresh ? int(slot_of(a, o.from) % PAGE) : PAGE;
        o.count = PAGE;
    }
    if (threadIdx.x == 0) shared.opening = o;
}

/// shared.mean of the page of shared.opening; its block stores it too. The whole block together.
template <class S, int SIDE>
DEVICE void take_mean(const Args& a, int first, int head, int team, int octet, Shared& shared, bool& overflow) {
    const Opening o = shared.opening;
    if (octet < S::OCTETS) {
        double sum[8] = {};
#pragma unroll 1
        for (int entry = o.from + team; entry < o.to; entry += TEAMS) {
            if (slot_of(a, entry) < 0) continue;
            Octet x;
            x.load(a.x[SIDE], element<SIDE>(a, entry, head, octet));
#pragma unroll
            for (int k = 0; k < 8; ++k) sum[k] += x[k];
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) shared.sums[team * D + octet * 8 + k] = sum[k];
    }
    if (o.decoded) Image<S>::load(struct_of(a, o.before, head), shared.image);
    __syncthreads();
    if (o.decoded) {
        constexpr int SHARES = THREADS / S::D;  // threads of a channel
        const int share = threadIdx.x / S::D, channel = threadIdx.x % S::D;
        double sum = 0;
#pragma unroll 1
        for (int place = share; place < o.decoded && share < SHARES; place += SHARES)
            sum += Image<S>::decoded(shared.image, place, channel);
        if (share < SHARES) shared.sums[share * D + channel] += sum;
        __syncthreads();
    }
    const int channel = threadIdx.x;
    float mean = 0.f;
    if (channel < S::D) {
        double sum = 0;
#pragma unroll 4
        for (int t = 0; t < TEAMS; ++t) sum += shared.sums[t * D + channel];
        mean = float(sum / o.count);
        shared.mean[channel] = mean;
    }
    __syncthreads();
    if (SIDE == 0 && a.turn && o.before >= 0 && channel < S::D)
        mean = __fadd_rn(
            __fmul_rn(mean, a.turn[channel]),
            __fmul_rn(shared.mean[min(u32(int(a.turn[2 * S::D + channel])), u32(S::D - 1))], a.turn[S::D + channel]));
    __syncthreads();
    if (channel < S::D) {
        mean = rounded<S::TYPE>(mean);
        shared.mean[channel] = mean;
        if (o.opener >= first) {
            overflow |= !finite(mean);
            store<S::TYPE>(struct_of(a, o.page, head) + S::MEAN_OFFSET, channel, mean);
        }
    }
    __syncthreads();
}

/// The means of this thread's tokens: of pages that open in this launch, else the stored ones.
template <class S, int SIDE>
DEVICE void find_means(const Args& a, int first, int head, int team, int octet, Shared& shared, float (&mean)[ROWS][8],
                       bool& overflow) {
    if (threadIdx.x < 32) list_openings(a, first, shared);
    __syncthreads();
    bool known[ROWS] = {};
    for (int j = 0; j < shared.num_openers; ++j) {
        if (threadIdx.x < 32) plan_opening(a, shared.openers[j], shared);
        __syncthreads();
        take_mean<S, SIDE>(a, first, head, team, octet, shared, overflow);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (octet >= S::OCTETS || page_of(shared.slot[team + i * TEAMS]) != shared.opening.page) continue;
            known[i] = true;
#pragma unroll
            for (int k = 0; k < 8; ++k) mean[i][k] = shared.mean[octet * 8 + k];
        }
        __syncthreads();  // before the next opening is planned
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int token = team + i * TEAMS;
        if (octet >= S::OCTETS || shared.slot[token] < 0 || known[i]) continue;
#pragma unroll
        for (int k = 0; k < 8; ++k)
            mean[i][k] = load_value<S::TYPE>(shared.page[token] + S::MEAN_OFFSET, octet * 8 + k);
    }
}

// ---- scales, codes, bytes

/// The ends of a token's groups, from those of its octets. The whole block together.
template <class S>
DEVICE void join_groups(int row, int octet, float& lo, float& hi, Shared& shared) {
    constexpr int COUNT = S::GROUP / 8;
    static_assert(SPAN <= 32 || (COUNT & (COUNT - 1)) == 0, "store.py");
    if ((COUNT & (COUNT - 1)) == 0) {
#pragma unroll
        for (int mask = 1; mask < COUNT && mask < 32; mask *= 2) {
            if (S::HAS_BIAS) lo = fminf(lo, __shfl_xor_sync(ALL_LANES, lo, mask));
            hi = fmaxf(hi, __shfl_xor_sync(ALL_LANES, hi, mask));
        }
        if constexpr (COUNT > 32) {
            const int warp = threadIdx.x / 32;
            if (threadIdx.x % 32 == 0) shared.ends[row][warp][0] = lo, shared.ends[row][warp][1] = hi;
            __syncthreads();
            lo = fminf(lo, shared.ends[row][warp ^ 1][0]);
            hi = fmaxf(hi, shared.ends[row][warp ^ 1][1]);
        }
        return;
    }
    const int first = int(threadIdx.x) % 32 - octet + octet / COUNT * COUNT;
    const float own_lo = lo, own_hi = hi;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (S::HAS_BIAS) lo = fminf(lo, __shfl_sync(ALL_LANES, own_lo, first + i));
        hi = fmaxf(hi, __shfl_sync(ALL_LANES, own_hi, first + i));
    }
}

/// The tokens' bytes of one plane, from shared.codes.
template <class S, int BITS, int SHIFT>
DEVICE void write_tokens(int offset, const Shared& shared) {
    constexpr int ROW = (S::D * BITS + 31) / 32 * 4, WORDS = ROW / 4;
    if (!S::VALUES) {
        for (int i = threadIdx.x; i < TOKENS * WORDS; i += THREADS) {
            const int token = i % TOKENS, word = i / TOKENS;
            if (shared.slot[token] < 0) continue;
            const int place = int(shared.slot[token] % PAGE);
            *reinterpret_cast<u32*>(shared.page[token] + offset + (place / 16 * WORDS + word) * 64 + place % 16 * 4) =
                row_word<S::D, BITS, SHIFT>(shared, token, word * 4);
        }
        return;
    }
    for (int i = threadIdx.x; i < TOKENS / 4 * WORDS; i += THREADS) {
        // Four tokens that would lie side by side if the block began at a multiple of eight; where they do, they are
        // written together.
        const int quad = i / WORDS, r = i % WORDS * 4, first = quad / 2 * 8 + quad % 2 * 2,
                  width = min(16, ROW - r / 16 * 16);
        const i64 slot = shared.slot[first];
        const bool together = slot >= 0 && slot % 8 == quad % 2 * 2 && shared.slot[first + 1] == slot + 1 &&
                              shared.slot[first + 4] == slot + 4 && shared.slot[first + 5] == slot + 5;
        const u32 rows[4] = {
            row_word<S::D, BITS, SHIFT>(shared, first, r), row_word<S::D, BITS, SHIFT>(shared, first + 1, r),
            row_word<S::D, BITS, SHIFT>(shared, first + 4, r), row_word<S::D, BITS, SHIFT>(shared, first + 5, r)};
        if (together) {
            const int place = int(slot % PAGE);
            const u32 ab = permute_bytes(rows[0], rows[1], 0x5140), AB = permute_bytes(rows[0], rows[1], 0x7362);
            const u32 cd = permute_bytes(rows[2], rows[3], 0x5140), CD = permute_bytes(rows[2], rows[3], 0x7362);
            const uint4 w = {permute_bytes(ab, cd, 0x5410), permute_bytes(ab, cd, 0x7632),
                             permute_bytes(AB, CD, 0x5410), permute_bytes(AB, CD, 0x7632)};
            *reinterpret_cast<uint4*>(shared.page[first] + offset + r / 16 * 16 * PAGE +
                                      (place / 8 * 2 + quad % 2) * 4 * width + r % 16 * 4) = w;
            continue;
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int token = first + u % 2 + u / 2 * 4;
            if (shared.slot[token] < 0) continue;
            const int place = int(shared.slot[token] % PAGE), in = place % 8;
            unsigned char* to = shared.page[token] + offset + r / 16 * 16 * PAGE +
                                (place / 8 * 2 + in / 2 % 2) * 4 * width + r % 16 * 4 + in % 2 + in / 4 * 2;
#pragma unroll
            for (int b = 0; b < 4; ++b) to[b * 4] = (unsigned char)(rows[u] >> 8 * b);
        }
    }
}

template <class S, int SIDE>
DEVICE void store_side(const Args& a, int first, int head, Shared& shared) {
    const int thread = threadIdx.x, octet = thread % SPAN, team = thread / SPAN;
    const bool works = octet < S::OCTETS;
    Octet x[ROWS];
    bool stored[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int token = team + i * TEAMS, entry = first + token;
        for (int k = 0; k < Octet::WORDS; ++k) x[i].w[k] = 0;
        if (works && entry < a.num_tokens) x[i].load(a.x[SIDE], element<SIDE>(a, entry, head, octet));
        const i64 slot = entry < a.num_tokens ? slot_of(a, entry) : -1;
        stored[i] = slot >= 0;
        if (octet) continue;
        shared.slot[token] = slot < 0 ? -1 : slot;
        shared.page[token] = slot < 0 ? nullptr : struct_of(a, page_of(slot), head);
        if (SIDE == 0 && head == 0 && a.status && entry < a.num_tokens && slot < 0 && a.slots[entry] >= 0)
            atomicAdd(&a.status->skipped, 1);
    }
    __syncthreads();
    bool bad = false, overflow = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) bad |= stored[i] && !finite(x[i].largest());
    if (bad && a.status) a.status->nonfinite[SIDE] = 1;
    if (SIDE == 0) {  // nothing of the pool's earlier content stays in a page
        const int padding = a.head_bytes / 4 - USED_BYTES / 4;
        for (int i = thread; i < TOKENS * padding; i += THREADS) {
            const int token = i / padding;
            if (shared.slot[token] >= 0 && shared.slot[token] % PAGE == 0)
                reinterpret_cast<u32*>(shared.page[token])[USED_BYTES / 4 + i % padding] = 0;
        }
    }
    if (S::FLOAT == RAW) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (!works || !stored[i]) continue;
            const int token = team + i * TEAMS, at = int(shared.slot[token] % PAGE) * S::D + octet * 8;
            unsigned char* to = shared.page[token] + S::OFFSET0;
            if (X_TYPE == RAW_TYPE) {
                for (int k = 0; k < Octet::WORDS; k += 4)
                    *reinterpret_cast<uint4*>(to + at * (X_TYPE == FLOAT32 ? 4 : 2) + k * 4) = {
                        x[i].w[k], x[i].w[k + 1], x[i].w[k + 2], x[i].w[k + 3]};
            } else {
                for (int k = 0; k < 8; ++k) store<RAW_TYPE>(to, at + k, x[i][k]);
            }
        }
        return;
    }
    float mean[ROWS][8] = {};
    if constexpr (S::HAS_MEAN) find_means<S, SIDE>(a, first, head, team, octet, shared, mean, overflow);
    constexpr bool FIXED = S::SCALE == SCALE_STATIC;
    float inverse[8] = {}, bias[8] = {};
    for (int k = 0; k < 8 && FIXED && works; ++k) {
        const int at = head * S::GROUPS + (octet * 8 + k) / S::GROUP;
        inverse[k] = __fdiv_rn(1.f, a.scale[SIDE][at]);
        bias[k] = a.bias[SIDE] ? a.bias[SIDE][at] : 0.f;
    }
    int saturated = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int token = team + i * TEAMS;
        if (!FIXED) {
            float lo, hi, scale;
            ends_of<S>(x[i], mean[i], lo, hi);
            join_groups<S>(i, octet, lo, hi, shared);
            bool over = false;
            parameters_of<S>(lo, hi, scale, bias[0], over);
            overflow |= over && works && stored[i];
            inverse[0] = __fdiv_rn(1.f, scale);
            if (works && octet % (S::GROUP / 8 ? S::GROUP / 8 : 1) == 0) {
                const int at = octet * 8 / S::GROUP * TOKENS + token;
                shared.scale[at] = scale;
                shared.bias[at] = bias[0];
            }
        }
        u32 codes[8];
        int outside = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            float y = x[i][k];
            if (S::HAS_MEAN) y -= mean[i][k];
            if (S::HAS_BIAS) y -= bias[FIXED ? k : 0];
            // Never one fused multiply-add with what follows: the reference rounds the product first.
            codes[k] = code_of<S>(__fmul_rn(y, inverse[FIXED ? k : 0]), outside);
        }
        if (works && stored[i]) saturated += outside;
        if (works) put_codes(codes, &shared.codes[token][octet * 8]);
    }
    if (overflow && a.status) a.status->overflow[SIDE] = 1;
    if (!S::NEVER_SATURATES && a.status) {
        saturated = __reduce_add_sync(ALL_LANES, saturated);
        if (saturated && thread % 32 == 0) atomicAdd(&a.status->saturated[SIDE], saturated);
    }
    __syncthreads();
    if (!FIXED) {
        for (int i = thread; i < S::GROUPS * TOKENS; i += THREADS) {
            const int token = i % TOKENS;
            if (shared.slot[token] < 0) continue;
            const int at = i / TOKENS * PAGE + int(shared.slot[token] % PAGE);
            store<S::TYPE>(shared.page[token] + S::SCALE_OFFSET, at, shared.scale[i]);
            if (S::HAS_BIAS) store<S::TYPE>(shared.page[token] + S::BIAS_OFFSET, at, shared.bias[i]);
        }
    }
    write_tokens<S, S::BITS0, S::BITS1>(S::OFFSET0, shared);
    if (S::BITS1) write_tokens<S, S::BITS1 ? S::BITS1 : 1, 0>(S::OFFSET1, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) store_tokens(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "store.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int item = blockIdx.x, head = item / 2 % a.num_heads, first = item / 2 / a.num_heads * TOKENS;
    if (item % 2 == 0) store_side<K, 0>(a, first, head, shared);
    else store_side<V, 1>(a, first, head, shared);
}
