"""The training loop: batches, gradients by microbatch under the offload mode, one update a step."""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload import Attached, l2_norm
from training.batches import Batch, examples_in, nonfinite_in, refuse_padding, uploaded
from training.config.adapter import has_adapter
from training.config.schema import OnNonfinite, due
from training.errors import UserError
from training.evaluation.held_out import evaluating
from training.evaluation.reference import fill_reference
from training.metrics.routers import forward_of
from training.parallel.ranks import RankLostError, Share, shares_of
from training.parallel.sequence import shares_of_rows
from training.planning.advice import nonfinite_advice
from training.run.build import Job, RankJob, place_states_in_spare_vram
from training.run.recorder import Recorder
from training.runs.signals import StopRequest
from training.seeds import seed_of, seed_torch
from training.tasks.task import Task, loss_and_figures_to_train
from training.weights.adapter import warn_of_unused
from training.weights.files import ModelWeights, nonfinite_weight


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

    After a signal, a run that saves itself finishes its current step, saves and ends. It breaks off an evaluation or a
    sample at once; the resumed run makes that again.
    """
    stopping = StopRequest(job.checkpoints.on_signal_after_s)
    with closing(Recorder(job)) as recorder, short_garbage_collections(), stopping as stop:
        return Loop(job, recorder, stop).run()


class Loop:
    """The steps of a job, with what is sampled, evaluated, recorded and saved between them."""

    def __init__(self, job: Job, recorder: Recorder, stop: StopRequest):
        self._job, self._recorder, self._stop = job, recorder, stop
        self._config = job.components.config

    def run(self) -> dict:
        """Runs to the last step, or until a signal; returns the summary."""
        job, recorder, config, start = self._job, self._recorder, self._config, self._job.start.step
        if not self._before_first_step():
            if not job.checkpoints.has(start):
                recorder.save(start, job.dataset.batch(max(start - 1, 0)), required=True)
            return self._stopped(start)
        # Not before: the records, and the evaluation at the start, tell which checkpoint is the best.
        job.checkpoints.remove_leftovers(start)
        for step in range(start + 1, config.steps + 1):
            self._stop.raise_again()
            # A step lasts as long as the making of its batch, too.
            recorder.start_step(step)
            batch = job.dataset.batch(step - 1)
            with self._saved_if_rank_is_lost(step - 1):
                result = run_step(job, step, batch)
                self._average(step)
            if step == start + 1:
                place_states_in_spare_vram(job)
            if step == config.steps:
                # An error in the last update must be raised before the run counts as complete.
                job.optimizer.finish()
            recorder.end_step(step, job.components.task.units_in(batch), result.skipped, result.loss)
            with self._saved_if_rank_is_lost(step):
                self._sample(step)
                evaluation = self._evaluate(step)
                if due(config.log_every, step, config.steps):
                    figures = dict(zip(job.components.task.figures, result.figures, strict=True))
                    recorder.record(step, result.loss, result.norm, result.lr, evaluation, figures)
                else:
                    recorder.record_evaluation(step, evaluation)
                if self._save_or_stop(step, batch):
                    return self._stopped(step)
        if not job.checkpoints.has(config.steps):
            job.ranks.check_equal(saves=False)
        self._stop.settle()
        return recorder.finish(config.steps, "ok")

    def _before_first_step(self) -> bool:
        """Makes what is due before the first step and not recorded yet; returns False if a signal ended it."""
        job, start = self._job, self._job.start.step
        with self._recorder.outside_steps():
            if not fill_reference(job.components, job.attached.trained, job.dataset, job.ranks, self._is_stopped):
                return False
        if not self._lacks_observation(start):
            return True
        if self._lacks_sample(start):
            self._sample(start)
        if self._lacks_evaluation(start):
            self._recorder.record_evaluation(start, self._evaluate(start))
        return not self._is_stopped()

    def _is_stopped(self) -> bool:
        return self._stop.signal is not None

    def _lacks_evaluation(self, step: int) -> bool:
        """Tells whether an evaluation after `step` steps is due and not recorded yet."""
        return self._job.evaluation.due(step) and self._recorder.evaluated_step != step

    def _lacks_sample(self, step: int) -> bool:
        return self._job.samples.due(step) and self._recorder.sampled_step != step

    def _lacks_observation(self, step: int) -> bool:
        return self._lacks_evaluation(step) or self._lacks_sample(step)

    def _average(self, step: int) -> None:
        """Averages the weights after `step`, if the run does that: each behind its own update, beside the next step."""
        job = self._job
        if job.averages is None:
            return
        if job.ranks.count == 1:
            job.averages.update(step, job.optimizer.follow)
        else:
            # Other ranks update some of what this one averages.
            job.ranks.finish_updates(job.optimizer)
            job.averages.update(step)

    def _averaged(self) -> AbstractContextManager[None]:
        """Gives the model its averages inside the block, if there are any; no update is under way."""
        return nullcontext() if self._job.averages is None else self._job.averages.in_use()

    def _sample(self, step: int) -> None:
        """Records a sample after `step` steps, before their metrics, if one is due and no signal ends it."""
        job = self._job
        if not job.samples.due(step):
            return
        with self._recorder.outside_steps():
            job.ranks.finish_updates(job.optimizer)
            with self._averaged(), job.attached.trained.inference():
                sample = job.samples.sample(job.components.model, job.streams.device, self._is_stopped)
        if sample is not None:
            self._recorder.record_sample(step, sample)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Returns the metrics of the evaluation after `step` steps; none if none is due, or a signal ends it."""
        job = self._job
        if not job.evaluation.due(step):
            return {}
        with self._recorder.outside_steps():
            # The mode waits for the updates of units that stream, and for no others.
            job.ranks.finish_updates(job.optimizer)
            with self._averaged(), job.attached.inference():
                # The other ranks have no averages.
                alone = job.averages is not None
                return job.evaluation.metrics(job.components.model, job.streams, self._is_stopped, job.ranks, alone)

    def _save_or_stop(self, step: int, batch: Batch) -> bool:
        """Saves the run after a step if that is due or a signal asked it to stop; returns True if the run stops."""
        job, last = self._job, step == self._config.steps
        saves = job.checkpoints.due(step) or self._is_stopped()
        if saves:
            job.ranks.check_equal(saves=True)
        saved = job.checkpoints.due(step) and self._recorder.save(step, batch, required=last)
        # A signal since then is for the next step: other ranks may still update what all share.
        if not saves or not self._is_stopped() or (last and not self._lacks_observation(step)):
            return False
        if not saved:
            self._recorder.save(step, batch, required=True)
        return True

    @contextmanager
    def _saved_if_rank_is_lost(self, step: int) -> Iterator[None]:
        """Saves the run after `step`, the last that is done, if the block loses a rank and a signal would save it."""
        job = self._job
        try:
            yield
        except RankLostError:
            job.ranks.abandon()
            # The rank that is lost may have updated a part of what all share.
            whole = not job.ranks.shares_homes
            if whole and self._stop.saves() and step > job.start.step and not job.checkpoints.has(step):
                self._recorder.save(step, job.dataset.batch(step - 1), required=False)
            raise

    def _stopped(self, step: int) -> dict:
        """Ends a run that was saved after `step`; returns its summary."""
        self._stop.settle()
        newest = self._job.checkpoints.latest()
        return self._recorder.finish(step, "stopped", f"{self._stop.signal}: resume with resume={newest}")


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
    """Computes the gradients of the mean loss over `batch`, clips them and updates the weights.

    The host waits for the device once, for the norm of the gradients. Raises UserError for a batch without labels, or
    with texts padded without a mask.
    """
    config, task = job.components.config, job.components.task
    prepared = task.prepared(batch, seed_of(config.seed, step))
    refuse_padding(job.components.model, prepared, f"step {step}")
    divided = shares_of if config.parallel.sequence == 1 else shares_of_rows
    shares = divided(prepared, job.ranks.count, config.microbatches, task.weight)
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
    config, model, task, attached = components.config, components.model, components.task, job.attached.trained
    # Before the step: inside it, the batch would queue behind the first weights on the bus.
    share = replace(share, parts=tuple(uploaded(part, components.device) for part in share.parts))
    if task.looks_ahead:
        share = replace(share, parts=looked_ahead(task, job.attached.reference or attached, share.parts))
    # Norms of the gradients of one rank say nothing about those of their sums, which ranks that share weights make in
    # the step.
    norms = ranks.count == 1 or ranks.shares_homes
    with job.routers.counting(due(config.log_every, step, config.steps)), attached.step(norms=norms):
        losses = forward_backward(task, attached, share, config.seed, step)
    # After the step, which ranks that share weights end together: one that has taken another way is found there.
    loss, *figures = ranks.total(losses).reshape(-1)
    # What is drawn between steps depends neither on the last microbatch nor on the number of ranks.
    seed_torch(seed_of(config.seed, step))
    if components.mode.owns_update:
        lr = job.schedule.get_last_lr()[0]
        # In steps that are timed the norm may cost a pass over host memory.
        norm = job.optimizer.step(measure=step <= config.warmup_steps)
        job.schedule.step()
        return StepResult(loss, norm, lr, skipped=False, figures=figures)
    known = ranks.reduce(model, attached.gradient_norms(), attached.summed_parameters())
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


