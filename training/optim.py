"""The optimizer that updates after the step, and the schedules of the learning rate."""

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from offload import HostAdamW

logger = logging.getLogger(__name__)

# Times settle after fewer steps; other programs have warmup_steps for the learning rate.
MANY_UNTIMED = 10
# As transformers' Trainer has them: those of experts, or of heads, have two dimensions.
NORMS_AND_BIASES = re.compile(r"(bias|norm\.weight)$")


class AdamW(HostAdamW):
    """AdamW for parameters on host and device in one model, all updated in `step`, with the numbers of `HostAdamW`.

    Args:
        params: parameters or groups of them, as for any torch optimizer.
        lr, betas, eps, weight_decay: as torch.optim.AdamW; a group may have its own, and a scheduler may change them.
        decay_norms_and_biases: False leaves parameters of fewer than two dimensions without weight decay.
    """

    overlaps = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decay_norms_and_biases: bool = True,
    ):
        which, threads = decay_norms_and_biases, torch.get_num_threads()
        super().__init__(params, lr, betas, eps, weight_decay, decay_norms_and_biases=which, threads=threads)


def by_decay(model: nn.Module, params: list[nn.Parameter]) -> list[Any]:
    """Returns `params` of `model`; norms and biases of several dimensions in a group of their own, without decay."""
    found = dict.fromkeys(p for name, p in model.named_parameters() if p.ndim > 1 and NORMS_AND_BIASES.search(name))
    constant = [p for p in params if p in found]
    rest = [p for p in params if p not in found]
    return [{"params": rest}, {"params": constant, "weight_decay": 0.0}] if constant else params


def warn_of_rates(config: DictConfig) -> None:
    """Warns of a learning rate of 0, of a warm-up that lasts beyond the last step, and of one in the wrong key."""
    if config.warmup_steps > MANY_UNTIMED and config.schedule.warmup != config.warmup_steps:
        logger.warning(
            "warmup_steps=%s: so many steps are left out of the measured times; the learning rate rises over"
            " schedule.warmup=%s",
            config.warmup_steps,
            config.schedule.warmup,
        )
    if not config.optimizer.lr:
        logger.warning("optimizer.lr=%s: nothing learns: take auto, or a number above 0", config.optimizer.lr)
    if config.schedule.warmup >= config.steps:
        # Not refused: a model option may bring a warm-up for longer runs.
        logger.warning(
            "schedule.warmup=%s is not below steps=%s: the learning rate does not reach optimizer.lr",
            config.schedule.warmup,
            config.steps,
        )


def build_schedule(config: DictConfig, optimizer: Optimizer) -> LambdaLR:
    """Makes the schedule of `config.schedule`. Call its `step()` after each `step()` of the optimizer."""
    # torch warns if the first step is skipped (on_nonfinite=skip), which is intended.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)`", UserWarning)
    return instantiate(config.schedule, optimizer=optimizer, steps=config.steps)


def constant(optimizer: Optimizer, steps: int, warmup: int) -> LambdaLR:
    """Keeps the full learning rate after the warm-up."""
    return _after_warmup(optimizer, steps, warmup, lambda progress: 1.0)


def linear(optimizer: Optimizer, steps: int, warmup: int, final: float) -> LambdaLR:
    """Falls in a straight line from the full learning rate to `final` times it, reached after the last step."""
    return _after_warmup(optimizer, steps, warmup, lambda progress: 1 + (final - 1) * progress)


def cosine(optimizer: Optimizer, steps: int, warmup: int, final: float) -> LambdaLR:
    """Falls as `linear` does, along half a cosine (Loshchilov and Hutter 2017, without restarts)."""
    return _after_warmup(
        optimizer, steps, warmup, lambda progress: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2
    )


def set_step(schedule: LambdaLR, step: int) -> None:
    """Sets the learning rates as they are after `step` calls of `schedule.step()`."""
    schedule.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _after_warmup(optimizer: Optimizer, steps: int, warmup: int, factor: Callable[[float], float]) -> LambdaLR:
    """Makes the schedule of transformers with a step more of warm-up, and without its first, whose rate is 0."""

    def factor_of_step(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return factor(min((step - warmup) / max(steps - warmup, 1), 1.0))

    return LambdaLR(optimizer, factor_of_step)
