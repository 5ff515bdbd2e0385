"""What memory is planned for: a model, or numbers; and the GPUs that hold it.

Shared by `kvbits plan` and `kvbits fit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import KvbitsError, SpecError, UnsupportedError
from .output import tell

if TYPE_CHECKING:
    from ..geometry import PlainLayer
    from ..planner import Cards
    from ..spec import LayerGeometry


GpuMemory = Annotated[
    str | None,
    typer.Option(help="Each GPU: a card like H100 or 80GB, or bytes like 75GiB; for weights, activations and cache."),
]
Gpus = Annotated[
    int, typer.Option(help="GPUs that share the model by tensor parallelism, with --gpu-memory.", min=1, max=1024)
]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights of the whole model, like 16GB; from MODEL's files or configuration if not given."),
]
Reserve = Annotated[
    str | None,
    typer.Option(help="Memory of each GPU for everything else: activations, CUDA, graphs.", show_default="12 %"),
]
Memory = Annotated[
    str | None, typer.Option(help="Instead: memory for the cache alone, like 24GB (10**9) or 24GiB (2**30).")
]


Ram = Annotated[
    str | None,
    typer.Option(help="Instead: RAM of a machine that runs the model on its CPU, like 16GB; for weights and cache."),
]


@dataclass
class Subject:
    """What is planned for: a model, or numbers.

    Attributes:
        longest: the model's own longest context.
        weights_from: where the bytes of its weights were found; None until they are needed.
        memory_from: which memory was taken for that of a GPU, where its name was given.
        state_bytes: of the recurrent states of a sequence; None where its formula is not known.
        in_ram: its memory is a machine's RAM and no GPU's.
        refused: why pages of few bits cannot be made of it; `layers` then say what 16 bits hold.
    """

    layers: tuple[LayerGeometry | PlainLayer, ...]
    model: str | None = None
    config: Any = None
    query_heads: int | None = None
    longest: int | None = None
    weights_from: str | None = None
    memory_from: str | None = None
    refused: str | None = None
    state_bytes: int | None = 0
    in_ram: bool = False

    def room(
        self,
        gpu_memory: str | None,
        gpus: int,
        weights: str | None,
        reserve: str | None,
        memory: str | None,
        ram: str | None = None,
    ) -> tuple[Cards | None, int | None]:
        """(the GPUs, bytes for the cache alone), as far as they are given.

        Raises:
            SpecError: both, or options that say nothing without --gpu-memory.
        """
        from ..units import parse_bytes

        if ram is not None:
            given = {"--gpu-memory": gpu_memory, "--memory": memory, "--gpus": gpus if gpus > 1 else None}
            if also := [name for name, value in given.items() if value is not None]:
                raise SpecError(f"--ram is a machine without a GPU, {also[0]} is not; give one of them")
            self.in_ram = True
            memory_bytes = parse_bytes(ram, "--ram")
            return _cards(memory_bytes, self.weights_bytes(weights), 1, reserve), None
        if gpu_memory is not None:
            if memory is not None:
                raise SpecError(
                    "--memory is for the cache alone, --gpu-memory holds weights and activations too; give one of them"
                )
            return self._cards(gpu_memory, gpus, weights, reserve), None
        others = {"--gpus": gpus if gpus > 1 else None, "--weights": weights, "--reserve": reserve}
        if unused := [name for name, value in others.items() if value is not None]:
            raise SpecError(
                f"{', '.join(unused)} means nothing without --gpu-memory, the memory of each GPU, like --gpu-memory"
                " 80GB, or without --ram"
            )
        return None, None if memory is None else parse_bytes(memory, "--memory")

    def _cards(self, gpu_memory: str, gpus: int, weights: str | None, reserve: str | None) -> Cards:
        from ..gpus import gpu_memory as memory_of

        memory = memory_of(gpu_memory)
        self.memory_from = memory.said
        nbytes = self.weights_bytes(weights)
        if reserve is not None:
            _reserve(reserve, memory.nbytes)  # what is no reserve is no matter of GB or GiB
        try:
            return _cards(memory.nbytes, nbytes, gpus, reserve)
        except SpecError as e:
            raise SpecError(f"{e}{_in_gib(gpu_memory, memory.nbytes, nbytes, gpus, reserve)}") from e

    def weights_bytes(self, given: str | None) -> int:
        """Bytes of the weights, as given or of the model; `weights_from` says which.

        Raises:
            SpecError: neither.
        """
        from ..units import parse_bytes

        if given is not None:
            nbytes, self.weights_from = parse_bytes(given, "--weights"), "--weights"
        elif self.model is None:
            raise SpecError(
                "--gpu-memory, --ram and --html count the weights too, and --layers does not say how many bytes they"
                " take; give --weights, like --weights 16GB"
            )
        else:
            from ..weights import weights_bytes

            nbytes, self.weights_from = weights_bytes(self.model, self.config, say=lambda text: tell(text))
        return nbytes


def _cards(memory_bytes: int, weights_bytes: int, gpus: int, reserve: str | None) -> Cards:
    from ..planner import Cards

    reserve_bytes = None if reserve is None else _reserve(reserve, memory_bytes)
    return Cards(memory_bytes=memory_bytes, weights_bytes=weights_bytes, count=gpus, reserve_bytes=reserve_bytes)


def _in_gib(text: str, memory_bytes: int, weights_bytes: int, gpus: int, reserve: str | None) -> str:
    """What is left if GB were meant as GiB, where the first leave nothing."""
    from ..units import human_bytes, parse_bytes

    other = text.strip()[:-2] + "GiB" if text.strip().upper().endswith("GB") and text.strip()[0].isdigit() else None
    if other is None or (meant := parse_bytes(other)) <= memory_bytes:
        return ""
    try:
        left = _cards(meant, weights_bytes, gpus, reserve).cache_bytes
    except SpecError:
        return f" ({other}, 2**30 bytes each, is too little too)"
    return f"; if you mean {other} (2**30 bytes each), {human_bytes(left)} of each GPU are left for a cache: write that"


def _reserve(text: str, memory_bytes: int) -> int:
    """Bytes of "4GB", or of a share of the GPU like "10%"."""
    from ..units import parse_bytes

    if not text.strip().endswith("%"):
        return parse_bytes(text, "--reserve")
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise SpecError(f"--reserve {text!r} is no share of a GPU; write 0% to 99%, or bytes like 8GB")
    return int(memory_bytes * share / 100)


def subject_of(
    model: str | None,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    sliding_window: int | None = None,
    *,
    in_16_bits: bool = False,
) -> Subject:
    """From either the model or the numbers.

    Args:
        in_16_bits: a model that pages of few bits cannot be made of is planned in 16 bits, if its configuration says
            how; else it is an error.
    """
    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    if model is not None:
        if clash := [k for k, v in (numbers | {"--sliding-window": sliding_window}).items() if v is not None]:
            raise SpecError(f"MODEL {model!r} already says what {', '.join(clash)} says; give one or the other")
        return _of_model(model, in_16_bits)
    if layers is None or kv_heads is None or head_dim is None:
        missing = [k for k, v in numbers.items() if v is None]
        raise SpecError(f"give MODEL, or --layers, --kv-heads and --head-dim (missing: {', '.join(missing)})")
    from ..planner import uniform

    return Subject(uniform(layers, kv_heads, head_dim, sliding_window))


def _of_model(model: str, in_16_bits: bool) -> Subject:
    from .. import gguf_header
    from ..config_file import read_config
    from ..geometry import find_model, is_gguf

    path = find_model(model, look_up=False)
    if is_gguf(path) and gguf_header.stated(path) is None:
        tell(f"reading {model}: a GGUF file is read with Transformers, which takes seconds")
    config = read_config(model)
    try:
        return _subject(model, config, in_16_bits)
    except KvbitsError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError) as e:
        raise SpecError(
            f"the fields of the configuration of {model!r} do not fit {getattr(config, 'described', 'its family')}"
            f" ({type(e).__name__}: {e}); correct the file"
        ) from e


def _subject(model: str, config: Any, in_16_bits: bool) -> Subject:
    from ..geometry import layer_geometries, max_context, plain_layers, query_heads, state_bytes
    from ..integrations.refusals import refuses

    if (own := refuses(config)) is not None:
        raise UnsupportedError(
            f"KVCache.for_model refuses {config.described if hasattr(config, 'described') else model}, which {own}; a"
            " plan would count another cache than the model has"
        )
    refused = None
    found: tuple[LayerGeometry | PlainLayer, ...]
    try:
        found = layer_geometries(config)
    except UnsupportedError as e:
        if not in_16_bits:
            raise
        try:
            found, refused = plain_layers(config), str(e)
        except UnsupportedError:
            raise e from None
    states = 0 if refused else state_bytes(config)
    return Subject(found, model, config, query_heads(config), max_context(config), refused=refused, state_bytes=states)
