"""Picture docs/results/figures/kl_over_bits.svg, drawn from benchmarks/results: `python docs/make_picture.py`. A test
compares.

KL over bits held at 8,192 tokens on one model, with equal tails (benchmarks/study_tails.py): the formats of kvbits as a
line, other caches as grey points.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "docs"))

from make_tables import BENCHMARKS, EQUAL_TAIL, HELD_AT, tails  # noqa: E402

from kvbits.errors import SpecError  # noqa: E402

PEERS_MODEL = "qwen2.5-coder-1.5b*"
"""Model of the picture."""
PICTURE = "docs/results/figures/kl_over_bits.svg"
LINE = ("int8_centered", "klt4", "klt3", "klt2")
"""Formats that the line joins; other presets are points of other people's recipes."""
LEFT, TOP, WIDTH, HEIGHT, BELOW = 66, 58, 510, 340, 93
"""Place of the plot in the picture, its size, and the height under it, pixels."""
SIZE, RADIUS, GAP = 14, 4, 7
"""Size of a label's letters, radius of a point, and gap between both, pixels."""
ABOVE, UNDER = 1.0, 0.5
"""Decades between the frame and the highest and the lowest point."""
ADVANCE = 0.56
"""Mean width of a letter, in sizes, of the fonts that are asked for; a little more than it is."""
STYLE = f"""
 text {{ font: {SIZE}px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #59636e }}
 .title {{ font-size: 17px; font-weight: 600; fill: #1f2328 }}
 .ours {{ font-weight: 600; fill: #0b62c9 }}
 .grid {{ stroke: #d1d9e0 }} .lead {{ stroke: #818b98 }} .frame {{ fill: none; stroke: #818b98 }}
 .line {{ fill: none; stroke: #0b62c9; stroke-width: 2 }} circle.ours {{ stroke: none }} circle.peer {{ fill: #818b98 }}
 @media (prefers-color-scheme: dark) {{
  text {{ fill: #9198a1 }} .title {{ fill: #f0f6fc }} .ours {{ fill: #58a6ff }} .line {{ stroke: #58a6ff }}
  .grid {{ stroke: #3d444d }} .frame {{ stroke: #656c76 }} circle.peer {{ fill: #9198a1 }}
 }}
"""


@dataclass(frozen=True)
class Point:
    """A cache: its name in the picture, bits held of a number, KL in nats, whether the line has it."""

    name: str
    bits: float
    kl: float
    ours: bool


@dataclass(frozen=True)
class Picture:
    """Content of the picture: the points, and lines of words about where they come from."""

    points: tuple[Point, ...]
    source: tuple[str, ...]


def equal_tails(benchmarks: Path) -> Picture | None:
    """Read what every cache costs with `EQUAL_TAIL` raw newest tokens at `HELD_AT` tokens; None where that was not
    measured on the model of the page of points.
    """
    for (model, length), rows in tails(benchmarks).items():
        if length == HELD_AT and fnmatch.fnmatch(model, PEERS_MODEL):
            said = (
                f"{model}, windows of {length:,} tokens of text;",
                f"every cache keeps its newest {EQUAL_TAIL} tokens in 16 bits.",
                "Blue: the best presets of kvbits. Grey: other formats.",
            )
            found = [
                Point(name, row["held_bits"], row["kl_mean"], name in LINE)
                for (name, tail), row in rows.items()
                if tail == EQUAL_TAIL
            ]
            return Picture(tuple(found), said)
    return None


def drawn(benchmarks: Path) -> Picture:
    """Read what is to be drawn.

    Raises:
        SpecError: it was not measured.
    """
    if (found := equal_tails(benchmarks)) is None:
        raise SpecError(
            f"no tails of {PEERS_MODEL} at {HELD_AT:,} tokens in {benchmarks}; run benchmarks/study_tails.py MODEL"
            f" --length {HELD_AT} --out {benchmarks}/tails/MODEL.json"
        )
    return found


