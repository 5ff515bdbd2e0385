"""Shape of a model's KV cache, read from its Transformers configuration: one `LayerGeometry` per attention layer.

    config.json, directory, GGUF file, hub id  --load_config-->  configuration  --layer_geometries-->  (LayerGeometry,
                                                                 ...)

Families differ in three things. Heads are `num_key_value_heads`, `multi_query`, or as many as query heads. `head_dim`
is stated, or hidden_size / heads. Layers see a window as `layer_types` states, where the family has it. Gemma 2/3, Qwen
2/3 and Cohere 2 compute it from `sliding_window_pattern`, `use_sliding_window` and `max_window_layers`. In other
families every layer of a model with a `sliding_window` sees it (Mistral, Phi-3). These are the rules of
`transformers.cache_utils.get_layer_types_and_kwargs`, which is not called because its return type changed between 5.17
and 5.23 and because importing it imports torch; a test compares the two on every family.

Models whose cache is something else than one key and one value per kv head and token are refused, never guessed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import socket
import struct
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from . import embedded
from .errors import SpecError, UnsupportedError
from .files import home
from .spec import LayerGeometry

_HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
"""Names that the hub takes as ids (`huggingface_hub.utils.validate_repo_id`)."""
_DOWNLOAD = (
    "run `hf download ID --local-dir FOLDER` where there is a network and give FOLDER, set HF_ENDPOINT to a mirror, or"
    " take `embedded`"
)
_SLIDING = ("sliding_attention", "hybrid_sliding")
_INDEXED = "indexed_attention"
"""Layers that also keep an index key of each token, by which they choose the tokens that they attend to (DeepSeek
sparse attention).
"""
_FULL = ("full_attention", "hybrid", _INDEXED)
_CHUNKED = "chunked_attention"
_BESIDE = ("hybrid", "hybrid_sliding", _INDEXED)
"""Types of layers that attend and keep something beside their keys and values."""
_STATES = ("linear_attention", "conv", *_BESIDE)
"""Types of layers that keep a state: of one size however many tokens there were (convolutions, Mamba, gated delta
rule), or index keys.
"""
_OLD_NAMES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "recurrent": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
_UNREADABLE = (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError, struct.error)
"""Errors that Transformers raises for a configuration or a GGUF file that it does not read."""
CROSS = "cross_attention"
"""Layers that attend to an image alone (Llama 3.2 Vision): they keep its keys and values and none of the text."""
_NOTHING = ("moe", "mlp", CROSS)
"""Types of layers that keep nothing of the tokens before."""
_UNLIKE_WIDTHS = ("mimo_v2_flash",)
"""Families that cache keys of `head_dim` and values of `v_head_dim`, and twice the kv heads where layers slide (their
attention says so, no field does).
"""


def find_model(model: str | os.PathLike[str], *, look_up: bool = True) -> Path | str:
    """Return the local path of a model, or its hub id.

    The name `embedded` means the embedded model, unless a path is called so.

    What cannot be found is refused at once: Transformers would ask the hub for half a minute, for anything that has the
    form of an id.

    Args:
        look_up: of a hub id, also whether it could be fetched.

    Raises:
        SpecError: nothing is there, and the name is not a hub id, or such an id is not in the cache while the hub's
            host is unknown here.
        UnsupportedError: the embedded model is not installed.
    """
    path, text = home(model, "model:"), str(model)
    if text and path.exists():
        return path
    if text == embedded.NAME:
        return embedded.embedded_model()
    if _HUB_ID.fullmatch(text) is None or path.suffix in (".json", ".gguf"):
        raise SpecError(
            f"no such file or directory: {text!r}; give a local directory, a config.json, a GGUF file, a hub id like"
            " Qwen/Qwen2.5-0.5B-Instruct, or `embedded`"
        )
    if not look_up:
        return text
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies() or cached_folder(text) is not None:
        return text
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as e:
        raise SpecError(
            f"no such file or directory: {text!r}; as a hub id it is not in the cache, and {host} cannot be reached"
            f" ({e.strerror or e}); {_DOWNLOAD}"
        ) from None
    return text


def cached_folder(hub_id: str) -> Path | None:
    """Return the local snapshot of a hub id, or None where its config.json is not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def without_config(path: Path | str) -> SpecError:
    """Return the error of a folder or a repository that holds no config.json; it names GGUF files that lie there."""
    files = sorted(str(found) for found in path.glob("*.gguf"))[:3] if isinstance(path, Path) and path.is_dir() else []
    way_out = (
        f"give one of its GGUF files: {', '.join(files)}"
        if files
        else "give the directory that holds a model's config.json and weights"
    )
    return SpecError(f"{path} holds no config.json; {way_out}")


