"""Memory arithmetic: how many bytes a cache takes, and what fits. No tensors, no torch.

    plan(layers, schemes, context, batch, memory)           ->  Plan(rows=(PlanRow, ...)), memory for the cache alone
    plan(rank(layers, gpus), .., cards=Cards(..))           the same for GPUs that hold weights and activations too

A row's `total_bytes` is `CacheSpec.nbytes`, which a `PagedCache` of that fixed capacity allocates to the byte: whole
pages, scales, sinks, raw tail and padding included. The dense schemes fp32, fp16 and bf16 are what the stock
Transformers cache holds: every token of a full layer, the last `sliding_window - 1` of a sliding one. Largest batch and
context come from an exact search over the same numbers, so one token or sequence more does not fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from . import schemes as presets
from .errors import SpecError, too_small, unknown
from .geometry import PlainLayer
from .integrations.engine.options import Options
from .integrations.engine.served import COPIED, FORMATS, LISTED, PAGE_SIZE, Format, Ring, copied_requests
from .spec import MOST_TOKENS, CacheSpec, LayerGeometry, PageLayout, Scheme
from .units import human_bytes

DENSE = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Plain dense caches and their bytes per element."""

GROUPS = presets.GROUPS | {"all": (*DENSE, *presets.PRESETS)}
"""Groups that a plan knows by name (see `schemes.expand`)."""

SHOWN = ("bf16", "int8_centered", "kivi4", "klt4", "klt3")
"""Schemes that a plan lists by default: 16 bits, and the recommended presets (docs/results/evaluation.md)."""

ENGINES = ("transformers", "vllm")
"""Engines that serve the cache."""
VLLM_BLOCK = 16
"""Tokens of a block of vLLM's own caches."""
VLLM_DENSE = DENSE | {"fp8": 1}
"""vLLM's own caches and their bytes per element."""
VLLM_SHOWN = ("bf16", "fp8", *LISTED)
"""Dtypes that a plan for vLLM lists: 16 bits, vLLM's own 8, and those of kvbits that help shows."""

MAX_LAYERS = 4096
"""More than any model has: above it a number was mistyped."""

LOOKED_AT = 4096
"""Tokens of the longest sequence at which `larger_up_to` compares two caches."""

UNBOUNDED = 2**40
"""A context this long that fits is called unbounded: every layer slides, so more tokens cost nothing."""

