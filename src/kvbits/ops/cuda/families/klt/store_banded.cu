// Keys and values to pages of trellis codes in one launch, each token by itself: a block stores keys or values of a kv
// head, of whole pages that close, or with STORES of tokens wherever their slots are (few of them, with TOGETHER:
// together.cuh). docs/reference/formats.md says what is stored, kvbits/quant/{basis,scales,trellis}.py define it.
//
// Four neighbouring threads have two tokens, eight apart: of every band each of them four channels, as the matrix units
// want them and give them back, and so that a band's width is known when this is compiled. From the raw rows to the
// codes all stays in registers, but for the operands of a product: the four threads exchange their numbers so that each
// has whole rings of a token, and one after the other becomes codes in shared memory. Values are turned by butterflies
// in the reference's order, bit for bit, or with WARPGROUPS, 16-bit rows at head_dim 128, by a product with +-1 on the
// matrix units. Keys are turned back by their frame and multiplied with the basis on the matrix units, both as two
// float16 numbers, high and low (a page and columns over powers of two first): y is off by less than 2**-18 of sum
// |k_f| |A| of any token that is not 2**14 times smaller than the page's largest number. So a number's units
// (trellis.cuh) differ from the reference's only where they are a tie to that, and a token's scale only where two cost
// the same squared error to about as much.
#include "fit.cuh"
#include "tokens.cuh"

#if TOGETHER
#include "together.cuh"
#else
constexpr int HALF = D / 2;

struct Shared {
#if WARPGROUPS
    unsigned char basis[D * D * 4];
    unsigned char codes[IN_BLOCK][CODE_STRIDE];
#else
    union {
        uint4 operands[BANDS][2][THREADS];  // of a thread's tokens, high and low
        unsigned char codes[IN_BLOCK][CODE_STRIDE];
    };
#endif
    float column[D], cosine[HALF], sine[HALF];
    u32 most[WARPS];  // of a warp's keys, the bits of a float
#if STORES
    unsigned char* page[IN_BLOCK];  // of each token
    int place[IN_BLOCK], start[IN_BLOCK];  // in it, -1: not stored; position of its first token
#endif
};

static_assert(IN_BLOCK == PAGE, "a page's tokens at a time");

/// The tokens that a block stores at a time.
struct Tokens {
    unsigned char* out;           // the page that they all are, in order; null: shared.page has the page of each
    int start;                    // position of its first token

    DEVICE int place_of(const Shared& shared, int token) const {
#if STORES
        if (!out) return shared.place[token];
#endif
        return token;
    }
    DEVICE int start_of(const Shared& shared, int token) const {
#if STORES
        if (!out) return shared.start[token];
#endif
        return start;
    }
};

/// What cosines, sines and columns in shared memory are now: of which frame (ANY: of none, tokens are turned one by
/// one), turns over and columns times 2**exponent.
struct Scaled {
    static constexpr int ANY = -2;
    int frame = -1, exponent = USUAL;
};

/// A thread's part of its tokens, turned back by the frame, as operands of the matrix units: take(band, high, low).
template <class Take>
DEVICE void turn_and_split(const Token (&x)[TOKENS], int j, const Shared& shared, const Take& take) {
#pragma unroll
    for (int i = 0; i < BANDS / 2; ++i) {
        const float4 c = four_at(shared.cosine, i, j), s = four_at(shared.sine, i, j);
        const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 high[TOKENS][2], low[TOKENS][2];
#pragma unroll
            for (int r = 0; r < TOKENS; ++r) {
                float y[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float a = x[r][i][k], b = x[r][i + BANDS / 2][k];
                    y[k] = half ? b * cosine[k] - a * sine[k] : a * cosine[k] + b * sine[k];
                }
#pragma unroll
                for (int k = 0; k < 2; ++k) split_f16(y[2 * k], y[2 * k + 1], high[r][k], low[r][k]);
            }
            take(i + half * (BANDS / 2), uint4{high[0][0], high[1][0], high[0][1], high[1][1]},
                 uint4{low[0][0], low[1][0], low[0][1], low[1][1]});
        }
    }
}

