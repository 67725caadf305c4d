"""Weights loaded from and saved to safetensors files, and checkpoints that do not fit."""

import json
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from models.initialise import initialise
from models.llama import Llama
from models.weights import load_weights, weight_files
from tests.models.helpers.hugging_face import HUGGING_FACE_SHAPES, SIZES
from tests.models.helpers.saving import save_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def make_model(seed=0, dtype=torch.float32, **changes) -> Llama:
    model = Llama(**{**SIZES, **changes}).to(dtype)
    initialise(model, seed)
    return model


def hugging_face_tensors(dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in HUGGING_FACE_SHAPES.items()}


def write_shards(folder, tensors, count=3):
    names = list(tensors)
    weight_map = {}
    for i in range(count):
        file_name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::count]}, folder / file_name)
        weight_map.update(dict.fromkeys(names[i::count], file_name))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def assert_holds(model, tensors):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name].to(parameter.dtype)), name


def assert_refused(path, *patterns, model=None, error=ValueError):
    """Asserts that loading `path` fails with one line that has every pattern, and leaves the model unchanged."""
    model = model or make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error) as refusal:
        load_weights(model, path)
    message = str(refusal.value)
    assert "\n" not in message
    for pattern in patterns:
        assert str(pattern) in message
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_loads_one_file_converting_the_dtype(tmp_path, stored, wanted):
    tensors = hugging_face_tensors(stored)
    save_file(tensors, tmp_path / "anything.safetensors")
    model = make_model(dtype=wanted)
    load_weights(model, tmp_path / "anything.safetensors")
    assert_holds(model, tensors)


def test_loads_sharded_folder_its_index_and_a_folder_without_index(tmp_path):
    tensors = hugging_face_tensors()
    write_shards(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    for path in (tmp_path, str(tmp_path), index):
        model = make_model()
        load_weights(model, path)
        assert_holds(model, tensors)
    index.unlink()
    load_weights(model := make_model(), tmp_path)
    assert_holds(model, tensors)


def test_loads_in_place_into_views_of_one_flat_buffer(tmp_path):
    tensors = hugging_face_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    model = make_model()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    load_weights(model, tmp_path)
    assert torch.equal(flat, torch.cat([tensors[name].flatten() for name, _ in model.named_parameters()]))

    save_weights(model, tmp_path / "saved")
    assert_holds(model, load_file(tmp_path / "saved" / "model.safetensors"))
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 1.2 * flat.nbytes


def test_model_with_buffers_scalars_and_empty_tensors(tmp_path):
    def make():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.nothing = nn.Parameter(torch.empty(0, 4))
        return model

    saved, loaded = make(), make()
    saved(torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        saved.scale.fill_(3)
    save_weights(saved, tmp_path / "saved")
    load_weights(loaded, tmp_path / "saved")
    assert loaded[1].num_batches_tracked == 1
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_rotary_constants_of_old_checkpoints_are_skipped(tmp_path):
    tensors = hugging_face_tensors()
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "a.safetensors")
    model = make_model()
    load_weights(model, tmp_path)
    assert_holds(model, tensors)


@pytest.mark.parametrize("max_shard_bytes", [1, 10_000, 2**30])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path, dtype, tied, max_shard_bytes):
    saved = make_model(seed=1, dtype=dtype, tie_word_embeddings=tied)
    folder = tmp_path / "out" / "weights"
    save_weights(saved, folder, max_shard_bytes)
    loaded = make_model(seed=2, dtype=dtype, tie_word_embeddings=tied)
    load_weights(loaded, folder)
    assert_holds(loaded, saved.state_dict())


