"""Every class of diffusers that can be called, in the loop: a mode computes the resident model's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from tests.models.helpers.small_diffusion import SMALL, inputs_of
from tests.test_any_model import COMMON, curve
from tests.training.helpers.in_process import components_of, run_here, saved_run
from tests.training.helpers.modes import small_modes
from training.planning.memory import PlannedUpdate
from training.saved_runs.export import export

# Each class meets one of them.
MODES = ("bounce_linear", "layer_stream", "shard_offload", "layer_stream_swap")
# Frames, and sizes of the image: in every run of the tests. Each other class takes as long.
FAST = ("cogvideox", "pixart")
# Norms, tables and times in float32 beside bf16.
MIXED = "wan"
CASES = [
    pytest.param(name, MODES[number % len(MODES)], id=name, marks=() if name in FAST else pytest.mark.slow)
    for number, name in enumerate(SMALL)
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
        *COMMON,
        "model=diffusers",
        f"model.source={kind}",
        f"model.overrides={written(options)}",
        "task=flow_matching",
        "task.null_class=2",
        "dataset=synthetic_images",
        f"dataset.shape={written(shape)}",
        f"dataset.condition={written(condition) if condition else 'null'}",
        *labels,
        "optimizer=host_adamw",
        "steps=2",
    )


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.usefixtures("small_activations")
def test_a_mode_trains_as_the_resident_model(tmp_path: Path, name: str, mode: str):
    knobs = small_modes()[mode]
    assert run_here(tmp_path / mode, *job(name), f"offload={mode}", *knobs)["transfer/h2d_gib"] > 0
    run_here(tmp_path / "none", *job(name), "offload=none")
    assert curve(tmp_path / mode) == curve(tmp_path / "none")
    assert len(curve(tmp_path / "none")) == 2


@pytest.mark.parametrize("mode", ["bounce_linear", "shard_offload"])
@pytest.mark.usefixtures("small_activations")
def test_weights_in_float32_beside_bf16_train_alike_in_every_mode(tmp_path: Path, mode: str):
    asked = (*job(MIXED), "clip_norm=0.1", "microbatches=2")
    run_here(tmp_path / mode, *asked, f"offload={mode}", *small_modes()[mode])
    run_here(tmp_path / "none", *asked, "offload=none")
    assert curve(tmp_path / mode) == curve(tmp_path / "none")


def test_a_run_saves_the_dtypes_that_its_library_loads(tmp_path: Path):
    run = saved_run(tmp_path / "run", *job(MIXED), "checkpoint.every=2")
    export(str(run), str(tmp_path / "exported"), [])
    stored = load_file(tmp_path / "exported" / "diffusion_pytorch_model.safetensors")
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "exported", torch_dtype=torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32, torch.bfloat16}
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {name: t.dtype for name, t in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.items())


def test_a_plan_counts_the_bytes_of_each_dtype():
    components = components_of(*job(MIXED), "offload=layer_stream", "optimizer.device_share=1GiB")
    units = components.footprint.trained
    assert len({parameter.dtype for unit in units for parameter in unit}) == 2
    expected = sum(parameter.nbytes for unit in units for parameter in unit)
    assert PlannedUpdate.of(components, 0).placed_gradient_bytes == expected
