"""Drafts of n-grams as chains: causal attention verifies them without a mask, and accepted ones stay where they were
stored.

SGLang asks its corpus for a tree, even with a breadth of 1: what follows shorter contexts branches off at the root, and
where drafts are too few, zeros hang at the root. Verified is its longest path.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocation import get_last_loc_torch

from .options import format_of


def chains(drafts: np.ndarray, mask: np.ndarray, num_drafts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the longest paths of trees, with zeros behind them, and the mask of such chains.

    Args:
        drafts: int [requests * num_drafts], a node behind those that it follows.
        mask: int [requests * num_drafts * num_drafts]: whether node i follows node j, or is it.
    """
    found = np.zeros_like(drafts).reshape(-1, num_drafts)
    for chain, tokens, above in zip(
        found, drafts.reshape(-1, num_drafts), mask.reshape(-1, num_drafts, num_drafts), strict=True
    ):
        path = tokens[above[above.sum(1).argmax()] > 0]
        chain[: len(path)] = path
    return found.ravel(), np.tile(np.tri(num_drafts, dtype=mask.dtype).ravel(), len(found))


@functools.cache
def _of_chains(worker: Any) -> type:
    def prepare(self: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        drafts, mask = worker._prepare_draft_tokens(self, batch)
        return chains(drafts, mask, self.draft_token_num)

    return type(worker.__name__, (worker,), {"_prepare_draft_tokens": prepare})


def worker_class(original: Any, algorithm: Any, server_args: Any) -> type:
    """Wrap `SpeculativeAlgorithm.create_worker`."""
    found = original(algorithm, server_args)
    return found if format_of(server_args) is None else _of_chains(found)


def last_loc(original: Any, table: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    """Wrap `get_last_loc`, which runs Triton on CPUs too, for backends of names it does not know."""
    return (get_last_loc_torch if table.device.type == "cpu" else original)(table, *rows)
