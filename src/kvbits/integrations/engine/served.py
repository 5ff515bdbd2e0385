"""Formats that kvbits serves in vLLM, by `--kv-cache-dtype`: `FORMATS`. Copies of a request's newest pages: `Ring`.

Each format is a preset of `kvbits.schemes` stored token by token. This module imports no torch, since `kvbits plan`
reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from ... import schemes
from ...errors import SpecError
from ...spec import Copies, LayerGeometry, PageLayout, QuantSpec, Scheme

PAGE_SIZE = 64
"""Tokens of a page, which is a block of vLLM."""
WIDEST, WIDEST_CALIBRATED = 512, 256
"""Largest head_dim that GPU kernels take, and of calibrated formats (tests/integrations/test_vllm.py compares), whose
values are as wide as their keys.
"""
COPIED = 64
"""First tokens of a request that calibrated formats also keep raw unless users say otherwise, and newest ones, at
least, of those in a scheme file.
"""
COPIES_SHARE = 0.05
"""Share of the cache's memory that copies take at most, unless users say otherwise (`copies_share`)."""


def raw_of(layout: PageLayout) -> PageLayout:
    """Return the layout of the same tokens as the model has them."""
    return dataclasses.replace(layout, key=QuantSpec.raw(), value=QuantSpec.raw())


@dataclass(frozen=True)
class Ring:
    """Copies of one request's pages in one format, in one layer.

    Attributes:
        layout: of a copy.
        newest: pages that are copied, the request's newest.
        first: whether its first page is copied, too, in a page of its own.
    """

    layout: PageLayout
    newest: int
    first: bool = False

    @property
    def pages(self) -> int:
        return self.newest + self.first

    @property
    def nbytes(self) -> int:
        return self.pages * self.layout.page_size_bytes


def copied_requests(memory_bytes: int, request_bytes: int, most: int, share: float = COPIES_SHARE) -> int:
    """Count the requests that have copies at the same time: engines allocate for so many, `kvbits plan` counts so
    many.

    Args:
        memory_bytes: memory for the cache, copies included.
        request_bytes: bytes of one request's copies in all layers, above 0.
        most: requests that can run at once.
    """
    return min(most, int(memory_bytes * share) // request_bytes)


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format that a `--kv-cache-dtype` stores.

    Attributes:
        name: of the dtype, `kvbits_` and the scheme's.
        scheme: token-local, for head_dim 128; `layout` fits its groups to others.
        copies: finer formats that the newest tokens are read from, behind the raw ones; finest first.
        raw_newest: newest tokens of a request, at least, that are also kept raw unless users say otherwise.
    """

    name: str
    scheme: Scheme
    copies: tuple[Copies, ...] = ()
    raw_newest: int = 0

    @property
    def calibrated(self) -> bool:
        """Flag that tells whether its layers need numbers of a calibration (`kvbits calibrate`)."""
        return self.scheme.needs_calibration

    @property
    def stored(self) -> str:
        """Clause on how keys and values are stored, for a log."""
        key, value = self.scheme.key, self.scheme.value
        if key.has_offsets:
            return f"{key.mean_bits:.3g}-bit keys in a calibrated basis, {value.mean_bits:.3g}-bit values"
        return f"{'centred ' * (key.center is not None)}{key.format} keys, {value.format} values"

    def layout(self, num_kv_heads: int, head_dim: int, value_head_dim: int, raw_dtype: str = "bfloat16") -> PageLayout:
        """Return pages of one layer.

        Raises:
            SpecError: groups that do not divide head_dim.
        """
        fitted = schemes.fitted(self.scheme, head_dim, value_head_dim)
        heads = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_head_dim": value_head_dim}
        return PageLayout(key=fitted.key, value=fitted.value, page_size=PAGE_SIZE, raw_dtype=raw_dtype, **heads)

    def copies_of(self, layout: PageLayout) -> tuple[tuple[int, PageLayout], ...]:
        """Return (tokens that are read from it, pages) of each format of `copies`, for a layer whose pages are these.

        Raises:
            SpecError: groups that do not divide head_dim.
        """
        if not self.copies:
            return ()
        whole = dataclasses.replace(self.scheme, token_local=False, copies=self.copies)
        fitted = schemes.fitted(whole, layout.head_dim, layout.value_head_dim)
        return tuple((c.num_tokens, dataclasses.replace(layout, key=c.key, value=c.value)) for c in fitted.copies)

    def refuses(self, head_dim: int, value_head_dim: int, key_bias: bool = False) -> str | None:
        """Return why a model cannot be served in this format, or None.

        Args:
            key_bias: whether its keys have one (`geometry.has_key_bias`).
        """
        for d in (head_dim, value_head_dim):
            if d % 8 or not 64 <= d <= WIDEST:
                return f"head_dim={d} is not a multiple of 8 from 64 to {WIDEST}; use --kv-cache-dtype auto"
        if self.calibrated and (head_dim != value_head_dim or head_dim > WIDEST_CALIBRATED):
            return (
                f"keys of {head_dim} and values of {value_head_dim} channels; {self.name} has codes of heads of one"
                f" width up to {WIDEST_CALIBRATED}: use kvbits_int8_centered"
            )
        if self.calibrated and head_dim % 16:
            return (
                f"{self.name} has codes of eight bands, and head_dim={head_dim} is not a multiple of 16; use"
                " kvbits_int8_centered"
            )
        if key_bias and schemes.weak_to_key_bias(self.scheme):
            return (
                f"{self.name} loses too much where keys have a bias, as this model's do; use kvbits_int8_centered or"
                " kvbits_klt4"
            )
        try:
            layout = self.layout(1, head_dim, value_head_dim)
            for pages in (layout, *(copy for _, copy in self.copies_of(layout))):
                _ = pages.head_bytes
        except SpecError as e:
            return str(e)
        return None

    def refuses_any(self, layers: Iterable[LayerGeometry], key_bias: bool = False) -> str | None:
        """Return why one of these layers cannot be served, as `refuses` does, or None."""
        return next((why for g in layers if (why := self.refuses(g.head_dim, g.value_head_dim, key_bias))), None)


FORMATS: dict[str, Format] = {
    f"kvbits_{name}": Format(
        name=f"kvbits_{name}",
        scheme=schemes.get(
            name, residual_length=0, num_sink_tokens=0, page_size=PAGE_SIZE, copies=(), token_local=True
        ),
        copies=schemes.get(name).copies,
        raw_newest=schemes.get(name).residual_length if schemes.get(name).needs_calibration else 0,
    )
    for name in ("int8", "int8_centered", "int8k_int4v", "int4", "klt4", "klt3", "klt2")
}
RAW = Format(name="auto", scheme=schemes.get("raw", page_size=PAGE_SIZE, token_local=True))
"""The model's own numbers: of engines' own dtype, and of layers that are skipped."""
LISTED = ("kvbits_int8_centered", "kvbits_klt4", "kvbits_klt3", "kvbits_klt2")
"""Formats that help, tables and messages show. Engines take the other names of `FORMATS`, too."""
SCHEME = "kvbits_scheme"
"""The dtype whose layers each have the format that a scheme file says (`scheme_file`)."""
