"""The tables of the documents that hold figures of a GPU, from benchmarks/results: each between two comments, `<!--
gpu:NAME -->` and `<!-- /gpu:NAME -->`. `python docs/make_tables.py` writes them.

Figures that are compared with each other are of one session on one machine, the newest that has them; every table says
when and with which commit it was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import run_files
import step_profile
from speeds import graphed, sitting

from kvbits import runs
from kvbits.evaluate.results import read as read_evaluation
from kvbits.report.markdown import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CARDS = "nvidia-*"
"""Folders of it, each of one kind of GPU."""
DOCUMENTS = (
    "docs/guide/vllm.md",
    "docs/guide/sglang.md",
    "docs/results/benchmarks.md",
    "docs/results/evaluation.md",
    "docs/internals/serving.md",
    "docs/internals/store.md",
)
PRESETS = ("raw", "int8_centered", "int4", "kivi4", "klt4", "klt3", "klt2")
OTHERS = ("int8", "fp8", "int8k_int4v", "kivi2", "nuq4-1%")
KERNELS = {"cudnn": "cuDNN", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer"}
CACHES = {
    ("stock_flash", "eager"): "stock",
    ("int8_centered", "eager"): "`int8_centered`, eager",
    ("fa3", "graph"): "16 bits, graph",
    **{(p, "graph"): f"`{p}`, graph" for p in PRESETS},
    ("fa3", "compiled_graph"): "16 bits, compiled and captured",
    ("int8_centered", "compiled_graph"): "`int8_centered`, compiled and captured",
}
"""Rows of bench_generate_gpu.py, in the order of the documents."""
SERVED = ("bf16", "fp8", "kvbits_int8_centered", "kvbits_klt4", "kvbits_klt3", "kvbits_klt2")
"""Columns of what bench_serve_vllm.py and study_prefix_hits.py measured."""
ARTICLE = {
    "FP16": ("bf16", 32, 3891, 112),
    "FP8": ("fp8", 64, 5834, 98),
    "INT8": ("kvbits_int8_centered", 64, 5721, 102),
    "INT4": ("kvbits_klt4", 96, 6892, 95),
}
"""Figures of an article on caches of 8 and 4 bits (A100 of 80 GB, Llama-70B, 4,096 tokens, continuous batching), by its
names: the dtype here; largest batch, tokens/s, P99 of the latency in ms.
"""
Row = dict[str, Any]


def on_each_card(block: Callable[[Path], str], name: str) -> Callable[[], str]:
    """Return a function that writes a block for each kind of GPU whose folder has a file, the newest first, below the
    folder's name.

    Args:
        block: writes it from a folder of results; nothing where the file has no figures of it.
        name: the file or folder that it reads.
    """

    def files(path: Path) -> Iterable[Path]:
        return [path] if path.is_file() else path.rglob("*.json")

    def written() -> str:
        found = []
        for folder in (path.parent for path in RESULTS.glob(f"{CARDS}/{name}")):
            made = [run for path in files(folder / name) for run in json.loads(path.read_text())["runs"].values()]
            card = folder.name.replace("-", " ").upper()
            if text := block(folder):
                found.append((max(str(run["utc"]) for run in made), f"One {card}:\n\n{text}"))
        return "\n\n".join(text for _, text in sorted(found, reverse=True))

    return written


def measured(data: Row, rows: Iterable[Row], command: str) -> str:
    """Write the line below a table."""
    made = {r["run"]: data["runs"][r["run"]] for r in rows}
    return f"`{command}`; {runs.dated(made.values())}."


def short(shape: str) -> str:
    """Write "B=8 H=32/8 T=32768 D=128" as "8 x 32,768, 32"."""
    batch, heads, tokens = (int(n) for n in re.findall(r"[BHT]=(\d+)", shape))
    return f"{batch} x {tokens:,}, {heads}"


def decode(folder: Path) -> str:
    """Write the table of whole caches: speed of each preset over the fastest 16-bit kernel, and that kernel's time;
    presets that README does not name where they are of the newest commit. A card whose `raw` was not timed has none.
    """
    data = run_files.joined(sorted(folder.glob("attend_decode*.json")))
    newest = run_files.latest(
        {"runs": data["runs"], "rows": [r for r in data["rows"] if "speedup_real_cache" in r]}, ("scheme", "shape")
    )
    rows = {
        key: r
        for key, r in newest.items()
        if key[0] in (*PRESETS, *OTHERS) and not run_files.outdated(key[0], data["runs"][r["run"]])
    }
    shapes = list(dict.fromkeys(shape for name, shape in rows if name == "raw"))
    if not shapes:
        return ""
    newest_run = max((rows["raw", s]["run"] for s in shapes), key=lambda r: data["runs"][r]["utc"])
    commit = data["runs"][newest_run]["commit"]
    rows = {key: r for key, r in rows.items() if key[0] in PRESETS or data["runs"][r["run"]]["commit"] == commit}
    times = {(p["kernel"], p["shape"]): p for p in data.get("peers", []) if p["run"] == newest_run}
    lines = []
    for kernel, words in KERNELS.items():
        if any(name == kernel for name, _ in times):
            lines.append(
                [
                    f"{words}, us",
                    *(f"{times[kernel, s]['time_us']:.0f}" if (kernel, s) in times else "" for s in shapes),
                ]
            )
    for name in [n for n in (*PRESETS, *OTHERS) if any(key[0] == n for key in rows)]:
        cells = []
        for s in shapes:
            r = rows.get((name, s))
            within = f" / {r['speedup_between_matmuls']:.2f}" if r and "speedup_between_matmuls" in r else ""
            cells.append(f"{r['speedup_real_cache']:.2f}{within}" if r else "")
        lines.append([f"`{name}`", *cells])
    said = measured(data, rows.values(), "python benchmarks/bench_decode_gpu.py")
    return f"{table(['', *map(short, shapes)], lines)}\n\n{said}"


def generated(folder: Path) -> tuple[Row, dict[tuple[int, int], dict[tuple[str, str], Row]]]:
    data = run_files.read(folder / "generate.json")
    return data, {at: rows for at, rows in graphed(data).items() if at in ((1, 32768), (32, 8192))}


def generate(folder: Path) -> str:
    """Write the table of milliseconds a token, tokens a second of the prompt, memory."""
    data, found = generated(folder)
    header = ["", *(f"{batch} x {context:,}" for batch, context in found)]
    lines = []
    for key, words in CACHES.items():
        if any(key in rows for rows in found.values()):
            cells = [rows.get(key) for rows in found.values()]
            lines.append(
                [
                    words,
                    *(
                        f"{r['ms_per_token']:.2f} ({r['median_ms']:.2f}, {r['slowest_ms']:.2f})" if r else ""
                        for r in cells
                    ),
                ]
            )
    for title, field, form in (
        ("prompt, tokens/s", "prefill_tokens_per_s", lambda r: f"{r['prefill_tokens_per_s']:,.0f}"),
        (
            "peak memory decoding, beside the weights, GiB",
            "bytes_before",
            lambda r: f"{(r['peak_bytes'] - r['bytes_before']) / 2**30:.1f}",
        ),
    ):
        for name, words in (("stock_flash", "stock"), ("int8_centered", "`int8_centered`"), ("klt2", "`klt2`")):
            texts = [
                next((form(r) for (n, _), r in rows.items() if n == name and r.get(field)), "")
                for rows in found.values()
            ]
            if any(texts):
                lines.append([f"{title}: {words}", *texts])
    used = [r for rows in found.values() for key, r in rows.items() if key in CACHES]
    return f"{table(header, lines)}\n\n{measured(data, used, 'python benchmarks/bench_generate_gpu.py')}"


def prompts(folder: Path) -> str:
    """Write the table of prompts alone: the second and third of a process, and its first; then generate() as users call
    it.
    """
    data = run_files.read(folder / "generate.json")
    lines, used = [], []
    for at in dict.fromkeys(
        (r["batch"], r["context"], r.get("chunk")) for r in data["rows"] if r["through"] == "prefill" and r.get("chunk")
    ):
        alike = [
            r for r in data["rows"] if r["through"] == "prefill" and (r["batch"], r["context"], r.get("chunk")) == at
        ]
        rows = sitting(data, alike, lambda some: len({r["scheme"] for r in some}) > 1)
        used += rows
        where = f"{at[0]} x {at[1]:,}{f' in chunks of {at[2]:,}' if at[2] else ''}"
        lines += [
            [where, f"`{r['scheme']}`", f"{r['prefill_tokens_per_s']:,.0f}", f"{r['first_prefill_tokens_per_s']:,.0f}"]
            for r in rows
        ]
    turns = sitting(
        data,
        [r for r in data["rows"] if r["through"] == "generate" and r["scheme"] != "static"],
        lambda some: len({r["scheme"] for r in some}) > 1,
    )
    said = ", ".join(
        f"`{r['scheme']}` {'in a graph' if r['mode'] == 'graph' else 'eager'} {r['ms_per_token']:.2f}" for r in turns
    )
    head = table(["sequences x tokens", "cache", "tokens/s", "the first of its process"], lines)
    return (
        f"{head}\n\n`generate()` from a prompt of 2,048 tokens, one sequence, milliseconds a token: {said}.\n\n"
        f"{measured(data, [*used, *turns], 'python benchmarks/bench_generate_gpu.py --prefill')}"
    )


def serving(folder: Path) -> str:
    return served(folder / "serve_vllm.json", "python benchmarks/bench_serve_vllm.py")


def serving_sglang(folder: Path) -> str:
    return served(folder / "serve_sglang.json", "python benchmarks/bench_serve_sglang.py")


def against_bf16(data: Row) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the rows of one GPU by (mode, compiled, shape) and dtype, each with the `base` in bf16 of its own session:
    the newest that has both, of prompts that were prefilled or of pages that were filled with random bytes.
    """
    plain = [
        r
        for r in data["rows"]
        if r["options"] in ({}, {"prefill": True})
        and r["gpus"] == 1
        and r["geometry"] == "llama-3.1-8b"
        and r["mode"] in ("decode", "prefill")
    ]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for r in plain:
        shape = ("largest",) if r.get("largest") else (r["batch"], r["context"])
        groups.setdefault((r["mode"], bool(r["compiled"]), *shape), []).append(r)
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for key, rows in groups.items():
        for d in {r["kv_cache_dtype"] for r in rows} - {"bf16"}:
            pair = {"bf16", d}
            by_dtype = {
                r["kv_cache_dtype"]: r
                for r in sitting(data, rows, lambda some: pair <= {r["kv_cache_dtype"] for r in some})  # noqa: B023
            }
            if by_dtype:
                found.setdefault(key, {})[d] = by_dtype[d] | {"base": by_dtype["bf16"]}
        if key in found:
            bases = [r["base"] for r in found[key].values()]
            newest = max(bases, key=lambda r: data["runs"][r["run"]]["utc"])
            found[key]["bf16"] = newest | {"base": newest}
    return found


