"""Attention over anybody's pages: the contract on host lists, and the CUDA kernels (work list and attention) run on a
CPU, against float64.
"""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
import torch
from ops.cpu_cases import static_params
from ops.cuda_cases import relative_error

from kvbits import schemes
from kvbits.errors import DataError, SpecError
from kvbits.ops import dispatch, paged_attention
from kvbits.ops.reference import attend_pages as reference
from kvbits.ops.reference.close import close_pages
from kvbits.ops.types import AttendCall, PageStore, PageTable, Part
from kvbits.spec import PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

LIMIT = 5e-3


def spec(fmt, granularity=PerGroup(64), **options):  # noqa: B008
    return QuantSpec(format=fmt, granularity=granularity, **options)


RAW = QuantSpec.raw()
HEADS, D = 2, 64


class Cache:
    """Pages of several parts in shuffled pools, and the host's view of them."""

    def __init__(self, layouts, lengths, max_pages, seed=0, poison=None):
        gen, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        self.layouts, self.pages, self.tables, self.offsets, self.parts = layouts, [], [], [], []
        packed = next((x for x in layouts if not x.is_raw), layouts[0])
        self.static = static_params(packed.key, packed.value, HEADS, D)
        self.tokens = [torch.tensor([n[p] for n in lengths], dtype=torch.int32) for p in range(len(layouts))]
        before = torch.stack([torch.zeros(len(lengths), dtype=torch.int32), *self.tokens]).cumsum(0, dtype=torch.int32)
        self.starts = [before[p].contiguous() for p in range(len(layouts))]
        for p, layout in enumerate(layouts):
            size, batch = layout.page_size, len(lengths)
            counts = [-(-n[p] // size) for n in lengths]
            total = sum(counts) + 3
            ids = rng.permutation(total)
            first_of = np.zeros(total, np.int64)  # position of each page's first token
            table = torch.full((batch, max_pages[p] + 2), -1 if poison is None else poison, dtype=torch.int32)
            offset = torch.tensor(rng.integers(0, 3, batch), dtype=torch.int32)
            rows, starts, sizes, at = [], [], [], 0
            for b, n in enumerate(counts):
                mine = ids[at : at + n]
                at += n
                table[b, offset[b] : offset[b] + n] = torch.from_numpy(mine.astype(np.int32))
                rows += mine.tolist()
                starts += [int(self.starts[p][b]) + i * size for i in range(n)]
                sizes += [min(size, lengths[b][p] - i * size) for i in range(n)]
                first_of[mine] = starts[len(starts) - n :]
            k, v = (torch.randn(total, HEADS, size, D, generator=gen) for _ in "kv")
            k += torch.randn(D, generator=gen)
            slabs = close_pages(k.bfloat16(), v.bfloat16(), layout, self.static, first_of)[0]
            # of three layers, ours in the middle
            wide = torch.full((total, 3, HEADS, layout.head_bytes), 0xFF, dtype=torch.uint8)
            wide[:, 1] = slabs
            self.pages.append(wide[:, 1])
            self.tables.append(table)
            self.offsets.append(offset)
            indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            if rows:
                ids = np.array(rows, np.int64)
                own = PageTable(indptr, ids, np.array(starts, np.int64), np.array(sizes, np.int32))
                self.parts.append(Part(PageStore(layout, (self.pages[p],), {} if layout.is_raw else self.static), own))
        self.newest = before[-1]

    def want(self, q, query_lens=None, window=None, softcap=None):
        t = q.shape[1]
        count = torch.full_like(self.newest, t) if query_lens is None else query_lens
        positions = (self.newest - count)[:, None] + torch.arange(t)
        positions = torch.where((torch.arange(t) < count[:, None]) & (self.newest >= count)[:, None], positions, -1)
        return reference.attend(
            q, AttendCall(tuple(self.parts), D**-0.5, window, softcap), positions.long(), torch.float64
        )


def layout_of(key, value, size=64):
    return PageLayout(key=key, value=value, page_size=size, num_kv_heads=HEADS, head_dim=D)


def check(
    cache,
    max_pages,
    *,
    limit=LIMIT,
    group=2,
    num_queries=1,
    query_lens=None,
    window=None,
    softcap=None,
    device="cpu",
    batch_size=None,
):
    batch = len(cache.newest)
    q = torch.randn(batch, num_queries, HEADS * group, D, generator=torch.Generator().manual_seed(5)).bfloat16()
    made = paged_attention.plan(
        cache.layouts,
        max_pages=max_pages,
        batch_size=batch_size or batch,
        num_q_heads=HEADS * group,
        dtype=q.dtype,
        device=device,
        num_queries=num_queries,
        sliding_window=window,
        softcap=softcap,
    )
    made.bind(7, cache.pages, cache.static)
    made.update(cache.tables, cache.tokens, starts=cache.starts, offsets=cache.offsets, query_lens=query_lens)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    assert made.run(q, 7, out=out, lse=lse) is out
    want, want_lse = cache.want(q, query_lens, window, softcap)
    assert torch.isfinite(out).all()
    assert relative_error(out, want) < limit
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse), finite)
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-3, atol=1e-2 if limit == LIMIT else 3e-2)
    return made


