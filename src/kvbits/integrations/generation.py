"""Methods that `generate` asks of a model that decodes with a `KVCache`.

They give masks, inputs, and a faster forward pass for its tokens, which is captured in a CUDA graph.

Transformers compiles the passes of caches that say `is_compileable` (torch.compile), with masks of all positions made
before. A model that was attached to kvbits decides both itself, for caches of kvbits only. The pass is the model's own
in a CUDA graph (`graphs`), and the mask stays that of padding.

A KVCache that is passed means that a cache is used. `use_cache=False`, from whichever configuration or call it comes,
is taken as True with one warning.

Some models drop the cache that they were given. Phi-3 with longrope does so when a sequence grows past
`original_max_position_embeddings`: it computes everything anew, in a cache of its own. `generate` then begins the
KVCache again. Any other pass that was given a KVCache and left it empty is an error (`attach`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..errors import CacheStateError, KvbitsWarning, UnsupportedError, counted
from . import graphs, prompts
from .masks import CACHE_NAMES, cache_among, is_ours, name_for, passed

ASKED = (
    "generate",
    "get_compiled_call",
    "create_masks_for_generate",
    "prepare_inputs_for_generation",
    "init_continuous_batching",
)
"""Methods of a model that `attach` answers."""
_ARGUMENT = CACHE_NAMES["cache" not in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}]
"""Name of the cache among the arguments of `generate`."""
_HOOKS = "_kvbits_hooks"
"""Attribute where a module keeps the handles of its two hooks."""


def attach(model: Any) -> None:
    """Make `generate` ask here from now on, also that of a model which adapters or a compiler wrapped, and a forward
    pass that was given a KVCache must fill it.
    """
    for part in _generators(model):
        for name in ASKED:
            found = part.__dict__.get(name)
            if not isinstance(found, _Answer):
                part.__dict__[name] = _Answer(part, name, found)
    for part in _checked(model):
        if _HOOKS not in part.__dict__:
            part.__dict__[_HOOKS] = (
                part.register_forward_pre_hook(_before_pass, with_kwargs=True),
                part.register_forward_hook(_after_pass, with_kwargs=True),
            )


def detach(model: Any) -> None:
    """Undo `attach`."""
    for part in _generators(model):
        for name in ASKED:
            found = part.__dict__.pop(name, None)
            before = found.before if isinstance(found, _Answer) else found
            if before is not None:
                part.__dict__[name] = before
    for part in _checked(model):
        for handle in part.__dict__.pop(_HOOKS, ()):
            handle.remove()


def _generators(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, GenerationMixin)]


def _checked(model: Any) -> list[Any]:
    return list(dict.fromkeys([model, *(part for part in model.modules() if isinstance(part, PreTrainedModel))]))


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the KVCache among the arguments of a forward pass, or None; the one inside a stock EncoderDecoderCache,
    too.
    """
    found = [cache_among(kwargs), *(x for x in args if not isinstance(x, torch.Tensor))]
    found += [getattr(x, "self_attention_cache", None) for x in found if isinstance(x, EncoderDecoderCache)]
    return next((x for x in found if is_ours(x)), None)


def _key(module: Any) -> int:
    """Return a name of a module among those in a pass (`Columns.begun`): below 0 for what wraps a model of
    Transformers.
    """
    return id(module) if isinstance(module, PreTrainedModel) else -id(module)


