"""The components of a run, made once from its configuration: read by the plan, by `build` and by the loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.library_dtypes import default_dtype
from models.quiet_imports import import_quantisers
from offload import (
    Attached,
    AttachOptions,
    Footprint,
    HostAdamW,
    Mode,
    Streams,
    acquire,
    find_blocks,
    recompute,
    release,
)
from offload.knobs import GIB
from offload.planning import PlannedSharers, StateFormat, can_be_undone, without_compiler
from offload.sharing import NO_SHARERS, Sharers
from training.config.adapter import NoAdapter, has_adapter
from training.config.construct import keys_under, make_mode
from training.config.declare import AUTO
from training.config.modes import weights_node
from training.config.rates import Choice
from training.config.schema import OnNonfinite, Pipeline, Precision
from training.data.pipeline_folder import pipeline_folder
from training.errors import UserError, as_user_error
from training.metrics.progress import phase
from training.parallel.ranks import shares_homes
from training.parallel.sequence import divide
from training.parallel.world import ranks_of_host
from training.runs.invocation import Invocation
from training.settle.settled import KEPT, GradientChoice, Settled, settle, settle_sizes
from training.settle.tiles import in_tiles, settle_tile
from training.tasks.task import Task
from training.weights.adapter import add_adapter
from training.weights.architecture import refuse_other_architecture
from training.weights.mapped import mapped_spans
from training.weights.quantising import quantise_blocks
from training.weights.source import local_source

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}

FLEX = "flex_attention"
# The shares of spare device memory that optimizer states may take, and that these may take with their gradients: the
# allocator needs room.
STATES_OF_SPARE, FILLED_OF_SPARE = 0.8, 0.95


@dataclass(frozen=True)
class Components:
    """The objects that a configuration describes, before anything is allocated.

    Attributes:
        settled: the configuration, with the reasons for what was chosen.
        model: on the meta device (shapes and names, no memory) until the mode attaches.
        options: what the mode must know to attach; its sharers are planned ones.
        footprint: the bytes that the mode will hold and move.
        recomputed_blocks: the blocks whose activations backward computes again; empty if the mode itself does that.
        optimizer_class: the class of the optimizer, which is made after the mode has attached.
        gradients: whether gradients of what streams are kept in host memory.
        reference: the second model of a task that has one, under a mode of its own: frozen, in eval(), without adapter.
    """

    settled: Settled
    dtype: torch.dtype
    model: nn.Module
    mode: Mode
    options: AttachOptions
    footprint: Footprint
    recomputed_blocks: tuple[nn.Module, ...]
    optimizer_class: type[HostAdamW]
    gradients: GradientChoice = KEPT
    reference: Components | None = None

    @classmethod
    def of(
        cls,
        config: DictConfig,
        invocation: Invocation,
        device: torch.device,
        on_gpu: bool | None = None,
        model: nn.Module | None = None,
    ) -> Components:
        """Makes the components, and settles `config`.

        `on_gpu`: whether a plan is for a GPU, if that differs from `device`. `model` spares making the model again:
        that of a configuration with the same `model` and `precision`, still on the meta device. Raises UserError for a
        model, a mode or a knob that cannot be had.
        """
        settled = settle(config, invocation, device, on_gpu)
        dtype = DTYPES[config.precision]
        if config.model.get("attention") == FLEX and device.type == "cpu" and not on_gpu:
            raise UserError(f"model.attention={FLEX}: torch has no backward of it on a CPU: take sdpa or eager")
        model = _model(config, dtype) if model is None else model
        refuse_other_architecture(config, model)
        settled = settle_sizes(settled, model)
        settled.task.check_model(config, model)
        divide(config, model, settled.task)
        settled = settled.because(settled.task.fit(config, model))
        mode = make_mode(config.offload)
        options = options_of(config, mode, model)
        footprint = footprint_of(config, mode, model, options)
        gradients = GradientChoice.of(config, mode, footprint)
        with keys_under("offload"):
            mode.check_device(device)
        again = recomputes(config) or mode.recomputes
        settled = settled.because(settle_tile(config, settled.task, mode, model, again))
        blocks = _recomputed_blocks(config, model, mode)
        optimizer_class = get_class(config.optimizer._target_)
        found = cls(settled, dtype, model, mode, options, footprint, blocks, optimizer_class).with_gradients(gradients)
        return replace(found, reference=_reference(found)) if found.task.needs_copy else found

    def with_gradients(self, choice: GradientChoice) -> Components:
        """Returns the components of a run with this choice."""
        if choice.released == self.options.release_gradients:
            return replace(self, gradients=choice)
        options = replace(self.options, release_gradients=choice.released)
        footprint = footprint_of(self.config, self.mode, self.model, options)
        return replace(self, gradients=choice, options=options, footprint=footprint)

    def with_config(self, config: DictConfig, notes: tuple[str, ...] = ()) -> Components:
        """Returns the components with another configuration that describes the same objects, and further `notes`."""
        return replace(self, settled=replace(self.settled, config=config, notes=self.settled.notes + notes))

    @property
    def config(self) -> DictConfig:
        return self.settled.config

    @property
    def invocation(self) -> Invocation:
        return self.settled.invocation

    @property
    def device(self) -> torch.device:
        return self.settled.device

    @property
    def task(self) -> Task:
        return self.settled.task

    @property
    def reference_device_bytes(self) -> int:
        """The bytes of the device that the reference takes."""
        second = self.reference
        return 0 if second is None else second.footprint.resident_bytes + second.footprint.slot_bytes

    @property
    def reference_host_bytes(self) -> int:
        """The bytes of a rank's host memory that the reference takes."""
        second = self.reference
        return 0 if second is None else second.footprint.host_home_bytes + second.footprint.ring_bytes

    @property
    def updates_overlap(self) -> bool:
        """True if the optimizer can update beside the step, as the mode asks it to."""
        return self.optimizer_class.overlaps

    def begin_compiling(self) -> None:
        """Has the optimizer's kernel of the host made beside what comes next: the plan, the allocation of memory."""
        if self.updates_overlap:
            HostAdamW.begin_compiling(self.state_format)

    def room_for_states(self, spare_bytes: float) -> int:
        """Returns how many of the `spare_bytes` of the device may be states of what streams.

        Their gradients must fit beside them until the update: all of them, or those of one unit where updates begin
        early.
        """
        states = sum(HostAdamW.planned_bytes(unit, self.state_format, placed=True) for unit in self.footprint.trained)
        gradients = [sum(parameter.nbytes for parameter in unit) for unit in self.footprint.trained]
        filled = FILLED_OF_SPARE * spare_bytes
        if self.updates_begin_early:
            ranks = ranks_of_host(self.config) if self.shares_homes else 1
            beside_gradients = filled - max(gradients, default=0) // ranks
        else:
            beside_gradients = filled * states / max(states + sum(gradients), 1)
        return max(int(min(STATES_OF_SPARE * spare_bytes, beside_gradients)), 0)

    @property
    def updates_begin_early(self) -> bool:
        """True if an update may begin inside backward and is final."""
        # Clipping needs the norm of all gradients first, and `on_nonfinite=skip` must know that all are finite.
        one_by_one = self.config.clip_norm is None and self.config.on_nonfinite == OnNonfinite.stop
        return one_by_one and self._gradients_are_whole_inside

    @property
    def may_speculate(self) -> bool:
        """True if updates of what streams wait for the norm of the gradients, and the user lets them begin before."""
        wanted = str(self.config.optimizer.get("speculate", "off")) not in ("off", "False")
        waits = self.updates_overlap and bool(self.footprint.host_gradient_bytes) and not self.updates_begin_early
        return wanted and waits and self._gradients_are_whole_inside and not self.mode.owns_update

    @property
    def _gradients_are_whole_inside(self) -> bool:
        """True if backward makes gradients of the whole batch: on one device, or sums over ranks that share weights."""
        at_once = self.config.microbatches == 1 or self.footprint.layer_major
        return self.config.devices == 1 or (self.shares_homes and at_once)

    @property
    def speculates(self) -> bool:
        """True if updates begin inside backward before the norm is known, and may be undone."""
        return self.may_speculate and can_be_undone(self.state_format)

    @property
    def largest_norm(self) -> float:
        """The norm of the gradients up to which they count in full."""
        return math.inf if self.config.clip_norm is None else self.config.clip_norm

    @property
    def shares_homes(self) -> bool:
        """True if the ranks of a host have one copy of what streams, in memory that they share."""
        return shares_homes(self.config, self.mode)

    @property
    def state_format(self) -> StateFormat:
        """The format of the optimizer's states; the default one where it has no knobs for that."""
        given = self.config.optimizer
        return StateFormat(**{name: str(given[name]) for name in ("master", "state_dtype") if name in given})


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that train, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def options_of(config: DictConfig, mode: Mode, model: nn.Module) -> AttachOptions:
    """Returns what the mode must know of the run, whose gradients are kept. Raises UserError as `mapped_spans` does."""
    sharers = PlannedSharers(ranks_of_host(config)) if shares_homes(config, mode) else NO_SHARERS
    return AttachOptions(sharers=sharers, spans=mapped_spans(config, model))


