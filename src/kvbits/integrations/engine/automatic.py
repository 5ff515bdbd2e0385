"""`kvbits_auto`: the format that a context and a number of requests need, and why it was taken."""

from __future__ import annotations

from ... import planner
from ...errors import UnsupportedError
from ...geometry import has_key_bias
from ...model_ref import ModelRef
from ...units import human_bytes
from .calibrated import found_by_check
from .served import FORMATS, LISTED

AUTO = "kvbits_auto"


def choose(
    model: ModelRef, *, memory_bytes: int, context: int, requests: int, raw_dtype: str, ranks: int = 1
) -> tuple[str, str]:
    """(Name of a format of `LISTED`, why): the most accurate that holds so many requests, else the one that holds most.

    Formats that the model cannot have are left out, and those that `kvbits check` refused or, besides the first, never
    looked at.

    Args:
        model: with Transformers' configuration.
        memory_bytes: of each rank, for its cache.
        ranks: of tensor parallelism.

    Raises:
        UnsupportedError: none is left.
    """
    bias, held, left_out = has_key_bias(model.config), dict[str, int](), []
    for name in LISTED:
        form, found = FORMATS[name], found_by_check(model, name)
        if any(form.refuses(g.head_dim, g.value_head_dim, bias) for g in model.layers):
            left_out.append(f"{name} does not take this model")
        elif found is not None and not found.passed:
            left_out.append(f"{name} fails its check ({found.command})")
        elif found is None and name != LISTED[0]:
            preset = form.scheme.name
            left_out.append(f"{name} was not measured (kvbits check {model} --scheme {preset})")
        else:
            of_rank = planner.rank(model.layers, ranks)
            planned = planner.plan(
                of_rank,
                [name],
                engine="vllm",
                context=context,
                batch=requests,
                memory_bytes=memory_bytes,
                raw_dtype=raw_dtype,
            )
            (row,) = (x for x in planned.rows if x.scheme == name)
            held[name] = row.max_batch or 0
    if not held:
        raise UnsupportedError(f"{AUTO} finds no format for this model: {'; '.join(left_out)}; name one")
    enough = [name for name, most in held.items() if most >= requests]
    chosen = enough[0] if enough else max(held, key=lambda name: held[name])
    wanted = f"{requests:,} requests of {context:,} tokens in {human_bytes(memory_bytes)}"
    reason = f"the most accurate that holds {wanted}" if enough else f"it holds most, and none holds {wanted}"
    each = ", ".join(f"{name} holds {most:,}" for name, most in held.items())
    return chosen, "; ".join([f"{AUTO} is {chosen}: {reason} ({each})", *left_out])
