"""Named schemes of the core, each a few lines with its source, and the table of all.

`get("int4")` finds one; `get(..., residual_length=128)` changes fields.

Bits per element with all metadata: `kvbits schemes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import RECOMMENDED as RECOMMENDED
from .errors import SpecError, unknown
from .files import home
from .literature import schemes as literature
from .spec import SCALE_8BIT, CacheSpec, Copies, LayerGeometry, PerChannel, PerGroup, PerToken, QuantSpec, Scheme

_SMOOTH_K = "https://arxiv.org/abs/2410.02367"
_GROUPED = "https://arxiv.org/abs/2303.06865"
_KIVI = "https://arxiv.org/abs/2402.02750"

_INT8 = QuantSpec(format="int8", granularity=PerGroup(64))
_INT4 = QuantSpec(format="int4", granularity=PerGroup(32))
_INT4_OF_CHANNELS = QuantSpec(format="int4", granularity=PerChannel(), symmetric=False)


def _klt(bits: int, bands: tuple[int, ...], residual_length: int = 128, copies: tuple[Copies, ...] = ()) -> Scheme:
    value = QuantSpec(
        format="trellis",
        granularity=PerToken(),
        scale_dtype=SCALE_8BIT,
        basis="hadamard",
        bands=(bits,) * len(bands),
        levels="fitted" if bits == 2 else "uniform",
    )
    return Scheme(
        name=f"klt{bits}",
        key=dataclasses.replace(value, basis="calibrated", bands=bands, center="calibrated", levels="uniform"),
        value=value,
        num_sink_tokens=4,
        residual_length=residual_length,
        copies=copies,
        description=(
            f"trellis codes: keys of {min(bands)} to {max(bands)} bits by importance in a calibrated basis, values of"
            f" {bits} bits turned by a Hadamard, one 8-bit scale per token"
            + "".join(
                f"; the {c.num_tokens} tokens behind the raw ones read from {c.value.bits}-bit copies" for c in copies
            )
        ),
    )


_KLT4 = _klt(4, (8, 6, 5, 4, 4, 4, 4, 3))
_NEWER = (Copies(num_tokens=448, key=_KLT4.key, value=_KLT4.value),)
"""Finer copies of the newest tokens of coarser klt schemes; they halve the KL at 8,192 tokens."""

CORE: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme(
            name="raw",
            key=QuantSpec.raw(),
            value=QuantSpec.raw(),
            description="16-bit numbers on pages, as the model computes them: lossless",
        ),
        Scheme(
            name="int8",
            key=_INT8,
            value=_INT8,
            source="",
            description="per head and group of 64, symmetric, float16 scales: for models without a key bias",
        ),
        Scheme(
            name="int8_centered",
            key=dataclasses.replace(_INT8, center="channel"),
            value=_INT8,
            source=_SMOOTH_K,
            description=(
                "int8 with the channel means of each page's keys stored apart: for every model, also with a key bias"
            ),
        ),
        Scheme(
            name="int4",
            key=_INT4,
            value=_INT4,
            source=_GROUPED,
            residual_length=64,
            description="per head and group of 32, symmetric: for models without a key bias",
        ),
        Scheme(
            name="kivi4",
            key=_INT4_OF_CHANNELS,
            value=dataclasses.replace(_INT4_OF_CHANNELS, granularity=PerGroup(32)),
            residual_length=128,
            page_size=32,
            source=_KIVI,
            description=(
                "4-bit asymmetric, keys per channel over 32 tokens, values per token in groups of 32, newest 128"
                " tokens raw"
            ),
        ),
        _KLT4,
        _klt(3, (6, 5, 5, 4, 4, 3, 2, 1), residual_length=64, copies=_NEWER),
        _klt(2, (6, 4, 3, 3, 2, 2, 1, 1), residual_length=64, copies=_NEWER),
    )
}

"""Presets with native kernels for every operation and is meant to be used (docs/internals/architecture.md has the
rule).
"""

PRESETS: dict[str, Scheme] = CORE | literature.PRESETS
"""Every preset, the core's first."""
FAMILIES: tuple[str, ...] = literature.FAMILIES
"""Modules outside of `ops` whose `FAMILY` has CUDA kernels (`ops.cuda.families`)."""
GROUPS: dict[str, tuple[str, ...]] = {
    "all": tuple(PRESETS),
    "core": tuple(CORE),
    "literature": tuple(literature.PRESETS),
}
"""Names that stand for several presets."""

WIDE_BANDS: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {
    ((8, 6, 5, 4, 4, 4, 4, 3), 256): (8, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 3, 3, 2),
}
"""Widths of bands by those of a preset and head_dim, where they are not dealt out anew.

At 256 the first 16 channels are a sixteenth of a head; with 6 bits more than half of Gemma-3-270M's expected error is
theirs, and 8 bits there, for one less in two other bands, take a third of `klt4`'s KL off. With 3 and 2 bits, and in
smaller heads, those bits are worth more where they are.
"""


