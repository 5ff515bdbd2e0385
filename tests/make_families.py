"""Writes src/kvbits/families.json: how the installed Transformers fills in a config.json, by its model_type.

python tests/make_families.py

A configuration class has defaults, other names for some fields, parts of other classes, and code that computes fields
from others (`__post_init__`, properties). Of that code the statements are kept that decide a field of
`config_file.FIELDS`: `_slice` follows each name to the statements that set it. `config_file` runs them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import inspect
import json
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbits import config_file
from kvbits.config_file import FIELDS, NAMED, read_config
from kvbits.errors import KvbitsError, SpecError, UnsupportedError
from kvbits.geometry import index_bytes, layer_geometries, max_context, query_heads, state_bytes
from kvbits.integrations.refusals import refuses
from kvbits.integrations.rotary import layers_of
from kvbits.weights import COUNTED, estimated

TARGET = Path(__file__).parents[1] / "src" / "kvbits" / "families.json"
WANTED = {*FIELDS, *NAMED, "per_layer_config", "num_layers"}
PROVIDED = {*dir(builtins), "self", "kwargs", "math", "remap_legacy_layer_types", "Sequence"}
"""Names that `config_file` gives to the code that it runs."""
FLAT = ("inspect.signature", ".config_class")
"""Marks of code that moves fields of a flat config.json into its text part."""


def model_types() -> list[str]:
    """Return every model_type that generates text, and those of the parts that do it."""
    named = [
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    ]
    found = dict.fromkeys(named)
    for name in named:
        config = made(name)
        while (text := None if config is None else _text(config)) is not None:
            found[text.model_type], config = None, text
    return sorted(t for t in found if t in CONFIG_MAPPING)


def made(model_type: str, **fields: Any) -> Any:
    """Return Transformers' configuration of these fields; None where its class refuses them."""
    try:
        return CONFIG_MAPPING[model_type](**fields)
    except Exception:  # each class has errors of its own
        return None


def _text(config: Any) -> Any:
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        return None
    return None if text is config or type(text) is type(config) else text


