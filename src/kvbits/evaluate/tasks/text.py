"""Perplexity and token-level fidelity over windows of texts: chunked prefill (`fidelity`) and pure decoding (`decode`).

`fidelity` feeds whole windows in short chunks: every chunk attends to history as stored, much as decoding does.
`decode` prefills `context` tokens in chunks and then feeds `new_tokens` single tokens, which is what a user waits for:
its tokens per second are measured with the caches taking turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ...errors import SpecError
from ...integrations.huggingface import KVCache
from ..caches import CacheFactory, held_bytes
from ..fidelity import DECODING_CHUNK, KL_QUANTILES, compare, drift, histogram_quantile, prefill, read_raw
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
        """Return the first position behind these that is scored."""
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
            self.context.model, caches, windows[:, start:], chunk=self._scored_chunk, on_tokens=on_tokens
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
        """Return what a cache of `rows` windows holds of each window."""
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


def text_of(key: str) -> str:
    return key.rsplit("@", 1)[0]


def _summary(records: dict[str, Record], base: dict[str, Record]) -> dict[str, Any]:
    rows = list(records.values())

    def total(name: str) -> float:
        return math.fsum(r[name] for r in rows)

    tokens = int(total("num_tokens"))
    # a file that was trimmed for keeping has no histograms
    histogram: Counter[str] = sum((Counter(r.get("kl_histogram", {})) for r in rows), Counter())
    window, worst = max(records.items(), key=lambda kv: kv[1]["kl_max"])
    # windows that went together say nothing about a user's speed
    alone = all(r["batch"] == 1 for r in rows)
    found: dict[str, Any] = {
        "windows": len(records),
        "tokens": tokens,
        "ppl": math.exp(total("nll") / tokens),
        "kl_mean": total("kl") / tokens,
        **{
            name: histogram_quantile(histogram, q) if histogram.total() == tokens else None
            for name, q in KL_QUANTILES.items()
        },
        "kl_max": worst["kl_max"],
        "kl_worst": worst["kl_worst"],
        "kl_worst_window": window,
        "kl_lost": total("kl_lost") / tokens,
        **_by_octave(rows),
        "first_flip": total("first_flip") / len(rows),
        "unflipped": sum(r["top1_same"] == r["num_tokens"] for r in rows),
        "tvd_mean": total("tvd") / tokens,
        "mass_matched": 1 - total("tvd") / tokens,
        "top1_agreement": total("top1_same") / tokens,
        # items of before have no squares
        "dp_rms": math.sqrt(total("dp_squares") / tokens) if all("dp_squares" in r for r in rows) else None,
        "tokens_per_s": total("num_timed") / total("seconds") if total("seconds") and alone else None,
        "bytes_held": max(r["bytes_held"] for r in rows),
    }
    if "read_raw" in rows[0]:  # a cache of ours
        found |= {name: max(r[name] for r in rows) for name in ("bytes_planned", "saturated")}
        found["read_raw"] = math.fsum(r["read_raw"] * r["num_tokens"] for r in rows) / tokens
    if alone and total("base_seconds"):
        found["speed_ratio"] = total("base_seconds") / total("seconds")
    if all(k in base for k in records):
        own, theirs = ([r["nll"] / r["num_tokens"] for r in some] for some in (rows, [base[k] for k in records]))
        base_ppl = math.exp(math.fsum(base[k]["nll"] for k in records) / tokens)
        found |= {
            "ppl_base": base_ppl,
            "ppl_change": found["ppl"] / base_ppl - 1,
            "ppl_change_se": standard_error([a - b for a, b in zip(own, theirs, strict=True)]),
            "kl_mean_se": standard_error([r["kl"] / r["num_tokens"] for r in rows]),
            "memory_reduction": max(base[k]["bytes_held"] for k in records) / found["bytes_held"],
        }
    return found


def _by_octave(rows: list[Record]) -> dict[str, Any]:
    """Return means by octave of position, and KL's growth per doubling."""
    found: dict[str, dict[str, float]] = {}
    for at in sorted({at for r in rows for at in r["octaves"]}, key=int):
        some = [r["octaves"][at] for r in rows if at in r["octaves"]]
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
    }


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of the mean over windows; None for a single one."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