def footprint_of(config: DictConfig, mode: Mode, model: nn.Module, options: AttachOptions) -> Footprint:
    """Returns the bytes that `mode` will hold and move. Raises UserError for a knob that does not fit the model."""
    with keys_under("offload"):
        return mode.footprint(model, recomputes(config), options)


def recomputes(config: DictConfig) -> bool:
    """Tells whether the configuration asks for recomputed blocks."""
    return bool(config.recompute.blocks)


@contextmanager
def acquired(device: torch.device) -> Iterator[Streams]:
    """Acquires the streams of `device`, and releases them afterwards, whatever happens."""
    streams = acquire(device)
    try:
        yield streams
    finally:
        release(streams)


@contextmanager
def attached(components: Components, streams: Streams, sharers: Sharers = NO_SHARERS) -> Iterator[Attached]:
    """Attaches the mode to the model, whose parameters become memory, and gives the model back afterwards.

    `sharers` share the homes of what streams. Raises MemoryError if the host has too little memory.
    """
    with ExitStack() as undo:
        # Before the mode, whose windows then stand around the tiles.
        undo.enter_context(in_tiles(components.config, components.model))
        start = perf_counter()
        with phase("allocating and page-locking memory"):
            form = components.state_format if components.updates_overlap else None
            options = replace(components.options, sharers=sharers, state_format=form)
            found = components.mode.attach(components.model, streams, options)
        undo.callback(lambda: found.detach())
        # Processes that share homes lock them together, and each counts its part.
        seconds, locked = perf_counter() - start, sharers.count * found.counters().host_pinned_bytes / GIB
        # Less takes less than a second.
        if locked >= 1:
            print(f"page-locked {locked:,.1f} GiB of host memory in {seconds:,.1f} s, {locked / seconds:,.1f} GiB/s")
        # After the mode has attached, so that the recompute has its weights in place too.
        undo.callback(recompute(components.recomputed_blocks))
        yield found


