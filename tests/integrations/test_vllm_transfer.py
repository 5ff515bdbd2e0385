"""Pages from one vLLM engine to another by vLLM's own connectors, on a CPU: what arrives is what was sent, and what vLLM compares before it takes it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("msgspec") is None:
    pytest.skip("vLLM is not installed (tests/integrations/run_vllm_cpu.sh sets it up)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("these tests run vLLM on a CPU", allow_module_level=True)

from integrations.test_vllm_engine import check, engine, generate, model, random_ids, reference_ops, scheme_of  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
DTYPE = "kvbits_int8_centered"  # a page that opens takes the mean of the one before it, here of one that was loaded


def shared_storage(path):
    """The connector of vLLM that runs on a CPU: files of a folder, a page as it lies in the cache (vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py)."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config={"shared_storage_path": str(path)})


def handshake(llm):
    """What two engines of NIXL compare before a block is moved."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

    return compute_nixl_compatibility_hash(llm.llm_engine.vllm_config, "CUSTOM")


def test_pages_arrive_as_they_were_sent_and_other_formats_are_told_apart(model, engine, tmp_path):  # noqa: F811
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
    with pytest.raises(RuntimeError, match="shape mismatch"):  # this connector compares nothing; torch finds that pages have another size
        generate(other, [prompt])