def _before_pass(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Begin a pass, or a part of it; arguments that use the cache where the given ones do not."""
    if torch.compiler.is_compiling() or (cache := _cache_of(args, kwargs)) is None:
        return None
    cache.enter_pass()
    columns, key = cache.columns, _key(module)
    if key in columns.begun or all(outer < 0 for outer in columns.begun):
        prompts.note(columns, module, args, kwargs)
        if key > 0 and not columns.captured:
            columns.pages.watch(module, prompts.tokens_given(args, kwargs) != 1)
    columns.enter(key)
    return _with_cache(module, args, kwargs, cache)


def _with_cache(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments of a forward pass that use its KVCache; None where the given ones do."""
    place = None
    if len(args) > 1:
        names = [*inspect.signature(module.forward).parameters][: len(args)]
        place = names.index("use_cache") if "use_cache" in names else None
    given = kwargs.get("use_cache") if place is None else args[place]
    if given is None:
        given = getattr(getattr(module, "config", None), "use_cache", True)
    if given is None or given:
        return None
    if place is not None:
        args = (*args[:place], True, *args[place + 1 :])
    elif "use_cache" in kwargs or "use_cache" in prompts.arguments(module):
        kwargs = kwargs | {"use_cache": True}
    else:
        return None
    _say_used(cache, type(module).__name__)
    return args, kwargs


def uses_cache(*says: Any, cache: Any, name: str) -> bool:
    """Return whether a `generate` uses its KVCache by the first of these that says anything, with a warning where not.

    Args:
        says: of the call and of configurations: True, False or None.
        name: names the model in the warning.
    """
    if found := next((x for x in says if x is not None), True):
        return bool(found)
    _say_used(cache, name)
    return False


def _say_used(cache: Any, name: str) -> None:
    """Warn that a `generate` leaves its KVCache unused.

    Warns:
        KvbitsWarning: once for each cache.
    """
    if not cache.columns.told:
        cache.columns.told = True
        warnings.warn(
            f"{name} was given a KVCache together with use_cache=False (in the call, config.json or"
            " generation_config.json); the cache is used, as with use_cache=True. Leave the cache out to decode without"
            " one",
            KvbitsWarning,
            stacklevel=2,
        )


def _after_pass(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Check a pass that has ended.

    Raises:
        UnsupportedError: not every layer stored its tokens in the cache that the pass was given; the cache is as it was
            before.
    """
    if torch.compiler.is_compiling() or (cache := _cache_of(args, kwargs)) is None:
        return
    columns = cache.columns
    began = columns.leave(_key(module))
    if columns.captured or began != columns.passes:
        cache.leave_pass()
        return
    layers, of = len(columns.been), len(columns.pages.spec.layers)
    if columns.pages.in_pass:
        cache.abandon()
    new, old = CACHE_NAMES
    if name_for(module) == new and kwargs.get(old) is cache:
        raise UnsupportedError(
            f"{type(module).__name__} takes its cache as {new!r} and went by {old!r}; call model(.., {new}=cache)"
        )
    raise UnsupportedError(
        f"{type(module).__name__} was given a KVCache, but {layers} of its {counted(of, 'layer')} stored their tokens"
        " in it: the model, or what wraps it (gradient checkpointing while training, a custom forward), passed another"
        " cache on, or another thread used this one meanwhile, so its output is not that of this one. Use the stock"
        " cache for such a model, after KVCache.detach(model), and a copy of a cache in each thread"
    )


def _require_continued(cache: Any, args: tuple[Any, ...], given: dict[str, Any]) -> torch.Tensor | None:
    """Return the token ids that `generate` was given, where it was given ids of the whole sequence.

    Raises:
        CacheStateError: they do not continue what the cache holds.
    """
    ids = next((x for x in (*args[:1], given.get("inputs"), given.get("input_ids")) if x is not None), None)
    embeds, mask = given.get("inputs_embeds"), given.get("attention_mask")
    prompt = ids if embeds is None else embeds
    seen = cache.get_seq_length()
    if not isinstance(prompt, torch.Tensor) or prompt.ndim < 2:
        return None
    if isinstance(mask, torch.Tensor) and mask.shape[1] != prompt.shape[1]:
        return None  # only the new tokens came; the mask is checked against what is held
    what, length = None, prompt.shape[1]
    if 0 < length <= seen:
        what = f"a prompt of {counted(length, 'token')}"
    elif prompt is ids and (text := cache.columns.text) is not None and text[0] == cache.pages.changes:
        held = text[1][:, :seen]
        if len(held) == len(ids) and (differs := (held.to(ids.device) != ids[:, :seen]).any(0)).any():
            what = f"a prompt of {length} tokens that differs from them from token {int(differs.int().argmax())} on"
    if what is not None:
        raise CacheStateError(
            f"generate() was given a KVCache that already holds {counted(seen, 'token')}, and {what}. A prompt is"
            " passed whole: what the cache holds first, new tokens behind it. For another prompt, build a new cache"
            " (KVCache.for_model) or call cache.reset(). cache.crop(-n) removes the last n tokens. For several prompts"
            " that begin alike, fill a cache with the beginning and give each prompt a copy.deepcopy of it"
        )
    return ids if prompt is ids else None


def _missing(inputs: dict[str, Any], cache: Any) -> int:
    """Return the number of tokens of the sequence that the inputs of a pass without a past lack."""
    mask, tokens = inputs.get("attention_mask"), inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    return max(
        0, (cache.get_seq_length() + 1 if mask is None else mask.shape[-1]) - (0 if tokens is None else tokens.shape[1])
    )


class _Answer:
    """One of a model's methods, answered for caches of kvbits.

    Copies of the model get their own; a reference would keep the model alive in a cycle.

    Attributes:
        before: what the model object itself had of this name, None: its class's.
    """

    def __init__(self, model: Any, name: str, before: Callable[..., Any] | None = None) -> None:
        self._model, self._name, self.before = weakref.ref(model), name, before
        if hasattr(type(model), name):
            self.__signature__ = inspect.signature(self._inherited())  # generate() reads it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self._name)(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` with a KVCache by either name of the argument.

        Raises:
            CacheStateError: a prompt that does not continue what the cache holds.
            UnsupportedError: an adapter makes caches of its own.
        """
        model, cache = self._model(), cache_among(kwargs)
        if model is None or not is_ours(cache):
            return self._inherited()(*args, **kwargs)
        prompts.require_no_prefix_tuning(getattr(model.prepare_inputs_for_generation, "__self__", None))  # of PEFT
        kwargs = {name: x for name, x in kwargs.items() if name not in CACHE_NAMES} | {_ARGUMENT: cache}
        given = args[1] if len(args) > 1 else kwargs.get("generation_config")
        says = [getattr(config, "use_cache", None) for config in (given, model.generation_config)]
        if not uses_cache(kwargs.get("use_cache"), *says, cache=cache, name=type(model).__name__):
            kwargs["use_cache"] = True
        if model.config.is_encoder_decoder:
            return self._inherited()(*args, **kwargs)
        ids = _require_continued(cache, args, kwargs)
        found = self._inherited()(*args, **kwargs)
        text = getattr(found, "sequences", found)
        if ids is not None and isinstance(text, torch.Tensor):
            cache.columns.text = cache.pages.changes, text
        return found

    def get_compiled_call(self, compile_config: Any = None) -> Callable[..., Any]:
        """Return what `generate` calls for every token. A configuration of the compiler's asks for the compiler."""
        inherited = partial(self._inherited(), compile_config)
        return inherited() if compile_config is not None else _Tokens(self._model(), inherited)

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        if is_ours(cache_among(kwargs)):
            return kwargs.get("attention_mask")
        return self._inherited()(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inputs of a pass, for the cache that `generate` was given.

        Raises:
            UnsupportedError: the model passes another cache on, or begins anew without the tokens that are cached.
        """
        inputs = self._inherited()(*args, **kwargs)
        given = kwargs if {*CACHE_NAMES} & {*kwargs} else inspect.signature(self).bind_partial(*args).arguments
        cache, other = cache_among(given), cache_among(inputs)
        if not is_ours(cache) or other is cache:
            return inputs
        name = type(self._model()).__name__
        if other is not None:
            raise UnsupportedError(
                f"{name} passes its own {type(other).__name__} on instead of the KVCache that generate() was given,"
                " which would stay empty; use the stock cache for it, after KVCache.detach(model)"
            )
        if _missing(inputs, cache):  # Phi-4-multimodal cuts the cached tokens off all the same
            inputs = self._inherited()(*args, **(kwargs | {"next_sequence_length": None}))
        if missing := _missing(inputs, cache):
            raise UnsupportedError(
                f"{name} computes all tokens anew here (Phi-3 with longrope does where a sequence passes"
                f" original_max_position_embeddings), but {missing} of them were not passed; pass the whole sequence to"
                " generate() as input_ids, or stop before that length"
            )
        cache.begin_again()
        return inputs | passed(self._model(), cache)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse continuous batching.

        Raises:
            UnsupportedError: always: batches need pages and attention of Transformers' own.
        """
        raise UnsupportedError(
            "continuous batching (generate_batch) keeps its own paged cache, which needs the model's own attention;"
            " call KVCache.detach(model) before it, and KVCache.for_model(model, ..) again to decode with a KVCache"
        )

    def _inherited(self) -> Callable[..., Any]:
        model = self._model()
        if self.before is not None:
            return self.before
        found = inspect.getattr_static(type(model), self._name, None)
        return create_masks_for_generate if found is None else found.__get__(model, type(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Answer:
        return _Answer(memo.get(id(self._model()), self._model()), self._name, copy.deepcopy(self.before, memo))

    def __reduce__(self) -> Any:
        return _Answer, (self._model(), self._name, self.before)


class _Tokens:
    """The forward pass of one `generate`: a `graphs.GraphDecoder`'s for a cache that can be captured, the inherited one
    for others.
    """

    def __init__(self, model: Any, inherited: Callable[[], Callable[..., Any]]) -> None:
        self._model, self._inherited = model, inherited
        self._other: Callable[..., Any] | None = None
        self._decoder: graphs.GraphDecoder | None = None
        self._eager = graphs.is_compiled(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = cache_among(kwargs)
        if not is_ours(cache):
            self._other = self._inherited() if self._other is None else self._other
            return self._other(*args, **kwargs)
        if self._eager or not cache.is_compileable:
            return self._model(*args, **kwargs)
        try:
            if self._decoder is None or self._decoder.cache is not cache:
                if graphs.leads(self._model, cache):
                    return self._model(*args, **kwargs)
                self._decoder = graphs.GraphDecoder(self._model, cache)
            with self._decoder.leading(self._model):
                return self._model(*args, **kwargs)
        except graphs.NotCapturedError as error:
            self._eager, self._decoder = True, None
            warnings.warn(f"generate() decodes eagerly: {error}", KvbitsWarning, stacklevel=2)
        return self._model(*args, **kwargs)
