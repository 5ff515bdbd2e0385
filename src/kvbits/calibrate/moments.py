"""Calibrated bases and means of keys (`basis="calibrated"`, `center="calibrated"`, quant/basis.py) from moments of each
kv head, no gradients.

    M  = mean of keys turned back to the first position of their run of `spec.MEAN_STEP`;   K0 = mean key of position 0
    S  = mean of (k_f - R(64 o) M)(k_f - R(64 o) M)^T        k_f: a key turned back by its frame, o: its run in the
                                                             frame
    Q0 = sum of q_0 q_0^T                                    q_0: a query turned back by its own position, over the
                                                             query heads of the kv head
    H  = mean over distances d of R(d) Q0 R(d)^T             what keys of a frame d positions back meet; d log-uniform
                                                             from 1 to `FARTHEST` or the window

So H knows queries that are further from their keys than the calibration text is long: H of windows of 1,024 tokens errs
1.7 times more at distances of 2,048 to 4,096 than within 512, this one by a tenth (docs/results/log). The first 64
positions of a text are left out of M and S: the sink is there.

Both moments get a ridge, so that a direction that the calibration text never used costs precision there and not the
whole basis. A head whose moments say too little (fewer tokens than twice its channels, or nothing but zeros) gets a
stronger one and is named in `Moments.weak`.
"""

from __future__ import annotations

import math

import torch

from ..errors import DataError
from ..quant.banded import steps
from ..quant.basis import with_short_inverse
from ..quant.rotary import turn
from ..spec import FRAME, MEAN_STEP, LayerGeometry, QuantSpec

RIDGE = {"queries": 1e-3, "keys": 1e-6}
"""Share of the mean of a moment's diagonal that is added to it.

Spreads of keys are steps, so theirs is there for rounding errors only.
"""
STRONG_RIDGE = 0.3
"""The same where a moment says too little: the basis then leans on the channels as they are."""
LEAST_SPREAD = 1e-4
"""Least standard deviation of a channel of the basis, as a share of the largest: steps below it would only follow
rounding errors.
"""
FARTHEST, DISTANCES = 32_768, 256
"""Longest distance of a query from a frame that H is averaged to, and how many are taken."""