DEVICE void write_turns(const Args& a, Shared& shared, const Scaled& scaled) {
    const float over = power_of_two(-scaled.exponent);
#pragma unroll 1
    for (int i = threadIdx.x; i < HALF; i += THREADS) {
        const float2 turn = scaled.frame == Scaled::ANY ? float2{1.f, 0.f} : turn_of(scaled.frame * FRAME, a.turns[i]);
        shared.cosine[i] = turn.x * over, shared.sine[i] = turn.y * over;
    }
}
/// Tokens turned back one by one, each by its page's frame.
DEVICE void turn_each(const Args& a, const Tokens& of, Token (&x)[TOKENS], int j, const Shared& shared) {
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const int frame = of.start_of(shared, thread_token(r)) / FRAME * FRAME;
#pragma unroll
        for (int i = 0; i < BANDS / 2; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 turn = turn_of(frame, a.turns[i * BAND + j * 4 + k]);
                const float low = x[r][i][k], high = x[r][i + BANDS / 2][k];
                x[r][i][k] = low * turn.x + high * turn.y, x[r][i + BANDS / 2][k] = high * turn.x - low * turn.y;
            }
    }
}
DEVICE void write_columns(const Args& a, int head, Shared& shared, const Scaled& scaled) {
    const float back = power_of_two(scaled.exponent);
#pragma unroll 1
    for (int i = threadIdx.x; i < D; i += THREADS) shared.column[i] = a.column[head * D + i] * back;
}

/// What a head's pages share: once for all pages of a block.
DEVICE void load_head(const Args& a, int head, Shared& shared, const Scaled& scaled) {
    write_columns(a, head, shared, scaled);
#if WARPGROUPS
    constexpr int COUNT = sizeof(shared.basis) / 16;  // where matrix units read it
    const uint4* const from = a.basis + i64(head) * COUNT;
#pragma unroll 8
    for (int i = threadIdx.x; i < COUNT; i += THREADS) reinterpret_cast<uint4*>(shared.basis)[i] = from[i];
    shared_writes_before_copies();
#endif
}

#if WARPGROUPS
/// The Hadamard matrix, +-1 of the type of rows, where and how matrix units read it: the order of channels within 16 is
/// the same for rows and columns.
DEVICE void load_signs(Shared& shared) {
    constexpr u32 ONE = (X_TYPE == BFLOAT16 ? 0x3f80u : 0x3c00u) * 0x10001u;
    const u32 column = threadIdx.x % D, second = (column & 1) << 31, third = (column & 2) * 0x40004000u,
              fifth = (column & 4) * 0x20002000u;
#pragma unroll 4
    for (u32 i = threadIdx.x / D; i < D / 8; i += THREADS / D) {  // 8 rows of a column
        const u32 w = ONE ^ second ^ (__popc(i * 8 & column) & 1) * 0x80008000u;
        reinterpret_cast<uint4*>(shared.basis)[i * D + column] = {w, w ^ third, w ^ fifth, w ^ third ^ fifth};
    }
    shared_writes_before_copies();
}

/// x: rows times the signs of the Hadamard matrix; `factor_of` is left out.
DEVICE void times_signs(const Quad (&raw)[TOKENS][BANDS], Token (&x)[TOKENS], const Shared& shared) {
    float y[BANDS][2][4];
    u32 rows[BANDS][4];
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) rows[i][k] = raw[k % 2][i].w[k / 2];
    const u64 signs = warpgroup_operand(shared.basis);
    warpgroup_begins(y);
#pragma unroll
    for (int step = 0; step < BANDS; ++step)
        warpgroup_mma<X_TYPE == BFLOAT16>(y, rows[step], signs + step * 2 * D, step > 0);
    warpgroup_ends(y);
#pragma unroll
    for (int i = 0; i < BANDS; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) x[0][i][k] = y[i][k / 2][k % 2], x[1][i][k] = y[i][k / 2][2 + k % 2];
}

