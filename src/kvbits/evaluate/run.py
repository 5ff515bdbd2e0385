"""`kvbits eval`: caches x tasks on a model, item by item, results on disk after each.

The order is item by item with all caches side by side, so that the base is computed once for all and timings take turns
on the same machine. A run that stops goes on: what a file already holds is not computed again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import schemes as presets
from ..calibrate import Calibration
from ..calibrate.sampling import Sample
from ..errors import UnsupportedError
from ..geometry import layer_geometries
from ..progress import bar
from ..spec import CacheSpec, LayerGeometry, Scheme, to_dict
from .caches import CacheFactory, Caches, base_factory, expand, factory, is_ours, sides
from .calibrator import USUAL, Calibrator, fitting, require_other_text
from .results import ResultFile, model_facts, new_run, require_same
from .tasks import Context, Options, Task, load, scored_texts
from .texts import Text


def evaluate(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    schemes: Sequence[str | Scheme],
    tasks: Sequence[str],
    texts: tuple[Text, ...],
    out: Path,
    options: Options | None = None,
    calibration_text: Text | None = None,
    calibration_sample: Sample = USUAL,
    calibrations: Sequence[Calibration] = (),
    backend: str = "auto",
    caches: Caches | None = None,
    simulate: bool = False,
    alone: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    on_skip: Callable[[str], None] = lambda message: None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure caches on a loaded model.

    Args:
        model, tokenizer: from `load_model`.
        name: what results call the model.
        schemes: preset names, stock caches, `all`, `stock`, files of schemes, schemes of your own (see
            `schemes.expand`), names of `caches`.
        tasks: task names, see `tasks.TASKS`.
        texts: texts of the text tasks.
        out: results go to OUT/NAME/TASK/SCHEME.json.
        calibration_text, calibration_sample: for schemes that need one.
        calibrations: made before, for the schemes that they fit; results say which.
        backend: for presets and schemes of your own, see `KVCache.for_model`.
        caches: caches from outside, such as `caches.read_caches` returns; measured where `schemes` names them.
        simulate: measure presets also as a dense cache simulates them (see `evaluate.simulated`); `kvbits report`
            leaves such results out.
        alone: measure presets also with raw values, and with raw keys (see `caches.sides`).
        say: told how much of each task is there already.
        on_skip: told about stock caches and `caches` that this model cannot have, and schemes that cannot be
            simulated; a preset that cannot serve is an error.

    Returns:
        task -> cache name -> summary, the base first.

    Raises:
        SpecError: unknown names, or results of other settings in `out`.
        DataError: a text too short.
        UnsupportedError: a model kvbits cannot serve.
    """
    options = Options() if options is None else options
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    home = home_of(out, name, str(model.dtype), model.config)
    facts = model_facts(model, name)
    tests = scored_texts(tasks, texts)
    calibrator = Calibrator(
        model,
        tokenizer,
        calibration_text,
        tests=tests,
        sample=calibration_sample,
        directory=home / "calibration",
        given=calibrations,
    )
    caches = caches or {}
    chosen = _wanted(schemes, caches, layer_geometries(model.config), alone)
    factories = _factories(model, chosen, caches, calibrator, backend, simulate, on_skip)
    context = Context(model, tokenizer, texts, options)
    run = new_run(model.device)
    return {
        task: _run(load(task)(context), factories, home, facts, run, calibrations, overwrite, progress, say)
        for task in tasks
    }


def require_possible(
    config: Any,
    tokenizer: Any,
    *,
    name: str,
    dtype: str,
    schemes: Sequence[str | Scheme],
    tasks: Sequence[str],
    texts: tuple[Text, ...],
    out: Path,
    options: Options,
    caches: Caches | None = None,
    alone: bool = False,
    overwrite: bool = False,
    calibrations: Sequence[Calibration] = (),
) -> None:
    """Refuse what `evaluate` would refuse once the model is loaded, as far as its configuration and tokenizer tell:
    schemes that do not fit, texts too short, windows too long, data files, results of other settings.

    Args:
        dtype: that the model will have; "auto" for its configuration's.

    Raises:
        SpecError, DataError, UnsupportedError: as `evaluate`.
    """
    layers = layer_geometries(config)
    caches = caches or {}
    wanted = _wanted(schemes, caches, layers, alone)
    chosen = [presets.for_layers(given, layers) for given in wanted if is_ours(given, caches)]
    for scheme in chosen:
        CacheSpec(scheme=scheme, layers=layers)
    require_other_text(calibrations, scored_texts(tasks, texts))
    for file in calibrations:
        if not any(file.fits(config, scheme) for scheme in chosen):
            needing = [s for s in chosen if s.needs_calibration] or chosen
            file.fitted(config, next((s for s in needing if s.name == file.info.get("scheme")), needing[0]))
    home = home_of(out, name, dtype, config)
    for task in (load(one)(Context(None, tokenizer, texts, options, config)) for one in tasks):
        for one in [] if overwrite else [None, *chosen]:
            names = ("16-bit", "32-bit") if one is None else (one.name, f"{one.name}-simulated")
            for path in (home / task.name / f"{n}.json" for n in names):
                given = None if one is None else fitting(calibrations, config, one)
                require_same(path, {"settings": task.settings | _own(one, given)})


