"""Choice of kernels for dense attention on a GPU: run by the reference here, on a GPU in test_long_queries."""

import pytest
import torch

from kvbits.ops.cuda.engine import dense
from kvbits.ops.reference.merge import merge_partials


def kernel(q, k, v, scaling, causal=False, window=None):
    """`dense.attention` in float64."""
    scores = torch.einsum("bthgd,bshd->bhgts", q.unflatten(2, (k.shape[2], -1)).double(), k.double()) * scaling
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1),
            -torch.inf,
        )
    out = torch.einsum("bhgts,bshd->bthgd", scores.softmax(-1), v.double()).flatten(2, 3)
    return out.float(), scores.logsumexp(-1).flatten(1, 2).transpose(1, 2).float()


@pytest.fixture
def asked(monkeypatch):
    """Shapes and strides of keys that cuDNN planned for."""
    plans = set()

    def cudnn(q, k, v, scaling, causal):
        plans.add((q.shape, k.shape, q.stride(), k.stride()))
        return kernel(q, k, v, scaling, causal)

    monkeypatch.setattr(dense, "flash_attention", kernel)
    monkeypatch.setattr(dense, "cudnn_attention", cudnn)
    monkeypatch.setattr(dense, "_cudnn_serves", lambda q, k, causal, window: k.shape[1] >= dense.CUDNN_ROWS)
    monkeypatch.setattr(dense, "merge_partials", lambda outs, lses: merge_partials(list(outs), list(lses)))
    monkeypatch.setattr(dense, "CUDNN_ROWS", 16)
    monkeypatch.setattr(dense, "MOST_ROWS", 128)
    return plans


@pytest.mark.parametrize("batch", [1, 3])
def test_chunks_after_a_growing_history_ask_for_few_plans(asked, batch):
    for rows in range(16, 400, 23):
        q, k, v = (torch.randn(batch, n, h, 8) for n, h in ((5, 4), (rows, 2), (rows, 2)))
        for found, want in zip(dense.attention(q, k, v, 0.3), kernel(q, k, v, 0.3), strict=True):
            torch.testing.assert_close(found, want)
    assert len(asked) <= 5  # powers of two from 16 to 128, and a batch whose history is one of them
