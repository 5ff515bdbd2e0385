// The attention kernels' work list, made from lengths on the device: one launch for all layers, no memory but the list's
// own.
//
// Units (a sequence, a kv head, a block of query columns) lie end to end on a line of costs, and the blocks of
// attention begin at points of it. Where they begin is a formula of the block's number, so every thread finds the
// segments of its rows alone. The one of three formulas whose longest block is shortest serves:
//   WHOLE   a block has whole units
//   PIECES  a unit has a whole number of blocks of its own
//   CUT     equal costs, wherever that cuts
// A segment costs its bytes and what starting and ending a walk costs (`segment_cost`). Row i < blocks is the first
// segment of block i; row blocks + unit * parts
// + part is that part of a unit where it begins inside a block, so no row needs to know how many come before it.
#include "ptx.cuh"
#include "work.cuh"

constexpr int MOST_PARTS = 8, PARTS = NUM_PARTS;  // of any plan; of this launch
constexpr i64 EMPTY = 64 << 10;  // bytes that a unit without tokens counts: its zeros are written

struct PartWork {
    // [batch]: visible tokens; position of the first; its entry in the row. The last two null for 0
    const int *tokens, *positions, *offsets;
    i64 chunk_cost;              // bytes
    // entries from row to row of page numbers and of spans (0: there are none), of a row; tokens of a page, of a chunk
    int table_stride, span_stride, table_width, page_size, chunk;
    int in_ring, walk;           // parts of one walk join
};

struct Args {
    // those that the launch reads, then num_others that other launches read, whose tokens count for the newest
    PartWork parts[MOST_PARTS];
    Segment* segments;           // [blocks + units * PARTS]
    int* q_positions;            // [batch, num_queries], written; -1: padding
    // [batch, num_queries], what they are; null: the newest tokens'
    const int* positions;
    const int* query_lens;       // [batch], of the newest tokens; null: num_queries each
    i64 segment_cost;
    int num_others, num_walks, batch, repeats, blocks, num_queries, window, grid;
};

/// newest: position past the newest token; of given positions the smallest, NONE for padding alone.
struct Chunks { int first[PARTS], end[PARTS], newest; };
constexpr int NONE = 0x7fffffff;

/// Entry of the row where the sequence begins, and its tokens: both end with the row.
DEVICE int offset_of(const PartWork& part, int b) {
    return part.offsets ? max(0, min(part.offsets[b], part.table_width - 1)) : 0;
}
DEVICE int tokens_of(const PartWork& part, int b) {
    const i64 room = i64(part.table_width - offset_of(part, b)) * part.page_size;
    return int(max(i64(0), min(i64(part.tokens[b]), room)));
}
DEVICE int position_of(const PartWork& part, int b) { return part.positions ? part.positions[b] : 0; }
DEVICE int queries_of(const Args& a, int b) {
    return a.query_lens ? max(0, min(a.query_lens[b], a.num_queries)) : a.num_queries;
}
DEVICE int chunk_of(const PartWork& part, int token) {
    return token / part.page_size * ((part.page_size + part.chunk - 1) / part.chunk) +
           token % part.page_size / part.chunk;
}

/// Smallest position that is given for a query of each sequence; a few threads have a row.
DEVICE void find_smallest(const Args& a, Chunks* chunks) {
    int lanes = 1;
    while (lanes < 32 && lanes < a.num_queries) lanes *= 2;
    for (int first = 0; first < a.batch; first += THREADS / lanes) {
        const int b = first + threadIdx.x / lanes;
        int smallest = NONE;
        for (int t = threadIdx.x % lanes; t < a.num_queries && b < a.batch; t += lanes) {
            const int position = a.positions[i64(b) * a.num_queries + t];
            if (position >= 0) smallest = min(smallest, position);
        }
        for (int mask = 1; mask < lanes; mask *= 2) smallest = min(smallest, __shfl_xor_sync(ALL_LANES, smallest, mask));
        if (threadIdx.x % lanes == 0 && b < a.batch) chunks[b].newest = smallest;
    }
    __syncthreads();
}

