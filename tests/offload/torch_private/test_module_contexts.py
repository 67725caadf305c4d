"""Contexts around a module's calls: opened and closed as often as it is called, and gone when they are removed."""

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat
from torch.utils.checkpoint import checkpoint

from offload.activations.checkpointing import recompute
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.torch_private.module_contexts import (
    ModuleContexts,
    OneThread,
    OwnHook,
    WrappedForward,
    before_each_call,
    running,
    running_microbatch,
)
from tests.offload.helpers.models import Stack, stack_inputs, under

INPUTS = torch.ones(2, 4)


class Log:
    """Contexts that note when they open and close."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.events.append(f"open {name}")
        try:
            yield
        finally:
            self.events.append(f"close {name}")

    def opener(self, name: str):
        return lambda arguments, keywords: self.named(name)

    def runner(self, name: str):
        def run(forward: Callable, arguments: tuple, keywords: dict) -> object:
            with self.named(name):
                return forward(*arguments, **keywords)

        return run


@pytest.fixture
def log() -> Log:
    return Log()


class Raises(nn.Module):
    def __init__(self, error: type[BaseException]):
        super().__init__()
        self.error = error

    def forward(self, hidden):
        raise self.error


def test_a_wrapped_forward_runs_inside_its_context(log: Log):
    module = nn.Linear(4, 4)
    expected = module(INPUTS)
    wrapped = WrappedForward(module, log.runner("window"))
    assert torch.equal(module(INPUTS), expected)
    assert log.events == ["open window", "close window"]
    wrapped.remove()
    assert "forward" not in vars(module)
    module(INPUTS)
    assert len(log.events) == 2


def test_the_context_of_a_wrapped_forward_is_closed_by_an_exception(log: Log):
    module = Raises(ZeroDivisionError)
    WrappedForward(module, log.runner("window"))
    with pytest.raises(ZeroDivisionError):
        module(INPUTS)
    assert log.events == ["open window", "close window"]


def test_a_forward_of_the_modules_own_comes_back(log: Log):
    module = nn.Linear(4, 4)
    own = module.forward = lambda hidden: hidden + 1
    wrapped = WrappedForward(module, log.runner("window"))
    assert torch.equal(module(INPUTS), INPUTS + 1)
    assert vars(copy.deepcopy(module))["forward"] is own
    wrapped.remove()
    assert vars(module)["forward"] is own


def test_a_wrapper_around_a_removed_forward_stays_and_opens_nothing(log: Log):
    module = nn.Linear(4, 4)
    wrapped = WrappedForward(module, log.runner("window"))
    inner = module.forward
    module.forward = lambda hidden: inner(hidden)
    wrapped.remove()
    assert torch.equal(module(INPUTS), nn.Linear.forward(module, INPUTS))
    assert log.events == []


def test_a_recompute_opens_the_context_of_a_wrapped_forward_again_and_that_of_hooks_not(log: Log):
    module = nn.Linear(4, 4)
    WrappedForward(module, log.runner("window"))
    contexts = ModuleContexts([(module, log.opener("region"))])
    forward = module.forward
    module.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
    module(INPUTS).sum().backward()
    assert log.events[:4] == ["open region", "open window", "close window", "close region"]
    assert log.events[4:] == ["open window", "close window"]
    contexts.remove()


def test_nested_modules_have_nested_contexts(log: Log):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    contexts = ModuleContexts([(model, log.opener("model")), (model[1], log.opener("second"))])
    model(INPUTS)
    assert log.events == ["open model", "open second", "close second", "close model"]
    contexts.remove()
    model(INPUTS)
    assert len(log.events) == 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_opener_sees_the_arguments_of_the_call():
    seen = []

    @contextmanager
    def noted(arguments, keywords):
        seen.append((arguments, dict(keywords)))
        yield

    module = nn.Linear(4, 4)
    ModuleContexts([(module, noted)])
    module(INPUTS)
    module(input=INPUTS)
    assert seen == [((INPUTS,), {}), ((), {"input": INPUTS})]


def test_contexts_are_closed_by_an_exception_also_one_that_the_model_catches(log: Log):
    class Tolerant(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails, self.works = Raises(ValueError), nn.Linear(4, 4)

        def forward(self, hidden):
            try:
                return self.fails(hidden)
            except ValueError:
                return self.works(hidden)

    model = Tolerant()
    ModuleContexts([(model, log.opener("model")), (model.fails, log.opener("fails"))])
    model(INPUTS)
    assert log.events == ["open model", "open fails", "close fails", "close model"]


def test_contexts_that_an_interrupt_left_open_are_closed_by_close_open(log: Log):
    model = nn.Sequential(nn.Linear(4, 4), Raises(KeyboardInterrupt))
    contexts = ModuleContexts([(model, log.opener("model")), (model[1], log.opener("second"))])
    with pytest.raises(KeyboardInterrupt):
        model(INPUTS)
    contexts.close_open()
    assert log.events == ["open model", "open second", "close second", "close model"]
    contexts.close_open()
    assert len(log.events) == 4


def test_another_hook_that_raises_first_leaves_nothing_to_close(log: Log):
    def fail(*_):
        raise ZeroDivisionError

    module = nn.Linear(4, 4)
    module.register_forward_pre_hook(fail)
    ModuleContexts([(module, log.opener("module"))])
    with pytest.raises(ZeroDivisionError):
        module(INPUTS)
    assert log.events == []


def test_threads_have_contexts_of_their_own(log: Log):
    inside, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, hidden):
            inside.set()
            leave.wait(300)
            return hidden

    module = Waits()
    contexts = ModuleContexts([(module, log.opener("module"))])
    thread = threading.Thread(target=module, args=(INPUTS,))
    thread.start()
    inside.wait(300)
    contexts.close_open()
    assert log.events == ["open module"]
    leave.set()
    thread.join(300)
    assert log.events == ["open module", "close module"]


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["copy", "deep", "file"],
)


def keep(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def called(*_: object) -> None:
    """A hook of the user's own."""


