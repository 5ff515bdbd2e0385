"""Pages on their way into a cache whose first layers are used already: who brings them says which layers are there, who
uses a layer waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..errors import CacheStateError
from .reading import Parts, Reading


class Arrivals:
    """The layers of one sequence as they come, the first before the last; at other times, nothing.

    Args:
        num_layers: of the model.
        device: of the pages.

    Attributes:
        under_way: whether there may be layers that are not there yet.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers, self._device = num_layers, device
        self._changed = threading.Condition()
        self._forget()

    def __reduce__(self) -> tuple[type[Arrivals], tuple[int, torch.device]]:
        """Return the parts of a copy, which has nothing on its way."""
        return Arrivals, (self._num_layers, self._device)

    def _forget(self) -> None:
        self.under_way, self._row = False, -1
        # layers that are there, and what a stream has to wait for
        self._came: list[tuple[int, torch.cuda.Event | None]] = []
        self._failure: BaseException | None = None
        self._refused: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, row: int, reading: Reading, parts: Parts, refuse: Callable[[BaseException], BaseException]) -> None:
        """Read the pages of a sequence in a thread.

        Args:
            refuse: makes of what ended it the error that is raised, in the thread that waits.
        """

        def run() -> None:
            try:
                reading.run(parts, self._came_to)
            except BaseException as error:  # whoever waits for the layers raises it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()

        self.under_way, self._row, self._stop, self._refuse = True, row, reading.stop, refuse
        # not a daemon: one that is in the middle of a tensor operation when Python ends would abort the process
        self._thread = threading.Thread(target=run, name="kvbits-loader", daemon=False)
        self._thread.start()

    def _came_to(self, layers: int, event: torch.cuda.Event | None) -> None:
        """Note that the first so many layers are there, once `event` has happened on their device."""
        with self._changed:
            self._came.append((layers, event))
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Wait until the bytes of a layer are checked.

        Copies on their way to a GPU are waited for by its current stream, not by the host.

        Raises:
            FileFormatError: a file is damaged; OSError: it cannot be read. Every later call raises it too: what the
                pages hold cannot be used.
            CacheStateError: the step is captured in a graph.
        """
        if not self.under_way:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CacheStateError(
                "a step cannot be captured in a graph while a prefix is being loaded; load it with wait=True, or decode"
                " a token first"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or (self._came and self._came[-1][0] > layer))
        if self._failure is not None:
            if self._refused is None:
                self._refused = self._refuse(self._failure)
            raise self._refused
        layers, event = next((layers, event) for layers, event in self._came if layers > layer)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        if layers == self._num_layers:  # all are there: they come one after the other
            self._forget()

    def wait_for_all(self) -> None:
        """Wait for the last layer, as `wait` does."""
        self.wait(self._num_layers - 1)

    def forget(self, row: int | None = None) -> None:
        """Abandon the sequence `row` (None: any). Returns when nothing is written to its pages."""
        if not self.under_way or row not in (None, self._row):
            return
        self._stop()
        if self._thread is not None:
            self._thread.join()
        self._forget()
