"""Other bases: a calibrated one for trellis keys, Hadamard matrices for trellis values.

**Trellis keys** ("calibrated", after the Karhunen-Loeve transform). Per kv head, with moments of the model
(`calibrate.moments`)

    H = E[q q^T] of the queries,  S = covariance of keys inside a page,  both in the frame of a page
    U, lam = eigenvectors and eigenvalues of H^(1/2) S H^(1/2), largest first
    y = k_f A,    A = H^(1/2) U D^-1        D = diag(sqrt(lam) STEP[bits of the channel's band])

the channels of y are uncorrelated, have about the spread that a step of 1 is right for, and a squared error of y D is
the squared error of scores.
Scores stay exact:  q . k = q_f . k_f = (q_f A^-T) . y,  so a reader multiplies a query by A^-T and never a key by
                                                         anything.

**Offsets.** Keys have a mean that is far from 0 (a key bias, and what all tokens share), and it is a constant of the
model. M is the mean key of a run of `spec.MEAN_STEP` = 16 positions, turned back to the first of them. The tokens of a
page are taken 16 at a time, as key tiles have them. Those whose first one is p positions into the page's frame of 512
are stored as

    y - m[min(p // 16, 31)],    m[o] = R(16 o) M A,  o = 0 .. 31    and the token at position 0, whose key is a constant
                                                                    of its own (the first token of a text, which nearly
    y - m[32],                  m[32] = K0 A                        all attention that has nowhere to go falls on)

so a token depends on no other token of its page, and a score gains q_f A^-T . m[o] once per tile. Where pages begin at
multiples of 16, p // 16 is the run of the token's own position. A page that reaches out of its frame has the last run's
mean there.

**Frame.** The moments hold where the rotary embedding does not turn keys on and on: k_f is the key of a page turned
back by the largest multiple of `spec.FRAME` positions up to the page's first token. So a page's keys lie where those of
the first positions lie, at any context length.

**Trellis values** ("hadamard"): v H with H the Sylvester matrix of the largest power of two that divides head_dim, over
sqrt of its size (several blocks where it is smaller than head_dim). Outputs are turned back once per query: (p V H) H =
p V. The products are sums and differences in the order of strides 1, 2, 4 .., and one multiplication at the end, so
that kernels can store the same bytes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..spec import FRAME, MEAN_STEP, OFFSETS, QuantSpec
from .rotary import turn
from .scales import steps

_inverses = WeakIdKeyDictionary()
_of_widths = WeakIdKeyDictionary()


def frames(starts: np.ndarray) -> np.ndarray:
    """Return int64 [n]: the position that pages whose first tokens are at `starts` [n] are turned back by."""
    return np.ascontiguousarray(starts, np.int64) // FRAME * FRAME


def into_basis(
    x: torch.Tensor,
    spec: QuantSpec,
    static: dict[str, torch.Tensor],
    starts: np.ndarray | None,
    places: np.ndarray | None = None,
) -> torch.Tensor:
    """Return keys or values `x` [n, H, tokens, head_dim], float32, of pages as trellis codes store them, float32: by
    definition products in float64, rounded, less offsets in float32.

    Args:
        static: for "calibrated" `k_basis` [H, head_dim, head_dim], `k_inv_freq` [head_dim / 2] and `k_offsets` [H, 33,
            head_dim].
        starts: for "calibrated" int64 [n], position of each page's first token.
        places: int64 [n, tokens] in the page; None: all of it.
    """
    if spec.basis == "hadamard":
        return hadamard(x)
    if spec.basis is None:
        return x
    assert starts is not None
    y = (
        turn(x.double(), _positions(starts), static["k_inv_freq"], back=True)
        @ static["k_basis"].to(x.device, torch.float64)
    ).float()
    return y - offsets_of(static, starts, x.shape[-2], places) if spec.has_offsets else y


def out_of_basis(
    y: torch.Tensor, spec: QuantSpec, static: dict[str, torch.Tensor], starts: np.ndarray | None
) -> torch.Tensor:
    """Return the inverse of `into_basis`, but for offsets, which `y` has again; with `k_inverse` [H, head_dim,
    head_dim], see `inverse`.
    """
    if spec.basis == "hadamard":
        return hadamard(y)
    if spec.basis is None:
        return y
    assert starts is not None
    return turn(y @ static["k_inverse"].to(y), _positions(starts), static["k_inv_freq"])


def completed(static: dict[str, torch.Tensor], inv_freq: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what pages of keys that are turned back share. It is a layer's calibration, `k_inv_freq`, and `k_inverse`
    and `k_offsets` of its basis and mean.
    """
    found = static | {"k_inv_freq": inv_freq}
    if "k_basis" in static:
        found["k_inverse"] = inverse(static["k_basis"]).to(inv_freq.device)
    if "k_mean" in static:
        found["k_offsets"] = offsets(static["k_mean"], static["k_basis"], inv_freq).to(inv_freq.device)
    return found


