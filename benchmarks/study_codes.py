"""Worth of codes, frames, means and tails to klt: KL of a whole model that reads every token as decoding would.

    python benchmarks/study_codes.py MODEL --device cuda --length 8192 --windows 4 --out codes.json
    python benchmarks/study_codes.py MODEL --length 1024 --only klt2,klt2-T --calibration a.txt --text wiki.test.raw

One pass over a text gives the keys and values that each position would have stored and what it would have read of those
before it: `Simulation` is the model's attention, and takes each page from the newest copy that a position still has. So
a variant costs one forward pass of a window, and its rows are those of chunks of 1 token. Variants are combined of

    T     trellis codes (kvbits.quant.trellis), levels of keys and values: uniform, fitted
    G     a graded tail: the newest 64 tokens raw, the next ones from a finer code
    M     the mean that is taken off a key follows its own position; M16: that of its 16 tokens of a page
    F     frames of 512 or 1,024 positions instead of 256

    T-uu, T-uf, T-ff: levels of keys, of values. s3: the 8-bit scales beside the best one tried, too.
    G4, G5: of klt4, of 5 bits; G5-384: as many tokens; re: coded again from the finer code when it leaves the tail.
    second: the second edition as it is built, T with M16 and F512 and copies in its own klt4; -uf, -ff: other levels.

`--moments` prints what frames and means do to the error of scores by the moments of keys alone, which one window of KL
cannot tell. table_codes.py writes the rows of KL as a table. `--repeated N` makes the last N tokens of each window a copy of its first ones, and scores these alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
from run_files import append, arguments
from transformers import AttentionInterface

import kvbits
from kvbits import schemes
from kvbits.calibrate.moments import RIDGE, Moments, far
from kvbits.evaluate.fidelity import Fidelity
from kvbits.evaluate.texts import read_text, windows
from kvbits.geometry import layer_geometries
from kvbits.integrations.rotary import with_rotary
from kvbits.quant import scales, trellis
from kvbits.quant.basis import hadamard, inverse
from kvbits.quant.rotary import turn
from kvbits.spec import LayerGeometry, QuantSpec
from kvbits.spec.bands import DISTORTION

SINKS, PAGE, RUN = 4, 64, 64
"""First tokens that stay raw, tokens of a page, positions of a frame that share a mean today."""
FITTED: trellis.Levels = trellis.UNIFORM | {
    2: trellis.mirrored(13, 40, 67, 121),
    3: trellis.mirrored(10, 33, 54, 79, 105, 137, 180, 249),
    4: trellis.mirrored(11, 34, 55, 78, 100, 123, 146, 170, 193, 219, 246, 276, 312, 357, 417, 512),
}
"""Fitted to a Gaussian by Lloyd's iteration over paths, then made smaller or larger so that the scale which is best for
integers is good for them. Those of 2 bits are as 1, 3, 5 and 9. Of 1, 5 and 6 bits uniform ones are as good.
"""
LEVELS = {"u": trellis.UNIFORM, "f": FITTED}
LOST = dict(enumerate(DISTORTION)) | {8: 7.5e-5}
"""Squared error of integers of a width, Gaussian of variance 1."""
ROWS = 512
"""Rows of scores, or of logits, at a time."""
KEPT = ("num_tokens", "nll", "tvd", "kl_max", "kl_worst", "kl_lost")
"""Fields of a window's `Fidelity.record` that a row keeps."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """Codes of a page's tokens.

    Attributes:
        bands: of keys, at any head_dim.
        bits: of values.
        levels: of trellis codes, "u" or "f", of keys and values; "" for plain integers.
        tried: scales that are tried with the trellis, from the one that is best for integers.
        run: positions of a frame that share a mean of keys, and tokens of a page that take one: that of the first.
        frame: positions of a frame.
    """

    bands: tuple[int, ...]
    bits: int
    levels: str = ""
    tried: tuple[int, ...] = (0,)
    run: int = RUN
    frame: int = 256

    def key(self) -> QuantSpec:
        return dataclasses.replace(schemes.get("klt4").key, bands=self.bands)

    def value(self, head_dim: int) -> QuantSpec:
        return dataclasses.replace(schemes.get("klt4").value, bands=(self.bits,) * -(-head_dim // 16))

    def stored_bits(self, head_dim: int) -> float:
        """Return the bits of a number, with its share of the scale."""
        return (sum(self.key().widths(head_dim)) / -(-head_dim // 16) + self.bits) / 2 + 8 / head_dim


@dataclasses.dataclass(frozen=True)
class Variant:
    """A cache to measure: what old tokens are read from, how many of the newest are raw, and what comes between.

    Attributes:
        again: the old code is made of what `near` gives back.
    """

    name: str
    far: Codes
    raw: int = 128
    near: Codes | None = None
    near_tokens: int = 0
    again: bool = False

    def held_bits(self, head_dim: int, length: int) -> float:
        """Return the bits of a number in a cache of `length` tokens, each counted once."""
        near = self.near_tokens if self.near else 0
        stored = max(0, length - SINKS - self.raw - near)
        inner = self.near.stored_bits(head_dim) * min(near, length - SINKS - self.raw) if self.near else 0.0
        return (16 * (length - stored - near) + inner + self.far.stored_bits(head_dim) * stored) / length


def klt(bits: int, **how: Any) -> Codes:
    """Return the codes of `klt2`, `klt3`, `klt4`, or of 5 bits: klt4's with one bit more in every band."""
    bands = schemes.get(f"klt{min(bits, 4)}").key.bands
    return Codes((8, 6, 6, 5, 5, 5, 5, 5) if bits == 5 else bands, bits, **how)


