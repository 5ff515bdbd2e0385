"""Bases that are kept: found by the weights of a model in the user's cache folder, or made there once.

    calibration = of_model(ModelRef.of(model), scheme)            # a loaded model of Transformers
    calibration = of_files(ModelRef("Qwen/Qwen3-8B"), scheme)     # one that another engine has: by its files

One file of a model serves every scheme whose keys have a calibrated basis (`Calibration.fitted`). It lies in
`files.cache_folder("calibrations")` and is named after `key_of` the loaded model, which is also that of the files it
was loaded from, in any dtype, wherever Transformers keeps the names of the weights. That key samples the weights. A
loaded model takes a file only if it was measured on a model of the same `kvbits.identity`, or of another dtype, which
cannot be compared; otherwise its own is made and named by the identity, too. Whoever makes it holds a lock,
which ends with its process, and writes it whole or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import schemes as presets
from ..errors import CalibrationError, KvbitsError, SpecError
from ..files import cache_folder, cache_folders, warn_not_kept
from ..integrations.identity import identity
from ..integrations.models import load_tokenizer
from ..model_ref import ModelRef
from ..progress import say
from ..spec import Scheme
from ..weights import weight_files
from .calibration import Calibration, fingerprint
from .sampling import calibrated, thorough

if TYPE_CHECKING:
    from ..evaluate.texts import Text

FOLDER = "calibrations"
MADE_FOR = "klt4"
"""The scheme that a kept file is measured for."""
TEXTS = ("novel-end", "code")
"""Names of the texts that it is measured on; the novel's first half is left for `check` and `eval`."""
Row = tuple[str, tuple[int, ...], torch.Tensor]
"""The name, shape and first bytes of a matrix."""
_LAYER = re.compile(r"(?:^|\.)((?:layers?|blocks?|h)\.\d+\..+)$")


def of_model(model: ModelRef, scheme: Scheme, *, make: bool = True) -> Calibration:
    """Return the calibration of a loaded model for a scheme, made where none is kept.

    Args:
        make: run the model over the shipped texts where none is kept; otherwise that is refused.

    Warns:
        KvbitsWarning: it was made, and no disk keeps it.

    Raises:
        CalibrationError: none is kept and none can be made: a scheme with static scales or codebooks, a model whose
            tokenizer is nowhere, or `make` is false.
    """
    if not scheme.needs_basis_alone:
        raise CalibrationError(
            f"scheme {scheme.name!r} needs calibrated parameters; run `kvbits calibrate` and pass"
            " calibration=Calibration.load(FILE)"
        )
    loaded, key = model.loaded, key_of(model)
    assert key is not None
    if (found := find(model, scheme)) is not None:
        return found
    if not model.name:
        raise CalibrationError(
            f"scheme {scheme.name!r} needs a calibration, none is kept, and this {type(loaded).__name__} was built in"
            " memory, so nothing says which tokenizer to make one with; pass"
            " calibration=kvbits.calibrate.calibrate(model, prompts, scheme) with prompts of your own"
        )
    if not make:
        raise CalibrationError(
            f"no calibration of {model} is kept, and none may be made: run `kvbits calibrate {model}` once, or pass"
            " calibration="
        )
    try:
        tokenizer = load_tokenizer(model)
    except KvbitsError as error:
        raise CalibrationError(
            f"scheme {scheme.name!r} needs a calibration of {model}, and it cannot be made because its tokenizer is not"
            f" found ({error}); pass calibration=kvbits.calibrate.calibrate(model, prompts, scheme) with prompts"
            " of your own"
        ) from error
    with contextlib.ExitStack() as held:
        try:
            path = held.enter_context(keeping(key))
        except (OSError, SpecError) as error:
            warn_not_kept("calibrations", error)
            path = None
        if (found := find(model, scheme)) is not None:
            return found
        if path is not None and _under(key, model, scheme) is not None:
            path = path.with_name(f"{_own(key, loaded)}.safetensors")  # another model has these first rows
        say(f"calibrating {model} for klt, once" + ("" if path is None else f"; kept in {path}"))
        made = measure(model, tokenizer)
        try:
            if path is not None:
                made.save(path)
                made = dataclasses.replace(made, path=str(path))
        except (OSError, SpecError) as error:
            warn_not_kept("calibrations", error)
        return made.fitted(model.config, scheme)


def of_files(
    model: ModelRef, scheme: Scheme, *, make: bool = True, device: str = "cpu", way_out: str = ""
) -> Calibration:
    """Return the same of a model that lies in files, or on the hub: made by a process of its own (`kvbits calibrate
    NAME`), which leaves no memory taken.

    Args:
        model: with Transformers' configuration as the engine has it.
        way_out: said where it cannot be made so.

    Raises:
        CalibrationError: as `of_model`, or the model does not fit one process.
    """
    if not scheme.needs_basis_alone:
        raise CalibrationError(
            f"scheme {scheme.name!r} needs calibrated parameters; run `kvbits calibrate {model} --out"
            f" FILE.safetensors`{way_out}"
        )

    if (kept := find(model, scheme)) is not None:
        return kept
    if not make:
        raise CalibrationError(
            f"no calibration of {model} is kept, and none may be made: run `kvbits calibrate {model}` once{way_out}"
        )
    command = [sys.executable, "-m", "kvbits", "calibrate", model.name, "--device", device]
    why = "it said nothing"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            why = line.strip() or why
    if (kept := find(model, scheme)) is None:
        raise CalibrationError(f"`kvbits calibrate {model} --device {device}` made no calibration: {why}{way_out}")
    return kept


