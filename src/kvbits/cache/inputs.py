"""Inputs of a forward pass. Their shapes, dtypes and devices are checked here, and padding and numbers that are not
finite are dealt with.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from ..errors import DataError, KvbitsError, counted
from ..later import Findings
from ..ops.types import check_factors
from ..quant.qparams import TORCH_DTYPES, require_finite
from ..spec import MOST_TOKENS, CacheSpec, whole

AT_ONCE = ("cpu",)
"""Devices whose numbers are looked at where they arrive. On others the host would wait for all work before."""
LARGEST_QUERY = 2.0**100
"""1.3e30: float32 reaches 3e8 times as far, which leaves room for keys, and for sums over their channels."""


def listed(name: str, values: Any, error: type[KvbitsError] = DataError) -> list[Any]:
    """Return `values` as a list.

    Raises:
        DataError: (or `error`) one value where several are asked for.
    """
    if isinstance(values, str) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise error(f"{name}={values!r} must be a list")
    return list(values)


def positions_of_pages(starts: Any) -> list[int]:
    """Return `starts` as a list of whole numbers.

    Raises:
        DataError: a value that is not a list, or not of positions.
    """
    return [
        whole("page that begins at token", at, -MOST_TOKENS, MOST_TOKENS, error=DataError)
        for at in listed("pages of a layer group", starts)
    ]


def lengths_of(lengths: Any, held: list[int]) -> list[int]:
    """Return lengths to crop to, one of each sequence (one number: of all).

    Args:
        held: lengths of the sequences.

    Raises:
        DataError: another number of lengths, or one that a sequence does not have.
    """
    rows = (
        lengths
        if isinstance(lengths, (list, tuple, np.ndarray, torch.Tensor)) and np.ndim(lengths)
        else [lengths] * len(held)
    )
    wanted = [whole("length", n, -MOST_TOKENS, MOST_TOKENS, error=DataError) for n in rows]
    if len(wanted) != len(held):
        raise DataError(f"{counted(len(wanted), 'length')} for {counted(len(held), 'sequence')}")
    for row, (n, have) in enumerate(zip(wanted, held, strict=True)):
        if not 0 <= n <= have:
            raise DataError(f"cannot crop sequence {row} to {n} tokens; it has {have}")
    return wanted


def chosen_pages(starts: Any, held: list[list[int]], row: int) -> list[list[int]]:
    """Return positions of first tokens of closed pages, per layer group.

    Args:
        held: those that sequence `row` has.

    Raises:
        DataError: not a list per group, or positions where no closed page begins.
    """
    wanted = [positions_of_pages(s) for s in listed("pages", starts)]
    if len(wanted) != len(held):
        raise DataError(
            f"{len(wanted)} lists of pages for {len(held)} layer groups; pass one for each, as closed_pages() gives"
            " them"
        )
    for g, (of_group, known) in enumerate(zip(wanted, held, strict=True)):
        if bad := sorted(set(of_group) - set(known)):
            raise DataError(
                f"no closed page of sequence {row} begins at token {bad[0]} in layer group {g}; closed_pages({row})"
                " lists them"
            )
    return wanted


def require_layer(spec: CacheSpec, layer: Any) -> None:
    """Require that the cache has a layer.

    Raises:
        DataError: the cache has no such layer.
    """
    if layer not in range(len(spec.layers)):
        raise DataError(f"layer {layer} does not exist; the cache has {counted(len(spec.layers), 'layer')}")


class InputCheck:
    """Checker of a cache's queries, keys and values; a kind of call that passed is not looked at again."""

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._passed: dict[int, tuple[Any, ...]] = {}
        self._factors: tuple[Any, ...] | None = None

    def check(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Refuse what does not fit the cache, whatever its numbers.

        Raises:
            DataError: naming the tensor, what it is and what it must be.
        """
        try:
            given = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        except AttributeError:
            raise DataError(
                f"queries, keys and values must be tensors, got {', '.join(type(x).__name__ for x in (q, k, v))}"
            ) from None
        if self._passed.get(layer) == given:
            return
        spec, device = self._spec, self._device
        require_layer(spec, layer)
        g = spec.layers[layer]
        if q.ndim != 4 or not q.shape[2] or q.shape[2] % g.num_kv_heads or q.shape[3] != g.head_dim:
            raise DataError(
                f"queries of layer {layer} have shape {tuple(q.shape)}; they need 4 dimensions (sequences, tokens,"
                f" heads, head_dim), heads a positive multiple of {g.num_kv_heads}, head_dim {g.head_dim}"
            )
        for name, x in (("queries", q), ("keys", k), ("values", v)):
            want = (q.shape[0], q.shape[1], g.num_kv_heads, g.dim(name[0]))
            if name != "queries" and tuple(x.shape) != want:
                raise DataError(
                    f"{name} of layer {layer} have shape {tuple(x.shape)}, expected {want} = (sequences, tokens, kv"
                    " heads, head_dim)"
                )
            if x.dtype != TORCH_DTYPES[spec.raw_dtype]:
                raise DataError(
                    f"{name} of layer {layer} are {x.dtype}, but the cache was built for {spec.raw_dtype}; build it"
                    f" again (KVCache.for_model, or CacheSpec with raw_dtype={str(x.dtype)[6:]!r})"
                )
            if x.device.type != device.type:
                raise DataError(
                    f"{name} of layer {layer} are on {x.device}, but the cache is on {device}; build it with"
                    f" device={str(x.device)!r}"
                )
        self._passed[layer] = given

    def check_scores(
        self, q: torch.Tensor, scaling: float, softcap: float | None, sink_logits: torch.Tensor | None
    ) -> None:
        """Refuse what is done to the scores of queries [B, T, Hq, D], before anything is stored.

        Raises:
            DataError: naming the argument and its limits.
        """
        if (factors := (type(scaling), scaling, type(softcap), softcap)) != self._factors:
            check_factors(scaling, softcap)
            self._factors = factors
        if sink_logits is not None and (
            not isinstance(sink_logits, torch.Tensor) or tuple(sink_logits.shape) != (q.shape[2],)
        ):
            raise DataError(
                f"sink_logits must be a tensor [{q.shape[2]}], one number for each query head, got"
                f" {getattr(sink_logits, 'shape', sink_logits)}"
            )

    @staticmethod
    def check_queries(layer: int, q: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Refuse real queries [B, T, Hq, D] whose products with keys no float32 holds, where that can be seen without
        waiting.

        Raises:
            DataError: with their largest magnitude.
        """
        if q.device.type not in AT_ONCE or q.dtype == torch.float16 or not q.numel():
            return
        if valid is not None and valid.shape == q.shape[:2]:
            q = torch.where(valid.to(q.device, torch.bool)[..., None, None], q, 0)
        low, high = map(float, q.detach().aminmax())
        if max(-low, high) > LARGEST_QUERY:  # not of NaN, which comes out as NaN
            raise DataError(
                f"queries of layer {layer} reach {max(-low, high):.3g}, beyond {LARGEST_QUERY:g}, where float32 cannot"
                " hold their products with keys; fix the model's numerics. Nothing was stored in this pass"
            )

    def clean(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, T, H, D] with zeros for padding, which may hold anything, and all numbers finite.

        Args:
            valid: bool [B, T], False for padding; one of another shape is left to `Passes.begin`, which refuses it.

        Raises:
            DataError: NaN or infinity; on a GPU `ask` finds them.
        """
        if valid is not None and valid.shape == k.shape[:2]:
            real = valid.to(k.device)[..., None, None]
            k, v = torch.where(real, k, 0), torch.where(real, v, 0)
        if k.device.type in AT_ONCE:
            require_finite(k, f"keys of layer {layer}")
            require_finite(v, f"values of layer {layer}")
        return k, v

    def ask(self, layer: int, k: torch.Tensor, v: torch.Tensor, findings: Findings) -> None:
        """Have NaN and infinity in `clean` keys and values of a GPU found at the end of the pass.

        Single tokens are not asked: their page's closing is.
        """
        if k.shape[1] == 1 or k.device.type in AT_ONCE:
            return
        for name, x in (("keys", k), ("values", v)):
            findings.ask(
                torch.linalg.vector_norm(x, torch.inf, (1, 2, 3)),
                functools.partial(_judge, f"{name} of layer {layer}", x.shape[1]),
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_passed": {}}


def _judge(what: str, num_tokens: int, largest: list[float]) -> None:
    """Refuse keys or values if the largest magnitude of a sequence is NaN or infinite."""
    if bad := [row for row, x in enumerate(largest) if not math.isfinite(x)]:
        raise DataError(
            f"{what} hold NaN or infinity among the {num_tokens} tokens of sequence {bad[0]} ({len(bad)} of"
            f" {len(largest)} sequences have some); fix the model's numerics (float16 overflow is the usual cause: try"
            " bfloat16). Nothing was stored in this pass"
        )
