"""Several processes on gloo compute what one computes with as many microbatches, bit for bit."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offload.planning import usable_cores
from tests.training.helpers.in_process import composed, run_here, signals_as_before
from tests.training.helpers.ranks import forked_ranks
from tests.training.helpers.results import content
from tests.training.parallel.conftest import RUN, run_ranks
from training.errors import UserError
from training.optim import AdamW
from training.parallel.group import Copies, Group, fingerprint, refuse_statistics
from training.parallel.launch import connected
from training.parallel.messages import PATIENCE, Messages


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def records(run_dir: Path) -> dict[int, dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["train/step"]: line for line in lines}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on one device, with two microbatches."""
    folder = tmp_path_factory.mktemp("ranks") / "one"
    run_here(folder, *RUN, "microbatches=2")
    return folder


@pytest.mark.slow
def test_the_threads_of_a_rank_are_not_written_into_the_configuration(tmp_path: Path):
    """A run that repeats this one on one device would keep them."""
    config, _ = composed(*RUN, "devices=2", "optimizer=host_adamw", run_dir=tmp_path)
    with signals_as_before(), forked_ranks(), connected(config, None) as ranks:
        assert ranks.cores == max(usable_cores() // 2, 1)
    assert config.optimizer.threads is None


@pytest.fixture(scope="module")
def two(one: Path) -> tuple[Path, dict]:
    """The same run from its third step to its fourth, on two devices; and its summary."""
    folder = one.with_name("two")
    keys = ("devices=2", "microbatches=1", f"resume={at(one, 2)}", "steps=4")
    summary = run_ranks(folder, *keys, new_processes=True)
    return folder, summary


@pytest.mark.slow
def test_two_ranks_compute_what_one_device_does(one: Path, two: tuple[Path, dict]):
    for step in (3, 4):
        for key in ("train/loss", "train/grad_norm"):
            assert records(two[0])[step][key] == records(one)[step][key]
    assert content(at(two[0], 4)) == content(at(one, 4))


def test_ranks_share_the_batches_of_an_evaluation(one: Path, two: tuple[Path, dict]):
    assert records(two[0])[3]["eval/loss"] == records(one)[3]["eval/loss"]


def test_a_run_moves_to_two_devices_and_back(one: Path, two: tuple[Path, dict]):
    back = one.with_name("back")
    run_here(back, *RUN, "microbatches=2", f"resume={two[0]}")
    assert content(at(back, 6)) == content(at(one, 6))


def test_the_summary_has_the_memory_of_each_rank(two: tuple[Path, dict]):
    _folder, summary = two
    assert summary["devices"] == 2
    ranks = [summary[f"rank{rank}/memory/rss_gib"] for rank in (0, 1)]
    assert all(0.05 < gib < 5 for gib in ranks)
    assert summary["memory/rss_gib"] <= sum(ranks) * 1.01
    assert summary["memory/rss_gib"] > max(ranks)


@pytest.mark.slow
def test_three_ranks_that_stream_weights_compute_what_one_device_does(one: Path):
    """Four sequences, so that the first rank has two; weights are in host memory, some states on the device.

    Updates would begin inside backward on one device.
    """
    folders = [one.with_name(name) for name in ("streamed", "three")]
    mode = ("offload=layer_stream", "optimizer=host_adamw", "clip_norm=null", "steps=2", "optimizer.device_share=40KiB")
    run_here(folders[0], *RUN, "microbatches=3", "steps=2", "clip_norm=null")
    run_ranks(folders[1], *mode, "devices=3", "microbatches=1", "parallel.homes=own")
    assert content(at(folders[1], 2)) == content(at(folders[0], 2))


@pytest.mark.parametrize(("rank", "limit_s"), [(0, 5), (1, 10)])
def test_rank_0_gives_up_before_the_others(rank: int, limit_s: float, monkeypatch: pytest.MonkeyPatch):
    """Another rank that did so first would take rank 0 for the one that hangs, and end it."""
    limits = []

    def new_group(ranks=None, backend="gloo", timeout=PATIENCE):
        limits.append(timeout)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own: None)
    messages = Messages(timeout_s=5)
    Group(torch.device("cpu"), messages)
    messages._waiter.close()
    assert limits == [PATIENCE, *[timedelta(seconds=limit_s)] * 2]


class Reporting:
    """Messages of two ranks, of which the other reports [2]; notes whether rank 0 would wait for it without an end."""

    def __init__(self):
        self.patient = []

    def tell(self, order: str, *values) -> None:
        pass

    def send(self, rank: int, message: tuple) -> None:
        assert (rank, message) == (1, ("evaluate", [torch.tensor([6])]))

    def reports(self, own=None, patient: bool = False) -> list:
        self.patient.append(patient)
        return [own, {} if own == {} else [2]]


def test_a_rank_that_hangs_in_an_evaluation_or_a_comparison_is_not_waited_for_without_an_end():
    group, messages = Group.__new__(Group), Reporting()
    group.rank, group.count, group.messages = 0, 2, messages
    group.fingerprints = lambda saves: {}
    assert group.evaluate(torch.tensor([[5], [6]]), lambda parts: [1], "evaluate") == [1, 2]
    group.check_equal(saves=False)
    assert messages.patient == [False, False]
    # Stopped by a signal, rank 0 is done before the others.
    assert group.evaluate(torch.tensor([[5], [6]]), lambda parts: None, "evaluate") is None
    assert messages.patient[-1]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    made.register_buffer("positions", torch.arange(5))
    return made


def test_copies_are_weights_buffers_and_states_of_each_rank_or_of_a_host():
    trained, reference = model(), model().requires_grad_(False)
    optimizer = AdamW(trained.parameters())
    optimizer.allocate()
    copies = Copies(trained, optimizer, {trained[0].weight, reference[0].weight}, reference)
    own, shared = copies.tensors(), copies.shared_tensors()
    assert shared.keys() == {"0.weight", "0.weight.exp_avg", "0.weight.exp_avg_sq", "reference.0.weight"}
    assert shared["reference.0.weight"].data_ptr() == reference[0].weight.data_ptr()
    # Each rank counts its updates.
    assert {"0.bias", "0.bias.exp_avg", "0.weight.step", "positions"} <= own.keys()
    assert {"reference.0.bias", "reference.1.weight", "reference.positions"} <= own.keys()
    assert not own.keys() & shared.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_shows_one_changed_element(dtype: torch.dtype):
    tensor = torch.zeros(3, 5).to(dtype).t()
    before = fingerprint(tensor)
    for place in [(2, 1), (4, 2)]:
        tensor[place] = 1
        assert fingerprint(tensor) != before
        assert fingerprint(tensor.clone()) == fingerprint(tensor)
        tensor[place] = 0
    assert fingerprint(tensor) == before
    assert fingerprint(torch.ones(20).to(dtype)[3:]) == fingerprint(torch.ones(17).to(dtype))


def test_running_statistics_are_refused():
    refuse_statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))
    for norm in (nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2, track_running_stats=True)):
        with pytest.raises(UserError, match=rf"^devices: 1 \({type(norm).__name__}\)"):
            refuse_statistics(nn.Sequential(nn.Linear(2, 2), norm))
