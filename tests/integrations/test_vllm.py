"""The parts of the vLLM plugin that need no vLLM: formats, refusals, and how prefill is cut into passes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from integrations import vllm_cpu
from messages import mentions, raises
from ops.test_dense_attention import kernel as dense_attention
from transformers import Gemma3TextConfig, OPTConfig, PreTrainedConfig

from kvbits import schemes
from kvbits.errors import UnsupportedError
from kvbits.geometry import has_key_bias
from kvbits.integrations import vllm
from kvbits.integrations.engine import calibrated, prefill
from kvbits.integrations.engine.layer import Layer
from kvbits.integrations.engine.options import Options
from kvbits.integrations.engine.served import LISTED, PAGE_SIZE, RAW, WIDEST, WIDEST_CALIBRATED
from kvbits.integrations.engine.step import Steps
from kvbits.integrations.engine.turns import page_turn
from kvbits.integrations.vllm import dtypes, formats, releases, scheme_file
from kvbits.integrations.vllm.formats import FORMATS
from kvbits.integrations.vllm.options import misspelt, options_of
from kvbits.integrations.vllm.releases import BACKEND
from kvbits.integrations.vllm.selector import install
from kvbits.ops.long_queries import pages_of, passes
from kvbits.ops.reference.dequantize import dequantize_pages
from kvbits.ops.reference.merge import add_sink_logit, sink_part
from kvbits.ops.reference.store import store
from kvbits.ops.types import PageStore
from kvbits.quant.rotary import turn_by, turned_by
from kvbits.spec import LayerGeometry, Rotary


def test_the_entry_point_names_the_function():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nkvbits = "kvbits.integrations.vllm:register"\n' in text
    assert callable(vllm.register)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("kvbits_int8", 264), ("kvbits_int8_centered", 268), ("kvbits_int4", 144), ("kvbits_klt4", 142)],
)
def test_bytes_per_token_and_head_are_whole_and_pinned(name, nbytes):
    layout = FORMATS[name].layout(8, 128, 128)
    assert layout.head_bytes == nbytes * PAGE_SIZE
    assert layout.token_local


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_a_page_is_found_by_its_tag_as_by_its_name(form, head_dim):
    if form.refuses(head_dim, head_dim):
        return
    layout = formats.form_of(form.name, torch.bfloat16).layout(2, head_dim, head_dim)
    assert formats.layout_by_tag(formats.TAGS[form.name], 2, head_dim, head_dim) == layout
    assert layout.head_bytes % PAGE_SIZE == 0
    if (preset := form.name.removeprefix("kvbits_")) in schemes.PRESETS:
        fitted = schemes.get(preset, head_dim=head_dim)
        assert (layout.key, layout.value) == (fitted.key, fitted.value)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in LISTED])
def test_a_scheme_file_stores_what_a_dtype_does_that_help_does_not_list(tmp_path, name):
    file, layers = tmp_path / "mine.json", (LayerGeometry(num_kv_heads=2, head_dim=128),) * 2
    changes = {"page_size": PAGE_SIZE, "num_sink_tokens": 0, "residual_length": 0, "token_local": True}
    file.write_text(schemes.get(name.removeprefix("kvbits_"), **changes).to_json())  # as docs/guide/vllm.md has it
    for form in scheme_file._layer_formats(str(file), layers):
        assert form.layout(2, 128, 128) == FORMATS[name].layout(2, 128, 128)
        assert formats.tag_for(form) == formats.TAGS[name], "pages are the dtype's, byte for byte"


def test_help_shows_six_dtypes():
    assert (*LISTED, "kvbits_scheme", "kvbits_auto") == formats.SHOWN and len(formats.SHOWN) == 6
    assert set(formats.SHOWN) < set(formats.NAMES)


def test_tags_are_no_dtype_of_other_caches():
    tags = set(formats.TAGS.values())
    assert len(tags) == len(FORMATS)
    assert not tags & {torch.uint8, *formats.RAW_DTYPES}
    with raises(UnsupportedError, "torch.uint8", "auto", "kvbits_int8_centered"):
        formats.layout_by_tag(torch.uint8, 2, 64, 64)


@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_skipped_layers_are_raw(name):
    layout = formats.form_of(name, torch.bfloat16).layout(2, 64, 64)
    assert layout.is_raw
    assert layout == formats.layout_by_tag(torch.bfloat16, 2, 64, 64)
    with raises(UnsupportedError, "kv_cache_dtype='fp8'", "kvbits_int8_centered"):
        formats.form_of("fp8", torch.bfloat16)


@pytest.mark.parametrize(
    ("heads", "ranks", "want"),
    [(8, 1, [(0, 8)]), (8, 2, [(0, 4), (4, 8)]), (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]), (1, 2, [(0, 1)] * 2)],
)
def test_each_rank_has_the_kv_heads_that_vllm_gives_it(heads, ranks, want):
    found = [calibrated.heads_of(heads, rank, ranks) for rank in range(ranks)]
    assert [(x.start, x.stop) for x in found] == want


def options(dtype, **given):
    return options_of(config_of(dtype, given))


def config_of(dtype, given, kind="generate", drafts=None):
    """Make the parts of vLLM's configuration that depend on these options; drafts: their dtype."""
    return SimpleNamespace(
        additional_config={"kvbits": given},
        cache_config=SimpleNamespace(cache_dtype=dtype),
        model_config=SimpleNamespace(runner_type=kind),
        speculative_config=drafts and SimpleNamespace(kv_cache_dtype=drafts),
    )


