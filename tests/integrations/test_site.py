"""The documentation as a site: it builds without a warning, and a real browser searches it, on a desk and on a phone,
in both themes, and asks no other machine.
"""

import functools
import html
import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import DARK, browse, needs_browser
from nightly import at_night

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs (pip install '.[docs]')")

VISIT = """<body><iframe id="f" style="width:%(width)dpx;height:900px"></iframe><script>
const tick = async () => { await fetch("tick"); await new Promise((done) => setTimeout(done, 50)); };  // of real time: a worker searches
const until = async (find) => { for (let i = 0; i < 300; i++) { const found = find(); if (found) return found; await tick(); } throw Error(`never: ${find}`); };
const load = (page) => new Promise((done) => { f.onload = () => done(f.contentDocument); f.src = page; });
(async () => {
    const said = { wide: {}, looks: [] };
    for (const page of %(pages)s) said.wide[page] = (await load(page)).documentElement.scrollWidth;
    const d = await load("index.html"), $ = (s) => d.querySelector(s), toggle = () => $("form[data-md-component=palette] label:not([hidden])");
    for (let i = 0; i < 2; i++) {
        await until(toggle);
        said.looks.push(f.contentWindow.getComputedStyle(d.body).backgroundColor);
        toggle().click();
        await tick();
    }
    $("#__search").click();
    const box = $("input[name=query]");
    box.focus();
    box.value = "calibration";
    box.dispatchEvent(new Event("keyup"));
    await until(() => $(".md-search-result__item a"));
    said.hits = [...d.querySelectorAll(".md-search-result__item a")].map((a) => new URL(a.href).pathname);
    return said;
})().catch((e) => ({ error: String(e) })).then((said) => document.body.dataset.said = JSON.stringify(said));
</script>"""


class Server(SimpleHTTPRequestHandler):
    """Has the browser report whatever a page asks of another machine."""

    elsewhere: list[str]

    def do_GET(self):
        if self.path == "/tick":
            time.sleep(0.05)
        super().do_GET()

    def do_POST(self):
        report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["csp-report"]
        self.elsewhere.append(f"{report['document-uri']} asks {report['blocked-uri']}")
        self.send_response(204)
        super().end_headers()

    def end_headers(self):
        self.send_header(
            "Content-Security-Policy-Report-Only",
            "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; report-uri /elsewhere",
        )
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def served(site):
    """(address, what pages asked of other machines)."""
    handler = type("Handler", (Server,), {"elsewhere": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.elsewhere
        server.shutdown()


OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=60000")


def test_every_page_is_there_and_its_lists_are_lists(site):
    sources = [
        p.relative_to(ROOT / "docs").with_suffix(".html")
        for p in (ROOT / "docs").rglob("*.md")
        if p != ROOT / "docs" / "README.md"
    ]
    for page in [*sources, "plan.html", "results/report.html"]:
        text = (site / page).read_text()
        stuck = re.search(r"<p>(?:(?!</p>).)*?(?:\n[-|] |```).{0,50}", text, re.S) if page in sources else None
        assert not stuck, f"{page}: needs an empty line before it: {stuck[0]}"
    assert (
        "examples/new_scheme.py" in (site / "guide" / "choose.html").read_text()
        and "guide/twice-the-users.html" in (site / "index.html").read_text()
    )


@needs_browser
@pytest.mark.parametrize(
    "width, options, looks",
    [
        (1400, (), ["rgb(255, 255, 255)", "rgb(30, 33, 41)"]),
        *at_night((390, (DARK,), ["rgb(30, 33, 41)", "rgb(255, 255, 255)"])),
    ],
    ids=["desk", "dark phone"],
)
def test_a_reader_searches_and_changes_the_theme_and_asks_nobody_else(site, served, tmp_path, width, options, looks):
    address, elsewhere = served
    pages = [p.relative_to(site).as_posix() for p in sorted(site.rglob("*.html")) if p.name != "visit.html"]
    (site / "visit.html").write_text(VISIT % {"width": width, "pages": json.dumps(pages)})
    dom = browse(f"{address}/visit.html", tmp_path / "profile", *OFFLINE, "--window-size=1500,1000", *options)
    said = json.loads(html.unescape(re.search(r'data-said="([^"]*)"', dom)[1]))
    assert "error" not in said, said
    assert len(pages) > 25 and {p: w for p, w in said["wide"].items() if not 300 < w <= width} == {}
    assert said["looks"] == looks
    assert "/guide/choose.html" in said["hits"] and not [h for h in said["hits"] if "/log/" in h]
    assert elsewhere == []


@needs_browser
def test_a_page_that_asks_another_machine_is_seen(site, served, tmp_path):
    address, elsewhere = served
    (site / "asks.html").write_text('<script src="https://example.com/x.js"></script>')
    browse(f"{address}/asks.html", tmp_path / "profile", *OFFLINE)
    (site / "asks.html").unlink()
    assert elsewhere == [f"{address}/asks.html asks https://example.com/x.js"]
