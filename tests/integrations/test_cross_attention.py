"""Decoders that may read an encoder's output: its keys stay in a stock cache beside the pages."""

import pytest
import torch
import transformers

from kvbits import KVCache
from kvbits.integrations.encoder_decoder import CrossKVCache
from kvbits.integrations.masks import passed

SMALL = {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97, "initializer_range": 0.3}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
READING = {
    "bert": (transformers.BertLMHeadModel, transformers.BertConfig, WIDE | {"is_decoder": True}),
    "roberta": (transformers.RobertaForCausalLM, transformers.RobertaConfig, WIDE | {"is_decoder": True}),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {"n_embd": 64}),
}


@pytest.mark.parametrize("encoded", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("family", READING)
def test_a_decoder_that_may_read_an_encoders_output_computes_what_it_does_without_a_cache(family, encoded):
    made, config, extra = READING[family]
    torch.manual_seed(0)
    model = made(config(**SMALL, **extra, add_cross_attention=True, bos_token_id=1, eos_token_id=2)).eval()
    ids = torch.randint(3, 90, (2, 20))
    given = {"encoder_hidden_states": torch.randn(2, 7, 64)} if encoded else {}
    with torch.no_grad():
        want = model(input_ids=ids, **given, use_cache=False).logits
        cache = KVCache.for_model(model, "raw")
        assert isinstance(cache, CrossKVCache)
        got = [
            model(input_ids=part, **given, **passed(model, cache), use_cache=True).logits
            for part in ids.split([10, 1, 9], 1)
        ]
    assert (torch.cat(got, 1) - want).norm() < 1e-4 * want.norm()
    assert cache.pages.seq_lens == [20, 20]
