"""store: write fresh keys and values to their slots in pages, raw ones and those whose tokens are quantized one by one.

A token's bytes in a packed page depend on the token alone (`PageLayout.token_local`), and no byte holds codes of two
tokens. So pages fill token by token, and n stores leave at their slots what closing a page with these tokens leaves.
Bytes of a page that belong to no token are zeroed when its slot 0 is stored.

Centred keys need one number more per channel, the page's mean, which a page that fills token by token cannot know. It
is fixed when the page opens, that is when slot 0 is stored, and stays until slot 0 is stored again. Any mean reads back
right, since the page holds it. A mean near the page's own makes the code range small:

    all tokens of the page are in this call      the page's own mean, as close takes it
    the sequence has a page before               that page's mean (its fresh tokens as they came, the others decoded),
                                                 turned on by page_size positions of
                                                 the rotary embedding where it is known
    the first page                               the mean of the call's tokens of the page

`choose(layout, dtype, device).run` is the function of the backend that serves:

    store(k, v, pages, slots, *, previous=None, starts=None, status=None)

        k, v: [N, H, D] or [B, T, H, D] with N = B * T, any strides; float32, float16 or bfloat16, for raw pages their
            dtype. Rows that a kernel cannot read where they lie are copied.
        pages: `PageStore` of a token-local layout, raw ones included.
        slots: int64 [N] on the pages' device: page * page_size + place. Below 0: not stored. Past the pages: not stored
            either, and counted. No slot twice.
        previous: int64 [N] on the device, for centred layouts. The entry of a token that opens a page (place 0) names
            the page before it in its sequence, which is full once this call is over. It is below 0 where there is none.
            Other entries are not read. Tokens of one page then follow each other in the order of their places. Tokens
            of the page before come just ahead if this call fills it. Entries that are not stored may lie between.
        starts: int32 [N] on the device, position of the first token of each token's page, for keys in a calibrated
            basis.
        status: int32 [STATUS_FIELDS] on the device, added to. Fields 0 and 1 count clamped elements of keys and of
            values, 2 and 3 are 1 where their scales overflowed, 4 and 5 where they held NaN or infinity. Raw pages take
            these as they are. Field 6 counts tokens whose slots lead out of the pages. After an overflow, NaN or
            infinity the pages of the call are half written, and their numbers unusable. `types.settle` turns a status
            into counts or an error.

On a GPU a call only launches: it never waits, and a CUDA graph can hold it once `Choice.prepare` has run. What it finds
there comes through `status` alone.

    Raises:
        DataError: arguments that do not fit together; nothing is written. On CPUs without a `status` also what `settle`
            raises.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DataError
from ..spec import PageLayout
from . import dispatch
from .descriptor import TORCH_NUMBERS
from .types import PageStore, settle

STATUS_FIELDS = 7
_turns = WeakIdKeyDictionary()  # of turns whose numbers passed, the version that did


def choose(
    layout: PageLayout, dtype: torch.dtype, device: torch.device | str, backend: str = "auto"
) -> dispatch.Choice:
    """Choose the backend that stores tokens of `dtype` in pages of a token-local layout on a device.

    Raises:
        SpecError: unknown backend, or the named one refuses; the message says why.
        UnsupportedError: every backend refuses; the message says why each does.
    """
    return dispatch.choose("store", layout, dtype, torch.device(device), backend=backend)


def check(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PageStore,
    slots: torch.Tensor,
    previous: torch.Tensor | None,
    starts: torch.Tensor | None,
    status: torch.Tensor | None,
) -> None:
    """Refuse arguments that do not fit together, without reading numbers of a GPU.

    Raises:
        DataError: the message names the argument, what it is and what it should be.
    """
    if not isinstance(pages, PageStore) or not pages.slabs:
        raise DataError(f"pages must be a PageStore with at least one slab, got {str(pages)[:80]}")
    for name, x in (
        ("k", k),
        ("v", v),
        ("slots", slots),
        ("previous", previous),
        ("starts", starts),
        ("status", status),
    ):
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("k", "v", "slots")):
            raise DataError(f"{name} must be a tensor, got {type(x).__name__}")
    layout, given, device = pages.layout, k.shape, k.device
    if k.dtype not in TORCH_NUMBERS:
        raise DataError(f"k is {k.dtype}; tokens are {', '.join(map(str, TORCH_NUMBERS))}")
    if not layout.token_local:
        raise DataError(
            f"tokens cannot be stored one by one as {layout.key}, {layout.value}; use a token-local layout, or"
            " close whole pages"
        )
    heads, dims = layout.num_kv_heads, len(given)
    if (
        not 3 <= dims <= 4
        or given[-2] != heads
        or given[-1] != layout.head_dim
        or v.shape != (*given[:-1], layout.value_head_dim)
        or v.dtype != k.dtype
    ):
        raise DataError(
            f"k and v must be [.., {heads}, {layout.head_dim}] and [.., {heads}, {layout.value_head_dim}] of one dtype,"
            f" got {k.dtype} {list(given)} and {v.dtype} {list(v.shape)}"
        )
    if layout.is_raw and k.dtype != getattr(torch, layout.raw_dtype):
        raise DataError(f"k is {k.dtype}; raw pages of {layout.raw_dtype} store that alone")
    count = given[0] if dims == 3 else given[0] * given[1]
    if slots.dtype != torch.int64 or slots.shape != (count,) or not slots.is_contiguous() or slots.device != device:
        raise _misfit("slots", slots, torch.int64, count, device)
    if v.device != device or pages.slabs[0].device != device:
        raise DataError(f"k is on {device}, v on {v.device}, the pages on {pages.device}; all must be on one device")
    if layout.is_centered:
        if previous is None:
            raise DataError("centred keys take the mean of the page before when a page opens; give previous")
        check_column("previous", previous, torch.int64, count, device)
        if pages.turn is not None:
            _check_turn(pages.turn, layout.head_dim, device)
    if layout.key.needs_rotary:
        if starts is None:
            raise DataError("keys in a calibrated basis are turned back by their page's first position; give starts")
        check_column("starts", starts, torch.int32, count, device)
    if layout.key.static or layout.value.static:
        _check_static(pages, device)
    if status is not None:
        check_column("status", status, torch.int32, STATUS_FIELDS, device)


def check_column(name: str, x: torch.Tensor, dtype: torch.dtype, count: int, device: torch.device) -> None:
    """Check a column of numbers.

    Raises:
        DataError: x is not dense [count] of this dtype on this device.
    """
    if x.dtype != dtype or x.shape != (count,) or not x.is_contiguous() or x.device != device:
        raise _misfit(name, x, dtype, count, device)


def _misfit(name: str, x: torch.Tensor, dtype: torch.dtype, count: int, device: torch.device) -> DataError:
    return DataError(f"{name} must be dense {dtype} [{count}] on {device}, got {x.dtype} {list(x.shape)} on {x.device}")


def _check_static(pages: PageStore, device: torch.device) -> None:
    layout = pages.layout
    for kind, spec in (("k", layout.key), ("v", layout.value)):
        if not spec.static:
            continue
        want = (layout.num_kv_heads, *spec.scale_shape(0, layout.dim(kind)))
        for name in (f"{kind}_scale", *([f"{kind}_bias"] if spec.has_bias else [])):
            found = pages.static.get(name)
            if found is None:
                raise DataError(
                    f"{spec.format} with static scales was given no calibrated {name}; calibrate first or use"
                    " static=False"
                )
            if tuple(found.shape) != want or found.dtype != torch.float32 or found.device != device:
                raise DataError(
                    f"{name} must be float32 {list(want)} on {device}, got {found.dtype} {list(found.shape)} on"
                    f" {found.device}"
                )


def _check_turn(turn: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """Check the turned channels on a CPU. A GPU, which is not waited for, takes the last channel for a partner that is
    no channel.
    """
    if (
        turn.dtype != torch.float32
        or tuple(turn.shape) != (3, head_dim)
        or not turn.is_contiguous()
        or turn.device != device
    ):
        raise DataError(
            f"turn must be dense float32 [3, {head_dim}] on {device}, got {turn.dtype} {list(turn.shape)} on"
            f" {turn.device}"
        )
    version = 0 if turn.is_inference() else turn._version
    if device.type == "cpu" and _turns.get(turn) != version:
        if not bool(turn.isfinite().all() & (turn[2] >= 0).all() & (turn[2] < head_dim).all()):
            raise DataError(
                f"turn must hold finite numbers, in its last row channels from 0 to {head_dim - 1};"
                " quant.rotary.turn_by makes it"
            )
        _turns[turn] = version


def require_positions(starts: np.ndarray) -> None:
    """Refuse invalid positions.

    Raises:
        DataError: a position of a stored token's page that is below 0.
    """
    if len(starts) and starts.min() < 0:
        raise DataError(f"starts are positions of pages' first tokens, not below 0; got {starts.min()}")


def note(found: list[int], k: torch.Tensor, v: torch.Tensor, layout: PageLayout, status: torch.Tensor | None) -> None:
    """Add what a call has found, as `status` has it, to a status; without one, judge it.

    Raises:
        DataError: as `settle`.
    """
    if status is None:
        settle(layout, k, v, found)
        return
    more = torch.tensor(found, dtype=torch.int32, device=status.device)
    status[:2] += more[:2]
    status[2:6] |= more[2:6]
    status[6:] += more[6:]
