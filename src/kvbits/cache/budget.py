"""A budget of bytes for all pools of a cache: pages begin in their widest form and give back low planes as it fills,
the finest and oldest first.

    [ 8 bits ........ ]  ->  [ 4 bits | 8 bits ]  ->  [ 4 bits ...... ]  full

A pass that finds no room is planned again with fewer planes: boundaries (`tiers`) come down, planes go back to their
pool, slabs that nobody needs then go back to the system, and other pools take their bytes. Nothing is quantized again.
Planes of a slab that is half empty move to free places of others first.

What does not fit even then is refused before anything goes back. Until a pass has ended, what it gave back is kept in
host memory beside the budget: a pass that fails leaves every plane as it was.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from weakref import WeakSet

from ..errors import PoolFullError, SpecError
from ..spec import CacheSpec, whole
from ..units import human_bytes, parse_bytes
from .group import GroupState, Snapshot
from .pool import Pool
from .sequence import Sequence

SLABS = 128
"""A slab takes at most this part of the budget, so that bytes change hands in small pieces."""
LEAST_CUT = 32
"""A boundary comes down by at least this part of itself, so that making room is rare."""
_MOST = 2**62


class OverBudgetError(PoolFullError):
    """A pool asked for `needed` bytes, more than the budget has left."""

    def __init__(self, needed: int, least: int | None = None) -> None:
        size = "a larger budget" if least is None else f"a budget of {least:,} bytes at least"
        super().__init__(
            f"even with every page in its fewest bits this does not fit; crop or free sequences, or give {size}"
        )
        self.needed = needed


class Budget:
    """Bytes that the pools of a cache may take together.

    Args:
        nbytes: most bytes, or a text like "2GB".

    Attributes:
        pools: those that share it.
        given_back: per tier, youngest first: planes given back because the budget was full.

    Raises:
        SpecError: no whole number of bytes, or a scheme without low planes that could be given back.
    """

    def __init__(self, nbytes: int | str, spec: CacheSpec) -> None:
        nbytes = parse_bytes(nbytes, "budget") if isinstance(nbytes, str) else nbytes
        self.nbytes = whole("budget", nbytes, 1, _MOST, "in bytes, or a text with its unit, like '2GB'")
        if not any(g.tiers for g in spec.groups):
            raise SpecError(
                f"scheme {spec.scheme.name!r} has no low planes that it could give back as a budget fills; leave the"
                " scheme out, give one with tiers, or fix a capacity by max_tokens"
            )
        self.pools: WeakSet[Pool] = WeakSet()  # a cycle would keep pages until the garbage collector comes by
        self.given_back = [0] * len(spec.scheme.tiers)

    @property
    def room(self) -> int:
        """Bytes that nobody has taken yet."""
        return self.nbytes - sum(p.nbytes for p in self.pools)

    def most_ids(self, pool: Pool) -> int:
        """Ids of the largest slab that a pool takes at once."""
        return max(1, self.nbytes // SLABS // pool.block_bytes)

    def granted(self, pool: Pool, missing: int, wanted: int) -> int:
        """How many ids a pool may add: `wanted` if there is room, `missing` at least.

        Raises:
            OverBudgetError: there is not.
        """
        if (needed := missing * pool.block_bytes) > self.room:
            raise OverBudgetError(needed)
        return min(wanted, self.room // pool.block_bytes)

    def require_room(self, least: int) -> None:
        """Refuse what does not fit with no plane left, before any goes back.

        Args:
            least: bytes of pages that are in use then.

        Raises:
            OverBudgetError: it does not.
        """
        if least > self.nbytes:
            raise OverBudgetError(least, least)

    def make_room(
        self,
        groups: list[GroupState],
        before: list[Snapshot],
        counts: list[int],
        needed: int,
        incoming: Rows[Sequence] = (),
    ) -> bool:
        """Lower the boundary of a tier, so that a pass of `counts` tokens needs `needed` bytes less, as far as that
        tier gives them. False: nothing is left.

        Nothing may be under way, see `trim`.

        Args:
            before: keep the bytes of planes that go back.
            incoming: of each group, a sequence from elsewhere, which loses planes as those that are here do.
        """
        for tier in range(len(self.given_back)):
            held = [
                (g, self._planes(g, row, tier, counts)) for g in groups if g.group.tiers for row in range(len(counts))
            ]
            held += [
                (g, sum(x is not None for x in s.low[tier]))
                for g, s in zip(groups, incoming, strict=False)
                if g.group.tiers
            ]
            most = max((n for _, n in held), default=0)
            if not most:
                continue
            a_page = sum(g.group.block_bytes(f"low{tier}") for g, n in held if n)
            boundary = max(0, most - max(1, -(-(needed - self.room) // a_page), -(-most // LEAST_CUT)))
            for g, was in zip(groups, before, strict=True):
                if g.group.tiers:
                    g.resize(len(counts))
                    for name, page_id in g.lower(tier, boundary):
                        g.pools[name].save(page_id, was.pools[name])
                        self.given_back[int(name[3:])] += 1
            for g, s in zip(groups, incoming, strict=False):
                for i, n in enumerate(g.thin(s, tier, boundary) if g.group.tiers else ()):
                    self.given_back[i] += n
            self.trim(groups, before)
            return True
        return False

    def admit(self, groups: list[GroupState], before: list[Snapshot], sequences: Rows[Sequence]) -> None:
        """Make room for a sequence from elsewhere: free pages in every pool for what its lists name in each group,
        which then may be fewer low planes.

        Raises:
            OverBudgetError: even without planes it does not fit. Whoever calls this takes everything back.
        """
        least = sum(
            p.allocator.num_used * p.block_bytes
            for g in groups
            for name, p in g.pools.items()
            if not name.startswith("low")
        )
        for g, s in zip(groups, sequences, strict=True):
            least += sum(
                len(ids) * g.pools[name].block_bytes for name, ids in s.pages().items() if not name.startswith("low")
            )
        self.require_room(least)
        while True:
            self.trim(groups, before)
            try:
                for g, s in zip(groups, sequences, strict=True):
                    for name, ids in s.pages().items():
                        g.pools[name].reserve(len(ids))
                return
            except OverBudgetError as error:
                if not self.make_room(groups, before, [0] * len(groups[0].sequences), error.needed, sequences):
                    raise

    @staticmethod
    def _planes(g: GroupState, row: int, tier: int, counts: list[int]) -> int:
        """Planes of a tier that a sequence holds once so many tokens more are there."""
        if row >= len(g.sequences):
            closed, boundary = counts[row] // g.group.page_size, g.group.boundaries[tier]
        else:
            s = g.sequences[row]
            closed, boundary = len(s.closed) + g.uses(s, counts[row])[1], s.boundaries[tier]
        return min(closed, boundary)

    @staticmethod
    def trim(groups: list[GroupState], before: list[Snapshot]) -> None:
        """Give back slabs that hold nothing, and those whose few pages fit elsewhere.

        Nothing may be under way: pages get other ids.
        """
        for g, was in zip(groups, before, strict=True):
            for name, pool in g.pools.items():
                while (at := pool.spare_slab()) is not None:
                    g.renumber(name, pool.drop_slab(at, was.pools[name]))

    def notes(self, groups: list[GroupState]) -> list[str]:
        """What was given back, in words."""
        taken = f"{human_bytes(self.nbytes - self.room)} of the budget of {human_bytes(self.nbytes)}"
        if not any(self.given_back):
            return [f"budget: {taken}; every page has all its bits"]
        pages = [
            [low[i] is not None for low in s.low]
            for g in groups
            if g.group.tiers
            for s in g.sequences
            for i, p in enumerate(s.closed)
            if p is not None
        ]
        return [
            f"budget: {taken}; to stay within it, pages gave up bits {sum(self.given_back):,} times;"
            f" {sum(map(all, pages))} of {len(pages)} have all bits"
        ]
