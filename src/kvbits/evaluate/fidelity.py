"""Measurement of what a cache costs in accuracy. The reference is the 16-bit cache on the same tokens. Measurements go
through the real packed cache.

Text is fed in chunks, so every chunk attends to history as the cache stores it (chunk 1 is pure decoding). A chunk's
own tokens are exact, so a long chunk flatters a cache (see `DECODING_CHUNK`). Per scored token:

    perplexity = exp(mean(-log p(token)))
    KL         = sum_v p16(v) (log p16(v) - log p(v))            nats
    TVD        = 1/2 sum_v |p16(v) - p(v)|                       share of probability mass that moved
    dp         = p(token) - p16(token)                           change of the probability of the token that comes next

Over tokens, the median and the 99.9th percentile of KL, the share of equal top tokens and the root mean square of dp
are the statistics of llama.cpp's `llama-perplexity --kl-divergence` ("Median KLD", "99.9% KLD", "Same top p", "RMS
dp"). That tool scores the second half of each window alone, and its stored reference is rounded to 16 bits.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import DataError, counted
from ..integrations.masks import name_for
from ..spec import CacheSpec

DECODING_CHUNK = 16
"""Tokens of a pass that reads much as decoding does: few tokens are its own, which are exact, and it begins at every
quarter of a page of 64. A pass of 128 always begins where the same tokens wait for their page to fill, and reads up to
127 of its own: klt3 and klt2 then show two thirds of their KL (docs/results/evaluation.md).
"""
LOST = 1.0
"""Nats of KL from which on a prediction is a different one: a mean hides few of them."""
KL_QUANTILES = {"kl_median": 0.5, "kl_p99": 0.99, "kl_p999": 0.999}
"""Figures of a summary, with the share of tokens whose KL is at most that."""
BINS_PER_OCTAVE = 32
"""Resolution of a stored KL histogram: 2.2 % of the value."""
PROBED = 4
"""Passes that are timed to say how long a command takes."""
DRIFT_FROM = 512
"""First position of the first octave that `drift` looks at: before it most of what is read is still raw."""


_PER_TOKEN = ("nlls", "kl", "tvd", "dp", "same")
"""Scores of a token."""


@dataclass
class Fidelity:
    """Scored tokens of one cache: `nlls`, `kl`, `tvd` and `dp` hold one value per token, `same` whether its most likely
    token is the 16-bit cache's, `places` the number of its text and its position there.
    """

    seconds: float = 0.0
    num_timed: int = 0
    nlls: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    tvd: list[float] = field(default_factory=list)
    dp: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    num_texts: int = 0

    def add(
        self, log_p: torch.Tensor, reference: torch.Tensor, p_reference: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """Add the scores of tokens, all but their places.

        Args:
            log_p: log-probabilities float32 [n, vocabulary]; overwritten, unless they are `reference` itself.
            reference: the 16-bit cache's.
            p_reference: the same as probabilities.
            targets: int64 [n], the tokens that come next.
        """
        own = log_p.gather(1, targets[:, None])[:, 0]
        self.nlls += (-own).tolist()
        if log_p is reference:
            self.same += [True] * len(targets)
            for values in (self.kl, self.tvd, self.dp):
                values += [0.0] * len(targets)
            return
        self.same += (log_p.argmax(-1) == reference.argmax(-1)).tolist()
        self.kl += divergence(log_p, reference, p_reference).tolist()
        self.dp += (own.exp() - p_reference.gather(1, targets[:, None])[:, 0]).tolist()
        self.tvd += ((p_reference - log_p.exp_()).abs_().sum(-1) / 2).tolist()

    @property
    def num_tokens(self) -> int:
        return len(self.nlls)

    @property
    def nll(self) -> float:
        """Nats; a sum."""
        return math.fsum(self.nlls)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    @property
    def kl_mean(self) -> float:
        """Nats."""
        return sum(self.kl) / len(self.kl)

    def kl_quantile(self, q: float) -> float:
        """Return nats: the `q` quantile over tokens, between two of them by a straight line."""
        return torch.tensor(self.kl).quantile(q).item()

    @property
    def dp_rms(self) -> float:
        """Root mean square of `dp`, a share of 1."""
        return math.sqrt(math.fsum(v * v for v in self.dp) / self.num_tokens)

    @property
    def kl_max(self) -> float:
        """Nats; of the worst token."""
        return max(self.kl)

    @property
    def kl_worst(self) -> tuple[int, int]:
        """(number of the text, position in it) of the token that was predicted worst, both from 0."""
        return self.places[self.kl.index(self.kl_max)]

    @property
    def num_lost(self) -> int:
        """Tokens whose KL is above `LOST`."""
        return sum(v > LOST for v in self.kl)

    @property
    def tvd_mean(self) -> float:
        return sum(self.tvd) / len(self.tvd)

    @property
    def top1_agreement(self) -> float:
        """Share of tokens whose most likely successor is the 16-bit cache's."""
        return sum(self.same) / self.num_tokens

    def texts(self) -> list[Fidelity]:
        """Return the figures of each text alone. Each text gets an equal share of the time."""
        found = [
            Fidelity(self.seconds / self.num_texts, self.num_timed // self.num_texts, num_texts=1)
            for _ in range(self.num_texts)
        ]
        for values in zip(*(getattr(self, name) for name in _PER_TOKEN), self.places, strict=True):
            *scores, (text, at) = values
            for name, score in zip(_PER_TOKEN, scores, strict=True):
                getattr(found[text], name).append(score)
            found[text].places.append((0, at))
        return found

    def since(self, first: int) -> Fidelity:
        """Return its tokens at positions from `first` on."""
        kept = [i for i, (_, at) in enumerate(self.places) if at >= first]
        parts = {name: [getattr(self, name)[i] for i in kept] for name in (*_PER_TOKEN, "places")}
        return Fidelity(self.seconds, self.num_timed, num_texts=self.num_texts, **parts)

    def record(self, start: int = 0) -> dict[str, Any]:
        """Return JSON data of one text that adds up over windows.

        It has sums, the worst token's KL and position, tokens above 1 nat, and sums by octave of position. It has the
        position of the first token whose most likely one flipped, or the end of the text. In its histogram of KL, bin b
        holds 2**(b/32) <= KL < 2**((b+1)/32) nats, and "zero" is KL 0.

        Args:
            start: tokens that were stored before the text: its first one has this position.
        """
        positions = [start + p for _, p in self.places]
        return {
            "nll": self.nll,
            "num_tokens": self.num_tokens,
            "top1_same": sum(self.same),
            "seconds": self.seconds,
            "num_timed": self.num_timed,
            "kl": math.fsum(self.kl),
            "kl_max": self.kl_max,
            "kl_worst": start + self.kl_worst[1],
            "kl_lost": self.num_lost,
            "first_flip": next(
                (p for p, same in zip(positions, self.same, strict=True) if not same), positions[-1] + 1
            ),
            "tvd": math.fsum(self.tvd),
            "dp_squares": math.fsum(v * v for v in self.dp),
            "octaves": octaves(positions, self.kl, self.same),
            "kl_histogram": histogram(self.kl),
        }


def octaves(positions: list[int], kl: list[float], same: list[bool]) -> dict[str, dict[str, float]]:
    """Return sums over tokens by octave of position (from 1), named by its first: "1024" holds 1,024 to 2,047.

    Tokens, nats, flips of the most likely token, tokens above `LOST`, the largest KL.
    """
    found: dict[str, dict[str, float]] = {}
    for p, nats, kept in zip(positions, kl, same, strict=True):
        one = found.setdefault(
            str(1 << (p.bit_length() - 1)), {"tokens": 0, "kl": 0.0, "flips": 0, "lost": 0, "kl_max": 0.0}
        )
        one["tokens"] += 1
        one["kl"] += nats
        one["flips"] += not kept
        one["lost"] += nats > LOST
        one["kl_max"] = max(one["kl_max"], nats)
    return found


def drift(kl_mean: dict[str, tuple[int, float]]) -> float | None:
    """Return KL's growth when the position doubles (0.1: 10 %), from position `DRIFT_FROM` on: least squares of the
    logarithm over octaves, weighted by tokens. None with fewer than two octaves, or where KL is 0.

    Args:
        kl_mean: first position of an octave -> (tokens, mean KL).
    """
    known = [(math.log2(int(at)), n, kl) for at, (n, kl) in kl_mean.items() if int(at) >= DRIFT_FROM]
    if len(known) < 2 or min(kl for *_, kl in known) <= 0:
        return None
    total = sum(n for _, n, _ in known)
    x = sum(n * at for at, n, _ in known) / total
    slope = sum(n * (at - x) * math.log2(kl) for at, n, kl in known) / sum(n * (at - x) ** 2 for at, n, _ in known)
    return 2.0**slope - 1


def histogram(values: list[float]) -> dict[str, int]:
    """Return counts by logarithmic bin of width 2**(1/32).

    Raises:
        DataError: NaN or infinity.
    """
    if wrong := [v for v in values if not math.isfinite(v)]:
        raise DataError(
            f"KL of {counted(len(wrong), 'token')} is {wrong[0]}: the model's predictions overflow or are not numbers;"
            " load it in bfloat16 or float32, or leave out the cache that ends so"
        )
    counts: dict[str, int] = {}
    for v in values:
        name = "zero" if v <= 0 else str(math.floor(BINS_PER_OCTAVE * math.log2(v)))
        counts[name] = counts.get(name, 0) + 1
    return counts


def histogram_quantile(counts: dict[str, int], q: float) -> float:
    """Return the quantile of what was counted, between two values by a straight line. Each value is the middle of its
    bin (1.1 % off at most).

    Raises:
        DataError: nothing was counted.
    """
    if not (total := sum(counts.values())):
        raise DataError("the quantile of an empty histogram; score at least one token")
    ordered = sorted((-math.inf if name == "zero" else int(name), n) for name, n in counts.items())
    ends = list(itertools.accumulate(n for _, n in ordered))

    def value(rank: int) -> float:
        b = ordered[bisect.bisect_right(ends, rank)][0]
        return 0.0 if b == -math.inf else 2.0 ** ((b + 0.5) / BINS_PER_OCTAVE)

    rank = q * (total - 1)
    below, above = value(math.floor(rank)), value(math.ceil(rank))
    return below + (rank - math.floor(rank)) * (above - below)


@torch.no_grad()
def prefill(
    model: Any, caches: dict[str, Any], ids: torch.Tensor, chunk: int, on_tokens: Callable[[int], None] = lambda n: None
) -> None:
    """Feed ids [batch, num_tokens] to every cache in chunks, and score nothing."""
    argument = name_for(model)
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk].to(model.device)
        for cache in caches.values():
            model(piece, **{argument: cache}, use_cache=True, logits_to_keep=1)
        on_tokens(piece.shape[1])


