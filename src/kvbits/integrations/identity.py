"""The identity of a loaded model: a name that changes with anything that makes other keys of the same tokens."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import secrets
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .placement import require_loaded

HARMLESS = frozenset(
    (
        *("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype"),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "tie_word_embeddings"),
        *("initializer_range", "initializer_factor", "gradient_checkpointing", "router_aux_loss_coef"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "kernel_config"),
        *("distributed_config", "tp_plan", "tp_size", "pp_plan", "max_length", "do_sample", "temperature", "top_k"),
        *("top_p", "num_beams", "repetition_penalty"),
    )
)
"""Fields of a configuration that leave keys as they are: names, versions, labels, ids of special tokens, what a pass
returns, training, sampling, the plan of a split, and which implementation computes the same attention. The dtype is
that of each tensor. Every other field counts, in nested configurations too."""
STATE = frozenset(
    (
        *("training", "layer_idx", "name_or_path", "warnings_issued", "gradient_checkpointing", "loss_type"),
        *("all_tied_weights_keys", "kernel_config", "hf_device_map", "kvbits_source", "kvbits_weights", "rope_deltas"),
        *("is_gradient_checkpointing", "is_parallelizable", "model_parallel", "peft_config", "base_model_tp_plan"),
        *("in_features", "out_features", "quantization_method", "is_quantized", "torchscript", "loss_function"),
    )
)
"""Attributes of modules that are not part of what a model computes: places, training, shapes that tensors have, and
what the last pass left."""
TRUSTED = ("kvbits.", "accelerate.", "transformers.", "peft.", "torch.")
"""Packages whose hooks and replaced methods do not change keys beyond what tensors and settings say."""
SPREAD = ("kvbits.", "transformers.distributed.", "transformers.integrations.tensor_parallel.")
"""Code that replaces a module's `forward` by one that computes the same, on several ranks."""
OF_ADAPTERS = frozenset(("active_adapter", "merged_adapters", "fan_in_fan_out", "adapter_layer_names"))
SMALL = 1 << 20
"""Bytes up to which a tensor is always read whole."""
STRIDE = 127
"""Words of 4 bytes from one to the next that are read again of a larger tensor that says it is unchanged."""
_OF_MODULES = frozenset((*vars(nn.Module()), "_hf_hook", "_old_forward", "_kvbits_hooks", "_attention_before_kvbits"))
_WIDTH = 2048
_PROCESS = secrets.token_hex(16)
_OWN_WORK: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class _Read(NamedTuple):
    """A tensor as it was when read: where, its version and samples, and its sum."""

    stamp: tuple[Any, ...]
    sample: int
    total: int


_READ: WeakKeyDictionary[nn.Module, dict[str, _Read]] = WeakKeyDictionary()


