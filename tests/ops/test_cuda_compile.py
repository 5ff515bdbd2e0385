"""Every CUDA kernel compiles for every architecture and keeps its values in registers. Needs NVRTC, no GPU.

By default a representative set; `make kernels` (KVBITS_TEST_ALL_KERNELS=1) compiles all instantiations, those of every
preset among them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import pytest
import torch
from messages import mentions, raises

import kvbits
from kvbits import schemes
from kvbits.errors import SpecError
from kvbits.integrations.engine.place import cuda as place
from kvbits.ops.cuda import ahead, decode, merge
from kvbits.ops.cuda import store as store_cuda
from kvbits.ops.cuda.engine import kernels, work_list
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.engine.runtime import driver
from kvbits.ops.cuda.engine.runtime.compile import Source
from kvbits.ops.cuda.engine.shape import WIDE, Ask
from kvbits.ops.cuda.families import family_of
from kvbits.ops.cuda.families.klt import store as store_banded
from kvbits.ops.cuda.families.klt import unpack as dequantize_banded
from kvbits.ops.cuda.families.plain import close as close_cuda
from kvbits.ops.cuda.families.plain import store as store_plain
from kvbits.ops.cuda.families.plain import unpack as dequantize_cuda
from kvbits.ops.cuda.families.raw import store as store_raw
from kvbits.spec import CacheSpec, LayerGeometry, PageLayout, PerChannel, PerGroup, PerToken, QuantSpec

pytestmark = pytest.mark.skipif(cuda_compile.missing() is not None, reason=f"{cuda_compile.missing()}")
SOURCES = {p.name: p.parent for p in Path(kvbits.__file__).parent.rglob("*.cu")}
KLT = schemes.get("klt3")
ALL = bool(os.environ.get("KVBITS_TEST_ALL_KERNELS"))
CAPABILITIES = ((8, 0), (8, 9), (9, 0))


def spec(fmt: str, granularity=PerGroup(64), **options) -> QuantSpec:  # noqa: B008
    return QuantSpec(format=fmt, granularity=granularity, **options)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBITS_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


def compiled(name, defines, capability):
    source = Source(SOURCES[name], name, defines)
    return cuda_compile.compile_source(source, source.arch(capability))


def layout_of(key, value, head_dim=128, page_size=64, **_):
    return PageLayout(key=key, value=value, page_size=page_size, num_kv_heads=8, head_dim=head_dim)


def attend_kernel(key, value, capability, head_dim=128, columns=8, page_size=64, **options):
    layout = layout_of(key, value, head_dim, page_size)
    cols = family_of(layout).columns(layout, columns)
    return kernel_for(layout, cols, driver.shared_limit(capability), **options)


def kernel_for(layout, cols, limit, softcap=False, **options):
    return kernels.kernel_for(layout, Ask(layout.head_dim, cols, "bfloat16", "bfloat16", softcap, limit, **options))


def refuses(layout, limit=None, **options):
    return family_of(layout).refuses("attend", layout, shared_limit=limit, **options)


def variants():
    """(key, value, options) of attention kernels: each format, granularity, head size and option at least once."""
    raw = QuantSpec.raw()
    few = [
        (spec("int8"), spec("int8"), {}),
        (spec("int4"), spec("int4"), {}),
        (spec("int2"), spec("int2"), {}),
        (spec("fp8_e4m3"), spec("fp8_e4m3"), {}),
        (spec("int2", PerChannel(), symmetric=False), spec("int2", symmetric=False), {}),
        (raw, raw, {}),
        (spec("int4"), spec("int4"), {"columns": 64}),
        (spec("int2", PerGroup(32)), spec("int2", PerGroup(32)), {}),
        (spec("int3"), spec("int3"), {}),
        (spec("int3", PerToken()), spec("int3", PerToken()), {"head_dim": 80}),
    ]
    if not ALL:
        return few
    formats = ("int8", "int4", "int3", "int2", "fp8_e4m3", "fp8_e5m2")
    many = [
        (spec(f, g), spec(f, g), {})
        for f, g in itertools.product(formats, (PerGroup(64), PerGroup(32), PerToken(), PerChannel()))
    ]
    for f in formats[:4]:
        many += [
            (spec(f, PerChannel(), symmetric=False), spec(f, g, symmetric=False), {})
            for g in (PerToken(), PerGroup(64), PerChannel())
        ]
        many += [
            (spec(f, center="channel"), spec(f), {}),
            (spec(f, static=True), spec(f, PerChannel(), static=True), {}),
        ]
        many += [
            (spec(f), spec(f), options)
            for options in ({"softcap": True}, {"columns": 16}, {"columns": 64}, {"page_size": 256}, {"page_size": 32})
        ]
        many += [(spec(f, PerToken()), spec(f, PerToken()), {"head_dim": d}) for d in (64, 80, 96, 256)]
    return [(k, v, o) for k, v, o in few + many if refuses(layout_of(k, v, **o)) is None]


@pytest.mark.night
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(
    "key, value, options", variants(), ids=lambda x: x.format if isinstance(x, QuantSpec) else str(x)
)
def test_attention_kernels_spill_no_more_than_stated(key, value, options, capability, spilt):
    if not ALL and capability < (9, 0) and key.format != "int4":
        pytest.skip("one format before Hopper by default")
    kernel = attend_kernel(key, value, capability, **options)
    assert kernel.shared_bytes <= driver.shared_limit(capability)
    binary = compiled(kernel.source.name, dict(kernel.defines), capability)
    resources = binary.resources("attend")
    # At head_dim 256 and with two column tiles all 255 registers are taken and ptxas keeps a few values of a segment's
    # set-up in local memory, with three (chunks) some of a step's too.
    few = (
        320
        if options.get("columns") == 64
        else 96
        if options.get("head_dim") == 256 or (options.get("columns") == 16 and capability < (9, 0))
        else 0
    )
    spilt("attend", resources.spill_bytes, few)
    warps = kernel.threads // 32
    assert -(-warps // 4) * 32 * -(-resources.registers // 8) * 8 <= 16384, "a quarter of a multiprocessor's registers"


WIDTHS = {(192, 128): 0, (128, 64): 0, (512, 512): 1536}
"""Widths of keys and values, and bytes that attention keeps in local memory: 512 channels of results take half of a
thread's registers.
"""


@pytest.mark.night
@pytest.mark.parametrize("capability", ((8, 0), (9, 0)), ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("head_dim, value_head_dim", WIDTHS)
@pytest.mark.parametrize("scheme", ["raw", "int8_centered", "int4", "kivi4"])
def test_kernels_of_unlike_widths_and_wide_heads_compile(scheme, head_dim, value_head_dim, capability, spilt):
    if not ALL and (scheme in ("int4", "kivi4") or capability < (9, 0)):
        pytest.skip("raw and 8-bit pages by default, on the larger architecture")
    try:
        made = schemes.get(scheme, head_dim=head_dim, value_head_dim=value_head_dim)
        layout = dataclasses.replace(layout_of(made.key, made.value, head_dim), value_head_dim=value_head_dim)
    except SpecError as why:
        pytest.skip(str(why))
    if why := refuses(layout):
        pytest.skip(why)
    limit = driver.shared_limit(capability)
    ask = Ask(
        head_dim,
        family_of(layout).columns(layout, 8),
        "bfloat16",
        "bfloat16",
        False,
        limit,
        raw=scheme != "raw",
        value_head_dim=value_head_dim,
    )
    kernel = kernels.kernel_for(layout, ask)
    assert kernel.shared_bytes <= limit
    spilt(
        "attend",
        compiled(kernel.source.name, dict(kernel.defines), capability).resources("attend").spill_bytes,
        WIDTHS[head_dim, value_head_dim],
    )
    for appends in (False, True):
        assert close_cuda.refuses_layout(layout, torch.bfloat16) is None
        macros = close_cuda.defines(layout, torch.bfloat16, appends)
        assert int(macros["SHARED_BYTES"]) <= limit
        assert compiled("close.cu", macros, capability).resources("close_pages").spill_bytes == 0


@pytest.fixture
def spilt(record_property):
    """spilt(kernel, nbytes, most): bytes that a kernel keeps in local memory are at most what is stated; the run's
    summary prints them (tests/conftest.py).
    """

    def check(kernel: str, nbytes: int, most: int) -> None:
        record_property("spilt", (kernel, nbytes, most))
        assert nbytes <= most, f"{kernel} spills {nbytes} bytes, {most} are stated"

    return check


def joined():
    """(key, value, options) of attention kernels that add raw tokens to the outputs of packed ones."""
    int4, int2 = (spec(f, PerGroup(32), symmetric=False) for f in ("int4", "int2"))
    few = [
        (spec("int8", center="channel"), spec("int8"), {}),
        (spec("int4", PerGroup(32)), spec("int4", PerGroup(32)), {}),
        (spec("int2", PerChannel(), symmetric=False), spec("int2", symmetric=False), {}),
        (spec("int2", PerChannel(), symmetric=False), int2, {"page_size": 32}),
    ]
    if not ALL:
        return few
    many = [
        (spec(f), spec(f), o)
        for f in ("int8", "int4", "int2")
        for o in ({}, {"softcap": True}, {"columns": 16}, {"columns": 64, "head_dim": 64})
    ]
    many += [
        (spec(f, PerToken()), spec(f, PerToken()), {"head_dim": d})
        for f in ("int8", "int4", "int2", "fp8_e4m3")
        for d in (64, 80, 96, 128, 256)
    ]
    many += [
        (spec(k, PerChannel(), symmetric=False), v, {"page_size": n})
        for k, v in (("int4", int4), ("int2", int2))
        for n in (32, 64)
    ]
    return [
        *few,
        *many,
        (dataclasses.replace(int4, center="channel"), int4, {}),
        (spec("int8", PerGroup(32)), spec("int4", PerGroup(32)), {}),
    ]


@pytest.mark.night
@pytest.mark.parametrize("capability", CAPABILITIES[::2], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(
    "key, value, options", joined(), ids=lambda x: x.format if isinstance(x, QuantSpec) else str(x)
)
def test_kernels_that_join_raw_tokens_spill_no_more_than_stated(key, value, options, capability, spilt):
    if not ALL and capability < (9, 0) and key.format != "int2":
        pytest.skip("the fullest registers by default")
    packed, kernel = (attend_kernel(key, value, capability, raw=raw, **options) for raw in (False, True))
    assert kernel.raw_joins and not packed.raw_joins
    assert kernel.shape.warps == packed.shape.warps and kernel.shared_bytes <= driver.shared_limit(capability)
    if options.get("page_size") != 32:
        assert kernel.shape == packed.shape, "a few raw tokens take a slot no larger than a packed chunk's"
    values = dict(kernel.defines)
    assert 4 * values["HEAD_DIM"] * kernel.raw_tokens <= values["SLOT_BYTES"]
    resources = compiled(kernel.source.name, values, capability).resources("attend")
    # Where all 255 registers are taken, a few values of a segment's set-up: head_dim 256 (also without raw tokens) and
    # three column tiles. At 2 bits raw tokens come in steps of 8, and what they share with packed steps does not all
    # fit (docs/results/log/gpu-kernels.md: within 1 % on an H200).
    full = options.get("head_dim") == 256 or options.get("columns") == 64
    spilt("attend", resources.spill_bytes, 32 if full else 16 if key.format == value.format == "int2" else 0)
    assert -(-kernel.threads // 32 // 4) * 32 * -(-resources.registers // 8) * 8 <= 16384, (
        "a quarter of a multiprocessor's registers"
    )


@pytest.mark.parametrize(
    "key, value, cols, joins",
    [
        (spec("int4"), spec("int4"), 8, True),
        (spec("int3"), spec("int4"), 8, True),
        (spec("int4"), spec("int3"), 8, True),
        (spec("int4"), spec("int4", PerChannel()), 8, False),
        (spec("int4", PerChannel(), static=True), spec("int4"), 8, False),
        (spec("int4"), spec("int4", static=True), 8, False),
        (spec("int4"), spec("int4"), WIDE, False),
        (schemes.get("nuq4").key, schemes.get("nuq4").value, 8, False),
    ],
)
def test_which_kernels_join_raw_tokens(key, value, cols, joins):
    kernel = kernel_for(layout_of(key, value), cols, driver.shared_limit((9, 0)), raw=True)
    assert kernel.raw_joins == kernel.raw_in_ring == joins
    assert dict(kernel.defines)["HAS_RAW"] == joins


@pytest.mark.night
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", [f"nuq{bits}{listed}" for bits in (4, 3, 2) for listed in ("-1%", "")])
@pytest.mark.parametrize("fold", [True, False], ids=["four columns", "eight columns"])
def test_look_up_kernels_spill_no_more_than_stated(fold, name, head_dim, capability, spilt):
    few = (
        ("nuq4-1%", 128, (9, 0), True),
        ("nuq4", 128, (9, 0), False),
        ("nuq3", 64, (8, 0), False),
        ("nuq2-1%", 128, (8, 9), True),
    )
    if not ALL and (name, head_dim, capability, fold) not in few:
        pytest.skip("four by default")
    scheme = schemes.get(name)
    limit = driver.shared_limit(capability)
    if why := refuses(layout_of(scheme.key, scheme.value, head_dim), limit):
        assert capability == (8, 9) and scheme.key.bits == 4 and "shared memory" in why, why
        return
    kernel = attend_kernel(scheme.key, scheme.value, capability, head_dim, fold=fold)
    assert kernel.shared_bytes <= limit
    binary = compiled(kernel.source.name, dict(kernel.defines), capability)
    resources = binary.resources("attend")
    # All 168 registers are taken; ptxas keeps a few values of the kernel's set-up in local memory (18 in the worst,
    # nuq2-1%).
    spilt("attend", resources.spill_bytes, 80)
    assert -(-kernel.threads // 32 // 4) * 32 * -(-resources.registers // 8) * 8 <= 16384, (
        "a quarter of a multiprocessor's registers"
    )


@pytest.mark.parametrize("capability", CAPABILITIES[:: 1 if ALL else 2], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_close_kernels_compile_without_spills(dtype, capability):
    for key, value in (
        (spec("int4"), spec("int8")),
        (spec("int3", PerChannel(), symmetric=False), spec("int2", center="channel")),
    ):
        layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=8, head_dim=128)
        binary = compiled("close.cu", close_cuda.defines(layout, dtype), capability)
        assert binary.resources("close_pages").spill_bytes == 0


@pytest.mark.night
@pytest.mark.parametrize("tokens", [None, store_banded.FEW, 64])
def test_the_kernel_that_stores_banded_codes_compiles_before_hopper(tokens):
    klt = schemes.get("klt2")
    resources = compiled(
        "store_banded.cu", store_banded.defines(layout_of(klt.key, klt.value), torch.bfloat16, tokens=tokens), (8, 0)
    ).resources("store_banded")
    assert resources.spill_bytes <= (0 if tokens == store_banded.FEW else 160)


@pytest.mark.night
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(
    "key, value, head_dim, dtype",
    [
        (spec("int8"), spec("int8"), 128, torch.bfloat16),
        (spec("int8", center="channel"), spec("int4", PerGroup(32), symmetric=False), 128, torch.bfloat16),
        (
            spec("int3", PerGroup(32), symmetric=False, center="channel"),
            spec("int2", PerToken(), center="channel"),
            256,
            torch.float32,
        ),
        (spec("fp8_e4m3", PerToken(), center="channel"), spec("fp8_e5m2", PerToken()), 80, torch.float16),
        (spec("int4", PerChannel(), static=True), spec("int8", static=True, symmetric=False), 128, torch.bfloat16),
        (QuantSpec.raw(), spec("int4"), 64, torch.bfloat16),
        (spec("int8", center="channel"), spec("int8"), 512, torch.bfloat16),
        (spec("int4", PerToken(), symmetric=False, center="channel"), spec("int4", PerGroup(32)), 512, torch.float32),
        (spec("int4", PerGroup(32)), spec("int4", PerGroup(32)), 512, torch.bfloat16),
    ],
    ids=[
        "int8",
        "centred",
        "wide",
        "fp8",
        "static",
        "raw",
        "two warps, centred",
        "two warps, joined",
        "two warps, int4",
    ],
)
def test_the_kernel_for_single_tokens_compiles_without_spills(key, value, head_dim, dtype, capability):
    layout = layout_of(key, value, head_dim)
    if not ALL and capability == (8, 0) and not key.center:
        pytest.skip("centred keys, which take the most registers, before Hopper by default")
    if why := store_cuda.refuses_layout(layout, capability):
        assert "fp8" in why
        return
    for tokens in (store_plain.FEW, store_plain.tokens_of_prompts(layout, dtype)):
        defines = store_plain.defines(layout, dtype, tokens)
        assert int(defines["SHARED_BYTES"]) <= driver.shared_limit(capability)
        resources = compiled("store_tokens.cu", defines, capability).resources("store_tokens")
        assert resources.spill_bytes == 0, resources
        if not layout.is_centered:
            assert resources.registers <= 64, resources


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_kernel_for_raw_tokens_compiles_without_spills(capability):
    resources = compiled("store_raw.cu", store_raw.source().macros, capability).resources("store_raw")
    assert resources.spill_bytes == 0 and resources.registers <= 40, resources


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "key, value",
    [
        (spec("int4"), spec("int3", symmetric=False)),
        (spec("fp8_e4m3", PerChannel()), spec("int2", center="channel")),
        (schemes.get("nuq3-1%").key, schemes.get("nuq4-1%").value),
    ],
    ids=["int", "fp8", "nuq"],
)
def test_dequantize_kernels_compile_without_spills(key, value, dtype):
    layout = PageLayout(key=key, value=value, page_size=64, num_kv_heads=8, head_dim=128)
    binary = compiled("dequantize.cu", dequantize_cuda.defines(layout, dtype), (8, 0))
    assert binary.resources("dequantize_pages").spill_bytes == 0


def test_a_binary_is_compiled_once_and_then_read_from_disk(monkeypatch):
    args = (merge.source(64, torch.float16), "sm_90")
    first = cuda_compile.compile_source(*args)
    monkeypatch.setattr(cuda_compile, "_compile", lambda *a: pytest.fail("compiled again"))
    assert cuda_compile.compile_source(*args) == first


def test_a_source_that_does_not_compile_says_why(tmp_path):
    (tmp_path / "broken.cu").write_text("this is no C++;")
    with raises(cuda_compile.KernelError, "broken.cu", "error"):
        cuda_compile.compile_source(Source(tmp_path, "broken.cu", {}), "sm_80")


@pytest.mark.parametrize(
    "layout, parts",
    [
        (dict(key=spec("int8"), value=spec("int8"), head_dim=576), ("head_dim=576", 512)),
        (dict(key=QuantSpec.raw(), value=spec("int8"), head_dim=128), ("raw",)),
        (dict(key=spec("int3", PerChannel()), value=spec("int3", PerChannel()), head_dim=80), ("registers",)),
        (dict(key=spec("int4", PerToken()), value=spec("int3", PerToken()), head_dim=208), (128,)),
        (dict(key=spec("int4", PerGroup(16)), value=spec("int4", PerToken()), head_dim=80), ("16 channels",)),
        (dict(key=spec("int8"), value=spec("int8", PerGroup(16)), head_dim=128), ("16 channels",)),
        (dict(key=QuantSpec.raw(), value=QuantSpec.raw(), head_dim=128, raw_dtype="float32"), ("float32",)),
        (
            dict(key=KLT.key, value=KLT.value, head_dim=80),
            ("trellis", "head_dim=80", 64, 128, 256),
        ),
        (dict(key=KLT.key, value=spec("int4"), head_dim=64), ("trellis", "int4")),
        (
            dict(key=dataclasses.replace(KLT.key, basis="hadamard", center=None), value=KLT.value, head_dim=64),
            ("trellis keys", "basis='hadamard'"),
        ),
        (
            dict(key=KLT.key, value=dataclasses.replace(KLT.value, bands=(6, 6, 6, 6)), head_dim=64),
            ("trellis values", "6 bits"),
        ),
    ],
)
def test_refusals_say_what_is_in_the_way(layout, parts):
    assert mentions(refuses(PageLayout(page_size=64, num_kv_heads=2, **layout)), *parts)


# -- every source, every preset -------------------------------------------------------------------------------------


def examples():
    """Source -> macros of one instantiation."""
    raw = layout_of(QuantSpec.raw(), QuantSpec.raw())
    int8, nuq, klt = (
        layout_of(spec("int8"), spec("int8")),
        *(layout_of(s.key, s.value) for s in map(schemes.get, ("nuq4-1%", "klt4"))),
    )
    attention = [attend_kernel(x.key, x.value, (9, 0)) for x in (raw, int8, nuq, klt)]
    older = schemes.get("klt2")
    attention.append(attend_kernel(older.key, older.value, (9, 0), beside=klt))
    return {kernel.source.name: dict(kernel.defines) for kernel in attention} | {
        "advance.cu": {"THREADS": decode.THREADS},
        "close.cu": close_cuda.defines(int8, torch.bfloat16),
        "store_banded.cu": store_banded.defines(
            layout_of(schemes.get("klt3").key, schemes.get("klt3").value), torch.bfloat16
        ),
        "dequantize.cu": dequantize_cuda.defines(int8, torch.bfloat16),
        "dequantize_banded.cu": dequantize_banded.defines(klt, torch.bfloat16),
        "merge.cu": merge.source(128, torch.bfloat16).macros,
        "place.cu": place.source().macros,
        "store_raw.cu": store_raw.source().macros,
        "store_tokens.cu": store_plain.defines(int8, torch.bfloat16, store_plain.FEW),
        "work_list.cu": {"THREADS": work_list.THREADS, "NUM_PARTS": 2},
    }


@pytest.mark.night
def test_who_lets_the_next_kernel_start_before_it_has_ended(monkeypatch):
    """Attention's producer reads pages before it waits for the kernel ahead (ring.cuh), so of kernels that write pages
    only a decode step's may let it start early: those write the last two pages of a sequence, which are read after the
    wait.
    """
    assert set(examples()) == set(SOURCES), "a new source goes among the examples, and compiles below"
    library = cuda_compile._library()

    class ForPtx:  # the same compiler, asked for its assembly text
        def __getattr__(self, name):
            return getattr(library, name.replace("CUBIN", "PTX"))

    monkeypatch.setattr(cuda_compile, "_library", ForPtx)
    int8, klt = layout_of(spec("int8"), spec("int8")), layout_of(schemes.get("klt3").key, schemes.get("klt3").value)
    steps = {
        "close.cu": close_cuda.defines(int8, torch.bfloat16, appends=True),
        "store_banded.cu": store_banded.defines(klt, torch.bfloat16, True),
    }
    made = [*examples().items(), *steps.items()]
    texts = {
        (name, defines.get("APPENDS", 0)): (
            cuda_compile.compile_source(Source(SOURCES[name], name, defines), "compute_90").cubin
        )
        for name, defines in made
    }
    assert all(b".entry" in text for text in texts.values())
    readers, writers = (
        {("packed.cu", 0), ("banded.cu", 0), ("banded_two.cu", 0), ("codebook.cu", 0)},
        {
            ("close.cu", 1),
            ("store_banded.cu", 1),
        },
    )
    assert {name for name, text in texts.items() if b"griddepcontrol.launch_dependents" in text} == readers | writers
    assert {name for name, text in texts.items() if b"griddepcontrol.wait" in text} == readers | writers | {
        ("raw.cu", 0)
    }


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_kernels_that_lead_decoding_spill_no_more_than_stated(parts, capability, spilt):
    if not ALL and parts != 2:
        pytest.skip("two parts by default")
    listed = compiled("work_list.cu", {"THREADS": work_list.THREADS, "NUM_PARTS": parts}, capability).resources(
        "work_list"
    )
    moved = compiled("advance.cu", {"THREADS": decode.THREADS}, capability).resources("advance")
    spilt("advance", moved.spill_bytes, 0)
    # 128 bytes stored and loaded at 48 registers: around calls, not for want of registers
    spilt("work_list", listed.spill_bytes, 256)


def test_bytes_multiply_banded_keys_only_where_floats_hold_their_sums():
    for bands, folded in (((8,) * 16, 0), ((8,) * 4 + (4,) * 12, 1)):
        key = dataclasses.replace(KLT.key, bands=bands)
        kernel = attend_kernel(
            key, dataclasses.replace(KLT.value, bands=(3,) * 16), (9, 0), head_dim=256, columns=4, fold=True
        )
        assert dict(kernel.defines)["FOLDED"] == folded


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("name", [n for n, s in schemes.PRESETS.items() if not s.key.is_raw])
def test_every_kernel_of_every_preset_spills_no_more_than_stated(name, head_dim, capability, spilt):
    if not ALL and (name, head_dim, capability) not in (
        ("kivi2", 64, (8, 0)),
        ("klt4", 128, (9, 0)),
    ):
        pytest.skip("two by default")
    scheme, limit = schemes.get(name, head_dim=head_dim), driver.shared_limit(capability)
    layout = layout_of(scheme.key, scheme.value, head_dim, scheme.page_size)
    spills = {}
    if refuses(layout, limit) is None:
        common = (layout, family_of(layout).columns(layout, 8), limit)
        for kind in (
            {},
            {"raw": True},
            {"spans": True},
            {"spans": True, "raw": True},
            *([{"fold": True, "raw": True}] if scheme.key.is_trellis else []),
            *(
                {"raw": True, "beside": dataclasses.replace(layout, key=x.key, value=x.value)} | fold
                for x in scheme.copies
                for fold in ({}, {"fold": True})
            ),
        ):
            kernel = kernel_for(*common, **kind)
            spills[("attend", *kind)] = (
                compiled(kernel.source.name, dict(kernel.defines), capability).resources("attend").spill_bytes
            )
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if ALL else (torch.bfloat16, torch.float32):
        if family_of(layout).refuses("close", layout, dtype=dtype) is None and not (
            capability < (8, 9) and scheme.key.format.startswith("fp8")
        ):
            for appends in (False, True):
                if scheme.key.is_trellis:
                    source, entry, macros = (
                        "store_banded.cu",
                        "store_banded",
                        store_banded.defines(layout, dtype, appends),
                    )
                else:
                    source, entry, macros = (
                        "close.cu",
                        "close_pages",
                        close_cuda.defines(layout, dtype, appends=appends),
                    )
                spills[entry, dtype, appends] = compiled(source, macros, capability).resources(entry).spill_bytes
        if scheme.key.is_trellis and store_banded.refuses_layout(layout, dtype) is None:
            for tokens in (store_banded.FEW, layout.page_size):
                macros = store_banded.defines(layout, dtype, tokens=tokens)
                spills["store_banded", dtype, tokens] = (
                    compiled("store_banded.cu", macros, capability).resources("store_banded").spill_bytes
                )
        if family_of(layout).refuses("unpack", layout, dtype=dtype) is None:
            module, entry = (
                (dequantize_banded, "dequantize_banded")
                if scheme.key.is_trellis
                else (dequantize_cuda, "dequantize_pages")
            )
            binary = compiled(f"{entry.removesuffix('_pages')}.cu", module.defines(layout, dtype), capability)
            spills[entry.removesuffix("_pages"), dtype] = binary.resources(entry).spill_bytes
    # Attention takes every register it can have where heads are widest or codes are looked up; ptxas keeps a few values
    # of its set-up in local memory. Closing pages of float32 rows, which a model on a GPU hardly has, takes the 64
    # registers of a thread and some words of a row besides. Closing banded pages keeps some 20 words a thread around
    # its product where heads are widest, or so that one more block fits. Attention over banded pages has 128 registers
    # for each of 16 warps: some words of a segment's start and end, and of those that make its queries, are kept in
    # local memory, none of a page's.
    attend = 96 if head_dim == 256 else 80 if scheme.key.has_codebook else 640 if scheme.key.is_trellis else 0
    most = {"attend": attend, "store_banded": 512, "dequantize_banded": 400 if head_dim == 256 else 8}
    rows = {("close_pages", torch.float32, False): 128, ("close_pages", torch.float32, True): 128}
    if not spills:
        pytest.skip(f"no CUDA kernel takes {name} at head_dim {head_dim}: {refuses(layout, limit)}")
    for kernel, nbytes in spills.items():
        spilt(" ".join(map(str, kernel)), nbytes, rows.get(kernel, most.get(kernel[0], 0)))


@pytest.mark.night
@pytest.mark.parametrize(
    "name, head_dim, capability, options",
    [("klt2", 128, (8, 0), {}), ("klt3", 256, (8, 6), {"fold": True})],
    ids=["sm_80", "sm_86, one tile of queries"],
)
def test_kernels_of_two_formats_compile_before_hopper(name, head_dim, capability, options, spilt):
    scheme = schemes.get(name, head_dim=head_dim)
    (copies,) = scheme.copies
    beside = layout_of(copies.key, copies.value, head_dim)
    kernel = attend_kernel(scheme.key, scheme.value, capability, head_dim, beside=beside, raw=True, **options)
    assert kernel.source.name == "banded_two.cu" and kernel.shared_bytes <= driver.shared_limit(capability)
    resources = compiled(kernel.source.name, dict(kernel.defines), capability).resources("attend")
    spilt("attend", resources.spill_bytes, 192 if head_dim == 128 else 96)
    assert -(-kernel.threads // 32 // 4) * 32 * -(-resources.registers // 8) * 8 <= 16384, (
        "a quarter of a multiprocessor's registers"
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("name", [name for name, s in schemes.CORE.items() if not s.tiers])
def test_whatever_a_core_preset_launches_compiles_for_every_card(name, capability):
    """All that `kvbits warm` would compile for a model of 32/8 heads of 128; `benchmarks/table_kernels.py` prints what
    attention takes of a card.
    """
    if not ALL and (name, capability) != ("int4", (12, 0)):
        pytest.skip("one by default")
    (group,) = CacheSpec(scheme=schemes.get(name), layers=(LayerGeometry(num_kv_heads=8, head_dim=128),)).groups
    sources = ahead.distinct(ahead.of_group(group, 32, torch.bfloat16, False, capability))
    assert all(int(s.macros.get("SHARED_BYTES", 0)) <= driver.shared_limit(capability) for s in sources)
    attention = [s for s in sources if "SPANS" in s.macros]
    assert attention
    some = [*attention, *(s for s in sources if s not in attention)] if ALL else attention[:1]
    for source, binary in zip(some, ahead.compiled(some, capability), strict=True):
        if source not in attention:
            continue
        resources = binary.resources("attend")
        assert -(-(int(source.macros["WARPS"]) + 1) // 4) * 32 * -(-resources.registers // 8) * 8 <= 16384, (
            "a quarter of a multiprocessor's registers"
        )


@pytest.mark.parametrize(
    "header",
    sorted(
        {
            h
            for name in ("raw.cu", "packed.cu", "banded.cu", "banded_two.cu", "codebook.cu")
            for h in cuda_compile.headers_of(SOURCES[name], name)
        }
    ),
)
def test_every_header_of_attention_includes_what_it_uses(header, tmp_path):
    layout = "nuq4-1%" if header.startswith("codebook") else "klt4" if header.startswith("banded") else "int4"
    kernel = attend_kernel(schemes.get(layout).key, schemes.get(layout).value, (9, 0), raw=True)
    source = kernel.source.parent, kernel.source.name
    if header == "banded_again.cuh":
        source = SOURCES["banded_two.cu"], "banded_two.cu"
    for name, text in cuda_compile.headers_of(*source).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "alone.cu").write_text(f'#include "{header}"\n')
    cuda_compile.compile_source(Source(tmp_path, "alone.cu", dict(kernel.defines)), "sm_90")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_a_plan_takes_as_many_sequences_as_its_work_list_has_room_for(capability, parts):
    limit, blocks = driver.shared_limit(capability), 128
    most = work_list.most_sequences(blocks, parts, limit)
    assert most == work_list.MOST_SEQUENCES or work_list.shared_bytes(most + 1, blocks, parts) > limit
    assert work_list.shared_bytes(most, blocks, parts) <= limit
    assert (most < work_list.MOST_SEQUENCES) == (capability == (8, 9) or (capability, parts) == ((8, 0), 3))