def load_config(model: str | os.PathLike[str]) -> Any:
    """Return the Transformers configuration of a model. Reads local files where they exist; imports neither torch nor
    weights.

    Args:
        model: a local directory, a config.json, a GGUF file, or a hub id.

    Raises:
        SpecError: nothing there, or nothing that Transformers can read.
    """
    path = find_model(model)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        if isinstance(path, Path) and path.is_dir() and not (path / "config.json").exists():
            raise without_config(path)
        if isinstance(path, Path) and path.is_file() and not is_gguf(path):
            if path.suffix != ".json":
                raise SpecError(
                    f"{path} is neither a config.json nor a GGUF file; give the directory that holds a model's"
                    " config.json and weights"
                )
            fields = json.loads(path.read_text())
            if not isinstance(fields, dict) or "model_type" not in fields:
                raise SpecError(f"{path} has no model_type, so it is not a Transformers config.json")
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        with parsed_once(path):
            return AutoConfig.from_pretrained(**pretrained(path))
    except SpecError:
        raise
    except (*_UNREADABLE, StrictDataclassError) as e:
        reason = (str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__).rstrip(".;, ")
        if "trust_remote_code" in str(e):
            raise SpecError(
                f"{str(model)!r} needs code that it brings along, which kvbits never runs; give a model that"
                " Transformers knows by itself"
            ) from None
        way_out = (
            "the file is damaged or incomplete, so copy or download it again"
            if is_gguf(path) and isinstance(e, struct.error | ValueError) and "not supported" not in reason
            else "give a local directory, a config.json, a GGUF file or a hub id"
        )
        raise SpecError(f"cannot read the configuration of {str(model)!r}: {reason}; {way_out}") from None


def is_gguf(path: Path | str) -> TypeGuard[Path]:
    """Return whether a model is one GGUF file."""
    return isinstance(path, Path) and path.suffix == ".gguf"


