"""Trellis codes: a code of k bits picks one of 2**(k+1) levels, together with its neighbours' lowest bits.

Channels form rings of 16 (`rings`). With b(t) the lowest bit of the code of a ring's t-th channel, places counted
around the ring, and m the code's other k - 1 bits, a code means

    index = 4 m + 2 (b(t) ^ b(t-2)) + b(t-1)           0 .. 2**(k+1) - 1
    x ~ level[index] * scale / UNIT                    levels: integers by width, ascending, level[-1 - i] = -level[i]

This is Ungerboeck's code (2, 5): 4 states, of b(t-1) and b(t-2), where the state before a ring's first channel is that
behind its last. Every sequence of codes means something, so nothing is stored beside them. One in 2**16 sequences of
indices has codes; `quantize` takes the one with the least squared error (Viterbi's algorithm, once from each state).
Channels of 0 bits read as 0. Channels of 8 bits are in no ring: theirs is the level nearest to u, 1 scale apart, as in
`quant.banded`, which 9 bits of an index would not improve.

**Which codes** is defined in integers, so that every backend stores the same bytes:

    u      x times (UNIT / scale), a float32 quotient and a float32 product; at most FARTHEST of either sign; rounded to
           an integer, ties to even
    cost   of a channel with coset q, q = index mod 4: (u - level)**2 of the coset's level that is nearest to u, the
           lower one of two. Sums around a ring stay below 2**31: no term is rounded, and their order is free
    path   the one of least cost. Among equals: the one whose state 2 b(t-1) + b(t) behind the last channel is the
           lowest number, then behind the one before, and so on to the first
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from kvbits.spec import BAND

RING = 16
"""Channels of a ring."""
UNIT = 64
"""Parts of a scale in which levels are integers."""
FARTHEST = 8192
"""Largest magnitude of u, beyond all levels. With that of the farthest in a ring, 2,032, sums of a ring's squares stay
below `_NEVER`.
"""
_NEVER = 2_000_000_000
"""More than a path costs; one square more still fits 32 bits."""
STATES = 4
WIDTHS = (1, 2, 3, 4, 5, 6)
"""Bits of codes that rings are made of."""

Levels = Mapping[int, tuple[int, ...]]
"""Levels by bits of a code, in units, ascending."""


def _uniform(bits: int) -> tuple[int, ...]:
    return tuple(UNIT // 4 * i for i in range(1 - 2 ** (bits + 1), 2 ** (bits + 1), 2))


def _mirrored(*levels: int) -> tuple[int, ...]:
    return (*(-x for x in reversed(levels)), *levels)


UNIFORM: Levels = {k: _uniform(k) for k in WIDTHS}
"""Half a scale apart. The steps of `banded.STEP` are the best ones of these, too: to 1 % for a Gaussian."""
FITTED: Levels = {k: _uniform(k) for k in WIDTHS} | {
    2: _mirrored(13, 40, 67, 121),
    3: _mirrored(10, 33, 54, 79, 105, 137, 180, 249),
    4: _mirrored(11, 34, 55, 78, 100, 123, 146, 170, 193, 219, 246, 276, 312, 357, 417, 512),
}
"""Fitted to a Gaussian by Lloyd's iteration over paths, then made smaller or larger so that the scale which is best for
integers is good for them. Those of 2 bits are as 1, 3, 5 and 9. Of 1, 5 and 6 bits uniform ones are as good.
"""


@functools.lru_cache(maxsize=64)
def rings(widths: tuple[int, ...], head_dim: int, kind: str) -> tuple[tuple[int, ...], ...]:
    """Channels of each ring, in order.

    A ring is four runs of four neighbouring channels. Keys ("k"): the four runs of a band, which lie in the four fields
    of a word's bytes, byte by byte. Values ("v"): runs head_dim / 4 apart, which lie in the fields of the same four
    bytes of a row, field by field. Rings are shorter where head_dim is no multiple of 16.

    Args:
        widths: bits of each band; of values one number.
    """
    count = -(-head_dim // RING)
    if kind == "k":
        places = [[RING * i + 4 * run + n for n in range(4) for run in range(4)] for i in range(count)]
    else:
        places = [[4 * i + n + 4 * count * run for run in range(4) for n in range(4)] for i in range(count)]
    found = [tuple(c for c in ring if c < head_dim and widths[c // BAND] in WIDTHS) for ring in places]
    return tuple(ring for ring in found if ring)


@functools.lru_cache(maxsize=64)
def _before(widths: tuple[int, ...], head_dim: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [head_dim] each: the channel one place before in its ring, and two places; itself in no ring."""
    one, two = torch.arange(head_dim, device="cpu"), torch.arange(head_dim, device="cpu")
    for ring in rings(widths, head_dim, kind):
        for t, c in enumerate(ring):
            one[c], two[c] = ring[t - 1], ring[(t - 2) % len(ring)]
    return one, two


def _by_width(widths: tuple[int, ...], head_dim: int) -> list[tuple[int, torch.Tensor]]:
    """(bits, channels int64) of each width that has bits."""
    of = torch.tensor(widths, device="cpu").repeat_interleave(BAND)[:head_dim]
    return [(bits, (of == bits).nonzero().squeeze(1)) for bits in sorted({*widths} - {0})]


def indices(codes: torch.Tensor, widths: tuple[int, ...], kind: str) -> torch.Tensor:
    """uint8 [..., head_dim]: which of its width's levels each code means; codes uint8 [..., head_dim].

    An index of 8 bits is the code.
    """
    head_dim = codes.shape[-1]
    one, two = (t.to(codes.device) for t in _before(widths, head_dim, kind))
    low = codes & 1
    found = (codes >> 1 << 2) | (low ^ low[..., two]) << 1 | low[..., one]
    for bits, channels in _by_width(widths, head_dim):
        if bits not in WIDTHS:
            at = channels.to(codes.device)
            found[..., at] = codes[..., at]
    return found


