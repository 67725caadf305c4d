"""Checkpoints that are damaged, forged or of another model: refused in one line that names the file, in time."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from training.checkpoints.saving import write_folder
from training.errors import UserError


def flip(file: str, where: float) -> Callable[[Path], None]:
    """Flips one bit, at a share of the file's length."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[int(where * (len(content) - 1))] ^= 4
        (folder / file).write_bytes(content)

    return damage


def cut(file: str, nbytes: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, (folder / file).stat().st_size - nbytes)


def rewrite(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content)


DAMAGE = {
    "weights cut short": (cut("model.safetensors", 1), "model.safetensors has .* bytes where"),
    "middle bit of weights": (flip("model.safetensors", 0.5), "model.safetensors is not what was written"),
    "bit of the position": (flip("state.json", 0.4), "state.json is not what was written"),
    "weights gone": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "manifest gone": (lambda f: (f / "manifest.json").unlink(), "manifest.json: no such file"),
    "manifest of another format": (rewrite("manifest.json", b'{"format": 9}'), "format 9: this version reads only"),
    "manifest that is huge": (
        lambda f: os.truncate(f / "manifest.json", 2**30),
        "manifest.json: it has more .* too many",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_naming_the_file_and_the_one_before(finished: Path, run_here, at, case: str):
    damage, reason = DAMAGE[case]
    damage(at(finished, 6))
    records = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as refusal:
        run_here(finished, f"resume={finished}")
    message = str(refusal.value)
    assert re.search(reason, message), message
    assert f"the one before it is complete, resume={at(finished, 3)}" in message
    assert "\n" not in message
    assert (finished / "metrics.jsonl").read_bytes() == records


def test_auto_takes_the_one_before_and_keeps_the_damaged_one(
    tmp_path: Path, finished: Path, run_here, at, content, caplog: pytest.LogCaptureFixture
):
    end = content(at(finished, 6))
    flip("model.safetensors", 0.5)(at(finished, 6))
    run_here(finished, "resume=auto")
    assert "model.safetensors is not what was written" in caplog.text
    assert content(at(finished, 6)) == end
    assert at(finished, 6).with_name("step-00000006.aside").is_dir()
    flip("model.safetensors", 0.5)(at(finished, 3))
    flip("model.safetensors", 0.5)(at(finished, 6))
    with pytest.raises(UserError, match=r"resume=auto: no checkpoint of .* can be used .*remove them to start"):
        run_here(finished, "resume=auto")


def test_without_an_earlier_checkpoint_the_message_says_so(finished: Path, run_here, at):
    flip("model.safetensors", 0.5)(at(finished, 3))
    with pytest.raises(UserError, match="there is no complete one before it"):
        run_here(finished, f"resume={at(finished, 3)}")


def forged(source: Path, target: Path, **changed: bytes) -> Path:
    """Makes a checkpoint with other contents, by file stem, whose manifest matches them."""
    stems = {path.stem: path for path in source.iterdir() if path.name != "manifest.json" and path.suffix != ".json"}
    stems |= {"state": source / "state.json"}
    contents = {path.name: changed.get(stem, path.read_bytes()) for stem, path in stems.items()}
    write_folder(target, {name: lambda write, data=data: write(data) for name, data in contents.items()})
    return target


def safetensors_of(tensors: dict[str, torch.Tensor], tmp_path: Path) -> bytes:
    save_file(tensors, tmp_path / "forged.safetensors")
    return (tmp_path / "forged.safetensors").read_bytes()


def header(length: int, text: bytes, data: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + text + data


OVERLAP = json.dumps(
    {f"w{i}": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for i in range(2)}, separators=(",", ":")
).encode()
# A run of another model is refused for that alone.
SAME_MODEL = b"model: {_target_: models.llama.Llama}\n"
FORGERIES = {
    "a header of 2^63 bytes": ("model", header(2**63, b"{}"), "model.safetensors cannot be read as safetensors"),
    "tensors that overlap": (
        "model",
        header(len(OVERLAP), OVERLAP, bytes(8)),
        "model.safetensors cannot be read as safetensors",
    ),
    "a pickle": ("model", b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.", "model.safetensors cannot be read as"),
    "no random states": ("random", header(2, b"{}"), "random.safetensors does not have the states"),
    "yaml that calls": (
        "config",
        SAME_MODEL + b"a: !!python/object/apply:os.system ['touch pwned']",
        r"a: was \['touch pwned'\], is absent",
    ),
    "yaml that grows": ("config", b"a: &a [1]\nb: [*a, *a]", "config.yaml: it has YAML aliases"),
    "yaml of another object": (
        "config",
        SAME_MODEL + b"optimizer: {_target_: os.system, command: touch pwned}",
        "optimizer._target_: was os.system, is training.optim.AdamW",
    ),
}


@pytest.mark.parametrize("case", FORGERIES)
@pytest.mark.slow
def test_a_forged_checkpoint_does_nothing(
    tmp_path: Path, finished: Path, run_here, at, case: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    stem, content, reason = FORGERIES[case]
    folder = forged(at(finished, 6), tmp_path / "step-00000006", **{stem: content})
    with pytest.raises(UserError) as refusal:
        run_here(tmp_path / "new", f"resume={folder}")
    assert re.search(reason, str(refusal.value)), refusal.value
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("stem", ["model", "optimizer"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors, name: tensors.pop(name), r"lacks tensor {name}"),
        (lambda tensors, name: tensors.update(extra=torch.ones(1)), r"has tensor extra, which this run lacks"),
        (lambda tensors, name: tensors.update({name: tensors[name][:1]}), r"{name} is F32 \[1, 16\], this run's"),
        (lambda tensors, name: tensors.update({name: tensors[name].double()}), r"{name} is F64 .*this run's is F32"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
@pytest.mark.slow
def test_tensors_of_another_model_are_refused_before_the_model_is_touched(
    tmp_path: Path, finished: Path, run_here, at, stem: str, change: Callable, reason: str, monkeypatch
):
    name = "model.layers.1.mlp.up_proj.weight" + (".exp_avg" if stem == "optimizer" else "")
    tensors = load_file(at(finished, 6) / f"{stem}.safetensors")
    change(tensors, name)
    folder = forged(at(finished, 6), tmp_path / "step-00000006", **{stem: safetensors_of(tensors, tmp_path)})
    written = []
    monkeypatch.setattr("models.weights.read_into", lambda *arguments: written.append(arguments))
    monkeypatch.setattr("training.checkpoints.state.read_into", lambda *arguments: written.append(arguments))
    with pytest.raises(UserError, match=reason.format(name=re.escape(name))):
        run_here(tmp_path / "new", f"resume={folder}")
    assert not written


INDICES = {
    "no index": (None, "manifest.json lists no model.safetensors"),
    "a file elsewhere": (
        "../outside.safetensors",
        r"names '\.\./outside\.safetensors', which is not a \.safetensors file",
    ),
    "a file of its own": ("other.safetensors", r"manifest.json lists no other.safetensors"),
    "the usual file": ("model.safetensors", r"manifest.json lists no model.safetensors"),
}


@pytest.mark.parametrize("case", INDICES)
@pytest.mark.slow
def test_weights_are_read_from_listed_files_alone(tmp_path: Path, finished: Path, run_here, at, case: str):
    """Files that the manifest does not list were not verified."""
    named, reason = INDICES[case]
    source = at(finished, 6)
    contents = {path.name: path.read_bytes() for path in source.iterdir() if path.name != "manifest.json"}
    weights = contents.pop("model.safetensors")
    if named is not None:
        index = {"weight_map": dict.fromkeys(load_file(source / "model.safetensors"), named)}
        contents["model.safetensors.index.json"] = json.dumps(index).encode()
    folder = tmp_path / "step-00000006"
    write_folder(folder, {name: lambda write, data=data: write(data) for name, data in contents.items()})
    for place in ("model.safetensors", "other.safetensors", "../outside.safetensors"):
        (folder / place).write_bytes(weights)
    with pytest.raises(UserError, match=reason):
        run_here(tmp_path / "new", f"resume={folder}")
