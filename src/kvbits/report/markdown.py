"""Markdown tables, and which scheme to take: all of it computed from results, by rules that stand here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..evaluate import MAX_KL, MAX_PPL_CHANGE, shown
from ..evaluate.paired import points
from ..runs import dated
from ..schemes import PRESETS, weak_to_key_bias
from .collect import Cell, Model, Results, bits, held_bits, long_bits

Speeds = Mapping[str, Mapping[str, float]]
"""preset -> shape -> speed of attention on a GPU over the fastest 16-bit kernel's."""
UNTIMED: Speeds = {}

LEGEND = (
    "Each model has two figures. The first is the change of perplexity against the 16-bit cache on the same tokens, ±"
    " its standard error over windows. The second is the KL divergence between the two caches' next-token"
    " probabilities, in nats: 0 is the same."
)
CLASSES = (("About 8 bits", 7.0, 9.0), ("4 to 5 bits", 3.9, 5.6), ("Under 4 bits", 0.0, 3.9))
"""Bits per element at long context that compete with each other for a recommendation."""

RAW_SHARE = 0.95
"""Share of the raw cache's bits from which on nothing is quantized."""
TIE_KL = 2e-4
"""Nats by which two correct kernels in bfloat16 differ: presets that near are equals."""


@dataclass(frozen=True)
class Row:
    """One cache of the scheme table."""

    scheme: str
    kind: str
    cells: list[str]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Write a Markdown table.

    Args:
        left: how many of the first columns are aligned left; the others are aligned right.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * left + "---:|" * (len(columns) - left)]
    return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])


def conditions(model: Model) -> str:
    """Describe what a model's figures were measured on."""
    cells = model.tasks["fidelity"]
    base = next(iter(cells.values()))
    texts = list(dict.fromkeys(k.split("@")[0] for k in base.items))
    s = base.settings
    most, least = max(c.summary["windows"] for c in cells.values()), min(c.summary["windows"] for c in cells.values())
    count = f"{most}" if most == least else f"{least} to {most}"
    of = f"{count} window{'' if count == '1' else 's'} of {s['length']:,} tokens"
    which = (
        f"{of} spread over {', '.join(texts)}"
        if s.get("windows") == "spread"
        else f"the first {of} of {', '.join(texts)}"
    )
    return f"{which}, fed in chunks of {s['chunk']}, {model.facts['dtype']}"


def measured(model: Model) -> dict[str, Cell]:
    """Return caches beside the model's own, without those that `_still_raw` says were not measured."""
    cells = model.tasks.get("fidelity", {})
    return {n: c for n, c in cells.items() if c.summary and c.kind != "base" and not _still_raw(c, cells)}


def _still_raw(cell: Cell, cells: dict[str, Cell]) -> bool:
    """Return whether a scheme of few bits held its windows raw to their ends. Such windows are shorter than the
    scheme's run of raw tokens, and say nothing about its codes.
    """
    stated, held = cell.info.get("bits_per_element"), held_bits(cell, cells)
    if stated is None or held is None:
        return False
    whole = RAW_SHARE * next(float(c.info["bits_per_element"]) for c in cells.values() if c.kind == "base")
    return stated < whole <= held


def scheme_rows(results: Results, speeds: Speeds = UNTIMED) -> tuple[list[str], list[Row], list[str]]:
    """Return (column names, rows by bits, sentences) of the table "which scheme should I take".

    Raises:
        SpecError: no fidelity results.
    """
    models = {k: m for k, m in results.as_used.items() if "fidelity" in m.tasks}
    if not models:
        tasks = sorted({task for m in results.models.values() for task in m.tasks})
        raise SpecError(
            f"no results of the task fidelity, only of {', '.join(tasks)}; run `kvbits eval MODEL --tasks fidelity`"
            " into the same folder first"
        )
    first: dict[str, tuple[float, Cell]] = {}
    for m in models.values():
        for name, c in measured(m).items():
            first.setdefault(name, (held_bits(c, m.tasks["fidelity"]) or 99.0, c))
    columns = ["cache", "bits held", "bits", *(m.title for m in models.values())]
    rows = []
    for name, (b, cell) in sorted(first.items(), key=lambda kv: (-round(kv[1][0], 2), kv[1][1].kind == "stock", kv[0])):
        stated = long_bits(cell)
        cells = [_named(name, cell), f"{b:.2f}", "" if stated is None else f"{stated:.2f}"]
        for m in models.values():
            s = measured(m)[name].summary if name in measured(m) else None
            cells.append("" if s is None else f"{change(s)}, {s['kl_mean']:.4f}")
        rows.append(Row(name, cell.kind, cells))
    return columns, rows, [*recommendations(results, speeds), *_notes(models)]


