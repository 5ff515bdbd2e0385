"""The command line: kvbits demo | plan | schemes | calibrate.

Results go to standard output, everything else (progress, errors) to standard error; with --json standard output holds exactly one
JSON object. An error the library raises on purpose is one line, `error: ...`, and exit code 2. Commands import what they need when they
run, so that help, `schemes` and `plan --layers ...` load neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import KvbitsError, SpecError, UnsupportedError

if TYPE_CHECKING:
    from rich.table import Table

    from .planner import Plan
    from .spec import LayerGeometry

PIPE_WIDTH = 220
"""Columns where standard output is no terminal: tables are not cut."""

_OPTIONAL = {"transformers", "gguf", "accelerate", "tokenizers"}


class _Group(TyperGroup):
    """Turns errors raised on purpose into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvbitsError as e:
            message = str(e)
        except ModuleNotFoundError as e:
            if (e.name or "").split(".")[0] not in _OPTIONAL:
                raise
            message = f"this needs {e.name}, which is not installed; run `pip install 'kvbits[hf]'`"
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Few-bit KV caches for LLM inference: what they cost in memory and accuracy, and static scales for them.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads for torch; its own choice if not given.", min=1)]


def main() -> None:
    """Entry point of the `kvbits` command."""
    app(prog_name="kvbits")


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")] = False) -> None:
    pass


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(_finite(data), allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(*things: Any) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for thing in things:
        console.print(thing, highlight=False)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are text and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right")
    return table


def _names(text: str) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise SpecError(f"--scheme {text!r} names no scheme; `kvbits schemes` lists them")
    return names


# -- plan -----------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="Local directory, config.json, GGUF file or hub id, for its configuration.", show_default=False)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of MODEL.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer, instead of MODEL.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head, instead of MODEL.")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Window of every layer in tokens, with --layers.")] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    scheme: Annotated[str, typer.Option(help="Schemes, comma-separated: presets, fp32, fp16, bf16, or all.")] = "all",
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
    from . import planner

    if sources:
        _sources(as_json)
        return
    geometry, name, longest = _geometry(model, layers, kv_heads, head_dim, sliding_window)
    given = {"num_sink_tokens": sinks, "residual_length": residual, "page_size": page_size}
    found = planner.plan(
        geometry, planner.expand_schemes(_names(scheme)), context=context, batch=batch, memory_bytes=None if memory is None else planner.parse_bytes(memory),
        raw_dtype=raw_dtype, **{k: v for k, v in given.items() if v is not None},
    )  # fmt: skip
    if as_json:
        _print_json({"model": name, "model_max_context": longest} | found.to_dict())
    else:
        _print(_plan_table(found, name), *_plan_notes(found, longest))


def _geometry(
    model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None, sliding_window: int | None
) -> tuple[tuple[LayerGeometry, ...], str | None, int | None]:
    """(layers, model name, the model's own longest context) from either the model or the numbers."""
    from .planner import uniform

    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    if model is not None:
        if clash := [k for k, v in (numbers | {"--sliding-window": sliding_window}).items() if v is not None]:
            raise SpecError(f"MODEL {model!r} already says what {', '.join(clash)} says; give one or the other")
        from rich.console import Console

        with Console(stderr=True).status(f"reading the configuration of {model}"):
            from .geometry import layer_geometries, load_config, max_context

            config = load_config(model)
            return layer_geometries(config), model, max_context(config)
    if layers is None or kv_heads is None or head_dim is None:
        missing = [k for k, v in numbers.items() if v is None]
        raise SpecError(f"give MODEL, or --layers, --kv-heads and --head-dim (missing: {', '.join(missing)})")
    return uniform(layers, kv_heads, head_dim, sliding_window), None, None


def _plan_table(found: Plan, name: str | None) -> Table:
    from .planner import human_bytes

    kinds = ", ".join(
        f"{k['count']} layers x {k['num_kv_heads']} kv heads x {k['head_dim']}" + (f" (window {k['sliding_window']:,})" if k["sliding_window"] else "")
        for k in found.to_dict()["layers"]
    )
    title = f"{name + ': ' if name else ''}{kinds}; {found.context:,} tokens x {found.batch}"
    columns = ["scheme", "bits/element", "bytes/token", "total", "16-bit / total"]
    if found.memory_bytes is not None:
        title += f"; {human_bytes(found.memory_bytes)} of memory"
        columns += [f"max batch at {found.context:,}", f"max context x {found.batch}"]
    table = _table(title, *columns)
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
    return notes


def _sources(as_json: bool) -> None:
    from .planner import GB, GIB, source_figures

    figures = source_figures()
    if as_json:
        _print_json({"sources": [f.to_dict() for f in figures]})
        return
    table = _table("Memory figures the source documents print, recomputed", "source", "case", "prints", "formula gives", "", "agrees", "why", left=2)
    table.columns[6].justify = "left"
    for f in figures:
        table.add_row(f.source, f.case, f.printed, f"{f.nbytes / GB:.2f} GB", f"{f.nbytes / GIB:.2f} GiB", "yes" if f.agrees else "NO", f.verdict)
    _print(table, "GB is 10**9 bytes, GiB is 2**30.")


# -- schemes --------------------------------------------------------------------------------------------------------


@app.command("schemes")
def list_schemes(
    head_dim: Annotated[int, typer.Option(help="Channels per head: groups are fitted to it, and paddings depend on it.")] = 128,
    as_json: Json = False,
) -> None:
    """The named schemes, with bits per element (scales, offsets and padding included), description and paper link."""
    from . import schemes
    from .spec import LayerGeometry, to_dict

    LayerGeometry(num_kv_heads=1, head_dim=head_dim)  # refuses a head_dim that no cache has
    found = [schemes.get(name, head_dim=head_dim) for name in schemes.PRESETS]
    if as_json:
        rows = [
            {
                "scheme": s.name, "bits_per_element": s.bits_per_element(head_dim), "description": s.description, "source": s.source,
                "page_size": s.page_size, "num_sink_tokens": s.num_sink_tokens, "residual_length": s.residual_length,
                "needs_calibration": s.needs_calibration, "key": to_dict(s.key), "value": to_dict(s.value),
            }
            for s in found
        ]  # fmt: skip
        _print_json({"head_dim": head_dim, "rows": rows})
        return
    table = _table(f"Schemes at head_dim {head_dim}", "scheme", "bits/element", "newest raw", "page", "description", "source")
    for column in table.columns[4:]:
        column.justify = "left"
    for s in found:
        table.add_row(s.name, f"{s.bits_per_element(head_dim):.3f}", f"{s.residual_length}", f"{s.page_size}", s.description, s.source)
    _print(table, "bits/element: closed pages, all metadata included. newest raw: tokens always kept at 16 bits, besides the unfinished page.")


# -- calibrate ------------------------------------------------------------------------------------------------------


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="Local directory, GGUF file or hub id.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text like what the model will read; never the text you evaluate on.")],
    out: Annotated[Path, typer.Option(help="File to write (safetensors).")],
    scheme: Annotated[str, typer.Option(help="A scheme with static scales.")] = "int8_static",
    prompts: Annotated[int, typer.Option(help="Windows drawn from the text; 128 to 512 are usual.")] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 256,
    percentile: Annotated[float, typer.Option(help="Percent of elements inside the range; 100 takes the maximum.")] = 99.9,
    skip_tokens: Annotated[int | None, typer.Option(help="First tokens of each window left out; the scheme's sinks if not given.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Which windows are drawn.")] = 0,
    device: Annotated[str | None, typer.Option(help="Device to run on, like cuda; the CPU if not given.", show_default=False)] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure static scales of a scheme on a model and save them with a fingerprint.

    A cache for another model, rotary setting or scheme refuses the file and says what differs.
    """
    content = _read_text(text)
    if not out.parent.is_dir():
        raise SpecError(f"--out {out}: the directory {out.parent} does not exist; create it first")
    from . import schemes

    if not schemes.get(scheme).needs_calibration:
        static = [s.name for s in schemes.PRESETS.values() if s.needs_calibration]
        raise SpecError(f"scheme {scheme!r} takes its scales from each page; schemes that need calibration: {', '.join(static)}")
    from .calibrate import calibrate as measure
    from .calibrate import prompts_from_text
    from .integrations.models import load_model

    _set_threads(threads)
    lm, tokenizer = load_model(model, device=device)
    windows = prompts_from_text(tokenizer, content, num_prompts=prompts, length=length, seed=seed)
    start = time.perf_counter()
    found = measure(lm, windows, scheme, percentile=percentile, skip_tokens=skip_tokens, progress=True)
    seconds = time.perf_counter() - start
    found.info["model"] = model
    found.info["text"] = text.name
    found.save(out)
    if as_json:
        _print_json({"out": str(out), "id": found.id, "file_bytes": out.stat().st_size, "seconds": seconds, "layers": len(found.static)} | found.info)
        return
    info = found.info
    _print(
        f"{scheme} scales of {len(found.static)} layers over {info['tokens']:,} tokens in {info['prompts']} prompts, "
        f"{'maximum' if percentile == 100 else f'percentile {percentile:g}'}, {seconds:.1f} s",
        f"wrote {out} (id {found.id})",
    )


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise SpecError(f"--text {path} is not UTF-8 text: {e}") from e
    except OSError as e:
        raise SpecError(f"--text {path}: {e.strerror or e}") from e


# -- demo -----------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Local directory, GGUF file or hub id; the embedded SmolLM2 if not given.", show_default=False)] = None,
    scheme: Annotated[str, typer.Option(help="Schemes, comma-separated.")] = "raw,int8,int4,kivi2",
    context: Annotated[int, typer.Option(help="Tokens of text before the measured ones.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens scored, and tokens generated.")] = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """One text through the 16-bit cache and through each scheme: bytes, perplexity, KL divergence, agreement, speed."""
    from . import schemes

    names = _names(scheme)
    for name in names:
        if schemes.get(name).needs_calibration:
            raise UnsupportedError(f"scheme {name!r} needs calibrated scales, which the demo does not measure; name other schemes")
    from .evaluate import demo as demonstration

    _set_threads(threads)
    result = demonstration.run(model=model, schemes=names, context=context, new_tokens=new_tokens, progress=True)
    if as_json:
        _print_json(result)
    else:
        _print(demonstration.table(result))


if __name__ == "__main__":
    main()
