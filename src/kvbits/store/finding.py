"""The longest prefix of a prompt that a store has: by the names, headers and tables of its blobs, no page read yet."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from ..cache.blob import Identity, Kind, Page
from ..cache.sequence import Sequence
from ..errors import FileFormatError
from ..spec import LayerGroup
from . import keys, pages
from .loading import DamagedError
from .pages import Cuts
from .shelf import Blob, Shelf, stem_of


@dataclass(frozen=True)
class Plan:
    """What a load brings.

    Attributes:
        length: tokens.
        made: per layer group, the sequence and its pages, in the order of its lists.
        at: the blob that each page is in, and its number there.
    """

    length: int
    made: list[tuple[Sequence, list[Page]]]
    blobs: list[Blob]
    at: dict[Page, tuple[int, int]]

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return [source.name for one in self.blobs for source in one.sources]


def find(
    shelf: Shelf,
    space: str,
    identity: Identity,
    groups: Rows[LayerGroup],
    cuts: Cuts,
    tokens: np.ndarray,
    found: Callable[[Blob], None] = lambda one: None,
    extra: bytes = b"",
) -> Plan | None:
    """The longest prefix of `tokens` [tokens], or None.

    Args:
        found: told of each blob of closed pages as soon as it is known. The plan may end before it, where windows need
            more.
        extra: see `keys.first`.
    """
    chain = keys.chain(space, tokens, cuts.ends(len(tokens)), extra)
    shelf.fetch(space, [stem_of(key) for key in chain[1:]])
    blobs: list[Blob] = []
    for i, key in enumerate(chain[1:]):
        one = shelf.blob(space, stem_of(key), identity, groups, Kind.PAGES, (cuts.end(i), cuts.end(i + 1)), key)
        if one is None:
            break
        blobs.append(one)
        found(one)
    best: Plan | None = None
    for n in range(len(blobs), 0, -1):
        if best := _planned(cuts.end(n), pages.prefix(groups, cuts, n), blobs[:n]):
            break
    closed = best is not None
    reach = max(g.residual_length for g in groups) + (cuts.blob_pages + 2) * cuts.page_size + cuts.num_sinks
    for n in range(len(blobs), -1, -1):
        if best is not None and cuts.end(n) + reach <= best.length:
            break
        least = best.length if best else 0
        if closed and least == len(tokens):
            least -= 1  # exactly these tokens: their end has the newest ones as they were, raw
        if ended := _ended(shelf, space, identity, groups, cuts.end(n), tokens, chain[n], blobs[:n], least):
            best, closed = ended, False
    return best


def _planned(length: int, made: list[tuple[Sequence, list[Page]]], blobs: list[Blob]) -> Plan | None:
    """A plan, if the blobs have all pages that it needs. The newest blob that has a page counts."""
    at = {page: (i, number) for i, one in enumerate(blobs) for number, page in enumerate(one.pages)}
    return Plan(length, made, blobs, at) if all(page in at for _, listed in made for page in listed) else None


def _ended(
    shelf: Shelf,
    space: str,
    identity: Identity,
    groups: Rows[LayerGroup],
    start: int,
    tokens: np.ndarray,
    key: bytes,
    blobs: list[Blob],
    least: int,
) -> Plan | None:
    """A plan of more than `least` tokens that an END blob behind these blobs makes possible."""
    stem = stem_of(key) + "+"
    found: dict[str, int] = {}
    for name in shelf.names(space, stem):
        count = name[len(stem) :].partition("-")[0]
        length = start + int(count) if count.isdigit() and len(count) < 12 else 0
        if least < length <= len(tokens):
            known = stem_of(key, length - start, keys.after(key, tokens[start:length]))
            if name.rpartition(".")[0] == known:
                found[known] = length
    for known, length in sorted(found.items(), key=lambda x: -x[1]):
        one = shelf.blob(
            space, known, identity, groups, Kind.END, (start, length), keys.after(key, tokens[start:length])
        )
        if one is None:
            continue
        source = one.sources[0]
        try:
            made = pages.whole(groups, length, one.pages, source.table.state, source.path)
        except FileFormatError as error:
            shelf.set_aside(space, DamagedError(source.name, str(error)))
            continue
        if plan := _planned(length, made, [*blobs, one]):
            return plan
    return None
