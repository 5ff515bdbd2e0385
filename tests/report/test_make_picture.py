"""The picture of KL over bits shows every cache of the results where it belongs, and every name can be read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import browser
import make_picture as pictures
import pytest
from tails_file import tails_of

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def circles(text: str) -> dict[str, tuple[float, float]]:
    """Name of a point -> its place."""
    found = ElementTree.fromstring(text).iter(f"{SVG}circle")
    return {c.find(f"{SVG}title").text.partition(":")[0]: (float(c.get("cx")), float(c.get("cy"))) for c in found}


def test_the_committed_picture_is_that_of_the_committed_results():
    text = (ROOT / pictures.PICTURE).read_text(encoding="utf-8")
    assert text == pictures.svg(pictures.drawn(pictures.BENCHMARKS)), "run: python docs/make_picture.py"
    assert len(text) < 60_000


def test_every_point_is_drawn_and_more_bits_are_right_and_more_kl_is_up():
    picture = pictures.drawn(pictures.BENCHMARKS)
    at = circles(pictures.svg(picture))
    assert at.keys() == {p.name for p in picture.points} and len(at) >= 8
    for axis, value, sign in ((0, lambda p: p.bits, 1), (1, lambda p: p.kl, -1)):
        order = [at[p.name][axis] * sign for p in sorted(picture.points, key=value)]
        assert order == sorted(order)
    ours = [p for p in picture.points if p.ours]
    assert {p.name for p in ours} <= set(pictures.LINE) and len(ours) >= 3


def test_a_decade_is_as_high_everywhere():
    points = tuple(pictures.Point(f"p{i}", 2.0 + i, 10.0**-i, i < 2) for i in range(4))
    at = circles(pictures.svg(pictures.Picture(points, ("made up",))))
    steps = [at[f"p{i + 1}"][1] - at[f"p{i}"][1] for i in range(3)]
    assert max(steps) - min(steps) < 0.25 and min(steps) > 0


def test_what_a_name_holds_cannot_break_the_picture():
    points = tuple(pictures.Point(name, 3.0 + i, 0.1 + i, True) for i, name in enumerate(("a<b&c", "nuq3-1%")))
    text = pictures.svg(pictures.Picture(points, ('of "x" & <y>',)))
    assert set(circles(text)) == {"a<b&c", "nuq3-1%"}


def test_equal_tails_are_drawn_where_they_were_measured(tmp_path):
    rows = [
        ("r1", name, tail, 4.0 + i, 0.1**i) for i, name in enumerate(("klt4", "nvfp4", "klt3")) for tail in (0, 128)
    ]
    tails_of(tmp_path, [*rows, ("r1", "klt2", 0, 3.0, 0.1)])
    tails_of(tmp_path, [("r1", "int4", 128, 4.0, 0.1)], model="smollm2")
    tails_of(tmp_path, [("r1", "int4", 128, 4.0, 0.1)], length=1024)
    picture = pictures.drawn(tmp_path)
    assert [(p.name, p.bits, p.ours) for p in picture.points] == [
        ("klt4", 4.0, True),
        ("nvfp4", 5.0, False),
        ("klt3", 6.0, True),
    ]
    source = " ".join(picture.source)
    assert "128" in source and "8,192" in source


@browser.needs_browser
@pytest.mark.parametrize("options", [(), (browser.DARK,)], ids=["light", "dark"])
def test_a_browser_draws_names_apart_inside_and_readable(tmp_path, options):
    page = tmp_path / "page.html"
    script = """
      const said = [...document.querySelectorAll('svg text')].map(t => {
        const b = t.getBoundingClientRect(), s = getComputedStyle(t);
        return [t.textContent, b.left, b.top, b.right, b.bottom, s.fill].join('|')
      });
      document.body.innerHTML = '<pre>' + said.join('\\n').replace(/</g, '&lt;') + '</pre>'"""
    picture = (ROOT / pictures.PICTURE).read_text(encoding="utf-8")
    page.write_text(f"<body style='margin:0'>{picture}<script>{script}</script></body>", encoding="utf-8")
    dom = browser.browse(page, tmp_path / "profile", *options)
    rows = [line.split("|") for line in re.search(r"<pre>(.*?)</pre>", dom, re.S)[1].split("\n")]
    boxes = {name: tuple(map(float, at)) for name, *at, _ in rows}
    points = {p.name for p in pictures.drawn(pictures.BENCHMARKS).points}
    assert points <= boxes.keys()
    width = pictures.LEFT + pictures.WIDTH + 24
    assert all(left >= 0 and right <= width for left, _, right, _ in boxes.values())
    names = sorted(points)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = boxes[one], boxes[other]
            wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            assert wide <= 0 or high <= 4, f"{one} covers {other}"
    light = [sum(map(int, re.findall(r"\d+", fill)[:3])) / 3 for *_, fill in rows]
    assert min(light) > 100 if options else max(light) < 130, "letters stand out from the page"