def looked_ahead(task: Task, attached: Attached, parts: Sequence[Batch]) -> tuple[Batch, ...]:
    """Returns the microbatches with what `task.ahead` adds, computed without gradients by the model of `attached`.

    `attached` is the reference if the run has one, else the trained model.
    """
    with attached.inference(), evaluating(attached.model):
        return tuple(task.ahead(attached.model, part) for part in parts)


def skip_or_raise(job: RankJob, step: int, norm: float) -> None:
    """Handles gradients that are not finite as `on_nonfinite` says. Raises UserError if that is to stop the run."""
    config = job.components.config
    # A foreign system that computes NaN shows it in its curve.
    if config.on_nonfinite == OnNonfinite.stop and not job.components.mode.foreign:
        # Followers have no dataset, and the message of the first rank is shown.
        if isinstance(job, Job) and (found := nonfinite_in(batch := job.dataset.batch(step - 1))):
            raise UserError(
                f"step {step}: {found[0]} of example {found[1]} in its batch has values that are not finite"
                f" ({names_of(job.dataset, step, config.batch_size, examples_in(batch))}): mend that example of"
                f" {config.dataset._target_.rpartition('.')[2]}, or leave it out"
            )
        weights = config.model.weights
        if weights is not None and (name := nonfinite_weight(ModelWeights.find(weights, ask=False).local_path())):
            raise UserError(
                f"step {step}: the gradient norm is {norm}, because model.weights={weights} has values that are not"
                f" finite, in {name}: download it again, or take other weights"
            )
        advice = nonfinite_advice(config)
        raise UserError(f"step {step}: the gradient norm is {norm}, and on_nonfinite=stop: take {advice}")
    job.optimizer.skip()