def variants(bits: int) -> dict[str, Variant]:
    """Return all variants of a width by name."""
    name = f"klt{bits}"
    found: dict[str, Variant] = {}

    def add(suffix: str, tail: tuple[int, int] | None = None, again: bool = False, **how: Any) -> None:
        finer = None if tail is None else klt(tail[0], **how | {"tried": (0,)})
        full = name + suffix
        found[full] = Variant(
            full, klt(bits, **how), 128 if finer is None else 64, finer, tail[1] if tail else 0, again
        )

    around = (0, -1, 1)
    add("")
    for levels in ("uu", "uf", "fu", "ff"):
        add(f"-T-{levels}", levels=levels)
    for levels in ("uu", "uf", "ff"):
        add(f"-T-{levels}-s3", levels=levels, tried=around)
    add("-M", run=1)
    add("-M16", run=16)
    add("-F512", frame=512)
    add("-F1024", frame=1024)
    for levels in ("uu", "uf"):
        add(f"-T-{levels}-M", levels=levels, run=1)
        add(f"-T-{levels}-M-F512", levels=levels, run=1, frame=512)
        add(f"-T-{levels}-M16-F512", levels=levels, run=16, frame=512)
        add(f"-T-{levels}-F512", levels=levels, frame=512)
        add(f"-T-{levels}-M-F1024", levels=levels, run=1, frame=1024)
        add(f"-T-{levels}-M-F512-s3", levels=levels, run=1, frame=512, tried=around)
    for tail in ((4, 448), (5, 384)):
        grade = f"-G{tail[0]}"
        add(grade, tail)
        for levels in ("uu", "uf"):
            add(f"-T-{levels}{grade}", tail, levels=levels)
            add(f"-T-{levels}{grade}-re", tail, True, levels=levels)
            add(f"-T-{levels}{grade}-M-F512", tail, levels=levels, run=1, frame=512)
            add(f"-T-{levels}{grade}-M-F512-re", tail, True, levels=levels, run=1, frame=512)
    second = {"run": 16, "frame": 512}
    copies = None if bits == 4 else klt(4, levels="uu", **second)
    for suffix, levels in (("", "uf" if bits == 2 else "uu"), ("-uf", "uf"), ("-ff", "ff")):
        full = f"{name}-second{suffix}"
        found[full] = Variant(
            full, klt(bits, levels=levels, **second), 64 if copies else 128, copies, 448 if copies else 0
        )
    return found


def integers(x: torch.Tensor, widths: tuple[int, ...], scale: torch.Tensor) -> torch.Tensor:
    """Round rows [..., D] to plain integers of each band's width: levels a scale apart, none is 0."""
    top = torch.tensor([2.0**b - 1 for b in widths], device=x.device).repeat_interleave(16)[: x.shape[-1]]
    codes = (x / scale.unsqueeze(-1) + top / 2).round().clamp(min=0).minimum(top)
    return (codes - top / 2) * scale.unsqueeze(-1)


