"""The animated demo is drawn from the committed recording of a real run, and loses nothing of it."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import make_recording as recording
import pytest

SVG = "{http://www.w3.org/2000/svg}"


def texts(drawing: str, part: str) -> list[str]:
    """Return what the elements of a class show, in order."""
    root = ElementTree.fromstring(drawing)
    return [
        "".join(t.itertext())
        for g in root.iter()
        if part in g.get("class", "").split()
        for t in ([g] if g.tag == f"{SVG}text" else g.iter(f"{SVG}text"))
    ]


def test_the_committed_drawing_is_that_of_the_recording():
    cast = recording.CAST.read_text(encoding="utf-8")
    assert recording.DRAWING.read_text(encoding="utf-8") == recording.svg(cast), "run: python docs/make_recording.py"
    header, *events = map(json.loads, cast.splitlines())
    assert header["command"] == " ".join(recording.COMMAND) and events[-1][0] <= header["duration"]
    printed = [text.rstrip() for _, _, text in events]
    assert texts(recording.svg(cast), "frame")[1:] == [line for line in printed if line]
    assert recording.DRAWING.stat().st_size < 300_000


def test_pauses_are_shortened_and_the_clock_has_real_seconds():
    header = {"version": 2, "width": 40, "command": "make demo", "title": "a machine", "duration": 61.0}
    printed = [(0.5, "one"), (0.52, "two"), (60.0, "a < b"), (60.2, "four")]
    cast = "\n".join(json.dumps(x) for x in [header, *([at, "o", f"{text}\r\n"] for at, text in printed)])
    _, played = recording.frames(cast)
    assert [f.lines for f in played] == [("$ make demo",), ("one", "two"), ("a < b",), ("four",)]
    pauses = [b.shown - a.shown for a, b in itertools.pairwise(played)]
    assert all(p + 0.001 >= recording.SHORTEST and p <= recording.PAUSE + 0.001 for p in pauses)
    assert pauses[1] == pytest.approx(recording.PAUSE) and pauses[2] == pytest.approx(recording.SHORTEST)
    drawing = recording.svg(cast)
    shown = re.findall(r"@keyframes c\d\{0%\{opacity:0\}([\d.]+)%\{opacity:1\}([\d.]+)%,100%", drawing)
    assert [begin for begin, _ in shown[1:]] == [end for _, end in shown[:-1]], "one clock at a time"
    assert shown[0][0] == "0.00" and shown[-1][1] == "100.00" and len(shown) == 4
    assert texts(drawing, "clock") == ["0 s", "0 s", "60 s", "60 s"]
    assert texts(drawing, "frame") == ["$ make demo", "one", "two", "a < b", "four"]
    assert "61 s" in drawing and f"{recording.PAUSE:g} s" in drawing


def test_what_a_command_prints_is_recorded_and_a_failure_is_not():
    header, *events = map(
        json.loads, recording.record(("sh", "-c", "echo one; sleep 0.3; echo two >&2"), 80).splitlines()
    )
    assert [text for _, _, text in events] == ["one\r\n", "two\r\n"]
    assert header["width"] == 80 and events[0][0] <= events[1][0] <= header["duration"]
    with pytest.raises(recording.subprocess.CalledProcessError):
        recording.record(("sh", "-c", "echo one; exit 3"), 80)
