"""Builder of each step's metadata, which owns the plans of a KV-cache group."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ...errors import UnsupportedError
from ...later import upload
from ...ops.cuda.ahead import MAX_QUERIES
from ..engine.decode import Ragged
from ..engine.served import PAGE_SIZE
from ..engine.step import Step, Steps
from .options import options_of


class KVBitsMetadataBuilder(AttentionMetadataBuilder[Step]):
    """Owns the decode plans of a KV-cache group, of fixed size."""

    reorder_batch_threshold: int

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        threshold = self.reorder_batch_threshold
        if threshold > MAX_QUERIES:
            self.reorder_batch_threshold = threshold = 1
        if vllm_config.parallel_config.use_ubatching:
            raise UnsupportedError(
                "kvbits' attention backend unpacks histories of one batch at a time; drop --enable-dbo"
            )
        layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        impls = [layer.impl for layer in layers.values()]
        for impl in impls:
            impl.settle()
            if impl.call.layout.head_bytes != kv_cache_spec.state_content_bytes * PAGE_SIZE:
                raise UnsupportedError(
                    f"vLLM allocated {kv_cache_spec.state_content_bytes} bytes per token and head where"
                    f" {impl.kv_cache_dtype} needs {impl.call.layout.head_bytes // PAGE_SIZE}; this is a bug of the"
                    " kvbits plugin"
                )
            if impl.ring_bytes:
                impl.stored.take_copies(impl.pool.count)
        calls = [impl.call for impl in impls]
        config = vllm_config.scheduler_config
        rows = max(config.max_num_seqs, *(vllm_config.compilation_config.cudagraph_capture_sizes or [1]))
        if getattr(kv_cache_spec, "attention_chunk_size", None) and any(c.layout.key.needs_rotary for c in calls):
            raise UnsupportedError(
                "layers that attend in chunks count from a chunk's start, calibrated keys from a request's; use"
                " kvbits_int8_centered"
            )
        cache = vllm_config.cache_config  # whose blocks are of several pages in hybrids
        self._pool = impls[0].pool  # of the worker's copies
        self._steps = Steps(
            calls,
            num_queries={1, threshold},
            copied=self._pool.count,
            rows=rows,
            device=device,
            tokens=config.max_num_batched_tokens + rows * threshold,  # drafts come on top of a full step
            num_pages=(cache.num_gpu_blocks or 1) * cache.block_size // PAGE_SIZE,
        )
        if copies := self._steps.copies:
            self._pool.states.add(copies)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        wide = max_decode_query_len(vllm_config) > MAX_QUERIES
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if wide else AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """Return the step, whose rows that decode vLLM puts first; launches only, waits for nothing."""
        m = common_attn_metadata
        if m.causal is not True:
            raise UnsupportedError("kvbits' attention is causal; this model asks for attention in both directions")
        threshold = self.reorder_batch_threshold
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(m, decode_threshold=threshold)
        num_queries = num_decode_tokens // num_decodes if num_decodes else 1
        lens = m.query_start_loc_cpu[: num_decodes + 1].diff()
        uniform = (
            num_queries in (1, threshold)
            and bool(((lens == num_queries) | (lens == 0)).all())
            and num_queries * num_decodes == num_decode_tokens
        )
        ragged = None if uniform or not num_decodes else self._ragged(m, num_decodes, num_decode_tokens, threshold)
        rows = m.num_reqs
        found = self._steps.plan(
            m.seq_lens[:rows],
            m.query_start_loc[: rows + 1],
            m.block_table_tensor[:rows],
            m.slot_mapping[: m.num_actual_tokens],
            upload(self._pool.rings_of(m), self.device) if self._steps.copies else None,
            self._prompts(m, num_decodes) if num_prefills else np.zeros((2, 0), np.int64),
            num_decode_tokens=num_decode_tokens,
            num_queries=num_queries if uniform else threshold,
            ragged=ragged,
        )
        if options_of(self.vllm_config).observe:
            found.positions = self._positions(m)
        return found

    def _prompts(self, m: CommonAttentionMetadata, first: int) -> np.ndarray:
        """Return query and sequence lengths of the rows from `first` on, as `Steps.plan` takes them.

        A GPU's lengths are not waited for: vLLM's bound is exact for rows of prompts. Where a draft model reads the
        token that was just sampled, vLLM lengthens the row and its length on the device, and leaves the bound behind.
        """
        bound = m.seq_lens if m.seq_lens.device.type == "cpu" else m.seq_lens_cpu_upper_bound
        if bound is None:
            raise UnsupportedError(
                "this model runner gives attention backends no lengths on the host; use vLLM's default runner"
            )
        lens = m.query_start_loc_cpu[first : m.num_reqs + 1].diff(), bound[first : m.num_reqs]
        return torch.stack([x.long() for x in lens]).numpy()

    def _ragged(self, m: CommonAttentionMetadata, rows: int, tokens: int, num_queries: int) -> Ragged:
        starts, places = m.query_start_loc[: rows + 1], torch.arange(num_queries, device=self.device)
        token_of = (starts[:-1, None] + places).clamp_(max=tokens - 1).view(-1)
        row, place = self._places(m, rows, tokens)
        return Ragged(starts.diff(), token_of, row * num_queries + place)

    def _positions(self, m: CommonAttentionMetadata) -> torch.Tensor:
        """Return int64 [tokens]."""
        row, place = self._places(m, m.num_reqs, m.num_actual_tokens)
        return place + (m.seq_lens[: m.num_reqs] - m.query_start_loc[: m.num_reqs + 1].diff())[row]

    def _places(self, m: CommonAttentionMetadata, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 [tokens] each: the row of each token, the last one's for padding, and its place in the row."""
        starts, each = m.query_start_loc[: rows + 1].long(), torch.arange(tokens, device=self.device)
        row = torch.searchsorted(starts[1:], each, right=True).clamp_(max=rows - 1)
        return row, each - starts[row]
