"""SGLang's attention backend: `KVBitsBackend`. Steps of single tokens are read by one plan for all rows; those of prompts row by row, history packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ...errors import UnsupportedError
from ...ops import dispatch
from ...ops.reference.place import Places
from ...quant.rotary import turn_by
from ..engine.call import Call, Scratch, call_for
from ..engine.decode import Decode
from ..engine.host_prefill import HostPrefill
from ..engine.served import FORMATS, PAGE_SIZE
from ..rotary import layers_of
from .pool import KVBitsPool

_NO_SCRATCH = Scratch(torch.empty(0), torch.empty(0))
"""Prompts' histories are not unpacked."""


class KVBitsBackend(AttentionBackend):
    """Attention of one engine.

    Args:
        runner: SGLang's ModelRunner, with its model and pools.
        name: of the format, as in `engine.served.FORMATS`.

    Raises:
        UnsupportedError: layers that are not served; a pool that is not ours.
    """

    def __init__(self, runner: Any, name: str) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, KVBitsPool) or pool.form is not FORMATS[name]:
            raise UnsupportedError(
                f"--attention-backend {name} got a {type(pool).__name__} of SGLang's; for models with sliding windows pass --disable-hybrid-swa-memory, "
                "for others use another backend"
            )
        self._pool, self._dtype = pool, pool.dtype
        self._req_to_token = runner.req_to_token_pool.req_to_token
        device = torch.device(runner.device)
        self._calls = {m.layer_id: self._call(m) for m in runner.model.modules() if isinstance(m, RadixAttention)}
        rows, pages = runner.req_to_token_pool.size, -(-self._req_to_token.shape[1] // PAGE_SIZE)
        self._decodes = {call: Decode(call, pages, rows, 1, device, None) for call in self._calls.values()}
        self._table_width = pages
        self._prefills: dict[Call, HostPrefill] = {}
        self._places, self._turns = None, {}
        if pool.layout.is_centered:
            self._places = Places.empty(PAGE_SIZE, tokens=0, num_blocks=len(pool.pages[0]), previous=True, copies=None, device=device)
            self._placer = dispatch.choose("place", device)
            self._turns = _turns(runner.model_config.hf_text_config, device)
        self._writes = dispatch.choose("store_tokens", pool.layout, self._dtype, device)
        for choice in (self._writes, self._placer if self._places else None):
            if choice:
                choice.prepare()

    def _call(self, layer: RadixAttention) -> Call:
        for what, there in (
            ("attention to an encoder", layer.is_cross_attention),
            (f"attention of type {layer.attn_type}", layer.attn_type != AttentionType.DECODER),
            ("attention in chunks", layer.use_irope),
            ("scores scaled by length", layer.xai_temperature_len > 0),
            (f"scores capped by {layer.logit_capping_method}", bool(layer.logit_cap) and layer.logit_capping_method != "tanh"),
        ):
            if there:
                raise UnsupportedError(f"layer {layer.layer_id}: kvbits' attention backend does not do {what}; use another --attention-backend")
        window = layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else None  # SGLang does not count the query itself
        return call_for(
            self._pool.layout, layer.tp_q_head_num, self._dtype, float(layer.scaling), window, float(layer.logit_cap) or None, _NO_SCRATCH, None, None
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The step's tables: for all layers, before the first."""
        mode, lens = forward_batch.forward_mode, forward_batch.seq_lens.int()
        if mode.is_idle():
            return
        if mode not in (ForwardMode.DECODE, ForwardMode.EXTEND):
            raise UnsupportedError(f"kvbits' attention backend does not run steps of {mode!r}")
        decodes = mode == ForwardMode.DECODE
        new = torch.ones_like(lens) if decodes else forward_batch.extend_seq_lens.int()
        self._slots = forward_batch.out_cache_loc.long()
        table = (self._req_to_token[forward_batch.req_pool_indices.long(), ::PAGE_SIZE] // PAGE_SIZE).int()
        if self._places:
            self._places.previous = torch.empty(len(self._slots), dtype=torch.int64, device=table.device)
            starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
            self._placer.run(self._places, lens, starts, table, self._slots, None)
        if decodes:
            for decode in self._decodes.values():
                decode.update(table, lens, None)
        else:
            lengths = (x.numpy().astype(np.int64) for x in (new, lens))
            query_lens, seq_lens = lengths
            self._prefills = {call: HostPrefill(query_lens, seq_lens, table, call) for call in self._decodes}

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any) -> torch.Tensor:
        """q [tokens, Hq * D] or [tokens, Hq, D], k [tokens, H, D], v [tokens, H, Dv]; [tokens, Hq * Dv]."""
        call, q, out, pages = self._stored(q, k, v, layer, save_kv_cache, more)
        self._decodes[call].run(q, out, str(layer.layer_id), pages, None, {}, None)
        return out.flatten(1)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any) -> torch.Tensor:
        """As `forward_decode`."""
        call, q, out, pages = self._stored(q, k, v, layer, save_kv_cache, more)
        self._prefills[call].run(call, q, k, v, out, pages)
        return out.flatten(1)

    def _stored(self, q: Any, k: Any, v: Any, layer: Any, save: bool, more: dict[str, Any]) -> tuple[Call, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the layer attends with, once the step's tokens are in their pages."""
        if k is None or not save or (given := [name for name, x in more.items() if x is not None]):
            what = "with " + ", ".join(given) if k is not None and save else "to another layer's keys"
            raise UnsupportedError(f"layer {layer.layer_id}: kvbits' attention backend does not do attention {what}; use another --attention-backend")
        pages = self._pool.pages[layer.layer_id - self._pool.start_layer]
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        previous = self._places.previous if self._places else None
        self._writes.run(k, v, pages, self._pool.layout, self._slots, previous_page=previous, turn=self._turns.get(layer.layer_id))
        return self._calls[layer.layer_id], q, q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim), pages

    def support_triton(self) -> bool:
        return False


def _turns(config: Any, device: torch.device) -> dict[int, torch.Tensor]:
    """By how much each layer's keys turn from a page to the next; none where nobody knows: means then start as they are."""
    try:
        layers = layers_of(config)
    except UnsupportedError:
        return {}
    return {i: turn_by(g.rotary, g.head_dim, PAGE_SIZE).to(device) for i, g in enumerate(layers) if g.rotary is not None}
