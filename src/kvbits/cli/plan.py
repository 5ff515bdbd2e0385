"""`kvbits plan`: bytes and capacity, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SpecError
from .common import Json, app, names_of, new_table, print_json, show

if TYPE_CHECKING:
    from rich.table import Table

    from ..planner import Plan
    from ..spec import LayerGeometry


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="Local directory, config.json, GGUF file or hub id, for its configuration.", show_default=False)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of MODEL.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer, instead of MODEL.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head, instead of MODEL.")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Window of every layer in tokens, with --layers.")] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Sequences.")] = 1,
    scheme: Annotated[
        str, typer.Option("--schemes", "--scheme", help="Schemes, comma-separated: presets, files of your own (.json), fp32, fp16, bf16, or all.")
    ] = "all",
    memory: Annotated[str | None, typer.Option(help="Memory for the cache, like 24GB (10**9) or 24GiB (2**30): adds largest batch and context.")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens kept raw, in every preset.")] = None,
    residual: Annotated[int | None, typer.Option(help="Newest tokens kept raw, in every preset.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens per page, in every preset.")] = None,
    raw_dtype: Annotated[str, typer.Option(help="Dtype of raw pages: bfloat16, float16 or float32.")] = "bfloat16",
    sources: Annotated[bool, typer.Option("--sources", help="Recompute the memory figures that the source documents print.")] = False,
    as_json: Json = False,
) -> None:
    """Bytes of a cache per scheme, and the largest batch and context that fit.

    Totals are what a cache of fixed capacity allocates to the byte: whole pages, scales, sinks, raw tail and padding included.
    """
    from .. import planner, schemes

    if sources:
        _sources(as_json)
        return
    geometry, name, longest = _geometry(model, layers, kv_heads, head_dim, sliding_window)
    given = {"num_sink_tokens": sinks, "residual_length": residual, "page_size": page_size}
    found = planner.plan(
        geometry, schemes.expand(names_of("--schemes", scheme), planner.GROUPS), context=context, batch=batch,
        memory_bytes=None if memory is None else planner.parse_bytes(memory),
        raw_dtype=raw_dtype, **{k: v for k, v in given.items() if v is not None},
    )  # fmt: skip
    if as_json:
        print_json({"model": name, "model_max_context": longest} | found.to_dict())
    else:
        show(_plan_table(found, name), *_plan_notes(found, longest))


def _geometry(
    model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None, sliding_window: int | None
) -> tuple[tuple[LayerGeometry, ...], str | None, int | None]:
    """(layers, model name, the model's own longest context) from either the model or the numbers."""
    from ..planner import uniform

    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    if model is not None:
        if clash := [k for k, v in (numbers | {"--sliding-window": sliding_window}).items() if v is not None]:
            raise SpecError(f"MODEL {model!r} already says what {', '.join(clash)} says; give one or the other")
        from rich.console import Console

        with Console(stderr=True).status(f"reading the configuration of {model}"):
            from ..geometry import layer_geometries, load_config, max_context

            config = load_config(model)
            return layer_geometries(config), model, max_context(config)
    if layers is None or kv_heads is None or head_dim is None:
        missing = [k for k, v in numbers.items() if v is None]
        raise SpecError(f"give MODEL, or --layers, --kv-heads and --head-dim (missing: {', '.join(missing)})")
    return uniform(layers, kv_heads, head_dim, sliding_window), None, None


def _plan_table(found: Plan, name: str | None) -> Table:
    from ..planner import human_bytes

    kinds = ", ".join(
        f"{k['count']} layers x {k['num_kv_heads']} kv heads x {k['head_dim']}" + (f" (window {k['sliding_window']:,})" if k["sliding_window"] else "")
        for k in found.to_dict()["layers"]
    )
    title = f"{name + ': ' if name else ''}{kinds}; {found.context:,} tokens x {found.batch}"
    columns = ["scheme", "bits/element", "bytes/token", "total", "16-bit / total"]
    if found.memory_bytes is not None:
        title += f"; {human_bytes(found.memory_bytes)} of memory"
        columns += [f"max batch at {found.context:,}", f"max context x {found.batch}"]
    table = new_table(title, *columns)
    for r in found.rows:
        cells = [r.scheme, f"{r.bits_per_element:.3f}", f"{r.bytes_per_token:,.0f}", human_bytes(r.total_bytes), f"{r.memory_reduction:.2f}x"]
        if found.memory_bytes is not None:
            cells += ["any" if r.max_batch is None else f"{r.max_batch:,}", "any" if r.max_context is None else f"{r.max_context:,}"]
        table.add_row(*cells)
    return table


def _plan_notes(found: Plan, longest: int | None) -> list[str]:
    notes = ["GB is 10**9 bytes. bits/element and bytes/token are those of long contexts; the total counts whole pages, sinks and raw tail."]
    if longest is not None and any((r.max_context or 0) > longest or r.unbounded for r in found.rows):
        notes.append(f"The model itself was made for {longest:,} tokens.")
    if longest is not None and found.context > longest:
        notes.append(f"{found.context:,} tokens are more than the {longest:,} the model was made for.")
    from ..ops.break_even import small_on_gpu

    sizes = {(min(found.context, g.sliding_window or found.context), g.num_kv_heads, g.head_dim) for g in found.layers}
    notes += [f"Speed: {note}." for n, heads, d in sorted(sizes) if (note := small_on_gpu(found.batch, n, heads, d))]
    return notes


def _sources(as_json: bool) -> None:
    from ..planner import GB, GIB
    from ..studies.source_figures import source_figures

    figures = source_figures()
    if as_json:
        print_json({"sources": [f.to_dict() for f in figures]})
        return
    table = new_table("Memory figures the source documents print, recomputed", "source", "case", "prints", "formula gives", "", "agrees", "why", left=2)
    table.columns[6].justify = "left"
    for f in figures:
        table.add_row(f.source, f.case, f.printed, f"{f.nbytes / GB:.2f} GB", f"{f.nbytes / GIB:.2f} GiB", "yes" if f.agrees else "NO", f.verdict)
    show(table, "GB is 10**9 bytes, GiB is 2**30.")
