"""Weights that stay in their files: the numbers of memory, changes by users, and changes of files."""

import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.files import file_filler
from offload.files.file_filler import coming_in, leave_in_files, plans_of
from offload.files.mapped_files import ChangedFileError, FileSpan, lies_in_file
from offload.knobs import KnobError
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.streams import registry
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
from tests.offload.helpers.models import Stack, assert_same, stack_inputs, under
from tests.offload.helpers.pages import open_files


def model_of(recompute: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    return with_low_rank(Stack(depth=5, recompute=recompute))


def mapped(mode, model: nn.Module, folder: Path):
    """Writes the frozen parameters of `model`; returns `mode`, options that say where they are, and their files."""
    spans = write_frozen(model, folder)
    return mode, AttachOptions(spans=spans), files_of(spans)


def written(folder: Path, **knobs):
    """A model, whose frozen parameters are written, and what `mapped` returns."""
    model = model_of()
    return model, *mapped(LayerStream(source="mapped", trained="device", **knobs), model, folder)


@pytest.mark.parametrize(
    ("kind", "knobs", "recompute", "blocks"),
    [
        (LayerStream, {"trained": "device"}, None, 4),
        (LayerStream, {"trained": "device", "outside": "stream"}, "non-reentrant", 2),
        (LayerStream, {"trained": "device", "slots": 1}, "reentrant", 1),
        # Layers that train as a whole are in memory, beside others in files.
        (BounceLinear, {"resident": 2, "outside": "stream"}, None, 4),
        (ShardOffload, {"shards": 3, "trained": "device"}, None, 4),
    ],
)
def test_numbers_are_those_of_memory(tmp_path: Path, monkeypatch, kind, knobs, recompute, blocks: int):
    monkeypatch.setattr(file_filler, "RING_BLOCKS", blocks)
    expected = trained(model_of(recompute), kind(**knobs))
    model = model_of(recompute)
    mode, options, _ = mapped(kind(source="mapped", **knobs), model, tmp_path)
    assert_same(trained(model, mode, options=options), expected)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_model_built_on_meta_has_the_values_of_its_files(tmp_path: Path, on_meta: bool):
    source = model_of()
    spans = list(write_frozen(source, tmp_path).values())
    with torch.device("meta" if on_meta else "cpu"):
        model = with_low_rank(Stack(depth=5))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad][::-1]
    mode = LayerStream(source="mapped", trained="device")
    options = AttachOptions(spans=dict(zip([*frozen[::2], *frozen[1::2]], spans, strict=True)))
    with under(mode, model, options=options):
        state = {name: value for name, value in source.state_dict().items() if not lies_in_file(value)}
        streams = [name for name, p in model.named_parameters() if lies_in_file(p)]
        assert len(streams) == 5 * 6
        named = dict(model.named_parameters())
        assert all(torch.equal(named[name], state[name]) for name in streams)
    # Given back, they are still views of the files.
    assert all(torch.equal(dict(model.named_parameters())[name], state[name]) for name in streams)


def test_only_the_ring_takes_host_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(file_filler, "RING_BLOCKS", 1)
    model, mode, options, _ = written(tmp_path)
    footprint = mode.footprint(model, options=options)
    assert footprint.host_home_bytes == 0
    assert footprint.file_bytes == footprint.host_weight_bytes > footprint.ring_bytes > 0
    with under(mode, model, options=options) as attached:
        with attached.step():
            attached.accumulate(losses_of(model, 0))
        counters = attached.counters()
        assert counters.host_pageable_bytes == footprint.ring_bytes < footprint.file_bytes / 2
        assert counters.file_bytes > footprint.file_bytes
        assert counters.file_wait_ms > 0


def test_a_known_order_is_read_ahead(tmp_path: Path):
    model, mode, options, _ = written(tmp_path, slots=2)
    with under(mode, model, options=options) as attached:
        for step in range(3):
            before = attached.counters().file_bytes
            with attached.step():
                attached.accumulate(losses_of(model, step))
        filler, deadline = attached._streamer.filler, time.monotonic() + 300
        first = filler._plans[attached._streamer.cut.units[0]]
        while not filler._ring.is_ready(first) and time.monotonic() < deadline:
            time.sleep(0.01)
        # The first units of the next step are there, and each copy of this one was read once.
        assert filler._ring.is_ready(first)
        reads = (attached.counters().file_bytes - before) / first.nbytes
        assert reads <= 2 * (5 + 3) + 1


