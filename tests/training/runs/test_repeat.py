"""`repeat=DIR`: the configuration of the run in DIR, but for what else is given."""

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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of one run, by name."""
    folder = tmp_path_factory.mktemp("run")
    run_of(folder, "offload=tensor_swap", "seed=3")
    return {path.name: path.read_text() for path in folder.iterdir()}


def changed(folder: Path, files: dict[str, str], old: str, new: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text.replace(old, new))
    return folder


def run_of(folder: Path, *overrides: str) -> dict:
    """Writes the files of a run with `overrides` as train.py does; returns its configuration."""
    config, invocation = composed(*overrides, run_dir=folder)
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
    assert {key for key in was if was[key] != now[key]} == {"offload", "seed", "checkpoint", "resume"}
    (tmp_path / "epochs").mkdir()
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


def test_the_values_of_a_sweep_stay_for_hydra(tmp_path: Path):
    run_of(tmp_path, *SWAPS)
    overrides = repeated([f"repeat='{tmp_path}'", "offload=none,layer_stream", "hydra.run.dir=x"])
    assert overrides[-2:] == ["offload=none,layer_stream", "hydra.run.dir=x"]
    assert not [text for text in overrides[:-2] if text.startswith(("offload", "resume", "hydra"))]


def test_keys_that_came_since_have_todays_values(tmp_path: Path, files, capsys: pytest.CaptureFixture[str]):
    assert not [text for text in repeated([f"repeat={changed(tmp_path, files, 'seed: 3', '')}"]) if "seed" in text]
    assert capsys.readouterr().err == f"note: repeat={tmp_path}: keys that the run did not have: seed=0\n"


@pytest.mark.parametrize(
    ("old", "new", "given", "message"),
    [
        ("seed: 3\n", "sead: 3\n", (), r"the run had sead=3, a key that does not exist any more: remove it from"),
        ("seed: 3\n", "seed: many\n", (), r"the run had seed=many, which is refused today"),
        ("  budget:", "  least:", (), r"the run had offload.least=0, a key that does not exist"),
        ("seed: 3\n", "seed: [3\n", (), r"config.yaml cannot be used: it is not a plain YAML file"),
        ("offload: tensor_swap", "offload: gone", (), r"repeat=.*: offload=gone: there is no such option"),
        ("offload: tensor_swap", "offload: ../../x", (), r"offload=../../x, which is not the name of an option"),
        ("", "", ("experiment=quickstart",), r"experiment=quickstart: repeat=.* gives every value already"),
        ("", "", ("tags=[ä",), r"tags=\[ä: is not KEY=VALUE"),
        ("", "", ("repeat=b",), r"give the run to repeat once"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(tmp_path: Path, files, old: str, new: str, given: tuple, message: str):
    changed(tmp_path, files, old, new)
    with pytest.raises(UserError, match=message) as raised:
        repeated([f"repeat={tmp_path}", *given])
    assert "\n" not in str(raised.value)


def test_a_directory_that_hydra_cannot_read_is_one_line():
    with pytest.raises(UserError, match=r"^repeat=runs/ä: is not KEY=VALUE.* two pairs of quotes"):
        repeated(["repeat=runs/ä"])


def test_what_is_replaced_need_not_exist_any_more(tmp_path: Path, files):
    changed(
        tmp_path,
        {name: text.replace("offload: tensor_swap", "offload: gone") for name, text in files.items()},
        "  budget",
        "  x",
    )
    overrides = repeated([f"repeat={tmp_path}", "offload=none"])
    assert "seed=3" in overrides
    assert [text for text in overrides if text.startswith("offload")] == ["offload=none"]


def test_the_directory_of_a_sweep_is_not_that_of_a_run(tmp_path: Path, files):
    (tmp_path / "0").mkdir()
    changed(tmp_path / "0", files, "", "")
    with pytest.raises(
        UserError, match=f"no choices.yaml there: give the directory of a run, such as repeat={tmp_path}/0"
    ):
        repeated([f"repeat={tmp_path}"])
