"""Every family of the registry that `for_model` takes decodes the stock cache's tokens, every other one is refused with a way out: docs/reference/models.md says the same."""

import pytest
import torch
import transformers
from integrations import families
from integrations.families import FAMILIES, TOKENS
from packaging.version import Version

from kvbits.integrations.huggingface import KVCache

pytestmark = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="families and their attention change with Transformers")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.config.removesuffix('Config')}{'-alibi' if 'alibi' in f.extra else ''}")
def test_raw_decodes_the_stock_tokens_or_the_refusal_has_a_way_out(family):
    with families.quiet():
        model = families.build(family)
        why = families.said(model)
        assert families.row(family, why) in families.DOCUMENT.read_text(), "run python tests/integrations/families.py"
        if why is not None:
            assert why.endswith("use the stock cache")
            assert model.config.get_text_config(decoder=True)._attn_implementation == "eager"
            return
        cache = KVCache.for_model(model, "raw")
        ids = torch.randint(2, 97, (2, 50), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :20] = 0
        call = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        got = model.generate(**call, past_key_values=cache)
        assert cache.pages.seq_lens == [50 + TOKENS - 1, 30 + TOKENS - 1]
        KVCache.detach(model)
        want = model.generate(**call)
    assert torch.equal(got, want) and len(set(want[0, 50:].tolist())) > 5  # no model that says one thing for ever


def test_the_table_is_what_the_code_says():
    assert families.table() in families.DOCUMENT.read_text()