def served(path: Path, command: str) -> str:
    """Write the table of steps through an engine, largest batches, capacity, first tokens; ratios to bf16 of the
    session that a row is of, the newest that has both.
    """
    data = run_files.read(path)
    found = against_bf16(data)
    if not found:
        return ""
    dtypes = [d for d in (*SERVED[:3], "kvbits_int4", *SERVED[3:]) if any(d in rows for rows in found.values())]
    order = sorted(
        found,
        key=lambda key: (
            key[0] != "decode",
            key[1],
            key[2] == "largest",
            [-n if isinstance(n, int) else 0 for n in key[2:]],
        ),
    )
    lines = []
    for key in order:
        mode, compiled, *at = key
        by_dtype, field = (
            found[key],
            ("ttft_ms" if mode == "prefill" else "tokens_per_s" if at == ["largest"] else "step_ms"),
        )
        title = (
            "largest batch of 8,192 each, tokens/s"
            if at == ["largest"]
            else (
                f"first token of a prompt of {at[1]:,}, ms"
                if mode == "prefill"
                else f"{at[0]} x {at[1]:,}, a step in ms{', torch.compile' if compiled else ''}"
            )
        )
        cells = []
        for d in dtypes:
            r = by_dtype.get(d)
            share = f" ({r[field] / r['base'][field]:.2f}x)" if r and d != "bf16" else ""
            prefix = f"{r['batch']}: " if r and at == ["largest"] else ""
            cells.append(
                f"{prefix}{r[field]:,.0f}{share}" if r and r[field] >= 100 else f"{r[field]:.2f}{share}" if r else ""
            )
        lines.append([title, *cells])
        if at == ["largest"]:
            held = [by_dtype.get(d) for d in dtypes]
            lines.append(
                ["capacity, tokens"]
                + [
                    (
                        ""
                        if r is None
                        else f"{n:,}"
                        if r["kv_cache_dtype"] == "bf16"
                        else f"{n / r['base']['capacity_tokens']:.2f}x"
                    )
                    for r in held
                    for n in [r and r["capacity_tokens"]]
                ]
            )
    stock = found.get(("decode", False, 48, 8192), {})
    more = [
        f"`{d}` {r['step_ms']:.1f} ms ({r['step_ms'] / r['base']['step_ms']:.2f}x)"
        for d, r in stock.items()
        if d not in dtypes and not d.startswith("kvbits")
    ]
    said = f"\n\nvLLM's other dtypes of few bits at 48 x 8,192: {', '.join(more)}." if more else ""
    used = [r for key in order for r in found[key].values()]
    return f"{table(['batch x tokens', *(f'`{d}`' for d in dtypes)], lines)}{said}\n\n{measured(data, used, command)}"


