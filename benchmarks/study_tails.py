"""Loss of formats apart from that of tails: KL of every format and of other engines' recipes, simulated, with 0, 128
and 512 raw newest tokens, on the same tokens, with the bits held beside it.

    python benchmarks/study_tails.py MODEL --device cuda --length 8192 --windows 2 --out benchmarks/results/tails/M.json
    python benchmarks/study_tails.py MODEL --length 1024 --only klt4,q4_0_rotated --tails 0,128

Every token reads the cache as it does in decoding: those before it, as they are stored once itself is. A token is read
raw while fewer than a tail's tokens are newer, or while the tokens that are rounded with it are not all there; else as
its format gives it back. So one forward pass measures a window, and its figures are those of chunks of 1 token.

    presets     the pages of the package, by the reference quantizer; whoever rounds each token by itself (klt, int4)
                closes no page before it is read, so that its tail is as long as those of other engines
    peers       benchmarks/peers.py; first tokens and layers that a recipe leaves raw stay so
    own         the tail that a format or recipe has by itself, where it is none of those asked for: klt3's and klt2's
                64 raw tokens and 448 finer copies, OSCAR's 256 raw tokens

Bits held are those of a number of a cache of `--length` tokens: raw tokens, scales and copies counted, a half-filled
group as half a group. Rotations of OSCAR are fitted on the same text as klt's bases, which `kvbits eval` would take.
Every model's attention is float32.

A row is written to `--out` once it is measured. A run that was stopped continues: it leaves out rows that runs of the
same commit, facts and device have there already. Another `--out` measures them again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from run_files import append, arguments, measured_before
from study_codes import hidden, score
from transformers import AttentionInterface
from trim_results import rounded as six_digits

import kvbits
from kvbits.calibrate import kept
from kvbits.errors import UnsupportedError
from kvbits.evaluate.caches import factory
from kvbits.evaluate.calibrator import Calibrator, chosen_for
from kvbits.evaluate.fidelity import KL_QUANTILES, Fidelity
from kvbits.evaluate.texts import read_text, windows
from kvbits.geometry import layer_geometries
from kvbits.integrations.models import scheme_for
from kvbits.model_ref import ModelRef
from kvbits.spec import LayerGeometry, PerChannel, QuantSpec, Scheme

OURS = ("int8_centered", "int8", "int4", "kivi4", "kivi2", "klt4", "klt3", "klt2")
KVARN, OSCAR = "kvarn_k4v2_g128", "oscar_2bit"
NAMES = (*OURS, *peers.CACHES, KVARN, OSCAR)
"""Caches to measure unless told otherwise: presets, then peers."""
TAILS = (128, 0, 512)
ROWS = 512
"""Queries at a time."""
CALIBRATION_WINDOWS = 4
"""Windows of 1,024 tokens that OSCAR's moments are of."""

