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
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config_file import QUANTIZERS
from .errors import SpecError
from .geometry import cached_folder, find_model, is_gguf, query_heads, text_config
from .model_ref import ModelRef
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


def weights_bytes(model: ModelRef, say: Callable[[str], None] = lambda text: None) -> tuple[int, str]:
    """Return (bytes, where they come from in words).

    Args:
        say: told what takes seconds, before it does.

    Raises:
        SpecError: no files, and the configuration does not say: an unknown quantization, or a model that Transformers
            cannot build.
    """
    path = find_model(model.name, look_up=False)
    gguf = is_gguf(path)
    folder = cached_folder(path) if isinstance(path, str) else path if path.is_dir() else path.parent
    if not gguf and folder is not None and (found := _of_files(folder)) is not None:
        return found
    return bytes_of_config(model, gguf, say, folder)


def bytes_of_config(
    model: ModelRef,
    gguf: bool = False,
    say: Callable[[str], None] = lambda text: None,
    folder: Path | None = None,
) -> tuple[int, str]:
    """Count `weights_bytes` of a model whose weights are not here; `gguf` weights are held in 16 bits.

    Args:
        folder: where a quantizer's file may lie.
    """
    config = model.config
    size = 2 if gguf else _DTYPE_BYTES.get(dtype_name(str(getattr(config, "dtype", "")).removeprefix("torch.")), 2)
    packed = None if gguf else _packed(model.name, config, folder)
    count = counted(config)
    doubt = ""
    if packed is None and not gguf and (called := named_format(model.name)) is not None and size >= 2:
        doubt = f"; its name says {called} and no file here does, so {_WAY_OUT} if they are packed"
        say(f"warning: {model} is counted in {8 * size} bits{doubt}")
    if count is None:
        count, about = estimated(config), "estimated from its widths"
        if count is None:
            raise SpecError(
                f"the weights of {model.name!r} cannot be counted without its files, because its family has no formula"
                f" here; {_WAY_OUT}, or run `kvbits plan` where its files are"
            )
        say(f"the weights of {model} are {about} ({_WAY_OUT} for exact ones)")
    else:
        about = "counted from the configuration"
    if packed is None:
        return count.total * size, f"{about} at {size} bytes each{doubt}"
    bits, what, experts_only = packed
    narrow = count.experts if experts_only and count.experts else count.dense + count.experts
    return (
        round(narrow * bits / 8) + (count.total - narrow) * 2,
        f"{about}: {what}, the rest at 2 bytes each",
    )


_BITS: dict[str, float] = {
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "mxfp8": 8.25,
    "nf4": 4.5,
    "w4a": 4.125,
    "int4": 4.125,
    "awq": 4.125,
    "int2": 2.125,
    "fp4": 4.5,
    "fp8": 8.0,
    "float8": 8.0,
    "w8a": 8.0,
    "int8": 8.0,
    "eetq": 8.0,
    "bitnet": 2.0,
}
"""Bits of a packed parameter with its scales, by what the name of a format contains; the first that it contains counts.
"""
MOST_BITS = 16
_NAME = re.compile(
    r"(?:^|[-_./ ])(fp[48]|nvfp4(?:a16)?|nf4|mxfp[48]|awq|gptq|int[248]|w[48]a(?:4|8|16)"
    r"|[1-8](?:\.\d+)?-?(?:bits?|bpw)|i?q[1-8](?:_\w+)?"
    r"|aqlm|autoround|bitnet|bnb|eetq|exl[23]|gguf|hqq|quanto|torchao|vptq)(?=$|[-_. ])",
    re.IGNORECASE,
)


def named_format(model: str) -> str | None:
    """Return the format of packed weights that a model's name has, like FP8 or AWQ, or None."""
    found = _NAME.findall(str(model).rstrip("/").removesuffix("/config.json").split("/")[-1])
    return found[-1] if found else None


def _quantization(config: Any, folder: Path | None) -> dict[str, Any] | None:
    """Return what a configuration or a file beside it says of packed weights."""
    for c in (config, text_config(config)):
        for name in ("quantization_config", "compression_config", "quantization"):
            if (how := getattr(c, name, None)) is not None:
                found: dict[str, Any] = how if isinstance(how, dict) else how.to_dict()
                return found
    for file in () if folder is None else (folder / name for name in QUANTIZERS):
        try:
            stated = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as e:
            raise SpecError(f"cannot read {file}: {e}; {_WAY_OUT}") from e
        if not isinstance(stated, dict):
            raise SpecError(f"{file} holds no object; {_WAY_OUT}")
        inner = stated.get("quantization", stated)
        method = {"quantize_config.json": "gptq", "quant_config.json": "awq"}.get(file.name, "modelopt")
        return {"quant_method": method} | (inner if isinstance(inner, dict) else {})
    return None