def drafts(folder: Path) -> str:
    """Write the table of the share of drafts that each dtype accepts, tokens a step, and tokens a second with and
    without drafts: those of the newest session that has bf16.
    """
    data = run_files.read(folder / "serve_vllm.json")
    rows = sitting(
        data,
        [r for r in data["rows"] if r["mode"] == "drafts"],
        lambda some: {"bf16"} < {r["kv_cache_dtype"] for r in some},
    )
    if not rows:
        return ""
    by_column = {(r["load"]["drafts"], r["batch"], r["kv_cache_dtype"]): r for r in rows}
    columns = list(dict.fromkeys((drafts, batch) for drafts, batch, _ in by_column))

    def cell(r: Row | None) -> str:
        if r is None:
            return ""
        drafted = "" if r["load"]["drafts"] == "none" else f"{r['acceptance']:.0%}, {r['tokens_per_step']:.2f}, "
        return f"{drafted}{r['tokens_per_s']:,.0f}"

    lines = [
        [f"`{d}`", *(cell(by_column.get((*at, d))) for at in columns)]
        for d in SERVED
        if any(name == d for *_, name in by_column)
    ]
    header = [
        "drafts, sequences x tokens",
        *(f"{drafts}, {batch} x {rows[0]['context']:,}" for drafts, batch in columns),
    ]
    return f"{table(header, lines)}\n\n{measured(data, rows, 'python benchmarks/bench_serve_vllm.py drafts')}"


