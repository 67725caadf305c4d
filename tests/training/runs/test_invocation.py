"""The directory, the options and the overrides with which a run was started."""

import ast
from contextlib import nullcontext
from pathlib import Path

import pytest
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import Container, Node, OmegaConf

from tests import ROOT
from tests.training.helpers import compositions
from tests.training.helpers.in_process import composed, conf_initialised
from training.runs.invocation import Invocation


def test_it_has_the_options_and_the_overrides_as_they_were_given(tmp_path: Path):
    _, invocation = composed("offload=layer_stream", "seed='${nowhere}'", run_dir=tmp_path)
    assert invocation.run_dir == tmp_path
    assert invocation.choices["offload"] == "layer_stream"
    assert invocation.choices["experiment"] is None
    assert invocation.overrides == ("offload=layer_stream", "seed='${nowhere}'")
    assert invocation.title == "offload=layer_stream model=tiny"


def test_the_running_job_is_read_from_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hydra = {"runtime": {"output_dir": str(tmp_path), "choices": {"model": "tiny"}}, "overrides": {"task": ["seed=3"]}}
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create(hydra))
    assert Invocation.current() == Invocation(tmp_path, {"model": "tiny"}, ("seed=3",))


def test_nothing_else_reads_hydras_global():
    """Only the launcher touches it, because Hydra's interface of launchers does."""
    readers = set()
    for path in (ROOT / "train.py", *(ROOT / "training").rglob("*.py")):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        if "HydraConfig" in names:
            readers.add(str(path.relative_to(ROOT)))
    assert readers == {"training/runs/invocation.py", "training/sweeps/launcher.py"}


@pytest.mark.parametrize("inside", [True, False])
def test_the_same_command_is_composed_with_changes(tmp_path: Path, inside: bool):
    _, invocation = composed("offload=bounce_linear", "++offload.slots=5", "batch_size=2", run_dir=tmp_path)
    with conf_initialised() if inside else nullcontext():
        config, changed = invocation.composed_with({"offload": "layer_stream", "batch_size": "4"})
    assert config.offload._target_.endswith("LayerStream")
    assert (config.offload.slots, config.batch_size) == (5, 4)
    assert changed.overrides == ("++offload.slots=5", "offload=layer_stream", "batch_size=4")
    assert changed.choices["offload"] == "layer_stream"
    assert "hydra" not in config


def nodes_of(node: Node, place: str = "") -> dict[str, tuple]:
    """What `node` and those below it hold, by place: type, value, and what may be set there."""
    kind = node._metadata
    found = {place: (type(node), kind.object_type, kind.ref_type, kind.optional, kind.flags)}
    if not isinstance(node, Container) or not isinstance(node._content, dict | list):
        return {place: (*found[place], node._value())}
    for key in node._content if isinstance(node._content, dict) else range(len(node._content)):
        found |= nodes_of(node._get_node(key), f"{place}.{key}")
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=hf", "task=dpo", "offload=layer_stream", "offload.slots=3"),
        ("experiment=chat", "hydra/launcher=process", "seed=4"),
        ("offload=layer_stream_swap", "offload.weights.slots=3", "optimizer=host_adamw"),
    ],
)
def test_tests_compose_as_hydra_does_alone(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Twice, because what is remembered must not be what a run has changed."""
    commands, found = [[*overrides, f"steps={number}"] for number in (5, 6)], []
    with conf_initialised():
        for command in commands:
            config = compose("config", command, return_hydra_config=True)
            found.append(nodes_of(config))
            config.model._target_, config.hydra.job.name, config.tracking.tags = "changed", "changed", ["changed"]
        monkeypatch.setattr(compositions, "_is_of_conf", lambda repo: False)
        expected = [nodes_of(compose("config", command, return_hydra_config=True)) for command in commands]
    assert len(found[0]) > 200
    assert found == expected
