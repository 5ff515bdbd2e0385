"""`kvbits demo`: one text, one model, the caches side by side."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .common import (
    Json,
    Schemes,
    Threads,
    command,
    names_of,
    print_json,
    read_config,
    require_model,
    set_threads,
    tokens,
)
from .output import show, tell


@command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Local directory, GGUF file or hub id; the embedded SmolLM2 if not given.", show_default=False
        ),
    ] = None,
    scheme: Schemes = None,
    context: Annotated[
        int,
        typer.Option(
            help="Tokens of text that the cache holds before; fewer are faster; 1k is 1,024.", parser=tokens()
        ),
    ] = 1024,
    new_tokens: Annotated[
        int,
        typer.Option(help="Tokens fed one by one behind them for the speed, and tokens generated.", parser=tokens(2)),
    ] = 32,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """One text through the 16-bit cache and through each scheme: memory as it grows, accuracy, speed, and two texts
    side by side.

    Schemes are int8_centered (the recommended one), klt4 and klt2 if none is named; the basis of the last two is
    calibrated first, on another part of the text.
    """
    if model is None:
        # read when Transformers imports tqdm: its two bars of the GGUF file last seconds and say nothing
        os.environ.setdefault("TQDM_DISABLE", "1")
    else:
        require_model(model)
    from .. import runs, schemes

    # refuses unknown ones before the model loads
    chosen = schemes.expand(names_of("--schemes", scheme or f"{schemes.RECOMMENDED},klt4,klt2"))
    from .. import embedded
    from ..evaluate import demo as demonstration
    from ..model_ref import ModelRef

    demonstration.require_context(context, new_tokens, lambda: read_config(ModelRef(model or embedded.NAME)))
    set_threads(threads)
    result = demonstration.run(
        model=model, schemes=chosen, context=context, new_tokens=new_tokens, say=lambda text: tell(text)
    )
    if as_json:
        print_json(runs.of_one(result, "rows", "texts"))
    else:
        show(*demonstration.shown(result))