def begin_to_train(model: nn.Module) -> None:
    model.blocks[2].norm.weight.requires_grad_()


def replace_parameter(model: nn.Module) -> None:
    weight = model.blocks[2].norm.weight
    model.blocks[2].norm.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


CHANGES = {
    "other data": lambda model: setattr(model.blocks[2].norm.weight, "data", torch.ones(16)),
    "a copy": lambda model: model.blocks[2].norm.weight.copy_(torch.ones(16)),
    "a state dict": lambda model: model.load_state_dict(model_of().state_dict()),
    "a state dict in place": lambda model: model.load_state_dict(model_of().state_dict(), assign=True),
    "another parameter": replace_parameter,
    "training": begin_to_train,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_in_a_file_that_is_changed_is_refused(tmp_path: Path, change: str):
    model, mode, options, files = written(tmp_path)
    stored = [file.read_bytes() for file in files]
    with under(mode, model, options=options) as attached:
        with attached.step():
            attached.accumulate(losses_of(model, 0))
        with torch.no_grad():
            CHANGES[change](model)
        with (
            pytest.raises(RuntimeError, match=r"stay in their files \(source=mapped\) .* take source=memory"),
            attached.step(),
        ):
            pass
        if change != "training":
            with pytest.raises(RuntimeError, match="take source=memory"), torch.no_grad():
                model(stack_inputs(9, 0))
    assert stored == [file.read_bytes() for file in files]


class Scaling(nn.Module):
    """Changes its frozen weight in each forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(1.01)
        return rows * self.scale


def test_a_weight_in_a_file_that_a_forward_changes_is_refused(tmp_path: Path):
    model = nn.Sequential(nn.ModuleList(nn.Sequential(LowRank(nn.Linear(8, 8)), Scaling()) for _ in range(4)))
    model.forward = lambda rows: [rows := block(rows) for block in model[0]][-1]
    mode, options, _ = mapped(LayerStream(source="mapped", trained="device"), model, tmp_path)
    with (
        under(mode, model, options=options) as attached,
        pytest.raises(RuntimeError, match=r"was changed in a forward: .* take source=memory"),
        attached.step(),
    ):
        model(torch.ones(2, 8))


def test_a_file_that_changes_is_an_error_between_and_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_filler, "RING_BLOCKS", 1)
    for inside in (False, True):
        model, mode, options, files = written(tmp_path, slots=1)
        for file in files:
            os.utime(file, ns=(0, 0))
        with under(mode, model, options=options) as attached:
            with attached.step():
                attached.accumulate(losses_of(model, 0))
                if inside:
                    os.truncate(files[0], 8000)
                    with pytest.raises(ChangedFileError, match="and has 8000 now"):
                        attached.accumulate(losses_of(model, 1))
            if not inside:
                os.truncate(files[0], 8000)
            with pytest.raises(ChangedFileError, match="and has 8000 now") as error, attached.step():
                pass
            assert error.value.filename == str(files[0])


def test_slow_and_failing_disks(tmp_path: Path):
    expected = trained(model_of(), LayerStream(trained="device"))
    model, mode, options, _ = written(tmp_path)

    def slow(system, *arguments):
        time.sleep(0.002)
        return system(*arguments)

    with reads_through(slow):
        assert_same(trained(model, mode, options=options), expected)

    def broken(system, *arguments):
        raise OSError(errno.EIO, "Input/output error")

    model, mode, options, _ = written(tmp_path)
    with under(mode, model, options=options) as attached:
        with reads_through(broken), pytest.raises(OSError, match="check the disk"), attached.step():
            attached.accumulate(losses_of(model, 0))
        with attached.step():
            assert_same(attached.accumulate(losses_of(model, 0)), expected[:2])


def test_threads_end_with_the_mode_and_when_it_is_dropped(tmp_path: Path):
    def readers() -> int:
        return sum(thread.name == "file reader" for thread in threading.enumerate())

    before = open_files()
    model, mode, options, _ = written(tmp_path)
    with under(mode, model, options=options) as attached:
        with attached.step():
            attached.accumulate(losses_of(model, 0))
        assert 0 < readers() <= 4
    assert not readers()

    streams = registry.acquire("cpu")
    attached = mode.attach(model, streams, options)
    with attached.step():
        attached.accumulate(losses_of(model, 0))
    registry.release(streams)
    del model, attached, streams, options
    gc.collect()
    assert not readers()
    assert not open_files() - before


def test_weights_larger_than_free_memory_are_read_past_the_page_cache(tmp_path: Path, monkeypatch):
    expected = trained(model_of(), LayerStream(trained="device"))
    monkeypatch.setattr(file_filler, "free_host_bytes", lambda: 10000)
    model, mode, options, _ = written(tmp_path)
    with under(mode, model, options=options) as attached:
        assert attached._streamer.filler._ring._reader._direct
    model, mode, options, _ = written(tmp_path)
    assert_same(trained(model, mode, options=options), expected)


@pytest.mark.parametrize("missing", ["trains", "a buffer", "other strides", "an odd place", "other bytes", "no place"])
def test_a_unit_is_in_files_as_a_whole_or_not_at_all(tmp_path: Path, missing: str):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False) for _ in range(2)]
    if missing == "a buffer":
        blocks[0].register_buffer("buffer", torch.ones(4))
    if missing == "other strides":
        blocks[0][0].weight = nn.Parameter(torch.ones(4, 4).t()[:, :3], requires_grad=False)
    units = cut(nn.ModuleList(blocks), [CutPoint(str(index), block) for index, block in enumerate(blocks)]).units
    spans = {tensor.host: [FileSpan(tmp_path, 64, tensor.nbytes)] for unit in units for tensor in unit.tensors}
    bias = blocks[0][0].bias
    bias.requires_grad_(missing == "trains")
    spans[bias] = [FileSpan(tmp_path, 66 if missing == "an odd place" else 64, 8 if missing == "other bytes" else 16)]
    if missing == "no place":
        del spans[bias]
    leave_in_files(units, spans)
    assert [unit.is_fixed for unit in units] == [False, True]
    assert list(plans_of(units, spans)) == units[1:]


def test_refusals_say_what_to_do(tmp_path: Path):
    with pytest.raises(KnobError, match="source=mapped: it is not known where the weights are"):
        LayerStream(source="mapped").footprint(model_of())
    # Adapters that train in the same units.
    mode, options, _ = mapped(LayerStream(source="mapped"), model := model_of(), tmp_path)
    with pytest.raises(KnobError, match=r"no unit that streams lies in the files as a whole.*trained=device"):
        mode.footprint(model, options=options)


def test_units_with_buffers_are_refused_with_a_mode_whose_units_have_none(tmp_path: Path):
    """The layers of Gemma 4 have a buffer each."""
    model = model_of().requires_grad_(False)
    mode, options, _ = mapped(LayerStream(source="mapped"), model, tmp_path)
    for block in model.blocks:
        block.register_buffer("scalar", torch.ones(1))
    with pytest.raises(KnobError, match=r"units with buffers, .*: take memory, or the mode bounce_linear"):
        mode.footprint(model, options=options)


def test_a_file_that_is_gone_leaves_the_model_as_it_was(tmp_path: Path):
    model = model_of()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    mode, options, files = mapped(LayerStream(source="mapped", trained="device"), model, tmp_path)
    files[0].unlink()
    with pytest.raises(OSError, match=files[0].name), under(mode, model, options=options):
        pass
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_a_mode_of_activations_passes_the_places_on(tmp_path: Path):
    expected = trained(model_of(), TensorSwap(LayerStream(trained="device")))
    model = model_of()
    mode, options, _ = mapped(TensorSwap(LayerStream(source="mapped", trained="device")), model, tmp_path)
    assert_same(trained(model, mode, options=options), expected)


@pytest.mark.parametrize(
    ("uses", "held", "slots", "count", "expected"),
    [
        # Forward, some of it there.
        ([3, 4, 5, 6], [2, 3], 2, 3, [4, 5, 6]),
        # The turn: what is in slots then is used without a copy, and what has made way comes again.
        ([4, 5, 4, 3, 2, 1], [3, 2, 4], 3, 4, [5, 2, 1]),
        ([1, 2, 1, 2], [], 2, 5, [1, 2]),
        ([1, 2, 1, 2], [], 1, 5, [1, 2, 1, 2]),
        ([1, 2, 3], [], 2, 0, []),
        ([], [1], 2, 4, []),
    ],
)
def test_units_are_read_ahead_as_the_prefetcher_will_copy_them(uses, held, slots, count, expected):
    assert coming_in(uses, held, slots, count) == expected
