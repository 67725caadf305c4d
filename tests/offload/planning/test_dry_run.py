"""A dry run predicts a run: bytes copied and held, by the engine's own counters.

Forwards in a row keep the bus busy, or the device: they take as long as their copies, or as their arithmetic.
"""

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from offload.activations.checkpointing import recompute
from offload.blocks import find_blocks
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import NO_OPTIONS, Attached, AttachOptions, Mode
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.planning.dry_run import MOVED, DryRun, ForwardRun, dry_run, dry_run_forwards, left_as_found
from offload.planning.simulated_streams import Bandwidth, SimulatedStreams, Work
from offload.weights.gradients import offloader
from offload.weights.gradients.final import NotFinalError
from tests import ROOT
from tests.offload.helpers.mapped import with_low_rank, write_frozen
from tests.offload.helpers.models import Shared, Stack, stack_inputs, tokens, under
from tests.offload.helpers.modes import mode_classes, small

# Every mode with its defaults, and variants. On the CPU save_on_cpu keeps nothing on the host that a run could measure.
MODES = {
    **{name: partial(small, name) for name in mode_classes() if name != "save_on_cpu"},
    "bounce_linear, three slots": lambda: BounceLinear(slots=3),
    "bounce_linear, all streams, some stay": lambda: BounceLinear(outside="stream", resident="30%"),
    "layer_stream, two slots": lambda: LayerStream(slots=2),
    "tensor_swap": lambda: TensorSwap(Resident()),
    "tensor_swap within a budget": lambda: TensorSwap(Resident(), budget=2048),
    "both": lambda: TensorSwap(LayerStream(slots=2)),
}


def losses_of(model, inputs):
    return [lambda part=part: model(part).float().square().mean() for part in inputs]


def a_step(mode, model, inputs, blocks, options=NO_OPTIONS) -> dict[str, float]:
    """Returns the bytes that the third step really moves, and those that the host then holds."""
    with under(mode, model, options=options) as attached:
        undo = recompute(blocks)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            before = attached.counters()
            with attached.step():
                attached.accumulate(losses_of(model, inputs))
        after = attached.counters()
        undo()
    moved = {key: getattr(after - before, key) for key in MOVED}
    return moved | {"host_bytes": after.host_pageable_bytes}


def dry(mode, model, inputs, blocks=(), options=NO_OPTIONS):
    inputs = [part.to("meta") for part in inputs]
    return dry_run(mode, model, losses_of(model, inputs), recomputed=blocks, options=options)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", MODES)
@pytest.mark.sampled
def test_bytes_are_those_of_a_run(name: str, microbatches: int, recomputes: bool):
    if MODES[name]().recomputes and recomputes:
        pytest.skip("the mode recomputes by itself")
    model = Stack(width=32)
    inputs = [stack_inputs(0, index) for index in range(microbatches)]
    on_meta = copy.deepcopy(model).to("meta")
    blocks, on_meta_blocks = ([block for _, block in find_blocks(m)] if recomputes else [] for m in (model, on_meta))
    real = a_step(MODES[name](), model, inputs, blocks)
    found = dry(MODES[name](), on_meta, inputs, on_meta_blocks)
    assert {key: found.total(key) for key in MOVED} | {"host_bytes": found.host_bytes} == real
    layer_major = MODES[name]().footprint(model).layer_major
    assert len(found.phases) == (2 if layer_major else 2 * microbatches)


def test_bytes_of_weights_in_files_are_those_of_a_run(tmp_path: Path):
    model, inputs = with_low_rank(Stack(width=32)), [stack_inputs(0, 0)]
    on_meta = copy.deepcopy(model).to("meta")
    spans = write_frozen(model, tmp_path)
    mode = LayerStream(source="mapped", trained="device", slots=2)
    same = dict(zip(model.parameters(), on_meta.parameters(), strict=True))
    # Nobody opens a file for it.
    nowhere = {same[p]: [replace(span, path=tmp_path / "none")] for p, (span,) in spans.items()}
    planned = dry(mode, on_meta, inputs, options=AttachOptions(spans=nowhere))
    moved = {key: planned.total(key) for key in MOVED} | {"host_bytes": planned.host_bytes}
    assert moved == a_step(mode, model, inputs, [], AttachOptions(spans=spans))


