"""Results of encoders are found again by the pipeline, its precision and the picture's content."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from models.pipelines import encoded
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


def test_parts_of_files_are_no_results(sd3_folder: Path):
    pipeline, folder = made("sd3"), EncodedFolder(sd3_folder, torch.float32)
    call = NetworkCall.of(Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu")), (32, 32))
    for written in (True, False):
        folder.write("a", {"latents": torch.rand(4, 4)})
        folder.write_prompt("cat", [torch.rand(4, 4), None])
        folder.write_call(call)
        assert all(path.suffix != ".partial" for path in folder.path.iterdir())
        if not written:
            for path in folder.path.iterdir():
                path.write_bytes(path.read_bytes()[:-10])
        assert folder.has("a") == written
        assert (folder.prompt_of("cat") is not None) == written
        assert (folder.call_of(call.noise) is not None) == bool(folder.calls()) == written


def test_a_full_disk_leaves_nothing(sd3_folder: Path, monkeypatch: pytest.MonkeyPatch):
    folder, write = EncodedFolder(sd3_folder, torch.float32), Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> None:
        write(path, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    told = rf"cannot write {folder.path / 'a.safetensors'}: No space left on device: make room there, or set XDG_CACHE"
    with pytest.raises(ValueError, match=told):
        folder.write("a", {"latents": torch.ones(4)})
    assert not [*folder.path.iterdir()]


def test_two_runs_of_one_process_number_write_the_same_file(sd3_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """As in containers that share the cache: the second one begins before the first has ended."""
    folder, rename, begun = EncodedFolder(sd3_folder, torch.float32), Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if not begun:
            begun.append(path)
            folder.write("a", {"latents": torch.ones(4)})
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    folder.write("a", {"latents": torch.ones(4)})
    assert torch.equal(folder.read("a")["latents"], torch.ones(4))


def test_the_digest_is_of_what_results_depend_on(
    sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    before = digest_of(sd3_folder)

    def changed(name: str, content: str) -> bool:
        file = sd3_folder / name
        own = file.read_text()
        file.write_text(content or own + " ")
        after = digest_of(sd3_folder)
        file.write_text(own)
        return after != before

    assert changed("vae/config.json", "")
    assert changed("tokenizer/tokenizer_config.json", "")
    for name in ("transformer/config.json", "scheduler/scheduler_config.json"):
        config = json.loads((sd3_folder / name).read_text())
        assert not changed(name, json.dumps(config | {"_name_or_path": "here", "_diffusers_version": "0"}))
        # That of Flux tells its pipeline whether the network takes a guidance.
        assert changed(name, json.dumps(config | {"guidance_embeds": True}))
    assert digest_of(sd3_folder) == before
    with monkeypatch.context() as patched:
        patched.setattr(encoded, "version", lambda name: "0")
        assert digest_of(sd3_folder) != before
    folder, vae = saved("sd3", tmp_path_factory), made("sd3").vae
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    digests = set()
    for _ in range(2):
        vae.save_pretrained(folder / "vae", safe_serialization=False)
        digests.add(digest_of(folder))
        vae.encoder.conv_in.weight.data[0] += 1
    assert len(digests) == 2
    template = sd3_folder / "tokenizer" / "chat_template.jinja"
    template.write_text("user {{ messages[0]['content'] }}")
    assert digest_of(sd3_folder) != before