RESERVE = 0.12
"""Share of a GPU that neither weights nor cache can have: activations, the CUDA context, graphs, fragments. vLLM 0.33
with Llama-3.1-8B left 17.1 to 18.1 of an H200's 150.1 GB for them (benchmarks/results/nvidia-h200/serve_vllm.json, a
test compares), 17.3 on each of two.
"""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Costs of one scheme.

    Attributes:
        scheme: preset name, or fp32, fp16, bf16.
        bits_per_element: bits per cached number at long context, metadata and padding included.
        bits_held: bits per number of the planned context: everything that is allocated, first and newest tokens and
            copies of newest ones included, where the dense 16-bit cache has 16.
        bytes_per_token: bytes one more token of one sequence costs at long context.
        total_bytes: bytes allocated for batch sequences of context tokens.
        memory_reduction: bytes of the dense 16-bit cache / total_bytes.
        max_batch: users that fit: most sequences of `context` tokens, or None if no memory was given.
        max_context: most tokens for each of `batch` sequences, or None if no memory was given or nothing bounds it.
        unbounded: True where every layer slides and the windows fit: any context does.
        larger_up_to: most tokens of a sequence at which the scheme takes more bytes than the recommended one of 8 bits,
            `LOOKED_AT` for every length; None where it never does or has no fewer bits.
        copied: requests that have copies at once, or None if no memory was given or the scheme has none.
    """

    scheme: str
    bits_per_element: float
    bits_held: float
    bytes_per_token: float
    total_bytes: int
    memory_reduction: float
    max_batch: int | None = None
    max_context: int | None = None
    unbounded: bool = False
    larger_up_to: int | None = None
    copied: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cards:
    """GPUs that serve a model with tensor parallelism: each holds an equal share of weights and kv heads (see `rank`).

    Attributes:
        memory_bytes: of each GPU.
        count: GPUs.
        weights_bytes: of the whole model.
        reserve_bytes: of each GPU, for everything but weights and cache; None for `RESERVE` of it.

    Raises:
        SpecError: an invalid number, or weights that leave no memory for a cache.
    """

    memory_bytes: int
    weights_bytes: int
    count: int = 1
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, n, least in (
            ("memory_bytes", self.memory_bytes, 1),
            ("count", self.count, 1),
            ("weights_bytes", self.weights_bytes, 0),
        ):
            if n < least:
                raise SpecError(too_small(name, n, least))
        if self.reserve_bytes is None:
            object.__setattr__(self, "reserve_bytes", int(RESERVE * self.memory_bytes))
        if self.cache_bytes < 1:
            raise SpecError(
                f"{human_bytes(self.memory_bytes)} of a GPU hold {human_bytes(self.weights_share)} of weights and a"
                f" reserve of {human_bytes(self.reserve_bytes or 0)}, and nothing is left for a cache; use more or"
                " larger GPUs, or quantized weights"
            )

    @property
    def weights_share(self) -> int:
        """Bytes of weights on each GPU."""
        return -(-self.weights_bytes // self.count)

    @property
    def cache_bytes(self) -> int:
        """Bytes that are left for the cache on each GPU."""
        return self.memory_bytes - self.weights_share - (self.reserve_bytes or 0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"weights_share": self.weights_share, "cache_bytes": self.cache_bytes}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One row per scheme, and the question. With `cards` layers, bytes and memory are those of one GPU.

    Attributes:
        state_bytes: of recurrent layers, for each sequence; in all totals. None: not known, and in none.
    """

    layers: tuple[LayerGeometry | PlainLayer, ...]
    context: int
    batch: int
    memory_bytes: int | None
    rows: tuple[PlanRow, ...]
    cards: Cards | None = None
    engine: str = "transformers"
    state_bytes: int | None = 0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data: `rows` as `PlanRow` fields, geometry counted by layer kind."""
        kinds: dict[LayerGeometry | PlainLayer, int] = {}
        for g in self.layers:
            kinds[g] = kinds.get(g, 0) + 1
        return {
            "layers": [
                {"count": n}
                | {name: x for name, x in asdict(g).items() if name != "rotary" and (x or name != "chunked")}
                for g, n in kinds.items()
            ],
            "context": self.context,
            "batch": self.batch,
            "memory_bytes": self.memory_bytes,
            "cards": None if self.cards is None else self.cards.to_dict(),
            "engine": self.engine,
            "state_bytes": self.state_bytes,
            "rows": [asdict(r) for r in self.rows],
        }


Layer = TypeVar("Layer", LayerGeometry, PlainLayer, LayerGeometry | PlainLayer)


def _elements(layer: LayerGeometry | PlainLayer) -> int:
    """Return numbers of one token, keys and values."""
    return layer.elements if isinstance(layer, PlainLayer) else layer.token_elements


@dataclass(frozen=True)
class Held:
    """A cache that is not made of pages alone, with the members of `CacheSpec` that a plan reads.

    Attributes:
        of_sequence: bytes that a sequence of so many tokens takes.
    """

    bits_per_element: float
    bytes_per_token: float
    of_sequence: Callable[[int], int]

    def nbytes(self, num_tokens: int, batch_size: int = 1) -> int:
        return batch_size * self.of_sequence(num_tokens)


Layers = Sequence[LayerGeometry | PlainLayer]
Cache = CacheSpec | Held


def _blocks(layers: Layers, block: int, sizes: list[int], least: int) -> Held:
    """Return a cache of whole blocks. A sliding layer has the blocks that its window touches.

    Args:
        block: tokens of a block.
        sizes: bytes of a block in each layer.
        least: blocks that a window may touch besides its own tokens' number of them.
    """
    elements = block * sum(map(_elements, layers))
    full = [n for n, g in zip(sizes, layers, strict=True) if g.sliding_window is None] or sizes

    def held(tokens: int) -> int:
        blocks = -(-tokens // block)
        windows = (
            blocks if g.sliding_window is None else min(blocks, -(-(g.sliding_window - 1) // block) + least)
            for g in layers
        )
        return sum(n * size for n, size in zip(windows, sizes, strict=True))

    return Held(8 * sum(sizes) / elements, sum(full) / block, held)


def _dense(name: str, layers: Layers) -> Held:
    """Return the stock cache of Transformers, token by token; sliding layers hold their window."""
    return _blocks(layers, 1, [DENSE[name] * _elements(g) for g in layers], 0)


def _beside(cache: Cache, nbytes: int) -> Cache:
    """Return a cache beside what every sequence keeps besides, which does not grow with the tokens."""
    if not nbytes:
        return cache
    return Held(cache.bits_per_element, cache.bytes_per_token, lambda tokens: cache.nbytes(tokens) + nbytes)


def uniform(
    num_layers: int, num_kv_heads: int, head_dim: int, sliding_window: int | None = None
) -> tuple[LayerGeometry, ...]:
    """Return the geometry of a model whose layers are all alike.

    Raises:
        SpecError: invalid numbers.
    """
    if not 1 <= num_layers <= MAX_LAYERS:
        raise SpecError(f"num_layers={num_layers} must be at least 1 and at most {MAX_LAYERS:,}")
    return (LayerGeometry(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=sliding_window),) * num_layers


def rank(layers: Sequence[Layer], gpus: int, num_heads: int | None = None) -> tuple[Layer, ...]:
    """Return layers of one of `gpus` GPUs that share a model by tensor parallelism: an equal share of the kv heads, or
    a copy of one where GPUs are more than these.

    Args:
        num_heads: query heads of a layer, which must divide evenly too; None if they are not known.

    Raises:
        SpecError: heads that cannot be shared so.
    """
    if gpus < 1:
        raise SpecError(too_small("gpus", gpus, 1))
    if num_heads is not None and num_heads % gpus:
        raise SpecError(f"{num_heads} query heads cannot be shared by {gpus} GPUs; use {_divisors(num_heads)}")
    return tuple(_share(g, gpus) for g in layers)


def _share(layer: Layer, gpus: int) -> Layer:
    heads = layer.heads if isinstance(layer, PlainLayer) else layer.num_kv_heads
    if heads is None:
        return layer
    if heads % gpus and gpus % heads:
        raise SpecError(
            f"{heads} kv heads cannot be shared by {gpus} GPUs; use {_divisors(heads)}, or a multiple of {heads}"
        )
    own = max(1, heads // gpus)
    changed: dict[str, Any] = (
        {"elements": layer.elements // heads * own, "heads": own}
        if isinstance(layer, PlainLayer)
        else {"num_kv_heads": own}
    )
    return dataclasses.replace(layer, **changed)


def _divisors(n: int) -> str:
    *most, last = (str(d) for d in range(1, n + 1) if n % d == 0)
    return f"{', '.join(most)} or {last}" if most else last


def plan(
    layers: Sequence[LayerGeometry | PlainLayer],
    schemes: Iterable[str | Scheme],
    *,
    engine: str = "transformers",
    context: int = 4096,
    batch: int = 1,
    memory_bytes: int | None = None,
    cards: Cards | None = None,
    raw_dtype: str = "bfloat16",
    state_bytes: int | None = 0,
    **changes: Any,
) -> Plan:
    """Return what each scheme costs on a model, and what fits.

    Args:
        layers: geometry of each layer (`geometry.layer_geometries`, or `uniform`); with `cards` of several GPUs what
            one of them holds (`rank`).
        schemes: preset names (groups fitted to the head_dim), fp32, fp16, bf16, or schemes of your own (taken as they
            are); for vLLM its dtypes (see `served`).
        engine: what serves the cache, one of `ENGINES`: vLLM has blocks and formats of its own.
        context: tokens per sequence.
        batch: sequences.
        memory_bytes: memory for the cache alone; None leaves max_batch and max_context out.
        cards: GPUs whose memory holds weights too, instead of `memory_bytes`.
        raw_dtype: dtype of raw pages, the model's own.
        state_bytes: of the recurrent states of a sequence (`geometry.state_bytes`); None if that is not known.
        changes: fields of `Scheme` to change in every preset, for example num_sink_tokens=4.

    Raises:
        SpecError: a negative or zero size, more tokens than a cache holds, an unknown scheme, or one of your own that
            does not fit the geometry.
    """
    layers = tuple(layers)
    if cards is not None:
        if memory_bytes is not None:
            raise SpecError("memory_bytes is for the cache alone, cards for weights too; give one of them")
        memory_bytes = cards.cache_bytes
    if context > MOST_TOKENS:
        raise SpecError(
            f"context={context:,} is more than the {MOST_TOKENS:,} tokens that a cache holds of one sequence; give"
            " fewer"
        )
    for name, n in (
        ("context", context),
        ("batch", batch),
        *([("memory_bytes", memory_bytes)] if memory_bytes is not None else []),
    ):
        if n < 1:
            raise SpecError(too_small(name, n, 1))
    if engine not in ENGINES:
        raise SpecError(unknown("engine", engine, ENGINES))
    rows = []

    def stored(scheme: str | Scheme) -> Cache:
        return _vllm(scheme, layers, raw_dtype) if engine == "vllm" else _cache(scheme, layers, raw_dtype, changes)

    baseline = _beside(stored("bf16"), state_bytes or 0).nbytes(context, batch)
    recommended: Cache | None = None
    with contextlib.suppress(SpecError):  # these layers, or the changes, do not suit it
        recommended = stored(recommended_of(engine))
    for scheme in schemes:
        cache = stored(scheme)
        of_request = _copies(scheme, layers, raw_dtype) if engine == "vllm" else 0
        # recurrent states are the same in both
        longer = _larger(_beside(cache, of_request), recommended)
        cache = _beside(cache, state_bytes or 0)
        copied = None
        if memory_bytes is not None and of_request:
            copied = copied_requests(memory_bytes, of_request, vllm_requests(cards))
        total = cache.nbytes(context, batch) + of_request * (batch if copied is None else min(batch, copied))
        room = None if memory_bytes is None else memory_bytes - of_request * (copied or 0)
        longest = None if room is None else max_context(cache, room, batch)
        fit = None if room is None else max_batch(cache, room, context)
        rows.append(
            PlanRow(
                scheme=scheme if isinstance(scheme, str) else scheme.name,
                bits_per_element=cache.bits_per_element,
                bits_held=16 * total / baseline if baseline else 0.0,
                bytes_per_token=cache.bytes_per_token,
                total_bytes=total,
                memory_reduction=baseline / total if total else 1.0,
                max_batch=fit,
                max_context=longest,
                unbounded=memory_bytes is not None and longest is None,
                **longer,
                copied=copied,
            )
        )
    return Plan(
        layers=layers,
        context=context,
        batch=batch,
        memory_bytes=memory_bytes,
        rows=tuple(rows),
        cards=cards,
        engine=engine,
        state_bytes=state_bytes,
    )


def recommended_of(engine: str) -> str:
    """Return the scheme of 8 bits that an engine's users should take first."""
    return f"kvbits_{presets.RECOMMENDED}" if engine == "vllm" else presets.RECOMMENDED


