"""vLLM's official wheel on a CPU, for tests: three of its compiled operators replaced by PyTorch, and small models on disk.

Set up by tests/integrations/run_vllm_cpu.sh; without vLLM the tests skip.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def _slots(query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, slot_mapping: torch.Tensor, block_size: int) -> None:
    n = int(query_start_loc[-1])
    row = torch.repeat_interleave(torch.arange(len(query_start_loc) - 1), query_start_loc.diff().long())
    at = positions[:n].long()
    slot_mapping[:n] = block_table[row, at // block_size].long() * block_size + at % block_size
    slot_mapping[n:] = -1


def _accepted(
    output: torch.Tensor, ends: torch.Tensor, drafts: torch.Tensor, targets: torch.Tensor, bonus: torch.Tensor, greedy: torch.Tensor | None, most: int
) -> None:  # fmt: skip
    """Drafts up to the first that is not the model's own choice, that choice, and the bonus token where all are right."""
    begin = 0
    for row, end in enumerate(ends.tolist()):
        same = int((drafts[begin:end] == targets[begin:end]).long().cumprod(0).sum())
        kept = targets[begin : begin + min(same + 1, end - begin)]
        output[row, : len(kept)] = kept
        if same == end - begin:
            output[row, same] = bonus[row].squeeze()
        begin = end


def install() -> None:
    """The environment and the operators; before vLLM is imported."""
    os.environ.update({k: v for k, v in SETTINGS.items() if k not in os.environ})
    if hasattr(torch.ops._C, "greedy_argmax"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> int[]")
    library.define("compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int size) -> ()")
    library.define("greedy_argmax(Tensor logits) -> Tensor")
    library.impl("init_cpu_memory_env", lambda nodes: [], "CompositeExplicitAutograd")
    library.impl("compute_slot_mapping_kernel_impl", _slots, "CPU")
    library.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
    library.define(
        "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor ends, Tensor drafts, Tensor targets, Tensor bonus, Tensor? greedy, int most) -> ()"
    )
    library.impl("rejection_greedy_sample_kernel_impl", _accepted, "CPU")
    install.library = library  # type: ignore[attr-defined]


SETTINGS_OF_ENGINE = {
    "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024, "block_size": 64, "max_num_seqs": 8, "seed": 0,
    "compilation_config": {"custom_ops": ["none"]}, "disable_log_stats": False,
}  # fmt: skip


def engine(model: Path | str, kv_cache_dtype: str, **options: Any) -> Any:
    """`vllm.LLM` of a directory with weights and a configuration, eager, in this process."""
    install()
    from vllm import LLM

    from kvbits.integrations.vllm import register

    register()  # vLLM does, where kvbits is installed with its entry points
    found = LLM(model=str(model), kv_cache_dtype=kv_cache_dtype, **(SETTINGS_OF_ENGINE | options))
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides = lambda: None  # done, and its search through all modules stumbles the second time
    return found


def save(model: Any, path: Path) -> Path:
    """A Transformers model where vLLM can load it."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path
