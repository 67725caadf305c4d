"""All ranks have equal copies, and a difference is found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.errors import UserError
from training.optim import AdamW
from training.parallel.copies import Copies, fingerprint, refuse_statistics


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    made.register_buffer("positions", torch.arange(5))
    return made


def test_copies_are_weights_buffers_and_states():
    trained = model().to(torch.bfloat16)
    optimizer = AdamW(trained.parameters())
    optimizer.allocate()
    tensors = Copies(trained, optimizer).tensors()
    assert {"0.weight", "1.bias", "positions", "0.weight.exp_avg", "0.weight.exp_avg_sq", "0.weight.remainder"} <= set(
        tensors
    )
    assert tensors["0.weight"].data_ptr() == trained[0].weight.data_ptr()


def test_what_the_ranks_of_a_host_share_is_apart():
    trained = model()
    optimizer = AdamW(trained.parameters())
    optimizer.allocate()
    copies = Copies(trained, optimizer, {trained[0].weight})
    assert copies.shared_tensors().keys() == {"0.weight", "0.weight.exp_avg", "0.weight.exp_avg_sq"}
    own = copies.tensors()
    # Each rank counts its updates.
    assert {"0.bias", "0.weight.step"} <= own.keys()
    assert not own.keys() & copies.shared_tensors().keys()


def test_a_reference_is_among_them():
    trained, reference = model(), model().requires_grad_(False)
    optimizer = AdamW(trained.parameters())
    optimizer.allocate()
    copies = Copies(trained, optimizer, {trained[0].weight, reference[0].weight}, reference)
    assert {"reference.0.bias", "reference.1.weight", "reference.positions"} <= copies.tensors().keys()
    assert copies.shared_tensors()["reference.0.weight"].data_ptr() == reference[0].weight.data_ptr()
    assert "reference.0.weight" not in copies.tensors()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_shows_one_changed_element(dtype: torch.dtype):
    tensor = torch.zeros(3, 5).to(dtype).t()
    before = fingerprint(tensor)
    tensor[2, 1] = 1
    assert fingerprint(tensor) != before
    assert fingerprint(tensor.clone()) == fingerprint(tensor)


def test_fingerprints_differ_after_an_update():
    trained = model()
    optimizer = AdamW(trained.parameters())
    optimizer.allocate()
    copies = Copies(trained, optimizer)

    def fingerprints() -> dict[str, int]:
        return {name: fingerprint(tensor) for name, tensor in copies.tensors().items()}

    before = fingerprints()
    (trained(torch.randn(2, 3)) * torch.arange(4)).sum().backward()
    optimizer.step()
    after = fingerprints()
    assert before.keys() == after.keys()
    assert {"0.weight", "0.weight.exp_avg"} <= {name for name in after if after[name] != before[name]}
    assert after["positions"] == before["positions"]


def test_running_statistics_are_refused():
    refuse_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))
    for norm in (nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, track_running_stats=True)):
        with pytest.raises(UserError, match=rf"^devices: 1 \({type(norm).__name__}\)"):
            refuse_statistics(nn.Sequential(nn.Linear(2, 2), norm))
