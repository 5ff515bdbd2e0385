"""Facts about a cache in words and numbers, for `PagedCache.explain` and refusals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import counted
from ..ops.break_even import small_on_gpu
from ..spec import CacheSpec, Copies, PerChannel, PerGroup, PerTensor, PerToken, QuantSpec
from ..units import human_bytes
from .group import GroupState

_WORDS = {
    "codes": "quantized",
    "raw": "not quantized",
    "sink": "of first tokens",
    "closed": "quantized",
    "tail": "of newest tokens",
    "copy": "of finer copies",
    "store": "storing tokens",
    "attend_fresh": "attention among new tokens",
    "attend": "attention to stored tokens",
    "close": "quantizing pages",
    "merge": "merging their results",
    "cpu": "CPU kernels",
    "cuda": "CUDA kernels",
    "reference": "plain PyTorch, slower",
}
"""Names in the printed lines for kinds of bytes, pools, operations and backends; pools of tiers are "in a younger
tier".
"""


class Explanation(dict[str, Any]):
    """The findings of `PagedCache.explain`: a dict, which prints as a few lines."""

    def of_model(self, numbers: list[int], beside: list[int], nbytes: int) -> Explanation:
        """Return the same with a model's numbers of its layers.

        Args:
            numbers: of each layer that stores pages.
            beside: layers that keep recurrent states or index keys, of so many bytes together.
        """
        found = Explanation(
            self | {"layers": [g | {"layers": [numbers[i] for i in g["layers"]]} for g in self["layers"]]}
        )
        found["saturated"] = {numbers[i]: s for i, s in self["saturated"].items()}
        if beside:
            found["states"] = {"layers": beside, "nbytes": nbytes}
            found["bytes"] = self["bytes"] | {"states": nbytes, "total": self["bytes"]["total"] + nbytes}
        return found

    def __str__(self) -> str:
        held = self["bytes"]
        kinds = (
            ", ".join(f"{_WORDS.get(k, k)} {n / held['total']:.0%}" for k, n in held.items() if k != "total" and n)
            or "nothing allocated yet"
        )
        lines = [
            f"{self['scheme']}: {self['bits_per_element']:.2f} bits a number once quantized",
            f"memory: {human_bytes(held['total'])} ({kinds})",
        ]
        lines += [_room(self["capacity"])] if self["capacity"] else []
        lines += [f"{_layers(g)}: {g['stored']}{_pages(g)}" for g in self["layers"]]
        if states := self.get("states"):
            lines.append(f"{_layers(states)}: recurrent states or index keys, {human_bytes(states['nbytes'])}")
        lines += _served(self["ops"]) or ["the first forward pass chooses the kernels"]
        if self["saturated"]:
            lines.append(
                f"clipped: {sum(n for s in self['saturated'].values() for n in s.values()):,} numbers, in layers"
                f" {ranges(self['saturated'])}"
            )
        return "\n".join([*lines, *(f"note: {n}" for n in self["notes"])])


def facts(
    spec: CacheSpec,
    groups: list[GroupState],
    built_for: tuple[int | None, int | None],
    saturated: list[dict[str, int]],
    ops: Iterable[str],
    notes: list[str],
) -> Explanation:
    """Return what a cache stores, which backends serve its ops, and where its bytes are.

    Args:
        built_for: sequences, and tokens of each, of the fixed capacity; None each for a cache that grows.
        ops: who serves each operation, and why the others do not.
        notes: what else a user should know; what a GPU serves badly at the present size comes behind it.
    """
    on_gpu = any(p.device.type == "cuda" for g in groups for p in g.pools.values())
    kinds = bytes_by_kind(groups)
    return Explanation(
        {
            "scheme": spec.scheme.name,
            "bits_per_element": round(spec.bits_per_element, 4),
            "capacity": _capacity(spec, *built_for),
            "layers": layer_groups(groups),
            "ops": sorted(ops),
            "notes": notes + (too_small_for_a_gpu(groups) if on_gpu else []),
            "bytes": kinds | {"total": sum(kinds.values())},
            "saturated": {i: s for i, s in enumerate(saturated) if any(s.values())},
        }
    )


def _capacity(spec: CacheSpec, sequences: int | None, tokens: int | None) -> dict[str, int | None] | None:
    """Return a fixed capacity: sequences, tokens of each that were asked for, and tokens that its whole pages really
    hold (None: any number).
    """
    return (
        None
        if sequences is None or tokens is None
        else {"sequences": sequences, "tokens": tokens, "room": spec.room(tokens)}
    )


def _room(capacity: dict[str, int]) -> str:
    asked, room = capacity["tokens"], capacity["room"]
    real = (
        ""
        if room == asked
        else "; windows hold any number"
        if room is None
        else f"; whole pages have room for {room:,}"
    )
    return f"capacity: {counted(capacity['sequences'], 'sequence')} of {counted(asked, 'token')}{real}"


def _layers(group: dict[str, Any]) -> str:
    return f"layer{'s' if len(group['layers']) > 1 else ''} {ranges(group['layers'])}"


def _pages(group: dict[str, Any]) -> str:
    used = {name: n["used"] for name, n in group["pages"].items() if n["used"]}
    pages = (
        ", ".join(
            f"{counted(n, 'page')} {_WORDS.get(name.rstrip('0123456789'), 'in a younger tier')}"
            for name, n in used.items()
        )
        or "no pages in use"
    )
    return f"; {pages}" if group["sliding_window"] is None else f", window {group['sliding_window']:,}; {pages}"


def _served(ops: Iterable[str]) -> list[str]:
    """Return a line for everybody who serves operations, with why others do not: "CPU kernels: quantizing pages"."""
    found: dict[str, list[str]] = {}
    for op, _, served in (one.partition(" by ") for one in ops):
        backend, *why = served.split(" ", 1)
        found.setdefault(" ".join([_WORDS.get(backend, backend), *why]), []).append(_WORDS.get(op, op))
    return [f"{served}: {', '.join(done)}" for served, done in found.items()]


def in_words(spec: QuantSpec) -> str:
    """Return a tensor's format for people, like "int4 in groups of 32"."""
    if spec.is_raw:
        return "raw"
    shared = {PerTensor: "with one scale", PerToken: "per token", PerChannel: "per channel"}
    size = (
        f"in groups of {spec.granularity.size}"
        if isinstance(spec.granularity, PerGroup)
        else shared.get(type(spec.granularity), repr(spec.granularity))
    )
    more = [
        *(["centred"] if spec.center else []),
        *(["static scales"] if spec.static else []),
        *([f"{spec.outliers:.0%} outliers"] if spec.outliers else []),
        *(["before the rotary embedding"] if spec.pre_rope else []),
    ]
    return " ".join([spec.format, size]) + (f" ({', '.join(more)})" if more else "")


