"""scripts/peers.py: which runs are started, within which time, and the page that it fills."""

from pathlib import Path

import pytest

from scripts import peers
from tests.training.helpers.in_process import composed
from training.config.modes import all_options
from training.runs.records import write_summary
from training.sweeps.job import SweepJob


def options(folder: Path, *arguments: str):
    return peers.parser().parse_args([str(folder), *arguments])


@pytest.mark.slow
def test_every_peer_and_mode_it_names_is_an_option():
    chosen = {overrides[0].removeprefix("offload=") for overrides in peers.SYSTEMS.values()}
    assert {name for name, option in all_options().items() if option.is_peer} <= chosen <= all_options().keys()
    for overrides in peers.SYSTEMS.values():
        composed("experiment=peers_7b", *overrides)


@pytest.mark.parametrize("wrong", [("--tokens", "3000"), ("--tokens", "4096", "0"), ("--seq-len", "0")])
def test_tokens_that_are_no_number_of_sequences_are_refused(wrong: tuple[str, ...], tmp_path: Path, capsys):
    """A row would be that of other tokens than its table says."""
    peers.check(peers.parser(), options(tmp_path, "--tokens", "4096", "--seq-len", "1024"))
    with pytest.raises(SystemExit):
        peers.check(peers.parser(), options(tmp_path, *wrong))
    assert f"argument {wrong[0]}: {wrong[-1]} must be" in capsys.readouterr().err.splitlines()[-1]


def test_runs_that_ended_well_are_not_repeated(tmp_path: Path):
    asked = options(tmp_path, "--systems", "none", "fsdp2", "--tokens", "4096", "16384")
    names = [str(job.directory.relative_to(tmp_path)) for job in peers.jobs(asked)]
    assert names == ["4096/none", "4096/fsdp2", "16384/none", "16384/fsdp2"]
    assert {"seq_len=2048", "batch_size=8"} <= set(peers.jobs(asked)[2].overrides)
    for name, status in (("4096/none", "ok"), ("16384/none", "failed")):
        (tmp_path / name).mkdir(parents=True)
        write_summary(tmp_path / name, {"status": status})
    assert [str(job.directory.relative_to(tmp_path)) for job in peers.jobs(asked)] == names[1:]


def test_no_run_is_started_that_the_time_left_may_not_suffice_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock, limits = [0.0], []

    def run(self: SweepJob, command: list[str], environment: dict[str, str]) -> None:
        limits.append(self.timeout_min)
        clock[0] += 50.0
        self.exit_status = 1

    monkeypatch.setattr(peers, "monotonic", lambda: clock[0])
    monkeypatch.setattr(SweepJob, "run", run)
    asked = options(tmp_path, "--systems", "none", "fsdp2", "ramtorch", "--tokens", "4096", "--minutes", "2")
    peers.run_all(peers.jobs(asked), asked)
    assert limits == [115 / 60, 65 / 60]
    assert "no time left for: 4096/ramtorch" in capsys.readouterr().out


def test_the_page_has_its_markers():
    page = peers.PAGE.read_text()
    filled = peers.with_tables(page, "TABLES\n")
    assert filled.count("TABLES") == 1
    assert peers.with_tables(filled, "OTHERS\n") == filled.replace("TABLES", "OTHERS")
