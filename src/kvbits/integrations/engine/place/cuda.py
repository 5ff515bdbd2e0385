"""A step's pages before, copies and what rows read, on a GPU in one launch: the contract is the package's."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from ....ops.cuda.engine.runtime import driver
from ....ops.cuda.engine.runtime.compile import Source
from . import MOST_FORMATS, Places, check

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
def _load(device_index: int) -> driver.Kernel:
    return driver.load(source(), "place", device_index)


def refuses(device: torch.device) -> str | None:
    """Return why steps on this device are not placed here, or None."""
    return driver.refuses(device)


def prepare(device: torch.device) -> None:
    """Compile and load what `place` launches."""
    _load(-1 if device.index is None else device.index)


def place(
    places: Places,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    rings: torch.Tensor | None = None,
) -> None:
    """Launch the kernel that fills `places`, without waiting."""
    check(places, seq_lens, starts, table, slots, rings)
    places.advance()
    args = _Args(
        seq_lens=seq_lens.data_ptr(),
        starts=starts.data_ptr(),
        table=table.data_ptr(),
        slots=slots.data_ptr(),
        stamps=places.stamps.data_ptr(),
        rings=None if rings is None else rings.data_ptr(),
        previous=None if places.previous is None else places.previous.data_ptr(),
        page_starts=None if places.starts is None else places.starts.data_ptr(),
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
        for name in ("packed", "head", "head_table"):
            setattr(args, name, getattr(c, name).data_ptr())
        for i, f in enumerate(c.formats):
            pointers = {n: getattr(f, n).data_ptr() for n in ("where", "holds", "slots", "tail", "table")}
            args.formats[i] = _Copied(
                **pointers, num_copies=len(f.holds), newest=f.newest, first=int(f.first), pages=f.pages
            )
    _load(-1 if slots.device.index is None else slots.device.index).launch(
        1, THREADS, args, torch.cuda.current_stream(slots.device).cuda_stream
    )