GivenBack = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(layer, keys [H, T, D], values [H, T, Dv]) in float32 -> the same as they are read back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Format of a cache, and the tokens that stay raw or finer beside it.

    Attributes:
        kind: "kvbits" or "simulated", as in results of `kvbits eval`.
        bits: of a number, by layer, scales counted; 16 for a layer that stays raw.
        group: tokens that are rounded together, counted from `first`.
        first: first tokens that stay raw.
        tail: raw newest tokens that its preset or recipe keeps.
        copied, copy_bits, copies: newest tokens after the raw ones that are read from finer copies.
    """

    name: str
    kind: str
    given_back: GivenBack
    bits: tuple[float, ...]
    source: str
    group: int = 1
    first: int = 0
    tail: int = 0
    copied: int = 0
    copy_bits: tuple[float, ...] = ()
    copies: GivenBack | None = None

    def with_tail(self, tail: int) -> Format:
        """Return the format with so many raw newest tokens and no copies."""
        return dataclasses.replace(self, tail=tail, copied=0, copy_bits=(), copies=None)

    def held_bits(self, layers: Sequence[LayerGeometry], length: int) -> float:
        """Return the bits held of a number of a cache of `length` tokens."""
        held = numbers = 0.0
        for i, g in enumerate(layers):
            seen = length if g.sliding_window is None else min(length, g.sliding_window)
            first = self.first if seen == length else 0
            raw = min(seen, first + self.tail + (self.group - 1) / 2)
            extra = min(self.copied, seen - raw) * self.copy_bits[i] if self.copied else 0.0
            held += g.token_elements * (16 * raw + self.bits[i] * (seen - raw) + extra)
            numbers += g.token_elements * seen
        return held / numbers


def preset(name: str, model: Any, calibration: Callable[[Scheme], Any]) -> Format:
    """Make the format of a preset of the package, as its reference quantizer stores it."""
    made = factory(model, name, calibration=calibration, simulate=True)
    pages = made.make(1, 1).layers
    scheme, size = made.scheme, pages[0].group.page_size

    def given_back(layer: int, k: torch.Tensor, v: torch.Tensor, pool: str) -> tuple[torch.Tensor, torch.Tensor]:
        first = scheme.num_sink_tokens
        count = -(-(k.shape[1] - first) // size)
        starts = np.arange(first, first + count * size, size)
        whole = (
            torch.nn.functional.pad(x[:, first:], (0, 0, 0, count * size - x.shape[1] + first))
            .unflatten(1, (count, size))
            .transpose(0, 1)
            for x in (k, v)
        )
        read = pages[layer].given_back(*whole, starts, pool)
        both = (x.transpose(0, 1).flatten(1, 2)[:, : k.shape[1] - first] for x in read)
        keys, values = (torch.cat([x[:, :first], y], 1) for x, y in zip((k, v), both, strict=True))
        return keys, values

    def bits(pool: str) -> tuple[float, ...]:
        return tuple(page.group.layouts[pool].bits_per_element for page in pages)

    copied = bool(scheme.copies)
    return Format(
        name=name,
        kind="kvbits",
        given_back=functools.partial(given_back, pool="closed"),
        bits=bits("closed"),
        source=scheme.source,
        group=1 if _alone(scheme.key) and _alone(scheme.value) else size,
        first=scheme.num_sink_tokens,
        tail=scheme.residual_length,
        copied=sum(c.num_tokens for c in scheme.copies),
        copy_bits=bits("copy0") if copied else (),
        copies=functools.partial(given_back, pool="copy0") if copied else None,
    )


def _alone(spec: QuantSpec) -> bool:
    """Return whether what a token is rounded to depends on no other token."""
    return not isinstance(spec.granularity, PerChannel) and spec.center != "channel"


def peer(name: str, layers: Sequence[LayerGeometry]) -> Format:
    """Make the format of a recipe of benchmarks/peers.py, but for OSCAR's.

    Raises:
        UnsupportedError: heads that the recipe does not store.
    """
    kind = "simulated"
    if name == "nvfp4":
        peers.require_heads(name, layers, 16)
        bits = tuple(4.5 + 64 / (64 * (g.head_dim + g.value_head_dim)) for g in layers)

        def pages(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _in_groups(k, 64, peers.nvfp4), _in_groups(v, 64, peers.nvfp4)

        source = "https://arxiv.org/abs/2509.25149"
        return Format(name=name, kind=kind, given_back=pages, bits=bits, source=source, group=64)
    if name == KVARN:

        def tiles(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            count = (k.shape[1] - peers.TILE) // peers.TILE * peers.TILE
            middle = slice(peers.TILE, peers.TILE + count)
            keys, values = k.clone(), v.clone()
            keys[:, middle], values[:, middle] = peers.kvarn(k[:, middle], v[:, middle])
            return keys, values

        return Format(
            name=name,
            kind=kind,
            given_back=tiles,
            bits=tuple(_mean_bits(g, *peers.kvarn_bits(g.head_dim, g.value_head_dim)) for g in layers),
            source="https://arxiv.org/abs/2606.03458",
            group=peers.TILE,
            first=peers.TILE,
        )
    recipe = peers.PEERS[name]
    peers.require_heads(name, layers, recipe.heads)
    raw = peers.raw_layers(recipe, len(layers))

    def rounded(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (k, v) if raw[layer] else (recipe.keys(k), recipe.values(v))

    found = tuple(
        16.0 if r else _mean_bits(g, recipe.key_bits(g.head_dim), recipe.value_bits(g.value_head_dim))
        for r, g in zip(raw, layers, strict=True)
    )
    return Format(name=name, kind=kind, given_back=rounded, bits=found, source=recipe.source)


def _mean_bits(g: LayerGeometry, key: float, value: float) -> float:
    return (key * g.head_dim + value * g.value_head_dim) / (g.head_dim + g.value_head_dim)


def _in_groups(x: torch.Tensor, size: int, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Round `x` [H, T, D] in groups of `size` tokens; the last one may be smaller."""
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))
    return how(whole).flatten(1, 2)[:, : x.shape[1]]


