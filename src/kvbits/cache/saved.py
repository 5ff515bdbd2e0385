"""A paged cache as a file: a sequence of blobs that loads into byte-identical pages, shared pages stored once.

    ABOUT        one JSON object: the spec, capacities, whose weights filled the cache, how many sequences follow
    PARAMETERS   calibrated parameters, where the scheme has them
    PART .. END  of one sequence after the other (`cache.transfer`)

Pages stream from the pool to the file and back without a second copy of the cache in memory, and equal caches give
equal files. A file appears under its name only when it is complete.

A file may come from anywhere. Sizes, page lists and capacities are checked against each other, the file and this
machine's memory before anything is allocated by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import FileFormatError, PoolFullError, SpecError
from ..files import home, whole
from ..spec import CacheSpec
from . import blob, parameters, transfer
from .blob import Header, Identity, Kind
from .group import GroupState
from .pool import Pool
from .reading import OpenFile, read_source, require_whole
from .transfer import is_count

MOST_ABOUT = 1 << 28
"""Bytes of the ABOUT blob."""
MOST_LAYERS, MOST_PARAMETERS = 1 << 12, 1 << 20


@dataclass(frozen=True)
class Contents:
    """Contents of the file of a cache.

    Attributes:
        static: calibrated parameters per layer; empty where the scheme has none.
        built_for: sequences, and tokens of each, of the fixed capacity; None each for a cache that grows.
        saturated: per layer, elements of keys and values that were clamped.
        beyond_ids: what the tokens were computed from besides their ids (`PagedCache.beyond_ids`).
        made_for: fingerprint of the model whose keys and values these are; None if nobody said.
        groups: page lists and pages.
    """

    spec: CacheSpec
    static: list[dict[str, torch.Tensor]]
    built_for: tuple[int | None, int | None]
    saturated: list[dict[str, int]]
    made_for: str | None
    groups: list[GroupState]
    beyond_ids: Sequence[str] = ()


def save(contents: Contents, path: str | Path) -> None:
    """Write a cache to `path`, whole or not at all.

    Raises:
        SpecError: a directory is there, or none that the file could be in.
    """
    identity = Identity.of(contents.spec, contents.made_for, blob.calibration_id(contents.static))
    rows = range(len(contents.groups[0].sequences))
    with whole(home(path, "save:")) as partial, open(partial, "wb", buffering=0) as file:
        about = json.dumps(_describe(contents)).encode()
        blob.write_all(file.fileno(), blob.encode_bytes(Kind.ABOUT, identity, about))
        if any(contents.static):
            data = b"".join(blob.as_float32(x) for tensors in contents.static for _, x in sorted(tensors.items()))
            blob.write_all(file.fileno(), blob.encode_bytes(Kind.PARAMETERS, identity, data))
        for pieces in transfer.blobs_of(contents.groups, rows, identity):
            blob.write_all(file.fileno(), pieces)
        os.fsync(file.fileno())


def _describe(contents: Contents) -> dict[str, Any]:
    return {
        "spec": json.loads(contents.spec.to_json()),
        "built_for": list(contents.built_for),
        "made_for": contents.made_for,
        "beyond_ids": [*contents.beyond_ids],
        "saturated": contents.saturated,
        "static": [
            [layer, name, list(x.shape)]
            for layer, tensors in enumerate(contents.static)
            for name, x in sorted(tensors.items())
        ],
        "groups": [
            {"keep_past": g.keep_past, "capacity": {name: p.fixed_capacity for name, p in g.pools.items()}}
            for g in contents.groups
        ],
        "sequences": len(contents.groups[0].sequences),
    }


class SavedCache:
    """An open file that `save` wrote. First its settings, to build a cache from; then `fill` puts the pages there.

    Attributes:
        spec, saturated: as in `Contents`, of the shard that the file was opened for; the first one has all counts.
        static: the same, on the device that the file was opened for; None where the scheme needs none.
        built_for, made_for, beyond_ids: as in `Contents`.
    """

    def __init__(
        self, path: Path, file: OpenFile, expected: CacheSpec | None, device: torch.device, shard: tuple[int, int]
    ) -> None:
        self._path, self._file, self._device, self._offset = path, file, device, 0
        self._about = about = transfer.parse_json(self._read(Kind.ABOUT, MOST_ABOUT).rstrip(b"\0"))
        self.spec = _read_spec(path, about, expected)
        self.made_for: str | None = about["made_for"]
        if not isinstance(self.made_for, (str, type(None))):
            raise ValueError(f"made_for is {self.made_for!r}")
        self.beyond_ids: list[str] = about["beyond_ids"]
        if not isinstance(self.beyond_ids, list) or not all(isinstance(name, str) for name in self.beyond_ids):
            raise ValueError(f"beyond_ids is {self.beyond_ids!r}")
        self.built_for: tuple[int | None, int | None] = _counts(about["built_for"], "built_for")
        if any(n == 0 for n in self.built_for):
            raise ValueError(f"built_for is {self.built_for!r}")
        self.saturated = [{kind: s[kind] for kind in "kv"} for s in about["saturated"]]
        if len(self.saturated) != len(self.spec.layers) or not all(
            is_count(n) for s in self.saturated for n in s.values()
        ):
            raise ValueError("saturated is not a count of keys and values for every layer")
        self.static = self._read_static()
        self._identity = Identity.of(self.spec, self.made_for, blob.calibration_id(self.static or ()))
        if shard[1] > 1:
            self._cut(*shard)

    def _cut(self, rank: int, ranks: int) -> None:
        """Take one of equal parts of every layer's kv heads."""
        if bad := next((g.num_kv_heads for g in self.spec.layers if g.num_kv_heads % ranks), None):
            raise ValueError(f"{bad} kv heads, which {ranks} ranks cannot share")
        part = tuple(dataclasses.replace(g, num_kv_heads=g.num_kv_heads // ranks) for g in self.spec.layers)
        self.spec = dataclasses.replace(self.spec, layers=part)
        heads = self._identity.kv_heads // ranks
        self._identity = dataclasses.replace(self._identity, kv_heads=heads, shard=rank, shards=ranks)
        if self.static is not None:
            self.static = [{name: x.chunk(ranks)[rank].contiguous() for name, x in s.items()} for s in self.static]
        if rank:
            self.saturated = [{"k": 0, "v": 0} for _ in part]

    def _read(self, kind: Kind, most: int) -> bytes:
        """Read the data of the blob without pages at the present place of the file, and move on behind it."""
        header = Header.parse(self._file.bytes_at(self._offset, blob.HEADER_BYTES), str(self._path))
        if header.kind != kind:
            raise FileFormatError(
                f"{self._path} has a blob of kind {header.kind.name} at byte {self._offset} where {kind.name} belongs"
            )
        require_whole(self._file, header, str(self._path), self._offset)
        if header.data_bytes > most:
            raise ValueError(f"its {kind.name} blob has {header.data_bytes} bytes; at most {most} are taken")
        data = self._file.bytes_at(self._offset + blob.HEADER_BYTES + header.table_bytes, header.data_bytes)
        if blob.checksum(data) != header.checksum:
            raise FileFormatError(f"{self._path} is damaged: its {kind.name} blob has another checksum")
        self._offset += header.nbytes
        return data

    def _read_static(self) -> list[dict[str, torch.Tensor]] | None:
        listed = self._about["static"]
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.spec.layers]
        if not listed:
            return found if self.spec.scheme.needs_calibration else None
        shapes = [tuple(shape) for _, _, shape in listed]
        if not all(type(n) is int and 0 < n <= MOST_PARAMETERS for shape in shapes for n in shape):
            raise ValueError("shapes of calibrated parameters are not sizes")
        nbytes = sum(4 * math.prod(shape) for shape in shapes)
        data = self._read(Kind.PARAMETERS, most=nbytes + blob.ALIGNMENT - 1)
        if len(data) < nbytes:
            raise ValueError(f"calibrated parameters take {nbytes} bytes, their blob has {len(data)}")
        at = 0
        for (layer, name, _), shape in zip(listed, shapes, strict=True):
            if type(layer) is not int or not 0 <= layer < len(found) or type(name) is not str or name in found[layer]:
                raise ValueError(f"calibrated parameters {name!r} of layer {layer!r}")
            n = math.prod(shape)
            x = torch.from_numpy(np.frombuffer(data, "<f4", n, at).astype(np.float32).reshape(shape))
            if not bool(torch.isfinite(x).all()):
                raise ValueError(f"{name} of layer {layer} is not finite")
            found[layer][name] = x.to(self._device)
            at += 4 * n
        parameters.check(self.spec, found)
        return found

    def fill(self, groups: list[GroupState], grow: bool) -> None:
        """Put pages and page lists into the groups of a new cache, whose pools get the saved capacity, or with `grow`
        none.

        Raises:
            ValueError, PoolFullError: they do not fit the spec, each other or this machine.
            FileFormatError: a blob is damaged.
        """
        path, own, count = str(self._path), [g.group for g in groups], self._about["sequences"]
        sources = []
        while self._offset < self._file.size:
            sources.append(read_source(self._file, path, path, self._identity, own, self._offset))
            self._offset += sources[-1].header.nbytes
        if not is_count(count):
            raise ValueError(f"{count!r} sequences")
        plan = transfer.planned(sources, own, count, path)
        for group, about in zip(groups, self._about["groups"], strict=True):
            if type(about["keep_past"]) is not bool:
                raise ValueError(f"keep_past is {about['keep_past']!r}")
            group.keep_past = about["keep_past"]
            group.resize(count)
            self._size(group, about["capacity"], grow)
        transfer.admit(groups, range(count), plan, self._identity).run()

    def _size(self, group: GroupState, capacity: dict[str, int | None], grow: bool) -> None:
        """Give a group pools of the saved capacity."""
        names = list(group.pools)
        if set(capacity) != set(names):
            raise ValueError(f"pools {', '.join(capacity)} where the spec has {', '.join(names)}")
        sizes = dict(zip(names, _counts([capacity[name] for name in names], "capacity"), strict=True))
        wanted = sum(group.group.block_bytes(name) * (n or 0) for name, n in sizes.items())
        if not grow and wanted > (there := _memory(self._device)):
            raise ValueError(
                f"it has a fixed capacity of {wanted} bytes, but this machine has {there} in all; load it with"
                " grow=True"
            )
        for name, pool in group.pools.items():
            group.pools[name] = Pool(group.group, name, None if grow else sizes[name], pool.device)


@contextlib.contextmanager
def opened(
    path: str | Path, device: torch.device | str, spec: CacheSpec | None = None, shard: tuple[int, int] = (0, 1)
) -> Iterator[SavedCache]:
    """Open the file that `save` wrote, while a cache is built from it.

    Args:
        device: of the calibrated parameters.
        spec: what the caller expects; a file of another spec is refused. None takes what the file says.
        shard: (rank, ranks) to read that part of every layer's kv heads.

    Raises:
        FileFormatError: the file is truncated, corrupt, foreign, of another version or of another spec; the message
            says which. The cache that is being built may find it, too.
        SpecError: the given value is not a path.
    """
    path = home(path, "load:")
    if not path.is_file():
        found = "a folder is there" if path.is_dir() else "nothing is there"
        raise FileFormatError(f"no saved cache at {str(path)!r}: {found}; give the file that `cache.save(path)` wrote")
    file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    try:
        yield SavedCache(path, file, spec, torch.device(device), shard)
    except FileFormatError as error:
        said = str(error)
        raise FileFormatError(
            said if "again" in said else f"{said}; copy the file again, or save the cache again"
        ) from error
    except (
        SpecError,
        PoolFullError,
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise FileFormatError(
            f"{path} is a kvbits cache file with invalid contents ({type(error).__name__}: {error}); save the"
            " cache again"
        ) from error


def _read_spec(path: Path, about: dict[str, Any], expected: CacheSpec | None) -> CacheSpec:
    spec = about["spec"]
    if len(spec["layers"]) > MOST_LAYERS:
        raise ValueError(f"{len(spec['layers'])} layers, more than any model has")
    saved = CacheSpec.from_json(json.dumps(spec))
    if expected is not None and saved != expected:
        names = [f.name for f in dataclasses.fields(CacheSpec) if getattr(saved, f.name) != getattr(expected, f.name)]
        raise FileFormatError(
            f"{path} holds a cache of scheme {saved.scheme.name!r} for {len(saved.layers)} layers, which differs from"
            f" the expected one ({expected.scheme.name!r}, {len(expected.layers)} layers) in {', '.join(names)}; pass"
            " spec=None to take it as it is"
        )
    return saved


def _counts(stated: Any, what: str) -> Any:
    """Require whole numbers, or None each."""
    if not all(n is None or is_count(n) for n in stated):
        raise ValueError(f"{what} is {stated!r}")
    return tuple(stated)


def _memory(device: torch.device) -> int:
    """Return the bytes of memory of a device, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
