"""Geometry read from configurations agrees with what Transformers' own cache and models do, and odd caches are refused
by name.
"""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import pytest
from messages import raises

from kvbits.errors import SpecError, UnsupportedError
from kvbits.geometry import (
    find_model,
    forget_parsed,
    layer_geometries,
    layer_places,
    load_config,
    max_context,
    stored_at,
    text_config,
)
from kvbits.spec import LayerGeometry
from kvbits.spec.codec import from_dict, to_dict

transformers = pytest.importorskip("transformers")


def config(model_type, **fields):
    return transformers.AutoConfig.for_model(model_type, **fields)


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
}


def windows(c):
    return [g.sliding_window for g in layer_geometries(c)]


# -- heads and widths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "fields", "kv_heads", "head_dim"),
    [
        ("llama", {}, 2, 16),
        ("llama", {"num_key_value_heads": None}, 4, 16),
        ("llama", {"head_dim": 32}, 2, 32),
        ("qwen3", {"head_dim": 128}, 2, 128),
        ("gemma3_text", {"head_dim": 256}, 2, 256),
        ("phi3", {}, 2, 16),
        ("mistral", {"head_dim": None}, 2, 16),
    ],
)
def test_kv_heads_and_head_dim(model_type, fields, kv_heads, head_dim):
    g = layer_geometries(config(model_type, **{**SMALL, "pad_token_id": 0, **fields}))
    assert len(g) == 4
    assert {(x.num_kv_heads, x.head_dim) for x in g} == {(kv_heads, head_dim)}


def test_families_that_name_their_heads_otherwise():
    assert layer_geometries(config("gpt2"))[0] == LayerGeometry(num_kv_heads=12, head_dim=64)
    assert layer_geometries(config("gpt_bigcode", multi_query=True))[0].num_kv_heads == 1
    assert layer_geometries(config("falcon", multi_query=True, new_decoder_architecture=False))[0].num_kv_heads == 1
    assert (
        layer_geometries(
            config("falcon", new_decoder_architecture=True, num_kv_heads=8, num_attention_heads=128, hidden_size=8192)
        )[0].num_kv_heads
        == 8
    )
    assert layer_geometries(config("dbrx", attn_config={"kv_n_heads": 8}))[0].num_kv_heads == 8


def test_gemma4_full_layers_are_wider():
    if "gemma4_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no Gemma 4")
    found = {(g.sliding_window is None, g.head_dim) for g in layer_geometries(config("gemma4_text"))}
    assert found == {(False, 256), (True, 512)}


# -- sliding windows ------------------------------------------------------------------------------------------------


def test_mistral_slides_in_every_layer_or_none():
    assert windows(config("mistral", **SMALL, sliding_window=32)) == [32] * 4
    assert windows(config("mistral", **SMALL, sliding_window=None)) == [None] * 4


def test_phi3_slides_in_every_layer():
    assert windows(config("phi3", **SMALL, sliding_window=2047, pad_token_id=0)) == [2047] * 4


def test_gemma2_alternates():
    assert windows(config("gemma2", **SMALL, head_dim=16, sliding_window=16)) == [16, None, 16, None]


def test_gemma3_every_sixth_layer_is_full():
    c = config("gemma3_text", **{**SMALL, "num_hidden_layers": 12}, head_dim=16, sliding_window=16)
    assert windows(c) == ([16] * 5 + [None]) * 2


def test_qwen2_slides_only_where_told():
    fields = {"sliding_window": 16, "max_window_layers": 3}
    assert windows(config("qwen2", **SMALL, **fields)) == [None] * 4
    assert windows(config("qwen2", **SMALL, **fields, use_sliding_window=True)) == [None, None, None, 16]


def test_explicit_layer_types_win():
    c = config(
        "qwen3",
        **SMALL,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        use_sliding_window=True,
    )
    assert windows(c) == [8, None, 8, None]


def test_configurations_without_layer_types():
    plain = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    assert windows(SimpleNamespace(**plain, sliding_window=8, sliding_window_pattern=2)) == [8, None, 8, None]
    assert windows(SimpleNamespace(**plain, sliding_window=8, use_sliding_window=False)) == [None] * 4
    assert windows(SimpleNamespace(**plain, sliding_window=0)) == [None] * 4