@dataclasses.dataclass
class Moments:
    """Moments that OSCAR's rotations of a layer are made from: float64 [D, D], sums over calibration tokens and kv
    heads.
    """

    keys: torch.Tensor | float = 0.0
    values: torch.Tensor | float = 0.0

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add queries [Hq, T, D], keys and values [H, T, D] of a text: of queries E[q q^T]; of values the same, each
        weighted by k^T E[q q^T] k of its head.
        """
        q, k, v = q.double().unflatten(0, (k.shape[0], -1)).flatten(1, 2), k.double(), v.double()
        seen = q.mT @ q
        weight = ((k @ seen) * k).sum(-1, keepdim=True)
        self.keys = self.keys + seen.sum(0)
        self.values = self.values + (v.mT @ (weight * v)).sum(0)


def oscar(layers: Sequence[LayerGeometry], moments: Sequence[Moments]) -> Format:
    """Make the format of OSCAR with rotations of `moments`."""
    rotations = [tuple(peers.oscar_rotation(torch.as_tensor(x)).float() for x in (m.keys, m.values)) for m in moments]

    def rounded(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys, of_values = rotations[layer]
        read = peers.oscar(k, of_keys, peers.OSCAR_KEPT[0]), peers.oscar(v, of_values, peers.OSCAR_KEPT[1])
        keys, values = (
            torch.cat([x[:, : peers.OSCAR_FIRST], y[:, peers.OSCAR_FIRST :]], 1)
            for x, y in zip((k, v), read, strict=True)
        )
        return keys, values

    return Format(
        name=OSCAR,
        kind="simulated",
        given_back=rounded,
        bits=tuple(2 + 32 / min(128, g.head_dim) for g in layers),
        source="https://arxiv.org/abs/2605.17757",
        first=peers.OSCAR_FIRST,
        tail=peers.OSCAR_NEWEST,
    )


class Reading:
    """The attention of a model whose cache has a format; a context in which the model has it.

    Attributes:
        format: what is simulated; None: keys and values as they are.
        learns: where moments are added to, by layer; None: nowhere.
    """

    NAME = "kvbits_study_tails"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.format: Format | None = None
        self.learns: list[Moments] | None = None
        AttentionInterface.register(self.NAME, self)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **how: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend to one text: query [1, Hq, T, D], key and value [1, H, T, D] -> [1, T, Hq, D].

        Raises:
            UnsupportedError: a soft cap or learned sinks, which this attention does not have.
        """
        if given := [name for name in ("softcap", "s_aux") if how.get(name) is not None]:
            raise UnsupportedError(
                f"{type(module).__name__} passes {given[0]} to attention, which this study leaves out; take a model"
                " without soft caps and learned sinks"
            )
        layer, q, k, v = module.layer_idx, query[0].float(), key[0].float(), value[0].float()
        if self.learns is not None:
            self.learns[layer].add(q, k, v)
        of, finer, far = self.format, [], (k, v)
        if of is not None:
            far = of.given_back(layer, k, v)
            finer = [(of.tail, k, v)]
            if of.copies is not None:
                finer.append((of.tail + of.copied, *of.copies(layer, k, v)))
        out = self._read(q * how["scaling"], far, finer, of, getattr(module, "sliding_window", None))
        return out.transpose(0, 1)[None].to(query.dtype), None

    @staticmethod
    def _read(
        q: torch.Tensor,
        far: tuple[torch.Tensor, torch.Tensor],
        finer: list[tuple[int, torch.Tensor, torch.Tensor]],
        of: Format | None,
        window: int | None,
    ) -> torch.Tensor:
        """Compute outputs [Hq, T, Dv] of scaled queries [Hq, T, D] over `far`. A token younger than the limit of an
        entry of `finer` is read from the first such entry.
        """
        heads, length = far[0].shape[:2]
        q = q.unflatten(0, (heads, -1))
        at = torch.arange(length, device=q.device)
        group, first = (of.group, of.first) if of else (1, 0)
        ends = (at - first).div(group, rounding_mode="floor") * group + group + first
        out = torch.empty(*q.shape[:-1], far[1].shape[-1], device=q.device)
        for begin in range(0, length, ROWS):
            rows = at[begin : begin + ROWS]
            end = begin + len(rows)
            mine = q[:, :, begin:end].flatten(1, 2)  # [H, queries of a kv head, D]
            age = (rows[:, None] + 1 - ends[:end]).repeat(q.shape[1], 1)
            scores = mine @ far[0][:, :end].mT
            parts = []
            for i in range(len(finer) - 1, -1, -1):
                limit, keys, values = finer[i]
                low = max(0, begin + 1 - limit - group)
                young = age[:, low:] < limit
                scores[..., low:] = torch.where(young, mine @ keys[:, low:end].mT, scores[..., low:])
                coarser = finer[i + 1][2] if i + 1 < len(finer) else far[1]
                parts.append((low, young, values[:, low:end] - coarser[:, low:end]))
            hidden_ones = at[:end] > rows[:, None]
            if window:
                hidden_ones |= at[:end] <= rows[:, None] - window
            p = torch.softmax(scores.masked_fill_(hidden_ones.repeat(q.shape[1], 1), -torch.inf), -1)
            found = p @ far[1][:, :end]
            for low, young, difference in parts:
                found += (p[..., low:] * young) @ difference
            out[:, :, begin:end] = found.unflatten(1, (q.shape[1], -1))
        return out.flatten(0, 1)

    def __enter__(self) -> Reading:
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(self.NAME)
        return self

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self._before)


