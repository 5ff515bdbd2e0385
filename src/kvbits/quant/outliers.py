"""Dense-and-sparse (KVQuant, arXiv:2401.18079, section 3.5): a few elements of a page keep their error beside the
codes.

Page-local ranges first leave out the elements that widen them most; a page lists as many errors as its spec says, those
of elements past the ends of their range first, then the largest ones. So nothing is cut off: with page-local ranges no
more elements lie outside than are listed; with calibrated ranges a token that has more is stretched as a whole until
they fit.
"""

from __future__ import annotations

import torch

MAX_PER_GROUP = 4
"""Most elements that one range leaves out."""
_FIRST = 2.0**64  # ranks any element past the ends before any inside


def trimmed_ends(groups: torch.Tensor, num_outliers: int, high_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ends of each group's range without the `num_outliers` elements of the page that widen the ranges most.

    Elements leave a group one at a time, always the end that is further from its neighbour (the high one if equal).
    What leaving wins is the difference of the squared widths; no later leaving counts more than the one before it. The
    page takes the largest wins, at equal wins those of the first group.

    Args:
        groups: [..., groups, n], n elements share a range; all groups of one leading index share the budget.
        high_only: only the high end moves (magnitudes).

    Returns:
        low, high: [..., groups]; a zero is +0.
    """
    s = groups.sort(-1).values
    n = s.shape[-1]
    steps = min(MAX_PER_GROUP, n - 1)
    low = torch.zeros(s.shape[:-1], dtype=torch.int64, device=s.device)
    high = low + n - 1

    def at(i: torch.Tensor) -> torch.Tensor:
        return s.gather(-1, i.unsqueeze(-1)).squeeze(-1)

    lows, highs = [low], [high]
    wins: list[torch.Tensor] = []
    width = at(high) if high_only else at(high) - at(low)
    for _ in range(steps):
        drop_low = (
            torch.zeros_like(low, dtype=torch.bool) if high_only else at(low + 1) - at(low) > at(high) - at(high - 1)
        )
        low, high = low + drop_low.long(), high - (~drop_low).long()
        narrower = at(high) if high_only else at(high) - at(low)
        win = width * width - narrower * narrower
        wins.append(win if not wins else torch.minimum(win, wins[-1]))
        lows.append(low)
        highs.append(high)
        width = narrower
    taken = _largest(torch.stack(wins, -1).flatten(-2), num_outliers).long()
    count = taken.unflatten(-1, (-1, steps)).sum(-1, keepdim=True)
    found = [at(torch.stack(ends, -1).gather(-1, count).squeeze(-1)) for ends in (lows, highs)]
    return found[0] + 0.0, found[1] + 0.0


def worst(error: torch.Tensor, outside: torch.Tensor, num_outliers: int) -> torch.Tensor:
    """Return indices token * head_dim + channel, int64 [..., num_outliers] ascending, of the elements a page lists.

    Args:
        error: |x - dense value|, float32 [..., tokens, head_dim].
        outside: bool, elements past the ends of their range: they come first. At equal errors the lower index does.
    """
    rank = torch.where(outside, error * _FIRST, error).flatten(-2)
    taken = _largest(rank, num_outliers)
    return taken.nonzero()[:, -1].view(*rank.shape[:-1], -1)


def _largest(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return bool like x: the n largest of the last dimension, of equal ones the first. (A stable sort of a page takes
    ten times as long.)
    """
    x = x.nan_to_num(nan=torch.inf)  # what widths beyond float32 win over others
    least = x.topk(min(n, x.shape[-1]), sorted=False).values.amin(-1, keepdim=True)
    above, equal = x > least, x == least
    return above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
