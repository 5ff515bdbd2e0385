"""Attention of a chunk of fresh tokens to itself, in its own precision: the op `attend_fresh`.

A prompt sees itself before any page holds it: `attend` reads the history, `attend_fresh` the chunk,
`merge_partials` joins them. A backend has a module `attend_fresh` with

    refuses(q, v, softcap) -> str | None
    attend_fresh(q, k, v, positions, scaling, sliding_window, softcap) -> (out, lse)

whose arguments are

    q               [B, T, Hq, D]; k [B, T, H, D], v [B, T, H, D or another width], all of one dtype on one device
    positions       int64 [B, T], rising by one from token to token of a sequence; negative for padding, which sees
                    nothing and is not seen
    scaling         factor on the scores
    sliding_window  newest tokens that a query sees, itself included; None for all
    softcap         scores become softcap * tanh(score / softcap); None for none

and whose results are out [B, T, Hq, v's D] in float32, or in q's 16 bits where a backend computes in them, and lse
float32 [B, T, Hq], natural log; 0 and -inf for padding. Memory grows with T, never with T * T: no backend makes scores
or a mask of the whole chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DataError
from ..later import upload
from . import dispatch

TOGETHER = 512
"""Tokens of a padded chunk up to which its sequences are one call, each as long as the longest: the work that is wasted
takes less time than calls would.
"""


def choose(q: torch.Tensor, v: torch.Tensor, softcap: float | None, backend: str = "auto") -> dispatch.Choice:
    """Return the backend that serves chunks like this one.

    Args:
        q: [B, T, Hq, D]; v: [B, T, H, D]. Their dtype, device and D decide, not B or T.
        backend: "auto", or the name of one.

    Raises:
        SpecError: unknown backend, or the named one refuses; the message says why.
    """
    return dispatch.choose("attend_fresh", q, v, softcap, backend=backend)


def refuses_flash(q: torch.Tensor, v: torch.Tensor, softcap: float | None) -> str | None:
    """Return what of a call no kernel of torch's FlashAttention serves, or None."""
    if softcap is not None:
        return "torch's FlashAttention has no softcap"
    if v.shape[3] != q.shape[3]:
        return f"values have a head_dim of {v.shape[3]}, queries of {q.shape[3]}"
    return None


def check_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        DataError: the message names the tensor and the shape it should have.
    """
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] % max(k.shape[2], 1):
        raise DataError(
            f"q must be [B, T, Hq, D] and k [B, T, H, D] with Hq a multiple of H; got {list(q.shape)} and"
            f" {list(k.shape)}"
        )
    batch, tokens, _, head_dim = q.shape
    if tuple(k.shape) != (batch, tokens, k.shape[2], head_dim):
        raise DataError(f"k must be [{batch}, {tokens}, H, {head_dim}] like q, got {list(k.shape)}")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise DataError(f"v must be {list(k.shape[:3])} and a head_dim of its own, got {list(v.shape)}")
    if tuple(positions.shape) != (batch, tokens):
        raise DataError(f"positions must be [{batch}, {tokens}], got {list(positions.shape)}")


def without_padding(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attend(q, k, v)` on chunks without padding, for one that may have some: it is cut out, so no kernel needs a
    mask for it.

    Args:
        attend: causal attention of [B, n, ..] tokens in a row: out [B, n, Hq, D] in `dtype`, lse [B, n, Hq].
        q, k, v, positions: as above.

    Returns:
        out [B, T, Hq, v's D] in `dtype` and lse [B, T, Hq], 0 and -inf for padding.

    Raises:
        DataError: tensors that do not fit together.
    """
    check_chunk(q, k, v, positions)
    if (cuts := _cuts(positions, q.device)) is None:
        return attend(q, k, v)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(
        q.shape[:3], -torch.inf, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=q.device
    )
    for cut in cuts:
        found = attend(*(x[cut.row, cut.token] for x in (q, k, v)))
        for whole, part in zip((out, lse), found, strict=True):
            whole[cut.to] = part[cut.of]
    return out, lse


def within_chunks(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]], chunk: int
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return `attend_fresh` of layers whose positions are cut into chunks. A token sees its own chunk, so each chunk
    that a sequence reaches into is a call.

    Args:
        attend: `attend_fresh` of a backend.
        chunk: tokens.
    """

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.where(positions < 0, -1, positions // chunk)
        if all(len(row[row >= 0].unique()) < 2 for row in numbers):
            return attend(q, k, v, positions, scaling, None, softcap)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        for b, row in enumerate(numbers):
            for n in row[row >= 0].unique().tolist():
                at = upload((row == n).nonzero().squeeze(1), q.device)
                found = attend(
                    *(x[b : b + 1, at] for x in (q, k, v)), positions[b : b + 1, at.cpu()], scaling, None, softcap
                )
                out[b, at], lse[b, at] = found[0][0].float(), found[1][0]
        return out, lse

    return run


@dataclass(frozen=True)
class _Cut:
    """Sequences of a padded chunk that are attended together: int64 indices on the chunk's device.

    Attributes:
        row, token: [n, 1] and [n, longest]: the tokens of each sequence, real ones first, in their order; behind them,
            where no token looks, the first one again: what padding holds is not read.
        to, of: (sequences, tokens) [real tokens] of the whole chunk, and of what is cut out.
    """

    row: torch.Tensor
    token: torch.Tensor
    to: tuple[torch.Tensor, torch.Tensor]
    of: tuple[torch.Tensor, torch.Tensor]


_known = WeakIdKeyDictionary()


def _cuts(positions: torch.Tensor, device: torch.device) -> list[_Cut] | None:
    """Return what is cut out of a chunk, or None if there is no padding.

    Layers come with the same positions, so they are looked at once and uploaded once.
    """
    known = _known.get(positions)
    if known is None or known[0] != device or not torch.equal(known[1], positions):
        known = _known[positions] = (device, positions.clone(), _cut(positions.cpu() >= 0, device))
    return known[2]


def _cut(real: torch.Tensor, device: torch.device) -> list[_Cut] | None:
    if bool(real.all()):
        return None
    found, together = [], len(real) if real.shape[1] <= TOGETHER else 1
    for first in range(0, len(real), together):
        some = real[first : first + together]
        count = some.sum(1, keepdim=True)
        if not (longest := int(count.max())):
            continue
        kept = torch.arange(longest, device="cpu") < count
        order = torch.argsort(~some, dim=1, stable=True)[:, :longest]
        token, of = torch.where(kept, order, order[:, :1]), kept.nonzero(as_tuple=True)
        row = first + torch.arange(len(some), device="cpu")[:, None]
        row, token, *ends = (upload(x, device) for x in (row, token, first + of[0], token[kept], *of))
        found.append(_Cut(row, token, (ends[0], ends[1]), (ends[2], ends[3])))
    return found
