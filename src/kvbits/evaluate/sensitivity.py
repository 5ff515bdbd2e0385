"""Sensitivities of the layers of a model to errors of cached keys and values, from one backward pass: `sensitivities`.

A small error e of what a cache stores moves the predictions of a model by a KL divergence of 1/2 E[(g . e)^2]. There g
is the gradient of -log p(y) at the keys and values that attention reads. y is drawn from the model's own predictions,
so E[g g^T] is the Fisher information. Errors of a quantizer are independent of each other and of g, so squares add up:

    KL ~ 1/2 sum over tokens and channels of g^2 E[e^2],     E[e^2] = (loudness of the token)^2 * `errors` of a width

The sum over channels is kept for each band of keys in their calibrated basis, for keys as they are, and for values. So
one pass predicts any widths of any layers. Tokens that a cache reads raw or from finer copies cost next to nothing.
Only queries that are `near` tokens or more behind a key's page count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..calibrate import Calibration
from ..calibrate.observe import differentiable, watched_attention
from ..errors import CalibrationError, UnsupportedError
from ..geometry import layer_geometries, stored_at
from ..integrations.placement import input_device
from ..integrations.rotary import with_rotary
from ..progress import bar
from ..quant.basis import completed, frames, into_basis
from ..quant.rotary import turn
from ..quant.scales import steps
from ..spec import BAND, LayerGeometry, QuantSpec, Scheme
from ..spec.bands import DISTORTION

TRELLIS = (1.0, 0.88, 0.82, 0.82, 0.83, 0.84, 0.84)
"""Squared error of trellis codes of 0, 1, .. bits with uniform levels, as a share of `DISTORTION`'s integers."""
TRELLIS_FITTED = 0.75
"""The same of 2 bits with fitted levels."""
EIGHT_BITS = 7.5e-5
"""Squared error of codes of 8 bits in a band; they are plain integers."""
REACH = 2.4
"""Largest number of a group of 64, in standard deviations: what the scale of plain integers is taken from."""


def errors(spec: QuantSpec, head_dim: int) -> tuple[float, ...]:
    """Return the expected squared error of a number of variance 1, for each band, or one figure without bands."""
    if spec.is_raw:
        return (0.0,)
    if not spec.bands:
        return ((2 * REACH / (2**spec.bits - 1)) ** 2 / 12,)
    fitted = spec.levels == "fitted"

    def of(bits: int) -> float:
        if bits == 8:
            return EIGHT_BITS
        return DISTORTION[bits] * (TRELLIS_FITTED if fitted else TRELLIS[bits])

    return tuple(of(b) for b in spec.widths(head_dim))


@dataclass(frozen=True)
class Sensitivity:
    """KL that errors of one layer cost, nats per token, for errors as large as the numbers themselves.

    Attributes:
        bands: of each band of keys in the calibrated basis; () where the model has none.
        key: of keys as they are, less their mean.
        value: of values.
    """

    bands: tuple[float, ...]
    key: float
    value: float

    def kl(self, key: QuantSpec, value: QuantSpec, geometry: LayerGeometry) -> float:
        """Predict what a layer costs that stores these; nats per token."""
        of_key = errors(key, geometry.head_dim)
        per_band = self.bands if key.bands else (self.key,)
        # values with bands have one width, and a Hadamard matrix makes their channels alike
        return (
            math.fsum(s * e for s, e in zip(per_band, of_key, strict=True))
            + self.value * errors(value, geometry.value_head_dim)[0]
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sensitivity:
        return cls(tuple(data["bands"]), data["key"], data["value"])


class _Layer:
    """Sums of one layer over windows.

    Args:
        geometry: with its rotary embedding where there is a basis.
        spec, static: of keys in a calibrated basis, and what was calibrated; None where there is none.
        sinks, near, page: first tokens that stay raw, tokens that are read raw or from finer copies, size of a page.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        spec: QuantSpec | None,
        static: dict[str, torch.Tensor] | None,
        sinks: int,
        near: int,
        page: int,
    ) -> None:
        self.geometry, self.spec, self.page, self.sinks, self.near = geometry, spec, page, sinks, near
        bands = 0 if spec is None else -(-geometry.head_dim // BAND)
        self.bands, self.key, self.value, self.tokens = torch.zeros(bands, dtype=torch.float64), 0.0, 0.0, 0
        if spec is not None:
            assert geometry.rotary is not None and static is not None
            inv_freq = torch.tensor(geometry.rotary.frequencies(geometry.head_dim), dtype=torch.float32)
            self.static = completed(static, inv_freq)
            self.order = torch.tensor(geometry.rotary.order(geometry.head_dim))

    def reads(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool [T, T] each, by query and key: what is seen at all, and what is read from codes."""
        at = torch.arange(tokens, device=device)
        query, key, window = at[:, None], at[None], self.geometry.sliding_window
        seen = query >= key
        if self.geometry.chunked and window is not None:
            seen &= query // window == key // window
        elif window is not None:
            seen &= query - key < window
        ends = (key - self.sinks).div(self.page, rounding_mode="floor") * self.page + self.page + self.sinks
        return seen, seen & (key >= self.sinks) & (ends + self.near <= query)

    @torch.no_grad()
    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor, how: dict[str, Any]) -> None:
        """Add one text.

        Args:
            q, k, v: [Hq, T, D] and [H, T, D] each, as attention was given them.
            slope: [T, Hq, D], the gradient at its output.
            how: arguments of the attention function.
        """
        q, k, v, slope = (x.float() for x in (q, k, v, slope))
        slope, heads, group = slope.transpose(0, 1), k.shape[0], q.shape[0] // k.shape[0]
        scaling = how.get("scaling")
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        cap, sink = how.get("softcap"), how.get("s_aux")
        seen, packed = self.reads(k.shape[1], k.device)
        of_key, of_value = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(heads):
            mine = slice(head * group, (head + 1) * group)
            scores = q[mine] @ k[head].mT * scaling
            curve = torch.ones(())
            if cap is not None:
                scores = torch.tanh(scores / cap)
                curve, scores = 1 - scores.square(), scores * cap
            scores = scores.masked_fill(~seen, -torch.inf)
            if sink is not None:
                own = sink.float()[mine, None, None].expand(-1, scores.shape[1], 1)
                p = torch.softmax(torch.cat([scores, own], -1), -1)[..., :-1]
            else:
                p = torch.softmax(scores, -1)
            of_p = slope[mine] @ v[head].mT
            of_score = p * (of_p - (p * of_p).sum(-1, keepdim=True)) * (curve.to(p.device) * packed)
            of_key[head] = torch.einsum("gts,gtd->sd", of_score, q[mine]) * scaling
            of_value[head] = torch.einsum("gts,gtd->sd", p * packed, slope[mine])
        self.tokens += k.shape[1]
        self.value += self._sum(of_value, v)
        self.key += self._sum(of_key, k - k.mean(1, keepdim=True))
        if self.spec is not None:
            self._add_bands(k, of_key)

    @staticmethod
    def _sum(slope: torch.Tensor, x: torch.Tensor) -> float:
        return 0.5 * (slope.square().sum(-1) * x.square().mean(-1)).sum().item()

    def _add_bands(self, k: torch.Tensor, slope: torch.Tensor) -> None:
        """Add keys [H, T, D] and the gradient there, both turned into the calibrated basis in units of its spreads."""
        assert self.spec is not None
        static = {name: t.to(k.device) for name, t in self.static.items()}
        starts, order = np.arange(0, k.shape[1], self.page), self.order.to(k.device)
        step = steps(self.spec, k.shape[-1]).to(k.device)

        def pages(x: torch.Tensor) -> torch.Tensor:
            return x[..., order].unflatten(1, (-1, self.page)).transpose(0, 1)

        y = into_basis(pages(k), self.spec, static, starts) * step
        back = turn(pages(slope), torch.from_numpy(frames(starts))[:, None, None], static["k_inv_freq"], back=True)
        weighted = (back @ static["k_inverse"].mT / step).square() * y.square().mean(-1, keepdim=True)
        by_channel = 0.5 * weighted.sum((0, 1, 2)).double().cpu()
        self.bands += torch.stack([part.sum() for part in by_channel.split(BAND)])

    def result(self) -> Sensitivity:
        n = self.tokens
        return Sensitivity(tuple((self.bands / n).tolist()), self.key / n, self.value / n)


