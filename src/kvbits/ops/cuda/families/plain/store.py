"""Fresh tokens to their slots in packed pages of integers and floats (store_tokens.cu)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from .....spec import PageLayout, QuantSpec
from ....descriptor import DTYPES, STATIC, TORCH_NUMBERS, scale_kind
from ....types import PageStore
from ...engine.runtime import driver
from ...engine.runtime.compile import Source
from ...engine.side import as_float32, side_arguments, with_aligned_rows

FEW = 16
"""Tokens of a block in a decoding step."""
MAX_HEAD_DIM = 512
"""The lanes of two warps hold 8 channels each."""
WARP_DIM = 256
"""Channels that one warp's lanes hold."""


def refuses_layout(layout: PageLayout, dtype: torch.dtype | None) -> str | None:
    """Return why tokens of `dtype` cannot be stored in pages of a layout, or None."""
    for kind in "kv":
        if (d := layout.dim(kind)) % 8 or d > MAX_HEAD_DIM:
            return f"head_dim={d} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if layout.page_size % 16:
        return f"page_size={layout.page_size} is not a multiple of 16"
    for kind, spec, d in (("key", layout.key, layout.head_dim), ("value", layout.value, layout.value_head_dim)):
        if spec.is_raw or spec.static:
            continue
        if (size := d // spec.num_groups(d)) % 8:
            return f"{kind} groups of {size} channels are not a multiple of 8"
        if (most := max(layout.head_dim, layout.value_head_dim)) > WARP_DIM and size & (size - 1):
            return (
                f"{kind} groups of {size} channels are not a power of two, as heads of {most} (above {WARP_DIM}) need"
            )
    return None


class Args(ctypes.Structure):
    """struct Args of store_tokens.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p * 2),
        ("stride", ctypes.c_int64 * 3 * 2),
        ("slots", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
        ("page_offset", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("scale", ctypes.c_void_p * 2),
        ("bias", ctypes.c_void_p * 2),
        ("turn", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int),
        ("row_tokens", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("head_bytes", ctypes.c_int),
    ]


def tokens_of_prompts(layout: PageLayout, dtype: torch.dtype) -> int:
    """Return the number of tokens of a block where there are many: their runs fill whole tiles of keys and share a
    page's mean.

    As many as a thread keeps in registers.
    """
    narrow = 32 if layout.is_centered and dtype == torch.float32 else 64
    return narrow if max(layout.head_dim, layout.value_head_dim) <= WARP_DIM else narrow // 2


def defines(layout: PageLayout, dtype: torch.dtype, tokens: int) -> dict[str, int | str]:
    """Return macros of one instantiation of store_tokens.cu, for blocks of `tokens` tokens."""
    d = max(layout.head_dim, layout.value_head_dim)
    span = max(4, 1 << (d // 8 - 1).bit_length())
    threads = min(16 * span, 512)
    sides = (layout.key, layout.head_dim), (layout.value, layout.value_head_dim)
    groups = max(s.num_groups(n) if scale_kind(s) != STATIC and not s.is_raw else 0 for s, n in sides)
    image = max(_image_bytes(layout, kind, s) for kind, s in (("k", layout.key), ("v", layout.value)))
    union = max(8 * threads // span * d if layout.is_centered else 8, tokens * (d + 4))
    return {
        "HEAD_DIM": d,
        "PAGE": layout.page_size,
        "THREADS": threads,
        "TOKENS": tokens,
        "SPAN": span,
        "X_TYPE": TORCH_NUMBERS[dtype],
        "RAW_TYPE": DTYPES[layout.raw_dtype],
        "USED_BYTES": -(-layout.used_bytes // 4) * 4,
        "K_SIDE": side_arguments(layout, "k"),
        "V_SIDE": side_arguments(layout, "v"),
        "SHARED_BYTES": (
            -(-union // 16) * 16
            + (16 + 8 * max(1, groups)) * tokens
            + (4 * d if layout.is_centered else 4)
            + image
            + 4 * tokens
            + 112
            + (8 * tokens * span // 32 if span > 32 else 0)
        ),
    }


def _image_bytes(layout: PageLayout, kind: str, spec: QuantSpec) -> int:
    """Return bytes of keys ("k") or values ("v") of a page that are put in shared memory where a page opens with the
    mean of the one before.
    """
    return sum(s.nbytes for name, s in layout.sections.items() if name.startswith(kind)) if spec.center else 16


def source(layout: PageLayout, dtype: torch.dtype, tokens: int) -> Source:
    return Source(Path(__file__).parent, "store_tokens.cu", defines(layout, dtype, tokens))


def sources(layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Source]:
    """See `engine.family.Stores`."""
    yield from (source(layout, dtype, tokens) for tokens in (FEW, tokens_of_prompts(layout, dtype)))


@functools.lru_cache(maxsize=256)
def load(layout: PageLayout, dtype: torch.dtype, tokens: int, device_index: int) -> tuple[driver.Kernel, int]:
    """Return the kernel for blocks of `tokens` tokens, and threads of its blocks."""
    made = source(layout, dtype, tokens)
    return driver.load(made, "store_tokens", device_index), int(made.macros["THREADS"])


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """See `engine.family.Stores`."""
    for tokens in (FEW, tokens_of_prompts(layout, dtype)):
        load(layout, dtype, tokens, -1 if device.index is None else device.index)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    previous: torch.Tensor | None,
    starts: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    """See `engine.family.Stores`. Rows that do not lie at multiples of 16 bytes are copied."""
    layout, device, count = pages.layout, k.device, len(slots)
    k, v = with_aligned_rows(k), with_aligned_rows(v)
    args = Args(
        slots=slots.data_ptr(),
        previous=None if previous is None else previous.data_ptr(),
        page_offset=None if pages.offsets is None else pages.offsets.data_ptr(),
        pages=pages.slabs[0].data_ptr(),
        page_stride=pages.slabs[0].stride(0),
        num_pages=pages.num_pages,
        turn=None if pages.turn is None else pages.turn.data_ptr(),
        status=None if status is None else status.data_ptr(),
        num_tokens=count,
        row_tokens=k.shape[-3],
        num_heads=layout.num_kv_heads,
        head_bytes=layout.head_bytes,
    )
    for i, (kind, x) in enumerate((("k", k), ("v", v))):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*(0, *x.stride())[-4:-1])
        for name, field in (("scale", args.scale), ("bias", args.bias)):
            if (given := pages.static.get(f"{kind}_{name}")) is not None:
                field[i] = as_float32(given, device).data_ptr()
    many = tokens_of_prompts(layout, k.dtype)
    tokens = many if -(-count // many) * 2 * layout.num_kv_heads >= 2 * multiprocessors(device) else FEW
    kernel, threads = load(layout, k.dtype, tokens, -1 if device.index is None else device.index)
    kernel.launch(-(-count // tokens) * 2 * layout.num_kv_heads, threads, args, driver.current_stream(device))


@functools.lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
