"""The training loop: batches, gradients by microbatch under the offload mode, one update a step."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload import Mode, l2_norm
from training.batches import Batch, examples_in, uploaded
from training.config.adapter import has_adapter
from training.config.schema import OnNonfinite
from training.errors import UserError
from training.evaluation.held_out import evaluating
from training.evaluation.reference import fill_reference
from training.parallel.ranks import RankLostError, Share, shares_of
from training.planning.advice import nonfinite_advice
from training.run.build import Job, RankJob, place_states_in_spare_vram
from training.run.recorder import Recorder
from training.runs.signals import StopRequest
from training.seeds import seed_of, seed_torch
from training.tasks.task import Task, loss_and_figures_to_train
from training.weights.adapter import warn_of_unused


class StepResult(NamedTuple):
    """The loss and the gradients' norm of one step."""

    loss: Tensor
    """float32 scalar on the device"""
    norm: float | None
    """of the gradients before clipping; None where it was not taken"""
    lr: float
    """of the first parameter group"""
    skipped: bool
    """True: the gradients were not finite, and nothing was updated"""
    figures: Sequence[Tensor] = ()
    """those that the task names, float32 scalars on the device"""


def train(job: Job) -> dict:
    """Runs the job to its last step and returns the summary, which is also in the run's directory.

    Metrics are written every `log_every` steps and after the last. If the run saves itself on signals, a signal ends it
    after the current step, and an evaluation or a sample at once; the resumed run makes that again.
    """
    config, start = job.components.config, job.start.step
    first = start + 1
    stopping = StopRequest(job.checkpoints.on_signal_after_s)
    with closing(Recorder(job)) as recorder, short_garbage_collections(), stopping as stop:
        with recorder.outside_steps():
            filled = fill_reference(job.components, job.dataset, job.ranks, lambda: stop.signal is not None)
        if not filled:
            return stop_before_first_step(job, recorder, stop)
        if lacks_observation(job, recorder, start):
            if lacks_sample(job, recorder, start):
                make_sample(job, recorder, stop, start)
            if lacks_evaluation(job, recorder, start):
                recorder.record_evaluation(start, evaluate(job, recorder, stop, start))
            if stop.signal is not None:
                return stop_before_first_step(job, recorder, stop)
        # Not before: the records, and the evaluation at the start, tell which checkpoint is the best.
        job.checkpoints.remove_leftovers(start)
        for step in range(first, config.steps + 1):
            stop.raise_again()
            batch = job.dataset.batch(step - 1)
            recorder.start_step(step, job.components.task.units_in(batch))
            with saved_if_rank_is_lost(job, recorder, stop, step - 1):
                result = run_step(job, step, batch)
            if step == first:
                place_states_in_spare_vram(job)
            if step == config.steps:
                # An error in the last update must be raised before the run counts as complete.
                job.optimizer.finish()
            recorder.end_step(step, result.skipped, result.loss)
            with saved_if_rank_is_lost(job, recorder, stop, step):
                make_sample(job, recorder, stop, step)
                evaluation = evaluate(job, recorder, stop, step)
                if step % config.log_every == 0 or step == config.steps:
                    figures = dict(zip(job.components.task.figures, result.figures, strict=True))
                    recorder.record(step, result.loss, result.norm, result.lr, evaluation, figures)
                else:
                    recorder.record_evaluation(step, evaluation)
                if save_or_stop(job, recorder, stop, step, batch):
                    return finish_stopped(job, recorder, stop, step)
        if not job.checkpoints.has(config.steps):
            job.ranks.check_equal()
        stop.settle()
    return recorder.finish(config.steps, "ok")


def lacks_evaluation(job: Job, recorder: Recorder, step: int) -> bool:
    """Tells whether an evaluation after `step` steps is due and not recorded yet."""
    return job.evaluation.due(step) and recorder.evaluated_step != step


def lacks_sample(job: Job, recorder: Recorder, step: int) -> bool:
    """Tells whether a sample after `step` steps is due and not recorded yet."""
    return job.samples.due(step) and recorder.sampled_step != step


def lacks_observation(job: Job, recorder: Recorder, step: int) -> bool:
    """Tells whether an evaluation or a sample after `step` steps is due and not recorded yet."""
    return lacks_evaluation(job, recorder, step) or lacks_sample(job, recorder, step)


def make_sample(job: Job, recorder: Recorder, stop: StopRequest, step: int) -> None:
    """Records a sample after `step` steps, before their metrics, if one is due and no signal ends it."""
    if not job.samples.due(step):
        return
    with recorder.outside_steps():
        job.ranks.finish_updates(job.optimizer)
        with job.components.mode.inference():
            sample = job.samples.sample(job.components.model, job.streams.device, lambda: stop.signal is not None)
    if sample is not None:
        recorder.record_sample(step, sample)