def identity(model: Any, made_for: str | None = None) -> str:
    """Return the SHA-256, in hex, of everything that determines a model's keys and values of given tokens.

    Models of equal identity make interchangeable pages. Stores, saved caches, fitted schemes and calibrations name
    their model so.

    The identity covers:

    - every number of every tensor: parameters, buffers (also those that no checkpoint holds), packed and quantized
      tensors, tensors in plain attributes; with dtype, shape and name;
    - adapters of PEFT and of Transformers: which are active, merged or disabled, and their scales. An adapter that is
      loaded but neither active nor merged does not count, and a model with all adapters disabled is its base model;
    - every field of the configuration but `HARMLESS`, and every number, text and flag in a module's public attributes
      but `STATE`, and in the private ones of modules of your own;
    - autocast that surrounds the call, and training mode where there is dropout;
    - that somebody else's forward hook, replaced `forward` or attention function is there. Without `made_for` such a
      model equals only itself in this process, with that very hook and with the numbers and tensors that the hook holds
      in its closure, its arguments, its object or as globals, but not in lists.

    The identity cannot cover what a hook or replaced method computes, numbers inside objects that a module or hook
    holds, the code of Transformers and of the model, and kernels that compute the same in another order. Name such
    things by `made_for`. What changes around one pass (adapters by `adapter_names`, autocast, a hook) is looked for
    when the pass begins (`Owner.watch`).

    The first call reads all weights once. Later calls read tensors above `SMALL` bytes whole only where their place,
    their version (which torch counts for every edit in place but those through `.data`) or one of every `STRIDE` words
    changed. Smaller tensors are always read whole.

    Weights spread over ranks by tensor parallelism give the identity of the whole model. Each parameter is gathered,
    one after the other, so all ranks must ask. Only name, shape and dtype count of tensors on `meta`.

    Args:
        model: a loaded model of Transformers, or a PEFT model around one.
        made_for: names what the identity cannot cover, such as a steering vector and its strength.

    Raises:
        DataError: the model is not a loaded model.
    """
    require_loaded(model)
    facts: list[str] = [f"made_for {made_for!r}"]
    tensors: dict[str, torch.Tensor] = {}
    everywhere = nn.modules.module
    for hooks in (everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks):
        _add_hook_kind("every module", hooks, facts, tensors, made_for is None)
    _add_attention(model.config, facts, made_for is None)
    _visit(model, "", facts, tensors, made_for is None, set())
    facts.append(f"config {json.dumps(_config(model.config), sort_keys=True, default=str)}")
    device = next((t.device.type for t in tensors.values() if t.device.type != "meta"), "cpu")
    if torch.is_autocast_enabled(device):
        facts.append(f"autocast {torch.get_autocast_dtype(device)}")
    with torch.no_grad():
        sums = _sums(tensors, _READ.setdefault(model, {}))
    digest = hashlib.sha256("\n".join(sorted(facts)).encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)} {sums.get(name)}\n".encode())
    return digest.hexdigest()


class Owner:
    """The model that fills a cache. Every pass is compared with it, and it is asked again when the cache is written.

    Attributes:
        made_for: as in `identity`.
        strayed: a pass filled the cache that was not that of the named model: of another one, or of this one with
            other adapters, hooks or weights.
    """

    def __init__(self, model: Any, made_for: str | None, strayed: bool = False) -> None:
        self._model, self.made_for, self.strayed = None if model is None else weakref.ref(model), made_for, strayed
        self._known: WeakKeyDictionary[Any, dict[bool, Any]] = WeakKeyDictionary()
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()
        if model is not None:
            self._parts.update(m for m in model.modules() if m is model or hasattr(m, "config"))
            self._known[model] = {whole: _glance(model, whole) for whole in (False, True)}

    def __deepcopy__(self, memo: Any) -> Owner:
        return Owner(self._model and self._model(), self.made_for, self.strayed)

    def __reduce__(self) -> tuple[Any, ...]:
        return Owner, (None, self.made_for, self.strayed)

    def watch(self, module: Any, name: str | None, whole: bool = True) -> bool:
        """Return whether a module that begins a pass is, or is a part of, the model of this identity, as it was.

        This compares settings, adapters, hooks and the versions of weights. Only where they differ it computes the
        identity.

        Args:
            name: the identity that the cache names.
            whole: look at every module and weight, not at the first adapter alone.
        """
        model = self._model and self._model()
        root = model if model is not None and module in self._parts else module
        now, known = _glance(root, whole), self._known.setdefault(root, {})
        if known.get(whole) == now:
            return True
        if identity(root, self.made_for) != name:
            return False
        known[whole] = now
        if model is None:
            self._model = weakref.ref(root)
        return True

    def now(self) -> str | None:
        """Return the identity of the model as it is, or None where the model is gone."""
        model = None if self._model is None else self._model()
        return None if model is None else identity(model, self.made_for)

    def changed(self, name: str | None) -> bool:
        """Return whether the model is there and has another identity than the one that the cache names."""
        model = self._model and self._model()
        return model is not None and not self.watch(model, name)


