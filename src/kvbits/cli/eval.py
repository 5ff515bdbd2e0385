"""`kvbits eval`: caches x tasks on a model, resumable, results as JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SpecError
from ..files import require_folder
from .common import Json, Threads, app, names_of, new_table, print_json, require_model, set_threads, show

TASKS_HELP = "Comma-separated: fidelity (perplexity, KL), decode, greedy, attention, passkey, needle, entities, humaneval, gsm8k, mmlu, arc."


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Local directory, GGUF file or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder for results: MODEL/TASK/SCHEME.json. A run that stopped goes on there.")],
    schemes: Annotated[
        str,
        typer.Option("--schemes", "--scheme", help="Caches, comma-separated: presets, files of your own (.json), all: every preset, stock: quanto, HQQ, fp8."),
    ] = "all",
    tasks: Annotated[str, typer.Option(help=TASKS_HELP)] = "fidelity",
    text: Annotated[list[str] | None, typer.Option(help="Text to evaluate on: a file, hub:ID, novel (shipped). Repeatable.", show_default="novel")] = None,
    calibration_text: Annotated[
        str | None, typer.Option(help="Text for schemes that need calibration (32 windows of 512 tokens), never one evaluated on.", show_default=False)
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of each text.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    chunk: Annotated[int, typer.Option(help="Tokens per forward pass: history older than that is read as stored.")] = 128,
    context: Annotated[int, typer.Option(help="decode, greedy: tokens before decoding.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="decode, greedy: tokens decoded one by one.")] = 64,
    contexts: Annotated[str, typer.Option(help="passkey, needle, entities: prompt lengths in tokens.")] = "1024,2048",
    depths: Annotated[str, typer.Option(help="passkey, needle: where the needle sits, 0 to 1.")] = "0,0.25,0.5,0.75,1",
    repeats: Annotated[int, typer.Option(help="Prompts per length and depth.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Problems of a benchmark, drawn by the seed; all if not given.", show_default=False)] = None,
    shots: Annotated[int | None, typer.Option(help="Worked examples before a question; the benchmark's usual number if not given.", show_default=False)] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts that go through a cache together (greedy, retrieval, benchmarks).")] = 8,
    data: Annotated[list[str] | None, typer.Option(help="Benchmark file, like humaneval=HumanEval.jsonl. May be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model; float32 takes the rounding noise of bfloat16 out of KL.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device to run on, like cuda; the CPU if not given.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Draws passkeys, filler and samples.")] = 0,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also each preset as a dense cache simulates it, to compare; never in reports.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results of other settings instead of refusing.")] = False,
    name: Annotated[str | None, typer.Option(help="What results call the model; the last part of MODEL if not given.", show_default=False)] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """What each cache costs on a model: perplexity, KL, retrieval, benchmarks, speed, beside the 16-bit cache on the same tokens.

    Every scheme runs through the real packed cache and the real attention op. Results are JSON files; `kvbits report` draws them.
    """
    require_model(model)
    require_folder(out, "--out")
    from .. import schemes as presets
    from ..evaluate import tasks as known
    from ..evaluate.caches import GROUPS
    from ..evaluate.texts import read_text

    wanted = known.names_of(names_of("--tasks", tasks))
    names = presets.expand(names_of("--schemes", schemes), GROUPS)
    options = known.Options(
        windows=windows, length=length, chunk=chunk, context=context, new_tokens=new_tokens, contexts=_integers("--contexts", contexts),
        depths=_floats("--depths", depths), repeats=repeats, limit=limit, shots=shots, batch_size=batch_size,
        data=_pairs(data or []), seed=seed,
    )  # fmt: skip
    texts = tuple(read_text(t) for t in text or ["novel"])
    calibration = None if calibration_text is None else read_text(calibration_text)
    from ..evaluate.run import evaluate as run
    from ..integrations.models import load_model

    set_threads(threads)
    lm, tokenizer = load_model(model, dtype=dtype, device=device)
    found = run(
        lm, tokenizer, name=name or Path(model.rstrip("/")).name.removesuffix(".gguf"), schemes=names, tasks=wanted, texts=texts, out=out, options=options,
        calibration_text=calibration, simulate=simulate, overwrite=overwrite,
        on_skip=lambda message: typer.echo(f"left out: {message}", err=True),
    )  # fmt: skip
    if as_json:
        print_json({"model": model, "out": str(out), "tasks": found})
    else:
        _print(found, out)


def _print(found: dict[str, dict[str, dict[str, Any]]], out: Path) -> None:
    tables = [part for task, rows in found.items() for part in (_table(task, rows), _LEGENDS.get(task)) if part]
    show(*tables, f"results in {out}; `kvbits report {out}` draws them")


_PERCENT = ("ppl_change", "top1_agreement", "mass_matched", "accuracy", "accuracy_base", "agreement")
_HIDDEN = ("texts", "windows", "by_layer", "by_head", "heat_map", "by_subject")
_OF_TEXTS = {"ppl": "ppl", "ppl_change": "change", "kl_mean": "KL", "mass_matched": "mass", "top1_agreement": "top-1",
             "bytes_held": "bytes", "tokens_per_s": "tokens/s"}  # fmt: skip
"""What fits a terminal of 80 columns of the tasks that read texts; --json and the files have everything."""
_NAMES = _OF_TEXTS | {"key_bits": "key bits left", "value_bits": "value bits left"}
_LEGENDS = {
    "attention": "bits left: how many bits of the numbers survive, 1/2 log2(variance / squared error), mean over layers and kv heads; not what is stored. "
    "worst layer: of the largest output error.",
}


def _table(task: str, rows: dict[str, dict[str, Any]]) -> Any:
    columns = list(dict.fromkeys(k for r in rows.values() for k, v in r.items() if k not in _HIDDEN and not isinstance(v, dict | list)))
    if "ppl" in columns:
        columns = [c for c in _OF_TEXTS if c in columns]
    table = new_table(task, "cache", *(_NAMES.get(c, c.replace("_", " ")) for c in columns))
    for cache, row in rows.items():
        table.add_row(cache, *(_cell(c, row.get(c)) for c in columns))
    return table


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in _PERCENT:
        return f"{value:+.2%}" if column == "ppl_change" else f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in text.split(",") if n.strip())
    except ValueError:
        raise SpecError(f"{option} {text!r} is not a list of whole numbers like 1024,2048") from None


def _floats(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(n) for n in text.split(",") if n.strip())
    except ValueError:
        raise SpecError(f"{option} {text!r} is not a list of numbers like 0,0.5,1") from None


def _pairs(given: list[str]) -> dict[str, str]:
    if bad := [g for g in given if "=" not in g]:
        raise SpecError(f"--data {bad[0]!r} is not NAME=FILE, like humaneval=HumanEval.jsonl")
    return dict(g.split("=", 1) for g in given)