def test_calibrated_formats_have_raw_copies_unless_told_otherwise():
    assert [
        (x.raw_newest, x.raw_first)
        for x in (options("kvbits_klt4"), options("kvbits_klt2"), options("kvbits_klt4", raw_newest=64, raw_first=0))
    ] == [(128, 64), (64, 64), (64, 0)]
    for form in FORMATS.values():
        assert options(form.name).raw_newest == form.calibrated * schemes.get(form.scheme.name).residual_length
    assert options("kvbits_klt2", raw_newest=0).copies is options("kvbits_int4").copies is False
    assert options("kvbits_klt2").packed_copies and not options("kvbits_klt2", packed_copies=False).packed_copies
    with raises(UnsupportedError, "packed_copies=0"):
        options("kvbits_klt2", packed_copies=0)
    with raises(UnsupportedError, "calibration=1", "kvbits calibrate"):
        options("kvbits_klt4", calibration=1)


@pytest.mark.parametrize("key", ["kvbit", "kvbits_", "KVBits", "kv-bits", "kbvits", "kvbits_options"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_misspelt_key_is_named(key, asked):
    assert mentions(misspelt({key: {"raw_newest": 0}}, asked), f"{key!r}", "'kvbits'")


def test_options_outside_of_their_key_are_named_and_those_of_others_are_not():
    assert mentions(misspelt({"raw_newest": 64}, False), "'raw_newest'", '{"kvbits": {"raw_newest": ..}}')
    assert mentions(misspelt({"dtype": "int8_centered"}, True), "'dtype'", '{"kvbits": {"dtype": ..}}')
    others = {"kvbits": {"raw_newest": 64}, "gdn_prefill_backend": "triton", "ascend_scheduler_config": {}, "dtype": 1}
    assert misspelt(others, False) is misspelt({}, True) is misspelt(None, True) is None
    for wrong, right in (
        ("raw_newst", "raw_newest"),
        ("copies_shares", "copies_share"),
        ("calibrations", "calibration"),
    ):
        with raises(UnsupportedError, f"'{wrong}'", right):
            options("kvbits_klt4", **{wrong: 1})


@pytest.mark.parametrize("share", [0, -0.1, 0.51, True, "0.1", None])
def test_shares_that_cannot_be_are_refused(share):
    with raises(UnsupportedError, "copies_share=", 0, 0.5, "raw_newest=0"):
        options("kvbits_klt4", copies_share=share)
    with raises(UnsupportedError, "copies_share", "raw_newest=64"):
        options("kvbits_klt4", copies_share=0.1, raw_newest=0)
    with raises(UnsupportedError, "copies_share", "raw_newest=64"):
        options("kvbits_int8", copies_share=0.1)
    assert options("kvbits_klt4", copies_share=0.1).copies_share == 0.1


@pytest.mark.parametrize("name", ["raw_first", "copies_share"])
def test_options_of_copies_are_refused_where_neither_target_nor_drafts_have_any(name):
    given = {name: 64 if name == "raw_first" else 0.1}
    for drafts in (None, "kvbits_int8_centered", "auto"):
        with raises(UnsupportedError, name, "raw_newest=64"):
            options_of(config_of("kvbits_int8", given, drafts=drafts))
    assert options_of(config_of("kvbits_int8", given, drafts="kvbits_klt4"))


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ({"calibration": "c.safetensors"}, "calibrated format"),
        ({"calibrate": False}, "calibrated format"),
        ({"packed_copies": False}, "calibrated format"),
        ({"scheme": "s.json"}, "kvbits_scheme"),
    ],
)
def test_options_that_a_dtype_never_reads_are_refused_unless_drafts_read_them(given, way_out):
    (name,) = given
    with raises(UnsupportedError, 'additional_config["kvbits"]', name, "kvbits_int8", way_out):
        options("kvbits_int8", **given)
    assert options("auto", **given)  # kvbits is not asked, or not yet
    assert options_of(config_of("kvbits_int8", given, kind="draft")), "its target may read them"
    assert options_of(config_of("kvbits_int8", given, drafts="kvbits_klt4")), "its drafts may read them, or they do"


