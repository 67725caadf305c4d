"""Delete any one wait, record or synchronize of the engine, and the stream checker must notice."""

import functools
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import offload
from offload.activations.host_pool import RESERVE_BYTES
from offload.memory.host_memory import HostArena
from offload.modes import shard_offload, tensor_swap
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.worker import UpdateWorker
from offload.sharing.slices import gradient_buckets
from offload.speculation.trials import Speculation
from offload.streams import registry
from offload.streams.registry import Streams
from offload.streams.stream_checker import CheckedEvent, CheckedSignal, CheckedStream, CheckedStreams, StreamOrderError
from offload.weights.gradients import offloader
from tests.offload.helpers.mapped import losses_of, with_low_rank, write_frozen
from tests.offload.helpers.models import Stack, stack_inputs, train, under
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

ENGINE = Path(offload.__file__).parent
# Call sites of waits and records that the parts below reach. Fewer means that the mutations miss a part of the engine.
PLACES = 69
# How often a call is deleted, if nothing notices.
TRIES = 5
CALLS = (
    (CheckedStream, "wait_event"),
    (CheckedEvent, "record"),
    (CheckedEvent, "synchronize"),
    (CheckedStreams, "synchronize"),
    # A thread still waits for the other, else there would be a race. Only the checker's note of the wait is deleted.
    (CheckedSignal, "follow"),
)
# They act for a caller or for a thread that waits. A call site is their line and the caller's.
BETWEEN = ("streams/transfer.py", "streams/registry.py", "optimizer/worker.py", "optimizer/overlap.py")
# Classes in these files that act for themselves.
OWN = ("DeferredFrees", "StashedTensors", "DeviceStates")


@functools.cache
def _name_of(file: str) -> str | None:
    """Returns the path of a file of the engine."""
    path = Path(file)
    return path.relative_to(ENGINE).as_posix() if ENGINE in path.parents else None


def _site() -> str:
    """Returns the engine's line that made the call; in files that act for a caller, also the caller's line."""
    frame, lines = sys._getframe(2), []
    while frame is not None:
        name = _name_of(frame.f_code.co_filename)
        if name is not None and not name.endswith("/stream_checker.py"):
            lines.append(f"{name}:{frame.f_lineno}")
            if name not in BETWEEN or frame.f_code.co_qualname.startswith(OWN):
                break
        frame = frame.f_back
    return " from ".join(lines)


class _Sites:
    """Notes every call site of the synchronisation primitives and disables the ones in `deleted`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: set[str] = set()
        self.deleted: str | None = None
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def notices(self, site: str, part: Callable) -> bool:
        """Tells whether the stream checker raises where `part` runs without the call at `site`."""
        self.deleted = site
        try:
            part()
        except StreamOrderError:
            return True
        finally:
            self.deleted = None
        return False

    def _watched(self, original, name: str):
        def call(*arguments):
            site = f"{name} at {_site()}"
            self.seen.add(site)
            if site != self.deleted:
                original(*arguments)

        return call


def _statistics() -> nn.Module:
    """Buffers that forward updates."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*blocks)))


def _swapping() -> None:
    """Activations that come back and are not used, host blocks that make way, a backward after its step."""

    def forward(rows: int) -> torch.Tensor:
        return model(torch.ones(rows, 8)).square().mean()

    def partial_backward(loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, list(model.head.parameters()), retain_graph=True)

    def require(arena: HostArena, nbytes: int) -> None:
        if arena.pageable_bytes + nbytes > RESERVE_BYTES + 40 * 4096:
            raise MemoryError

    model, mode = Stack(), TensorSwap(Resident())
    with under(mode, model) as attached, patch.object(HostArena, "require", require):
        with attached.step():
            loss = forward(5)
        with attached.step():
            partial_backward(loss)
            del loss
            loss = forward(5)
            del loss
            forward(300).backward()
        with attached.step():
            loss = forward(5)
        partial_backward(loss)


def _without_backward() -> None:
    model, mode = Stack(), BounceLinear()
    with under(mode, model) as attached:
        for _ in range(3):
            with attached.step(), torch.no_grad():
                model.stem(stack_inputs(0, 0))
                model.blocks[0](torch.ones(5, 16))
        with torch.no_grad():
            model(stack_inputs(0, 0))
        with attached.inference():
            for _ in range(3):
                model(stack_inputs(0, 0))