def loaded(mode: str) -> tuple[Row, list[Row]]:
    """Return the rows of one load on one machine: of the newest sitting that sent it to bf16 and to another dtype; none
    if none did.
    """
    found: tuple[str, Row, list[Row]] = "", {}, []
    for path in sorted(RESULTS.glob("nvidia-*/serve_vllm.json")):
        data = run_files.read(path)
        loads: dict[str, list[Row]] = {}
        for r in data["rows"]:
            if r["mode"] == mode and not r["options"]:
                loads.setdefault(json.dumps([r["geometry"], r["gpus"], r["compiled"], r["load"]]), []).append(r)
        for rows in loads.values():
            some = sitting(data, rows, lambda some: {"bf16"} < {r["kv_cache_dtype"] for r in some})
            if some:
                found = max(found, (data["runs"][some[-1]["run"]]["utc"], data, some), key=lambda one: one[0])
    return found[1], found[2]


def columns(rows: list[Row]) -> list[str]:
    """Return the rows' dtypes, in the order of the documents."""
    return sorted(
        {r["kv_cache_dtype"] for r in rows}, key=lambda d: (SERVED.index(d) if d in SERVED else len(SERVED), d)
    )


def of_machine(data: Row, rows: list[Row]) -> str:
    """Name the GPUs and the model of these rows."""
    run = data["runs"][rows[0]["run"]]
    return f"{rows[0]['gpus']} x {run['gpu']['name']}, {rows[0]['geometry']}, random weights"


def goodput() -> str:
    """Write the tables of rates of requests within limits: the 99th percentiles by rate, the highest rate that held,
    and an article's table beside it.
    """
    data, rows = loaded("goodput")
    if not rows:
        return "Not measured."
    dtypes, load = columns(rows), rows[0]["load"]
    tried = {(r["rate_per_s"], r["kv_cache_dtype"]): r for r in rows if not r.get("highest")}
    cell = lambda r: f"{r['ttft_p99_ms']:,.0f} / {r['tpot_p99_ms'] or 0:.1f}{'' if r['held'] else ' past'}"  # noqa: E731
    lines = [
        [f"{rate:g}", *(cell(tried[rate, d]) if (rate, d) in tried else "" for d in dtypes)]
        for rate in sorted({rate for rate, _ in tried})
    ]
    head = table(["requests/s sent: P99 of the first token / per token, ms", *(f"`{d}`" for d in dtypes)], lines)
    said = (
        f"{of_machine(data, rows)}; prompts of {load['prompts'][0]:,} to {load['prompts'][1]:,} tokens, answers of"
        f" {load['answers'][0]:,} to {load['answers'][1]:,}; P99 limits: {load['ttft_limit_ms']:,g}"
        f" ms to the first token, {load['tpot_limit_ms']:g} ms per token."
    )
    return "\n\n".join(
        [
            head,
            said,
            *filter(None, [beside_article(rows)]),
            measured(data, rows, "python benchmarks/bench_serve_vllm.py goodput"),
        ]
    )


