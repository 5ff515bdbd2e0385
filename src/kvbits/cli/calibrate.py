"""`kvbits calibrate`: bases, static scales and codebooks measured on a model."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, counted
from ..files import require_file
from .common import (
    Device,
    Json,
    Loading,
    Model,
    Threads,
    command,
    names_of,
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
    from ..calibrate.collect import Settings
    from ..calibrate.sampling import Sample
    from ..evaluate.texts import Text
    from ..model_ref import ModelRef
    from ..spec import Scheme


@command()
def calibrate(
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File to write (safetensors); for several schemes with {scheme} in its name, like"
                " static/{scheme}.safetensors."
            ),
            show_default="of klt presets the user's cache folder, where every cache of this model finds it",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Text like what the model will read, never what you evaluate on: a file, hub:ID, novel-end or code"
                " (shipped). Several: as many windows of each."
            ),
            show_default="novel-end; for klt presets novel-end and code",
        ),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Schemes with a basis (klt), static scales or codebooks, comma-separated or repeated: presets, or files"
                " (.json). Several share a pass."
            ),
            show_default="klt4",
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(help="Windows drawn from the text: 16, or 128 for static scales.", show_default=False, min=1),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window: 1,024 for klt, 256 for static scales, 2,048 for codebooks.",
            show_default=False,
            parser=tokens(2),
        ),
    ] = None,
    percentile: Annotated[
        float | None,
        typer.Option(
            help="Of static scales: percent of elements in the range, 90 to 100; 99.9, or all but the outliers.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[str, typer.Option(help="Of codebooks: fisher (squared gradients) or none.")] = "fisher",
    per_head: Annotated[bool, typer.Option("--per-head", help="Of codebooks: one for each kv head.")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Of codebooks: less memory, by computing activations again.")
    ] = False,
    skip_tokens: Annotated[
        int | None,
        typer.Option(
            help="First tokens of each window left out; the scheme's sinks if not given.", show_default=False, min=0
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which windows are drawn.", min=0)] = 0,
    engine: Annotated[
        str, typer.Option(help="What runs the model: transformers, or vllm, also over several GPUs (klt presets).")
    ] = "transformers",
    engine_options: Annotated[
        str, typer.Option(help="Of vllm.LLM, as JSON.", metavar="'{\"tensor_parallel_size\": 4}'", show_default=False)
    ] = "{}",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help=(
                "Replace OUT even if it is of another scheme or model, or no calibration; without OUT make again what"
                " is kept."
            ),
        ),
    ] = False,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure on a model what klt presets need (and static scales and codebooks), and save it with a fingerprint:
    minutes for a small model on a CPU.

    Of klt presets one file serves all, in Transformers, vLLM and SGLang, on any number of GPUs; without --out it is
    found there by itself. Several schemes share one pass over the text. Codebooks take a backward pass per window;
    stopped, the same command goes on where it was (OUT.partial).

    A cache for another model, rotary setting or scheme refuses the file and says what differs.
    """
    ref = require_model(model)
    from .. import schemes

    named = [schemes.find(name) for name in dict.fromkeys(names_of("--scheme", scheme or ["klt4"]))]
    chosen = [_with_calibration(one) for one in named]
    if all(one.needs_basis_alone for one in chosen) and "{scheme}" not in str(out):
        named, chosen = named[:1], chosen[:1]  # one serves all
    elif out is None:
        names = ", ".join(one.name for one in chosen if not one.needs_basis_alone)
        raise SpecError(f"only calibrations of bases are kept by model; give --out FILE.safetensors for {names}")
    outs = [] if out is None else _outs(out, [one.name for one in chosen])
    for path, one in zip(outs, chosen, strict=bool(outs)):
        require_file(path, "--out", replaced=True)
        if path.exists() and not force:
            _may_replace(path, ref, one.name)
    from ..calibrate.kept import TEXTS
    from ..evaluate.texts import mixed, read_text

    given = [read_text(one) for one in text or []]
    source = mixed(given or [read_text(one) for one in TEXTS[: 1 + any("basis" in one.calibrates for one in chosen)]])
    from ..calibrate.collect import Settings
    from ..spec.codec import choice

    settings = Settings(
        percentile=percentile,
        skip_tokens=skip_tokens,
        weights=weights,
        per_head=per_head,
        checkpointing=checkpointing,
    )
    _require_use(chosen, settings)
    loading = Loading(ref, device=device)
    sample = _sample(ref, chosen, windows, length, skip_tokens)
    choice("engine", engine, ("transformers", "vllm"))
    of_engine = _json(engine_options)
    if engine == "vllm" and not all(one.needs_basis_alone for one in chosen):
        raise SpecError(
            f"--engine vllm measures bases of keys, which {chosen[0].name} does not have alone; leave --engine away"
        )
    set_threads(threads)
    start = time.perf_counter()

    def measure(partial: Path) -> tuple[list[Calibration], Any]:
        if engine == "vllm":
            return [_measure_in_vllm(ref, source, sample, seed, of_engine)], None
        return _measure(loading, source, named, sample, seed, partial, settings)

    kept_before = False
    if out is None:
        given_of = {
            "text_sha256": text and source.sha256,
            "windows": windows,
            "length": length,
            "skip_tokens": skip_tokens,
            "seed": seed or None,
        }
        found, outs, kept_before = _keep(
            ref, chosen[0], force, measure, {k: v for k, v in given_of.items() if v is not None}
        )
    else:
        found, _ = measure(outs[0].with_name(outs[0].name + ".partial"))
        for path, made in zip(outs, found, strict=True):
            made.info["model"] = model
            made.save(path)
    seconds = time.perf_counter() - start
    if as_json:
        rows = [
            {
                "out": str(path),
                "id": made.id,
                "file_bytes": path.stat().st_size,
                "made": not kept_before,
                "seconds": seconds,
                "layers": len(made.static),
            }
            | made.info
            for path, made in zip(outs, found, strict=True)
        ]
        print_json(rows[0] if len(rows) == 1 else {"calibrations": rows})
    else:
        for path, made in zip(outs, found, strict=True):
            _print(made, path, None if kept_before else seconds)


