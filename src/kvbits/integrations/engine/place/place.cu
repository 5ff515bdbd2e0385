// Where a step's tokens go besides their pages, and what its rows read: __init__.py says what. One block, a few integers
// for each token and row.
#include "ptx.cuh"

struct Args {
    const int *seq_lens, *starts, *table;        // [rows], [rows + 1], [rows, table_width]
    const i64* slots;                            // [tokens]
    const int* rings;                            // [rows], -1: no copies; null where there are none
    int* stamps;                                 // [num_blocks]
    i64* previous;                               // [tokens]; null if nobody asks
    int* page_starts;                            // [tokens]; null if nobody asks
    int *where, *holds;                          // [num_blocks], [num_copies]; null: no copies
    i64* copy_slots;                             // [tokens]
    int *packed, *head, *head_table, *tail, *tail_table;  // [3, room], [room], [room], [2, room], [room, newest]
    i64 table_stride;
    int rows, tokens, table_width, num_blocks, num_copies, step, page_size, newest, first, room;

    /// The copy of a block, or -1.
    DEVICE int copy_of(i64 block) const {
        if (block <= 0 || block >= num_blocks) return -1;
        const int copy = where[block];
        return copy >= 0 && copy < num_copies && holds[copy] == block ? copy : -1;
    }
};

/// A token of the step.
struct Token {
    // place in its page, the page's number in its row, that of the row's newest
    int row, at, page, newest;
    i64 block;
    bool stored;

    DEVICE Token(const Args& a, int t) {
        int low = 0, high = a.rows - 1;          // the first row that ends past t
        while (low < high) {
            const int middle = (low + high) / 2;
            if (a.starts[middle + 1] > t) high = middle;
            else low = middle + 1;
        }
        row = low;
        const i64 slot = a.slots[t];
        const int length = a.seq_lens[row], position = length - a.starts[row + 1] + t;
        block = slot < 0 ? -1 : slot / a.page_size, at = slot < 0 ? 0 : int(slot % a.page_size);
        page = position < 0 ? 0 : position / a.page_size, newest = (length - 1) / a.page_size;
        stored = slot >= 0 && block < a.num_blocks && position >= 0 && page < a.table_width;
    }
    DEVICE bool is_first(const Args& a) const { return a.first && page == 0; }
    /// Below 0, or past all copies: none.
    DEVICE int own_copy(const Args& a) const {
        return a.rings[row] * (a.newest + a.first) + (is_first(a) ? a.newest : page % a.newest);
    }
    DEVICE bool kept(const Args& a) const {
        return stored && block > 0 && (is_first(a) || page > newest - a.newest) && a.rings[row] >= 0 &&
               own_copy(a) < a.num_copies;
    }
};

/// What a row reads from where.
DEVICE void read(const Args& a, int b) {
    const int length = a.seq_lens[b], *blocks = a.table + b * a.table_stride;
    const int pages = (length + a.page_size - 1) / a.page_size,
              newest = (pages < a.table_width ? pages : a.table_width) - 1;
    const int head = a.first && length > 0 ? a.copy_of(blocks[0]) : -1, skipped = head >= 0;
    int begin = newest + 1, least = newest + 1 - a.newest;
    least = least > a.first ? least : a.first;
    while (begin > least && a.copy_of(blocks[begin - 1]) >= 0) --begin;
    for (int i = 0; i < a.newest; ++i)
        a.tail_table[b * a.newest + i] = begin + i <= newest ? a.copy_of(blocks[begin + i]) : 0;
    const int from = begin * a.page_size, packed = (length < from ? length : from) - skipped * a.page_size;
    a.head[b] = skipped * (length < a.page_size ? length : a.page_size), a.head_table[b] = skipped ? head : 0;
    a.tail[b] = length > from ? length - from : 0, a.tail[a.room + b] = from;
    a.packed[b] = packed > 0 ? packed : 0, a.packed[a.room + b] = skipped * a.page_size,
    a.packed[2 * a.room + b] = skipped;
}

extern "C" __global__ void __launch_bounds__(THREADS) place(const __grid_constant__ Args a) {
    for (int t = threadIdx.x; t < a.tokens; t += THREADS) {
        const Token token(a, t);
        if (!token.stored) continue;
        a.stamps[token.block] = a.step;
        if (!a.where || token.block == 0) continue;
        if (!token.kept(a)) a.where[token.block] = -1;
        else if (token.at == 0) {
            const int copy = token.own_copy(a);
            a.holds[copy] = int(token.block), a.where[token.block] = copy;
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
        if (!a.where) continue;
        const int copy = token.kept(a) ? a.copy_of(token.block) : -1;
        a.copy_slots[t] = copy < 0 ? -1 : i64(copy) * a.page_size + token.at;
    }
    if (!a.where) return;
    for (int b = threadIdx.x; b < a.rows; b += THREADS) read(a, b);
}
