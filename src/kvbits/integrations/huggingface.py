"""Transformers: a `Cache` whose attention reads packed pages.

    cache = KVCache.for_model(model, "int4")
    model.generate(**inputs, past_key_values=cache)
    cache.nbytes, cache.explain()

How it fits (transformers >= 5.14): `update()` hands out a `Handle` instead of tensors; the attention function registered as "kvbits" takes the handle, stores
the new keys and values and attends over the pages; the mask function registered as "kvbits" passes on which tokens are padding
instead of building a mask. Padding tokens are neither stored nor counted in any scale. With other caches the "kvbits" attention is plain SDPA, so a
model switched to it keeps working. Any other attention implementation that meets a handle raises UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import schemes
from ..cache.paged_cache import PagedCache
from ..errors import CalibrationError, DataError, FileFormatError, SpecError, UnsupportedError
from ..geometry import layer_geometries
from ..later import Later
from ..spec import CacheSpec, Scheme
from .rotary import stored_layers

if TYPE_CHECKING:
    from ..calibrate import Calibration

LOOK_EVERY = 16
"""Tokens between two looks at what masks on a GPU said."""
_OTHER_MASK = (
    "tokens that are already cached (or shows padding that was not stored); kvbits keeps what it was told when they came; build a fresh cache for another mask"
)
NAME = "kvbits"
"""Name of the attention and mask functions in Transformers' registries."""


