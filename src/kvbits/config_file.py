"""A model's config.json as data: no Transformers, no torch, and none of the code that a model brings along.

    folder, config.json, hub id  --read_config-->  Fields  --geometry.layer_geometries-->  (LayerGeometry, ...)

A config.json leaves out what its class has by default (Gemma 3's text part states neither heads nor their width), so
the defaults of every model that generates text stand in families.json, as Transformers has them; tests/make_families.py
wrote it, and a test compares both on every family. What is not listed there is refused, never guessed. GGUF files have
no config.json: `geometry.load_config` reads them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.resources
import json
import math
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from . import gguf_header
from .errors import SpecError
from .geometry import cached_folder, find_model, is_gguf, load_config, without_config
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
    "n_recurrent_loops",
    "n_input_layers",
    "n_recurrent_layers",
    "loop_num_passes",
    "loop_layer_index_start",
    "loop_layer_index_end",
    "qkv_bias",
    "add_qkv_bias",
    "alibi",
)
"""Fields that are read from a configuration: of a cache's shape, and of a model's weights."""
_FLAGS = (
    "attention_k_eq_v",
    "use_sliding_window",
    "is_encoder_decoder",
    "multi_query",
    "new_decoder_architecture",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "add_qkv_bias",
    "alibi",
)
_LISTS = ("layer_types", "layers_block_type", "block_types", "kv_sharing_modes")
"""Lists of a text for each layer."""
NAMED = (*_LISTS, "attn_config", "cross_attention_layers", "recurrent_kv_cache_mode", "model_type")
"""Fields that are read from a configuration and are not numbers."""
_MAY_DIFFER = (
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "conv_kernel",
)
"""Numbers that some families list for each layer."""
MOST_LAYERS = 4096
_COMPUTED = frozenset((*FIELDS, "kv_n_heads"))
_LAYER_NAMES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Names of layer types in older files, and what Transformers calls them."""


