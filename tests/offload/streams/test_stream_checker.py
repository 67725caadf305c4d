"""The stream checker accepts accesses that events order, and names those that nothing orders."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from offload.streams.stream_checker import CheckedStreams, DeviceWork, HostOperandError, StreamOrderError


class Resource:
    def __str__(self) -> str:
        return "buffer"


@pytest.fixture
def streams() -> CheckedStreams:
    return CheckedStreams(torch.device("cpu"))


def test_a_read_behind_its_write_is_ordered_by_an_event(streams: CheckedStreams):
    buffer, done = Resource(), streams.event()
    streams.writes(streams.h2d, buffer, "copy in")
    done.record(streams.h2d)
    streams.compute.wait_event(done)
    streams.reads(streams.compute, buffer, "kernel")


def test_a_missing_wait_names_both_accesses(streams: CheckedStreams):
    buffer = Resource()
    streams.writes(streams.h2d, buffer, "copy in")
    with pytest.raises(StreamOrderError, match="buffer: 'kernel' on compute may run before 'copy in' on h2d is done"):
        streams.reads(streams.compute, buffer, "kernel")


def test_an_event_recorded_too_early_does_not_order(streams: CheckedStreams):
    buffer, done = Resource(), streams.event()
    streams.reads(streams.compute, buffer, "first kernel")
    done.record(streams.compute)
    streams.reads(streams.compute, buffer, "second kernel")
    streams.h2d.wait_event(done)
    with pytest.raises(StreamOrderError, match="second kernel"):
        streams.writes(streams.h2d, buffer, "copy in")


def test_an_event_never_recorded_does_not_order(streams: CheckedStreams):
    buffer = Resource()
    streams.writes(streams.h2d, buffer, "copy in")
    streams.compute.wait_event(streams.event())
    with pytest.raises(StreamOrderError):
        streams.reads(streams.compute, buffer, "kernel")


def test_order_passes_through_a_third_stream(streams: CheckedStreams):
    buffer, first, second = Resource(), streams.event(), streams.event()
    streams.writes(streams.h2d, buffer, "copy in")
    first.record(streams.h2d)
    streams.compute.wait_event(first)
    second.record(streams.compute)
    streams.d2h.wait_event(second)
    streams.writes(streams.d2h, buffer, "copy over")


def test_the_host_sees_a_copy_only_after_it_synchronises(streams: CheckedStreams):
    buffer, done = Resource(), streams.event()
    streams.writes(streams.d2h, buffer, "copy out")
    done.record(streams.d2h)
    with pytest.raises(StreamOrderError, match="'optimizer' on host"):
        streams.reads(None, buffer, "optimizer")
    done.synchronize()
    streams.reads(None, buffer, "optimizer")


def test_work_queued_after_the_host_wrote_sees_it(streams: CheckedStreams):
    buffer = Resource()
    streams.writes(None, buffer, "optimizer")
    streams.reads(streams.h2d, buffer, "copy in")
    with pytest.raises(StreamOrderError, match="'optimizer' on host may run before 'copy in' on h2d"):
        streams.writes(None, buffer, "optimizer")
    streams.synchronize()
    streams.writes(None, buffer, "optimizer")


def test_two_reads_need_no_order(streams: CheckedStreams):
    buffer = Resource()
    streams.reads(streams.h2d, buffer, "one")
    streams.reads(streams.compute, buffer, "other")


def test_each_thread_has_its_own_current_stream(streams: CheckedStreams):
    """As on a GPU: two models may train at the same time, each in a thread."""
    with streams.on(streams.h2d), ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: streams.compute).result(300) is not streams.compute


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
