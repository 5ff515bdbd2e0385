"""SGLang's operators of drafts on CPUs, by their definition: what its own kernels for CPUs (`sgl_kernel` built from
source) have by these names.

Nodes of a tree are known by their first child (`next_token`) and by the next child of the same parent (`next_sibling`),
-1 for none.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """table[request, begin:end] = slots, one behind the other."""
    at = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[request, begin:end] = slots[at : at + end - begin]
        at += end - begin


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, begins: Tensor, ends: Tensor, slots: Tensor, width: int
) -> None:
    """The other way round."""
    found = torch.cat(
        [table[r, a:b] for r, a, b in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True)]
    )
    slots[: len(found)] = found


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    """Slots of the accepted, in front; -1 is none."""
    found = slots[accepted[accepted >= 0].long()]
    out[: len(found)] = found


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """From the root on, to the child that the model said; its number of drafts does not count the root."""
    for b in range(len(candidates)):
        at, count = 0, 0
        while True:
            accept_index[b, count] = retrive_index[b, at]
            predicts[retrive_index[b, at]] = said = target_predict[b, at]
            child = retrive_next_token[b, at]
            while child >= 0 and candidates[b, child] != said:
                child = retrive_next_sibling[b, child]
            if child < 0:
                break
            at, count = int(child), count + 1
        accept_token_num[b] = count


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lens: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    batch_size: int,
    count: int,
) -> None:
    """mask bool [batch_size * count * count]: whether node j is node i, or above it."""
    above = mask.view(batch_size, count, count).tril(-1)
    positions.copy_((above.sum(-1) + lens[:, None]).flatten())
    index.copy_(torch.arange(batch_size * count).view(batch_size, count))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for b in range(batch_size):
        parents = [max(x.nonzero().flatten().tolist(), default=-1) for x in above[b]]
        for i in reversed(range(1, count)):
            next_sibling[b, i] = next_token[b, parents[i]]
            next_token[b, parents[i]] = i
