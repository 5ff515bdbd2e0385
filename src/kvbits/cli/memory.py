"""Memory for a cache, and the model that it is planned for: shared by `kvbits plan` and `kvbits fit`, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import KvbitsError, SpecError, UnsupportedError
from ..settings import setting
from .output import tell

if TYPE_CHECKING:
    from ..model_ref import ModelRef
    from ..planner import Cards


@dataclass(frozen=True)
class Room:
    """Memory for a cache.

    Attributes:
        cards: GPUs, or a machine, that hold weights too.
        nbytes: for the cache alone, where there are no cards.
        weights_from: where the bytes of the weights were found.
        memory_from: which memory was taken for that of a GPU, where its name was given.
        in_ram: it is a machine's RAM and no GPU's.
    """

    cards: Cards | None = None
    nbytes: int | None = None
    weights_from: str | None = None
    memory_from: str | None = None
    in_ram: bool = False


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Options that say how much memory there is."""

    gpu_memory: str | None = setting(
        None, "Memory of each GPU for weights, activations and cache: a card like H100 or 80GB, or bytes like 75GiB."
    )
    gpus: int = setting(1, "GPUs that share the model by tensor parallelism; needs --gpu-memory.", least=1, most=1024)
    weights: str | None = setting(None, "Size of the whole model's weights, like 16GB; read from MODEL if not given.")
    reserve: str | None = setting(
        None, "Memory of each GPU for everything else: activations, CUDA, graphs.", shown="12 %"
    )
    memory: str | None = setting(
        None, "Memory for the cache alone, like 24GB (10**9) or 24GiB (2**30); instead of a GPU."
    )
    ram: str | None = None

    def room(self, model: ModelRef) -> Room:
        """Return the memory that is there.

        Raises:
            SpecError: options that exclude each other, or that say nothing without others.
        """
        from ..gpus import gpu_memory
        from ..units import parse_bytes

        several = self.gpus if self.gpus > 1 else None
        if self.ram is not None:
            given = {"--gpu-memory": self.gpu_memory, "--memory": self.memory, "--gpus": several}
            if also := [name for name, value in given.items() if value is not None]:
                raise SpecError(f"--ram is a machine without a GPU, {also[0]} is not; give one of them")
            memory_bytes = parse_bytes(self.ram, "--ram")
            weights_bytes, found = self.weights_bytes(model)
            return Room(self._cards(memory_bytes, weights_bytes), weights_from=found, in_ram=True)
        if self.gpu_memory is None:
            others = {"--gpus": several, "--weights": self.weights, "--reserve": self.reserve}
            if unused := [name for name, value in others.items() if value is not None]:
                raise SpecError(
                    f"{', '.join(unused)} means nothing without --gpu-memory, the memory of each GPU, like --gpu-memory"
                    " 80GB, or without --ram"
                )
            return Room(nbytes=None if self.memory is None else parse_bytes(self.memory, "--memory"))
        if self.memory is not None:
            raise SpecError(
                "--memory is for the cache alone, --gpu-memory holds weights and activations too; give one of them"
            )
        memory = gpu_memory(self.gpu_memory)
        weights_bytes, found = self.weights_bytes(model)
        self._reserve(memory.nbytes)  # what is no reserve is no matter of GB or GiB
        try:
            cards = self._cards(memory.nbytes, weights_bytes)
        except SpecError as e:
            raise SpecError(f"{e}{self._in_gib(memory.nbytes, weights_bytes)}") from e
        return Room(cards, weights_from=found, memory_from=memory.said)

    def weights_bytes(self, model: ModelRef) -> tuple[int, str]:
        """Return the bytes of the weights, as given or of the model, and where they were found.

        Raises:
            SpecError: neither.
        """
        from ..units import parse_bytes

        if self.weights is not None:
            return parse_bytes(self.weights, "--weights"), "--weights"
        if model.config is None:
            raise SpecError(
                "--gpu-memory, --ram and --html count the weights too, and --layers does not say how many bytes they"
                " take; give --weights, like --weights 16GB"
            )
        from ..weights import weights_bytes

        return weights_bytes(model, say=lambda text: tell(text))

    def _cards(self, memory_bytes: int, weights_bytes: int) -> Cards:
        from ..planner import Cards

        return Cards(
            memory_bytes=memory_bytes,
            weights_bytes=weights_bytes,
            count=self.gpus,
            reserve_bytes=self._reserve(memory_bytes),
        )

    def _in_gib(self, memory_bytes: int, weights_bytes: int) -> str:
        """Return what is left if GB were meant as GiB, where the first leave nothing."""
        from ..units import human_bytes, parse_bytes

        text = (self.gpu_memory or "").strip()
        other = text[:-2] + "GiB" if text.upper().endswith("GB") and text[0].isdigit() else None
        if other is None or (meant := parse_bytes(other)) <= memory_bytes:
            return ""
        try:
            left = self._cards(meant, weights_bytes).cache_bytes
        except SpecError:
            return f" ({other}, 2**30 bytes each, is too little too)"
        kept = f"{human_bytes(left)} of each GPU are left for a cache"
        return f"; if you mean {other} (2**30 bytes each), {kept}: write that"

    def _reserve(self, memory_bytes: int) -> int | None:
        """Return the bytes of "4GB", or of a share of the GPU like "10%"; None if nothing is given."""
        from ..units import parse_bytes

        if self.reserve is None:
            return None
        text = self.reserve.strip()
        if not text.endswith("%"):
            return parse_bytes(self.reserve, "--reserve")
        try:
            share = float(text[:-1])
        except ValueError:
            share = -1.0
        if not 0 <= share < 100:
            raise SpecError(f"--reserve {self.reserve!r} is not a share of a GPU; write 0% to 99%, or bytes like 8GB")
        return int(memory_bytes * share / 100)


def stated(model: str) -> ModelRef:
    """Refer to a model whose cache is planned.

    Raises:
        SpecError: no configuration is there, or its fields do not fit its family.
        UnsupportedError: a cache of kvbits cannot hold what the model keeps.
    """
    from .. import gguf_header
    from ..geometry import find_model, is_gguf
    from ..integrations.refusals import refuses
    from ..model_ref import ModelRef

    path = find_model(model, look_up=False)
    if is_gguf(path) and gguf_header.stated(path) is None:
        tell(f"reading {model}: a GGUF file is read with Transformers, which takes seconds")
    ref = ModelRef.stated(model)
    named = getattr(ref.config, "described", None)
    try:
        if (own := refuses(ref.config)) is not None:
            raise UnsupportedError(
                f"KVCache.for_model refuses {named or model}, which {own}; a plan would count another cache than the"
                " model has"
            )
        _ = ref.planned, ref.state_bytes, ref.query_heads, ref.max_context
    except KvbitsError:
        raise
    except (AttributeError, TypeError, ValueError, ArithmeticError) as e:
        raise SpecError(
            f"the fields of the configuration of {model!r} do not fit {named or 'its family'} ({type(e).__name__}:"
            f" {e}); correct the file"
        ) from e
    return ref