def _named(name: str, cell: Cell) -> str:
    return f"{name} (Transformers)" if cell.kind == "stock" else name


def change(s: dict[str, Any]) -> str:
    change, se = s.get("ppl_change", 0.0), s.get("ppl_change_se")
    return f"{change:+.2%}" + ("" if se is None else f" ± {100 * se:.2f}")


def _notes(models: dict[str, Model]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for m in models.values():
        alike.setdefault(conditions(m), []).append(m.title)
    found = [
        f"{', '.join(titles) if len(alike) > 1 or len(models) == 1 else 'All models'}: {how}."
        for how, titles in alike.items()
    ]
    cells = [(c, m.tasks["fidelity"]) for m in models.values() for c in m.tasks["fidelity"].values() if c.summary]
    if unmoved := list(dict.fromkeys(f"`{c.scheme}`" for c, all_of in cells if _still_raw(c, all_of))):
        found.append(
            f"Not in the table: {', '.join(unmoved)}, whose run of raw tokens is longer than these windows, so that"
            " nothing was quantized."
        )
    floor = {
        m.title: m.tasks["fidelity"]["raw"].summary["kl_mean"] for m in models.values() if "raw" in m.tasks["fidelity"]
    }
    dtypes = " and ".join(dict.fromkeys(m.facts["dtype"] for m in models.values() if m.title in floor))
    noise = (
        f" `raw` is lossless: its KL ({', '.join(f'{v:.4f}' for v in floor.values())}) is the rounding noise of"
        f" {dtypes}."
        if floor
        else ""
    )
    made_of = f"Heads of {_head_widths(models)} channels. Weights: {weights_note(models)}."
    return [
        LEGEND,
        made_of,
        "Bits held are those of a cached number at the end of a window, raw newest tokens and scales included. Bits are"
        f" what a number of one more token costs at long context.{_widths(models)}{noise}",
        *found,
        *_of_other_formats(models),
        *_in_float32(models),
        *_unfit_notes(models),
    ]


def _of_other_formats(models: dict[str, Model]) -> list[str]:
    """Return caches whose format is gone, or stored otherwise where they were measured."""
    cells = [c for m in models.values() for c in m.tasks["fidelity"].values()]
    return of_earlier(c.scheme for c in cells if c.outdated)


def of_earlier(names: Iterable[str]) -> list[str]:
    """Return a sentence about caches that were measured in a format which the preset of that name has no more, in a
    list; an empty list where there are none.
    """
    found = ", ".join(dict.fromkeys(f"`{name}`" for name in names))
    return (
        [f"{found}: measured in an earlier format, which stored otherwise than the preset of that name does today."]
        if found
        else []
    )


def _in_float32(models: dict[str, Model]) -> list[str]:
    """Describe what differs where a model was measured in float32 only."""
    titles = [m.title for m in models.values() if m.facts["dtype"] == "float32"]
    text = (
        f"{', '.join(titles)}: the cache beside which others are measured has 32 bits. Raw tokens count so in bits"
        " held; in 16 bits they take half of that."
    )
    return [text] if titles else []


def _unfit_notes(models: dict[str, Model]) -> list[str]:
    """Return which schemes are unfit for which models, and why."""
    if not (found := unfit(models.values())):
        return []
    listed = "; ".join(f"`{name}` for {', '.join(m.title for m in some)}" for name, some in found.items())
    shared = [f"`{name}`" for name in found if name in PRESETS and weak_to_key_bias(PRESETS[name])]
    why = (
        f" {', '.join(shared)}: scales that channels of a key share, which a bias in the keys (Qwen2.5) or few large"
        " channels spoil."
        if shared
        else ""
    )
    return [f"Unfit (perplexity more than {MAX_PPL_CHANGE:.0%} up, or KL above {MAX_KL} nats): {listed}.{why}"]


def _widths(models: dict[str, Model]) -> str:
    """Return whose bits the table has, and how wide the heads are. The bits are those of the first model on which a
    scheme was measured.
    """
    widths: dict[str, dict[int, None]] = {}
    seen: set[str] = set()
    for m in models.values():
        for name, cell in measured(m).items():
            if name not in seen and "head_dims" in cell.info:
                seen.add(name)
                widths.setdefault(m.title, {}).update(dict.fromkeys(cell.info["head_dims"]))
    if not widths:
        return ""
    found = (f"{title} (`kvbits schemes --head-dim {' or '.join(map(str, dims))}`)" for title, dims in widths.items())
    return f" Both are those of {' and '.join(found)}."


def recommendations(results: Results, speeds: Speeds = UNTIMED) -> list[str]:
    """Return a sentence per class of bits: the scheme whose worst KL over all measured models is smallest, among
    presets measured on every one. One that needs no calibration comes first where it is usable (`MAX_KL`), then one
    that does if it is better; none where even the best passes that limit.

    Args:
        speeds: of presets on a GPU; the text names those slower than 16 bits.
    """
    models = {k: m for k, m in results.as_used.items() if "fidelity" in m.tasks}
    found = []
    for title, names in _recommended(models):
        first, *others = names
        usable = _worst(models, first, "kl_mean") <= MAX_KL
        name = f"`{first}`" if usable else f"none to recommend; the best is `{first}`"
        text = (
            f"**{title}: {name}**. The worst of these models has"
            f" {_costs(results, models, first)}.{_price(first, speeds)}"
        )
        for other in others:
            text += (
                f" `{other}` needs a calibration (`kvbits calibrate`) and has"
                f" {_costs(results, models, other)}.{_slow(other, speeds)}"
            )
        found.append(text)
    return found


def recommended(results: Results) -> tuple[str, ...]:
    """Return the schemes that `recommendations` and `budgets` name as usable."""
    models = {k: m for k, m in results.as_used.items() if "fidelity" in m.tasks}
    return tuple(
        name for _, names in _recommended(models) for name in names if _worst(models, name, "kl_mean") <= MAX_KL
    )


def budgets(results: Results, speeds: Speeds = UNTIMED) -> list[str]:
    """Return one sentence a budget of bits, without figures that need an explanation."""
    models = {k: m for k, m in results.as_used.items() if "fidelity" in m.tasks}
    found = []
    for title, (first, *others) in _recommended(models):
        if first not in recommended(results):
            found.append(f"**{title}**: kvbits recommends no scheme.")
            continue
        harder = (
            f"text becomes {_worst(models, first, 'ppl_change'):.1%} harder to predict for the worst of the"
            f" {len(models)} models"
        )
        text = f"**{title}: `{first}`** makes the cache {_smaller(models, first)}; {harder}.{_price(first, speeds)}"
        for other in others:
            near = (
                f"predictions lie {_worst(models, first, 'kl_mean') / _worst(models, other, 'kl_mean'):.1f} times"
                " nearer to the 16-bit cache's"
            )
            text += f" `{other}` needs a calibration (`kvbits calibrate`), and its {near}.{_slow(other, speeds)}"
        found.append(text)
    return found


def _smaller(models: dict[str, Model], scheme: str) -> str:
    """Return how many times smaller than the model's own a cache was at the end of the measured windows, and how many
    times in long contexts. Each figure is the least of all models. The text names the bits of the model's own cache.
    """
    ratios = []
    for m in models.values():
        cells = m.tasks["fidelity"]
        base = next(c for c in cells.values() if c.kind == "base")
        own, cell = float(base.info["bits_per_element"]), measured(m)[scheme]
        ratios.append((own, base.settings.get("length"), held_bits(cell, cells), bits(cell, cells)))
    held = [(own / b, length) for own, length, b, _ in ratios if b]
    least, length = min(held, key=lambda x: x[0])
    after = f"after {length:,} tokens" if length else "at the end of a window"
    long = min(own / b for own, _, _, b in ratios if b)
    owns = " or ".join(f"{own:.0f}" for own in sorted({own for own, *_ in ratios}))
    return f"{least:.1f} times smaller than in {owns} bits {after}, {long:.1f} times in long contexts"


def _worst(models: dict[str, Model], scheme: str, figure: str) -> float:
    return float(max(measured(m)[scheme].summary[figure] for m in models.values()))


def _costs(results: Results, models: dict[str, Model], scheme: str) -> str:
    worst_kl, worst_ppl = _worst(models, scheme, "kl_mean"), _worst(models, scheme, "ppl_change")
    mass = _least_mass(models.values(), scheme)
    return (
        f"perplexity {worst_ppl:+.2%}, KL {worst_kl:.4f} nats, probability mass matched"
        f" {mass:.2%}{_floor(results, scheme)}"
    )


def _needs_calibration(scheme: str) -> bool:
    return scheme in PRESETS and PRESETS[scheme].needs_calibration


def _price(scheme: str, speeds: Speeds) -> str:
    """Return what a scheme asks for beyond bits: a calibration, and time where it is slower than 16 bits."""
    calibration = f" `{scheme}` needs a calibration (`kvbits calibrate`)." if _needs_calibration(scheme) else ""
    return calibration + _slow(scheme, speeds)


def _slow(scheme: str, speeds: Speeds) -> str:
    measured = speeds.get(scheme, {})
    slow = [ratio for ratio in measured.values() if ratio < 1]
    return (
        f" On a GPU `{scheme}` is slower than 16 bits in {len(slow)} of {len(measured)} shapes, at worst"
        f" {min(slow):.2f} times as fast."
        if slow
        else ""
    )


def _recommended(models: dict[str, Model]) -> list[tuple[str, list[str]]]:
    """Return (class of bits, schemes, the first one first) of every class that has one."""
    found = []
    for title, low, high in CLASSES:
        best, plain = best_of(models, low, high), best_of(models, low, high, calibrated=False)
        if plain is not None and best != plain and _worst(models, plain, "kl_mean") <= MAX_KL:
            found.append((title, [plain, *([best] if best is not None else [])]))
        elif best is not None:
            found.append((title, [best]))
    return found


def unfit(models: Iterable[Model]) -> dict[str, list[Model]]:
    """Return preset -> models it is unfit for: perplexity or KL past what `kvbits check` lets pass."""
    found: dict[str, list[Model]] = {}
    for m in models:
        for name, c in measured(m).items():
            if c.kind == "kvbits" and (c.summary["kl_mean"] > MAX_KL or c.summary["ppl_change"] > MAX_PPL_CHANGE):
                found.setdefault(name, []).append(m)
    return found


def _least_mass(models: Iterable[Model], scheme: str) -> float | None:
    """Return the least probability mass matched over those of the models where the scheme was measured."""
    return min((measured(m)[scheme].summary["mass_matched"] for m in models if scheme in measured(m)), default=None)


def _floor(results: Results, scheme: str) -> str:
    """Return how much of the mass that a scheme loses is noise. The text gives the mass that the lossless cache
    matches, and the mass that the scheme matches with less noise.
    """
    found = []
    if (raw := _least_mass(results.as_used.values(), "raw")) is not None:
        found.append(f"the lossless `raw` {raw:.2%}")
    finer = [m for m in results.finer if "fidelity" in m.tasks]
    if (least := _least_mass(finer, scheme)) is not None:
        dtypes = " and ".join(dict.fromkeys(m.facts["dtype"] for m in finer if scheme in measured(m)))
        found.append(f"with less rounding noise, in {dtypes}, {least:.2%}")
    return f" ({'; '.join(found)})" if found else ""


def mass_rows(results: Results) -> tuple[list[str], list[list[str]], str]:
    """Return (column names, rows, a sentence) of the table of probability mass matched by `raw` and the recommended
    schemes on each model, and the least of each dtype's models.
    """
    sixteen = {k: m for k, m in results.as_used.items() if "fidelity" in m.tasks}
    dtypes: dict[str, list[Model]] = {}
    for m in [*sixteen.values(), *(m for m in results.finer if "fidelity" in m.tasks)]:
        dtypes.setdefault(m.facts["dtype"], []).append(m)
    schemes = ["raw", *(best for _, names in _recommended(sixteen) for best in names)]
    rows = []
    for dtype, models in dtypes.items():
        rows += [[f"{m.name}, {dtype}", *(percent(_least_mass([m], s)) for s in schemes)] for m in models]
        least = [f"least, {dtype}"]
        for s in schemes:
            there = sum(s in measured(m) for m in models)
            least.append(
                percent(_least_mass(models, s)) + (f" ({there} of {len(models)})" if 0 < there < len(models) else "")
            )
        rows.append(least)
    noise = (
        " What the lossless `raw` misses is rounding noise, by which two correct kernels differ: float16 has an eighth"
        " of bfloat16's, float32 hardly any."
    )
    noise = noise if rows[0][1] else ""
    said = (
        f"Probability mass matched: 1 - total variation between the next-token distributions, mean over tokens.{noise}"
    )
    return ["model", *schemes], rows, said


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def best_of(models: dict[str, Model], low: float, high: float, *, calibrated: bool = True) -> str | None:
    """Return the preset of `low` to `high` bits with the smallest worst KL; fewest bits among those within `TIE_KL`.

    None if none is on every model.

    Args:
        calibrated: also presets that need a calibration.
    """
    found: dict[str, tuple[float, float]] = {}
    for m in models.values():
        for name, c in measured(m).items():
            b = bits(c, m.tasks["fidelity"])
            if (
                c.kind == "kvbits"
                and (calibrated or not _needs_calibration(name))
                and b is not None
                and low <= b < high
                and all(name in measured(other) for other in models.values())
            ):
                found[name] = (max(found.get(name, (0.0, 0.0))[0], c.summary["kl_mean"]), b)
    if not found:
        return None
    smallest = min(kl for kl, _ in found.values())
    return min((n for n in found if found[n][0] <= smallest + TIE_KL), key=lambda n: (found[n][1], found[n][0]))


def weights_note(models: dict[str, Model]) -> str:
    """Return what the weights of the measured models were made from. A name alone would promise the
    original's weights.
    """
    by_format: dict[str, list[str]] = {}
    four = all("GGUF Q4" in (m.facts.get("weights") or {}).get("format", "") for m in models.values())
    for m in models.values():
        found = m.facts.get("weights")
        by_format.setdefault(found["format"] if found else "not recorded", []).append(m.name)
    listed = "; ".join(f"{', '.join(names)}: {how}" for how, names in by_format.items())
    return f"of 4 bits, unpacked, not the originals' ({listed})" if four else listed


def _head_widths(models: dict[str, Model]) -> str:
    """Return channels of a head of each model: bits of a preset depend on them a little."""
    widths: dict[str, list[str]] = {}
    for m in models.values():
        dims = dict.fromkeys(d for c in measured(m).values() for d in c.info.get("head_dims", []))
        widths.setdefault(" and ".join(map(str, dims)) or "?", []).append(m.name)
    return ", ".join(f"{dims} ({', '.join(names)})" for dims, names in widths.items())


def runs_note(results: Results) -> str:
    """Return the line under a table of all caches: the day and commit of each model's figures."""
    models = [m for m in results.as_used.values() if "fidelity" in m.tasks]
    return "Runs: " + "; ".join(f"{m.title} {dated(c.run for c in measured(m).values())}" for m in models) + "."


def report(results: Results) -> str:
    """Return everything as Markdown."""
    parts = ["# What few bits cost"]
    if any("fidelity" in m.tasks for m in results.models.values()):
        columns, rows, notes = scheme_rows(results)
        mass_columns, mass, said = mass_rows(results)
        parts += [*notes, table(columns, [r.cells for r in rows]), said, table(mass_columns, mass)]
    for m in results.models.values():
        for task, cells in m.tasks.items():
            if not any(c.summary for c in cells.values()):
                continue
            shown_of = {c.scheme: c.summary for c in cells.values()}
            columns, rows_of = shown.table(task, shown_of)
            setting = next(iter(cells.values())).settings
            parts += [
                f"## {m.title}: {task}",
                conditions(m) if task == "fidelity" else f"`{setting}`",
                table(columns, rows_of),
                *octaves(cells),
                *kinds(cells),
            ]
    return "\n\n".join(parts) + "\n"


def octaves(cells: dict[str, Cell]) -> list[str]:
    """Return a table of mean KL and flips by octave of position, with its growth per doubling; none where nothing was
    noted by position.
    """
    measured = {c.scheme: c.summary for c in cells.values() if c.kind != "base" and c.summary.get("octaves")}
    places = sorted({int(at) for s in measured.values() for at in s["octaves"]})
    if not places:
        return []
    rows = []
    for name, s in measured.items():
        by = [s["octaves"].get(str(at)) for at in places]
        grown = "" if s["drift"] is None else f"{s['drift']:+.1%}"
        rows.append([name, *("" if one is None else f"{one['kl_mean']:.5f}, {one['flips']:.2%}" for one in by), grown])
    return [
        "KL and flips of the most likely token, by position; KL's growth when the position doubles, from 512 on:",
        table(["cache", *(f"{at:,} to {2 * at - 1:,}" for at in places), "per doubling"], rows),
    ]


def kinds(cells: dict[str, Cell]) -> list[str]:
    """Return a table of the share that is right, by kind and length, and its difference to the 16-bit cache's in points
    with a 95 % interval.
    """
    named = list(dict.fromkeys(kind for c in cells.values() for kind in c.summary.get("by_kind", {})))
    rows = [
        [kind, *(_points(c.summary.get("by_kind", {}).get(kind, {}), c.kind == "base") for c in cells.values())]
        for kind in named
    ]
    columns = ["right; points more than the 16-bit cache (95 %)", *(c.scheme for c in cells.values())]
    return [table(columns, rows)] if rows else []


def _points(s: dict[str, Any], alone: bool) -> str:
    if not s:
        return ""
    found = f"{s['accuracy']:.1%}" + (f" of {s['parts']:,}" if alone else "")
    return found if alone or not points(s) else f"{found}; {points(s)}"
