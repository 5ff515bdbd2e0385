"""Decoding with lengths and pages on the device: kernels run on a CPU here, against the cache that is led by the host.
tests/integrations/test_gpu_decode.py is the same on a GPU, with graphs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from messages import raises
from nightly import at_night
from ops import emulated_gpu
from ops.emulated_build import build, put_sources
from ops.emulated_op import emulate

from kvbits import schemes
from kvbits.cache import device_decode
from kvbits.cache.paged_cache import PagedCache
from kvbits.errors import CacheStateError, DataError, PoolFullError
from kvbits.ops import attend, decode
from kvbits.ops.cuda import attend as attend_cuda
from kvbits.ops.cuda import close as close_cuda
from kvbits.ops.cuda import decode as decode_cuda
from kvbits.ops.cuda import merge
from kvbits.ops.cuda.engine import launch, work_list
from kvbits.ops.cuda.families.klt import store as store_banded
from kvbits.ops.cuda.families.plain import close as close_plain
from kvbits.quant.scales import steps
from kvbits.spec import CacheSpec, Copies, LayerGeometry, Rotary

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
MEMORY = {"extern __shared__ __align__(16) unsigned char memory[];": "unsigned char* memory = ::shared;"}
HEADS, D, LAYERS, GROUP = 2, 64, 2, 2
libraries: dict = {}


def compiled(
    source: Path, macros: dict, entry: str, threads: str, folder: Path, instead: dict | None = None
) -> ctypes.CDLL:
    key = (source, *sorted(macros.items()))
    if key in libraries:
        return libraries[key]
    folder = folder / f"{source.stem}{len(libraries)}"
    folder.mkdir()
    put_sources(folder, source, {'extern "C" __global__': ""} | (instead or {}))
    lines = {"SHARED_BYTES": 64, **macros, "KERNEL": entry, "NUM_THREADS": threads}
    (folder / "defines.h").write_text("".join(f"#define {k} {v}\n" for k, v in lines.items()))
    libraries[key] = build(folder, ["-mf16c", "-ffp-contract=off"])
    return libraries[key]


def launcher(library):
    return SimpleNamespace(launch=lambda grid, threads, args, stream, **_: library.launch(ctypes.byref(args), grid))


@pytest.fixture
def gpu(monkeypatch, tmp_path_factory):
    """A GPU of three multiprocessors whose memory is the CPU's; it serves caches that decode on the device."""
    folder, engine = tmp_path_factory.mktemp("kernels"), Path(launch.__file__).parent

    def attention(kernel, device_index):
        key = ("attend", kernel.defines)
        if key not in libraries:
            libraries[key] = emulated_gpu.attention_library(kernel, tmp_path_factory.mktemp("attend"))
        return launcher(libraries[key])

    def close(layout, dtype, device_index, appends=False):
        macros = close_plain.defines(layout, dtype, appends)
        source = Path(close_plain.__file__).parent / "close.cu"
        return launcher(compiled(source, macros, "close_pages", "THREADS", folder, MEMORY)), int(macros["THREADS"])

    def close_bands(layout, dtype, device_index, appends=False, tokens=None):
        macros = store_banded.defines(layout, dtype, appends, tokens=tokens)
        source = Path(store_banded.__file__).parent / "store_banded.cu"
        return launcher(compiled(source, macros, "store_banded", "THREADS", folder, MEMORY)), int(macros["THREADS"])

    advance = lambda *_: launcher(compiled(engine / "advance.cu", {"THREADS": 64}, "advance", "THREADS", folder))  # noqa: E731

    def plan(layouts, **options):
        with monkeypatch.context() as patched:
            patched.setattr(attend_cuda.driver, "refuses", lambda *_: None)
            return attend.plan(layouts, backend="cuda", **options)

    for target, name, value in (
        (launch, "load_kernel", attention),
        (work_list, "load", lambda parts, *_: launcher(emulated_gpu.list_library(parts))),
        (work_list, "THREADS", emulated_gpu.LIST_THREADS),
        (attend_cuda, "indexed", lambda device: device),
        (device_decode, "plan", plan),
        (decode_cuda, "attend_cuda", SimpleNamespace(refuses_packed=lambda *_: None)),
        (close_plain, "load", close),
        (store_banded, "load", close_bands),
        (decode_cuda, "load_advance", advance),
        (close_cuda, "refuses_on", lambda *_: None),
        (decode, "BACKENDS", {"cpu": "cuda"}),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=3)),
        (torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True)),
    ):
        monkeypatch.setattr(target, name, value)
    (folder / "merge").mkdir()
    emulate(merge, "merge_partials", folder / "merge", monkeypatch)
    return monkeypatch


