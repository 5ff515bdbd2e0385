"""`kvbits demo`: one text, one model, the caches side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import Json, Threads, app, names_of, print_json, require_model, set_threads, show


@app.command()
def demo(
    model: Annotated[str | None, typer.Option(help="Local directory, GGUF file or hub id; the embedded SmolLM2 if not given.", show_default=False)] = None,
    scheme: Annotated[
        str, typer.Option("--schemes", "--scheme", help="Schemes, comma-separated: presets, or files of your own (.json).")
    ] = "raw,int8_centered,kivi4,kivi2",
    context: Annotated[int, typer.Option(help="Tokens of text before the measured ones.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens scored, and tokens generated.")] = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """One text through the 16-bit cache and through each scheme: bytes, perplexity, KL divergence, agreement, speed."""
    if model is not None:
        require_model(model)
    from .. import schemes

    chosen = schemes.expand(names_of("--schemes", scheme))  # refuses unknown ones before the model loads
    from ..evaluate import demo as demonstration

    set_threads(threads)
    result = demonstration.run(model=model, schemes=chosen, context=context, new_tokens=new_tokens, progress=True)
    if as_json:
        print_json(result)
    else:
        show(demonstration.table(result))