def test_tied_weights_move_once():
    model = Shared()
    real = a_step(BounceLinear(), model, [tokens(0, 0)], [])
    with torch.device("meta"):
        on_meta = Shared()
    found = dry(BounceLinear(), on_meta, [tokens(0, 0)])
    assert found.total("h2d_bytes") == real["h2d_bytes"] > 0


def test_copies_in_are_at_most_those_of_the_footprint():
    model = Stack(width=32).to("meta")
    plan = LayerStream(slots=2).footprint(model)
    found = dry(LayerStream(slots=2), model, [stack_inputs(0, 0)])
    assert plan.h2d_bytes / 2 < found.total("h2d_bytes") < plan.h2d_bytes
    assert found.slot_bytes == plan.slot_bytes
    assert found.host_bytes == plan.host_weight_bytes + plan.host_gradient_bytes


def test_released_gradients_take_the_ring_of_the_footprint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    model, mode = Stack(width=32, depth=6).to("meta"), LayerStream(slots=2)
    kept, options = dry(mode, model, [stack_inputs(0, 0)]), AttachOptions(release_gradients=True)
    plan = mode.footprint(model, options=options)
    found = dry(mode, model, [stack_inputs(0, 0)], options=options)
    assert plan.host_gradient_bytes == 4 * plan.largest_unit_bytes
    assert found.host_bytes == plan.host_weight_bytes + plan.host_gradient_bytes == kept.host_bytes * 10 // 12
    assert replace(found, host_bytes=0) == replace(kept, host_bytes=0)
    with pytest.raises(NotFinalError, match="is not final when it lands"):
        dry(mode, model, [stack_inputs(0, 0), stack_inputs(0, 1)], options=options)


def test_gradients_of_resident_parameters_stay_to_the_end():
    with torch.device("meta"):
        model = Stack(width=512, depth=6)
    weights = sum(p.nbytes for p in model.parameters())
    found = dry(Resident(), model, [stack_inputs(0, 0)])
    # Five samples of activations are little beside the gradients.
    assert 0.9 * weights < found.peak_gradient_bytes <= weights < found.peak_bytes < 1.2 * weights


@pytest.mark.slow
def test_later_microbatches_follow_from_the_first():
    with torch.device("meta"):
        model = Stack(width=32)
    parts = [stack_inputs(0, index) for index in range(5)]
    two, five = (dry(LayerStream(slots=2), copy.deepcopy(model), parts[:count]) for count in (2, 5))
    assert two.repeated([1, 4]).phases == five.phases
    two, three, five = (dry(ShardOffload(shards=2), copy.deepcopy(model), parts[:count]) for count in (2, 3, 5))
    found = two.continued(three, 2)
    assert replace(found, peak_bytes=five.peak_bytes) == five
    assert five.peak_bytes <= found.peak_bytes <= 1.03 * five.peak_bytes


def test_gradients_that_stay_do_not_grow_with_microbatches():
    """The peak of one microbatch may be where a gradient is, and that of two where none is."""
    one, two = (
        DryRun((), slot_bytes=1, peak_bytes=peak, peak_gradient_bytes=gradients, turn_bytes=turn, host_bytes=0)
        for peak, gradients, turn in ((20, 5, 3), (22, 0, 5))
    )
    eight = one.continued(two, 6)
    assert (eight.peak_bytes, eight.peak_gradient_bytes, eight.activation_bytes) == (34, 0, 33)


