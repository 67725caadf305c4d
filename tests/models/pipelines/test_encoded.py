"""Results of encoders are found again by the pipeline, its precision and the picture's content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.pipelines.calls import NetworkCall
from models.pipelines.encoded import EncodedFolder, digest_of
from models.pipelines.recording import Recorder
from tests.models.helpers.tiny_pipelines import made, saved


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("sd3", tmp_path_factory)


def test_results_come_back_and_others_are_missing(sd3_folder: Path):
    folder = EncodedFolder(sd3_folder, torch.bfloat16)
    assert not folder.has("a")
    tensors = {"latents": torch.rand(2, 4, 8, 8), "x": torch.ones(1, 3, dtype=torch.bfloat16)}
    folder.write("a", tensors)
    again = EncodedFolder(sd3_folder, torch.bfloat16)
    assert again.has("a")
    found = again.read("a")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not EncodedFolder(sd3_folder, torch.float32).has("a")
    assert [file.name for file in folder.path.iterdir()] == ["a.safetensors"]


def test_calls_come_back_the_largest_first(sd3_folder: Path):
    pipeline = made("sd3")
    recorder, folder = (
        Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu")),
        EncodedFolder(sd3_folder, torch.float32),
    )
    for size in ((32, 32), (32, 64)):
        folder.write_call(NetworkCall.of(recorder, size))
    assert [call.noise for call in folder.calls()] == [(4, 16, 32), (4, 16, 16)]
    assert folder.call_of((4, 16, 16)).noise == (4, 16, 16)
    assert folder.call_of((4, 8, 8)) is None


def test_planned_calls_are_known_for_a_while_and_not_kept(sd3_folder: Path):
    pipeline, folder = made("sd3"), EncodedFolder(sd3_folder, torch.float32)
    call = NetworkCall.of(Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu")), (32, 32))
    with folder.planned([call]):
        again = EncodedFolder(sd3_folder, torch.float32)
        assert again.call_of(call.noise) is again.calls()[0] is call
        assert not EncodedFolder(sd3_folder, torch.bfloat16).calls()
    assert not folder.calls()
    assert not folder.path.exists()


def test_the_digest_is_of_encoders_alone(sd3_folder: Path, tmp_path: Path):
    before = digest_of(sd3_folder)
    file = sd3_folder / "transformer" / "config.json"
    content = file.read_text()
    file.write_text(content + " ")
    assert digest_of(sd3_folder) == before
    file.write_text(content)
    for name in ("vae/config.json", "tokenizer/tokenizer_config.json"):
        file = sd3_folder / name
        content = file.read_text()
        file.write_text(content + " ")
        assert digest_of(sd3_folder) != before
        file.write_text(content)
    assert digest_of(sd3_folder) == before
    template = sd3_folder / "tokenizer" / "chat_template.jinja"
    template.write_text("user {{ messages[0]['content'] }}")
    assert digest_of(sd3_folder) != before
    template.unlink()