def home_of(out: Path, name: str, dtype: str, config: Any) -> Path:
    """A model's folder of results; "auto" stands for its configuration's dtype."""
    kind = (str(getattr(config, "dtype", None) or "float32") if dtype == "auto" else dtype).removeprefix("torch.")
    return out / (name if kind == "bfloat16" else f"{name}-{kind}")


def _wanted(
    schemes: Sequence[str | Scheme], caches: Caches, layers: tuple[LayerGeometry, ...], alone: bool
) -> list[str | Scheme]:
    """Return what is measured: names written out, and the two sides of each scheme of ours."""
    found = expand(schemes, caches)
    ours = [one for one in found if alone and is_ours(one, caches)]
    return found + [side for one in ours for side in sides(presets.for_layers(one, layers))]


def _factories(
    model: Any,
    schemes: list[str | Scheme],
    caches: Caches,
    calibrator: Calibrator,
    backend: str,
    simulate: bool,
    on_skip: Callable[[str], None],
) -> list[CacheFactory]:
    """The base and every cache of `schemes`, calibrated in one pass."""
    layers = layer_geometries(model.config)
    calibrator.prepare([presets.for_layers(one, layers) for one in schemes if is_ours(one, caches)])
    found = [base_factory(model)]
    for wanted in schemes:
        ours = is_ours(wanted, caches)
        for simulated in (False, True) if simulate and ours else (False,):
            try:
                found.append(
                    factory(model, wanted, calibration=calibrator, backend=backend, simulate=simulated, caches=caches)
                )
            except UnsupportedError as error:
                if ours and not simulated:
                    raise
                on_skip(str(error))
    return found


def _run(
    task: Task,
    factories: list[CacheFactory],
    home: Path,
    facts: dict[str, Any],
    run: dict[str, Any],
    given: Sequence[Calibration],
    overwrite: bool,
    progress: bool,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    model = task.context.model
    files = {}
    for f in factories:
        own = None if f.scheme is None else fitting(given, model.config, f.scheme)
        header = {
            "task": task.name,
            "scheme": f.name,
            "kind": f.kind,
            "info": f.info,
            "settings": task.settings | _own(f.scheme, own),
            "model": facts,
        }
        files[f.name] = ResultFile(home / task.name / f"{f.name}.json", header, run, overwrite=overwrite)
    base = factories[0]
    task.kept = files[base.name].items
    for name, file in files.items():
        if old := [key for key, record in file.items.items() if not task.pairs(record, task.kept.get(key))]:
            say(
                f"{facts['name']}: {task.name}: {name} is measured anew where its items are not of what {base.name}"
                f" has: {', '.join(old)}"
            )
            for key in old:
                del file.items[key]
    keys = task.item_keys()
    todo = {key: [f for f in factories if key not in files[f.name].items] for key in keys}
    missing, every = sum(map(len, todo.values())), len(keys) * len(factories)
    if missing < every:
        say(f"{facts['name']}: {task.name}: {every - missing:,} of {every:,} items are there already")
    if task.relative:  # the others need the base beside them
        todo = {key: [base, *(f for f in fs if f is not base)] if fs else [] for key, fs in todo.items()}
    total = sum(task.size(key) * len(fs) for key, fs in todo.items())
    with bar(
        f"{facts['name']}: {task.name}, {len(factories)} caches", total, enabled=progress and total > 0
    ) as advance:
        for batch, fs in _batches(task, todo):
            began = time.perf_counter()
            records = task.run_batch(batch, {f.name: f for f in fs}, advance)
            seconds = (time.perf_counter() - began) / len(fs)
            for f in fs:
                for key in batch:
                    # the base runs again beside others; what an earlier run measured stays
                    if key not in files[f.name].items:
                        files[f.name].add(key, records[key][f.name])
                files[f.name].write(seconds, task.summary(files[f.name].items, files[base.name].items))
    return {
        name: task.summary(file.items, files[base.name].items) if file.items else {} for name, file in files.items()
    }


def _own(scheme: Scheme | None, given: Calibration | None) -> dict[str, Any]:
    """The scheme, where it is one's own, and the id of a calibration that was given: a name alone does not say what it
    is, and two are not mixed in a file.
    """
    found = {} if scheme is None or scheme.name in presets.PRESETS else {"scheme": to_dict(scheme)}
    return found if given is None else found | {"calibration": given.id}


def _batches(task: Task, todo: dict[str, list[CacheFactory]]) -> list[tuple[list[str], list[CacheFactory]]]:
    """Items that run together: neighbours of one size that the same caches have yet to run."""
    found: list[tuple[list[str], list[CacheFactory]]] = []
    most = task.batch if task.batched else 1
    for key, fs in todo.items():
        if not fs:
            continue
        last = found[-1] if found else None
        if last is not None and len(last[0]) < most and last[1] == fs and task.size(last[0][-1]) == task.size(key):
            last[0].append(key)
        else:
            found.append(([key], fs))
    return found