FAMILIES = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "phi",
    "phi3",
    "cohere",
]
FAMILIES += [
    "cohere2",
    "gpt_oss",
    "olmo3",
    "exaone4",
    "smollm3",
    "starcoder2",
    "granite",
    "stablelm",
    "gpt_neox",
    "opt",
    "glm4",
    "ministral",
    "modernbert-decoder",
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_windows_are_those_of_the_stock_cache(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    c = config(model_type)
    stock = transformers.DynamicCache(config=c)
    assert windows(c) == [layer.sliding_window if layer.is_sliding else None for layer in stock.layers]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_shapes_are_what_the_model_writes(model_type):
    torch = pytest.importorskip("torch")
    c = config(
        model_type, **SMALL, pad_token_id=0, sliding_window=8, **({} if model_type == "phi3" else {"head_dim": 32})
    )
    model = transformers.AutoModelForCausalLM.from_config(c)
    cache = model(torch.arange(5).unsqueeze(0), use_cache=True).past_key_values
    for g, layer in zip(layer_geometries(c), cache.layers, strict=True):
        assert layer.keys.shape[1::2] == layer.values.shape[1::2] == (g.num_kv_heads, g.head_dim)


def test_the_text_part_of_a_multimodal_configuration_counts():
    c = transformers.Gemma3Config(
        text_config={**SMALL, "head_dim": 16, "sliding_window": 16, "max_position_embeddings": 99}
    )
    assert layer_geometries(c) == layer_geometries(c.text_config)
    assert text_config(c) is c.text_config and max_context(c) == 99


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "fields", "parts"),
    [
        ("mamba", {}, ("MambaConfig", "'linear_attention'")),
        ("deepseek_v4", {}, ("layer 0", "'heavily_compressed_attention'", "full_attention")),
        ("rwkv", {}, ("RwkvConfig", "num_attention_heads")),
    ],
)
def test_other_caches_are_refused_with_the_reason(model_type, fields, parts):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    with raises(UnsupportedError, *parts):
        layer_geometries(config(model_type, **fields))


def test_layers_that_store_nothing_are_left_out_and_said_to_be():
    c = config("qwen3_next", **SMALL, layer_types=["linear_attention", "full_attention"] * 2, head_dim=16)
    assert layer_geometries(c) == (LayerGeometry(num_kv_heads=2, head_dim=16),) * 2
    assert [(p.kind, p.stored, p.has_state) for p in layer_places(c)] == [
        ("linear_attention", None, True),
        ("full_attention", 0, False),
        ("linear_attention", None, True),
        ("full_attention", 1, False),
    ]
    assert stored_at(c) == {1: 0, 3: 1}
    assert [p.kind for p in layer_places(config("nemotron_h"))] == ["linear_attention", "moe", "full_attention", "mlp"]
    assert {p.kind: p.has_state for p in layer_places(config("falcon_h1"))} == {"hybrid": True}


def test_shared_layers_read_the_newest_of_their_type_before_them():
    places = layer_places(config("gemma3n_text"))
    own, shared = places[:20], places[20:]
    assert (
        [p.stored for p in own] == list(range(20)) and not any(p.shares for p in own) and all(p.shares for p in shared)
    )
    assert {(p.kind, p.stored) for p in shared} == {("sliding_attention", 18), ("full_attention", 19)}
    assert len(layer_geometries(config("gemma3n_text"))) == 20


def test_chunks_are_windows_that_begin_anew():
    kinds = {(g.chunked, g.sliding_window) for g in layer_geometries(config("llama4_text"))}
    assert kinds == {(True, 8192), (False, None)}
    chunked, plain = (
        LayerGeometry(num_kv_heads=2, head_dim=16, sliding_window=32, chunked=True),
        LayerGeometry(num_kv_heads=2, head_dim=16),
    )
    # so pages that were saved before have the format ids they had
    assert from_dict(to_dict(chunked)) == chunked and "chunked" not in to_dict(plain)
    with raises(SpecError, "chunked=True", "sliding_window"):
        LayerGeometry(num_kv_heads=2, head_dim=16, chunked=True)


def test_the_decoder_of_an_encoder_counts():
    c = config(
        "bart", encoder_layers=3, decoder_layers=5, encoder_attention_heads=4, decoder_attention_heads=8, d_model=128
    )
    assert layer_geometries(c) == layer_geometries(text_config(c)) == (LayerGeometry(num_kv_heads=8, head_dim=16),) * 5
    assert len(layer_geometries(config("t5", num_layers=2, num_decoder_layers=7))) == 7