/// y: tokens in the frame of the page times the basis, four warps at once: operands of tokens from registers, of the
/// basis from shared memory.
DEVICE void times_basis(const Args&, const Token (&x)[TOKENS], int j, int, Shared& shared, float (&y)[BANDS][2][4]) {
    u32 rows[2][BANDS][4];
    turn_and_split(x, j, shared, [&](int i, uint4 high, uint4 low) {
        rows[0][i][0] = high.x, rows[0][i][1] = high.y, rows[0][i][2] = high.z, rows[0][i][3] = high.w;
        rows[1][i][0] = low.x, rows[1][i][1] = low.y, rows[1][i][2] = low.z, rows[1][i][3] = low.w;
    });
    const u64 basis = warpgroup_operand(shared.basis);
    warpgroup_begins(y);
#pragma unroll
    for (int step = 0; step < BANDS; ++step)
#pragma unroll
        for (int product = 0; product < 3; ++product)  // high times low, low times high, high times high
            warpgroup_mma<false>(y, rows[product == 1][step], basis + ((product == 0) * BANDS + step) * 2 * D,
                                 step + product > 0);
    warpgroup_ends(y);
}
#else
/// y: tokens in the frame of the page times the basis.
DEVICE void times_basis(const Args& a, const Token (&x)[TOKENS], int j, int head, Shared& shared,
                        float (&y)[BANDS][2][4]) {
    turn_and_split(x, j, shared, [&](int i, uint4 high, uint4 low) {
        shared.operands[i][0][threadIdx.x] = high, shared.operands[i][1][threadIdx.x] = low;
    });
    const uint4* const from = a.basis + i64(head) * BANDS * BANDS * 64 + threadIdx.x % 32;
    // Half a step's operands of the basis are on their way while the other half is multiplied.
    constexpr int EACH = BANDS / 2;
    uint4 b[2][EACH][2];
    const auto load = [&](int half, int step) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int t = 0; t < 2; ++t) b[half][i][t] = from[(((half * EACH + i) * BANDS + step) * 2 + t) * 32];
    };
    load(0, 0);
#pragma unroll 1
    for (int step = 0; step < BANDS; ++step) {
        // written by this thread
        const uint4 high = shared.operands[step][0][threadIdx.x], low = shared.operands[step][1][threadIdx.x];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == 0) load(1, step);
            else load(0, min(step + 1, BANDS - 1));
#pragma unroll
            for (int product = 0; product < 3; ++product) {
                const uint4 rows = product == 1 ? low : high;
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        const uint4 of = b[half][i][t];
                        mma_f16(y[half * EACH + i][t], rows.x, rows.y, rows.z, rows.w, product ? of.x : of.z,
                                product ? of.y : of.w);
                    }
            }
        }
    }
}
#endif

/// Tokens in the frame of their page times the basis, less offsets (of a side with offsets).
template <class S>
DEVICE void rows_to_basis(const Args& a, const Tokens& of, Token (&x)[TOKENS], const float (&most)[TOKENS], int j,
                          int head, Shared& shared, Scaled& scaled) {
    // The block's largest number comes to lie from 2**11 to 2**15, which float16 holds after a turn; a token 2**14
    // times smaller still has 22 bits.
    const int lane = threadIdx.x % 32;
    const u32 here = __reduce_max_sync(ALL_LANES, max(__float_as_uint(most[0]), __float_as_uint(most[1])));
    if (lane == 0) shared.most[threadIdx.x / 32] = here;
    __syncthreads();
    u32 largest = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = max(largest, shared.most[warp]);
    const int exponent = exponent_over(largest);
    if (exponent > scaled.exponent || exponent < scaled.exponent - NEAR) {  // of the whole block
        scaled.exponent = exponent;
        write_turns(a, shared, scaled);
        write_columns(a, head, shared, scaled);
        __syncthreads();
    }
#if WARPGROUPS
    float y[BANDS][2][4];
#else
    float y[BANDS][2][4] = {};
#endif
    times_basis(a, x, j, head, shared, y);
    const float* offsets[TOKENS];
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const int token = thread_token(r);
        offsets[r] =
            S::HAS_OFFSETS
                ? a.offsets + (head * OFFSETS + offsets_row(of.start_of(shared, token), of.place_of(shared, token))) * D
                : nullptr;
    }
#pragma unroll
    for (int i = 0; i < BANDS; ++i) {
        const float4 c = four_at(shared.column, i, j);
        const float column[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
            const float4 o = S::HAS_OFFSETS ? four_at(offsets[r], i, j) : float4{};
            const float less[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
            // a column is a power of two: one rounding
            for (int k = 0; k < 4; ++k) x[r][i][k] = fmaf(y[i][k / 2][2 * r + k % 2], column[k], -less[k]);
        }
    }
}

