"""The classes of diffusers without a pipeline, in the loop: a mode computes the resident model's numbers."""

from pathlib import Path

import pytest

from tests.models.helpers.small_diffusion import OWN, SMALL, inputs_of
from tests.test_any_model import COMMON, curve
from tests.training.helpers.in_process import run_here
from tests.training.helpers.modes import small_modes

# Each class meets one of them.
MODES = ("bounce_linear", "layer_stream", "shard_offload", "layer_stream_swap")
# A video, and channels beside the noisy ones: in every run of the tests. Each other takes as long.
FAST = ("ltx", "flux_fill")
CASES = [
    pytest.param(name, MODES[number % len(MODES)], id=name, marks=() if name in FAST else pytest.mark.slow)
    for number, name in enumerate(OWN)
]


def written(value: object) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(written, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def job(name: str) -> tuple[str, ...]:
    """Two steps of flow matching on random latents, with random conditions."""
    kind, options, shape = SMALL[name]
    condition = {key: list(value.shape[1:]) for key, value in inputs_of(name)[1].items()}
    labels = ("dataset.num_classes=2",) if condition.pop("labels", None) is not None else ()
    return (
        *COMMON, "model=diffusers", f"model.source={kind}", f"model.overrides={written(options)}",
        "task=flow_matching", "task.null_class=2", "dataset=synthetic_images", f"dataset.shape={written(shape)}",
        f"dataset.condition={written(condition) if condition else 'null'}",
        *labels, "optimizer=host_adamw", "steps=2",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.usefixtures("small_activations")
def test_a_mode_trains_as_the_resident_model(tmp_path: Path, name: str, mode: str):
    knobs = small_modes()[mode]
    assert run_here(tmp_path / mode, *job(name), f"offload={mode}", *knobs)["transfer/h2d_gib"] > 0
    run_here(tmp_path / "none", *job(name), "offload=none")
    assert curve(tmp_path / mode) == curve(tmp_path / "none")
    assert len(curve(tmp_path / "none")) == 2
