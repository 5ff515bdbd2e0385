"""A paged cache as a file: a safetensors file that loads into byte-identical pages, shared pages stored once.

    tensor  g<group>.<pool>          uint8 [pages in use, layers, kv heads, head_bytes], in order of page id
    tensor  static.<layer>.<name>    float32, calibrated parameters, where the scheme has them
    tensor  crc32                    uint8 [4], little-endian, over the metadata and all tensors before it
    metadata "kvbits"                one JSON object: versions, the spec, page lists (indices into the tensors), capacities, whose weights filled it

The header is written by hand (it is 8 bytes of length, JSON, then the data), so that pages stream from the pool to the file and back without a second
copy of the cache in memory, and so that equal caches give equal files. Slots that no sequence shows of pages that fill token by token are written as zeros:
they may hold tokens of sequences freed long ago. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import FileFormatError, SpecError
from ..files import require_file
from ..ops.reference.dequantize import section
from ..quant.packing import row_positions
from ..spec import FORMATS_VERSION, CacheSpec, LowLayout, PageLayout
from .group import GroupState
from .pool import Pool
from .sequence import Sequence

FILE_VERSION = 1
"""Version of this file layout; `FORMATS_VERSION` is that of the pages inside."""


@dataclass(frozen=True)
class Contents:
    """What a file holds of a cache.

    Attributes:
        static: calibrated parameters per layer; empty where the scheme has none.
        nonfinite: what the cache does with NaN and infinity.
        built_for: sequences, and tokens of each, of the fixed capacity; None each for a cache that grows.
        saturated: per layer, elements of keys and values that were clamped.
        made_for: fingerprint of the model whose keys and values these are; None if nobody said.
        groups: page lists and pages.
    """

    spec: CacheSpec
    static: list[dict[str, torch.Tensor]]
    nonfinite: str
    built_for: tuple[int | None, int | None]
    saturated: list[dict[str, int]]
    made_for: str | None
    groups: list[GroupState]


def save(contents: Contents, path: str | Path) -> None:
    """Write a cache to `path`, whole or not at all.

    Raises:
        SpecError: a directory is there, or none that the file could be in.
    """
    path = require_file(path, "save:")
    used = [{name: sorted({i for s in g.sequences for i in s.pages()[name]}) for name in g.pools} for g in contents.groups]
    about = json.dumps(_describe(contents, used))
    text = json.dumps(_header(contents, used, about), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            crc = zlib.crc32(about.encode())
            for chunk in _chunks(contents, used):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
            file.write(crc.to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are private; a saved cache follows the umask like any other file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class SavedCache:
    """An open file that `save` wrote. First its settings, to build a cache from; then `fill` puts the pages there.

    Attributes:
        spec, nonfinite, saturated, made_for: as in `Contents`.
        static: as in `Contents`, on the device that the file was opened for; None where the scheme needs none.
        built_for: as in `Contents`; None each, too, in files of before 2026-11-22.
    """

    def __init__(self, about: dict[str, Any], spec: CacheSpec, file: Any, device: torch.device) -> None:
        self._about, self._file, self.spec = about, file, spec
        static: list[dict[str, torch.Tensor]] = [{} for _ in spec.layers]
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name.startswith("static."):
                _, layer, parameter = name.split(".")
                static[int(layer)][parameter] = file.get_tensor(name).to(device)
        self.static = static if any(static) or spec.scheme.needs_calibration else None
        self.nonfinite: str = about["nonfinite"]
        self.built_for = _built_for(about)
        self.saturated = [{"k": int(s["k"]), "v": int(s["v"])} for s in about["saturated"]]
        self.made_for: str | None = about.get("made_for")
        if not isinstance(self.made_for, (str, type(None))):
            raise ValueError(f"made_for is {self.made_for!r}")

    def fill(self, groups: list[GroupState], grow: bool) -> None:
        """Put pages and page lists into the groups of a new cache, whose pools get the saved capacity, or with `grow` none.

        Raises:
            ValueError: they do not fit the spec, each other or the checksum.
        """
        file, about = self._file, self._about
        crc = zlib.crc32(file.metadata()["kvbits"].encode())
        for layer, tensors in enumerate(self.static or ()):
            for name in sorted(tensors):
                crc = zlib.crc32(file.get_tensor(f"static.{layer}.{name}").numpy().tobytes(), crc)
        for g, (group, saved) in enumerate(zip(groups, about["groups"], strict=True)):
            group.keep_past = bool(saved["keep_past"])
            group.resize(len(saved["sequences"]))
            for row, s in enumerate(saved["sequences"]):
                mass = {int(at): float(x) for at, x in s.pop("mass", {}).items()}  # JSON names are text
                group.replace(row, Sequence(**s, mass=mass))
            for name, pool in group.pools.items():
                pages, capacity = file.get_slice(f"g{g}.{name}"), saved["capacity"][name]
                _check_pages(pool, pages, capacity, g)
                group.pools[name] = pool = Pool(group.group, name, None if grow else capacity, pool.device)
                crc = _fill_pool(pool, pages, crc)
            _check(group, {name: file.get_slice(f"g{g}.{name}").get_shape()[0] for name in group.pools})
            _hold(group)
        if len({tuple(s.length for s in g.sequences) for g in groups}) != 1:
            raise ValueError("layers disagree about the sequences' lengths")
        if (stated := int.from_bytes(file.get_tensor("crc32").numpy().tobytes(), "little")) != crc:
            raise ValueError(f"its CRC-32 is {crc:#010x}, but the file says {stated:#010x}")


@contextlib.contextmanager
def opened(path: str | Path, device: torch.device | str, spec: CacheSpec | None = None) -> Iterator[SavedCache]:
    """The file that `save` wrote, while a cache is built from it.

    Args:
        device: of the calibrated parameters.
        spec: what the caller expects; a file of another spec is refused. None takes what the file says.

    Raises:
        FileFormatError: the file is truncated, corrupt, foreign, of another version or of another spec, also if only the cache that is being built
            finds that; the message says which.
    """
    path = Path(path)
    if not path.is_file():
        raise FileFormatError(f"no saved cache at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            about = _read_about(path, file.metadata())
            yield SavedCache(about, _read_spec(path, about, spec), file, torch.device(device))
    except FileFormatError:
        raise
    except SafetensorError as error:
        raise FileFormatError(f"{path} is truncated, corrupt or not a safetensors file ({error}); save the cache again") from error
    except (SpecError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path} is a kvbits cache file with contents that cannot be ({type(error).__name__}: {error}); save the cache again") from error


def _header(contents: Contents, used: list[dict[str, list[int]]], about: str) -> dict[str, Any]:
    """The safetensors header: name, dtype, shape and place of each tensor, in the order of `_chunks`."""
    header: dict[str, Any] = {}
    offset = 0

    def declare(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes

    for layer, tensors in enumerate(contents.static):
        for name, x in sorted(tensors.items()):
            declare(f"static.{layer}.{name}", "F32", list(x.shape), x.numel() * 4)
    for g, (group, ids) in enumerate(zip(contents.groups, used, strict=True)):
        for name, pool in group.pools.items():
            declare(f"g{g}.{name}", "U8", [len(ids[name]), *_block_shape(pool)], len(ids[name]) * pool.block_bytes)
    declare("crc32", "U8", [4], 4)
    return header | {"__metadata__": {"kvbits": about}}


def _describe(contents: Contents, used: list[dict[str, list[int]]]) -> dict[str, Any]:
    groups = []
    for g, ids in zip(contents.groups, used, strict=True):
        index = {name: {page_id: i for i, page_id in enumerate(ids[name])} for name in g.pools}
        sequences = []
        for s in g.sequences:
            s = s.clone()
            for name, held in s.pages().items():
                s.renumber(name, [index[name][i] for i in held])
            sequences.append(dataclasses.asdict(s))
        groups.append({"keep_past": g.keep_past, "capacity": {name: p.fixed_capacity for name, p in g.pools.items()}, "sequences": sequences})
    return {
        "file_version": FILE_VERSION,
        "formats_version": FORMATS_VERSION,
        "spec": json.loads(contents.spec.to_json()),
        "nonfinite": contents.nonfinite,
        "built_for": list(contents.built_for),
        **({} if contents.made_for is None else {"made_for": contents.made_for}),
        "saturated": contents.saturated,
        "groups": groups,
    }


def _chunks(contents: Contents, used: list[dict[str, list[int]]]) -> Iterator[bytes]:
    """The data section, a page at a time."""
    for tensors in contents.static:
        for _, x in sorted(tensors.items()):
            yield x.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
    for group, ids in zip(contents.groups, used, strict=True):
        for name, pool in group.pools.items():
            shown = _shown(group, name) if name in ("sink", "tail") else {}
            for page_id in ids[name]:
                block = pool.block(page_id)
                if name in ("sink", "tail") and shown[page_id] < pool.layout.page_size:
                    block = block.clone()
                    _clear(block, pool.layout, shown[page_id])
                yield block.cpu().contiguous().numpy().tobytes()


def _clear(block: torch.Tensor, layout: PageLayout | LowLayout, first: int) -> None:
    """Zero what belongs to the slots from `first` on: tokens that no sequence shows, or what lay there before there were pages."""
    for name, s in layout.sections.items():
        x = section(block, layout, name)
        if name.endswith("_raw"):
            x[..., first:, :] = 0
        elif "_plane" in name:
            x.flatten(-2)[..., row_positions(layout.page_size, s.shape[1], name[0])[first:].flatten().to(x.device)] = 0
        elif not name.endswith("_mean"):
            x[..., first:] = 0


def _shown(group: GroupState, pool: str) -> dict[int, int]:
    """Most tokens that any sequence shows of each page that fills token by token."""
    shown: dict[int, int] = {}
    for s in group.sequences:
        lengths = [min(s.length, group.group.num_sink_tokens)] if pool == "sink" else s.tail_lengths
        for page_id, n in zip(s.pages()[pool], lengths, strict=False):
            shown[page_id] = max(n, shown.get(page_id, 0))
    return shown


def _block_shape(pool: Pool) -> list[int]:
    return [pool.num_layers, pool.layout.num_kv_heads, pool.layout.head_bytes]


def _read_about(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    if not metadata or "kvbits" not in metadata:
        raise FileFormatError(f"{path} is a safetensors file but not a saved kvbits cache; PagedCache.save() writes those")
    about = json.loads(metadata["kvbits"])
    for name, ours in (("file_version", FILE_VERSION), ("formats_version", FORMATS_VERSION)):
        if about.get(name) != ours:
            raise FileFormatError(
                f"{path} has {name} {about.get(name)!r}, but this kvbits reads {ours}; load it with the version that wrote it, or build the cache again"
            )
    return about


def _read_spec(path: Path, about: dict[str, Any], expected: CacheSpec | None) -> CacheSpec:
    saved = CacheSpec.from_json(json.dumps(about["spec"]))
    if expected is not None and saved != expected:
        names = [f.name for f in dataclasses.fields(CacheSpec) if getattr(saved, f.name) != getattr(expected, f.name)]
        raise FileFormatError(
            f"{path} holds a cache of scheme {saved.scheme.name!r} for {len(saved.layers)} layers, which differs from the expected one "
            f"({expected.scheme.name!r}, {len(expected.layers)} layers) in {', '.join(names)}; pass spec=None to take it as it is"
        )
    return saved


def _check_pages(pool: Pool, pages: Any, capacity: int | None, group: int) -> None:
    num_pages = pages.get_shape()[0]
    if pages.get_dtype() != "U8" or list(pages.get_shape()) != [num_pages, *_block_shape(pool)]:
        raise ValueError(f"pages of group {group}, {pool.name} have shape {pages.get_shape()}, the spec says {_block_shape(pool)} each")
    if capacity is not None and capacity < num_pages:
        raise ValueError(f"{num_pages} pages in a {pool.name} pool of {capacity}")


def _fill_pool(pool: Pool, pages: Any, crc: int) -> int:
    """Copy saved pages in, as the first ids of the pool. Returns the CRC-32 that goes on from `crc`."""
    num_pages = pages.get_shape()[0]
    pool.reserve(num_pages)
    for i in range(num_pages):
        page = pages[i]
        crc = zlib.crc32(page.numpy().tobytes(), crc)
        pool.block(i).copy_(page)
    return crc


def _built_for(about: dict[str, Any]) -> tuple[int | None, int | None]:
    """Sequences and tokens of each that the saved cache was built for; files of before 2026-11-22 do not say."""
    batch_size, max_tokens = about.get("built_for", (None, None))
    for n in (batch_size, max_tokens):
        if n is not None and (type(n) is not int or n < 1):
            raise ValueError(f"built_for is {about['built_for']!r}")
    return batch_size, max_tokens


def _check(group: GroupState, num_pages: dict[str, int]) -> None:
    """Page lists that a cache could have made: kernels read memory by these numbers."""
    g = group.group
    for row, s in enumerate(group.sequences):
        runs: dict[str, tuple[Any, list[int]]] = {"closed": (s.closed, s.closed_lengths), "tail": (s.tail, s.tail_lengths)}
        sinks = min(s.length, g.num_sink_tokens) if s.sink else 0
        numbers = [s.length, s.released, s.dropped, s.speculated, s.closed_since, s.residual_length, *s.sink]
        numbers += [*s.tail, *s.tail_lengths, *s.closed_lengths, *(n for n in s.closed if n is not None)]
        numbers += [*s.boundaries, *s.lost, *(n for planes in s.low for n in planes if n is not None)]
        if not all(type(n) is int and n >= 0 for n in numbers) or len(s.sink) > 1:
            raise ValueError(f"page lists of sequence {row} hold something else than counts")
        if not len(s.low) == len(s.boundaries) == len(s.lost) == len(g.tiers) or any(len(planes) != len(s.closed) for planes in s.low):
            raise ValueError(f"low planes of sequence {row} do not fit its {len(s.closed)} closed pages and the scheme's {len(g.tiers)} tiers")
        if any(young is not None and old is None for a, b in itertools.pairwise(s.low) for young, old in zip(a, b, strict=True)):
            raise ValueError(f"a page of sequence {row} has a plane without the one that it refines")
        if any(page is None and plane is not None for planes in s.low for page, plane in zip(s.closed, planes, strict=True)):
            raise ValueError(f"a page of sequence {row} that was dropped has a plane")
        if any(i >= num_pages[name] for name, ids in s.pages().items() for i in ids):
            raise ValueError(f"sequence {row} names a page that is not in the file")
        if any(len(ids) != len(lengths) or any(not 0 < n <= g.page_size for n in lengths) for ids, lengths in runs.values()):
            raise ValueError(f"page lengths of sequence {row} do not fit its pages")
        if any(n != g.page_size for n in s.tail_lengths[:-1]) or s.released + sinks + sum(s.closed_lengths) + s.tail_tokens != s.length:
            raise ValueError(f"pages of sequence {row} do not add up to its {s.length} tokens")


def _hold(group: GroupState) -> None:
    """Count the pages that the loaded sequences hold, which are the first of each pool."""
    for name, pool in group.pools.items():
        held = Counter(i for s in group.sequences for i in s.pages()[name])
        for i in range(len(held)):
            if not held[pool.allocator.allocate()]:
                raise ValueError(f"{name} page {i} in the file belongs to no sequence")
            pool.allocator.share([i] * (held[i] - 1))