def pretrained(path: Path | str) -> dict[str, Any]:
    """Return arguments of Transformers' `from_pretrained` for what `find_model` returned."""
    # None would ask whether to run the model's own code
    how: dict[str, Any] = {"trust_remote_code": False}
    if is_gguf(path):
        return how | {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return how | {"pretrained_model_name_or_path": str(path)}


_parsed: dict[tuple[str, int, int], Any] = {}


@contextlib.contextmanager
def parsed_once(path: Path | str) -> Iterator[None]:
    """Parse a GGUF file once inside; models in other files are read as ever.

    Transformers parses it anew for the configuration, the tokenizer and the weights, three seconds of a core each for
    the embedded model, and makes the same table of tensor names for each of its modules, nine seconds in all. What was
    parsed is kept until another file is, or `forget_parsed`.
    """
    if not is_gguf(path):
        yield
        return
    gguf: Any = importlib.import_module("gguf")
    plain, names = gguf.GGUFReader, gguf.get_tensor_name_map

    class Reader(plain):  # type: ignore[misc, valid-type]
        """A view that cuts its hundred thousand pieces from a plain array: those of a memory map are objects of
        Python's, two seconds of a core more.
        """

        data = property(
            lambda self: self._plain,
            lambda self, mapped: setattr(self, "_plain", mapped.view(mapped.__class__.__base__)),
        )

    def reader(path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        state = os.stat(path)
        key = (os.path.realpath(path), state.st_mtime_ns, state.st_size)
        if args or kwargs:
            return plain(path, *args, **kwargs)
        if key not in _parsed:
            _parsed.clear()
            _parsed[key] = Reader(path)
        return _parsed[key]

    gguf.GGUFReader, gguf.get_tensor_name_map = reader, functools.lru_cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = plain, names


def forget_parsed() -> None:
    """Give back what `parsed_once` keeps: the weights are loaded."""
    _parsed.clear()


def text_config(config: Any) -> Any:
    """Return the configuration of the part that generates text (the same object for models of text only; of encoder and
    decoder, the decoder's fields).

    Raises:
        UnsupportedError: several parts do.
    """
    while (get := getattr(config, "get_text_config", None)) is not None:
        try:
            found = get(decoder=True)
        except ValueError as e:
            raise UnsupportedError(
                f"{_name(config)} has several text parts ({e}); pass the configuration of one of them"
            ) from e
        if found is config:
            break
        # a copy with the decoder's numbers in place of the encoder's: once more would be once too often
        if type(found) is type(config):
            found.is_encoder_decoder = False
        config = found
    return config


@dataclass(frozen=True)
class Place:
    """Layer of a model, described by what it has in the cache.

    Attributes:
        kind: its type, as the configuration names it.
        stored: its place among the layers that store keys and values (`layer_geometries`), or that of the layer whose
            keys and values it reads; None where it does not attend.
        shares: it reads another layer's keys and values and stores none.
    """

    kind: str
    stored: int | None
    shares: bool = False

    @property
    def has_state(self) -> bool:
        """Return whether it keeps a recurrent state, index keys or an image's keys, alone or beside keys and values."""
        return self.kind in (*_STATES, CROSS)

    @property
    def is_indexed(self) -> bool:
        """True where the layer keeps index keys, by which it chooses what it attends to."""
        return self.kind == _INDEXED


def layer_places(config: Any) -> tuple[Place, ...]:
    """Return what each decoder layer has in the cache, in model order.

    The layers that a model goes through again come behind them (`_again`).

    Raises:
        UnsupportedError, SpecError: see `layer_geometries`.
    """
    return _places(*_decoder(config))


def stored_at(config: Any) -> dict[int, int]:
    """Return, by the number of each layer of the model that stores keys and values, its place among these."""
    return {i: p.stored for i, p in enumerate(layer_places(config)) if p.stored is not None and not p.shares}


def layer_geometries(config: Any) -> tuple[LayerGeometry, ...]:
    """Return the geometry of each layer of `layer_places` that stores keys and values, in its order.

    Args:
        config: a Transformers configuration, also one of a multimodal or an encoder-decoder model (the part that
            generates text counts).

    Raises:
        UnsupportedError: compressed layers, keys and values of unlike widths that the family is not known to cache, no
            layer that attends.
        SpecError: numbers that cannot be a cache, such as kv heads that do not divide the query heads.
    """
    config, configs = _decoder(config)
    own = [(i, p) for i, p in enumerate(_places(config, configs)) if p.stored is not None and not p.shares]
    return tuple(_geometry(configs[i], p.kind, i) for i, p in own)


def _decoder(config: Any) -> tuple[Any, list[Any]]:
    """Return (configuration of the part that generates text, that of each of its layers)."""
    config = text_config(config)
    num_layers = _num_layers(config)
    if not num_layers:
        raise UnsupportedError(
            f"{_name(config)} states no num_hidden_layers, so its cache is unknown; give --layers, --kv-heads and"
            " --head-dim"
        )
    # transformers >= 5.2x
    configs = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * num_layers
    return config, configs + _again(config, configs)


def _again(config: Any, layers: list[Any]) -> list[Any]:
    """Return the items of the layers that a model goes through more than once (Dory, Inkling 2 Mini).

    `layers` has one item for each layer. Items are returned once for each time but the first. Keys and values of
    each time are kept, behind those of all layers.

    Raises:
        UnsupportedError: the first times read what the last one cached.
    """
    if (times := getattr(config, "n_recurrent_loops", None)) is not None:
        if times > 1 and config.recurrent_kv_cache_mode != "per_loop":
            raise UnsupportedError(
                f"{_name(config)} reads the keys and values of its last loop in its first ones, past its cache; use the"
                " stock cache"
            )
        start, count = config.n_input_layers, config.n_recurrent_layers
    elif (times := getattr(config, "loop_num_passes", None)) is not None:
        start, count = config.loop_layer_index_start, config.loop_layer_index_end - config.loop_layer_index_start
    else:
        return []
    return layers[start : start + count] * (times - 1)


def _num_layers(config: Any) -> int | None:
    return getattr(config, "num_decoder_layers", None) or getattr(config, "num_hidden_layers", None)  # T5 has both


@dataclass(frozen=True)
class PlainLayer:
    """Layer that pages of few bits cannot be made of, described by what 16 bits hold of a token.

    Attributes:
        elements: numbers of one token, keys and values together.
        sliding_window: as of a `LayerGeometry`.
        heads: kv heads that GPUs share; None where each GPU holds all of it.
    """

    elements: int
    sliding_window: int | None = None
    heads: int | None = None


def plain_layers(config: Any) -> tuple[PlainLayer, ...]:
    """Return what 16 bits hold of a model that `layer_geometries` refuses, as far as its configuration says.

    Such models have latent attention, keys and values of unlike widths, or layers other than attention. Layers other
    than attention are left out.

    Raises:
        UnsupportedError: the configuration does not say that either.
    """
    config = text_config(config)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or not isinstance(getattr(config, "num_attention_heads", None), int):
        layer_geometries(config)
        raise UnsupportedError(f"{_name(config)} states no layers or heads")
    types = _stated_types(config, [config] * count)
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    found = []
    for kind in types[: count - shared]:
        if kind not in (*_FULL, *_SLIDING, _CHUNKED):
            if kind in (*_STATES, *_NOTHING):
                continue
            raise UnsupportedError(f"{_name(config)} has layers of {kind!r}, of which kvbits knows no size")
        window = (
            getattr(config, "attention_chunk_size" if kind == _CHUNKED else "sliding_window", None)
            if kind not in _FULL
            else None
        )
        if (rank := getattr(config, "kv_lora_rank", None)) is not None:
            found.append(PlainLayer(int(rank) + int(getattr(config, "qk_rope_head_dim", 0)), window))
            continue
        heads = _num_kv_heads(config, config.num_attention_heads, kind)
        key = _head_dim(config, config.num_attention_heads)
        found.append(PlainLayer(heads * (key + int(getattr(config, "v_head_dim", None) or key)), window, heads))
    if not found:
        raise UnsupportedError(
            f"no layer of {_name(config)} is attention, so there is no cache that grows with the context"
        )
    return tuple(found)


def layer_types(config: Any) -> list[str]:
    """Return the type of each layer of `layer_geometries`."""
    return [p.kind for p in layer_places(config) if p.stored is not None and not p.shares]


def state_bytes(config: Any) -> int | None:
    """Count the bytes of the recurrent states of one sequence, which do not grow with it. The result is 0 where no
    layer has one, None where the family's formula is not known.

    Convolutions keep their newest inputs in the model's dtype, taken as 16 bits. Everything else is float32 in
    Transformers.
    """
    config, configs = _decoder(config)
    places = _places(config, configs)
    if any(p.kind == CROSS for p in places):
        return None
    having = [c for c, p in zip(configs, places, strict=True) if p.has_state and not p.is_indexed]
    sizes = [_state_elements(c) for c in having]
    if None in sizes:
        return None
    return sum(2 * conv + 4 * state for conv, state in (s for s in sizes if s is not None))


def _state_elements(config: Any) -> tuple[int, int] | None:
    """Return (numbers of a layer's convolution, of its recurrent state), None where neither is known."""

    def has(*names: str) -> Any:
        return next((int(x) for name in names if isinstance(x := getattr(config, name, None), int | float)), None)

    hidden = has("hidden_size") or 0
    if (heads := has("linear_num_value_heads")) is not None:  # gated delta rule: Qwen3-Next, Qwen3.5, OLMo hybrid
        key, value = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
        return (
            2 * key + value
        ) * config.linear_conv_kernel_dim, heads * config.linear_key_head_dim * config.linear_value_head_dim
    if (kernel := has("conv_L_cache")) is not None:  # LFM2
        return hidden * kernel, 0
    states, kernel = has("mamba_d_state", "ssm_state_size"), has("mamba_d_conv", "conv_kernel")
    if states is None or kernel is None:
        return None
    if (heads := has("mamba_num_heads", "mamba_n_heads")) is None or (
        groups := has("n_groups", "mamba_n_groups")
    ) is None:
        inner = hidden * (has("mamba_expand") or 2)
        if (groups := has("mamba_ngroups")) is not None:  # Zamba 2
            return (inner + 2 * groups * states) * kernel, inner * states
        return inner * kernel, inner * states  # Mamba 1: Jamba, Zamba
    inner = (
        heads * has("mamba_head_dim")
        if has("mamba_head_dim")
        else has("mamba_d_ssm") or hidden * (has("mamba_expand") or 2)
    )
    return (inner + 2 * groups * states) * kernel, inner * states  # Mamba 2: Bamba, Granite 4, Falcon-H1, Nemotron-H


def query_heads(config: Any) -> int | None:
    """Return the number of query heads of a layer, or None where the configuration does not say one number."""
    config = text_config(config)
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    n, *others = [getattr(c, "num_attention_heads", None) for c in layers]
    return n if isinstance(n, int) and n > 0 and all(x == n for x in others) else None


def has_key_bias(config: Any) -> bool:
    """Return whether the models of a configuration add a bias to their keys, as far as the configuration says.

    Qwen 2 and 2.5 always do, others if `attention_bias` is set. Only weights say how large the bias is
    (`integrations.models.key_bias`).
    """
    config = text_config(config)
    named = any(getattr(config, name, None) is True for name in ("attention_bias", "qkv_bias", "add_qkv_bias"))
    return named or str(getattr(config, "model_type", "")).startswith("qwen2")


def max_context(config: Any) -> int | None:
    """Return the most tokens the model was made for (`max_position_embeddings`), or None where the configuration does
    not say.
    """
    n = getattr(text_config(config), "max_position_embeddings", None)
    return n if isinstance(n, int) and n > 0 else None


def _name(config: Any) -> str:
    return (
        getattr(config, "described", None)
        or f"{type(config).__name__} ({getattr(config, 'model_type', '') or 'no model_type'})"
    )


def _stated_types(config: Any, configs: list[Any]) -> list[str]:
    """Return the types as the configuration names them, or as its window says."""
    types = next(
        (t for name in ("layer_types", "layers_block_type", "block_types") if (t := getattr(config, name, None))), None
    )
    if types is None:
        types = [_infer_type(c, i) for i, c in enumerate(configs)]
    if len(types) != len(configs):
        raise SpecError(f"{_name(config)} has num_hidden_layers={len(configs)} but {len(types)} layer_types")
    cross = getattr(config, "cross_attention_layers", None) or ()
    return [CROSS if i in cross else _OLD_NAMES.get(t, t) for i, t in enumerate(types)]


def _places(config: Any, configs: list[Any]) -> tuple[Place, ...]:
    types = _stated_types(config, configs[: _num_layers(config)])
    types += _again(config, types)
    modes = getattr(config, "kv_sharing_modes", None) or []
    shared = {i for i, mode in enumerate(modes) if mode == "reuse"}
    if not modes and (n := getattr(config, "num_kv_shared_layers", 0)):  # before transformers told the layers apart
        shared = set(range(len(types) - n, len(types)))
    found: list[Place] = []
    latest: dict[str, int] = {}  # of each type, the newest that stores: whose keys and values are shared
    count = 0
    for i, kind in enumerate(types):
        if kind in _NOTHING or (kind in _STATES and kind not in _BESIDE):
            found.append(Place(kind, None))
        elif i in shared:
            if kind not in latest:
                raise UnsupportedError(
                    f"layer {i} of {_name(config)} reads the keys and values of another layer, but none of type"
                    f" {kind!r} comes before it"
                )
            found.append(Place(kind, latest[kind], shares=True))
        else:
            latest[kind] = count
            found.append(Place(kind, count))
            count += 1
    if not count:
        raise UnsupportedError(
            f"no layer of {_name(config)} attends: they are {types[0]!r} ({len(types)}), which keep a state of one size"
            " and no keys or values to quantize; use the stock cache"
        )
    return tuple(found)


def _infer_type(config: Any, layer: int) -> str:
    """Return the type of a layer in a configuration without `layer_types`."""
    if getattr(config, "attention_chunk_size", None) is not None:
        return _CHUNKED
    if not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", None) is False:
        return "full_attention"
    pattern = getattr(config, "sliding_window_pattern", None)
    if isinstance(pattern, int) and pattern > 1:
        return "sliding_attention" if (layer + 1) % pattern else "full_attention"
    return "sliding_attention"


def _geometry(config: Any, kind: str, layer: int) -> LayerGeometry:
    if kind not in (*_FULL, *_SLIDING, _CHUNKED):
        raise UnsupportedError(
            f"layer {layer} of {_name(config)} is {kind!r}; kvbits knows {', '.join((*_FULL, *_SLIDING, _CHUNKED))};"
            " use the stock cache"
        )
    window = None
    if kind not in _FULL:
        window = getattr(config, field := "attention_chunk_size" if kind == _CHUNKED else "sliding_window", None)
        if not window:
            raise SpecError(f"layer {layer} of {_name(config)} is {kind!r} but {field}={window}")
    num_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(num_heads, int) or num_heads < 1:
        raise UnsupportedError(
            f"{_name(config)} states no single num_attention_heads (found {num_heads!r}), so it is not a plain"
            " attention model"
        )
    if (rank := latent_rank(config)) is not None:
        num_kv_heads, head_dim, value_dim = 1, rank, int(config.qk_rope_head_dim)
    else:
        num_kv_heads, head_dim = _num_kv_heads(config, num_heads, kind), _head_dim(config, num_heads)
        # Gemma 4 before it became heterogeneous
        if kind == "full_attention" and (wide := getattr(config, "global_head_dim", None)):
            head_dim = int(wide)
            num_kv_heads = (
                getattr(config, "attention_k_eq_v", False) and getattr(config, "num_global_key_value_heads", None)
            ) or num_kv_heads
        # Inkling; SGLang writes the first
        if kind in _SLIDING and getattr(config, "swa_head_dim", None) and hasattr(config, "swa_num_attention_heads"):
            num_heads, num_kv_heads, head_dim = (
                config.swa_num_attention_heads,
                config.swa_num_key_value_heads,
                config.swa_head_dim,
            )
        value_dim = getattr(config, "v_head_dim", None) or head_dim
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise SpecError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    return LayerGeometry(
        num_kv_heads=num_kv_heads,
        **_widths(config, head_dim, value_dim),
        sliding_window=window,
        chunked=kind == _CHUNKED,
    )


def _widths(config: Any, head_dim: int, value_dim: int) -> dict[str, Any]:
    """Return channels of what is cached as keys and as values, as fields of a geometry.

    Of latent attention these are latents and the keys' rotary part.
    """
    if (
        value_dim != head_dim
        and latent_rank(config) is None
        and getattr(config, "model_type", "") not in _UNLIKE_WIDTHS
    ):
        raise UnsupportedError(
            f"{_name(config)} has keys of width {head_dim} and values of width {value_dim}, which is known of other"
            " families only; use the stock cache"
        )
    return {"head_dim": head_dim, "value_head_dim": int(value_dim)}


def latent_rank(config: Any) -> int | None:
    """Return the width of the latents that a layer caches, if it makes keys and values from them at each reading; else
    None.
    """
    rank = getattr(config, "kv_lora_rank", None)
    return int(rank) if rank else None


def only_dense(config: Any) -> str | None:
    """Return what a model does with what it cached that no attention over pages does; None for others.

    Such a model needs dense copies of what it cached.
    """
    config, configs = _decoder(config)
    if any(p.is_indexed for p in _places(config, configs)):
        return "chooses the tokens that it attends to by index keys (sparse attention)"
    if any(latent_rank(c) is not None for c in configs):
        return "makes keys and values of latents that it caches (multi-head latent attention)"
    return None


def index_bytes(config: Any) -> int:
    """Count the bytes of the index keys of one token, of 16 bits each, in all layers that may keep one."""
    config, configs = _decoder(config)
    return sum(
        2 * (getattr(c, "index_head_dim", None) or 0)
        for c, p in zip(configs, _places(config, configs), strict=True)
        if p.is_indexed
    )


def _head_dim(config: Any, num_heads: int) -> int:
    head_dim = next((n for name in ("head_dim", "d_kv", "dim_head") if (n := getattr(config, name, None))), None)
    if head_dim:
        return int(head_dim)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(hidden, int):
        raise UnsupportedError(f"{_name(config)} states neither head_dim nor hidden_size")
    if hidden % num_heads:
        raise SpecError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}, and no head_dim is given"
        )
    return hidden // num_heads


def _num_kv_heads(config: Any, num_heads: int, kind: str) -> int:
    nested = getattr(config, "attn_config", None)  # DBRX, MPT
    if nested is not None and (n := getattr(nested, "kv_n_heads", None)):
        return int(n)
    if getattr(config, "new_decoder_architecture", False):  # Falcon 40B
        return int(config.num_kv_heads)
    if getattr(config, "multi_query", False):  # Falcon 7B, GPT-BigCode
        return 1
    n = getattr(config, "num_key_value_heads", None)
    n = num_heads if n is None else int(n)
    return 2 * n if getattr(config, "model_type", "") in _UNLIKE_WIDTHS and kind in _SLIDING else n
