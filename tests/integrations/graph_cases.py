"""Cases of the graph decoder's tests, on a CPU and on a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import torch


def prompts(lengths, seed=1, vocab=97, device="cpu"):
    """Random left-padded prompts."""
    width = max(lengths)
    ids = torch.randint(2, vocab, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


@contextmanager
def eagerly(model, cache):
    """Decoding on the device from the first token on, as inside graphed(): other kernels round otherwise."""
    hook = model.register_forward_pre_hook(lambda *_: cache.pages.expect_tokens())
    try:
        yield
    finally:
        hook.remove()