def svg(picture: Picture) -> str:
    """Write a picture as SVG: axes of bits and of the logarithm of KL, every point named, for light and dark pages."""
    points = picture.points
    low, high = math.floor(min(p.bits for p in points)), math.ceil(max(p.bits for p in points))
    decades = [math.log10(p.kl) for p in points]
    least, most = min(decades) - UNDER, max(decades) + ABOVE
    whole = range(math.ceil(least), math.floor(most) + 1)

    def x(bits: float) -> float:
        return LEFT + WIDTH * (bits - low) / (high - low)

    def y(exponent: float) -> float:
        return TOP + HEIGHT * (most - exponent) / (most - least)

    placed = {p: (x(p.bits), y(math.log10(p.kl))) for p in points}
    parts = [
        *(_line("grid", x(b), TOP, x(b), TOP + HEIGHT) for b in range(low + 1, high)),
        *(_line("grid", LEFT, y(e), LEFT + WIDTH, y(e)) for e in whole),
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
        *(_text(x(b), TOP + HEIGHT + 18, str(b), anchor="middle") for b in range(low, high + 1)),
        *(_text(LEFT - 8, y(e) + 4, f"{10.0**e:.{max(0, -e)}f}", anchor="end") for e in whole),
        _text(LEFT, 22, "What a smaller cache costs", name="title"),
        _text(LEFT, 45, "KL from the 16-bit cache (nats, lower is better) over bits per number"),
        *(_text(LEFT, TOP + HEIGHT + 46 + 19 * i, line) for i, line in enumerate(picture.source)),
    ]
    ours = sorted((p for p in points if p.ours), key=lambda p: p.bits)
    way = " ".join(f"{placed[p][0]:.1f},{placed[p][1]:.1f}" for p in ours)
    parts.append(f'<polyline class="line" points="{way}"/>')
    for p in points:
        at, kind = placed[p], "ours" if p.ours else "peer"
        said = escape(f"{p.name}: {p.bits:.2f} bits, KL {p.kl:.5f}")
        parts.append(
            f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{RADIUS}"><title>{said}</title></circle>'
        )
    for p, (left, base) in _labels(placed, [placed[p] for p in ours]).items():
        (a, b), edge = placed[p], _box((left, base), ADVANCE * SIZE * len(p.name))
        if not edge[1] < b < edge[3]:  # a name above or below its point is joined to it
            parts.append(_line("lead", a, b, min(max(a, edge[0]), edge[2]), edge[3] if b > edge[3] else edge[1]))
        parts.append(_text(left, base, p.name, name="ours" if p.ours else ""))
    width, height = LEFT + WIDTH + 24, TOP + HEIGHT + BELOW
    said = "; ".join(f"{p.name} {p.bits:.2f} bits, KL {p.kl:.5f}" for p in sorted(points, key=lambda p: p.kl))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img" aria-labelledby="t d">'
    )
    named = ['<title id="t">KL over bits held</title>', f'<desc id="d">{escape(said)}</desc>']
    return "\n".join([head, *named, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


Place = tuple[float, float]


def _labels(placed: dict[Point, Place], line: Sequence[Place]) -> dict[Point, Place]:
    """Put each name beside its point where it covers no point, no other name and no piece of the line; the names of
    the line go first. A name that fits nowhere takes the place where it covers least.
    """
    taken = [(a - RADIUS, b - RADIUS, a + RADIUS, b + RADIUS) for a, b in placed.values()]
    for (a, b), (c, d) in itertools.pairwise(line):
        steps = max(1, round(math.hypot(c - a, d - b) / 6))
        along = [(a + (c - a) * i / steps, b + (d - b) * i / steps) for i in range(steps + 1)]
        taken += [(u - 1, v - 1, u + 1, v + 1) for u, v in along]
    found: dict[Point, Place] = {}
    for p, (a, b) in sorted(placed.items(), key=lambda item: (not item[0].ours, -item[1][0], -item[1][1])):
        wide = ADVANCE * SIZE * len(p.name)
        options = [
            (left, b + down * SIZE * 1.1 + 4)
            for down in (0, -1, 1, -2, 2, -3, 3)
            for left in (a + GAP, a - GAP - wide, a - wide / 2)
            if down or left != a - wide / 2
        ]
        options = [o for o in options if LEFT + 2 < o[0] < LEFT + WIDTH - wide]
        best = min(options, key=lambda o: (_covered(_box(o, wide), taken), options.index(o)))
        taken.append(_box(best, wide))
        found[p] = best
    return found


Box = tuple[float, float, float, float]


def _box(at: Place, wide: float) -> Box:
    return at[0] - 2, at[1] - SIZE, at[0] + wide + 2, at[1] + 3


def _covered(box: Box, taken: Iterable[Box]) -> float:
    """Compute the area that a box shares with others, or has outside of the plot, pixels."""
    inside = _shared(box, (LEFT, TOP, LEFT + WIDTH, TOP + HEIGHT))
    outside = (box[2] - box[0]) * (box[3] - box[1]) - inside
    return outside + sum(_shared(box, other) for other in taken)


def _shared(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _line(name: str, *ends: float) -> str:
    a, b, c, d = (f"{v:.1f}" for v in ends)
    return f'<line class="{name}" x1="{a}" y1="{b}" x2="{c}" y2="{d}"/>'


def _text(left: float, base: float, words: str, *, name: str = "", anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text{kind} x="{left:.1f}" y="{base:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def write(root: Path, benchmarks: Path) -> Path:
    """Write the picture below `root` and return its path."""
    path = root / PICTURE
    path.write_text(svg(drawn(benchmarks)), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"wrote {write(ROOT, BENCHMARKS).relative_to(ROOT)}")
