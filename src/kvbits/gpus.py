"""Properties that GPUs really have, by name: "80 GB" on a card is not a size but a name. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import SpecError
from .units import GIB, human_bytes, parse_bytes

MIB = 2**20

CARDS: dict[str, tuple[int, int]] = {
    "L4": (24, 22_563),
    "A10": (24, 22_515),
    "A10G": (24, 22_515),
    "RTX 3090": (24, 24_124),
    "RTX 4090": (24, 24_081),
    "RTX 5090": (32, 32_102),
    "A100-40GB": (40, 40_377),
    "A40": (48, 45_416),
    "L40": (48, 45_416),
    "L40S": (48, 45_416),
    "RTX A6000": (48, 48_539),
    "RTX 6000 Ada": (48, 48_539),
    "A100-80GB": (80, 81_038),
    "A100": (80, 81_038),
    "H100": (80, 81_080),
    "H800": (80, 81_080),
    "H100 NVL": (94, 95_232),
    "GH200": (96, 96_768),
    "RTX PRO 6000": (96, 97_249),
    "H20": (96, 97_285),
    "H200": (141, 143_156),
    "B200": (180, 182_630),
}
"""Cards by name -> (GB in its name, MiB that torch reports for it: `torch.cuda.get_device_properties(0).total_memory`).

H200: this project's own runs. The others: what programs printed in public logs ("CUDA:0 (NVIDIA L4, 22563MiB)", "GPU 0
has a total capacity of 79.15 GiB"), the least of several drivers, with ECC where the card has it; drivers differ by
about 0.3 %. A100, H100, GH200 without a size: 80, 80, 96 GB.
"""

CAPABILITIES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("A100-40GB", "A100-80GB", "A100"), (8, 0)),
    **dict.fromkeys(("A10", "A10G", "RTX 3090", "A40", "RTX A6000"), (8, 6)),
    **dict.fromkeys(("L4", "RTX 4090", "L40", "L40S", "RTX 6000 Ada"), (8, 9)),
    **dict.fromkeys(("H100", "H800", "H100 NVL", "GH200", "H20", "H200"), (9, 0)),
    "B200": (10, 0),
    **dict.fromkeys(("RTX 5090", "RTX PRO 6000"), (12, 0)),
}
"""Cards by name -> compute capability, for which kernels are compiled."""

ALIASES = {"GH200480GB": "GH200", "H200NVL": "H200"}
"""Other names of cards as their drivers print them: GH200's is followed by the memory of its CPU."""

SIZES = {size: min((n for n in CARDS if CARDS[n][0] == size), key=lambda n: CARDS[n][1]) for size, _ in CARDS.values()}
"""GB in a name -> the card that has least of those with that name: what fits it fits them all."""
_PLAIN = re.compile(r"([0-9]+)\s*[Gg](?:B|(?<=g)b)")


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU.

    Attributes:
        nbytes: what it has.
        said: which was taken, in words; None where the number says all.
    """

    nbytes: int
    said: str | None = None


def gpu_memory(text: str) -> Memory:
    """Return the memory of a card by its name ("H100", "rtx 4090", "NVIDIA A100-SXM4-80GB"), of the cards that are
    called by a size ("80GB"), or as said ("75GiB").

    Raises:
        SpecError: neither a card that is known nor bytes with their unit.
    """
    if (name := _named(text)) is not None:
        return Memory(CARDS[name][1] * MIB, f"{name}: {_size(name)}, as torch reports it")
    plain = _PLAIN.fullmatch(text.strip())
    if plain is not None and (size := int(plain[1])) in SIZES:
        name = SIZES[size]
        others = [n for n in CARDS if CARDS[n] != CARDS[name] and CARDS[n][0] == size]
        more = f" Name one of the others to count with it: {', '.join(others)}." if others else ""
        exact = f"For exact bytes, write {size * 1000}MB ({size} x 10**9) or {size}GiB ({size} x 2**30)"
        return Memory(
            CARDS[name][1] * MIB,
            f"{size}GB is taken as the smallest card of that size, {name}, with the {_size(name)} that torch reports."
            f"{more} {exact}",
        )
    try:
        return Memory(parse_bytes(text, "--gpu-memory"))
    except SpecError as e:
        raise SpecError(f"{e}; or name a card: {', '.join(CARDS)}") from None


def capability(text: str) -> tuple[int, int] | None:
    """Return the compute capability of a card by its name, as `gpu_memory` takes it; None for other texts."""
    name = _named(text)
    return None if name is None else CAPABILITIES[name]


def _size(name: str) -> str:
    nbytes = CARDS[name][1] * MIB
    return f"{human_bytes(nbytes)} ({nbytes / GIB:.2f} GiB)"


def _named(text: str) -> str | None:
    """Return the card that a text names, the longest name first: makers' prefixes and buses ("SXM4", "PCIe", "HBM3")
    say nothing.
    """
    words = re.sub(r"[^A-Z0-9]+", " ", text.upper())
    words = re.sub(
        r"\b(NVIDIA|GEFORCE|TESLA|SXM\d?|PCIE|HBM\w*|BLACKWELL|GENERATION|SERVER|WORKSTATION|EDITION)\b", "", words
    )
    plain = re.sub(r"(?<= [0-9]{2})G$", "GB", words.strip()).replace(" ", "")
    plain = ALIASES.get(plain, plain)
    if not plain:
        return None
    for name in CARDS:
        key = re.sub(r"[^A-Z0-9]+", "", name.upper())
        if plain in (key, f"RTX{key}", f"{key}{CARDS[name][0]}GB") or f"RTX{plain}" == key:
            return name
    return None
