"""CPU attention against float64 on values decoded by hand, for every tier that this machine can run."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions, raises
from nightly import at_night
from ops import by_hand
from ops.cpu_cases import (
    CODEBOOKS,
    FORMATS,
    NOISE,
    RAW,
    TIERS,
    TILE_TIERS,
    assert_close,
    kvquant,
    kvquant_specs,
    needs_library,
    random_call,
    specs_of,
)
from random_cases import examples

from kvbits import schemes
from kvbits.errors import SpecError, UnsupportedError
from kvbits.ops.cpu import library
from kvbits.spec import PerChannel, PerGroup, PerToken, QuantSpec

pytestmark = needs_library


@pytest.mark.parametrize("fmt", [*FORMATS, "raw"])
def test_layout_documented_is_layout_read(fmt):
    """The judge decodes bytes from docs/reference/formats.md, sharing no code with packing.py."""
    for spec in [RAW] if fmt == "raw" else specs_of(fmt, group=16)[:4]:
        for head_dim, page_size in ((64, 64), (80, 32)):
            case = random_call(
                spec, spec, head_dim=head_dim, page_size=page_size, pages=2, group=1, dtype=torch.float32
            )
            assert_close(case.attend("cpu"), by_hand.attention(case), NOISE[fmt])


@pytest.mark.parametrize("head_dim, value_head_dim", [(128, 64), (40, 96), *at_night((192, 128))])
@pytest.mark.parametrize("fmt", [*FORMATS, "raw"])
def test_keys_and_values_of_unlike_widths(tier, fmt, head_dim, value_head_dim):
    """Against bytes decoded by hand; more values than channels of keys, too."""
    of_value = specs_of(fmt, group=8)[::-1] if fmt != "raw" else [RAW]
    for i, (key, value) in enumerate(zip(specs_of(fmt, group=8) if fmt != "raw" else [RAW], of_value, strict=True)):
        young = [dataclasses.replace(x, format="int8") for x in (key, value)] if fmt == "int4" and i % 2 else None
        call = {
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
            "group": 5,
            "tokens": 1 + i % 2 * 20,
            "pages": 3 + i % 2 * 4,
        }
        case = random_call(key, value, **call, young=young)
        assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])
        if i == 0:
            assert_close(case.exact(), by_hand.attention(case), 1e-12)


@pytest.mark.parametrize("name", ["klt4", "klt2"])
def test_banded_pages_of_unlike_widths(tier, name):
    """Keys in a basis of their own width, values in the Hadamard basis of theirs."""
    for head_dim, value_head_dim in ((192, 128), (128, 64)):
        scheme = schemes.get(name, head_dim=head_dim, value_head_dim=value_head_dim)
        case = random_call(
            scheme.key, scheme.value, head_dim=head_dim, value_head_dim=value_head_dim, group=4, tokens=2, pages=5
        )
        assert_close(case.attend("cpu"), case.exact(), NOISE["trellis"])


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_granularity(tier, fmt):
    for spec in specs_of(fmt):
        for head_dim, group in ((128, 4), (96, 7)):
            case = random_call(spec, spec, head_dim=head_dim, group=group)
            assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_raw_pages_and_query_dtypes(tier, dtype):
    for head_dim in (8, 40, 64, 128):
        case = random_call(RAW, RAW, head_dim=head_dim, dtype=dtype, group=5, tokens=2)
        assert_close(case.attend("cpu"), case.exact(), NOISE["raw"])


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_long_raw_parts(tier, head_dim):
    """From a few pages on, raw bf16 pages are read with even and odd channels apart, beside parts that are not."""
    for key, value in (
        (RAW, RAW),
        (RAW, QuantSpec(format="int8", granularity=PerToken())),
        (QuantSpec(format="int8", granularity=PerToken()), RAW),
    ):
        for tokens in (1, 20):
            case = random_call(key, value, head_dim=head_dim, group=5, pages=7, tokens=tokens)
            assert_close(case.attend("cpu"), case.exact(), max(NOISE[key.format], NOISE[value.format]))


@pytest.mark.literature
@pytest.mark.parametrize("fmt", [*CODEBOOKS, "int8", "int3"])
def test_kvquant_pages_are_unpacked_by_the_reference(fmt):
    """Codebooks, outliers and keys before the rotary embedding, also at positions at which angles in float32 would be
    off by 0.008 radians: as precise as float32, and refused by name where the kernels are asked for.
    """
    specs = [(x, x) for x in kvquant_specs(fmt)] + [
        (dataclasses.replace(x, pre_rope=True), RAW) for x in specs_of("int4")
    ]
    if fmt in CODEBOOKS:
        specs += [kvquant(fmt, outliers, static) for outliers, static in ((0.0, False), (0.01, False), (0.01, True))]
    for i, (key, value) in enumerate(specs):
        case = random_call(
            key, value, head_dim=(64, 96, 128)[i % 3], group=5, tokens=1 + i % 3, first=(0, 131_000)[i % 2]
        )
        choice = case.plan().choice
        assert choice.backend == "reference" and mentions(choice.refusals["cpu"], "codebooks", "outliers")
        assert_close(case.attend(), case.exact(), 1e-5)
        with raises(SpecError, "codebooks", "outliers", "backend='auto'"):
            case.attend("cpu")


def test_key_and_value_formats_are_independent(tier):
    kivi_key = QuantSpec(format="int2", granularity=PerChannel(), symmetric=False)
    for key, value in (("int8", "int4"), ("fp8_e5m2", "fp8_e4m3"), ("int3", "int8")):
        case = random_call(
            QuantSpec(format=key, granularity=PerToken()), QuantSpec(format=value, granularity=PerGroup(16))
        )
        assert_close(case.attend("cpu"), case.exact(), 2e-2)
    for key, value in (
        (kivi_key, QuantSpec(format="int2", granularity=PerToken(), symmetric=False)),
        (RAW, QuantSpec(format="int4")),
        (kivi_key, RAW),
    ):
        case = random_call(key, value, head_dim=128)
        assert_close(case.attend("cpu"), case.exact(), 2e-2)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 80, 96, 128, 256, 512])
def test_head_dims(tier, head_dim):
    for fmt in ("int8", "int4", "int3", "int2", "fp8_e4m3"):
        for spec in (
            QuantSpec(format=fmt, granularity=PerToken(), symmetric=fmt.startswith("fp8")),
            QuantSpec(format=fmt, granularity=PerChannel()),
        ):
            case = random_call(spec, spec, head_dim=head_dim, heads=1, group=2, pages=2, page_size=32)
            assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


@pytest.mark.parametrize("size", [4, 8, 12, 16, 48])
def test_groups_that_do_not_line_up_with_blocks(tier, size):
    for fmt in ("int8", "int4", "int3", "int2", "fp8_e4m3"):
        spec = QuantSpec(format=fmt, granularity=PerGroup(size), symmetric=fmt.startswith("fp8"))
        case = random_call(spec, spec, head_dim=96, group=3, pages=2, page_size=32)
        assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


@pytest.mark.parametrize("group", range(1, 17))
def test_query_groups(tier, group):
    for fmt in ("int8", "int4", "fp8_e4m3", "raw"):
        spec = RAW if fmt == "raw" else QuantSpec(format=fmt, granularity=PerGroup(32))
        case = random_call(spec, spec, heads=1, group=group, batch=1)
        assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


@pytest.mark.parametrize("page_size", [32, 96, 128, 160, 256])
def test_page_sizes(tier, page_size):
    for fmt in ("int8", "int4", "int3", "fp8_e4m3", "raw"):
        for spec in [RAW] if fmt == "raw" else [QuantSpec(format=fmt), QuantSpec(format=fmt, granularity=PerChannel())]:
            case = random_call(spec, spec, page_size=page_size, pages=2, sinks=1)
            assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


@pytest.mark.parametrize("window, softcap", [(1, None), (70, None), (None, 15.0), (130, 30.0), (10_000, None)])
def test_window_and_softcap(tier, window, softcap):
    for fmt in ("int8", "int4", "fp8_e4m3", "raw"):
        spec = RAW if fmt == "raw" else QuantSpec(format=fmt)
        for tokens in (1, 9):
            case = random_call(spec, spec, tokens=tokens, window=window, softcap=softcap)
            assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


@pytest.mark.parametrize("fmt", ["int8", "int4", "int2", "fp8_e4m3", "raw"])
def test_prefill_block(tier_of_chunks, fmt):
    """More rows than one item holds; the queries are newer than part of the keys, so causality bites."""
    for spec in (
        [RAW]
        if fmt == "raw"
        else [QuantSpec(format=fmt), QuantSpec(format=fmt, granularity=PerChannel(), symmetric=fmt.startswith("fp8"))]
    ):
        case = random_call(spec, spec, tokens=83, group=3, pages=4)
        assert_close(case.attend("cpu"), case.exact(), NOISE[fmt])


def test_splits_merge(tier):
    """One long sequence on one kv head: several items whose partial results are merged."""
    spec = QuantSpec(format="int8")
    case = random_call(spec, spec, heads=1, group=2, batch=1, pages=70)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_close(case.attend("cpu"), case.exact(), NOISE["int8"])
    finally:
        torch.set_num_threads(before)


def test_large_values_in_one_page_only(tier):
    """A page whose scores dwarf the others' and a page whose values do: maxima and scales move between blocks."""
    spec = QuantSpec(format="int8", scale_dtype="float32")
    case = random_call(spec, spec, head_dim=64, batch=1, pages=6, dtype=torch.float32)
    case.q *= 30
    assert_close(case.attend("cpu"), case.exact(), 2e-3)


