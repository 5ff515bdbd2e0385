"""Layers of a `KVCache` that keep something beside the pages: recurrent states (convolutions, Mamba, gated delta rule),
in Transformers' own layer, index keys.

A state knows nothing of the tokens that made it, so it cannot go back by some of them, and what a pass that broke off
did to it cannot be undone. Index keys are one vector a token, and go where the tokens go.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ..cache.paged_cache import PagedCache
from ..errors import CacheStateError, UnsupportedError, counted
from .attention import DenseLayer, KVLayer
from .closed import Closed
from .masks import Columns


def _whole_cache_only(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError("a layer of a KVCache cannot be changed alone; call the same method on the cache")


class RecurrentLayer(Closed, LinearAttentionLayer):
    """A layer with a state and no keys and values."""

    _open = _inherits = (
        "activate_past_recording",
        "conv_kernel_size",
        "conv_states",
        "device",
        "dtype",
        "get_max_length",
        "has_previous_state",
        "is_conv_states_initialized",
        "is_croppable",
        "is_recurrent_states_initialized",
        "number_of_states",
        "record_past",
        "recurrent_states",
        "supports_early_init",
        "lazy_initialization",
        "update_conv_state",
        "update_recurrent_state",
    )
    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)
        self._ready = True

    def reset(self) -> None:
        """Forget the state; the next may be of another batch."""
        LinearAttentionCacheLayerMixin.__init__(self, self.number_of_states)

    def _states(self) -> list[tuple[dict[int, torch.Tensor | None], int, torch.Tensor]]:
        return [
            (states, i, x)
            for states in (self.conv_states, self.recurrent_states)
            for i, x in states.items()
            if x is not None
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the state of all sequences."""
        return sum(x.nbytes for _, _, x in self._states())

    def select_states(self, indices: torch.Tensor) -> None:
        """Give sequence i the state of the old indices[i]."""
        for states, i, x in self._states():
            states[i] = x.index_select(0, indices.to(x.device))

    def repeat_states(self, repeats: int) -> None:
        """Repeat every sequence's state `repeats` times."""
        for states, i, x in self._states():
            states[i] = x.repeat_interleave(repeats, 0)

    forget_states = reset
    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _whole_cache_only


class HybridLayer(RecurrentLayer, KVLayer):
    """A layer that attends and keeps a state beside its keys and values."""

    is_croppable = RecurrentLayer.is_croppable
    get_max_length = KVLayer.get_max_length
    lazy_initialization = LinearAttentionLayer.lazy_initialization
    reset = KVLayer.reset

    def __init__(
        self, pages: PagedCache, columns: Columns, index: int, readers: int = 1, number_of_states: int = 1
    ) -> None:
        KVLayer.__init__(self, pages, columns, index, readers)
        RecurrentLayer.__init__(self, number_of_states)


class DenseHybridLayer(HybridLayer, DenseLayer):
    """The same for a model that is handed dense tensors."""


class IndexedLayer(DenseLayer):
    """A layer that keeps an index key of each token, in the model's dtype, by which the model chooses the tokens that
    it attends to.
    """

    record_past = True  # they go back by any tokens
    _indices: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Keep index keys [B, T, D] of the tokens that `update` has stored; those of all, [B, tokens, D].

        What a crop or a broken pass left is cut off.
        """
        past = self.seen - indexer_key_states.shape[1]
        before = self._indices[:, :past] if past and self._indices is not None else indexer_key_states[:, :0]
        self._indices = torch.cat([before, indexer_key_states], 1)
        return self._indices

    @property
    def nbytes(self) -> int:
        """Bytes of the index keys of all sequences."""
        return 0 if self._indices is None else self._indices.nbytes

    def forget_states(self) -> None:
        """Forget the index keys; the next may be of another batch."""
        self._indices = None

    def select_states(self, indices: torch.Tensor) -> None:
        """Give sequence i the index keys of the old indices[i]."""
        self._indices = (
            None if self._indices is None else self._indices.index_select(0, indices.to(self._indices.device))
        )

    def repeat_states(self, repeats: int) -> None:
        """Repeat every sequence's index keys `repeats` times."""
        self._indices = None if self._indices is None else self._indices.repeat_interleave(repeats, 0)

    def activate_past_recording(self) -> None:
        """Do nothing."""


class CrossLayer(DynamicLayer):
    """A layer that attends to an image alone: keeps its keys and values as the stock cache does, whatever the text."""

    record_past = True  # tokens of the text go back without it

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all sequences' images."""
        return sum(x.nbytes for x in (self.keys, self.values) if x is not None)

    def crop(self, tokens_to_remove: int) -> None:
        """Keep all: what is cropped are tokens of the text."""

    def reset(self) -> None:
        """Forget the image; the next may be of another batch."""
        DynamicLayer.__init__(self)

    def select_states(self, indices: torch.Tensor) -> None:
        """Give sequence i the image of the old indices[i]."""
        if self.is_initialized:
            self.batch_select_indices(indices.to(self.keys.device))

    def repeat_states(self, repeats: int) -> None:
        """Repeat the image of every sequence."""
        if self.is_initialized:
            self.batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Do nothing."""


class States:
    """States that layers of a cache keep beside the pages.

    Attributes:
        layers: that keep recurrent states, index keys, or an image's keys and values.
        halfway: a pass has moved some of the states and has not ended.
    """

    def __init__(self, layers: tuple[Any, ...]) -> None:
        self.layers = [layer for layer in layers if isinstance(layer, (RecurrentLayer, IndexedLayer, CrossLayer))]
        self.halfway = False

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def reset(self) -> None:
        """Forget all of them."""
        for layer in self.layers:
            layer.forget_states() if isinstance(layer, KVLayer) else layer.reset()
        self.halfway = False

    def require_whole(self) -> None:
        """Refuse to continue after a pass that broke off.

        Raises:
            CacheStateError: with the way out.
        """
        if self.halfway:
            raise CacheStateError(
                f"a forward pass broke off after it had moved recurrent states ({counted(len(self.layers), 'layer')} of"
                " this model have them), which cannot be taken back; call reset() and pass the whole sequence again,"
                " or continue with a copy.deepcopy of the cache that was made before"
            )

    def crop(self, n: int, recording: bool) -> None:
        """Take back the last n tokens, as far as states can: those of convolutions alone, while past recording is on.

        Raises:
            UnsupportedError: they cannot; nothing changed.
        """
        if n and (bad := [layer for layer in self.layers if not (layer.is_croppable and layer.record_past)]):
            raise UnsupportedError(
                f"crop(-{n}): {counted(len(bad), 'layer')} of this model keep a recurrent state, which cannot go back"
                " by some tokens; keep a copy.deepcopy of the cache where you may return to, or reset() it and pass"
                " the sequence again"
            )
        for layer in self.layers if recording else ():
            if layer.is_croppable and isinstance(layer, RecurrentLayer):
                LinearAttentionLayer.crop(layer, -n)