def _parts(cls: type, config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return (parts that lead to what generates text, their names from the outside in)."""
    text = None if config is None else _text(config)
    for key, spec in (getattr(cls, "sub_configs_defaults", None) or {}).items():
        part = getattr(config, key, None)
        if text is None or part is None:
            continue
        inner = [] if part is text else _inner(part, text)
        if inner is None:
            continue
        found: dict[str, Any] = {"type": spec.model_type}
        if not issubclass(spec.config_class, PreTrainedConfig):
            found["named"] = True
        if spec.optional:
            found["optional"] = True
        if plain := {k: v for k, v in spec.init_kwargs.items() if _is_data(v)}:
            found["init"] = plain
        return {key: found}, [key, *inner]
    return {}, []


def _inner(part: Any, text: Any) -> list[str] | None:
    for key in getattr(type(part), "sub_configs_defaults", None) or {}:
        if getattr(part, key, None) is text:
            return [key]
    return None


def _is_data(value: Any) -> bool:
    try:
        return json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def family(model_type: str) -> dict[str, Any]:
    """Return what `config_file` needs of one model_type."""
    cls, config = CONFIG_MAPPING[model_type], made(model_type)
    parts, path = _parts(cls, config)
    chain = [k for k in cls.__mro__ if "__post_init__" in vars(k) and k is not PreTrainedConfig and k is not object]
    chain = chain[: next((i for i, k in enumerate(chain) if issubclass(PreTrainedConfig, k)), len(chain))]
    alias = dict(cls.attribute_map or {})
    wanted = {"is_encoder_decoder", "tie_word_embeddings", *path} if parts else set(WANTED)
    wanted |= {alias[n] for n in wanted if n in alias}
    bodies, properties, setters, helpers = _slice(cls, chain, wanted)
    stated = {f.name: f for f in dataclasses.fields(cls)}
    defaults = {}
    for name in sorted({alias.get(n, n) for n in wanted}):
        if name in properties:
            continue
        named = [name, *(k for k, v in alias.items() if v == name)]
        if (field := next((stated[n] for n in named if n in stated), None)) is not None:
            value = field.default_factory() if callable(field.default_factory) else field.default
        else:
            value = inspect.getattr_static(cls, name, dataclasses.MISSING)
        value = list(value) if isinstance(value, tuple) else value
        if value is not dataclasses.MISSING and _is_data(value):
            defaults[name] = value
    found: dict[str, Any] = {"defaults": defaults}
    if kept := {k: v for k, v in alias.items() if k in wanted}:
        found["alias"] = kept
    if parts:
        found |= {"parts": parts, "text": path}
        if any(mark in inspect.getsource(vars(k)["__post_init__"]) for k in chain for mark in FLAT):
            found["flat"] = True
    if bodies:
        found["init"] = bodies
    if properties:
        found["properties"] = properties
    if setters:
        found["setters"] = setters
    if helpers:
        found["names"] = helpers
    if not parts:
        found |= _of_model(model_type, config)
    return found


def _of_model(model_type: str, config: Any) -> dict[str, str]:
    """Return why a family's keys cannot be turned back, and why it cannot attend over pages, as far as its code says."""
    found: dict[str, str] = {}
    try:
        layers_of(config)
    except UnsupportedError as error:
        for how in (
            "has no rotary embedding",
            "turns its keys in a way kvbits cannot see",
            "turns channels neither in",
        ):
            if how in str(error):
                found["unturned"] = how.replace("neither in", "neither in halves nor in neighbours")
    except Exception:  # what builds no model says nothing
        pass
    if config is not None and not hasattr(config, "rope_parameters"):
        found["unturned"] = "has no rotary embedding of Transformers' own form"
    module = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
    modeling = "".join(f.read_text() for f in module.glob("modeling_*.py"))
    if modeling and "ALL_ATTENTION_FUNCTIONS" not in modeling:
        found["unattached"] = "has attention of its own code, which is not looked up in Transformers' registry"
    return found


class _Tidy(ast.NodeTransformer):
    """Drops what only talks, and calls the next class by a name that is given."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        text = ast.unparse(node)
        if text.startswith(("logger.", "warnings.", "'", '"')):
            return None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else None

    def visit_Call(self, node: ast.Call) -> Any:
        if ast.unparse(node.func).endswith(".__post_init__"):
            return ast.copy_location(ast.Call(ast.Name("go_on", ast.Load()), [], node.keywords), node)
        return self.generic_visit(node)


def _names(node: ast.AST, *, stored: bool) -> set[str]:
    """Return the fields of `self`, keywords and locals that a statement reads, or sets."""
    found = set()
    looped = {
        m.id
        for n in ast.walk(node)
        if isinstance(n, ast.comprehension)
        for m in ast.walk(n.target)
        if isinstance(m, ast.Name)
    }
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self":
            if isinstance(n.ctx, ast.Store) is stored:
                found.add(n.attr)
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and stored and n.attr in WANTED:
            found |= {m.attr for m in ast.walk(n.value) if isinstance(m, ast.Attribute)}
        elif isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) is stored and n.id not in looped:
            found.add(n.id)
        elif isinstance(n, ast.Call):
            called, first = (
                ast.unparse(n.func),
                n.args[0].value if n.args and isinstance(n.args[0], ast.Constant) else "",
            )
            changes = called in ("kwargs.pop", "kwargs.setdefault")
            if called.startswith("kwargs.") and isinstance(first, str) and (changes or not stored):
                found.add(first)
            if (
                called in ("getattr", "hasattr")
                and not stored
                and len(n.args) > 1
                and isinstance(n.args[1], ast.Constant)
            ):
                found.add(str(n.args[1].value))
            if called == "setattr" and stored:
                found.add("*")
            if called.endswith((".append", ".extend", ".update", ".setdefault")) and stored:
                found |= {m.attr for m in ast.walk(n.func) if isinstance(m, ast.Attribute)}
        elif isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store | ast.Del) and stored:
            found |= {m.attr for m in ast.walk(n.value) if isinstance(m, ast.Attribute)}
            if ast.unparse(n.value) == "kwargs" and isinstance(n.slice, ast.Constant):
                found.add(str(n.slice.value))
            if isinstance(n.value, ast.Name):
                found.add(n.value.id)
    return found


def _kept(body: list[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Return the statements that set something wanted; adds what they read to it."""
    found = []
    for s in reversed(body):
        if any(mark in ast.unparse(s) for mark in FLAT):  # what a flat file has of its text part: "flat"
            continue
        if isinstance(s, ast.For) and "*" in _names(s, stored=True):
            named = {n.value for n in ast.walk(s) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            if named & wanted:
                wanted |= named | _names(s, stored=False)
                found.append(s)
            continue
        if isinstance(s, ast.If | ast.For):
            inner, other = _kept(s.body, wanted), _kept(s.orelse, wanted)
            if not inner and not other:
                continue
            wanted |= _names(s.test if isinstance(s, ast.If) else s.iter, stored=False)
            new = type(s)(**{**{k: getattr(s, k) for k in s._fields}, "body": inner or [ast.Pass()], "orelse": other})
            found.append(ast.copy_location(new, s))
        elif isinstance(s, ast.Raise) or "go_on(" in ast.unparse(s) or _names(s, stored=True) & wanted:
            if isinstance(s, ast.Raise):
                continue
            wanted |= _names(s, stored=False)
            found.append(s)
    return found[::-1]


def _code(function: Any) -> list[ast.stmt]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return ast.fix_missing_locations(_Tidy().visit(ast.Module(tree.body, []))).body


def _slice(
    cls: type, chain: list[type], wanted: set[str]
) -> tuple[list[str], dict[str, str], dict[str, str], dict[str, Any]]:
    """Return (bodies of `__post_init__`, most derived class first; of properties; of what sets these; other names that
    all of them use).
    """
    before = -1
    while before != len(wanted):
        before = len(wanted)
        bodies = [_kept(_code(vars(k)["__post_init__"]), wanted) for k in chain]
        properties = {
            name: _code(p.fget)
            for name in sorted(wanted)
            if isinstance(p := inspect.getattr_static(cls, name, None), property)
            and not p.fget.__module__.startswith(("transformers.configuration_utils", "transformers.integrations"))
        }
        setters = {
            name: [*ast.parse("value = kwargs['value']").body, *_code(p.fset)]
            for name in properties
            if (p := inspect.getattr_static(cls, name)).fset is not None
        }
        for body in (*properties.values(), *setters.values()):
            for s in body:
                wanted |= _names(s, stored=False)
    names: dict[str, Any] = {}
    for body, where in [*zip(bodies, chain, strict=True), *((b, cls) for b in properties.values())]:
        known = vars(sys.modules[where.__module__])
        for s in body:
            for n in ast.walk(s):
                if isinstance(n, ast.Attribute) and ast.unparse(n).startswith("self._") and n.attr in dir(cls):
                    helper = inspect.getattr_static(cls, n.attr)
                    if isinstance(helper, staticmethod | classmethod):
                        names[n.attr] = {"def": _function(n.attr, helper.__func__)}
                        names[n.attr] |= {"static": True} if isinstance(helper, staticmethod) else {}
                if not isinstance(n, ast.Name) or n.id in PROVIDED or n.id not in known:
                    continue
                if isinstance(made_of := known[n.id], type) and issubclass(made_of, PreTrainedConfig):
                    names[n.id] = {"type": made_of.model_type} | (
                        {}
                        if made_of.model_type in CONFIG_MAPPING and made_of is CONFIG_MAPPING[made_of.model_type]
                        else {
                            "defaults": {
                                f.name: f.default
                                for f in dataclasses.fields(made_of)
                                if f.name in (*FIELDS, "kv_n_heads") and _is_data(f.default)
                            }
                        }
                    )
                elif isinstance(made_of, dict):
                    names[n.id] = {"items": [[k, v] for k, v in made_of.items()]}
                elif _is_data(made_of):
                    names[n.id] = {"value": made_of}
    return (
        [_text_of(b) for b in bodies],
        {name: _text_of(b) for name, b in properties.items()},
        {name: _text_of(b) for name, b in setters.items()},
        names,
    )


def _text_of(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, []))) or "pass"


