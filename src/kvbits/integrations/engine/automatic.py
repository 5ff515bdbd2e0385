"""The format that a context and a number of requests need, and why it was taken: `kvbits_auto` of engines, "auto" of
Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import planner, schemes
from ...errors import SpecError, UnsupportedError, counted
from ...geometry import has_key_bias
from ...model_ref import ModelRef
from ...spec import LayerGeometry
from ...units import human_bytes
from ...weights import weights_bytes
from .calibrated import found_by_check
from .served import FORMATS, LISTED, Format

AUTO = "kvbits_auto"


def choose(
    model: ModelRef,
    layers: Sequence[LayerGeometry],
    *,
    memory_bytes: int,
    context: int,
    requests: int,
    raw_dtype: str,
    engine: str = "vllm",
) -> tuple[str, str]:
    """Return (Name of a format of `LISTED`, why): the most accurate that holds so many requests, else the one that
    holds most.

    Formats that the model cannot have are left out, and those that `kvbits check` refused or, besides the first, never
    looked at.

    Args:
        model: with Transformers' configuration.
        layers: of a rank, as they are stored.
        memory_bytes: of a rank, for its cache.
        engine: of `planner.ENGINES`; formats of Transformers are named without their prefix.

    Raises:
        UnsupportedError: none is left.
    """
    held, left_out = dict[str, int](), []
    for form in map(FORMATS.__getitem__, LISTED):
        found = found_by_check(model, preset := form.scheme.name)
        name = form.name if engine == "vllm" else preset
        if not _takes(model, layers, form, engine):
            left_out.append(f"{name} does not take this model")
        elif found is not None and not found.passed:
            left_out.append(f"{name} fails its check ({found.command})")
        elif found is None and form.name != LISTED[0]:
            left_out.append(f"{name} was not measured (kvbits check {model} --scheme {preset})")
        else:
            planned = planner.plan(
                layers,
                [name],
                engine=engine,
                context=context,
                batch=requests,
                memory_bytes=memory_bytes,
                raw_dtype=raw_dtype,
                state_bytes=model.state_bytes,
            )
            held[name] = planned.rows[0].max_batch or 0
    if not held:
        raise UnsupportedError(f"no format can be chosen for this model: {'; '.join(left_out)}; name one")
    enough = [name for name, most in held.items() if most >= requests]
    chosen = enough[0] if enough else max(held, key=lambda name: held[name])
    wanted = f"{counted(requests, 'request')} of {context:,} tokens in {human_bytes(memory_bytes)}"
    reason = f"the most accurate that holds {wanted}" if enough else f"it holds most, and none holds {wanted}"
    each = ", ".join(f"{name} holds {most:,}" for name, most in held.items())
    return chosen, "; ".join([f"{chosen} is chosen: {reason} ({each})", *left_out])


def _takes(model: ModelRef, layers: Sequence[LayerGeometry], form: Format, engine: str) -> bool:
    bias = has_key_bias(model.config)
    if engine == "vllm":
        return not form.refuses_any(layers, bias)
    try:
        return not (bias and schemes.weak_to_key_bias(schemes.for_layers(form.scheme.name, tuple(layers))))
    except SpecError:
        return False


def beside_weights(model: ModelRef, total_bytes: int, share: float, gpus: int) -> int:
    """Return bytes for the cache on each of `gpus` GPUs, of whose memory an engine uses a share for it and the weights.

    Raises:
        SpecError: weights leave none.
    """
    return planner.Cards(
        memory_bytes=total_bytes,
        weights_bytes=weights_bytes(model)[0],
        count=gpus,
        reserve_bytes=int((1 - share) * total_bytes),
    ).cache_bytes