def _buffers(slots: int) -> None:
    model, mode = _statistics(), LayerStream(layers="layers", slots=slots)
    train(model, mode, stack_inputs, steps=2)
    with under(mode, model) as attached, torch.no_grad():
        model(stack_inputs(0, 0))
        with attached.inference():
            model(stack_inputs(0, 0))
            model(stack_inputs(0, 0))


class _Batch:
    """A batch, as the stream checker knows it."""


def _gathering(device_share: int = 0) -> None:
    """Sharers that share homes, sum gradients and update inside backward; units that are fetched and not used."""

    def work(sharers: ThreadSharers) -> None:
        model, mode, streams = Stack(depth=3), LayerStream(slots=2), CheckedStreams(torch.device("cpu"))
        attached = mode.attach(model, streams, AttachOptions(sharers=sharers))
        optimizer = HostAdamW(model.parameters(), threads=1)
        attached.overlap(optimizer, early=True, device_share=device_share)
        optimizer.allocate()
        batch = _Batch()
        for _ in range(3):
            streams.writes(streams.compute, batch, "the copy of the batch")
            with attached.step(norms=True):
                # The first weights come behind it in the copy engine.
                streams.reads(streams.h2d, batch, "the first weights")
                attached.accumulate([lambda: model(stack_inputs(0, sharers.rank)).square().mean()])
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        with attached.step(), torch.no_grad():
            model.blocks[0](torch.ones(5, 16))
        attached.detach()

    # A bucket for each gradient that stays on the device, so that some are summed before those of a unit.
    with patch.object(gradient_buckets, "__defaults__", (1, 1)):
        as_sharers(2, work)


@contextmanager
def _paced(at_once: bool) -> Iterator[None]:
    """The worker makes each update before its offer returns; or none before somebody waits for one."""
    offer, wait, close, apply = UpdateWorker.offer, CheckedSignal.wait, UpdateWorker.close, HostAdamW.apply
    take_back = offloader.GradientRing._take_back
    gate = threading.Event()

    def paced_offer(self, *arguments, **options):
        if not at_once:
            gate.clear()
        done = offer(self, *arguments, **options)
        while at_once and not all(done.is_set() for ends in self._ends.values() for done in ends):
            time.sleep(0.001)
        return done

    def paced_wait(self):
        if threading.current_thread().name != "host optimizer":
            gate.set()
        wait(self)

    def paced_take_back(self):
        gate.set()
        take_back(self)

    def paced_close(self):
        gate.set()
        close(self)

    def paced_apply(self, claims, scale=1.0):
        if threading.current_thread().name == "host optimizer":
            gate.wait(300)
        apply(self, claims, scale)

    gate.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateWorker, "offer", paced_offer)
        patch.setattr(UpdateWorker, "close", paced_close)
        patch.setattr(CheckedSignal, "wait", paced_wait)
        patch.setattr(offloader.GradientRing, "_take_back", paced_take_back)
        patch.setattr(HostAdamW, "apply", paced_apply)
        yield


def _updating(early: bool, at_once: bool, device_share: int = 0, releases: bool = False) -> None:
    """Steps of changing shape with updates beside them, an evaluation, and an end while updates are under way.

    `releases`: gradients are not kept, and the steps have one microbatch.
    """

    def step(microbatches: int) -> None:
        losses = [lambda index=index: model(stack_inputs(0, index)).square().mean() for index in range(microbatches)]
        with attached.step(norms=True):
            attached.accumulate(losses)
        optimizer.step()
        optimizer.zero_grad()

    model, mode, streams = Stack(), LayerStream(slots=2), registry.acquire("cpu")
    optimizer = HostAdamW(model.parameters(), threads=1)
    with _paced(at_once):
        attached = mode.attach(model, streams, AttachOptions(release_gradients=releases))
        try:
            attached.overlap(optimizer, early, device_share)
            for microbatches in (1 if releases else 2, 1, 1):
                step(microbatches)
            with torch.no_grad():
                model(stack_inputs(0, 0))
            step(1)
            optimizer.finish()
            step(1)
            attached.detach()
        finally:
            # A failure must not leave a thread behind.
            with suppress(Exception):
                attached.detach()
            registry.release(streams)