/// A thread's part of the rows of a block's tokens; zeros where a token is not stored. page: number of the page, or of
/// IN_BLOCK tokens.
DEVICE void load_rows(const Args& a, int side, int page, int head, const Shared& shared, Quad (&raw)[TOKENS][BANDS]) {
    const int j = threadIdx.x % LANES;
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const int token = thread_token(r);
#if STORES
        const int entry = page * IN_BLOCK + token;
        const char* from = row_of(a, side, entry / a.row_tokens, entry, head, j * 4);
        if (shared.place[token] < 0) {
#pragma unroll
            for (int i = 0; i < BANDS; ++i)
                for (int k = 0; k < Quad::WORDS; ++k) raw[r][i].w[k] = 0;
            continue;
        }
#elif APPENDS
        const char* from = a.step.tail + a.step.closings[page].from + head * a.step.tail_head_bytes +
                           a.step.tail_offset[side] + (token * D + j * 4) * BYTES;
#else
        const char* from =
            static_cast<const char*>(a.x[side]) +
            (page * a.stride[side][0] + head * a.stride[side][1] + token * a.stride[side][2] + j * 4) * BYTES;
#endif
#pragma unroll
        for (int i = 0; i < BANDS; ++i) raw[r][i].load(from + i * BAND * BYTES);
    }
}

/// Whether a thread's part of the rows has NaN or infinity, where no one has looked yet.
DEVICE bool has_nonfinite(const Args& a, int side, int page, int head, const Shared& shared) {
    Quad raw[TOKENS][BANDS];
    load_rows(a, side, page, head, shared, raw);
    return !finite(largest_of(raw[0])) || !finite(largest_of(raw[1]));
}

#if STORES
/// Where the tokens from number `first` on go; tokens without a slot, or with one past the pages, are not stored.
DEVICE Tokens find_tokens(const Args& a, int first, int side, int head, Shared& shared) {
#pragma unroll 1
    for (int token = threadIdx.x; token < IN_BLOCK; token += THREADS) {
        const int entry = first + token;
        note_place(
            a, token, side, head, shared, [&] { return entry < a.num_tokens ? a.slots[entry] : -1; },
            [&] { return a.starts[entry]; });
    }
    __syncthreads();
    bool whole = true;
    for (int token = threadIdx.x % 32; token < IN_BLOCK; token += 32)
        whole &= shared.place[token] == token && shared.page[token] == shared.page[0];
    return {__any_sync(ALL_LANES, !whole) ? nullptr : shared.page[0], shared.start[0]};
}

/// Whether all tokens that are stored lie in one frame, and which.
DEVICE int frame_of_all(const Shared& shared) {
    int frame = -1, other = 0;
    for (int token = threadIdx.x % 32; token < IN_BLOCK; token += 32) {
        if (shared.place[token] < 0) continue;
        const int mine = shared.start[token] / FRAME;
        other |= frame >= 0 && frame != mine;
        frame = mine;
    }
    const int most = int(__reduce_max_sync(ALL_LANES, u32(frame + 1))) - 1;
    return __any_sync(ALL_LANES, other || (frame >= 0 && frame != most)) ? Scaled::ANY : max(most, 0);
}

#endif

