"""Recipes of other engines, simulated in a dense cache. Every token is rounded as it comes and is read so, even by
itself, as their decoding does. Nothing stays raw except where a recipe says so. No figure depends on how many tokens a
pass has.

    kvbits eval MODEL --out DIR --caches benchmarks/peers.py --schemes klt4,turboquant_4bit_nc
    kvbits eval MODEL --out DIR --caches benchmarks/peers.py --schemes klt4,klt3,caches

    turboquant_4bit_nc, _3bit_nc   vLLM 0.33. Keys: a norm in float16 and a direction, turned by a Hadamard matrix, each
                                   number the nearest Lloyd-Max level of
                                   the normal distribution, and the whole made as long as the norm again. Values:
                                   asymmetric integers, a scale and an offset in float16. The first two and the last two
                                   layers stay raw.
    int4_per_token_head            vLLM 0.33. Signs drawn once, a Hadamard matrix, asymmetric integers with a whole zero
                                   point, which is kept in the four lowest
                                   bits of the scale, a float32
    fp8_unscaled                   vLLM's fp8, where no scale is calibrated: E4M3 of the numbers as they are
    q4_0_rotated, q8_0_rotated     llama.cpp from April 2026 on: a Hadamard matrix (of values: one for every 64
                                   channels), then blocks of 32 with a scale in
                                   float16, by which the number farthest from 0 is -8, or -127 or 127
    nvfp4                          NVIDIA's 4-bit floats, on the pages of `int4`; the newest tokens stay raw

Written from what these engines compute. What they round on the way (a turned key to 16 bits) is left out, which
flatters them. KIVI's recipe is presets: kivi4, kivi2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvbits.errors import UnsupportedError
from kvbits.evaluate.caches import CacheFactory
from kvbits.evaluate.simulated import SimulatedCache, SimulatedLayer
from kvbits.geometry import layer_geometries
from kvbits.integrations.models import scheme_for
from kvbits.model_ref import ModelRef
from kvbits.quant.basis import hadamard
from kvbits.spec import CacheSpec, LayerGeometry

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Numbers [.., head_dim] of a token and kv head, float32, as they are read back."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A recipe.

    Attributes:
        keys, values: how they are rounded.
        key_bits, value_bits: of a number, by head_dim.
        heads: head_dim must be a multiple of it; 0 for a power of two.
        raw_layers: layers at each end that stay raw.
    """

    keys: Rounding
    values: Rounding
    key_bits: Callable[[int], float]
    value_bits: Callable[[int], float]
    source: str
    heads: int = 1
    raw_layers: int = 0


class PeerLayer(DynamicLayer):
    """A stock layer that gets its tokens rounded."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer = peer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(
            _rounded(self.peer.keys, key_states), _rounded(self.peer.values, value_states), *args, **kwargs
        )


def _rounded(how: Rounding, x: torch.Tensor) -> torch.Tensor:
    return how(x.float()).to(x.dtype)


def make(name: str, layers: tuple[LayerGeometry, ...]) -> tuple[Callable[[], Cache], dict[str, Any]]:
    """Return (what makes caches of the peer `name` for a model of these layers, JSON data about it).

    Raises:
        UnsupportedError: heads that the engine does not store so.
    """
    peer = PEERS[name]
    require_heads(name, layers, peer.heads)
    raw = raw_layers(peer, len(layers))
    held = sum(
        (
            16 * g.token_elements
            if r
            else g.num_kv_heads
            * (peer.key_bits(g.head_dim) * g.head_dim + peer.value_bits(g.value_head_dim) * g.value_head_dim)
        )
        for r, g in zip(raw, layers, strict=True)
    )
    info = {"bits_per_element": held / sum(g.token_elements for g in layers), "source": peer.source}
    return lambda: Cache(layers=[DynamicLayer() if r else PeerLayer(peer) for r in raw]), info


def require_heads(name: str, layers: Sequence[LayerGeometry], multiple: int) -> None:
    """Refuse heads that an engine does not store in the format of the peer `name`.

    Args:
        multiple: number that must divide head_dim; 0 if head_dim must be a power of two.

    Raises:
        UnsupportedError: naming the head_dim.
    """
    for d in {d for g in layers for d in (g.head_dim, g.value_head_dim)}:
        if d % multiple if multiple else d & (d - 1):
            raise UnsupportedError(
                f"{name} takes a head_dim that is a {f'multiple of {multiple}' if multiple else 'power of two'}, not {d}"
            )


def raw_layers(peer: Peer, count: int) -> list[bool]:
    """Return whether a recipe leaves a layer raw, for each of `count` layers."""
    ends = min(peer.raw_layers, count // 2)
    return [min(i, count - 1 - i) < ends for i in range(count)]


def integers(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a token to asymmetric integers: (code, half of them up) * scale + smallest, both in float16."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return ((x - low) / scale + 0.5).floor().clamp(0, 2**bits - 1) * scale.half().float() + low.half().float()


@functools.cache
def lloyd_max(bits: int) -> torch.Tensor:
    """Compute the levels of least squared error for the standard normal distribution (Lloyd, 1982), float32 [2**bits]."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    levels = normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(2000):
        edges = torch.cat([torch.tensor([-math.inf]), (levels[1:] + levels[:-1]) / 2, torch.tensor([math.inf])])
        density, below = normal.log_prob(edges).exp(), normal.cdf(edges)
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels.float()


