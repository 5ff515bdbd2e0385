"""Calibrations of schemes that need one, for every command: on which text, on how much of it, and where they are kept.

    QUICK          4 windows of 576 tokens       the demo: seconds
    USUAL          32 windows of 576 tokens      eval, check, lm-eval, where what is kept of the model saw their texts
    thorough()     128 of 256, 16 of 1,024 for bases, or 16 of 2,048 for codebooks, which see a gradient per token
                                                 `kvbits calibrate`, whose files last

The text is never one that is evaluated on. `kvbits calibrate`, `check` and `eval` share what is kept of a model
(`calibrate.kept`) wherever their texts allow it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate import Calibration, kept
from ..calibrate.moments import BEGINNING
from ..calibrate.sampling import Sample, about, calibrated
from ..errors import CalibrationError, SpecError
from ..files import locked
from ..model_ref import ModelRef
from ..spec import FRAME
from .texts import Text, first_half_of_novel, novel_end

if TYPE_CHECKING:
    from ..spec import Scheme

_LENGTH = FRAME + BEGINNING
"""Tokens of a window: fewer do not show a basis every position of a frame."""
QUICK, USUAL = Sample(4, _LENGTH), Sample(32, _LENGTH)


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
    """Return names of those texts that a calibration saw: itself, a text that it is a part of, or a part of it."""
    seen = {calibration.info.get("text_sha256"), *calibration.info.get("mixed_sha256", ())}
    wholes = calibration.info.get("part_of_sha256", ())
    return [t.name for t in tests if {t.sha256, t.whole or t.sha256} & seen or t.sha256 in wholes]


def chosen_for(
    model: ModelRef,
    schemes: Sequence[Scheme],
    texts: tuple[Text, ...],
    given: Sequence[Calibration],
    text: Text | None,
    *,
    scored: bool = True,
    directory: Path | None = None,
    say: Callable[[str], None] = lambda note: None,
) -> tuple[tuple[Text, ...], list[Calibration]]:
    """Choose, before a model is loaded, the texts to evaluate on, and calibrations that are there.

    Where no calibration text is named, what is kept of the model serves the schemes that it fits, if it saw no text
    that is measured on; and where a scheme is to be calibrated, the novel stands for its first half.

    Args:
        schemes: that are measured.
        given: calibrations that were named.
        text: the calibration text that was named.
        scored: the texts themselves are measured on.
        directory: where an earlier run kept its own.
        say: told which kept calibration is taken.

    Raises:
        SpecError: a named calibration saw a text that is evaluated on.
    """
    lacking = [s for s in schemes if s.needs_calibration and fitting(given, model.config, s) is None]
    if text is None:
        halved = tuple(map(first_half_of_novel, texts))
        saw_the_end = any(seen_of(one, texts) and not seen_of(one, halved) for one in given)
        texts = halved if lacking or saw_the_end else texts
    tests = texts if scored else ()
    require_other_text(given, tests)
    own = set() if directory is None else {path.stem for path in directory.glob("*.safetensors")}
    shared = [] if text else [s for s in lacking if s.name not in own and unshared(s, tests) is None]
    found = kept.find(model, shared[0]) if shared else None
    if found is None or seen_of(found, tests):
        return texts, list(given)
    say(f"note: {', '.join(s.name for s in shared)}: {origin(found)}")
    return texts, [*given, found]


def unshared(scheme: Scheme, tests: tuple[Text, ...]) -> str | None:
    """Explain why the calibration that is kept of a model, or would be made and kept, does not serve.

    Args:
        scheme: needs a calibration.
        tests: the texts evaluated on.

    Returns:
        A clause, or None where it serves.
    """
    if not scheme.needs_basis_alone:
        return f"only calibrations of bases are kept by model, and {scheme.name} has more"
    parts = kept.source().parts
    if seen := [t.name for t in tests if t.sha256 in {sha for p in parts for sha in (p.sha256, p.whole)}]:
        return f"the calibration that is kept of a model is made on texts with {' and '.join(seen)}, evaluated on here"
    return None


def origin(kept: Calibration) -> str:
    """Return which texts a kept calibration saw, and where it lies."""
    where = "no disk keeps it" if kept.path is None else f"kept in {kept.path}"
    return f"calibrated on {kept.info.get('text')}; {where}"


def fitting(given: Sequence[Calibration], config: Any, scheme: Scheme) -> Calibration | None:
    """Return the calibration that serves this model and scheme, or None."""
    return next((one.fitted(config, scheme) for one in given if one.fits(config, scheme)), None)


class Calibrator:
    """Calibrator of the schemes that need it, each once.

    Args:
        text: the calibration text. None: what is kept of the model serves where its texts allow it, and is made where
            it is not there; for others the novel's end.
        tests: the texts evaluated on.
        sample: how much of the text is looked at.
        directory: where files are kept and used again if they fit; None keeps calibrations in memory.
        given: calibrations that were made before, taken for the schemes that they fit.
        say: told which calibration is taken where no text was named, and why.

    Attributes:
        given: with what was kept of the model, once `prepare` took it.

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
        say: Callable[[str], None] = lambda note: None,
    ) -> None:
        require_other_text(given, tests)
        self.ref, self.tokenizer, self.tests, self.say = ModelRef.of(model), tokenizer, tests, say
        self.named, self.text = text is not None, text or novel_end()
        self.given, self.sample, self.directory = tuple(given), sample, directory
        self._made: dict[Scheme, Calibration] = {}
        own = {p.sha256 for p in (self.text, *self.text.parts)}
        if self.named and (same := [t.name for t in tests if t.sha256 in own]):
            raise SpecError(
                f"--calibration-text is {same[0]!r}, which is evaluated on: its scales would flatter the scheme; give"
                " another text"
            )

    def prepare(self, schemes: Sequence[Scheme]) -> None:
        """Calibrate those of `schemes` that need it and are not kept yet, all in one pass over the text.

        Raises:
            CalibrationError: a calibration is to be kept of the model, and its tokenizer is not found.
        """
        missing = [s for s in schemes if s.needs_calibration and self._kept(s) is None]
        if not self.named:
            missing = [s for s in missing if not self._share(s)]
        if not missing:
            return
        if self.directory is None:
            self._made |= dict(zip(missing, self._measured(missing), strict=True))
            return
        waiting = f"another process calibrates into {self.directory}; waiting for it"
        with locked(self.directory, lambda: self.say(waiting)):
            if not (missing := [s for s in missing if self._kept(s) is None]):
                return
            partial = self.directory / f"{hashlib.sha256(repr(missing).encode()).hexdigest()[:8]}.partial"
            for scheme, found in zip(missing, self._measured(missing, partial), strict=True):
                found.save(self._path(self.directory, scheme))

    def _measured(self, schemes: list[Scheme], partial: Path | None = None) -> list[Calibration]:
        return calibrated(self.ref.loaded, self.tokenizer, self.text, self.sample, schemes, resume=partial)

    def _share(self, scheme: Scheme) -> bool:
        """Take what is kept of the model for a scheme, if its texts allow it."""
        if fitting(self.given, self.ref.config, scheme) is not None:
            return True
        if (why := unshared(scheme, self.tests)) is None:
            found = kept.of_model(self.ref, scheme)
            if not (seen := seen_of(found, self.tests)):
                self.given += (found,)
                self.say(f"note: {scheme.name}: {origin(found)}")
                return True
            why = f"the calibration kept in {found.path} saw {' and '.join(seen)}, evaluated on here"
        self.say(
            f"note: {scheme.name} is calibrated for this alone, on {self.text.name} (--calibration-text names another"
            f" text): {why}"
        )
        return False

    def __call__(self, scheme: Scheme) -> Calibration:
        """Return the calibration of a scheme, made if need be."""
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
        """Return the calibration of a scheme that exists already, or None. It was given, made here, or made by an
        earlier run of this text for this model and scheme.
        """
        if (own := fitting(self.given, self.ref.config, scheme)) is not None:
            return own
        if self.directory is None:
            return self._made.get(scheme)
        path = self._path(self.directory, scheme)
        if not path.exists():
            return None
        found, wanted = Calibration.load(path), about(self.text, self.sample)
        if {k: found.info.get(k) for k in wanted} != wanted:
            return None
        return found.fitted(self.ref.config, scheme)
