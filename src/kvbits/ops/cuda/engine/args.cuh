// What an attention kernel is launched with: pages, parts, segments.
//
// A work item ("segment") is a run of chunks of one (sequence, kv head, block of query columns, part). Columns are
// (query token, query head of the kv head's group) pairs; a warp takes COLS of them as the columns of its matrix
// instructions. A chunk is CHUNK tokens of one page.
#pragma once
#include "config.cuh"
#include "work.cuh"

/// Pages of a table on the device.
struct Pages {
    const int* table;            // page numbers by entry
    const int2* spans;           // kernels with SPANS, null for none: position of the first token, visible tokens
    const i64* offset;           // [count]: bytes from `base` to a page, where pages lie in several slabs; null for one
    i64 base, stride;            // address of page 0 of the layer, bytes from a page to the next
    i64 count;                   // a number past the last reads the last: never other memory

    DEVICE i64 address(int entry) const {
        const u32 id = min(u32(table[entry]), u32(count - 1));
        return base + (offset ? offset[id] : i64(id) * stride);
    }
};

struct Part {
    int head_bytes, chunks_per_page, raw;
    int k_raw, v_raw;            // offsets inside a raw struct
    const float *k_scale, *k_bias, *v_scale, *v_bias;  // calibrated, [H][D], [H][DV]; null if none
    const float *k_level, *v_level;  // what a code stands for, [H][2**bits]; null where arithmetic says
    // turns per token of each channel pair, [D / 2] of side.py's turns_of; for keys that are turned back
    const float2* turns;
    const void* k_inverse;       // matrix that keys were multiplied with, inverted, as operands
    Pages pages;
    int page_size;
    // which of the kernel's packed formats; tokens and bytes of a chunk, and its pieces among all
    int format, chunk, chunk_bytes, first_piece, num_pieces;
};

/// One run of bytes of a chunk: from `page + from + chunk * step` to `slot + to`.
struct Piece { int from, step, to, bytes; };
constexpr int MAX_PIECES = 40;

struct Args {
    const void* q;               // [B, T, Hq, D], strides in elements, last dense
    void* out;                   // [B, T, Hq, DV] dense
    float* lse;                  // [B, T, Hq], null if not wanted
    const int* q_positions;      // [B, T]; negative: a padding query, sees nothing
    const Segment* segments;
    float* partial;              // [slots][COLS][DV]
    float2* partial_ml;          // [slots][COLS]: reference exponent (log2), sum
    int* arrived;                // [units], zero between launches
    i64 q_stride_b, q_stride_t, q_stride_h;
    int num_queries, group, num_kv_heads, column_blocks, window;  // window: 2**30 if none
    float scaling, softcap;
    int num_pieces;
    int query_columns;           // 1, 2, 4 or 8: columns that queries are made in a basis for
    Piece pieces[MAX_PIECES];
    Part parts[4];
};

/// A page that a segment reads: where the struct of its kv head lies, position of the first token, visible tokens.
struct Page {
    i64 address;
    int2 tokens;

    DEVICE Page(const Args& a, const Segment& s, int entry) {
        const Part& part = a.parts[s.part];
        const i64 head = s.unit / a.column_blocks % a.num_kv_heads;
        const int before = (entry - s.first_entry) * part.page_size;
        address = part.pages.address(entry) + head * part.head_bytes;
        if (SPANS && part.pages.spans) {
            tokens = part.pages.spans[s.position + entry - s.first_entry];
            tokens.y = min(tokens.y, part.page_size);
        } else {
            tokens = {s.position + before, min(s.tokens - before, part.page_size)};
        }
    }
    /// Under load a miss waits behind all the ring's bytes, microseconds: the tables are fetched rounds ahead.
    static DEVICE void prefetch_tables(const Pages& pages, const Segment& s, int entry) {
        prefetch_l1(pages.table + entry);
        if (SPANS && pages.spans) prefetch_l1(pages.spans + (s.position + entry - s.first_entry));
    }
};
