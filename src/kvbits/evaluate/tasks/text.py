"""Perplexity and token-level fidelity over windows of texts: chunked prefill (`fidelity`) and pure decoding (`decode`).

`fidelity` feeds whole windows in short chunks: every chunk attends to history as stored, much as decoding does.
`decode` prefills `context` tokens in chunks and then feeds `new_tokens` single tokens, which is what a user waits for:
its tokens per second are measured with the caches taking turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ...errors import SpecError
from ...integrations.huggingface import KVCache
from ...integrations.masks import name_for
from ..caches import CacheFactory, held_bytes
from ..fidelity import DECODING_CHUNK, compare, drift, histogram_quantile, read_raw
from ..texts import spread_windows
from . import Context, Record, Task

SPREAD = {"windows": "spread"}
"""The setting that says which windows of a text: those of `texts.spread_windows`.

Files of before have none: their windows are a text's first.
"""


class FidelityTask(Task):
    """Windows of text in chunks."""

    name: ClassVar[str] = "fidelity"
    relative: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    usual_batch: ClassVar[int] = 1
    usual_chunk: ClassVar[int] = DECODING_CHUNK
    scores_texts: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if self._passes < 2:
            raise SpecError(
                f"windows of {self._length} tokens in passes of {self.chunk} read nothing as stored; take --chunk below"
                " --length"
            )
        self._windows: dict[str, torch.Tensor] = {}
        limit = context.max_context
        for text in context.texts:
            found = spread_windows(
                context.tokenizer, text, count=context.options.windows, length=self._length, limit=limit
            )
            self._windows |= {f"{text.name}@{text.sha256[:8]}:{i}": ids for i, ids in found.items()}

    @property
    def _length(self) -> int:
        return self.context.options.length

    @property
    def _stored(self) -> int:
        """Tokens of a window that are stored before any is scored."""
        return 0

    def _first(self, key: str) -> int:
        """The first position behind these that is scored."""
        return 1

    @property
    def _passes(self) -> int:
        """Forward passes of a window; every one but the first attends to stored tokens."""
        return -(-(self._length - 1) // self.chunk)

    @property
    def settings(self) -> dict[str, Any]:
        return {"length": self._length, "chunk": self.chunk} | SPREAD

    def item_keys(self) -> list[str]:
        return list(self._windows)

    def size(self, key: str) -> int:
        return self._length

    def run_batch(
        self, keys: list[str], factories: dict[str, CacheFactory], advance: Callable[[float], None]
    ) -> dict[str, dict[str, Record]]:
        windows, start = torch.stack([self._windows[key] for key in keys]), self._stored
        caches = {name: f.make(len(keys), self._length) for name, f in factories.items()}

        def on_tokens(n: int) -> None:
            advance(n * len(keys) * len(caches))

        # the prefill feeds all of it; the first token after it is fed below, and its successor is the first that is
        # scored
        if start:
            prefill(self.context.model, caches, windows[:, :start], self.chunk, on_tokens)
        compared = compare(
            self.context.model, caches, windows[:, start:], first=0, chunk=self._scored_chunk, on_tokens=on_tokens
        )
        # the base took turns with the others: only such times can be compared
        beside = next(iter(compared.values())).seconds / len(keys)
        found: dict[str, dict[str, Record]] = {key: {} for key in keys}
        for name, one in compared.items():
            about = self._about(caches[name], len(keys)) | {"base_seconds": beside}
            for key, f in zip(keys, one.texts(), strict=True):
                found[key][name] = f.since(self._first(key)).record(start) | about | self._read_raw(caches[name], key)
        return found

    def _about(self, cache: Any, rows: int) -> Record:
        """What a cache of as many windows holds of each."""
        found: Record = {"bytes_held": held_bytes(cache) // rows, "batch": rows}
        if isinstance(cache, KVCache):
            saturated = sum(n for layer in cache.pages.saturated for n in layer.values())
            found |= {"bytes_planned": cache.pages.spec.nbytes(self._length), "saturated": -(-saturated // rows)}
        return found

    def _read_raw(self, cache: Any, key: str) -> Record:
        if not isinstance(cache, KVCache):
            return {}
        since = self._stored + self._first(key) - 1
        return {
            "read_raw": read_raw(
                cache.pages.spec, self._length, chunk=self._scored_chunk, start=self._stored, since=since
            )
        }

    @property
    def _scored_chunk(self) -> int:
        """Tokens of a pass whose predictions are scored."""
        return self.chunk

    def summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        texts = dict.fromkeys(text_of(k) for k in records)
        per_text = {t: self._summary({k: r for k, r in records.items() if text_of(k) == t}, base) for t in texts}
        return self._summary(records, base) | ({"texts": per_text} if len(per_text) > 1 else {})

    def _summary(self, records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
        return _summary(records, base)


class DecodeTask(FidelityTask):
    """A context in chunks, then single tokens, one window at a time: that is what a user waits for."""

    name: ClassVar[str] = "decode"
    batched: ClassVar[bool] = False
    usual_chunk: ClassVar[int] = 128

    @property
    def _stored(self) -> int:
        return self.context.options.context

    @property
    def _scored_chunk(self) -> int:
        return 1

    @property
    def _length(self) -> int:
        return self.context.options.context + self.context.options.new_tokens

    @property
    def _passes(self) -> int:
        return 1 + self.context.options.new_tokens

    @property
    def settings(self) -> dict[str, Any]:
        o = self.context.options
        return {"context": o.context, "new_tokens": o.new_tokens, "chunk": self.chunk} | SPREAD


@torch.no_grad()
def prefill(
    model: Any, caches: dict[str, Any], ids: torch.Tensor, chunk: int, on_tokens: Callable[[int], None] = lambda n: None
) -> dict[str, torch.Tensor]:
    """Feed ids [B, num_tokens] to every cache in chunks; returns each cache's logits [B, vocabulary] after the last
    token.
    """
    last: dict[str, torch.Tensor] = {}
    argument = name_for(model)
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk].to(model.device)
        for name, cache in caches.items():
            last[name] = model(piece, **{argument: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
        on_tokens(piece.shape[1])
    return last


def text_of(key: str) -> str:
    return key.rsplit("@", 1)[0]


def _summary(records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
    def total(name: str) -> float:
        return math.fsum(r[name] for r in records.values())

    tokens = int(total("num_tokens"))
    histogram: dict[str, int] = {}
    for r in records.values():
        for b, n in r.get("kl_histogram", {}).items():
            histogram[b] = histogram.get(b, 0) + n
    # windows that went together say nothing about a user's speed
    alone = all(r.get("batch", 1) == 1 for r in records.values())
    counted = sum(histogram.values()) == tokens  # a file that was trimmed for keeping has no histograms
    found: dict[str, Any] = {
        "windows": len(records),
        "tokens": tokens,
        "ppl": math.exp(total("nll") / tokens),
        "kl_mean": total("kl") / tokens,
        "kl_p99": histogram_quantile(histogram, 0.99) if counted else None,
        **_worst(records, tokens),
        **_by_octave(records),
        "tvd_mean": total("tvd") / tokens,
        "mass_matched": 1 - total("tvd") / tokens,
        "top1_agreement": total("top1_same") / tokens,
        "tokens_per_s": total("num_timed") / total("seconds") if total("seconds") and alone else None,
        "bytes_held": max(r["bytes_held"] for r in records.values()),
    }
    for name in ("bytes_planned", "saturated"):
        if all(name in r for r in records.values()):
            found[name] = max(r[name] for r in records.values())
    if all("read_raw" in r for r in records.values()):
        found["read_raw"] = math.fsum(r["read_raw"] * r["num_tokens"] for r in records.values()) / tokens
    if alone and (base_seconds := math.fsum(r["base_seconds"] for r in records.values())):
        found["speed_ratio"] = base_seconds / total("seconds")
    shared = [k for k in records if k in base]
    if len(shared) == len(records):
        change = [records[k]["nll"] / records[k]["num_tokens"] - base[k]["nll"] / base[k]["num_tokens"] for k in shared]
        kl = [records[k]["kl"] / records[k]["num_tokens"] for k in shared]
        base_ppl = math.exp(math.fsum(base[k]["nll"] for k in shared) / tokens)
        found |= {
            "ppl_base": base_ppl,
            "ppl_change": found["ppl"] / base_ppl - 1,
            "ppl_change_se": standard_error(change),
            "kl_mean_se": standard_error(kl),
            "memory_reduction": max(base[k]["bytes_held"] for k in shared) / found["bytes_held"],
        }
    return found


def _worst(records: dict[str, Record], tokens: int) -> dict[str, Any]:
    """The token that a cache predicts worst: its KL, its position, the window that it is in; and the share of tokens
    whose KL is above 1 nat. The latter three are None where a file is of before they were noted.
    """
    window, worst = max(records.items(), key=lambda kv: kv[1]["kl_max"])
    known = all("kl_lost" in r for r in records.values())
    return {
        "kl_max": worst["kl_max"],
        "kl_worst": worst.get("kl_worst"),
        "kl_worst_window": window if "kl_worst" in worst else None,
        "kl_lost": math.fsum(r["kl_lost"] for r in records.values()) / tokens if known else None,
    }


def _by_octave(records: dict[str, Record]) -> dict[str, Any]:
    """Means by octave of position, KL's growth per doubling, the mean position of the first flip and the windows
    without one (their end counts); nothing where a file is of before they were noted.
    """
    if not all("octaves" in r for r in records.values()):
        return {}
    found: dict[str, dict[str, float]] = {}
    for at in sorted({at for r in records.values() for at in r["octaves"]}, key=int):
        some = [r["octaves"][at] for r in records.values() if at in r["octaves"]]
        n = sum(one["tokens"] for one in some)
        found[at] = {
            "tokens": n,
            "kl_mean": math.fsum(one["kl"] for one in some) / n,
            "kl_max": max(one["kl_max"] for one in some),
        }
        found[at] |= {name: sum(one[name] for one in some) / n for name in ("flips", "lost")}
    return {
        "drift": drift({at: (int(one["tokens"]), one["kl_mean"]) for at, one in found.items()}),
        "octaves": found,
        "first_flip": sum(r["first_flip"] for r in records.values()) / len(records),
        "unflipped": sum(r["top1_same"] == r["num_tokens"] for r in records.values()),
    }


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean over windows; None for a single one."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
