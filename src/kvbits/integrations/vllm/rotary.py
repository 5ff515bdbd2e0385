"""By how much a key turns from one page to the next, read from the rotary embedding that vLLM made for the model."""

from __future__ import annotations

from typing import Any

import torch

from .formats import PAGE_SIZE


def rope_parameters(config: Any, slides: bool) -> dict[str, Any]:
    """Return what a Transformers configuration says of a rotary embedding; an empty dict means nothing.

    The rotary embedding is that of layers that have a sliding window, or of those that have none.
    """
    found = getattr(config, "rope_parameters", None) or {}
    return found.get("sliding_attention" if slides else "full_attention", found)


def page_turn(head_dim: int, parameters: dict[str, Any]) -> torch.Tensor | None:
    """Return float32 [3, head_dim], as `quant.rotary.turn_by` gives it for a page, on the CPU.

    None where the model has no rotary embedding, or several of one kind.

    Args:
        parameters: of the layer's rotary embedding (`rope_parameters`); where vLLM made none of them, all that it made
            count.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    wanted = {(name, tuple(x) if isinstance(x, list) else x) for name, x in parameters.items()}
    # models name them in any order
    named = [
        module for key, module in _ROPE_DICT.items() if any(isinstance(x, tuple) and set(x) == wanted for x in key)
    ]
    modules = named or list(_ROPE_DICT.values())
    found = [turn for module in modules if (turn := turn_of(module, head_dim)) is not None]
    return found[0] if found and all(torch.equal(found[0], x) for x in found) else None


def turn_of(module: Any, head_dim: int) -> torch.Tensor | None:
    """Return the same of one module of vLLM with `cos_sin_cache` [positions, rotary_dim]: cosines, then sines, both
    scaled alike in some models.
    """
    cache = getattr(module, "cos_sin_cache", None)
    if (
        cache is None
        or getattr(module, "head_size", None) != head_dim
        or cache.dim() != 2
        or cache.shape[0] <= PAGE_SIZE
        or hasattr(module, "mrope_section")
    ):
        return None
    rows = cache[[0, PAGE_SIZE]].float().cpu()
    n = rows.shape[1] // 2
    cos, sin = (rows[1] / rows[0, :n].repeat(2)).split(n)
    first, second = (
        (torch.arange(n), torch.arange(n, 2 * n))
        if module.is_neox_style
        else (torch.arange(0, 2 * n, 2), torch.arange(1, 2 * n, 2))
    )
    turn = torch.zeros(3, head_dim, dtype=torch.float32)
    turn[0], turn[2] = 1, torch.arange(head_dim, dtype=torch.float32)
    turn[0, first], turn[0, second] = cos, cos
    turn[1, first], turn[1, second] = -sin, sin
    turn[2, first], turn[2, second] = second.float(), first.float()
    return turn
