"""The places of parameters in files: their bytes there are the model's, and others have a reason."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models.adapters import Lora, inject, without_adapters
from models.diffusion import build_diffusion
from models.llama import Llama
from models.places import Places, find_places
from models.quantise import quantisable, quantise
from models.quantise_cache import CacheFile
from models.quantise_formats import Int8
from models.weights import load_weights
from tests.models.helpers.hf_models import tiny
from tests.models.helpers.hugging_face import SIZES
from tests.models.helpers.saving import save_diffusion, save_weights


def bytes_at(place) -> bytes:
    return place.file.read_bytes()[place.offset : place.offset + place.nbytes]


def assert_same_bytes(places: Places, on_meta: nn.Module, values: nn.Module) -> None:
    named = dict(values.named_parameters())
    names = {parameter: name for name, parameter in on_meta.named_parameters()}
    for parameter, (place,) in ((p, found) for p, found in places.found.items() if p in names):
        expected = named[names[parameter]].detach().contiguous().view(-1).view(torch.uint8)
        assert bytes_at(place) == bytes(expected.tolist()), names[parameter]


def llama(device: str = "cpu") -> Llama:
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(**SIZES)


@pytest.mark.parametrize("shard_bytes", [10_000, 2**30])
def test_places_of_our_own_model_with_an_adapter(tmp_path: Path, shard_bytes: int):
    model, on_meta = llama(), llama("meta")
    save_weights(model, tmp_path / "w", max_shard_bytes=shard_bytes)
    base = list(on_meta.parameters())
    inject(on_meta, Lora(rank=2, alpha=4), torch.float32)
    with without_adapters(on_meta):
        places = find_places(on_meta, tmp_path / "w")
        assert set(places.found) >= set(base)
        assert not places.reasons
        assert_same_bytes(places, on_meta, model)


def test_another_dtype_has_no_place(tmp_path: Path):
    save_weights(llama().bfloat16(), tmp_path / "w")
    on_meta = llama("meta")
    places = find_places(on_meta, tmp_path / "w")
    assert not places.found
    assert set(places.reasons.values()) == {"are BF16 in the files, and torch.float32 here"}


def test_places_of_transformers_and_what_is_made_of_several(tmp_path: Path):
    for name in ("llama", "mixtral"):
        model, on_meta = tiny(name), tiny(name, "meta")
        model.hf.save_pretrained(tmp_path / name)
        places = find_places(on_meta, tmp_path / name)
        assert_same_bytes(places, on_meta, model)
        assert set(places.found) | set(places.reasons) >= set(on_meta.parameters())
        several = [n for n, p in on_meta.named_parameters() if p in places.reasons]
        assert bool(several) == (name == "mixtral")
        assert all("experts" in n for n in several)


def test_places_of_diffusers(tmp_path: Path):
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8}
    model = build_diffusion("DiTTransformer2DModel", sizes)
    with torch.device("meta"):
        on_meta = build_diffusion("DiTTransformer2DModel", sizes)
    save_diffusion(model, tmp_path / "w")
    places = find_places(on_meta, tmp_path / "w")
    assert set(places.found) >= set(on_meta.parameters())
    assert_same_bytes(places, on_meta, model)


def test_quantised_weights_are_in_their_cache(tmp_path: Path):
    model, on_meta = llama(), llama("meta")
    save_weights(model, tmp_path / "w")
    for each in (model, on_meta):
        quantise(each, quantisable(each, ["model.layers"], (), ()), Int8())
    cache = CacheFile.beside(tmp_path / "w", on_meta)
    without = find_places(on_meta, tmp_path / "w", cache)
    weight = on_meta.model.layers[0].mlp.up_proj.weight
    assert "quantised by this run" in without.reasons[weight]
    load_weights(model, tmp_path / "w")
    cache.write(model)
    places = find_places(on_meta, tmp_path / "w", cache)
    assert not places.reasons
    inner = model.model.layers[0].mlp.up_proj.weight.inner.values()
    expected = [bytes(part.contiguous().view(-1).view(torch.uint8).tolist()) for part in inner]
    assert [bytes_at(place) for place in places.found[weight]] == expected
