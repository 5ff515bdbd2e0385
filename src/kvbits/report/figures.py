"""PNG figures for papers and READMEs (matplotlib): accuracy against bits, layers, passkey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from .collect import Model, Results, held_bits

BLUE, ORANGE = "#0072B2", "#D55E00"


def figures(results: Results, folder: Path) -> list[Path]:
    """Write every figure the results allow; returns the files.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("PNG figures need matplotlib; run `pip install 'kvbits[plot]'`, or leave --png out") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for key, model in results.models.items():
        for name, draw in (("pareto", _pareto), ("layers", _layers), ("passkey", _passkey)):
            figure, ax = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
            if draw(model, ax, plt):
                path = folder / f"{name}-{key}.png"
                figure.savefig(path, dpi=150)
                made.append(path)
            plt.close(figure)
    return made


def _pareto(model: Model, ax: Any, plt: Any) -> bool:
    cells = model.tasks.get("fidelity", {})
    for kind, color, marker, label in (("kvbits", BLUE, "o", "kvbits"), ("stock", ORANGE, "^", "Transformers' quantized caches")):
        points = [(held_bits(c, cells), c.summary["kl_mean"], c.scheme) for c in cells.values() if c.kind == kind and c.summary and c.summary["kl_mean"] > 0]
        if not points:
            continue
        ax.scatter([p[0] for p in points], [p[1] for p in points], color=color, marker=marker, label=label, zorder=3)
        for x, y, name in points:
            ax.annotate(name, (x, y), textcoords="offset points", xytext=(6, 3), fontsize=7, color=color)
    if not ax.collections:
        return False
    ax.set(yscale="log", xlabel="bits per cached number really held", ylabel="KL divergence, nats", title=model.title)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return True


def _heat(ax: Any, plt: Any, rows: list[str], columns: list[str], values: list[list[float | None]], title: str, label: str) -> None:
    data = [[float("nan") if v is None else v for v in row] for row in values]
    image = ax.imshow(data, aspect="auto", cmap="cividis_r")
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ax.set_xticks(range(len(columns)), columns, fontsize=7, rotation=90 if max(map(len, columns)) > 3 else 0)
    ax.set_title(title)
    plt.colorbar(image, ax=ax, label=label)


def _layers(model: Model, ax: Any, plt: Any) -> bool:
    cells = {n: c for n, c in model.tasks.get("attention", {}).items() if c.kind != "base" and c.summary}
    if not cells:
        return False
    values = [c.summary["by_layer"]["tvd"] for c in cells.values()]
    _heat(ax, plt, list(cells), [str(i) for i in range(len(values[0]))], values, f"{model.title}: attention that moved, by layer", "total variation")
    return True


def _passkey(model: Model, ax: Any, plt: Any) -> bool:
    maps = {n: c.summary["heat_map"] for n, c in model.tasks.get("passkey", {}).items() if c.summary.get("heat_map")}
    if not maps:
        return False
    columns = list(dict.fromkeys(k for m in maps.values() for k in m))
    _heat(ax, plt, list(maps), columns, [[m.get(c) for c in columns] for m in maps.values()], f"{model.title}: passkeys found, by length and depth", "share")
    return True