def _glance(model: Any, whole: bool) -> tuple[Any, ...]:
    """Return values that change with a model: equal while nobody changed it."""
    modules = model.modules() if whole or hasattr(model, "peft_config") else ()
    adapted = (m for m in modules if hasattr(m, "adapter_layer_names"))
    device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if not whole:
        return model.training, cast, next(map(_setting, adapted), None)
    found = []
    for m in modules:
        setting = _setting(m) if hasattr(m, "adapter_layer_names") else None
        hooks = [k for kind in (m._forward_pre_hooks, m._forward_hooks) for k in kind]
        found.append((m.training, id(vars(m).get("forward")), tuple(hooks), setting))
    return model.training, cast, tuple(found), [p._version for p in model.parameters() if not p.is_inference()]


def _setting(layer: Any) -> tuple[Any, ...]:
    """Return the settings that a layer of PEFT computes with at the moment."""
    scales = getattr(layer, "scaling", None)
    return (
        str(layer.active_adapters),
        layer.disable_adapters,
        tuple(vars(layer).get("merged_adapters", ())),
        repr(dict(scales)) if isinstance(scales, dict) else None,
        tuple(layer._forward_pre_hooks),
    )


# -- what there is ------------------------------------------------------------------------------------------------


def _visit(
    module: nn.Module,
    path: str,
    facts: list[str],
    tensors: dict[str, torch.Tensor],
    private: bool,
    seen: set[int],
    keys: list[str] | None = None,
) -> None:
    """Collect settings and tensors of a module and those in it.

    Args:
        path: its name, without wrappers.
        private: give hooks that nobody named a name of this process.
        keys: adapters that count, of a container that has an entry for each.
    """
    if id(module) in seen:
        facts.append(f"{path} again")
        return
    seen.add(id(module))
    inner = _unwrapped(module)
    if inner is not None:
        _add_hooks(module, path, facts, tensors, private)
        if inner is not module._modules.get("_orig_mod"):
            _add_forward(module, path, facts, private)
        _visit(inner, path, facts, tensors, private, seen)
        return
    own = vars(module)
    adapters = _adapters(module)
    counted = None if adapters is None else adapters[1]
    base = _base_layer(module) if adapters is not None else None
    if base is not None:
        _visit(base, path, facts, tensors, private, seen)
    if base is None or counted:
        facts.append(f"{path} is {type(module).__module__}.{type(module).__qualname__}")
    _add_hooks(module, path, facts, tensors, private)
    _add_forward(module, path, facts, private)
    if adapters is not None and own.get("_disable_adapters") and own.get("merged_adapters"):
        facts.append(f"{path} unmerges {own['merged_adapters']}")
    if base is not None and not counted:
        return
    drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    trusted = f"{type(module).__module__}.".startswith(TRUSTED)
    for name, value in own.items():
        if name.startswith("_") and (trusted or name in _OF_MODULES or "cache" in name):
            continue
        if name in STATE or name.endswith(("max_seq_len_cached", "long_inv_freq")):
            continue
        if adapters is not None and name in OF_ADAPTERS:
            continue
        if adapters is not None and _is_of_each(value, adapters[0]):
            value = [value[a] for a in adapters[1] if a in value]
        drops = drops or ("drop" in name and isinstance(value, float) and value > 0)
        if _is_plain(value):
            facts.append(f"{path}.{name} = {_text(value)}")
        elif callable(value) and not isinstance(value, nn.Module):
            if name != "forward" and not _is_trusted(value, ("kvbits.",)):
                facts.append(f"{path}.{name} calls {_name(value, private)}")
        else:
            for where, t in _tensors_in(value):
                _add_tensor(f"{path}.{name}{where}", t, tensors, facts)
    if drops and module.training:
        facts.append(f"{path} drops")
    hidden: Any = getattr(module, "_weight_bias", None)  # of torch's quantized modules
    if hidden is not None:
        for where, t in _tensors_in(hidden()):
            _add_tensor(f"{path}{where}", t, tensors, facts)
    turning = _turns_by_length(module)
    held: dict[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
    for name, part in held.items():
        if part is None or (turning and name.endswith("inv_freq") and not name.endswith("original_inv_freq")):
            continue
        if keys is not None:
            if name not in keys:
                continue
            name = str(keys.index(name))
        _add_tensor(f"{path}.{name}", _loaded(module, name, part), tensors, facts)
    for name, child in module._modules.items():
        if child is None or child is base:
            continue
        inside = None
        if keys is not None:
            if name not in keys:
                continue
            name = str(keys.index(name))
        if adapters is not None and _is_of_each(child, adapters[0]):
            inside = adapters[1]
        _visit(child, f"{path}.{name}", facts, tensors, private, seen, inside)


def _unwrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper computes with alone: of `torch.compile`, and PEFT's around a model."""
    if (inner := module._modules.get("_orig_mod")) is not None:
        return inner
    of_peft = type(module).__module__.startswith("peft.")
    if of_peft and hasattr(module, "get_base_model") and not getattr(module, "_is_prompt_learning", False):
        tuner = module._modules.get("base_model")
        return None if tuner is None else tuner._modules.get("model", tuner)
    return None


def _base_layer(module: nn.Module) -> nn.Module | None:
    """Return the module that an adapter's layer adapts, or None."""
    for name in ("base_layer", "original_module"):
        if (found := module._modules.get(name)) is not None:
            return found
    return None


def _adapters(module: Any) -> tuple[set[str], list[str]] | None:
    """Return all adapters of a layer, and those that its next pass computes with, in order; None of other modules."""
    if not type(module).__module__.startswith("peft.") or not hasattr(module, "adapter_layer_names"):
        return None
    there: set[str] = set()
    for name in module.adapter_layer_names:
        found = functools.reduce(lambda m, part: getattr(m, part, None), name.split("."), module)
        there |= set(found.keys()) if hasattr(found, "keys") else set()
    active = module.active_adapters
    active = [active] if isinstance(active, str) else list(active or ())
    idle = module.disable_adapters or vars(module).get("merged_adapters")
    return there | set(active), [] if idle else [a for a in active if a in there]


def _is_of_each(value: Any, adapters: set[str]) -> bool:
    """Return whether a container has entries by the names of adapters."""
    return hasattr(value, "keys") and bool(adapters) and len(value.keys()) > 0 and set(value.keys()) <= adapters


def _turns_by_length(module: nn.Module) -> bool:
    """Return whether a rotary embedding replaces its frequencies by the length of a pass."""
    kinds = getattr(module, "rope_type", None)
    found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(found & {"dynamic", "longrope"}) and any(
        "original_inv_freq" in n for n in vars(module) | module._buffers
    )


def _loaded(module: nn.Module, name: str, t: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or where accelerate keeps it for a module that has it on `meta` between passes."""
    if t.is_meta and (hook := vars(module).get("_hf_hook")) is not None:
        for one in getattr(hook, "hooks", (hook,)):
            weights = getattr(one, "weights_map", None)
            if weights is not None:
                try:
                    return weights[name]
                except KeyError:
                    continue
    return t


def _add_tensor(name: str, t: torch.Tensor, tensors: dict[str, torch.Tensor], facts: list[str]) -> None:
    """Add the plain tensors that a tensor is made of."""
    if hasattr(t, "full_tensor"):
        t = t.full_tensor()
    if type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer) and hasattr(t, "__tensor_flatten__"):
        parts, how = t.__tensor_flatten__()
        facts.append(f"{name} is {type(t).__qualname__} {how}")
        for part in parts:
            _add_tensor(f"{name}.{part}", getattr(t, part), tensors, facts)
        return
    for key, value in vars(t).items():  # what goes with packed weights
        if not key.startswith("_"):
            if _is_plain(value):
                facts.append(f"{name}.{key} = {_text(value)}")
            for where, part in _tensors_in(value, objects=True):
                _add_tensor(f"{name}.{key}{where}", part, tensors, facts)
    if type(t) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        facts.append(f"{name} is {type(t).__qualname__}")
        t = torch.Tensor.as_subclass(t, torch.Tensor)
    if t.is_quantized:
        facts.append(f"{name} {t.qscheme()}")
        per_channel = t.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        if per_channel:
            tensors[f"{name}.scales"], tensors[f"{name}.zeros"] = (
                t.q_per_channel_scales(),
                t.q_per_channel_zero_points(),
            )
        else:
            facts.append(f"{name} {t.q_scale()} {t.q_zero_point()}")
        t = t.int_repr()
    tensors[name] = t.detach() if t.requires_grad else t


def _tensors_in(value: Any, objects: bool = False, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in lists, tuples and dicts, and what is in which place; `objects` looks into attributes
    as well.
    """
    if isinstance(value, torch.Tensor):
        yield "", value
        return
    if isinstance(value, nn.Module) or not depth:
        return
    inside: Any
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif objects and hasattr(value, "__dict__"):
        inside = vars(value).items()
    else:
        return
    for key, one in inside:
        for where, t in _tensors_in(one, objects, depth - 1):
            yield f".{key}{where}", t


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.Size))


