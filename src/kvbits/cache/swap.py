"""One sequence to host memory and back, byte for byte.

Pages that other sequences share are copied out, not taken from them; swapped in again the sequence has pages of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import CacheStateError, DataError, counted
from ..spec import CacheSpec
from .group import GroupState
from .sequence import Sequence


@dataclass(frozen=True)
class SwappedSequence:
    """A sequence outside its cache.

    Attributes:
        spec: of the cache it came from; only a cache of an equal spec (and equal calibration) takes it back.
        sequences: per layer group, its lengths and pages; page numbers are indices into `pages`.
        pages: per layer group and pool, uint8 [pages, layers, kv heads, head_bytes] on the host.
        static: calibrated parameters its codes were taken with.
        made_for, beyond_ids: as in `PagedCache`.
    """

    spec: CacheSpec
    sequences: tuple[Sequence, ...]
    pages: tuple[dict[str, torch.Tensor], ...]
    static: list[dict[str, torch.Tensor]]
    made_for: str | None = None
    beyond_ids: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.sequences[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(x.numel() for pools in self.pages for x in pools.values())


def swap_out(
    groups: list[GroupState], row: int, spec: CacheSpec, static: list[dict[str, torch.Tensor]]
) -> SwappedSequence:
    """Copy a sequence to the host and free its pages.

    Raises:
        CacheStateError: tokens are speculative, which another cache could not take back.
    """
    if any(g.keep_past for g in groups):
        raise CacheStateError(
            "swap_out() while tokens are speculative; crop() to the present length first, which ends the speculation"
        )
    sequences, pages = [], []
    for g in groups:
        s = g.sequences[row].clone()
        copies = {}
        for name, ids in s.pages().items():
            pool = g.pools[name]
            shape = (len(ids), pool.num_layers, pool.layout.num_kv_heads, pool.layout.head_bytes)
            copies[name] = torch.empty(shape, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")
            for i, page_id in enumerate(ids):
                copies[name][i].copy_(pool.block(page_id))
            s.renumber(name, range(len(ids)))
        sequences.append(s)
        pages.append(copies)
    for g in groups:
        g.free(row)
    return SwappedSequence(spec, tuple(sequences), tuple(pages), static)


def swap_in(
    groups: list[GroupState],
    row: int,
    swapped: SwappedSequence,
    spec: CacheSpec,
    static: list[dict[str, torch.Tensor]],
    made_for: str | None = None,
) -> None:
    """Copy a swapped sequence into pages of an empty row of a cache of this spec and calibration.

    Whoever calls this takes everything back where it fails.

    Raises:
        DataError: the sequence is of another spec or calibration.
        CacheStateError: the row holds tokens.
        PoolFullError: pages are missing.
    """
    if not isinstance(swapped, SwappedSequence):
        raise DataError(f"{type(swapped).__name__} is no swapped sequence; give what swap_out() returned")
    if swapped.spec != spec:
        raise DataError(
            f"the swapped sequence is of scheme {swapped.spec.scheme.name!r} for {len(swapped.spec.layers)} layers, the"
            f" cache of {spec.scheme.name!r} for {len(spec.layers)}; swap it into a cache of an equal spec"
        )
    if None not in (made_for, swapped.made_for) and made_for != swapped.made_for:
        raise DataError(
            f"another model made the swapped sequence (identity {str(swapped.made_for)[:12]}, this cache's is"
            f" {str(made_for)[:12]}; see kvbits.identity); swap it into a cache of that model"
        )
    if not _equal(swapped.static, static):
        raise DataError(
            "the swapped sequence was quantized with other calibrated scales than this cache has; build the cache with"
            " the same calibration"
        )
    if length := groups[0].sequences[row].length:
        raise CacheStateError(
            f"sequence {row} holds {counted(length, 'token')}; swap into an empty row, or free({row}) first"
        )
    sequences = [s.clone() for s in swapped.sequences]
    for g, s, copies in zip(groups, sequences, swapped.pages, strict=True):
        for name, numbers in s.pages().items():
            pool = g.pools[name]
            pool.reserve(len(numbers))
            new = [pool.allocator.allocate() for _ in numbers]
            for page_id, number in zip(new, numbers, strict=True):
                pool.block(page_id).copy_(copies[name][number])
            s.renumber(name, new)
        g.replace(row, s)


def _equal(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return a is b or all(
        x.keys() == y.keys() and all(torch.equal(x[n].cpu(), y[n].cpu()) for n in x) for x, y in zip(a, b, strict=True)
    )
