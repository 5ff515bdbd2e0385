"""Decoding on a device without its host: what a cache hands over, and what a backend that leads single tokens gives
back.

A backend takes part with a module `decode` in its folder that is a `Backend`. The cache assigns pages ahead and reads
lengths back; structs, launches and streams are the backend's alone.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from ..spec import LayerGroup
from .attend import Attention
from .types import PageStore

BACKENDS = {"cuda": "cuda"}
"""Folder of the backend that leads single tokens, by the type of the device."""
TAIL, CLOSED, FIRST, TAIL_START, LENGTH, READ, FIELDS = range(7)
"""Rows of a group's numbers: tokens in tail pages, tokens in closed pages, index of the ring's first page, position of
the first tail token, tokens, tokens that are read from the closed pages and not from copies.
"""
COPIED, COPY_FIRST, COPY_READ, COPY_START, COPY_FIELDS = range(5)
"""Rows behind them, for each pool of copies: tokens that have a copy there, index of the ring's first page, tokens that
are read from it (the oldest of those), position of the first.
"""


def parts_of(group: LayerGroup) -> tuple[str, ...]:
    """Return the pools of a layer group that decoding reads, in causal order."""
    return ("sink", *(() if group.fills_pages else ("closed", *reversed(group.copy_pools))), "tail")


def row_of_copies(index: int) -> int:
    """Return the first row of a pool of copies among a group's numbers."""
    return FIELDS + index * COPY_FIELDS


@dataclass(frozen=True)
class Pages:
    """The pages of one layer group, handed over with what was assigned ahead.

    Attributes:
        numbers: int32 [rows, B], those above.
        closed_start, sinks, residual: int32 [B]: position of the first closed token, sink tokens, newest tokens that
            stay raw.
        ids: of each part that is there, the pages of every sequence. Copies are in rings, which pages that close go
            round.
        ring: raw pages that each sequence uses in turn; 0 where pages are filled token by token.
        slabs: memory of each part's pages, of all layers.
        stores: of each layer of the group, the pages of each part.
        attention: the plan that reads them, bound to all layers; each step tells it how long the sequences are.
    """

    group: LayerGroup
    numbers: np.ndarray
    closed_start: np.ndarray
    sinks: np.ndarray
    residual: np.ndarray
    ids: dict[str, list[list[int]]]
    ring: int
    slabs: dict[str, list[torch.Tensor]]
    stores: list[dict[str, PageStore]]
    attention: Attention


class Stepper(Protocol):
    """A stepper that leads single tokens of all layer groups on a device, one step after the other, without waiting."""

    def begin(self, valid: torch.Tensor | None) -> None:
        """Move all groups and their plans on by a token: valid bool [B, 1] on the device, None for all."""

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the tokens k, v [B, 1, H, D] of a layer, and quantize the pages that close."""

    def take_back(self, layers: set[int]) -> None:
        """Undo the step that began last, which `layers` have run: rows that fresh tokens replaced, then
        lengths.
        """

    def status(self) -> torch.Tensor:
        """Return int32 [layers of all groups, fields] on the device: saturated elements of keys and values, scales that
        overflowed, numbers that are none.
        """

    def numbers(self) -> list[np.ndarray]:
        """Return int32 [rows, B] of each group as they are now. Waits for the device."""


class Backend(Protocol):
    """The functions that a backend's module `decode` has."""

    def refuses(
        self, groups: list[LayerGroup], num_q_heads: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Return why single tokens of these layer groups cannot be led on the device, whatever their sequences hold, or
        None.
        """

    def capturing(self) -> bool:
        """Return whether launches are recorded now, not run."""

    def stepper(self, groups: list[Pages], dtype: torch.dtype, device: torch.device) -> Stepper:
        """Put what decoding needs on the device."""


def leads(device: torch.device) -> bool:
    """Return whether a backend leads single tokens on such a device."""
    return device.type in BACKENDS


def backend_of(device: torch.device) -> Backend:
    """Return the backend that leads single tokens on a device that one `leads` on."""
    module: Any = importlib.import_module(f"{__package__}.{BACKENDS[device.type]}.decode")
    return cast(Backend, module)
