"""The formats of states: names, dtypes and bytes."""

from __future__ import annotations

import pytest
import torch

from offload.errors import KnobError
from offload.optimizer.formats import StateFormat


@pytest.mark.parametrize(
    ("format", "traffic"),
    [
        (StateFormat(), 26),
        (StateFormat("compact", "bf16"), 18),
        (StateFormat("compact", "int8"), 14 + 4 / 64),
        (StateFormat("stochastic", "int8"), 10 + 4 / 64),
    ],
    ids=str,
)
def test_traffic_of_an_update(format: StateFormat, traffic: float):
    assert format.update_bytes == traffic


def test_only_bf16_weights_have_another_master_than_a_float32_one():
    for master, dtype in (("compact", torch.int16), ("stochastic", None)):
        format = StateFormat(master)
        assert format.master_dtype(torch.bfloat16) == dtype
        assert format.master_dtype(torch.float16) == torch.float32
        assert format.master_dtype(torch.float32) is None


def test_codes_have_names_that_torchs_adamw_does_not_take_for_moments():
    assert StateFormat().moment_names == ("exp_avg", "exp_avg_sq")
    assert StateFormat(state_dtype="int8").moment_names == ("exp_avg_codes", "exp_avg_sq_codes")


@pytest.mark.parametrize("names", [("bf16",), ("fp32",), ("compact", "fp16")])
def test_unknown_names_are_refused(names: tuple[str, ...]):
    with pytest.raises(KnobError, match="must be"):
        StateFormat(*names)
