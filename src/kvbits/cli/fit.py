"""`kvbits fit`: give two of memory, context and quality, get the third, as a scheme file for one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, counted
from ..files import require_file, require_folder
from ..units import dtype_name
from .common import (
    Device,
    Dtype,
    Json,
    Loading,
    Model,
    Threads,
    command,
    new_table,
    print_json,
    read_config,
    require_model,
    set_threads,
    tokens,
    when_stopped,
)
from .output import show, tell
from .subject import GpuMemory, Gpus, Memory, Reserve, Weights, subject_of

if TYPE_CHECKING:
    import torch

    from ..evaluate.fit import Fit, Goal
    from ..evaluate.sensitivity import Formats
    from ..evaluate.texts import Text

SIZES = (2, 512, 2, 1024)
"""Windows and tokens of each for single layers, and for whole caches."""


@command()
def fit(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(help="The scheme file, like mine.json. Measurements lie beside it; a run that stopped goes on."),
    ],
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence; 8k is 8,192. If not given, the longest.", parser=tokens())
    ] = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Sequences.", min=1)] = 1,
    gpu_memory: GpuMemory = None,
    gpus: Gpus = 1,
    weights: Weights = None,
    reserve: Reserve = None,
    memory: Memory = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Largest KL divergence from the 16-bit cache, nats. If not given, the least that fits."),
    ] = None,
    text: Annotated[
        str, typer.Option(help="Text like what the model will read: a file, hub:ID, or novel (shipped).")
    ] = "novel",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Formats of the klt presets, whose keys need a calibration: made, and saved beside."
        ),
    ] = False,
    token_local: Annotated[
        bool, typer.Option("--token-local", help="Formats that a token has by itself: what vLLM can serve.")
    ] = False,
    windows: Annotated[int, typer.Option(help="Windows of each half of the text.", min=1)] = SIZES[0],
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Give two of memory, context and quality, get the third: bits for the keys and values of every layer, measured on
    this model.

    With all three, the best that fits, and exit code 1 if it costs more than --max-kl. auto dtype is float32 on a CPU.
    """
    ref = require_model(model)
    require_file(out, "--out")
    if out.suffix != ".json":
        raise SpecError(f"--out {out} must end in .json, by which other commands know a file from a preset")
    work = require_folder(out.with_suffix(".fit"), "--out")
    from .. import planner, runs
    from ..evaluate.fit import Goal, require_room
    from ..evaluate.sensitivity import formats
    from ..spec import LayerGeometry

    subject = subject_of(model)
    cards, limit = subject.room(gpu_memory, gpus, weights, reserve, memory)
    limit = _without_states(limit if cards is None else cards.cache_bytes, subject.state_bytes, batch, gpus)
    layers = planner.rank([g for g in subject.layers if isinstance(g, LayerGeometry)], gpus, subject.query_heads)
    goal = Goal(layers=layers, context=context, batch=batch, memory_bytes=limit, max_kl=max_kl)
    known = formats(layers, calibrate, token_local)
    require_room(goal, known)
    kind = "float32" if dtype == "auto" and device in (None, "cpu") else dtype_name(dtype)
    set_threads(threads)
    found = _run(Loading(ref, kind, device), goal, text, (out, work), windows, known)
    if as_json:
        print_json({"run": runs.record(), "model": model, "out": str(out)} | found.to_dict())
    else:
        _print(found, model, out, calibrate)
    if not found.reached:
        raise typer.Exit(1)