def _larger(cache: Cache, recommended: Cache | None) -> dict[str, Any]:
    """Return fields of a row: up to which length the recommended scheme of more bits takes fewer bytes."""
    if recommended is None or cache.bits_per_element >= recommended.bits_per_element:
        return {}
    most = larger_up_to(cache, recommended)
    return {"larger_up_to": most} if most else {}


def larger_up_to(cache: Cache, other: Cache) -> int:
    """Find the most tokens of one sequence at which `cache` takes more bytes than `other`, up to `LOOKED_AT`.

    First and newest tokens stay in 16 bits, and pages are whole, so a scheme of few bits can be the larger one.

    Returns:
        Tokens; 0 if `cache` is never larger.
    """

    def larger(tokens: int) -> bool:
        return cache.nbytes(tokens) > other.nbytes(tokens)

    step = 16  # a quarter of a page
    coarse = next((n for n in range(LOOKED_AT, 0, -step) if larger(n)), 0)
    return next((n for n in range(min(LOOKED_AT, coarse + step - 1), coarse, -1) if larger(n)), coarse)


def _cache(scheme: str | Scheme, layers: Layers, raw_dtype: str, changes: dict[str, Any]) -> Cache:
    if isinstance(scheme, str) and scheme in DENSE:
        return _dense(scheme, layers)
    plain = _paged(layers, scheme)
    if isinstance(scheme, str):
        (known,) = presets.expand([scheme], GROUPS)
        scheme = presets.for_layers(known, plain, **changes)
    return CacheSpec(scheme=scheme, layers=plain, raw_dtype=raw_dtype)


