"""One sequence to host memory and back, byte for byte.

Pages that other sequences share are copied out, not taken from them; swapped in again the sequence has pages of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import CacheStateError, DataError, PoolFullError, counted
from ..spec import CacheSpec
from .state import Sequence

if TYPE_CHECKING:
    from .paged_cache import PagedCache


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence outside its cache.

    Attributes:
        spec: of the cache it came from; only a cache of an equal spec (and equal calibration) takes it back.
        sequences: per layer group, its lengths and pages; page numbers are indices into `pages`.
        pages: per layer group and pool, uint8 [pages, layers, kv heads, head_bytes] on the host.
        static: calibrated parameters its codes were taken with.
    """

    spec: CacheSpec
    sequences: tuple[Sequence, ...]
    pages: tuple[dict[str, torch.Tensor], ...]
    static: list[dict[str, torch.Tensor]]

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(x.numel() for pools in self.pages for x in pools.values())


def swap_out(cache: PagedCache, row: int) -> SwappedSequence:
    """Copy a sequence to the host and free its pages."""
    cache._finished("swap_out")
    (row,) = cache._rows([row])
    sequences, pages = [], []
    for g in cache.groups:
        s = g.sequences[row].clone()
        copies = {}
        for name, ids in s.pages().items():
            pool = g.pools[name]
            shape = (len(ids), pool.num_layers, pool.layout.num_kv_heads, pool.layout.head_bytes)
            copies[name] = torch.empty(shape, dtype=torch.uint8, pin_memory=cache.device.type == "cuda")
            for i, page_id in enumerate(ids):
                copies[name][i].copy_(pool.block(page_id))
            s.renumber(name, range(len(ids)))
        sequences.append(s)
        pages.append(copies)
    cache.free(row)
    return SwappedSequence(cache.spec, tuple(sequences), tuple(pages), cache.static)


def swap_in(cache: PagedCache, row: int, swapped: SwappedSequence) -> None:
    """Copy a swapped sequence into pages of an empty row.

    Raises:
        DataError: the row does not exist, or the sequence is of another spec or calibration.
        CacheStateError: the row holds tokens.
        PoolFullError: pages are missing. Nothing changed.
    """
    cache._finished("swap_in")
    (row,) = cache._rows([row])
    if swapped.spec != cache.spec:
        raise DataError(
            f"the swapped sequence is of scheme {swapped.spec.scheme.name!r} for {len(swapped.spec.layers)} layers, the cache of "
            f"{cache.spec.scheme.name!r} for {len(cache.spec.layers)}; swap it into a cache of an equal spec"
        )
    if not _equal(swapped.static, cache.static):
        raise DataError("the swapped sequence was quantized with other calibrated scales than this cache has; build the cache with the same calibration")
    if length := cache.seq_lens[row]:
        raise CacheStateError(f"sequence {row} holds {counted(length, 'token')}; swap into an empty row, or free({row}) first")
    undo = [g.snapshot() for g in cache.groups]
    try:
        for g, s, copies in zip(cache.groups, swapped.sequences, swapped.pages, strict=True):
            s = s.clone()
            g.replace(row, s)
            for name, ids in s.pages().items():
                pool = g.pools[name]
                pool.reserve(len(ids))
                new = [pool.allocator.allocate() for _ in ids]
                s.renumber(name, new)
                for page_id, page in zip(new, copies[name], strict=True):
                    pool.block(page_id).copy_(page)
    except PoolFullError:
        cache._restore(undo)
        raise


def _equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return a is b or all(x.keys() == y.keys() and all(torch.equal(x[n].cpu(), y[n].cpu()) for n in x) for x, y in zip(a, b, strict=True))
