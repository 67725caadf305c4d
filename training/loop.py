"""The training loop: batches, gradients by microbatch under the offload mode, one update a step."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.modes.mode import Mode
from offload.runtime.transfer import upload
from training.build import Job, place_states_in_spare_vram
from training.config.schema import OnNonfinite
from training.errors import UserError
from training.recorder import Recorder
from training.runs.signals import StopRequest


class StepResult(NamedTuple):
    """The loss and the gradients' norm of one step."""

    loss: Tensor
    """float32 scalar on the device"""
    norm: float
    """of the gradients before clipping"""
    lr: float
    """of the first parameter group"""
    skipped: bool
    """True: the gradients were not finite, and nothing was updated"""


def train(job: Job) -> dict:
    """Runs the job to its last step and returns the summary, which is also in the run's directory.

    Metrics are written every `log_every` steps and after the last. If the run saves itself on signals, a signal ends it
    after the current step.
    """
    config = job.components.config
    first = job.start.step + 1
    stopping = StopRequest(enabled=job.checkpoints.on_signal)
    with closing(Recorder(job)) as recorder, short_garbage_collections(), stopping as stop:
        for step in range(first, config.steps + 1):
            tokens = job.dataset.batch(step - 1)
            recorder.start_step(step)
            result = run_step(job, step, tokens)
            if step == first:
                place_states_in_spare_vram(job)
            if step == config.steps:
                # An error in the last update must be raised before the run counts as complete.
                job.optimizer.finish()
            recorder.end_step(result.skipped)
            if step % config.log_every == 0 or step == config.steps:
                recorder.record(step, result.loss, result.norm, result.lr)
            if save_or_stop(job, recorder, stop, step, tokens):
                stop.settle()
                reason = f"{stop.signal}: resume with resume={job.checkpoints.latest()}"
                return recorder.finish(step, "stopped", reason)
        stop.settle()
    return recorder.finish(config.steps, "ok")


@contextmanager
def short_garbage_collections() -> Iterator[None]:
    """Leaves the objects that exist now out of Python's garbage collections inside the block.

    A full collection looks at every object, those of all imported modules too, and stops the host for 150 ms.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_step(job: Job, step: int, tokens: Tensor) -> StepResult:
    """Computes the gradients of the batch `tokens`, clips them and updates the parameters.

    The host waits for the device once, for the norm of the gradients, because the update depends on it.
    """
    components = job.components
    config, model, mode = components.config, components.model, components.mode
    # Before the step: inside it, the batch would queue behind the first weights on the bus.
    batch = upload(tokens, components.device)
    with mode.step(norms=True):
        loss = forward_backward(mode, model, batch, config.microbatches, config.seed, step)
    norm = gradient_norm(model, mode.gradient_norms())
    lr = job.schedule.get_last_lr()[0]
    finite = math.isfinite(norm)
    if finite:
        job.optimizer.step(scale=clip_scale(norm, config.clip_norm))
    else:
        skip_or_raise(job, step, norm)
    job.optimizer.zero_grad()
    job.schedule.step()
    return StepResult(loss, norm, lr, skipped=not finite)


def save_or_stop(job: Job, recorder: Recorder, stop: StopRequest, step: int, tokens: Tensor) -> bool:
    """After a step: saves the run if that is due or a signal asked it to stop; returns True if the run stops here."""
    last = step == job.components.config.steps
    saved = job.checkpoints.due(step) and recorder.save(step, tokens, required=last)
    if stop.signal is None or last:
        return False
    if not saved:
        recorder.save(step, tokens, required=True)
    return True


def skip_or_raise(job: Job, step: int, norm: float) -> None:
    """Handles gradients that are not finite as `on_nonfinite` says. Raises UserError if that is to stop the run."""
    if job.components.config.on_nonfinite == OnNonfinite.stop:
        raise UserError(
            f"step {step}: the gradient norm is {norm}, and on_nonfinite=stop: take a lower optimizer.lr, warm up"
            " (schedule.warmup), set clip_norm, or skip such steps with on_nonfinite=skip"
        )
    job.optimizer.skip()


def forward_backward(mode: Mode, model: nn.Module, batch: Tensor, microbatches: int, seed: int, step: int) -> Tensor:
    """Computes the gradients of the mean loss over `batch` (int64 [sequences, seq_len + 1], on the model's device).

    The batch is split into `microbatches`, each weighted by its share of the sequences, so that the sum does not depend
    on the split, even if the sizes differ; `mode` chooses their order. Each one seeds the random numbers of its dropout
    anew, so that they do not depend on that order either. Returns the loss, a float32 scalar.
    """

    def loss_of(index: int, tokens: Tensor) -> Tensor:
        torch.manual_seed(microbatch_seed(seed, step, index))
        return model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / len(batch))

    parts = batch.tensor_split(microbatches)
    losses = mode.accumulate([partial(loss_of, index, tokens) for index, tokens in enumerate(parts)])
    return torch.stack([loss.float() for loss in losses]).sum()


def microbatch_seed(seed: int, step: int, index: int) -> int:
    """Returns the seed of one microbatch: the same in every run of `seed`, different for every step and microbatch."""
    digest = hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def gradient_norm(model: nn.Module, known: Mapping[nn.Parameter, Tensor]) -> float:
    """Returns the L2 norm of all gradients; `known` has the norms that were taken already, by parameter.

    It is computed in float32 for gradients of any dtype (torch's own function uses theirs). Waits for the device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [known.get(parameter) for parameter in parameters]
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) if norm is None else norm
        for parameter, norm in zip(parameters, norms, strict=True)
    ]
    # Summed on the device if there is one, so that every mode gets the same sum.
    device = next((norm.device for norm in norms if norm.is_cuda), torch.device("cpu"))
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])).item()


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Returns the factor that scales gradients of norm `norm` down to `clip_norm`, or 1 if they are smaller."""
    return 1.0 if clip_norm is None else min(clip_norm / (norm + 1e-6), 1.0)