def _paged(layers: Layers, scheme: str | Scheme) -> tuple[LayerGeometry, ...]:
    """Return layers that pages of few bits are made of.

    Raises:
        SpecError: others are among them.
    """
    found = tuple(g for g in layers if isinstance(g, LayerGeometry))
    if len(found) < len(layers):
        raise SpecError(
            f"{scheme if isinstance(scheme, str) else scheme.name!r}: these layers can be planned in {', '.join(DENSE)}"
            " only"
        )
    return found


def served(names: Iterable[str]) -> list[str | Scheme]:
    """Return what names mean in vLLM: its own dtypes, `FORMATS` with or without their prefix, `all` for `VLLM_SHOWN`,
    files of token-local schemes.

    Raises:
        SpecError: what vLLM cannot serve.
    """
    found: dict[str, str | Scheme] = {}
    for name in names:
        if name == "all":
            found |= {n: n for n in VLLM_SHOWN}
        elif name.endswith(".json"):
            mine = presets.read(name)
            found[mine.name] = mine
        else:
            known = name if name in VLLM_DENSE else name if name in FORMATS else f"kvbits_{name}"
            if known not in VLLM_DENSE and known not in FORMATS:
                elsewhere = f"; {name} is for Transformers (--engine transformers)" if name in presets.PRESETS else ""
                raise SpecError(
                    unknown(
                        "scheme of --engine vllm",
                        name,
                        ["all", *VLLM_DENSE, *LISTED],
                        f", or a file of a token-local scheme{elsewhere}",
                    )
                )
            found[known] = known
    return list(found.values())


