"""Claims: updates taken now and applied later, beside the parameter or elsewhere, alone or with others."""

import threading
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.optimizer import claims as claims_module
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.claims import Claim, update_elsewhere, update_in_place
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate, HyperParameters
from offload.optimizer.states import States
from offload.torch_private.torch_internals import TorchDispatchMode
from tests.offload.helpers.kernels import FEW, Blockwise, checked, needs_gpu
from tests.offload.helpers.models import assert_same, under, with_copy
from tests.offload.helpers.optimizers import SETTINGS, give_gradients, parameters, same, train
from tests.offload.helpers.updates import Mixed, host_adamw, made, one_step


def test_a_claim_is_applied_later_as_it_was_taken():
    now, later = parameters(), parameters()
    train(HostAdamW(now, **SETTINGS, threads=1), now, range(1))
    optimizer = HostAdamW(later, **SETTINGS, threads=1)
    give_gradients(later, 0)
    claims = optimizer.claim(later)
    before = [weight.detach().clone() for weight in later]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 7.0
    assert same(later, before)
    thread = threading.Thread(target=optimizer.apply, args=(claims,))
    thread.start()
    thread.join(300)
    assert same(now, later)


def claimed(weight: nn.Parameter, format: StateFormat, placed: bool) -> tuple[Claim, dict[str, torch.Tensor]]:
    """A claim of the parameter's first update, and its state."""
    states = States(format, defaultdict(dict))
    if placed:
        states.place([weight], torch.device("cpu"))
    (state,) = states.begin([weight])
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    return Claim(weight, gradient, HyperParameters(1e-2, 0.9, 0.95, 1e-8, 0.1), format, 5), state


@pytest.mark.parametrize("format", FEW, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_elsewhere_gives_the_weight_that_one_in_place_writes(
    dtype: torch.dtype, transposed: bool, format: StateFormat
):
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    start = start.t() if transposed else start
    here, there = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    claim, state = claimed(here, format, placed=False)
    update_in_place(claim, state, FusedUpdate(), 0.5, [range(here.numel())])
    claim, state = claimed(there, format, placed=True)
    new = update_elsewhere(claim, state, claim.gradient, FusedUpdate(), scale=0.5)
    assert not torch.equal(here, start)
    assert torch.equal(there, start)
    assert new.dtype == dtype
    assert torch.equal(new, here)


def test_a_scale_that_comes_after_updates_is_refused_and_the_step_can_be_ended():
    """It would reach the updates alone that have not begun."""
    ours, theirs = with_copy(made(Mixed))
    for model, early in ((ours, True), (theirs, False)):
        mode = BounceLinear()
        with under(mode, model) as attached:
            optimizer = host_adamw(model)
            attached.overlap(optimizer, early)
            for step in range(3):
                one_step(model, attached, step)
                if early and optimizer.has_begun:
                    with pytest.raises(RuntimeError, match=r"^step\(scale=0\.5\): .* let updates begin after backward"):
                        optimizer.step(scale=0.5)
                assert optimizer.has_begun == (early and step > 0)
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


# Small parameters of a device.


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Blockwise:
    """Treats the CPU as a device with a kernel of blocks, which is returned."""
    kernel = Blockwise()
    on_device = checked(kernel)
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: on_device)
    monkeypatch.setattr(claims_module, "LAUNCHING", ("cpu",))
    return kernel


def assert_as_one_by_one(run: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run()
    monkeypatch.setattr(claims_module, "LAUNCHING", ())
    assert_same(seen, run())


def in_groups(dtype: torch.dtype = torch.bfloat16, **options) -> tuple[list[nn.Parameter], HostAdamW]:
    """Two groups; the last parameters have another learning rate."""
    weights = parameters(dtype)
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 3e-3}]
    return weights, HostAdamW(groups, **SETTINGS, threads=1, **options)


