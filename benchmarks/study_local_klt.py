"""What a klt page costs whose tokens are packed one by one, simulated in float32: its mean, band widths, raw copies,
scale search and calibration.

    python benchmarks/study_local_klt.py MODEL --text wiki.test.raw --length 1024 --windows 4 --variants screens
    python benchmarks/study_local_klt.py MODEL --text wiki.test.raw --length 8192 --windows 1 --variants finals --device
    cuda

One forward pass a window, read as decoding reads: position t sees every earlier token as stored, its own too, but for
tokens that have raw copies. Calibrated on the shipped texts (novel and code), 4 windows of 1,024 tokens. A variant is
one line of `VARIANTS`. KL is against the same model with raw keys and values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any

import torch
from result_file import append, arguments
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import kvbits
from kvbits import schemes
from kvbits.calibrate.moments import LEAST_SPREAD, RIDGE
from kvbits.calibrate.observe import forward_with_queries
from kvbits.evaluate.calibrator import Sample, windows_of
from kvbits.evaluate.texts import mixed, read_text, windows
from kvbits.geometry import layer_geometries
from kvbits.integrations.rotary import with_rotary
from kvbits.quant import banded
from kvbits.quant.basis import hadamard
from kvbits.quant.rotary import turn
from kvbits.spec import FRAME, QuantSpec

PAGE, QUERIES = 64, 1024
GRAINS = (64, 16, 1)
LOOK = 32_768
"""Distances that moments of queries are averaged to."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to store.

    Attributes:
        bits: of values, and of keys in the mean; `bands` overrides the widths of key bands ("6 5 4 4").
        mean: "own" (closed page), "static" (constants of the model per page of a frame), "none".
        grain: tokens that share a static mean, the mean of keys turned back to the first of them.
        first: whether position 0 has a mean of its own.
        moment: of queries, "pages" (as calibration windows see them), or "far" (turned over log-uniform distances).
        sinks, newest: tokens with raw copies: the first ones, and the newest, own one included; `pages`: newest ones
            counted in whole pages instead.
        search: "full" (7 candidates), "short" (5), or "none" (the first guess).
    """

    name: str
    bits: int
    bands: str = ""
    mean: str = "static"
    first: bool = True
    moment: str = "far"
    sinks: int = 4
    newest: int = 128
    values: int | None = None
    search: str = "full"
    grain: int = PAGE


def variants(kind: str, head_dim: int) -> list[Variant]:
    """What is compared, for a head of `head_dim` channels."""
    best = BANDS[head_dim]
    found = []
    for bits in (4, 3, 2):
        final = [
            Variant(f"{bits} closed", bits, mean="own", first=False, moment="pages"),
            Variant(f"{bits} static", bits, bands=best[bits][0], moment="pages", first=False),
            Variant(f"{bits} static far", bits, bands=best[bits][0], first=False),
            Variant(f"{bits} static far first", bits, bands=best[bits][0]),
        ]
        if kind == "finals":
            found += final
            continue
        if kind == "long":
            found += [final[0], final[3]]
            continue
        found += final
        found += [Variant(f"{bits} bands {b}", bits, bands=b) for b in best[bits][1:]]
        one = Variant(f"{bits}", bits, bands=best[bits][0])
        found += [dataclasses.replace(one, name=f"{bits} sinks {s} newest {n}", sinks=s, newest=n) for s, n in COPIES]
        found += [
            dataclasses.replace(one, name=f"{bits} no copies, no mean of position 0", first=False, sinks=0, newest=0)
        ]
        found += [dataclasses.replace(one, name=f"{bits} search {s}", search=s) for s in ("short", "none")]
        found += [dataclasses.replace(one, name=f"{bits} no mean", mean="none")]
        found += [dataclasses.replace(one, name=f"{bits} mean of {g} tokens", grain=g) for g in GRAINS[1:]]
        found += [
            dataclasses.replace(one, name=f"{bits} sinks 0 newest 128, no mean of position 0", first=False, sinks=0)
        ]
    return found


COPIES = ((0, 0), (4, 0), (0, 128), (1, 128), (64, 128), (4, 64), (4, 32), (4, 192))
BANDS = {
    64: {
        4: ("6 5 4 4", "6 5 4 3", "6 5 5 3", "8 5 4 2", "5 5 4 4"),
        3: ("6 4 3 2", "6 4 3 1", "5 4 3 2", "6 4 4 1"),
        2: ("5 3 2 1", "5 3 2 0", "6 3 2 0", "4 3 2 1", "5 3 1 1"),
    },
    128: {
        4: ("8 6 5 5 4 4 3 3", "6 6 6 5 5 4 3 3", "8 6 5 4 4 4 4 3", "6 6 5 5 4 4 3 3"),
        3: ("6 5 5 4 4 3 2 1", "8 6 4 4 3 2 2 1", "6 5 4 4 3 3 2 1", "8 5 4 4 3 3 2 1"),
        2: ("6 5 3 3 2 2 1 0", "6 4 3 2 2 2 1 0", "6 4 3 3 2 2 1 1", "6 5 4 3 2 1 1 0"),
    },
    256: {
        4: ("8 6 6 6 6 5 5 5 5 4 4 4 4 3 3 2", "8 6 6 6 5 5 5 5 4 4 4 4 3 3 2 2", "8 8 6 6 6 5 5 4 4 4 4 4 3 3 2 2"),
        3: ("8 6 5 5 5 4 4 4 3 3 3 3 2 2 1 0", "6 6 5 5 4 4 4 3 3 3 3 2 2 2 1 0", "6 6 5 5 5 4 4 4 3 3 3 3 2 2 2 0"),
        2: ("6 5 4 4 4 3 3 2 2 2 2 1 1 0 0 0", "6 5 4 4 3 3 2 2 2 2 1 1 1 0 0 0", "8 5 4 4 3 3 3 2 2 2 1 1 0 0 0 0"),
    },
}


class Layer:
    """What calibration says of one layer's keys: [H, D, D] moments and means, on the model's device in float64."""

    def __init__(self, geometry: Any, device: torch.device) -> None:
        self.geometry, self.window = geometry, geometry.sliding_window
        d, h = geometry.head_dim, geometry.num_kv_heads
        self.order = torch.tensor(geometry.rotary.order(d), device=device)
        self.inv_freq = torch.tensor(geometry.rotary.frequencies(d), dtype=torch.float32, device=device)
        zeros = [torch.zeros(h, d, d, dtype=torch.float64, device=device) for _ in range(5)]
        self.queries, self.plain_queries, self.own, self.second, _ = zeros
        self.means = {grain: torch.zeros(h, d, dtype=torch.float64, device=device) for grain in GRAINS}
        self.first = torch.zeros(h, d, dtype=torch.float64, device=device)
        self.tokens = self.mean_tokens = self.windows = 0
        self.bases: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.kept: list[torch.Tensor] = []
        self.moments: dict[str, torch.Tensor] = {}

    def add(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """q [T, Hq, D], k [T, H, D] of one window, in positions 0 .. T - 1."""
        q, k = (x[..., self.order].double().transpose(0, 1) for x in (q, k))
        heads, tokens, _ = k.shape
        at = torch.arange(tokens, device=k.device)
        starts = at[: tokens // PAGE * PAGE] // PAGE * PAGE
        for grain in GRAINS:
            self.means[grain] += turn(
                k[:, PAGE : len(starts)], at[PAGE : len(starts)] // grain * grain, self.inv_freq, back=True
            ).sum(1)
        self.mean_tokens += len(starts) - PAGE
        self.first += k[:, 0]
        in_frame = turn(k[:, : len(starts)], starts // FRAME * FRAME, self.inv_freq, back=True)
        own = in_frame.unflatten(1, (-1, PAGE))
        own = (own - own.mean(2, keepdim=True)).flatten(1, 2)
        self.own += own.mT @ own
        self.kept.append(in_frame)
        self.tokens += len(starts)
        self.windows += 1
        for frame in range(0, len(starts), FRAME):
            first = frame + PAGE
            pages = min(FRAME, len(starts) - frame) // PAGE
            readers = (
                turn(q[:, first:], torch.tensor([frame], device=k.device), self.inv_freq, back=True)
                .unflatten(0, (heads, -1))
                .flatten(1, 2)
            )
            self.queries += pages * (readers.mT @ readers)
        plain = turn(q, at, self.inv_freq, back=True).unflatten(0, (heads, -1)).flatten(1, 2)
        self.plain_queries += plain.mT @ plain

    def static(self, grain: int) -> torch.Tensor:
        """[H, FRAME, D]: the mean that each token of a frame has."""
        offsets = torch.arange(FRAME, device=self.first.device) // grain * grain
        return turn((self.means[grain] / self.mean_tokens)[:, None].expand(-1, FRAME, -1), offsets, self.inv_freq)

    def moment(self, kind: str) -> torch.Tensor:
        if kind == "pages":
            return self.queries
        if "far" in self.moments:
            return self.moments["far"]
        most = min(self.window or LOOK, LOOK)
        distances = torch.logspace(
            0, math.log2(most), 256, base=2, dtype=torch.float64, device=self.first.device
        ).round()
        found = torch.zeros_like(self.plain_queries)
        for d in distances:
            once = turn(self.plain_queries, d.expand(1, 1), self.inv_freq)
            found += turn(once.mT.contiguous(), d.expand(1, 1), self.inv_freq)
        self.moments["far"] = found / len(distances)
        return self.moments["far"]

    def basis(self, spec: QuantSpec, kind: str, mean: str, grain: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(A, its inverse), float32 [H, D, D]."""
        d = len(self.order)
        key = (kind, mean, grain, spec.widths(d))
        if key not in self.bases:
            if mean == "own":
                spread = self.own / self.tokens
            else:
                static = self.static(grain) if mean == "static" else torch.zeros_like(self.static(grain))
                spread = torch.zeros_like(self.own)
                for kept in self.kept:
                    x = kept - static.repeat(1, -(-kept.shape[1] // FRAME), 1)[:, : kept.shape[1]]
                    x = x[:, PAGE:]
                    spread += x.mT @ x / (self.tokens - PAGE * len(self.kept))
            found = []
            for h, s in zip(self.moment(kind), spread, strict=True):
                eye = torch.eye(d, dtype=torch.float64, device=h.device)
                h, s = h + RIDGE["queries"] * h.diagonal().mean() * eye, s + RIDGE["keys"] * s.diagonal().mean() * eye
                values, vectors = torch.linalg.eigh(h)
                root = (vectors * values.sqrt()) @ vectors.mT
                lam, directions = torch.linalg.eigh(root @ s @ root)
                lam, directions = lam.flip(-1).clamp(min=0).sqrt(), directions.flip(-1)
                step = lam.clamp(min=LEAST_SPREAD * lam.max().item()) * banded.steps(spec, d).to(lam)
                found.append(root @ directions / step)
            basis = torch.stack(found)
            self.bases[key] = basis.float(), torch.linalg.inv(basis).float()
        return self.bases[key]

    def stored_keys(self, k: torch.Tensor, v: Variant, spec: QuantSpec) -> torch.Tensor:
        """Keys [H, T, D] as they are read back."""
        k = k[..., self.order].double()
        tokens = k.shape[1]
        at = torch.arange(tokens, device=k.device)
        frames = at // FRAME * FRAME
        a, inverse = self.basis(spec, v.moment, v.mean, v.grain)
        y = turn(k, frames, self.inv_freq, back=True) @ a.double()
        if v.mean == "own":
            whole = tokens // PAGE * PAGE
            mean = torch.cat(
                [
                    y[:, :whole].unflatten(1, (-1, PAGE)).mean(2).repeat_interleave(PAGE, 1),
                    y[:, whole:].mean(1, keepdim=True).expand(-1, tokens - whole, -1),
                ],
                1,
            )
            mean = mean.half().double()
        elif v.mean == "static":
            mean = (self.static(v.grain) @ a.double())[:, at % FRAME].float().double()
        else:
            mean = torch.zeros_like(y)
        if v.first:
            mean = mean.clone()
            mean[:, 0] = (self.first / self.windows)[:, None].matmul(a.double())[:, 0]
        x = (y - mean).float()
        back = _quantized(x, spec, v.search).double() + mean
        k = turn(back @ inverse.double(), frames, self.inv_freq).float()
        found = torch.empty_like(k)
        found[..., self.order] = k
        return found


def _quantized(x: torch.Tensor, spec: QuantSpec, search: str) -> torch.Tensor:
    if search == "full":
        scale = banded.fitted_scales(x, spec)
    else:
        was = banded.OFFSETS, banded.TURNED_OFFSETS
        few = ((0,), (-2, 2), (-1, 1)) if search == "short" else ((0,),)
        banded.OFFSETS = banded.TURNED_OFFSETS = few
        try:
            scale = banded.fitted_scales(x, spec)
        finally:
            banded.OFFSETS, banded.TURNED_OFFSETS = was
    return banded.dequantize(banded.quantize(x, spec, scale), spec, scale)


class Simulator:
    """Attention of a model in which some tokens are read as a variant stores them."""

    def __init__(self, model: Any) -> None:
        self.model, self.variant = model, None
        self.layers = [Layer(g, model.device) for g in with_rotary(layer_geometries(model.config), model)]
        self.share: torch.Tensor | None = None
        AttentionInterface.register("study_local_klt", self.attend)
        AttentionMaskInterface.register("study_local_klt", sdpa_mask)

    def specs(self, v: Variant, d: int) -> tuple[QuantSpec, QuantSpec]:
        scheme = schemes.get(f"klt{v.bits}")
        bands = (
            tuple(int(b) for b in v.bands.split())
            if v.bands
            else schemes.WIDE_BANDS.get((scheme.key.bands, d), scheme.key.widths(d))
        )
        key = dataclasses.replace(scheme.key, bands=bands)
        assert key.widths(d) == bands, (v, d)
        return key, (
            scheme.value
            if v.values is None
            else dataclasses.replace(scheme.value, bands=(v.values,) * len(scheme.value.bands))
        )

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Any:
        layer, v = self.layers[module.layer_idx], self.variant
        q, k, val = query[0].float(), key[0].float(), value[0].float()
        groups, tokens, d = q.shape[0] // k.shape[0], k.shape[1], k.shape[2]
        scaling = d**-0.5 if scaling is None else scaling
        at = torch.arange(tokens, device=q.device)
        if v is not None:
            ks, vs = self.specs(v, d)
            k2 = layer.stored_keys(k, v, ks)
            v2 = hadamard(_quantized(hadamard(val), vs, v.search))
        out = torch.empty_like(q)
        for begin in range(0, tokens, QUERIES):
            rows = at[begin : begin + QUERIES, None]
            end = min(begin + QUERIES, tokens)
            low = max(0, begin - layer.window) if layer.window else 0
            cols = at[None, low:end]
            seen = cols <= rows
            if layer.window:
                seen &= cols > rows - layer.window
            packed = None
            if v is not None:
                packed = (cols >= v.sinks) & (rows - cols >= v.newest)
            for head in range(k.shape[0]):
                qs = q[head * groups : (head + 1) * groups, begin:end] * scaling
                scores = qs @ k[head, low:end].T
                if packed is not None:
                    scores = torch.where(packed, qs @ k2[head, low:end].T, scores)
                p = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
                del scores
                if packed is None:
                    o = p @ val[head, low:end]
                    if self.share is not None:
                        far = (cols >= 4) & (rows - cols >= 128)
                        self.share[begin:end] += (p * far).sum(-1).mean(0) / (k.shape[0] * len(self.layers))
                else:
                    hidden = p * packed
                    o = hidden @ v2[head, low:end] + (p - hidden) @ val[head, low:end]
                out[head * groups : (head + 1) * groups, begin:end] = o
        return out.transpose(0, 1)[None].to(query.dtype), None

    def states(self, ids: torch.Tensor, variant: Variant | None) -> torch.Tensor:
        """[T, hidden]: what goes into the language head."""
        self.variant = variant
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("study_local_klt")
        try:
            return self.model.base_model(input_ids=ids[None].to(self.model.device), use_cache=False).last_hidden_state[
                0
            ]
        finally:
            self.model.set_attn_implementation(before)


def kl(model: Any, base: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL [T] in nats and agreement [T] of the likeliest token."""
    head, found, same = model.get_output_embeddings(), [], []
    for i in range(0, len(base), 512):
        a, b = (torch.log_softmax(head(x[i : i + 512]).float(), -1) for x in (base, states))
        found.append((a.exp() * (a - b)).sum(-1).clamp(min=0))
        same.append(a.argmax(-1) == b.argmax(-1))
    return torch.cat(found), torch.cat(same).float()


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--device")
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--skip", type=int, default=0, help="windows of the text left out first")
    parser.add_argument("--variants", default="screens", choices=("screens", "finals", "long"))
    parser.add_argument("--prompts", default="4x1024")
    parser.add_argument("--only", help="variants whose name begins so")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model, tokenizer = kvbits.load_model(args.model, dtype="float32", device=args.device)
    sim = Simulator(model)
    count, length = (int(n) for n in args.prompts.split("x"))
    began = time.perf_counter()
    for batch in windows_of(tokenizer, mixed([read_text("novel"), read_text("code")]), Sample(count, length)):
        for ids in batch:
            forward_with_queries(
                model, ids[None], None, lambda i, q, k: sim.layers[i].add(q[0], k[0]), set(range(len(sim.layers)))
            )
    print(f"calibrated in {time.perf_counter() - began:.1f} s", flush=True)
    wanted = [
        v
        for v in variants(args.variants, sim.layers[0].geometry.head_dim)
        if not args.only or v.name.startswith(args.only)
    ]
    found: dict[str, list[torch.Tensor]] = {v.name: [] for v in wanted}
    agree: dict[str, list[torch.Tensor]] = {v.name: [] for v in wanted}
    shares = []
    for ids in windows(tokenizer, read_text(args.text), count=args.skip + args.windows, length=args.length)[
        args.skip :
    ]:
        sim.share = torch.zeros(args.length, device=model.device)
        base = sim.states(ids, None)
        shares.append(sim.share.cpu())
        sim.share = None
        for v in wanted:
            one, same = kl(model, base, sim.states(ids, v))
            found[v.name].append(one.cpu())
            agree[v.name].append(same.cpu())
            print(f"{v.name:40s} {one.mean():.5f}  {time.perf_counter() - began:.0f} s", flush=True)
    octaves = [0, 256, 512] + [2**i for i in range(10, 16) if 2**i <= args.length]
    rows = []
    share = torch.stack(shares).mean(0)
    for v in wanted:
        all_kl = torch.stack(found[v.name])
        row = {
            **dataclasses.asdict(v),
            "kl": all_kl.mean().item(),
            "worst_token": all_kl.max().item(),
            "above_1_nat": (all_kl > 1).float().mean().item(),
            "top1_agreement": torch.stack(agree[v.name]).mean().item(),
            "kl_by_octave": {f"{a}-{b}": all_kl[:, a:b].mean().item() for a, b in itertools.pairwise(octaves)},
        }
        rows.append(row)
        print(
            f"{v.name:40s} KL {row['kl']:.5f}  worst {row['worst_token']:.2f}  top-1 {row['top1_agreement']:.3f}  "
            + "  ".join(f"{k} {x:.4f}" for k, x in row["kl_by_octave"].items())
        )
    print(
        "share of attention on packed tokens: "
        + "  ".join(f"{a}-{b} {share[a:b].mean():.3f}" for a, b in itertools.pairwise(octaves))
    )
    packed = {f"{a}-{b}": share[a:b].mean().item() for a, b in itertools.pairwise(octaves)}
    append(
        rows,
        args.out,
        benchmark="study_local_klt",
        model=Path(args.model).name,
        text=Path(args.text).name,
        windows=args.windows,
        skip=args.skip,
        length=args.length,
        prompts=args.prompts,
        packed_share=packed,
    )


if __name__ == "__main__":
    main()
