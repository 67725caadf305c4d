"""A run is prepared, or refused, before it begins."""

import json
from pathlib import Path

import pytest

from tests.training.helpers.in_process import SMALL_MODEL, TINY_RUN, composed, run_here
from training.errors import UserError
from training.parallel.ranks import ALONE
from training.run import prepare as prepare_module
from training.run.prepare import prepare
from training.runs.files import METRICS_FILE


def test_a_prepared_run_has_what_the_build_needs_and_wrote_nothing(tmp_path: Path):
    config, invocation = composed(*SMALL_MODEL, "offload=layer_stream", "checkpoint.every=1", run_dir=tmp_path)
    run = prepare(config, invocation, ALONE)
    assert run.plan.parameters == sum(parameter.numel() for parameter in run.components.model.parameters())
    assert {parameter.device.type for parameter in run.components.model.parameters()} == {"meta"}
    assert len(run.dataset.batch(1)) == 4
    # The run is new, trains all weights and makes them from the seed.
    assert (run.checkpoint, run.adapter, run.weights, run.base, run.components.settled.notes) == (None,) * 4 + ((),)
    assert not any(tmp_path.iterdir())


def test_the_base_of_an_adapter_is_named_by_its_seed(tmp_path: Path):
    config, invocation = composed(*SMALL_MODEL, "adapter=lora", "seed=3", run_dir=tmp_path)
    run = prepare(config, invocation, ALONE)
    assert run.adapter is not None
    assert run.base.seed == 3


def test_epochs_are_as_many_steps_as_they_take(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    # 31 sequences of 32 tokens, 4 in a step.
    job = (
        *TINY_RUN, "dataset=stdlib", "dataset.max_tokens=1000", "steps=null", "log_every=1", "schedule=linear",
        "checkpoint.every=6",
    )  # fmt: skip
    assert run_here(tmp_path / "run", *job, "epochs=1.5")["steps"] == 12
    *_, last = map(json.loads, (tmp_path / "run" / METRICS_FILE).read_text().splitlines())
    assert (last["train/tokens"], last["train/epoch"]) == (12 * 4 * 32, pytest.approx(48 / 31))
    # The rate falls over all steps.
    assert last["train/lr"] == pytest.approx(0.002 / 12)
    # A checkpoint has their steps: the same epochs again are no change, and others are.
    run_here(tmp_path / "run", *job, "epochs=1.5", "resume=auto")
    assert "the learning rate falls over all steps" not in caplog.text
    run_here(tmp_path / "run", *job, "epochs=2", "resume=auto")
    assert "steps: was 12, is 16: the learning rate falls over all steps" in caplog.text
    with pytest.raises(UserError, match=r"it is at step 16, and steps=8: give more steps"):
        run_here(tmp_path / "run", *job, "epochs=1", "resume=auto")
    with pytest.raises(UserError, match=r"epochs=1: this dataset does not know how many examples it has: give steps=N"):
        run_here(tmp_path / "random", *TINY_RUN, "steps=null", "epochs=1")


def test_a_batch_of_more_than_there_is_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = (*TINY_RUN, "dataset=stdlib", "dataset.max_tokens=100", "steps=1")
    run_here(tmp_path / "three", *job, "batch_size=3")
    assert "several times" not in caplog.text
    run_here(tmp_path / "four", *job, "batch_size=4")
    assert "batch_size=4: the dataset has 3 examples, so a step trains on some of them several times" in caplog.text


def test_more_threads_than_cores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepare_module, "usable_cores", lambda: 2)
    with pytest.raises(
        UserError, match=r"optimizer\.threads=3: must be at most 2, the cores that this process may use"
    ):
        run_here(tmp_path, *TINY_RUN, "optimizer=host_adamw", "optimizer.threads=3")