def evaluate(job: Job, recorder: Recorder, stop: StopRequest, step: int) -> dict[str, float]:
    """Returns the metrics of the evaluation after `step` steps; none if none is due, or a signal ends it."""
    if not job.evaluation.due(step):
        return {}
    with recorder.outside_steps():
        # The mode waits for the updates of units that stream, and for no others.
        job.ranks.finish_updates(job.optimizer)
        model, ranks = job.components.model, job.ranks
        with job.components.inference():
            return job.evaluation.metrics(model, job.streams, lambda: stop.signal is not None, ranks)


@contextmanager
def short_garbage_collections() -> Iterator[None]:
    """Leaves the objects that exist now out of Python's garbage collections inside the block.

    A full collection looks at every object, those of all imported modules too, and stops the host for 150 ms.
    A caller that has left its own objects out keeps them out: `unfreeze` would bring them back.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_step(job: Job, step: int, batch: Batch) -> StepResult:
    """Computes the gradients of the mean loss over `batch`, clips them and updates the parameters.

    The host waits for the device once, for the norm of the gradients, because the update depends on it.
    """
    config, task = job.components.config, job.components.task
    prepared = task.prepared(batch, seed_of(config.seed, step))
    shares = shares_of(prepared, job.ranks.count, config.microbatches, task.weight)
    if not shares[0].total:
        names = names_of(job.dataset, step, config.batch_size, examples_in(batch))
        raise UserError(
            f"step {step}: nothing in its batch is trained on ({names}): leave such examples out of the data, or take a"
            " larger batch_size"
        )
    return run_share(job, step, job.ranks.hand_out(step, shares))


def names_of(dataset: object, step: int, batch_size: int, examples: int) -> str:
    """Says which of the dataset's examples are in the batch of `step`: by their names, or numbers."""
    if hasattr(dataset, "names"):
        return dataset.names(step - 1)
    first = (step - 1) * batch_size
    return f"examples {first} to {first + examples - 1} of the run, from 0"


def run_share(job: RankJob, step: int, share: Share) -> StepResult:
    """Does `run_step` for this rank's share of the batch. All ranks get the same result, and the same parameters."""
    components, ranks = job.components, job.ranks
    config, model, mode, task = components.config, components.model, components.mode, components.task
    # Before the step: inside it, the batch would queue behind the first weights on the bus.
    share = replace(share, parts=tuple(uploaded(part, components.device) for part in share.parts))
    if task.looks_ahead:
        ahead = components if components.reference is None else components.reference
        share = replace(share, parts=looked_ahead(task, ahead.mode, ahead.model, share.parts))
    # Norms of the gradients of one rank say nothing about those of their sums, which ranks that share weights make in
    # the step.
    with mode.step(norms=ranks.count == 1 or ranks.shares_homes):
        losses = forward_backward(task, mode, model, share, config.seed, step)
    # After the step, which ranks that share weights end together: one that has taken another way is found there.
    loss, *figures = ranks.total(losses).reshape(-1)
    # What is drawn between steps depends neither on the last microbatch nor on the number of ranks.
    seed_torch(seed_of(config.seed, step))
    if mode.owns_update:
        lr = job.schedule.get_last_lr()[0]
        # In steps that are timed the norm may cost a pass over host memory.
        norm = job.optimizer.step(measure=step <= config.warmup_steps)
        job.schedule.step()
        return StepResult(loss, norm, lr, skipped=False, figures=figures)
    known = ranks.reduce(model, mode.gradient_norms(), mode.summed_parameters())
    if has_adapter(config) and isinstance(job, Job) and step == job.start.step + 1:
        warn_of_unused(model)
    norm = ranks.agreed(gradient_norm(model, known))
    lr = job.schedule.get_last_lr()[0]
    finite = math.isfinite(norm)
    if finite:
        job.optimizer.step(scale=clip_scale(norm, config.clip_norm))
    else:
        skip_or_raise(job, step, norm)
    job.optimizer.zero_grad()
    job.schedule.step()
    return StepResult(loss, norm, lr, not finite, figures)


def looked_ahead(task: Task, mode: Mode, model: nn.Module, parts: Sequence[Batch]) -> tuple[Batch, ...]:
    """Returns the microbatches with what the task wants of the model before the step.

    `mode` has `model`: the one that trains, or its reference. The host waits for no update but those of its units that
    stream. Under a mode that streams it waits for the last copy in, as at the end of a step.
    """
    with mode.inference(), evaluating(model):
        return tuple(task.ahead(model, part) for part in parts)