def get(name: str, *, head_dim: int | None = None, value_head_dim: int | None = None, **changes: Any) -> Scheme:
    """Return the preset `name`, with fields changed.

    Args:
        name: a key of `PRESETS`.
        head_dim: fit the preset to a model: groups that do not divide head_dim shrink to the largest power of two that
            does (64 becomes 32 for Phi-3's 96).
        value_head_dim: channels of values, where they are not as many.
        changes: fields of `Scheme`, for example `num_sink_tokens=4`. With another page_size, copies cover so many
            tokens more that these are whole pages.

    Raises:
        SpecError: unknown preset or field.
    """
    if name not in PRESETS:
        raise SpecError(unknown("scheme", name, PRESETS))
    fields = {f.name for f in dataclasses.fields(Scheme)}
    if strange := set(changes) - fields:
        raise SpecError(f"a scheme has no field {', '.join(sorted(strange))}; known: {', '.join(sorted(fields))}")
    if "page_size" in changes and "copies" not in changes:
        changes["copies"] = _whole_pages(PRESETS[name].copies, changes["page_size"])
    scheme = dataclasses.replace(PRESETS[name], **changes)
    return scheme if head_dim is None else fitted(scheme, head_dim, value_head_dim)


def weak_to_key_bias(scheme: Scheme) -> bool:
    """Return whether channels of a key share a scale of few steps: 4 bits and fewer, or FP8.

    One channel with a large constant offset, as models with a bias in their key projection have it, then takes the
    steps from all others. Keys per channel do not know this, 8-bit integers bear it, and a calibrated mean removes it.
    """
    key = scheme.key
    return (
        not key.is_raw
        and not key.has_offsets
        and not isinstance(key.granularity, PerChannel)
        and (key.bits <= 4 or key.number_format.kind == "float")
    )


def without_calibration(scheme: Scheme) -> str:
    """Explain that a scheme does not use a calibration, and name the presets that do."""
    others = ", ".join(s.name for s in PRESETS.values() if s.needs_calibration)
    return (
        f"scheme {scheme.name!r} takes its scales from each page and needs no calibration; take one that does: {others}"
    )


def key_bias_note(scheme: Scheme, of: str) -> str | None:
    """Return a warning about a scheme on a model with a key bias, with the way out; None where the scheme is fit.

    Args:
        of: the model and its bias, in words.
    """
    if not weak_to_key_bias(scheme):
        return None
    fit = "kivi4" if scheme.key.bits <= 4 else RECOMMENDED
    return (
        f"scheme {scheme.name!r} is unfit for {of}: a channel with a constant offset takes the steps of a scale from"
        f" the channels that share it (docs/results/evaluation.md has what that costs); take {fit!r}, and see `kvbits"
        " check`"
    )


def fitted(scheme: Scheme, head_dim: int, value_head_dim: int | None = None) -> Scheme:
    """Return a scheme whose groups divide head_dim: those that do not shrink to the largest power of two that does.

    Keys of `klt4` have `WIDE_BANDS`' widths there, in copies, too.
    """

    def key(spec: QuantSpec) -> QuantSpec:
        return _fitted(spec, head_dim)

    def value(spec: QuantSpec) -> QuantSpec:
        return _fitted(spec, value_head_dim or head_dim)

    copies = tuple(dataclasses.replace(c, key=key(c.key), value=value(c.value)) for c in scheme.copies)
    return dataclasses.replace(scheme, key=key(scheme.key), value=value(scheme.value), copies=copies)


def expand(names: Iterable[str | Scheme], groups: Mapping[str, Iterable[str]] | None = None) -> list[str | Scheme]:
    """Return schemes with names checked, groups written out and files read: in order, each once.

    Args:
        names: names known here, names of groups, files that `Scheme.to_json` wrote (whatever ends in .json), schemes.
        groups: name of a group -> the names it stands for; what is in no group is unknown. None: `GROUPS`.

    Raises:
        SpecError: an unknown name, a file that holds no scheme, or a scheme of one's own that is called like another.
    """
    groups = GROUPS if groups is None else groups
    known = list(dict.fromkeys(name for members in groups.values() for name in members))
    found: dict[str, str | Scheme] = {}
    for given in names:
        one = read(given) if isinstance(given, str) and given.endswith(".json") else given
        if isinstance(one, Scheme):
            if one.name in known or found.get(one.name, one) != one or one.name in ("", ".."):
                raise SpecError(
                    f"a scheme of your own is called {one.name!r}; results go by names: give it one that no other has"
                    " and that a file can have"
                )
            found[one.name] = one
            continue
        if one not in known and one not in groups:
            if Path(one).exists():
                raise SpecError(f"{one} is not a scheme file: their names end in .json")
            raise SpecError(unknown("scheme", one, [*groups, *known], ", or a file like mine.json"))
        found |= {name: name for name in groups.get(one, [one])}
    return list(found.values())


