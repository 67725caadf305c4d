"""Safetensors files that are written here and read by the library, and the other way round."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models import safetensors_files
from models.safetensors_files import (
    DTYPE_NAMES,
    StoredTensor,
    open_file,
    read_headers,
    read_into,
    split_into_files,
    tensor_pieces,
    write_tensors,
)
from tests import ROOT


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    with path.open("wb") as file:
        write_tensors(file.write, tensors, metadata)
    return path


def one_of_each_dtype() -> dict[str, torch.Tensor]:
    # Of 3 elements each, so that smaller elements would put larger ones out of alignment.
    return {str(dtype): torch.tensor([0, 1, 2]).to(dtype) for dtype in reversed(DTYPE_NAMES)}


def test_the_library_reads_what_is_written(tmp_path):
    tensors = one_of_each_dtype() | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).t(),
    }
    path = write(tmp_path / "a.safetensors", tensors, {"key": "value"})
    loaded, stored = load_file(path), read_headers([path])
    assert loaded.keys() == stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert stored[name] == StoredTensor(path, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
        assert torch.equal(loaded[name].float(), tensor.float()), name
    with safe_open(tmp_path / "a.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt", "key": "value"}


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    path = write(tmp_path / "a.safetensors", one_of_each_dtype())
    with open_file(path) as handle:
        for name in handle.keys():  # noqa: SIM118, the handle is not a dict
            tensor = handle.get_tensor(name)
            assert tensor.data_ptr() % tensor.element_size() == 0, name


def test_a_large_tensor_is_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", 40)
    sizes = []
    write_tensors(lambda data: sizes.append(len(data)), {"a": torch.zeros(25)})
    assert sizes[2:] == [40, 40, 20]
    tensors = {"a": torch.arange(25.0)}
    assert torch.equal(load_file(write(tmp_path / "a.safetensors", tensors))["a"], tensors["a"])


def test_a_dtype_without_a_name_is_refused_before_anything_is_written():
    written = []
    with pytest.raises(KeyError, match="complex64"):
        write_tensors(written.append, {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.complex64)})
    assert written == []


def test_a_name_in_two_files_is_refused(tmp_path):
    for name in ("1.safetensors", "2.safetensors"):
        save_file({"a": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"2\.safetensors has tensor a, which 1\.safetensors has too: remove one"):
        read_headers(sorted(tmp_path.iterdir()))


def test_a_missing_and_a_cut_file_are_refused_in_one_line(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"a\.safetensors is missing: download the checkpoint again$"):
        open_file(path)
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"a\.safetensors cannot be read as safetensors \(.*\): it is cut short"
    ) as cut:
        open_file(path)
    assert "\n" not in str(cut.value)


def test_reading_converts_in_place_and_reads_only_the_targets(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", 24)
    save_file({"a": torch.arange(20.0).view(10, 2), "b": torch.tensor(7.0)}, tmp_path / "1.safetensors")
    save_file({"c": torch.ones(3), "not wanted": torch.ones(3)}, tmp_path / "2.safetensors")
    targets = {"a": torch.zeros(10, 2, dtype=torch.bfloat16), "b": torch.zeros(()), "c": torch.zeros(3)}
    memory = {name: tensor.data_ptr() for name, tensor in targets.items()}
    read_into(targets, read_headers(sorted(tmp_path.iterdir())))
    assert targets["a"].tolist() == torch.arange(20.0).view(10, 2).tolist()
    assert targets["b"] == 7
    assert targets["c"].tolist() == [1, 1, 1]
    assert {name: tensor.data_ptr() for name, tensor in targets.items()} == memory


@pytest.mark.parametrize(("piece_bytes", "rows"), [(7 * 12, [7, 3]), (11, [1] * 10), (120, [10])])
def test_pieces_are_whole_rows_of_at_most_the_limit(tmp_path, monkeypatch, piece_bytes, rows):
    monkeypatch.setattr(safetensors_files, "PIECE_BYTES", piece_bytes)
    tensor = torch.arange(30.0).view(10, 3)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    copy = torch.zeros_like(tensor)
    with open_file(tmp_path / "a.safetensors") as handle:
        found = list(tensor_pieces(handle, "a"))
    assert [len(piece) for _, piece in found] == rows
    for index, piece in found:
        copy[index] = piece
    assert torch.equal(copy, tensor)


def test_tensors_are_split_in_order_by_bytes():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(3), "large": torch.zeros(9), "c": torch.zeros(5)}
    files = split_into_files("m", tensors, max_bytes=20)
    assert {name: list(part) for name, part in files.items()} == {
        "m-00001-of-00003.safetensors": ["a", "b"],
        "m-00002-of-00003.safetensors": ["large"],
        "m-00003-of-00003.safetensors": ["c"],
    }
    assert list(split_into_files("m", tensors, max_bytes=1000)) == ["m.safetensors"]


@pytest.mark.slow
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    # In a process of its own, because the library's wait cannot be interrupted.
    program = (
        "import pathlib, sys; from models.safetensors_files import open_file; open_file(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a.safetensors"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert f"ValueError: {tmp_path}/a.safetensors is not a file: download the checkpoint again" in done.stderr
