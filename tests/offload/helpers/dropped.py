"""Modes that are dropped in mid-step without detach, as in a notebook after an exception."""

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.modes.weight_mode import WeightMode
from offload.streams.registry import Streams
from tests.offload.helpers.models import Stack, assert_same, stack_inputs, train
from tests.offload.helpers.modes import mode_classes, small
from tests.offload.helpers.updates import one_step

WEIGHT_MODES = [name for name, found in mode_classes().items() if issubclass(found, WeightMode)]
# Makers of every mode, and of tensor_swap over every mode that streams weights.
MODES: dict[str, Callable[[], Mode]] = {name: lambda name=name: small(name) for name in mode_classes()} | {
    f"tensor_swap over {name}": lambda name=name: TensorSwap(small(name)) for name in WEIGHT_MODES
}
# Modes that page-lock memory of arenas.
LOCKING = [name for name in MODES if name not in ("none", "save_on_cpu")]


class StepError(Exception):
    """The mistake of a user."""


def fail(*_: object) -> None:
    raise StepError


def made_model() -> nn.Module:
    torch.manual_seed(0)
    return Stack(width=64, dropout=0.1)


def failed_attempt(make: Callable[[], Mode], where: str, streams: Streams) -> tuple[StepError, int]:
    """Makes one step, and one that fails in its "forward" or its "backward". Drops model and mode without detach.

    Returns the exception, whose traceback keeps both alive, and the bytes that the mode had page-locked.
    """

    def inputs(step: int, microbatch: int) -> torch.Tensor:
        return stack_inputs(step, microbatch, streams.device)

    def failing(microbatch: int) -> torch.Tensor:
        if where == "forward":
            model.blocks[2].register_forward_hook(fail)
        hidden = model(inputs(1, microbatch))
        hidden.register_hook(fail)
        return hidden.square().mean()

    model, mode, locked = made_model(), make(), 0
    microbatches = 2 if mode.footprint(model).layer_major else 1
    try:
        attached = mode.attach(model, streams)
        one_step(model, attached, microbatches=microbatches, inputs=inputs)
        locked = attached.counters().host_pinned_bytes
        with attached.step():
            attached.accumulate([partial(failing, microbatch) for microbatch in range(microbatches)])
    except StepError as error:
        return error, locked
    raise AssertionError("the step did not fail")


def collect() -> None:
    """Collects garbage. Cycles through tensors take two rounds."""
    gc.collect()
    gc.collect()


def assert_alike(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Fails unless the losses and gradients of the first step are equal within rounding.

    Not later ones, because AdamW makes whole steps of the least difference between gradients near zero.
    """
    first_step = 2 + len(list(made_model().parameters()))
    for one, other in zip(left[:first_step], right[:first_step], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def check_attempts(name: str, where: str, streams: Streams, attempts: int) -> Iterator[int]:
    """Checks that a mode trains as the resident model does after each failed attempt.

    Yields the bytes that a failed attempt had page-locked, while its traceback is kept as a notebook keeps the last
    one, and 0 when nothing of the attempt is left. Fails on a warning: memory that could not be page-locked.
    """
    device = streams.device

    def inputs(step: int, microbatch: int) -> torch.Tensor:
        return stack_inputs(step, microbatch, device)

    # torch's save_on_cpu gives views back contiguous, for which a GPU takes other kernels, with other last bits.
    same = assert_alike if name == "save_on_cpu" and device.type == "cuda" else assert_same
    expected = train(made_model(), Resident(), inputs, steps=2, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(attempts):
            error, locked = failed_attempt(MODES[name], where, streams)
            sys.last_value = error
            del error
            same(train(made_model(), MODES[name](), inputs, steps=2, device=device), expected)
            yield locked
            del sys.last_value
            collect()
            yield 0
            same(train(made_model(), MODES[name](), inputs, steps=2, device=device), expected)