def spec_of(scheme, window=None):
    scheme = schemes.get(scheme) if isinstance(scheme, str) else scheme
    return CacheSpec(
        scheme=scheme, layers=(LayerGeometry(num_kv_heads=HEADS, head_dim=D, sliding_window=window),) * LAYERS
    )


class Tokens:
    """The same random tokens for several caches."""

    def __init__(self, batch, seed=0):
        self.gen, self.batch = torch.Generator().manual_seed(seed), batch

    def __call__(self, count):
        return [
            tuple(
                torch.randn(self.batch, count, n, D, generator=self.gen).bfloat16()
                for n in (HEADS * GROUP, HEADS, HEADS)
            )
            for _ in range(LAYERS)
        ]


def feed(cache, layers, valid=None):
    return torch.stack([cache.step(i, q, k, v, scaling=D**-0.5, valid=valid) for i, (q, k, v) in enumerate(layers)])


def same_pages(one, other):
    assert one.seq_lens == other.seq_lens
    for layer in range(LAYERS):
        for row in range(one.batch_size):
            for a, b in zip(one.dequantize(layer, row), other.dequantize(layer, row), strict=True):
                assert torch.equal(a, b), (layer, row)
    for a, b in zip(one.groups, other.groups, strict=True):
        for s, t in zip(a.sequences, b.sequences, strict=True):
            assert (s.length, s.closed_lengths, s.tail_lengths, s.released) == (
                t.length,
                t.closed_lengths,
                t.tail_lengths,
                t.released,
            )
        for name, pool in a.pools.items():
            used, of_host = pool.allocator.num_used, b.pools[name].allocator.num_used
            # sequences that shared copies have rings of their own
            assert used >= of_host if name in a.group.copy_pools else used == of_host, name
        assert [[len(c) for c in s.copies] for s in a.sequences] == [[len(c) for c in s.copies] for s in b.sequences]


def both(scheme, batch, window=None, **options):
    return PagedCache(spec_of(scheme, window), **options), PagedCache(
        spec_of(scheme, window), backend="reference", **options
    )


def run(ours, theirs, tokens, steps, start=0, limit=2e-2):
    for i in range(steps):
        layers = tokens(1)
        got, want = feed(ours, layers), feed(theirs, layers)
        assert ((got - want).norm() / want.norm()).item() < limit, (start + i, ours.decoding is not None)


SINKS = schemes.get("int4", num_sink_tokens=3, residual_length=20)
LOCAL = schemes.get("int8", token_local=True)
EIGHT, CENTRED = schemes.get("int8"), schemes.get("int8_centered")
COPIED = dataclasses.replace(
    SINKS,
    copies=(
        Copies(num_tokens=64, key=EIGHT.key, value=EIGHT.value),
        Copies(num_tokens=128, key=CENTRED.key, value=CENTRED.value),
    ),
)
"""Rings of one page and of three."""


@pytest.mark.parametrize(
    "scheme, fixed",
    [
        ("int8_centered", True),
        (COPIED, False),
        *at_night(("int4", False), ("raw", True), ("kivi4", True), (SINKS, True), (COPIED, True)),
    ],
    ids=["centred", "copies that grow", "int4", "raw", "kivi4", "sinks", "copies"],
)
def test_pages_are_those_of_the_host(scheme, fixed, gpu):
    ours, theirs = both(scheme, 3, **({"max_tokens": 400, "batch_size": 3} if fixed else {}))
    tokens = Tokens(3)
    prompt = tokens(250)
    feed(ours, prompt), feed(theirs, prompt)
    run(ours, theirs, tokens, 75)
    assert ours.decoding is not None and ours.decoding.steps_taken > 10
    assert any("attend by cuda" in op for op in ours.explain()["ops"])
    same_pages(ours, theirs)
    run(ours, theirs, tokens, 5)  # and on
    same_pages(ours, theirs)


