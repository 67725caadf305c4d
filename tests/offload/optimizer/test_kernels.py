"""The update by torch's kernel: the paper's formulas, in every format of the states."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import suppress

import pytest
import torch

from offload.optimizer import kernels
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import VECTOR, FusedUpdate, fused_adamw_
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.rounding import join, noise_key
from tests.offload.helpers.kernels import COMPACT, FORMATS, SETTINGS, needs_gpu, operands, run, tensors


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few thousand elements span several tiles, the last one ragged."""
    monkeypatch.setattr(kernels, "HOST_TILE", 1024)
    monkeypatch.setattr(kernels, "DEVICE_TILE", 1024)


def by_hand(on: Operands, steps: int = 5, hyperparameters: HyperParameters = SETTINGS, scale: float = 1.0) -> Operands:
    """Computes the paper's formulas in float64 for float32 weights, rounded once at the end."""
    lr, beta1, beta2, eps, decay = hyperparameters
    value, mean, square = (tensor.double() for tensor in (on.weight, on.exp_avg, on.exp_avg_sq))
    for step in range(1, steps + 1):
        on.gradient.copy_(torch.randn(on.gradient.shape, generator=torch.Generator().manual_seed(step)))
        gradient = on.gradient.double() * scale
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        value = value * (1 - lr * decay)
        value -= lr * (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps)
    for tensor, wanted in zip((on.weight, on.exp_avg, on.exp_avg_sq), (value, mean, square), strict=True):
        tensor.copy_(wanted)
    return on


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_equals_the_formulas(scale: float):
    found, expected = (operands(3001, COMPACT, torch.float32, torch.float32) for _ in range(2))
    run(FusedUpdate(threads=2), found, scale=scale)
    for ours, theirs in zip(tensors(found), tensors(by_hand(expected, scale=scale)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
def test_compact_masters_are_the_float32_masters(state_dtype: str):
    whole = run(FusedUpdate(), operands(3001, StateFormat("compact", state_dtype), whole=True))
    compact = run(FusedUpdate(), operands(3001, StateFormat("compact", state_dtype)))
    joined = join(compact.weight, compact.master, torch.empty(3001))
    assert torch.equal(joined, whole.master)
    for one, other in zip(tensors(compact), tensors(whole), strict=True):
        assert one.dtype == torch.int16 or torch.equal(one, other)


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 1 + 2**-8]


@pytest.mark.parametrize("gradient", [0.0, 1.0, float("inf"), float("nan")])
def test_compact_masters_are_the_float32_masters_of_every_kind_of_number(gradient: float):
    start = torch.tensor(SPECIAL).repeat_interleave(4)
    found = []
    for whole in (True, False):
        on = operands(len(start), whole=whole)
        on.weight.copy_(start)
        on.master.copy_(on.weight) if whole else on.master.zero_()
        on.gradient.fill_(gradient)
        for step in (1, 2, 3):
            FusedUpdate()(on, torch.tensor(float(step)), SETTINGS)
        values = on.master if whole else join(on.weight, on.master, torch.empty(len(start)))
        found.append([values, on.weight.float(), on.exp_avg, on.exp_avg_sq])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(7).view(torch.int32), other.nan_to_num(7).view(torch.int32))


def test_moments_are_rounded_to_nearest_and_weights_away_from_zero_in_ties():
    halved = run(FusedUpdate(), operands(4096, StateFormat("compact", "bf16"), whole=True), steps=1)
    whole = run(FusedUpdate(), operands(4096, whole=True), steps=1)
    assert torch.equal(halved.exp_avg, whole.exp_avg.bfloat16())
    assert torch.equal(halved.exp_avg_sq, whole.exp_avg_sq.bfloat16())
    assert torch.equal(halved.master, whole.master)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, -3.4e38, float("inf"), float("nan"), 1e-40])
    on = dataclasses.replace(operands(8, whole=True), master=ties.clone())
    FusedUpdate()(on, torch.ones(()), SETTINGS._replace(weight_decay=0.0))
    expected = ties.bfloat16()
    expected[0], expected[2] = 1 + 2**-7, -1 - 2**-7
    assert torch.equal(on.weight.nan_to_num(7), expected.nan_to_num(7))


# Largest difference of weights to float32 states after five steps of lr 0.01 in which every weight may move by 0.05.
BOUNDS = {"bf16": 2e-3, "int8": 2e-2}


@pytest.mark.parametrize("state_dtype", BOUNDS)
def test_smaller_moments_stay_near_float32_ones(state_dtype: str):
    exact = run(FusedUpdate(), operands(5000, whole=True))
    near = run(FusedUpdate(), operands(5000, StateFormat("compact", state_dtype), whole=True))
    error = (exact.master - near.master).abs()
    assert 0 < error.max() <= BOUNDS[state_dtype]
    assert error.mean() <= BOUNDS[state_dtype] / 10