# Some are no whole number of vectors; one is a scalar.
ODD_SHAPES = [(3, 5), (64, 16), (), (7,), (48,), (17, 241)]
# Every master and each kind of moments that a kernel of blocks takes.
TOGETHER = [
    (torch.bfloat16, torch.bfloat16, StateFormat()),
    (torch.bfloat16, torch.bfloat16, StateFormat("compact", "bf16")),
    (torch.bfloat16, torch.float32, StateFormat()),
    (torch.float32, torch.float32, StateFormat("compact", "bf16")),
    (torch.float32, torch.bfloat16, StateFormat()),
]
# Numbers at which rounding and its rest are hard: zeros, ties, the least, the largest and no numbers at all.
HARD_BITS = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x3F80, 0xBF81]


def with_hard_numbers(
    dtype: torch.dtype, gradient: torch.dtype, form: StateFormat, device: str = "cpu"
) -> list[torch.Tensor]:
    """Weights and states after five steps of parameters in three groups.

    Before the fourth, weights and gradients get hard numbers, as others may give them: remainders become outdated.
    """
    generator = torch.Generator().manual_seed(3)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in ODD_SHAPES]
    if gradient != dtype and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has gradients of the weight's dtype alone")
    groups = [{"params": weights[:4]}, {"params": weights[4:], "lr": 3e-3, "betas": (0.8, 0.9)}]
    options = {"master": form.master, "state_dtype": form.state_dtype, "decay_norms_and_biases": False}
    optimizer = HostAdamW(groups, **SETTINGS, threads=1, **options)
    hard = torch.tensor(HARD_BITS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for step in range(5):
        for weight in weights:
            weight.grad_dtype = None
            weight.grad = torch.randn(weight.shape, generator=generator).to(device, gradient)
            if step == 3 and weight.numel() >= len(hard):
                weight.detach().view(-1)[: len(hard)].copy_(hard)
                weight.grad.view(-1)[-len(hard) :].copy_(hard)
        optimizer.step(scale=0.37)
    return [*weights, *(tensor for weight in weights for tensor in optimizer.state[weight].values())]


@pytest.mark.parametrize(("dtype", "gradient", "form"), TOGETHER, ids=str)
def test_small_parameters_of_a_device_get_the_bits_of_one_by_one(
    together: Blockwise, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gradient: torch.dtype, form: StateFormat
):
    assert_as_one_by_one(lambda: with_hard_numbers(dtype, gradient, form), monkeypatch)
    # Matrices of 15 and 1024 elements, a scalar and a vector of 7, then a matrix of 4097 and a vector of 48; each
    # begins with a block. Then one by one.
    assert together.calls[: 5 * 4] == 5 * [64 + 1024, 64 + 64, 4160, 64]
    assert len(together.calls) == 5 * 4 + 5 * 6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "gradient", "form"), TOGETHER, ids=str)
def test_on_a_gpu_small_parameters_get_the_bits_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gradient: torch.dtype, form: StateFormat
):
    assert_as_one_by_one(lambda: with_hard_numbers(dtype, gradient, form, device="cuda"), monkeypatch)


@pytest.mark.parametrize(
    ("tile", "per_step"), [(1 << 24, [512, 2560]), (1600, [512, 1024, 1536]), (1100, [1536, 512, 1024])]
)
def test_at_most_a_tile_of_elements_shares_a_call(
    together: Blockwise, monkeypatch: pytest.MonkeyPatch, tile: int, per_step: list[int]
):
    """A parameter of more is updated alone, before the others."""
    monkeypatch.setattr(claims_module, "TILE", tile)

    def run() -> list[torch.Tensor]:
        weights, optimizer = in_groups()
        return train(optimizer, weights, range(3))

    assert_as_one_by_one(run, monkeypatch)
    assert together.calls[: 3 * len(per_step)] == 3 * per_step


