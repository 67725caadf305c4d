"""`repeat=DIR`: the command line of the run in DIR, but for what else is given."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.training.helpers.in_process import composed
from training.config.validation import check
from training.errors import UserError
from training.runs.directory import RunDirectory
from training.runs.repeat import repeated

SWAPS = ("offload=layer_stream_swap", "offload.weights.slots=3", "offload.budget=8GiB", "resume=auto")
TEXT = ("dataset=text", r"dataset.files='a\ b\'s \${x} \\\${y},=.txt'", "tracking.tags=['null','1','a,b']", "epochs=2")
LARGE = ("experiment=exact_7b_24gib", "model.vocab_size=777", "dataset=synthetic", "optimizer.lr=3e-7")

FREE = (
    "model=hf",
    "model.source=gpt2",
    r"model.overrides={n_layer: 2, activation_function: gelu, rope: {kind: default, list: [1, 2]}}",
)
IMAGES = ("model=flux_small", "dataset.condition.pooled_projections=[4]")


def run_of(folder: Path, *overrides: str, **settled: object) -> dict:
    """Writes the files of a run with `overrides` as train.py does; returns its configuration."""
    config, invocation = composed(*overrides, run_dir=folder)
    for key, value in settled.items():
        OmegaConf.update(config, key, value)
    folder.mkdir(exist_ok=True)
    RunDirectory(folder).write_config(config, invocation)
    return OmegaConf.to_container(config, resolve=True)


def again(folder: Path, *overrides: str) -> dict:
    config, _ = composed(*repeated([f"repeat={folder}", *overrides]))
    check(config)
    return OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("overrides", [SWAPS, TEXT, LARGE, FREE, IMAGES])
@pytest.mark.slow
def test_everything_is_as_it_was(tmp_path: Path, overrides: tuple[str, ...]):
    was = run_of(tmp_path, *overrides)
    assert again(tmp_path) == was | {"resume": None}


def test_what_is_given_besides_wins(tmp_path: Path):
    was = run_of(tmp_path, *SWAPS)
    now = again(tmp_path, "offload=none", "seed=7", "checkpoint.keep=5")
    assert now["offload"] == {"_target_": "offload.modes.none.Resident", "_convert_": "all"}
    assert (now["seed"], now["checkpoint"]) == (7, {"every": None, "keep": 5, "best": None, "on_signal": None})
    # The optimizer follows the mode, as on the command line.
    changed = {"offload", "optimizer", "seed", "checkpoint", "resume"}
    assert {key for key in was if was[key] != now[key]} == changed
    run_of(tmp_path / "epochs", "epochs=2")
    assert again(tmp_path / "epochs", "steps=9")["epochs"] is None
    # An option inside another one is dropped with its keys, and the keys around it stay.
    weights = again(tmp_path, "offload@offload.weights=bounce_linear")["offload"]
    assert weights["weights"]["_target_"].endswith("BounceLinear")
    assert (weights["weights"]["slots"], weights["budget"]) == (4, "8GiB")


def test_a_key_that_follows_another_one_still_does(tmp_path: Path):
    assert run_of(tmp_path)["steps"] == 200
    assert again(tmp_path, "seed=3")["steps"] == 200
    assert again(tmp_path, "epochs=2")["steps"] is None


def test_values_that_the_run_chose_or_that_were_defaults_then_stay(tmp_path: Path):
    settled = {"precision": "bf16", "microbatches": 2, "log_every": 3, "tracking.tags": ["a", "b c"], "device": "d, e'"}
    run_of(tmp_path, "seed=3", **settled)
    kept = ["microbatches=2", "device='d, e\\''", "precision=bf16", "log_every=3", "tracking.tags=[a,'b c']"]
    assert sorted(repeated([f"repeat={tmp_path}"])) == sorted(["seed=3", *kept])
    assert again(tmp_path, "device=cpu")["tracking"]["tags"] == ["a", "b c"]


def test_the_values_of_a_sweep_stay_for_hydra(tmp_path: Path):
    run_of(tmp_path, *SWAPS)
    overrides = repeated([f"repeat='{tmp_path}'", "offload=none,layer_stream", "hydra.run.dir=x"])
    assert overrides[-2:] == ["offload=none,layer_stream", "hydra.run.dir=x"]
    assert not [text for text in overrides[:-2] if text.startswith(("offload", "resume", "hydra"))]


@pytest.mark.parametrize(
    ("old", "new", "given", "message"),
    [
        ("seed: 3\n", "seed: [3\n", (), r"config.yaml: it is not a plain YAML file"),
        ("- offload=tensor_swap", "- offload=gone", (), r"repeat=.*: offload=gone: there is no such option"),
        ("- offload=tensor_swap", "- {offload: gone}", (), r"choices.yaml has no overrides: it was not written by a"),
        ("seed: 3\n", "seed: 3\ngone: 4\n", (), r"repeat=.*: gone=4 of that run is no key today: delete it"),
        ("", "", ("repeat=b",), r"give the run to repeat once"),
        ("", "", ("experiment=quickstart",), r"experiment=quickstart: repeat=.* gives every value already"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(tmp_path: Path, old: str, new: str, given: tuple, message: str):
    run_of(tmp_path, "offload=tensor_swap", "seed=3")
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message) as raised:
        repeated([f"repeat={tmp_path}", *given])
    assert "\n" not in str(raised.value)


def test_the_directory_of_a_sweep_is_not_that_of_a_run(tmp_path: Path):
    run_of(tmp_path / "0")
    with pytest.raises(
        UserError, match=f"no choices.yaml there: give the directory of a run, such as repeat={tmp_path}/0"
    ):
        repeated([f"repeat={tmp_path}"])