def test_saved_names_and_shapes_are_hugging_faces(tmp_path):
    save_weights(make_model(), tmp_path / "whole")
    assert [file.name for file in (tmp_path / "whole").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "whole" / "model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == HUGGING_FACE_SHAPES

    save_weights(make_model(), tmp_path / "cut", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(HUGGING_FACE_SHAPES)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in make_model().parameters())
    files = {file.name for file in (tmp_path / "cut").glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    assert files == {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))}
    for file in files:
        tensors = load_file(tmp_path / "cut" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000
        assert {index["weight_map"][name] for name in tensors} == {file}


def test_tied_parameters_are_stored_once(tmp_path):
    save_weights(make_model(tie_word_embeddings=True), tmp_path / "tied")
    assert set(load_file(tmp_path / "tied" / "model.safetensors")) == set(HUGGING_FACE_SHAPES) - {HEAD}


def test_tied_model_takes_either_name_or_both_where_they_are_equal(tmp_path):
    tensors = hugging_face_tensors()
    value = tensors[EMBEDDING]
    for i, names in enumerate([(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)]):
        others = {name: t for name, t in tensors.items() if name not in (EMBEDDING, HEAD)}
        save_file({**others, **{name: value.clone() for name in names}}, tmp_path / f"{i}.safetensors")
        model = make_model(tie_word_embeddings=True)
        load_weights(model, tmp_path / f"{i}.safetensors")
        assert torch.equal(model.lm_head.weight, value)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_model_refuses_a_head_of_its_own(tmp_path):
    write_shards(tmp_path, hugging_face_tensors())
    assert_refused(
        tmp_path,
        HEAD,
        EMBEDDING,
        "take model.tie_word_embeddings=false",
        "model.overrides={tie_word_embeddings: false}",
        model=make_model(tie_word_embeddings=True),
    )


def test_untied_model_refuses_a_tied_checkpoint(tmp_path):
    save_weights(make_model(tie_word_embeddings=True), tmp_path / "tied")
    assert_refused(
        tmp_path / "tied",
        tmp_path,
        HEAD,
        "take model.tie_word_embeddings=true",
        "model.overrides={tie_word_embeddings: true}",
    )


@pytest.mark.parametrize(
    ("edit", "patterns"),
    [
        (lambda t: t.update({UP: torch.zeros(48, 31)}), (UP, (48, 31), (48, 32), "choose the model")),
        (lambda t: [t.pop("model.norm.weight"), t.pop(UP)], (f"{UP} (and 1 more)", "choose the model")),
        (lambda t: t.update({f"{UP[:-6]}bias": torch.zeros(48)}), ("model.safetensors", f"{UP[:-6]}bias")),
        (
            lambda t: t.update({HEAD: torch.zeros(50, 32, dtype=torch.int8)}),
            (HEAD, "I8", "torch.float32", "not quantised"),
        ),
    ],
    ids=["shape", "missing", "unknown", "quantised"],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, edit, patterns):
    tensors = hugging_face_tensors()
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_refused(tmp_path, *patterns)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x80\x04K\x01.", b"\xff" * 100], ids=["empty", "json", "pickle", "x"]
)
def test_foreign_file_is_refused(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert_refused(file, file, "safetensors", "convert")


def test_torch_pickle_is_refused_unread(tmp_path):
    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(Touch()))
    assert_refused(file, file, "convert it to safetensors")
    assert not (tmp_path / "ran").exists()


def test_nothing_there_is_refused(tmp_path):
    assert_refused(tmp_path / "none", tmp_path / "none", "does not exist", error=FileNotFoundError)
    assert_refused(tmp_path, tmp_path, "contains no .safetensors file")


def test_missing_shard_is_refused(tmp_path):
    write_shards(tmp_path, hugging_face_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert_refused(tmp_path, "model-00002-of-00003.safetensors is missing")


def test_shard_that_lacks_what_the_index_promises_is_refused(tmp_path):
    weight_map = write_shards(tmp_path, hugging_face_tensors())
    write_index(tmp_path, {**weight_map, HEAD: "model-00001-of-00003.safetensors"})
    assert weight_map[HEAD] != "model-00001-of-00003.safetensors"
    assert_refused(tmp_path, "model-00001-of-00003.safetensors", HEAD)


@pytest.mark.parametrize("file_name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", "x.bin", ""])
def test_index_may_name_files_of_its_own_folder_only(tmp_path, file_name):
    folder = tmp_path / "checkpoint"
    (folder / "a").mkdir(parents=True)
    for place in (tmp_path, folder / "a"):
        save_file(hugging_face_tensors(), place / "x.safetensors")
    write_index(folder, dict.fromkeys(HUGGING_FACE_SHAPES, file_name))
    assert_refused(folder, "model.safetensors.index.json", repr(file_name))


@pytest.mark.parametrize(
    "content", ["not json", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}']
)
def test_broken_index_is_refused(tmp_path, content):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    assert_refused(tmp_path, index)


def test_an_index_of_any_size_is_not_read(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 2**40)
    assert_refused(tmp_path, f"{index} has {2**40} bytes, too many for an index")


def test_meta_parameters_are_refused(tmp_path):
    save_weights(make_model(), tmp_path / "saved")
    with torch.device("meta"):
        model = Llama(**SIZES)
    with pytest.raises(ValueError, match="meta device"):
        load_weights(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="meta device"):
        weight_files(model, max_shard_bytes=2**30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_round_trip(tmp_path):
    saved = make_model(seed=1, dtype=torch.bfloat16).cuda()
    save_weights(saved, tmp_path / "saved", max_shard_bytes=10_000)
    loaded = make_model(seed=2).cuda()
    load_weights(loaded, tmp_path / "saved")
    for a, b in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.float(), b)
