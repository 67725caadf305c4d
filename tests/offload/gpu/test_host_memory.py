"""Page-locked memory on a real device: unlocked however it goes, and done without where it cannot be had."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena, lock_pages, unlock_pages
from offload.memory.limits import free_host_bytes
from offload.modes.bounce_linear import BounceLinear
from offload.modes.none import Resident
from offload.streams import registry
from tests import ROOT
from tests.offload.helpers.dropped import LOCKING, MODES, check_attempts, made_model
from tests.offload.helpers.late import DELAY_CYCLES, ON_A_GPU, gpu_inputs
from tests.offload.helpers.models import assert_same, train, under
from tests.offload.helpers.page_locks import RecordedRuntime

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("small")]
GPU = torch.device("cuda", 0)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> RecordedRuntime:
    runtime = RecordedRuntime()
    runtime.install(monkeypatch)
    return runtime


@pytest.fixture
def cuda_streams() -> Iterator[registry.Streams]:
    streams = registry.acquire("cuda")
    yield streams
    registry.release(streams)


def assert_usable() -> None:
    """Fails if an error is pending, or if memory cannot be page-locked."""
    assert torch.arange(1000, device="cuda").sum().item() == 499500
    torch.cuda.synchronize()
    arena = HostArena(GPU)
    block = arena.allocate(2**20, "a test")
    assert block.bytes.is_pinned()
    assert block.bytes.fill_(3).cuda().float().mean().item() == 3
    arena.close()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_is_dropped_in_mid_step_unlocks_its_memory_first(
    name: str, where: str, runtime: RecordedRuntime, cuda_streams: registry.Streams
):
    for locked in check_attempts(name, where, cuda_streams, attempts=10):
        # torch's own allocator locks that of save_on_cpu, and keeps it.
        assert (locked > 0 and name in LOCKING) == (sum(runtime.ranges.values()) > 0)
        assert (runtime.refused, runtime.unmapped) == (0, [])
    assert_usable()


@pytest.mark.parametrize("name", LOCKING)
def test_a_mode_whose_memory_cannot_be_locked_trains_all_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    expected = train(made_model(), Resident(), gpu_inputs, device="cuda")
    runtime = RecordedRuntime(refuse=True)
    runtime.install(monkeypatch)
    message = r"page-locking .* failed with part or all of the requested memory range is already mapped, CUDA error 712"
    with pytest.warns(RuntimeWarning, match=message):
        result = train(made_model(), MODES[name](), gpu_inputs, device="cuda")
    assert_same(result, expected)
    assert runtime.refused
    monkeypatch.undo()
    assert_usable()


def test_what_cannot_be_locked_or_unlocked_leaves_no_pending_error():
    arena = HostArena(GPU)
    block = arena.allocate(2**20, "weights")
    assert "CUDA error 712" in lock_pages(block.bytes.data_ptr(), 4096, GPU), "it is locked already"
    assert_usable()
    arena.close()
    assert "CUDA error" in lock_pages(2**20, 2**50, GPU), "it is no memory"
    assert_usable()
    unlocked = torch.zeros(2**20, dtype=torch.uint8)
    unlock_pages(unlocked.data_ptr(), GPU, wait=True)
    assert_usable()


@pytest.mark.parametrize("beside", [False, True], ids=["in the main thread", "in another thread"])
def test_memory_that_goes_while_copies_use_it_waits_for_them(runtime: RecordedRuntime, beside: bool):
    block = HostArena(GPU).allocate(2**24, "weights")
    tensors = [block.piece(0, 2**24).fill_(7)]
    del block
    on_device = torch.zeros(2**24, dtype=torch.uint8, device="cuda")
    stream, done, idle = torch.cuda.Stream(), torch.cuda.Event(), []
    stream.wait_stream(torch.cuda.current_stream())
    runtime.on_unregister = lambda: idle.append(done.query())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200 * DELAY_CYCLES)
        on_device.copy_(tensors[0], non_blocking=True)
        done.record()
    assert not done.query()
    if beside:
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join(300)
    else:
        tensors.clear()
    assert idle == [True]
    assert runtime.ranges == {}
    assert on_device.eq(7).all()


def test_an_address_is_locked_again_after_its_memory_was_dropped(runtime: RecordedRuntime):
    addresses = []
    for _ in range(20):
        block = HostArena(GPU).allocate(2**26, "weights")
        addresses.append(block.bytes.data_ptr())
        assert block.bytes.is_pinned()
        del block
        gc.collect()
    assert len(set(addresses)) < 20
    assert (runtime.refused, runtime.unmapped, runtime.ranges) == (0, [], {})


def test_a_model_larger_than_the_host_is_refused_and_the_process_goes_on():
    with torch.device("meta"):
        layers = free_host_bytes() // 2**34 + 2
        large = nn.Sequential(*(nn.Linear(2**16, 2**16) for _ in range(layers)))
    message = r"GiB of host memory are needed, \d+\.\d\d GiB are free"
    with pytest.raises(MemoryError, match=message), under(BounceLinear(), large, "cuda"):
        pass
    assert_usable()


# 64 TiB: more than a host has, and than the driver can make a table of pages for.
FAR_TOO_MUCH = 2**46


def test_a_block_larger_than_the_host_is_refused_and_the_process_goes_on():
    arena = HostArena(GPU)
    with pytest.raises(MemoryError, match=r"host memory for weights: 65536\.00 GiB"):
        arena.allocate(FAR_TOO_MUCH, "weights")
    assert (arena.pinned_bytes, arena.pageable_bytes) == (0, 0)
    assert_usable()


def test_where_nobody_knows_what_is_free_the_system_or_the_driver_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offload.memory.host_memory.free_host_bytes", lambda **_: None)
    arena, told = HostArena(GPU), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            arena.allocate(FAR_TOO_MUCH, "weights")
        except MemoryError as error:
            told.append(str(error))
    told += [str(warning.message) for warning in caught]
    assert len(told) == 1
    assert told[0].startswith(("host memory for weights: 65536.00 GiB", "page-locking weights (65536.00 GiB"))
    assert arena.pinned_bytes == 0
    monkeypatch.undo()
    assert_usable()


FEW_LOCKS = """
import resource, sys, warnings
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
import torch
from offload.modes.none import Resident
from tests.offload.helpers.dropped import MODES, made_model
from tests.offload.helpers.late import gpu_inputs
from tests.offload.helpers.models import assert_same, train