def _vllm(scheme: str | Scheme, layers: Layers, raw_dtype: str) -> Held:
    """Return a cache as vLLM allocates it."""
    if isinstance(scheme, str) and scheme in VLLM_DENSE:
        return _blocks(layers, VLLM_BLOCK, [VLLM_BLOCK * VLLM_DENSE[scheme] * _elements(g) for g in layers], 1)
    return _blocks(layers, PAGE_SIZE, [x.page_size_bytes for x in vllm_layouts(scheme, layers, raw_dtype)], 1)


def _copies(scheme: str | Scheme, layers: Layers, raw_dtype: str) -> int:
    """Return bytes of a request's copies in vLLM, 0 where it has none."""
    if isinstance(scheme, str) and scheme in VLLM_DENSE:
        return 0
    return sum(ring.nbytes for rings in vllm_rings(scheme, layers, raw_dtype) for ring in rings)


def vllm_rings(scheme: str | Scheme, layers: Layers, raw_dtype: str) -> list[tuple[Ring, ...]]:
    """Return the copies of a request's pages in each layer, unless users say otherwise.

    Scheme and errors are as in `vllm_layouts`.
    """
    layouts, forms = vllm_layouts(scheme, layers, raw_dtype), list[Format]()
    for i in range(len(layouts)):
        if isinstance(scheme, str):
            forms.append(FORMATS[scheme])
        else:
            copies = scheme.copies_of(*scheme.for_layer(i, len(layouts)))
            raw_newest = COPIED if layouts[i].key.has_offsets or copies else 0
            forms.append(Format(name=scheme.name, scheme=scheme, copies=copies, raw_newest=raw_newest))
    raw_newest = max((form.raw_newest for form in forms), default=0)
    options = Options(raw_newest=raw_newest, raw_first=COPIED) if raw_newest else Options()
    return [options.rings(form, x) for x, form in zip(layouts, forms, strict=True)]


def vllm_requests(cards: Cards | None) -> int:
    """Return requests that run at once in vLLM 0.33 unless `--max-num-seqs` says otherwise; of large GPUs where none is
    known.
    """
    return 1024 if cards is None or cards.memory_bytes >= 70 * 2**30 else 256


def vllm_layouts(scheme: str | Scheme, layers: Layers, raw_dtype: str) -> list[PageLayout]:
    """Return pages of each layer, in one of `FORMATS` or a token-local scheme.

    Raises:
        SpecError: they are invalid, or 16 bits and fp8 of vLLM itself were named.
    """
    pages = _paged(layers, scheme)
    if not isinstance(scheme, str):
        return [_token_local(scheme, i, g, len(pages), raw_dtype) for i, g in enumerate(pages)]
    if scheme not in FORMATS:
        raise SpecError(f"{scheme} is vLLM's own, without pages of kvbits; name some of {', '.join(LISTED)}")
    return [FORMATS[scheme].layout(g.num_kv_heads, g.head_dim, g.value_head_dim, raw_dtype) for g in pages]


def _token_local(scheme: Scheme, layer: int, g: LayerGeometry, count: int, raw_dtype: str) -> PageLayout:
    key, value = scheme.for_layer(layer, count)
    if scheme.page_size != PAGE_SIZE or scheme.tiers or not (key.token_local and value.token_local):
        raise SpecError(
            f"scheme {scheme.name!r}, layer {layer}: vLLM stores token by token in pages of {PAGE_SIZE}; make it with"
            " `kvbits fit`"
        )
    return PageLayout(key=key, value=value, page_size=PAGE_SIZE, raw_dtype=raw_dtype, **g.sizes)


def max_batch(cache: Cache, memory_bytes: int, context: int) -> int | None:
    """Return the most sequences of `context` tokens in `memory_bytes` (bytes are proportional to the batch); None if
    they cost nothing.
    """
    one = cache.nbytes(context, 1)
    return memory_bytes // one if one else None


def max_context(cache: Cache, memory_bytes: int, batch: int) -> int | None:
    """Return the most tokens for each of `batch` sequences in `memory_bytes`; None if any number fits.

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
