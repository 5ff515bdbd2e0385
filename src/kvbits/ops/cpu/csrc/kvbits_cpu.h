// Plain C ABI of the CPU kernels. Python (library.py) mirrors these structs with ctypes; `kvbits_abi_version`
// guards against a stale build. Byte layouts: docs/reference/formats.md. All offsets are bytes from the start of a head
// struct.
#pragma once
#include <stdint.h>

#include "../../numbers.h"

#if defined(_WIN32)
#define KVBITS_EXPORT __declspec(dllexport)
#else
#define KVBITS_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { KVBITS_ABI_VERSION = 26 };

// How one tensor (keys or values) of a page is stored.
typedef struct {
  int32_t format;        // Format of numbers.h
  int32_t raw_dtype;     // Dtype of raw rows
  int32_t scale_dtype;   // Dtype of scales, biases and means; FLOAT8_E5M3 of scales only
  int32_t symmetric;     // 0: integer codes start at 0 and a bias is added
  int32_t per_channel;   // 1: one scale per channel of the page; 0: [groups, page_size]
  int32_t group_size;    // channels sharing a scale when !per_channel (head_dim for per token)
  int32_t plane_offset[4];  // code planes, high bits first; [0] is the raw rows of a raw tensor
  int32_t scale_offset;  // -1: scales are static
  int32_t bias_offset;   // -1: none in the page
  int32_t mean_offset;   // -1: none
  const float* static_scale;  // [num_kv_heads, head_dim], widened from groups to channels; null unless static
  const float* static_bias;   // same shape; null unless static and asymmetric
  int32_t hadamard;           // 1: trellis codes, and times a Hadamard matrix
  int32_t fitted;             // 1: trellis codes of 2 bits with levels 1, 3, 5 and 9; 0: uniform ones
  // [head_dim / BAND, rounded up] bits of each band of channels; null unless the format is trellis
  const uint8_t* bands;
  // transposed inverse of the keys' basis, 16 columns after the other: [num_kv_heads][head_dim / 16, rounded
  // up][head_dim][16], zeros behind; null for none
  const float* from_basis;
  // [num_kv_heads][head_dim][head_dim] that keys are multiplied with when they are stored; null for none
  const float* to_basis;
  // [num_kv_heads][OFFSETS][head_dim rounded up to 16, zeros behind]: what is taken off keys in the basis; null for
  // none
  const float* offsets;
  // [head_dim / 2] radians per token; null unless keys are stored in a basis (turned back by their frame)
  const float* inv_freq;
} kvbits_tensor;

// Pages of one layer in one pool. Page ids count through the slabs in order.
typedef struct {
  kvbits_tensor key, value;
  int32_t page_size;       // tokens; a multiple of 32 unless both tensors are raw
  int32_t num_slabs;
  int64_t head_bytes;      // one kv head's struct
  int64_t page_stride;     // bytes from page to page inside a slab
  const int64_t* slab_address;  // [num_slabs]
  const int64_t* slab_pages;    // [num_slabs]
} kvbits_store;

// Ragged lists: sequence b reads entries indptr[b] .. indptr[b+1] - 1.
typedef struct {
  int64_t num_entries;
  const int64_t* indptr;    // [batch + 1]
  const int64_t* page_ids;  // [num_entries]
  const int64_t* starts;    // [num_entries] position of the page's first token
  const int32_t* lengths;   // [num_entries] visible tokens
} kvbits_table;

typedef struct {
  const kvbits_store* store;
  const kvbits_table* table;
} kvbits_part;

typedef struct {
  const kvbits_part* parts;
  int32_t num_parts, batch, num_tokens, num_heads, num_kv_heads, head_dim, value_head_dim;
  int32_t q_dtype;
  int32_t num_threads;
  int32_t min_tile_rows;       // of a kv head, from which a tier that has tiles takes them; 0: 32
  int32_t one_term;            // in tiles: numbers are rounded to one bfloat16 term; 0: as many as a format is precise
  const void* q;               // [batch, num_tokens, num_heads, head_dim], last dim dense
  int64_t q_stride[3];         // elements
  const int64_t* q_positions;  // [batch, num_tokens]; negative: a padding row (output 0, lse -inf)
  float scaling;
  float softcap;               // 0: none
  int64_t sliding_window;      // 0: none
  float* out;                  // [batch, num_tokens, num_heads, value_head_dim]
  float* lse;                  // [batch, num_tokens, num_heads], natural logarithm
} kvbits_attend_call;

// Quantizes and packs raw pages: source[0] keys, source[1] values, [num_pages, num_kv_heads, page_size, head_dim or
// value_head_dim], last dim dense.
typedef struct {
  const kvbits_store* store;
  const int64_t* page_ids;  // [num_pages]
  int64_t num_pages;
  int32_t num_kv_heads, head_dim, value_head_dim, dtype, num_threads;
  const void* source[2];
  int64_t stride[2][3];     // elements: page, head, token
  // For keys in a basis: cosines, then sines of the head_dim / 2 angles of each page's frame, each padded to a multiple
  // of 16.
  const double* turn_starts;  // [num_pages]
  const int64_t* starts;      // [num_pages] position of each page's first token
  // out, of keys and of values each: elements clamped to the code range; whether a scale, bias or mean overflowed; NaN
  // or infinity
  int32_t status[6];
} kvbits_close_call;

