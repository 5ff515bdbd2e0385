"""`kvbits demo`: one long real text, one model, the stock 16-bit cache and each scheme beside it.

Two of the evaluation's tasks on one window of the novel: `decode` feeds the text's own continuation token by token (perplexity, KL, top-1, speed, bytes
really allocated), `greedy` generates (share of tokens equal to the 16-bit cache's, position by position). The context is fed at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import schemes as presets
from ..errors import DataError
from ..geometry import layer_geometries, max_context
from ..integrations.models import load_model
from ..spec import CacheSpec, Scheme
from .calibrator import QUICK
from .results import read
from .run import evaluate
from .tasks import Options
from .texts import Text, novel, novel_end, novel_start

SCHEMES = ("raw", presets.RECOMMENDED, "kivi4", "kivi2")
MODEL = "SmolLM2-135M-Instruct (embedded)"


def run(
    *,
    model: str | None = None,
    schemes: Sequence[str | Scheme] = SCHEMES,
    context: int = 1024,
    new_tokens: int = 64,
    threads: int | None = None,
    backend: str = "auto",
    progress: bool = True,
) -> dict[str, Any]:
    """Measure schemes on a model.

    Args:
        model: directory, GGUF file or hub id; None for the embedded SmolLM2-135M-Instruct.
        schemes: preset names, files of schemes, schemes of your own (see `schemes.expand`). Those that need a calibration get one from the novel's end.
        context: tokens of text before the measured continuation.
        new_tokens: tokens fed one by one, whose successors are scored, and tokens generated.

    Returns:
        {"model", "context", "new_tokens", "device", "dtype", "threads", "rows": [...]}, the stock 16-bit cache first.

    Raises:
        DataError: the embedded text is too short, or the model's context is.
        KvbitsError: unknown scheme, or a model kvbits cannot serve.
    """
    require_context(context, new_tokens)
    if threads:
        torch.set_num_threads(threads)
    chosen = presets.expand(schemes)
    lm, tokenizer = load_model(model)
    require_context(context, new_tokens, lambda: lm.config)
    layers = layer_geometries(lm.config)
    calibrated = any(presets.for_layers(one, layers).needs_calibration for one in chosen)
    text = novel_start() if calibrated else Text("novel", novel())
    with tempfile.TemporaryDirectory(prefix="kvbits-") as folder:
        found = evaluate(
            lm, tokenizer, name="demo", schemes=chosen, tasks=("decode", "greedy"), texts=(text,), out=Path(folder), calibration_text=novel_end(),
            calibration_sample=QUICK, options=Options(windows=1, chunk=context, context=context, new_tokens=new_tokens), backend=backend, progress=progress,
        )  # fmt: skip
        bits = {d["scheme"]: d["info"]["bits_per_element"] for d in map(read, Path(folder).glob("*/decode/*.json"))}
    stock = CacheSpec(scheme=presets.get("raw"), layers=layers).raw_nbytes(context + new_tokens - 1, 1, lm.dtype.itemsize)
    return {
        "model": model or MODEL,
        "context": context,
        "new_tokens": new_tokens,
        "device": str(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "rows": [_row(name, s, found["greedy"][name], bits[name], stock) for name, s in found["decode"].items()],
    }


def require_context(context: int, new_tokens: int, config: Callable[[], Any] | None = None) -> None:
    """Refuse sizes that no model could be shown with, or not this one, before it is loaded.

    Args:
        config: gives the model's configuration; asked only where the sizes could be right.

    Raises:
        DataError: naming the limit.
    """
    if context < 1 or new_tokens < 2:
        raise DataError(f"context={context} and new_tokens={new_tokens}: at least 1 and 2 are needed")
    if context + new_tokens > (most := len(novel())):
        raise DataError(f"context + new_tokens = {context + new_tokens:,} tokens, but the text has {most:,} characters; lower --context")
    limit = None if config is None else max_context(config())
    if limit is not None and context + new_tokens > limit:
        raise DataError(f"context + new_tokens = {context + new_tokens} exceeds the model's {limit} positions; lower --context")


def _row(name: str, decode: dict[str, Any], greedy: dict[str, Any], bits: float, stock: int) -> dict[str, Any]:
    return {
        "scheme": name, "bytes_predicted": decode.get("bytes_planned", stock), "bytes_measured": decode["bytes_held"],
        "memory_reduction": stock / decode["bytes_held"], "bits_per_element": bits, "ppl": decode["ppl"], "ppl_change": decode["ppl_change"],
        "kl_mean": decode["kl_mean"], "top1_agreement": decode["top1_agreement"], "greedy_agreement": greedy["agreement"],
        "tokens_per_s": decode["tokens_per_s"],
    }  # fmt: skip


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
