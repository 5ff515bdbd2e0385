"""What `generate` asks of a model that decodes with a `KVCache`: a faster forward pass for its tokens, which is captured in a CUDA graph, and masks.

Transformers compiles the passes of caches that say `is_compileable` (torch.compile), with masks of all positions made before. A model that was attached to
kvbits answers both questions itself, for caches of kvbits only: the pass is the model's own in a CUDA graph (`graphs`), the mask stays that of padding.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import GenerationMixin
from transformers.masking_utils import create_masks_for_generate

from ..errors import KvbitsWarning
from . import graphs
from .masks import is_ours

ASKED = ("get_compiled_call", "create_masks_for_generate")
"""Methods of a model that `attach` answers."""


def attach(model: Any) -> None:
    """From now on `generate` asks here, also that of a model which adapters or a compiler wrapped."""
    for part in _generators(model):
        for name in ASKED:
            part.__dict__[name] = _Answer(part, name)


def detach(model: Any) -> None:
    """Undo `attach`."""
    for part in _generators(model):
        for name in ASKED:
            part.__dict__.pop(name, None)


def _generators(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, GenerationMixin)]


class _Answer:
    """One of a model's methods, answered for caches of kvbits. Copies of the model get their own; a reference would keep the model alive in a cycle."""

    def __init__(self, model: Any, name: str) -> None:
        self._model, self._name = weakref.ref(model), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self._name)(*args, **kwargs)

    def get_compiled_call(self, compile_config: Any = None) -> Callable[..., Any]:
        """What `generate` calls for every token. A configuration of the compiler's asks for the compiler."""
        inherited = partial(self._inherited(), compile_config)
        return inherited() if compile_config is not None else _Tokens(self._model(), inherited)

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        if is_ours(kwargs.get("past_key_values")):
            return kwargs.get("attention_mask")
        return self._inherited()(*args, **kwargs)

    def _inherited(self) -> Callable[..., Any]:
        model = self._model()
        found = inspect.getattr_static(type(model), self._name, None)
        return create_masks_for_generate if found is None else found.__get__(model, type(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Answer:
        return _Answer(memo.get(id(self._model()), self._model()), self._name)

    def __reduce__(self) -> Any:
        return _Answer, (self._model(), self._name)


class _Tokens:
    """The forward pass of one `generate`: a `graphs.GraphDecoder`'s for a cache that can be captured, the inherited one for others."""

    def __init__(self, model: Any, inherited: Callable[[], Callable[..., Any]]) -> None:
        self._model, self._inherited = model, inherited
        self._other: Callable[..., Any] | None = None
        self._decoder: graphs.GraphDecoder | None = None
        self._eager = graphs.is_compiled(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
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