/// Chunks that some query of the sequence sees, per part. Pages with spans may begin anywhere, so none is left out.
DEVICE Chunks count_chunks(const Args& a, int b, int smallest) {
    Chunks c;
    c.newest = a.positions ? smallest : 0;
    for (int p = 0; p < PARTS + a.num_others && !a.positions; ++p)
        if (const int n = tokens_of(a.parts[p], b)) c.newest = max(c.newest, position_of(a.parts[p], b) + n);
    const int queries = a.positions ? smallest != NONE : queries_of(a, b);
    const int visible = (a.positions ? smallest : c.newest - queries) - a.window + 1;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const PartWork& part = a.parts[p];
        const int n = queries ? tokens_of(part, b) : 0;
        const int hidden = part.span_stride ? 0 : max(0, visible - position_of(part, b));
        c.first[p] = hidden < n ? chunk_of(part, hidden) : 0;
        c.end[p] = hidden < n ? chunk_of(part, n - 1) + 1 : 0;
    }
    return c;
}
DEVICE int first_part(const Args& a, const Chunks& c) {
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
        if (c.end[p] > c.first[p]) return p;
    return 0;
}
DEVICE i64 bytes_of(const Args& a, const Chunks& c) {
    i64 sum = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) sum += (c.end[p] - c.first[p]) * a.parts[p].chunk_cost;
    return sum ? sum : EMPTY;
}
/// How many walks a unit begins.
DEVICE int walks_of(const Args& a, const Chunks& c) {
    int count = 0, walk = -1;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        if (c.end[p] == c.first[p]) continue;
        count += a.parts[p].walk != walk;
        walk = a.parts[p].walk;
    }
    return count;
}
DEVICE int ring_chunks(const Args& a, const Chunks& c, int parts) {
    int sum = 0;
    for (int p = 0; p < PARTS; ++p) sum += p < parts && a.parts[p].in_ring ? c.end[p] - c.first[p] : 0;
    return sum;
}

/// A place in the line: the chunk `chunk` of part `part` of a unit. Keys of places ascend along the line.
DEVICE i64 key_of(i64 unit, int part, int chunk) { return unit << 32 | i64(part) << 28 | chunk; }
DEVICE int unit_of(i64 key) { return int(key >> 32); }
DEVICE int part_of(i64 key) { return int(key >> 28) & 15; }
DEVICE int chunk_of(i64 key) { return int(key & 0xfffffff); }

struct Line {
    i64* cost;                   // [batch + 1]: of all units before a sequence's
    i64* start;                  // [blocks + 1]: where blocks begin
    // [batch + 1]: chunks that come through the ring; blocks, if units have whole numbers of them; of all units before
    int *ring, *pieces;
    int* rank;                   // [blocks + 1]: how many blocks before have anything to do
    int* before;                 // [blocks]: chunks through the ring before a block's first
    Chunks* chunks;              // [batch]

    DEVICE Line(unsigned char* shared, int batch, int blocks) {
        cost = reinterpret_cast<i64*>(shared);
        start = cost + batch + 1;
        ring = reinterpret_cast<int*>(start + blocks + 1);
        pieces = ring + batch + 1;
        rank = pieces + batch + 1;
        before = rank + blocks + 1;
        chunks = reinterpret_cast<Chunks*>(before + blocks);
    }
    /// The last index whose entry is not above `x`; ascending[0] is not.
    template <class T>
    static DEVICE int last_at_most(const T* ascending, int count, T x) {
        int low = 0, high = count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (ascending[middle] <= x) low = middle;
            else high = middle;
        }
        return low;
    }
};

/// The place `rest` bytes into a unit.
DEVICE i64 place_in(const Args& a, const Chunks& c, i64 unit, i64 rest, i64 start) {
    int walk = -1;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
        const i64 bytes = (c.end[p] - c.first[p]) * a.parts[p].chunk_cost;
        if (!bytes) continue;
        if (a.parts[p].walk != walk) rest -= start;
        walk = a.parts[p].walk;
        if (rest < bytes) return key_of(unit, p, c.first[p] + int(max(rest, i64(0)) / a.parts[p].chunk_cost));
        rest -= bytes;
    }
    const int p = first_part(a, c);
    return key_of(unit, p, c.first[p]);
}
DEVICE i64 begin_of(const Args& a, const Line& line, i64 unit) {
    if (unit >= i64(a.batch) * a.repeats) return key_of(i64(a.batch) * a.repeats, 0, 0);
    const Chunks& c = line.chunks[int(unit) / a.repeats];
    const int p = first_part(a, c);
    return key_of(unit, p, c.first[p]);
}

