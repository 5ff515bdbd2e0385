"""Several prompts at a time through one cache, no prompt depending on the others beside it.

Prompts are padded on the left and end together. Passes are cut from that end, `chunk` tokens each, so the first pass of
a prompt holds what is left over: which tokens a pass reads as stored depends on the prompt's own length alone. A
KVCache neither stores nor sees the padding. Transformers' own quantized caches and simulated ones store it like tokens;
they get one prompt at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import DataError
from ..integrations.masks import passed
from .caches import CacheFactory

TEMPERATURE = 0.8
"""Temperature of sampling."""
MOST_ENDED = 1 / 4
"""Share of a batch's rows that may have ended before they leave it. When rows leave, page lists come back from the GPU
and a dense cache is copied, which takes longer than a step with some rows that ended.
"""


class Rows:
    """Sequences of different lengths in one Transformers cache.

    Args:
        cache: a fresh cache.
        prompts: int64 [num_tokens] each.
        chunk: tokens per forward pass.

    Attributes:
        logits: [B, vocabulary] after each prompt's last token.

    Raises:
        DataError: no prompt, or an empty one.
    """

    @torch.no_grad()
    def __init__(self, model: Any, cache: Any, prompts: Sequence[torch.Tensor], chunk: int) -> None:
        if not prompts or not all(len(p) for p in prompts):
            raise DataError(f"{len(prompts)} prompts of {[len(p) for p in prompts]} tokens; each needs at least one")
        self.model, self.cache = model, cache
        # on the host: what is padding is known without waiting for a GPU
        self.mask = torch.zeros(len(prompts), 0, dtype=torch.bool)
        self.logits = self.append(prompts, chunk)

    @torch.no_grad()
    def append(self, texts: Sequence[torch.Tensor], chunk: int) -> torch.Tensor:
        """Return logits [B, vocabulary] after the next tokens of each row, int64 [num_tokens], which end together."""
        length = max(map(len, texts))
        ids = torch.stack([torch.cat([t.new_zeros(length - len(t)), t.cpu()]) for t in texts])
        real = torch.arange(length) >= length - torch.tensor([len(t) for t in texts])[:, None]
        start = 0
        for end in range((length - 1) % chunk + 1, length + 1, chunk):
            logits = self.feed(ids[:, start:end], real[:, start:end])[:, -1]
            start = end
        return logits

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, real: torch.Tensor | None = None, *, keep: int = 1) -> torch.Tensor:
        """Return logits [B, keep, vocabulary] of the last `keep` of the next tokens `ids` [B, T]; `real` [B, T] is
        False for padding.
        """
        self.mask = torch.cat([self.mask, torch.ones_like(ids, dtype=torch.bool) if real is None else real], 1)
        how: dict[str, Any] = {}
        if not bool(self.mask.all()):
            positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            how = {
                "attention_mask": self.mask.to(self.model.device, torch.int64),
                "position_ids": positions.to(self.model.device),
            }
        logits: torch.Tensor = self.model(
            ids.to(self.model.device), **passed(self.model, self.cache), use_cache=True, logits_to_keep=keep, **how
        ).logits
        return logits

    def select(self, rows: list[int]) -> None:
        """Make row i the old row rows[i]; a row may come several times."""
        if rows != list(range(len(self.mask))):
            self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
            self.mask = self.mask[rows]


def together(f: CacheFactory, count: int) -> list[slice]:
    """Return slices of `count` prompts that may share a cache of this kind. All prompts share one slice, or each prompt
    has its own where a cache stores padding.
    """
    return [slice(i, i + 1) for i in range(count)] if f.stores_padding else [slice(0, count)]


def sampled(logits: torch.Tensor, draws: Sequence[random.Random]) -> list[int]:
    """Return a token for each row of logits [B, vocabulary], sampled at `TEMPERATURE` with one random number of its
    row's: caches of like odds draw alike.
    """
    odds = torch.softmax(logits.float() / TEMPERATURE, -1).double().cumsum(-1)
    at = torch.tensor([[rng.random()] for rng in draws], dtype=torch.float64, device=odds.device) * odds[:, -1:]
    return list(torch.searchsorted(odds, at, right=True).clamp(max=odds.shape[1] - 1)[:, 0].tolist())


def generate(
    model: Any,
    f: CacheFactory,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    chunk: int,
    stop: Callable[[list[int]], bool] = lambda tokens: False,
    draws: Sequence[random.Random] | None = None,
) -> list[list[int]]:
    """Return tokens after each prompt, until `stop` says so of what came so far or `new_tokens` came.

    Rows that ended leave the batch once they are more than `MOST_ENDED` of it.

    Args:
        draws: random numbers of each prompt's tokens, which are sampled with them (`sampled`); greedy, if not given.
    """
    found: list[list[int]] = []
    for some in together(f, len(prompts)):
        mine = prompts[some]
        cache = f.make(len(mine), max(map(len, mine)) + new_tokens)
        rows = Rows(model, cache, mine, chunk)
        found += _written(rows, rows.logits, new_tokens, stop, None if draws is None else draws[some])
    return found


def generate_forked(
    model: Any,
    f: CacheFactory,
    prompts: Sequence[torch.Tensor],
    continuations: Sequence[Sequence[torch.Tensor]],
    new_tokens: int,
    chunk: int,
    stop: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[list[list[int]]]:
    """Return greedy tokens after each continuation of each prompt, as `generate` of a prompt and a continuation.

    A prompt is fed once, and its sequence forked: continuations read it as stored. Caches that store padding get each
    prompt again for each continuation.

    Args:
        continuations: int64 [num_tokens] each, at least one for each prompt.
    """
    pairs = [(b, c) for b, some in enumerate(continuations) for c in some]
    found: list[list[list[int]]] = [[] for _ in prompts]
    if f.stores_padding:
        for b, c in pairs:
            cache = f.make(1, len(prompts[b]) + len(c) + new_tokens)
            rows = Rows(model, cache, [prompts[b]], chunk)
            found[b] += _written(rows, rows.append([c], chunk), new_tokens, stop)
        return found
    rows = Rows(model, f.make(None, None), prompts, chunk)
    rows.select([b for b, _ in pairs])
    written = _written(rows, rows.append([c for _, c in pairs], chunk), new_tokens, stop)
    for (b, _), tokens in zip(pairs, written, strict=True):
        found[b].append(tokens)
    return found


def _written(
    rows: Rows,
    logits: torch.Tensor,
    new_tokens: int,
    stop: Callable[[list[int]], bool],
    draws: Sequence[random.Random] | None = None,
) -> list[list[int]]:
    """Return the tokens that each row writes after `logits` [B, vocabulary]; arguments as those of `generate`."""
    found: list[list[int]] = [[] for _ in logits]
    held = list(range(len(logits)))  # the text that each row of the cache writes
    live = set(held)
    while live:
        tokens = logits.argmax(-1).tolist() if draws is None else sampled(logits, [draws[i] for i in held])
        for i, token in zip(held, tokens, strict=True):
            if i in live:
                found[i].append(token)
        live = {i for i in live if len(found[i]) < new_tokens and not stop(found[i])}
        if live:
            if len(live) < (1 - MOST_ENDED) * len(held):
                kept = [row for row, i in enumerate(held) if i in live]
                rows.select(kept)
                held, tokens = [held[row] for row in kept], [tokens[row] for row in kept]
            logits = rows.feed(torch.tensor(tokens)[:, None])[:, -1]
    return found


def score(
    model: Any,
    f: CacheFactory,
    prompts: Sequence[torch.Tensor],
    continuations: Sequence[Sequence[torch.Tensor]],
    chunk: int,
) -> list[list[tuple[float, bool]]]:
    """Return log-likelihood, in nats, of each continuation of each prompt, and whether greedy decoding would have
    written it.

    A prompt is fed once, and its sequence forked for continuations of more than one token. Prompts of very different
    lengths do not wait for each other (see `alike`): padding costs a model as much as tokens do.

    Args:
        continuations: int64 [num_tokens] each, for each prompt.
    """
    if f.stores_padding:  # nor can it be forked
        return [
            [_score(model, f.make(1, len(p) + len(c)), [p], [[c]], chunk)[0][0] for c in some]
            for p, some in zip(prompts, continuations, strict=True)
        ]
    found: list[list[tuple[float, bool]]] = [[] for _ in prompts]
    for group in alike([len(p) for p in prompts], chunk):
        scores = _score(
            model, f.make(None, None), [prompts[i] for i in group], [continuations[i] for i in group], chunk
        )
        for i, mine in zip(group, scores, strict=True):
            found[i] = mine
    return found


def alike(lengths: Sequence[int], chunk: int) -> list[list[int]]:
    """Return indices of prompts that go through a cache together, shortest first: none takes more than twice the passes
    of `chunk` tokens of another in its group.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and -(-lengths[i] // chunk) <= 2 * -(-lengths[groups[-1][0]] // chunk):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def follow(
    model: Any,
    f: CacheFactory,
    prompts: Sequence[torch.Tensor],
    texts: Sequence[Sequence[int]],
    chunk: int,
    *,
    text_chunk: int | None = None,
) -> list[list[int]]:
    """Return the token that a cache would write in the place of each of `texts`, which follow the prompts.

    Texts are fed as they are (teacher forcing), in passes of `chunk` tokens: what a cache would have written
    differently changes nothing after it.

    Args:
        text_chunk: tokens of a pass of the texts; as many as of one of the prompts, if not given.
    """
    chunk_of_text = chunk if text_chunk is None else text_chunk
    found: list[list[int]] = []
    for some in together(f, len(prompts)):
        longest = max(map(len, texts[some]))
        # whole passes: none of one token, which would read the page that it closes, depends on the batch
        longest += -(longest - 1) % chunk_of_text
        given = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts[some]])
        rows = Rows(model, f.make(len(given), max(map(len, prompts[some])) + longest), prompts[some], chunk)
        chosen = [rows.logits.argmax(-1, keepdim=True)]
        for piece in given[:, :-1].split(chunk_of_text, 1):
            chosen.append(rows.feed(piece, keep=piece.shape[1]).argmax(-1))
        found += [
            row[: len(text)]
            for row, text in zip(torch.cat([c.cpu() for c in chosen], 1).tolist(), texts[some], strict=True)
        ]
    return found


