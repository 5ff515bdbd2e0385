"""A saved cache read back (`serialize` writes it).

A file is data from anywhere: sizes, page lists and capacities are checked against each other, against the file and
against this machine's memory before anything is allocated by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import FileFormatError, SpecError, counted
from ..files import home
from ..spec import CacheSpec
from . import blob, parameters
from .blob import Header, Identity, Kind, Table
from .group import GroupState
from .pool import Pool
from .sequence import Sequence
from .serialize import FILE_VERSION

MOST_ABOUT = 1 << 28
"""Bytes of the ABOUT blob."""
MOST_COUNT = 1 << 40
"""Of pages, tokens and stored numbers."""
MOST_HEAD_DIM, MOST_PAGE_SIZE, MOST_SINKS, MOST_LAYERS, MOST_HEADS = 1 << 16, 1 << 16, 1 << 20, 1 << 12, 1 << 20


class SavedCache:
    """An open file that `save` wrote. First its settings, to build a cache from; then `fill` puts the pages there.

    Attributes:
        spec, saturated, made_for, beyond_ids: as in `Contents`.
        static: as in `Contents`, on the device that the file was opened for; None where the scheme needs none.
        built_for: as in `Contents`.
    """

    def __init__(
        self, path: Path, fd: int, about: dict[str, Any], spec: CacheSpec, offset: int, device: torch.device
    ) -> None:
        self._path, self._fd, self._about, self._offset = path, fd, about, offset
        self.spec, self._device = spec, device
        self.made_for: str | None = about["made_for"]
        if not isinstance(self.made_for, (str, type(None))):
            raise ValueError(f"made_for is {self.made_for!r}")
        self.beyond_ids: list[str] = about.get("beyond_ids", [])
        if not isinstance(self.beyond_ids, list) or not all(isinstance(name, str) for name in self.beyond_ids):
            raise ValueError(f"beyond_ids is {self.beyond_ids!r}")
        self.built_for = _built_for(about["built_for"])
        self.saturated = _saturated(about["saturated"], len(spec.layers))
        self.static = self._read_static()
        self._identity = Identity.of(spec, self.made_for, blob.calibration_id(self.static or ()))

    def fill(self, groups: list[GroupState], grow: bool) -> None:
        """Put pages and page lists into the groups of a new cache, whose pools get the saved capacity, or with `grow`
        none.

        Raises:
            ValueError: they do not fit the spec, each other or this machine.
            FileFormatError: a blob is damaged.
        """
        described = self._about["groups"]
        counts = [_page_counts(group, saved) for group, saved in zip(groups, described, strict=True)]
        held = sum(
            group.group.block_bytes(name) * n
            for group, pages in zip(groups, counts, strict=True)
            for name, n in pages.items()
        )
        if held > (size := os.fstat(self._fd).st_size):
            raise FileFormatError(
                f"{self._path} is truncated, or has contents that cannot be: it lists {held} bytes of pages and has"
                f" {size} in all"
            )
        fixed = [
            g.group.block_bytes(name) * n
            for g, s in zip(groups, described, strict=True)
            for name, n in s["capacity"].items()
            if n is not None
        ]
        if not grow and (wanted := sum(fixed)) > (there := _memory(self._device)):
            raise ValueError(
                f"it has a fixed capacity of {wanted} bytes, but this machine has {there} in all; load it with"
                " grow=True"
            )
        for group, saved, pages in zip(groups, described, counts, strict=True):
            if type(saved["keep_past"]) is not bool:
                raise ValueError(f"keep_past is {saved['keep_past']!r}")
            group.keep_past = saved["keep_past"]
            group.resize(len(saved["sequences"]))
            for row, s in enumerate(saved["sequences"]):
                group.replace(row, Sequence(**s))
            _check(group, pages)
        if len({tuple(s.length for s in g.sequences) for g in groups}) != 1:
            raise ValueError("layers disagree about the sequences' lengths")
        for group, saved, pages in zip(groups, described, counts, strict=True):
            for name, pool in group.pools.items():
                group.pools[name] = pool = Pool(
                    group.group, name, None if grow else saved["capacity"][name], pool.device
                )
                pool.reserve(pages[name])
            _hold(group, pages)
        self._read_pages(groups, counts)

    def _read_static(self) -> list[dict[str, torch.Tensor]] | None:
        listed = self._about["static"]
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.spec.layers]
        if not listed:
            return found if self.spec.scheme.needs_calibration else None
        header = _header(self._path, self._fd, self._offset, Kind.PARAMETERS)
        shapes = [tuple(shape) for _, _, shape in listed]
        if not all(type(n) is int and 0 < n <= MOST_HEADS for shape in shapes for n in shape):
            raise ValueError("shapes of calibrated parameters are not sizes")
        nbytes = sum(4 * math.prod(shape) for shape in shapes)
        if not nbytes <= header.data_bytes < nbytes + blob.ALIGNMENT:
            raise ValueError(f"calibrated parameters take {nbytes} bytes, their blob has {header.data_bytes}")
        data = _read_data(self._path, self._fd, self._offset, header)
        self._offset += header.nbytes
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

    def _read_pages(self, groups: list[GroupState], counts: list[dict[str, int]]) -> None:
        """Read the blobs into the pools, whose first pages they are."""
        seen: Counter[tuple[int, str]] = Counter()
        specs = [g.group for g in groups]
        end = os.fstat(self._fd).st_size
        while self._offset < end:
            header = _header(self._path, self._fd, self._offset, Kind.PART)
            if reason := header.refuses(self._identity):
                raise ValueError(f"the blob at byte {self._offset} is not this file's: {reason}")
            head = os.pread(self._fd, header.table_bytes, self._offset + blob.HEADER_BYTES)
            table = Table.parse(header, head, specs, str(self._path))
            for page in table.pages:
                if page.column != seen[page.group, page.pool] or page.column >= counts[page.group][page.pool]:
                    raise ValueError(f"{page.pool} page {page.column} of layer group {page.group} is not the next one")
                seen[page.group, page.pool] += 1
            blocks = [groups[p.group].pools[p.pool].block(p.column) for p in table.pages]
            read_blocks(
                self._fd, self._offset + blob.HEADER_BYTES + header.table_bytes, blocks, table.sums, str(self._path)
            )
            self._offset += header.nbytes
        if missing := [(g, name) for g, pages in enumerate(counts) for name, n in pages.items() if seen[g, name] != n]:
            raise FileFormatError(
                f"{self._path} is truncated: pages of layer group {missing[0][0]}, {missing[0][1]}, are missing; save"
                " the cache again"
            )


@contextlib.contextmanager
def opened(path: str | Path, device: torch.device | str, spec: CacheSpec | None = None) -> Iterator[SavedCache]:
    """The file that `save` wrote, while a cache is built from it.

    Args:
        device: of the calibrated parameters.
        spec: what the caller expects; a file of another spec is refused. None takes what the file says.

    Raises:
        FileFormatError: the file is truncated, corrupt, foreign, of another version or of another spec, also if only
            the cache that is being built finds that; the message says which.
        SpecError: what is given is no path.
    """
    path = home(path, "load:")
    if not path.is_file():
        found = "a folder is there" if path.is_dir() else "nothing is there"
        raise FileFormatError(f"no saved cache at {str(path)!r}: {found}; give the file that `cache.save(path)` wrote")
    with path.open("rb", buffering=0) as file:
        try:
            about, offset = _read_about(path, file.fileno())
            yield SavedCache(path, file.fileno(), about, _read_spec(path, about, spec), offset, torch.device(device))
        except FileFormatError as error:
            said = str(error)
            raise FileFormatError(
                said if "again" in said else f"{said}; copy the file again, or save the cache again"
            ) from error
        except (
            SpecError,
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise FileFormatError(
                f"{path} is a kvbits cache file with contents that cannot be ({type(error).__name__}: {error}); save"
                " the cache again"
            ) from error


def read_blocks(fd: int, offset: int, blocks: list[torch.Tensor], sums: list[np.ndarray], what: str) -> None:
    """Read pages [layers, H, head_bytes] from a file to where they belong, and check them.

    Raises:
        FileFormatError: truncated or damaged. The pages hold whatever was there.
    """
    on_host = not blocks or blocks[0].device.type == "cpu"
    staged = (
        blocks if on_host else [torch.empty(b.shape, dtype=torch.uint8, pin_memory=True, device="cpu") for b in blocks]
    )
    starts = itertools.accumulate((b.numel() for b in blocks), initial=offset)
    if (
        bad := blob.read_pages(fd, [blob.Read(at, b, s) for at, b, s in zip(starts, staged, sums, strict=False)])
    ) is not None:
        if (size := os.fstat(fd).st_size) < offset + sum(b.numel() for b in blocks):
            raise FileFormatError(
                f"{what} is truncated: it ends at byte {size}, in the middle of the pages at byte {offset}"
            )
        raise FileFormatError(
            f"{what} is damaged: page {bad} of the blob whose pages begin at byte {offset} has another checksum than"
            " its table says"
        )
    if staged is not blocks:
        for to, b in zip(blocks, staged, strict=True):
            to.copy_(b, non_blocking=True)
        torch.cuda.synchronize(blocks[0].device)


def _header(path: Path, fd: int, offset: int, kind: Kind) -> Header:
    """The header of the blob at a place of the file, which holds all of it."""
    header = Header.parse(
        os.pread(fd, blob.HEADER_BYTES, offset), str(path) if not offset else f"the blob at byte {offset} of {path}"
    )
    if header.kind != kind:
        raise FileFormatError(
            f"{path} has a blob of kind {header.kind.name} at byte {offset} where {kind.name} belongs; save the cache"
            " again"
        )
    if (end := offset + header.nbytes) > (size := os.fstat(fd).st_size):
        raise FileFormatError(
            f"{path} is truncated: it has {counted(size, 'byte')}, its blob at byte {offset} ends at {end}; save the"
            " cache again"
        )
    return header


def _read_data(path: Path, fd: int, offset: int, header: Header) -> bytes:
    """The data of a blob without pages."""
    data = os.pread(fd, header.data_bytes, offset + blob.HEADER_BYTES + header.table_bytes)
    if len(data) != header.data_bytes or blob.checksum(data) != header.checksum:
        raise FileFormatError(
            f"{path} is damaged: the {header.kind.name} blob at byte {offset} has another checksum than its header says"
        )
    return data


def _read_about(path: Path, fd: int) -> tuple[dict[str, Any], int]:
    """The JSON object at the beginning of a file, and where the next blob begins."""
    start = os.pread(fd, 16, 0)
    if start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < MOST_ABOUT:
        raise FileFormatError(
            f"{path} is a safetensors file: kvbits saved caches as such until file_version 1, this one reads"
            f" {FILE_VERSION}. Make the cache again (a prompt of its tokens) and save it, or load it with the version"
            " that wrote it"
        )
    header = _header(path, fd, 0, Kind.ABOUT)
    if header.data_bytes > MOST_ABOUT:
        raise FileFormatError(
            f"{path} says that its description has {header.data_bytes} bytes; more than {MOST_ABOUT} are refused"
        )
    about = json.loads(_read_data(path, fd, 0, header).rstrip(b"\0"), parse_constant=_refuse_constant)
    if not isinstance(about, dict) or about.get("file_version") != FILE_VERSION:
        version = about.get("file_version") if isinstance(about, dict) else None
        raise FileFormatError(
            f"{path} has file_version {version!r}, but this kvbits reads {FILE_VERSION}; load it with the version that"
            " wrote it, or build the cache again"
        )
    return about, header.nbytes


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


def _read_spec(path: Path, about: dict[str, Any], expected: CacheSpec | None) -> CacheSpec:
    spec = about["spec"]
    limits = {
        "head_dim": MOST_HEAD_DIM,
        "value_head_dim": MOST_HEAD_DIM,
        "page_size": MOST_PAGE_SIZE,
        "num_sink_tokens": MOST_SINKS,
        "num_tokens": MOST_COUNT,
    }
    for data in (*spec["layers"], spec["scheme"], *spec["scheme"]["tiers"]):
        for name, most in limits.items():
            if name in data and not (type(data[name]) is int and data[name] <= most):
                raise ValueError(f"{name} is {data[name]!r}; a whole number of at most {most} is taken from a file")
    if (
        len(spec["layers"]) > MOST_LAYERS
        or sum(int(g["num_kv_heads"]) for g in spec["layers"]) * (1 + len(spec["scheme"]["overrides"])) > MOST_HEADS
    ):
        raise ValueError(f"{len(spec['layers'])} layers with more kv heads and overrides than any model has")
    saved = CacheSpec.from_json(json.dumps(spec))
    if expected is not None and saved != expected:
        names = [f.name for f in dataclasses.fields(CacheSpec) if getattr(saved, f.name) != getattr(expected, f.name)]
        raise FileFormatError(
            f"{path} holds a cache of scheme {saved.scheme.name!r} for {len(saved.layers)} layers, which differs from"
            f" the expected one ({expected.scheme.name!r}, {len(expected.layers)} layers) in {', '.join(names)}; pass"
            " spec=None to take it as it is"
        )
    return saved


def _count(n: object) -> bool:
    return type(n) is int and 0 <= n <= MOST_COUNT


def _page_counts(group: GroupState, saved: dict[str, Any]) -> dict[str, int]:
    """Pages of each pool in the file, as far as they can be."""
    pages, capacity = saved["pages"], saved["capacity"]
    if set(pages) != set(group.pools) or set(capacity) != set(group.pools):
        raise ValueError(f"pools {', '.join(pages)} where the spec has {', '.join(group.pools)}")
    for name in group.pools:
        if not _count(pages[name]) or not (capacity[name] is None or _count(capacity[name])):
            raise ValueError(f"{pages[name]!r} pages in a {name} pool of {capacity[name]!r}")
        if capacity[name] is not None and capacity[name] < pages[name]:
            raise ValueError(f"{pages[name]} pages in a {name} pool of {capacity[name]}")
    return dict(pages)


def _memory(device: torch.device) -> int:
    """Bytes of memory of a device, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _built_for(stated: list[int | None]) -> tuple[int | None, int | None]:
    """Sequences and tokens of each that the saved cache was built for."""
    batch_size, max_tokens = stated
    for n in (batch_size, max_tokens):
        if n is not None and (not _count(n) or not n):
            raise ValueError(f"built_for is {stated!r}")
    return batch_size, max_tokens