QUANTIZERS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files where quantizers write what they did, beside a config.json that does not say it."""


class Fields:
    """Fields of a config.json, and what its family makes of them: attributes as of a Transformers configuration.

    Raises:
        SpecError: an unknown model_type, or fields from which its family computes nothing.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    else:

        def __getattr__(self, name: str) -> Any:
            own = self.__dict__
            if (called := own.get("_alias", {}).get(name)) is not None:
                return getattr(self, called)
            if name in own.get("_properties", {}):
                try:
                    return _run(own["_properties"][name], self, own["_names"])
                except (NameError, TypeError) as e:
                    raise AttributeError(f"{name}: {e}") from e
            if name == "sub_configs_defaults":
                parts = own["_family"].get("parts", {})
                return {key: SimpleNamespace(init_kwargs=part.get("init", {})) for key, part in parts.items()}
            if "def" in (helper := own.get("_family", {}).get("names", {}).get(name, {})):
                return own["_names"][name] if helper.get("static") else functools.partial(own["_names"][name], self)
            raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[self.__dict__.get("_alias", {}).get(name, name)] = value

    def __init__(self, stated: dict[str, Any]) -> None:
        family, kind = _family(stated)
        self.stated = stated = _checked(stated, family.get("alias", {}))
        own = self.__dict__
        own["_alias"], own["_family"] = family.get("alias", {}), family
        own["_properties"], own["_names"] = family.get("properties", {}), _provided(family)
        self.model_type, self.described = kind, f"a {kind} model"
        self.unturned, self.unattached = family.get("unturned"), family.get("unattached")
        self.scale = family.get("scale")
        self.dtype = stated.get("dtype") or stated.get("torch_dtype")
        own |= copy.deepcopy(family["defaults"])
        kwargs = {}
        for name, value in stated.items():
            if name in own["_properties"] or (name not in own and name != "model_type"):
                kwargs[name] = copy.deepcopy(value)
            elif name != "model_type":
                own[name] = copy.deepcopy(value)
        try:
            self._init(list(family.get("init", ())), kwargs)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, NameError) as e:
            raise SpecError(
                f"the fields of this config.json do not fit a {kind} model ({type(e).__name__}: {e}); correct the file"
            ) from e
        own |= {k: int(v) for k in _COMPUTED if type(v := own.get(k)) is float and v.is_integer()}

    def _init(self, bodies: list[str], kwargs: dict[str, Any]) -> None:
        """Run what the classes of a family do, the most derived one first."""
        if not bodies:
            self._finish(kwargs)
        else:
            _run(bodies[0], self, self._names, kwargs, lambda **rest: self._init(bodies[1:], rest))

    def _finish(self, kwargs: dict[str, Any]) -> None:
        """Set what every configuration has: its parts, other fields, what differs between layers, names of layers."""
        for name, part in self._family.get("parts", {}).items():
            if (given := getattr(self, name, None)) is None and self._family.get("flat"):
                given = {k: v for k, v in self.stated.items() if not isinstance(v, dict) and k != "model_type"}
            if given is None and part.get("optional"):
                continue
            if not isinstance(given, Fields):
                given = part.get("init", {}) if given is None else given
                kind = given.get("model_type", part["type"]) if part.get("named") else part["type"]
                given = Fields(given | {"model_type": kind})
            setattr(self, name, given)
        layers = kwargs.pop("per_layer_config", None)
        for name, value in kwargs.items():
            if (setter := self._family.get("setters", {}).get(name)) is not None:
                _run(setter, self, self._names, {"value": value})
            elif name not in self._properties and name not in _OWN:
                setattr(self, name, value)
        if isinstance(layers, dict):
            self.is_heterogeneous = True
            own = {int(i): x for i, x in layers.items()}
            self.per_layer_config = [self._but(own.get(i, {})) for i in range(self.num_hidden_layers)]
        for name in ("layer_types", "layers_block_type"):
            if isinstance(types := self.__dict__.get(name), list):
                self.__dict__[name] = [_LAYER_NAMES.get(t, t) for t in types]

    def _but(self, other: dict[str, Any]) -> Fields:
        """Return these fields, with some of them changed."""
        found: Fields = object.__new__(Fields)
        found.__dict__.update({k: v for k, v in self.__dict__.items() if k != "per_layer_config"} | _checked(other))
        found.is_heterogeneous = False
        return found

    def get_text_config(self, decoder: bool = True) -> Fields:
        """Return the part that generates text; of one configuration for encoder and decoder, the decoder's numbers.

        Raises:
            ValueError: several parts do.
        """
        for name in self._family.get("text", ()):
            part = getattr(self, name, None)
            return self if part is None else part.get_text_config()
        if not getattr(self, "is_encoder_decoder", False) or any(
            isinstance(getattr(self, name, None), dict) for name in ("decoder", "generator", "text_config")
        ):
            return self
        own = {}
        for name, value in self.__dict__.items():
            if name.startswith("decoder_") and value is not None:
                short = {"layers": "num_hidden_layers", "attention_heads": "num_attention_heads"}
                called = short.get(name.removeprefix("decoder_"), name.removeprefix("decoder_"))
                own[self._alias.get(called, called)] = value
        return self._but(own | {"is_encoder_decoder": False})


_OWN = frozenset({"scale", "unturned", "unattached", "stated", "described", "get_text_config", "is_heterogeneous"})
"""Attributes of `Fields` that no config.json sets."""


def _run(
    source: str, of: Fields, names: dict[str, Any], kwargs: dict[str, Any] | None = None, go_on: Any = None
) -> Any:
    """Run statements of a configuration class of Transformers on fields."""
    space = dict(names)
    exec(_compiled(source), space)
    return space["run"](of, {} if kwargs is None else kwargs, go_on)


@functools.cache
def _compiled(source: str) -> Any:
    return compile("def run(self, kwargs, go_on):\n" + textwrap.indent(source, "    "), "families.json", "exec")


def _provided(family: dict[str, Any]) -> dict[str, Any]:
    """Return names of Transformers that the statements of a family use."""
    found: dict[str, Any] = {"math": math, "Sequence": Sequence, "remap_legacy_layer_types": _renamed}
    for name, what in family.get("names", {}).items():
        if "value" in what:
            found[name] = what["value"]
        elif "items" in what:
            found[name] = {k: v for k, v in what["items"]}
        elif "def" in what:
            exec(what["def"], found)
        elif "defaults" in what:
            found[name] = functools.partial(_plain_part, what["defaults"])
        else:
            found[name] = functools.partial(_typed_part, what["type"])
    return found


def _renamed(layer_types: list[str]) -> list[str]:
    return [_LAYER_NAMES.get(t, t) for t in layer_types]


def _plain_part(defaults: dict[str, Any], **stated: Any) -> Fields:
    found: Fields = object.__new__(Fields)
    found.__dict__.update(defaults | _checked(stated))
    return found


