"""The attention function registered as "kvbits": stores what a `KVCache` layer handed out and attends over its pages;
SDPA for any other cache.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..cache.paged_cache import PagedCache
from ..errors import UnsupportedError, counted
from .closed import Closed, refused
from .compiled import cached_attention
from .masks import NAME, Columns, Mask, NotATensor


class Handle(NotATensor):
    """Keys and values on their way from `update()` to the attention function, which stores them."""

    _why = (
        "keys and values of a KVCache reached code that expects tensors: either the model's attention implementation"
        f" is not {NAME!r}, because it was detached, changed by set_attn_implementation() or is not the model that the"
        " cache was made for (call KVCache.for_model(model, ...) again), or this model changes keys or values after"
        " caching them, which kvbits does not support; use the stock cache for it"
    )

    def __init__(self, layer: KVLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v
        self.readers = layer.readers  # still to come


class KVLayer(Closed, CacheLayerMixin):
    """One layer of a `KVCache`: counts tokens; the bytes are the cache's.

    `keys` and `values`, and what changes one layer alone, raise UnsupportedError.

    Attributes:
        index: its place among the layers that store keys and values.
        readers: layers of the model that attend over its keys and values, itself among them.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    keys, values = refused("keys"), refused("values")
    _beside_images = False  # the model reads `keys` of each layer that is initialized, and those of images exist

    def __init__(self, pages: PagedCache, columns: Columns, index: int, readers: int = 1) -> None:
        self.pages = pages
        self.columns = columns
        self.index, self.readers = index, readers
        self.sliding_window = pages.spec.layers[index].sliding_window
        self._ready = True

    @property
    def is_initialized(self) -> bool:
        """True where tokens are stored, and the model does not take that for a promise of tensors."""
        return self.seen > 0 and not self._beside_images

    @property
    def seen(self) -> int:
        """Positions so far, padding included."""
        return self.columns.seen_by(self.index)

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Hand keys and values [B, H, T, D] on to the attention function.

        Raises:
            UnsupportedError: no pass of the model is under way that would store them.
        """
        if not torch.compiler.is_compiling() and not self.columns.in_pass:
            raise UnsupportedError(
                f"update() of layer {self.index} outside a forward pass of the model that this cache was made for, so"
                " nothing would store these keys and values: the model was detached or is a different one, or update()"
                " was called by hand. Call KVCache.for_model(model, ...) again and pass tokens through the model, or"
                " put keys of your own into a PagedCache by append(layer, keys, values)"
            )
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> int:
        """Return the number of positions so far; a tensor [] in compiled code."""
        return self.columns.numbers[1] if torch.compiler.is_compiling() else self.seen  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if torch.compiler.is_compiling():  # no mask is built
            return query_length, 0
        if self.sliding_window is None:
            return self.seen + query_length, 0
        return min(self.seen, self.sliding_window - 1) + query_length, max(self.seen - self.sliding_window + 1, 0)

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("a layer of a KVCache cannot be changed alone; call the same method on the cache")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = offload = prefetch = (
        lazy_initialization
    ) = _whole_cache_only


class DenseLayer(KVLayer):
    """One layer of a `KVCache` whose model attends by its own code: it is handed dense tensors, made anew of the pages
    for each pass and dropped after it.

    Padding is stored like any token, since no mask comes here; the model hides it.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [B, H, T, D]; those and what they see of the ones before, [B, H, tokens, D] each, the
        new ones as they came.
        """
        new = key_states.shape[2]
        if key_states.requires_grad or value_states.requires_grad:
            _require_no_gradients(bool(self.columns.seen))
        if len(set(self.pages.seq_lens)) > 1:
            raise UnsupportedError(
                f"dense=True with sequences of {', '.join(map(str, self.pages.seq_lens))} tokens, stored without their"
                " padding; dense tensors want one length"
            )
        past = self.get_mask_sizes(0)[0]
        self.columns.begin(new, None)
        rows = self.pages.append(self.index, key_states.transpose(1, 2), value_states.transpose(1, 2), read=True)
        self.columns.note(self.index, new, None)
        keys, values = (
            torch.stack([x[len(x) - past :] for x in side]).transpose(1, 2) for side in zip(*rows, strict=True)
        )
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Handle | torch.Tensor,
    value: Handle | torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the attention function of the registry: query [B, Hq, T, D] -> ([B, T, Hq, D], None, or weights that
    were asked for of another cache).
    """
    if any(kwargs.get(name) is not None for name in ("indices", "block_indices")):
        raise UnsupportedError(
            f"{type(module).__name__} chooses the tokens that it attends to (sparse attention), which kvbits does not"
            " support; use KVCache.for_model(model, .., dense=True), or the stock cache"
        )
    if not isinstance(key, Handle):
        return _dense_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs)  # type: ignore[arg-type]
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "attention weights are never formed over packed pages; use output_attentions=False, or the stock cache"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(
            f"{type(module).__name__} adds a position bias to its scores, which kvbits does not support; use the stock"
            " cache"
        )
    if not isinstance(attention_mask, Mask):
        what = (
            "no mask at all" if attention_mask is None else f"a ready-made mask of shape {tuple(attention_mask.shape)}"
        )
        raise UnsupportedError(
            f"{type(module).__name__} passed {what}; kvbits needs the 2D padding mask (attention_mask of shape [batch,"
            " tokens])"
        )
    layer = key.layer
    if not key.readers:
        raise UnsupportedError(
            f"{type(module).__name__} attends over the keys and values of layer {layer.index}, which by this model's"
            f" config {counted(layer.readers, 'layer')} may read; use the stock cache"
        )
    window = attention_mask.arguments.get("local_size")
    if window != layer.sliding_window and attention_mask.unusual is None:  # an unusual one is looked at (`Mask.within`)
        raise UnsupportedError(
            f"layer {layer.index} attends with a sliding window of {window}, but the cache was built for"
            f" {layer.sliding_window} (None: full attention); this model's config does not say what its layers do, so"
            " build the cache from a CacheSpec of your own"
        )
    again = key.readers < layer.readers
    key.readers -= 1
    sink_logits = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    q, k, v = query.transpose(1, 2), key.k.transpose(1, 2), key.v.transpose(1, 2)
    if (rows := q.shape[1]) < k.shape[1]:  # Gemma 4's shared layers continue with the last tokens of a prompt only
        q = torch.cat([q.new_zeros(q.shape[0], k.shape[1] - rows, *q.shape[2:]), q], 1)
    scaling, softcap = query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap")
    if torch.compiler.is_compiling():
        mask = attention_mask.attention_mask
        if attention_mask.unusual is not None:
            raise UnsupportedError(
                f"{type(module).__name__} asked for {attention_mask.unusual}, which compiled code cannot take; run this"
                " pass uncompiled"
            )
        out = cached_attention(
            q, k, v, mask, sink_logits, layer.columns.numbers, layer.index, scaling, softcap, key.readers > 0, again
        )
    else:
        out = _attend(layer, q, k, v, attention_mask, scaling, softcap, sink_logits, key.readers > 0, again)
    return out[:, -rows:].contiguous(), None  # Dory takes a view of it