def _copied(copies: tuple[Copies, ...]) -> str:
    """Name the copies that newest closed tokens are read from, for people; nothing where there are none."""
    return "".join(
        f"; {'the next' if i else 'newest closed'} {c.num_tokens:,} tokens read from copies, keys {in_words(c.key)},"
        f" values {in_words(c.value)}"
        for i, c in enumerate(copies)
    )


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, like "0, 4 to 6"."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found)


def bytes_by_kind(groups: list[GroupState]) -> dict[str, int]:
    """Return allocated bytes split into codes, scales, outliers, raw, padding and free."""
    kinds = dict.fromkeys(("codes", "scales", "outliers", "raw", "padding", "free"), 0)
    for g in groups:
        for pool in g.pools.values():
            for kind, n in pool.layout.bytes_by_kind().items():
                kinds[kind] += n * pool.num_layers * pool.allocator.num_used
            kinds["free"] += pool.nbytes - pool.block_bytes * pool.allocator.num_used
    return kinds


def layer_groups(groups: list[GroupState]) -> list[dict[str, Any]]:
    """Return what each layer group stores, and how many pages of each pool are in use."""
    return [
        {
            "layers": list(g.group.layers),
            "keys": repr(g.group.key),
            "values": repr(g.group.value),
            "stored": f"keys {in_words(g.group.key)}, values {in_words(g.group.value)}{_copied(g.group.copies)}",
            "sliding_window": g.group.geometry.sliding_window,
            "pages": {
                name: {"used": p.allocator.num_used, "allocated": p.allocator.capacity} for name, p in g.pools.items()
            },
        }
        for g in groups
    ]