def directions(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to a norm in float16, and the nearest Lloyd-Max level of each number of the turned direction; the levels
    are as long as the norm together.
    """
    norm = x.norm(dim=-1, keepdim=True)
    turned = hadamard(x / (norm + 1e-8)) * x.shape[-1] ** 0.5
    levels = lloyd_max(bits).to(x)
    found = levels[torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, right=True)]
    return hadamard(found / found.norm(dim=-1, keepdim=True)) * norm.half().float()


def zero_points(x: torch.Tensor) -> torch.Tensor:
    """Round turned numbers to 4-bit integers, (code - zero) * scale, whose scale lacks its four lowest bits."""
    width = x.shape[-1] & -x.shape[-1]
    signs = (
        torch.randint(2, (width,), generator=torch.Generator().manual_seed(width)).repeat(x.shape[-1] // width).to(x)
        * 2
        - 1
    )
    turned = hadamard(x * signs)
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = _away(-low / scale).clamp(0, 15)
    stored = (scale.view(torch.int32) & -16).view(torch.float32)
    return hadamard((_away(turned / scale + zero).clamp(0, 15) - zero) * stored) * signs


def _away(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest whole number; halves go away from 0."""
    return (x.abs() + 0.5).floor().copysign(x)


def blocks(x: torch.Tensor) -> torch.Tensor:
    """Round to q4_0: codes -8 to 7 times a scale in float16, by which the first of the largest numbers of 32 is -8."""
    parts = x.unflatten(-1, (-1, 32))
    scale = parts.gather(-1, parts.abs().argmax(-1, keepdim=True)) / -8
    codes = (parts * scale.reciprocal().nan_to_num(posinf=0, neginf=0) + 8.5).floor().clamp(max=15) - 8
    return (codes * scale.half().float()).flatten(-2)


def wide_blocks(x: torch.Tensor) -> torch.Tensor:
    """Round to q8_0: codes -127 to 127 times a scale in float16, by which the largest number of 32 is 127."""
    parts = x.unflatten(-1, (-1, 32))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    codes = _away(parts * scale.reciprocal().nan_to_num(posinf=0))
    return (codes * scale.half().float()).flatten(-2)


def turned(x: torch.Tensor, how: Rounding) -> torch.Tensor:
    """Round numbers between two Hadamard matrices."""
    return hadamard(how(hadamard(x)))


def turned_by_64(x: torch.Tensor, how: Rounding) -> torch.Tensor:
    """Round as `turned` does, with a matrix for every 64 channels."""
    return turned(x.unflatten(-1, (-1, 64)), how).flatten(-2)


TILE = 128
"""Tokens of a tile of `kvarn_k4v2_g128`, and first tokens that it leaves raw."""


def balance(x: torch.Tensor, iterations: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the factors of the rows and columns of tiles `x` [.., rows, columns] that make their spreads alike
    (arXiv:2606.03458). Columns and rows are divided by their standard deviation in turns, and the factors are those
    after which the ratios of the largest to the smallest spread had the smallest sum.

    Returns:
        rows [.., rows, 1], columns [.., 1, columns].
    """

    def spreads(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of_rows, of_columns = y.std(-1, keepdim=True), y.std(-2, keepdim=True)
        ratios = [
            s.amax((-2, -1), keepdim=True) / s.amin((-2, -1), keepdim=True).clamp(min=1e-8)
            for s in (of_rows, of_columns)
        ]
        return of_rows, of_columns, ratios[0] + ratios[1]

    def grown(factors: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        return (factors + spread.clamp(1e-3, 1e3).log()).clamp(-0.3, 10.0)

    rows, columns = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    best_rows, best_columns = rows, columns
    _, of_columns, least = spreads(x)
    for _ in range(iterations):
        columns = grown(columns, of_columns)
        rows = grown(rows, (x * (-columns - rows).exp()).std(-1, keepdim=True))
        _, of_columns, ratio = spreads(x * (-columns - rows).exp())
        better = ratio <= least
        best_rows, best_columns = torch.where(better, rows, best_rows), torch.where(better, columns, best_columns)
        least = torch.minimum(least, ratio)
    return best_rows.exp(), best_columns.exp()


def tiles(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round KVarN's tiles [.., rows, columns]: balanced, asymmetric integers by row, and in float16 a scale and an
    offset of each row and a factor of each column.
    """
    rows, columns = balance(x)
    even = x / rows / columns
    low, high = even.amin(-1, keepdim=True), even.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-10)
    codes = ((even - low) / scale).round().clamp(0, 2**bits - 1)
    return (codes * (rows * scale).half().float() + (rows * low).half().float()) * columns.half().float()


def kvarn(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round keys and values [.., tokens, head_dim] of whole tiles as `kvarn_k4v2_g128` does: keys of 4 bits with rows
    of a channel, values of 2 bits with rows of a token.
    """
    turned_keys, turned_values = (hadamard(x).unflatten(-2, (-1, TILE)) for x in (k, v))
    return hadamard(tiles(turned_keys.mT, 4).mT.flatten(-3, -2)), hadamard(tiles(turned_values, 2).flatten(-3, -2))


def kvarn_bits(head_dim: int, value_head_dim: int) -> tuple[float, float]:
    """Return the bits of a number of a tile's keys and values: codes, a scale and an offset of each row, a factor of
    each column.
    """
    return 4 + 32 / TILE + 16 / head_dim, 2 + 32 / value_head_dim + 16 / TILE


OSCAR_FIRST, OSCAR_NEWEST = 64, 256
"""Tokens that OSCAR leaves raw."""
OSCAR_KEPT = 0.96, 0.92
"""Share of a token's numbers of keys and values that OSCAR does not clip."""


def oscar_rotation(moments: torch.Tensor) -> torch.Tensor:
    """Compute OSCAR's rotation of a layer from `moments` [D, D], float64 (arXiv:2605.17757): eigenvectors, a Hadamard
    matrix, and channels in the order of reversed bits of their eigenvalue's rank.
    """
    values, vectors = torch.linalg.eigh(moments)
    width = len(values)
    reversed_bits = torch.tensor([int(f"{i:0{width.bit_length() - 1}b}"[::-1], 2) for i in range(width)])
    order = torch.empty(width, dtype=torch.long)
    order[reversed_bits] = values.cpu().argsort(descending=True)
    return hadamard(vectors)[:, order.to(vectors.device)]


def oscar(x: torch.Tensor, rotation: torch.Tensor, kept: float) -> torch.Tensor:
    """Round `x` [.., D] to OSCAR's 2 bits: turned by `rotation`, clipped at the share `kept` of a token's sizes,
    asymmetric integers in groups of 128 channels at most, a scale and a zero point in float16.
    """
    y = x @ rotation
    sizes = y.abs().sort(-1).values
    limit = sizes[..., min(int(kept * y.shape[-1]), y.shape[-1] - 1), None]
    groups = y.clamp(-limit, limit).unflatten(-1, (-1, min(128, y.shape[-1])))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-8) / 3
    zero = -low / scale
    codes = (groups / scale + zero + 0.5).floor().clamp(0, 3)
    return ((codes - zero.half().float()) * scale.half().float()).flatten(-2) @ rotation.T


def fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _turboquant(bits: int) -> Peer:
    return Peer(
        keys=functools.partial(directions, bits=bits),
        values=functools.partial(integers, bits=bits),
        key_bits=lambda d: bits + 16 / d,
        value_bits=lambda d: bits + 32 / d,
        source="https://github.com/vllm-project/vllm/pull/38479",
        heads=0,
        raw_layers=2,
    )


def _alike(how: Rounding, bits: Callable[[int], float], source: str, heads: int) -> Peer:
    return Peer(keys=how, values=how, key_bits=bits, value_bits=bits, source=source, heads=heads)


def _rotated(how: Rounding, bits: float) -> Peer:
    return Peer(
        keys=functools.partial(turned, how=how),
        values=functools.partial(turned_by_64, how=how),
        key_bits=lambda d: bits,
        value_bits=lambda d: bits,
        source="https://github.com/ggml-org/llama.cpp/pull/21038",
        heads=64,
    )


PEERS = {
    "turboquant_4bit_nc": _turboquant(4),
    "turboquant_3bit_nc": _turboquant(3),
    "int4_per_token_head": _alike(
        zero_points, lambda d: 4 + 32 / d, "https://github.com/vllm-project/vllm/pull/39074", 2
    ),
    "fp8_unscaled": _alike(fp8, lambda d: 8.0, "https://arxiv.org/abs/2209.05433", 1),
    "q4_0_rotated": _rotated(blocks, 4.5),
    "q8_0_rotated": _rotated(wide_blocks, 8.5),
}
"""By the name that its engine gives it."""


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """Round `x` [.., tokens, head_dim] to NVFP4, float32 (arXiv:2509.25149): E2M1 numbers in groups of 16 channels, a
    scale in E4M3 for each group, and one float32 scale for the last two dimensions, by which the largest number gets
    the largest scale. head_dim must be a multiple of 16.
    """
    groups = x.float().unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1, keepdim=True)
    page = largest.amax((-3, -2, -1), keepdim=True) / (6 * 448)
    scale = (largest / 6 / page).nan_to_num().to(torch.float8_e4m3fn).float() * page
    size = (groups / scale).nan_to_num().abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step * scale).copysign(groups).flatten(-2)