def measured(
    reading: Reading, of: Format, tail: int | str, ids: torch.Tensor, references: list[torch.Tensor]
) -> dict[str, Any]:
    """Return the row of a format over all windows `ids`, and print it."""
    reading.format, began = of, time.monotonic()
    layers = layer_geometries(reading.model.config)
    texts = [
        score(reading.model, hidden(reading.model, one), reference, one, 0)
        for one, reference in zip(ids, references, strict=True)
    ]
    reading.format, found = None, Fidelity()
    for text in texts:
        for name in ("nlls", "kl", "tvd", "dp", "same"):
            getattr(found, name).extend(getattr(text, name))
    row = {
        "format": of.name,
        "kind": of.kind,
        "tail": tail,
        "raw_newest": of.tail,
        "raw_first": of.first,
        "group": of.group,
        "copied": of.copied,
        "stored_bits": of.held_bits(layers, 1 << 40),
        "held_bits": of.held_bits(layers, ids.shape[1]),
        "kl_mean": found.kl_mean,
        **{name: found.kl_quantile(q) for name, q in KL_QUANTILES.items()},
        "kl_max": found.kl_max,
        "kl_lost": found.num_lost / found.num_tokens,
        "top1_agreement": found.top1_agreement,
        "dp_rms": found.dp_rms,
        "tokens": found.num_tokens,
        "nll": found.nll / found.num_tokens,
    }
    print(
        f"{of.name:20} tail {tail!s:>4} {row['held_bits']:6.3f} bits  KL {found.kl_mean:.5f}  median"
        f" {row['kl_median']:.5f}  99.9 % {row['kl_p999']:.4f}  same token {found.top1_agreement:.2%}  RMS dp"
        f" {found.dp_rms:.2%}  {time.monotonic() - began:.1f} s",
        flush=True,
    )
    return six_digits(row | {"kl_windows": [text.kl_mean for text in texts]})


