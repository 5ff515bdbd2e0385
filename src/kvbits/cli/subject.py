"""What memory is planned for: a model, or numbers; and the GPUs that hold it. Shared by `kvbits plan` and `kvbits fit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from .common import read_config

if TYPE_CHECKING:
    from ..planner import Cards
    from ..spec import LayerGeometry


@dataclass
class Subject:
    """What is planned for: a model, or numbers.

    Attributes:
        longest: the model's own longest context.
        weights_from: where the bytes of its weights were found, once they were asked for.
    """

    layers: tuple[LayerGeometry, ...]
    model: str | None = None
    config: Any = None
    query_heads: int | None = None
    longest: int | None = None
    weights_from: str | None = None

    def cards(self, gpu_memory: str, gpus: int, weights: str | None, reserve: str | None) -> Cards:
        from ..planner import Cards
        from ..units import parse_bytes

        memory_bytes = parse_bytes(gpu_memory, "--gpu-memory")
        if weights is not None:
            nbytes, self.weights_from = parse_bytes(weights, "--weights"), "--weights"
        elif self.model is None:
            raise SpecError("--gpu-memory holds the weights too, and --layers does not say how many bytes they take; give --weights, like --weights 16GB")
        else:
            from ..weights import weights_bytes

            nbytes, self.weights_from = weights_bytes(self.model, self.config)
        return Cards(memory_bytes=memory_bytes, weights_bytes=nbytes, count=gpus, reserve_bytes=None if reserve is None else _reserve(reserve, memory_bytes))


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


def require_cards(gpu_memory: str | None, memory: str | None, others: dict[str, Any]) -> None:
    """Refuse memory that is given twice, and options that say nothing without --gpu-memory."""
    if gpu_memory is not None and memory is not None:
        raise SpecError("--memory is for the cache alone, --gpu-memory holds weights and activations too; give one of them")
    if gpu_memory is None and (unused := [name for name, value in others.items() if value is not None]):
        raise SpecError(f"{', '.join(unused)} means nothing without --gpu-memory, the memory of each GPU, like --gpu-memory 80GB")


def subject_of(model: str | None, layers: int | None, kv_heads: int | None, head_dim: int | None, sliding_window: int | None) -> Subject:
    """From either the model or the numbers."""
    from ..planner import uniform

    numbers = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    if model is not None:
        if clash := [k for k, v in (numbers | {"--sliding-window": sliding_window}).items() if v is not None]:
            raise SpecError(f"MODEL {model!r} already says what {', '.join(clash)} says; give one or the other")
        from ..geometry import layer_geometries, max_context, query_heads

        config = read_config(model)
        return Subject(layer_geometries(config), model, config, query_heads(config), max_context(config))
    if layers is None or kv_heads is None or head_dim is None:
        missing = [k for k, v in numbers.items() if v is None]
        raise SpecError(f"give MODEL, or --layers, --kv-heads and --head-dim (missing: {', '.join(missing)})")
    return Subject(uniform(layers, kv_heads, head_dim, sliding_window))
