"""What kvbits serves in vLLM, by `--kv-cache-dtype`: `FORMATS`, each a preset of `kvbits.schemes` stored token by token. No torch: `kvbits plan` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import schemes
from ...errors import SpecError
from ...spec import PageLayout, Scheme

PAGE_SIZE = 64
"""Tokens of a page, which is a block of vLLM."""
_KEY_BIAS_FAMILIES = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_audio")
"""Whose configuration says nothing of the bias that their keys have."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a `--kv-cache-dtype` stores.

    Attributes:
        name: of the dtype, `kvbits_` and the scheme's.
        scheme: token-local, for head_dim 128; `layout` fits its groups to others.
        key_bias: whether models whose keys have a bias keep their accuracy.
    """

    name: str
    scheme: Scheme
    key_bias: bool = True

    @property
    def rotated(self) -> bool:
        return self.scheme.key.is_rotated

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
        Format(name="kvbits_int8", scheme=_preset("int8")),
        Format(name="kvbits_int8_centered", scheme=_preset("int8_centered")),
        Format(name="kvbits_int8k_int4v", scheme=_preset("int8k_int4v")),
        Format(name="kvbits_int4", scheme=_preset("int4"), key_bias=False),
        Format(name="kvbits_int4_rotated", scheme=_preset("int4_rotated")),
    )
}
SCHEME = "kvbits_scheme"
"""The dtype whose layers each have the format that a scheme file says (`scheme_file`)."""


def has_key_bias(config: Any) -> bool:
    """Whether the key projections of a Transformers configuration have a bias."""
    named = any(getattr(config, name, False) is True for name in ("attention_bias", "qkv_bias", "add_qkv_bias"))
    return named or getattr(config, "model_type", "") in _KEY_BIAS_FAMILIES
