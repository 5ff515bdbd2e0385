"""A paged cache as a file: a sequence of blobs (`cache.blob`) that loads into byte-identical pages, shared pages stored
once.

    ABOUT        one JSON object: the spec, page lists (numbers of pages in the file), capacities, whose weights filled
                 it
    PARAMETERS   calibrated parameters, where the scheme has them
    PART ..      pages: of one sequence after the other, `BLOB_TOKENS` tokens in each blob, those that an earlier
                 sequence shares left out

Pages stream from the pool to the file and back without a second copy of the cache in memory, and equal caches give
equal files. Slots that no sequence shows of pages that fill token by token are written as zeros: they may hold tokens
of sequences freed long ago. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import home, whole
from ..ops.reference.dequantize import section
from ..quant.packing import row_positions
from ..spec import CacheSpec, PageLayout
from . import blob
from .blob import Identity, Kind, Page
from .group import GroupState

FILE_VERSION = 4
"""Version of what the ABOUT blob says; blobs and the pages inside have versions of their own."""
BLOB_TOKENS = 256
"""Tokens of the closed pages in one blob."""


@dataclass(frozen=True)
class Contents:
    """What a file holds of a cache.

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
    parts, numbers = _parts(contents.groups)
    with whole(home(path, "save:")) as partial, open(partial, "wb", buffering=0) as file:
        about = json.dumps(_describe(contents, numbers)).encode()
        blob.write_all(file.fileno(), blob.encode_bytes(Kind.ABOUT, identity, about))
        if any(contents.static):
            data = b"".join(blob.as_float32(x) for tensors in contents.static for _, x in sorted(tensors.items()))
            blob.write_all(file.fileno(), blob.encode_bytes(Kind.PARAMETERS, identity, data))
        for pieces in _encoded(contents.groups, identity, parts):
            blob.write_all(file.fileno(), pieces)
        os.fsync(file.fileno())


def _parts(groups: list[GroupState]) -> tuple[list[list[tuple[Page, int]]], list[dict[str, dict[int, int]]]]:
    """Pages of each blob of a file with their ids, and the number in the file of every page id, per group and pool:
    those of one sequence after the other.
    """
    parts: list[list[tuple[Page, int]]] = []
    numbers: list[dict[str, dict[int, int]]] = [{name: {} for name in g.pools} for g in groups]
    for row in range(len(groups[0].sequences)):
        rest: list[tuple[int, str, list[int]]] = []
        columns: list[list[tuple[int, str, int]]] = []
        for g, state in enumerate(groups):
            held = state.sequences[row].pages()
            n = max(1, BLOB_TOKENS // state.group.page_size)
            run = "tail" if state.group.fills_pages else "closed"
            for i in range(0, len(held[run]), n):
                if i // n == len(columns):
                    columns.append([])
                columns[i // n] += [(g, run, page_id) for page_id in held[run][i : i + n]]
            rest += [(g, name, ids) for name, ids in held.items() if name != run]
        sinks = [(g, name, i) for g, name, ids in rest if name == "sink" for i in ids]
        last = [(g, name, i) for g, name, ids in rest if name != "sink" for i in ids]
        for found in ([*sinks, *columns[0]] if columns else sinks, *columns[1:], last):
            new: list[tuple[Page, int]] = []
            for g, name, page_id in found:
                known = numbers[g][name]
                if page_id not in known:
                    known[page_id] = len(known)
                    new.append((Page(g, name, known[page_id]), page_id))
            if new:
                parts.append(new)
    return parts, numbers


def _encoded(
    groups: list[GroupState], identity: Identity, parts: list[list[tuple[Page, int]]]
) -> Iterator[list[memoryview]]:
    """The blobs of a file, one after the other."""
    shown = [{name: shown_slots(g, name) for name in ("sink", "tail")} for g in groups]
    for part in parts:
        blocks = []
        for page, page_id in part:
            block = groups[page.group].pools[page.pool].block(page_id)
            if page.pool in shown[page.group]:
                block = shown_part(
                    block, groups[page.group].pools[page.pool].layout, shown[page.group][page.pool][page_id]
                )
            blocks.append(blank(block, groups[page.group].pools[page.pool].layout))
        yield blob.encode(Kind.PART, identity, [page for page, _ in part], blob.on_host(blocks))


def _describe(contents: Contents, numbers: list[dict[str, dict[int, int]]]) -> dict[str, Any]:
    groups = []
    for g, known in zip(contents.groups, numbers, strict=True):
        sequences = []
        for s in g.sequences:
            s = s.clone()
            for name, held in s.pages().items():
                s.renumber(name, [known[name][i] for i in held])
            sequences.append(dataclasses.asdict(s))
        capacity = {name: p.fixed_capacity for name, p in g.pools.items()}
        groups.append(
            {
                "keep_past": g.keep_past,
                "capacity": capacity,
                "pages": {name: len(ids) for name, ids in known.items()},
                "sequences": sequences,
            }
        )
    return {
        "file_version": FILE_VERSION,
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
        "groups": groups,
    }


def shown_part(block: torch.Tensor, layout: PageLayout, shown: int) -> torch.Tensor:
    """A page [layers, H, head_bytes] with zeros where no sequence shows its slots: tokens of sequences freed long ago,
    or what lay there before there were pages. Itself where all are shown.
    """
    if shown == layout.page_size:
        return block
    block = block.clone()
    for name, s in layout.sections.items():
        x = section(block, layout, name)
        if name.endswith("_raw"):
            x[..., shown:, :] = 0
        elif "_plane" in name:
            x.flatten(-2)[..., row_positions(layout.page_size, s.shape[1], name[0])[shown:].flatten().to(x.device)] = 0
        elif not name.endswith("_mean"):
            x[..., shown:] = 0
    return block


def blank(block: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """A page [layers, H, head_bytes] with zeros between and behind its sections, where nobody ever writes. Itself where
    sections fill it.
    """
    ends = [s.offset + s.nbytes for s in layout.sections.values()]
    starts = [*[s.offset for s in layout.sections.values()][1:], layout.head_bytes]
    gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
    if gaps:
        block = block.clone()
        for end, start in gaps:
            block[..., end:start] = 0
    return block


def shown_slots(group: GroupState, pool: str) -> dict[int, int]:
    """Most tokens that any sequence shows of each page that fills token by token."""
    shown: dict[int, int] = {}
    for s in group.sequences:
        lengths = [min(s.length, group.group.num_sink_tokens)] if pool == "sink" else s.tail_lengths
        for page_id, n in zip(s.pages()[pool], lengths, strict=False):
            shown[page_id] = max(n, shown.get(page_id, 0))
    return shown
