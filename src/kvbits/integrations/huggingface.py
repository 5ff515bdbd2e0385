"""Transformers: a `Cache` whose attention reads packed pages.

    cache = KVCache.for_model(model)
    model.generate(**inputs, past_key_values=cache)
    cache.nbytes, cache.explain()

It fits into transformers >= 5.14 in three places. `update()` returns a `Handle` instead of tensors. The attention
function registered as "kvbits" takes the handle, stores the new keys and values, and attends over the pages. The mask
function registered as "kvbits" passes on which tokens are padding, and builds no mask.

Padding tokens are neither stored nor counted in any scale. With other caches the "kvbits" attention is plain SDPA, so a
model switched to it keeps working. Any other attention implementation that gets a handle raises UnsupportedError.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from .. import schemes
from ..cache import capacity
from ..cache.explain import Explanation
from ..cache.paged_cache import PagedCache
from ..errors import (
    CacheStateError,
    CalibrationError,
    DataError,
    FileFormatError,
    KvbitsError,
    KvbitsWarning,
    SpecError,
    UnsupportedError,
    counted,
)
from ..geometry import CROSS, layer_places, text_config
from ..model_ref import ModelRef
from ..ops import decode
from ..planner import RESERVE
from ..progress import say
from ..spec import MOST_TOKENS, CacheSpec, Scheme, whole
from ..units import parse_tokens
from . import generation, prefix, prompts, tensor_parallel
from .attention import DenseLayer, KVLayer
from .closed import Closed
from .encoder_decoder import CrossKVCache
from .identity import Owner, identity, own_attention
from .masks import NAME, Columns, cache_among, name_for
from .models import scheme_for, unfit_for
from .placement import device_of, free_bytes, require_loaded
from .refusals import refuses, refuses_pages
from .rotary import stored_layers
from .tensor_parallel import Ranks

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from ..spec import LayerGeometry
    from ..store.prefix_store import PrefixStore

_BEFORE = "_attention_before_kvbits"
"""Attribute where a model keeps the attention implementations that it had."""


class KVCache(Closed, Cache):
    """A Transformers cache on packed pages. Build it with `KVCache.for_model`.

    Works wherever a `DynamicCache` is passed: greedy, sampling, beam search, assisted decoding, chunked prefill,
    several turns, `copy.deepcopy`. What it does not do as a `DynamicCache` does (tensors of its layers, `update` by
    hand, attributes of your own) raises UnsupportedError.

    Attributes:
        pages: the `PagedCache` underneath.
        columns: positions seen, padding included.
    """

    layers: tuple[Any, ...]
    _inherits = (
        "get_max_length",
        "get_query_offset",
        "get_seq_length",
        "has_previous_state",
        "is_croppable",
        "is_dummy",
        "is_sliding",
        "update",
        "update_indexer",
    )
    """Names of `Cache` that are right as they are."""

    def __init__(self, pages: PagedCache, ranks: Ranks = Ranks(), config: Any = None, dense: bool = False) -> None:  # noqa: B008
        self.pages, self._ranks = pages, ranks
        lengths = torch.tensor(pages.seq_lens or [0], device="cpu")
        seen = int(lengths.max())
        ragged = bool((lengths != seen).any())
        # shorter sequences count as left-padded
        valid = torch.arange(seen, device="cpu") >= seen - lengths[:, None] if ragged else None
        self.columns = Columns(pages, attached=config is not None, _now=(seen, valid))
        self._recording = False
        super().__init__(layers=tuple(_layers(pages, self.columns, config, dense)))
        self._states = _states(self.layers)
        if any(getattr(layer, "readers", 1) > 1 for layer in self.layers):
            pages.read_again()
        alone = ranks.size == 1 and self._states is None and not dense
        fixed = alone and config is not None and decode.leads(pages.device) and pages.max_tokens is not None
        self._captured = (
            fixed
            and pages.cannot_decode_on_device(config.num_attention_heads, getattr(torch, pages.spec.raw_dtype)) is None
        )
        self._ready = True

    @classmethod
    def for_model(
        cls,
        model: Any,
        scheme: str | Scheme | None = None,
        *,
        batch_size: int | None = None,
        max_tokens: int | str | None = None,
        calibration: Calibration | str | Path | None = None,
        calibrate: bool = True,
        backend: str = "auto",
        dense: bool = False,
        made_for: str | None = None,
    ) -> KVCache:
        """Return a cache for `model`, and switch the model to the "kvbits" attention until `detach`. Any other cache
        then gets plain SDPA.

        `model.generate_batch` and compiled decoding need the model's own attention: call `detach` before them. From
        then on a forward pass that is given the cache and does not fill it raises UnsupportedError.
        docs/reference/models.md lists the families of models that are taken.

        Args:
            model: a Transformers model that generates text. For one of encoder and decoder a `CrossKVCache` is
                returned, whose pages hold the decoder's tokens.
            scheme: preset name (its groups are fitted to the model's head_dim), a `Scheme`, or a file of one
                (`mine.json`; both taken as they are). None: `schemes.RECOMMENDED`. "auto": the most accurate of 8, 4, 3
                and 2 bits in which `batch_size` sequences of `max_tokens` fit the memory that is free now, of those
                that passed `kvbits check` on this model. The choice and its reason are printed on standard error.
            max_tokens, batch_size: fix the capacity (see `PagedCache`), for one sequence if `batch_size` is not given;
                tokens are a number or a text like "8k", and are rounded up to whole pages (`explain()` says what they
                hold). Without them the cache grows. Assisted decoding with sliding-window layers needs one that grows.
            calibration: or its file, of schemes with a basis, instead of the model's own in the user's cache folder,
                which is found by the weights or made once (seconds to minutes, with a progress bar; `calibrate.kept`);
                needed by schemes with static scales. Refused if made for a model of another shape or other rotary
                parameters, or beside a named scheme that takes none. "auto" leaves it out where it chooses such a one.
            calibrate: False takes what is kept and makes nothing.
            backend: "auto", or one backend for every op.
            dense: leave the model its own attention and hand it dense tensors, made of the pages one layer at a time:
                for models that cannot attend over pages (their attention is their own code, or adds a bias). The same
                bytes are stored; each pass costs time and the memory of one layer's tokens in 16 bits. Padding is
                stored like any token.
            made_for: names what `kvbits.identity` cannot see of the model, such as a hook that steers it. Caches of
                another `made_for` share no stored or saved pages.

        Warns:
            KvbitsWarning: the scheme is known to be unfit for this model, whose keys have a bias (`models.unfit_for`);
                or `calibration` was measured on another model of the same shape, so it is less exact than its own.

        Raises:
            UnsupportedError: the model's attention cannot run on pages; the message says why.
            SpecError: unknown scheme, or one that does not fit the model's head_dim, or one that was fitted to another
                model; "auto" without `max_tokens`.
            CalibrationError: calibration missing or made for something else.
        """
        require_loaded(model)
        prompts.require_no_prefix_tuning(model)
        if (own := refuses(model.config)) is not None:
            raise UnsupportedError(f"{type(model).__name__} {own}; use the stock cache")
        if scheme is None:
            scheme = schemes.RECOMMENDED
        if not isinstance(scheme, (str, Scheme)):
            raise SpecError(
                f"scheme={scheme!r} is neither a preset name nor a Scheme; presets: {', '.join(schemes.PRESETS)}"
            )
        if isinstance(calibration, (str, Path)):
            from ..calibrate import Calibration

            calibration = Calibration.load(calibration)
        if calibration is not None and not hasattr(calibration, "static"):
            raise CalibrationError(
                f"calibration={calibration!r} is neither a Calibration nor a path to its file, which `kvbits calibrate"
                " --out FILE` writes"
            )
        ref, ranks = ModelRef.of(model), Ranks.of(model)
        config, device = text_config(ref.config), device_of(model)
        automatic = scheme == "auto"
        if automatic:
            scheme = _chosen(ref, ranks.layers(ref.layers), device, batch_size, max_tokens)
        chosen = scheme_for(ref, scheme)
        if automatic and not chosen.needs_calibration:
            calibration = None
        if (unfit := unfit_for(model, chosen)) is not None:
            warnings.warn(unfit, KvbitsWarning, stacklevel=2)
        layers = stored_layers(ranks.layers(ref.layers), chosen, model)
        spec = CacheSpec(scheme=chosen, layers=layers, raw_dtype=str(model.dtype).removeprefix("torch."))
        static = None
        if chosen.needs_calibration or calibration is not None:
            static = ranks.static(_calibration(ref, chosen, ranks, calibration, calibrate).to(device).static)
        _attach(model, dense)
        pages = PagedCache(
            spec,
            batch_size=batch_size,
            max_tokens=max_tokens,
            device=device,
            static=static,
            backend=backend,
        )
        pages.made_for, pages.owner = identity(model, made_for), Owner(model, made_for)
        cache = cls(pages, ranks, config, dense)
        crosses = model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False)
        return CrossKVCache(cache) if crosses else cache

    @classmethod
    def from_prefix(
        cls,
        model: Any,
        ids: Any,
        *,
        store: PrefixStore,
        scheme: str | Scheme = schemes.RECOMMENDED,
        chunk: int | str = prefix.CHUNK,
        put: bool = True,
        wait: bool = False,
        extra: bytes = b"",
        **options: Any,
    ) -> KVCache:
        """Return a cache that holds a prompt except its last token. It loads the longest prefix that `store` has and
        computes the rest.

            cache = KVCache.from_prefix(model, ids, store=store)
            model.generate(ids, past_key_values=cache)

        Args:
            ids: token ids of one prompt, [tokens] or [1, tokens].
            chunk: most tokens that go through the model together.
            put: store what was computed, for the next prompt that begins like this one.
            wait: load the prefix whole before anything else. Otherwise layers start while later ones still load, and a
                damaged file that is found then, where nothing but the last token is left to compute, is an error of the
                pass that takes it (see `PrefixStore.load`).
            extra: names what else the keys depend on, such as a hook of your own; prompts of equal ids and another
                `extra` share nothing.
            options: of `for_model`.

        Raises:
            DataError: no token, or several prompts.
            SpecError: `store` is none, or a path.
            UnsupportedError: ranks share the model: files of prefixes hold all kv heads. The prompt is more than its
                ids: it holds tokens that stand for images, sounds or videos, virtual tokens come in front of it, its
                tokens see later ones, or more inputs were given.
            What `for_model` and `PrefixStore.load` raise.
        """
        if (why := prefix.refuses(model)) is not None:
            raise UnsupportedError(why)
        if (ranks := Ranks.of(model)).size > 1:
            raise UnsupportedError(
                f"from_prefix() of a model that {ranks.size} ranks share; use for_model, and save and load for prefixes"
            )
        if store is None or isinstance(store, (str, Path)):
            raise SpecError(f"store={store!r} is not a store; pass store=kvbits.PrefixStore(FOLDER)")
        if inputs := [
            name
            for name in options
            if name not in inspect.signature(cls.for_model).parameters
            and (name in inspect.signature(model.forward).parameters or prompts.MEDIA.fullmatch(name))
        ]:
            raise UnsupportedError(
                f"from_prefix() computes a prompt from its ids alone, and {', '.join(inputs)} would be left out; use"
                " KVCache.for_model, and copy.deepcopy of the filled cache for prompts that begin alike"
            )
        prefix.require_words(model, ids)
        chunk = parse_tokens(chunk, "chunk") if isinstance(chunk, str) else chunk
        cache = cls.for_model(model, scheme, **options)
        prefix.fill(cache, model, ids, store, chunk=chunk, put=put, wait=wait, extra=extra)
        return cache

    @staticmethod
    def detach(model: Any = None) -> None:
        """Undo what `for_model` and `load` did to `model`: give it the attention implementation back that it had.

        Its KVCaches are refused from then on, and what needs the model's own attention (`generate_batch`, compiled
        decoding) works as before. Does nothing to a model never attached.
        """
        require_loaded(model)
        before = model.__dict__.pop(_BEFORE, None)
        generation.detach(model)
        if model.config.get_text_config(decoder=True)._attn_implementation == NAME:
            # without a note: whoever set "kvbits" by hand, SDPA is what it was for other caches
            model.set_attn_implementation(before or "sdpa")

    def save(self, path: str | Path) -> None:
        """Write the cache to a file (see `cache.saved`).

        Padding is not written: `load` takes shorter rows as left-padded.

        Where ranks share the model, all call it; the file is that of one process and loads under any number of ranks.

        Raises:
            UnsupportedError: layers keep recurrent states, which files do not hold.
            CacheStateError: the model changed since the cache was made (see `kvbits.identity`).
        """
        if self._states is not None:
            raise UnsupportedError(
                f"{prefix.beside_pages(len(self._states.layers))}; use copy.deepcopy(cache) to keep it in memory"
            )
        if self._ranks.size > 1:
            self.pages.require_same_model()
            tensor_parallel.save(self.pages, self._ranks, path)
        else:
            self.pages.save(path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: Any = None,
        *,
        grow: bool = False,
        check_weights: bool = True,
        dense: bool = False,
        made_for: str | None = None,
    ) -> KVCache:
        """Return the cache that `save` wrote, on `model`'s device and ready to be continued. It has the capacity it
        had, or none with `grow`.

        Args:
            dense: see `for_model`.
            check_weights: refuse a cache that a model of another `kvbits.identity` filled. Files that say nothing about
                it are taken.
            made_for: as in `for_model`, when the cache was filled.

        Raises:
            FileFormatError: a damaged or foreign file, or a cache of another geometry, dtype or other weights than the
                model's.
        """
        require_loaded(model)
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                "files of pages do not hold what a decoder reads of its encoder; build a cache with"
                " KVCache.for_model(model)"
            )
        config, ranks, device = text_config(model.config), Ranks.of(model), device_of(model)
        layers = ModelRef.of(model).layers
        if states := sum(p.has_state for p in layer_places(config)):
            raise UnsupportedError(f"{prefix.beside_pages(states)}; build a cache with KVCache.for_model(model)")
        layers = ranks.layers(layers)
        pages = PagedCache.load(path, device=device, grow=grow, shard=(ranks.rank, ranks.size))
        layers = stored_layers(layers, pages.spec.scheme, model)
        if pages.spec.layers != layers:
            raise FileFormatError(
                f"{path} holds {len(pages.spec.layers)} layers of another shape than this model's {len(layers)}; load"
                " it with the model it was made for"
            )
        if str(model.dtype) != f"torch.{pages.spec.raw_dtype}":
            raise FileFormatError(
                f"{path} holds a cache of a {pages.spec.raw_dtype} model, this one is {model.dtype}; load the model in"
                " that dtype"
            )
        now = identity(model, made_for) if check_weights and pages.made_for is not None else None
        if now is not None and pages.made_for != now:
            raise FileFormatError(
                f"{path} was filled by a model of the same shape with other weights, adapters or settings (identity"
                f" {str(pages.made_for)[:12]}, this model's is {now[:12]}; see kvbits.identity), so its keys and values"
                " mean nothing to this one; load that model as it was then, pass the made_for=.. of then, or pass"
                " check_weights=False if they are near enough"
            )
        _attach(model, dense)
        pages.owner = None if now is None else Owner(model, made_for)
        return cls(pages, ranks, config, dense)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for the cache, recurrent states included."""
        return self.pages.nbytes + self.state_nbytes

    @property
    def stock_nbytes(self) -> int:
        """Bytes of keys and values that the stock cache would hold of the same positions, padding included, in the
        model's dtype.
        """
        itemsize = getattr(torch, self.pages.spec.raw_dtype).itemsize
        return self.pages.spec.raw_nbytes(self.columns.seen, self.pages.batch_size, itemsize)

    @property
    def state_nbytes(self) -> int:
        """Bytes of recurrent states, which do not grow with the tokens."""
        return 0 if self._states is None else self._states.nbytes

    def explain(self) -> Explanation:
        """Return the scheme, backends with reasons, and bytes by kind, by the model's numbers of its layers. The dict
        prints as a few lines (see `PagedCache.explain`).
        """
        numbers = [i for i, layer in enumerate(self.layers) if isinstance(layer, KVLayer)]
        return self.pages.explain().of_model(
            numbers, [i for i, layer in enumerate(self.layers) if layer in self._recurrent], self.state_nbytes
        )

    def __repr__(self) -> str:
        held = f"seq_lens={self.pages.seq_lens}"
        if (tokens := self.pages.max_tokens) is not None:
            room = self.pages.spec.room(tokens)
            held += f", max_tokens={tokens}" + (f" (room for {room})" if room not in (None, tokens) else "")
        return f"KVCache(scheme={self.pages.spec.scheme.name!r}, {held}, nbytes={self.nbytes})"

    @property
    def batch_size(self) -> int:
        return self.pages.batch_size or -1

    @property
    def is_compileable(self) -> bool:
        """Flag that tells whether `generate` decodes with it in a CUDA graph by itself.

        It does with a cache of fixed capacity, on a GPU, with a scheme whose tokens the device leads.
        """
        return self._captured and not self._recording

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (columns of a mask, position of the first column) for `query_length` new tokens."""
        if not self.columns.attached and not torch.compiler.is_compiling():
            self.columns.asked = self.pages.changes
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def is_initialized(self) -> bool:
        """Return whether tokens are stored."""
        return self.columns.seen > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether a layer keeps what a `crop` may need that it would give up otherwise."""
        layer = self.layers[layer_idx]
        return self._recording and (getattr(layer, "is_sliding", False) or layer in self._recurrent)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove positions (padding among them counts). 0 only ends the speculation."""
        n = whole(
            "tokens_to_remove",
            tokens_to_remove,
            -MOST_TOKENS,
            0,
            "how many tokens to remove, as a negative number",
            DataError,
        )
        columns = self._whole()
        if -n > columns.seen:
            raise DataError(f"crop({n}): the cache has seen {columns.seen} tokens")
        with self._together():
            if self._states is not None:
                self._states.crop(-n, self._recording)
            if self.pages.batch_size:
                lengths, valid = torch.tensor(self.pages.seq_lens, device="cpu"), columns.valid
                if n:
                    lengths = lengths + n if valid is None else lengths - valid[:, n:].sum(1).cpu()
                with columns.becoming(columns.seen + n, valid if valid is None or not n else valid[:, :n]):
                    self.pages.crop(lengths.tolist())
        if self._recording:
            self.pages.keep_past()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence i the old sequence beam_idx[i]. Pages are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep and reorder sequences. `indices` has the old index of each new sequence, or a boolean mask of the
        sequences to keep; a tensor or a list.

        Raises:
            DataError: neither numbers of sequences that are there nor a mask of all of them. Nothing changed.
        """
        if count := self.pages.batch_size:
            given = torch.as_tensor(indices)
            rows = given.nonzero()[:, 0] if given.dtype == torch.bool and given.shape == (count,) else given
            fits = rows.ndim == 1 and rows.dtype != torch.bool and not rows.is_floating_point()
            chosen = rows.tolist() if fits else []  # waits for a GPU, once
            if not fits or not all(0 <= row < count for row in chosen):
                raise DataError(
                    f"indices={indices!r} of {counted(count, 'sequence')}; give numbers from 0 to {count - 1}, or a"
                    " mask of all of them"
                )
            valid, rows = self._whole().valid, rows.long()
            with self._together():
                with self.columns.becoming(self.columns.seen, None if valid is None else valid[rows.to(valid.device)]):
                    self.pages.select(chosen)
                for layer in self._recurrent:
                    layer.select_states(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.pages.batch_size:
            valid = self._whole().valid
            with self._together():
                with self.columns.becoming(
                    self.columns.seen, None if valid is None else valid.repeat_interleave(repeats, 0)
                ):
                    self.pages.repeat(repeats)
                for layer in self._recurrent:
                    layer.repeat_states(repeats)

    def reset(self) -> None:
        with self._together():
            with self.columns.becoming(0, None):
                self.pages.reset()
            self._recording = False
            if self._states is not None:
                self._states.reset()

    def begin_again(self) -> None:
        """Reset in the middle of a `generate`, because the model computes all tokens anew (see `generation`)."""
        recording = self._recording
        self.reset()
        if recording:
            self.activate_past_recording()

    def abandon(self) -> None:
        """Undo a forward pass that was interrupted, also behind the last layer that stores (see `PagedCache.abandon`).
        The cache is as before the pass. With recurrent states it refuses use until `reset`.

        Raises:
            CacheStateError: all layers had stored their tokens, and a window has given back what it would take to
                remove them; `reset()` begins anew.
        """
        before = self.columns.broken_off()
        self.pages.abandon()
        self.columns.settle()
        if (
            before is not None
            and self.columns.seen > before
            and not (self._states is not None and self._states.halfway)
        ):
            try:
                self.crop(before - self.columns.seen)
            except (CacheStateError, UnsupportedError) as error:
                raise CacheStateError(
                    f"the pass that broke off had stored {self.columns.seen - before} tokens in every layer, and a"
                    " window has given back what their removal would show again; reset() the cache and pass the whole"
                    " sequence again, or continue a copy.deepcopy that was made before the pass"
                ) from error

    def activate_past_recording(self) -> None:
        self._recording = True
        self.pages.keep_past()
        for layer in self._recurrent:
            layer.activate_past_recording()

    # -- recurrent states -------------------------------------------------------------------------------------------

    @property
    def _recurrent(self) -> list[Any]:
        return [] if self._states is None else self._states.layers

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Change pages and recurrent states in a with block. Nothing continues from a state that an interrupt left
        between them.

        Errors of kvbits change nothing.
        """
        if self._states is None:
            yield
            return
        before, self._states.halfway = self._states.halfway, True
        try:
            yield
        except KvbitsError:
            self._states.halfway = before
            raise
        self._states.halfway = False

    def _whole(self) -> Columns:
        """Return what was seen, if no pass left recurrent states halfway."""
        if self._states is not None:
            self._states.require_whole()
        return self.columns

    @property
    def is_linear(self) -> list[bool]:
        """Flags that tell whether each layer has a state and no keys and values."""
        return [layer in self._recurrent and not isinstance(layer, KVLayer) for layer in self.layers]

    def enter_pass(self) -> None:
        columns = self._whole()
        # a model within one that is in its pass; lengths are the device's
        if self.pages.in_pass or columns.begun or self.pages.decoding is not None:
            return
        held = self.pages.seq_lens or [0]
        seen = columns.lengths(len(held))
        if seen is not None and held != seen:
            raise CacheStateError(
                f"the pages hold {held} tokens of each sequence, where this cache has seen {seen}: they were changed"
                " through cache.pages (load, resume, park, free, reset), of which it is not told; bring a parked"
                " sequence back first, load prefixes with KVCache.from_prefix, or reset() the cache"
            )

    def leave_pass(self) -> None:
        if self._states is not None:
            self._states.halfway = False

    def _touched(self) -> None:
        if not torch.compiler.is_compiling() and self._states is not None:
            self._states.halfway = True

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._touched()
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._touched()
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._touched()
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._touched()
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


@contextmanager
def default_cache(model: Any, scheme: str | Scheme = schemes.RECOMMENDED, **options: Any) -> Iterator[None]:
    """Make `model.generate` without `past_key_values` use `KVCache.for_model(model, scheme, **options)` inside.

    For drafts of assisted generation, whose caches Transformers makes itself:

        with default_cache(draft):
            model.generate(**inputs, past_key_values=KVCache.for_model(model, "tiered"), assistant_model=draft)

    It replaces one method of this model object and puts it back at the end.
    """
    inherited = model._prepare_cache_for_generation

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if cache_among(model_kwargs) is None:
            cache = model_kwargs[name_for(model)] = KVCache.for_model(model, scheme, **options)
            if not generation.uses_cache(generation_config.use_cache, cache=cache, name=type(model).__name__):
                generation_config.use_cache = True
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return inherited(generation_config, model_kwargs, *args, **kwargs)

    model._prepare_cache_for_generation = prepare
    try:
        yield
    finally:
        del model._prepare_cache_for_generation


def _beside_images(layers: list[Any], config: Any) -> list[Any]:
    """Return the layers, told where their model reads `keys` of each one that is initialized (mllama)."""
    if getattr(config, "cross_attention_layers", None) is not None:
        for layer in layers:
            if isinstance(layer, KVLayer):
                layer._beside_images = True
    return layers


def _layers(pages: PagedCache, columns: Columns, config: Any, dense: bool) -> list[Any]:
    """Make the layers of a cache for a model with this configuration.

    None means that every layer stores keys and values of its own.
    """
    own = DenseLayer if dense else KVLayer
    if config is None:
        return [own(pages, columns, i) for i in range(len(pages.spec.layers))]
    places = layer_places(config)
    readers = Counter(p.stored for p in places)
    if all(p.stored is not None and not p.shares and not p.has_state for p in places):
        return _beside_images([own(pages, columns, i) for i in range(len(places))], config)
    from transformers.cache_utils import DummyLayer

    from .recurrent import CrossLayer, DenseHybridLayer, HybridLayer, IndexedLayer, RecurrentLayer

    states, hybrid = getattr(config, "number_of_conv_states", 1), DenseHybridLayer if dense else HybridLayer
    found: list[Any] = []
    for p in places:
        if p.kind == CROSS:
            found.append(CrossLayer())
        elif p.stored is None or p.shares:
            found.append(RecurrentLayer(states) if p.has_state and not p.is_indexed else DummyLayer())
        elif p.is_indexed:
            found.append(IndexedLayer(pages, columns, p.stored))
        elif p.has_state:
            found.append(hybrid(pages, columns, p.stored, readers[p.stored], states))
        else:
            found.append(own(pages, columns, p.stored, readers[p.stored]))
    return _beside_images(found, config)


def _states(layers: tuple[Any, ...]) -> Any:
    """Return recurrent states of a cache, None where there are none."""
    if all(type(layer) in (KVLayer, DenseLayer) for layer in layers):
        return None
    from .recurrent import States

    found = States(layers)
    return found if found.layers else None


def _chosen(
    model: ModelRef,
    layers: tuple[LayerGeometry, ...],
    device: torch.device,
    batch_size: int | None,
    max_tokens: int | str | None,
) -> str:
    """Return the preset that so many sequences need in the memory that is free, said on standard error."""
    from .engine.automatic import choose

    requests, context = capacity.checked(batch_size, max_tokens)
    if requests is None or context is None:
        raise SpecError('scheme="auto" is chosen for a capacity; pass max_tokens, and batch_size for more than one')
    if not (free := free_bytes(device)):
        raise SpecError(f'scheme="auto": the system does not say how much memory of {device} is free; name a scheme')
    found, why = choose(
        model,
        layers,
        memory_bytes=int((1 - RESERVE) * free),
        context=context,
        requests=requests,
        raw_dtype=str(model.loaded.dtype).removeprefix("torch."),
        engine="transformers",
    )
    say(f"scheme {why}")
    return found


def _calibration(model: ModelRef, scheme: Scheme, ranks: Ranks, given: Calibration | None, make: bool) -> Calibration:
    if given is not None:
        if not given.suits(model.loaded):
            warnings.warn(
                f"{given!r} was measured on another model of the same shape (other weights, adapters or settings), so"
                " it is less exact than one of this model; leave calibration out, or run `kvbits calibrate` for this"
                " model",
                KvbitsWarning,
                stacklevel=3,
            )
        return given.fitted(model.config, scheme)
    from ..calibrate import kept

    return kept.of_model(model, scheme, make=make and ranks.size == 1)


def _attach(model: Any, dense: bool) -> None:
    """Prepare a model for a cache.

    Raises:
        UnsupportedError: see `use_kvbits_attention`.
    """
    if dense:
        generation.attach(model)
        return
    try:
        use_kvbits_attention(model)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}; use KVCache.for_model(model, .., dense=True), or the stock cache") from error


def use_kvbits_attention(model: Any) -> None:
    """Switch a model to the "kvbits" attention, and note on it what it had (`KVCache.detach`).

    Raises:
        UnsupportedError: the model does not take attention functions from Transformers' registry.
    """
    if (how := refuses_pages(model.config)) is not None:
        raise UnsupportedError(f"{type(model).__name__} {how}, so it cannot attend over pages")
    if model.config.get_text_config(decoder=True)._attn_implementation == NAME:
        generation.attach(model)
        return
    config = model.config
    if own_attention(config) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} attends by {config.get_text_config(decoder=True)._attn_implementation!r}, a"
            " function of your own, which attention over pages would replace; call"
            " model.set_attn_implementation('sdpa') first if it computes the same"
        )
    parts = {
        name: part for name in getattr(config, "sub_configs", {}) if (part := getattr(config, name, None)) is not None
    }
    before = {"": config._attn_implementation} | {name: part._attn_implementation for name, part in parts.items()}
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise UnsupportedError(f"{type(model).__name__} cannot use a custom attention: {error}") from error
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} ignored the attention implementation {NAME!r}: its attention is its own code and"
            " not looked up in Transformers' registry (GPT-Neo, XGLM, and models with ALiBi: Falcon, BLOOM, MPT), so"
            " it cannot attend over pages"
        )
    model.__dict__[_BEFORE] = before
    generation.attach(model)
