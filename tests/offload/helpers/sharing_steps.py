"""Steps of sharers whose updates may begin before the norm of the gradients is known."""

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached, AttachOptions
from offload.optimizer.adamw import HostAdamW
from offload.speculation.trials import Speculation
from offload.streams.stream_checker import CheckedStreams
from offload.streams.transfer import Counters
from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.shared_training import sum_rest
from tests.offload.helpers.sharers import ThreadSharers
from tests.offload.helpers.updates import host_adamw, states_of
from training.run.loop import clip_scale, gradient_norm

PLENTY = 1 << 24

Change = Callable[[int, int, Tensor], Tensor]
"""returns another loss for a step and a microbatch"""


def unchanged(step: int, microbatch: int, loss: Tensor) -> Tensor:
    return loss


@dataclass
class Sharer:
    """A thread that trains its copy of a model, of which what streams is shared."""

    sharers: ThreadSharers
    model: nn.Module
    attached: Attached
    optimizer: HostAdamW
    microbatches: int
    clip_norm: float | None
    losses: list[Tensor] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def backward(self, step: int, change: Change = unchanged, waits: bool = True) -> None:
        """Computes the gradients of this sharer's microbatches, whose losses `change` may change.

        `waits`: returns when the worker has made what was offered, so that it does not depend on its pace.
        """
        count = self.sharers.count * self.sharers.hosts * self.microbatches

        def loss_of(index: int) -> Tensor:
            microbatch = self.sharers.number * self.microbatches + index
            given = stack_inputs(step, microbatch).to(next(self.model.parameters()).dtype)
            return change(step, microbatch, self.model(given).float().square().mean() / count)

        with self.attached.step(norms=True):
            self.losses += self.attached.accumulate([functools.partial(loss_of, i) for i in range(self.microbatches)])
        if waits:
            self.wait_for_worker()

    def wait_for_worker(self) -> None:
        overlap = getattr(self.attached, "_overlap", None)
        while overlap is not None and overlap._worker.is_busy:
            time.sleep(0.0005)

    def update(self, step: int) -> float:
        """Sums what is not summed yet, and ends the step as the loop does; returns the norm."""
        sum_rest(self.model, self.attached, self.sharers)
        norm = gradient_norm(self.model, self.attached.gradient_norms())
        if math.isfinite(norm):
            self.optimizer.step(scale=clip_scale(norm, self.clip_norm))
        else:
            self.optimizer.skip()
            self.skipped.append(step)
        self.optimizer.zero_grad()
        return norm

    def result(self) -> list[Tensor]:
        """Returns copies of states and weights, when the updates of all sharers are done."""
        self.optimizer.finish()
        self.optimizer.states.bring_home()
        self.sharers.laid_down(None)
        found = self.tensors()
        self.sharers.laid_down(None)
        return found

    def tensors(self) -> list[Tensor]:
        """Returns copies of states and weights, after this sharer's own updates."""
        return states_of(self.optimizer) + [tensor.detach().clone() for tensor in self.model.state_dict().values()]

    @property
    def counters(self) -> Counters:
        return self.attached.counters()


@contextmanager
def sharing(
    sharers: ThreadSharers,
    model: nn.Module,
    mode: object | None = None,
    *,
    clip_norm: float | None = None,
    microbatches: int = 1,
    device_share: int = 0,
    undo_bytes: int = PLENTY,
    **options,
) -> Iterator[Sharer]:
    """Attaches a copy of `model` to `mode` for the length of the block; yields the sharer that trains it."""
    model, mode = copy.deepcopy(model), mode or LayerStream(slots=2)
    attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
    optimizer = host_adamw(model, **{"speculate": "on"} | options)
    limit = math.inf if clip_norm is None else clip_norm
    attached.overlap(optimizer, False, device_share, Speculation(limit, undo_bytes))
    optimizer.allocate()
    yield Sharer(sharers, model, attached, optimizer, microbatches, clip_norm)
    # Others may still read what is shared.
    sharers.laid_down(None)
    attached.detach()
