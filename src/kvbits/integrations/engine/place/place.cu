// Where a step's tokens go besides their pages, and what its rows read: __init__.py says what. One block, a few integers
// for each token and row.
#include "ptx.cuh"

constexpr int MOST_FORMATS = 4;

/// Copies in one format.
struct Copied {
    int *where, *holds;                          // [num_blocks], [num_copies]
    i64* slots;                                  // [tokens]
    int *tail, *table;                           // [2, room], [room, newest]
    int num_copies, newest, first, pages;

    /// The copy of a block, or -1.
    DEVICE int of(i64 block, int num_blocks) const {
        if (block <= 0 || block >= num_blocks) return -1;
        const int copy = where[block];
        return copy >= 0 && copy < num_copies && holds[copy] == block ? copy : -1;
    }
};

struct Args {
    const int *seq_lens, *starts, *table;        // [rows], [rows + 1], [rows, table_width]
    const i64* slots;                            // [tokens]
    const int* rings;                            // [rows], -1: no copies; null where there are none
    int* stamps;                                 // [num_blocks]
    i64* previous;                               // [tokens]; null if nobody asks
    int* page_starts;                            // [tokens]; null if nobody asks
    int *packed, *head, *head_table;             // [2 + num_formats, room], [room], [room]
    i64 table_stride;
    int rows, tokens, table_width, num_blocks, step, page_size, room, num_formats;
    Copied formats[MOST_FORMATS];                // finest first
};

/// A token of the step.
struct Token {
    // place in its page, the page's number in its row, that of the row's newest, the row's ring
    int row, at, page, newest, ring;
    i64 block;
    bool stored;

    DEVICE Token(const Args& a, int t) {
        const i64 slot = a.slots[t];
        block = slot < 0 ? -1 : slot / a.page_size, at = slot < 0 ? 0 : int(slot - block * a.page_size);
        int low = 0, high = a.rows - 1;          // the first row that ends past t
        while (low < high) {
            const int middle = (low + high) / 2;
            if (a.starts[middle + 1] > t) high = middle;
            else low = middle + 1;
        }
        row = low;
        const int length = a.seq_lens[row], position = length - a.starts[row + 1] + t;
        page = position < 0 ? 0 : position / a.page_size, newest = (length - 1) / a.page_size;
        stored = slot >= 0 && block < a.num_blocks && position >= 0 && page < a.table_width;
        ring = stored && block > 0 && a.rings ? a.rings[row] : -1;
    }
    /// The copy in its row's ring that the token is kept in, or -1.
    DEVICE int own_copy(const Copied& f) const {
        const bool is_first = f.first && page == 0;
        if (ring < 0 || !(is_first || page > newest - f.newest)) return -1;
        const int copy = ring * f.pages + (is_first ? f.newest : page % f.newest);
        return copy < f.num_copies ? copy : -1;
    }
};

/// What a row reads from where.
DEVICE void read(const Args& a, int b) {
    const int length = a.seq_lens[b], *blocks = a.table + b * a.table_stride;
    const int all = (length + a.page_size - 1) / a.page_size, pages = all < a.table_width ? all : a.table_width;
    const int head = a.formats[0].first && pages > 0 ? a.formats[0].of(blocks[0], a.num_blocks) : -1, skipped = head >= 0;
    a.head[b] = skipped * (length < a.page_size ? length : a.page_size), a.head_table[b] = skipped ? head : 0;
    a.packed[b] = skipped * a.page_size, a.packed[a.room + b] = skipped;
    int end = pages;
    for (int i = 0; i < a.num_formats; ++i) {
        const Copied& f = a.formats[i];
        int begin = end, least = pages - f.newest;
        least = least > f.first ? least : f.first, least = least > skipped ? least : skipped;
        while (begin > least && f.of(blocks[begin - 1], a.num_blocks) >= 0) --begin;
        for (int j = 0; j < f.newest; ++j)
            f.table[b * f.newest + j] = begin + j < end ? f.of(blocks[begin + j], a.num_blocks) : 0;
        const int from = begin * a.page_size, to = length < end * a.page_size ? length : end * a.page_size;
        const int packed = (length < from ? length : from) - skipped * a.page_size;
        f.tail[b] = to > from ? to - from : 0, f.tail[a.room + b] = from;
        a.packed[(2 + i) * a.room + b] = packed > 0 ? packed : 0;
        end = begin;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) place(const __grid_constant__ Args a) {
    for (int t = threadIdx.x; t < a.tokens; t += THREADS) {
        const Token token(a, t);
        if (!token.stored) continue;
        a.stamps[token.block] = a.step;
        if (token.block == 0) continue;
        for (int i = 0; i < a.num_formats; ++i) {
            const Copied& f = a.formats[i];
            const int copy = token.own_copy(f);
            if (copy < 0) f.where[token.block] = -1;
            else if (token.at == 0) f.holds[copy] = int(token.block), f.where[token.block] = copy;
        }
    }
    __syncthreads();  // all pages of the step are known now
    for (int t = threadIdx.x; t < a.tokens; t += THREADS) {
        const Token token(a, t);
        if (a.page_starts) a.page_starts[t] = token.page * a.page_size;
        if (a.previous) {
            i64 before = -1;
            if (token.stored && token.at == 0 && token.page > 0) {
                before = a.table[token.row * a.table_stride + token.page - 1];
                const bool inside = before >= 0 && before < a.num_blocks;
                // written by another row just now
                if (inside && t == a.starts[token.row] && a.stamps[before] == a.step) before = -1;
            }
            a.previous[t] = before;
        }
        for (int i = 0; i < a.num_formats; ++i) {
            const Copied& f = a.formats[i];
            const int copy = token.own_copy(f) < 0 ? -1 : f.of(token.block, a.num_blocks);
            f.slots[t] = copy < 0 ? -1 : i64(copy) * a.page_size + token.at;
        }
    }
    if (!a.num_formats) return;
    for (int b = threadIdx.x; b < a.rows; b += THREADS) read(a, b);
}
