"""Taking back what an operation did to a cache: page lists, who holds which page, and bytes that it wrote over.

Whoever changes page lists keeps an `Undo` while it does (`Passes.change`), so that errors and interrupts leave the cache as it was before or after it. Taking
back can be interrupted too, and done again from its beginning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .budget import Budget
from .group import GroupState


class Undo:
    """A cache as it was when this was made.

    Args:
        what: the operation, for messages.
        saturated: of every layer, what is counted in passes.

    Attributes:
        before: snapshots of the groups.
        overwritten: pages that held something and were written over since, with the bytes that they had.
        first: called before anything is taken back: ends what still writes into pages.
    """

    def __init__(self, what: str, groups: list[GroupState], budget: Budget | None, saturated: list[dict[str, int]]) -> None:
        self.what, self.thread = what, threading.get_ident()
        self.before = [g.snapshot() for g in groups]
        self.overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.first: Callable[[], None] | None = None
        self._groups, self._budget, self._counted = groups, budget, saturated
        self._given_back = [] if budget is None else budget.given_back[:]
        self._saturated = [dict(s) for s in saturated]

    def take_back(self) -> None:
        """Put everything back."""
        if self.first is not None:
            self.first()
        for page, was in self.overwritten:
            page.copy_(was)
        for g, before in zip(self._groups, self.before, strict=True):
            g.restore(before)
        if self._budget is not None:
            self._budget.given_back[:] = self._given_back
        self._counted[:] = [dict(s) for s in self._saturated]
