"""Memory arithmetic: how many bytes a cache takes, and what fits. No tensors, no torch.

    plan(layers, schemes, context, batch, memory)  ->  Plan(rows=(PlanRow, ...))

A row's `total_bytes` is `CacheSpec.nbytes`, which a `PagedCache` of that fixed capacity allocates to the byte: whole pages, scales,
sinks, raw tail and padding included. The dense schemes fp32, fp16 and bf16 are what the stock Transformers cache holds: every
token of a full layer, the last `sliding_window - 1` of a sliding one. Largest batch and context come from an exact search over the
same numbers, so one token or sequence more does not fit. GB is 10**9 bytes, GiB is 2**30, and every text says which.
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

GROUPS = {"all": (*DENSE, *presets.PRESETS)}
"""What a plan knows by name (see `schemes.expand`)."""

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
        (known,) = presets.expand([scheme], GROUPS)
        scheme = presets.for_layers(known, layers, **changes)
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
