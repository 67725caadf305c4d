"""Weights that stay in their files: the numbers of memory, changes by users, and changes of files."""

from __future__ import annotations

import copy
import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.errors import KnobError
from offload.files.mapped_files import ChangedFileError, FileSpan, lies_in_file
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.streams import registry
from offload.weights.prefetching import file_homes
from offload.weights.prefetching.file_homes import plan_of, put_in_files, ring_size
from offload.weights.units.partition import CutPoint, cut
from tests.offload.helpers.mapped import (
    LowRank,
    files_of,
    losses_of,
    reads_through,
    trained,
    with_low_rank,
    write_frozen,
)
from tests.offload.helpers.models import Stack, assert_same, attached, stack_inputs
from tests.offload.helpers.open_files import open_files


def model_of(recompute: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    return with_low_rank(Stack(depth=5, recompute=recompute))


def mapped(mode, model: nn.Module, folder: Path):
    """Returns `mode`, which knows where the frozen parameters of `model` are, and their files."""
    spans = write_frozen(model, folder)
    mode.map_weights(spans)
    return mode, files_of(spans)


@pytest.mark.parametrize(
    ("kind", "knobs", "recompute", "ring_bytes"),
    [
        (LayerStream, {}, None, None),
        (LayerStream, {"trained": "device", "outside": "stream"}, "non-reentrant", 40960),
        (LayerStream, {"slots": 1, "file_readers": 1}, "reentrant", 20480),
        (BounceLinear, {"resident": 2, "outside": "stream"}, None, None),
        (ShardOffload, {"shards": 3, "trained": "device"}, None, None),
    ],
)
def test_numbers_are_those_of_memory(tmp_path: Path, kind, knobs, recompute, ring_bytes: int | None):
    expected = trained(model_of(recompute), kind(**knobs))
    model = model_of(recompute)
    mode, _ = mapped(kind(source="mapped", ring_bytes=ring_bytes, **knobs), model, tmp_path)
    assert_same(trained(model, mode), expected)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_built_on_meta_has_the_values_of_its_files(tmp_path: Path, on_meta: bool):
    source = model_of()
    spans = list(write_frozen(source, tmp_path).values())
    with torch.device("meta" if on_meta else "cpu"):
        model = with_low_rank(Stack(depth=5))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad][::-1]
    mode = LayerStream(source="mapped", trained="device")
    mode.map_weights(dict(zip([*frozen[::2], *frozen[1::2]], spans, strict=True)))
    with attached(mode, model):
        state = {name: value for name, value in source.state_dict().items() if not lies_in_file(value)}
        streams = [name for name, p in model.named_parameters() if lies_in_file(p)]
        assert len(streams) == 5 * 6
        named = dict(model.named_parameters())
        assert all(torch.equal(named[name], state[name]) for name in streams)
    # Given back, they are still views of the files.
    assert all(torch.equal(dict(model.named_parameters())[name], state[name]) for name in streams)


def test_only_the_ring_takes_host_memory(tmp_path: Path):
    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped", trained="device", ring_bytes=20480), model, tmp_path)
    footprint = mode.footprint(model)
    assert footprint.host_home_bytes == 0
    assert footprint.file_bytes == footprint.host_weight_bytes > footprint.ring_bytes > 0
    with attached(mode, model):
        with mode.step():
            mode.accumulate(losses_of(model, 0))
        counters = mode.counters()
        assert counters.host_pageable_bytes == footprint.ring_bytes < footprint.file_bytes / 2
        assert counters.file_bytes > footprint.file_bytes
        assert counters.file_wait_ms > 0