def sensitivities(
    model: Any,
    windows: Sequence[torch.Tensor],
    base: Scheme,
    calibration: Calibration | None,
    *,
    near: int,
    seed: int = 0,
    checkpointing: bool = False,
    progress: bool = True,
) -> list[Sensitivity]:
    """Measure what errors of each layer's keys and values cost, by one backward pass of each window.

    Args:
        windows: int64 [T] each; what does not fill a page of `base` is left out.
        base: its sinks and pages, and the spec of keys in a calibrated basis.
        calibration: of `base`, or None if it needs none.
        near: newest tokens that are read raw or from finer copies.
        seed: of the tokens that are drawn from the model's predictions.
        checkpointing: see `calibrate.observe.differentiable`.

    Raises:
        CalibrationError: the loss is NaN or infinite.
        UnsupportedError: layers whose attention the model does not look up in Transformers' registry.
    """
    geometries = layer_geometries(model.config)
    if calibration is not None:
        geometries = with_rotary(geometries, model)
    layers = []
    for i, g in enumerate(geometries):
        key = base.for_layer(i, len(geometries))[0]
        basis = None if calibration is None or key.basis != "calibrated" else calibration.static[i]
        layers.append(_Layer(g, None if basis is None else key, basis, base.num_sink_tokens, near, base.page_size))
    stored, device = stored_at(model.config), input_device(model)
    draw = torch.Generator(device="cpu").manual_seed(seed)

    def returned(module: Any, q: Any, k: Any, v: Any, how: dict[str, Any], out: torch.Tensor) -> None:
        place = stored.get(getattr(module, "layer_idx", -1))
        if place is None or not out.requires_grad:
            return
        inputs = q.detach()[0], k.detach()[0], v.detach()[0]
        out.register_hook(lambda slope: layers[place].add(*inputs, slope[0], how))

    with (
        differentiable(model, checkpointing=checkpointing),
        watched_attention(model, returned=returned),
        torch.enable_grad(),
        bar("one backward pass", sum(map(len, windows)), enabled=progress) as advance,
    ):
        for window in windows:
            ids = window[: len(window) // base.page_size * base.page_size].to(device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            with torch.no_grad():
                drawn = torch.multinomial(torch.softmax(logits, -1).cpu(), 1, generator=draw)[:, 0].to(logits.device)
            loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
            if not bool(torch.isfinite(loss)):
                raise CalibrationError(
                    f"the loss of a calibration text is {loss.item()}; load the model in bfloat16 or float32"
                )
            loss.backward()
            advance(len(window))
    if blind := [i for i, one in enumerate(layers) if not one.tokens]:
        raise UnsupportedError(
            f"{type(model).__name__}: layers {blind[:4]} did not pass through the attention function, so nothing says"
            " what errors of theirs cost; take a preset, such as klt4"
        )
    return [one.result() for one in layers]
