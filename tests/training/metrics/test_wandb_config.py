"""A run in wandb: its configuration, its name and its tags."""

from __future__ import annotations

from enum import Enum

from omegaconf import OmegaConf

from training.metrics.wandb_tracker import chosen_options, plain, run_name, run_tags


def test_config_becomes_plain_and_resolved(tmp_path):
    class Precision(Enum):
        BF16 = "bf16"

    node = OmegaConf.create({"seed": 3, "nested": {"twice": "${seed}", "list": [1, "${seed}"]}})
    config = plain({"job": node, "path": tmp_path, "pair": (1, 2.5), "on": True, "none": None, 4: Precision.BF16})
    assert config == {
        "job": {"seed": 3, "nested": {"twice": 3, "list": [1, 3]}},
        "path": str(tmp_path),
        "pair": [1, 2.5],
        "on": True,
        "none": None,
        "4": "Precision.BF16",
    }
    assert type(config["job"]["nested"]) is dict


def test_choices_are_those_of_the_run_and_have_plain_names():
    choices = {
        "offload": "tensor_swap", "offload@offload.weights": "bounce_linear", "model": "tiny", "experiment": None,
        "hydra/launcher": "process", "hydra": "default",
    }  # fmt: skip
    expected = {"offload": "tensor_swap", "offload_weights": "bounce_linear", "model": "tiny"}
    assert chosen_options(choices, ["offload", "model", "seed"]) == expected
    assert chosen_options(choices | {"experiment": "mine"}, ["offload"])["experiment"] == "mine"


def test_name_and_tags_come_from_the_chosen_options():
    choices = {"offload": "bounce_linear", "model": "llama7b", "optimizer": "adamw"}
    assert run_name(choices, seed=2) == "llama7b-bounce_linear-2"
    assert run_tags(choices) == ["model=llama7b", "offload=bounce_linear", "optimizer=adamw"]
    assert len(run_tags({"experiment": "x" * 100})[0]) == 64
