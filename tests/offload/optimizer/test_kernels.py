"""The update by torch's kernel: the paper's formulas, in every format of the states; operands in pieces."""

import dataclasses
import threading
from contextlib import suppress

import pytest
import torch

from offload.optimizer import kernels
from offload.optimizer.formats import StateFormat, join, noise_key
from offload.optimizer.kernels import VECTOR, FusedUpdate, HyperParameters, Operands, fused_adamw_
from tests.offload.helpers.kernels import COMPACT, FEW, FORMATS, SETTINGS, from_place, needs_gpu, operands, run, tensors


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
        inside.wait(300)
        seen.append(torch.get_num_threads())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    used.wait(300)
    with kernels.torch_threads(before + 1):
        inside.set()
        done.wait(300)
    thread.join(300)
    assert seen == [before]


def updated(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of master, gradient and moments, after four updates."""
    values = [tensor.clone() for tensor in values]
    for step in range(1, 5):
        fused_adamw_(*values, torch.tensor(float(step)), SETTINGS)
    return values


@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 98, 4095])
def test_a_part_is_updated_as_in_the_whole(count: int):
    generator = torch.Generator().manual_seed(count)
    whole = [torch.randn(4096, generator=generator).abs_() for _ in range(4)]
    part = [tensor[:count] for tensor in whole]
    for found, expected in zip(updated(part), updated(whole), strict=True):
        assert torch.equal(found, expected[:count])


@pytest.mark.parametrize("count", [4, VECTOR + 1])
def test_gradients_are_not_written(count: int):
    # An update that may be undone takes a gradient with another version for one that somebody has changed.
    values = [torch.ones(count) for _ in range(4)]
    fused_adamw_(*values, torch.tensor(1.0), SETTINGS)
    assert [tensor._version > 0 for tensor in values] == [True, False, True, True]


@pytest.mark.parametrize("format", FEW, ids=str)
@pytest.mark.parametrize(("size", "pieces"), [(100, None), (300, None), (5000, 1)])
def test_pieces_are_views_that_cover_the_whole_once(format: StateFormat, size: int, pieces: int | None):
    whole = from_place(operands(1000, format), 7)
    for tensor in tensors(whole):
        tensor.zero_()
    parts = list(whole.split(size))
    assert pieces is None or len(parts) == pieces
    for part in parts:
        for tensor in tensors(part):
            tensor += 1
    assert all((tensor == 1).all() for tensor in tensors(whole))
    assert torch.equal(torch.cat([part.gradient for part in parts]), whole.gradient)
    starts = [7]
    for part in parts[:-1]:
        starts.append(starts[-1] + part.weight.numel())
    assert [part.start for part in parts] == starts
    assert {part.seed for part in parts} == {whole.seed}


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
