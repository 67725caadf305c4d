"""The watch over operations of a forward: host memory and device memory do not meet in one operation."""

import pytest
import torch
import torch.nn.functional as F

from offload.streams.device_work import DeviceWork, HostOperandError


@pytest.fixture
def home() -> torch.Tensor:
    return torch.randn(4, 4)


@pytest.fixture
def on_device() -> torch.Tensor:
    return torch.randn(4, 4)


def watched(home: torch.Tensor) -> DeviceWork:
    return DeviceWork([(torch.zeros(3), "other"), (home, "layer")], lambda: True)


@pytest.mark.parametrize(
    "operation",
    [
        lambda home, other: other + home,
        lambda home, other: F.linear(other, home),
        lambda home, other: other @ home[1:3].T,
        lambda home, other: torch.cat([other, home]),
        lambda home, other: other.add_(home),
        lambda home, other: F.embedding(torch.zeros_like(other, dtype=torch.long), home),
        lambda home, other: other * (home * 2),
        lambda home, other: other * (home * torch.ones(4) + torch.arange(4)),
    ],
    ids=["add", "linear", "view", "list", "in place", "index", "computed", "computed twice"],
)
def test_an_operation_of_both_is_refused(operation, home: torch.Tensor, on_device: torch.Tensor):
    with pytest.raises(HostOperandError, match=r"(layer|memory computed from it): aten"), watched(home):
        operation(home, on_device)
    with watched(torch.zeros(2)):
        operation(home, on_device)


def test_operations_of_one_side_and_copies_between_them_are_not(home: torch.Tensor, on_device: torch.Tensor):
    with watched(home):
        on_device + on_device * torch.ones(4)
        home.mul_(2).add_(torch.ones(4) * home.mean())
        on_device.copy_(home)
        home.copy_(on_device)
        # Numbers may be on either side.
        on_device * home.sum()


def test_a_copy_to_a_device_that_is_named_is_there(home: torch.Tensor, on_device: torch.Tensor):
    with watched(home):
        on_device + home.to(torch.device("cpu"), copy=True)
        with pytest.raises(HostOperandError):
            on_device.double() + home.to(torch.float64)


def test_memory_that_is_used_again_is_not_taken_for_the_hosts(home: torch.Tensor, on_device: torch.Tensor):
    with watched(home):
        for _ in range(50):
            computed = home * 2
            del computed
            on_device + on_device.clone()


def test_work_on_other_streams_is_the_engines_own(home: torch.Tensor, on_device: torch.Tensor):
    with DeviceWork([(home, "layer")], lambda: False):
        on_device + home


@torch.library.custom_op("offload_tests::product", mutates_args=())
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right).float()


@torch.library.custom_op("offload_tests::cast_product", mutates_args=())
def cast_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right).float()


cast_product.register_autocast("cpu", torch.float32)


OPERATIONS = {
    "none": product,
    "a rule": cast_product,
    "bilinear": lambda left, right: F.bilinear(left, right, torch.stack([left, right])),
    "inverse": lambda left, right: torch.pinverse(left),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
@pytest.mark.parametrize("enabled", [False, True])
def test_operations_made_of_others_see_the_autocast_of_their_caller(
    operation, enabled: bool, home: torch.Tensor, on_device: torch.Tensor
):
    """Also where a rule of theirs, or of torch, keeps autocast from what they are made of."""
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        expected = operation(home, on_device)
        with watched(torch.zeros(2)):
            assert torch.equal(operation(home, on_device), expected)
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(product(home, on_device), torch.mm(home, on_device))