def _score(
    model: Any, cache: Any, prompts: Sequence[torch.Tensor], continuations: Sequence[Sequence[torch.Tensor]], chunk: int
) -> list[list[tuple[float, bool]]]:
    rows = Rows(model, cache, prompts, chunk)
    first = torch.log_softmax(rows.logits.float(), -1)
    found = [[_of(first[b, None], c[:1]) for c in some] for b, some in enumerate(continuations)]
    longer = [(b, i) for b, some in enumerate(continuations) for i, c in enumerate(some) if len(c) > 1]
    if not longer:
        return found
    rows.select([b for b, _ in longer])
    rest = [continuations[b][i].cpu() for b, i in longer]
    length = max(map(len, rest)) - 1
    # one token alone would read the page that it closes, several read it raw: scores would depend on the batch
    length += length % chunk == 1
    ids = torch.stack([torch.cat([c[:-1], c.new_zeros(length - len(c) + 1)]) for c in rest])
    real = torch.arange(length) < torch.tensor([len(c) - 1 for c in rest])[:, None]
    for start in range(0, length, chunk):
        piece = slice(start, start + chunk)
        logits = rows.feed(ids[:, piece], real[:, piece], keep=min(chunk, length - start))
        for (b, i), row, c in zip(longer, logits, rest, strict=True):
            targets = c[1:][piece]
            if len(targets):
                here = _of(torch.log_softmax(row[: len(targets)].float(), -1), targets)
                found[b][i] = (found[b][i][0] + here[0], found[b][i][1] and here[1])
    return found


def _of(log_p: torch.Tensor, targets: torch.Tensor) -> tuple[float, bool]:
    """Return (sum of log-probabilities, all the most likely) of targets [n] under log_p [n, vocabulary]."""
    targets = targets.to(log_p.device)
    return float(log_p.gather(1, targets[:, None]).double().sum()), bool((log_p.argmax(-1) == targets).all())