def _require_no_gradients(behind_history: bool) -> None:
    """Refuse gradients behind stored tokens.

    Raises:
        UnsupportedError: gradients are wanted of tokens behind stored ones.
    """
    if torch.is_grad_enabled() and behind_history:
        raise UnsupportedError(
            "gradients do not reach keys and values that are stored, so they would be wrong without a word; run the"
            " model under torch.no_grad(), or pass the whole text, two tokens or more, at once to an empty cache, or"
            " use the stock cache for training"
        )


# where something else broke the graph; 3 us otherwise
@torch.compiler.disable(reason="a KVCache plans its pages in Python")
def _attend(
    layer: KVLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    more: bool,
    again: bool,
) -> torch.Tensor:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        _require_no_gradients(bool(layer.columns.seen) or q.shape[1] == 1)
    known, valid = mask.known(layer.columns)
    within = mask.within(layer.sliding_window)
    if within is not None and not layer.columns.been and within.triu(1).any():
        if layer.columns.causal:
            raise UnsupportedError(
                f"tokens of this prompt see later ones ({mask.unusual}), so its beginning has other keys in front of"
                " another end, and no store can share it; use KVCache.for_model"
            )
        layer.pages.beyond_ids["attention to later tokens"] = True
    return layer.columns.attend(layer.index, q, k, v, known, valid, scaling, softcap, sink_logits, more, again, within)


def _dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend for any other cache than ours, or none: by SDPA, or by the family's own eager function for
    scores that SDPA does not make (soft caps, learned sinks, position biases), and for attention weights.
    """
    causal = kwargs.pop("is_causal", None)
    if isinstance(attention_mask, Mask):
        causal = attention_mask.is_causal if causal is None else causal
        attention_mask = attention_mask.dense(query.shape[2])
    causal = getattr(module, "is_causal", True) if causal is None else causal
    dense = None if attention_mask is None else attention_mask.to(query.device)  # layers may lie on several devices
    weights = bool(kwargs.get("output_attentions"))
    if not weights and all(kwargs.get(name) is None for name in _BEYOND_SDPA):
        return sdpa_attention_forward(
            module, query, key, value, dense, dropout=dropout, scaling=scaling, is_causal=causal, **kwargs
        )
    if (eager := _eager_function(module)) is None:
        raise UnsupportedError(
            f"{type(module).__name__} wants of its attention what SDPA does not do, and has no eager function of its"
            " own; call KVCache.detach(model) before it uses other caches"
        )
    rows = query.shape[2]
    if dense is None and causal and rows > 1:
        key, value = key[:, :, :rows], value[:, :, :rows]  # as SDPA: behind them, a static cache holds nothing yet
        if (bias := kwargs.get("position_bias")) is not None:
            kwargs = kwargs | {"position_bias": bias[..., :rows]}
        dense = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=query.device).tril()
    if dense is not None and dense.dtype == torch.bool:
        dense = query.new_zeros(()).where(dense, torch.finfo(query.dtype).min)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, found = eager(module, query, key, value, dense, scaling=scaling, dropout=dropout, **kwargs)
    return out, found if weights else None


_BEYOND_SDPA = ("softcap", "s_aux", "sinks", "position_bias")
"""Options of attention functions that PyTorch's SDPA does not have, in the words of Transformers."""


def _eager_function(module: torch.nn.Module) -> Any:
    """Return the function that a module takes where the configuration asks for "eager", beside its class; None
    without one.
    """
    found = (getattr(sys.modules.get(c.__module__), "eager_attention_forward", None) for c in type(module).__mro__)
    return next((f for f in found if f is not None), None)


AttentionInterface.register(NAME, attention)
