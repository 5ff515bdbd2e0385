"""Copies of newest pages inside vLLM: how many requests have them, which, and which blocks have none.

    determine_available_memory --> `_size`: rings of copies for a share of it, the rest is for pages
    SchedulerOutput            --> requests that ended or were preempted give their rings back
    BlockPool.get_new_blocks   --> SchedulerOutput --> Copies.forget, before the step

A block that leaves vLLM's pool loses its copy, whoever is to write it: this plugin, a connector, a copy of another
block. One that a request shares (a hit of the prefix cache) does not come from the pool and keeps its copy. The pool is
in the process of the scheduler and copies are in the workers', so the numbers travel with the step, as vLLM's own
`new_block_ids_to_zero` do, which leave out blocks that a connector loads.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import numpy as np
import torch

from ..engine.place import Copies
from ..engine.rings import Rings, beside_copies
from ..engine.served import PAGE_SIZE, copied_requests
from . import releases
from .formats import NAMES
from .options import options_of

logger = logging.getLogger("vllm.kvbits.copies")
"""Below vLLM's own."""


class Pool:
    """Copies of the layers of a worker.

    Args:
        rings: of the requests that its runner runs; None while vLLM measures memory, when none has copies.

    Attributes:
        count: of rings that layers have room for.
        states: of the layers' copies, by group of layers.
    """

    def __init__(self, runner: Any = None, rings: Rings | None = None) -> None:
        self._runner, self.rings = runner, rings
        self.count = max(1, rings.count if rings else 0)  # kernels are given pages, if only of nobody
        self.states: weakref.WeakSet[Copies] = weakref.WeakSet()
        self._rows: list[str | None] = []

    def rings_of(self, m: Any) -> np.ndarray:
        """Return int32 [rows] of a step's `CommonAttentionMetadata`: which ring each row's request owns, -1: none.

        The V2 runner gives numbers of requests; in the V1 runner rows are those of its batch. Passes of a draft model
        give neither, and have the rows of the model's.
        """
        if self.rings is None:
            return np.full(m.num_reqs, -1, np.int32)
        known = None
        if m.req_idx is not None:
            states = self._runner.req_states
            self._rows, known = [states.index_to_req_id.get(i) for i in m.req_idx.tolist()], states.req_id_to_index
        elif hasattr(self._runner, "input_batch"):
            self._rows, known = list(self._runner.input_batch.req_ids), self._runner.requests
        rows = [*self._rows, *[None] * m.num_reqs]  # those after them are padding
        return self.rings.of(rows[: m.num_reqs], known)


def _size(determine_available_memory: Any, wrapper: Any) -> int:
    """Decide how many requests have copies, and give what is left of the available bytes for pages.

    All ranks decide for the same number.
    """
    worker, available = wrapper.worker, determine_available_memory(wrapper)
    config = worker.vllm_config
    if not has_copies(config):
        return available
    layers = config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(getattr(layer, "impl", None), "ring_bytes")]
    for impl in impls:
        impl.settle()
    of_request = sum(impl.ring_bytes for impl in impls)
    most, share = config.scheduler_config.max_num_seqs, options_of(config).copies_share
    count = _least(copied_requests(available, of_request, most, share) if of_request else most)
    worker.kvbits_copies = pool = Pool(worker.model_runner, Rings(count, logger))
    for impl in impls:
        impl.pool = pool
    return beside_copies(logger, count, most, of_request, available)


def has_copies(vllm_config: Any) -> bool:
    """Return whether an engine has layers with copies, or drafts that may have some."""
    return options_of(vllm_config).copies or getattr(vllm_config.speculative_config, "kv_cache_dtype", None) in NAMES


def _least(count: int) -> int:
    """Return the least count of all ranks."""
    from vllm.distributed import get_world_group

    least = torch.tensor(count, device="cpu")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return int(least)


def install() -> None:
    """Wrap vLLM's pool, scheduler and worker, once."""
    worker = "vllm.v1.worker.worker_base:WorkerWrapperBase"
    wrap = releases.CONTRACT.wrap
    wrap("vllm.v1.core.block_pool:BlockPool.get_new_blocks", _note)
    wrap("vllm.v1.core.sched.scheduler:Scheduler.schedule", _tell)
    wrap(f"{worker}.execute_model", _forget)
    wrap(f"{worker}.determine_available_memory", _size, absent=_ask_worker)


def _note(get_new_blocks: Any, pool: Any, *args: Any, **options: Any) -> Any:
    found = get_new_blocks(pool, *args, **options)
    if (taken := getattr(pool, "kvbits_taken", None)) is not None:
        taken.extend(block.block_id for block in found)
    return found


def _tell(schedule: Any, scheduler: Any, *args: Any, **options: Any) -> Any:
    pool = scheduler.kv_cache_manager.block_pool
    if not hasattr(pool, "kvbits_taken"):
        pool.kvbits_taken = [] if has_copies(scheduler.vllm_config) else None
    found = schedule(scheduler, *args, **options)
    if pool.kvbits_taken:
        found.kvbits_taken, pool.kvbits_taken = pool.kvbits_taken, []
    return found


def _forget(execute_model: Any, wrapper: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
    pool = getattr(wrapper.worker, "kvbits_copies", None)
    if pool is not None:
        pool.rings.end(scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()))
        if taken := getattr(scheduler_output, "kvbits_taken", None):
            each = wrapper.vllm_config.cache_config.block_size // PAGE_SIZE  # pages of a block: several in hybrids
            with torch.inference_mode():
                for state in pool.states:
                    state.forget([block * each + i for block in taken for i in range(each)])
    return execute_model(wrapper, scheduler_output, *args, **options)


def _ask_worker(wrapper: Any) -> int:
    """Do what vLLM's wrapper does for a method that it does not define."""
    return int(wrapper.worker.determine_available_memory())
