"""Records `make demo` and draws it as an animated SVG: `python docs/make_recording.py` draws the committed recording,
with `--record` it runs the command first (minutes).

docs/results/figures/demo.cast is the recording in asciicast's second version
(https://docs.asciinema.org/manual/asciicast/v2/): a header, then `[seconds, "o", text]` of each line as it was printed.
docs/results/figures/demo.svg is the drawing, which README shows. A test compares the two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "results" / "figures"
CAST, DRAWING = FIGURES / "demo.cast", FIGURES / "demo.svg"
COMMAND = ("make", "demo")
COLUMNS = 112
"""Columns of the recorded terminal: the demo's two texts side by side."""
ROWS = 34
"""Lines of the drawn terminal; what is longer scrolls when everything is printed."""
PAUSE, SHORTEST, TOGETHER = 0.6, 0.3, 0.1
"""Seconds: the longest and the shortest pause between frames, and the pause up to which lines are one frame."""
READ, SCROLL = 5.0, 0.25
"""Seconds for which the first and the last screen of a finished run stand, and seconds of a line's scrolling."""
CELL, LINE, EDGE, TOP, BOTTOM = 7.2, 16, 16, 32, 24
"""Pixels of a character's width and a line's height, and of the card's edges."""
STYLE = (
    "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6edf3;"
    "white-space:pre}.card{fill:#0d1117;stroke:#3d444d}.prompt{fill:#58a6ff;font-weight:600}"
    ".clock{fill:#9198a1;text-anchor:end}.note{fill:#9198a1;font-size:11px}"
)


def record(command: tuple[str, ...], columns: int) -> str:
    """Run a command and return its recording.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    wide = os.environ | {"COLUMNS": str(columns), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    events: list[list[Any]] = []
    load = os.getloadavg()[0]
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=wide, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append([round(time.perf_counter() - began, 2), "o", line.rstrip("\n") + "\r\n"])
            sys.stdout.write(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    header = {
        "version": 2,
        "width": columns,
        "height": 40,
        "timestamp": int(time.time()),
        "duration": round(time.perf_counter() - began, 2),
        "command": " ".join(command),
        "title": f"{os.cpu_count()} cores of {_cpu()} at a load of {load:.0f}",
    }
    return "".join(json.dumps(part, ensure_ascii=False) + "\n" for part in (header, *events))


def _cpu() -> str:
    """Return the processor's name as Linux states it, else Python's word for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


@dataclass(frozen=True)
class Frame:
    """Lines that a program printed together.

    Attributes:
        real: seconds from the start at which they were printed.
        shown: seconds from the animation's start at which they appear.
    """

    real: float
    shown: float
    lines: tuple[str, ...]


def frames(cast: str) -> tuple[dict[str, Any], list[Frame]]:
    """Return a recording's header and its frames, the prompt first, with pauses of at most `PAUSE` seconds."""
    header, *events = (json.loads(line) for line in cast.splitlines())
    found = [Frame(0.0, 0.0, (f"$ {header['command']}",))]
    for seconds, _, text in events:
        last, line = found[-1], text.rstrip()
        if len(found) > 1 and seconds - last.real < TOGETHER:
            found[-1] = Frame(last.real, last.shown, (*last.lines, line))
        else:
            pause = min(max(seconds - last.real, SHORTEST), PAUSE)
            found.append(Frame(seconds, round(last.shown + pause, 2), (line,)))
    return header, found


def svg(cast: str) -> str:
    """Draw a recording as an SVG that plays in a loop. A reader who asks for less motion sees the end."""
    header, played = frames(cast)
    lines = sum(len(f.lines) for f in played)
    wide, rows = header["width"] * CELL + 2 * EDGE, min(lines, ROWS)
    high = TOP + rows * LINE + EDGE + BOTTOM
    hidden, end = max(0, lines - rows), played[-1].shown + READ
    total = end + hidden * SCROLL + READ
    style, parts, row = [], [], 0
    for i, frame in enumerate(played):
        at = 100 * frame.shown / total
        style.append(f"@keyframes f{i}{{0%{{opacity:0}}{at:.2f}%,100%{{opacity:1}}}}" if i else "")
        until = 100 * played[i + 1].shown / total if i + 1 < len(played) else 100
        style.append(f"@keyframes c{i}{{0%{{opacity:0}}{at:.2f}%{{opacity:1}}{until:.2f}%,100%{{opacity:0}}}}")
        clock = f"{frame.real:.0f} s"
        last = i + 1 == len(played)
        parts.append(f'<text class="clock{" last" * last}" style="animation-name:c{i}">{clock}</text>')
        drawn = "".join(_line(line, row + n) for n, line in enumerate(frame.lines))
        parts.append(f'<g class="frame" style="animation-name:{f"f{i}" if i else "none"}">{drawn}</g>')
        row += len(frame.lines)
    style.append(
        f"@keyframes scroll{{0%,{100 * end / total:.2f}%{{transform:none}}"
        f"{100 * (total - READ) / total:.2f}%,100%{{transform:translateY(-{hidden * LINE}px)}}}}"
    )
    clocks = "".join(p for p in parts if p.startswith("<text"))
    text = "".join(p for p in parts if p.startswith("<g"))
    note = (
        f"{header['command']} on {header['title']}: {header['duration']:.0f} s,"
        f" played with pauses of at most {PAUSE:g} s. The clock shows real seconds."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}"'
        f' role="img" aria-label="{escape(note)}"><style>{STYLE}'
        f".frame,.clock{{animation:{total:.2f}s step-end infinite}}"
        f".scroll{{animation:scroll {total:.2f}s linear infinite}}{''.join(style)}"
        "@media (prefers-reduced-motion:reduce){.frame,.clock,.scroll{animation:none}"
        f".scroll{{transform:translateY(-{hidden * LINE}px)}}.clock{{opacity:0}}.last{{opacity:1}}}}</style>"
        f'<rect class="card" width="{wide - 1:g}" height="{high - 1:g}" x=".5" y=".5" rx="8"/>'
        f'<g transform="translate({wide - EDGE:g} 20)">{clocks}</g>'
        f'<text class="note" x="{EDGE}" y="{high - 14:g}">{escape(note)}</text>'
        f'<svg x="{EDGE}" y="{TOP}" width="{wide - 2 * EDGE:g}" height="{rows * LINE + 4}"><g class="scroll">{text}</g>'
        "</svg></svg>\n"
    )


def _line(text: str, row: int) -> str:
    """Draw a line of text, as wide as its cells in any font."""
    if not text:
        return ""
    name = ' class="prompt"' if text.startswith("$ ") else ""
    return f'<text{name} y="{(row + 1) * LINE - 3}" textLength="{len(text) * CELL:g}">{escape(text)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="run `make demo` first, which takes minutes")
    if parser.parse_args().record:
        FIGURES.mkdir(parents=True, exist_ok=True)
        CAST.write_text(record(COMMAND, COLUMNS), encoding="utf-8")
    DRAWING.write_text(svg(CAST.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {DRAWING.relative_to(ROOT)}")
