"""Options of users for copies and calibrations: `Options`. Each engine has its own way to give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedError, unknown
from ...spec import PageLayout
from .served import COPIED, COPIES_SHARE, PAGE_SIZE, Format, Ring, raw_of

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_RAW = 1024
MOST_SHARE = 0.5


def option(default: Any, what: str, fits: Callable[[Any], bool] = lambda x: True) -> Any:
    """Return a field of `Options`: its values have the default's type and fit, which is what messages call `what`."""
    return dataclasses.field(default=default, metadata={"what": what, "fits": fits})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that both engines take.

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

    raw_newest: int = option(
        0, f"a multiple of {PAGE_SIZE} tokens, 0 to {MOST_RAW}", lambda x: x in range(0, MOST_RAW + 1, PAGE_SIZE)
    )
    raw_first: int = option(0, f"0 or {PAGE_SIZE} tokens, a page", lambda x: x in (0, PAGE_SIZE))
    packed_copies: bool = option(True, "true or false")
    copies_share: float = option(
        COPIES_SHARE,
        f"a number above 0 and up to {MOST_SHARE}, a share of the cache's memory; raw_newest=0 is for no copies",
        lambda x: 0 < x <= MOST_SHARE,
    )
    calibration: str = option("", "the name of a file of `kvbits calibrate`")
    calibrate: bool = option(True, "true or false")

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

    @classmethod
    def checked(cls, given: Any, where: str, copied: int, plain: str = "") -> Self:
        """Return options as a user gave them.

        Args:
            copied: newest tokens that are raw unless users say otherwise, with the first `COPIED`: of calibrated
                formats, and those that name copies. 0: none.
            plain: the format, where nothing in the engine reads a calibration.

        Raises:
            UnsupportedError: unknown or invalid options; `where` says what gave them.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(given, dict):
            raise UnsupportedError(f"{where} is {given!r}; it takes a dict of {', '.join(names)}")
        if strange := [name for name in given if name not in names]:
            raise UnsupportedError(f"{where}: {unknown('option', strange[0], names)}")
        defaults: dict[str, Any] = (
            {"raw_newest": copied, "raw_first": COPIED} if copied and given.get("raw_newest") != 0 else {}
        )
        found = cls(**(defaults | given))
        for f in dataclasses.fields(found):
            value = getattr(found, f.name)
            if type(value) is not type(f.default) or not f.metadata["fits"](value):
                raise UnsupportedError(f"{f.name}={value!r} must be {f.metadata['what']}")
        for name in ("raw_first", "copies_share"):
            if given.get(name) and not found.copies and (plain or "raw_newest" in given):
                raise UnsupportedError(f"{name} without raw_newest; pass raw_newest={PAGE_SIZE} too, or leave it away")
        for name in ("calibration", "calibrate", "packed_copies"):
            if plain and getattr(found, name) != getattr(Options, name):
                raise UnsupportedError(
                    f"{where} has {name}, which {plain} never reads; leave it away, or serve a calibrated format"
                )
        return found
