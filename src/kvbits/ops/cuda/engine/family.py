"""Interface that the engine asks of a family of formats. `families.family_of` gives a layout's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch

from ....spec import PageLayout
from ...types import PageStore
from .runtime import driver
from .runtime.compile import Source
from .shape import Ask, Kernel
from .side import widened

Op = Literal["attend", "close", "step", "unpack"]
"""Operations of kernels on pages: attention over them, closing them from the host, closing them in a decode step on the
device, unpacking to 16-bit rows.
"""

STEP_FIELDS: list[Any] = [
    ("closings", ctypes.c_void_p),
    ("closed", ctypes.c_void_p),
    ("tail", ctypes.c_void_p),
    ("runs", ctypes.c_void_p),
    ("fresh", ctypes.c_void_p * 2),
    ("fresh_stride", ctypes.c_int64 * 2 * 2),
    ("before", ctypes.c_void_p * 2),
    ("tail_head_bytes", ctypes.c_int64),
    ("tail_offset", ctypes.c_int * 2),
]
"""Arguments of the closing kernels for a decode step: struct Step of step.cuh."""


class Close(Protocol):
    """A step that closes pages without waiting.

    Args:
        k, v: [n, H, page_size, head_dim], 16-byte aligned rows.
        page_address: int64 [n] on the device: byte addresses of the pages' first structs.
        status: int32 [STATUS_FIELDS] on the device, added to as `ops.store` says.
        first: what `Family.first` gave.
    """

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        store: PageStore,
        page_address: torch.Tensor,
        status: torch.Tensor,
        first: torch.Tensor | None = None,
    ) -> None: ...


class Unpacks(Protocol):
    """Pages of one layout, ready to be unpacked for layers whose pages lie alike; launches only.

    Args:
        dtype: of the rows.
        page_offset: int64 [n] on the device: bytes from a layer's first page to each page.
        rows: int32 [n, 2] on the device: first output row and visible tokens of each page.
        starts: int32 [n] on the device: position of each page's first token, for keys that are turned back.
    """

    def __init__(
        self,
        layout: PageLayout,
        dtype: torch.dtype,
        page_offset: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> None: ...

    @staticmethod
    def prepare(layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Compile and load what `run` launches, so that the first one does not wait for it."""

    def run(self, pages: int, keys: torch.Tensor, values: torch.Tensor, static: Mapping[str, torch.Tensor]) -> None:
        """Write the rows of a layer.

        Args:
            pages: address of the layer's first page.
            keys, values: [rows, H, D], dense.
            static: calibrated parameters of the layer (`PageStore.static`).
        """


class Stores(Protocol):
    """A step that writes tokens by themselves, launching only."""

    def refuses_layout(self, layout: PageLayout, dtype: torch.dtype | None) -> str | None:
        """Return why tokens of `dtype` cannot be stored in pages of a layout, or None."""

    def prepare(self, layout: PageLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Compile and load what `store` launches."""

    def sources(self, layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int]) -> Iterator[Source]:
        """Yield the sources that `prepare` loads on a device of a compute capability."""

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: PageStore,
        slots: torch.Tensor,
        previous: torch.Tensor | None,
        starts: torch.Tensor | None,
        status: torch.Tensor | None,
    ) -> None:
        """Store tokens; arguments as of `ops.store`, which are checked: at least one token, pages at multiples of 16
        bytes.
        """


class Refuses(Protocol):
    """A function that says why pages cannot be closed from, or unpacked to, rows of a dtype, or returns None."""

    def __call__(self, layout: PageLayout, dtype: torch.dtype | None) -> str | None: ...


class Family:
    """A family of formats: which layouts it has, and its kernels. One object without state for all of them.

    Attributes:
        folds: its attention kernel does as much again with half of its columns where there are at most
            `shape.FOLD_COLUMNS`.
        steps: None, or why its pages are not closed in decode steps on the device.
        stores: what writes single tokens to its token-local pages.
        always_unpacks: whether pages are unpacked to 16-bit rows where the attention kernel refuses them.
    """

    folds = False
    steps: str | None = None
    stores: Stores
    always_unpacks = False
    refuses_closing: Refuses
    refuses_unpacking: Refuses
    close: Close
    unpacker: type[Unpacks]

    def serves(self, layout: PageLayout) -> bool:
        """Return whether a layout belongs to this family; the first of `families.families()` that says so has it."""
        raise NotImplementedError

    def refuses(
        self,
        op: Op,
        layout: PageLayout,
        *,
        dtype: torch.dtype | None = None,
        num_columns: int = 1,
        shared_limit: int | None = None,
    ) -> str | None:
        """Return why an operation has no kernel for pages of a layout, or None.

        Args:
            dtype: of the keys and values that are closed, or of the rows to unpack to.
            num_columns: attention: query columns of a kv head (query tokens times heads).
            shared_limit: attention: bytes of shared memory of a block, if known.
        """
        if op == "attend":
            return self.refuses_attention(layout, num_columns, shared_limit)
        if op == "unpack":
            return self.refuses_unpacking(layout, dtype)
        return (self.steps if op == "step" else None) or self.refuses_closing(layout, dtype)

    def refuses_attention(self, layout: PageLayout, num_columns: int, shared_limit: int | None) -> str | None:
        raise NotImplementedError

    def is_wide(self, layout: PageLayout) -> bool:
        """Return whether the attention kernel has registers for `shape.WIDE` columns a warp."""
        return False

    def columns(self, layout: PageLayout, num_columns: int) -> int:
        """Return the number of query columns of a warp where there are `num_columns` of a kv head."""
        return 8

    def attention(self, layout: PageLayout, ask: Ask) -> Kernel | None:
        """Return the attention kernel. Where shared memory is too small for any shape it is None, or the smallest one,
        whose bytes are above `ask.shared_limit`.
        """
        raise NotImplementedError

    def reads_beside(self, layout: PageLayout, other: PageLayout) -> bool:
        """Return whether one attention kernel reads pages of both packed layouts (`Ask.beside`)."""
        return False

    def constants(self, layout: PageLayout, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what the attention kernel reads beside pages and calibrated parameters, by field of `PartArgs`. It is
        alike in all layers.
        """
        return {}

    def static_pointers(
        self, layout: PageLayout, static: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, int]:
        """Return where the attention kernel finds a layer's calibrated parameters (`PageStore.static`), by field of
        `PartArgs`.
        """
        return {
            name: widened(x, layout.dim(name[0]), device).data_ptr()
            for name, x in static.items()
            if name.endswith(("_scale", "_bias"))
        }

    def closing(self, layout: PageLayout, dtype: torch.dtype, capability: tuple[int, int], appends: bool) -> Source:
        """Return the source that closes pages on a device of a compute capability; with `appends` in decode steps."""
        raise NotImplementedError

    def unpacking(self, layout: PageLayout, dtype: torch.dtype) -> Source:
        """Return the source that unpacks pages."""
        raise NotImplementedError

    def first(
        self, store: PageStore, starts: np.ndarray | None, num_pages: int, device: torch.device
    ) -> torch.Tensor | None:
        """Return what `close` needs to know of the positions `starts` [num_pages] of pages' first tokens, on `device`.
        Return None where it needs nothing.
        """
        return None

    def step(
        self,
        store: PageStore,
        dtype: torch.dtype,
        device_index: int,
        num_sequences: int,
        tail_starts: torch.Tensor | None,
    ) -> tuple[driver.Kernel, int, Any]:
        """Return the closing kernel of a decode step, threads of its blocks, and its arguments (with `STEP_FIELDS`),
        what the format alone has set.
        """
        raise NotImplementedError
