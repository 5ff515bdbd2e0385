"""`kvbits demo`: one long real text, one model, the stock 16-bit cache and each scheme beside it.

Three of the evaluation's tasks on the novel: `fidelity` scores whole windows (perplexity, KL, top-1), `decode` feeds a
continuation token by token (speed, bytes really allocated), and `greedy` lets the stock cache and one scheme write on,
for two texts side by side.

The embedded model computes in float32: a lossless cache then shows no difference at all, so that what the others show
is their codes' effect, and on a CPU without bfloat16 instructions it is several times as fast. Memory is stated as of a
16-bit model, by the same arithmetic that gives the bytes which the run itself allocates, and those are measured beside.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import schemes as presets
from ..errors import DataError, counted
from ..geometry import max_context
from ..integrations.models import load_model
from ..model_ref import ModelRef
from ..spec import CacheSpec, Scheme
from ..units import human_bytes
from . import MAX_KL
from .calibrator import QUICK
from .fidelity import DECODING_CHUNK
from .results import read
from .run import Evaluation
from .settings import Options
from .texts import Text, novel, novel_end, novel_start, windows

SCHEMES = (presets.RECOMMENDED, "klt4", "klt2")
MODEL = "SmolLM2-135M-Instruct (embedded)"
WINDOW = 1024
"""Tokens of a window that is scored."""
LEAST_WINDOW = 512
"""Shorter ones are mostly newest tokens, which are raw."""
SHOWN = 200
"""Characters of the prompt that are shown before what was written."""
COLUMN = 52
"""Characters of a line of written text."""
GROWTH = (1024, 2048, 4096, 8192)
"""Tokens at which memory is drawn."""
BAR = 60
"""Characters of the longest bar."""
NEXT = (
    "kvbits plan MODEL --gpu-memory 24GB      see how many users fit on your card",
    "kvbits check MODEL --scheme klt4         check in minutes that klt4 suits your model",
    "kvbits eval MODEL --out results          measure everything; kvbits report results draws it",
)
"""Commands to try after the demo."""


def run(
    *,
    model: str | None = None,
    schemes: Sequence[str | Scheme] = SCHEMES,
    context: int = 1024,
    new_tokens: int = 32,
    scored: int | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure schemes on a model.

    Args:
        model: directory, GGUF file or hub id, in its own dtype; None for the embedded SmolLM2-135M-Instruct in float32.
        schemes: preset names, files of schemes, schemes of your own (see `schemes.expand`). Those that need a
            calibration get one from the novel's end.
        context: tokens of text before those fed one by one, and before the generated ones.
        new_tokens: tokens fed one by one, and tokens generated.
        scored: tokens that accuracy is measured on, about; None for twice `context`, within 1,024 and 2,048: of 2,048,
            KL is sure to a few percent of itself.
        say: told what was found as soon as it is.

    Returns:
        {"model", "context", "new_tokens", "scored", "device", "dtype", "threads", "rows": [...], "growth", "texts"},
            the stock cache first. A row has bytes of
        a 16-bit model and of this run, predicted and measured; `growth` bytes of a 16-bit model at each of `GROWTH`, by
            cache; `texts` the
        end of the prompt, two continuations, and how many tokens these begin alike with.

    Raises:
        DataError: the embedded text is too short, or the model's context is.
        KvbitsError: unknown scheme, or a model kvbits cannot serve.
    """
    require_context(context, new_tokens)
    chosen = presets.expand(schemes)
    began = time.perf_counter()
    lm, tokenizer = load_model(model, "float32" if model is None else "auto")
    say(f"{model or MODEL} loaded in {time.perf_counter() - began:.0f} s")
    ref = ModelRef.of(lm)
    require_context(context, new_tokens, lambda: lm.config)
    layers = ref.layers
    named = {presets.for_layers(one, layers).name: one for one in chosen}
    fitted = {name: presets.for_layers(one, layers) for name, one in named.items()}
    specs = {name: CacheSpec(scheme=s, layers=layers) for name, s in fitted.items()}
    raw = CacheSpec(scheme=presets.get("raw"), layers=layers)
    text = novel_start() if any(s.needs_calibration for s in fitted.values()) else Text("novel", novel())
    most = ref.max_context or WINDOW
    accuracy = _windows(2 * min(WINDOW, max(LEAST_WINDOW, context)) if scored is None else scored, most)
    speed = Options(windows=1, chunk=context, context=context, new_tokens=new_tokens)
    with tempfile.TemporaryDirectory(prefix="kvbits-") as folder:

        def measured(task: str, options: Options, which: Sequence[str | Scheme]) -> dict[str, dict[str, Any]]:
            """Return a task's summaries by cache, and a line about them said."""
            began = time.perf_counter()
            evaluation = Evaluation(
                name="demo",
                schemes=which,
                tasks=(task,),
                texts=(text,),
                out=Path(folder),
                options=options,
                calibration_text=novel_end(),
                calibration_sample=QUICK,
            )
            found = evaluation.run(lm, tokenizer, progress=progress)[task]
            what, figure = _TOLD[task]
            say(
                f"{what}: {', '.join(f'{name} {figure(r)}' for name, r in found.items())}"
                f" ({time.perf_counter() - began:.0f} s)"
            )
            return found

        found, timed = measured("fidelity", accuracy, chosen), measured("decode", speed, chosen)
        # what `kvbits check` would let pass
        near = [name for name in specs if found[name]["kl_mean"] <= MAX_KL] or list(specs)
        beside = min(near, key=lambda name: specs[name].bits_per_element)
        measured("greedy", speed, [named[beside]])
        written = {
            d["scheme"]: next(iter(d["items"].values())) for d in map(read, Path(folder).glob("*/greedy/*.json"))
        }
    prompt = windows(tokenizer, text, count=1, length=context + new_tokens)[0, :context]
    return {
        "model": model or MODEL,
        "context": context,
        "new_tokens": new_tokens,
        "scored": next(iter(found.values()))["tokens"],
        "device": str(lm.device),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "rows": [
            _row(n, s, timed[n], specs.get(n, raw), n in specs, lm.dtype.itemsize, context + new_tokens)
            for n, s in found.items()
        ],
        "growth": [
            {
                "tokens": n,
                "bytes": {name: specs[name].nbytes(n) if name in specs else raw.raw_nbytes(n) for name in found},
            }
            for n in GROWTH
        ],
        "texts": [_texts(tokenizer, prompt, beside, written)],
    }


