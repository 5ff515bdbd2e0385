"""What could be won at most by folding the Hadamard matrix of klt's values into a model's own weights: attention and stores of a preset, and of one whose values
nobody turns.

    python benchmarks/study_fold.py [--schemes klt4 klt2] [--quick] [--out benchmarks/results/<gpu>/fold.json]
    python benchmarks/study_fold.py --warm          compiles for compute capability 9.0, says registers and spills, and needs no GPU

With W_v H for W_v and H W_o for W_o values would come turned and outputs be wanted turned: no store would turn values, attention would not turn its output back.
Here that is a value spec without a basis. It tries the five scales that turned values try instead of seven (`folded`), so that values times H are stored as the
preset stores values, byte for byte.

Attention reads the same pages as both. It is timed only once the fold's output, turned, is the preset's, and the preset's that of float64 where that takes no
minutes; stores are compared with the reference. "again" is the preset once more: a difference below it is noise. The three are timed in turn, replay by replay,
each a CUDA graph over memory larger than L2. Each row is added to --out as it comes; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import bench_attend_gpu
import numpy as np
import torch
from bench_attend_gpu import ERROR_LIMIT, HEAD_DIM, KV_HEADS, be_quick, by_layer, captured, packed_call, replay_us
from bench_close_gpu import PAGES, closing, storing
from result_file import append, arguments

from kvbits import schemes
from kvbits.ops.cuda import ahead
from kvbits.ops.cuda.engine import host_plan, kernels
from kvbits.ops.cuda.engine.runtime import driver
from kvbits.ops.cuda.engine.runtime.compile import Source
from kvbits.ops.cuda.engine.shape import Ask
from kvbits.ops.cuda.families.klt import store
from kvbits.ops.reference import attend as reference
from kvbits.ops.types import AttendCall
from kvbits.quant import banded
from kvbits.quant.basis import hadamard
from kvbits.spec import PageLayout, QuantSpec, Scheme

SHAPES = ((32, 4096), (48, 512), (8, 32768), (1, 8192))  # sequences, tokens
Q_HEADS = (32, 64)
CHECKED = 32768
"""Tokens of all sequences up to which float64 has the last word."""
STORED = (48, 16384)
CAPABILITY = (9, 0)


def fold(scheme: Scheme) -> Scheme:
    """The scheme for a model whose weights turn its values."""
    return dataclasses.replace(scheme, name=f"{scheme.name}_fold", value=dataclasses.replace(scheme.value, basis=None))


@contextlib.contextmanager
def folded() -> Iterator[None]:
    """Values without a basis try the scales that turned ones try: in the reference, and in a copy of store_banded.cu."""
    scales, source = banded.fitted_scales, store.source

    def few_scales(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
        return scales(x, dataclasses.replace(spec, basis=spec.basis or "hadamard"))

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(Path(store.__file__).parent, Path(folder) / "klt"))
        text = (copy / "store_banded.cu").read_text()
        for choice in ("5 : 7", "TURNED_OFFSETS : SCALE_OFFSETS"):
            was = f"S::BASIS == HADAMARD ? {choice}"
            if text.count(was) != 1:
                raise ValueError(f"store_banded.cu no longer says {was!r}")
            text = text.replace(was, f"S::BASIS != CALIBRATED ? {choice}")
        (copy / "store_banded.cu").write_text(text)

        def patched(layout: PageLayout, *args: Any) -> Source:
            found = source(layout, *args)
            return found if layout.value.basis else dataclasses.replace(found, folder=copy)

        with mock.patch.object(banded, "fitted_scales", few_scales), mock.patch.object(store, "source", patched):
            yield


def sources(scheme: Scheme) -> Iterator[tuple[str, Source, str]]:
    """(what is timed, its source at `CAPABILITY`, the kernel's name)."""
    layout = PageLayout(key=scheme.key, value=scheme.value, page_size=scheme.page_size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    for q_heads in Q_HEADS:
        columns, limit = q_heads // KV_HEADS, driver.shared_limit(CAPABILITY)
        ask = Ask(HEAD_DIM, kernels.columns([layout], columns, False), "bfloat16", "bfloat16", False, limit, fold=kernels.folds(layout, columns))
        yield f"{scheme.name}, attention, {q_heads} heads", kernels.kernel_for(layout, ask).instance, "attend"
    few, many = store.sources(layout, torch.bfloat16, CAPABILITY)
    for what, source in (("few tokens", few), ("many tokens", many), ("pages", store.closing(layout, torch.bfloat16, False, CAPABILITY))):
        yield f"{scheme.name}, store, {what}", source, "store_banded"


def warm(names: Sequence[str]) -> None:
    made = [found for scheme in map(schemes.get, names) for s in (scheme, fold(scheme)) for found in sources(s)]
    for (what, _, kernel), binary in zip(made, ahead.compiled([source for _, source, _ in made], CAPABILITY), strict=True):
        print(f"{what:32s} {binary.resources(kernel)}", flush=True)


def timed(preset: list[Any], folds: list[Any]) -> dict[str, float]:
    """Microseconds of one launch: medians of replays in turn."""
    graphs = {name: captured(launches) for name, launches in (("preset_us", preset), ("again_us", preset), ("fold_us", folds))}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(bench_attend_gpu.replays):
        for name in list(graphs)[:: 1 if turn % 2 else -1]:
            times[name].append(replay_us(graphs[name]) / len(preset))
    return {name: float(np.median(t)) for name, t in times.items()}


def unturned(call: AttendCall) -> AttendCall:
    """The call over the same bytes, of values that nobody turns."""
    (part,), replace = call.parts, dataclasses.replace
    layout = replace(part.store.layout, value=replace(part.store.layout.value, basis=None))
    return replace(call, parts=(replace(part, store=replace(part.store, layout=layout)),))


def attention(scheme: Scheme, batch: int, tokens: int, q_heads: int) -> dict[str, float]:
    """Checked and timed; `error` is that of the fold's turned output against the preset's."""
    call, _, layers = packed_call(scheme.key, scheme.value, batch, tokens, scheme.page_size)
    q = torch.randn(batch, 1, q_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    positions = torch.full((batch, 1), tokens - 1, device="cuda")
    outs, launches = [], []
    for one in (call, unturned(call)):
        strides = (one.parts[0].store.layout.page_size_bytes,)
        plan = host_plan.plan(one, q_heads, q.dtype, q.device, num_queries=1, layer_strides=strides, history_only=True)
        outs.append(plan.run(q, positions)[0].double())
        launches.append(by_layer(plan, one, q, layers) * max(1, 24 // layers))
    if batch * tokens <= CHECKED:
        want, _ = reference.attend(q, call, positions.cpu(), torch.float64)
        close_to(outs[0], want, f"{scheme.name} at {batch} x {tokens} against float64")
    error = close_to(hadamard(outs[1]), outs[0], f"{scheme.name} at {batch} x {tokens}, the fold turned once against the preset")
    return {"error": error, **timed(*launches)}


def close_to(out: torch.Tensor, want: torch.Tensor, what: str) -> float:
    error = float((out - want.to(out)).norm() / want.norm())
    if not error < ERROR_LIMIT:
        raise SystemExit(f"{what}: error {error}; a wrong kernel has no speed")
    return error


def rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for scheme in map(schemes.get, names):
        name = {"scheme": scheme.name}
        for (batch, tokens), q_heads in itertools.product(SHAPES, Q_HEADS):
            yield {"what": "attention"} | name | {"batch": batch, "tokens": tokens, "q_heads": q_heads} | attention(scheme, batch, tokens, q_heads)
        for count in STORED:
            yield {"what": "store"} | name | {"tokens": count} | timed(*(4 * storing(s, count) for s in (scheme, fold(scheme))))
        (preset, _), (folds, _) = (closing(s.key, s.value, 0) for s in (scheme, fold(scheme)))
        yield {"what": "close"} | name | {"pages": PAGES} | timed(4 * preset, 4 * folds)


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--schemes", nargs="+", default=["klt4", "klt2"])
    found.add_argument("--quick", action="store_true", help="a third of the replays")
    found.add_argument("--warm", action="store_true")
    return found


def main() -> None:
    args = parser().parse_args()
    be_quick(args.quick)
    torch.manual_seed(0)
    with folded():
        if args.warm:
            return warm(args.schemes)
        print(torch.cuda.get_device_name(), flush=True)
        for row in rows(args.schemes):
            preset, words = row["preset_us"], ", ".join(str(x) for name, x in row.items() if not name.endswith("_us") and name != "error")
            print(f"{words}: {preset:.2f} us, again {row['again_us'] / preset - 1:+.2%}, fold {row['fold_us'] / preset - 1:+.2%}", flush=True)
            append([row], args.out)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
