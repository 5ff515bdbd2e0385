"""`kvbits demo`: one text, one model, the caches side by side."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..settings import setting
from .common import OfSchemes, OnThreads, command, print_json
from .output import show, tell


@dataclass(frozen=True, kw_only=True)
class Shown(OfSchemes, OnThreads):
    """Options of `kvbits demo`: what is shown."""

    model: str | None = setting(None, "Folder, GGUF file or hub id; the embedded SmolLM2 if not given.")
    context: int = setting(
        1024, "Tokens of text in the cache before decoding; 1k is 1,024. Fewer are faster.", tokens=1
    )
    new_tokens: int = setting(32, "Tokens to generate after the context, and to measure the speed on.", tokens=2)


@command()
def demo(options: Shown) -> None:
    """Compare each scheme with the 16-bit cache on one text: memory, accuracy, speed, and generated text.

    If you name no scheme, kvbits compares int8_centered (the recommended one), klt4 and klt2. For the last two, kvbits
    calibrates first, on a different part of the text.
    """
    from ..embedded import NAME
    from ..model_ref import ModelRef

    if options.model is None:
        # read when Transformers imports tqdm: its two bars of the GGUF file last seconds and say nothing
        os.environ.setdefault("TQDM_DISABLE", "1")
    ref = ModelRef(NAME) if options.model is None else ModelRef.find(options.model)
    from .. import runs, schemes

    # refuses unknown ones before the model loads
    chosen = schemes.expand(options.schemes or [schemes.RECOMMENDED, "klt4", "klt2"])
    from ..evaluate import demo as demonstration

    demonstration.require_context(options.context, options.new_tokens, lambda: ref.config)
    options.set_threads()
    result = demonstration.run(
        model=options.model,
        schemes=chosen,
        context=options.context,
        new_tokens=options.new_tokens,
        say=lambda text: tell(text),
    )
    if options.as_json:
        print_json(runs.of_one(result, "rows", "texts"))
    else:
        show(*demonstration.shown(result))
