"""A step to measure: a model under an offload mode, with random weights and one batch after another.

`BlocksWorkload` has Llama-shaped blocks of any size; `ModelWorkload` any option of conf/model, with its task and data.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.initialise import STD, Draws, initialise
from models.llama import Llama, rotary_tables
from models.quantise import QuantisedWeight
from offload import (
    Attached,
    AttachOptions,
    Counters,
    HostAdamW,
    Mode,
    Speculation,
    acquire,
    find_blocks,
    recompute,
    release,
    upload,
)
from offload.knobs import parse_bytes
from offload.planning import can_be_undone, log_bytes
from offload.sharing import NO_SHARERS, Sharers
from training.batches import Batch, examples_in, uploaded
from training.config import schema
from training.config.construct import make_mode
from training.config.modes import RESIDENT
from training.config.validation import check
from training.metrics.step_timer import StepTimer
from training.parallel.ranks import shares_of
from training.profiling.hardware import reset_peaks, vram_peak_gib
from training.run.loop import clip_scale, forward_backward, gradient_norm, short_garbage_collections
from training.run.prepare import build_dataset
from training.runs.invocation import Invocation
from training.seeds import seed_of
from training.settle.components import Components, attached
from training.sweeps import launcher
from training.tasks.causal_lm import CausalLM
from training.tasks.task import Task
from training.weights.adapter import RunAdapter
from training.weights.filling import fill_buffers, fill_parameters

Norms = Mapping[nn.Parameter, torch.Tensor]
Reduce = Callable[[nn.Module, Norms, Collection[nn.Parameter]], Norms]
"""sums the gradients of a model, but for those of these parameters, and returns their norms; see `Ranks.reduce`"""


class Blocks(nn.Module):
    """The blocks alone, on random inputs, so that the vocabulary of a model plays no role."""

    def __init__(self, layers: nn.ModuleList, head_dim: int):
        super().__init__()
        self.layers, self.head_dim = layers, head_dim

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = next(self.layers[0].parameters())
        shape = (*tokens.shape, weight.shape[-1])
        hidden = torch.randn(shape, device=tokens.device, dtype=weight.dtype, requires_grad=torch.is_grad_enabled())
        cos, sin = rotary_tables(tokens.shape[1], self.head_dim, 10000.0, hidden)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return hidden.float().square().mean()


def blocks(options: argparse.Namespace) -> nn.Module:
    """Returns the model of `BlocksWorkload`, in float32, on the meta device."""
    with torch.device("meta"):
        shape = (options.hidden, options.intermediate, options.blocks, options.heads, options.heads)
        model = Llama(options.head or 1, *shape)
    return model if options.head else Blocks(model.model.layers, options.hidden // options.heads)


def parser(description: str) -> argparse.ArgumentParser:
    """Makes the parser of the options that define a step."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--model", help="an option of conf/model, in place of Llama-shaped blocks")
    options.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of that model's configuration")
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--intermediate", type=int, default=11008)
    options.add_argument("--blocks", type=int, default=32)
    options.add_argument("--heads", type=int, default=32)
    options.add_argument("--head", type=int, default=0, metavar="VOCAB", help="with embedding, head and loss")
    options.add_argument("--sequences", type=int, default=2)
    options.add_argument("--seq-len", type=int, default=2048)
    options.add_argument("--microbatches", type=int, default=1)
    options.add_argument("--recompute", action="store_true")
    options.add_argument("--optimizer", action="store_true", help="with the update by host_adamw")
    options.add_argument("--clip-norm", type=float, default=None)
    options.add_argument("--device-share", default="0", help="bytes of its states that live on the device: 10GiB")
    options.add_argument("--threads", type=int, default=None, help="cores of the host optimizer")
    # Cores of the host that this process has; all of them unless the program divides them.
    options.set_defaults(cores=None)
    options.add_argument("--master", default="compact", help="format of its masters, as optimizer.master")
    options.add_argument("--state-dtype", default="fp32", help="format of its moments, as optimizer.state_dtype")
    options.add_argument(
        "--forward",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="N forwards in a row without gradients are a step (1)",
    )
    return options


