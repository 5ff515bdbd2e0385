"""One line of an engine's log, and one metric, on what its cache holds and costs: `Announcement`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...model_ref import ModelRef
from .calibrated import accuracy, found_by_check
from .options import Options
from .served import FORMATS, PAGE_SIZE

METRIC = "kvbits_cache_info"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """Facts on the cache of an engine.

    Attributes:
        name: of `served.FORMATS`, or the dtype of a scheme file.
        bits: of a number, with scales.
        tokens: that fit a rank.
        raw_layers: numbers of layers that stay raw.
        file: a scheme file, where `name` is its dtype.
    """

    name: str
    model: ModelRef
    options: Options
    bits: float
    tokens: int
    raw_layers: tuple[str, ...] = ()
    file: str = ""

    @property
    def _preset(self) -> str:
        return self.file or FORMATS[self.name].scheme.name

    def line(self) -> str:
        """Return what is stored, how many tokens fit and how many times bf16's that is, what is raw, and the KL that
        `kvbits check` measured, or how to measure it.
        """
        options, form = self.options, FORMATS.get(self.name)
        newest, extra = options.raw_newest, []
        if options.copies:
            first = f" and the first {options.raw_first}" if options.raw_first else ""
            extra.append(
                f"the newest {newest} to {newest + PAGE_SIZE - 1}{first} tokens of a request with copies also raw"
            )
            for c in form.copies if form and options.packed_copies else ():
                keys, values = c.key.mean_bits, c.value.mean_bits
                extra.append(
                    f"the {c.num_tokens} behind them also with keys of {keys:.3g} and values of {values:.3g} bits"
                )
        if self.raw_layers:
            extra.append(f"layers {', '.join(self.raw_layers)} raw")
        if options.calibration:
            extra.append(f"calibration {options.calibration}")
        stored = form.stored if form else f"each layer as {self.file} says"
        return (
            f"{self.name}: {stored}, {self.bits:.2f} bits with scales; {self.tokens:,} tokens fit,"
            f" {16 / self.bits:.2f} times as many as of bf16; {'; '.join(extra) or 'no token raw'};"
            f" {accuracy(self.model, self._preset)}"
        )

    def publish(self, gauge: Any, engine: str) -> None:
        """Set `<engine>:kvbits_cache_info` to 1. Its labels are the facts, as in vLLM's own `cache_config_info`.

        `kl_nats` and `measured` (a day) are empty where `kvbits check` did not measure this model.

        Args:
            gauge: Prometheus' class of it, as the engine has it.
        """
        found = found_by_check(self.model, self._preset)
        facts = {
            "format": self.name,
            "bits": f"{self.bits:.2f}",
            "tokens": str(self.tokens),
            "times_bf16": f"{16 / self.bits:.2f}",
            "kl_nats": f"{found.kl:.5f}" if found else "",
            "measured": found.day if found else "",
        }
        gauge(
            name=f"{engine}:{METRIC}",
            documentation="kvbits' format: bits of a number, tokens that fit, times those of bf16, KL of kvbits check.",
            multiprocess_mode="mostrecent",
            labelnames=[*facts],
        ).labels(**facts).set(1)
