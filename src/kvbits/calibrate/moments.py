"""Calibrated bases of keys (`basis="calibrated"`, quant/basis.py) from two second moments of each kv head, no gradients.

    H = sum of q_f q_f^T                              q_f: a query turned back by the frame of a page that it reads, once for each such page,
                                                      over the query heads of the kv head
    S = mean of (k_f - mean)(k_f - mean)^T            over the pages that a cache of the scheme would close, mean: the page's own

Both get a ridge, so that a direction that the calibration text never used costs precision there and not the whole basis. A head whose moments
say too little (fewer tokens than twice its channels, or nothing but zeros) gets a stronger one and is named in `Moments.weak`.
"""

from __future__ import annotations

import torch

from ..errors import DataError
from ..quant.banded import steps
from ..quant.basis import with_short_inverse
from ..quant.rotary import turn
from ..spec import FRAME, LayerGeometry, QuantSpec

RIDGE = {"queries": 1e-3, "keys": 1e-6}
"""Share of the mean of a moment's diagonal that is added to it. Spreads of keys are steps, so theirs is there for rounding errors only."""
STRONG_RIDGE = 0.3
"""The same where a moment says too little: the basis then leans on the channels as they are."""
LEAST_SPREAD = 1e-4
"""Least standard deviation of a channel of the basis, as a share of the largest: steps below it would only follow rounding errors."""


class Moments:
    """Second moments of the queries and keys of one layer.

    Args:
        spec: of the keys, with `basis="calibrated"`.
        geometry: of the layer, with its rotary embedding.
        page_size: tokens of a page.
        what: names the layer in messages.

    Attributes:
        weak: what `basis` found too little for, and why, a kv head each.
    """

    def __init__(self, spec: QuantSpec, geometry: LayerGeometry, page_size: int, what: str) -> None:
        assert geometry.rotary is not None
        self.spec, self.page_size, self.what = spec, page_size, what
        self.inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32)
        self.order = torch.tensor(geometry.rotary.order(geometry.head_dim))
        shape = (geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
        self.queries, self.keys = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self.pages = 0
        self.weak: list[str] = []

    def add(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """See consecutive tokens of one sequence: q [T, Hq, D] and k [T, H, D] as attention has them, at ascending positions [T].

        Keys past the last whole page are left out, queries are not.

        Raises:
            DataError: NaN or infinity.
        """
        if not bool(torch.isfinite(q).all() and torch.isfinite(k).all()):
            raise DataError(f"queries or keys of {self.what} hold NaN or infinity; load the model in bfloat16 or float32")
        order = self.order.to(k.device)
        q, k = (x[..., order].float().transpose(0, 1) for x in (q, k))
        size, pages = self.page_size, k.shape[1] // self.page_size
        for frame in torch.unique(positions[: pages * size : size] // FRAME * FRAME).tolist():
            mine = [p for p in range(pages) if int(positions[p * size]) // FRAME * FRAME == frame]
            at = torch.tensor([frame])
            closed = torch.stack([k[:, p * size : (p + 1) * size] for p in mine], 1)  # [H, pages, tokens, D]
            closed = turn(closed, at, self.inv_freq, back=True).double()
            closed = closed - closed.mean(-2, keepdim=True)
            self.keys += torch.einsum("hptd,hpte->hde", closed, closed).cpu() / size
            readers = turn(q[:, positions >= int(positions[mine[0] * size]) + size], at, self.inv_freq, back=True).double()
            readers = readers.unflatten(0, (k.shape[0], -1)).flatten(1, 2)
            self.queries += (readers.mT @ readers).cpu() * len(mine)
        self.pages += pages

    def take(self, other: Moments) -> None:
        """Have seen what `other` saw, moments of the same layer and pages for keys of other widths."""
        self.queries, self.keys, self.pages = other.queries, other.keys, other.pages

    def basis(self) -> torch.Tensor:
        """`k_basis`, float32 [H, D, D]: y = k_f @ basis. Its inverse is float16 numbers times a power of two for each head."""
        found = []
        for head, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            few = self.pages * (self.page_size - 1) < 2 * len(keys)
            h, weak_h = _ridged(queries, few, RIDGE["queries"])
            s, weak_s = _ridged(keys / max(self.pages, 1), few, RIDGE["keys"])
            if weak_h or weak_s:
                why = f"{self.pages} pages of {self.page_size} tokens were seen" if few else "its queries or keys are all zero"
                self.weak.append(f"kv head {head} of {self.what}: {why}, too little for a basis of {len(keys)} channels")
            values, vectors = torch.linalg.eigh(h)
            root = (vectors * values.sqrt()) @ vectors.mT
            spread, directions = torch.linalg.eigh(root @ s @ root)
            spread, directions = spread.flip(-1).clamp(min=0).sqrt(), directions.flip(-1)
            step = spread.clamp(min=LEAST_SPREAD * spread.max().item()) * steps(self.spec, len(keys)).double()
            found.append(root @ directions / step)
        return with_short_inverse(torch.stack(found))


def for_widths(basis: torch.Tensor, was: QuantSpec, spec: QuantSpec) -> torch.Tensor:
    """`k_basis` [H, D, D] of keys of `spec`, from that of keys `was`, whose bands have other widths: the same directions in other steps."""
    size = basis.shape[-1]
    return basis if was.widths(size) == spec.widths(size) else with_short_inverse(basis.double() * (steps(was, size) / steps(spec, size)).to(basis.device))


def _ridged(moment: torch.Tensor, few: bool, ridge: float) -> tuple[torch.Tensor, bool]:
    """A moment [D, D] with its ridge, and whether it says too little."""
    size = moment.diagonal().mean()
    dead = not bool(size > 0)
    unit = torch.eye(len(moment), dtype=moment.dtype)
    return (unit if dead else moment + (STRONG_RIDGE if few else ridge) * size * unit), few or dead