expected = train(made_model(), Resident(), gpu_inputs, device="cuda")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        result = train(made_model(), MODES["layer_stream"](), gpu_inputs, device="cuda")
        torch.cuda.synchronize()
        assert_same(result, expected)
warned = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
print("\\n".join(warned) or "everything was locked")
"""


def test_a_small_limit_on_locked_memory_makes_it_pageable():
    # Root may lock what it likes, unless this capability is taken away.
    without = [["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]] if shutil.which("setpriv") else []
    for prefix in (*without, []):
        command = [*prefix, sys.executable, "-c", FEW_LOCKS]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if result.returncode == 0 or not prefix:
            break
    assert result.returncode == 0, result.stderr
    if result.stdout == "everything was locked\n":
        pytest.skip(
            f"this driver locks memory beyond RLIMIT_MEMLOCK (64 KiB), {'without' if prefix else 'with'} setpriv"
        )
    lines = result.stdout.splitlines()
    # One for each arena: two times, the weights'.
    assert len(lines) == 2
    assert all(line.startswith("page-locking ") and "Raise `ulimit -l`" in line for line in lines)


UNCAUGHT = """
import torch
from offload.streams import registry
from tests.offload.helpers.dropped import MODES, fail, made_model
from tests.offload.helpers.models import stack_inputs

model, mode = made_model(), MODES["{name}"]()
attached = mode.attach(model, registry.acquire("cuda"))
assert {name!r} == "tensor_swap" or attached.counters().host_pinned_bytes
model.blocks[1].register_forward_hook(fail)
mode.itself = attached
with attached.step():
    model(stack_inputs(0, 0, "cuda"))
"""


@pytest.mark.parametrize("name", LOCKING)
def test_an_uncaught_exception_ends_the_process_with_its_own_message_alone(name: str):
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-c", UNCAUGHT.format(name=name)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.strip().endswith("StepError")
    assert "Exception ignored" not in result.stderr
