"""What a GPU knows, without waiting for it."""

from __future__ import annotations

import torch


class Later:
    """Small tensors of a GPU that the host looks at when they have arrived."""

    def __init__(self) -> None:
        self._asked: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def ask(self, x: torch.Tensor) -> torch.Tensor | None:
        """What an earlier call asked for, on the host, if it has arrived by now; `x` is asked for unless another is still on its way."""
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
