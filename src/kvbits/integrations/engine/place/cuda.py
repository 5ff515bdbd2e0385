"""A step's pages before, copies and what rows read, on a GPU in one launch: the contract is the package's."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from ....errors import UnsupportedError
from ....ops.cuda.engine.runtime import driver
from ....ops.cuda.engine.runtime.compile import Source
from . import MOST_FORMATS, Places, begin

THREADS = 512


class _Copied(ctypes.Structure):
    """struct Copied of place.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("where", "holds", "slots", "tail", "table")),
        *((name, ctypes.c_int) for name in ("num_copies", "newest", "first", "pages")),
    ]


class _Args(ctypes.Structure):
    """struct Args of place.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "seq_lens",
                "starts",
                "table",
                "slots",
                "rings",
                "stamps",
                "previous",
                "page_starts",
                "packed",
                "head",
                "head_table",
            )
        ),
        ("table_stride", ctypes.c_int64),
        *(
            (n, ctypes.c_int)
            for n in ("rows", "tokens", "table_width", "num_blocks", "step", "page_size", "room", "num_formats")
        ),
        ("formats", _Copied * MOST_FORMATS),
    ]


def source() -> Source:
    return Source(Path(__file__).parent, "place.cu", {"THREADS": THREADS})


@functools.lru_cache(maxsize=16)
def _load(device: torch.device) -> driver.Kernel:
    return driver.load(source(), "place", -1 if device.index is None else device.index)


def prepare(device: torch.device) -> None:
    """Compile and load what `place` launches.

    Raises:
        UnsupportedError: a device that runs no kernel.
    """
    if why := driver.refuses(device):
        raise UnsupportedError(f"pages on {device} are not placed: {why}")
    _load(device)


def place(
    places: Places,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    rings: torch.Tensor | None = None,
) -> None:
    """Launch the kernel that fills `places`, without waiting."""
    begin(places, seq_lens, starts, table, slots, rings)
    given = {"seq_lens": seq_lens, "starts": starts, "table": table, "slots": slots, "rings": rings}
    args = _Args(
        **_pointers(given | vars(places)),
        table_stride=table.stride(0),
        rows=len(seq_lens),
        tokens=len(slots),
        table_width=table.shape[1],
        num_blocks=len(places.stamps),
        step=places.step,
        page_size=places.page_size,
    )
    if (c := places.copies) is not None:
        args.room, args.num_formats = len(c.head), len(c.formats)
        for name, pointer in _pointers(vars(c)).items():
            setattr(args, name, pointer)
        for i, f in enumerate(c.formats):
            args.formats[i] = _Copied(
                **_pointers(vars(f)), num_copies=len(f.holds), newest=f.newest, first=int(f.first), pages=f.pages
            )
    _load(slots.device).launch(1, THREADS, args, torch.cuda.current_stream(slots.device).cuda_stream)


def _pointers(found: dict[str, Any]) -> dict[str, int]:
    """Return the address of each tensor among these values; a pointer that is not given is null."""
    return {name: x.data_ptr() for name, x in found.items() if isinstance(x, torch.Tensor)}