def beside_article(rows: list[Row]) -> str:
    """Write the article's table beside the highest rates that held, each with its ratio to 16 bits; empty without such
    rows of bf16 and another dtype.
    """
    highest = {r["kv_cache_dtype"]: r for r in rows if r["mode"] == "goodput" and r.get("highest") and not r["options"]}
    if "bf16" not in highest or len(highest) < 2:
        return ""
    names = {
        "batch": "most_at_once",
        "tokens/s": "tokens_per_s",
        "P99 per token, ms": "tpot_p99_ms",
        "requests/s held": "rate_per_s",
    }
    base, (_, *theirs) = highest["bf16"], ARTICLE["FP16"]
    known = {dtype: (name, numbers) for name, (dtype, *numbers) in ARTICLE.items()}
    lines = []
    for dtype in columns(list(highest.values())):
        name, numbers = known.get(dtype, ("", []))
        left = (
            [f"{x:,} ({x / of:.2f}x)" for x, of in zip(numbers, theirs, strict=True)] if numbers else [""] * len(theirs)
        )
        right = [f"{highest[dtype][k]:,} ({highest[dtype][k] / base[k]:.2f}x)" for k in names.values()]
        lines.append([name, *left, f"`{dtype}`", *right])
    return table(["article", "batch", "tokens/s", "P99, ms", "here", *names], lines)


def turns() -> str:
    """Write the table of long chats with prefix caching, by number of users."""
    data, rows = loaded("turns")
    if not rows:
        return "Not measured."
    dtypes, load = columns(rows), rows[0]["load"]
    by = {(r["users"], r["kv_cache_dtype"]): r for r in rows}
    cell = lambda r: f"{r['hit_rate']:.0%}; {r['ttft_ms']:,.0f} / {r['ttft_p99_ms']:,.0f}; {r['tokens_per_s']:,.0f}"  # noqa: E731
    lines = [
        [
            "capacity, tokens",
            *(f"{next(r for r in rows if r['kv_cache_dtype'] == d)['capacity_tokens']:,}" for d in dtypes),
        ]
    ]
    lines += [
        [f"{n} users", *(cell(by[n, d]) if (n, d) in by else "" for d in dtypes)] for n in sorted({n for n, _ in by})
    ]
    head = table(["share of prompts found; first token P50 / P99, ms; tokens/s", *(f"`{d}`" for d in dtypes)], lines)
    said = (
        f"{of_machine(data, rows)}; chats of {load['history'][0]:,} to {load['history'][1]:,} tokens,"
        f" {load['think_s']:g} s of thought between turns."
    )
    return f"{head}\n\n{said}\n\n{measured(data, rows, 'python benchmarks/bench_serve_vllm.py turns')}"


def host_memory() -> str:
    """Write the table of long chats in SGLang on a CPU by format: the newest load, with pages in host memory and
    without.
    """
    data = run_files.read(RESULTS / "cpu" / "serve_sglang.json")
    newest = data["rows"][-1]
    rows = [r for r in data["rows"] if (r["users"], r["load"]) == (newest["users"], newest["load"])]
    ratios = sorted({r["options"].get("hicache_ratio", 0) for r in rows})
    by = {(r["kv_cache_dtype"], r["options"].get("hicache_ratio", 0)): r for r in rows}
    cell = lambda r: f"{r['hit_rate']:.0%}, {r['host_rate']:.0%}"  # noqa: E731
    lines = [[f"`{d}`", *(cell(by[d, ratio]) if (d, ratio) in by else "" for ratio in ratios)] for d in columns(rows)]
    titles = [f"`--hicache-ratio {ratio:g}`" if ratio else "without host memory" for ratio in ratios]
    head = table(["share of prompt tokens found, and loaded from host memory", *titles], lines)
    load = newest["load"]
    said = (
        f"{newest['users']} users, {load['running']} requests at once; chats of {load['history'][0]:,} to"
        f" {load['history'][1]:,} tokens, {load['think_s']:g} s of thought between turns; the device has room for"
        f" {newest['capacity_tokens']:,} tokens. A {newest['geometry']} model with random weights, on a CPU."
    )
    return f"{head}\n\n{said}\n\n{measured(data, rows, 'python benchmarks/bench_serve_sglang.py --users 64')}"


