"""A checkpoint names the frozen base of an adapter."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from training.checkpoints.base import BaseReference
from training.errors import UserError
from training.weights.files import ModelWeights


def weights_in(folder: Path, *values: float) -> ModelWeights:
    folder.mkdir()
    for number, value in enumerate(values):
        save_file({f"x{number}": torch.tensor([value])}, folder / f"model-{number}.safetensors")
    return ModelWeights(str(folder))


def saved(reference: BaseReference, folder: Path) -> Path:
    (folder / "base.json").write_bytes(reference.to_json())
    return folder


def test_a_base_is_its_seed(tmp_path: Path):
    folder = saved(BaseReference.of(3, None), tmp_path)
    BaseReference.of(3, None).check(folder, "resume=x")
    with pytest.raises(UserError, match=r"^resume=x: the frozen base was made from seed=3, and is seed=4: give model"):
        BaseReference.of(4, None).check(folder, "resume=x")


def test_or_the_contents_of_its_files_wherever_they_are(tmp_path: Path):
    reference = BaseReference.of(3, weights_in(tmp_path / "a", 1, 2))
    digest = hashlib.sha256((tmp_path / "a" / "model-1.safetensors").read_bytes()).hexdigest()
    assert reference.sha256["model-1.safetensors"] == digest
    folder = saved(reference, tmp_path)
    BaseReference.of(4, weights_in(tmp_path / "b", 1, 2)).check(folder, "resume=x")
    for other in (BaseReference.of(3, weights_in(tmp_path / "c", 1, 3)), BaseReference.of(3, None)):
        with pytest.raises(UserError, match=rf"was loaded from model\.weights={tmp_path / 'a'}, and is .*: give files"):
            other.check(folder, "resume=x")


def test_a_checkpoint_without_it_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"^resume=x: .*base\.json: no such file$"):
        BaseReference.of(3, None).check(tmp_path, "resume=x")


def test_files_of_a_pipeline_are_inside_and_those_of_an_index_are_its_own(tmp_path: Path):
    (tmp_path / "pipeline").mkdir()
    for part in ("unet", "vae"):
        weights_in(tmp_path / "pipeline" / part, 1)
    (tmp_path / "pipeline" / "unet" / "config.json").write_text("{}")
    reference = BaseReference.of(0, ModelWeights(str(tmp_path / "pipeline")))
    # The other models of the pipeline are not part of the base.
    assert list(reference.sha256) == ["unet/model-0.safetensors"]
    file = weights_in(tmp_path / "one", 1).path() / "model-0.safetensors"
    assert list(BaseReference.of(0, ModelWeights(str(file))).sha256) == ["model-0.safetensors"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^model\.weights=.*empty: .* contains no \.safetensors file"):
        BaseReference.of(0, ModelWeights(str(tmp_path / "empty")))
