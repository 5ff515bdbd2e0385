"""A scheme simulated in a stock dense cache: pages are quantized and dequantized where they would close, and every
token stays in the model's dtype.

What papers measure with: no packed bytes, no kernel, no memory saved, and the model's own attention. It is here to be
compared with the packed cache, which it must agree with: page boundaries, sinks, the raw window and the quantizer are
the same, so what is left is rounding.

    float32   perplexity within 1e-3 relative, and KL between the two below 1e-5 nats; the op rounds in another order
              than SDPA
    bfloat16  dequantized keys and values are rounded once more, to the dense cache's bfloat16 (2**-9 relative): KL
              between the two near the raw scheme's own
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ..cache import parameters
from ..errors import UnsupportedError
from ..ops.reference.close import close_pages
from ..ops.reference.dequantize import dequantize_pages
from ..spec import CacheSpec, LayerGroup


class SimulatedLayer(DynamicLayer):
    """One layer: a stock layer whose older tokens are replaced by what their pages would give back.

    Args:
        group: the layer's group.
        static: what the layer's pages of each pool share (`parameters.by_pool`).
        order: stored order of key channels, where it is not the model's.
    """

    def __init__(
        self, group: LayerGroup, static: dict[str, dict[str, torch.Tensor]], order: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.group, self.static = group, static
        self.order = order
        self.pages = 0
        # what the model itself made of the newest closed pages, which other copies, then their own codes follow
        self.exact: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as attention sees them: one token after its page closed, a chunk before, with its own
        tokens exact.
        """
        keys, values = super().update(key_states, value_states)
        due = 0 if self.group.is_raw else self.group.closed_after(keys.shape[2])
        if due == self.pages:
            return keys, values
        self.keys, self.values = keys.clone(), values.clone()
        self._close(self.keys, self.values, due)
        return (self.keys, self.values) if key_states.shape[2] == 1 else (keys, values)

    def _close(self, all_keys: torch.Tensor, all_values: torch.Tensor, due: int) -> None:
        group, size, both = self.group, self.group.page_size, (all_keys, all_values)
        first, end = (group.num_sink_tokens + n * size for n in (self.pages, due))
        exact = tuple(x[:, :, first:end].clone() for x in both)
        if self.exact:
            exact = tuple(torch.cat(x, 2) for x in zip(self.exact, exact, strict=True))
        read: dict[str, list[int]] = {}  # pages, counted from the newest one
        for rank in range(exact[0].shape[2] // size):
            copies = bisect.bisect_right(group.copied_pages, rank)
            read.setdefault((*group.copy_pools, "closed")[copies], []).append(rank)
        for pool, ranks in read.items():
            where = slice(end - (ranks[-1] + 1) * size, end - ranks[0] * size)
            starts, of = np.arange(where.start, where.stop, size), exact[0].shape[2] - end
            for row in range(len(all_keys)):
                k, v = (
                    x[row, :, where.start + of : where.stop + of].unflatten(1, (len(starts), -1)).transpose(0, 1)
                    for x in exact
                )
                for to, x in zip(both, self.given_back(k, v, starts, pool), strict=True):
                    to[row, :, where] = x.transpose(0, 1).flatten(1, 2).to(to.dtype)
        kept = max(group.copied_pages, default=0) * size
        self.exact = tuple(x[:, :, max(0, x.shape[2] - kept) :] for x in exact)
        self.pages = due

    def given_back(
        self, k: torch.Tensor, v: torch.Tensor, starts: np.ndarray, pool: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [pages, heads, page_size, head_dim] as their pages in a pool give them back; the first
        tokens are at `starts`.
        """
        layout, order = self.group.layouts[pool], self.order if self.group.key.needs_rotary else None
        pages, _ = close_pages(k if order is None else k[..., order], v, layout, self.static[pool], starts)
        stored, values = dequantize_pages(pages, layout, self.static[pool], torch.float32, starts=starts)
        return stored if order is None else torch.empty_like(stored).index_copy_(-1, order, stored), values

    def reset(self) -> None:
        super().reset()
        self.pages, self.exact = 0, ()

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedError("a simulated cache cannot take tokens back; use the packed one")


class SimulatedCache(Cache):
    """A Transformers cache that simulates `spec`.

    One prompt or prompts of one length: padding would be quantized like tokens.

    Args:
        kind: the class of its layers. A subclass may round pages in its own way (benchmarks/peers.py has one).

    Raises:
        UnsupportedError: a scheme with tiers, whose pages change as they age.
    """

    def __init__(
        self,
        spec: CacheSpec,
        static: list[dict[str, torch.Tensor]] | None,
        device: torch.device,
        kind: type[SimulatedLayer] = SimulatedLayer,
    ) -> None:
        if spec.scheme.tiers:
            raise UnsupportedError(
                f"scheme {spec.scheme.name!r} has tiers, whose pages are quantized anew as they age; only the packed"
                " cache does that"
            )
        parameters.check(spec, static)
        shared = parameters.by_pool(spec, static or [{} for _ in spec.layers], device)
        orders = parameters.orders(spec, device)
        groups = {layer: group for group in spec.groups for layer in group.layers}
        super().__init__(layers=[kind(groups[i], shared[i], orders.get(i)) for i in range(len(spec.layers))])
