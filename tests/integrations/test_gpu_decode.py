"""Decoding on the device, on a GPU: attention over tables, the cache against the one that the host leads,
graphs over page closings, fresh pages.
"""

from __future__ import annotations

import pytest
import torch
from messages import raises
from ops.cpu_cases import static_params
from ops.table_cases import CASES, Cache, check

from kvbits import schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, PoolFullError, SpecError
from kvbits.ops.cuda.families.klt.family import MOST_COLUMNS
from kvbits.spec import CacheSpec, LayerGeometry, Rotary

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*CUDA Graph is empty", "ignore:.*Synchronization debug mode"),
]
TOKEN_LOCAL = [schemes.get(name, residual_length=0, token_local=True) for name in ("int8", "int8_centered", "int4")]
PRESETS = [
    "raw",
    "int8",
    "int8_centered",
    "int8_per_channel",
    "int4",
    "int4_centered",
    "int8k_int4v",
    "kivi4",
    "kivi2",
    "fp8",
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slabs", [1, 2])
@pytest.mark.parametrize(
    "group, num_queries, window, softcap",
    [(2, 1, None, None), (4, 1, 150, None), (2, 3, None, 20.0), (4, 8, 100, None), (4, 64, None, None)],
)
def test_attention_over_anybodys_pages(name, slabs, group, num_queries, window, softcap):
    cache = Cache(**CASES[name])
    if any(layout.key.is_trellis for layout in cache.layouts):
        num_queries = min(num_queries, MOST_COLUMNS // group)
    lens = torch.tensor(
        [max(0, min(num_queries, int(n)) - i % 2) for i, n in enumerate(cache.newest)], dtype=torch.int32
    )
    check(
        cache,
        group=group,
        num_queries=num_queries,
        query_lens=lens,
        window=window,
        softcap=softcap,
        device="cuda",
        batch_size=len(lens) + 3,
        slabs=slabs,
    )


LAYERS, HQ, H, DIM = 3, 8, 2, 128


def spec_of(scheme, window=None):
    scheme = schemes.get(scheme) if isinstance(scheme, str) else scheme
    rotary = (
        Rotary(inv_freq=tuple(500_000.0 ** (-i / (DIM // 2)) for i in range(DIM // 2))) if scheme.needs_rotary else None
    )
    return CacheSpec(
        scheme=scheme,
        layers=(LayerGeometry(num_kv_heads=H, head_dim=DIM, sliding_window=window, rotary=rotary),) * LAYERS,
    )


def calibrations(scheme):
    """A basis for each layer where the scheme has one."""
    scheme = schemes.get(scheme) if isinstance(scheme, str) else scheme
    if not scheme.needs_calibration:
        return {}
    made = (static_params(scheme.key, scheme.value, H, DIM) for _ in range(LAYERS))
    return {"static": [{n: x[n].cuda() for n in ("k_basis", "k_mean")} for x in made]}


def random_tokens(batch, count, gen):
    return [
        tuple(torch.randn(batch, count, n, DIM, generator=gen, device="cuda").bfloat16() for n in (HQ, H, H))
        for _ in range(LAYERS)
    ]


def feed(cache, layers):
    return torch.stack([cache.step(i, q, k, v, scaling=DIM**-0.5) for i, (q, k, v) in enumerate(layers)])


@pytest.mark.parametrize("fixed", [False, True], ids=["grows", "fixed"])
@pytest.mark.parametrize(
    "scheme", [*PRESETS, *TOKEN_LOCAL], ids=lambda s: s if isinstance(s, str) else f"{s.name}_token_local"
)
def test_the_cache_is_the_one_that_the_host_leads(scheme, fixed):
    options = {"max_tokens": 700, "batch_size": 5} if fixed else {}
    ours, theirs = (
        PagedCache(spec_of(scheme), device="cuda", **options),
        PagedCache(spec_of(scheme), device="cuda", backend="reference", **options),
    )
    gen = torch.Generator("cuda").manual_seed(0)
    prompt = random_tokens(5, 300, gen)
    feed(ours, prompt), feed(theirs, prompt)
    for step in range(140):
        layers = random_tokens(5, 1, gen)
        torch.cuda.set_sync_debug_mode(
            "error"
            if step > 10 and (fixed or step % 128 not in range(2, 8)) and ours.decoding and ours.decoding.steps_left > 1
            else "default"
        )
        try:
            got = feed(ours, layers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        want = feed(theirs, layers)
        assert ((got - want).norm() / want.norm()).item() < 2e-2, step
    assert ours.decoding is not None, ours.led_by_host
    assert ours.seq_lens == theirs.seq_lens
    for layer in range(LAYERS):
        for row in range(5):
            for a, b in zip(ours.dequantize(layer, row), theirs.dequantize(layer, row), strict=True):
                different = (a != b).flatten(1).any(1).nonzero().flatten().tolist()
                assert not different, (layer, row, len(different), different[:20], different[-5:])


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize(
    "scheme",
    ["raw", "int8_centered", "int4", "kivi2", "klt4", "klt3", "klt2", TOKEN_LOCAL[1]],
    ids=lambda s: s if isinstance(s, str) else f"{s.name}_token_local",
)
def test_one_graph_decodes_500_tokens_over_page_closings(scheme, batch):
    """Captured once: the same numbers as eager, bit for bit."""
    static = calibrations(scheme)
    ours, eager = (
        PagedCache(spec_of(scheme), device="cuda", max_tokens=900, batch_size=batch, **static) for _ in range(2)
    )
    gen = torch.Generator("cuda").manual_seed(1)
    prompt = random_tokens(batch, 300, gen)
    feed(ours, prompt), feed(eager, prompt)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), raises(CacheStateError, "captured"):
        feed(ours, [tuple(x[:, :1] for x in layer) for layer in prompt])
    for _ in range(4):
        layers = random_tokens(batch, 1, gen)
        assert torch.equal(feed(ours, layers), feed(eager, layers))
    assert ours.decoding is not None, ours.led_by_host
    static = random_tokens(batch, 1, gen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = feed(ours, static)
    for step in range(500):
        layers = random_tokens(batch, 1, gen)
        for to, x in zip(static, layers, strict=True):
            for a, b in zip(to, x, strict=True):
                a.copy_(b)
        ours.count_replays(1)
        graph.replay()
        assert torch.equal(out, feed(eager, layers)), step
    with pytest.raises(PoolFullError):
        ours.count_replays(900)
    assert ours.seq_lens == eager.seq_lens == [804] * batch
    for a, b in zip(ours.dequantize(1, batch - 1), eager.dequantize(1, batch - 1), strict=True):
        assert torch.equal(a, b)
    with raises(CacheStateError, "capture again"):
        ours.count_replays(1)


@pytest.mark.parametrize("scheme", ["raw", "int8_centered", "int4", "kivi4"])
@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (128, 64), (512, 512)])
def test_heads_of_unlike_widths_and_wide_ones(scheme, head_dim, value_head_dim):
    """A prompt, a chunk over history, single tokens over closing pages by the device's own lead, and the same in a
    graph, against the reference.
    """
    try:
        fitted = schemes.get(scheme, head_dim=head_dim, value_head_dim=value_head_dim)
        geometry = LayerGeometry(num_kv_heads=2, head_dim=head_dim, value_head_dim=value_head_dim)
        spec = CacheSpec(scheme=fitted, layers=(geometry,) * LAYERS)
    except SpecError as why:
        pytest.skip(str(why))
    if scheme == "kivi4" and head_dim == 512:
        pytest.skip("its values have more groups with a bias than the kernel takes")
    options = {"device": "cuda", "max_tokens": 700, "batch_size": 3}
    ours, theirs, gen = (
        PagedCache(spec, **options),
        PagedCache(spec, **options, backend="reference"),
        torch.Generator("cuda").manual_seed(0),
    )

    def tokens(count):
        sizes = ((HQ, head_dim), (2, head_dim), (2, value_head_dim))
        return [
            tuple(torch.randn(3, count, n, d, generator=gen, device="cuda").bfloat16() for n, d in sizes)
            for _ in range(LAYERS)
        ]

    def fed(cache, layers):
        return torch.stack([cache.step(i, q, k, v, scaling=head_dim**-0.5) for i, (q, k, v) in enumerate(layers)])

    for count in (300, 40, *(1,) * 70):
        layers = tokens(count)
        got, want = fed(ours, layers), fed(theirs, layers)
        assert ((got.float() - want.float()).norm() / want.float().norm()).item() < 2e-2, count
    assert ours.decoding is not None, ours.led_by_host
    assert ours.nbytes == spec.nbytes(700, 3)
    static = tokens(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fed(ours, static)
    for _ in range(80):
        layers = tokens(1)
        for to, x in zip(static, layers, strict=True):
            for a, b in zip(to, x, strict=True):
                a.copy_(b)
        ours.count_replays(1)
        graph.replay()
        want = fed(theirs, layers)
        assert ((out.float() - want.float()).norm() / want.float().norm()).item() < 2e-2
    for a, b in zip(ours.dequantize(1, 2), theirs.dequantize(1, 2), strict=True):
        assert torch.equal(a, b)


def test_a_growing_cache_is_not_captured():
    cache = PagedCache(spec_of("int4"), device="cuda")
    gen = torch.Generator("cuda").manual_seed(1)
    feed(cache, random_tokens(1, 100, gen))
    for _ in range(4):
        feed(cache, random_tokens(1, 1, gen))
    layers = random_tokens(1, 1, gen)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), raises(CacheStateError, "max_tokens"):
        feed(cache, layers)
    feed(cache, layers)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_tokens_of_the_kernel_just_ahead_are_never_read_early(scheme):
    """100,000 steps in graphs: every step overwrites the newest token and attends to it at once, over one page, so that
    the ring reads it first.
    """
    cache = PagedCache(
        CacheSpec(scheme=schemes.get(scheme), layers=(LayerGeometry(num_kv_heads=H, head_dim=DIM),)),
        device="cuda",
        max_tokens=400,
        batch_size=8,
    )
    gen = torch.Generator("cuda").manual_seed(2)
    q, k, v = (torch.randn(8, 1, n, DIM, generator=gen, device="cuda").bfloat16() for n in (HQ, H, H))
    cache.step(
        0,
        q.expand(-1, 3, -1, -1).contiguous(),
        k.expand(-1, 3, -1, -1).contiguous(),
        v.expand(-1, 3, -1, -1).contiguous(),
        scaling=4.0,
    )
    for _ in range(4):
        cache.step(0, q, k, v, scaling=4.0)
    keys = torch.randn(64, *k.shape, generator=gen, device="cuda").bfloat16()
    values = torch.randn(64, *v.shape, generator=gen, device="cuda").bfloat16()
    decode = cache.decoding
    (group,) = decode.stepper.groups
    state = group.numbers.clone()

    def one(i):
        group.numbers.copy_(state)  # the same place again
        return cache.step(0, q, keys[i], values[i], scaling=4.0)

    want = []
    for i in range(64):
        group.numbers.copy_(state)
        decode.stepper.begin(None)
        group.writers[0].run(keys[i], values[i], torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        want.append(group.attention.run(q, 0))
    want = torch.stack(want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrong = torch.zeros((), dtype=torch.bool, device="cuda")
        for i in range(64):
            wrong |= (one(i) != want[i]).any()
    seen = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(100_000 // 64 + 1):
        graph.replay()
        seen |= wrong
    assert not bool(seen)