/// v[i] of thread j for v[j] of thread i, of four neighbouring threads.
DEVICE void exchange(u32 (&v)[LANES], int j) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2)
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            if (i & mask) continue;
            const u32 other = __shfl_xor_sync(ALL_LANES, j & mask ? v[i] : v[i + mask], mask);
            if (j & mask) v[i] = other;
            else v[i + mask] = other;
        }
}
/// Numbers of a token, two in a word, as rings: the m-th of a thread is the token's ring 4 m + j. Words of rings that a
/// token does not have are anything.
template <class S, int EACH>
DEVICE void make_rings(const u32 (&from)[BANDS][2], u32 (*rings)[RING / 2], int j) {
#pragma unroll
    for (int m = 0; m < EACH; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 v[RUNS];
            if (!S::VALUES) {  // a band of each thread
#pragma unroll
                for (int i = 0; i < LANES; ++i)
                    v[i] = from[m * LANES + i < count_rings<S>() ? int(ring_bands<S>() >> 4 * (m * LANES + i) & 15) : 0]
                               [half];
                exchange(v, j);
            } else {
#pragma unroll
                for (int run = 0; run < RUNS; ++run) {
                    // The run is four channels of a band further on, the thread's own or another's.
                    constexpr int LAST = BANDS - 1;
                    const int away = BANDS * run % LANES, band = m + BANDS * run / LANES;
                    const u32 mine = from[min(band, LAST)][half], next = from[min(band + 1, LAST)][half];
                    v[run] = away ? __shfl_sync(ALL_LANES, j < away ? next : mine,
                                                (int(threadIdx.x) % 32 & ~(LANES - 1)) | (j + away) % LANES)
                                  : mine;
                }
            }
#pragma unroll
            for (int run = 0; run < RUNS; ++run) rings[m][run * 2 + half] = v[run];
        }
}
/// Codes of a thread's tokens to shared.codes.
template <class S>
DEVICE void write_codes(const Token (&x)[TOKENS], const int (&scale)[TOKENS], Shared& shared) {
    constexpr int RINGS = count_rings<S>(), EACH = (RINGS + LANES - 1) / LANES;
    const int j = threadIdx.x % LANES;
    u32 rings[TOKENS * EACH + (EACH == 0)][RING / 2];
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const float inverse = inverse_of<S>(scale[r]);
        u32 numbers[BANDS][2] = {};
#pragma unroll
        for (int i = 0; i < BANDS; ++i) {
            if (S::width(i) == 0) continue;
            u32 found[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) found[k] = units_of(x[r][i][k], inverse);
            numbers[i][0] = permute_bytes(found[0], found[1], 0x5410);
            numbers[i][1] = permute_bytes(found[2], found[3], 0x5410);
            if (S::width(i) == 8)
                four_of(shared, thread_token(r), i * BAND + j * 4) =
                    code_of_8_bits(found[0]) | code_of_8_bits(found[1]) << 8 | code_of_8_bits(found[2]) << 16 |
                    code_of_8_bits(found[3]) << 24;
        }
        make_rings<S, EACH>(numbers, rings + r * EACH, j);
    }
#pragma unroll 1
    for (int n = 0; n < TOKENS * EACH; ++n) {  // not unrolled: the code of a search is long
        const int number = n % EACH * LANES + j;
        u32 codes[RUNS];
        if constexpr (RINGS > 0) codes_of_ring<S>(rings[0], min(number, RINGS - 1), codes);
#pragma unroll
        for (int i = 0; i + 1 < TOKENS * EACH; ++i)
#pragma unroll
            for (int k = 0; k < RING / 2; ++k) rings[i][k] = rings[i + 1][k];
        if (number < RINGS)
#pragma unroll
            for (int run = 0; run < RUNS; ++run)
                four_of(shared, thread_token(n / EACH), run_channel<S>(number, run)) = codes[run];
    }
}

/// Stores one side of a block's tokens from their rows.
template <class S>
DEVICE void store_side(const Args& a, const Tokens& of, int side, int page, int head, const Quad (&raw)[TOKENS][BANDS],
                       Shared& shared, Scaled& scaled) {
    const int j = threadIdx.x % LANES;
    if constexpr (S::BASIS == CALIBRATED) {  // while the rows are on their way
        int frame = of.start / FRAME;
#if STORES
        if (!of.out) frame = frame_of_all(shared);
#endif
        if (frame != scaled.frame) {
            scaled.frame = frame;
            write_turns(a, shared, scaled);
        }
    }
    Token x[TOKENS];
    float most[TOKENS];
    if constexpr (!by_signs<S>())
#pragma unroll
        for (int r = 0; r < TOKENS; ++r) {
#pragma unroll
            for (int i = 0; i < BANDS; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) x[r][i][k] = raw[r][i][k];
            most[r] = largest_of(raw[r]);
            if (!finite(most[r])) {
                if (a.status) a.status->nonfinite[side] = 1;
                if (STORES) most[r] = 0.f;  // tokens of other sequences are beside it, and keep their bits
            }
        }
    bool overflow = false;
    if constexpr (S::BASIS == CALIBRATED) {
#if STORES
        if (scaled.frame == Scaled::ANY) turn_each(a, of, x, j, shared);
#endif
        rows_to_basis<S>(a, of, x, most, j, head, shared, scaled);
    } else {
#if WARPGROUPS
        if constexpr (by_signs<S>()) times_signs(raw, x, shared);
#endif
        if constexpr (!by_signs<S>() && S::BASIS == HADAMARD)
#pragma unroll
            for (int r = 0; r < TOKENS; ++r) hadamard(x[r], j);
    }
    int scale[TOKENS];
    fit_scales<S>(x, threadIdx.x % 32, scale, overflow);
    if (overflow && a.status) {
        a.status->overflow[side] = 1;
        if (by_signs<S>() && has_nonfinite(a, side, page, head, shared)) a.status->nonfinite[side] = 1;
    }
    if (!WARPGROUPS) __syncthreads();  // codes take memory of the operands
    write_codes<S>(x, scale, shared);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < TOKENS; ++r) {
        const int token = thread_token(r), place = of.place_of(shared, token);
        unsigned char* out = of.out;
#if STORES
        if (!out) out = shared.page[token];
#endif
        if (j == 0 && place >= 0) out[S::SCALE_OFFSET + place] = (unsigned char)scale[r];
    }
