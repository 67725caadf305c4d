"""Small parameters of a device are updated by one call, and get the numbers that they get one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.optimizer import kernels, together
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import StateFormat
from offload.torch_private.torch_internals import TorchDispatchMode
from tests.offload.helpers.kernels import Blockwise, checked, needs_gpu
from tests.offload.helpers.models import assert_same
from tests.offload.helpers.optimizers import SETTINGS, give_gradients, parameters, same, train


@pytest.fixture(autouse=True)
def torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has torch's kernel update parameters one by one, too: the C loop keeps no payloads of NaN."""
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: kernels.FusedUpdate(1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treats the CPU as a device that is sent calls; the number of parameters of each call."""
    sizes = []

    def noted(weights: list[torch.Tensor], *others: object, **settings: object) -> None:
        sizes.append(len(weights))
        kernels.fused_adamw_(weights, *others, **settings)

    monkeypatch.setattr(together, "LAUNCHING", ("cpu",))
    monkeypatch.setattr(together, "fused_adamw_", noted)
    return sizes


def made(dtype: torch.dtype = torch.float32, **options) -> tuple[list[nn.Parameter], HostAdamW]:
    """Two groups; the last parameters have another learning rate."""
    weights = parameters(dtype)
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 3e-3}]
    return weights, HostAdamW(groups, **SETTINGS, threads=1, **options)


def scaled(optimizer: HostAdamW, scale: float) -> HostAdamW:
    step = optimizer.step
    optimizer.step = lambda: step(scale=scale)
    return optimizer


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize(("tile", "per_step"), [(1 << 24, [3, 2]), (1600, [3, 1, 1]), (1100, [3, 1])])
def test_gives_the_numbers_of_one_by_one(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, tile: int, per_step: list[int], scale: float
):
    """A call has at most a tile of elements; the last parameter, of 1536, may be larger than that."""
    monkeypatch.setattr(together, "TILE", tile)
    weights, optimizer = made()
    train(scaled(optimizer, scale), weights)
    assert calls == 20 * per_step
    versions = [weight._version for weight in weights]
    monkeypatch.setattr(together, "LAUNCHING", ())
    others, other = made()
    train(scaled(other, scale), others)
    assert len(calls) == 20 * len(per_step)
    assert same(weights, others)
    assert all(at > 0 for at in versions)
    for weight, same_weight in zip(weights, others, strict=True):
        found, expected = optimizer.state[weight], other.state[same_weight]
        assert found.keys() == expected.keys()
        assert same(found.values(), expected.values())


def test_a_parameter_that_began_later_counts_its_own_steps(calls: list[int], monkeypatch: pytest.MonkeyPatch):
    def run() -> list[nn.Parameter]:
        weights, optimizer = made()
        train(optimizer, weights[1:], range(4))
        return train(optimizer, weights, range(4, 8))

    seen = run()
    assert calls == [2, 2] * 4 + [3, 2] * 4
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


# Some are no whole number of vectors; one is a scalar.
ODD_SHAPES = [(3, 5), (64, 16), (), (7,), (48,), (17, 241)]
# Every master and each kind of moments that needs no noise.
CONVERTED = [
    pytest.param(dtype, gradient, form, id=f"{dtype}-{gradient}-{form.master}-{form.state_dtype}")
    for dtype, gradient, form in [
        (torch.bfloat16, torch.bfloat16, StateFormat("compact", "fp32")),
        (torch.bfloat16, torch.bfloat16, StateFormat("compact", "bf16")),
        (torch.bfloat16, torch.float32, StateFormat("compact", "fp32")),
        (torch.float16, torch.float16, StateFormat("compact", "fp32")),
        (torch.float16, torch.float16, StateFormat("stochastic", "bf16")),
        (torch.float32, torch.float32, StateFormat("compact", "bf16")),
        (torch.float32, torch.bfloat16, StateFormat()),
    ]
]
# Numbers at which rounding and its rest are hard: zeros, ties, the least, the largest and no numbers at all.
HARD_BITS = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x3F80, 0xBF81]


def run(
    dtype: torch.dtype,
    gradient: torch.dtype,
    form: StateFormat,
    scale: float = 1.0,
    steps: int = 5,
    device: str = "cpu",
    change: Callable[[list[nn.Parameter], HostAdamW], None] = lambda weights, optimizer: None,
) -> list[torch.Tensor]:
    """Weights and states after some steps of parameters in three groups; `change` comes before the fourth step."""
    generator = torch.Generator().manual_seed(3)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in ODD_SHAPES]
    if gradient != dtype and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has gradients of the weight's dtype alone")
    for weight in weights:
        weight.grad_dtype = None
    groups = [{"params": weights[:4]}, {"params": weights[4:], "lr": 3e-3, "betas": (0.8, 0.9)}]
    options = {"master": form.master, "state_dtype": form.state_dtype, "decay_norms_and_biases": False}
    optimizer = HostAdamW(groups, **SETTINGS, threads=1, **options)
    for step in range(steps):
        for weight in weights:
            drawn = torch.randn(weight.shape, generator=generator)
            weight.grad = drawn.to(device, gradient)
        if step == 3:
            change(weights, optimizer)
        optimizer.step(scale=scale)
    states = [optimizer.state[weight] for weight in weights]
    assert all(state.keys() == states[0].keys() for state in states)
    return [*weights, *(tensor for state in states for tensor in state.values())]


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize(("dtype", "gradient", "form"), CONVERTED)
def test_converted_parameters_get_the_bits_of_one_by_one(
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    gradient: torch.dtype,
    form: StateFormat,
    scale: float,
):
    seen = run(dtype, gradient, form, scale)
    # Matrices and others of the first group, then the matrix and the other of the second.
    assert calls == 5 * [2, 2, 1, 1]
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert_same(seen, run(dtype, gradient, form, scale))
    assert len(calls) == 5 * 4


def hard_numbers(weights: list[nn.Parameter], optimizer: HostAdamW) -> None:
    """Gives weights and gradients hard numbers, as others may between steps: the remainders become stale."""
    for weight in weights:
        bits = torch.tensor(HARD_BITS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        if weight.numel() < len(bits):
            continue
        weight.detach().view(-1)[: len(bits)].copy_(bits)
        weight.grad.view(-1)[-len(bits) :].copy_(bits)


@pytest.mark.parametrize(("dtype", "gradient", "form"), CONVERTED)
def test_numbers_that_are_none_get_the_bits_of_one_by_one(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gradient: torch.dtype, form: StateFormat
):
    seen = run(dtype, gradient, form, scale=0.5, change=hard_numbers)
    assert calls
    assert any(tensor.isnan().any() for tensor in seen)
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert_same(seen, run(dtype, gradient, form, scale=0.5, change=hard_numbers))


def test_converted_parameters_that_began_later_count_their_own_steps(calls: list[int], monkeypatch: pytest.MonkeyPatch):
    def run() -> list[torch.Tensor]:
        weights, optimizer = made(torch.bfloat16)
        train(optimizer, weights[1:], range(4))
        train(optimizer, weights, range(4, 8))
        return [*weights, *(optimizer.state[weight]["step"] for weight in weights)]

    seen = run()
    assert calls == [2, 2] * 4 + [3, 2] * 4
    assert [step.item() for step in seen[-5:]] == [4, 8, 8, 8, 8]
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert_same(seen, run())


@pytest.mark.parametrize(
    ("dtype", "gradient", "form"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] * (n % 3 > 0))
        for n, case in enumerate(CONVERTED)
    ],
)
def test_a_kernel_of_blocks_updates_all_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gradient: torch.dtype, form: StateFormat
):
    """Each parameter begins with a block, and gets the bits that this kernel gives it alone."""
    kernel = Blockwise()
    on_device = checked(kernel)
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: on_device)
    monkeypatch.setattr(together, "LAUNCHING", ("cpu",))
    seen = run(dtype, gradient, form, 0.37, change=hard_numbers)
    checks = len(kernel.calls) - 5 * 4
    # Matrices of 15 and 1024 elements, a scalar and a vector of 7, then a matrix of 4097 and a vector of 48.
    assert kernel.calls[checks:] == 5 * [64 + 1024, 64 + 64, 4160, 64]
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert_same(seen, run(dtype, gradient, form, 0.37, change=hard_numbers))
    assert len(kernel.calls) == checks + 5 * 4 + 5 * 6


def test_without_a_kernel_of_blocks_torchs_updates_them(calls: list[int], monkeypatch: pytest.MonkeyPatch):
    """As where a check of the device's own kernel fails."""
    expected = run(torch.bfloat16, torch.bfloat16, StateFormat())
    on_device = checked(Blockwise())
    monkeypatch.setattr(Blockwise, "supports", lambda *_: False)
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: on_device)
    assert_same(run(torch.bfloat16, torch.bfloat16, StateFormat()), expected)
    assert calls == 2 * 5 * [2, 2, 1, 1]


