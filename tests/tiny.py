"""Small random models and a tokenizer of characters for the evaluation's tests."""

from __future__ import annotations

import importlib.metadata
import os
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from kvbits import embedded

ALPHABET = ["<unk>", "<bos>", "<eos>", *string.ascii_letters, *string.digits, *" .,:;'\n!?()-\"_=#[]*+/<>"]


def tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )


def model(key_bias: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32, head_dim: int = 64):
    """Two layers of 4 query and 2 kv heads; `key_bias` is added to the slowest rotary pair of layer 0's keys, as
    Qwen2 has it.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=len(ALPHABET),
        initializer_range=0.15,
        attention_bias=True,
        max_position_embeddings=4096,
    )
    found = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        bias = found.model.layers[0].self_attn.k_proj.bias.view(2, head_dim)
        bias.zero_()
        bias[:, head_dim // 2 - 1] = bias[:, -1] = key_bias
    return found


def trained() -> str | None:
    """SmolLM2-135M-Instruct as a command takes it, or None where it is not here."""
    folder = Path(os.environ.get("KVBITS_MODELS", Path.home() / "kv-models")) / "smollm2-135m-instruct"
    if folder.is_dir():
        return str(folder)
    try:
        importlib.metadata.distribution(embedded.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    return embedded.NAME