class Nvfp4Layer(SimulatedLayer):
    """A layer whose pages are NVFP4's."""

    def given_back(
        self, k: torch.Tensor, v: torch.Tensor, starts: np.ndarray, pool: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return nvfp4(k), nvfp4(v)


def nvfp4_factory(model: Any) -> CacheFactory:
    """Make the factory of `nvfp4` for a model.

    Raises:
        UnsupportedError: heads whose channels are not a multiple of 16.
    """
    layers = layer_geometries(model.config)
    if narrow := [d for g in layers for d in (g.head_dim, g.value_head_dim) if d % 16]:
        raise UnsupportedError(f"nvfp4 has groups of 16 channels, which do not divide head_dim={narrow[0]}")
    spec = CacheSpec(scheme=scheme_for(ModelRef.of(model), "int4"), layers=layers)
    numbers = [g.token_elements for g in layers]
    pages = sum(
        n * 64 / (spec.scheme.page_size * (g.head_dim + g.value_head_dim)) for n, g in zip(numbers, layers, strict=True)
    ) / sum(numbers)
    info = {"bits_per_element": 4 + 8 / 16 + pages, "source": "https://arxiv.org/abs/2509.25149"}
    return CacheFactory(
        "nvfp4",
        "simulated",
        lambda batch, tokens: SimulatedCache(spec, None, model.device, Nvfp4Layer),
        info,
        stores_padding=True,
    )


def peer_factory(name: str, model: Any) -> CacheFactory:
    """Make the factory of the peer `name` for a model; see `make`."""
    cache, info = make(name, layer_geometries(model.config))
    return CacheFactory(name, "simulated", lambda batch, tokens: cache(), info)


CACHES: Mapping[str, Callable[[Any], CacheFactory]] = {
    "nvfp4": nvfp4_factory,
    **{name: functools.partial(peer_factory, name) for name in PEERS},
}
"""Makers of cache factories by name, for `kvbits eval --caches`. Each takes a model."""