class Moments:
    """Moments of the queries and keys of one layer.

    Args:
        spec: of the keys, with `basis="calibrated"`.
        geometry: of the layer, with its rotary embedding.
        what: names the layer in messages.

    Attributes:
        tokens: keys that were seen.
        weak: what `basis` found too little for, and why, a kv head each.
    """

    def __init__(self, spec: QuantSpec, geometry: LayerGeometry, what: str) -> None:
        assert geometry.rotary is not None
        self.spec, self.what, self.farthest = spec, what, min(geometry.sliding_window or FARTHEST, FARTHEST)
        self.inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32)
        self.order = torch.tensor(geometry.rotary.order(geometry.head_dim))
        h, d, runs = geometry.num_kv_heads, geometry.head_dim, FRAME // MEAN_STEP
        self.queries, self.keys = torch.zeros(h, d, d, dtype=torch.float64), torch.zeros(h, d, d, dtype=torch.float64)
        self.sums, self.counts = torch.zeros(h, runs, d, dtype=torch.float64), torch.zeros(runs, dtype=torch.float64)
        self.first, self.texts = torch.zeros(h, d, dtype=torch.float64), 0
        self.weak: list[str] = []

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def add(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """See tokens: q [T, Hq, D] and k [T, H, D] as attention has them, at positions [T]; each position 0 begins a
        text.

        Raises:
            DataError: NaN or infinity.
        """
        if not bool(torch.isfinite(q).all() and torch.isfinite(k).all()):
            raise DataError(
                f"queries or keys of {self.what} hold NaN or infinity; load the model in bfloat16 or float32"
            )
        order = self.order.to(k.device)
        q, k = (x[..., order].float().transpose(0, 1) for x in (q, k))
        positions = positions.to(k.device)
        back = turn(q, positions, self.inv_freq, back=True).double().unflatten(0, (k.shape[0], -1)).flatten(1, 2)
        self.queries += (back.mT @ back).cpu()
        if bool((starts := positions == 0).any()):
            self.first += k[:, starts].double().sum(1).cpu()
            self.texts += int(starts.sum())
        if bool((later := positions >= MEAN_STEP).any()):
            k, positions = k[:, later], positions[later]
        in_frame = turn(k, positions // FRAME * FRAME, self.inv_freq, back=True).double()
        self.keys += (in_frame.mT @ in_frame).cpu()
        run = positions % FRAME // MEAN_STEP
        self.sums += torch.zeros_like(self.sums, device=k.device).index_add_(1, run, in_frame).cpu()
        self.counts += run.bincount(minlength=len(self.counts)).double().cpu()

    def state(self) -> dict[str, torch.Tensor]:
        """All that was seen, in tensors."""
        return {
            "queries": self.queries,
            "keys": self.keys,
            "sums": self.sums,
            "counts": self.counts,
            "first": self.first,
            "texts": torch.tensor(self.texts),
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Have seen what a `state` says."""
        self.queries, self.keys, self.sums, self.counts, self.first = (
            state[name] for name in ("queries", "keys", "sums", "counts", "first")
        )
        self.texts = int(state["texts"])

    def mean(self) -> torch.Tensor:
        """`k_mean`, float32 [H, 2, D]: M and K0; M again where no text began at position 0."""
        mean = self._mean()
        return torch.stack([mean, self.first / self.texts if self.texts else mean], 1).float()

    def _mean(self) -> torch.Tensor:
        """float64 [H, D]."""
        runs = MEAN_STEP * torch.arange(len(self.counts))
        return turn(self.sums, runs, self.inv_freq, back=True).sum(1) / max(self.tokens, 1)

    def _spread(self) -> torch.Tensor:
        """S, float64 [H, D, D]."""
        if not self.spec.has_offsets:
            return self.keys / max(self.tokens, 1)
        runs = MEAN_STEP * torch.arange(len(self.counts))
        means = turn(self._mean()[:, None].expand(-1, len(runs), -1), runs, self.inv_freq)
        cross = self.sums.mT @ means
        return (self.keys - cross - cross.mT + (means * self.counts[:, None]).mT @ means) / max(self.tokens, 1)

    def basis(self) -> torch.Tensor:
        """`k_basis`, float32 [H, D, D]: y = k_f @ basis.

        Its inverse is float16 numbers times a power of two for each head.
        """
        found = []
        for head, (queries, keys) in enumerate(
            zip(far(self.queries, self.inv_freq, self.farthest), self._spread(), strict=True)
        ):
            few = self.tokens < 2 * len(keys)
            h, weak_h = _ridged(queries, few, RIDGE["queries"])
            s, weak_s = _ridged(keys, few, RIDGE["keys"])
            if weak_h or weak_s:
                why = f"{self.tokens} tokens were seen" if few else "its queries or keys are all zero"
                self.weak.append(
                    f"kv head {head} of {self.what}: {why}, too little for a basis of {len(keys)} channels"
                )
            values, vectors = torch.linalg.eigh(h)
            root = (vectors * values.sqrt()) @ vectors.mT
            spread, directions = torch.linalg.eigh(root @ s @ root)
            spread, directions = spread.flip(-1).clamp(min=0).sqrt(), directions.flip(-1)
            step = spread.clamp(min=LEAST_SPREAD * spread.max().item()) * steps(self.spec, len(keys)).double()
            found.append(root @ directions / step)
        return with_short_inverse(torch.stack(found))


def far(moment: torch.Tensor, inv_freq: torch.Tensor, farthest: int) -> torch.Tensor:
    """Mean of R(d) Q0 R(d)^T, float64 [H, D, D], over `DISTANCES` distances d from 1 to `farthest`, log-uniform.

    With channels i and i + D/2 as a complex number z_i, R(d) is a factor exp(i f_i d): E[z_i z_j*] takes exp(i (f_i -
    f_j) d) and E[z_i z_j] takes exp(i (f_i + f_j) d), whose means over d are two tables.
    """
    distances = torch.logspace(0, math.log2(farthest), DISTANCES, base=2, dtype=torch.float64).round()
    phases = torch.exp(1j * distances[:, None] * inv_freq.double())
    apart, along = phases.mT @ phases.conj() / DISTANCES, phases.mT @ phases / DISTANCES
    half = moment.shape[-1] // 2
    a, b, c = moment[:, :half, :half], moment[:, :half, half:], moment[:, half:, half:]
    p, n = torch.complex(a + c, b.mT - b) * apart, torch.complex(a - c, b + b.mT) * along
    b = (n.imag - p.imag) / 2
    return torch.cat([torch.cat([(p.real + n.real) / 2, b], -1), torch.cat([b.mT, (p.real - n.real) / 2], -1)], -2)


def for_widths(basis: torch.Tensor, was: QuantSpec, spec: QuantSpec) -> torch.Tensor:
    """`k_basis` [H, D, D] of keys of `spec`, from that of keys `was`, whose bands have other widths: the same
    directions in other steps.
    """
    size = basis.shape[-1]
    return (
        basis
        if was.widths(size) == spec.widths(size)
        else with_short_inverse(basis.double() * (steps(was, size) / steps(spec, size)).to(basis.device))
    )


def _ridged(moment: torch.Tensor, few: bool, ridge: float) -> tuple[torch.Tensor, bool]:
    """A moment [D, D] with its ridge, and whether it says too little."""
    size = moment.diagonal().mean()
    dead = not bool(size > 0)
    unit = torch.eye(len(moment), dtype=moment.dtype)
    return (unit if dead else moment + (STRONG_RIDGE if few else ridge) * size * unit), few or dead