def _text(value: Any) -> str:
    return repr(sorted(value, key=repr)) if isinstance(value, (set, frozenset)) else repr(value)


def _config(config: Any) -> Any:
    """Return fields that count, nested configurations included."""
    data = config.to_dict() if hasattr(config, "to_dict") else vars(config)

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): kept(v) for k, v in value.items() if k not in HARMLESS}
        if isinstance(value, (list, tuple)):
            return [kept(v) for v in value]
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value

    return kept(data)


def _add_hooks(module: nn.Module, path: str, facts: list[str], tensors: dict[str, torch.Tensor], private: bool) -> None:
    """Add forward hooks of a module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        _add_hook_kind(path, hooks, facts, tensors, private)


def _add_hook_kind(path: str, hooks: Any, facts: list[str], tensors: dict[str, torch.Tensor], private: bool) -> None:
    """Add hooks of others than `TRUSTED`, and what those of PEFT are given (`adapter_names`)."""
    for key, hook in hooks.items():
        if not _is_trusted(hook):
            facts.append(f"{path} has {_plain_name(hook)}{f' {_PROCESS} {key}' if private else ''}")
            if private:
                _add_held(f"{path} {key}", hook, facts, tensors)
        elif isinstance(hook, functools.partial) and _is_trusted(hook, ("peft.",)) and _is_plain(hook.keywords):
            facts.append(f"{path} has {_plain_name(hook)} {_text(hook.keywords)}")


def _add_held(path: str, function: Any, facts: list[str], tensors: dict[str, torch.Tensor]) -> None:
    """Add numbers, texts and tensors that a function finds in its arguments, closure, object or module, and numbers and
    texts in dicts there. What lists hold is left out: hooks record in them.
    """
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held |= {f"argument {i}": x for i, x in enumerate(function.args)} | function.keywords
        function = function.func
    held |= vars(getattr(function, "__self__", function)) if hasattr(function, "__dict__") else {}
    f = getattr(function, "__func__", function)
    f = f if hasattr(f, "__code__") else type(f).__call__
    if (code := getattr(f, "__code__", None)) is not None:
        held |= {name: f.__globals__[name] for name in code.co_names if name in f.__globals__}
        held |= {"defaults": f.__defaults__}
        for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                held[name] = cell.cell_contents
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            _add_tensor(f"{path} holds {name}", value, tensors, facts)
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            if not isinstance(one, (list, dict, set)) and _is_plain(one):
                facts.append(f"{path} holds {name} {key} = {_text(one)}")


def _add_attention(config: Any, facts: list[str], private: bool) -> None:
    """Add the attention function of a model where it is somebody else's."""
    if (function := own_attention(config)) is not None:
        facts.append(f"attention is {_name(function, private)}")


