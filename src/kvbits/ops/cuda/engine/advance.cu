// A decode step of a cache on the device: one token for every sequence. Says where the tokens go, which raw page is
// quantized and where to, and moves the lengths on. One block; a few integers for each sequence.
//
// A page that closes may also get copies in finer formats. Those of each kind go round a ring of pages, so a new one
// takes the place of the oldest, which nobody reads any more.
#include "ptx.cuh"
#include "runs.cuh"

struct Pages {
    const int* table;            // [batch, width]: page numbers
    const i64* offset;           // [pages] bytes to each page, where pools have several slabs; null: `stride` apart
    i64 stride;
    int width;

    /// Number of a sequence's page `at`; -1 past the last.
    DEVICE i64 number(int b, int at) const { return at < width ? table[b * width + at] : -1; }
    /// Bytes from the pool's start to page `at` of a sequence's.
    DEVICE i64 find(int b, int at) const {
        const i64 id = number(b, at);
        return id < 0 ? NOWHERE : offset ? offset[id] : id * stride;
    }
};

// tokens in raw pages, in closed ones; page of the ring where the raw ones begin; position of their first; all; those
// that are read from closed pages
enum { TAIL, CLOSED, FIRST, TAIL_START, LENGTH, READ, FIELDS };
// of each kind of copies: tokens that have one; page of the ring where they begin; those that are read from it, the
// oldest; position of the first
enum { COPIED, COPY_FIRST, COPY_READ, COPY_START, COPY_FIELDS };
constexpr int MOST_COPIES = 2;

struct Copies {
    Pages ring;                  // twice in a row of the table
    Closing* closings;           // [batch]
    int pages;                   // of the ring
};

struct Args {
    int* state;                  // [FIELDS + num_copies * COPY_FIELDS, batch]
    int* before;                 // likewise: what it was
    const int* residual;         // [batch]: newest tokens that stay raw; null if nothing is quantized later
    const unsigned char* valid;  // [batch]: which tokens are real; null for all
    Run* runs;                   // [batch]
    Closing* closings;           // [batch]
    int* query_lens;             // [batch]: 1 for real tokens, 0 for padding
    // [batch]: page number * page_size + place, -1 for none; the page before the one that the token opens. Null if
    // nobody asks
    i64 *slots, *previous;
    int* page_starts;            // [batch]: position of the first token of that page
    Pages tail, closed;
    Copies copies[MOST_COPIES];  // the finest first
    // ring: raw pages that are used again and again, twice in a row of the table; 0: a row has them in order
    int batch, page_size, ring;
    int valid_stride, num_copies;
};

/// A page closed: moves the copies on and says where its own go.
DEVICE void copy_page(const Args& a, int b, int* s, i64 from, Closing* copied) {
    int finer = 0;               // tokens that have a finer copy
    for (int c = 0; c < a.num_copies; ++c) {
        const Copies& kind = a.copies[c];
        int* const of = s + FIELDS + c * COPY_FIELDS;
        if (of[COPIED] < kind.pages * a.page_size) of[COPIED] += a.page_size;
        else of[COPY_FIRST] = of[COPY_FIRST] + 1 == kind.pages ? 0 : of[COPY_FIRST] + 1;
        copied[c] = {from, kind.ring.find(b, of[COPY_FIRST] + of[COPIED] / a.page_size - 1)};
        of[COPY_READ] = of[COPIED] - finer, of[COPY_START] = s[TAIL_START] - of[COPIED];
        finer = of[COPIED];
    }
    s[READ] = s[CLOSED] - finer;
}

extern "C" __global__ void __launch_bounds__(THREADS) advance(const __grid_constant__ Args a) {
    for (int b = threadIdx.x; b < a.batch; b += THREADS) {
        int s[FIELDS + MOST_COPIES * COPY_FIELDS];
        const int fields = FIELDS + a.num_copies * COPY_FIELDS;
        for (int i = 0; i < fields; ++i) a.before[i * a.batch + b] = s[i] = a.state[i * a.batch + b];
        const int n = a.valid ? a.valid[i64(b) * a.valid_stride] != 0 : 1;
        Closing closing = {NOWHERE, NOWHERE}, copied[MOST_COPIES];
        for (int c = 0; c < a.num_copies; ++c) copied[c] = closing;
        if (n && a.residual && s[TAIL] - a.residual[b] >= a.page_size) {
            closing = {a.tail.find(b, s[FIRST]), a.closed.find(b, s[CLOSED] / a.page_size)};
            s[TAIL] -= a.page_size, s[CLOSED] += a.page_size, s[TAIL_START] += a.page_size;
            s[FIRST] = s[FIRST] + 1 == a.ring ? 0 : s[FIRST] + 1;
            copy_page(a, b, s, closing.from, copied);
        }
        const int at = s[FIRST] + s[TAIL] / a.page_size, slot = s[TAIL] % a.page_size;
        const i64 page = n ? a.tail.find(b, at) : NOWHERE;
        const bool fits = page != NOWHERE && (closing.from == NOWHERE) == (closing.to == NOWHERE);
        a.runs[b] = {fits ? page : 0, b, 0, slot, fits};
        a.closings[b] = fits ? closing : Closing{NOWHERE, NOWHERE};
        for (int c = 0; c < a.num_copies; ++c)
            a.copies[c].closings[b] = fits ? copied[c] : Closing{NOWHERE, NOWHERE};
        a.query_lens[b] = fits;
        if (a.slots) {
            a.slots[b] = fits ? a.tail.number(b, at) * a.page_size + slot : -1;
            a.previous[b] = fits && slot == 0 && at > 0 ? a.tail.number(b, at - 1) : -1;
            a.page_starts[b] = s[TAIL_START] + s[TAIL] - slot;
        }
        if (!fits) continue;  // padding, or a table that ended: nothing is written, and the lengths stay
        s[TAIL] += 1, s[LENGTH] += 1;
        for (int i = 0; i < fields; ++i) a.state[i * a.batch + b] = s[i];
    }
}
