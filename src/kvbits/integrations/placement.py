"""Devices that a model computes on.

accelerate keeps weights in host memory or on disk, or spreads layers over devices.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from ..errors import DataError, UnsupportedError, counted
from ..geometry import text_config


def device_of(model: Any) -> torch.device:
    """Return the device that the attention layers of a model's decoder compute on, wherever their weights lie
    meanwhile.

    Raises:
        UnsupportedError: there are several of them.
    """
    kind, found = text_config(model.config).model_type, dict[torch.device, str]()
    for name, module in model.named_modules():
        if _is_attention(module, kind) and (device := _computes_on(model, name, module)) is not None:
            found.setdefault(device, name)
    if len(found) > 1:
        spread = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise UnsupportedError(
            f"the layers of {type(model).__name__} compute on {counted(len(found), 'device')} ({spread}, ..), and a"
            " KVCache lies on one; load the model for one device (device_map={'': 0}, or device_map='auto' with"
            " max_memory={0: '20GB', 'cpu': '60GB'}, which keeps the other weights in host memory), let ranks share its"
            " heads (tp_plan='auto'), or use the stock cache"
        )
    return next(iter(found), model.device)


def free_bytes(device: torch.device) -> int:
    """Return bytes of a device's memory that programs may take; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return 0


def input_device(model: Any) -> torch.device:
    """Return the device where a model looks up its first tokens: where their ids are wanted."""
    return _computes_on(model, "", model) or model.device


def _is_attention(module: Any, kind: str) -> bool:
    """Return whether a module is a layer of the decoder, or its attention: it knows its number."""
    of = getattr(getattr(module, "config", None), "model_type", kind)
    return isinstance(getattr(module, "layer_idx", None), int) and of == kind


def _computes_on(model: Any, name: str, module: Any) -> torch.device | None:
    """Return the device where the first parameter of a module lies, or is brought to before it is used; None without
    one.
    """
    for inner, m in module.named_modules(prefix=name):
        if (p := next(m.parameters(recurse=False), None)) is not None:
            return _brought_to(model, inner) if p.is_meta else p.device
    return None


def _brought_to(model: Any, name: str) -> torch.device:
    """Return the device that accelerate brings the parameters of the module of this name to.

    The hook that does so is the module's own, or that of a module around it.
    """
    while True:
        hook = getattr(model.get_submodule(name), "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            if (device := getattr(one, "execution_device", None)) is not None:
                return torch.empty(0, device=device).device  # with its index
        if not name:
            return torch.device("meta")
        name = name.rpartition(".")[0]


def require_loaded(model: Any) -> None:
    """Refuse anything but a loaded model.

    Raises:
        DataError: it has no `config`.
    """
    if not hasattr(model, "config"):
        raise DataError(
            f"model of type {type(model).__name__} is not a loaded model; pass what"
            " AutoModelForCausalLM.from_pretrained or kvbits.load_model returned"
        )
