"""Rows that decode: attention over pages by a plan of fixed size, for all layers of one `Call`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...ops.merge import merge
from ...ops.types import PageStore, Table
from .call import Call, Sink
from .place import Copies

X = TypeVar("X")


@dataclass(frozen=True)
class Ragged:
    """Rows of fewer tokens than a plan has queries.

    Attributes:
        query_lens: int32 [rows].
        token_of: int64 [rows * num_queries]: which token stands there; any where there is none.
        place_of: int64 [tokens]: where each token stands.
    """

    query_lens: torch.Tensor
    token_of: torch.Tensor
    place_of: torch.Tensor


class Decode:
    """Attention of rows of up to `num_queries` tokens over their pages, for all layers of one `Call`.

    With copies a row has more parts: packed pages, the copy of its first page, and its newest pages in each format of
    copies.
    """

    def __init__(
        self, call: Call, batch_size: int, num_queries: int, device: torch.device, copies: Copies | None
    ) -> None:
        self.num_queries = num_queries
        self._copies, self._rings = copies if call.rings else None, call.rings
        self._plan = call.plan(self._parts(call.layouts), device, batch_size=batch_size, num_queries=num_queries)
        self._bound: dict[str, tuple[int, list[PageStore]]] = {}  # layer: its number and what is bound

    def _parts(self, each: Sequence[X]) -> list[X]:
        """Return what belongs to each part, of pages and of the copies of each ring: the first page's copy is another
        part than the newest pages'.
        """
        packed, *copies = each[: 1 + len(self._rings)]
        return [packed, *(x for x, ring in zip(copies, self._rings, strict=True) if ring.first), *copies]

    def update(self, block_table: torch.Tensor, seq_lens: torch.Tensor, ragged: Ragged | None) -> None:
        self._ragged = ragged
        query_lens = None if ragged is None else ragged.query_lens
        if (c := self._copies) is None:
            self._plan.update([Table(block_table, seq_lens)], query_lens=query_lens)
            return
        n, formats = len(seq_lens), c.formats[: len(self._rings)]
        position, page, tokens = c.packed[0, :n], c.packed[1, :n], c.packed[1 + len(formats), :n]
        head = [Table(c.head_table[:n], c.head[:n])] if formats[0].first else []
        tails = [Table(f.table[:n], *f.tail[:, :n]) for f in formats]
        self._plan.update([Table(block_table, tokens, position, page), *head, *tails], query_lens=query_lens)

    def run(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        layer: str,
        stores: list[PageStore],
        sink: Sink,
    ) -> None:
        """Attend with q [tokens, Hq, D], out [tokens, Hq, Dv]; stores (`Layer.stores`) and learned sink of a layer."""
        number, bound = self._bound.get(layer, (len(self._bound), []))
        if bound != stores:
            self._plan.bind(number, self._parts(stores))
            self._bound[layer] = number, stores
        shape, ragged = (-1, self.num_queries), self._ragged
        asked = (q if ragged is None else q[ragged.token_of]).unflatten(0, shape)
        found = out.unflatten(0, shape) if ragged is None else out.new_empty(*asked.shape[:3], out.shape[2])
        lse = None if sink is None else torch.empty(asked.shape[:3], dtype=torch.float32, device=q.device)
        self._plan.run(asked, number, out=found, lse=lse)
        if sink is not None and lse is not None:
            merge([(found, lse), sink], into=found)
        if ragged is not None:
            out.copy_(found.flatten(0, 1)[ragged.place_of])
