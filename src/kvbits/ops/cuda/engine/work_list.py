"""Work lists of attention: what `work_list.cu` is launched with, and how much it takes.

A unit is one (sequence, kv head, block of query columns). Its chunks, part after part, are laid end to end with those
of all other units, and every block of the attention kernel gets an equal share of that line. What a block reads of one
unit and part is a segment. Segments of a unit that one walk reads one after the other have one result; a unit with
several results gets a slot for each, which the kernel sums.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from .runtime import driver
from .runtime.compile import Source

SEGMENT_COST = 256 << 10
"""Bytes that a multiprocessor could have read while it starts and ends a walk and its result is merged (8 us).

Without it blocks with two segments were 6 us late; 64, 160 and 256 KiB took 44.8, 42.2 and 41.3 us (int4, one sequence
of 131,072 tokens).
"""
SEGMENT_FIELDS = (
    "unit",
    "part",
    "first_entry",
    "first_chunk",
    "num_chunks",
    "slot",
    "unit_slots",
    "num_slots",
    "next",
    "chunks_before",
    "joins",
    "last_entry",
    "position",
    "tokens",
    "",
    "",
)
"""struct Segment of work.cuh."""
MOST_PARTS = 8
"""Parts of a plan: those that a launch reads, and the others, whose tokens count for the newest."""
MOST_SEQUENCES = 4096
MOST_ROWS = 2**31 - 1
"""Segments that a list has room for: they are numbered by int32."""
THREADS = 256
MOST_GRID = 64
"""Blocks that make a list."""


class PartWork(ctypes.Structure):
    """struct PartWork of work_list.cu."""

    _fields_ = [
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("chunk_cost", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("table_stride", "span_stride", "table_width", "page_size", "chunk", "in_ring", "walk")
        ),
    ]


class WorkArgs(ctypes.Structure):
    """struct Args of work_list.cu."""

    _fields_ = [
        ("parts", PartWork * MOST_PARTS),
        *((name, ctypes.c_void_p) for name in ("segments", "q_positions", "positions", "query_lens")),
        ("segment_cost", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in (
                "num_others",
                "num_walks",
                "batch",
                "repeats",
                "blocks",
                "num_queries",
                "window",
                "grid",
            )
        ),
    ]


def shared_bytes(batch: int, blocks: int, num_parts: int) -> int:
    """Return the shared memory of work_list.cu (struct Line)."""
    return (
        24 * THREADS // 32
        + 16
        + 8 * (batch + 1 + blocks + 1)
        + 4 * (2 * (batch + 1) + 2 * blocks + 1)
        + 4 * (2 * num_parts + 1) * batch
    )


def most_sequences(blocks: int, num_parts: int, limit: int) -> int:
    """Return the number of sequences of a plan whose work list is made in `limit` bytes of shared memory."""
    empty = shared_bytes(0, blocks, num_parts)
    return min(MOST_SEQUENCES, (limit - empty) // (shared_bytes(1, blocks, num_parts) - empty))


def num_slots(blocks: int, num_walks: int) -> int:
    """Return the number of results that are kept at a time: of units that continue from a block to the next, and of
    those that several walks of one block read.
    """
    return blocks * (num_walks + 1 + (num_walks if num_walks > 1 else 0))


def source(num_parts: int) -> Source:
    """Return the source that makes the lists of launches over so many parts."""
    return Source(Path(__file__).parent, "work_list.cu", {"THREADS": THREADS, "NUM_PARTS": num_parts})


@functools.lru_cache(maxsize=64)
def load(num_parts: int, shared_bytes: int, device_index: int) -> driver.Kernel:
    """Return the kernel that makes them."""
    return driver.load(source(num_parts), "work_list", device_index, shared_bytes)
