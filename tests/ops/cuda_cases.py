"""Random caches for the GPU tests and benchmarks: closed pages, sinks and a tail, in shuffled pools whose unused bytes
are poisoned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ops import calls

from kvbits.ops import attend
from kvbits.ops.reference.attend import PageList, exact, query_positions
from kvbits.ops.reference.close import close_pages
from kvbits.ops.types import PageStore, Table
from kvbits.quant.basis import completed
from kvbits.quant.scales import steps as band_steps
from kvbits.spec import PageLayout, PerChannel, QuantSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call over `lengths[b]` tokens of each sequence.

    `young`: each sequence's newer closed pages have 8-bit codes; `first`: position of the first token; `slabs`: of each
    pool; `spans`: of all tables, also where they say no more than starts.
    """

    key: QuantSpec
    value: QuantSpec
    lengths: tuple[int, ...]
    head_dim: int = 128
    heads: int = 2
    group: int = 4
    page_size: int = 64
    sinks: int = 0
    tail: int = 0
    crop: int = 0
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16
    num_queries: int = 1
    layers: int = 1
    magnitude: float = 1.0
    young: bool = False
    first: int = 0
    value_head_dim: int | None = None
    slabs: int = 1
    spans: bool = False

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name not in ("key", "value") and getattr(self, f.name) != f.default
        ]
        return f"{_short(self.key)} {_short(self.value)} {' '.join(changed)}"

    @property
    def sizes(self) -> dict[str, int | None]:
        return {"num_kv_heads": self.heads, "head_dim": self.head_dim, "value_head_dim": self.value_head_dim}

    @property
    def raw_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def _short(spec: QuantSpec) -> str:
    if spec.is_trellis:
        return f"{spec.format}:{','.join(map(str, spec.bands))}:{spec.basis}" + (":mean" if spec.center else "")
    name = f"{spec.format}:{type(spec.granularity).__name__}{getattr(spec.granularity, 'size', '')}"
    return (
        name
        + ("" if spec.symmetric else ":asym")
        + (":static" if spec.static else "")
        + (":mean" if spec.center else "")
        + (f":outliers{spec.outliers}" if spec.outliers else "")
        + (":pre_rope" if spec.pre_rope else "")
        + ("" if spec.scale_dtype == "float16" else f":{spec.scale_dtype}")
    )


