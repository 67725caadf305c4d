"""Losses of several microbatches that set, change or use what the others see: as one after another, or refused."""

import contextvars
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from offload.microbatches.layer_major import one_after_another
from offload.modes.shard_offload import ShardOffload
from offload.torch_private.module_contexts import SideBySideError
from tests.offload.helpers.models import Block, Stack, stack_inputs
from tests.offload.helpers.user_code import NoMode, as_resident, descend, same_as_resident, stack_of, under

pytestmark = pytest.mark.usefixtures("device")
SHARDS = {
    "recomputing": lambda: ShardOffload(shards=2),
    "not recomputing": lambda: ShardOffload(shards=2, checkpoint=False),
}
BOTH = pytest.mark.parametrize("make", SHARDS.values(), ids=SHARDS)
FACTOR = contextvars.ContextVar("factor", default=1.0)


def two_steps(loss: Callable[[nn.Module, int], torch.Tensor], microbatches: int = 3) -> Callable:
    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        seen = []
        for _ in range(2):
            accumulate = one_after_another if attached is NoMode else attached.accumulate
            with attached.step():
                seen += accumulate([partial(loss, model, microbatch) for microbatch in range(microbatches)])
            seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            descend(model)
        return seen

    return scenario


def plain(model: nn.Module, microbatch: int) -> torch.Tensor:
    torch.manual_seed(microbatch)
    return model(stack_inputs(0, microbatch)).square().mean()


class Aux(Block):
    """Leaves a term of the loss, and counts its calls."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result = super().forward(hidden) * self.calls
        self.aux = result.square().mean()
        return result


class Drawing(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * (0.5 + random.random()) * FACTOR.get())


def with_aux(model: nn.Module, microbatch: int) -> torch.Tensor:
    return plain(model, microbatch) + sum(block.aux for block in model.blocks)


def evaluating(model: nn.Module, microbatch: int) -> torch.Tensor:
    model.train(microbatch != 1)
    for block in model.blocks:
        block.dropout.p = 0.1 * microbatch
    value = plain(model, microbatch)
    model.train()
    return value


def drawing(model: nn.Module, microbatch: int) -> torch.Tensor:
    random.seed(microbatch)
    token = FACTOR.set(FACTOR.get() + microbatch)
    value = plain(model, microbatch)
    FACTOR.reset(token)
    return value


def skipping(model: nn.Module, microbatch: int) -> torch.Tensor:
    hidden = model.stem(stack_inputs(0, microbatch))
    for number, block in enumerate(model.blocks):
        if (number + microbatch) % 2:
            hidden = block(hidden)
    return model.head(hidden).square().mean()


class ReadsBetween(Stack):
    """Its forward computes with a weight of a block, before and after the blocks."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs) + self.blocks[3].norm.weight
        for block in self.blocks:
            hidden = block(hidden) * self.blocks[0].norm.weight
        return self.head(hidden)


@BOTH
def test_a_parent_reads_weights_between_the_blocks(make: Callable):
    same_as_resident(make, two_steps(plain), ReadsBetween)


@BOTH
def test_hooks_on_saved_tensors_reach_every_microbatch(make: Callable):
    seen = {"hooks": 0}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen["hooks"] += 1
        return tensor

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            seen["hooks"] = 0
            found = two_steps(plain)(model, mode)
        assert seen["hooks"] >= 3 * 2
        return found

    same_as_resident(make, scenario)


def freezing(model: nn.Module, microbatch: int) -> torch.Tensor:
    model.stem.requires_grad_(microbatch != 1)
    return plain(model, microbatch)


def freezing_what_streams(model: nn.Module, microbatch: int) -> torch.Tensor:
    model.blocks[1].requires_grad_(microbatch != 1)
    return plain(model, microbatch)


def replacing(model: nn.Module, microbatch: int) -> torch.Tensor:
    values = {name: value * (1 + 0.1 * microbatch) for name, value in model.named_parameters()}
    return functional_call(model, values, (stack_inputs(0, microbatch),)).square().mean()


def replacing_what_streams(model: nn.Module, microbatch: int) -> torch.Tensor:
    name = "blocks.1.up.weight"
    value = dict(model.named_parameters())[name] * (1 + 0.1 * microbatch)
    return functional_call(model, {name: value}, (stack_inputs(0, microbatch),)).square().mean()


def changing(model: nn.Module, microbatch: int) -> torch.Tensor:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.9)
    return plain(model, microbatch)


def changing_what_stays(model: nn.Module, microbatch: int) -> torch.Tensor:
    with torch.no_grad():
        model.head.weight.mul_(0.9)
    return plain(model, microbatch)


def decaying(model: nn.Module, microbatch: int) -> torch.Tensor:
    loss = plain(model, microbatch)
    return loss + model.blocks[1].up.weight.square().sum().to(loss.device)


def comparing_with_itself_in_eval(model: nn.Module, microbatch: int) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        reference = plain(model, microbatch)
    model.train()
    return (plain(model, microbatch) - reference).square()