/// Where on the line block i of `blocks` equal shares begins: (sequence, unit of it, bytes into that).
struct Point {
    int b;
    i64 unit, rest, each;

    DEVICE Point(const Args& a, const Line& line, int i) {
        const i64 x = line.cost[a.batch] * i / a.blocks;
        b = Line::last_at_most(line.cost, a.batch, x);
        each = (line.cost[b + 1] - line.cost[b]) / a.repeats;
        rest = x - line.cost[b];
        unit = rest / each;
        rest -= unit * each;
        unit += i64(b) * a.repeats;
    }
    DEVICE i64 nearest_unit() const { return unit + (2 * rest >= each); }
};
DEVICE i64 cost_before(const Args& a, const Line& line, i64 unit) {
    const int b = int(unit) / a.repeats;
    if (b >= a.batch) return line.cost[a.batch];
    return line.cost[b] + (unit - i64(b) * a.repeats) * ((line.cost[b + 1] - line.cost[b]) / a.repeats);
}

/// Blocks that a unit of `bytes` gets for itself, of all for `total`.
DEVICE int pieces_of(const Args& a, i64 bytes, i64 total) { return max(1, int(i64(a.blocks) * bytes / total)); }
DEVICE u32 kilobytes(i64 bytes) { return u32(min(bytes >> 10, i64(0x7fffffff))); }

/// Replaces each thread's x[] by the sums of those of all threads before it; `all` becomes the sums of all.
template <int N>
DEVICE void sum_before(i64 (&x)[N], i64 (&all)[N], i64* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 through[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        i64 sum = x[n];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int from = max(lane - step, 0);
            const i64 other = __shfl_sync(ALL_LANES, sum, from);
            if (lane >= step) sum += other;
        }
        through[n] = sum;
    }
    __syncthreads();  // nobody reads what another call left
#pragma unroll
    for (int n = 0; n < N; ++n)
        if (lane == 31) scratch[warp * N + n] = through[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        i64 before = 0, sum = 0;
#pragma unroll
        for (int w = 0; w < THREADS / 32; ++w) {
            before += w < warp ? scratch[w * N + n] : 0;
            sum += scratch[w * N + n];
        }
        x[n] = before + through[n] - x[n];
        all[n] = sum;
    }
}

/// Chunks through the ring before a place of the line.
DEVICE i64 ring_before(const Args& a, const Line& line, i64 key) {
    const int unit = unit_of(key), b = unit / a.repeats, part = part_of(key);
    if (b >= a.batch) return line.ring[a.batch];
    const Chunks& c = line.chunks[b];
    const i64 of_units = i64(unit - b * a.repeats) * ring_chunks(a, c, PARTS);
    return line.ring[b] + of_units + ring_chunks(a, c, part) +
           (a.parts[part].in_ring ? chunk_of(key) - c.first[part] : 0);
}