def profiles(rows: list[Row]) -> list[str]:
    """Write a title and a table for each shape that steps were profiled at. The last line has what they take without a
    profiler, with its ratio to 16 bits.
    """
    shapes: dict[str, list[Row]] = {}
    timed: dict[tuple[str, str], float] = {}
    for r in (r for r in rows if not r["options"]):
        name = (
            f"{r['batch']} x {r['context']:,} ({r['geometry']}, GPUs:"
            f" {r['gpus']}{', compiled' if r['compiled'] else ''})"
        )
        if r["mode"] == "profile":
            shapes.setdefault(name, []).append(r)
        elif r["mode"] == "decode":
            timed[name, r["kv_cache_dtype"]] = r["step_ms"]
    found = []
    for name, some in shapes.items():
        steps = {r["kv_cache_dtype"]: timed[name, r["kv_cache_dtype"]] for r in some}
        cells = [
            f"{ms:,.2f}" + (f" ({ms / steps['bf16']:.2f}x)" if d != "bf16" and "bf16" in steps else "")
            for d, ms in steps.items()
        ]
        found.append(f"{name}\n\n{step_profile.table_of(some, ['step without it, ms', *cells])}")
    return found


def close(folder: Path) -> str:
    data = run_files.read(folder / "close_pages.json")
    names = ("int8_centered", "int4", "kivi4", "fp8", *PRESETS[4:])
    rows = {name: r for (name,), r in run_files.latest(data, ("scheme",)).items() if name in names}
    lines = [[f"`{n}`", f"{rows[n]['time_us']:.0f} us", f"{rows[n]['share_of_copy']:.2f}"] for n in names if n in rows]
    appended = [
        [f"{a['batch']}", f"{a['cuda_us']:.0f} us", f"{a['kernel_us']:.1f} us"]
        for a in run_files.latest(data, ("batch",), "append").values()
    ]
    parts = [
        table(["", "time", "share of copy bandwidth"], lines),
        "One layer appends the newest token of each sequence in these times:",
        table(["sequences", "time", "kernel"], appended),
    ]
    if "store_tokens" in data:
        stored = run_files.latest(data, ("scheme", "tokens"), "store_tokens")
        counts = sorted({tokens for _, tokens in stored})
        named = dict.fromkeys(name for name, _ in stored)
        cells = [
            [f"`{n}`", *(f"{stored[n, t]['us']:.1f} us" if (n, t) in stored else "" for t in counts)] for n in named
        ]
        parts += [
            "One layer stores tokens in these times:",
            table(["", *(f"{t:,} tokens" for t in counts)], cells),
        ]
    return "\n\n".join([*parts, measured(data, rows.values(), "python benchmarks/bench_close_gpu.py")])


def chunks(folder: Path) -> str:
    """Write the table of chunks of queries over history, microseconds: of the newest run, and of the newest one with
    FlashAttention-3 where the former had none.
    """
    data = run_files.read(folder / "attend_prefill.json")

    def compares(rows: list[Row]) -> bool:
        return len({r["scheme"] for r in rows}) > 2

    last = sitting(data, data["rows"], compares)
    best = sitting(data, data["rows"], lambda some: compares(some) and any(r["best_16_bit"] == "fa3" for r in some))
    return "\n\n".join(_chunks(data, rows) for rows in ([best, last] if best and best != last else [last]))


def _chunks(data: Row, rows: list[Row]) -> str:
    shapes = list(dict.fromkeys((r["batch"], r["chunk"], r["tokens"]) for r in rows))
    names = list(dict.fromkeys(r["scheme"] for r in rows))
    cell = {(r["scheme"], r["batch"], r["chunk"], r["tokens"]): r for r in rows}
    lines = []
    for s in shapes:
        ours = [cell.get((n, *s)) for n in names]
        one = next(r for r in ours if r)
        lines.append(
            [
                f"{s[0]} x {s[1]} x {s[2]:,}",
                f"{one['time_16_bit_us']:.0f} us ({KERNELS[one['best_16_bit']]})",
                *(f"{r['time_us']:.0f} us" if r else "" for r in ours),
            ]
        )
    header = ["queries x history", "16 bits", *(f"`{n}`" for n in names)]
    return f"{table(header, lines)}\n\n{measured(data, rows, 'python benchmarks/bench_attend_gpu.py --prefill')}"


