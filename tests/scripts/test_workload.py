"""The steps that are measured: equal losses under modes, updates, memory given back."""

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from hydra.errors import HydraException
from torch import nn

from offload import l2_norm
from scripts import bench, bench_ranks
from scripts.workload import Norms, Workload, make_workload, parsed, parser, timed_steps

DIT = (
    "--model=flux_small", "--set", "batch_size=2", "dataset.shape=[16, 16, 16]",
    "model.overrides={num_layers: 1, num_single_layers: 1, num_attention_heads: 2}",
)  # fmt: skip
BLOCKS = ("--hidden=32", "--intermediate=64", "--heads=2", "--blocks=2", "--seq-len=8")
MODEL = (
    "--model=tiny", "--set", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2",
    "seq_len=8", "batch_size=4", "microbatches=2", "dataset=synthetic",
)  # fmt: skip
UNET = (
    "--model=unet_small", "--set", "model.overrides={block_out_channels: [16, 16]}", "batch_size=2",
    "dataset.size=8",
)  # fmt: skip


def workload(spec: str, *arguments: str) -> Workload:
    return make_workload(spec, parser("").parse_args(["--device=cpu", *arguments]))


def losses(spec: str, *arguments: str) -> list[float]:
    with workload(spec, *arguments) as made:
        return [made.step().item() for _ in range(3)]


@pytest.mark.parametrize(
    "shape", [BLOCKS, (*BLOCKS, "--head=40", "--recompute"), MODEL], ids=["blocks", "llama", "tiny"]
)
@pytest.mark.slow
def test_modes_have_the_losses_of_the_resident_model(shape: tuple[str, ...]):
    resident = losses("none", *shape)
    assert losses("layer_stream:slots=2", *shape) == losses("bounce_linear", *shape) == resident


def test_a_model_brings_its_task_and_data():
    with workload("layer_stream", *UNET) as made:
        assert set(made.batch()) >= {"noisy", "target", "labels"}
        assert torch.isfinite(made.step())


@pytest.mark.parametrize("clips", [False, True])
def test_what_a_mode_does_not_sum_is_summed_before_the_update(clips: bool):
    def doubled(model: nn.Module, norms: Norms, summed: Collection[nn.Parameter]) -> Norms:
        assert not summed
        for parameter in model.parameters():
            parameter.grad.mul_(2)
        return {parameter: 2 * norms.get(parameter, l2_norm(parameter.grad) / 2) for parameter in model.parameters()}

    update = ("--optimizer", "--threads=1", *(["--clip-norm=0.01"] if clips else []))
    with workload("layer_stream", *BLOCKS, *update) as once, workload("layer_stream", *BLOCKS, *update) as twice:
        twice.reduce = doubled
        for made in (once, twice):
            made.step()
            made.optimizer.finish()
        states = [[made.optimizer.state[p]["exp_avg"] for p in made.model.parameters()] for made in (once, twice)]
    # Clipped to one norm, or twice as large.
    for one, two in zip(*states, strict=True):
        torch.testing.assert_close(two, one if clips else 2 * one)


@pytest.mark.parametrize("spec", ["none", "layer_stream"])
def test_no_matrix_is_zero_and_values_are_those_of_the_resident_model(spec: str):
    with workload(spec, *DIT) as made, workload("none", *DIT) as resident:
        matrices = {name: matrix for name, matrix in made.model.named_parameters() if matrix.ndim >= 2}
        of_resident = dict(resident.model.named_parameters())
        assert all(matrix.any() and torch.equal(matrix, of_resident[name]) for name, matrix in matrices.items())


@pytest.mark.parametrize("spec", ["none", "layer_stream:slots=1"])
def test_forwards_in_a_row_have_no_gradients(spec: str):
    with workload(spec, *MODEL, "--forward", "3") as made:
        loss = made.step()
        assert not loss.requires_grad
        assert torch.equal(loss, made.step())


def test_updates_are_part_of_the_step_of_modes_alone():
    resident, updated = losses("none", *MODEL, "--optimizer"), losses("layer_stream", *MODEL, "--optimizer")
    # Every step of a model has the same batch.
    assert resident[0] == resident[2] == updated[0] != updated[2]


def test_steps_are_counted_without_those_of_the_warm_up():
    with workload("layer_stream", *MODEL) as made:
        timed = timed_steps(made, warmup=1, steps=2)
    assert len(timed.times_ms) == 2
    assert min(timed.times_ms) > 0
    assert 0 < timed.grown.h2d_bytes < timed.after.h2d_bytes


def test_an_option_that_does_not_exist_is_hydras_error():
    with pytest.raises(HydraException, match="no_such_model"):
        workload("none", "--model=no_such_model")


@pytest.mark.parametrize("module", [bench, bench_ranks])
@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("cuda", "error: --device cuda: torch finds no GPU; use --device cpu"),
        ("cuda:1", "error: --device cuda:1: torch finds no GPU; use --device cpu"),
        ("gpu", "argument --device: 'gpu' is not cuda, cuda:N or cpu"),
        ("meta", "argument --device: 'meta' is not cuda, cuda:N or cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(monkeypatch, capsys, module, device: str, line: str):
    monkeypatch.setattr("sys.argv", ["bench.py", "--device", device])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        module.main()
    shown = capsys.readouterr()
    assert (end.value.code if isinstance(end.value.code, str) else shown.err.strip()).endswith(line)
    assert shown.out == ""


def test_a_gpu_behind_the_last_one_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["bench.py", "--device=cuda:2"])
    with pytest.raises(SystemExit, match=r"^error: --device cuda:2: no such GPU; torch finds 2, numbered from 0$"):
        parsed(parser(""))
    monkeypatch.setattr("sys.argv", ["bench.py", "--device=cuda:1"])
    assert parsed(parser("")).device == "cuda:1"


@pytest.mark.parametrize("module", [bench, bench_ranks])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch, capsys, module
):
    monkeypatch.setattr("sys.argv", ["bench.py", "--device=cpu", f"--json={tmp_path / 'nowhere' / 'figures.json'}"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == f"error: --json {tmp_path}/nowhere/figures.json: cannot be written; choose another place"
    assert capsys.readouterr().out == ""