def test_a_known_order_is_read_ahead(tmp_path: Path):
    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped", trained="device", slots=2), model, tmp_path)
    with attached(mode, model):
        for step in range(3):
            before = mode.counters().file_bytes
            with mode.step():
                mode.accumulate(losses_of(model, step))
        files, deadline = mode._streamer._files, time.monotonic() + 300
        while not files.is_ready(mode._streamer.cut.units[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        # The first units of the next step are there, and each copy of this one was read once.
        assert files.is_ready(mode._streamer.cut.units[0])
        reads = (mode.counters().file_bytes - before) / plan_of(mode._streamer.cut.units[0]).nbytes
        assert reads <= 2 * (5 + 3) + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter, value: setattr(parameter, "data", value),
        lambda parameter, value: parameter.copy_(value),
        lambda parameter, value: parameter.data.copy_(value),
        lambda parameter, value: parameter.numpy()[:].__setitem__(slice(None), value.numpy()),
    ],
    ids=["data", "copy", "copy into data", "numpy"],
)
def test_a_weight_that_is_changed_between_steps_leaves_its_file(tmp_path: Path, change):
    outcomes = []
    for source in ("memory", "mapped"):
        model = model_of()
        mode, files = mapped(LayerStream(source=source), model, tmp_path)
        stored = [file.read_bytes() for file in files]
        seen = []
        with attached(mode, model):
            for step in range(4):
                with mode.step():
                    seen += mode.accumulate(losses_of(model, step))
                weight = model.blocks[step].up.base.weight
                with torch.no_grad():
                    change(weight, torch.full(weight.shape, 0.1 * (step + 1)))
                    seen.append(model(stack_inputs(9, step)))
                assert source == "memory" or not step or not lies_in_file(model.blocks[step - 1].up.base.weight)
            with mode.inference(), torch.no_grad():
                seen.append(model(stack_inputs(9, 5)))
            seen += [value.clone() for value in model.state_dict().values()]
        assert stored == [file.read_bytes() for file in files]
        outcomes.append(seen)
    assert_same(*outcomes)


def test_a_state_dict_replaces_weights_in_files(tmp_path: Path):
    for assign in (False, True):
        model, other = model_of(), model_of()
        for parameter in other.parameters():
            parameter.data += 0.5
        expected = trained(copy.deepcopy(other), LayerStream())
        mode, _ = mapped(LayerStream(source="mapped"), model, tmp_path)
        with attached(mode, model):
            with mode.step():
                mode.accumulate(losses_of(model, 0))
            model.zero_grad()
            model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            with mode.step():
                losses = mode.accumulate(losses_of(model, 0))
        assert_same(losses, expected[:2])


def test_a_weight_that_begins_to_train_leaves_its_file(tmp_path: Path):
    outcomes = []
    for source in ("memory", "mapped"):
        model = model_of()
        mode, _ = mapped(LayerStream(source=source), model, tmp_path)
        with attached(mode, model):
            with mode.step():
                mode.accumulate(losses_of(model, 0))
            weight = model.blocks[2].norm.weight.requires_grad_()
            with mode.step():
                mode.accumulate(losses_of(model, 1))
            assert weight.grad is not None
            weight.data -= weight.grad
            with mode.step():
                losses = mode.accumulate(losses_of(model, 2))
            outcomes.append([*losses, weight.grad.clone(), weight.detach().clone()])
    assert_same(*outcomes)