def with_terms_by_hooks(model: nn.Module, microbatch: int) -> torch.Tensor:
    terms = []
    hooks = [
        block.register_forward_hook(lambda *given: terms.append(given[2].square().mean())) for block in model.blocks
    ]
    try:
        return plain(model, microbatch) + sum(terms)
    finally:
        for hook in hooks:
            hook.remove()


def with_hooks_in_the_first(model: nn.Module, microbatch: int) -> torch.Tensor:
    if microbatch:
        return plain(model, microbatch)
    hook = model.blocks[2].register_forward_hook(lambda *given: 2 * given[2])
    try:
        return plain(model, microbatch)
    finally:
        hook.remove()


CASES = {
    "terms of the loss in modules": (with_aux, stack_of(partial(Aux, 16))),
    "eval and dropout rates": (evaluating, partial(Stack, dropout=0.3)),
    "random numbers and context variables": (drawing, stack_of(partial(Drawing, 16))),
    "layers skipped": (skipping, Stack),
    "eval for a part of the loss": (comparing_with_itself_in_eval, partial(Stack, dropout=0.3)),
    "hooks in the first alone": (with_hooks_in_the_first, Stack),
}


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("case", CASES)
def test_each_microbatch_sees_its_own(make: Callable, case: str):
    loss, build = CASES[case]
    same_as_resident(make, two_steps(loss), build)


APART = {
    function.__name__: function
    for function in (freezing, freezing_what_streams, replacing, replacing_what_streams, with_terms_by_hooks)
}


@pytest.mark.sampled
@BOTH
@pytest.mark.parametrize("name", APART)
@as_resident()
def test_what_others_would_see_runs_one_after_another(model: nn.Module, mode, name: str) -> list[torch.Tensor]:
    run = two_steps(APART[name])
    if mode is NoMode:
        return run(model, mode)
    with pytest.warns(RuntimeWarning, match="one after another") as warned:
        found = run(model, mode)
    assert len(warned) == 1, "the first step finds out"
    return found


@BOTH
@pytest.mark.parametrize("loss", [changing, changing_what_stays])
def test_a_loss_that_changes_weights_is_refused_in_one_line(make: Callable, loss: Callable):
    model, mode = Stack(), make()
    with (
        under(mode, model) as attached,
        pytest.raises(RuntimeError, match=r"changes, freezes or replaces a weight.*in one microb"),
    ):
        two_steps(loss)(model, attached)
    # The advice works.
    same_as_resident(make, two_steps(loss, microbatches=1))


@BOTH
@as_resident()
def test_a_loss_that_uses_a_weight_on_the_host_is_refused_once(model: nn.Module, attached) -> list[torch.Tensor]:
    if attached is not NoMode:
        with pytest.raises(SideBySideError, match="run the step again") as refused, attached.step():
            attached.accumulate([partial(decaying, model, microbatch) for microbatch in range(3)])
        assert "\n" not in str(refused.value)
        model.zero_grad()
    return two_steps(decaying)(model, attached)


class Hooked(Stack):
    """Registers hooks for good in its first forward, as models of transformers do, on the blocks that come next."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks[:2]:
            hidden = block(hidden)
        if not hasattr(self, "hooked"):
            self.hooked = True
            for block in self.blocks[2:]:
                block.register_forward_hook(lambda *given: 2 * given[2])
                block.up.register_forward_pre_hook(lambda *given: given[1][0] + 1)
        for block in self.blocks[2:]:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("outside", ["resident", "stream"])
@BOTH
def test_hooks_that_a_first_forward_registers_for_good(make: Callable, outside: str):
    same_as_resident(lambda: replace(make(), outside=outside), two_steps(plain), Hooked)


@BOTH
def test_an_error_of_one_is_not_hidden_by_what_others_do_as_they_end(make: Callable):
    def loss(model: nn.Module, microbatch: int) -> torch.Tensor:
        if microbatch:
            raise ZeroDivisionError
        model.eval()
        try:
            return plain(model, microbatch)
        finally:
            model.train()

    model, mode = Stack(), make()
    with under(mode, model) as attached, pytest.raises(ZeroDivisionError), attached.step():
        attached.accumulate([partial(loss, model, microbatch) for microbatch in range(3)])


@BOTH
def test_one_microbatch_with_values_of_its_own(make: Callable):
    """`functional_call` has ended by the time of the recompute."""
    same_as_resident(make, two_steps(replacing, microbatches=1))


def test_accumulate_inside_a_loss_is_refused():
    model, mode = Stack(), ShardOffload(shards=2)

    def nested(microbatch: int) -> torch.Tensor:
        attached.accumulate([partial(plain, model, number) for number in range(2)])
        return plain(model, microbatch)

    with (
        under(mode, model) as attached,
        pytest.raises(RuntimeError, match=r"^accumulate inside a loss"),
        attached.step(),
    ):
        attached.accumulate([partial(nested, microbatch) for microbatch in range(2)])