def test_widths_are_those_of_the_kernels():
    """The plugin refuses what kernels refuse, and `kvbits plan`, which has no torch, knows the largest width."""
    for name in ("auto", *FORMATS):
        widest = WIDEST_CALIBRATED if name != "auto" and FORMATS[name].calibrated else WIDEST
        assert formats.refuses_pages(name, widest, "bfloat16") is None
        assert f"head_dim={2 * widest}" in formats.refuses_pages(name, 2 * widest, "bfloat16")
        if name != "auto":
            assert FORMATS[name].refuses(widest, widest) is None and str(2 * widest) in FORMATS[name].refuses(
                2 * widest, 2 * widest
            )
            assert bool(FORMATS[name].refuses(192, 128)) is FORMATS[name].calibrated
    assert formats.refuses_pages("kvbits_scheme", 2 * WIDEST, "bfloat16") is None


def test_refusals_give_the_way_out():
    assert mentions(FORMATS["kvbits_klt4"].refuses(72, 72), "head_dim=72", 16, "kvbits_int8_centered")
    biased = FORMATS["kvbits_int4"].refuses(128, 128, key_bias=True)
    assert mentions(biased, "kvbits_int4", "kvbits_int8_centered", "kvbits_klt4")
    assert FORMATS["kvbits_int4"].refuses(128, 128) is None
    assert FORMATS["kvbits_int8_centered"].refuses(128, 128, key_bias=True) is None
    assert "--kv-cache-dtype auto" in FORMATS["kvbits_int8"].refuses(60, 60)
    assert has_key_bias(SimpleNamespace(model_type="qwen2"))
    assert has_key_bias(SimpleNamespace(attention_bias=True))
    assert not has_key_bias(SimpleNamespace(model_type="llama", attention_bias=False))


def test_a_layer_turns_by_its_own_rotary_embedding():
    """Those with a sliding window have another one; layers of speculation behind the model's turn as its last."""
    by_kind = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=3, head_dim=64, layer_types=kinds, rope_parameters=by_kind)
    slides, full, last, behind = (page_turn(config, i, torch.device("cpu")) for i in (0, 1, 2, 7))
    for turn, theta, factor in ((slides, 1e4, 1), (full, 1e6, 8)):
        rotary = Rotary(inv_freq=tuple((theta ** (-torch.arange(0, 64, 2) / 64) / factor).tolist()))
        x = torch.randn(5, 64)
        torch.testing.assert_close(turned_by(x, turn), turned_by(x, turn_by(rotary, 64, PAGE_SIZE)), atol=1e-4, rtol=0)
    assert torch.equal(full, last) and torch.equal(last, behind)


def test_nobody_turns_keys_whose_rotary_embedding_is_unknown():
    for config in (PreTrainedConfig(), OPTConfig(num_hidden_layers=1)):
        assert page_turn(config, 0, torch.device("cpu")) is None