def parsed(options_parser: argparse.ArgumentParser, on_cpu: str = "") -> argparse.Namespace:
    """Reads the command line. Ends the program with one line for a device or a file of `--json` that cannot be used."""
    options = options_parser.parse_args()
    known = re.fullmatch(r"cpu|cuda(?::(\d+))?", options.device)
    if not known:
        options_parser.error(f"argument --device: {options.device!r} is not cuda, cuda:N or cpu")
    on_gpu = options.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit(f"error: --device {options.device}: torch finds no GPU; use --device cpu{on_cpu}")
    if on_gpu and int(known[1] or 0) >= (count := torch.cuda.device_count()):
        sys.exit(f"error: --device {options.device}: no such GPU; torch finds {count}, numbered from 0")
    file = getattr(options, "json", None)
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        sys.exit(f"error: --json {file}: cannot be written; choose another place")
    return options


class Workload(ABC):
    """A model under a mode, ready to run steps; as a context, it gives the model and the streams back."""

    task: Task
    attached: Attached
    model: nn.Module
    microbatches: int
    trained: list[nn.Parameter]

    def __init__(self, spec: str, options: argparse.Namespace, sharers: Sharers = NO_SHARERS):
        """`spec` is MODE or MODE:KEY=VALUE,...: a mode and its knobs. `sharers` share the homes of what streams."""
        self.options, self.sharers = options, sharers
        self.device = torch.device(options.device)
        self.streams = acquire(self.device)
        self.optimizer: HostAdamW | None = None
        self.reduce: Reduce | None = None
        """sums gradients of several processes which the mode has not summed, where they are several"""
        self._undo = ExitStack()
        self._undo.callback(release, self.streams)
        clock = StepTimer(self.streams)
        clock.start()
        with self._undo:
            name = self.prepare(spec)
            clock.stop()
            (self.attach_ms,) = clock.collect()
            if options.optimizer and name != RESIDENT:
                formats = {"master": options.master, "state_dtype": options.state_dtype}
                kernels = {"threads": options.threads}
                self.optimizer = HostAdamW(self.model.parameters(), lr=1e-5, **formats, **kernels)
                if options.threads is None and options.cores is not None:
                    self.optimizer.cores = options.cores
                share = parse_bytes("--device-share", options.device_share)
                speculation = None
                if options.clip_norm is not None and can_be_undone(self.optimizer.format):
                    speculation = Speculation(options.clip_norm, log_bytes(self.model.parameters()))
                self.attached.overlap(self.optimizer, options.clip_norm is None, share, speculation)
                self.optimizer.allocate()
            self._undo = self._undo.pop_all()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        torch.manual_seed(0)

    @abstractmethod
    def prepare(self, spec: str) -> str:
        """Makes the model and the mode, attaches it and fills the model. Returns the mode's name."""

    @abstractmethod
    def batch(self) -> Batch:
        """Returns the next batch, on the device."""

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def step(self) -> torch.Tensor:
        """Runs a step, or with `--forward N` N forwards in a row, as a sampler does; returns the loss, a scalar."""
        options, batch = self.options, self.batch()
        if options.forward:
            with self.attached.inference():
                return [self.task.loss(self.model, batch) for _ in range(options.forward)][-1]
        clips = self.optimizer is not None and options.clip_norm is not None
        with self.attached.step(norms=clips):
            (share,) = shares_of(batch, 1, self.microbatches, examples_in)
            losses = forward_backward(self.task, self.attached, share, seed=0, step=0)
        norms, summed = self.attached.gradient_norms(), self.attached.summed_parameters()
        if self.reduce is not None and not summed.issuperset(self.trained):
            norms = self.reduce(self.model, norms, summed)
        if self.optimizer is not None:
            norm = gradient_norm(self.model, norms) if clips else 0.0
            self.optimizer.step(scale=clip_scale(norm, options.clip_norm))
        for parameter in self.trained:
            parameter.grad = None
        return losses.sum()


class BlocksWorkload(Workload):
    """Llama-shaped blocks, alone or with embedding, head and loss, on random tokens."""

    task = CausalLM()

    def prepare(self, spec: str) -> str:
        options = self.options
        name, mode = build_mode(spec)
        self.microbatches = options.microbatches
        self.model = blocks(options).bfloat16()
        self.attached = mode.attach(self.model, self.streams, AttachOptions(sharers=self.sharers))
        self._undo.callback(self.attached.detach)
        initialise(self.model, 0, self.device)
        self.sharers.exchange((0,), "the weights", patient=True)
        if options.recompute and not mode.recomputes:
            recompute(block for _, block in find_blocks(self.model))
        self._generator = torch.Generator().manual_seed(0)
        return name

    def batch(self) -> Batch:
        options = self.options
        shape = (options.sequences, options.seq_len + 1)
        return upload(torch.randint(options.head or 256, shape, generator=self._generator), self.device)


