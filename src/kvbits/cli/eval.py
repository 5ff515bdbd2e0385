"""`kvbits eval`: caches x tasks on a model, resumable, results as JSON files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..evaluate.settings import Options
from ..files import require_folder
from ..settings import names_in, once, setting
from .common import InDtype, OfSchemes, command, new_table, print_json, when_stopped
from .output import show, tell


@dataclass(frozen=True, kw_only=True)
class Evaluated(OfSchemes, InDtype):
    """Options of `kvbits eval`: what is evaluated."""

    out: Path = setting(..., "Folder for results: MODEL/TASK/SCHEME.json. The same folder continues a stopped run.")
    caches: Path | None = setting(
        None,
        "Python file with caches of your own in a mapping CACHES; --schemes takes their names, or `caches` for all.",
    )
    tasks: tuple[str, ...] = setting(
        ("fidelity",),
        "Comma-separated: fidelity (perplexity, KL), decode, greedy, follow, replay, attention, entities, copying,"
        " tracking, ruler, tools, humaneval, gsm8k, mmlu.",
        read=names_in,
        shown="fidelity",
    )
    text: list[str] | None = setting(
        None, "Text to evaluate on: a file, hub:ID, or the shipped novel or code. Repeatable.", shown="novel"
    )
    calibration_text: str | None = setting(
        None,
        "Text to calibrate on (32 windows of 512 tokens), different from every --text.",
        shown="klt: the calibration in the cache folder, if it saw no --text; else novel-end",
    )
    calibration: list[Path] | None = setting(
        None, "File of `kvbits calibrate`; each serves the scheme that it was made for. Repeatable."
    )
    sizes: Options = field(default_factory=Options)
    alone: bool = setting(False, "Also measure each preset with only its keys, and with only its values, in few bits.")
    simulate: bool = setting(False, "Also measure each preset simulated in a dense cache; reports leave it out.")
    overwrite: bool = setting(
        False, "Replace results of other settings, and trimmed results. Without it they are refused."
    )
    name: str | None = setting(None, "Name of the model in results; the last part of MODEL if not given.")


@command("eval")
def evaluate(options: Evaluated) -> None:
    """Measure what each cache costs on a model, beside the 16-bit cache on the same tokens.

    Tasks measure perplexity, KL, retrieval, benchmarks and speed. Every scheme runs through the real packed cache and
    the real attention op. Results are JSON files, and `kvbits report` draws them. Schemes are the core presets if none
    is named. `literature` adds formats of papers, and `stock` Transformers' own quantized caches (quanto, HQQ, fp8).
    `--caches FILE.py` adds caches of your own.
    """
    ref, out, sources = options.ref, options.out, options.text or ["novel"]
    require_folder(out, "--out", writable=True)
    once("--text", [os.path.normpath(s) for s in sources])
    name = ref.short_name.removesuffix(".gguf") if options.name is None else options.name
    if not name or "/" in name or name.startswith("."):
        raise SpecError(
            f"--name {name!r} is not a folder name; results go to OUT/NAME, so give one without a slash or a dot at"
            " its front"
        )
    from ..calibrate import Calibration
    from ..evaluate import tasks
    from ..evaluate.caches import expand, read_caches
    from ..evaluate.calibrator import chosen_for
    from ..evaluate.run import Evaluation, home_of
    from ..evaluate.texts import read_text
    from ..integrations.models import load_tokenizer

    chosen, draws = tasks.names_of(list(options.tasks)), options.sizes.draws
    if draws and not {"gsm8k", "humaneval"} & set(chosen):
        raise SpecError(f"--draws {draws} means nothing for {', '.join(chosen)}; gsm8k and humaneval draw answers")
    caches = {} if options.caches is None else read_caches(options.caches)
    evaluation = Evaluation(
        name=name,
        schemes=expand(options.schemes or ["core"], caches),
        tasks=chosen,
        texts=tuple(map(read_text, sources)),
        out=out,
        options=options.sizes,
        calibration_text=None if options.calibration_text is None else read_text(options.calibration_text),
        calibrations=[Calibration.load(path) for path in options.calibration or []],
        caches=caches,
        simulate=options.simulate,
        alone=options.alone,
        overwrite=options.overwrite,
    )
    options.require_place()
    texts, given = chosen_for(
        ref,
        evaluation.ours(ref),
        evaluation.texts,
        evaluation.calibrations,
        evaluation.calibration_text,
        scored=bool(evaluation.tests),
        directory=home_of(out, name, options.dtype_name, ref.config) / "calibration",
        say=tell,
    )
    evaluation = replace(evaluation, texts=texts, calibrations=given)
    evaluation.require_possible(ref, load_tokenizer(ref), options.dtype_name)
    out.mkdir(parents=True, exist_ok=True)
    when_stopped(f"what is measured lies in {out}; the same command continues from there")
    lm, tokenizer = options.load()
    found = evaluation.run(lm, tokenizer, say=tell)
    if options.as_json:
        print_json({"model": options.model, "out": str(out), "tasks": found})
    else:
        _print(found, out)


def _print(found: dict[str, dict[str, dict[str, Any]]], out: Path) -> None:
    from ..evaluate import shown

    things: list[Any] = []
    for task, rows in found.items():
        for only in shown.NARROW.get(task, (None,)):
            columns, cells = shown.table(task, rows, only=only)
            things.append(new_table(task, *columns))
            for row in cells:
                things[-1].add_row(*row)
        things += [shown.LEGENDS[task]] if task in shown.LEGENDS else []
    show(*things, f"results in {out}; `kvbits report {out}` draws them")
