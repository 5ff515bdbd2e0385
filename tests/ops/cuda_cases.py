"""Random caches for the GPU tests and benchmarks: closed pages, sinks and a tail, in shuffled pools whose unused bytes
are poisoned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvbits.ops import attend
from kvbits.ops.reference.attend import exact
from kvbits.ops.reference.close import close_pages
from kvbits.ops.types import PageStore, Table
from kvbits.quant.banded import steps as band_steps
from kvbits.quant.basis import completed
from kvbits.spec import PageLayout, QuantSpec


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
    if spec.is_banded:
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
class Call:
    """One attention call of a case, over layer 0.

    Attributes:
        stores, tables: of each part.
        q: [B, T, Hq, D].
        positions: int32 [B, T], those of the newest tokens.
        options: scaling, sliding_window and softcap.
        pools: uint8 [pages, layers, H, bytes] of each part.
    """

    stores: list[PageStore]
    tables: list[Table]
    q: torch.Tensor
    positions: torch.Tensor
    options: dict[str, Any]
    pools: list[torch.Tensor]

    def plan(self, **changes: Any) -> attend.Attention:
        """A plan for the call, bound (layers by their numbers) and up to date."""
        made = attend.plan(
            [store.layout for store in self.stores],
            **{
                "batch_size": len(self.q),
                "num_q_heads": self.q.shape[2],
                "dtype": self.q.dtype,
                "device": self.q.device,
                "num_queries": self.q.shape[1],
                "spans": any(table.spans is not None for table in self.tables),
            }
            | self.options
            | changes,
        )
        for layer in range(self.pools[0].shape[1]):
            made.bind(layer, self.stores_of(layer))
        device = "cpu" if made.reads_host else self.q.device
        given = self.given
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
        return self.positions if any(table.spans is not None for table in self.tables) else None

    def want(self, stores: Sequence[PageStore] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse in float64."""
        return exact(self.q, stores or self.stores, self.tables, positions=self.positions, **self.options)


def slabs_of(pages: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """`pages` in so many slabs, of which the first holds one page, far from each other."""
    if count == 1:
        return (pages,)
    cuts = np.linspace(1, len(pages), count).astype(int)
    return tuple(x if i % 2 else x.clone() for i, x in enumerate(pages.tensor_split(cuts[:-1].tolist())))


def table_of(pages: list[list[tuple[int, int, int]]], page_size: int, spans: bool = False) -> Table:
    """The table of (page number, position of its first token, visible tokens) of each page of each sequence, with spans
    where pages were dropped or cut, or where they are asked for.
    """
    width = max(1, *(len(row) for row in pages))
    ids, at = torch.full((len(pages), width), -1, dtype=torch.int32), torch.zeros(len(pages), width, 2).int()
    starts, tokens = torch.zeros(2, len(pages), dtype=torch.int32)
    for b, row in enumerate(pages):
        for i, (page, *span) in enumerate(row):
            ids[b, i], at[b, i] = page, torch.tensor(span)
        if row:
            starts[b], tokens[b] = row[0][1], (len(row) - 1) * page_size + row[-1][2]
            spans |= any(start != row[0][1] + i * page_size for i, (_, start, _) in enumerate(row))
            spans |= any(length < page_size for _, _, length in row[:-1])
    return Table(ids, tokens, spans=at) if spans else Table(ids, tokens, starts)


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

    held = {"closed": [], "young": [], "sink": [], "tail": []}  # tokens of each sequence, first and past the last
    for n in case.lengths:
        sink = min(case.sinks, n)
        closed = (
            n - sink
            if case.key.is_raw
            else (n - sink - case.tail) // case.page_size * case.page_size
            if n - sink > case.tail
            else 0
        )
        held["sink"].append((0, sink))
        old = (
            closed
            if not case.young
            else (closed // 3 + (17 * len(held["sink"])) % 128) // case.page_size * case.page_size
        )
        old = min(old, closed)
        held["closed"].append((sink, sink + old))
        held["young"].append((sink + old, sink + closed))
        held["tail"].append((sink + closed, n))
    closed_layout = layout(case.key, case.value, case.page_size)
    eight = [dataclasses.replace(s, format="int8") for s in (case.key, case.value)] if case.young else ()
    layouts = {
        "closed": closed_layout,
        "young": layout(*eight, case.page_size) if case.young else closed_layout,
        "sink": layout(raw, raw, max(case.sinks, 1)),
        "tail": layout(raw, raw, case.page_size),
    }
    stores, tables, pools, newest = [], [], [], torch.zeros(len(case.lengths), 1, dtype=torch.int32)
    for name, tokens in held.items():
        if not any(end > start for start, end in tokens):
            continue
        pages, pool, static = _part(layouts[name], tokens, case, name, gen, rng, device)
        stores.append(PageStore(layouts[name], slabs_of(pool[:, 0], case.slabs), static))
        tables.append(on(device, table_of(pages, layouts[name].page_size, case.spans)))
        pools.append(pool)
        for b, row in enumerate(pages):
            newest[b] = max(newest[b], *(start + length for _, start, length in row)) if row else newest[b]
    q = torch.randn(
        len(case.lengths), case.num_queries, case.heads * case.group, case.head_dim, generator=gen, device=device
    ).to(case.dtype)
    positions = newest - case.num_queries + torch.arange(case.num_queries, dtype=torch.int32, device="cpu")
    positions = torch.where(newest < case.num_queries, -1, positions)
    options = {"scaling": case.head_dim**-0.5, "sliding_window": case.window, "softcap": case.softcap}
    return Call(stores, tables, q, positions.to(device), options, pools)


def _part(
    layout: PageLayout,
    held: list[tuple[int, int]],
    case: Case,
    name: str,
    gen: torch.Generator,
    rng: np.random.Generator,
    device,
) -> tuple[list[list[tuple[int, int, int]]], torch.Tensor, dict[str, torch.Tensor]]:
    """Pages of each sequence as `table_of` takes them, the pool [pages, layers, H, bytes], and calibrated parameters."""
    size = layout.page_size
    starts, lengths, counts = [], [], []
    for first, end in held:
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
    every = list(zip(ids.tolist(), starts, lengths, strict=True))
    ends = np.cumsum(counts)
    return [every[end - count : end] for count, end in zip(counts, ends, strict=True)], slab, static


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