def tails_of(of: Format, wanted: Sequence[int]) -> dict[int | str, Format]:
    """Return name of a tail -> the format with it; "own" where its own is none of those wanted."""
    found: dict[int | str, Format] = {tail: of.with_tail(tail) for tail in wanted}
    return found | ({"own": of} if of.copied or of.tail not in wanted else {})


def main() -> None:
    parser = arguments(__doc__, of_model=True)
    parser.add_argument("--text", default="novel-start", help="what is scored, see kvbits eval --text")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--only", help="names of formats, separated by commas")
    parser.add_argument("--tails", default=",".join(map(str, TAILS)), help="raw newest tokens, separated by commas")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further row after so long")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no format is called {unknown[0]!r}; known: {', '.join(NAMES)}")
    wanted = [int(tail) for tail in args.tails.split(",")]
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    model, tokenizer = kvbits.load_model(args.model, dtype=args.dtype, device=args.device)
    ids = windows(tokenizer, source := read_text(args.text), count=args.windows, length=args.length)
    layers = layer_geometries(model.config)
    needing = [scheme_for(ModelRef.of(model), name) for name in names if name in OURS]
    _, given = chosen_for(ModelRef.of(model), [s for s in needing if s.needs_calibration], (source,), [], None)
    calibrator = Calibrator(model, tokenizer, None, tests=(source,), given=given, say=print)
    skipped: list[str] = []
    reading = Reading(model)

    def made(name: str) -> Format:
        if name in OURS:
            return preset(name, model, calibrator)
        if name != OSCAR:
            return peer(name, layers)
        peers.require_heads(name, layers, 0)
        reading.learns = [Moments() for _ in layers]
        with reading:
            for one in windows(tokenizer, kept.source(), count=CALIBRATION_WINDOWS, length=1024):
                hidden(model, one)
        learnt, reading.learns = reading.learns, None
        return oscar(layers, learnt)

    formats: dict[str, Format] = {}
    for name in names:
        try:
            formats[name] = made(name)
        except kvbits.KvbitsError as error:
            skipped.append(f"{name}: {error}")
            print(f"left out: {skipped[-1]}", flush=True)
    print(f"formats are ready after {time.monotonic() - began:.0f} s", flush=True)
    with reading:
        references = [hidden(model, one) for one in ids]
        # a run that is stopped has whole tails of all formats first
        order = [
            (tail, of)
            for tail in [*wanted, "own"]
            for f in formats.values()
            if (of := tails_of(f, wanted).get(tail)) is not None
        ]
        facts = {
            "model": Path(args.model).name,
            "text": source.name,
            "text_sha256": source.sha256,
            "length": args.length,
            "windows": args.windows,
            "dtype": args.dtype,
            "device": str(model.device),
        }
        there = measured_before(args.out, ("format", "tail"), **facts)
        for tail, of in order:
            if (of.name, tail) in there:
                print(f"there already: {of.name} with tail {tail}", flush=True)
            elif time.monotonic() - began > args.seconds:
                skipped.append(f"{of.name} with tail {tail}: --seconds {args.seconds:g} were over")
                print(f"left out: {skipped[-1]}", flush=True)
            else:
                append([measured(reading, of, tail, ids, references)], args.out, **facts)
        sources = {name: f.source for name, f in formats.items()}
        append([], args.out, **facts, left_out=skipped, sources=sources)


if __name__ == "__main__":
    main()