def _function(name: str, function: Any) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.decorator_list, tree.returns = [], None
    for a in tree.args.args:
        a.annotation = None
    tree.body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return ast.unparse(tree)


def count_parameters(config: Any) -> int:
    """Count the parameters of the model of a Transformers configuration, tied ones once; nothing is allocated.

    Raises:
        SpecError: Transformers generates no text with it, or cannot build it.
    """
    kind = str(getattr(config, "model_type", ""))
    seeing = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if kind not in (
        *seeing,
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        raise SpecError(f"Transformers generates no text with a {kind} model")
    build = transformers.AutoModelForImageTextToText if kind in seeing else transformers.AutoModelForCausalLM
    if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and getattr(config, "is_encoder_decoder", False):
        build = transformers.AutoModelForSeq2SeqLM
    try:
        with torch.device("meta"):
            model = build.from_config(config)
    except Exception as error:  # each model has errors of its own
        raise SpecError(f"Transformers builds no {kind} model: {error}") from error
    return sum(p.numel() for p in model.parameters())


def variants(model_type: str) -> list[dict[str, Any]]:
    """Return config.json files of a family: bare, as Transformers writes it, without types of layers, with other
    numbers of layers, heads and windows.
    """
    found: list[dict[str, Any]] = [{"model_type": model_type}]
    if (config := made(model_type)) is None:
        return found
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        stated = json.loads((Path(folder) / "config.json").read_text())
    computed = ("layer_types", "per_layer_config", "layers_block_type", "mlp_layer_types")
    bare = {k: v for k, v in stated.items() if k not in computed}
    found += [stated, bare]
    if isinstance(text := stated.get("text_config"), dict):
        plain = {k: v for k, v in text.items() if k not in computed}
        nameless = {k: v for k, v in plain.items() if k != "model_type"}
        return [*found, *(bare | {"text_config": t} for t in (plain, nameless, plain | {"num_hidden_layers": 8}))]
    if "num_hidden_layers" in stated:
        found += [bare | {"num_hidden_layers": n} for n in (8, 13)]
    found.append(
        {
            "model_type": model_type,
            **({"num_hidden_layers": 7} if model_type != "nemotron_h" else {}),
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
    if stated.get("sliding_window"):
        found += [bare | {"sliding_window": w} for w in (77, None)]
    for name in (
        "sliding_window_pattern",
        "full_attention_interval",
        "global_attn_every_n_layers",
        "attn_layer_period",
    ):
        found.append(bare | {name: 3})
    for name in ("num_kv_shared_layers", "num_key_value_heads", "head_dim", "kv_lora_rank"):
        if stated.get(name):
            found.append(bare | {name: None if name != "num_kv_shared_layers" else 2})
    return found


def differs(model_type: str, stated: dict[str, Any] | None = None) -> list[str]:
    """Return what this library and Transformers read differently, in any of `variants` or in one file."""
    found = []
    with TemporaryDirectory() as folder:
        for one in variants(model_type) if stated is None else [stated]:
            (Path(folder) / "config.json").write_text(json.dumps(one))
            try:
                theirs = facts(AutoConfig.from_pretrained(folder, trust_remote_code=False))
            except Exception:  # Transformers takes no such file
                continue
            try:
                ours = facts(read_config(folder))
            except KvbitsError as e:
                ours = f"{type(e).__name__}: {e}"
            if ours != theirs and not (isinstance(ours, str) and isinstance(theirs, str)):
                found.append(f"{one}: {ours} is {theirs} in Transformers")
    return found


def facts(config: Any) -> Any:
    """Return what a plan asks of a configuration, or why it is refused."""
    try:
        if (why := refuses(config)) is not None:
            raise UnsupportedError(why)
        return (
            layer_geometries(config),
            query_heads(config),
            max_context(config),
            state_bytes(config),
            index_bytes(config),
        )
    except (KvbitsError, ValueError) as e:
        return f"{type(e).__name__}: {e}"


def families() -> dict[str, Any]:
    """Return all that are read alike; prints the others."""
    found = {t: family(t) for t in model_types()}
    config_file._families = lambda: {"transformers": transformers.__version__, "families": found}  # type: ignore[assignment]
    alike = {}
    for t, f in found.items():
        if wrong := differs(t):
            print(f"left out: {t}: {wrong[0][:1500]}", file=sys.stderr)
            continue
        alike[t] = f
        with contextlib.suppress(SpecError, AttributeError):
            if t not in COUNTED and (mine := estimated(config_file.Fields({"model_type": t}))) is not None:
                f["scale"] = round(count_parameters(made(t)) / mine.total, 4)
    return {"transformers": transformers.__version__, "families": alike}


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
