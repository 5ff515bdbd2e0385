"""SGLang's attention backend: `KVBitsBackend`. Single tokens and drafts are read by one plan for all rows, also in
graphs; prompts are laid out on the host.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from ...errors import UnsupportedError
from ...later import upload
from ..engine.announce import Announcement
from ..engine.call import call_for
from ..engine.layer import Layer
from ..engine.prefill import scratch_for
from ..engine.rings import Rings
from ..engine.served import FORMATS, PAGE_SIZE
from ..engine.step import Steps
from ..engine.turns import page_turn
from .flash import flash_for
from .options import calibration_of, model_of, options_of
from .pool import KVBitsPool, page_of

logger = logging.getLogger(__name__)


class KVBitsBackend(AttentionBackend):
    """Attention of one engine's rank.

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
                f"--attention-backend {name} got a {type(pool).__name__} of SGLang's; for models with sliding windows"
                " pass --disable-hybrid-swa-memory, for others use another backend"
            )
        self._pool, self._options = pool, options_of(pool.form)
        args, self._config = resolved_view(runner.server_args), runner.model_config
        self._rows, self._device = runner.req_to_token_pool, torch.device(runner.device)
        requests, (numbers, longest) = self._rows.size, self._rows.req_to_token.shape
        chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else self._config.context_len
        self._sizes = self._config.context_len, chunk
        # of copies, and which each row of `req_to_token` has, as kernels know it
        self._rings = Rings(min(pool.copied, requests), logger)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        self._ring_of = torch.full((numbers,), -1, **integers)
        self._calibration = calibration_of(pool.form, args) if pool.form.calibrated else None
        self._layers = {m.layer_id: self._layer(m) for m in runner.model.modules() if isinstance(m, RadixAttention)}
        pages = len(pool.pages[0])
        self._mode, self._num_queries = ForwardMode.DECODE, 1
        if args.speculative_algorithm:
            self._mode, self._num_queries = ForwardMode.TARGET_VERIFY, args.speculative_num_draft_tokens
        # of a step: no more than there is room for
        tokens = min(pages * PAGE_SIZE, max(*self._sizes, args.max_prefill_tokens) + requests)
        tokens = max(tokens, requests * self._num_queries)
        self._steps = Steps(
            [layer.call for layer in self._layers.values()],
            num_queries=[self._num_queries],
            copied=max(1, self._rings.count),
            rows=requests,
            tokens=tokens,
            num_pages=pages,
            device=self._device,
        )
        # of rows that decode, as what follows, where captured graphs find it
        self._starts = torch.arange(requests + 1, **integers) * self._num_queries
        self._table = torch.zeros(requests, -(-longest // PAGE_SIZE), **integers)
        self._lens = torch.zeros(requests, **integers)
        self._slots = torch.zeros(requests * self._num_queries, dtype=torch.int64, device=self._device)
        if get_parallel().tp_rank == 0:
            found = Announcement(
                name=name,
                model=model_of(args),
                options=self._options,
                bits=pool.layout.bits_per_element,
                tokens=pool.size,
            )
            logger.info("%s", found.line())
            if args.enable_metrics:
                from prometheus_client import Gauge  # which reads SGLang's environment

                found.publish(Gauge, "sglang")

    def _layer(self, layer: RadixAttention) -> Layer:
        for what, there in (
            ("attention to an encoder", layer.is_cross_attention),
            (f"attention of type {layer.attn_type}", layer.attn_type != AttentionType.DECODER),
            ("attention in chunks", layer.use_irope),
            ("scores scaled by length", layer.xai_temperature_len > 0),
            (
                f"scores capped by {layer.logit_capping_method}",
                bool(layer.logit_cap) and layer.logit_capping_method != "tanh",
            ),
        ):
            if there:
                raise UnsupportedError(
                    f"layer {layer.layer_id}: kvbits' attention backend does not do {what}; use another"
                    " --attention-backend"
                )
        # SGLang does not count the query itself
        window = layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else None
        scaling, softcap = float(layer.scaling), float(layer.logit_cap) or None
        layout, dtype = self._pool.layout, self._pool.model_dtype
        scratch = scratch_for(layout, dtype, self._device, *self._sizes, window)
        attend = flash_for(self._device, layout.head_dim, layout.value_head_dim)
        rings = self._options.rings(self._pool.form, layout)
        call = call_for(layout, layer.tp_q_head_num, dtype, scaling, window, softcap, scratch, attend, rings)
        found = Layer(str(layer.layer_id), call, self._device)
        if layout.is_centered:
            found.turn = page_turn(self._config.hf_text_config, layer.layer_id, self._device)
        found.take_copies(max(1, self._rings.count))
        if self._calibration:
            rank = get_parallel()
            found.calibrate(*self._calibration.layer(layer.layer_id, rank.tp_rank, rank.tp_size, self._device))
        return found

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Make the step's tables, for all layers, before the first: launches only.

        A captured graph reads what they write, each time it is replayed.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode not in (self._mode, ForwardMode.EXTEND):
            raise UnsupportedError(f"kvbits' attention backend does not run steps of {mode!r}")
        self._forget_loaded()
        requests = forward_batch.req_pool_indices.long()
        table = (self._rows.req_to_token[requests, ::PAGE_SIZE] // PAGE_SIZE).int()
        lens, slots = forward_batch.seq_lens.int(), forward_batch.out_cache_loc.long()
        if mode == self._mode:
            rows = len(lens)
            # SGLang does not count drafts before they are accepted
            lens = lens + (self._num_queries if mode == ForwardMode.TARGET_VERIFY else 0)
            # rows that fill a batch up store in page 0
            slots = torch.nn.functional.pad(slots, (0, rows * self._num_queries - len(slots)))
            table, lens, slots = (
                kept[: len(x)].copy_(x) for kept, x in ((self._table, table), (self._lens, lens), (self._slots, slots))
            )
            starts = self._starts[: rows + 1]
            prompts = np.zeros((2, 0), np.int64)
        else:
            starts = torch.nn.functional.pad(forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            lengths = forward_batch.extend_seq_lens_cpu, forward_batch.seq_lens_cpu
            prompts = np.stack(lengths, dtype=np.int64)
            self._give_rings()
        self._step = self._steps.plan(
            lens,
            starts,
            table,
            slots,
            self._ring_of[requests],
            prompts,
            num_decode_tokens=0 if prompts.size else len(slots),
            num_queries=self._num_queries,
        )

    def _forget_loaded(self) -> None:
        """Drop copies that past owners of pages left, where HiCache loaded others' tokens since."""
        if self._steps.copies and self._pool.loaded:
            self._steps.copies.forget(page_of(torch.cat(self._pool.loaded)))
        self._pool.loaded.clear()

    def _give_rings(self) -> None:
        """Give rings of copies to requests that run, from those that ended: SGLang frees their rows of `req_to_token`.

        Every request begins with a step of prompts, so steps of single tokens find theirs on the device.
        """
        if not self._steps.copies:
            return
        free = set(self._rows.free_slots)
        self._rings.end(free)
        running = [i if i and i not in free else None for i in range(len(self._ring_of))]  # row 0 is padding's
        self._ring_of.copy_(upload(self._rings.of(running), self._device))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: plans and tables are for all requests that can run."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a row that fills a captured batch up: it reads the token that padding writes."""
        return 1

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        """Attend with q [tokens, Hq * D] or [tokens, Hq, D], k [tokens, H, D], v [tokens, H, Dv]; [tokens, Hq
        * Dv].
        """
        given = [name for name, x in more.items() if x is not None]
        if k is None or not save_kv_cache:
            given.append("another layer's keys")
        if given:
            raise UnsupportedError(
                f"layer {layer.layer_id}: kvbits' attention backend does not do attention with {', '.join(given)}; use"
                " another --attention-backend"
            )
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        self._layers[layer.layer_id].run(self._step, q, k, v, out, self._pool.pages_of(layer.layer_id))
        return out.flatten(1)

    forward_decode = forward_extend