def test_parameters_that_began_later_count_their_own_steps_in_blocks(monkeypatch: pytest.MonkeyPatch):
    on_device = checked(Blockwise())
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: on_device)

    def run() -> list[torch.Tensor]:
        weights, optimizer = made(torch.bfloat16)
        train(optimizer, weights[1:], range(4))
        train(optimizer, weights, range(4, 8))
        return [*weights, *(optimizer.state[weight]["step"] for weight in weights)]

    monkeypatch.setattr(together, "LAUNCHING", ("cpu",))
    seen = run()
    assert [step.item() for step in seen[-5:]] == [4, 8, 8, 8, 8]
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert_same(seen, run())


def test_scratch_has_at_most_a_tile(calls: list[int], monkeypatch: pytest.MonkeyPatch):
    """Parameters that are larger are updated alone."""
    monkeypatch.setattr(together, "TILE", 1100)
    weights, optimizer = made(torch.bfloat16)
    seen = train(optimizer, weights, range(3))
    assert calls == 3 * [3, 1]
    monkeypatch.setattr(together, "LAUNCHING", ())
    weights, optimizer = made(torch.bfloat16)
    assert_same(seen, train(optimizer, weights, range(3)))


def test_whole_vectors_begin_at_vectors_in_scratch(monkeypatch: pytest.MonkeyPatch):
    """There torch's kernel reads them as it reads them alone."""
    found = []

    def noted(weights: list[torch.Tensor], gradients: list[torch.Tensor], *others: object, **settings: object) -> None:
        found.extend([*weights, *gradients])

    monkeypatch.setattr(together, "LAUNCHING", ("cpu",))
    monkeypatch.setattr(together, "fused_adamw_", noted)
    weights = [nn.Parameter(torch.randn(count).to(torch.bfloat16)) for count in (3, 8, 5, 64, 1, 4)]
    optimizer = HostAdamW(weights, **SETTINGS, threads=1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [tensor.numel() for tensor in found] == 2 * [8, 64, 4, 3, 5, 1]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found if tensor.numel() % 4 == 0)