@COPIES
def test_a_copy_of_a_module_is_a_plain_module(log: Log, copied):
    module = nn.Linear(4, 4)
    names = set(vars(module))
    number = module.register_forward_pre_hook(called).id
    found = [OwnHook(module, module.register_state_dict_pre_hook, lambda *_: log.events.append("saved"))]
    found.append(ModuleContexts([(module, log.opener("module"))]))
    found += [WrappedForward(module, log.runner("window")) for _ in range(2)]
    other = copied(module)
    assert set(vars(other)) == names
    hooks = {name: list(value) for name, value in vars(other).items() if "hooks" in name and value}
    assert hooks == {"_forward_pre_hooks": [number]}
    other(INPUTS)
    assert log.events == []
    module(INPUTS)
    assert len(log.events) == 6
    for added in reversed(found):
        added.remove()
    assert set(vars(module)) == names


@COPIES
def test_a_copy_of_a_module_has_the_forward_of_the_modules_own(log: Log, copied):
    module = nn.Linear(4, 4)
    module.forward = keep
    WrappedForward(module, log.runner("window"))
    assert vars(copied(module))["forward"] is keep


def test_a_class_that_copies_itself_gets_no_contexts_either(log: Log):
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    ModuleContexts([(module, log.opener("module"))])
    WrappedForward(module, log.runner("window"))
    other = copy.deepcopy(copy.deepcopy(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert other(INPUTS).abs().sum() > 0
    assert log.events == []


def test_the_arguments_of_a_wrapped_forward_can_be_asked_for(log: Log):
    module = nn.Linear(4, 4)
    expected = inspect.signature(module.forward)
    WrappedForward(module, log.runner("window"))
    assert inspect.signature(module.forward) == expected


def test_a_function_is_called_before_each_call_and_before_other_hooks_until_it_is_removed(log: Log):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_pre_hook(lambda *_: log.events.append("other hook"))
    remove = before_each_call([model, model[1]], lambda: log.events.append("called"))
    model(INPUTS)
    assert log.events == ["called", "called", "other hook"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model[0]))):
        twin(INPUTS)
    assert log.events.count("called") == 2
    remove()
    remove()
    model(INPUTS)
    assert log.events.count("called") == 2


def test_a_function_may_remove_itself_while_it_is_called():
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []

    def once() -> None:
        calls.append(1)
        remove()

    remove = before_each_call(model.modules(), once)
    model(INPUTS)
    assert calls == [1]


def test_observers_of_torch_ao_are_refused_where_weights_stream_or_blocks_are_computed_again():
    """Their kernels write buffers in eval(), too, and raise no version counter."""
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
    model.qconfig = get_default_qat_qconfig("fbgemm")
    prepare_qat(model.train(), inplace=True)
    for refused in (lambda: BounceLinear().footprint(model), lambda: recompute(model)):
        with pytest.raises(ValueError, match=r"^[\w.]+ is an observer of torch\.ao\.quantization, .*: take .* torchao"):
            refused()
    assert "forward" not in vars(model[0])


def test_a_microbatch_runs_in_its_thread_until_the_block_ends():
    seen = []
    assert running_microbatch() is None
    with running(3):
        assert running_microbatch() == 3
        thread = threading.Thread(target=lambda: seen.append(running_microbatch()))
        thread.start()
        thread.join(300)
        with running(4):
            assert running_microbatch() == 4
        assert running_microbatch() == 3
    assert running_microbatch() is None
    assert seen == [None]


def test_threads_take_turns_or_are_refused():
    one, inside, leave = OneThread(), threading.Event(), threading.Event()

    def stay() -> None:
        with one.turn():
            inside.set()
            leave.wait(300)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(stay)
        inside.wait(300)
        with pytest.raises(RuntimeError, match=r"^two threads run forwards of one model") as refused, one.turn():
            pass
        assert "\n" not in str(refused.value)
        with running(0), one.turn():
            """Microbatches side by side take turns by themselves."""
        leave.set()
        busy.result(300)
    with pytest.raises(ZeroDivisionError), one.turn():
        raise ZeroDivisionError
    with one.turn():
        """Free again."""


@pytest.mark.parametrize("make", [LayerStream, lambda: TensorSwap(Resident())])
def test_a_mode_refuses_a_forward_in_another_thread_during_one(make):
    model, mode, errors = Stack(), make(), []

    def in_another_thread(*_: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            errors.append(pool.submit(model, stack_inputs(0, 1)).exception())

    with under(mode, model) as attached, attached.step():
        handle = model.blocks[1].register_forward_hook(in_another_thread)
        model(stack_inputs(0, 0))
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, stack_inputs(0, 0)).result(300).sum().backward()
    assert "two threads" in str(errors[0])
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