@pytest.mark.parametrize("flat", [0.0, 2.0**-6])
@pytest.mark.parametrize(
    "preset",
    ["int8", "int8_asym", "int8_centered", "int8_per_channel", "int4", "int4_centered", "kivi4", "kivi2"],
)
def test_groups_without_spread_cost_the_others_nothing(tier, preset, flat):
    """Weights are rounded against the largest weight times scale of a page, queries against the largest query times
    scale.
    """
    scheme = schemes.get(preset)
    for asymmetric in (False, True):
        key, value = (
            dataclasses.replace(s, symmetric=s.symmetric and not asymmetric, scale_dtype=t)
            for s, t in ((scheme.key, "bfloat16"), (scheme.value, "float16"))
        )
        case = random_call(key, value, head_dim=128, pages=4, flat=flat)
        assert_close(case.attend("cpu"), case.exact(), NOISE[key.format])


def test_same_bits_every_time_for_a_thread_count(tier):
    """The result does not depend on which thread runs which item."""
    case = random_call(QuantSpec(format="int4"), QuantSpec(format="int4"), pages=40, batch=3)
    want = case.exact()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs = [case.attend("cpu") for _ in range(5)]
            assert all(torch.equal(a, outs[0][0]) and torch.equal(b, outs[0][1]) for a, b in outs)
            assert_close(outs[0], want, NOISE["int4"])
    finally:
        torch.set_num_threads(before)