def _keep(
    model: ModelRef,
    scheme: Scheme,
    force: bool,
    measure: Callable[[Path], tuple[list[Calibration], Any]],
    asked: dict[str, Any],
) -> tuple[list[Calibration], list[Path], bool]:
    """What is kept of the model, made if need be: under the key of its files, and under that of the model which they
    become where it is another.

    Args:
        asked: what the command says of how it is measured.

    Returns:
        Calibrations, their files, and whether they were there before.

    Raises:
        SpecError: one is there that was measured otherwise than asked.
    """
    from ..calibrate import kept

    key = kept.key_of_files(model)
    with kept.keeping(key or hashlib.sha256(model.name.encode()).hexdigest()[:32]) as path:
        there = None if key is None or force else kept.find(key, model.config, scheme)
        if there is not None:
            if other := [
                name.removesuffix("_sha256") for name, value in asked.items() if there.info.get(name) != value
            ]:
                has = (
                    f"{there.info.get('text')}, {there.info.get('windows')} windows of {there.info.get('length')}"
                    " tokens"
                )
                raise SpecError(
                    f"a calibration of {model} is kept already, of another {' and '.join(other)} ({has}; {there.path});"
                    " --force makes it anew as asked, --out FILE makes one beside it"
                )
            return [there], [Path(there.path or path)], True
        (made,), lm = measure(path)
        made.info["model"] = model.name
        keys = dict.fromkeys(
            [k for k in (key, kept.key_of_files(model), None if lm is None else kept.key_of_model(lm)) if k]
        )
        paths = [path.with_name(f"{one}.safetensors") for one in keys]
        for one in paths:
            made.save(one)
        return [made], paths[:1], False


def _outs(out: Path, names: list[str]) -> list[Path]:
    """The file of each scheme.

    Raises:
        SpecError: several schemes and one file.
    """
    if len(names) > 1 and "{scheme}" not in str(out):
        raise SpecError(
            f"{len(names)} schemes go into a file each, and --out {out} names one; write {{scheme}} where their names"
            " shall stand: klt/{scheme}.safetensors"
        )
    return [Path(str(out).replace("{scheme}", name)) for name in names]


def _sample(
    model: ModelRef, schemes: list[Scheme], windows: int | None, length: int | None, skipped: int | None
) -> Sample:
    """Choose how much of the text is looked at. Impossible numbers are refused before the model is loaded."""
    from ..calibrate.sampling import Sample, thorough

    kinds = {thorough(one): one.name for one in schemes}
    if len(kinds) > 1 and (windows is None or length is None):
        listed = " and ".join(f"{s.windows} windows of {s.length:,} tokens ({name})" for s, name in kinds.items())
        raise SpecError(
            f"these schemes take {listed}, so one pass does not suit them all; calibrate them apart, or give --windows"
            " and --length"
        )
    usual = next(iter(kinds))
    sample = Sample(usual.windows if windows is None else windows, usual.length if length is None else length)
    read_config(model)
    sample.require_positions(model.max_context)
    if skipped is not None and skipped >= sample.length:
        raise SpecError(
            f"--skip-tokens {skipped} leaves nothing of windows of {sample.length} tokens; take fewer than --length"
        )
    return sample


