"""A second mode for a model that has one, and an attach that fails: both leave everything as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import Stack
from tests.offload.helpers.user_code import (
    EVERY_MODE_OR_NONE,
    MODES,
    RESIDENT_MODES,
    NoMode,
    alike,
    as_resident,
    evaluate,
    train_step,
    under,
)

pytestmark = pytest.mark.usefixtures("device")

EVERY = MODES | RESIDENT_MODES


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("second", EVERY)
@pytest.mark.sampled
@as_resident()
def test_a_second_mode_is_refused_and_the_first_goes_on(model: nn.Module, mode, second: str) -> list[torch.Tensor]:
    seen = [train_step(model, mode)]
    if mode is not NoMode:
        for other in (model, model.blocks, model.blocks[0], nn.ModuleList([model])):
            with (
                pytest.raises(RuntimeError, match=r"is attached already, to the mode .*: detach") as refused,
                under(EVERY[second](), other),
            ):
                pass
            assert "\n" not in str(refused.value)
    return [*seen, train_step(model, mode, 1), evaluate(model)]


@EVERY_MODE_OR_NONE
def test_detached_and_attached_to_another_mode(make: Callable, device: str):
    model, twin = Stack(), Stack()
    twin.load_state_dict(model.state_dict())
    twin.to(device)
    for step, other in enumerate((make(), LayerStream(), make())):
        with under(other, model) as attached:
            assert alike(train_step(model, attached, step), train_step(twin, NoMode, step))
    assert all(alike(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def what_is_there(model: nn.Module) -> list:
    """Everything that a mode might change in a model and leave behind."""
    modules = [{**vars(module)} for module in model.modules()]
    plain = [{name: value for name, value in found.items() if not isinstance(value, dict)} for found in modules]
    hooks = [{name: dict(value) for name, value in found.items() if isinstance(value, dict)} for found in modules]
    return [plain, hooks, [(id(p), p.device) for p in (*model.parameters(), *model.buffers())]]


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("fails_at", range(9))
@pytest.mark.sampled
def test_an_attach_that_fails_leaves_the_model_as_it_was(
    make: Callable, on_meta: bool, fails_at: int, monkeypatch: pytest.MonkeyPatch
):
    """A host without memory for the later blocks."""
    allocate, calls = HostArena.allocate, []

    def refuse(arena: HostArena, nbytes: int, name: str):
        calls.append(name)
        if len(calls) > fails_at:
            raise MemoryError("no more")
        return allocate(arena, nbytes, name)

    with torch.device("meta" if on_meta else "cpu"):
        model = Stack()
    values = None if on_meta else [p.clone() for p in model.parameters()]
    before = what_is_there(model)
    monkeypatch.setattr(HostArena, "allocate", refuse)
    mode = make()
    try:
        with under(mode, model):
            pass
        assert len(calls) <= fails_at
    except MemoryError:
        assert what_is_there(model) == before
        assert on_meta or all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    monkeypatch.undo()
    with under(mode, model) as attached:
        assert not any(p.is_meta for p in model.parameters())
        if on_meta:
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.1, 0.1)
        train_step(model, attached)


def test_an_attach_that_fails_when_blocks_are_wrapped(monkeypatch: pytest.MonkeyPatch):
    def fail(blocks) -> None:
        raise ZeroDivisionError

    model, mode = Stack(), ShardOffload(shards=2)
    before = what_is_there(model)
    monkeypatch.setattr("offload.modes.shard_offload.recompute", fail)
    with pytest.raises(ZeroDivisionError), under(mode, model):
        pass
    assert what_is_there(model) == before
    monkeypatch.undo()
    with under(mode, model) as attached:
        train_step(model, attached)


@EVERY_MODE_OR_NONE
@as_resident()
def test_detach_inside_a_step_is_refused_and_changes_nothing(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        if attached is not NoMode and type(attached) is not Attached:
            with pytest.raises(RuntimeError, match="detach inside a step: close the step first"):
                attached.detach()
    return [train_step(model, attached), evaluate(model)]