@dataclasses.dataclass
class Call(calls.Call):
    """One attention call of a case, over layer 0, at the positions of the newest tokens.

    Attributes:
        pools: uint8 [pages, layers, H, bytes] of each part.
    """

    pools: list[torch.Tensor]

    def plan(self, **changes: Any) -> attend.Attention:
        """A plan for the call, bound (layers by their numbers) and up to date."""
        made = super().plan(**changes)
        for layer in range(self.pools[0].shape[1]):
            made.bind(layer, self.stores_of(layer))
        device = "cpu" if made.reads_host else self.q.device
        given = self.positions if changes.get("past_only") else self.given
        made.update([on(device, t) for t in self.tables], positions=None if given is None else given.to(device))
        return made

    def stores_of(self, layer: int) -> list[PageStore]:
        return [
            dataclasses.replace(store, slabs=slabs_of(pool[:, layer], len(store.slabs)))
            for store, pool in zip(self.stores, self.pools, strict=True)
        ]

    @property
    def given(self) -> torch.Tensor | None:
        """Positions where tables do not say them."""
        return self.positions if self.has_spans else None

    def want(self, stores: Sequence[PageStore] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse in float64."""
        return exact(self.q, stores or self.stores, self.tables, positions=self.positions, **self.options)


def slabs_of(pages: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """`pages` in so many slabs, of which the first holds one page, far from each other."""
    if count == 1:
        return (pages,)
    cuts = np.linspace(1, len(pages), count).astype(int)
    return tuple(x if i % 2 else x.clone() for i, x in enumerate(pages.tensor_split(cuts[:-1].tolist())))


def on(device: torch.device | str, table: Table) -> Table:
    """The table with its tensors on `device`."""
    fields = (getattr(table, f.name) for f in dataclasses.fields(table))
    return Table(*(None if x is None else x.to(device) for x in fields))


def make(case: Case, device: torch.device | str, seed: int = 0) -> Call:
    """The call that a case is."""
    gen = torch.Generator(device=device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    raw = QuantSpec.raw()

    def layout(key: QuantSpec, value: QuantSpec, size: int) -> PageLayout:
        return PageLayout(key=key, value=value, page_size=size, raw_dtype=case.raw_dtype, **case.sizes)

    stores, lists, pools = [], [], []
    spans = {"closed": [], "young": [], "sink": [], "tail": []}
    for n in case.lengths:
        sink = min(case.sinks, n)
        closed = (
            n - sink
            if case.key.is_raw
            else (n - sink - case.tail) // case.page_size * case.page_size
            if n - sink > case.tail
            else 0
        )
        spans["sink"].append((0, sink))
        old = (
            closed
            if not case.young
            else (closed // 3 + (17 * len(spans["sink"])) % 128) // case.page_size * case.page_size
        )
        old = min(old, closed)
        spans["closed"].append((sink, sink + old))
        spans["young"].append((sink + old, sink + closed))
        spans["tail"].append((sink + closed, n))
    closed_layout = layout(case.key, case.value, case.page_size)
    eight = [dataclasses.replace(s, format="int8") for s in (case.key, case.value)] if case.young else ()
    layouts = {
        "closed": closed_layout,
        "young": layout(*eight, case.page_size) if case.young else closed_layout,
        "sink": layout(raw, raw, max(case.sinks, 1)),
        "tail": layout(raw, raw, case.page_size),
    }
    for name, per_sequence in spans.items():
        if any(end > start for start, end in per_sequence):
            store, pages, pool = _part(layouts[name], per_sequence, case, name, gen, rng, device)
            stores.append(store)
            lists.append(pages)
            pools.append(pool)
    hq = case.heads * case.group
    q = torch.randn(len(case.lengths), case.num_queries, hq, case.head_dim, generator=gen, device=device).to(case.dtype)
    tables = [calls.table_of(x, s.layout.page_size, case.spans) for x, s in zip(lists, stores, strict=True)]
    return Call(
        stores,
        [on(device, table) for table in tables],
        q,
        query_positions(lists, case.num_queries, None).int().to(device),
        {"scaling": case.head_dim**-0.5, "sliding_window": case.window, "softcap": case.softcap},
        pools,
    )


def _part(
    layout: PageLayout,
    spans: list[tuple[int, int]],
    case: Case,
    name: str,
    gen: torch.Generator,
    rng: np.random.Generator,
    device,
) -> tuple[PageStore, PageList, torch.Tensor]:
    size = layout.page_size
    starts, lengths, counts = [], [], []
    for first, end in spans:
        first = (
            max(first, (end - case.window) // size * size)
            if case.window and name == "closed" and not case.crop
            else first
        )
        pages = range(first, end, size)
        counts.append(len(pages))
        starts += [p + case.first for p in pages]
        lengths += [min(size, end - p) for p in pages]
        if case.crop and name == ("young" if case.young else "closed") and pages:
            lengths[-1] -= case.crop
    n = len(starts)
    ids = rng.permutation(n + 3)[:n]
    slab = torch.full(
        (n + 3, case.layers, layout.num_kv_heads, layout.head_bytes), 0xFF, dtype=torch.uint8, device=device
    )
    static = _static(layout, case, gen, device)
    for at in range(0, n, 256):
        some = ids[at : at + 256]
        k, v = (
            torch.randn(len(some), layout.num_kv_heads, size, layout.dim(kind), generator=gen, device=device)
            * case.magnitude
            for kind in "kv"
        )
        # keys of real models have a mean
        k += torch.randn(layout.head_dim, generator=gen, device=device) * case.magnitude
        pages, _ = close_pages(k, v, layout, static, np.array(starts[at : at + 256]))
        if layout.key.is_raw:  # nothing may depend on rows past the visible length
            _poison(pages, layout, lengths[at : at + 256])
        slab[torch.from_numpy(some).to(device)] = pages[:, None]
    store = PageStore(layout, slabs_of(slab[:, 0], case.slabs), static)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    pages = PageList(indptr, ids.astype(np.int64), np.array(starts, np.int64), np.array(lengths, np.int32))
    return store, pages, slab


def _poison(pages: torch.Tensor, layout: PageLayout, lengths: list[int]) -> None:
    for i, n in enumerate(lengths):
        for name in ("k_raw", "v_raw"):
            s = layout.sections[name]
            pages[i, :, s.offset + s.nbytes // layout.page_size * n : s.offset + s.nbytes] = 0xFF


def _static(layout: PageLayout, case: Case, gen: torch.Generator, device) -> dict[str, torch.Tensor]:
    static = {}
    for prefix, spec in (("k", layout.key), ("v", layout.value)):
        if spec.has_codebook:
            levels = torch.rand(layout.num_kv_heads, 2**spec.bits, generator=gen, device=device) * 2 - 1
            static[f"{prefix}_codebook"] = levels.sort(-1).values
        if spec.basis == "calibrated":
            d = layout.head_dim
            basis = torch.eye(d, device=device) + torch.randn(
                layout.num_kv_heads, d, d, generator=gen, device=device
            ) / (2 * d**0.5)
            static["k_basis"] = basis / (band_steps(spec, d).to(device) * case.magnitude)
        if spec.has_offsets:
            static["k_mean"] = torch.randn(layout.num_kv_heads, 2, layout.head_dim, generator=gen, device=device) * min(
                case.magnitude, 1.0
            )
        if spec.needs_rotary:
            d = layout.head_dim // 2
            static = completed(static, 10000.0 ** (-torch.arange(d, device=device) / d))
        if spec.static and spec.has_codebook:  # narrow: some tokens are stretched
            static[f"{prefix}_scale"] = (
                torch.rand(layout.num_kv_heads, layout.dim(prefix), generator=gen, device=device) + 1.7
            ) * case.magnitude
            static[f"{prefix}_bias"] = (
                torch.randn(layout.num_kv_heads, layout.dim(prefix), generator=gen, device=device) * case.magnitude
            )
        elif spec.static:
            n = spec.num_groups(layout.dim(prefix))
            top = 4.0 * case.magnitude
            shape = (layout.num_kv_heads, n)
            spread = torch.rand(shape, generator=gen, device=device) + 0.5
            static[f"{prefix}_scale"] = spread * top / spec.q_max * (1 if spec.symmetric else 2)
            if spec.has_bias:
                static[f"{prefix}_bias"] = -top * spread
    return static


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


__all__ = ["Case", "PerChannel", "make", "relative_error"]
