"""Names of runs in wandb: they say what differs, and the jobs of a sweep have those of its comparison."""

import pytest

from tests.training.helpers.in_process import composed
from training.metrics.run_names import SWEEP_LABEL_VARIABLE, chosen_options, model_name, run_label, run_name, run_tags


@pytest.fixture(autouse=True)
def outside_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWEEP_LABEL_VARIABLE, raising=False)


def test_a_run_of_its_own_has_its_model_its_mode_and_what_its_command_line_gives():
    given = ("offload=layer_stream", "offload.slots=3", "recompute=block", "seed=1", "tracking=offline", "force=true")
    found = composed(*given)
    assert run_label(*found) == "tiny layer_stream slots=3 recompute=block"
    assert run_name(*found) == "tiny layer_stream slots=3 recompute=block seed=1"
    assert len(run_name(*composed(f"dataset.tokenizer={'x' * 500}"))) <= 128


@pytest.mark.parametrize(
    ("source", "name"),
    [("Qwen/Qwen3-8B", "Qwen3-8B"), ("/models/mine-7b/", "mine-7b"), ("Qwen/Qwen3-8B@main", "Qwen3-8B")],
)
def test_a_model_of_transformers_has_its_own_name(source: str, name: str):
    found = composed("model=hf", f"model.source={source}")
    assert model_name(*found) == name
    assert run_name(*found) == f"{name} none seed=0"


def test_a_job_of_a_sweep_has_the_name_of_its_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SWEEP_LABEL_VARIABLE, "layer_stream slots=3")
    assert run_name(*composed("offload=layer_stream", "seed=2")) == "layer_stream slots=3 seed=2"
    assert run_name(*composed("tracking.name=paper", "seed=2")) == "paper layer_stream slots=3 seed=2"


def test_a_name_that_is_given_is_taken():
    assert run_name(*composed("tracking.name=paper", "seed=2")) == "paper"


def test_choices_are_those_of_the_run_and_have_plain_names():
    choices = {
        "offload": "tensor_swap", "offload@offload.weights": "bounce_linear", "model": "tiny", "experiment": None,
        "hydra/launcher": "process", "hydra": "default",
    }  # fmt: skip
    expected = {"offload": "tensor_swap", "offload_weights": "bounce_linear", "model": "tiny"}
    assert chosen_options(choices, ["offload", "model", "seed"]) == expected
    assert chosen_options(choices | {"experiment": "mine"}, ["offload"])["experiment"] == "mine"


def test_tags_are_the_chosen_options():
    assert run_tags({"offload": "none", "model": "llama7b"}) == ["model=llama7b", "offload=none"]
    assert len(run_tags({"experiment": "x" * 100})[0]) == 64
