"""Memory arithmetic: how many bytes a cache takes, and what fits. No tensors, no torch.

    plan(layers, schemes, context, batch, memory)  ->  Plan(rows=(PlanRow, ...))

A row's `total_bytes` is `CacheSpec.nbytes`, which a `PagedCache` of that fixed capacity allocates to the byte: whole pages, scales,
sinks, raw tail and padding included. The dense schemes fp32, fp16 and bf16 are what the stock Transformers cache holds: every
token of a full layer, the last `sliding_window - 1` of a sliding one. Largest batch and context come from an exact search over the
same numbers, so one token or sequence more does not fit. GB is 10**9 bytes, GiB is 2**30, and every text says which.

`source_figures()` recomputes what the documents this library follows print about memory, and says where they differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import schemes as presets
from .errors import SpecError
from .spec import CacheSpec, LayerGeometry, Scheme

GB = 10**9
GIB = 2**30

DENSE = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Plain dense caches and their bytes per element."""

UNBOUNDED = 2**40
"""A context this long that fits is called unbounded: every layer slides, so more tokens cost nothing."""

_UNITS = {"": 1, "B": 1} | {p + "B": 1000**n for n, p in enumerate("KMGT", 1)} | {p + "IB": 1024**n for n, p in enumerate("KMGT", 1)}


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What one scheme costs.

    Attributes:
        scheme: preset name, or fp32, fp16, bf16.
        bits_per_element: bits per cached number at long context, metadata and padding included.
        bytes_per_token: bytes one more token of one sequence costs at long context.
        total_bytes: bytes allocated for batch sequences of context tokens.
        memory_reduction: bytes of the dense 16-bit cache / total_bytes.
        max_batch: most sequences of `context` tokens that fit, or None if no memory was given.
        max_context: most tokens for each of `batch` sequences, or None if no memory was given or nothing bounds it.
        unbounded: True where every layer slides and the windows fit: any context does.
    """

    scheme: str
    bits_per_element: float
    bytes_per_token: float
    total_bytes: int
    memory_reduction: float
    max_batch: int | None = None
    max_context: int | None = None
    unbounded: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One row per scheme, and what they were asked for."""

    layers: tuple[LayerGeometry, ...]
    context: int
    batch: int
    memory_bytes: int | None
    rows: tuple[PlanRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON data: `rows` as `PlanRow` fields, geometry counted by layer kind."""
        kinds: dict[LayerGeometry, int] = {}
        for g in self.layers:
            kinds[g] = kinds.get(g, 0) + 1
        return {
            "layers": [{"count": n} | {name: x for name, x in asdict(g).items() if name != "rotary"} for g, n in kinds.items()],
            "context": self.context,
            "batch": self.batch,
            "memory_bytes": self.memory_bytes,
            "rows": [asdict(r) for r in self.rows],
        }


class _Dense:
    """The stock cache, with the members of `CacheSpec` that a plan reads."""

    def __init__(self, name: str, layers: tuple[LayerGeometry, ...]) -> None:
        self.bytes_per_element = DENSE[name]
        self.spec = CacheSpec(scheme=presets.get("raw"), layers=layers)
        self.bits_per_element = 8.0 * self.bytes_per_element

    @property
    def bytes_per_token(self) -> float:
        layers = self.spec.layers
        full = [g for g in layers if g.sliding_window is None] or layers
        return float(sum(2 * g.num_kv_heads * g.head_dim * self.bytes_per_element for g in full))

    def nbytes(self, num_tokens: int, batch_size: int = 1) -> int:
        return self.spec.raw_nbytes(num_tokens, batch_size, self.bytes_per_element)


def uniform(num_layers: int, num_kv_heads: int, head_dim: int, sliding_window: int | None = None) -> tuple[LayerGeometry, ...]:
    """Geometry of a model whose layers are all alike.

    Raises:
        SpecError: numbers that cannot be.
    """
    if num_layers < 1:
        raise SpecError(f"num_layers={num_layers} must be at least 1")
    return (LayerGeometry(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=sliding_window),) * num_layers


def parse_bytes(text: str) -> int:
    """Bytes of "24GB" (10**9), "24GiB" (2**30), "512 MiB", "1.5TB" or a plain number of bytes.

    Raises:
        SpecError: anything else; "24G" is refused because it could mean either unit.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise SpecError(f"memory {text!r} is not understood; write 24GB (24 x 10**9 bytes), 24GiB (24 x 2**30), or a number of bytes")
    whole, _, fraction = match[1].partition(".")
    nbytes = int(whole + fraction) * _UNITS[match[2].upper()] // 10 ** len(fraction)
    if nbytes < 1:
        raise SpecError(f"memory {text!r} is no memory at all")
    return nbytes


def human_bytes(n: float) -> str:
    """In GB (10**9 bytes) or smaller decimal units."""
    for unit, size in (("TB", 10**12), ("GB", GB), ("MB", 10**6), ("kB", 1000)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f} B"


def expand_schemes(names: Iterable[str]) -> list[str]:
    """Scheme names with "all" replaced by the dense caches and every preset, each once.

    Raises:
        SpecError: an unknown name.
    """
    found: list[str] = []
    for name in names:
        found += [*DENSE, *presets.PRESETS] if name == "all" else [name]
    known = [*DENSE, *presets.PRESETS]
    for name in found:
        if name not in known:
            raise SpecError(f"unknown scheme {name!r}; known: all, {', '.join(known)}")
    return list(dict.fromkeys(found))


def plan(
    layers: Sequence[LayerGeometry],
    schemes: Iterable[str | Scheme],
    *,
    context: int = 4096,
    batch: int = 1,
    memory_bytes: int | None = None,
    raw_dtype: str = "bfloat16",
    **changes: Any,
) -> Plan:
    """What each scheme costs on a model, and what fits.

    Args:
        layers: geometry of each layer (`geometry.layer_geometries`, or `uniform`).
        schemes: preset names (groups fitted to the head_dim), fp32, fp16, bf16, or schemes of your own (taken as they are).
        context: tokens per sequence.
        batch: sequences.
        memory_bytes: memory left for the cache; None leaves max_batch and max_context out.
        raw_dtype: dtype of raw pages, the model's own.
        changes: fields of `Scheme` to change in every preset, for example num_sink_tokens=4.

    Raises:
        SpecError: a negative or zero size, an unknown scheme, or one of your own that does not fit the geometry.
    """
    layers = tuple(layers)
    for name, n in (("context", context), ("batch", batch), *([("memory_bytes", memory_bytes)] if memory_bytes is not None else [])):
        if n < 1:
            raise SpecError(f"{name}={n} must be at least 1")
    rows = []
    baseline = _Dense("bf16", layers).nbytes(context, batch)
    for scheme in schemes:
        name = scheme if isinstance(scheme, str) else scheme.name
        cache = _cache(scheme, layers, raw_dtype, changes)
        total = cache.nbytes(context, batch)
        longest = None if memory_bytes is None else max_context(cache, memory_bytes, batch)
        rows.append(
            PlanRow(
                scheme=name, bits_per_element=cache.bits_per_element, bytes_per_token=cache.bytes_per_token, total_bytes=total,
                memory_reduction=baseline / total if total else 1.0, max_batch=None if memory_bytes is None else max_batch(cache, memory_bytes, context),
                max_context=longest, unbounded=memory_bytes is not None and longest is None,
            )
        )  # fmt: skip
    return Plan(layers=layers, context=context, batch=batch, memory_bytes=memory_bytes, rows=tuple(rows))


def _cache(scheme: str | Scheme, layers: tuple[LayerGeometry, ...], raw_dtype: str, changes: dict[str, Any]) -> CacheSpec | _Dense:
    if isinstance(scheme, str) and scheme in DENSE:
        return _Dense(scheme, layers)
    if isinstance(scheme, str):
        scheme = presets.for_layers(expand_schemes([scheme])[0], layers, **changes)
    return CacheSpec(scheme=scheme, layers=layers, raw_dtype=raw_dtype)


def max_batch(cache: CacheSpec | _Dense, memory_bytes: int, context: int) -> int | None:
    """Most sequences of `context` tokens in `memory_bytes` (bytes are proportional to the batch); None if they cost nothing."""
    one = cache.nbytes(context, 1)
    return memory_bytes // one if one else None


def max_context(cache: CacheSpec | _Dense, memory_bytes: int, batch: int) -> int | None:
    """Most tokens for each of `batch` sequences in `memory_bytes`; None if any number fits.

    `nbytes` never falls as the context grows (a test holds it), so doubling and halving finds the exact edge.
    """
    low, high = 0, 1
    while cache.nbytes(high, batch) <= memory_bytes:
        if high >= UNBOUNDED:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if cache.nbytes(middle, batch) <= memory_bytes:
            low = middle
        else:
            high = middle
    return low


# -- what the sources print -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceFigure:
    """One memory figure of a source document, recomputed.

    Attributes:
        source, case: who says it, about what.
        printed: the figure as printed.
        formula: the arithmetic behind `nbytes`.
        nbytes: what the formula gives, in bytes.
        agrees: the printed number and unit are this many bytes, at the printed precision.
        verdict: why, where not.
    """

    source: str
    case: str
    printed: str
    formula: str
    nbytes: int
    agrees: bool
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gb": self.nbytes / GB, "gib": self.nbytes / GIB}


_PAPER = "INT8 GPU paper, Table 1"
_ARTICLE = "FP8/INT8 article, Llama-70B table"
_KVQUANT = "KVQuant review, Table 1"
_TIERED = "tiered cache article, 7B at 32k"


def _dense_bytes(layers: int, heads: int, context: int, batch: int, element_bytes: int) -> int:
    """Bytes of a dense cache with head_dim 128, from the same code that plans one."""
    return CacheSpec(scheme=presets.get("raw"), layers=uniform(layers, heads, 128)).raw_nbytes(context, batch, element_bytes)


def source_figures() -> tuple[SourceFigure, ...]:
    """Every memory figure the source documents print, with what their own formula gives."""
    return (*_paper_figures(), *_article_figures(), *_kvquant_figures(), *_tiered_figures())


def _paper_figures() -> list[SourceFigure]:
    case, formula = "32 layers, 32 heads, 128 dims, 131,072 tokens, {}", "2 x 32 x 32 x 128 x 131,072 x {} bytes"
    fp32, fp16 = _dense_bytes(32, 32, 131072, 1, 4), _dense_bytes(32, 32, 131072, 1, 2)
    return [
        SourceFigure(
            source=_PAPER, case=case.format("FP32"), printed="about 137 GB", formula=formula.format(4), nbytes=fp32, agrees=round(fp32 / GB) == 137,
            verdict="agrees in GB (128 GiB)",
        ),
        SourceFigure(
            source=_PAPER, case=case.format("FP16"), printed="nearly 70 GB", formula=formula.format(2), nbytes=fp16, agrees=round(fp16 / GB, -1) == 70,
            verdict="agrees in GB, rounded up (64 GiB)",
        ),
    ]  # fmt: skip


def _article_figures() -> list[SourceFigure]:
    found = []
    fp16 = _dense_bytes(80, 64, 4096, 32, 2)
    grouped = 2 * 80 * 8 * 128 * 4000 * 32 * 2  # 8 kv heads, "4K" = 4,000 tokens: 41.94 GB
    for name, printed, share in (("FP16", 41.9, 1), ("FP8/INT8", 21.0, 2), ("INT4", 10.5, 4)):
        nbytes = fp16 // share
        found.append(
            SourceFigure(
                source=_ARTICLE, case=f"80 layers, 64 heads, 128 dims, 4,096 tokens x 32, {name}", printed=f"{printed} GB",
                formula=f"2 x 80 x 64 x 128 x 4,096 x 32 x {2 / share:g} bytes", nbytes=nbytes, agrees=round(nbytes / GB, 1) == printed,
                verdict=f"differs: its own formula gives {nbytes // GIB} GiB = {nbytes / GB:.1f} GB, {nbytes / GB / printed:.1f} times as much. "
                f"The printed figure is what 8 KV heads (the model's real GQA) and 4,000 tokens give: {grouped / share / GB:.1f} GB; scales are not counted",
            )
        )  # fmt: skip
    return found


def _kvquant_figures() -> list[SourceFigure]:
    found = []
    for model, layers, heads, printed in (("7B", 32, 32, 64.0), ("13B", 40, 40, 100.0), ("65B", 80, 64, 320.0)):
        nbytes = _dense_bytes(layers, heads, 131072, 1, 2)
        found.append(
            SourceFigure(
                source=_KVQUANT, case=f"LLaMA-{model}: {layers} layers, {heads} heads, 128 dims, 128K tokens, FP16", printed=f"{printed:.1f} GB",
                formula=f"2 x {layers} x {heads} x 128 x 131,072 x 2 bytes", nbytes=nbytes, agrees=round(nbytes / GB, 1) == printed,
                verdict=f"unit: {printed:.0f} is right in GiB; in GB it is {nbytes / GB:.1f}",
            )
        )  # fmt: skip
    base = _dense_bytes(32, 32, 131072, 1, 2)
    for bits, printed in ((433, 17.3), (333, 13.3), (233, 9.3)):
        nbytes = base * bits // 1600
        found.append(
            SourceFigure(
                source=_KVQUANT, case=f"LLaMA-7B, 128K tokens, KVQuant {bits // 100}-bit-1% ({bits / 100} bits on average)", printed=f"{printed} GB",
                formula=f"64 GiB x {bits / 100} / 16", nbytes=nbytes, agrees=round(nbytes / GB, 1) == printed,
                verdict=f"unit: {printed} is right in GiB; in GB it is {nbytes / GB:.1f}",
            )
        )  # fmt: skip
    return found


def _tiered_figures() -> list[SourceFigure]:
    elements = 2 * 32 * 32 * 128
    dense = _dense_bytes(32, 32, 32768, 1, 2)
    hot, warm, cold = elements * 2048 * 2, elements * 14336 * 17 // 16, elements * 16384 * 9 // 16
    total = hot + warm + cold
    parts = (
        ("hot 2,048 tokens, BF16 (the 4 sinks among them)", "1.07 GB", "2 x 32 x 32 x 128 x 2,048 x 2 bytes", hot, 2),
        ("warm 14,336 tokens, INT8, two FP32 per token and head", "4.0 GB", "2 x 32 x 32 x 128 x 14,336 x (1 + 8 / 128) bytes", warm, 1),
        ("cold 16,384 tokens, INT4, two FP32 per token and head", "2.4 GB", "2 x 32 x 32 x 128 x 16,384 x (0.5 + 8 / 128) bytes", cold, 1),
    )
    first = SourceFigure(
        source=_TIERED, case="32 layers, 32 heads, 128 dims, 32,768 tokens, BF16", printed="17.2 GB", formula="2 x 32 x 32 x 128 x 32,768 x 2 bytes",
        nbytes=dense, agrees=round(dense / GB, 1) == 17.2, verdict="agrees in GB (16 GiB); Llama 3 8B, which it names, has 8 KV heads: 4.29 GB",
    )  # fmt: skip
    zones = [
        SourceFigure(source=_TIERED, case=case, printed=printed, formula=formula, nbytes=n, agrees=f"{n / GB:.{digits}f} GB" == printed, verdict="agrees in GB")
        for case, printed, formula, n, digits in parts
    ]
    last = SourceFigure(
        source=_TIERED, case="hot + warm + cold", printed="7.47 GB", formula="sum of the three zones", nbytes=total, agrees=round(total / GB, 2) == 7.47,
        verdict=f"rounding: it adds the rounded zones; the exact sum is {total / GB:.2f} GB. The zones are the whole context, so the 4 sinks lie inside them; "
        f"kept beside them they add {4 * elements * 2 / 10**6:.1f} MB",
    )  # fmt: skip
    return [first, *zones, last]
