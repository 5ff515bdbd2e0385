"""`kvbits eval`: caches x tasks on a model, resumable, results as JSON files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError
from ..files import require_folder
from ..units import dtype_name, human_bytes, parse_tokens
from .common import (
    Device,
    Dtype,
    Json,
    Loading,
    Model,
    Schemes,
    Threads,
    command,
    names_of,
    new_table,
    print_json,
    read_config,
    require_model,
    set_threads,
    tokens,
    when_stopped,
)
from .output import show, tell

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from ..evaluate.texts import Text
    from ..model_ref import ModelRef
    from ..spec import Scheme

TASKS_HELP = (
    "Comma-separated: fidelity (perplexity, KL), decode, greedy, follow, replay, attention, entities, copying,"
    " tracking, ruler, humaneval, gsm8k, mmlu."
)


@command("eval")
def evaluate(
    model: Model,
    out: Annotated[
        Path, typer.Option(help="Folder for results: MODEL/TASK/SCHEME.json. A run that stopped goes on there.")
    ],
    schemes: Schemes = None,
    caches: Annotated[
        Path | None,
        typer.Option(
            help="Python file with a mapping CACHES of caches of your own, for --schemes by name or all as `caches`.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(help=TASKS_HELP)] = "fidelity",
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text to evaluate on: a file, hub:ID, novel (shipped). Repeatable.", show_default="novel"),
    ] = None,
    calibration_text: Annotated[
        str | None,
        typer.Option(
            help="Text for schemes that need calibration, never one evaluated on (32 windows of 512).",
            show_default="klt: what is kept of the model, made once; else, or if it saw a text evaluated on, novel-end",
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of `kvbits calibrate`, for the scheme it was made for. Repeatable.", show_default=False
        ),
    ] = None,
    windows: Annotated[
        int, typer.Option(help="Windows of each text, spread evenly over it; replay: chains.", min=1)
    ] = 16,
    length: Annotated[
        int,
        typer.Option(
            help="Tokens of a window, or of a chain (its prompt, 200 to 400, among them); 1k is 1,024.",
            parser=tokens(2),
        ),
    ] = 1024,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Tokens per forward pass: history older than that is read as stored; long ones flatter few bits.",
            show_default="16 (fidelity, follow, replay), else 128",
            parser=tokens(),
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(help="decode, greedy, follow: tokens before decoding.", parser=tokens())
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option(help="decode, greedy, follow: tokens decoded; copying: copied.", parser=tokens())
    ] = 64,
    contexts: Annotated[
        str, typer.Option(help="Retrieval, tracking, ruler (300 at least): tokens of a prompt; copying: tokens back.")
    ] = "1024,2048",
    depths: Annotated[str, typer.Option(help="entities: who is asked for, 0 (the first) to 1.")] = "0,0.25,0.5,0.75,1",
    repeats: Annotated[int, typer.Option(help="Prompts per length and depth, or kind.", min=1)] = 1,
    limit: Annotated[
        int | None,
        typer.Option(help="Problems of a benchmark, drawn by the seed; all if not given.", show_default=False, min=1),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(help="Worked examples before a question; the benchmark's usual number if not given.", min=0),
    ] = None,
    draws: Annotated[
        int,
        typer.Option(
            help="gsm8k, humaneval: sampled answers to a problem, alike for all caches; 0: a greedy one.", min=0
        ),
    ] = 0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Prompts or windows at once; every cache holds them all.",
            show_default="1 (fidelity), 4 (replay), else 8",
            min=1,
        ),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Benchmark file, like humaneval=HumanEval.jsonl. May be repeated.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Draws prompts and samples.")] = 0,
    alone: Annotated[
        bool, typer.Option("--alone", help="Also each preset's keys alone (values raw), and its values alone.")
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Also each preset as a dense cache simulates it, to compare; never in reports."
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace results of other settings, and trimmed ones, instead of refusing."),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="What results call the model; the last part of MODEL if not given.", show_default=False),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """What each cache costs on a model: perplexity, KL, retrieval, benchmarks, speed, beside the 16-bit cache on the
    same tokens.

    Every scheme runs through the real packed cache and the real attention op. Results are JSON files; `kvbits report`
    draws them. Schemes are the core presets if none is named; `literature` adds formats of papers, `stock`
    Transformers' own quantized caches (quanto, HQQ, fp8). `--caches FILE.py` adds caches of your own.
    """
    ref = require_model(model)
    require_folder(out, "--out", writable=True)
    from ..calibrate import Calibration
    from ..evaluate import tasks as known

    options = known.Options(
        windows=windows,
        length=length,
        chunk=chunk,
        context=context,
        new_tokens=new_tokens,
        repeats=repeats,
        limit=limit,
        contexts=_once("--contexts", [parse_tokens(n, "--contexts") for n in names_of("--contexts", contexts)]),
        depths=_floats("--depths", depths),
        shots=shots,
        draws=draws,
        batch_size=batch_size,
        data=_pairs(data or []),
        seed=seed,
    )
    sources = text or ["novel"]
    _once("--text", [os.path.normpath(s) for s in sources])
    chosen = known.names_of(names_of("--tasks", tasks))
    if draws and not {"gsm8k", "humaneval"} & set(chosen):
        raise SpecError(f"--draws {draws} means nothing for {', '.join(chosen)}; gsm8k and humaneval draw answers")
    from ..evaluate.caches import expand, read_caches

    outside = read_caches(caches) if caches is not None else {}
    wanted = expand(names_of("--schemes", schemes or "core"), outside)
    how = {"name": _name(name, ref), "schemes": wanted, "tasks": chosen, "out": out, "options": options}
    how |= {
        "overwrite": overwrite,
        "calibrations": [Calibration.load(path) for path in calibration or []],
        "alone": alone,
        "caches": outside,
    }
    found = _run(Loading(ref, dtype_name(dtype), device), how, threads, (sources, calibration_text), simulate=simulate)
    if as_json:
        print_json({"model": model, "out": str(out), "tasks": found})
    else:
        _print(found, out)


def _run(
    loading: Loading,
    how: dict[str, Any],
    threads: int | None,
    texts: tuple[list[str], str | None],
    simulate: bool,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Everything is looked at that the model's configuration and tokenizer tell; then the model is loaded."""
    from ..evaluate.calibrator import kept_of, origin
    from ..evaluate.run import evaluate, require_possible
    from ..evaluate.tasks import scored_texts
    from ..integrations.models import load_tokenizer

    config = read_config(loading.model)
    chosen = _texts(texts, loading, how)
    how |= {"texts": chosen.evaluated, "calibrations": chosen.calibrations}
    require_possible(config, load_tokenizer(loading.model), dtype=loading.dtype, **how)
    how["out"].mkdir(parents=True, exist_ok=True)
    when_stopped(f"what is measured lies in {how['out']}; the same command goes on from there")
    for note in chosen.notes:
        tell(f"note: {note}")
    set_threads(threads)
    lm, tokenizer = loading.load()
    if chosen.shared:
        found, why = kept_of(lm, chosen.shared, scored_texts(how["tasks"], chosen.evaluated))
        names = ", ".join(s.name for s in chosen.shared)
        if found is None:
            tell(f"note: {names}: calibrated for these results alone, on novel-end: {why}")
        else:
            how["calibrations"] = [*how["calibrations"], found]
            tell(f"note: {names}: {origin(found)}")
    return evaluate(
        lm,
        tokenizer,
        **how,
        calibration_text=chosen.to_calibrate,
        simulate=simulate,
        on_skip=lambda message: tell(f"left out: {message}"),
        say=tell,
    )


