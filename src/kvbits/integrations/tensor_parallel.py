"""Models spread over ranks by tensor parallelism (`tp_plan="auto"`): each rank stores its own kv heads, and a file
holds all of them.

Every rank does the same to sequences of the same lengths, so page lists agree without a word between ranks. A page has
a struct for each kv head, which knows nothing of the others: caches of ranks side by side are the cache of one process,
byte for byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..cache import saved
from ..cache.group import GroupState
from ..cache.paged_cache import PagedCache
from ..cache.pool import Pool
from ..errors import UnsupportedError, counted
from ..spec import LayerGeometry, LayerGroup

GATHERED = 64 << 20
"""Bytes that a rank sends at once."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a model.

    Attributes:
        group: their process group; None for all processes there are.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, model: Any) -> Ranks:
        """Return ranks of a loaded Transformers model."""
        if (getattr(model, "_tp_size", None) or 1) == 1:
            return cls()
        mesh = model._device_mesh
        mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def __deepcopy__(self, memo: dict) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        return Ranks, (self.rank, self.size)  # process groups stay where they are

    def layers(self, layers: tuple[LayerGeometry, ...]) -> tuple[LayerGeometry, ...]:
        """Return the kv heads of each layer that are this rank's.

        Raises:
            UnsupportedError: kv heads that cannot be shared out.
        """
        if self.size == 1:
            return layers
        if bad := next((g.num_kv_heads for g in layers if g.num_kv_heads % self.size), None):
            raise UnsupportedError(
                f"{counted(bad, 'kv head')} cannot be shared by {self.size} ranks; use a number of ranks that divides"
                " them"
            )
        return tuple(dataclasses.replace(g, num_kv_heads=g.num_kv_heads // self.size) for g in layers)

    def static(self, static: list[dict[str, torch.Tensor]] | None) -> list[dict[str, torch.Tensor]] | None:
        """Return this rank's rows of calibrated parameters [kv heads, ..]."""
        if static is None or self.size == 1:
            return static
        return [
            {name: x.chunk(self.size)[self.rank].contiguous() for name, x in of_layer.items()} for of_layer in static
        ]


def save(cache: PagedCache, ranks: Ranks, path: str | Path) -> None:
    """Write the caches of all ranks as the file of one process; the first rank writes, all take part and leave when it
    is there.

    Raises:
        SpecError: see `PagedCache.save`; on all ranks.
    """
    groups, layers = cache.groups, cache.spec.layers  # waits for nothing but the device
    spec = dataclasses.replace(
        cache.spec, layers=tuple(dataclasses.replace(g, num_kv_heads=g.num_kv_heads * ranks.size) for g in layers)
    )
    first = ranks.rank == 0
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(
        told, ([{k: x.cpu() for k, x in s.items()} for s in cache.static], cache.saturated), group=ranks.group
    )
    whole = [_joined(state, group, ranks) for state, group in zip(groups, spec.groups, strict=True)]
    failed: list[Any] = [None]
    if first:
        static = [
            {name: torch.cat([of_rank[0][i][name] for of_rank in told]) for name in s}
            for i, s in enumerate(cache.static)
        ]
        saturated = [{kind: sum(of_rank[1][i][kind] for of_rank in told) for kind in "kv"} for i in range(len(layers))]
        contents = saved.Contents(
            spec,
            static,
            cache.built_for,
            saturated,
            cache.made_for,
            [g for g in whole if g is not None],
            cache.named_beyond_ids,
        )
        try:
            saved.save(contents, path)
        except Exception as error:  # the other ranks wait to hear of it
            failed = [error]
    dist.broadcast_object_list(
        failed, src=dist.get_global_rank(ranks.group, 0) if ranks.group is not None else 0, group=ranks.group
    )
    if failed[0] is not None:
        raise failed[0]


def _joined(state: GroupState, group: LayerGroup, ranks: Ranks) -> GroupState | None:
    """Return a layer group with the kv heads of all ranks, in host memory of the first; None on the others."""
    pools = {name: _gathered(pool, group, ranks) for name, pool in state.pools.items()}
    if ranks.rank:
        return None
    joined = GroupState(group, {name: pool for name, pool in pools.items() if pool is not None})
    joined.sequences, joined.keep_past = [s.clone() for s in state.sequences], state.keep_past
    return joined


def _gathered(pool: Pool, group: LayerGroup, ranks: Ranks) -> Pool | None:
    to = dist.get_global_rank(ranks.group, 0) if ranks.group is not None else 0

    def joined(slab: torch.Tensor) -> torch.Tensor:
        found = []
        for part in slab.split(max(1, GATHERED // pool.block_bytes)):
            parts = [torch.empty_like(part) for _ in range(ranks.size)] if ranks.rank == 0 else None
            dist.gather(part.contiguous(), parts, dst=to, group=ranks.group)
            found += [torch.cat(parts, 2).cpu()] if parts is not None else []
        return torch.cat(found) if found else slab[:0]

    work: Callable[[torch.Tensor], torch.Tensor] = joined
    if ranks.rank:
        for slab in pool.slabs:
            work(slab)
        return None
    return pool.remade(group, torch.device("cpu"), work)
