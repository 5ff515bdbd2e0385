"""Parameters that the pages of a layer share (`PageStore.static`): names, shapes, and numbers that they can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import SpecError
from ..quant.basis import conditions
from ..spec import OFFSETS, PageLayout, QuantSpec

MOST_CONDITION = 1e6
"""Largest condition number of a basis: beyond it float32 products lose what codes keep."""
LARGEST = 1e30
"""Largest scale or bias: beyond it float32 does not hold what the codes of every format stand for, and their products.
"""
_accepted = WeakIdKeyDictionary()


def calibrated(spec: QuantSpec, side: str, num_kv_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the calibrated tensors that a side ("k", "v") of a layer needs."""
    shared = spec.scale_shape(0, head_dim) if spec.static else ()
    shapes = {
        "scale": shared,
        "bias": shared,
        "codebook": (2**spec.bits,),
        "basis": (head_dim, head_dim),
        "mean": (2, head_dim),
    }
    return {f"{side}_{name}": (num_kv_heads, *shapes[name]) for name in spec.calibrates}


def read_with(layout: PageLayout) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of what attention needs beside the pages of a layout: what was calibrated, but for a
    basis and mean its inverse and offsets (`quant.basis`), and the frequencies of the rotary embedding where keys were
    turned back.
    """
    heads, d = layout.num_kv_heads, layout.head_dim
    found = calibrated(layout.key, "k", heads, d) | calibrated(layout.value, "v", heads, layout.value_head_dim)
    if found.pop("k_basis", None):
        found["k_inverse"] = (heads, d, d)
    if found.pop("k_mean", None):
        found["k_offsets"] = (heads, OFFSETS, d)
    return found | ({"k_inv_freq": (d // 2,)} if layout.key.needs_rotary else {})


def check(static: Mapping[str, Any], want: Mapping[str, tuple[int, ...]], where: str, way_out: str) -> None:
    """Refuse parameters that do not fit or are invalid.

    Numbers are looked at once for a tensor, which waits for its device, and not while a CUDA graph is captured, which
    allows no waiting.

    Args:
        where: like "of layer 3", for messages.
        way_out: what to do about it.

    Raises:
        SpecError: naming the tensor, what it holds and where.
    """
    for name, shape in want.items():
        if name not in static:
            raise SpecError(f"there is no {name} {where}, float32 {list(shape)}; {way_out}")
        x = static[name]
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise SpecError(
                f"{name} {where} must be a tensor float32 {list(shape)}, got"
                f" {x.dtype if isinstance(x, torch.Tensor) else type(x).__name__}"
            )
        if tuple(x.shape) != shape:
            raise SpecError(f"{name} {where} has shape {tuple(x.shape)}, expected {shape}; {way_out}")
        version = 0 if x.is_inference() else x._version
        if _accepted.setdefault(x, {}).get(name) != version and not (
            x.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            if why := _impossible(name.split("_", 1)[1], x.detach()):
                raise SpecError(f"{name} {where}{why}; {way_out}")
            _accepted[x][name] = version


def _impossible(kind: str, x: torch.Tensor) -> str | None:
    """Return why `x` is not a scale, bias, codebook, basis, inverse or frequencies, to stand behind its name,
    or None.
    """
    if kind == "basis":  # not finite numbers have no condition number
        found = conditions(x)
        head = int(found.argmax())
        return (
            None
            if found[head] <= MOST_CONDITION
            else f", kv head {head}, has condition number {found[head].item():.3g}, above {MOST_CONDITION:g}"
        )
    most = {"scale": LARGEST, "bias": LARGEST, "mean": LARGEST, "codebook": 1.0}.get(kind, torch.inf)
    bad = ~torch.isfinite(x) | (x.abs() > most)
    if kind == "scale":
        bad |= x <= 0
    if bool(bad.any()):
        place = [int(i) for i in bad.nonzero()[0]]
        value = x[tuple(place)].item()
        within = f"finite numbers up to {LARGEST:g}"
        only = {
            "scale": f"positive and {within}",
            "bias": within,
            "mean": within,
            "codebook": "ascending numbers in [-1, 1]",
        }.get(kind, "finite numbers")
        return f" holds {value:g} at {place}, where only {only} can be"
    if kind == "codebook" and not bool((x.diff() >= 0).all()):
        return " must hold ascending numbers in [-1, 1], as `kvbits calibrate` writes them"
    return None
