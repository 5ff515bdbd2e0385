"""Measurement of what a cache does to attention itself, layer by layer and head by head.

`observe` runs a model once over a text and keeps every layer's queries, keys and values. `measure` puts the same keys
and values into a cache and lets the newest queries attend: through the real op over the real pages for a `KVCache`,
over what `update` returns for a stock cache. So every cache sees the same inputs, and an error does not travel from
layer to layer. Per layer and kv head, over the observed queries:

    logit_cosine   cos(s - mean(s), s' - mean(s')) of a query's logits s = scaling q.k over the keys it sees (softmax
                   knows no constant)
    tvd            1/2 sum |p - p'|: share of attention that moved
    output_error   ||o - o'|| / ||o|| of the attention output
    key_bits       1/2 log2(var(k) / mse(k)), var around each channel's mean: bits that a Gaussian with this error would
                   need; value_bits alike
    clipped        elements of keys and values whose magnitude passes the largest stored one of their page and head by
                   more than 2 %
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from ..calibrate.observe import watched_attention
from ..errors import DataError, UnsupportedError
from ..geometry import stored_at
from ..integrations.huggingface import KVCache
from ..integrations.masks import passed
from ..model_ref import ModelRef

QUERIES = 64
"""Newest tokens whose attention is compared, by default."""
SINKS = 4
"""First tokens, which `statistics` looks at apart."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one layer's attention. q: [T, Hq, D]; k, v: [T, H, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float
    softcap: float | None
    window: int | None


@torch.no_grad()
def observe(model: Any, ids: torch.Tensor) -> list[LayerInputs]:
    """Return the attention inputs of every layer that stores keys and values, over ids [num_tokens], in one forward
    pass with the stock cache.

    Raises:
        UnsupportedError: a model that takes no attention functions, or whose layers do not pass through them.
    """
    seen: dict[int, LayerInputs] = {}

    def look(module: Any, query: Any, key: Any, value: Any, given: dict[str, Any]) -> None:
        q, k, v = (x[0].transpose(0, 1).clone() for x in (query, key, value))
        scaling = given.get("scaling")
        seen[module.layer_idx] = LayerInputs(
            q, k, v, query.shape[-1] ** -0.5 if scaling is None else scaling, given.get("softcap"), None
        )

    cache = DynamicCache(config=model.config)
    with watched_attention(model, look):
        model(ids[None].to(model.device), **passed(model, cache), use_cache=True, logits_to_keep=1)
    stored = stored_at(model.config)
    if missing := stored.keys() - seen.keys():
        raise UnsupportedError(
            f"{type(model).__name__}: {len(missing)} of {len(stored)} layers did not pass through the attention"
            " function"
        )
    windows = [g.sliding_window for g in ModelRef.of(model).layers]
    return [replace(seen[i], window=window) for i, window in zip(stored, windows, strict=True)]


@torch.no_grad()
def measure(inputs: list[LayerInputs], cache: Any, *, queries: int = QUERIES) -> list[dict[str, Any]]:
    """Return one dict per layer: lists over kv heads of the module's measures, and `saturated`, the elements that
    closing pages clamped.

    Args:
        cache: a fresh Transformers cache, `KVCache` or stock.
        queries: newest tokens that attend; they are fed together, so they see each other exactly and the rest as
            stored.

    Raises:
        DataError: not more tokens than queries.
    """
    history = len(inputs[0].k) - queries
    if history < 1:
        raise DataError(f"{len(inputs[0].k)} tokens leave no history before {queries} queries; observe a longer text")
    stored: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
    if isinstance(cache, KVCache):
        for i, x in enumerate(inputs):
            cache.pages.append(i, x.k[None, :history], x.v[None, :history])
        held = [tuple(s.float() for s in cache.pages.dequantize(i, 0)) for i in range(len(inputs))]
        for i, x in enumerate(inputs):
            out = cache.pages.step(
                i, x.q[None, history:], x.k[None, history:], x.v[None, history:], scaling=x.scaling, softcap=x.softcap
            )[0]
            gone = history - len(held[i][0])  # tokens that left a sliding window
            new = [
                torch.cat([pad(s, gone), fresh[history:].float()]) for s, fresh in zip(held[i], (x.k, x.v), strict=True)
            ]
            stored.append((new[0], new[1], out.float()))
    else:
        for i, x in enumerate(inputs):
            cache.update(*(s[None, :history].transpose(1, 2) for s in (x.k, x.v)), i)
        for i, x in enumerate(inputs):
            k, v = cache.update(*(s[None, history:].transpose(1, 2) for s in (x.k, x.v)), i)
            gone = len(x.k) - k.shape[2]
            stored.append((pad(k[0].transpose(0, 1).float(), gone), pad(v[0].transpose(0, 1).float(), gone), None))
    saturated = cache.pages.saturated if isinstance(cache, KVCache) else [{} for _ in inputs]
    return [
        _layer(x, k, v, out, history) | {"saturated": dict(s)}
        for x, (k, v, out), s in zip(inputs, stored, saturated, strict=True)
    ]


