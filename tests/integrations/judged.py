"""Small models, and what an engine's tokens are held against: Transformers with the same scheme, number for number but
for rounding.
"""

from __future__ import annotations

import tiny
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    PreTrainedConfig,
    StableLmConfig,
)

from kvbits import schemes
from kvbits.calibrate import Calibration, calibrate
from kvbits.integrations.engine.served import FORMATS
from kvbits.integrations.huggingface import KVCache

VOCABULARY = len(tiny.ALPHABET)


def random_ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def built(kind: type[PreTrainedConfig], seed: int, **own):
    """A random model of a family: two layers, four query and two kv heads of 64 if its own settings do not say
    otherwise.
    """
    torch.manual_seed(seed)
    config = kind(
        **{
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": VOCABULARY,
            "initializer_range": 0.15,
            "max_position_embeddings": 4096,
            **own,
        }
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def gemma3():
    """Windows and full attention, each with a rotary embedding of its own."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return built(
        Gemma3TextConfig, 3, num_hidden_layers=3, sliding_window=100, query_pre_attn_scalar=64, layer_types=kinds
    )


def plain_llama():
    found = tiny.model()
    config = type(found.config)(**{**found.config.to_dict(), "attention_bias": False})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def llama_for(dtype):
    """The model with a key bias where the dtype takes it, else the one without."""
    return "llama_plain" if schemes.weak_to_key_bias(FORMATS[dtype].scheme) else "llama"


def stablelm():
    """A quarter of the channels is turned."""
    return built(StableLmConfig, 4, hidden_size=256, partial_rotary_factor=0.25)


def cohere():
    """Neighbouring channels are turned together."""
    return built(CohereConfig, 5, hidden_size=256)


MODELS = {
    "llama": tiny.model,
    "llama_plain": plain_llama,
    "mistral": lambda: built(MistralConfig, 1, sliding_window=100),
    "gemma2": lambda: built(Gemma2Config, 2, sliding_window=100, query_pre_attn_scalar=64, attn_logit_softcapping=20.0),
    "gemma3": gemma3,
    "stablelm": stablelm,
    "cohere": cohere,
}


def transformers_logprobs(model, scheme, prompt, tokens, chunks=(), calibration=None, backend="reference"):
    """Log-probabilities of `tokens` after `prompt`, which is fed in parts of these lengths, and the largest of each
    step.
    """
    cache = None if scheme is None else KVCache.for_model(model, scheme, backend=backend, calibration=calibration)
    ids = torch.tensor([prompt + tokens])
    parts = [*chunks] if chunks else [len(prompt)]
    assert sum(parts) == len(prompt)
    parts += [1] * (len(tokens) - 1)
    found, at = [], 0
    with torch.no_grad():
        if cache is None:
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        else:
            for n in parts:
                found.append(
                    model(
                        ids[:, at : at + n],
                        past_key_values=cache,
                        attention_mask=torch.ones(1, at + n, dtype=torch.long),
                    ).logits[0, -1]
                )
                at += n
            logits = torch.stack(found[-len(tokens) :])
    logprobs = logits.float().log_softmax(-1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)], logprobs.max(-1).values


def calibrated(model, scheme, path):
    """A calibration that lies in a file."""
    prompts = torch.randint(3, VOCABULARY, (4, 256), generator=torch.Generator().manual_seed(9))
    calibrate(model, [prompts], scheme).save(path)
    return Calibration.load(path)


def distance(model, prompt, result):
    """Mean distance of an answer's log-probabilities from the model's without any quantization."""
    want, _ = transformers_logprobs(model, None, prompt, result[0])
    return (result[1] - want).abs().mean().item()


def check(model, scheme, prompt, result, chunks=(), calibration=None, backend="reference"):
    """Equal but for the odd code that rounding in another order moves by one: a small part of what quantization costs."""
    tokens, logprobs, _ = result
    want, best = transformers_logprobs(model, scheme, prompt, tokens, chunks, calibration, backend)
    exact, _ = transformers_logprobs(model, None, prompt, tokens)
    bound = 1e-4 + 0.05 * (want - exact).abs().mean().item()
    assert (logprobs - want).abs().mean() < bound
    assert (best - want).mean() < bound, "not the most likely tokens"


def scheme_of(dtype: str, head_dim: int = 64):
    return schemes.fitted(FORMATS[dtype].scheme, head_dim)
