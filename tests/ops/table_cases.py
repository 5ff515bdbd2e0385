"""Caches of several parts by tables, as engines have them, and what attention over them should give."""

from __future__ import annotations

import numpy as np
import torch
from ops.cpu_cases import static_params
from ops.cuda_cases import on, relative_error, slabs_of

from kvbits import schemes
from kvbits.ops import attend
from kvbits.ops.reference.attend import exact
from kvbits.ops.reference.close import close_pages
from kvbits.ops.types import PageStore, Table
from kvbits.quant.basis import for_copies
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

LIMIT = 5e-3
RAW = QuantSpec.raw()
HEADS, D = 2, 64


def spec(fmt, granularity=PerGroup(64), **options):  # noqa: B008
    return QuantSpec(format=fmt, granularity=granularity, **options)


def layout_of(key, value, size=64):
    return PageLayout(key=key, value=value, page_size=size, num_kv_heads=HEADS, head_dim=D)


class Cache:
    """Pages of several parts in shuffled pools of three layers, of which ours is the middle one.

    Args:
        lengths: tokens of each sequence, of each part.
        poison: page number of entries that no sequence has.

    Attributes:
        stores, tables: of each part.
        newest: int32 [B], position after the newest token.
    """

    def __init__(self, layouts, lengths, seed=0, poison=-1):
        gen, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self.layouts, self.stores, self.tables = layouts, [], []
        packed = next((x for x in layouts if not x.is_raw), layouts[0])
        static = static_params(packed.key, packed.value, HEADS, D)
        tokens = [torch.tensor([n[p] for n in lengths], dtype=torch.int32) for p in range(len(layouts))]
        before = torch.stack([torch.zeros(len(lengths), dtype=torch.int32), *tokens]).cumsum(0, dtype=torch.int32)
        for p, layout in enumerate(layouts):
            size, batch = layout.page_size, len(lengths)
            counts = [-(-n[p] // size) for n in lengths]
            ids = rng.permutation(sum(counts) + 3)
            first_of = np.zeros(len(ids), np.int64)  # position of each page's first token
            table = torch.full((batch, max(counts) + 2), poison, dtype=torch.int32)
            offsets = torch.tensor(rng.integers(0, 3, batch), dtype=torch.int32)
            for b, (n, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
                mine = ids[end - n : end]
                table[b, offsets[b] : offsets[b] + n] = torch.from_numpy(mine.astype(np.int32))
                first_of[mine] = int(before[p][b]) + size * np.arange(n)
            k, v = (torch.randn(len(ids), HEADS, size, D, generator=gen) for _ in "kv")
            k += torch.randn(D, generator=gen)
            wide = torch.full((len(ids), 3, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8)
            own = {} if layout.is_raw else for_copies(static, packed.key, layout.key)
            wide[:, 1] = close_pages(k.bfloat16(), v.bfloat16(), layout, own, first_of)[0]
            self.stores.append(PageStore(layout, (wide[:, 1],), own))
            self.tables.append(Table(table, tokens[p], before[p].contiguous(), offsets))
        self.newest = before[-1]

    def want(self, q, query_lens=None, window=None, softcap=None):
        """out and lse in float64."""
        options = {"sliding_window": window, "softcap": softcap}
        return exact(q, self.stores, self.tables, query_lens=query_lens, **options)


def check(
    cache,
    *,
    limit=LIMIT,
    group=2,
    num_queries=1,
    query_lens=None,
    window=None,
    softcap=None,
    device="cpu",
    batch_size=None,
    slabs=1,
):
    """Attention over a cache, its pools in so many slabs, against float64."""
    batch = len(cache.newest)
    q = torch.randn(batch, num_queries, HEADS * group, D, generator=torch.Generator().manual_seed(5)).bfloat16()
    made = attend.plan(
        cache.layouts,
        batch_size=batch_size or batch,
        num_q_heads=HEADS * group,
        dtype=q.dtype,
        device=device,
        num_queries=num_queries,
        sliding_window=window,
        softcap=softcap,
    )
    made.bind(7, [moved(store, device, slabs) for store in cache.stores])
    lens = None if query_lens is None else query_lens.to(device)
    made.update([on(device, table) for table in cache.tables], query_lens=lens)
    out, lse = torch.full_like(q, torch.nan, device=device), torch.full(q.shape[:3], torch.nan, device=device)
    assert made.run(q.to(device), 7, out=out, lse=lse) is out
    out, lse = out.cpu(), lse.cpu()
    want, want_lse = cache.want(q, query_lens, window, softcap)
    assert torch.isfinite(out).all()
    assert relative_error(out, want) < limit
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-3, atol=1e-2 if limit == LIMIT else 3e-2)
    return made


def moved(store, device, slabs=1):
    """The store on a device, in so many slabs."""
    static = {name: x.to(device) for name, x in store.static.items()}
    return PageStore(store.layout, slabs_of(store.slabs[0].to(device), slabs), static)


INT8 = layout_of(spec("int8"), spec("int8"))
KIVI = layout_of(spec("int4", PerChannel(), symmetric=False), spec("int4", PerToken(), symmetric=False))
CASES = {
    "one part": dict(layouts=[INT8], lengths=[(333,), (0,), (70,), (64,), (1,)]),
    "tail": dict(
        layouts=[layout_of(spec("int4"), spec("int4")), layout_of(RAW, RAW)],
        lengths=[(320, 13), (0, 64), (0, 0), (64, 100), (448, 0)],
    ),
    "sinks": dict(
        layouts=[
            layout_of(RAW, RAW, 4),
            layout_of(spec("int4", PerChannel(), symmetric=False), spec("int4", symmetric=False)),
            layout_of(RAW, RAW),
        ],
        lengths=[(4, 640, 150), (4, 0, 9), (2, 0, 0), (4, 128, 1)],
    ),
    "centred": dict(
        layouts=[layout_of(spec("int8", center="channel"), spec("int8")), layout_of(RAW, RAW)],
        lengths=[(320, 33), (64, 1)],
    ),
    "raw": dict(layouts=[layout_of(RAW, RAW)], lengths=[(333,), (0,), (70,)]),
    "basis": dict(
        layouts=[
            layout_of(RAW, RAW, 4),
            layout_of(schemes.get("klt3").key, schemes.get("klt3").value),
            layout_of(RAW, RAW),
        ],
        lengths=[(4, 640, 150), (4, 0, 9), (2, 0, 0), (4, 128, 1)],
    ),
    # as an engine has them: pages at multiples of 64, raw copies of a row's first page and of its newest, or of none
    "basis with copies": dict(
        layouts=[
            layout_of(RAW, RAW),
            layout_of(schemes.get("klt4").key, schemes.get("klt4").value),
            layout_of(RAW, RAW),
        ],
        lengths=[(64, 576, 100), (0, 333, 0), (64, 0, 9), (40, 0, 0), (0, 320, 64), (64, 448, 0), (0, 1, 0)],
    ),
    # newest closed pages read from copies of two finer formats
    "copies": dict(
        layouts=[
            layout_of(RAW, RAW, 4),
            *(layout_of(s.key, s.value) for s in map(schemes.get, ("klt2", "klt3", "klt4"))),
            layout_of(RAW, RAW),
        ],
        lengths=[(4, 640, 128, 448, 100), (4, 0, 0, 64, 9), (2, 0, 0, 0, 0), (4, 0, 128, 320, 1)],
    ),
    # newest pages behind the raw ones from finer packed copies
    "basis with packed copies": dict(
        layouts=[
            layout_of(RAW, RAW),
            layout_of(schemes.get("klt2").key, schemes.get("klt2").value),
            layout_of(schemes.get("klt4").key, schemes.get("klt4").value),
            layout_of(RAW, RAW),
        ],
        lengths=[(64, 576, 448, 100), (0, 333, 0, 0), (64, 0, 0, 9), (0, 320, 64, 64), (64, 0, 448, 128), (0, 0, 5, 0)],
    ),
    "two packed parts": dict(
        layouts=[layout_of(RAW, RAW, 4), KIVI, KIVI, layout_of(RAW, RAW)],
        lengths=[(4, 640, 128, 150), (4, 0, 64, 9), (2, 0, 0, 0), (4, 128, 320, 1)],
    ),
}
