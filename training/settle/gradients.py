"""Chooses whether gradients of what streams are kept in host memory, or released to their updates."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig
from torch import nn

from offload import Footprint, Mode
from training.config.declare import AUTO
from training.config.schema import OnNonfinite
from training.errors import UserError
from training.parallel.ranks import shares_homes

KEY = "optimizer.gradients"


@dataclass(frozen=True)
class GradientChoice:
    """`released`: each gradient goes to its update alone (`Mode.release_gradients`).

    `why` that was chosen, in words; None where nobody had to choose: the user did, or no gradients go to the host.
    """

    released: bool = False
    why: str | None = None

    @classmethod
    def of(cls, config: DictConfig, mode: Mode, model: nn.Module, kept: Footprint) -> GradientChoice:
        """Chooses for the run that `config` describes. `kept` is the footprint of its mode with gradients kept.

        Raises UserError for optimizer.gradients=release where something besides the update needs them.
        """
        asked = config.optimizer.get("gradients", "keep")
        if asked == "keep" or (asked == AUTO and not kept.host_gradient_bytes):
            return cls()
        reason = _why_kept(config, mode, model, kept)
        if asked == AUTO:
            released = reason is None
            return cls(released, "updates begin inside backward, and nothing else needs them" if released else reason)
        if reason is not None:
            raise UserError(f"{KEY}={asked}: {reason}; or take {KEY}=keep")
        return cls(released=True)

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of the choice by its key, where there was a choice."""
        return {} if self.why is None else {KEY: f"{'release' if self.released else 'keep'}: {self.why}"}

    def kept_because(self, why: str) -> GradientChoice:
        """Returns the choice to keep them after all. Raises UserError where the user asked for their release."""
        if self.released and self.why is None:
            raise UserError(f"{KEY}=release: {why}: take {KEY}=keep")
        return GradientChoice(released=False, why=why)


def _why_kept(config: DictConfig, mode: Mode, model: nn.Module, kept: Footprint) -> str | None:
    """Returns what needs the gradients besides their updates, and what to change; None if nothing does."""
    if (reason := mode.why_gradients_stay(model)) is not None:
        return reason
    if config.devices > 1 and not shares_homes(config, mode):
        return f"devices={config.devices} sum them after backward: take devices=1"
    if config.devices > 1:
        return (
            f"the sums of devices={config.devices} go home, because a unit of which one device lacks a gradient is"
            " summed after backward, and no plan shows which: take devices=1"
        )
    if config.clip_norm is not None:
        return (
            f"clip_norm={config.clip_norm:g} needs them until their norm is known: to release them take clip_norm=null"
        )
    if config.on_nonfinite != OnNonfinite.stop:
        return "on_nonfinite=skip needs to know first that all are finite: take on_nonfinite=stop"
    if config.microbatches > 1 and not kept.layer_major:
        return (
            f"those of microbatches={config.microbatches} are added up in host memory: take microbatches=1, or"
            " offload=shard_offload, which adds them up on the device"
        )
    return None


KEPT = GradientChoice()