def test_each_parameter_counts_its_own_steps(together: Blockwise, monkeypatch: pytest.MonkeyPatch):
    """One of them begins later."""
    steps = []

    def run() -> list[torch.Tensor]:
        weights, optimizer = in_groups()
        train(optimizer, weights[1:], range(4))
        train(optimizer, weights, range(4, 8))
        steps.append([optimizer.state[weight]["step"].item() for weight in weights])
        return weights

    assert_as_one_by_one(run, monkeypatch)
    assert steps == 2 * [[4, 8, 8, 8, 8]]


def test_without_a_kernel_of_blocks_each_is_updated_alone(together: Blockwise, monkeypatch: pytest.MonkeyPatch):
    """As where a check of the device's own kernel fails."""
    monkeypatch.setattr(Blockwise, "supports", lambda *_: False)
    assert_as_one_by_one(lambda: with_hard_numbers(torch.bfloat16, torch.bfloat16, StateFormat()), monkeypatch)
    assert not together.calls


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


def test_the_number_of_operations_does_not_grow_with_that_of_parameters(
    together: Blockwise, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Blockwise, "__call__", lambda *_: None)

    def operations(count: int) -> list[str]:
        weights = [nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16)) for _ in range(count)]
        optimizer = HostAdamW(weights, **SETTINGS, threads=1)
        give_gradients(weights, 0)
        optimizer.step(scale=0.5)
        with Operations() as operations:
            optimizer.step(scale=0.5)
        return operations.seen

    seen = operations(3)
    assert seen == operations(30)
    # The host would wait for the device.
    assert not any("_local_scalar_dense" in operation for operation in seen)


def empty(weights: list[nn.Parameter], _: HostAdamW) -> None:
    weights[1].data = weights[1].data.new_empty(0)


def strided(weights: list[nn.Parameter], _: HostAdamW) -> None:
    weights[3].data = weights[3].data.t().contiguous().t()


def placed(weights: list[nn.Parameter], optimizer: HostAdamW) -> None:
    optimizer.states.place(weights[:2], torch.device("cpu"))


def tied(weights: list[nn.Parameter], _: HostAdamW) -> None:
    """As where code sets `.data`."""
    weights[4].data = weights[3].data.view(-1)[20:68]


def as_they_are(weights: list[nn.Parameter], _: HostAdamW) -> None:
    pass


# The sizes of the calls that parameters share. They have 336, 48, 16, 1024 and 1536 elements.
@pytest.mark.parametrize(
    ("change", "dtype", "options", "shared"),
    [
        (empty, torch.bfloat16, {}, [384 + 64, 1024 + 1536]),
        (strided, torch.bfloat16, {}, [384 + 64 + 64, 1536]),
        (placed, torch.bfloat16, {}, [64, 1024 + 1536]),
        (tied, torch.bfloat16, {}, []),
        (as_they_are, torch.bfloat16, {"master": "stochastic"}, []),
        (as_they_are, torch.bfloat16, {"state_dtype": "int8"}, []),
        (as_they_are, torch.float16, {}, []),
        (as_they_are, torch.float32, {"master": "stochastic"}, [384 + 64 + 64, 1024 + 1536]),
    ],
    ids=["empty", "strided", "placed", "tied", "noise", "8 bits", "float16", "no noise in float32"],
)
def test_others_are_updated_one_by_one(
    together: Blockwise,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[nn.Parameter], HostAdamW], None],
    dtype: torch.dtype,
    options: dict[str, str],
    shared: list[int],
):
    launched = []
    update_blocks = claims_module._update_blocks

    def noted(batch, states, kernel, scale: float) -> None:
        update_blocks(batch, states, kernel, scale)
        launched.append(kernel.calls[-1])

    monkeypatch.setattr(claims_module, "_update_blocks", noted)

    def run() -> list[torch.Tensor]:
        weights, optimizer = in_groups(dtype, **options)
        change(weights, optimizer)
        return train(optimizer, weights, range(3))

    assert_as_one_by_one(run, monkeypatch)
    assert launched == 3 * shared
