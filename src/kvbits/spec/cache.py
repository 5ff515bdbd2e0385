"""A scheme on a model: layer groups, page counts and bytes."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import SpecError
from .codec import choice, fill, parse, same_as, serialisable, to_dict, whole
from .layout import FORMATS_VERSION, PageLayout
from .quant import DTYPE_BYTES, QuantSpec
from .rotary import Rotary
from .scheme import MOST_TOKENS, Copies, Scheme, Tier

MAX_KV_HEADS = 65_535
"""Kv heads of a layer: what a CUDA grid counts along y, and far more than any model has."""
MAX_HEAD_DIM = 65_528
"""Channels of a head, a multiple of 8: far more than any model has."""


@serialisable
@dataclass(frozen=True, kw_only=True)
class LayerGeometry:
    """Shape of one attention layer's cache.

    Attributes:
        num_kv_heads: 1 to `MAX_KV_HEADS`.
        head_dim: channels of keys and queries, a multiple of 8 up to `MAX_HEAD_DIM`.
        value_head_dim: channels of values and of what attention returns, as many as those of keys unless given.
        sliding_window: 1 to `MOST_TOKENS` tokens, the query's own among them; None means full attention.
        rotary: how the layer's keys are turned by position; needed, and only then kept, where keys are stored before
            the rotary embedding.
        chunked: positions are cut into stretches of `sliding_window` tokens, and a token sees those of its own stretch
            (Llama 4), not the newest.
    """

    num_kv_heads: int
    head_dim: int
    value_head_dim: int = same_as("head_dim")
    sliding_window: int | None = None
    rotary: Rotary | None = None
    chunked: bool = field(default=False, metadata={"said": True})

    def __post_init__(self) -> None:
        fill(self)
        limits = {
            "num_kv_heads": (1, MAX_KV_HEADS, "it counts the key and value heads of one layer"),
            "head_dim": (8, MAX_HEAD_DIM, "take a multiple of 8"),
            "value_head_dim": (8, MAX_HEAD_DIM, "take a multiple of 8"),
            "sliding_window": (1, MOST_TOKENS, "None means full attention"),
        }
        for name, (least, most, instead) in limits.items():
            if (value := getattr(self, name)) is not None or name != "sliding_window":
                object.__setattr__(self, name, whole(name, value, least, most, instead))
        for name in ("head_dim", "value_head_dim"):
            if (n := getattr(self, name)) % 8:
                raise SpecError(f"{name}={n} must be a multiple of 8")
        if self.chunked and self.sliding_window is None:
            raise SpecError("chunked=True needs sliding_window, the tokens of a chunk")
        if self.rotary is not None:
            if not isinstance(self.rotary, Rotary):
                raise SpecError(f"rotary={self.rotary!r} is not a Rotary")
            self.rotary.frequencies(self.head_dim)

    def dim(self, side: str) -> int:
        """Return the number of channels of keys ("k") or values ("v")."""
        return self.head_dim if side == "k" else self.value_head_dim

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a page layout takes of it."""
        return {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "value_head_dim": self.value_head_dim}

    @property
    def token_elements(self) -> int:
        """Numbers of one token, keys and values of all kv heads."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that store alike and therefore share one page table: a page id names one page in each of these layers.

    `tiers` are the scheme's, and none for layers with an override. `copies` are those that are finer than the layers'
    own pages (`Scheme.copies_of`). `token_local` is the scheme's.
    """

    layers: tuple[int, ...]
    geometry: LayerGeometry
    key: QuantSpec
    value: QuantSpec
    num_sink_tokens: int
    residual_length: int
    page_size: int
    raw_dtype: str
    tiers: tuple[Tier, ...] = ()
    copies: tuple[Copies, ...] = ()
    token_local: bool = False

    SPECULATED_PAGES: ClassVar[int] = 1
    """Pages by which a tier may outgrow its size while tokens are speculative, so that taking back up to a page of them
    is exact.
    """

    @functools.cached_property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools."""
        return ("sink", "closed", "tail", *self.tier_pools, *self.copy_pools)

    @functools.cached_property
    def tier_pools(self) -> tuple[str, ...]:
        """Pools of the tiers' closed pages, the youngest tier's first; pages older than all of them are in "closed"."""
        return tuple(f"tier{i}" for i in range(len(self.tiers)))

    @functools.cached_property
    def copy_pools(self) -> tuple[str, ...]:
        """Pools of the copies of newest closed pages, those that are read for the newest tokens first."""
        return tuple(f"copy{i}" for i in range(len(self.copies)))

    @functools.cached_property
    def copied_pages(self) -> tuple[int, ...]:
        """Newest closed pages that each pool of copies has a copy of.

        A page is copied into all of these pools when it closes, so each of them covers the tokens of all before it.
        """
        return tuple(itertools.accumulate(c.num_tokens // self.page_size for c in self.copies))

    @functools.cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Closed pages of each tier and all younger ones together."""
        return tuple(itertools.accumulate(t.num_tokens // self.page_size for t in self.tiers))

    @functools.cached_property
    def is_raw(self) -> bool:
        """True where nothing is ever quantized: all tokens after the sinks are in tail pages."""
        return self.key.is_raw and self.value.is_raw

    @functools.cached_property
    def fills_pages(self) -> bool:
        """True where nothing ever closes: all tokens after the sinks are in tail pages, which are raw or quantized
        token by token.
        """
        return self.is_raw or self.token_local

    @property
    def packed_pool(self) -> str:
        """The pool that older tokens are read from, quantized."""
        return "tail" if self.token_local else "closed"

    def _layout(self, key: QuantSpec, value: QuantSpec, page_size: int) -> PageLayout:
        return PageLayout(key=key, value=value, page_size=page_size, raw_dtype=self.raw_dtype, **self.geometry.sizes)

    @functools.cached_property
    def layouts(self) -> dict[str, PageLayout]:
        """Page layout of each pool: raw sink pages, closed pages, tail pages (raw, or packed where these are filled
        token by token), closed pages of each tier, copies of newest closed pages.
        """
        raw = QuantSpec.raw()
        tail = (self.key, self.value) if self.fills_pages else (raw, raw)
        return {
            "sink": self._layout(raw, raw, max(self.num_sink_tokens, 1)),
            "closed": self._layout(self.key, self.value, self.page_size),
            "tail": self._layout(*tail, self.page_size),
        } | {
            name: self._layout(*specs, self.page_size)
            for name, specs in zip(
                (*self.tier_pools, *self.copy_pools),
                (*(t.specs(self.key, self.value) for t in self.tiers), *((c.key, c.value) for c in self.copies)),
                strict=True,
            )
        }

    def block_bytes(self, pool: str) -> int:
        """Return bytes one page id takes in a pool: one page in each layer of the group."""
        return len(self.layers) * self.layouts[pool].page_size_bytes

    @property
    def tail_pages(self) -> int:
        """Tail pages a sequence can hold at once (not where these fill and stay: there the tail grows)."""
        return -(-(self.residual_length + self.page_size) // self.page_size)

    def closed_after(self, num_tokens: int) -> int:
        """Return the number of pages ever closed once a sequence has `num_tokens` tokens: the newest token is always
        raw.
        """
        if self.fills_pages:
            return 0
        return max(0, (num_tokens - self.num_sink_tokens - self.residual_length - 1) // self.page_size)

    def first_visible(self, num_tokens: int) -> int:
        """Return the position of the oldest token that the next query can still see."""
        w = self.geometry.sliding_window
        return 0 if w is None else max(0, num_tokens - w + 1)

    def pages_for(self, num_tokens: int) -> dict[str, int]:
        """Return the most pages of each pool that one sequence holds on its way to `num_tokens` tokens."""
        if num_tokens < 0:
            raise SpecError(f"num_tokens={num_tokens} is negative")
        sinks, size, w = self.num_sink_tokens, self.page_size, self.geometry.sliding_window

        def alive(n: int) -> int:
            dead = max(0, self.first_visible(max(0, n - 1)) - sinks) // size  # what the newest token itself could see
            if self.fills_pages:
                return max(0, -(-(n - sinks) // size) - dead)
            return max(0, self.closed_after(n) - dead)

        grown = (
            alive(num_tokens)
            if w is None
            else max((alive(n) for n in range(max(0, num_tokens - 2 * size), num_tokens + 1)), default=0)
        )
        if w is not None and self.fills_pages:
            grown = max(grown, 1 if num_tokens > sinks else 0)
        closed = 0 if self.fills_pages else grown
        found = {
            "sink": 1 if sinks and num_tokens else 0,
            "closed": max(0, closed - (self.boundaries[-1] if self.tiers else 0)),
            "tail": grown if self.fills_pages else min(self.tail_pages, max(0, -(-(num_tokens - sinks) // size))),
        }
        for name, tier in zip(self.tier_pools, self.tiers, strict=True):
            found[name] = min(closed, tier.num_tokens // size + self.SPECULATED_PAGES) if tier.num_tokens else 0
        return found | {name: min(closed, n) for name, n in zip(self.copy_pools, self.copied_pages, strict=True)}


@serialisable
@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """A scheme on a model: every byte of the cache follows from this.

    Attributes:
        scheme: what is stored.
        layers: geometry of each attention layer, in model order.
        raw_dtype: dtype of raw pages (sinks, tail, raw layers): the model's own, by its name or torch's own.
    """

    scheme: Scheme
    layers: tuple[LayerGeometry, ...]
    raw_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise SpecError("a cache needs at least one layer")
        object.__setattr__(self, "scheme", self.scheme.on(self.layers))
        object.__setattr__(self, "raw_dtype", str(self.raw_dtype).removeprefix("torch."))
        choice("raw_dtype", self.raw_dtype, DTYPE_BYTES)
        for group in self.groups:  # refuses what does not fit, with the layer's own numbers
            for layout in group.layouts.values():
                _ = layout.head_bytes

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers with equal geometry and specs, in order of first appearance."""
        members: dict[tuple[LayerGeometry, QuantSpec, QuantSpec], list[int]] = {}
        for i, geometry in enumerate(self.layers):
            members.setdefault((geometry, *self.scheme.for_layer(i, len(self.layers))), []).append(i)
        s = self.scheme
        return tuple(
            LayerGroup(
                layers=tuple(layers),
                geometry=geometry,
                key=key,
                value=value,
                num_sink_tokens=s.num_sink_tokens,
                residual_length=s.residual_length,
                page_size=s.page_size,
                raw_dtype=self.raw_dtype,
                tiers=s.tiers if (key, value) == (s.key, s.value) else (),
                copies=s.copies_of(key, value),
                token_local=s.token_local,
            )
            for (geometry, key, value), layers in members.items()
        )

    def nbytes(self, num_tokens: int, batch_size: int = 1) -> int:
        """Return bytes a cache of this capacity allocates: `batch_size` sequences of `num_tokens` tokens each,
        everything included.
        """
        if batch_size < 0:
            raise SpecError(f"batch_size={batch_size} is negative")
        return sum(
            g.block_bytes(pool) * n * batch_size for g in self.groups for pool, n in g.pages_for(num_tokens).items()
        )

    def room(self, num_tokens: int) -> int | None:
        """Return the number of tokens that really fit a sequence in a cache built for `num_tokens`, which is rounded up
        to whole pages; None if any number does, as where every layer has a sliding window that is full.
        """
        has = [g.pages_for(num_tokens) for g in self.groups]

        def fits(n: int) -> bool:
            return all(
                wanted <= pages[pool]
                for g, pages in zip(self.groups, has, strict=True)
                for pool, wanted in g.pages_for(n).items()
            )

        most = num_tokens + 2 * max(g.page_size for g in self.groups)
        room = next(n for n in range(num_tokens, most + 1) if n == most or not fits(n + 1))
        return None if room == most else room

    def raw_nbytes(self, num_tokens: int, batch_size: int = 1, bytes_per_element: int = 2) -> int:
        """Return bytes the stock 16-bit cache holds for the same tokens (sliding layers hold their window only)."""
        total = 0
        for g in self.layers:
            held = num_tokens if g.sliding_window is None else min(num_tokens, g.sliding_window - 1)
            total += g.token_elements * held * bytes_per_element * batch_size
        return total

    @functools.cached_property
    def bytes_per_token(self) -> float:
        """Bytes one more token costs at long context: closed pages of the full-attention layers (all layers if none
        is).
        """
        full = [g for g in self.groups if g.geometry.sliding_window is None] or list(self.groups)
        return sum(g.block_bytes("tail" if g.fills_pages else "closed") / g.page_size for g in full)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per cached number in closed pages over all layers, metadata and padding included."""
        bits = sum(8 * g.block_bytes("tail" if g.fills_pages else "closed") for g in self.groups)
        elements = sum(len(g.layers) * g.geometry.token_elements * g.page_size for g in self.groups)
        return bits / elements

    @functools.cached_property
    def format_id(self) -> str:
        """A name for the byte layout of saved pages: equal ids mean interchangeable bytes."""
        return f"kvbits-{FORMATS_VERSION}:" + json.dumps(to_dict(self), sort_keys=True)

    def to_json(self) -> str:
        return json.dumps(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> CacheSpec:
        return parse(text, cls)
