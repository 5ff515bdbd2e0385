"""`kvbits plan`: bytes and capacity, without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, UnsupportedError, counted, unknown
from ..files import require_file
from ..settings import setting
from ..units import dtype_name, human_bytes
from .common import OfSchemes, Output, command, new_table, print_json
from .memory import Memory, Room, stated
from .output import show, tell

if TYPE_CHECKING:
    from rich.table import Table

    from ..model_ref import ModelRef
    from ..planner import Plan
    from ..spec import Scheme


@dataclass(frozen=True, kw_only=True)
class Planned(OfSchemes, Memory, Output):
    """Options of `kvbits plan`: what is planned."""

    model: str | None = setting(
        None, "Folder, config.json, GGUF file, hub id, or `embedded`. Only its configuration is read.", argument=True
    )
    layers: int | None = setting(None, "Layers, instead of MODEL.")
    kv_heads: int | None = setting(None, "KV heads per layer, instead of MODEL.")
    head_dim: int | None = setting(None, "Channels per head, instead of MODEL.")
    sliding_window: int | None = setting(None, "Sliding window of every layer, in tokens; needs --layers.", tokens=1)
    context: int = setting(4096, "Tokens per sequence; 8k is 8,192.", tokens=1)
    batch: int = setting(1, "Sequences.", "--batch-size", "--batch", least=1, most=2**31 - 1)
    engine: str = setting("transformers", "Engine that serves the cache: transformers or vllm.")
    ram: str | None = setting(None, "RAM for weights and cache on a machine without a GPU, like 16GB.")
    sinks: int | None = setting(None, "First tokens to keep in 16 bits, in every preset.", least=0)
    residual: int | None = setting(None, "Newest tokens to keep in 16 bits, in every preset.", least=0)
    page_size: int | None = setting(None, "Tokens per page, in every preset.")
    raw_dtype: str = setting("bf16", "Dtype of raw pages: bf16, fp16 or fp32.")
    html: Path | None = setting(None, "Also write an interactive HTML page: this and other models, any card.")

    @property
    def ref(self) -> ModelRef:
        """The model, or layers of none."""
        from ..model_ref import ModelRef
        from ..planner import uniform

        numbers = {"--layers": self.layers, "--kv-heads": self.kv_heads, "--head-dim": self.head_dim}
        if self.model is not None:
            numbers["--sliding-window"] = self.sliding_window
            if clash := [name for name, value in numbers.items() if value is not None]:
                raise SpecError(
                    f"MODEL {self.model!r} already says what {', '.join(clash)} says; give one or the other"
                )
            return stated(self.model)
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            missing = [name for name, value in numbers.items() if value is None]
            raise SpecError(f"give MODEL, or --layers, --kv-heads and --head-dim (missing: {', '.join(missing)})")
        return ModelRef("", layers=uniform(self.layers, self.kv_heads, self.head_dim, self.sliding_window))

    @property
    def changes(self) -> dict[str, int]:
        """Fields of `Scheme` that every preset has otherwise."""
        given = {"num_sink_tokens": self.sinks, "residual_length": self.residual, "page_size": self.page_size}
        return {name: value for name, value in given.items() if value is not None}


@command()
def plan(options: Planned) -> None:
    """Print the bytes of a cache per scheme, and how many users and tokens fit a GPU.

    Totals are what a cache of fixed capacity allocates to the byte: whole pages, scales, sinks, raw tail and padding
    included. Schemes are 16 bits and the recommended ones if none is named; `--scheme all` lists every one.
    """
    from .. import planner

    if options.engine not in planner.ENGINES:
        raise SpecError(unknown("--engine", options.engine, planner.ENGINES))
    ref = options.ref
    layers, _ = ref.planned
    html = options.html
    for_page = html is not None and options.gpu_memory is None  # which counts weights for any card
    room = (dataclasses.replace(options, weights=None) if for_page else options).room(ref)
    chosen, refused = _chosen(ref, options)
    if (raw_dtype := dtype_name(options.raw_dtype)) not in ("bfloat16", "float16", "float32"):
        raise SpecError(unknown("--raw-dtype", options.raw_dtype, ["bf16", "fp16", "fp32"]))
    found = planner.plan(
        planner.rank(layers, options.gpus, ref.query_heads),
        chosen,
        engine=options.engine,
        context=options.context,
        batch=options.batch,
        memory_bytes=room.nbytes,
        cards=room.cards,
        raw_dtype=raw_dtype,
        state_bytes=ref.state_bytes and -(-ref.state_bytes // options.gpus),
        **options.changes,
    )
    found = _within(found, ref.max_context)
    weights_from = room.weights_from
    if html is not None and room.cards is None:
        nbytes, weights_from = options.weights_bytes(ref)
        _write_page(html, ref, nbytes, options)
    elif html is not None and room.cards is not None:
        _write_page(html, ref, room.cards.weights_bytes, options)
    if options.as_json:
        about = {
            "model": options.model,
            "model_max_context": ref.max_context,
            "weights_from": weights_from,
            "memory_from": room.memory_from,
        }
        print_json(about | {"refused": refused} | found.to_dict())
        return
    every = len(planner.VLLM_SHOWN if options.engine == "vllm" else planner.GROUPS["all"])
    listed = f"The schemes are 16 bits and the recommended ones; --scheme all lists all {every}."
    show(
        _plan_table(found, ref, room),
        *(f"{name}: not served: {why}" for name, why in refused.items()),
        *([] if options.schemes or options.engine == "vllm" or refused else [listed]),
        *_plan_notes(found, ref, room),
    )


def _within(found: Plan, longest: int | None) -> Plan:
    """Return the plan, with no context longer than the model was made for."""
    if longest is None or found.memory_bytes is None:
        return found
    rows = tuple(
        dataclasses.replace(r, max_context=longest, unbounded=False)
        if r.max_context is None or r.max_context > longest
        else r
        for r in found.rows
    )
    return dataclasses.replace(found, rows=rows)


def _write_page(path: Path, ref: ModelRef, weights_bytes: int, options: Planned) -> None:
    """Write the page with the model before the listed ones.

    Raises:
        SpecError: the model's pages or the bytes of its states are not known.
    """
    from ..report.plan_page import known, page

    refused = ref.planned[1]
    if refused is not None or ref.state_bytes is None:
        raise SpecError(
            f"--html draws packed pages, and {refused or 'the size of its recurrent states is not known here'};"
            " leave --html out"
        )
    name = Path(ref.name or f"{len(ref.layers)} layers").stem
    text = page(
        {name: (ref, weights_bytes)} | dict(known()), context=options.context, gpus=options.gpus, batch=options.batch
    )
    require_file(path, "--html").write_text(text, encoding="utf-8")
    tell(f"wrote {path}")


def _chosen(ref: ModelRef, options: Planned) -> tuple[list[str | Scheme], dict[str, str]]:
    """Return (schemes to plan, what is left out and why).

    Raises:
        UnsupportedError: a scheme was named that this model or engine cannot have.
    """
    from .. import planner, schemes
    from ..integrations.refusals import refuses_turning

    names, vllm = options.schemes, options.engine == "vllm"
    if vllm and options.changes:
        raise SpecError(
            "--sinks, --residual and --page-size are of Transformers' caches; for vLLM see raw_newest in"
            " docs/internals/serving.md"
        )
    for n in () if vllm else names or ():
        if n not in schemes.PRESETS and (
            n.startswith("kvbits_") or n in planner.VLLM_DENSE.keys() - planner.DENSE.keys()
        ):
            here = n.removeprefix("kvbits_")
            also = f", or take {here}" if here in schemes.PRESETS else ""
            raise SpecError(f"--scheme {n} is a format of vLLM; add --engine vllm{also}")
    chosen = (
        planner.served(names or planner.VLLM_SHOWN)
        if vllm
        else schemes.expand(names or list(planner.SHOWN), planner.GROUPS)
    )
    unturned = None if vllm or ref.config is None else refuses_turning(ref.config)
    refused = {}
    for one in chosen:
        n = one if isinstance(one, str) else one.name
        if n in (planner.VLLM_DENSE if vllm else planner.DENSE):
            continue
        if (why := ref.planned[1]) is None and vllm:
            why = _not_in_vllm(ref, one)
        elif why is None and unturned and (schemes.PRESETS[one] if isinstance(one, str) else one).needs_rotary:
            why = f"the model {unturned}, so its keys cannot be turned back, as klt does; use int8_centered or int4"
        if why is not None:
            refused[n] = why
    if names is not None and refused:
        name, why = next(iter(refused.items()))
        raise UnsupportedError(f"{name}: {why}")
    left = [one for one in chosen if (one if isinstance(one, str) else one.name) not in refused]
    if len(set(refused.values())) == 1:
        refused = {", ".join(refused): next(iter(refused.values()))}
    return left, refused


def _not_in_vllm(ref: ModelRef, scheme: str | Scheme) -> str | None:
    """Return why kvbits does not serve a model in vLLM in a format, or None."""
    from ..geometry import has_key_bias, only_dense, text_config
    from ..integrations.engine.served import FORMATS

    text = None if ref.config is None else text_config(ref.config)
    kind = str(getattr(text, "model_type", ""))
    if getattr(text, "alibi", False) or kind in ("bloom", "mpt"):
        return "the model has ALiBi, which kvbits' backend for vLLM does not do; use vLLM's own dtypes"
    if getattr(ref.config, "is_encoder_decoder", False):
        return "the model has an encoder, which kvbits' backend for vLLM does not do; use vLLM's own dtypes"
    if text is not None and (how := only_dense(text)) is not None:
        return f"the model {how}, for which vLLM has backends of its own; use vLLM's own dtypes"
    if not isinstance(scheme, str):
        return None
    if FORMATS[scheme].calibrated and any(g.chunked for g in ref.layers):
        return (
            "the model attends in chunks, which calibrated keys are not served with in vLLM; use kvbits_int8_centered"
        )
    biased = text is not None and has_key_bias(text)
    found = (FORMATS[scheme].refuses(g.head_dim, g.value_head_dim, biased) for g in ref.layers)
    return next((why for why in found if why), None)


def _widths(layer: dict[str, Any]) -> str:
    key, value = layer["head_dim"], layer.get("value_head_dim", layer["head_dim"])
    return f"{key}" if key == value else f"{key} (keys) and {value} (values)"


def _plan_table(found: Plan, ref: ModelRef, room: Room) -> Table:
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
    title = f"{ref.name + ': ' if ref.name else ''}{kinds}; {found.context:,} tokens x {found.batch}"
    each = ", each GPU" if found.cards is not None and found.cards.count > 1 else ""
    columns = ["scheme", "bits/element", "bits held", f"bytes/token{each}", f"total{each}", "16-bit / total"]
    if found.memory_bytes is not None:
        title += f"\n{_memory(found, room)}"
        columns += [
            f"users that fit\nat {found.context:,} tokens",
            f"longest context\nof {counted(found.batch, 'user')}",
        ]
    table = new_table(title, *columns)
    for r in found.rows:
        cells = [
            r.scheme,
            f"{r.bits_per_element:.3f}",
            f"{r.bits_held:.2f}",
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


def _memory(found: Plan, room: Room) -> str:
    """Return what the memory is for, in words."""
    cards, left = found.cards, human_bytes(found.memory_bytes or 0)
    how = "--gpu-memory or --ram counts them"
    if cards is None:
        return f"{left} for the cache alone: weights and activations are not in it ({how})"
    gpus = (
        "the RAM" if room.in_ram else "1 GPU" if cards.count == 1 else f"each of {cards.count} GPUs (tensor parallel)"
    )
    return (
        f"{gpus}: {human_bytes(cards.memory_bytes)} - {human_bytes(cards.weights_share)} of weights"
        f" ({room.weights_from}) - {human_bytes(cards.reserve_bytes or 0)} reserve = {left} for the cache"
    )


def _plan_notes(found: Plan, ref: ModelRef, room: Room) -> list[str]:
    columns = (
        "GB is 10**9 bytes. The columns bits/element and bytes/token are for long contexts. The columns total and bits"
        " held also count whole pages and the tokens that stay in 16 bits or have finer copies."
    )
    notes = [columns, *_layers_left_out(found, ref)]
    if found.engine == "vllm":
        notes += _in_vllm(found)
    notes += [*_budget(found, room), *_longest(found, ref), *_of_presets(found, ref), *_short_sequences(found)]
    return notes if room.in_ram else notes + _speed(found)


def _layers_left_out(found: Plan, ref: ModelRef) -> list[str]:
    """Name states and layers that pages do not hold."""
    from ..geometry import CROSS, index_bytes, layer_places, text_config
    from ..integrations.refusals import refuses_pages

    refused, config, notes = ref.planned[1], ref.config, []
    if found.state_bytes:
        notes.append(
            f"Recurrent layers keep {human_bytes(found.state_bytes)} for each user, whatever the context; the totals"
            " count it."
        )
    elif found.state_bytes is None and any(p.kind == CROSS for p in layer_places(config)):
        notes.append("Layers that attend to an image keep its keys and values in 16 bits; no total counts them.")
    elif found.state_bytes is None:
        notes.append("Recurrent layers keep a state of a size that is not known here; no total counts it.")
    if config is not None and refused is None and found.engine == "transformers" and (how := refuses_pages(config)):
        notes.append(f"The model {how}: in Transformers it takes dense=True (KVCache.for_model).")
        if index := index_bytes(config):
            notes.append(f"Index keys take up to {index:,} bytes a token besides, in 16 bits; no total counts them.")
    if refused is not None and len(found.layers) < getattr(text_config(config), "num_hidden_layers", 0):
        notes.append(
            "Only attention layers are counted; others have a state of their own, whose size does not grow with the"
            " context."
        )
    return notes


def _in_vllm(found: Plan) -> list[str]:
    """Explain vLLM's blocks, calibrations and copies."""
    from ..integrations.engine.served import COPIED, COPIES_SHARE, FORMATS

    notes = [
        "Totals count whole blocks, as vLLM allocates them. vLLM puts unlike layers into groups of one size, which"
        " takes more memory. vLLM's log has the number of tokens that fit."
    ]
    if calibrated := [r.scheme for r in found.rows if r.scheme in FORMATS and FORMATS[r.scheme].calibrated]:
        notes.append(_calibrated(calibrated))
    if any(r.copied is not None for r in found.rows) or calibrated:
        few = [f"{r.copied:,} ({r.scheme})" for r in found.rows if r.copied is not None]
        notes.append(
            f"Each user's first {COPIED} and newest {_newest(calibrated)} tokens have copies in 16 bits"
            f"{_finer(calibrated)}. Copies take at most {COPIES_SHARE:.0%} of the memory"
            + (f", enough for this many users: {', '.join(few)}." if few else ".")
            + " For other users, attention reads packed pages."
        )
    return notes