def find(name: str) -> str | Scheme:
    """Return what one name on a command line means: a preset's name, as it is, or the scheme in a .json file.

    Raises:
        SpecError: no such preset or file.
    """
    return read(name) if name.endswith(".json") else get(name).name


_WRITE_ONE = 'a file is written by Path("mine.json").write_text(scheme.to_json()), see examples/new_scheme.py'


def read(path: str) -> Scheme:
    """Return the scheme in a JSON file that `Scheme.to_json` wrote.

    Raises:
        SpecError: no such file, or no scheme in it.
    """
    try:
        return Scheme.from_json(home(path, "a scheme in").read_text(encoding="utf-8"))
    except OSError as e:
        raise SpecError(f"cannot read a scheme from {path}: {e.strerror or e}; {_WRITE_ONE}") from e
    except ValueError as e:
        raise SpecError(f"cannot read a scheme from {path}: {e}; {_WRITE_ONE}") from e


def for_layers(scheme: str | Scheme, layers: tuple[LayerGeometry, ...], **changes: Any) -> Scheme:
    """Return what a name, a file or a scheme means on a model.

    A preset is fitted to the model's layers (see `get`). A scheme of one's own, or of a file, is returned as it is.

    Raises:
        SpecError: unknown, or fitted to another model (`FittedScheme.on`).
    """
    own = find(scheme) if isinstance(scheme, str) else scheme
    if isinstance(own, Scheme):
        return own.on(layers)
    head_dim, value_head_dim = common_widths(layers)
    return get(own, head_dim=head_dim, value_head_dim=value_head_dim, **changes)


def common_widths(layers: Sequence[LayerGeometry]) -> tuple[int, int]:
    """Return the largest numbers of channels that divide the keys of all layers, and their values: what presets are
    fitted to.
    """
    return math.gcd(*(g.head_dim for g in layers)), math.gcd(*(g.value_head_dim for g in layers))


def within(
    scheme: Scheme,
    layers: tuple[LayerGeometry, ...],
    memory_bytes: int,
    *,
    context: int,
    batch: int = 1,
    raw_dtype: str = "bfloat16",
) -> Scheme:
    """Return the tiered scheme `scheme` with tiers sized for a byte budget: each as large as fits, the youngest first.

    Args:
        scheme: a scheme with tiers; what they store stays, their sizes change.
        memory_bytes: for the whole cache of `batch` sequences of `context` tokens, to the byte what it allocates.

    Raises:
        SpecError: no tiers, or the cache is larger than the budget even without any page in them.
    """
    if not scheme.tiers:
        raise SpecError(
            f"scheme {scheme.name!r} has no tiers to size; use one with tiers, for example schemes.get('tiered')"
        )

    def nbytes(pages: list[int]) -> int:
        tiers = tuple(
            dataclasses.replace(t, num_tokens=n * scheme.page_size) for t, n in zip(scheme.tiers, pages, strict=True)
        )
        return CacheSpec(scheme=dataclasses.replace(scheme, tiers=tiers), layers=layers, raw_dtype=raw_dtype).nbytes(
            context, batch
        )

    pages = [0] * len(scheme.tiers)
    if (least := nbytes(pages)) > memory_bytes:
        raise SpecError(
            f"{memory_bytes} bytes are too few: {batch} x {context} tokens take {least} without any page in a tier;"
            " lower residual_length or context"
        )
    most = -(-context // scheme.page_size)
    for i in range(len(pages)):
        low, high = 0, most - sum(pages)
        while low < high:  # the largest that fits
            pages[i] = (low + high + 1) // 2
            low, high = (pages[i], high) if nbytes(pages) <= memory_bytes else (low, pages[i] - 1)
        pages[i] = low
    tiers = tuple(
        dataclasses.replace(t, num_tokens=n * scheme.page_size) for t, n in zip(scheme.tiers, pages, strict=True)
    )
    return dataclasses.replace(scheme, tiers=tiers)


def _whole_pages(copies: tuple[Copies, ...], page_size: int) -> tuple[Copies, ...]:
    """Return copies of whole pages of another size, for at least as many tokens."""
    if not copies or not isinstance(page_size, int) or page_size < 1:
        return copies  # `Scheme` refuses the size
    return tuple(dataclasses.replace(c, num_tokens=-(-c.num_tokens // page_size) * page_size) for c in copies)


def _fitted(spec: QuantSpec, head_dim: int) -> QuantSpec:
    if (bands := WIDE_BANDS.get((spec.bands, head_dim))) is not None:
        return dataclasses.replace(spec, bands=bands)
    if not isinstance(spec.granularity, PerGroup) or head_dim % spec.granularity.size == 0:
        return spec
    size = head_dim & -head_dim
    while size > spec.granularity.size:
        size //= 2
    return dataclasses.replace(spec, granularity=PerGroup(size))