class Seen(Moments):
    """Moments of one layer for any frame, from its keys as they came."""

    def __init__(self, geometry: LayerGeometry, what: str) -> None:
        super().__init__(schemes.get("klt4").key, geometry, what)
        self.geometry = geometry
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        super().add(q, k, positions)
        self.kept.append((k[..., self.order.to(k.device)].float().transpose(0, 1), positions))

    def fitted(self, codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `k_basis` float32 [H, D, D], and the means that are taken off keys in their frame (`means`)."""
        means = self.means(codes)
        return _Fixed(self, codes.key(), self.covariance(codes, means)).basis(), means

    def covariance(self, codes: Codes, means: torch.Tensor) -> torch.Tensor:
        """Return the covariance of keys in their frame about `means`, float64 [H, D, D]."""
        found, count = torch.zeros(1), 0
        for k, positions in self.kept:
            later = positions >= RUN
            k, positions = k[:, later], positions[later]
            frame = positions // codes.frame * codes.frame
            y = turn(k, frame, self.inv_freq, back=True).double()
            y = y - means.to(y)[:, positions - frame]
            found, count = found + (y.mT @ y).cpu(), count + y.shape[1]
        return found / count

    def expected(self, codes: Codes) -> torch.Tensor:
        """Return the squared error of scores that keys of integers have by their moments alone, in no unit, float64
        [H].
        """
        h = far(self.queries, self.inv_freq, self.farthest)
        h = h + RIDGE["queries"] * h.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(h.shape[-1])
        values, vectors = torch.linalg.eigh(h)
        root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
        spread = torch.linalg.eigvalsh(root @ self.covariance(codes, self.means(codes)) @ root).flip(-1).clamp(min=0)
        widths = codes.key().widths(spread.shape[-1])
        return (spread * torch.tensor([LOST[b] for b in widths]).repeat_interleave(16)[: spread.shape[-1]]).sum(-1)

    def means(self, codes: Codes) -> torch.Tensor:
        """Return the means, float64 [H, frame + PAGE, D]: a page may reach into the next frame."""
        at = torch.arange(codes.frame + PAGE)
        sums, count = torch.zeros(1), 0
        for k, positions in self.kept:
            later = positions >= RUN
            k, positions = k[:, later], positions[later]
            y = turn(k, positions // codes.run * codes.run, self.inv_freq, back=True).double()
            sums, count = sums + y.sum(1).cpu(), count + y.shape[1]
        mean, where = sums / count, at // codes.run * codes.run
        return turn(mean[:, None].expand(-1, len(at), -1), where, self.inv_freq)


class _Fixed(Moments):
    """A layer's moments with the covariance of keys given."""

    def __init__(self, seen: Seen, spec: QuantSpec, covariance: torch.Tensor) -> None:
        super().__init__(spec, seen.geometry, seen.what)
        self.load(seen.state())
        self._covariance = covariance

    def _spread(self) -> torch.Tensor:
        return self._covariance


class Simulation:
    """The attention of a model whose cache is a variant's; a context in which the model has it.

    Attributes:
        variant: what is simulated; None: keys and values as they are.
        seen: moments by layer, which are added to where `learns`.
    """

    NAME = "kvbits_study_codes"

    def __init__(self, model: Any) -> None:
        self.model, self.learns = model, False
        self.variant: Variant | None = None
        self._fitted: dict[Any, tuple[torch.Tensor, ...]] = {}
        self.layers = with_rotary(layer_geometries(model.config), model)
        self.seen = [Seen(g, f"layer {i}") for i, g in enumerate(self.layers)]
        AttentionInterface.register(self.NAME, self)

    def fitted(self, layer: int, codes: Codes) -> tuple[torch.Tensor, ...]:
        """Return basis, its inverse and means, float32 on the device."""
        name = layer, codes.bands, codes.run, codes.frame
        if name not in self._fitted:
            basis, means = self.seen[layer].fitted(codes)
            self._fitted[name] = tuple(t.float().to(self.model.device) for t in (basis, inverse(basis), means))
        return self._fitted[name]

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **how: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend to one text: query [1, Hq, T, D], key and value [1, H, T, D] -> [1, T, Hq, D]."""
        layer, scaling = module.layer_idx, how["scaling"]
        q, k, v = query[0].float(), key[0].float(), value[0].float()
        positions = torch.arange(q.shape[1], device=q.device)
        if self.learns:
            self.seen[layer].add(q.transpose(0, 1), k.transpose(0, 1), positions)
        copies, limits = [(k, v)], []
        if (of := self.variant) is not None:
            limits = [of.raw]
            if of.near:
                copies.append(self.given_back(layer, k, v, of.near))
                limits.append(of.raw + of.near_tokens)
            copies.append(self.given_back(layer, *(copies[-1] if of.again else (k, v)), of.far))
        # how old a token must be to be read from each copy: how many tokens are newer than its page
        page_end = (positions - SINKS).div(PAGE, rounding_mode="floor") * PAGE + PAGE + SINKS
        page_end[:SINKS] = 1 << 30
        group, window = q.shape[0] // k.shape[0], getattr(module, "sliding_window", None)
        out = torch.empty_like(q)
        for first in range(0, q.shape[1], ROWS):
            rows = positions[first : first + ROWS]
            end = int(rows[-1]) + 1
            age = rows[:, None] + 1 - page_end[:end]
            grade = sum((age >= limit).int() for limit in limits) if limits else torch.zeros_like(age)
            hidden = positions[:end] > rows[:, None]
            if window:
                hidden |= positions[:end] <= rows[:, None] - window
            for head in range(k.shape[0]):
                mine = q[head * group : (head + 1) * group, rows]
                scores = mine @ copies[0][0][head, :end].mT
                for i, (keys, _) in enumerate(copies[1:], 1):
                    scores = torch.where(grade == i, mine @ keys[head, :end].mT, scores)
                p = torch.softmax((scores * scaling).masked_fill(hidden, -torch.inf), -1)
                out[head * group : (head + 1) * group, rows] = sum(
                    (p * (grade == i) if limits else p) @ values[head, :end] for i, (_, values) in enumerate(copies)
                )
        return out.transpose(0, 1)[None].to(query.dtype), None

    def given_back(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, codes: Codes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [H, T, D] as pages give them back."""
        basis, back, means = self.fitted(layer, codes)
        order, inv_freq = self.seen[layer].order.to(k.device), self.seen[layer].inv_freq
        positions = torch.arange(k.shape[1], device=k.device)
        start = ((positions - SINKS).div(PAGE, rounding_mode="floor") * PAGE + SINKS).clamp(min=0)
        frame = start // codes.frame * codes.frame
        # a page's tokens take a mean by the run, counted from its first one
        mean = means[:, start + (positions - start) // codes.run * codes.run - frame]
        y = (turn(k[..., order], frame, inv_freq, back=True) - mean) @ basis
        y = self.rounded(y, codes.key(), "k", codes)
        keys = torch.empty_like(k)
        keys[..., order] = turn(y @ back + mean, frame, inv_freq)
        return keys, hadamard(self.rounded(hadamard(v), codes.value(v.shape[-1]), "v", codes))

    @staticmethod
    def rounded(x: torch.Tensor, spec: QuantSpec, kind: str, codes: Codes) -> torch.Tensor:
        """Return rows [H, T, D] as they are read back."""
        scale, widths = scales.fitted_scales(x, spec), spec.widths(x.shape[-1])
        if not codes.levels:
            return integers(x, widths, scale)
        levels = LEVELS[codes.levels["kv".index(kind)]]
        best, least = torch.zeros_like(x), torch.full_like(scale, torch.inf)
        around = scales.scale_codes(scale)
        for offset in codes.tried:
            scale = scales.scale_values((around + offset).clamp(scales.SMALLEST_CODE, scales.LARGEST_CODE))
            found = trellis.quantize(x, widths, kind, scale, levels)
            missed = trellis.units(x, scale) - trellis.level_of(found, widths, kind, levels)
            error = missed.square().sum(-1).float() * scale.square()
            better = error < least
            given = trellis.dequantize(found, widths, kind, scale, levels)
            best, least = torch.where(better.unsqueeze(-1), given, best), torch.where(better, error, least)
        return best

    def __enter__(self) -> Simulation:
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(self.NAME)
        return self

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self._before)


@torch.no_grad()
def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [T, width] of one text, before the head."""
    return model.get_decoder()(input_ids=ids[None].to(model.device), use_cache=False).last_hidden_state[0]


@torch.no_grad()
def score(model: Any, states: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor, first: int) -> Fidelity:
    """Compare predictions from `states` with those from `reference`, both of `hidden`, at positions from `first` on."""
    found = Fidelity(num_texts=1)
    head, ids = model.get_output_embeddings(), ids.to(model.device)
    for start in range(first, len(ids) - 1, ROWS):
        at = slice(start, min(start + ROWS, len(ids) - 1))
        log_p, of = (torch.log_softmax(head(x[at]).float(), -1) for x in (states, reference))
        found.add(log_p, of, of.exp(), ids[at.start + 1 : at.stop + 1])
        found.places += [(0, i + 1) for i in range(at.start, at.stop)]
    return found


def expected(simulation: Simulation) -> list[dict[str, Any]]:
    """Return rows: by frame, run and bits the error of scores as a share of that of frames of 256 and runs of 64,
    geometric mean over kv heads of all layers.
    """
    rows = []
    for bits in (2, 3, 4):
        today = [seen.expected(klt(bits)) for seen in simulation.seen]
        for frame, run in ((f, r) for f in (256, 512, 1024) for r in (64, 32, 16, 1)):
            of = [seen.expected(klt(bits, frame=frame, run=run)) for seen in simulation.seen]
            share = (torch.cat(of) / torch.cat(today)).log().mean().exp().item()
            rows.append({"bits": bits, "frame": frame, "run": run, "share": share})
            print(f"{bits} bits, frames of {frame}, runs of {run}: {share:.3f}", flush=True)
    return rows


def measured(
    simulation: Simulation,
    variant: Variant,
    ids: torch.Tensor,
    references: list[torch.Tensor],
    first: int,
    skipped: int,
) -> list[dict[str, Any]]:
    """Measure the rows of a variant, one a window of `ids`, numbered from `skipped` on, and print a line about them."""
    simulation.variant, began = variant, time.monotonic()
    head_dim, length = simulation.layers[0].head_dim, ids.shape[1]
    texts = [
        score(simulation.model, hidden(simulation.model, one), reference, one, first)
        for one, reference in zip(ids, references, strict=True)
    ]
    held, rows = variant.held_bits(head_dim, length), []
    for number, found in enumerate(texts, skipped):
        kl = torch.tensor(found.kl)
        row = {"variant": variant.name, "window": number, "held_bits": held, "kl_mean": found.kl_mean}
        row |= {"kl_error": kl.std().item() / len(kl) ** 0.5, "kl_median": kl.median().item()}
        record = found.record()
        rows.append(row | {"top1": found.top1_agreement} | {name: record[name] for name in KEPT})
    every = torch.tensor([kl for found in texts for kl in found.kl])
    lower = every.sort().values[: len(every) * 99 // 100]
    error = sum(row["kl_error"] ** 2 for row in rows) ** 0.5 / len(rows)
    print(
        f"{variant.name:24} {held:.3f} bits  KL {every.mean():.5f} ({error:.5f})  without the worst 1 %"
        f" {lower.mean():.5f}  median {every.median():.5f}  top-1 {sum(r['top1'] for r in rows) / len(rows):.4f}"
        f"  {time.monotonic() - began:.1f} s",
        flush=True,
    )
    return rows


def main() -> None:
    parser = arguments(__doc__, of_model=True)
    parser.add_argument("--text", default="novel-end", help="what is scored, see kvbits eval --text")
    parser.add_argument("--calibration", action="append", help="calibration text; default: novel-start and code")
    parser.add_argument("--calibration-windows", type=int, default=2, help="of 1,024 tokens, of each text")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="windows of the text that are left out")
    parser.add_argument("--first", type=int, default=0, help="first position that is scored")
    parser.add_argument("--bits", type=int, action="append")
    parser.add_argument("--only", help="names of variants, separated by commas")
    parser.add_argument("--repeated", type=int, default=0, help="last tokens that repeat the first ones")
    parser.add_argument("--moments", action="store_true", help="expected errors of keys by frame and run, and no KL")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further variant after so long")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, tokenizer = kvbits.load_model(args.model, dtype=args.dtype, device=args.device)
    began = time.monotonic()
    ids = windows(tokenizer, read_text(args.text), count=args.windows + args.skip, length=args.length)[args.skip :]
    if args.repeated:
        ids[:, -args.repeated :] = ids[:, PAGE : PAGE + args.repeated]
    first = args.length - args.repeated if args.repeated else args.first
    known = {name: v for bits in args.bits or (2, 3, 4) for name, v in variants(bits).items()}
    names = args.only.split(",") if args.only else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no variant is called {unknown[0]!r}; known: {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    with Simulation(model) as simulation:
        simulation.learns = True
        for text in args.calibration or ("novel-start", "code"):
            for one in windows(tokenizer, read_text(text), count=args.calibration_windows, length=1024):
                hidden(model, one)
        simulation.learns = False
        if args.moments:
            append(expected(simulation), args.out, model=Path(args.model).name)
            return
        references = [hidden(model, one) for one in ids]
        try:
            for name in names:
                if time.monotonic() - began > args.seconds:
                    break
                rows += measured(simulation, known[name], ids, references, first, args.skip)
        finally:  # a run that is stopped keeps what it has
            append(
                rows,
                args.out,
                model=Path(args.model).name,
                text=Path(args.text).name,
                calibration=args.calibration or ["novel-start", "code"],
                length=args.length,
                first=first,
                repeated=args.repeated,
                dtype=args.dtype,
                device=str(model.device),
                variants={name: dataclasses.asdict(known[name]) for name in names},
            )


if __name__ == "__main__":
    main()
