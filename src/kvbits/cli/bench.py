"""`kvbits bench`: are this machine's kernels right, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError
from ..files import require_file, to_json
from .common import (
    Device,
    Json,
    Schemes,
    Threads,
    command,
    names_of,
    new_table,
    print_json,
    say_device,
    set_threads,
    tokens,
)
from .output import show, tell

if TYPE_CHECKING:
    from ..spec import CacheSpec


@command()
def bench(
    scheme: Schemes = None,
    context: Annotated[
        int, typer.Option(help="Tokens that each sequence has; 8k is 8,192.", parser=tokens(1024))
    ] = 8192,
    batch: Annotated[int | None, typer.Option(help="Sequences.", min=1, show_default="8 on a GPU, 1 on a CPU")] = None,
    chunk: Annotated[int, typer.Option(help="Query tokens of a chunk of a prompt.", parser=tokens(2))] = 512,
    heads: Annotated[str, typer.Option(help="Query heads / kv heads / channels of a head.")] = "32/8/128",
    rounds: Annotated[int, typer.Option(help="Times that each is timed, in turn.", min=1)] = 20,
    device: Device = None,
    threads: Threads = None,
    out: Annotated[Path, typer.Option(help="Result file, with the record of this run.")] = Path("kvbits-bench.json"),
    as_json: Json = False,
) -> None:
    """Check the attention of each core preset against float64 here, and time it beside torch's: decoding, and a chunk
    of a prompt over what is cached.

    On a GPU (compute capability 8.0 or later), or on the CPU. Takes some minutes, of which compiling kernels is the
    first. The file can be sent in: nothing in it names more of this machine than its processor, its GPU and versions.
    """
    import torch

    from .. import runs, schemes
    from ..evaluate import speed
    from ..spec import CacheSpec, LayerGeometry

    names = names_of("--schemes", scheme) if scheme else [n for n, s in schemes.CORE.items() if not s.tiers]
    chosen = [one for one in schemes.expand(names) if isinstance(one, str)]
    if len(chosen) < len(names) or any(schemes.PRESETS[n].tiers for n in chosen):
        raise SpecError(
            f"--schemes {', '.join(names)}: presets without tiers are timed here, like {', '.join(schemes.CORE)}"
        )
    target = require_file(out, "--out")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type not in speed.ROTATE_BYTES:
        raise SpecError(f"--device {device!r} is neither cuda nor cpu")
    set_threads(threads)
    shapes = [
        speed.Shape(batch or (8 if place.type == "cuda" else 1), *_heads(heads), context, 1),
        speed.Shape(1, *_heads(heads), context, chunk),
    ]
    layers = (LayerGeometry(num_kv_heads=shapes[0].kv_heads, head_dim=shapes[0].head_dim),)
    # refuses heads that cannot be
    specs = [CacheSpec(scheme=schemes.get(name, head_dim=shapes[0].head_dim), layers=layers) for name in chosen]
    say_device(device)
    torch.manual_seed(0)
    if place.type == "cuda":
        _compile(specs, shapes[0].query_heads, place)
    found = [row for shape in shapes for row in speed.rows(chosen, shape, place, rounds, lambda text: tell(text))]
    result = runs.of_one(
        {"rows": found, "device": device, "threads": torch.get_num_threads(), "rounds": rounds} | _machine(place),
        "rows",
    )
    target.write_text(to_json(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
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


def _heads(text: str) -> tuple[int, int, int]:
    parts = [int(x) if x.isdigit() else 0 for x in text.split("/")]
    if len(parts) != 3 or not all(parts) or parts[0] % parts[1]:
        raise SpecError(
            f"--heads {text!r} is not like 32/8/128: query heads, a multiple of the kv heads, and channels of a head"
        )
    return parts[0], parts[1], parts[2]


def _machine(device: Any) -> dict[str, Any]:
    """What the record of a run does not say: the GPU's compute capability, or the instruction set of the CPU
    kernels.
    """
    import torch

    from ..ops.cpu import library

    if device.type == "cuda":
        return {"capability": list(torch.cuda.get_device_capability(device))}
    return {"tier": "none" if library.unavailable() else library.tier()}


def _compile(specs: list[CacheSpec], query_heads: int, device: Any) -> None:
    """Kernels of all presets at once, on all cores, before the first is asked for."""
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