def _packed(model: str, config: Any, folder: Path | None) -> tuple[float, str, bool] | None:
    """Return (bits of a packed parameter with its scales, in words, whether experts alone are packed) of a quantized
    model.

    Raises:
        SpecError: a quantization whose bits are unknown.
    """
    how = _quantization(config, folder)
    if how is None:
        return None
    method = str(how.get("quant_method") or "").lower()
    if method == "bitsandbytes" or (not method and any(name in how for name in ("load_in_4bit", "load_in_8bit"))):
        four, eight = (any(how.get(p + name) for p in ("", "_")) for name in ("load_in_4bit", "load_in_8bit"))
        if not (four or eight):
            return None
        bits = 4.5 if four else 8.0
        return bits, f"{bits:g} bits of bitsandbytes for each matrix's", False
    how = _object(how.get("quantization")) | how if method == "modelopt" else how
    groups = list(_object(how.get("config_groups")).values())
    parts = [part for g in groups if (part := _object(_object(g).get("weights")))]  # compressed-tensors and modelopt
    if not parts and _only_a_cache(how, method):
        return None
    widths = {part.get("num_bits") for part in parts}
    if len(widths) > 1:
        raise SpecError(
            f"{model!r} is quantized by {method} in parts of {' and '.join(sorted(map(str, widths)))} bits, and its"
            f" files are not here, so the bytes of its weights are unknown; {_WAY_OUT}"
        )
    part = parts[0] if parts else {}
    inner = _object(how.get("quant_config"))
    inner = _object(inner.get("weight_quant_params", inner))  # HQQ
    algorithm = str(how.get("quant_algo") or "").lower()
    kind = how.get("quant_type")  # torchao: a name, or an object with one
    kind = _object(_object(kind).get("default")).get("_type") if isinstance(kind, dict) else kind
    quark = str(_object(_object(how.get("global_quant_config")).get("weight")).get("dtype")).replace("fp4", "mxfp4")
    written = (algorithm, method, how.get("weights"), how.get("forward_dtype"), kind, quark)
    names = [n.lower() for n in written if isinstance(n, str)]
    known = next(((n, _BITS[key]) for n in names for key in _BITS if key in n), None)
    stated = next(
        (x for x in (part.get("num_bits"), *(how.get(n) for n in ("bits", "w_bit", "nbits")), inner.get("nbits")) if x),
        None,
    )
    if method == "aqlm":
        stated = _of_codebooks(how)
    if stated is not None and (type(stated) not in (int, float) or not 0 < stated <= MOST_BITS):
        raise SpecError(
            f"{model!r} is quantized by {method or 'an unnamed method'} in {stated!r} bits, which must be a number"
            f" above 0, at most {MOST_BITS}; correct the file, or {_WAY_OUT}"
        )
    sizes = [part.get("group_size"), how.get("group_size"), how.get("q_group_size"), inner.get("group_size")]
    group = next((x for x in sizes if type(x) is int and x > 0), None)
    if known is not None and (stated is None or any(key in algorithm for key in _BITS)):
        (called, bits), experts_only = known, method == "mxfp4"
        return bits, f"{bits:.4g} bits of {called} for each {'expert' if experts_only else 'matrix'}'s", experts_only
    if stated is not None:
        small = stated == 4 and (part.get("type") == "float" or "fp4" in str(how.get("mode")))  # scales of one byte
        scale = 0.0 if group is None or method == "aqlm" else 8 / group if small else (16 + stated) / group
        named = method or "its quantization_config"
        return stated + scale, f"{stated + scale:.3g} bits of {named} for each matrix's", False
    raise SpecError(
        f"{model!r} is quantized by {algorithm or method or 'an unnamed method'} and its files are not here, so the"
        f" bytes of its weights are unknown; {_WAY_OUT}"
    )


def _object(value: Any) -> dict[str, Any]:
    """Return an object of a file, or an empty one for whatever else stands there."""
    return value if isinstance(value, dict) else {}