class Scaling(nn.Module):
    """Changes its frozen weight in each forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(1.01)
        return rows * self.scale


def test_a_weight_that_a_forward_changes_leaves_its_file(tmp_path: Path):
    outcomes = []
    for source in ("memory", "mapped"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList(nn.Sequential(LowRank(nn.Linear(8, 8)), Scaling()) for _ in range(4)))
        model.forward = lambda rows, model=model: [rows := block(rows) for block in model[0]][-1]
        mode, _ = mapped(LayerStream(source=source, slots=1), model, tmp_path)
        outcomes.append(trained(model, mode))
    assert_same(*outcomes)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "was written or replaced"),
        (lambda file: os.truncate(file, 8000), "and has 8000 now"),
        (lambda file: file.unlink(), "was removed"),
    ],
)
def test_a_file_that_changes_is_an_error_between_and_in_steps(tmp_path: Path, change, how: str):
    for inside in (False, True):
        model = model_of()
        mode, files = mapped(LayerStream(source="mapped", trained="device", slots=1, ring_bytes=20480), model, tmp_path)
        for file in files:
            os.utime(file, ns=(0, 0))
        with attached(mode, model):
            with mode.step():
                mode.accumulate(losses_of(model, 0))
                if inside:
                    change(files[0])
                    with pytest.raises(ChangedFileError, match=how):
                        mode.accumulate(losses_of(model, 1))
            if not inside:
                change(files[0])
            with pytest.raises(ChangedFileError, match=how) as error, mode.step():
                pass
            assert error.value.filename == str(files[0])


def test_slow_and_failing_disks(tmp_path: Path):
    expected = trained(model_of(), LayerStream())
    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped"), model, tmp_path)

    def slow(system, *arguments):
        time.sleep(0.002)
        return system(*arguments)

    with reads_through(slow):
        assert_same(trained(model, mode), expected)

    def broken(system, *arguments):
        raise OSError(errno.EIO, "Input/output error")

    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped"), model, tmp_path)
    with attached(mode, model):
        with reads_through(broken), pytest.raises(OSError, match="check the disk"), mode.step():
            mode.accumulate(losses_of(model, 0))
        with mode.step():
            assert_same(mode.accumulate(losses_of(model, 0)), expected[:2])


def test_threads_end_with_the_mode_and_when_it_is_dropped(tmp_path: Path):
    def readers() -> int:
        return sum(thread.name == "file reader" for thread in threading.enumerate())

    before = open_files()
    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped"), model, tmp_path)
    with attached(mode, model):
        with mode.step():
            mode.accumulate(losses_of(model, 0))
        assert 0 < readers() <= 4
    assert not readers()

    streams = registry.acquire("cpu")
    mode.attach(model, streams)
    with mode.step():
        mode.accumulate(losses_of(model, 0))
    registry.release(streams)
    del model, mode, streams
    gc.collect()
    assert not readers()
    assert not open_files() - before


def test_weights_larger_than_free_memory_are_read_past_the_page_cache(tmp_path: Path, monkeypatch):
    expected = trained(model_of(), LayerStream(trained="device"))
    monkeypatch.setattr(file_homes, "free_host_bytes", lambda: 10000)
    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped", trained="device", ring_bytes=20480), model, tmp_path)
    with attached(mode, model):
        assert mode._streamer._files._ring._readers.reader._direct
    model = model_of()
    mode, _ = mapped(LayerStream(source="mapped", trained="device", ring_bytes=20480), model, tmp_path)
    assert_same(trained(model, mode), expected)


def test_what_cannot_be_in_files_stays_in_memory(tmp_path: Path):
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    block[0].bias.requires_grad_(True)
    transposed = nn.Parameter(torch.ones(4, 6).t(), requires_grad=False)
    block.register_parameter("transposed", transposed)
    model = nn.ModuleList([block])
    (unit,) = cut(model, [CutPoint("block", block)]).units
    path = tmp_path / "file"
    spans = {tensor.host: [FileSpan(path, 64, tensor.nbytes)] for tensor in unit.tensors}
    spans[block[1].weight] = [FileSpan(path, 66, block[1].weight.nbytes)]
    spans[block[1].bias] = [FileSpan(path, 64, 4)]
    put_in_files([unit], spans)
    assert [tensor.name for tensor in unit.tensors if tensor.spans] == ["0.0.weight"]
    assert [tensor.offset for tensor in unit.tensors] == [256 * index for index in range(len(unit.tensors))]
    assert unit.block_bytes == unit.tensors[-1].offset
    assert ring_size([unit], None) == (4096, 1)


def test_refusals_say_what_to_do(tmp_path: Path):
    model = model_of()
    with pytest.raises(KnobError, match="source=mapped: it is not known where the weights are"):
        LayerStream(source="mapped").footprint(model)
    mode, _ = mapped(LayerStream(source="mapped", ring_bytes=1000), model, tmp_path)
    with pytest.raises(KnobError, match=r"ring_bytes=1000: must be at least \d+, the bytes of blocks"):
        mode.footprint(model)
    mode = LayerStream(source="mapped")
    mode.map_weights({})
    with pytest.raises(KnobError, match="no weight that streams lies in the files"):
        mode.footprint(model)


def test_without_a_page_table_the_mode_is_refused_and_the_model_as_it_was(tmp_path: Path, monkeypatch):
    model = model_of()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    mode, files = mapped(LayerStream(source="mapped"), model, tmp_path)
    monkeypatch.setattr(file_homes, "shows_writes", lambda: False)
    with pytest.raises(KnobError, match="/proc/self/pagemap"), attached(mode, model):
        pass
    monkeypatch.undo()
    files[0].unlink()
    with pytest.raises(OSError, match=files[0].name), attached(mode, model):
        pass
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_a_mode_of_activations_passes_the_places_on(tmp_path: Path):
    expected = trained(model_of(), TensorSwap(LayerStream()))
    model = model_of()
    mode, _ = mapped(TensorSwap(LayerStream(source="mapped")), model, tmp_path)
    assert_same(trained(model, mode), expected)
