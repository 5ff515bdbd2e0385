"""`kvbits eval`: caches x tasks on a model, item by item, results on disk after each.

The order is item by item with all caches side by side, so that the base is computed once for all and timings take turns
on the same machine. A run that stopped continues: what a file already holds is not computed again.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import schemes as presets
from ..calibrate import Calibration
from ..calibrate.sampling import Sample
from ..errors import UnsupportedError
from ..model_ref import ModelRef
from ..progress import bar
from ..spec import FORMATS_VERSION, CacheSpec, Scheme, to_dict
from .caches import CacheFactory, Caches, base_factory, expand, factory, is_ours, sides
from .calibrator import USUAL, Calibrator, fitting, require_other_text
from .results import ResultFile, model_facts, new_run, require_same
from .settings import Options
from .tasks import Context, Task, load, scored_texts
from .texts import Text


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Caches and tasks on one model.

    Attributes:
        name: what results call the model.
        schemes: preset names, stock caches, `all`, `stock`, files of schemes, schemes of your own (see
            `schemes.expand`), names of `caches`.
        tasks: task names, see `tasks.TASKS`.
        texts: texts of the text tasks.
        out: results go to OUT/NAME/TASK/SCHEME.json.
        calibration_text, calibration_sample: for schemes that need one; see `Calibrator`.
        calibrations: made before, for the schemes that they fit; results say which.
        caches: caches from outside, such as `caches.read_caches` returns; measured where `schemes` names them.
        simulate: measure presets also as a dense cache simulates them (see `evaluate.simulated`); `kvbits report`
            leaves such results out.
        alone: measure presets also with raw values, and with raw keys (see `caches.sides`).
        overwrite: begin anew where results are of other settings, instead of refusing.
    """

    name: str
    schemes: Sequence[str | Scheme]
    tasks: Sequence[str]
    texts: tuple[Text, ...]
    out: Path
    options: Options = field(default_factory=Options)
    calibration_text: Text | None = None
    calibration_sample: Sample = USUAL
    calibrations: Sequence[Calibration] = ()
    caches: Caches = field(default_factory=dict)
    simulate: bool = False
    alone: bool = False
    overwrite: bool = False

    @property
    def tests(self) -> tuple[Text, ...]:
        """The texts that are measured on, which nothing may be calibrated on."""
        return scored_texts(self.tasks, self.texts)

    def wanted(self, model: ModelRef) -> list[str | Scheme]:
        """List what is measured: names written out, and the two sides of each scheme of ours."""
        found = expand(self.schemes, self.caches)
        ours = [one for one in found if self.alone and is_ours(one, self.caches)]
        return found + [side for one in ours for side in sides(presets.for_layers(one, model.layers))]

    def ours(self, model: ModelRef) -> list[Scheme]:
        """Return the schemes of ours among these, fitted to the model."""
        return [presets.for_layers(one, model.layers) for one in self.wanted(model) if is_ours(one, self.caches)]

    def require_possible(self, model: ModelRef, tokenizer: Any, dtype: str) -> None:
        """Refuse what `run` would refuse once the model is loaded, as far as its configuration and tokenizer tell:
        schemes that do not fit, texts too short, windows too long, data files, results of other settings.

        Args:
            dtype: that the model will have; "auto" for its configuration's.

        Raises:
            SpecError, DataError, UnsupportedError: as `run`.
        """
        chosen, config = self.ours(model), model.config
        for scheme in chosen:
            CacheSpec(scheme=scheme, layers=model.layers)
        require_other_text(self.calibrations, self.tests)
        for file in self.calibrations:
            if not any(file.fits(config, scheme) for scheme in chosen):
                needing = [s for s in chosen if s.needs_calibration] or chosen
                file.fitted(config, next((s for s in needing if s.name == file.info.get("scheme")), needing[0]))
        home = home_of(self.out, self.name, dtype, config)
        for task in (load(one)(Context(model, tokenizer, self.texts, self.options)) for one in self.tasks):
            for one in [] if self.overwrite else [None, *chosen]:
                names = ("16-bit", "32-bit") if one is None else (one.name, f"{one.name}-simulated")
                for path in (home / task.name / f"{n}.json" for n in names):
                    given = None if one is None else fitting(self.calibrations, config, one)
                    require_same(path, {"settings": task.settings | _own(one, given)})

    def run(
        self, model: Any, tokenizer: Any, *, progress: bool = True, say: Callable[[str], None] = lambda message: None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Measure on a loaded model.

        Args:
            model, tokenizer: from `load_model`.
            say: told how much of each task is there already, which calibrations are taken, and which stock caches and
                `caches` this model cannot have, or schemes cannot be simulated; a preset that cannot serve is an error.

        Returns:
            task -> cache name -> summary, the base first.

        Raises:
            SpecError: unknown names, or results of other settings in `out`.
            DataError: a text too short.
            UnsupportedError: a model kvbits cannot serve.
        """
        random.seed(self.options.seed)
        torch.manual_seed(self.options.seed)
        ref = ModelRef.of(model)
        home, facts = home_of(self.out, self.name, str(model.dtype), model.config), model_facts(model, self.name)
        calibrator = Calibrator(
            model,
            tokenizer,
            self.calibration_text,
            tests=self.tests,
            sample=self.calibration_sample,
            directory=home / "calibration",
            given=self.calibrations,
            say=say,
        )
        factories = self._factories(ref, calibrator, say)
        context, run, found = Context(ref, tokenizer, self.texts, self.options), new_run(model.device), {}
        for task in (load(one)(context) for one in self.tasks):
            files = {}
            for f in factories:
                own = None if f.scheme is None else fitting(calibrator.given, model.config, f.scheme)
                header = {
                    "task": task.name,
                    "scheme": f.name,
                    "kind": f.kind,
                    "info": f.info,
                    "settings": task.settings | _own(f.scheme, own),
                    "model": facts,
                }
                path = home / task.name / f"{f.name}.json"
                files[f.name] = ResultFile(path, header, run, overwrite=self.overwrite)
            found[task.name] = _run(task, factories, files, f"{self.name}: {task.name}", progress, say)
        return found

    def _factories(self, model: ModelRef, calibrator: Calibrator, say: Callable[[str], None]) -> list[CacheFactory]:
        """Return the base and every cache of `schemes`, calibrated in one pass."""
        calibrator.prepare(self.ours(model))
        found = [base_factory(model.loaded)]
        for wanted in self.wanted(model):
            ours = is_ours(wanted, self.caches)
            for simulated in (False, True) if self.simulate and ours else (False,):
                try:
                    one = factory(model.loaded, wanted, calibration=calibrator, simulate=simulated, caches=self.caches)
                    found.append(one)
                except UnsupportedError as error:
                    if ours and not simulated:
                        raise
                    say(f"left out: {error}")
        return found


def home_of(out: Path, name: str, dtype: str, config: Any) -> Path:
    """Return a model's folder of results; "auto" stands for its configuration's dtype."""
    kind = (str(getattr(config, "dtype", None) or "float32") if dtype == "auto" else dtype).removeprefix("torch.")
    return out / (name if kind == "bfloat16" else f"{name}-{kind}")


def _run(
    task: Task,
    factories: list[CacheFactory],
    files: dict[str, ResultFile],
    what: str,
    progress: bool,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Run the items of a task that files lack, as far as they are in this process's share.

    Args:
        what: names model and task in messages.
    """
    base = factories[0]
    files[base.name].take_over()  # its items of another process were written before those that were just read
    task.kept = files[base.name].items
    for name, file in files.items():
        if old := [key for key, record in file.items.items() if not task.pairs(record, task.kept.get(key))]:
            say(f"{what}: {name} is measured anew where its items are not of what {base.name} has: {', '.join(old)}")
            for key in old:
                file.drop(key)
    keys, (part, parts) = task.own_keys(), task.context.options.share
    if not keys:
        say(f"{what}: share {part}/{parts} is empty, because there are {len(task.item_keys()):,} items")
    todo = {key: [f for f in factories if key not in files[f.name].items] for key in keys}
    missing, every = sum(map(len, todo.values())), len(keys) * len(factories)
    if missing < every:
        of_share = "" if parts == 1 else f" of share {part}/{parts}"
        say(f"{what}: {every - missing:,} of {every:,} items{of_share} are there already")
    if task.relative:  # the others need the base beside them
        todo = {key: [base, *(f for f in fs if f is not base)] if fs else [] for key, fs in todo.items()}
    total = sum(task.size(key) * len(fs) for key, fs in todo.items())
    with bar(f"{what}, {len(factories)} caches", total, enabled=progress and total > 0) as advance:
        for batch, fs in _batches(task, todo):
            began = time.perf_counter()
            records = task.run_batch(batch, {f.name: f for f in fs}, advance)
            seconds = (time.perf_counter() - began) / len(fs)
            for f in fs:
                for key in batch:
                    # the base runs again beside others; what an earlier run measured stays
                    if key not in files[f.name].items:
                        files[f.name].add(key, records[key][f.name])
                files[f.name].write(seconds, functools.partial(_summary, task, files[f.name], files[base.name]))
    return {
        name: task.summary(file.items, files[base.name].items) if file.items else {} for name, file in files.items()
    }


def _summary(task: Task, file: ResultFile, base: ResultFile) -> dict[str, Any]:
    """Return the summary of a file that has just taken over what other processes wrote: the base's items were written
    before them.
    """
    base.take_over()
    return task.summary(file.items, base.items)


def _own(scheme: Scheme | None, given: Calibration | None) -> dict[str, Any]:
    """Return what a cache's name does not say: a scheme of one's own, the version of a klt preset's formats, and the
    id of a calibration that was given. Items that differ in them are not mixed in a file.
    """
    if scheme is None:
        found: dict[str, Any] = {}
    elif scheme.name not in presets.PRESETS:
        found = {"scheme": to_dict(scheme)}
    else:
        found = {"formats": FORMATS_VERSION} if scheme.key.is_trellis else {}
    return found if given is None else found | {"calibration": given.id}


def _batches(task: Task, todo: dict[str, list[CacheFactory]]) -> list[tuple[list[str], list[CacheFactory]]]:
    """Return items that run together: neighbours of one size that the same caches have yet to run."""
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
