"""The sources' figures come out of their own formulas, and each says whether it agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbits.planner import plan, uniform
from kvbits.units import GB, GIB
from studies.__main__ import app
from studies.source_figures import source_figures


def figure(start, **kw):
    return next(f for f in source_figures() if f.case.startswith(start) or f.printed == start)


def test_paper_table_1_agrees():
    f = figure("about 137 GB")
    assert f.nbytes == 137_438_953_472 == 128 * GIB and f.agrees
    assert f.nbytes == plan(uniform(32, 32, 128), ["fp32"], context=131072).rows[0].total_bytes


@pytest.mark.parametrize(
    ("printed", "gib", "scheme_bytes"), [("41.9 GB", 320, 2), ("21.0 GB", 160, 1), ("10.5 GB", 80, 0.5)]
)
def test_llama_70b_table_differs_from_its_own_formula(printed, gib, scheme_bytes):
    f = figure(printed)
    assert f.nbytes == gib * GIB == 2 * 80 * 64 * 128 * 4096 * 32 * scheme_bytes
    assert not f.agrees and f"{gib} GiB" in f.verdict
    # What it printed: the model's real 8 kv heads and 4,000 tokens.
    assert round(2 * 80 * 8 * 128 * 4000 * 32 * scheme_bytes / GB, 1) == float(printed.split()[0])


def test_kvquant_7b_is_in_gib():
    f = figure("64.0 GB")
    assert f.nbytes == 64 * GIB and not f.agrees and "right in GiB" in f.verdict


def test_tiered_32k_case():
    assert figure("17.2 GB").nbytes == 17_179_869_184 and figure("17.2 GB").agrees
    total = figure("7.47 GB")
    tiers = [figure(p).nbytes for p in ("1.07 GB", "4.0 GB", "2.4 GB")]
    assert tiers == [1_073_741_824, 3_992_977_408, 2_415_919_104]
    assert total.nbytes == sum(tiers) == 7_482_638_336
    assert not total.agrees and "7.48 GB" in total.verdict


def test_every_figure_states_its_verdict():
    for f in source_figures():
        assert f.verdict and f.formula and isinstance(f.nbytes, int)
        assert f.to_dict()["gb"] * GB == pytest.approx(f.to_dict()["gib"] * GIB)
        assert f.agrees == f.verdict.startswith("agrees")


def test_recomputing_needs_no_torch():
    code = (
        "import sys; from studies.source_figures import source_figures; source_figures(); print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert out.stdout.strip() == "False"


def test_sources_as_table_and_json():
    figures = json.loads(CliRunner().invoke(app, ["sources", "--json"]).stdout)["sources"]
    assert len(figures) == len(source_figures())
    paper = next(f for f in figures if f["printed"] == "about 137 GB")
    assert paper["nbytes"] == 137_438_953_472 and paper["gib"] == 128 and paper["agrees"]
    text = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["sources"]).stdout
    for expected in ("41.9 GB", "343.60 GB", "320.00 GiB", "7.48 GB", "64.00 GiB", "17.2 GB"):
        assert expected in text
