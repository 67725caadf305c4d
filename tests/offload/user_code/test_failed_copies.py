"""A copy in that fails, or an interrupt while it begins: the step after it is as if nothing had been."""

import copy

import pytest
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.streams.transfer import Transfer
from tests.offload.helpers.models import Stack, assert_same, stack_inputs, under

MODES = {
    "bounce_linear": lambda: BounceLinear(slots=2),
    "layer_stream": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=2),
    "tensor_swap": lambda: TensorSwap(LayerStream(slots=2)),
}


def step(attached, model: nn.Module) -> None:
    model.zero_grad()
    with attached.step():
        model(stack_inputs(0, 0)).square().mean().backward()


@pytest.mark.parametrize("error", [RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_the_next_step_is_right(mode: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch):
    copies_in, failed = Transfer.copies_in, 0
    for failing in range(1, 12):
        model, count = Stack(), 0
        expected = copy.deepcopy(model)

        def counted(*arguments, failing: int = failing, **keywords):
            nonlocal count
            count += 1
            if count == failing:
                raise error("no memory")
            return copies_in(*arguments, **keywords)

        with under(MODES[mode](), model) as attached:
            step(attached, model)
            with monkeypatch.context() as patched:
                patched.setattr(Transfer, "copies_in", counted)
                try:
                    step(attached, model)
                except error:
                    failed += 1
            step(attached, model)
            expected(stack_inputs(0, 0)).square().mean().backward()
            assert_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])
        assert_same([*model.parameters()], [*expected.parameters()])
    assert failed
