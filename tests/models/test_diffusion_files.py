"""Files of diffusion models: diffusers reads what is written here, and what diffusers writes is read here."""

import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn

from models.diffusion_files import diffusion_files, scheduler_file
from models.diffusion_network import DiffusersNetwork
from tests.models.helpers.saving import save_diffusion
from tests.models.helpers.small_diffusion import build


def small(seed: int, **changes: object) -> DiffusersNetwork:
    """A model with a persistent buffer."""
    torch.manual_seed(seed)
    return build("sd3", **{"num_layers": 1, **changes})


def same(a: nn.Module, b: nn.Module) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("shard_bytes", [2**30, 4000])
def test_diffusers_reads_what_is_written(tmp_path: Path, shard_bytes: int) -> None:
    model = small(0)
    save_diffusion(model, tmp_path / "saved", shard_bytes)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (shard_bytes == 4000)
    loaded = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "saved")
    assert same(loaded, model.network)
    assert dict(loaded.config)["num_layers"] == 1


@pytest.mark.parametrize("shard_size", ["1GB", "4KB"])
def test_what_diffusers_writes_is_read(tmp_path: Path, shard_size: str) -> None:
    small(0).network.save_pretrained(tmp_path, max_shard_size=shard_size)
    model = small(1)
    model.load(tmp_path)
    assert same(model, small(0))


def test_a_single_file_is_read_and_of_a_pipelines_part_the_variant_without_a_name(tmp_path: Path) -> None:
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    save_diffusion(small(0), file.parent)
    shutil.copy(file, file.with_suffix(".fp16.safetensors"))
    for given in (tmp_path, file):
        model = small(1)
        model.load(given)
        assert same(model, small(0))


def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    save_diffusion(small(0, num_layers=2), tmp_path)
    model = small(1)
    with pytest.raises(ValueError, match="choose the model that it was saved from"):
        model.load(tmp_path)
    assert same(model, small(1))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither diffusion_pytorch_model\.safetensors nor"):
        small(0).load(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        small(0).load(tmp_path / "none")


def test_a_model_without_memory_is_not_saved() -> None:
    with torch.device("meta"):
        model = small(0)
    with pytest.raises(ValueError, match="is on the meta device: allocate its memory"):
        diffusion_files(model)


def test_a_scheduler_is_found_from_its_pipeline_and_from_a_model_in_one(tmp_path: Path) -> None:
    pipeline, alone = tmp_path / "pipeline", tmp_path / "alone"
    file = pipeline / "scheduler" / "scheduler_config.json"
    diffusers.DDPMScheduler().save_pretrained(file.parent)
    save_diffusion(small(0), pipeline / "transformer")
    save_diffusion(small(0), alone)
    weights = pipeline / "transformer" / "diffusion_pytorch_model.safetensors"
    for place in (pipeline, file.parent, file, weights.parent, weights):
        assert scheduler_file(place) == file
    assert not any(map(scheduler_file, (tmp_path, alone, alone / weights.name)))
