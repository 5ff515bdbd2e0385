"""Kernels that are compiled ahead are those that passes load; what is kept on disk is whole, bounded, and found by
other processes. No GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from full_disk import full_disk
from messages import mentions, raises, warns

from kvbits import files, schemes
from kvbits.cache.paged_cache import PagedCache
from kvbits.cli.warm import _capabilities
from kvbits.errors import KvbitsWarning, SpecError
from kvbits.integrations.engine.place import cuda as place
from kvbits.integrations.engine.served import FORMATS, raw_of
from kvbits.ops import attend, decode, dispatch, long_queries
from kvbits.ops.cuda import ahead, close, merge, store, unpack
from kvbits.ops.cuda import attend as attend_cuda
from kvbits.ops.cuda import decode as decode_cuda
from kvbits.ops.cuda.engine.runtime import compile as cuda_compile
from kvbits.ops.cuda.engine.runtime import driver, kept
from kvbits.quant.scales import steps
from kvbits.spec import CacheSpec, LayerGeometry, Rotary, Tier

HEADS, D, QUERY_HEADS = 2, 128, 8
GEOMETRY = LayerGeometry(
    num_kv_heads=HEADS, head_dim=D, rotary=Rotary(inv_freq=tuple(10_000.0 ** (-i / (D // 2)) for i in range(D // 2)))
)
needs_nvrtc = pytest.mark.skipif(cuda_compile.missing() is not None, reason=f"{cuda_compile.missing()}")


def named(sources):
    return {(s.name, tuple(sorted(s.macros.items())), s.own) for s in sources}


def forget_loaded():
    for name, module in list(sys.modules.items()):
        if name.startswith(("kvbits.ops.cuda", "kvbits.integrations.engine.place")):
            for thing in vars(module).values():
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()


@pytest.fixture
def loaded(monkeypatch, request):
    """Note what is loaded on a GPU that launches nothing and whose memory is the CPU's."""
    capability, found = request.param, []

    def load(source, name, device_index, shared_bytes=None, *, early=False):
        found.append(source)
        return SimpleNamespace(launch=lambda *args, **options: None)

    no = lambda *_, **__: None  # noqa: E731

    def refuses_on(layout, dtype, device, op="step"):
        return close.refuses_layout(layout, dtype, capability, op)

    def empty(q, k, v, *_):
        return torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.zeros(q.shape[:3])

    for target, name, value in (
        (driver, "load", load),
        (driver, "refuses", no),
        (driver, "current_stream", lambda *_: 0),
        (attend_cuda, "indexed", lambda d: d),
        (long_queries.dense, "attention", empty),
        (unpack, "refuses", lambda layout, dtype, device: unpack.refuses_layout(layout, dtype)),
        (close, "refuses_on", refuses_on),
        (
            close,
            "refuses",
            lambda k, store: refuses_on(store.layout, k.dtype, None, "close"),
        ),
        (
            store,
            "refuses",
            lambda layout, dtype, device: store.refuses_layout(layout, capability, dtype),
        ),
        (merge, "refuses", no),
        (decode, "BACKENDS", {"cpu": "cuda"}),
        (
            dispatch,
            "BACKENDS",
            {
                op: tuple(x for x in names if op == "attend_fresh" or x != "cpu")
                for op, names in dispatch.BACKENDS.items()
            },
        ),
        (torch.cuda, "get_device_capability", lambda *_: capability),
        (torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=3)),
        (torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: True)),
    ):
        monkeypatch.setattr(target, name, value)
    forget_loaded()
    yield capability, found
    forget_loaded()


def static_of(spec):
    if not spec.scheme.needs_calibration:
        return None
    return [
        {"k_basis": torch.eye(D).repeat(HEADS, 1, 1) / steps(spec.scheme.key, D), "k_mean": torch.randn(HEADS, 2, D)}
        for _ in spec.layers
    ]


