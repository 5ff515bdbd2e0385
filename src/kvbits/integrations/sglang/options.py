"""Checks of SGLang's options, the page size, and a calibration.

Options are refused, with the reason, before a model is loaded. `KVBITS_SGLANG` has kvbits' own options.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import Any

from ... import planner, schemes
from ...errors import UnsupportedError
from ...geometry import has_key_bias, layer_geometries, only_dense
from ...model_ref import ModelRef
from ...ops.cuda.ahead import MAX_QUERIES
from ..engine.automatic import AUTO, beside_weights, choose
from ..engine.calibrated import Model, model_at, read
from ..engine.call import RAW_DTYPES
from ..engine.options import Options
from ..engine.served import FORMATS, PAGE_SIZE, Format
from . import releases

logger = logging.getLogger(__name__)
NAMES = (*FORMATS, AUTO)
"""Every backend of ours. Resolved options have `AUTO` only until its format is chosen."""
_CHOICES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
REQUESTS = 4096
"""Requests that SGLang runs at once at most, where --max-running-requests is not said."""
HOST_LAYOUT = "layer_first"
"""SGLang's name for how pages lie in host memory, the only way."""
NOT_RUN = {
    "kv_cache_dtype": ("auto", "the format is the backend's name"),
    "disaggregation_mode": ("null", "transfers send keys and values apart"),
    "hicache_storage_backend": (None, "storage backends copy keys and values apart"),
    "enable_unified_cache_external_linker": (False, "storage backends copy keys and values apart"),
    "enable_lmcache": (False, "LMCache copies keys and values apart"),
    "enable_flexkv": (False, "FlexKV copies keys and values apart"),
    "enable_hisparse": (False, "it copies keys and values apart"),
    "enable_unified_memory": (False, "it lays keys and values out itself"),
    "enable_page_major_kv_layout": (False, "it lays keys and values out itself"),
    "prefill_only_disable_kv_cache": (False, "there is nothing to store"),
    "enable_memory_saver": (False, "pages are not released"),
    "enable_pdmux": (False, "a backend plans one batch at a time"),
    "enable_two_batch_overlap": (False, "a backend plans one batch at a time"),
    "enable_torch_compile": (False, "attention was not run in compiled graphs"),
    "dllm_algorithm": (None, "attention is causal"),
    "pp_size": (1, "ranks of layers were not run"),
    "dp_size": (1, "ranks of requests were not run"),
    "attn_dp_size": (1, "ranks of requests were not run"),
    "attn_cp_size": (1, "ranks of tokens were not run"),
    "dcp_size": (1, "ranks of tokens were not run"),
}
"""Option: its value where nobody asks for it, and why another is refused."""


def format_of(server_args: Any) -> Format | None:
    """Return the format that an engine stores, or None where it has another backend.

    Raises:
        UnsupportedError: another backend for prompts or for decoding.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    names = attention_backends_of(resolved_view(server_args))
    if not set(names) & set(FORMATS):
        return None
    if names[0] != names[1]:
        raise UnsupportedError(
            f"prompts by {names[0]} and decoding by {names[1]}, which do not read each other's pages; pass"
            " --attention-backend alone"
        )
    return FORMATS[names[0]]


def resolve(server_args: Any, previous: Any) -> None:
    """Wrap SGLang's step that makes its options fit the attention backend.

    Raises:
        UnsupportedError: options, a model or a release that does not fit a backend of ours.
    """
    asked = [name for name in _CHOICES if getattr(server_args, name) in NAMES]
    if not asked:
        return previous(server_args)
    if why := releases.CONTRACT.refuses():
        raise UnsupportedError(f"--{asked[0].replace('_', '-')} {getattr(server_args, asked[0])}: {why}")
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    view = resolved_view(server_args)
    if to_choose := [name for name in asked if getattr(view, name) == AUTO]:
        declare_resolution(server_args, "kvbits", **dict.fromkeys(to_choose, chosen(server_args)))
    previous(server_args)
    form = format_of(server_args)
    if form is None:
        return
    view = resolved_view(server_args)
    if why := refuses(form, view):
        raise UnsupportedError(why)
    check_model(form, model_config_of(server_args), view.tp_size)
    if view.cuda_graph_config.prefill.backend != Backend.DISABLED:
        if (Phase.PREFILL, "backend") in server_args._cuda_graph_config_locked:
            raise UnsupportedError(
                f"prompts in captured graphs ({view.cuda_graph_config.prefill.backend}): kvbits' are laid out on the"
                " host; leave it away"
            )
        graphs = with_phase(view.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, "kvbits", cuda_graph_config=graphs)
    if form.calibrated:  # made now, while this is the only process
        calibration_of(form, view)
    own: dict[str, Any] = {"page_size": PAGE_SIZE}
    if view.speculative_algorithm and view.speculative_num_draft_tokens is None:
        own["speculative_num_draft_tokens"] = MAX_QUERIES
    if view.enable_hierarchical_cache:
        own["hicache_mem_layout"] = HOST_LAYOUT
    declare_resolution(server_args, "kvbits", **own)
    options_of(form)  # refused here, before a model is loaded


def chosen(server_args: Any) -> str:
    """Return the format that this engine's context and number of requests need, said in the log.

    Raises:
        UnsupportedError: no format, no number of requests, or nobody says how much memory there is.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.utils.common import get_device_memory_capacity

    view, model = resolved_view(server_args), model_config_of(server_args)
    if view.max_running_requests is None:
        raise UnsupportedError(f"--attention-backend {AUTO} needs --max-running-requests; pass it, or a format")
    if (total := get_device_memory_capacity(view.device)) is None:  # MiB
        raise UnsupportedError(f"SGLang does not say how much memory {view.device} has; name a format")
    ref = model_of(view)
    layers = [dataclasses.replace(g, sliding_window=None) for g in ref.layers]  # one pool has all tokens of all layers
    found, why = choose(
        ref,
        planner.rank(layers, view.tp_size),
        memory_bytes=beside_weights(ref, int(total * 2**20), view.mem_fraction_static, view.tp_size),
        context=model.context_len,
        requests=view.max_running_requests,
        raw_dtype=RAW_DTYPES[model.dtype],
    )
    logger.info("%s: %s", AUTO, why)
    return found