def pad(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x [n, H, D] with `rows` rows of zeros before it: tokens no query sees any more."""
    return torch.cat([x.new_zeros(rows, *x.shape[1:]), x]) if rows > 0 else x


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: LayerInputs, history: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (centred logits, probabilities [H, G, m, n], outputs [H, G, m, D], visible [m, n]) of the newest queries,
    float32.
    """
    n, heads = len(k), k.shape[1]
    grouped = q.float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [H, G, m, D]
    logits = grouped @ k.float().permute(1, 2, 0)[:, None] * x.scaling
    if x.softcap is not None:
        logits = x.softcap * torch.tanh(logits / x.softcap)
    at, key = torch.arange(history, n, device=q.device)[:, None], torch.arange(n, device=q.device)
    visible = (key <= at) & (key > at - (n if x.window is None else x.window))
    p = torch.softmax(logits.masked_fill(~visible, -torch.inf), -1)
    mean = logits.masked_fill(~visible, 0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return (logits - mean).masked_fill(~visible, 0), p, p @ v.float().permute(1, 0, 2)[:, None], visible


def _layer(x: LayerInputs, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, history: int) -> dict[str, Any]:
    q = x.q[history:]
    s, p, o, visible = _attend(q, x.k, x.v, x, history)
    s2, p2, o2, _ = _attend(q, k, v, x, history)
    if out is not None:
        o2 = out.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    kept = visible.any(0)  # keys some query sees: a sliding window may have dropped the others
    cosine = torch.nn.functional.cosine_similarity(s, s2, dim=-1)
    return {
        "logit_cosine": _numbers(cosine.mean((1, 2))),
        "tvd": _numbers((p - p2).abs().sum(-1).mean((1, 2)) / 2),
        "output_error": _numbers((o - o2).flatten(1).norm(dim=1) / o.flatten(1).norm(dim=1).clamp(min=1e-20)),
        "key_bits": _bits(x.k[kept], k[kept]),
        "value_bits": _bits(x.v[kept], v[kept]),
        "clipped_keys": _clipped(x.k[kept], k[kept]),
        "clipped_values": _clipped(x.v[kept], v[kept]),
    }


def _numbers(x: torch.Tensor) -> list[float]:
    return [round(float(v), 7) for v in x]


def _bits(exact: torch.Tensor, stored: torch.Tensor) -> list[float | None]:
    """Return, per head, over the tokens that changed; None where none did."""
    exact = exact.float()
    found: list[float | None] = []
    for h in range(exact.shape[1]):
        error = stored[:, h] - exact[:, h]
        changed = (error != 0).any(-1)
        if int(changed.sum()) < 2:
            found.append(None)
            continue
        # in float64: squares of small errors are 0 in float32
        variance = exact[changed, h].double().var(0).mean().item() or 1e-30
        found.append(round(0.5 * math.log2(variance / error[changed].double().square().mean().item()), 4))
    return found


def _clipped(exact: torch.Tensor, stored: torch.Tensor) -> list[int]:
    """Return, per head, page by page of 64 tokens."""
    pages = list(zip(exact.float().split(64), stored.split(64), strict=True))
    return [
        sum(int((a[:, h].abs() > 1.02 * b[:, h].abs().amax()).sum()) for a, b in pages) for h in range(exact.shape[1])
    ]


def statistics(inputs: list[LayerInputs]) -> list[dict[str, float]]:
    """Return, per layer, figures that show what makes it hard to quantize. The worst kv head counts, over the tokens
    after the sinks.

    key_offset        largest |channel mean| / median channel standard deviation of the keys: how far a constant offset
                      (a key bias) stretches a token's range
    outlier_channels  channels of the keys whose largest magnitude passes 5 times the median channel's
    outlier_share     share of key elements beyond 6 times the head's median magnitude
    sink_attention    attention of the newest queries to the first `SINKS` tokens, mean over heads
    sink_key_norm     norm of the first token's key / median norm
    """
    found = []
    for x in inputs:
        k = x.k[SINKS:].float()
        mean, spread = k.mean(0), k.std(0)
        top = k.abs().amax(0)
        history = len(x.k) - min(QUERIES, len(x.k) - 1)
        _, p, _, _ = _attend(x.q[history:], x.k, x.v, x, history)
        norms = x.k.float().norm(dim=-1)
        found.append(
            {
                "key_offset": (mean.abs().amax(-1) / spread.median(-1).values.clamp(min=1e-9)).max().item(),
                "outlier_channels": int((top > 5 * top.median(-1, keepdim=True).values).sum(-1).max()),
                "outlier_share": (
                    (k.abs() > 6 * k.abs().permute(1, 0, 2).flatten(1).median(-1).values[:, None]).float().mean().item()
                ),
                "sink_attention": p[..., :SINKS].sum(-1).mean().item(),
                "sink_key_norm": (norms[0] / norms.median(0).values.clamp(min=1e-9)).mean().item(),
                "key_max": k.abs().max().item(),
                "value_max": x.v.float().abs().max().item(),
            }
        )
    return found
