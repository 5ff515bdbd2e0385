"""`kvbits warm`: compile GPU kernels before the first call needs them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import RECOMMENDED
from ..errors import SpecError, UnsupportedError, counted, unknown
from .common import Json, command, names_of, print_json
from .output import write
from .subject import Subject, subject_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ..ops.cuda.engine.runtime.compile import Source


@command()
def warm(
    model: Annotated[str, typer.Argument(help="Directory, config.json, GGUF file or hub id: its configuration.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="Presets or files, comma-separated; of vLLM its dtypes.", show_default=RECOMMENDED),
    ] = None,
    engine: Annotated[str, typer.Option(help="What serves the cache: transformers, or vllm.")] = "transformers",
    arch: Annotated[
        str | None,
        typer.Option(
            help="GPUs to compile for, comma-separated, like sm_80,H100; needs none of them.",
            show_default="the GPUs here",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype that the model runs in: bf16 or fp16.")] = "bf16",
    as_json: Json = False,
) -> None:
    """Compile what a model and a scheme need on a GPU, so that no first call waits for it: into $KVBITS_CACHE, else the
    user's cache folder.

    Build an image with `ENV KVBITS_CACHE=/opt/kvbits` and `RUN kvbits warm MODEL --scheme klt4 --arch sm_90`: that
    machine needs no GPU and no weights. The folder may be read-only later. Other NVRTC or kvbits versions compile anew.
    """
    from .. import planner
    from ..progress import bar

    if engine not in planner.ENGINES:
        raise SpecError(unknown("--engine", engine, planner.ENGINES))
    subject = subject_of(model)
    names = names_of("--scheme", scheme or RECOMMENDED)
    import torch

    from ..ops.cuda import ahead
    from ..ops.cuda.engine.runtime import kept
    from ..units import dtype_name, human_bytes

    if (numbers := {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype_name(dtype))) is None:
        raise SpecError(unknown("--dtype", dtype, ["bf16", "fp16"]))
    rows: list[dict[str, Any]] = []
    for capability in _capabilities(arch):
        name, began = f"sm_{capability[0]}{capability[1]}", time.perf_counter()
        sources, made = ahead.distinct(_sources(subject, engine, names, numbers, capability)), []
        with bar(f"compiling for {name}", len(sources), enabled=not as_json) as advance:
            for binary in ahead.compiled(sources, capability):
                made.append(binary)
                advance(1)
        nbytes = sum(len(b.cubin) for b in made)
        rows.append(
            {
                "arch": name,
                "kernels": len(made),
                "compiled": sum(b.made for b in made),
                "nbytes": nbytes,
                "seconds": time.perf_counter() - began,
            }
        )
    if as_json:
        print_json({"model": model, "schemes": names, "engine": engine, "folder": str(kept.folder()), "rows": rows})
        return
    for r in rows:
        how = f"{r['compiled']} compiled now, {r['kernels'] - r['compiled']} found, in {r['seconds']:.1f} s"
        write(f"{r['arch']}: {counted(r['kernels'], 'kernel')}, {human_bytes(r['nbytes'])} in {kept.folder()}: {how}")


def _capabilities(arch: str | None) -> list[tuple[int, int]]:
    """Of the names in --arch, or of the GPUs here.

    Raises:
        SpecError: no such GPU can be, or there is none.
    """
    import torch

    from ..gpus import capability as of_card

    if arch is None:
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        if not found:
            raise SpecError(
                "torch sees no GPU here; name those to compile for, like --arch sm_90 (H100), sm_80 (A100) or sm_89"
                " (L4)"
            )
        return sorted(found)
    capabilities = []
    for name in names_of("--arch", arch):
        match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)", name)
        capability = (int(match[1]), int(match[2])) if match else of_card(name) or (0, 0)
        if capability < (8, 0):
            raise SpecError(
                f"--arch {name!r} is not a GPU that kernels run on; write sm_80 (the least), sm_86, sm_89, sm_90,"
                " sm_100 or sm_120, or a card like H100"
            )
        capabilities.append(capability)
    return capabilities


def _sources(
    subject: Subject, engine: str, names: list[str], dtype: torch.dtype, capability: tuple[int, int]
) -> Iterator[Source]:
    """What a model launches in schemes.

    Raises:
        UnsupportedError: the configuration does not say how many query heads there are.
    """
    from .. import planner, schemes
    from ..geometry import text_config
    from ..integrations.engine.place import cuda as place
    from ..ops.cuda import ahead
    from ..spec import CacheSpec, LayerGeometry

    if subject.query_heads is None:
        raise UnsupportedError(
            "the configuration has no num_attention_heads, which kernels depend on; let the first call compile"
        )
    heads, softcap = subject.query_heads, bool(getattr(text_config(subject.config), "attn_logit_softcapping", None))
    layers = tuple(g for g in subject.layers if isinstance(g, LayerGeometry))
    raw_dtype = str(dtype).removeprefix("torch.")
    if engine == "vllm":
        yield place.source()
        for one in planner.served(names):
            for layout in dict.fromkeys(planner.vllm_layouts(one, subject.layers, raw_dtype)):
                yield from ahead.of_vllm(layout, heads, dtype, softcap, capability)
        return
    for chosen in schemes.expand(names):
        spec = CacheSpec(layers=layers, scheme=schemes.for_layers(chosen, layers), raw_dtype=raw_dtype)
        for group in spec.groups:
            yield from ahead.of_group(group, heads, dtype, softcap, capability)
