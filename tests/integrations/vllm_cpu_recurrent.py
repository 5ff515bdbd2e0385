"""vLLM's compiled operators of recurrent layers that its wheel has for a GPU only, in PyTorch, one token after the
other: Mamba 2, gated delta rules, short convolutions, and states that move to another block."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch

NULL = 0
"""The block that is nobody's."""


def _scan(
    out: torch.Tensor,
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    starts: torch.Tensor,
) -> None:
    """Mamba 2 over prompts: x, out [tokens, heads, dim], states [rows, heads, dim, state], B, C [tokens, groups,
    state].
    """
    heads = x.shape[1]
    B, C = (m.repeat_interleave(heads // m.shape[1], 1).float() for m in (B, C))
    for row in range(len(starts) - 1):
        state = states[row]
        for t in range(int(starts[row]), int(starts[row + 1])):
            state = (
                state * torch.exp(dt[t] * A)[:, None, None]
                + (dt[t][:, None] * x[t].float())[:, :, None] * B[t][:, None]
            )
            y = (state * C[t][:, None]).sum(-1) + (0 if D is None else D[:, None] * x[t].float())
            out[t] = (y if z is None else y * torch.nn.functional.silu(z[t].float())).to(out.dtype)
        states[row] = state


def _update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    null: int,
    out: torch.Tensor,
    accepted: torch.Tensor | None,
    starts: torch.Tensor | None,
) -> None:
    """Mamba 2, one token of each row: x, dt [rows, heads, dim], A [heads, dim, state], state [slots, heads, dim,
    state].
    """
    assert accepted is None and source is not None, "one token of each row, from the slot that it has"
    B, C = (m.repeat_interleave(x.shape[1] // m.shape[1], 1).float() for m in (B, C))
    for row, slot in enumerate(source.flatten().tolist()):
        if slot == null:
            continue
        step = dt[row].float() + (0 if dt_bias is None else dt_bias)
        step = torch.nn.functional.softplus(step) if softplus else step
        new = (
            state[slot].float() * torch.exp(step[:, :, None] * A)
            + (step * x[row].float())[:, :, None] * B[row][:, None]
        )
        state[slot if target is None else int(target.flatten()[row])] = new.to(state.dtype)
        y = (new * C[row][:, None]).sum(-1) + (0 if D is None else D * x[row].float())
        out[row] = (y if z is None else y * torch.nn.functional.silu(z[row].float())).to(out.dtype)


def _convolve(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    slots: torch.Tensor | None,
    starts: torch.Tensor | None,
    pad: int,
) -> torch.Tensor:
    """A causal convolution, one token of each row: x [rows, channels], state [slots, channels, width - 1], weight
    [channels, width].
    """
    assert slots is not None and len(x) == len(slots.flatten()), "one token of each row"
    out, width = torch.zeros_like(x), weight.shape[1]
    for row, slot in enumerate(slots.flatten().tolist()):
        if slot in (pad, NULL):
            continue
        seen = torch.cat([state[slot][:, : width - 1].to(x.dtype), x[row][:, None]], 1)
        state[slot][:, : width - 1] = seen[:, 1:]
        y = (seen * weight).sum(1) + (0 if bias is None else bias)
        out[row] = torch.nn.functional.silu(y) if activation in ("silu", "swish") else y
    return out


def _gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what a gated delta rule forgets by (a logarithm) and writes with, float32 [1, tokens, heads]."""
    return (-A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()))[
        None
    ], b.float().sigmoid()[None]


def _delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    final: bool,
    starts: torch.Tensor,
    head_first: bool,
    norm: bool,
    slots: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gated delta rule over rows: q, k [1, tokens, key heads, dim], v, result [1, tokens, heads, dim], states [slots,
    heads, key dim, dim].
    """
    assert norm and not head_first
    q, k = (x[0].float().repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + eps).sqrt() for x in (q, k))
    out = torch.zeros_like(v)
    for row, slot in enumerate(slots.flatten().tolist()):
        state = states[slot].float()
        for t in range(int(starts[row]), int(starts[row + 1])):
            state = state * g[0, t].exp()[:, None, None]
            written = (v[0, t].float() - torch.einsum("hkv,hk->hv", state, k[t])) * beta[0, t][:, None]
            state = state + k[t][:, :, None] * written[:, None]
            out[0, t] = torch.einsum("hkv,hk->hv", state, q[t] * q.shape[-1] ** -0.5).to(out.dtype)
        states[slot] = state.to(states.dtype)
    return out, states[:0]


def _delta_of_each(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    norm: bool,
    softplus: float,
    threshold: float,
) -> torch.Tensor:
    """The same of one token of each row, as [rows, 1, heads, dim]."""
    out, _ = _delta(q, k, v, *_gates(A_log, a, b, dt_bias), states, True, starts, False, norm, slots, 1e-6)
    return out[0][:, None].clone()


def _delta_of_drafts(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    starts: torch.Tensor,
    norm: bool,
    softplus: float,
    threshold: float,
) -> torch.Tensor:
    """The same of a token and its drafts, as [tokens, heads, dim]: each leaves its state in a slot of its own, slots
    [rows, tokens of a row], and the next step goes on from the last one that was accepted.
    """
    (g, beta), out, one = _gates(A_log, a, b, dt_bias), torch.empty_like(v), torch.tensor([0, 1])
    for row, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        slot = slots[row, accepted[row] - 1]
        for at in range(begin, end):
            states[slots[row, at - begin]] = states[slot]
            slot = slots[row, at - begin]
            found, _ = _delta(
                *(x[None, at : at + 1] for x in (q, k, v, g[0], beta[0])), states, True, one, False, norm, slot, 1e-6
            )
            out[at] = found[0, 0]
    return out


def _copied(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    """States of requests that cross into another block: addresses and bytes."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def _moved(context: Any, row: int, source: int, target: int, drafts: int) -> None:
    """A request's states from one column of its block table to another, as they were after so many accepted drafts: a
    convolution's window moves on by as many tokens, other states have a block for each. The context has addresses.
    """
    states = (
        context.state_base_addrs,
        context.state_block_strides,
        context.state_elem_sizes,
        context.state_inner_sizes,
        context.state_conv_widths,
    )
    for base, stride, element, inner, width, group in zip(
        *(x.tolist() for x in (*states, context.state_group_indices)), strict=True
    ):
        columns = context.block_table_stride_req
        table = (ctypes.c_int32 * columns).from_address(int(context.block_table_ptrs[group]) + 4 * columns * row)
        step = inner * element
        start = base + stride * table[source] + drafts * step if width else base + stride * table[source + drafts]
        ctypes.memmove(base + stride * table[target], start, (width - drafts if width else 1) * step)


def _states_before(
    context: Any,
    num_reqs: int,
    state_idx_gpu: torch.Tensor,
    src_col_gpu: torch.Tensor,
    token_bias_gpu: torch.Tensor,
    idx_mapping: None,
) -> None:
    """Before a step: states of requests that cross into another block."""
    for row, (target, source, drafts) in enumerate(
        zip(*(x[:num_reqs].tolist() for x in (state_idx_gpu, src_col_gpu, token_bias_gpu)), strict=True)
    ):
        if source not in (-1, target):
            _moved(context, row, source, target, drafts)


def _states_after(
    context: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: torch.Tensor,
    mamba_state_idx_gpu: torch.Tensor,
    num_scheduled_tokens_gpu: torch.Tensor,
    num_computed_tokens_gpu: torch.Tensor,
    num_draft_tokens_gpu: torch.Tensor,
) -> None:
    """After a step: the state at the end of a block that accepted drafts have filled, to be found by others."""
    counts = (
        num_accepted_tokens_gpu,
        mamba_state_idx_gpu,
        num_scheduled_tokens_gpu,
        num_computed_tokens_gpu,
        num_draft_tokens_gpu,
    )
    for row, (accepted, source, scheduled, computed, drafts) in enumerate(
        zip(*(x[:num_reqs].tolist() for x in counts), strict=True)
    ):
        running = computed + scheduled - drafts
        end = (running + accepted - 1) // context.block_size * context.block_size
        target = end // context.block_size - 1
        context.num_accepted_tokens_out[row] = 1 if end >= running and source == target else accepted
        if end >= running and (source, 0) != (target, end - running):
            _moved(context, row, source, target, end - running)


def _zeroed(runner: Any, blocks: list[int]) -> None:
    """New blocks of layers that attend are zeroed; vLLM's runner for a CPU takes a block's number for that of one of
    its pages.
    """
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            pages = runner.compilation_config.static_forward_context[name].kv_cache
            if isinstance(pages, torch.Tensor):
                pages.unflatten(0, (runner.kv_cache_config.num_blocks, -1))[blocks] = 0


def install() -> None:
    """After `vllm_cpu.install`, once a process."""
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    mamba_utils.batch_memcpy = _copied
    mamba_utils.MambaSpecDecodeGPUContext.run_fused_precopy = _states_before
    mamba_utils.MambaSpecDecodeGPUContext.run_fused_postprocess = _states_after
    CPUModelRunner._zero_block_ids = _zeroed
    if hasattr(torch.ops._C, "mamba_chunk_scan_fwd_cpu"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "mamba_chunk_scan_fwd_cpu(Tensor(a!) out, Tensor(b!) states, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C,"
        " Tensor? D, Tensor? z, Tensor starts) -> ()"
    )
    library.define(
        "selective_state_update_cpu(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D,"
        " Tensor? z, Tensor? dt_bias, bool softplus, Tensor? source, Tensor? target, int null, Tensor(b!) out, Tensor?"
        " accepted, Tensor? starts) -> ()"
    )
    library.define(
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, str? activation, Tensor?"
        " slots, Tensor? starts, int pad) -> Tensor"
    )
    library.define("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
    library.define(
        "chunk_gated_delta_rule_cpu(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) states, bool final,"
        " Tensor starts, bool head_first, bool norm, Tensor slots, float eps) -> (Tensor, Tensor)"
    )
    library.define(
        "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor"
        " a, Tensor b, Tensor(a!) states, Tensor slots, Tensor starts, bool norm, float softplus, float threshold) ->"
        " Tensor"
    )
    library.define(
        "fused_sigmoid_gating_delta_rule_update_spec_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v,"
        " Tensor a, Tensor b, Tensor(a!) states, Tensor slots, Tensor accepted, Tensor starts, bool norm, float"
        " softplus, float threshold) -> Tensor"
    )
    for name, function in (
        ("mamba_chunk_scan_fwd_cpu", _scan),
        ("selective_state_update_cpu", _update),
        ("causal_conv1d_update_cpu_vec", _convolve),
        ("fused_gdn_gating_cpu", _gates),
        ("chunk_gated_delta_rule_cpu", _delta),
        ("fused_sigmoid_gating_delta_rule_update_cpu", _delta_of_each),
        ("fused_sigmoid_gating_delta_rule_update_spec_cpu", _delta_of_drafts),
    ):
        library.impl(name, function, "CPU")
    install.library = library  # type: ignore[attr-defined]