def test_without_a_master_small_updates_add_up_on_average():
    """An update of a sixteenth of the weight's last bit, 160 times."""
    settings = SETTINGS._replace(lr=2.0**-12, weight_decay=0.0)
    moved = {}
    for master in ("stochastic", "compact"):
        on = operands(4096, StateFormat(master))
        on.weight.fill_(1.5)
        if on.master is not None:
            on.master.zero_()
        on.gradient.fill_(1)
        for step in range(1, 161):
            FusedUpdate()(on, torch.tensor(float(step)), settings)
        moved[master] = 1.5 - on.weight.double().mean()
    # Weights beside a master are off by at most half their last bit.
    assert abs(moved["compact"] - 160 * 2.0**-12) <= 2.0**-8
    assert abs(moved["stochastic"] - 160 * 2.0**-12) <= 5 * 2.0**-7 * 160**0.5 / 4096**0.5


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_ranges_of_a_parameter_are_the_whole(format: StateFormat):
    whole, parts = operands(3000, format), operands(3000, format)
    run(FusedUpdate(), whole)
    for step in range(1, 6):
        parts.gradient.copy_(torch.randn(3000, generator=torch.Generator().manual_seed(step)))
        # Any order, and pieces of any length that are whole blocks.
        for piece in reversed(list(parts.split(768))):
            FusedUpdate()(piece, torch.tensor(float(step)), SETTINGS)
    for one, other in zip(tensors(whole), tensors(parts), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_noise_is_made_only_where_something_is_rounded_with_it(format: StateFormat, monkeypatch: pytest.MonkeyPatch):
    """Its key takes twenty small operations, which are most of the update of a small parameter on a GPU."""
    keys = []
    monkeypatch.setattr(kernels, "noise_key", lambda *settings: keys.append(settings) or noise_key(*settings))
    run(FusedUpdate(), operands(300, format))
    assert bool(keys) == (format.master == "stochastic")


def test_threads_are_given_back_also_after_an_error():
    before = torch.get_num_threads()
    inside = []
    with suppress(KeyError), kernels.torch_threads(before + 1):
        inside.append(torch.get_num_threads())
        raise KeyError
    assert (inside, torch.get_num_threads()) == ([before + 1], before)


def test_threads_of_another_thread_are_left_alone():
    before, seen = torch.get_num_threads(), []
    used, inside, done = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        torch.ones(100_000).sum()
        used.set()
        inside.wait()
        seen.append(torch.get_num_threads())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    used.wait()
    with kernels.torch_threads(before + 1):
        inside.set()
        done.wait()
    thread.join()
    assert seen == [before]


def updated(values: list[list[torch.Tensor]], steps: int = 4) -> list[list[torch.Tensor]]:
    values = [[tensor.clone() for tensor in tensors] for tensors in values]
    for step in range(1, steps + 1):
        counts = [torch.tensor(float(step)) for _ in values[0]]
        fused_adamw_(*values, counts, SETTINGS)
    return values


@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 98, 4095])
def test_a_part_is_updated_as_in_the_whole(count: int):
    generator = torch.Generator().manual_seed(count)
    whole = [[torch.randn(4096, generator=generator).abs_()] for _ in range(4)]
    part = [[tensors[0][:count]] for tensors in whole]
    for found, expected in zip(updated(part), updated(whole), strict=True):
        assert torch.equal(found[0], expected[0][:count])


def test_tensors_of_any_shape_and_number_share_a_call():
    shapes = [(3, 5), (VECTOR,), (), (0,), (2, VECTOR + 1)]
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(shape, generator=generator).abs_() for shape in shapes] for _ in range(4)]
    # Columns first in memory.
    values = [[*tensors[:-1], tensors[-1].t().contiguous().t()] for tensors in values]
    together = updated(values)
    for index in range(len(shapes)):
        if shapes[index] == (0,):
            continue
        alone = updated([[tensors[index]] for tensors in values])
        assert all(torch.equal(found[index], expected[0]) for found, expected in zip(together, alone, strict=True))
        assert not torch.equal(together[0][index], values[0][index])


@pytest.mark.parametrize("count", [4, VECTOR + 1])
def test_gradients_are_not_written(count: int):
    # An update that may be undone takes a gradient with another version for one that somebody has changed.
    values = [[torch.ones(count)] for _ in range(4)]
    fused_adamw_(*values, [torch.tensor(1.0)], SETTINGS)
    assert [tensors[0]._version > 0 for tensors in values] == [True, False, True, True]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_devices_tensors_are_updated_by_the_same_rule(format: StateFormat):
    host = run(FusedUpdate(), operands(3001, format))
    fields = {field.name: getattr(operands(3001, format), field.name) for field in dataclasses.fields(Operands)}
    on = Operands(
        **{name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
    )
    for step in range(1, 6):
        on.gradient.copy_(torch.randn(3001, generator=torch.Generator().manual_seed(step)))
        FusedUpdate()(on, torch.tensor(float(step), device="cuda"), SETTINGS)
    # A moment that rounds the other way moves the weight by a share of the learning rate; noise decides the last bit.
    atol = 1e-4 if format.state_dtype == "fp32" else SETTINGS.lr
    rtol = 2**-7 if format.master == "stochastic" else 2**-8
    torch.testing.assert_close(on.weight.cpu().float(), host.weight.float(), rtol=rtol, atol=atol)
