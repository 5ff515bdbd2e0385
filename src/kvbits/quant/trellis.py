"""Trellis codes: a code of k bits picks one of 2**(k+1) levels, together with its neighbours' lowest bits.

Channels form rings of 16 (`rings`). With b(t) the lowest bit of the code of a ring's t-th channel, places counted
around the ring, and m the code's other k - 1 bits, a code means

    index = 4 m + 2 (b(t) ^ b(t-2)) + b(t-1)           0 .. 2**(k+1) - 1
    x ~ level[index] * scale / UNIT                    levels: integers by width, ascending, level[-1 - i] = -level[i]

This is Ungerboeck's code (2, 5): 4 states, of b(t-1) and b(t-2), where the state before a ring's first channel is that
behind its last. Every sequence of codes means something, so nothing is stored beside them. One in 2**16 sequences of
indices has codes; `quantize` takes the one with the least squared error (Viterbi's algorithm, once from each state).
Channels of 0 bits read as 0. Channels of 8 bits are in no ring: theirs is the level nearest to u, 1 scale apart, which
9 bits of an index would not improve.

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

from ..spec import BAND

RING = 16
"""Channels of a ring."""
UNIT = 64
"""Parts of a scale in which levels are integers."""
FARTHEST = 8192
"""Largest magnitude of u, beyond all levels. With that of the farthest in a ring, 2,032, sums of a ring's squares stay
below `_NEVER`.
"""
_NEVER = 1_900_000_000
"""More than a path costs; two squares more still fit 32 bits. After two channels every state is reached."""
STATES = 4
WIDTHS = (1, 2, 3, 4, 5, 6)
"""Bits of codes that rings are made of."""

Levels = Mapping[int, tuple[int, ...]]
"""Levels by bits of a code, in units, ascending."""


def _uniform(bits: int) -> tuple[int, ...]:
    return tuple(UNIT // 4 * i for i in range(1 - 2 ** (bits + 1), 2 ** (bits + 1), 2))


def mirrored(*levels: int) -> tuple[int, ...]:
    """Return levels on both sides of zero, from the positive ones."""
    return (*(-x for x in reversed(levels)), *levels)


UNIFORM: Levels = {k: _uniform(k) for k in WIDTHS}
"""Half a scale apart. The steps of `scales.STEP` are the best ones of these, too: to 5 % for a Gaussian."""
FITTED: Levels = {2: mirrored(16, 48, 80, 144)}
"""Those of 2 bits as 1, 3, 5 and 9, which are as good for a Gaussian as free ones."""
LEVELS: Mapping[str, Levels] = {"uniform": UNIFORM, "fitted": FITTED}
"""Levels by `QuantSpec.levels`."""


@functools.lru_cache(maxsize=64)
def rings(widths: tuple[int, ...], head_dim: int, kind: str) -> tuple[tuple[int, ...], ...]:
    """List the channels of each ring, in order.

    A ring is four runs of four neighbouring channels. Keys ("k"): the four runs of a band, which lie in the four fields
    of a word's bytes, byte by byte. Values ("v"): runs head_dim / 4 apart, which lie in the fields of the same four
    bytes of a row, field by field. Rings are shorter where head_dim is not a multiple of 16.

    Args:
        widths: bits of each band; of values one number.
    """
    count = -(-head_dim // RING)
    if kind == "k":
        places = [[RING * i + 4 * run + n for n in range(4) for run in range(4)] for i in range(count)]
    elif kind == "v":
        places = [[4 * i + n + 4 * count * run for run in range(4) for n in range(4)] for i in range(count)]
    else:
        raise ValueError(f"kind={kind!r} of trellis codes: keys are 'k' and values 'v', whose rings lie differently")
    found = [tuple(c for c in ring if c < head_dim and widths[c // BAND] in WIDTHS) for ring in places]
    return tuple(ring for ring in found if ring)


def _by_channel(widths: tuple[int, ...], head_dim: int) -> torch.Tensor:
    """Return int32 [head_dim]: bits of each channel."""
    return torch.tensor(widths, dtype=torch.int32, device="cpu").repeat_interleave(BAND)[:head_dim]


@functools.lru_cache(maxsize=64)
def _before(widths: tuple[int, ...], head_dim: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int64 [head_dim] each: the channel one place before in its ring, and two places; itself in no ring. And
    bool: which channels are in a ring.
    """
    one, two = torch.arange(head_dim, device="cpu"), torch.arange(head_dim, device="cpu")
    ringed = torch.zeros(head_dim, dtype=torch.bool, device="cpu")
    for ring in rings(widths, head_dim, kind):
        ringed[list(ring)] = True
        for t, c in enumerate(ring):
            one[c], two[c] = ring[t - 1], ring[(t - 2) % len(ring)]
    return one, two, ringed


