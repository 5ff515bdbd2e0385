"""The header of a GGUF file as fields of a config.json, without gguf, Transformers or torch.

    llama.block_count 30, llama.embedding_length 576, ..  --stated-->  {"num_hidden_layers": 30, "hidden_size": 576, ..}

Architectures of `FIELDS` are read as Transformers maps them; `geometry.load_config` reads the others.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
FIELDS = {
    "llama": _COMMON | {"rope.dimension_count": "head_dim"},
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"attention.key_length": "head_dim"},
}
"""Architecture -> key of the header -> field of a config.json."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 28
"""More bytes than any text or array of a header has."""


def stated(path: Path) -> dict[str, Any] | None:
    """Return the fields of a config.json, or None where the file is damaged or of another architecture."""
    try:
        with path.open("rb") as file:
            return _fields(file)
    except (OSError, struct.error, ValueError, KeyError, MemoryError):
        return None


def _fields(file: BinaryIO) -> dict[str, Any] | None:
    magic, version, tensors, count = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3) or max(tensors, count) > _MOST:
        return None
    header = {}
    for _ in range(count):
        key = _text(file)
        header[key] = _value(file, *struct.unpack("<I", file.read(4)))
    kind = header["general.architecture"]
    if kind not in FIELDS or "mistral" in str(header.get("general.name", "")).lower():
        return None
    found = {name: header[f"{kind}.{key}"] for key, name in FIELDS[kind].items() if f"{kind}.{key}" in header}
    if "vocab_size" not in found:
        found["vocab_size"] = header["tokenizer.ggml.tokens"]
    names = set()
    for _ in range(tensors):
        names.add(_text(file))
        (dims,) = struct.unpack("<I", file.read(4))
        file.seek(8 * dims + 12, 1)
    return found | {"model_type": kind, "tie_word_embeddings": "output.weight" not in names}


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", file.read(8))
    if size > _MOST:
        raise ValueError(size)
    return file.read(size).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """Return a number or a text; of an array its length."""
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        code = _NUMBERS[kind]
        return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]
    inner, count = struct.unpack("<IQ", file.read(12))
    if count > _MOST:
        raise ValueError(count)
    if inner in _NUMBERS:
        file.seek(count * struct.calcsize(f"<{_NUMBERS[inner]}"), 1)
        return count
    for _ in range(count):
        _value(file, inner)
    return count
