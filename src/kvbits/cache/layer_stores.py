"""The pages of each layer: its group, its index there, and the `PageStore` of each pool with calibrated parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import DataError
from ..ops.reference.attend import PageList
from ..ops.reference.dequantize import dequantize_pages
from ..ops.types import PageStore, Table
from ..spec import CacheSpec
from . import parameters
from .group import GroupState
from .plans import Plans


@dataclass(frozen=True)
class Place:
    """The place where a layer is stored."""

    layer: int
    group: int
    index: int  # of the layer inside the group


class LayerStores:
    """The pages of every layer of a cache.

    Args:
        groups: page lists and pools of the spec's layer groups, in their order.
        static: calibrated parameters per layer.

    Attributes:
        places: of each layer.
        changes_keys: layers whose keys may be stored in an order of their own.
        plans: of attention to these pages, whoever leads a pass.
    """

    def __init__(
        self, spec: CacheSpec, groups: list[GroupState], static: list[dict[str, torch.Tensor]], device: torch.device
    ) -> None:
        self.spec, self.groups, self.device = spec, groups, device
        self._shared = parameters.by_pool(spec, static, device)
        self._orders = parameters.orders(spec, device)
        self._turns = parameters.turns(spec, device)
        self.changes_keys = set(self._orders)
        self.plans = Plans(len(spec.groups))
        self.places = {
            layer: Place(layer, g, i) for g, group in enumerate(spec.groups) for i, layer in enumerate(group.layers)
        }

    def store(self, place: Place, pool: str) -> PageStore:
        state = self.groups[place.group]
        turn = self._turns.get(place.layer) if pool == state.group.packed_pool else None
        return state.pools[pool].store(place.index, self._shared[place.layer].get(pool, {}), turn)

    def of_layer(self, layer: int, pool: str) -> PageStore:
        """Return a layer's pages of one pool."""
        return self.store(self.places[layer], pool)

    def order(self, place: Place) -> torch.Tensor | None:
        """Return the order of channels, int64 [D], that keys are stored in and queries need; None for their own."""
        return self._orders.get(place.layer) if self.groups[place.group].group.key.needs_rotary else None

    def _as_given(self, place: Place, k: torch.Tensor) -> torch.Tensor:
        """Put stored keys into the model's order of channels."""
        order = self.order(place)
        return k if order is None else torch.empty_like(k).index_copy_(-1, order, k)

    def dequantize(
        self, layer: int, row: int, dtype: torch.dtype, tables: dict[str, Table] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the keys and values [tokens, H, D] that a sequence holds, in token order; those of `tables`, or all.

        Raises:
            DataError: a dtype that is not a float's.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise DataError(f"keys and values are read into a float dtype, not {dtype!r}")
        place, g = self.places[layer], self.spec.layers[layer]
        keys, values = (
            [torch.zeros(0, g.num_kv_heads, d, dtype=dtype, device=self.device)] for d in (g.head_dim, g.value_head_dim)
        )
        found = []
        for pool, table in (self.groups[place.group].tables() if tables is None else tables).items():
            store = self.store(place, pool)
            ids, starts, lengths = PageList.of(table, store.layout.page_size).of_sequence(row)
            if not len(ids):
                continue
            k, v = dequantize_pages(store.gather(ids), store.layout, store.static, dtype, starts=starts)
            pages = zip(starts, lengths, k, v, strict=True)
            found += [(int(start), x[:, :n].transpose(0, 1), y[:, :n].transpose(0, 1)) for start, n, x, y in pages]
        found.sort(key=lambda x: x[0])
        keys += [k for _, k, _ in found]
        values += [v for _, _, v in found]
        return self._as_given(place, torch.cat(keys)), torch.cat(values)