def _add_forward(module: nn.Module, path: str, facts: list[str], private: bool) -> None:
    """Add a replaced `forward`."""
    own = vars(module)
    found = own.get("_old_forward" if "_hf_hook" in own else "forward")
    usual = type(module).forward
    if found is not None and _plain_name(found) != _plain_name(usual) and not _is_trusted(found, SPREAD):
        facts.append(f"{path} runs {_name(found, private)}")
    if not _is_trusted(usual) and usual.__module__ != type(module).__module__:
        facts.append(f"{path} runs {_name(usual, private)}")


def own_attention(config: Any) -> Any:
    """Return the attention function that a model looks up, where it is of neither Transformers nor kvbits, or None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = ALL_ATTENTION_FUNCTIONS.get(str(getattr(text, "_attn_implementation", None)))
    inner = found
    while hasattr(inner, "func"):
        inner = inner.func
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return None if inner is None or f"{module}.".startswith(("transformers.", "kvbits.", "torch.")) else found


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _plain_name(function: Any) -> str:
    f = _innermost(function)
    named = f if hasattr(f, "__qualname__") else type(f)
    return f"{named.__module__}.{named.__qualname__}"


def _is_trusted(function: Any, packages: tuple[str, ...] = TRUSTED) -> bool:
    f = _innermost(function)
    return f"{(f if hasattr(f, '__qualname__') else type(f)).__module__}.".startswith(packages)


def _name(function: Any, private: bool) -> str:
    """Return a function's name; one of this process, if nothing else tells it from others."""
    if not private or _is_trusted(function):
        return _plain_name(function)
    f = _innermost(function)
    return f"{_plain_name(f)} {_PROCESS} {_OWN_WORK.setdefault(f, secrets.token_hex(8))}"