def test_threads_shared_with_torch_give_the_same_bits():
    case = random_call(QuantSpec(format="int8"), QuantSpec(format="int8"), pages=40, batch=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        want, x = case.attend("cpu"), torch.randn(512, 512)
        for _ in range(5):
            x = x @ x.T / 512
            assert all(torch.equal(a, b) for a, b in zip(case.attend("cpu"), want, strict=True))
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_python_threads():
    cases = [random_call(QuantSpec(format="int8"), QuantSpec(format="int8"), seed=i, pages=8) for i in range(4)]
    want = [c.attend("cpu") for c in cases]
    got = [[] for _ in cases]

    def work(i: int) -> None:
        for _ in range(20):
            got[i].append(cases[i].attend("cpu"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(out, w[0]) for outs, w in zip(got, want, strict=True) for out, _ in outs)


def test_flush_denormal_does_not_lose_fp8_subnormals():
    case = random_call(QuantSpec(format="fp8_e4m3", granularity=PerChannel()), QuantSpec(format="fp8_e4m3"))
    want = case.attend("cpu")
    torch.set_flush_denormal(True)
    try:
        got = case.attend("cpu")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got[0], want[0])


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("before", ["case.attend()", "library.tier(); torch.randn(512, 512) @ torch.randn(512, 512)"])
def test_works_after_fork(before):
    """A forked child has none of its parent's threads, whether these ran the library's calls or torch's alone: it works
    on its own one, also where the library is asked to share OpenMP's again, and gives the same bits.
    """
    done = run_python(
        "import os, torch\n"
        "torch.set_num_threads(2)\n"
        "from kvbits.ops.cpu import library\n"
        "from kvbits.spec import QuantSpec\n"
        "from ops.cpu_cases import random_call\n"
        "case = random_call(QuantSpec(format='int8'), QuantSpec(format='int8'), pages=20)\n"
        f"{before}\n"
        "out, into = os.pipe()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    library.library().kvbits_use_openmp(library.openmp_parallel())\n"
        "    os.write(into, case.attend()[0].numpy().tobytes())\n"
        "    os._exit(0)\n"
        "want = case.attend()[0].numpy().tobytes()\n"
        "assert os.read(out, len(want)) == want\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "known"),
    [
        ("TIER", "sse9", ("amx", "avx512", "avx2", "neon", "generic", "amx_emulated")),
        ("TIER", "avx2" if platform.machine() == "aarch64" else "neon", ("amx", "avx512", "avx2", "neon", "generic")),
        ("LIBRARY", "/none.so", ()),
    ],
)
def test_variables_that_cannot_be_had_are_errors(variable, value, known):
    """Not a cache that runs on the reference; the package is imported all the same, and `kvbits info` says why."""
    code = (
        "import torch\nfrom kvbits import cli, schemes\nfrom kvbits.cache.paged_cache import PagedCache\nfrom"
        " kvbits.cli.info import _found\nfrom kvbits.errors import UnsupportedError\nfrom kvbits.spec import CacheSpec,"
        " LayerGeometry\nprint(_found()['cpu_kernels'])\ncache = PagedCache(CacheSpec(scheme=schemes.get('int8'),"
        " layers=(LayerGeometry(num_kv_heads=1, head_dim=64),), raw_dtype='float32'))\nx = torch.randn(1, 70, 1,"
        " 64)\ntry: cache.step(0, x, x, x, scaling=0.125)\nexcept UnsupportedError as error: print(error)\n"
    )
    name = f"KVBITS_CPU_{variable}"
    done = run_python(code, **{name: value})
    info, raised = done.stdout.splitlines()
    assert info == f"none: {raised}" and mentions(raised, f"{name}={value!r}", *known, f"unset {name}"), done


def test_tiers_that_there_are_not_are_not_switched_to():
    with raises(UnsupportedError, "sse9", "avx2", "generic"):
        library.set_tier("sse9")


def test_forced_tier_is_used():
    assert (
        run_python(
            "from kvbits.ops.cpu import library; print(library.tier())", KVBITS_CPU_TIER="generic"
        ).stdout.strip()
        == "generic"
    )


def test_nothing_visible_is_zero(tier):
    case = random_call(QuantSpec(format="int8"), QuantSpec(format="int8"))
    for empty in (dataclasses.replace(t, tokens=torch.zeros_like(t.tokens)) for t in case.tables[:1]):
        out, lse = dataclasses.replace(case.part(0), tables=[empty]).attend("cpu")
        assert not out.any() and torch.isneginf(lse).all()


def test_strided_queries(tier):
    case = random_call(QuantSpec(format="int8"), QuantSpec(format="int8"), tokens=4)
    want = case.attend("cpu")[0]
    for axes in ((1, 2), (2, 3)):
        spread = dataclasses.replace(case, q=case.q.transpose(*axes).contiguous().transpose(*axes))
        assert torch.equal(spread.attend("cpu")[0], want)


def test_refusals_name_the_reason():
    case = random_call(QuantSpec(format="int8"), QuantSpec(format="int8"))
    assert case.plan().choice.backend == "cpu"
    assert "float64" in case.plan(dtype=torch.float64).choice.refusals["cpu"]
    with raises(UnsupportedError, "cpu: pages are on cuda"):
        case.plan(device="cuda")
    case = random_call(QuantSpec(format="int8", granularity=PerGroup(2)), QuantSpec(format="int8"))
    assert "groups of 2 channels" in case.plan().choice.refusals["cpu"]


def served_by(case, tier: str) -> bool:
    plan = case.plan()
    plan.bind(0, case.stores)
    return plan.explain() == f"attend by cpu ({tier})"


@examples(60)
@given(data=st.data())
def test_random_combinations(data):
    """Any key format with any value format, shape and option, on every tier that this machine can run."""
    draw = data.draw
    head_dim = draw(st.sampled_from([16, 64, 80, 96, 128]))
    known = [
        RAW,
        *(s for f in FORMATS for s in specs_of(f, group=16)),
    ]
    key, value = (draw(st.sampled_from(known)) for _ in range(2))
    case = random_call(
        key,
        value,
        head_dim=head_dim,
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.sampled_from([1, 1, 2, 5, 17])),
        page_size=draw(st.sampled_from([32, 64, 96])),
        pages=draw(st.integers(1, 4)),
        sinks=draw(st.sampled_from([0, 1, 4])),
        window=draw(st.sampled_from([None, None, 40, 150])),
        softcap=draw(st.sampled_from([None, None, 20.0])),
        seed=draw(st.integers(0, 1000)),
        spans=draw(st.booleans()),
        offset=draw(st.integers(0, 2)),
    )
    before, want = library.tier(), case.exact()
    try:
        for tier in TIERS:
            library.set_tier(tier)
            if tier in TILE_TIERS and not served_by(case, tier):
                continue  # by the kernels of another tier
            assert_close(case.attend("cpu"), want, max(NOISE[key.format], NOISE[value.format]))
    finally:
        library.set_tier(before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["raw", "int8", "int4", "int8_centered", "kivi4", "fp8"])
def test_a_query_that_is_not_finite_answers_nan_where_it_sees_a_token(tier, name, bad):
    scheme = schemes.get(name, head_dim=72)
    # 40 pages: several items whose results are merged
    for dtype, pages, threads in ((torch.float32, 3, 1), (torch.bfloat16, 40, 4)):
        case = random_call(scheme.key, scheme.value, head_dim=72, batch=2, tokens=2, pages=pages, dtype=dtype)
        case.q[0, 1, 2, 70] = bad
        case.q[1, 0, 1, 0] = bad
        case.positions[1, 0] = -1  # padding may hold anything
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            got = case.attend("cpu")
        finally:
            torch.set_num_threads(before)
        want = case.exact()
        for x, y in zip(got, want, strict=True):
            assert (
                torch.equal(x.isnan(), y.isnan()) and y[0, 1, 2].isnan().all() and y.isnan().sum() == y[0, 1, 2].numel()
            )
        assert not got[0][1, 0].any() and (got[1][1, 0] == -torch.inf).all()