lengths = st.lists(st.tuples(st.integers(1, 130), st.integers(0, 700)), min_size=1, max_size=6)


@given(lengths, st.integers(0, 3), st.sampled_from([None, 70, 200]))
def test_passes_hold_every_key_that_is_seen_once_and_fit(rows, spare, window):
    query_lens, history = (np.array(x) for x in zip(*rows, strict=True))
    most = query_lens.max() + PAGE_SIZE * (1 + spare) + (0 if window is None else window + PAGE_SIZE)
    seen = {row: [] for row in range(len(rows))}
    table = prefill.history_of(history, torch.zeros(len(rows), 11, dtype=torch.int32), window)
    layout = RAW.layout(1, 64, 64, "float32")
    for p in passes(pages_of([layout], [table]), query_lens, int(most)):
        assert p.starts[-1] <= most
        for _, row, entry, position, count, first in p.pages.tolist():
            assert position == entry * PAGE_SIZE
            assert first >= p.starts[row - p.first]
            seen[row] += range(position, position + count)
        for i, row in enumerate(range(p.first, p.last)):
            mine = sum(p.pages[p.pages[:, 1] == row, 4]) + (query_lens[row] if p.ends else 0)
            assert p.starts[i + 1] - p.starts[i] == mine
            seen[row] += ["fresh"] * int(p.ends)
    for row, (q, n) in enumerate(rows):
        begin = 0 if window is None else min(max(n - window + 1, 0) // PAGE_SIZE * PAGE_SIZE, n)
        assert seen[row] == [*range(begin, n), "fresh"], (q, n)


def dense(q, k, v, scaling, window, softcap):
    """One row in float64: q [T, Hq, D] are the newest of k, v [S, H, D]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(group, 1)) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(k) + 1)), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double().repeat_interleave(group, 1))


@pytest.mark.parametrize("attend", [vllm_cpu.attend, None], ids=["unpacked", "packed"])
@pytest.mark.parametrize(
    ("window", "softcap", "rows", "values"),
    [(None, None, 1000, 64), (None, 20.0, 256, 64), (None, None, 200, 40), (100, None, 320, 96)],
)
def test_prefill_over_history_is_dense_attention(window, softcap, rows, values, attend):
    """Scratch for all rows together, for some, and for slices of one row; none on a CPU."""
    layout = RAW.layout(2, 64, values, "float32")
    scratch = prefill.Scratch(*(torch.full((rows, 2, d), torch.nan) for d in (64, values)))
    call = prefill.Call(layout, 4, torch.float32, 0.2, window, softcap, scratch, attend, ())
    query_lens, history = np.array([5, 100, 0, 1, 64]), np.array([130, 400, 70, 64, 0])
    pages = torch.full((20, 2, layout.head_bytes), 0xFF, dtype=torch.uint8)
    table, free, given, want = torch.zeros(5, 8, dtype=torch.int32), 1, [], []
    for row, (t, n) in enumerate(zip(query_lens, history, strict=True)):
        k, v, q = torch.randn(n + t, 2, 64), torch.randn(n + t, 2, values), torch.randn(t, 4, 64)
        count = -(-int(n + t) // PAGE_SIZE)
        table[row, :count] = torch.arange(free, free + count)
        slots = table[row, torch.arange(n + t) // PAGE_SIZE].long() * PAGE_SIZE + torch.arange(n + t) % PAGE_SIZE
        store(k, v, PageStore(layout, (pages,)), slots)
        free += count
        given.append((q, k[n:], v[n:]))
        want.append(dense(q, k, v, 0.2, window, softcap))
    found = prefill.Prefill(query_lens, query_lens + history, table, call)
    q, k, v = (torch.cat(x) for x in zip(*given, strict=True))
    out = torch.full((*q.shape[:2], values), torch.nan)
    found.run(q, k, v, out, [PageStore(layout, (pages,))])
    torch.testing.assert_close(out.double(), torch.cat(want), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("attend", [vllm_cpu.attend, None], ids=["unpacked", "packed"])
def test_chunks_read_raw_copies_where_they_are(attend, sink):
    """The first page and the newest of a request with a ring, in which this step's own take the place of an older one; of
    a request without, packed pages alone.
    """
    layout = FORMATS["kvbits_int4"].layout(2, 64, 64, "float32")
    scratch = prefill.Scratch(*(torch.zeros(500, 2, 64) for _ in "kv"))
    rings = Options(raw_newest=64, raw_first=64).rings(FORMATS["kvbits_int4"], layout)
    call = prefill.Call(layout, 4, torch.float32, 0.2, None, None, scratch, attend, rings)
    device, sizes = torch.device("cpu"), {"copied": 1, "rows": 2, "tokens": 400, "num_pages": 20}
    plans = Steps([call], num_queries=[1], device=device, **sizes)
    layer = Layer("0", call, device, sink=sink_part(torch.tensor([0.5, -1, 2, 0]), 64, torch.float32) if sink else None)
    layer.take_copies(1)
    pages = torch.full((20, 2, layout.head_bytes), 0xFF, dtype=torch.uint8)
    table, rings = torch.arange(1, 13, dtype=torch.int32).view(2, 6), torch.tensor([0, -1], dtype=torch.int32)
    q, k, v = torch.randn(2, 300, 4, 64), torch.randn(2, 300, 2, 64), torch.randn(2, 300, 2, 64)
    for first, end in (((0, 0), (200, 130)), ((200, 130), (250, 194)), ((250, 194), (290, 195))):
        rows = list(zip((0, 1), first, end, strict=True))
        lens, ends = (np.array(x) for x in (np.subtract(end, first), end))
        at = [torch.arange(a, b) for _, a, b in rows]
        slots = torch.cat([table[row, x // PAGE_SIZE] * PAGE_SIZE + x % PAGE_SIZE for row, x in enumerate(at)]).long()
        starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
        given = torch.from_numpy(ends).int(), starts, table, slots, rings
        step = plans.plan(*given, np.stack([lens, ends]), num_decode_tokens=0)
        asked, keys, values = (torch.cat([x[row, a:b] for row, a, b in rows]) for x in (q, k, v))
        out = torch.full_like(asked, torch.nan)
        layer.run(step, asked, keys, values, out, pages)
    packed = dequantize_pages(pages[1:], layout)
    for row, got in enumerate(out.split([40, 1])):
        seen = []
        for x, read in zip((k, v), packed, strict=True):
            read = read[6 * row : 6 * row + 6].transpose(1, 2).flatten(0, 1)[: end[row]].clone()
            for raw in ((0, 64), (192, 250)) if row == 0 else ():
                read[slice(*raw)] = x[row, slice(*raw)]
            read[first[row] :] = x[row, first[row] : end[row]]
            seen.append(read)
        want, lse = dense_attention(q[row, first[row] : end[row]][None], *(x[None] for x in seen), 0.2, causal=True)
        if sink:
            want = add_sink_logit(want, lse, layer.sink[1].flatten())
        # kernels round queries and weights to 8 bits (ops/cpu/attend.py); other pages would be 0.15 away
        torch.testing.assert_close(got, want[0], atol=2e-4 if attend else 3e-2, rtol=1e-3)


class Interface:
    """Interface of a platform of vLLM."""

    device_type = "cuda"

    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.updated = True

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return "original"

    @classmethod
    def update_block_size_for_backend(cls, vllm_config):
        vllm_config.grown = True

    @classmethod
    def _align_heterogeneous_kv_block_size(cls, vllm_config, backend_cls):
        vllm_config.grown = True


@pytest.fixture
def platform(monkeypatch):
    """A platform whose functions can be wrapped, though no vLLM is probed."""
    monkeypatch.setitem(vars(releases.CONTRACT), "broken", {})
    monkeypatch.setattr(releases, "takes_names", lambda: True)
    return type("Platform", (Interface,), {})


@pytest.mark.parametrize(
    ("broken", "dtype", "options", "refused"),
    [
        ("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "kvbits_klt4", {}, True),
        ("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "kvbits_klt4", {"raw_newest": 0}, False),
        ("vllm.v1.core.block_pool:BlockPool.get_new_blocks", "auto", {}, False),
        ("vllm.v1.attention.backend:AttentionBackend.customize_spec", "kvbits_int4", {}, True),
        ("vllm.v1.core.kv_cache_utils:update_kv_cache_capacity", "kvbits_klt4", {}, False),
    ],
)
def test_a_start_is_refused_by_the_symbol_that_its_format_lacks(platform, monkeypatch, broken, dtype, options, refused):
    """Other formats start in the same release."""
    monkeypatch.setattr(releases, "register_dtypes", lambda gone: None)
    monkeypatch.setitem(releases.CONTRACT.broken, broken, "is not there")
    dtypes.install(platform)
    config = config_of(dtype, options)
    config.updated, config.cache_config.user_specified_block_size = False, False
    symbol = broken.replace(":", ".")
    with raises(UnsupportedError, dtype, symbol) if refused else nullcontext():
        platform.check_and_update_config(config)
    assert config.updated == (not refused)


def test_a_release_without_what_every_format_needs_is_left_alone_but_for_the_refusal(platform, monkeypatch):
    monkeypatch.setattr(releases, "register_dtypes", lambda gone: None)
    monkeypatch.setitem(releases.CONTRACT.broken, "vllm.v1.attention.backend:AttentionBackend", "is not there")
    found = SimpleNamespace(current_platform=platform())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=found))
    monkeypatch.setitem(sys.modules, "vllm.platforms", found)
    vllm.register()
    assert platform.check_and_update_config != Interface.check_and_update_config
    assert platform.get_attn_backend_cls.__func__ is Interface.get_attn_backend_cls.__func__


def backend_called(path):
    """A class that wraps one of that name, as vLLM makes them for layers that share pages or attend in chunks."""
    module, name = path.rsplit(".", 1)
    own = type(name, (), {"__module__": module, "__qualname__": name, "get_name": classmethod(lambda cls: name)})
    return type("Wrapped", (own,), {})


def test_the_selector_is_installed_once(platform):
    install(platform)
    wrapped = platform.get_attn_backend_cls
    install(platform)
    assert platform.get_attn_backend_cls == wrapped != Interface.get_attn_backend_cls
    for name, grows in ((BACKEND, False), ("vllm.v1.FlashAttentionBackend", True)):
        config, backend = SimpleNamespace(grown=False), backend_called(name)
        platform._align_heterogeneous_kv_block_size(config, backend)
        assert config.grown == grows
    gone = SimpleNamespace(kv_cache_dtype="kvbits_int4_rotated")
    with raises(ValueError, "'kvbits_int4_rotated'", "kvbits_klt4"):
        platform.get_attn_backend_cls(None, gone)


@pytest.mark.parametrize(
    ("dtype", "backends", "hybrid", "skipped", "parts"),
    [
        ("kvbits_int8", [BACKEND], True, [], None),
        ("auto", ["vllm.FlashAttentionDiffKV"], False, [], None),
        ("kvbits_int8", [BACKEND, "vllm.FlashAttentionDiffKV"], False, [], ("kvbits_int8", "(FlashAttentionDiffKV)")),
        ("kvbits_int8", [BACKEND], True, ["0"], ("kvbits_int8", "--kv-cache-dtype-skip-layers")),
        ("kvbits_scheme", [BACKEND], True, [], ("kvbits_scheme",)),
        ("kvbits_klt4", [BACKEND], True, [], None),
        ("kvbits_scheme", [BACKEND], False, ["0"], None),
    ],
)
def test_layers_that_would_read_our_bytes_as_theirs_are_refused(platform, dtype, backends, hybrid, skipped, parts):
    """Layers may bring backends that nobody asks whether they know the dtype."""
    layers = [SimpleNamespace(kv_cache_dtype=dtype, get_attn_backend=partial(backend_called, x)) for x in backends]
    raw = SimpleNamespace(kv_cache_dtype="auto", get_attn_backend=lambda: backend_called("vllm.OfADraft"))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=dtype, kv_cache_dtype_skip_layers=skipped),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        grown=False,
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate([*layers, raw, SimpleNamespace()]))),
    )
    install(platform)
    with nullcontext() if parts is None else raises(UnsupportedError, *parts):
        platform.update_block_size_for_backend(config)
    assert config.grown == (parts is None)
