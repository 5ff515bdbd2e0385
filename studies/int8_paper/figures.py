"""The INT8 paper's figures 1 to 5, from a result of `study.run`. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

STYLES = {
    "naive": "tab:gray",
    "tiled": "tab:olive",
    "coarsened": "tab:cyan",
    "vectorized": "tab:blue",
    "persistent": "tab:purple",
    "fast": "tab:red",
    "cpu_column_outer": "black",
    "cpu_row_order": "dimgray",
    "cpu_fast": "tab:green",
}
NAMES = {
    "fast": "ours",
    "cpu_column_outer": "CPU scalar (paper)",
    "cpu_row_order": "CPU scalar, row order",
    "cpu_fast": "CPU, ours",
}
BASELINE = "speedup_vs_cpu_column_outer"
EVEN = 4


def draw(result: dict[str, Any], folder: Path) -> tuple[list[Path], list[str]]:
    """Write paper_figure_1.png .. 5.

    Returns:
        The files, and the figures left out with the reason: those of GPU speed need a GPU's result.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths, left_out = [], []
    for number, make in enumerate((_speedup, _time, _realistic, _errors, _scaling), 1):
        if make in (_speedup, _realistic, _scaling) and not result["device"]:
            left_out.append(f"figure {number} shows GPU kernels: {result['gpu_missing']}")
            continue
        figure, axes = plt.subplots(1, 2 if make is _errors else 1, figsize=(9, 4.2), layout="constrained")
        make(axes, result)
        figure.suptitle(f"{result['device'] or result['cpu']}", fontsize=9)
        paths.append(folder / f"paper_figure_{number}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths, left_out


def _series(result: dict[str, Any], device: str, what: str) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return (row, row[what]) of float32 quantize by kernel, even cases in the order measured."""
    found: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for r in result["rows"]:
        if r["stage"] == "quantize" and r["dtype"] == "float32" and r["device"] == device and r["columns"] % EVEN == 0:
            found.setdefault(r["kernel"], []).append((r, r[what]))
    return found


def _look(kernel: str) -> dict[str, str]:
    return {"label": NAMES.get(kernel, kernel), "color": STYLES[kernel]}


def _bars(axes: Any, series: dict[str, list[tuple[dict[str, Any], float]]]) -> None:
    width = 0.8 / len(series)
    for i, (kernel, points) in enumerate(series.items()):
        middle = (i - (len(series) - 1) / 2) * width
        axes.bar([x + middle for x in range(len(points))], [y for _, y in points], width, **_look(kernel))
    rows = [r for r, _ in next(iter(series.values()))]
    axes.set_xticks(range(len(rows)), [f"{r['rows']:,}\nx {r['columns']:,}" for r in rows], fontsize=7)
    axes.set_yscale("log")
    axes.legend(fontsize=7)


def _speedup(axes: Any, result: dict[str, Any]) -> None:
    _bars(axes, _series(result, "gpu", BASELINE))
    axes.set(title="Figure 1: speed-up of the GPU kernels over the scalar CPU code", ylabel="times")


def _time(axes: Any, result: dict[str, Any]) -> None:
    for device in ("cpu", "gpu"):
        for kernel, points in _series(result, device, "time_us").items():
            xs = [r["rows"] * r["columns"] for r, _ in points]
            axes.loglog(
                xs, [y / 1e3 for _, y in points], "o-" if device == "gpu" else "s--", markersize=4, **_look(kernel)
            )
    axes.set(title="Figure 2: time to quantize, CPU and GPU", xlabel="elements", ylabel="ms")
    axes.legend(fontsize=7)


def _realistic(axes: Any, result: dict[str, Any]) -> None:
    series = {
        k: [(r, y / 1e3) for r, y in points if r["case"].startswith("realistic")]
        for k, points in _series(result, "gpu", "time_us").items()
    }
    _bars(axes, {k: points for k, points in series.items() if points} or _series(result, "gpu", "time_us"))
    axes.set(title="Figure 3: time of the GPU kernels on realistic loads", ylabel="ms")


def _errors(axes: Any, result: dict[str, Any]) -> None:
    rows = [r for r in result["errors"] if r["columns"] % EVEN == 0]
    rows.sort(key=lambda r: (r["error_rows"] * r["columns"], r["columns"]))
    sizes = [r["error_rows"] * r["columns"] for r in rows]
    axes[0].loglog(sizes, [r["l2_error"] for r in rows], "o-", label="L2 error")
    axes[0].loglog(sizes, [r["max_error"] for r in rows], "s-", label="largest error")
    axes[0].axhline(1 / 254, color="gray", linestyle=":", label="1 / 254")
    axes[0].set(title="Figure 4 left: reconstruction error", xlabel="elements")
    columns = sorted({r["columns"]: r["attention_error"] for r in rows}.items())
    axes[1].loglog([d for d, _ in columns], [e for _, e in columns], "o-", label="mean attention score error")
    d, e = columns[0]
    axes[1].loglog(
        [x for x, _ in columns], [e * math.sqrt(x / d) for x, _ in columns], ":", color="gray", label="sqrt(D)"
    )
    axes[1].axhline(0.1, color="tab:red", linestyle=":", label="0.1")
    axes[1].set(title="Figure 4 right: attention score error", xlabel="D")
    for a in axes:
        a.legend(fontsize=7)


def _scaling(axes: Any, result: dict[str, Any]) -> None:
    for kernel, points in _series(result, "gpu", BASELINE).items():
        axes.loglog(
            [r["rows"] * r["columns"] for r, _ in points], [y for _, y in points], "o-", markersize=4, **_look(kernel)
        )
    axes.set(title="Figure 5: speed-up over the scalar CPU code and problem size", xlabel="elements", ylabel="times")
    axes.legend(fontsize=7)