def _without_states(limit: int | None, state_bytes: int | None, batch: int, gpus: int) -> int | None:
    """What recurrent states leave of the memory of one GPU's cache.

    Raises:
        SpecError: they leave nothing.
    """
    from ..units import human_bytes

    if limit is None or state_bytes == 0:
        return limit
    if state_bytes is None:
        tell("recurrent layers keep a state of a size that is not known here; the memory is taken for pages alone")
        return limit
    states = batch * -(-state_bytes // gpus)
    if states >= limit:
        raise SpecError(
            f"the recurrent states of {counted(batch, 'sequence')} take {human_bytes(states)}, all of"
            f" {human_bytes(limit)}; give more memory"
        )
    tell(f"recurrent states take {human_bytes(states)} of the memory, pages have {human_bytes(limit - states)}")
    return limit - states


def _run(loading: Loading, goal: Goal, source: str, places: tuple[Path, Path], count: int, kind: Formats) -> Fit:
    """Measure, choose, and write the scheme (and what it needs)."""
    from ..evaluate.fit import bound_to, fit, write
    from ..evaluate.sensitivity import formats
    from ..evaluate.texts import halves, read_text, windows
    from ..integrations.identity import identity
    from ..integrations.models import load_tokenizer

    model, (out, work) = loading.model, places
    first, second = halves(read_text(source))
    tokenizer = load_tokenizer(model)
    read_config(model)
    ids = (
        windows(tokenizer, first, count=count, length=SIZES[1], limit=model.max_context),
        windows(tokenizer, second, count=count, length=SIZES[3], limit=model.max_context),
    )
    work.mkdir(exist_ok=True)
    when_stopped(f"what is measured lies in {work}; the same command goes on from there")
    lm, _ = loading.load()
    bench = _bench(lm, tokenizer, ids, first, second, work, kind)
    found = fit(
        bench,
        formats(model.layers, kind.calibrated, kind.token_local),
        goal,
        name=out.stem,
        say=lambda text: tell(text),
    )
    how = (
        f"fitted to {model.short_name} on {first.name.removesuffix('-start')}"
        if found.gained
        else f"the preset {found.chosen.scheme.name}, which nothing by layer beat"
    )
    scheme = bound_to(
        found.chosen.scheme,
        model.layers,
        name=out.stem,
        weights=identity(lm),
        model=model.short_name,
        description=how,
    )
    write(scheme, bench, out)
    return found


def _bench(
    model: Any,
    tokenizer: Any,
    ids: tuple[torch.Tensor, torch.Tensor],
    first: Text,
    second: Text,
    work: Path,
    known: Formats,
) -> Any:
    from .. import schemes
    from ..calibrate.sampling import Sample
    from ..evaluate.calibrator import Calibrator
    from ..evaluate.sensitivity import Bench, State
    from ..geometry import layer_geometries
    from ..integrations.identity import identity

    bases = None
    if known.calibrated:
        klt = schemes.for_layers("klt4", layer_geometries(model.config))
        bases = Calibrator(model, tokenizer, first, tests=(second,), sample=Sample(8, 1024), directory=work)(klt).static
    header = {
        "weights": identity(model),
        "dtype": str(model.dtype),
        "text": first.sha256 + second.sha256,
        "windows": [list(x.shape) for x in ids],
    }
    return Bench(model, *ids, bases, State(work / f"{known.kind}.json", header | {"formats": known.kind}))


def _print(found: Fit, model: str, out: Path, calibrated: bool) -> None:
    from ..units import human_bytes

    goal = found.goal
    table = new_table("what quality costs", "bits/element", "bytes", "predicted KL", left=0)
    for nbytes, bits, kl in found.steps:
        table.add_row(f"{bits:.2f}", human_bytes(nbytes), f"{kl:.5f}")
    beside = new_table("measured as whole caches", "cache", "bits/element", "bytes", "predicted KL", "measured KL")
    rows = [(f"choice {i}", m) for i, m in enumerate(found.tried, 1)] + (
        [(found.preset.scheme.name, found.preset)] if found.preset else []
    )
    for name, m in rows:
        taken = " (taken)" if m is found.chosen else ""
        beside.add_row(
            name + taken,
            f"{m.bits:.2f}",
            human_bytes(m.nbytes),
            "" if m.predicted is None else f"{m.predicted:.5f}",
            f"{m.kl:.5f}",
        )
    show(
        f"{model}, {goal.weighed_at:,} tokens x {goal.batch}",
        table,
        beside,
        *picture(found),
        "",
        *_words(found, out, calibrated),
    )


def picture(found: Fit) -> list[str]:
    """Bits of each layer's keys and values: a row of digits and one of blocks."""
    from ..evaluate.fit import widths
    from ..evaluate.sensitivity import RAW, SIDES

    count = len(found.goal.layers)
    lines = ["layer   " + "".join(str(i // 10 % 10) if i % 10 == 0 else "." if i % 5 else ":" for i in range(count))]
    for side in SIDES:
        bits = widths(found.chosen.scheme, count, side)
        blocks = "".join(" ▁▂▃▄▅▆▇█"[min(8, round(b))] for b in bits)
        digits = "".join("R" if b >= RAW else str(round(b)) for b in bits)
        lines += [f"{side + 's':8}{blocks}", f"        {digits}"]
    return lines


def _words(found: Fit, out: Path, calibrated: bool) -> list[str]:
    from ..units import human_bytes

    goal, chosen = found.goal, found.chosen
    users = counted(goal.batch, "sequence")
    context = "any number of" if found.context is None else f"{found.context:,}"
    lines = [
        f"{human_bytes(chosen.nbytes)} at {goal.weighed_at:,} tokens x {goal.batch}, KL {chosen.kl:.5f} nats; {context}"
        f" tokens for {users}"
    ]
    if not found.gained and found.preset is not None:
        lines.insert(
            0,
            f"nothing to gain over {found.preset.scheme.name}: the best choice by layer costs a KL of"
            f" {found.fitted.kl:.5f}, it {found.preset.kl:.5f}",
        )
    elif found.preset is not None:
        lines.insert(
            0,
            f"{found.fitted.kl / found.preset.kl:.2f} times the KL of {found.preset.scheme.name}, the best preset of"
            " equal or fewer bytes",
        )
    elif goal.memory_bytes is not None:
        lines.insert(0, "no preset fits" if calibrated else "no preset without a calibration fits")
    if not found.reached:
        lines.append(f"not reached: KL {chosen.kl:.5f} is above {goal.max_kl}; give more memory, or a shorter context")
    also = f", calibration={out.with_suffix('.safetensors').name}" if chosen.scheme.needs_calibration else ""
    lines.append(
        f"scheme in {out}{also}: KVCache.for_model(model, {str(out)!r}), kvbits plan, eval, check --scheme {out}"
    )
    return lines