@pytest.mark.parametrize(
    ("fields", "error", "parts"),
    [
        ({"num_key_value_heads": 3}, SpecError, ("num_attention_heads=4", "num_key_value_heads=3")),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            SpecError,
            ("hidden_size=64", "num_attention_heads=5", "head_dim"),
        ),
        ({"num_hidden_layers": None}, UnsupportedError, ("num_hidden_layers", "--layers", "--kv-heads", "--head-dim")),
        ({"layer_types": ["full_attention"]}, SpecError, ("num_hidden_layers=4", "1 layer_types")),
        (
            {"layer_types": ["sliding_attention"] * 4},
            SpecError,
            ("layer 0", "'sliding_attention'", "sliding_window=None"),
        ),
        ({"layer_types": ["made_up"] * 4}, UnsupportedError, ("'made_up'", "full_attention")),
        ({"v_head_dim": 8}, UnsupportedError, ("width 16", "width 8")),
        ({"hidden_size": None}, UnsupportedError, ("head_dim", "hidden_size")),
    ],
)
def test_numbers_that_cannot_be_are_refused(fields, error, parts):
    with raises(error, *parts):
        layer_geometries(SimpleNamespace(**{**SMALL, **fields}))


# -- loading --------------------------------------------------------------------------------------------------------


def test_directory_and_file_give_the_same_geometry(tmp_path):
    c = config("gemma2", **SMALL, head_dim=16, sliding_window=16)
    c.save_pretrained(tmp_path)
    (tmp_path / "other.json").write_text((tmp_path / "config.json").read_text())
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json", tmp_path / "other.json"):
        assert layer_geometries(load_config(path)) == layer_geometries(c)


def asked(*args, **kwargs):
    raise AssertionError("the network was asked")


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/dir",
        "./nothing",
        "../nothing",
        "~/no/such/dir",
        "missing.json",
        "no/such/gguf.gguf",
        "a/b/c",
        "folder/",
        "",
    ],
)
def test_missing_files_never_ask_the_network(monkeypatch, name):
    from kvbits.integrations.models import load_model

    monkeypatch.setattr("socket.getaddrinfo", asked)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", asked)
    for read in (load_config, load_model):
        with raises(SpecError, f"'{name}'", "config.json", "embedded"):
            read(name)


def test_a_hub_id_without_a_network_fails_at_once(monkeypatch):
    """Transformers asks six times, for half a minute."""

    def unknown(host, port):
        assert host == "huggingface.co"
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    for name in ("missing_folder", "org/missing"):
        with raises(SpecError, f"'{name}'", "huggingface.co", "hf download", "HF_ENDPOINT"):
            find_model(name)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # names are then the proxy's to look up
    assert find_model("org/missing") == "org/missing"
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # Transformers fails at once itself
    assert find_model("org/missing") == "org/missing"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda repo, name: "/cache/config.json" if repo == "org/cached" else None,
    )
    assert find_model("org/cached") == "org/cached"


def test_a_home_directory_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config("llama", **SMALL).save_pretrained(tmp_path / "m")
    assert find_model("~/m") == tmp_path / "m"
    assert len(layer_geometries(load_config("~/m"))) == 4


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    with raises(SpecError, "config.json", "model_type"):
        load_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with raises(SpecError, "config.json"):
        load_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "made_up_model"}))
    with raises(SpecError, "made_up_model"):
        load_config(tmp_path)


def test_an_architecture_that_transformers_does_not_read_is_not_called_damaged(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "recurrent.gguf"
    w = gguf.GGUFWriter(path, "rwkv6")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with raises(SpecError, "recurrent.gguf", "rwkv6", "config.json") as refusal:
        load_config(path)
    assert "download" not in str(refusal.value)
    path.write_bytes(path.read_bytes()[:40])
    with raises(SpecError, "recurrent.gguf", "download"):
        load_config(path)


def test_gguf_metadata_is_enough_and_is_parsed_once(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(3)
    w.add_context_length(77)
    w.add_embedding_length(64)
    w.add_feed_forward_length(64)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_rope_freq_base(1e4)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    c = load_config(path)
    assert layer_geometries(c) == (LayerGeometry(num_kv_heads=2, head_dim=16),) * 3
    assert max_context(c) == 77
    parse, parsed = gguf.GGUFReader.__init__, []
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *args: parsed.append(args) or parse(*args))
    load_config(path), load_config(path)
    assert not parsed, "a file that is as it was is not parsed again"
    forget_parsed()
    load_config(path), load_config(path)
    assert len(parsed) == 1
    path.write_bytes(path.read_bytes() + b"\0")
    load_config(path)
    assert len(parsed) == 2


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "Qwen/Qwen3-8B", "_a/b_", "a" * 96),
        *("a" * 97, "a/b.git", "a--b", "a..b", "-a", "a/b-", "a./b", "a/b/c"),
        *("\u6a21\u578b", "na\u00efve", "\u0645\u0648\u062f\u0644"),
    ],
)
def test_what_the_hub_takes_for_no_id_is_refused_before_it_is_asked(name, monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    try:
        hub.utils.validate_repo_id(name)
    except hub.errors.HFValidationError:
        with raises(SpecError, "config.json", "embedded"):
            find_model(name, look_up=False)
    else:
        assert find_model(name, look_up=False) == name
