"""append on NVIDIA GPUs: keys and values of all sequences in one launch, read where the projections left them.

`append` is the op's contract. Where tokens go is uploaded once per `SlotMapping` and pool, through pinned memory, so
all layers of a group share one upload and nothing waits for the GPU. Raw pages: for CUDA graphs, take the two steps
apart: `table` before the capture, `launch` inside; later replays write where `table.copy_` says. Packed pages:
`store_tokens`, which reads its slots from the device and serves anybody's pages.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ....errors import DataError
from ....later import upload
from ....spec import PageLayout, QuantSpec
from ...descriptor import DTYPES, STATIC, TORCH_NUMBERS, scale_kind
from ...reference.append import STATUS_FIELDS, check_tokens
from ...types import PageStore, SlotMapping, settle
from ..engine.family import Tokens
from ..engine.runtime import driver
from ..engine.runtime.compile import Source
from ..engine.side import as_float32, has_aligned_rows, side_arguments, with_aligned_rows
from ..families import family_of

THREADS = 128
FEW = 16
"""Tokens of a block of store_tokens.cu in a decoding step."""
MAX_HEAD_DIM = 512
"""The lanes of two warps hold 8 channels each."""
WARP_DIM = 256
"""Channels that one warp's lanes hold."""


def refuses(k: torch.Tensor, store: PageStore) -> str | None:
    """Why tokens like k [B, T, H, D] cannot be written to pages of this store here, or None."""
    if k.device.type != "cuda" or store.device.type != "cuda":
        return f"keys are on {k.device}, pages on {store.device}, not on a GPU"
    if k.dtype not in TORCH_NUMBERS:
        return f"keys are {k.dtype}; the kernel takes float32, float16 and bfloat16"
    if why := driver.refuses(k.device):
        return why
    return (
        None
        if store.layout.is_raw
        else refuses_layout(store.layout, torch.cuda.get_device_capability(k.device), k.dtype)
    )


