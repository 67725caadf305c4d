"""The reference's bits of floats, and its log beside one worked out by hand; test_native_undo has the rest."""

from __future__ import annotations

import pytest
import torch

from offload.optimizer import torch_undo
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate
from offload.optimizer.torch_undo import TorchReversible
from offload.optimizer.undo_log import BLOCK
from tests.offload.helpers.kernels import SETTINGS, operands, run
from tests.offload.helpers.undo import assert_same_bits, copy_of, log_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_neighbours_of_one_sign_differ_by_one(dtype: torch.dtype):
    info = torch.finfo(dtype)
    numbers = torch.tensor([0.0, info.tiny, 1.0, info.max, torch.inf], dtype=dtype)
    bits = torch_undo._bits(numbers)
    assert (bits.diff() > 0).all()
    assert bits[4] - bits[3] == 1
    assert torch.equal(torch_undo._bits(-numbers).diff(), bits.diff())


def test_every_number_of_16_bits_is_found_by_its_bits():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    numbers = bits.to(torch.int16).view(torch.bfloat16)
    assert torch.equal(torch_undo._bits(numbers), bits)
    # Sums with a code may go beyond 16 bits; there they wrap around.
    for beyond in (0, 1 << 16, -(1 << 16)):
        assert torch.equal(torch_undo._number_of(bits + beyond, torch.bfloat16).view(torch.int16), bits.to(torch.int16))


def test_a_number_that_is_exactly_inverted_has_code_zero():
    """Powers of two, a gradient of zero and no decay: nothing is rounded."""
    on = operands(4, StateFormat("fp32", "fp32"), torch.float32, torch.float32)
    on.exp_avg.copy_(torch.tensor([0.5, 1.0, 2.0, -4.0]))
    on.exp_avg_sq.fill_(0.25)
    settings = SETTINGS._replace(lr=0.0, beta1=0.5, beta2=0.5, weight_decay=0.0)
    log = log_for(4)
    TorchReversible(FusedUpdate(1), 1).update(on, torch.tensor(3.0), settings, log)
    assert not log.codes.any()
    assert log.progress.tolist() == [[4, 0]]


def test_tiles_are_undone_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """The third tile has too many entries: the first two are undone."""
    monkeypatch.setattr(torch_undo, "HOST_TILE", 2 * BLOCK)
    kernel = TorchReversible(FusedUpdate(1), 1)
    on = run(FusedUpdate(1), operands(5 * BLOCK + 7), steps=8)
    before, log = copy_of(on), log_for(5 * BLOCK + 7)
    assert kernel.update(on, torch.tensor(9.0), SETTINGS, log).is_complete
    kernel.undo(on, torch.tensor(9.0), SETTINGS, log)
    assert_same_bits(on, before)
    on.exp_avg[4 * BLOCK :] = torch.nan
    before = copy_of(on)
    assert not kernel.update(on, torch.tensor(9.0), SETTINGS, log).is_complete
    assert log.progress[:, 0].count_nonzero() == 2
    kernel.undo(on, torch.tensor(9.0), SETTINGS, log)
    assert_same_bits(on, before)
