"""Which `--kv-cache-dtype` stores what: `FORMATS`, each a preset of `kvbits.schemes` stored token by token.

vLLM asks a backend for page sizes with nothing but a torch dtype in hand (`customize_spec`): no name, no layer, and in its workers no configuration. So each
format has a torch dtype of its own as a tag, which no other cache uses, and the model's own dtype means raw pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import schemes
from ...errors import SpecError, UnsupportedError
from ...spec import PageLayout, QuantSpec, Scheme

PAGE_SIZE = 64
"""Tokens of a page, which is a block of vLLM."""
RAW_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_KEY_BIAS_FAMILIES = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_audio")
"""Whose configuration says nothing of the bias that their keys have."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a `--kv-cache-dtype` stores.

    Attributes:
        name: of the dtype, `kvbits_` and the scheme's.
        scheme: token-local, for head_dim 128; `layout` fits its groups to others.
        tag: torch dtype under which vLLM hands page specs to `customize_spec`; None: `tag_for` gives it one.
        key_bias: whether models whose keys have a bias keep their accuracy.
    """

    name: str
    scheme: Scheme
    tag: torch.dtype | None = None
    key_bias: bool = True

    @property
    def rotated(self) -> bool:
        return self.scheme.key.rotated

    def layout(self, num_kv_heads: int, head_dim: int, raw_dtype: str = "bfloat16") -> PageLayout:
        """Pages of one layer.

        Raises:
            SpecError: groups that do not divide head_dim.
        """
        fitted = schemes.fitted(self.scheme, head_dim)
        return PageLayout(key=fitted.key, value=fitted.value, page_size=PAGE_SIZE, num_kv_heads=num_kv_heads, head_dim=head_dim, raw_dtype=raw_dtype)

    def refuses(self, head_dim: int, has_key_bias: bool = False) -> str | None:
        """Why a model cannot be served in this format, or None."""
        if head_dim % 8 or not 64 <= head_dim <= 256:
            return f"head_dim={head_dim} is no multiple of 8 from 64 to 256; use --kv-cache-dtype auto"
        if self.rotated and head_dim & (head_dim - 1):
            return f"{self.name} rotates keys by a Hadamard matrix, and head_dim={head_dim} is no power of two; use kvbits_int8_centered"
        if has_key_bias and not self.key_bias:
            return f"{self.name} loses too much where keys have a bias, as this model's do; use kvbits_int8_centered or kvbits_int4_rotated"
        try:
            layout = self.layout(1, head_dim)
            _ = layout.head_bytes
        except SpecError as e:
            return str(e)
        return None


def _preset(name: str) -> Scheme:
    return schemes.get(name, residual_length=0, page_size=PAGE_SIZE, token_local=True)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(name="kvbits_int8", scheme=_preset("int8"), tag=torch.int8),
        Format(name="kvbits_int8_centered", scheme=_preset("int8_centered"), tag=torch.int16),
        Format(name="kvbits_int8k_int4v", scheme=_preset("int8k_int4v"), tag=torch.int32),
        Format(name="kvbits_int4", scheme=_preset("int4"), tag=torch.int64, key_bias=False),
        Format(name="kvbits_int4_rotated", scheme=_preset("int4_rotated"), tag=torch.uint16),
    )
}
SCHEME = "kvbits_scheme"
"""The dtype whose layers each have the format that a scheme file says (`scheme_file`)."""
NAMES = (*FORMATS, SCHEME)
PLACEHOLDER = torch.bool
"""Tag of layers that have not been told their format yet."""
_BY_TAG = {f.tag: f for f in FORMATS.values()}
_SPARE_TAGS = (
    torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    *(getattr(torch, f"{kind}{bits}") for kind in ("uint", "int") for bits in range(1, 8)),
)  # fmt: skip
"""For formats that only a scheme file has."""


def tag_for(form: Format) -> torch.dtype:
    """The torch dtype that stands for a format in this process.

    Raises:
        UnsupportedError: more different formats than there are dtypes.
    """
    same = lambda f: (f.scheme.key, f.scheme.value) == (form.scheme.key, form.scheme.value)  # noqa: E731
    tag = next((tag for tag, f in _BY_TAG.items() if same(f)), None) or next((tag for tag in _SPARE_TAGS if tag not in _BY_TAG), None)
    if tag is None:
        raise UnsupportedError(f"a scheme file with more than {len(_SPARE_TAGS)} formats that are no kvbits dtype; use fewer")
    _BY_TAG.setdefault(tag, form)
    return tag


def raw_layout(num_kv_heads: int, head_dim: int, raw_dtype: str) -> PageLayout:
    """Pages of a layer that keeps the model's own values (`--kv-cache-dtype auto`, or a layer skipped)."""
    raw = QuantSpec.raw()
    return PageLayout(key=raw, value=raw, page_size=PAGE_SIZE, num_kv_heads=num_kv_heads, head_dim=head_dim, raw_dtype=raw_dtype)


def layout_for(kv_cache_dtype: str, num_kv_heads: int, head_dim: int, model_dtype: torch.dtype) -> PageLayout:
    """Pages of a layer by the name of its dtype ("auto" and the model's own: raw).

    Raises:
        UnsupportedError: a dtype that is none of these.
    """
    raw_dtype = RAW_DTYPES[model_dtype]
    if kv_cache_dtype in ("auto", raw_dtype):
        return raw_layout(num_kv_heads, head_dim, raw_dtype)
    if kv_cache_dtype not in FORMATS:
        raise UnsupportedError(f"kv_cache_dtype={kv_cache_dtype!r} is no format of kvbits; known: auto, {', '.join(FORMATS)}")
    return FORMATS[kv_cache_dtype].layout(num_kv_heads, head_dim, raw_dtype)


def layout_by_tag(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> PageLayout:
    """Pages of a layer by the torch dtype that vLLM has for it.

    Raises:
        UnsupportedError: a torch dtype that stands for no format.
    """
    if dtype in RAW_DTYPES:
        return raw_layout(num_kv_heads, head_dim, RAW_DTYPES[dtype])
    if dtype not in _BY_TAG:
        raise UnsupportedError(f"pages of {dtype} are no format of kvbits; known: auto, {', '.join(FORMATS)}")
    return _BY_TAG[dtype].layout(num_kv_heads, head_dim)


def has_key_bias(config: Any) -> bool:
    """Whether the key projections of a Transformers configuration have a bias."""
    named = any(getattr(config, name, False) is True for name in ("attention_bias", "qkv_bias", "add_qkv_bias"))
    return named or getattr(config, "model_type", "") in _KEY_BIAS_FAMILIES
