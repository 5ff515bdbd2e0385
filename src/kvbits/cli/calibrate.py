"""`kvbits calibrate`: bases, static scales and codebooks measured on a model."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate.settings import Settings
from ..errors import SpecError, counted
from ..files import require_file
from ..settings import names_in, setting
from .common import OfModel, command, print_json, when_stopped
from .output import show, tell

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from ..calibrate.sampling import Sample
    from ..evaluate.texts import Text
    from ..model_ref import ModelRef
    from ..spec import Scheme


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{option} {text!r} is not a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise SpecError(f"{option} {text!r} is not a JSON object")
    return given


@dataclass(frozen=True, kw_only=True)
class Calibrated(OfModel):
    """Options of `kvbits calibrate`: what is calibrated, and on what."""

    out: Path | None = setting(
        None,
        "File to write (safetensors); for several schemes with {scheme} in its name, like static/{scheme}.safetensors.",
        shown="klt presets: the user's cache folder, where every cache of this model finds it",
    )
    text: list[str] | None = setting(
        None,
        "Text like what the model will read, never what you evaluate on: a file, hub:ID, novel-end or code (shipped)."
        " Repeatable; each text gives as many windows.",
        shown="novel-end; for klt presets novel-end and code",
    )
    scheme: tuple[str, ...] = setting(
        ("klt4",),
        "Schemes with a basis (klt), static scales or codebooks, comma-separated or repeated: presets, or files"
        " (.json). Several share a pass.",
        read=names_in,
        many=True,
        shown="klt4",
    )
    windows: int | None = setting(None, "Windows drawn from the text: 16, or 128 for static scales.", least=1)
    length: int | None = setting(
        None, "Tokens of a window: 1,024 for klt, 256 for static scales, 2,048 for codebooks.", tokens=2
    )
    settings: Settings = field(default_factory=Settings)
    seed: int = setting(0, "Seed that draws the windows.", least=0)
    engine: str = setting(
        "transformers", "Engine that runs the model: transformers, or vllm (klt presets; also over several GPUs)."
    )
    engine_options: dict[str, Any] | None = setting(
        None, "Options of vllm.LLM, as JSON.", metavar="'{\"tensor_parallel_size\": 4}'", read=_object
    )
    force: bool = setting(
        False,
        "Replace the file OUT. Without --out, replace the calibration in the cache folder.",
    )


@command()
def calibrate(options: Calibrated) -> None:
    """Measure the bases, scales or codebooks that schemes need on a model, and save them with a fingerprint.

    Calibrating takes minutes for a small model on a CPU. One file serves all klt presets, in Transformers, vLLM and
    SGLang, on any number of GPUs. Without --out, kvbits keeps the file where all of these find it. Several schemes
    share one pass over the text. Codebooks take a backward pass for each window. The same command continues a stopped
    run (OUT.partial).

    A cache for a different model, rotary setting or scheme refuses the file and reports what differs.
    """
    ref, out = options.ref, options.out
    from .. import schemes

    named = [schemes.find(name) for name in dict.fromkeys(options.scheme)]
    chosen = [_with_calibration(one) for one in named]
    if all(one.needs_basis_alone for one in chosen) and "{scheme}" not in str(out):
        named, chosen = named[:1], chosen[:1]  # one serves all
    elif out is None:
        names = ", ".join(one.name for one in chosen if not one.needs_basis_alone)
        raise SpecError(f"only calibrations of bases are kept by model; give --out FILE.safetensors for {names}")
    outs = [] if out is None else _outs(out, [one.name for one in chosen])
    for path, one in zip(outs, chosen, strict=bool(outs)):
        require_file(path, "--out", replaced=True)
        if path.exists() and not options.force:
            _may_replace(path, ref, one.name)
    from ..calibrate.kept import TEXTS
    from ..evaluate.texts import mixed, read_text
    from ..spec.codec import choice

    usual = TEXTS[: 1 + any("basis" in one.calibrates for one in chosen)]
    source = mixed([read_text(one) for one in options.text or usual])
    _require_use(chosen, options.settings)
    options.require_place()
    sample = _sample(ref, chosen, options)
    choice("engine", options.engine, ("transformers", "vllm"))
    if options.engine == "vllm" and not all(one.needs_basis_alone for one in chosen):
        raise SpecError(
            f"--engine vllm measures bases of keys, which {chosen[0].name} does not have alone; leave --engine away"
        )
    if any("codebook" in one.calibrates for one in chosen):
        when_stopped(f"what codebooks have seen lies in {outs[0]}.partial; the same command continues from there")
    start = time.perf_counter()

    def measure(partial: Path) -> tuple[list[Calibration], ModelRef]:
        return _measured(options, source, named, sample, partial)

    kept_before = False
    if out is None:
        given = {"text_sha256": options.text and source.sha256, "seed": options.seed or None}
        given |= {"windows": options.windows, "length": options.length, "skip_tokens": options.settings.skip_tokens}
        asked = {name: value for name, value in given.items() if value is not None}
        found, outs, kept_before = _keep(ref, chosen[0], options.force, measure, asked)
    else:
        found, _ = measure(outs[0].with_name(outs[0].name + ".partial"))
        for path, made in zip(outs, found, strict=True):
            made.save(path)
    seconds = time.perf_counter() - start
    if not options.as_json:
        for path, made in zip(outs, found, strict=True):
            _print(made, path, None if kept_before else seconds)
        return
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


def _measured(
    options: Calibrated, text: Text, named: list[str | Scheme], sample: Sample, partial: Path
) -> tuple[list[Calibration], ModelRef]:
    """Load the model and look at windows of the text: (what schemes take, the model as it is known then)."""
    from .. import schemes
    from ..calibrate.sampling import about, calibrated, windows_of
    from ..model_ref import ModelRef

    ref = options.ref
    if options.engine == "vllm":
        from ..integrations.models import load_tokenizer
        from ..integrations.vllm import observe

        windows = windows_of(load_tokenizer(ref), text, sample, seed=options.seed)
        ids = [row.tolist() for batch in windows for row in batch]
        found = [observe.calibrate(ref.name, ids, options.engine_options or {})]
        found[0].info.update(about(text, sample))
    else:
        lm, tokenizer = options.load()
        chosen = [schemes.for_layers(one, ref.layers) for one in named]
        found = calibrated(
            lm,
            tokenizer,
            text,
            sample,
            chosen,
            options.settings,
            seed=options.seed,
            resume=partial,
            say=lambda note: tell(f"note: {note}"),
        )
        ref = ModelRef.of(lm)
    for made in found:
        made.info["model"] = options.model
    return found, ref


def _keep(
    model: ModelRef,
    scheme: Scheme,
    force: bool,
    measure: Callable[[Path], tuple[list[Calibration], ModelRef]],
    asked: dict[str, Any],
) -> tuple[list[Calibration], list[Path], bool]:
    """Return the calibrations kept of the model, and make them if need be.

    Calibrations are kept under the key of the model's files. Where the files become another model, they are kept under
    the key of that model too.

    Args:
        asked: what the command says of how it is measured.

    Returns:
        Calibrations, their files, and whether they were there before.

    Raises:
        SpecError: one is there that was measured otherwise than asked.
    """
    from ..calibrate import kept

    key = kept.key_of(model)
    with kept.keeping(key or hashlib.sha256(model.name.encode()).hexdigest()[:32]) as path:
        there = None if key is None or force else kept.find(model, scheme)
        if there is not None:
            info = there.info
            if other := [name.removesuffix("_sha256") for name, value in asked.items() if info.get(name) != value]:
                has = f"{info.get('text')}, {info.get('windows')} windows of {info.get('length')} tokens"
                raise SpecError(
                    f"a calibration of {model} is kept already, of another {' and '.join(other)} ({has}; {there.path});"
                    " --force makes it anew as asked, --out FILE makes one beside it"
                )
            return [there], [Path(there.path or path)], True
        found, now = measure(path)
        # files of the hub are here by now, and some become a model of another key
        keys = dict.fromkeys(k for k in (key, kept.key_of(model), kept.key_of(now)) if k)
        paths = [path.with_name(f"{one}.safetensors") for one in keys]
        for one in paths:
            found[0].save(one)
        return found, paths[:1], False


def _outs(out: Path, names: list[str]) -> list[Path]:
    """Return the file of each scheme.

    Raises:
        SpecError: several schemes and one file.
    """
    if len(names) > 1 and "{scheme}" not in str(out):
        raise SpecError(
            f"{len(names)} schemes go into a file each, and --out {out} names one; write {{scheme}} where their names"
            " shall stand: klt/{scheme}.safetensors"
        )
    return [Path(str(out).replace("{scheme}", name)) for name in names]


def _sample(model: ModelRef, schemes: list[Scheme], options: Calibrated) -> Sample:
    """Choose how much of the text is looked at. Impossible numbers are refused before the model is loaded."""
    from ..calibrate.sampling import Sample, thorough

    windows, length, skipped = options.windows, options.length, options.settings.skip_tokens
    kinds = {thorough(one): one.name for one in schemes}
    if len(kinds) > 1 and (windows is None or length is None):
        listed = " and ".join(f"{s.windows} windows of {s.length:,} tokens ({name})" for s, name in kinds.items())
        raise SpecError(
            f"these schemes take {listed}, so one pass does not suit them all; calibrate them apart, or give --windows"
            " and --length"
        )
    usual = next(iter(kinds))
    sample = Sample(windows or usual.windows, length or usual.length)
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
    kinds = {"percentile": ("scale", "static scales")} | dict.fromkeys(
        ("weights", "per_head", "checkpointing"), ("codebook", "codebooks")
    )
    for f in fields(settings):
        kind, words = kinds.get(f.name, ("", ""))
        if kind and kind not in made and f.default is not MISSING and getattr(settings, f.name) != f.default:
            option = f.name.replace("_", "-")
            raise SpecError(f"--{option} is of {words}, and {names} has none; omit it, or give another --scheme")


def _print(found: Calibration, out: Path, seconds: float | None) -> None:
    """Print the line of one calibration.

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
        raise SpecError(f"--out {out} exists and is not a calibration that could be replaced; {way_out}") from e
    for what, new in (("scheme", scheme), ("model", model.name)):
        if old[what] != new:
            raise SpecError(f"--out {out} holds a calibration of {what} {old[what]!r}, not {new!r}; {way_out}")
