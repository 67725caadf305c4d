"""Ranks that share the homes of what streams compute what one device does with as many microbatches."""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from offload.sharing.links import links_of
from offload.streams.stream_checker import CheckedStreams
from tests import ROOT
from tests.offload.helpers.sharers import homes_in_use
from tests.training.helpers.in_process import components_of, run_here
from tests.training.helpers.results import content
from tests.training.helpers.sweeps import wait_for_end, wait_for_metrics, wait_until
from tests.training.parallel.conftest import RUN, forked, run_ranks
from training.parallel import group
from training.parallel.group import Group
from training.parallel.messages import FirstLostError, Messages
from training.parallel.ranks import RankLostError, Share
from training.runs.records import read_summary
from training.tasks.causal_lm import CausalLM


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


STREAMED = ("offload=layer_stream", "optimizer=host_adamw", "parallel.homes=shared")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on one device, with two microbatches."""
    folder = tmp_path_factory.mktemp("shared") / "one"
    run_here(folder, *RUN, "optimizer=host_adamw", "microbatches=2")
    return folder


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    """The same run from its third step to its fourth, on two devices that share the weights."""
    folder = one.with_name("two")
    run_ranks(folder, *STREAMED, "devices=2", "microbatches=1", f"resume={at(one, 2)}", "steps=4")
    return folder


def test_two_ranks_that_share_weights_compute_what_one_device_does(one: Path, two: Path):
    assert content(at(two, 4)) == content(at(one, 4))


@pytest.mark.slow
def test_another_rank_that_fails_ends_the_run_which_is_not_saved(tmp_path: Path, monkeypatch, capfd):
    # Tokens that are in no vocabulary, on the other rank, from the second step on.
    wrong = torch.full((2, 33), 10**6)
    own = group._own_memory
    steps = []

    def second_step_wrong(share: Share) -> Share:
        steps.append(share)
        return own(share) if len(steps) == 1 else replace(share, parts=(wrong,))

    monkeypatch.setattr(group, "_own_memory", second_step_wrong)
    keys = ("devices=2", "microbatches=1")
    with pytest.raises(RankLostError, match=r"^rank 1: its process has ended"):
        run_ranks(tmp_path, *STREAMED, *keys, "eval.every=null", "checkpoint.every=5", new_processes=True)
    assert "rank 1: error: IndexError" in capfd.readouterr().err
    # The step before is done on this rank, and perhaps in part on the other.
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_rank_that_uses_fewer_layers_is_told_so_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 0 skips all layers in the second step, as dropped layers may be: it fetches nothing that the other meets."""
    steps, loss_of = [], CausalLM.loss

    def without_layers(self, model, batch):
        steps.append(batch)
        return loss_of(self, model, batch) if len(steps) == 1 else model.lm_head.weight.square().mean()

    monkeypatch.setattr(CausalLM, "loss", without_layers)
    keys = ("devices=2", "microbatches=1", "eval.every=null", "parallel.timeout_s=10")
    with pytest.raises(RuntimeError, match=r"^rank 0 has come to the end of a step, rank 1 to the fetch of"):
        run_ranks(tmp_path, *STREAMED, *keys, "checkpoint.every=null")


def sharing(rank: int, folder: Path, count: int) -> None:
    """A rank of two hosts, or of one; the last rank of each host ends before the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), count), rank=rank, world_size=count)
    ranks = Group(torch.device("cpu"), Messages(300, host=rank // 2))
    sharers = ranks.sharers(shared=True)
    whole = torch.full((8,), rank, dtype=torch.uint8)
    sharers.gather(whole, "test")
    flat = torch.full((4,), 10.0**rank)
    sharers.sum(flat, "test")
    found = {
        "place": (sharers.rank, sharers.count, sharers.first, sharers.hosts),
        "host": sharers.exchange((rank, -1), "test"),
        "patient": sharers.exchange((rank,), "test", patient=True),
        "everywhere": sharers.exchange((rank,), "test", everywhere=True),
        "gathered": whole.tolist(),
        "norm": ranks.agreed(0.1 + rank),
        "not finite": ranks.agreed(math.nan if rank == 0 else 1.0),
        "sum": flat.tolist(),
    }
    if sharers.rank == 0:
        try:
            sharers.exchange((0,), "test")
        except (RankLostError, FirstLostError) as error:
            found["lost"] = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f"{rank}.pt")
    # Connections end with the process: others may have theirs in use.
    os._exit(0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_of_a_host_share_and_all_hosts_sum(tmp_path: Path, hosts: int):
    everyone = range(2 * hosts)
    for rank, found in enumerate(forked(sharing, tmp_path, 2 * hosts)):
        first = rank // 2 * 2
        assert found["place"] == (rank % 2, 2, first, hosts)
        assert found["host"] == [[first, -1], [first + 1, -1]]
        assert found["patient"] == [[first], [first + 1]]
        assert found["everywhere"] == [[other] for other in everyone]
        # As rank 0 has it, on all hosts.
        assert found["norm"] == 0.1
        assert math.isnan(found["not finite"])
        assert found["gathered"] == [first] * 4 + [first + 1] * 4
        assert found["sum"] == [sum(10.0**other for other in everyone)] * 4
        if rank == 0:
            assert found["lost"].startswith("RankLostError: rank 1")
            assert "has ended" in found["lost"]
        elif rank == first:
            assert found["lost"].startswith("FirstLostError")


def gathering_without_one(rank: int, folder: Path, count: int) -> None:
    """Rank 1 ends where the others gather."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), count), rank=rank, world_size=count)
    sharers = Group(torch.device("cpu"), Messages(300)).sharers(shared=True)
    links = links_of(sharers, CheckedStreams(torch.device("cpu")))
    memory = links.allocate(4096)
    links.gather(memory, [0] * count, "the first")
    if rank == 1:
        os._exit(0)
    try:
        links.gather(memory, [0] * count, "the second")
    except (RankLostError, FirstLostError) as error:
        torch.save(f"{type(error).__name__}: {error}", folder / f"{rank}.pt")
    os._exit(0)