DEVICE void lay_out(const Args& a, const Line& line, i64* scratch, u32* longest) {
    const int thread = threadIdx.x, each = (a.batch + THREADS - 1) / THREADS, from = min(thread * each, a.batch),
              to = min(from + each, a.batch);
    i64 sums[3] = {0, 0, 0}, all[3];  // bytes, walks, chunks through the ring
    if (a.positions) find_smallest(a, line.chunks);
    for (int b = from; b < to; ++b) {
        const Chunks c = count_chunks(a, b, line.chunks[b].newest);
        line.chunks[b] = c;
        sums[0] += bytes_of(a, c) * a.repeats;
        sums[1] += i64(walks_of(a, c)) * a.repeats;
        sums[2] += i64(ring_chunks(a, c, PARTS)) * a.repeats;
    }
    if (thread < 2) longest[thread] = 0;
    sum_before(sums, all, scratch);
    const i64 total = all[0];
    // Where blocks have less to read than starting costs, all that counts is that every block has as little: starting
    // is no part of the line then.
    const i64 start = total >= 2 * a.segment_cost * a.blocks ? a.segment_cost : 0;
    const i64 units = i64(a.batch) * a.repeats;
    const bool few = units <= a.blocks;  // else no unit has blocks of its own
    i64 pieces[1] = {0}, all_pieces[1] = {0};
    u32 most = 0;
    for (int b = from; b < to && few; ++b) {
        const i64 unit = bytes_of(a, line.chunks[b]);
        const int n = pieces_of(a, unit, total);
        pieces[0] += i64(n) * a.repeats;
        most = max(most, kilobytes((unit + n - 1) / n + a.segment_cost));
    }
    if (few) sum_before(pieces, all_pieces, scratch);
    if (most) atomicMax(&longest[1], most);
    for (int b = from; b < to; ++b) {
        const Chunks& c = line.chunks[b];
        line.cost[b] = sums[0] + sums[1] * start, line.ring[b] = int(sums[2]),
        line.pieces[b] = int(min(pieces[0], i64(0x7fffffff)));
        sums[0] += bytes_of(a, c) * a.repeats;
        sums[1] += i64(walks_of(a, c)) * a.repeats;
        sums[2] += i64(ring_chunks(a, c, PARTS)) * a.repeats;
        if (few) pieces[0] += i64(pieces_of(a, bytes_of(a, c), total)) * a.repeats;
    }
    if (thread == 0)
        line.cost[a.batch] = all[0] + all[1] * start, line.ring[a.batch] = int(all[2]),
        line.pieces[a.batch] = int(min(all_pieces[0], i64(0x7fffffff)));
    __syncthreads();
    for (int i = thread; i < a.blocks; i += THREADS) line.start[i] = Point(a, line, i).nearest_unit();
    if (thread == 0) line.start[a.blocks] = units;
    __syncthreads();
    for (int i = thread; i < a.blocks; i += THREADS) {
        const i64 mine = line.start[i], next = line.start[i + 1];
        // a line without starts: each unit has one all the same
        atomicMax(&longest[0], kilobytes(cost_before(a, line, next) - cost_before(a, line, mine) +
                                         (start ? 0 : (next - mine) * a.segment_cost)));
    }
    __syncthreads();
    const u32 whole = longest[0], own = few && line.pieces[a.batch] <= a.blocks ? longest[1] : 0xffffffffu;
    const u32 cut = kilobytes(line.cost[a.batch] / a.blocks + (start ? 1 : 2) * a.segment_cost);
    for (int i = thread; i <= a.blocks; i += THREADS) {
        i64 key = key_of(units, 0, 0);
        if (i == a.blocks) {
        } else if (own <= whole && own <= cut) {
            if (i < line.pieces[a.batch]) {
                const int b = Line::last_at_most(line.pieces, a.batch, i), at = i - line.pieces[b],
                          n = (line.pieces[b + 1] - line.pieces[b]) / a.repeats;
                const Chunks& c = line.chunks[b];
                key = place_in(a, c, i64(b) * a.repeats + at / n, bytes_of(a, c) * (at % n) / n, 0);
            }
        } else if (whole <= cut) {
            key = begin_of(a, line, line.start[i]);
        } else {
            const Point p(a, line, i);
            // a piece of less than half of what it costs to start one
            if (p.rest - start < start / 2) key = begin_of(a, line, p.unit);
            else if (p.each - p.rest < start / 2) key = begin_of(a, line, p.unit + 1);
            else key = place_in(a, line.chunks[p.b], p.unit, p.rest, start);
        }
        line.start[i] = key;  // its own alone has been read
    }
    __syncthreads();
    const int share = (a.blocks + THREADS) / THREADS, first = min(thread * share, a.blocks + 1),
              last = min(first + share, a.blocks + 1);
    i64 working[1] = {0}, ignored[1];
    for (int i = first; i < last; ++i) working[0] += i < a.blocks && line.start[i] < line.start[i + 1];
    sum_before(working, ignored, scratch);
    for (int i = thread; i < a.blocks; i += THREADS) line.before[i] = int(ring_before(a, line, line.start[i]));
    for (int i = first; i < last; ++i) {
        line.rank[i] = int(working[0]);
        working[0] += i < a.blocks && line.start[i] < line.start[i + 1];
    }
    __syncthreads();
}

DEVICE int block_of(const Args& a, const Line& line, i64 key) { return Line::last_at_most(line.start, a.blocks, key); }
/// The same, if it is likely block i.
DEVICE int block_near(const Args& a, const Line& line, i64 key, int i) {
    return line.start[i] <= key && key < line.start[i + 1] ? i : block_of(a, line, key);
}

