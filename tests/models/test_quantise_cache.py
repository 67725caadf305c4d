"""Quantised weights in a file beside those that they were made from."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import quantise_cache
from models.initialise import initialise
from models.llama import Llama
from models.quantise import quantisable, quantise
from models.quantise_cache import CacheFile, quantised_weights, source_digest
from models.quantise_formats import Format, Int4, Int8
from models.weights import load_weights
from tests.models.helpers.hugging_face import SIZES
from tests.models.helpers.saving import save_weights
from tests.offload.helpers.models import assert_same


def model(format: Format | None = None) -> Llama:
    made = Llama(**SIZES)
    if format is not None:
        quantise(made, quantisable(made, ["model.layers"], (), ()), format)
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = model()
    initialise(made, 1)
    save_weights(made, tmp_path / "source", max_shard_bytes=20_000)
    return tmp_path / "source"


def tensors_of(made: Llama) -> list[torch.Tensor]:
    return [tensor.clone() for _, weight in quantised_weights(made) for tensor in weight.inner.values()]


@pytest.mark.parametrize("format", [Int8(), Int4(group=16)], ids=str)
def test_what_was_written_is_read_bit_for_bit(source: Path, format: Format):
    first, second = model(format), model(format)
    load_weights(first, source)
    cache = CacheFile.beside(source, first)
    assert not cache.exists
    cache.check()
    cache.write(first)
    assert cache.exists
    assert os.listdir(source).count(cache.path.name) == 1
    assert cache.path.name.startswith(format.name)
    again = CacheFile.beside(source, second)
    again.check()
    again.read(second)
    assert_same(tensors_of(second), tensors_of(first))
    # It is no shard of the source.
    load_weights(model(), source)


def test_each_format_dtype_and_choice_of_layers_has_a_file_of_its_own(source: Path):
    models = [model(Int8()), model(Int4(group=16)), model(Int4(group=32)), model()]
    quantise(models[-1], quantisable(models[-1], ["model.layers"], ["*.mlp.*"], ()), Int8())
    half = model().to(torch.bfloat16)
    quantise(half, quantisable(half, ["model.layers"], (), ()), Int8())
    assert len({CacheFile.beside(source, made).path for made in (*models, half)}) == 5


def test_a_cache_of_other_weights_is_refused_in_one_line(source: Path):
    made = model(Int8())
    load_weights(made, source)
    CacheFile.beside(source, made).write(made)
    file = sorted(source.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[-1] += 1
    save_file(tensors, file)
    with pytest.raises(ValueError, match="was made from other weights than those beside it: remove it") as error:
        CacheFile.beside(source, made).check()
    assert "\n" not in str(error.value)


def test_a_damaged_cache_is_refused_and_changes_nothing(source: Path):
    made = model(Int8())
    load_weights(made, source)
    cache = CacheFile.beside(source, made)
    cache.write(made)
    expected = tensors_of(made)
    whole = cache.path.read_bytes()
    cache.path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cut short"):
        cache.check()
    save_file({"model.layers.0.mlp.up_proj.weight.qdata": torch.zeros(2)}, cache.path, {"source": cache.source})
    cache.check()
    with pytest.raises(ValueError, match=r"has no tensor .* of this model: remove it"):
        cache.read(made)
    assert_same(tensors_of(made), expected)


def test_a_write_that_fails_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch):
    made = model(Int8())
    load_weights(made, source)
    before = sorted(os.listdir(source))

    def fail(write, *arguments):
        write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantise_cache, "write_tensors", fail)
    with pytest.raises(OSError, match="No space"):
        CacheFile.beside(source, made).write(made)
    assert sorted(os.listdir(source)) == before


def test_the_digest_sees_headers_sizes_and_both_ends_of_tensors(tmp_path: Path):
    def digest(**tensors: torch.Tensor) -> str:
        save_file(tensors, tmp_path / "a.safetensors")
        return source_digest([tmp_path / "a.safetensors"])

    long = torch.zeros(10_000)
    first, last = long.clone(), long.clone()
    first[0], last[-1] = 1, 1
    others = [
        digest(a=long),
        digest(b=long),
        digest(a=long[:-1]),
        digest(a=first),
        digest(a=last),
        digest(a=long, b=long.clone()),
    ]
    assert len(set(others)) == len(others)
    assert digest(a=long) == others[0]