def too_small_for_a_gpu(groups: list[GroupState]) -> list[str]:
    """Return notes on where a 16-bit cache would serve better on a GPU at the present size."""
    batch, tokens = len(groups[0].sequences), max((s.length for s in groups[0].sequences), default=0)
    if not tokens:
        return []
    sizes = {(min(tokens, g.group.geometry.sliding_window or tokens), g.group.geometry.token_elements) for g in groups}
    return [note for n, elements in sorted(sizes) if (note := small_on_gpu(batch, n, elements))]


def no_memory(spec: CacheSpec, batch_size: int, max_tokens: int, device: torch.device, error: Exception) -> str:
    """Return a message that a fixed capacity found no memory, how much it is, and what to change."""
    nbytes = spec.nbytes(max_tokens, batch_size)
    said = str(error).strip().split("\n")[0]
    return (
        f"a cache for {counted(batch_size, 'sequence')} of {max_tokens:,} tokens takes {nbytes:,} bytes"
        f" ({human_bytes(nbytes)}), which {device} does not give: {said}; lower max_tokens or batch_size, or leave both"
        " out: the cache then grows"
    )


def other_batch(held: int, batch_size: int) -> str:
    """Return what to call before a pass of another batch size."""
    n, rest = divmod(batch_size, held)
    if rest:
        return "use batch_select_indices() (PagedCache: select()), or reset() first"
    return (
        f"call batch_repeat_interleave({n}) first (PagedCache: repeat({n})) if each is to be continued in {n} ways, as"
        f" num_beams={n} and num_return_sequences={n} do; or reset()"
    )


def full(
    built_for: tuple[int | None, int | None],
    groups: list[GroupState],
    batch_size: int,
    num_tokens: int,
    error: str,
    room: int | None = None,
) -> str:
    """Return a message that tokens did not fit, into what, and why more capacity may not help.

    Args:
        built_for: sequences, and tokens of each, of the fixed capacity, where they are known.
        error: of the pool that is short.
        room: tokens of each sequence that the whole pages of a fixed capacity hold.
    """
    sequences, tokens = built_for
    built = "a cache of fixed capacity"
    if sequences is not None and tokens is not None:
        built = f"a cache built for {counted(sequences, 'sequence')} of {counted(tokens, 'token')}"
    held = [s.length for s in groups[0].sequences]
    now = f"of {counted(max(held), 'token')}" if held else "empty"
    text = f"{built}, now {now}, was given {batch_size} x {num_tokens} tokens more: {error}"
    text += "" if room in (None, tokens) else f". Its whole pages have room for {room} tokens of each sequence"
    text += _cut_pages(groups)
    windows = sorted({w for g in groups if g.keep_past and (w := g.group.geometry.sliding_window) is not None})
    if not windows:
        return text
    return (
        f"{text}. Tokens may be taken back (keep_past, assisted decoding), so layers with a sliding window of"
        f" {windows[0]} give nothing back until the next crop; a fixed capacity has no room for that, however large"
        " max_tokens is: let the cache grow"
    )


def _cut_pages(groups: list[GroupState]) -> str:
    """Return a message that crops went into closed pages, and the room that this takes; nothing where none did."""
    by_group = [(g, [n for s in g.sequences for n in s.closed_lengths if n < g.group.page_size]) for g in groups]
    g, cut = max(by_group, key=lambda x: len(x[1]), default=(None, []))
    if g is None or not cut:
        return ""
    return (
        f". {counted(len(cut), 'closed page')} of layers {g.group.layers[0]}.. show fewer than their"
        f" {g.group.page_size} tokens because crop() cut into them, and what is quantized is never filled up again: the"
        f" room of {counted(sum(g.group.page_size - n for n in cut), 'token')}. Crops of at most residual_length tokens"
        f" (here {g.group.residual_length}) reach raw tokens only: give it the number of tokens taken back at once, or"
        " raise max_tokens"
    )
