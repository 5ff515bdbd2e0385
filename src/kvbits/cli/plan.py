"""`kvbits plan`: bytes and capacity, without torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SpecError, UnsupportedError, counted, unknown
from ..files import require_file
from .common import Json, Schemes, command, names_of, new_table, print_json, tokens
from .output import show, tell
from .subject import GpuMemory, Gpus, Memory, Ram, Reserve, Subject, Weights, subject_of

if TYPE_CHECKING:
    from rich.table import Table

    from ..planner import Cards, Plan
    from ..spec import Scheme


@command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory, config.json, GGUF file, hub id, or `embedded`: its configuration.", show_default=False
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, instead of MODEL.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads per layer, instead of MODEL.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Channels per head, instead of MODEL.")] = None,
    sliding_window: Annotated[
        int | None, typer.Option(help="Window of every layer in tokens, with --layers.", parser=tokens())
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens per sequence; 8k is 8,192.", parser=tokens())] = 4096,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Sequences.", min=1, max=2**31 - 1)] = 1,
    scheme: Schemes = None,
    engine: Annotated[
        str, typer.Option(help="What serves the cache: transformers, or vllm, which has formats of its own.")
    ] = "transformers",
    gpu_memory: GpuMemory = None,
    gpus: Gpus = 1,
    weights: Weights = None,
    reserve: Reserve = None,
    memory: Memory = None,
    ram: Ram = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens kept raw, in every preset.", min=0)] = None,
    residual: Annotated[int | None, typer.Option(help="Newest tokens kept raw, in every preset.", min=0)] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens per page, in every preset.")] = None,
    raw_dtype: Annotated[str, typer.Option(help="Dtype of raw pages: bf16, fp16 or fp32.")] = "bf16",
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also a page to play with: this and other models, any card, core presets in Transformers.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Bytes of a cache per scheme, and how many users and tokens fit a GPU.

    Totals are what a cache of fixed capacity allocates to the byte: whole pages, scales, sinks, raw tail and padding
    included. Schemes are 16 bits and the recommended ones if none is named; `--scheme all` lists every one.
    """
    from .. import planner

    if engine not in planner.ENGINES:
        raise SpecError(unknown("--engine", engine, planner.ENGINES))
    subject = subject_of(model, layers, kv_heads, head_dim, sliding_window, in_16_bits=True)
    for_page = html is not None and gpu_memory is None  # which counts weights for any card
    cards, limit = subject.room(gpu_memory, gpus, None if for_page else weights, reserve, memory, ram)
    changes = {
        k: v
        for k, v in {"num_sink_tokens": sinks, "residual_length": residual, "page_size": page_size}.items()
        if v is not None
    }
    chosen, refused = _chosen(subject, engine, scheme, bool(changes))
    found = planner.plan(
        planner.rank(subject.layers, gpus, subject.query_heads),
        chosen,
        engine=engine,
        context=context,
        batch=batch,
        memory_bytes=limit,
        cards=cards,
        raw_dtype=_raw_dtype(raw_dtype),
        state_bytes=subject.state_bytes and -(-subject.state_bytes // gpus),
        **changes,
    )
    found = _within(found, subject.longest)
    if html is not None:
        _write_page(html, subject, weights, cards, {"context": context, "gpus": gpus, "batch": batch})
    if as_json:
        about = {
            "model": subject.model,
            "model_max_context": subject.longest,
            "weights_from": subject.weights_from,
            "memory_from": subject.memory_from,
        }
        print_json(about | {"refused": refused} | found.to_dict())
    else:
        every = len(planner.VLLM_SHOWN if engine == "vllm" else planner.GROUPS["all"])
        listed = (
            []
            if scheme or engine == "vllm" or refused
            else [f"The schemes are 16 bits and the recommended ones; --scheme all lists all {every}."]
        )
        show(
            _plan_table(found, subject),
            *(f"{name}: not served: {why}" for name, why in refused.items()),
            *listed,
            *_plan_notes(found, subject),
        )


def _within(found: Plan, longest: int | None) -> Plan:
    """The plan, with no context longer than the model was made for."""
    if longest is None or found.memory_bytes is None:
        return found
    rows = tuple(
        dataclasses.replace(r, max_context=longest, unbounded=False)
        if r.max_context is None or r.max_context > longest
        else r
        for r in found.rows
    )
    return dataclasses.replace(found, rows=rows)


def _write_page(path: Path, subject: Subject, weights: str | None, cards: Cards | None, begin: dict[str, int]) -> None:
    """The page with the model before the listed ones.

    Raises:
        SpecError: the model's pages or the bytes of its weights are not known.
    """
    from ..report.plan_page import Model, known, page
    from ..spec import LayerGeometry

    if subject.refused is not None or subject.state_bytes is None:
        raise SpecError(
            f"--html draws packed pages, and {subject.refused or 'the size of its recurrent states is not known here'};"
            " leave --html out"
        )
    layers = tuple(g for g in subject.layers if isinstance(g, LayerGeometry))
    nbytes = subject.weights_bytes(weights) if cards is None else cards.weights_bytes
    mine = Model(
        layers=layers,
        weights_bytes=nbytes,
        query_heads=subject.query_heads,
        longest=subject.longest,
        state_bytes=subject.state_bytes,
    )
    require_file(path, "--html").write_text(
        page({Path(subject.model or f"{len(layers)} layers").stem: mine} | known(), **begin), encoding="utf-8"
    )
    tell(f"wrote {path}")


def _chosen(
    subject: Subject, engine: str, given: list[str] | None, changed: bool
) -> tuple[list[str | Scheme], dict[str, str]]:
    """(schemes to plan, what is left out and why).

    Raises:
        UnsupportedError: a scheme was named that this model or engine cannot have.
    """
    from .. import planner, schemes
    from ..integrations.refusals import refuses_turning

    names = None if given is None else names_of("--schemes", given)
    if engine == "vllm":
        if changed:
            raise SpecError(
                "--sinks, --residual and --page-size are of Transformers' caches; for vLLM see raw_newest in"
                " docs/internals/serving.md"
            )
        chosen = planner.served(names or planner.VLLM_SHOWN)
        refused = {
            n: why
            for one in chosen
            if (n := one if isinstance(one, str) else one.name) not in planner.VLLM_DENSE
            and (why := _not_in_vllm(subject, one))
        }
    else:
        for n in names or ():
            if n not in schemes.PRESETS and (
                n.startswith("kvbits_") or n in planner.VLLM_DENSE.keys() - planner.DENSE.keys()
            ):
                here = n.removeprefix("kvbits_")
                also = f", or take {here}" if here in schemes.PRESETS else ""
                raise SpecError(f"--scheme {n} is a format of vLLM; add --engine vllm{also}")
        chosen = schemes.expand(names or list(planner.SHOWN), planner.GROUPS)
        refused = {}
        if subject.refused is not None:
            refused = {
                n: subject.refused
                for one in chosen
                if (n := one if isinstance(one, str) else one.name) not in planner.DENSE
            }
        elif subject.config is not None and (how := refuses_turning(subject.config)) is not None:
            packed = (
                schemes.PRESETS[one] if isinstance(one, str) else one for one in chosen if one not in planner.DENSE
            )
            refused = {
                s.name: f"the model {how}, so its keys cannot be turned back, as klt does; use int8_centered or int4"
                for s in packed
                if s.needs_rotary
            }
    if given is not None and refused:
        name, why = next(iter(refused.items()))
        raise UnsupportedError(f"{name}: {why}")
    left = [one for one in chosen if (one if isinstance(one, str) else one.name) not in refused]
    if len(set(refused.values())) == 1:
        refused = {", ".join(refused): next(iter(refused.values()))}
    return left, refused


def _not_in_vllm(subject: Subject, scheme: str | Scheme) -> str | None:
    """Why kvbits does not serve a model in vLLM in a format, or None."""
    if subject.refused is not None:
        return subject.refused
    from ..geometry import PlainLayer, has_key_bias, only_dense, text_config
    from ..integrations.engine.served import FORMATS

    text = None if subject.config is None else text_config(subject.config)
    kind = str(getattr(text, "model_type", ""))
    if getattr(text, "alibi", False) or kind in ("bloom", "mpt"):
        return "the model has ALiBi, which kvbits' backend for vLLM does not do; use vLLM's own dtypes"
    if getattr(subject.config, "is_encoder_decoder", False):
        return "the model has an encoder, which kvbits' backend for vLLM does not do; use vLLM's own dtypes"
    if text is not None and (how := only_dense(text)) is not None:
        return f"the model {how}, for which vLLM has backends of its own; use vLLM's own dtypes"
    if not isinstance(scheme, str):
        return None
    if FORMATS[scheme].calibrated and any(getattr(g, "chunked", False) for g in subject.layers):
        return (
            "the model attends in chunks, which calibrated keys are not served with in vLLM; use kvbits_int8_centered"
        )
    biased = text is not None and has_key_bias(text)
    layers = [g for g in subject.layers if not isinstance(g, PlainLayer)]
    return next((why for g in layers if (why := FORMATS[scheme].refuses(g.head_dim, g.value_head_dim, biased))), None)


def _raw_dtype(given: str) -> str:
    from ..units import dtype_name

    if (name := dtype_name(given)) not in ("bfloat16", "float16", "float32"):
        raise SpecError(unknown("--raw-dtype", given, ["bf16", "fp16", "fp32"]))
    return name


def _widths(layer: dict[str, Any]) -> str:
    key, value = layer["head_dim"], layer.get("value_head_dim", layer["head_dim"])
    return f"{key}" if key == value else f"{key} (keys) and {value} (values)"


def _plan_table(found: Plan, subject: Subject) -> Table:
    from ..units import human_bytes

    kinds = ", ".join(
        counted(k["count"], "layer")
        + (
            f" x {k['num_kv_heads']} kv heads x {_widths(k)}"
            if "head_dim" in k
            else f" x {k['elements']:,} numbers a token"
        )
        + (f" (window {k['sliding_window']:,})" if k["sliding_window"] else "")
        for k in found.to_dict()["layers"]
    )
    title = f"{subject.model + ': ' if subject.model else ''}{kinds}; {found.context:,} tokens x {found.batch}"
    each = ", each GPU" if found.cards is not None and found.cards.count > 1 else ""
    columns = ["scheme", "bits/element", f"bytes/token{each}", f"total{each}", "16-bit / total"]
    if found.memory_bytes is not None:
        title += f"\n{_memory(found, subject)}"
        columns += [
            f"users that fit\nat {found.context:,} tokens",
            f"longest context\nof {counted(found.batch, 'user')}",
        ]
    table = new_table(title, *columns)
    for r in found.rows:
        cells = [
            r.scheme,
            f"{r.bits_per_element:.3f}",
            f"{r.bytes_per_token:,.0f}",
            human_bytes(r.total_bytes),
            f"{r.memory_reduction:.2f}x",
        ]
        if found.memory_bytes is not None:
            cells += [
                "any" if r.max_batch is None else f"{r.max_batch:,}",
                "any" if r.max_context is None else f"{r.max_context:,}",
            ]
        table.add_row(*cells)
    return table


def _memory(found: Plan, subject: Subject) -> str:
    """What the memory is for, in words."""
    from ..units import human_bytes

    cards, left = found.cards, human_bytes(found.memory_bytes or 0)
    how = "--gpu-memory or --ram counts them"
    if cards is None:
        return f"{left} for the cache alone: weights and activations are not in it ({how})"
    gpus = (
        "the RAM"
        if subject.in_ram
        else "1 GPU"
        if cards.count == 1
        else f"each of {cards.count} GPUs (tensor parallel)"
    )
    return (
        f"{gpus}: {human_bytes(cards.memory_bytes)} - {human_bytes(cards.weights_share)} of weights"
        f" ({subject.weights_from}) - {human_bytes(cards.reserve_bytes or 0)} reserve = {left} for the cache"
    )


def _plan_notes(found: Plan, subject: Subject) -> list[str]:
    from ..geometry import CROSS, has_key_bias, index_bytes, layer_places, text_config
    from ..integrations.refusals import refuses_pages
    from ..units import human_bytes

    longest = subject.longest
    notes = [
        "GB is 10**9 bytes. bits/element and bytes/token are those of long contexts; the total counts whole pages,"
        " sinks and raw tail."
    ]
    if found.state_bytes:
        notes.append(
            f"Recurrent layers keep {human_bytes(found.state_bytes)} for each user, whatever the context; the totals"
            " count it."
        )
    elif found.state_bytes is None and any(p.kind == CROSS for p in layer_places(subject.config)):
        notes.append("Layers that attend to an image keep its keys and values in 16 bits; no total counts them.")
    elif found.state_bytes is None:
        notes.append("Recurrent layers keep a state of a size that is not known here; no total counts it.")
    if (
        subject.config is not None
        and subject.refused is None
        and found.engine == "transformers"
        and (how := refuses_pages(subject.config))
    ):
        notes.append(f"The model {how}: in Transformers it takes dense=True (KVCache.for_model).")
        if index := index_bytes(subject.config):
            notes.append(f"Index keys take up to {index:,} bytes a token besides, in 16 bits; no total counts them.")
    if subject.refused is not None and len(found.layers) < getattr(text_config(subject.config), "num_hidden_layers", 0):
        notes.append(
            "Only attention layers are counted; others have a state of their own, whose size does not grow with the"
            " context."
        )
    if found.engine == "vllm":
        notes.append(
            "As stock vLLM allocates it: whole blocks. It puts unlike layers into groups of one size, which costs more;"
            " its log says the tokens that fit."
        )
        from ..integrations.engine.served import COPIED_PAGES, FORMATS, RAW_SHARE

        if calibrated := [r.scheme for r in found.rows if r.scheme in FORMATS and FORMATS[r.scheme].calibrated]:
            notes.append(f"Calibrated when first used, or ahead with `kvbits calibrate`: {', '.join(calibrated)}.")
        if any(r.copied is not None for r in found.rows) or calibrated:
            few = [f"{r.copied:,} ({r.scheme})" for r in found.rows if r.copied is not None]
            notes.append(
                f"A user's first page and newest two ({COPIED_PAGES} pages of 16 bits) are also kept raw, for as many"
                f" users as {RAW_SHARE:.0%} of the memory holds"
                + (f": {', '.join(few)}. Other users are read packed." if few else "; other users are read packed.")
            )
    if subject.memory_from is not None:
        notes.append(f"--gpu-memory: {subject.memory_from}.")
    if found.cards is not None:
        notes.append(
            f"reserve: {'the system, activations' if subject.in_ram else 'activations, the CUDA context, graphs'},"
            " fragments; 12 % unless --reserve says otherwise. Quantized weights: --weights."
        )
    sixteen = [r.total_bytes * r.memory_reduction / found.batch for r in found.rows]
    if found.memory_bytes is not None and sixteen and sixteen[0] > found.memory_bytes:
        notes.append("In 16 bits not one user fits.")
    if longest is not None and found.memory_bytes and any(r.max_context == longest for r in found.rows):
        notes.append(f"The longest context ends at the {longest:,} tokens that the model was made for.")
    if longest is not None and found.context > longest:
        notes.append(f"{found.context:,} tokens are more than the {longest:,} the model was made for.")
    from ..schemes import PRESETS, RECOMMENDED, weak_to_key_bias

    wanting = [PRESETS[r.scheme] for r in found.rows if r.scheme in PRESETS and PRESETS[r.scheme].needs_calibration]
    if first := [s.name for s in wanting if s.needs_basis_alone]:
        notes.append(f"Calibrated when first used, or ahead with `kvbits calibrate`: {', '.join(first)}.")
    if ahead := [s.name for s in wanting if not s.needs_basis_alone]:
        notes.append(f"Want the file of `kvbits calibrate --scheme NAME --out FILE`: {', '.join(ahead)}.")
    weak = [r.scheme for r in found.rows if r.scheme in PRESETS and weak_to_key_bias(PRESETS[r.scheme])]
    if weak and subject.config is not None and found.engine == "transformers" and has_key_bias(subject.config):
        notes.append(
            f"Models of this kind add a bias to their keys: {', '.join(weak)} lose accuracy on them; {RECOMMENDED} and"
            " kivi4 do not."
        )
    return notes + _short_sequences(found) + _speed(found)


NAMED = 6
"""Schemes that a note names; --json has all."""


def _short_sequences(found: Plan) -> list[str]:
    """Name the rows of few bits that take more bytes than the recommended 8 bits, and up to which length."""
    from ..planner import LOOKED_AT, recommended_of

    said = [
        f"{r.scheme} {'at every length' if r.larger_up_to >= LOOKED_AT else f'up to {r.larger_up_to:,}'}"
        for r in found.rows
        if r.larger_up_to is not None
    ]
    others = f" and {len(said) - NAMED} others" if len(said) > NAMED else ""
    return (
        [
            f"Short sequences take more bytes than in {recommended_of(found.engine)}, because the newest tokens stay in"
            f" 16 bits; tokens of one sequence: {', '.join(said[:NAMED])}{others}."
        ]
        if said
        else []
    )


def _speed(found: Plan) -> list[str]:
    """Which layers are so small that 16 bits are as fast on a GPU."""
    from ..geometry import PlainLayer
    from ..ops.break_even import small_on_gpu

    layers = [g for g in found.layers if not isinstance(g, PlainLayer)]
    notes = []
    for g in dict.fromkeys(layers):
        tokens = min(found.context, g.sliding_window or found.context)
        if note := small_on_gpu(found.batch, tokens, g.token_elements):
            which = (
                f"the {counted(layers.count(g), 'layer')}"
                f" {f'with a window of {g.sliding_window:,}' if g.sliding_window else 'with full attention'}"
            )
            notes.append(f"Speed of {which if len(set(layers)) > 1 else 'these layers'}: {note}.")
    return notes