/// The segment that begins at `key` in block i.
DEVICE Segment segment_at(const Args& a, const Line& line, i64 key, int i) {
    const int unit = unit_of(key), part = part_of(key), first = chunk_of(key), b = unit / a.repeats;
    const Chunks& c = line.chunks[b];
    const PartWork& p = a.parts[part];
    const i64 end = line.start[i + 1];
    const bool cut = (end >> 28) == (key >> 28);
    Segment s = {};
    s.unit = unit, s.part = part, s.first_chunk = first;
    s.num_chunks = (cut ? chunk_of(end) : c.end[part]) - first;
    s.first_entry = b * p.table_stride + offset_of(p, b);
    s.position = p.span_stride ? b * p.span_stride : position_of(p, b), s.tokens = tokens_of(p, b);
    s.last_entry = s.first_entry + max(0, s.tokens - 1) / p.page_size;
    s.next = -1;
    s.slot = -1;
    s.chunks_before = int(ring_before(a, line, key)) - line.before[i];
    if (!cut) {
        int next = part + 1;
        while (next < PARTS && c.end[next] == c.first[next]) ++next;
        const i64 begin = next < PARTS ? key_of(unit, next, c.first[next]) : begin_of(a, line, i64(unit) + 1);
        if (begin < end) {
            s.next = a.blocks + unit_of(begin) * PARTS + part_of(begin);
            s.joins = next < PARTS && a.parts[next].walk == p.walk;
        }
    }
    int results = 0, mine = 0, first_block = -1, last_block = -1;  // one for every block and walk
    for (int from = 0; from < PARTS; ++from) {
        if (c.end[from] == c.first[from]) continue;
        int to = from;
        for (int q = from; q < PARTS && (c.end[q] == c.first[q] || a.parts[q].walk == a.parts[from].walk); ++q)
            if (c.end[q] > c.first[q]) to = q;
        const int f = block_near(a, line, key_of(unit, from, c.first[from]), i),
                  l = block_near(a, line, key_of(unit, to, c.end[to] - 1), i);
        if (first_block < 0) first_block = f;
        last_block = l;
        if (from <= part && part <= to) mine = results + line.rank[i] - line.rank[f];
        results += line.rank[l] - line.rank[f] + 1;
        from = to;
    }
    s.num_slots = results;
    // A block merges a unit that is its alone before it begins the next: those of a block share their slots. Of units
    // that begin in a block one goes on in the next.
    const int each = a.num_walks + 1;
    s.unit_slots = first_block == last_block ? each * a.blocks + a.num_walks * max(first_block, 0) : each * first_block;
    if (results > 1) s.slot = s.unit_slots + mine;
    return s;
}

extern "C" __global__ void __launch_bounds__(THREADS) work_list(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) unsigned char shared[];
    i64* scratch = reinterpret_cast<i64*>(shared);
    u32* longest = reinterpret_cast<u32*>(scratch + THREADS / 32 * 3);
    const Line line(reinterpret_cast<unsigned char*>(longest + 4), a.batch, a.blocks);
    lay_out(a, line, scratch, longest);
    const i64 units = i64(a.batch) * a.repeats, rows = a.blocks + units * PARTS;
    for (i64 row = i64(blockIdx.x) * THREADS + threadIdx.x; row < rows; row += i64(a.grid) * THREADS) {
        if (row < a.blocks) {
            if (line.start[row] < line.start[row + 1]) a.segments[row] = segment_at(a, line, line.start[row], int(row));
            else a.segments[row].unit = -1, a.segments[row].next = -1;
            continue;
        }
        const int unit = int((row - a.blocks) / PARTS), part = int((row - a.blocks) % PARTS);
        const Chunks& c = line.chunks[unit / a.repeats];
        if (c.end[part] == c.first[part] && part != first_part(a, c)) continue;
        const i64 key = key_of(unit, part, c.first[part]);
        const int i = block_of(a, line, key);
        if (line.start[i] < key) a.segments[row] = segment_at(a, line, key, i);  // else it is the block's first
    }
    for (i64 at = i64(blockIdx.x) * THREADS + threadIdx.x; at < i64(a.batch) * a.num_queries;
         at += i64(a.grid) * THREADS) {
        const int b = int(at / a.num_queries), t = int(at % a.num_queries);
        if (a.positions) {
            a.q_positions[at] = max(a.positions[at], -1);
            continue;
        }
        const int n = queries_of(a, b), newest = line.chunks[b].newest;
        a.q_positions[at] = t < n && newest >= n ? newest - n + t : -1;
    }
}
