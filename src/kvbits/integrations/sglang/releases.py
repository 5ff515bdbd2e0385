"""Parts of SGLang that this plugin needs (`CONTRACT`), in release 0.5.22 and later ones.

Release 0.5.22 is the first that resolves classes of pools by a method of its own. No line depends on the release.
"""

from __future__ import annotations

from ...contract import Contract, calls, needed_by, overrides, reads, wraps

DRAFTS, HOST = "drafts of n-grams", "pages in host memory"
"""Features that need symbols of their own."""
_pool, _backend = (
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
)
_host = "sglang.srt.mem_cache.pool_host.base:HostKVCache"
POOL_CLASS, BUDGET, CELL_SIZE, LAST_LOC, WORKER, HOST_POOL = (
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._resolve_kv_pool_class",
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
    "sglang.srt.model_executor.pool_configurator:DefaultPoolConfigurator._compute_cell_size",
    "sglang.srt.mem_cache.allocation:get_last_loc",
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.create_worker",
    "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler:build_kv_host_pool",
)
"""Hooked functions. No thread that would end these hooks is known."""
CONTRACT = Contract(
    "SGLang",
    ("sglang",),
    "0.5.22 to 0.5.23",
    (
        # names and options
        reads("sglang.srt.arg_groups.choices:add_attention_backend_choices"),
        calls("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", "name"),
        calls("sglang.srt.layers.attention.attention_registry:register_attention_backend", "name"),
        calls("sglang.srt.plugins.hook_registry:HookRegistry.register", "target hook hook_type"),
        reads("sglang.srt.plugins.hook_registry:HookType", "AROUND"),
        calls("sglang.srt.arg_groups.overrides:resolved_view", "server_args"),
        calls("sglang.srt.arg_groups.overrides:attention_backends_of", "cfg"),
        calls("sglang.srt.arg_groups.overrides:declare_resolution", "server_args source"),
        calls("sglang.srt.arg_groups.model_override_base:model_config_of", "server_args"),
        reads("sglang.srt.model_executor.cuda_graph_config:Backend", "DISABLED"),
        reads("sglang.srt.model_executor.cuda_graph_config:Phase", "PREFILL"),
        calls("sglang.srt.model_executor.cuda_graph_config:with_phase", "config phase"),
        calls("sglang.srt.utils.common:get_device_memory_capacity", "device"),
        reads("sglang.srt.environ:envs"),
        reads("sglang.srt.environ:Envs", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        # pages
        wraps(POOL_CLASS, "kind default"),
        wraps(BUDGET, "pre_model_load_memory"),
        wraps(CELL_SIZE, "num_layers"),
        reads(_pool, "get_kv_size_bytes layer_transfer_counter"),
        overrides(f"{_pool}._create_buffers"),
        overrides(f"{_pool}._clear_buffers"),
        overrides(f"{_pool}.get_kv_size_bytes"),
        overrides(f"{_pool}._init_kv_copy_and_warmup"),
        overrides(f"{_pool}.move_kv_cache", "tgt_loc src_loc"),
        # steps
        reads(_backend),
        overrides(f"{_backend}.init_forward_metadata_out_graph", "forward_batch in_capture"),
        overrides(f"{_backend}.init_cuda_graph_state", "max_bs max_num_tokens"),
        overrides(f"{_backend}.get_cuda_graph_seq_len_fill_value"),
        overrides(f"{_backend}.forward_extend", "q k v layer forward_batch save_kv_cache"),
        overrides(f"{_backend}.forward_decode", "q k v layer forward_batch save_kv_cache"),
        reads("sglang.srt.layers.radix_attention:AttentionType", "DECODER"),
        reads(
            "sglang.srt.layers.radix_attention:RadixAttention",
            "attn_type is_cross_attention layer_id logit_cap logit_capping_method qk_head_dim scaling "
            "sliding_window_size tp_q_head_num use_irope v_head_dim xai_temperature_len",
        ),
        reads("sglang.srt.model_executor.forward_batch_info:ForwardMode", "DECODE EXTEND TARGET_VERIFY"),
        reads(
            "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
            "extend_seq_lens extend_seq_lens_cpu forward_mode out_cache_loc req_pool_indices seq_lens seq_lens_cpu",
        ),
        calls("sglang.srt.runtime_context:get_parallel"),
        wraps(LAST_LOC, "req_to_token"),
        calls(
            "sglang.srt.mem_cache.allocation:get_last_loc_torch",
            "req_to_token req_pool_indices_tensor prefix_lens_tensor",
        ),
        *needed_by(
            DRAFTS,
            wraps(WORKER, "server_args"),
            overrides(
                "sglang.srt.speculative.ngram_worker:NGRAMWorker._prepare_draft_tokens",
                "batch",
                loaded=False,
            ),
        ),
        *needed_by(
            HOST,
            wraps(HOST_POOL, "kv_pool"),
            calls("sglang.srt.managers.cache_controller:LayerDoneCounter.wait_until", "threshold"),
            calls(
                f"{_host}.__init__",
                "dtype device_capacity_tokens size_per_token start_layer end_layer host_to_device_ratio host_size"
                " page_size layout pin_memory device",
            ),
            overrides(f"{_host}.get_size_per_token"),
            overrides(f"{_host}.init_kv_buffer"),
            overrides(
                f"{_host}.backup_from_device_all_layer",
                "device_pool host_indices device_indices io_backend",
            ),
            overrides(
                f"{_host}.load_to_device_per_layer",
                "device_pool host_indices device_indices layer_id io_backend is_draft",
            ),
            reads("sglang.srt.mem_cache.pool_host.common:ALLOC_MEMORY_FUNCS"),
            calls("sglang.srt.runtime_context:get_memory"),
            calls(
                "sgl_kernel.kvcacheio:transfer_kv_direct",
                "src_layers dst_layers src_indices dst_indices page_size",
                loaded=False,
            ),
            calls(
                "sgl_kernel.kvcacheio:transfer_kv_per_layer_mla",
                "src dst src_indices dst_indices item_size",
                loaded=False,
            ),
        ),
    ),
)