def _model(config: DictConfig, dtype: torch.dtype) -> nn.Module:
    """Makes the model on the meta device. Raises UserError if the bytes of a tensor overflow an integer."""
    arguments = OmegaConf.to_container(config.model, resolve=True)
    arguments.pop("weights")
    if "source" in arguments:
        whole = arguments["_target_"] == Pipeline._target_
        arguments["source"] = str((pipeline_folder if whole else local_source)(arguments["source"]))
        # Before the module that makes the model: transformers imports them with it.
        import_quantisers()
    try:
        # Not `.to(dtype)`, which rounds what a model keeps in float32.
        with torch.device("meta"), default_dtype(dtype):
            model = without_compiler(instantiate)(arguments).train()
    except InstantiationException as error:
        if "source" in arguments and isinstance(error.__cause__, ValueError):
            raise UserError(f"model.source={config.model.source}: {error.__cause__}") from error
        if "overflow" not in str(error.__cause__).lower():
            raise
        raise UserError("model: its sizes are beyond any memory: take smaller ones") from error
    quantise_blocks(model, config, dtype)
    if has_adapter(config):
        # Last, because the layers of an adapter depend on what its targets are.
        add_adapter(model, config, dtype)
    return model


def _reference(found: Components) -> Components:
    """Returns the components of a second model without the adapter, of which nothing trains."""
    config = copy.deepcopy(found.config)
    config.adapter = OmegaConf.structured(NoAdapter)
    _, knobs = weights_node(config)
    if "resident" in knobs:
        # Device memory saves more where it holds what trains.
        knobs.resident = 0
    model, mode = _model(config, found.dtype).requires_grad_(False).eval(), make_mode(config.offload)
    options = options_of(config, mode, model)
    footprint = footprint_of(config, mode, model, options)
    objects = {"model": model, "mode": mode, "options": options, "footprint": footprint}
    found = replace(found, **objects, recomputed_blocks=(), gradients=KEPT)
    return found.with_config(config)


