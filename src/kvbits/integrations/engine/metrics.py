"""A metric of an engine that says what its format holds and costs: `publish`."""

from __future__ import annotations

from typing import Any

from ...model_ref import ModelRef
from .calibrated import found_by_check

NAME = "kvbits_cache_info"


def publish(gauge: Any, engine: str, model: ModelRef, form: str, *, bits: float, tokens: int, **labels: str) -> None:
    """Set `<engine>:kvbits_cache_info` to 1. Its labels are the facts, as in vLLM's own `cache_config_info`.

    Args:
        gauge: Prometheus' class of it, as the engine has it.
        form: of `served.FORMATS`, or the dtype of a scheme file.
        bits: of a number, with scales.
        tokens: that fit a rank.
        labels: besides `format`, `bits`, `tokens`, `times_bf16`, and `kl_nats` and `measured` (a day), which are empty
            where `kvbits check` did not measure this model.
    """
    found = found_by_check(model, form)
    facts = {
        "format": form,
        "bits": f"{bits:.2f}",
        "tokens": str(tokens),
        "times_bf16": f"{16 / bits:.2f}",
        "kl_nats": f"{found.kl:.5f}" if found else "",
        "measured": found.day if found else "",
    } | labels
    gauge(
        name=f"{engine}:{NAME}",
        documentation="Format of kvbits: bits of a number, tokens that fit, times those of bf16, KL of kvbits check.",
        multiprocess_mode="mostrecent",
        labelnames=[*facts],
    ).labels(**facts).set(1)
