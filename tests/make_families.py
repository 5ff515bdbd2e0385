"""Writes src/kvbits/families.json: what a config.json leaves out, by its model_type, as the installed Transformers
fills it in.

python tests/make_families.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbits import config_file
from kvbits.config_file import FIELDS, NESTED, read_config
from kvbits.errors import KvbitsError
from kvbits.geometry import layer_geometries, max_context, query_heads, state_bytes

TARGET = Path(__file__).parents[1] / "src" / "kvbits" / "families.json"
LONGEST_PERIOD = 12


def model_types() -> list[str]:
    """Every model that generates text, and the text parts of those that also see or hear."""
    named = {
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    found = dict.fromkeys(named)
    for name in named:
        if (c := _made(name)) is not None and (text := _text(c)) is not None:
            found[text.model_type] = None
    return sorted(t for t in found if t in CONFIG_MAPPING)


def _made(model_type: str, **fields: Any) -> Any:
    try:
        return CONFIG_MAPPING[model_type](**fields)
    except Exception:  # what its own class refuses has no defaults
        return None


def _text(config: Any) -> Any:
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        return None
    return None if text is config else text


def family(model_type: str) -> dict[str, Any] | None:
    """Defaults of one model_type; None where its class makes no configuration without being told."""
    cls, config = CONFIG_MAPPING[model_type], _made(model_type)
    if config is None:
        return None
    alias = {k: v for k, v in (cls.attribute_map or {}).items() if k in FIELDS}
    stated = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    own = {k: stated.get(alias.get(k, k), stated.get(k)) for k in FIELDS}
    defaults = {k: v for k, v in own.items() if isinstance(v, int | float | str | bool)}
    for part in NESTED:
        if (heads := getattr(getattr(config, part, None), "kv_n_heads", None)) is not None:
            defaults[part] = {"kv_n_heads": heads}
    found: dict[str, Any] = {"defaults": defaults}
    if alias:
        found["alias"] = alias
    if (text := _text(config)) is not None and getattr(config, "text_config", None) is text:
        found["text"] = text.model_type
    if "num_hidden_layers" not in defaults and getattr(config, "layers_block_type", None):  # Nemotron-H counts its list
        defaults["num_hidden_layers"], found["types"] = len(config.layers_block_type), list(config.layers_block_type)
    elif (pattern := _pattern(model_type, config)) is not None:
        found |= pattern
    return found


def _pattern(model_type: str, config: Any) -> dict[str, Any] | None:
    """The types of layers that repeat, and that of the first or the last where it is always the same one, if a
    configuration has them and they depend on nothing else.
    """
    if not getattr(config, "layer_types", None):
        return None
    seen = [config.layer_types]
    for count in (23, 24, 25):
        other = _made(model_type, num_hidden_layers=count)
        seen += [other.layer_types] if other is not None else []
    ends = {name: {types[at] for types in seen} for name, at in (("first", 0), ("last", -1))}
    for fixed in ("", "last", "first"):
        if fixed and len(ends[fixed]) > 1:
            continue
        skip, stop = int(fixed == "first"), int(fixed == "last")
        for period in range(1, LONGEST_PERIOD + 1):
            repeats = {i % period: t for i, t in list(enumerate(max(seen, key=len)))[skip : skip + period]}
            if all(
                t == repeats[i % period] for types in seen for i, t in list(enumerate(types))[skip : len(types) - stop]
            ):
                return {"types": [repeats[i] for i in range(period)]} | ({fixed: ends[fixed].pop()} if fixed else {})
    return None


def variants(model_type: str) -> list[dict[str, Any]]:
    """config.json files of a family: bare, as Transformers writes it, without types of layers, with other numbers of
    layers, heads and windows.
    """
    found: list[dict[str, Any]] = [{"model_type": model_type}]
    config = _made(model_type)
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        stated = json.loads((Path(folder) / "config.json").read_text())
    bare = {k: v for k, v in stated.items() if k not in ("layer_types", "per_layer_config")}
    found += [stated, bare]
    if isinstance(text := stated.get("text_config"), dict):
        return [
            stated,
            bare | {"text_config": {k: v for k, v in text.items() if k not in ("layer_types", "per_layer_config")}},
        ]
    if "num_hidden_layers" in stated:
        found.append(bare | {"num_hidden_layers": 8})
    counted = {} if "layers_block_type" in stated and "num_hidden_layers" not in stated else {"num_hidden_layers": 7}
    found.append(
        {
            "model_type": model_type,
            **counted,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_size": 64,
            "head_dim": 32,
        }
    )
    if "use_sliding_window" in stated and "max_window_layers" in stated:
        found.append(
            {"model_type": model_type, "sliding_window": 77, "use_sliding_window": True, "max_window_layers": 3}
        )
    elif stated.get("sliding_window"):
        found += [bare | {"sliding_window": 77}]
    return found


def differs(model_type: str) -> list[str]:
    """What this library and Transformers read differently, in any of `variants`."""
    found = []
    with TemporaryDirectory() as folder:
        for stated in variants(model_type):
            (Path(folder) / "config.json").write_text(json.dumps(stated))
            try:
                theirs = _facts(AutoConfig.from_pretrained(folder, trust_remote_code=False))
            except Exception:  # no such model
                continue
            try:
                ours = _facts(read_config(folder))
            except KvbitsError as e:
                ours = str(e)
            # a state whose size is computed: not counted, and `plan` says so
            if isinstance(ours, tuple) and ours[-1] is None and isinstance(theirs, tuple):
                theirs = (*theirs[:-1], None)
            if ours != theirs and not (isinstance(ours, str) and isinstance(theirs, str)):
                found.append(f"{stated}: {ours} is {theirs} in Transformers")
    return found


def _facts(config: Any) -> Any:
    try:
        return layer_geometries(config), query_heads(config), max_context(config), state_bytes(config)
    except (KvbitsError, ValueError) as e:
        return str(e)


def families() -> dict[str, Any]:
    """All that are read alike."""
    found = {t: f for t in model_types() if (f := family(t)) is not None}
    config_file._families = lambda: {"transformers": transformers.__version__, "families": found}  # type: ignore[assignment]
    alike = {t: f for t, f in found.items() if not differs(t)}
    return {
        "transformers": transformers.__version__,
        "families": {t: f for t, f in alike.items() if f.get("text", t) in alike},
    }


if __name__ == "__main__":
    data = families()
    lines = [f"  {json.dumps(t)}: {json.dumps(f)}" for t, f in data["families"].items()]
    TARGET.write_text(
        '{\n "transformers": '
        + json.dumps(data["transformers"])
        + ',\n "families": {\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
