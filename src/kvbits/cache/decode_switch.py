"""The choice of who leads single tokens, host or device, made at each of them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CacheStateError, DataError, counted
from ..ops import decode
from .device_decode import DeviceDecode, enter, refuses
from .layer_stores import LayerStores

LOOK_EVERY = 16
"""Tokens between two looks at what pages that closed on the device found."""


class DecodeSwitch:
    """A switch that begins decoding on the device where single tokens come one after the other, and ends it before
    anything else happens to the sequences.

    Args:
        backend: "auto", or the one that every op was forced to.
        saturated: of every layer, added to when the page lists come back: elements of keys and values that were
            clamped.

    Attributes:
        decoding: what decodes on the device, while it does: the page lists of the groups are out of date then
            (`settle`).
        led_by_host: why the last single token was not decoded on the device, or None.
        host_only: why none may be, whatever the layout, or None.
    """

    def __init__(self, stores: LayerStores, backend: str, saturated: list[dict[str, int]]) -> None:
        self._stores, self._groups, self._device, self._backend = stores, stores.groups, stores.device, backend
        self._saturated = saturated
        self.decoding: DeviceDecode | None = None
        self.led_by_host: str | None = None
        self.host_only: str | None = None
        self._refusals: dict[Any, str | None] = {}
        self._single_passes = 0  # passes of one token since anything else was done
        self._served: set[str] = set()  # who served attention on the device
        self._found: DataError | None = None  # what closing found on the device, not yet raised

    def settle(self) -> None:
        """Take the page lists back from the device, if they are there. Waits for the GPU."""
        if self.decoding is not None:
            before = [g.snapshot() for g in self._groups]
            try:
                self._found = self.decoding.settle(self._saturated) or self._found
            except BaseException:  # interrupted: the device has them still
                for g, was in zip(self._groups, before, strict=True):
                    g.restore(was)
                raise
            self.decoding, self._single_passes = None, 0

    def interrupt(self) -> None:
        """Note that something other than single tokens comes."""
        self._single_passes = 0

    def raise_found(self) -> None:
        """Raise what closing found.

        Raises:
            DataError: what closing found on the device, once.
        """
        if self._found is not None:
            found, self._found = self._found, None
            raise found

    def forget_found(self) -> None:
        """Forget what closing found, since the sequences that held bad numbers are gone."""
        self._found = None

    def refuses(self, num_q_heads: int, dtype: torch.dtype) -> str | None:
        """Return why single tokens are run by the host, whatever the sequences hold, or None."""
        if self.host_only is not None:
            return self.host_only
        key = (num_q_heads, dtype)
        if key not in self._refusals:
            self._refusals[key] = refuses(self._stores, self._backend, num_q_heads, dtype)
        return self._refusals[key]

    def expect_tokens(self) -> None:
        """Take the next single token for the beginning of many: decode on the device from it on, not from the third in
        a row.
        """
        self._single_passes = max(self._single_passes, 2)

    def enter(self, q: torch.Tensor, scaling: float, softcap: float | None) -> None:
        """Decode on the device from a token with queries q [B, 1, Hq, D] on, if that can be done: two passes of a token
        in a row are taken for the beginning of many.

        Raises:
            CacheStateError: the step is being captured in a graph, which this cache does not allow.
        """
        if not decode.leads(self._device) or self._found is not None:
            return
        capturing = decode.backend_of(self._device).capturing()
        if (now := self.decoding) is not None:
            if capturing or (now.steps_left and now.key == (q.shape[2], q.dtype, scaling, softcap)):
                return
            self.settle()
            self._single_passes = 2  # on with other pages
        why: str | None = f"{counted(self._single_passes, 'token')} came one by one so far; two must have"
        if self._single_passes >= 2 and q.shape[0] == self._batch_size:
            why = self.refuses(q.shape[2], q.dtype)
            if why is None and not capturing:
                made = enter(self._stores, q.shape[2], q.dtype, scaling, softcap)
                if not isinstance(made, str):
                    self.decoding, self.led_by_host = made, None
                    self._served |= made.explain()
                    return
                why = made
            self.led_by_host = why
        if capturing:
            raise CacheStateError(
                f"a step of this cache cannot be captured in a graph now: {why or 'decode a token first'}"
            )

    def leads(self) -> bool:
        """Return whether the next single token is decoded on the device: pages are assigned for it."""
        now = self.decoding
        return now is not None and (now.steps_left > 0 or decode.backend_of(self._device).capturing())

    def begin(self, valid: torch.Tensor | None) -> DeviceDecode | None:
        """Begin a pass of one token on the device: what carries it out, or None if the host has to (pages assigned
        ahead are used up).

        Args:
            valid: bool [B, 1], False for padding; None for none.

        Raises:
            DataError: `valid` of another shape; what closing found some tokens ago.
            CacheStateError: the step is captured in a graph, but the cache grows.
        """
        if (now := self.decoding) is None:
            return None
        capturing = decode.backend_of(self._device).capturing()
        if capturing and self._groups[0].pools["closed"].fixed_capacity is None:
            raise CacheStateError(
                "a cache that grows assigns pages from the host again and again, so its steps cannot be captured; build"
                " it with max_tokens"
            )
        if not self.leads():
            self.settle()
            return None
        if valid is not None:
            if tuple(valid.shape) != (self._batch_size, 1):
                raise DataError(f"valid has shape {tuple(valid.shape)}, expected {(self._batch_size, 1)}")
            if valid.device.type == "cpu":
                valid = None if bool(valid.all()) else valid.to(self._device)
            elif valid.dtype != torch.bool:
                valid = valid.bool()
        if not capturing and now.steps_taken % LOOK_EVERY == 0 and (found := now.look()) is not None:
            raise found
        now.begin(valid)
        return now

    def host_begins(self, num_tokens: int) -> None:
        """Note that the host leads a pass of `num_tokens` tokens a sequence."""
        self._single_passes = self._single_passes + 1 if num_tokens == 1 else 0

    def count_replays(self, steps: int) -> None:
        """Note replays of a captured step, see `PagedCache.count_replays`."""
        if self.decoding is None:
            raise CacheStateError(
                "no captured step of this cache can be replayed: its pages have been assigned anew since; decode a"
                " token and capture again"
            )
        if self.decoding.steps_taken % LOOK_EVERY + steps >= LOOK_EVERY and (found := self.decoding.look()) is not None:
            raise found
        self.decoding.count(steps)

    def explain(self) -> set[str]:
        """Return who has served attention on the device."""
        return set(self._served)

    @property
    def _batch_size(self) -> int:
        return len(self._groups[0].sequences)