class ModelWorkload(Workload):
    """An option of conf/model with the task, data and recompute that it chooses; every step has the same batch.

    `--set` gives the other keys of the configuration, such as batch_size.
    """

    def prepare(self, spec: str) -> str:
        name, overrides = mode_overrides(spec)
        config = composed([f"model={self.options.model}", *overrides, *self.options.set])
        config.device = str(self.device)
        check(config)
        components = Components.of(config, Invocation(Path(), {}), self.device)
        self.task, self.model = components.task, components.model
        self.microbatches = config.microbatches
        with tempfile.TemporaryDirectory() as folder:
            dataset = build_dataset(config, self.model, Path(folder))
            batch = self.task.prepared(dataset.batch(0), seed_of(config.seed, 1))
        self.attached = self._undo.enter_context(attached(components, self.streams))
        fill_buffers(self.model)
        fill_parameters(self.model, config, self.device, None)
        if adapter := RunAdapter.of(config, self.model, starts=True):
            adapter.fill(self.model, self.device)
        fill_zeros(self.model, self.device)
        self._batch = uploaded(batch, self.device)
        return name

    def batch(self) -> Batch:
        return self._batch


@dataclass(frozen=True)
class TimedSteps:
    """Measurements of the steps: their times in ms, the last loss, and the peak GPU memory of the warm-up."""

    times_ms: list[float]
    grown: Counters
    """what the timed steps added to the mode's counters"""
    after: Counters
    """the mode's counters after the last step"""
    loss: float
    warmup_peak_gib: float


def timed_steps(workload: Workload, warmup: int, steps: int) -> TimedSteps:
    """Runs `warmup` steps, and `steps` more, which are timed."""
    clock = StepTimer(workload.streams)
    with short_garbage_collections():
        reset_peaks(workload.device)
        for _ in range(warmup):
            workload.step()
        workload.streams.synchronize()
        before, warmup_peak_gib = workload.attached.counters(), vram_peak_gib(workload.device)
        reset_peaks(workload.device)
        for _ in range(steps):
            clock.start()
            loss = workload.step()
            clock.stop()
        times_ms = clock.collect()
        after = workload.attached.counters()
    return TimedSteps(times_ms, after - before, after, loss.item(), warmup_peak_gib)


@torch.no_grad()
def fill_zeros(model: nn.Module, device: torch.device) -> None:
    """Gives random values to each matrix that is all zeros (adaLN-Zero, the second of an adapter), as training would.

    Zeros would falsify the times: a GPU multiplies zeros faster, and a CPU is slow at the denormal squares of tiny
    gradients.
    """
    draws = Draws(0, device)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or isinstance(parameter, QuantisedWeight) or parameter.reshape(-1)[:1024].any():
            continue
        if not parameter.any():
            draws.normal(parameter.detach(), name, STD)


def make_workload(spec: str, options: argparse.Namespace) -> Workload:
    """Makes the workload that the options of `parser` describe, under the mode `spec`."""
    return (BlocksWorkload if options.model is None else ModelWorkload)(spec, options)


def composed(overrides: list[str]) -> DictConfig:
    """Composes a configuration. Raises Hydra's errors for an option or a key that does not exist."""
    schema.register()
    launcher.register_launcher()
    return Invocation.composed(overrides)[0]


def mode_overrides(spec: str) -> tuple[str, list[str]]:
    """Returns the mode's name in MODE:KEY=VALUE,... and the overrides that choose the mode and its knobs."""
    name, _, pairs = spec.partition(":")
    overrides = [f"offload={name}"]
    for pair in filter(None, pairs.split(",")):
        key, _, value = pair.partition("=")
        overrides.append(f"offload@offload.weights={value}" if key == "weights" else f"offload.{pair}")
    return name, overrides


def build_mode(spec: str) -> tuple[str, Mode]:
    """Makes the mode of `spec`, MODE:KEY=VALUE,..., with train.py's checks; returns its name and the mode.

    Raises UserError and Hydra's errors.
    """
    name, overrides = mode_overrides(spec)
    return name, make_mode(composed(overrides).offload)