def test_save_on_cpu_copies_every_saved_tensor_and_waits():
    model = Stack(width=32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        model(stack_inputs(0, 0)).float().square().mean()
    found = dry(SaveOnCpu(Resident()), copy.deepcopy(model).to("meta"), [stack_inputs(0, 0)])
    # The loss saves its own input outside of the model.
    assert found.total("d2h_bytes") == found.total("h2d_bytes") == sum(saved) - 5 * 4 * 4
    assert found.total("waited_for_bytes") == found.total("d2h_bytes") + found.total("h2d_bytes")


def test_a_model_that_needs_values_says_so():
    model = torch.nn.Linear(8, 8).to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        dry_run(Resident(), model, [lambda: model(torch.zeros(2, 8, device="meta")).sum() * model.weight.sum().item()])


def test_random_numbers_stay_as_they_were():
    model = Stack(dropout=0.5).to("meta")
    before = torch.get_rng_state()
    dry(Resident(), model, [stack_inputs(0, 0)])
    assert torch.equal(torch.get_rng_state(), before)


def test_recurrent_layers_find_their_weights_again():
    """They keep a list of their own beside their parameters."""
    model = nn.LSTM(4, 4, device="meta")
    before = list(model._flat_weights)
    with left_as_found(model):
        model._parameters["weight_ih_l0"] = nn.Parameter(torch.empty(16, 4, device="meta"))
        model._flat_weights = [model.weight_ih_l0, *before[1:]]
    assert all(now is then for now, then in zip(model._flat_weights, before, strict=True))


class Keeping(nn.Module):
    """Makes a table in its first forward, for all later ones."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table, self.calls = None, 0
        self.places = SimpleNamespace(made=None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = [torch.arange(4.0, device=rows.device)]
        self.calls += 1
        self.places.made = self.table[0]
        self.seen = rows.shape
        return self.linear(rows) * self.table[0]


def test_attributes_that_a_forward_leaves_are_as_before():
    with torch.device("meta"):
        model = Keeping()
        rows = torch.empty(2, 4)
    dry_run(BounceLinear(), model, [lambda: model(rows).sum()], on_gpu=False)
    assert (model.table, model.calls) == (None, 0)
    assert model.places.made is None
    assert not hasattr(model, "seen")


WIDTH, DEPTH, COUNT = 256, 10, 8
GB_PER_S = 50.0
# Arithmetic of 4096 tokens takes two thirds of the time that the weights' copies take, or twice as long.
FAST, SLOW = 4096 * GB_PER_S * 1e9 / 2 * 1.5, 4096 * GB_PER_S * 1e9 / 4
CASES = {"64 tokens": (64, FAST), "4096 tokens, the bus bounds": (4096, FAST), "compute bounds": (4096, SLOW)}
FORWARD_MODES: dict[str, Callable[[], Mode]] = {
    "bounce_linear": BounceLinear,
    "bounce_linear, half stays": lambda: BounceLinear(resident="50%"),
    "layer_stream": LayerStream,
    # Stem and head are tiny units with a slot each: with one slot less the first block would wait for the last.
    "layer_stream, all streams": lambda: LayerStream(outside="stream", slots=4),
    "layer_stream, two slots": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=5),
    "tensor_swap over layer_stream": lambda: TensorSwap(LayerStream()),
}


class Times(NamedTuple):
    """In ms: forwards in a row, what their copies and their arithmetic take alone, and the copy of the largest unit."""

    all: float
    bus: float
    compute: float
    fill: float


def forwards(
    mode: Mode, calls: Callable[[nn.Module], list], flops_per_s: float = FAST
) -> tuple[ForwardRun, list[Work]]:
    with torch.device("meta"):
        model = Stack(width=WIDTH, depth=DEPTH)
    timed = SimulatedStreams(torch.device("meta"), Bandwidth(GB_PER_S, GB_PER_S, GB_PER_S), flops_per_s)
    return dry_run_forwards(mode, model, calls(model), timed=timed), timed.work


def times(mode: Mode, tokens: Sequence[int], flops_per_s: float) -> Times:
    """Runs a forward for each number of tokens."""
    footprint = mode.footprint(Stack(width=WIDTH, depth=DEPTH).to("meta"))
    found, work = forwards(mode, lambda model: [partial(model, stack_of(count)) for count in tokens], flops_per_s)
    assert found.d2h_bytes == 0
    # What came in for a forward that is never made takes no time of those that are.
    used_bytes = min(found.h2d_bytes, len(tokens) * footprint.host_weight_bytes)
    ms = 1 / GB_PER_S / 1e6
    compute_ms = sum(part.end_ms - part.start_ms for part in work if part.lane == "compute")
    return Times(found.ms, used_bytes * ms, compute_ms, footprint.largest_unit_bytes * ms)


def stack_of(count: int) -> torch.Tensor:
    return torch.empty(count, 8, device="meta")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORWARD_MODES)
@pytest.mark.slow
def test_forwards_in_a_row_take_as_long_as_their_copies_or_their_arithmetic(name: str, case: str):
    found = times(FORWARD_MODES[name](), [CASES[case][0]] * COUNT, CASES[case][1])
    assert found.bus > 0
    # Nothing computes before the first unit is there. The first forward teaches the order, so the second may begin so.
    assert found.all <= 1.01 * max(found.bus, found.compute) + 2 * found.fill


@pytest.mark.parametrize("name", ["bounce_linear", "layer_stream", "shard_offload"])
@pytest.mark.slow
def test_so_they_do_in_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Attached, "inference", Attached.step)
    found = times(FORWARD_MODES[name](), [4096] * COUNT, FAST)
    assert found.all <= 1.01 * found.bus + 2 * found.fill


@pytest.mark.parametrize("name", ["bounce_linear", "layer_stream"])
def test_lone_forwards_fill_the_slots_anew_each_time(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Attached, "inference", lambda self: nullcontext())
    found = times(FORWARD_MODES[name](), [4096] * COUNT, FAST)
    assert found.all <= 1.01 * found.bus + (COUNT + 1) * found.fill
    assert found.all > 1.01 * found.bus + 2 * found.fill


def test_other_shapes_between_change_no_order():
    found = times(LayerStream(), [4096, 1, 64, 4096, 1, 1, 4096, 64], FAST)
    assert found.all <= 1.01 * found.bus + 2 * found.fill


def test_copies_grow_by_a_forward_each_time_and_units_that_fit_stay():
    unit_bytes = LayerStream().footprint(Stack(width=WIDTH, depth=DEPTH)).host_weight_bytes
    bytes_of = {}
    for slots, count in product((3, DEPTH), (2, 3, 4)):
        found, _ = forwards(LayerStream(slots=slots), lambda model, count=count: [partial(model, stack_of(1))] * count)
        bytes_of[slots, count] = found.h2d_bytes
    assert bytes_of[3, 4] - bytes_of[3, 3] == bytes_of[3, 3] - bytes_of[3, 2] == unit_bytes
    assert {bytes_of[DEPTH, count] for count in (2, 3, 4)} == {unit_bytes}


def test_forwards_of_a_resident_model_copy_nothing_and_leave_it_as_it_was_found():
    def calls(model: nn.Module) -> list:
        found.extend([model, list(model.parameters())])
        return [partial(model, stack_of(7))]

    found = []
    run, _ = forwards(Resident(), calls)
    model, before = found
    flops = 2 * 7 * sum(parameter.numel() for parameter in before if parameter.ndim == 2)
    assert (run.h2d_bytes, run.d2h_bytes, run.ms) == (0, 0, pytest.approx(flops / FAST * 1e3))
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_the_peak_has_what_outlives_a_forward_and_no_slots():
    def peak_bytes(mode: Mode, count: int) -> int:
        kept = []
        return forwards(mode, lambda model: [lambda: kept.append(model(stack_of(64)))] * count)[0].peak_bytes

    result_bytes = Stack(width=WIDTH)(torch.empty(64, 8)).nbytes
    for make in (Resident, LayerStream):
        assert peak_bytes(make(), 3) - peak_bytes(make(), 2) == result_bytes
    assert peak_bytes(LayerStream(), 1) == peak_bytes(Resident(), 1) >= 2 * 64 * WIDTH * 4


# For a process that nobody has made import the compiler.
STEPS = """
import sys, torch
from torch.utils.checkpoint import checkpoint
from offload.torch_private.torch_internals import without_compiler
def step(compiles=False):
    weight = torch.nn.Parameter(torch.empty(2, 2, device="meta").normal_())
    torch.optim.SGD([weight]).zero_grad()
    checkpoint(torch.sin, weight, use_reentrant=False).sum().backward()
    return torch.compile(torch.sin, backend="eager")(torch.zeros(2)).tolist() if compiles else 1
assert without_compiler(step)() == 1
assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
assert without_compiler(step)(compiles=True) == [0, 0]
"""


@pytest.mark.slow
def test_what_nobody_compiles_runs_without_the_compiler():
    subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, check=True, timeout=120)