def small(folder: Path) -> str:
    """Write a sentence about the sizes at which 16 bits are as fast."""
    data = run_files.read(folder / "attend_small.json")
    rows = sitting(data, data["rows"], lambda some: len(some) > 20)
    few = [r["time_16_bit_us"] / r["time_us"] for r in rows if r["tokens"] <= 256 or r["bytes_16_bit"] <= 8 << 20]
    many = [
        r["time_16_bit_us"] / r["time_us"] for r in rows if not (r["tokens"] <= 256 or r["bytes_16_bit"] <= 8 << 20)
    ]
    names = ", ".join(f"`{n}`" for n in dict.fromkeys(r["scheme"] for r in rows))
    said = (
        f"{names} ran with 1 to 64 sequences of 256 to 16,384 tokens, 32 query and 8 kv heads of 128. A size is small"
        " if sequences have 256 tokens, or if a layer takes at most 8 MiB in 16 bits. At small sizes packed attention"
        f" is {min(few):.2f} to {max(few):.2f} times as fast as the best 16-bit kernel. At all larger sizes packed"
        f" attention is {min(many):.2f} to {max(many):.2f} times as fast."
    )
    return f"{said}\n\n{measured(data, rows, 'python benchmarks/bench_attend_gpu.py --small')}"


def store(folder: Path) -> str:
    """Write the table of the seconds to the first token of a stored prompt, 8B geometry."""
    data = run_files.read(folder / "store.json")
    rows = [
        r
        for r in run_files.latest(data, ("scheme", "model", "tokens", "file_system")).values()
        if r.get("model") == "llama-8b"
    ]
    current = [r for r in rows if r.get("file_system")] or rows
    lines = []
    for r in current:
        s = r["seconds"]
        cells = [
            f"{s[k]:.3f}" if k in s else "" for k in ("stock", "computed", "loaded_whole", "loaded", "loaded_cold")
        ]
        share = f"{s['loaded'] / s['stock']:.2f}" + (
            f"; cold {s['loaded_cold'] / s['stock']:.2f}" if "loaded_cold" in s else ""
        )
        lines.append(
            [f"`{r['scheme']}`", r.get("file_system", "not recorded"), f"{r['bytes'] / 1e6:,.0f} MB", *cells, share]
        )
    header = [
        "scheme",
        "file system",
        "in the store",
        "own",
        "computing with kvbits",
        "loading, whole",
        "loading",
        "loading, cold",
        "share of own",
    ]
    return f"{table(header, lines)}\n\n{measured(data, current, 'python benchmarks/bench_store.py --model llama-8b --prompt 16384 --chunk 4096 --stock --device cuda --threads 8')}"


def accuracy(folder: Path) -> str:
    """Write the table of KL through the kernels of a GPU: windows in chunks of 16, and tokens decoded one by one."""
    lines: list[list[str]] = []
    made: Row = {}
    for model in sorted((folder / "eval").iterdir()):
        for name in PRESETS:
            files = [model / task / f"{name}.json" for task in ("fidelity", "decode")]
            if not all(path.exists() for path in files):
                continue
            cells = [f"{model.name}, `{name}`"]
            for data in map(read_evaluation, files):
                s = data["summary"]
                made |= data["runs"]
                cells += [f"{s['kl_mean']:.4f}", f"{s['kl_max']:.3f}", f"{s['kl_lost']:.2%}"]
            lines.append(cells)
    header = ["model, cache", "windows: KL", "worst", "above 1 nat", "decoding: KL", "worst", "above 1 nat"]
    return (
        f"{table(header, lines)}\n\n`kvbits eval MODEL --device cuda --tasks fidelity,decode`, bfloat16;"
        f" {runs.dated(made.values())}."
    )


