"""Once per layer: store the step's tokens in their pages, then attend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ...errors import UnsupportedError
from ...geometry import has_key_bias
from ...ops import dispatch
from ...ops.reference.merge import sink_part
from ..engine.call import call_for
from ..engine.layer import Layer
from ..engine.prefill import scratch_for
from ..engine.step import Step
from ..engine.turns import page_turn
from . import calibrated, formats, observe
from .copies import Pool
from .flash import flash_for
from .options import options_of
from .scheme_file import layer_formats

if TYPE_CHECKING:
    from ...calibrate.moments import Moments


class KVBitsImpl(AttentionImpl):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        for what, there in (
            ("ALiBi", alibi_slopes is not None),
            (f"attention of type {attn_type}", attn_type != AttentionType.DECODER),
            (f"attention with {', '.join(extra)}", bool(extra)),
        ):
            if there:
                raise UnsupportedError(f"kvbits' attention backend does not do {what}; use another --kv-cache-dtype")
        config = get_current_vllm_config()
        if kv_sharing_target_layer_name and (
            config.cache_config.kv_sharing_fast_prefill or config.model_config.runner_type == "draft"
        ):
            raise UnsupportedError(
                "kvbits reads a prompt's own keys as they came, not from pages: no --kv-sharing-fast-prefill, no drafts"
                " that read the model's pages"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, scale, kv_cache_dtype
        self._target_name = kv_sharing_target_layer_name  # of the layer whose pages this one reads
        self._target: KVBitsImpl | None = None
        self.lends = False  # whether others read this layer's pages
        # then keys and values of the last step, if it had prompts
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None
        self._device = torch.empty(0, device=current_platform.device_type).device  # with its number
        self._config, self._dtype = config, torch.get_default_dtype()
        self._factors = float(scale), sliding_window, logits_soft_cap or None
        self._logits = sinks  # learned, [Hq] of this rank, loaded later
        self.moments: Moments | None = None
        self._pages = torch.empty(0)
        self.pool, self.ring_bytes = Pool(), 0  # of copies; bytes of a request's in this layer
        self.options = options_of(config)
        self._drafts = config.model_config.runner_type == "draft"
        # what cannot be is refused now; which layer this is nobody says before the model is there
        form = formats.FORMATS.get(kv_cache_dtype)
        if form and (why := form.refuses(head_size, head_size, has_key_bias(config.model_config.hf_text_config))):
            raise UnsupportedError(why)
        forms = layer_formats(config) if kv_cache_dtype == formats.SCHEME and not self._drafts else (form,)
        if any(form and form.calibrated for form in forms):
            calibrated.model_of(config, self._device)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.settle()

    def settle(self) -> None:
        """Take format and calibration when the model is there. Loaders that leave `process_weights_after_loading` out
        (tensorizer) get it from the builder.
        """
        if not hasattr(self, "stored"):
            self._settle()
        if self._logits is not None:  # weights may be loaded again
            self.stored.sink = part = sink_part(self._logits, self.call.layout.value_head_dim, self._dtype)
            dispatch.choose("merge", part[:1]).prepare()

    def _settle(self) -> None:
        """Take a format (of the dtype, of the scheme file, or `HEADS`) by the layer's name, and this rank's part of the
        calibration. vLLM asks the layer for its dtype when it has the whole model.

        Everything that a step needs is allocated and compiled here, and counted by vLLM.
        """
        config, dtype, device = self._config, self._dtype, self._device
        layers, model = config.compilation_config.static_forward_context, config.model_config
        name, layer = next((name, x) for name, x in layers.items() if getattr(x, "impl", None) is self)
        self.index = extract_layer_index(self._target_name or name)
        own = not self._drafts or config.speculative_config.uses_draft_model()
        head = not own or self.index >= model.get_total_num_hidden_layers()
        by_file = self.kv_cache_dtype == formats.SCHEME
        if by_file and not head and not self._drafts:
            form = layer_formats(config)[self.index] or formats.RAW
        else:
            form = formats.form_of(formats.HEADS if by_file else self.kv_cache_dtype, dtype)
        if head and form.calibrated:
            form = formats.FORMATS[formats.HEADS]
        widths = self.head_size, layer.head_size_v  # which vLLM says to its layer alone
        if form is formats.RAW:
            layer.kv_cache_dtype, layer.kv_cache_torch_dtype = "auto" if by_file else self.kv_cache_dtype, dtype
        else:
            if why := form.refuses(*widths):
                raise UnsupportedError(why)
            layer.kv_cache_torch_dtype = formats.tag_for(form)
        layout = form.layout(self.num_kv_heads, *widths, formats.RAW_DTYPES[dtype])
        scaling, window, softcap = self._factors
        tokens = config.scheduler_config.max_num_batched_tokens
        scratch = scratch_for(layout, dtype, device, model.max_model_len, tokens, window)
        # Passes of heads are planned with the model's and by themselves, that is with copies of two states. Rows of
        # layers that attend in chunks are chunks, and no request's.
        copied = not head and not getattr(layer, "attention_chunk_size", None)
        rings, attend = self.options.rings(form, layout) if copied else (), flash_for(device, *widths)
        self.call = call_for(layout, self.num_heads, dtype, scaling, window, softcap, scratch, attend, rings)
        self.stored = Layer(layer.layer_name, self.call, device)
        if self._target_name:
            self._target = layers[self._target_name].impl
            self._target.lends = True
        else:
            self.ring_bytes = sum(ring.nbytes for ring in rings)
            if self.options.observe:
                self.moments = observe.moments(config, self.index, self.num_kv_heads)
        if layout.key.needs_rotary:
            rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            self.stored.calibrate(*calibrated.model_of(config, device).layer(self.index, rank, size, device))
        if layout.is_centered:
            self.stored.turn = page_turn(model.hf_text_config, self.index, device)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with query [N, Hq, D], key [N, H, D] and value [N, H, Dv] (None where another layer's are read),
        kv_cache uint8 [pages, H, 64, head_bytes / 64] of any page stride, output [N, Hq, Dv], written.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("kvbits' attention backend does not quantize its output")
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        m = attn_metadata
        if self._target:  # what it had; without prompts nobody reads keys and values
            key, value = self._target.fresh or (query[:, : self.num_kv_heads],) * 2
        elif key is None:
            raise UnsupportedError(
                f"{layer.layer_name} has no keys and values of its own and does not say whose it reads; use another"
                " --kv-cache-dtype"
            )
        elif self.lends:  # a compiled model may use their memory again
            self.fresh = (key.clone(), value.clone()) if m.prefills else None
        if self.moments is not None and m.positions is not None:
            self.moments.add(query[: m.num_tokens], key[: m.num_tokens], m.positions)
        if self._pages.data_ptr() != kv_cache.data_ptr() or len(self._pages) != len(kv_cache):
            # one tensor for all steps, by which kernels on a CPU know what they keep of it
            self._pages = kv_cache.flatten(2)
        self.stored.run(m, query, key, value, output, self._pages, self._target and self._target.stored)
        return output
