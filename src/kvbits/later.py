"""Values sent to a GPU and read from it, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def upload(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of `x` on `device`, through pinned memory: a plain copy would wait for all that the GPU has been
    given.
    """
    host = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device, copy=True)


class Later:
    """Small tensors of a GPU that the host looks at when they have arrived."""

    def __init__(self) -> None:
        self._asked: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def ask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the host copy that an earlier call started, if it has arrived; starts a copy of `x` unless one is
        still under way.
        """
        found = None
        if self._asked is not None:
            asked, event = self._asked
            if not event.query():
                return None
            found, self._asked = asked, None
        copy, event = x.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record()
        self._asked = copy, event
        return found


class Findings:
    """Findings of launches on a GPU, read all at once: one wait, however many asked."""

    def __init__(self) -> None:
        self._asked: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []

    def ask(self, found: torch.Tensor, judge: Callable[[list[float]], None]) -> None:
        """Have the numbers of a small tensor, in a row, given to `judge` later.

        It should hold on to nothing large: all are kept until then.
        """
        self._asked.append((found.flatten(), judge))

    def settle(self) -> None:
        """Wait, and let each judge, in the order they asked; what one raises leaves the rest unasked."""
        asked, self._asked = self._asked, []
        numbers: dict[int, torch.Tensor] = {}
        for dtype in {x.dtype for x, _ in asked}:
            of_dtype = [i for i, (x, _) in enumerate(asked) if x.dtype == dtype]
            numbers |= dict(
                zip(
                    of_dtype,
                    torch.cat([asked[i][0] for i in of_dtype]).double().split([len(asked[i][0]) for i in of_dtype]),
                    strict=True,
                )
            )
        if not asked:
            return
        every = iter(torch.cat([numbers[i] for i in range(len(asked))]).tolist())
        for x, judge in asked:
            judge([next(every) for _ in range(len(x))])