def _only_a_cache(how: dict[str, Any], method: str) -> bool:
    """Return whether files quantize no weights: they describe a cache, or what was sparse and is dense again."""
    if method == "modelopt":
        return "quant_algo" in how and not how["quant_algo"]
    cache = bool(how.get("kv_cache_scheme")) or how.get("format") == "dense"
    return method == "compressed-tensors" and isinstance(how.get("config_groups"), dict) and cache


def _of_codebooks(how: dict[str, Any]) -> float | None:
    """Return bits of a parameter in AQLM's codebooks."""
    fields = [how.get(n) for n in ("num_codebooks", "nbits_per_codebook", "in_group_size", "out_group_size")]
    if not all(type(x) is int and x > 0 for x in fields):
        return None
    count, bits, rows, columns = (float(x or 0) for x in fields)
    return count * bits / (rows * columns)


def _of_files(folder: Path) -> tuple[int, str] | None:
    """Return what the files of a folder take, in bytes, and where the figure is from.

    Where an index names files that are not there, the figure is what the index says they take together.
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
    """Return the files of a directory that hold the model: those its index names, else the whole-model file of the
    first kind that is there.
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
    """Build of the weights of a family besides its widths.

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
    """Return parameters of a model of text by arithmetic, or None where its family is none of `COUNTED` or its
    configuration lacks a number for that.
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
    """Return (numbers in the matrices of a layer's attention, others)."""
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
    """Return (numbers in the matrices of a Gated DeltaNet, others)."""
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
    """Return (numbers in the matrices of all layers' plain feed-forward parts, of experts, others)."""
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


SCALES = (0.3, 3.0)
"""Families that Transformers builds with fewer or more times the parameters are not estimated."""


def estimated(config: Any) -> Count | None:
    """Estimate the parameters of a model without a formula of its own, from the widths that its configuration states;
    None where it lacks one.

    Counted are attention, gated feed-forward parts, experts, embeddings, and transformers of images and sound beside
    the text. families.json has how many times as many Transformers builds at a family's default sizes.
    """
    if (found := _of_widths(config)) is None:
        return None
    if (scale := getattr(config, "scale", None)) is None:
        return found
    if not SCALES[0] < scale < SCALES[1]:
        return None
    return Count(*(round(scale * n) for n in (found.dense, found.experts, found.rest)))


def _of_widths(config: Any) -> Count | None:
    c = text_config(config)
    try:
        h, layers, heads = c.hidden_size, c.num_hidden_layers, query_heads(config) or 0
        attention, _ = _attention(c, _Family(), h, heads) if heads else (4 * h * h, 0)
        names = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim")
        width = next((w for name in names if (w := getattr(c, name, None))), 4 * h)
        width = max(width) if isinstance(width, list) else width
        fields = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((n for f in fields if isinstance(n := getattr(c, f, None), int) and n > 1), 0)
        of_expert = getattr(c, "moe_intermediate_size", None) or width
        of_expert = max(of_expert) if isinstance(of_expert, list) else of_expert
        dense = min(getattr(c, "first_k_dense_replace", 0) or 0, layers) if experts else layers
        shared = 3 * h * of_expert * (getattr(c, "n_shared_experts", 0) or 0)
        small = (layers - dense) * shared + dense * 3 * h * width
        rest = c.vocab_size * h * (1 if getattr(c, "tie_word_embeddings", False) else 2)
        if (beside := getattr(c, "hidden_size_per_layer_input", None)) and hasattr(c, "vocab_size_per_layer_input"):
            rest += c.vocab_size_per_layer_input * layers * beside
        return Count(
            layers * attention + small,
            (layers - dense) * experts * 3 * h * of_expert,
            rest + _others(config),
        )
    except (AttributeError, TypeError, ZeroDivisionError):
        return None


def _others(config: Any) -> int:
    """Return the number of parameters of the parts that are stated beside the text."""
    total = 0
    for name in ("vision_config", "audio_config"):
        part = getattr(config, name, None)
        part = part if isinstance(part, dict) else getattr(part, "__dict__", {})
        h = part.get("hidden_size") or part.get("embed_dim") or part.get("d_model")
        depth = part.get("num_hidden_layers") or part.get("depth") or part.get("encoder_layers")
        if isinstance(h, int) and isinstance(depth, int):
            inner = part.get("intermediate_size")
            total += depth * (4 * h * h + 2 * h * (inner if isinstance(inner, int) else 4 * h))
    return total
