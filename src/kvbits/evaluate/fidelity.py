"""What a cache costs in accuracy, measured against the 16-bit cache on the same tokens through the real packed cache.

Text is fed in chunks, so every chunk attends to history as the cache stores it (chunk 1 is pure decoding). Per scored token:

    perplexity = exp(mean(-log p(token)))
    KL         = sum_v p16(v) (log p16(v) - log p(v))            nats
    TVD        = 1/2 sum_v |p16(v) - p(v)|                       share of probability mass that moved
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import DataError


@dataclass
class Fidelity:
    """Sums over scored tokens of one cache; `kl` and `tvd` hold one value per token."""

    nll: float = 0.0
    num_tokens: int = 0
    top1_same: int = 0
    seconds: float = 0.0
    num_timed: int = 0
    kl: list[float] = field(default_factory=list)
    tvd: list[float] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    @property
    def kl_mean(self) -> float:
        """Nats."""
        return sum(self.kl) / len(self.kl)

    @property
    def kl_p99(self) -> float:
        """Nats; 99th percentile over tokens."""
        return torch.tensor(self.kl).quantile(0.99).item()

    @property
    def tvd_mean(self) -> float:
        return sum(self.tvd) / len(self.tvd)

    @property
    def top1_agreement(self) -> float:
        """Share of tokens whose most likely successor is the 16-bit cache's."""
        return self.top1_same / self.num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens fed after the first piece, per second of model time."""
        return self.num_timed / self.seconds if self.seconds else math.nan


@torch.no_grad()
def compare(
    model: Any,
    caches: dict[str, Any],
    ids: torch.Tensor,
    *,
    first: int,
    chunk: int,
    results: dict[str, Fidelity] | None = None,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> dict[str, Fidelity]:
    """Feed one text through several caches side by side and compare every prediction with the first cache's.

    Args:
        caches: name -> fresh Transformers cache; the first is the reference (a stock 16-bit cache).
        ids: int64 [num_tokens].
        first: tokens fed at once before anything is scored; 0 scores from the second token on.
        chunk: tokens per forward pass after that.
        results: earlier results to add to.
        on_tokens: called with the number of tokens that were fed to all caches.

    Raises:
        DataError: fewer than two tokens, or nothing left to score.
    """
    if ids.ndim != 1 or len(ids) < max(first, 1) + 1:
        raise DataError(f"{tuple(ids.shape)} token ids leave nothing to score after a prefix of {max(first, 1)} tokens; pass a longer text")
    ids = ids.to(model.device)
    results = {name: Fidelity() for name in caches} if results is None else results
    starts = [0, *range(first, len(ids) - 1, chunk)] if first else [*range(0, len(ids) - 1, chunk)]
    for start in starts:
        prefix = bool(first) and start == 0
        end = first if prefix else min(start + chunk, len(ids) - 1)  # nothing comes after the last token
        targets = ids[end : end + 1] if prefix else ids[start + 1 : end + 1]
        reference = None
        for name, cache in caches.items():
            began = time.perf_counter()
            logits = model(ids[None, start:end], past_key_values=cache, use_cache=True, logits_to_keep=len(targets)).logits[0]
            if not prefix:
                results[name].seconds += time.perf_counter() - began
                results[name].num_timed += end - start
            log_p = torch.log_softmax(logits.float(), -1)
            reference = log_p if reference is None else reference
            _score(results[name], log_p, reference, targets)
        on_tokens(end - start)
    return results


def compare_windows(
    model: Any,
    caches: Callable[[], dict[str, Any]],
    ids: torch.Tensor,
    *,
    windows: int,
    length: int,
    chunk: int,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> dict[str, Fidelity]:
    """`compare` over the first `windows` windows of `length` tokens of a text, each with fresh caches, added up.

    Args:
        caches: makes a fresh set, the 16-bit reference first.
        chunk: tokens per forward pass; history older than the chunk is read as stored.

    Raises:
        DataError: the text is too short.
    """
    if len(ids) < windows * length:
        raise DataError(f"the text has {len(ids)} tokens, but {windows} windows of {length} need {windows * length}")
    results: dict[str, Fidelity] | None = None
    for w in range(windows):
        fresh = caches()
        results = compare(model, fresh, ids[w * length : (w + 1) * length], first=0, chunk=chunk, results=results, on_tokens=on_tokens)
    if results is None:
        raise DataError(f"windows={windows}: at least one is needed")
    return results


def _score(result: Fidelity, log_p: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
    """Add the scores of `targets` [n] under log-probabilities [n, vocabulary]."""
    result.nll -= log_p.gather(1, targets[:, None]).sum().item()
    result.num_tokens += len(targets)
    result.top1_same += int((log_p.argmax(-1) == reference.argmax(-1)).sum())
    p, p_reference = log_p.exp(), reference.exp()
    result.kl += (p_reference * (reference - log_p)).sum(-1).clamp(min=0).tolist()
    result.tvd += ((p_reference - p).abs().sum(-1) / 2).tolist()