@pytest.mark.parametrize("scheme", ["int8_centered", "kivi4", "raw"])
@pytest.mark.parametrize("head_dim, value_head_dim", [(192, 128), (128, 64), (512, 512)])
def test_heads_of_unlike_widths_and_wide_ones(scheme, head_dim, value_head_dim, gpu):
    """Over a page that closes, and taken back."""
    if scheme == "kivi4" and head_dim == 512:
        pytest.skip("its values have more groups with a bias than the kernel takes")
    fitted = schemes.get(scheme, head_dim=head_dim, value_head_dim=value_head_dim, residual_length=0)
    geometry = LayerGeometry(num_kv_heads=1, head_dim=head_dim, value_head_dim=value_head_dim)
    spec, gen = CacheSpec(scheme=fitted, layers=(geometry,)), torch.Generator().manual_seed(0)
    ours, theirs = (
        PagedCache(spec, max_tokens=200, batch_size=2),
        PagedCache(spec, max_tokens=200, batch_size=2, backend="reference"),
    )
    for count in (120, *(1,) * 12):
        q, k, v = (
            torch.randn(2, count, n, d, generator=gen).bfloat16()
            for n, d in ((2, head_dim), (1, head_dim), (1, value_head_dim))
        )
        got, want = (x.step(0, q, k, v, scaling=head_dim**-0.5) for x in (ours, theirs))
        assert got.shape == (2, count, 2, value_head_dim) and ((got - want).norm() / want.norm()).item() < 2e-2
    assert ours.decoding is not None and ours.decoding.steps_taken > 5
    for row in range(2):
        for a, b in zip(ours.dequantize(0, row), theirs.dequantize(0, row), strict=True):
            assert torch.equal(a, b)


def test_a_cache_that_is_let_go_gives_its_pages_back_at_once(gpu):
    ours, _ = both("int4", 1)
    tokens = Tokens(1)
    feed(ours, tokens(10))
    for _ in range(3):
        feed(ours, tokens(1))
    assert ours.decoding is not None
    pages = weakref.ref(ours.held_groups[0].pools["tail"].slabs[0])
    gc.disable()
    try:
        del ours
        assert pages() is None
    finally:
        gc.enable()


def test_ragged_prompts_padding_and_windows(gpu):
    ours, theirs = both("int8", 3, window=100)
    tokens = Tokens(3, 1)
    prompt, valid = tokens(150), torch.ones(3, 150, dtype=torch.bool)
    valid[0, :149], valid[1, :60] = False, False
    feed(ours, prompt, valid), feed(theirs, prompt, valid)
    run(ours, theirs, tokens, 40)
    for i in range(30):
        layers, real = tokens(1), torch.tensor([[i % 3 > 0], [True], [i % 5 > 3]])
        got, want = feed(ours, layers, real), feed(theirs, layers, real)
        assert not got[:, ~real[:, 0]].any()
        assert ((got - want).norm() / want.norm()).item() < 2e-2
    assert ours.decoding is not None
    assert ours.seq_lens == theirs.seq_lens
    same = [(s.length, s.tail_lengths) for s in ours.groups[0].sequences]
    assert same == [(s.length, s.tail_lengths) for s in theirs.groups[0].sequences]


@pytest.mark.parametrize("scheme", ["int4", COPIED], ids=["int4", "copies"])
def test_other_operations_take_the_pages_back(scheme, gpu):
    ours, theirs = both(scheme, 2)
    tokens = Tokens(2, 2)
    prompt = tokens(100)
    feed(ours, prompt), feed(theirs, prompt)
    chunk = tokens(7)
    for change in (
        lambda c: c.crop([100, 90]),
        lambda c: c.select([1, 0]),
        lambda c: c.select([0, 0]),
        lambda c: feed(c, chunk),
        lambda c: c.free(1),
    ):
        run(ours, theirs, tokens, 12)
        assert ours.decoding is not None
        change(ours), change(theirs)
        assert ours.decoding is None
        same_pages(ours, theirs)
    run(ours, theirs, tokens, 12)
    same_pages(ours, theirs)


