"""The INT8 paper's study: metrics, inputs, the command, the figures; and where its 25 unit tests' subjects are tested.

| subject in the paper | here |
|---|---|
| allocation, dimensions, memory of FP32 and INT8 matrices | test_matrices_are_allocated_as_asked |
| random fill stays within bounds | test_fill_stays_within_bounds |
| L2, largest and attention error of a matrix with itself are zero | test_errors_of_a_matrix_with_itself_are_zero |
| the metrics on known differences | test_errors_of_known_differences |
| scales by hand, of zero columns too | test_scales_codes_and_values_by_hand |
| rounding and clamping by hand | test_scales_codes_and_values_by_hand, test_rounding_goes_to_even_or_away_from_zero |
| dequantization by hand | test_scales_codes_and_values_by_hand |
| each GPU kernel within one code of the CPU; variants identical |
test_int8_paper_cuda.py::test_every_kernel_agrees_with_the_reference |
| 1 x 1, the smallest vector, all zeros, all ones, alternating signs | test_patterns (CPU), test_int8_paper_cuda.py
(GPU; 1 x 1 and 1 x 4 among its shapes) |
| stress | test_stress (CPU), test_int8_paper_cuda.py::test_stress_and_round_trip_metrics |
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import run_files
import torch
from messages import raises
from typer.testing import CliRunner

from kvbits.errors import DataError
from studies.__main__ import app
from studies.int8_paper import cpu, reference, study

needs_cpu = pytest.mark.skipif(cpu.unavailable() is not None, reason=f"{cpu.unavailable()}")
ROOT = Path(__file__).parents[2]
TINY = {"a": (64, 32), "b": (200, 64), "c": (300, 127)}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(study, "CASES", TINY)


@needs_cpu
@pytest.mark.parametrize("rows, columns", [(1, 1), (7, 5), (64, 128)])
def test_matrices_are_allocated_as_asked(rows, columns):
    x = study.random_matrix(rows, columns)
    q = cpu.quantize(x, cpu.compute_scales(x))
    assert x.shape == q.shape == (rows, columns) and x.dtype == torch.float32 and q.dtype == torch.int8
    assert x.nbytes == 4 * rows * columns and q.nbytes * 4 == x.nbytes
    assert cpu.dequantize(q, cpu.compute_scales(x)).shape == (rows, columns)


def test_fill_stays_within_bounds():
    x = study.random_matrix(1000, 257)
    assert float(x.min()) >= -1 and float(x.max()) <= 1 and abs(float(x.mean())) < 0.01
    assert (x[:, 1] == 0).all() and float(x[:, 0].abs().max()) > 0.9
    assert torch.equal(x, study.random_matrix(1000, 257)) and not torch.equal(x, study.random_matrix(1000, 257, seed=1))


@pytest.mark.parametrize("metric", [study.l2_error, study.max_error, study.attention_error])
def test_errors_of_a_matrix_with_itself_are_zero(metric):
    x = study.random_matrix(300, 65)
    assert metric(x, x.clone()) == 0


def test_errors_of_known_differences():
    x = torch.zeros(20_000, 4)
    assert study.l2_error(x, x + 0.5) == pytest.approx(0.5 * math.sqrt(80_000))
    assert study.max_error(x, x.index_fill(0, torch.tensor([17_000]), -3.0)) == 3
    one = torch.zeros(1, 4)
    one[0, 2] = 2.0
    queries = torch.rand(study.QUERIES, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert study.attention_error(torch.zeros(1, 4), one) == pytest.approx(
        float((2 * queries[:, 2]).abs().mean()), rel=1e-6
    )


@needs_cpu
@pytest.mark.parametrize("kernel", cpu.KERNELS)
def test_scales_codes_and_values_by_hand(kernel):
    x = torch.tensor([[1.27, -2.54, 0.0], [0.64, 1.28, 0.0], [-0.1, 5.08, 0.0]])
    scales = cpu.compute_scales(x, kernel=kernel)
    torch.testing.assert_close(scales, torch.tensor([0.01, 0.04, 1.0]))
    q = cpu.quantize(x, scales, kernel=kernel)
    # -63.5 lies on the edge
    assert q.tolist() in ([[127, -64, 0], [64, 32, 0], [-10, 127, 0]], [[127, -63, 0], [64, 32, 0], [-10, 127, 0]])
    torch.testing.assert_close(cpu.dequantize(q, scales, kernel=kernel), q.float() * torch.tensor([0.01, 0.04, 1.0]))
    assert cpu.quantize(x, scales / 100, kernel=kernel)[0].tolist() == [127, -127, 0]


@needs_cpu
def test_rounding_goes_to_even_or_away_from_zero():
    x, one = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 2.4999]]), torch.ones(6)
    assert cpu.quantize(x, one).tolist() == reference.quantize(x, one).tolist() == [[0, 2, 2, 0, -2, 2]]
    assert cpu.quantize(x, one, kernel="column_outer").tolist() == [[1, 2, 3, -1, -2, 2]]  # the paper's roundf


@needs_cpu
@pytest.mark.parametrize("kernel", cpu.KERNELS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (9, 4), (65, 33)], ids=str)
def test_patterns(shape, kernel):
    signs = (torch.arange(shape[0])[:, None] + torch.arange(shape[1])).remainder(2).float() * 2 - 1
    for x, code in ((torch.zeros(shape), 0), (torch.ones(shape), 127), (signs, 127 * signs)):
        scales = cpu.compute_scales(x, kernel=kernel)
        q = cpu.quantize(x, scales, kernel=kernel)
        assert (q == code).all()
        torch.testing.assert_close(cpu.dequantize(q, scales, kernel=kernel), x, rtol=1e-6, atol=0)


@needs_cpu
def test_stress():
    x = study.random_matrix(20_000, 300)
    scales = cpu.compute_scales(x)
    assert study.max_error(x, cpu.dequantize(cpu.quantize(x, scales), scales)) <= study.ERROR_BOUND * 1.0001


@needs_cpu
def test_attention_error_grows_with_the_square_root_of_d():
    found = []
    for d in (128, 512, 2048):
        x = study.random_matrix(1000, d)
        scales = cpu.compute_scales(x)
        found.append(study.attention_error(x, cpu.dequantize(cpu.quantize(x, scales), scales)))
    assert found[1] / found[0] == pytest.approx(2, rel=0.1) and found[2] / found[1] == pytest.approx(2, rel=0.1)


@needs_cpu
def test_the_command_reports_every_stage_and_kernel(tiny, tmp_path):
    result = CliRunner().invoke(app, ["paper", "--cpu-rows", "100", "--out", str(tmp_path / "r.json"), "--json"])
    assert result.exit_code == 0, result.output
    data = run_files.read(tmp_path / "r.json")
    found = run_files.newest(data)
    assert (
        json.loads(result.stdout) == data
        and next(iter(data["runs"].values()))["argv"]
        and [e["case"] for e in found["errors"]] == list(TINY)
    )
    assert [e["error_rows"] for e in found["errors"]] == [64, 100, 100] or found["device"]
    on_cpu = [r for r in found["rows"] if r["device"] == "cpu"]
    assert len(on_cpu) == len(TINY) * len(study.CPU_KERNELS) * 4
    for r in on_cpu:
        per_element = {"scales": 4, "quantize": 5, "dequantize": 5, "with_scales": 9}[r["stage"]]
        assert r["bytes"] == per_element * r["rows"] * r["columns"] and r["gbytes_per_s"] == pytest.approx(
            r["bytes"] / r["time_us"] / 1e3
        )
        assert r[f"speedup_vs_{r['kernel']}"] == pytest.approx(1)
    if not torch.cuda.is_available():
        assert found["device"] is None and "no NVIDIA GPU" in found["gpu_missing"]
        text = CliRunner().invoke(app, ["paper", "--from", str(tmp_path / "r.json")]).stdout
        assert "no NVIDIA GPU" in text and "cpu_column_outer" in text


@needs_cpu
def test_a_wrong_kernel_has_no_speed(tiny, monkeypatch):
    good = cpu.quantize
    monkeypatch.setattr(cpu, "quantize", lambda *a, **k: good(*a, **k) + 1)
    with raises(study.KernelError, "CPU kernel", "reference"):
        study.run(["a"])


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"cases": ["nothing"]}, ("'nothing'", "small")),
        ({"cases": ["small"], "cpu_rows": 0}, ("cpu_rows=0", "one row")),
    ],
)
def test_bad_input_is_named(options, parts):
    with raises(DataError, *parts):
        study.run(**options)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for name, message in (("x.json", "is no result"), ("missing.json", "No such file")):
        result = CliRunner().invoke(app, ["paper", "--from", str(tmp_path / name)])
        assert result.exit_code == 2 and message in result.stderr


def test_all_five_figures_are_drawn_from_a_gpu_result(tmp_path):
    pytest.importorskip("matplotlib")
    from studies.int8_paper.figures import draw

    rows, errors = [], []
    for case, (t, d) in list(study.CASES.items())[:6]:
        errors.append(
            {
                "case": case,
                "rows": t,
                "columns": d,
                "error_rows": t,
                "max_error": 0.0039,
                "l2_error": 1.0,
                "attention_error": 0.001 * d**0.5,
            }
        )
        for device, kernels in (("cpu", ("cpu_column_outer", "cpu_fast")), ("gpu", ("naive", "fast"))):
            for i, k in enumerate(kernels):
                row = {
                    "kernel": k,
                    "stage": "quantize",
                    "dtype": "float32",
                    "device": device,
                    "time_us": t * d / 1e3 / (i + 1),
                    "speedup_vs_cpu_column_outer": 5.0 + i,
                }
                rows.append({"case": case, "rows": t, "columns": d} | row)
    result = {"device": "a GPU", "gpu_missing": None, "cpu": "a CPU", "errors": errors, "rows": rows}
    paths, left_out = draw(result, tmp_path / "g")
    assert [p.name for p in paths] == [f"paper_figure_{i}.png" for i in range(1, 6)] and not left_out
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    paths, left_out = draw(result | {"device": None, "gpu_missing": "no GPU"}, tmp_path / "c")
    assert (
        [p.name for p in paths] == ["paper_figure_2.png", "paper_figure_4.png"]
        and len(left_out) == 3
        and "no GPU" in left_out[0]
    )


def test_help_loads_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from studies.__main__ import app; CliRunner().invoke(app,"
        " ['paper', '--help']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--from", "folder"], "--from folder"),
        (["--out", "folder"], "--out folder"),
        (["--figures", "file/x"], "--figures file/x"),
    ],
)
def test_files_that_cannot_be_used_are_named(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    result = CliRunner().invoke(app, ["paper", *options])
    assert result.exit_code == 2 and says in result.output
