"""Bytes of a model's weights, before anything is loaded: from its files, else counted from its configuration.

files      the safetensors (or .bin) files that its index names: what they take on a disk, they take in memory; without
           the files, the size the index states
GGUF       the parameters in bfloat16, because GGUF weights are dequantized when they are loaded (see
           `integrations.models.load_model`)
no files   the parameters of the configuration in its dtype, those of a quantized model in the bits that its
           quantization_config names: by arithmetic for the
           families of `COUNTED` (a test compares it with Transformers' models), else of the model that Transformers
           builds on no device
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SpecError, UnsupportedError
from .geometry import find_model, load_config, text_config
from .spec import DTYPE_BYTES
from .units import dtype_name

_DTYPE_BYTES = DTYPE_BYTES | {"float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
_WAY_OUT = "give --weights, like --weights 16GB"


@dataclass(frozen=True)
class Count:
    """Parameters of a model, tied ones once.

    Attributes:
        dense: of the matrices of its layers, which is what quantization packs.
        experts: of the matrices of experts among these.
        rest: embeddings, heads, norms, biases.
    """

    dense: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.rest


def weights_bytes(model: str, config: Any, say: Callable[[str], None] = lambda text: None) -> tuple[int, str]:
    """(bytes, where they come from in words).

    Args:
        model: a local directory, a config.json, a GGUF file, or a hub id.
        config: its configuration (`config_file.read_config`, or Transformers' own).
        say: told what takes seconds, before it does.

    Raises:
        SpecError: no files, and the configuration does not say: an unknown quantization, or a model that Transformers
            cannot build.
    """
    path = find_model(model, look_up=False)
    gguf = isinstance(path, Path) and path.suffix == ".gguf"
    folder = _cached(path) if isinstance(path, str) else path if path.is_dir() else path.parent
    if not gguf and folder is not None and (found := _of_files(folder)) is not None:
        return found
    return bytes_of_config(model, config, gguf, say)


def bytes_of_config(
    model: str, config: Any, gguf: bool = False, say: Callable[[str], None] = lambda text: None
) -> tuple[int, str]:
    """`weights_bytes` of a model whose files are not looked for; `gguf` weights are held in 16 bits."""
    size = 2 if gguf else _DTYPE_BYTES.get(dtype_name(str(getattr(config, "dtype", "")).removeprefix("torch.")), 2)
    packed = None if gguf else _packed(model, config)
    count = counted(config)
    if count is None:
        if packed is not None:
            raise SpecError(
                f"{model!r} is quantized and its files are not here, so the bytes of its weights are unknown;"
                f" {_WAY_OUT}"
            )
        say(
            f"counting the weights of {model} with Transformers, because neither its files nor a formula are here"
            f" ({_WAY_OUT} is faster)"
        )
        return (
            count_parameters(config if hasattr(config, "to_dict") else load_config(model)) * size,
            f"counted from the configuration at {size} bytes each",
        )
    if packed is None:
        return count.total * size, f"counted from the configuration at {size} bytes each"
    bits, what, experts_only = packed
    narrow = count.experts if experts_only else count.dense + count.experts
    return (
        round(narrow * bits / 8) + (count.total - narrow) * 2,
        f"counted from the configuration: {what}, the rest at 2 bytes each",
    )


def _packed(model: str, config: Any) -> tuple[float, str, bool] | None:
    """(bits of a packed parameter with its scales, in words, whether experts alone are packed) of a quantized model.

    Raises:
        SpecError: a quantization whose bits are unknown.
    """
    how = getattr(config, "quantization_config", None)
    if how is None:
        return None
    how = how if isinstance(how, dict) else how.to_dict()
    method = str(how.get("quant_method", "")).lower()
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, "8 bits of fp8 for each matrix's", False
    if method == "mxfp4":
        return 4.25, "4.25 bits of mxfp4 for each expert's", True
    bits, group = how.get("bits"), how.get("group_size")
    if method == "compressed-tensors":
        parts = [g.get("weights") or {} for g in (how.get("config_groups") or {}).values() if isinstance(g, dict)]
        bits, group = next(((p.get("num_bits"), p.get("group_size")) for p in parts), (None, None))
    if method in ("gptq", "awq", "compressed-tensors") and isinstance(bits, int):
        scales = 0 if not isinstance(group, int) or group < 1 else (16 + bits) / group
        return bits + scales, f"{bits + scales:.3g} bits of {method} for each matrix's", False
    if method == "bitsandbytes":
        four = bool(how.get("load_in_4bit"))
        return (
            (4.5, "4.5 bits of bitsandbytes for each matrix's", False)
            if four
            else (8.0, "8 bits of bitsandbytes for each matrix's", False)
        )
    raise SpecError(
        f"{model!r} is quantized by {method or 'an unnamed method'} and its files are not here, so the bytes of its"
        f" weights are unknown; {_WAY_OUT}"
    )


def _of_files(folder: Path) -> tuple[int, str] | None:
    """What the files of a folder take; where an index names files that are not there, what it says they take
    together.
    """
    for index in (folder / "model.safetensors.index.json", folder / "pytorch_model.bin.index.json"):
        if not index.exists():
            continue
        stated, names = _index(index)
        if all((folder / n).exists() for n in names):
            break
        if stated is None:
            missing = next(n for n in names if not (folder / n).exists())
            raise SpecError(
                f"{index} names {missing}, which is not there, and no size; complete the download, or {_WAY_OUT}"
            )
        return stated, f"stated by {index.name}, whose files are not here"
    files = weight_files(folder)
    return (
        (sum(f.stat().st_size for f in files), f"{len(files)} weight file{'s' if len(files) > 1 else ''}")
        if files
        else None
    )


def _index(path: Path) -> tuple[int | None, list[str]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names, size = sorted(set(data["weight_map"].values())), (data.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise SpecError(f"cannot read {path}: {e!r}; {_WAY_OUT}") from e
    return int(size) if isinstance(size, int | float) else None, names


def weight_files(folder: Path) -> list[Path]:
    """The files of a directory that hold the model: those its index names, else the whole-model file of the first kind
    that is there.
    """
    for kind in ("safetensors", "bin"):
        stem = "model" if kind == "safetensors" else "pytorch_model"
        index = folder / f"{stem}.{kind}.index.json"
        if index.exists():
            _, names = _index(index)
            return [folder / n for n in names]
        if (whole := folder / f"{stem}.{kind}").exists():
            return [whole]
    return []


@dataclass(frozen=True)
class _Family:
    """How the weights of a family are built besides its widths.

    Attributes:
        qkv_bias: always, whatever attention_bias says.
        biases: which of attention_bias and mlp_bias the family heeds.
        norms: vectors of the model's width in a layer.
        head_norms: of queries and keys: "head" (one of a head each), "all" (one over all heads), or none.
        gated: queries come with a gate of each number, and other layers are Gated DeltaNets.
        fields: names of (number of experts, width of one) where the family has experts.
    """

    qkv_bias: bool = False
    biases: tuple[str, ...] = ()
    norms: int = 2
    head_norms: str = ""
    gated: bool = False
    fields: tuple[str, str] | None = None


_ATTENTION, _BOTH = ("attention_bias",), ("attention_bias", "mlp_bias")
COUNTED: dict[str, _Family] = {
    "llama": _Family(biases=_BOTH),
    "mistral": _Family(),
    "ministral3": _Family(),
    "smollm3": _Family(biases=_BOTH),
    "granite": _Family(biases=_BOTH),
    "phi3": _Family(),
    "gemma": _Family(biases=_ATTENTION),
    "gemma2": _Family(biases=_ATTENTION, norms=4),
    "gemma3_text": _Family(biases=_ATTENTION, norms=4, head_norms="head"),
    "olmo2": _Family(biases=_ATTENTION, head_norms="all"),
    "olmo3": _Family(biases=_ATTENTION, head_norms="all"),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(biases=_ATTENTION, head_norms="head"),
    "qwen2_moe": _Family(qkv_bias=True, fields=("num_experts", "moe_intermediate_size")),
    "qwen3_moe": _Family(biases=_ATTENTION, head_norms="head", fields=("num_experts", "moe_intermediate_size")),
    "mixtral": _Family(fields=("num_local_experts", "intermediate_size")),
    "gpt_oss": _Family(biases=_ATTENTION, fields=("num_local_experts", "intermediate_size")),
    "deepseek_v3": _Family(biases=_ATTENTION, fields=("n_routed_experts", "moe_intermediate_size")),
    "minimax_m2": _Family(head_norms="all", fields=("num_local_experts", "intermediate_size")),
    "qwen3_next": _Family(
        biases=_ATTENTION, head_norms="head", gated=True, fields=("num_experts", "moe_intermediate_size")
    ),
    "qwen3_5_text": _Family(biases=_ATTENTION, head_norms="head", gated=True),
    "qwen3_5_moe_text": _Family(
        biases=_ATTENTION, head_norms="head", gated=True, fields=("num_experts", "moe_intermediate_size")
    ),
}
"""Families whose parameters are counted here: decoders with gated feed-forward layers."""


def counted(config: Any) -> Count | None:
    """Parameters of a model of text by arithmetic, or None where its family is none of `COUNTED` or its configuration
    lacks a number for that.
    """
    c = text_config(config)
    family = COUNTED.get(str(getattr(c, "model_type", "")))
    if family is None or c is not config:
        return None
    try:
        h, layers, heads = c.hidden_size, c.num_hidden_layers, c.num_attention_heads
        attention, small = _attention(c, family, h, heads)
        full = sum(kind == "full_attention" for kind in c.layer_types) if family.gated else layers
        delta, delta_small = _delta(c, h) if full < layers else (0, 0)
        dense, experts, mlp_small = _feed_forward(c, family, h, layers)
        rest = layers * family.norms * h + h + c.vocab_size * h * (1 if getattr(c, "tie_word_embeddings", False) else 2)
        return Count(
            full * attention + (layers - full) * delta + dense,
            experts,
            rest + full * small + (layers - full) * delta_small + mlp_small,
        )
    except (AttributeError, TypeError, ZeroDivisionError):  # a field that is not there, null, a list, or a step of 0
        return None


def _attention(c: Any, family: _Family, h: int, heads: int) -> tuple[int, int]:
    """(numbers in the matrices of a layer's attention, others)."""
    if getattr(c, "kv_lora_rank", None):
        nope, rope, value, rank, q_rank = (
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
            c.kv_lora_rank,
            getattr(c, "q_lora_rank", None),
        )
        queries = h * heads * (nope + rope) if not q_rank else h * q_rank + q_rank * heads * (nope + rope)
        matrices = queries + h * (rank + rope) + rank * heads * (nope + value) + heads * value * h
        biases = (
            (q_rank or 0) + rank + rope + h
            if "attention_bias" in family.biases and getattr(c, "attention_bias", False)
            else 0
        )
        return matrices, rank + (q_rank or 0) + biases
    dim = getattr(c, "head_dim", None) or h // heads
    kv = (getattr(c, "num_key_value_heads", None) or heads) * dim
    queries = heads * dim
    small = {"head": 2 * dim, "all": queries + kv}.get(family.head_norms, 0)
    biased = "attention_bias" in family.biases and getattr(c, "attention_bias", False)
    asked = queries * (1 + family.gated)
    if family.qkv_bias or biased:
        small += asked + 2 * kv
    if biased:
        small += h
    if c.model_type == "gpt_oss":
        small += heads  # sinks
    return h * (asked + queries + 2 * kv), small


def _delta(c: Any, h: int) -> tuple[int, int]:
    """(numbers in the matrices of a Gated DeltaNet, others)."""
    keys, values, heads = (
        c.linear_num_key_heads * c.linear_key_head_dim,
        c.linear_num_value_heads * c.linear_value_head_dim,
        c.linear_num_value_heads,
    )
    return (
        h * (2 * keys + 3 * values + 2 * heads),
        (2 * keys + values) * c.linear_conv_kernel_dim + 2 * heads + c.linear_value_head_dim,
    )


def _feed_forward(c: Any, family: _Family, h: int, layers: int) -> tuple[int, int, int]:
    """(numbers in the matrices of all layers' plain feed-forward parts, of experts, others)."""
    plain = 3 * h * (getattr(c, "intermediate_size", 0) or 0)
    if family.fields is None:
        return (
            layers * plain,
            0,
            (
                layers * (2 * c.intermediate_size + h)
                if "mlp_bias" in family.biases and getattr(c, "mlp_bias", False)
                else 0
            ),
        )
    count, width = (getattr(c, name) for name in family.fields)
    without = getattr(c, "first_k_dense_replace", 0) or 0 if c.model_type == "deepseek_v3" else 0
    some = c.model_type in ("qwen2_moe", "qwen3_moe", "qwen3_next")
    step, only = (c.decoder_sparse_step, getattr(c, "mlp_only_layers", None) or []) if some else (1, [])
    sparse = sum(i >= without and i not in only and (i + 1) % step == 0 for i in range(layers))
    experts, router = count * 3 * h * width, count * h
    shared, small = 0, 0
    if c.model_type in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        shared = 3 * h * c.shared_expert_intermediate_size + h
    if c.model_type == "deepseek_v3":
        shared = 3 * h * width * (c.n_shared_experts or 0)
    if c.model_type == "gpt_oss":
        small = count + count * (2 * width + h)  # biases of the router and of experts
    return (layers - sparse) * plain + sparse * shared, sparse * experts, sparse * (router + small)


def count_parameters(config: Any) -> int:
    """Parameters of the model of a Transformers configuration, tied ones once; nothing is allocated. Imports torch.

    Raises:
        SpecError: a model that Transformers cannot build.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = str(getattr(config, "model_type", ""))
    build = AutoModelForImageTextToText if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else AutoModelForCausalLM
    if kind not in (*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise SpecError(
            f"cannot count the weights of a {kind} model, which Transformers does not generate text with; {_WAY_OUT}"
        )
    try:
        with torch.device("meta"):
            model = build.from_config(config)
    except (ImportError, ValueError, TypeError, AttributeError, RuntimeError, UnsupportedError) as e:
        raise SpecError(
            f"cannot count the weights of a {kind} model: {' '.join(str(e).split())[:200].rstrip('.,; ')}; {_WAY_OUT}"
        ) from e
    return sum(p.numel() for p in model.parameters())


def _cached(hub_id: str) -> Path | None:
    """The local snapshot of a hub id, if there is one."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None
