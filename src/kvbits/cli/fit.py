"""`kvbits fit`: give two of memory, context and quality, get the third, as a scheme file for one model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import SpecError, counted
from ..files import require_file, require_folder
from ..settings import setting
from ..units import human_bytes
from .common import InDtype, command, new_table, print_json, when_stopped
from .memory import Memory, stated
from .output import show, tell

if TYPE_CHECKING:
    from ..evaluate.fit import Fit, Goal
    from ..model_ref import ModelRef

WINDOWS, LENGTH = 2, 1024
"""Windows for the backward pass, and to measure; tokens of each behind those that are read raw or from copies."""


@dataclass(frozen=True, kw_only=True)
class Fitted(Memory, InDtype):
    """Options of `kvbits fit`: what is fitted, and to what."""

    out: Path = setting(
        ..., "Scheme file to write, like mine.json. Measurements lie beside it, so a stopped run continues."
    )
    scheme: str | None = setting(
        None, "Preset that sets the bytes: klt2, klt3 or klt4. Instead of memory and --max-kl."
    )
    context: int | None = setting(
        None, "Tokens per sequence; 8k is 8,192. If not given, kvbits finds the longest.", tokens=1
    )
    batch: int = setting(1, "Sequences.", "--batch-size", "--batch", least=1)
    max_kl: float | None = setting(
        None, "Largest KL from the 16-bit cache, in nats. If not given, kvbits finds the least that fits."
    )
    text: str | None = setting(
        None,
        "Text like what the model will read: a file or hub:ID. kvbits fits to one half and measures on the other.",
        shown="shipped texts",
    )
    equal_pages: bool = setting(
        False, "Keep the pages of all layers equal in bytes, for pools with one page size. Gains less."
    )
    windows: int = setting(WINDOWS, "Number of windows for the backward pass, and for the measurement.", least=1)

    @cached_property
    def ref(self) -> ModelRef:
        from ..model_ref import ModelRef

        ModelRef.find(self.model)
        return stated(self.model)

    @property
    def dtype_name(self) -> str:
        on_cpu = self.device in (None, "cpu")
        return "float32" if self.dtype == "auto" and on_cpu else super().dtype_name

    @property
    def work(self) -> Path:
        """Folder where measurements lie."""
        return require_folder(self.out.with_suffix(".fit"), "--out")


@command()
def fit(options: Fitted) -> None:
    """Spend bits on the keys and values of the layers that need them in this model.

    Name a preset (--scheme) to keep its bytes, or two of memory, context and quality to find the third. With all
    three, kvbits finds the best scheme that fits, and the exit code is 1 if its KL is above --max-kl. On a CPU, dtype
    auto is float32.
    """
    ref, out, batch, gpus = options.ref, options.out, options.batch, options.gpus
    require_file(out, "--out")
    if out.suffix != ".json":
        raise SpecError(f"--out {out} must end in .json, by which other commands know a file from a preset")
    _ = options.work
    from .. import planner, runs
    from ..evaluate.fit import Goal, family, require_room

    room = options.room(ref)
    limit = room.nbytes if room.cards is None else room.cards.cache_bytes
    limit = _without_states(limit, ref.state_bytes, batch, gpus)
    layers = planner.rank(ref.layers, gpus, ref.query_heads)
    goal = Goal(
        layers=layers,
        scheme=options.scheme,
        context=options.context,
        batch=batch,
        memory_bytes=limit,
        max_kl=options.max_kl,
        equal_pages=options.equal_pages,
    )
    require_room(goal, family(layers))
    options.require_place()
    found = _run(options, goal)
    if options.as_json:
        print_json({"run": runs.record(), "model": options.model, "out": str(out)} | found.to_dict())
    else:
        _print(found, options.model, out)
    if not found.reached:
        raise typer.Exit(1)


def _without_states(limit: int | None, state_bytes: int | None, batch: int, gpus: int) -> int | None:
    """Return what recurrent states leave of the memory of one GPU's cache, in bytes.

    Raises:
        SpecError: they leave nothing.
    """
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


def _run(options: Fitted, goal: Goal) -> Fit:
    """Measure, choose, and write the scheme (and a calibration that is not kept for the model)."""
    from ..calibrate import kept
    from ..evaluate.calibrator import Calibrator
    from ..evaluate.fit import Bench, base_of, bound_to, family, fit, near, require_start, write
    from ..evaluate.results import ResultFile, model_facts, new_run
    from ..evaluate.sensitivity import sensitivities
    from ..evaluate.texts import halves, novel_start, read_text, windows
    from ..integrations.identity import identity
    from ..integrations.models import load_tokenizer
    from ..model_ref import ModelRef
    from ..schemes import for_layers

    ref, out, work, count = options.ref, options.out, options.work, options.windows
    seen, test = list(kept.source().parts), novel_start()
    if options.text is not None:
        *seen, test = halves(read_text(options.text))
    tokenizer = load_tokenizer(ref)
    longest = LENGTH + max(near(for_layers(name, ref.layers)) for name in family(ref.layers))
    tests = windows(tokenizer, test, count=count, length=longest, limit=ref.max_context)
    of_each = -(-count // len(seen))
    probes = [w for t in seen for w in windows(tokenizer, t, count=of_each, length=longest, limit=ref.max_context)]
    lm, _ = options.load()
    loaded = ModelRef.of(lm)
    names = family(ref.layers, lm)
    require_start(goal, names)
    work.mkdir(exist_ok=True)
    when_stopped(f"what is measured lies in {work}; the same command continues from there")
    whole = for_layers(names[-1], ref.layers)
    bases = None
    if whole.needs_calibration:
        bases = Calibrator(lm, tokenizer, None, tests=(test,), directory=work, say=tell)(whole)
    header = {
        "task": "fit",
        "scheme": names[-1],
        "kind": "sensitivity",
        "info": {},
        "settings": {
            "text": "".join(t.sha256 for t in (*seen, test)),
            "windows": [len(probes), *tests.shape],
            "calibration": None if bases is None else bases.id,
        },
        "model": model_facts(lm, ref.short_name),
    }
    bench = Bench(lm, tests, bases, ResultFile(work / f"{names[-1]}.json", header, new_run(lm.device)))
    base = base_of(bench, goal, names)
    known = bench.sensitivities(
        f"beyond {near(base)}",
        lambda: sensitivities(lm, probes, base, bench.calibration(base), near=near(base)),
    )
    found = fit(bench, base, goal, known, name=out.stem, say=lambda text: tell(text))
    how = (
        f"fitted to {ref.short_name} on {'+'.join(t.name for t in seen)}, from {base.name}"
        if found.gained
        else f"the preset {found.chosen.scheme.name}, which nothing by layer beat"
    )
    scheme = bound_to(
        found.chosen.scheme,
        ref.layers,
        name=out.stem,
        weights=identity(lm),
        model=ref.short_name,
        description=how,
    )
    needed = bench.calibration(scheme.plain)
    if needed is not None and (own := kept.find(loaded, scheme.plain)) is not None and own.id == needed.id:
        needed = None  # every command and engine finds it
    write(scheme, needed, out)
    return found


def _print(found: Fit, model: str, out: Path) -> None:
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
        *_words(found, out),
    )


def picture(found: Fit) -> list[str]:
    """Return bits of each layer's keys and values: a row of digits and one of blocks."""
    from ..evaluate.fit import RAW, SIDES, widths

    count = len(found.goal.layers)
    lines = ["layer   " + "".join(str(i // 10 % 10) if i % 10 == 0 else "." if i % 5 else ":" for i in range(count))]
    for side in SIDES:
        bits = widths(found.chosen.scheme, found.goal.layers, side)
        blocks = "".join(" ▁▂▃▄▅▆▇█"[min(8, round(b))] for b in bits)
        digits = "".join("R" if b >= RAW else str(round(b)) for b in bits)
        lines += [f"{side + 's':8}{blocks}", f"        {digits}"]
    return lines


def _words(found: Fit, out: Path) -> list[str]:
    goal, chosen = found.goal, found.chosen
    size = f"{human_bytes(chosen.nbytes)} at {goal.weighed_at:,} tokens x {goal.batch}, KL {chosen.kl:.5f} nats"
    if goal.memory_bytes is not None:
        fits = "any number of" if found.context is None else f"{found.context:,}"
        size += f"; {fits} tokens for {counted(goal.batch, 'sequence')}"
    lines = [size]
    if not found.gained and found.preset is not None:
        lines.insert(
            0,
            f"nothing to gain over {found.preset.scheme.name}: the best choice by layer costs a KL of"
            f" {found.fitted.kl:.5f}, it {found.preset.kl:.5f}",
        )
    elif found.preset is not None:
        lines.insert(
            0,
            f"{found.fitted.kl / found.preset.kl:.2f} times the KL of {found.preset.scheme.name}, the preset of"
            " equal or fewer bytes",
        )
    elif goal.memory_bytes is not None:
        lines.insert(0, "no preset fits")
    if not found.reached:
        lines.append(f"not reached: KL {chosen.kl:.5f} is above {goal.max_kl}; give more memory, or a shorter context")
    file = out.with_suffix(".safetensors")
    also = f", calibration={file.name}" if file.exists() and chosen.scheme.needs_calibration else ""
    lines.append(
        f"scheme in {out}{also}: KVCache.for_model(model, {str(out)!r}), kvbits plan, eval, check --scheme {out}"
    )
    return lines
