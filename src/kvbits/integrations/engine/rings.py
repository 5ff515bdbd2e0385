"""Owners of copies: `Rings` tells which request has them.

A pool of copies is a share of the cache's memory (`served.copied_requests`). For each of so many
requests it has a ring of pages in every format (`engine.place`). Rows of a step move when requests come and go, so a
request owns its rings. They have one number, which a step's integers carry to the device.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Hashable, Iterable, Sequence

import numpy as np

from ...errors import counted


def beside_copies(logger: logging.Logger, count: int, most: int, request_bytes: int, memory_bytes: int) -> int:
    """Return the bytes that are left for pages, and say in the log how many requests have copies.

    Args:
        count: of these requests (`served.copied_requests`), of `most` that can run at once.
        request_bytes: of one request's copies in all layers.
        memory_bytes: for the cache, copies included.
    """
    logger.info(
        "copies of up to %d of %s at once: %.2f of %.2f GB for the cache, %.1f MB each; a request without them is read"
        " packed",
        count,
        counted(most, "request"),
        count * request_bytes / 1e9,
        memory_bytes / 1e9,
        request_bytes / 1e6,
    )
    return memory_bytes - count * request_bytes


class Rings:
    """Rings of copies by request, on the host.

    A request gets a ring when it runs and one is free, and keeps it until it ends, so an answer that began with copies
    continues with them. A request that found none free is read packed, and gets the next ring that is given back.

    Args:
        count: requests that have copies at the same time.
        logger: is told how many requests have none, each time that they are more than twice as many.
    """

    def __init__(self, count: int, logger: logging.Logger) -> None:
        self.count = count
        self._logger = logger
        self._of: dict[Hashable, int] = {}
        self._free = list(range(count))[::-1]
        self._most_without = 0

    def of(self, requests: Sequence[Hashable], known: Container[Hashable] | None = None) -> np.ndarray:
        """Return the ring of each request that runs, int32, -1 where it has none.

        Args:
            requests: of a step; None is padding and never has a ring.
            known: requests that the engine still has. Rings of others are freed when one is needed: an engine
                that warms up runs requests whose end it tells nobody.
        """
        new = [r for r in requests if r is not None and r not in self._of]
        if known is not None and len(new) > len(self._free):
            self.end([r for r in self._of if r not in known])
        for request in new:
            if self._free:
                self._of[request] = self._free.pop()
        without = sum(r not in self._of for r in new)
        if without > 2 * self._most_without:
            self._most_without = without
            self._logger.info(
                "copies for %d of %s; others are read packed: raise copies_share, or let fewer run at once",
                len(self._of),
                counted(len(self._of) + without, "running request"),
            )
        return np.array([self._of.get(r, -1) for r in requests], np.int32)

    def end(self, requests: Iterable[Hashable]) -> None:
        """Take the rings of these requests back."""
        for request in requests:
            if (ring := self._of.pop(request, None)) is not None:
                self._free.append(ring)
