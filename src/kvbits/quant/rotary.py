"""Turning keys by their positions, and back (arXiv:2104.09864): channel pair (d, d + head_dim / 2) by position *
inv_freq[d] radians.

Angles are taken in float64, because position * inv_freq in float32 is off by up to 0.008 radians at 131,072. Every
kernel stores the same bytes, since pages are turned back by definition as follows. Let a be the first token's angle and
b = j * inv_freq token j's distance from it. Their cosines and sines are multiplied out in float64 (cos a cos b - sin a
sin b, sin a cos b + cos a sin b) and rounded to float32. A turned number that is zero is +0.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..spec import Rotary

_PAD = 16
"""Angles of a row are padded to a multiple of this, so that kernels can read whole vectors."""


def turn(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Return `x` [..., tokens, head_dim] turned to `positions` [..., tokens] (broadcast over the other dimensions), or
    back from them.

    Args:
        inv_freq: [head_dim / 2] radians per token.
    """
    angles = positions.to(x.device).double().unsqueeze(-1) * inv_freq.to(x.device).double()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return _turned(x, cos, -sin if back else sin)


def turn_by(rotary: Rotary, head_dim: int, distance: int) -> torch.Tensor:
    """Return float32 [3, head_dim], how a key is turned on by `distance` positions: channel c becomes x[c] * row0[c] +
    x[row2[c]] * row1[c].

    Channels are the model's own, whatever pairs they form; the angles' cosines and sines are taken in float64.
    """
    first, second = np.array(rotary.order(head_dim)).reshape(2, -1)
    angles = np.array(rotary.frequencies(head_dim), np.float32).astype(np.float64) * distance
    found = np.zeros((3, head_dim))
    found[0, first] = found[0, second] = np.cos(angles)
    found[1, first], found[1, second] = -np.sin(angles), np.sin(angles)
    found[2, first], found[2, second] = second, first
    return torch.from_numpy(found.astype(np.float32))


def turned_by(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Return keys `x` [..., head_dim], float32, turned on as `turn_by` says."""
    return x * turn[0] + x[..., turn[2].long()] * turn[1]


def turn_pages_back(x: torch.Tensor, starts: np.ndarray, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return keys `x` [n, H, tokens, head_dim], float32, of pages that start at `starts` int64 [n], turned back from
    their positions.
    """
    first, step = (
        torch.from_numpy(t).to(x.device)
        for t in (page_turns(starts, inv_freq)[:, None], page_turns(np.arange(x.shape[-2]), inv_freq))
    )
    half = x.shape[-1] // 2
    (c0, s0), (c1, s1) = ((t[..., 0, :half], t[..., 1, :half]) for t in (first, step))
    cos, sin = (c0 * c1 - s0 * s1).to(x.dtype), (s0 * c1 + c0 * s1).to(x.dtype)
    return _turned(x, cos.unsqueeze(1), -sin.unsqueeze(1)) + 0.0


def page_turns(starts: np.ndarray, inv_freq: torch.Tensor) -> np.ndarray:
    """Return cosines and sines of starts * inv_freq: float64 [n, 2, head_dim / 2, padded to a multiple of 16]."""
    return _turns(np.ascontiguousarray(starts, np.int64).tobytes(), _key(inv_freq))


def _key(inv_freq: torch.Tensor) -> bytes:
    return inv_freq.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()


@functools.lru_cache(maxsize=8)  # the layers of a group close the same pages
def _turns(positions: bytes, inv_freq: bytes) -> np.ndarray:
    angles = np.frombuffer(positions, np.int64).astype(np.float64)[:, None] * np.frombuffer(
        inv_freq, np.float32
    ).astype(np.float64)
    half = angles.shape[1]
    found = np.zeros((len(angles), 2, -(-half // _PAD) * _PAD))
    np.cos(angles, out=found[:, 0, :half])
    np.sin(angles, out=found[:, 1, :half])
    return found


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