class _NotATensor:
    """Raises a clear error wherever code that is not ours treats it as a tensor."""

    _why: ClassVar[str]

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(self._why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        cls._refuse(cls)  # type: ignore[arg-type]


class Handle(_NotATensor):
    """Keys and values on their way from `update()` to the attention function, which stores them."""

    _why = (
        f"keys and values of a KVCache reached code that expects tensors: either the model's attention implementation is not {NAME!r} "
        f"(call model.set_attn_implementation({NAME!r}), or KVCache.for_model(model, ...) again), or this model changes keys or values after "
        "caching them, which kvbits does not support; use the stock cache for it"
    )

    def __init__(self, layer: KVLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v
        self.stored = False


@dataclass
class _Columns:
    """Positions the cache has seen, padding included: shared by the cache and its layers, which know nothing else of it (a cycle
    between them would keep pages alive until the garbage collector comes by).

    Attributes:
        seen: before the pass under way.
        valid: bool [B, seen], which of them are real, wherever the mask was; None for all.
        new, been: positions of the pass under way, and the layers that have been through it.
        mask: bool [B, seen + new] that the pass under way was given.
    """

    seen: int = 0
    valid: torch.Tensor | None = None
    new: int = 0
    been: set[int] = field(default_factory=set)
    mask: torch.Tensor | None = None
    _differs: torch.Tensor | None = None  # on a GPU: masks of single tokens that were not what they continue
    _later: Later = field(default_factory=Later)
    _passes: int = 0

    def seen_by(self, layer: int) -> int:
        return self.seen + (self.new if layer in self.been else 0)

    def check(self, mask: torch.Tensor, num_tokens: int) -> None:
        """Refuse a mask bool [B, seen + num_tokens] that says something else about what is cached than the masks before. For a single token on a GPU, which
        nobody waits for, some passes later.

        Raises:
            UnsupportedError: it does.
        """
        past = mask[:, : self.seen]
        differs = (past != self.valid.to(past.device)).any() if self.valid is not None else ~past.all()
        if mask.device.type == "cpu" or num_tokens > 1:
            if bool(differs):
                raise UnsupportedError(f"attention_mask hides {_OTHER_MASK}")
            return
        self._differs = differs if self._differs is None else self._differs | differs
        self._passes += 1
        if self._passes % LOOK_EVERY == 0 and not torch.cuda.is_current_stream_capturing():
            found = self._later.ask(self._differs)
            if found is not None and bool(found):
                self._differs = None
                raise UnsupportedError(f"the attention_mask of an earlier token hid {_OTHER_MASK}")

    def note(self, layer: int, new: int, mask: torch.Tensor | None) -> None:
        """A layer has stored `new` positions per sequence; `mask` bool [B, seen + new], None for all real."""
        self.new, self.mask = new, mask
        self.been.add(layer)

    def keep(self) -> None:
        """The pass is over: all layers have stored it."""
        if self.mask is not None:
            self.valid = None if self.mask.device.type == "cpu" and bool(self.mask.all()) else self.mask
        elif self.valid is not None:
            self.valid = torch.cat([self.valid, self.valid.new_ones(len(self.valid), self.new)], 1)
        self.seen += self.new
        self.take_back()

    def take_back(self) -> None:
        """Forget the pass under way."""
        self.new, self.mask = 0, None
        self.been.clear()


@dataclass
class Mask(_NotATensor):
    """What the mask function was told; becomes a real mask only for caches that are not ours."""

    _why: ClassVar[str] = (
        f"the {NAME!r} attention builds no mask tensor, but this model or cache wants one (static and compiled caches do); "
        "call model.set_attn_implementation('sdpa') for it, or use a KVCache or DynamicCache"
    )
    batch_size: int
    q_length: int
    attention_mask: torch.Tensor | None  # bool [B, tokens seen + q_length]
    unusual: str | None  # why this is not a causal mask with padding and window
    arguments: dict[str, Any]
    made: list[torch.Tensor | None] = field(default_factory=list)  # the dense mask, once a layer wanted it

    def known(self, columns: _Columns) -> torch.Tensor | None:
        """Bool [B, tokens seen + T]: which tokens are real; None for all.

        Raises:
            UnsupportedError: a mask that ends before the new tokens, or hides tokens that are already cached.
        """
        if self.attention_mask is None:
            return None
        seen = self.arguments["q_offset"]
        mask = self.attention_mask
        if mask.shape[1] < seen + self.q_length:
            raise UnsupportedError(
                f"attention_mask covers {mask.shape[1]} tokens, but {seen} are cached and {self.q_length} new ones came; pass the mask of all of them"
            )
        mask = mask[:, : seen + self.q_length]
        if columns.seen == seen and not columns.been:  # once per pass: the first layer asks
            columns.check(mask, self.q_length)
        return mask

    def dense(self) -> torch.Tensor | None:
        if not self.made:  # one for all layers of a pass
            self.made.append(sdpa_mask(**self.arguments))
        return self.made[0]


def mask(**arguments: Any) -> Mask:
    """Mask function of the "kvbits" attention (signature of `transformers.masking_utils.sdpa_mask`)."""
    unusual = None
    if arguments.get("use_vmap"):
        unusual = "a custom mask pattern"
    elif arguments.get("allow_is_bidirectional_skip") is not None and "allow_is_causal_skip" not in arguments:
        unusual = "bidirectional attention"
    elif not arguments.get("allow_is_causal_skip", True):
        unusual = "a packed, blockwise or otherwise modified causal mask"
    return Mask(arguments["batch_size"], arguments["q_length"], arguments.get("attention_mask"), unusual, arguments)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Handle | torch.Tensor,
    value: Handle | torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of the registry: query [B, Hq, T, D] -> ([B, T, Hq, D], None)."""
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "attention weights are never formed over packed pages; use output_attentions=False or the stock cache with attn_implementation='eager'"
        )
    if not isinstance(key, Handle):
        return _dense_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs)  # type: ignore[arg-type]
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(f"{type(module).__name__} adds a position bias to its scores, which kvbits does not support; use the stock cache")
    if not isinstance(attention_mask, Mask):
        what = "no mask at all" if attention_mask is None else f"a ready-made mask of shape {tuple(attention_mask.shape)}"
        raise UnsupportedError(f"{type(module).__name__} passed {what}; kvbits needs the 2D padding mask (attention_mask of shape [batch, tokens])")
    if attention_mask.unusual is not None:
        raise UnsupportedError(f"{type(module).__name__} asked for {attention_mask.unusual}; kvbits supports causal attention with padding and sliding windows")
    if key.stored:
        raise UnsupportedError(f"{type(module).__name__} shares another layer's keys and values, which kvbits does not support; use the stock cache")
    layer = key.layer
    window = attention_mask.arguments.get("local_size")
    if window != layer.sliding_window:
        raise UnsupportedError(
            f"layer {layer.index} attends with a sliding window of {window}, but the cache was built for {layer.sliding_window} "
            "(None: full attention); this model's config does not say what its layers do, so build the cache from a CacheSpec of your own"
        )
    key.stored = True
    known = attention_mask.known(layer.columns)
    valid = None if known is None else known[:, -query.shape[2] :]
    sink_logits = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    try:
        out = layer.store.step(
            layer.index, query.transpose(1, 2), key.k.transpose(1, 2), key.v.transpose(1, 2),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=kwargs.get("softcap"), sink_logits=sink_logits, valid=valid,
        )  # fmt: skip
    except BaseException:
        if not layer.store.in_pass:  # the store took the whole pass back
            layer.columns.take_back()
        raise
    layer.columns.note(layer.index, query.shape[2], known)
    if not layer.store.in_pass:
        layer.columns.keep()
    return out, None


def _dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """What a model switched to "kvbits" does with any other cache: SDPA, or plain matmuls where SDPA lacks an option."""
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError(f"{type(module).__name__} adds a position bias; call model.set_attn_implementation('eager') for other caches")
    dense = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, dense, dropout=dropout, scaling=scaling, **kwargs)
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if dense is None:
        t, n = scores.shape[-2:]
        dense = torch.ones(t, n, dtype=torch.bool, device=scores.device).tril(n - t)
    scores = scores.masked_fill(~dense, torch.finfo(scores.dtype).min) if dense.dtype == torch.bool else scores + dense
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    p = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (p @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


class KVLayer(CacheLayerMixin):
    """One layer of a `KVCache`: counts tokens; the bytes are the cache's."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, store: PagedCache, columns: _Columns, index: int) -> None:
        super().__init__()
        self.store = store
        self.columns = columns
        self.index = index
        self.sliding_window = store.spec.layers[index].sliding_window

    @property
    def seen(self) -> int:
        """Positions so far, padding included."""
        return self.columns.seen_by(self.index)

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pages are allocated by the cache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Hand keys and values [B, H, T, D] on to the attention function."""
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.sliding_window is None:
            return self.seen + query_length, 0
        return min(self.seen, self.sliding_window - 1) + query_length, max(self.seen - self.sliding_window + 1, 0)

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError("a layer of a KVCache cannot be changed alone; call the same method on the cache")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = offload = prefetch = _whole_cache_only


class KVCache(Cache):
    """A Transformers cache on packed pages. Build it with `KVCache.for_model`.

    Works wherever a `DynamicCache` is passed: greedy, sampling, beam search, assisted decoding, chunked prefill, several turns, `copy.deepcopy`.

    Attributes:
        store: the `PagedCache` underneath.
    """

    layers: list[KVLayer]

    def __init__(self, store: PagedCache) -> None:
        self.store = store
        lengths = torch.tensor(store.seq_lens or [0])
        seen = int(lengths.max())
        ragged = bool((lengths != seen).any())
        valid = torch.arange(seen) >= seen - lengths[:, None] if ragged else None  # shorter sequences count as left-padded
        self._columns = _Columns(seen, valid)
        self._recording = False
        super().__init__(layers=[KVLayer(store, self._columns, i) for i in range(len(store.spec.layers))])

    @classmethod
    def for_model(
        cls,
        model: Any,
        scheme: str | Scheme = "int8",
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        calibration: Calibration | None = None,
        nonfinite: str = "refuse",
        backend: str = "auto",
    ) -> KVCache:
        """A cache for `model`, which is switched to the "kvbits" attention (plain SDPA for any other cache).

        Args:
            model: a Transformers decoder model.
            scheme: preset name (its groups are fitted to the model's head_dim) or a `Scheme` (taken as it is).
            max_tokens, batch_size: fix the capacity (see `PagedCache`), for one sequence if `batch_size` is not given; without them the cache grows.
                Assisted decoding with sliding-window layers needs one that grows.
            calibration: needed by schemes with static scales; refused if made for another model or scheme.
            nonfinite: "refuse" or "clamp" NaN and infinity in keys and values.
            backend: "auto", or one backend for every op.

        Raises:
            UnsupportedError: the model's attention cannot run on pages; the message says why.
            SpecError: unknown scheme, or one that does not fit the model's head_dim.
            CalibrationError: calibration missing or made for something else.
        """
        _require_loaded(model)
        if not isinstance(scheme, (str, Scheme)):
            raise SpecError(f"scheme={scheme!r} is neither a preset name nor a Scheme; presets: {', '.join(schemes.PRESETS)}")
        if calibration is not None and not hasattr(calibration, "static"):
            raise CalibrationError(f"calibration={calibration!r} is not a Calibration; pass Calibration.load(path)")
        config = model.config.get_text_config(decoder=True)
        layers = layer_geometries(config)
        chosen = schemes.for_layers(scheme, layers) if isinstance(scheme, str) else scheme
        layers = stored_layers(layers, chosen, model)
        spec = CacheSpec(scheme=chosen, layers=layers, raw_dtype=str(model.dtype).removeprefix("torch."))
        static = None
        if calibration is not None:
            calibration.check(model.config, chosen)
            static = calibration.to(model.device).static
        elif chosen.needs_calibration:
            raise CalibrationError(f"scheme {chosen.name!r} has static scales or codebooks; run `kvbits calibrate` and pass calibration=Calibration.load(FILE)")
        use_kvbits_attention(model)
        return cls(
            PagedCache(
                spec, batch_size=batch_size, max_tokens=max_tokens, device=model.device, static=static, nonfinite=nonfinite, backend=backend
            )
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file (see `cache.serialize`). Padding is not written: `load` takes shorter rows as left-padded."""
        self.store.save(path)

    @classmethod
    def load(cls, path: str | Path, model: Any, *, grow: bool = False) -> KVCache:
        """The cache that `save` wrote, on `model`'s device, ready to be continued, with the capacity it had or, with `grow`, none.

        Raises:
            FileFormatError: a damaged or foreign file, or a cache of another geometry than the model's.
        """
        _require_loaded(model)
        layers = layer_geometries(model.config.get_text_config(decoder=True))
        store = PagedCache.load(path, device=model.device, grow=grow)
        layers = stored_layers(layers, store.spec.scheme, model)
        if store.spec.layers != layers:
            raise FileFormatError(
                f"{path} holds {len(store.spec.layers)} layers of another shape than this model's {len(layers)}; load it with the model it was made for"
            )
        use_kvbits_attention(model)
        return cls(store)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for the cache."""
        return self.store.nbytes

    def explain(self) -> dict[str, Any]:
        """Scheme, backends with reasons, bytes by kind (see `PagedCache.explain`)."""
        return self.store.explain()

    def __repr__(self) -> str:
        return f"KVCache(scheme={self.store.spec.scheme.name!r}, seq_lens={self.store.seq_lens}, nbytes={self.nbytes})"

    @property
    def batch_size(self) -> int:
        return self.store.batch_size or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove positions (padding among them counts). 0 only ends the speculation."""
        n = int(tokens_to_remove)
        if n > 0:
            raise DataError(f"crop({n}): pass how many tokens to remove as a negative number")
        columns = self._columns
        if -n > columns.seen:
            raise DataError(f"crop({n}): the cache has seen {columns.seen} tokens")
        if self.store.batch_size:
            lengths = torch.tensor(self.store.seq_lens)
            if n:
                lengths = lengths + n if columns.valid is None else lengths - columns.valid[:, n:].sum(1).cpu()
            self.store.crop(lengths.tolist())
        if n:
            columns.valid = None if columns.valid is None else columns.valid[:, :n]
            columns.seen += n
        if self._recording:
            self.store.keep_past()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence i becomes the old beam_idx[i]; pages are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.store.batch_size:
            self.store.select(indices.tolist())
            if self._columns.valid is not None:
                self._columns.valid = self._columns.valid[indices.to(self._columns.valid.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store.batch_size:
            self.store.repeat(repeats)
            if self._columns.valid is not None:
                self._columns.valid = self._columns.valid.repeat_interleave(repeats, 0)

    def reset(self) -> None:
        self.store.reset()
        self._columns.take_back()
        self._columns.seen, self._columns.valid = 0, None
        self._recording = False

    def abandon(self) -> None:
        """Take back a forward pass that was interrupted between its layers (see `PagedCache.abandon`): the cache is what it was before it."""
        self.store.abandon()
        self._columns.take_back()

    def activate_past_recording(self) -> None:
        self._recording = True
        self.store.keep_past()


def _require_loaded(model: Any) -> None:
    if not hasattr(model, "config"):
        raise DataError(f"model={model!r} is not a loaded model; pass what AutoModelForCausalLM.from_pretrained or kvbits.load_model returned")


@contextmanager
def default_cache(model: Any, scheme: str | Scheme = "int4", **options: Any) -> Iterator[None]:
    """Inside, `model.generate` without `past_key_values` uses `KVCache.for_model(model, scheme, **options)`.

    For drafts of assisted generation, whose caches Transformers makes itself:

        with default_cache(draft, "int4"):
            model.generate(**inputs, past_key_values=KVCache.for_model(model, "tiered"), assistant_model=draft)

    It replaces one method of this model object and puts it back at the end.
    """
    inherited = model._prepare_cache_for_generation

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model_kwargs.get("past_key_values") is None:
            cache = model_kwargs["past_key_values"] = KVCache.for_model(model, scheme, **options)
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return inherited(generation_config, model_kwargs, *args, **kwargs)

    model._prepare_cache_for_generation = prepare
    try:
        yield
    finally:
        del model._prepare_cache_for_generation


def use_kvbits_attention(model: Any) -> None:
    """Switch a model to the "kvbits" attention.

    Raises:
        UnsupportedError: the model does not take attention functions from Transformers' registry.
    """
    if model.config.get_text_config(decoder=True)._attn_implementation == NAME:
        return
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedError(f"{type(model).__name__} cannot use a custom attention: {error}") from error
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise UnsupportedError(f"{type(model).__name__} ignored the attention implementation {NAME!r}; it does not use Transformers' attention registry")
