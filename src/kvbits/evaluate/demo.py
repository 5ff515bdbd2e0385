"""`kvbits demo`: one long real text, one model, the stock 16-bit cache and each scheme beside it.

Two runs per cache, both by pure decoding after the context: the text's own continuation fed token by token (perplexity, KL, top-1, speed),
and greedy generation (share of tokens equal to the 16-bit cache's, position by position). Bytes are those really allocated.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import schemes as presets
from ..calibrate import Calibration, calibrate
from ..errors import DataError
from ..integrations.huggingface import KVCache
from ..integrations.models import load_model
from ..progress import bar
from ..spec import Scheme
from .caches import held_bytes
from .fidelity import Fidelity, compare
from .texts import novel

BASELINE = "16-bit"
CALIBRATION_PROMPTS, CALIBRATION_LENGTH = 4, 512


def run(
    *,
    model: str | None = None,
    schemes: list[str] | None = None,
    context: int = 1024,
    new_tokens: int = 64,
    threads: int | None = None,
    backend: str = "auto",
    progress: bool = True,
) -> dict[str, Any]:
    """Measure schemes on a model.

    Args:
        model: directory, GGUF file or hub id; None for the embedded SmolLM2-135M-Instruct.
        schemes: preset names.
        context: tokens of text before the measured continuation.
        new_tokens: tokens scored, and tokens generated.

    Returns:
        {"model", "context", "new_tokens", "device", "threads", "rows": [...]}, the stock 16-bit cache first.

    Raises:
        DataError: the embedded text is too short, or the model's context is.
        KvbitsError: unknown scheme, or a model kvbits cannot serve.
    """
    if context < 1 or new_tokens < 2:
        raise DataError(f"context={context} and new_tokens={new_tokens}: at least 1 and 2 are needed")
    if threads:
        torch.set_num_threads(threads)
    chosen = [presets.get(name) for name in (schemes or ["raw", "int8_centered", "kivi4", "kivi2"])]
    lm, tokenizer = load_model(model)
    ids = _tokens(lm, tokenizer, context + new_tokens)
    calibrations = {s.name: _calibration(lm, tokenizer, s.name, context + new_tokens, progress) for s in chosen if s.needs_calibration}
    with bar(f"{1 + len(chosen)} caches, {context} tokens of context", (1 + len(chosen)) * 2 * new_tokens, enabled=progress) as advance:
        greedy: dict[str, torch.Tensor] = {}
        rows = []
        caches = {}
        for scheme in [None, *chosen]:
            name = BASELINE if scheme is None else scheme.name
            cache = _cache(lm, scheme, context + new_tokens - 1, backend, calibrations)
            greedy[name] = _generate(lm, ids[:context], new_tokens, cache)
            advance(new_tokens)
            caches[name] = _cache(lm, scheme, context + new_tokens - 1, backend, calibrations)
        fidelity = compare(lm, caches, ids, first=context, chunk=1, on_tokens=lambda n: advance(len(caches) if n == 1 else 0))
    for name, cache in caches.items():
        rows.append(_row(name, cache, fidelity, greedy, lm, context + new_tokens - 1))
    return {
        "model": model or "SmolLM2-135M-Instruct (embedded)",
        "context": context,
        "new_tokens": new_tokens,
        "device": str(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "rows": rows,
        "explain": {name: cache.explain()["ops"] for name, cache in caches.items() if isinstance(cache, KVCache)},
    }


def _tokens(model: Any, tokenizer: Any, count: int) -> torch.Tensor:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and count > limit:
        raise DataError(f"context + new_tokens = {count} exceeds the model's {limit} positions; lower --context")
    ids = tokenizer(novel(), return_tensors="pt").input_ids[0]
    if len(ids) < count:
        raise DataError(f"context + new_tokens = {count} exceeds the demo text's {len(ids)} tokens; lower --context")
    return ids[:count]


def _calibration(model: Any, tokenizer: Any, scheme: str, used: int, progress: bool) -> Calibration:
    """Scales and codebooks measured on the end of the novel, which the measured tokens do not reach."""
    ids = tokenizer(novel(), return_tensors="pt").input_ids[0]
    rest = ids[-CALIBRATION_PROMPTS * CALIBRATION_LENGTH :]
    if len(ids) - len(rest) < used:
        raise DataError(
            f"context + new_tokens = {used} leaves less than {len(rest)} of the demo text's {len(ids)} tokens to calibrate {scheme!r} on; lower --context, "
            "or use kvbits calibrate and kvbits eval"
        )
    return calibrate(model, list(rest.view(-1, CALIBRATION_LENGTH).split(1)), scheme, progress=progress)


def _cache(model: Any, scheme: Scheme | None, num_tokens: int, backend: str, calibrations: dict[str, Calibration]) -> Any:
    if scheme is None:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    return KVCache.for_model(model, scheme.name, batch_size=1, max_tokens=num_tokens, backend=backend, calibration=calibrations.get(scheme.name))


def _generate(model: Any, prompt: torch.Tensor, new_tokens: int, cache: Any) -> torch.Tensor:
    ids = prompt[None].to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens
    )  # fmt: skip
    return out[0, len(prompt) :]


def _row(name: str, cache: Any, fidelity: dict[str, Fidelity], greedy: dict[str, torch.Tensor], model: Any, num_tokens: int) -> dict[str, Any]:
    f, base = fidelity[name], fidelity[BASELINE]
    ours = isinstance(cache, KVCache)
    spec = (cache if ours else KVCache.for_model(model, "raw")).store.spec
    itemsize = torch.finfo(model.dtype).bits // 8
    stock = spec.raw_nbytes(num_tokens, 1, itemsize)
    measured = held_bytes(cache)
    return {
        "scheme": name,
        "bytes_predicted": spec.nbytes(num_tokens, 1) if ours else stock,
        "bytes_measured": measured,
        "memory_reduction": stock / measured,
        "bits_per_element": spec.bits_per_element if ours else 8.0 * itemsize,
        "ppl": f.perplexity,
        "ppl_change": f.perplexity / base.perplexity - 1,
        "kl_mean": f.kl_mean,
        "top1_agreement": f.top1_agreement,
        "greedy_agreement": (greedy[name] == greedy[BASELINE]).float().mean().item(),
        "tokens_per_s": f.tokens_per_s,
    }


def table(result: dict[str, Any]) -> Any:
    """Rich table of a `run`."""
    from rich.table import Table

    t = Table(
        caption="bits: stored per cached number, scales included; memory: 16-bit bytes / bytes held; change: of perplexity; KL: against the 16-bit cache's "
        "predictions; top-1: same most likely token; greedy: same tokens generated, position by position. raw is lossless: what it shows is "
        "rounding noise, and a perplexity over few tokens moves by percents from noise alone. Sinks and the newest tokens are always raw and counted.",
        title=f"{result['model']}: {result['context']} tokens of context, {result['new_tokens']} new, {result['threads']} threads on {result['device']}",
    )
    for heading in ("cache", "bits", "bytes planned", "bytes held", "memory", "perplexity", "change", "KL (nats)", "top-1", "greedy", "tokens/s"):
        t.add_column(heading, justify="left" if heading == "cache" else "right")
    for r in result["rows"]:
        t.add_row(
            r["scheme"], f"{r['bits_per_element']:.2f}", f"{r['bytes_predicted']:,}", f"{r['bytes_measured']:,}", f"{r['memory_reduction']:.2f}x",
            f"{r['ppl']:.3f}", f"{r['ppl_change']:+.2%}", f"{r['kl_mean']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['greedy_agreement']:.1%}",
            f"{r['tokens_per_s']:.1f}",
        )  # fmt: skip
    return t
