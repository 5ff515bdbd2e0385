"""`kvbits eval`: caches x tasks on a model, item by item, results on disk after each.

The order is item by item with all caches side by side, so that the base is computed once for all and timings take turns on the same machine.
A run that stops goes on: what a file already holds is not computed again.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import schemes as presets
from ..calibrate import Calibration, calibrate_all, prompts_from_text
from ..errors import CalibrationError, SpecError, UnsupportedError
from ..geometry import layer_geometries
from ..progress import bar
from .caches import CacheFactory, base_factory, expand_names, factory
from .results import ResultFile, environment, model_facts
from .tasks import Context, Options, Task, load
from .texts import Text

if TYPE_CHECKING:
    from ..spec import Scheme


class Calibrator:
    """Calibrates schemes that need it, on text that is never evaluated, and keeps the files beside the results.

    Args:
        directory: where calibration files are kept; one that fits is used again.
        text: the calibration text; None refuses schemes that need one.
        tests: the texts evaluated on.

    Raises:
        SpecError: the calibration text is one of the texts evaluated on.
    """

    def __init__(self, model: Any, tokenizer: Any, directory: Path, text: Text | None, tests: tuple[Text, ...], prompts: int = 32, length: int = 512) -> None:
        if text is not None and (same := [t.name for t in tests if t.sha256 == text.sha256]):
            raise SpecError(f"--calibration-text is {same[0]!r}, which is evaluated on: its scales would flatter the scheme; give another text")
        self.model, self.tokenizer, self.directory, self.text, self.prompts, self.length = model, tokenizer, directory, text, prompts, length

    def prepare(self, schemes: list[Scheme]) -> None:
        """Calibrate those of `schemes` that need it and have no file yet, all in one pass over the text."""
        missing = [s for s in schemes if s.needs_calibration and self._kept(s) is None]
        if not missing:
            return
        if self.text is None:
            raise UnsupportedError(f"scheme {missing[0].name!r} needs calibration; give --calibration-text FILE or novel, never a text you evaluate on")
        codebooks = any(spec.has_codebook for s in missing for spec in (s.key, s.value))
        windows = prompts_from_text(
            self.tokenizer, self.text.content, num_prompts=self.prompts, length=self.length, batch_size=1 if codebooks else 4
        )  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / f"{hashlib.sha256(repr(missing).encode()).hexdigest()[:8]}.partial"
        for scheme, found in zip(missing, calibrate_all(self.model, windows, missing, resume=partial, progress=True), strict=True):
            found.info.update(self._about())
            found.save(self._path(scheme))

    def __call__(self, scheme: Scheme) -> Calibration:
        self.prepare([scheme])
        found = self._kept(scheme)
        if found is None:
            raise CalibrationError(f"{self._path(scheme)} was replaced by one of another text meanwhile; give every run a folder of its own")
        return found

    def _path(self, scheme: Scheme) -> Path:
        return self.directory / f"{scheme.name}.safetensors"

    def _about(self) -> dict[str, Any]:
        assert self.text is not None
        return {"text": self.text.name, "text_sha256": self.text.sha256, "windows": self.prompts, "length": self.length}

    def _kept(self, scheme: Scheme) -> Calibration | None:
        """The file of an earlier run, if it was made of this text for this model and scheme."""
        if self.text is None or not self._path(scheme).exists():
            return None
        found, wanted = Calibration.load(self._path(scheme)), self._about()
        if {k: found.info.get(k) for k in wanted} != wanted:
            return None
        found.check(self.model.config, scheme)
        return found


def evaluate(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    schemes: list[str],
    tasks: list[str],
    texts: tuple[Text, ...],
    out: Path,
    options: Options | None = None,
    calibration_text: Text | None = None,
    simulate: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    on_skip: Callable[[str], None] = lambda message: None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure caches on a loaded model.

    Args:
        model, tokenizer: from `load_model`.
        name: what results call the model.
        schemes: preset names, stock caches, `all`, `stock`.
        tasks: task names, see `tasks.TASKS`.
        texts: texts of the text tasks.
        out: results go to OUT/NAME/TASK/SCHEME.json.
        calibration_text: for schemes that need one.
        simulate: measure presets also as a dense cache simulates them (see `evaluate.simulated`); `kvbits report` leaves such results out.
        on_skip: told about stock caches that this model cannot have, and schemes that cannot be simulated; a preset that cannot serve is an error.

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
    kind = str(model.dtype).removeprefix("torch.")
    home = out / (name if kind == "bfloat16" else f"{name}-{kind}")
    facts = model_facts(model, name)
    calibrator = Calibrator(model, tokenizer, home / "calibration", calibration_text, texts)
    layers = layer_geometries(model.config)
    calibrator.prepare([presets.for_layers(n, layers) for n in expand_names(schemes) if n in presets.PRESETS])
    factories = [base_factory(model)]
    for wanted in expand_names(schemes):
        ours = wanted in presets.PRESETS
        for simulated in (False, True) if simulate and ours else (False,):
            try:
                factories.append(factory(model, wanted, calibration=calibrator, simulate=simulated))
            except UnsupportedError as error:
                if ours and not simulated:
                    raise
                on_skip(str(error))
    context = Context(model, tokenizer, texts, options)
    return {task: _run(load(task)(context), factories, home, facts, overwrite, progress) for task in tasks}


def _run(task: Task, factories: list[CacheFactory], home: Path, facts: dict[str, Any], overwrite: bool, progress: bool) -> dict[str, dict[str, Any]]:
    model = task.context.model
    files = {}
    for f in factories:
        header = {"task": task.name, "scheme": f.name, "kind": f.kind, "info": f.info, "settings": task.settings, "model": facts}
        files[f.name] = ResultFile(home / task.name / f"{f.name}.json", header, overwrite=overwrite)
    base = factories[0]
    keys = task.item_keys()
    todo = {key: [f for f in factories if key not in files[f.name].items] for key in keys}
    if task.relative:  # the others need the base beside them
        todo = {key: [base, *(f for f in fs if f is not base)] if fs else [] for key, fs in todo.items()}
    total = sum(task.size(key) * len(fs) for key, fs in todo.items())
    with bar(f"{facts['name']}: {task.name}, {len(factories)} caches", total, enabled=progress and total > 0) as advance:
        for batch, fs in _batches(task, todo):
            began = time.perf_counter()
            records = task.run_batch(batch, {f.name: f for f in fs}, advance)
            seconds = (time.perf_counter() - began) / len(fs)
            for f in fs:
                for key in batch:
                    files[f.name].add(key, records[key][f.name])
                files[f.name].write(environment(model.device, seconds), task.summary(files[f.name].items, files[base.name].items))
    return {name: task.summary(file.items, files[base.name].items) if file.items else {} for name, file in files.items()}


def _batches(task: Task, todo: dict[str, list[CacheFactory]]) -> list[tuple[list[str], list[CacheFactory]]]:
    """Items that run together: neighbours of one size that the same caches have yet to run."""
    found: list[tuple[list[str], list[CacheFactory]]] = []
    most = task.context.options.batch_size if task.batched else 1
    for key, fs in todo.items():
        if not fs:
            continue
        last = found[-1] if found else None
        if last is not None and len(last[0]) < most and last[1] == fs and task.size(last[0][-1]) == task.size(key):
            last[0].append(key)
        else:
            found.append(([key], fs))
    return found
