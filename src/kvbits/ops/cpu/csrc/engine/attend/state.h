// State and argument structs of the attention kernels of one tier.
#pragma once
#include <stdint.h>

#include "engine/formats.h"
#include "engine/store.h"
#include "engine/vec/vec.h"

namespace {

constexpr int BLOCK = 64;  // tokens that share one softmax step
constexpr int ROWS = 8;    // query rows per kernel call: their accumulators fit the registers
constexpr int ROW_LANES = VL > ROWS ? VL : ROWS;  // one number per row, in whole vectors
constexpr float LOWEST = -3e38f;  // below every score, above minus infinity: differences to it stay defined
// Odd multiples of a cache line, so that the same channel of 8 rows falls into different L1 sets.
constexpr int ROW_STRIDE = MAX_HEAD_DIM + 16;    // floats
constexpr int Q_STRIDE = 2 * MAX_HEAD_DIM + 64;  // bytes of integer q per row: two pieces of a byte, or one of 16 bits

// Whether q and p take 16 bits (8-bit codes deserve them) or 8.
constexpr bool is_wide(int format) { return format == FORMAT_INT8; }
constexpr float WIDE_LIMIT = 32639.0f;  // 127 * 256 + 127: high piece in [-127, 127], low piece in [-128, 127]
constexpr float NARROW_Q_LIMIT = 127.0f;
constexpr float NARROW_P_LIMIT = 255.0f;

constexpr int FRAME_FLOATS = 8192;  // of queries in a basis

// Up to ROWS query rows: queries, running softmax and outputs.
struct Chunk {
  alignas(64) float q[ROWS][ROW_STRIDE];       // q * scaling, * log2(e) unless capped
  // q with per-channel key scales folded in, turned to the page, or in its basis
  alignas(64) float folded[ROWS][ROW_STRIDE];
  // q in the basis of trellis keys (families/klt/basis.h): [frame][rows][head_dim, rounded up to 16]
  alignas(64) float in_basis[FRAME_FLOATS];
  alignas(64) uint8_t qw[ROWS][Q_STRIDE];      // integer q in the tier's own order
  alignas(64) float acc[ROWS][ROW_STRIDE];     // sum of 2^(s - m) * v
  // added to every channel of a group at the end of a part (zero points, biases)
  alignas(64) float corr[MAX_GROUPS][ROWS][VL];
  alignas(64) float l[ROWS][VL];               // sum of 2^(s - m), one partial sum per lane
  float q_scale[MAX_GROUPS][ROWS];             // q ~ q_scale * integer
  float q_zero[MAX_GROUPS][ROWS];              // - zero * q_scale * sum of integers
  float piece_scale[2 * MAX_GROUPS][ROWS];     // of what the bands of trellis codes add
  alignas(64) float of_offsets[ROWS][(OFFSETS + 15) / 16 * 16];  // what each row of offsets adds to a score
  float q_sum[MAX_GROUPS][ROWS];               // q_scale * sum of integers
  float q_bias[ROWS];                          // q . (per-channel bias or mean) of the current page
  alignas(64) float m[ROW_LANES];              // the largest score so far (log2), LOWEST before there is one
  int64_t position[ROWS];
  int64_t out_row[ROWS];                       // token * num_heads + head
  int rows;
};

// Scratch of the current block of tokens.
struct Block {
  alignas(64) float s[ROWS][BLOCK];                // scores, then probabilities
  float k_offsets[ROWS][BLOCK / TILE];             // what offsets add to the scores of each tile's tokens
  alignas(64) float k_scale[MAX_GROUPS][BLOCK];
  alignas(64) float k_bias[MAX_GROUPS][BLOCK];
  alignas(64) float v_scale[MAX_GROUPS][BLOCK];
  alignas(64) float v_bias[MAX_GROUPS][BLOCK];
  alignas(64) uint8_t pw[MAX_GROUPS][ROWS][2 * BLOCK];  // integer p in the tier's own order, slots instead of tokens
  alignas(64) float pf[MAX_GROUPS][ROWS][BLOCK];        // float p for the float formats, tokens in order
  alignas(64) float p_scale[MAX_GROUPS][ROW_LANES];  // p * v_scale ~ p_scale * integer
  float p_zero[ROWS];                              // per-channel values: - zero * p_scale * sum of integers
  float p_sum[ROWS];                               // sum of p
  alignas(64) float k_channel[ROW_STRIDE], k_channel_bias[ROW_STRIDE];
  alignas(64) float v_channel[ROW_STRIDE], v_channel_bias[ROW_STRIDE];
};

// Levels of a block of trellis values that several chunks read: [vector of rings][quad of tokens][run].
struct LevelBlock {
  vi of[MAX_HEAD_DIM * BLOCK / (4 * VL)];
};

// One kernel for each number of rows, 1 .. ROWS. `there`: a compiler that checks for undefined behaviour does not
// compare addresses of functions at compile time.
template <class Kernel>
struct ByRows {
  Kernel of[ROWS];
  bool there;
};
static_assert(ROWS == 8, "kernels are listed for 1 to 8 rows");
struct KeyArgs {
  const uint8_t* plane[2];  // at the block's first tile (raw: at its first row)
  int row_bytes[2];
  int head_dim, tokens;
  int groups, group_channels;  // (1, head_dim) when scales are folded into q
  const float* scale;          // [groups][BLOCK], null when folded
  const float* bias;           // [groups][BLOCK] or null
  const float* q;              // float formats: [ROWS][ROW_STRIDE]
  const Chunk* chunk;
  float* s;                    // [ROWS][BLOCK]
  int64_t ahead;               // distance to the page that is fetched into L2 while this one is read
};

struct ValueArgs {
  const uint8_t* plane[2];  // at the page's start (raw: at the block's first row)
  int row_bytes[2];
  int head_dim, tokens;
  int page_size, first_token;
  int groups, group_channels;
  const float* channel_scale;  // null when scales are folded into p
  bool fitted;                 // levels of trellis codes
  const LevelBlock* levels;    // of the block, where they are decoded already
  const Block* block;
  Chunk* chunk;
  int64_t ahead;
};

// Row h of the outputs gains x in the channels from `channel` on: those that are inside.
INLINE void add_output(const ValueArgs& a, int h, int channel, vf x, vi inside = splat_int(-1)) {
  if (a.channel_scale) x *= load(a.channel_scale + channel);
  float* to = a.chunk->acc[h] + channel;
  store(to, load(to) + select(inside, x, vf{}));
}

}  // namespace