def _budget(found: Plan, room: Room) -> list[str]:
    """Note where the memory is from, and what its reserve holds."""
    notes = []
    if room.memory_from is not None:
        notes.append(f"--gpu-memory: {room.memory_from}.")
    if found.cards is not None:
        notes.append(
            f"The reserve holds {'the system, activations' if room.in_ram else 'activations, the CUDA context, graphs'}"
            " and fragments: 12 % unless you give --reserve. If a server quantizes the weights, give --weights."
        )
    sixteen = [r.total_bytes * r.memory_reduction / found.batch for r in found.rows]
    if found.memory_bytes is not None and sixteen and sixteen[0] > found.memory_bytes:
        notes.append("No user fits in 16 bits.")
    return notes


def _longest(found: Plan, ref: ModelRef) -> list[str]:
    """Name the context that the model was made for, where the plan reaches it."""
    longest, notes = ref.max_context, []
    if longest is not None and found.memory_bytes and any(r.max_context == longest for r in found.rows):
        notes.append(f"The longest context ends at the {longest:,} tokens that the model was made for.")
    if longest is not None and found.context > longest:
        notes.append(f"{found.context:,} tokens are more than the {longest:,} the model was made for.")
    return notes


def _of_presets(found: Plan, ref: ModelRef) -> list[str]:
    """Name presets that need a calibration, or that lose accuracy on keys with a bias."""
    from ..geometry import has_key_bias
    from ..schemes import PRESETS, RECOMMENDED, weak_to_key_bias

    notes, presets = [], [PRESETS[r.scheme] for r in found.rows if r.scheme in PRESETS]
    wanting = [s for s in presets if s.needs_calibration]
    if first := [s.name for s in wanting if s.needs_basis_alone]:
        notes.append(_calibrated(first))
    if ahead := [s.name for s in wanting if not s.needs_basis_alone]:
        notes.append(f"These need a file of `kvbits calibrate --scheme NAME --out FILE`: {', '.join(ahead)}.")
    weak = [s.name for s in presets if weak_to_key_bias(s)]
    if weak and ref.config is not None and found.engine == "transformers" and has_key_bias(ref.config):
        notes.append(
            f"Models of this kind add a bias to their keys: {', '.join(weak)} lose accuracy on them; {RECOMMENDED} and"
            " kivi4 do not."
        )
    return notes


