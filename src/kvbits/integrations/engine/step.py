"""Once per step: which rows decode from pages and which prefill, the page before each page that opens, and which tokens
are also kept in copies.

Rows that decode come first. Those of one query length (1, or 1 + the number of speculative tokens) are read by
`ops.attend`, whose work list is made on the device from lengths and tables of pages: nothing waits, so an
engine may capture their steps in graphs. All other rows are prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...errors import UnsupportedError
from .call import Call
from .decode import Decode, Ragged
from .place import Copies, Places, place
from .place import cuda as place_cuda
from .prefill import Prefill
from .served import PAGE_SIZE, Ring


@dataclass
class Step:
    """One step, for all layers of one pool of pages.

    Attributes:
        num_decode_tokens: the first tokens, read by `decodes`; the others by `prefills`.
        slot_mapping: int64 [num_tokens], padding of a graph included; below 0: not stored.
        previous_page: int64 [num_tokens] as `ops.store` takes it; None where pages have no mean.
        starts: int32 [num_tokens]; None where no layer's keys are turned back.
        copy_slots: int64 [num_tokens] for each format of copies: where each token goes, -1 for none.
        positions: int64 [num_tokens], where an engine sums up queries and keys for a calibration; else None.
    """

    num_decode_tokens: int
    slot_mapping: torch.Tensor
    previous_page: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    copy_slots: tuple[torch.Tensor, ...] = ()
    decodes: dict[Call, Decode] = field(default_factory=dict)
    prefills: dict[Call, Prefill] = field(default_factory=dict)
    positions: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)


class Steps:
    """Steps of the layers of a pool, with the buffers that `place` fills, and plans of rows that decode.

    `place` fills nothing where no page has a mean or is in a frame, and none is copied.

    Args:
        calls: of each layer.
        num_queries: of rows that decode: each number that a step may have.
        copied: requests that have copies at the same time, at least 1 where pages are copied.
        rows: of a step, and tokens.
        num_pages: of the pool.

    Raises:
        UnsupportedError: a device that has no kernel; layers whose rings differ.
    """

    def __init__(
        self,
        calls: Iterable[Call],
        *,
        num_queries: Iterable[int],
        copied: int,
        rows: int,
        tokens: int,
        num_pages: int,
        device: torch.device,
    ) -> None:
        self._calls = list(dict.fromkeys(calls))
        centered = any(c.layout.is_centered for c in self._calls)
        turned = any(c.layout.key.needs_rotary for c in self._calls)
        rings = _common(self._calls)
        self._places: Places | None = None
        self.copies: Copies | None = None
        if centered or rings or turned:
            self._place = place
            if device.type != "cpu":
                place_cuda.prepare(device)
                self._place = place_cuda.place
            sizes: dict[str, Any] = {"tokens": tokens, "num_blocks": num_pages, "device": device}
            if rings:
                self.copies = Copies.empty(rings, count=copied, rows=rows, **sizes)
            self._places = Places.empty(PAGE_SIZE, previous=centered, page_starts=turned, copies=self.copies, **sizes)
        self._decodes = {n: {c: Decode(c, rows, n, device, self.copies) for c in self._calls} for n in num_queries}

    def plan(
        self,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        rings: torch.Tensor | None,
        prompts: np.ndarray,
        *,
        num_decode_tokens: int,
        num_queries: int = 1,
        ragged: Ragged | None = None,
    ) -> Step:
        """Return a step, planned by launches only: it waits for nothing.

        Args:
            seq_lens, starts, table, slots, rings: as `place` takes them.
            prompts: int64 [2, n], on the host: query and sequence lengths of the last n rows. Those before them decode.
            num_queries: of rows that decode, at most; ragged: where some have fewer.
        """
        step, n, rows = Step(num_decode_tokens, slots), len(slots), len(seq_lens) - prompts.shape[1]
        if (p := self._places) is not None:
            self._place(p, seq_lens, starts, table, slots, rings)
            step.previous_page, step.starts = ((None if x is None else x[:n]) for x in (p.previous, p.page_starts))
            step.copy_slots = tuple(f.slots[:n] for f in p.copies.formats) if p.copies else ()
        if rows:
            step.decodes = self._decodes[num_queries]
            for decode in step.decodes.values():
                decode.update(table[:rows], seq_lens[:rows], ragged)
        if prompts.size:
            step.prefills = {c: Prefill(prompts[0], prompts[1], table[rows:], c, self.copies) for c in self._calls}
        return step


def _common(calls: list[Call]) -> tuple[Ring, ...]:
    """Return the rings of the layers that have most formats of copies. Others must have the first of them.

    Raises:
        UnsupportedError: they have other ones.
    """
    most = max((c.rings for c in calls), key=len, default=())
    for c in calls:
        for mine, common in zip(c.rings, most, strict=False):
            if (mine.newest, mine.first) != (common.newest, common.first):
                raise UnsupportedError(
                    f"layers of one pool have copies of {mine.newest} and of {common.newest} pages a request; name"
                    " copies of as many tokens for all layers"
                )
    return most