def _typed_part(model_type: str, **stated: Any) -> Fields:
    return Fields({k: v for k, v in stated.items() if k != "model_type"} | {"model_type": model_type})


def read_config(model: str | os.PathLike[str]) -> Any:
    """Return the configuration of a model, as data.

    Imports neither Transformers nor torch (of a GGUF file of an architecture that `gguf_header` does not read it does).

    Args:
        model: a directory, a config.json, a GGUF file, or a hub id. For an id the cached config.json is read, or
            that file alone fetched.

    Raises:
        SpecError: nothing there, no JSON, or a model_type that is not known.
    """
    path = find_model(model)
    if is_gguf(path):
        header = gguf_header.stated(path)
        return load_config(model) if header is None else Fields(header)
    file = _fetched(path) if isinstance(path, str) else path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        raise SpecError(
            f"{file} is neither a config.json nor a GGUF file; give the directory that holds a model's config.json and"
            " weights"
        )
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise without_config(path) from e
    except (OSError, ValueError) as e:
        raise SpecError(
            f"cannot read the configuration of {str(model)!r}: {file}: {e}; correct the file or download it again"
        ) from e
    if not isinstance(stated, dict) or not stated.get("model_type"):
        raise SpecError(f"{file} has no model_type, so it is not a Transformers config.json")
    return Fields(stated)


def _checked(stated: dict[str, Any], alias: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what a configuration says, its whole numbers as int; `alias` has the names that a family gives to fields.

    Raises:
        SpecError: a field that is counted with holds no number of its kind, or more than any model has.
    """
    found = dict(stated)
    if isinstance(pattern := stated.get("sliding_window_pattern"), str) and re.fullmatch("L*G", pattern):
        found["sliding_window_pattern"] = len(pattern)  # EXAONE 4.0 writes which layers are local and global
    counted = {f: f for f in (*(f for f in FIELDS if f not in _FLAGS), "kv_n_heads")}
    own = {called: f for f, called in (alias or {}).items() if f in counted}
    for name, field in (counted | own).items():
        least, most = int(field == "num_attention_heads"), MOST_LAYERS if field == "num_hidden_layers" else MOST_TOKENS
        if (value := found.get(name)) is None or (isinstance(value, list) and field in _MAY_DIFFER):
            continue
        if type(value) not in (int, float) or not least <= value <= most or value != int(value):
            text = f"; write it without quotes, as {value}" if isinstance(value, str) and value.isdecimal() else ""
            raise SpecError(
                f"{name}={_shown(value)} of a config.json must be a whole number from {least} to {most}{text}; correct"
                " the file"
            )
        found[name] = int(value)
    for name in _LISTS:
        if (value := stated.get(name)) is not None and not (
            isinstance(value, list) and all(isinstance(x, str) for x in value)
        ):
            raise SpecError(
                f"{name}={_shown(value)} of a config.json must be a list with a text for each layer; correct the file"
            )
    for name in _FLAGS:
        if not isinstance(value := stated.get(name), bool | None):
            raise SpecError(f"{name}={_shown(value)} of a config.json must be true or false; correct the file")
    for name in ("quantization_config", "text_config", "rope_parameters", "rope_scaling"):
        if (value := stated.get(name)) is not None and not isinstance(value, dict):
            raise SpecError(f"{name}={_shown(value)} of a config.json must be an object; correct the file")
    return found


def _shown(value: Any) -> str:
    """Return a value as its file has it, so that "36" and 36 differ."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}.."


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if (folder := cached_folder(hub_id)) is not None:
        return folder / "config.json"
    try:
        found = Path(hf_hub_download(hub_id, "config.json"))
        for name in QUANTIZERS:
            with contextlib.suppress(HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):  # most have none
                hf_hub_download(hub_id, name)
        return found
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
    """Return every model_type that is read."""
    return tuple(_families()["families"])


def _family(stated: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return (what is known of a family, its name in Transformers)."""
    kind = str(stated.get("model_type", ""))
    if kind == "mistral" and "layer_types" in stated:  # as Transformers reads it
        kind = "ministral"
    if (found := _families()["families"].get(kind)) is None:
        raise SpecError(
            f"what a config.json of model_type {kind!r} leaves out is unknown (known are the {len(known())} types"
            f" of Transformers {_families()['transformers']}), and code that a model brings along is never run; give"
            " --layers, --kv-heads and --head-dim instead"
        )
    return found, kind