// Writes fresh tokens to slots: source[0] keys, source[1] values, [batch, num_tokens, num_kv_heads, head_dim or
// value_head_dim], last dim dense.
typedef struct {
  const kvbits_store* store;  // raw pages of `dtype`, or packed ones whose tokens are quantized one by one
  // [batch][num_tokens] page * page_size + place; below 0: not stored; past the pages: not stored, and counted. No slot
  // twice
  const int64_t* slots;
  int32_t batch, num_tokens, num_kv_heads, head_dim, value_head_dim, dtype, num_threads;
  const void* source[2];
  int64_t stride[2][3];       // elements: sequence, token, head
  int64_t used_bytes;         // of a head struct; what follows is zeroed where a page's first slot is stored
  // For keys in a basis: position of the first token of each token's page, [batch][num_tokens]; the frames of these
  // positions, rising, and the angles of each as in kvbits_close_call.
  const int32_t* starts;
  const int64_t* frames;        // [num_frames]
  const double* turn_starts;    // [num_frames]
  int64_t num_frames;
  int32_t* status;  // [7], added to: as in kvbits_close_call, then tokens whose slots lead out of the pages; or null
} kvbits_store_call;

// Unpacks pages: rows of to[0] are keys, of to[1] values, [num_rows, num_kv_heads, head_dim or value_head_dim], last
// dim dense.
typedef struct {
  const kvbits_store* store;
  int64_t num_entries;
  const int64_t* page_ids;  // [num_entries]
  const int64_t* starts;    // [num_entries] position of the page's first token
  const int32_t* rows;      // [num_entries][2] its first row, and how many of its tokens become rows
  int64_t num_rows;
  int32_t num_kv_heads, head_dim, value_head_dim, dtype, num_threads;
  void* to[2];
  int64_t stride[2][2];     // elements: row, head
} kvbits_unpack_call;

// Attention over one of several disjoint sets of keys. Strides are elements, and 0 where all sequences, tokens or heads
// have the same numbers.
typedef struct {
  const void* out;        // [batch, num_tokens, num_heads, head_dim], last dim dense
  const float* lse;       // [batch, num_tokens, num_heads], natural logarithm; -inf: no keys, and `out` is not read
  int64_t out_stride[3];
  int64_t lse_stride[3];
  int64_t dtype;          // of `out`
} kvbits_partial;

// Merges attention over disjoint sets of keys.
typedef struct {
  const kvbits_partial* parts;
  int32_t num_parts, batch, num_tokens, num_heads, head_dim, dtype, num_threads;
  void* out;              // [batch, num_tokens, num_heads, head_dim], last dim dense; may be a part's
  int64_t out_stride[3];
  float* lse;             // [batch, num_tokens, num_heads], dense
} kvbits_merge_call;

KVBITS_EXPORT int32_t kvbits_abi_version(void);

// Name of the instruction set in use ("amx", "avx512", "avx2", "neon", "generic"), and of the best one here.
KVBITS_EXPORT const char* kvbits_tier(void);
// Switches tiers. Returns 0, or -1 when this machine or build cannot run it.
KVBITS_EXPORT int32_t kvbits_set_tier(const char* name);

// Why this machine attends in no tiles of AMX, or null where it does. The system is asked for its permission once.
KVBITS_EXPORT const char* kvbits_amx_refusal(void);
// Why the tier in use leaves such a call to its other tier, whose name is put into `*tier`, or null; then `*tier` is the
// one in use. The call needs no queries and no tables.
KVBITS_EXPORT const char* kvbits_attend_refusal(const kvbits_attend_call* call, const char** tier);

// Runs calls of several threads on an OpenMP runtime's team, `parallel` being its GOMP_parallel; null: on the calling
// thread.
KVBITS_EXPORT void kvbits_use_openmp(void* parallel);

// Attention over all parts with one online softmax. Returns 0 or the number of a message in kvbits_error.
KVBITS_EXPORT int32_t kvbits_attend(const kvbits_attend_call* call);
// Closes pages, stores tokens. Where their status says that numbers cannot be stored, pages are left half written.
KVBITS_EXPORT int32_t kvbits_close(kvbits_close_call* call);
KVBITS_EXPORT int32_t kvbits_store_tokens(kvbits_store_call* call);

KVBITS_EXPORT int32_t kvbits_unpack(const kvbits_unpack_call* call);

KVBITS_EXPORT int32_t kvbits_merge(const kvbits_merge_call* call);

KVBITS_EXPORT const char* kvbits_error(int32_t code);

#ifdef __cplusplus
}
#endif