# -- every number -------------------------------------------------------------------------------------------------


def _sums(tensors: dict[str, torch.Tensor], read: dict[str, _Read]) -> dict[str, int]:
    """Return a sum over all bits of each tensor, by name, weighted by position; of what is on `meta`, none.

    Args:
        read: what was found before, which is brought up to date.
    """
    words = {name: _words(t) for name, t in tensors.items() if not t.is_meta and t.numel()}
    stamps = {
        name: (t.data_ptr(), _version(t), t.dtype, tuple(t.shape)) for name, t in tensors.items() if name in words
    }
    large = {name: w for name, w in words.items() if w.numel() * w.element_size() > SMALL}
    samples = _collected({name: _sum(w[::STRIDE]) for name, w in large.items()})
    known = {
        name: read[name].total
        for name in large
        if name in read and (read[name].stamp, read[name].sample) == (stamps[name], samples[name])
    }
    totals = known | _collected({name: _sum(w) for name, w in words.items() if name not in known})
    read.clear()
    read.update({name: _Read(stamps[name], samples[name], totals[name]) for name in large})
    return totals


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _words(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, one after the other, as int32, or as uint8 where they do not fill words."""
    flat = t.contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    elif flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    nbytes = flat.numel() * flat.element_size()
    if nbytes % 4:
        return flat.view(torch.uint8)
    return (flat.clone() if flat.storage_offset() * flat.element_size() % 4 else flat).view(torch.int32)


def _collected(sums: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return sums as numbers, with one wait for each device."""
    found: dict[str, int] = {}
    for device in sorted({s.device for s in sums.values()}, key=str):
        names = [name for name, s in sums.items() if s.device == device]
        found |= dict(zip(names, torch.stack([sums[n] for n in names]).tolist(), strict=True))
    return found


def _sum(words: torch.Tensor) -> torch.Tensor:
    """Return words times odd 64-bit numbers of their positions, added up modulo 2**64: int64, on their device.

    Blocks fit a CPU's cache, and a GPU takes few.
    """
    rows, rest = divmod(len(words), _WIDTH)
    across = _weights(_WIDTH, words.device)
    parts = []
    if rows:
        block = 64 if words.device.type == "cpu" else 1 << 14
        parts = [(b * across).sum(1) for b in words[: rows * _WIDTH].unflatten(0, (rows, _WIDTH)).split(block)]
    if rest:
        parts.append((words[rows * _WIDTH :] * across[:rest]).sum()[None])
    down = torch.cat(parts)
    return (down * _weights(len(down) + 1, words.device)[1:]).sum()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random numbers, int64 [count]: the beginning of one sequence."""
    return _all_weights(1 << max(12, (count - 1).bit_length()), device)[:count]


@functools.lru_cache(maxsize=64)
def _all_weights(count: int, device: torch.device) -> torch.Tensor:
    """Return SplitMix64 of 1 to `count`, made odd."""
    import numpy as np

    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