def _recomputed_blocks(config: DictConfig, model: nn.Module, mode: Mode) -> tuple[nn.Module, ...]:
    """Finds the blocks to recompute. Raises UserError if the model has no list of blocks."""
    if not recomputes(config) or mode.recomputes:
        return ()
    with as_user_error(""):
        return tuple(block for _, block in find_blocks(model, key="recompute"))


def reasons_of(found: Components) -> dict[str, str]:
    """Returns by key every value that was chosen, and why: with those of `Settled` what the mode and the model ask."""
    config, choices, given = found.config, found.invocation.choices, found.invocation.overridden
    optimizer, reasons = choices.get("optimizer"), {**found.settled.reasons, **found.gradients.reasons}
    streams = bool(found.footprint.units)
    if found.updates_overlap and streams and "optimizer" not in given:
        why = f"offload={choices.get('offload')} keeps weights on the host"
        reasons["optimizer"] = Choice.of(optimizer, why, "weights on the host")
    experts = getattr(found.model, "experts_implementation", None)
    if experts and "experts_implementation" not in (config.model.get("overrides") or {}):
        reasons["model.overrides.experts_implementation"] = Choice.of(experts, "transformers takes it", "transformers")
    if found.may_speculate:
        reasons["optimizer.speculate"] = _why_speculation(found)
    if has_adapter(config):
        (key, weights), adapter = weights_node(config), f"adapter={choices.get('adapter')}"
        if weights.get("trained") == "device" and f"{key}.trained" not in given:
            reasons[f"{key}.trained"] = f"device, because {adapter} is small: only frozen weights stream"
        if "optimizer" not in given and not found.updates_overlap:
            reasons["optimizer"] = Choice.of(optimizer, f"{adapter} trains on the device", "adapter")
    if config.optimizer.get("device_share") == AUTO and streams:
        left = "nothing" if config.vram_budget is None else "what the first step leaves free"
        reasons["optimizer.device_share"] = f"{left}: {fills_budget(config)}"
    return reasons


def _why_speculation(found: Components) -> str:
    if found.speculates:
        return "updates begin inside backward, and are undone exactly in steps that are clipped or skipped"
    form = found.state_format
    kept = f"master={form.master} with moments in {form.state_dtype}"
    return f"off, because updates of states with {kept} cannot be undone"


def fills_budget(config: DictConfig) -> str:
    """Returns for what the device's memory is filled, as a reason."""
    budget = config.vram_budget
    return "there is no vram_budget to fill" if budget is None else f"fills vram_budget={budget}"