def _name(given: str | None, model: ModelRef) -> str:
    """What results call the model: a folder's name."""
    name = model.short_name.removesuffix(".gguf") if given is None else given
    if not name or "/" in name or name.startswith("."):
        raise SpecError(
            f"--name {name!r} is no name of a folder; results go to OUT/NAME, so give one without a slash or a dot at"
            " its front"
        )
    return name


@dataclass(frozen=True)
class _Texts:
    """Texts and calibrations of a run.

    Attributes:
        evaluated: texts that are measured on.
        calibrations: made before.
        to_calibrate: the text for schemes whose calibration nobody shares.
        shared: schemes that take the calibration which is kept of the model, and none is kept yet.
        notes: sentences for the user.
    """

    evaluated: tuple[Text, ...]
    calibrations: list[Calibration]
    to_calibrate: Text | None = None
    shared: list[Scheme] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _texts(texts: tuple[list[str], str | None], loading: Loading, how: dict[str, Any]) -> _Texts:
    """Choose the texts to evaluate on and to calibrate on.

    Without --calibration-text, klt presets take the calibration that is kept of the model, if it saw no text that is
    measured on. Where a scheme needs a calibration, the novel stands for its first half.

    Args:
        texts: what --text and --calibration-text name.
    """
    from .. import schemes
    from ..evaluate.caches import is_ours
    from ..evaluate.calibrator import beside, fitting, origin, unshared
    from ..evaluate.run import home_of
    from ..evaluate.tasks import scored_texts
    from ..evaluate.texts import novel_end, read_text

    model = loading.model
    sources, calibration = texts
    evaluated, given = tuple(map(read_text, sources)), how["calibrations"]
    if calibration is not None:
        return _Texts(evaluated, given, read_text(calibration))
    ours = [schemes.for_layers(one, model.layers) for one in how["schemes"] if is_ours(one, how["caches"])]
    lacking = [s for s in ours if s.needs_calibration and fitting(given, model.config, s) is None]
    evaluated = beside(evaluated, given, bool(lacking))
    # by an earlier run, which goes on with it
    made = home_of(how["out"], how["name"], loading.dtype, model.config) / "calibration"
    lacking = [s for s in lacking if not (made / f"{s.name}.safetensors").exists()]
    tests = scored_texts(how["tasks"], evaluated)
    shared = [s for s in lacking if unshared([s], tests) is None]
    kept = _kept(model, shared, tests) if shared else None
    if kept is not None:
        names = ", ".join(s.name for s in shared)
        note = f"{names}: {origin(kept)}"
        lacking = [s for s in lacking if s not in shared]
        return _Texts(evaluated, [*given, kept], novel_end(), [], [note, *_apart(lacking, tests)])
    apart = [s for s in lacking if s not in shared]
    return _Texts(evaluated, given, novel_end(), shared, _apart(apart, tests))