def test_a_rank_that_ends_in_a_gather_is_named(tmp_path: Path):
    torch.save("", tmp_path / "1.pt")
    first, _, last = forked(gathering_without_one, tmp_path, 3)
    assert re.match(r"RankLostError: rank 1.* has ended", first)
    assert re.match(r"FirstLostError: the process \d+ of rank [01] has ended", last)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_at_any_moment_ends_the_run_and_leaves_no_memory(tmp_path: Path, lost: int):
    keys = (
        "devices=2", "microbatches=1", "clip_norm=null", "steps=1000000", "eval.every=null", "checkpoint.every=null",
    )  # fmt: skip
    command = [sys.executable, "train.py", *RUN, *STREAMED, *keys, f"hydra.run.dir={tmp_path}"]
    before, metrics = homes_in_use(), tmp_path / "metrics.jsonl"
    with open(tmp_path / "console", "w") as console:
        process = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=console)
    try:
        wait_for_metrics(process, tmp_path, tmp_path / "console")
        wait_until(lambda: metrics.read_bytes().count(b"\n") >= 3, "the run does not go on")
        ranks = [process.pid, *(child.pid for child in psutil.Process(process.pid).children())]
        files = homes_in_use(ranks) - before
        assert files
        time.sleep(random.Random().uniform(0, 1))
        os.kill(ranks[lost], signal.SIGKILL)
        assert process.wait(300) != 0
        wait_for_end(ranks[1])
        assert not files & homes_in_use()
        if lost:
            assert "rank 1: its process was killed (SIGKILL)" in read_summary(tmp_path)["reason"]
        assert not (tmp_path / "checkpoints").exists()
    finally:
        process.kill()
        process.wait(300)


def test_updates_begin_inside_backward_where_a_rank_has_its_gradients_in_one_go():
    early = (*STREAMED, "devices=2", "clip_norm=null")
    assert components_of(*early, "microbatches=1").updates_begin_early
    assert components_of(*early, "offload=shard_offload", "microbatches=2").updates_begin_early
    assert not components_of(*early, "microbatches=2").updates_begin_early
    assert not components_of(*early, "microbatches=1", "parallel.homes=own").updates_begin_early
    assert not components_of(*early, "microbatches=1", "clip_norm=1").updates_begin_early


@pytest.mark.slow
def test_updates_inside_backward_and_states_on_the_devices_are_those_of_one_device(one: Path):
    """Some states on each device, in 8 bits; checkpoints have them all."""
    keys = ("clip_norm=null", "optimizer.state_dtype=int8", "steps=4", "precision=bf16")
    expected, folder = one.with_name("early"), one.with_name("early on two")
    run_here(expected, *RUN, "optimizer=host_adamw", *keys, "microbatches=2")
    run_ranks(folder, *STREAMED, *keys, "devices=2", "microbatches=1", "optimizer.device_share=40KiB")
    for step in (2, 4):
        assert content(at(folder, step)) == content(at(expected, step))


@pytest.mark.slow
def test_three_ranks_share_units_of_all_sizes(one: Path):
    """Four sequences, so that the first rank has two."""
    expected, folder = one.with_name("in thirds"), one.with_name("three")
    run_here(expected, *RUN, "optimizer=host_adamw", "microbatches=3", "steps=2")
    run_ranks(folder, *STREAMED, "offload.outside=stream", "devices=3", "microbatches=1", "steps=2")
    assert content(at(folder, 2)) == content(at(expected, 2))


@pytest.mark.slow
def test_ranks_share_a_quantised_base_and_sum_the_adapter_s_gradients(one: Path):
    expected, folder = one.with_name("adapter"), one.with_name("adapter on two")
    adapter = ("adapter=lora", "adapter.rank=2", "quantize=int8", "optimizer=host_adamw", "steps=2")
    run_here(expected, *RUN, *adapter, "microbatches=2")
    run_ranks(folder, *RUN, *adapter, "offload=layer_stream", "parallel.homes=shared", "devices=2", "microbatches=1")
    assert content(at(folder, 2)) == content(at(expected, 2))


@pytest.mark.slow
def test_microbatches_of_a_rank_are_added_before_the_ranks_are(tmp_path: Path):
    keys = (*STREAMED, "devices=2", "microbatches=2", "steps=3")
    for homes in ("shared", "own"):
        run_ranks(tmp_path / homes, *keys, f"parallel.homes={homes}")
    assert content(at(tmp_path / "shared", 3)) == content(at(tmp_path / "own", 3))
