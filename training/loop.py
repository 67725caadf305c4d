"""The training loop: batches in, gradients by microbatch under the offload mode, one update a step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import closing
from functools import partial

import torch
from torch import Tensor, nn

from offload.runtime.transfer import upload
from training.build import Job
from training.config.construct import keys_under
from training.config.schema import OnNonfinite
from training.errors import UserError
from training.planning.oom_advice import device_memory_told
from training.recorder import Recorder
from training.runs.signals import StopRequest


def train(job: Job) -> dict:
    """Runs the job to its last step and returns the summary, which is also in the run's directory.

    Metrics are written every `log_every` steps and at the last. The host waits for the device once a step, to know
    the norm of the gradients before the update. Where the run saves itself on signals, one ends it after its step.
    """
    config = job.config
    recorder = Recorder(job)
    job.model.train()
    told = device_memory_told(config, job.plan)
    with closing(recorder), told, keys_under("offload"), StopRequest(enabled=job.checkpoints.on_signal) as stop:
        for step in range(job.start.step + 1, config.steps + 1):
            tokens = job.dataset.batch(step - 1)
            recorder.start_step(step)
            # Before the step: inside, it would queue behind the first weights on the bus.
            batch = upload(tokens, job.device)
            with job.mode.step(norms=True):
                loss = forward_backward(job.mode, job.model, batch, config.microbatches, config.seed, step)
            logged = step % config.log_every == 0 or step == config.steps
            norm = gradient_norm(job.model, job.mode.gradient_norms())
            (lr,) = job.schedule.get_last_lr()[:1]
            if math.isfinite(norm):
                job.optimizer.step(scale=clip_scale(norm, config.clip_norm))
            else:
                recorder.skipped_steps += 1
                skip_or_stop(job, step, norm)
            job.optimizer.zero_grad()
            job.schedule.step()
            if step == job.start.step + 1:
                job.use_spare_vram()
            if step == config.steps:
                # What went wrong in the last update is this run's error too.
                job.optimizer.finish()
            recorder.end_step()
            if logged:
                recorder.record(step, loss, norm, lr)
            if save_or_stop(job, recorder, stop, step, tokens):
                stop.settle()
                return recorder.finish(step, "stopped", f"{stop.signal}: go on with resume={job.checkpoints.latest()}")
        stop.settle()
    return recorder.finish(config.steps, "ok")


def save_or_stop(job: Job, recorder: Recorder, stop: StopRequest, step: int, tokens: Tensor) -> bool:
    """After a step: saves the run where that is due, or where it was asked to stop; returns whether it stops here."""
    last = step == job.config.steps
    saved = job.checkpoints.due(step) and recorder.save(step, tokens, required=last)
    if stop.signal is None or last:
        return False
    if not saved:
        recorder.save(step, tokens, required=True)
    return True


def skip_or_stop(job: Job, step: int, norm: float) -> None:
    """What `on_nonfinite` asks for where gradients are not finite. Raises UserError to end the run."""
    if job.config.on_nonfinite == OnNonfinite.stop:
        raise UserError(
            f"step {step}: the gradient norm is {norm}, and on_nonfinite=stop: take a lower optimizer.lr, warm up"
            " (schedule.warmup), set clip_norm, or leave such steps out with on_nonfinite=skip"
        )
    job.optimizer.skip()


def forward_backward(mode, model: nn.Module, batch: Tensor, microbatches: int, seed: int, step: int) -> Tensor:
    """Gradients of the mean loss over `batch` (int64 [sequences, seq_len + 1], on the model's device).

    It is computed in `microbatches`, each weighing as its share of the sequences, so the sum does not depend on how
    the batch is split, also where `microbatches` does not divide it; `mode` says in which order they go. Each draws
    its random numbers (dropout) from a seed of its own, so that they do not depend on that order either. Returns the
    loss, a float32 scalar.
    """

    def loss_of(index: int, tokens: Tensor) -> Tensor:
        torch.manual_seed(microbatch_seed(seed, step, index))
        return model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / len(batch))

    parts = batch.tensor_split(microbatches)
    losses = mode.accumulate([partial(loss_of, index, tokens) for index, tokens in enumerate(parts)])
    return torch.stack([loss.float() for loss in losses]).sum()


def microbatch_seed(seed: int, step: int, index: int) -> int:
    """A seed for the random numbers of one microbatch: the same in every run, another for every microbatch."""
    digest = hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def gradient_norm(model: nn.Module, known: Mapping[nn.Parameter, Tensor]) -> float:
    """The L2 norm of all gradients, of which the norms of some may be `known`.

    It is float32 whatever the gradients are (torch's own is as coarse as they are). Waits for the device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = [known.get(parameter) for parameter in parameters]
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float32) if norm is None else norm
        for parameter, norm in zip(parameters, norms, strict=True)
    ]
    # On the device where there is one, so that the sum is made alike in every mode.
    device = next((norm.device for norm in norms if norm.is_cuda), torch.device("cpu"))
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])).item()


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """What gradients of that norm are to be multiplied with so that it is at most `clip_norm`."""
    return 1.0 if clip_norm is None else min(clip_norm / (norm + 1e-6), 1.0)