#if STORES
    if (!of.out) {
        scatter<S>(shared);
        return;
    }
#endif
    write_planes<S>(of.out, shared);
}

/// Pages (or IN_BLOCK tokens at a time) `first` .. `last` - 1 of a head.
template <class S>
DEVICE void store_pages(const Args& a, int side, int head, int first, int last, Shared& shared) {
    Scaled scaled;
    bool loaded = false;
    const auto load = [&] {
        loaded = true;
        if (S::BASIS == CALIBRATED) load_head(a, head, shared, scaled);
#if WARPGROUPS
        if (by_signs<S>()) load_signs(shared);
#endif
        if (S::BASIS == CALIBRATED || by_signs<S>()) __syncthreads();
    };
    if (!APPENDS) load();
#pragma unroll 1
    for (int page = first; page < last; ++page) {
#if STORES
        const Tokens of = find_tokens(a, page * IN_BLOCK, side, head, shared);
#elif APPENDS
        if (append_alone<D, D>(a.step, a.num_heads, side, page, head, threadIdx.x)) continue;
        if (!loaded) load();
        unsigned char* const out =
            reinterpret_cast<unsigned char*>(a.step.closed) + a.step.closings[page].to + i64(head) * a.head_bytes;
        const Tokens of = {out, S::BASIS == CALIBRATED ? a.starts[page] - PAGE : 0};
#else
        const Tokens of = {reinterpret_cast<unsigned char*>(a.page_address[page]) + i64(head) * a.head_bytes,
                           S::BASIS == CALIBRATED ? a.starts[page] : 0};
#if __CUDA_ARCH__ >= 900
        // the next page's rows, where they lie side by side
        if (threadIdx.x == 0 && page + 1 < last && a.stride[side][2] == D)
            prefetch_l2(i64(a.x[side]) + ((page + 1) * a.stride[side][0] + head * a.stride[side][1]) * BYTES,
                        PAGE * D * BYTES);
#endif
#endif
        Quad raw[TOKENS][BANDS];
        load_rows(a, side, page, head, shared, raw);
        store_side<S>(a, of, side, page, head, raw, shared, scaled);
        if (side == 0) clear_padding(a, of.out, shared);
        // the page has been read: its place may be the fresh token's; and what is shared may be the next page's
        __syncthreads();
#if APPENDS
        FreshRow<D, D>(a.step, a.num_heads, side, page, head, threadIdx.x).store();
#endif
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) store_banded(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    static_assert(sizeof(Shared) <= SHARED_BYTES, "store.py counts too little shared memory");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // Values last, and the pages of a head side by side: a multiprocessor runs one side's code at a time, and finds the
    // head's basis in its L1.
    const int each = (a.num_pages + a.pages_each - 1) / a.pages_each, count = each * a.num_heads,
              side = int(blockIdx.x) >= count, item = int(blockIdx.x) - side * count;
    const int head = item / each, first = item % each * a.pages_each, last = min(first + a.pages_each, a.num_pages);
    if (side == 0) store_pages<Banded<K_BANDED, false>>(a, 0, head, first, last, shared);
    else store_pages<Banded<V_BANDED, true>>(a, 1, head, first, last, shared);
}
