"""A config.json read as data says what Transformers reads from it, for every family; nothing that a model brings along
is run.
"""

from __future__ import annotations

import json
import struct

import pytest
from commands import error
from messages import raises
from typer.testing import CliRunner

from kvbits.cli import app
from kvbits.config_file import known, read_config
from kvbits.errors import SpecError, UnsupportedError
from kvbits.geometry import PlainLayer, layer_geometries, load_config, plain_layers

transformers = pytest.importorskip("transformers")
make_families = pytest.importorskip("make_families")


def write(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


COMMON = (
    "llama",
    "mistral",
    "mistral3",
    "mixtral",
    "qwen2",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "gpt_oss",
    "deepseek_v3",
    "olmo2",
    "glm4_moe",
    "gpt2",
    "opt",
    "falcon",
    "smollm3",
    "granite",
)


def test_families_are_read_as_transformers_reads_them():
    """The common ones and every tenth of the others; make_families.py compares all of them when it writes the table."""
    assert len(known()) > 250 and set(COMMON) <= set(known())
    there = [t for t in known() if t in make_families.CONFIG_MAPPING]
    assert len(there) > 0.9 * len(known())
    found = {t: d for t in {*COMMON, *there[::10]} if t in there and (d := make_families.differs(t))}
    assert not found, found


def test_a_nested_text_part_has_its_family_s_defaults(tmp_path):
    """Gemma 3's published text_config states neither heads nor their width."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    write(tmp_path, model_type="gemma3", text_config=text, vision_config={"model_type": "siglip_vision_model"})
    layers = layer_geometries(read_config(tmp_path))
    assert layers == layer_geometries(load_config(tmp_path)) and {(g.num_kv_heads, g.head_dim) for g in layers} == {
        (4, 256)
    }
    assert [g.sliding_window for g in layers[:6]] == [1024] * 5 + [None]


def test_code_that_a_model_brings_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, model_type="made_up", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("it asked"))
    commands = (f"plan {folder}", f"plan {folder / 'config.json'}", f"check {folder}", f"fit {folder} --out x.json")
    for command in commands:
        error(command, "never run", input="y\n")
    assert not (tmp_path / "ran").exists()


def test_what_is_no_configuration_is_refused_in_a_sentence(tmp_path):
    with raises(SpecError, tmp_path, "config.json"):
        read_config(tmp_path)
    (tmp_path / "model.gguf").touch()
    with raises(SpecError, "config.json", tmp_path / "model.gguf"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with raises(SpecError, tmp_path, "config.json"):
        read_config(tmp_path)
    (tmp_path / "cut.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 5) + b"cut")
    with raises(SpecError, "cut.gguf", "download"):
        read_config(tmp_path / "cut.gguf")
    write(tmp_path, a=1)
    with raises(SpecError, "config.json", "model_type"):
        read_config(tmp_path)
    write(tmp_path, model_type="made_up")
    with raises(SpecError, "'made_up'", "--layers", "--kv-heads", "--head-dim"):
        read_config(tmp_path)


def test_a_hub_id_is_its_cached_file(tmp_path, monkeypatch):
    file = write(tmp_path, model_type="llama", num_hidden_layers=3) / "config.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, name: str(file))
    assert len(layer_geometries(read_config("some/model"))) == 3


def test_what_16_bits_hold_of_models_that_pages_cannot(tmp_path):
    latent = read_config(write(tmp_path, model_type="deepseek_v3", num_hidden_layers=3))
    assert plain_layers(latent) == (PlainLayer(512 + 64),) * 3
    hybrid = read_config(write(tmp_path, model_type="qwen3_next", num_hidden_layers=8))
    assert plain_layers(hybrid) == (PlainLayer(2 * 2 * 256, heads=2),) * 2
    unlike = read_config(
        write(
            tmp_path,
            model_type="llama",
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=192,
            v_head_dim=128,
        )
    )
    assert plain_layers(unlike) == (PlainLayer(2 * (192 + 128), heads=2),)
    with pytest.raises(UnsupportedError):
        layer_geometries(unlike)
    assert [g.token_elements for g in layer_geometries(latent)] == [x.elements for x in plain_layers(latent)]


def test_what_16_bits_hold_of_latent_attention_is_what_transformers_caches(tmp_path):
    torch = pytest.importorskip("torch")
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 64,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
    }
    config = load_config(write(tmp_path, model_type="deepseek_v3", **small))
    cache = transformers.AutoModelForCausalLM.from_config(config)(
        torch.arange(5).unsqueeze(0), use_cache=True
    ).past_key_values
    held = sum(x.numel() for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == 5 * sum(layer.elements for layer in plain_layers(read_config(tmp_path)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "1e9"),
        ("num_attention_heads", 0),
        ("head_dim", float("inf")),
        ("head_dim", [1]),
        ("num_key_value_heads", float("nan")),
        ("num_kv_shared_layers", {"a": 1}),
        ("sliding_window", -1),
        ("vocab_size", True),
        ("attention_chunk_size", ""),
        ("kv_lora_rank", 0.5),
        ("layer_types", 7),
        ("layer_types", [None]),
        ("quantization_config", 1),
        ("text_config", "x"),
    ],
)
def test_fields_of_another_kind_or_size_are_refused_by_name(tmp_path, field, value):
    """They ended commands with a traceback, or in a loop over 10**30 layers."""
    write(tmp_path, **{"model_type": "llama", field: value})
    error(f"plan {tmp_path} --gpu-memory 80GB", f"{field}=", "of a config.json must be")


def test_a_number_for_each_layer_or_none_is_estimated_or_asked_for(tmp_path):
    for other in ({"intermediate_size": [64, 64]}, {"vocab_size": None}):
        write(tmp_path, **{"model_type": "llama", "num_hidden_layers": 2, "head_dim": 64.0} | other)
        assert layer_geometries(read_config(tmp_path))[0].head_dim == 64
        done = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpu-memory", "80GB"])
        assert done.exit_code in (0, 2) and "give --weights" in done.stderr, done.stderr


def test_the_header_of_a_gguf_file_says_what_transformers_reads_from_it():
    from kvbits import embedded

    try:
        path = embedded.embedded_model()
    except UnsupportedError:
        pytest.skip("no GGUF file is installed")
    ours, theirs = read_config(path), load_config(path)
    assert make_families.facts(ours) == make_families.facts(theirs) and type(ours).__name__ == "Fields"
    assert (ours.vocab_size, ours.tie_word_embeddings) == (theirs.vocab_size, theirs.tie_word_embeddings)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "rope_scaling": 2.5},
        {"model_type": "pegasus", "rope_parameters": [1]},
        {"model_type": "gpt2", "n_layer": "4"},
        {"model_type": "gpt2", "n_head": -1},
        {"model_type": "jamba", "num_attention_heads": [1, 2]},
        {"model_type": "llama", "attention_bias": 2.5},
        {"model_type": "gemma4_text", "is_encoder_decoder": "4"},
        {"model_type": "inkling_text", "swa_num_key_value_heads": None},
    ],
    ids=str,
)
def test_plan_refuses_a_field_of_another_kind_without_a_trace(tmp_path, fields):
    error(f"plan {write(tmp_path, **fields)} --gpu-memory 80GB")
