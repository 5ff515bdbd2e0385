"""`kvbits warm`: compile GPU kernels before the first call needs them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import RECOMMENDED
from ..errors import SpecError, UnsupportedError, counted, unknown
from ..settings import names_in, setting
from .common import Output, command, print_json
from .memory import stated
from .output import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ..model_ref import ModelRef
    from ..ops.cuda.engine.runtime.compile import Source


@dataclass(frozen=True, kw_only=True)
class Warmed(Output):
    """Options of `kvbits warm`: what is compiled."""

    model: str = setting(
        ..., "Folder, config.json, GGUF file or hub id. Only its configuration is read.", argument=True
    )
    scheme: tuple[str, ...] = setting(
        (RECOMMENDED,),
        "Presets or files, comma-separated; with --engine vllm its dtypes.",
        read=names_in,
        many=True,
        shown=RECOMMENDED,
    )
    engine: str = setting("transformers", "Engine that serves the cache: transformers or vllm.")
    arch: str | None = setting(
        None,
        "GPUs to compile for, comma-separated, like sm_80,H100. The machine needs no GPU.",
        shown="the GPUs here",
    )
    dtype: str = setting("bf16", "Dtype that the model runs in: bf16 or fp16.")


@command()
def warm(options: Warmed) -> None:
    """Compile ahead the kernels that a model and a scheme need on a GPU.

    kvbits keeps the kernels in $KVBITS_CACHE, or else in the user's cache folder, so the first call does not wait.

    Build an image with `ENV KVBITS_CACHE=/opt/kvbits` and `RUN kvbits warm MODEL --scheme klt4 --arch sm_90`. The
    building machine needs no GPU and no weights. The folder may be read-only later. Another version of NVRTC or kvbits
    compiles again.
    """
    from .. import planner
    from ..progress import bar

    if options.engine not in planner.ENGINES:
        raise SpecError(unknown("--engine", options.engine, planner.ENGINES))
    ref, names = stated(options.model), list(options.scheme)
    import torch

    from ..ops.cuda import ahead
    from ..ops.cuda.engine.runtime import kept
    from ..units import dtype_name, human_bytes

    if (numbers := {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype_name(options.dtype))) is None:
        raise SpecError(unknown("--dtype", options.dtype, ["bf16", "fp16"]))
    rows: list[dict[str, Any]] = []
    for capability in _capabilities(options.arch):
        name, began = f"sm_{capability[0]}{capability[1]}", time.perf_counter()
        sources, made = ahead.distinct(_sources(ref, options.engine, names, numbers, capability)), []
        with bar(f"compiling for {name}", len(sources), enabled=not options.as_json) as advance:
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
    if options.as_json:
        print_json(
            {
                "model": options.model,
                "schemes": names,
                "engine": options.engine,
                "folder": str(kept.folder()),
                "rows": rows,
            }
        )
        return
    for r in rows:
        how = f"{r['compiled']} compiled now, {r['kernels'] - r['compiled']} found, in {r['seconds']:.1f} s"
        write(f"{r['arch']}: {counted(r['kernels'], 'kernel')}, {human_bytes(r['nbytes'])} in {kept.folder()}: {how}")


def _capabilities(arch: str | None) -> list[tuple[int, int]]:
    """Return the compute capabilities of the names in --arch, or of the GPUs here.

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
    for name in names_in("--arch", arch):
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
    ref: ModelRef, engine: str, names: list[str], dtype: torch.dtype, capability: tuple[int, int]
) -> Iterator[Source]:
    """Yield the sources of the kernels that a model launches in schemes.

    Raises:
        UnsupportedError: the configuration does not say how many query heads there are.
    """
    from .. import planner, schemes
    from ..geometry import text_config
    from ..integrations.engine.place import cuda as place
    from ..ops.cuda import ahead
    from ..spec import CacheSpec

    if ref.query_heads is None:
        raise UnsupportedError(
            "the configuration has no num_attention_heads, which kernels depend on; let the first call compile"
        )
    heads, softcap = ref.query_heads, bool(getattr(text_config(ref.config), "attn_logit_softcapping", None))
    layers = ref.layers
    raw_dtype = str(dtype).removeprefix("torch.")
    if engine == "vllm":
        yield place.source()
        for one in planner.served(names):
            layouts, rings = planner.vllm_layouts(one, layers, raw_dtype), planner.vllm_rings(one, layers, raw_dtype)
            for layout, of in dict.fromkeys(zip(layouts, rings, strict=True)):
                yield from ahead.of_vllm(layout, [ring.layout for ring in of], heads, dtype, softcap, capability)
        return
    for chosen in schemes.expand(names):
        spec = CacheSpec(layers=layers, scheme=schemes.for_layers(chosen, layers), raw_dtype=raw_dtype)
        for group in spec.groups:
            yield from ahead.of_group(group, heads, dtype, softcap, capability)