def _calibrated(names: list[str]) -> str:
    return f"kvbits calibrates these at the first use, or ahead with `kvbits calibrate`: {', '.join(names)}."


NAMED = 6
"""Schemes that a note names; --json has all."""


def _newest(names: list[str]) -> str:
    """Return how many newest tokens these formats of vLLM keep raw, for a sentence; without names, a scheme file."""
    from ..integrations.engine.served import COPIED, FORMATS

    of: dict[int, list[str]] = {}
    for name in names:
        of.setdefault(FORMATS[name].raw_newest, []).append(name)
    if len(of) < 2:
        return str(next(iter(of), COPIED))
    return " or ".join(f"{tokens} ({', '.join(some)})" for tokens, some in of.items())


def _finer(names: list[str]) -> str:
    """Return which tokens of these formats of vLLM have copies in finer ones, for a sentence; "" where none have."""
    from ..integrations.engine.served import FORMATS

    of: dict[int, list[str]] = {}
    for name in names:
        of.setdefault(sum(c.num_tokens for c in FORMATS[name].copies), []).append(name)
    said = [f"{tokens:,} behind the newest ({', '.join(some)})" for tokens, some in of.items() if tokens]
    return f", and the {' and the '.join(said)} have copies in finer formats" if said else ""


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
            f" 16 bits. Short means this many tokens: {', '.join(said[:NAMED])}{others}."
        ]
        if said
        else []
    )


def _speed(found: Plan) -> list[str]:
    """Return notes on which layers are so small that 16 bits are as fast on a GPU."""
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