def _saturated(stated: list[dict[str, int]], layers: int) -> list[dict[str, int]]:
    if len(stated) != layers or not all(_count(s[kind]) for s in stated for kind in "kv"):
        raise ValueError("saturated is not a count of keys and values for every layer")
    return [{"k": s["k"], "v": s["v"]} for s in stated]


def _check(group: GroupState, num_pages: dict[str, int]) -> None:
    """Page lists that a cache could have made: kernels read memory by these numbers."""
    g = group.group
    for row, s in enumerate(group.sequences):
        runs: dict[str, tuple[Any, list[int]]] = {
            "closed": (s.closed, s.closed_lengths),
            "tail": (s.tail, s.tail_lengths),
        }
        sinks = min(s.length, g.num_sink_tokens) if s.sink else 0
        numbers = [s.length, s.released, s.dropped, s.speculated, s.closed_since, s.residual_length, *s.sink]
        numbers += [*s.tail, *s.tail_lengths, *s.closed_lengths, *(n for n in s.closed if n is not None)]
        numbers += [*s.boundaries, *s.lost, *s.young]
        lists = [s.sink, s.closed, s.closed_lengths, s.tail, s.tail_lengths, s.boundaries, s.lost, s.young]
        if not all(_count(n) for n in numbers) or not all(type(x) is list for x in lists) or len(s.sink) > 1:
            raise ValueError(f"page lists of sequence {row} hold something else than counts")
        if not len(s.young) == len(s.boundaries) == len(s.lost) == len(g.tiers):
            raise ValueError(f"sequence {row} has other tiers than the {len(g.tiers)} of the scheme")
        if s.young != sorted(s.young) or any(n > len(s.closed) for n in s.young):
            raise ValueError(f"tiers of sequence {row} do not fit its {len(s.closed)} closed pages")
        if any(i >= num_pages[name] for name, ids in s.pages().items() for i in ids):
            raise ValueError(f"sequence {row} names a page that is not in the file")
        if any(
            len(ids) != len(lengths) or any(not 0 < n <= g.page_size for n in lengths) for ids, lengths in runs.values()
        ):
            raise ValueError(f"page lengths of sequence {row} do not fit its pages")
        if (s.released and g.geometry.sliding_window is None) or max(
            s.dropped, s.released, s.speculated, s.closed_since
        ) > s.length:
            raise ValueError(f"sequence {row} has left tokens behind that it cannot have")
        if (
            any(n != g.page_size for n in s.tail_lengths[:-1])
            or s.released + sinks + sum(s.closed_lengths) + s.tail_tokens != s.length
        ):
            raise ValueError(f"pages of sequence {row} do not add up to its {s.length} tokens")


def _hold(group: GroupState, num_pages: dict[str, int]) -> None:
    """Count the pages that the loaded sequences hold, which are the first of each pool."""
    for name, pool in group.pools.items():
        held = Counter(i for s in group.sequences for i in s.pages()[name])
        for i in range(num_pages[name]):
            if not held[pool.allocator.allocate()]:
                raise ValueError(f"{name} page {i} in the file belongs to no sequence")
            pool.allocator.share([i] * (held[i] - 1))