def options_of(form: Format) -> Options:
    """Return the options of the environment (`KVBITS_SGLANG`, JSON), since SGLang's own options are closed.

    SGLang's processes inherit the environment.

    Raises:
        UnsupportedError: unknown or invalid options.
    """
    text = os.environ.get("KVBITS_SGLANG") or "{}"
    try:
        given = json.loads(text)
    except ValueError:
        given = text
    return Options.checked(given, "KVBITS_SGLANG", form.raw_newest, "" if form.calibrated else form.name)


def calibration_of(form: Format, server_args: Any) -> Model:
    """Return the calibration of the served model, found or made.

    Raises:
        CalibrationError, FileFormatError: as `engine.calibrated.read`.
    """
    options = options_of(form)
    model = model_of(server_args, "*.json" if options.calibration else None)
    scheme = schemes.for_layers(form.scheme.name, model.layers)
    way_out = """; or say KVBITS_SGLANG='{"calibration": "FILE.safetensors"}'"""
    file, make = options.calibration, options.calibrate
    return read(model, scheme, file, make=make, device=server_args.device, way_out=way_out)


def model_of(server_args: Any, pattern: str | None = "*.json") -> ModelRef:
    """Return the served model, with the configuration that Transformers has: SGLang writes into its own, and a
    calibration is known by it.
    """
    return model_at(server_args.model_path, server_args.revision, pattern)


def refuses(form: Format, options: Any) -> str | None:
    """Return why an engine cannot have these options, or None."""
    if options.device not in ("cpu", "cuda"):
        return (
            f"kvbits' attention backend for SGLang runs on cuda and on cpu, not on {options.device}; use another"
            " --attention-backend"
        )
    from sglang.srt.environ import envs

    if options.page_size not in (None, PAGE_SIZE):
        return f"kvbits' pages hold {PAGE_SIZE} tokens; leave --page-size away, or pass --page-size {PAGE_SIZE}"
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        return (
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH records how a step is laid out, and kvbits' attention backend counts"
            " steps as it lays them out; unset it"
        )
    for name, (usual, why) in NOT_RUN.items():
        if (value := getattr(options, name, usual)) != usual:  # a release may no longer have it
            return (
                f"--{name.replace('_', '-')} {value} is not served by kvbits' attention backend: {why}; leave it away"
            )
    if form.calibrated and (given := options.json_model_override_args) != "{}":
        return (
            f"--json-model-override-args {given}: {form.name} turns keys as config.json says; write it there, or use"
            " kvbits_int8_centered"
        )
    if options.enable_hierarchical_cache and (why_not := releases.CONTRACT.refuses(releases.HOST)):
        return why_not
    if not options.speculative_algorithm:
        return None
    return releases.CONTRACT.refuses(releases.DRAFTS) or refuses_drafts(options)


def refuses_drafts(options: Any) -> str | None:
    """Return why such drafts are not verified, or None."""
    if (name := options.speculative_algorithm).upper() != "NGRAM":
        return (
            f"--speculative-algorithm {name} is not served by kvbits' attention backend: draft models have pools and"
            " plans of their own; pass NGRAM"
        )
    if (breadth := options.speculative_ngram_max_bfs_breadth) != 1:
        return (
            f"drafts are verified as a chain, not as a tree of {breadth} branches; pass"
            " --speculative-ngram-max-bfs-breadth 1"
        )
    if (count := options.speculative_num_draft_tokens or MAX_QUERIES) > MAX_QUERIES:
        return (
            f"{count} drafts a step; kvbits' attention verifies up to {MAX_QUERIES}: leave"
            " --speculative-num-draft-tokens away"
        )
    return None


def check_model(form: Format, model_config: Any, ranks: int) -> None:
    """Refuse a model that the format cannot hold, or whose kv heads these ranks do not share equally.

    Raises:
        UnsupportedError: which part of it, and what to use.
    """
    config = model_config.hf_text_config
    layers = layer_geometries(config)
    if how := only_dense(config):
        raise UnsupportedError(
            f"this model {how}, which kvbits' backend for SGLang does not read; use another --attention-backend"
        )
    if why := form.refuses_any(layers, has_key_bias(config)):
        raise UnsupportedError(why)
    if (
        len({(g.num_kv_heads, g.head_dim, g.value_head_dim) for g in layers}) > 1
        or len(layers) != model_config.num_hidden_layers
    ):
        raise UnsupportedError(
            f"{len(layers)} of {model_config.num_hidden_layers} layers store keys and values, of {len(set(layers))}"
            " kinds; kvbits' backend for SGLang has one pool for all layers: use another --attention-backend"
        )
    if (heads := layers[0].num_kv_heads) % ranks:
        raise UnsupportedError(
            f"{heads} kv heads are not shared equally by --tp-size {ranks}; SGLang would add heads that no calibration"
            " has: pass a divisor"
        )
