"""Changes of the configuration with which a run may or may not resume."""

from pathlib import Path

import pytest

from tests.training.helpers.in_process import TINY_RUN, composed
from training.checkpoints.changes import config_text, refuse_changes
from training.errors import UserError
from training.runs.bounded_files import parse_yaml

CHANGES = [
    ("optimizer.lr=0.1", "optimizer.lr: was 0.002, is 0.1"),
    ("microbatches=2", "microbatches: was 1, is 2"),
    ("model.hidden_size=32", "model.hidden_size: was 16, is 32"),
    ("model.weights=x.safetensors", "model.weights: was null, is x.safetensors"),
    ("schedule=linear", "schedule.final: was absent, is 0"),
]


@pytest.mark.parametrize(("override", "listed"), CHANGES, ids=[override for override, _ in CHANGES])
@pytest.mark.slow
def test_a_changed_configuration_is_refused_listing_the_keys(
    tmp_path: Path, finished: Path, run_here, override, listed
):
    with pytest.raises(UserError) as refusal:
        # What the run had taken for auto; with auto, the weights are looked at for their tokenizer first.
        run_here(tmp_path / "new", f"resume={finished}", override, "steps=9", "dataset.tokenizer=null")
    assert listed in str(refusal.value)
    assert "steps:" not in str(refusal.value)
    assert "\n" not in str(refusal.value)
    # Another model cannot begin with these weights.
    begins_anew = f"or begin a new run from these weights, model.weights={finished}" in str(refusal.value)
    assert begins_anew == (not override.startswith("model.hidden_size"))


def test_another_class_of_model_is_one_key(tmp_path: Path):
    saved = parse_yaml(config_text(composed(*TINY_RUN, run_dir=tmp_path)[0]))
    with pytest.raises(UserError) as refusal:
        refuse_changes(composed("model=gpt2", run_dir=tmp_path)[0], saved, tmp_path, "resume=x")
    found = str(refusal.value)
    assert found == (
        "resume=x: the configuration is not the checkpoint's in model._target_: was models.llama.Llama, is"
        " models.hf.build_hf: give the old values to resume"
    )


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path, finished: Path, run_here, at, content):
    changes = (
        "offload=layer_stream", "offload.slots=2", "recompute=block", "optimizer=host_adamw", "optimizer.threads=1",
        "log_every=1", "checkpoint.every=1", "on_nonfinite=skip", "tracking.project=other",
    )  # fmt: skip
    run_here(tmp_path / "new", f"resume={at(finished, 3)}", *changes)
    assert content(at(tmp_path / "new", 6)) == content(at(finished, 6))


def test_more_steps_of_a_falling_rate_are_a_warning(tmp_path: Path, run_here, at, caplog: pytest.LogCaptureFixture):
    run_here(tmp_path / "run", "schedule=linear")
    run_here(tmp_path / "new", "schedule=linear", "steps=8", f"resume={at(tmp_path / 'run', 3)}")
    assert "steps: was 6, is 8: the learning rate falls over all steps" in caplog.text


def test_other_tiles_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    whole, tiled = (composed(*TINY_RUN, f"recompute.tile={tile}")[0] for tile in ("null", 16))
    before = parse_yaml(config_text(whole))
    # A checkpoint from before this key.
    del before["recompute"]["tile"]
    refuse_changes(whole, before, tmp_path, "resume=x")
    assert not caplog.text
    refuse_changes(tiled, before, tmp_path, "resume=x")
    assert "recompute.tile: was null, is 16: gradients of weights are sums over other tiles" in caplog.text


def test_ranks_that_divide_sequences_from_now_on_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    one, divided = (composed(*TINY_RUN, *keys)[0] for keys in ((), ("devices=2", "parallel.sequence=2")))
    before = parse_yaml(config_text(one))
    # A checkpoint from before this key.
    del before["parallel"]["sequence"]
    refuse_changes(one, before, tmp_path, "resume=x")
    assert "parallel.sequence" not in caplog.text
    refuse_changes(divided, before, tmp_path, "resume=x")
    assert "parallel.sequence: was 1, is 2: losses and gradients are sums of other parts" in caplog.text


ONE_BY_ONE, OF_EACH_FIRST = ["1x6 6x1", "6x1 1x6"], ["1x6 2x3", "3x2 1x6", "3x2 2x3", "6x1 3x2"]


@pytest.mark.parametrize("change", ONE_BY_ONE + OF_EACH_FIRST)
def test_as_many_parts_of_a_step_in_another_order_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
):
    """(a + b) + (c + d) is not ((a + b) + c) + d."""

    def of(parts: str):
        devices, microbatches = parts.split("x")
        keys = ("batch_size=6", f"devices={devices}", f"microbatches={microbatches}")
        return composed(*TINY_RUN, *keys, run_dir=tmp_path)[0]

    was, now = change.split()
    refuse_changes(of(now), parse_yaml(config_text(of(was))), tmp_path, "resume=x")
    assert ("differs in rounding" in caplog.text) == (change in OF_EACH_FIRST)
