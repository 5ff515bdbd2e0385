"""Options of users for copies and calibrations: `Options`. Each engine has its own way to give them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import UnsupportedError, unknown
from ...spec import PageLayout
from .served import COPIED, COPIES_SHARE, PAGE_SIZE, Format, Ring, raw_of

MOST_RAW = 1024
MOST_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Options:
    """

    Attributes:
        raw_newest: tokens at the end of each request that are read raw when it decodes, at least: up to a page more,
            whole pages. 0: no copies at all.
        raw_first: whether each request's first page (64 tokens) is read raw too: 0 or 64.
        packed_copies: whether tokens behind the raw ones are read from the finer formats that the served format names
            (`Format.copies`).
        copies_share: share of the cache's memory that copies take at most, above 0 and up to `MOST_SHARE`; so many
            requests have them as it holds.
        calibration: file of `kvbits calibrate` for layers whose keys are stored in a calibrated basis; the model's own
            is found, or made once, without it.
        calibrate: whether one may be made where none is kept.
    """

    raw_newest: int = 0
    raw_first: int = 0
    packed_copies: bool = True
    copies_share: float = COPIES_SHARE
    calibration: str = dataclasses.field(default="", metadata={"what": "a file of `kvbits calibrate`"})
    calibrate: bool = True

    @property
    def copies(self) -> bool:
        """Flag that tells whether pages are copied."""
        return bool(self.raw_newest)

    def rings(self, form: Format, layout: PageLayout) -> tuple[Ring, ...]:
        """Return the copies of a request's pages in a layer of such pages, finest first.

        The newest page may have a single token. So the ring of a format has one page more than the tokens that are read
        from it and from finer ones.
        """
        if not self.copies or layout.is_raw:
            return ()
        tokens = self.raw_newest
        found = [Ring(raw_of(layout), tokens // PAGE_SIZE + 1, bool(self.raw_first))]
        for num_tokens, copy in form.copies_of(layout) if self.packed_copies else ():
            tokens += num_tokens
            found.append(Ring(copy, tokens // PAGE_SIZE + 1))
        return tuple(found)


Kind = TypeVar("Kind", bound=Options)


def checked(kind: type[Kind], given: Any, where: str, copied: int, plain: str = "") -> Kind:
    """Return options as a user gave them.

    Args:
        copied: newest tokens that are raw unless users say otherwise, with the first `COPIED`: of calibrated formats,
            and those that name copies. 0: none.
        plain: the format, where nothing in the engine reads a calibration.

    Raises:
        UnsupportedError: unknown or invalid options; `where` says what gave them.
    """
    names = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(given, dict):
        raise UnsupportedError(f"{where} is {given!r}; it takes a dict of {', '.join(names)}")
    if strange := [name for name in given if name not in names]:
        raise UnsupportedError(f"{where}: {unknown('option', strange[0], names)}")
    defaults: dict[str, Any] = (
        {"raw_newest": copied, "raw_first": COPIED} if copied and given.get("raw_newest") != 0 else {}
    )
    found = kind(**(defaults | given))
    if not _is_whole(found.raw_newest) or found.raw_newest % PAGE_SIZE or not 0 <= found.raw_newest <= MOST_RAW:
        raise UnsupportedError(
            f"raw_newest={found.raw_newest!r} must be a multiple of {PAGE_SIZE} tokens, 0 to {MOST_RAW}"
        )
    if not _is_whole(found.raw_first) or found.raw_first not in (0, PAGE_SIZE):
        raise UnsupportedError(f"raw_first={found.raw_first!r} must be 0 or {PAGE_SIZE} tokens, a page")
    share = found.copies_share
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= MOST_SHARE:
        raise UnsupportedError(
            f"copies_share={share!r} must be a number above 0 and up to {MOST_SHARE}, a share of the cache's memory;"
            " raw_newest=0 is for no copies"
        )
    for f in dataclasses.fields(found):
        value = getattr(found, f.name)
        if "what" in f.metadata and not isinstance(value, str):
            raise UnsupportedError(f"{f.name}={value!r} must be the name of {f.metadata['what']}")
        if isinstance(f.default, bool) and not isinstance(value, bool):
            raise UnsupportedError(f"{f.name}={value!r} must be true or false")
    if found.raw_first and not found.raw_newest:
        raise UnsupportedError(f"raw_first without raw_newest; pass raw_newest={PAGE_SIZE} too")
    if "copies_share" in given and not found.copies and (plain or "raw_newest" in given):
        raise UnsupportedError(f"copies_share without raw_newest; pass raw_newest={PAGE_SIZE} too, or leave it away")
    if plain and (
        unread := [
            name
            for name in ("calibration", "calibrate", "packed_copies")
            if getattr(found, name) != getattr(Options, name)
        ]
    ):
        raise UnsupportedError(
            f"{where} has {unread[0]}, which {plain} never reads; leave it away, or serve a calibrated format"
        )
    return found


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