class Operations(TorchDispatchMode):
    """The operations but for those that make views."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.seen.append(str(function))
        return result


@pytest.mark.parametrize("form", [StateFormat(), StateFormat("compact", "bf16")], ids=str)
def test_the_number_of_operations_does_not_grow_with_that_of_parameters(calls: list[int], form: StateFormat):
    def operations(count: int) -> list[str]:
        weights = [nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = HostAdamW(weights, **SETTINGS, threads=1, master=form.master, state_dtype=form.state_dtype)
        give_gradients(weights, 0)
        optimizer.step(scale=0.5)
        with Operations() as operations:
            optimizer.step(scale=0.5)
        return operations.seen

    seen = operations(3)
    assert seen == operations(30)
    # The host would wait for the device.
    assert not any("_local_scalar_dense" in operation for operation in seen)


def empty(weights: list[nn.Parameter]) -> None:
    weights[1].data = weights[1].data.new_empty(0)


def strided(weights: list[nn.Parameter]) -> None:
    weights[3].data = weights[3].data.t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "dtype", "options", "expected"),
    [
        (empty, torch.float32, {}, [2, 2]),
        (strided, torch.float32, {}, [3, 1]),
        (empty, torch.bfloat16, {}, [2, 2]),
        (strided, torch.bfloat16, {}, [3, 1]),
        (lambda weights: None, torch.bfloat16, {"master": "stochastic"}, []),
        (lambda weights: None, torch.float16, {"master": "stochastic"}, [3, 2]),
        (lambda weights: None, torch.bfloat16, {"state_dtype": "int8"}, []),
    ],
    ids=["empty", "strided", "empty bf16", "strided bf16", "noise", "no noise in fp16", "8 bits"],
)
def test_others_are_updated_one_by_one(
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[nn.Parameter]], None],
    dtype: torch.dtype,
    options: dict[str, str],
    expected: list[int],
):
    def run() -> list[nn.Parameter]:
        weights, optimizer = made(dtype, **options)
        change(weights)
        return train(optimizer, weights, range(3))

    seen = run()
    assert calls == 3 * expected
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


def test_parameters_whose_states_are_elsewhere_are_updated_there(calls: list[int], monkeypatch: pytest.MonkeyPatch):
    def run() -> list[nn.Parameter]:
        weights, optimizer = made(torch.bfloat16)
        optimizer.states.place(weights[:2], torch.device("cpu"))
        return train(optimizer, weights, range(3))

    seen = run()
    assert calls == 3 * [1, 2]
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


@pytest.mark.parametrize("first", [0, 20], ids=["the same", "parts"])
def test_parameters_that_share_memory_are_updated_in_turn(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, first: int
):
    """Weights are tied like this where code sets `.data`."""

    def run() -> list[nn.Parameter]:
        weights, optimizer = made(torch.bfloat16)
        weights[4].data = weights[3].data.view(-1)[first : first + 48]
        return train(optimizer, weights, range(3))

    seen = run()
    assert calls == []
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_on_a_gpu_it_gives_the_numbers_of_one_by_one(monkeypatch: pytest.MonkeyPatch, scale: float):
    def run() -> list[nn.Parameter]:
        weights = parameters(device="cuda")
        return train(scaled(HostAdamW(weights, **SETTINGS, threads=1), scale), weights)

    seen = run()
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert same(seen, run())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("change", [lambda weights, optimizer: None, hard_numbers], ids=["", "hard numbers"])
@pytest.mark.parametrize(("dtype", "gradient", "form"), CONVERTED)
def test_on_a_gpu_converted_parameters_get_the_bits_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    gradient: torch.dtype,
    form: StateFormat,
    change: Callable[[list[nn.Parameter], HostAdamW], None],
):
    seen = run(dtype, gradient, form, 0.37, device="cuda", change=change)
    monkeypatch.setattr(together, "LAUNCHING", ())
    assert_same(seen, run(dtype, gradient, form, 0.37, device="cuda", change=change))