@torch.no_grad()
def compare(
    model: Any,
    caches: dict[str, Any],
    ids: torch.Tensor,
    *,
    chunk: int,
    results: dict[str, Fidelity] | None = None,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> dict[str, Fidelity]:
    """Feed one text through several caches side by side and compare every prediction with the first cache's.

    Args:
        caches: name -> Transformers cache, fresh or with what `prefill` fed; the first is the reference (a stock 16-bit
            cache).
        ids: int64 [num_tokens], or [batch, num_tokens]: texts that are fed together and scored each on its own, from
            the second token on.
        chunk: tokens per forward pass.
        results: earlier results to add to.
        on_tokens: called with the number of tokens (of one text) that were fed to all caches.

    Raises:
        DataError: fewer than two tokens.
    """
    if ids.ndim not in (1, 2) or ids.shape[-1] < 2:
        raise DataError(f"{tuple(ids.shape)} token ids leave nothing to score; pass a longer text")
    ids = (ids if ids.ndim == 2 else ids[None]).to(model.device)
    length, argument = ids.shape[1], name_for(model)
    results = {name: Fidelity() for name in caches} if results is None else results
    for start in range(0, length - 1, chunk):
        end = min(start + chunk, length - 1)  # nothing comes after the last token
        targets = ids[:, start + 1 : end + 1]
        reference = p_reference = None
        for name, cache in caches.items():
            result, began = results[name], _now(model)
            logits = model(ids[:, start:end], **{argument: cache}, use_cache=True, logits_to_keep=end - start).logits
            result.seconds += _now(model) - began
            result.num_timed += targets.numel()
            log_p = torch.log_softmax(logits.flatten(0, 1).float(), -1)
            if reference is None or p_reference is None:
                reference, p_reference = log_p, log_p.exp()
            result.add(log_p, reference, p_reference, targets.flatten())
            n = result.num_texts
            result.places += [(n + row, p) for row in range(len(ids)) for p in range(start + 1, end + 1)]
        on_tokens(end - start)
    for result in results.values():
        result.num_texts += len(ids)
    return results


def seconds_per_token(model: Any, cache: Any, ids: torch.Tensor, chunk: int) -> float:
    """Measure the time of passes of a text [num_tokens] of at least two through a fresh cache, at most `PROBED` of them
    behind one that warms up.
    """
    ids = ids[: (PROBED + 1) * chunk + 1]
    first = min(chunk, len(ids) - 2)
    prefill(model, {"": cache}, ids[None, :first], chunk)
    timed = compare(model, {"": cache}, ids[first:], chunk=chunk)[""]
    return timed.seconds / timed.num_timed


def read_raw(spec: CacheSpec, length: int, *, chunk: int, start: int = 0, since: int = 0) -> float:
    """Return the share of the tokens that attention read at 16 bits: sinks, newest tokens, unfinished pages, a chunk's
    own tokens.

    A mean over the tokens fed, and over layers; keys and values count half each.

    Args:
        length: tokens of the text. The last one is not fed (see `compare`).
        chunk: tokens per forward pass.
        start: tokens stored before, in whatever passes; they read nothing here.
        since: the first token that counts, where it is not that of the first pass.
    """
    fed = range(max(start, since), length - 1)
    shares, weights = [], []
    for g in spec.groups:
        packed = ((not g.key.is_raw) + (not g.value.is_raw)) / 2
        total = 0.0
        for p in fed:
            before = start + (p - start) // chunk * chunk
            # one token reads its pages as they are once it is stored, several as they were before
            alone = min(chunk, length - 1 - before) == 1
            stored = p + 1 if alone else before
            end = stored if g.token_local else g.num_sink_tokens + g.closed_after(stored) * g.page_size
            begin = max(g.num_sink_tokens, seen := g.first_visible(p))
            total += 1 - packed * max(0, end - begin) / (p + 1 - seen)
        shares.append(total / len(fed))
        weights.append(len(g.layers))
    return sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights)


def divergence(log_p: torch.Tensor, reference: torch.Tensor, p_reference: torch.Tensor) -> torch.Tensor:
    """Return KL of each token, nats: of log-probabilities [n, vocabulary] against the reference's, and these as
    probabilities.
    """
    return (p_reference * (reference - log_p)).sum(-1).clamp(min=0)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
