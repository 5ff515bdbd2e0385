"""Blocks that leave vLLM's pool lose their raw copies, whoever is to write them: this plugin, a connector, a copy of
another block.

    BlockPool.get_new_blocks --> SchedulerOutput --> WorkerWrapperBase.execute_model --> Copies.forget, before the step

A block that a request shares (a hit of the prefix cache) does not come from the pool and keeps its copy. The pool is in
the process of the scheduler and copies are in the workers', so the numbers travel with the step, as vLLM's own
`new_block_ids_to_zero` do, which leave out blocks that a connector loads.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from ...ops.reference.place import Copies
from .formats import NAMES, PAGE_SIZE
from .options import options_of

STATES: weakref.WeakSet[Copies] = weakref.WeakSet()
"""The copies of this process."""


def install() -> None:
    """Wrap vLLM's pool, scheduler and worker, once."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    for of, name, wrapper in (
        (BlockPool, "get_new_blocks", _noting),
        (Scheduler, "schedule", _telling),
        (WorkerWrapperBase, "execute_model", _forgetting),
    ):
        original = getattr(of, name)
        if not hasattr(original, "kvbits_original"):
            setattr(of, name, functools.wraps(original)(wrapper(original)))
            getattr(of, name).kvbits_original = original


def _noting(original: Any) -> Any:
    def get_new_blocks(self: Any, num_blocks: int) -> Any:
        found = original(self, num_blocks)
        if (taken := getattr(self, "kvbits_taken", None)) is not None:
            taken.extend(block.block_id for block in found)
        return found

    return get_new_blocks


def _telling(original: Any) -> Any:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.kv_cache_manager.block_pool
        if not hasattr(pool, "kvbits_taken"):
            drafts = getattr(self.vllm_config.speculative_config, "kv_cache_dtype", None)
            pool.kvbits_taken = [] if options_of(self.vllm_config).copies or drafts in NAMES else None
        found = original(self, *args, **kwargs)
        if pool.kvbits_taken:
            found.kvbits_taken, pool.kvbits_taken = pool.kvbits_taken, []
        return found

    return schedule


def _forgetting(original: Any) -> Any:
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        if taken := getattr(scheduler_output, "kvbits_taken", None):
            each = self.vllm_config.cache_config.block_size // PAGE_SIZE  # pages of a block: several in hybrids
            with torch.inference_mode():
                for copies in STATES:
                    copies.forget([block * each + i for block in taken for i in range(each)])
        return original(self, scheduler_output)

    return execute_model