INT8 = layout_of(spec("int8"), spec("int8"))
KIVI = layout_of(spec("int4", PerChannel(), symmetric=False), spec("int4", PerToken(), symmetric=False))
CASES = {
    "one part": dict(layouts=[INT8], lengths=[(333,), (0,), (70,), (64,), (1,)], max_pages=[6]),
    "tail": dict(
        layouts=[layout_of(spec("int4"), spec("int4")), layout_of(RAW, RAW)],
        lengths=[(320, 13), (0, 64), (0, 0), (64, 100), (448, 0)],
        max_pages=[7, 2],
    ),
    "sinks": dict(
        layouts=[
            layout_of(RAW, RAW, 4),
            layout_of(spec("int4", PerChannel(), symmetric=False), spec("int4", symmetric=False)),
            layout_of(RAW, RAW),
        ],
        lengths=[(4, 640, 150), (4, 0, 9), (2, 0, 0), (4, 128, 1)],
        max_pages=[1, 10, 3],
    ),
    "centred": dict(
        layouts=[layout_of(spec("int8", center="channel"), spec("int8")), layout_of(RAW, RAW)],
        lengths=[(320, 33), (64, 1)],
        max_pages=[5, 1],
    ),
    "raw": dict(layouts=[layout_of(RAW, RAW)], lengths=[(333,), (0,), (70,)], max_pages=[6]),
    "basis": dict(
        layouts=[
            layout_of(RAW, RAW, 4),
            layout_of(schemes.get("klt3").key, schemes.get("klt3").value),
            layout_of(RAW, RAW),
        ],
        lengths=[(4, 640, 150), (4, 0, 9), (2, 0, 0), (4, 128, 1)],
        max_pages=[1, 10, 3],
    ),
    # as an engine has them: pages at multiples of 64, raw copies of a row's first page and of its newest, or of none
    "basis with copies": dict(
        layouts=[
            layout_of(RAW, RAW),
            layout_of(schemes.get("klt4").key, schemes.get("klt4").value),
            layout_of(RAW, RAW),
        ],
        lengths=[(64, 576, 100), (0, 333, 0), (64, 0, 9), (40, 0, 0), (0, 320, 64), (64, 448, 0), (0, 1, 0)],
        max_pages=[1, 9, 2],
    ),
    "two packed parts": dict(
        layouts=[layout_of(RAW, RAW, 4), KIVI, KIVI, layout_of(RAW, RAW)],
        lengths=[(4, 640, 128, 150), (4, 0, 64, 9), (2, 0, 0, 0), (4, 128, 320, 1)],
        max_pages=[1, 10, 5, 3],
    ),
}


KLT2 = layout_of(schemes.get("klt2").key, schemes.get("klt2").value)
ON_HOSTS = CASES | {
    "two parts in a basis": (
        CASES["two packed parts"] | {"layouts": [layout_of(RAW, RAW, 4), KLT2, KLT2, layout_of(RAW, RAW)]}
    )
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ON_HOSTS)
def test_host_lists_serve_the_contract(name, backend, monkeypatch):
    monkeypatch.setitem(dispatch.BACKENDS, "paged_attention", (backend,))
    made = check(Cache(**ON_HOSTS[name]), ON_HOSTS[name]["max_pages"], limit=2e-2, num_queries=2, window=100)
    assert backend in made.explain()