def _apart(schemes: list[Scheme], tests: tuple[Text, ...]) -> list[str]:
    """Say which schemes are calibrated for one folder of results alone, and why."""
    from ..evaluate.calibrator import unshared

    return [
        f"{s.name} is calibrated for these results alone, on novel-end (--calibration-text names another text):"
        f" {unshared([s], tests)}"
        for s in schemes
    ]


def _kept(model: ModelRef, wanting: list[Scheme], tests: tuple[Text, ...]) -> Calibration | None:
    """The calibration that is kept for a model in files, if these schemes take it and it was made on none of the
    texts.
    """
    from ..calibrate import kept
    from ..evaluate.calibrator import seen_of

    found = kept.find_for(model, wanting[0])
    return None if found is None or seen_of(found, tests) else found


def _print(found: dict[str, dict[str, dict[str, Any]]], out: Path) -> None:
    tables = [part for task, rows in found.items() for part in (_table(task, rows), _LEGENDS.get(task)) if part]
    show(*tables, f"results in {out}; `kvbits report {out}` draws them")


_SIGNED = ("ppl_change", "drift")
_PERCENT = (
    *_SIGNED,
    "top1_agreement",
    "mass_matched",
    "accuracy",
    "accuracy_base",
    "agreement",
    "found_of_base",
    "token_accuracy",
)
_HIDDEN = ("difference_low", "difference_high", "texts", "windows", "by_layer", "by_head", "heat_map", "by_subject")
_OF_TEXTS = {
    "ppl": "ppl",
    "ppl_change": "change",
    "kl_mean": "KL",
    "kl_max": "worst",
    "kl_lost": "> 1 nat",
    "read_raw": "read raw",
    "bytes_held": "bytes",
    "tokens_per_s": "tokens/s",
}
_LEFT_OUT = {
    "fidelity": ("tokens_per_s",),
    "decode": ("ppl",),
    "replay": ("tokens_per_s", "ppl", "ppl_change", "bytes_held"),
}
"""What fits a terminal of 80 columns of the tasks that read texts; --json and the files have everything."""
_OF_CHAINS = {"top1_agreement": "top-1", "drift": "per doubling", "first_flip": "first flip"}
_NAMES = (
    _OF_TEXTS
    | _OF_CHAINS
    | {
        "found_of_base": "of what the model's own finds",
        "base_found": "its own finds",
        "key_bits": "key bits left",
        "value_bits": "value bits left",
    }
)
_OF_PAIRS = (
    "difference: points more than the model's own cache has right (95 % interval); lost, gained: questions that only"
    " one of the two has right; p: McNemar's exact test."
)
_OF_KL = (
    "worst: the largest KL of a token, nats; > 1 nat: share of tokens whose KL is above; read raw: share of the tokens"
    " attended to that were still 16-bit, mean over scored tokens and layers."
)
_LEGENDS = {
    "fidelity": _OF_KL,
    "decode": _OF_KL,
    "replay": f"{_OF_KL} per doubling: growth of KL when the position doubles, from 512 on; first flip: mean position.",
    **dict.fromkeys(("copying", "tracking", "ruler"), _OF_PAIRS),
    "attention": (
        "bits left: how many bits of the numbers survive, 1/2 log2(variance / squared error), mean over layers and kv"
        " heads; not what is stored. worst layer: of the largest output error."
    ),
}


