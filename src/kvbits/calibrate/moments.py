"""Calibrated bases and means of keys (`basis="calibrated"`, `center="calibrated"`, quant/basis.py) from moments of each
kv head, no gradients.

    M  = mean of keys turned back to the first position of their run of `spec.MEAN_STEP`;   K0 = mean key of position 0
    S  = mean of (k_f - R(16 o) M)(k_f - R(16 o) M)^T        k_f: a key turned back by its frame, o: its run in the
                                                             frame
    Q0 = sum of q_0 q_0^T                                    q_0: a query turned back by its own position, over the
                                                             query heads of the kv head
    H  = mean over distances d of R(d) Q0 R(d)^T             the queries for keys of a frame d back; d log-uniform
                                                             from 1 to `FARTHEST` or the window

So H knows queries that are further from their keys than the calibration text is long: H of windows of 1,024 tokens errs
1.7 times more at distances of 2,048 to 4,096 than within 512, this one by a tenth. The first 64 positions of a text are
left out of M and S: the sink is there.

Both moments get a ridge, so that a direction that the calibration text never used costs precision there and not the
whole basis. A head whose moments say too little (fewer tokens than twice its channels, or nothing but zeros) gets a
stronger one and is named there, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from ..errors import DataError, KvbitsWarning, counted
from ..quant.basis import with_short_inverse
from ..quant.rotary import turn
from ..quant.scales import steps
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
BEGINNING = 64
"""First positions of a text, which M and S leave out."""
FARTHEST, DISTANCES = 32_768, 256
"""Longest distance of a query from a frame that H is averaged to, and how many are taken."""


OF_HEADS = ("keys", "sums", "first", "alike", "total")
"""Parts of a `Moments.state` that have a row for each kv head."""


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
        self.sums, self.counts = torch.zeros(h, runs, d, dtype=torch.float64), torch.zeros(FRAME, dtype=torch.float64)
        self.alike, self.total = torch.zeros(h, d, d, dtype=torch.float64), torch.zeros(h, d, dtype=torch.float64)
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
        if bool((later := positions >= BEGINNING).any()):
            k, positions = k[:, later], positions[later]
        in_frame = turn(k, positions // FRAME * FRAME, self.inv_freq, back=True).double()
        self.keys += (in_frame.mT @ in_frame).cpu()
        at = positions % FRAME
        self.sums += torch.zeros_like(self.sums, device=k.device).index_add_(1, at // MEAN_STEP, in_frame).cpu()
        self.counts += at.bincount(minlength=FRAME).double().cpu()
        alike = turn(k, positions, self.inv_freq, back=True).double()
        self.alike += (alike.mT @ alike).cpu()
        self.total += alike.sum(1).cpu()

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that was seen, in tensors."""
        parts = {name: getattr(self, name) for name in ("queries", "counts", *OF_HEADS)}
        return parts | {"texts": torch.tensor(self.texts)}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Have seen what a `state` says."""
        for name in ("queries", "counts", *OF_HEADS):
            setattr(self, name, state[name])
        self.texts = int(state["texts"])

    def mean(self) -> torch.Tensor:
        """Return `k_mean`, float32 [H, 2, D]: M and K0; M again where no text began at position 0."""
        mean = self._mean()
        return torch.stack([mean, self.first / self.texts if self.texts else mean], 1).float()

    @property
    def unseen(self) -> torch.Tensor:
        """Positions of a frame that no text showed, int64."""
        return (self.counts == 0).nonzero().squeeze(1)

    def _completed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `keys`, `sums` and keys of each run, float64 [runs], with as many at unseen positions as at the
        others.
        """
        keys, sums, counts = self.keys, self.sums, self.counts
        if self.tokens and len(at := self.unseen):
            many = self.tokens / (FRAME - len(at))
            means = turn(self.total[:, None].expand(-1, len(at), -1) / self.tokens, at, self.inv_freq)
            keys = keys + many * len(at) * turned(self.alike / self.tokens, self.inv_freq, at)
            sums = sums.index_add(1, at // MEAN_STEP, many * means)
            counts = counts.index_fill(0, at, many)
        return keys, sums, counts.view(-1, MEAN_STEP).sum(1)

    def _mean(self) -> torch.Tensor:
        """Return float64 [H, D]."""
        _, sums, counts = self._completed()
        runs = MEAN_STEP * torch.arange(len(counts))
        return turn(sums, runs, self.inv_freq, back=True).sum(1) / max(counts.sum().item(), 1)

    def _spread(self) -> torch.Tensor:
        """Return S, float64 [H, D, D]."""
        keys, sums, counts = self._completed()
        tokens = max(counts.sum().item(), 1)
        if not self.spec.has_offsets:
            return keys / tokens
        runs = MEAN_STEP * torch.arange(len(counts))
        means = turn(self._mean()[:, None].expand(-1, len(runs), -1), runs, self.inv_freq)
        cross = sums.mT @ means
        return (keys - cross - cross.mT + (means * counts[:, None]).mT @ means) / tokens

    def basis(self) -> torch.Tensor:
        """Return `k_basis`, float32 [H, D, D]: y = k_f @ basis.

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
            elif bool(((self.counts == 0).view(-1, MEAN_STEP).sum(1) > MEAN_STEP // 2).any()):
                self.weak.append(
                    f"kv head {head} of {self.what}: the texts show {FRAME - len(self.unseen)} of the {FRAME} positions"
                    " of a frame, and its keys are taken to be alike at the others"
                )
            values, vectors = torch.linalg.eigh(h)
            root = (vectors * values.sqrt()) @ vectors.mT
            spread, directions = torch.linalg.eigh(root @ s @ root)
            spread, directions = spread.flip(-1).clamp(min=0).sqrt(), directions.flip(-1)
            step = spread.clamp(min=LEAST_SPREAD * spread.max().item()) * steps(self.spec, len(keys)).double()
            found.append(root @ directions / step)
        return with_short_inverse(torch.stack(found))


def warn_of(weak: Iterable[str], stacklevel: int) -> None:
    """Warn which bases are weak (`Moments.weak`), if any is.

    Warns:
        KvbitsWarning: naming the first, how many others there are, and the way out.
    """
    if heads := list(dict.fromkeys(weak)):
        others = "" if len(heads) == 1 else f", and {counted(len(heads) - 1, 'other head')}"
        warnings.warn(
            f"{heads[0]}{others}; such a basis may be wrong for other texts: calibrate on more tokens, in texts of at"
            f" least {FRAME + BEGINNING}",
            KvbitsWarning,
            stacklevel=stacklevel + 1,
        )


def far(moment: torch.Tensor, inv_freq: torch.Tensor, farthest: int) -> torch.Tensor:
    """Return the mean of R(d) Q0 R(d)^T, float64 [H, D, D], over `DISTANCES` distances d from 1 to `farthest`,
    log-uniform.
    """
    distances = torch.logspace(0, math.log2(farthest), DISTANCES, base=2, dtype=torch.float64).round()
    return turned(moment, inv_freq, distances)


def turned(moment: torch.Tensor, inv_freq: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Return the mean of R(d) M R(d)^T, float64 [H, D, D], over distances d [n] of moments M [H, D, D].

    With channels i and i + D/2 as a complex number z_i, R(d) is a factor exp(i f_i d): E[z_i z_j*] takes exp(i (f_i -
    f_j) d) and E[z_i z_j] takes exp(i (f_i + f_j) d), whose means over d are two tables.
    """
    phases = torch.exp(1j * distances.double()[:, None] * inv_freq.double())
    apart, along = phases.mT @ phases.conj() / len(distances), phases.mT @ phases / len(distances)
    half = moment.shape[-1] // 2
    a, b, c = moment[:, :half, :half], moment[:, :half, half:], moment[:, half:, half:]
    p, n = torch.complex(a + c, b.mT - b) * apart, torch.complex(a - c, b + b.mT) * along
    b = (n.imag - p.imag) / 2
    return torch.cat([torch.cat([(p.real + n.real) / 2, b], -1), torch.cat([b.mT, (p.real - n.real) / 2], -1)], -2)


def _ridged(moment: torch.Tensor, few: bool, ridge: float) -> tuple[torch.Tensor, bool]:
    """Return a moment [D, D] with its ridge, and whether it says too little."""
    size = moment.diagonal().mean()
    dead = not bool(size > 0)
    unit = torch.eye(len(moment), dtype=moment.dtype)
    return (unit if dead else moment + (STRONG_RIDGE if few else ridge) * size * unit), few or dead
