"""RoundPipe in the loop: exact, and one step stale; parts of unequal size are refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from offload.streams.stream_checker import CheckedStreams
from peers import peer
from peers.peer import PeerError
from peers.roundpipe import RoundPipe
from tests.peers.helpers.runs import ON_GPU, curve, skip_without


class Mean(nn.Module):
    """A model whose output is its loss, and a chain that adds the losses of the parts, split as RoundPipe does."""

    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()

    def forward_backward(self, input_args, loss_fn) -> torch.Tensor:
        count = min(self.parts, len(input_args[0]))
        return sum(loss_fn(self(part), None) for part in torch.tensor_split(input_args[0], count))


def microbatch_of(monkeypatch, parts: int, values: list[float]) -> torch.Tensor:
    monkeypatch.setattr(peer, "find_spec", lambda name: name)
    attached = RoundPipe(num_microbatch=parts).attach(Mean(parts), CheckedStreams(torch.device("cpu")))
    attached._chain = attached.model
    return attached.microbatch(lambda: attached.model(torch.tensor(values)) * 0.5, last=True)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_the_loss_of_equal_parts_is_that_of_the_microbatch(monkeypatch, parts: int):
    assert microbatch_of(monkeypatch, parts, [1.0, 2.0, 3.0, 6.0]).item() == 1.5


def test_parts_of_unequal_size_are_refused(monkeypatch):
    with pytest.raises(PeerError, match=r"^offload\.num_microbatch=2: .*3 examples.*take 1"):
        microbatch_of(monkeypatch, 2, [1.0, 2.0, 6.0])


@pytest.mark.gpu
def test_on_a_gpu_exact_losses_are_the_resident_ones_but_for_rounding(tmp_path: Path):
    skip_without("roundpipe")
    own, expected = curve(tmp_path / "own", "offload=roundpipe", *ON_GPU), curve(tmp_path / "none", *ON_GPU)
    assert own[0][0] == expected[0][0]
    assert own == [(pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2)) for loss, norm in expected]


@pytest.mark.gpu
def test_on_a_gpu_stale_losses_are_those_of_one_update_less(tmp_path: Path):
    """The second step computes with the first weights."""
    skip_without("roundpipe")
    own = curve(tmp_path / "own", "offload=roundpipe", "offload.stale=true", *ON_GPU)
    still = curve(tmp_path / "none", *ON_GPU, "optimizer.lr=0")
    assert own[1][0] == still[1][0]
    assert own[3][0] != still[3][0]