@pytest.mark.parametrize("loaded", [(8, 0), (9, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}", indirect=True)
@pytest.mark.parametrize(
    "name", ["raw", "int8_centered", "int4", "kivi4", "klt3", "tiered", "local", "local with sinks"]
)
def test_what_is_compiled_ahead_is_what_passes_load(name, loaded):
    capability, found = loaded
    changes = {
        "local": {"token_local": True},
        "local with sinks": {"token_local": True, "num_sink_tokens": 4},
        "tiered": {"residual_length": 64, "tiers": (Tier(num_tokens=256),)},
    }
    scheme = schemes.get("int8" if name.startswith("local") else name, **changes.get(name, {}))
    spec = CacheSpec(scheme=scheme, layers=(GEOMETRY,))
    for chunks in ([12, 1, 20, *[1] * 4], [700, *[1] * 5, 20, *[1] * 4, 600, 8, *range(2, 140, 15)]):
        cache = PagedCache(spec, static=static_of(spec), max_tokens=sum(chunks), batch_size=1)
        for count in chunks:
            q, k, v = (torch.randn(1, count, heads, D, dtype=torch.bfloat16) for heads in (QUERY_HEADS, HEADS, HEADS))
            cache.step(0, q, k, v, scaling=D**-0.5)
    told = named(s for g in spec.groups for s in ahead.of_group(g, QUERY_HEADS, torch.bfloat16, False, capability))
    missing = named(found) - told
    assert not missing, f"{[x[0] for x in missing]} would be compiled by a first call"
    extra = sorted(x[0] for x in told - named(found))
    if name == "tiered":  # some of those that attend before a page has left its tier
        extra = [x for x in extra if x != "packed.cu"]
    if scheme.copies:  # some of those that attend while every closed page has a copy
        extra = [x for x in extra if x != "banded.cu"]
    # decoding before a page closes, which a scheme with few raw tokens hardly does; lists of fewer parts than were here
    assert set(extra) <= {"close.cu", "work_list.cu"}


@pytest.mark.parametrize("loaded", [(8, 0), (9, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}", indirect=True)
@pytest.mark.parametrize("name", ["kvbits_int8_centered", "kvbits_int4", "kvbits_klt4", "kvbits_klt2"])
def test_what_is_compiled_ahead_for_vllm_is_what_its_backend_prepares(name, loaded):
    """The calls of `integrations.vllm` that compile: impl._take and settle, builder, metadata.Decode for up to 8
    queries.
    """
    capability, found = loaded
    layout, device, dtype = FORMATS[name].layout(HEADS, D, D), torch.device("cpu"), torch.bfloat16
    copies = [raw_of(layout)] if FORMATS[name].calibrated else []
    copies += [copy for _, copy in FORMATS[name].copies_of(layout)]
    for x in (layout, *copies):
        store.prepare(x, dtype, device)
        unpack.prepare(x, dtype, device)
    place.prepare(device)
    merge.prepare([torch.zeros(1, 1, 1, D, dtype=dtype)])
    for layouts in [[layout, *copies], [layout, *copies, copies[0]]] if copies else [[layout]]:
        for queries in range(1, 9):
            options = {
                "batch_size": 2,
                "num_q_heads": QUERY_HEADS,
                "dtype": dtype,
                "device": device,
                "scaling": 1.0,
                "sliding_window": None,
                "softcap": None,
            }
            attend.plan(layouts, num_queries=queries, **options)
    told = [*ahead.of_vllm(layout, copies, QUERY_HEADS, dtype, False, capability), place.source()]
    assert named(told) == named(found)


# -- on disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of compiled kernels."""
    monkeypatch.setenv("KVBITS_CACHE", str(tmp_path / "home"))
    return tmp_path / "home" / "cuda"


def kernel_at(home):
    (path,) = home.glob("*.kernel")
    return path


@needs_nvrtc
@pytest.mark.parametrize("damage", ["cut", "one bit", "empty", "another's"])
def test_a_damaged_file_is_compiled_anew_and_never_loaded(damage, home, capsys):
    first = cuda_compile.compile_source(place.source(), "sm_90")
    path = kernel_at(home)
    whole = path.read_bytes()
    if damage == "another's":
        cuda_compile.compile_source(decode_cuda.ADVANCE, "sm_90")
        (other,) = set(home.glob("*.kernel")) - {path}
        broken = other.read_bytes()
    else:
        broken = {"cut": whole[:-100], "empty": b"", "one bit": whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:]}[
            damage
        ]
    path.write_bytes(broken)
    again = cuda_compile.compile_source(place.source(), "sm_90")
    assert first.made and again.made and again.cubin == first.cubin
    assert mentions(capsys.readouterr().err.replace("\n", " "), path, "damaged")
    assert not cuda_compile.compile_source(place.source(), "sm_90").made


def test_the_oldest_go_where_there_are_too_many(home, monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 3500)
    for i in range(4):
        kept.keep(f"k{i}", bytes([i]) * 1000, "log")
        os.utime(home / f"k{i}.kernel", (i, i))
    assert kept.find("k0") is None and kept.find("k1") == (bytes([1]) * 1000, "log"), "read: now the newest"
    (home / "tmpleft").write_bytes(bytes(1000))  # of a process that was killed
    os.utime(home / "tmpleft", (0, 0))
    kept.keep("k4", bytes(1000), "")
    assert {p.name for p in home.iterdir()} == {"k1.kernel", "k3.kernel", "k4.kernel"}


def test_what_a_kernel_is_made_of_names_it(home, monkeypatch):
    made = []
    monkeypatch.setattr(cuda_compile, "missing", lambda: None)
    monkeypatch.setattr(cuda_compile, "version", lambda: (13, 0))
    monkeypatch.setattr(
        cuda_compile, "_compile", lambda *a: made.append(a) or cuda_compile.Binary(b"code", "log", made=True)
    )
    source = place.source()
    cuda_compile.compile_source(source, "sm_90")
    cuda_compile.compile_source(source, "sm_80")
    cuda_compile.compile_source(dataclasses.replace(source, macros={"THREADS": 64}), "sm_90")
    for name, value in (
        ("__version__", "0.0.0"),
        ("version", lambda: (12, 9)),
        ("OPTIONS", ("--std=c++20",)),
        ("headers_of", lambda *_: {"new.cuh": ""}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_compile, name, value)
            cuda_compile.compile_source(source, "sm_90")
    assert len(made) == len(list(home.glob("*.kernel"))) == 7
    cuda_compile.compile_source(source, "sm_90")
    assert len(made) == 7


@needs_nvrtc
def test_an_image_that_takes_no_files_serves_what_it_has(home, tmp_path, monkeypatch):
    cuda_compile.compile_source(place.source(), "sm_90")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(files, "_require_writable", lambda folder, what: wall(folder, home))
    assert not cuda_compile.compile_source(place.source(), "sm_90").made
    assert cuda_compile.compile_source(decode_cuda.ADVANCE, "sm_90").made, "and keeps others among temporary files"
    assert not cuda_compile.compile_source(decode_cuda.ADVANCE, "sm_90").made
    (temporary / f"kvbits-{os.getuid()}").chmod(0o777)
    files._not_kept.clear()
    with warns(KvbitsWarning, "compiled kernels", "KVBITS_CACHE"):
        assert cuda_compile.compile_source(decode_cuda.ADVANCE, "sm_90").made, "what others may have written is not run"


def wall(folder, home):
    """Permissions do not hold root back."""
    if folder == home:
        raise SpecError("takes no files")


COMPILES = """
import sys, time
from kvbits.integrations.engine.place import cuda as place
from kvbits.ops.cuda.engine.runtime import compile as c
c.version()
print("ready", flush=True)
sys.stdin.readline()
for source in (place.source(),):
    began = time.perf_counter()
    binary = c.compile_source(source, "sm_90")
    print(binary.made, len(binary.cubin), hash(binary.cubin), time.perf_counter() - began, flush=True)
"""


def start(code, home):
    options = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": os.environ | {"KVBITS_CACHE": str(home.parent), "PYTHONHASHSEED": "0"},
    }
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.night
@needs_nvrtc
def test_processes_that_compile_the_same_at_a_time_end_with_the_same_files(home):
    processes = [start(COMPILES, home) for _ in range(3)]
    for p in processes:
        p.stdin.write("go\n"), p.stdin.flush()
    found = [p.communicate(timeout=300)[0].split() for p in processes]
    assert all(p.returncode == 0 for p in processes)
    assert len({tuple(x[1:3]) for x in found}) == 1
    assert len(list(home.iterdir())) == 1, "nothing is left but the kernel"
    assert start(COMPILES, home).communicate("go\n", timeout=300)[0].split()[0] == "False"


@needs_nvrtc
def test_one_that_is_killed_while_it_writes_leaves_nothing_that_is_loaded(home):
    code = COMPILES.replace("for source", "import os, tempfile\nos.replace = lambda *_: os._exit(9)\nfor source")
    process = start(code, home)
    process.communicate("go\n", timeout=300)
    assert process.returncode == 9 and len(list(home.iterdir())) == 1 and not list(home.glob("*.kernel"))
    assert cuda_compile.compile_source(place.source(), "sm_90").made


def test_a_compile_that_takes_long_is_said(home, monkeypatch, capsys):
    monkeypatch.setattr(cuda_compile, "missing", lambda: None)
    monkeypatch.setattr(cuda_compile, "version", lambda: (13, 0))
    monkeypatch.setattr(
        cuda_compile, "_compile", lambda *a: time.sleep(0.3) or cuda_compile.Binary(b"code", "log", made=True)
    )
    cuda_compile.compile_source(place.source(), "sm_90")
    assert not capsys.readouterr().err
    monkeypatch.setattr(cuda_compile, "PATIENCE", 0.1)
    cuda_compile.compile_source(place.source(), "sm_80", quiet=True)
    assert not capsys.readouterr().err
    cuda_compile.compile_source(place.source(), "sm_89")
    assert mentions(capsys.readouterr().err, "place.cu", "sm_89", "kvbits warm")


@pytest.mark.parametrize("reason", ["full", "no folder"])
def test_a_kernel_that_no_disk_keeps_is_used(home, monkeypatch, tmp_path, reason):
    """With one warning, however many they are."""
    monkeypatch.setattr(cuda_compile, "missing", lambda: None)
    monkeypatch.setattr(cuda_compile, "version", lambda: (13, 0))
    monkeypatch.setattr(cuda_compile, "_compile", lambda *_: cuda_compile.Binary(b"code", "log", made=True))
    if reason == "no folder":
        (wall := tmp_path / "wall").write_text("no folder")
        monkeypatch.setenv("KVBITS_CACHE", str(wall / "cache"))
        monkeypatch.setattr("tempfile.tempdir", str(wall))
    with (
        full_disk() if reason == "full" else contextlib.nullcontext(files._not_kept.clear()),
        warns(KvbitsWarning, "compiled kernels", "KVBITS_CACHE") as said,
    ):
        made = [cuda_compile.compile_source(place.source(), arch) for arch in ("sm_80", "sm_90")]
    assert [x.cubin for x in made] == [b"code", b"code"] and len(said) == 1
    assert not list(home.glob("*.kernel")) and not list(home.glob("*.tmp"))


# -- the command ----------------------------------------------------------------------------------------------------


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 64,
    "vocab_size": 100,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
}


def warm(config, home, *args):
    command = [sys.executable, "-m", "kvbits", "warm", str(config), *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"KVBITS_CACHE": str(home.parent)}
    )


@needs_nvrtc
def test_the_command_compiles_for_gpus_that_are_not_here(home, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    first, again = (
        json.loads(warm(config, home, "--scheme", "raw", "--arch", "sm_90", "--json").stdout) for _ in range(2)
    )
    (made,), (found,) = first["rows"], again["rows"]
    assert made["compiled"] == made["kernels"] == len(list(home.glob("*.kernel"))) and found["compiled"] == 0
    assert found["nbytes"] == made["nbytes"] and found["seconds"] < made["seconds"]
    layers = (LayerGeometry(num_kv_heads=2, head_dim=64),) * 2
    (group,) = CacheSpec(scheme=schemes.get("raw"), layers=layers).groups
    assert not any(
        b.made for b in ahead.compiled(ahead.distinct(ahead.of_group(group, 4, torch.bfloat16, False, (9, 0))), (9, 0))
    )


def test_gpus_that_cannot_be_are_refused():
    assert _capabilities("sm_90, 8.0,120") == [(9, 0), (8, 0), (12, 0)]
    assert _capabilities("h100,A100-80GB") == [(9, 0), (8, 0)] and _capabilities("H100") == [(9, 0)]
    for wrong in ("sm_75", "T4", "9", "V100", "h1000", "90a"):
        with raises(SpecError, "--arch", "sm_80"):
            _capabilities(wrong)
    if not torch.cuda.device_count():
        with raises(SpecError, "--arch sm_90"):
            _capabilities(None)
