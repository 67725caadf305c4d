"""Updates of fused optimizers advance version counters inside the context, and only of what they update."""

import pytest
import torch
from torch import nn

from offload.torch_private.fused_optimizers import counting_fused_updates


@pytest.mark.parametrize("fused", [False, True])
def test_updates_are_counted(fused: bool):
    used, unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([used, unused], lr=0.1, fused=fused)
    used.grad = torch.ones(4)
    with counting_fused_updates():
        before = used._version, unused._version
        optimizer.step()
        assert used._version > before[0]
        assert unused._version == before[1]
    if fused:
        before = used._version
        optimizer.step()
        assert used._version == before, "torch counts them now: this file has no use any more"
