"""A fixed capacity: checked, and its pools allocated; or pools that grow."""

from __future__ import annotations

import torch

from ..errors import CacheError, SpecError
from ..spec import CacheSpec
from ..units import parse_tokens
from . import explain
from .group import GroupState
from .pool import Pool


def checked(batch_size: int | None, max_tokens: int | str | None) -> tuple[int | None, int | None]:
    """Return sequences, and tokens of each, that a capacity is for: one sequence where only tokens are given, None each
    for a cache that grows.

    Raises:
        SpecError: a batch size without tokens, or one of them is not a whole number of at least 1.
    """
    if isinstance(max_tokens, str):
        max_tokens = parse_tokens(max_tokens, "max_tokens")
    if max_tokens is None and batch_size is not None:
        raise SpecError(
            f"batch_size={batch_size} fixes nothing without max_tokens, the tokens of each sequence; give both, or"
            " neither: the cache grows"
        )
    if max_tokens is not None and batch_size is None:
        batch_size = 1
    for name, n in (("batch_size", batch_size), ("max_tokens", max_tokens)):
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise SpecError(
                f"{name}={n!r} must be a whole number of at least 1"
                + (", or a text like '8k'" * (name == "max_tokens"))
            )
    return batch_size, max_tokens


def allocate(spec: CacheSpec, batch_size: int | None, max_tokens: int | None, device: torch.device) -> list[GroupState]:
    """Return every layer group of `spec` with its pools: of `max_tokens` tokens for each of `batch_size` sequences, or
    empty ones that grow.

    Raises:
        CacheError: the device has no memory for it; the message says how much that is.
    """
    groups = []
    try:
        for group in spec.groups:
            wanted = (
                None
                if max_tokens is None or batch_size is None
                else {p: n * batch_size for p, n in group.pages_for(max_tokens).items()}
            )
            pools = {name: Pool(group, name, None if wanted is None else wanted[name], device) for name in group.pools}
            groups.append(GroupState(group, pools))
    # sizes that no memory has, in the words of who was asked
    except (MemoryError, OSError, OverflowError, RuntimeError, TypeError) as error:
        if max_tokens is None or batch_size is None:
            raise
        raise CacheError(explain.no_memory(spec, batch_size, max_tokens, device, error)) from error
    return groups