def forward_backward(task: Task, attached: Attached, share: Share, seed: int, step: int) -> Tensor:
    """Computes the gradients of the step's mean loss as far as they come from `share`, on the model's device.

    Each microbatch is weighted by its part of the step's weight, so that the sum does not depend on the split, even if
    their weights differ; the mode chooses their order. Each one seeds the random numbers of its dropout by its position
    in the step, so that they depend neither on that order nor on the number of ranks.
    Returns the microbatches' parts of the step's loss, float32 [microbatches]; where the task has figures too,
    [microbatches, 1 + figures], the loss first.
    """
    shown: dict[int, Tensor] = {}

    def loss_of(index: int, part: Batch) -> Tensor:
        seed_torch(seed_of(seed, step, share.first + index))
        weight = share.weights[index] / share.total
        with forward_of(index, part, weight):
            loss, figures = loss_and_figures_to_train(task, attached.model, part)
        if figures:
            shown[index] = torch.stack([*figures]).float() * weight
        return loss * weight

    losses = attached.accumulate([partial(loss_of, index, part) for index, part in enumerate(share.parts)])
    losses = torch.stack([loss.float() for loss in losses])
    if not shown:
        return losses
    return torch.cat([losses[:, None], torch.stack([shown[index] for index in range(len(share.parts))])], 1)


def gradient_norm(model: nn.Module, known: Mapping[nn.Parameter, Tensor]) -> float:
    """Returns the L2 norm of all gradients, computed in float32.

    `known` has norms by parameter, at least those of gradients that are released already.
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
