"""Models with a head that drafts (multi-token prediction), of random weights.

Transformers runs the models without their heads, vLLM both. A head is a copy of the layer that says most of what its
model says: so it is right often, as long as it reads its own pages right, and wrong often enough.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import Linear, Module, ModuleList
from transformers import Qwen2Config, Qwen2ForCausalLM


def _spoken_by(found: Any, layer: int, others: float) -> tuple[Any, Any, torch.Tensor]:
    """The layer, the norm behind it and an identity, of a model whose tokens and this layer decide: the others' parts
    are scaled.
    """
    weight = found.model.embed_tokens.weight
    weight.data = weight.data / weight.data.square().mean(-1, keepdim=True).sqrt()
    for i, x in enumerate(found.model.layers):
        for name, last in x.named_parameters():
            if i != layer and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                last.data *= others
    return copy.deepcopy(found.model.layers[layer]), copy.deepcopy(found.model.norm), torch.eye(weight.shape[1])


def _joined(*parts: torch.Tensor) -> Linear:
    """A head's first projection, of a token and the model's last hidden state."""
    found = Linear(sum(x.shape[1] for x in parts), len(parts[0]), bias=False)
    found.weight.data = torch.cat(parts, 1)
    return found


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with a head `model.mtp_layers`."""


def mimo(config: Qwen2Config) -> MiMoForCausalLM:
    """float32; the first layer says most."""
    config.num_nextn_predict_layers = 1
    found = MiMoForCausalLM(config).eval()
    head, norm, same = _spoken_by(found, 0, 0.3)
    head.final_layernorm, head.token_layernorm, head.hidden_layernorm = (copy.deepcopy(norm) for _ in range(3))
    head.input_proj = _joined(torch.zeros_like(same), same)
    found.model.mtp_layers = ModuleList([head])
    return found


def qwen3_next(found: Any) -> Any:
    """With `mtp`; the last of four layers, the one that attends, says as much as the three with states."""
    layer, norm, same = _spoken_by(found, 3, 1.0)
    found.mtp = Module()
    found.mtp.layers, found.mtp.norm, found.mtp.fc = (
        ModuleList([layer]),
        norm,
        _joined(same, torch.zeros_like(same)).to(found.dtype),
    )
    found.mtp.pre_fc_norm_embedding, found.mtp.pre_fc_norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
    found.config.num_nextn_predict_layers = 1
    return found


def accepted(llm: Any) -> list[float]:
    """The share of an engine's drafts that were, by place."""
    found = {m.name: m for m in llm.get_metrics()}
    return [
        round(n / found["vllm:spec_decode_num_drafts"].value, 3)
        for n in found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    ]
