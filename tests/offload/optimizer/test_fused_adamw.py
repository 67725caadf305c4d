"""An element is rounded alike wherever a tensor ends."""

from __future__ import annotations

import pytest
import torch

from offload.optimizer.fused_adamw import VECTOR, fused_adamw_

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def updated(values: list[list[torch.Tensor]], steps: int = 4) -> list[list[torch.Tensor]]:
    values = [[tensor.clone() for tensor in tensors] for tensors in values]
    for step in range(1, steps + 1):
        counts = [torch.tensor(float(step)) for _ in values[0]]
        fused_adamw_(*values, [], counts, **SETTINGS, amsgrad=False, maximize=False)
    return values


@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 98, 4095])
def test_a_part_is_updated_as_in_the_whole(count: int):
    generator = torch.Generator().manual_seed(count)
    whole = [[torch.randn(4096, generator=generator).abs_()] for _ in range(4)]
    part = [[tensors[0][:count]] for tensors in whole]
    for found, expected in zip(updated(part), updated(whole), strict=True):
        assert torch.equal(found[0], expected[0][:count])


def test_tensors_of_any_shape_and_number_share_a_call():
    shapes = [(3, 5), (VECTOR,), (), (0,), (2, VECTOR + 1)]
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(shape, generator=generator).abs_() for shape in shapes] for _ in range(4)]
    # Columns first in memory.
    values = [[*tensors[:-1], tensors[-1].t().contiguous().t()] for tensors in values]
    together = updated(values)
    for index in range(len(shapes)):
        if shapes[index] == (0,):
            continue
        alone = updated([[tensors[index]] for tensors in values])
        assert all(torch.equal(found[index], expected[0]) for found, expected in zip(together, alone, strict=True))
        assert not torch.equal(together[0][index], values[0][index])


@pytest.mark.parametrize("count", [4, VECTOR + 1])
def test_gradients_are_not_written(count: int):
    # An update that may be undone takes a gradient with another version for one that somebody has changed.
    values = [[torch.ones(count)] for _ in range(4)]
    fused_adamw_(*values, [], [torch.tensor(1.0)], **SETTINGS, amsgrad=False, maximize=False)
    assert [tensors[0]._version > 0 for tensors in values] == [True, False, True, True]
