"""Bytes of a model's weights, before anything is loaded: from its files, else counted from its configuration.

files      the safetensors (or .bin) files that its index names: what they take on a disk, they take in memory
GGUF       the parameters in bfloat16, because GGUF weights are dequantized when they are loaded (see `integrations.models.load_model`)
no files   the parameters of the model that Transformers builds on no device, in the configuration's dtype
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import SpecError, UnsupportedError
from .geometry import find_model

_DTYPE_BYTES = {"float64": 8, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}


def weights_bytes(model: str, config: Any) -> tuple[int, str]:
    """(bytes, where they come from in words).

    Args:
        model: a local directory, a config.json, a GGUF file, or a hub id.
        config: its Transformers configuration (`geometry.load_config`).

    Raises:
        SpecError: no files, and the configuration does not say: quantized weights, or a model that Transformers cannot build.
    """
    path = find_model(model, look_up=False)
    folder = _cached(path) if isinstance(path, str) else path if path.is_dir() else path.parent
    if not (isinstance(path, Path) and path.suffix == ".gguf") and folder is not None and (files := weight_files(folder)):
        return sum(f.stat().st_size for f in files), f"{len(files)} weight file{'s' if len(files) > 1 else ''}"
    if getattr(config, "quantization_config", None) is not None and not (isinstance(path, Path) and path.suffix == ".gguf"):
        raise SpecError(f"{model!r} is quantized and its files are not here, so the bytes of its weights are unknown; give --weights, like --weights 16GB")
    size = 2 if isinstance(path, Path) and path.suffix == ".gguf" else _DTYPE_BYTES.get(str(getattr(config, "dtype", "")).removeprefix("torch."), 2)
    return count_parameters(config) * size, f"counted from the configuration at {size} bytes each"


def weight_files(folder: Path) -> list[Path]:
    """The files of a directory that hold the model: those its index names, else the whole-model file of the first kind that is there."""
    for kind in ("safetensors", "bin"):
        stem = "model" if kind == "safetensors" else "pytorch_model"
        index = folder / f"{stem}.{kind}.index.json"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as e:
                raise SpecError(f"cannot read {index}: {e!r}; give --weights, like --weights 16GB") from e
            if missing := [n for n in names if not (folder / n).exists()]:
                raise SpecError(f"{index} names {missing[0]}, which is not there; complete the download, or give --weights, like --weights 16GB")
            return [folder / n for n in names]
        if (whole := folder / f"{stem}.{kind}").exists():
            return [whole]
    return []


def count_parameters(config: Any) -> int:
    """Parameters of the model of a configuration, tied ones once; nothing is allocated. Imports torch.

    Raises:
        SpecError: a model that Transformers cannot build.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ImportError, ValueError, TypeError, AttributeError, RuntimeError, UnsupportedError) as e:
        raise SpecError(f"cannot count the weights of a {type(config).__name__}: {' '.join(str(e).split())[:200]}; give --weights, like --weights 16GB") from e
    return sum(p.numel() for p in model.parameters())


def _cached(hub_id: str) -> Path | None:
    """The local snapshot of a hub id, if there is one."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None