def test_a_host_plan_follows_lengths_pages_and_layers():
    """Layers of pools of other sizes, bound before and after lengths are known, anew, and read at other lengths: as
    plans made for that alone.
    """
    one, two = Cache([INT8], [(200,), (70,)], [4]), Cache([INT8], [(333,), (0,)], [6])
    q = torch.randn(2, 1, 2 * HEADS, D, generator=torch.Generator().manual_seed(5))

    def made():
        return paged_attention.plan(
            [INT8], max_pages=[4], batch_size=2, num_q_heads=2 * HEADS, dtype=q.dtype, device="cpu"
        )

    def alone(cache, tokens):
        plan = made()
        plan.bind(3, cache.pages)
        plan.update([one.tables[0]], [tokens])
        return plan.run(q, 3)

    plan, longer, shorter = made(), torch.tensor([200, 70], dtype=torch.int32), torch.tensor([65, 0], dtype=torch.int32)
    plan.bind(0, one.pages)
    plan.update([one.tables[0]], [longer])
    plan.bind(1, two.pages)
    for tokens in (longer, shorter, longer):
        plan.update([one.tables[0]], [tokens])
        for layer, cache in enumerate((one, two)):
            assert torch.equal(plan.run(q, layer), alone(cache, tokens))
    plan.bind(0, two.pages)
    assert torch.equal(plan.run(q, 0), alone(two, longer))
    with pytest.raises(DataError, match="starts must not be negative"):
        plan.update([one.tables[0]], [shorter], starts=[-longer])
    assert torch.equal(plan.run(q, 0), alone(two, longer)), "refused, the update changes nothing"
    half, spread = q.bfloat16(), q.repeat(1, 1, 1, 2)[..., ::2]
    assert torch.equal(plan.run(spread, 0), plan.run(spread.contiguous(), 0))
    with pytest.raises(DataError, match="the plan is for"):
        plan.run(half, 0)
    with pytest.raises(DataError, match=r"on meta; the plan is for .* on the CPU"):
        plan.run(q.to("meta"), 0)


@pytest.mark.parametrize(
    "options", [{"num_queries": 3, "window": 100}, {"num_queries": 8, "softcap": 20.0, "batch_size": 9}], ids=str
)
@pytest.mark.parametrize("name", ["tail", "basis with copies"])
def test_ragged_queries_windows_and_caps(name, options):
    cache = Cache(**CASES[name])
    lens = torch.tensor([min(3, int(n)) - (i % 2) * (n > 2) for i, n in enumerate(cache.newest)], dtype=torch.int32)
    check(cache, CASES[name]["max_pages"], query_lens=lens, limit=2e-2, **options)


