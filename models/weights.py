"""Model weights in safetensors files with Hugging Face's names and layout: one file, or shards with an index.

Tensors are copied one by one between the file and the parameter's own memory, on host or device, so there is never a
second copy of a model. A checkpoint that does not fit the model is refused before anything is written.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from models.json_files import read_object
from models.quantise import stored_tensors
from models.safetensors_files import (
    DTYPE_NAMES,
    StoredTensor,
    open_file,
    read_headers,
    read_into,
    split_into_files,
    tensor_pieces,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Constants that old Llama checkpoints stored among the weights; models compute them.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}
INTEGER_DTYPES = {"I64", "I32", "I16", "I8", "U8", "BOOL"}
MAX_SHARD_BYTES = 4 * 2**30
# Ten times the index of a model of 100,000 tensors.
MAX_INDEX_BYTES = 2**27


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copies a checkpoint into the model's parameters and buffers, converting to their dtype and device.

    Args:
        path: a .safetensors file, an index file, or a folder with `model.safetensors` or with shards (with or without
            an index).

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: a file cannot be read; a tensor is missing, unknown, or has another shape; or tied parameters have
            different values in the checkpoint. The model is unchanged then.
    """
    distinct_tensors(model)
    read_into(*matched_weights(model, path))


def matched_weights(model: nn.Module, path: str | Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
    """Returns which tensor of the model each stored one is, by stored name, and the entries of all files.

    It reads headers alone, so the model may be on the meta device. Raises as `load_weights` does.
    """
    path = Path(path)
    stored = read_checkpoint_headers(path)
    return match_tensors(named_tensors(model), stored, path), stored


def has_own_names(model: nn.Module, path: Path) -> bool:
    """Tells whether the files at `path` name tensors as `model` itself does, as a checkpoint of a run does.

    The files of a library name them as its own model does, which is inside `model`.
    """
    try:
        stored = read_checkpoint_headers(path)
    except (FileNotFoundError, ValueError):
        # The loader of the library knows more kinds of folders, and says what is wrong with others.
        return False
    return any(name in stored for _, names in named_tensors(model) for name in names)


def weight_files(model: nn.Module, max_shard_bytes: int) -> tuple[dict[str, dict[str, Tensor]], bytes | None]:
    """Returns the tensors for each file of the model's weights, and the index of the files (None for a single file).

    A quantised weight is in them as the tensors of its format, which only a model quantised alike can load.
    """
    tensors = {}
    for tensor, names in distinct_tensors(model):
        tensors |= stored_tensors(names[0], tensor)
    files = split_into_files("model", tensors, max_shard_bytes)
    return files, None if len(files) == 1 else index_of(files)


def index_of(files: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Returns the index of several files, given their tensors by the file's name."""
    total_bytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    weight_map = {name: file_name for file_name, tensors in files.items() for name in tensors}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2).encode()


def distinct_tensors(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Returns every tensor of the state dict once, with all its names; a tied tensor has several.

    Raises ValueError if one is on the meta device.
    """
    found = named_tensors(model)
    for tensor, names in found:
        if tensor.is_meta:
            raise ValueError(f"{names[0]} is on the meta device: allocate its memory before loading or saving weights")
    return found


def named_tensors(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Returns as `distinct_tensors` does, of a model on the meta device too."""
    by_identity: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_identity.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(by_identity.values())


def match_tensors(
    tensors: list[tuple[Tensor, list[str]]], stored: dict[str, StoredTensor], path: Path
) -> dict[str, Tensor]:
    """Returns the model's tensors by their stored name; raises ValueError if the checkpoint does not fit the model."""
    targets = {}
    missing = []
    tensors = [entry for tensor, names in tensors for entry in _as_stored(tensor, names, stored)]
    for tensor, names in tensors:
        present = [name for name in names if name in stored]
        if not present:
            missing.append(names[0])
            continue
        for name in present:
            check_fits(name, tensor, stored[name])
        for other in present[1:]:
            check_tied(stored, present[0], other)
        targets[present[0]] = tensor
    known = {name for _, names in tensors for name in names}
    unknown = [name for name in stored if name not in known and not name.endswith(IGNORED_SUFFIXES)]
    if missing:
        advice = "choose the model that it was saved from"
        if missing == ["lm_head.weight"]:
            advice = f"it was saved with a tied head: {_tying('true')}"
        raise ValueError(f"{path} lacks tensor {first_and_count(missing)}: {advice}")
    if unknown:
        file = stored[unknown[0]].file
        raise ValueError(
            f"{file} has tensor {first_and_count(unknown)}, which the model lacks: "
            "choose the model that it was saved from"
        )
    return targets


def _as_stored(tensor: Tensor, names: list[str], stored: dict[str, StoredTensor]) -> Iterator[tuple[Tensor, list[str]]]:
    """Yields the tensors that `tensor` is read from: itself, or where they are stored, those of its format."""
    inner = stored_tensors("", tensor)
    if any(name in stored for name in names) or "" in inner:
        yield tensor, names
        return
    for part, plain in inner.items():
        yield plain, [f"{name}{part}" for name in names]


def check_fits(name: str, tensor: Tensor, stored: StoredTensor) -> None:
    if stored.shape != tuple(tensor.shape):
        raise ValueError(
            f"{stored.file}: tensor {name} has shape {stored.shape}, but the model's has {tuple(tensor.shape)}: "
            "choose the model that it was saved from"
        )
    if tensor.itemsize == 1 and tensor.is_floating_point():
        kinds = {DTYPE_NAMES[tensor.dtype]}
    else:
        kinds = FLOAT_DTYPES if tensor.is_floating_point() else INTEGER_DTYPES
    if stored.dtype not in kinds:
        raise ValueError(
            f"{stored.file}: tensor {name} has dtype {stored.dtype}, which cannot be converted to {tensor.dtype}: "
            "use a checkpoint that is not quantised"
        )


def check_tied(stored: dict[str, StoredTensor], name: str, other: str) -> None:
    """Raises ValueError if two stored tensors for one parameter differ, because one of them would be lost."""
    if not same_values(stored, name, other):
        raise ValueError(
            f"{stored[other].file}: {name} and {other} differ, but the model has one for both: {_tying('false')}"
        )


def same_values(stored: dict[str, StoredTensor], name: str, other: str) -> bool:
    """Tells whether two stored tensors of one shape have equal values."""
    with open_file(stored[name].file) as first, open_file(stored[other].file) as second:
        pieces = zip(tensor_pieces(first, name), tensor_pieces(second, other), strict=True)
        return all(torch.equal(a, b) for (_, a), (_, b) in pieces)


def _tying(value: str) -> str:
    key = "tie_word_embeddings"
    return f"take model.{key}={value}, or with model=hf 'model.overrides={{{key}: {value}}}'"


def first_and_count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def read_checkpoint_headers(path: Path) -> dict[str, StoredTensor]:
    """Returns the header entries of a checkpoint's files by tensor name, compared with the index if there is one."""
    files = checkpoint_files(path)
    stored = read_headers(files)
    for file, promised in files.items():
        absent = sorted(name for name in promised if name not in stored or stored[name].file != file)
        if absent:
            raise ValueError(
                f"{file} lacks tensor {first_and_count(absent)} of the index: download the checkpoint again"
            )
    return stored


def checkpoint_files(path: Path) -> dict[Path, set[str]]:
    """Returns the files that `load_weights` reads, each with the names of its tensors if there is an index.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: there is no safetensors file, or the index cannot be used.
    """
    if path.is_file():
        return _indexed_files(path) if path.name.endswith(".index.json") else {path: set()}
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist: give a .safetensors file, or a folder of them")
    if (path / SINGLE_FILE).is_file():
        return {path / SINGLE_FILE: set()}
    if (path / INDEX_FILE).is_file():
        return _indexed_files(path / INDEX_FILE)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} contains no .safetensors file: convert the checkpoint to safetensors")
    return {file: set() for file in files}


def _indexed_files(index: Path) -> dict[Path, set[str]]:
    try:
        weight_map = read_object(index, "download it again", "an index", MAX_INDEX_BYTES)["weight_map"]
        by_file: dict[Path, set[str]] = {}
        for name, file_name in weight_map.items():
            # An index is not trusted: it may name files of its own folder only.
            if file_name != Path(file_name).name or not file_name.endswith(".safetensors"):
                raise ValueError(
                    f"{index} names {file_name!r}, which is not a .safetensors file beside it: "
                    "download the checkpoint again"
                )
            by_file.setdefault(index.parent / file_name, set()).add(name)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not an index of safetensors shards: download it again") from None
    if not by_file:
        raise ValueError(f"{index} lists no tensor: download it again")
    return by_file
