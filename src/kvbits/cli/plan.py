"""`kvbits plan`: bytes and capacity, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, counted, unknown
from ..schemes import PRESETS, RECOMMENDED, weak_to_key_bias
from .common import Json, Schemes, command, names_of, new_table, print_json, show, tokens
from .subject import Subject, require_cards, subject_of

if TYPE_CHECKING:
    from rich.table import Table

    from ..planner import Plan


@command()
def plan(
    model: Annotated[
        str | None, typer.Argument(help="Directory, config.json, GGUF file, hub id, or `embedded`: its configuration.", show_default=False)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of MODEL.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer, instead of MODEL.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head, instead of MODEL.")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="Window of every layer in tokens, with --layers.", parser=tokens())] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence; 8k is 8,192.", parser=tokens())] = 4096,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Sequences.", min=1)] = 1,
    scheme: Schemes = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of each GPU, like 80GB, for weights, activations and cache: adds how many users fit.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that share the model by tensor parallelism, with --gpu-memory.", min=1)] = 1,
    weights: Annotated[str | None, typer.Option(help="Weights of the whole model, like 16GB; from MODEL's files or configuration if not given.")] = None,
    reserve: Annotated[str | None, typer.Option(help="Memory of each GPU for everything else: activations, CUDA, graphs.", show_default="12 %")] = None,
    memory: Annotated[str | None, typer.Option(help="Instead: memory for the cache alone, like 24GB (10**9) or 24GiB (2**30).")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens kept raw, in every preset.", min=0)] = None,
    residual: Annotated[int | None, typer.Option(help="Newest tokens kept raw, in every preset.", min=0)] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens per page, in every preset.")] = None,
    raw_dtype: Annotated[str, typer.Option(help="Dtype of raw pages: bf16, fp16 or fp32.")] = "bf16",
    sources: Annotated[bool, typer.Option("--sources", help="Recompute the memory figures that the source documents print.")] = False,
    as_json: Json = False,
) -> None:
    """Bytes of a cache per scheme, and how many users and tokens fit a GPU.

    Totals are what a cache of fixed capacity allocates to the byte: whole pages, scales, sinks, raw tail and padding included.
    Schemes are 16 bits and the recommended ones if none is named; `--scheme all` lists every one.
    """
    from .. import planner, schemes
    from ..units import parse_bytes

    if sources:
        _sources(as_json)
        return
    subject = subject_of(model, layers, kv_heads, head_dim, sliding_window)
    cards = None if gpu_memory is None else subject.cards(gpu_memory, gpus, weights, reserve)
    require_cards(gpu_memory, memory, {"--gpus": gpus if gpus > 1 else None, "--weights": weights, "--reserve": reserve})
    given = {"num_sink_tokens": sinks, "residual_length": residual, "page_size": page_size}
    found = planner.plan(
        planner.rank(subject.layers, gpus, subject.query_heads), schemes.expand(names_of("--schemes", scheme or list(planner.SHOWN)), planner.GROUPS),
        context=context, batch=batch, memory_bytes=None if memory is None else parse_bytes(memory, "--memory"), cards=cards, raw_dtype=_raw_dtype(raw_dtype),
        **{k: v for k, v in given.items() if v is not None},
    )  # fmt: skip
    if as_json:
        print_json({"model": subject.model, "model_max_context": subject.longest, "weights_from": subject.weights_from} | found.to_dict())
    else:
        chosen = [] if scheme else [f"The schemes are 16 bits and the recommended ones; --scheme all lists all {len(planner.GROUPS['all'])}."]
        show(_plan_table(found, subject), *chosen, *_plan_notes(found, subject))


def _raw_dtype(given: str) -> str:
    from ..units import dtype_name

    if (name := dtype_name(given)) not in ("bfloat16", "float16", "float32"):
        raise SpecError(unknown("--raw-dtype", given, ["bf16", "fp16", "fp32"]))
    return name


def _plan_table(found: Plan, subject: Subject) -> Table:
    from ..units import human_bytes

    kinds = ", ".join(
        f"{k['count']} layers x {k['num_kv_heads']} kv heads x {k['head_dim']}" + (f" (window {k['sliding_window']:,})" if k["sliding_window"] else "")
        for k in found.to_dict()["layers"]
    )
    title = f"{subject.model + ': ' if subject.model else ''}{kinds}; {found.context:,} tokens x {found.batch}"
    each = ", each GPU" if found.cards is not None and found.cards.count > 1 else ""
    columns = ["scheme", "bits/element", f"bytes/token{each}", f"total{each}", "16-bit / total"]
    if found.memory_bytes is not None:
        title += f"\n{_memory(found, subject)}"
        columns += [f"users that fit\nat {found.context:,} tokens", "users against\n16 bits", f"longest context\nof {counted(found.batch, 'user')}"]
    table = new_table(title, *columns)
    for r in found.rows:
        cells = [r.scheme, f"{r.bits_per_element:.3f}", f"{r.bytes_per_token:,.0f}", human_bytes(r.total_bytes), f"{r.memory_reduction:.2f}x"]
        if found.memory_bytes is not None:
            cells += [
                "any" if r.max_batch is None else f"{r.max_batch:,}", "" if r.more is None else f"{r.more:.2f} times",
                "any" if r.max_context is None else f"{r.max_context:,}",
            ]  # fmt: skip
        table.add_row(*cells)
    return table


def _memory(found: Plan, subject: Subject) -> str:
    """What the memory is for, in words."""
    from ..units import human_bytes

    cards, left = found.cards, human_bytes(found.memory_bytes or 0)
    if cards is None:
        return f"{left} for the cache alone: weights and activations are not in it (--gpu-memory counts them)"
    gpus = "1 GPU" if cards.count == 1 else f"each of {cards.count} GPUs (tensor parallel)"
    return (
        f"{gpus}: {human_bytes(cards.memory_bytes)} - {human_bytes(cards.weights_share)} of weights ({subject.weights_from}) - "
        f"{human_bytes(cards.reserve_bytes or 0)} reserve = {left} for the cache"
    )


def _plan_notes(found: Plan, subject: Subject) -> list[str]:
    longest = subject.longest
    notes = ["GB is 10**9 bytes. bits/element and bytes/token are those of long contexts; the total counts whole pages, sinks and raw tail."]
    if found.cards is not None:
        notes.append("reserve: activations, the CUDA context, graphs, fragments; 12 % unless --reserve says otherwise. Quantized weights: --weights.")
    if found.memory_bytes is not None and found.rows and all(r.more is None for r in found.rows):
        notes.append("In 16 bits not one user fits.")
    if longest is not None and any((r.max_context or 0) > longest or r.unbounded for r in found.rows):
        notes.append(f"The model itself was made for {longest:,} tokens.")
    if longest is not None and found.context > longest:
        notes.append(f"{found.context:,} tokens are more than the {longest:,} the model was made for.")
    if calibrated := [r.scheme for r in found.rows if r.scheme in PRESETS and PRESETS[r.scheme].needs_calibration]:
        notes.append(f"Calibrated first, with `kvbits calibrate`: {', '.join(calibrated)}.")
    if subject.config is not None and (weak := _weak(found, subject.config)):
        notes.append(
            f"Models of this kind add a bias to their keys: {', '.join(weak)} lose accuracy on them (docs/evaluation.md); {RECOMMENDED} and kivi4 do not."
        )
    from ..ops.break_even import small_on_gpu

    sizes = {(min(found.context, g.sliding_window or found.context), g.num_kv_heads, g.head_dim) for g in found.layers}
    notes += [f"Speed: {note}." for n, heads, d in sorted(sizes) if (note := small_on_gpu(found.batch, n, heads, d))]
    return notes


def _weak(found: Plan, config: Any) -> list[str]:
    """Schemes of the plan that a key bias spoils, where the model has one."""
    from ..geometry import has_key_bias

    return [r.scheme for r in found.rows if r.scheme in PRESETS and weak_to_key_bias(PRESETS[r.scheme])] if has_key_bias(config) else []


def _sources(as_json: bool) -> None:
    from ..studies.source_figures import source_figures
    from ..units import GB, GIB

    figures = source_figures()
    if as_json:
        print_json({"sources": [f.to_dict() for f in figures]})
        return
    table = new_table("Memory figures the source documents print, recomputed", "source", "case", "prints", "formula gives", "", "agrees", "why", left=2)
    table.columns[6].justify = "left"
    for f in figures:
        table.add_row(f.source, f.case, f.printed, f"{f.nbytes / GB:.2f} GB", f"{f.nbytes / GIB:.2f} GiB", "yes" if f.agrees else "NO", f.verdict)
    show(table, "GB is 10**9 bytes, GiB is 2**30.")
