"""A model whose kv heads two ranks share (gloo on a CPU, NCCL on two GPUs): the tokens of one process, and files that
load under either number of ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = [
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.23") or not torch.distributed.is_available(),
        reason="needs transformers 5.23",
    ),
    pytest.mark.skipif(
        torch.cuda.device_count() == 1, reason="Transformers takes the GPU where there is one, and there is only one"
    ),
]
SCHEMES = ("raw", "int8", "fixed", "static")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=97,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
        attention_bias=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(Path(__file__).with_name("ranks.py")),
        str(folder),
    ]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.night
def test_both_ranks_find_the_same(found):
    assert found[0] == found[1] and found[0]["fingerprints"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_those_of_one_process_and_each_rank_holds_its_share(found, scheme):
    one, ranks = found[0][scheme]
    assert one == ranks and len(one[0]) == 150 + 24
    whole, share = found[0][f"{scheme}_bytes"]
    assert 2 * share == whole


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_load_under_another_number_of_ranks(found, scheme):
    want, *others = found[0][f"{scheme}_loaded"]
    assert all(x == want for x in others) and found[0][f"{scheme}_same"]


def test_what_ranks_cannot_share_is_refused(found):
    assert "2 ranks" in found[0]["prefix"] and "no/such" in found[0]["nowhere"]
