"""Sizes at which 16-bit attention is as fast as attention over packed pages on a GPU. They are those of small caches,
whose time is the launch and not the bytes.

Measured on an H200 with 1 to 64 sequences of 256 to 16,384 tokens, 32 query and 8 kv heads of 128, against the fastest
of cuDNN and FlashAttention-3 (`benchmarks/bench_attend_gpu.py --small`,
benchmarks/results/nvidia-h200/attend_small.json): packed attention is 0.9 to 1.3 times as fast up to these sizes and
faster at all larger ones.
"""

from __future__ import annotations

BYTES_16_BIT = 8 << 20
"""Keys and values of one layer, all sequences, at 16 bits."""
TOKENS = 256
"""Tokens of the longest sequence: many short sequences are many short walks."""


def small_on_gpu(batch: int, tokens: int, elements: int) -> str | None:
    """Return a sentence saying that 16-bit attention would be as fast or faster on a GPU at this size, `elements`
    numbers a token in keys and values, or None.
    """
    nbytes = 2 * batch * tokens * elements
    if tokens > TOKENS and nbytes > BYTES_16_BIT:
        return None
    return (
        f"a cache of this size saves memory and no time on a GPU. {batch} x {tokens:,} tokens are"
        f" {nbytes / 2**20:.1f} MiB a layer in 16 bits, and packed pages are faster above {BYTES_16_BIT >> 20} MiB and"
        f" {TOKENS} tokens"
    )
