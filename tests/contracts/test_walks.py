"""How many files of kvbits a call goes through: what a reader has to open to follow it."""

import sys
from pathlib import Path

import torch
from cache import test_device_decode
from integrations.test_graphs import fixed, tiny

import kvbits

ROOT = Path(kvbits.__file__).parent
MOST_FILES = 15  # may fall, not rise
list_library = test_device_decode.list_library
emulated_list = test_device_decode.emulated_list
gpu = test_device_decode.gpu
pytestmark = test_device_decode.pytestmark


def files_of(work) -> set[str]:
    """Files of the package whose functions a call runs."""
    found = set()

    def note(frame, event, argument):
        if frame.f_code.co_filename.startswith(str(ROOT)):
            found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@torch.no_grad()
def test_a_decode_step_through_transformers(gpu):
    model = tiny()
    cache, token = fixed(model, "int4"), torch.tensor([[5]])
    model(torch.randint(2, 90, (1, 130)), past_key_values=cache)
    for _ in range(5):
        model(token, past_key_values=cache)
    assert cache.pages.decoding is not None
    found = files_of(lambda: model(token, past_key_values=cache))
    print(f"\n{len(found)} files:", *sorted(found))
    assert {"integrations/attention.py", "cache/paged_cache.py", "ops/cuda/decode.py"} <= found
    assert len(found) <= MOST_FILES
