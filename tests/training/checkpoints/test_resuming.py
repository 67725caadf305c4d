"""The start of a resumed run: from which checkpoint, in which directory, on which data."""

import json
from pathlib import Path

import pytest
import torch

from tests.test_any_model import UNET
from tests.training.helpers.in_process import TINY_RUN, composed, run_here
from training.errors import UserError
from training.saved_runs.finding import newest_checkpoint, refuse_damage

DECODER_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER_SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_where_no_checkpoint_is(tmp_path: Path, run_here, where: str):
    with pytest.raises(UserError, match=rf"resume={tmp_path / where}: no checkpoint there: give a run's directory"):
        run_here(tmp_path / "new", f"resume={tmp_path / where}")


def test_fewer_steps_than_done_are_refused(tmp_path: Path, finished: Path, run_here):
    with pytest.raises(UserError, match=r"it is at step 6, and steps=5: give more steps"):
        run_here(tmp_path / "new", f"resume={finished}", "steps=5")


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(tmp_path: Path, finished: Path, run_here, at):
    with pytest.raises(UserError, match=r"has checkpoints of another run, the newest step-00000006: .*resume=auto"):
        run_here(finished)
    run_here(tmp_path / "other", "seed=2")
    with pytest.raises(UserError, match="has checkpoints of another run"):
        run_here(tmp_path / "other", f"resume={finished}")


@pytest.mark.slow
def test_going_back_sets_later_ones_aside_as_often_as_one_goes(finished: Path, run_here, at, content, curve):
    end, records = content(at(finished, 6)), curve(finished)
    asides = ["step-00000006.aside", "step-00000006.aside-2", "step-00000006.aside-3"]
    for count in (1, 2, 3):
        run_here(finished, f"resume={at(finished, 3)}")
        found = sorted(path.name for path in (finished / "checkpoints").iterdir())
        assert found == ["step-00000003", "step-00000006", *asides[:count]]
        assert curve(finished) == records
    assert all(content(finished / "checkpoints" / name) == end for name in ["step-00000006", *asides])


@pytest.mark.parametrize("resume", ["auto", "RUN", "RUN/checkpoints/step-00000003", "DISK/step-00000003"])
@pytest.mark.slow
def test_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path, finished: Path, run_here, at, content, resume: str):
    end = content(at(finished, 6))
    disk = (finished / "checkpoints").rename(tmp_path / "disk")
    (finished / "checkpoints").symlink_to(disk)
    resume = resume.replace("RUN", str(finished)).replace("DISK", str(disk))
    run_here(finished, f"resume={resume}")
    assert content(at(finished, 6)) == end
    assert (disk / "step-00000006.aside").exists() == ("step" in resume)


@pytest.mark.slow
def test_other_text_is_refused(tmp_path: Path, run_here):
    """Also where the last batch, of 4 x 33 of the 20,000 tokens, happens not to hold what has changed."""
    text = tmp_path / "a.txt"
    words = b"the same again and again " * 800
    text.write_bytes(words)
    dataset = ("dataset=text", f"dataset.files={text}", "dataset.max_tokens=null")
    run_here(tmp_path / "run", *dataset)
    for place in range(0, len(words), len(words) // 4):
        text.write_bytes(words[:place] + b"T" + words[place + 1 :])
        with pytest.raises(
            UserError, match=r"the text has changed: dataset\.files, .* is not the same, .*; restore it"
        ):
            run_here(tmp_path / "run", *dataset, "resume=auto")
    text.write_bytes(words)
    run_here(tmp_path / "run", *dataset, "resume=auto", "steps=7")


@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), "lora"])
def test_another_configuration_in_the_folder_of_the_source_is_refused(tmp_path: Path, tiny: tuple[str, ...], adapter):
    """It decides what the same weights compute, and the configuration of a run has the folder's name alone."""
    source = tmp_path / "model" / "config.json"
    source.parent.mkdir()
    values = {"model_type": "qwen3", "vocab_size": 320, **DECODER_SIZES}
    source.write_text(json.dumps(values | {"rope_theta": 10000.0}))
    run = [override for override in tiny if not override.startswith("model.")]
    run += ["model=hf", f"model.source={source.parent}", f"adapter={adapter}"]
    run_here(tmp_path / "run", *run)
    source.write_text(json.dumps(values | {"rope_theta": 500.0}))
    changed = r"model\.source=.*model: its config\.json has changed: restore it, or begin a new run"
    with pytest.raises(UserError, match=changed):
        run_here(tmp_path / "run", *run, "resume=auto", "steps=7")
    config = composed(*run, run_dir=tmp_path / "run")[0]
    with pytest.raises(UserError, match=r"its config\.json is not that of the run: restore it"):
        refuse_damage(newest_checkpoint(tmp_path / "run"), config)
    source.write_text(json.dumps(values | {"rope_theta": 10000.0}))
    refuse_damage(newest_checkpoint(tmp_path / "run"), config)
    run_here(tmp_path / "run", *run, "resume=auto", "steps=7")


def test_another_scheduler_is_refused(tmp_path: Path):
    """The same pictures get other times, and the configuration has the file's name alone."""
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.parent.mkdir()
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    file.write_text(json.dumps(flow))
    run = (*(entry for entry in TINY_RUN if not entry.startswith("model.")), *UNET)
    run += (f"task.scheduler={file}", "steps=2", "checkpoint.every=2")
    run_here(tmp_path / "run", *run)
    file.write_text(json.dumps(flow | {"shift": 1.0}))
    with pytest.raises(UserError, match=rf"^resume=.*: {file} has changed: restore it, or begin a new run from these"):
        run_here(tmp_path / "run", *run, "resume=auto", "steps=3")
    file.write_text(json.dumps(flow))
    run_here(tmp_path / "run", *run, "resume=auto", "steps=3")


def test_a_dataset_that_is_not_in_memory_is_known_by_its_last_batch(
    tmp_path: Path, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    synthetic = [override for override in tiny if not override.startswith("dataset.")] + ["dataset=synthetic"]
    run_here(tmp_path / "run", *synthetic)
    monkeypatch.setattr(
        "training.data.datasets.SyntheticTokens.batch", lambda self, index: torch.zeros(self._shape).long()
    )
    with pytest.raises(UserError, match=r"the dataset has changed: its batch of step 6 is not the same"):
        run_here(tmp_path / "run", *synthetic, "resume=auto")


def test_a_finished_run_without_checkpoints_is_not_begun_anew(tmp_path: Path, tiny: tuple[str, ...]):
    run_dir = tmp_path / "run"
    unsaved = [override for override in tiny if not override.startswith("checkpoint.")]
    run_here(run_dir, *unsaved)
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"^resume=auto: .*/run has a finished run and no checkpoint to resume from"):
        run_here(run_dir, *unsaved, "resume=auto", "steps=9")
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
    # One that did not get so far begins again.
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | {"status": "failed"}))
    assert run_here(run_dir, *unsaved, "resume=auto")["status"] == "ok"


def test_a_run_without_checkpoints_is_not_begun_anew_where_its_summary_is_damaged(tmp_path: Path, tiny):
    unsaved = [override for override in tiny if not override.startswith("checkpoint.")]
    run_here(tmp_path, *unsaved)
    (tmp_path / "summary.json").write_text('{"status": "o')
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"^resume=auto: .*/summary.json: .* damaged: the run may be finished") as error:
        run_here(tmp_path, *unsaved, "resume=auto")
    assert "\n" not in str(error.value)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