def for_widths(basis: torch.Tensor, was: QuantSpec, spec: QuantSpec) -> torch.Tensor:
    """Return `k_basis` [H, D, D] of keys of `spec`, from that of keys `was`, whose bands have other widths: the same
    directions in other steps. Made once for a tensor.
    """
    size = basis.shape[-1]
    if was.widths(size) == spec.widths(size):
        return basis
    known = _of_widths.setdefault(basis, {})
    if (key := (was.widths(size), spec.widths(size))) not in known:
        factors = (steps(was, size) / steps(spec, size)).to(basis.device)
        known[key] = with_short_inverse(basis.double() * factors)
    return known[key]


def for_copies(static: dict[str, torch.Tensor], own: QuantSpec, copy: QuantSpec) -> dict[str, torch.Tensor]:
    """Return the parameters of copies of keys `copy`, made from `static`, which pages of keys `own` share.

    A calibrated basis has the steps of its widths in it, so copies have one of their own (see `completed`).
    """
    if "k_basis" not in static or copy.basis != own.basis:
        return static
    basis = for_widths(static["k_basis"], own, copy)
    return static if basis is static["k_basis"] else completed(static | {"k_basis": basis}, static["k_inv_freq"])


def offset_rows(starts: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return int64: which of the `OFFSETS` a token has by its page's first position and its place in the page (arrays
    that broadcast).
    """
    runs = (starts % FRAME + places // MEAN_STEP * MEAN_STEP) // MEAN_STEP
    return np.where(starts + places == 0, OFFSETS - 1, np.minimum(runs, OFFSETS - 2))


def offsets_of(
    static: dict[str, torch.Tensor], starts: np.ndarray, tokens: int, places: np.ndarray | None = None
) -> torch.Tensor:
    """Return float32 [n, H, tokens, head_dim]: what is taken off each token of pages that start at `starts` int64 [n];
    `places` as in `into_basis`.
    """
    rows = offset_rows(starts[:, None], np.arange(tokens)[None] if places is None else places)
    return static["k_offsets"][:, torch.from_numpy(rows).to(static["k_offsets"].device)].transpose(0, 1)


def offsets(mean: torch.Tensor, basis: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return float32 `k_offsets` [H, 33, head_dim] of float16 numbers, from `k_mean` [H, 2, head_dim] (M, K0) and
    `k_basis`.
    """
    at = torch.arange(0, FRAME, MEAN_STEP, device="cpu")
    means = turn(mean[:, :1].double().cpu().expand(-1, len(at), -1), at, inv_freq)
    both = torch.cat([means, mean[:, 1:].double().cpu()], 1) @ basis.double().cpu()
    most = torch.finfo(torch.float16).max
    return both.clamp(-most, most).half().float().contiguous().to(basis.device)


def inverse(basis: torch.Tensor) -> torch.Tensor:
    """Return float32 inverse of `k_basis` [H, head_dim, head_dim], what readers multiply with, q_f A^-T = q_f @
    inverse(A).mT: taken in float64 and rounded to float16 numbers times a power of two for each head, which matrix
    units multiply as they are. Exact for what calibration keeps (`with_short_inverse`); other matrices lose 2**-12 of
    each product, an eighth of what bfloat16 keys lose.

    Made once for a tensor, since every cache of a calibration asks for it. Not finite where a matrix is singular
    (`conditions` says so).
    """
    if basis not in _inverses:
        _inverses[basis] = _short(torch.linalg.inv_ex(basis.double()).inverse).float().contiguous()
    return _inverses[basis]


def with_short_inverse(basis: torch.Tensor) -> torch.Tensor:
    """Return float32 [H, head_dim, head_dim]: `basis` moved, by 2**-12 of its inverse, to where `inverse` rounds
    nothing off.
    """
    return torch.linalg.inv_ex(_short(torch.linalg.inv_ex(basis.double()).inverse)).inverse.float().contiguous()


def _short(found: torch.Tensor) -> torch.Tensor:
    """Return float64 [H, head_dim, head_dim] rounded to float16 numbers times a power of two for each head."""
    unit = torch.exp2(torch.floor(torch.log2(found.abs().amax((1, 2), keepdim=True).clamp(min=1e-30))))
    return (found / unit).half().double() * unit


def conditions(basis: torch.Tensor) -> torch.Tensor:
    """Return [H]: condition numbers in the Frobenius norm over head_dim, at least 1; infinite where a matrix is
    singular or holds NaN or infinity.
    """
    found = basis.double().flatten(1).norm(dim=1) * inverse(basis).double().flatten(1).norm(dim=1) / basis.shape[-1]
    return found.nan_to_num(nan=math.inf, posinf=math.inf)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return `x` [..., head_dim] times the Hadamard matrix, its own inverse."""
    stride, size = 1, x.shape[-1] & -x.shape[-1]
    while stride < size:
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        stride *= 2
    return x * (1 / math.sqrt(size))


def _positions(starts: np.ndarray) -> torch.Tensor:
    """Return [n, 1, 1]: the same turn for all heads and tokens of a page."""
    return torch.from_numpy(frames(starts))[:, None, None]