def test_bad_input_is_refused():
    good = dict(max_pages=[4], batch_size=2, num_q_heads=4, dtype=torch.bfloat16, device="cpu")
    for changes, message in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_pages": [0]}, "max_pages=0"),
        ({"max_pages": [1, 2]}, "1 layouts and 2"),
        ({"num_q_heads": 3}, "3 query heads are no multiple of 2"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"num_queries": 0}, "num_queries=0"),
    ):
        with pytest.raises(SpecError, match=message):
            paged_attention.plan([INT8], **good | changes)
    made = paged_attention.plan([INT8], **good)
    pages = torch.zeros(5, HEADS, INT8.head_bytes, dtype=torch.uint8)
    table, lens, q = (
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 1, 4, D, dtype=torch.bfloat16),
    )
    for bad in (pages[:, :1], pages.to(torch.int8), pages[..., :-16], pages[:0]):
        with pytest.raises(DataError, match="pages must be uint8"):
            made.bind(0, [bad])
    with pytest.raises(DataError, match="never bound"):
        made.run(q, 0)
    made.bind(0, [pages])
    with pytest.raises(DataError, match="update"):
        made.run(q, 0)
    for tables, tokens, message in (
        ([table.long()], [lens], "block table 0 must be int32"),
        ([table[:, :3]], [lens], r"at least 4"),
        ([table], [lens.long()], "tokens must be dense int32"),
        ([table], [torch.zeros(3, dtype=torch.int32)], "3 sequences for a plan of at most 2"),
        ([table, table], [lens], "1 block tables"),
    ):
        with pytest.raises(DataError, match=message):
            made.update(tables, tokens)
    with pytest.raises(DataError, match="one on meta for a plan on cpu"):
        made.update([table], [lens.to("meta")])
    with pytest.raises(DataError, match="pages on meta"):
        made.bind(0, [pages.to("meta")])
    for changes, message in (
        ({"device": "meta"}, "are for 'cpu' and 'cuda'"),
        ({"sliding_window": 1.5}, "whole number"),
        ({"dtype": torch.int32}, "floating-point"),
        ({"max_pages": 4}, "max_pages must be a list of int, one for each part; got int"),
        ({"max_pages": ["4"]}, "max_pages must be a list of int, one for each part; got str"),
        ({"scaling": 1e300}, "scaling"),
    ):
        with pytest.raises(SpecError, match=message):
            paged_attention.plan([INT8], **good | changes)
    for layouts in (INT8, [INT8.key]):
        with pytest.raises(
            SpecError, match="layouts must be a list of PageLayout, one for each part; got (PageLayout|QuantSpec)"
        ):
            paged_attention.plan(layouts, **good)
    made.update([table], [lens])
    with pytest.raises(DataError, match="the plan is for"):
        made.run(q[:, :, :2], 0)
    with pytest.raises(DataError, match="out must be dense"):
        made.run(q, 0, out=q.float())
    assert not made.run(q, 0).any()


def test_parts_that_come_later_find_their_backend():
    """A format that the CPU kernels refuse, in a part that is empty at first."""
    odd = layout_of(spec("int4", PerGroup(2)), spec("int4"))
    plan = paged_attention.plan(
        [INT8, odd], max_pages=[1, 1], batch_size=1, num_q_heads=2, dtype=torch.float32, device="cpu"
    )
    plan.bind(0, [torch.zeros(1, HEADS, x.head_bytes, dtype=torch.uint8) for x in (INT8, odd)])
    table, one, none = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    for tokens in ([one, none], [one, one]):
        plan.update([table, table], tokens)
        plan.run(torch.ones(1, 1, 2, D), 0)


def test_every_subset_of_parts_may_be_empty():
    case = CASES["sinks"]
    rows = [
        tuple(n if keep else 0 for n, keep in zip((4, 192, 70), which, strict=True))
        for which in itertools.product((0, 1), repeat=3)
    ]
    check(Cache(case["layouts"], rows, case["max_pages"]), case["max_pages"], limit=2e-2)


if not shutil.which("g++"):
    pytestmark = pytest.mark.skip(reason="needs g++")


def test_what_is_no_tensor_is_named_and_arguments_are_not_mixed_up():
    layout = PageLayout(
        key=schemes.get("int8").key, value=schemes.get("int8").value, page_size=64, num_kv_heads=2, head_dim=64
    )
    made = paged_attention.plan(
        [layout], max_pages=[4], batch_size=2, num_q_heads=4, dtype=torch.bfloat16, device="cpu"
    )
    pages = torch.zeros(8, 2, layout.head_bytes, dtype=torch.uint8)
    table, lens = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for call, message in (
        (lambda: made.bind(0, [[1, 2]]), "pages of a part must be a list of tensors, one for each part; got int"),
        (lambda: made.bind(0, ["pages"]), "pages of a part must be a list of tensors.* got str"),
        (
            lambda: made.update([table.tolist()], [lens]),
            r"update\(\): block_tables must be a list of tensors, one for each part; got list",
        ),
        (lambda: made.update(table, [lens]), "block_tables must be a list of tensors, one for each part; got Tensor"),
        (lambda: made.update([table], [None]), "tokens must be a list of tensors, one for each part; got NoneType"),
        (
            lambda: made.update([table], [lens], starts=[1]),
            "starts must be a list of tensors, or None for each, one for each part; got int",
        ),
        (lambda: made.update([table], [lens], query_lens=3), "query_lens must be .*; got int"),
    ):
        with pytest.raises(DataError, match=message):
            call()
    made.bind(0, [pages])
    made.update([table], [lens])
    with pytest.raises(DataError, match="one for each part of the plan"):
        made.update([table], [lens], starts=[None, None], offsets=[])  # as many as before in all
    with pytest.raises(DataError, match=r"q must be a tensor \[B, T, Hq, D\], got list"):
        made.run([1.0])
    with pytest.raises(DataError, match="out must be dense .* got str"):
        made.run(torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16), out="out")