def test_a_shared_raw_page_is_copied_before_it_is_written(gpu):
    ours, theirs = both("int8", 1)
    tokens = Tokens(1, 3)
    prompt = tokens(30)
    feed(ours, prompt), feed(theirs, prompt)
    for c in (ours, theirs):
        c.fork(0)
    tokens.batch = 2
    run(ours, theirs, tokens, 40)
    assert ours.decoding is not None
    same_pages(ours, theirs)


@pytest.mark.parametrize("scheme", ["int8", COPIED], ids=["int8", "copies"])
@pytest.mark.parametrize("reach", [0, 1])
def test_a_pass_that_fails_is_taken_back(reach, scheme, gpu):
    """At every place of a page, so also when one closes and its place is used again."""
    ours, theirs = both(scheme, 2, max_tokens=300, batch_size=2)
    tokens = Tokens(2, 4)
    prompt = tokens(100)
    feed(ours, prompt), feed(theirs, prompt)
    for _ in range(34):
        bad = tokens(1)
        for i, (q, k, v) in enumerate(bad[: 1 + reach]):
            if i < reach:
                ours.step(i, q, k, v, scaling=D**-0.5)
        if ours.in_pass:
            ours.abandon()
        run(ours, theirs, tokens, 1)
    assert ours.decoding is not None
    same_pages(ours, theirs)


def test_the_capacity_ends_where_it_did(gpu):
    ours, theirs = both("int4", 2, max_tokens=200, batch_size=2)
    tokens = Tokens(2, 5)
    prompt = tokens(180)
    feed(ours, prompt), feed(theirs, prompt)
    run(ours, theirs, tokens, 3)
    done = 0
    with pytest.raises(PoolFullError):
        for _ in range(400):
            layers = tokens(1)
            feed(theirs, layers)
            feed(ours, layers)
            done += 1
    with raises(PoolFullError, "2 sequences", "200 tokens"):
        feed(ours, layers)
    assert ours.seq_lens == theirs.seq_lens and done > 10
    same_pages(ours, theirs)
    ours.crop(50), theirs.crop(50)
    run(ours, theirs, tokens, 10)


def test_replays_are_counted_before_they_run(gpu):
    ours, _ = both("int4", 1, max_tokens=200, batch_size=1)
    with raises(CacheStateError, "capture again"):
        ours.count_replays(1)
    tokens = Tokens(1, 6)
    feed(ours, tokens(100))
    for _ in range(4):
        feed(ours, tokens(1))
    with raises(PoolFullError, "max_tokens"):
        ours.count_replays(10_000)
    left = ours.decoding.steps_left
    ours.count_replays(left)
    with pytest.raises(PoolFullError):
        ours.count_replays(1)


def test_numbers_that_cannot_be_stored_are_reported(gpu):
    ours, _ = both("int8", 1)
    tokens = Tokens(1, 7)
    feed(ours, tokens(40))
    for _ in range(4):
        feed(ours, tokens(1))
    assert ours.decoding is not None
    bad = tokens(1)
    bad[1][1][0, 0, 0, 3] = float("nan")
    gpu.setattr("kvbits.cache.inputs.require_finite", lambda *_: None)  # on a GPU single tokens are not asked
    feed(ours, bad)
    with raises(DataError, "keys", "layer 1", "NaN"):
        for _ in range(120):
            feed(ours, tokens(1))
    ours.free(0)
    ours.reset()
    feed(ours, tokens(3))


