"""Windows of a text to calibrate on: how many, how long, how they are drawn, and what is measured on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DataError, counted
from ..geometry import max_context
from ..spec import Scheme
from .calibration import Calibration
from .collect import calibrate_all, prompts_from_text
from .settings import Settings

if TYPE_CHECKING:
    from ..evaluate.texts import Text


@dataclass(frozen=True)
class Sample:
    """The part of a text that is looked at: so many windows of so many tokens."""

    windows: int
    length: int

    def within(self, limit: int | None) -> Sample:
        """Return the same with windows of at most `limit` tokens."""
        return Sample(self.windows, min(self.length, limit or self.length))

    def require_positions(self, limit: int | None) -> None:
        """Refuse windows longer than the context that a model was made for.

        Raises:
            DataError: naming both lengths.
        """
        if limit is not None and self.length > limit:
            raise DataError(
                f"windows of {self.length} tokens pass the model's {limit} positions; give --length, at most {limit}"
            )


def thorough(scheme: Scheme) -> Sample:
    """Choose the sample of a calibration that is kept."""
    if "codebook" in scheme.calibrates:
        return Sample(16, 2048)
    return Sample(16, 1024) if "basis" in scheme.calibrates else Sample(128, 256)


def windows_of(tokenizer: Any, text: Text, sample: Sample, *, seed: int = 0, batch_size: int = 1) -> list[torch.Tensor]:
    """Return windows of a text as `calibrate.prompts_from_text` draws them; of a mixed one as many of each part, the
    first ones one more where they do not divide.
    """
    parts = text.parts or (text,)
    shares = [(sample.windows + len(parts) - 1 - i) // len(parts) for i in range(len(parts))]
    drawn = [
        prompts_from_text(
            tokenizer, part.content, num_prompts=n, length=sample.length, seed=seed, batch_size=batch_size
        )
        for part, n in zip(parts, shares, strict=True)
        if n
    ]
    return [batch for some in drawn for batch in some]


def about(text: Text, sample: Sample) -> dict[str, Any]:
    """Describe the text of a calibration, for its `info`."""
    found = {
        "text": text.name,
        "text_sha256": text.sha256,
        "windows": sample.windows,
        "length": sample.length,
    }
    if text.parts:
        found["mixed_sha256"] = [p.sha256 for p in text.parts]
    if wholes := [p.whole for p in text.parts or (text,) if p.whole]:
        found["part_of_sha256"] = wholes
    return found


def calibrated(
    model: Any,
    tokenizer: Any,
    text: Text,
    sample: Sample,
    schemes: Sequence[Scheme],
    settings: Settings | None = None,
    *,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda note: None,
) -> list[Calibration]:
    """Calibrate a loaded model for schemes on windows of a text, in one pass (`calibrate_all`).

    Args:
        say: told where the text is shorter than the sample.

    Raises:
        DataError: windows longer than the model's positions.
        What `calibrate` raises.
    """
    sample.require_positions(max_context(model.config))
    one_by_one = any("codebook" in s.calibrates for s in schemes)
    windows = windows_of(tokenizer, text, sample, seed=seed, batch_size=1 if one_by_one else 4)
    found = calibrate_all(model, windows, schemes, settings, resume=resume, progress=True)
    for calibration in found:
        calibration.info.update(about(text, sample))
    count, length = sum(len(w) for w in windows), windows[0].shape[1]
    if count < sample.windows or length < sample.length:
        say(
            f"{text.name} is short: it gives {counted(count, 'window')} of {length:,} tokens, not {sample.windows} of"
            f" {sample.length:,}"
        )
    return found
