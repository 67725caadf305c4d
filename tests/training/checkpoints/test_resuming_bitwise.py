"""A resumed run equals the uninterrupted one bit for bit, in every mode and from any."""

from pathlib import Path

import pytest

from training.config.modes import mode_options

MODES = dict.fromkeys(sorted(mode_options()), ())
MODES["shard_offload"] = ("offload.shards=2",)
RECIPES = {
    # bf16 has masters, a cosine has another rate at each step, and updates begin inside backward.
    "bf16": ("precision=bf16", "optimizer=host_adamw", "schedule=cosine", "clip_norm=null", "microbatches=2"),
    # Some steps are clipped, and updates that have begun inside backward are undone.
    "clipped": ("precision=bf16", "optimizer=host_adamw", "optimizer.speculate=on", "clip_norm=2"),
    "fp32": ("model.tie_word_embeddings=true", "recompute=block"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.slow
@pytest.mark.usefixtures("small_activations")
def test_every_mode_resumes_alike_and_saves_the_same_state(tmp_path: Path, run_here, at, content, curve, recipe: str):
    every_step = (*RECIPES[recipe], "steps=4", "log_every=1", "checkpoint.every=1", "checkpoint.keep=4")
    run_here(tmp_path / "whole", *every_step)
    whole = [content(at(tmp_path / "whole", step)) for step in (2, 3, 4)]
    assert all(whole[0][name] != whole[1][name] for name in whole[0] if name != "config.json")
    # Every mode writes the same, so resuming from one is resuming from any.
    for offload, knobs in MODES.items():
        rest = tmp_path / offload
        run_here(rest, *every_step, f"offload={offload}", *knobs, f"resume={at(tmp_path / 'whole', 2)}")
        assert [content(at(rest, step)) for step in (3, 4)] == whole[1:], offload
        assert curve(rest) == curve(tmp_path / "whole")[2:], offload


@pytest.mark.slow
def test_released_gradients_leave_no_trace(tmp_path: Path, run_here, at, content, curve):
    """The norms of the curve are those of gradients that are in no `.grad`."""
    job = ("offload=layer_stream", "optimizer=host_adamw", "clip_norm=null", "microbatches=1", "precision=bf16")
    runs = {
        gradients: (*job, f"optimizer.gradients={gradients}", "log_every=1", "checkpoint.every=2", "checkpoint.keep=2")
        for gradients in ("keep", "release")
    }
    for gradients, overrides in runs.items():
        run_here(tmp_path / gradients, *overrides, "steps=4")
    keep, release = (tmp_path / gradients for gradients in runs)
    run_here(tmp_path / "resumed", *runs["release"], "steps=4", f"resume={at(keep, 2)}")
    assert content(at(keep, 4)) == content(at(release, 4)) == content(at(tmp_path / "resumed", 4))
    assert curve(keep) == curve(release)


def test_a_killed_run_resumes_in_its_directory_without_a_lost_or_repeated_step(
    finished: Path, killed_after, run_here, at, content, curve
):
    # Its record of step 4 was written after the checkpoint of step 3, that of step 6 in part.
    killed = killed_after(3)
    lines = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:20])
    summary = run_here(killed, "resume=auto")
    assert curve(killed) == curve(finished)
    assert content(at(killed, 6)) == content(at(finished, 6))
    assert (summary["status"], summary["steps"]) == ("ok", 6)
    assert summary["train/first_loss"] == curve(finished)[0]["train/first_loss"]


def test_a_finished_run_resumes_with_more_steps(tmp_path: Path, finished: Path, run_here, at, content):
    run_here(finished, "resume=auto", "steps=9")
    run_here(tmp_path / "whole", "steps=9")
    assert content(at(finished, 9)) == content(at(tmp_path / "whole", 9))


def test_skipped_steps_are_counted_through(tmp_path: Path, run_here, at, curve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("training.run.loop.gradient_norm", lambda model, known: float("nan"))
    run_here(tmp_path / "run", "on_nonfinite=skip")
    run_here(tmp_path / "rest", "on_nonfinite=skip", f"resume={at(tmp_path / 'run', 3)}")
    assert [record["train/skipped_steps"] for record in curve(tmp_path / "rest")] == [4, 6]


def test_the_weights_begin_a_new_run(tmp_path: Path, finished: Path, run_here, at, curve):
    """As `model.weights`, with nothing of the old run but its weights."""
    run_here(tmp_path / "new", f"model.weights={at(finished, 6)}", "steps=1", "optimizer.lr=0", "log_every=1")
    run_here(tmp_path / "first", "steps=1", "log_every=1")
    assert curve(tmp_path / "new")[0]["train/loss"] < curve(tmp_path / "first")[0]["train/loss"]


def test_saving_leaves_a_run_as_it_was(tmp_path: Path, run_here, finished: Path, curve):
    run_here(tmp_path / "unsaved", "checkpoint.every=null")
    assert curve(tmp_path / "unsaved") == curve(finished)
    assert not (tmp_path / "unsaved" / "checkpoints").exists()
