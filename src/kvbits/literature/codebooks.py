"""Codebooks of nuq formats: weighted k-means on values as a page normalises them (KVQuant, arXiv:2401.18079, section
3.4).

    minimise  sum_i  F_i scale_i**2 (y_i - c(y_i))**2      y_i = (x_i - bias_i) / scale_i in [-1, 1],  F_i = (dLoss /
                                                           dx_i)**2

Values go into a histogram as they come, so memory does not grow with the text; k-means in one dimension then runs on
its bins: exactly, by dynamic programming over coarse bins (Wang and Song, R Journal 3(2), 2011), and on by Lloyd's
iteration over the fine ones.
"""

from __future__ import annotations

import torch

from ..errors import DataError
from ..quant.qparams import QParams, choose_qparams, expand
from ..spec import QuantSpec

BINS = 4096
COARSE = 256
ITERATIONS = 50
MIDDLES = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 / BINS) - 1
PRIOR = 1.0


class Levels:
    """Weighted histogram of the normalised keys or values of one layer.

    Args:
        spec: a codebook spec.
        num_kv_heads: of the layer.
        page_size: tokens that share page-local ranges.
        static: calibrated `scale` and `bias` [H, channels] of static specs.
        what: names the tensor in messages.
    """

    def __init__(
        self, spec: QuantSpec, num_kv_heads: int, page_size: int, static: QParams | None, what: str = "x"
    ) -> None:
        self.spec, self.page_size, self.static, self.what = spec, page_size, static, what
        self.mass = torch.zeros(num_kv_heads, BINS, dtype=torch.float64)
        self.moment = torch.zeros(num_kv_heads, BINS, dtype=torch.float64)

    def add(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """See consecutive tokens `x` [tokens, H, D] with their weights (None: all equal); tokens past the last whole
        page are left out.
        """
        pages = len(x) // self.page_size
        if not pages:
            return
        x = self._paged(x, pages)
        known = self.static and QParams(
            self.static.scale.to(x.device), None if self.static.bias is None else self.static.bias.to(x.device)
        )
        q = choose_qparams(x, self.spec, known)
        scale = expand(q.scale, self.spec, x.shape[-1])
        y = (x if q.bias is None else x - expand(q.bias, self.spec, x.shape[-1])) / scale
        w = scale * scale * (torch.ones_like(x) if weight is None else self._paged(weight, pages))
        inside = y.abs() <= 1
        bins = ((y.clamp(-1, 1) + 1) * (BINS / 2)).long().clamp(max=BINS - 1) + torch.arange(
            x.shape[1], device=x.device
        )[:, None, None] * BINS
        for total, term in ((self.mass, w * inside), (self.moment, w * y * inside)):
            total += torch.bincount(bins.flatten(), term.double().flatten(), self.mass.numel()).view_as(self.mass).cpu()

    def _paged(self, x: torch.Tensor, pages: int) -> torch.Tensor:
        """Return [pages, H, page_size, D] float32."""
        return x[: pages * self.page_size].float().unflatten(0, (pages, self.page_size)).transpose(1, 2)

    def fit(self, per_head: bool = False, prior: float = PRIOR) -> torch.Tensor:
        """Return the codebook, float32 [H, 2**bits] ascending; one for the layer unless `per_head`.

        Args:
            prior: weight of a uniform density over [-1, 1] beside the measured one.

        Raises:
            DataError: nothing with any weight was added.
        """
        mass, moment = (t if per_head else t.sum(0, keepdim=True) for t in (self.mass, self.moment))
        if not bool((mass.sum(-1) > 0).all()):
            raise DataError(
                f"{self.what}: no page with a gradient was seen; give longer prompts (a page has {self.page_size}"
                " tokens)"
            )
        uniform = prior * mass.sum(-1, keepdim=True) / BINS
        mass, moment = mass + uniform, moment + uniform * MIDDLES
        return (
            torch.stack([_kmeans(m, s, 2**self.spec.bits) for m, s in zip(mass, moment, strict=True)])
            .expand(len(self.mass), -1)
            .contiguous()
        )


def _kmeans(mass: torch.Tensor, moment: torch.Tensor, entries: int) -> torch.Tensor:
    """Return centres [entries] of weighted bins, ascending, float32."""
    centre = torch.where(mass > 0, moment / mass.clamp(min=1e-300), MIDDLES)
    c = _exact(mass, moment, entries)
    for _ in range(ITERATIONS):
        nearest = torch.bucketize(centre, (c[1:] + c[:-1]) / 2)
        m, s = (torch.zeros(entries, dtype=torch.float64).index_add_(0, nearest, t) for t in (mass, moment))
        c = torch.where(m > 0, s / m.clamp(min=1e-300), c).sort().values
    return c.float()


def _exact(mass: torch.Tensor, moment: torch.Tensor, entries: int) -> torch.Tensor:
    """Return the best centres for runs of coarse bins: cost of a run = sum m y**2 - (sum m y)**2 / sum m, whose first
    term no choice changes.
    """
    m, s = (torch.cat([t.new_zeros(1), t.view(COARSE, -1).sum(-1).cumsum(0)]) for t in (mass, moment))
    width, total = m[None, :] - m[:, None], s[None, :] - s[:, None]
    cost = torch.where(width > 0, -total * total / width.clamp(min=1e-300), 0.0)
    cost = cost.masked_fill(~torch.ones_like(cost, dtype=torch.bool).triu(1), torch.inf)  # a run has at least one bin
    best, cuts = cost[0], []
    for _ in range(entries - 1):
        best, cut = (best[:, None] + cost).min(0)
        cuts.append(cut)
    ends = [COARSE]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    edges = torch.tensor([0, *reversed(ends)])
    low, high = edges[:-1], edges[1:]
    run = m[high] - m[low]
    return torch.where(run > 0, (s[high] - s[low]) / run.clamp(min=1e-300), (low + high) / COARSE - 1)