BINDING = dict(max_pages=[4], batch_size=2, num_q_heads=4, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("bad", [0.0, -2.0, float("nan"), float("inf")])
def test_calibrated_scales_that_cannot_be_are_refused_when_they_are_bound(bad):
    """Attention over pages with a scale of NaN answered 0."""
    scheme = schemes.get("int8_static")
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=64, num_kv_heads=2, head_dim=64)
    pages, good = (
        torch.zeros(5, 2, layout.head_bytes, dtype=torch.uint8),
        {
            "k_scale": torch.ones(2, 1),
            "v_scale": torch.ones(2, 1),
        },
    )
    made = paged_attention.plan([layout], **BINDING)
    made.bind(3, [pages], good)
    with pytest.raises(SpecError, match=rf"v_scale for pages of layer 3 holds {bad:g} at \[0, 0\]"):
        made.bind(3, [pages], good | {"v_scale": torch.tensor([[bad], [1.0]])})
    for static, message in (
        (None, "there is no k_scale for pages of layer 3, float32 .*pass static="),
        (good | {"k_scale": torch.ones(2, 2)}, "k_scale .* has shape"),
        (good | {"k_scale": 1.0}, "k_scale .* got float"),
        (good | {"k_scale": torch.ones(2, 1, dtype=torch.int32)}, "k_scale .* got torch.int32"),
    ):
        with pytest.raises(SpecError, match=message):
            made.bind(3, [pages], static)


def test_banded_pages_say_what_they_are_read_with():
    """Pages in a calibrated basis ended in a KeyError of the first run."""
    scheme = schemes.get("klt4")
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=64, num_kv_heads=2, head_dim=64)
    pages = torch.zeros(5, 2, layout.head_bytes, dtype=torch.uint8)
    made = paged_attention.plan([layout], **BINDING)
    with pytest.raises(
        SpecError,
        match=r"there is no k_inverse .*\[2, 64, 64\]; pass static=\{\.\.\} with k_inverse, k_offsets, k_inv_freq",
    ):
        made.bind(0, [pages], {"k_basis": torch.eye(64).expand(2, -1, -1)})
    made.bind(
        0,
        [pages],
        {"k_inverse": torch.eye(64).repeat(2, 1, 1), "k_offsets": torch.zeros(2, 5, 64), "k_inv_freq": torch.ones(32)},
    )
    made.update([torch.zeros(2, 4, dtype=torch.int32)], [torch.ones(2, dtype=torch.int32)])
    assert not made.run(torch.ones(2, 1, 4, 64), 0).any()  # codes and scales of 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0", ["pages"]), "layer='0' must be a number"),
        ((0, torch.zeros(1, 2, 64, dtype=torch.uint8)), "pages must be a list, of each part .* got Tensor"),
        ((0, 7), "pages must be a list, .* got int"),
        ((0, [None]), "pages of a part must be a list of tensors"),
        ((0, [[]]), "a part without slabs"),
        ((0, [], None), "pages of 0 parts"),
        ((0, ["pages"], [1]), "pages of a part"),
    ],
)
def test_what_is_bound_with_wrong_types_is_named(arguments, message):
    made = paged_attention.plan([INT8], **BINDING)
    with pytest.raises(DataError, match=message):
        made.bind(*arguments)
    pages = torch.zeros(5, HEADS, INT8.head_bytes, dtype=torch.uint8)
    with pytest.raises(DataError, match="static must be a dict of tensors by name, got list"):
        made.bind(0, [pages], [torch.ones(1)])