def indices(codes: torch.Tensor, widths: tuple[int, ...], kind: str) -> torch.Tensor:
    """Return uint8 [..., head_dim]: which of its width's levels each code means; codes uint8 [..., head_dim].

    An index of 8 bits is the code.
    """
    one, two, ringed = (t.to(codes.device) for t in _before(widths, codes.shape[-1], kind))
    low = codes & 1
    return torch.where(ringed, (codes >> 1 << 2) | (low ^ low[..., two]) << 1 | low[..., one], codes)


def level_of(codes: torch.Tensor, widths: tuple[int, ...], kind: str, levels: Levels = UNIFORM) -> torch.Tensor:
    """Return int32 [..., head_dim]: the level that each code means, in units; 0 where a channel has no bits."""
    table: list[int] = []
    first = {}
    for bits in {*widths}:
        first[bits] = len(table)
        table += _table(bits, levels)
    start = torch.tensor([first[bits] for bits in widths], device="cpu").repeat_interleave(BAND)[: codes.shape[-1]]
    at = indices(codes, widths, kind).int() + start.to(codes.device)
    return torch.tensor(table, dtype=torch.int32, device=codes.device)[at]


def units(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return int32 [..., head_dim]: u of x, float32, with scales [...]."""
    return (x * (UNIT / scale.float()).unsqueeze(-1)).clamp(-FARTHEST, FARTHEST).round().int()


def dequantize(
    codes: torch.Tensor,
    widths: tuple[int, ...],
    kind: str,
    scale: torch.Tensor,
    levels: Levels = UNIFORM,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return values [..., tokens, head_dim] in `dtype` of codes uint8 [..., tokens, head_dim] with scales [...,
    tokens].

    Args:
        widths: bits of each band.
        kind: "k" or "v": how rings lie.
    """
    return level_of(codes, widths, kind, levels).to(dtype) * (scale.to(dtype) / UNIT).unsqueeze(-1)


def quantize(
    x: torch.Tensor, widths: tuple[int, ...], kind: str, scale: torch.Tensor, levels: Levels = UNIFORM
) -> torch.Tensor:
    """Return codes uint8 [..., tokens, head_dim] of x, float32, with scales [..., tokens].

    Arguments as of `dequantize`.
    """
    head_dim = x.shape[-1]
    u = units(x, scale).reshape(-1, head_dim)
    tokens = len(u)
    # 8 bits: the nearest of levels a scale apart, the lower one of two
    codes = ((u + UNIT // 2 * 2**8 - 1) // UNIT).clamp_(0, 2**8 - 1)
    of = _by_channel(widths, head_dim).to(x.device)
    codes = torch.where(of == 8, codes, 0).to(torch.uint8)
    for length, channels in _by_length(widths, head_dim, kind):
        at = channels.to(x.device)
        # [rings, length, tokens] -> [length, rings * tokens]: a ring of a token is a column
        mine = u[:, at].T.unflatten(0, (-1, length)).transpose(0, 1).reshape(length, len(at) // length * tokens)
        bits = of[at].view(-1, length).T.repeat_interleave(tokens, 1)
        upper, costs = _nearest(mine, bits, {*widths}.intersection(WIDTHS), levels)
        low = _paths(costs)
        coset = (low ^ low.roll(2, 0)) << 1 | low.roll(1, 0)
        found = upper.gather(1, coset.long().unsqueeze(1)).squeeze(1) << 1 | low
        codes[:, at] = found.view(length, len(at) // length, tokens).transpose(0, 1).reshape(len(at), tokens).T
    return codes.view(x.shape)


def _table(bits: int, levels: Levels) -> tuple[int, ...]:
    if bits == 0:
        return (0,)
    return levels[bits] if bits in WIDTHS else tuple(UNIT // 2 * i for i in range(1 - 2**bits, 2**bits, 2))


@functools.lru_cache(maxsize=64)
def _by_length(widths: tuple[int, ...], head_dim: int, kind: str) -> tuple[tuple[int, torch.Tensor], ...]:
    """Return (channels of a ring, int64 the channels of all such rings, one ring after the other)."""
    found: dict[int, list[int]] = {}
    for ring in rings(widths, head_dim, kind):
        found.setdefault(len(ring), []).extend(ring)
    return tuple((length, torch.tensor(channels, device="cpu")) for length, channels in found.items())


def _nearest(
    u: torch.Tensor, bits: torch.Tensor, widths: set[int], levels: Levels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find each coset's nearest level: m, uint8, and squared error, int32: [T, 4, n].

    Args:
        u, bits: int32 [T, n].
        widths: those in `bits`.
    """
    coset = torch.arange(STATES, dtype=torch.int32, device=u.device).unsqueeze(-1)
    if levels is UNIFORM:  # 128 units apart in a coset: no search
        one = torch.ones_like(bits)
        away = (u + UNIT // 4 * ((one << bits + 1) - 1)).unsqueeze(1) - UNIT // 2 * coset
        m = (away + 63 >> 7).clamp_(min=0).minimum(((one << bits - 1) - 1).unsqueeze(1))
        return m.to(torch.uint8), (away - (m << 7)).square_()
    upper = torch.zeros(u.shape[0], STATES, u.shape[1], dtype=torch.uint8, device=u.device)
    costs = torch.zeros(upper.shape, dtype=torch.int32, device=u.device)
    doubled = (2 * u).contiguous()
    for width in widths:
        mine = bits == width
        for q in range(STATES):
            table = torch.tensor(levels[width][q::STATES], dtype=torch.int32, device=u.device)
            m = torch.searchsorted(table[1:] + table[:-1], doubled)
            upper[:, q] = torch.where(mine, m.to(torch.uint8), upper[:, q])
            costs[:, q] = torch.where(mine, (u - table[m]).square(), costs[:, q])
    return upper, costs


def _paths(costs: torch.Tensor) -> torch.Tensor:
    """Find the lowest bits uint8 [T, n] of the path of least cost around each of n rings.

    Args:
        costs: int32 [T, 4, n], of each channel and coset.
    """
    length, _, n = costs.shape
    # the coset of a step from state 2 a + b to 2 b + c: [a, b, c]
    steps = torch.tensor([[[2 * (c ^ a) + b for c in (0, 1)] for b in (0, 1)] for a in (0, 1)], device=costs.device)
    # least costs by first state and state, and which of the two states before led there
    least = torch.full((STATES, STATES, n), _NEVER, dtype=torch.int32, device=costs.device)
    least.diagonal(dim1=0, dim2=1).zero_()
    chosen = torch.empty(length, STATES, STATES, n, dtype=torch.bool, device=costs.device)
    for t in range(length):
        both = least.view(STATES, 2, 2, 1, n) + costs[t][steps]
        torch.lt(both[:, 1], both[:, 0], out=chosen[t].view(STATES, 2, 2, n))
        least = both.amin(1).view(STATES, STATES, n)
    ends = least.diagonal(dim1=0, dim2=1)  # [n, 4]
    begun = torch.where(ends == ends.amin(-1, keepdim=True), torch.arange(STATES, device=costs.device), STATES).amin(-1)
    taken = chosen.gather(1, begun.expand(length, 1, STATES, n)).squeeze(1).to(torch.uint8)
    state, bits = begun.unsqueeze(0), torch.empty(length, n, dtype=torch.uint8, device=costs.device)
    for t in reversed(range(length)):
        bits[t] = state[0] & 1
        state = (state >> 1) + 2 * taken[t].gather(0, state)
    return bits