def dequantize(
    codes: torch.Tensor,
    widths: tuple[int, ...],
    kind: str,
    scale: torch.Tensor,
    levels: Levels = UNIFORM,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values [..., tokens, head_dim] in `dtype` of codes uint8 [..., tokens, head_dim] with scales [..., tokens].

    Args:
        widths: bits of each band.
        kind: "k" or "v": how rings lie.
    """
    found = torch.zeros(codes.shape, dtype=dtype, device=codes.device)
    index = indices(codes, widths, kind)
    for bits, channels in _by_width(widths, codes.shape[-1]):
        at = channels.to(codes.device)
        table = torch.tensor(_table(bits, levels), dtype=dtype, device=codes.device)
        found[..., at] = table[index[..., at].int()]
    return found * (scale.to(dtype) / UNIT).unsqueeze(-1)


def quantize(
    x: torch.Tensor, widths: tuple[int, ...], kind: str, scale: torch.Tensor, levels: Levels = UNIFORM
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., tokens, head_dim] of x, float32, with scales [..., tokens]; and the cost of each token, int64
    [..., tokens]: its squared error in units, of all channels that have bits.

    Arguments as of `dequantize`.
    """
    head_dim = x.shape[-1]
    u = (x * (UNIT / scale.float()).unsqueeze(-1)).clamp(-FARTHEST, FARTHEST).round().int()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    total = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    # of each coset the nearest level's m and squared error
    upper = torch.zeros(STATES, *x.shape, dtype=torch.uint8, device=x.device)
    costs = torch.zeros(STATES, *x.shape, dtype=torch.int32, device=x.device)
    for bits, channels in _by_width(widths, head_dim):
        at, table = channels.to(x.device), torch.tensor(_table(bits, levels), dtype=torch.int32, device=x.device)
        if bits not in WIDTHS:
            nearest, cost = _nearest(u[..., at], table)
            codes[..., at] = nearest
            total += cost.sum(-1, dtype=torch.int64)
            continue
        for q in range(STATES):
            upper[q][..., at], costs[q][..., at] = _nearest(u[..., at], table[q::STATES])
    for length, of in _by_length(widths, head_dim, kind):
        at = of.to(x.device)
        low, cost = _paths(costs[..., at].unflatten(-1, (-1, length)))
        coset = (low ^ low.roll(2, -1)) << 1 | low.roll(1, -1)
        m = upper[..., at].unflatten(-1, (-1, length)).gather(0, coset.long().unsqueeze(0)).squeeze(0)
        codes[..., at] = (m << 1 | low).flatten(-2)
        total += cost.sum(-1, dtype=torch.int64)
    return codes, total


def _table(bits: int, levels: Levels) -> tuple[int, ...]:
    return levels[bits] if bits in WIDTHS else tuple(UNIT // 2 * i for i in range(1 - 2**bits, 2**bits, 2))


@functools.lru_cache(maxsize=64)
def _by_length(widths: tuple[int, ...], head_dim: int, kind: str) -> tuple[tuple[int, torch.Tensor], ...]:
    """(channels of a ring, int64 the channels of all such rings, one ring after the other)."""
    found: dict[int, list[int]] = {}
    for ring in rings(widths, head_dim, kind):
        found.setdefault(len(ring), []).extend(ring)
    return tuple((length, torch.tensor(channels, device="cpu")) for length, channels in found.items())


def _nearest(u: torch.Tensor, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of the nearest of ascending levels, uint8, the lower of two; and its squared error, int32."""
    ends = levels[1:] + levels[:-1]
    found = torch.searchsorted(ends, 2 * u)
    return found.to(torch.uint8), (u - levels[found]).square()


def _paths(costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest bits uint8 [..., T] of the path of least cost around each ring, and its cost, int32 [...].

    Args:
        costs: int32 [4, ..., T], of each coset and channel.
    """
    length, shape = costs.shape[-1], costs.shape[1:-1]
    # least costs by first state and state, and of the two states before which led there
    least = torch.full((STATES, STATES, *shape), _NEVER, dtype=torch.int32, device=costs.device)
    for first in range(STATES):
        least[first, first] = 0
    chosen = torch.empty(length, STATES, STATES, *shape, dtype=torch.bool, device=costs.device)
    for t in range(length):
        cost, after = costs[..., t], torch.empty_like(least)
        for s in range(STATES):
            bit, before = s & 1, s >> 1  # the states before are `before` and `before` + 2
            lower = least[:, before] + cost[2 * bit + before]
            upper = least[:, before + 2] + cost[2 * (1 - bit) + before]
            torch.lt(upper, lower, out=chosen[t, :, s])
            torch.minimum(lower, upper, out=after[:, s])
        least = after.clamp_(max=_NEVER)
    ends = torch.stack([least[s, s] for s in range(STATES)])
    cost = ends.amin(0)
    numbers = torch.arange(STATES, device=costs.device).view(-1, *[1] * len(shape))
    begun = torch.where(ends == cost, numbers, STATES).amin(0)  # the lowest of equals
    state, bits = begun, torch.empty(*shape, length, dtype=torch.uint8, device=costs.device)
    for t in reversed(range(length)):
        bits[..., t] = state & 1
        at = (begun * STATES + state).unsqueeze(0)
        state = (state >> 1) + 2 * chosen[t].flatten(0, 1).gather(0, at).squeeze(0).long()
    return bits, cost