def _table(task: str, rows: dict[str, dict[str, Any]]) -> Any:
    from ..evaluate.paired import points

    columns = list(
        dict.fromkeys(
            k for r in rows.values() for k, v in r.items() if k not in _HIDDEN and not isinstance(v, dict | list)
        )
    )
    if "ppl" in columns:
        columns = [
            c for c in _OF_TEXTS | (_OF_CHAINS if task == "replay" else {}) if c in columns and c not in _LEFT_OUT[task]
        ]
    table = new_table(task, "cache", *(_NAMES.get(c, c.replace("_", " ")) for c in columns))
    for cache, row in rows.items():
        table.add_row(cache, *(points(row) if c == "difference" else _cell(c, row.get(c)) for c in columns))
    return table


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in ("kl_lost", "read_raw"):
        return f"{value:.1%}"
    if column in ("kl_mean", "kl_max"):
        return f"{value:.3g}"
    if column == "bytes_held":
        return human_bytes(value)
    if column in _PERCENT:
        return f"{value:+.2%}" if column in _SIGNED else f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _floats(option: str, text: str) -> tuple[float, ...]:
    names = names_of(option, text)
    try:
        numbers = [float(n) for n in names]
    except ValueError:
        raise SpecError(f"{option} {text!r} is not a list of numbers like 0,0.5,1") from None
    return _once(option, numbers)


def _once(option: str, given: list[Any]) -> tuple[Any, ...]:
    if repeated := [one for one in given if given.count(one) > 1]:
        raise SpecError(f"{option} {repeated[0]} is given {given.count(repeated[0])} times; give it once")
    return tuple(given)


def _pairs(given: list[str]) -> dict[str, str]:
    if bad := [g for g in given if "=" not in g]:
        raise SpecError(f"--data {bad[0]!r} is not NAME=FILE, like humaneval=HumanEval.jsonl")
    return dict(g.split("=", 1) for g in given)
