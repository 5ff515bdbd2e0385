"""Comparison of klt's attention of single tokens on a GPU with that of another tree of this project, both in one
process.

    git archive COMMIT src/kvbits benchmarks/bench_attend_gpu.py | tar -x -C /tmp/before
    python benchmarks/compare_attend_gpu.py /tmp/before [--schemes klt4,klt2] [--quick] [--out FILE]

A cache has 4 raw sinks, packed pages and raw newest tokens: 128 of them, or 64 behind 448 tokens of copies where the
scheme has some. Both trees read the same memory, so both must have the same formats. Outputs are compared with float64
over the same pages before anything is timed. Times are medians of CUDA-graph replays over layers of more bytes than L2,
the smallest of `--rounds` by turns. The last line is one JSON object; rows are added to --out.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
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


def parts_of(bench: Any, name: str, tokens: int) -> Iterator[tuple[Any, int, int]]:
    """Yield (layout, first position, tokens) of each part of a sequence, in order."""

    def layout(key: Any, value: Any, page_size: int) -> Any:
        return bench.PageLayout(
            key=key, value=value, page_size=page_size, num_kv_heads=bench.KV_HEADS, head_dim=bench.HEAD_DIM
        )

    scheme, raw = bench.schemes.get(name), bench.QuantSpec.raw()
    newest = RAW_BEFORE_COPIES if scheme.copies else RAW
    packed = tokens - newest - sum(c.num_tokens for c in scheme.copies)
    yield layout(raw, raw, SINKS), 0, SINKS
    yield layout(scheme.key, scheme.value, bench.PAGE), SINKS, packed
    at = SINKS + packed
    for c in reversed(scheme.copies):
        yield layout(c.key, c.value, bench.PAGE), at, c.num_tokens
        at += c.num_tokens
    yield layout(raw, raw, bench.PAGE), at, newest


class Memory:
    """Memory that both trees read at one shape: queries, the pages of some layers, and the results of float64."""

    def __init__(self, name: str, shape: tuple[int, int, int]) -> None:
        batch, heads, self.tokens = shape
        self.name = name
        layouts, starts, counts = zip(*parts_of(here, name, self.tokens), strict=True)
        pages = [n // x.page_size for x, n in zip(layouts, counts, strict=True)]
        nbytes = sum(batch * n * x.page_size_bytes for n, x in zip(pages, layouts, strict=True))
        layers = max(2, -(-here.ROTATE_BYTES // nbytes))
        # a calibrated basis has the steps of its widths in it
        calibrated = {x: here.calibrated(x) for x in dict.fromkeys(layouts) if not x.is_raw}
        self.static = [calibrated.get(x, {}) for x in layouts]
        self.tables = [
            here._table(batch, n, start, x.page_size) for n, start, x in zip(pages, starts, layouts, strict=True)
        ]
        self.pools = [
            here._pool(x, batch * n, layers, static, alike=True)
            for x, n, static in zip(layouts, pages, self.static, strict=True)
        ]
        self.q = torch.randn(batch, 1, heads, here.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        newest = starts[-1] + counts[-1] - 1
        self.positions = torch.full((batch, 1), newest, dtype=torch.int32, device="cuda")
        self.rows = slice(0, min(batch, CHECKED_ROWS))
        tables = [here.Table(t.pages[self.rows], t.tokens[self.rows], t.starts[self.rows]) for t in self.tables]
        stores = self.call(here).stores(0)
        self.want, _ = here.exact(self.q[self.rows], stores, tables, positions=self.positions[self.rows])

    def call(self, bench: Any) -> Any:
        """Return this memory as a tree's call."""
        of_parts = self.static

        class Call(bench.Call):  # type: ignore[misc, name-defined]
            def stores(self, layer: int) -> list[Any]:
                return [
                    bench.PageStore(x, (pool[:, layer],), static)
                    for x, pool, static in zip(self.layouts, self.pools, of_parts, strict=True)
                ]

        layouts = [x for x, _, _ in parts_of(bench, self.name, self.tokens)]
        return Call(layouts, [bench.Table(t.pages, t.tokens, t.starts) for t in self.tables], self.pools, {})

    def launches(self, bench: Any) -> tuple[list[Any], float]:
        """Return a tree's launches, one a layer, and the error of the first against float64."""
        call = self.call(bench)
        plan = call.plan(self.q, self.positions)
        out = plan.run(self.q, 0)[self.rows].double()
        error = float((out - self.want).norm() / self.want.norm())
        if not error < bench.ERROR_LIMIT:
            raise SystemExit(
                f"{self.name} at {tuple(self.q.shape)}, {self.tokens} tokens: error {error} against float64, the limit"
                f" is {bench.ERROR_LIMIT}; a wrong kernel has no speed"
            )
        return bench._launches(plan, self.q, call.layers) * max(1, 12 // call.layers), error


def compile_kernels(tree: str, bench: Any, names: Sequence[str], capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Compile a tree's attention kernels for all shapes, as many at a time as there are cores.

    Returns:
        registers of a thread and bytes that it spills, of each kernel.
    """
    package = {"before": OTHER, "now": "kvbits"}[tree]
    ahead = importlib.import_module(f"{package}.ops.cuda.ahead")
    kernels, sources = [], []
    for name in names:
        layouts = [x for x, _, _ in parts_of(bench, name, SHAPES[0][2])]
        packed = [x for x in layouts if not x.is_raw]
        for columns in sorted({heads // bench.KV_HEADS for _, heads, _ in SHAPES}):
            sources += ahead._attention([*packed, layouts[-1]], columns, torch.bfloat16, False, capability)
            kernels.append({"variant": tree, "scheme": name, "columns": columns})
    for kernel, binary in zip(kernels, ahead.compiled(sources, capability), strict=True):
        found = binary.resources("attend")
        kernel |= {"registers": found.registers, "spill_bytes": found.spill_bytes}
    return kernels


def rows_of(name: str, shape: tuple[int, int, int], trees: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Check and time both trees at one shape, by turns."""
    torch.manual_seed(0)
    memory = Memory(name, shape)
    checked = {label: memory.launches(bench) for label, bench in trees.items()}
    times: dict[str, list[float]] = {label: [] for label in trees}
    for _ in range(rounds):
        for label, (launches, _) in checked.items():
            times[label].append(here.time_us(launches))
    torch.cuda.empty_cache()
    return [
        {"scheme": name, "variant": label, "shape": shape, "error": error, "time_us": min(times[label])}
        for label, (_, error) in checked.items()
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("tree", type=Path, help="folder of the other tree: src/kvbits and benchmarks")
    parser.add_argument("--schemes", default=",".join(here.BANDED))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compile-only", action="store_true", help="registers and spills on sm_90; needs no GPU")
    args = parser.parse_args()
    names = args.schemes.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": bench_of(args.tree, Path(folder)), "now": here}
        capability = (9, 0) if args.compile_only else torch.cuda.get_device_capability()
        kernels = [x for tree, bench in trees.items() for x in compile_kernels(tree, bench, names, capability)]
        for kernel in kernels:
            print(*kernel.values(), sep="  ", flush=True)
        for bench in trees.values():
            bench.be_quick(args.quick)
        for name in [] if args.compile_only else names:
            for shape in SHAPES:
                found = rows_of(name, shape, trees, args.rounds)
                words = (
                    f"{x['variant']} {x['time_us']:.1f} us ({x['time_us'] / found[0]['time_us']:.3f})" for x in found
                )
                print(name, shape, *words, sep="  ", flush=True)
                rows += found
    device = None if args.compile_only else torch.cuda.get_device_name()
    append(rows, args.out, sections={"kernels": kernels}, device=device)


if __name__ == "__main__":
    main()