def _require_use(schemes: list[Scheme], settings: Settings) -> None:
    """Refuse options that change nothing for any of the schemes."""
    made = {name for one in schemes for name in one.calibrates}
    names = ", ".join(one.name for one in schemes)
    of_codebooks = [(name, "codebook", "codebooks") for name in ("weights", "per_head", "checkpointing")]
    for name, kind, words in (("percentile", "scale", "static scales"), *of_codebooks):
        if kind not in made and getattr(settings, name) != getattr(type(settings), name):
            option = name.replace("_", "-")
            raise SpecError(f"--{option} is of {words}, and {names} has none; omit it, or give another --scheme")


def _measure(
    loading: Loading,
    text: Text,
    named: list[str | Scheme],
    sample: Sample,
    seed: int,
    partial: Path,
    settings: Settings,
) -> tuple[list[Calibration], Any]:
    """Loads the model and looks at windows of the text; (what schemes take, the model)."""
    from .. import schemes
    from ..evaluate.calibrator import Calibrator

    lm, tokenizer = loading.load()
    chosen = [schemes.for_layers(one, loading.model.layers) for one in named]
    calibrator = Calibrator(lm, tokenizer, text, sample=sample)
    prompts = calibrator.windows(chosen, seed=seed)
    if any("codebook" in one.calibrates for one in chosen):
        when_stopped(f"what codebooks have seen lies in {partial}; the same command goes on from there")
    found = calibrator.measure(chosen, prompts, settings, resume=partial)
    got, size = sum(len(p) for p in prompts), prompts[0].shape[1]
    if got < sample.windows or size < sample.length:
        tell(
            f"note: {text.name} is short: it gives {counted(got, 'window')} of {size:,} tokens, not {sample.windows} of"
            f" {sample.length:,}"
        )
    return found, lm


def _json(options: str) -> dict[str, Any]:
    try:
        given = json.loads(options)
    except ValueError as error:
        raise SpecError(f"--engine-options {options!r} is no JSON object: {error}") from error
    if not isinstance(given, dict):
        raise SpecError(f"--engine-options {options!r} is no JSON object")
    return given


def _measure_in_vllm(model: ModelRef, source: Text, sample: Sample, seed: int, given: dict[str, Any]) -> Calibration:
    from ..calibrate.sampling import about, windows_of
    from ..integrations.models import load_tokenizer
    from ..integrations.vllm import observe

    windows = windows_of(load_tokenizer(model), source, sample, seed=seed)
    found = observe.calibrate(model.name, [row.tolist() for batch in windows for row in batch], given)
    found.info.update(about(source, sample))
    return found


def _print(found: Calibration, out: Path, seconds: float | None) -> None:
    """
    Args:
        seconds: that it took; None where it was there before.
    """
    info = found.info
    kinds = {name[2:] for layer in found.static for name in layer}
    what = " and ".join(
        word for kind, word in (("scale", "scales"), ("codebook", "codebooks"), ("basis", "bases")) if kind in kinds
    )
    share = (
        ""
        if "scale" not in kinds
        else ", maximum"
        if info["percentile"] == 100
        else f", percentile {info['percentile']:g}"
    )
    tokens = f"{info['tokens']:,} tokens in {counted(info['prompts'], 'window')}"
    took, how = ("", "kept already, nothing was made:") if seconds is None else (f", {seconds:.1f} s", "wrote")
    show(
        f"{info['scheme']} {what} of {len(found.static)} layers over {tokens}{share}{took}",
        f"{how} {out} (id {found.id})",
    )


def _with_calibration(scheme: str | Scheme) -> Scheme:
    """Refuse a scheme that needs no calibration."""
    from .. import schemes

    chosen = schemes.get(scheme) if isinstance(scheme, str) else scheme
    if not chosen.needs_calibration:
        raise SpecError(schemes.without_calibration(chosen))
    return chosen


def _may_replace(out: Path, model: ModelRef, scheme: str) -> None:
    """Refuse to overwrite anything but an earlier calibration of this scheme on this model; its header alone is read,
    without torch.
    """
    way_out = "give another --out, or --force"
    try:
        with out.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            about = json.loads(file.read(min(length, 1 << 26)))["__metadata__"]
        info = json.loads(about["info"])
        old = {"scheme": info.get("scheme"), "model": info.get("model")}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise SpecError(f"--out {out} exists and is no calibration that could be replaced; {way_out}") from e
    for what, new in (("scheme", scheme), ("model", model.name)):
        if old[what] != new:
            raise SpecError(f"--out {out} holds a calibration of {what} {old[what]!r}, not {new!r}; {way_out}")
