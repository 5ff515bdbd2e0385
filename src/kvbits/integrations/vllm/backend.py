"""Backend that vLLM asks before it allocates: `KVBitsBackend`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from ..engine.served import PAGE_SIZE
from . import formats, releases


class KVBitsBackend(AttentionBackend):
    """Blocks of 64 tokens, each head's struct of a kvbits page in one run of bytes (`[block, head, 64, head_bytes /
    64]` of uint8).

    Stored and attended in `impl`.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *formats.NAMES]
    # a page that opens takes the mean of the one before it, which the step's metadata knows
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return str(releases.backend().name)

    @staticmethod
    def get_impl_cls() -> type:
        from .impl import KVBitsImpl

        return KVBitsImpl

    @staticmethod
    def get_builder_cls() -> type:
        from .builder import KVBitsMetadataBuilder

        return KVBitsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE_SIZE]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return the bytes of a page, by the torch dtype that stands for its format."""
        if spec.state_content_bytes is not None:
            return spec
        layout = formats.layout_by_tag(spec.dtype, spec.num_kv_heads, spec.head_size, spec.head_size_v)
        return dataclasses.replace(spec, dtype=torch.uint8, state_content_bytes=layout.head_bytes // layout.page_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # prefill passes are laid out on the host

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why a model cannot be served, or None."""
        if block_size not in (None, PAGE_SIZE):
            return f"kvbits' pages hold {PAGE_SIZE} tokens; leave --block-size away, or pass --block-size {PAGE_SIZE}"
        if kv_cache_dtype in formats.FORMATS and (why := formats.FORMATS[kv_cache_dtype].refuses(head_size, head_size)):
            return why
        if device_capability is None:  # a CPU, where the reference serves
            return None
        if device_capability < (8, 0):
            return "kvbits' kernels need compute capability 8.0"
        if dtype == torch.float32:
            return "kvbits' kernels attend in float16 and bfloat16; pass --dtype bfloat16"
        return formats.refuses_pages(kv_cache_dtype, head_size, formats.RAW_DTYPES[dtype])


class HybridBackend(KVBitsBackend):
    """For models that also have recurrent layers: vLLM makes their blocks as large as such a layer's state, and can
    split blocks into pages of 64 tokens only where each layer's blocks lie together.
    """

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)
