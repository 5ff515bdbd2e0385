"""Pages from one vLLM engine to another by vLLM's own connectors, on a CPU: what arrives is what was sent, and what
vLLM compares before it takes it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from integrations import nixl_engine
from integrations.inside_vllm import generate, read
from integrations.judged import check, random_ids, scheme_of
from messages import raises

pytestmark = [pytest.mark.usefixtures("reference_ops"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
DTYPE = "kvbits_int8_centered"  # a page that opens takes the mean of the one before it, here of one that was loaded


def shared_storage(path):
    """The connector of vLLM that runs on a CPU: files of a folder, a page as it lies in the cache
    (vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py).
    """
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config={"shared_storage_path": str(path)}
    )


def handshake(llm):
    """Return what two engines of NIXL compare before a block is moved."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

    return compute_nixl_compatibility_hash(llm.llm_engine.vllm_config, "KVBITS")


def test_pages_arrive_as_they_were_sent_and_other_formats_are_told_apart(model, engine, tmp_path):
    prompt = random_ids(300)
    sender = engine("llama", DTYPE, kv_transfer_config=shared_storage(tmp_path))
    (first,) = generate(sender, [prompt])
    (again,) = generate(sender, [prompt])  # from its own blocks
    assert (first[2], again[2]) == (0, 256)
    receiver = engine("llama", DTYPE, kv_transfer_config=shared_storage(tmp_path))
    (loaded,) = generate(receiver, [prompt])
    assert loaded[2] == 256
    assert loaded[0] == again[0]
    assert torch.equal(loaded[1], again[1]), "the same bytes give the same numbers"
    check(model("llama")[0], scheme_of(DTYPE), prompt, loaded, [256, 44])
    other = engine("llama", "kvbits_int8", kv_transfer_config=shared_storage(tmp_path))
    assert handshake(sender) == handshake(receiver) != handshake(other)
    # this connector compares nothing; torch finds that pages have another size
    with raises(RuntimeError, "shape"):
        generate(other, [prompt])


@contextmanager
def process(*arguments):
    """Another process with an engine, and what it says once."""
    affinity = os.sched_getaffinity(0)  # NIXL's worker leaves its process one processor
    command = [sys.executable, nixl_engine.__file__, *map(str, arguments)]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        said = next((line for line in child.stdout if line.startswith("ENGINE ")), None)
        assert said is not None, "the other engine ended"
        yield json.loads(said.removeprefix("ENGINE "))
    finally:
        child.kill()
        child.wait()
        os.sched_setaffinity(0, affinity)


@pytest.mark.night
@pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (run_vllm_cpu.sh installs it)"
)
def test_nixl_moves_pages_between_processes_and_refuses_another_format(model, engine):
    """UCX over what this machine has; the receiver decodes on the sender's pages, of which it has the bytes."""
    loaded, path = model("llama")
    prompt = random_ids(nixl_engine.TOKENS)
    with process(path, DTYPE) as sent:
        receiver = engine("llama", DTYPE, kv_transfer_config=nixl_engine.nixl("receiver"))
        got = nixl_engine.answer(receiver, prompt, 24, sent["transfer"])
        check(loaded, scheme_of(DTYPE), prompt, read(got), [299, 1])  # the last token goes through the model once more
        assert nixl_engine.digests(receiver, [1, 2, 3, 4]) == sent["digests"]
        with process(path, "kvbits_int8", json.dumps(sent["transfer"])) as refused:
            assert refused == ["error", []], "the hashes of the two are compared before a block is moved"