_TOLD: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "fidelity": ("change of perplexity", lambda r: f"{r['ppl_change']:+.2%}"),
    "decode": ("tokens a second, one by one", lambda r: f"{r['tokens_per_s']:.1f}"),
    "greedy": ("tokens written that are the stock cache's", lambda r: f"{r['agreement']:.0%}"),
}


def _windows(scored: int, limit: int) -> Options:
    """Return windows of at most `limit` tokens, about `scored` tokens in all, two at a time, which takes less than one
    after the other.
    """
    length = min(WINDOW, max(scored, 2), limit)
    return Options(
        windows=max(1, scored // length), length=length, chunk=min(DECODING_CHUNK, -(-length // 2)), batch_size=2
    )


def _row(
    name: str, found: dict[str, Any], timed: dict[str, Any], spec: CacheSpec, own: bool, itemsize: int, tokens: int
) -> dict[str, Any]:
    stock = spec.raw_nbytes(tokens - 1)  # the last token is scored, not fed
    sixteen = spec.nbytes(tokens) if own else stock
    return {
        "scheme": name,
        "bits_per_element": spec.bits_per_element,
        "bytes_16bit": sixteen,
        "memory_reduction": stock / sixteen,
        "bytes_predicted": timed["bytes_planned"] if own else spec.raw_nbytes(tokens - 1, 1, itemsize),
        "bytes_measured": timed["bytes_held"],
        "ppl": found["ppl"],
        "ppl_change": found["ppl_change"],
        "kl_mean": found["kl_mean"],
        "kl_max": found["kl_max"],
        "kl_worst": found["kl_worst"],
        "kl_lost": found["kl_lost"],
        "read_raw": found.get("read_raw"),
        "top1_agreement": found["top1_agreement"],
        "tokens_per_s": timed["tokens_per_s"],
    }


def _texts(tokenizer: Any, prompt: torch.Tensor, beside: str, written: dict[str, dict[str, Any]]) -> dict[str, Any]:
    base = next(name for name in written if name != beside)
    before = tokenizer.decode(prompt, skip_special_tokens=True)[-SHOWN:]
    texts = {name: tokenizer.decode(written[name]["tokens"], skip_special_tokens=True) for name in (base, beside)}
    return {
        "before": before[before.find(" ") + 1 :],
        "written": texts,
        "same_tokens": written[beside]["first_divergence"],
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
        raise DataError(
            f"context + new_tokens = {context + new_tokens:,} tokens, but the text has {most:,} characters; lower"
            " --context"
        )
    limit = None if config is None else max_context(config())
    if limit is not None and context + new_tokens > limit:
        raise DataError(
            f"context + new_tokens = {context + new_tokens} exceeds the model's {limit} positions; lower --context"
        )


def shown(result: dict[str, Any]) -> list[Any]:
    """Return what the command prints of a `run`. The command prints bars of memory, a table, two texts side by side,
    and what to try next.
    """
    from rich.text import Text as Line

    tried = Line("Next:\n  " + "\n  ".join(NEXT), no_wrap=True)
    return [_bars(result["growth"]), _rows(result), _continuations(result), tried]


def _rows(result: dict[str, Any]) -> Any:
    """Make the table of caches: bits, memory, accuracy and speed."""
    from rich.table import Table

    stock, *ours = result["rows"]
    noted = all("kl_max" in r for r in result["rows"])  # results of before have no worst token
    worst = ", and worst is the largest of a token" if noted else ""
    why = (
        "the model computes in float32, so it differs by nothing"
        if result["dtype"] == "float32"
        else "what it shows is rounding noise"
    )
    noise = f" raw is lossless: {why}." if any(r["scheme"] == "raw" for r in ours) else ""
    table = Table(
        caption=(
            f"memory counts {result['context'] + result['new_tokens']:,} tokens in a 16-bit model, with scales and the"
            f" newest tokens. perplexity and KL are over {result['scored']:,} tokens: how well the cache predicts the"
            f" text, and how far its predictions lie from the stock cache's (0 is the same{worst}). top token is how"
            f" often the likeliest next token is the same. tokens/s counts {result['new_tokens']} tokens, one by one"
            f" after {result['context']:,}.{noise}"
        ),
        title=(
            f"{result['model']}, {result['dtype']}, on {result['device']} with {counted(result['threads'], 'thread')}"
        ),
        title_justify="left",
        caption_justify="left",
    )
    for heading in (
        "cache",
        "bits",
        "memory",
        "",
        "perplexity",
        "change",
        "KL, nats",
        *["worst"] * noted,
        "top token",
        "tokens/s",
    ):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for r in result["rows"]:
        name = "stock" if r is stock else r["scheme"]
        less = "" if r is stock or r["scheme"] == "raw" else _times(r["memory_reduction"], "x less", "x more", 2)
        table.add_row(
            name,
            f"{r['bits_per_element']:.2f}",
            human_bytes(r["bytes_16bit"]),
            less,
            f"{r['ppl']:.2f}",
            f"{r['ppl_change']:+.2%}",
            f"{max(r['kl_mean'], 0.0):.4f}",
            *([f"{r['kl_max']:.2f}"] if noted else []),
            f"{r['top1_agreement']:.1%}",
            f"{r['tokens_per_s']:.1f}",
        )
    return table


def _continuations(result: dict[str, Any]) -> Any:
    """Put the continuation of the stock cache beside that of the first preset."""
    from rich.table import Table

    (texts,) = result["texts"]
    (_, mine), (name, theirs) = texts["written"].items()
    same = (
        "word for word the same"
        if texts["same_tokens"] == result["new_tokens"]
        else f"the same for {counted(texts['same_tokens'], 'token')}"
    )
    beside = Table(
        title=f"... {' '.join(texts['before'].split())}",
        caption=f"Each cache's continuation of the text, with the likeliest token each time: {same}.",
    )
    beside.title_justify = beside.caption_justify = "left"
    held = next(r for r in result["rows"] if r["scheme"] == name)
    beside.add_column("stock", width=COLUMN)
    beside.add_column(f"{name}, {_times(held['memory_reduction'], ' times smaller', ' times larger', 1)}", width=COLUMN)
    beside.add_row(" ".join(mine.split()), " ".join(theirs.split()))
    return beside


def _bars(growth: Sequence[dict[str, Any]]) -> Any:
    """Return the memory of each cache as the context grows."""
    from rich.table import Table

    t = Table(title="Memory while the context grows, of a 16-bit model", title_justify="left", box=None)
    for heading in ("tokens", "cache", "", "memory"):
        t.add_column(heading, justify="right" if heading in ("tokens", "memory") else "left")
    top = max(n for step in growth for n in step["bytes"].values())
    for step in growth:
        for i, (name, n) in enumerate(step["bytes"].items()):
            t.add_row(
                "" if i else f"{step['tokens']:,}",
                name if i else "stock",
                "█" * max(1, round(BAR * n / top)),
                human_bytes(n),
            )
    return t


def _times(reduction: float, smaller: str, larger: str, digits: int) -> str:
    """Return how many times smaller a cache is, or larger. It can be larger because a scheme may keep all of few tokens
    in 16 bits, in whole pages.
    """
    return f"{reduction:.{digits}f}{smaller}" if reduction >= 1 else f"{1 / reduction:.{digits}f}{larger}"
