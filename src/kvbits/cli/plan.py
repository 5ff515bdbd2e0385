"""`kvbits plan`: bytes and capacity, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, counted, unknown
from ..schemes import RECOMMENDED
from .common import Json, Schemes, command, names_of, new_table, print_json, read_config, show, tokens

if TYPE_CHECKING:
    from rich.table import Table

    from ..planner import Cards, Plan
    from ..spec import LayerGeometry


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
    subject = _subject(model, layers, kv_heads, head_dim, sliding_window)
    cards = None if gpu_memory is None else subject.cards(gpu_memory, gpus, weights, reserve)
    _require_cards(gpu_memory, memory, {"--gpus": gpus if gpus > 1 else None, "--weights": weights, "--reserve": reserve})
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


@dataclass
class _Subject:
    """What is planned for: a model, or numbers.

    Attributes:
        longest: the model's own longest context.
        weights_from: where the bytes of its weights were found, once they were asked for.
    """

    layers: tuple[LayerGeometry, ...]
    model: str | None = None
    config: Any = None
    query_heads: int | None = None
    longest: int | None = None
    weights_from: str | None = None

    def cards(self, gpu_memory: str, gpus: int, weights: str | None, reserve: str | None) -> Cards:
        from ..planner import Cards
        from ..units import parse_bytes

        memory_bytes = parse_bytes(gpu_memory, "--gpu-memory")
        if weights is not None:
            nbytes, self.weights_from = parse_bytes(weights, "--weights"), "--weights"
        elif self.model is None:
            raise SpecError("--gpu-memory holds the weights too, and --layers does not say how many bytes they take; give --weights, like --weights 16GB")
        else:
            from ..weights import weights_bytes

            nbytes, self.weights_from = weights_bytes(self.model, self.config)
        return Cards(memory_bytes=memory_bytes, weights_bytes=nbytes, count=gpus, reserve_bytes=None if reserve is None else _reserve(reserve, memory_bytes))


def _reserve(text: str, memory_bytes: int) -> int:
    """Bytes of "4GB", or of a share of the GPU like "10%"."""
    from ..units import parse_bytes

    if not text.strip().endswith("%"):
        return parse_bytes(text, "--reserve")
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise SpecError(f"--reserve {text!r} is no share of a GPU; write 0% to 99%, or bytes like 8GB")
    return int(memory_bytes * share / 100)


def _require_cards(gpu_memory: str | None, memory: str | None, others: dict[str, Any]) -> None:
    """Refuse memory that is given twice, and options that say nothing without --gpu-memory."""
    if gpu_memory is not None and memory is not None:
        raise SpecError("--memory is for the cache alone, --gpu-memory holds weights and activations too; give one of them")
    if gpu_memory is None and (unused := [name for name, value in others.items() if value is not None]):
        raise SpecError(f"{', '.join(unused)} means nothing without --gpu-memory, the memory of each GPU, like --gpu-memory 80GB")


def _subject(model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None, sliding_window: int | None) -> _Subject:
    """From either the model or the numbers."""
    from ..planner import uniform

    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    if model is not None:
        if clash := [k for k, v in (numbers | {"--sliding-window": sliding_window}).items() if v is not None]:
            raise SpecError(f"MODEL {model!r} already says what {', '.join(clash)} says; give one or the other")
        from ..geometry import layer_geometries, max_context, query_heads

        config = read_config(model)
        return _Subject(layer_geometries(config), model, config, query_heads(config), max_context(config))
    if layers is None or kv_heads is None or head_dim is None:
        missing = [k for k, v in numbers.items() if v is None]
        raise SpecError(f"give MODEL, or --layers, --kv-heads and --head-dim (missing: {', '.join(missing)})")
    return _Subject(uniform(layers, kv_heads, head_dim, sliding_window))


def _plan_table(found: Plan, subject: _Subject) -> Table:
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


def _memory(found: Plan, subject: _Subject) -> str:
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


def _plan_notes(found: Plan, subject: _Subject) -> list[str]:
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
    from ..schemes import PRESETS, weak_to_key_bias

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