def _speculating(at_once: bool) -> None:
    """Updates that are kept, undone and made again, or taken back: for a reader, by an error, at the end."""

    def step(scale: float | None = 1.0, looks: Callable[[], object] = lambda: None, fails: bool = False) -> None:
        with suppress(InterruptedError), attached.step():
            attached.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
            if fails:
                raise InterruptedError
        looks()
        if scale is not None and not fails:
            optimizer.step(scale=scale)
        else:
            optimizer.skip()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate() -> None:
        model(stack_inputs(0, 0))

    model, mode, streams = Stack(), LayerStream(slots=2), registry.acquire("cpu")
    optimizer = HostAdamW(model.parameters(), threads=1, speculate="on")
    with _paced(at_once):
        attached = mode.attach(model, streams)
        try:
            attached.overlap(optimizer, early=False, speculation=Speculation(1e9, 1 << 20))
            for _ in range(4):
                step()
            for scale in (0.5, None, 0.5):
                step(scale)
            step(looks=evaluate)
            step(0.5, looks=lambda: (optimizer.finish(), evaluate()))
            step(fails=True)
            step()
            with attached.step():
                attached.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
            step()
            with attached.step():
                attached.accumulate([lambda: model(stack_inputs(0, 0)).square().mean()])
            attached.detach()
        finally:
            with suppress(Exception):
                attached.detach()
            registry.release(streams)


def _parts() -> list[Callable[[], object]]:
    """Fewer slots than units, recompute, accumulation, a lone layer, steps without backward, updates by a worker."""
    part = functools.partial
    return [
        *(part(_recomputing, slots) for slots in (1, 2, 3)),
        lambda: train(nn.Linear(8, 4), BounceLinear(), steps=2),
        lambda: train(Stack(), ShardOffload(shards=2), steps=2),
        _swapping,
        _without_backward,
        _reading_files,
        _gathering,
        part(_gathering, device_share=10**9),
        *(part(_buffers, slots) for slots in (1, 2, 3)),
        *(part(_updating, early, at_once) for early in (False, True) for at_once in (False, True)),
        *(part(_speculating, at_once) for at_once in (False, True)),
        *(part(_updating, early, False, device_share=10**9) for early in (False, True)),
        *(part(_updating, True, at_once, releases=True) for at_once in (False, True)),
        part(_updating, True, False, device_share=10**9, releases=True),
    ]


def _reading_files() -> None:
    """Frozen weights that stay in files, and a unit that nobody expected."""
    model, mode = with_low_rank(Stack(depth=3)), LayerStream(source="mapped", trained="device")
    with tempfile.TemporaryDirectory() as folder:
        options = AttachOptions(spans=write_frozen(model, Path(folder)))
        with under(mode, model, options=options) as attached:
            for step in range(2):
                with attached.step():
                    attached.accumulate(losses_of(model, step))
            with torch.no_grad():
                model.blocks[1](torch.ones(5, 16))


def _recomputing(slots: int) -> None:
    train(Stack(recompute="non-reentrant"), BounceLinear(slots=slots), steps=3)


@pytest.fixture
def _ends_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the threads of parts in which the checker raised: something keeps them, and other tests count threads."""

    def noted(worker: UpdateWorker, streams: Streams) -> None:
        make(worker, streams)
        workers.append(worker)

    workers, make = [], UpdateWorker.__init__
    monkeypatch.setattr(UpdateWorker, "__init__", noted)
    yield
    for worker in workers:
        worker.close()


@pytest.mark.usefixtures("_ends_workers")
def test_every_wait_and_record_is_needed(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    monkeypatch.setattr(shard_offload, "MIN_BOUNDARY_BYTES", 1)
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 10000)
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    monkeypatch.setattr(offloader, "RING_UNITS", 1)
    sites = _Sites(monkeypatch)
    runs = []
    for part in _parts():
        sites.seen.clear()
        start = time.perf_counter()
        part()
        runs.append((time.perf_counter() - start, part, set(sites.seen)))
    reached: dict[str, list[Callable]] = {}
    # The fastest first, because one that notices is enough.
    for _, part, seen in sorted(runs, key=itemgetter(0)):
        for site in seen:
            reached.setdefault(site, []).append(part)
    assert len(reached) >= PLACES, "the mutations must reach every place that they reached before"
    survivors = list(reached)
    # Whether an update is still under way when a sharer comes to wait for it is decided by the threads.
    for _ in range(TRIES):
        survivors = [site for site in survivors if not any(sites.notices(site, part) for part in reached[site])]
    assert not survivors
