"""A model's config.json as data: no Transformers, no torch, and none of the code that a model brings along.

    folder, config.json, hub id  --read_config-->  Fields  --geometry.layer_geometries-->  (LayerGeometry, ...)

A config.json leaves out what its class has by default (Gemma 3's text part states neither heads nor their width), so
the defaults of every model that generates text stand in families.json, as Transformers has them; tests/make_families.py
wrote it, and a test compares both on every family. What is not listed there is refused, never guessed. GGUF files have
no config.json: `geometry.load_config` reads them.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import SpecError
from .geometry import find_model, load_config
from .spec import MOST_TOKENS

FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "v_head_dim",
    "hidden_size",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "attention_chunk_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "is_encoder_decoder",
    "num_kv_shared_layers",
    "multi_query",
    "new_decoder_architecture",
    "max_position_embeddings",
    "vocab_size",
    "intermediate_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "q_lora_rank",
    "hidden_size_per_layer_input",
    "num_decoder_layers",
    "d_kv",
    "decoder_layers",
    "decoder_attention_heads",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_d_ssm",
    "mamba_expand",
    "mamba_ngroups",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "conv_L_cache",
    "index_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "dim_head",
)
"""What is asked of a configuration: of a cache's shape, and of a model's weights."""
_FLAGS = (
    "attention_k_eq_v",
    "use_sliding_window",
    "is_encoder_decoder",
    "multi_query",
    "new_decoder_architecture",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)
_NAMED = ("layer_types", "layers_block_type", "block_types", "kv_sharing_modes")
"""Lists of a text for each layer."""
_MAY_DIFFER = (
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
"""Numbers that some families list for each layer."""
MOST_LAYERS = 4096
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Families whose config.json may have the fields of its text part beside those of the others."""
NESTED = ("attn_config",)
"""Parts of a configuration that are looked into by attribute."""


_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""What the letters of Nemotron-H's pattern stand for."""


class Fields:
    """What a config.json says, and what its family has where it says nothing: attributes as of a Transformers
    configuration.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, stated: dict[str, Any]) -> None:
        family = _family(str(stated.get("model_type", "")))
        self.stated = stated = _checked(stated)
        self.model_type = str(stated["model_type"])
        self.described = f"a {self.model_type} model"
        for name, value in (family["defaults"] | stated).items():
            setattr(self, name, Fields._plain(_checked(value)) if name in NESTED and isinstance(value, dict) else value)
        self._aliased = tuple(family.get("alias", {}))
        for name, called in family.get("alias", {}).items():
            if called in stated or not hasattr(self, name):
                setattr(self, name, getattr(self, called, None))
        # Nemotron-H
        if isinstance(pattern := stated.get("hybrid_override_pattern"), str) and not stated.get("layers_block_type"):
            self.layers_block_type = [_BLOCKS.get(c, c) for c in pattern]
        if (blocks := getattr(self, "layers_block_type", None)) and "num_hidden_layers" not in stated:
            self.num_hidden_layers = len(blocks)
        self.dtype = stated.get("dtype") or stated.get("torch_dtype")
        # that of others, without the query's own token
        if self.model_type == "mimo_v2_flash" and "sliding_window_size" in stated:
            self.sliding_window = int(stated["sliding_window_size"]) + 1
        if (
            self.model_type.startswith("gemma4")
            and "per_layer_config" not in stated
            and getattr(self, "global_head_dim", None) is None
        ):
            self.global_head_dim = 512
        if isinstance(own := stated.get("per_layer_config"), dict):
            self.is_heterogeneous = True
            self.per_layer_config = [
                self._but(own.get(str(i)) or own.get(f"{i:02d}") or {})
                for i in range(int(stated.get("num_hidden_layers", 0)))
            ]
        self._text = _text_part(stated, family)
        if self._text is None and not stated.get("layer_types") and not getattr(self, "layers_block_type", None):
            self.layer_types = _types(self, family)

    def _but(self, other: dict[str, Any]) -> Any:
        """These fields, with some of them changed."""
        return Fields._plain({k: v for k, v in self.__dict__.items() if k != "per_layer_config"} | _checked(other))

    @staticmethod
    def _plain(part: dict[str, Any]) -> Any:
        found = object.__new__(Fields)
        found.__dict__.update(part)
        return found

    def get_text_config(self, decoder: bool = True) -> Fields:
        """The part that generates text; of one configuration for encoder and decoder, the decoder's numbers."""
        if (text := getattr(self, "_text", None)) is not None:
            return text.get_text_config()
        if not getattr(self, "is_encoder_decoder", False) or not hasattr(self, "_text"):  # or a layer's own fields
            return self
        own = {"num_hidden_layers": "decoder_layers", "num_attention_heads": "decoder_attention_heads"}
        if "num_key_value_heads" in self._aliased:  # of the encoder
            own["num_key_value_heads"] = "decoder_attention_heads"
        found: Fields = self._but(
            {"is_encoder_decoder": False}
            | {name: x for name, called in own.items() if (x := getattr(self, called, None)) is not None}
        )
        return found


