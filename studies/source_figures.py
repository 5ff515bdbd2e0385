"""Memory figures of the documents that this library follows, recomputed with the planner's own arithmetic, and where
they differ. No torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvbits import schemes as presets
from kvbits.planner import uniform
from kvbits.spec import CacheSpec
from kvbits.units import GB, GIB


@dataclass(frozen=True, kw_only=True)
class SourceFigure:
    """One memory figure of a source document, recomputed.

    Attributes:
        source, case: who says it, about what.
        printed: the figure as printed.
        formula: the arithmetic behind `nbytes`.
        nbytes: what the formula gives, in bytes.
        agrees: the printed number and unit are this many bytes, at the printed precision.
        verdict: why, where not.
    """

    source: str
    case: str
    printed: str
    formula: str
    nbytes: int
    agrees: bool
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gb": self.nbytes / GB, "gib": self.nbytes / GIB}


_PAPER = "INT8 GPU paper, Table 1"
_ARTICLE = "FP8/INT8 article, Llama-70B table"
_KVQUANT = "KVQuant review, Table 1"
_TIERED = "tiered cache article, 7B at 32k"


def _dense_bytes(layers: int, heads: int, context: int, batch: int, element_bytes: int) -> int:
    """Return the bytes of a dense cache with head_dim 128, from the same code that plans one."""
    return CacheSpec(scheme=presets.get("raw"), layers=uniform(layers, heads, 128)).raw_nbytes(
        context, batch, element_bytes
    )


def source_figures() -> tuple[SourceFigure, ...]:
    """Return every memory figure that the source documents print, with what their own formula gives."""
    return (*_paper_figures(), *_article_figures(), *_kvquant_figures(), *_tiered_figures())


def _paper_figures() -> list[SourceFigure]:
    case, formula = "32 layers, 32 heads, 128 dims, 131,072 tokens, {}", "2 x 32 x 32 x 128 x 131,072 x {} bytes"
    fp32, fp16 = _dense_bytes(32, 32, 131072, 1, 4), _dense_bytes(32, 32, 131072, 1, 2)
    return [
        SourceFigure(
            source=_PAPER,
            case=case.format("FP32"),
            printed="about 137 GB",
            formula=formula.format(4),
            nbytes=fp32,
            agrees=round(fp32 / GB) == 137,
            verdict="agrees in GB (128 GiB)",
        ),
        SourceFigure(
            source=_PAPER,
            case=case.format("FP16"),
            printed="nearly 70 GB",
            formula=formula.format(2),
            nbytes=fp16,
            agrees=round(fp16 / GB, -1) == 70,
            verdict="agrees in GB, rounded up (64 GiB)",
        ),
    ]


def _article_figures() -> list[SourceFigure]:
    found = []
    fp16 = _dense_bytes(80, 64, 4096, 32, 2)
    grouped = 2 * 80 * 8 * 128 * 4000 * 32 * 2  # 8 kv heads, "4K" = 4,000 tokens: 41.94 GB
    for name, printed, share in (("FP16", 41.9, 1), ("FP8/INT8", 21.0, 2), ("INT4", 10.5, 4)):
        nbytes = fp16 // share
        found.append(
            SourceFigure(
                source=_ARTICLE,
                case=f"80 layers, 64 heads, 128 dims, 4,096 tokens x 32, {name}",
                printed=f"{printed} GB",
                formula=f"2 x 80 x 64 x 128 x 4,096 x 32 x {2 / share:g} bytes",
                nbytes=nbytes,
                agrees=round(nbytes / GB, 1) == printed,
                verdict=(
                    f"differs: its own formula gives {nbytes // GIB} GiB = {nbytes / GB:.1f} GB,"
                    f" {nbytes / GB / printed:.1f} times as much. The printed figure is what 8 KV heads (the model's"
                    f" real GQA) and 4,000 tokens give: {grouped / share / GB:.1f} GB; scales are not counted"
                ),
            )
        )
    return found


def _kvquant_figures() -> list[SourceFigure]:
    found = []
    for model, layers, heads, printed in (("7B", 32, 32, 64.0), ("13B", 40, 40, 100.0), ("65B", 80, 64, 320.0)):
        nbytes = _dense_bytes(layers, heads, 131072, 1, 2)
        found.append(
            SourceFigure(
                source=_KVQUANT,
                case=f"LLaMA-{model}: {layers} layers, {heads} heads, 128 dims, 128K tokens, FP16",
                printed=f"{printed:.1f} GB",
                formula=f"2 x {layers} x {heads} x 128 x 131,072 x 2 bytes",
                nbytes=nbytes,
                agrees=round(nbytes / GB, 1) == printed,
                verdict=f"unit: {printed:.0f} is right in GiB; in GB it is {nbytes / GB:.1f}",
            )
        )
    base = _dense_bytes(32, 32, 131072, 1, 2)
    for bits, printed in ((433, 17.3), (333, 13.3), (233, 9.3)):
        nbytes = base * bits // 1600
        found.append(
            SourceFigure(
                source=_KVQUANT,
                case=f"LLaMA-7B, 128K tokens, KVQuant {bits // 100}-bit-1% ({bits / 100} bits on average)",
                printed=f"{printed} GB",
                formula=f"64 GiB x {bits / 100} / 16",
                nbytes=nbytes,
                agrees=round(nbytes / GB, 1) == printed,
                verdict=f"unit: {printed} is right in GiB; in GB it is {nbytes / GB:.1f}",
            )
        )
    return found


def _tiered_figures() -> list[SourceFigure]:
    elements = 2 * 32 * 32 * 128
    dense = _dense_bytes(32, 32, 32768, 1, 2)
    hot, warm, cold = elements * 2048 * 2, elements * 14336 * 17 // 16, elements * 16384 * 9 // 16
    total = hot + warm + cold
    parts = (
        ("hot 2,048 tokens, BF16 (the 4 sinks among them)", "1.07 GB", "2 x 32 x 32 x 128 x 2,048 x 2 bytes", hot, 2),
        (
            "warm 14,336 tokens, INT8, two FP32 per token and head",
            "4.0 GB",
            "2 x 32 x 32 x 128 x 14,336 x (1 + 8 / 128) bytes",
            warm,
            1,
        ),
        (
            "cold 16,384 tokens, INT4, two FP32 per token and head",
            "2.4 GB",
            "2 x 32 x 32 x 128 x 16,384 x (0.5 + 8 / 128) bytes",
            cold,
            1,
        ),
    )
    first = SourceFigure(
        source=_TIERED,
        case="32 layers, 32 heads, 128 dims, 32,768 tokens, BF16",
        printed="17.2 GB",
        formula="2 x 32 x 32 x 128 x 32,768 x 2 bytes",
        nbytes=dense,
        agrees=round(dense / GB, 1) == 17.2,
        verdict="agrees in GB (16 GiB); Llama 3 8B, which it names, has 8 KV heads: 4.29 GB",
    )
    zones = [
        SourceFigure(
            source=_TIERED,
            case=case,
            printed=printed,
            formula=formula,
            nbytes=n,
            agrees=f"{n / GB:.{digits}f} GB" == printed,
            verdict="agrees in GB",
        )
        for case, printed, formula, n, digits in parts
    ]
    last = SourceFigure(
        source=_TIERED,
        case="hot + warm + cold",
        printed="7.47 GB",
        formula="sum of the three zones",
        nbytes=total,
        agrees=round(total / GB, 2) == 7.47,
        verdict=(
            f"rounding: it adds the rounded zones; the exact sum is {total / GB:.2f} GB. The zones are the whole"
            f" context, so the 4 sinks lie inside them; kept beside them they add {4 * elements * 2 / 10**6:.1f} MB"
        ),
    )
    return [first, *zones, last]
