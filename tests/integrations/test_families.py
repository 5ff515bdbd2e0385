"""Every family of the registry that `for_model` takes decodes the stock cache's tokens, every other one is refused with
a way out: docs/reference/models.md says the same.
"""

import re

import pytest
import torch
import transformers
from integrations import families, shrunk
from integrations.families import FAMILIES, TOKENS
from packaging.version import Version

from kvbits.integrations.huggingface import KVCache

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="families and their attention change with Transformers"
)


@pytest.mark.parametrize(
    "family", FAMILIES, ids=lambda f: f"{f.config.removesuffix('Config')}-{re.sub('[^A-Za-z0-9]+', '-', f.names)[:24]}"
)
def test_raw_decodes_the_stock_tokens_or_the_refusal_has_a_way_out(family):
    with families.quiet():
        model = families.build(family)
        dense, why = families.said(model)
        assert families.row(family, dense, why) in families.DOCUMENT.read_text(), (
            "run PYTHONPATH=tests python -m integrations.families"
        )
        if why is not None:
            assert why.endswith("use the stock cache") or "use the stock cache" in why
            assert model.config.get_text_config(decoder=True)._attn_implementation == "eager"
            return
        cache = KVCache.for_model(model, "raw", dense=dense)
        call, held = families.inputs(model)
        call |= {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        got = model.generate(**call, past_key_values=cache)
        assert cache.pages.seq_lens == ([max(held)] * 2 if dense else held)  # where padding is stored like any token
        KVCache.detach(model)
        want = model.generate(**call)
    assert torch.equal(got, want)
    # no model that says one thing for ever
    assert len(set(want[0, -TOKENS:].tolist())) > (1 if model.config.is_encoder_decoder else 5)


@pytest.mark.parametrize("kind", families.others())
def test_raw_decodes_the_stock_tokens_in_every_other_family(kind):
    with families.quiet():
        model = shrunk.build(kind, families.ATTENDING.get(kind, {}))
        dense, why = families.said(model)
        assert why is None and dense == (families.verdict(kind) == "dense")
        ids = torch.randint(3, 90, (2, 50), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :20] = 0
        call = {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "max_new_tokens": TOKENS,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        got = model.generate(**call, past_key_values=KVCache.for_model(model, "raw", dense=dense))
        KVCache.detach(model)
        assert torch.equal(got, model.generate(**call))


def test_the_tables_are_what_the_code_says():
    text = families.DOCUMENT.read_text()
    assert families.table() in text
    assert families.census() in text