def beside_fp8(folder: Path) -> str:
    """Write the table of vLLM's own caches and ours: bytes, tokens, speed, and accuracy where a GPU measured it; nothing
    where it did not serve.
    """
    if not (folder / "serve_vllm.json").exists():
        return ""
    data, judged = run_files.read(folder / "serve_vllm.json"), run_files.read(folder / "accuracy_vllm.json")
    found = against_bf16(data)
    step, largest = found.get(("decode", False, 48, 8192)), found.get(("decode", False, "largest"))
    if not (step and largest and judged["rows"]):
        return ""
    model = max(judged["rows"], key=lambda r: judged["runs"][r["run"]]["utc"])["model"]
    kl = {r["kv_cache_dtype"]: r for r in judged["rows"] if (r["phase"], r["model"]) == ("decode", model)}
    lines, used = [], []
    for d in (d for d in SERVED if d in step and d in largest):
        one, full, score = step[d], largest[d], kl.get("auto" if d == "bf16" else d)
        used += [one, full]
        fields = ((full, "capacity_tokens"), (one, "step_ms"), (full, "tokens_per_s"))
        ratios = [f"{r[field] / r['base'][field]:.2f}x" for r, field in fields]
        lines.append([f"`{d}`", *ratios, f"{score['kl']:.4f}" if score else ""])
    header = ["dtype", "tokens that fit", "time of a step, 48 x 8,192", "tokens/s, largest batch", "KL"]
    sources = ((data, used), (judged, kl.values()))
    made = [of["runs"][r["run"]] for of, some in sources for r in some]
    return (
        f"{table(header, lines)}\n\nLlama-3.1-8B's geometry; ratios are to bf16. KL is that"
        f" of {model}, in nats, decoding in bfloat16. Runs: {runs.dated(made)}."
    )


def prefix_hits() -> str:
    """Write the tables of the share of prompts found again, simulated: what GPUs hold in each dtype, and the curve of
    every capacity.
    """
    lines: list[list[str]] = []
    curve: dict[str, dict[int, float]] = {}
    made: Row = {}
    traces = {
        name: run_files.read(RESULTS / "prefix_hits" / f"{name}.json")
        for name in ("conversation", "synthetic", "chats")
    }
    dtypes = [d for d in SERVED if all(d in {r["kv_cache_dtype"] for r in data["rows"]} for data in traces.values())]
    for name, data in traces.items():
        newest, made = run_files.newest(data), made | data["runs"]
        curve[name] = {r["capacity_tokens"]: r["hit_rate"] for r in newest["curve"]}
        for gpus in dict.fromkeys(r["gpus"] for r in newest["rows"]):
            rows = {r["kv_cache_dtype"]: r for r in newest["rows"] if r["gpus"] == gpus}
            if name == "conversation":
                lines.append([f"{newest['on']} x {gpus}, tokens", *(f"{rows[d]['capacity_tokens']:,}" for d in dtypes)])
            lines.append(
                [
                    f"{name}, {newest['on']} x {gpus}",
                    *(f"{rows[d]['hit_rate']:.1%}, {rows[d]['computed']:.2f}x" for d in dtypes),
                ]
            )
    lines.sort(key=lambda line: not line[0].endswith(", tokens"))
    sizes = sorted({n for points in curve.values() for n in points})
    curves = [[name, *(f"{points[n]:.0%}" if n in points else "" for n in sizes)] for name, points in curve.items()]
    head = table(["share of prompts found, times what must be computed", *(f"`{d}`" for d in dtypes)], lines)
    tail = table(["found by a cache of", *(f"{n / 1e6:.3g}M" for n in sizes)], curves)
    return f"{head}\n\n{tail}\n\n`python benchmarks/study_prefix_hits.py TRACE`; {runs.dated(made.values())}."


BLOCKS: Mapping[str, Callable[[], str]] = {
    **{
        block.__name__: on_each_card(block, name)
        for block, name in (
            (decode, "attend_decode.json"),
            (generate, "generate.json"),
            (prompts, "generate.json"),
            (serving, "serve_vllm.json"),
            (drafts, "serve_vllm.json"),
            (serving_sglang, "serve_sglang.json"),
            (close, "close_pages.json"),
            (chunks, "attend_prefill.json"),
            (small, "attend_small.json"),
            (store, "store.json"),
            (accuracy, "eval"),
            (beside_fp8, "accuracy_vllm.json"),
        )
    },
    **{block.__name__: block for block in (prefix_hits, goodput, turns, host_memory)},
}


def filled(text: str) -> str:
    """Return a document with its blocks as the results have them."""

    def block(found: re.Match[str]) -> str:
        return f"<!-- gpu:{found[1]} -->\n{BLOCKS[found[1]]()}\n<!-- /gpu:{found[1]} -->"

    return re.sub(r"<!-- gpu:(\w+) -->\n.*?<!-- /gpu:\1 -->", block, text, flags=re.DOTALL)