def find(model: ModelRef, scheme: Scheme) -> Calibration | None:
    """Return the calibration that is kept for a model, or None: of a loaded one, only what was measured on it."""
    if (key := key_of(model)) is None:
        return None
    if model.loaded is None:
        return _under(key, model, scheme)
    both = (_under(name, model, scheme) for name in (_own(key, model.loaded), key))
    return next((c for c in both if c is not None and c.suits(model.loaded)), None)


def _own(key: str, loaded: Any) -> str:
    """Return the name of a file that is this model's, where another model of the same key has a file."""
    return f"{key}-{identity(loaded)[:16]}"


def _under(name: str, model: ModelRef, scheme: Scheme) -> Calibration | None:
    """Return the calibration that is kept under a name, or None. A damaged file counts as none, and is made again."""
    for folder in cache_folders(FOLDER):
        path = folder / f"{name}.safetensors"
        try:
            return _read(path, path.stat().st_mtime_ns).fitted(model.config, scheme)
        except OSError:
            continue
        except KvbitsError as error:
            say(f"{path} is not used: {error}")
    return None


@functools.lru_cache(maxsize=8)
def _read(path: Path, written: int) -> Calibration:
    """Read once for each version of the file."""
    return Calibration.load(path)


@contextlib.contextmanager
def keeping(key: str) -> Iterator[Path]:
    """Yield the file of a key, while no other process makes it."""
    from filelock import FileLock, Timeout

    path = cache_folder(FOLDER) / f"{key}.safetensors"
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process makes {path}; waiting for it")
        lock.acquire()
    try:
        yield path
    finally:
        lock.release()


def source() -> Text:
    """Return the shipped texts that kept calibrations are measured on, as one."""
    from ..evaluate.texts import mixed, read_text

    return mixed([read_text(name) for name in TEXTS])


def measure(model: ModelRef, tokenizer: Any) -> Calibration:
    """Return a calibration of a loaded model for `MADE_FOR`, on the shipped texts."""
    scheme = presets.for_layers(MADE_FOR, model.layers)
    sample = thorough(scheme).within(model.max_context)
    return calibrated(model.loaded, tokenizer, source(), sample, [scheme])[0]


def key_of(model: ModelRef) -> str | None:
    """Return a name of the weights of a model, or None where there are none.

    The name depends on the configuration and the first row of every matrix in the layers. Ranks that share a loaded
    model must all ask. The rows of a model in files, or on the hub as far as it is here, are the same.
    """
    rows = _rows_of_files(model) if model.loaded is None else _rows(model.loaded)
    if rows is None:
        return None
    scheme = presets.for_layers(MADE_FOR, model.layers)
    digest = hashlib.sha256(json.dumps(fingerprint(model.config, scheme), sort_keys=True).encode())
    for name, shape, row in sorted(rows, key=lambda r: (r[0], r[1], r[2].numpy().tobytes())):
        digest.update(f"{name}{shape}".encode() + row.numpy().tobytes())
    return digest.hexdigest()[:32]


def _rows(model: Any) -> list[Row]:
    """Return first rows of a loaded model's matrices."""
    rows: list[Row] = []
    for name, p in model.named_parameters():
        if (layer := _of_layer(name, p.ndim)) and not p.is_meta:
            whole = p.data.full_tensor() if hasattr(p.data, "full_tensor") else p.data
            known = type(whole) is torch.Tensor  # not a class of quantized weights, whose rows mean something else
            rows.append((layer, tuple(p.shape), _plain(whole[:1] if known else torch.zeros(0))))
    together = torch.cat([row.cpu() for _, _, row in rows]) if rows else torch.zeros(0, dtype=torch.uint8)
    sizes = [len(row) for _, _, row in rows]
    return [(name, shape, part) for (name, shape, _), part in zip(rows, together.split(sizes), strict=True)]


def _rows_of_files(model: ModelRef) -> list[Row] | None:
    """Return first rows of the matrices in files; both ends of a file whose matrices are packed. None where no weights
    are.
    """
    from safetensors import safe_open

    path = model.local_path
    if path is None:
        return None
    if path.is_file():
        return [(path.name, (path.stat().st_size,), _ends(path))]
    rows: list[Row] = []
    for file in weight_files(path):
        if not file.exists():
            return None
        if file.suffix != ".safetensors":
            rows.append((file.name, (file.stat().st_size,), _ends(file)))
            continue
        # slices lie on the default device, which an engine sets
        with torch.device("cpu"), safe_open(file, framework="pt") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(tensor)
                shape = tuple(part.get_shape())
                if layer := _of_layer(tensor, len(shape)):
                    rows.append((layer, shape, _plain(part[:1])))
    return rows or None


def _of_layer(name: str, ndim: int) -> str:
    """Return the part of a matrix's name that starts at its layer. Return "" for all else, and for experts, which
    Transformers stores otherwise than files do.
    """
    found = _LAYER.search(name)
    return found[1] if found and ndim == 2 and "expert" not in name else ""


def _plain(row: torch.Tensor) -> torch.Tensor:
    """Return bytes of a row, the same for a float in any dtype that it was loaded in."""
    row = row.to(torch.bfloat16) if row.is_floating_point() else row
    return row.contiguous().flatten().view(torch.uint8)


def _ends(path: Path, count: int = 1 << 16) -> torch.Tensor:
    """Return the first and last bytes of a file."""
    with path.open("rb") as file:
        first = file.read(count)
        file.seek(max(0, path.stat().st_size - count))
        return torch.frombuffer(bytearray(first + file.read(count)), dtype=torch.uint8)