def test_replays_report_numbers_that_cannot_be_stored(gpu):
    ours, _ = both("int8", 1, max_tokens=400, batch_size=1)
    tokens = Tokens(1, 9)
    feed(ours, tokens(40))
    ours.expect_tokens()
    feed(ours, tokens(1))
    assert ours.decoding is not None and ours.max_tokens == 400
    layers = tokens(1)
    layers[1][2][0, 0, 0, 3] = float("inf")

    def replayed(layers):
        ours.count_replays(1)
        gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        feed(ours, layers)
        gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    replayed(layers)
    with raises(DataError, "values", "layer 1", "NaN"):
        for _ in range(120):
            replayed(tokens(1))
    left, taken = ours.decoding.steps_left, ours.decoding.steps_taken
    with pytest.raises(DataError):
        for _ in range(20):
            ours.count_replays(1)
    assert ours.decoding.steps_left - left == taken - ours.decoding.steps_taken
    ours.reset()
    feed(ours, tokens(3))


def test_a_copy_that_a_failed_pass_wrote_over_is_let_go(gpu):
    """A page closes, its copy takes the place of the oldest one, and the pass is taken back: the oldest page is read
    itself from there on, and everything else as before.
    """
    ours, theirs = both(COPIED, 1, max_tokens=400, batch_size=1)
    tokens = Tokens(1, 8)
    prompt = tokens(3 + 20 + 4 * 64 - 6)
    feed(ours, prompt), feed(theirs, prompt)
    run(ours, theirs, tokens, 6)
    before = [ours.dequantize(0, 0), theirs.dequantize(0, 0)]
    assert torch.equal(before[0][0], before[1][0])
    run(ours, theirs, tokens, 0)
    ours.expect_tokens()
    for _ in range(2):  # the first begins decoding on the device, the second closes a page
        layers = tokens(1)
        if ours.decoding is None:
            feed(ours, layers), feed(theirs, layers)
    assert ours.decoding is not None
    while (theirs.seq_lens[0] - 3 - 20 - 1) % 64 != 63:
        run(ours, theirs, tokens, 1)
    q, k, v = tokens(1)[0]
    ours.step(0, q, k, v, scaling=D**-0.5)
    ours.abandon()
    (s,), (t,) = (cache.groups[0].sequences for cache in (ours, theirs))
    assert s.closed_lengths == t.closed_lengths and s.length == t.length
    assert [len(c) for c in s.copies] == [len(c) - 1 for c in t.copies] == [0, 2]
    run(ours, theirs, tokens, 3)
    same_pages(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{"residual_length": 20}, *at_night({"residual_length": 0, "copies": (), "token_local": True})],
    ids=["closed", "token_local"],
)
def test_pages_of_trellis_codes_are_stored_in_the_frame_of_their_position(options, gpu):
    """Keys in a calibrated basis, turned back by where their page lies: the device says so.

    Codes are the host's but for ties of products.
    """
    scheme = schemes.get("klt3", num_sink_tokens=3, **options)
    geometry = LayerGeometry(
        num_kv_heads=HEADS,
        head_dim=D,
        rotary=Rotary(inv_freq=tuple(10_000.0 ** (-i / (D // 2)) for i in range(D // 2))),
    )
    bases = torch.randn(LAYERS, HEADS, D, D, generator=torch.Generator().manual_seed(0)) / (2 * D**0.5) + torch.eye(D)
    static = [{"k_basis": basis / steps(scheme.key, D), "k_mean": torch.randn(basis.shape[0], 2, D)} for basis in bases]
    spec = CacheSpec(scheme=scheme, layers=(geometry,) * LAYERS)
    ours, theirs = (
        PagedCache(spec, static=static, max_tokens=400, batch_size=2, **options)
        for options in ({}, {"backend": "reference"})
    )
    tokens = Tokens(2)
    prompt = tokens(200)
    feed(ours, prompt), feed(theirs, prompt)
    run(ours, theirs, tokens, 80)
    assert ours.decoding is not None and ours.decoding.steps_taken > 70
    assert ours.seq_lens == theirs.seq_lens
    for layer, row, side in itertools.product(range(LAYERS), range(2), range(2)):
        a, b = (cache.dequantize(layer, row)[side].float() for cache in (ours, theirs))
        assert ((a - b).norm() / b.norm()).item() < 2e-3, (layer, row, side)
