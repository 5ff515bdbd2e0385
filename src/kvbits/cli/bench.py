"""`kvbits bench`: are this machine's kernels right, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..files import require_file, to_json
from ..settings import setting
from .common import OfSchemes, OnThreads, command, new_table, print_json, say_device
from .output import show, tell

if TYPE_CHECKING:
    from ..spec import CacheSpec


def _heads(option: str, text: str) -> tuple[int, int, int]:
    parts = [int(x) if x.isdigit() else 0 for x in text.split("/")]
    if len(parts) != 3 or not all(parts) or parts[0] % parts[1]:
        raise SpecError(
            f"{option} {text!r} is not like 32/8/128: query heads, a multiple of the kv heads, and channels of a head"
        )
    return parts[0], parts[1], parts[2]


@dataclass(frozen=True, kw_only=True)
class Timed(OfSchemes, OnThreads):
    """Options of `kvbits bench`: what is timed."""

    context: int = setting(8192, "Tokens in the cache of each sequence; 8k is 8,192.", tokens=1024)
    batch: int | None = setting(None, "Sequences.", least=1, shown="8 on a GPU, 1 on a CPU")
    chunk: int = setting(512, "Query tokens of a chunk of a prompt.", tokens=2)
    heads: tuple[int, int, int] = setting(
        (32, 8, 128), "Query heads / kv heads / channels of a head.", read=_heads, shown="32/8/128"
    )
    rounds: int = setting(20, "Number of timings of each kernel.", least=1)
    device: str | None = setting(None, "Device to run on, like cuda; the CPU if not given.")
    out: Path = setting(Path("kvbits-bench.json"), "Result file, with the record of this run.")


@command()
def bench(options: Timed) -> None:
    """Check the attention of each core preset against float64 on this machine, and time it beside torch's.

    The command times decoding, and a chunk of a prompt over cached tokens. It runs on a GPU of compute capability 8.0
    or later, or on the CPU. The first run compiles kernels, which takes some minutes. You can send the file in: the
    file names the processor, the GPU and versions, and nothing else of this machine.
    """
    import torch

    from .. import runs, schemes
    from ..evaluate import speed
    from ..integrations.models import check_place
    from ..spec import CacheSpec, LayerGeometry

    names = options.schemes or [n for n, s in schemes.CORE.items() if not s.tiers]
    chosen = [one for one in schemes.expand(names) if isinstance(one, str)]
    if len(chosen) < len(names) or any(schemes.PRESETS[n].tiers for n in chosen):
        raise SpecError(
            f"--schemes {', '.join(names)}: presets without tiers are timed here, like {', '.join(schemes.CORE)}"
        )
    target = require_file(options.out, "--out")
    check_place("auto", options.device)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(device)
    if place.type not in speed.ROTATE_BYTES:
        raise SpecError(f"--device {device!r} is neither cuda nor cpu")
    options.set_threads()
    shapes = [
        speed.Shape(options.batch or (8 if place.type == "cuda" else 1), *options.heads, options.context, 1),
        speed.Shape(1, *options.heads, options.context, options.chunk),
    ]
    layers = (LayerGeometry(num_kv_heads=shapes[0].kv_heads, head_dim=shapes[0].head_dim),)
    # refuses invalid heads
    specs = [CacheSpec(scheme=schemes.get(name, head_dim=shapes[0].head_dim), layers=layers) for name in chosen]
    say_device(device)
    torch.manual_seed(0)
    if place.type == "cuda":
        _compile(specs, shapes[0].query_heads, place)
    found = [
        row for shape in shapes for row in speed.rows(chosen, shape, place, options.rounds, lambda text: tell(text))
    ]
    result = runs.of_one(
        {"rows": found, "device": device, "threads": torch.get_num_threads(), "rounds": options.rounds}
        | _machine(place),
        "rows",
    )
    target.write_text(to_json(result, indent=1) + "\n", encoding="utf-8")
    if options.as_json:
        print_json(result)
        return
    tables = []
    for shape in shapes:
        tables.append(
            new_table(
                str(shape), "attention", "by", "us", "torch's fastest / this", "MB read", "relative error", left=2
            )
        )
        for r in (r for r in found if r["shape"] == str(shape)):
            error = "" if r["error"] is None else f"{r['error']:.1e}"
            tables[-1].add_row(
                r["name"],
                r["backend"],
                f"{r['seconds'] * 1e6:,.0f}",
                f"{r['over_torch']:.2f}",
                f"{r['nbytes'] / 1e6:,.1f}",
                error,
            )
    show(*tables, f"wrote {target}")


def _machine(device: Any) -> dict[str, Any]:
    """Return what the record of a run does not say: the GPU's compute capability, or the instruction set of the CPU
    kernels.
    """
    import torch

    from ..ops.cpu import library

    if device.type == "cuda":
        return {"capability": list(torch.cuda.get_device_capability(device))}
    return {"tier": "none" if library.unavailable() else library.tier()}


def _compile(specs: list[CacheSpec], query_heads: int, device: Any) -> None:
    """Compile the kernels of all presets at once, on all cores, before the first is asked for."""
    import torch

    from ..ops.cuda import ahead
    from ..progress import bar

    capability = torch.cuda.get_device_capability(device)
    sources = ahead.distinct(
        s
        for spec in specs
        for g in spec.groups
        for s in ahead.of_group(g, query_heads, torch.bfloat16, False, capability)
    )
    with bar("compiling kernels", len(sources)) as advance:
        for _ in ahead.compiled(sources, capability):
            advance(1)
