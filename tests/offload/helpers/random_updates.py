"""Random programmes of training with HostAdamW: what a user does from step to step, under a mode or resident.

A programme is made of a seed. It is run twice: under its mode, with updates beside the step, and resident, with each
update in its turn. Both must see the same numbers.
"""

import copy
import functools
import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.modes.mode import AttachOptions
from offload.modes.none import Resident
from offload.optimizer.adamw import HostAdamW
from offload.speculation.trials import Speculation
from offload.streams import registry
from tests.offload.helpers.models import Stack, same_bits, stack_inputs
from tests.offload.helpers.random_models import built, shards
from tests.offload.helpers.updates import Mixed
from training.run.loop import clip_scale, gradient_norm

Knobs = tuple[str, dict]
Seen = list[tuple[str, Tensor]]


class Experts(Stack):
    """Blocks of which a forward uses some, by its inputs; the others get no gradient."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for index, block in enumerate(self.blocks):
            if index % 2 == int(inputs[0, 0] > 0):
                hidden = block(hidden)
        return self.head(hidden)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "regular": functools.partial(Stack, dropout=0.2),
    "mixed": Mixed,
    "experts": Experts,
}
# What may happen between two steps, and between backward and `optimizer.step`. What writes to weights or gradients
# waits for updates first, as the documentation asks for.
BETWEEN = ["freeze", "unfreeze", "rate", "look", "evaluate", "infer", "resume", "reattach", "overlap", "place", "hook"]
BETWEEN += ["write", "data"]
BEFORE_STEP = ["rate", "look", "drop", "scale", "evaluate", "again", "finish", "write", "data"]


@dataclass(frozen=True)
class Step:
    """One step: its microbatches, the limit of its norm, and what happens before and after `optimizer.step`."""

    microbatches: int
    clip_norm: float | None
    is_finite: bool
    zeros: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Beside:
    """Updates beside the step: the arguments of `Attached.overlap`."""

    early: bool
    device_share: int
    speculation: Speculation | None


@dataclass(frozen=True)
class Programme:
    """The plan of `run`. `modes` take turns where the programme attaches anew, and so do the ways of `beside`."""

    seed: int
    model: str
    dtype: torch.dtype
    modes: tuple[Knobs, ...]
    beside: tuple[Beside, ...]
    options: dict
    groups: str
    releases: bool
    steps: tuple[Step, ...]

    @property
    def is_early(self) -> bool:
        """True if updates begin inside backward for good, so that nothing may change or drop them."""
        return any(beside.early for beside in self.beside)

    @property
    def adds_in_its_own_order(self) -> bool:
        """True if microbatches side by side add gradients, or change buffers, in another order than resident ones."""
        return (
            any(map(shards, self.modes)) and self.model == "mixed" and any(step.microbatches > 1 for step in self.steps)
        )


def programme(seed: int) -> Programme:
    """Returns the programme of a seed."""
    draw = random.Random(seed)
    model, dtype = draw.choice(["regular", "regular", "mixed", "experts"]), draw.choice([torch.float32, torch.bfloat16])
    kind = draw.choice(["early", "speculating", "speculating", "in step"])
    releases = kind == "early" and model == "regular" and draw.random() < 0.5
    early, speculates = kind == "early", kind == "speculating"
    options = {"master": "compact" if speculates else draw.choice(["compact", "stochastic"])}
    options |= {"state_dtype": draw.choice(["fp32", "fp32", "bf16"] if speculates else ["fp32", "bf16", "int8"])}
    options |= {"decay_norms_and_biases": draw.random() < 0.5}
    options |= {"speculate": draw.choice(["on", "on", "auto"]) if speculates else "off"}
    steps = []
    for _ in range(draw.randint(4, 8)):
        clips = not early and draw.random() < 0.7
        before = () if early else _some(draw, BEFORE_STEP, 0.15)
        after = _some(draw, BETWEEN, 0.35)
        if releases:
            after = tuple(name for name in after if name not in ("hook", "freeze", "reattach", "overlap", "resume"))
        step = Step(
            microbatches=1 if releases else draw.choice([1, 1, 2, 3]),
            clip_norm=draw.choice([1e9, 1e9, 0.5, 0.1, 0.02]) if clips else None,
            is_finite=early or draw.random() < 0.9,
            zeros=draw.choice(["none", "none", "zeros"] if early else ["none", "none", "none", "zeros", "kept"]),
            before=before,
            after=after,
        )
        steps.append(step)
    return Programme(
        seed=seed,
        model=model,
        dtype=dtype,
        modes=tuple(_mode(draw, releases) for _ in range(2)),
        beside=tuple(_beside(draw, early, speculates) for _ in range(2)),
        options=options,
        groups=draw.choice(["one", "by module", "some left out"]) if not releases else "one",
        releases=releases,
        steps=tuple(steps),
    )


def _some(draw: random.Random, names: list[str], chance: float) -> tuple[str, ...]:
    return tuple(draw.sample(names, draw.choice([1, 1, 2]))) if draw.random() < chance else ()


def _mode(draw: random.Random, releases: bool) -> Knobs:
    name = draw.choice(["bounce_linear", "layer_stream", "shard_offload"])
    knobs = {"slots": draw.randint(3, 5) if name == "bounce_linear" else draw.randint(2, 3)}
    if not releases:
        knobs["resident"] = draw.choice([0, 0, 0, 1, "40%"])
    if name == "shard_offload":
        knobs |= {"shards": draw.randint(1, 3), "checkpoint": draw.random() < 0.7}
    elif name == "bounce_linear" or draw.random() < 0.5:
        knobs["outside"] = draw.choice(["stream", "resident"])
        knobs["slots"] += name == "layer_stream"
    if draw.random() < 0.2:
        swap = {"budget": draw.choice([0, 2000]), "weights": (name, knobs)}
        return "tensor_swap", swap
    return name, knobs


def _beside(draw: random.Random, early: bool, speculates: bool) -> Beside:
    limit, undo_bytes = draw.choice([math.inf, 1e9, 0.5, 0.1]), draw.choice([1 << 24, 1 << 24, 1 << 24, 20_000, 0])
    device_share = draw.choice([0, 0, 2000, 20_000, 10**9])
    return Beside(early, device_share, Speculation(limit, undo_bytes) if speculates else None)


class Run:
    """One run of a programme: under its modes if `overlaps`, else resident or (`in_turn`) with updates in turn."""

    def __init__(self, programme: Programme, overlaps: bool, in_turn: bool = False):
        self.programme, self.overlaps, self.in_turn = programme, overlaps, in_turn
        self.seen: Seen = []
        torch.manual_seed(0)
        self.model = MODELS[programme.model]().to(programme.dtype)
        self.named = [parameter for _, parameter in sorted(self.model.named_parameters())]
        self.draw = random.Random(programme.seed)
        self.attachments = self.overlappings = 0
        self.optimizer = self._optimizer()
        self.hooks: list = []

    def run(self) -> Seen:
        """Returns all that was seen, each with its place in the programme."""
        with ExitStack() as stack:
            streams = registry.acquire("cpu")
            stack.callback(registry.release, streams)
            self.streams = streams
            self._attach()
            for number, step in enumerate(self.programme.steps):
                self._step(number, step)
            self._look("end")
            self.attached.detach()
        return self.seen

    def _attach(self) -> None:
        knobs = self.programme.modes[self.attachments % len(self.programme.modes)]
        self.attachments += 1
        mode = built(knobs) if self.overlaps or self.in_turn else Resident()
        options = AttachOptions(release_gradients=self.overlaps and self.programme.releases)
        self.attached = mode.attach(self.model, self.streams, options)
        self._overlap()

    def _overlap(self) -> None:
        beside = self.programme.beside[self.overlappings % len(self.programme.beside)]
        self.overlappings += 1
        if self.overlaps:
            self.attached.overlap(self.optimizer, beside.early, beside.device_share, beside.speculation)

    def _optimizer(self) -> HostAdamW:
        parameters: list = [*self.model.parameters()]
        if self.programme.groups == "some left out":
            parameters = [parameter for index, parameter in enumerate(parameters) if index % 5 != 2]
        elif self.programme.groups == "by module":
            parameters = [
                {"params": parameters[:3], "lr": 0.02, "betas": (0.8, 0.9)},
                {"params": parameters[3:7], "weight_decay": 0.0, "eps": 1e-6},
                {"params": parameters[7:]},
            ]
        settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "threads": 1}
        return HostAdamW(parameters, **settings, **self.programme.options)

    def _step(self, number: int, step: Step) -> None:
        self._backward(number, step)
        for event in step.before:
            self._do(event, f"{number} before the update: {event}", number, step)
        norm = 0.0
        if not self.programme.is_early:
            norm = gradient_norm(self.model, self.attached.gradient_norms())
        if math.isfinite(norm):
            self.optimizer.step(scale=clip_scale(norm, step.clip_norm))
        else:
            self.optimizer.skip()
        if step.zeros != "kept" or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=step.zeros != "zeros")
            # Of what the optimizer does not have.
            for parameter in self.model.parameters():
                if parameter not in self.optimizer._members:
                    parameter.grad = None
        for event in step.after:
            self._do(event, f"{number} after the update: {event}", number, step)

    def _backward(self, number: int, step: Step) -> None:
        def loss_of(microbatch: int) -> Tensor:
            torch.manual_seed(100 * number + microbatch)
            given = stack_inputs(number, microbatch).to(self.programme.dtype)
            loss = self.model(given).float().square().mean() / step.microbatches
            return loss if step.is_finite else loss * math.inf

        with self.attached.step(norms=not self.programme.is_early):
            losses = self.attached.accumulate([functools.partial(loss_of, index) for index in range(step.microbatches)])
        self.seen += [(f"{number} loss", loss) for loss in losses]

    def _do(self, event: str, place: str, number: int, step: Step) -> None:
        parameter = self.draw.choice(self.named)
        match event:
            case "freeze" | "unfreeze":
                parameter.requires_grad_(event == "unfreeze")
                if event == "freeze":
                    self.optimizer.finish()
                    parameter.grad = None
            case "rate":
                self.draw.choice(self.optimizer.param_groups)["lr"] = self.draw.choice([1e-3, 5e-3, 2e-2])
            case "look":
                self._look(place)
            case "evaluate" | "infer":
                self._evaluate(place, inference=event == "infer")
            case "resume":
                # The mode's own hooks see to it that updates are done.
                states, values = copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.model.state_dict())
                self.model.load_state_dict(values)
                self.optimizer = self._optimizer()
                self.optimizer.load_state_dict(states)
                self._overlap()
            case "reattach":
                self.attached.detach()
                self._attach()
            case "overlap":
                self._overlap()
            case "place":
                nbytes = self.draw.choice([0, 3000, 10**9])
                if self.overlaps:
                    self.attached.place_states(nbytes)
            case "hook" if parameter.requires_grad:
                self.hooks.append(parameter.register_hook(lambda gradient: gradient * 2))
                if len(self.hooks) > 1:
                    self.hooks.pop(0).remove()
            case "write":
                self.optimizer.finish()
                with torch.no_grad():
                    parameter.mul_(0.75)
            case "data":
                self.optimizer.finish()
                parameter.data = parameter.data * 0.75
            case "drop":
                parameter.grad = None
            case "scale":
                self.optimizer.finish()
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            case "again":
                self._backward(number + 50, step)
            case "finish":
                self.optimizer.finish()

    def _evaluate(self, place: str, inference: bool) -> None:
        self.model.eval()
        with self.attached.inference() if inference else torch.no_grad():
            self.seen.append((place, self.model(stack_inputs(7, 7).to(self.programme.dtype)).clone()))
        self.model.train()

    def _look(self, place: str) -> None:
        states = self.optimizer.state_dict()["state"]
        for index in sorted(states):
            named = sorted(states[index].items())
            self.seen += [(f"{place}: state {index} {name}", tensor.clone()) for name, tensor in named]
        self.seen += [(f"{place}: {name}", tensor.clone()) for name, tensor in self.model.state_dict().items()]


def runs(seed: int) -> tuple[Seen, Seen]:
    """Runs the programme of a seed under its modes, and with each update in its turn."""
    what = programme(seed)
    return Run(what, overlaps=True).run(), Run(what, overlaps=False, in_turn=what.adds_in_its_own_order).run()


def assert_same_as_in_turn(seed: int) -> None:
    """Fails unless both runs of a programme see the same at every place of it, bit for bit."""
    beside, in_turn = runs(seed)
    assert [place for place, _ in beside] == [place for place, _ in in_turn]
    for (place, one), (_, other) in zip(beside, in_turn, strict=True):
        assert same_bits(one, other), f"{place}, of {programme(seed)}"
