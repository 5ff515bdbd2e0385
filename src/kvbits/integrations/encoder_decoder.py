"""The cache of an encoder-decoder model: keys and values of the decoder's own tokens in a `KVCache`, those of the
encoder's output in a stock cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..errors import UnsupportedError
from .closed import Closed


class CrossKVCache(Closed, EncoderDecoderCache):
    """Cache that `KVCache.for_model` makes for an encoder-decoder model.

    Attributes that are not defined here are those of `self_attention_cache`, its `KVCache`.

    Attributes:
        self_attention_cache, cross_attention_cache: of the decoder's tokens, of the encoder's output, which every new
            input needs anew (`reset`).
    """

    _open = ("cross_attention_cache", "is_updated")
    _inherits = tuple(dir(EncoderDecoderCache))

    def __init__(self, cache: Any) -> None:
        super().__init__(cache, DynamicCache())
        self._ready = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "self_attention_cache" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.self_attention_cache, name)

    @property
    def nbytes(self) -> int:
        """Bytes really allocated for the cache, the encoder's output in 16 or 32 bits among them."""
        return self.self_attention_cache.nbytes + sum(
            x.nbytes for layer in self.cross_attention_cache.layers for x in (layer.keys, layer.values) if x is not None
        )

    @property
    def is_compileable(self) -> bool:
        """False: tokens are decoded without a CUDA graph, which would have to be captured again for every encoded
        input.
        """
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Crop the decoder's tokens, see `KVCache.crop`."""
        self.self_attention_cache.crop(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.self_attention_cache.batch_select_indices(indices)
        self.cross_attention_cache.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.self_attention_cache.batch_repeat_interleave(repeats)
        self.cross_attention_cache.batch_repeat_interleave(repeats)

    def enter_pass(self) -> None:
        """Let a first pass read its own encoder's output, also after one that broke off and was taken back."""
        self.self_attention_cache.enter_pass()
        if not self.self_attention_cache.get_seq_length():
            self.cross_attention_cache.reset()
            self.is_updated.clear()

    def begin_again(self) -> None:
        self.self_attention_cache.begin_again()

    def save(self, path: str | Path) -> NoReturn:
        """Refuse to save.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "files of pages do not hold what a decoder reads of its encoder; use copy.deepcopy(cache) to keep it in"
            " memory"
        )

    def __repr__(self) -> str:
        return f"CrossKVCache({self.self_attention_cache!r})"


def _of_tokens(name: str) -> property:
    return property(lambda self: getattr(self.self_attention_cache, name))


for _name in {name for name in dir(Cache) if not name.startswith("_")} - {
    *vars(CrossKVCache),
    *vars(EncoderDecoderCache),
}:
    setattr(CrossKVCache, _name, _of_tokens(_name))