def refuses_layout(
    layout: PageLayout, capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Why tokens of `dtype` cannot be stored one by one in pages of this layout on a device of this compute capability,
    or None.
    """
    if not layout.token_local:
        return f"tokens cannot be stored one by one as {layout.key}, {layout.value}"
    if own := family_of(layout).stores:
        return own.refuses_layout(layout, dtype)
    for kind in "kv":
        if (d := layout.dim(kind)) % 8 or d > MAX_HEAD_DIM:
            return f"head_dim={d} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if layout.page_size % 16:
        return f"page_size={layout.page_size} is not a multiple of 16"
    for kind, spec, d in (("key", layout.key, layout.head_dim), ("value", layout.value, layout.value_head_dim)):
        if spec.format.startswith("fp8") and capability < (8, 9):
            return f"compute capability {capability[0]}.{capability[1]} cannot round to fp8 (8.9 can)"
        if spec.is_raw or spec.static:
            continue
        if (size := d // spec.num_groups(d)) % 8:
            return f"{kind} groups of {size} channels are no multiple of 8"
        if (most := max(layout.head_dim, layout.value_head_dim)) > WARP_DIM and size & (size - 1):
            return f"{kind} groups of {size} channels are no power of two, as heads of {most} (above {WARP_DIM}) take"
    return None


class _Args(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p * 2),
        ("stride", ctypes.c_int64 * 3 * 2),
        ("runs", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("head_bytes", ctypes.c_int64),
        ("offset", ctypes.c_int * 2),
        ("num_heads", ctypes.c_int),
        ("row_bytes", ctypes.c_int),
        ("unit", ctypes.c_int),
        ("value_row_bytes", ctypes.c_int),
    ]


def raw_source(unlike_widths: bool) -> Source:
    """What writes raw tokens; of keys and values of unlike widths, or of one."""
    return Source(Path(__file__).parent, "append.cu", {"THREADS": THREADS, "UNLIKE_WIDTHS": int(unlike_widths)})


@functools.lru_cache(maxsize=16)
def _load(device_index: int, unlike_widths: bool) -> driver.Kernel:
    return driver.load(raw_source(unlike_widths), "append_tokens", device_index)


def table(slot_mapping: SlotMapping, store: PageStore) -> torch.Tensor:
    """int64 [N, 5] on the store's device: the runs, pages by their bytes from the first slab's start.

    Good for every layer of the pool, whose slabs lie alike.

    Made once per mapping and pool; does not wait for the GPU.
    """
    base = store.slabs[0].data_ptr()
    key = (store.device, *((s.data_ptr() - base, s.stride(0), s.shape[0]) for s in store.slabs))
    found = slot_mapping.tables.get(key)
    if found is None:
        rows = np.ascontiguousarray(slot_mapping.runs[:, [2, 0, 1, 3, 4]])
        rows[:, 0] = store.addresses[rows[:, 0]] - base
        found = upload(rows, store.device)
        slot_mapping.tables[key] = found
    return found


def launch(k: torch.Tensor, v: torch.Tensor, store: PageStore, runs: torch.Tensor) -> None:
    """Write tokens in place, launching only (no allocation, no waiting).

    Args:
        k, v: [B, T, H, D] of the pages' dtype, last dim dense.
        runs: what `table` gave, for a mapping that `SlotMapping.check` lets pass with these tensors.
    """
    layout = store.layout
    size = k.element_size()
    args = _Args(
        runs=runs.data_ptr(),
        pages=store.slabs[0].data_ptr(),
        head_bytes=layout.head_bytes,
        num_heads=layout.num_kv_heads,
        row_bytes=layout.head_dim * size,
        value_row_bytes=layout.value_head_dim * size,
    )
    multiples = [
        args.row_bytes,
        args.value_row_bytes,
        *(n for slab in store.slabs for n in (slab.data_ptr(), slab.stride(0))),
    ]
    for i, (name, x) in enumerate((("k_raw", k), ("v_raw", v))):
        strides = [s * size for s in x.stride()[:3]]
        args.x[i], args.offset[i], args.stride[i] = (
            x.data_ptr(),
            layout.sections[name].offset,
            (ctypes.c_int64 * 3)(*strides),
        )
        multiples += [
            x.data_ptr(),
            layout.sections[name].offset,
            *(s for s, n in zip(strides, x.shape, strict=False) if n > 1),
        ]
    args.unit = size if any(n % 16 for n in multiples) else 16
    _load(-1 if k.device.index is None else k.device.index, layout.head_dim != layout.value_head_dim).launch(
        2 * layout.num_kv_heads * len(runs), THREADS, args, torch.cuda.current_stream(k.device).cuda_stream
    )


class _StoreArgs(ctypes.Structure):
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
    """Tokens of a block where there are many: their runs fill whole tiles of keys and share a page's mean.

    As many as a thread keeps in registers.
    """
    narrow = 32 if layout.is_centered and dtype == torch.float32 else 64
    return narrow if max(layout.head_dim, layout.value_head_dim) <= WARP_DIM else narrow // 2


def defines(layout: PageLayout, dtype: torch.dtype, tokens: int) -> dict[str, int | str]:
    """Macros of one instantiation of store_tokens.cu, for blocks of `tokens` tokens."""
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
    """Bytes of keys ("k") or values ("v") of a page that are put in shared memory where a page opens with the mean of
    the one before.
    """
    return sum(s.nbytes for name, s in layout.sections.items() if name.startswith(kind)) if spec.center else 16


def source(layout: PageLayout, dtype: torch.dtype, tokens: int) -> Source:
    return Source(Path(__file__).parent, "store_tokens.cu", defines(layout, dtype, tokens))


def sources(layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Source]:
    """What `prepare` loads on a device of a compute capability."""
    if own := family_of(layout).stores:
        yield from own.sources(layout, dtype, capability)
    else:
        yield from (source(layout, dtype, tokens) for tokens in (FEW, tokens_of_prompts(layout, dtype)))


@functools.lru_cache(maxsize=256)
def _load_store(layout: PageLayout, dtype: torch.dtype, tokens: int, device_index: int) -> tuple[driver.Kernel, int]:
    made = source(layout, dtype, tokens)
    return driver.load(made, "store_tokens", device_index), int(made.macros["THREADS"])


def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load what `store_tokens` launches, which cannot be done while a CUDA graph is captured."""
    if own := family_of(layout).stores:
        return own.prepare(layout, dtype, device)
    for tokens in (FEW, tokens_of_prompts(layout, dtype)):
        _load_store(layout, dtype, tokens, -1 if device.index is None else device.index)


def store_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    slot_mapping: torch.Tensor,
    *,
    static: dict[str, torch.Tensor] | None = None,
    previous_page: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    turn: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> None:
    """Write tokens in place to anybody's pages, launching only (no allocation, no waiting; `prepare` first, then CUDA
    graphs can hold it).

    Args:
        k, v: float32, float16 or bfloat16 [N, H, D] or [B, T, H, D] with N = B * T, last dim dense, rows at multiples
            of 16 bytes.
        pages: uint8 [num_pages, H, head_bytes] of a token-local layout, raw ones included; any distance from page to
            page.
        slot_mapping: int64 [N] on the device: page * page_size + place. Below 0: not stored. Past the pages: not stored
            either, and counted. No slot twice.
        static: calibrated float32 `k_scale` .. `v_bias`, dense [H, groups or channels], for static specs; `k_basis`,
            `k_offsets` and `k_inv_freq` for keys in a calibrated basis.
        previous_page: int64 [N] on the device, for centred layouts: for a token that opens a page (place 0), the page
            before it in its sequence, full once this call is over, or a number below 0 where it is the first; other
            entries are not read. Tokens of one page must then follow each other in the order of their places, and
            tokens of the page before, if it is filled in this call, come just ahead; entries that are not stored may
            lie between.
        starts: int32 [N] on the device, position of the first token of each token's page, for keys in a calibrated
            basis.
        turn: float32 [3, D] on the device, by which a mean key is turned on: `quant.rotary.turn_by` of page_size
            positions. None leaves it as it is. Its numbers are looked at on a CPU only, once for a tensor. A GPU, which
            is not waited for, takes the last channel for a partner that is no channel.
        status: int32 [STATUS_FIELDS] on the device, added to: clamped elements of keys and values, whether scales
            overflowed, whether numbers were not finite, and skipped entries. Tokens with such numbers are stored,
            unusably.

    Raises:
        DataError: arguments that do not fit together.
    """
    check_tokens(k, v, pages, layout, slot_mapping, static, previous_page, starts, turn, status)
    for name, x in (("k", k), ("v", v)):
        if not has_aligned_rows(x):
            raise DataError(f"rows of {name} must be dense and lie at multiples of 16 bytes, got strides {x.stride()}")
    to = Tokens(slot_mapping, starts, pages.data_ptr(), len(pages), pages.stride(0))
    _launch_store(k, v, layout, to, previous_page, static or {}, turn, status)


def _launch_store(
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PageLayout,
    to: Tokens,
    previous: torch.Tensor | None,
    static: dict[str, torch.Tensor],
    turn: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    slots = to.slots
    if not len(slots):
        return
    if own := family_of(layout).stores:
        return own.store(k, v, layout, to, static, status)
    args = _StoreArgs(pages=to.pages, page_stride=to.page_stride, num_pages=to.num_pages)
    args.page_offset = None if to.page_offset is None else to.page_offset.data_ptr()
    args.slots, args.previous = slots.data_ptr(), None if previous is None else previous.data_ptr()
    args.turn, args.status = None if turn is None else turn.data_ptr(), None if status is None else status.data_ptr()
    args.num_tokens, args.row_tokens, args.num_heads, args.head_bytes = (
        len(slots),
        k.shape[-3],
        layout.num_kv_heads,
        layout.head_bytes,
    )
    for i, (kind, x) in enumerate((("k", k), ("v", v))):
        args.x[i] = x.data_ptr()
        args.stride[i] = (ctypes.c_int64 * 3)(*(x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])))
        for name, field in (("scale", args.scale), ("bias", args.bias)):
            if (given := static.get(f"{kind}_{name}")) is not None:
                field[i] = as_float32(given, k.device).data_ptr()
    many = tokens_of_prompts(layout, k.dtype)
    tokens = many if -(-len(slots) // many) * 2 * layout.num_kv_heads >= 2 * _multiprocessors(k.device) else FEW
    kernel, threads = _load_store(layout, k.dtype, tokens, -1 if k.device.index is None else k.device.index)
    kernel.launch(
        -(-len(slots) // tokens) * 2 * layout.num_kv_heads,
        threads,
        args,
        torch.cuda.current_stream(k.device).cuda_stream,
    )


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _slots(
    slot_mapping: SlotMapping, store: PageStore, batch: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots and pages before, int64 [2, batch * tokens], positions of pages' first tokens, int32 [batch * tokens], and
    each page's bytes from the first slab's start, int64 [num_pages]. On the store's device, made once per mapping, pool
    and shape.
    """
    base = store.slabs[0].data_ptr()
    key = (
        "slots",
        batch,
        tokens,
        store.layout.page_size,
        store.device,
        *((s.data_ptr() - base, s.stride(0), s.shape[0]) for s in store.slabs),
    )
    found = slot_mapping.tables.get(key)
    if found is None:
        all_of = np.full((3, batch * tokens), -1)
        row, token, page, slot, before, start = slot_mapping.tokens.T
        all_of[:, row * tokens + token] = page * store.layout.page_size + slot, before, start
        found = tuple(upload(x, store.device) for x in (all_of[:2], all_of[2].astype(np.int32), store.addresses - base))
        slot_mapping.tables[key] = found
    return found


def _append_packed(
    k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping
) -> torch.Tensor | None:
    layout = store.layout
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if spec.static and f"{kind}_scale" not in store.static:
            raise DataError(
                f"{spec.format} with static scales was given no calibrated scales; calibrate first or use static=False"
            )
    k, v = with_aligned_rows(k), with_aligned_rows(v)
    waits = k.shape[1] > 1
    status = torch.zeros(STATUS_FIELDS, dtype=torch.int32, device=k.device) if waits else None
    (slots, previous), starts, offsets = _slots(slot_mapping, store, *k.shape[:2])
    to = Tokens(slots, starts, store.slabs[0].data_ptr(), store.num_pages, page_offset=offsets)
    _launch_store(k, v, layout, to, previous, store.static, store.turn, status)
    return status


def append(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> dict[str, int]:
    """Write tokens in place; arguments, result and errors of the reference.

    Copies nothing where the tensors' last dims are dense.

    Packed pages of several tokens a sequence: waits for the launch's findings; on an error the pages are then written
    with unusable numbers. Single tokens are not looked at: that would wait for the GPU in every layer of every step.
    """
    status = append_later(k, v, store, slot_mapping)
    return {} if status is None else settle(store.layout, k, v, status.tolist())


def append_later(k: torch.Tensor, v: torch.Tensor, store: PageStore, slot_mapping: SlotMapping) -> torch.Tensor | None:
    """`append` without waiting: int32 [STATUS_FIELDS] on the device, see `store_tokens`; None where nothing can be
    found, and of single tokens.

    Raises:
        DataError: as `append`, for all that needs no look at numbers.
    """
    slot_mapping.check(k, v, store)
    if not len(slot_mapping.runs):
        return None
    if not store.layout.is_raw:
        return _append_packed(k, v, store, slot_mapping)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    launch(k, v, store, table(slot_mapping, store))
    return None