def save_or_stop(job: Job, recorder: Recorder, stop: StopRequest, step: int, batch: Batch) -> bool:
    """Saves the run after a step if that is due or a signal asked it to stop; returns True if the run stops here."""
    last = step == job.components.config.steps
    if job.checkpoints.due(step) or stop.signal is not None:
        job.ranks.check_equal()
    saved = job.checkpoints.due(step) and recorder.save(step, batch, required=last)
    if stop.signal is None or (last and not lacks_observation(job, recorder, step)):
        return False
    if not saved:
        recorder.save(step, batch, required=True)
    return True


@contextmanager
def saved_if_rank_is_lost(job: Job, recorder: Recorder, stop: StopRequest, step: int) -> Iterator[None]:
    """Saves the run after `step`, the last step that is done, if the block loses a rank, where a signal would save it.

    The error is raised after that.
    """
    try:
        yield
    except RankLostError:
        job.ranks.abandon()
        # The rank that is lost may have updated a part of what all share.
        whole = not job.ranks.shares_homes
        if whole and stop.saves() and step > job.start.step and not job.checkpoints.has(step):
            recorder.save(step, job.dataset.batch(step - 1), required=False)
        raise


def stop_before_first_step(job: Job, recorder: Recorder, stop: StopRequest) -> dict:
    """Ends a run that a signal stopped before its first step; saves it, if it has no checkpoint of where it starts."""
    step = job.start.step
    if not job.checkpoints.has(step):
        recorder.save(step, job.dataset.batch(max(step - 1, 0)), required=True)
    return finish_stopped(job, recorder, stop, step)


def finish_stopped(job: Job, recorder: Recorder, stop: StopRequest, step: int) -> dict:
    """Ends a run that was saved after `step`; returns its summary."""
    stop.settle()
    return recorder.finish(step, "stopped", f"{stop.signal}: resume with resume={job.checkpoints.latest()}")


def skip_or_raise(job: RankJob, step: int, norm: float) -> None:
    """Handles gradients that are not finite as `on_nonfinite` says. Raises UserError if that is to stop the run."""
    config = job.components.config
    # A foreign system that computes NaN shows it in its curve.
    if config.on_nonfinite == OnNonfinite.stop and not job.components.mode.foreign:
        advice = nonfinite_advice(config)
        raise UserError(f"step {step}: the gradient norm is {norm}, and on_nonfinite=stop: take {advice}")
    job.optimizer.skip()


def forward_backward(task: Task, mode: Mode, model: nn.Module, share: Share, seed: int, step: int) -> Tensor:
    """Computes the gradients of the step's mean loss as far as they come from `share`, on the model's device.

    Each microbatch is weighted by its part of the step's weight, so that the sum does not depend on the split, even if
    their weights differ; `mode` chooses their order. Each one seeds the random numbers of its dropout by its position
    in the step, so that they depend neither on that order nor on the number of ranks.
    Returns the microbatches' parts of the step's loss, float32 [microbatches]; where the task has figures too,
    [microbatches, 1 + figures], the loss first.
    """
    shown: dict[int, Tensor] = {}

    def loss_of(index: int, part: Batch) -> Tensor:
        seed_torch(seed_of(seed, step, share.first + index))
        weight = share.weights[index] / share.total
        loss, figures = loss_and_figures_to_train(task, model, part)
        if figures:
            shown[index] = torch.stack([*figures]).float() * weight
        return loss * weight

    losses = mode.accumulate([partial(loss_of, index, part) for index, part in enumerate(share.parts)])
    losses = torch.stack([loss.float() for loss in losses])
    if not shown:
        return losses
    return torch.cat([losses[:, None], torch.stack([shown[index] for index in range(len(share.parts))])], 1)


def gradient_norm(model: nn.Module, known: Mapping[nn.Parameter, Tensor]) -> float:
    """Returns the L2 norm of all gradients; `known` has the norms that were taken already, by parameter.

    Gradients that were released are in `known` alone. The norm is computed in float32 for gradients of any dtype
    (torch's own function uses theirs). Waits for the device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None or parameter in known]
    norms = [known.get(parameter) for parameter in parameters]
    norms = [
        l2_norm(parameter.grad) if norm is None else norm for parameter, norm in zip(parameters, norms, strict=True)
    ]
    # Summed on the device if there is one, so that every mode gets the same sum.
    if not norms:
        return 0.0
    device = next((norm.device for norm in norms if norm.is_cuda), torch.device("cpu"))
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms])).item()


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Returns the factor that scales gradients of norm `norm` down to `clip_norm`, or 1 if they are smaller."""
    return 1.0 if clip_norm is None else min(clip_norm / (norm + 1e-6), 1.0)