def read_config(model: str | os.PathLike[str]) -> Any:
    """The configuration of a model, as data.

    Imports neither Transformers nor torch (of a GGUF file it does: the header has no config.json).

    Args:
        model: a directory, a config.json, a GGUF file, or a hub id, of which the cached config.json is read, or that
            file alone fetched.

    Raises:
        SpecError: nothing there, no JSON, or a model_type that is not known.
    """
    path = find_model(model)
    if isinstance(path, Path) and path.suffix == ".gguf":
        return load_config(model)
    file = _fetched(path) if isinstance(path, str) else path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        raise SpecError(
            f"{file} is neither a config.json nor a GGUF file; give the directory that holds a model's config.json and"
            " weights"
        )
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        files = (
            ", ".join(sorted(str(found) for found in path.glob("*.gguf"))[:3])
            if isinstance(path, Path) and path.is_dir()
            else ""
        )
        way_out = (
            f"give one of its GGUF files: {files}"
            if files
            else "give the directory that holds a model's config.json and weights"
        )
        raise SpecError(f"{path} holds no config.json; {way_out}") from e
    except (OSError, ValueError) as e:
        raise SpecError(f"cannot read the configuration of {str(model)!r}: {file}: {e}") from e
    if not isinstance(stated, dict) or not stated.get("model_type"):
        raise SpecError(f"{file} has no model_type, so it is not a Transformers config.json")
    return Fields(stated)


def _checked(stated: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says, its whole numbers as int.

    Raises:
        SpecError: a field that is counted with holds no number of its kind, or more than any model has.
    """
    found = dict(stated)
    for name in (*(f for f in FIELDS if f not in _FLAGS), "kv_n_heads"):
        least, most = int(name == "num_attention_heads"), MOST_LAYERS if name == "num_hidden_layers" else MOST_TOKENS
        if (value := stated.get(name)) is None or (isinstance(value, list) and name in _MAY_DIFFER):
            continue
        if type(value) not in (int, float) or not least <= value <= most or value != int(value):
            raise SpecError(
                f"{name}={str(value)[:60]} of a config.json must be a whole number from {least} to {most}; correct the"
                " file"
            )
        found[name] = int(value)
    for name in _NAMED:
        if (value := stated.get(name)) is not None and not (
            isinstance(value, list) and all(isinstance(x, str) for x in value)
        ):
            raise SpecError(
                f"{name}={str(value)[:60]} of a config.json must be a list with a text for each layer; correct the file"
            )
    for name in ("quantization_config", "text_config"):
        if (value := stated.get(name)) is not None and not isinstance(value, dict):
            raise SpecError(f"{name}={str(value)[:60]} of a config.json must be an object; correct the file")
    return found


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(hub_id, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise SpecError(
            f"cannot fetch the config.json of {hub_id!r}: {reason}; give a local directory or a config.json"
        ) from e


@functools.cache
def _families() -> dict[str, Any]:
    text = importlib.resources.files("kvbits").joinpath("families.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def known() -> tuple[str, ...]:
    """Every model_type that is read."""
    return tuple(_families()["families"])


def _family(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] | None = _families()["families"].get(model_type)
    if found is None:
        raise SpecError(
            f"what a config.json of model_type {model_type!r} leaves out is unknown (known are the {len(known())} types"
            f" of Transformers {_families()['transformers']}), and code that a model brings along is never run; give"
            " --layers, --kv-heads and --head-dim instead"
        )
    return found


def _text_part(stated: dict[str, Any], family: dict[str, Any]) -> Fields | None:
    """The nested configuration that generates text, if there is one."""
    part = stated.get("text_config")
    if isinstance(part, dict):
        return Fields({"model_type": family.get("text") or stated["model_type"]} | part)
    if "text" not in family:
        return None
    if "num_hidden_layers" not in stated or stated["model_type"] not in _FLAT:
        kind = stated["model_type"]
        raise SpecError(
            f"a config.json of {kind} without text_config, so its layers are unknown; give --layers, --kv-heads and"
            " --head-dim"
        )
    # Qwen2-VL's are flat
    return Fields({k: v for k, v in stated.items() if not isinstance(v, dict)} | {"model_type": family["text"]})


def _types(config: Fields, family: dict[str, Any]) -> list[str] | None:
    """Types of layers that a config.json does not list: by its window's pattern, else as the family has them; None
    where `geometry` infers them.
    """
    count, pattern = getattr(config, "num_hidden_layers", None), config.stated.get("sliding_window_pattern")
    if not isinstance(count, int):
        return None
    if {"max_window_layers", "use_sliding_window"} <= family["defaults"].keys():  # Qwen
        first, every = (0, 2) if config.model_type.endswith("moe") else (config.max_window_layers, 1)
        slides = config.use_sliding_window and getattr(config, "sliding_window", None)
        last = config.max_window_layers if every == 2 else count
        return [
            "sliding_attention" if slides and first <= i < last and i % every == 0 else "full_attention"
            for i in range(count)
        ]
    if "types" not in family:
        return None
    types: list[str] = family["types"]
    if isinstance(pattern, int) and pattern > 1:
        types = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
    found = [types[i % len(types)] for i in range(count)]
    ends = {0: family.get("first"), len(found) - 1: family.get("last")}
    return [ends.get(i) or kind for i, kind in enumerate(found)]
