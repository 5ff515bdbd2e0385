"""Calibrations of schemes that need one, for every command: on which text, on how much of it, and where they are kept.

    QUICK          4 windows of 512 tokens       the demo: seconds
    USUAL          32 windows of 512 tokens      eval, check, lm-eval, where what is kept of the model saw their texts
    thorough()     128 of 256, 16 of 1,024 for bases, or 16 of 2,048 for codebooks, which see a gradient per token
                                                 `kvbits calibrate`, whose files last

The text is never one that is evaluated on. `kvbits calibrate`, `check` and `eval` share what is kept of a model
(`calibrate.kept`) wherever their texts allow it (`kept_of`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate import Calibration, calibrate_all
from ..calibrate.sampling import Sample, about, windows_of
from ..errors import CalibrationError, SpecError, UnsupportedError
from ..geometry import max_context
from .texts import first_half_of_novel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ..calibrate.collect import Settings
    from ..spec import Scheme
    from .texts import Text


QUICK, USUAL = Sample(4, 512), Sample(32, 512)


def require_other_text(given: Sequence[Calibration], tests: tuple[Text, ...]) -> None:
    """Refuse calibrations of a text that is evaluated on.

    Raises:
        SpecError: naming both.
    """
    for one in given:
        if same := seen_of(one, tests):
            raise SpecError(
                f"--calibration {one.path} was made on {same[0]!r}, which is evaluated on: its scales would flatter the"
                " scheme; give another --text, or omit --calibration: the scheme is then calibrated on another part of"
                " the novel"
            )


def seen_of(calibration: Calibration, tests: tuple[Text, ...]) -> list[str]:
    """Names of those texts that a calibration saw: itself, a text that it is a part of, or a part of it."""
    seen = {calibration.info.get("text_sha256"), *calibration.info.get("mixed_sha256", ())}
    wholes = calibration.info.get("part_of_sha256", ())
    return [t.name for t in tests if {t.sha256, t.whole or t.sha256} & seen or t.sha256 in wholes]


def beside(texts: tuple[Text, ...], given: Sequence[Calibration], lacking: bool) -> tuple[Text, ...]:
    """Return the texts to evaluate on, the novel's first half for the novel where its second is calibrated on.

    Args:
        given: calibrations that are used.
        lacking: a scheme needs a calibration beside these.
    """
    halved = tuple(map(first_half_of_novel, texts))
    saw_the_end = any(seen_of(one, texts) and not seen_of(one, halved) for one in given)
    return halved if lacking or saw_the_end else texts


def unshared(schemes: Sequence[Scheme], tests: tuple[Text, ...]) -> str | None:
    """Explain why the calibration that is kept of a model, or would be made and kept, does not serve.

    Args:
        schemes: that need a calibration.
        tests: the texts evaluated on.

    Returns:
        A clause, or None where it serves.
    """
    from ..calibrate import kept

    if other := [s.name for s in schemes if not s.needs_basis_alone]:
        return f"only calibrations of bases are kept by model, and {', '.join(other)} has more"
    parts = kept.source().parts
    if seen := [t.name for t in tests if t.sha256 in {sha for p in parts for sha in (p.sha256, p.whole)}]:
        return f"the calibration that is kept of a model is made on texts with {' and '.join(seen)}, evaluated on here"
    return None


def kept_of(model: Any, schemes: Sequence[Scheme], tests: tuple[Text, ...]) -> tuple[Calibration | None, str | None]:
    """Return the calibration that is kept of a loaded model, made where none is, if its texts allow it.

    Args:
        schemes: that need a calibration.
        tests: the texts evaluated on.

    Returns:
        The calibration and None; or None and the reason why this command needs one of its own.

    Raises:
        CalibrationError: none is kept, and the model's tokenizer is not found.
    """
    from ..calibrate import kept

    if (why := unshared(schemes, tests)) is not None:
        return None, why
    found = kept.of_model(model, schemes[0])
    if seen := seen_of(found, tests):
        return None, f"the calibration kept in {found.path} saw {' and '.join(seen)}, evaluated on here"
    return found, None


def origin(kept: Calibration) -> str:
    """Say which texts a kept calibration saw, and where it lies."""
    where = "no disk keeps it" if kept.path is None else f"kept in {kept.path}"
    return f"calibrated on {kept.info.get('text')}; {where}"


def fitting(given: Sequence[Calibration], config: Any, scheme: Scheme) -> Calibration | None:
    """The calibration that serves this model and scheme, or None."""
    return next((one.fitted(config, scheme) for one in given if one.fits(config, scheme)), None)


class Calibrator:
    """Calibrates the schemes that need it, each once.

    Args:
        text: the calibration text; None refuses schemes that need one.
        tests: the texts evaluated on.
        sample: how much of the text is looked at.
        directory: where files are kept and used again if they fit; None keeps calibrations in memory.
        given: calibrations that were made before, taken for the schemes that they fit.

    Raises:
        SpecError: the calibration text, or that of a given calibration, is one of the texts evaluated on.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: Text | None,
        *,
        tests: tuple[Text, ...] = (),
        sample: Sample = USUAL,
        directory: Path | None = None,
        given: Sequence[Calibration] = (),
    ) -> None:
        require_other_text(given, tests)
        self.given = tuple(given)
        if text is not None and (
            same := [t.name for t in tests if t.sha256 in {p.sha256 for p in (text, *text.parts)}]
        ):
            raise SpecError(
                f"--calibration-text is {same[0]!r}, which is evaluated on: its scales would flatter the scheme; give"
                " another text"
            )
        self.model, self.tokenizer, self.text, self.sample, self.directory = model, tokenizer, text, sample, directory
        self._made: dict[Scheme, Calibration] = {}

    def windows(self, schemes: Sequence[Scheme], *, seed: int = 0) -> list[torch.Tensor]:
        """int64 [windows of a batch, tokens] each: what `schemes` are calibrated on; fewer or shorter where the text is
        short.

        Raises:
            DataError: windows longer than the model's positions.
            UnsupportedError: there is no text.
        """
        if self.text is None:
            raise UnsupportedError(
                f"scheme {schemes[0].name!r} needs calibration; give --calibration-text FILE or novel, never a text you"
                " evaluate on"
            )
        self.sample.require_positions(max_context(self.model.config))
        return windows_of(
            self.tokenizer,
            self.text,
            self.sample,
            seed=seed,
            batch_size=1 if any("codebook" in s.calibrates for s in schemes) else 4,
        )

    def measure(
        self,
        schemes: Sequence[Scheme],
        windows: Sequence[torch.Tensor],
        settings: Settings | None = None,
        *,
        resume: str | os.PathLike[str] | None = None,
    ) -> list[Calibration]:
        """Make one calibration per scheme, all in one pass over `windows`.

        `resume` is as `calibrate.calibrate` takes it.
        """
        assert self.text is not None
        found = calibrate_all(self.model, windows, schemes, settings, resume=resume, progress=True)
        for calibration in found:
            calibration.info.update(about(self.text, self.sample))
        return found

    def prepare(self, schemes: Sequence[Scheme]) -> None:
        """Calibrate those of `schemes` that need it and are not kept yet, all in one pass over the text."""
        missing = [s for s in schemes if s.needs_calibration and self._kept(s) is None]
        if not missing:
            return
        windows = self.windows(missing)
        if self.directory is None:
            self._made |= dict(zip(missing, self.measure(missing, windows), strict=True))
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / f"{hashlib.sha256(repr(missing).encode()).hexdigest()[:8]}.partial"
        for scheme, found in zip(missing, self.measure(missing, windows, resume=partial), strict=True):
            found.save(self._path(self.directory, scheme))

    def __call__(self, scheme: Scheme) -> Calibration:
        """The calibration of a scheme, made if need be."""
        self.prepare([scheme])
        found = self._kept(scheme)
        if found is None:
            assert self.directory is not None
            raise CalibrationError(
                f"{self._path(self.directory, scheme)} was replaced by one of another text meanwhile; give every run a"
                " folder of its own"
            )
        return found

    @staticmethod
    def _path(directory: Path, scheme: Scheme) -> Path:
        return directory / f"{scheme.name}.safetensors"

    def _kept(self, scheme: Scheme) -> Calibration | None:
        """What was made before: given, made here, or by an earlier run of this text for this model and scheme."""
        if (own := fitting(self.given, self.model.config, scheme)) is not None:
            return own
        if self.directory is None or self.text is None:
            return self._made.get(scheme)
        path = self._path(self.directory, scheme)
        if not path.exists():
            return None
        found, wanted = Calibration.load(path), about(self.text, self.sample)
        if {k: found.info.get(k) for k in wanted} != wanted:
            return None
        return found.fitted(self.model.config, scheme)
