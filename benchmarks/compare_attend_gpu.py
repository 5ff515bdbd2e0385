"""Comparison of klt's attention of single tokens on a GPU with that of another tree of this project, both in one
process.

    git archive COMMIT src/kvbits benchmarks/bench_attend_gpu.py | tar -x -C /tmp/before
    python benchmarks/compare_attend_gpu.py /tmp/before [--schemes klt4,klt2] [--quick] [--out FILE]

A cache has 4 raw sinks, packed pages and raw newest tokens: 128 of them, or 64 behind 448 tokens of copies ("copies")
where the scheme has some. Outputs are compared with float64 over the same pages before anything is timed. Times are
medians of CUDA-graph replays over layers of more bytes than L2, the smaller of `--rounds` by turns. The last line is
one JSON object; rows are added to --out.
"""

from __future__ import annotations

import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_attend_gpu as here
import torch
from run_files import append, arguments

SHAPES = ((1, 32, 32768), (8, 32, 32768), (32, 32, 8192), (32, 64, 4096), (64, 32, 4096), (128, 32, 2048))
"""Sequences, query heads, tokens."""
SINKS, RAW, RAW_BEFORE_COPIES, CHECKED_ROWS = 4, 128, 64, 8
OTHER = "kvbits_before"


def bench_of(tree: Path, folder: Path) -> types.ModuleType:
    """Load bench_attend_gpu.py of another tree, on that tree's package, which is called `OTHER`."""
    (folder / OTHER).symlink_to((tree / "src/kvbits").resolve())
    sys.path.insert(0, str(folder))
    text = (tree / "benchmarks/bench_attend_gpu.py").read_text(encoding="utf-8")
    module = types.ModuleType(f"bench_{OTHER}")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(text.replace("from kvbits", f"from {OTHER}"), str(tree), "exec"), module.__dict__)
    return module


def parts_of(bench: Any, name: str, tokens: int, with_copies: bool) -> Iterator[tuple[Any, Any, int, int, int]]:
    """Yield (key, value, page size, first position, tokens) of each part of a sequence, in order."""
    scheme, raw = bench.schemes.get(name), bench.QuantSpec.raw()
    copies = scheme.copies if with_copies else ()
    newest = RAW_BEFORE_COPIES if copies else RAW
    packed = tokens - newest - sum(c.num_tokens for c in copies)
    yield raw, raw, SINKS, 0, SINKS
    yield scheme.key, scheme.value, bench.PAGE, SINKS, packed
    at = SINKS + packed
    for c in reversed(copies):
        yield c.key, c.value, bench.PAGE, at, c.num_tokens
        at += c.num_tokens
    yield raw, raw, bench.PAGE, at, newest


def prepared(bench: Any, name: str, shape: tuple[int, int, int], with_copies: bool) -> tuple[list[Any], float]:
    """Return the launches of one variant, one a layer, and the error of the first against float64."""
    batch, heads, tokens = shape
    parts = list(parts_of(bench, name, tokens, with_copies))
    layouts = [
        bench.PageLayout(key=k, value=v, page_size=size, num_kv_heads=bench.KV_HEADS, head_dim=bench.HEAD_DIM)
        for k, v, size, _, _ in parts
    ]
    pages = [n // size for _, _, size, _, n in parts]
    nbytes = sum(batch * n * layout.page_size_bytes for n, layout in zip(pages, layouts, strict=True))
    layers = max(2, -(-bench.ROTATE_BYTES // nbytes))
    # a calibrated basis has the steps of its widths in it
    static = {x: bench.calibrated(x) for x in dict.fromkeys(layouts) if not x.is_raw}

    class Call(bench.Call):  # type: ignore[misc, name-defined]
        def stores(self, layer: int) -> list[Any]:
            return [
                bench.PageStore(x, (pool[:, layer],), static.get(x, {}))
                for x, pool in zip(self.layouts, self.pools, strict=True)
            ]

    call = Call(
        layouts,
        [bench._table(batch, n, start, size) for n, (_, _, size, start, _) in zip(pages, parts, strict=True)],
        [bench._pool(x, batch * n, layers, static.get(x, {}), alike=True) for x, n in zip(layouts, pages, strict=True)],
        {},
    )
    q = torch.randn(batch, 1, heads, bench.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    positions = torch.full((batch, 1), parts[-1][3] + parts[-1][4] - 1, dtype=torch.int32, device="cuda")
    plan = call.plan(q, positions)
    out = plan.run(q, 0)
    rows = slice(0, min(batch, CHECKED_ROWS))
    tables = [bench.Table(t.pages[rows], t.tokens[rows], t.starts[rows]) for t in call.tables]
    want, _ = bench.exact(q[rows], call.stores(0), tables, positions=positions[rows])
    error = float((out[rows].double() - want).norm() / want.norm())
    if not error < bench.ERROR_LIMIT:
        raise SystemExit(f"{name} at {shape}: error {error} against float64; a wrong kernel has no speed")
    return bench._launches(plan, q, call.layers) * max(1, 12 // call.layers), error


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("tree", type=Path, help="folder of the other tree: src/kvbits and benchmarks")
    parser.add_argument("--schemes", default=",".join(here.BANDED))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        before = bench_of(args.tree, Path(folder))
        for bench in (before, here):
            bench.be_quick(args.quick)
        for name in args.schemes.split(","):
            variants = [("before", before, False), ("now", here, False)]
            variants += [("copies", here, True)] if here.schemes.get(name).copies else []
            for shape in SHAPES:
                times: dict[str, list[float]] = {}
                for seed in range(args.rounds):
                    for label, bench, with_copies in variants:
                        torch.manual_seed(seed)
                        launches, error = prepared(bench, name, shape, with_copies)
                        times.setdefault(label, []).append(bench.time_us(launches))
                        rows.append({"scheme": name, "variant": label, "shape": shape, "error": error})
                        rows[-1]["time_us"] = times[label][-1]
                        del launches
                        torch.cuda.empty_cache()
                least = {label: min(found) for label, found in times.items()}
                print(name, shape, *(f"{k} {t:.1f} us ({t / least['before']:.3f})" for k, t in least.items()), sep="  ")
    append(rows, args.out, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
